"""Where a chunk stands in the model, and where what a job makes waits until it is used: slots. NumPy only."""

import heapq
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32, Shaped

Placement = Shaped[np.ndarray, "chunks stages"]  # the place in the model of chunk c of stage s, 0 to chunks x stages - 1


def checked_placement(name: str, placement: Placement) -> Int32[np.ndarray, "chunks stages"]:
    """The placement, which cannot be written to; refused with a `ValueError` where it is none. `name` is who needs it."""
    placed = np.array(placement)
    if placed.ndim != 2 or not placed.size or not np.array_equal(np.sort(placed, axis=None), np.arange(placed.size)):
        raise ValueError(
            f"{name}: a placement is [chunks, stages], each of the places 0 to chunks x stages - 1 once, such as a schedule's "
            f"`placed`, or schedule.looped(stages, chunks); got {np.array(placement).tolist()}."
        )
    placed = placed.astype(np.int32)
    placed.setflags(write=False)
    return placed


def coloured(lanes: Mapping[str, Int32[np.ndarray, "ticks stages"]]) -> dict[str, Int32[np.ndarray, "ticks stages"]]:
    """The slot of each job, by lane: the first lane writes it, and it is free again after the last lane's tick.

    Two jobs that are held at one time never share a slot, and no colouring needs fewer: the intervals are coloured in order of
    their start, each with the lowest free slot. Where the first lane has no job, it is the lowest slot that is free then; where
    another has none, -1.
    """
    first, *_, last = lanes
    places = {lane: np.full_like(table, -1) for lane, table in lanes.items()}
    for s in range(lanes[first].shape[1]):
        held: dict[int, int] = {}
        free = list(range(int((lanes[first][:, s] >= 0).sum()) + 1))
        columns = {lane: (table[:, s].tolist(), []) for lane, table in lanes.items()}
        for jobs in zip(*(jobs for jobs, _ in columns.values()), strict=True):
            for (lane, (_, found)), job in zip(columns.items(), jobs, strict=True):
                if lane == first and job >= 0:
                    held[job] = heapq.heappop(free)
                found.append(held[job] if job >= 0 else free[0] if lane == first else -1)
                if lane == last and job >= 0:
                    heapq.heappush(free, held.pop(job))
        for lane, (_, found) in columns.items():
            places[lane][:, s] = found
    for table in places.values():
        table.setflags(write=False)
    return places


class Interval(NamedTuple):
    """The ticks in which something waits: from `start` on, no longer in `stop`."""

    start: int
    stop: int


def fewest(intervals: Sequence[Interval]) -> list[int]:
    """A slot for each interval, so that no two that overlap share one: as few slots as there can be."""
    slots, busy, free = [0] * len(intervals), [], []
    count = 0
    for i in sorted(range(len(intervals)), key=lambda i: intervals[i]):
        while busy and busy[0][0] <= intervals[i].start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if not free:
            heapq.heappush(free, count)
            count += 1
        slots[i] = heapq.heappop(free)
        heapq.heappush(busy, (intervals[i].stop, slots[i]))
    return slots
