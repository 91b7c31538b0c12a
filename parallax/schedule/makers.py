"""Pipeline schedules: each function makes a checked table of which job each of P stages runs in each tick (see `Schedule`).

The legend: P stages, M microbatches, v chunks a stage, F forward, B backward, I input gradient, W weight gradient.

    >>> table = one_f_one_b_lockstep(stages=4, microbatches=16)
    >>> table.makespan(forward=1, backward=2), table.bubble(forward=1, backward=2), table.in_flight.tolist()
    (57.0, 9.0, [7.0, 5.0, 3.0, 1.0])

A schedule of your own is a `Schedule` of your own tables, or a CSV file (`from_csv`).
"""

import numpy as np
from jaxtyping import Int, Int32

from parallax.schedule.table import Schedule


def gpipe(stages: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards, the last microbatch first: every stage holds M microbatches, the bubble is (P-1)(F+B).

    It is the order in which `jax.grad` walks back through a scan over forward ticks (arXiv 1811.06965).

    Raises:
        ValueError: a size below 1 or that is no whole number, or a table of more than 2^26 cells.
    """
    P, M = stages, microbatches
    ticks = _checked_ticks(P, M)
    m, s = np.ogrid[:M, :P]
    return Schedule(
        _table(ticks, P, (m + s, s, m)),
        _table(ticks, P, (M + P - 1 + (M - 1 - m) + P - 1 - s, s, m)),
    )


def one_f_one_b_lockstep(stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """One forward, one backward a tick: the bubble is (P-1)(F+B)/v, and memory does not depend on M.

    Stage s holds at most P + (P-1-2s)/v microbatches; with one chunk that is 2(P-1-s) + 1. With more, microbatches go around the
    ring in groups of P, and the v-fold smaller bubble is paid with v times as many exchanges (arXiv 2104.04473). Where M is no
    multiple of P, the places that the last group leaves empty add (P - M mod P)(v-1)(F+B)/v. Ticks, where it is one:
    M v + (v+1)P - 2.

    Raises:
        ValueError: a size below 1 or that is no whole number, or a table of more than 2^26 cells.
    """
    P, M, v = stages, microbatches, chunks
    ticks = _checked_ticks(P, M, v)
    return Schedule(
        _table(ticks, P, _forwards(P, M, v)), _table(ticks, P, _backwards(P, M, v)), chunks=v
    )


def zero_bubble_lockstep(stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """1F1B with the backward taken apart into I and W: the bubble is (P-1)(F+I)/v, for W runs in full ticks only.

    Weight gradients need no exchange, so stage s lets W lag s ticks behind I, and W runs on all stages in the same M v ticks.
    The lag is paid in memory: stage s holds residuals of up to P + (P-1-s)/v microbatches, no more than 1F1B's first stage
    (arXiv 2401.10241).

    Raises:
        ValueError: as `one_f_one_b_lockstep` does.
    """
    P, M, v = stages, microbatches, chunks
    ticks = _checked_ticks(P, M, v)
    tick, s, job = backward = _backwards(P, M, v)
    lanes = _forwards(P, M, v), backward, (tick + s, s, job)
    return Schedule(*(_table(ticks, P, lane) for lane in lanes), chunks=v)


MOST = 2**26  # cells of a lane's table: 268 MB, which some seconds make and check


def _checked_ticks(stages: int, microbatches: int, chunks: int | None = None) -> int:
    """The ticks of a schedule: of 1F1B and its kin with these chunks, or with None of GPipe. Refuses what has no table."""
    sizes = {"stages": stages, "microbatches": microbatches} | (
        {} if chunks is None else {"chunks": chunks}
    )
    checked_sizes(**sizes)
    P, M, v = int(stages), int(microbatches), int(chunks or 1)
    ticks = (
        2 * (M + P - 1) if chunks is None else (M - 1) // P * v * P + (M - 1) % P + 2 * v * P - 1
    )
    if ticks * P > MOST:
        asked = ", ".join(f"{name}={size}" for name, size in sizes.items())
        raise ValueError(
            f"A schedule of {asked} has a table of {ticks:,} ticks x {P} stages, more than {MOST:,} cells. Take fewer "
            "microbatches, and add up the rest outside: grads.accumulated(pipeline.value_and_grad(...), microbatches=...)."
        )
    return ticks


def checked_sizes(**sizes: int) -> tuple[int, ...]:
    """The sizes of a schedule; refused with a `ValueError` where one is no whole number of at least 1."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int | np.integer):
            raise ValueError(
                f"A schedule needs {name} as a whole number, got {name}={size!r}. Write it as an int."
            )
        if size < 1:
            raise ValueError(f"A schedule needs {name} of at least 1, got {name}={size}.")
    return tuple(int(size) for size in sizes.values())


Jobs = tuple[
    Int[np.ndarray, "..."], Int[np.ndarray, "..."], Int[np.ndarray, "..."]
]  # ticks, stages, jobs, to be broadcast


def _forwards(P: int, M: int, v: int) -> Jobs:
    """Groups of P microbatches pass chunk 0 of all stages, then chunk 1 right behind, and so on."""
    m, c, s = np.ogrid[:M, :v, :P]
    return m // P * v * P + c * P + m % P + s, s, m * v + c


def _backwards(P: int, M: int, v: int) -> Jobs:
    """The same walk from the other end, which the first microbatch's loss sets off in its own tick."""
    m, c, s = np.ogrid[:M, :v, :P]
    return v * P - 1 + m // P * v * P + (v - 1 - c) * P + m % P + P - 1 - s, s, m * v + c


def _table(ticks: int, stages: int, jobs: Jobs) -> Int32[np.ndarray, "ticks stages"]:
    table = np.full((ticks, stages), -1, np.int32)
    table[jobs[0], jobs[1]] = jobs[2]
    return table
