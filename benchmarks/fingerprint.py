"""What it costs to compare the copies of a training state: one check, and as a share of the steps
between two.

    python benchmarks/fingerprint.py [--quick]

A GPT-2 under two layouts on eight virtual CPU devices, steps and checks in turn. See
benchmarks/README.md for the columns.
"""

import argparse
import sys

import jax
import jax.numpy as jnp
import measure
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from parallax import mesh
from parallax.layout import Layout
from parallax.models import decoder, gpt2
from parallax.run import fingerprint

DEVICES = 8
LAYOUTS = {
    "data 8": Layout(data=8),
    "data 2 x stage 2 x tensor 2, ZeRO-1": Layout(
        data=2, stage=2, tensor=2, microbatches=2, zero=1
    ),
}


def main():
    arguments = parse()
    measure.virtual_devices(DEVICES)
    config = gpt2.Config(
        layers=arguments.layers, heads=4, width=arguments.width, context=64, vocabulary=256
    )
    size = f"A GPT-2 of {config.parameters:,} parameters, {arguments.batch} x 64 tokens a step"
    print(f"{size}; medians of {arguments.rounds} rounds.\n")
    print(measure.table([row(name, layout, config, arguments) for name, layout in LAYOUTS.items()]))


def row(
    name: str, layout: Layout, config: gpt2.Config, arguments: argparse.Namespace
) -> dict[str, str]:
    """One layout: bytes by arithmetic and compiled, milliseconds by the machine's own rate and
    measured."""
    devices = mesh.make(**layout.axes)
    key = jax.random.key(0)
    made = decoder.train_step(
        gpt2.FAMILY, config, optax.adamw(1e-3), layout, devices, batch=arguments.batch, key=key
    )
    state, train = made.init(), made.train
    windows = np.random.default_rng(0).integers(256, size=(arguments.batch, 65), dtype=np.int32)
    placed, held = mesh.place(windows, P("data"), devices), [state]

    def step():
        held[0], _ = train(held[0], placed)
        return held[0]

    leaves = len(jax.tree.leaves(state))
    program = fingerprint.lower(state).compile()
    read = sum(
        shard.data.nbytes for leaf in jax.tree.leaves(state) for shard in leaf.addressable_shards
    )
    memory = mesh.place(
        jnp.zeros((read // 4 // DEVICES * DEVICES,)), P(tuple(devices.axis_names)), devices
    )
    rivals = {
        "step": step,
        "check": lambda: fingerprint.differing(held[0]),
        "pass": measure.copy(memory),
    }
    took = measure.medians(measure.interleaved(rivals, rounds=arguments.rounds))
    gathered = measure.collectives(program)
    return {
        "layout": name,
        "leaves": str(leaves),
        "not compared": str(len(fingerprint.uncompared(state))),
        "state": measure.size(read / DEVICES),
        "gathered": measure.size(8 * leaves * DEVICES),
        "compiled": " + ".join(
            f"{traffic.count} of {measure.size(traffic.bytes)}" for traffic in gathered.values()
        ),
        "temporaries": measure.size(measure.temporary(program)),
        "pass ms": measure.milliseconds(took["pass"]),
        "check ms": measure.milliseconds(took["check"]),
        "step ms": measure.milliseconds(took["step"]),
        f"every {arguments.every}": f"{took['check'] / (arguments.every * took['step']):.3%}",
    }


def parse() -> argparse.Namespace:
    """The arguments; `--quick` changes their defaults."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="see in seconds that it works; the numbers mean nothing",
    )
    small, usual = (
        {"layers": 2, "width": 16, "batch": 8, "rounds": 2},
        {"layers": 4, "width": 128, "batch": 16, "rounds": 11},
    )
    for name, value in (small if "--quick" in sys.argv else usual).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--every", type=int, default=50, help="steps from one check to the next")
    return parser.parse_args()


if __name__ == "__main__":
    main()
