"""A small GPT-2 trained for real, in one process or several, with faults to order: what
`test_faults` starts, kills and restarts.

    mpirun -n 4 python tests/process_train.py FOLDER --steps 12 --every 4 --raise-at 7 --rank 2

It goes on from FOLDER/checkpoints where that holds a run. At the end rank 0 writes FOLDER/end.npz,
the whole state.
"""

import argparse
import ctypes
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from parallax import mesh
from parallax.collectives import ring
from parallax.data import prefetch
from parallax.layout import Layout
from parallax.models import decoder, gpt2
from parallax.run import metrics, processes
from parallax.run.checkpoint import Checkpoints
from parallax.run.retention import Retention
from parallax.run.watchdog import Watchdog

CONFIG = gpt2.Config(
    layers=2,
    heads=2,
    width=16,
    context=12,
    vocabulary=61,
    vocabulary_multiple=8,
    dropout=0.1,
    attention_dropout=0.1,
)
BATCH = 8
LAYOUTS = {
    "pipeline": Layout(data=2, stage=2, tensor=2, microbatches=2),
    "plain": Layout(data=4, tensor=2),
    "small": Layout(
        data=4
    ),  # compiled in a third of the time: for faults that do not ask how a step is split
    "one": Layout(microbatches=2),
}
TOKENS = np.random.default_rng(0).integers(CONFIG.vocabulary, size=5000)

# How a rank stops working without an error; `return` leaves the loop.
LEAVE = {
    "exit": lambda: sys.exit(0),
    "return": lambda: None,
    "os._exit": lambda: os._exit(0),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "hold the lock": lambda: ctypes.PyDLL(None).sleep(3600),
}


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layout", default="pipeline", choices=LAYOUTS)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--every", type=int, default=4, help="steps from one save to the next")
    parser.add_argument(
        "--pause",
        type=float,
        default=0.0,
        help="seconds to wait in each step, so that there is time for a fault",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--seconds", type=float, default=120, help="the watchdog's, for a step after the first"
    )
    parser.add_argument("--budget", type=int, default=2)
    parser.add_argument("--rank", type=int, default=0, help="the rank that fails")
    parser.add_argument("--raise-at", type=int)
    parser.add_argument("--sleep-at", type=int)
    parser.add_argument("--leave-at", type=int)
    parser.add_argument("--leave-by", choices=LEAVE)
    parser.add_argument(
        "--start-up", type=float, default=300.0, help="seconds within which all processes connect"
    )
    parser.add_argument("--heartbeat", type=int, default=10)
    parser.add_argument(
        "--late",
        type=float,
        default=0.0,
        help="seconds before the processes meet, as of slow imports",
    )
    parser.add_argument("--nan-at", type=int, nargs="*", default=[])
    for name in ("coordinator", "process", "processes"):  # instead of a launcher
        parser.add_argument(f"--{name}", type=str if name == "coordinator" else int)
    return parser.parse_args()


def on_disk(layout):
    """How a state of the layout is stored."""
    return decoder.stored(gpt2.FAMILY, layout)


def poisoned(train, steps):
    """The step with weights that are not a number at the given steps: so are its loss and its
    gradients, and it is skipped."""
    steps = jnp.asarray(steps, jnp.int32)

    def poison(state, windows):
        bad = jnp.any(state.step == steps)
        weights = state.model.wpe
        new, info = train(
            eqx.tree_at(lambda s: s.model.wpe, state, jnp.where(bad, jnp.nan, weights)), windows
        )
        return eqx.tree_at(lambda s: s.model.wpe, new, jnp.where(bad, weights, new.model.wpe)), info

    return poison


def train(job: processes.Job, options) -> None:
    layout = LAYOUTS[options.layout]
    axes = mesh.make(**layout.axes, devices=jax.devices()[: layout.devices])
    made = decoder.train_step(
        gpt2.FAMILY,
        CONFIG,
        optax.adamw(1e-2),
        layout,
        axes,
        batch=BATCH,
        key=jax.random.key(options.seed),
        # Rings add up in one order on any number of processes; the sums of `jax.lax` do not.
        compute=decoder.Compute(
            axes={name: ring(name) for name in layout.axes}, dtype=jnp.dtype("float64")
        ),
    )
    state, one_step = made.init(), made.train
    one_step = jax.jit(poisoned(one_step, options.nan_at), donate_argnums=0)
    checkpoints = Checkpoints(
        options.folder / "checkpoints",
        settings={"seed": options.seed},
        lose_at_most=2 * options.every,
        keep=Retention(2),
        form=on_disk(layout),
    )
    restored = checkpoints.restore(state)
    first, note = (0, {}) if restored is None else (restored.step, restored.note)
    state = state if restored is None else restored.state
    skipped = metrics.Skipped(options.budget, note.get("skipped", []))
    clock = metrics.Clock(note.get("clock"))
    sink = (
        metrics.jsonl(options.folder / "metrics.jsonl", after=first)
        if job.rank == 0
        else metrics.to_all()
    )
    sharding = mesh.shardings(P("data"), axes)
    batches = prefetch.Prefetched(
        lambda i: prefetch.placed(
            TOKENS, sharding, seed=options.seed, step=i, size=BATCH, length=CONFIG.context
        ),
        first,
        options.steps,
    )
    save = lambda number: checkpoints.save(
        number, state, {"skipped": skipped.steps, "clock": clock.note()}
    )
    with (
        Watchdog(job, seconds=options.seconds, first=1200.0) as watch,
        processes.preemption() as preempted,
        checkpoints,
        batches,
    ):
        for i in range(first, options.steps):
            watch.step(i, "fault")
            time.sleep(options.pause)
            if job.rank == options.rank and i in (
                options.raise_at,
                options.sleep_at,
                options.leave_at,
            ):
                (options.folder / "fault").write_text(repr(time.time()))
            if job.rank == options.rank and i == options.raise_at:
                raise ArithmeticError(f"injected in rank {job.rank}")
            if job.rank == options.rank and i == options.sleep_at:
                watch.phase("a long sleep")
                time.sleep(3600)
            if job.rank == options.rank and i == options.leave_at:
                LEAVE[options.leave_by]()
                return
            watch.phase("train", waits=True)
            with clock("steps"):
                state, info = jax.block_until_ready(one_step(state, next(batches)))
            number = i + 1
            try:
                skipped.count(number, info)
            except metrics.OverBudget as error:
                save(number)
                checkpoints.wait()
                raise SystemExit(f"stopped: {error}") from error
            sink(number, {"loss": float(info.loss)})
            checkpoints.check()
            watch.phase("checkpoint", waits=True)
            if preempted(number):
                save(number)
                say(job, f"preempted: saved step {number}")
                return
            if checkpoints.due(number) or number == options.steps:
                save(number)
    say(job, f"finished with goodput {clock.goodput():.2f}, skipped {skipped.steps}")
    whole(job, state, axes, layout, options.folder / "end.npz")


def say(job, words):
    if job.rank == 0:
        print(words, flush=True)


def whole(job, state, axes, layout, path):
    """The end of the run, on the host, in the form that all layouts share."""
    form = on_disk(layout)
    to_disk = (lambda state: state) if form is None else form.to_disk
    state = jax.jit(to_disk, out_shardings=mesh.shardings(P(), axes))(state)
    if job.rank == 0:
        leaves: Any = {
            jax.tree_util.keystr(at): np.asarray(leaf)
            for at, leaf in jax.tree.leaves_with_path(state)
        }
        np.savez(path, **leaves)


def main() -> None:
    options = arguments()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_x64", True)
    time.sleep(options.late)
    job = processes.initialize(
        options.coordinator,
        options.processes,
        options.process,
        cpu_devices=LAYOUTS[options.layout].devices,
        initialization_timeout=options.start_up,
        heartbeat_timeout=options.heartbeat,
    )
    processes.run(lambda: train(job, options), job)


if __name__ == "__main__":
    main()
