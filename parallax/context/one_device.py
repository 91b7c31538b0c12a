"""Attention on one device. The two functions of a `Kernel` compute the output and the gradients.

Legend: B batch, T tokens, S keys, H heads, G heads of keys and values, K head width.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from parallax.collectives.types import varying, varying_axes
from parallax.context.checks import check_heads, check_segments
from parallax.context.kernels import TILED, Kernel, Marks


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
    """Returns softmax(q k^T / sqrt(K)) v on one device, in memory linear in the number of tokens. K
    is the head width.

    The operands of matrix products have `q`'s type. The results of these products and the softmax
    are float32 or wider. There is no forward-mode derivative.

    Args:
        q: queries.
        k: keys. If `q` has H heads and `k` has G, each head of `k` is shared by H / G successive
            heads of `q`.
        v: the values of the keys.
        causal: whether query t sees only keys 0 to t; with `positions`, whether a query sees only
            keys whose position is not after the query's.
        segments: the number of each token's document; or a pair of such arrays, one for the queries
            and one for the keys.
        positions: a pair: the positions of the queries [T] and of the keys [S]. The pair is needed
            if the queries and the keys are not the same tokens. Without `causal`, the positions do
            not change the result.
        kernel: the kernel that computes the output and the gradients, for example `tiled(1024)`.

    Raises:
        ValueError: the shapes, dtypes or varying axes of `q`, `k` and `v` do not fit each other;
            the segments or the positions are not one integer for each token; or there are no
            queries or no keys.
    """
    check_heads("context.blockwise", q, k, v)
    if not (q.shape[1] and k.shape[1]):
        raise ValueError(
            f"context.blockwise needs 1 query and 1 key or more; got {q.shape[1]} and "
            f"{k.shape[1]}. Pass sequences of 1 token or more."
        )
    if positions is None and q.shape[1] != k.shape[1]:
        raise ValueError(
            f"context.blockwise needs as many keys as queries; got {k.shape[1]} and {q.shape[1]}. "
            "Pass positions=(positions of the queries, positions of the keys)."
        )
    for name, places, x in zip(("queries", "keys"), positions or (), (q, k), strict=False):
        if jnp.shape(places) != x.shape[1:2] or not jnp.issubdtype(places.dtype, jnp.integer):
            raise ValueError(
                f"context.blockwise needs positions of the {name} that are whole numbers of the "
                f"shape {list(x.shape[1:2])}; got {places.dtype}{list(places.shape)}."
            )
    # `marks` is a pair of segments, or None. A single array `segments` is used for both the queries
    # and the keys.
    marks = segments if segments is None or isinstance(segments, tuple) else (segments, segments)
    for mark, x in zip(marks or (), (q, k), strict=False):
        check_segments("context.blockwise", mark, x.shape[:2])
    arrays = (q, k, v, marks, positions if causal else None)
    # The gradients vary along the axes of all arguments, so each argument must vary along them too.
    union = sum(map(varying_axes, jax.tree.leaves(arrays)), ())
    # Whether the kernel takes 0, 1, 2, ... as positions (its option `causal`). If there are
    # `positions`, `_positions` makes them an option of their own, and the kernel compares them.
    by_count = causal and positions is None

    def forward(q, k, v, marks, positions):
        """Returns the output, and the residuals of the backward pass."""
        options = {"causal": by_count, "segments": marks, **_positions(positions)}
        out, lse = kernel.forward(q, k, v, **options)
        out = out.astype(q.dtype)
        return out, (q, k, v, out, lse, marks, positions)

    def backward(residuals, ct):
        """Returns the gradients of q, k and v from the cotangent `ct` of the output."""
        q, k, v, out, lse, marks, positions = residuals
        options = {"causal": by_count, "segments": marks, **_positions(positions)}
        gradients = kernel.backward(q, k, v, out, lse, ct, **options)
        # The marks and the positions have no gradient.
        return *(x.astype(q.dtype) for x in gradients), None, None

    @jax.custom_vjp
    def run(*arrays):
        return forward(*arrays)[0]  # the output without the residuals

    run.defvjp(forward, backward)
    return run(*varying(arrays, union))


def _positions(positions: Marks | None) -> Mapping[str, Any]:
    """Returns the option `positions` of a kernel, or no options if there are no positions.

    A user's kernel may lack the option `positions`, so this option is passed only if needed.
    """
    return {} if positions is None else {"positions": positions}
