"""Trains GPT-2 for 16 steps on 1 device, and data-parallel on 4 devices. Compares the
time of a step, the loss at each step, and the memory of a device in each step.

Run: python examples/gpt2_ddp_profile.py
"""

# Estimate: 0.83 M weights and 16 sequences of 64 bytes are (6 N + 12 L D T) tokens =
# 5.5 GFLOP a step, 12 ms at the 450 GFLOP/s of two cores. Virtual devices take turns on
# those cores, so 4 are as fast as 1; 4 real ones would be 4 times as fast, less the
# message: all gradients round the ring, 2 * 3/4 * 3.3 MB = 5 MB a device, 1 ms at 5
# GB/s. Memory: weights 3.3 MB, AdamW's moments 6.7 MB, gradients 3.3 MB on each device;
# of activations, some 100 MB for 16 sequences, a quarter.

import os
import time
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import corpus
import pictures
from parallax import data, layout, mesh
from parallax.collectives import ring
from parallax.compiled import certificate
from parallax.models import decoder, gpt2

TEXT = Path(__file__).resolve().parent / "data" / "state_of_the_union.txt"
CONFIG = gpt2.Config(layers=4, heads=4, width=128, context=64, vocabulary=256)
STEPS, BATCH = 16, 16


def windows(tokens, i):
    return data.batch(tokens, seed=0, step=i, size=BATCH, length=CONFIG.context)


def held(tree) -> int:
    """The bytes of the arrays in `tree` on the first device."""
    shards = (
        shard for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards
    )
    return sum(
        shard.data.nbytes for shard in shards if shard.device == jax.devices()[0]
    )


class Run(NamedTuple):
    """The results of 16 steps: each device's own loss before the first step, and for
    each step the mean loss, the seconds and the memory."""

    own: list[float]
    losses: list[float]
    seconds: list[float]
    memory: list[float]  # bytes on the first device during the step
    kept: dict[str, int]
    works_in: int
    sent: int


def run(n: int, tokens: np.ndarray) -> Run:
    plan = layout.Layout(data=n)
    devices = mesh.make(**plan.axes, devices=jax.devices()[:n])
    compute = decoder.Compute(axes={"data": ring("data")})
    options = {"batch": BATCH, "key": jax.random.key(0), "compute": compute}
    prepared = decoder.train_step(
        gpt2.FAMILY, CONFIG, optax.adamw(1e-3), plan, devices, **options
    )
    batches = [mesh.place(windows(tokens, i), P("data"), devices) for i in range(STEPS)]
    train = prepared.train.lower(prepared.shapes, batches[0]).compile()
    state, works_in = prepared.init(), train.memory_analysis().temp_size_in_bytes

    def local(model, part):
        return gpt2.loss(model, (part, None))[None]  # nothing is reduced

    own = jax.jit(
        mesh.spmd(local, mesh=devices, in_specs=(P(), P("data")), out_specs=P("data"))
    )(state.model, batches[0])
    kept = {"weights": held(state.model), "AdamW's moments": held(state.optimizer)}
    losses, seconds, memory = [], [], []
    for batch in batches:
        memory.append(held((state, batch)) + works_in)
        start = time.perf_counter()
        state, info = jax.block_until_ready(
            train(state, batch)
        )  # virtual devices share threads
        seconds.append(time.perf_counter() - start)
        losses.append(float(info.loss))
    # Sums over axes of one device, which have no axes here, send nothing.
    sent = sum(e.bytes for e in certificate.read(train, devices) if e.axes)
    return Run(
        [float(loss) for loss in own], losses, seconds, memory, kept, works_in, sent
    )


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 4)
    tokens, _ = data.split(corpus.encode_file(TEXT, corpus.bytes_tokenizer()))
    one, four = (run(n, tokens) for n in (1, 4))
    print(
        f"GPT-2 of {CONFIG.parameters:,} parameters, {STEPS} steps of {BATCH} "
        f"sequences of {CONFIG.context} bytes\n"
    )
    print(
        "before step 1 the 4 devices' own losses are "
        f"{'  '.join(f'{loss:.4f}' for loss in four.own)};"
    )
    print(
        f"their mean, all-reduced, is the step's: {four.losses[0]:.4f}; one device "
        f"alone has {one.losses[0]:.4f}\n"
    )
    print("step   1 device  4 devices   (nats per byte)")
    for i in (0, 3, 7, 11, STEPS - 1):
        print(f"{i + 1:4d} {one.losses[i]:10.5f} {four.losses[i]:10.5f}")
    apart = max(abs(a / b - 1) for a, b in zip(four.losses, one.losses, strict=True))
    print(
        f"largest difference in {STEPS} steps: {apart:.1e} of the loss, which is "
        "float32's rounding\n"
    )
    print("a device          1 device  4 devices")

    def median(run):
        return float(np.median(run.seconds[2:]))

    print(f"ms a step         {1000 * median(one):8.1f} {1000 * median(four):10.1f}")
    print(f"MB sent a step    {one.sent / 1e6:8.2f} {four.sent / 1e6:10.2f}")
    for name in one.kept:
        print(
            f"MB of {name:<15}{one.kept[name] / 1e6:5.2f} {four.kept[name] / 1e6:10.2f}"
        )
    print(f"MB it works in    {one.works_in / 1e6:8.2f} {four.works_in / 1e6:10.2f}\n")
    print(
        f"speed-up {median(one) / median(four):.2f}: virtual devices share "
        f"{os.cpu_count()} cores; 4 real ones do 1/4 each"
    )
    path = pictures.memory(
        "gpt2_ddp_profile/memory",
        {"1 device": one.memory, "4 devices": four.memory},
        one.kept,
    )
    print(f"The memory of the first device, step by step, is drawn in {path}.")
