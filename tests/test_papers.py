"""The published rows are what the papers' tables say, and the fit finds factors that are there."""

import math
import sys
from pathlib import Path

import numpy as np
import pytest
from test_benchmarks import load

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def papers():
    """The script as a module; it imports its neighbour."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        yield load("papers")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


def test_rows(papers):
    """At least 24; parameters and devices are those that the tables name; two days of GPT-3 are what table 2 says."""
    rows = papers.rows()
    assert len(rows) >= 24
    for row in rows:
        billions = float(row.source.split(": ")[1].split(" B")[0].replace("PaLM ", ""))
        # Of PaLM the feed-forward is gated, which a GPT-2 is not.
        assert math.isclose(row.config.parameters / 1e9, billions, rel_tol=0.12 if "PaLM" in row.source else 0.05), row.source
    (first,) = (row for row in rows if "table 2" in row.source and row.devices == 384 and "ZeRO" not in row.source)
    tokens = 300e9 / (first.batch * 2048)
    assert tokens * first.seconds / 86_400 == pytest.approx(84, rel=0.02)  # days for 300 billion tokens, in the same table


def test_the_largest_is_planned(papers):
    """530 B: 105 layers in 35 stages of 3 chunks, the vocabulary padded to what 280 devices divide."""
    row = next(row for row in papers.rows() if "table 5: 530 B, selective" in row.source)
    found = papers.planned(row)
    assert (found.layout.stage, found.layout.chunks, row.config.layers) == (35, 3, 105)
    assert 0.8 < found.parts.sum() / row.seconds < 1.6


def test_the_fit_finds_what_is_there(papers):
    draw = np.random.default_rng(0)
    parts = draw.uniform(0.5, 2, size=(20, 4))
    factors = np.array([0.85, papers.OTHERS[20], papers.OTHERS[40], 1.0])
    np.testing.assert_allclose(papers.fit(parts, parts @ factors), factors)
