"""A schedule as its executor reads it: one row a tick, and loops over the stretches in which the same lanes run.

Legend: P stages, M microbatches, v chunks a stage, F forward, B backward (I and W, its two parts). NumPy only.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from parallax.schedule import Schedule

Numbers = Any  # whole numbers, with a first dim of ticks: NumPy's here, JAX's inside the loop
Stretch = tuple[frozenset[str], int]  # the lanes that run, and for how many ticks on end


class Row(NamedTuple):
    """What happens in a tick: the first eight are `[ticks, stages]`, the others, one for all stages, `[ticks]`. Of a
    microbatch there is 0 where there is none.

    Attributes:
        forward: jobs, -1 = none.
        backward: likewise.
        weight: likewise; without a weight lane there is none.
        written: the slot that F writes: a free one where it has no job.
        read: the slot that B reads: 0 where it has no job.
        weighed: likewise, the slot of F's that W reads.
        handed: the slot that I writes for W: a free one where it has no job.
        taken_up: the slot of I's that W reads: 0 where it has no job.
        entering: the microbatch at the first stage's first chunk.
        finished: the microbatch whose forward the last stage ends.
        put: the place where the head puts its cotangent.
        taken: the place of the cotangent that the last stage's backward begins with.
        leaving: the microbatch whose backward the first stage ends.
    """

    forward: Numbers
    backward: Numbers
    weight: Numbers
    written: Numbers
    read: Numbers
    weighed: Numbers
    handed: Numbers
    taken_up: Numbers
    entering: Numbers
    finished: Numbers
    put: Numbers
    taken: Numbers
    leaving: Numbers


def rows(schedule: Schedule) -> Row:
    """The schedule's tables, and what follows from them: the ends of the pipeline and the slots."""
    v, forward, backward = schedule.chunks, schedule.forward, schedule.backward
    none = np.full_like(backward, -1)
    ends = lambda jobs, chunk: np.where((jobs >= 0) & (jobs % v == chunk), jobs // v, -1)
    entering, finished = ends(forward[:, 0], 0), ends(forward[:, -1], v - 1)
    begun, leaving = ends(backward[:, -1], v - 1), ends(backward[:, 0], 0)
    # Where each microbatch's backward begins in the tick in which its forward ends, one place for its cotangent is enough.
    places = 1 if np.array_equal(finished, begun) else schedule.microbatches
    job = lambda microbatches: np.maximum(microbatches, 0).astype(np.int32)
    return Row(
        forward=forward,
        backward=backward,
        weight=none if schedule.weight is None else schedule.weight,
        written=schedule.written,
        read=np.maximum(schedule.slots["backward"], 0),
        weighed=np.maximum(schedule.slots.get("weight", none), 0),
        handed=np.maximum(schedule.handed_on.get("backward", none), 0),
        taken_up=np.maximum(schedule.handed_on.get("weight", none), 0),
        entering=job(entering),
        finished=job(finished),
        put=job(finished) % places,
        taken=job(begun) % places,
        leaving=job(leaving),
    )


def stretches(schedule: Schedule) -> list[Stretch]:
    """Which lanes run on any stage, the head's included, and for how many ticks in a row."""
    v = schedule.chunks
    lanes = [(name, (table >= 0).any(1)) for name, table in schedule.lanes.items()]
    lanes.insert(1, ("head", (schedule.forward[:, -1] >= 0) & (schedule.forward[:, -1] % v == v - 1)))
    runs = np.stack([runs for _, runs in lanes], axis=1)
    starts = [0, *(np.flatnonzero((runs[1:] != runs[:-1]).any(axis=1)) + 1).tolist()]
    named = lambda row: frozenset(name for (name, _), runs in zip(lanes, row, strict=True) if runs)
    return [(named(runs[t]), stop - t) for t, stop in zip(starts, [*starts[1:], schedule.ticks], strict=True)]


def loops(stretches: list[Stretch]) -> Iterator[tuple[int, list[Stretch]]]:
    """The same stretches in order, as (repeats, pattern): what comes again and again is one loop, however often it comes."""
    begin = 0
    while begin < len(stretches):
        repeats, period = max(
            ((_repeats(stretches, begin, period), period) for period in range(1, (len(stretches) - begin) // 2 + 1)),
            key=lambda found: (found[0] > 1) * found[0] * found[1],
            default=(1, 1),
        )
        repeats, period = (repeats, period) if repeats > 1 else (1, 1)
        yield repeats, stretches[begin : begin + period]
        begin += repeats * period


def _repeats(stretches: list[Stretch], begin: int, period: int) -> int:
    pattern, repeats = stretches[begin : begin + period], 1
    while stretches[begin + repeats * period : begin + (repeats + 1) * period] == pattern:
        repeats += 1
    return repeats
