"""Other ways to attend over split tokens: heads for tokens, or all keys on every device; and
attention on one device alone.

Legend: B batch, T tokens, H heads, G heads of keys and values, K head width, n devices on the axis.

| | bytes a device sends forward, of its own q, k, v and result | needs |
|---|---|---|
| `ulysses` | (n - 1)/n of all four | H a multiple of n |
| `gathered` | n - 1 times its k and v | room for all keys and values |
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from parallax.collectives import Axis, AxisLike
from parallax.collectives.types import axes, linear, varying, varying_axes
from parallax.context.checks import check_heads, check_places, check_segments
from parallax.context.kernels import TILED, Kernel, Marks
from parallax.context.orders import ChunkOrder, chunk_table, places, positions, zigzag


def blockwise(
    q: Float[Array, "batch tokens heads head_width"],
    k: Float[Array, "batch keys key_heads head_width"],
    v: Float[Array, "batch keys key_heads head_width"],
    *,
    causal: bool = True,
    segments: Shaped[Array, "..."]
    | tuple[Shaped[Array, "..."], Shaped[Array, "..."]]
    | None = None,
    positions: Marks | None = None,
    kernel: Kernel = TILED,
) -> Float[Array, "batch tokens heads head_width"]:
    """softmax(q k^T / sqrt(K)) v on one device, in memory linear in T.

    Types and derivatives as in `attention`.

    Args:
        q: queries.
        k: keys; with fewer heads, each is of H / G successive heads of `q`.
        v: their values.
        causal: whether query t sees keys 0 to t alone; with `positions`, those whose position is
            not after its own.
        segments: the document of each token, by number; or of each query and of each key.
        positions: of the queries [T], and of the keys [S], where both are not the whole sequence.
        kernel: who computes it.

    Raises:
        ValueError: heads, tokens or segments that do not fit, or arrays of different types.
    """
    check_heads("context.blockwise", q, k, v, None)
    if positions is None and q.shape[1] != k.shape[1]:
        raise ValueError(
            f"context.blockwise needs as many keys as queries; got {k.shape[1]} and {q.shape[1]}. "
            "Pass positions=(of the queries, of the keys)."
        )
    marks = segments if segments is None or isinstance(segments, tuple) else (segments, segments)
    for mark, x in zip(marks or (), (q, k), strict=False):
        check_segments("context.blockwise", mark, x.shape[:2])
    arrays = (q, k, v, marks, positions if causal else None)
    union = sum(map(varying_axes, jax.tree.leaves(arrays)), ())
    causal_alone = causal and positions is None

    def forward(q, k, v, marks, positions):
        out, lse = kernel.forward(q, k, v, causal=causal_alone, segments=marks, **_given(positions))
        out = out.astype(q.dtype)
        return out, (q, k, v, out, lse, marks, positions)

    def backward(residuals, ct):
        q, k, v, out, lse, marks, positions = residuals
        found = kernel.backward(
            q, k, v, out, lse, ct, causal=causal_alone, segments=marks, **_given(positions)
        )
        return *(x.astype(q.dtype) for x in found), None, None

    run = jax.custom_vjp(lambda *arrays: forward(*arrays)[0])
    run.defvjp(forward, backward)
    return run(*varying(arrays, union))


def ulysses(
    attend: Callable[..., Any], axis: AxisLike, *, order: ChunkOrder = zigzag
) -> Callable[..., Any]:
    """`attend` over whole sequences, for devices that hold tokens: each computes some heads of all
    tokens.

    `(q, k, v, *, segments=None)`, [B, T_X, H, K] each, go by all-to-all to [B, T, H_X, K], where
    `attend(q, k, v)` is called with the tokens in the order of the sequence, and with `segments=`
    where there are some; its result goes back the same way. Where the heads of keys do not divide
    by the devices, each is sent as often as it takes; their gradients add up.

    Args:
        attend: attention of one device, such as `blockwise` or `jax.nn.dot_product_attention`. What
            it does by the number of a head, such as ALiBi's slopes, begins at head `axis_index * H
            / n` of the model.
        axis: the axis or axes that the tokens are split over.
        order: where the tokens live.

    The function raises `ValueError` for heads that do not divide by the devices, and where
    `attention` does.

    Source: Jacobs et al., DeepSpeed Ulysses (arXiv 2309.14509).
    """
    axis = Axis.of(axis)

    def attended(q, k, v, *, segments=None):
        check_heads("context.ulysses", q, k, v, None)
        n, (H, G) = axis.size(), (q.shape[2], k.shape[2])
        if H % n:
            raise ValueError(
                f"context.ulysses: the {H} heads must divide by the {n} devices of {axis.names!r}. "
                "Take an axis whose size divides them, or context.attention, which needs no number "
                "of heads."
            )
        there, back = _by_place(q.shape[1], n, order)
        copies = next(
            copies
            for copies in range(1, H // G + 1)
            if H // G % copies == 0 and copies * G % n == 0
        )
        k, v = (jnp.repeat(x, copies, axis=2) for x in (k, v))
        to_heads = lambda x: jnp.take(axis.all_to_all(x, 2, 1, tiled=True), there, axis=1)
        q, k, v = map(to_heads, _alike(q, k, v, axis))
        known = {} if segments is None else {"segments": _sequence(segments, q, axis, there)}
        return axis.all_to_all(jnp.take(attend(q, k, v, **known), back, axis=1), 1, 2, tiled=True)

    return attended


def gathered(
    attend: Callable[..., Any], axis: AxisLike, *, order: ChunkOrder = zigzag
) -> Callable[..., Any]:
    """`attend` of this device's queries to all keys and values, which are gathered: the simple one.

    `(q, k, v, *, segments=None)`, [B, T_X, H, K] each, become `attend(q, k, v, positions=(of q, of
    k))`, with the keys of whole sequences [B, T, G, K] in their order, and with `segments=(of q, of
    k)` where there are some.

    A device computes T / n queries to T keys: twice what causal attention needs. Backward, the
    gradients of keys and values are scattered, in `q`'s type.

    Args:
        attend: attention by positions, such as `blockwise`.
        axis: the axis or axes that the tokens are split over.
        order: where the tokens live.

    The function raises `ValueError` where `attend` ignores the positions and masks by a count of
    its own.
    """
    axis = Axis.of(axis)

    def attended(q, k, v, *, segments=None):
        check_heads("context.gathered", q, k, v, None)
        n, tokens = axis.size(), q.shape[1]
        there, _ = _by_place(tokens, n, order)
        q, k, v = _alike(q, k, v, axis)
        everywhere = lambda x: jnp.take(_gather(x, axis), there, axis=1)
        k, v = everywhere(k), everywhere(v)
        known = (
            {}
            if segments is None
            else {"segments": (segments, _sequence(segments, q, axis, there))}
        )
        known["positions"] = (
            positions(tokens, axis, order=order),
            jnp.arange(tokens * n, dtype=jnp.int32),
        )
        if n > 1:
            check_places(attend, (q, k, v), known, tokens * n)
        return attend(q, k, v, **known)

    return attended


def _given(positions):
    return {} if positions is None else {"positions": positions}


def _alike(q, k, v, axis: Axis):
    """All three, varying along the axis and wherever one of them does."""
    return varying((q, k, v), (*axes(axis.names), *sum(map(varying_axes, (q, k, v)), ())))


def _gather(x, axis: Axis):
    """`A[B, T_X] -> A[B, T]`, typed as varying; its transpose is a reduce-scatter."""
    return linear(
        x,
        forward=lambda x: axis.all_gather(x, axis=1, tiled=True),
        backward=lambda ct: axis.reduce_scatter(ct, scatter_dimension=1, tiled=True),
    )


def _by_place(tokens: int, n: int, order: ChunkOrder) -> tuple[np.ndarray, np.ndarray]:
    """The place of each token of the sequence among the tokens of device 0, 1, ..., and the inverse
    of that order.
    """
    back = places(tokens * n, chunk_table(order, n)).reshape(-1)
    return np.argsort(back), back


def _sequence(segments, q, axis: Axis, there: np.ndarray):
    """Segments of whole sequences, in their order."""
    check_segments("context", segments, (q.shape[0], len(there) // axis.size()))
    return jnp.take(
        axis.all_gather(varying(segments, axes(axis.names)), axis=1, tiled=True), there, axis=1
    )
