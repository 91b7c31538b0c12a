"""The executor in which all stages run every lane that occurs in a tick: loops over the ticks,
without a conditional.

Where the table gives a stage no job, it computes on what is there, and the result is masked. So a
ring inside a stage is allowed: all devices run it. Which lanes run anywhere is constant over
stretches of ticks, and each stretch is one `lax.scan`.
"""

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from parallax._typing import PyTree
from parallax.collectives.cpu import sequence_after
from parallax.pipeline.buffers import chosen, masked, put, stacked, taken
from parallax.pipeline.jobs import Carry, Jobs, Sums
from parallax.pipeline.rows import Row, rows
from parallax.schedule import LANES
from parallax.schedule.table import phases_of


class Arrived(NamedTuple):
    """The messages of this stage.

    Attributes:
        x: the activation from the stage before, as it was sent.
        y: the output of F in this tick; None between ticks.
        ct: the cotangent from the stage after, as it was sent: of the floating-point leaves of x.
        from_head: cotangents of the head that the last stage has not used yet, [slots, ...] each.
    """

    x: PyTree
    y: PyTree
    ct: PyTree
    from_head: PyTree


Lane: TypeAlias = Callable[[Jobs, Carry, Row], Carry]
# Each lane with the name that `stretches` has for its ticks, in their order within a tick.
Lanes: TypeAlias = list[tuple[str, Lane]]
# The lanes that run, and for how many ticks in a row.
Stretch: TypeAlias = tuple[frozenset[str], int]


def run(jobs: Jobs) -> Sums:
    """Returns the sums of loss and gradients, or only of the loss, after all ticks."""
    lanes: Lanes = [("forward", forward), ("head", head)]
    if jobs.differentiates:
        lanes += [("backward", backward), ("weight", Jobs.weight)]
    # The send is a lane of its own and the last, so that the other lanes of the tick can hide it.
    return _run(jobs, [*lanes, ("forward", send_activation)])


def forward(jobs: Jobs, carry: Carry, row: Row) -> Carry:
    """Runs F, of the embedding's output or of the activation that arrived."""
    arrived = jobs.send.whole(carry.arrived.x, jobs.x)
    y, carry = jobs.forward(carry, row, jobs.embed(row), arrived)
    return carry.with_arrived(y=y)


def head(jobs: Jobs, carry: Carry, row: Row) -> Carry:
    """Returns the head, of the last stage's output."""
    ct, carry = jobs.head(carry, row, carry.arrived.y)
    return carry.with_arrived(from_head=put(carry.arrived.from_head, ct, row.from_head[-1]))


def backward(jobs: Jobs, carry: Carry, row: Row) -> Carry:
    """Runs B, or I, and the gradients of what the embedding reads."""
    ct, carry = jobs.backward(carry, row, _cotangent(jobs, carry, row))
    # The message needs only the cotangent, so the gradients that follow can hide it.
    carry = carry.with_arrived(ct=jobs.moved(jobs.send.part(ct), distance=-1))
    task = jobs.task_of(row, "backward")
    is_first = (task.position == 0) & task.valid
    return jobs.embed_backward(carry, row, masked(is_first, ct))


def send_activation(jobs: Jobs, carry: Carry, row: Row) -> Carry:
    """Returns the activation's message to the next stage, for which no other lane of the tick
    waits."""
    # On a CPU it waits for them: the collectives of a loop must be in one order on all devices.
    y = sequence_after(jobs.send.part(carry.arrived.y), (carry.sums.loss, carry.arrived.ct))
    return carry.with_arrived(x=jobs.moved(y, distance=1), y=None)


def _cotangent(jobs: Jobs, carry: Carry, row: Row) -> PyTree:
    """Returns the cotangent that B begins with: at the last place the head's, else the one that
    arrived."""
    from_head = taken(carry.arrived.from_head, jobs.moving, row.arrival["backward"][-1])
    received = jobs.send.whole(carry.arrived.ct, jobs.moving)
    is_last = jobs.task_of(row, "backward").position == jobs.schedule.placed.size - 1
    return chosen(is_last, from_head, received)


def _run(jobs: Jobs, lanes: Lanes) -> Sums:
    """Returns the sums after all ticks."""
    schedule, send = jobs.schedule, jobs.send
    table = rows(schedule)
    all_stretches = stretches(table)
    # All stages run a lane, also those without a microbatch: they compute on microbatch 0.
    together = {
        name: np.maximum(table.jobs[name], 0) for name in ("embed", "head", "embed_backward")
    }
    table = table._replace(jobs=table.jobs | together)
    moving = jobs.moving if jobs.differentiates else None
    from_head = stacked(moving, schedule.arrival_count)
    # A stage without a job writes too, into a free slot.
    saved = int(table.saved["forward"].max()) + 1
    arrived = Arrived(send.part(jobs.x), None, send.part(moving), from_head)
    carry = jobs.start(arrived, saved, schedule.deferred_count)
    first = 0
    for repeats, pattern in loops(all_stretches):
        run_pattern = functools.partial(_stretches, jobs, lanes, pattern)
        length = repeats * sum(length for _, length in pattern)
        ticks = jax.tree.map(jnp.asarray, _between(table, first, first + length))
        # A loop of one trip would be another loop around the same program.
        if repeats == 1:
            carry, _ = run_pattern(carry, ticks)
        else:
            by_repeat = functools.partial(_by_repeat, repeats)
            carry, _ = lax.scan(run_pattern, carry, jax.tree.map(by_repeat, ticks))
        first += length
    return carry.sums


def _between(ticks: Row, start: int, stop: int) -> Row:
    return jax.tree.map(operator.itemgetter(slice(start, stop)), ticks)


def _by_repeat(repeats: int, column: Array) -> Array:
    return column.reshape(repeats, -1, *column.shape[1:])


def _stretches(
    jobs: Jobs, lanes: Lanes, pattern: Sequence[Stretch], carry: Carry, ticks: Row
) -> tuple[Carry, None]:
    """Returns the carry after a few stretches, one after another, as `lax.scan` takes it."""
    first = 0
    for names, length in pattern:
        of_stretch, jobs_now = _between(ticks, first, first + length), jobs
        if length == 1:
            # XLA unrolls a loop of one tick. On a CPU its collectives must then wait for the loop
            # before, or devices could run them in different orders.
            of_stretch, jobs_now = sequence_after(of_stretch, carry), jobs.after(carry)
        running = [functools.partial(lane, jobs_now) for name, lane in lanes if name in names]
        # For the loss without gradients the backward ticks are empty.
        if running:
            carry, _ = lax.scan(functools.partial(_tick, running), carry, of_stretch)
        first += length
    return carry, None


def _tick(
    running: Sequence[Callable[[Carry, Row], Carry]], carry: Carry, row: Row
) -> tuple[Carry, None]:
    """Returns the carry after the lanes of a tick, as `lax.scan` takes it."""
    for lane in running:
        carry = lane(carry, row)
    return carry, None


def stretches(table: Row) -> list[Stretch]:
    """Returns the lanes that run on any stage, the head among them, and for how many ticks in a
    row."""
    # Only the last chunk's output is the model's, so with chunks the head runs in fewer ticks.
    runs = {
        lane: (jobs >= 0).reshape(len(jobs), -1).any(axis=1)
        for lane, jobs in table.jobs.items()
        if lane in (*LANES, "head")
    }
    return [(frozenset(phase.lanes), phase.stop - phase.start) for phase in phases_of(runs)]


def loops(stretches: list[Stretch]) -> Iterator[tuple[int, list[Stretch]]]:
    """Returns the same stretches in order, as (repeats, pattern): a pattern that repeats is one
    loop.

    So the program does not grow with the number of microbatches.
    """
    begin = 0
    while begin < len(stretches):
        periods = range(1, (len(stretches) - begin) // 2 + 1)
        repeats = {period: _repeats(stretches, begin, period) for period in periods}
        # The pattern that covers most, the shortest of these; alone, a stretch is its own pattern.
        covered = {period: times * period for period, times in repeats.items() if times > 1}
        period = max(covered, key=covered.__getitem__, default=1)
        stop = begin + covered.get(period, 1)
        yield (stop - begin) // period, stretches[begin : begin + period]
        begin = stop


def _repeats(stretches: list[Stretch], begin: int, period: int) -> int:
    pattern, repeats = stretches[begin : begin + period], 1
    while stretches[begin + repeats * period : begin + (repeats + 1) * period] == pattern:
        repeats += 1
    return repeats
