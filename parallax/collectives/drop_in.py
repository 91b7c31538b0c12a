"""From hops to drop-in twins of `jax.lax`'s collectives: what every algorithm here shares.

An algorithm is a pair of functions on blocks, each the transpose of the other:

    scatter_blocks(blocks: [n, *block], axis_name) -> [*block]     the sum over devices of the block with the device's own index
    gather_blocks(block: [*block], axis_name) -> [n, *block]       every device's block, in their order

`mover` makes of such a pair what `lax.psum_scatter`, `lax.all_gather` and `lax.psum` are, for pytrees, any dim, any dtype and
any size, with their replication types and gradients.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Shaped

from parallax.collectives.axis import AllToAll, Mover
from parallax.collectives.cpu import ordered
from parallax.collectives.types import AxisName, axes, cast, index, linear, pending, size, varying
from parallax.typed import PyTree

Tree = TypeVar("Tree", bound=PyTree)

# Devices up to which a ring's hops are written out; a longer ring is a loop, whose compile time does not grow with n. On CPU
# devices what is written out is safe beside anything; of a loop XLA may let the next collective go ahead (`hlo.unordered`).
UNROLLED = 8


def mover(
    name: str,
    scatter_blocks: Callable[..., Any],
    gather_blocks: Callable[..., Any],
    *,
    gather_inside: Callable[..., Any] | None = None,
    all_to_all: AllToAll = lax.all_to_all,
) -> Mover:
    """The mover of an algorithm.

    Its functions take trees of arrays of any dtype and shape along one axis or several. They raise `ValueError` where a leaf
    has no such dim, or one that does not divide, or where the code does not run over the axis. A reduce-scatter and an
    all-gather are each the other's transpose. An all-reduce is both, of the leaf flattened and zero-padded to a multiple of n
    elements; its transpose costs nothing.

    Args:
        name: what messages call it.
        scatter_blocks: as above.
        gather_blocks: as above.
        gather_inside: `gather_blocks` where the blocks do not become the first dim of the result, if it differs.
        all_to_all: if it is not `lax`'s.
    """
    gathers = {True: gather_blocks, False: gather_inside or gather_blocks}

    def reduce_scatter(x, axis_name, *, scatter_dimension=0, tiled=False):
        def leaf(x):
            if not axes(axis_name):  # there `lax` drops no dim
                return x
            dim = dim_of("scatter_dimension", scatter_dimension, x.ndim)
            check_divides("reduce_scatter", "scatter_dimension", x.shape, dim, size(axis_name), tiled)
            gather = gathers[scatter_dimension == 0]
            return moved(
                x,
                axis_name,
                forward=lambda x: scatter_blocks(split(x, dim, axis_name, tiled), axis_name),
                backward=lambda ct: merge(gather(computed_once(ct), axis_name), dim, tiled),
            )

        return in_turn(lambda x: leaf(summand("reduce_scatter", summable(x), axis_name)), x, axis_name)

    def all_gather(x, axis_name, *, axis=0, tiled=False, to="varying"):
        if to not in ("varying", "invarying", "reduced"):
            raise ValueError(f"all_gather needs to='varying', 'invarying' or 'reduced', as lax.all_gather; got {to!r}.")

        def leaf(x):
            if not axes(axis_name):  # there `lax` adds no dim
                return x
            dim, gather = dim_of("axis", axis, x.ndim + (not tiled)), gathers[axis == 0]
            blocks = lambda ct: split(ct, dim, axis_name, tiled)
            own = lambda ct: lax.dynamic_index_in_dim(blocks(ct), index(axis_name), 0, keepdims=False)
            return moved(
                x,
                axis_name,
                forward=lambda x: merge(gather(computed_once(x), axis_name), dim, tiled),
                backward=own if to == "invarying" else lambda ct: scatter_blocks(blocks(ct), axis_name),
                to=to,
            )

        return in_turn(lambda x: leaf(block("all_gather", jnp.asarray(x), axis_name)), x, axis_name)

    def all_reduce_(x, axis_name):
        return all_reduce(x, axis_name, in_blocks(axis_name, scatter_blocks, gather_blocks))

    all_reduce_.__name__ = "all_reduce"
    return Mover(name, all_reduce_, reduce_scatter, all_gather, all_to_all)


def all_reduce(x: Tree, axis_name: AxisName, total: Callable[..., Any]) -> Tree:
    """The sum over devices on every device, by `total`, which maps a varying array to one that has the same bits everywhere.

    Its transpose costs nothing: the result is the same everywhere, so its cotangent is too.
    """
    return in_turn(
        lambda x: moved(
            summand("all_reduce", summable(x), axis_name), axis_name, forward=total, backward=lambda ct: ct, to="invarying"
        ),
        x,
        axis_name,
    )


def moved(
    x: Shaped[Array, "..."],
    axis_name: AxisName,
    *,
    forward: Callable[[Shaped[Array, "..."]], Shaped[Array, "..."]],
    backward: Callable[[Shaped[Array, "..."]], Shaped[Array, "..."]],
    to: str = "varying",
) -> Shaped[Array, "..."]:
    """`linear` of two functions of varying arrays, for an `x` that varies or is unreduced along all of `axis_name`.

    The result is declared `to`, "varying", "invarying" or "reduced" there, and the transpose's result what belongs to `x`:
    reduced for unreduced. Along other axes both stay as they are.
    """

    def on_terms(f, state):
        def g(x):
            other = {axis: was for axis, was in pending(x).items() if axis not in axes(axis_name)}
            inside = dict.fromkeys((*axes(axis_name), *other), "varying")
            after: dict[str, Any] = other | dict.fromkeys(axes(axis_name), state)
            return cast(f(cast(x, inside)), after)

        return g

    unreduced = any(axis in axes(axis_name) for axis in pending(x))
    return linear(x, forward=on_terms(forward, to), backward=on_terms(backward, "reduced" if unreduced else "varying"))


def summand(name: str, x: Shaped[Array, "..."], axis_name: AxisName) -> Shaped[Array, "..."]:
    """`x` for a sum over `axis_name`, as varying or as unreduced along all of it.

    Raises:
        ValueError: it is reduced along one of the axes, or unreduced along some of them only; `lax` refuses those too.
    """
    states = {axis: was for axis, was in pending(x).items() if axis in axes(axis_name)}
    if set(states.values()) == {"unreduced"} and len(states) == len(axes(axis_name)):
        return x
    if "unreduced" in states.values():
        raise ValueError(
            f"{name} along {axis_name!r} needs an x that is unreduced along all of these axes or along none; this one, of shape "
            f"{x.shape}, is {_spelt(states)}. Sum it over its unreduced axes first, and over the others then."
        )
    return block(name, x, axis_name)


def block(name: str, x: Shaped[Array, "..."], axis_name: AxisName) -> Shaped[Array, "..."]:
    """`x` as varying along `axis_name`. Raises `ValueError` where it is unreduced or reduced there, as `lax` does."""
    states = {axis: was for axis, was in pending(x).items() if axis in axes(axis_name)}
    if states:
        cure = "Sum it first, by all_reduce or reduce_scatter"
        if "reduced" in states.values():
            cure = f'Cast it first: lax.pcast(x, {next(a for a in states if states[a] == "reduced")!r}, to="varying")'
        raise ValueError(
            f"{name} along {axis_name!r} needs an x that varies or is the same there; this one, of shape {x.shape}, is "
            f"{_spelt(states)}. {cure}."
        )
    return varying(x, axis_name)


def _spelt(states: dict[str, str]) -> str:
    return " and ".join(f"{was} along {axis!r}" for axis, was in states.items())


def in_turn(one: Callable[..., Any], x: Tree, axis_name: AxisName) -> Tree:
    """`one` of each array of the tree `x`: where hops are loops, the next begins when the one before is done."""
    leaves, structure = jax.tree.flatten(x)
    done: list[jax.Array] = []
    for leaf in leaves:
        done.append(one(leaf if size(axis_name) <= UNROLLED else ordered(leaf, done[-1:])))
    return jax.tree.unflatten(structure, done)


def in_blocks(axis_name: AxisName, scatter_blocks: Callable[..., Any], gather_blocks: Callable[..., Any]) -> Callable[..., Any]:
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


def apart(x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """`x`, with a no-op loop between its last write and what follows: the loop writes one number again.

    Without it XLA may join the blocks inside the operation that uses them, and fuse a product and a sum there for some of the
    blocks only. Which blocks depends on the device, so replicas would drift apart.
    """
    if not x.size:
        return x
    start = (0,) * x.ndim
    number = lax.slice(x, start, (1,) * x.ndim)
    return lax.fori_loop(0, 2, lambda _, y: lax.dynamic_update_slice(y, number, start), x)


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
