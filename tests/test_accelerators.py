"""The plan beside what the compilers of three accelerators made of the same steps: the figures that
are saved."""

import statistics
import sys

import pytest
from test_benchmarks import ROOT, load

from parallax.plan import compilers

FAMILIES = ("plain", "remat", "zero", "pipeline")


@pytest.fixture(scope="module")
def bench():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        yield load("accelerators")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


@pytest.fixture(scope="module")
def rows(bench):
    return bench.read(bench.FILE)


def test_arguments_and_bytes_sent_are_equal(bench, rows):
    """A TPU pads some arguments to its tiles; their own bytes are the plan's."""
    for row in rows:
        found = bench.predicted(row)
        assert found["arguments"] == row["unpadded"], row["layout"]
        assert found["sent"] == row["sent"], row["layout"]
        assert row["unpadded"] <= row["memory"]["arguments"], row["layout"]
        assert row["unpadded"] == row["memory"]["arguments"] or row["target"].startswith("v5"), row[
            "layout"
        ]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["XLA_V5E", "XLA_V5P", "XLA_H100"])
def test_peaks_of_the_half_that_was_not_fitted(bench, rows, name, family):
    _, scored = bench.halves([row for row in rows if row["target"] == bench.COMPILERS[name]])
    off = [
        abs(one)
        for one in bench.off(
            [row for row in scored if row["family"] == family], getattr(compilers, name)
        )
    ]
    assert statistics.median(off) <= 0.15
    assert max(off) <= 0.35
