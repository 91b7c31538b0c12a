"""Recursive halving and doubling: the bytes of a ring in ceil(log2 n) hops, for any number of devices.

In every hop of the reduce-scatter a device sends away half of the blocks that it still has partial sums of; the all-gather is
the same walk backwards. Where Thakur et al. exchange with device i ^ 2^k, which needs a power of two, device i here sends to
i + s and hears from i - s, with s = ceil(n/2), ceil(n/4) .. 1: no device is folded into another, and no byte is sent twice.
Drop-in twins of `jax.lax`'s collectives, as `ring`'s. n devices, S the bytes of the array on one device:

| function | bytes a device sends | hops | transpose |
|---|---|---|---|
| `reduce_scatter` | (n - 1)/n S | ceil(log2 n) | `all_gather` |
| `all_gather` | (n - 1) S | ceil(log2 n) | `reduce_scatter` |
| `all_reduce` | 2 (n - 1)/n S, S padded to a multiple of n elements | 2 ceil(log2 n) | the cotangent as it is, free |

A hop between devices s apart loads s links of a bare ring; it is one link on a switch, a tree or a hypercube. A device turns its
blocks once, so that its own comes first, and back at the end: 2 S more bytes copied in its memory.

Sources: Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in MPICH (2005); Bruck et al.,
Efficient algorithms for all-to-all communications in multiport message-passing systems (1997); Träff, Optimal, non-pipelined
reduce-scatter and allreduce algorithms (2024).
"""

import itertools
from typing import TypeVar

import jax.numpy as jnp
from jaxtyping import Array, Shaped

from parallax.collectives import drop_in, rings, types
from parallax.collectives.types import AxisName
from parallax.typed import PyTree

Tree = TypeVar("Tree", bound=PyTree)


def scatter_blocks(blocks: Shaped[Array, "n *block"], axis_name: AxisName) -> Shaped[Array, "*block"]:
    """The sum over devices of the block with the device's own index."""
    partial = jnp.roll(blocks, -types.index(axis_name), axis=0)  # partial[j] belongs j devices further on
    for far, near in _distances(len(blocks)):
        received = rings.send_next(partial[near:far], axis_name, distance=near)
        partial = jnp.concatenate([partial[: far - near] + received, partial[far - near : near]])
    return partial[0]


def gather_blocks(block: Shaped[Array, "*block"], axis_name: AxisName) -> Shaped[Array, "n *block"]:
    """All devices' blocks, in their order."""
    blocks = block[None]  # blocks[j] is from j devices further on
    for far, near in reversed(_distances(types.size(axis_name))):
        received = rings.send_next(blocks[: far - near], axis_name, distance=-near)
        blocks = jnp.concatenate([blocks, received])
    return drop_in.apart(jnp.roll(blocks, types.index(axis_name), axis=0))


def _distances(n: int) -> list[tuple[int, int]]:
    """For each hop of the halving (how many blocks a device has, how many it keeps): 7 -> (7, 4), (4, 2), (2, 1)."""
    kept = [n]
    while kept[-1] > 1:
        kept.append(-(-kept[-1] // 2))
    return list(itertools.pairwise(kept))


halving = drop_in.mover("halving", scatter_blocks, gather_blocks)
