"""Sends the messages of an embedding and a head whose vocabulary is split over the stages of a
pipeline.

Each stage looks up its rows of the vocabulary, and only the first stage uses the sum of the
results. Only the last stage has the head's input. Between few stages, `sum_to_first` and
`copy_from_last` send messages from stage to stage along a tree, in place of an all-reduce. A TPU
sends such messages while it computes; an all-reduce stops the computation (on a v5e, with JAX
0.10.2). But P stages need ceil(log2(P)) rounds of whole messages, and an all-reduce takes the time
of 2 (P - 1)/P messages. So more than `FEW` stages use an all-reduce.
"""

import jax.numpy as jnp
from jaxtyping import Array, Shaped

from parallax.collectives import Axis, AxisLike
from parallax.collectives.permute import send
from parallax.collectives.types import linear, varying
from parallax.pipeline.buffers import masked

FEW = 4  # stages: a tree takes 2 rounds there, and an all-reduce the time of 1.5 messages


def sum_to_first(x: Shaped[Array, "*dims"], axis: AxisLike) -> Shaped[Array, "*dims"]:
    """Returns on the first stage the sum of all stages' `x`. On other stages the result is the sum
    of some of them, or of all.

    If there are at most `FEW` stages, they send along a tree. In a round, each stage sends one
    message, receives one message, or does neither. The transpose of this function gives the first
    stage's cotangent to all stages, if the cotangents of the other stages are 0.
    """
    axis = Axis.of(axis)
    if axis.size() > FEW:
        return _sum_on_all(x, axis)
    for _, pairs in _rounds(axis.size()):
        x = x + send(x, axis.names, pairs)
    return x


def copy_from_last(x: Shaped[Array, "*dims"], axis: AxisLike) -> Shaped[Array, "*dims"]:
    """Returns the last stage's `x` on all stages. Each stage may use its copy in its own way.

    If there are at most `FEW` stages, they send along the tree of `sum_to_first`. The transpose of
    this function returns on the last stage the sum of all stages' cotangents.
    """
    axis = Axis.of(axis)
    last = axis.size() - 1
    place = last - axis.index()  # counted from the last stage
    # The sum needs these zeros. In the tree, the `x` of all stages but the last is overwritten.
    # `checks.head`, which refuses a head that sums over the stages values computed from these `x`,
    # cannot see that, but it sees the zeros.
    x = masked(place == 0, x)
    if axis.size() > FEW:
        return _sum_on_all(x, axis)
    # The tree of `sum_to_first`, with the stages in reverse order and each source as target.
    for distance, pairs in reversed(_rounds(axis.size())):
        received = send(x, axis.names, [(last - target, last - source) for source, target in pairs])
        x = jnp.where(place % (2 * distance) == distance, received, x)
    return x


def _sum_on_all(x: Shaped[Array, "*dims"], axis: Axis) -> Shaped[Array, "*dims"]:
    """Returns the sum of all stages' `x` on all stages. Each stage may use its copy in its own way,
    so the transpose sums the stages' cotangents."""
    names = axis.names
    # The sum of booleans is a count.
    total = axis.all_reduce(varying(x, names)).astype(x.dtype)
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return varying(total, names)
    # Without `linear`, the transpose would be `lax.psum`, and not the axis's own algorithm.
    return linear(total, forward=lambda x: varying(x, names), backward=axis.all_reduce)


def _rounds(stages: int) -> list[tuple[int, list[tuple[int, int]]]]:
    """Returns the rounds of messages after which stage 0 has the sum over the stages. A round is a
    distance d and a list of pairs (source, target). The sources are the stages whose numbers are
    odd multiples of d. Each source sends to the stage whose number is smaller by d."""
    distances = [2**k for k in range((stages - 1).bit_length())]
    return [(d, [(source, source - d) for source in range(d, stages, 2 * d)]) for d in distances]
