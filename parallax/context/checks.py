"""What attention over split tokens refuses."""

from typing import Any

import jax.numpy as jnp

from parallax.collectives import Axis
from parallax.collectives.types import varying_axes


def check_attention(q: Any, k: Any, v: Any, segments: Any, axis: Axis, chunks: int, heads: tuple[int, int] | None) -> None:
    """Raise `ValueError` where heads, tokens or segments do not fit."""
    check_heads("context.attention", q, k, v, heads)
    n, tokens = axis.size(), q.shape[1]
    if k.shape[1] != tokens:
        raise ValueError(
            f"context.attention needs keys of the same tokens as the queries; got {k.shape[1]} keys and {tokens} queries on each "
            f"device of {axis.names!r}. Split both by context.split or context.own."
        )
    if tokens % chunks or not tokens:
        above = max(1, -(-tokens // chunks)) * chunks
        raise ValueError(
            f"context.attention: the {tokens} tokens of a device must divide by its {chunks} chunks: {tokens * n} tokens over "
            f"{n} devices. Take sequences of {above * n} tokens, or order=context.contiguous."
        )
    if segments is not None:
        check_segments("context.attention", segments, q.shape[:2])


def check_segments(name: str, segments: Any, shape: tuple[int, ...]) -> None:
    """Raise `ValueError` where `segments` are not a whole number for each token."""
    if segments.shape != shape or not jnp.issubdtype(segments.dtype, jnp.integer):
        raise ValueError(
            f"{name} needs segments that are whole numbers of the shape {list(shape)}, one for each of this device's tokens; got "
            f"{segments.dtype}{list(segments.shape)}. Split them as the tokens are split."
        )


def check_heads(name: str, q: Any, k: Any, v: Any, heads: tuple[int, int] | None) -> None:
    """Raise `ValueError` where heads of queries and keys do not fit one another, those of the model, or where they are split."""
    H, G = q.shape[2], k.shape[2]
    if k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or not q.dtype == k.dtype == v.dtype:
        got = ", ".join(f"{x.dtype}{list(x.shape)}" for x in (q, k, v))
        raise ValueError(f"{name} needs q[B, T, H, K], k[B, T, G, K] and v[B, T, G, K] of one type; got {got}.")
    if not G or H % G:
        raise ValueError(f"{name}: the {H} heads of q must divide by the {G} heads of k and v. Pick the keys of these queries.")
    over = sorted(set(varying_axes(q)) - set(varying_axes(k)))
    if over and G > 1:
        raise ValueError(
            f"{name}: q, of {H} heads, differs along {over}, and k, of {G}, is the same there: where heads are split over "
            f"{over}, pick the keys of these queries, and where they are not, pass k and v through lax.pcast(..., to='varying')."
        )
    if heads is None:
        return
    whole, groups = heads
    if whole % groups or whole % H:
        raise ValueError(
            f"{name} needs heads=(of queries, of keys) of the whole model, the first a multiple of the second, and of the "
            f"{H} heads of queries that a device has; got ({whole}, {groups})."
        )
    each = whole // groups
    needed = max(1, H // each)
    if needed != G or (H % each and each % H):
        fit = f"needs {needed} of the {groups} of keys" if not (H % each and each % H) else "cuts a group in two"
        raise ValueError(
            f"{name}: a device with {H} of {whole} heads of queries, an axis of {whole // H} devices, {fit}; k has {G}. Pick the "
            "keys of this device's queries."
        )
