"""Train a byte-level GPT-2 on real text over data x stage x tensor, on a ring all-reduce made of `ppermute`s.

    python examples/gpt2.py

needs no argument, no network and no accelerator: eight virtual CPU devices, data 2 x stage 2 x tensor 2 under the 1F1B
schedule, learn the State of the Union addresses. `--help` lists what can be changed, such as `--data 4 --tensor 2`,
`--schedule interleaved`, `--all-reduce psum` or `--text FILE`.

On the back of the envelope: 0.8 M parameters and 16 sequences of 64 bytes are (6 N + 12 L D T) tokens = 5.5 GFLOP a step, 12 ms
at the 450 GFLOP/s of two cores. So small a model does not get there: its matrices have 64 to 256 columns on a device, and eight
devices that take turns on two cores meet in some 300 hops of a few kilobytes. A step takes about 0.15 s.
"""

import time

STARTED = time.perf_counter()

import dataclasses
import hashlib
import json
import math
import sys
from pathlib import Path
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax.experimental import multihost_utils

from gpt2_run import report
from gpt2_run.plan import DTYPE, Plan, check, chosen, claim_folder, describe, optimizer, prepare
from gpt2_run.settings import Settings
from parallax import draw, step
from parallax.collectives import Axis
from parallax.compiled import certificate
from parallax.data import prefetch
from parallax.models import decoder, gpt2
from parallax.run import metrics, processes
from parallax.run.checkpoint import Checkpoints
from parallax.run.watchdog import Watchdog

SAMPLED = 300  # tokens of text at the end


def held_out_loss(plan: Plan, axes: dict[str, Axis], compute: decoder.Compute):
    """A function from the model to its mean loss over the plan's held-out batches, on the same devices, without dropout."""
    one: Any = decoder.loss_step(gpt2.FAMILY, plan.config, plan.layout, plan.mesh, axes=axes, compute=compute)
    placed = lambda windows: jax.make_array_from_callback(windows.shape, plan.windows.sharding, lambda rows: windows[rows])
    return lambda model: float(np.mean([one(model, placed(windows)).block_until_ready() for windows in plan.held_out]))


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
    train: Any  # the compiled step
    held_out: Any
    checkpoints: Checkpoints
    skipped: metrics.Skipped
    clock: metrics.Clock
    sink: metrics.Sink
    progress: report.Progress
    rate: float  # flops per second
    memory: report.Memory | None

    def save(self, i: int, state: step.State) -> None:
        """Begin a checkpoint, with what the loop has counted."""
        with self.clock("checkpoints"):
            self.checkpoints.save(i, state, {"skipped": self.skipped.steps, "clock": self.clock.note()})

    def end(self, error: str) -> NoReturn:
        """Leave the loop, and say why."""
        self.progress.done()
        raise SystemExit(f"error: {error}")

    def measured(self, i: int, state: step.State, info: step.Info, took: float) -> dict[str, Any]:
        """The numbers of step `i`; ends the run where they say that it is lost."""
        s = self.plan.settings
        try:
            skip = self.skipped.count(i, info)
        except metrics.OverBudget as error:
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
            if not math.isfinite(found["held_out"]):
                self.end(
                    f"step {i}: the held-out loss is {found['held_out']}, so the model is lost. Lower --learning-rate (now "
                    f"{s.learning_rate}) and give --out another folder. The steps before are in {s.out}."
                )
        tokens = s.batch * self.plan.length
        flops = report.step_flops(self.plan.config, tokens, self.plan.length)
        return found | {"seconds": took, "tokens_per_second": tokens / took, "share": flops / took / self.rate}


def run(plan: Plan) -> None:
    """Train from where the folder's checkpoints end, evaluate, sample, and say where things are."""
    s, job, seconds = plan.settings, plan.job, {"start": time.perf_counter() - STARTED}
    say = report.printer(job)
    rate, measured = report.matrix_rate(job)
    axes, compute = chosen(plan), decoder.Compute(schedule=plan.schedule, max_norm=1.0, dtype=DTYPE())
    prepared = decoder.prepare(
        gpt2.FAMILY,
        plan.config,
        optimizer(s),
        plan.layout,
        plan.mesh,
        batch=s.batch,
        key=jax.random.key(s.seed),
        axes=axes,
        compute=compute,
    )
    checkpoints = Checkpoints(
        s.out / "checkpoints",
        settings=plan.numbers,
        lose_at_most=s.checkpoint_every,
        keep=s.keep,
        keep_every=s.keep_every,
        **decoder.stored(gpt2.FAMILY, plan.layout),
    )
    restored = checkpoints.restore(prepared.shapes)
    first, note = (0, {}) if restored is None else (restored.step, restored.note)
    if first == s.steps and (s.out / "sample.txt").exists():
        say(f"{s.out} holds this run, and it is finished, after {first:,} steps. To train again, give --out another folder.")
        return
    if job.rank == 0:
        claim_folder(plan)
    start = time.perf_counter()
    train: Any = prepared.train.lower(prepared.shapes, plan.windows).compile()  # pyright: ignore[reportFunctionMemberAccess]
    seconds["compile"] = time.perf_counter() - start
    say(describe(plan, report.sent(certificate.read(train, plan.mesh)), rate, measured, first))
    state = prepared.init() if restored is None else restored.state
    if plan.schedule.stages > 1 and job.rank == 0:
        draw.timeline(plan.schedule, s.out / "schedule.png")
    session = Session(
        plan,
        train,
        held_out_loss(plan, axes, compute),
        checkpoints,
        metrics.Skipped(s.skip_budget, note.get("skipped", [])),
        metrics.Clock(note.get("clock")),
        sinks(plan, first),
        report.Progress(s.steps, first, say, live=sys.stdout.isatty() and job.processes == 1),
        rate,
        report.Memory(train, s.out / "memory.png") if s.profile_memory and job.rank == 0 else None,
    )
    jax.block_until_ready(state)
    seconds["setup"] = time.perf_counter() - STARTED - sum(seconds.values())
    state = loop(session, state, first)
    session.progress.done()
    if int(state.step) < s.steps:
        say(f"told to end (SIGTERM): saved step {state.step:,} of {s.steps:,} in {s.out}. The same command goes on from there.")
        return
    if session.skipped.steps:
        say(f"{len(session.skipped.steps)} steps were skipped, since they were not finite: {session.skipped.steps}")
    finish(plan, state.model, seconds, session.clock)


def loop(session: Session, state: step.State, first: int) -> step.State:
    """The state after the last step, or after the one at which all processes were told to end."""
    plan, s, job = session.plan, session.plan.settings, session.plan.job
    batch = lambda i: prefetch.placed(plan.train, plan.windows.sharding, seed=s.seed, step=i, size=s.batch, length=plan.length)
    traced = plan.profiled if job.rank == 0 else range(0)
    with (
        Watchdog(job, seconds=s.watchdog) as watch,
        processes.preemption() as preempted,
        metrics.profiler(s.out / "profile", traced) as trace,
        session.checkpoints,
        prefetch.Prefetched(batch, first, s.steps) as batches,
    ):
        for i in range(first + 1, s.steps + 1):
            watch.step(i)
            trace(i)
            if session.memory is not None:
                session.memory.begin()
            start = time.perf_counter()
            placed = next(batches)
            watch.phase("train", waits=True)
            # Wait for every device, not only for the loss: on virtual CPU devices, programs in flight together can take all of
            # XLA's threads and wait for each other for ever.
            with session.clock("steps"):
                state, info = jax.block_until_ready(session.train(state, placed))
            took = time.perf_counter() - start
            watch.phase("measure", waits=True)
            record = session.measured(i, state, info, took)
            session.sink(i, record)
            session.progress.show({"step": i} | record)
            watch.phase("checkpoint", waits=True)
            session.checkpoints.check()
            stop = preempted(i)
            if stop or session.checkpoints.due(i) or i == s.steps:
                session.save(i, state)
            if stop:
                break
    if session.memory is not None:
        session.memory.end()
    return state


def finish(plan: Plan, model: gpt2.GPT2, seconds: dict[str, float], clock: metrics.Clock) -> None:
    """The sample, the picture, and the last lines: rank 0's work, for which the others bring their shards."""
    s, start, device = plan.settings, time.perf_counter(), jax.local_devices()[0]
    if plan.job.processes > 1:
        model = multihost_utils.process_allgather(model, tiled=True)
    if plan.job.rank > 0:
        return
    whole = decoder.joined(gpt2.FAMILY, plan.layout, jax.device_put(model, device))
    write = jax.jit(gpt2.sample, static_argnames=("tokens", "window"))
    key = jax.random.fold_in(jax.random.key(s.seed), s.steps)
    ids = write(whole, jnp.asarray(plan.prompt, jnp.int32), tokens=SAMPLED, window=plan.length, temperature=0.8, key=key)
    text = plan.tokenizer.decode(np.concatenate([plan.prompt, np.asarray(ids)]))
    print(f"\nsample, {SAMPLED} {plan.unit}s at temperature 0.8:\n{text}\n")
    seconds["sample"], start = time.perf_counter() - start, time.perf_counter()

    records = [json.loads(line) for line in (s.out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    title = f"GPT-2, {plan.config.parameters:,} parameters, {plan.axes}, {s.all_reduce} all-reduce: {s.text.name}"
    report.picture(s.out / "loss.png", records, plan.lines, tokens_per_step=s.batch * plan.length, unit=plan.unit, title=title)
    (s.out / "sample.txt").write_text(text + "\n", encoding="utf-8")
    seconds["picture"] = time.perf_counter() - start
    print("seconds: " + ", ".join(f"{name} {took:.1f}" for name, took in (seconds | clock.seconds).items()))
    loss, bigram = records[-1]["held_out"], plan.lines["bigram"]
    verdict = "below" if loss < bigram else "NOT below"
    print(
        f"held-out loss {loss:.3f} nats a {plan.unit}, {verdict} the bigram line of {bigram:.3f}; "
        f"{time.perf_counter() - STARTED:.0f} s in all, {clock.goodput():.0%} of the run's time in steps; checkpoints, "
        f"metrics.jsonl, loss.png and sample.txt are in {s.out}"
    )


def main() -> None:
    """Read the command line, meet the other processes, train; a mistake is told in a line."""
    settings = tyro.cli(Settings, prog=Path(__file__).name, description=__doc__)
    try:
        check(settings)
        job = processes.initialize(cpu_devices=settings.devices, say=lambda line: None)
    except ValueError as error:
        processes.end(f"error: {error}\n", 2)
    plan = processes.together(lambda: prepare(settings, job), job)
    processes.run(lambda: run(plan), job)


if __name__ == "__main__":
    main()
