"""What ticks hand on to one another, and the slots in which arrays wait for a later tick.

Legend: P stages, M microbatches, v chunks a stage, F forward, B backward, or in two parts I and W.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Shaped

from parallax import precision
from parallax.collectives import Axis
from parallax.collectives.types import axes, varying, varying_axes
from parallax.pipeline.exchange import Exchange
from parallax.pipeline.kept import Halves, InTwo, raw, typed
from parallax.pipeline.model import Model
from parallax.pipeline.rows import Row
from parallax.typed import PyTree


class Carry(NamedTuple):
    """What one tick hands to the next, and one lane to those after it.

    Attributes:
        x: from the stage before, as it was sent.
        y: what F made in this tick; None between ticks.
        ct: from the stage after, as it was sent: of the floating-point leaves of x.
        slots: what F keeps for B, [slots, ...] each, or, of what is the same on all stages and for all microbatches, [...].
        handed: what I hands on to W, likewise.
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
    handed: list[Shaped[Array, "slots ..."]]
    pending: PyTree
    loss: Float[Array, ""]
    terms: Float[Array, ""] | None
    of_head: PyTree
    of_stages: PyTree
    ends: PyTree
    blocks: PyTree


class Choices(NamedTuple):
    """How the lanes keep, send and add.

    Attributes:
        halves: of a stage, by what it keeps.
        kinds: the types of what is kept.
        exchange: an argument of `pipeline.value_and_grad`.
        scatter: likewise.
        in_two: with a weight lane, the backward half in two.
        handed: the types of what its first part hands on to the second.
    """

    halves: Halves
    kinds: list[Any]
    exchange: Exchange
    scatter: Callable[[PyTree], PyTree]
    in_two: InTwo | None = None
    handed: tuple[Any, ...] = ()


def start(model: Model, choices: Choices, table: Row) -> Carry:
    """The carry before the first tick: zeros, and slots that are empty, whose numbers no sum ever takes."""
    moving = eqx.filter(model.x, eqx.is_inexact_array)
    part = choices.exchange.part
    return Carry(
        x=part(model.x),
        y=None,
        ct=part(moving),
        slots=slots_of(choices.kinds, int(table.written.max()) + 1, model.axis),
        handed=slots_of(choices.handed, int(table.handed.max()) + 1, model.axis),
        pending=jax.tree.map(lambda leaf: stacked(leaf, int(table.put.max()) + 1), moving),
        **nothing_added(model, choices),
    )


def nothing_added(model: Model, choices: Choices) -> dict[str, Any]:
    """What is added up over a step, and the auxiliary values, by their names in a carry: zeros."""
    M, v = model.schedule.microbatches, model.schedule.chunks
    loss, of_head = jax.eval_shape(lambda: model.head(model.params, model.x, jnp.zeros((), jnp.int32)))
    scattered = lambda tree: jax.tree.map(wide_zeros, jax.eval_shape(choices.scatter, tree))
    return {
        "loss": wide_zeros(loss),
        "terms": None if model.terms.loss is None else wide_zeros(model.terms.loss),
        "of_head": jax.tree.map(lambda value: stacked(value, M), of_head),
        "of_stages": jax.tree.map(lambda value: stacked(value, M, v), model.terms.aux),
        "ends": scattered(model.params.ends),
        "blocks": scattered(model.params.blocks),
    }


def chosen(condition: Bool[Array, ""], a: PyTree, b: PyTree) -> PyTree:
    """The tree `a` where the condition holds, else `b`."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), a, b)


def added(sums: PyTree, terms: PyTree, counts: Bool[Array, ""]) -> PyTree:
    """`sums` plus `terms` where they count; what does not count may be anything, even not a number."""
    return jax.tree.map(lambda total, d: total + masked(counts, d).astype(total.dtype), sums, terms)


def masked(counts: Bool[Array, ""], tree: PyTree) -> PyTree:
    """The tree where it counts, else zeros."""
    return jax.tree.map(lambda leaf: jnp.where(counts, leaf, jnp.zeros((), leaf.dtype)), tree)


def slots_of(kinds: Sequence[Any], count: int, axis: Axis) -> list[Array]:
    """So many slots of each kind; of what is the same on all stages, such as a constant, one for all microbatches.

    Accelerators do not fill slots of floating-point numbers (`lax.empty`): what a tick without a job makes of them may be
    anything, and `masked` drops it. Whole numbers are zeros, as an index must lie in its array.
    """
    zero = lambda kind: jnp.zeros_like(jax.eval_shape(raw, kind))
    alike = lambda zeros: set(axes(axis.names)) - set(varying_axes(zeros))

    def unfilled(zeros):
        if not jnp.issubdtype(zeros.dtype, jnp.inexact):
            return stacked(zeros, count)
        return varying(lax.empty((count, *zeros.shape), zeros.dtype), varying_axes(zeros))

    return [zeros if alike(zeros) else unfilled(zeros) for zeros in map(zero, kinds)]


def written(slots: list[Any], arrays: Sequence[Any], slot: Array) -> list[Any]:
    """The slots after these arrays, one of each kind, have gone into one of them."""
    put = lambda all, one: one if all.ndim == one.ndim else lax.dynamic_update_index_in_dim(all, one, slot, 0)
    return [put(all, raw(one)) for all, one in zip(slots, arrays, strict=True)]


def waiting(slots: list[Any], kinds: Sequence[Any], slot: Array) -> list[Any]:
    """What lies in a slot, of these types."""

    def taken(all, kind):
        alike = all.ndim == jax.eval_shape(raw, kind).ndim
        return typed(all if alike else lax.dynamic_index_in_dim(all, slot, keepdims=False), kind)

    return [taken(all, kind) for all, kind in zip(slots, kinds, strict=True)]


def stacked(like: Any, *counts: int) -> Array:
    """Zeros for so many of an array."""
    return jnp.broadcast_to(jnp.zeros_like(like), (*counts, *like.shape))


def wide_zeros(like: Any) -> Array:
    """Zeros like an array, of the type in which it is added up."""
    return jnp.zeros_like(like, dtype=precision.wide(like.dtype))
