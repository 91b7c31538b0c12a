"""Llama as Equinox modules that run whole or on a shard: they read their sizes from their arrays.

Legend: B batch, T tokens, D width, F feed-forward, H heads of queries, G heads of keys and values
(groups), K head width, V rows of the vocabulary, L layers. The L blocks are one `Block` whose
leaves have a leading dim of layers, and run under `lax.scan`. Matrices are stored [in, out]. What a
model has not, such as a bias, is `()`.

Sources: Touvron et al., LLaMA (arXiv 2302.13971); Grattafiori et al., The Llama 3 herd of models
(arXiv 2407.21783); for biases and norms of heads the Qwen2 and Qwen3 technical reports (arXiv
2407.10671, 2505.09388).
"""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Key

from parallax import experts, precision
from parallax import rules as sharding
from parallax.collectives.types import AxisName
from parallax.models import checked_numbers
from parallax.models.block import Block, Linear
from parallax.models.decoder_parts import initial, vocabulary_rows
from parallax.models.llama.sizes import Config


class Norm(eqx.Module):
    """Division by the root of the mean square over the last dim, computed in float32 or wider.

    Source: Zhang and Sennrich, Root mean square layer normalization (arXiv 1910.07467).

    Attributes:
        weight: `[L, D]`; inside a block, and of the last norm, `[D]`.
    """

    weight: Float[Array, "*layers width"]

    def __call__(
        self, x: Float[Array, "*dims width"], epsilon: float
    ) -> Float[Array, "*dims width"]:
        """Returns x / sqrt(mean of squares + epsilon) * weight."""
        wide = x.astype(precision.accumulation_dtype(x.dtype))
        scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
        return (wide * scale).astype(x.dtype) * jnp.expand_dims(self.weight, range(x.ndim - 1))


class Attention(eqx.Module):
    """Causal self-attention, split over devices by heads of queries; those of keys and values as
    far as they are enough.

    Attributes:
        query: a column-parallel layer [D, H, K].
        key: likewise [D, G, K]; where there are fewer of these heads than devices, each device has
            all of them.
        value: likewise.
        out: a row-parallel layer [H, K, D].
        query_norm: of each head of queries, [K], or `()`.
        key_norm: of each head of keys, or `()`.
    """

    query: Linear
    key: Linear
    value: Linear
    out: Linear
    query_norm: Norm | tuple[()] = ()
    key_norm: Norm | tuple[()] = ()


class MLP(eqx.Module):
    """down(silu(gate(x)) * up(x)), split over devices by hidden units.

    Source: Shazeer, GLU variants improve transformer (arXiv 2002.05202).

    Attributes:
        gate: a column-parallel layer [D, F].
        up: likewise.
        down: a row-parallel layer [F, D].
    """

    gate: Linear
    up: Linear
    down: Linear


class MoE(eqx.Module):
    """Experts in the feed-forward's place: split over devices by experts, and by hidden units.

    Sources: Jiang et al., Mixtral of experts (arXiv 2401.04088); Dai et al., DeepSeekMoE (arXiv
    2401.06066), for the shared one.

    Attributes:
        mixture: the router [D, E] and the experts, [E, D, F] and [E, F, D].
        shared: one more expert, to which all tokens go, or `()`.
    """

    mixture: experts.Mixture
    shared: MLP | tuple[()] = ()


class Llama(eqx.Module):
    """The model, whole or a shard of it.

    Args:
        config: its sizes.
        key: the seed of its weights: normal with deviation 0.02, and 0.02 / sqrt(2 L) for what adds
            to the residual stream.
        dtype: of the weights.

    Attributes:
        table: `[V, D]`: embeds tokens and, where the head is tied, is the head.
        blocks: all of them, as one.
        norm: of what enters the head.
        head: `[V, D]`, or `()` where it is tied.
        config: its sizes, whole, on a shard too.
    """

    table: Float[Array, "rows width"]
    blocks: Block
    norm: Norm
    head: Float[Array, "rows width"] | tuple[()]
    config: Config = eqx.field(static=True)

    def __init__(self, config: Config, *, key: Key[Array, ""], dtype: DTypeLike = jnp.float32):
        D, L, K = config.width, config.layers, config.head_width
        normal = initial(key, dtype, 9)
        zeros = functools.partial(jnp.zeros, dtype=dtype)
        ones = functools.partial(jnp.ones, dtype=dtype)

        def rows():
            return vocabulary_rows(normal(config.rows, D), config.vocabulary)

        def linear(heads):
            bias = zeros((L, heads, K)) if config.bias else ()
            return Linear(normal(L, D, heads, K), bias)

        def head_norm():
            return Norm(ones((L, K))) if config.head_norms else ()

        self.config = config
        self.table = rows()
        attention = Attention(
            query=linear(config.heads),
            key=linear(config.groups),
            value=linear(config.groups),
            out=Linear(normal(L, config.heads, K, D, scale=0.02 / (2 * L) ** 0.5)),
            query_norm=head_norm(),
            key_norm=head_norm(),
        )
        self.blocks = Block(
            attention_norm=Norm(ones((L, D))),
            attention=attention,
            mlp_norm=Norm(ones((L, D))),
            mlp=_moe(config, key, dtype) if config.experts else _mlp(normal, config, config.hidden),
        )
        self.norm = Norm(ones((D,)))
        self.head = () if config.tied else rows()

    @property
    def embedding(self) -> Float[Array, "rows width"]:
        """The embedding of tokens."""
        return self.table

    @property
    def unembedding(self) -> Float[Array, "rows width"]:
        """The head's rows: its own, or those of the embedding."""
        return self.table if isinstance(self.head, tuple) else self.head


def _mlp(normal: Callable[..., Array], config: Config, hidden: int) -> MLP:
    L, D = config.layers, config.width
    return MLP(
        gate=Linear(normal(L, D, hidden)),
        up=Linear(normal(L, D, hidden)),
        down=Linear(normal(L, hidden, D, scale=0.02 / (2 * L) ** 0.5)),
    )


def _moe(config: Config, key: Key[Array, ""], dtype: DTypeLike) -> MoE:
    D, F, L, E = config.width, config.hidden, config.layers, config.experts
    normal = initial(jax.random.fold_in(key, 1), dtype, 7)
    arrays = normal(L, E, D, F), normal(L, E, D, F), normal(L, E, F, D, scale=0.02 / (2 * L) ** 0.5)
    shapes = eqx.filter_eval_shape(lambda: experts.Gated(E, D, F, dtype=dtype, key=key))
    gated = eqx.tree_at(lambda gated: (gated.gate, gated.up, gated.down), shapes, arrays)
    mixture = experts.Mixture(router=normal(L, D, E), experts=gated, bias=())
    return MoE(mixture, _mlp(normal, config, config.shared) if config.shared else ())


def rules(
    axis_name: AxisName = "tensor",
    *,
    stage: str | None = None,
    size: int = 1,
    expert: AxisName | None = None,
) -> sharding.Rule:
    """Returns how a Llama is split over `axis_name`: attention by heads, the feed-forward by its
    hidden dim, the vocabulary by rows.

    Heads of keys and values are split where `size`, that of the axis, divides them. Where they
    divide it, each device has all of them, and `forward.block` picks the one that its queries
    attend to.

    With `stage`, how one is split whose blocks are [v, L / v, ...]: the layers of each chunk over
    the stages, the vocabulary over both axes.

    Of a model with experts, each is split over `axis_name` by its hidden dim; with `expert`, an
    axis that splits the batch, each device of it has some of them.

    Raises:
        ValueError: where the rule is asked: neither divides the other.
    """
    layers = (None,) if stage is None else (None, stage)
    rows = P(axis_name if stage is None else (stage, axis_name))
    column, row = (None, axis_name), (axis_name,)
    specs = {
        "table": rows,
        "head": rows,
        "blocks.attention.query.weight": P(*layers, *column),
        "blocks.attention.query.bias": P(*layers, axis_name),
        "blocks.attention.out.weight": P(*layers, *row),
    }
    for part, dims in {"gate": column, "up": column, "down": row}.items():
        specs[f"blocks.mlp.{part}.weight"] = P(*layers, *dims)
        specs[f"blocks.mlp.shared.{part}.weight"] = P(*layers, *dims)
        specs[f"blocks.mlp.mixture.experts.{part}"] = P(*layers, expert, *dims)

    def keys_and_values(path: str, leaf: Any) -> P | None:
        layer, _, name = path.rpartition(".")
        if layer not in ("blocks.attention.key", "blocks.attention.value"):
            return None
        before = (*layers, None) if name == "weight" else layers
        groups = leaf.shape[len(before)]
        return P(*before, axis_name) if split_groups(groups, size) else P(*layers)

    def listed(path: str, leaf: Any) -> P | None:
        return specs.get(path)

    of_experts = [path for path in specs if expert is not None and "mixture" in path]
    return sharding.first(
        *(sharding.experts(path, specs[path]) for path in of_experts),
        listed,
        keys_and_values,
        sharding.match("blocks.**", P(*layers)),
        sharding.match("**", P()),
    )


def split_groups(groups: int, devices: int) -> bool:
    """Returns whether so many devices split the heads of keys and values; else each has all of
    them. Raises `ValueError` as `rules`.
    """
    if groups % devices and devices % groups:
        fit = max(n for n in range(1, devices) if groups % n == 0 or n % groups == 0)
        raise ValueError(
            f"llama: {groups} heads of keys and values and {devices} devices that split the heads: "
            f"one must divide the other. Use {fit} devices, or "
            f"groups={checked_numbers.divisor(devices, groups)}."
        )
    return groups % devices == 0
