"""Defines `Family`, the record of the functions that the training code (`models.recipe`) needs from
a kind of decoder, and `Batch`, the arrays that a loss is computed from.

The `Family` of GPT-2 is `gpt2.FAMILY`. Another decoder that has a `Family` can be split over
devices by a `Layout` in the same way; there is no class to inherit from.
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
    """The batch that a loss is computed from; a tuple `(windows, keys)` can take its place.

    Attributes:
        windows: sequences of T + 1 tokens: the first T are inputs, and the last T their targets. A
            token outside the vocabulary makes the loss nan, unless it and all later tokens of its
            sequence have a weight of 0.
        keys: a random key for each sequence; None: no dropout.
        weights: the weight of each token after the first; None: all are 1. With
            `cross_entropy.normalized` the loss is a weighted mean.
        segments: the number of each input's document. A token sees only its own document. None: all
            tokens are of one document. `documents.with_segments` sets the segments, and gives a
            target the weight 0 if its input is in another document.
    """

    windows: Int[Array, "batch window"]
    keys: Key[Array, " batch"] | None = None
    weights: Float[Array, "batch tokens"] | None = None
    segments: Int[Array, "batch tokens"] | None = None


def check_weights(batch: Batch) -> None:
    """Raises `ValueError` unless the windows have two dims, and the weights, if there are any, one
    number for each token after the first of each window."""
    windows = batch.windows.shape
    if len(windows) != 2:
        raise ValueError(
            f"The windows must be [batch, T + 1] tokens; got an array of shape {windows}. Pass one "
            "window as windows[None]."
        )
    targets = (windows[0], windows[1] - 1)
    if batch.weights is not None and batch.weights.shape != targets:
        raise ValueError(
            f"The weights must be [batch, T], one for each target: {targets} on a device with "
            f"windows of shape {windows}, whose first tokens are no targets; got "
            f"{batch.weights.shape}."
        )


@runtime_checkable
class Configuration(Protocol):
    """The sizes of a model. The family's functions may read any field. `models.recipe` reads only
    `sizes`, each of which must be a multiple of the number of devices that split it.
    """

    @property
    def sizes(self) -> dict[str, int]:
        """Arguments for `Layout.check`: `layers`, `heads`, `hidden`, `rows` (of the embedding) and
        `tokens`, and `experts`, the number of experts, if the model has experts.
        """
        ...


@dataclass(frozen=True)
class Family:
    """A kind of decoder: the functions that `models.recipe` calls.

    Args:
        model: the class of the whole model; `model(config, key=key, dtype=dtype)` makes a model.
            Leaves of the model that are not arrays are static. The arrays of its blocks have a
            first dim of layers.
        stages: a function `(config, stage_axis, axis, *, comms, attend, remat, unroll)` that
            returns the functions `(embed, stage, head)` of `pipeline.value_and_grad`. Without a
            pipeline, `stage_axis` is `()`, and `stage` runs all layers. The blocks communicate by
            `comms(axis)` (`tensor.comms`, `sequence.comms` or `context.comms`). `remat` wraps the
            function `(weights, ...)` of one layer, and `unroll` is the number of layers in the body
            of the loop over layers. The auxiliary values of a stage have a first dim of the stage's
            layers.
        rules: a function `(axis, *, stage, size)` that returns the rule which splits the model over
            `axis`, an axis of `size` devices. `stage` is the axis of the stages; None without a
            pipeline. With an axis `stage`, the blocks are [v, L / v, ...], for v chunks of layers
            on each stage. Index c of dim 0 has the c-th chunks of all stages, and the rule splits
            dim 1 over the stages. For a configuration with experts the function also takes
            `expert=`, the axis that splits the experts.
        logits: a function `(model, tokens)` that runs the whole model on one device and returns the
            logits after each token. This function is used to sample text.
        cached: a function from a whole model to its `sampling.Cached`, which keeps keys and values
            while text is sampled; None: text is sampled without a cache.
        attention: the attention function, given to `stages` unless `Compute` has another.
        tpu_attention: the same attention by a kernel for TPUs, used on a mesh of TPUs; None: there
            is no kernel.
        gpu_attention: the same attention by a kernel for GPUs, used on a mesh of GPUs; None: there
            is no kernel.
        blocks: the path of the blocks in the model, such as "blocks" or "decoder.blocks".
        context_attention: a function `(attend, axis)` that returns an attention function for tokens
            that are split over `axis`, the context axis. Give `context.causal_attention` if
            `attention` is causal softmax(q k^T / sqrt(K)) v. None: the model cannot have a context
            axis.
        uses_dropout: a function that returns whether a configuration has dropout. With dropout,
            each sequence gets a random key.
    """

    model: type[Any]
    stages: Callable[..., tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]]
    rules: Callable[..., Rule]
    logits: Callable[..., Float[Array, "batch tokens vocabulary"]]
    attention: Callable[..., Any]
    tpu_attention: Callable[..., Any] | None = None
    gpu_attention: Callable[..., Any] | None = None
    cached: Callable[[Any], Any] | None = None
    blocks: str = "blocks"
    context_attention: Callable[..., Any] | None = None
    uses_dropout: Callable[[Any], bool] = lambda config: False

    def where(self, model: Any) -> Any:
        """Returns the blocks of a model, or of its specs."""
        return functools.reduce(getattr, self.blocks.split("."), model)


def seen(weights: Float[Array, "batch tokens"] | None) -> Bool[Array, "batch tokens"] | None:
    """Returns for each input whether the loss of a causal model depends on it: whether its target,
    or a later target of its sequence, has a weight other than 0. `weights` are the targets'
    weights.

    The inputs that the loss does not depend on may have any value, such as the -100 that pads a
    sequence. If `weights` is None, the loss depends on all inputs, and the result is None.
    """
    if weights is None:
        return None
    places = lax.broadcasted_iota(jnp.int32, weights.shape, 1)
    # True up to the last target with a weight. Its place is -1 if there is none: no input is seen.
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
    """Returns `x` after these L blocks, whose arrays have a first dim of layers. The compiled
    program has the code of `unroll` layers, whatever L is.

    If the blocks return a `pipeline.Output`, the result is an `Output` too, with the sum of the
    blocks' losses, and with the blocks' auxiliary values stacked to arrays [L, ...].

    Args:
        blocks: the blocks of the model, of a stage, or of one chunk.
        x: the input of the first block.
        keys: a random key for each sequence; None: no dropout.
        apply: one block, a function `(weights, x, keys, layer)` that returns x or an `Output`.
        first_layer: the number, in the whole model, of the first of these blocks.
        remat: a function that takes `apply` as a function of `(weights, x, layer)`, with `keys`
            already bound, and returns a wrapped function, as those of `parallax.remat` do.
        unroll: the number of blocks in the loop's body.
    """
    # `lax.scan` can take only arrays apart by layers; the other leaves are the same in all layers.
    arrays, static = eqx.partition(blocks, eqx.is_array)

    def block(weights, x, layer):
        """Returns the output of one block. A recording by `bisect` gets `layer`, the block's number
        in the model.
        """
        with recording.at(layer=layer):
            return apply(eqx.combine(weights, static), x, keys, layer)

    body = remat(block)
    layers = first_layer + jnp.arange(jax.tree.leaves(arrays)[0].shape[0], dtype=jnp.int32)

    def next_block(x, weights_and_layer):
        """Returns x after one block, and the `(loss, aux)` of the block's `Output`, if any."""
        weights, layer = weights_and_layer
        result = body(weights, x, layer)
        if isinstance(result, Output):
            return result.x, (result.loss, result.aux)
        return result, None

    x, stacked = lax.scan(next_block, x, (arrays, layers), unroll=unroll)
    if stacked is None:  # the blocks return a plain x, no `Output`
        return x
    losses, aux = stacked
    return Output(x, loss=None if losses is None else jnp.sum(losses), aux=aux)
