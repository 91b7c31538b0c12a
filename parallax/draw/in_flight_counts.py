"""Draws the number of microbatches that each stage of a schedule holds over time. This number
decides how much memory the stage needs. A `Span` is one job of a stage, from the time `start` to
the time `stop`. The `lane` of a span is the kind of its job: forward, backward or weight. A *tick*
is one row of the schedule, in which each stage has at most one job of each kind. In *lockstep*, no
stage begins a tick before all stages have ended their jobs of the previous tick.
"""

from collections.abc import Sequence

from parallax.draw import canvas
from parallax.draw.schedules import width
from parallax.schedule import Cost, Schedule, Span
from parallax.schedule.table import backward_cost

Curve = list[tuple[float, float]]  # (time, microbatches held from then on)


def in_flight(
    schedule: Schedule,
    path: canvas.Path | None = None,
    *,
    forward: Cost = 1,
    backward: Cost | None = None,
    weight: Cost = 1,
) -> str:
    """Returns a table with two numbers for each stage: the largest and the mean number of
    microbatches whose residuals the stage holds over time. All stages begin each tick of the
    schedule together.

    Residuals, which the backward pass needs, are held from the start of the forward job to the end
    of the backward job. If the gradients of the weights are computed in a separate job, the
    residuals are held to the end of that job. If a stage's layers are in v chunks, the residuals of
    a microbatch in one chunk count as 1/v of a microbatch. With a `path`, the function also draws a
    panel for each stage.

    Args:
        schedule: the schedule.
        path: the PNG, SVG or PDF file to write.
        forward: the time of one microbatch's forward jobs in all chunks of a stage. If there are v
            chunks, one job takes 1/v of this time.
        backward: the same for the backward jobs; by default 2, or 1 if weight gradients are jobs of
            their own.
        weight: the same for the jobs of weight gradients, if there are such jobs.

    Raises:
        ValueError: a time is not above 0.
        ImportError: with a `path`, if matplotlib is not installed.
    """
    backward = backward_cost(schedule, backward)
    if min(forward, backward, weight) <= 0:
        raise ValueError(
            f"draw.in_flight needs times above 0; got {forward}, {backward} and {weight} for the "
            "forward, backward and weight jobs. Give each job its time."
        )
    spans = schedule.lockstep(forward, backward, weight)
    end = max(span.stop for span in spans)
    curves = [
        _curve(schedule, [span for span in spans if span.stage == stage])
        for stage in range(schedule.stages)
    ]
    rows = [["stage", "most", "mean"]]
    for stage, curve in enumerate(curves):
        rows.append(
            [str(stage), f"{max(count for _, count in curve):g}", f"{_mean(curve, end):.3g}"]
        )
    if path is not None:
        _picture(curves, end, width(spans), path)
    return canvas.columns(rows, left=0)  # no column is flush left: all are flush right


def _curve(schedule: Schedule, spans: Sequence[Span]) -> Curve:
    """Returns the number of microbatches that one stage holds over time, as pairs. A pair has a
    time, and the number from this time on; the first time is 0. `spans` are the stage's jobs.
    """
    # The lane whose jobs free residuals: weight if there is one, else backward.
    last_lane = list(schedule.lanes)[-1]
    changes = [(span.start, 1) for span in spans if span.lane == "forward"]
    changes += [(span.stop, -1) for span in spans if span.lane == last_lane]
    count, at_time = 0, {0.0: 0.0}  # the jobs whose residuals are held; a curve begins at time 0
    for time, change in sorted(changes):
        count += change
        # A microbatch has a job in each of the stage's chunks, so one held job counts as
        # 1 / (number of chunks) of a microbatch.
        at_time[time] = count / schedule.chunks  # after the last change at this time
    return list(at_time.items())


def _mean(curve: Curve, end: float) -> float:
    """Returns the mean, from time 0 to `end`, of the number in `curve`. The curve has pairs (time,
    number from this time on), and begins at time 0."""
    stops = [time for time, _ in curve[1:]] + [end]
    spans = zip(curve, stops, strict=True)
    return sum(count * (stop - start) for (start, count), stop in spans) / end


def _picture(curves: Sequence[Curve], end: float, inches: float, path: canvas.Path) -> None:
    """Draws a panel for each stage, with the number of microbatches that the stage holds over time.
    The time axis of a panel is `inches` wide.
    """
    highest = max(count for curve in curves for _, count in curve)
    picture = canvas.figure(inches + 1.7, 0.5 * len(curves) + 1.3)
    panels = picture.subplots(len(curves), 1, sharex=True, squeeze=False)[:, 0]
    for stage, (axes, curve) in enumerate(zip(panels, curves, strict=True)):
        times, counts = zip(*[*curve, (end, curve[-1][1])], strict=True)  # up to the common end
        axes.axhspan(0, highest, color=canvas.GREY, linewidth=0)
        axes.fill_between(times, 0, counts, step="post", color=canvas.COLOURS[0], linewidth=0)
        axes.set(xlim=(0, end), ylim=(0, highest), ylabel=f"{stage}")
        axes.set_yticks([max(counts)], [f"{max(counts):g}"])
        axes.yaxis.tick_right()
        axes.yaxis.label.set(rotation=0, va="center", ha="right")
        axes.tick_params(bottom=axes is panels[-1])
        canvas.bare(axes)
    panels[-1].set_xlabel("time")
    picture.supylabel("stage", size=10)
    picture.suptitle("microbatches in flight; their maximum is written on the right", size=10)
    canvas.save(picture, path)
