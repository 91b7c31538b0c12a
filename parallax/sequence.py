"""Sequence parallelism: between the split layers, each device has some tokens of the residual
stream.

Legend: B batch, T tokens, D width, I inputs and J outputs of a layer, X the tensor axis, t devices
on X. `[T_X]` is split over X. `{U_X}` after an array says that the array on each device is one term
of a sum over X.

An all-reduce is a reduce-scatter and then an all-gather. Here the two are separate operations. The
computation between them (residual stream, norms, dropout) is done on each device for only its share
of the tokens, instead of for all tokens on every device. `gather_from` gathers the tokens before a
column-parallel layer. `reduce_scatter_to` sums the partial results after a row-parallel layer, and
scatters the tokens. Each of the two operations is the transpose of the other. In each pass, forward
or backward, the two together send as many bytes as Megatron's one all-reduce in this pass.

Each device uses the parameters that are the same on all devices (norms, biases, positions) only for
its own tokens. So the gradients of these parameters are terms of a sum: wrap the gradient function
in `grads.summed`.

Source: Korthikanti et al., Reducing activation recomputation in large transformer models (arXiv
2205.05198), section 4.2.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped

from parallax import remat, tensor
from parallax.collectives import Axis, AxisLike, combined_axis, matmul
from parallax.collectives.types import axes_of_type, linear, replicated, varying, varying_axes
from parallax.tensor import Comms


def gather_from(
    x: Float[Array, "batch tokens_shard width"], axis: AxisLike
) -> Float[Array, "batch tokens width"]:
    """Returns the tokens of all devices: `A[B, T_X, D] -> A[B, T, D]`.

    With t devices on the axis, each device sends (t - 1)/t of the result's bytes. The transpose is
    `reduce_scatter_to`. The result has the name that `remat.gathers` looks for, so that the
    backward pass can gather the tokens again, and they need not be kept.

    Raises:
        ValueError: `x` is the same along an axis of several devices, so each token would be
            repeated once per device.
    """
    axis = Axis.of(axis)
    _check_shard("sequence.gather_from", x, axis)

    def gather(x):
        return axis.all_gather(x, axis=1, tiled=True)

    def scatter(cotangent):
        return axis.reduce_scatter(cotangent, scatter_dimension=1, tiled=True)

    # `axis` may have an algorithm, such as a ring, by which its collectives send. `linear` makes
    # `scatter` the backward pass, so that the backward pass uses the reduce-scatter of this
    # algorithm. `name` is the result's name.
    return linear(x, forward=gather, backward=scatter, name=remat.GATHERED)


def reduce_scatter_to(
    x: Float[Array, "batch tokens width"], axis: AxisLike
) -> Float[Array, "batch tokens_shard width"]:
    """Returns this device's tokens of the sum over devices: `A[B, T, D] {U_X} -> A[B, T_X, D]`.

    With t devices on the axis, each device sends (t - 1)/t of the bytes of `x`. The transpose is
    `gather_from`.

    Raises:
        ValueError: the number of tokens is not a multiple of the number of devices, or `x` is the
            same along an axis of several devices, so the sum would count `x` once per device.
    """
    axis = Axis.of(axis)
    _check(x.shape[1], axis)
    _check_terms("sequence.reduce_scatter_to", axis, x)
    return axis.reduce_scatter(x, scatter_dimension=1, tiled=True)


def column(
    x: Float[Array, "batch tokens_shard inputs"],
    weight: Float[Array, "inputs *outputs_shard"],
    bias: Float[Array, "*outputs_shard"] | None,
    axis: AxisLike,
    *,
    all_gather_matmul: Callable[..., Any] | None = None,
    on_tpu: bool = False,
) -> Float[Array, "batch tokens *outputs_shard"]:
    """Returns the result of a column-parallel layer, which gathers the tokens first:
    `A[B, T_X, I] -> A[B, T, I] · W[I, J_X] + b[J_X] -> [B, T, J_X]`.

    `weight` and `bias` are this device's parts, split along the outputs. `all_gather_matmul` may be
    `collectives.matmul.all_gather_matmul`, with which a device multiplies some tokens while it
    receives others. `on_tpu` chooses what is fastest on TPUs: the gradient of the bias is a product
    with ones, and without `all_gather_matmul`, a weight `[I, n, H, K]` is applied in n products.

    Raises:
        ValueError: the number of the weight's rows is not the number of inputs of `x`, or `x` is
            the same along an axis of several devices.
    """
    tensor.check_column("sequence.column", x.shape[-1:], weight, axis)
    _check_shard("sequence.column", x, Axis.of(axis))
    # Without the function, all tokens are gathered before the product.
    if all_gather_matmul is None:
        return tensor.affine(gather_from(x, axis), weight, bias, on_tpu=on_tpu)
    y = all_gather_matmul(x, weight, Axis.of(axis).names, axis=1)
    return y if bias is None else tensor.add_bias(y, bias, on_tpu=on_tpu)


def row(
    x: Float[Array, "batch tokens *inputs_shard"],
    weight: Float[Array, "*inputs_shard outputs"],
    bias: Float[Array, " outputs"] | None,
    axis: AxisLike,
    *,
    matmul_reduce_scatter: Callable[..., Any] | None = None,
    on_tpu: bool = False,
) -> Float[Array, "batch tokens_shard outputs"]:
    """Returns the result of a row-parallel layer, with the tokens split over the axis X:
    `A[B, T, I_X] · W[I_X, J] {U_X} -> [B, T_X, J] + b[J]`. `{U_X}` says that each device's product
    is one term of a sum over X. A reduce-scatter adds these terms and splits the tokens.

    `x` (A) and `weight` (W) have this device's inputs, and `bias` (b) has all outputs. With
    `on_tpu` the gradient of the bias is a product with ones, which is faster on TPUs.
    `matmul_reduce_scatter` may be the function of this name in `collectives.matmul`, with which a
    device multiplies while it sends and receives partial sums.

    Raises:
        ValueError: the number of tokens is not a multiple of the number of devices, the weight does
            not take the inputs of this device, or `x` or the weight is the same along an axis of
            several devices.
    """
    axis = Axis.of(axis)
    tensor.check_row("sequence.row", x, weight, axis)
    _check(x.shape[1], axis)
    _check_terms("sequence.row", axis, x, weight)
    # `remat.gathers` recomputes results that are named `remat.GATHERED`. The sums have no such
    # name, since the products would have to be recomputed too.
    if matmul_reduce_scatter is None:
        y = reduce_scatter_to(jnp.tensordot(x, weight, axes=weight.ndim - 1), axis)
    else:
        y = matmul_reduce_scatter(x, weight, axis.names, scatter_dimension=1)
    return y if bias is None else tensor.add_bias(y, bias, on_tpu=on_tpu)


def local_tokens(x: Shaped[Array, "..."], axis: AxisLike, dim: int) -> Shaped[Array, "..."]:
    """Returns this device's share of `x` along its dim of tokens, `dim`: `A[T] -> A[T_X]`.

    All devices must have `x` whole, so nothing is sent. This is not checked: by its type, `x` may
    vary along the axis, as the whole tokens that `gather_from` returns do.

    Raises:
        ValueError: the size of `dim` is not a multiple of the number of devices.
    """
    axis = Axis.of(axis)
    _check(x.shape[dim], axis)
    share = x.shape[dim] // axis.size()
    return lax.dynamic_slice_in_dim(x, axis.index() * share, share, dim)


def comms(
    axis: AxisLike,
    *,
    shared: AxisLike = (),
    all_gather_matmul: Callable[..., Any] | None = None,
    matmul_reduce_scatter: Callable[..., Any] | None = None,
    on_tpu: bool = False,
) -> Comms:
    """Returns the communication of layers that split the tokens of the residual stream over `axis`:
    a `tensor.Comms`, the record of the functions by which a model's layers send data.

    The vocabulary is split over `axis` and also over the axes `shared`, such as the stages of a
    pipeline. Over the axes `shared`, `all_tokens` communicates by `tensor.copy_to`, and
    `sum_partials` by `tensor.reduce_from` (Megatron's pair).

    By default each layer gathers and then multiplies, or multiplies and then scatters. With the
    functions of `collectives.matmul`, a layer multiplies while it gathers or scatters, hop by hop.
    `on_tpu` makes the layers compute in the way that is fastest on TPUs (see `tensor.column`). The
    functions in the returned `Comms` raise `ValueError` if the number of tokens is not a multiple
    of the number of devices.
    """
    axis = Axis.of(axis)

    def all_tokens(x):
        # `copy_to` is before the gather, so that the all-reduce of `copy_to` in the backward pass
        # has only T/t tokens.
        return gather_from(tensor.copy_to(x, shared), axis)

    def sum_partials(x):
        return tensor.reduce_from(reduce_scatter_to(x, axis), shared)

    def all_tokens_alike(x):
        """Returns `x` of all devices, gathered along dim 1, the tokens. `replicated` types the
        result as the same on all devices. `replicated` has no derivative, so `stop_gradient` makes
        the gradient zero. A mixture of experts gathers the experts' ids with this function."""
        gathered = axis.all_gather(lax.stop_gradient(x), axis=1, tiled=True)
        return replicated(gathered, axis.names)

    return Comms(
        axis,
        combined_axis(shared, axis),  # `everywhere`: all axes that share the vocabulary
        all_tokens=all_tokens,
        sum_partials=sum_partials,
        column=functools.partial(
            column, axis=axis, all_gather_matmul=all_gather_matmul, on_tpu=on_tpu
        ),
        row=functools.partial(
            row, axis=axis, matmul_reduce_scatter=matmul_reduce_scatter, on_tpu=on_tpu
        ),
        local_tokens=lambda x, dim: local_tokens(x, axis, dim),
        # `copy_to` is for weights that all devices have whole, such as norms. No all-reduce here:
        # the gradients of these weights are terms of a sum, and `grads.summed` adds them.
        copy_to=lambda weight: varying(weight, axis.names),
        token_shards=axis.size(),
        over_tokens=axis,  # the axis that splits the tokens of the residual stream
        gathered=all_tokens_alike,  # without a gradient, unlike `all_tokens`
    )


def overlapping(axis: AxisLike, *, shared: AxisLike = (), on_tpu: bool = False) -> Comms:
    """Returns a `tensor.Comms` for layers that multiply some tokens while they send other tokens.

    It is the result of `comms` with `all_gather_matmul` and `matmul_reduce_scatter` of
    `collectives.matmul`. In the layers, these two functions send to both neighbours in the ring of
    devices at the same time. If `axis` has an algorithm, such as `ring("tensor")`, the algorithm is
    used only outside the layers, such as for the vocabulary.

    Args:
        axis: the axis over which tokens and layers are split.
        shared: axes over which the vocabulary is split in addition to `axis`, such as the stages of
            a pipeline.
        on_tpu: whether the layers compute in the way that is fastest on TPUs (see `tensor.column`).
    """
    return comms(
        axis,
        shared=shared,
        all_gather_matmul=matmul.all_gather_matmul,
        matmul_reduce_scatter=matmul.matmul_reduce_scatter,
        on_tpu=on_tpu,
    )


def _check(tokens: int, axis: Axis) -> None:
    """Raises `ValueError` unless the axis's number of devices divides the number of tokens."""
    devices = axis.size()
    if tokens % devices:
        raise ValueError(
            f"sequence: the number of tokens, {tokens}, must be a multiple of {devices}, the "
            f"number of devices of {axis.names!r}. Use sequences of "
            f"{-(-tokens // devices) * devices} tokens, or do not split the sequences."
        )


def _check_shard(name: str, x: Array, axis: Axis) -> None:
    """Raises `ValueError` if `x` cannot be this device's tokens, since all devices have the same
    `x`. `name` is the name of the calling function, for the message."""
    if same := _same_along(axis, x):
        raise ValueError(
            f"{name} needs an x that has this device's tokens; this x, of shape {x.shape}, is the "
            f"same along {same}, so each token would be repeated once per device. Split the tokens "
            f"by sequence.local_tokens, or by the spec P(None, {axis.names!r}). If the devices' "
            "tokens are equal on purpose, cast x by collectives.types.varying."
        )


def _check_terms(name: str, axis: Axis, *factors: Array) -> None:
    """Raises `ValueError` if the product of `factors` cannot be one term of a sum over the axis,
    since all devices have the same product. `name` is the name of the calling function, for the
    message."""
    if same := _same_along(axis, *factors):
        raise ValueError(
            f"{name} needs partial sums that differ along {axis.names!r}; this x, of shape "
            f"{factors[0].shape}, is the same along {same}, and would be counted once per device. "
            "Split the weights of the layer whose result is summed. If the devices have no terms "
            "of a sum, use sequence.local_tokens in place of the sum."
        )


def _same_along(axis: Axis, *arrays: Array) -> list[str]:
    """Returns the mesh axes of `axis` that have several devices, and along which each of `arrays`
    has, by its type, the same values on all devices. With `check_vma=False`, types do not record
    along which axes values differ; then the result is empty.
    """
    # The device's index differs along all mesh axes of `axis`. So its type has all these axes, or
    # none with `check_vma=False`. Traced apart, so that the caller's program gets no equation for
    # the index.
    differing = set(axes_of_type(jax.make_jaxpr(axis.index)().out_avals[0]))
    same = differing.difference(*map(varying_axes, arrays))
    return sorted(name for name in same if lax.axis_size(name) > 1)
