"""Attention on one device, one tile of scores at a time, with memory linear in the number of
tokens.

Legend: B batch, T tokens of queries, S tokens of keys, H heads, G heads of keys, K head width; a
tile has t tokens of queries and s tokens of keys. In einsums: b batch, t and s tokens, g key heads,
r the H / G query heads of a key head, k head width.

A kernel returns its output and the log-sum-exp of each query's scores over the keys that the query
saw. With the log-sum-exps, `merge_softmax` merges outputs over different keys, and the backward
pass recomputes the softmax's weights. The *marks* of tokens (their positions and documents) decide
which keys a query sees.

Source: Dao et al., FlashAttention (arXiv 2205.14135), sections 3.1 and B.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from parallax.collectives.types import accumulation_dtype, varying, varying_axes

Queries = Float[Array, "batch tokens heads head_width"]
Keys = Float[Array, "batch keys key_heads head_width"]
Marks = tuple[Int[Array, "..."], Int[Array, "..."]]  # of the queries, and of the keys


class Kernel(NamedTuple):
    """Two functions that compute the attention of a block of queries `q` to a block of keys `k`;
    they need not be differentiable.

    Both functions take three options. `causal=` says whether query t sees only keys 0 to t.
    `segments=` is None, or a pair: the number of each query's document, [B, T], and of each key's,
    [B, S]. Tokens of different documents do not see each other. `positions=` is None, or a pair:
    the positions of the queries, [T], and of the keys, [S]. With positions, `causal` is False, and
    a query sees only keys whose position is not after the query's position. `context.attention`
    passes no positions, so a kernel does not know the distances between tokens of different chunks,
    which a sliding window or ALiBi needs. `context.gathered` passes positions. Results are float32
    or wider.

    Attributes:
        forward: `(q, k, v, ...) -> (out, lse)`, [B, T, H, K] and [B, T, H]: softmax(q k^T /
            sqrt(K)) v, and the log-sum-exp. A query that sees no key has an `lse` of minus
            infinity, and an `out` of zeros.
        backward: `(q, k, v, out, lse, ct, ...) -> (dq, dk, dv)`: the terms that this pair of blocks
            adds to the gradients of q, k and v. `out` and `lse` are the queries' results over all
            keys, and `ct` is the cotangent of `out`. For a pair that must not count, `attention`
            passes an `lse` of plus infinity, with which all weights exp(score - lse) are 0.
    """

    forward: Callable[..., Any]
    backward: Callable[..., Any]


def tiled(block: int = 512) -> Kernel:
    """Returns a kernel in plain JAX, with tiles of `block` queries by `block` keys.

    For each head of each sequence, the kernel holds `block`^2 scores at a time.
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
    """Returns the output and log-sum-exp over the union of two sets of keys.

    `out` and `lse` are the results over the first set, `more` and `more_lse` those over the second
    set.
    """
    both = jnp.logaddexp(lse, more_lse)
    # If a query saw no key, `both` is minus infinity, and `lse - both` would be nan. So 0 is
    # subtracted instead.
    shift = jnp.where(both == -jnp.inf, jnp.zeros((), both.dtype), both)
    return out * jnp.exp(lse - shift)[..., None] + more * jnp.exp(more_lse - shift)[..., None], both


class _Tile(NamedTuple):
    """The *marks* of the tokens of a tile: arrays that decide which keys a query sees. A mark that
    is not used is None.

    Attributes:
        positions: the place of each token.
        segments: the document of each token.
        is_token: false for padding, which fills up the last tile.
    """

    positions: Any
    segments: Any
    is_token: Any


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
    """Returns the output, [B, T, H, K], and the log-sum-exps, [B, T, H].

    `segments` and `positions` are None, or pairs: one array for the queries, and one for the keys.
    A tile has at most `block` tokens.

    Each iteration of the outer loop takes a tile of queries, and each iteration of the inner loop a
    tile of keys. The inner loop keeps the running maximum and sum of FlashAttention.
    """
    B, T, H, K = q.shape
    query_tiles, key_tiles = _tiles((q,), (k, v), causal, segments, positions, block)
    dtype = accumulation_dtype(q.dtype)

    def queries(_, query_tile):
        """Returns the output and log-sum-exp of one tile of queries, over all keys."""
        (q,), q_marks = query_tile
        # `_tiles` made the heads [G, H / G], so q is [B, t, G, H / G, K].
        rows = (B, *q.shape[2:4], q.shape[1])  # B, G, H / G, t

        def keys(carry, key_tile):
            """Returns the carry with one more tile of keys added.

            The carry is (the maximum score, the sum of weights, the output) of one tile of queries,
            over all tiles of keys so far. The maximum and the sum are [B, G, H / G, t], and the
            output is [B, G, H / G, t, K].
            """
            (peak, total, out), ((k, v), k_marks) = carry, key_tile
            scores = _scores(q, k, q_marks, k_marks)
            higher = jnp.maximum(peak, jnp.max(scores, axis=-1))
            # A query that has seen no key yet has minus infinity, and infinities subtract to nan.
            shift = jnp.where(higher == -jnp.inf, jnp.zeros((), dtype), higher)
            # Earlier sums were relative to the old maximum: `shrink` makes them relative to
            # the new one.
            weights, shrink = jnp.exp(scores - shift[..., None]), jnp.exp(peak - shift)
            term = _product("bgrts,bsgk->bgrtk", weights.astype(v.dtype), v)
            out = out * shrink[..., None] + term
            return (higher, total * shrink + jnp.sum(weights, axis=-1), out), None

        peak, total = jnp.full(rows, -jnp.inf, dtype), jnp.zeros(rows, dtype)
        start = peak, total, jnp.zeros((*rows, K), dtype)
        # A scan's carry must keep its type, and its results vary along the axes of q. k, v and the
        # marks vary along no other axes, since the callers cast all arguments to the same axes.
        (peak, total, out), _ = lax.scan(keys, varying(start, varying_axes(q)), key_tiles)
        # A query that saw no key has the sum 0, and gets an output of 0.
        divisor = jnp.where(total > 0, total, jnp.ones((), dtype))
        out, lse = out / divisor[..., None], peak + jnp.log(divisor)
        # From [B, G, H / G, t, ...] to [B, t, G, H / G, ...].
        return None, (jnp.moveaxis(out, 3, 1), jnp.moveaxis(lse, 3, 1))

    _, (out, lse) = lax.scan(queries, None, query_tiles)
    # `_whole` joins the tiles of queries, and drops the padding.
    return _whole(out, T).reshape(B, T, H, K), _whole(lse, T).reshape(B, T, H)


def _backward(  # noqa: PLR0913
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
    """Returns the terms that the queries `q` and the keys `k` add to the gradients of q, k and v.

    `out` and `lse` are the forward results over all keys, and `ct` is the cotangent of `out`. The
    other arguments are those of `_forward`. The softmax's weights of a tile are computed again from
    the log-sum-exps.
    """
    T, S, dtype = q.shape[1], k.shape[1], accumulation_dtype(q.dtype)
    # A query that saw no key has no gradient: with an `lse` of +infinity, all weights are 0.
    lse = jnp.where(lse == -jnp.inf, jnp.inf, lse)
    # The softmax's derivative subtracts the mean of the weights' cotangents: the sum of out * ct.
    mean = jnp.sum(out.astype(dtype) * ct.astype(dtype), axis=-1)
    of_queries = (q, ct, lse, mean)
    query_tiles, key_tiles = _tiles(of_queries, (k, v), causal, segments, positions, block)

    def queries(sums, query_tile):
        """Returns the sums of dk and dv after one tile of queries, and the dq of that tile. Here
        q, ct, lse and mean are those of the tile."""
        (q, ct, lse, mean), q_marks = query_tile
        # From [B, t, G, H / G] to [B, G, H / G, t, 1], to broadcast over the scores.
        lse, mean = (jnp.moveaxis(x, 1, 3)[..., None] for x in (lse, mean))

        def keys(carry, numbered_tile):
            """Adds the terms of one tile of keys to the gradients, and returns the gradients: (dq
            of one tile of queries, all tiles of dk, all tiles of dv). Here k and v are those of
            tile j."""
            dq, dk_sum, dv_sum = carry
            j, ((k, v), k_marks) = numbered_tile
            # The softmax's weights, computed again from the log-sum-exps.
            weights = jnp.exp(_scores(q, k, q_marks, k_marks) - lse)
            # `errors` are the gradients of the scores. `mean` is the mean of the weights'
            # cotangents, which the derivative of a softmax subtracts.
            errors = weights * (_product("btgrk,bsgk->bgrts", ct, v) - mean)
            errors = (errors * q.shape[-1] ** -0.5).astype(q.dtype)
            # Queries that only fill up the last tile have a `ct` and a `mean` of 0, so they add 0
            # to dk and dv.
            dk = _product("bgrts,btgrk->bsgk", errors, q)
            dv = _product("bgrts,btgrk->bsgk", weights.astype(ct.dtype), ct)
            dq += _product("bgrts,bsgk->btgrk", errors, k)
            return (dq, dk_sum.at[j].add(dk), dv_sum.at[j].add(dv)), None

        # `key_tiles` are ((k, v), marks), with a first dim of tiles: j is the number of a tile.
        numbers = jnp.arange(len(key_tiles[0][0]), dtype=jnp.int32)
        dq = varying(jnp.zeros(q.shape, dtype), axes)
        # `sums` are dk and dv. The inner scan adds all tiles of keys; `_scores` masks padded keys.
        (dq, *sums), _ = lax.scan(keys, (dq, *sums), (numbers, key_tiles))
        return tuple(sums), dq

    # `axes` is used in `queries` too. A scan's carry must keep its type, and its results vary along
    # the axes of q. The callers have cast k and v to these axes. JAX's derivative of this cast sums
    # dk and dv over the added axes, so nothing is summed over devices here.
    axes = varying_axes(q)
    zeros = varying(tuple(jnp.zeros(x.shape, dtype) for x in key_tiles[0]), axes)
    (dk, dv), dq = lax.scan(queries, zeros, query_tiles)
    # `_whole` joins the tiles, and drops the padding.
    return _whole(dq, T).reshape(*q.shape), _whole(dk, S), _whole(dv, S)


def _scores(q, k, q_marks: _Tile, k_marks: _Tile):
    """Returns q k^T / sqrt(K) of two tiles, [B, G, H / G, t, s]: (batch, key heads, query heads of
    a key head, tokens of queries, tokens of keys).

    A score is minus infinity if the query does not see the key.
    """
    scores = _product("btgrk,bsgk->bgrts", q, k) * q.shape[-1] ** -0.5
    seen = []  # masks that broadcast to [B, t, s]; a query sees a key if all are true
    if k_marks.is_token is not None:
        seen.append(k_marks.is_token[None, None, :])
    if q_marks.positions is not None:
        seen.append(k_marks.positions[None, None, :] <= q_marks.positions[None, :, None])
    if q_marks.segments is not None:
        seen.append(k_marks.segments[:, None, :] == q_marks.segments[:, :, None])
    if not seen:
        return scores
    is_seen = functools.reduce(jnp.logical_and, seen)[:, None, None]
    return jnp.where(is_seen, scores, jnp.full((), -jnp.inf, scores.dtype))


def _product(terms: str, x, y):
    """Returns the einsum `terms` of two arrays of one type, summed in float32 or wider."""
    return jnp.einsum(terms, x, y, preferred_element_type=accumulation_dtype(x.dtype))


def _tiles(
    of_queries, of_keys, causal: bool, segments: Marks | None, positions: Marks | None, block: int
):
    """Returns `((queries, their marks), (keys, their marks))`, in tiles of at most `block` tokens.

    `of_queries` are arrays [B, T, H, ...], and `of_keys` [B, S, G, K]. Each tile of queries has
    t tokens, and each tile of keys has s tokens. The arrays and the marks of the tokens (their
    positions and documents) get a first dim of tiles; zeros fill up the last tile. The queries' dim
    of heads becomes two dims: key heads, and query heads of a key head. If `positions` is None and
    `causal` is true, the positions are 0, 1, 2, ... If `positions` are given, `causal` is not used.
    """
    T, S, G = of_queries[0].shape[1], of_keys[0].shape[1], of_keys[0].shape[2]
    if causal and positions is None:
        positions = jnp.arange(T, dtype=jnp.int32), jnp.arange(S, dtype=jnp.int32)
    q_positions, k_positions = (None, None) if positions is None else positions
    q_segments, k_segments = (None, None) if segments is None else segments
    # If masks depend on constants only, XLA computes them for all tiles before a scan over layers,
    # and keeps them for all heads, H T^2 numbers. The barrier makes the masks depend on the
    # queries.
    _, q_positions, q_segments = lax.optimization_barrier((of_queries[0], q_positions, q_segments))
    # Keys that fill up the last tile are masked. Queries that fill up the last tile need no mask:
    # `_whole` drops their results. `is_token` is true for each of the S keys; `_cut` pads it with
    # False.
    is_token = jnp.arange(S) < S if S % _size(S, block) else None
    grouped = [x.reshape(*x.shape[:2], G, -1, *x.shape[3:]) for x in of_queries]
    q_size, k_size = _size(T, block), _size(S, block)
    q_marks = _marks(q_size, q_positions, q_segments, None)
    k_marks = _marks(k_size, k_positions, k_segments, is_token)
    return (
        (tuple(_cut(x, q_size, 1) for x in grouped), q_marks),
        (tuple(_cut(x, k_size, 1) for x in of_keys), k_marks),
    )


def _marks(size: int, positions, segments, is_token) -> _Tile:
    """Returns the *marks*, each cut into tiles of `size`: the position of each token, the document
    of each token, and an array that is false for the padding after the last token. A mark that is
    None stays None."""
    # Each mark with the number of its dim of tokens: segments are [B, T], the others [T].
    marks = ((positions, 0), (segments, 1), (is_token, 0))
    return _Tile(*(None if mark is None else _cut(mark, size, dim) for mark, dim in marks))


def _size(length: int, block: int) -> int:
    """Returns the size of equal tiles for `length` tokens: the tiles have at most `block` tokens,
    and are as few as possible.
    """
    # The number of tiles is ceil(length / block), and their size ceil(length / that number).
    return -(-length // -(-length // block))


def _cut(x, size: int, dim: int):
    """Returns `x` in tiles of `size` along `dim`, padded with zeros: [tiles, ..., size, ...]."""
    padding = [(0, 0)] * x.ndim
    padding[dim] = (0, -x.shape[dim] % size)
    x = jnp.pad(x, padding)
    return jnp.moveaxis(x.reshape(*x.shape[:dim], -1, size, *x.shape[dim + 1 :]), dim, 0)


def _whole(x, length: int):
    """Returns tiles [tiles, B, t, ...] as [B, length, ...], without the padding at the end."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]


TILED = tiled()
