"""Sequence parallelism: between the layers that the devices of an axis share, each has the residual stream of its own tokens.

Legend: B batch, T tokens, D width, X the tensor axis, t its size. An all-reduce is a reduce-scatter and an all-gather; here they
stand apart, and what lies between them (residual stream, norms, dropout) is computed and kept for T/t tokens on each device,
not for all T on all. `enter` gathers the tokens before a column-parallel layer, `leave` sums and scatters them after a
row-parallel one; each is the other's transpose, and together they move as much as Megatron's pair.

What is the same on all devices (norms, biases, positions) now sees some tokens on each, so its gradients are parts of a sum:
wrap the grad arrow in `grads.summed`.

Source: Korthikanti et al., Reducing activation recomputation in large transformer models (arXiv 2205.05198), section 4.2.
"""

import functools
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped

from parallax import remat, tensor
from parallax.collectives.replicated import AxisName, linear, size
from parallax.tensor import Joins


def enter(
    x: Float[Array, "batch tokens_shard width"], axis_name: AxisName, *, all_gather: Callable, reduce_scatter: Callable
) -> Float[Array, "batch tokens width"]:
    """`A[B, T_X, D] -> A[B, T, D]`: (t - 1)/t of the result's bytes a device. Its transpose is `leave`.

    The result bears the name that `remat.gathers` looks for, to be gathered again in the backward pass instead of kept.
    """
    return linear(
        x,
        forward=lambda x: all_gather(x, axis_name, axis=1, tiled=True),
        backward=lambda ct: reduce_scatter(ct, axis_name, scatter_dimension=1, tiled=True),
        name=remat.GATHERED,
    )


def leave(
    x: Float[Array, "batch tokens width"], axis_name: AxisName, *, reduce_scatter: Callable
) -> Float[Array, "batch tokens_shard width"]:
    """`A[B, T, D] {U_X} -> A[B, T_X, D]`: (t - 1)/t of the bytes of `x` a device. Its transpose is `enter`.

    Raises:
        ValueError: the tokens do not divide by the devices.
    """
    _check(x.shape[1], axis_name)
    return reduce_scatter(x, axis_name, scatter_dimension=1, tiled=True)


def column(
    x: Float[Array, "batch tokens_shard inputs"],
    weight: Float[Array, "inputs *outputs_shard"],
    bias: Float[Array, "*outputs_shard"] | None,
    axis_name: AxisName,
    *,
    all_gather_matmul: Callable,
) -> Float[Array, "batch tokens *outputs_shard"]:
    """A column-parallel layer: `A[B, T_X, I] -> gathered · W[I, J_X] + b[J_X] -> [B, T, J_X]`."""
    y = all_gather_matmul(x, weight, axis_name, axis=1)
    return y if bias is None else tensor.added(y, bias)


def row(
    x: Float[Array, "batch tokens *inputs_shard"],
    weight: Float[Array, "*inputs_shard outputs"],
    bias: Float[Array, " outputs"] | None,
    axis_name: AxisName,
    *,
    matmul_reduce_scatter: Callable,
) -> Float[Array, "batch tokens_shard outputs"]:
    """A row-parallel layer: `A[B, T, I_X] · W[I_X, J] {U_X} -> scattered [B, T_X, J] + b[J]`. Raises as `leave` does."""
    _check(x.shape[1], axis_name)
    y = matmul_reduce_scatter(x, weight, axis_name, scatter_dimension=1)
    return y if bias is None else tensor.added(y, bias)


def own(x: Shaped[Array, "..."], axis_name: AxisName, dim: int) -> Shaped[Array, "..."]:
    """`A[T] -> A[T_X]`: what of `x` belongs to this device's tokens, which are its dim `dim`. Nothing moves.

    Raises:
        ValueError: that dim does not divide by the devices.
    """
    _check(x.shape[dim], axis_name)
    share = x.shape[dim] // size(axis_name)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axis_name) * share, share, dim)


def joins(
    axis_name: AxisName,
    *,
    shared: AxisName = (),
    all_reduce: Callable,
    all_gather: Callable,
    reduce_scatter: Callable,
    all_gather_matmul: Callable | None = None,
    matmul_reduce_scatter: Callable | None = None,
) -> Joins:
    """The residual stream's tokens split over `axis_name`. Over the axes `shared`, `enter` and `leave` are Megatron's pair.

    By default each layer gathers and then multiplies, or multiplies and then scatters; with the functions of
    `collectives.matmul`, both at once, hop by hop. What is joined raises as `leave` and `own` do.
    """
    summed = functools.partial(tensor.leave, axis_name=shared, all_reduce=all_reduce)
    used = functools.partial(tensor.enter, axis_name=shared, all_reduce=all_reduce)
    both = {"all_gather": all_gather, "reduce_scatter": reduce_scatter}

    def gather_then_multiply(x, weight, axis_name, *, axis):
        return jnp.tensordot(enter(x, axis_name, **both), weight, axes=1)

    def multiply_then_scatter(x, weight, axis_name, *, scatter_dimension):
        return leave(jnp.tensordot(x, weight, axes=weight.ndim - 1), axis_name, reduce_scatter=reduce_scatter)

    return Joins(
        enter=lambda x: enter(used(x), axis_name, **both),
        leave=lambda x: summed(leave(x, axis_name, reduce_scatter=reduce_scatter)),
        column=functools.partial(column, axis_name=axis_name, all_gather_matmul=all_gather_matmul or gather_then_multiply),
        row=functools.partial(row, axis_name=axis_name, matmul_reduce_scatter=matmul_reduce_scatter or multiply_then_scatter),
        own=lambda x, dim: own(x, axis_name, dim),
        parts=size(axis_name),
    )


def _check(tokens: int, axis_name: AxisName) -> None:
    devices = size(axis_name)
    if tokens % devices:
        raise ValueError(
            f"sequence: {tokens} tokens must divide by the {devices} devices of {axis_name!r}. Take sequences of "
            f"{-(-tokens // devices) * devices} tokens, or do not split them."
        )
