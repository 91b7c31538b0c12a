"""A schedule as a CSV file: a row a tick, a column for each lane and stage, or, of one job a tick, for each stage."""

import csv
import io
import os
import re

import numpy as np

from parallax import disk
from parallax.schedule import cells as jobs_by_place
from parallax.schedule.table import LANES, CannotRun, Schedule, job_name


def to_csv(schedule: Schedule, path: str | os.PathLike[str]) -> None:
    """Write the tables to `path`: a row a tick, a column for each lane and stage, with cells like `3`, or `3.1` for chunk 1.

    Where each stage has a job of its own, a column for each stage, with cells like `5F3`: F (or I, or W) of microbatch 3 at
    place 5 of the model.
    """
    v = schedule.chunks
    if schedule.per_stage:
        with open(path, "w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows(jobs_by_place.written(schedule))
        return
    with open(path, "w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(_columns(schedule.stages, tuple(schedule.lanes)))
        for tick, jobs in enumerate(np.concatenate(list(schedule.lanes.values()), axis=1).tolist()):
            rows.writerow([tick, *("" if job < 0 else job_name(job // v, job % v, v) for job in jobs)])


def from_csv(path: str | os.PathLike[str]) -> Schedule:
    """The schedule that `to_csv`, or a person, or torch, wrote to `path`; chunks and places are read off its cells.

    Files of `torch.distributed.pipelining`, which have a row a rank, are read as the orders of their ranks' jobs: each job gets
    the first tick in which it can run.

    Raises:
        ValueError: the file is no table, or its table cannot run; the message names the line.
    """
    try:
        text = disk.read(path, "a table of text").decode("utf-8-sig")
        header, *rows = list(csv.reader(io.StringIO(text, newline=""))) or [[]]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path}: needed a table of text, as to_csv writes it, found something else ({error}).") from error
    if [name.strip() for name in header[:2]] == ["tick", "stage 0"] or jobs_by_place.is_by_rank([header]):
        return _one_job_a_tick(path, header, rows)
    stages = sum(name.strip().startswith("forward") for name in header)
    lanes = LANES if any(name.strip().startswith("weight") for name in header) else LANES[:2]
    columns = _columns(stages, lanes)
    if stages == 0 or [name.strip() for name in header] != columns:
        raise ValueError(f"{path}, line 1: needs the columns {','.join(_columns(max(stages, 1), lanes))}; got {_short(header)}.")
    cells = np.full((len(rows), len(columns) - 1, 2), -1)
    for tick, row in enumerate(rows):
        if len(row) != len(columns) or row[0].strip() != str(tick):
            raise ValueError(f"{path}, line {tick + 2}: needs tick {tick} and {len(columns)} cells, got {_short(row)}.")
        for column, cell in enumerate(row[1:]):
            match = re.fullmatch(r"([0-9]{1,6})(?:\.([0-9]{1,6}))?", cell.strip())
            if match:
                cells[tick, column] = int(match[1]), int(match[2] or 0)
            elif cell.strip():
                raise ValueError(
                    f"{path}, line {tick + 2}: {columns[column + 1]} in tick {tick} is {_short([cell])}. "
                    "Write a microbatch as 3, or as 3.1 with its chunk, or leave the cell empty."
                )
    chunks = max(int(cells[..., 1].max(initial=0)) + 1, 1)
    jobs = np.where(cells[..., 0] < 0, -1, cells[..., 0] * chunks + cells[..., 1])
    try:
        return Schedule(*np.split(jobs, len(lanes), axis=1), chunks=chunks)
    except CannotRun as error:
        raise ValueError(f"{path}, line {error.tick + 2}: {error}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _one_job_a_tick(path: str | os.PathLike[str], header: list[str], rows: list[list[str]]) -> Schedule:
    try:
        if jobs_by_place.is_by_rank([header]):
            return jobs_by_place.by_rank([header, *rows])
        columns = ["tick", *(f"stage {s}" for s in range(len(header) - 1))]
        if [name.strip() for name in header] != columns or not rows:
            raise ValueError(f"line 1: needs the columns {','.join(columns)}, and a row for each tick; got {_short(header)}.")
        for tick, row in enumerate(rows):
            if len(row) != len(columns) or row[0].strip() != str(tick):
                raise ValueError(f"line {tick + 2}: needs tick {tick} and {len(columns)} cells, got {_short(row)}.")
        return jobs_by_place.by_tick([row[1:] for row in rows])
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _short(cells: list[str]) -> str:
    """Cells in a message: what no terminal should get is escaped, and what is long is cut."""
    text = repr(",".join(cells))
    return text if len(text) <= 200 else f"{text[:80]}... ({len(text)} characters)"


def _columns(stages: int, lanes: tuple[str, ...]) -> list[str]:
    return ["tick", *(f"{lane} {s}" for lane in lanes for s in range(stages))]
