"""A collective's table round by round: the blocks that a device sends, and those it holds."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from parallax.collectives import Route
from parallax.draw import canvas


def route(table: Route | Sequence[Route], path: canvas.Path | None = None) -> str:
    """Returns a table as text: for each round the blocks that every device sends, and those it then
    holds.

    A block is named by its offset, in row-major order of the box: block 3 belongs to the device 3
    further on. The numbers after a block list the devices summed into it, by how far they lie
    behind its owner. For a gather, read the rounds backwards.

    With a `path`, also draws the devices in a circle there, once for each round, with an arrow for
    each message. Device 0's arrows are dark. Consecutive rounds with equal arrows share a circle.

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
    """Returns the moves of round r: the number of the message, and the block's offset before and
    after."""
    return [
        (k, table.device_number(offset), table.device_number(table.offset_after(offset, step)))
        for k, (step, offsets) in enumerate(table.rounds[r].items())
        for offset in offsets
    ]


def _blocks(table: Route) -> Iterator[dict[int, set[int]]]:
    """Returns the blocks that a device holds at first and after each round, each with the devices
    in it."""
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
    circles = [(table, rounds) for table in tables for rounds in _equal_rounds(table)]
    columns = min(len(circles), 4)
    rows = math.ceil(len(circles) / columns)
    side = max(2.2, 0.2 * tables[0].n)
    figure = canvas.figure(columns * side, rows * (side + 0.3))
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for panel in panels:
        panel.set(xlim=(-1.25, 1.25), ylim=(-1.25, 1.25), xticks=[], yticks=[], aspect="equal")
        canvas.bare(panel)
    for panel, (table, rounds) in zip(panels, circles, strict=False):
        _circle(panel, table, rounds)
    canvas.save(figure, path)


def _equal_rounds(table: Route) -> Iterator[list[int]]:
    """Returns consecutive rounds with messages of the same steps; rounds without a message are left
    out."""
    busy = [r for r, sends in enumerate(table.rounds) if sends]
    for _, rounds in itertools.groupby(busy, key=lambda r: set(table.rounds[r])):
        yield list(rounds)


def _circle(panel: Any, table: Route, rounds: Sequence[int]) -> None:
    """Draws the devices and the messages of the first of some rounds, which have equal messages."""
    angles = [2 * math.pi * device / table.n for device in range(table.n)]
    places = [(math.sin(angle), math.cos(angle)) for angle in angles]
    sends = table.rounds[rounds[0]]
    for k, step in enumerate(sends):
        shade = canvas.colour(k, len(sends))
        for source, target in table.pairs(step):
            # A message between opposite devices goes both ways: arcs keep the two arrows apart.
            style = {"arrowstyle": "-|>", "connectionstyle": "arc3,rad=0.2", "color": shade}
            style |= {"shrinkA": 10, "shrinkB": 10, "alpha": 0.4 if source else 1.0}
            panel.annotate("", places[target], places[source], arrowprops=style)
    for device, (x, y) in enumerate(places):
        panel.plot([x], [y], "o", markersize=16, color=canvas.COLOURS[5])
        canvas.label(panel, x, y, str(device))
    panel.set_title(_title(table, rounds), size=9)


def _title(table: Route, rounds: Sequence[int]) -> str:
    first, last = rounds[0], rounds[-1]
    blocks = {sum(map(len, table.rounds[r].values())) for r in rounds}
    count = "-".join(str(bound) for bound in sorted({min(blocks), max(blocks)}))
    which = f"round {first}" if first == last else f"rounds {first} to {last}"
    return f"{which}: {count} block{'' if count == '1' else 's'} each"
