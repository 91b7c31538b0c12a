"""A run's numbers for TensorBoard and Weights & Biases, and a profiler's traces."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from parallax.run.metrics import Sink


def tensorboard(folder: str | Path, *, after: int = 0) -> Sink:
    """A sink to TensorBoard's event files.

    An earlier session's points past `after` are hidden.
    Raises `ImportError` where `tensorboardX` is not installed.
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
    """A sink to Weights & Biases; the same `run` id goes on where it stopped.

    Raises `ImportError` where `wandb` is not installed.
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
    """A function to call as each step begins. It writes a trace of the chosen `steps`
    into `folder`, for Perfetto, XProf or TensorBoard.

    The trace ends when a step that is not in `steps` begins, or at the end of the
    `with` block. Wait for each step's arrays, or the trace lacks the last ones.
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
