"""The examples' programs have none of the mistakes that the lint knows."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
EXAMPLES = TESTS.parent / "examples"
ELSEWHERE = {"wrong_on_purpose.py"}  # says so
MAPPED = [
    path.name
    for path in sorted(EXAMPLES.glob("*.py"))
    if "mesh.spmd(" in path.read_text() and path.name not in ELSEWHERE
]


@pytest.mark.programs
@pytest.mark.sweep(3)
@pytest.mark.long
@pytest.mark.parametrize("example", MAPPED)
def test_the_example_is_silent(example, tmp_path):
    environment = os.environ | {
        "PYTHONPATH": str(TESTS.parent),
        "JAX_PLATFORMS": "cpu",
        "MPLBACKEND": "agg",
    }
    command = [sys.executable, TESTS / "lint_example.py", EXAMPLES / example]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "lint: nothing found." in done.stdout
