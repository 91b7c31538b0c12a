"""Trains GPT-2 on two islands, and with plain data parallelism, on the same text. Each
island has four devices. The islands exchange their changes every 10 steps.

Run: python examples/islands.py, or with --quick for a few steps. All loss curves are
drawn in out/islands/losses.png. All runs begin with the same model, already trained
with data parallelism: from an untrained model, islands would fall further behind.
"""

# Estimate: a GPT-2 of 0.13 M numbers and 32 x 64 bytes a step are 6 x 0.13 M x 2048 =
# 1.6 GFLOP, 4 ms at the 450 GFLOP/s of two cores; messages between virtual devices take
# ten times that. 5 x 250 steps: 60 s, and 40 s to compile.

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


def everywhere(steps):
    """The mesh, the train step, and a function from its state to the model, for data
    parallelism over all eight devices."""
    layout = Layout(data=8)
    devices = mesh.make(data=8, stage=1, tensor=1)
    prepared = decoder.train_step(
        *(gpt2.FAMILY, CONFIG, adamw(steps), layout, devices),
        batch=BATCH,
        key=jax.random.key(0),
    )
    return devices, prepared, lambda state: state.model


def apart(steps, axis: AxisLike | ErrorFeedback = "island"):
    """The mesh, the train step, and a function from its state to the model, for islands
    of four devices each."""
    layout = Layout(data=8 // ISLANDS)
    devices = mesh.make(island=ISLANDS, data=8 // ISLANDS, stage=1, tensor=1)
    one_island = decoder.train_step(
        *(gpt2.FAMILY, CONFIG, adamw(steps), layout, devices),
        batch=BATCH // ISLANDS,
        key=jax.random.key(0),
    )
    prepared = on_islands.train_step(
        one_island, islands.outer_nesterov(0.7, 0.6), every=EVERY, axis=axis
    )
    return devices, prepared, islands.joint_model


def adamw(steps):
    return optax.adamw(optax.cosine_decay_schedule(RATE, steps, alpha=0.1))


def train(devices, prepared, model_of, *, steps, tokens, held_out, model=None, first=0):
    """Returns the held-out losses by step, the bytes that a device sends to the other
    island in each exchange (every `EVERY` steps), and the trained model."""
    window = functools.partial(data.batch, seed=0, length=CONFIG.context)
    evaluated_on = jnp.asarray(window(held_out, step=0, size=8 * BATCH))

    def whole(state):
        return jax.device_put(model_of(state), jax.devices()[0])

    @jax.jit
    def loss(model):
        return gpt2.loss(model, (evaluated_on, None))

    shape = jnp.zeros((BATCH, CONFIG.context + 1), jnp.int32)
    compiled = prepared.train.lower(prepared.shapes, shape).compile()
    entries = certificate.read(compiled, devices)
    sent = sum(entry.bytes for entry in entries if "island" in entry.axes)

    state = prepared.init(model)
    losses = {0: float(loss(whole(state)))}
    for i in range(1, steps + 1):
        # Virtual devices share threads, so a step ends before the next one begins.
        windows = jnp.asarray(window(tokens, step=first + i, size=BATCH))
        state, _ = jax.block_until_ready(prepared.train(state, windows))
        if i % EVERY == 0:
            losses[i] = float(loss(whole(state)))
    return losses, sent, whole(state)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="20 steps")
    steps = 2 * EVERY if parser.parse_args().quick else 250
    jax.config.update("jax_num_cpu_devices", 8)
    tokens, held_out = data.split(corpus.encode_file(TEXT, corpus.bytes_tokenizer()))
    texts = {"tokens": tokens, "held_out": held_out}

    # The first model learns from batches that no other run takes.
    before = everywhere(2 * steps)
    _, _, model = train(*before, steps=2 * steps, first=10**6, **texts)

    runs = {
        "data parallelism": everywhere(steps),
        f"islands, every {EVERY} steps": apart(steps),
        "islands, int8": apart(steps, ErrorFeedback("island")),
    }
    results = {}
    for name, run in runs.items():
        results[name] = train(*run, model=model, steps=steps, **texts)

    print(
        f"{steps} steps of {BATCH} x {CONFIG.context} bytes; {ISLANDS} islands of "
        f"{8 // ISLANDS} devices\n"
    )
    print(f"{'':<26}held-out loss   bytes between islands, per device and step")
    plain, *with_islands = results
    plain_loss = results[plain][0][steps]
    in_each_step = CONFIG.parameters * 4  # that data parallelism moves between halves
    print(f"{plain:<26}{plain_loss:13.4f}   {in_each_step:>12,}")
    for name in with_islands:
        losses, sent, _ = results[name]
        fewer, ratio = in_each_step * EVERY / sent, losses[steps] / plain_loss - 1
        print(
            f"{name:<26}{losses[steps]:13.4f}   {sent // EVERY:>12,}   "
            f"1/{fewer:.1f}; loss {ratio:+.2%}"
        )

    curves = {name: losses for name, (losses, _, _) in results.items()}
    path = pictures.losses("islands/losses", curves)
    print(f"\nThe curves are drawn in {path}.")
