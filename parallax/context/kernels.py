"""Attention on one device, a tile of scores at a time: [T, T] scores never exist, and memory is
linear in T.

Legend: B batch, T tokens of queries, S of keys, H heads, G heads of keys, K head width. Beside its
output a kernel gives the logarithm of the sum of each query's exponentials, over the keys that it
saw. By those, outputs over different keys are merged (`merged`), and the backward pass makes the
weights again.

Source: Dao et al., FlashAttention (arXiv 2205.14135), sections 3.1 and B.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from parallax.collectives.types import accumulation_dtype, varying, varying_axes

Queries = Float[Array, "batch tokens heads head_width"]
Keys = Float[Array, "batch keys key_heads head_width"]
Marks = tuple[Int[Array, "..."], Int[Array, "..."]]  # of the queries, and of the keys


class Kernel(NamedTuple):
    """Who computes a block of attention: two functions, which need not be differentiable.

    Both take `causal=`, whether query t sees keys 0 to t alone; `segments=`, numbers of the
    documents [B, T] and [B, S] of which only equal ones see each other, or None; and `positions=`,
    [T] and [S], which say in `causal`'s place what is not later, or None. `attention` gives no
    positions, so what depends on them, a window or ALiBi, is no kernel: see `gathered`. Results are
    float32 or wider.

    Attributes:
        forward: `(q, k, v, ...) -> (out, lse)`, [B, T, H, K] and [B, T, H]: softmax(q k^T /
            sqrt(K)) v, and the log-sum-exp. A query that sees nothing has an `lse` of minus
            infinity, and an `out` of zeros.
        backward: `(q, k, v, out, lse, ct, ...) -> (dq, dk, dv)`: the terms of these keys, where
            `out` and `lse` are over all. A query with an `lse` of infinity has no weight on any.
    """

    forward: Callable[..., Any]
    backward: Callable[..., Any]


def tiled(block: int = 512) -> Kernel:
    """A kernel of `block` queries by `block` keys at a time, of plain JAX: it holds B H `block`^2
    scores.
    """
    if block < 1:
        raise ValueError(f"context.tiled needs a block of 1 token or more; got {block}.")
    return Kernel(
        functools.partial(_forward, block=block), functools.partial(_backward, block=block)
    )


def merge_softmax(
    out: Float[Array, "*rows head_width"],
    lse: Float[Array, "*rows"],
    more: Float[Array, "*rows head_width"],
    more_lse: Float[Array, "*rows"],
) -> tuple[Float[Array, "*rows head_width"], Float[Array, "*rows"]]:
    """Output and log-sum-exp over both of two sets of keys, from those over each."""
    both = jnp.logaddexp(lse, more_lse)
    shift = jnp.where(both == -jnp.inf, jnp.zeros((), both.dtype), both)
    return out * jnp.exp(lse - shift)[..., None] + more * jnp.exp(more_lse - shift)[..., None], both


class _Tile(NamedTuple):
    """What decides who sees whom, of the tokens of a tile: each None where it decides nothing."""

    positions: Any
    segments: Any
    there: Any


def _forward(
    q: Queries,
    k: Keys,
    v: Keys,
    *,
    causal: bool,
    segments: Marks | None,
    positions: Marks | None = None,
    block: int,
):
    B, T, H, K = q.shape
    parts, others = _tiles((q,), (k, v), causal, segments, positions, block)
    dtype, alike = accumulation_dtype(q.dtype), lambda x: varying(x, varying_axes(q))

    def queries(_, part):
        (q,), mine = part
        rows = (B, *q.shape[2:4], q.shape[1])  # B, G, H / G, t

        def keys(carry, part):
            (peak, total, out), ((k, v), theirs) = carry, part
            scores = _scores(q, k, mine, theirs)
            higher = jnp.maximum(peak, jnp.max(scores, axis=-1))
            shift = jnp.where(higher == -jnp.inf, jnp.zeros((), dtype), higher)
            weights, shrink = jnp.exp(scores - shift[..., None]), jnp.exp(peak - shift)
            out = out * shrink[..., None] + _product(
                "bgrts,bsgk->bgrtk", weights.astype(v.dtype), v
            )
            return (higher, total * shrink + jnp.sum(weights, axis=-1), out), None

        start = (
            jnp.full(rows, -jnp.inf, dtype),
            jnp.zeros(rows, dtype),
            jnp.zeros((*rows, K), dtype),
        )
        (peak, total, out), _ = lax.scan(keys, alike(start), others)
        there = jnp.where(total > 0, total, jnp.ones((), dtype))
        return None, (
            jnp.moveaxis(out / there[..., None], 3, 1),
            jnp.moveaxis(peak + jnp.log(there), 3, 1),
        )

    _, (out, lse) = lax.scan(queries, None, parts)
    return _whole(out, T).reshape(B, T, H, K), _whole(lse, T).reshape(B, T, H)


def _backward(
    q: Queries,
    k: Keys,
    v: Keys,
    out: Float[Array, "batch tokens heads head_width"],
    lse: Float[Array, "batch tokens heads"],
    ct: Float[Array, "batch tokens heads head_width"],
    *,
    causal: bool,
    segments: Marks | None,
    positions: Marks | None = None,
    block: int,
):
    T, S, dtype = q.shape[1], k.shape[1], accumulation_dtype(q.dtype)
    alike = lambda x: varying(x, varying_axes(q))
    lse = jnp.where(lse == -jnp.inf, jnp.inf, lse)  # who saw nothing gives no gradient
    mean = jnp.sum(out.astype(dtype) * ct.astype(dtype), axis=-1)
    parts, others = _tiles((q, ct, lse, mean), (k, v), causal, segments, positions, block)

    def queries(sums, part):
        (q, ct, lse, mean), mine = part
        lse, mean = (jnp.moveaxis(x, 1, 3)[..., None] for x in (lse, mean))

        def keys(carry, part):
            (dq, *sums), (j, ((k, v), theirs)) = carry, part
            weights = jnp.exp(_scores(q, k, mine, theirs) - lse)
            errors = weights * (_product("btgrk,bsgk->bgrts", ct, v) - mean)
            errors, weights = (
                (errors * q.shape[-1] ** -0.5).astype(q.dtype),
                weights.astype(ct.dtype),
            )
            terms = (
                _product("bgrts,btgrk->bsgk", errors, q),
                _product("bgrts,btgrk->bsgk", weights, ct),
            )
            dq += _product("bgrts,bsgk->btgrk", errors, k)
            return (dq, *(x.at[j].add(term) for x, term in zip(sums, terms, strict=True))), None

        tiles = jnp.arange(len(others[0][0]), dtype=jnp.int32)
        (dq, *sums), _ = lax.scan(keys, (alike(jnp.zeros(q.shape, dtype)), *sums), (tiles, others))
        return tuple(sums), dq

    zeros = alike(tuple(jnp.zeros(x.shape, dtype) for x in others[0]))
    (dk, dv), dq = lax.scan(queries, zeros, parts)
    return _whole(dq, T).reshape(*q.shape), _whole(dk, S), _whole(dv, S)


def _scores(q, k, mine: _Tile, theirs: _Tile):
    """q k^T / sqrt(K) of two tiles, [B, G, H / G, t, s], and minus infinity where a query does not
    see a key.
    """
    scores = _product("btgrk,bsgk->bgrts", q, k) * q.shape[-1] ** -0.5
    seen = []
    if theirs.there is not None:
        seen.append(theirs.there[None, None, :])
    if mine.positions is not None:
        seen.append(theirs.positions[None, None, :] <= mine.positions[None, :, None])
    if mine.segments is not None:
        seen.append(theirs.segments[:, None, :] == mine.segments[:, :, None])
    if not seen:
        return scores
    return jnp.where(
        functools.reduce(jnp.logical_and, seen)[:, None, None],
        scores,
        jnp.full((), -jnp.inf, scores.dtype),
    )


def _product(terms: str, x, y):
    """The product of two arrays of one type, its sums float32 or wider."""
    return jnp.einsum(terms, x, y, preferred_element_type=accumulation_dtype(x.dtype))


def _tiles(
    of_queries, of_keys, causal: bool, segments: Marks | None, positions: Marks | None, block: int
):
    """Both sides in tiles of equal size, at most `block`: arrays and marks with a first dim of
    tiles. Zeros fill the last one.

    Of the queries, the dim of heads becomes [G, H / G].
    """
    T, S, G = of_queries[0].shape[1], of_keys[0].shape[1], of_keys[0].shape[2]
    if causal and positions is None:
        positions = jnp.arange(T, dtype=jnp.int32), jnp.arange(S, dtype=jnp.int32)
    mine, theirs = (positions[0], positions[1]) if positions is not None else (None, None)
    ours, others = segments if segments is not None else (None, None)
    # Masks of constants alone, where layers are a scan, JAX would compute before it, for all tiles,
    # and keep: H T^2 of them.
    _, mine, ours = lax.optimization_barrier((of_queries[0], mine, ours))
    there = jnp.arange(S) < S if S % _size(S, block) else None
    grouped = [x.reshape(*x.shape[:2], G, -1, *x.shape[3:]) for x in of_queries]
    cut = lambda length, tree, dim: jax.tree.map(lambda x: _cut(x, _size(length, block), dim), tree)
    marks = lambda length, position, segment, there: _Tile(
        cut(length, position, 0), cut(length, segment, 1), cut(length, there, 0)
    )
    return (
        (tuple(cut(T, grouped, 1)), marks(T, mine, ours, None)),
        (cut(S, of_keys, 1), marks(S, theirs, others, there)),
    )


def _size(length: int, block: int) -> int:
    """The size of a tile when the length is cut into the fewest equal tiles of at most `block`."""
    return -(-length // -(-length // block))


def _cut(x, size: int, dim: int):
    """`x` in tiles of `size` along `dim`: a first dim of tiles."""
    padding = [(0, -x.shape[dim] % size if each == dim else 0) for each in range(x.ndim)]
    x = jnp.pad(x, padding)
    return jnp.moveaxis(x.reshape(*x.shape[:dim], -1, size, *x.shape[dim + 1 :]), dim, 0)


def _whole(x, length: int):
    """The first `length` tokens of tiles [tiles, B, t, ...] as [B, T, ...]."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]


TILED = tiled()
