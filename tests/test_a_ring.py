"""The first example runs as it stands, and what it prints after each hop is a ring."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "01_a_ring.py"


@pytest.mark.programs
def test_the_ring_hop_by_hop():
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, EXAMPLE],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    frames = [
        re.findall(r"^device \d  (.*)$", frame, re.MULTILINE) for frame in done.stdout.split("\n\n")
    ]
    frames = [
        [[set(who) - {"."} for who in row.split()] for row in frame] for frame in frames if frame
    ]
    n, everyone = 8, set("ABCDEFGH")
    assert len(frames) == 1 + 2 * (n - 1)
    assert all(len(frame) == n and all(len(row) == n for row in frame) for frame in frames)
    for h in range(n):  # the sum of block j left device j, and gained a letter a hop
        assert all(
            frames[h][(j + h) % n][j] == {"ABCDEFGH"[(j + k) % n] for k in range(h + 1)}
            for j in range(n)
        )
    for h in range(n):  # one more device a hop has the whole sum
        assert all(sum(row[j] == everyone for row in frames[n - 1 + h]) == h + 1 for j in range(n))
