"""What a GPT-2 train step needs in memory beside its state: a few named terms, and the constants of a compiler.

Legend: b sequences of a microbatch, T tokens, D width, H heads, A = b T D numbers, S = b H T^2 numbers, t tensor devices, B the
layers' parameters on a device, E the rest of them, W one layer's, v chunks.

`kept` is exact: it is what `jax.vjp` keeps of a layer, which the tests count. What one layer needs while its backward pass runs,
and how often gradients are held, depends on the compiler: `XLA_CPU` was fitted to 110 compiled steps of five sizes (see
`benchmarks/plan.py`), `IN_PLACE` is the same layer with each gradient held once and an update in place.

Sources: Korthikanti et al. (arXiv 2205.05198), section 4, counts 34 b T D + 5 b H T^2 bytes a layer in 16 bits; Rajbhandari et
al. (arXiv 1910.02054), section 3, 16 bytes a parameter.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from parallax.layout import Layout
from parallax.models import gpt2
from parallax.plan import arguments
from parallax.plan.compilers import IN_PLACE, Compiler, Number
from parallax.plan.jobs import jobs
from parallax.plan.recomputed import layers_in_body, recomputed
from parallax.plan.traffic import BLOCK_TOKENS

FLOAT = 4  # bytes of what is summed
TILE = 512  # tokens of a tile's side: that of `context.TILED`


class Temporary(NamedTuple):
    """Bytes that a step needs on a device beside its state and its batch.

    Attributes:
        kept: what the layers keep for their backward pass, of all microbatches in flight; with a weight lane, what waits for it,
            and where each stage has its own job in a tick, what came and waits for one.
        block: what one layer needs while its backward pass runs, and a stage's residuals on their way.
        gradients: of one microbatch, and their sums.
        gathered: parameters that live as shares, made whole (ZeRO-3); and those in 16 bits.
        loss: the logits of a block of tokens, twice, and the table's gradient.
        update: what the optimizer needs, after all this.
    """

    kept: Number
    block: Number
    gradients: Number
    gathered: Number
    loss: Number
    update: Number

    @property
    def peak(self) -> Number:
        """The most bytes that are there at one time: in the backward pass, at the loss, or in the update."""
        return max(
            self.kept + self.gathered + max(self.block + self.gradients, self.loss),
            self.update + self.gathered,
        )


class Sizes(NamedTuple):
    """How many numbers a microbatch's arrays have on a device, and the bytes of one.

    Attributes:
        whole: A.
        split: A / t.
        scores: S / t.
        narrow: bytes of a number that the model computes.
        stream: numbers of the residual stream.
        gathered: numbers of the input of a column-parallel layer, as it is kept.
    """

    whole: int
    split: Number
    scores: Number
    narrow: int
    stream: Number
    gathered: Number


def sizes(config: gpt2.Config, layout: Layout, batch: int, short: int = 2) -> Sizes:
    """The sizes of a microbatch on a device; `batch` and `short` are those of `temporary`."""
    b, t, T = layout.sequences(batch), layout.tensor, config.context // layout.context
    tile = min(TILE, T) ** 2  # around the ring, scores are made a tile at a time
    scores = tile if layout.context > 1 else T * T
    A, S = b * T * config.width, b * config.heads * scores
    stream = A / t if layout.sequence else A
    narrow = FLOAT if layout.precision == "full" else short
    return Sizes(
        A, A / t, S / t, narrow, stream, A if recomputed(layout).keeps_gathered else stream
    )


def everything(config: gpt2.Config, layout: Layout, batch: int, short: int = 2) -> Number:
    """Bytes that a layer keeps where nothing but attention is computed again: what `jax.vjp` keeps of it.

    Norms keep four activations (two in float32), column-parallel layers their inputs, attention q, k, v and its result, GELU
    some of four times the width; the softmax its result in both types and two numbers a row.
    """
    size, b, T = (
        sizes(config, layout, batch, short),
        layout.sequences(batch),
        config.context // layout.context,
    )
    kept = (
        (2 * FLOAT + 2 * size.narrow) * size.stream
        + 2 * size.narrow * size.gathered
        + 4 * (1 + results_of_gelu()) * size.narrow * size.split
    )
    kept += 4 * FLOAT * b * T / layout.token_shards
    rows = FLOAT * b * config.heads * T / layout.tensor  # a number for each query and head
    scores = (FLOAT + size.narrow) * size.scores + 2 * rows
    if layout.context > 1:
        return kept + rows
    return kept + recomputed(layout).keeps_scores * scores


@functools.cache
def results_of_gelu() -> int:
    """How many arrays of its size JAX keeps of a GELU and for the product after it: six in JAX 0.10, five in 0.12."""
    x, weights = (
        jax.ShapeDtypeStruct((2, 7, 5), jnp.float32),
        jax.ShapeDtypeStruct((2, 5, 5), jnp.float32),
    )
    run = lambda x, weights: jax.lax.scan(
        lambda x, w: (jax.nn.gelu(x, approximate=True) @ w, None), x, weights
    )[0]
    kept = jax.tree.leaves(
        jax.eval_shape(lambda x, weights: jax.vjp(run, x, weights)[1], x, weights)
    )
    return sum(leaf.shape == (2, 2, 7, 5) for leaf in kept)


def layer(config: gpt2.Config, layout: Layout, batch: int, short: int = 2) -> Number:
    """Bytes that a layer keeps for its backward pass; with remat `stage`, if it were kept."""
    size = sizes(config, layout, batch, short)
    keeps = recomputed(layout).keeps
    if keeps == "products":
        return size.narrow * (size.stream + size.whole + 7 * size.split)
    if keeps == "inputs":
        return size.narrow * size.stream
    return everything(config, layout, batch, short)


def handed(config: gpt2.Config, layout: Layout, batch: int, short: int = 2) -> Number:
    """Bytes of a layer that its input's gradient hands on to a lane of the weights' gradients, where nothing is computed again.

    The cotangents of its four products, 3 + 4 of width D over the tensor devices and two whole ones, and the gradients of norms
    and biases, which are made on the way.
    """
    size, D = sizes(config, layout, batch, short), config.width
    return size.narrow * (7 * size.split + 2 * size.whole + 7 * D / layout.tensor + 6 * D)


def taken_apart(
    kept: Number, size: Sizes, layout: Layout, compiler: Compiler
) -> tuple[Number, Number]:
    """Bytes that are taken out of a loop's stacks before the backward pass of what is in its body: the last layer's; the others'.

    XLA reads a layer's share of a stack where it is used. It cannot where a body has several layers (ZeRO-3), whose shares are
    cut from one slice, nor through the barrier that `jax.checkpoint` puts round what it keeps. What the last layer keeps is
    there together with the input and the output of its GELU, and is freed during its backward pass; that of other
    layers stays. Where a layer keeps little, it is part of the compiler's `block`.

    Args:
        kept: bytes that a layer keeps.
        size: of a microbatch.
        layout: says what is computed again.
        compiler: how often it holds things.
    """
    in_body = layers_in_body(layout)
    taken = compiler.apart[in_body > 1]
    last = taken * kept + bool(taken) * 2 * 4 * size.narrow * size.split
    again = recomputed(layout)
    behind = last if again.gathers and again.keeps == "everything" else 0.0
    return behind, taken * kept * (in_body - 1)


def temporary(
    config: gpt2.Config,
    layout: Layout,
    batch: int,
    *,
    compiler: Compiler = IN_PLACE,
    short: int = 2,
) -> Temporary:
    """What a step of `decoder.train_step` needs on a device beside its arguments.

    Args:
        config: the model's sizes.
        layout: which devices share what, and what is computed again.
        batch: sequences in the global batch.
        compiler: how often it holds things.
        short: bytes of a number in a short precision.
    """
    size, c, leaves = (
        sizes(config, layout, batch, short),
        compiler,
        arguments.leaves(config, layout),
    )
    again, counts = recomputed(layout), jobs(layout)
    shares_parameters = layout.zero == 3
    total = lambda block, share: (
        FLOAT
        * sum(leaf.share if share else leaf.elements for leaf in leaves if leaf.block == block)
    )
    B, E, B_share = total(True, False), total(False, False), total(True, True)
    sums = B_share if layout.zero >= 2 else B
    state = B_share if layout.zero >= 1 else B
    many, chunks = layout.microbatches > 1, layout.chunks
    layers = config.layers // (layout.stage * chunks)
    loop = (
        layers // layers_in_body(layout) > 1
    )  # without a loop nothing is stacked: a layer's results are freed as they are used
    held = c.kept if again.keeps == "everything" else 1.0
    one = (
        size.narrow * size.stream
        if again.whole_stage
        else held * layers * layer(config, layout, batch, short)
    )
    in_flight, waiting = 1, 0
    if layout.pipelined:
        in_flight = counts.slots
        arrived = size.narrow * (size.stream / layout.tensor if layout.split_sends else size.stream)
        waiting = (
            counts.deferred * layers * handed(config, layout, batch, short)
            + counts.arrivals * arrived
        )
    split, whole = c.block[("everything", "products", "inputs").index(again.keeps)]
    block = c.scores * (FLOAT + size.narrow) / 2 * size.scores + size.narrow * (
        split * size.split + whole * size.whole
    )
    first, others = (
        taken_apart(layer(config, layout, batch, short), size, layout, c) if loop else (0.0, 0.0)
    )
    block = max(0.0, block - c.near, first) + others
    if again.whole_stage:  # all its layers are kept while its backward pass runs
        full = everything(config, layout, batch, short)
        early = c.early * (counts.last == 1)  # one tick alone is no loop
        copies = early + (max(1, c.copied) if layout.sequence or shares_parameters else 1)
        block = block + layers * full * copies if loop else max(block, full) + (layers - 1) * full
    two_layers = min(2 * B / (layers * chunks), B)
    gathered = 0.0 if layout.precision == "full" else size.narrow / FLOAT * (B_share + E)
    if shares_parameters:
        gathered += c.gathered * (1.1 if layout.pipelined else 1) * two_layers
    if layout.pipelined:
        block = block + c.slots * one if loop else max(block, one)

    of_stage = c.sums * sums + c.ends_of_stage * E + c.scattered * (B if layout.zero >= 1 else 0)
    of_stage += 0.0 if shares_parameters else c.chunk * B / chunks
    of_whole = (
        c.gradients * B + many * c.gradients_again * sums + (c.ends + many * c.ends_again) * E
    )
    of_whole += (c.ring[0] * B + c.ring[1] * E) * (many and layout.data * layout.context > 2)
    of_shares = (
        c.shares * B_share * (1 + many) + (c.ends_gathered[0] + c.ends_gathered[1] * many) * E
    )
    gradients = of_stage if layout.pipelined else of_shares if shares_parameters else of_whole
    update = c.update[0] * state + c.update[1] * (B_share if shares_parameters else B)
    update += (c.update[3] if layout.data * layout.context > 1 else c.update[2]) * E
    update = 0.0 if layout.pipelined else update
    logits = (
        min(BLOCK_TOKENS, layout.sequences(batch) * config.context // layout.context)
        * config.rows
        / (layout.stage * layout.tensor)
    )
    loss = 2 * FLOAT * logits + E
    return Temporary(in_flight * one + waiting, block, gradients, gathered, loss, update)
