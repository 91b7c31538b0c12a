"""The executor in which each stage runs its own job in a tick, or none: one loop over the ticks,
without a conditional.

A job is a loop of one trip, or of none. Embedding and head, which talk over the stages, are run by
all devices together: the embedding before the jobs and the head after them, in the ticks in which
the table says so for all stages alike. So are the messages, in every tick. What arrives waits in a
slot until the job that needs it.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn
from jaxtyping import Array, Bool

from parallax._typing import PyTree
from parallax.collectives import Axis, types
from parallax.collectives.cpu import sequence_after
from parallax.collectives.types import varying
from parallax.grads import axes_of
from parallax.jaxprs import COLLECTIVES, counted_scope, inner, opened, source
from parallax.pipeline.buffers import masked, put, stacked, taken
from parallax.pipeline.jobs import Carry, Jobs, Sums
from parallax.pipeline.rows import Row, forward_alone, rows
from parallax.pipeline.traced import trace


class Arrived(NamedTuple):
    """What came, or is to be sent.

    Attributes:
        slots: what came and was not used yet, activations and cotangents: [slots, ...] each, by the
            leaves of x.
        entered: what the embedding made in this tick; None between ticks.
        sent: what this stage sends in this tick; None between ticks.
    """

    slots: PyTree
    entered: PyTree
    sent: PyTree


Tree = TypeVar("Tree", bound=PyTree)
Part: TypeAlias = Callable[
    [Jobs, Carry, Row], Carry
]  # a stage's own job in a tick, or what all stages run together
TOGETHER = {
    "embed": "entering",
    "head": "finished",
    "embed_backward": "leaving",
}  # the column of the microbatches of each


def run(jobs: Jobs) -> Sums:
    """The sums of loss and gradients, or of the loss alone, after all ticks."""
    table = rows(jobs.schedule)
    if not jobs.differentiates:
        return _run(jobs, forward_alone(table), {"forward": forward}, {"head": head})
    alone = {"forward": forward, "backward": backward_input, "weight": backward_weight}
    return _run(jobs, table, alone, {"head": head, "embed_backward": embed_backward})


def embed(jobs: Jobs, carry: Carry, row: Row) -> Carry:
    """What enters."""
    return carry.with_arrived(entered=jobs.embed(jobs.params, row.entering))


def forward(jobs: Jobs, carry: Carry, row: Row) -> Carry:
    """F, of what enters or of what came."""
    came = jobs.send.whole(taken(carry.arrived.slots, row.arrival["forward"][jobs.index]), jobs.x)
    y, carry = jobs.forward(jobs.params, carry, row, carry.arrived.entered, came)
    return carry.with_arrived(sent=jobs.send.part(y))


def backward_input(jobs: Jobs, carry: Carry, row: Row) -> Carry:
    """I, of what came: the head's cotangents wait beside those of other stages."""
    slots, still = (
        eqx.filter(carry.arrived.slots, eqx.is_inexact_array),
        eqx.filter(jobs.x, eqx.is_inexact_array, inverse=True),
    )
    came = jobs.send.whole(taken(slots, row.arrival["backward"][jobs.index]), jobs.moving)
    ct, carry = jobs.backward(jobs.params, carry, row, came)
    return carry.with_arrived(sent=jobs.send.part(eqx.combine(ct, still)))


def backward_weight(jobs: Jobs, carry: Carry, row: Row) -> Carry:
    """W."""
    return jobs.weight(jobs.params, carry, row)


def head(jobs: Jobs, carry: Carry, row: Row) -> Carry:
    """The head, of what the last place has finished."""
    to_the_last_stage = jobs.schedule.stages - 1 - jobs.schedule.last
    y = jobs.moved(jobs.send.whole(carry.arrived.sent, jobs.x), distance=to_the_last_stage)
    ct, carry = jobs.head(jobs.params, carry, row, y)
    ct = jobs.send.part(jobs.moved(ct, distance=-to_the_last_stage))
    return carry.with_arrived(slots=put(carry.arrived.slots, ct, row.from_head[jobs.index]))


def embed_backward(jobs: Jobs, carry: Carry, row: Row) -> Carry:
    """The gradients of what the embedding reads."""
    ct = jobs.send.whole(eqx.filter(carry.arrived.sent, eqx.is_inexact_array), jobs.moving)
    return jobs.embed_backward(jobs.params, carry, row, masked(jobs.first, ct))


def _run(jobs: Jobs, table: Row, alone: dict[str, Part], together: dict[str, Part]) -> Sums:
    """The sums after all ticks.

    Args:
        jobs: the jobs.
        table: the rows, one a tick.
        alone: what a stage runs by itself, by lane.
        together: what all stages run after the messages, by its name in `TOGETHER`.
    """
    schedule = jobs.schedule
    nothing_sent = jobs.send.part(jobs.x)
    # One slot more than the table needs: what no job reads goes there.
    slots = jax.tree.map(lambda leaf: stacked(leaf, schedule.arrival_count + 1), nothing_sent)
    carry = jobs.start(Arrived(slots, None, None), schedule.slot_count, schedule.deferred_count)
    begun = lambda carry: carry.with_arrived(entered=jobs.x, sent=nothing_sent)
    ticks = jax.tree.map(jnp.asarray, table)
    # In a loop of a stage's own its row differs between stages too, by the number of the trip.
    row = varying(jax.tree.map(lambda column: column[0], ticks), jobs.axis.names)
    traced = {
        name: trace(functools.partial(part, jobs), begun(carry), row)
        for name, part in alone.items()
    }
    for name, part in traced.items():
        refuse_crossing(DESCRIPTIONS[name], opened(part.program), jobs.axis)

    def tick(carry, row):
        carry = begun(carry)
        with _scope(table, "embed"):
            carry = _if_runs(row.entering >= 0, functools.partial(embed, jobs), carry, row)
        for name, part in traced.items():
            with _scope(table, name):
                carry = _if_runs(row.jobs[name][jobs.index] >= 0, part, carry, row)
        sent, after = carry.arrived.sent, carry.sums.loss
        for distance, slots in row.arriving.items():
            came = jobs.moved(sequence_after(sent, after), distance=distance) if distance else sent
            carry = carry.with_arrived(slots=put(carry.arrived.slots, came, slots[jobs.index]))
            after = came
        for name, part in together.items():

            def without_sent(carry, row):
                # If what was sent stayed as it was, XLA would do its collectives before the loop,
                # in all ticks: it takes them for the same in each trip.
                return part(jobs, carry, row).with_arrived(sent=jax.tree.map(jnp.zeros_like, sent))

            with _scope(table, name):
                runs = getattr(row, TOGETHER[name]) >= 0
                carry = _if_runs(
                    runs, without_sent, carry.with_arrived(sent=sequence_after(sent, after)), row
                )
            after = carry.sums.ends, carry.sums.loss
        return carry.with_arrived(entered=None, sent=None), None

    end: Carry = lax.scan(tick, carry, ticks)[0]
    return end.sums


def _if_runs(
    runs: Bool[Array, ""], part: Callable[[Tree, Row], Tree], carry: Tree, row: Row
) -> Tree:
    """`part(carry, row)` where it runs, else the carry: a loop of one trip or of none.

    XLA copies what passes by a conditional, all slots in each tick, and leaves the carry of a loop
    where it is. The number of the trip, 0, is added to the row. Otherwise XLA would compute before
    the loop what does not depend on it, even for no trip.
    """
    count = runs.astype(jnp.int32)
    part_of = lambda trip, carry: part(carry, jax.tree.map(lambda column: column + trip, row))
    return lax.fori_loop(jnp.zeros_like(count), count, part_of, carry)


def _scope(table: Row, name: str) -> Any:
    """The scope of a loop in a tick. Its name says how often the loop turns, for readers of the
    compiled program.

    A lane runs as often on each stage; what all stages run together has a column.
    """
    column = getattr(table, TOGETHER[name]) if name in TOGETHER else table.jobs[name][:, 0]
    return jax.named_scope(counted_scope(name, runs=int((column >= 0).sum()), of=len(column)))


GROUPED = COLLECTIVES - {"linear_collective", "ppermute", "ragged_all_to_all"}
DESCRIPTIONS = {
    "forward": "a stage's forward pass",
    "backward": "a stage's backward pass",
    "weight": "the gradients of a stage's weights",
}


def refuse_crossing(name: str, jaxpr: Jaxpr, axis: Axis) -> None:
    """Refuse with a `ValueError` a job that some stages cannot run alone.

    A grouped collective, such as a `psum` over a tensor axis, waits for its group alone. A
    `ppermute` is one operation of all devices, and hangs or gives wrong numbers where some of them
    run something else.
    """
    for eqn, line in _moves(jaxpr, ""):
        along = _along(eqn)
        axes = ", ".join(map(repr, along))
        crosses = sorted(set(along) & set(axes_of(axis)))
        runs = (
            f"each stage has a job of its own in a tick, and {name} runs {eqn.primitive.name} over "
            f"{axes} ({line})"
        )
        cure = (
            "take a schedule in which the stages keep step, such as schedule.one_f_one_b_lockstep"
        )
        if crosses:
            raise ValueError(
                f"pipeline: in this schedule {runs}, with stages that run something else. Do it in "
                f"embed or head, or {cure}."
            )
        if eqn.primitive.name not in GROUPED:
            raise ValueError(
                f"pipeline: in this schedule {runs}, which all devices must run at once. Let "
                f"jax.lax move the data there (pass {axes} for the axis), or {cure}."
            )


def _moves(jaxpr: Jaxpr, line: str) -> Iterator[tuple[JaxprEqn, str]]:
    """The collectives of more than one device, each with the caller's line."""
    for eqn in jaxpr.eqns:
        source_line = line or source(eqn)
        if eqn.primitive.name == "linear_collective":
            yield from _moves(types.linear_jaxpr(eqn, None, check_vma=True), source_line)
        elif eqn.primitive.name in COLLECTIVES:
            if types.axis_size(_along(eqn)) > 1:
                yield eqn, source_line
        else:
            for body in inner(eqn):
                yield from _moves(body, line)


def _along(eqn: JaxprEqn) -> tuple[str, ...]:
    return types.axes(eqn.params["axes"] if "axes" in eqn.params else eqn.params["axis_name"])
