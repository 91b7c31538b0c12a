"""The lanes of a tick: functions `(carry, row) -> carry` that every stage runs, and whose effect is masked where it has no job.

Legend: P stages, M microbatches, v chunks a stage, F forward, B backward, or in two parts I, the input's cotangent, and W, the
gradients of the weights.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from parallax.collectives import send_next
from parallax.collectives.cpu import ordered
from parallax.pipeline.carry import Carry, Choices, added, chosen, masked, waiting, written
from parallax.pipeline.kept import Halves, InTwo, in_two
from parallax.pipeline.model import Model, Parameters
from parallax.pipeline.rows import Row
from parallax.typed import PyTree

Lane: TypeAlias = Callable[[Carry, Row], Carry]
Lanes: TypeAlias = list[tuple[str, Lane]]  # by what the schedule calls the ticks in which each runs, in order


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


def in_three(model: Model, params: Parameters, choices: Choices) -> Lanes:
    """The lanes of loss and gradients, the gradients of the stages' weights in one of their own."""
    return [
        ("forward", forward(model, params, choices)),
        ("head", head(model, params, choices)),
        ("backward", backward_input(model, params, choices)),
        ("weight", backward_weight(model, params, choices)),
        ("forward", send(model, choices)),
    ]


def forward(model: Model, params: Parameters, choices: Choices) -> Lane:
    """F: a chunk of layers, of what enters or of what came, and into a slot what B needs of it."""

    def lane(carry, row):
        microbatch, chunk, valid = model.job(row.forward)
        entering = model.enter(params, row.entering)
        x = chosen(model.first & (chunk == 0), entering, choices.exchange.whole(carry.x, model.x))
        trained, given = model.at_hand(params, microbatch, chunk, valid)
        ((moving, loss), (still, aux)), kept = choices.halves.forward(trained, x, given)
        return carry._replace(
            y=eqx.combine(moving, still),
            slots=written(carry.slots, kept, row.written[model.index]),
            terms=None if loss is None else carry.terms + masked(valid, loss).astype(carry.terms.dtype),
            of_stages=jax.tree.map(lambda all, one: _put(all, one, valid, microbatch, chunk), carry.of_stages, aux),
        )

    return lane


def head(model: Model, params: Parameters, choices: Choices) -> Lane:
    """The loss of what the last stage has finished, its gradient, and the cotangent that B begins with."""

    def lane(carry, row):
        (loss, aux), (ends, ct) = differentiated_head(model, params, carry.y, row.finished)
        counts = jnp.ones((), bool) if model.shared_out(loss) else model.last
        return with_loss(carry, loss, aux, row.finished)._replace(
            ends=added(carry.ends, choices.scatter(ends), counts),
            pending=jax.tree.map(lambda all, one: lax.dynamic_update_index_in_dim(all, one, row.put, 0), carry.pending, ct),
        )

    return lane


def differentiated_head(model: Model, params: Parameters, y: PyTree, microbatch: Array) -> tuple[tuple[Array, PyTree], PyTree]:
    """`((loss, aux), (gradients of the ends, y's cotangent))` of what the last stage has finished."""
    moving, still = eqx.partition(y, eqx.is_inexact_array)

    def loss_of(ends, moving):
        loss, aux = model.head(params._replace(ends=ends), eqx.combine(moving, still), microbatch)
        return loss if model.shared_out(loss) else masked(model.last, loss), aux

    return jax.value_and_grad(loss_of, argnums=(0, 1), has_aux=True)(params.ends, moving)


def head_value(model: Model, params: Parameters) -> Lane:
    """The loss of what the last stage has finished."""

    def lane(carry, row):
        loss, aux = model.head(params, carry.y, row.finished)
        return with_loss(carry, loss if model.shared_out(loss) else masked(model.last, loss), aux, row.finished)

    return lane


def backward(model: Model, params: Parameters, choices: Choices) -> Lane:
    """B: the stage's transpose. Its cotangent is sent first, so that all that follows in the tick can hide the message."""

    def lane(carry, row):
        microbatch, chunk, valid = model.job(row.backward)
        ct = _cotangent(model, choices, carry, row, chunk, valid)
        trained, given = model.at_hand(params, microbatch, chunk, valid)
        kept = waiting(carry.slots, choices.kinds, row.read[model.index])
        gradients, ct = choices.halves.backward(trained, given, kept)((ct, seed(model, valid)))
        carry = carry._replace(ct=moved(choices.exchange.part(ct), model, distance=-1))
        carry = carry._replace(blocks=_with_weights(carry, choices, gradients.blocks, chunk, valid))
        ends = of_enter(model, params, row.leaving, masked(model.first & (chunk == 0) & valid, ct))
        ends = jax.tree.map(lambda d, more: d if more is None else d + masked(valid, more), ends, gradients.ends)
        return carry._replace(ends=added(carry.ends, choices.scatter(ends), jnp.ones((), bool)))

    return lane


def backward_input(model: Model, params: Parameters, choices: Choices) -> Lane:
    """I: compute the input's cotangent, send it first as B does, and store what W needs beside what F kept."""
    assert choices.in_two is not None
    inputs = choices.in_two.inputs

    def lane(carry, row):
        microbatch, chunk, valid = model.job(row.backward)
        ct = _cotangent(model, choices, carry, row, chunk, valid)
        trained, given = model.at_hand(params, microbatch, chunk, valid)
        kept = waiting(carry.slots, choices.kinds, row.read[model.index])
        ct, handed = inputs(trained, given, kept, (ct, seed(model, valid)))
        carry = carry._replace(ct=moved(choices.exchange.part(ct), model, distance=-1))
        carry = carry._replace(handed=written(carry.handed, handed, row.handed[model.index]))
        ends = of_enter(model, params, row.leaving, masked(model.first & (chunk == 0) & valid, ct))
        return carry._replace(ends=added(carry.ends, choices.scatter(ends), jnp.ones((), bool)))

    return lane


def backward_weight(model: Model, params: Parameters, choices: Choices) -> Lane:
    """W: the gradients of what the stage is differentiated in, of which no other stage needs any."""
    assert choices.in_two is not None
    weights = choices.in_two.weights

    def lane(carry, row):
        microbatch, chunk, valid = model.job(row.weight)
        trained, given = model.at_hand(params, microbatch, chunk, valid)
        kept = waiting(carry.slots, choices.kinds, row.weighed[model.index])
        handed = waiting(carry.handed, choices.handed, row.taken_up[model.index])
        gradients = weights(trained, given, kept, handed)
        of_ends = choices.scatter(gradients.ends)
        add = lambda total, d: total if d is None else total + masked(valid, d).astype(total.dtype)
        return carry._replace(
            blocks=_with_weights(carry, choices, gradients.blocks, chunk, valid),
            ends=jax.tree.map(add, carry.ends, of_ends),
        )

    return lane


def send(model: Model, choices: Choices) -> Lane:
    """The activation's hop, for which no other lane of the tick waits."""

    def lane(carry, row):
        # On a CPU it waits for all of them: its loop's collectives must be in one order on all devices.
        y = ordered(choices.exchange.part(carry.y), (carry.loss, carry.ct))
        return carry._replace(x=moved(y, model, distance=1), y=None)

    return lane


def kept_by(model: Model, halves: Halves) -> list[Any]:
    """The types of what a stage keeps of a microbatch."""
    zero = model.index * 0

    def kept():
        trained, given = model.at_hand(model.params, zero, zero, zero == 0)
        return halves.forward(trained, model.x, given)[1]

    return jax.eval_shape(kept)


def two_of(model: Model, halves: Halves) -> tuple[InTwo, tuple[Any, ...]]:
    """The backward half in two, and the types of what the first part hands on."""
    zero, found = model.index * 0, []

    def handed():
        trained, given = model.at_hand(model.params, zero, zero, zero == 0)
        ((moving, loss), _), kept = halves.forward(trained, model.x, given)
        ct = jax.tree.map(jnp.zeros_like, (moving, loss))
        found[:] = [in_two(halves, trained, given, kept, ct)]
        return found[0].inputs(trained, given, kept, ct)[1]

    kinds = tuple(jax.eval_shape(handed))
    return found[0], kinds


def _cotangent(model: Model, choices: Choices, carry: Carry, row: Row, chunk, valid) -> PyTree:
    """The cotangent that B begins with: the head's on the last stage's last chunk, elsewhere the one received; zeros where
    there is no job."""
    from_head = jax.tree.map(lambda all: lax.dynamic_index_in_dim(all, row.taken, keepdims=False), carry.pending)
    came = choices.exchange.whole(carry.ct, eqx.filter(model.x, eqx.is_inexact_array))
    return masked(valid, chosen(model.last & (chunk == model.schedule.chunks - 1), from_head, came))


def seed(model: Model, valid: Bool[Array, ""]) -> Float[Array, ""] | None:
    """The cotangent of the stage's own term of the loss."""
    if model.terms.loss is None:
        return None
    zero = jnp.zeros_like(model.terms.loss)
    return jnp.where(valid, zero + 1, zero)


def with_loss(carry: Any, loss: Array, aux: PyTree, microbatch: Array) -> Any:
    """A carry with what the head makes of a microbatch: its loss added up, its auxiliary values in their place."""
    of_head = jax.tree.map(lambda all, one: lax.dynamic_update_index_in_dim(all, one, microbatch, 0), carry.of_head, aux)
    return carry._replace(loss=carry.loss + loss.astype(carry.loss.dtype), of_head=of_head)


def _put(all: Array, one: Array, valid, microbatch, chunk) -> Array:
    return all.at[microbatch, chunk].set(jnp.where(valid, one, all[microbatch, chunk]))


def scattered(blocks: PyTree, scatter: Callable[[PyTree], PyTree]) -> PyTree:
    """`scatter` of one chunk's gradients, which it sees as blocks of a single chunk."""
    return jax.tree.map(lambda d: d[0], scatter(jax.tree.map(lambda d: d[None], blocks)))


def moved(tree: PyTree, model: Model, *, distance: int) -> PyTree:
    """What the stage so many before this one has; as it is, if that is this one."""
    if not distance:
        return tree
    return jax.tree.map(lambda leaf: send_next(leaf, model.axis.names, distance=distance), tree)


def of_enter(model: Model, params: Parameters, microbatch: Array, ct: PyTree) -> PyTree:
    """The gradients of what enter reads."""
    moving = lambda ends: eqx.filter(model.enter(params._replace(ends=ends), microbatch), eqx.is_inexact_array)
    return jax.vjp(moving, params.ends)[1](ct)[0]


def _with_weights(carry: Carry, choices: Choices, gradients: PyTree, chunk: Array, valid: Bool[Array, ""]) -> PyTree:
    """The sums of the blocks' gradients, with those of one chunk added."""
    weights = scattered(gradients, choices.scatter)
    return jax.tree.map(lambda total, d: total.at[chunk].add(masked(valid, d).astype(total.dtype)), carry.blocks, weights)
