"""Collectives on a ring: every byte moves by a `ppermute` to the next device, and each device does 1/n of the adding.

Each function takes what its `jax.lax` twin takes (a pytree, one axis or a tuple of axes, any dtype and shape) and returns the
same values with the same replication types and gradients, under `check_vma=True`. A tuple of axes is one ring through all of
its devices. Here n is the number of devices on the axis and S the bytes of the array on one device.

| function | bytes a device sends | hops | transpose |
|---|---|---|---|
| `reduce_scatter` | (n - 1)/n S | n - 1 | `all_gather` |
| `all_gather` | (n - 1) S | n - 1 | `reduce_scatter` |
| `all_reduce` | 2 (n - 1)/n S, S padded to a multiple of n elements | 2 (n - 1) | the cotangent as it is, free |
| `all_to_all` | (n - 1)/n S | n - 1 | `all_to_all` |

Source: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms (2009).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped

from parallax.collectives import drop_in
from parallax.collectives.drop_in import apart, send
from parallax.collectives.types import AxisName, index, size, varying, varying_axes
from parallax.typed import PyTree

Tree = TypeVar("Tree", bound=PyTree)


def all_to_all(x: Tree, axis_name: AxisName, split_axis: int, concat_axis: int, *, tiled: bool = False) -> Tree:
    """Block j of device i becomes block i of device j: `A[I_X, J] -> A[I, J_X]`. The twin of `lax.all_to_all`.

    In hop k each device sends the one block that device i + k wants straight there. Its transpose is the `all_to_all` back.

    Args:
        x: arrays whose dim `split_axis` has size n, or, `tiled`, a multiple of n.
        axis_name: the mesh axis, or several, in row-major order.
        split_axis: the dim that is dealt out.
        concat_axis: where the received blocks are put one after another.
        tiled: keep both dims (1/n and n times their size), instead of dropping the one and adding the other.

    Raises:
        ValueError: a leaf's `split_axis` has another size, or it has no such dim or no `concat_axis`; or the code does not run
            over `axis_name`.
    """

    def leaf(x):
        split, concat = drop_in.dim_of("split_axis", split_axis, x.ndim), drop_in.dim_of("concat_axis", concat_axis, x.ndim)
        drop_in.check_divides("all_to_all", "split_axis", x.shape, split, size(axis_name), tiled)
        return drop_in.moved(
            x,
            axis_name,
            forward=lambda x: drop_in.merge(_exchange(drop_in.split(x, split, axis_name, tiled), axis_name), concat, tiled),
            backward=lambda ct: drop_in.merge(_exchange(drop_in.split(ct, concat, axis_name, tiled), axis_name), split, tiled),
        )

    return jax.tree.map(lambda x: leaf(drop_in.block("all_to_all", jnp.asarray(x), axis_name)), x)


def send_next(x: Shaped[Array, "*dims"], axis_name: AxisName, *, distance: int = 1) -> Shaped[Array, "*dims"]:
    """Device i's `x` on device i + `distance`, round the ring: one hop of every collective here."""
    n = size(axis_name)
    return send(x, axis_name, [(i, (i + distance) % n) for i in range(n)])


def scatter_blocks(blocks: Shaped[Array, "n *block"], axis_name: AxisName) -> Shaped[Array, "*block"]:
    """The sum over devices of the block with the device's own index: `A[I] {U_X} -> A[I_X]`.

    The partial sum for block i starts at device i + 1 and gains one term a hop, so each link carries (n - 1)/n of the blocks in
    n - 1 hops. Its transpose is `gather_blocks`.
    """
    return together([summing(blocks, axis_name)], unrolled=drop_in.UNROLLED)[0]


def gather_blocks(block: Shaped[Array, "*block"], axis_name: AxisName, *, stay: bool = True) -> Shaped[Array, "n *block"]:
    """All devices' blocks, in their order: `A[I_X] -> A[I]`. Each travels once round the ring: n - 1 hops of one block.

    `stay` is set when no transpose follows. XLA's CPU backend writes messages where they belong only while no reshape follows,
    which it would fuse with the last write and copy the whole for. So the blocks are one flat array, and `apart` comes last.
    """
    (whole,) = gathered([(block, axis_name, 1)])
    return (apart(whole) if stay else whole).reshape(size(axis_name), *block.shape)


def gathered(blocks: Sequence[tuple[Shaped[Array, "..."], AxisName, int]]) -> list[Shaped[Array, "..."]]:
    """Of each (block, axis, direction) all devices' blocks as one flat array: their hops side by side."""
    return [whole for _, whole in together([filling(*each) for each in blocks], unrolled=drop_in.UNROLLED)]


class Hops(NamedTuple):
    """A walk round a ring.

    Attributes:
        n: devices on it: the walk takes n - 1 hops.
        first: what a device begins with.
        hop: what hop h = 1 .. n - 1 makes of what the one before left: `(h, carry) -> carry`.
    """

    n: int
    first: Any
    hop: Callable[[Any, Any], Any]


def summing(blocks: Shaped[Array, "n *block"], axis_name: AxisName, direction: int = 1) -> Hops:
    """The partial sum for block i starts at device i + `direction` and gains one term a hop, until it is home."""
    n, me = size(axis_name), index(axis_name)

    def hop(h, partial):
        return send_next(partial, axis_name, distance=direction) + _block(blocks, (me - (1 + h) * direction) % n)

    return Hops(n, _block(blocks, (me - direction) % n), hop)


def filling(block: Shaped[Array, "*block"], axis_name: AxisName, direction: int = 1) -> Hops:
    """Each block goes round, and every device keeps a copy: (the block that came last, all so far as one flat array)."""
    n, me = size(axis_name), index(axis_name)
    long = n * block.size >= 2**31  # then its numbers cannot be counted in int32, and its rows can
    message = block.reshape((1, -1) if long else -1)

    def keep(blocks, message, owner):
        return lax.dynamic_update_slice(blocks, message, (owner, 0) if long else (owner * block.size,))

    def hop(h, carry):
        message = send_next(carry[0], axis_name, distance=direction)
        return message, keep(carry[1], message, (me - h * direction) % n)

    blocks = varying(jnp.zeros((n, block.size) if long else n * block.size, block.dtype), varying_axes(block))
    return Hops(n, (message, keep(blocks, message, me)), hop)


def together(walks: Sequence[Hops], *, unrolled: int = 1) -> list:
    """What each of the walks ends with, hop h of all of them side by side; the longer go on alone.

    Up to `unrolled` devices the hops are written out; beyond, they are loops.
    """
    carries, start = [walk.first for walk in walks], 1
    for n in sorted({walk.n for walk in walks}):

        def hops(h, carries, n=n):
            return [walk.hop(h, carry) if walk.n >= n else carry for walk, carry in zip(walks, carries, strict=True)]

        if n > unrolled:
            carries = lax.fori_loop(start, n, hops, carries)
        else:
            for h in range(start, n):
                carries = hops(h, carries)
        start = n
    return carries


def _exchange(blocks, axis_name):
    """`[n, *block] -> [n, *block]`: block j goes to device j; what comes from device j is put at j."""
    n, me = size(axis_name), index(axis_name)
    received = blocks
    for k in range(1, n):
        message = send_next(_block(blocks, (me + k) % n), axis_name, distance=k)
        received = lax.dynamic_update_index_in_dim(received, message, (me - k) % n, 0)
    return received


def _block(blocks, index):
    return lax.dynamic_index_in_dim(blocks, index, 0, keepdims=False)


ring = drop_in.mover(
    "ring", scatter_blocks, gather_blocks, gather_inside=functools.partial(gather_blocks, stay=False), all_to_all=all_to_all
)
