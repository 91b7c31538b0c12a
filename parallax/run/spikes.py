"""A guard against spikes: a step whose loss is far above the running median changes nothing, and
after some such steps the run goes back to an older checkpoint.

    spikes = Spikes(2.0, 3, note=note.get("spikes"))
    ...
    state, info = train(state, batch(i + spikes.past), None, spikes.limit)
    spike = spikes.count(i, float(info.loss))      # may raise `Spiked`
    # After `except Spiked as error`, when an older checkpoint is restored:
    spikes = spikes.back(error.step, restored.step, restored.note.get("spikes"))

Some batches, at a certain state of the optimizer, may raise the loss for many steps. PaLM (arXiv
2204.02311) went back to an older checkpoint, and skipped these batches. Here `past` counts the
skipped batches, and the batch of a step is a function of the seed and of step + `past`. Store the
result of `spikes.note()` in each checkpoint: it contains `past`, so a resumed run takes the same
batches.
"""

import math
import statistics
from collections.abc import Mapping
from typing import Any

import numpy as np

from parallax import argument_checks

WINDOW = 64  # steps over which the median is taken, and spikes are counted
LEAST = 16  # the fewest losses for which there is a limit


class Spiked(RuntimeError):
    """Raised when the number of loss spikes reaches the limit of the run.

    Attributes:
        step: the step of the spike at which the limit was reached.
        first: the step of the earliest of the spikes that were counted for the limit.
    """

    def __init__(self, words: str, step: int, first: int):
        super().__init__(words)
        self.step, self.first = step, first


class Spikes:
    """Counts the spikes among the losses of a run. Every process passes the same losses, so every
    process gets the same answers.

    Args:
        factor: a loss is a spike if it is above `factor` times the median of the last 64 losses
            that were no spikes.
        budget: the number of spikes in 64 steps at which `count` raises `Spiked`.
        note: the result of the method `note()`, from the checkpoint; `None` for a new run.

    Raises:
        ValueError: `factor` is not finite or not above 1, or `budget` is no whole number from 1 on.

    Attributes:
        past: the number of batches that the run skipped: step i takes batch i + `past`.
    """

    def __init__(self, factor: float, budget: int, note: Mapping[str, Any] | None = None):
        (budget,) = argument_checks.whole_numbers("Spikes", budget=budget)
        if not 1 < factor < math.inf:
            raise ValueError(
                f"Spikes needs a finite factor above 1; got {factor}. Pass, for example, 2.0: a "
                "loss above twice the median is then a spike."
            )
        if budget < 1:
            raise ValueError(f"Spikes needs a budget of 1 spike or more; got {budget}.")
        note = note or {"losses": [], "at": [], "past": 0}
        self.factor, self.budget, self.past = factor, budget, int(note["past"])
        # The last losses that were no spikes, and the steps of the last spikes.
        self._losses, self._at = list(note["losses"]), list(note["at"])

    @property
    def limit(self) -> float:
        """The largest loss that is no spike. It is infinite while there are fewer than 16 losses,
        or if the median of the losses is not above 0.
        """
        median = statistics.median(self._losses) if len(self._losses) >= LEAST else 0.0
        # In float32, as the step on the devices compares it, so that both give one answer.
        return float(np.float32(self.factor * median)) if median > 0 else math.inf

    def count(self, number: int, loss: float) -> bool:
        """Returns whether the loss of step `number` was a spike: above `limit`. A finite loss that
        is no spike is added to the losses of which the median is taken.

        Raises:
            Spiked: the loss was a spike, and `budget` or more of the last 64 steps were spikes.
        """
        if not loss > self.limit:  # nan is no spike: `metrics.Skipped` counts it
            self._losses = [*self._losses, loss][-WINDOW:] if math.isfinite(loss) else self._losses
            return False
        # `_at` has the steps of the spikes among the last `WINDOW` steps.
        self._at = [step for step in self._at if step > number - WINDOW] + [number]
        if len(self._at) >= self.budget:
            raise Spiked(
                f"step {number}: the loss is {loss:.4g}, above the limit {self.limit:.4g} "
                f"({self.factor:g} times the running median of the losses). There were "
                f"spikes at {len(self._at)} of the last {WINDOW} steps "
                f"(the last ones: {', '.join(map(str, self._at[-5:]))}).",
                step=number,
                first=self._at[0],
            )
        return True

    def note(self) -> dict[str, Any]:
        """Returns the JSON values to store in a checkpoint, from which a resumed run makes the same
        `Spikes`.
        """
        return {"losses": self._losses, "at": self._at, "past": self.past}

    def back(self, step: int, first: int, note: Mapping[str, Any] | None) -> "Spikes":
        """Returns the `Spikes` for a run that went back from `step` to the checkpoint of step
        `first`.

        The new `Spikes` has the losses and the spikes in the checkpoint's `note`. The run then
        skips the batches of the steps after `first`, up to and including `step`. The new `past`,
        the number of skipped batches, is `self.past` plus the number of these batches. `past` is
        not taken from the `note`, which does not count the batches skipped after the checkpoint.
        The new `past` is only in memory until the run's next save. If the run is killed before
        that save, it goes on from the same checkpoint without the new `past`, and takes the skipped
        batches again.
        """
        guard = Spikes(self.factor, self.budget, note)
        guard.past = self.past + step - first
        return guard
