"""The executor of schedules in which each stage has a job of its own in a tick: a loop over the ticks, without a conditional.

Legend: P stages, M microbatches, v chunks a stage, F forward, I the input's cotangent, W the gradients of the weights.

In a tick each stage runs its own job alone. What talks over the stages all devices run together: `enter` before the jobs and
`head` after them, in the ticks in which the table says so for all stages alike, and the messages, in every tick. What comes
waits in a slot until the job that needs it.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from parallax.collectives.cpu import ordered
from parallax.collectives.types import like, varying_axes
from parallax.jaxprs import counted_scope
from parallax.pipeline.carry import Choices, added, chosen, masked, nothing_added, slots_of, stacked, waiting, written
from parallax.pipeline.grouped import refuse_crossing
from parallax.pipeline.lanes import differentiated_head, moved, of_enter, scattered, seed, with_loss
from parallax.pipeline.model import Model
from parallax.pipeline.turns import Turn, forward_alone, turns
from parallax.schedule import Schedule
from parallax.typed import PyTree


class Held(NamedTuple):
    """What one tick hands to the next.

    Attributes:
        arrived: what came and was not used yet, activations and cotangents: [slots, ...] each, by the leaves of x.
        slots: what F keeps for I and W.
        handed: what I hands on to W.
        loss: the sum of the head's.
        terms: the sum of the stages' own; None where they have none.
        of_head: the head's auxiliary values, [M, ...] each.
        of_stages: the stage's auxiliary values, [M, v, ...] each.
        ends: sums of the gradients of what is not split over the stages.
        blocks: and of what is, [v, ...] each.
    """

    arrived: PyTree
    slots: list[Array]
    handed: list[Array]
    loss: Float[Array, ""]
    terms: Float[Array, ""] | None
    of_head: PyTree
    of_stages: PyTree
    ends: PyTree
    blocks: PyTree


SAID = {  # of each kind of job
    "forward": "a stage's forward pass",
    "backward": "a stage's backward pass",
    "weight": "the gradients of a stage's weights",
}
TOGETHER = {"entering": "enter", "finished": "head", "leaving": "leave"}  # what all run, by the column of its microbatches
Tree = TypeVar("Tree", bound=PyTree)
Part: TypeAlias = Callable[[Held, PyTree, PyTree, Turn], tuple[Held, PyTree]]
"""`(held, sent, entered, row) -> (held, sent)`: what a stage does in a tick, or all of them together."""


def both_ways(model: Model, schedule: Schedule, choices: Choices) -> Held:
    """What is held after all ticks: the sums of loss and gradients among it."""
    jobs = {
        "forward": forward(model, choices),
        "backward": backward_input(model, choices),
        "weight": backward_weight(model, choices),
    }
    together = [("finished", head(model, schedule, choices)), ("leaving", leave(model, choices))]
    return _run(model, _start(model, schedule, choices), choices, turns(schedule), jobs, together)


def forward_only(model: Model, schedule: Schedule, choices: Choices) -> Held:
    """What is held after all ticks of the loss alone."""
    jobs, together = {"forward": forward(model, choices)}, [("finished", head_value(model, schedule, choices))]
    return _run(model, _start(model, schedule, choices), choices, forward_alone(turns(schedule)), jobs, together)


def forward(model: Model, choices: Choices) -> Part:
    """F: a chunk of layers, of what enters or of what came, and into a slot what I and W need of it."""

    def part(held, sent, entered, row):
        microbatch, chunk, valid = model.job(row.job)
        came = choices.exchange.whole(_of_slot(held.arrived, row.taken[model.index]), model.x)
        x = chosen(model.position(chunk) == 0, entered, came)
        trained, given = model.at_hand(model.params, microbatch, chunk, valid)
        ((moving, loss), (still, aux)), kept = choices.halves.forward(trained, x, given)
        held = held._replace(
            slots=written(held.slots, kept, row.slot[model.index]),
            terms=None if loss is None else held.terms + loss.astype(held.terms.dtype),
            of_stages=jax.tree.map(lambda all, one: all.at[microbatch, chunk].set(one), held.of_stages, aux),
        )
        return held, choices.exchange.part(eqx.combine(moving, still))

    return part


def backward_input(model: Model, choices: Choices) -> Part:
    """I: the input's cotangent, and into a slot what W needs beside what F kept."""
    assert choices.in_two is not None
    inputs = choices.in_two.inputs

    def part(held, sent, entered, row):
        microbatch, chunk, valid = model.job(row.job)
        moving, still = eqx.partition(model.x, eqx.is_inexact_array)
        came = _of_slot(eqx.filter(held.arrived, eqx.is_inexact_array), row.taken[model.index])
        trained, given = model.at_hand(model.params, microbatch, chunk, valid)
        kept = waiting(held.slots, choices.kinds, row.slot[model.index])
        ct, handed = inputs(trained, given, kept, (choices.exchange.whole(came, moving), seed(model, valid)))
        held = held._replace(handed=written(held.handed, handed, row.handed[model.index]))
        return held, choices.exchange.part(eqx.combine(ct, still))

    return part


def backward_weight(model: Model, choices: Choices) -> Part:
    """W: the gradients of what the stage is differentiated in."""
    assert choices.in_two is not None
    weights = choices.in_two.weights

    def part(held, sent, entered, row):
        microbatch, chunk, valid = model.job(row.job)
        trained, given = model.at_hand(model.params, microbatch, chunk, valid)
        kept = waiting(held.slots, choices.kinds, row.slot[model.index])
        handed = waiting(held.handed, choices.handed, row.handed[model.index])
        gradients = weights(trained, given, kept, handed)
        blocks = scattered(gradients.blocks, choices.scatter)
        of_ends = choices.scatter(gradients.ends)
        held = held._replace(
            blocks=jax.tree.map(lambda total, d: total.at[chunk].add(d.astype(total.dtype)), held.blocks, blocks),
            ends=jax.tree.map(lambda total, d: total if d is None else total + d.astype(total.dtype), held.ends, of_ends),
        )
        return held, sent

    return part


def head(model: Model, schedule: Schedule, choices: Choices) -> Part:
    """The loss of what the last place has finished, its gradient, and the cotangent that I begins with."""

    def part(held, sent, entered, row):
        y = _to_the_head(choices.exchange.whole(sent, model.x), model, schedule)
        (loss, aux), (ends, ct) = differentiated_head(model, model.params, y, row.finished)
        counts = jnp.ones((), bool) if model.shared_out(loss) else model.last
        ct = choices.exchange.part(_from_the_head(ct, model, schedule))
        held = with_loss(held, loss, aux, row.finished)._replace(
            ends=added(held.ends, choices.scatter(ends), counts),
            arrived=_put(held.arrived, ct, row.of_head[model.index]),
        )
        return held, sent

    return part


def head_value(model: Model, schedule: Schedule, choices: Choices) -> Part:
    """The loss of what the last place has finished."""

    def part(held, sent, entered, row):
        loss, aux = model.head(model.params, _to_the_head(choices.exchange.whole(sent, model.x), model, schedule), row.finished)
        loss = loss if model.shared_out(loss) else masked(model.last, loss)
        return with_loss(held, loss, aux, row.finished), sent

    return part


def leave(model: Model, choices: Choices) -> Part:
    """The gradients of what enter reads."""

    def part(held, sent, entered, row):
        moving = eqx.filter(model.x, eqx.is_inexact_array)
        ct = masked(model.first, choices.exchange.whole(eqx.filter(sent, eqx.is_inexact_array), moving))
        ends = choices.scatter(of_enter(model, model.params, row.leaving, ct))
        return held._replace(ends=added(held.ends, ends, jnp.ones((), bool))), sent

    return part


def _run(
    model: Model, held: Held, choices: Choices, table: Turn, jobs: dict[str, Part], together: list[tuple[str, Part]]
) -> Held:
    """What is held after all ticks.

    Args:
        model: the functions.
        held: before the first tick.
        choices: how parts keep, send and add.
        table: the rows, one a tick.
        jobs: what a stage does alone, by its name in `SAID`, in the order of their numbers in the table.
        together: what all do after the messages, each with the column of its microbatches.
    """
    scope = functools.partial(_scope, table)

    def tick(held, row):
        sent, entered = choices.exchange.part(model.x), model.x
        with scope("entering"):
            entered = _sometimes(row.entering >= 0, lambda _, row: model.enter(model.params, row.entering), entered, row)
        for number, (name, part) in enumerate(jobs.items(), 1):
            runs = row.kind[model.index] == number
            with scope(name, number):
                held, sent = _sometimes(runs, lambda given, row: part(*given, entered, row), (held, sent), row)  # noqa: B023
        after = held.loss
        for distance, slots in row.arriving.items():
            came = moved(ordered(sent, after), model, distance=distance) if distance else sent
            held = held._replace(arrived=_put(held.arrived, came, slots[model.index]))
            after = came
        for column, part in together:
            given = held, ordered(sent, after)
            with scope(column):
                runs = getattr(row, column) >= 0
                held, _ = _sometimes(runs, lambda given, row: _without_sent(part(*given, entered, row)), given, row)  # noqa: B023
            after = held.ends, held.loss
        return held

    rows = jax.tree.map(jnp.asarray, table)
    first = jax.tree.map(lambda column: column[0], rows)
    for name, part in jobs.items():
        traced = jax.make_jaxpr(lambda held, sent, x: part(held, sent, x, first))(held, choices.exchange.part(model.x), model.x)  # noqa: B023
        refuse_crossing(SAID[name], traced.jaxpr, model.axis)
    held = _settled(held, lambda held: tick(held, first))
    end: Any = lax.scan(lambda held, row: (tick(held, row), None), held, rows)[0]
    return end


def _scope(table: Turn, what: str, number: int = 0) -> Any:
    """The scope of a loop in a tick. Its name says how often the loop turns, for readers of the compiled program.

    A job, by its `number` in the table, runs as often on each stage; what all stages run together has a column.
    """
    runs = (table.kind[:, 0] == number).sum() if number else (getattr(table, what) >= 0).sum()
    return jax.named_scope(counted_scope(TOGETHER.get(what, what), runs=int(runs), of=len(table.kind)))


def _without_sent(given: tuple[Held, PyTree]) -> tuple[Held, PyTree]:
    """What a part leaves: `held`, and nothing of what was sent.

    If that stayed as it was, XLA would do its collectives before the loop, in all ticks: it takes them for the same in each trip.
    """
    held, sent = given
    return held, jax.tree.map(jnp.zeros_like, sent)


def _sometimes(runs: Bool[Array, ""], part: Callable[[Tree, Turn], Tree], carry: Tree, row: Turn) -> Tree:
    """`part(carry, row)` where it runs, else the carry: a loop of one trip or of none.

    XLA copies what passes by a conditional, all slots in each tick, and leaves the carry of a loop where it is. The number of the
    trip, 0, is added to the row. Otherwise XLA would compute before the loop what does not depend on it, even for no trip.
    """
    part_of = lambda trip, carry: part(carry, jax.tree.map(lambda column: column + trip, row))
    count = runs.astype(jnp.int32)
    carry = _settled(carry, lambda carry: part_of(count, carry))
    return lax.fori_loop(jnp.zeros_like(count), count, part_of, carry)


def _settled(x: Tree, f: Callable[[Tree], Tree]) -> Tree:
    """`x` with the replication types that it keeps through `f`, as a loop's carry must; they only grow."""
    while True:
        types = jax.tree.map(varying_axes, x)
        x = like(x, jax.tree.map(jnp.zeros_like, jax.eval_shape(f, x)))
        if types == jax.tree.map(varying_axes, x):
            return x


def _start(model: Model, schedule: Schedule, choices: Choices) -> Held:
    """What is held before the first tick: zeros."""
    return Held(
        arrived=jax.tree.map(lambda leaf: stacked(leaf, schedule.arrival_count + 1), choices.exchange.part(model.x)),
        slots=slots_of(choices.kinds, schedule.slot_count, model.axis),
        handed=slots_of(choices.handed, schedule.handed_count, model.axis),
        **nothing_added(model, choices),
    )


def _of_slot(arrived: PyTree, slot: Array) -> PyTree:
    return jax.tree.map(lambda all: lax.dynamic_index_in_dim(all, slot, keepdims=False), arrived)


def _put(arrived: PyTree, came: PyTree, slot: Array) -> PyTree:
    """With what came in a slot: of a cotangent, which lacks some of the leaves, those that it has."""
    put = lambda all, one: all if one is None else lax.dynamic_update_index_in_dim(all, one.astype(all.dtype), slot, 0)
    return jax.tree.map(put, arrived, came)


def _to_the_head(y: PyTree, model: Model, schedule: Schedule) -> PyTree:
    """What the last place has finished, on the last stage, where the head looks for it."""
    return moved(y, model, distance=schedule.stages - 1 - schedule.last)


def _from_the_head(ct: PyTree, model: Model, schedule: Schedule) -> PyTree:
    return moved(ct, model, distance=schedule.last - (schedule.stages - 1))
