"""A device's bytes by kind, several plans beside each other; what it sends along each axis; how even the work is."""

from collections.abc import Mapping, Sequence

from parallax.compiled.certificate import Entry
from parallax.draw import canvas
from parallax.plan.quantities import quantity

Number = int | float


def bytes_by_kind(
    plans: Mapping[str, Mapping[str, Number]],
    path: canvas.Path | None = None,
    *,
    limit: Number | None = None,
    counted: str = "on a device",
) -> str:
    """The bytes of each kind, as text: a column for each of the `plans`, a line for each kind, and their sum.

    With a `path`, also as a picture there: a stacked bar for each plan.

    Args:
        plans: for each plan's name the bytes of each kind, as `Memory.at_peak` of a plan gives them.
        path: of a PNG, SVG or PDF file.
        limit: the bytes that a device has, drawn as a line.
        counted: says which bytes these are, such as `"sent in a step"`.

    Raises:
        ImportError: with a `path`, where matplotlib is not installed.
    """
    kinds = list(dict.fromkeys(kind for plan in plans.values() for kind in plan))
    totals = {name: sum(plan.values()) for name, plan in plans.items()}
    rows = [[counted, *plans]]
    rows += [
        [kind, *(quantity(plan[kind], "B") if kind in plan else "-" for plan in plans.values())]
        for kind in kinds
    ]
    rows.append(["in all", *(quantity(total, "B") for total in totals.values())])
    if limit is not None:
        rows.append(
            [f"of {quantity(limit, 'B')}", *(f"{total / limit:.0%}" for total in totals.values())]
        )
    if path is not None:
        _stacked(plans, kinds, totals, limit, counted, path)
    return canvas.columns(rows)


def traffic(
    sent: Mapping[str, Number] | Mapping[tuple[str, ...], Number] | Sequence[Entry],
    path: canvas.Path | None = None,
) -> str:
    """The bytes that a device sends in a step along each axis (or several), as text, the most first.

    With a `path`, also as a picture there: a bar for each.

    Args:
        sent: bytes by axes, as `plan.Plan.sent` has them, or the entries of `certificate.read`.
        path: of a PNG, SVG or PDF file.

    Raises:
        ImportError: with a `path`, where matplotlib is not installed.
    """
    along: dict[str, Number] = {}
    pairs = (
        sent.items() if isinstance(sent, Mapping) else [(entry.axes, entry.bytes) for entry in sent]
    )
    for axes, size in pairs:
        name = axes if isinstance(axes, str) else " x ".join(axes) or "no axis"
        along[name] = along.get(name, 0) + size
    along = dict(sorted(along.items(), key=lambda pair: -pair[1]))
    total = sum(along.values())
    rows = [["along", "a step", "share"]]
    rows += [
        [name, quantity(size, "B"), f"{size / total:.1%}" if total else "-"]
        for name, size in along.items()
    ]
    rows.append(["in all", quantity(total, "B"), ""])
    if path is not None:
        _bars(along, path)
    return canvas.columns(rows)


def balance(loads: Mapping[str, Sequence[Number]], path: canvas.Path | None = None) -> str:
    """How even the work of devices, or of experts, is, as text: for each name the least, the mean and the most of its loads.

    `even` is the mean over the most: the share of the time in which a device works, where all wait for the busiest one. With a
    `path`, also as a picture there: a panel for each name, a bar for each load.

    Args:
        loads: for each name the loads, in any unit; one above 0 at least.
        path: of a PNG, SVG or PDF file.

    Raises:
        ValueError: a name has no loads, or none above 0.
        ImportError: with a `path`, where matplotlib is not installed.
    """
    rows = [["", "least", "mean", "most", "even"]]
    for name, each in loads.items():
        if not any(load > 0 for load in each):
            raise ValueError(
                f"draw.balance needs a load above 0 of each name; {name!r} has {list(each)}. Leave it out."
            )
        mean = sum(each) / len(each)
        rows.append(
            [name, f"{min(each):.4g}", f"{mean:.4g}", f"{max(each):.4g}", f"{mean / max(each):.0%}"]
        )
    if path is not None:
        _panels(loads, path)
    return canvas.columns(rows)


def _panels(loads: Mapping[str, Sequence[Number]], path: canvas.Path) -> None:
    picture = canvas.figure(0.9 + 2.6 * len(loads), 2.6)
    highest = max(max(each) for each in loads.values())
    for k, (name, each) in enumerate(loads.items()):
        axes = picture.add_subplot(1, len(loads), k + 1)
        axes.bar(range(len(each)), each, 0.8, color=canvas.colour(k, len(loads)))
        axes.axhline(sum(each) / len(each), color="black", linestyle="--", linewidth=1)
        axes.set(
            title=f"{name}: {sum(each) / len(each) / max(each):.0%} even",
            ylim=(0, 1.08 * highest),
            xticks=range(len(each)),
        )
        axes.title.set_size(10)
        canvas.bare(axes, "top", "right")
    picture.supylabel("load; dashed: the mean", size=9)
    canvas.save(picture, path)


def _stacked(
    plans: Mapping[str, Mapping[str, Number]],
    kinds: Sequence[str],
    totals: Mapping[str, Number],
    limit: Number | None,
    counted: str,
    path: canvas.Path,
) -> None:
    highest = float(max([*totals.values(), limit or 0.0]))
    unit, name = canvas.scale(highest)
    longest = max(map(len, plans), default=0)
    picture = canvas.figure(max(4.6, max(1.3, 0.085 * longest + 0.3) * len(plans) + 3.2), 4.4)
    axes = picture.add_subplot()
    bottom = [0.0] * len(plans)
    for k, kind in enumerate(kinds):
        colour = canvas.colour(k, len(kinds))
        heights = [plan.get(kind, 0) / unit for plan in plans.values()]
        axes.bar(
            range(len(plans)),
            heights,
            0.62,
            bottom=bottom,
            color=colour,
            label=kind,
            edgecolor="white",
            linewidth=0.6,
        )
        for place, (height, below) in enumerate(zip(heights, bottom, strict=True)):
            if height * unit > 0.045 * highest:
                label = quantity(height * unit, "B")
                axes.text(
                    place,
                    below + height / 2,
                    label,
                    ha="center",
                    va="center",
                    size=8,
                    color=canvas.ink(colour),
                )
        bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
    for place, total in enumerate(totals.values()):
        label = quantity(total, "B")
        axes.text(
            place,
            total / unit + 0.012 * highest / unit,
            label,
            ha="center",
            va="bottom",
            size=9,
            weight="bold",
        )
    if limit is not None:
        axes.axhline(
            limit / unit,
            color="black",
            linestyle="--",
            linewidth=1,
            label=f"a device has {quantity(limit, 'B')}",
        )
    axes.set(
        ylabel=f"{name} {counted}",
        ylim=(0, 1.1 * highest / unit if highest else 1),
        xlim=(-0.6, len(plans) - 0.4),
    )
    axes.set_xticks(range(len(plans)), list(plans))
    canvas.bare(axes, "top", "right")
    handles, labels = axes.get_legend_handles_labels()
    order = sorted(
        range(len(labels)), key=lambda k: (labels[k] in kinds, -k)
    )  # as they lie, the topmost first
    picture.legend(
        [handles[k] for k in order],
        [labels[k] for k in order],
        loc="outside right upper",
        frameon=False,
        fontsize=9,
    )
    canvas.save(picture, path)


def _bars(along: Mapping[str, Number], path: canvas.Path) -> None:
    highest = float(max(along.values(), default=0))
    unit, name = canvas.scale(highest)
    picture = canvas.figure(6.4, 0.5 * len(along) + 1.3)
    axes = picture.add_subplot()
    lengths = [size / unit for size in along.values()]
    colours = [canvas.colour(k, len(along)) for k in range(len(along))]
    bars = axes.barh(list(along), lengths, height=0.62, color=colours)
    axes.bar_label(bars, [quantity(size, "B") for size in along.values()], padding=4, size=9)
    axes.set(
        xlabel=f"{name} that a device sends in a step",
        xlim=(0, 1.18 * highest / unit if highest else 1),
    )
    axes.set_ylabel("along the axis")
    axes.invert_yaxis()
    canvas.bare(axes, "top", "right")
    canvas.save(picture, path)
