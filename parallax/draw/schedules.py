"""Draws the jobs of each stage over time, as text and as a picture. The arguments `forward`,
`backward` and `weight` are the times of the jobs, as in `Schedule.makespan`.

A *lane* is one kind of job: forward, backward or weight. A *chunk* is a part of a stage's layers. A
microbatch is *in flight* on a stage while the stage holds the microbatch's residuals. The
*makespan* is the time from the start of the first job to the end of the last. The *bubble* is a
stage's total idle time in the makespan. This time is the same for all stages, since all stages have
the same work. In *lockstep*, no stage begins a tick before all stages have ended their jobs of the
previous tick. A lane has a table of shape [ticks, stages]. An entry is a job, as the number
microbatch * chunks + chunk, or -1 if the stage is idle. A `Span` is one job, from `start` to
`stop`, in the unit in which the times of the jobs are given.
"""

from collections.abc import Sequence

from parallax.draw import canvas
from parallax.schedule import Cost, Schedule, Span, job_name
from parallax.schedule.table import backward_cost

LETTERS = {"forward": "F", "backward": "B", "weight": "W"}
COLOURS = {  # Okabe and Ito's blue, vermilion and green, as red, green and blue
    "forward": (0.00, 0.45, 0.70),
    "backward": (0.84, 0.37, 0.00),
    "weight": (0.00, 0.62, 0.45),
}
POINT = 0.075  # the width in inches of a digit of size 8


def summary(
    schedule: Schedule, forward: Cost = 1, backward: Cost | None = None, weight: Cost = 1
) -> str:
    """Returns one line with a schedule's numbers of stages, chunks and microbatches, its makespan,
    its bubble, and the largest number of microbatches in flight on a stage.

    The makespan and the bubble are computed as if all stages began each tick together. `forward`,
    `backward` and `weight` are the times of a stage's jobs for one microbatch, in all chunks
    together. By default `backward` is 2, or 1 if the gradients of the weights are jobs of their
    own; `weight` is the time of these jobs, and is not used if there are none.
    """
    costs = (forward, backward, weight)
    makespan, bubble = schedule.makespan(*costs), schedule.bubble(*costs)
    chunks = f" x {schedule.chunks} chunks" if schedule.chunks > 1 else ""
    share = f" ({bubble / makespan:.0%})" if makespan else ""
    return (
        f"{schedule.stages} stages{chunks}, {schedule.microbatches} microbatches: "
        f"time {makespan:g}, bubble {bubble:g}{share}, "
        f"at most {schedule.in_flight.max():g} microbatches in flight"
    )


def text(schedule: Schedule) -> str:
    """Returns a schedule as text: a column for each tick, two heading lines, and a line for each
    kind of job (forward, backward or weight) of each stage.

    A cell has the number of a microbatch, or a dot if the stage is idle. If there are several
    chunks, a cell has the form microbatch.chunk. The second heading line has, for each tick, the
    kinds of jobs that run on at least one stage. Where these kinds change, a new phase of the
    schedule begins.
    """
    names = _letters(schedule)
    running = []
    for tick in range(schedule.ticks):
        lanes = [lane for lane, table in schedule.lanes.items() if (table[tick] >= 0).any()]
        running.append("".join(names[lane] for lane in lanes))
    lines = [["tick", *map(str, range(schedule.ticks))], ["runs", *running]]
    for s in range(schedule.stages):
        for lane, table in schedule.lanes.items():
            # As divmod(-1, chunks) is (-1, chunks - 1), an idle stage has the microbatch -1.
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
    path: canvas.Path,
    *,
    forward: Cost = 1,
    backward: Cost | None = None,
    weight: Cost = 1,
    title: str = "",
) -> None:
    """Draws the stages over time to `path` (a PNG, SVG or PDF file): a box for each job, with a
    colour for each kind of job, and a shade for each chunk of a stage's layers.

    A box shows the number of its microbatch if there is room. The bubble is grey. The right margin
    shows, for each stage, the largest number of microbatches in flight at once. All stages begin
    each tick together. The heading is the `title`, such as the schedule's name, followed by the
    line that `summary` returns. `forward`, `backward` and `weight` are the times of a stage's jobs
    for one microbatch, in all chunks together. By default `backward` is 2, or 1 if the gradients of
    the weights are jobs of their own; `weight` is the time of these jobs, and is not used if there
    are none.

    Raises:
        ImportError: matplotlib is not installed.
    """
    costs = (forward, backward_cost(schedule, backward), weight)
    spans = schedule.lockstep(*costs)
    end, inches, P = max(span.stop for span in spans), width(spans), schedule.stages
    picture = canvas.figure(inches + 1.7, 0.44 * P + 1.7)
    axes = picture.add_subplot()
    axes.barh(range(P), end, height=0.86, color=canvas.GREY, label="bubble")
    for lane in schedule.lanes:
        for chunk in range(schedule.chunks):
            shade = _shade(lane, chunk, schedule.chunks)
            jobs = [span for span in spans if (span.lane, span.chunk) == (lane, chunk)]
            axes.barh(
                [job.stage for job in jobs],
                [job.stop - job.start for job in jobs],
                left=[job.start for job in jobs],
                height=0.86,
                color=shade,
                edgecolor="white",
                linewidth=0.8,
                label=_legend(schedule, lane, chunk),
            )
            for job in jobs:
                room = (job.stop - job.start) / end * inches  # the box's width
                if room > POINT * len(str(schedule.microbatches - 1)) + 0.02:
                    middle, number = (job.start + job.stop) / 2, str(job.microbatch)
                    canvas.label(axes, middle, job.stage, number, color=canvas.ink(shade))
    axes.set(xlim=(0, end), ylim=(P - 0.5, -0.5), ylabel="stage", yticks=range(P))
    # Without a weight lane, there are two lanes, and the third letter and cost are left out.
    named = zip(_letters(schedule).values(), costs, strict=True)
    units = ", ".join(f"{letter} {cost:g}" for letter, cost in list(named)[: len(schedule.lanes)])
    axes.set_xlabel(f"time; one microbatch through a whole stage takes {units}")
    heading = [title, summary(schedule, *costs)] if title else [summary(schedule, *costs)]
    picture.suptitle(": ".join(heading), size=10)
    in_flight = axes.secondary_yaxis("right")
    in_flight.set_yticks(range(P), [f"{count:g}" for count in schedule.in_flight])
    in_flight.set_ylabel("in flight, at most")
    canvas.bare(axes)
    canvas.bare(in_flight)
    picture.legend(loc="outside lower center", ncols=5, frameon=False, fontsize=8)
    canvas.save(picture, path)


def width(spans: Sequence[Span]) -> float:
    """Returns the width of a picture of `spans`, from 6 to 22 inches. The shortest job is at least
    0.24 inches wide, so that the number of its microbatch fits, unless the picture would then be
    wider than 22 inches.
    """
    shortest = min(span.stop - span.start for span in spans if span.stop > span.start)
    return min(max(0.24 * max(span.stop for span in spans) / shortest, 6.0), 22.0)


def _letters(schedule: Schedule) -> dict[str, str]:
    """Returns the letter of each kind of job: F, B and W. If the gradients of the weights are jobs
    of their own, a backward job computes only the gradient of its input, and its letter is I
    instead of B.
    """
    return LETTERS if schedule.weight is None else LETTERS | {"backward": "I"}


def _legend(schedule: Schedule, lane: str, chunk: int) -> str:
    """Returns the text of the legend for a kind of job (`lane`) and a chunk."""
    letter = _letters(schedule)[lane]
    # With a weight lane, the letter of the backward lane is I: its jobs have only input gradients.
    word = {"I": "input gradient", "W": "weight gradient"}.get(letter, lane)
    suffix = f", chunk {chunk}" if schedule.chunks > 1 else ""
    return f"{word} ({letter}){suffix}"


def _shade(lane: str, chunk: int, chunks: int) -> tuple[float, float, float]:
    """Returns the colour of a kind of job (`lane`) as red, green and blue, paler for later chunks
    of a stage's layers."""
    pale = 0.6 * chunk / max(chunks - 1, 1)  # the share of white: 0 for the first chunk
    red, green, blue = (channel + (1 - channel) * pale for channel in COLOURS[lane])
    return red, green, blue
