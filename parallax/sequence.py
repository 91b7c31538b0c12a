"""Sequence parallelism: between the layers that the devices of an axis share, each has the residual
stream of its own tokens.

Legend: B batch, T tokens, D width, X the tensor axis, t its size. An all-reduce is a reduce-scatter
and an all-gather; here they stand apart, and what lies between them (residual stream, norms,
dropout) is computed and kept for T/t tokens on each device, not for all T on all. `gather_from`
gathers the tokens before a column-parallel layer, `reduce_scatter_to` sums and scatters them after
a row-parallel one; each is the other's transpose, and together they move as much as Megatron's
pair.

What is the same on all devices (norms, biases, positions) now sees some tokens on each, so its
gradients are parts of a sum: wrap the gradient function in `grads.summed`.

Source: Korthikanti et al., Reducing activation recomputation in large transformer models (arXiv
2205.05198), section 4.2.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped

from parallax import remat, tensor
from parallax.collectives import Axis, AxisLike, combined_axis, matmul
from parallax.collectives.types import linear, replicated, varying
from parallax.tensor import Comms


def gather_from(
    x: Float[Array, "batch tokens_shard width"], axis: AxisLike
) -> Float[Array, "batch tokens width"]:
    """Returns `A[B, T_X, D] -> A[B, T, D]`: (t - 1)/t of the result's bytes a device.

    Its transpose is `reduce_scatter_to`.

    The result bears the name that `remat.gathers` looks for, to be gathered again in the backward
    pass instead of kept.
    """
    axis = Axis.of(axis)

    def gather(x):
        return axis.all_gather(x, axis=1, tiled=True)

    def scatter(cotangent):
        return axis.reduce_scatter(cotangent, scatter_dimension=1, tiled=True)

    return linear(x, forward=gather, backward=scatter, name=remat.GATHERED)


def reduce_scatter_to(
    x: Float[Array, "batch tokens width"], axis: AxisLike
) -> Float[Array, "batch tokens_shard width"]:
    """Returns `A[B, T, D] {U_X} -> A[B, T_X, D]`: (t - 1)/t of the bytes of `x` a device.

    Its transpose is `gather_from`.

    Raises:
        ValueError: the tokens do not divide by the devices.
    """
    axis = Axis.of(axis)
    _check(x.shape[1], axis)
    return axis.reduce_scatter(x, scatter_dimension=1, tiled=True)


def column(
    x: Float[Array, "batch tokens_shard inputs"],
    weight: Float[Array, "inputs *outputs_shard"],
    bias: Float[Array, "*outputs_shard"] | None,
    axis: AxisLike,
    *,
    all_gather_matmul: Callable[..., Any] | None = None,
) -> Float[Array, "batch tokens *outputs_shard"]:
    """Returns a column-parallel layer:
    `A[B, T_X, I] -> gathered · W[I, J_X] + b[J_X] -> [B, T, J_X]`.

    It takes what `tensor.column` takes; with `collectives.matmul.all_gather_matmul` it multiplies
    while the tokens travel.

    Raises:
        ValueError: the weight does not take all inputs.
    """
    tensor.check_column("sequence.column", x.shape[-1:], weight, axis)
    # The function is passed and not chosen here, so that whoever does not overlap need not import
    # it.
    if all_gather_matmul is None:
        y = jnp.tensordot(gather_from(x, axis), weight, axes=1)
    else:
        y = all_gather_matmul(x, weight, Axis.of(axis).names, axis=1)
    return y if bias is None else tensor.add_bias(y, bias)


def row(
    x: Float[Array, "batch tokens *inputs_shard"],
    weight: Float[Array, "*inputs_shard outputs"],
    bias: Float[Array, " outputs"] | None,
    axis: AxisLike,
    *,
    matmul_reduce_scatter: Callable[..., Any] | None = None,
) -> Float[Array, "batch tokens_shard outputs"]:
    """Returns a row-parallel layer:
    `A[B, T, I_X] · W[I_X, J] {U_X} -> scattered [B, T_X, J] + b[J]`.

    It takes what `tensor.row` takes; with `collectives.matmul.matmul_reduce_scatter` it multiplies
    while the sums travel.

    Raises:
        ValueError: the tokens do not divide by the devices, or the weight does not take the inputs
            of this device.
    """
    axis = Axis.of(axis)
    tensor.check_row("sequence.row", x, weight, axis)
    _check(x.shape[1], axis)
    # The sums have no name for `remat`: to compute them again would take the products too.
    if matmul_reduce_scatter is None:
        y = reduce_scatter_to(jnp.tensordot(x, weight, axes=weight.ndim - 1), axis)
    else:
        y = matmul_reduce_scatter(x, weight, axis.names, scatter_dimension=1)
    return y if bias is None else tensor.add_bias(y, bias)


def local_tokens(x: Shaped[Array, "..."], axis: AxisLike, dim: int) -> Shaped[Array, "..."]:
    """Returns `A[T] -> A[T_X]`: what of `x` belongs to this device's tokens, which are its dim
    `dim`.

    Nothing moves.

    Raises:
        ValueError: that dim does not divide by the devices.
    """
    axis = Axis.of(axis)
    _check(x.shape[dim], axis)
    # All devices have `x` whole, so each cuts its own tokens from it and nothing is sent.
    share = x.shape[dim] // axis.size()
    return lax.dynamic_slice_in_dim(x, axis.index() * share, share, dim)


def comms(
    axis: AxisLike,
    *,
    shared: AxisLike = (),
    all_gather_matmul: Callable[..., Any] | None = None,
    matmul_reduce_scatter: Callable[..., Any] | None = None,
) -> Comms:
    """Returns the residual stream's tokens split over `axis`.

    Over the axes `shared`, `all_tokens` and `sum_partials` are Megatron's pair.

    By default each layer gathers and then multiplies, or multiplies and then scatters; with the
    functions of `collectives.matmul`, both at once, hop by hop. What is joined raises as
    `reduce_scatter_to` and `local_tokens` do.
    """
    axis = Axis.of(axis)

    # The axes `shared` use the head's tokens in different ways. Between `copy_to` and the gather,
    # their all-reduces are of T/t tokens.
    def all_tokens(x):
        return gather_from(tensor.copy_to(x, shared), axis)

    def sum_partials(x):
        return tensor.reduce_from(reduce_scatter_to(x, axis), shared)

    def all_tokens_alike(x):
        gathered = axis.all_gather(lax.stop_gradient(x), axis=1, tiled=True)
        return replicated(gathered, axis.names)

    return Comms(
        axis,
        combined_axis(shared, axis),
        all_tokens=all_tokens,
        sum_partials=sum_partials,
        column=functools.partial(column, axis=axis, all_gather_matmul=all_gather_matmul),
        row=functools.partial(row, axis=axis, matmul_reduce_scatter=matmul_reduce_scatter),
        local_tokens=lambda x, dim: local_tokens(x, axis, dim),
        # Its gradient is one of the parts that `grads.summed` adds up.
        copy_to=lambda weight: varying(weight, axis.names),
        token_shards=axis.size(),
        over_tokens=axis,
        gathered=all_tokens_alike,
    )


def overlapping(axis: AxisLike, *, shared: AxisLike = ()) -> Comms:
    """Returns `comms` whose layers multiply while the tokens travel: `collectives.matmul`, which
    sends to both neighbours at once.

    Along the layers the tokens are moved by its hops, whatever the algorithm of `axis`; around
    them, by `axis` itself.
    """
    return comms(
        axis,
        shared=shared,
        all_gather_matmul=matmul.all_gather_matmul,
        matmul_reduce_scatter=matmul.matmul_reduce_scatter,
    )


def _check(tokens: int, axis: Axis) -> None:
    devices = axis.size()
    if tokens % devices:
        raise ValueError(
            f"sequence: {tokens} tokens must divide by the {devices} devices of {axis.names!r}. "
            f"Use sequences of {-(-tokens // devices) * devices} tokens, or do not split them."
        )
