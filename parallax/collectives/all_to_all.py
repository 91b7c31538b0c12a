"""An all-to-all in which each block goes straight to its new device, in one message.

A table is a `Route`, a list of rounds {step: offsets}. In a round each device sends a message to
the device that is `step` places after it. The message holds the blocks for the devices that are
`offsets` places after the sender. Here `offsets` is `[step]`: only the receiver's own block.

`A[I_X, J]` is split along dim I over the n devices of axis X. `A[I, J_X]` is split along dim J.
"""

from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from parallax._typing import PyTree
from parallax.collectives import drop_in
from parallax.collectives.cost import devices, priced
from parallax.collectives.from_table import messages
from parallax.collectives.permute import send
from parallax.collectives.route import Route
from parallax.collectives.types import (
    AxisName,
    axis_index,
    axis_size,
    check_block,
    linear_collective,
)

Tree = TypeVar("Tree", bound=PyTree)


def straight(n: int) -> Route:
    """Returns the table in which each block goes straight to the device that owns it.

    Each hop has a different distance, so the hops cannot be a loop, and the program grows with n,
    the number of devices.
    """
    # (n,): the devices form a box of one dim, a row of n. {k: [k]} sends the block of the device
    # that is k places further on straight there. Each hop is a round of its own: one round of all
    # hops would need n - 1 links at a time.
    return Route((n,), [{k: [k]} for k in range(1, n)])


def _messages(size, n, itemsize):
    """Returns the rounds of messages of `all_to_all`, from which `cost` computes a call's cost.

    `n` is the number of devices, or a tuple with the number on each of several axes; `devices(n)`
    is the number of all devices. A message has 1/`devices(n)` of the `size` numbers of the array on
    one device, rounded up. `itemsize` is the bytes of a number.
    """
    return messages([straight(devices(n))], [-(-size // devices(n)) * itemsize])


# This is the all-to-all of the algorithm `ring`, so users call it as `ring.all_to_all`: that is its
# name in errors and reports. `cost` gets its rounds from `_messages`.
@priced(_messages, "ring.all_to_all")
def all_to_all(
    x: Tree, axis_name: AxisName, split_axis: int, concat_axis: int, *, tiled: bool = False
) -> Tree:
    """Sends block j of device i to device j: `A[I_X, J] -> A[I, J_X]`.

    `all_to_all` works like `lax.all_to_all`.

    In hop k device i sends the block that is meant for device i + k straight to that device. The
    transpose is the `all_to_all` that sends the blocks back.

    Args:
        x: arrays. The size of their dim `split_axis` is n, the number of devices; if `tiled`, it is
            a multiple of n.
        axis_name: the mesh axis, or several, in row-major order.
        split_axis: the dim that is distributed.
        concat_axis: the dim along which the received blocks are joined.
        tiled: keep both dims: `split_axis` becomes n times smaller, `concat_axis` n times larger.
            Otherwise `split_axis` is dropped, and a dim of size n is added at `concat_axis`.

    Raises:
        ValueError: the size of a leaf's dim `split_axis` is not n or, if `tiled`, not a multiple of
            n; or a leaf lacks one of the dims; or the code does not run inside a `shard_map` over
            `axis_name`.
    """

    def leaf(x):
        """Returns the result of the all-to-all for one array, `x`.

        `linear_collective` gives JAX the transpose, `backward`. JAX would otherwise transpose each
        message of `forward` separately.
        """
        # Typed as varying along the axis. An unreduced or reduced array is refused, as by `lax`.
        x = check_block("all_to_all", jnp.asarray(x), axis_name)
        split = drop_in.dim_of("split_axis", split_axis, x.ndim)
        concat = drop_in.dim_of("concat_axis", concat_axis, x.ndim)
        n = axis_size(axis_name)
        drop_in.check_divides("all_to_all", "split_axis", x.shape, split, n, tiled)

        def exchanged(x, split, concat):
            """Returns `x` with dim `split` scattered and the received blocks joined along
            `concat`."""
            blocks = _exchange(drop_in.split_blocks(x, split, axis_name, tiled), axis_name)
            return drop_in.merge_blocks(blocks, concat, tiled)

        def forward(x):
            return exchanged(x, split, concat)

        def backward(cotangent):
            # Each block returns to its sender: the two dims change roles.
            return exchanged(cotangent, concat, split)

        return linear_collective(x, axis_name, forward=forward, backward=backward)

    return jax.tree.map(leaf, x)


def _exchange(blocks, axis_name):
    """Returns the blocks received, in the order of their senders: `[n, *block] -> [n, *block]`."""
    route, me = straight(axis_size(axis_name)), axis_index(axis_name)
    # `received` starts as `blocks`: the own block is in its place, and the others are overwritten.
    received = blocks
    for sends in route.rounds:
        # `straight` sends one block per message, to its owner: `step` and `offset` are the same
        # point (k,), for the device that is k places further on.
        for step, (offset,) in sends.items():
            target = route.device_at(me, offset)
            message = lax.dynamic_index_in_dim(blocks, target, 0, keepdims=False)
            message = send(message, axis_name, route.pairs(step))
            # This device also receives a message. Its sender is `offset` places before this device,
            # at -`offset`. `device_at` takes no negative number, so `offset_after` computes
            # `home` - `offset`, that is 0 - `offset`, modulo n.
            source = route.device_at(me, route.offset_after(route.home, offset))
            received = lax.dynamic_update_index_in_dim(received, message, source, 0)
    return received
