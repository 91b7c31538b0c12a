"""Tables and bar charts of a device's bytes: for several plans, the bytes of each kind (such as
parameters or gradients), and for one plan or program, the bytes that the device sends along each
axis."""

from collections.abc import Mapping, Sequence

from parallax.compiled.certificate import Entry
from parallax.draw import canvas
from parallax.plan.units import quantity

Number = int | float


def bytes_by_kind(
    plans: Mapping[str, Mapping[str, Number]],
    path: canvas.Path | None = None,
    *,
    counted: str = "on a device",
) -> str:
    """Returns a table with a column for each of the `plans`. A row has the bytes of one kind,
    such as parameters or gradients, and the last row has the sum.

    With a `path`, the function also draws a stacked bar for each plan, and writes the picture to
    that file.

    Args:
        plans: a dict from a plan's name to the plan's bytes by kind, such as `Memory.at_peak`.
        path: the PNG, SVG or PDF file to write.
        counted: a phrase that says which bytes are counted, such as `"sent in a step"`. It is the
            heading of the table's first column, and a part of the label of the picture's axis.

    Raises:
        ImportError: with a `path`, if matplotlib is not installed.
    """
    kinds = list(dict.fromkeys(kind for plan in plans.values() for kind in plan))
    rows = [[counted, *plans]]
    for kind in kinds:
        cells = [quantity(plan[kind], "B") if kind in plan else "-" for plan in plans.values()]
        rows.append([kind, *cells])
    rows.append(["total", *(quantity(sum(plan.values()), "B") for plan in plans.values())])
    if path is not None:
        _stacked_bars(plans, kinds, counted, path)
    return canvas.columns(rows)


def traffic(
    sent: Mapping[str, Number] | Mapping[tuple[str, ...], Number] | Sequence[Entry],
    path: canvas.Path | None = None,
) -> str:
    """Returns a table of the bytes that a device sends in a step along each axis or set of axes,
    with the most bytes first.

    With a `path`, the function also draws a bar for each row but the total, and writes the picture
    to that file.

    Args:
        sent: the bytes by axes, such as `plan.Plan.sent`, or the entries that `certificate.read`
            returns. The bytes of entries are those of the collectives' results, and a device may
            send more or fewer bytes: a ring's all-reduce sends nearly twice the bytes of its
            result.
        path: the PNG, SVG or PDF file to write.

    Raises:
        ImportError: with a `path`, if matplotlib is not installed.
    """
    is_by_axes = isinstance(sent, Mapping)
    sizes = sent.items() if is_by_axes else [(entry.axes, entry.bytes) for entry in sent]
    # `axes` is a name or a tuple of names. Entries with the same axes are added up.
    by_name: dict[str, Number] = {}
    for axes, size in sizes:
        name = axes if isinstance(axes, str) else " x ".join(axes) or "no axis"
        by_name[name] = by_name.get(name, 0) + size
    by_name = dict(sorted(by_name.items(), key=lambda pair: -pair[1]))
    total = sum(by_name.values())
    rows = [["along", "per step", "share"]]
    for name, size in by_name.items():
        rows.append([name, quantity(size, "B"), f"{size / total:.1%}" if total else "-"])
    rows.append(["total", quantity(total, "B"), ""])
    if path is not None:
        _bars(by_name, "that a device sends" if is_by_axes else "of collectives' results", path)
    return canvas.columns(rows)


def _stacked_bars(
    plans: Mapping[str, Mapping[str, Number]], kinds: Sequence[str], counted: str, path: canvas.Path
) -> None:
    """Draws a stacked bar for each plan, with a box for each kind of bytes and the total on top."""
    totals = [sum(plan.values()) for plan in plans.values()]
    unit, name = canvas.scale(max(totals))  # the unit in bytes, and its name, such as "GB"
    width = max(1.3, 0.085 * max(map(len, plans)) + 0.3)  # inches per plan: room for its name
    picture = canvas.figure(max(4.6, width * len(plans) + 3.2), 4.4)
    axes = picture.add_subplot()
    bottom = [0.0] * len(plans)
    for k, kind in enumerate(kinds):
        shade = canvas.colour(k, len(kinds))
        heights = [plan.get(kind, 0) / unit for plan in plans.values()]
        bars = axes.bar(list(plans), heights, 0.62, bottom, color=shade, edgecolor="white")
        bars.set_label(kind)
        for place, height in enumerate(heights):
            if height > 0.045 * max(totals) / unit:  # lower boxes have no room for a number
                text, middle = quantity(height * unit, "B"), bottom[place] + height / 2
                canvas.label(axes, place, middle, text, color=canvas.ink(shade))
        bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
    for place, total in enumerate(totals):
        text = quantity(total, "B")
        canvas.label(axes, place, total / unit, text, va="bottom", size=9, weight="bold")
    axes.set(ylabel=f"{name} {counted}", xlim=(-0.6, len(plans) - 0.4))
    axes.margins(y=0.1)
    canvas.bare(axes, "top", "right")
    # Reversed, so the legend has the kinds in the order of the boxes, from top to bottom.
    picture.legend(loc="outside right upper", frameon=False, fontsize=9, reverse=True)
    canvas.save(picture, path)


def _bars(by_name: Mapping[str, Number], counted: str, path: canvas.Path) -> None:
    """Draws a horizontal bar for the bytes along each axis or set of axes. `counted` says which
    bytes these are."""
    unit, name = canvas.scale(max(by_name.values(), default=0))  # in bytes, and its name
    picture = canvas.figure(6.4, 0.5 * len(by_name) + 1.3)
    axes = picture.add_subplot()
    lengths = [size / unit for size in by_name.values()]
    colours = [canvas.colour(k, len(by_name)) for k in range(len(by_name))]
    bars = axes.barh(list(by_name), lengths, height=0.62, color=colours)
    axes.bar_label(bars, [quantity(size, "B") for size in by_name.values()], padding=4, size=9)
    axes.set(xlabel=f"{name} {counted} in a step", ylabel="along the axis")
    axes.margins(x=0.18)
    axes.invert_yaxis()  # the first bar is on top
    canvas.bare(axes, "top", "right")
    canvas.save(picture, path)
