"""The placement of chunks in the model, and slots for arrays that a job leaves for a later job.
NumPy only.

Legend: P stages, v chunks of layers per stage. A place is the position of a chunk in the model, 0
to vP - 1. A table of jobs, [ticks, stages], has the number of the job that each stage runs in each
tick, or -1 for none. A slot holds the array of one job until the last job that reads the array has
run; then the slot is used again. If a job of microbatch 0 writes slot 0 in tick 0, and its last
reader runs in tick 5, then a job of another microbatch may write slot 0 in tick 6.
"""

import heapq
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Int32, Shaped

# The place in the model of chunk c of stage s, 0 to chunks x stages - 1
Placement = Shaped[np.ndarray, "chunks stages"]


def checked_placement(name: str, placement: Placement) -> Int32[np.ndarray, "chunks stages"]:
    """Returns the placement as a read-only array; raises `ValueError` if the array does not have
    each place once.

    The error begins with `name`, the caller's name.
    """
    placed = np.array(placement)
    places = np.arange(placed.size)
    if placed.ndim != 2 or not placed.size or (np.sort(placed, axis=None) != places).any():
        raise ValueError(
            f"{name}: a placement is [chunks, stages] and has each place from 0 to chunks x stages "
            f"- 1 once; got {placed.tolist()}. Use the `placed` of a schedule, or "
            "schedule.looped_placement(stages, chunks)."
        )
    # Read-only, since schedules store it and return it to callers.
    placed = placed.astype(np.int32)
    placed.setflags(write=False)
    return placed


def looped_placement(stages: int, chunks: int = 1) -> Int[np.ndarray, "chunks stages"]:
    """Returns the placement that has chunk c of stage s at place c * stages + s of the model: after
    the last stage the model continues on the first."""
    return np.arange(chunks * stages).reshape(chunks, stages)


def v_placement(stages: int) -> Int[np.ndarray, "chunks stages"]:
    """Returns the placement in the shape of a V, with two chunks per stage: the first chunk of
    stage s is at place s of the model, and the second at place 2 * stages - 1 - s."""
    return np.stack([np.arange(stages), 2 * stages - 1 - np.arange(stages)])


def is_looped(placement: Placement) -> bool:
    """Returns whether the placement is that of `looped_placement`. If it is, an array [chunks,
    stages, ...], read row by row, has the chunks in the order of the model."""
    return np.array_equal(np.ravel(placement), np.arange(np.size(placement)))


class Interval(NamedTuple):
    """The ticks, `start` to `stop` - 1, in which a slot (memory for one job's array) is in use."""

    start: int
    stop: int


def fewest(intervals: Sequence[Interval]) -> list[int]:
    """Returns a slot for each interval of ticks, so that intervals that overlap have different
    slots. No other assignment needs fewer slots."""
    # Two heaps: `busy` has (stop, slot) of the slots in use, and `free` the others.
    slots, busy, free = [0] * len(intervals), [], []
    count = 0  # the slots that exist so far
    # In order of their start, each interval gets the lowest free slot: this needs the fewest slots.
    for i in sorted(range(len(intervals)), key=intervals.__getitem__):
        # `<=`, since an interval does not contain its `stop`: from that tick on the slot is free.
        while busy and busy[0][0] <= intervals[i].start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if not free:
            heapq.heappush(free, count)
            count += 1
        slots[i] = heapq.heappop(free)
        heapq.heappush(busy, (intervals[i].stop, slots[i]))
    return slots


def coloured(
    lanes: Mapping[str, Int32[np.ndarray, "ticks stages"]],
) -> dict[str, Int32[np.ndarray, "ticks stages"]]:
    """Returns the slot of each job: for each lane, a table [ticks, stages] of slots.

    `lanes` has a table of jobs for each of two or more lanes (kinds of job), such as "forward" and
    "backward". A job of the first lane writes a slot, and the jobs with the same number in the
    other lanes read the slot. The job of the last lane is the last reader, so the slot is free from
    the next tick on. Where a stage has no job of the first lane in a tick, the first lane's table
    has the lowest free slot, since in lockstep an idle stage writes too. The tables of the other
    lanes have -1 for no job. (Each job's array needs its slot in an interval of ticks. To find the
    fewest slots for such intervals is to colour an interval graph.)
    """
    first, *_, last = lanes
    slots = {lane: np.full_like(table, -1) for lane, table in lanes.items()}
    for s in range(lanes[first].shape[1]):
        columns = {lane: table[:, s].tolist() for lane, table in lanes.items()}
        # The tick from which each job's slot is free again.
        stops = {job: tick + 1 for tick, job in enumerate(columns[last]) if job >= 0}
        # A tick without a job of the first lane also gets a slot, for only that tick (its interval
        # ends at `tick + 1`). In lockstep all devices run one program, so an idle stage writes too:
        # a value that nobody reads, which needs a slot that is not in use.
        written = fewest(
            [Interval(tick, stops.get(job, tick + 1)) for tick, job in enumerate(columns[first])]
        )
        # The slot of each job. No job, -1, has slot -1 in the other lanes.
        slot_of = dict(zip(columns[first], written, strict=True)) | {-1: -1}
        for lane, jobs in columns.items():
            slots[lane][:, s] = written if lane == first else [slot_of[job] for job in jobs]
    for table in slots.values():
        table.setflags(write=False)
    return slots
