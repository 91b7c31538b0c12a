"""How an activation, or a cotangent, goes from one stage to the next: whole, or in parts by the devices that all have it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jaxtyping import Array

from parallax.collectives import Axis, AxisLike
from parallax.collectives.types import replicated, varying_axes
from parallax.grads import axes_of
from parallax.typed import PyTree
from parallax.zero import Split, share


class Exchange(NamedTuple):
    """What a device sends of a tree of arrays, and how the receiver makes the tree of it again.

    Attributes:
        part: of the tree, what this device sends.
        whole: `(parts, like) -> tree`: of what came, the tree of the shapes and replication types of `like`.
    """

    part: Callable[[PyTree], PyTree]
    whole: Callable[[PyTree, PyTree], PyTree]


whole = Exchange(lambda x: x, lambda x, like: x)


def split_over(axis: AxisLike) -> Exchange:
    """Each of the t devices of `axis`, which all have the activation, sends 1/t of it; the receiver gathers over `axis`.

    Between stages on different machines 1/t of the bytes travel, and (t - 1)/t inside each. Each array is cut along the largest
    of its dims that t divides. One without such a dim goes whole, and so does one that differs along the axis already, as with
    sequence parallelism, where each device has its own tokens.

    Source: Narayanan et al., Efficient large-scale language model training on GPU clusters (arXiv 2104.04473), section 4.1.
    """
    axis = Axis.of(axis)
    part = lambda x: jax.tree.map(lambda leaf: share(leaf, _cut(leaf, axis)), x)

    def whole(parts, like):
        return jax.tree.map(lambda leaf, wanted: _gathered(leaf, _cut(wanted, axis)), parts, like)

    return Exchange(part, whole)


def _cut(x: Array, axis: Axis) -> list[Split]:
    """The dim along which an array is cut, if any is."""
    t, names = axis.size(), axes_of(axis)
    fits = [] if t == 1 or set(names) & set(varying_axes(x)) else [dim for dim in range(x.ndim) if x.shape[dim] % t == 0]
    return [Split(max(fits, key=lambda dim: x.shape[dim]), axis)] if fits else []


def _gathered(x: Any, splits: list[Split]) -> Any:
    for dim, axis in splits:
        x = replicated(axis.all_gather(x, axis=dim, tiled=True), axis.names)
    return x
