"""The executor in which each stage runs only its own job in a tick, or no job. The program is one
loop over the ticks, without a conditional.

Each job is the body of a loop. The loop has one iteration on a stage that has the job in this tick,
and none on other stages. The jobs are F (the forward pass of a chunk of layers for one microbatch),
I (the cotangent of the chunk's input x) and W (the gradients of the chunk's weights). The
embedding, its backward pass and the head may communicate over the stages: if one of them runs in a
tick, all devices run it. A tick has several parts, in this order: embed; forward (F), backward (I)
or weight (W), whichever job the stage has; exchange; head; embed_backward. The exchange sends
messages in every tick. A message waits in a slot, a numbered place in a buffer, until the job that
needs it runs.

A row has the numbers of one tick: `row.jobs["forward"][stage]` is the number of a job, or -1 for
none. Job 3 is the job for microbatch 3 if a stage has one chunk. `row.jobs["embed"]`,
`row.jobs["embed_backward"]` and `row.jobs["head"]` are the numbers of the microbatches for which
the embedding, its backward pass and the head run. In the other fields of a row, each number is the
index of a slot. `table` has the rows of all ticks. `carry` has the values that a part passes to
the next part: `carry.arrived` has the messages of this stage, and `carry.sums` the sums of losses
and gradients. `jobs` runs the user's functions: `jobs.forward(carry, row, ...)` returns F's output
and the new carry. `jobs.index` is the number of this stage, and `jobs.first` says whether it is
stage 0.

`jobs.x` is an activation of zeros, and `jobs.moving` are its floating-point leaves, which have a
cotangent. `jobs.send.part` turns an array into a message, and `jobs.send.whole(message, like)`
turns the message into the array again. `jobs.moved(x, distance=d)` sends `x` to the stage that is d
stages after this one. `sequence_after(x, y)` returns `x`. On a CPU, code that uses the result waits
until `y` is computed; on other platforms nothing waits.
"""

import functools
import operator
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn
from jaxtyping import Array, Int

from parallax._typing import PyTree
from parallax.collectives import Axis, types
from parallax.collectives.cpu import sequence_after
from parallax.collectives.types import varying
from parallax.grads.axes import axes_of
from parallax.jaxprs import COLLECTIVES, counted_scope, inner, opened
from parallax.pipeline.buffers import masked, put, stacked_zeros, taken
from parallax.pipeline.checks import without_the_stages
from parallax.pipeline.jobs import Carry, Jobs, Sums
from parallax.pipeline.rows import Row, forward_alone, rows
from parallax.pipeline.traced import trace
from parallax.source_lines import source


class Arrived(NamedTuple):
    """The messages of this stage.

    Attributes:
        slots: the messages that arrived and wait for their jobs: an array [slots, ...] for each
            leaf of a message. A message is an activation or a cotangent.
        entered: the output of the embedding in this tick; None between ticks.
        sent: the message that this stage sends in this tick; None between ticks.
    """

    slots: PyTree
    entered: PyTree
    sent: PyTree


Part: TypeAlias = Callable[[Jobs, Carry, Row], Carry]


def run(jobs: Jobs) -> Sums:
    """Runs all ticks, and returns the sums: the loss, the gradients if they are needed, and the
    auxiliary values of all microbatches."""
    table, schedule = rows(jobs.schedule), jobs.schedule  # the `Row` of all ticks
    parts: dict[str, Part] = {"forward": forward}
    if jobs.differentiates:
        parts |= {"backward": backward, "weight": Jobs.weight}
    else:
        table = forward_alone(table)  # only the ticks with F
    nothing_sent = jobs.send.part(jobs.x)  # zeros of a message's shapes
    # One slot more than the table needs, for messages that no job reads.
    slots = stacked_zeros(nothing_sent, schedule.arrival_count + 1)
    # Within a tick `entered` and `sent` are arrays. They are here too, since `_traced_alone` traces
    # the jobs on this carry. Between ticks they are None, which takes no memory: no tick reads
    # those of the tick before.
    begin = Arrived(slots=slots, entered=jobs.x, sent=nothing_sent)
    # The two numbers of slots: for arrays that F saves, and for those that I stores for W.
    carry = jobs.start(begin, schedule.slot_count, schedule.deferred_count)
    # Only the jobs F, I and W, which stages run alone, are checked for collectives.
    for name, part in parts.items():
        parts[name] = _traced_alone(name, part, jobs, carry, table)
    # In their order within a tick.
    parts = {"embed": embed, **parts, "exchange": exchange, "head": head}
    if jobs.differentiates:
        parts["embed_backward"] = embed_backward

    def tick(carry, row):
        """Runs the parts of one tick: embed, the stage's job, exchange, head and embed_backward.
        All parts but the exchange run only if `row`, the tick's row of the schedule, has a job or a
        microbatch for them. Returns `(carry, None)`, as a body of `lax.scan`."""
        carry = carry.with_arrived(entered=jobs.x, sent=nothing_sent)
        for name, part in parts.items():
            if name in table.jobs:
                carry = _if_runs(name, part, jobs, carry, row, table)
            else:  # the exchange: it has no numbers in the table, and runs in every tick
                carry = part(jobs, carry, row)
        return carry.with_arrived(entered=None, sent=None), None

    carry = carry.with_arrived(entered=None, sent=None)
    return lax.scan(tick, carry, jax.tree.map(jnp.asarray, table))[0].sums


def embed(jobs: Jobs, carry: Carry, row: Row) -> Carry:
    """Runs the embedding, and keeps its output as `entered` until the end of the tick."""
    return carry.with_arrived(entered=jobs.embed(row.jobs["embed"]))


def forward(jobs: Jobs, carry: Carry, row: Row) -> Carry:
    """Runs the forward pass of a chunk. The model's first chunk runs on `entered`, the embedding's
    output in this tick, and any other chunk on an activation that arrived. Keeps the output as
    `sent`, the message of this tick."""
    # `taken` reads the message from this slot. Of `jobs.x`, it uses only the number of dims of each
    # leaf.
    waiting = taken(carry.arrived.slots, jobs.x, row.arrival["forward"][jobs.index])
    x = jobs.send.whole(waiting, jobs.x)
    y, carry = jobs.forward(carry, row, carry.arrived.entered, x)
    return carry.with_arrived(sent=jobs.send.part(y))


def backward(jobs: Jobs, carry: Carry, row: Row) -> Carry:
    """Runs the job I, which computes the cotangent of a chunk's input x, on a cotangent that
    arrived from a stage or from the head. Keeps the cotangent of x as `sent`, the message of this
    tick."""
    slots = eqx.filter(carry.arrived.slots, eqx.is_inexact_array)  # only these have a cotangent
    # `taken` reads the cotangent from this slot. Of `jobs.moving`, it uses only the number of dims
    # of each leaf.
    waiting = taken(slots, jobs.moving, row.arrival["backward"][jobs.index])
    ct, carry = jobs.backward(carry, row, jobs.send.whole(waiting, jobs.moving))
    # Activations and cotangents use the same messages, so a cotangent is sent with all leaves of x:
    # `still` has those that are not floating-point, which the receiver ignores.
    still = eqx.filter(jobs.x, eqx.is_inexact_array, inverse=True)
    return carry.with_arrived(sent=jobs.send.part(eqx.combine(ct, still)))


def exchange(jobs: Jobs, carry: Carry, row: Row) -> Carry:
    """Sends this stage's message of the tick, and writes the messages that arrived into slots. The
    stage sends once for each distance d in the schedule, to the stage that is d stages after it.

    All devices take part in each send, a `ppermute`, so a stage also gets messages that it does not
    need. Such messages go into a slot that is never read.
    """
    sent, before = carry.arrived.sent, carry.sums.loss
    for distance, slots in row.arriving.items():
        # On a CPU each message waits for the message before it. The first message waits for the
        # loss, which the head computed in the previous tick. So all devices send in the same order.
        # Over a distance of 0 the message stays on its stage.
        arrived = jobs.moved(sequence_after(sent, before), distance=distance) if distance else sent
        carry = carry.with_arrived(slots=put(carry.arrived.slots, arrived, slots[jobs.index]))
        before = arrived
    return carry


def head(jobs: Jobs, carry: Carry, row: Row) -> Carry:
    """Runs the head on the output of the model's last chunk of layers, and stores the cotangent of
    this output in a slot.

    The model's last chunk need not be on the last stage: a V-shaped placement goes to the last
    stage and back to the first. The head's loss is used only on the last stage of the axis, so the
    output of the last chunk moves there, and its cotangent moves back.
    """
    # `schedule.last` is the stage of the last place. This tick's message there is its output.
    to_the_last_stage = jobs.schedule.stages - 1 - jobs.schedule.last
    # `_sent` gives this tick's message, `carry.arrived.sent`, and makes it depend on this number.
    # The number depends on the loop that runs the head: `_if_runs` added the loop's index, 0, to
    # it. If the message did not depend on the loop, XLA would move the send out of the loop, into
    # every tick.
    y = jobs.send.whole(_sent(carry, row.jobs["head"]), jobs.x)
    ct, carry = jobs.head(carry, row, jobs.moved(y, distance=to_the_last_stage))
    # `ct` has None for leaves without a cotangent; `put` leaves the slots of these as they are.
    ct = jobs.send.part(jobs.moved(ct, distance=-to_the_last_stage))
    return carry.with_arrived(slots=put(carry.arrived.slots, ct, row.from_head[jobs.index]))


def embed_backward(jobs: Jobs, carry: Carry, row: Row) -> Carry:
    """Runs the backward pass of the embedding, and adds the gradients to the sums. In this tick
    stage 0 has computed the cotangent of the embedding's output, the input of the model's first
    chunk. Stage 0 reads this cotangent from `carry.arrived.sent`. The other stages use a cotangent
    of 0."""
    # `_sent` gives this tick's message, `carry.arrived.sent`, and makes it depend on this number.
    # The number depends on the loop that runs embed_backward: `_if_runs` added the loop's index, 0,
    # to it. Otherwise XLA would compute in every tick the values that depend on the message alone.
    # All messages have the leaves of an activation; only the floating-point leaves are the
    # cotangent.
    sent = eqx.filter(_sent(carry, row.jobs["embed_backward"]), eqx.is_inexact_array)
    ct = masked(jobs.first, jobs.send.whole(sent, jobs.moving))
    return jobs.embed_backward(carry, row, ct)


def _sent(carry: Carry, microbatch: Int[Array, ""]) -> PyTree:
    """Returns this stage's message in this tick, for the part `head` or `embed_backward`.

    `microbatch` is `row.jobs["head"]` or `row.jobs["embed_backward"]`. The part runs only in ticks
    in which this number is at least 0, so the condition `microbatch >= 0` is always true. The
    condition makes the message depend on the part's loop, since `_if_runs` adds the loop's index,
    which is 0, to each number of the row. Without this dependence, XLA would run the part's
    collectives before the loop, in all ticks.
    """
    return masked(microbatch >= 0, carry.arrived.sent)


def _traced_alone(name: str, part: Part, jobs: Jobs, carry: Carry, table: Row) -> Part:
    """Returns `part`, a job that each stage runs alone, as a traced function. Raises `ValueError`
    if the job has a collective that a stage cannot run alone. `name` is the part's name, such as
    "forward"."""
    # In a trace only types matter, so the row of the first tick stands for all rows.
    row = jax.tree.map(operator.itemgetter(0), jax.tree.map(jnp.asarray, table))
    # The row is typed as varying: `_if_runs` adds a loop index whose type varies over the stages.
    traced = trace(functools.partial(part, jobs), carry, varying(row, jobs.axis.names))
    refuse_crossing(DESCRIPTIONS[name], opened(traced.program), jobs.axis)
    # The trace that was checked is also the one that runs, so nothing is traced twice. A `Part`
    # takes the jobs too; the traced function has them inside.
    return lambda jobs, carry, row: traced(carry, row)


def _if_runs(name: str, part: Part, jobs: Jobs, carry: Carry, row: Row, table: Row) -> Carry:
    """Returns the carry after a part if the part runs in this tick, else the carry as it was. The
    part is the body of a loop with one iteration or none.

    A conditional would make XLA copy the whole carry, all slots, in each tick; a loop updates its
    carry in place. The loop has a name from `counted_scope`, such as "head.3_of_8": in the compiled
    program this name tells that the head runs in 3 of 8 ticks. These numbers come from `table`. For
    a job (F, I or W), the ticks of stage 0 are counted, since all stages run equally many jobs of
    each kind. For embed, head and embed_backward, `table` has one column for all stages.
    """
    column, number = table.jobs[name], row.jobs[name]
    # `column` is [ticks, stages], or [ticks] for a part that all stages run together.
    column = column.reshape(len(column), -1)[:, 0]
    # 1 or 0 iterations. A job has one number per stage; embed and head have one for all stages.
    count = ((number[jobs.index] if number.ndim else number) >= 0).astype(jnp.int32)

    def body(trip, carry):
        # The loop index, always 0, is added to the row, so that the part depends on the loop.
        # Otherwise XLA would compute before the loop what does not depend on it, even if no
        # iteration runs.
        return part(jobs, carry, jax.tree.map(lambda numbers: numbers + trip, row))

    # The lower bound, 0, has the type of `count`: so the loop index varies over the stages if the
    # count does.
    with jax.named_scope(counted_scope(name, runs=int((column >= 0).sum()), rounds=len(column))):
        return lax.fori_loop(jnp.zeros_like(count), count, body, carry)


# Collectives in which the devices of each group wait only for each other.
GROUPED = COLLECTIVES - {"linear_collective", "ppermute", "ragged_all_to_all"}
DESCRIPTIONS = {
    "forward": "a stage's forward pass",
    "backward": "a stage's backward pass",
    "weight": "the gradient of a stage's weights",
}


def refuse_crossing(name: str, jaxpr: Jaxpr, axis: Axis) -> None:
    """Raises `ValueError` if a job has a collective that a stage cannot run alone. `jaxpr` is the
    job's program, and `name` its description for the error; `axis` is the axis of the stages.

    A grouped collective, such as a `psum` over a tensor axis, waits only for the devices of its
    group. A `ppermute` is one operation of all devices: it hangs or gives wrong numbers if some of
    the devices run another job.
    """
    for eqn, line in _moves(jaxpr, ""):
        along = _along(eqn)
        axes = ", ".join(map(repr, along))
        crosses = sorted(set(along) & set(axes_of(axis)))
        runs = (
            f"each stage has a job of its own in a tick, and {name} runs {eqn.primitive.name} over "
            f"{axes} ({line})"
        )
        cure = "use a schedule that runs in lockstep, such as schedule.one_f_one_b_lockstep"
        # The stages that run this job would wait forever for the stages that run another job.
        if crosses:
            raise ValueError(
                f"pipeline: in this schedule {runs}. Stages that run another job would never join "
                f"this collective. {without_the_stages(axis)}"
            )
        if eqn.primitive.name not in GROUPED:
            raise ValueError(
                f"pipeline: in this schedule {runs}. All devices must run this collective "
                "at the same time. Use jax.lax.psum or jax.lax.all_gather in its place (if an axis "
                f"has an algorithm, such as ring, pass only the name {axes}), or {cure}."
            )


def _moves(jaxpr: Jaxpr, line: str) -> Iterator[tuple[JaxprEqn, str]]:
    """Yields the collectives over more than one device in a jaxpr, each as (equation, line of the
    user's code). If the argument `line` is not "", it is yielded in place of the equations' own
    lines: `jaxpr` is then the algorithm of one of the library's collectives, and `line` the line of
    that collective."""
    for eqn in jaxpr.eqns:
        source_line = line or source(eqn)
        # Each of the library's own collectives is one equation, `linear_collective`. Its algorithm
        # is traced here: a ring sends by `ppermute`, and `lax` by `psum`. The mesh is None, since
        # this code runs inside the map already; without a mesh `check_vma` has no effect.
        if eqn.primitive.name == "linear_collective":
            yield from _moves(types.linear_jaxpr(eqn, None, check_vma=True), source_line)
        elif eqn.primitive.name in COLLECTIVES:
            if types.axis_size(_along(eqn)) > 1:
                yield eqn, source_line
        else:
            for body in inner(eqn):
                yield from _moves(body, line)


def _along(eqn: JaxprEqn) -> tuple[str, ...]:
    """Returns the mesh axes of a collective. The equation's parameter that has them is called
    `axes` for `psum`, and `axis_name` for other collectives."""
    return types.axes(eqn.params["axes"] if "axes" in eqn.params else eqn.params["axis_name"])
