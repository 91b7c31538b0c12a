"""A schedule of one job a tick and stage as its executor reads it: one row a tick.

Legend: P stages, M microbatches, v chunks a stage, F forward, I input gradient, W weight gradient. NumPy only.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from parallax.schedule import Schedule

Numbers = Any  # whole numbers, with a first dim of ticks: NumPy's here, JAX's inside the loop


class Turn(NamedTuple):
    """What happens in a tick: `[ticks, stages]`, or, of the last three, one for all stages, `[ticks]`.

    Attributes:
        kind: 0 nothing, 1 F, 2 I, 3 W.
        job: microbatch * v + chunk; 0 where there is none.
        slot: of the residuals, which F writes, and I and W read.
        handed: the slot for what I hands on to W.
        taken: the arrival that F or I begins with.
        arriving: by distance, the slot of what comes over it at the end of the tick; one that is never read where nothing does.
        of_head: the slot for the cotangent that the head makes, likewise.
        entering: the microbatch that F begins with at the first place, or -1.
        finished: the microbatch whose F the last place ends, or -1.
        leaving: the microbatch whose I the first place ends, or -1.
    """

    kind: Numbers
    job: Numbers
    slot: Numbers
    handed: Numbers
    taken: Numbers
    arriving: dict[int, Numbers]
    of_head: Numbers
    entering: Numbers
    finished: Numbers
    leaving: Numbers


def turns(schedule: Schedule) -> Turn:
    """The schedule's tables, and what follows from them."""
    P, v = schedule.stages, schedule.chunks
    nowhere = np.full(schedule.jobs.shape, schedule.arrival_count, np.int32)
    taken, of_head, arriving = np.zeros_like(nowhere), nowhere.copy(), {d: nowhere.copy() for d in distances(schedule)}
    for message, slot in schedule.arrivals.items():
        taken[message.used, message.target] = slot
    for message in schedule.messages:
        arriving[(message.target - message.source) % P][message.sent, message.target] = schedule.arrivals[message]
    for message in schedule.from_head:
        of_head[message.sent, message.target] = schedule.arrivals[message]
    first, last = (np.argwhere(schedule.placed == place)[0].tolist() for place in (0, schedule.placed.size - 1))

    def of(table, chunk, stage):
        jobs = table[:, stage]
        return np.where((jobs >= 0) & (jobs % v == chunk), jobs // v, -1).astype(np.int32)

    return Turn(
        kind=schedule.kinds,
        job=np.maximum(schedule.jobs, 0),
        slot=_by_job(schedule, schedule.slots),
        handed=_by_job(schedule, schedule.handed_on),
        taken=taken,
        arriving=arriving,
        of_head=of_head,
        entering=of(schedule.forward, *first),
        finished=of(schedule.forward, *last),
        leaving=of(schedule.backward, *first),
    )


def _by_job(schedule: Schedule, slots: Mapping[str, Numbers]) -> Numbers:
    """The slot of each stage's job, whatever it is of; 0 where it has none."""
    none = np.zeros_like(schedule.jobs)
    return sum((np.where(schedule.lanes[lane] >= 0, table, 0) for lane, table in slots.items()), start=none)


def forward_alone(turn: Turn) -> Turn:
    """The ticks in which anything runs forward, and nothing else in them; what arrives waits where it did."""
    runs = (turn.kind == 1).any(axis=1)
    rows = lambda column: {d: each[runs] for d, each in column.items()} if isinstance(column, dict) else column[runs]
    kept = Turn(*map(rows, turn))
    return kept._replace(kind=(kept.kind == 1).astype(np.int32))


def distances(schedule: Schedule) -> list[int]:
    """How many stages on the messages go, of P around: 0 for those that stay."""
    return sorted({(message.target - message.source) % schedule.stages for message in schedule.messages})
