"""Collectives that send int8: each block of numbers as 8-bit integers and one power of two.

Int8 is accurate enough for gradients, and needs a quarter of the bytes: use `quantized("data")` for
the data axis. Rounding harms activations, and the sums of a cross-entropy, more than gradients: a
small GPT-2 that sent int8 along its tensor axis ended with a loss 20 % higher.

Let a be the largest magnitude in a block of `block_size` numbers. The scale s of the block is the
largest power of two that is at most a / 64, but at least the type's smallest normal number. Each
number x of the block is sent as the integer round(x / s), clipped to -127 .. 127, and s is sent as
its exponent. This is the format MXINT8 of the OCP Microscaling Formats specification (2023).
Multiplying by a power of two is exact. So the error of Q(x), the number that arrives for x, comes
only from rounding and clipping:

    |Q(x) - x| <= a / 127        (or the type's smallest normal number, if that is greater)

The rounding error, x - Q(x), is computed without rounding: `ErrorFeedback` adds this error to the
input of the next call, so nothing is lost. In a block whose largest magnitude is at most 127, whole
numbers pass unchanged. A block with an infinity or NaN becomes NaN.

Feedback helps optimizers that are linear in the gradients. After 40 steps of SGD with momentum,
with feedback, the weights of a small GPT-2 were nine times as close to the exact run's weights as
without feedback. AdamW is not linear: it divides by the root of a mean of squared gradients. So a
correction in the next step does not cancel the error, but acts as noise. After 200 steps of AdamW
the held-out loss was above the loss of the exact run: by 0.4 % without feedback, and by 1.1 % with
feedback.

An array is cut into n parts, one for each device, and each part into blocks. A device quantises its
term of part j once and sends it straight to device j. Device j adds the terms of its own part in
float32 and quantises the sum, which a ring all-gather passes on to all. So a number is rounded
twice for any n. A ring of partial sums would round again in each of its n - 1 hops, with an error
that grows with the partial sum: if a is the largest magnitude on each device, the sum of k terms is
rounded with an error of up to k a / 127. On average over the hops, this bound is n/2 times the
bound for one term.

| function | bytes a device sends, of S bytes of float32, all but the last block full | hops |
|---|---|---|
| `reduce_scatter` | (n - 1)/n (1 + 1/block_size) S/4 | n - 1 |
| `all_gather` | (n - 1) (1 + 1/block_size) S/4 | n - 1 |
| `all_reduce` | 2 (n - 1)/n (1 + 1/block_size) S/4 | 2 (n - 1) |

With blocks of 32 a device sends 0.258 of the exact ring's bytes. (float64 sends two bytes per
exponent.) A hop is one message, of integers and exponents together. In hop k of the reduction, each
device sends to the device k places after it. On a switch, hop k is as fast as a hop to a neighbour.
On a ring of direct links, hop k crosses k links.

The functions take the same types, trees and axes as those of `ring`. The derivative ignores the
rounding of the forward pass. The messages of the backward pass are int8 too. On an axis of one
device nothing is sent or rounded. Leaves with fewer numbers than a block (a loss, a norm) are sent
by the exact ring, and so are leaves of integers or complex numbers.

Sources: Rouhani et al., Microscaling data formats for deep learning (arXiv 2310.10537); Seide et
al., 1-bit stochastic gradient descent (2014), for error feedback; Dettmers, 8-bit approximations
for parallelism (arXiv 1511.04561).
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int8

from parallax._typing import PyTree
from parallax.collectives import cost, drop_in, types
from parallax.collectives.all_to_all import straight
from parallax.collectives.axis import Algorithm
from parallax.collectives.cost import Round, devices
from parallax.collectives.from_table import all_reduce_leaves, messages
from parallax.collectives.tables import ring
from parallax.collectives.types import AxisName, axes, replicated, varying, varying_axes

Tree = TypeVar("Tree", bound=PyTree)

BLOCK = 32  # MXINT8's
# -128 is not used, so that -x becomes the negated integers of x.
LARGEST = 127


def _exact_below_a_block(
    sent: Callable[..., list[Round]], exact: Callable[..., Any]
) -> Callable[..., Sequence[Round]]:
    """Returns a function that computes a collective's rounds of messages, for `cost.priced`.

    The function takes (size, n, itemsize): each device has an array of `size` numbers, each of
    `itemsize` bytes before it is quantised. `n` is a number of devices, or a tuple with the number
    on each of several axes. For an array of one block or more, the result is
    `sent(size, number of all devices, itemsize, block_size)`: the devices of several axes count as
    one row. A shorter array is sent by the collective `exact`, so its rounds are those of `exact`.
    """

    def rounds(size, n, itemsize, *, block_size=BLOCK):
        if size < block_size:
            return cost.rounds(exact, size * itemsize, n, itemsize=itemsize)
        return sent(size, devices(n), itemsize, block_size)

    return rounds


def _scatters(size, n, itemsize, block_size):
    """Returns the rounds of messages of a reduce-scatter of `size` numbers over n devices.

    A device sends n - 1 of its n parts. `itemsize` is the bytes of one number before it is
    quantised.
    """
    part = -(-size // n)
    nbytes = [_nbytes(part, itemsize, block_size)]
    # `straight(n)` sends each part straight to its device, in a message of `nbytes` bytes. For each
    # message that arrives, the device adds `part` numbers in float32 or wider.
    return messages([straight(n)], nbytes, added=[part * max(itemsize, 4)])


def _gathers(size, n, itemsize, block_size):
    """Returns the rounds of messages of a ring all-gather over n devices.

    `size` is the number of numbers that each device has before the gather. `itemsize` is the bytes
    of one number before it is quantised.
    """
    # A ring passes on the bytes as they arrive, so nothing is rounded again on the way. Its table
    # is that of a reduce-scatter: a gather runs it backwards (`back`).
    return messages([ring.table(n)], [_nbytes(size, itemsize, block_size)], back=True)


def _scatters_and_gathers(size, n, itemsize, block_size):
    """Returns the rounds of messages of an all-reduce of `size` numbers over n devices.

    The rounds are those of a reduce-scatter, then those of a gather. `itemsize` is the bytes of
    one number before it is quantised.
    """
    part = -(-size // n)  # a device sums and owns a padded n-th
    return [
        *_scatters(size, n, itemsize, block_size),
        *_gathers(part, n, itemsize, block_size),
    ]


def _nbytes(size, itemsize, block_size):
    """Returns the bytes of `size` numbers as int8, with one exponent per block.

    `itemsize` is the bytes of one number before it is quantised.
    """
    # The exponents of float64 need two bytes: see `_exponent_dtype`.
    exponent = 2 if itemsize == 8 else 1
    return size + -(-size // block_size) * exponent


# `priced` attaches the rounds of messages, from which `cost.of` computes the cost.
@cost.priced(_exact_below_a_block(_scatters_and_gathers, ring.all_reduce), "quantized.all_reduce")
def quantized_all_reduce(x: Tree, axis_name: AxisName, *, block_size: int = BLOCK) -> Tree:
    """Returns an approximate sum over devices, with the same bits on every device.

    The result has the shapes and types of the result of `lax.psum`.

    Over n devices, a leaf is flattened, padded to a multiple of n numbers and cut into n parts, and
    each part is cut into blocks. The error of a number is at most (b + sum of a_i) / 127. Here a_i
    is the largest magnitude in the number's block on device i, and b is the largest magnitude in
    the same block of the sum. The sum of a_i is over all devices except the one that adds up the
    block, whose own term is not rounded. The float additions, and the cast of the sum to 16 bits if
    `x` has 16, add further rounding.

    Raises:
        ValueError: `block_size` is below 1.
    """

    def total(x, axis_name):
        # The second result, the rounding errors, is not used without feedback.
        return _all_reduce(_widened(x), axis_name, block_size)[0].astype(x.dtype)

    # `all_reduce_leaves` gives `total` the result type and the transpose of `lax.psum`.
    def quantized_leaf(x):
        return all_reduce_leaves(x, axis_name, total)

    def exact(x):
        return ring.all_reduce(x, axis_name)

    # Floating-point leaves of a block or more are quantised; `exact` sends the other leaves.
    return _map_leaves(x, block_size, quantized_leaf, exact)


# `priced` attaches the rounds of messages: those of `ring` for an array shorter than a block.
@cost.priced(_exact_below_a_block(_scatters, ring.reduce_scatter), "quantized.reduce_scatter")
def quantized_reduce_scatter(
    x: Tree,
    axis_name: AxisName,
    *,
    scatter_dimension: int = 0,
    tiled: bool = False,
    block_size: int = BLOCK,
) -> Tree:
    """Returns this device's part of an approximate sum over devices.

    The result has the shapes and types of the result of `lax.psum_scatter`.

    The error of a number is at most (sum of a_i over the other devices) / 127. Here a_i is the
    largest magnitude in the number's block of `block_size` numbers on device i. This device's own
    term is not quantised. The float additions, and the cast of the sum to 16 bits if `x` has 16,
    add further rounding. The transpose is `quantized_all_gather`.

    Raises:
        ValueError: `block_size` is below 1; a leaf lacks the dim `scatter_dimension`, or this dim
            cannot be cut into equal parts, one for each device; or no `shard_map` over the axis is
            around the call.
    """
    # The reduce-scatter and the all-gather of one array, in int8. `drop_in` makes from this pair a
    # function like that of `lax`, with its options, types and derivative.
    slices = _slices(block_size)

    def quantized_leaf(x):
        return drop_in.reduce_scatter_leaf(x, axis_name, slices, scatter_dimension, tiled)

    def exact(x):
        options = {"scatter_dimension": scatter_dimension, "tiled": tiled}
        return ring.reduce_scatter(x, axis_name, **options)

    # Floating-point leaves of a block or more are quantised; `exact` sends the other leaves.
    return _map_leaves(x, block_size, quantized_leaf, exact)


@cost.priced(_exact_below_a_block(_gathers, ring.all_gather), "quantized.all_gather")
def quantized_all_gather(
    x: Tree, axis_name: AxisName, *, axis: int = 0, tiled: bool = False, block_size: int = BLOCK
) -> Tree:
    """Gathers the `x` of every device, sent as int8. The result has the same bits on all devices.

    The result has the shapes and types of the result of `lax.all_gather`.

    The error of a number is at most a / 127, where a is the largest magnitude in the number's block
    of `block_size` numbers. A device's own part is rounded too. The transpose is
    `quantized_reduce_scatter`.

    Raises:
        ValueError: `block_size` is below 1; a leaf lacks the dim `axis`; or no `shard_map` over the
            axis is around the call.
    """
    # The reduce-scatter and the all-gather of one array, in int8. `drop_in` makes from this pair a
    # function like that of `lax`, with its options, types and derivative.
    slices = _slices(block_size)

    def quantized_leaf(x):
        return drop_in.all_gather_leaf(x, axis_name, slices, axis, tiled)

    def exact(x):
        return ring.all_gather(x, axis_name, axis=axis, tiled=tiled)

    # Floating-point leaves of a block or more are quantised; `exact` sends the other leaves.
    return _map_leaves(x, block_size, quantized_leaf, exact)


@dataclass(frozen=True)
class ErrorFeedback:
    """int8 collectives that add the rounding error of a call to the input of the next call.

        feedback = ErrorFeedback("data")
        error = feedback.initial(gradients)
        gradients, error = feedback.all_reduce(gradients, error)

    The argument `error` has the rounding errors of the previous call, and the returned error has
    those of this call. Let `x_i` be the input on device i, `error_i` the argument `error`, and
    `new_error_i` the returned error. Up to the rounding of the float additions,

        result + sum over i of new_error_i = sum over i of (x_i + error_i)

    So nothing is lost: after any number of calls, the sum of their results has only the error of
    the last call. An exception is an `all_reduce` of a 16-bit `x`: it rounds the sum to 16 bits,
    and `new_error_i` does not include this rounding. For a block (the numbers that share a scale)
    with an infinity or NaN, the new error is 0. There is no derivative: use an `ErrorFeedback` on
    gradients, after differentiation.

    Args:
        axis_name: the mesh axis, or several.
        block_size: how many numbers share a scale.

    Raises:
        ValueError: for a leaf of shape [*dims], the array of rounding errors does not have the
            shape [1, *dims]; or `block_size` is below 1.
    """

    axis_name: AxisName
    block_size: int = BLOCK

    def initial(self, x: PyTree) -> PyTree:
        """Returns a tree of zeros: the argument `error` of the first call of `all_reduce` or
        `reduce_scatter`.

        The error of a leaf `[*dims]` has the shape `[1, *dims]`, in float32 or wider. The error is
        typed as varying along `axis_name`, since later errors differ between devices. Its dim of
        size 1 stands for the device, so the spec of the error for `mesh.spmd` is
        `P(axis_name, *spec of the leaf)`.
        """

        def leaf(x):
            """Returns zeros [1, *dims] for one leaf."""
            x = jnp.asarray(x)
            zeros = jnp.zeros((1, *x.shape), _wide(x.dtype))
            return varying(zeros, (*varying_axes(x), *axes(self.axis_name)))

        return jax.tree.map(leaf, x)

    def all_reduce(self, x: Tree, error: PyTree) -> tuple[Tree, PyTree]:
        """Returns `quantized.all_reduce` of `x + error`, and this device's new error.

        `error` is `initial(x)`, or the error that the previous call returned. If `x` has 16 bits,
        the new error does not include the error of rounding the sum to 16 bits.
        """
        axis_name = self.axis_name

        def leaf(x, error):
            """Returns the sum of one leaf over the devices, and this device's new rounding errors.

            The errors have the shape `[1, *dims]`, where `[*dims]` is the shape of the leaf `x`.
            """
            total, error = _all_reduce(_with(x, error, axis_name), axis_name, self.block_size)
            # All devices have the same bits, which their types cannot show: so it is declared.
            return replicated(total, axis_name).astype(x.dtype), error[None]

        # Without rounding there is no new error: the old one stays 0.
        def exact(x, error):
            return ring.all_reduce(x, axis_name), error

        # The pairs (result, error) become two trees with the structure of `x`.
        return _unzipped(_map_leaves(x, self.block_size, leaf, exact, error), x)

    def reduce_scatter(
        self, x: Tree, error: PyTree, *, scatter_dimension: int = 0, tiled: bool = False
    ) -> tuple[Tree, PyTree]:
        """Returns `quantized.reduce_scatter` of `x + error`, and this device's new error.

        `error` is `initial(x)`, or the error that the previous call returned. If `x` has 16 bits,
        the new error includes the error of rounding the result to 16 bits.
        """
        axis_name, n = self.axis_name, types.axis_size(self.axis_name)

        def leaf(x, error):
            """Returns this device's slice of the sum over the devices, and this device's new
            rounding errors.

            The errors have the shape `[1, *dims]`, where `[*dims]` is the shape of the leaf `x`.
            """
            dim = drop_in.dim_of("scatter_dimension", scatter_dimension, x.ndim)
            drop_in.check_divides("reduce_scatter", "scatter_dimension", x.shape, dim, n, tiled)
            # `_with` adds the error of the previous call. The parts of the devices are [n, ...].
            parts = drop_in.split_blocks(_with(x, error, axis_name), dim, axis_name, tiled)
            # The sum of this device's part, and the errors of its terms for all parts, [n, size].
            total, errors = _reduce(parts.reshape(parts.shape[0], -1), axis_name, self.block_size)
            result = total.astype(x.dtype)
            # `_finite` makes an infinity or NaN 0: it would be added in every later call.
            result_error = _finite(total - result.astype(total.dtype))
            # The own part was not quantised: its only error is the rounding to the result's dtype.
            errors = jnp.where(_is_local(errors, axis_name), result_error, errors)
            new_error = drop_in.merge_blocks(errors.reshape(parts.shape), dim, tiled)
            return result.reshape(parts.shape[1:]), new_error[None]

        # Without rounding there is no new error: the old one stays 0.
        def exact(x, error):
            options = {"scatter_dimension": scatter_dimension, "tiled": tiled}
            return ring.reduce_scatter(x, axis_name, **options), error

        # The pairs (result, error) become two trees with the structure of `x`.
        return _unzipped(_map_leaves(x, self.block_size, leaf, exact, error), x)


def quantize(x: Float[Array, "*lead size"], block_size: int) -> Int8[Array, "*lead message"]:
    """Returns `x` as one message of bytes: `size` integers, then the exponents of the blocks'
    scales.

    The last dim is cut into ceil(size / block_size) blocks, and each block has one exponent.
    """
    blocks = _blocks(x, block_size)
    peak = jnp.max(jnp.abs(blocks), axis=-1)
    finite = jnp.isfinite(peak)
    # The second result of `frexp` is e with peak < 2**e. The exponent is e - 7, so the block's
    # numbers are below 128 * 2**exponent.
    exponent = jnp.frexp(jnp.where(finite, peak, jnp.zeros_like(peak)))[1] - 7
    # For a smaller exponent this type has no normal power of two, and its inverse would overflow.
    exponent = jnp.maximum(exponent, jnp.finfo(x.dtype).minexp)
    scaled = blocks * _power_of_two(-exponent, x.dtype)[..., None]
    # Values from 127.5 to 128 would round to 128, which int8 lacks.
    rounded = jnp.clip(jnp.round(scaled), -LARGEST, LARGEST)
    integers = jnp.where(finite[..., None], rounded, jnp.zeros_like(scaled)).astype(jnp.int8)
    integers = integers.reshape(*x.shape[:-1], -1)[..., : x.shape[-1]]
    code = _exponent_dtype(x.dtype)
    # The smallest code marks a block that is not finite.
    codes = jnp.where(finite, exponent, jnp.iinfo(code).min).astype(code)
    code_bytes = lax.bitcast_convert_type(codes, jnp.int8).reshape(*x.shape[:-1], -1)
    return jnp.concatenate([integers, code_bytes], -1)


def dequantize(
    message: Int8[Array, "*lead message"], size: int, dtype: jnp.dtype, block_size: int
) -> Float[Array, "*lead size"]:
    """Returns the `size` numbers of a message that `quantize` made.

    The numbers are integers times powers of two, or NaN in a block that was not finite.
    """
    code = _exponent_dtype(dtype)
    # The first `size` bytes are the integers; the exponents, one per block, follow.
    exponents = message[..., size:]
    # A bitcast joins the last dim, the two bytes of an int16, into one number.
    exponents = exponents if code == jnp.int8 else exponents.reshape(*message.shape[:-1], -1, 2)
    exponents = lax.bitcast_convert_type(exponents, code).astype(jnp.int32)
    # The smallest code marks a block that was not finite.
    scales = jnp.where(exponents == jnp.iinfo(code).min, jnp.nan, _power_of_two(exponents, dtype))
    blocks = _blocks(message[..., :size], block_size).astype(dtype) * scales[..., None]
    return blocks.reshape(*message.shape[:-1], -1)[..., :size]


def _all_reduce(x, axis_name, block_size):
    """Returns the sum of `x` over devices, and this device's rounding errors.

    The sum and the errors have the shape and the dtype of `x`, which is float32 or wider.
    """
    n = types.axis_size(axis_name)
    # Row j is the part that device j adds up.
    flat = jnp.pad(x.reshape(-1), (0, -x.size % n)).reshape(n, -1)
    total, error = _reduce(flat, axis_name, block_size)
    result, gather_error = _gather(total, axis_name, block_size)
    # A device's own part is rounded only in the gather; its terms for the other parts only before
    # the sum. So each number has one error.
    error = jnp.where(_is_local(error, axis_name), gather_error[None], error)
    return tuple(y.reshape(-1)[: x.size].reshape(x.shape) for y in (result, error))


def _slices(block_size):
    """Returns a reduce-scatter and an all-gather of one array, whose messages are all int8.

    `drop_in` makes replacements of the collectives of `lax` from these two functions. The rounding
    errors, the second results of `_reduce` and `_gather`, are not used.
    """

    def scattered(x, dim, axis_name):
        """Returns this device's slice, along `dim`, of the sum over devices."""
        # [n, *block], with the slice for device j in row j; True: the dim is cut into n blocks.
        blocks = drop_in.split_blocks(x, dim, axis_name, True)
        # The rounding errors, `_`, are not used.
        total, _ = _reduce(_widened(blocks).reshape(blocks.shape[0], -1), axis_name, block_size)
        return total.reshape(blocks.shape[1:]).astype(x.dtype)

    def gathered(x, dim, axis_name):
        """Returns all devices' rounded `x`, joined along `dim`."""
        # `_widened` casts to float32 or wider: float16 has no scale for small numbers.
        blocks, _ = _gather(_widened(x).reshape(-1), axis_name, block_size)
        # True: the blocks are joined along the existing dim.
        return drop_in.merge_blocks(blocks.reshape(-1, *x.shape).astype(x.dtype), dim, True)

    return drop_in.Slices(scattered, gathered)


def _reduce(parts, axis_name, block_size):
    """Returns this device's part of the sum over devices, and the rounding errors of the numbers
    that this device sends.

    The sum has n parts, one for each device. Row j of `parts` is this device's term of part j, and
    row j of the errors is the rounding error of this term. The shapes are
    `[n, size] -> [size], [n, size]`. The errors of this device's own part are 0, since the exact
    numbers of this part are added. An infinite or NaN error is set to 0 (`_finite`): otherwise it
    would come back in every later call.
    """
    is_local, size = _is_local(parts, axis_name), parts.shape[1]
    # Row j goes to device j. All devices' terms of this device's part arrive, and are added.
    sent = quantize(parts, block_size)
    received = ring.all_to_all(sent, axis_name, 0, 0)

    def values(message):
        """Returns the decoded numbers of `message`: the shape [n, bytes] becomes [n, size].

        This device's row is not decoded: it is taken from `parts`, the numbers before rounding.
        """
        return jnp.where(is_local, parts, dequantize(message, size, parts.dtype, block_size))

    return jnp.sum(values(received), 0), _finite(parts - values(sent))


def _gather(part, axis_name, block_size):
    """Returns the rounded parts of the array from all devices, and the rounding error of this
    device's own part.

    The shapes are `[size] -> [n, size], [size]`. An error that would be infinite or NaN is 0.
    """
    if types.axis_size(axis_name) == 1:  # nothing is sent, so nothing is rounded
        return part[None], jnp.zeros_like(part)
    sent = quantize(part, block_size)

    def values(message):
        return dequantize(message, part.size, part.dtype, block_size)

    # The own part is taken from its message too, so all devices have the same bits.
    return values(ring.all_gather(sent, axis_name)), _finite(part - values(sent))


def _is_local(parts, axis_name):
    """Returns a mask of shape [n, 1] that is true for this device's row of `parts`, [n, size]."""
    return jnp.arange(parts.shape[0], dtype=jnp.int32)[:, None] == types.axis_index(axis_name)


def _map_leaves(x, block_size, quantized_leaf, exact, *more):
    """Returns `quantized_leaf` of some leaves of the tree `x`, and `exact` of the other leaves.

    `quantized_leaf` and `exact` are functions. `quantized_leaf` gets the floating-point leaves that
    have `block_size` numbers or more. `exact` gets all other leaves. For a shorter leaf (a loss, a
    norm), int8 would save only a few bytes. `more` are trees like `x`: both functions also get the
    corresponding leaf of each of these trees.
    """
    if block_size < 1:
        raise ValueError(
            f"quantized: block_size must be 1 or more; got {block_size}. The usual size is {BLOCK}."
        )

    def leaf(x, *more):
        """Returns the result for one leaf `x`; `more` has the corresponding leaves of the other
        trees."""
        x = jnp.asarray(x)
        is_quantized = jnp.issubdtype(x.dtype, jnp.floating) and x.size >= block_size
        return (quantized_leaf if is_quantized else exact)(x, *more)

    return jax.tree.map(leaf, x, *more)


def _unzipped(pairs, x):
    """Returns two trees like `x`, from `pairs`, a tree like `x` with a pair for each leaf."""
    # (0, 0) stands for any pair.
    return jax.tree.transpose(jax.tree.structure(x), jax.tree.structure((0, 0)), pairs)


def _with(x, error, axis_name):
    """Returns the leaf `x`, [*dims], plus its rounding error from the previous call: `error`,
    [1, *dims].

    The sum, [*dims], has the dtype of the error, float32 or wider, and varies along `axis_name`.
    """
    if error.shape != (1, *x.shape):
        raise ValueError(
            f"quantized: the error of a leaf of shape {x.shape} must have the shape "
            f"{(1, *x.shape)}, as ErrorFeedback.initial makes it; got {error.shape}. Carry it in "
            f"and out of mesh.spmd with the spec P({axis_name!r}, *spec of the leaf)."
        )
    return _without_derivative(varying(x.astype(error.dtype), axis_name) + error[0])


@jax.custom_jvp
def _without_derivative(x):
    """Returns `x`. Raises `ValueError` if it is differentiated."""
    return x


@_without_derivative.defjvp
def _refuse_derivative(primals, tangents):
    # Rounding has the derivative 0: the terms of all other devices would be missing.
    raise ValueError(
        "ErrorFeedback has no derivative. Use it on gradients, after they are computed; inside a "
        "function that is differentiated, use the functions of collectives.quantized."
    )


def _blocks(x, block_size):
    """Returns `x` with its last dim cut into blocks; the last block is padded with zeros.

    The shapes are `[*lead, size] -> [*lead, blocks, block_size]`.
    """
    padding = [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % block_size)]
    return jnp.pad(x, padding).reshape(*x.shape[:-1], -1, block_size)


def _power_of_two(exponent, dtype):
    """Returns 2**exponent, exactly."""
    return jnp.ldexp(jnp.ones((), dtype), exponent)


def _exponent_dtype(dtype):
    """Returns the integer dtype in which `quantize` stores the exponents of blocks of `dtype`.

    The exponents run from `minexp` to `maxexp` - 7 of `dtype`. In float32 that is from -126 to 121,
    which int8 holds, and -128 is left to mean NaN. The exponents of float64 need int16.
    """
    return jnp.dtype(jnp.int8 if jnp.finfo(dtype).maxexp <= 128 else jnp.int16)


def _finite(error):
    """Returns the errors, with 0 in place of infinities and NaN.

    An infinity or NaN in the errors would be added in every later call.
    """
    return jnp.where(jnp.isfinite(error), error, jnp.zeros_like(error))


def _wide(dtype):
    """Returns the dtype in which to sum: float32 or wider for floats, else `dtype` itself."""
    return types.accumulation_dtype(dtype) if jnp.issubdtype(dtype, jnp.floating) else dtype


def _widened(x):
    """Returns floats as float32 or wider: float16 has no power of two small enough to be the scale
    of small numbers, and sums in 16 bits are less accurate."""
    return x.astype(_wide(x.dtype))


def quantized_in(block_size: int) -> Algorithm:
    """Returns `quantized` with blocks of `block_size` numbers instead of 32.

    The functions of this algorithm raise `ValueError` if `block_size` is below 1.
    """
    # The all-reduce, the reduce-scatter and the all-gather, in the order of `Algorithm`'s fields.
    functions = (functools.partial(f, block_size=block_size) for f in _FUNCTIONS)
    return Algorithm(f"quantized_in({block_size})", *functions)


_FUNCTIONS = quantized_all_reduce, quantized_reduce_scatter, quantized_all_gather
quantized = Algorithm("quantized", *_FUNCTIONS)
