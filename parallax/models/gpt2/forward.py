"""The functions in which a GPT-2 differs from other decoders: its block, its positions and dropout.

Legend: B batch, T tokens, D width, H heads, K head width, L layers. A *site* is a place of dropout:
0 after the embedding, 1 after the attention, 2 after the feed-forward, 3 in the attention weights.

`comms` is a `tensor.Comms`, the functions by which the devices of the tensor axis communicate:
`comms.column` multiplies by a device's columns of a weight; `comms.row` multiplies by a device's
rows, and sums the products over the devices; `comms.local_tokens` takes this device's part of the
tokens. `decoder_taps.split` returns its argument unchanged. In a run that `parallax.bisect`
records, `split` also reports the argument to `bisect`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Key

from parallax import remat, tensor
from parallax.collectives.types import match_varying
from parallax.models import block as blocks
from parallax.models import decoder_parts, decoder_taps
from parallax.models.block import Block
from parallax.models.gpt2.model import Config, attention

# The gradient of the position embeddings is summed over at most so many sequences at once.
SUMMED_AT_ONCE = 16
_gelu = remat.of_arguments(jax.nn.gelu)  # the tanh-GELU; only its input is kept for backward


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
    """Returns the residual stream after one block, as `models.block.apply` computes it.

    `keys`, one for each sequence, and `layer` choose the masks of dropout; with None as `keys`
    there is no dropout. With dropout of the attention weights, `_attention_with_dropout` takes the
    place of `attend`; if the backward pass recomputes `attend`, it recomputes this function too.
    """
    qkv, up, down = weights.attention.qkv, weights.mlp.up, weights.mlp.down
    if keys is not None and config.attention_dropout:
        # The last argument is H, this device's number of heads: the bias is [3, H, K].
        dropped_out = _attention_with_dropout(config, comms, _at(keys, layer, 3), qkv.bias.shape[1])
        attend = remat.in_place_of(attend, dropped_out)

    def heads(y):
        """Returns this device's queries, keys and values by head, from the normalised stream."""
        y = comms.column(y, qkv.weight, qkv.bias)  # [B, T, 3, H, K]
        y = decoder_taps.split(y, "blocks.*.attention.qkv", comms, dim=3)  # dim 3 is the heads
        return tensor.unstacked(y, 2)

    def feed_forward(y):
        """Returns the output of the feed-forward, to be added to the residual stream, and None:
        there is no auxiliary value.
        """
        y = comms.column(y, up.weight, up.bias)
        y = decoder_taps.split(y, "blocks.*.mlp.up", comms, dim=2)  # dim 2 is the hidden units
        return comms.row(_gelu(y), down.weight, down.bias), None

    def dropped(y, site):
        """Returns `y` with the dropout of this layer at `site`: site 1 is after the attention, and
        site 2 after the feed-forward.
        """
        return _dropped(y, keys, config.dropout, comms, layer, site)

    options = {"heads": heads, "feed_forward": feed_forward, "dropped": dropped}
    # `apply` also returns the auxiliary value, which is None.
    return blocks.apply(weights, x, **options, epsilon=config.epsilon, comms=comms, attend=attend)[
        0
    ]


def _layer(config, *, positions, comms, attend):
    """Returns `block` as a function `(weights, x, keys, layer)`. Its other arguments are bound.
    `positions` are not needed, since their embeddings are already in x.
    """
    return functools.partial(block, config=config, comms=comms, attend=attend)


def _add_positions(model, x, keys, *, first, comms):
    """Returns `x` plus the learned embeddings of the positions `first`, `first` + 1, ..., with
    dropout. `x`, [B, tokens of this device, D], has the embeddings of these tokens, and `keys` are
    the same as in `block`.
    """
    T = x.shape[1] * comms.token_shards  # the tokens on all devices
    table = model.wpe
    # `sampling` traces `first` for the tokens that it draws, and a Python slice needs an int. If
    # `first` is an int, the program needs no slice with a computed index.
    static = isinstance(first, int)
    rows = table[first : first + T] if static else lax.dynamic_slice_in_dim(table, first, T)
    x = x + _repeated(match_varying(comms.local_tokens(rows, dim=0), x), len(x))
    # Site 0 is in no layer. For the keys of dropout it is in layer L, a number that no layer has.
    return _dropped(x, keys, model.config.dropout, comms, layer=model.config.layers, site=0)


def _repeated(rows, sequences: int):
    """Returns [sequences, T, D]: `rows`, [T, D], repeated for each sequence.

    The gradient of `rows` is a sum over sequences. For a sum over 32 or more sequences, XLA for
    GPUs puts the sequences innermost in memory. It then uses this layout for the whole residual
    stream, and transposes the stream before each matmul. To avoid this, `rows` is broadcast to at
    most 16 sequences at a time, and these parts are concatenated. The gradient is first summed over
    each part, and then over the parts.
    """
    parts = [min(SUMMED_AT_ONCE, sequences - i) for i in range(0, sequences, SUMMED_AT_ONCE)]
    return jnp.concatenate([jnp.broadcast_to(rows, (part, *rows.shape)) for part in parts])


PARTS = decoder_parts.DecoderParts("gpt2", layer=_layer, add_positions=_add_positions)
loss = functools.partial(decoder_parts.loss, PARTS, attend=attention)
"""`decoder_parts.loss` of a GPT-2."""
logits = functools.partial(decoder_parts.logits, PARTS, attend=attention)
"""`decoder_parts.logits` of a GPT-2."""
stages = functools.partial(decoder_parts.stages, PARTS, attend=attention)
"""`decoder_parts.stages` of a GPT-2."""


def _attention_with_dropout(
    config: Config, comms: tensor.Comms, keys: Key[Array, " batch"], local_heads: int
) -> Callable[..., Any]:
    """Returns `attention` with dropout of its weights, for this device's heads.

    The mask of a head depends only on the sequence's key and on the number of the head in the whole
    model, so it is the same however the heads are split.
    """
    if comms.context_shards > 1:
        raise ValueError(
            f"gpt2: attention_dropout={config.attention_dropout} needs all tokens on a device; "
            f"they are split over {comms.context_shards} devices. Configure attention_dropout=0. "
            "The argument `dropout`, for the residual stream, may stay as it is."
        )
    first_head, rate = comms.axis.index() * local_heads, config.attention_dropout

    def drop(weights):
        """Returns the attention weights [B, H, T, S] with dropout."""
        return _dropped_heads(weights, keys, first_head, rate)

    return functools.partial(attention, drop=drop)


def _at(keys, layer, site: int):
    """Returns each sequence's random key for the dropout at the site `site` of the layer `layer`.
    Site 0 is in no layer; for site 0, `layer` is L, the number of layers.
    """

    def key_at(key):
        """Returns the key for the dropout at `site` in `layer`, from one sequence's `key`."""
        return jax.random.fold_in(jax.random.fold_in(key, layer), site)

    return jax.vmap(key_at)(keys)


def _dropped(x, keys, rate: float, comms: tensor.Comms, layer, site: int):
    """Returns `x`, [B, tokens of this device, D], with dropout of its numbers.

    The mask of a sequence is drawn for all T tokens, and a device takes the part of its own tokens.
    So the mask is the same however the tokens are split.
    """
    if keys is None or rate == 0:
        return x
    T, D = x.shape[1] * comms.token_shards, x.shape[2]

    def mask(key):
        """Returns the dropout mask [T, D] of one sequence, drawn from its random `key`."""
        return jax.random.bernoulli(key, 1 - rate, (T, D))

    survives = comms.local_tokens(jax.vmap(mask)(_at(keys, layer, site)), dim=1)
    x = jnp.where(survives, x / (1 - rate), jnp.zeros((), x.dtype))
    path = f"blocks.*.dropped.{site}" if site else "embedding.dropped"
    return decoder_taps.residual(x, path, comms)


def _dropped_heads(weights, keys, first_head, rate: float):
    """Returns attention weights [B, H, T, S], for T queries and S keys, with dropout. Each sequence
    and each head of the whole model has its own mask, however the heads are split over devices.
    `first_head` is the number of this device's first head.
    """
    heads = first_head + jnp.arange(weights.shape[1], dtype=jnp.int32)

    def mask(key, head):
        """Returns the dropout mask [T, S] of one head, drawn from a sequence's random `key`."""
        return jax.random.bernoulli(jax.random.fold_in(key, head), 1 - rate, weights.shape[2:])

    of_all_heads = jax.vmap(mask, in_axes=(None, 0))
    survives = jax.vmap(of_all_heads, in_axes=(0, None))(keys, heads)
    return jnp.where(survives, weights / (1 - rate), jnp.zeros((), weights.dtype))
