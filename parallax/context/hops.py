"""Attention over tokens that are split over an axis: queries stay, keys and values go round from
device to device.

Legend: B batch, T tokens of a device, H heads, G heads of keys and values, K head width, c chunks
of a device, n devices.

In hop h device i has the keys of device i - h, and computes as many blocks of scores as any other
device: `orders.block_pairs` says which. There is no conditional, so messages inside and around the
attention are safe. What a hop adds is merged by the log-sum-exp.

| | messages | bytes a device sends |
|---|---|---|
| forward | n - 1 | n - 1 times its keys and values (and its segments, 4 bytes a token) |
| backward | 2 (n - 1) | as much again, and n - 1 times their gradients, in float32 or wider |

In the backward pass the gradients of keys and values follow them, one hop later, and arrive at home
after n - 1 hops: what a device found for its own keys waits there and is added.

Source: Liu et al., Ring attention (arXiv 2310.01889), and the zigzag order of Zhu,
ring-flash-attention (2024).
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Shaped

from parallax.collectives import Axis, AxisLike
from parallax.collectives.types import axes, varying, varying_axes
from parallax.context.checks import check_attention, check_kernel
from parallax.context.kernels import TILED, Kernel, merge_softmax
from parallax.context.orders import BlockPairs, ChunkOrder, block_pairs, zigzag


def attention(
    q: Float[Array, "batch tokens heads head_width"],
    k: Float[Array, "batch keys key_heads head_width"],
    v: Float[Array, "batch keys key_heads head_width"],
    axis: AxisLike,
    *,
    causal: bool = True,
    segments: Shaped[Array, "..."] | None = None,
    order: ChunkOrder = zigzag,
    kernel: Kernel = TILED,
    heads: tuple[int, int] | None = None,
) -> Float[Array, "batch tokens heads head_width"]:
    """softmax(q k^T / sqrt(K)) v of whole sequences, for this device's queries: `q[B, T_X, H, K] ->
    [B, T_X, H, K]`.

    Each device holds the tokens that `order` gives it. `positions` says which they are; `split`
    and `local_tokens` select them. Products take and give `q`'s type, their sums, the softmax and
    the gradients that travel are float32 or wider. Memory is linear in T: a tile of scores, and
    what `kernel` holds; for the backward pass `q`, `k`, `v`, the result and a number a query and
    head.

    Every device computes the same: in `zigzag` order 2n + 1 blocks of (T/2)^2, of which 2n are
    needed. Without `causal` the order does not matter. There is no forward-mode derivative.

    Args:
        q: queries of this device's tokens.
        k: their keys; with fewer heads, each is of H / G successive heads of `q`.
        v: their values.
        axis: the axis or axes that the tokens are split over; `()` on one device.
        causal: whether a token sees none after it.
        segments: [B, T], the document of each token, by a whole number. Only tokens of equal
            numbers see each other, wherever they are.
        order: where the tokens live: `zigzag`, `contiguous`, or a table of your own.
        kernel: who computes a block, such as `tiled(1024)`.
        heads: those of the whole model, of queries and of keys, to check that a device of a tensor
            axis has picked the keys of its queries.

    Raises:
        ValueError: heads, tokens or segments that do not fit, or arrays of different types.
    """
    axis = Axis.of(axis)
    table = block_pairs(order, axis.size(), causal=causal)
    check_attention(q, k, v, segments, axis, table.chunks, heads)
    if kernel is not TILED and axis.size() * table.chunks > 1:
        check_kernel(kernel.forward, q, table.chunks, axis.size(), causal=causal)
    found = (q, k, v) if segments is None else (q, k, v, segments)
    union = (*axes(axis.names), *sum(map(varying_axes, found), ()))
    ring = _Ring(axis, table, kernel, causal)
    run = jax.custom_vjp(lambda *arrays: _forward(ring, *arrays)[0])
    run.defvjp(partial(_forward, ring), partial(_backward, ring))
    return run(*varying((q, k, v, segments), union))


class _Ring(NamedTuple):
    """What is computed where, and by whom."""

    axis: Axis
    table: BlockPairs
    kernel: Kernel
    causal: bool

    def own(self):
        """The pairs of this device's own chunks."""
        return jnp.asarray(self.table.own)[self.axis.index()]

    def pairs(self, h):
        """Those of hop h."""
        return jnp.asarray(self.table.hops)[h - 1, self.axis.index()]

    def send(self, tree):
        """The tree of the device before, which was in hop h - 1 what this one needs in hop h."""
        n = self.axis.size()
        return self.axis.permute(tree, [(i, (i + 1) % n) for i in range(n)])

    def between(self, first: int, last: int, hop, carry):
        """`carry` after the hops from `first` to before `last`, as one loop."""
        return lax.fori_loop(np.int32(first), np.int32(last), hop, carry) if first < last else carry


def _forward(ring: _Ring, q, k, v, segments):
    """The result, and what the backward pass needs."""
    n = ring.axis.size()
    queries, keys = _chunks(ring, (q, segments)), _chunks(ring, (k, v, segments))

    def visit(sums, keys, pairs):
        """The sums after these pairs, one after another: they may be of the same queries."""

        def one(sums, pair):
            at, of, there = pair
            (q, ours), (k, v, theirs) = _picked(queries, at), _picked(keys, of)
            out, lse = ring.kernel.forward(q, k, v, causal=False, segments=_both(ours, theirs))
            before, its_lse = _picked(sums, at)
            both = merge_softmax(before, its_lse, out, jnp.where(there == 1, lse, -jnp.inf))
            return tuple(x.at[at].set(new) for x, new in zip(sums, both, strict=True)), None

        return lax.scan(one, sums, pairs)[0]

    def hop(h, carry):
        keys, sums = carry
        return ring.send(keys), visit(sums, keys, ring.pairs(h))

    arrived = ring.send(keys) if n > 1 else keys
    sums = _diagonal(ring, ring.kernel.forward, queries[1], keys[2])(queries[0], *keys[:2])
    sums = visit(sums, keys, ring.own())
    if n > 1:
        arrived, sums = ring.between(1, n - 1, hop, (arrived, sums))
        sums = visit(sums, arrived, ring.pairs(n - 1))
    out = _whole(sums[0]).astype(q.dtype)
    return out, (q, k, v, segments, out, _whole(sums[1]))


def _backward(ring: _Ring, residuals, ct):
    q, k, v, segments, out, lse = residuals
    n = ring.axis.size()
    queries, keys = _chunks(ring, (q, out, lse, ct, segments)), _chunks(ring, (k, v, segments))

    def visit(dq, sums, keys, pairs):
        """Returns the gradients of the queries and keys after the terms of these pairs."""

        def one(carry, pair):
            (dq, sums), (at, of, there) = carry, pair
            (q, out, lse, ct, ours), (k, v, theirs) = _picked(queries, at), _picked(keys, of)
            lse = jnp.where(there == 1, lse, jnp.inf)
            new, *terms = ring.kernel.backward(
                q, k, v, out, lse, ct, causal=False, segments=_both(ours, theirs)
            )
            return (
                dq.at[at].add(new),
                tuple(x.at[of].add(term) for x, term in zip(sums, terms, strict=True)),
            ), None

        return lax.scan(one, (dq, sums), pairs)[0]

    def hop(h, carry):
        keys, dq, sums = carry
        return ring.send(keys), *visit(dq, ring.send(sums), keys, ring.pairs(h))

    arrived = ring.send(keys) if n > 1 else keys
    q, out, lse, ct, ours = queries
    dq, *home = _diagonal(ring, ring.kernel.backward, ours, keys[2])(q, *keys[:2], out, lse, ct)
    dq, home = visit(dq, tuple(home), keys, ring.own())
    if n > 1:
        following = ring.send(arrived) if n > 2 else arrived
        dq, sums = visit(dq, jax.tree.map(jnp.zeros_like, home), arrived, ring.pairs(1))
        following, dq, sums = ring.between(2, n - 1, hop, (following, dq, sums))
        if n > 2:
            dq, sums = visit(dq, ring.send(sums), following, ring.pairs(n - 1))
        home = jax.tree.map(jnp.add, home, ring.send(sums))
    return *(_whole(x).astype(k.dtype) for x in (dq, *home)), None


def _diagonal(ring: _Ring, f, ours, theirs):
    """A kernel's function on chunks [c, B, ...] and the keys of the same chunks, which it takes for
    a larger batch.
    """
    flat = lambda x: x.reshape(-1, *x.shape[2:])

    def on_chunks(*arrays):
        segments = _both(*jax.tree.map(flat, (ours, theirs)))
        found = f(*map(flat, arrays), causal=ring.causal, segments=segments)
        return tuple(x.reshape(*arrays[0].shape[:2], *x.shape[1:]) for x in found)

    return on_chunks


def _both(ours, theirs):
    """Segments of both sides, or None."""
    return None if ours is None else (ours, theirs)


def _picked(tree, at):
    """One chunk of each array."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, at, keepdims=False), tree)


def _chunks(ring: _Ring, tree):
    """Arrays [B, T, ...] as [c, B, T / c, ...]."""
    cut = lambda x: jnp.moveaxis(x.reshape(x.shape[0], ring.table.chunks, -1, *x.shape[2:]), 1, 0)
    return jax.tree.map(cut, tree)


def _whole(x):
    """The inverse of `_chunks`, of one array."""
    return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])
