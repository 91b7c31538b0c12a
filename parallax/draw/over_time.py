"""The memory of a device over time: through a compiled step, through many of them, or as a live device reports it."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from parallax.compiled.memory import PHASES, Profile, Sampled
from parallax.draw import canvas
from parallax.plan.quantities import quantity

COLOURS = ("#0072b2", "#d55e00", "#009e73")  # forward, backward, update
LARGEST = 8  # buffers that the text tells of
POINTS = 4000  # that a curve is drawn with: more do not show


def memory(
    profile: Profile, path: canvas.Path | None = None, *, between: Sequence[int] = ()
) -> str:
    """The temporaries of a step at their peak and in each phase, as text, and the largest buffers at the peak.

    With a `path`, also as a picture there: the bytes on a device over the instructions of a step, standing on what is there all
    the time; what is set aside and holds nothing yet, or nothing more, is pale. And above it the same for each step of a run,
    if `between` is given.

    Args:
        profile: of `memory.of`.
        path: of a PNG, SVG or PDF file.
        between: the bytes of the arrays that are there before each step, as `memory.live` counts them.

    Raises:
        ImportError: with a `path`, where matplotlib is not installed.
    """
    there = profile.arguments + profile.outputs
    lines = [
        f"arguments and results {quantity(there, 'B')}, temporaries at most {quantity(profile.peak, 'B')} "
        f"(set aside: {quantity(profile.assigned, 'B')}), in all {quantity(there + profile.peak, 'B')} on a device"
    ]
    rows = [["", "instructions", "at most", "at the end"]]
    for k, name in enumerate(PHASES):
        inside = profile.filled[profile.phase == k]
        if len(inside):
            rows.append(
                [
                    name,
                    f"{len(inside):,}",
                    quantity(float(inside.max()), "B"),
                    quantity(float(inside[-1]), "B"),
                ]
            )
    alike = Counter(profile.at_peak)
    largest = sorted(alike, key=lambda value: (-alike[value] * value.bytes, value.what))[:LARGEST]
    lines += [canvas.columns(rows), f"the largest of {len(profile.at_peak)} buffers at the peak:"]
    lines += [f"  {alike[value]} x {quantity(value.bytes, 'B')}  {value.what}" for value in largest]
    if len(between):
        lines.append(
            f"before {len(between)} steps: {quantity(min(between), 'B')} to {quantity(max(between), 'B')} in live arrays, "
            f"at most {quantity(max(between) + profile.outputs + profile.peak, 'B')} in a step"
        )
    if path is not None:
        _memory_picture(profile, list(between), path)
    return "\n".join(lines)


def sampled(samples: Sampled, path: canvas.Path | None = None) -> str:
    """The bytes in use that a device reported: in each step the most and the least, as text.

    With a `path`, also as a picture there: the bytes over seconds, a line where a step ends.

    Raises:
        ImportError: with a `path`, where matplotlib is not installed.
    """
    seconds, used = (np.array(column) for column in zip(*sorted(samples.samples), strict=True))
    rows = [["step", "seconds", "samples", "least", "most"]]
    for k, (start, stop) in enumerate(zip([0.0, *samples.marks], samples.marks, strict=False), 1):
        inside = used[(start <= seconds) & (seconds <= stop)]
        least, most = (
            quantity(int(f(inside)), "B") if len(inside) else "-" for f in (np.min, np.max)
        )
        rows.append([str(k), f"{stop - start:.4f}", str(len(inside)), least, most])
    if path is not None:
        _sampled_picture(samples, seconds, used, path)
    told = f"{samples.device}: at most {quantity(samples.peak, 'B')} since the process began"
    return f"{canvas.columns(rows, left=0)}\n{told}"


def _memory_picture(profile: Profile, between: list[int], path: canvas.Path) -> None:
    there = profile.arguments + profile.outputs
    unit, name = canvas.scale(max([there, *between]) + profile.peak)
    panels = 2 if between else 1
    picture = canvas.figure(9.0, 3.4 * panels + 0.6)
    *run, step = picture.subplots(panels, 1, squeeze=False)[:, 0]
    for axes in run:
        for k, held in enumerate(between):
            _curve(axes, profile, (held + profile.outputs) / unit, unit, left=k + 0.5, width=1.0)
        axes.set(
            xlabel="step",
            ylabel=f"{name} on a device",
            xlim=(0.5, len(between) + 0.5),
            ylim=(0, None),
        )
        if len(between) <= 32:
            axes.set_xticks(range(1, len(between) + 1))
        axes.set_title(f"{len(between)} steps", size=10)
    _curve(step, profile, there / unit, unit, left=0.0, width=float(len(profile.live)))
    top = int(profile.live.argmax()) if len(profile.live) else 0
    step.annotate(
        f"peak {quantity(there + profile.peak, 'B')}",
        (top, (there + profile.peak) / unit),
        xytext=(0, 4),
        textcoords="offset points",
        ha="left" if top < len(profile.live) / 2 else "right",
        size=9,
    )
    step.set(
        xlabel="instructions of one step, in the order in which they run, loops rolled out",
        ylabel=f"{name} on a device",
    )
    step.set(xlim=(0, max(len(profile.live), 1)), ylim=(0, 1.1 * (there + profile.peak) / unit))
    step.set_title("one step" if between else "", size=10)
    for axes in (*run, step):
        canvas.bare(axes, "top", "right")
    handles, labels = step.get_legend_handles_labels()
    picture.legend(
        handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=9
    )
    canvas.save(picture, path)


def _curve(
    axes: Any, profile: Profile, base: float, unit: float, *, left: float, width: float
) -> None:
    """One step's bytes from `left` on, above `base`."""
    count = len(profile.live)
    axes.fill_between(
        [left, left + width], 0, base, color="0.72", linewidth=0, label="arguments and results"
    )
    if not count:
        return
    bounds = np.unique(np.linspace(0, count, min(count, POINTS) + 1).astype(int))
    live, filled = (
        base + np.maximum.reduceat(curve, bounds[:-1]) / unit
        for curve in (profile.live, profile.filled)
    )
    phase, places = profile.phase[bounds[:-1]], left + width * bounds / count
    again = lambda values: np.append(values, values[-1])
    axes.fill_between(
        places,
        base,
        again(live),
        step="post",
        color="0.90",
        linewidth=0,
        label="set aside, but empty",
    )
    for k, name in enumerate(PHASES):
        inside = again(phase == k)
        inside[1:] |= inside[:-1] & (
            again(phase)[1:] != again(phase)[:-1]
        )  # up to where the next one begins
        if (phase == k).any():
            of = dict(step="post", color=COLOURS[k], linewidth=0, label=name)
            axes.fill_between(places, base, again(filled), where=inside, **of)


def _sampled_picture(
    samples: Sampled, seconds: np.ndarray, used: np.ndarray, path: canvas.Path
) -> None:
    unit, name = canvas.scale(float(max(used.max(), samples.peak)))
    picture = canvas.figure(9.0, 3.8)
    axes = picture.add_subplot()
    axes.fill_between(
        seconds, 0, used / unit, step="post", color=COLOURS[0], alpha=0.35, linewidth=0
    )
    axes.step(seconds, used / unit, where="post", color=COLOURS[0], linewidth=1)
    axes.vlines(
        samples.marks,
        0,
        1,
        transform=axes.get_xaxis_transform(),
        color="0.6",
        linewidth=0.6,
        label="a step ends",
    )
    axes.axhline(
        samples.peak / unit,
        color="black",
        linestyle="--",
        linewidth=1,
        label=f"peak {quantity(samples.peak, 'B')}",
    )
    axes.set(
        xlabel="seconds",
        ylabel=f"{name} in use on {samples.device}",
        xlim=(0, seconds[-1] or 1),
        ylim=(0, None),
    )
    canvas.bare(axes, "top", "right")
    picture.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    canvas.save(picture, path)
