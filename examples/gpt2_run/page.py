"""Draws the loss curve, a PNG, and writes a page that shows the whole run, an HTML
file."""

import functools
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gpt2_run.plan import Plan, said
from parallax import draw
from parallax.compiled import certificate, memory
from parallax.draw import canvas

BLUE, RED = "#12467f", "#b0413e"


def write(
    path: Path,
    plan: Plan,
    train: Any,
    *,
    described: str,
    comparison: str,
    sample: str,
    seconds: Mapping[str, float],
) -> None:
    """Writes the page to `path`.

    Args:
        plan: the plan of the run.
        train: the compiled step.
        described: the text that the run printed before its first step.
        comparison: the first losses of the run, beside the losses of the same steps on
            one device; "" if these steps did not run on one device.
        sample: the text that the model wrote.
        seconds: the seconds that each part of the run took, by the name of the part.
    """
    entries, total = certificate.read(train, plan.mesh), sum(seconds.values())
    slowest_first = sorted(seconds.items(), key=lambda item: -item[1])
    times = [
        [name, f"{took:.1f} s", f"{took / total:.0%}"] for name, took in slowest_first
    ]
    with tempfile.TemporaryDirectory() as folder:
        pictures = Path(folder)
        sections = {
            "The same as one device": [comparison] if comparison else [],
            "The run": [described],
            "Losses": [plan.settings.out / "loss.png"],
            "Sample": [sample],
            "Mesh": _drawn(draw.mesh, plan.mesh, pictures / "mesh.svg"),
            "Timetable": _timetable(plan, pictures),
            "Traffic": _traffic(entries, pictures),
            "Certificate": [
                "The collectives of the compiled step:",
                certificate.table(entries),
            ],
            "Memory": [
                "The memory of a device in a step, as compiled:",
                *_drawn(
                    draw.bytes_by_kind,
                    {"a step": _memory(train)},
                    pictures / "memory.svg",
                ),
            ],
            "Times": [canvas.columns(times)],
        }
        title = f"GPT-2, {plan.config.parameters:,} parameters, {plan.axes}"
        with_parts = {name: parts for name, parts in sections.items() if parts}
        draw.page(path, title, with_parts)


def _drawn(draw_to: Callable[..., str], subject: Any, path: Path) -> list[str | Path]:
    """The path of the picture, if `draw_to` draws one, and the text that `draw_to`
    returns."""
    text = draw_to(subject, path)
    return [path, text] if path.exists() else [text]


def _timetable(plan: Plan, pictures: Path) -> list[str | Path]:
    if plan.schedule.stages == 1:
        return []
    timetable, in_flight = pictures / "timetable.svg", pictures / "in_flight.svg"
    draw.timeline(plan.schedule, timetable)
    text = draw.in_flight(plan.schedule, in_flight)
    return [draw.summary(plan.schedule), timetable, in_flight, text]


def _traffic(entries: list[certificate.Entry], pictures: Path) -> list[str | Path]:
    title = "The bytes that a device sends in a step:"
    if not entries:
        return [title, "The compiled program sends nothing."]
    return [title, *_drawn(draw.traffic, entries, pictures / "traffic.svg")]


def curve(path: Path, records: list[dict], plan: Plan) -> None:
    """Draws the curve of the losses as a PNG, with lines at the losses of the uniform,
    unigram and bigram models."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 5.4), layout="constrained")
    _draw_losses(axes, records)
    for (name, nats), style in zip(plan.lines.items(), (":", "--", "-"), strict=True):
        axes.axhline(nats, color=RED, linewidth=1.1, linestyle=style)
        axes.annotate(
            f"{name} {nats:.3f}",
            (1, nats),
            (-4, 3),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            ha="right",
            color=RED,
            fontsize=9,
        )

    axes.set(xlabel="steps", ylabel=f"loss (nats per {plan.unit})")
    axes.set_xlim(0, plan.settings.steps)
    axes.set_title(
        f"GPT-2, {plan.config.parameters:,} parameters, {plan.axes}, {said(plan)} "
        f"all-reduce: {plan.settings.text.name}",
        fontsize=11,
    )
    axes.grid(alpha=0.25)
    axes.spines["right"].set_visible(False)
    thousands = plan.settings.batch * plan.length / 1000
    tokens = axes.secondary_xaxis(
        "top",
        functions=(
            functools.partial(np.multiply, thousands),
            lambda tokens: np.divide(tokens, thousands),
        ),
    )
    tokens.set_xlabel(f"{plan.unit}s seen in training (thousands)")
    axes.legend(loc="upper right", bbox_to_anchor=(1, 0.93), frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _draw_losses(axes: Any, records: list[dict]) -> None:
    finite = [record for record in records if "loss" in record]
    steps = [record["step"] for record in finite]
    losses = [record["loss"] for record in finite]
    axes.plot(steps, losses, color="#7aa6d6", linewidth=0.8, label="train, one batch")

    evaluated = [record for record in records if "held_out" in record]
    steps = [record["step"] for record in evaluated]
    losses = [record["held_out"] for record in evaluated]
    style = {"linewidth": 2.4, "marker": "o", "markersize": 4}
    axes.plot(steps, losses, color=BLUE, label="held-out", **style)
    axes.annotate(
        f"{losses[-1]:.3f}",
        (steps[-1], losses[-1]),
        (7, 0),
        textcoords="offset points",
        va="center",
        color=BLUE,
        weight="bold",
    )


def _memory(train: Any) -> dict[str, int]:
    """Returns a dict: for each kind of memory, such as "temporaries", the bytes that a
    step uses on a device. Kinds of 0 bytes are left out, and so is the sum, "peak"."""
    sizes = memory.of(train)
    return {kind: size for kind, size in sizes.items() if size and kind != "peak"}
