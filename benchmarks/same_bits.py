"""A GPT-2 step by cells (`same_bits`) beside the ordinary step, on one device and on eight.

    python benchmarks/same_bits.py [--quick]

For each it prints the ratios of the steps' times, of their temporary memory, and of the processor
time to compile them. See benchmarks/README.md.
"""

import argparse
import functools
import time

import jax
import measure
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from parallax import mesh, same_bits
from parallax.layout import Layout
from parallax.models import decoder, gpt2

CELLS = {"data 8": Layout(data=8), "data 4 x tensor 2": Layout(data=4, tensor=2)}


def main():
    arguments = parse()
    measure.virtual_devices(8)
    rows = [row for name in arguments.cells for row in compared(name, arguments)]
    print(f"By cells to ordinary, width {arguments.width}, {arguments.layers} layers")
    print(measure.table(rows))


def compared(name, arguments):
    """Yields a row for one device, and a row for eight."""
    layout = CELLS[name]
    config = gpt2.Config(
        layers=arguments.layers,
        heads=4,
        width=arguments.width,
        context=arguments.context,
        vocabulary=256,
    )
    tokens = np.zeros((arguments.batch, arguments.context + 1), np.int32)
    eight = mesh.make(**layout.axes)
    one = mesh.make(**dict.fromkeys(layout.axes, 1), devices=jax.devices()[:1])

    def prepared(layout, devices):
        return decoder.train_step(
            *(gpt2.FAMILY, config, optax.adamw(1e-3), layout, devices),
            batch=arguments.batch,
            key=jax.random.key(0),
            compute=decoder.Compute(max_norm=1.0),
        )

    step = prepared(layout, eight)
    state = jax.device_get(step.init())
    for devices, ordinary in ((one, prepared(Layout(), one)), (eight, step)):
        cells = decoder.compiled(
            *(step.local, step.shapes, step.specs),
            functools.partial(same_bits.spmd, cells=layout.axes, mesh=devices),
            step.keys,
            batch_spec=P(layout.batch_axes),
        )
        rivals = {"cells": cells, "ordinary": ordinary.train}
        programs, compiling = {}, {}
        for rival, train in rivals.items():
            start = time.process_time()
            programs[rival] = train.lower(state, tokens).compile()
            compiling[rival] = time.process_time() - start
        seconds = measure.interleaved(
            {rival: lambda train=train: train(state, tokens) for rival, train in rivals.items()},
            rounds=arguments.rounds,
        )
        times = measure.medians(seconds)
        memory = {rival: measure.temporary(program) for rival, program in programs.items()}
        yield {
            "cells": name,
            "devices": devices.size,
            "ordinary ms": measure.milliseconds(times["ordinary"]),
            "time": ratio(times),
            "memory": ratio(memory),
            "compile": ratio(compiling),
        }


def ratio(of):
    """By cells to ordinary."""
    return f"{of['cells'] / of['ordinary']:.2f}"


def parse():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="a small model, one kind of cells")
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=list(CELLS))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.cells, arguments.rounds = ["data 8"], 1
        arguments.width, arguments.context, arguments.batch = 16, 16, 8
    return arguments


if __name__ == "__main__":
    main()
