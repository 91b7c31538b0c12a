"""All processes of a job trace the same program: the order of a set of names, which differs between
processes, decides nothing. Otherwise they would send in different orders, and wait for ever."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.programs
def test_processes_with_other_orders_of_sets_lower_the_same_programs():
    started = [
        subprocess.Popen(
            [sys.executable, ROOT / "tests" / "lowered_texts.py"],
            env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": str(seed)},
            stdout=subprocess.PIPE, text=True,
        )
        for seed in (1, 2)
    ]  # fmt: skip
    first, second = [process.communicate(timeout=300)[0].splitlines() for process in started]
    assert [process.returncode for process in started] == [0, 0]
    assert len(first) == 7
    assert first == second
