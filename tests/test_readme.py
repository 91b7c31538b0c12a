"""The README's program runs as it stands and learns; the whole of it is on the first screen."""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_the_program_runs_as_it_stands():
    program = re.search(r"```python\n(import.*?)```", README.read_text(), re.DOTALL).group(1)
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    assert float(run.stdout.split()[-1]) < 0.2  # the targets' variance is 0.43


def test_the_program_ends_by_line_35():
    text = README.read_text()
    assert text[: text.index('print(f"loss')].count("\n") < 35
