"""The cross-entropy of a language model's head, block by block, without all logits at once.

Legend: B batch, T tokens, D width, V rows of the table (the weights of the head, [V, D]), X the
axis that splits the rows, V_X the rows of one device, t the tokens of a block.

The logits `x · table^T` are batch * tokens * vocabulary numbers, often more than all other
activations of the model. A block of tokens needs only its own logits. While these logits exist,
three results are computed: the block's losses, the gradient of the block's `x`, and the block's
term of the table's gradient. So the backward pass only scales the gradients.

Source: the gradient in the forward pass is from Hsu et al., Liger Kernel (arXiv 2410.10989),
section 3.2.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from parallax import precision, tensor
from parallax.collectives import Axis, AxisLike
from parallax.collectives.types import axes, match_varying, varying, varying_axes

# The matmuls of a block of t tokens take 6 t V_X D operations. The block also reads and writes the
# table's gradient, 8 V_X D bytes in float32. At an H100's peak rates, these bytes take 19 % of the
# matmuls' time for blocks of 2,048 tokens, and 77 % for blocks of 512.
LEAST_BLOCK_TOKENS = 2048
BLOCK_TOKENS_PER_DEVICE = 512


def mean(
    x: Float[Array, "*batch width"],
    table: Float[Array, "rows width"],
    targets: Int[Array, "*batch"],
    axis: AxisLike,
    *,
    weights: Float[Array, "*batch"] | None = None,
    vocabulary: int | None = None,
    block_tokens: int | None = None,
) -> Float[Array, ""]:
    """Returns the mean of -log softmax(x · table^T)[targets] in nats:
    `x[*batch, D], table[V_X, D], targets[*batch] -> scalar`, where `*batch` are all dims of tokens.
    The softmax is over all rows of the table, on all devices; this device has V_X of them.

    It equals `jnp.mean(tensor.cross_entropy(x @ table.T, targets, axis, weights=weights, ...))`,
    with the same number of matrix products: three for value and gradient, one for only the value.
    The factors of the products have the dtype of `x`. The sums of products, the softmax and the
    loss are float32 or wider.

    The computation holds the logits of `block_tokens` tokens for this device's rows of the table,
    and two arrays of the table's size: the table's gradient, and a block's term of it. Each block
    reads and writes the table's gradient once, so smaller blocks need less memory and more time.
    For each block, a device sends as many bytes as `tensor.cross_entropy` does for the tokens of
    the block.

    `x` must be a result of `tensor.copy_to`, which is the identity forward. The cotangent of `x` is
    this device's term of a sum, and the backward pass of `tensor.copy_to` adds the terms. There is
    no forward-mode derivative.

    Args:
        x: the input of the head, after `tensor.copy_to`.
        table: this device's rows of the vocabulary's table, which is split over `axis`; in the
            dtype of `x`.
        targets: indices of rows of the whole table. A target outside the vocabulary makes the loss
            nan, unless its weight is 0.
        axis: the axis or axes that the rows are split over; `()` if the table is whole.
        weights: the factors of the tokens' losses. The sum is still divided by the number of
            tokens: pass `normalized` weights for a weighted mean. The weights are not
            differentiated.
        vocabulary: the number of rows of the whole table that are not padding; padding rows are the
            last ones. Their logits are minus infinity, and their gradients are 0.
        block_tokens: the largest number of tokens whose logits exist at the same time. See
            `default_block_tokens` for the default.

    Raises:
        ValueError: `x` is not typed as varying along each axis of `axis` (`tensor.copy_to` gives
            this type); `block_tokens` is below 1; there are no targets; the targets or the weights
            have another shape than the positions of `x`; the table is the same along one of the
            axes in `axis`, and this axis has several devices; or `vocabulary` is below 1 or above
            the number of all rows.
    """
    axis = Axis.of(axis)
    if block_tokens is None:
        block_tokens = default_block_tokens(axis.size())
    _check_mean(x, targets, axis, block_tokens)
    tensor.check_positions("cross_entropy.mean", x, targets, weights)
    tensor.checked_vocabulary("cross_entropy.mean", table, len(table), axis, vocabulary)
    others = (targets,) if weights is None else (targets, lax.stop_gradient(weights))
    # The number of all tokens, and the dtype of sums: float32 or wider.
    count, wide = targets.size, precision.accumulation_dtype(x.dtype)
    # The blocks have equal sizes, so that one loop runs them all; zeros fill up the last block.
    blocks = -(-count // block_tokens)

    def in_blocks(leaf, dims=0):
        """Returns `leaf` cut into blocks of t tokens, `[blocks, t, ...]`. All dims of `leaf` are
        joined to one dim of tokens, except the last ones, whose number is `dims`."""
        return _in_blocks(leaf.reshape(count, *leaf.shape[leaf.ndim - dims :]), blocks)

    def make_logits(x, table):
        """Returns a block's logits, [tokens of the block, this device's rows of the table]."""
        return jnp.einsum("td,vd->tv", x, table, preferred_element_type=wide)

    def losses_of(logits, targets, weights=None):
        return tensor.cross_entropy(logits, targets, axis, weights=weights, vocabulary=vocabulary)

    @jax.custom_vjp
    def loss(x, table, *others):
        """Returns the mean loss; `others` are the targets, and the weights if there are any."""

        def block(_, parts):
            """Returns the losses of one block: `parts` are its x, targets and weights."""
            return None, losses_of(make_logits(parts[0], table), *parts[1:])

        # The last dim of `x` is not a dim of tokens; all dims of targets and weights are.
        _, losses = lax.scan(block, None, (in_blocks(x, 1), *map(in_blocks, others)))
        # The losses after the first `count` are of the zeros that fill up the last block.
        return jnp.mean(losses.reshape(-1)[:count])

    def forward(x, table, *others):
        """Returns the mean loss, and as residuals the gradients of the sum of losses. `others` are
        the targets, and the weights if there are any."""

        def block(d_table, parts):
            """Returns `d_table` plus this block's term of the gradient of `table`; and the block's
            losses and the gradient of the block's x."""
            block_x, *targets_and_weights = parts
            losses, transpose = jax.vjp(
                lambda logits: losses_of(logits, *targets_and_weights), make_logits(block_x, table)
            )
            # The gradient of the logits: the softmax minus one-hot targets, times the weights.
            # `transpose` returns a tuple of one.
            d_logits = transpose(jnp.ones_like(losses))[0].astype(block_x.dtype)
            # The table's gradient is summed over all blocks in `wide` (float32 or wider), and is
            # rounded once at the end. The factors of a product have the dtype of `x`. The tokens
            # that fill up the last block add nothing: their x is 0.
            d_table += jnp.einsum("tv,td->vd", d_logits, block_x, preferred_element_type=wide)
            d_x = jnp.einsum("tv,vd->td", d_logits, table, preferred_element_type=wide)
            return d_table, (losses, d_x)

        # A scan's carry must keep its type, and the gradient varies as the table does.
        zeros = match_varying(jnp.zeros(table.shape, wide), table)
        parts = in_blocks(x, 1), *map(in_blocks, others)
        d_table, (losses, d_x_blocks) = lax.scan(block, zeros, parts)
        # The losses after the first `count` are of the zeros that fill up the last block.
        mean_loss = jnp.mean(losses.reshape(-1)[:count])
        d_x = d_x_blocks.reshape(-1, x.shape[-1])[:count].reshape(x.shape)
        return mean_loss, (d_x, d_table)

    def backward(gradients, cotangent):
        """Returns the gradients of `x` and of `table`, multiplied by the cotangent of the loss. The
        targets, and the factors `weights` of the tokens' losses, get None: they have no gradient.
        """
        # The loss is a mean, but the kept gradients are of the sum.
        scaled = [
            (g * (cotangent / count)).astype(leaf.dtype)
            for g, leaf in zip(gradients, (x, table), strict=True)
        ]
        return *scaled, *(None for _ in others)

    loss.defvjp(forward, backward)
    # The gradients that `loss` returns vary along the axes of all its arguments (`union`), so `x`
    # and `table` must vary along these axes too. `varying` casts them, and its transpose sums each
    # gradient over the axes that the cast added.
    union = varying_axes(x) + varying_axes(table) + sum(map(varying_axes, others), start=())
    return loss(*varying((x, table), union), *others)


def default_block_tokens(devices: int) -> int:
    """Returns the default of `block_tokens` in `mean`: the larger of 2,048 and 512 times `devices`,
    the number of devices that split the rows of `table`.

    With 4 or more devices, a block's logits take the same memory on each device, however many
    devices there are. More tokens in a block mean fewer messages.
    """
    return max(LEAST_BLOCK_TOKENS, BLOCK_TOKENS_PER_DEVICE * devices)


def _check_mean(x: Array, targets: Array, axis: Axis, block_tokens: int) -> None:
    """Raises the errors of `mean`: for an x that does not vary along `axis`, for a `block_tokens`
    below 1, or for no targets."""
    same = set(axes(axis.names)) - set(varying_axes(x))
    if same:
        raise ValueError(
            f"cross_entropy.mean needs an x whose type varies along {axis.names!r}, because the "
            f"gradient of x varies there; the type of this x, of shape {x.shape}, does not vary "
            f"along {sorted(same)}. Pass tensor.copy_to(x, {axis!r})."
        )
    if block_tokens < 1:
        raise ValueError(f"cross_entropy.mean needs block_tokens of 1 or more; got {block_tokens}.")
    if not targets.size:
        raise ValueError(
            "cross_entropy.mean needs 1 target or more; got targets of shape "
            f"{targets.shape}. Pass a batch with tokens."
        )


def _in_blocks(leaf: Array, blocks: int) -> Array:
    """Returns `leaf`, which has a row for each token, cut into blocks of t tokens,
    `[blocks, t, ...]`.

    Zeros fill up the last block. In `mean`, a token whose `x` is zeros adds nothing to the gradient
    of the vocabulary's table.
    """
    padding = [(0, -len(leaf) % blocks)] + [(0, 0)] * (leaf.ndim - 1)
    return jnp.pad(leaf, padding).reshape(blocks, -1, *leaf.shape[1:])


def normalized(weights: Shaped[Array, "*batch"], axis: AxisLike) -> Float[Array, "*batch"]:
    """Returns `weights` divided by their mean over the global batch.

    If each token's loss is multiplied by its entry of the result, the plain mean over all tokens is
    the weighted mean, Σ weights · loss / Σ weights. The weighted mean of the batch is not the mean
    of the weighted means of its parts, since devices and microbatches have different sums of
    weights. So the weights are divided once, before the gradient function. Then plain means over
    equal parts give the right result. `mean`, `grads.accumulated`, `grads.averaged`,
    `zero.reduce_scattered` and pipelines compute plain means. The devices send one scalar.

        def weighted(params, batch):                                     # inside mesh.spmd
            windows, weights = batch
            return grad(params, (windows, cross_entropy.normalized(weights, "data")))

    If all weights are 0, the result is nan.

    Args:
        weights: the weights of this device's tokens, at least 0; ignored tokens have 0. A mask of
            bools or integers is taken as float32.
        axis: the axis or axes that split the batch.
    """
    axis = Axis.of(axis)
    # A mask of bools or whole numbers is counted in float32.
    kind = weights.dtype if jnp.issubdtype(weights.dtype, jnp.inexact) else jnp.dtype(jnp.float32)
    wide = weights.astype(precision.accumulation_dtype(kind))
    return wide * (weights.size * axis.size() / axis.all_reduce(jnp.sum(wide)))
