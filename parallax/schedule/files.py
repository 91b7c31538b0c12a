"""Writes and reads a schedule as a CSV file, with one row per tick and one column per stage. A job
is written as its place in the model (the position of its chunk of layers), a letter and its
microbatch: `5F3` is the forward pass (F) of microbatch 3 at place 5.

`5B3` computes the gradients of the input and of the weights, for microbatch 3 at place 5. If the
two gradients are separate jobs, `5I3` computes the input's gradient and `5W3` the weights'
gradient. In lockstep (see the module `table`) a stage may have several jobs in a tick: `1F4 1B2`.
Files of `torch.distributed.pipelining` can be read too: they have one row per rank (a stage) and
one cell per job, and no header.

In the code, a `Job` is (lane, microbatch, place). F is a `Job` in the lane "forward", I in the lane
"backward" and W in the lane "weight". B is read as two `Job`s: one in the lane "backward" and one
in the lane "weight". A placement, [chunks, stages], has the place of each chunk of each stage.
"""

import csv
import io
import os
import re
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from parallax import _files
from parallax.schedule.jobs import Job
from parallax.schedule.orders import from_orders, tables_of
from parallax.schedule.table import CannotRun, Schedule

LANES_OF = {"F": ("forward",), "I": ("backward",), "W": ("weight",), "B": ("backward", "weight")}
JOB = re.compile(r"([0-9]{1,6})([FIWB])([0-9]{1,6})")
# Torch's files also list sends and receives, which are skipped: a `Schedule` derives its own.
MOVES = re.compile(r"[0-9]*(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)[0-9]*")
OVERLAPPED = re.compile(r"\(|\)OVERLAP_F_B|;")  # around and between jobs: `(0F3;3B1)OVERLAP_F_B`


def to_csv(schedule: Schedule, path: str | os.PathLike[str]) -> None:
    """Writes the schedule's tables to the file `path`: one row per tick, one column per stage, and
    cells such as `5F3` or `1F4 1B2`; an empty cell has no job."""
    letters = "FB" if schedule.weight is None else "FIW"  # of `schedule.lanes`, in their order

    def cell(tick, stage):
        """Returns the jobs of one stage in one tick, such as `1F4 1B2`."""
        jobs = []
        for letter, table in zip(letters, schedule.lanes.values(), strict=True):
            # A table has microbatch * chunks + chunk, or -1 for no job: `divmod` of -1 gives
            # microbatch -1.
            microbatch, chunk = divmod(int(table[tick, stage]), schedule.chunks)
            if microbatch >= 0:
                jobs.append(f"{schedule.placed[chunk, stage]}{letter}{microbatch}")
        return " ".join(jobs)

    stages = range(schedule.stages)
    with open(path, "w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(_columns(schedule.stages))
        rows.writerows([tick, *(cell(tick, s) for s in stages)] for tick in range(schedule.ticks))


def from_csv(path: str | os.PathLike[str]) -> Schedule:
    """Returns the schedule in the file `path`, which was written by `to_csv`, by torch or by hand.

    The places of the chunks are read from the cells. A file of `torch.distributed.pipelining` gives
    only the order of each rank's jobs: each job gets the first tick in which it can run.

    Raises:
        ValueError: the file is not a table, or its table cannot run. If one line is at fault, the
            message names this line. If a cell of a file of torch's form has a text that is no job,
            the message names the row and the cell.
    """
    try:
        # Spreadsheets write a byte-order mark first, which "utf-8-sig" leaves out. An empty file is
        # read as an empty header.
        text = _files.read(path, "a table of text").decode("utf-8-sig")
        header, *rows = list(csv.reader(io.StringIO(text, newline=""))) or [[]]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(
            f"{path}: needed a table of text, as to_csv writes it, found something else ({error})."
        ) from error
    of_torch = _is_of_torch(header)
    try:
        return _by_rank([header, *rows]) if of_torch else _by_tick(header, rows)
    except CannotRun as error:
        # Tick 0 is on line 2, below the header. A file of torch's form has no line for a tick.
        line = "" if of_torch else f"line {error.tick + 2}: "
        raise ValueError(f"{path}: {line}{error}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _columns(stages: int) -> list[str]:
    """Returns the header of a file in the form of `to_csv`."""
    return ["tick", *(f"stage {s}" for s in range(stages))]


def _by_tick(header: list[str], rows: list[list[str]]) -> Schedule:
    """Returns the schedule of a file in the form of `to_csv`, one row per tick; raises `ValueError`
    if the file is not of this form."""
    columns = _columns(max(len(header) - 1, 1))
    if [name.strip() for name in header] != columns:
        raise ValueError(
            f"line 1: needs the columns {','.join(columns[:2])} and so on; got {_short(header)}."
        )
    jobs: list[tuple[int, Job]] = []
    of_stages: list[list[Job]] = [[] for _ in columns[1:]]  # the jobs of each stage
    for tick, row in enumerate(rows):
        line = f"line {tick + 2}"
        if len(row) != len(columns) or row[0].strip() != str(tick):
            raise ValueError(
                f"{line}: needs {len(columns)} cells, and the first cell must be the tick, {tick}; "
                f"got {_short(row)}."
            )
        # In lockstep a cell may have several jobs.
        for stage, cell in enumerate(row[1:]):
            of_cell = _jobs(cell.split(), f"{line}, stage {stage}")
            of_stages[stage] += of_cell
            jobs += [(tick, job) for job in of_cell]
    # The characters of all cells; the digits among them do no harm.
    letters = {letter for row in rows for cell in row[1:] for letter in cell}
    if "B" in letters and letters & {"I", "W"}:
        raise ValueError(
            "The file has whole backward jobs (B) and also separate ones (I: input gradient, W: "
            "weight gradient). Write I and W in the whole file, or B in the whole file."
        )
    # The jobs name their places, so a file needs no line for the placement.
    placement = _placement(of_stages)
    forward, backward, weight = tables_of(jobs, placement, ticks=len(rows))
    # A job B stands in the lanes "backward" and "weight" (`LANES_OF`). In a file of B both tables
    # are equal, and the table of "weight" is left out.
    is_split = bool(letters & {"I", "W"})
    return Schedule(forward, backward, weight if is_split else None, placement=placement)


def _is_of_torch(header: list[str]) -> bool:
    """Returns whether a file is in torch's form: the first word of `header` is then a job, or
    torch's word for a send or a receive, and not a column's name."""
    words = OVERLAPPED.sub(" ", " ".join(header)).split()
    return bool(words) and bool(JOB.fullmatch(words[0]) or MOVES.fullmatch(words[0]))


def _by_rank(rows: Sequence[Sequence[str]]) -> Schedule:
    """Returns the schedule of a file in torch's form. Each row of the file has the jobs of one
    rank, in their order. Each job gets the first tick in which it can run.

    A whole backward job (B) is read as an input-gradient job (I) and then a weight-gradient job
    (W): one file of torch may have B, I and W, and a `Schedule` with W cannot have B. If a cell has
    two jobs that torch overlaps, the job that is listed first runs first.
    """
    orders = []  # the jobs of each rank
    for rank, row in enumerate(rows):
        cells = enumerate(row)
        jobs = [_jobs(OVERLAPPED.split(cell), f"row {rank + 1}, cell {k + 1}") for k, cell in cells]
        # Torch numbers the forwards of some ranks from 1, and `_from_0` renumbers them from 0.
        orders.append(_from_0([job for of_cell in jobs for job in of_cell]))
    return from_orders(orders, _placement(orders))


def _from_0(order: list[Job]) -> list[Job]:
    """Returns a rank's jobs. If the file numbers the rank's forwards from 1, the forwards are
    renumbered from 0.

    `Schedule1F1B` of torch 2.13 numbers the forwards of its last rank from 1, and the backwards of
    that rank from 0.
    """
    # The microbatches of each lane at each place.
    numbers: dict[tuple[str, int], list[int]] = {}
    for job in order:
        numbers.setdefault((job.lane, job.place), []).append(job.microbatch)
    # The lanes and places to renumber: the numbers of their forwards are those of the backwards
    # plus 1. A file from which only forward 0 is missing is not of this kind, and is refused later.
    from_1 = set()
    for (lane, place), forward in numbers.items():
        backward = sorted(numbers.get(("backward", place), ()))
        if lane == "forward" and sorted(forward) == [m + 1 for m in backward]:
            from_1.add((lane, place))
    return [
        job._replace(microbatch=job.microbatch - ((job.lane, job.place) in from_1)) for job in order
    ]


def _jobs(words: Sequence[str], where: str) -> list[Job]:
    """Returns the jobs of words such as `5F3`, and skips torch's words for sends and receives. The
    word `5B3` gives two jobs: "backward" and "weight".

    `where` names the cell in errors.
    """
    jobs = []
    for word in filter(None, map(str.strip, words)):
        match = JOB.fullmatch(word)  # place, letter, microbatch
        if match:
            jobs += [Job(lane, int(match[3]), int(match[1])) for lane in LANES_OF[match[2]]]
        elif not MOVES.fullmatch(word):
            raise ValueError(
                f"{where}: {_short([word])} is no job. Write a job as 5F3: the place, then a "
                "letter (F, I, W or B), then the microbatch."
            )
    return jobs


def _placement(jobs: Sequence[Sequence[Job]]) -> Int[np.ndarray, "chunks stages"]:
    """Returns the placement: the place in the model of each chunk of each stage. `jobs` has one
    sequence of jobs for each stage. The places that occur in a stage's jobs, in ascending order,
    are the places of its chunks 0, 1 and so on. Raises `ValueError` if the stages have different
    numbers of chunks, or if a place has no stage or two stages."""
    places = [sorted({job.place for job in of_stage}) for of_stage in jobs]
    counts = [len(of_stage) for of_stage in places]
    if len(set(counts)) != 1 or not counts[0]:
        raise ValueError(
            "All stages need the same number of chunks (places of the model); got "
            f"{', '.join(map(str, counts))}."
        )
    homes = sorted((place, stage) for stage, of_stage in enumerate(places) for place in of_stage)
    for expected, (place, stage) in enumerate(homes):
        if place != expected:
            raise ValueError(
                "The places of all stages, in ascending order, must be 0, 1, 2 and so on; got "
                f"place {place} of stage {stage} instead of place {expected}. Number the places "
                "without a gap, and put each on exactly one stage."
            )
    # `places` is [stages, chunks].
    return np.array(places).T


def _short(cells: list[str]) -> str:
    """Returns cells of the CSV file as one text, for an error: escaped for a terminal, and cut if
    it is long."""
    text = repr(",".join(cells))
    return text if len(text) <= 200 else f"{text[:80]}... ({len(text)} characters)"
