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
from parallax.models.decoder_parts import initial, vocabulary_rows
from parallax.models.llama.sizes import Config


class Linear(eqx.Module):
    """A weight and perhaps a bias.

    Attributes:
        weight: `[L, *inputs, *outputs]`; inside a block, without the L.
        bias: `[L, *outputs]`, likewise, or `()`.
    """

    weight: Float[Array, "..."]
    bias: Float[Array, "..."] | tuple[()] = ()


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
        """x / sqrt(mean of squares + epsilon) * weight."""
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


class Block(eqx.Module):
    """A pre-norm transformer block; every leaf has a leading dim of layers.

    Attributes:
        attention_norm: of what enters the attention.
        attention: the first half, added to the residual stream.
        mlp_norm: of what enters the feed-forward.
        mlp: the second half, added likewise.
    """

    attention_norm: Norm
    attention: Attention
    mlp_norm: Norm
    mlp: MLP | MoE


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
        D, F, L, H, G, K = (
            config.width,
            config.hidden,
            config.layers,
            config.heads,
            config.groups,
            config.head_width,
        )
        normal = initial(key, dtype, 9)
        zeros, ones = (
            functools.partial(jnp.zeros, dtype=dtype),
            functools.partial(jnp.ones, dtype=dtype),
        )
        residual = 0.02 / (2 * L) ** 0.5
        rows = lambda: vocabulary_rows(normal(config.rows, D), config.vocabulary)
        linear = lambda heads: Linear(
            normal(L, D, heads, K), zeros((L, heads, K)) if config.bias else ()
        )
        norm = lambda: Norm(ones((L, K))) if config.head_norms else ()
        self.config = config
        self.table = rows()
        self.blocks = Block(
            attention_norm=Norm(ones((L, D))),
            attention=Attention(
                query=linear(H),
                key=linear(G),
                value=linear(G),
                out=Linear(normal(L, H, K, D, scale=residual)),
                query_norm=norm(),
                key_norm=norm(),
            ),
            mlp_norm=Norm(ones((L, D))),
            mlp=_experts(config, key, dtype) if config.experts else _mlp(normal, L, D, F),
        )
        self.norm = Norm(ones((D,)))
        self.head = () if config.tied else rows()

    @property
    def unembedding(self) -> Float[Array, "rows width"]:
        """The head's rows: its own, or those of the embedding."""
        return self.table if isinstance(self.head, tuple) else self.head


def _mlp(normal: Callable[..., Array], L: int, D: int, F: int) -> MLP:
    residual = 0.02 / (2 * L) ** 0.5
    return MLP(
        gate=Linear(normal(L, D, F)),
        up=Linear(normal(L, D, F)),
        down=Linear(normal(L, F, D, scale=residual)),
    )


def _experts(config: Config, key: Key[Array, ""], dtype: DTypeLike) -> MoE:
    D, F, L, E = config.width, config.hidden, config.layers, config.experts
    normal = initial(jax.random.fold_in(key, 1), dtype, 7)
    arrays = normal(L, E, D, F), normal(L, E, D, F), normal(L, E, F, D, scale=0.02 / (2 * L) ** 0.5)
    shapes = eqx.filter_eval_shape(lambda: experts.Gated(E, D, F, dtype=dtype, key=key))
    gated = eqx.tree_at(lambda each: (each.gate, each.up, each.down), shapes, arrays)
    mixture = experts.Mixture(router=normal(L, D, E), experts=gated, bias=())
    return MoE(mixture, _mlp(normal, L, D, config.shared) if config.shared else ())


def rules(
    axis_name: AxisName = "tensor",
    *,
    stage: str | None = None,
    size: int = 1,
    expert: AxisName | None = None,
) -> sharding.Rule:
    """How a Llama is split over `axis_name`: attention by heads, the feed-forward by its hidden
    dim, the vocabulary by rows.

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
    of_mlp = {"gate": (None, axis_name), "up": (None, axis_name), "down": (axis_name,)}
    split = (
        {} if expert is None else {part: P(*layers, expert, *dims) for part, dims in of_mlp.items()}
    )

    def some(path: str, leaf: Any) -> P | None:
        """Of what not every model has, of keys and values, and of feed-forwards."""
        found = {"head": rows, "blocks.attention.query.bias": P(*layers, axis_name)}
        for part, dims in of_mlp.items():
            found |= dict.fromkeys(
                (f"blocks.mlp.{part}.weight", f"blocks.mlp.shared.{part}.weight"), P(*layers, *dims)
            )
            found |= {f"blocks.mlp.mixture.experts.{part}": P(*layers, None, *dims)}
        of, _, name = path.rpartition(".")
        if of not in ("blocks.attention.key", "blocks.attention.value"):
            return found.get(path)
        before = (*layers, None) if name == "weight" else layers
        return P(*before, axis_name) if split_groups(leaf.shape[len(before)], size) else P(*layers)

    return sharding.first(
        *(
            sharding.experts(f"blocks.mlp.mixture.experts.{part}", spec)
            for part, spec in split.items()
        ),
        some,
        sharding.match("table", rows),
        sharding.match("blocks.attention.query.weight", P(*layers, None, axis_name)),
        sharding.match("blocks.attention.out.weight", P(*layers, axis_name)),
        sharding.match("blocks.**", P(*layers)),
        sharding.match("**", P()),
    )


def split_groups(groups: int, devices: int) -> bool:
    """Whether so many devices split the heads of keys and values; else each has all of them. Raises
    `ValueError` as `rules`.
    """
    if groups % devices and devices % groups:
        fit = max(n for n in range(1, devices) if groups % n == 0 or n % groups == 0)
        raise ValueError(
            f"llama: {groups} heads of keys and values and {devices} devices that split the heads: "
            "one must divide the other. "
            f"Take {fit} devices, or groups={checked_numbers.divisor(devices, groups)}."
        )
    return groups % devices == 0
