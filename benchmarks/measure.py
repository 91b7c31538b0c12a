"""What the benchmarks share: rivals timed in turn, the machine's own rates, and what a compiled
program sends.

The machine drifts, so every comparison is made within one run, A B C A B C ..., and told as a ratio
of medians.
"""

import contextlib
import math
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from parallax.compiled import hlo

MB = 1e6
NUMBER = re.compile(r"[\d.e+-]+%?|nan|[\d.]+ (B|kB|MB|GB|\([\d.]+\))")


class Traffic(NamedTuple):
    """How often a kind of collective runs on each device in one call of a program, and the bytes of
    its results there."""

    count: int
    bytes: int


def virtual_devices(count: int) -> None:
    """Take `count` virtual CPU devices in this process. Call it before anything else touches a
    device."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)


def interleaved(
    rivals: Mapping[str, Callable[[], object]], *, rounds: int, calls: int = 1
) -> dict[str, list[float]]:
    """The seconds a call of each rival took in each round, the rivals one after another in every
    round.

    Each runs once beforehand, to warm up. `calls` of a short one are timed together.
    """
    for run in rivals.values():
        jax.block_until_ready(run())
    seconds: dict[str, list[float]] = {name: [] for name in rivals}
    for _ in range(rounds):
        for name, run in rivals.items():
            start = time.perf_counter()
            for _ in range(calls):
                jax.block_until_ready(run())
            seconds[name].append((time.perf_counter() - start) / calls)
    return seconds


def medians(seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The median of each rival's rounds."""
    return {name: statistics.median(rounds) for name, rounds in seconds.items()}


def matrix_product(size: int = 2048, count: int = 3) -> tuple[Callable[[], jax.Array], float]:
    """A rival that multiplies float32 matrices on the first device, and its floating-point
    operations.

    Its best round gives the machine's matrix rate, against which a model's 6 N operations a token
    are held.
    """
    x = jax.device_put(jnp.full((size, size), 1 / size), jax.devices()[0])
    product = jax.jit(lambda x: jax.lax.fori_loop(0, count, lambda _, y: y @ x, x))
    return lambda: product(x), 2.0 * size**3 * count


def copy(x: jax.Array) -> Callable[[], jax.Array]:
    """A rival that reads `x` once and writes as much into memory it already has, on all devices of
    `x`: a pass."""
    run = jax.jit(lambda x, _: x + 1, donate_argnums=1, keep_unused=True)
    held = [jax.block_until_ready(x + 1)]

    def once():
        held[0] = run(x, held[0])
        return held[0]

    return once


def temporary(compiled: jax.stages.Compiled) -> int:
    """The bytes that a compiled program needs on each device beside its arguments and results."""
    return compiled.memory_analysis().temp_size_in_bytes


def collectives(compiled: jax.stages.Compiled) -> dict[str, Traffic]:
    """What a compiled program sends in one call, by kind: what stands in a loop counts once a
    turn."""
    total: dict[str, Traffic] = {}
    for run in hlo.runs(hlo.module(compiled)):
        kind, nbytes = run.instruction.collective, sum(op.bytes for op in run.instruction.ops)
        before = total.get(kind, Traffic(0, 0))
        total[kind] = Traffic(before.count + run.times, before.bytes + run.times * nbytes)
    return total


def geometric_mean(values: Iterable[float]) -> float:
    """The geometric mean, and not a number of none."""
    logs = [math.log(value) for value in values]
    return math.exp(statistics.fmean(logs)) if logs else math.nan


def run_together(commands: Sequence[Sequence[str]], *, timeout: float) -> list[str]:
    """What these processes print, run side by side. If one fails or time runs out, all are ended,
    and that is the error."""
    processes = []
    with contextlib.ExitStack() as files:
        outputs = [files.enter_context(tempfile.TemporaryFile("w+")) for _ in commands]
        try:
            for command, output in zip(commands, outputs, strict=True):
                processes.append(subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT))
            end = time.monotonic() + timeout
            while (
                None in (codes := [process.poll() for process in processes])
                and not any(codes)
                and time.monotonic() < end
            ):
                time.sleep(0.05)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        texts = [output.seek(0) or output.read() for output in outputs]
    if any(code != 0 for code in codes):
        raise RuntimeError(
            f"Exit codes {codes} (None: ended, after {timeout:.0f} s or another's failure).\n"
            + "\n".join(texts)
        )
    return texts


def one_of_many(run: Callable[[], object], *, port: int, processes: int, process: int) -> None:
    """`run()` in one of `processes` over gloo, a device each, all in step. Where it fails, this
    process ends at once: the others would wait for it in a collective for minutes."""
    try:
        virtual_devices(1)
        jax.distributed.initialize(f"127.0.0.1:{port}", processes, process)
        run()
        jax.distributed.shutdown()
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def free_port() -> int:
    """A port on this machine that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def table(rows: Sequence[Mapping[str, object]]) -> str:
    """Rows of the same columns as text, numbers to the right, words to the left."""
    cells = [list(rows[0]), *[[str(value) for value in row.values()] for row in rows]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    left = [
        not all(NUMBER.fullmatch(cell) for cell in column[1:])
        for column in zip(*cells, strict=True)
    ]

    def align(row):
        return [
            c.ljust(w) if to_left else c.rjust(w)
            for c, w, to_left in zip(row, widths, left, strict=True)
        ]

    head, *body = ["  ".join(align(row)).rstrip() for row in cells]
    return "\n".join([head, "-" * len(head), *body])


def milliseconds(seconds: float) -> str:
    """Seconds as milliseconds of four digits."""
    return f"{1e3 * seconds:.4g}"


def size(count: float) -> str:
    """A number of bytes, in units of 1024."""
    for unit in ("B", "kB", "MB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GB"
