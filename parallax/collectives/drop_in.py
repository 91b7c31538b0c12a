"""From a reduce-scatter and an all-gather of slices to drop-in twins of `lax`'s: dims, options, replication types, refusals."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, ArrayLike, Shaped

from parallax.collectives.types import (
    AxisName,
    axes,
    axis_index,
    axis_size,
    check_block,
    check_summand,
    linear_collective,
)

OneArray = Callable[[Shaped[Array, "..."], int, AxisName], Shaped[Array, "..."]]


class Slices(NamedTuple):
    """Two functions `(x, dim, axis_name)` of one varying array, each the other's transpose.

    Attributes:
        scattered: cuts `x` into n slices along `dim`; device i gets the sum over devices of slice i.
        gathered: all devices' `x`, one after another along `dim`.
    """

    scattered: OneArray
    gathered: OneArray


def reduce_scatter(
    x: ArrayLike, axis_name: AxisName, slices: Slices, scatter_dimension: int, tiled: bool
) -> Shaped[Array, "..."]:
    """The drop-in for `lax.psum_scatter` of one array."""
    x = check_summand("reduce_scatter", summable(x), axis_name)
    if not axes(axis_name):  # there `lax` drops no dim
        return x
    dim = dim_of("scatter_dimension", scatter_dimension, x.ndim)
    check_divides("reduce_scatter", "scatter_dimension", x.shape, dim, axis_size(axis_name), tiled)
    return linear_collective(
        x,
        axis_name,
        forward=lambda x: _without(slices.scattered(x, dim, axis_name), dim, tiled),
        backward=lambda ct: slices.gathered(_with(ct, dim, tiled), dim, axis_name),
    )


def all_gather(
    x: ArrayLike, axis_name: AxisName, slices: Slices, axis: int, tiled: bool, to: str = "varying"
) -> Shaped[Array, "..."]:
    """The drop-in for `lax.all_gather` of one array."""
    if to not in ("varying", "invarying", "reduced"):
        raise ValueError(
            f"all_gather needs to='varying', 'invarying' or 'reduced', as lax.all_gather; got {to!r}."
        )
    x = check_block("all_gather", jnp.asarray(x), axis_name)
    if not axes(axis_name):  # there `lax` adds no dim
        return x
    dim = dim_of("axis", axis, x.ndim + (not tiled))
    if is_key(x):  # hops carry numbers: zeros, sums and types of a key are not defined
        numbers = all_gather(jax.random.key_data(x), axis_name, slices, dim, tiled, to)
        return jax.random.wrap_key_data(numbers, impl=jax.random.key_impl(x))
    length = x.shape[dim] if tiled else 1
    own = lambda ct: lax.dynamic_slice_in_dim(ct, axis_index(axis_name) * length, length, dim)
    part = own if to == "invarying" else lambda ct: slices.scattered(ct, dim, axis_name)
    return linear_collective(
        x,
        axis_name,
        forward=lambda x: slices.gathered(_with(x, dim, tiled), dim, axis_name),
        backward=lambda ct: _without(part(ct), dim, tiled),
        to=to,
    )


def _with(x, dim: int, tiled: bool):
    return x if tiled else jnp.expand_dims(x, dim)


def _without(x, dim: int, tiled: bool):
    return x if tiled else jnp.squeeze(x, dim)


def split(
    x: Shaped[Array, "..."], dim: int, axis_name: AxisName, tiled: bool
) -> Shaped[Array, "..."]:
    """`x` as n blocks, in front, `[n, *block]`: the inverse of `merge`."""
    if tiled:
        n = axis_size(axis_name)
        x = x.reshape(*x.shape[:dim], n, x.shape[dim] // n, *x.shape[dim + 1 :])
    return jnp.moveaxis(x, dim, 0)


def merge(blocks: Shaped[Array, "..."], dim: int, tiled: bool) -> Shaped[Array, "..."]:
    """The n blocks in front, at `dim`: as a dim of their own, or `tiled` one after another."""
    x = jnp.moveaxis(blocks, 0, dim)
    return (
        x.reshape(*x.shape[:dim], x.shape[dim] * x.shape[dim + 1], *x.shape[dim + 2 :])
        if tiled
        else x
    )


def summable(x: ArrayLike) -> Shaped[Array, "..."]:
    """`x` as an array that can be added: truth values are counted, as `lax.psum` counts them."""
    array = jnp.asarray(x)
    if is_key(array):
        raise ValueError(
            f"Random keys cannot be added, and this array holds some, {array.dtype}{list(array.shape)}. Make the key the same on "
            "all devices, or gather it."
        )
    return array.astype(jnp.int32) if array.dtype == jnp.bool_ else array


def is_key(x: Shaped[Array, "..."]) -> bool:
    """Whether an array holds random keys."""
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def dim_of(name: str, dim: int, rank: int) -> int:
    """`dim`, the argument `name`, counted from the front. Raises `ValueError` if an array of this `rank` has no such dim."""
    if not rank:
        raise ValueError(
            f"{name}={dim} needs an array of one dim or more, and this one is a scalar. Reshape it to (1,)."
        )
    if not -rank <= dim < rank:
        raise ValueError(
            f"{name}={dim} needs an array of more dims than {rank}: take one of {list(range(rank))}."
        )
    return dim % rank


def check_divides(
    function: str, argument: str, shape: tuple[int, ...], dim: int, n: int, tiled: bool
) -> None:
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
