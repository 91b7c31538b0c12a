"""Turns a schedule into the rows of numbers that the executors read, one row per tick. NumPy only.

Legend: P stages, M microbatches, v chunks per stage, F forward, B backward. B may be split into I
(the input's cotangent) and W (the gradients of the weights). A place is a chunk's position in the
model. A lane is a kind of job: "forward" (F), "backward" (B or I), "weight" (W). Arrays wait in
numbered slots of a stage: F of microbatch 3 may write slot 1, and B of microbatch 3 then reads it.
`saved_slots` are the slots that F writes and B, I or W reads; I writes `deferred_slots` for W.
A message is sent in the tick `sent` by the stage `source`, and used in the tick `used` by the stage
`target`. The lane of a message is the lane of the job that uses the message, or "head" for the
head's cotangent. `schedule.arrivals` has the slot in which each message waits, and `schedule.lanes`
has for each lane a table of jobs, [ticks, stages]: microbatch * v + chunk, or -1 for no job.
"""

import operator
from typing import Any, NamedTuple

import jax
import numpy as np

from parallax.schedule import Schedule

Numbers = Any  # integers with a first dim of ticks; inside the loop, of one tick and JAX's


class Row(NamedTuple):
    """The jobs, the slots and the messages of all ticks: arrays `[ticks, stages]`. Inside the loop
    over the ticks, a `Row` has only one tick, and its arrays are `[stages]`.

    Attributes:
        jobs: for each lane (kind of job), microbatch * (chunks per stage) + chunk, or -1 for no
            job. Three more entries are for the parts that all stages run together. Each of them is
            an array `[ticks]` with one microbatch per tick, or -1. "embed" has the microbatch of
            the forward job of the model's first chunk. "head" has the microbatch of the forward job
            of the last chunk. "embed_backward" has the microbatch of the backward job of the first
            chunk.
        saved: for each lane, the slot of the arrays that a forward job F saves. F writes the slot,
            and the backward job B of the same microbatch and chunk reads the slot. If B is split
            into I and W, both read the slot. In lockstep a stage without a forward job writes too.
            Its slot in the lane "forward" is then a free one, in which no array waits.
        deferred: for each lane, the slot of the arrays that job I leaves for W; an empty dict if no
            B is split. I writes the slot, and W of the same microbatch and chunk reads it. In
            lockstep a stage without a job I writes too. Its slot in the lane "backward" is then a
            free one, in which no array waits.
        arrival: for each lane, the slot from which F, B or I reads its message in this tick.
        arriving: for each distance d, the slot for the message that arrives at the end of this tick
            from the stage that is d stages before this one.
        from_head: the slot for the head's cotangent.
    """

    jobs: dict[str, Numbers]
    saved: dict[str, Numbers]
    deferred: dict[str, Numbers]
    arrival: dict[str, Numbers]
    arriving: dict[int, Numbers]
    from_head: Numbers


def rows(schedule: Schedule) -> Row:
    """Returns the `Row` of all ticks: the schedule's jobs, the slots that they write and read, the
    slots of the messages, and the microbatches of `embed`, `head` and `embed_backward`."""
    P, v = schedule.stages, schedule.chunks
    # A stage also receives messages that no job needs, and writes them to one more slot, the last,
    # which nothing reads.
    nowhere = np.full(schedule.forward.shape, schedule.arrival_count, np.int32)
    # `arrival` has the slots that jobs read, and `arriving` the slots that messages are written to.
    # `arrival` is 0 for a job that needs no message, or for no job: what is read is not used.
    arrival = {lane: np.zeros_like(nowhere) for lane in ("forward", "backward")}
    arriving = {distance: nowhere.copy() for distance in distances(schedule)}
    from_head = nowhere.copy()
    for message, slot in schedule.arrivals.items():
        is_of_head = message.lane == "head"
        table = from_head if is_of_head else arriving[(message.target - message.source) % P]
        table[message.sent, message.target] = slot
        # A message is read by a job of its lane. A backward job reads the head's cotangent.
        lane = "backward" if is_of_head else message.lane
        arrival[lane][message.used, message.target] = slot
    # (chunk, stage) of the first and of the last place of the model.
    first, last = (
        np.argwhere(schedule.placed == place)[0].tolist() for place in (0, schedule.placed.size - 1)
    )

    def microbatches(jobs, chunk, stage):
        """Returns for each tick the microbatch for which the stage runs a job of this chunk, or -1
        if it runs none. A number in `jobs` is microbatch * (chunks per stage) + chunk."""
        jobs = jobs[:, stage]
        return np.where((jobs >= 0) & (jobs % v == chunk), jobs // v, -1).astype(np.int32)

    def clipped(slots):
        # In a lane that reads slots, an idle stage has the slot -1. It reads slot 0 instead, and
        # its result is masked. In a lane that writes slots, it has a free slot, never -1.
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
    """Returns the rows of the ticks in which any stage runs a forward job, for the loss without
    gradients. The slots of the messages are those of the whole schedule."""
    runs = (row.jobs["forward"] >= 0).any(axis=1)
    return jax.tree.map(operator.itemgetter(runs), row)


def distances(schedule: Schedule) -> list[int]:
    """Returns the distances over which the schedule sends messages, without repeats and in
    ascending order. A distance is a number of stages, counted forward around the ring of P stages.
    The distance is 0 for a message that stays on its stage. Messages with the head's cotangents are
    left out, since the head itself moves these cotangents."""
    messages = [message for message in schedule.messages if message.lane != "head"]
    return sorted({(message.target - message.source) % schedule.stages for message in messages})
