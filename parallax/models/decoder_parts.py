"""Makes the loss, the logits and the pipeline functions of a decoder.

The families here differ in their blocks and in how they encode positions. A `DecoderParts` has one
family's functions for its blocks and its positions. The embedding, the head and the loss are the
same for all families, and are in this module. The vocabulary is split over stages and tensor
devices: each of P stages holds 1/P of the rows of the embedding and of the head, and computes 1/P
of the head, so no stage is slower than the others.

`comms` is a `tensor.Comms`, the functions by which devices communicate. `comms.everywhere` has the
axes that split the vocabulary. `comms.context_tokens(x, dim)` is the part of `x` for the tokens
that this device's layers compute. In the residual stream, between layers, the tensor axis may split
these tokens further: a device has T_shard of them in the stream. `all_tokens(x)` gathers the tokens
of the stream again, so that a device has all tokens that its layers compute. `sum_partials(x)`
takes the devices' terms for all tokens that the layers compute, and returns the sums of these terms
for the tokens that this device has in the stream. The functions of `decoder_taps` return their
argument unchanged. In a run that `parallax.bisect` records, they also report the argument to it.

Source: Yeung et al., Balancing pipeline parallelism with vocabulary parallelism (arXiv 2411.05288).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from parallax import argument_checks, cross_entropy, recording, tensor
from parallax.collectives import Axis, AxisLike, combined_axis
from parallax.collectives.types import varying, varying_axes
from parallax.models import decoder_taps
from parallax.models.family import Batch, run_blocks, seen
from parallax.pipeline import ends
from parallax.pipeline.checks import output
from parallax.remat import none

ONE_DEVICE = tensor.comms(())


def _without_positions(model: Any, x: Any, keys: Any, *, first: Any, comms: tensor.Comms) -> Any:
    """Returns `x`, for a family without positions, or one whose blocks apply the positions
    themselves."""
    return x


def _unchanged(x: Any) -> Any:
    """Returns `x`: without a pipeline nothing moves between stages."""
    return x


class DecoderParts(NamedTuple):
    """The functions in which one family differs from another.

    The family's models have `blocks`, with a first dim of layers; `norm`, which normalises the
    output of the last block; `embedding` and `unembedding`, [V, D]; and a `config` with
    `vocabulary`, `context` and `epsilon`.

    Attributes:
        name: the name of the family, which errors begin with.
        layer: a function `(config, *, positions, comms, attend)` that returns one block: a function
            `(weights, x, keys, layer) -> x` for tokens at these positions. A block with auxiliary
            values returns a `pipeline.Output`.
        add_positions: a function `(model, x, keys, *, first, comms)`. It adds the embeddings of the
            positions `first`, `first` + 1, ... to `x`, the embeddings of the tokens. Then it
            applies the family's dropout. `keys` has a random key for each sequence; if `keys` is
            None, there is no dropout.
    """

    name: str
    layer: Callable[..., Callable[..., Any]]
    add_positions: Callable[..., Any] = _without_positions


def loss_and_aux(
    parts: DecoderParts,
    model: Any,
    batch: Batch | tuple[Int[Array, "batch window"], Key[Array, " batch"] | None],
    *,
    attend: Callable[..., Any],
    axis: AxisLike = (),
    comms: Callable[..., Any] = tensor.comms,
    remat: Callable[..., Any] = none,
    unroll: int = 1,
) -> tuple[Float[Array, ""], Any]:
    """Returns `(loss, aux)`: the number that the function `loss` below returns, and the auxiliary
    values of the blocks as arrays [L, ...]. `aux` is None if the blocks have no auxiliary values.

    `model` is a whole model, or one device's shard of a model along `axis`. `batch` may be a tuple:
    the windows of T + 1 tokens, and the keys of dropout. `attend` is the attention function, and
    `comms` makes the functions by which the devices of `axis` communicate. `remat` wraps each
    block, and the body of the loop over blocks runs `unroll` blocks. `loss_and_aux` raises the same
    errors as `loss`.
    """
    batch = batch if isinstance(batch, Batch) else Batch(*batch)
    name, vocabulary = f"{parts.name}.loss", model.config.vocabulary
    argument_checks.check_not_deleted(name, model)
    argument_checks.check_tokens(name, batch.windows, vocabulary, weights=batch.weights)
    options = {"comms": comms, "attend": attend, "remat": remat, "unroll": unroll}
    # `()`: there is no pipeline. One stage runs all layers; its position, below, is 0.
    embed_part, stage, head_of_part = stages(parts, model.config, (), axis, **options)
    # `output` makes an `Output` also of a bare x; then the loss and the auxiliary values in it are
    # None.
    out = output(stage(model, embed_part(model, batch), batch, 0))
    value = head_of_part(model, out.x, batch)
    return value if out.loss is None else value + out.loss, out.aux


def loss(
    parts: DecoderParts,
    model: Any,
    batch: Batch | tuple[Int[Array, "batch window"], Key[Array, " batch"] | None],
    *,
    attend: Callable[..., Any],
    axis: AxisLike = (),
    comms: Callable[..., Any] = tensor.comms,
    remat: Callable[..., Any] = none,
    unroll: int = 1,
) -> Float[Array, ""]:
    """Returns the mean cross-entropy, in nats per token, of all tokens but the first of each window
    of T + 1 tokens in `batch`; auxiliary losses of the blocks are added.

    With `context.comms`, the loss is the mean over this device's tokens only.

    Args:
        parts: the functions of the family.
        model: the whole model, or one device's shard of the model along `axis`.
        batch: a `Batch`, or a tuple of its windows [B, T + 1] and its keys of dropout [B]; without
            dropout the keys are None. If the batch has weights, the loss of each target is
            multiplied by the target's weight, and the sum of these products is divided by the
            number of targets, not by the sum of the weights. Dropout depends only on a sequence's
            key, the layer and the head, so it is the same under every layout.
        attend: causal attention, called as `attend(q, k, v)` with queries [B, T, H, K], and with
            keys and values [B, T, G, K], for H heads of queries and G heads of keys, where G
            divides H. On a GPU it may be `functools.partial(jax.nn.dot_product_attention,
            is_causal=True, implementation="cudnn")`. With attention dropout, GPT-2 ignores `attend`
            and uses its own attention.
        axis: the axis or axes that the weights are split over.
        comms: how the devices of `axis` communicate: `tensor.comms` with all tokens on each device;
            `sequence.comms` with the tokens split over the devices; `context.comms` with the tokens
            split over another axis; `experts.comms` with experts split.
        remat: a function that takes a block, `(weights, x, layer) -> x`, and returns a wrapped
            block. Examples are the functions of `parallax.remat`, and `zero.gathered` with an axis
            and specs. A block that `zero.gathered` wraps gathers its weights before it runs.
        unroll: the number of blocks that the loop's body runs one after another, so that the gather
            of one block may overlap another block.

    Raises:
        ValueError: T is more than the model's context; there is no token to predict; the queries of
            this shard attend to heads of keys and values that the shard does not have; or, outside
            `jax.jit`, where values are known, a token is outside the vocabulary, or an array is
            deleted. Inside `jax.jit`, a token outside the vocabulary makes the loss nan.
    """
    return loss_and_aux(
        parts,
        model,
        batch,
        attend=attend,
        axis=axis,
        comms=comms,
        remat=remat,
        unroll=unroll,
    )[0]


def logits(
    parts: DecoderParts,
    model: Any,
    tokens: Int[Array, "batch tokens"],
    *,
    attend: Callable[..., Any],
) -> Float[Array, "batch tokens vocabulary"]:
    """Returns the logits after each token, of a whole model on one device, without dropout.

    `attend` is causal attention, a function of queries, keys and values. `logits` raises the same
    errors as `loss`. Inside `jax.jit`, if a token is outside the vocabulary, the logits after that
    token and after all later tokens are nan.
    """
    argument_checks.check_not_deleted(f"{parts.name}.logits", model)
    argument_checks.check_tokens(f"{parts.name}.logits", tokens, model.config.vocabulary)
    x = embed(parts, model, tokens, None)  # None, here and below: no keys of dropout
    apply = parts.layer(
        model.config, positions=positions(x, tokens.shape[1]), comms=ONE_DEVICE, attend=attend
    )
    # `output` makes an `Output` also of a bare x.
    return unembed(model, output(run_blocks(model.blocks, x, None, apply)).x)


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
    """Returns the three functions `(embed, stage, head)` of a decoder, for
    `pipeline.value_and_grad`.

    A microbatch `part` is a `Batch`, or a tuple of the first fields of a `Batch`. The fields are
    the windows [B, T + 1], the keys of dropout, the weights of the targets, and the segments: the
    number of each token's document. `embed(model, part)` returns the input x of the first block.
    `stage(model, x, part, position)` runs the blocks in `model`, a chunk of consecutive layers;
    `position` is the number of this chunk in the whole model. `head(model, x, part)` returns the
    loss.

    Args:
        parts: the functions of the family.
        config: the model's sizes and its dropout rates, if it has any.
        stage_axis: the axis of the stages; `()` without a pipeline.
        axis: the tensor axis inside each stage.
        comms: how the devices of `axis` communicate.
        attend: the attention function.
        remat: the function that wraps each block.
        unroll: the number of blocks in the loop's body.
    """

    def comms_of_ends():
        """Returns the `tensor.Comms` of the embedding and the head. Its field `everywhere` has all
        axes that split the vocabulary: `axis` and the axis of the stages. Its functions come from
        `comms(axis)`, so they send only inside a stage. `across`, an argument of `embed` and
        `head`, sends activations from stage to stage.
        """
        return comms(axis)._replace(everywhere=combined_axis(stage_axis, axis))

    def embed_part(model, part):
        """Returns the first block's input, [B, T_shard, D], for the microbatch `part`.

        The vocabulary is split over `axis` and over the stages. Only the first stage uses this
        input, so `sum_to_first` adds up the embeddings that the stages looked up, and only the
        first stage gets the sum.
        """
        windows, keys, weights, _ = Batch(*part)
        # A record ignores the input on all stages but the first. Programs that make no record need
        # no condition, and do not compute the stage's index.
        is_used = not recording.is_on() or Axis.of(stage_axis).index() == 0
        with recording.only_if(is_used):
            return embed(
                parts,
                model,
                windows[:, :-1],
                keys,
                # Tokens that no target with a weight depends on may be outside the vocabulary.
                weights=weights,
                comms=comms_of_ends(),
                across=functools.partial(ends.sum_to_first, axis=stage_axis),
            )

    def stage(model, x, part, position):
        """Returns the output of the blocks of one chunk. `position` is the number of the chunk, in
        the order of the model.

        `x` is the input, [B, T_shard, D], and `part` the microbatch.
        """
        windows, keys, _, segments = Batch(*part)
        on_axis = comms(axis)
        apply = parts.layer(
            config,
            # The positions of the inputs; a window has one token more.
            positions=on_axis.context_tokens(positions(x, windows.shape[1] - 1), dim=0),
            # The block calls `attend` through `comms`, which then also passes the segments.
            comms=_with_segments(on_axis, segments),
            attend=attend,
        )
        layers_of_chunk = jax.tree.leaves(model.blocks)[0].shape[0]
        return run_blocks(
            model.blocks,
            x,
            keys,
            apply,
            first_layer=position * layers_of_chunk,
            remat=remat,
            unroll=unroll,
        )

    def head_of_part(model, x, part):
        """Returns the mean cross-entropy of the microbatch `part`, from the last block's output
        `x`, [B, T_shard, D]. `copy_from_last` gives the last stage's values to all stages, since
        each stage computes a part of the head.
        """
        windows, _, weights, _ = Batch(*part)  # without the keys and the segments
        return head(
            model,
            x,
            windows[:, 1:],  # the targets: the next token of each input
            weights=weights,
            comms=comms_of_ends(),  # between the devices of one stage
            across=functools.partial(ends.copy_from_last, axis=stage_axis),
        )

    return embed_part, stage, head_of_part


def embed(
    parts: DecoderParts,
    model: Any,
    tokens: Int[Array, "batch tokens"],
    keys: Key[Array, " batch"] | None,
    *,
    first: int | Int[Array, ""] = 0,
    weights: Float[Array, "batch tokens"] | None = None,
    comms: tensor.Comms = ONE_DEVICE,
    across: Callable[..., Any] = _unchanged,
) -> Float[Array, "batch tokens_shard width"]:
    """Returns the input of the first block, for this device's part of the tokens: the sum of the
    embeddings of the tokens and of the positions `first`, `first` + 1, ...

    `keys` are the dropout keys of the sequences, or None for no dropout; `parts.add_positions` also
    applies the dropout. Each device looks up the tokens whose rows of the embedding it has, with
    zeros for all other tokens, and `comms` sums the results over the devices that split the
    vocabulary. In a pipeline the stages split the vocabulary too. There `across` is
    `pipeline.ends.sum_to_first` with the axis of the stages. It adds up, over the stages, the sums
    that `comms` returned; only the first stage gets and uses the result.

    A token outside the vocabulary gives nan, unless its target and all later targets have a weight
    of 0 in `weights`, for example in padding: the loss does not depend on such a token.

    Raises:
        ValueError: there are no tokens, or more per sequence than the model's context.
    """
    _check_tokens(parts.name, tokens, model.config.context)
    attended = seen(weights)  # whether a target with a weight depends on the token
    rows = tensor.embed_partial(
        model.embedding,
        comms.context_tokens(tokens, dim=1),
        comms.everywhere,
        weights=None if attended is None else comms.context_tokens(attended, dim=1),
        vocabulary=model.config.vocabulary,
    )
    x = across(comms.sum_partials(rows))
    x = parts.add_positions(model, x, keys, first=first, comms=comms)
    return decoder_taps.residual(x, "embedding", comms)


def unembed(
    model: Any, x: Float[Array, "batch tokens width"]
) -> Float[Array, "batch tokens vocabulary"]:
    """Returns the logits of a whole model, from the output of its last block."""
    scores = model.norm(x, model.config.epsilon) @ model.unembedding.T
    return scores[..., : model.config.vocabulary]  # the other rows only pad the vocabulary


def head(
    model: Any,
    x: Float[Array, "batch tokens_shard width"],
    targets: Int[Array, "batch tokens"],
    *,
    weights: Float[Array, "batch tokens"] | None = None,
    comms: tensor.Comms = ONE_DEVICE,
    across: Callable[..., Any] = _unchanged,
) -> Float[Array, ""]:
    """Returns the mean cross-entropy of this device's part of the `targets`, in nats per token,
    from the output of the last block. The loss of each target is multiplied by the target's weight
    in `weights`, and the sum of these products is divided by the number of targets, not by the sum
    of the weights.

    In a pipeline, the vocabulary is split over all stages, and `across` sends the normalised
    activations from the last stage to all stages.
    """
    # The norm is applied before `across` sends its result to the stages and `all_tokens` gathers
    # the tokens. So, backward, the devices' cotangents are summed before they reach the norm, and
    # only the last stage has a gradient of the norm's weight.
    x = comms.all_tokens(across(model.norm(x, model.config.epsilon)))
    value = cross_entropy.mean(
        decoder_taps.whole(x, "head.in", comms),
        model.unembedding,
        comms.context_tokens(targets, dim=1),
        comms.everywhere,
        weights=None if weights is None else comms.context_tokens(weights, dim=1),
        vocabulary=model.config.vocabulary,  # rows after these are padding
    )
    return decoder_taps.loss(value)


def positions(
    x: Float[Array, "..."], tokens: int, first: int | Int[Array, ""] = 0
) -> Int[Array, " tokens"]:
    """Returns the positions `first`, `first` + 1, ... of `tokens` tokens.

    The positions are typed as varying along the axes along which `x` varies, since in a pipeline's
    loop all arguments of a block must have that type.
    """
    return varying(first + jnp.arange(tokens, dtype=jnp.int32), varying_axes(x))


def initial(key: Any, dtype: Any, count: int) -> Callable[..., Array]:
    """Returns a function `(*shape, scale=0.02)` that draws an array of normal numbers with the
    standard deviation `scale`. The function has random keys for `count` calls, and fails at a
    further call.
    """
    keys = iter(jax.random.split(key, count))

    def normal(*shape, scale=0.02):
        """Returns an array of normal numbers with the shape `shape` and the standard deviation
        `scale`. Each call draws with the next random key in `keys`."""
        return scale * jax.random.normal(next(keys), shape, dtype)

    return normal


def vocabulary_rows(
    table: Float[Array, "rows width"], vocabulary: int
) -> Float[Array, "rows width"]:
    """Returns `table`, a new embedding's whole table, with zeros in place of its padding: the rows
    after the first `vocabulary` rows, which belong to no token.
    """
    return jnp.where(
        jnp.arange(table.shape[0])[:, None] < vocabulary, table, jnp.zeros((), table.dtype)
    )


def _with_segments(
    comms: tensor.Comms, segments: Int[Array, "batch tokens"] | None
) -> tensor.Comms:
    """Returns `comms` with a `wrap_attention` that also passes `segments` to the attention. If
    `segments` is None, returns `comms` unchanged. `segments` has the number of each token's
    document.
    """
    if segments is None:
        return comms
    local_segments = comms.context_tokens(segments, dim=1)

    def wrap_attention(attend):
        """Returns the attention function `comms.wrap_attention(attend)` with its argument
        `segments` bound to the segments of this device's tokens."""
        return functools.partial(comms.wrap_attention(attend), segments=local_segments)

    return comms._replace(wrap_attention=wrap_attention)


def _check_tokens(name: str, tokens: Int[Array, "batch tokens"], context: int) -> None:
    """Raises `ValueError` if the inputs are empty, or longer than the model's context. `tokens` are
    the inputs: windows without their last token, which is only a target.
    """
    if not tokens.size:
        raise ValueError(
            f"{name} needs one or more sequences of one or more input tokens; got inputs of shape "
            f"{tokens.shape}. The last token of a training window is only a target, not an input."
        )
    if tokens.shape[1] > context:
        raise ValueError(
            f"{name}: inputs of {tokens.shape[1]} tokens are longer than the model's context of "
            f"{context}. Cut them, or configure context={tokens.shape[1]}."
        )
