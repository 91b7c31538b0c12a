"""A collective's table hop by hop: which block a device sends how far, and which it holds afterwards."""

from collections.abc import Iterator, Sequence

from parallax.collectives import Route
from parallax.draw import canvas


def route(table: Route | Sequence[Route], path: canvas.Path | None = None) -> str:
    """A table as text: in each round what every device sends, and the blocks that it then holds.

    A block is named by its offset, numbered in row-major order of the box: block 3 belongs to the device 3 further on. Behind it
    stand the devices whose terms it holds, by how far they lie behind its owner. Of a gather, read the rounds backwards.

    With a `path`, also as a picture there: the offsets from left to right, the rounds from top to bottom, a dot for each block
    that a device still holds, with the number of its terms, and a line for each that it hands on.

    Args:
        table: a `Route`, or several side by side, one below the other.
        path: of a PNG, SVG or PDF file.

    Raises:
        ImportError: with a `path`, where matplotlib is not installed.
    """
    tables = [table] if isinstance(table, Route) else list(table)
    if path is not None:
        _picture(tables, path)
    return "\n\n".join("\n".join(_lines(each)) for each in tables)


def _lines(table: Route) -> Iterator[str]:
    messages = sum(map(len, table.rounds))
    box = " x ".join(map(str, table.shape))
    yield f"{table.n} devices ({box}): {len(table.rounds)} rounds, {messages} messages, {max([0, *table.hops()])} in a row"
    for r, held in enumerate(_held(table)):
        if r:
            sends = table.rounds[r - 1].items()
            told = [
                f"{', '.join(str(table.device_number(o)) for o in offsets)} go {_spelt(step)} further"
                for step, offsets in sends
            ]
            yield f"round {r - 1}: {'; '.join(told) or 'rests'}"
        yield "  holds  " + "   ".join(
            f"{o}: {' '.join(map(str, sorted(terms)))}" for o, terms in sorted(held.items())
        )


def _held(table: Route) -> Iterator[dict[int, set[int]]]:
    """The blocks that a device holds at first and after each round, by number, and whose terms they hold."""
    held = {table.device_number(o): {table.device_number(o)} for o in table.points()}
    yield held
    for sends in table.rounds:
        moved = [
            (table.device_number(o), table.device_number(table.offset_after(o, step)))
            for step, offsets in sends.items()
            for o in offsets
        ]
        gone = {o: held[o] for o, _ in moved}
        held = {o: set(terms) for o, terms in held.items() if o not in gone}
        for o, there in moved:
            held[there] |= gone[o]
        yield held


def _picture(tables: Sequence[Route], path: canvas.Path) -> None:
    n, rounds = tables[0].n, max(len(table.rounds) for table in tables)
    figure = canvas.figure(len(tables) * (0.45 * n + 1.0), 0.55 * rounds + 1.3)
    panels = figure.subplots(1, len(tables), squeeze=False)[0]
    for panel, table in zip(panels, tables, strict=True):
        for r, held in enumerate(_held(table)):
            for o, terms in held.items():
                colour = canvas.COLOURS[2] if o == 0 else canvas.COLOURS[5]
                panel.plot([o], [r], "o", markersize=13, color=colour)
                panel.text(
                    o,
                    r,
                    str(len(terms)),
                    ha="center",
                    va="center",
                    size=8,
                    color=canvas.ink(colour),
                )
        for r, sends in enumerate(table.rounds):
            for k, (step, offsets) in enumerate(sends.items()):
                for o in offsets:
                    ends = [
                        table.device_number(o),
                        table.device_number(table.offset_after(o, step)),
                    ]
                    panel.plot(
                        ends,
                        [r, r + 1],
                        "-",
                        linewidth=1.4,
                        color=canvas.colour(k, len(sends)),
                        zorder=0,
                    )
        panel.set(
            xlim=(-0.6, n - 0.4),
            ylim=(rounds + 0.5, -0.5),
            xticks=range(n),
            yticks=[r + 0.5 for r in range(rounds)],
        )
        panel.set_yticklabels([f"round {r}" for r in range(rounds)])
        panel.set_xlabel("block, by how far its device is; 0: home")
        panel.tick_params(length=0)
        canvas.bare(panel)
    canvas.save(figure, path)


def _spelt(step: Sequence[int]) -> str:
    return str(step[0]) if len(step) == 1 else str(tuple(step))
