"""Batches made in the background: in order, each row read once, and what goes wrong arrives where
it belongs."""

import threading
import time

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from parallax import data, mesh
from parallax.data import prefetch

TOKENS = np.random.default_rng(0).integers(0, 300, 1000)


@pytest.mark.parametrize(
    ("spec", "readings"),
    [(P("data"), 4), (P(("data", "tensor")), 8), (P(), 1), (P("tensor"), 2)],
    ids=str,
)
def test_each_row_is_read_once_and_where_it_belongs(monkeypatch, spec, readings):
    read = []
    real = prefetch.batch
    monkeypatch.setattr(
        prefetch,
        "batch",
        lambda *given, **options: read.append(options["rows"]) or real(*given, **options),
    )
    sharding = mesh.shardings(spec, mesh.make(data=4, tensor=2))
    found = prefetch.placed(TOKENS, sharding, seed=3, step=5, size=8, length=12)
    np.testing.assert_array_equal(found, real(TOKENS, seed=3, step=5, size=8, length=12))
    assert found.sharding == sharding
    assert len(read) == readings
    assert sorted(row for rows in read for row in range(8)[rows]) == list(range(8))


def test_all_come_in_order():
    with prefetch.Prefetched(lambda step: step * step, 3, 9) as batches:
        assert list(batches) == [9, 16, 25, 36, 49, 64]
        assert list(batches) == []


def test_as_many_are_made_ahead_as_was_said():
    made = []
    with prefetch.Prefetched(lambda step: made.append(step) or step, 0, 100, ahead=3) as batches:
        assert next(batches) == 0
        time.sleep(0.5)
        assert len(made) <= 5  # one taken, three in the queue, one in hand


def test_an_error_comes_at_its_step_and_stays():
    def make(step):
        if step == 2:
            raise OSError("a bad disk")
        return step

    with prefetch.Prefetched(make, 0, 5) as batches:
        assert [next(batches), next(batches)] == [0, 1]
        for _ in range(2):
            with pytest.raises(OSError, match="a bad disk"):
                next(batches)


def test_data_that_end_before_the_last_step_are_an_error():
    """`make` takes its batches from an iterator, which ends by a `StopIteration` of its own."""
    ended = iter([10, 11])
    with prefetch.Prefetched(lambda step: next(ended), 3, 9) as batches:
        assert [next(batches), next(batches)] == [10, 11]
        for _ in range(2):
            with pytest.raises(ValueError, match=r"from 3 to 8; make\(5\) raised StopIteration"):
                next(batches)


def test_leaving_ends_the_thread():
    with prefetch.Prefetched(lambda step: step, 0, 1000):
        assert [thread.name for thread in threading.enumerate()].count("prefetch") == 1
    assert "prefetch" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.timeout(60)
def test_a_batch_after_the_block_is_refused():
    with prefetch.Prefetched(lambda step: step, 0, 1000) as batches:
        assert next(batches) == 0
    with pytest.raises(ValueError, match="no batches after its `with` block"):
        list(batches)


def test_ahead_is_checked():
    with pytest.raises(ValueError, match="ahead >= 1; got 0"):
        prefetch.Prefetched(lambda step: step, 0, 1, ahead=0)


def test_batches_of_the_devices():
    sharding = mesh.shardings(P("data"), mesh.make(data=8))
    make = lambda step: prefetch.placed(TOKENS, sharding, seed=0, step=step, size=8, length=5)
    with prefetch.Prefetched(make, 0, 4) as batches:
        for step, found in enumerate(batches):
            assert isinstance(found, jax.Array)
            np.testing.assert_array_equal(
                found, data.batch(TOKENS, seed=0, step=step, size=8, length=5)
            )


@pytest.mark.parity
def test_grain_feeds_a_step():
    """A dataset of Grain, which shuffles and batches the windows of a text: each is seen once."""
    import grain

    length, size, count = 9, 8, 104
    places = np.arange(length + 1)
    windows = grain.MapDataset.range(count).map(
        lambda window: TOKENS[window * length + places].astype(np.int32)
    )
    dataset = windows.shuffle(seed=0).batch(size)
    sharding = mesh.shardings(P("data"), mesh.make(data=8))
    total = jax.jit(lambda batch: batch[:, :-1].sum())
    with prefetch.Prefetched(
        lambda step: jax.device_put(dataset[step], sharding), 0, len(dataset)
    ) as batches:
        sums = [int(total(batch)) for batch in batches]
    assert len(sums) == count // size
    assert sum(sums) == TOKENS[: count * length].sum()
