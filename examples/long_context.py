"""Trains a small Llama on sequences of 8,192 bytes, on a mesh of context 4 x data 2.

Run: python examples/long_context.py [--quick]. It prints how memory grows with the
length T of a sequence, how evenly the devices divide the work, and the losses. The text
is a series of speeches, and a token attends only to tokens of its own speech.
"""

# Estimate: the T x T scores of 2 heads are 4 x 2 x 8192^2 = 0.5 GB in float32, for each
# layer, forward alone; tiles of 512 x 512 are 2 MB. A device of 4 holds 2,048 tokens: a
# quarter of what is kept. Two layers of width 32 on 2 sequences are 2 x 2 x 7 x 2 x 32
# x 8192^2 / 2 = 60 GFLOP a step, some seconds on two cores with their exponentials.

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import corpus
from parallax import context, data, mesh
from parallax.layout import Layout
from parallax.models import decoder, documents, llama

TEXT = Path(__file__).resolve().parent / "data" / "state_of_the_union.txt"
END = 0  # of a speech: a byte that no text has
SPEECHES = documents.ends_with(END)
ALONE, RING = Layout(), Layout(context=4)


def tokens():
    """Returns the bytes of the text to train on, with the byte `END` between speeches.
    The attention finds each `END`, and masks the tokens of other speeches."""
    text = TEXT.read_text(encoding="utf-8").replace("\n\nMr. ", chr(END) + "Mr. ")
    return data.split(corpus.bytes_tokenizer().encode(text))[0]


def prepared(layout, T, batch, optimizer, **compute):
    """Returns a small Llama's train step for `layout` and sequences of `T` tokens."""
    config = llama.Config(
        layers=2, heads=2, groups=1, width=32, hidden=64, context=T, vocabulary=256
    )
    devices = mesh.make(**layout.axes, devices=jax.devices()[: layout.devices])
    compute = decoder.Compute(documents=SPEECHES, **compute)
    options = {"batch": batch, "key": jax.random.key(0), "compute": compute}
    return decoder.train_step(
        llama.FAMILY, config, optimizer, layout, devices, **options
    )


def temporary(layout, T, **compute):
    """Returns the MB that a device needs besides the arguments, in a step of one
    sequence, as the compiled program says."""
    step = prepared(layout, T, 1, optax.sgd(0.1), **compute)
    program = step.train.lower(
        step.shapes, jax.ShapeDtypeStruct((1, T + 1), jnp.int32)
    ).compile()
    return program.memory_analysis().temp_size_in_bytes / 1e6


def memory(lengths):
    """Prints a line for each T: the memory of one device with T x T scores, of one
    device with tiles of scores, and of one of four devices in a ring."""
    print(
        f"{'T':>6}  {'T x T scores':>14}  {'tiles':>14}  {'1 of a ring of 4':>16}   MB "
        "of temporaries, one sequence"
    )
    for T in lengths:
        scores = 4 * 2 * T**2 / 1e6
        tiles, ring = (
            temporary(ALONE, T, attention=context.blockwise),
            temporary(RING, T),
        )
        print(
            f"{T:6,}  {'above ' + format(scores, ',.0f'):>14}  {tiles:14.1f}  "
            f"{ring:16.1f}   1/{tiles / ring:.1f}",
            flush=True,
        )


def balance():
    """Prints how many blocks of scores each of four devices computes, and how many of
    these blocks causal attention needs."""
    orders = {"zigzag": context.zigzag, "contiguous": context.contiguous}
    for name, order in orders.items():
        table = context.block_pairs(order, 4)
        # Half of a block on the diagonal is needed.
        local = table.chunks / 2 + table.own.shape[1]
        needed = [local + int(table.hops[:, i, :, 2].sum()) for i in range(4)]
        blocks = ", ".join(f"{number:g}" for number in needed)
        print(
            f"{name}: each device computes {table.blocks} blocks; devices 0 to 3 need "
            f"{blocks} of them"
        )


def train(T, steps):
    """Trains the small Llama on a mesh of context 4 x data 2, and prints the losses."""
    layout, text = Layout(data=2, context=4, zero=1), tokens()
    step = prepared(layout, T, 2, optax.adamw(1e-2))

    def windows(number):
        return data.batch(text, seed=0, step=number, size=2, length=T)

    all_windows = [jnp.asarray(windows(number)) for number in range(steps)]
    numbers = np.concatenate([np.asarray(SPEECHES(batch)) for batch in all_windows])
    print(f"Layout {layout}: {T // 4:,} tokens of each sequence on a device")
    print(
        f"{1 - documents.visible_share(numbers):.1%} of the pairs that are computed "
        "cross a cut between speeches, and are masked"
    )
    state = step.init()
    for number in range(steps):
        state, info = step.train(state, windows(number))
        print(f"step {number + 1:2}  loss {float(info.loss):.4f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="short sequences, to see that it runs"
    )
    quick = parser.parse_args().quick
    jax.config.update("jax_num_cpu_devices", 8)
    lengths = (256,) if quick else (2048, 4096, 8192)
    memory(lengths)
    balance()
    train(lengths[-1], 3 if quick else 4)
