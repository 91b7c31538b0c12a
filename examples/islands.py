# On the back of the envelope: a GPT-2 of 0.13 M numbers and 32 x 64 bytes a step are 6 x 0.13 M x 2048 = 1.6 GFLOP, 4 ms at the
# 450 GFLOP/s of two cores; messages between virtual devices take ten times that. 5 x 250 steps: 60 s, and 40 s to compile.
"""GPT-2 on two islands of four devices that talk every 10 steps, beside plain data parallelism on the same text.

Run: python examples/islands.py, or with --quick for a few steps. All loss curves are drawn in out/islands/losses.png. All runs
begin with one model, which data parallelism has trained: one that has learnt nothing yet loses more by islands.
"""

import argparse
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

import corpus
import pictures
from parallax import data, islands, mesh
from parallax.collectives import AxisLike
from parallax.collectives.int8 import ErrorFeedback
from parallax.compiled import certificate
from parallax.layout import Layout
from parallax.models import decoder, gpt2, on_islands

TEXT = Path(__file__).resolve().parent / "data" / "state_of_the_union.txt"
CONFIG = gpt2.Config(layers=2, heads=4, width=64, context=64, vocabulary=256)
BATCH, EVERY, ISLANDS = 32, 10, 2
RATE = 3e-3
BY_XLA = decoder.Compute(
    axes={"data": "data", "stage": "stage", "tensor": "tensor"}
)  # plain names: XLA moves the data


def everywhere(steps):
    """Data parallelism over all eight devices."""
    layout = Layout(data=8)
    devices = mesh.make(data=8, stage=1, tensor=1)
    prepared = decoder.train_step(
        *(gpt2.FAMILY, CONFIG, adamw(steps), layout, devices),
        batch=BATCH,
        key=jax.random.key(0),
        compute=BY_XLA,
    )
    return devices, prepared, lambda state: state.model


def apart(steps, axis: AxisLike | ErrorFeedback = "island"):
    """Islands of four devices each."""
    layout = Layout(data=8 // ISLANDS)
    devices = mesh.make(island=ISLANDS, data=8 // ISLANDS, stage=1, tensor=1)
    local = decoder.local_step(
        *(gpt2.FAMILY, CONFIG, adamw(steps), layout, devices),
        batch=BATCH // ISLANDS,
        key=jax.random.key(0),
        compute=BY_XLA,
    )
    prepared = on_islands.train_step(
        local, islands.outer_nesterov(0.7, 0.6), every=EVERY, axis=axis
    )
    return devices, prepared, islands.joint_model


def adamw(steps):
    return optax.adamw(optax.cosine_decay_schedule(RATE, steps, alpha=0.1))


def train(devices, prepared, model_of, *, steps, tokens, held_out, model=None, first=0):
    """The held-out losses by step, the bytes that a device sends to the other island each time that it does, and the model."""
    window = functools.partial(data.batch, seed=0, length=CONFIG.context)
    loss = jax.jit(
        lambda model: gpt2.loss(
            model, (jnp.asarray(window(held_out, step=0, size=8 * BATCH)), None)
        )
    )
    evaluated = lambda state: float(loss(jax.device_put(model_of(state), jax.devices()[0])))
    state = prepared.init(model)
    compiled = prepared.train.lower(
        prepared.shapes, jnp.zeros((BATCH, CONFIG.context + 1), jnp.int32)
    ).compile()
    sent = sum(
        entry.bytes for entry in certificate.read(compiled, devices) if "island" in entry.axes
    )
    losses = {0: evaluated(state)}
    for i in range(1, steps + 1):
        windows = jnp.asarray(window(tokens, step=first + i, size=BATCH))
        state, _ = jax.block_until_ready(
            prepared.train(state, windows)
        )  # virtual devices share threads
        if i % EVERY == 0:
            losses[i] = evaluated(state)
    return losses, sent, jax.device_put(model_of(state), jax.devices()[0])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="20 steps")
    steps = 2 * EVERY if parser.parse_args().quick else 250
    jax.config.update("jax_num_cpu_devices", 8)
    texts = dict(
        zip(
            ("tokens", "held_out"),
            data.split(corpus.encode_file(TEXT, corpus.bytes_tokenizer())),
            strict=True,
        )
    )
    runs = {
        "data parallelism": everywhere(steps),
        f"islands, every {EVERY} steps": apart(steps),
        "islands, int8": apart(steps, ErrorFeedback("island")),
    }
    *_, model = train(
        *everywhere(2 * steps), steps=2 * steps, first=10**6, **texts
    )  # batches that no other run takes
    found = {name: train(*run, model=model, steps=steps, **texts) for name, run in runs.items()}
    plain, *others = found
    numbers = CONFIG.parameters * 4  # what data parallelism moves between two halves, in each step
    print(
        f"{steps} steps of {BATCH} x {CONFIG.context} bytes; {ISLANDS} islands of {8 // ISLANDS} devices\n"
    )
    print(f"{'':<26}held-out loss   bytes between islands, a device and step")
    print(f"{plain:<26}{found[plain][0][steps]:13.4f}   {numbers:>12,}")
    for name in others:
        losses, sent, _ = found[name]
        ratio = losses[steps] / found[plain][0][steps] - 1
        print(
            f"{name:<26}{losses[steps]:13.4f}   {sent // EVERY:>12,}   1/{numbers * EVERY / sent:.1f}; loss {ratio:+.2%}"
        )
    print(
        f"\nThe curves are drawn in {pictures.losses('islands/losses', {name: run[0] for name, run in found.items()})}."
    )
