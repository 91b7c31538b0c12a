"""What the pictures share: a figure that changes no global setting, colours, units, how a file is written."""

import math
import os
from collections.abc import Sequence
from typing import Any

Path = str | os.PathLike[str]
# Okabe and Ito's colours, which colour-blind readers tell apart, and paler ones after them.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#f0e442", "#999999")
GREY = "0.88"
UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def figure(width: float, height: float) -> Any:
    """A matplotlib figure of so many inches, apart from `pyplot` and its backends.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('Pictures need matplotlib. Run: pip install -e ".[draw]".') from error
    return Figure(figsize=(width, height), layout="constrained")


def save(picture: Any, path: Path) -> None:
    """Write a figure to `path`, whose suffix says PNG, SVG or PDF. SVG keeps its text, and the same figure the same bytes."""
    from matplotlib import rc_context

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "parallax"}):
        picture.savefig(
            path, dpi=150, metadata={"Date": None} if str(path).endswith(".svg") else None
        )


def bare(axes: Any, *sides: str) -> None:
    """Take away the lines round a panel: those at `sides`, or all."""
    axes.spines[list(sides) or ["top", "right", "bottom", "left"]].set_visible(False)


def colour(k: int, of: int) -> Any:
    """Colour k of as many: of a short list, or from a map where there are more."""
    if of <= len(COLOURS):
        return COLOURS[k]
    from matplotlib import colormaps

    return colormaps["turbo"](0.05 + 0.9 * k / (of - 1))


def ink(background: Any) -> str:
    """Black or white, whichever is read on `background`."""
    from matplotlib.colors import to_rgb

    red, green, blue = to_rgb(background)
    return "black" if 0.30 * red + 0.59 * green + 0.11 * blue > 0.55 else "white"


def scale(largest: int | float) -> tuple[float, str]:
    """The bytes of the unit in which `largest` is written, and the unit."""
    power = min(len(UNITS) - 1, max(0, int(math.log10(largest) // 3))) if largest >= 1 else 0
    return 1000.0**power, UNITS[power]


def columns(rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Rows as lines of text with their columns aligned: so many of them to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    side = lambda k, cell: cell.ljust(widths[k]) if k < left else cell.rjust(widths[k])
    return "\n".join(
        "  ".join(side(k, cell) for k, cell in enumerate(row)).rstrip() for row in rows
    )
