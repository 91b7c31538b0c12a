"""Causal attention over split tokens as a square of blocks: in which hop each is computed, and on which device."""

import numpy as np

from parallax.context import ChunkOrder, block_pairs, chunk_table
from parallax.draw import canvas


def attention(order: ChunkOrder, n: int, path: canvas.Path | None = None) -> str:
    """The blocks that `context.attention` computes in `order` on n devices, as text: the hop of each, by queries and keys.

    A row is a chunk of queries, with the device that holds it, a column a chunk of keys; hop 0 is the device's own keys.

    With a `path`, also as a picture there: the same square, each hop in a colour, each device's number in its blocks.

    Args:
        order: such as `context.zigzag`.
        n: the devices.
        path: of a PNG, SVG or PDF file.

    Raises:
        ImportError: with a `path`, where matplotlib is not installed.
    """
    held, table = chunk_table(order, n), block_pairs(order, n)
    hops = np.full((held.size, held.size), -1)
    for i, chunks in enumerate(held):
        hops[chunks, chunks] = 0
        for h, pairs in enumerate([table.own[i], *table.hops[:, i]]):
            for a, b, there in pairs:
                if there:
                    hops[chunks[a], held[(i - h) % n, b]] = h
    owner = np.repeat(np.arange(n), held.shape[1])[np.argsort(held, axis=None)]
    if path is not None:
        _picture(hops, owner, n, path)
    spelt = lambda hop: "." if hop < 0 else str(hop)
    rows = [[f"queries {q} on device {owner[q]}", *map(spelt, row)] for q, row in enumerate(hops)]
    blocks = [
        np.sum(owner == i) + np.sum(table.own[i, :, 2]) + np.sum(table.hops[:, i, :, 2])
        for i in range(n)
    ]
    told = f"{n} devices, {held.size} chunks: each device computes {table.blocks} blocks; used are {', '.join(map(str, blocks))}"
    return told + "\n" + canvas.columns([["keys", *map(str, range(held.size))], *rows])


def _picture(hops: np.ndarray, owner: np.ndarray, n: int, path: canvas.Path) -> None:
    size = len(hops)
    figure = canvas.figure(0.42 * size + 1.6, 0.42 * size + 0.9)
    panel = figure.subplots()
    for q, k in np.ndindex(size, size):
        colour = canvas.GREY if hops[q, k] < 0 else canvas.colour(int(hops[q, k]), n)
        panel.fill([k, k + 1, k + 1, k], [q, q, q + 1, q + 1], facecolor=colour, edgecolor="white")
        if hops[q, k] >= 0:
            panel.text(
                k + 0.5,
                q + 0.5,
                str(owner[q]),
                ha="center",
                va="center",
                size=9,
                color=canvas.ink(colour),
            )
    for h in range(n):
        panel.plot(
            [], [], "s", color=canvas.colour(h, n), label="own keys" if h == 0 else f"hop {h}"
        )
    panel.set(
        xlim=(0, size), ylim=(size, 0), xticks=np.arange(size) + 0.5, yticks=np.arange(size) + 0.5
    )
    panel.set_xticklabels([str(chunk) for chunk in range(size)])
    panel.set_yticklabels([str(chunk) for chunk in range(size)])
    panel.set(xlabel="chunk of keys", ylabel="chunk of queries", aspect="equal")
    panel.tick_params(length=0)
    canvas.bare(panel)
    figure.legend(loc="outside right upper", frameon=False)
    canvas.save(figure, path)
