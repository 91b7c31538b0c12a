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
from jaxtyping import Array, Shaped

from parallax.collectives import drop_in, rings, types
from parallax.collectives.types import AxisName
from parallax.typed import PyTree

Tree = TypeVar("Tree", bound=PyTree)


def scatter_blocks(blocks: Shaped[Array, "n *block"], axis_name: AxisName) -> Shaped[Array, "*block"]:
    """The sum over devices of the block with the device's own index."""
    block = blocks.shape[1:]
    walks = [rings.summing(half, axis_name, way) for half, way in _halves(blocks.reshape(len(blocks), math.prod(block)))]
    return jnp.concatenate(rings.together(walks, unrolled=drop_in.UNROLLED)).reshape(block)


def gather_blocks(block: Shaped[Array, "*block"], axis_name: AxisName) -> Shaped[Array, "n *block"]:
    """All devices' blocks, in their order."""
    halves = rings.gathered([(half, axis_name, way) for half, way in _halves(block.reshape(-1))])
    n = types.size(axis_name)
    return drop_in.apart(jnp.concatenate([half.reshape(n, half.size // n) for half in halves], axis=-1)).reshape(n, *block.shape)


def _halves(x):
    """The last dim in two, each with the direction in which it travels."""
    first, second = jnp.array_split(x, 2, axis=-1)
    return (first, 1), (second, -1)


two_rings = drop_in.mover("two_rings", scatter_blocks, gather_blocks)
