"""Llama as Equinox modules, which hold the whole model or one device's shard. The modules read the
sizes from the arrays.

Legend: B batch, T tokens, D width, F hidden units of the feed-forward, H heads of queries, G heads
of keys and values (groups), K head width, V rows of the vocabulary, L layers. The L blocks are one
`Block` whose leaves have a leading dim of layers; `lax.scan` runs the blocks. Matrices are stored
[in, out]. An attribute for a part that the model lacks, such as a bias, is `()`.

Sources: Touvron et al., LLaMA (arXiv 2302.13971); Grattafiori et al., The Llama 3 herd of models
(arXiv 2407.21783); for biases, and for norms of queries and keys, the Qwen2 and Qwen3 technical
reports (arXiv 2407.10671, 2505.09388).
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

from parallax import experts, precision, remat
from parallax import rules as sharding
from parallax.collectives.types import AxisName, axes
from parallax.models import checked_numbers
from parallax.models.block import Block, Linear
from parallax.models.decoder_parts import initial, vocabulary_rows
from parallax.models.llama.sizes import Config


class Norm(eqx.Module):
    """Division by the root of the mean square over the last dim, computed in float32 or wider.

    Source: Zhang and Sennrich, Root mean square layer normalization (arXiv 1910.07467).

    Attributes:
        weight: [layers, width] in the stacked blocks; [width] in one block, and in the norm before
            the head.
    """

    weight: Float[Array, "*layers width"]

    def __call__(
        self, x: Float[Array, "*dims width"], epsilon: float
    ) -> Float[Array, "*dims width"]:
        """Returns x / sqrt(mean of squares + epsilon) * weight.

        Keeps only `x` and the weight for the backward pass. The backward pass computes all other
        values again (`remat.of_arguments`).
        """

        def scaled(x, weight):
            """Returns the normalised `x`, times `weight`."""
            wide = x.astype(precision.accumulation_dtype(x.dtype))
            scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
            return (wide * scale).astype(x.dtype) * jnp.expand_dims(weight, range(x.ndim - 1))

        return remat.of_arguments(scaled)(x, self.weight)


class Attention(eqx.Module):
    """Causal self-attention, split over devices by heads of queries.

    The heads of keys and values are split too, if there are enough of these heads for the devices.

    Attributes:
        query: a column-parallel layer [D, H, K].
        key: a column-parallel layer [D, G, K]; if there are fewer heads of keys than devices, each
            device has all heads of keys.
        value: a layer like `key`.
        out: a row-parallel layer [H, K, D].
        query_norm: a `Norm` of weight [K], applied to each head of queries; `()`: no norm.
        key_norm: a `Norm` of weight [K], applied to each head of keys; `()`: no norm.
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
        up: a column-parallel layer [D, F].
        down: a row-parallel layer [F, D].
    """

    gate: Linear
    up: Linear
    down: Linear


class MoE(eqx.Module):
    """Experts in place of the feed-forward. The expert axis splits the experts over devices, and
    the tensor axis splits the hidden units of each expert.

    Sources: Jiang et al., Mixtral of experts (arXiv 2401.04088); for the shared expert, Dai et al.,
    DeepSeekMoE (arXiv 2401.06066).

    Attributes:
        mixture: the router [D, E] and the experts, [E, D, F] and [E, F, D].
        shared: one more expert, through which all tokens go; `()` if there is none.
    """

    mixture: experts.Mixture
    shared: MLP | tuple[()] = ()


class Llama(eqx.Module):
    """The whole model, or one device's shard of the model.

    Args:
        config: the model's sizes.
        key: the seed of the weights, which are normal with deviation 0.02, or 0.02 / sqrt(2 L) in
            the layers that add to the residual stream.
        dtype: the type of the weights.

    Attributes:
        table: `[V, D]`, the embedding of tokens; it is also the head if the head is tied.
        blocks: all blocks, as one `Block` with a leading dim of layers.
        norm: the norm before the head.
        head: `[V, D]`, or an empty tuple if the head is tied.
        config: the sizes of the whole model, also on a shard.
    """

    table: Float[Array, "rows width"]
    blocks: Block
    norm: Norm
    head: Float[Array, "rows width"] | tuple[()]
    config: Config = eqx.field(static=True)

    def __init__(self, config: Config, *, key: Key[Array, ""], dtype: DTypeLike = jnp.float32):
        """Draws the weights of a whole model."""
        D, L, K = config.width, config.layers, config.head_width
        # At most nine arrays: embedding, query, key, value, out, gate, up, down and head. Experts
        # have keys of their own.
        normal = initial(key, dtype, 9)
        zeros = functools.partial(jnp.zeros, dtype=dtype)
        ones = functools.partial(jnp.ones, dtype=dtype)

        def rows():
            """Returns new rows of the embedding or the head, [V, D], with zeros as padding."""
            return vocabulary_rows(normal(config.rows, D), config.vocabulary)

        def linear(heads):
            """Returns new layers of queries, keys or values, with weights [L, D, heads, K]."""
            bias = zeros((L, heads, K)) if config.bias else ()
            return Linear(normal(L, D, heads, K), bias)

        def head_norm():
            """Returns a new norm that is applied to each head of the queries or the keys, or `()`
            if the model has no such norms."""
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
        """The rows of the head, [V, D]; if the head is tied, they are the rows of the embedding."""
        return self.table if isinstance(self.head, tuple) else self.head


def _mlp(normal: Callable[..., Array], config: Config, hidden: int) -> MLP:
    """Returns the feed-forward layers of all L blocks, with `hidden` units, drawn by `normal`."""
    L, D = config.layers, config.width
    return MLP(
        gate=Linear(normal(L, D, hidden)),
        up=Linear(normal(L, D, hidden)),
        down=Linear(normal(L, hidden, D, scale=0.02 / (2 * L) ** 0.5)),
    )


def _moe(config: Config, key: Key[Array, ""], dtype: DTypeLike) -> MoE:
    """Returns the E experts of all L blocks, their routers and the shared expert, if there is one.

    The constructor of `experts.Gated` would draw weights with another standard deviation. So the
    constructor is only traced, for the structure of its result, and the arrays are drawn as [L, E,
    ...] with this family's deviation.
    """
    D, F, L, E = config.width, config.hidden, config.layers, config.experts
    # Keys other than those of the rest of the model, for at most seven arrays.
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
    """Returns the rule that splits a Llama over `axis_name`: attention by heads, the feed-forward
    by its hidden dim, the vocabulary by rows.

    `size` is the number of devices of the axis. If `size` divides the number of heads of keys and
    values, these heads are split. Otherwise the number of these heads must divide `size`, and each
    device has all these heads; `forward.block` picks the heads that the device's queries attend to.

    With `stage`, the rule is for a model whose blocks are [v, L / v, ...], for v chunks per stage.
    Index c of dim 0 has the layers of the c-th chunk of every stage, in the order of the stages. So
    the rule splits dim 1 over the stages. It splits the vocabulary over `stage` and `axis_name`.

    The hidden dim of each expert is split over `axis_name`. With `expert`, an axis that splits the
    batch, the experts are split over `expert`.

    Raises:
        ValueError: `size` does not divide the number of heads of keys and values, and that number
            does not divide `size`. The returned rule raises this error, by `split_groups`, when it
            is called.
    """
    # The entries of a spec for the first dims of a block's leaves: [L], or [v, L / v].
    layers = (None,) if stage is None else (None, stage)
    rows = P(axis_name if stage is None else (stage, *axes(axis_name)))
    # The entries for [D, F] and [F, D], of which F is split. Attention has [H, K] in place of F,
    # and splits H.
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
        """Returns the spec of a leaf of the key or value projection, or None for other leaves.

        Weights have the dims [layers, D, G, K], and biases [layers, G, K]; with stages, there are
        two dims of layers. The variable `layers` of the enclosing function holds the entries of the
        spec for the dims of layers.
        """
        projection, _, name = path.rpartition(".")
        if projection not in ("blocks.attention.key", "blocks.attention.value"):
            return None
        dims_before_groups = (*layers, None) if name == "weight" else layers
        groups = leaf.shape[len(dims_before_groups)]  # the dim after these is G
        return P(*dims_before_groups, axis_name) if split_groups(groups, size) else P(*layers)

    def listed(path: str, leaf: Any) -> P | None:
        """Returns the spec of a leaf in the table `specs`, or None for other leaves."""
        return specs.get(path)

    of_experts = [path for path in specs if expert is not None and "mixture" in path]
    # The first rule that gives a spec counts. `experts`, unlike `match`, may split a parameter over
    # an axis that splits the batch.
    return sharding.first(
        *(sharding.experts(path, specs[path]) for path in of_experts),
        listed,
        keys_and_values,
        sharding.match("blocks.**", P(*layers)),
        sharding.match("**", P()),
    )


def split_groups(groups: int, devices: int) -> bool:
    """Returns whether the `groups` heads of keys and values are split over the devices; if not,
    each device has all these heads.

    Raises:
        ValueError: `devices` does not divide `groups`, and `groups` does not divide `devices`. A
            group is the heads of queries that share one head of keys. Some device would have heads
            of several groups, and only a part of at least one of these groups.
    """
    if groups % devices and devices % groups:
        fewer_devices = max(n for n in range(1, devices) if groups % n == 0 or n % groups == 0)
        fewer_groups = checked_numbers.divisor(devices, groups)  # the most that divide `devices`
        raise ValueError(
            f"llama: groups={groups}, the number of heads of keys and values, must divide "
            f"{devices}, the number of devices that split the heads, or be a multiple of "
            f"{devices}. Use {fewer_devices} devices, or groups={fewer_groups}."
        )
    return groups % devices == 0
