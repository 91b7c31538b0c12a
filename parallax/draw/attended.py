"""Draws causal attention over split tokens: the hop in which each block of scores is computed, and
the device that computes the block. A *block* has the scores of one chunk of queries and one chunk
of keys. In *hop* h, the keys have moved h times to the next device of the ring.
"""

import numpy as np

from parallax.context import ChunkOrder, block_pairs, chunk_table
from parallax.draw import canvas


def attention(order: ChunkOrder, n: int, path: canvas.Path | None = None) -> str:
    """Returns a table of the hops in which `context.attention` computes the blocks of scores.

    A row is a chunk of queries, with the device that holds the chunk; a column is a chunk of keys.
    Before the keys move (hop 0), each device uses its own keys. After the keys have moved h times
    to the next device (hop h), device i uses the keys of device i - h. A dot is a block that the
    causal mask hides. With a `path`, the function also writes a picture of this table. Each
    block has a colour, which shows the hop, and the number of the device that computes the block.

    Args:
        order: a function from the number of devices to the chunks of each device, such as
            `context.zigzag`.
        n: the number of devices.
        path: the PNG, SVG or PDF file to write.

    Raises:
        ImportError: with a `path`, if matplotlib is not installed.
    """
    # chunks is [device, chunk of the device]. The pairs of hop 0 are table.own, [device, pair, 3];
    # the pairs of later hops are table.hops, [hop - 1, device, pair, 3]. A pair is (query chunk,
    # key chunk, 1 if it is needed). Both chunks are numbered within the device that holds them. In
    # a hop all devices compute equally many pairs, so some pairs are padding, with a 0.
    chunks, table = chunk_table(order, n), block_pairs(order, n)
    hops = np.full((chunks.size, chunks.size), -1)  # -1: the mask hides the whole block
    for device, local_chunks in enumerate(chunks):
        # The diagonal blocks, of a chunk with itself, are in no table.
        hops[local_chunks, local_chunks] = 0
        for hop, pairs in enumerate([table.own[device], *table.hops[:, device]]):
            for query, key, is_needed in pairs:
                if is_needed:
                    hops[local_chunks[query], chunks[(device - hop) % n, key]] = hop
    # The device of each chunk: argsort inverts the table, which is a permutation of the chunks.
    owner = np.repeat(np.arange(n), chunks.shape[1])[np.argsort(chunks, axis=None)]
    if path is not None:
        _picture(hops, owner, n, path)
    rows = [["keys", *map(str, range(chunks.size))]]
    for query, row in enumerate(hops):
        cells = ["." if hop < 0 else str(hop) for hop in row]
        rows.append([f"queries {query} on device {owner[query]}", *cells])
    # For each device, the number of blocks that are used: its diagonal blocks, and its pairs that
    # are not padding. The third number of a pair is 1 if the pair is needed, so sums count these.
    used = [
        np.sum(owner == i) + np.sum(table.own[i, :, 2]) + np.sum(table.hops[:, i, :, 2])
        for i in range(n)
    ]
    # `table.blocks` also counts the diagonal blocks and the padding.
    title = (
        f"{n} devices, {chunks.size} chunks: each device computes {table.blocks} blocks; "
        f"used are {', '.join(map(str, used))}"
    )
    return f"{title}\n{canvas.columns(rows)}"


def _picture(hops: np.ndarray, owner: np.ndarray, n: int, path: canvas.Path) -> None:
    """Draws the table of blocks as a picture. `hops`, [query chunks, key chunks], has the hop of
    each block, or -1 if the mask hides the block. `owner` has the device of each chunk.
    """
    size = len(hops)
    figure = canvas.figure(0.42 * size + 1.6, 0.42 * size + 0.9)
    panel = figure.subplots()
    cells = {}
    for (query, key), hop in np.ndenumerate(hops):
        is_used = hop >= 0
        shade = canvas.colour(int(hop), n) if is_used else canvas.GREY
        cells[query, key] = shade, str(owner[query]) if is_used else ""
    numbers = [str(chunk) for chunk in range(size)]
    canvas.grid(panel, cells, numbers, numbers)
    panel.set(xlabel="chunk of keys", ylabel="chunk of queries")
    for hop in range(n):
        name = "own keys" if hop == 0 else f"hop {hop}"
        # An empty plot, for its entry in the legend.
        panel.plot([], [], "s", color=canvas.colour(hop, n), label=name)
    figure.legend(loc="outside right upper", frameon=False)
    canvas.save(figure, path)
