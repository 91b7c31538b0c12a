"""A GPT-2 on two meshes, with the same bits after five steps.

Run: python examples/same_bits.py. A train step for 8 devices along `data` runs on eight
devices, and on two devices that each do the work of four. The hash of all numbers of
the state is the same. Then the two meshes run ordinary steps, and the hashes differ.
"""

# Estimate: to compile takes nearly all of the time: 8 s for each of two programs, and
# 3 s for each ordinary one.

import functools
import hashlib

import jax
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from parallax import mesh, same_bits
from parallax.layout import Layout
from parallax.models import decoder, gpt2

CONFIG = gpt2.Config(layers=2, heads=4, width=32, context=16, vocabulary=64)
CELLS = Layout(data=8)
BATCH, STEPS = 16, 5


def prepared(layout, devices):
    """The train step of a layout on the mesh `devices`, with the function that makes
    its state."""
    return decoder.train_step(
        *(gpt2.FAMILY, CONFIG, optax.adamw(1e-3), layout, devices),
        batch=BATCH,
        key=jax.random.key(0),
    )


def by_cells(step, devices):
    """Returns the step for the layout `CELLS` (data 8), compiled for the mesh
    `devices`. The size of each axis of `devices` must divide that of the axis in
    `CELLS`."""
    spmd = functools.partial(same_bits.spmd, cells=CELLS.axes, mesh=devices)
    return decoder.compiled(
        *(step.local, step.shapes, step.specs, spmd, step.keys),
        batch_spec=P(CELLS.batch_axes),
    )


def digest(train, state):
    """A hash of the state after the steps."""
    for number in range(STEPS):
        random = np.random.default_rng(number)
        tokens = random.integers(64, size=(BATCH, 17), dtype=np.int32)
        state, _ = train(state, tokens)
    leaves = jax.tree.leaves(jax.device_get(state))
    hashed = hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in leaves))
    return hashed.hexdigest()[:16]


def main():
    jax.config.update("jax_num_cpu_devices", 8)
    eight = mesh.make(**CELLS.axes)
    two = mesh.make(data=2, stage=1, tensor=1, devices=jax.devices()[:2])
    step = prepared(CELLS, eight)
    state = jax.device_get(step.init())  # both runs begin with the same bits
    for name, devices in (("data 8", eight), ("data 2", two)):
        print(f"same bits  {name:6}", digest(by_cells(step, devices), state))
    ordinary = prepared(Layout(data=2), two)
    print("ordinary   data 8", digest(step.train, state))
    print("ordinary   data 2", digest(ordinary.train, state))


if __name__ == "__main__":
    main()
