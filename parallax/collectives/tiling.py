"""The collectives of one array. The array is cut into slices along one dim, and the tables of
messages of an algorithm send these slices.

A TPU stores an array of two dims or more in tiles of 8 x 128 numbers, so flattening copies the
array. According to the compiler's cycle counts, an all-reduce of 105 MB on a TPU v5e takes 10.3 ms
if the array is flattened, and 5.0 ms if it is cut into slices. So blocks are slices that are read
in place and written once. With n devices, an array is cut along a dim whose n slices are whole
tiles. An array without such a dim is sent as a padded vector.

`routes` are the tables of messages (`Route`) of an algorithm, which run side by side. Each table
carries one *part*, or share, of every block.
"""

import itertools
import math

import jax.numpy as jnp
from jax import lax

from parallax.collectives.execute import empty_like, gather, pin_bits, pin_buffer, scatter


def all_reduce_array(x, routes, axis_name):
    """Returns the sum over devices of `x`, the same bits on every device.

    `x` is cut into one block for each device, along one of its dims or as a vector. Each block is
    summed on one device and then sent to all, so all devices have the same bits.
    """
    n, parts = routes[0].n, len(routes)
    if n == 1:  # without this, a TPU would copy `x` route by route
        return x
    # The first dim that fits: slices along an outer dim are contiguous in memory.
    dim = next((dim for dim in range(x.ndim) if _keeps_tiles(x.shape, dim, n * parts)), None)
    if dim is not None:
        return _all_reduce_slices(x, dim, routes, axis_name)
    # Otherwise `x` is sent as a vector. Below 2**31 numbers `_in_rows` returns the vector itself,
    # which needs only n equal blocks: the parts of a block may differ by one number. int32 cannot
    # index a longer vector: `_in_rows` cuts it into rows of 128 numbers, equally many in each part.
    # `unit` and `_in_rows` both decide by `x.size`.
    unit = n if x.size < 2**31 else 128 * n * parts
    padded = jnp.pad(x.reshape(-1), (0, -x.size % unit))
    rows = _all_reduce_slices(_in_rows(padded, x.size, n * parts), 0, routes, axis_name)
    return rows.reshape(-1)[: x.size].reshape(x.shape)


def reduce_scatter_array(x, dim: int, routes, axis_name):
    """Returns this device's slice, one of n along `dim`, of the sum of `x` over devices."""
    n, parts = routes[0].n, len(routes)
    if n == 1:
        return x
    if _keeps_tiles(x.shape, dim, n * parts):
        return jnp.concatenate(_scatter_slices(x, dim, routes, axis_name), dim)
    # Otherwise the slices are sent as a vector, in which `_as_vector` puts one slice along `dim`
    # after the other. If int32 cannot index the vector, it is cut into rows of 128 numbers, and
    # `_in_rows` raises an error unless these form n * parts equal blocks.
    rows = _in_rows(_as_vector(x, dim), x.size, n * parts)
    blocks = _scatter_slices(rows, 0, routes, axis_name)
    shape = (*x.shape[:dim], x.shape[dim] // n, *x.shape[dim + 1 :])
    return _from_vector(jnp.concatenate(blocks), shape, dim)


def all_gather_array(x, dim: int, routes, axis_name):
    """Returns the slices `x` of all devices, joined along `dim`."""
    n, parts = routes[0].n, len(routes)
    if n == 1:
        return x
    # Each device keeps a copy of its own block and sends one: both must have the same bits.
    x = pin_bits(x)
    shape = (*x.shape[:dim], x.shape[dim] * n, *x.shape[dim + 1 :])
    if _keeps_tiles(shape, dim, n * parts):
        return _gather_slices(jnp.split(x, parts, dim), dim, routes, axis_name)
    # Otherwise `x` is sent as a vector, whose parts may differ by one number. If int32 cannot index
    # the result, `_in_rows` cuts `x` into rows of 128 numbers, and raises an error unless the rows
    # form `parts` equal blocks. The result then has n * parts equal blocks, as the transpose of
    # this function, `reduce_scatter_array` of an array like the result, demands.
    rows = _in_rows(_as_vector(x, dim), math.prod(shape), parts)
    shares = shares_of(len(rows), parts)  # (start, length) for each route
    blocks = [lax.slice_in_dim(rows, start, start + length) for start, length in shares]
    return _from_vector(_gather_slices(blocks, 0, routes, axis_name), shape, dim)


def shares_of(length: int, parts: int) -> list[tuple[int, int]]:
    """Returns (start, length) of each part of a dim; the first parts may be longer by one."""
    lengths = [length // parts + (part < length % parts) for part in range(parts)]
    # `accumulate` yields one start more, the end of the last part, which `zip` leaves out.
    return list(zip(itertools.accumulate(lengths, initial=0), lengths, strict=False))


def _all_reduce_slices(x, dim: int, routes, axis_name):
    """Returns the sum over devices of `x`. Each slice of `x` along `dim` is one block, which one
    device sums."""
    blocks = _scatter_slices(x, dim, routes, axis_name)
    # The sums are sent and kept: without a guard, XLA may recompute the copy that is kept.
    return _gather_slices([pin_bits(block) for block in blocks], dim, routes, axis_name)


def _scatter_slices(x, dim: int, routes, axis_name) -> list:
    """Returns this device's slice, along `dim`, of the sum of `x` over devices. The slice is cut
    along `dim` into a list of shares. `routes[part]` is the table that carries share `part`."""
    length = x.shape[dim] // routes[0].n
    # (start, length) of each route's share of a slice.
    shares = shares_of(length, len(routes))

    def slice_of(part, device):
        """Returns the slice of this device's `x` that is summed on `device`, cut to the share that
        the table `routes[part]` carries."""
        start, share_length = shares[part]
        return lax.dynamic_slice_in_dim(x, device * length + start, share_length, dim)

    return scatter(routes, slice_of, axis_name, dim=dim)


def _gather_slices(blocks, dim: int, routes, axis_name):
    """Returns all devices' slices joined along `dim`. `blocks` is this device's slice, cut along
    `dim` into shares. `routes[part]` is the table that carries the share `blocks[part]`."""
    length = sum(block.shape[dim] for block in blocks)
    # (start, length) of each route's share of a slice.
    shares = shares_of(length, len(routes))

    def write(result, part, device, block):
        """Writes `block` into `result`, and returns `result`. `block` is a share of the slice of
        `device`: the share that the table `routes[part]` carries."""
        start, _ = shares[part]
        return lax.dynamic_update_slice_in_dim(result, block, device * length + start, dim)

    shape = (*blocks[0].shape[:dim], length * routes[0].n, *blocks[0].shape[dim + 1 :])
    # Every place is written later, so no time is spent on zeros: `lax.empty` makes the array, with
    # the dtype and the varying axes of a block.
    empty = empty_like(lax.empty, shape, blocks[0])
    # Without `pin_buffer` XLA could fuse some blocks, such as the last to arrive, with later
    # operations, and round these blocks differently. Blocks arrive in another order on each device,
    # so replicas would differ.
    return pin_buffer(gather(routes, blocks, write, empty, axis_name, dim=dim))


def _keeps_tiles(shape: tuple[int, ...], dim: int, n: int) -> bool:
    """Returns whether n equal slices along `dim` consist of whole tiles. A tile is 8 x 128 numbers
    in the last two dims. A vector has no tiles, so for a vector the result is False.
    """
    # A slice must be a multiple of 128 along the last dim, and of 8 along the dim before it.
    unit = {1: 128, 2: 8}.get(len(shape) - dim, 1)
    return len(shape) > 1 and shape[dim] % (n * unit) == 0


def _in_rows(flat, size: int, blocks: int):
    """Returns the vector `flat`, or its rows of 128 numbers if int32 cannot count `size` numbers.

    `size` counts the numbers in the whole array, of which `flat` may be one device's block.
    Raises `ValueError` if rows are needed and do not form `blocks` equal blocks.
    """
    if size < 2**31:
        return flat
    # A row cannot be cut between two blocks, so `flat` needs a multiple of 128 * blocks numbers. In
    # an all-gather the whole array has size // flat.size (the number of devices) times as many
    # numbers as `flat`, and needs a multiple that much larger. One dim of this size is enough.
    if flat.size % (128 * blocks):
        multiple = 128 * blocks * (size // flat.size)
        raise ValueError(
            f"An array of {size} numbers needs a dim whose size is a multiple of {multiple}. "
            "Pad a dim to such a size, or cut the array into arrays of less than 2**31 numbers."
        )
    return flat.reshape(-1, 128)


def _as_vector(x, dim: int):
    """Returns the numbers of `x` as a vector, slice after slice along `dim`."""
    return jnp.moveaxis(x, dim, 0).reshape(-1)


def _from_vector(x, shape: tuple[int, ...], dim: int):
    """Returns the array of this shape from its vector: the inverse of `_as_vector`."""
    return jnp.moveaxis(x.reshape(shape[dim], *shape[:dim], *shape[dim + 1 :]), 0, dim)
