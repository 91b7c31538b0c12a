"""The executor of schedules in which each stage has a job of its own in a tick: one loop over the ticks, and a switch inside it.

Legend: P stages, M microbatches, v chunks a stage, F forward, I the input's cotangent, W the gradients of the weights.

In a tick each stage takes the branch of its own job. What talks over the stages stands outside of it, and all devices run it
together: `enter` before the branch and `head` after it, in the ticks in which the table says so for all stages alike, and the
messages, in every tick. What comes waits in a slot until the job that needs it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from parallax.collectives import send_next
from parallax.collectives.cpu import ordered
from parallax.collectives.types import like, varying, varying_axes
from parallax.pipeline.carry import Choices, added, chosen, masked, slots_of, stacked, waiting, wide_zeros, written
from parallax.pipeline.grouped import refuse_crossing
from parallax.pipeline.lanes import differentiated_head, of_enter, scattered, seed
from parallax.pipeline.model import Model
from parallax.pipeline.turns import Turn, forward_alone, turns
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


Tree = TypeVar("Tree", bound=PyTree)
Branch: TypeAlias = Callable[[Held, PyTree, PyTree, Turn], tuple[Held, PyTree]]
"""`(held, arrived, entered, row) -> (held, sent)`, of which `held` is without what arrived and what the head makes."""
Part: TypeAlias = Callable[[Held, PyTree, Turn], Held]
"""`(held, sent, row) -> held`, run by all devices together."""


def both_ways(model: Model, choices: Choices) -> Held:
    """What is held after all ticks: the sums of loss and gradients among it."""
    of = [forward(model, choices), backward_input(model, choices), backward_weight(model, choices)]
    return _run(model, choices, turns(model.schedule), of, [head(model, choices), leave(model, choices)])


def forward_only(model: Model, choices: Choices) -> Held:
    """What is held after all ticks of the loss alone."""
    table = forward_alone(turns(model.schedule))
    return _run(model, choices, table, [forward(model, choices)], [head_value(model, choices)])


def forward(model: Model, choices: Choices) -> Branch:
    """F: a chunk of layers, of what enters or of what came, and into a slot what I and W need of it."""

    def branch(held, arrived, entered, row):
        microbatch, chunk, _ = model.job(row.job)
        came = choices.exchange.whole(_of_slot(arrived, row.taken[model.index]), model.x)
        x = chosen(model.first & (model.position(chunk) == 0), entered, came)
        trained, given = model.at_hand(model.params, microbatch, chunk)
        ((moving, loss), (still, aux)), kept = choices.halves.forward(trained, x, given)
        held = held._replace(
            slots=written(held.slots, kept, row.slot[model.index]),
            terms=None if loss is None else held.terms + loss.astype(held.terms.dtype),
            of_stages=jax.tree.map(lambda all, one: all.at[microbatch, chunk].set(one), held.of_stages, aux),
        )
        return held, choices.exchange.part(eqx.combine(moving, still))

    return branch


def backward_input(model: Model, choices: Choices) -> Branch:
    """I: the input's cotangent, and into a slot what W needs beside what F kept."""
    assert choices.in_two is not None
    inputs = choices.in_two.inputs

    def branch(held, arrived, entered, row):
        microbatch, chunk, valid = model.job(row.job)
        moving, still = eqx.partition(model.x, eqx.is_inexact_array)
        came = _of_slot(eqx.filter(arrived, eqx.is_inexact_array), row.taken[model.index])
        trained, given = model.at_hand(model.params, microbatch, chunk)
        kept = waiting(held.slots, choices.kinds, row.slot[model.index])
        ct, handed = inputs(trained, given, kept, (choices.exchange.whole(came, moving), seed(model, valid)))
        held = held._replace(handed=written(held.handed, handed, row.handed[model.index]))
        return held, choices.exchange.part(eqx.combine(ct, still))

    return branch


def backward_weight(model: Model, choices: Choices) -> Branch:
    """W: the gradients of what the stage is differentiated in."""
    assert choices.in_two is not None
    weights = choices.in_two.weights

    def branch(held, arrived, entered, row):
        microbatch, chunk, _ = model.job(row.job)
        trained, given = model.at_hand(model.params, microbatch, chunk)
        kept = waiting(held.slots, choices.kinds, row.slot[model.index])
        handed = waiting(held.handed, choices.handed, row.handed[model.index])
        gradients = weights(trained, given, kept, handed)
        blocks = scattered(gradients.blocks, choices.scatter)
        of_ends = choices.scatter(gradients.ends)
        held = held._replace(
            blocks=jax.tree.map(lambda total, d: total.at[chunk].add(d.astype(total.dtype)), held.blocks, blocks),
            ends=jax.tree.map(lambda total, d: total if d is None else total + d.astype(total.dtype), held.ends, of_ends),
        )
        return held, choices.exchange.part(model.x)

    return branch


def head(model: Model, choices: Choices) -> Part:
    """The loss of what the last place has finished, its gradient, and the cotangent that I begins with."""

    def part(held, sent, row):
        y = _to_the_head(choices.exchange.whole(sent, model.x), model)
        (loss, aux), (ends, ct) = differentiated_head(model, model.params, y, row.finished)
        counts = jnp.ones((), bool) if model.shared_out(loss) else model.last
        ct = choices.exchange.part(_from_the_head(ct, model))
        return _with_loss(held, loss, aux, row)._replace(
            ends=added(held.ends, choices.scatter(ends), counts),
            arrived=_put(held.arrived, ct, row.of_head[model.index]),
        )

    return _when(lambda row: row.finished, part)


def head_value(model: Model, choices: Choices) -> Part:
    """The loss of what the last place has finished."""

    def part(held, sent, row):
        loss, aux = model.head(model.params, _to_the_head(choices.exchange.whole(sent, model.x), model), row.finished)
        return _with_loss(held, loss if model.shared_out(loss) else masked(model.last, loss), aux, row)

    return _when(lambda row: row.finished, part)


def leave(model: Model, choices: Choices) -> Part:
    """The gradients of what enter reads."""

    def part(held, sent, row):
        moving = eqx.filter(model.x, eqx.is_inexact_array)
        ct = masked(model.first, choices.exchange.whole(eqx.filter(sent, eqx.is_inexact_array), moving))
        ends = choices.scatter(of_enter(model, model.params, row.leaving, ct))
        return held._replace(ends=added(held.ends, ends, jnp.ones((), bool)))

    return _when(lambda row: row.leaving, part)


def _run(model: Model, choices: Choices, table: Turn, branches: list[Branch], parts: list[Part]) -> Held:
    rest = lambda held, arrived, entered, row: (held, choices.exchange.part(model.x))
    names = ("a stage's forward pass", "a stage's backward pass", "the gradients of a stage's weights")

    def tick(held, row):
        entered = switched(row.entering >= 0, lambda _: model.x, lambda _: model.enter(model.params, row.entering), ())
        own = held._replace(arrived=None, loss=None, of_head=None)
        taken = [lambda given, branch=branch: branch(*given, row) for branch in (rest, *branches)]
        own, sent = switched(row.kind[model.index], *taken, (own, held.arrived, entered))
        held = own._replace(arrived=held.arrived, loss=held.loss, of_head=held.of_head)
        after = held.loss
        for distance, slots in row.arriving.items():
            came = sent
            if distance:
                came = jax.tree.map(lambda leaf: send_next(leaf, model.axis.names, distance=distance), ordered(sent, after))  # noqa: B023
            held = held._replace(arrived=_put(held.arrived, came, slots[model.index]))
            after = came
        for part in parts:
            held = part(held, ordered(sent, after), row)
            after = held.ends, held.loss
        return held

    rows = jax.tree.map(jnp.asarray, table)
    first = jax.tree.map(lambda column: column[0], rows)
    held = _start(model, choices, table)
    for name, branch in zip(names, branches, strict=False):
        own = held._replace(arrived=None, loss=None, of_head=None)
        refuse_crossing(name, jax.make_jaxpr(lambda *given: branch(*given, first))(own, held.arrived, model.x).jaxpr, model.axis)  # noqa: B023
    held = settled(held, lambda held: tick(held, first))
    return lax.scan(lambda held, row: (tick(held, row), None), held, rows)[0]


def switched(index: Array, *branches_and_operand: Any) -> Any:
    """`lax.switch`, each of whose branches' results vary along all axes along which another's do."""
    *branches, operand = branches_and_operand
    made = [jax.tree.map(jnp.zeros_like, jax.eval_shape(branch, operand)) for branch in branches]
    along = lambda *leaves: tuple(sorted({axis for leaf in leaves for axis in varying_axes(leaf)}))
    wanted = jax.tree.map(lambda *leaves: varying(jnp.zeros_like(leaves[0]), along(*leaves)), *made)
    cast = lambda branch: lambda operand: like(branch(operand), wanted)
    return lax.switch(index.astype(jnp.int32), [cast(branch) for branch in branches], operand)


def settled(x: Tree, f: Callable[[Tree], Tree]) -> Tree:
    """`x` with the replication types that it keeps through `f`, as a loop's carry must; they only grow."""
    while True:
        types = jax.tree.map(varying_axes, x)
        x = like(x, jax.tree.map(jnp.zeros_like, jax.eval_shape(f, x)))
        if types == jax.tree.map(varying_axes, x):
            return x


def _start(model: Model, choices: Choices, table: Turn) -> Held:
    """What is held before the first tick: zeros."""
    M, v = model.schedule.microbatches, model.schedule.chunks
    loss, of_head = jax.eval_shape(lambda: model.head(model.params, model.x, jnp.zeros((), jnp.int32)))
    sums = lambda tree: jax.tree.map(wide_zeros, jax.eval_shape(choices.scatter, tree))
    return Held(
        arrived=jax.tree.map(lambda leaf: stacked(leaf, model.schedule.arrival_count + 1), choices.exchange.part(model.x)),
        slots=slots_of(choices.kinds, model.schedule.slot_count, model.axis),
        handed=slots_of(choices.handed, model.schedule.handed_count, model.axis),
        loss=wide_zeros(loss),
        terms=None if model.terms.loss is None else wide_zeros(model.terms.loss),
        of_head=jax.tree.map(lambda value: stacked(value, M), of_head),
        of_stages=jax.tree.map(lambda value: stacked(value, M, v), model.terms.aux),
        ends=sums(model.params.ends),
        blocks=sums(model.params.blocks),
    )


def _when(microbatch: Callable[[Turn], Array], part: Part) -> Part:
    """A part that all devices run together, in the ticks in which there is a microbatch for it."""
    keep = lambda given: given[0]
    return lambda held, sent, row: switched(microbatch(row) >= 0, keep, lambda given: part(*given, row), (held, sent))


def _with_loss(held: Held, loss: Array, aux: PyTree, row: Turn) -> Held:
    of_head = jax.tree.map(lambda all, one: lax.dynamic_update_index_in_dim(all, one, row.finished, 0), held.of_head, aux)
    return held._replace(loss=held.loss + loss.astype(held.loss.dtype), of_head=of_head)


def _of_slot(arrived: PyTree, slot: Array) -> PyTree:
    return jax.tree.map(lambda all: lax.dynamic_index_in_dim(all, slot, keepdims=False), arrived)


def _put(arrived: PyTree, came: PyTree, slot: Array) -> PyTree:
    """With what came in a slot: of a cotangent, which lacks some of the leaves, those that it has."""
    put = lambda all, one: all if one is None else lax.dynamic_update_index_in_dim(all, one.astype(all.dtype), slot, 0)
    return jax.tree.map(put, arrived, came)


def _to_the_head(y: PyTree, model: Model) -> PyTree:
    """What the last place has finished, on the last stage, where the head looks for it."""
    return _moved(y, model, model.schedule.stages - 1 - model.schedule.last)


def _from_the_head(ct: PyTree, model: Model) -> PyTree:
    return _moved(ct, model, model.schedule.last - (model.schedule.stages - 1))


def _moved(tree: PyTree, model: Model, distance: int) -> PyTree:
    if not distance:
        return tree
    return jax.tree.map(lambda leaf: send_next(leaf, model.axis.names, distance=distance), tree)
