"""Collectives on a ring: every byte moves by a `ppermute` to the next device, and each device does 1/n of the adding.

Each function takes what its `jax.lax` twin takes (a pytree, one axis or a tuple of axes, any dtype and shape) and returns the
same values with the same replication types and gradients, under `check_vma=True`. A tuple of axes is one ring through all of
its devices. Here n is the number of devices on the axis and S the bytes of the array on one device.

| function | bytes a device sends | hops | transpose |
|---|---|---|---|
| `reduce_scatter` | (n - 1)/n S | n - 1 | `all_gather` |
| `all_gather` | (n - 1) S | n - 1 | `reduce_scatter` |
| `all_reduce`, `all_mean` | 2 (n - 1)/n S, S padded to a multiple of n elements | 2 (n - 1) | the cotangent as it is, free |
| `all_to_all` | (n - 1)/n S | n - 1 | `all_to_all` |

Source: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms (2009).
"""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, PyTree, Shaped

from parallax.collectives.replicated import AxisName, axes, linear, replicated, varying, varying_axes

Tree = TypeVar("Tree", bound=PyTree)

UNROLLED = 8  # devices up to which hops are written out; a longer ring is a loop, whose compile time does not grow with n


def reduce_scatter(x: Tree, axis_name: AxisName, *, scatter_dimension: int = 0, tiled: bool = False) -> Tree:
    """Sum over devices; device i keeps block i: `A[I] {U_X} -> A[I_X]`. The twin of `lax.psum_scatter`.

    The partial sum for block i starts at device i + 1 and gains one term a hop, so each link carries (n - 1)/n of `x` in
    n - 1 hops. Its transpose is `all_gather`.

    Args:
        x: arrays whose `scatter_dimension` has size n, or, `tiled`, a multiple of n.
        axis_name: the mesh axis, or several, which then form one ring in row-major order.
        scatter_dimension: the dim that is split.
        tiled: keep that dim with 1/n of its size, instead of dropping it.

    Raises:
        ValueError: a leaf's `scatter_dimension` has another size.
    """

    def leaf(x):
        dim = _dim("scatter_dimension", scatter_dimension, x.ndim)
        _check_divides("reduce_scatter", "scatter_dimension", x.shape, dim, _size(axis_name), tiled)
        return linear(
            x,
            forward=lambda x: _reduce_scatter(_split(x, dim, axis_name, tiled), axis_name),
            backward=lambda ct: _merge(_all_gather(ct, axis_name), dim, tiled),
        )

    return jax.tree.map(lambda x: leaf(varying(_summable(x), axis_name)), x)


def all_gather(x: Tree, axis_name: AxisName, *, axis: int = 0, tiled: bool = False) -> Tree:
    """Every device's block on every device: `A[I_X] -> A[I]`, typed as varying. The twin of `lax.all_gather`.

    Each block travels once round the ring: n - 1 hops of one block. Its transpose is `reduce_scatter`.

    Args:
        x: arrays, one block a device.
        axis_name: the mesh axis, or several, which then form one ring in row-major order.
        axis: where the blocks are put one after another.
        tiled: concatenate along the dim `axis`, instead of adding a dim of size n there.
    """

    def leaf(x):
        dim = _dim("axis", axis, x.ndim + (not tiled))
        return linear(
            x,
            forward=lambda x: _merge(_all_gather(x, axis_name), dim, tiled),
            backward=lambda ct: _reduce_scatter(_split(ct, dim, axis_name, tiled), axis_name),
        )

    return jax.tree.map(lambda x: leaf(varying(jnp.asarray(x), axis_name)), x)


def all_reduce(x: Tree, axis_name: AxisName) -> Tree:
    """The sum over devices, on every device, the same bits: `A {U_X} -> A`. The twin of `lax.psum`.

    A reduce-scatter and an all-gather of the flattened leaf, zero-padded to a multiple of n elements: 2 (n - 1)/n of its
    bytes a link. Its transpose costs nothing: the result is the same everywhere, so its cotangent is too.
    """
    return jax.tree.map(
        lambda x: linear(
            varying(_summable(x), axis_name),
            forward=lambda x: replicated(_all_reduce(x, axis_name), axis_name),
            backward=lambda ct: varying(ct, axis_name),
        ),
        x,
    )


def all_mean(x: Tree, axis_name: AxisName) -> Tree:
    """The mean over devices, on every device: `A {U_X} -> A`. The twin of `lax.pmean`; costs one `all_reduce`."""
    n = _size(axis_name)
    return jax.tree.map(lambda x: x / n, all_reduce(x, axis_name))


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
        ValueError: a leaf's `split_axis` has another size.
    """

    def leaf(x):
        split, concat = _dim("split_axis", split_axis, x.ndim), _dim("concat_axis", concat_axis, x.ndim)
        _check_divides("all_to_all", "split_axis", x.shape, split, _size(axis_name), tiled)
        return linear(
            x,
            forward=lambda x: _merge(_exchange(_split(x, split, axis_name, tiled), axis_name), concat, tiled),
            backward=lambda ct: _merge(_exchange(_split(ct, concat, axis_name, tiled), axis_name), split, tiled),
        )

    return jax.tree.map(lambda x: leaf(varying(jnp.asarray(x), axis_name)), x)


def send_next(x: Shaped[Array, "*dims"], axis_name: AxisName, *, distance: int = 1) -> Shaped[Array, "*dims"]:
    """Device i's `x` on device i + `distance`, round the ring: one hop of every collective here."""
    names, place = _mesh_order(axes(axis_name))
    n = len(place)
    return lax.ppermute(x, names, [(place[i], place[(i + distance) % n]) for i in range(n)])


def _reduce_scatter(blocks, axis_name):
    """`[n, *block] -> [*block]`: the sum over devices of the block with the device's own index."""
    n, me = _size(axis_name), _index(axis_name)
    hop = lambda h, partial: send_next(partial, axis_name) + _block(blocks, (me - 1 - h) % n)
    return _hops(n, hop, _block(blocks, (me - 1) % n))


def _all_gather(block, axis_name):
    """`[*block] -> [n, *block]`: all devices' blocks, in their order.

    Always a loop: written out, XLA's CPU backend holds all n messages at once, and takes 1.2 to 2.5 times as long.
    """
    n, me = _size(axis_name), _index(axis_name)

    def hop(h, carry):
        message, blocks = send_next(carry[0], axis_name), carry[1]
        return message, lax.dynamic_update_index_in_dim(blocks, message, (me - h) % n, 0)

    blocks = varying(jnp.zeros((n, *block.shape), block.dtype), varying_axes(block))
    return lax.fori_loop(1, n, hop, (block, lax.dynamic_update_index_in_dim(blocks, block, me, 0)))[1]


def _all_reduce(x, axis_name):
    n = _size(axis_name)
    flat = jnp.pad(x.reshape(-1), (0, -x.size % n))
    return _all_gather(_reduce_scatter(flat.reshape(n, -1), axis_name), axis_name).reshape(-1)[: x.size].reshape(x.shape)


def _exchange(blocks, axis_name):
    """`[n, *block] -> [n, *block]`: block j goes to device j; what comes from device j is put at j."""
    n, me = _size(axis_name), _index(axis_name)
    received = blocks
    for k in range(1, n):
        message = send_next(_block(blocks, (me + k) % n), axis_name, distance=k)
        received = lax.dynamic_update_index_in_dim(received, message, (me - k) % n, 0)
    return received


def _hops(n: int, hop: Callable, carry):
    """`carry` after hops 1 to n - 1."""
    if n > UNROLLED:
        return lax.fori_loop(1, n, hop, carry)
    for h in range(1, n):
        carry = hop(h, carry)
    return carry


def _block(blocks, index):
    return lax.dynamic_index_in_dim(blocks, index, 0, keepdims=False)


def _split(x, dim: int, axis_name, tiled: bool):
    """`x` as n blocks, in front: the inverse of `_merge`."""
    if tiled:
        n = _size(axis_name)
        x = x.reshape(*x.shape[:dim], n, x.shape[dim] // n, *x.shape[dim + 1 :])
    return jnp.moveaxis(x, dim, 0)


def _merge(blocks, dim: int, tiled: bool):
    x = jnp.moveaxis(blocks, 0, dim)
    return x.reshape(*x.shape[:dim], x.shape[dim] * x.shape[dim + 1], *x.shape[dim + 2 :]) if tiled else x


def _size(axis_name) -> int:
    return lax.axis_size(axis_name)


def _index(axis_name):
    return lax.axis_index(axis_name) if axes(axis_name) else jnp.zeros((), jnp.int32)


def _mesh_order(names: tuple) -> tuple[tuple, list[int]]:
    """The axes as `lax.ppermute` wants them, in the mesh's order, and the place there of each device of the ring."""
    if len(names) < 2:
        return names, list(range(_size(names)))
    ordered = tuple(sorted(names, key=jax.sharding.get_abstract_mesh().axis_names.index))
    ring = np.arange(_size(names)).reshape([lax.axis_size(name) for name in names])
    in_mesh_order = ring.transpose([names.index(name) for name in ordered]).reshape(-1)
    return ordered, np.argsort(in_mesh_order).tolist()


def _summable(x):
    """Truth values are counted, as `lax.psum` counts them."""
    x = jnp.asarray(x)
    return x.astype(jnp.int32) if x.dtype == jnp.bool_ else x


def _dim(name: str, dim: int, rank: int) -> int:
    if not -rank <= dim < rank:
        raise ValueError(f"{name}={dim} needs an array of more dims than {rank}: take one of {list(range(rank))}.")
    return dim % rank


def _check_divides(function: str, argument: str, shape, dim: int, n: int, tiled: bool):
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
