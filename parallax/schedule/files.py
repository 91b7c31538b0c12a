"""A schedule as a CSV file: a row a tick, a column for each lane and stage."""

import csv
import os
import re

import numpy as np

from parallax.schedule.table import LANES, CannotRun, Schedule, job_name


def to_csv(schedule: Schedule, path: str | os.PathLike[str]) -> None:
    """Write the tables to `path`: a row a tick, a column for each lane and stage, with cells like `3`, or `3.1` for chunk 1."""
    v = schedule.chunks
    with open(path, "w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(_columns(schedule.stages, tuple(schedule.lanes)))
        for tick, jobs in enumerate(np.concatenate(list(schedule.lanes.values()), axis=1).tolist()):
            rows.writerow([tick, *("" if job < 0 else job_name(job // v, job % v, v) for job in jobs)])


def from_csv(path: str | os.PathLike[str]) -> Schedule:
    """The schedule that `to_csv`, or a person, wrote to `path`; the number of chunks is read off its cells.

    Raises:
        ValueError: the file is no table, or its table cannot run; the message names the line.
    """
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            header, *rows = list(csv.reader(file)) or [[]]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path}: needed a table of text, as to_csv writes it, found something else ({error}).") from error
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


def _short(cells: list[str]) -> str:
    """Cells in a message: what no terminal should get is escaped, and what is long is cut."""
    text = repr(",".join(cells))
    return text if len(text) <= 200 else f"{text[:80]}... ({len(text)} characters)"


def _columns(stages: int, lanes: tuple[str, ...]) -> list[str]:
    return ["tick", *(f"{lane} {s}" for lane in lanes for s in range(stages))]
