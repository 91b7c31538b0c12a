"""A second family for the recipe: root-mean-square norms, no positions, a gated feed-forward, an
embedding and a head apart.

Its blocks have a function among their leaves, and its head may return an auxiliary value. Legend: D
width, F feed-forward, H heads, K head width, V vocabulary, L layers.
"""

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from parallax import cross_entropy, pipeline, precision, rules, tensor
from parallax.models.family import Batch, Family, run_blocks
from parallax.models.gpt2 import attention


@dataclass(frozen=True)
class Config:
    """Sizes; `told` lets the head return an auxiliary value."""

    layers: int = 4
    heads: int = 4
    width: int = 16
    hidden: int = 24
    vocabulary: int = 32
    context: int = 8
    told: bool = False

    @property
    def sizes(self):
        of_width = {"heads": self.heads, "hidden": self.hidden, "rows": self.vocabulary}
        return {"layers": self.layers, "tokens": self.context} | of_width


class Blocks(eqx.Module):
    """All blocks, each array with a first dim of layers."""

    attention_norm: Float[Array, "*layers width"]
    qkv: Float[Array, "*layers width 3 heads head_width"]
    out: Float[Array, "*layers heads head_width width"]
    mlp_norm: Float[Array, "*layers width"]
    gate: Float[Array, "*layers width hidden"]
    up: Float[Array, "*layers width hidden"]
    down: Float[Array, "*layers hidden width"]
    squash: Callable


class Bare(eqx.Module):
    """The model."""

    table: Float[Array, "vocabulary width"]
    layers: Blocks
    norm: Float[Array, " width"]
    head: Float[Array, "vocabulary width"]

    def __init__(self, config, *, key, dtype=jnp.float32):
        L, D, F, H, V = config.layers, config.width, config.hidden, config.heads, config.vocabulary
        keys = iter(jax.random.split(key, 7))
        normal = lambda *shape: 0.3 * jax.random.normal(next(keys), shape, dtype)
        ones = lambda *shape: jnp.ones(shape, dtype)
        self.table, self.norm, self.head = normal(V, D), ones(D), normal(V, D)
        qkv, out = normal(L, D, 3, H, D // H), normal(L, H, D // H, D)
        self.layers = Blocks(
            ones(L, D),
            qkv,
            out,
            ones(L, D),
            normal(L, D, F),
            normal(L, D, F),
            normal(L, F, D),
            jnp.tanh,
        )


def normed(x, weight):
    wide = x.astype(precision.accumulation_dtype(x.dtype))
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-5)).astype(
        x.dtype
    ) * weight[None, None]


def block(w, x, keys, layer, *, comms, attend):
    qkv = comms.column(normed(x, w.attention_norm), w.qkv, None)
    x = x + comms.row(attend(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]), w.out, None)
    y = normed(x, w.mlp_norm)
    return x + comms.row(
        w.squash(comms.column(y, w.gate, None)) * comms.column(y, w.up, None), w.down, None
    )


def stages(
    config,
    stage_axis,
    axis,
    *,
    comms=tensor.comms,
    attend=attention,
    remat=lambda block: block,
    unroll=1,
):
    """`(embed, stage, head)`."""

    def embed(model, part):
        over = comms(axis, shared=stage_axis)
        tokens = Batch(*part).windows[:, :-1]
        return tensor.copy_to(
            over.sum_partials(tensor.embed_partial(model.table, tokens, over.everywhere)),
            stage_axis,
        )

    def stage(model, x, part, position):
        apply = functools.partial(block, comms=comms(axis), attend=attend)
        return run_blocks(model.layers, x, None, apply, remat=remat, unroll=unroll)

    def head(model, x, part):
        over, batch = comms(axis, shared=stage_axis), Batch(*part)
        y = pipeline.from_last(normed(x, model.norm), stage_axis)
        loss = cross_entropy.mean(
            over.all_tokens(y),
            model.head,
            batch.windows[:, 1:],
            over.everywhere,
            weights=batch.weights,
        )
        return (loss, {"square": jnp.mean(y * y)}) if config.told else loss

    return embed, stage, head


def rules_(axis="tensor", *, stage=None, size=1):
    layers, rows = ((None,), axis) if stage is None else ((None, stage), (stage, axis))
    return rules.first(
        rules.match("table", P(rows)),
        rules.match("head", P(rows)),
        rules.match("layers.qkv", P(*layers, None, None, axis)),
        rules.match("layers.out", P(*layers, axis)),
        rules.match("layers.gate", P(*layers, None, axis)),
        rules.match("layers.up", P(*layers, None, axis)),
        rules.match("layers.down", P(*layers, axis)),
        rules.match("layers.**", P(*layers)),
        rules.match("norm", P()),
    )


def logits(model, tokens):
    """With nothing of the recipe: the reference that every layout must equal."""
    x = model.table[tokens]
    for layer in range(model.layers.qkv.shape[0]):
        arrays, static = eqx.partition(model.layers, eqx.is_array)
        of_layer = eqx.combine(jax.tree.map(operator.itemgetter(layer), arrays), static)
        x = block(of_layer, x, None, layer, comms=tensor.comms(()), attend=attention)
    return normed(x, model.norm) @ model.head.T


FAMILY = Family(
    model=Bare, stages=stages, rules=rules_, logits=logits, attention=attention, blocks="layers"
)
