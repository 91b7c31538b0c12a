"""Schedules of one job a tick and stage: functions that make the order of each stage's jobs, from which `in_order` makes ticks.

The legend: P stages, M microbatches, v chunks a stage, F forward, I input gradient, W weight gradient.
"""

import itertools
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from parallax.schedule.branching import Branching, Job, in_order, needs
from parallax.schedule.makers import checked_sizes


def looped(stages: int, chunks: int = 1) -> Int[np.ndarray, "chunks stages"]:
    """Chunk c of stage s at place c P + s: after the last stage the model goes on at the first."""
    return np.arange(chunks * stages).reshape(chunks, stages)


def there_and_back(stages: int) -> Int[np.ndarray, "chunks stages"]:
    """Two chunks a stage in the shape of a V: the first at place s, the second at 2P - 1 - s."""
    return np.stack([np.arange(stages), 2 * stages - 1 - np.arange(stages)])


def one_f_one_b_in_turns(stages: int, microbatches: int) -> Branching:
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
        turns = itertools.chain.from_iterable(itertools.zip_longest(forward[ahead:], backward, fillvalue=[]))
        orders.append(list(itertools.chain(*forward[:ahead], *turns)))
    return in_order(orders, looped(P))


def zero_bubble_in_turns(stages: int, microbatches: int, chunks: int = 1, *, in_flight: int | None = None) -> Branching:
    """Each stage runs I as soon as it can, F while it holds fewer than `in_flight` microbatches, by default P, and else W.

    With chunks a microbatch in flight is v of them.

    Source: Qi et al., Zero bubble pipeline parallelism (arXiv 2401.10241): with P in flight their ZB-H1.

    Raises:
        ValueError: a size below 1 or that is no whole number.
    """
    P, M, v = checked_sizes(stages=stages, microbatches=microbatches, chunks=chunks)
    (held,) = checked_sizes(in_flight=P if in_flight is None else in_flight)
    return as_soon_as_can_be(looped(P, v), M, [held * v] * P)


def as_soon_as_can_be(places: Int[np.ndarray, "chunks stages"], microbatches: int, held: Sequence[int]) -> Branching:
    """In each tick a stage runs a job that is ready: an I, else an F while it holds fewer than `held` chunks, else a W.

    Of F the furthest place comes first, of I the microbatch that began first.
    """
    P, M, last = places.shape[1], microbatches, places.size - 1
    done: dict[Job, int] = {}
    orders: list[list[Job]] = [[] for _ in range(P)]
    waiting = [
        {Job(lane, m, int(place)) for lane in ("forward", "backward", "weight") for m in range(M) for place in places[:, s]}
        for s in range(P)
    ]
    tick = 0
    while any(waiting):
        chosen = []
        for s in range(P):
            ready = [job for job in waiting[s] if all(done.get(each, tick) < tick for each in needs(job, last))]
            full = sum((job.lane == "forward") - (job.lane == "weight") for job in orders[s]) >= held[s]
            ready = [job for job in ready if not (full and job.lane == "forward")]
            if ready:
                chosen.append((s, min(ready, key=_urgency)))
        if not chosen:
            raise ValueError(f"No stage can go on with {held} chunks held at most. Let them hold more.")
        for s, job in chosen:
            done[job] = tick
            orders[s].append(job)
            waiting[s].remove(job)
        tick += 1
    return in_order(orders, places)


def _urgency(job: Job) -> tuple[int, int, int]:
    order = {"backward": 0, "forward": 1, "weight": 2}[job.lane]
    return (order, job.microbatch, -job.place)
