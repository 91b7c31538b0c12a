"""Pipeline schedules in lockstep: each function makes a checked table of the jobs that each of P
stages runs in each tick (see `Schedule`).

The legend: P stages, M microbatches, v chunks per stage, F forward, B backward, I input gradient, W
weight gradient.

    >>> table = one_f_one_b_lockstep(stages=4, microbatches=16)
    >>> costs = dict(forward=1, backward=2)
    >>> table.makespan(**costs), table.bubble(**costs), table.in_flight.tolist()
    (57.0, 9.0, [7.0, 5.0, 3.0, 1.0])

A schedule of your own is a `Schedule` of your own tables, or a CSV file (`from_csv`).
"""

import numpy as np
from jaxtyping import Int

from parallax.schedule.places import looped_placement
from parallax.schedule.table import Schedule

MOST = 2**26  # cells of a lane's table: 268 MB, which take some seconds to make and to check
Jobs = tuple[Int[np.ndarray, "..."], Int[np.ndarray, "..."]]  # ticks and jobs, [..., P]


def gpipe(stages: int, microbatches: int) -> Schedule:
    """Returns all forwards, then all backwards, the last microbatch first: the bubble is
    (P-1)(F+B).

    Every stage holds M microbatches. It is the order in which `jax.grad` goes back through a scan
    over forward ticks (arXiv 1811.06965).

    Raises:
        ValueError: a size is below 1 or is not a whole number, or a table has more than 2^26 cells.
    """
    P, M, _ = _checked(stages=stages, microbatches=microbatches)
    m, s = np.ogrid[:M, :P]
    # The last microbatch's backward starts in the tick after its forward on the last stage.
    return _schedule(P, 1, (m + s, m), (M + P - 1 + (M - 1 - m) + P - 1 - s, m))


def one_f_one_b_lockstep(stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Returns one forward and one backward per tick: the bubble is (P-1)(F+B)/v, and memory does
    not depend on M.

    Stage s holds at most P + (P-1-2s)/v microbatches; with one chunk that is 2(P-1-s) + 1. With
    more, microbatches go around the ring in groups of P, and the v times smaller bubble costs v
    times as many exchanges (arXiv 2104.04473). Where M is no multiple of P, the empty places of the
    last group add (P - M mod P)(v-1)(F+B)/v. Where it is one, there are
    M v + (v+1)P - 2 ticks.

    Raises:
        ValueError: as for `gpipe`.
    """
    P, M, v = _checked(stages=stages, microbatches=microbatches, chunks=chunks)
    return _schedule(P, v, _forwards(P, M, v), _backwards(P, M, v))


def zero_bubble_lockstep(stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Returns 1F1B with separate I and W: the bubble is (P-1)(F+I)/v, for W runs only in full
    ticks.

    Weight gradients need no exchange, so stage s lets W lag s ticks behind I, and W runs on all
    stages in the same M v ticks. The lag costs memory: stage s holds residuals of up to
    P + (P-1-s)/v microbatches, no more than 1F1B's first stage (arXiv 2401.10241).

    Raises:
        ValueError: as for `gpipe`.
    """
    P, M, v = _checked(stages=stages, microbatches=microbatches, chunks=chunks)
    # Stage s ends I earlier than stage 0 by s ticks, so all stages end W together.
    tick, job = _backwards(P, M, v)
    return _schedule(P, v, _forwards(P, M, v), (tick, job), (tick + np.arange(P), job))


def _checked(**sizes: int) -> tuple[int, int, int]:
    """Returns P, M and v; refused with a `ValueError` where their table is too large."""
    P, M, *chunks = checked_sizes(**sizes)
    v = chunks[0] if chunks else 1
    # Before any array is made: a table of 10^9 cells would fill the memory.
    if (M + 2 * P) * v * P > MOST:
        listed = ", ".join(f"{name}={size}" for name, size in sizes.items())
        raise ValueError(
            f"A schedule of {listed} has a table of more than {MOST:,} cells. Use fewer "
            "microbatches, and add up the rest outside: "
            "grads.accumulated(pipeline.value_and_grad(...), microbatches=...)."
        )
    return P, M, v


def checked_sizes(**sizes: int) -> tuple[int, ...]:
    """Returns the sizes of a schedule; refused with a `ValueError` where one is not a whole number
    of at least 1."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int | np.integer):
            raise ValueError(
                f"A schedule needs {name} as a whole number, got {name}={size!r}. Write it as an "
                "int."
            )
        if size < 1:
            raise ValueError(f"A schedule needs {name} of at least 1, got {name}={size}.")
    return tuple(int(size) for size in sizes.values())


def _forwards(P: int, M: int, v: int) -> Jobs:
    """Returns a schedule in which groups of P microbatches pass chunk 0 of all stages, then chunk 1
    right behind, and so on."""
    m, c, s = np.ogrid[:M, :v, :P]
    return m // P * v * P + c * P + m % P + s, m * v + c


def _backwards(P: int, M: int, v: int) -> Jobs:
    """Returns the same way back from the other end; the first microbatch's loss starts it in its
    tick."""
    m, c, s = np.ogrid[:M, :v, :P]
    return v * P - 1 + m // P * v * P + (v - 1 - c) * P + m % P + P - 1 - s, m * v + c


def _schedule(P: int, v: int, *lanes: Jobs) -> Schedule:
    ticks = 1 + max(int(tick.max()) for tick, _ in lanes)
    tables = np.full((len(lanes), ticks, P), -1, np.int32)
    for table, (tick, job) in zip(tables, lanes, strict=True):
        table[tick, np.arange(P)] = job
    return Schedule(*tables, placement=looped_placement(P, v))
