"""Many leaves in few messages: small arrays are packed into long ones, reduced, and unpacked.

A message takes at least the latency of the link, whatever the size of the message. Most leaves of a
model (biases, norms) are far smaller than the data that a link carries during one latency. Packing
copies each packed leaf twice (into a bucket and out of it), and on a TPU changes how the leaf is
stored. Large leaves would gain nothing, so they are sent as they are: a leaf that is alone in its
bucket is not copied.

Source: Li et al., PyTorch Distributed: experiences on accelerating data parallel training (arXiv
2006.15704), section 3.2.3.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped

from parallax.collectives.axis import Axis, AxisLike
from parallax.collectives.cpu import sequence_after
from parallax.collectives.types import reduction_state, varying, varying_axes

# A ring of 8 devices sends 128 kB of a bucket of this size per hop. That takes 3 us at 45 GB/s, and
# the latency of a hop is 1 us.
NBYTES = 2**20


def bucketed(axis: AxisLike, *, nbytes: int = NBYTES) -> Axis:
    """Returns `axis` with an `all_reduce` that reduces each bucket of leaves as one array.

    ```python
    grads.averaged(grad, bucketed(ring("data")))
    ```

    The values equal those of an `all_reduce` of each leaf, if the algorithm rounds the sum of an
    element in the same way wherever the element is in an array. Types and gradients are the same
    too. The leaves of a bucket have the same dtype and vary along the same axes. They are in the
    order of the tree, and have at most `nbytes` bytes together. A leaf that JAX types as
    `unreduced` or `reduced` along an axis has its own bucket, and so has a leaf of `nbytes` or
    more. While the leaves are copied into a bucket, the bucket is padded to a multiple of the
    number of devices. Otherwise a ring would copy the bucket once more to pad it. The int8
    algorithm `quantized` rounds a block of neighbouring numbers by one scale, and in a bucket a
    block may hold numbers of two leaves. So reduce a loss apart from the gradients: the magnitude
    of the loss would spoil the accuracy of the gradients.

    Args:
        axis: the axis, or its name. All collectives but `all_reduce` stay as they are.
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
        """Returns the sum over devices of each leaf of the tree `x`, bucket by bucket."""
        leaves, structure = jax.tree.flatten(x)
        leaves = [jnp.asarray(leaf) for leaf in leaves]
        done: list[jax.Array] = []
        for bucket in assign_buckets(leaves, nbytes):
            parts = [leaves[i] for i in bucket]
            if len(parts) > 1:
                # On a CPU a bucket waits for `done`, the reduced leaves of the bucket before it, so
                # that at most one packed copy is in memory at a time. Elsewhere no bucket waits:
                # the order of the buckets is left to XLA.
                parts = [_packed(sequence_after(parts, done), axis_name)]
            # `parts` has one array by now: the packed bucket, or its only leaf.
            (total,) = algorithm.all_reduce(parts, axis_name)
            done = _unpacked(total, [leaves[i].shape for i in bucket])
            for i, reduced_leaf in zip(bucket, done, strict=True):
                leaves[i] = reduced_leaf
        return jax.tree.unflatten(structure, leaves)

    name = f"bucketed {algorithm}"
    return Axis(axis.names, dataclasses.replace(algorithm, name=name, all_reduce=all_reduce))


def assign_buckets(leaves: Sequence[Shaped[Array, "..."]], nbytes: int) -> list[list[int]]:
    """Returns the buckets, each a list of the indices of its leaves.

    A bucket has one leaf, or several leaves that have at most `nbytes` bytes together. All leaves
    of a bucket have the same dtype and vary along the same axes. A leaf that JAX types as
    `unreduced` or `reduced` along an axis is alone in its bucket: JAX does not join such arrays.
    """
    # open_buckets: for each kind of leaf, the bucket that is being filled, and its bytes.
    buckets, open_buckets = [], {}
    for i, leaf in enumerate(leaves):
        # The index makes the kind unique, so that no other leaf joins this one.
        kind = (leaf.dtype, varying_axes(leaf), i if reduction_state(leaf) else None)
        size = leaf.size * leaf.dtype.itemsize
        if size >= nbytes:
            # The open bucket stays open: the leaves before and after this one may share it.
            buckets.append([i])
            continue
        bucket, filled = open_buckets.get(kind, (None, 0))
        if bucket is None or filled + size > nbytes:
            bucket, filled = [], 0
            buckets.append(bucket)
        bucket.append(i)
        open_buckets[kind] = bucket, filled + size
    return buckets


def _packed(leaves, axis_name):
    """Returns the leaves joined into one vector, padded to a multiple of the number of
    devices.

    All leaves have the same dtype and vary along the same axes. Without the padding, a ring would
    copy the whole vector once more to pad it.
    """
    missing = -sum(leaf.size for leaf in leaves) % lax.axis_size(axis_name)
    # Typed as the leaves are: JAX joins only arrays that vary along the same axes.
    padding = varying(jnp.zeros(missing, leaves[0].dtype), varying_axes(leaves[0]))
    return jnp.concatenate([*(leaf.reshape(-1) for leaf in leaves), padding])


def _unpacked(total, shapes):
    """Returns the leaves of a reduced bucket, in these shapes: the inverse of `_packed`."""
    # The only leaf of a bucket was sent in its own shape, not as a vector.
    if len(shapes) == 1:
        return [total]
    parts, start = [], 0
    for shape in shapes:
        end = start + math.prod(shape)
        parts.append(lax.slice_in_dim(total, start, end).reshape(shape))
        start = end
    return parts
