"""A schedule as its executors read it: one row per tick. NumPy only.

Legend: P stages, M microbatches, v chunks per stage, F forward, B backward, or in two halves I, the
input's cotangent, and W, the gradients of the weights.
"""

import operator
from typing import Any, NamedTuple

import jax
import numpy as np

from parallax.schedule import Schedule

Numbers = Any  # whole numbers, with a first dim of ticks: NumPy's here, JAX's inside the loop


class Row(NamedTuple):
    """The jobs, the slots and the messages of a tick: `[ticks, stages]`.

    Attributes:
        jobs: by lane, microbatch * v + chunk, or -1. What all stages run together is `[ticks]`:
            "embed", the microbatch that F begins with at the first place; "head", the one whose F
            the last place ends; and "embed_backward", the one whose B, or I, the first place ends.
        saved: by lane, the slot that F writes (a free one where it has no job) and that B, or I and
            W, read.
        deferred: by lane, the slot that I writes (likewise a free one) and that W reads.
        arrival: by lane, the slot of the message that F, B or I begins with.
        arriving: by distance, the slot for the message from the stage so many before, at the end of
            the tick.
        from_head: the slot for the head's cotangent.
    """

    jobs: dict[str, Numbers]
    saved: dict[str, Numbers]
    deferred: dict[str, Numbers]
    arrival: dict[str, Numbers]
    arriving: dict[int, Numbers]
    from_head: Numbers


def rows(schedule: Schedule) -> Row:
    """Returns the schedule's tables, with the slots and the microbatches at both ends of the
    pipeline."""
    P, v = schedule.stages, schedule.chunks
    # The slot after all others, in which nothing is read.
    nowhere = np.full(schedule.forward.shape, schedule.arrival_count, np.int32)
    arrival = {lane: np.zeros_like(nowhere) for lane in ("forward", "backward")}
    arriving = {distance: nowhere.copy() for distance in distances(schedule)}
    from_head = nowhere.copy()
    for message, slot in schedule.arrivals.items():
        is_of_head = message.lane == "head"
        column = from_head if is_of_head else arriving[(message.target - message.source) % P]
        column[message.sent, message.target] = slot
        lane = "backward" if is_of_head else message.lane
        arrival[lane][message.used, message.target] = slot
    first, last = (
        np.argwhere(schedule.placed == place)[0].tolist() for place in (0, schedule.placed.size - 1)
    )

    def microbatches(jobs, chunk, stage):
        jobs = jobs[:, stage]
        return np.where((jobs >= 0) & (jobs % v == chunk), jobs // v, -1).astype(np.int32)

    def clipped(slots):
        # An idle stage reads slot 0, and its result is masked.
        return {lane: np.maximum(table, 0) for lane, table in slots.items()}

    together = {
        "embed": microbatches(schedule.forward, *first),
        "head": microbatches(schedule.forward, *last),
        "embed_backward": microbatches(schedule.backward, *first),
    }
    return Row(
        jobs=schedule.lanes | together,
        saved=clipped(schedule.saved_slots),
        deferred=clipped(schedule.deferred_slots),
        arrival=arrival,
        arriving=arriving,
        from_head=from_head,
    )


def forward_alone(row: Row) -> Row:
    """Returns the ticks in which any stage runs forward; messages wait in the same slots."""
    runs = (row.jobs["forward"] >= 0).any(axis=1)
    return jax.tree.map(operator.itemgetter(runs), row)


def distances(schedule: Schedule) -> list[int]:
    """Returns the distances, in stages around the ring of P, that messages go: 0 for those that
    stay."""
    messages = [message for message in schedule.messages if message.lane != "head"]
    return sorted({(message.target - message.source) % schedule.stages for message in messages})
