"""Sends the messages of an embedding and a head whose vocabulary is split over the stages of a
pipeline.

Each stage looks up its rows of the vocabulary, and only the first stage uses the sum of the
results. Only the last stage has the head's input. `sum_to_first` and `copy_from_last` send messages
from stage to stage along a tree, in place of an all-reduce. A TPU sends such messages while it
computes; an all-reduce stops the computation (on a v5e, with JAX 0.10.2).
"""

import jax.numpy as jnp
from jaxtyping import Array, Shaped

from parallax.collectives import Axis, AxisLike
from parallax.collectives.permute import send
from parallax.pipeline.buffers import masked


def sum_to_first(x: Shaped[Array, "*dims"], axis: AxisLike) -> Shaped[Array, "*dims"]:
    """Returns on the first stage the sum of all stages' `x`, and on other stages a part of the sum.

    P stages send in ceil(log2(P)) rounds. In a round, each stage sends one message, receives one
    message, or does neither. The transpose of this function gives the first stage's cotangent to
    all stages, if the cotangents of the other stages are 0.
    """
    axis = Axis.of(axis)
    for _, pairs in _rounds(axis.size()):
        x = x + send(x, axis.names, pairs)
    return x


def copy_from_last(x: Shaped[Array, "*dims"], axis: AxisLike) -> Shaped[Array, "*dims"]:
    """Returns the last stage's `x` on all stages. Each stage may use its copy in its own way.

    P stages send in ceil(log2(P)) rounds. In a round, each stage sends one message, receives one
    message, or does neither. The transpose of this function returns on the last stage the sum of
    all stages' cotangents.
    """
    axis = Axis.of(axis)
    last = axis.size() - 1
    place = last - axis.index()  # counted from the last stage
    # The `x` of all stages but the last is overwritten below. `checks.head`, which refuses a head
    # that sums over the stages values computed from these `x`, cannot see that, but it sees that
    # they are set to 0 here.
    x = masked(place == 0, x)
    # The tree of `sum_to_first`, with the stages in reverse order and each source as target.
    for distance, pairs in reversed(_rounds(axis.size())):
        received = send(x, axis.names, [(last - target, last - source) for source, target in pairs])
        x = jnp.where(place % (2 * distance) == distance, received, x)
    return x


def _rounds(stages: int) -> list[tuple[int, list[tuple[int, int]]]]:
    """Returns the rounds of messages after which stage 0 has the sum over the stages. A round is a
    distance d and a list of pairs (source, target). The sources are the stages whose numbers are
    odd multiples of d. Each source sends to the stage whose number is smaller by d."""
    distances = [2**k for k in range((stages - 1).bit_length())]
    return [(d, [(source, source - d) for source in range(d, stages, 2 * d)]) for d in distances]
