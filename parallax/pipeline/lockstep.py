"""The executor in which all stages run every lane that occurs in a tick: loops over the ticks, without a conditional.

Where the table gives a stage no job, it computes on what is there, and the result is masked. So a ring inside a stage is
allowed: all devices run it. Which lanes run anywhere is constant over stretches of ticks, and each stretch is one `lax.scan`.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from parallax._typing import PyTree
from parallax.collectives.cpu import sequence_after
from parallax.pipeline.buffers import chosen, masked, put, stacked, taken
from parallax.pipeline.jobs import Carry, Jobs, Parameters, Sums
from parallax.pipeline.rows import Row, rows
from parallax.schedule import Schedule
from parallax.schedule.table import phases_of


class Arrived(NamedTuple):
    """What came, or is to be sent.

    Attributes:
        x: from the stage before, as it was sent.
        y: what F made in this tick; None between ticks.
        ct: from the stage after, as it was sent: of the floating-point leaves of x.
        from_head: cotangents that the head made and the last stage has not used yet, [slots, ...] each.
    """

    x: PyTree
    y: PyTree
    ct: PyTree
    from_head: PyTree


Lane: TypeAlias = Callable[[Jobs, Parameters, Carry, Row], Carry]
Lanes: TypeAlias = list[
    tuple[str, Lane]
]  # each by the name that `stretches` has for its ticks, in the order within a tick
Stretch: TypeAlias = tuple[
    frozenset[str], int
]  # the lanes that run, and for how many ticks in a row


def run(jobs: Jobs) -> Sums:
    """The sums of loss and gradients, or of the loss alone, after all ticks."""
    lanes: Lanes = [("forward", forward), ("head", head)]
    if jobs.differentiates and jobs.schedule.weight is None:
        lanes += [("backward", backward)]
    elif jobs.differentiates:
        lanes += [("backward", backward_input), ("weight", Jobs.backward_weight)]
    return _run(jobs, [*lanes, ("forward", send_activation)])


def forward(jobs: Jobs, params: Parameters, carry: Carry, row: Row) -> Carry:
    """F, of what enters or of what came."""
    came = jobs.send.whole(carry.arrived.x, jobs.x)
    y, carry = jobs.forward(params, carry, row, jobs.embed(params, row.entering), came)
    return carry.with_arrived(y=y)


def head(jobs: Jobs, params: Parameters, carry: Carry, row: Row) -> Carry:
    """The head, of what the last stage has finished."""
    ct, carry = jobs.head(params, carry, row, carry.arrived.y)
    return carry.with_arrived(from_head=put(carry.arrived.from_head, ct, row.from_head[-1]))


def backward(jobs: Jobs, params: Parameters, carry: Carry, row: Row) -> Carry:
    """B. Its cotangent is sent first, so that all that follows in the tick can hide the message."""
    ct, gradients = jobs.backward(params, carry, row, _cotangent(jobs, carry, row))
    carry = carry.with_arrived(ct=jobs.moved(jobs.send.part(ct), distance=-1))
    return jobs.with_gradients(params, carry, row, ct, gradients)


def backward_input(jobs: Jobs, params: Parameters, carry: Carry, row: Row) -> Carry:
    """I. It sends its cotangent first, as B does."""
    ct, carry = jobs.backward_input(params, carry, row, _cotangent(jobs, carry, row))
    carry = carry.with_arrived(ct=jobs.moved(jobs.send.part(ct), distance=-1))
    task = jobs.task(row, "backward")
    return jobs.embed_backward(params, carry, row, masked((task.position == 0) & task.valid, ct))


def send_activation(jobs: Jobs, params: Parameters, carry: Carry, row: Row) -> Carry:
    """The activation's hop: a lane of its own, for which no other lane of the tick waits."""
    # On a CPU it waits for all of them: its loop's collectives must be in one order on all devices.
    y = sequence_after(jobs.send.part(carry.arrived.y), (carry.sums.loss, carry.arrived.ct))
    return carry.with_arrived(x=jobs.moved(y, distance=1), y=None)


def _cotangent(jobs: Jobs, carry: Carry, row: Row) -> PyTree:
    """The cotangent that B begins with: at the last place the head's, elsewhere the one received."""
    from_head = taken(carry.arrived.from_head, row.arrival["backward"][-1])
    received = jobs.send.whole(carry.arrived.ct, jobs.moving)
    is_last = jobs.task(row, "backward").position == jobs.schedule.placed.size - 1
    return chosen(is_last, from_head, received)


def _run(jobs: Jobs, lanes: Lanes) -> Sums:
    """The sums after all ticks."""
    schedule, send = jobs.schedule, jobs.send
    table = rows(schedule)
    at_least_0 = lambda microbatches: np.maximum(
        microbatches, 0
    )  # all stages run the lane, also where there is no microbatch
    table = table._replace(
        **{name: at_least_0(getattr(table, name)) for name in ("entering", "finished", "leaving")}
    )
    moving = jobs.moving if jobs.differentiates else None
    from_head = jax.tree.map(lambda leaf: stacked(leaf, schedule.arrival_count), moving)
    # A stage without a job writes too, into a free slot.
    saved = int(table.saved["forward"].max()) + 1
    handed = int(table.handed["backward"].max()) + 1 if table.handed else 0
    carry = jobs.start(
        Arrived(send.part(jobs.x), None, send.part(moving), from_head), saved, handed
    )
    done = 0
    for repeats, pattern in loops(stretches(schedule)):
        period = sum(length for _, length in pattern)
        ticks = jax.tree.map(
            lambda column: jnp.asarray(column[done : done + repeats * period]),
            table,
        )
        once = lambda carry, ticks, pattern=pattern: (
            _stretches(jobs, lanes, pattern, carry, ticks),
            None,
        )
        if repeats == 1:
            carry, _ = once(carry, ticks)
        else:
            ticks = jax.tree.map(
                lambda column: column.reshape(repeats, -1, *column.shape[1:]),
                ticks,
            )
            carry, _ = lax.scan(once, carry, ticks)
        done += repeats * period
    return carry.sums


def _stretches(
    jobs: Jobs, lanes: Lanes, pattern: Sequence[Stretch], carry: Carry, ticks: Row
) -> Carry:
    """The carry after a few stretches, one after another."""
    begin = 0
    for names, length in pattern:
        of_stretch = jax.tree.map(lambda column: column[begin : begin + length], ticks)
        params = jobs.params
        if (
            length == 1
        ):  # XLA writes out a loop of one tick, and no collective of that may overtake the loop before
            of_stretch, params = sequence_after(of_stretch, carry), jobs.params_after(carry)
        running = [functools.partial(lane, jobs, params) for name, lane in lanes if name in names]

        if running:
            carry, _ = lax.scan(functools.partial(_tick, running), carry, of_stretch)
        begin += length
    return carry


def _tick(
    running: Sequence[Callable[[Carry, Row], Carry]], carry: Carry, row: Row
) -> tuple[Carry, None]:
    """The carry after the lanes of a tick, as `lax.scan` takes it."""
    for lane in running:
        carry = lane(carry, row)
    return carry, None


def stretches(schedule: Schedule) -> list[Stretch]:
    """Which lanes run on any stage, the head's included, and for how many ticks in a row."""
    runs = {lane: (table >= 0).any(axis=1) for lane, table in schedule.lanes.items()}
    last_chunk = schedule.forward[:, -1] % schedule.chunks == schedule.chunks - 1
    runs["head"] = (schedule.forward[:, -1] >= 0) & last_chunk
    return [(frozenset(phase.lanes), phase.stop - phase.start) for phase in phases_of(runs)]


def loops(stretches: list[Stretch]) -> Iterator[tuple[int, list[Stretch]]]:
    """The same stretches in order, as (repeats, pattern): a pattern that repeats is one loop, however often it does."""
    begin = 0
    while begin < len(stretches):
        repeats, period = 1, 1
        for length in range(1, (len(stretches) - begin) // 2 + 1):
            times = _repeats(stretches, begin, length)
            if times > 1 and times * length > (repeats * period if repeats > 1 else 0):
                repeats, period = times, length
        yield repeats, stretches[begin : begin + period]
        begin += repeats * period


def _repeats(stretches: list[Stretch], begin: int, period: int) -> int:
    pattern, repeats = stretches[begin : begin + period], 1
    while stretches[begin + repeats * period : begin + (repeats + 1) * period] == pattern:
        repeats += 1
    return repeats
