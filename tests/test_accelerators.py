"""The plan beside what the compilers of three accelerators made of the same steps: the figures that
are saved."""

import statistics
import sys

import jax
import pytest
from test_benchmarks import ROOT, load

pytestmark = pytest.mark.long


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


@pytest.mark.parametrize("family", ["plain", "remat", "zero", "pipeline"])
@pytest.mark.parametrize("target", ["v5e:2x2", "v5p:2x2x1", "4 x h100"])
def test_arguments_bytes_sent_and_peaks(bench, rows, target, family):
    """All rows. Only three habits of each compiler are fitted to them (`plan.compiler_copies`)."""
    rows = [row for row in rows if (row["target"], row["family"]) == (target, family)]
    with jax.numpy_dtype_promotion("standard"), jax.enable_x64(False):
        plans = [(row, bench.predicted(row)) for row in rows]
    for row, found in plans:
        assert found["arguments"] == row["unpadded"], row["layout"]
        assert found["sent"] == row["sent"], row["layout"]
        # A TPU pads some arguments to its tiles; their own bytes are the plan's.
        assert row["unpadded"] <= row["memory"]["arguments"], row["layout"]
        assert row["unpadded"] == row["memory"]["arguments"] or target.startswith("v5"), row[
            "layout"
        ]
    off = [abs(found["peak"] / bench.held(row) - 1) for row, found in plans]
    assert statistics.median(off) <= 0.15
    assert max(off) <= 0.35
