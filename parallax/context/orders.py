"""Tables of the tokens that each device holds, and of the blocks of scores that each computes.

An order assigns a sequence's equal chunks to devices. Causal attention needs the pairs of a query
chunk and a key chunk in which the query chunk is not before the key chunk. In each *hop*, the keys
move to the next device. `block_pairs` lists the pairs that each device computes in each hop,
equally many for all devices. The attention computes the pairs of this table, and the functions that
count the attention's operations read the same table.

A *pair* is a query chunk and a key chunk with a flag, as (query chunk, key chunk, flag). The flag
is 1 if the scores of the two chunks are needed. It is 0 if the pair is only padding, so that all
devices have equally many pairs in a hop. A pair names a chunk by its index, 0 to c - 1, among the c
chunks of the device that the chunk belongs to.

Legend: n devices, c chunks of a device, T tokens of a sequence.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Int, Shaped

from parallax.collectives import Axis, AxisLike

ChunkOrder = Callable[[int], Sequence[Sequence[int]]]


def zigzag(n: int) -> list[list[int]]:
    """Returns the chunks of each of n devices. The sequence has 2n chunks, and device i has chunks
    i and 2n - 1 - i.

    All devices have equal work: an early chunk sees few keys, and a late chunk sees many.

    Source: the zigzag order of Zhu, ring-flash-attention (2024).
    """
    return [[i, 2 * n - 1 - i] for i in range(n)]


def contiguous(n: int) -> list[list[int]]:
    """Returns the chunks of each of n devices. The sequence has n chunks, and device i has chunk i.

    In causal attention, every device then computes as many scores as the last device, which needs
    the most. About half of all computed scores are not used.
    """
    return [[i] for i in range(n)]


def chunk_table(order: ChunkOrder, n: int) -> np.ndarray:
    """Returns the table of `order` for n devices, [devices, chunks]: the indices of each device's
    chunks.

    Raises:
        ValueError: a chunk is missing or held twice, or the devices hold different numbers of
            chunks.
    """
    table = [list(map(int, chunks)) for chunks in order(n)]
    counts = {len(chunks) for chunks in table}
    numbers = sorted(itertools.chain(*table))
    if len(table) != n or len(counts) != 1 or numbers != list(range(len(numbers))):
        raise ValueError(
            f"An order must have each chunk once, and the same number of chunks on each of {n} "
            f"devices; got {table}. Use context.zigzag, or correct the order."
        )
    return np.array(table, dtype=np.int32)


class BlockPairs(NamedTuple):
    """The blocks of scores that each device computes: one for each pair of a query chunk and a key
    chunk.

    Attributes:
        chunks: the number of chunks of a device.
        own: [devices, pairs, 3], the pairs of each device's own queries and keys. A pair is
            (query chunk, key chunk, flag). The flag is 1, since all these pairs are needed. Pairs
            of a chunk's queries and the same chunk's keys are not in this array, since only these
            pairs need the causal mask. Each device computes them too.
        hops: [hops, devices, pairs, 3], the pairs that each device computes after each hop. In a
            hop the keys move to the next device. A pair with the flag 0 is computed but not used.
    """

    chunks: int
    own: np.ndarray
    hops: np.ndarray

    @property
    def blocks(self) -> int:
        """The number of blocks that each device computes. A block has the scores of one chunk of
        queries with one chunk of keys.

        For each chunk of the device there is one block of the chunk's queries and the chunk's own
        keys. For each of the device's pairs in `own` and `hops` there is one block.
        """
        # `own` is [n, pairs, 3], and `hops` is [n - 1, n, pairs, 3].
        return self.chunks + self.own.shape[1] + self.hops.shape[0] * self.hops.shape[2]


def block_pairs(order: ChunkOrder, n: int, *, causal: bool = True) -> BlockPairs:
    """Returns, for each of n devices, the pairs of a query chunk and a different key chunk whose
    scores the device computes; see `BlockPairs`.

    After the keys have moved h times to the next device (hop h), device i has the keys of device
    i - h. Without `causal` every query sees every key.

    With n devices and T tokens in a sequence, a device computes 2n + 1 blocks of (T/2n)^2 scores in
    `zigzag` order. The mask hides half of the scores in two of these blocks, so the scores that are
    needed would fill 2n blocks. In `contiguous` order a device computes n blocks of (T/n)^2
    scores, about twice as many as needed. Raises `ValueError` for an `order` that `chunk_table`
    refuses.
    """
    # Without a mask every query sees every key, so a device needs only one chunk.
    chunks = chunk_table(order, n) if causal else np.arange(n, dtype=np.int32)[:, None]
    c = chunks.shape[1]

    def visible_pairs(i, j):
        """Returns the list of all (a, b, 1) for which query chunk a of device i sees all of key
        chunk b of device j. The 1 says that the pair is needed."""
        pairs = itertools.product(range(c), range(c))
        return [(a, b, 1) for a, b in pairs if not causal or chunks[i, a] > chunks[j, b]]

    # A device's own queries and keys. Without a mask it has one chunk, so no other pair than the
    # chunk with itself.
    local = [visible_pairs(i, i) if causal else [] for i in range(n)]
    hops = [[visible_pairs(i, (i - h) % n) for i in range(n)] for h in range(1, n)]
    # Pairs with a 0 at the end are not needed. They fill up the lists, so that all devices compute
    # the same number of pairs in a hop and no conditional is needed.
    most = max((len(pairs) for hop in hops for pairs in hop), default=0)
    padded = [[pairs + [(0, 0, 0)] * (most - len(pairs)) for pairs in hop] for hop in hops]
    # A causal device has c (c - 1) / 2 pairs of its own: of each two chunks, the later one sees the
    # earlier one.
    return BlockPairs(
        c,
        np.array(local, dtype=np.int32).reshape(n, c * (c - 1) // 2, 3),
        np.array(padded, dtype=np.int32).reshape(n - 1, n, most, 3),
    )


def split(
    x: Shaped[ArrayLike, "..."], devices: int, *, order: ChunkOrder = zigzag, dim: int = 1
) -> Shaped[Array, "..."]:
    """Returns whole sequences, `x`, with their tokens put in the order of the devices: first the
    tokens of device 0, then those of device 1, and so on. `order` gives each device its tokens.

    `devices` is the number of devices, and the tokens are dim `dim` of `x`. The spec
    `P(None, "context")` then gives each device its tokens, if they are dim 1. The inputs and the
    targets must be split alike: `split(windows[:, :-1], n)` and `split(windows[:, 1:], n)`.

    Raises:
        ValueError: the tokens do not divide into the chunks of `order`.
    """
    x, table = jnp.asarray(x), chunk_table(order, devices)
    return jnp.take(x, places(x.shape[dim], table).reshape(-1), axis=dim)


def unsplit(
    x: Shaped[ArrayLike, "..."], devices: int, *, order: ChunkOrder = zigzag, dim: int = 1
) -> Shaped[Array, "..."]:
    """Returns whole sequences with their tokens in the order of the sequence again: the inverse of
    `split`, with the same arguments."""
    x, table = jnp.asarray(x), chunk_table(order, devices)
    return jnp.take(x, np.argsort(places(x.shape[dim], table).reshape(-1)), axis=dim)


def positions(tokens: int, axis: AxisLike, *, order: ChunkOrder = zigzag) -> Int[Array, " tokens"]:
    """Returns, for each token of this device, its place in the sequence: [tokens], int32.

    `tokens` is the number of tokens of a device. Raises `ValueError` if the tokens of all devices
    do not divide into the chunks of `order`.
    """
    axis = Axis.of(axis)
    n = axis.size()
    # `places` returns a row for each device.
    return jnp.asarray(places(tokens * n, chunk_table(order, n)))[axis.index()]


def local_tokens(
    x: Shaped[Array, "..."], axis: AxisLike, *, order: ChunkOrder = zigzag, dim: int = 1
) -> Shaped[Array, "..."]:
    """Returns this device's tokens of `x`, which has whole sequences. Nothing is sent.

    Raises:
        ValueError: the tokens, dim `dim` of `x`, do not divide into the chunks of `order`.
    """
    axis = Axis.of(axis)
    table = chunk_table(order, axis.size())
    size = _chunk(x.shape[dim], table)
    chunks = jnp.asarray(table)[axis.index()]
    parts = [
        lax.dynamic_slice_in_dim(x, chunks[c] * size, size, dim) for c in range(table.shape[1])
    ]
    return jnp.concatenate(parts, axis=dim)


def places(tokens: int, table: np.ndarray) -> np.ndarray:
    """Returns, for each device, the places of its tokens in the sequence: [n, tokens of a device].

    `table` is the result of `chunk_table`, and `tokens` the number of tokens of a whole sequence.
    """
    size = _chunk(tokens, table)
    return (table[:, :, None] * size + np.arange(size, dtype=np.int32)).reshape(len(table), -1)


def _chunk(tokens: int, table: np.ndarray) -> int:
    """Returns the number of tokens of a chunk: `tokens` divided by the number of devices and by the
    number of chunks on each. Raises `ValueError` if the result is no whole number."""
    n, c = table.shape
    if tokens % (n * c):
        next_multiple = -(-tokens // (n * c)) * n * c
        raise ValueError(
            f"context: the number of tokens, {tokens}, must be a multiple of {n * c}: {c} chunks "
            f"for each of {n} devices. Use sequences of {next_multiple} tokens, or an order with "
            "another number of chunks."
        )
    return tokens // (n * c)
