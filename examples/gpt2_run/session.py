"""What the loop of `examples/gpt2.py` works with: its counts, where its numbers go, its checkpoints, and the way back to one."""

import dataclasses
import hashlib
import math
import sys
from typing import Any, NoReturn

from gpt2_run import report
from gpt2_run.plan import Plan
from parallax import step
from parallax.models import decoder
from parallax.run import fingerprint, metrics
from parallax.run.checkpoint import Checkpoints
from parallax.run.watchdog import Watchdog


def sinks(plan: Plan, first: int) -> metrics.Sink:
    """Where the numbers of each step go: rank 0 alone writes. What was measured after `first`, and lost, is dropped."""
    s = plan.settings
    if plan.job.rank > 0:
        return metrics.to_all()
    found = [metrics.jsonl(s.out / "metrics.jsonl", after=first)]
    if s.tensorboard:
        found.append(metrics.tensorboard(s.out / "tensorboard", after=first))
    if s.wandb is not None:
        run = hashlib.sha256(str(s.out.absolute()).encode()).hexdigest()[:12]
        found.append(metrics.wandb(s.wandb, run=run, settings=plan.numbers))
    return metrics.to_all(*found)


@dataclasses.dataclass
class Session:
    """What the loop works with, from the first step of this process to its last."""

    plan: Plan
    watch: Watchdog
    prepared: decoder.Prepared
    train: Any  # the compiled step
    held_out: Any
    checkpoints: Checkpoints
    rate: float  # flops per second
    memory: report.Memory | None
    rollbacks: list[int]  # the steps at which copies differed
    skipped: metrics.Skipped = dataclasses.field(init=False)
    clock: metrics.Clock = dataclasses.field(init=False)
    sink: metrics.Sink = dataclasses.field(init=False)
    progress: report.Progress = dataclasses.field(init=False)
    evaluated: tuple[int, float] = 0, math.nan  # the last step at which the held-out loss was measured, and that
    told: str = ""  # the signal that ended it

    def begin(self, first: int, note: dict[str, Any]) -> None:
        """Count from step `first` on, with what its checkpoint noted."""
        plan, s = self.plan, self.plan.settings
        self.skipped = metrics.Skipped(s.skip_budget, note.get("skipped", []))
        self.clock = metrics.Clock(note.get("clock"))
        self.sink = sinks(plan, first)
        live = sys.stdout.isatty() and plan.job.processes == 1
        self.progress = report.Progress(s.steps, first, report.printer(plan.job), live=live)

    def save(self, i: int, state: step.State) -> None:
        """Begin a checkpoint, with what the loop has counted."""
        with self.clock("checkpoints"):
            note = {"skipped": self.skipped.steps, "clock": self.clock.note(), "rollbacks": self.rollbacks}
            evaluated = self.evaluated[1] if self.evaluated[0] == i else None
            self.checkpoints.save(i, state, note, evaluated=evaluated)

    def compare(self, i: int, state: step.State, *, saves: bool) -> None:
        """Raise `CopiesDiffer` where they do: every so many steps, and before each save, so that no checkpoint holds a fault."""
        every = self.plan.settings.fingerprint_every
        if every and (saves or i % every == 0):
            with self.clock("fingerprints"):
                fingerprint.check(i, state)

    def back(self, error: fingerprint.CopiesDiffer) -> tuple[step.State, int]:
        """The last checkpoint's state and step, to go on from, since copies differ; too often, and the run ends."""
        s = self.plan.settings
        self.watch.phase("restore", waits=True)
        self.rollbacks.append(error.step)
        if len(self.rollbacks) > s.rollback_budget:
            self.end(
                f"{error} Copies differed at the steps {self.rollbacks}, and --rollback-budget is {s.rollback_budget}. "
                f"Leave that device out. {s.out} holds the checkpoints from before, and the same command goes on from the last."
            )
        self.progress.done()
        report.printer(self.plan.job)(f"{error} The run goes back to its last checkpoint.")
        restored = self.checkpoints.restore(self.prepared.shapes)
        first, note = (0, {}) if restored is None else (restored.step, restored.note)
        self.begin(first, note)
        return self.prepared.init(self.plan.begins_with) if restored is None else restored.state, first

    def end(self, error: str) -> NoReturn:
        """Leave the loop, and say why."""
        self.progress.done()
        raise SystemExit(f"error: {error}")

    def measured(self, i: int, state: step.State, info: step.Info, took: float) -> dict[str, Any]:
        """The numbers of step `i`; ends the run where they say that it is lost."""
        s = self.plan.settings
        try:
            skip = self.skipped.count(i, info, state.scale)
        except metrics.OverBudget as error:
            self.compare(i, state, saves=True)
            self.save(i, state)
            self.checkpoints.wait()
            self.end(
                f"{error} Now --learning-rate is {s.learning_rate} and --skip-budget {s.skip_budget}. {s.out} holds the metrics, "
                "and a checkpoint from which a larger --skip-budget goes on."
            )
        found: dict[str, Any] = {"skipped": True}
        if not skip:
            found = {"loss": float(info.loss), "gradient_norm": float(info.gradient_norm)}
        if i % s.evaluate_every == 0 or i == s.steps:
            with self.clock("evaluation"):
                found["held_out"] = self.held_out(state.model)
                self.evaluated = i, found["held_out"]
            if not math.isfinite(found["held_out"]):
                self.compare(i, state, saves=True)
                self.end(
                    f"step {i}: the held-out loss is {found['held_out']}, so the model is lost. Lower --learning-rate (now "
                    f"{s.learning_rate}) and give --out another folder. The steps before are in {s.out}."
                )
        tokens = s.batch * self.plan.length
        flops = report.step_flops(self.plan.config, tokens, self.plan.length)
        return found | {"seconds": took, "tokens_per_second": tokens / took, "share": flops / took / self.rate}
