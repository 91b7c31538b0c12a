"""Bytes that a decoder's layer keeps for its backward pass, and those that a stage's job hands on.

They are what `jax.vjp` keeps of a layer, which the tests count. Before it traces a step, the search
drops the layouts that cannot fit by these estimates.

Legend: b sequences of a microbatch, T tokens, D width, H heads, A = b T D numbers, S = b H T^2
numbers, t tensor devices.

Source: Korthikanti et al. (arXiv 2205.05198), section 4, counts 34 b T D + 5 b H T^2 bytes a layer
in 16 bits.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from parallax.layout import Layout
from parallax.plan.families import Config, layer_of
from parallax.plan.jobs import jobs
from parallax.plan.recomputed import recomputed
from parallax.plan.units import Number

FLOAT = 4  # bytes of what is summed
RESULTS_OF_SWIGLU = 5  # the gate, its sigmoid and their product, the other input, the result
TILE = 512  # tokens of a tile's side: that of `context.TILED`


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


def sizes(config: Config, layout: Layout, batch: int, short: int = 2) -> Sizes:
    """Returns the sizes of a microbatch on a device; `short` is the bytes of a number in a short
    precision."""
    b, t, T = layout.sequences(batch), layout.tensor, config.context // layout.context
    tile = min(TILE, T) ** 2  # around the ring, scores are made a tile at a time
    scores = tile if layout.context > 1 else T * T
    A, S = b * T * config.width, b * config.heads * scores
    stream = A / t if layout.sequence else A
    narrow = FLOAT if layout.precision == "full" else short
    return Sizes(
        A, A / t, S / t, narrow, stream, A if recomputed(layout).keeps_gathered else stream
    )


def everything(
    config: Config, layout: Layout, batch: int, short: int = 2, *, kernel: bool = False
) -> Number:
    """Returns the bytes that a layer keeps where nothing but attention is computed again: what
    `jax.vjp` keeps of it.

    Norms keep four activations (two in float32), column-parallel layers their inputs, attention q,
    k, v and its result, GELU some of four times the width; the softmax its result in both types and
    two numbers a row. With a `kernel` for attention there are no scores.
    """
    size, b, T = (
        sizes(config, layout, batch, short),
        layout.sequences(batch),
        config.context // layout.context,
    )
    layer = layer_of(config)
    results = results_of_gelu() if layer.inputs == 1 else RESULTS_OF_SWIGLU
    numbers = 2 * (layer.queries + layer.keys) + results * layer.hidden
    kept = (
        (2 * FLOAT + 2 * size.narrow) * size.stream
        + 2 * size.narrow * size.gathered
        + numbers / config.width * size.narrow * size.split
    )
    kept += 4 * FLOAT * b * T / layout.token_shards
    rows = FLOAT * b * config.heads * T / layout.tensor  # a number for each query and head
    scores = (FLOAT + size.narrow) * size.scores + 2 * rows
    if layout.context > 1:
        return kept + rows
    keeps_scores = recomputed(layout).keeps_scores and not kernel
    return kept + keeps_scores * scores


@functools.cache
def results_of_gelu() -> int:
    """Returns how many arrays of its size JAX keeps of a GELU and for the product after it: six in
    JAX 0.10, five in 0.12."""
    x, weights = (
        jax.ShapeDtypeStruct((2, 7, 5), jnp.float32),
        jax.ShapeDtypeStruct((2, 5, 5), jnp.float32),
    )

    def layer(x, w):
        return jax.nn.gelu(x, approximate=True) @ w, None

    def run(x, weights):
        return jax.lax.scan(layer, x, weights)[0]

    kept = jax.tree.leaves(
        jax.eval_shape(lambda x, weights: jax.vjp(run, x, weights)[1], x, weights)
    )
    return sum(leaf.shape == (2, 2, 7, 5) for leaf in kept)


def layer(
    config: Config, layout: Layout, batch: int, short: int = 2, *, kernel: bool = False
) -> Number:
    """Returns the bytes that a layer keeps for its backward pass; with remat `stage`, if it were
    kept."""
    size = sizes(config, layout, batch, short)
    keeps = recomputed(layout).keeps
    if keeps == "products":
        products = layer_of(config).column_parallel / config.width * size.split
        return size.narrow * (size.stream + size.whole + products)
    if keeps == "inputs":
        return size.narrow * size.stream
    return everything(config, layout, batch, short, kernel=kernel)


def handed(config: Config, layout: Layout, batch: int, short: int = 2) -> Number:
    """Returns the bytes of a layer that its input's gradient hands on to a lane of the weights'
    gradients, where nothing is computed again.

    The cotangents of its four products, 3 + 4 of width D over the tensor devices and two whole
    ones, and the gradients of norms and biases, which are made on the way.
    """
    size, D = sizes(config, layout, batch, short), config.width
    products = layer_of(config).column_parallel
    of_tokens = products / D * size.split + 2 * size.whole
    return size.narrow * (of_tokens + products / layout.tensor + 6 * D)


def at_least(
    config: Config, layout: Layout, batch: int, short: int = 2, *, kernel: bool = False
) -> Number:
    """Returns the bytes that a step keeps at least besides its arguments: those of the layers, of
    all microbatches in flight."""
    slots = jobs(layout).slots if layout.pipelined else 1
    if recomputed(layout).whole_stage:
        size = sizes(config, layout, batch, short)
        return slots * size.narrow * size.stream
    layers = config.layers // (layout.stage * layout.chunks)
    return slots * layers * layer(config, layout, batch, short, kernel=kernel)
