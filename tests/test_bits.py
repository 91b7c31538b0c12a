"""What is about bits, in processes that compile as users do: the tests marked `bits`."""

import os
import subprocess
import sys
from pathlib import Path

import flags
import pytest

FOLDER = Path(__file__).parent
MARK = "pytest.mark.bits"
FILES = sorted(path for path in FOLDER.glob("test_*.py") if MARK in path.read_text() and path != Path(__file__))


PROCESSES = {"one half": ("not slow", FILES[0::2]), "the other": ("not slow", FILES[1::2]), "long": ("slow", FILES)}


@pytest.mark.parametrize("name", ["one half", "the other", pytest.param("long", marks=pytest.mark.slow)])
def test_bits_as_users_compile(name, pytestconfig):
    (speed, files), option = PROCESSES[name], pytestconfig.option
    sweep = ["--sweep-all"] if option.sweep_all else ["--sweep-seed", str(option.sweep_seed)]
    marks = f"bits and {speed} and not parity and not faults"
    command = [sys.executable, "-m", "pytest", *files, "-m", marks, "--users-flags", *sweep]
    command += ["-q", "-n", "0", "-p", "no:cacheprovider"]
    environment = os.environ | flags.of_users()
    done = subprocess.run(command, cwd=FOLDER.parent, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
