"""Causal attention in which several heads of queries may share one head of keys and values.

Legend: B batch, T tokens with a query, S tokens with a key (with a cache of keys, S may be more
than T), H heads of queries, G heads of keys and values (groups), K head width.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from parallax import precision


def grouped(
    q: Float[Array, "batch tokens heads head_width"],
    k: Float[Array, "batch seen groups head_width"],
    v: Float[Array, "batch seen groups head_width"],
    *,
    first: int | Int[Array, ""] = 0,
    sharers: int | None = None,
    segments: Int[Array, "batch tokens"] | None = None,
) -> Float[Array, "batch tokens heads head_width"]:
    """Returns causal softmax(q k^T / sqrt(K)) v for heads of width K, in the type of `q`. The
    softmax is computed in float32 or wider.

    Query head h attends to the keys and values of head h // (H / G), so H / G neighbouring heads of
    queries share one head of keys and values. With G = H this is the attention of Vaswani et al.,
    with G = 1 multi-query attention. All scores (batch x heads of queries x queries x keys) are in
    memory at once.

    Args:
        q: the queries of H heads.
        k: the keys of G heads.
        v: the values of G heads.
        first: the place of the first query among the keys: query t sees the keys 0 to `first` + t.
        segments: the number of each token's document; tokens of different documents do not see each
            other. With `segments`, there must be a query for every token that has a key.
        sharers: the number of heads of queries that share a head of keys in the whole model. A
            shard is refused if it has more or fewer heads of keys than its queries attend to.
            None: this is not checked.

    Raises:
        ValueError: H is not a multiple of G; or there are segments, and they are not one integer
            for each query, or there are more or fewer keys than queries. With `sharers`, also if G
            is not max(H // sharers, 1), or if H is neither a multiple nor a divisor of `sharers`.

    Source: Ainslie et al., GQA (arXiv 2305.13245).
    """
    B, T, H, K = q.shape
    S, G = k.shape[1:3]
    if H % G:
        raise ValueError(
            "attention needs a number of heads of q that is a multiple of the number of heads of "
            f"k and v; got {H} of q and {G} of k and v. On a device that has only some of the "
            "heads, pass the heads of k and v to which the device's heads of q attend."
        )
    if sharers is not None and H % sharers and sharers % H:
        raise ValueError(
            f"attention: {sharers} heads of queries share one head of keys and values, so a device "
            f"needs a multiple or a divisor of {sharers} heads of queries; got {H}. Split the "
            "heads over another number of devices."
        )
    if sharers is not None and max(H // sharers, 1) != G:
        raise ValueError(
            f"attention: {sharers} heads of queries share one head of keys and values, so with {H} "
            "heads of queries the number of heads of keys and values must be "
            f"{max(H // sharers, 1)}; got {G}. On a device that has only some of the heads, pass "
            "the heads of keys and values to which the device's heads of queries attend."
        )
    if segments is not None and (
        segments.shape != (B, T) or S != T or not jnp.issubdtype(segments.dtype, jnp.integer)
    ):
        raise ValueError(
            f"attention needs segments that are whole numbers of the shape {[B, T]}, one for each "
            f"token, and as many keys as queries; got {segments.dtype}{list(segments.shape)}, {T} "
            f"queries and {S} keys. Pass the segments of all sequences, without a cache of keys."
        )
    # The r = H / G query heads of group g share its keys: heads are split as [G, r].
    scores = jnp.einsum("btgrk,bsgk->bgrts", (q * K**-0.5).reshape(B, T, G, H // G, K), k)
    # For the mask of the scores, [B, G, r, T, S]: the number of each query and key.
    query, key = (lax.broadcasted_iota(jnp.int32, (1, 1, 1, T, S), dim) for dim in (3, 4))
    # Only the softmax is wide: products with a wider result would get wider cotangents, and would
    # multiply these in the backward pass.
    wide = scores.astype(precision.accumulation_dtype(scores.dtype))
    sees = key <= query + first
    if segments is not None:  # they number the documents of the keys too, since S = T
        sees = sees & (segments[:, :, None] == segments[:, None, :])[:, None, None]
    weights = jax.nn.softmax(jnp.where(sees, wide, -jnp.inf), axis=-1).astype(q.dtype)
    return jnp.einsum("bgrts,bsgk->btgrk", weights, v).reshape(B, T, H, K)
