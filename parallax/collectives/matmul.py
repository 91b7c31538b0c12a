"""Matrix products that overlap with their collective, hop by hop.

If a product begins only after its operand is gathered, the matrix units wait for the links. In this
module, a device multiplies a block while the next blocks arrive from both neighbours. In a product
before a scatter, the partial sums of a block travel around a ring, in both directions, to the
device that owns the block. In each hop a device adds one term: the rows of its operand that belong
to the block, times its share of the weight. The whole gathered operand, or the whole product before
the scatter, never exists, neither forward nor backward.

Legend: T is the number of rows (tokens), D and F are the sizes of the weight, n is the number of
devices on axis X, and S is the bytes of one device's `[T_X, D]`. T_X means that each device has 1/n
of the rows, and F_X that it has 1/n of F.

| function | messages | bytes sent, half each way | gradients of the operand and of the weight |
|---|---|---|---|
| `all_gather_matmul` | n - 1 | (n - 1) S | the other function, and one more gather of the operand |
| `matmul_reduce_scatter` | n - 1 | (n - 1) S | one gather of the cotangent gives both |

The hops are written out, and never run as a loop: XLA overlaps a product with messages in
straight-line code, but not with a message of another iteration of a loop. A tensor axis has a few
dozen devices at most, so there are few hops.

Source: Wang et al., Overlap communication with dependent computation via decomposition in large
deep learning models (ASPLOS 2023).
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Inexact

from parallax.collectives.cost import devices, priced
from parallax.collectives.drop_in import check_divides, dim_of
from parallax.collectives.execute import gather, scatter
from parallax.collectives.from_table import messages
from parallax.collectives.route import Route
from parallax.collectives.types import (
    AxisName,
    accumulation_dtype,
    axes,
    axis_size,
    varying,
    varying_axes,
)


def _from_both_sides(n: int) -> Route:
    """Returns the table of messages of a scatter in which each block goes the shorter way to its
    owner.

    The devices form a ring. The farthest blocks start first. A gather runs the table backwards.
    """
    # A table is a list of rounds {step: offsets}: device i sends to device i + step the blocks that
    # belong to the devices i + o, for each o in `offsets`. With step 1 the block at offset h
    # arrives at offset h - 1. The receiver adds its term, and sends the block on in the next round:
    # so h falls.
    rounds = []
    for h in range(n // 2, 0, -1):
        # The device n - h places further on is h places back. The opposite device is equally far on
        # both sides: its block goes one way only.
        rounds.append({1: [h], -1: [n - h]} if 2 * h < n else {1: [h]})
    return Route((n,), rounds)  # (n,): a box of one dim, with n devices


def _rounds_of_gather(size, n, itemsize):
    """Returns, for `cost`, the rounds of messages of `all_gather_matmul`.

    `size` counts the numbers in one device's `x`, and `itemsize` is the bytes of one number. `n` is
    a number of devices, or a tuple with the number on each of several axes; `devices(n)` is the
    number of all devices.
    """
    # `_from_both_sides` returns the table of the messages of a scatter; with `back` the table runs
    # backwards, as a gather. `messages` takes a list of tables, here one, and for each table the
    # bytes of a block: here one device's `x`.
    return messages([_from_both_sides(devices(n))], [size * itemsize], back=True)


@priced(_rounds_of_gather, "all_gather_matmul")
def all_gather_matmul(
    x: Inexact[Array, "*batch inputs"],
    weight: Inexact[Array, "inputs *outputs_shard"],
    axis_name: AxisName,
    *,
    axis: int = 0,
) -> Inexact[Array, "*gathered_and_outputs_shard"]:
    """Returns `x`, gathered along its dim `axis`, times `weight`.

    In short: `A[T_X, D] . W[D, F_X] -> [T, F_X]`. The gathered `A` is never whole in memory. The
    result equals `jnp.tensordot(lax.all_gather(x, axis_name, axis=axis, tiled=True), weight,
    axes=1)`, computed by one product per block. The gradient of `x` is `matmul_reduce_scatter` of
    the cotangent and the transposed weight. Reverse-mode differentiation works to any order, also
    under `vmap`, `scan` and `checkpoint`; forward-mode does not work.

    Args:
        x: one device's rows. The last dim of `x` is summed over in the product; the other dims are
            the batch.
        weight: `[D, *F]`; the outputs may have several dims, as in `tensor.column`.
        axis_name: the mesh axis, or several, which then form one ring in row-major order; or `()`
            for a plain product without messages.
        axis: the dim of `x` that is gathered.

    Raises:
        ValueError: `axis` is the last dim of `x`, or no dim of `x`.
    """
    axis = dim_of("axis", axis, x.ndim)
    _check_not_last("all_gather_matmul", "axis", axis, x.shape)
    # `_alike` gives both operands the same varying axes. It is outside of the custom derivative, so
    # JAX transposes it: the gradient of each operand is summed over the axes that were added.
    return _all_gather_matmul(*_alike(x, weight, axis_name), axis_name, axis)


def _rounds_of_scatter(size, n, itemsize):
    """Returns, for `cost`, the rounds of messages of `matmul_reduce_scatter`.

    `size` counts the numbers in the product, and `itemsize` is the bytes of one number. `n` is a
    number of devices, or a tuple with the number on each of several axes; `devices(n)` is the
    number of all devices.
    """
    # `_from_both_sides` returns the table of the messages. `messages` takes a list of tables, here
    # one, and for each table the bytes of a block, and the bytes that a device adds for each block
    # that arrives (`added`). A block is one of n parts of the product, rounded up.
    block = -(-size // devices(n)) * itemsize
    return messages([_from_both_sides(devices(n))], [block], added=[block])


@priced(_rounds_of_scatter, "matmul_reduce_scatter")
def matmul_reduce_scatter(
    x: Inexact[Array, "*batch_and_inputs_shard"],
    weight: Inexact[Array, "*inputs_shard outputs"],
    axis_name: AxisName,
    *,
    scatter_dimension: int = 0,
) -> Inexact[Array, "*scattered outputs"]:
    """Returns block i of the sum over devices of `x` times `weight`, on device i.

    In short: `A[T, F_X] . W[F_X, D] -> [T_X, D]`. The result equals
    `lax.psum_scatter(jnp.tensordot(x, weight, axes=weight.ndim - 1), axis_name,
    scatter_dimension=..., tiled=True)`, up to the order of the additions. The whole product, before
    the sum, never exists. The partial sums that are sent have the type of `x`. The gradient of `x`
    is `all_gather_matmul` of the cotangent and the transposed weight. Reverse-mode differentiation
    works to any order, also under `vmap`, `scan` and `checkpoint`; forward-mode does not work.

    Args:
        x: all rows of the batch, each with this device's share of the input features.
        weight: `[*F, D]`; the inputs may have several dims, as in `tensor.row`. The last dims of
            `x` are the dims `*F` of the weight.
        axis_name: the mesh axis, or several, which then form one ring in row-major order; or `()`
            for a plain product without messages.
        scatter_dimension: the dim of the product `[*batch, D]`, one of `*batch`, that is scattered.

    Raises:
        ValueError: `scatter_dimension` is the last dim of the product, or no dim of the product; or
            the size of this dim is not a multiple of the number of devices.
    """
    # The number of batch dims: `x` is [*batch, *F], the weight [*F, D], and their product
    # [*batch, D].
    batch = x.ndim - weight.ndim + 1
    dim = dim_of("scatter_dimension", scatter_dimension, batch + 1)
    _check_not_last(
        "matmul_reduce_scatter", "scatter_dimension", dim, (*x.shape[:batch], weight.shape[-1])
    )
    check_divides(
        "matmul_reduce_scatter", "scatter_dimension", x.shape, dim, axis_size(axis_name), tiled=True
    )
    # `_alike` gives both operands the same varying axes. It is outside of the custom derivative, so
    # JAX transposes it: the gradient of each operand is summed over the axes that were added.
    return _matmul_reduce_scatter(*_alike(x, weight, axis_name), axis_name, dim)


# The derivatives are written out, so that their products overlap with their messages too.
@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _all_gather_matmul(x, weight, axis_name, axis):
    """Returns the gathered `x`, [..., T, ..., D], times the weight, [D, *F_X].

    A device's own `x` is [..., T_X, ..., D]; `axis` is the index of the dim T_X in this shape. The
    derivative is written by hand, so that the products in it overlap with messages too. The
    backward pass gathers `x` again: JAX's own derivative would keep every block of `x` until the
    backward pass.
    """

    def multiply(y, j, block):
        """Multiplies device j's block of `x` by the weight, writes the product into `y`, and
        returns `y`."""
        return _put(y, jnp.tensordot(block, weight, axes=1), j, axis)

    n = axis_size(axis_name)
    # The shape of one block's product; the result has n of them along `axis`.
    y = jax.eval_shape(functools.partial(jnp.tensordot, axes=1), x, weight)
    zeros = _zeros(_times(y.shape, axis, n), y.dtype, like=x)
    return _as_they_arrive(x, axis_name, multiply, zeros)


def _all_gather_matmul_forward(x, weight, axis_name, axis):
    return _all_gather_matmul(x, weight, axis_name, axis), (x, weight)


def _all_gather_matmul_backward(axis_name, axis, residuals, cotangent):
    """Returns the gradients of `x` and of the weight.

    The blocks of `x` are gathered again for the weight's gradient; the cotangent, times the
    transposed weight, is reduce-scattered for the gradient of `x`.
    """
    x, weight = residuals
    # Without the barrier XLA would reuse the forward pass's blocks of `x`, and so keep all of these
    # blocks between the two passes. The cotangent passes through the barrier too: so the second
    # gather of `x` cannot begin before the backward pass, which computes the cotangent.
    x, cotangent = lax.optimization_barrier((x, cotangent))

    def add(total, j, block):
        """Returns `total`, a partial sum of the weight's gradient, plus the term of device j.

        `block` is device j's rows of `x`. The term is the transposed `block` times the cotangent of
        the matmul's result in these rows.
        """
        rows = _block(cotangent, j, axis, x.shape[axis])  # the cotangent of device j's rows
        return total + _outer(block, rows, x.ndim - 1)  # all dims of `x` but D are batch

    # The n terms are added in float32 or wider.
    zeros = _zeros(weight.shape, accumulation_dtype(weight.dtype), like=x)
    d_weight = _as_they_arrive(x, axis_name, add, zeros).astype(weight.dtype)
    # The weight [D, *F_X] has one dim of inputs, D: it becomes [*F_X, D].
    d_x: Any = _matmul_reduce_scatter(cotangent, _transposed(weight, 1), axis_name, axis)
    # The cotangent has the wider of the dtypes of `x` and the weight.
    return d_x.astype(x.dtype), d_weight


_all_gather_matmul.defvjp(_all_gather_matmul_forward, _all_gather_matmul_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _matmul_reduce_scatter(x, weight, axis_name, dim):
    """Returns this device's block, along `dim`, of the sum over devices of `x` times the weight.

    The derivative is written by hand, so that the products in it overlap with messages too.
    """
    n = axis_size(axis_name)

    def product(j):
        """Returns this device's term of device j's block: the block's rows of `x`, times
        `weight`."""
        # All dims of the weight [*F, D] but the last are summed over. If both have 16 bits,
        # so has the term, as the partial sums have: these are sent, and in float32 they would take
        # twice the bytes.
        return jnp.tensordot(_block(x, j, dim, x.shape[dim] // n), weight, axes=weight.ndim - 1)

    return _towards_their_owner(product, axis_name)


def _matmul_reduce_scatter_forward(x, weight, axis_name, dim):
    return _matmul_reduce_scatter(x, weight, axis_name, dim), (x, weight)


def _matmul_reduce_scatter_backward(axis_name, dim, residuals, cotangent):
    """Returns the gradients of `x`, [*batch, *F], and of the weight, [*F, D].

    One gather of the cotangent, whose dim `dim` is split over the devices, gives the gradients of
    `x` and of the weight.
    """
    x, weight = residuals
    # `transposed` is [D, *F]; `batch` is the number of dims of `*batch`.
    transposed, batch = _transposed(weight, weight.ndim - 1), x.ndim - weight.ndim + 1

    def multiply_and_add(gradients, j, block):
        """Returns the gradients of `x` and of the weight, updated by device j's block of the
        cotangent."""
        d_x, d_weight = gradients
        # The block's rows of `d_x`, and the block's term of the sum `d_weight`.
        rows = jnp.tensordot(block, transposed, axes=1)
        d_x = _put(d_x, rows.astype(x.dtype), j, dim)
        return d_x, d_weight + _outer(_block(x, j, dim, cotangent.shape[dim]), block, batch)

    zeros = (
        _zeros(x.shape, x.dtype, like=x),
        _zeros(weight.shape, accumulation_dtype(weight.dtype), like=x),
    )
    d_x, d_weight = _as_they_arrive(cotangent, axis_name, multiply_and_add, zeros)
    return d_x, d_weight.astype(weight.dtype)


_matmul_reduce_scatter.defvjp(_matmul_reduce_scatter_forward, _matmul_reduce_scatter_backward)


def _as_they_arrive(x, axis_name: AxisName, visit: Callable[..., Any], carry):
    """Returns `carry` after `visit(carry, j, device j's x)` for every j.

    The device's own `x` is visited first, then the `x` of the other devices, the nearest on both
    sides first. In the table of messages of `_from_both_sides`, the blocks that travel farthest are
    sent first. A gather runs the table backwards, so these blocks arrive last.
    """

    def write(carry, _, j, block):  # `_` is the number of the table: there is only one
        return visit(carry, j, block)

    # A table is a list of rounds of messages.
    table = _from_both_sides(axis_size(axis_name))
    # `unrolled` is the most hops that are written out instead of run as a loop. It is infinite: XLA
    # overlaps products with messages only outside loops.
    return gather([table], [x], write, carry, axis_name, unrolled=math.inf)


def _towards_their_owner(product: Callable[..., Any], axis_name: AxisName):
    """Returns, on device j, the sum over devices of `product(j)`.

    The partial sums travel to their owner, device j, around the ring in both directions at once.
    """

    def term(_, j):  # `_` is the number of the table: there is only one
        return product(j)

    table = _from_both_sides(axis_size(axis_name))
    # `unrolled` is the most hops that are written out instead of run as a loop. It is infinite: XLA
    # overlaps products with messages only outside loops.
    (total,) = scatter([table], term, axis_name, unrolled=math.inf)
    return total


def _alike(x, weight, axis_name):
    """Returns `x` and the weight, the operands of a product, typed as varying along the same axes.

    These axes are `axis_name` and all axes along which one of the operands varies. The gradients
    vary along all these axes, and JAX demands that a custom derivative returns gradients of the
    operands' types. So `varying` casts each operand to vary along all these axes. The transpose of
    the cast sums the operand's gradient over the axes that the cast added.
    """
    everywhere = (*axes(axis_name), *varying_axes(x), *varying_axes(weight))
    return varying(x, everywhere), varying(weight, everywhere)


def _outer(x, y, batch: int):
    """Returns the outer product of `x` and `y`, summed over the batch.

    The shapes are `[*batch, D], [*batch, *F] -> [D, *F]`; `batch` is the number of batch dims. The
    result is in float32 or wider.
    """
    dims = list(range(batch))
    kind = accumulation_dtype(x.dtype)
    return jnp.tensordot(x, y, axes=(dims, dims), preferred_element_type=kind)


def _transposed(weight, inputs: int):
    """Returns the weight `[*inputs, *outputs]` as `[*outputs, *inputs]`.

    `inputs` is the number of input dims of the weight.
    """
    return jnp.moveaxis(weight, range(inputs), range(-inputs, 0))


def _block(x, j, dim: int, length: int):
    """Returns block j of `x`, which is cut along `dim` into blocks of size `length`."""
    return lax.dynamic_slice_in_dim(x, j * length, length, dim)


def _put(y, block, j, dim: int):
    """Returns `y` with its block j along `dim` replaced by `block`."""
    return lax.dynamic_update_slice_in_dim(y, block, j * block.shape[dim], dim)


def _zeros(shape, dtype, *, like):
    """Returns zeros, typed as varying along the axes along which `like` varies."""
    return varying(jnp.zeros(shape, dtype), varying_axes(like))


def _times(shape, dim: int, n: int):
    """Returns `shape` with the dim `dim` n times as long."""
    return (*shape[:dim], n * shape[dim], *shape[dim + 1 :])


def _check_not_last(function: str, argument: str, dim: int, shape):
    """Raises `ValueError` if `dim` is the last dim of `shape`: the shape of `x`, or of `x` times
    the weight.

    The last dim of `x` is summed over, and the last dim of the product comes from the weight. Only
    dims of the batch can be gathered or scattered. The message begins with `function`, the caller's
    name, and `argument`, the name of the argument that gives `dim`.
    """
    if dim == len(shape) - 1:
        raise ValueError(
            f"{function}: {argument}={dim} is the last dim of shape {shape}. The last dim is also "
            "a dim of the weight, and only dims of the batch can be gathered or scattered. Use one "
            f"of the dims {list(range(dim))} before it."
        )
