"""The functions in which a Llama differs from other decoders: its block, rotary positions, experts.

Legend: B batch, T tokens, D width, H heads of queries, G heads of keys and values, K head width, F
hidden units of the feed-forward, L layers. An attribute for a part that the model lacks, such as a
bias, is `()`.

`comms` is a `tensor.Comms`, the functions by which the devices of the tensor axis communicate:
`comms.all_tokens` gathers the tokens of the residual stream, which may be split over the devices;
`comms.row` multiplies by a device's rows of a weight and sums over the devices; `comms.copy_to`
returns its argument, a weight that all devices have, and in the backward pass sums the weight's
gradients over the devices. `decoder_taps.split` returns its argument unchanged. In a run that
`parallax.bisect` records, `split` also reports the argument to `bisect`.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Key

from parallax import experts, pipeline, remat, tensor
from parallax.models import block as blocks
from parallax.models import decoder_parts, decoder_taps
from parallax.models.attention import grouped
from parallax.models.block import Block, Linear
from parallax.models.llama.model import MLP, Attention, MoE, Norm
from parallax.models.llama.sizes import Config
from parallax.precision import accumulation_dtype

Turns = tuple[Float[Array, "tokens pairs"], Float[Array, "tokens pairs"]]


@remat.of_arguments
def _gated(gate, up):
    """Returns silu(gate) * up. Only `gate` and `up` are kept for the backward pass."""
    return jax.nn.silu(gate) * up


def block(
    weights: Block,
    x: Float[Array, "batch tokens_shard width"],
    keys: Key[Array, " batch"] | None,
    layer: Int[Array, ""],
    *,
    config: Config,
    turns: Turns,
    comms: tensor.Comms,
    attend: Callable[..., Any],
) -> Float[Array, "batch tokens_shard width"] | pipeline.Output:
    """Returns the residual stream after one block, as `models.block.apply` computes it. A block
    with experts returns an `Output` that holds the stream, the sum of the block's auxiliary losses,
    and its `experts.Statistics`.

    `keys` and `layer` are for dropout, which a Llama does not have; blocks of all families take
    them. `turns` is the result of `rotary` for the positions of all tokens in
    `comms.all_tokens(x)`.
    """

    def heads(y):
        """Returns this device's queries, keys and values by head, from the normalised stream."""
        y = comms.all_tokens(y)
        q, k, v = queries_keys_values(weights.attention, y, turns, config, comms)
        # Only q has a tap: several devices may have the same heads of keys and values.
        return decoder_taps.split(q, "blocks.*.attention.query", comms, dim=2), k, v

    def feed_forward(y):
        """Returns the output of the feed-forward or of the experts, to be added to the residual
        stream, and the router's statistics, which are None without experts.
        """
        if isinstance(weights.mlp, MLP):
            return fed_forward(weights.mlp, y, comms), None
        return mixed(weights.mlp, y, config, comms)

    x, statistics = blocks.apply(
        weights,
        x,
        heads=heads,
        feed_forward=feed_forward,
        epsilon=config.epsilon,
        comms=comms,
        attend=attend,
    )
    if statistics is None:
        return x
    loss = config.balance * statistics.balance + config.z * statistics.z
    return pipeline.Output(x, loss=loss, aux=statistics)


def _layer(config, *, positions, comms, attend):
    """Returns `block` as a function `(weights, x, keys, layer)` for tokens at these positions. Its
    other arguments are bound.
    """
    turns = rotary(config, positions)
    return functools.partial(block, config=config, turns=turns, comms=comms, attend=attend)


PARTS = decoder_parts.DecoderParts("llama", layer=_layer)
loss = functools.partial(decoder_parts.loss, PARTS, attend=grouped)
"""`decoder_parts.loss` of a Llama, which has no dropout."""
loss_and_statistics = functools.partial(decoder_parts.loss_and_aux, PARTS, attend=grouped)
"""`loss`, and the `experts.Statistics` of all layers as arrays [L, ...]; None without experts."""
logits = functools.partial(decoder_parts.logits, PARTS, attend=grouped)
"""`decoder_parts.logits` of a Llama."""
stages = functools.partial(decoder_parts.stages, PARTS)
"""`decoder_parts.stages` of a Llama."""


def fed_forward(
    weights: MLP, y: Float[Array, "batch tokens_shard width"], comms: tensor.Comms
) -> Float[Array, "batch tokens_shard width"]:
    """Returns the output of the feed-forward, to be added to the residual stream."""
    y = comms.all_tokens(y)
    y = _gated(_projected(y, weights.gate), _projected(y, weights.up))
    y = decoder_taps.split(y, "blocks.*.mlp.up", comms, dim=2)  # dim 2 is the hidden units
    return comms.row(y, weights.down.weight, None)


def mixed(
    weights: MoE, y: Float[Array, "batch tokens_shard width"], config: Config, comms: tensor.Comms
) -> tuple[Float[Array, "batch tokens_shard width"], experts.Statistics]:
    """Returns the sum of the outputs of the experts and of the shared expert, to be added to the
    residual stream, and statistics of the router.

    `comms.wrap_experts` makes `experts.moe` send tokens to experts on other devices. Without an
    axis of experts, all experts are on this device, and `experts.moe` is called with `axis=()`.
    The router divides the weights of a token's chosen experts by their sum (`normalised`).
    """
    mixture = comms.wrap_experts(functools.partial(experts.moe, axis=()))
    route = experts.top_k(config.chosen, normalised=True)
    out, statistics = mixture(y, weights.mixture, route=route, comms=comms)
    if not isinstance(weights.shared, tuple):
        out = out + fed_forward(weights.shared, y, comms)
    return out, statistics


def queries_keys_values(
    weights: Attention,
    y: Float[Array, "batch tokens width"],
    turns: Turns,
    config: Config,
    comms: tensor.Comms,
) -> tuple[
    Float[Array, "batch tokens heads head_width"],
    Float[Array, "batch tokens groups head_width"],
    Float[Array, "batch tokens groups head_width"],
]:
    """Returns this device's heads of queries, and the heads of keys and values that these queries
    attend to. Queries and keys are normalised head by head, if the model has norms for them, and
    then `rotated` by the angles of their positions. `turns` has the cosines and sines of these
    angles for the tokens of `y`, from `rotary`.
    """
    heads = weights.query.weight.shape[1]  # of [D, H, K]: this device's heads
    local_groups = functools.partial(attended_groups, heads=heads, config=config, comms=comms)
    q = _projected(y, weights.query)
    k = _projected(y, local_groups(weights.key))
    v = _projected(y, local_groups(weights.value))
    q = _normed(q, weights.query_norm, config, comms)
    k = _normed(k, weights.key_norm, config, comms)
    return rotated(q, turns), rotated(k, turns), v


def attended_groups(layer: Linear, *, heads: int, config: Config, comms: tensor.Comms) -> Linear:
    """Returns the projection to keys or to values, `layer`, with only the heads that this device
    needs: those that its heads of queries attend to. The device has `heads` heads of queries.

    If the heads of keys are split over the devices, `layer` is returned unchanged. If each device
    has all heads of keys, the heads that this device needs are picked; in the backward pass, an
    all-reduce then sums the gradients of the layer over the devices.

    Raises:
        ValueError: the device has neither its share of the heads of keys nor all heads of keys.
    """
    groups, devices = layer.weight.shape[1], comms.axis.size()  # the weight is [D, G, K]
    sharers = config.heads // config.groups  # heads of queries that share one head of keys
    splits_queries = heads * devices == config.heads
    if splits_queries and groups * devices == config.groups:
        return layer
    # The heads of keys that a device uses must each have all their `sharers` heads of queries on
    # this device; or all heads of queries on the device must share one head of keys.
    has_all = groups == config.groups and (heads % sharers == 0 or sharers % heads == 0)
    if not (splits_queries and has_all):
        raise ValueError(
            f"llama: with {config.heads} heads of queries and {config.groups} of keys and values "
            f"on {devices} devices, each device needs {config.heads // devices} heads of queries. "
            f"Of the heads of keys and values it needs all, or 1/{devices}. This device has "
            f"{heads} heads of queries and {groups} of keys and values. Split them as "
            f"llama.rules(axis, size={devices}) says."
        )
    # `first` is the head of keys of this device's first head of queries. A device with fewer heads
    # of queries than share one head of keys needs one head.
    first, needed = comms.axis.index() * heads // sharers, max(heads // sharers, 1)

    def pick(leaf, dim):
        """Returns the heads that this device needs, of a leaf whose heads are along dim `dim`."""
        return lax.dynamic_slice_in_dim(comms.copy_to(leaf), first, needed, dim)

    bias = () if isinstance(layer.bias, tuple) else pick(layer.bias, 0)
    return Linear(pick(layer.weight, 1), bias)


def rotary(config: Config, positions: Int[Array, " tokens"]) -> Turns:
    """Returns the cosine and the sine, both [T, K / 2], of the angle by which each pair of numbers
    of a head is rotated at each position; in float32, or in float64 if JAX has it enabled.

    Pair i of the K / 2 pairs of numbers in a head of width K rotates by position * theta^(-2i/K),
    with theta = `config.theta`. For pairs that rotate slowly, `config.scaling` divides this angle.

    Sources: Su et al., RoFormer (arXiv 2104.09864); for the scaling, the code that Meta published
    with Llama 3.1.
    """
    # float64 if it is enabled: an angle of 1e5 has few exact digits in float32.
    exact = jnp.result_type(float)
    K = config.head_width
    turn = config.theta ** (-jnp.arange(0, K, 2, dtype=exact) / K)  # each pair's angle per position
    if (scaling := config.scaling) is not None:
        # `fast` is 1 for pairs that keep their speed, 0 for pairs that the factor slows down, and
        # between the two it interpolates.
        turns_of_old_context = scaling.original * turn / (2 * math.pi)
        fast = jnp.clip((turns_of_old_context - scaling.low) / (scaling.high - scaling.low), 0, 1)
        turn = turn * (fast + (1 - fast) / scaling.factor)
    angles = positions.astype(exact)[:, None] * turn[None]
    return jnp.cos(angles), jnp.sin(angles)


def rotated(
    x: Float[Array, "batch tokens heads head_width"],
    turns: Turns,
) -> Float[Array, "batch tokens heads head_width"]:
    """Returns `x` with the numbers i and i + K / 2 of each head rotated as a pair, for i < K / 2; K
    is the width of a head. `turns` has the cosines and sines of the angles. The computation is in
    float32 or wider, the result in the type of `x`.
    """
    cosine, sine = (turn.astype(accumulation_dtype(x.dtype))[None, :, None] for turn in turns)
    a, b = jnp.split(x.astype(accumulation_dtype(x.dtype)), 2, axis=-1)
    return jnp.concatenate([a * cosine - b * sine, b * cosine + a * sine], axis=-1).astype(x.dtype)


def _projected(y: Float[Array, "batch tokens width"], layer: Linear) -> Float[Array, "..."]:
    """Returns the outputs of a column-parallel layer: [B, T, H, K] for queries, [B, T, G, K] for
    keys or values, and [B, T, F] for hidden units. All devices of the tensor axis have the same
    `y`.
    """
    y = jnp.tensordot(y, layer.weight, axes=1)
    # A plain `+` fails if JAX is set to refuse arrays with different numbers of dims.
    return y if isinstance(layer.bias, tuple) else tensor.add_bias(y, layer.bias)


def _normed(x, norm: Norm | tuple[()], config: Config, comms: tensor.Comms):
    """Returns `x`, this device's heads, normalised by `norm`; if `norm` is `()`, `x` is unchanged.
    All devices have the same weight, [K], whose gradients `copy_to` sums.
    """
    return x if isinstance(norm, tuple) else Norm(comms.copy_to(norm.weight))(x, config.epsilon)
