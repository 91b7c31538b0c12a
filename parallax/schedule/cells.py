"""Schedules whose files name each job by its place in the model: `5F3` is F of microbatch 3 at place 5, `5I3`, `5W3` its I, W.

Two forms: a row a tick under the columns `tick,stage 0,stage 1,...`, which `to_csv` writes where each stage has a job of its own
in a tick; and the form of `torch.distributed.pipelining`, a row a rank and a cell a job, without a header.
"""

import re
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Int

from parallax.schedule.orders import Job, in_order
from parallax.schedule.table import LANES, Schedule

LETTERS = {"F": ("forward",), "I": ("backward",), "W": ("weight",), "B": ("backward", "weight")}
JOB = re.compile(r"([0-9]{1,6})([FIWB])([0-9]{1,6})")
OTHER = re.compile(r"[0-9]*(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)[0-9]*")  # moves data, which is ours to do


def written(schedule: Schedule) -> list[list[object]]:
    """The rows of the first form, its columns first."""
    rows: list[list[object]] = [["tick", *(f"stage {s}" for s in range(schedule.stages))]]
    for tick in range(schedule.ticks):
        cells = []
        for s, (kind, job) in enumerate(zip(schedule.kinds[tick].tolist(), schedule.jobs[tick].tolist(), strict=True)):
            m, c = divmod(job, schedule.chunks)
            cells.append(f"{schedule.placed[c, s]}{'FIW'[kind - 1]}{m}" if kind else "")
        rows.append([tick, *cells])
    return rows


def by_tick(rows: Sequence[Sequence[str]]) -> Schedule:
    """The schedule of the first form, `rows` without its columns and without the ticks' numbers."""
    found = [[_jobs(cell, f"line {t + 2}, stage {s}") for s, cell in enumerate(row)] for t, row in enumerate(rows)]
    for t, row in enumerate(found):
        for s, jobs in enumerate(row):
            if len(jobs) > 1:
                raise ValueError(f"line {t + 2}, stage {s}: a tick has room for one job. Write I and W in two ticks for B.")
    places = _places([[job for row in found for job in row[s]] for s in range(len(rows[0]))])
    chunk = {int(place): c for (c, _), place in np.ndenumerate(places)}
    tables = {lane: np.full((len(rows), len(rows[0])), -1) for lane in LANES}
    for t, row in enumerate(found):
        for s, jobs in enumerate(row):
            for job in jobs:
                tables[job.lane][t, s] = job.microbatch * len(places) + chunk[job.place]
    return Schedule(tables["forward"], tables["backward"], tables["weight"], placement=places)


def is_by_rank(rows: Sequence[Sequence[str]]) -> bool:
    """Whether these are rows of the second form: each has a job, and nothing else."""
    some = [cell.strip() for cell in rows[0] if cell.strip()]
    return bool(some) and bool(JOB.fullmatch(some[0].split(";")[0].lstrip("(")) or OTHER.fullmatch(some[0]))


def by_rank(rows: Sequence[Sequence[str]]) -> Schedule:
    """The schedule of the second form: each rank's jobs in their order, each in the first tick in which it can run.

    A whole backward job, B, is I and then W; two jobs that overlap, `(0F3;3B1)OVERLAP_F_B`, run one after the other. Messages,
    gathers and reductions are left out: ours are where the schedule needs them.
    """
    orders = []
    for rank, row in enumerate(rows):
        cells = [cell for whole in row for cell in _parts(whole)]
        orders.append([job for k, cell in enumerate(cells) for job in _jobs(cell, f"row {rank + 1}, cell {k + 1}")])
    return in_order([_from_0(order) for order in orders], _places(orders))


def _from_0(order: list[Job]) -> list[Job]:
    """The jobs with the forwards of each place numbered from 0: `Schedule1F1B` of torch 2.13 numbers its last rank's from 1."""
    shifted = set()
    for place in {job.place for job in order}:
        of = lambda lane: sorted(job.microbatch for job in order if (job.lane, job.place) == (lane, place))  # noqa: B023
        if of("forward") == [m + 1 for m in of("backward")]:
            shifted.add(place)
    moved = lambda job: job.lane == "forward" and job.place in shifted
    return [job._replace(microbatch=job.microbatch - 1) if moved(job) else job for job in order]


def _parts(cell: str) -> Iterator[str]:
    """The cells inside of one that overlaps several jobs; else itself."""
    overlapped = re.fullmatch(r"\((.*)\)OVERLAP_F_B", cell.strip())
    yield from overlapped[1].split(";") if overlapped else [cell]


def _jobs(cell: str, where: str) -> list[Job]:
    cell = cell.strip()
    match = JOB.fullmatch(cell)
    if match:
        return [Job(lane, int(match[3]), int(match[1])) for lane in LETTERS[match[2]]]
    if cell and not OTHER.fullmatch(cell):
        shown = cell if len(cell) <= 40 else f"{cell[:40]}... ({len(cell)} characters)"
        raise ValueError(f"{where}: {shown!r} is no job. Write one as 5F3: place, F, I, W or B, microbatch.")
    return []


def _places(jobs: Sequence[Sequence[Job]]) -> Int[np.ndarray, "chunks stages"]:
    """The places of each stage, those of its chunks in their order."""
    places = [sorted({job.place for job in own}) for own in jobs]
    counts = {len(own) for own in places}
    if len(counts) != 1 or counts == {0}:
        raise ValueError(f"All stages need as many places of the model; got {', '.join(str(len(own)) for own in places)}.")
    homes = sorted((place, stage) for stage, own in enumerate(places) for place in own)
    for expected, (place, stage) in enumerate(homes):
        if place != expected:
            raise ValueError(
                f"Each place of the model, from 0 on, needs one stage; stage {stage} has place {place} where place {expected} "
                "comes next. Number the places without a gap, each on one stage."
            )
    return np.array(places).T
