"""A GPT-2 over two processes whose link is slow: data parallelism, islands that talk seldom, and
islands that send int8.

    python benchmarks/islands.py [--quick]

The link is slowed by `tc` in a network namespace of its own, where the system allows that (Linux,
as root). Where it does not, a step that sends waits for as long as its bytes would have taken. The
table's title says which. See benchmarks/README.md.
"""

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import measure
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from parallax import islands, mesh
from parallax.collectives.int8 import ErrorFeedback
from parallax.compiled import certificate
from parallax.layout import Layout
from parallax.models import decoder, gpt2, on_islands

INSIDE = (
    "ip link set lo mtu 1500 up && tc qdisc add dev lo root tbf rate {rate}mbit burst 64kb "
    "latency 400ms && exec {command}"
)


def main():
    arguments = parse()
    if arguments.process is not None:
        return measure.one_of_many(
            lambda: report(arguments), port=arguments.port, processes=2, process=arguments.process
        )
    slowed = arguments.slowed or _allowed(arguments.rate)
    if slowed and not arguments.slowed:
        again = " ".join([sys.executable, __file__, "--slowed", *sys.argv[1:]])
        inside = INSIDE.format(rate=arguments.rate, command=again)
        sys.exit(subprocess.run(["unshare", "-n", "sh", "-c", inside], check=False).returncode)
    flags = [*sys.argv[1:], f"--port={measure.free_port()}"]
    commands = [[sys.executable, __file__, f"--process={i}", *flags] for i in range(2)]
    first, *_ = measure.run_together(commands, timeout=arguments.timeout)
    print(first[first.index("A GPT-2") :])


def _allowed(rate: int) -> bool:
    """Whether this system lets us slow down a link of our own."""
    if not all(map(shutil.which, ("unshare", "ip", "tc", "sh"))):
        return False
    tried = ["unshare", "-n", "sh", "-c", INSIDE.format(rate=rate, command="true")]
    return subprocess.run(tried, check=False, capture_output=True).returncode == 0


def report(arguments: argparse.Namespace):
    """Train each rival in turn, and print the table on both processes."""
    sizes = {
        "layers": 2,
        "heads": 4,
        "width": 32 if arguments.quick else 512,
        "context": 32,
        "vocabulary": 256,
    }
    config, steps = gpt2.Config(**sizes), arguments.every * arguments.rounds
    rivals = {
        "data parallelism": everywhere(config),
        "islands": apart(config, arguments.every, "island"),
    }
    rivals["islands, int8"] = apart(config, arguments.every, ErrorFeedback("island"))
    how = (
        "tc's token bucket on the loopback"
        if arguments.slowed
        else "a wait of our own after each step that sends"
    )
    size = config.parameters * 4 / measure.MB
    print(
        f"A GPT-2 of {size:.1f} MB over two processes, {arguments.rate} Mb/s by {how}; {steps} "
        f"steps, H = {arguments.every}\n"
    )
    rows, first = [], None
    for name, (devices, prepared, between) in rivals.items():
        sent, seconds, loss = trained(devices, prepared, config, steps, between, arguments)
        first = first or seconds
        predicted = (
            sent * steps / between * 16e-6 / arguments.rate
        )  # both ways on one loopback: 2 x 8 bits a byte
        rows.append(
            {
                "rival": name,
                "MB a step": f"{sent / between / measure.MB:.3f}",
                "s of messages (predicted)": f"{predicted:.1f}",
                "s measured": f"{seconds:.1f}",
                "to data parallelism": f"{seconds / first:.2f}",
                "loss": f"{loss:.3f}",
            }
        )
    print(measure.table(rows), flush=True)


def everywhere(config: gpt2.Config) -> tuple[jax.sharding.Mesh, Any, int]:
    """Data parallelism: gradients are averaged in each step."""
    layout = Layout(data=2)
    devices = mesh.make(**layout.axes)
    return (
        devices,
        decoder.train_step(
            gpt2.FAMILY, config, optax.adamw(1e-3), layout, devices, batch=8, key=jax.random.key(0)
        ),
        1,
    )


def apart(config: gpt2.Config, every: int, axis: Any) -> tuple[jax.sharding.Mesh, Any, int]:
    """Two islands of one process each."""
    devices = mesh.make(island=2, **Layout().axes)
    one_island = decoder.train_step(
        *(gpt2.FAMILY, config, optax.adamw(1e-3), Layout(), devices), batch=4, key=jax.random.key(0)
    )
    prepared = on_islands.train_step(one_island, islands.outer_nesterov(), every=every, axis=axis)
    return devices, prepared, every


def trained(devices, prepared, config, steps, between, arguments) -> tuple[int, float, float]:
    """The bytes that a device sends when it talks, the seconds of all steps after the first round,
    and the last loss here."""
    split = NamedSharding(devices, P(devices.axis_names[0]))
    compiled = prepared.train.lower(
        prepared.shapes, jax.ShapeDtypeStruct((8, config.context + 1), jnp.int32, sharding=split)
    ).compile()
    sent = sum(
        entry.bytes
        for entry in certificate.read(compiled, devices)
        if devices.axis_names[0] in entry.axes
    )
    state, start, loss = prepared.init(), 0.0, np.nan
    for number in range(1 - between, steps + 1):
        if number == 1:
            start = time.perf_counter()
        windows = np.random.default_rng((0, number + between)).integers(
            0, config.vocabulary, (8, config.context + 1)
        )
        placed = jax.make_array_from_callback(
            windows.shape, split, windows.astype(np.int32).__getitem__
        )
        state, info = jax.block_until_ready(prepared.train(state, placed))
        loss = float(np.ravel(info.loss.addressable_data(0))[0])
        if not arguments.slowed and number % between == 0:
            time.sleep(sent * 16e-6 / arguments.rate)
    return sent, time.perf_counter() - start, loss


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", type=int, default=100, help="megabits a second (100)")
    parser.add_argument("--every", type=int, default=10, help="H, steps between two rounds (10)")
    parser.add_argument("--rounds", type=int, default=3, help="(3)")
    parser.add_argument("--timeout", type=float, default=500, help="seconds (500)")
    parser.add_argument("--quick", action="store_true", help="a small model, to see that it works")
    parser.add_argument("--slowed", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--process", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
