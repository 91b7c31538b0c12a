"""All tests of the repository, as pytest collects them: once, for the checks that need them."""

import functools
import subprocess
import sys
from typing import NamedTuple

from doc_pages import ROOT

PROGRAM = """
import sys

import pytest


class Printer:
    def pytest_collection_finish(self, session):
        for item in session.items:
            sweep = item.get_closest_marker("sweep")
            arguments = repr(sweep.args) if sweep else ""
            marks = sorted({mark.name for mark in item.iter_markers()})
            print("\\t".join(["collected", item.nodeid, arguments, *marks]))


options = "-q --collect-only -n 0 -p no:cacheprovider --all --users-flags".split()
sys.exit(pytest.main([*options, "-m", ""], plugins=[Printer()]))
"""


class Test(NamedTuple):
    """A test as pytest knows it, with the names of its marks and the arguments of its `sweep`."""

    nodeid: str
    sweep: tuple
    marks: frozenset[str]


@functools.cache
def tests() -> list[Test]:
    """Every case of every test."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], check=False, capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = [
        line.split("\t") for line in done.stdout.splitlines() if line.startswith("collected\t")
    ]
    return [Test(name, eval(sweep or "()"), frozenset(marks)) for _, name, sweep, *marks in lines]
