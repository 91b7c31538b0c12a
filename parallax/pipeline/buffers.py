"""Arrays that wait in slots for a later tick, and sums in which some ticks do not count."""

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

# True where it counts on all stages in all ticks.
Counts: TypeAlias = Bool[Array, ""] | bool


def chosen(condition: Bool[Array, ""], a: PyTree, b: PyTree) -> PyTree:
    """Returns the tree `a` where the condition holds, else `b`."""
    return jax.tree.map(functools.partial(jnp.where, condition), a, b)


def masked(counts: Counts, tree: PyTree) -> PyTree:
    """Returns the tree where it counts, else zeros."""
    # Not a product with the condition: a tick without a job may compute NaN, and 0 * NaN is NaN.
    if counts is True:
        return tree

    def leaf(x):
        return jnp.where(counts, x, jnp.zeros((), x.dtype))

    return jax.tree.map(leaf, tree)


def added(sums: PyTree, terms: PyTree, counts: Counts) -> PyTree:
    """Returns `sums` plus `terms` where they count. A term may be None."""

    def leaf(total, term):
        # Sums are at least float32, also of bfloat16 gradients.
        return total if term is None else total + masked(counts, term).astype(total.dtype)

    return jax.tree.map(leaf, sums, terms)


def put(buffers: PyTree, tree: PyTree, slot: Int[Array, ""]) -> PyTree:
    """Returns the buffers, [slots, ...] each, with an array of the tree in a slot of each.

    Where the tree has None a buffer stays.
    """

    def leaf(buffer, x):
        if x is None:
            return buffer
        # A constant has no slots: F computes the same one for each microbatch.
        if buffer.ndim == x.ndim:
            return x
        return lax.dynamic_update_index_in_dim(buffer, x, slot, 0)

    return jax.tree.map(leaf, buffers, tree)


def taken(buffers: PyTree, like: PyTree, slot: Int[Array, ""]) -> PyTree:
    """Returns the tree in a slot of the buffers, of arrays with as many dims as those of `like`."""

    def leaf(buffer, like):
        # A buffer without the dim of slots is a constant.
        if buffer.ndim == like.ndim:
            return buffer
        return lax.dynamic_index_in_dim(buffer, slot, keepdims=False)

    return jax.tree.map(leaf, buffers, like)


def slots_for(types: Sequence[Any], count: int, axis: Axis) -> list[Array]:
    """Returns so many slots for each of these types.

    An array that is the same on all stages, such as a constant, gets one for all microbatches.
    """

    def slots(kind):
        kind = jax.eval_shape(lambda x: x, kind)  # a type of a traced program is none of an array
        along, shape = axes_of_type(jax.typeof(kind)), (count, *kind.shape)
        if not set(axes(axis.names)) & set(along):
            return jnp.zeros_like(kind)
        # An index must lie in its array, also where a tick without a job computes with it.
        if not jnp.issubdtype(kind.dtype, jnp.inexact):
            return varying(jnp.broadcast_to(jnp.zeros_like(kind), shape), along)
        # Accelerators do not fill an empty array: a tick without a job may read anything, and
        # `masked` drops the result.
        return varying(lax.empty(shape, kind.dtype), along)

    return [slots(kind) for kind in types]


def stacked(tree: PyTree, *counts: int) -> PyTree:
    """Returns zeros like the arrays of a tree, with these dims before their own."""

    def leaf(x):
        return jnp.broadcast_to(jnp.zeros_like(x), (*counts, *x.shape))

    return jax.tree.map(leaf, tree)


def wide_zeros(like: Any) -> Array:
    """Returns zeros like an array, of the type in which its sum is taken."""
    return jnp.zeros_like(like, dtype=accumulation_dtype(like.dtype))
