"""Attention over split tokens with all keys and values on every device: the simplest way.

Legend: B batch, T tokens, H heads, G heads of keys and values, K head width, n devices on the axis;
`[T_X]` is split over the axis.

With n devices on the axis, a device sends its keys and values n - 1 times. It needs memory for the
keys and values of all devices.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from parallax.collectives import Axis, AxisLike
from parallax.collectives.types import axes, linear, varying, varying_axes
from parallax.context.checks import (
    check_as_many_keys,
    check_heads,
    check_order,
    check_places,
    check_segments,
)
from parallax.context.orders import ChunkOrder, chunk_table, places, positions, zigzag


def gathered(
    attend: Callable[..., Any], axis: AxisLike, *, order: ChunkOrder = zigzag
) -> Callable[..., Any]:
    """Returns attention that gathers all keys and values, for the queries of this device.

    The function takes `(q, k, v, *, segments=None)`: q is [B, T_X, H, K], and k and v are
    [B, T_X, G, K]. It calls `attend(q, k, v, positions=pair)` with the keys and values of whole
    sequences, [B, T, G, K], in the order of the sequence. The pair is the positions of q and the
    positions of k. If there are segments, `attend` also gets `segments=`, the pair of the segments
    of q and the segments of k.

    A device computes the scores of its own queries with all keys; causal attention needs only about
    half of these scores. The backward pass reduce-scatters the gradients of k and v in the dtype of
    k and v, which is also `q`'s dtype.

    Args:
        attend: an attention function that takes `positions=` and masks by them, such as
            `blockwise`.
        axis: the axis or axes that the tokens are split over.
        order: a function that says which chunks of the sequence each device holds, such as
            `zigzag`.

    The returned function raises `ValueError` if `attend` makes its mask or bias without the
    positions: from its own count 0, 1, 2, ... of the queries and of the keys, or from a constant
    table [..., T_X, T]. It also raises `ValueError` if the layers of `context.comms` have the
    tokens in another order, or if the shapes or types of its arguments do not fit each other.
    """
    axis = Axis.of(axis)

    def attended(q, k, v, *, segments=None):
        """Returns the attention of this device's queries, [B, T_X, H, K].

        `k` and `v` are [B, T_X, G, K]. `segments` has the document of each token, [B, T_X].
        """
        check_heads("context.gathered", q, k, v)
        check_as_many_keys("context.gathered", q, k, axis)
        n, tokens = axis.size(), q.shape[1]
        check_order("context.gathered", tokens, axis, order)
        # The indices that bring the tokens of devices 0, 1, ... into the order of the sequence.
        in_order, _ = sequence_order(tokens, n, order)
        q, k, v = vary_alike(q, k, v, axis)
        k, v = (jnp.take(_gather(x, axis), in_order, axis=1) for x in (k, v))
        options: dict[str, Any] = {}
        if segments is not None:
            options["segments"] = segments, whole_segments(segments, q, axis, in_order)
        # The keys were put in the order of the sequence, so their positions are 0, 1, 2, ...
        of_queries = positions(tokens, axis, order=order)
        options["positions"] = of_queries, jnp.arange(tokens * n, dtype=jnp.int32)
        # On one device the queries may be the whole sequence in its order. Then a mask from
        # numbers 0, 1, 2, ... of the function's own is right too. In any other case `attend` must
        # use the positions: it is traced, and refused if it makes its mask from such numbers.
        is_sequence = n == 1 and np.array_equal(in_order, np.arange(tokens))
        if not is_sequence:
            check_places(attend, (q, k, v), options, tokens * n)
        return attend(q, k, v, **options)

    return attended


def vary_alike(q: Array, k: Array, v: Array, axis: Axis) -> tuple[Array, Array, Array]:
    """Returns q, k and v typed as varying along `axis` and along all axes along which one of them
    varies.

    Collectives need arrays that vary along `axis`. An attention function may need q, k and v to
    vary along the same axes.
    """
    return varying((q, k, v), (*axes(axis.names), *sum(map(varying_axes, (q, k, v)), ())))


def _gather(x: Array, axis: Axis) -> Array:
    """Returns all devices' tokens, typed as varying: `A[B, T_X] -> A[B, T]`.

    The function `linear` gives this gather its transpose, a reduce-scatter by the algorithm of
    `axis`.
    """

    def forward(x):
        return axis.all_gather(x, axis=1, tiled=True)

    def backward(cotangent):
        return axis.reduce_scatter(cotangent, scatter_dimension=1, tiled=True)

    return linear(x, forward=forward, backward=backward)


def sequence_order(tokens: int, n: int, order: ChunkOrder) -> tuple[np.ndarray, np.ndarray]:
    """Returns two orders of tokens, each the inverse of the other: indices for `jnp.take`.

    The first order brings the tokens of device 0, device 1, and so on into the order of the
    sequence. The second order brings a sequence into the order of the devices. A device has
    `tokens` tokens.
    """
    # The place of each token in its sequence: of the tokens of device 0, then of device 1, and so
    # on.
    inverse = places(tokens * n, chunk_table(order, n)).reshape(-1)
    return np.argsort(inverse), inverse


def whole_segments(segments: Array, q: Array, axis: Axis, in_order: np.ndarray) -> Array:
    """Returns the segments of whole sequences, [B, T], from those of this device, [B, T_X].
    `segments` has the number of each token's document.

    `in_order` has the indices that bring the tokens of devices 0, 1, ... into the order of the
    sequence. `q` has the queries; only its batch size is read.
    """
    check_segments("context", segments, (q.shape[0], len(in_order) // axis.size()))
    everywhere = axis.all_gather(varying(segments, axes(axis.names)), axis=1, tiled=True)
    return jnp.take(everywhere, in_order, axis=1)
