"""An all-to-all of messages that go straight to their device, hop by hop."""

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
    """Every block straight to its device: no message waits for another.

    Each hop is another permutation, so it is no chain, and its program grows with n.
    """
    return Route((n,), [{k: [k]} for k in range(1, n)])


def _messages(size, n, itemsize):
    return messages([straight(devices(n))], [-(-size // devices(n)) * itemsize])


@priced(_messages, "ring.all_to_all")
def all_to_all(
    x: Tree, axis_name: AxisName, split_axis: int, concat_axis: int, *, tiled: bool = False
) -> Tree:
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
        split, concat = (
            drop_in.dim_of("split_axis", split_axis, x.ndim),
            drop_in.dim_of("concat_axis", concat_axis, x.ndim),
        )
        drop_in.check_divides(
            "all_to_all", "split_axis", x.shape, split, axis_size(axis_name), tiled
        )
        return linear_collective(
            x,
            axis_name,
            forward=lambda x: drop_in.merge(
                _exchange(drop_in.split(x, split, axis_name, tiled), axis_name), concat, tiled
            ),
            backward=lambda ct: drop_in.merge(
                _exchange(drop_in.split(ct, concat, axis_name, tiled), axis_name), split, tiled
            ),
        )

    return jax.tree.map(lambda x: leaf(check_block("all_to_all", jnp.asarray(x), axis_name)), x)


def _exchange(blocks, axis_name):
    """`[n, *block] -> [n, *block]`: block j goes to device j; what comes from device j is put at j."""
    route, me = straight(axis_size(axis_name)), axis_index(axis_name)
    received = blocks
    for sends in route.rounds:
        for step, (offset,) in sends.items():
            message = lax.dynamic_index_in_dim(
                blocks, route.device_at(me, offset), 0, keepdims=False
            )
            message = send(message, axis_name, route.pairs(step))
            received = lax.dynamic_update_index_in_dim(
                received, message, route.device_at(me, route.offset_after(route.home, offset)), 0
            )
    return received
