"""The saved table of compiled steps, and one of its rows compiled anew."""

import sys

import jax
import pytest
from test_benchmarks import ROOT, load

from parallax import sequence
from parallax.layout import Layout
from parallax.models.attention import grouped


@pytest.fixture(scope="module")
def bench():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        yield load("compiled")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


def test_figures_are_of_rows_that_are_there(bench, tmp_path):
    """Each saved row can be compiled again, and takes the place of the old one."""
    rows, names = (
        bench.read(bench.FILE),
        [text.split()[0] for text in bench.ROWS.strip().splitlines()],
    )
    assert rows
    assert {row["row"] for row in rows} <= set(names)
    file = tmp_path / "steps.jsonl"
    for row in [*rows, rows[0] | {"ms": 1.0}]:
        bench.put(row, file)
    assert [row["ms"] for row in bench.read(file) if row["ms"] == 1.0] == [1.0]
    assert len(bench.read(file)) == len(rows)


def test_rows_make_the_choices_that_they_name(bench):
    layout = Layout(data=4, tensor=2, sequence=True)
    plain = bench.choices(layout, "lax", "kernel", 4)
    assert (plain.axes, plain.attention, plain.comms) == ({}, None, None)
    assert bench.choices(layout, "lax", "scores", 4).attention is grouped
    assert bench.choices(layout, "ring", "kernel,made", 4).reduce_in_backward
    rings = bench.choices(layout, "ring", "kernel,matmul", 4)
    names = {name: axis.names for name, axis in rings.axes.items()}
    assert names == {name: name for name in layout.axes}
    assert rings.comms is sequence.overlapping
    assert (plain.unroll, bench.choices(layout, "lax", "kernel,unrolled", 4).unroll) == (None, 4)


@pytest.mark.targets
def test_local_work_does_not_grow(bench):
    """A minute of one core."""
    (saved,) = [
        row
        for row in bench.read(bench.FILE)
        if (row["target"], row["row"]) == ("v5e:2x4", "psum_kernel")
    ]
    (text,) = [text for text in bench.ROWS.strip().splitlines() if text.split()[0] == "psum_kernel"]
    with jax.numpy_dtype_promotion("standard"), jax.enable_x64(False):
        now = bench.figures(bench.compiled("v5e:2x4", text), text)
    assert now["local ms"] <= 1.1 * saved["local ms"]
