"""The whole run on one page, OUT/report.html: what it was, its curve, mesh, traffic, memory, timetable and times."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpt2_run.plan import Plan
from parallax import draw
from parallax.compiled import certificate, memory
from parallax.draw import canvas


def write(
    path: Path, plan: Plan, train: Any, *, described: str, sample: str, seconds: Mapping[str, float]
) -> None:
    """Write the page.

    Args:
        train: the compiled step.
        described: what the run said before its first step.
        seconds: what each part took.
    """
    entries, total = certificate.read(train, plan.mesh), sum(seconds.values())
    times = [
        [name, f"{took:.1f} s", f"{took / total:.0%}"]
        for name, took in sorted(seconds.items(), key=lambda item: -item[1])
    ]
    with tempfile.TemporaryDirectory() as folder:
        drawn = lambda name: Path(folder, f"{name}.svg")
        mesh, traffic, used = (
            draw.mesh(plan.mesh, drawn("mesh")),
            draw.traffic(entries, drawn("traffic"))
            if entries
            else "The compiled program sends nothing.",
            draw.bytes_by_kind({"a step": _memory(train)}, drawn("memory")),
        )
        timetable = []
        if plan.schedule.stages > 1:
            draw.timeline(plan.schedule, drawn("timetable"))
            held = draw.in_flight(plan.schedule, drawn("held"))
            timetable = [draw.summary(plan.schedule), drawn("timetable"), drawn("held"), held]
        pictured = lambda name: [drawn(name)] * drawn(name).exists()
        sections = {
            "The run": [described],
            "Losses": [plan.settings.out / "loss.png"],
            "Sample": [sample],
            "Mesh": [*pictured("mesh"), mesh],
            "Timetable": timetable,
            "Traffic": ["The bytes that a device sends in a step:", *pictured("traffic"), traffic],
            "Certificate": ["The collectives of the compiled step:", certificate.table(entries)],
            "Memory": ["The memory of a device in a step, as compiled:", *pictured("memory"), used],
            "Times": [canvas.columns(times)],
        }
        title = f"GPT-2, {plan.config.parameters:,} parameters, {plan.axes}"
        draw.page(path, title, {name: parts for name, parts in sections.items() if parts})


def _memory(train: Any) -> dict[str, int]:
    """The bytes on a device in a step by kind, those above 0."""
    sizes = memory.of(train)
    return {kind: size for kind, size in sizes.items() if size and kind != "peak"}
