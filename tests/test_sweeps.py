"""What a run leaves out of a sweep, the next ones take."""

import subprocess
import sys
from typing import NamedTuple

import pytest
from conftest import drawn, part


class Case(NamedTuple):
    """A test as `part` sees it."""

    nodeid: str


CASES = [Case(f"tests/test_a.py::test_b[{number}]") for number in range(10)]


@pytest.mark.parametrize("parts", [1, 2, 3, 10, 12])
@pytest.mark.parametrize("first", [0, 1, 500])
def test_successive_seeds_take_every_case_once(parts, first):
    taken = [case for seed in range(first, first + parts) for case in part(CASES, seed, parts)]
    assert sorted(taken) == sorted(CASES)
    assert max(len(part(CASES, seed, parts)) for seed in range(parts)) <= -(-len(CASES) // parts)


def test_a_seed_takes_the_same_cases_in_whatever_order_they_come():
    assert part(CASES, 3, 4) == part(CASES[::-1], 3, 4)


@pytest.mark.parametrize("parts", [1, 2, 3, 10])
def test_a_part_of_all_tests_comes_to_every_case_of_a_sweep(parts):
    for sweep in (1, 2, 4):
        assert {case for seed in range(200) for case in drawn(part(CASES, seed, sweep), seed, parts)} == set(CASES)
    assert len(drawn(CASES, 7, parts)) == -(-len(CASES) // parts)


def test_there_is_no_part_0(pytestconfig):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--part", "0", "--collect-only", "-n", "0", __file__],
        check=False,
        capture_output=True,
        text=True,
        cwd=pytestconfig.rootpath,
    )
    assert done.returncode == 4
    assert "--part needs a number from 1 on: one Nth of the tests; got 0. Leave it out for all." in done.stderr
