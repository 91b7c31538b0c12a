"""Writes and reads a pipeline stage's buffers, and adds losses and gradients to the stage's sums.

A tick is one step of a pipeline's loop, in which a stage runs a job or is idle. A buffer is an
array [slots, ...]. A slot holds one microbatch's array from the tick that writes it to the tick
that reads it: `put` may write microbatch 3 into slot 1 in tick 3, and `taken` may read it in tick
9. An idle stage may compute too, but its results are not used: `masked` replaces these results by
zeros, so `added` adds nothing to the stage's sums. An array varies along a mesh axis if its type
says that the array may differ between the devices of the axis.
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

# Whether a result of this stage is used in this tick, such as whether the stage has a job. It is
# `True` itself if the result is always used.
Counts: TypeAlias = Bool[Array, ""] | bool


def chosen(condition: Bool[Array, ""], a: PyTree, b: PyTree) -> PyTree:
    """Returns the tree `a` if the condition holds, else `b`; both are computed."""
    return jax.tree.map(functools.partial(jnp.where, condition), a, b)


def masked(counts: Counts, tree: PyTree) -> PyTree:
    """Returns the tree if the condition `counts` is true, else zeros."""
    if counts is True:
        return tree

    def leaf(x):
        # Not a product with the condition: a tick without a job may compute NaN, and 0 * NaN is
        # NaN.
        return jnp.where(counts, x, jnp.zeros((), x.dtype))

    return jax.tree.map(leaf, tree)


def added(sums: PyTree, terms: PyTree, counts: Counts) -> PyTree:
    """Returns `sums` plus `terms` if the condition `counts` is true, else `sums`. A term that is
    None adds nothing."""

    def leaf(total, term):
        # Sums are at least float32, also if the gradients are bfloat16.
        return total if term is None else total + masked(counts, term).astype(total.dtype)

    return jax.tree.map(leaf, sums, terms)


def put(buffers: PyTree, tree: PyTree, slot: Int[Array, ""]) -> PyTree:
    """Returns the buffers, [slots, ...] each, with each array of the tree written into the slot
    `slot` of its buffer.

    A tree of cotangents has None for an array of integers or booleans: the buffer for such an array
    stays as it is.
    """

    def leaf(buffer, x):
        """Returns `buffer`, [slots, ...], with `x`, [...], in place of `buffer[slot]`."""
        if x is None:  # a cotangent that does not exist
            return buffer
        # An array that is the same for each microbatch has no slots (see `slots_for`).
        if buffer.ndim == x.ndim:
            return x
        return lax.dynamic_update_index_in_dim(buffer, x, slot, 0)

    return jax.tree.map(leaf, buffers, tree)


def taken(buffers: PyTree, like: PyTree, slot: Int[Array, ""]) -> PyTree:
    """Returns the tree in the slot `slot` of the buffers. `like` is a tree with the structure of
    the result, and its leaves have the `ndim` of the result's arrays. A buffer with one dim more
    than its leaf in `like` is [slots, ...]; any other buffer has no slots, and is returned whole.
    """

    def leaf(buffer, like):
        """Returns `buffer[slot]`, an array with as many dims as `like`."""
        # A buffer without the dim of slots is the same array for each microbatch.
        if buffer.ndim == like.ndim:
            return buffer
        return lax.dynamic_index_in_dim(buffer, slot, keepdims=False)

    return jax.tree.map(leaf, buffers, like)


def slots_for(types: Sequence[Any], count: int, axis: Axis) -> list[Array]:
    """Returns a buffer of `count` slots, [count, ...], for each of these types of arrays.

    If a type says that the array is the same on all stages, its buffer has no slots: it is one
    array [...] for all microbatches. In one tick the stages have different microbatches, so an
    array that is the same on all of them cannot depend on the microbatch. `axis` is the axis of the
    stages.
    """

    def slots(kind):
        """Returns a buffer of `count` slots for arrays of the type `kind`. The buffer varies along
        the same mesh axes as `kind`."""
        # `kind` may be a type in a jaxpr, which `zeros_like` does not take; this makes it a
        # `ShapeDtypeStruct`.
        kind = jax.eval_shape(lambda x: x, kind)
        along, shape = axes_of_type(jax.typeof(kind)), (count, *kind.shape)
        # `zeros_like` of random keys, and `empty`, have no axes along which they vary. So each
        # result is cast by `varying`.
        if not set(axes(axis.names)) & set(along):
            return varying(jnp.zeros_like(kind), along)
        # Integers may be indices. An idle stage computes with them too, so they begin in range.
        if not jnp.issubdtype(kind.dtype, jnp.inexact):
            return varying(jnp.broadcast_to(jnp.zeros_like(kind), shape), along)
        # Accelerators do not fill an empty array, which saves the time to write zeros. A tick
        # without a job may then read any numbers, and `masked` drops the result.
        return varying(lax.empty(shape, kind.dtype), along)

    return [slots(kind) for kind in types]


def stacked_zeros(tree: PyTree, *sizes: int) -> PyTree:
    """Returns, for each array [...] of a tree, zeros of the shape [*sizes, ...]; `sizes` may be the
    number of microbatches, for example."""

    def leaf(x):
        # `zeros_like` of an array keeps the axes along which it varies; `jnp.zeros` would not.
        return jnp.broadcast_to(jnp.zeros_like(x), (*sizes, *x.shape))

    return jax.tree.map(leaf, tree)


def wide_zeros(like: Any) -> Array:
    """Returns zeros of the shape of `like`, to which arrays such as `like` can be added. Their
    dtype is that of `like`, or float32 if `like` has fewer than 32 bits."""
    return jnp.zeros_like(like, dtype=accumulation_dtype(like.dtype))
