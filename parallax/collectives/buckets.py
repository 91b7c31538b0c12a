"""Many leaves in few messages: small arrays are packed one after another into long ones, which are reduced, and unpacked.

A message costs its latency whatever its size, and most leaves of a model (biases, norms) are far smaller than what a link
carries in that time. Packing copies each packed leaf twice, and on a TPU changes how it is stored; so large leaves, which gain
nothing by it, go as they are: a leaf that is alone in its bucket is not copied.

Source: Li et al., PyTorch Distributed: experiences on accelerating data parallel training (arXiv 2006.15704), section 3.2.3.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped

from parallax.collectives.axis import Axis, AxisLike
from parallax.collectives.cpu import sequence_after
from parallax.collectives.types import reduction_state, varying, varying_axes

NBYTES = 2**20  # a ring of 8 hands on 128 kB a hop: 3 us at 45 GB/s, where a hop takes 1 us


def bucketed(axis: AxisLike, *, nbytes: int = NBYTES) -> Axis:
    """`axis`, whose `all_reduce` takes as many messages as there are buckets instead of leaves: `A {U_X} -> A`.

    It equals that `all_reduce` leaf by leaf, where it adds up number by number, whatever array a number stands in; types and
    gradients are the same too. A bucket takes leaves of one dtype which vary along the same axes, in the order of the tree,
    until the next would take it over `nbytes`. An unreduced or reduced leaf has one to itself, and so has one of `nbytes` or
    more. A bucket is padded to a multiple of the devices, so that a ring need not copy it again.
    Round `quantized`, numbers of neighbouring leaves share a scale: a loss among gradients would spoil them.

        grads.averaged(grad, bucketed(ring("data")))

    Args:
        axis: the axis, and who moves data along it; its other collectives stay as they are.
        nbytes: the size of a bucket on one device.

    Raises:
        ValueError: `nbytes` is below 1.
    """
    if nbytes < 1:
        raise ValueError(
            f"bucketed needs nbytes of 1 or more; got {nbytes}. The usual size is {NBYTES}."
        )

    axis = Axis.of(axis)
    algorithm = axis.algorithm

    def all_reduce(x, axis_name):
        leaves, structure = jax.tree.flatten(x)
        leaves = [jnp.asarray(leaf) for leaf in leaves]
        buckets = assign_buckets(leaves, nbytes)
        done: list[jax.Array] = []
        for bucket in buckets:
            parts = [leaves[i] for i in bucket]
            if len(parts) > 1:  # one bucket after another: at no time is more than one packed
                parts = [_packed(sequence_after(parts, done), axis_name)]
            (total,) = algorithm.all_reduce(parts, axis_name)
            done = _unpacked(total, [leaves[i].shape for i in bucket])
            for i, part in zip(bucket, done, strict=True):
                leaves[i] = part
        return jax.tree.unflatten(structure, leaves)

    return Axis(
        axis.names,
        dataclasses.replace(algorithm, name=f"bucketed {algorithm}", all_reduce=all_reduce),
    )


def assign_buckets(leaves: Sequence[Shaped[Array, "..."]], nbytes: int) -> list[list[int]]:
    """The indices of the leaves in each bucket of at most `nbytes` (or of one leaf), by dtype and by the axes they vary along.

    A leaf that is unreduced or reduced along an axis is alone in its bucket: JAX does not join such arrays.
    """
    buckets, last = (
        [],
        {},
    )  # last: of each kind, the bucket that is filled at present, and its bytes
    for i, leaf in enumerate(leaves):
        kind, size = (
            (leaf.dtype, varying_axes(leaf), i if reduction_state(leaf) else None),
            leaf.size * leaf.dtype.itemsize,
        )
        bucket, filled = last.get(kind, (None, 0))
        if size >= nbytes:  # and those before and after it go on together
            buckets.append([i])
            continue
        if bucket is None or filled + size > nbytes:
            bucket, filled = [], 0
            buckets.append(bucket)
        bucket.append(i)
        last[kind] = bucket, filled + size
    return buckets


def _packed(leaves, axis_name):
    padding = jnp.zeros(
        -sum(leaf.size for leaf in leaves) % lax.axis_size(axis_name), leaves[0].dtype
    )
    return jnp.concatenate(
        [leaf.reshape(-1) for leaf in leaves] + [varying(padding, varying_axes(leaves[0]))]
    )


def _unpacked(total, shapes):
    if len(shapes) == 1:
        return [total]
    parts, start = [], 0
    for shape in shapes:
        end = start + jax.ShapeDtypeStruct(shape, total.dtype).size
        parts.append(lax.slice_in_dim(total, start, end).reshape(shape))
        start = end
    return parts
