"""How an activation, or a cotangent, goes from one stage to the next.

With `whole`, each device sends the whole array. With `split_over`, the t devices of another mesh
axis, such as a tensor axis, all have the same array, and each of them sends 1/t of the array.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
from jax import lax
from jaxtyping import Array

from parallax._typing import PyTree
from parallax.collectives import Axis, AxisLike
from parallax.collectives.types import replicated, varying_axes
from parallax.grads.axes import axes_of


class Exchange(NamedTuple):
    """A way to send a tree of arrays.

    Attributes:
        part: `tree -> parts`: returns the arrays that this device sends.
        whole: `(parts, like) -> tree`: rebuilds, from the received parts, the tree that was sent.
            `like` has the shapes and types of that tree; the types say along which axes an array
            varies.
    """

    part: Callable[[PyTree], PyTree]
    whole: Callable[[PyTree, PyTree], PyTree]


# Every device sends its whole tree.
whole = Exchange(lambda x: x, lambda x, like: x)


def split_over(axis: AxisLike) -> Exchange:
    """Returns the `Exchange` for an activation that all t devices of `axis` have: each of them
    sends 1/t of the activation, and the receivers gather the parts over `axis`.

    If each stage is on a machine of its own, the machines exchange 1/t of the bytes that they would
    exchange with `whole`. The gather moves (t - 1)/t of an array to each device, inside a machine.
    Each array is cut along the largest of its dims that t divides. An array without such a dim is
    sent whole. An array that already differs along the axis is sent whole too: with sequence
    parallelism, for example, each device has its own tokens.

    Source: Narayanan et al., Efficient large-scale language model training on GPU clusters (arXiv
    2104.04473), section 4.1.
    """
    axis = Axis.of(axis)

    def part_of(leaf):
        """Returns this device's part of an array: 1/t of the array, for the t devices of `axis`,
        cut along the dim that `_cut_dim` returns. If `_cut_dim` returns None, returns the whole
        array."""
        dim = _cut_dim(leaf, axis)
        if dim is None:
            return leaf
        # The t devices send different parts, so together they send the array once.
        length = leaf.shape[dim] // axis.size()
        return lax.dynamic_slice_in_dim(leaf, axis.index() * length, length, dim)

    def gathered(leaf, wanted):
        """Returns the whole array: gathers the parts that the devices of `axis` received, of which
        `leaf` is this device's part. An array that was not cut is returned as it is. `wanted` has
        the whole array's shape and type."""
        dim = _cut_dim(wanted, axis)
        if dim is None:
            return leaf
        # JAX types a gather's result as varying; here it is the same on all devices of the axis.
        return replicated(axis.all_gather(leaf, axis=dim, tiled=True), axis.names)

    def parts(x):
        return jax.tree.map(part_of, x)

    return Exchange(parts, lambda parts, like: jax.tree.map(gathered, parts, like))


def _cut_dim(x: Array, axis: Axis) -> int | None:
    """Returns the dim along which an array is cut: the largest dim that the number of devices of
    the axis divides. (Any dim that this number divides would do, as long as the sender and the
    receiver choose the same.) Returns None if the array is sent whole."""
    t = axis.size()
    # If the array may differ along the axis, no other device can send a part of this device's
    # array.
    if t == 1 or set(axes_of(axis)) & set(varying_axes(x)):
        return None
    # A dim that t does not divide would give the devices parts of unequal shapes.
    dims = [dim for dim in range(x.ndim) if x.shape[dim] % t == 0]
    return max(dims, key=lambda dim: x.shape[dim], default=None)
