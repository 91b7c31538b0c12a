"""What is about bits, in processes that compile as users do: the tests marked `bits`, file by file."""

import os
import subprocess
import sys
from pathlib import Path

import flags
import pytest

FOLDER = Path(__file__).parent
MARK = "pytest.mark.bits"
FILES = sorted(path.name for path in FOLDER.glob("test_*.py") if MARK in path.read_text() and path != Path(__file__))


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("speed", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_bits_as_users_compile(file, speed, pytestconfig):
    option = pytestconfig.option
    sweep = ["--sweep-all"] if option.sweep_all else ["--sweep-seed", str(option.sweep_seed)]
    marks = f"bits and {speed} and not parity and not faults"
    command = [sys.executable, "-m", "pytest", FOLDER / file, "-m", marks, "--users-flags", *sweep]
    command += ["-q", "-n", "0", "-p", "no:cacheprovider"]
    environment = os.environ | flags.of_users()
    done = subprocess.run(command, cwd=FOLDER.parent, env=environment, capture_output=True, text=True, check=False)
    nothing = done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED and speed == "slow"  # the file has none of them
    assert done.returncode == 0 or nothing, done.stdout + done.stderr
    print(done.stdout)
