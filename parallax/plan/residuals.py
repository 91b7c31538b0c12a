"""Counts the bytes that a decoder's layer keeps for its backward pass. In a pipeline, one job may
compute the gradient of a layer's input, and a later job the gradients of its weights. The module
also counts the bytes that the first of these jobs hands to the second.

The closed forms equal the bytes that `jax.vjp` keeps of a layer, as tests show. With these bytes,
`search` drops layouts that cannot fit, before it traces any step.

Legend: b sequences of a microbatch, T tokens on a device, D width, H heads, A = b T D numbers (an
activation), S = b H T^2 numbers (scores), t tensor devices. `layout.sequences(batch)` is b, and
`layout.token_shards` the number of devices among which the residual stream is split by tokens. In
`Sizes`, `narrow` is the bytes of a number. The other five fields of `Sizes` count numbers on a
device: `whole` is A, `split` A / t, `scores` S / t, `stream` the residual stream's numbers, and
`gathered` the kept numbers of a column-parallel matmul's input. The argument `short` is the bytes
of a number in 16-bit precision: 2, or 4 if the compiler widens such numbers. The argument `kernel`
says whether attention runs in a kernel that keeps no scores. A `Layer` has the widths `queries`,
`keys` and `hidden`. Its `column_parallel` is the number of elements per token in the results of the
layer's column-parallel matmuls.

Source: Korthikanti et al. (arXiv 2205.05198), section 4, counts 34 b T D + 5 b H T^2 bytes a layer
in 16 bits, for b sequences of T tokens, width D and H heads.
"""

from typing import NamedTuple

from parallax.layout import Layout
from parallax.plan.families import Config, layer_of
from parallax.plan.jobs import jobs
from parallax.plan.recomputed import recomputed
from parallax.plan.units import Number

FLOAT = 4  # bytes of a number in a sum, a norm or a softmax
# Arrays of the feed-forward's width that a layer keeps, by the number of its input matrices: the
# inputs of the activation (`remat.of_arguments`), and its result, the last matmul's input.
ARRAYS_OF_ACTIVATION = {1: 2, 2: 3}
# Further arrays of that width that JAX's GELU and SwiGLU compute. The backward pass computes them
# again.
INSIDE_ACTIVATION = {1: 4, 2: 2}
TILE = 512  # tokens of a tile's side: that of `context.TILED`


class Sizes(NamedTuple):
    """The counts of numbers in a microbatch's arrays on a device, and the bytes of one number.

    Attributes:
        whole: how many numbers an activation has (A).
        split: how many numbers a device has of an activation that is split over the t tensor
            devices (A / t).
        scores: how many of attention's S scores a device has (S / t).
        narrow: bytes of a number in the dtype in which the model computes.
        stream: how many numbers a device has of the residual stream: `whole`, or `split` if the
            stream is split by tokens.
        gathered: how many numbers are kept of a column-parallel layer's input: `whole`, or `stream`
            if the backward pass gathers the input again.
    """

    whole: int
    split: Number
    scores: Number
    narrow: int
    stream: Number
    gathered: Number


def sizes(config: Config, layout: Layout, batch: int, short: int = 2) -> Sizes:
    """Returns how many numbers the arrays of a microbatch have on a device, and the bytes of one
    number. The class `Sizes` names the arrays."""
    b, t, T = layout.sequences(batch), layout.tensor, config.context // layout.context
    tile = min(TILE, T) ** 2  # ring attention makes the scores of one tile at a time
    scores = tile if layout.context > 1 else T * T
    A, S = b * T * config.width, b * config.heads * scores
    stream = A / t if layout.sequence else A
    narrow = FLOAT if layout.precision == "full" else short
    return Sizes(  # whole, split, scores, narrow, stream, gathered
        A, A / t, S / t, narrow, stream, A if recomputed(layout).keeps_gathered else stream
    )


def everything(
    config: Config, layout: Layout, batch: int, short: int = 2, *, kernel: bool = False
) -> Number:
    """Returns the bytes that a layer keeps if the backward pass recomputes at most attention's
    scores. If the layout's remat recomputes the scores, their bytes are left out.

    The two norms and the column-parallel layers keep their inputs. Attention keeps q, k, v and its
    result. GELU or SwiGLU keeps its inputs and its result. The softmax keeps two copies of its
    result, one in float32 and one in the type of the computation, and two numbers for each row of
    scores (each query of each head). With a `kernel`, or over a context axis, no scores are kept.
    The numbers that a kernel keeps for each row are not counted.
    """
    size, b, T = (
        sizes(config, layout, batch, short),
        layout.sequences(batch),
        config.context // layout.context,
    )
    layer = layer_of(config)
    # q and attention's result, k and v, and the feed-forward's arrays: the numbers for each token.
    # A device has `size.split / config.width` times as many.
    numbers = 2 * (layer.queries + layer.keys) + ARRAYS_OF_ACTIVATION[layer.inputs] * layer.hidden
    kept = size.narrow * (2 * size.stream + 2 * size.gathered + numbers / config.width * size.split)
    rows = FLOAT * b * config.heads * T / layout.tensor  # one number for each query and head
    scores = (FLOAT + size.narrow) * size.scores + 2 * rows
    if layout.context > 1:  # ring attention keeps one number for each row, and no scores
        return kept + rows
    keeps_scores = recomputed(layout).keeps_scores and not kernel
    return kept + keeps_scores * scores


def between_products(
    config: Config, layout: Layout, batch: int, short: int = 2, *, kernel: bool = False
) -> Number:
    """Returns the bytes of the arrays that a layer computes between its matmuls: the arrays that
    the layer keeps, a float32 array in each norm, and the arrays inside GELU or SwiGLU.

    The forward and the backward pass read and write the arrays between matmuls in memory, whether
    these arrays are kept or computed again.
    """
    size, layer = sizes(config, layout, batch, short), layer_of(config)
    inside = INSIDE_ACTIVATION[layer.inputs] * layer.hidden / config.width * size.split
    kept = everything(config, layout, batch, short, kernel=kernel)
    # Two norms, each with a float32 array of the residual stream.
    return kept + 2 * FLOAT * size.stream + size.narrow * inside


def layer(
    config: Config, layout: Layout, batch: int, short: int = 2, *, kernel: bool = False
) -> Number:
    """Returns the bytes that a layer keeps for its backward pass. If the layout's remat is `stage`,
    the layer keeps these bytes only while its stage runs backward."""
    size = sizes(config, layout, batch, short)
    keeps = recomputed(layout).keeps
    if keeps == "products":
        # The layer's input (`stream`), attention's output before its sum over tensor devices
        # (`whole`), and the results of the column-parallel matmuls (`products`). No gradient needs
        # the result of the last matmul.
        products = layer_of(config).column_parallel / config.width * size.split
        return size.narrow * (size.stream + size.whole + products)
    if keeps == "inputs":
        return size.narrow * size.stream
    return everything(config, layout, batch, short, kernel=kernel)


def handed(config: Config, layout: Layout, batch: int, short: int = 2) -> Number:
    """Returns the bytes that the job for a layer's input gradient hands on to the job for the
    gradients of its weights, if nothing is computed again.

    The job hands on the cotangents of the results of the layer's matmuls, and the gradients of the
    layer's norms and biases. In a GPT-2 of width D the cotangents of q, k and v have D numbers per
    token each, and the cotangent of the feed-forward's first matmul has 4 D. These four cotangents
    are split over the tensor devices. The cotangents of the two row-parallel matmuls have D numbers
    per token each, and are not split. A Llama has fewer norm weights and biases, so for a Llama the
    returned bytes are slightly too many.
    """
    size, D = sizes(config, layout, batch, short), config.width
    products = layer_of(config).column_parallel
    of_tokens = products / D * size.split + 2 * size.whole
    # Biases of column-parallel matmuls are split. Two norms have 4 D, the two other biases 2 D.
    return size.narrow * (of_tokens + products / layout.tensor + 6 * D)


def at_least(
    config: Config, layout: Layout, batch: int, short: int = 2, *, kernel: bool = False
) -> Number:
    """Returns a lower bound of the bytes that a step needs besides its arguments: the bytes that
    the layers keep for all microbatches that wait for their backward pass."""
    # Each slot has the arrays that one chunk keeps for one microbatch.
    slots = jobs(layout).slots if layout.pipelined else 1
    if recomputed(layout).whole_stage:
        # A slot has only the stage's input: the device's part of the residual stream (`stream`
        # numbers, of `narrow` bytes each).
        size = sizes(config, layout, batch, short)
        return slots * size.narrow * size.stream
    layers = config.layers // (layout.stage * layout.chunks)
    return slots * layers * layer(config, layout, batch, short, kernel=kernel)
