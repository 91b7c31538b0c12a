"""The `Session` of the training loop of `examples/gpt2.py`: counts skipped steps,
writes metrics and checkpoints, and goes back to an earlier checkpoint after a fault."""

import dataclasses
import hashlib
import math
import sys
from typing import Any, NoReturn

import numpy as np

from gpt2_run import report, trackers
from gpt2_run.plan import Plan
from parallax import step
from parallax.models import decoder
from parallax.run import fingerprint, metrics
from parallax.run.checkpoint import Checkpoints
from parallax.run.spikes import Spiked, Spikes
from parallax.run.watchdog import Watchdog


def sinks(plan: Plan, first: int) -> metrics.Sink:
    """Returns the sink for the metrics of each step; only rank 0 writes. Old metrics of
    steps after `first` are dropped, because the run computes these steps again."""
    s = plan.settings
    if plan.job.rank > 0:
        return metrics.to_all()
    all_sinks = [metrics.jsonl(s.out / "metrics.jsonl", after=first)]
    if s.tensorboard:
        all_sinks.append(trackers.tensorboard(s.out / "tensorboard", after=first))
    if s.wandb is not None:
        run = hashlib.sha256(str(s.out.absolute()).encode()).hexdigest()[:12]
        all_sinks.append(trackers.wandb(s.wandb, run=run, settings=plan.numbers))
    return metrics.to_all(*all_sinks)


def limited(spikes: Spikes | None) -> tuple[Any, ...]:
    """Returns the arguments that follow the batch in a call of the train step. With a
    guard against spikes there are two: the weights of the tokens, here None, and the
    guard's limit on the loss. Without a guard there are none."""
    return () if spikes is None else (None, np.float32(spikes.limit))


@dataclasses.dataclass
class Session:
    """The objects that the training loop uses, from the first step of this process to
    its last step."""

    plan: Plan
    watch: Watchdog
    prepared: decoder.TrainStep
    train: Any  # the compiled step
    held_out: Any
    checkpoints: Checkpoints
    rate: float  # flops per second
    rollbacks: list[int]  # the steps at which copies differed, or losses were spikes
    spikes: Spikes | None  # the guard against spikes, if there is one
    described: str  # the text that the run printed before its first step
    program: Any  # the compiled step, for the report; `train` may wrap it
    one_device: list[float]  # the losses of the first steps on one device
    skipped: metrics.Skipped = dataclasses.field(init=False)
    clock: metrics.Clock = dataclasses.field(init=False)
    sink: metrics.Sink = dataclasses.field(init=False)
    progress: report.Progress = dataclasses.field(init=False)
    evaluated: tuple[int, float] = (
        0,
        math.nan,
    )  # the last step at which the held-out loss was measured, and that loss
    told: str = ""  # the signal that ended the loop

    def begin(self, first: int, note: dict[str, Any]) -> None:
        """Prepares the session for the steps after `first`. `note` is a dict from the
        checkpoint of step `first`, with the list of skipped steps and the states of the
        clock and of the guard against spikes. Without a checkpoint `note` is empty."""
        plan, s = self.plan, self.plan.settings
        self.skipped = metrics.Skipped(s.skip_budget, note.get("skipped", []))
        self.clock = metrics.Clock(note.get("clock"))
        self.sink = sinks(plan, first)
        if self.spikes is not None:
            past = self.spikes.past  # what the run skipped, it still skips
            self.spikes = Spikes(
                self.spikes.factor, self.spikes.budget, note.get("spikes")
            )
            self.spikes.past = max(past, self.spikes.past)
        live = sys.stdout.isatty() and plan.job.processes == 1
        self.progress = report.Progress(
            s.steps, first, report.printer(plan.job), live=live
        )

    @property
    def past(self) -> int:
        """The number of batches that the run has skipped: step i takes batch
        i + `past`."""
        return 0 if self.spikes is None else self.spikes.past

    def one_step(self, state: step.State, windows: Any) -> tuple[step.State, step.Info]:
        """Runs one step of training. If the run has a guard against spikes, a step
        whose loss is above the guard's limit changes nothing."""
        return self.train(state, windows, *limited(self.spikes))

    def save(self, i: int, state: step.State) -> None:
        """Begins to save a checkpoint, with the note that `begin` reads."""
        with self.clock("checkpoints"):
            note = {
                "skipped": self.skipped.steps,
                "clock": self.clock.note(),
                "rollbacks": self.rollbacks,
            }
            note |= {} if self.spikes is None else {"spikes": self.spikes.note()}
            evaluated = self.evaluated[1] if self.evaluated[0] == i else None
            self.checkpoints.save(i, state, note, evaluated=evaluated)

    def compare(self, i: int, state: step.State, *, saves: bool) -> None:
        """Raises `CopiesDiffer` if the devices' copies of the state differ. They are
        compared every `--fingerprint-every` steps, and before each save, so that no
        checkpoint holds a fault."""
        every = self.plan.settings.fingerprint_every
        if every and (saves or i % every == 0):
            with self.clock("fingerprints"):
                fingerprint.check(i, state)

    def back(self, error: fingerprint.CopiesDiffer | Spiked) -> tuple[step.State, int]:
        """Returns the state and the step of the checkpoint from which the run goes on.
        If copies differ, this is the last checkpoint. If losses spike, it is the last
        checkpoint from before the spikes.

        If the run has gone back `--rollback-budget` times already, `back` ends the run.
        """
        s, spiked = self.plan.settings, isinstance(error, Spiked)
        self.watch.phase("restore", waits=True)
        self.rollbacks.append(error.step)
        if len(self.rollbacks) > s.rollback_budget:
            what, cure = (
                ("Losses spiked", "Lower --learning-rate")
                if spiked
                else ("Copies differed", "Leave that device out")
            )
            self.end(
                f"{error} {what} at the steps {self.rollbacks}, and --rollback-budget "
                f"is {s.rollback_budget}. {cure}. {s.out} holds the checkpoints from "
                "before, and the same command goes on from the last."
            )
        self.progress.done()
        restored = self.checkpoints.restore(
            self.prepared.shapes,
            before=error.first if isinstance(error, Spiked) else None,
        )
        first, note = (0, {}) if restored is None else (restored.step, restored.note)
        guard = self.spikes
        self.begin(first, note)
        words = "its last checkpoint"
        if spiked and guard is not None:
            self.spikes = guard.back(error.step, first, note.get("spikes"))
            words = (
                f"step {first}, and past the batches of the steps up to {error.step}"
            )
        report.printer(self.plan.job)(f"{error} The run goes back to {words}.")
        return self.prepared.init(
            self.plan.begins_with
        ) if restored is None else restored.state, first

    def end(self, error: str) -> NoReturn:
        """Ends the run with the message `error`."""
        self.progress.done()
        raise SystemExit(f"error: {error}")

    def measured(
        self, i: int, state: step.State, info: step.Info, took: float
    ) -> dict[str, Any]:
        """Returns the metrics of step `i`. Ends the run if too many steps were skipped,
        or if the held-out loss is not finite."""
        s, loss = self.plan.settings, float(info.loss)
        spike = self.spikes is not None and self.spikes.count(i, loss)
        if spike:
            self.progress.done()
            report.printer(self.plan.job)(
                f"step {i}: the loss is {loss:.4g}, a spike; the step is skipped."
            )
        try:
            skip = spike or self.skipped.count(i, info, state.scale)
        except metrics.OverBudget as error:
            self.compare(i, state, saves=True)
            self.save(i, state)
            self.checkpoints.wait()
            self.end(
                f"{error} Now --learning-rate is {s.learning_rate} and --skip-budget "
                f"{s.skip_budget}. {s.out} holds the metrics and a checkpoint; with a "
                "larger --skip-budget the run goes on from it."
            )
        record: dict[str, Any] = {"skipped": True}
        if not skip:
            record = {"loss": loss, "gradient_norm": float(info.gradient_norm)}
        if i <= len(self.one_device):
            record["one_device"] = self.one_device[i - 1]
        if i % s.evaluate_every == 0 or i == s.steps:
            with self.clock("evaluation"):
                record["held_out"] = self.held_out(state.model)
                self.evaluated = i, record["held_out"]
            if not math.isfinite(record["held_out"]):
                self.compare(i, state, saves=True)
                self.end(
                    f"step {i}: the held-out loss is {record['held_out']}, so the "
                    "model is lost. Lower --learning-rate (now "
                    f"{s.learning_rate}) and give --out another folder. The steps "
                    f"before are in {s.out}."
                )
        tokens = s.batch * self.plan.length
        flops = report.step_flops(self.plan.config, tokens, self.plan.length)
        return record | {
            "seconds": took,
            "tokens_per_second": tokens / took,
            "share": flops / took / self.rate,
        }
