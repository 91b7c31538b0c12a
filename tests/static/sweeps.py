"""Successive seeds take every case of every sweep."""

from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import collected
import conftest

MARKS = {"programs", "long", "sweep", "bits", "parity", "targets"}


class Case:
    """A collected test, as far as `conftest.sweeps` asks it."""

    def __init__(self, test: collected.Test):
        self.nodeid, self._test = test.nodeid, test

    def get_closest_marker(self, name: str) -> Any:
        """The mark of that name, or None."""
        return SimpleNamespace(args=self._test.sweep) if name in self._test.marks else None


def check_thirty_seeds_in_a_row_take_every_case() -> Iterator[str]:
    """Whatever the first seed is; no run takes more than its share of a sweep, rounded up."""
    cases = [Case(test) for test in collected.tests()]
    for first in (0, 7, 1234):
        taken = Counter()
        for seed in range(first, first + conftest.SLICES):
            for sweep in conftest.sweeps(cases):
                chosen = conftest.one_slice(sweep, seed)
                taken.update(case.nodeid for case in chosen)
                if len(chosen) > -(-len(sweep.cases) // sweep.slices):
                    yield (
                        f"seed {seed} takes {len(chosen)} of the {len(sweep.cases)} cases of "
                        f"{sweep.name}"
                    )
        for case in cases:
            if not taken[case.nodeid]:
                yield f"{conftest.SLICES} seeds from {first} on leave out {case.nodeid}"


def check_thirty_seeds_take_some_of_every_tenth() -> Iterator[str]:
    """With users' flags: tests that are not about bits take turns, drawn anew for each seed."""
    cases = [Case(test) for test in collected.tests() if "long" not in test.marks]
    taken = {
        case.nodeid for seed in range(200) for case in conftest.of_bits_and_some_others(cases, seed)
    }
    if left_out := {case.nodeid for case in cases} - taken:
        yield f"200 seeds leave out {len(left_out)} tests, {sorted(left_out)[0]} among them"


def check_marks_are_few() -> Iterator[str]:
    """Every mark of ours is one of six."""
    ours = {"slow", "faults"} | MARKS
    for test in collected.tests():
        if odd := test.marks & ours - MARKS:
            yield f"{test.nodeid} is marked {sorted(odd)}"
