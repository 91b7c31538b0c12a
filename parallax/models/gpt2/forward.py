"""What a GPT-2 computes: its loss and its logits, whole or on a shard, from the pieces that a
pipeline's stages share.

Legend: B batch, T tokens, D width, H heads, K head width, L layers.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Key

from parallax import tensor
from parallax.collectives import AxisLike
from parallax.models import decoder_parts, decoder_taps
from parallax.models.family import Batch
from parallax.models.gpt2.model import GPT2, Block, Config, attention
from parallax.remat import none

ONE_DEVICE = tensor.comms(())


def loss(
    model: GPT2,
    batch: Batch | tuple[Int[Array, "batch window"], Key[Array, " batch"] | None],
    *,
    axis: AxisLike = (),
    comms: Callable[..., Any] = tensor.comms,
    attend: Callable[..., Any] = attention,
    remat: Callable[..., Any] = none,
    unroll: int = 1,
) -> Float[Array, ""]:
    """The mean cross-entropy, in nats a token, of each token after the first in `batch`'s windows
    of T + 1 tokens.

    With `context.comms`, the mean over this device's tokens.

    Args:
        model: whole, or a shard of it along `axis`.
        batch: a `Batch`. Dropout depends on a sequence's key, the layer and the head only, so it is
            the same under every layout.
        axis: the axis or axes that the weights are split over.
        comms: how the devices of `axis` come together: with all tokens on each, or split over them
            by `sequence.comms`; with the tokens split over another axis before that,
            `context.comms`.
        attend: causal attention, called as `attend(q, k, v)` with [B, T, H, K]; on a GPU
            `functools.partial(jax.nn.dot_product_attention, is_causal=True,
            implementation="cudnn")`, say. With attention dropout it gives way to `attention`.
        remat: wraps each block, a function `(weights, x, layer) -> x`: those of `remat`, say, or
            one that first gathers the weights (`zero.gathered`).
        unroll: blocks written out one after another in the loop's body, so that the gathers of one
            may overlap another.

    Raises:
        ValueError: T is more than the model's context; there is no token to predict; or, outside
            `jax.jit`, where values are known, a token is outside the vocabulary, or an array is
            deleted. Inside, such a token makes the loss nan.
    """
    options = {"axis": axis, "comms": comms, "attend": attend, "remat": remat, "unroll": unroll}
    return decoder_parts.loss(PARTS, model, batch, **options)[0]


def logits(
    model: GPT2, tokens: Int[Array, "batch tokens"], *, attend: Callable[..., Any] = attention
) -> Float[Array, "batch tokens vocabulary"]:
    """The logits after each token, of a whole model on one device, without dropout.

    `attend` and errors are those of `loss`: inside `jax.jit`, a token outside the vocabulary makes
    those after it nan.
    """
    return decoder_parts.logits(PARTS, model, tokens, attend=attend)


def unembedded(
    model: GPT2, x: Float[Array, "batch tokens width"]
) -> Float[Array, "batch tokens vocabulary"]:
    """The logits of what leaves the last block, of a whole model."""
    return (model.norm(x, model.config.epsilon) @ model.wte.T)[..., : model.config.vocabulary]


def embed(
    model: GPT2,
    tokens: Int[Array, "batch tokens"],
    keys: Key[Array, " batch"] | None,
    *,
    first: int | Int[Array, ""] = 0,
    weights: Float[Array, "batch tokens"] | None = None,
    comms: tensor.Comms = ONE_DEVICE,
    across: Callable[..., Any] = lambda x: x,
) -> Float[Array, "batch tokens_shard width"]:
    """What enters the first block: the embeddings of tokens and positions, of which the first is
    `first`, with dropout.

    `comms` adds up what the devices that share the vocabulary found; `across` takes the sum to
    those that go on with it. A token outside the vocabulary gives nan, unless those after it have
    `weights` of 0. Raises `ValueError` for windows longer than the model's context, or of nothing.
    """
    decoder_parts.check_tokens("gpt2", tokens, model.wpe.shape[0])
    x = across(decoder_parts.looked_up(model.wte, tokens, weights, comms, model.config.vocabulary))
    T = tokens.shape[1]
    positions = (
        model.wpe[first : first + T]
        if isinstance(first, int)
        else lax.dynamic_slice_in_dim(model.wpe, first, T)
    )
    x = x + comms.local_tokens(positions, dim=0)[None]
    x = _dropped(x, keys, model.config.dropout, comms, layer=model.config.layers, site=0)
    return decoder_taps.residual(x, "embedding", comms)


def block(
    weights: Block,
    x: Float[Array, "batch tokens width"],
    keys: Key[Array, " batch"] | None,
    layer: Int[Array, ""],
    *,
    config: Config,
    comms: tensor.Comms,
    attend: Callable[..., Any],
) -> Float[Array, "batch tokens width"]:
    """One block. Over the axis of `comms` it moves two all-reduces of [B, T, D] forward and two
    backward, or their halves.
    """
    qkv, out, up, down = (
        weights.attention.qkv,
        weights.attention.out,
        weights.mlp.up,
        weights.mlp.down,
    )

    x = decoder_taps.residual(x, "blocks.*.in", comms)
    y = decoder_taps.residual(
        weights.attention_norm(x, config.epsilon), "blocks.*.attention.norm", comms
    )
    y = decoder_taps.split(
        comms.column(y, qkv.weight, qkv.bias), "blocks.*.attention.qkv", comms, dim=3
    )
    q, k, v = y[:, :, 0], y[:, :, 1], y[:, :, 2]
    if keys is not None and config.attention_dropout:
        if comms.context_shards > 1:
            raise ValueError(
                f"gpt2: attention_dropout={config.attention_dropout} needs all tokens on a device; "
                "they are split over "
                f"{comms.context_shards}. Configure attention_dropout=0, and dropout for the "
                "residual stream."
            )
        first_head = comms.axis.index() * qkv.bias.shape[1]
        rate, at = config.attention_dropout, _at(keys, layer, 3)
        attend = functools.partial(
            attention, drop=lambda weights: _dropped_heads(weights, at, first_head, rate)
        )
    y = decoder_taps.split(
        comms.wrap_attention(attend)(q, k, v), "blocks.*.attention.heads", comms, dim=2
    )
    y = decoder_taps.residual(comms.row(y, out.weight, out.bias), "blocks.*.attention.out", comms)
    x = decoder_taps.residual(
        x + _dropped(y, keys, config.dropout, comms, layer, site=1), "blocks.*.middle", comms
    )

    y = decoder_taps.residual(weights.mlp_norm(x, config.epsilon), "blocks.*.mlp.norm", comms)
    y = jax.nn.gelu(
        decoder_taps.split(comms.column(y, up.weight, up.bias), "blocks.*.mlp.up", comms, dim=2),
        approximate=True,
    )
    y = decoder_taps.residual(comms.row(y, down.weight, down.bias), "blocks.*.mlp.down", comms)
    return decoder_taps.residual(
        x + _dropped(y, keys, config.dropout, comms, layer, site=2), "blocks.*.out", comms
    )


def head(
    model: GPT2,
    x: Float[Array, "batch tokens_shard width"],
    targets: Int[Array, "batch tokens"],
    *,
    weights: Float[Array, "batch tokens"] | None = None,
    comms: tensor.Comms = ONE_DEVICE,
    across: Callable[..., Any] = lambda x: x,
) -> Float[Array, ""]:
    """The mean cross-entropy of `targets`, times their `weights`, after the last norm and the tied
    head, in nats a token.

    `across` takes the normalised activations to all devices that share the vocabulary.
    """
    x = decoder_taps.whole(
        comms.all_tokens(across(model.norm(x, model.config.epsilon))), "head.in", comms
    )
    return decoder_parts.mean_loss(x, model.wte, targets, weights, comms, model.config.vocabulary)


def _layer(
    config: Config,
    *,
    positions: Int[Array, " tokens"],
    comms: tensor.Comms,
    attend: Callable[..., Any],
) -> Callable[..., Any]:
    return functools.partial(block, config=config, comms=comms, attend=attend)


PARTS = decoder_parts.DecoderParts("gpt2", embed=embed, layer=_layer, head=head, unembed=unembedded)


def _at(keys, layer, site: int):
    """Each sequence's key at one place of the model."""
    return jax.vmap(lambda key: jax.random.fold_in(jax.random.fold_in(key, layer), site))(keys)


def _dropped(x, keys, rate: float, comms: tensor.Comms, layer, site: int):
    """Dropout of the residual stream [B, T, D], by sequence: of this device's tokens, as of them
    all.
    """
    if keys is None or rate == 0:
        return x
    T, D = x.shape[1] * comms.token_shards, x.shape[2]
    kept = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - rate, (T, D)))(_at(keys, layer, site))
    x = jnp.where(comms.local_tokens(kept, dim=1), x / (1 - rate), jnp.zeros((), x.dtype))
    return decoder_taps.residual(
        x, f"blocks.*.dropped.{site}" if site else "embedding.dropped", comms
    )


def _dropped_heads(weights, keys, first_head, rate: float):
    """Dropout of attention weights [B, H, T, S], by sequence and by head of the whole model."""
    heads = first_head + jnp.arange(weights.shape[1], dtype=jnp.int32)
    mask = lambda key, head: jax.random.bernoulli(
        jax.random.fold_in(key, head), 1 - rate, weights.shape[2:]
    )
    kept = jax.vmap(lambda key: jax.vmap(lambda head: mask(key, head))(heads))(keys)
    return jnp.where(kept, weights / (1 - rate), jnp.zeros((), weights.dtype))
