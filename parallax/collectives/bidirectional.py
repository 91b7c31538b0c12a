"""Two rings in opposite directions at once: each carries half of every block, so each direction of a link half the bytes.

Links are full duplex, and a ring uses one direction of each. Drop-in twins of `jax.lax`'s collectives, as `ring`'s.
n devices, S the bytes of the array on one device:

| function | bytes a device sends, half of them each way | hops (of two messages) | transpose |
|---|---|---|---|
| `reduce_scatter` | (n - 1)/n S | n - 1 | `all_gather` |
| `all_gather` | (n - 1) S | n - 1 | `reduce_scatter` |
| `all_reduce` | 2 (n - 1)/n S, S padded to a multiple of n elements | 2 (n - 1) | the cotangent as it is, free |

A block of an odd number of elements gives one more to the ring that goes forward: it sends ceil(block/2) elements a hop,
the other floor(block/2).

Source: Chan, Heimlich, Purkayastha and van de Geijn, Collective communication: theory, practice, and experience (2007).
"""

import math
from typing import TypeVar

import jax.numpy as jnp
from jaxtyping import Array, PyTree, Shaped

from parallax.collectives import ring, twins
from parallax.collectives.replicated import AxisName

Tree = TypeVar("Tree", bound=PyTree)


def reduce_scatter(x: Tree, axis_name: AxisName, *, scatter_dimension: int = 0, tiled: bool = False) -> Tree:
    """Sum over devices; device i keeps block i: `A[I] {U_X} -> A[I_X]`. The twin of `lax.psum_scatter`.

    n - 1 hops, in each of which a device sends half of a block to either neighbour: (n - 1)/(2n) of `x` over each direction of
    each link. Its transpose is `all_gather`. Arguments and errors as in `ring.reduce_scatter`.
    """
    pair = {"scatter_blocks": scatter_blocks, "gather_blocks": gather_blocks}
    return twins.reduce_scatter(x, axis_name, scatter_dimension, tiled, **pair)


def all_gather(x: Tree, axis_name: AxisName, *, axis: int = 0, tiled: bool = False) -> Tree:
    """Every device's block on every device: `A[I_X] -> A[I]`, typed as varying. The twin of `lax.all_gather`.

    The halves of each block go round in opposite directions: n - 1 hops of half a block each way. Its transpose is
    `reduce_scatter`. Arguments and errors as in `ring.all_gather`.
    """
    pair = {"scatter_blocks": scatter_blocks, "gather_blocks": gather_blocks}
    return twins.all_gather(x, axis_name, axis, tiled, **pair)


def all_reduce(x: Tree, axis_name: AxisName) -> Tree:
    """The sum over devices, on every device, the same bits: `A {U_X} -> A`. The twin of `lax.psum`.

    A reduce-scatter and an all-gather of the flattened leaf, zero-padded to a multiple of n elements: (n - 1)/n of its bytes over
    each direction of each link, in 2 (n - 1) hops. Its transpose costs nothing. Errors as in `ring.all_reduce`.
    """
    return twins.all_reduce(x, axis_name, twins.in_blocks(axis_name, scatter_blocks, gather_blocks))


def scatter_blocks(blocks: Shaped[Array, "n *block"], axis_name: AxisName) -> Shaped[Array, "*block"]:
    """The sum over devices of the block with the device's own index."""
    block = blocks.shape[1:]
    walks = [ring.summing(half, axis_name, way) for half, way in _halves(blocks.reshape(len(blocks), math.prod(block)))]
    return jnp.concatenate(ring.together(walks, unrolled=twins.UNROLLED)).reshape(block)


def gather_blocks(block: Shaped[Array, "*block"], axis_name: AxisName) -> Shaped[Array, "n *block"]:
    """All devices' blocks, in their order."""
    halves = ring.gathered([(half, axis_name, way) for half, way in _halves(block.reshape(-1))])
    n = twins.size(axis_name)
    return ring.apart(jnp.concatenate([half.reshape(n, half.size // n) for half in halves], axis=-1)).reshape(n, *block.shape)


def _halves(x):
    """The last dim in two, each with the direction in which it travels."""
    first, second = jnp.array_split(x, 2, axis=-1)
    return (first, 1), (second, -1)
