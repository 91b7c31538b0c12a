"""GPT-2 as Equinox modules, which hold the whole model or one device's shard. The modules read
sizes, such as the number of heads, from the shapes of their own arrays, so the same code computes
with the whole model and with a shard.

Legend: B batch, T tokens, D width, F feed-forward, H heads, K head width, V rows of the vocabulary,
L layers. The L blocks are one `Block` whose leaves have a leading dim of layers; `lax.scan` runs
the blocks. Matrices are stored [in, out].

Source: Radford et al., Language models are unsupervised multitask learners (2019), and the weights
published with it.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Key

from parallax import precision, remat
from parallax import rules as sharding
from parallax.collectives.types import AxisName, axes
from parallax.models import checked_numbers
from parallax.models.block import Block, Linear
from parallax.models.decoder_parts import initial, vocabulary_rows
from parallax.models.files.origin import Origin


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes of a GPT-2, and its dropout rates.

    The embedding has `rows` rows: the vocabulary rounded up to a multiple of `vocabulary_multiple`,
    so that the rows can be split evenly over devices. The rows after the vocabulary have
    probability 0, and get no gradient.

    Args:
        layers: L, the number of blocks.
        heads: H, the number of heads in each layer.
        width: D, the width of the residual stream; a head is D / H wide, the feed-forward 4 D.
        context: the largest number of tokens in a window; each position has an embedding.
        vocabulary: the number of tokens in the vocabulary.
        vocabulary_multiple: a divisor of the number of the embedding's rows.
        dropout: the rate of dropout after the embedding and after each half of a block.
        attention_dropout: the rate of dropout of the attention weights.
        epsilon: the number that layer normalisation adds to the variance.
        origin: files and `config.json` fields that a loaded model does not use, kept for `save`.

    Raises:
        ValueError: a size is no whole number from 1 to 2^31 - 1, the heads do not divide the width,
            a rate is outside [0, 1), epsilon is below 0, or `vocabulary_multiple` is above 2^20.
    """

    layers: int = 12
    heads: int = 12
    width: int = 768
    context: int = 1024
    vocabulary: int = 50257
    vocabulary_multiple: int = 128
    dropout: float = 0.0
    attention_dropout: float = 0.0
    epsilon: float = 1e-5
    origin: Origin = dataclasses.field(default=Origin(), repr=False)

    def __post_init__(self):
        """Checks the fields, and stores them as `int` and `float`. Raises the `ValueError`s that
        the docstring of `Config` lists."""
        check = checked_numbers.Checked("gpt2.Config", self)
        check.whole("layers", "heads", "width", "context", "vocabulary")
        check.whole("vocabulary_multiple", most=checked_numbers.LARGEST_MULTIPLE)
        check.divides("width", "heads")  # the width is a multiple of the heads
        check.real("dropout", "attention_dropout", bound=checked_numbers.RATE)
        check.real("epsilon", bound=checked_numbers.NOT_NEGATIVE)

    @property
    def rows(self) -> int:
        """The number of rows of the embedding: the vocabulary with its padding."""
        return -(-self.vocabulary // self.vocabulary_multiple) * self.vocabulary_multiple

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes that the layout's numbers of devices must divide, for `Layout.check`."""
        return {
            "layers": self.layers,
            "heads": self.heads,
            "hidden": 4 * self.width,
            "rows": self.rows,  # of the padded vocabulary
            "tokens": self.context,
        }

    @property
    def parameters(self) -> int:
        """The number of parameters, padding left out."""
        D, L = self.width, self.layers
        # A block's weights: 3 D^2 in qkv, D^2 in out, 4 D^2 each in up and down; its biases: 3 D,
        # D, 4 D and D; its two norms: 4 D. The last norm has 2 D.
        return (self.vocabulary + self.context) * D + L * (12 * D * D + 13 * D) + 2 * D


SMALL = Config()
MEDIUM = Config(layers=24, heads=16, width=1024)
LARGE = Config(layers=36, heads=20, width=1280)
XL = Config(layers=48, heads=25, width=1600)
GPT3 = Config(layers=96, heads=96, width=12288, context=2048)


class Norm(eqx.Module):
    """Layer normalisation over the last dim, computed in float32 or wider.

    Source: Ba et al., Layer normalization (arXiv 1607.06450).

    Attributes:
        weight: [layers, width] in the stacked blocks; [width] in one block, and in the norm before
            the head.
        bias: of the same shape as `weight`.
    """

    weight: Float[Array, "*layers width"]
    bias: Float[Array, "*layers width"]

    def __call__(
        self, x: Float[Array, "batch tokens width"], epsilon: float
    ) -> Float[Array, "batch tokens width"]:
        """Returns (x - mean) / sqrt(variance + epsilon) * weight + bias.

        With `remat.of_arguments`, only `x` and the weight are kept for the backward pass, which
        computes the other values again. Without it, JAX would keep two other arrays of the shape of
        `x`, one of them in float32 or wider.
        """

        def scaled(x, weight):
            """Returns the normalised `x`, times `weight`. The caller adds the bias, which the
            backward pass does not need.
            """
            wide = x.astype(precision.accumulation_dtype(x.dtype))
            centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
            scale = lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + epsilon)
            return (centred * scale).astype(x.dtype) * weight[None, None]

        return remat.of_arguments(scaled)(x, self.weight) + self.bias[None, None]


class Attention(eqx.Module):
    """Causal self-attention, split over devices by heads.

    Attributes:
        qkv: a column-parallel layer [D, 3, H, K]; its outputs are queries, keys and values.
        out: a row-parallel layer [H, K, D].
    """

    qkv: Linear
    out: Linear


class MLP(eqx.Module):
    """Two layers with a tanh-GELU between them, split over devices by hidden units.

    Attributes:
        up: a column-parallel layer [D, F].
        down: a row-parallel layer [F, D].
    """

    up: Linear
    down: Linear


class GPT2(eqx.Module):
    """The whole model, or one device's shard of the model.

    Args:
        config: the model's sizes.
        key: the seed of the weights, which are normal with deviation 0.02, or 0.02 / sqrt(2 L) in
            the layers that add to the residual stream.
        dtype: the type of the weights.

    Attributes:
        wte: `[V, D]`, the embedding of tokens; transposed, it is the head.
        wpe: `[context, D]`, the embedding of positions.
        blocks: all blocks, as one `Block` with a leading dim of layers.
        norm: the norm before the head.
        config: the sizes of the whole model, also on a shard.
    """

    wte: Float[Array, "rows width"]
    wpe: Float[Array, "context width"]
    blocks: Block
    norm: Norm
    config: Config = eqx.field(static=True)

    def __init__(self, config: Config, *, key: Key[Array, ""], dtype: DTypeLike = jnp.float32):
        """Draws the weights of a whole model."""
        D, L, H = config.width, config.layers, config.heads
        normal = initial(key, dtype, 6)  # six arrays are drawn
        zeros = functools.partial(jnp.zeros, dtype=dtype)
        ones = functools.partial(jnp.ones, dtype=dtype)
        residual = 0.02 / (2 * L) ** 0.5  # deviation of the 2 L layers that add to the stream
        self.config = config
        self.wte = vocabulary_rows(normal(config.rows, D), config.vocabulary)
        self.wpe = normal(config.context, D)
        self.blocks = Block(
            attention_norm=Norm(ones((L, D)), zeros((L, D))),
            attention=Attention(
                qkv=Linear(normal(L, D, 3, H, D // H), zeros((L, 3, H, D // H))),
                out=Linear(normal(L, H, D // H, D, scale=residual), zeros((L, D))),
            ),
            mlp_norm=Norm(ones((L, D)), zeros((L, D))),
            mlp=MLP(
                up=Linear(normal(L, D, 4 * D), zeros((L, 4 * D))),
                down=Linear(normal(L, 4 * D, D, scale=residual), zeros((L, D))),
            ),
        )
        self.norm = Norm(ones((D,)), zeros((D,)))

    @property
    def embedding(self) -> Float[Array, "rows width"]:
        """The embedding of tokens."""
        return self.wte

    @property
    def unembedding(self) -> Float[Array, "rows width"]:
        """The rows of the head, which are the rows of the embedding."""
        return self.wte


def attention(
    q: Float[Array, "batch tokens heads head_width"],
    k: Float[Array, "batch tokens heads head_width"],
    v: Float[Array, "batch tokens heads head_width"],
    *,
    drop: Callable[..., Any] | None = None,
    segments: Int[Array, "batch tokens"] | None = None,
) -> Float[Array, "batch tokens heads head_width"]:
    """Returns causal softmax(q k^T / sqrt(K)) v, in the type of `q`, with the softmax in float32 or
    wider.

    `jax.nn.dot_product_attention` is not used: it computes its softmax in float32 for float64
    inputs too, which costs the last digits. `drop` is applied to the attention weights, [B, H, T,
    T]. `segments` is the number of each token's document: a token sees only its own document.
    """
    T, K = q.shape[1], q.shape[3]
    scores = jnp.einsum("bthk,bshk->bhts", q * K**-0.5, k)
    sees = jnp.tril(jnp.ones((T, T), bool))[None, None]
    if segments is not None:
        sees = sees & (segments[:, :, None] == segments[:, None, :])[:, None]
    # Only the softmax is wide: products with a wider result would get wider cotangents, and would
    # multiply these in the backward pass.
    wide = scores.astype(precision.accumulation_dtype(scores.dtype))
    weights = jax.nn.softmax(jnp.where(sees, wide, -jnp.inf), axis=-1).astype(q.dtype)
    weights = weights if drop is None else drop(weights)
    return jnp.einsum("bhts,bshk->bthk", weights, v)


def rules(
    axis_name: AxisName = "tensor", *, stage: str | None = None, size: int = 1
) -> Callable[..., Any]:
    """Returns the rule that splits a GPT-2 over `axis_name`: attention by heads, the feed-forward
    by its hidden dim, the vocabulary by rows.

    With `stage`, the rule is for a model whose blocks are [v, L / v, ...], for v chunks per stage.
    The rule splits dim 1 of the blocks over the stages, and the vocabulary over `stage` and
    `axis_name`. Along dim 1 stand the layers of one chunk of stage 0, then those of one chunk of
    stage 1, and so on. `size`, the number of devices of the axis, is not used here: `models.recipe`
    passes it to the rules of every family, and only a Llama's rule needs it.
    """
    # The entries of a spec for the first dims of a block's leaves: [L], or [v, L / v].
    layers = (None,) if stage is None else (None, stage)
    # The first path that matches a leaf gives its spec. So "blocks.**" is for the norms, and for
    # the biases that are added after the devices' sum. After the layers, the weight of qkv is [D,
    # 3, H, K], out is [H, K, D], up is [D, F] and down is [F, D].
    specs = {
        "wte": P(axis_name if stage is None else (stage, *axes(axis_name))),
        "blocks.attention.qkv.weight": P(*layers, None, None, axis_name),
        "blocks.attention.qkv.bias": P(*layers, None, axis_name),
        "blocks.attention.out.weight": P(*layers, axis_name),
        "blocks.mlp.up.weight": P(*layers, None, axis_name),
        "blocks.mlp.up.bias": P(*layers, axis_name),
        "blocks.mlp.down.weight": P(*layers, axis_name),
        "blocks.**": P(*layers),
        "**": P(),
    }
    return sharding.first(*(sharding.match(path, spec) for path, spec in specs.items()))
