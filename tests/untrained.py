"""`examples/gpt2.py` without a model: its start, loop, files and checkpoints as they are, around a
step that computes next to nothing. The loss of a step is told by the test.
"""

import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import jax
import jax.numpy as jnp

from gpt2_run import train
from gpt2_run.plan import prepare
from gpt2_run.settings import Settings, check
from parallax.run import lock
from parallax.run.checkpoint import Checkpoints
from parallax.run.job import Job
from parallax.step import Info, State

TEXT = "".join(chr(ord("a") + 7 * i % 26) for i in range(4000))
SMALL: dict[str, Any] = {
    **{
        "layers": 1,
        "heads": 1,
        "width": 4,
        "length": 8,
        "batch": 8,
        "microbatches": 1,
        "stage": 1,
        "tensor": 1,
    },
    **{"evaluate_every": 1, "evaluate_tokens": 64, "checkpoint_every": 2, "compare": 0},
}


def state_of(step: int) -> State:
    """What a run without spikes has computed by then."""
    return State({"w": jnp.arange(3.0, dtype=jnp.float32) * step}, (), jnp.asarray(step, jnp.int32))


class Step:
    """A train step that counts, and tells the loss of `losses(step, windows)`."""

    def __init__(self, losses: Callable[[int, Any], float]):
        self.losses = losses

    def lower(self, *_: Any) -> Any:
        return self

    def compile(self) -> Any:
        return self

    def __call__(
        self, state: State, windows: Any, weights: None = None, limit: float = math.inf
    ) -> tuple[State, Info]:
        step = int(state.step) + 1
        loss = jnp.asarray(self.losses(step, windows), jnp.float32)
        skipped = bool(loss > limit)
        w = state.model["w"] if skipped else state.model["w"] + jnp.arange(3.0, dtype=jnp.float32)
        return State({"w": w}, (), jnp.asarray(step, jnp.int32)), Info(
            loss, jnp.ones(()), jnp.asarray(skipped)
        )


def run(
    folder: Path,
    *,
    losses: Callable[[int, Any], float] = lambda step, windows: 1 / step,
    done: Callable[[int], None] = lambda step: None,
    **options: Any,
) -> int:
    """Run the example in one process, in `folder`/out. Returns the step that it went on from.

    Args:
        done: is told each step whose save is finished; the loop waits for it.
        options: flags.
    """
    text = folder.with_name("text.txt")
    text.write_text(TEXT)
    given: dict[str, Any] = (
        SMALL | {"text": text, "out": folder / "out", "devices": jax.device_count()} | options
    )
    settings = Settings(**given)
    check(settings)
    began = []

    class Told(Checkpoints):
        def restore(self, *arguments: Any, **more: Any) -> Any:
            restored = super().restore(*arguments, **more)
            began.append(0 if restored is None else restored.step)
            return restored

        def save(self, step: int, *arguments: Any, **more: Any) -> None:
            super().save(step, *arguments, **more)
            self.wait()
            done(step)

    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding),
        state_of(0),
    )
    prepared = SimpleNamespace(
        init=lambda model=None: state_of(0), shapes=shapes, train=Step(losses)
    )
    decoder = SimpleNamespace(
        train_step=lambda *_, **__: prepared, stored=lambda *_, **__: None, Compute=lambda **_: None
    )
    finish = lambda session, *_: train.write_whole(
        session.plan.settings.out / "sample.txt", "done\n"
    )
    replaced = {
        "Checkpoints": Told,
        "decoder": decoder,
        "finish": finish,
        "describe": lambda *_: "",
        "chosen": lambda _: {},
    }
    replaced |= {
        "held_out_loss": lambda *_: lambda model: 1.0,
        "certificate": SimpleNamespace(read=lambda *_: None),
    }
    measured = {"sent": lambda _: {}, "matrix_rate": lambda: (1.0, "")}
    with (
        mock.patch.multiple(train, **replaced),
        mock.patch.multiple(train.report, **measured),
        lock.take(settings.out),
    ):
        train.run(prepare(settings, Job()), time.perf_counter())
    return began[0]
