"""How many microbatches each stage holds over the time of a schedule: the memory that its timetable costs."""

from collections.abc import Callable, Sequence

from parallax.draw import canvas
from parallax.draw.schedules import lockstep, width
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
    run: Callable[..., tuple[Span, ...]] = lockstep,
) -> str:
    """The microbatches whose residuals each stage holds, as text: the most, and the mean over the time of the schedule.

    A job's residuals are held from the start of its forward pass to the end of its last gradient, and those of one of v chunks
    count 1/v. With a `path`, also as a picture there, as wide as that of `timeline`: a panel for each stage.

    Args:
        forward: the time of a microbatch's F through a whole stage, above 0; so `backward` and `weight`.
        path: of a PNG, SVG or PDF file.
        run: when each job runs, as `timeline` takes it.

    Raises:
        ValueError: a cost is not above 0.
        ImportError: with a `path`, where matplotlib is not installed.
    """
    backward = backward_cost(schedule, backward)
    if min(forward, backward, weight) <= 0:
        raise ValueError(
            f"draw.in_flight needs costs above 0; got {forward}, {backward} and {weight}. Give each job its time."
        )
    spans = run(schedule, forward, backward, weight)
    end = max(span.stop for span in spans)
    curves = [
        _curve(schedule, [span for span in spans if span.stage == stage])
        for stage in range(schedule.stages)
    ]
    rows = [["stage", "most", "mean"]]
    for stage, curve in enumerate(curves):
        rows.append([str(stage), f"{max(held for _, held in curve):g}", f"{_mean(curve, end):.3g}"])
    if path is not None:
        _picture(curves, end, width(spans), path)
    return canvas.columns(rows, left=0)


def _curve(schedule: Schedule, spans: Sequence[Span]) -> Curve:
    """What one stage holds, from 0 on: the residuals of a job that ends are free for one that begins then."""
    last = list(schedule.lanes)[-1]
    begun = [(span.start, 1) for span in spans if span.lane == "forward"]
    ended = [(span.stop, -1) for span in spans if span.lane == last]
    held, curve = 0, [(0.0, 0.0)]
    for time, change in sorted(begun + ended):
        held += change
        curve.append((time, held / schedule.chunks))
    return [
        point
        for point, after in zip(curve, [*curve[1:], None], strict=True)
        if after is None or after[0] > point[0]
    ]


def _mean(curve: Curve, end: float) -> float:
    stops = [time for time, _ in curve[1:]] + [end]
    return (
        sum(held * (stop - start) for (start, held), stop in zip(curve, stops, strict=True)) / end
    )


def _picture(curves: Sequence[Curve], end: float, wide: float, path: canvas.Path) -> None:
    highest = max(held for curve in curves for _, held in curve)
    picture = canvas.figure(wide + 1.7, 0.5 * len(curves) + 1.3)
    panels = picture.subplots(len(curves), 1, sharex=True, squeeze=False)[:, 0]
    for stage, (axes, curve) in enumerate(zip(panels, curves, strict=True)):
        times, held = zip(*[*curve, (end, curve[-1][1])], strict=True)
        axes.axhspan(0, highest, color=canvas.GREY, linewidth=0)
        axes.fill_between(times, 0, held, step="post", color=canvas.COLOURS[0], linewidth=0)
        most = max(held)
        axes.set(xlim=(0, end), ylim=(0, highest), yticks=[most], ylabel=f"{stage}")
        axes.set_yticklabels([f"{most:g}"])
        axes.yaxis.tick_right()
        axes.yaxis.label.set(rotation=0, va="center", ha="right")
        axes.tick_params(bottom=axes is panels[-1])
        canvas.bare(axes)
    panels[-1].set_xlabel("time, in units of the costs given")
    picture.supylabel("stage", size=10)
    picture.suptitle("microbatches in flight, and at most on the right", size=10)
    canvas.save(picture, path)
