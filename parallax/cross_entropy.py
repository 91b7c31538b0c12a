"""The cross-entropy of a language model's head, without its logits: a block of tokens at a time,
the gradient on the way.

The logits `x · table^T` are B T V numbers, often more than all the rest of the model. A block of
tokens needs only its own, and what it leaves behind is small: a loss, the gradient of its `x`, and
its term of the table's gradient. All three are made while the block's logits are there, so the
backward pass has nothing left to do but to scale.

Source: the gradient in the forward pass is that of Hsu et al., Liger Kernel (arXiv 2410.10989),
section 3.2.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from parallax import precision, tensor
from parallax.collectives import Axis, AxisLike
from parallax.collectives.types import axes, match_varying, varying, varying_axes


def mean(
    x: Float[Array, "*batch width"],
    table: Float[Array, "rows width"],
    targets: Int[Array, "*batch"],
    axis: AxisLike,
    *,
    weights: Float[Array, "*batch"] | None = None,
    vocabulary: int | None = None,
    block_tokens: int = 512,
) -> Float[Array, ""]:
    """Returns the mean of -log softmax(x · table^T)[targets] in nats:
    `x[B, D], W[V_X, D], targets[B] -> scalar`.

    It equals `jnp.mean(tensor.cross_entropy(x @ table.T, targets, axis, weights=weights, ...))`,
    with three matrix products for value and gradient, as there, and one for the value alone. The
    products' terms are of `x`'s type, their sums, the softmax and the loss in float32 or wider.

    It holds t V_X logits, t = `block_tokens`, and two tables of sums; each block reads and writes
    these, so that blocks of some hundred tokens cost no time. What moves over `axis` is that of
    `tensor.cross_entropy`, block by block.

    Backwards, as after `tensor.copy_to`, the cotangent of `x` is this device's share. There is no
    forward-mode derivative.

    Args:
        x: what the head multiplies, after `tensor.copy_to`.
        table: the rows of the vocabulary, or this device's, split over `axis`.
        targets: they count over the whole vocabulary. One outside it makes the loss nan, unless its
            weight is 0.
        axis: the axis or axes that the rows are split over; `()` where the table is whole.
        weights: each token's loss is multiplied by its weight, and still divided by the number of
            tokens; constants, that are not differentiated. Pass `normalized` ones for a mean over
            the weighted tokens.
        vocabulary: rows from here on are padding: their logits are minus infinity, their gradients
            zero.
        block_tokens: at most so many tokens' logits are there at once.

    Raises:
        ValueError: `x` is the same along one of the axes; `block_tokens` is below 1; or there are
            no targets.
    """
    axis = Axis.of(axis)
    _check_mean(x, targets, axis, block_tokens)
    # All vary alike in the rule below; where they did not before, the transpose of `varying` adds
    # up.
    others = (targets,) if weights is None else (targets, lax.stop_gradient(weights))
    union = varying_axes(x) + varying_axes(table) + sum(map(varying_axes, others), start=())
    count, wide = targets.size, precision.accumulation_dtype(x.dtype)
    # The blocks are equal, so the loop is compiled once; the last one is filled up.
    blocks = -(-count // block_tokens)

    def in_blocks(leaf, dims=0):
        return _in_blocks(leaf.reshape(count, *leaf.shape[leaf.ndim - dims :]), blocks)

    def make_logits(x, table):
        return jnp.einsum("td,vd->tv", x, table, preferred_element_type=wide)

    def losses_of(logits, targets, weights=None):
        return tensor.cross_entropy(logits, targets, axis, weights=weights, vocabulary=vocabulary)

    @jax.custom_vjp
    def loss(x, table, *others):
        def block(_, parts):
            return None, losses_of(make_logits(parts[0], table), *parts[1:])

        _, losses = lax.scan(block, None, (in_blocks(x, 1), *map(in_blocks, others)))
        return jnp.mean(losses.reshape(-1)[:count])

    def forward(x, table, *others):
        def block(sums, parts):
            part, *of_tokens = parts
            losses, transposed = jax.vjp(
                lambda logits: losses_of(logits, *of_tokens), make_logits(part, table)
            )
            error = transposed(jnp.ones_like(losses))[0].astype(part.dtype)  # softmax less one-hot
            # The table's gradient is added up in float32 or wider over all blocks, and rounded once
            # at the end.
            sums += jnp.einsum("tv,td->vd", error, part, preferred_element_type=wide)
            share = jnp.einsum("tv,vd->td", error, table, preferred_element_type=wide)
            return sums, (losses, share)

        zeros = match_varying(jnp.zeros(table.shape, wide), table)
        parts = in_blocks(x, 1), *map(in_blocks, others)
        sums, (losses, shares) = lax.scan(block, zeros, parts)
        mean_loss = jnp.mean(losses.reshape(-1)[:count])
        gradient_of_x = shares.reshape(-1, x.shape[-1])[:count].reshape(x.shape)
        return mean_loss, (gradient_of_x, sums)

    def backward(gradients, ct):
        # The loss is a mean, and what was kept are gradients of a sum.
        scaled = [
            (g * (ct / count)).astype(leaf.dtype)
            for g, leaf in zip(gradients, (x, table), strict=True)
        ]
        return *scaled, *(None for _ in others)

    loss.defvjp(forward, backward)
    return loss(*varying((x, table), union), *others)


def _check_mean(x: Array, targets: Array, axis: Axis, block_tokens: int) -> None:
    """Refuses what `mean` cannot be taken of."""
    same = set(axes(axis.names)) - set(varying_axes(x))
    if same:
        raise ValueError(
            f"cross_entropy.mean needs an x that differs along {axis.names!r}, since its gradient "
            f"does; this one, of shape {x.shape}, is the same along {sorted(same)}. Pass "
            f"tensor.copy_to(x, {axis!r})."
        )
    if block_tokens < 1:
        raise ValueError(f"cross_entropy.mean needs block_tokens of 1 or more; got {block_tokens}.")
    if not targets.size:
        raise ValueError(
            "cross_entropy.mean needs a target or more, whose mean it takes; got targets of shape "
            f"{targets.shape}."
        )


def _in_blocks(leaf: Array, blocks: int) -> Array:
    """Returns `leaf`, a row for each token, as `[blocks, tokens of one, ...]`."""
    # Zeros fill the last block: an `x` of zeros adds nothing to the table's gradient.
    padding = [(0, -len(leaf) % blocks)] + [(0, 0)] * (leaf.ndim - 1)
    return jnp.pad(leaf, padding).reshape(blocks, -1, *leaf.shape[1:])


def normalized(weights: Float[Array, "*batch"], axis: AxisLike) -> Float[Array, "*batch"]:
    """Returns `weights` over their mean in the global batch: a mean over tokens, times these, is Σ
    weight · loss / Σ weight.

    A weighted mean is no mean of means: devices and microbatches have different sums of weights.
    Divided by the global mean once, before the gradient function, the weights can go through
    `mean`, `grads.accumulated`, `grads.averaged`, `zero.reduce_scattered` and a pipeline, which all
    take means of equal parts. One scalar moves.

        def weighted(params, batch):                                     # inside mesh.spmd
            windows, weights = batch
            return grad(params, (windows, cross_entropy.normalized(weights, "data")))

    Where all weights are 0, the result is nan.

    Args:
        weights: of this device's tokens, at least 0; those that are ignored have 0.
        axis: the axis or axes that split the batch.
    """
    axis = Axis.of(axis)
    wide = weights.astype(precision.accumulation_dtype(weights.dtype))
    return wide * (weights.size * axis.size() / axis.all_reduce(jnp.sum(wide)))
