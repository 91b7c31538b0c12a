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
from typing import TypeVar

import jax.numpy as jnp
from jaxtyping import Array, PyTree, Shaped

from parallax.collectives import ring, twins
from parallax.collectives.replicated import AxisName, axes

Tree = TypeVar("Tree", bound=PyTree)


def reduce_scatter(x: Tree, axis_name: AxisName, *, scatter_dimension: int = 0, tiled: bool = False) -> Tree:
    """Sum over devices; device (i, j) keeps its block: `A[I] {U_XY} -> A[I_XY]`. The twin of `lax.psum_scatter`.

    On two axes of a and b devices each link of axis a carries (a - 1)/(a b) of a half of `x` as the second axis in turn, and
    (a - 1)/a of the other half as the first; axis b likewise. Its transpose is `all_gather`. Arguments and errors as in
    `ring.reduce_scatter`.
    """
    pair = {"scatter_blocks": scatter_blocks, "gather_blocks": gather_blocks}
    return twins.reduce_scatter(x, axis_name, scatter_dimension, tiled, **pair)


def all_gather(x: Tree, axis_name: AxisName, *, axis: int = 0, tiled: bool = False) -> Tree:
    """Every device's block on every device: `A[I_XY] -> A[I]`, typed as varying. The twin of `lax.all_gather`.

    The walk of `reduce_scatter` backwards, which is its transpose. Arguments and errors as in `ring.all_gather`.
    """
    pair = {"scatter_blocks": scatter_blocks, "gather_blocks": gather_blocks}
    return twins.all_gather(x, axis_name, axis, tiled, **pair)


def all_reduce(x: Tree, axis_name: AxisName) -> Tree:
    """The sum over devices, on every device, the same bits: `A {U_XY} -> A`. The twin of `lax.psum`.

    Over (a, b): half of the flattened leaf, zero-padded to a multiple of n elements, is reduce-scattered over a, then b, and
    all-gathered over b, then a; the other half meanwhile over b, a, a, b. Its transpose costs nothing.
    Errors as in `ring.all_reduce`.
    """
    return twins.all_reduce(x, axis_name, twins.in_blocks(axis_name, scatter_blocks, gather_blocks))


def hierarchical_all_reduce(x: Tree, axis_name: AxisName, *, all_reduce: Callable = ring.all_reduce) -> Tree:
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
    reduced = lambda blocks, fast: all_reduce(ring.scatter_blocks(blocks, fast), slow)
    return twins.all_reduce(x, axis_name, twins.in_blocks(fast, reduced, ring.gather_blocks))


def scatter_blocks(blocks: Shaped[Array, "n *block"], axis_name: AxisName) -> Shaped[Array, "*block"]:
    """The sum over devices of the block with the device's own index, in row-major order of the axes."""
    names, block = axes(axis_name), blocks.shape[1:]
    parts = _parts(blocks.reshape(*map(twins.size, names), math.prod(block)), len(names))
    for turn in range(len(names)):  # part k has dims for the axes that it has yet to go through, and one of elements
        walks = []
        for k, part in enumerate(parts):
            to_go = _order(names, k)[turn:]
            walks.append(ring.summing(jnp.moveaxis(part, sorted(to_go).index(to_go[0]), 0), names[to_go[0]]))
        parts = ring.together(walks, unrolled=twins.UNROLLED)
    return jnp.concatenate(parts).reshape(block)


def gather_blocks(block: Shaped[Array, "*block"], axis_name: AxisName) -> Shaped[Array, "n *block"]:
    """All devices' blocks, in row-major order of the axes."""
    names = axes(axis_name)
    parts = _parts(block.reshape(-1), len(names))
    for turn in reversed(range(len(names))):
        block_shapes = [part.shape for part in parts]
        brought = ring.gathered([(part, names[_order(names, k)[turn]], 1) for k, part in enumerate(parts)])
        parts = []
        for k, part in enumerate(brought):
            gone = _order(names, k)[turn:]
            parts.append(jnp.moveaxis(part.reshape(twins.size(names[gone[0]]), *block_shapes[k]), 0, sorted(gone).index(gone[0])))
    return ring.apart(jnp.concatenate(parts, axis=-1)).reshape(twins.size(axis_name), *block.shape)


def _parts(x, count: int) -> list:
    return jnp.array_split(x, max(count, 1), axis=-1)


def _order(names: tuple, k: int) -> list[int]:
    """The axes, by number, in the order in which part k goes through them."""
    return [(k + turn) % len(names) for turn in range(len(names))]
