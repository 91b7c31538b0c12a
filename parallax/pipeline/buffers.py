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
from parallax.collectives.types import accumulation_dtype, axes, varying, varying_axes

# True where it counts on all stages in all ticks.
Counts: TypeAlias = Bool[Array, ""] | bool


def chosen(condition: Bool[Array, ""], a: PyTree, b: PyTree) -> PyTree:
    """The tree `a` where the condition holds, else `b`."""
    return jax.tree.map(functools.partial(jnp.where, condition), a, b)


def masked(counts: Counts, tree: PyTree) -> PyTree:
    """The tree where it counts, else zeros."""
    # Not a product with the condition: a tick without a job may compute NaN, and 0 * NaN is NaN.
    if counts is True:
        return tree

    def leaf(x):
        return jnp.where(counts, x, jnp.zeros((), x.dtype))

    return jax.tree.map(leaf, tree)


def added(sums: PyTree, terms: PyTree, counts: Counts) -> PyTree:
    """`sums` plus `terms` where they count. A term may be None."""

    def leaf(total, term):
        # Sums are at least float32, also of bfloat16 gradients.
        return total if term is None else total + masked(counts, term).astype(total.dtype)

    return jax.tree.map(leaf, sums, terms)


def put(buffers: PyTree, tree: PyTree, slot: Int[Array, ""]) -> PyTree:
    """The buffers, [slots, ...] each, with an array of the tree in a slot of each.

    Where the tree has None a buffer stays.
    """

    def leaf(buffer, x):
        if x is None:
            return buffer
        return lax.dynamic_update_index_in_dim(buffer, x.astype(buffer.dtype), slot, 0)

    return jax.tree.map(leaf, buffers, tree)


def taken(buffers: PyTree, slot: Int[Array, ""]) -> PyTree:
    """The tree in a slot of the buffers."""
    take = functools.partial(lax.dynamic_index_in_dim, index=slot, keepdims=False)
    return jax.tree.map(take, buffers)


def slots_for(types: Sequence[Any], count: int, axis: Axis) -> list[Array]:
    """So many slots for each of these types.

    An array that is the same on all stages, such as a constant, gets one for all microbatches.
    """

    def slots(kind):
        zeros = jnp.zeros_like(jax.eval_shape(_numbers, kind))
        if not set(axes(axis.names)) & set(varying_axes(zeros)):
            return zeros
        # An index must lie in its array, also where a tick without a job computes with it.
        if not jnp.issubdtype(zeros.dtype, jnp.inexact):
            return stacked(zeros, count)
        # Accelerators do not fill an empty array: a tick without a job may read anything, and
        # `masked` drops the result.
        return varying(lax.empty((count, *zeros.shape), zeros.dtype), varying_axes(zeros))

    return [slots(kind) for kind in types]


def saved_in(slots: list[Any], arrays: Sequence[Any], slot: Int[Array, ""]) -> list[Any]:
    """The slots of `slots_for` after these arrays have gone into one of them."""

    def one(buffer, x):
        # A constant has no slots: F computes the same one for each microbatch.
        return x if buffer.ndim == x.ndim else lax.dynamic_update_index_in_dim(buffer, x, slot, 0)

    return [one(buffer, _numbers(x)) for buffer, x in zip(slots, arrays, strict=True)]


def loaded(slots: list[Any], types: Sequence[Any], slot: Int[Array, ""]) -> list[Any]:
    """The arrays in a slot of `slots_for`, of these types."""

    def one(buffer, kind):
        is_one_for_all = buffer.ndim == jax.eval_shape(_numbers, kind).ndim
        # A buffer without the dim of slots is a constant.
        numbers = (
            buffer if is_one_for_all else lax.dynamic_index_in_dim(buffer, slot, keepdims=False)
        )
        if not _is_key(kind):
            return numbers
        return jax.random.wrap_key_data(
            numbers, impl=jax.random.key_impl(jnp.zeros((), kind.dtype))
        )

    return [one(buffer, kind) for buffer, kind in zip(slots, types, strict=True)]


def stacked(tree: PyTree, *counts: int) -> PyTree:
    """Zeros like the arrays of a tree, with these dims before their own."""

    def leaf(x):
        return jnp.broadcast_to(jnp.zeros_like(x), (*counts, *x.shape))

    return jax.tree.map(leaf, tree)


def wide_zeros(like: Any) -> Array:
    """Zeros like an array, of the type in which its sum is taken."""
    return jnp.zeros_like(like, dtype=accumulation_dtype(like.dtype))


def _numbers(x: Any) -> Any:
    """An array as a slot holds it: random keys as their numbers."""
    return jax.random.key_data(x) if _is_key(x) else x


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
