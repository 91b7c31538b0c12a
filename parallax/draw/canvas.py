"""Functions that all pictures use: for colours, grids and tables, and for matplotlib figures that
do not depend on `pyplot` or its global settings.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any

Path = str | os.PathLike[str]
# Okabe and Ito's colours, which colour-blind readers can tell apart, followed by a grey.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#f0e442", "#999999")
GREY = "0.88"  # a brightness; 1 is white
UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def figure(width: float, height: float) -> Any:
    """Returns a matplotlib figure of this size in inches, independent of `pyplot` and its backends.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('Pictures need matplotlib. Run: pip install -e ".[draw]".') from error
    return Figure(figsize=(width, height), layout="constrained")


def save(picture: Any, path: Path) -> None:
    """Writes a figure to `path`, a PNG, SVG or PDF file. Equal figures give equal SVG files."""
    from matplotlib import rc_context

    # A fixed salt for the ids in the file, and no date, make the file depend on the figure alone.
    # "none" writes text as text, not as outlines.
    metadata = {"Date": None} if str(path).lower().endswith(".svg") else None
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "parallax"}):
        picture.savefig(path, dpi=150, metadata=metadata)


def bare(axes: Any, *sides: str) -> None:
    """Removes the lines around a panel: the lines at `sides`, or all four if no side is given."""
    axes.spines[list(sides) or ["top", "right", "bottom", "left"]].set_visible(False)


def colour(k: int, count: int) -> Any:
    """Returns colour k of `count` colours. They are from `COLOURS` if this list is long enough, and
    otherwise from a colour map.
    """
    if count <= len(COLOURS):
        return COLOURS[k]
    from matplotlib import colormaps

    # The ends of the map are left out: they are dark.
    return colormaps["turbo"](0.05 + 0.9 * k / (count - 1))


def ink(background: Any) -> str:
    """Returns black or white, whichever is readable on `background`."""
    from matplotlib.colors import to_rgb

    red, green, blue = to_rgb(background)
    # The sum weighs the colours by how bright they look.
    return "black" if 0.30 * red + 0.59 * green + 0.11 * blue > 0.55 else "white"


def label(axes: Any, x: int | float, y: int | float, text: str, **options: Any) -> None:
    """Writes small text that is centred at a point."""
    axes.text(x, y, text, **{"ha": "center", "va": "center", "size": 8} | options)


def grid(
    axes: Any,
    cells: Mapping[tuple[int, int], tuple[Any, str]],
    rows: Sequence[str],
    columns: Sequence[str],
) -> None:
    """Draws a table of squares, and the names of its rows and columns. `cells` has a pair (colour,
    text) for each square, by its place (row, column).
    """
    for (row, column), (background, text) in cells.items():
        corners = ([column, column + 1, column + 1, column], [row, row, row + 1, row + 1])
        axes.fill(*corners, facecolor=background, edgecolor="white", linewidth=1.2)
        # `ink` gives black or white, whichever is readable.
        label(axes, column + 0.5, row + 0.5, text, color=ink(background))
    axes.set(xlim=(0, len(columns)), ylim=(len(rows), 0), aspect="equal")  # row 0 is on top
    axes.set_xticks([k + 0.5 for k in range(len(columns))], columns, size=8)
    axes.set_yticks([k + 0.5 for k in range(len(rows))], rows, size=8)
    axes.tick_params(length=0)
    bare(axes)  # removes the frame


def scale(largest: int | float) -> tuple[float, str]:
    """Returns the largest of `UNITS` that is not above `largest` bytes, as a pair (size of the unit
    in bytes, name). If `largest` is below 1, the unit is the byte.
    """
    powers = range(1, len(UNITS))
    power = max((power for power in powers if 1000.0**power <= largest), default=0)
    return 1000.0**power, UNITS[power]


def columns(rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Returns a table as lines of aligned text: the first `left` columns are flush left, and the
    other columns are flush right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(row: Sequence[str]) -> str:
        """Returns a row as one line."""
        padded = [cell.ljust(width) for cell, width in zip(row[:left], widths, strict=False)]
        padded += [cell.rjust(width) for cell, width in zip(row[left:], widths[left:], strict=True)]
        return "  ".join(padded).rstrip()

    return "\n".join(map(line, rows))
