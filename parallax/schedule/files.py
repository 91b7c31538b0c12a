"""A schedule as a CSV file: a row a tick, a column a stage, and each job by its place in the model: `5F3` is F of microbatch 3.

`5B3` is both gradients of that microbatch at place 5; where they are taken apart, `5I3` is the input's and `5W3` the weights'.
In lockstep a stage may have several jobs in a tick: `1F4 1B2`. Files of `torch.distributed.pipelining` can be read too: a row a
rank and a cell a job, without a header.
"""

import csv
import io
import os
import re
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Int

from parallax import _files
from parallax.schedule.orders import Job, from_orders
from parallax.schedule.table import LANES, CannotRun, Schedule

LANES_OF = {"F": ("forward",), "I": ("backward",), "W": ("weight",), "B": ("backward", "weight")}
JOB = re.compile(r"([0-9]{1,6})([FIWB])([0-9]{1,6})")
# What moves data in torch's files; here messages are where the schedule needs them.
MOVES = re.compile(r"[0-9]*(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)[0-9]*")


def to_csv(schedule: Schedule, path: str | os.PathLike[str]) -> None:
    """Write the tables to `path`: a row a tick, a column for each stage, with cells like `5F3`, or `1F4 1B2`."""
    letters = "FB" if schedule.weight is None else "FIW"

    def cell(tick, stage):
        jobs = []
        for letter, table in zip(letters, schedule.lanes.values(), strict=True):
            microbatch, chunk = divmod(int(table[tick, stage]), schedule.chunks)
            if microbatch >= 0:
                jobs.append(f"{schedule.placed[chunk, stage]}{letter}{microbatch}")
        return " ".join(jobs)

    with open(path, "w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(_columns(schedule.stages))
        rows.writerows(
            [tick, *(cell(tick, s) for s in range(schedule.stages))]
            for tick in range(schedule.ticks)
        )


def from_csv(path: str | os.PathLike[str]) -> Schedule:
    """The schedule that `to_csv`, or a person, or torch, wrote to `path`; chunks and places are read off its cells.

    Files of `torch.distributed.pipelining` are read as the orders of their ranks' jobs: each job gets the first tick in which it
    can run.

    Raises:
        ValueError: the file is no table, or its table cannot run; the message names the line.
    """
    try:
        text = _files.read(path, "a table of text").decode("utf-8-sig")
        header, *rows = list(csv.reader(io.StringIO(text, newline=""))) or [[]]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(
            f"{path}: needed a table of text, as to_csv writes it, found something else ({error})."
        ) from error
    try:
        return _by_rank([header, *rows]) if _is_of_torch(header) else _by_tick(header, rows)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _columns(stages: int) -> list[str]:
    return ["tick", *(f"stage {s}" for s in range(stages))]


def _by_tick(header: list[str], rows: list[list[str]]) -> Schedule:
    """The schedule of our form."""
    columns = _columns(max(len(header) - 1, 1))
    if [name.strip() for name in header] != columns:
        raise ValueError(
            f"line 1: needs the columns {','.join(columns[:2])} and so on; got {_short(header)}."
        )
    cells: list[list[list[Job]]] = []
    for tick, row in enumerate(rows):
        if len(row) != len(columns) or row[0].strip() != str(tick):
            raise ValueError(
                f"line {tick + 2}: needs tick {tick} and {len(columns)} cells, got {_short(row)}."
            )
        cells.append(
            [_jobs(cell.split(), f"line {tick + 2}, stage {s}") for s, cell in enumerate(row[1:])]
        )
    places = _places([[job for row in cells for job in row[s]] for s in range(len(columns) - 1)])
    letters = {letter for row in rows for cell in row[1:] for letter in cell if letter.isalpha()}
    if "B" in letters and letters & {"I", "W"}:
        raise ValueError(
            "The file has B, which is I and W together, beside I or W. Write I and W everywhere, or B."
        )
    in_halves = bool(letters & {"I", "W"})
    tables = {lane: np.full((len(rows), len(columns) - 1), -1) for lane in LANES}
    chunk = {int(place): c for (c, _), place in np.ndenumerate(places)}
    for tick, row in enumerate(cells):
        for s, jobs in enumerate(row):
            for job in jobs:
                if tables[job.lane][tick, s] >= 0:
                    raise ValueError(
                        f"line {tick + 2}, stage {s}: has two {job.lane} jobs. Write them in two ticks."
                    )
                tables[job.lane][tick, s] = job.microbatch * len(places) + chunk[job.place]
    try:
        weight = tables["weight"] if in_halves else None
        return Schedule(tables["forward"], tables["backward"], weight, placement=places)
    except CannotRun as error:
        raise ValueError(f"line {error.tick + 2}: {error}") from None


def _is_of_torch(header: list[str]) -> bool:
    """Whether a file's first row is of jobs, and not of columns' names."""
    cells = [cell.strip() for cell in header if cell.strip()]
    return bool(cells) and bool(
        JOB.fullmatch(cells[0].split(";")[0].lstrip("(")) or MOVES.fullmatch(cells[0])
    )


def _by_rank(rows: Sequence[Sequence[str]]) -> Schedule:
    """The schedule of torch's form: each rank's jobs in their order.

    A whole backward job, B, is I and then W; two jobs that overlap, `(0F3;3B1)OVERLAP_F_B`, run one after the other.
    """
    orders = []
    for rank, row in enumerate(rows):
        cells = [cell for overlapped in row for cell in _parts(overlapped)]
        orders.append(
            [
                job
                for k, cell in enumerate(cells)
                for job in _jobs([cell], f"row {rank + 1}, cell {k + 1}")
            ]
        )
    return from_orders([_from_0(order) for order in orders], _places(orders))


def _from_0(order: list[Job]) -> list[Job]:
    """The jobs with the forwards of each place numbered from 0: `Schedule1F1B` of torch 2.13 numbers its last rank's from 1."""

    def microbatches(lane, place):
        return sorted(job.microbatch for job in order if (job.lane, job.place) == (lane, place))

    from_1 = {
        place
        for place in {job.place for job in order}
        if microbatches("forward", place) == [m + 1 for m in microbatches("backward", place)]
    }
    is_shifted = lambda job: job.lane == "forward" and job.place in from_1
    return [
        job._replace(microbatch=job.microbatch - 1) if is_shifted(job) else job for job in order
    ]


def _parts(cell: str) -> Iterator[str]:
    """The cells inside of one that overlaps several jobs; else itself."""
    overlapped = re.fullmatch(r"\((.*)\)OVERLAP_F_B", cell.strip())
    yield from overlapped[1].split(";") if overlapped else [cell]


def _jobs(words: Sequence[str], where: str) -> list[Job]:
    """The jobs of a cell's words."""
    jobs = []
    for word in filter(None, map(str.strip, words)):
        match = JOB.fullmatch(word)
        if match:
            jobs += [Job(lane, int(match[3]), int(match[1])) for lane in LANES_OF[match[2]]]
        elif not MOVES.fullmatch(word):
            raise ValueError(
                f"{where}: {_short([word])} is no job. Write one as 5F3: place, F, I, W or B, microbatch."
            )
    return jobs


def _places(jobs: Sequence[Sequence[Job]]) -> Int[np.ndarray, "chunks stages"]:
    """The places of each stage, those of its chunks in their order."""
    places = [sorted({job.place for job in of_stage}) for of_stage in jobs]
    counts = {len(of_stage) for of_stage in places}
    if len(counts) != 1 or counts == {0}:
        listed = ", ".join(str(len(of_stage)) for of_stage in places)
        raise ValueError(f"All stages need as many places of the model; got {listed}.")
    homes = sorted((place, stage) for stage, of_stage in enumerate(places) for place in of_stage)
    for expected, (place, stage) in enumerate(homes):
        if place != expected:
            raise ValueError(
                f"Each place of the model, from 0 on, needs one stage; stage {stage} has place {place} where place {expected} "
                "comes next. Number the places without a gap, each on one stage."
            )
    return np.array(places).T


def _short(cells: list[str]) -> str:
    """Cells in a message: what no terminal should get is escaped, and what is long is cut."""
    text = repr(",".join(cells))
    return text if len(text) <= 200 else f"{text[:80]}... ({len(text)} characters)"
