"""Draws the table of a collective, round by round: the blocks that a device sends and holds.

All devices do the same, so a block is named by its *offset*: if device d holds the block at offset
o, the block belongs to device d + o, its *owner*. In the end the owner has the sum of the block
over all devices, as after a reduce-scatter. A *term* is one device's part of the sum. `rounds[r]`
of a `Route` is a dict of the messages of round r. A key of the dict is a *step*: how far the
message goes along each dim of the grid of devices. The value of the key has the offsets of the
blocks in the message.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from parallax.collectives import Route
from parallax.draw import canvas


def route(table: Route | Sequence[Route], path: canvas.Path | None = None) -> str:
    """Returns a table as text: for each round, the blocks that each device sends, and the blocks
    that each device holds after the round.

    The first line has the numbers of devices, rounds and messages. Its last number, before the
    words "in a row", is the length of the longest chain of messages in which each message waits for
    the one before it. The *owner* of a block is the device that gets the block's sum in the end. A
    block is named by its offset: how far the block's owner is from the device that holds the block.
    An offset is a tuple with one distance for each dim of the box (the grid of the devices), and is
    shown as one row-major number: in a box of 2 x 8, (1, 3) is 11. The numbers after a block stand
    for the devices whose parts are summed in the block. The number of a device is the distance from
    this device to the owner: 0 is the owner itself, and on a ring, 2 is the device two places
    before the owner. The text shows a reduce-scatter. A gather runs the rounds from the last to the
    first, and sends each message from its receiver to its sender.

    With a `path`, the function also draws the devices in a circle for each round, with an arrow for
    each message. Device 0's arrows are dark. Consecutive rounds with equal arrows share a circle.

    Args:
        table: a route, or several routes that run side by side.
        path: the PNG, SVG or PDF file to write.

    Raises:
        ImportError: with a `path`, if matplotlib is not installed.
        ValueError: with a `path`, if no route has a message. A route of one device has none.
    """
    tables = [table] if isinstance(table, Route) else table
    if path is not None:
        _picture(tables, path)
    return "\n\n".join("\n".join(_lines(part)) for part in tables)


def _lines(table: Route) -> Iterator[str]:
    """Yields the lines of a table: first a line with the numbers of devices, rounds and messages,
    and a line with the blocks that a device holds at the start. Then two lines for each round: its
    messages, and the blocks that a device holds after the round.
    """
    messages = sum(map(len, table.rounds))
    box = " x ".join(map(str, table.shape))
    # `hops` has a number for each round: the length of the longest chain of messages up to this
    # round in which each waits for the one before.
    yield (
        f"{table.n} devices ({box}): {len(table.rounds)} rounds, {messages} messages, "
        f"{max([0, *table.hops()])} in a row"
    )
    # `blocks` has, by the number of a block's offset, the numbers of the terms that are summed in
    # it. Offsets are numbered like devices, so `device_number` gives the number of an offset.
    for r, blocks in enumerate(_blocks(table)):
        if r:  # the first blocks are those before round 0
            moves = []
            for step, offsets in table.rounds[r - 1].items():
                numbers = ", ".join(str(table.device_number(offset)) for offset in offsets)
                distance = step[0] if len(step) == 1 else tuple(step)
                moves.append(f"{numbers} go {distance} further")
            yield f"round {r - 1}: {'; '.join(moves) or 'rests'}"  # "rests": no messages
        terms = [f"{o}: {' '.join(map(str, sorted(blocks[o])))}" for o in sorted(blocks)]
        yield f"  holds  {'   '.join(terms)}"


def _moves(table: Route, r: int) -> list[tuple[int, int, int]]:
    """Returns a triple for each block that is sent in round r: (the message's index in the round,
    the block's offset before the message, the block's offset after the message).

    The owner of a block is the device that gets the block's sum in the end. An offset says how far
    the owner is from the device that holds the block. An offset is a tuple with one distance for
    each dim of the grid of devices, and is returned as one row-major number: in a grid of 2 x 8,
    (1, 3) is 11.
    """
    return [
        (k, table.device_number(offset), table.device_number(table.offset_after(offset, step)))
        for k, (step, offsets) in enumerate(table.rounds[r].items())
        for offset in offsets
    ]


def _blocks(table: Route) -> Iterator[dict[int, set[int]]]:
    """Yields the blocks that a device holds, first at the start and then after each round.

    Each result is a dict with an entry for each block that the device holds. The key is the block's
    offset: the distance from this device to the block's owner. The owner is the device that gets
    the block's sum in the end. The value is the set of the terms that are summed in the block. A
    term is one device's part of the sum, and stands in the set as the distance from its device to
    the owner: 0 is the owner's own term, and on a ring, 2 is the term of the device two places
    before the owner. A distance is a tuple with one number for each dim of the grid of devices, and
    is yielded as one row-major number: in a grid of 2 x 8, (1, 3) is 11.
    """
    numbers = [table.device_number(offset) for offset in table.points()]
    # At first, block o has only this device's term, and this device is o places before its owner.
    blocks = {number: {number} for number in numbers}
    yield blocks
    for r in range(len(table.rounds)):
        moves = _moves(table, r)
        # All devices send alike, so a device receives the terms that it sends, at other offsets.
        sent = {before: blocks[before] for _, before, _ in moves}
        # Blocks that are sent are no longer held. The sets are copied, since the caller may still
        # use those that were yielded before.
        blocks = {o: set(terms) for o, terms in blocks.items() if o not in sent}
        # `Route` refuses a block that arrives at an offset whose block is sent in this round, or
        # was sent before. So `blocks` has each offset `after`.
        for _, before, after in moves:
            blocks[after] |= sent[before]
        yield blocks


def _picture(tables: Sequence[Route], path: canvas.Path) -> None:
    """Writes a picture of the routes `tables` to `path`. Each message is an arrow between two
    devices of a circle. A route has one circle for each group of successive rounds with the same
    arrows. Raises `ValueError` if no route has a message.
    """
    circles = [(table, rounds) for table in tables for rounds in _equal_rounds(table)]
    if not circles:
        raise ValueError(
            "To draw a picture, draw.route needs a route with a message; a route of one device has "
            "none. Pass a route of two devices or more, or no path."
        )
    columns = min(len(circles), 4)
    rows = math.ceil(len(circles) / columns)
    # Routes that run side by side have the same devices, so the first route's `n` fits all circles.
    side = max(2.2, 0.2 * tables[0].n)
    figure = canvas.figure(columns * side, rows * (side + 0.3))
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for panel in panels:
        panel.set(xlim=(-1.25, 1.25), ylim=(-1.25, 1.25), xticks=[], yticks=[], aspect="equal")
        canvas.bare(panel)
    for panel, (table, rounds) in zip(panels, circles, strict=False):  # the last may stay empty
        _circle(panel, table, rounds)
    canvas.save(figure, path)


def _equal_rounds(table: Route) -> Iterator[list[int]]:
    """Yields groups of rounds, each as a list of indices of rounds. The rounds of a group follow
    each other, and have the same set of steps. A step is how far a message goes along each dim of
    the grid of devices. Rounds without messages are left out, and do not end a group.
    """
    busy = [r for r, sends in enumerate(table.rounds) if sends]
    for _, rounds in itertools.groupby(busy, key=lambda r: set(table.rounds[r])):
        yield list(rounds)


def _circle(panel: Any, table: Route, rounds: Sequence[int]) -> None:
    """Draws the devices in a circle, and an arrow for each message of the first of `rounds`. The
    other rounds have the same arrows. Each distance and direction of a message has its own colour;
    the arrows of devices other than 0 are paler.
    """
    angles = [2 * math.pi * device / table.n for device in range(table.n)]  # clockwise from the top
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
    """Returns the title of one circle of devices in the drawing. `rounds` has the indices of the
    rounds whose messages are the arrows in this circle. The title has these indices, and the fewest
    and the most blocks that a device sends in one of these rounds."""
    first, last = rounds[0], rounds[-1]
    blocks = {sum(map(len, table.rounds[r].values())) for r in rounds}
    count = "-".join(str(bound) for bound in sorted({min(blocks), max(blocks)}))
    which = f"round {first}" if first == last else f"rounds {first} to {last}"
    return f"{which}: {count} block{'' if count == '1' else 's'} each"
