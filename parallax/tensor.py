"""Tensor parallelism: one layer's weights split over an axis, in Megatron's pair of a column and a row.

In a column-parallel layer each device holds some of the outputs, in a row-parallel layer some of the inputs, so between the
two nothing moves. `enter` stands before the pair (identity forward, all-reduce backward) and `leave` after it (the reverse).
The axis may be several axes, or `()`: then nothing is split, and the same code runs on one device.

Source: Shoeybi et al., Megatron-LM (arXiv 1909.08053), section 3.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Inexact, Int

from parallax.collectives.replicated import AxisName, axes, linear, varying, varying_axes

AllReduce = Callable[..., Inexact[Array, "*dims"]]


class Joins(NamedTuple):
    """How the devices of an axis come together round the layers that they share: `joins` makes one, or `sequence.joins`.

    The residual stream is [B, T, D] between them, with all tokens on every device or some on each.

    Attributes:
        enter: from the residual stream to all tokens, [B, T, D], whose uses differ between the devices.
        leave: from partial sums for all tokens, [B, T, D], to the residual stream.
        column: `(x, weight, bias)`: a column-parallel layer of the residual stream.
        row: `(x, weight, bias)`: a row-parallel layer back to it.
        own: `(x, dim)`: what of `x` belongs to this device's tokens, which are its dim `dim`.
        parts: the number of devices that the tokens are split over.
    """

    enter: Callable
    leave: Callable
    column: Callable
    row: Callable
    own: Callable
    parts: int


def joins(axis_name: AxisName, *, shared: AxisName = (), all_reduce: AllReduce) -> Joins:
    """Megatron's pair over `axis_name`, all tokens on every device; `enter` and `leave` are over the axes `shared` too."""
    over = {"axis_name": axis_name, "all_reduce": all_reduce}
    everywhere = {"axis_name": (*axes(shared), *axes(axis_name)), "all_reduce": all_reduce}
    return Joins(
        enter=functools.partial(enter, **everywhere),
        leave=functools.partial(leave, **everywhere),
        column=functools.partial(column, **over),
        row=functools.partial(row, **over),
        own=lambda x, dim: x,
        parts=1,
    )


def enter(x: Inexact[Array, "*dims"], axis_name: AxisName, *, all_reduce: AllReduce) -> Inexact[Array, "*dims"]:
    """`x`, whose uses differ between the devices of `axis_name` from here on: Megatron's f.

    Identity forward; backward, one `all_reduce` sums the devices' shares of the cotangent. Its transpose is `leave`.

    Raises:
        ValueError: `x` varies along `axis_name` already, so that there is no one cotangent to sum to.
    """
    already = set(axes(axis_name)) & set(varying_axes(x))
    if already:
        raise ValueError(
            f"tensor.enter needs an x that is the same along {axis_name!r}; this one, of shape {x.shape}, varies along "
            f"{sorted(already)}. Enter once, before the column-parallel layer, and leave after the row-parallel one."
        )
    return linear(x, forward=lambda x: varying(x, axis_name), backward=lambda ct: all_reduce(ct, axis_name))


def leave(x: Inexact[Array, "*dims"], axis_name: AxisName, *, all_reduce: AllReduce) -> Inexact[Array, "*dims"]:
    """The sum of the devices' partial results, on all of them: Megatron's g.

    One `all_reduce` forward; backward the cotangent as it is. Its transpose is `enter`.

    Raises:
        ValueError: `x` is the same along an axis of `axis_name`, so that the sum would count it several times.
    """
    same = set(axes(axis_name)) - set(varying_axes(x))
    if same:
        raise ValueError(
            f"tensor.leave needs partial sums that differ along {axis_name!r}; this x, of shape {x.shape}, is the same along "
            f"{sorted(same)}, and would be counted once a device. Split the weights before it, or do not leave."
        )
    return all_reduce(x, axis_name)


def column(
    x: Float[Array, "*batch inputs"],
    weight: Float[Array, "inputs *outputs_shard"],
    bias: Float[Array, "*outputs_shard"] | None,
    axis_name: AxisName,
    *,
    all_reduce: AllReduce,
) -> Float[Array, "*batch_and_outputs_shard"]:
    """A column-parallel linear layer: `A[B, I] · W[I, J_X] + b[J_X] -> [B, J_X]`. One `all_reduce` of `x`'s size backward.

    The outputs may have several dims, such as heads and head width, any of them split. Raises as `enter` does.
    """
    y = jnp.tensordot(enter(x, axis_name, all_reduce=all_reduce), weight, axes=1)
    return y if bias is None else added(y, bias)


def row(
    x: Float[Array, "*batch_and_inputs_shard"],
    weight: Float[Array, "*inputs_shard outputs"],
    bias: Float[Array, " outputs"] | None,
    axis_name: AxisName,
    *,
    all_reduce: AllReduce,
) -> Float[Array, "... outputs"]:
    """A row-parallel linear layer: `A[B, I_X] · W[I_X, J] + b[J] -> [B, J]`. One `all_reduce` of the result's size forward.

    The inputs may have several dims, the last ones of `x` and the first ones of `weight`. Raises as `leave` does.
    """
    y = leave(jnp.tensordot(x, weight, axes=weight.ndim - 1), axis_name, all_reduce=all_reduce)
    return y if bias is None else added(y, bias)


def embed(
    table: Float[Array, "rows width"], ids: Int[Array, "*batch"], axis_name: AxisName, *, all_reduce: AllReduce
) -> Float[Array, "*batch width"]:
    """The rows `ids` of a table whose rows are split over `axis_name`: `W[V_X, D], ids[B] -> [B, D]`.

    `lookup`, and one `all_reduce` of the result.
    """
    return leave(lookup(table, ids, axis_name), axis_name, all_reduce=all_reduce)


def lookup(table: Float[Array, "rows width"], ids: Int[Array, "*batch"], axis_name: AxisName) -> Float[Array, "*batch width"]:
    """This device's part of `embed`: `W[V_X, D], ids[B] -> [B, D] {U_X}`. Nothing moves.

    Each device looks up the rows it holds and gives zeros for the others. `ids` count over the whole table, and one outside it
    gives zeros.
    """
    row, held = _held(ids, table.shape[0], axis_name)
    return jnp.where(held[..., None], table.at[row].get(mode="clip"), jnp.zeros((), table.dtype))


def cross_entropy(
    logits: Float[Array, "*batch rows"],
    targets: Int[Array, "*batch"],
    axis_name: AxisName,
    *,
    all_reduce: AllReduce,
    vocabulary: int | None = None,
) -> Float[Array, "*batch"]:
    """-log softmax(logits)[targets] in nats, for logits split over `axis_name`, which are never gathered.

    What moves is one maximum (`lax.pmax`) and two sums a position, in one `all_reduce`. Rows from `vocabulary` on are
    padding and count as logits of minus infinity.
    """
    rows = logits.shape[-1]
    row, _ = _held(targets, rows, axis_name)
    columns = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    if vocabulary is not None:
        logits = jnp.where(columns + _first_row(rows, axis_name) < vocabulary, logits, -jnp.inf)
    peak = jnp.max(lax.stop_gradient(logits), axis=-1)
    peak = lax.pmax(peak, axis_name) if axes(axis_name) else peak
    shifted = logits - peak[..., None]
    target = jnp.sum(jnp.where(columns == row[..., None], shifted, jnp.zeros((), shifted.dtype)), axis=-1)
    total, target = leave(jnp.stack([jnp.sum(jnp.exp(shifted), axis=-1), target]), axis_name, all_reduce=all_reduce)
    return jnp.log(total) - target


def _first_row(rows: int, axis_name):
    """The index, in the whole table, of the first row on this device."""
    return lax.axis_index(axis_name) * rows if axes(axis_name) else jnp.zeros((), jnp.int32)


def _held(ids, rows: int, axis_name):
    """Where each id is among this device's rows, and whether it is there at all."""
    row = ids.astype(jnp.int32) - _first_row(rows, axis_name)
    return row, (row >= 0) & (row < rows)


def added(y: Float[Array, "..."], bias: Float[Array, "..."]) -> Float[Array, "..."]:
    """`y + bias`, with the dims of `bias` the last ones of `y`."""
    return y + jnp.expand_dims(bias, range(y.ndim - bias.ndim))
