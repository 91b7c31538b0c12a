"""Schedules with at most one job per stage in a tick: functions that make the order of each stage's
jobs, and `from_orders`, which makes the table.

The legend: P stages, M microbatches, v chunks per stage, F forward, I input gradient, W weight
gradient. A job's lane is its kind: "forward" (F), "backward" (I) or "weight" (W). A place is a
chunk's position in the model, and `places`, [v, P], gives the place of each chunk of each stage.
"""

import heapq
import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from jaxtyping import Int, Shaped

from parallax.schedule.jobs import LANES, Job, start_times
from parallax.schedule.makers import checked_sizes
from parallax.schedule.places import looped_placement
from parallax.schedule.table import CannotRun, Schedule

URGENCY = ("backward", "forward", "weight")  # a stage runs the first of these that is ready


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """Returns 1F1B with at most as many microbatches in flight as there are stages.

    Of P stages, stage s runs P - 1 - s microbatches forward, and then alternates one forward (F)
    and one backward (arXiv 2104.04473, section 2.2). A backward is an input-gradient job (I) and,
    right after it, a weight-gradient job (W). If F, I and W take the same time, the bubble (the
    idle time of a stage) is (P - 1)(F + I). W does not add to the bubble, since no stage waits for
    the W of another stage. `one_f_one_b_lockstep` has up to 2P - 1 microbatches in flight.

    Raises:
        ValueError: a size is below 1, or is not a whole number.
    """
    P, M = checked_sizes(stages=stages, microbatches=microbatches)
    orders = []
    for s in range(P):
        # Each of the P - 1 - s stages after this one holds a microbatch before the cotangent of the
        # first microbatch comes back.
        ahead = min(P - 1 - s, M)  # the forwards before the first backward
        # By microbatch, its jobs on this stage, whose one chunk is at place s.
        forward = [[Job("forward", m, s)] for m in range(M)]
        backward = [[Job("backward", m, s), Job("weight", m, s)] for m in range(M)]
        # A forward and a backward in turn, each as a list of jobs; after the last forward only
        # backwards are left.
        in_turn = itertools.chain(*itertools.zip_longest(forward[ahead:], backward, fillvalue=[]))
        orders.append(list(itertools.chain(*forward[:ahead], *in_turn)))
    return from_orders(orders, looped_placement(P))


def zero_bubble(
    stages: int, microbatches: int, chunks: int = 1, *, in_flight: int | None = None
) -> Schedule:
    """Returns a schedule in which each stage runs an input-gradient job (I) as soon as one is
    ready. If no I is ready, the stage runs a forward job (F) if it holds fewer than `in_flight`
    microbatches (by default as many as there are stages); otherwise it runs a weight-gradient job
    (W). A stage holds the residuals of a microbatch from its F until its W.

    With v chunks of layers per stage, a stage may hold the residuals of `in_flight` * v forward
    jobs, each of one chunk and one microbatch.

    Source: Qi et al., Zero bubble pipeline parallelism (arXiv 2401.10241). With the default
    `in_flight`, the schedule is the paper's ZB-H1.

    Raises:
        ValueError: a size is below 1, or is not a whole number.
    """
    P, M, v = checked_sizes(stages=stages, microbatches=microbatches, chunks=chunks)
    (most,) = checked_sizes(in_flight=P if in_flight is None else in_flight)
    return greedy(looped_placement(P, v), M, [most * v] * P)


def greedy(
    places: Int[np.ndarray, "chunks stages"], microbatches: int, max_chunks: Sequence[int]
) -> Schedule:
    """Returns a schedule in which each stage runs in each tick one of its ready jobs, if it has
    any: an input-gradient job (I) first, then a forward job (F), then a weight-gradient job (W).
    Stage s runs no F while it holds the residuals of `max_chunks[s]` forward jobs. It holds the
    residuals of an F until it runs the W of the same chunk and microbatch.

    If several jobs of a kind are ready, the earliest microbatch goes first, and among jobs of one
    microbatch the job whose chunk is last in the model. `places` has the position in the model (the
    place) of each chunk of each stage.

    Raises:
        ValueError: no stage may run a job, since only forward jobs are ready, and each stage s
            that has a ready job already holds the residuals of `max_chunks[s]` forward jobs.
    """
    P, last = places.shape[1], places.size - 1
    homes = homes_of(places)
    orders: list[list[Job]] = [[] for _ in range(P)]
    # By stage and lane, a heap of the jobs that are ready, as (microbatch, -place).
    ready: list[dict[str, list[tuple[int, int]]]] = [
        {lane: [] for lane in URGENCY} for _ in range(P)
    ]
    # The number of forward jobs whose residuals each stage holds, from F to W; and the number of
    # jobs left to run: F, I and W of each microbatch at each place.
    held, left = [0] * P, 3 * microbatches * places.size
    # The jobs that have become ready since the last tick; at first, all F of place 0.
    newly_ready = [Job("forward", m, 0) for m in range(microbatches)]
    while left:
        for job in newly_ready:
            # The sign puts a later place first: a microbatch there is nearer to its backward pass.
            heapq.heappush(ready[homes[job.place]][job.lane], (job.microbatch, -job.place))
        # A job that becomes ready in this tick starts in the next tick at the earliest.
        newly_ready, left_before = [], left
        for s in range(P):
            full = held[s] >= max_chunks[s]
            lanes = [
                lane for lane in URGENCY if ready[s][lane] and not (lane == "forward" and full)
            ]
            if lanes:  # the most urgent lane comes first
                microbatch, negative_place = heapq.heappop(ready[s][lanes[0]])
                job = Job(lanes[0], microbatch, -negative_place)
                orders[s].append(job)
                held[s] += (job.lane == "forward") - (job.lane == "weight")
                newly_ready += followers(job, last)
                left -= 1
        if left == left_before:
            # Every ready job is an F, on a stage that may hold no further residuals.
            raise ValueError(
                f"No stage can run another job: max_chunks={max_chunks} is too small. Each number "
                "is the largest number of forward jobs whose residuals one stage may hold. Use "
                "larger numbers."
            )
    return from_orders(orders, places)


def from_orders(
    orders: Sequence[Sequence[Job]], places: Shaped[np.ndarray, "chunks stages"]
) -> Schedule:
    """Returns the schedule in which each stage runs its jobs in the given order, each in the first
    tick in which its inputs exist and the stage is free.

    Raises:
        ValueError: a microbatch is not a whole number of 0 or more; a stage has a job of a chunk
            that is on another stage; or a job waits for a job that never runs, or for a job that
            the order of a stage puts too late.
    """
    homes = homes_of(places)
    # A wrong place would otherwise be reported as a deadlock.
    for stage, order in enumerate(orders):
        for job in order:
            # The tables have -1 for no job.
            if not isinstance(job.microbatch, int | np.integer) or job.microbatch < 0:
                raise ValueError(
                    f"stage {stage} has {job}. Microbatches are whole numbers of 0 or more: number "
                    "the first one 0."
                )
            home = homes.get(job.place)
            if home is None:
                raise ValueError(
                    f"stage {stage} has a job at place {job.place}, but the chunks of all stages "
                    f"have only the places 0 to {len(homes) - 1}."
                )
            if home != stage:
                raise ValueError(
                    f"stage {stage} has a job at place {job.place}, which is on stage {home}. Move "
                    f"the job to stage {home}, or move place {job.place} to stage {stage}."
                )
    # Each job costs 1 and messages cost 0, so the start times are ticks.
    starts = start_times(orders, homes, dict.fromkeys(LANES, 1))
    jobs = [(int(tick), job) for job, tick in starts.items()]
    return Schedule(*tables_of(jobs, places), placement=places)


def tables_of(
    jobs: Iterable[tuple[int, Job]],
    places: Shaped[np.ndarray, "chunks stages"],
    ticks: int | None = None,
) -> Int[np.ndarray, "lanes ticks stages"]:
    """Returns three tables, [ticks, stages], one for each kind of job: "forward", "backward" and
    "weight". `jobs` has each job with its tick, as (tick, job). An entry of a table is -1 for no
    job, else microbatch * v + chunk, where v is the number of chunks per stage.

    The tables have `ticks` rows; by default the last row is the tick of the last job.

    Raises:
        CannotRun: a stage has two jobs of the same kind in one tick.
    """
    jobs = list(jobs)
    count = 1 + max((tick for tick, _ in jobs), default=-1) if ticks is None else ticks
    tables = np.full((len(LANES), count, places.shape[1]), -1)
    cells = {int(place): cell for cell, place in np.ndenumerate(places)}  # place: (chunk, stage)
    for tick, job in jobs:
        chunk, stage = cells[job.place]
        cell = LANES.index(job.lane), tick, stage
        if tables[cell] >= 0:
            raise CannotRun(tick, stage, f"has two {job.lane} jobs. Write them in two ticks.")
        tables[cell] = job.microbatch * len(places) + chunk  # `len(places)` is v
    return tables


def homes_of(places: Shaped[np.ndarray, "chunks stages"]) -> dict[int, int]:
    """Returns a dict from each place of the model (the position of a chunk) to its stage."""
    return {int(place): stage for (_, stage), place in np.ndenumerate(places)}


def followers(job: Job, last: int) -> Iterator[Job]:
    """Yields the jobs that need a job's result; `last` is the last place of the model.

    A place is the position of a job's chunk of layers in the model. A forward job is needed by the
    forward job of the next place; at the last place it is needed by the input-gradient job
    ("backward") of that place. An input-gradient job is needed by the weight-gradient job
    ("weight") of its own place, and by the input-gradient job of the place before. No job needs a
    weight-gradient job.
    """
    lane, m, place = job
    if lane == "forward":
        yield Job("forward", m, place + 1) if place < last else Job("backward", m, place)
    if lane == "backward":
        yield Job("weight", m, place)
        if place > 0:
            yield Job("backward", m, place - 1)
