"""Look at a schedule: as text, as a picture (PNG, SVG) of stages by time, or as a trace for Perfetto or chrome://tracing.

The costs of F, B (or I) and W are those of `Schedule.makespan`. `Schedule.lockstep` is what one program on all devices does;
pass `run=Schedule.asynchronous` (or a `functools.partial` of it with its `hop`) to see stages that wait for messages alone.
"""

import json
import os
from collections.abc import Callable, Sequence

from parallax.schedule import Cost, Schedule, Span, job_name
from parallax.schedule.table import backward_cost

LETTERS = {"forward": "F", "backward": "B", "weight": "W"}
COLOURS = {
    "forward": (0.00, 0.45, 0.70),
    "backward": (0.84, 0.37, 0.00),
    "weight": (0.00, 0.62, 0.45),
}  # Okabe and Ito's


def lockstep(
    schedule: Schedule, forward: Cost = 1, backward: Cost | None = None, weight: Cost = 1
) -> tuple[Span, ...]:
    """When every job runs in one program on all devices: `schedule.lockstep`."""
    return schedule.lockstep(forward, backward_cost(schedule, backward), weight)


def summary(
    schedule: Schedule, forward: Cost = 1, backward: Cost | None = None, weight: Cost = 1
) -> str:
    """One line of sizes, makespan, bubble and the in-flight peak."""
    backward = backward_cost(schedule, backward)
    makespan, bubble = (f(forward, backward, weight) for f in (schedule.makespan, schedule.bubble))
    chunks = f" x {schedule.chunks} chunks" if schedule.chunks > 1 else ""
    share = f" ({bubble / makespan:.0%})" if makespan else ""
    return (
        f"{schedule.stages} stages{chunks}, {schedule.microbatches} microbatches: time {makespan:g}, bubble {bubble:g}{share}, "
        f"at most {schedule.in_flight.max():g} microbatches in flight"
    )


def text(schedule: Schedule) -> str:
    """The tables as lines of text: a column a tick, for each stage a line a lane, the microbatch (or microbatch.chunk) or a dot.

    The second line names the lanes that run anywhere in a tick: where it changes, a new phase begins.
    """
    names = _letters(schedule)
    runs = {
        names[lane]: [bool((jobs >= 0).any()) for jobs in table]
        for lane, table in schedule.lanes.items()
    }
    running = ["".join(name for name in runs if runs[name][tick]) for tick in range(schedule.ticks)]
    lines = [["tick", *map(str, range(schedule.ticks))], ["runs", *running]]
    for s in range(schedule.stages):
        for lane, table in schedule.lanes.items():
            jobs = [divmod(job, schedule.chunks) for job in table[:, s].tolist()]
            cells = [job_name(m, c, schedule.chunks) if m >= 0 else "." for m, c in jobs]
            lines.append([f"stage {s} {names[lane]}", *cells])
    first = max(len(line[0]) for line in lines)
    width = max(len(cell) for line in lines for cell in line[1:])
    return "\n".join(
        line[0].ljust(first) + "".join(f" {cell:>{width}}" for cell in line[1:]) for line in lines
    )


def timeline(
    schedule: Schedule,
    path: str | os.PathLike[str],
    *,
    forward: Cost = 1,
    backward: Cost | None = None,
    weight: Cost = 1,
    run: Callable[..., tuple[Span, ...]] = lockstep,
) -> None:
    """Write a picture of stages by time to `path` (its suffix says PNG, SVG or PDF): jobs coloured by lane, shaded by chunk.

    Each box holds its microbatch's number where there is room; what stays grey is the bubble. The right margin tells how many
    microbatches each stage holds at most. Raises `ImportError` where matplotlib is not installed.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    backward = backward_cost(schedule, backward)
    spans = run(schedule, forward, backward, weight)
    end = max(span.stop for span in spans)
    inches = width(spans)
    lanes, names, P = list(schedule.lanes), _letters(schedule), schedule.stages
    # SVG keeps its text as text, and one schedule always gives the same bytes.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "parallax"}):
        figure = Figure(figsize=(inches + 1.7, 0.44 * P + 1.7), layout="constrained")
        axes = figure.add_subplot()
        axes.barh(range(P), end, height=0.86, color="0.88")
        colours = [_shade(span.lane, span.chunk, schedule.chunks) for span in spans]
        lengths = [span.stop - span.start for span in spans]
        axes.barh(
            [span.stage for span in spans],
            lengths,
            left=[span.start for span in spans],
            height=0.86,
            color=colours,
            edgecolor="white",
            linewidth=0.8,
        )
        longest = len(str(schedule.microbatches - 1))
        for span, length, colour in zip(spans, lengths, colours, strict=True):
            if (
                length / end * inches > 0.075 * longest + 0.02
            ):  # inches: so wide are digits of size 8
                middle, ink = (
                    (span.start + span.stop) / 2,
                    "white" if sum(colour) < 1.6 else "black",
                )
                axes.text(
                    middle,
                    span.stage,
                    str(span.microbatch),
                    ha="center",
                    va="center",
                    size=8,
                    color=ink,
                )
        axes.set(xlim=(0, end), ylim=(P - 0.5, -0.5), ylabel="stage", yticks=range(P))
        costs = dict(zip(LETTERS, (forward, backward, weight), strict=True))
        units = ", ".join(f"{names[lane]} {costs[lane]:g}" for lane in lanes)
        axes.set_xlabel(
            f"time, in units of the costs given (a microbatch through a whole stage: {units})"
        )
        title = summary(schedule, forward, backward, weight)
        if run not in (lockstep, Schedule.lockstep):
            work = schedule.makespan(forward, backward, weight) - schedule.bubble(
                forward, backward, weight
            )
            title = f"{title}\n(this in lockstep; drawn here: time {end:g}, bubble {end - work:g})"
        figure.suptitle(title, size=10)
        held = axes.secondary_yaxis("right")
        held.set_yticks(range(P), [f"{count:g}" for count in schedule.in_flight])
        held.set_ylabel("in flight, at most")
        for spine in (*axes.spines.values(), *held.spines.values()):
            spine.set_visible(False)
        handles = [
            Patch(color=_shade(lane, c, schedule.chunks), label=_legend(schedule, lane, c))
            for lane in lanes
            for c in range(schedule.chunks)
        ]
        handles.append(Patch(color="0.88", label="bubble"))
        figure.legend(
            handles=handles,
            loc="outside lower center",
            ncols=min(len(handles), 5),
            frameon=False,
            fontsize=8,
        )
        figure.savefig(
            path, dpi=150, metadata={"Date": None} if str(path).endswith(".svg") else None
        )


def width(spans: Sequence[Span]) -> float:
    """Inches across the time of a picture, enough for the shortest job to show its number."""
    shortest = min(span.stop - span.start for span in spans if span.stop > span.start)
    return min(max(0.24 * max(span.stop for span in spans) / shortest, 6.0), 22.0)


def trace(
    schedule: Schedule,
    path: str | os.PathLike[str],
    *,
    forward: Cost = 1,
    backward: Cost | None = None,
    weight: Cost = 1,
) -> None:
    """Write a Chrome trace to `path`: a process for lockstep and one for asynchronous, a thread a stage; a cost of 1 is 1 ms."""
    events: list[dict] = []
    for process, run in enumerate((lockstep, Schedule.asynchronous)):
        name = f"{schedule.stages}-stage pipeline, {run.__name__}"
        events.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}})
        for s in range(schedule.stages):
            events.append(
                {
                    "ph": "M",
                    "name": "thread_name",
                    "pid": process,
                    "tid": s,
                    "args": {"name": f"stage {s}"},
                }
            )
            events.append(
                {
                    "ph": "M",
                    "name": "thread_sort_index",
                    "pid": process,
                    "tid": s,
                    "args": {"sort_index": s},
                }
            )
        events += [
            {
                "ph": "X",
                "pid": process,
                "tid": span.stage,
                "name": f"{_letters(schedule)[span.lane]} {job_name(span.microbatch, span.chunk, schedule.chunks)}",
                "cat": span.lane,
                "ts": 1000 * span.start,
                "dur": 1000 * (span.stop - span.start),
                "args": {"microbatch": span.microbatch, "chunk": span.chunk},
            }
            for span in run(schedule, forward, backward, weight)
        ]
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file)


def _letters(schedule: Schedule) -> dict[str, str]:
    """F, B and W; the backward lane beside a weight lane is I."""
    return LETTERS if schedule.weight is None else LETTERS | {"backward": "I"}


def _legend(schedule: Schedule, lane: str, chunk: int) -> str:
    word = (
        "input gradient"
        if _letters(schedule)[lane] == "I"
        else {"weight": "weight gradient"}.get(lane, lane)
    )
    return f"{word} ({_letters(schedule)[lane]})" + (
        f", chunk {chunk}" if schedule.chunks > 1 else ""
    )


def _shade(lane: str, chunk: int, chunks: int) -> tuple[float, float, float]:
    """The lane's colour, paler from chunk to chunk."""
    pale = 0.6 * chunk / max(chunks - 1, 1)
    red, green, blue = (channel + (1 - channel) * pale for channel in COLOURS[lane])
    return red, green, blue
