"""Drop-in replacements for `lax`'s collectives, made from a scatter and a gather of slices.

The scatter and the gather are a pair, `Slices`, and work along one dim of one array. They neither
add nor remove a dim. Over n devices, a scatter makes the dim n times shorter, and a gather makes
the dim n times longer. This file does the rest of what `lax`'s functions do: it takes the same
arguments (the dim, `tiled`, `to`), refuses the same mistakes, and gives the results the same
replication types.

As in `lax`, a collective over n devices with `tiled` cuts a dim into n blocks, or joins n blocks
along a dim. Without `tiled` the dim has size n: the scatter cuts it to size 1, and then it is
dropped. Before a gather, a new dim of size 1 is added, along which the blocks are joined.
"""

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

OnSlices = Callable[[Shaped[Array, "..."], int, AxisName], Shaped[Array, "..."]]


class Slices(NamedTuple):
    """Two functions of `(x, dim, axis_name)`, for one varying array; each is the other's transpose.

    Attributes:
        scatter: cuts `x` into n slices along `dim`; device i gets the sum over devices of slice i.
        gather: joins all devices' `x` along `dim`.
    """

    scatter: OnSlices
    gather: OnSlices


def reduce_scatter_leaf(
    x: ArrayLike, axis_name: AxisName, slices: Slices, scatter_dimension: int, tiled: bool
) -> Shaped[Array, "..."]:
    """Returns `lax.psum_scatter` of one array, computed by `slices.scatter`.

    The transpose is `slices.gather`. Neither `slices.scatter` nor `slices.gather` adds or removes a
    dim. So if not `tiled`, dim `scatter_dimension`, which the scatter cuts to size 1, is dropped
    after the scatter, and added before the gather.
    """
    # Booleans are counted. Random keys, and replication types that `lax` refuses, raise an error.
    x = check_summand("reduce_scatter", summable(x), axis_name)
    if not axes(axis_name):  # without an axis, `lax` drops no dim even if not tiled
        return x
    dim = dim_of("scatter_dimension", scatter_dimension, x.ndim)
    n = axis_size(axis_name)
    check_divides("reduce_scatter", "scatter_dimension", x.shape, dim, n, tiled)

    def forward(x):
        return _drop_dim(slices.scatter(x, dim, axis_name), dim, tiled)

    def backward(cotangent):
        return slices.gather(_add_dim(cotangent, dim, tiled), dim, axis_name)

    return linear_collective(x, axis_name, forward=forward, backward=backward)


def all_gather_leaf(
    x: ArrayLike, axis_name: AxisName, slices: Slices, axis: int, tiled: bool, to: str = "varying"
) -> Shaped[Array, "..."]:
    """Returns `lax.all_gather` of one array, of numbers or random keys.

    `slices.gather` computes the result. The transpose is `slices.scatter`, or a slice if the result
    is invariant. Neither the gather nor its transpose adds or removes a dim. So if not `tiled`, dim
    `axis`, of size 1, is added before the gather, and dropped after the transpose. `to` is the
    replication type of the result along the axis: "varying", "invarying" or "reduced", as in
    `lax.pcast`.
    """
    if to not in ("varying", "invarying", "reduced"):
        raise ValueError(
            "all_gather: `to` must be 'varying', 'invarying' or 'reduced', as in lax.all_gather; "
            f"got {to!r}."
        )
    x = check_block("all_gather", jnp.asarray(x), axis_name)
    if not axes(axis_name):  # without an axis, `lax` adds no dim even if not tiled
        return x
    dim = dim_of("axis", axis, x.ndim + (not tiled))  # untiled, the result has a dim more
    # A hop gives zeros to a device that receives nothing, and the transpose of a hop adds. Random
    # keys have no zeros and cannot be added, so the numbers of the keys are sent. They are an array
    # with further dims at the end, so `dim` stays the same.
    if is_key(x):
        numbers = all_gather_leaf(jax.random.key_data(x), axis_name, slices, dim, tiled, to)
        return jax.random.wrap_key_data(numbers, impl=jax.random.key_impl(x))
    length = x.shape[dim] if tiled else 1  # of this device's block

    def forward(x):
        return slices.gather(_add_dim(x, dim, tiled), dim, axis_name)

    def backward(cotangent):
        """Returns the cotangent of this device's block, from that of the gathered array.

        The block has size `length` along dim `dim` of the gathered array. `to`, an argument of
        `all_gather_leaf`, is the replication type of the gathered array along the axis.
        """
        # An invariant result has the whole cotangent on each device, so a device takes its slice.
        # Otherwise each device has a cotangent of its own, and their sum is scattered. (The
        # cotangent of a "reduced" result is unreduced: each device has one term of it.)
        if to == "invarying":
            start = axis_index(axis_name) * length
            local = lax.dynamic_slice_in_dim(cotangent, start, length, dim)
        else:
            local = slices.scatter(cotangent, dim, axis_name)
        return _drop_dim(local, dim, tiled)

    return linear_collective(x, axis_name, forward=forward, backward=backward, to=to)


def _add_dim(x, dim: int, tiled: bool):
    """Returns `x` if `tiled`, else `x` with a new dim of size 1 at `dim`, for the gather."""
    return x if tiled else jnp.expand_dims(x, dim)


def _drop_dim(x, dim: int, tiled: bool):
    """Returns `x` if `tiled`, else `x` without dim `dim`, whose size the scatter cut from n to
    1."""
    return x if tiled else jnp.squeeze(x, dim)


def split_blocks(
    x: Shaped[Array, "..."], dim: int, axis_name: AxisName, tiled: bool
) -> Shaped[Array, "..."]:
    """Returns the n blocks of `x` as `[n, *block]`: the inverse of `merge_blocks`.

    With `tiled` the dim `dim` is cut into n blocks. Without it this dim has size n, and each index
    is one block.
    """
    if tiled:
        n = axis_size(axis_name)
        x = x.reshape(*x.shape[:dim], n, x.shape[dim] // n, *x.shape[dim + 1 :])
    return jnp.moveaxis(x, dim, 0)


def merge_blocks(blocks: Shaped[Array, "..."], dim: int, tiled: bool) -> Shaped[Array, "..."]:
    """Returns the n blocks `[n, *block]` stacked along a new dim at position `dim`.

    With `tiled` the blocks are joined along the existing dim instead.
    """
    x = jnp.moveaxis(blocks, 0, dim)
    if not tiled:
        return x
    return x.reshape(*x.shape[:dim], x.shape[dim] * x.shape[dim + 1], *x.shape[dim + 2 :])


def summable(x: ArrayLike) -> Shaped[Array, "..."]:
    """Returns `x` as an array that can be added. Booleans become int32, so that a sum counts the
    true elements, as `lax.psum` does."""
    array = jnp.asarray(x)
    # The sum of two keys is no key, and means nothing.
    if is_key(array):
        raise ValueError(
            "Random keys cannot be added; got an array of keys, "
            f"{array.dtype}{list(array.shape)}. Make the key the same on all devices, or gather it."
        )
    return array.astype(jnp.int32) if array.dtype == jnp.bool_ else array


def is_key(x: Shaped[Array, "..."]) -> bool:
    """Returns whether an array holds random keys."""
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def dim_of(name: str, dim: int, rank: int) -> int:
    """Returns `dim` counted from the front. The argument may be negative, as in `lax`.

    Raises `ValueError`, with the argument's `name`, if an array of this `rank` has no such dim.
    """
    if not rank:
        raise ValueError(
            f"{name}={dim} needs an array of one dim or more, and this one is a scalar. Reshape it "
            "to (1,)."
        )
    if not -rank <= dim < rank:
        raise ValueError(
            f"{name}={dim} is no dim of an array of {rank} dims: use one of {list(range(rank))}."
        )
    return dim % rank


def check_divides(
    function: str, argument: str, shape: tuple[int, ...], dim: int, n: int, tiled: bool
) -> None:
    """Raises `ValueError` if dim `dim` of an array of this `shape` cannot be split into n blocks.

    The size of this dim must be a multiple of n if `tiled`, and n itself if not. `function` and
    `argument` are names for the error.
    """
    if tiled and shape[dim] % n:
        raise ValueError(
            f"{function}: dim {dim} ({argument}) of shape {shape} must be a multiple of {n}, the "
            f"number of devices on the axis. Pad it to {shape[dim] + -shape[dim] % n}, or choose "
            "another dim."
        )
    if not tiled and shape[dim] != n:
        raise ValueError(
            f"{function}: dim {dim} ({argument}) of shape {shape} must be {n}, the number of "
            "devices on the axis, since tiled=False drops this dim. Pass tiled=True to split a "
            "longer dim, or reshape."
        )
