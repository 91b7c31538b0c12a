"""The memory of a device through one compiled step."""

from collections import Counter

import numpy as np

from parallax.compiled.memory import PHASES, Profile
from parallax.draw import canvas
from parallax.plan.quantities import quantity

LARGEST = 8  # buffers that the text names
POINTS = 4000  # a curve of more points looks the same


def memory(profile: Profile, path: canvas.Path | None = None) -> str:
    """The temporaries of a step at their peak and in each phase, and the largest buffers at the peak.

    With a `path`, also draws the bytes on a device over the instructions of the step, on top of the
    arguments and results. A buffer is pale while it is allocated but holds nothing.

    Args:
        profile: the result of `compiled.memory.of`.
        path: the PNG, SVG or PDF file to write.

    Raises:
        ImportError: with a `path`, if matplotlib is not installed.
    """
    fixed = profile.arguments + profile.outputs
    title = (
        f"arguments and results {quantity(fixed, 'B')}, temporaries at most "
        f"{quantity(profile.peak, 'B')} (allocated: {quantity(profile.assigned, 'B')}), "
        f"total {quantity(fixed + profile.peak, 'B')} on a device"
    )
    rows = [["", "instructions", "at most", "at the end"]]
    for k, name in enumerate(PHASES):
        filled = profile.filled[profile.phase == k]
        if len(filled):
            sizes = [quantity(float(size), "B") for size in (filled.max(), filled[-1])]
            rows.append([name, f"{len(filled):,}", *sizes])
    counts = Counter(profile.at_peak)
    largest = sorted(counts, key=lambda value: (-counts[value] * value.bytes, value.what))[:LARGEST]
    buffers = [
        f"  {counts[value]} x {quantity(value.bytes, 'B')}  {value.what}" for value in largest
    ]
    if path is not None:
        _picture(profile, path)
    heading = f"the largest of {len(profile.at_peak)} buffers at the peak:"
    return "\n".join([title, canvas.columns(rows), heading, *buffers])


def _picture(profile: Profile, path: canvas.Path) -> None:
    fixed, count = profile.arguments + profile.outputs, len(profile.live)
    unit, name = canvas.scale(fixed + profile.peak)
    picture = canvas.figure(9.0, 4.0)
    axes = picture.add_subplot()
    base = fixed / unit
    axes.axhspan(0, base, color="0.72", linewidth=0, label="arguments and results")
    if count:
        starts = np.unique(np.linspace(0, count, min(count, POINTS), endpoint=False).astype(int))
        live, filled = (
            base + np.maximum.reduceat(curve, starts) / unit
            for curve in (profile.live, profile.filled)
        )
        step = {"step": "post", "linewidth": 0}
        axes.fill_between(starts, base, live, color="0.90", label="allocated, but empty", **step)
        for k, phase in enumerate(PHASES):
            inside = profile.phase[starts] == k
            if inside.any():
                # A step reaches to the next point, so the first point of the next phase belongs in.
                inside[1:] |= inside[:-1]
                shade = canvas.COLOURS[k]
                axes.fill_between(
                    starts, base, filled, where=inside, color=shade, label=phase, **step
                )
        top = int(profile.live.argmax())
        axes.annotate(
            f"peak {quantity(fixed + profile.peak, 'B')}",
            (top, (fixed + profile.peak) / unit),
            xytext=(0, 4),
            textcoords="offset points",
            ha="left" if top < count / 2 else "right",
            size=9,
        )
    axes.set(
        xlabel="instructions of one step in the order in which they run, loops unrolled",
        ylabel=f"{name} on a device",
        xlim=(0, max(count, 1)),
        ylim=(0, 1.1 * (fixed + profile.peak) / unit),
    )
    canvas.bare(axes, "top", "right")
    picture.legend(loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    canvas.save(picture, path)
