"""Draws a program whose times were estimated: when it computes, and when each axis carries
messages.

A *row* of the picture is either "compute", or a set of axes that carries messages. An `Event` is an
instruction or a message. It is drawn in the row `row`, from `start` to `stop` in seconds, and
`source` is the line of the user's program that made it. *Exposed* is the time that would be saved
if messages took no time.
"""

import json
import os
from collections.abc import Sequence

import numpy as np

from parallax.compiled.timeline import Event, Timeline
from parallax.draw import canvas

WIDTH = 72  # the characters of a row: each stands for an equal part of the time
MARKS = ((0.95, "#"), (0.5, "+"), (0.02, "."), (-1.0, " "))  # (bound, mark for shares above it)


def replay(timeline: Timeline, path: canvas.Path | None = None) -> str:
    """Returns a text with one line for computing, and one line for each set of axes along which the
    program sends messages, such as "data" or "data x tensor".

    The time runs from left to right. Each character stands for an equal part of the time: `#` if
    the device computes, or the axes carry messages, for over 95% of this part, `+` for over 50%,
    `.` for over 2%, and a space for less. A line ends with a percentage: the share of the whole
    time in which the device computes, or the axes carry messages.

    With a `path`, the function also draws the lines, and writes the picture to that file.

    Raises:
        ImportError: with a `path`, if matplotlib is not installed.
    """
    rows = _rows(timeline.events)
    longest = max(map(len, rows), default=0)
    lines = []
    for row, events in rows.items():
        shares = _busy(events, timeline.seconds)
        marks = [next(mark for least, mark in MARKS if share > least) for share in shares]
        lines.append(f"{row.ljust(longest)} |{''.join(marks)}| {shares.mean():>4.0%}")
    if path is not None:
        _picture(timeline, rows, path)
    return "\n".join(lines)


def replay_trace(timeline: Timeline, path: str | os.PathLike[str]) -> None:
    """Writes a trace for Perfetto, with a thread for computing, and a thread for each set of axes
    along which the program sends messages. Messages that overlap are on several threads of the same
    name, since Perfetto leaves out such events of one thread."""
    threads = [
        (row, spans)
        for row, all_spans in _rows(timeline.events).items()
        for spans in _apart(all_spans)
    ]
    # An event of the kind (`ph`) M names a thread; X is a span of time, in microseconds.
    events: list[dict] = []
    for k, (row, spans) in enumerate(threads):
        thread = {"pid": 0, "tid": k}
        events.append({"ph": "M", "name": "thread_name", "args": {"name": row}} | thread)
        for event in spans:
            span = {"ts": 1e6 * event.start, "dur": 1e6 * (event.stop - event.start)}
            args = {"source": event.source}
            events.append({"ph": "X", "name": event.name, "args": args} | thread | span)
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file)


def _rows(events: Sequence[Event]) -> dict[str, list[Event]]:
    """Returns the events by row: "compute" first, then each set of axes, in the order of their
    first messages.
    """
    rows: dict[str, list[Event]] = {"compute": []}
    for event in events:
        rows.setdefault(event.row, []).append(event)
    return rows


def _apart(events: Sequence[Event]) -> list[list[Event]]:
    """Returns the events in as few lists as possible, so that no two events of a list overlap. The
    result has at least one list."""
    apart: list[list[Event]] = [[]]
    for event in sorted(events, key=lambda event: event.start):
        free = [line for line in apart if not line or line[-1].stop <= event.start]
        if not free:
            free = [[]]
            apart += free
        free[0].append(event)
    return apart


def _busy(events: Sequence[Event], end: float) -> np.ndarray:
    """Returns the fractions of time in which at least one event runs: a fraction for each of
    `WIDTH` equal parts of the time from 0 to `end`.

    Events may overlap; the time in which two of them run counts once.
    """
    busy, until = np.zeros(WIDTH), 0.0
    edges = np.linspace(0.0, end, WIDTH + 1)
    for event in sorted(events, key=lambda event: event.start):
        start = max(event.start, until)  # the time before `until` is counted already
        until = max(until, event.stop)
        overlap = np.minimum(edges[1:], event.stop) - np.maximum(edges[:-1], start)
        busy += np.clip(overlap, 0.0, None)  # negative: the event is not in this part
    # A part lasts end / WIDTH seconds.
    return busy * WIDTH / end if end else busy


def _picture(timeline: Timeline, rows: dict[str, list[Event]], path: canvas.Path) -> None:
    """Draws each row as a grey line over the whole time, with a box for each event. The time axis
    of the picture is in milliseconds.
    """
    picture = canvas.figure(12.0, 0.5 * len(rows) + 1.3)
    axes = picture.add_subplot()
    end = 1e3 * timeline.seconds
    for k, events in enumerate(rows.values()):
        spans = [(1e3 * event.start, 1e3 * (event.stop - event.start)) for event in events]
        axes.barh(k, end, height=0.8, color=canvas.GREY)
        axes.broken_barh(spans, (k - 0.4, 0.8), color=canvas.colour(k, len(rows)))
    axes.set(xlim=(0, end), ylim=(len(rows) - 0.5, -0.5), xlabel="milliseconds, estimated")
    axes.set_yticks(range(len(rows)), list(rows))
    exposed = f"{1e3 * timeline.exposed:.3g} ms in exposed messages"
    axes.set_title(f"{end:.4g} ms, of which {exposed}", size=10)
    canvas.bare(axes)
    canvas.save(picture, path)
