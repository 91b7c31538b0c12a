"""Pipeline schedules: each function makes a checked table of which job each of P stages runs in each tick (see `Schedule`).

The legend: P stages, M microbatches, v chunks a stage, F forward, B backward, I input gradient, W weight gradient.

    >>> table = one_f_one_b(stages=4, microbatches=16)
    >>> table.makespan(forward=1, backward=2), table.bubble(forward=1, backward=2), table.in_flight.tolist()
    (57.0, 9.0, [7.0, 5.0, 3.0, 1.0])

A schedule of your own is a `Schedule` of your own tables, or a CSV file (`from_csv`).
"""

import itertools
from collections.abc import Iterable

import numpy as np
from jaxtyping import Int32

from parallax.schedule.table import Schedule


def gpipe(stages: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards, the last microbatch first: every stage holds M microbatches, the bubble is (P-1)(F+B).

    It is the order in which `jax.grad` walks back through a scan over forward ticks (arXiv 1811.06965).

    Raises:
        ValueError: a size below 1.
    """
    _check_sizes(stages, microbatches)
    P, M = stages, microbatches
    forward = ((m + s, s, m) for s in range(P) for m in range(M))
    backward = ((M + P - 1 + (M - 1 - m) + P - 1 - s, s, m) for s in range(P) for m in range(M))
    ticks = 2 * (M + P - 1)
    return Schedule(_table(ticks, P, forward), _table(ticks, P, backward))


def one_f_one_b(stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """One forward, one backward a tick: the bubble is (P-1)(F+B)/v, and memory does not depend on M.

    Stage s holds at most P + (P-1-2s)/v microbatches; with one chunk that is 2(P-1-s) + 1. With more, microbatches go around the
    ring in groups of P, so M must divide by P, and the v-fold smaller bubble is paid with v times as many exchanges
    (arXiv 2104.04473). Ticks: M v + (v+1)P - 2.

    Raises:
        ValueError: a size below 1, or several chunks and an M that does not divide by P.
    """
    _check_sizes(stages, microbatches, chunks)
    P, M, v = stages, microbatches, chunks
    ticks = M * v + (v + 1) * P - 2
    return Schedule(_table(ticks, P, _forwards(P, M, v)), _table(ticks, P, _backwards(P, M, v)), chunks=v)


def zero_bubble(stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """1F1B with the backward taken apart into I and W: the bubble is (P-1)(F+I)/v, for W runs in full ticks only.

    Weight gradients need no exchange, so stage s lets W lag s ticks behind I, and W runs on all stages in the same M v ticks.
    The lag is paid in memory: stage s holds residuals of up to P + (P-1-s)/v microbatches, no more than 1F1B's first stage
    (arXiv 2401.10241).

    Raises:
        ValueError: a size below 1, or several chunks and an M that does not divide by P.
    """
    _check_sizes(stages, microbatches, chunks)
    P, M, v = stages, microbatches, chunks
    ticks = M * v + (v + 1) * P - 2
    weight = ((tick + s, s, job) for tick, s, job in _backwards(P, M, v))
    forward, backward = _forwards(P, M, v), _backwards(P, M, v)
    return Schedule(_table(ticks, P, forward), _table(ticks, P, backward), _table(ticks, P, weight), chunks=v)


def _check_sizes(stages: int, microbatches: int, chunks: int = 1) -> None:
    for name, size in (("stages", stages), ("microbatches", microbatches), ("chunks", chunks)):
        if size < 1:
            raise ValueError(f"A schedule needs {name} of at least 1, got {name}={size}.")
    below = microbatches // stages * stages
    if chunks > 1 and below != microbatches:
        nearest = f"{below} or {below + stages}" if below else f"{stages}"
        raise ValueError(
            f"With chunks={chunks}, microbatches must divide by stages={stages}, got {microbatches}. "
            f"Take {nearest} microbatches, or chunks=1."
        )


def _forwards(P: int, M: int, v: int) -> Iterable[tuple[int, int, int]]:
    """(tick, stage, job): groups of P microbatches pass chunk 0 of all stages, then chunk 1 right behind, and so on."""
    for m, c, s in itertools.product(range(M), range(v), range(P)):
        yield m // P * v * P + c * P + m % P + s, s, m * v + c


def _backwards(P: int, M: int, v: int) -> Iterable[tuple[int, int, int]]:
    """(tick, stage, job): the same walk from the other end, which the first microbatch's loss sets off in its own tick."""
    for m, c, s in itertools.product(range(M), range(v), range(P)):
        yield v * P - 1 + m // P * v * P + (v - 1 - c) * P + m % P + P - 1 - s, s, m * v + c


def _table(ticks: int, stages: int, jobs: Iterable[tuple[int, int, int]]) -> Int32[np.ndarray, "ticks stages"]:
    table = np.full((ticks, stages), -1, np.int32)
    for tick, stage, job in jobs:
        assert table[tick, stage] == -1
        table[tick, stage] = job
    return table
