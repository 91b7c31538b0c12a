"""Attention over split tokens by two all-to-alls: from tokens to heads, and back.

Legend: B batch, T tokens, H heads, G heads of keys and values, K head width, n devices on the axis;
`[T_X]`, `[H_X]` and `[G_X]` are split over the axis.

With n devices on the axis, a device sends (n - 1)/n of its queries, keys, values and result. The
number of query heads must be a multiple of n. `vary_alike` types q, k and v as varying along the
same axes. `whole_segments` gathers the `segments` (each token's document) of whole sequences.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from parallax.collectives import Axis, AxisLike
from parallax.context.checks import check_as_many_keys, check_heads, check_order
from parallax.context.gathered_keys import sequence_order, vary_alike, whole_segments
from parallax.context.orders import ChunkOrder, zigzag


def ulysses(
    attend: Callable[..., Any], axis: AxisLike, *, order: ChunkOrder = zigzag
) -> Callable[..., Any]:
    """Returns attention over split tokens, in which a device computes some heads of all tokens.

    The function takes `(q, k, v, *, segments=None)`: q is [B, T_X, H, K], and k and v are
    [B, T_X, G, K]. An all-to-all turns q into [B, T, H_X, K], and k and v into [B, T, G_X, K].
    `attend(q, k, v)` is called with the tokens in the order of the sequence, and with `segments=`
    if there are any. Another all-to-all brings the result of `attend` back to [B, T_X, H, K]. If
    the number of key heads is not a multiple of the number of devices, each key head is sent
    several times, and the gradients of its copies are added.

    Args:
        attend: attention of one device, such as `blockwise` or `jax.nn.dot_product_attention`. The
            first head that `attend` gets is head `axis_index * H / n` of the model, for H query
            heads and n devices. With ALiBi, choose a head's slope by the head's index in the model.
        axis: the axis or axes that the tokens are split over.
        order: a function that says which chunks of the sequence each device holds, such as
            `zigzag`.

    The returned function raises `ValueError` if the number of query heads is not a multiple of the
    number of devices, if the layers of `context.comms` have the tokens in another order, or if the
    shapes or types of its arguments do not fit each other.

    Source: Jacobs et al., DeepSpeed Ulysses (arXiv 2309.14509).
    """
    axis = Axis.of(axis)

    def attended(q, k, v, *, segments=None):
        """Returns the attention of this device's queries, [B, T_X, H, K].

        `k` and `v` are [B, T_X, G, K]. `segments` has the document of each token, [B, T_X].
        """
        check_heads("context.ulysses", q, k, v)
        check_as_many_keys("context.ulysses", q, k, axis)
        check_order("context.ulysses", q.shape[1], axis, order)
        n, (H, G) = axis.size(), (q.shape[2], k.shape[2])
        if H % n:
            raise ValueError(
                f"context.ulysses: the number of heads of q, {H}, must be a multiple of the number "
                f"of devices of {axis.names!r}, {n}. Use an axis of another size, or "
                "context.attention, which takes any number of heads."
            )
        # The indices that bring the tokens of devices 0, 1, ... into the order of the sequence, and
        # the indices that bring them back.
        in_order, inverse = sequence_order(q.shape[1], n, order)
        # Copies of each key head, so that their number is a multiple of n, and each device gets the
        # key heads of its query heads.
        copies = _copies(H, G, n)
        k, v = (jnp.repeat(x, copies, axis=2) for x in (k, v))
        # `all_to_all` splits dim 2 and joins dim 1: [B, T_X, H, K] -> [B, T, H_X, K]. Then the
        # tokens are put in the order of the sequence.
        q, k, v = (
            jnp.take(axis.all_to_all(x, 2, 1, tiled=True), in_order, axis=1)
            for x in vary_alike(q, k, v, axis)
        )
        options = {}
        if segments is not None:
            options["segments"] = whole_segments(segments, q, axis, in_order)
        # Back to the order of the devices, and from heads to tokens.
        out = jnp.take(attend(q, k, v, **options), inverse, axis=1)
        return axis.all_to_all(out, 1, 2, tiled=True)

    return attended


def _copies(H: int, G: int, n: int) -> int:
    """Returns the fewest copies of each of G key heads for which `copies * G` is a multiple of `n`,
    the number of devices.

    The number of copies must divide H / G, the number of query heads of a key head, so that each
    device gets the keys of its query heads. H / G copies always meet both conditions, since H, the
    number of query heads, is a multiple of `n`.
    """
    for copies in range(1, H // G + 1):
        if (H // G) % copies == 0 and (copies * G) % n == 0:
            return copies
    raise AssertionError(f"{H} heads are no multiple of {n} devices")
