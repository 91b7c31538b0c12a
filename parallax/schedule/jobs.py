"""The jobs of a schedule: which jobs a job needs, and the time at which each job starts if the
stages run their jobs in a given order.

A job runs one chunk of layers for one microbatch. Its lane is its kind: "forward" (F), "backward"
(B) or "weight" (W). A chunk's place is its position in the model. A stage runs the chunks of one or
more places.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

Cost = float | int  # the time of one microbatch through a whole stage, in any unit
LANES = ("forward", "backward", "weight")  # in their order within a tick


class Job(NamedTuple):
    """One job: `lane` is "forward", "backward" or "weight"; `place` is the chunk's place in the
    model."""

    lane: str
    microbatch: int
    place: int

    def __str__(self) -> str:
        return f"{self.lane} of microbatch {self.microbatch} at place {self.place}"


def needs(job: Job, last: int) -> Iterator[Job]:
    """Yields the jobs whose results a job needs; `last` is the last place of the model.

    A place is the position of a job's chunk of layers in the model. A forward job needs the forward
    job of the place before; at place 0 it needs no job. A backward job needs the backward job of
    the place after; at the last place it needs the forward job of that place. A weight job needs
    the backward job of its own place.
    """
    lane, m, place = job
    if lane == "forward" and place > 0:
        yield Job("forward", m, place - 1)
    if lane == "backward":
        yield Job("backward", m, place + 1) if place < last else Job("forward", m, place)
    if lane == "weight":
        yield Job("backward", m, place)


def start_times(
    orders: Sequence[Sequence[Job]],
    homes: Mapping[int, int],
    costs: Mapping[str, float | int],
    hop: float | int = 0,
) -> dict[Job, float]:
    """Returns the time at which each job starts if each stage runs its jobs in the given order,
    each as early as possible.

    Args:
        orders: the jobs of each stage.
        homes: the stage of each place. A place is the position of a chunk of layers in the model.
        costs: the time of one job (one chunk of layers for one microbatch), by the kind of job:
            "forward", "backward" or "weight".
        hop: the time of a message to another stage, in the unit of `costs`.

    Raises:
        ValueError: a stage has a job twice; or a job waits for a job that never runs, or for a job
            that the order of a stage puts too late.
    """
    last = max(homes)
    starts: dict[Job, float] = {}
    stops: dict[Job, float] = {}  # the time at which each job ends
    # By stage: the time from which it is free, and the number of its jobs that have begun.
    free, begun = [0.0] * len(orders), [0] * len(orders)
    # Each round starts the jobs whose inputs exist, until a round starts none.
    started_before = -1  # below 0, so that there is a first round
    while started_before < len(starts):
        started_before = len(starts)
        for stage, order in enumerate(orders):
            while begun[stage] < len(order):
                job = order[begun[stage]]
                needed = list(needs(job, last))
                if not all(cause in stops for cause in needed):
                    break
                if job in starts:
                    raise ValueError(f"stage {stage} has {job} twice. Keep one.")
                # A result that stays on its stage needs no message.
                arrivals = [stops[cause] + hop * (homes[cause.place] != stage) for cause in needed]
                # The 0.0 is for a job without arrivals: `max` needs more than one number.
                starts[job] = max(free[stage], *arrivals, 0.0)
                stops[job] = starts[job] + costs[job.lane]
                free[stage] = stops[job]
                begun[stage] += 1
    # If a job is left, this is a deadlock: the job waits for a job that never ends.
    for stage, order in enumerate(orders):
        for job in order[begun[stage] :]:
            missing = next(cause for cause in needs(job, last) if cause not in stops)
            raise ValueError(
                f"stage {stage} waits for ever before {job}: this job needs {missing}, which stage "
                f"{homes[missing.place]} does not run in an earlier tick. Change the order of one "
                "of the two stages."
            )
    return starts
