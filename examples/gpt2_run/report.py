"""The text that a run prints: its plan before the first step, and then its progress.

Nothing in this file changes the results of the run. Legend: N parameters, L layers, D
width, T tokens of a sequence.
"""

import functools
import math
import os
import shutil
import socket
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from parallax import step
from parallax.compiled import certificate
from parallax.layout import Layout
from parallax.models import gpt2
from parallax.plan import quantity
from parallax.run import fingerprint, processes

# Before the first step


def table(rows: Iterable[tuple[str, str]]) -> str:
    """One row a line, the names in a column of their own; a row without a name
    continues the one above it."""
    return "\n".join(f"{name:<12} {text}" for name, text in rows)


def step_flops(config: gpt2.Config, tokens: int, length: int) -> int:
    """Returns the model's flops in a step of `tokens` tokens: 6 N + 12 L D T per token,
    for N parameters, L layers, width D and sequences of T = `length` tokens.

    6 N is a multiplication and an addition per parameter, once forward and twice
    backward. 12 L D T is the two products of attention, without a causal mask, forward
    and backward. Operations that `--remat` repeats are not counted.
    """
    return (6 * config.parameters + 12 * config.layers * config.width * length) * tokens


def sent(entries: list[certificate.Entry]) -> dict[str, int]:
    """The bytes that one device sends in a step, by mesh axis. They are exact for
    permutes; for XLA's own collectives, the bytes of the results are counted."""
    axes: dict[str, int] = {}
    for entry in entries:
        if entry.axes:  # along none, each device is alone, and sends nothing
            name = " x ".join(entry.axes)
            axes[name] = axes.get(name, 0) + entry.bytes
    return axes


def sending(all_reduce: str, by_axis: dict[str, int]) -> list[tuple[str, str]]:
    """Returns the rows of `table` that say how many bytes a device sends in a step.
    `by_axis` is the result of `sent`, and `all_reduce` the name of the algorithm."""
    if not by_axis:
        return [("collectives", "none: the compiled program sends nothing")]
    total = quantity(sum(by_axis.values()), "B")
    return [
        (
            "collectives",
            f"{all_reduce}: a device sends {total} a step (in the compiled program),",
        ),
        (
            "",
            ", ".join(
                f"{quantity(size, 'B')} over {axis}" for axis, size in by_axis.items()
            ),
        ),
    ]


def split(layout: Layout) -> str:
    """Returns a text that names the state that ZeRO splits, the precision, and the
    activations that the backward pass computes again. If the tensor axis splits the
    residual stream, or the messages between stages, the text says so."""
    sharded = (
        "nothing",
        "optimizer state",
        "optimizer state, gradients",
        "optimizer state, gradients, parameters",
    )
    split = f"ZeRO-{layout.zero}: {sharded[layout.zero]}"
    if layout.sequence:
        split += "; residual stream by tokens"
    if layout.split_sends:
        split += "; sends split over tensor"
    return (
        f"{split}; computes in {layout.precision} precision; computed again: "
        f"{layout.remat}"
    )


def copies(state: step.State, every: int) -> str:
    """A sentence: how many arrays are compared between devices, how often, and which
    have no copy."""
    number, alone = len(jax.tree.leaves(state)), fingerprint.uncompared(state)
    without = f"; {len(alone)} have no copy, such as {alone[0]}" if alone else ""
    return (
        f"copies of {number - len(alone)} of {number} arrays are compared every "
        f"{every} steps and before each save{without}"
    )


def machines() -> int:
    """The number of machines of the job. All processes call it."""
    name = np.uint32(zlib.crc32(socket.gethostname().encode()))
    return np.unique(multihost_utils.process_allgather(name)).size


def matrix_rate(seconds: float = 1.0) -> tuple[float, str]:
    """The flops per second of all devices of the job together, from the fastest of many
    float32 matrix products; and a text that says how this was measured."""
    devices = jax.local_devices()
    on_cpu = devices[0].platform == "cpu"
    size = 1024 if on_cpu else 8192
    x = jax.device_put(jnp.ones((size, size), jnp.float32), devices[0])
    product = jax.jit(jnp.matmul)
    product(x, x).block_until_ready()
    best, end = math.inf, time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        product(x, x).block_until_ready()
        best = min(best, time.perf_counter() - start)
    # The virtual devices of a machine share its cores.
    times = machines() if on_cpu else jax.device_count()
    share = "one virtual device, which has all the cores" if on_cpu else "one device"
    share += f", times {times}" if times > 1 else ""
    return times * 2 * size**3 / best, f"float32 {size} x {size}, measured on {share}"


def cores() -> int:
    """How many CPU cores this process may use."""
    return (
        len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1
    )


# During the steps


def printer(job: processes.Job) -> Callable[[str], Any]:
    """Returns a function that, on rank 0, prints a line and flushes the output. On the
    other ranks the function does nothing."""
    return functools.partial(print, flush=True) if job.rank == 0 else lambda line: None


class Progress:
    """Prints the state of a run: on a terminal, one line that is rewritten in place;
    elsewhere, a new line at each evaluation.

    Args:
        steps: the number of steps of the whole run.
        first: the number of steps done before this session.
        say: prints a line on rank 0, and does nothing on the other ranks.
        live: whether to rewrite one line in place.
    """

    def __init__(
        self, steps: int, first: int, say: Callable[[str], Any], *, live: bool
    ):
        self.steps, self.first, self._say = steps, first, say
        self.held_out = ""
        self._live = live
        self._recent = deque(maxlen=20)
        self._start = time.perf_counter()

    def show(self, record: Mapping) -> None:
        """Prints the line for the newest record; the rates are the mean of the last
        twenty steps."""
        step, evaluated = record["step"], "held_out" in record
        if evaluated:
            self.held_out = f"  held-out {record['held_out']:.3f}"
        self._recent.append(record)
        if not (self._live or evaluated):
            return
        per_step = (time.perf_counter() - self._start) / (step - self.first)
        left = round(per_step * (self.steps - step))
        loss = "skipped"
        if "skipped" not in record:
            loss = f"loss {record['loss']:.3f}  norm {record['gradient_norm']:.2f}"
        rate, share = self._mean("tokens_per_second"), self._mean("share")
        line = (
            f"step {step:>{len(str(self.steps))}}/{self.steps}  {loss}{self.held_out}  "
            f"{rate:,.0f} tokens/s  {share:.0%} of matrix rate  "
            f"{left // 60}:{left % 60:02} left"
        )
        if self._live:
            line = line.ljust(99)[: shutil.get_terminal_size().columns - 1]
            print(f"\r{line}", end="", flush=True)
        else:
            self._say(line)

    def _mean(self, field: str) -> float:
        return sum(record[field] for record in self._recent) / len(self._recent)

    def done(self) -> None:
        """Ends the line that was rewritten in place."""
        if self._live:
            print()
