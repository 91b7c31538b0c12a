"""Attention over split tokens: queries stay, keys and values travel from device to device.

Legend: B batch, T tokens of a device, H heads, G heads of keys and values, K head width, c chunks
of a device, n devices.

In each *hop* the keys and values move to the next device. In hop h device i has the keys of device
i - h. A *pair* is a query chunk and a key chunk with a flag: (query chunk, key chunk, flag). Each
pair is one block of scores. `orders.block_pairs` returns a table of the pairs that each device
computes, equally many for each device. The flag is 1 if the block is needed; it is 0 if the pair
only fills up the table. The program has no conditional, so all devices send the same messages, and
no device waits forever. Results are merged by their log-sum-exps (`lse`). The block of a chunk's
queries and the same chunk's keys is not in the table: `_diagonal` computes these blocks, the only
ones with a causal mask inside. `_chunk(tree, i)` returns chunk i of each array. `_both` returns
(segments of queries, segments of keys), or None if there are no segments. A `_Ring` has the axis,
the table of pairs and the kernel, and its method `send` moves a tree one hop.

| | messages | bytes a device sends |
|---|---|---|
| forward | n - 1 | n - 1 times its keys and values (and its segments, 4 bytes per token) |
| backward | 2 (n - 1) | the same again, and n - 1 times their gradients, in float32 or wider |

In the backward pass the gradients of keys and values follow the keys and values one hop later.
After the last hop these gradients are back on the device that owns the keys. That device then adds
the gradients from its own queries.

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
from parallax.context.checks import check_attention, check_kernel, check_order
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
) -> Float[Array, "batch tokens heads head_width"]:
    """Returns softmax(q k^T / sqrt(K)) v of whole sequences, for this device's queries.

    The result is [B, T, H, K], as `q`. Each device holds the tokens that `order` gives it. The
    function `positions` returns the places of these tokens; `split` and `local_tokens` select the
    tokens. The operands of matrix products have `q`'s type. The results of these products, the
    softmax, and the gradients that devices send are float32 or wider. Memory is linear in the
    number of tokens: a device holds the tiles of `kernel`, and, for the backward pass, `q`, `k`,
    `v`, the result and one number per query and head.

    Every device computes the same number of blocks of scores, in any `order`: a device that needs
    fewer blocks computes some that it does not use. With n devices and T tokens of a device,
    `zigzag` order has 2n + 1 blocks of (T/2)^2 scores on each device; the mask hides half of the
    scores in two of these blocks. Without `causal`, `order` is not used. There is no forward-mode
    derivative.

    Args:
        q: queries of this device's tokens.
        k: keys of the same tokens. If `q` has H heads and `k` has G, each head of `k` is shared by
            H / G successive heads of `q`.
        v: values of the same tokens.
        axis: the axis or axes that the tokens are split over; `()` on one device.
        causal: whether a token sees only itself and earlier tokens.
        segments: [B, T], the number of each token's document. A token sees only tokens with the
            same number.
        order: a function that says which chunks of the sequence each device holds: `zigzag`,
            `contiguous`, or your own function of the number of devices.
        kernel: the kernel that computes the blocks, for example `tiled(1024)`.

    Raises:
        ValueError: the shapes, dtypes or varying axes of `q`, `k` and `v` do not fit each other;
            the tokens do not divide into the chunks of `order`; the segments are not one integer
            for each token; the layers of `context.comms` have the tokens in another order; or the
            scores of `kernel` depend on distances between tokens. The check sees distances up to
            4,096 tokens, or a chunk's tokens if these are more: no wider window is found.
    """
    axis = Axis.of(axis)
    table = block_pairs(order, axis.size(), causal=causal)
    check_attention(q, k, v, segments, axis, table.chunks)
    if causal:  # without a mask, the order does not matter
        check_order("context.attention", q.shape[1], axis, order)
    # `check_kernel` refuses scores that depend on distances between tokens, since a kernel is not
    # told which chunks it gets. If one chunk is the whole sequence, the distances are right. The
    # scores of TILED do not depend on distances.
    if kernel is not TILED and axis.size() * table.chunks > 1:
        check_kernel(kernel.forward, q, k, table.chunks, axis.size(), causal=causal)
    arrays = (q, k, v) if segments is None else (q, k, v, segments)
    # The gradients vary along the axes of all arguments, so each argument must vary along them too.
    union = (*axes(axis.names), *sum(map(varying_axes, arrays), ()))
    ring = _Ring(axis, table, kernel, causal)

    # JAX's own derivative of the loop would keep each hop's keys; this one sends them again.
    @jax.custom_vjp
    def run(*arrays):
        return _forward(ring, *arrays)[0]  # the result without the residuals

    run.defvjp(partial(_forward, ring), partial(_backward, ring))
    return run(*varying((q, k, v, segments), union))


class _Ring(NamedTuple):
    """The axis, the table of blocks and the kernel of an attention, and whether it is causal."""

    axis: Axis
    table: BlockPairs
    kernel: Kernel
    causal: bool

    def local_pairs(self):
        """Returns the pairs of this device's own chunks, [pairs, 3]: each chunk of queries with
        each earlier chunk of keys. `_diagonal` computes each chunk with itself. A pair is (query
        chunk, key chunk, flag). The flag is 1, since all these pairs are needed."""
        return jnp.asarray(self.table.own)[self.axis.index()]

    def pairs(self, h):
        """Returns the pairs that this device computes after the keys have moved h times,
        [pairs, 3]. The first move is h = 1. A pair is (query chunk, key chunk, flag). The flag is 1
        if the pair is needed, and 0 if the pair only fills up the table."""
        return jnp.asarray(self.table.hops)[h - 1, self.axis.index()]

    def send(self, tree):
        """Returns the tree that the previous device sent: one hop round the ring."""
        n = self.axis.size()
        return self.axis.permute(tree, [(i, (i + 1) % n) for i in range(n)])

    def hops(self, first: int, last: int, hop, carry):
        """Runs the hops `first`, ..., `last - 1` in one loop, and returns the last `carry`.

        `hop` takes a hop's number and the carry, and returns the new carry. If `first` is not below
        `last`, there is no hop: `carry` is returned as it is, and the program gets no empty loop.
        """
        # Python's numbers would make the hop's number int64 if 64-bit types are enabled.
        return lax.fori_loop(np.int32(first), np.int32(last), hop, carry) if first < last else carry


def _forward(ring: _Ring, q, k, v, segments):
    """Returns the result, [B, T, H, K], and the residuals of the backward pass."""
    n = ring.axis.size()
    queries, keys = _chunks(ring, (q, segments)), _chunks(ring, (k, v, segments))

    def visit(sums, keys, pairs):
        """Merges the attention of all `pairs` into `sums`, and returns the new `sums`: (output,
        log-sum-exp) of all chunks of queries. A pair is (query chunk, key chunk, is_needed)."""

        def add_pair(sums, pair):
            """Merges the attention of one chunk of queries to one chunk of keys into `sums`, which
            is (output, log-sum-exp), and returns the new `sums`.

            `queries` and `keys` come from the enclosing functions: `queries` are (q, segments), and
            `keys` are (k, v, segments), in chunks. `_diagonal` computes each chunk with itself. In
            all other needed pairs of a causal attention, the query chunk comes after the key chunk,
            so each query may see all keys: the kernel runs with `causal=False`.
            """
            query_chunk, key_chunk, is_needed = pair
            q, q_segments = _chunk(queries, query_chunk)
            k, v, k_segments = _chunk(keys, key_chunk)
            segments = _both(q_segments, k_segments)
            out, lse = ring.kernel.forward(q, k, v, causal=False, segments=segments)
            # A pair that only fills up the table gets no weight in the merged result.
            lse = jnp.where(is_needed == 1, lse, -jnp.inf)
            out_before, lse_before = _chunk(sums, query_chunk)
            merged = merge_softmax(out_before, lse_before, out, lse)
            new_sums = [x.at[query_chunk].set(new) for x, new in zip(sums, merged, strict=True)]
            return tuple(new_sums), None

        # One pair after another, since several may have the same queries.
        return lax.scan(add_pair, sums, pairs)[0]

    def hop(h, carry):
        """Merges the attention to the keys of hop h into `sums`, and sends these keys to the next
        device. Returns the keys that arrive, for hop h + 1, and the new `sums`.

        `keys` are (k, v, segments), and `sums` are (output, log-sum-exp).
        """
        keys, sums = carry
        return ring.send(keys), visit(sums, keys, ring.pairs(h))

    # The first message is sent before the local blocks are computed, so that it takes no extra
    # time.
    arrived = ring.send(keys) if n > 1 else keys
    # The queries and the keys of the same chunk. `queries` are (q, segments), and `keys` are (k, v,
    # segments).
    sums = _diagonal(ring, ring.kernel.forward, queries[1], keys[2])(queries[0], *keys[:2])
    sums = visit(sums, keys, ring.local_pairs())
    # The last hop is not in the loop, since its keys need not be sent on.
    if n > 1:
        arrived, sums = ring.hops(1, n - 1, hop, (arrived, sums))
        sums = visit(sums, arrived, ring.pairs(n - 1))
    out = _whole(sums[0]).astype(q.dtype)
    return out, (q, k, v, segments, out, _whole(sums[1]))


def _backward(ring: _Ring, residuals, ct):
    """Returns the gradients of q, k and v, and None for the segments, from the cotangent `ct`."""
    q, k, v, segments, out, lse = residuals
    n = ring.axis.size()
    queries, keys = _chunks(ring, (q, out, lse, ct, segments)), _chunks(ring, (k, v, segments))

    def visit(dq, sums, keys, pairs):
        """Adds the terms of all `pairs` to `dq` and `sums`, and returns both. `sums` are the
        gradients of k and v. A pair is (query chunk, key chunk, is_needed)."""

        def add_pair(carry, pair):
            """Adds the terms of one chunk of queries and one chunk of keys to the gradients, and
            returns the new gradients.

            `queries` and `keys` come from the enclosing functions: `queries` are (q, out, lse, ct,
            segments), and `keys` are (k, v, segments), in chunks. `_diagonal` computes each chunk
            with itself. In all other needed pairs of a causal attention, the query chunk comes
            after the key chunk, so each query may see all keys: hence `causal=False`.
            """
            (dq, sums), (query_chunk, key_chunk, is_needed) = carry, pair
            q, out, lse, ct, q_segments = _chunk(queries, query_chunk)
            k, v, k_segments = _chunk(keys, key_chunk)
            # A pair that only fills up the table: with this log-sum-exp all its weights are 0.
            lse = jnp.where(is_needed == 1, lse, jnp.inf)
            segments = _both(q_segments, k_segments)
            dq_term, *terms = ring.kernel.backward(
                q, k, v, out, lse, ct, causal=False, segments=segments
            )
            sums = tuple(x.at[key_chunk].add(term) for x, term in zip(sums, terms, strict=True))
            return (dq.at[query_chunk].add(dq_term), sums), None

        return lax.scan(add_pair, (dq, sums), pairs)[0]

    def hop(h, carry):
        """Adds the terms of the keys of hop h to `dq` and `sums`, and sends these keys to the next
        device. Returns the keys that arrive, for hop h + 1, and the new `dq` and `sums`.

        `keys` are (k, v, segments), and `sums` are the gradients of k and v. The keys of hop h came
        from the previous device, and the `sums` of that device are the gradients of these keys so
        far. So each device first sends its `sums` to the next device.
        """
        keys, dq, sums = carry
        return ring.send(keys), *visit(dq, ring.send(sums), keys, ring.pairs(h))

    arrived = ring.send(keys) if n > 1 else keys
    diagonal = _diagonal(ring, ring.kernel.backward, queries[-1], keys[-1])
    # The arguments are q, k, v, out, lse and ct. The segments, the last of `queries` and of `keys`,
    # were given to `_diagonal`. `local_sums` are the gradients of this device's own k and v from
    # its own queries.
    dq, *local_sums = diagonal(queries[0], *keys[:-1], *queries[1:-1])
    dq, local_sums = visit(dq, tuple(local_sums), keys, ring.local_pairs())
    if n > 1:
        # The gradients follow their keys by one hop. Hop 1 has no gradients to send, and hop n - 1
        # has no keys to send, so only the hops between them are in the loop. With n = 2 there is
        # only hop 1, and `next_keys` are not used.
        next_keys = ring.send(arrived) if n > 2 else arrived
        dq, sums = visit(dq, jax.tree.map(jnp.zeros_like, local_sums), arrived, ring.pairs(1))
        next_keys, dq, sums = ring.hops(2, n - 1, hop, (next_keys, dq, sums))  # 2, ..., n - 2
        if n > 2:
            dq, sums = visit(dq, ring.send(sums), next_keys, ring.pairs(n - 1))
        # The last of n - 1 sends brings the gradients home to the device of their keys.
        local_sums = jax.tree.map(jnp.add, local_sums, ring.send(sums))
    # q, k and v have the same dtype.
    return *(_whole(x).astype(k.dtype) for x in (dq, *local_sums)), None


def _diagonal(ring: _Ring, f, q_segments, k_segments):
    """Returns a function that applies a kernel's function `f` to the queries and the keys of the
    same chunk, for each chunk.

    The returned function takes and returns arrays [chunks, batch, ...]. It passes all chunks to the
    kernel as one batch: c chunks of B sequences are c * B sequences. Only the block of a chunk's
    queries with the same chunk's keys needs a causal mask. `q_segments` and `k_segments` are
    [chunks, batch, tokens of a chunk], or None.
    """

    def as_batch(x):
        """Returns an array [chunks, batch, ...] as [chunks * batch, ...]."""
        return x.reshape(-1, *x.shape[2:])

    def on_chunks(*arrays):
        """Returns the results of the kernel's function `f`, each an array [chunks, batch, ...]. One
        call of `f` computes all chunks, as one batch."""
        segments = _both(*jax.tree.map(as_batch, (q_segments, k_segments)))
        results = f(*map(as_batch, arrays), causal=ring.causal, segments=segments)
        return tuple(x.reshape(*arrays[0].shape[:2], *x.shape[1:]) for x in results)

    return on_chunks


def _both(q_segments, k_segments):
    """Returns (segments of queries, segments of keys), or None if there are no segments."""
    return None if q_segments is None else (q_segments, k_segments)


def _chunk(tree, number):
    """Returns chunk `number` of each array, whose first dim is chunks."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, number, keepdims=False), tree)


def _chunks(ring: _Ring, tree):
    """Returns arrays [B, T, ...] with their T tokens cut into c chunks: [c, B, T / c, ...]."""

    def in_chunks(x):
        return jnp.moveaxis(x.reshape(x.shape[0], ring.table.chunks, -1, *x.shape[2:]), 1, 0)

    return jax.tree.map(in_chunks, tree)


def _whole(x):
    """Returns the array with its chunks of tokens joined again, [B, T, ...]: the inverse of
    `_chunks`."""
    return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])
