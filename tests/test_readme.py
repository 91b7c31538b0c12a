"""README.md's first program runs as it stands."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"


@pytest.mark.programs
def test_the_first_program_runs_as_it_stands():
    """Eight devices print what one prints: the loss and the gradient."""
    program = re.search(r"```python\n(import.*?)```", README.read_text(), re.DOTALL).group(1)
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode == 0, run.stderr
    one, eight = (
        [float(number) for number in re.findall(r"-?\d+\.\d*", line)] for line in _calls(run.stdout)
    )
    assert len(one) == 5
    np.testing.assert_allclose(one, eight, rtol=1e-5)  # float32


def _calls(printed):
    """What each of the two calls printed; the numbers of an array may take several lines."""
    first, second = printed.split("eight devices")
    return first.removeprefix("one device"), second
