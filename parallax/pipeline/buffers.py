"""Arrays that wait in slots for a later tick, and sums in which some ticks do not count.

A buffer is [slots, ...]. A slot holds one microbatch's array from the tick that writes it to the
tick that reads it. A tick counts for a stage if the schedule has a job there: idle stages compute
too, and their results are masked.
"""

import functools
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from parallax._typing import PyTree
from parallax.collectives import Axis
from parallax.collectives.types import accumulation_dtype, axes, axes_of_type, varying

# Whether a result counts on this stage in this tick; `True` itself if it counts in every tick.
Counts: TypeAlias = Bool[Array, ""] | bool


def chosen(condition: Bool[Array, ""], a: PyTree, b: PyTree) -> PyTree:
    """Returns the tree `a` if the condition holds, else `b`; both are computed."""
    return jax.tree.map(functools.partial(jnp.where, condition), a, b)


def masked(counts: Counts, tree: PyTree) -> PyTree:
    """Returns the tree if it counts, else zeros."""
    # Not a product with the condition: a tick without a job may compute NaN, and 0 * NaN is NaN.
    if counts is True:
        return tree

    def leaf(x):
        return jnp.where(counts, x, jnp.zeros((), x.dtype))

    return jax.tree.map(leaf, tree)


def added(sums: PyTree, terms: PyTree, counts: Counts) -> PyTree:
    """Returns `sums` plus `terms` if the terms count, else `sums`. A term may be None, and adds
    nothing."""

    def leaf(total, term):
        # Sums are at least float32, also if the gradients are bfloat16.
        return total if term is None else total + masked(counts, term).astype(total.dtype)

    return jax.tree.map(leaf, sums, terms)


def put(buffers: PyTree, tree: PyTree, slot: Int[Array, ""]) -> PyTree:
    """Writes each array of the tree into this slot of its buffer, [slots, ...].

    The tree has None for an array that travels without a cotangent: its buffer stays as it is.
    """

    def leaf(buffer, x):
        """Returns a buffer with `x`, of one dim less, in its slot."""
        if x is None:
            return buffer
        # An array that is the same on all stages has no slots (see `slots_for`): F computes the
        # same one for each microbatch.
        if buffer.ndim == x.ndim:
            return x
        return lax.dynamic_update_index_in_dim(buffer, x, slot, 0)

    return jax.tree.map(leaf, buffers, tree)


def taken(buffers: PyTree, like: PyTree, slot: Int[Array, ""]) -> PyTree:
    """Returns the tree in this slot of the buffers. Its arrays have as many dims as the arrays of
    `like`."""

    def leaf(buffer, like):
        """Returns the array, of the dims of `like`, in the slot of a buffer."""
        # A buffer without the dim of slots is the same array for each microbatch.
        if buffer.ndim == like.ndim:
            return buffer
        return lax.dynamic_index_in_dim(buffer, slot, keepdims=False)

    return jax.tree.map(leaf, buffers, like)


def slots_for(types: Sequence[Any], count: int, axis: Axis) -> list[Array]:
    """Returns a buffer of `count` slots for each of these types of arrays.

    An array that is the same on all stages, such as a constant, gets one array for all microbatches
    instead. `axis` is the axis of the stages.
    """

    def slots(kind):
        """Returns the buffer for one type: [count, ...], or [...] for a constant."""
        # `kind` may be a type in a jaxpr, which `zeros_like` does not take; this makes it a
        # `ShapeDtypeStruct`.
        kind = jax.eval_shape(lambda x: x, kind)
        along, shape = axes_of_type(jax.typeof(kind)), (count, *kind.shape)
        if not set(axes(axis.names)) & set(along):
            return jnp.zeros_like(kind)
        # Integers may be indices. An idle stage computes with them too, so they begin in range.
        if not jnp.issubdtype(kind.dtype, jnp.inexact):
            return varying(jnp.broadcast_to(jnp.zeros_like(kind), shape), along)
        # Accelerators do not fill an empty array: a tick without a job may read anything, and
        # `masked` drops the result.
        return varying(lax.empty(shape, kind.dtype), along)

    return [slots(kind) for kind in types]


def stacked(tree: PyTree, *counts: int) -> PyTree:
    """Returns zeros like the arrays of a tree, with dims of these sizes before their own."""

    def leaf(x):
        return jnp.broadcast_to(jnp.zeros_like(x), (*counts, *x.shape))

    return jax.tree.map(leaf, tree)


def wide_zeros(like: Any) -> Array:
    """Returns zeros of an array's shape, in the dtype of its sum, at least float32."""
    return jnp.zeros_like(like, dtype=accumulation_dtype(like.dtype))
