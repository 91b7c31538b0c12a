"""A replayed program: what computes and what is on the links, over time, as text, picture and trace."""

import json
import os
from collections.abc import Sequence

import numpy as np

from parallax.compiled.timeline import Event, Timeline
from parallax.draw import canvas

WIDTH = 72  # characters that the time has


def replay(timeline: Timeline, path: canvas.Path | None = None, *, width: int = WIDTH) -> str:
    """A line of `width` characters for computing and one for each set of axes: `#` where it is busy, `+` over half, `.` less.

    With a `path`, also as a picture there.

    Raises:
        ImportError: with a `path`, where matplotlib is not installed.
    """
    rows = _rows(timeline.events)
    longest = max(map(len, rows), default=0)
    lines = []
    for row, events in rows.items():
        busy = _busy(events, timeline.seconds, width)
        marks = "".join(
            "#" if share > 0.95 else "+" if share > 0.5 else "." if share > 0.02 else " "
            for share in busy
        )
        lines.append(f"{row.ljust(longest)} |{marks}| {busy.mean():>4.0%}")
    if path is not None:
        _picture(timeline, rows, path)
    return "\n".join(lines)


def replay_trace(timeline: Timeline, path: str | os.PathLike[str]) -> None:
    """Write a Chrome trace to `path`, which Perfetto opens: a thread for computing, and one for each set of axes."""
    rows = list(_rows(timeline.events))
    events: list[dict] = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": k, "args": {"name": row}}
        for k, row in enumerate(rows)
    ]
    events += [
        {
            "ph": "X",
            "pid": 0,
            "tid": rows.index(event.row),
            "name": event.name,
            "ts": 1e6 * event.start,
            "dur": 1e6 * (event.stop - event.start),
            "args": {"source": event.source},
        }
        for event in timeline.events
    ]
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file)


def _rows(events: Sequence[Event]) -> dict[str, list[Event]]:
    found: dict[str, list[Event]] = {"compute": []}
    for event in events:
        found.setdefault(event.row, []).append(event)
    return found


def _busy(events: Sequence[Event], end: float, width: int) -> np.ndarray:
    """The share of each of `width` parts of the time in which any of the events runs."""
    busy, until = np.zeros(width), 0.0
    edges = np.linspace(0.0, end, width + 1)
    for event in sorted(events, key=lambda event: event.start):
        start = max(event.start, until)
        until = max(until, event.stop)
        busy += np.clip(
            np.minimum(edges[1:], event.stop) - np.maximum(edges[:-1], start), 0.0, None
        )
    return busy * width / end if end else busy


def _picture(timeline: Timeline, rows: dict[str, list[Event]], path: canvas.Path) -> None:
    picture = canvas.figure(12.0, 0.5 * len(rows) + 1.3)
    axes = picture.add_subplot()
    for k, (_, events) in enumerate(rows.items()):
        spans = [(1e3 * event.start, 1e3 * (event.stop - event.start)) for event in events]
        axes.barh(k, 1e3 * timeline.seconds, height=0.8, color=canvas.GREY)
        axes.broken_barh(spans, (k - 0.4, 0.8), color=canvas.colour(k, len(rows)))
    axes.set(
        xlim=(0, 1e3 * timeline.seconds),
        ylim=(len(rows) - 0.5, -0.5),
        xlabel="milliseconds, estimated",
    )
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set_title(
        f"{1e3 * timeline.seconds:.4g} ms, of which {1e3 * timeline.exposed:.3g} ms exposed messages",
        size=10,
    )
    canvas.bare(axes)
    canvas.save(picture, path)
