"""The lanes of a tick: functions `(carry, row) -> carry` that every stage runs, and whose effect is masked where it has no job.

Legend: P stages, M microbatches, v chunks a stage, F forward, B backward.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Shaped

from parallax import precision
from parallax.collectives import send_next
from parallax.collectives.cpu import ordered
from parallax.pipeline.exchange import Exchange
from parallax.pipeline.kept import Halves, raw, typed
from parallax.pipeline.model import Model, Parameters
from parallax.pipeline.rows import Row
from parallax.typed import PyTree


class Carry(NamedTuple):
    """What one tick hands to the next, and one lane to those after it.

    Attributes:
        x: from the stage before, as it was sent.
        y: what F made in this tick; None between ticks.
        ct: from the stage after, as it was sent: of the floating-point leaves of x.
        slots: what waits for B, [slots, ...] each.
        pending: cotangents that the head made and the last stage has not used yet, [places, ...] each.
        loss: the sum of the head's.
        terms: the sum of the stages' own; None where they have none.
        of_head: the head's auxiliary values, [M, ...] each.
        of_stages: the stage's auxiliary values, [M, v, ...] each.
        ends: sums of the gradients of what is not split over the stages.
        blocks: and of what is, [v, ...] each.
    """

    x: PyTree
    y: PyTree
    ct: PyTree
    slots: list[Shaped[Array, "slots ..."]]
    pending: PyTree
    loss: Float[Array, ""]
    terms: Float[Array, ""] | None
    of_head: PyTree
    of_stages: PyTree
    ends: PyTree
    blocks: PyTree


Lane: TypeAlias = Callable[[Carry, Row], Carry]
Lanes: TypeAlias = list[tuple[str, Lane]]  # by what the schedule calls the ticks in which each runs, in order


class Choices(NamedTuple):
    """How the lanes keep, send and add: arguments of `pipeline.value_and_grad`; `kinds` are the types of what is kept."""

    halves: Halves
    kinds: list[Any]
    exchange: Exchange
    scatter: Callable[[PyTree], PyTree]


def forward_only(model: Model, params: Parameters, choices: Choices) -> Lanes:
    """The lanes of the loss alone."""
    return [("forward", forward(model, params, choices)), ("head", head_value(model, params)), ("forward", send(model, choices))]


def both_ways(model: Model, params: Parameters, choices: Choices) -> Lanes:
    """The lanes of loss and gradients."""
    return [
        ("forward", forward(model, params, choices)),
        ("head", head(model, params, choices)),
        ("backward", backward(model, params, choices)),
        ("forward", send(model, choices)),
    ]


def forward(model: Model, params: Parameters, choices: Choices) -> Lane:
    """F: a chunk of layers, of what enters or of what came, and into a slot what B needs of it."""

    def lane(carry, row):
        microbatch, chunk, valid = model.job(row.forward)
        entering = model.enter(params, row.entering)
        x = chosen(model.first & (chunk == 0), entering, choices.exchange.whole(carry.x, model.x))
        trained, given = model.at_hand(params, microbatch, chunk)
        ((moving, loss), (still, aux)), kept = choices.halves.forward(trained, x, given)
        slot = row.written[model.index]
        return carry._replace(
            y=eqx.combine(moving, still),
            slots=[lax.dynamic_update_index_in_dim(s, raw(r), slot, 0) for s, r in zip(carry.slots, kept, strict=True)],
            terms=None if loss is None else carry.terms + masked(valid, loss).astype(carry.terms.dtype),
            of_stages=jax.tree.map(lambda all, one: _put(all, one, valid, microbatch, chunk), carry.of_stages, aux),
        )

    return lane


def head(model: Model, params: Parameters, choices: Choices) -> Lane:
    """The loss of what the last stage has finished, its gradient, and the cotangent that B begins with."""

    def lane(carry, row):
        moving, still = eqx.partition(carry.y, eqx.is_inexact_array)

        def loss_of(ends, moving):
            loss, aux = model.head(params._replace(ends=ends), eqx.combine(moving, still), row.finished)
            return loss if model.shared_out(loss) else masked(model.last, loss), aux

        (loss, aux), (ends, ct) = jax.value_and_grad(loss_of, argnums=(0, 1), has_aux=True)(params.ends, moving)
        counts = jnp.ones((), bool) if model.shared_out(loss) else model.last
        return _with_loss(carry, loss, aux, row)._replace(
            ends=added(carry.ends, choices.scatter(ends), counts),
            pending=jax.tree.map(lambda all, one: lax.dynamic_update_index_in_dim(all, one, row.put, 0), carry.pending, ct),
        )

    return lane


def head_value(model: Model, params: Parameters) -> Lane:
    """The loss of what the last stage has finished."""

    def lane(carry, row):
        loss, aux = model.head(params, carry.y, row.finished)
        return _with_loss(carry, loss if model.shared_out(loss) else masked(model.last, loss), aux, row)

    return lane


def backward(model: Model, params: Parameters, choices: Choices) -> Lane:
    """B: the stage's transpose. Its cotangent is sent first, so that all that follows in the tick can hide the message."""

    def lane(carry, row):
        microbatch, chunk, valid = model.job(row.backward)
        ct = _cotangent(model, choices, carry, row, chunk, valid)
        trained, given = model.at_hand(params, microbatch, chunk)
        slot = row.read[model.index]
        kept = [
            typed(lax.dynamic_index_in_dim(s, slot, keepdims=False), kind)
            for s, kind in zip(carry.slots, choices.kinds, strict=True)
        ]
        gradients, ct = choices.halves.backward(trained, given, kept)((ct, _seed(model, valid)))
        carry = carry._replace(ct=_sent(choices.exchange.part(ct), model, distance=-1))
        weights = _scattered(gradients.blocks, choices.scatter)
        blocks = jax.tree.map(lambda total, d: total.at[chunk].add(masked(valid, d).astype(total.dtype)), carry.blocks, weights)
        leaves = model.first & (chunk == 0) & valid
        moving = lambda ends: eqx.filter(model.enter(params._replace(ends=ends), row.leaving), eqx.is_inexact_array)
        _, enter_transposed = jax.vjp(moving, params.ends)
        (ends,) = enter_transposed(masked(leaves, ct))
        ends = jax.tree.map(lambda d, more: d if more is None else d + masked(valid, more), ends, gradients.ends)
        return carry._replace(blocks=blocks, ends=added(carry.ends, choices.scatter(ends), jnp.ones((), bool)))

    return lane


def send(model: Model, choices: Choices) -> Lane:
    """The activation's hop, for which no other lane of the tick waits."""

    def lane(carry, row):
        # On a CPU it waits for all of them: its loop's collectives must be in one order on all devices.
        y = ordered(choices.exchange.part(carry.y), (carry.loss, carry.ct))
        return carry._replace(x=_sent(y, model, distance=1), y=None)

    return lane


def start(model: Model, choices: Choices, table: Row) -> Carry:
    """The carry before the first tick, of zeros: of what the first ticks compute on as well, so that it stays finite."""
    M, v = model.schedule.microbatches, model.schedule.chunks
    moving = eqx.filter(model.x, eqx.is_inexact_array)
    part = choices.exchange.part
    loss, of_head = jax.eval_shape(lambda: model.head(model.params, model.x, jnp.zeros((), jnp.int32)))
    scattered = lambda tree: jax.tree.map(_wide_zeros, jax.eval_shape(choices.scatter, tree))
    return Carry(
        x=part(model.x),
        y=None,
        ct=part(moving),
        slots=[_stacked(jax.eval_shape(raw, kept), int(table.written.max()) + 1) for kept in choices.kinds],
        pending=jax.tree.map(lambda leaf: _stacked(leaf, int(table.put.max()) + 1), moving),
        loss=_wide_zeros(loss),
        terms=None if model.terms.loss is None else _wide_zeros(model.terms.loss),
        of_head=jax.tree.map(lambda value: _stacked(value, M), of_head),
        of_stages=jax.tree.map(lambda value: _stacked(value, M, v), model.terms.aux),
        ends=scattered(model.params.ends),
        blocks=scattered(model.params.blocks),
    )


def gradients(end: Carry) -> PyTree:
    """The sums of all gradients."""
    return eqx.combine(end.ends, end.blocks)


def kept_by(model: Model, halves: Halves) -> list[Any]:
    """The types of what a stage keeps of a microbatch."""
    zero = model.index * 0

    def kept():
        trained, given = model.at_hand(model.params, zero, zero)
        return halves.forward(trained, model.x, given)[1]

    return jax.eval_shape(kept)


def chosen(condition: Bool[Array, ""], a: PyTree, b: PyTree) -> PyTree:
    """The tree `a` where the condition holds, else `b`."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), a, b)


def added(sums: PyTree, terms: PyTree, counts: Bool[Array, ""]) -> PyTree:
    """`sums` plus `terms` where they count; what does not count may be anything, even not a number."""
    return jax.tree.map(lambda total, d: total + masked(counts, d).astype(total.dtype), sums, terms)


def _cotangent(model: Model, choices: Choices, carry: Carry, row: Row, chunk, valid) -> PyTree:
    """What B begins with: on the last stage's last chunk the head's, else what came; zeros where there is no job."""
    from_head = jax.tree.map(lambda all: lax.dynamic_index_in_dim(all, row.taken, keepdims=False), carry.pending)
    came = choices.exchange.whole(carry.ct, eqx.filter(model.x, eqx.is_inexact_array))
    return masked(valid, chosen(model.last & (chunk == model.schedule.chunks - 1), from_head, came))


def _seed(model: Model, valid: Bool[Array, ""]) -> Float[Array, ""] | None:
    """The cotangent of the stage's own term of the loss."""
    if model.terms.loss is None:
        return None
    zero = jnp.zeros_like(model.terms.loss)
    return jnp.where(valid, zero + 1, zero)


def masked(counts: Bool[Array, ""], tree: PyTree) -> PyTree:
    """The tree where it counts, else zeros."""
    return jax.tree.map(lambda leaf: jnp.where(counts, leaf, jnp.zeros((), leaf.dtype)), tree)


def _with_loss(carry: Carry, loss, aux: PyTree, row: Row) -> Carry:
    of_head = jax.tree.map(lambda all, one: lax.dynamic_update_index_in_dim(all, one, row.finished, 0), carry.of_head, aux)
    return carry._replace(loss=carry.loss + loss.astype(carry.loss.dtype), of_head=of_head)


def _put(all: Array, one: Array, valid, microbatch, chunk) -> Array:
    return all.at[microbatch, chunk].set(jnp.where(valid, one, all[microbatch, chunk]))


def _scattered(blocks: PyTree, scatter: Callable[[PyTree], PyTree]) -> PyTree:
    """`scatter` of one chunk's gradients, which it sees as blocks of a single chunk."""
    return jax.tree.map(lambda d: d[0], scatter(jax.tree.map(lambda d: d[None], blocks)))


def _sent(tree: PyTree, model: Model, *, distance: int) -> PyTree:
    return jax.tree.map(lambda leaf: send_next(leaf, model.axis.names, distance=distance), tree)


def _stacked(like: Any, *counts: int) -> Array:
    return jnp.broadcast_to(jnp.zeros_like(like), (*counts, *like.shape))


def _wide_zeros(like: Any) -> Array:
    return jnp.zeros_like(like, dtype=precision.wide(like.dtype))
