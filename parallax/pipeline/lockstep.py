"""The executor in which all stages run the same kinds of job in a tick: if the schedule gives at
least one stage a job of a kind, all stages run this kind. The program consists of loops over the
ticks, without a conditional.

If the schedule's table gives a stage no job in a tick, the stage computes on values that are left
from earlier ticks, and the result is masked. So a ring of `ppermute` inside a stage is allowed: all
devices run the ring. But the user's `stage` must not itself send, over the axis of the stages,
values computed from a microbatch or a cotangent: in a tick, each stage has another microbatch, or
none (`checks.refuse_sending`).

F is the forward pass of a chunk of layers for one microbatch, and B its backward pass. B may be
split into I (the cotangent of the input x) and W (the gradients of the weights). A lane is one kind
of work within a tick: "forward" (F), "head", "backward" (B or I), "weight" (W). A stretch is a
series of successive ticks in which the same lanes run; each stretch is one `lax.scan`.

A row has the numbers of one tick: `row.jobs["forward"][stage]` is the number of a job, or -1 for
none. Job 3 is the job for microbatch 3 if a stage has one chunk. The embedding, its backward pass
and the head run on all stages; `row.jobs["embed"]`, `row.jobs["embed_backward"]` and
`row.jobs["head"]` are the numbers of their microbatches. In the other fields of a row, each number
is the index of a slot, a place in a buffer where an array waits for a later tick. `table` and
`ticks` have the rows of many ticks. `carry` has the values that a tick passes to the next tick:
`carry.arrived` has the messages of this stage, and `carry.sums` the sums of losses and gradients.
`jobs` runs the user's functions: `jobs.forward(carry, row, ...)` returns F's output and the new
carry.

`jobs.x` is an activation of zeros, and `jobs.moving` its floating-point leaves, which have a
cotangent. `jobs.send.part` turns an array into a message, and `jobs.send.whole(message, like)`
turns the message into the array again. `jobs.moved(x, distance=d)` sends `x` to the stage that is d
stages after this one. `sequence_after(x, y)` returns `x`; on a CPU, code that uses the result waits
until `y` is computed.
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
from parallax.pipeline.buffers import chosen, masked, put, stacked_zeros, taken
from parallax.pipeline.jobs import Carry, Jobs, Sums
from parallax.pipeline.rows import Row, rows
from parallax.schedule import LANES
from parallax.schedule.table import phases_of


class Arrived(NamedTuple):
    """The messages of this stage.

    Attributes:
        entered: the embedding's output for the next forward job of the model's first chunk.
        x: the message with an activation, from the stage before this one.
        y: the output of the forward job in this tick; None between ticks.
        ct: the message with the cotangent of a chunk's output, from the stage after this one.
        from_head: cotangents of the head that the last stage has not used yet, [slots, ...] each.
    """

    entered: PyTree
    x: PyTree
    y: PyTree
    ct: PyTree
    from_head: PyTree


Lane: TypeAlias = Callable[[Jobs, Carry, Row], Carry]
# Functions in their order within a tick, each with the name of the lane in whose ticks it runs.
Lanes: TypeAlias = list[tuple[str, Lane]]
# The lanes that run, and for how many ticks in a row.
Stretch: TypeAlias = tuple[frozenset[str], int]


def run(jobs: Jobs) -> Sums:
    """Runs all ticks, and returns the sums: the loss, the gradients if they are needed, and the
    auxiliary values of all microbatches."""
    # Each pair is a function, and the lane in whose ticks it runs. The head comes before the
    # backward lane: B of the last chunk may use the head's cotangent in the same tick.
    lanes: Lanes = [("forward", forward), ("head", head)]
    if jobs.differentiates:
        lanes += [("backward", backward), ("weight", Jobs.weight)]
    # The send of the activation and the next embedding come last, and no job of the tick waits for
    # them: XLA can overlap their messages with the backward lanes.
    return _run(jobs, [*lanes, ("forward", send_activation), ("forward", embed_next)])


def forward(jobs: Jobs, carry: Carry, row: Row) -> Carry:
    """Runs the forward job of a chunk. The model's first chunk runs on the embedding's output, and
    any other chunk on the activation that arrived. Keeps the output as `y`."""
    arrived = jobs.send.whole(carry.arrived.x, jobs.x)
    y, carry = jobs.forward(carry, row, carry.arrived.entered, arrived)
    return carry.with_arrived(y=y)


def head(jobs: Jobs, carry: Carry, row: Row) -> Carry:
    """Runs the head on the output that the forward job gave in this tick, and stores the cotangent
    of this output in a slot."""
    ct, carry = jobs.head(carry, row, carry.arrived.y)
    # All stages write into the last stage's slot number, `[-1]`; only the last stage reads it.
    return carry.with_arrived(from_head=put(carry.arrived.from_head, ct, row.from_head[-1]))


def backward(jobs: Jobs, carry: Carry, row: Row) -> Carry:
    """Runs the backward job: B, or only I if the schedule splits B into I and W. B and I both
    compute the cotangent of the chunk's input, and the function sends this cotangent to the stage
    before. Then it runs the backward pass of the embedding: on this cotangent if the chunk is the
    model's first, else on 0."""
    ct, carry = jobs.backward(carry, row, _cotangent(jobs, carry, row))
    # The message needs only the cotangent, so it can overlap with the gradients that follow.
    carry = carry.with_arrived(ct=jobs.moved(jobs.send.part(ct), distance=-1))
    task = jobs.task_of(row, "backward")
    # All stages run the embedding's backward pass, since embed may have collectives.
    is_first = (task.position == 0) & task.valid
    return jobs.embed_backward(carry, row, masked(is_first, ct))


def send_activation(jobs: Jobs, carry: Carry, row: Row) -> Carry:
    """Sends `y`, the output of this tick's forward job, to the next stage, where it arrives as `x`.
    Then sets `y` to None: the carry has `y` only within a tick. The jobs of this tick (F, head, B
    and W) do not wait for the message."""
    # On a CPU all devices must run the collectives of a loop in one order. So there the message
    # waits for F, for the head (its loss) and for B (the cotangent that B sent), but not for the
    # gradients that embed_backward and W compute after that cotangent.
    y = sequence_after(jobs.send.part(carry.arrived.y), (carry.sums.loss, carry.arrived.ct))
    return carry.with_arrived(x=jobs.moved(y, distance=1), y=None)


def embed_next(jobs: Jobs, carry: Carry, row: Row) -> Carry:
    """Runs the embedding for the next tick that has a forward job. No other work of this tick waits
    for the embedding's messages."""
    # `row.jobs["embed"]` is the microbatch of the next tick with F: `_run` moved these numbers. On
    # a CPU the embedding's messages wait for the activation's. With `jobs.after`, code that uses
    # the parameters waits too: a collective of the embedding may depend on the parameters alone.
    microbatch = sequence_after(row.jobs["embed"], carry.arrived.x)
    return carry.with_arrived(entered=jobs.after(carry.arrived.x).embed(microbatch))


def _cotangent(jobs: Jobs, carry: Carry, row: Row) -> PyTree:
    """Returns the cotangent that the backward job begins with: for the last chunk of the model, the
    cotangent from the head; for other chunks, the cotangent that arrived from the stage after."""
    # The column `[-1]` is the last stage's slot: only that stage uses the head's cotangent.
    from_head = taken(carry.arrived.from_head, jobs.moving, row.arrival["backward"][-1])
    received = jobs.send.whole(carry.arrived.ct, jobs.moving)
    is_last = jobs.task_of(row, "backward").position == jobs.schedule.placed.size - 1
    return chosen(is_last, from_head, received)


def _run(jobs: Jobs, lanes: Lanes) -> Sums:
    """Runs all ticks of the schedule, and returns the sums. `lanes` has pairs: a kind of work and
    its function. A tick runs the function of each kind that at least one stage has in this tick. If
    a sequence of stretches (successive ticks with the same kinds) repeats, one loop runs all its
    repeats."""
    schedule, send = jobs.schedule, jobs.send
    table = rows(schedule)
    all_stretches = stretches(table)
    # Every tick with F runs the embedding, and every tick with B the embedding's backward pass. If
    # such a tick has no microbatch for them (-1), these two run on microbatch 0, and no result is
    # used. The head runs only in ticks with a microbatch, so for it the 0 has no effect.
    # `stretches`, called above, needs the -1, so each -1 is replaced only here.
    together = {
        name: np.maximum(table.jobs[name], 0) for name in ("embed", "head", "embed_backward")
    }
    # Each tick with F computes, at its end, the embedding for the next tick with F, so that the
    # embedding's messages can overlap with the backward lanes. So each number moves to the tick
    # with F before its own, and the first microbatch is embedded before the loop. The last tick
    # with F has no next one: it embeds microbatch 0, and the result is not used.
    has_forward = (table.jobs["forward"] >= 0).any(axis=1)
    embedded = together["embed"][has_forward]
    together["embed"][has_forward] = np.append(embedded[1:], 0)
    table = table._replace(jobs=table.jobs | together)
    moving = jobs.moving if jobs.differentiates else None  # without gradients, no cotangents
    # In lockstep, of all messages only the head's cotangents wait in slots.
    from_head = stacked_zeros(moving, schedule.arrival_count)
    # Idle stages write too, into a free slot, so this may be more than the schedule's slot_count.
    # (In lockstep the schedule's deferred_count includes such slots.)
    saved_count = int(table.saved["forward"].max()) + 1
    # The embedding for the first tick with F. On a CPU, no other collective may run beside its
    # messages, nor may one that XLA moves out of the loops. So all parameters wait for it.
    entered = jobs.embed(jnp.asarray(embedded[0]))
    jobs = jobs.after(entered)
    # `y`, the output of F in a tick, is None between ticks.
    arrived = Arrived(
        entered=entered,
        x=send.part(jobs.x),
        y=None,
        ct=send.part(moving),
        from_head=from_head,
    )
    carry = jobs.start(arrived, saved_count, schedule.deferred_count)
    first = 0  # the first tick of the pattern
    for repeats, pattern in loops(all_stretches):
        # The first tick of the program has no loop before it that it must wait for (`is_first`). In
        # a pattern that repeats, the first tick must wait: it also follows the pattern's last tick.
        run_pattern = functools.partial(
            _stretches, jobs, lanes, pattern, is_first=first == 0 and repeats == 1
        )
        length = repeats * sum(length for _, length in pattern)
        ticks = jax.tree.map(jnp.asarray, _between(table, first, first + length))
        # A pattern that occurs once needs no loop around its own loops.
        if repeats == 1:
            carry, _ = run_pattern(carry, ticks)
        else:
            by_repeat = functools.partial(_by_repeat, repeats)
            carry, _ = lax.scan(run_pattern, carry, jax.tree.map(by_repeat, ticks))
        first += length
    return carry.sums


def _between(ticks: Row, start: int, stop: int) -> Row:
    """Returns the rows of the schedule's table for the ticks `start` to `stop` - 1."""
    return jax.tree.map(operator.itemgetter(slice(start, stop)), ticks)


def _by_repeat(repeats: int, numbers: Array) -> Array:
    """Reshapes an array of the schedule's table from [ticks, ...] to [repeats, ticks / repeats,
    ...], so that `lax.scan` loops over the repeats of a pattern of ticks."""
    return numbers.reshape(repeats, -1, *numbers.shape[1:])


def _stretches(
    jobs: Jobs,
    lanes: Lanes,
    pattern: Sequence[Stretch],
    carry: Carry,
    ticks: Row,
    *,
    is_first: bool,
) -> tuple[Carry, None]:
    """Runs the stretches of one pattern, and returns `(carry, None)`, as a body of `lax.scan`. Each
    stretch of `pattern` is a pair: the names of the lanes (kinds of job) that run, and the number
    of ticks in which they run. `lanes` has pairs of a lane's name and the lane's function. `ticks`
    has the schedule's rows for all ticks of the pattern. If `is_first` is true, the pattern begins
    with the program's first tick. No loop runs before that tick, so the tick waits for no loop."""
    first = 0  # the first tick of the stretch
    for names, length in pattern:
        of_stretch, jobs_now = _between(ticks, first, first + length), jobs
        if length == 1 and not (is_first and first == 0):
            # XLA unrolls a loop of one tick. On a CPU its collectives must then wait for the
            # previous loop, or devices could run them in different orders. In `jobs.after(carry)`,
            # code that uses the parameters waits for the carry.
            of_stretch, jobs_now = sequence_after(of_stretch, carry), jobs.after(carry)
        running = [functools.partial(lane, jobs_now) for name, lane in lanes if name in names]
        # If only the loss is needed, no lane runs in the backward ticks.
        if running:
            carry, _ = lax.scan(functools.partial(_tick, running), carry, of_stretch)
        first += length
    return carry, None


def _tick(
    running: Sequence[Callable[[Carry, Row], Carry]], carry: Carry, row: Row
) -> tuple[Carry, None]:
    """Runs `running`, the functions of the lanes (kinds of job) that run in one tick, in order.
    Returns `(carry, None)`, as a body of `lax.scan`."""
    for lane in running:
        carry = lane(carry, row)
    return carry, None


def stretches(table: Row) -> list[Stretch]:
    """Returns the stretches of a schedule's table in order. A stretch is a pair: the set of lanes
    (kinds of job) that run on at least one stage (the head counts as a lane), and the number of
    successive ticks in which these lanes run."""
    # `jobs` is [ticks, stages], or [ticks] for the head. The head is a lane of its own: it runs in
    # fewer ticks than F, only in those in which the last chunk of the model has run. `phases_of`
    # joins successive ticks with the same lanes. The entries "embed" and "embed_backward" are no
    # lanes: every tick of the lane "forward" runs the embedding, and every tick of the lane
    # "backward" runs the backward pass of the embedding.
    runs = {
        lane: (jobs >= 0).reshape(len(jobs), -1).any(axis=1)
        for lane, jobs in table.jobs.items()
        if lane in (*LANES, "head")
    }
    return [(frozenset(phase.lanes), phase.stop - phase.start) for phase in phases_of(runs)]


def loops(stretches: list[Stretch]) -> Iterator[tuple[int, list[Stretch]]]:
    """Yields the stretches (runs of ticks with the same kinds of job) in order, as (repeats,
    pattern): the stretches a, b, c, b, c are (1, [a]) and (2, [b, c]). A pattern that repeats
    becomes one loop, so that the program does not grow with the number of microbatches."""
    begin = 0
    while begin < len(stretches):
        # A pattern that repeats is at most half of the stretches that are left.
        periods = range(1, (len(stretches) - begin) // 2 + 1)
        repeats = {period: _repeats(stretches, begin, period) for period in periods}
        # By period, the number of stretches that its repeats cover. The period that covers the most
        # is taken, and the shortest if several cover as many: `max` takes the first. If nothing
        # repeats, the next stretch alone is the pattern.
        covered = {period: times * period for period, times in repeats.items() if times > 1}
        period = max(covered, key=covered.__getitem__, default=1)
        stop = begin + covered.get(period, 1)
        yield (stop - begin) // period, stretches[begin : begin + period]
        begin = stop


def _repeats(stretches: list[Stretch], begin: int, period: int) -> int:
    """Returns how many times in a row a pattern of stretches occurs, which is at least 1. The
    pattern is `stretches[begin : begin + period]`."""
    pattern, repeats = stretches[begin : begin + period], 1
    while stretches[begin + repeats * period : begin + (repeats + 1) * period] == pattern:
        repeats += 1
    return repeats
