"""The record of functions that the recipe of `decoder` needs from a kind of model, and its batch.

GPT-2's is `gpt2.FAMILY`. Another decoder trains over every layout by a record of its own; nothing
here is inherited.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key

from parallax import recording
from parallax._typing import PyTree, Rule
from parallax.pipeline import Output
from parallax.remat import none


class Batch(NamedTuple):
    """What a loss is computed of; a tuple of the first two does too.

    Attributes:
        windows: sequences of T + 1 tokens. One outside the vocabulary makes the loss nan, unless it
            and all after it in its sequence have a weight of 0.
        keys: a random key for each sequence; None: no dropout.
        weights: of each token after the first; None: all count alike. `cross_entropy.normalized`
            makes a mean of them.
        segments: the document of each token but the last, by a whole number: a token sees those of
            its own alone; None: all are of one. `documents.with_segments` makes them, with the
            weights that go with them.
    """

    windows: Int[Array, "batch window"]
    keys: Key[Array, " batch"] | None = None
    weights: Float[Array, "batch tokens"] | None = None
    segments: Int[Array, "batch tokens"] | None = None


@runtime_checkable
class Configuration(Protocol):
    """The sizes of a model, as its family's functions read them. What the recipe reads is what a
    layout must divide.
    """

    @property
    def sizes(self) -> dict[str, int]:
        """Arguments for `Layout.check`: layers, heads, hidden, rows and tokens, and experts where
        there are some.
        """
        ...


@dataclass(frozen=True)
class Family:
    """A kind of decoder: what the recipe calls.

    Args:
        model: the class of the whole model, made by `model(config, key=key, dtype=dtype)`; any leaf
            may be static. The arrays of its blocks have a first dim of layers.
        stages: `(config, stage_axis, axis, *, comms, attend, remat, unroll)` to the functions
            `(embed, stage, head)` of `pipeline.value_and_grad`. Without a pipeline, `stage_axis` is
            `()`, and `stage` runs all layers. The blocks join by `comms(axis)` (`tensor.comms`,
            `sequence.comms` or `context.comms`); `remat` wraps the function `(weights, ...)` of one
            layer, `unroll` of which stand in the loop's body. Auxiliary values of a stage have a
            first dim of its layers.
        rules: `(axis, *, stage, size)` to the rule of the model over `axis`, of that size; with a
            `stage`, which may be None, of one whose blocks are [v, L / v, ...]. That of a
            configuration with experts takes `expert=` too, the axis that they are split over, where
            a layout splits them.
        logits: `(model, tokens)` to the logits after each token, of the whole model on one device,
            for generation.
        cached: from a whole model to its `cached.Cached`, which keeps keys and values; None: it
            writes without.
        attention: the attention function, given to `stages` unless `Compute` has another.
        tpu_attention: the same by a kernel for TPUs, taken instead on a mesh of them; None: there
            is none.
        blocks: the path of the blocks in the model.
        context_attention: where a context axis splits the tokens, `(attend, axis)` to the function
            that attends over it: `context.causal_attention` where `attention` is softmax(q k^T /
            sqrt(K)) v of each token and those before it; None: it has no context axis.
        uses_dropout: whether a configuration has dropout: then each sequence gets a random key.
    """

    model: type[Any]
    stages: Callable[..., tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]]
    rules: Callable[..., Rule]
    logits: Callable[..., Float[Array, "batch tokens vocabulary"]]
    attention: Callable[..., Any]
    tpu_attention: Callable[..., Any] | None = None
    cached: Callable[[Any], Any] | None = None
    blocks: str = "blocks"
    context_attention: Callable[..., Any] | None = None
    uses_dropout: Callable[[Any], bool] = lambda config: False

    def where(self, model: Any) -> Any:
        """Returns the blocks of a model, or of its specs."""
        return functools.reduce(getattr, self.blocks.split("."), model)


def seen(weights: Float[Array, "batch tokens"] | None) -> Bool[Array, "batch tokens"] | None:
    """Returns whether a token of a weight sees each input of a causal model: `weights` are of the
    tokens after the inputs.

    The other inputs may be anything, such as the -100 that fills a sequence up. None stays None:
    all are seen.
    """
    if weights is None:
        return None
    places = lax.broadcasted_iota(jnp.int32, weights.shape, 1)
    return places <= jnp.max(jnp.where(weights != 0, places, -1), axis=1, keepdims=True)


def run_blocks(
    blocks: PyTree,
    x: Float[Array, "batch tokens width"],
    keys: Key[Array, " batch"] | None,
    apply: Callable[..., Any],
    *,
    first_layer: int | Int[Array, ""] = 0,
    remat: Callable[..., Any] = none,
    unroll: int = 1,
) -> Any:
    """Returns `x` after these blocks, whose arrays have a first dim of layers. One layer's code,
    whatever L is.

    Of blocks that return a `pipeline.Output` it is an `Output` too: the sum of their terms of the
    loss, and their auxiliary values, [L, ...] each.

    Args:
        blocks: of the model, of a stage, or of one chunk.
        x: what enters the first of them.
        keys: a random key for each sequence, or None.
        apply: one block, `(weights, x, keys, layer) -> x`, or to an `Output`.
        first_layer: the place of the first block in the model.
        remat: wraps `(weights, x, layer) -> x`.
        unroll: blocks in the loop's body.
    """
    arrays, static = eqx.partition(blocks, eqx.is_array)

    def block(weights, x, layer):
        with recording.at(layer=layer):
            return apply(eqx.combine(weights, static), x, keys, layer)

    body = remat(block)
    layers = first_layer + jnp.arange(jax.tree.leaves(arrays)[0].shape[0], dtype=jnp.int32)

    def next_block(x, weights_and_layer):
        weights, layer = weights_and_layer
        result = body(weights, x, layer)
        if isinstance(result, Output):
            return result.x, (result.loss, result.aux)
        return result, None

    x, stacked = lax.scan(next_block, x, (arrays, layers), unroll=unroll)
    if stacked is None:
        return x
    losses, aux = stacked
    return Output(x, loss=None if losses is None else jnp.sum(losses), aux=aux)
