"""Schedules of one job a tick and stage: functions that make the order of each stage's jobs, from which `in_order` makes ticks.

The legend: P stages, M microbatches, v chunks a stage, F forward, I input gradient, W weight gradient.
"""

import heapq
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Shaped

from parallax.schedule.makers import checked_sizes
from parallax.schedule.places import looped_placement
from parallax.schedule.table import LANES, Schedule

URGENCY = ("backward", "forward", "weight")  # which of the jobs that are ready comes first


class Job(NamedTuple):
    """One job of an order: `lane` is "forward", "backward" (I) or "weight"; `place` is the chunk's place in the model."""

    lane: str
    microbatch: int
    place: int


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """1F1B with P microbatches in flight, not 2P - 1: the bubble is (P - 1)(F + I + W), W follows I at once.

    Stage s runs P - 1 - s microbatches forward, then one forward and one backward in turns (arXiv 2104.04473, section 2.2).

    Raises:
        ValueError: a size below 1 or that is no whole number.
    """
    P, M = checked_sizes(stages=stages, microbatches=microbatches)
    orders = []
    for s in range(P):
        ahead = min(P - 1 - s, M)
        forward = [[Job("forward", m, s)] for m in range(M)]
        backward = [[Job("backward", m, s), Job("weight", m, s)] for m in range(M)]
        turns = itertools.chain.from_iterable(
            itertools.zip_longest(forward[ahead:], backward, fillvalue=[])
        )
        orders.append(list(itertools.chain(*forward[:ahead], *turns)))
    return from_orders(orders, looped_placement(P))


def zero_bubble(
    stages: int, microbatches: int, chunks: int = 1, *, in_flight: int | None = None
) -> Schedule:
    """Each stage runs I as soon as it can, F while it holds fewer than `in_flight` microbatches, by default P, and else W.

    With chunks a microbatch in flight is v of them.

    Source: Qi et al., Zero bubble pipeline parallelism (arXiv 2401.10241): with P in flight their ZB-H1.

    Raises:
        ValueError: a size below 1 or that is no whole number.
    """
    P, M, v = checked_sizes(stages=stages, microbatches=microbatches, chunks=chunks)
    (held,) = checked_sizes(in_flight=P if in_flight is None else in_flight)
    return greedy(looped_placement(P, v), M, [held * v] * P)


def greedy(
    places: Int[np.ndarray, "chunks stages"], microbatches: int, held: Sequence[int]
) -> Schedule:
    """In each tick a stage runs a job that is ready: an I, else an F while it holds fewer than `held` chunks, else a W.

    Of F the furthest place comes first, of I the microbatch that began first.
    """
    P, last = places.shape[1], places.size - 1
    homes = {int(place): s for (_, s), place in np.ndenumerate(places)}
    orders: list[list[Job]] = [[] for _ in range(P)]
    ready: list[dict[str, list[tuple[int, int]]]] = [
        {lane: [] for lane in URGENCY} for _ in range(P)
    ]
    holds, left = [0] * P, 3 * microbatches * places.size
    begin = [Job("forward", m, 0) for m in range(microbatches)]
    while left:
        for job in begin:
            heapq.heappush(ready[homes[job.place]][job.lane], (job.microbatch, -job.place))
        begin, before = [], left
        for s in range(P):
            may = [
                lane
                for lane in URGENCY
                if ready[s][lane] and not (lane == "forward" and holds[s] >= held[s])
            ]
            if may:
                microbatch, place = heapq.heappop(ready[s][may[0]])
                job = Job(may[0], microbatch, -place)
                orders[s].append(job)
                holds[s] += (job.lane == "forward") - (job.lane == "weight")
                begin += followers(job, last)
                left -= 1
        if left == before:
            raise ValueError(
                f"No stage can go on with {held} chunks held at most. Let them hold more."
            )
    return from_orders(orders, places)


def from_orders(
    orders: Sequence[Sequence[Job]], places: Shaped[np.ndarray, "chunks stages"]
) -> Schedule:
    """Each stage's jobs in the order given, each in the first tick in which all that it needs is there.

    Raises:
        ValueError: a job waits for one that never comes, or that comes after it.
    """
    chunk = {int(place): c for (c, _), place in np.ndenumerate(places)}
    homes = {int(place): s for (_, s), place in np.ndenumerate(places)}
    last, v = places.size - 1, len(places)
    done: dict[Job, int] = {}
    begun, rows = [0] * len(orders), []
    while any(i < len(order) for i, order in zip(begun, orders, strict=True)):
        tick, row = len(rows), np.full((3, len(orders)), -1)
        for s, order in enumerate(orders):
            job = order[begun[s]] if begun[s] < len(order) else None
            if job is not None and all(
                done.get(needed, tick) < tick for needed in needs(job, last)
            ):
                if homes.get(job.place) != s:
                    raise ValueError(
                        f"stage {s} has a job at place {job.place}, which is on stage {homes.get(job.place)}."
                    )
                row[LANES.index(job.lane), s] = job.microbatch * v + chunk[job.place]
        if (row < 0).all():
            s = next(s for s, order in enumerate(orders) if begun[s] < len(order))
            job = orders[s][begun[s]]
            missing = next(needed for needed in needs(job, last) if needed not in done)
            raise ValueError(
                f"stage {s} waits for ever before {_named(job)}: it needs {_named(missing)}, on stage {homes[missing.place]}, "
                "which comes in no tick before. Change the order of one of the two stages."
            )
        for s in np.flatnonzero((row >= 0).any(axis=0)).tolist():
            done[orders[s][begun[s]]] = tick
            begun[s] += 1
        rows.append(row)
    return Schedule(*np.array(rows).transpose(1, 0, 2), placement=places)


def followers(job: Job, last: int) -> Iterator[Job]:
    """The jobs that need a job's result: those of which it is one of `needs`."""
    lane, m, place = job
    if lane == "forward":
        yield Job("forward", m, place + 1) if place < last else Job("backward", m, place)
    if lane == "backward":
        yield Job("weight", m, place)
        if place > 0:
            yield Job("backward", m, place - 1)


def needs(job: Job, last: int) -> Iterator[Job]:
    """The jobs whose results a job needs; `last` is the last place of the model."""
    lane, m, place = job
    if lane == "forward" and place > 0:
        yield Job("forward", m, place - 1)
    if lane == "backward":
        yield Job("backward", m, place + 1) if place < last else Job("forward", m, place)
    if lane == "weight":
        yield Job("backward", m, place)


def _named(job: Job) -> str:
    return f"{job.lane} of microbatch {job.microbatch} at place {job.place}"
