"""README.md's first program runs as it stands, and prints what stands under it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"


@pytest.mark.programs
def test_the_first_program_runs_as_it_stands():
    """Eight devices print the loss and the gradient of one, as the page shows them."""
    blocks = re.search(
        r"```python\n(import.*?)```\n\n```text\n(.*?)```", README.read_text(), re.DOTALL
    )
    assert blocks
    program, shown = blocks.groups()
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == shown
    one, eight = (line.partition(": ")[2] for line in shown.splitlines())
    assert one == eight
