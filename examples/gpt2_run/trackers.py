"""A run's numbers for TensorBoard and Weights & Biases, and a profiler's traces."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from parallax.run.metrics import Sink


def tensorboard(folder: str | Path, *, after: int = 0) -> Sink:
    """Returns a sink that writes TensorBoard's event files into `folder`. If an earlier
    process of the run wrote points there, TensorBoard hides the points of steps after
    `after`, because the run computes these steps again.

    Raises `ImportError` if `tensorboardX` is not installed.
    """
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise ImportError(
            "The TensorBoard sink needs tensorboardX: pip install tensorboardX."
        ) from error
    writer = SummaryWriter(str(folder), purge_step=after + 1)

    def sink(step, values):
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return sink


def wandb(project: str, *, run: str, settings: Mapping[str, Any]) -> Sink:
    """Returns a sink to Weights & Biases. If `project` has a run with the id `run`,
    that run is continued; otherwise a new run begins.

    Raises `ImportError` if `wandb` is not installed.
    """
    try:
        import wandb as client  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError(
            "The Weights & Biases sink needs wandb: pip install wandb."
        ) from error
    session = client.init(
        project=project, id=run, resume="allow", config=dict(settings)
    )
    return lambda step, values: session.log(dict(values), step=step)


@contextlib.contextmanager
def profiler(folder: str | Path, steps: range) -> Iterator[Callable[[int], None]]:
    """Yields a function to call with each step's number, as the step begins. The
    function writes a trace of `steps` into `folder`, for Perfetto, XProf or
    TensorBoard.

    The trace ends when a step that is not in `steps` begins, or at the end of the
    `with` block. Wait for the arrays of each step before the next step begins.
    Otherwise the trace may end before the devices have computed the last steps.
    """
    on = False

    def begin(step: int) -> None:
        nonlocal on
        if on != (step in steps):
            on = not on
            jax.profiler.start_trace(str(folder)) if on else jax.profiler.stop_trace()

    try:
        yield begin
    finally:
        if on:
            jax.profiler.stop_trace()
