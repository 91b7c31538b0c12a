"""All-reduce over several mesh axes at once: every axis of a torus carries its share at the same time.

A reduce-scatter over axis a and then over axis b leaves a device with 1/(a b) of the sum; but while one axis works the others
idle. So each block is cut into as many parts as there are axes, and part k goes through the axes from the k-th on, round to the
one before it: two halves in opposite order on two axes, three thirds on three. Drop-in twins of `jax.lax`'s collectives over a
tuple of axes, numbered in row-major order, as `ring`'s. Axes of a, b .. devices, k of them, n = a b .. together; S the bytes of
the array on one device; s devices on a slow axis and f on a fast one:

| function | bytes a device sends | hops | transpose |
|---|---|---|---|
| `reduce_scatter` | (n - 1)/n S | k (max(a, b ..) - 1) | `all_gather` |
| `all_gather` | (n - 1) S | k (max(a, b ..) - 1) | `reduce_scatter` |
| `all_reduce` | 2 (n - 1)/n S, S padded to a multiple of n elements | 2 k (max(a, b ..) - 1) | the cotangent as it is, free |
| `hierarchical_all_reduce` | fast: 2 (f - 1)/f S; slow: 2 (s - 1)/s S/f | 2 (f - 1) + 2 (s - 1) | free as well |

The hops of a turn are messages of k parts side by side, one on each axis.

Sources: Jain and Sabharwal, Optimal bucket algorithms for large MPI collectives on torus interconnects (2010); Mikami et al.,
Massively distributed SGD: ImageNet/ResNet-50 training in a flash (2018), for two axes.
"""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax.numpy as jnp
from jaxtyping import Array, Shaped

from parallax.collectives import drop_in, rings, types
from parallax.collectives.axis import Mover, refused
from parallax.collectives.types import AxisName, axes
from parallax.typed import PyTree

Tree = TypeVar("Tree", bound=PyTree)


def hierarchical_all_reduce(x: Tree, axis_name: AxisName, *, all_reduce: Callable[..., Any] = rings.ring.all_reduce) -> Tree:
    """The sum over both axes, on every device, the same bits: `A {U_XY} -> A`. The twin of `lax.psum` for (slow, fast).

    A reduce-scatter over the fast axis of f devices, an all-reduce over the slow axis, an all-gather over the fast: the slow
    links carry 1/f of the array. The flattened leaf is zero-padded to a multiple of f elements, and each of those f blocks for
    the slow axis as its all-reduce does. Its transpose costs nothing.

    Args:
        x: arrays of any shape.
        axis_name: the slow axis (between machines) and the fast one (within a machine).
        all_reduce: of the slow axis: `doubling.all_reduce` has fewer hops.

    Raises:
        ValueError: `axis_name` is not a tuple of two names.
    """
    if len(axes(axis_name)) != 2:
        raise ValueError(
            f"hierarchical_all_reduce needs two mesh axes, (slow, fast); got {axis_name!r}. Use ring.all_reduce for one axis."
        )
    slow, fast = axis_name
    reduced = lambda blocks, fast: all_reduce(rings.scatter_blocks(blocks, fast), slow)
    return drop_in.all_reduce(x, axis_name, drop_in.in_blocks(fast, reduced, rings.gather_blocks))


def scatter_blocks(blocks: Shaped[Array, "n *block"], axis_name: AxisName) -> Shaped[Array, "*block"]:
    """The sum over devices of the block with the device's own index, in row-major order of the axes."""
    names, block = axes(axis_name), blocks.shape[1:]
    parts = _parts(blocks.reshape(*map(types.size, names), math.prod(block)), len(names))
    for turn in range(len(names)):  # part k has dims for the axes that it has yet to go through, and one of elements
        walks = []
        for k, part in enumerate(parts):
            to_go = _order(names, k)[turn:]
            walks.append(rings.summing(jnp.moveaxis(part, sorted(to_go).index(to_go[0]), 0), names[to_go[0]]))
        parts = rings.together(walks, unrolled=drop_in.UNROLLED)
    return jnp.concatenate(parts).reshape(block)


def gather_blocks(block: Shaped[Array, "*block"], axis_name: AxisName) -> Shaped[Array, "n *block"]:
    """All devices' blocks, in row-major order of the axes."""
    names = axes(axis_name)
    parts = _parts(block.reshape(-1), len(names))
    for turn in reversed(range(len(names))):
        block_shapes = [part.shape for part in parts]
        brought = rings.gathered([(part, names[_order(names, k)[turn]], 1) for k, part in enumerate(parts)])
        parts = []
        for k, part in enumerate(brought):
            gone = _order(names, k)[turn:]
            parts.append(jnp.moveaxis(part.reshape(types.size(names[gone[0]]), *block_shapes[k]), 0, sorted(gone).index(gone[0])))
    return drop_in.apart(jnp.concatenate(parts, axis=-1)).reshape(types.size(axis_name), *block.shape)


def _parts(x, count: int) -> list:
    return jnp.array_split(x, max(count, 1), axis=-1)


def _order(names: tuple, k: int) -> list[int]:
    """The axes, by number, in the order in which part k goes through them."""
    return [(k + turn) % len(names) for turn in range(len(names))]


torus = drop_in.mover("torus", scatter_blocks, gather_blocks)
hierarchical = Mover(
    "hierarchical",
    hierarchical_all_reduce,
    reduce_scatter=refused("hierarchical", "reduce_scatter", "torus"),
    all_gather=refused("hierarchical", "all_gather", "torus"),
)
