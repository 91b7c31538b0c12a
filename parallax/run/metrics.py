"""The pieces of a loop that outlives what goes wrong: skip what is not finite, count it, time it, write it down.

Each is small and knows nothing of the others; a loop of one's own takes what it needs.
"""

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from parallax.step import Info

# Steps that are not finite


class OverBudget(RuntimeError):
    """More steps were not finite than the run allows."""


@dataclasses.dataclass
class Skipped:
    """Counts the steps that `step.make` skipped, since they were not finite, against a budget.

    Args:
        budget: how many may be skipped in a run.
        steps: those that were, oldest first; from a checkpoint's note, where the run goes on.
    """

    budget: int
    steps: list[int] = dataclasses.field(default_factory=list)

    def count(self, number: int, info: Info) -> bool:
        """Whether step `number` was skipped. Raises `OverBudget` when that is one too many; the state is still good to save."""
        if not info.skipped:
            return False
        loss, norm = float(info.loss), float(info.gradient_norm)
        self.steps.append(number)
        if len(self.steps) > self.budget:
            raise OverBudget(
                f"step {number}: the loss is {loss} and the gradient norm {norm}. {len(self.steps)} steps were not finite "
                f"({', '.join(map(str, self.steps[-5:]))} last), and the budget is {self.budget}. Lower the learning rate, clip "
                "the gradients, or look at these batches."
            )
        return True


# Time


class Clock:
    """Where the seconds of a run went, and its goodput: productive seconds over all seconds since the run first began.

        with clock("steps"):
            ...

    `clock.note()` goes into each checkpoint. A run that goes on from one starts with its seconds, so what was done after that
    checkpoint and lost, and the time until the restart, count as wall and not as productive.

    Args:
        note: what `note` returned, from the checkpoint; `None` for a new run.
        productive: the names whose seconds are.

    Attributes:
        seconds: so far, by name, with those of the run that this one goes on from.
    """

    def __init__(self, note: Mapping[str, Any] | None = None, *, productive: tuple[str, ...] = ("steps",)):
        self.began: float = time.time() if note is None else note["began"]
        self.seconds: dict[str, float] = {} if note is None else dict(note["seconds"])
        self.productive = productive

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Count the seconds inside as `name`; what raises is not counted."""
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def note(self) -> dict[str, Any]:
        """What a checkpoint should hold, as JSON values: when the run began, and the seconds by name."""
        return {"began": self.began, "seconds": dict(self.seconds)}

    def goodput(self) -> float:
        """Productive seconds over all seconds since the run first began, from 0 to 1."""
        return sum(self.seconds.get(name, 0.0) for name in self.productive) / max(time.time() - self.began, 1e-9)


# Metrics: a sink is a function of the step and of numbers by name

Sink = Callable[[int, Mapping[str, float]], None]


def jsonl(path: str | Path, *, after: int = 0) -> Sink:
    """A sink that appends `{"step": ..., ...}` lines to a file; each is on its way to the disk when the call returns.

    Args:
        after: keep the lines of an earlier session up to this step, and drop the later ones, which are computed again.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        whole = [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
        partial = path.with_name(f".{path.name}.partial")
        partial.write_text("".join(line for line in whole if json.loads(line)["step"] <= after), encoding="utf-8")
        os.replace(partial, path)

    def sink(step, values):
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")

    return sink


def tensorboard(folder: str | Path, *, after: int = 0) -> Sink:
    """A sink to TensorBoard's event files; an earlier session's points past `after` are hidden.

    Raises `ImportError` where `tensorboardX` is not installed.
    """
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise ImportError("The TensorBoard sink needs tensorboardX: pip install tensorboardX.") from error
    writer = SummaryWriter(str(folder), purge_step=after + 1)

    def sink(step, values):
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return sink


def wandb(project: str, *, run: str, settings: Mapping[str, Any]) -> Sink:
    """A sink to Weights & Biases; the same `run` id goes on where it stopped. Raises `ImportError` without `wandb` installed."""
    try:
        import wandb as client  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError("The Weights & Biases sink needs wandb: pip install wandb.") from error
    session = client.init(project=project, id=run, resume="allow", config=dict(settings))
    return lambda step, values: session.log(dict(values), step=step)


def to_all(*sinks: Sink) -> Sink:
    """A sink that hands on to each of these; to none of them, it is silent, as ranks other than 0 should be."""

    def sink(step, values):
        for each in sinks:
            each(step, values)

    return sink


# Profiles


@contextlib.contextmanager
def profiler(folder: str | Path, steps: range) -> Iterator[Callable[[int], None]]:
    """A function to call as each step begins, which writes a trace of the chosen `steps` into `folder`.

    The trace, for Perfetto, XProf or TensorBoard, ends where a step outside begins, or with the block. Wait for each step's
    arrays, or the last ones are missing.
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
