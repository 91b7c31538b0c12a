"""The GPU benchmark's sides run on the CPU at a tiny size, and without a GPU it says what it
needs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent


def run(*flags, **options):
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        "JAX_PLATFORMS": "cpu",
    }
    command = [sys.executable, ROOT / "benchmarks" / "gpu.py", *flags]
    return subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        **options,
    )


@pytest.mark.programs
@pytest.mark.long
def test_our_side_runs():
    ran = run("--smoke", "--rounds=2", "--batch=3")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    for words in ("3 x 16 tokens a step", "measured matrix rate", "tokens/s", "ours"):
        assert words in ran.stdout, ran.stdout


@pytest.mark.programs
def test_without_a_gpu_it_says_what_it_needs():
    ran = run()
    assert ran.returncode == 2
    assert ran.stdout == ""
    assert ran.stderr.startswith("benchmarks/gpu.py needs a GPU that JAX can use")
    assert "--smoke" in ran.stderr


@pytest.mark.parity
def test_both_sides_learn_the_same_batch():
    for side in ("ours", "PyTorch"):
        ran = run("--smoke", f"--serve={side}", input=8 * "\n")
        assert ran.returncode == 0, ran.stdout + ran.stderr
        losses = [json.loads(line)["loss"] for line in ran.stdout.splitlines()]
        np.testing.assert_allclose(losses[0], np.log(128), rtol=0.05)  # fresh weights know nothing
        assert losses[-1] < losses[0] - 0.05, side
