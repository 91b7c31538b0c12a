"""From hops to drop-in twins of `jax.lax`'s collectives: what every algorithm here shares.

An algorithm is a pair of functions on blocks, each the transpose of the other:

    scatter_blocks(blocks: [n, *block], axis_name) -> [*block]     the sum over devices of the block with the device's own index
    gather_blocks(block: [*block], axis_name) -> [n, *block]       every device's block, in their order

The three functions below make of such a pair what `lax.psum_scatter`, `lax.all_gather` and `lax.psum` are, for pytrees, any dim,
any dtype and any size, with their replication types and gradients.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, PyTree, Shaped

from parallax.collectives.replicated import AxisName, axes, linear, ordered, replicated, size, varying

Tree = TypeVar("Tree", bound=PyTree)

# Devices up to which a ring's hops are written out; a longer ring is a loop, whose compile time does not grow with n. On CPU
# devices what is written out is safe beside anything; of a loop XLA may let the next collective go ahead (`hlo.unordered`).
UNROLLED = 8


def reduce_scatter(
    x: Tree, axis_name: AxisName, scatter_dimension: int, tiled: bool, *, scatter_blocks: Callable, gather_blocks: Callable
) -> Tree:
    """Sum over devices; device i keeps block i, by `scatter_blocks`. Its transpose is `gather_blocks`.

    Arguments and errors as in `ring.reduce_scatter`.
    """

    def leaf(x):
        if not axes(axis_name):  # there `lax` drops no dim
            return x
        dim = dim_of("scatter_dimension", scatter_dimension, x.ndim)
        check_divides("reduce_scatter", "scatter_dimension", x.shape, dim, size(axis_name), tiled)
        return linear(
            x,
            forward=lambda x: scatter_blocks(split(x, dim, axis_name, tiled), axis_name),
            backward=lambda ct: merge(gather_blocks(computed_once(ct), axis_name), dim, tiled),
        )

    return in_turn(lambda x: leaf(varying(summable(x), axis_name)), x, axis_name)


def all_gather(
    x: Tree, axis_name: AxisName, axis: int, tiled: bool, *, scatter_blocks: Callable, gather_blocks: Callable
) -> Tree:
    """Every device's block on every device, typed as varying, by `gather_blocks`. Its transpose is `scatter_blocks`.

    Arguments and errors as in `ring.all_gather`.
    """

    def leaf(x):
        if not axes(axis_name):  # there `lax` adds no dim
            return x
        dim = dim_of("axis", axis, x.ndim + (not tiled))
        return linear(
            x,
            forward=lambda x: merge(gather_blocks(computed_once(x), axis_name), dim, tiled),
            backward=lambda ct: scatter_blocks(split(ct, dim, axis_name, tiled), axis_name),
        )

    return in_turn(lambda x: leaf(varying(jnp.asarray(x), axis_name)), x, axis_name)


def all_reduce(x: Tree, axis_name: AxisName, total: Callable) -> Tree:
    """The sum over devices on every device, by `total`, which maps a varying array to one that has the same bits everywhere.

    Its transpose costs nothing: the result is the same everywhere, so its cotangent is too. Errors as in `ring.all_reduce`.
    """
    return in_turn(
        lambda x: linear(
            varying(summable(x), axis_name),
            forward=lambda x: replicated(total(x), axis_name),
            backward=lambda ct: varying(ct, axis_name),
        ),
        x,
        axis_name,
    )


def in_turn(one: Callable, x: Tree, axis_name: AxisName) -> Tree:
    """`one` of each array of the tree `x`: where hops are loops, the next begins when the one before is done."""
    leaves, structure = jax.tree.flatten(x)
    done: list[jax.Array] = []
    for leaf in leaves:
        done.append(one(leaf if size(axis_name) <= UNROLLED else ordered(leaf, done[-1:])))
    return jax.tree.unflatten(structure, done)


def in_blocks(axis_name: AxisName, scatter_blocks: Callable, gather_blocks: Callable) -> Callable:
    """A `total` for `all_reduce`: scatter, then gather, the array flattened and zero-padded to a multiple of n elements."""

    def total(x):
        n = size(axis_name)
        flat = jnp.pad(x.reshape(-1), (0, -x.size % n))
        block = computed_once(scatter_blocks(flat.reshape(n, -1), axis_name))
        return gather_blocks(block, axis_name).reshape(-1)[: x.size].reshape(x.shape)

    return total


def computed_once(x: Shaped[Array, "*dims"]) -> Shaped[Array, "*dims"]:
    """`x`, of which a device keeps the very bits that it sends. Costs two or three passes over it.

    XLA may compute a value once for the message, and once more inside the operation that uses it here, with a multiplication and
    an addition made one: the last bit differs, and the replicas drift apart in silence. It sees through
    `lax.optimization_barrier` (on CPU), and not through a loop: what comes out of that is in memory, for all who want it.
    """
    return lax.fori_loop(0, 2, lambda trip, y: jnp.where(trip == 1, x, y), jnp.zeros_like(x))


def send(x: Shaped[Array, "*dims"], axis_name: AxisName, pairs: Sequence[tuple[int, int]]) -> Shaped[Array, "*dims"]:
    """For each pair (i, j) device i's `x` on device j, and zeros where nothing arrives: one hop.

    Several axes count their devices in row-major order.
    """
    names, place = _mesh_order(axes(axis_name))
    return lax.ppermute(x, names, [(place[i], place[j]) for i, j in pairs])


def split(x: Shaped[Array, "..."], dim: int, axis_name: AxisName, tiled: bool) -> Shaped[Array, "..."]:
    """`x` as n blocks, in front, `[n, *block]`: the inverse of `merge`."""
    if tiled:
        n = size(axis_name)
        x = x.reshape(*x.shape[:dim], n, x.shape[dim] // n, *x.shape[dim + 1 :])
    return jnp.moveaxis(x, dim, 0)


def merge(blocks: Shaped[Array, "..."], dim: int, tiled: bool) -> Shaped[Array, "..."]:
    """The n blocks in front, at `dim`: as a dim of their own, or `tiled` one after another."""
    x = jnp.moveaxis(blocks, 0, dim)
    return x.reshape(*x.shape[:dim], x.shape[dim] * x.shape[dim + 1], *x.shape[dim + 2 :]) if tiled else x


def index(axis_name: AxisName) -> jax.Array:
    """The device's place on the axis, or on several in row-major order: an int32 scalar."""
    return lax.axis_index(axis_name) if axes(axis_name) else jnp.zeros((), jnp.int32)


def summable(x: ArrayLike) -> Shaped[Array, "..."]:
    """`x` as an array that can be added: truth values are counted, as `lax.psum` counts them."""
    array = jnp.asarray(x)
    return array.astype(jnp.int32) if array.dtype == jnp.bool_ else array


def dim_of(name: str, dim: int, rank: int) -> int:
    """`dim`, the argument `name`, counted from the front. Raises `ValueError` if an array of this `rank` has no such dim."""
    if not rank:
        raise ValueError(f"{name}={dim} needs an array of one dim or more, and this one is a scalar. Reshape it to (1,).")
    if not -rank <= dim < rank:
        raise ValueError(f"{name}={dim} needs an array of more dims than {rank}: take one of {list(range(rank))}.")
    return dim % rank


def check_divides(function: str, argument: str, shape: tuple[int, ...], dim: int, n: int, tiled: bool) -> None:
    """Raise `ValueError` if the dim cannot be split into n blocks."""
    if tiled and shape[dim] % n:
        raise ValueError(
            f"{function}: dim {dim} ({argument}) of shape {shape} must divide by {n}, the number of devices on the axis. "
            f"Pad it to {shape[dim] + -shape[dim] % n}, or choose another dim."
        )
    if not tiled and shape[dim] != n:
        raise ValueError(
            f"{function}: dim {dim} ({argument}) of shape {shape} must be {n}, the number of devices on the axis, since "
            f"tiled=False drops it. Pass tiled=True to split a longer dim, or reshape."
        )


def _mesh_order(names: tuple) -> tuple[tuple, list[int]]:
    """The axes as `lax.ppermute` wants them, in the mesh's order, and the place there of each device of the axis."""
    if len(names) < 2:
        return names, list(range(size(names)))
    ordered = tuple(sorted(names, key=jax.sharding.get_abstract_mesh().axis_names.index))
    ring = np.arange(size(names)).reshape([lax.axis_size(name) for name in names])
    in_mesh_order = ring.transpose([names.index(name) for name in ordered]).reshape(-1)
    return ordered, np.argsort(in_mesh_order).tolist()
