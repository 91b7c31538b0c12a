"""A collective's table round by round: the blocks that a device sends, how far, and those it holds."""

from collections.abc import Iterator, Sequence

from parallax.collectives import Route
from parallax.draw import canvas


def route(table: Route | Sequence[Route], path: canvas.Path | None = None) -> str:
    """A table as text: for each round the blocks that every device sends, and those it then holds.

    A block is named by its offset, in row-major order of the box: block 3 belongs to the device 3
    further on. The numbers after a block list the devices summed into it, by how far they lie behind
    its owner. For a gather, read the rounds backwards.

    With a `path`, also draws the offsets from left to right and the rounds from top to bottom there:
    a dot for each block that a device holds, with the number of devices summed into it, and a line
    for each block that moves.

    Args:
        table: a route, or several that run side by side.
        path: the PNG, SVG or PDF file to write.

    Raises:
        ImportError: with a `path`, if matplotlib is not installed.
    """
    tables = [table] if isinstance(table, Route) else table
    if path is not None:
        _picture(tables, path)
    return "\n\n".join("\n".join(_lines(part)) for part in tables)


def _lines(table: Route) -> Iterator[str]:
    messages = sum(map(len, table.rounds))
    box = " x ".join(map(str, table.shape))
    yield (
        f"{table.n} devices ({box}): {len(table.rounds)} rounds, {messages} messages, "
        f"{max([0, *table.hops()])} in a row"
    )
    for r, blocks in enumerate(_blocks(table)):
        if r:
            moves = []
            for step, offsets in table.rounds[r - 1].items():
                numbers = ", ".join(str(table.device_number(offset)) for offset in offsets)
                distance = step[0] if len(step) == 1 else tuple(step)
                moves.append(f"{numbers} go {distance} further")
            yield f"round {r - 1}: {'; '.join(moves) or 'rests'}"
        terms = [f"{o}: {' '.join(map(str, sorted(blocks[o])))}" for o in sorted(blocks)]
        yield f"  holds  {'   '.join(terms)}"


def _moves(table: Route, r: int) -> list[tuple[int, int, int]]:
    """The moves of round r: the number of the message, and the block's offset before and after."""
    return [
        (k, table.device_number(offset), table.device_number(table.offset_after(offset, step)))
        for k, (step, offsets) in enumerate(table.rounds[r].items())
        for offset in offsets
    ]


def _blocks(table: Route) -> Iterator[dict[int, set[int]]]:
    """The blocks that a device holds at first and after each round, each with the devices in it."""
    numbers = [table.device_number(offset) for offset in table.points()]
    blocks = {number: {number} for number in numbers}
    yield blocks
    for r in range(len(table.rounds)):
        moves = _moves(table, r)
        sent = {before: blocks[before] for _, before, _ in moves}
        blocks = {o: set(terms) for o, terms in blocks.items() if o not in sent}
        for _, before, after in moves:
            blocks[after] |= sent[before]
        yield blocks


def _picture(tables: Sequence[Route], path: canvas.Path) -> None:
    n, rounds = tables[0].n, max(len(table.rounds) for table in tables)
    figure = canvas.figure(len(tables) * (0.45 * n + 1.0), 0.55 * rounds + 1.3)
    panels = figure.subplots(1, len(tables), squeeze=False)[0]
    for panel, table in zip(panels, tables, strict=True):
        for r, blocks in enumerate(_blocks(table)):
            for offset, terms in blocks.items():
                shade = canvas.COLOURS[2] if offset == 0 else canvas.COLOURS[5]
                panel.plot([offset], [r], "o", markersize=13, color=shade)
                canvas.label(panel, offset, r, str(len(terms)), color=canvas.ink(shade))
        for r, messages in enumerate(table.rounds):
            for k, before, after in _moves(table, r):
                shade = canvas.colour(k, len(messages))
                panel.plot([before, after], [r, r + 1], linewidth=1.4, color=shade, zorder=0)
        panel.set(xlim=(-0.6, n - 0.4), ylim=(rounds + 0.5, -0.5), xticks=range(n))
        panel.set_yticks([r + 0.5 for r in range(rounds)], [f"round {r}" for r in range(rounds)])
        panel.set_xlabel("a block's distance to its own device")
        panel.tick_params(length=0)
        canvas.bare(panel)
    canvas.save(figure, path)
