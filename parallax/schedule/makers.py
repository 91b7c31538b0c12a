"""Pipeline schedules in lockstep: each function makes a checked table of the jobs that each of P
stages runs in each tick (see `Schedule`).

The legend: P stages, M microbatches, v chunks per stage, F forward, B backward, I input gradient, W
weight gradient. In formulas, F, B, I and W are the times of one microbatch through all chunks of a
stage, and the bubble is the idle time of a stage.

    >>> table = one_f_one_b_lockstep(stages=4, microbatches=16)
    >>> costs = dict(forward=1, backward=2)
    >>> table.makespan(**costs), table.bubble(**costs), table.in_flight.tolist()
    (57.0, 9.0, [7.0, 5.0, 3.0, 1.0])

To make a schedule of your own, pass your tables to `Schedule`, or read a CSV file with `from_csv`.
"""

import numpy as np
from jaxtyping import Int

from parallax.schedule.places import looped_placement
from parallax.schedule.table import Schedule

MOST = 2**26  # cells of a lane's table: 268 MB, which take some seconds to make and to check
# The ticks, [..., P], and the jobs, microbatch * v + chunk, of a lane; the ticks' last dim is the
# stage, and the jobs broadcast to the ticks' shape.
Jobs = tuple[Int[np.ndarray, "..."], Int[np.ndarray, "..."]]


def gpipe(stages: int, microbatches: int) -> Schedule:
    """Returns the schedule of GPipe (arXiv 1811.06965): all forwards, and then all backwards from
    the last microbatch to the first.

    With P stages, the bubble (the idle time of a stage) is (P-1)(F+B). F and B are the times of one
    microbatch's forward and backward pass on a stage. Every stage holds the residuals of all
    microbatches at once. `jax.grad` of a scan over the forward ticks gives the same order, since
    the backward pass of a scan runs the ticks in reverse.

    Raises:
        ValueError: a size is below 1 or is not a whole number, or the schedule's table would have
            more than about 2^26 cells.
    """
    P, M, _ = _checked(stages=stages, microbatches=microbatches)
    m, s = np.ogrid[:M, :P]
    # F of m runs on stage s in tick m + s, so the last F runs in tick M + P - 2, on the last stage.
    # In the next tick the last microbatch's backward begins there; the others follow one by one.
    return _schedule(P, 1, (m + s, m), (M + P - 1 + (M - 1 - m) + P - 1 - s, m))


def one_f_one_b_lockstep(stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Returns the schedule of one forward and one backward per tick, whose memory does not depend
    on the number of microbatches.

    With P stages of v chunks each, the bubble (the idle time of a stage) is (P-1)(F+B)/v. F and B
    are the times of one microbatch's forward and backward pass on a stage. Stage s holds the
    residuals of at most P + (P-1-2s)/v microbatches; for v = 1 that is 2(P-1-s) + 1. With v > 1,
    each group of P microbatches passes all stages v times. The bubble is then v times smaller than
    with one chunk, and there are v times as many exchanges (arXiv 2104.04473). If the number of
    microbatches, M, is a multiple of P, there are M v + (v+1)P - 2 ticks. Otherwise the last group
    is not full, which adds (P - M mod P)(v-1)(F+B)/v to the bubble.

    Raises:
        ValueError: a size is below 1 or is not a whole number, or the schedule's table would have
            more than about 2^26 cells.
    """
    P, M, v = _checked(stages=stages, microbatches=microbatches, chunks=chunks)
    return _schedule(P, v, _forwards(P, M, v), _backwards(P, M, v))


def zero_bubble_lockstep(stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Returns the schedule of `one_f_one_b_lockstep`, but with separate jobs for the input gradient
    (I) and the weight gradient (W), as in arXiv 2401.10241.

    With P stages of v chunks each, the bubble (the idle time of a stage) is (P-1)(F+I)/v. F and I
    are the times of one microbatch's forward pass and input gradient on a stage. W needs no
    exchange, so it may run late: on stage s it runs s ticks after the I of the same chunk and
    microbatch. With this delay all stages run W in the same M v ticks, where M is the number of
    microbatches. So W adds nothing to the bubble. The delay costs memory: stage s holds the
    residuals of up to P + (P-1-s)/v microbatches. In `one_f_one_b_lockstep` it holds the
    residuals of up to P + (P-1-2s)/v microbatches.

    Raises:
        ValueError: a size is below 1 or is not a whole number, or the schedule's table would have
            more than about 2^26 cells.
    """
    P, M, v = _checked(stages=stages, microbatches=microbatches, chunks=chunks)
    # Stage s runs a job I earlier than stage 0 does, by s ticks. So with a delay of s ticks all
    # stages run W together.
    tick, job = _backwards(P, M, v)
    return _schedule(P, v, _forwards(P, M, v), (tick, job), (tick + np.arange(P), job))


def _checked(**sizes: int) -> tuple[int, int, int]:
    """Returns the numbers of stages, microbatches and chunks per stage from `sizes`, which has them
    in this order; the last is 1 if `sizes` lacks it. Raises `ValueError` if a size is no whole
    number of at least 1, or if the table would be too large."""
    P, M, *chunks = checked_sizes(**sizes)
    v = chunks[0] if chunks else 1
    # Checked before any array is made: a table of 10^9 cells would fill the memory. The number
    # of ticks is an estimate: 1F1B has about (M + 2 P) v ticks, and GPipe 2 (M + P - 1). So a table
    # may have up to twice as many cells as `MOST`.
    if (M + 2 * P) * v * P > MOST:
        listed = ", ".join(f"{name}={size}" for name, size in sizes.items())
        raise ValueError(
            f"A schedule of {listed} has a table of more than {MOST:,} cells. Use fewer "
            "microbatches in the pipeline, and accumulate the gradients of several pipeline runs: "
            "grads.accumulated(pipeline.value_and_grad(...), microbatches=...)."
        )
    return P, M, v


def checked_sizes(**sizes: int) -> tuple[int, ...]:
    """Returns the sizes of a schedule as ints; raises `ValueError` if one is not a whole number of
    at least 1."""
    for name, size in sizes.items():
        # In Python a bool is an int too.
        if isinstance(size, bool) or not isinstance(size, int | np.integer):
            raise ValueError(
                f"A schedule needs {name} as a whole number, got {name}={size!r}. Write it as an "
                "int."
            )
        if size < 1:
            raise ValueError(f"A schedule needs {name} >= 1, got {name}={size}.")
    return tuple(int(size) for size in sizes.values())


def _forwards(P: int, M: int, v: int) -> Jobs:
    """Returns the tick and the number, microbatch * v + chunk, of each forward job (see `Jobs`),
    for P stages, M microbatches and v chunks per stage. Each group of P microbatches goes through
    chunk 0 of all stages, then through chunk 1 of all stages, and so on."""
    # All microbatches m, chunks c and stages s; the ticks are [M, v, P].
    m, c, s = np.ogrid[:M, :v, :P]
    # `m // P` is the number of the group. A group takes v P ticks, a chunk P of them, and each
    # stage is one tick later than the stage before it.
    return m // P * v * P + c * P + m % P + s, m * v + c


def _backwards(P: int, M: int, v: int) -> Jobs:
    """Returns the tick and the number, microbatch * v + chunk, of each backward job (see `Jobs`),
    for P stages, M microbatches and v chunks per stage. In its backward pass, a microbatch goes
    through the model from the last chunk to the first. The first backward job is in tick v P - 1,
    in which the first microbatch ends its forward pass."""
    # The ticks are [M, v, P], as in `_forwards`, but the last chunk and the last stage come first.
    m, c, s = np.ogrid[:M, :v, :P]
    return v * P - 1 + m // P * v * P + (v - 1 - c) * P + m % P + P - 1 - s, m * v + c


def _schedule(P: int, v: int, *lanes: Jobs) -> Schedule:
    """Returns the schedule of the jobs in `lanes`, with P stages, v chunks per stage and the
    placement `looped_placement(P, v)`. `lanes` has the forward, the backward and perhaps the weight
    jobs, in this order, each lane as a pair (ticks, jobs)."""
    count = 1 + max(int(tick.max()) for tick, _ in lanes)
    tables = np.full((len(lanes), count, P), -1, np.int32)
    for table, (tick, job) in zip(tables, lanes, strict=True):
        # `tick` is [..., P]: its last dim is the column, that is the stage.
        table[tick, np.arange(P)] = job
    return Schedule(*tables, placement=looped_placement(P, v))
