"""The training loop of `examples/gpt2.py`. Before the loop, the model is prepared or
restored; after the loop, the sample and the report are written."""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from gpt2_run import one_device, page, report, trackers
from gpt2_run.plan import (
    CHECKPOINTS,
    Plan,
    chosen,
    claim_folder,
    default_dtype,
    describe,
    optimizer,
    prepare,
    write_whole,
)
from gpt2_run.session import Session, limited
from gpt2_run.settings import Settings
from parallax import draw, step
from parallax.compiled import certificate
from parallax.data import prefetch
from parallax.models import decoder, gpt2
from parallax.run import fingerprint, lock, metrics, processes
from parallax.run.checkpoint import Checkpoints
from parallax.run.retention import Retention
from parallax.run.spikes import Spiked, Spikes
from parallax.run.watchdog import Watchdog

SAMPLED = 300  # tokens of text at the end


def held_out_loss(plan: Plan, compute: decoder.Compute) -> Callable[[gpt2.GPT2], float]:
    """Returns a function from the model to its mean loss over the held-out batches of
    the plan. The loss is computed without dropout, on the mesh of the plan."""
    loss: Any = decoder.loss_step(
        gpt2.FAMILY, plan.config, plan.layout, plan.mesh, compute=compute
    )

    def batch_loss(model, windows):
        placed = jax.make_array_from_callback(
            windows.shape, plan.windows.sharding, lambda rows: windows[rows]
        )
        return loss(model, placed).block_until_ready()

    def mean_loss(model):
        return float(np.mean([batch_loss(model, windows) for windows in plan.held_out]))

    return mean_loss


def run(plan: Plan, started: float) -> None:
    """Trains from the last checkpoint, if there is one, to the last step. Then writes a
    sample, the model and the report, and prints where these files are."""
    s, seconds = plan.settings, {"start": time.perf_counter() - started}
    with Watchdog(plan.job, seconds=s.watchdog, first=s.start_up) as watch:
        session, state, first = begin(plan, watch, seconds, started)
        if session is None:
            return
        state = steps(session, state, first)
    session.progress.done()

    say = report.printer(plan.job)
    if int(state.step) < s.steps:
        saved = f"saved step {state.step:,} of {s.steps:,} in {s.out}"
        say(
            f"told to end ({session.told}): {saved}. The same command goes on from "
            "there."
        )
        return
    if skipped := session.skipped.steps:
        say(f"{len(skipped)} steps were skipped, since they were not finite: {skipped}")
    finish(session, state.model, seconds, started)


def begin(
    plan: Plan, watch: Watchdog, seconds: dict[str, float], started: float
) -> tuple[Session | None, Any, int]:
    """Does all that comes before the first step of this process. Returns the session,
    the state and the number of steps already done; no session (None) if the run is
    finished already.

    Args:
        seconds: a dict from parts of the run to seconds. `begin` adds three entries:
            "compile", "one device" (the first steps, computed on one device) and
            "setup" (the rest of the time before the first step).
    """
    s, job = plan.settings, plan.job
    say = report.printer(job)
    watch.phase("prepare", waits=True)
    rate, measured = report.matrix_rate()
    compute = decoder.Compute(
        axes=chosen(plan), schedule=plan.schedule, max_norm=1.0, dtype=default_dtype()
    )
    prepared = prepared_step(plan, compute)

    watch.phase("restore", waits=True)
    checkpoints = checkpoints_of_run(plan)
    restored = checkpoints.restore(prepared.shapes)
    first, note = (0, {}) if restored is None else (restored.step, restored.note)
    if first == s.steps and (s.out / "sample.txt").exists():
        say(
            f"{s.out} holds this run, and it is finished, after {first:,} steps. To "
            "train again, give --out another folder."
        )
        return None, None, first
    if job.rank == 0:
        claim_folder(plan)

    watch.phase("compile", waits=True)
    start = time.perf_counter()
    spikes = None if s.spike_factor is None else Spikes(s.spike_factor, s.spike_budget)
    shapes = prepared.shapes, plan.windows, *limited(spikes)
    train: Any = prepared.train.lower(*shapes).compile()  # pyright: ignore[reportFunctionMemberAccess]
    seconds["compile"] = time.perf_counter() - start
    sent = report.sent(certificate.read(train, plan.mesh))
    described = describe(plan, sent, rate, measured, first)
    say(described)

    watch.phase("compare", waits=True)
    start = time.perf_counter()
    one_device_losses = one_device.losses(plan) if first == 0 else []
    seconds["one device"] = time.perf_counter() - start

    state = prepared.init(plan.begins_with) if restored is None else restored.state
    if plan.schedule.stages > 1 and job.rank == 0:
        draw.timeline(plan.schedule, s.out / "schedule.png")
    session = Session(
        plan,
        watch,
        prepared,
        train,
        held_out_loss(plan, compute),
        checkpoints,
        rate,
        note.get("rollbacks", []),
        spikes,
        described,
        train,
        one_device_losses,
    )
    session.begin(first, note)
    if s.fingerprint_every:
        say(report.copies(state, s.fingerprint_every))
    jax.block_until_ready(state)
    seconds["setup"] = time.perf_counter() - started - sum(seconds.values())
    return session, state, first


def prepared_step(plan: Plan, compute: decoder.Compute) -> decoder.TrainStep:
    """Returns the train step of the plan, ready to compile."""
    return decoder.train_step(
        gpt2.FAMILY,
        plan.config,
        optimizer(plan.settings),
        plan.layout,
        plan.mesh,
        batch=plan.settings.batch,
        key=jax.random.key(plan.settings.seed),
        compute=compute,
    )


def checkpoints_of_run(plan: Plan) -> Checkpoints:
    """Returns the `Checkpoints` in the folder of the run. A run with any layout can
    restore them."""
    s = plan.settings
    return Checkpoints(
        s.out / CHECKPOINTS,
        settings=plan.numbers,
        lose_at_most=s.checkpoint_every,
        keep=Retention(newest=s.keep, every=s.keep_every),
        form=decoder.stored(gpt2.FAMILY, plan.layout, schedule=plan.schedule),
    )


def steps(session: Session, state: step.State, first: int) -> step.State:
    """Returns the state after the loop. If the devices' copies of the state differ, or
    losses spike, the loop begins again from a checkpoint."""
    with processes.preemption() as preempted, session.checkpoints:
        while True:
            try:
                return loop(session, state, first, preempted)
            except (fingerprint.CopiesDiffer, Spiked) as error:
                # The traceback holds the state; its memory is for the restored one.
                reason = error.with_traceback(None)
            state, first = session.back(reason)


def loop(
    session: Session, state: step.State, first: int, preempted: processes.StopRequest
) -> step.State:
    """Returns the state after the last step, or after the step at which all processes
    were told to end."""
    plan, job, watch = session.plan, session.plan.job, session.watch
    s, past = plan.settings, session.past
    sizes = {"size": s.batch, "length": plan.length}

    def batch(i):
        return prefetch.placed(
            plan.train, plan.windows.sharding, seed=s.seed, step=i + past, **sizes
        )

    traced = plan.profiled if job.rank == 0 else range(0)
    with (
        trackers.profiler(s.out / "profile", traced) as trace,
        prefetch.Prefetched(batch, first, s.steps) as batches,
    ):
        for i in range(first + 1, s.steps + 1):
            watch.step(i)
            trace(i)
            start = time.perf_counter()
            placed = next(batches)
            watch.phase("train", waits=True)
            # Wait for every device, not only for the loss: on virtual CPU devices,
            # programs in flight together can take all of XLA's threads and wait for
            # each other for ever.
            with session.clock("steps"):
                state, info = jax.block_until_ready(session.one_step(state, placed))
            took = time.perf_counter() - start
            watch.phase("measure", waits=True)
            record = session.measured(i, state, info, took)
            session.sink(i, record)
            session.progress.show({"step": i} | record)
            if i == len(session.one_device) and "loss" in record:
                session.progress.done()
                report.printer(job)(one_device.summary({"step": i} | record))
            watch.phase("checkpoint", waits=True)
            session.checkpoints.check()
            stop = preempted(i)
            saves = stop or session.checkpoints.due(i) or i == s.steps
            session.compare(i, state, saves=saves)
            if saves:
                session.save(i, state)
            if stop:
                session.told = preempted.by
                break
    return state


def finish(
    session: Session, model: gpt2.GPT2, seconds: dict[str, float], started: float
) -> None:
    """Writes the sample, the model and the report, and prints the last lines. Rank 0
    does this alone; the other ranks send their shards of the model."""
    plan, s, start = session.plan, session.plan.settings, time.perf_counter()
    if plan.job.processes > 1:
        model = multihost_utils.process_allgather(model, tiled=True)
    if plan.job.rank > 0:
        return
    model = jax.device_put(model, jax.local_devices()[0])
    whole = decoder.joined(gpt2.FAMILY, plan.layout, model, schedule=plan.schedule)
    text = sample(plan, whole)
    write_whole(s.out / "sample.txt", text + "\n")
    seconds["sample"], start = time.perf_counter() - start, time.perf_counter()

    records = metrics.recorded(s.out / "metrics.jsonl")
    page.curve(s.out / "loss.png", records, plan)
    saved = gpt2.save(whole, s.out / "model")
    if plan.unit == "byte":  # a tokenizer that has no files
        saved = f"{s.out / 'model'} holds the model."
    seconds["picture"] = time.perf_counter() - start
    parts = seconds | session.clock.seconds
    page.write(
        s.out / "report.html",
        plan,
        session.program,
        described=session.described,
        comparison=one_device.table(records),
        sample=text,
        seconds=parts,
    )
    print("seconds: " + ", ".join(f"{name} {took:.1f}" for name, took in parts.items()))
    loss, bigram = records[-1]["held_out"], plan.lines["bigram"]
    verdict = "below" if loss < bigram else "NOT below"
    goodput = session.clock.goodput()
    print(
        f"held-out loss {loss:.3f} nats per {plan.unit}, {verdict} the bigram model's "
        f"loss of {bigram:.3f}\n"
        f"{time.perf_counter() - started:.0f} s in all, {goodput:.0%} of the run's "
        "time in steps\n"
        f"{s.out / 'report.html'} shows all of the run; loss.png, sample.txt, "
        "metrics.jsonl and the checkpoints are beside it\n"
        f"{saved}"
    )


def sample(plan: Plan, model: gpt2.GPT2) -> str:
    """Returns the text that the model writes after the prompt, and prints this text."""
    write = jax.jit(gpt2.sample, static_argnames=("tokens", "window"))
    key = jax.random.fold_in(jax.random.key(plan.settings.seed), plan.settings.steps)
    options = {"tokens": SAMPLED, "window": plan.length, "temperature": 0.8, "key": key}
    ids = np.asarray(write(model, jnp.asarray(plan.prompt), **options))

    drawn = ids[ids >= 0]  # -1: the logits were nan
    text = plan.tokenizer.decode(np.concatenate([plan.prompt, drawn]))
    print(f"\nsample, {len(drawn)} {plan.unit}s at temperature 0.8:\n{text}\n")
    return text


def main(settings: Settings, claim: lock.Lock | None, started: float) -> None:
    """Connects to the other processes, and trains. If a flag or an input is wrong, an
    error is printed in one line, and the output folder stays as it was.

    Args:
        claim: the lock on the output folder, if there is only one process. `None` if
            only JAX knows which process is rank 0; rank 0 then takes the lock here.
        started: the time at which the program began, from `time.perf_counter`.
    """
    claims = [claim] if claim else []

    def free():
        for lock_of_folder in claims:
            lock_of_folder.release()

    try:
        job = processes.initialize(
            cpu_devices=settings.devices,
            initialization_timeout=settings.connect,
            say=lambda line: None,
        )
    except ValueError as error:
        free()
        processes.end(f"error: {error}\n", processes.REFUSED)

    def prepared() -> Plan:
        if job.rank == 0 and not claims:
            claims.append(lock.take(settings.out))
        return prepare(settings, job)

    plan = processes.all_or_none(prepared, job, refused=free)

    def train() -> None:
        try:
            run(plan, started)
        except OSError as error:
            if processes.of_peers(error):
                raise
            raise SystemExit(
                f"error: {error}\nThe error changed no checkpoint in {settings.out}. "
                "The same command goes on from the last checkpoint in this folder."
            ) from error

    processes.run(train, job)
