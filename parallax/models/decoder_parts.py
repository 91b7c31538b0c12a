"""A decoder put together of its parts: an embedding, a layer and a head make the loss, and the
three functions of a pipeline.

Each family has one record of them. Its vocabulary is shared out over stages and tensor devices:
each stage holds 1/P of the rows, so each does 1/P of the head on what the last stage hands out, and
none is slower than the others.

Source: Yeung et al., Balancing pipeline parallelism with vocabulary parallelism (arXiv 2411.05288).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from parallax import argument_checks, cross_entropy, pipeline, tensor
from parallax.collectives import AxisLike
from parallax.collectives.types import varying, varying_axes
from parallax.models import decoder_taps
from parallax.models.family import Batch, run_blocks, seen
from parallax.pipeline.checks import output
from parallax.remat import none


class DecoderParts(NamedTuple):
    """What a family's model is made of. The model's `config` has the vocabulary, and its `blocks` a
    first dim of layers.

    Attributes:
        name: of the family, for errors.
        embed: `(model, tokens, keys, *, first, weights, comms, across)` to what enters the first
            block. `first` is the place of the first token in its sequence; `across` takes what the
            devices that share the vocabulary found to those that go on.
        layer: `(config, *, positions, comms, attend)` to one block, `(weights, x, keys, layer) ->
            x`, for tokens at these places; one with auxiliary values returns a `pipeline.Output`.
        head: `(model, x, targets, *, weights, comms, across)` to the loss.
        unembed: `(model, x)` to the logits of a whole model.
    """

    name: str
    embed: Callable[..., Any]
    layer: Callable[..., Callable[..., Any]]
    head: Callable[..., Float[Array, ""]]
    unembed: Callable[..., Float[Array, "batch tokens vocabulary"]]


def loss(
    parts: DecoderParts,
    model: Any,
    batch: Batch | tuple[Any, ...],
    *,
    axis: AxisLike,
    comms: Callable[..., Any],
    attend: Callable[..., Any],
    remat: Callable[..., Any],
    unroll: int,
) -> tuple[Float[Array, ""], Any]:
    """The mean cross-entropy of the token after each in the windows of `batch`, in nats: as
    `gpt2.loss` says, for any family.

    With the blocks' terms of the loss added; beside it are their auxiliary values, [L, ...] each,
    or None.
    """
    windows, keys, weights, segments = batch if isinstance(batch, Batch) else Batch(*batch)
    argument_checks.check_not_deleted(f"{parts.name}.loss", model)
    argument_checks.check_tokens(
        f"{parts.name}.loss", windows, model.config.vocabulary, weights=weights
    )
    made = comms(axis)
    x = parts.embed(model, windows[:, :-1], keys, weights=weights, comms=made)
    own = made.context_tokens(positions(x, windows.shape[1] - 1), dim=0)
    apply = parts.layer(model.config, positions=own, comms=_apart(made, segments), attend=attend)
    out = output(run_blocks(model.blocks, x, keys, apply, remat=remat, unroll=unroll))
    value = parts.head(model, out.x, windows[:, 1:], weights=weights, comms=made)
    return value if out.loss is None else value + out.loss, out.aux


def logits(
    parts: DecoderParts,
    model: Any,
    tokens: Int[Array, "batch tokens"],
    *,
    attend: Callable[..., Any],
) -> Float[Array, "batch tokens vocabulary"]:
    """The logits after each token, of a whole model on one device, without dropout: as
    `gpt2.logits` says, for any family.
    """
    argument_checks.check_not_deleted(f"{parts.name}.logits", model)
    argument_checks.check_tokens(f"{parts.name}.logits", tokens, model.config.vocabulary)
    x = parts.embed(model, tokens, None)
    apply = parts.layer(
        model.config, positions=positions(x, tokens.shape[1]), comms=tensor.comms(()), attend=attend
    )
    return parts.unembed(model, output(run_blocks(model.blocks, x, None, apply)).x)


def stages(
    parts: DecoderParts,
    config: Any,
    stage_axis: AxisLike = "stage",
    axis: AxisLike = "tensor",
    *,
    comms: Callable[..., Any] = tensor.comms,
    attend: Callable[..., Any],
    remat: Callable[..., Any] = none,
    unroll: int = 1,
) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """`(embed, stage, head)` for `pipeline.value_and_grad`, as `Family.stages` takes them.

    Args:
        parts: the family's.
        config: the model's sizes and rates.
        stage_axis: the axis of the stages; `()` without a pipeline.
        axis: the tensor axis inside each stage.
        comms: how the devices of `axis` come together.
        attend: the attention function.
        remat: wraps each block.
        unroll: blocks in the loop's body.
    """

    def embed(model, part):
        windows, keys, weights, _ = Batch(*part)
        across = functools.partial(tensor.copy_to, axis=stage_axis)
        made = comms(axis, shared=stage_axis)
        return parts.embed(model, windows[:, :-1], keys, weights=weights, comms=made, across=across)

    def stage(model, x, part, position):
        windows, keys, _, segments = Batch(*part)
        made = comms(axis)
        own = made.context_tokens(positions(x, windows.shape[1] - 1), dim=0)
        apply = parts.layer(config, positions=own, comms=_apart(made, segments), attend=attend)
        first = position * jax.tree.leaves(model.blocks)[0].shape[0]
        return run_blocks(
            model.blocks, x, keys, apply, first_layer=first, remat=remat, unroll=unroll
        )

    def head(model, x, part):
        across = functools.partial(pipeline.from_last, axis=stage_axis)
        windows, _, weights, _ = Batch(*part)
        return parts.head(
            model,
            x,
            windows[:, 1:],
            weights=weights,
            comms=comms(axis, shared=stage_axis),
            across=across,
        )

    return embed, stage, head


def _apart(comms: tensor.Comms, segments: Int[Array, "batch tokens"] | None) -> tensor.Comms:
    """`comms` whose attention gets the documents of the tokens that it attends with, where there
    are any.
    """
    if segments is None:
        return comms
    own = comms.context_tokens(segments, dim=1)
    return comms._replace(
        wrap_attention=lambda attend: functools.partial(comms.wrap_attention(attend), segments=own)
    )


def positions(
    x: Float[Array, "..."], tokens: int, first: int | Int[Array, ""] = 0
) -> Int[Array, " tokens"]:
    """The places `first`, `first` + 1, ... of `tokens` tokens, of `x`'s replication type, which a
    pipeline needs.
    """
    return varying(first + jnp.arange(tokens, dtype=jnp.int32), varying_axes(x))


def looked_up(
    table: Float[Array, "rows width"],
    tokens: Int[Array, "batch tokens"],
    weights: Float[Array, "batch tokens"] | None,
    comms: tensor.Comms,
    vocabulary: int,
) -> Float[Array, "batch tokens_shard width"]:
    """The rows of the shared `table` for this device's part of the tokens; `weights` are of the
    tokens after them.
    """
    there = seen(weights)
    there = None if there is None else comms.context_tokens(there, dim=1)
    found = tensor.embed_partial(
        table,
        comms.context_tokens(tokens, dim=1),
        comms.everywhere,
        weights=there,
        vocabulary=vocabulary,
    )
    return comms.sum_partials(found)


def mean_loss(
    x: Float[Array, "batch tokens_shard width"],
    table: Float[Array, "rows width"],
    targets: Int[Array, "batch tokens"],
    weights: Float[Array, "batch tokens"] | None,
    comms: tensor.Comms,
    vocabulary: int,
) -> Float[Array, ""]:
    """The mean cross-entropy, in nats a token, of this device's part of the targets, after a head
    that is the shared `table`.
    """
    targets = comms.context_tokens(targets, dim=1)
    weights = None if weights is None else comms.context_tokens(weights, dim=1)
    return decoder_taps.loss(
        cross_entropy.mean(
            x, table, targets, comms.everywhere, weights=weights, vocabulary=vocabulary
        )
    )


def check_tokens(name: str, tokens: Int[Array, "batch tokens"], context: int) -> None:
    """Refuse with a `ValueError` inputs of nothing, and windows longer than the model's context."""
    if not tokens.size:
        raise ValueError(
            f"{name} needs one sequence or more, of a token and the next; got inputs of shape "
            f"{tokens.shape}."
        )
    if tokens.shape[1] > context:
        raise ValueError(
            f"{name}: windows of {tokens.shape[1]} tokens are longer than the model's context of "
            f"{context}. "
            f"Cut them, or configure context={tokens.shape[1]}."
        )


def initial(key: Any, dtype: Any, count: int) -> Callable[..., Array]:
    """`(*shape, scale=0.02)` to normal numbers of that deviation, other ones at each of `count`
    calls.
    """
    keys = iter(jax.random.split(key, count))
    return lambda *shape, scale=0.02: scale * jax.random.normal(next(keys), shape, dtype)


def vocabulary_rows(
    table: Float[Array, "rows width"], vocabulary: int
) -> Float[Array, "rows width"]:
    """`table` with zeros in the rows from `vocabulary` on, which pad it."""
    return jnp.where(
        jnp.arange(table.shape[0])[:, None] < vocabulary, table, jnp.zeros((), table.dtype)
    )
