"""Killed at any moment, a run goes on by the same command, from what it had saved, and leaves
nothing behind."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SCENES = ["checkpoints, new", "checkpoints, resumed", "example, new", "example, resumed"]
EVERY = 16


@pytest.mark.programs
@pytest.mark.sweep(32)
@pytest.mark.parametrize("first", range(1, EVERY + 1))
@pytest.mark.parametrize("scene", SCENES)
def test_killed_at_any_file_operation_the_same_command_goes_on(scene, first, tmp_path):
    """The moments are those of start-up, save, thinning and resume, counted in `killed_run.py`:
    every sixteenth of them."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    }
    command = [
        sys.executable,
        str(TESTS / "killed_run.py"),
        str(tmp_path),
        scene,
        str(first),
        str(EVERY),
    ]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=1200, check=False
    )
    assert done.returncode == 0, done.stderr
    seen = [json.loads(line)["went on from"] for line in done.stdout.splitlines()]
    print(f"{scene}: {len(seen)} kills")
    assert seen == sorted(seen)
    assert len(seen) > 4
    assert seen[0] == (2 if "resumed" in scene else 0)
