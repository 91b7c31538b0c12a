"""What a Llama computes: its loss and its logits, whole or on a shard, from the pieces that a
pipeline's stages share.

Legend: B batch, T tokens, D width, H heads of queries, G heads of keys and values, K head width, L
layers.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Key

from parallax import experts, pipeline, tensor
from parallax.collectives import AxisLike
from parallax.models import decoder_parts, decoder_taps
from parallax.models.attention import grouped
from parallax.models.family import Batch
from parallax.models.llama.model import MLP, Attention, Block, Linear, Llama, MoE, Norm
from parallax.models.llama.sizes import Config
from parallax.precision import accumulation_dtype
from parallax.remat import none

ONE_DEVICE = tensor.comms(())


def loss(
    model: Llama,
    batch: Batch | tuple[Int[Array, "batch window"], Key[Array, " batch"] | None],
    *,
    axis: AxisLike = (),
    comms: Callable[..., Any] = tensor.comms,
    attend: Callable[..., Any] = grouped,
    remat: Callable[..., Any] = none,
    unroll: int = 1,
) -> Float[Array, ""]:
    """The mean cross-entropy, in nats a token, of each token after the first in `batch`'s windows
    of T + 1 tokens.

    With `context.comms`, the mean over this device's tokens. Of a model with experts the auxiliary
    losses are added that its configuration asks for.

    Args:
        model: whole, or a shard of it along `axis`.
        batch: a `Batch`; its keys are not used, since a Llama has no dropout.
        axis: the axis or axes that the weights are split over.
        comms: how the devices of `axis` come together, as in `gpt2.loss`; `experts.comms` where the
            experts are split.
        attend: causal attention, called as `attend(q, k, v)` with [B, T, H, K] and, of keys and
            values, [B, T, G, K], the heads of this device; G divides H.
        remat: wraps each block, a function `(weights, x, layer) -> x`.
        unroll: blocks written out one after another in the loop's body.

    Raises:
        ValueError: as `gpt2.loss`; or the heads of keys and values of this shard are not those that
            its queries attend to.
    """
    options = {"axis": axis, "comms": comms, "attend": attend, "remat": remat, "unroll": unroll}
    return loss_and_statistics(model, batch, **options)[0]


def loss_and_statistics(
    model: Llama,
    batch: Batch | tuple[Int[Array, "batch window"], Key[Array, " batch"] | None],
    *,
    axis: AxisLike = (),
    comms: Callable[..., Any] = tensor.comms,
    attend: Callable[..., Any] = grouped,
    remat: Callable[..., Any] = none,
    unroll: int = 1,
) -> tuple[Float[Array, ""], experts.Statistics | None]:
    """`loss`, with its arguments and errors, and the `experts.Statistics` of each layer, [L, ...]
    each; None without experts.
    """
    return decoder_parts.loss(
        PARTS, model, batch, axis=axis, comms=comms, attend=attend, remat=remat, unroll=unroll
    )


def logits(
    model: Llama, tokens: Int[Array, "batch tokens"], *, attend: Callable[..., Any] = grouped
) -> Float[Array, "batch tokens vocabulary"]:
    """The logits after each token, of a whole model on one device.

    `attend` and errors are those of `loss`: inside `jax.jit`, a token outside the vocabulary makes
    those after it nan.
    """
    return decoder_parts.logits(PARTS, model, tokens, attend=attend)


def unembedded(
    model: Llama, x: Float[Array, "batch tokens width"]
) -> Float[Array, "batch tokens vocabulary"]:
    """The logits of what leaves the last block, of a whole model."""
    return (model.norm(x, model.config.epsilon) @ model.unembedding.T)[
        ..., : model.config.vocabulary
    ]


def embed(
    model: Llama,
    tokens: Int[Array, "batch tokens"],
    keys: Key[Array, " batch"] | None,
    *,
    first: int | Int[Array, ""] = 0,
    weights: Float[Array, "batch tokens"] | None = None,
    comms: tensor.Comms = ONE_DEVICE,
    across: Callable[..., Any] = lambda x: x,
) -> Float[Array, "batch tokens_shard width"]:
    """What enters the first block, the embeddings of the tokens, wherever they stand: as
    `gpt2.embed` says, without dropout.
    """
    decoder_parts.check_tokens("llama", tokens, model.config.context)
    x = across(
        decoder_parts.looked_up(model.table, tokens, weights, comms, model.config.vocabulary)
    )
    return decoder_taps.residual(x, "embedding", comms)


def block(
    weights: Block,
    x: Float[Array, "batch tokens_shard width"],
    keys: Key[Array, " batch"] | None,
    layer: Int[Array, ""],
    *,
    config: Config,
    turns: tuple[Float[Array, "tokens pairs"], Float[Array, "tokens pairs"]],
    comms: tensor.Comms,
    attend: Callable[..., Any],
) -> Float[Array, "batch tokens_shard width"] | pipeline.Output:
    """One block; one with experts returns an `Output` with its auxiliary losses and
    `experts.Statistics`.

    Over the axis of `comms` it moves two all-reduces of [B, T, D] forward and two backward, or
    their halves.

    Where each device has all heads of keys and values, it computes those that its queries attend
    to; backward, one all-reduce of their weights' size sums what the devices found. `turns` are
    those of the tokens that it attends with, by `rotary`.
    """
    attention = weights.attention

    x = decoder_taps.residual(x, "blocks.*.in", comms)
    y = comms.all_tokens(
        decoder_taps.residual(
            weights.attention_norm(x, config.epsilon), "blocks.*.attention.norm", comms
        )
    )
    q, k, v = queries_keys_values(attention, y, turns, config, comms)
    y = comms.wrap_attention(attend)(
        decoder_taps.split(q, "blocks.*.attention.query", comms, dim=2), k, v
    )
    y = decoder_taps.split(y, "blocks.*.attention.heads", comms, dim=2)
    y = decoder_taps.residual(
        comms.row(y, attention.out.weight, None), "blocks.*.attention.out", comms
    )
    x = decoder_taps.residual(x + y, "blocks.*.middle", comms)

    y = decoder_taps.residual(weights.mlp_norm(x, config.epsilon), "blocks.*.mlp.norm", comms)
    if isinstance(weights.mlp, MLP):
        y = decoder_taps.residual(fed_forward(weights.mlp, y, comms), "blocks.*.mlp.down", comms)
        return decoder_taps.residual(x + y, "blocks.*.out", comms)
    y, told = mixed(weights.mlp, y, config, comms)
    x = decoder_taps.residual(
        x + decoder_taps.residual(y, "blocks.*.mlp.down", comms), "blocks.*.out", comms
    )
    return pipeline.Output(x, loss=config.balance * told.balance + config.z * told.z, aux=told)


def fed_forward(
    weights: MLP, y: Float[Array, "batch tokens_shard width"], comms: tensor.Comms
) -> Float[Array, "batch tokens_shard width"]:
    """What the feed-forward adds to the residual stream."""
    y = comms.all_tokens(y)
    y = decoder_taps.split(
        jax.nn.silu(_projected(y, weights.gate)) * _projected(y, weights.up),
        "blocks.*.mlp.up",
        comms,
        dim=2,
    )
    return comms.row(y, weights.down.weight, None)


def mixed(
    weights: MoE, y: Float[Array, "batch tokens_shard width"], config: Config, comms: tensor.Comms
) -> tuple[Float[Array, "batch tokens_shard width"], experts.Statistics]:
    """What the experts add to the residual stream, and how even the router's choices are."""
    mixture = comms.wrap_experts(functools.partial(experts.moe, axis=()))
    route = experts.top_k(config.chosen, normalised=True)
    out, told = mixture(y, weights.mixture, route=route, comms=comms)
    return out if isinstance(weights.shared, tuple) else out + fed_forward(
        weights.shared, y, comms
    ), told


def queries_keys_values(
    weights: Attention,
    y: Float[Array, "batch tokens width"],
    turns: tuple[Float[Array, "tokens pairs"], Float[Array, "tokens pairs"]],
    config: Config,
    comms: tensor.Comms,
) -> tuple[
    Float[Array, "batch tokens heads head_width"],
    Float[Array, "batch tokens groups head_width"],
    Float[Array, "batch tokens groups head_width"],
]:
    """This device's heads of queries, and of the keys and values that they attend to, turned to
    their positions.
    """
    heads = weights.query.weight.shape[1]
    own = functools.partial(own_groups, heads=heads, config=config, comms=comms)
    q = _projected(y, weights.query)
    k, v = (_projected(y, own(each)) for each in (weights.key, weights.value))
    q = _normed(q, weights.query_norm, config, comms)
    k = _normed(k, weights.key_norm, config, comms)
    return rotated(q, turns), rotated(k, turns), v


def own_groups(layer: Linear, *, heads: int, config: Config, comms: tensor.Comms) -> Linear:
    """Of a layer to keys or values, the heads that this device's `heads` of queries attend to.

    They are all that the device has where the axis splits them, and some of them where each device
    has all.

    Raises:
        ValueError: the device has neither.
    """
    groups, devices = layer.weight.shape[1], comms.axis.size()
    each = config.heads // config.groups  # heads of queries for one of keys
    if heads * devices == config.heads and groups * devices == config.groups:
        return layer
    if (
        heads * devices != config.heads
        or groups != config.groups
        or (heads % each and each % heads)
    ):
        raise ValueError(
            f"llama: with {config.heads} heads of queries and {config.groups} of keys and values "
            f"on {devices} devices, each "
            f"needs {config.heads // devices} of queries and, of keys and values, {config.groups} "
            f"/ {devices} or all; this has "
            f"{heads} and {groups}. Split them as llama.rules(axis, size={devices}) says."
        )
    first, needed = comms.axis.index() * heads // each, max(heads // each, 1)
    pick = lambda leaf, dim: lax.dynamic_slice_in_dim(comms.copy_to(leaf), first, needed, dim)
    return Linear(
        pick(layer.weight, 1), () if isinstance(layer.bias, tuple) else pick(layer.bias, 0)
    )


def rotary(
    config: Config, positions: Int[Array, " tokens"]
) -> tuple[Float[Array, "tokens pairs"], Float[Array, "tokens pairs"]]:
    """Cosine and sine of the angle by which each pair of a head is turned at each position, in
    float32, or wider where allowed.

    Pair i of K / 2 turns by position * theta^(-2i/K), which `config.scaling` divides where that is
    slow.

    Sources: Su et al., RoFormer (arXiv 2104.09864); for the scaling, the code that Meta published
    with Llama 3.1.
    """
    exact = jnp.result_type(
        float
    )  # float64 where it is enabled: an angle of 1e5 has few digits left in float32
    K = config.head_width
    turn = config.theta ** (-jnp.arange(0, K, 2, dtype=exact) / K)
    if (scaling := config.scaling) is not None:
        turns_of_old_context = scaling.original * turn / (2 * math.pi)
        fast = jnp.clip((turns_of_old_context - scaling.low) / (scaling.high - scaling.low), 0, 1)
        turn = turn * (fast + (1 - fast) / scaling.factor)
    angles = positions.astype(exact)[:, None] * turn[None]
    return jnp.cos(angles), jnp.sin(angles)


def rotated(
    x: Float[Array, "batch tokens heads head_width"],
    turns: tuple[Float[Array, "tokens pairs"], Float[Array, "tokens pairs"]],
) -> Float[Array, "batch tokens heads head_width"]:
    """Each head's pairs, i and i + K / 2, turned; in float32 or wider, and in the type of `x`
    again.
    """
    cosine, sine = (each.astype(accumulation_dtype(x.dtype))[None, :, None] for each in turns)
    a, b = jnp.split(x.astype(accumulation_dtype(x.dtype)), 2, axis=-1)
    return jnp.concatenate([a * cosine - b * sine, b * cosine + a * sine], axis=-1).astype(x.dtype)


def head(
    model: Llama,
    x: Float[Array, "batch tokens_shard width"],
    targets: Int[Array, "batch tokens"],
    *,
    weights: Float[Array, "batch tokens"] | None = None,
    comms: tensor.Comms = ONE_DEVICE,
    across: Callable[..., Any] = lambda x: x,
) -> Float[Array, ""]:
    """The mean cross-entropy of `targets`, times their `weights`, after the last norm and the head,
    in nats a token.

    `across` takes the normalised activations to all devices that share the vocabulary.
    """
    x = decoder_taps.whole(
        comms.all_tokens(across(model.norm(x, model.config.epsilon))), "head.in", comms
    )
    return decoder_parts.mean_loss(
        x, model.unembedding, targets, weights, comms, model.config.vocabulary
    )


def _layer(
    config: Config,
    *,
    positions: Int[Array, " tokens"],
    comms: tensor.Comms,
    attend: Callable[..., Any],
) -> Callable[..., Any]:
    return functools.partial(
        block, config=config, turns=rotary(config, positions), comms=comms, attend=attend
    )


PARTS = decoder_parts.DecoderParts(
    "llama", embed=embed, layer=_layer, head=head, unembed=unembedded
)


def _projected(y: Float[Array, "batch tokens width"], layer: Linear) -> Float[Array, "..."]:
    """The outputs of a column-parallel layer, of what has entered."""
    y = jnp.tensordot(y, layer.weight, axes=1)
    return y if isinstance(layer.bias, tuple) else tensor.add_bias(y, layer.bias)


def _normed(x, norm: Norm | tuple[()], config: Config, comms: tensor.Comms):
    """Heads normalised, each device's by the weight that all have."""
    return x if isinstance(norm, tuple) else Norm(comms.copy_to(norm.weight))(x, config.epsilon)
