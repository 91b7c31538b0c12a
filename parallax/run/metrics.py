"""Parts of a training loop that survives faults: `Skipped` counts the steps whose numbers were not
finite, `Clock` measures the time, and a sink such as `jsonl` writes the metrics.

The parts do not depend on each other; use the ones that your loop needs.
"""

import contextlib
import dataclasses
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from parallax import _files, precision
from parallax.run.barriers import transient
from parallax.step import Info

# Steps that are not finite


class OverBudget(RuntimeError):
    """Raised when more steps were skipped than the run allows, because their loss, gradient norm or
    update was not finite.
    """


@dataclasses.dataclass
class Skipped:
    """Counts the steps that `step.make` skipped because the loss, the gradient norm or the update
    was not finite, and raises an error if there are more than `budget`.

    With a loss scale, an overflow shows that the scale was too large, so `step.make` lowers the
    scale. A step with an overflow is counted only if the scale was already the smallest possible
    scale. `step.make` also skips a step whose loss is above a limit. Such steps should not be
    counted here, so call `Skipped.count` only for steps for which `run.spikes.Spikes.count`
    returned False.

    Args:
        budget: the number of steps that may be skipped in a run.
        steps: the numbers of the skipped steps, oldest first. A resumed run passes the list from
            the checkpoint's note (JSON values that the training loop saves with the state).
    """

    budget: int
    steps: list[int] = dataclasses.field(default_factory=list)
    # The loss scale before the step to count. Infinite before the first one, whose scale is not
    # known: that step then counts as one above the smallest scale.
    _scale: float = dataclasses.field(default=math.inf, init=False)

    def count(self, number: int, info: Info, scale: precision.Scale | None = None) -> bool:
        """Returns whether step `number` was skipped. Raises `OverBudget` if more steps were skipped
        than the budget allows; steps that only lowered the loss scale do not count. After this
        error the state is still good, and can be saved.

        Args:
            number: the number of the step.
            info: the `Info` that the step returned: whether it was skipped, the loss, and the
                gradient norm.
            scale: the loss scale of the state that the step returned, or None.
        """
        # The scale that this step used; the scale that it returned is for the next step. At the
        # first call `_scale` is infinite, so with a loss scale an overflow then does not count.
        before, self._scale = self._scale, math.nan if scale is None else float(scale.value)
        if not info.skipped:
            return False
        # The scale was above the smallest one, and is lowered: this is normal, and no failure.
        if scale is not None and before > precision.LEAST:
            return True
        loss, norm = float(info.loss), float(info.gradient_norm)
        self.steps.append(number)
        if len(self.steps) > self.budget:
            update_not_finite = " The update is not finite." if math.isfinite(loss + norm) else ""
            raise OverBudget(
                f"step {number}: the loss is {loss} and the gradient norm {norm}."
                f"{update_not_finite} "
                f"{len(self.steps)} steps had a loss, gradient or update that was not finite "
                f"(the last ones: {', '.join(map(str, self.steps[-5:]))}), and the budget is "
                f"{self.budget}. Lower the learning rate, clip "
                "the gradients, or look at the batches of these steps."
            )
        return True


# Time


class Clock:
    """Measures how many seconds a run spends in each named activity, and the goodput of the run.
    The goodput is the number of seconds in productive activities, divided by all seconds since the
    run first began.

        with clock("steps"):
            ...

    Put `clock.note()` into each checkpoint, and pass that note to `Clock` when the run is resumed.
    The time of the steps that were lost after the checkpoint, and the time until the restart, then
    count as not productive.

    Args:
        note: the result of the method `note()`, from the checkpoint; `None` for a new run.
        productive: the names of the activities whose time counts as productive.

    Raises:
        ValueError: `productive` is one text, not a tuple of names.

    Attributes:
        seconds: a dict from the name of each activity to its seconds so far, including the seconds
            before the run was resumed.
    """

    def __init__(
        self, note: Mapping[str, Any] | None = None, *, productive: tuple[str, ...] = ("steps",)
    ):
        """Starts the clock of a new run now, or continues from the times in the `note` of a
        checkpoint. Of all activities, `goodput` counts those that `productive` names.
        """
        if isinstance(productive, str):
            raise ValueError(
                f"Clock needs a tuple of names as `productive`; got {productive!r}. Pass "
                f"({productive!r},)."
            )
        self.began: float = time.time() if note is None else note["began"]
        self.seconds: dict[str, float] = {} if note is None else dict(note["seconds"])
        self.productive = productive

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Adds the seconds of the `with` block to the activity `name`, unless the block raises an
        error.
        """
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def note(self) -> dict[str, Any]:
        """Returns the JSON values to store in a checkpoint: the time at which the run began, and
        the seconds of each activity by its name."""
        return {"began": self.began, "seconds": dict(self.seconds)}

    def goodput(self) -> float:
        """Returns the seconds in productive activities divided by all seconds since the run first
        began: a number from 0 to 1.

        If the system's clock was set back, the run may have counted more seconds than the clock
        shows. The divisor is then the sum of the counted seconds.
        """
        counted = sum(self.seconds.values())
        return sum(self.seconds.get(name, 0.0) for name in self.productive) / max(
            time.time() - self.began, counted, 1e-9
        )


# Metrics: a sink is a function of the step and of numbers by name

Sink = Callable[[int, Mapping[str, float]], None]


def recorded(
    path: str | Path, *, say: Callable[[str], Any] = lambda line: None
) -> list[dict[str, Any]]:
    """Returns the records that `jsonl` wrote to a file, oldest first; an empty list if there is no
    file.

    A line that is not a record, such as one that a crash cut short or filled with zeros, is left
    out. If there are such lines, `say` is called with a message that says how many.
    """
    path, records, others = Path(path), [], 0
    if not path.exists():
        return []
    with _files.open_file(path, "a file of metrics") as file:
        text = file.readall().decode(errors="replace")
    for line in text.splitlines(keepends=True):
        record = None
        with contextlib.suppress(ValueError, RecursionError):
            record = json.loads(line)
        if line.endswith("\n") and isinstance(record, dict) and type(record.get("step")) is int:
            records.append(record)
        else:
            others += 1
    if others:
        say(
            f"{path}: {others} {'lines are' if others > 1 else 'line is'} not whole, and "
            f"passed over."
        )
    return records


def jsonl(
    path: str | Path, *, after: int = 0, say: Callable[[str], Any] = print, patience: float = 120.0
) -> Sink:
    """Returns a sink: each call of the sink appends one line `{"step": ..., ...}` to a file. Unless
    the storage fails, the operating system has the line when the call returns.

    If the storage fails for a while, lines wait in memory, and are written together with the next
    line that can be written. An error that will not go away by itself is raised at once. Lines that
    wait when the run ends, or when another sink takes the place of this one, are lost.

    Args:
        path: the file.
        after: lines of an earlier session are kept up to this step; later lines are removed,
            because their steps are computed again.
        say: prints a message if lines wait, or if an earlier session left incomplete lines, which
            are removed.
        patience: the seconds that lines may wait; a call that fails after that time raises
            `OSError`.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        partial = path.with_name(f".{path.name}.partial")
        lines_to_keep = (
            json.dumps(record) + "\n"
            for record in recorded(path, say=say)
            if record["step"] <= after
        )
        partial.write_text("".join(lines_to_keep), encoding="utf-8")
        os.replace(partial, path)  # a crash leaves the old file or the new one, both whole

    waiting: list[str] = []  # lines that are not written yet
    failed_since = math.inf  # the time of the first failure since the last success

    def sink(step, values):
        """Writes the line of `step`, and the earlier lines that could not be written. If the
        storage fails, all these lines wait for the next call. After `patience` seconds of failures
        an error is raised.
        """
        nonlocal failed_since
        # The step comes first in the line, and no value of this name takes its place.
        waiting.append(json.dumps({"step": step, **values} | {"step": step}) + "\n")
        try:  # if it fails, `_append` tries to remove the lines that it has written
            _append(path, "".join(waiting))
        except OSError as error:
            failed = f"{path}: the numbers of step {step} were not written; {error.strerror}."
            is_first, failed_since = math.isinf(failed_since), min(failed_since, time.monotonic())
            # `transient`: the error may go away by itself.
            if not transient(error) or time.monotonic() >= failed_since + patience:
                raise OSError(failed) from error
            if is_first:
                say(f"{failed} They wait; the run goes on meanwhile.")
            return
        waiting.clear()
        failed_since = math.inf

    return sink


def _append(path: Path, text: str) -> None:
    """Adds `text` to the end of a file. If the write fails, `_append` tries to remove the part of
    the text that was written, and raises the error.
    """
    size = path.stat().st_size if path.exists() else 0
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(text)
    except OSError:
        with contextlib.suppress(OSError):
            os.truncate(path, size)
        raise


def to_all(*sinks: Sink) -> Sink:
    """Returns a sink that passes each record to all of `sinks`. `to_all()` is a sink that does
    nothing, which is right for ranks other than 0.
    """

    def sink(step, values):
        """Passes the values of one step to all sinks."""
        for one_sink in sinks:
            one_sink(step, values)

    return sink
