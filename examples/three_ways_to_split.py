"""Splits the training of one net in three ways: the rows of the batch (data), the
inside of each layer (tensor), or the sequence of layers (pipeline). For each way,
prints what a device holds and sends, and compares the gradients with those of a run on
one device.

Run: python examples/three_ways_to_split.py
"""

# Estimate: 8 layers of 64 x 256 and back are 262 k weights, 2.1 MB in float64; the
# batch is 128 rows of 64. In both passes together, each of 8 devices sends: for data,
# all gradients round the ring, 2 * 7/8 * 2.1 MB = 3.7 MB; for tensor, two sums of the
# [128, 64] activations a layer, 16 * 2 * 7/8 * 66 kB = 1.8 MB; for the pipeline, 8 rows
# to and fro in 16 + 7 ticks, 0.19 MB. A device is idle in 7 of these 23 ticks. All
# compute 6 * 262 k * 128 = 0.2 GFLOP, about 1 ms; to compile takes 10 s.

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from parallax import compiled, grads, mesh, pipeline, rules, schedule, tensor
from parallax.collectives import cost, ring

N, MICROBATCHES = 8, 16  # devices, and microbatches for the pipeline
LAYERS, WIDTH, HIDDEN, ROWS = 8, 64, 256, 128


class Net(eqx.Module):
    """`blocks` holds `up` and `down` of all layers, as one chunk for the pipeline."""

    embed: jax.Array  # [inputs, width]
    blocks: dict[str, jax.Array]  # [chunk, layers, inputs, outputs]
    out: jax.Array  # [width, outputs]


def embed(net, part):
    inputs, _ = part
    return inputs @ net.embed


def stage(net, x, part, position, axis=()):
    """Returns `x` after the layers. Each layer is split over the devices of `axis`."""

    def layer(x, weights):
        hidden = jnp.tanh(tensor.column(x, weights["up"], None, axis))
        return x + tensor.row(hidden, weights["down"], None, axis), None

    return jax.lax.scan(layer, x, net.blocks)[0]


def head(net, x, part):
    _, targets = part
    return jnp.mean((x @ net.out - targets) ** 2)


def loss(net, batch, axis=()):
    whole_stage = functools.partial(stage, axis=axis)
    return pipeline.unpipelined(embed, whole_stage, head)(net, batch)


# The same gradient function, (net, batch) -> (loss, gradients), three times.
PLAN = schedule.one_f_one_b_lockstep(N, MICROBATCHES)
GRADS = {
    "data": grads.averaged(jax.value_and_grad(loss), ring("data")),
    "tensor": jax.value_and_grad(functools.partial(loss, axis=ring("tensor"))),
    "stage": pipeline.value_and_grad(embed, stage, head, PLAN, ring("stage")),
}

# The weights that a device has, as a rule and in words.
WHOLE = rules.match("**", P())
RULES = {
    "data": WHOLE,
    "tensor": rules.first(
        rules.match("blocks.up", P(None, None, None, "tensor")),
        rules.match("blocks.down", P(None, None, "tensor")),
        WHOLE,
    ),
    "stage": rules.first(rules.match("blocks.*", P(None, "stage")), WHOLE),
}
WORDS = {
    "data": "the whole net, 16 of 128 rows",
    "tensor": "1/8 of each layer",
    "stage": "one of the 8 layers",
}


def predicted(net: Net) -> dict[str, int]:
    """Returns, for each axis, the bytes that a device sends in the forward and the
    backward pass together."""

    def summed(tree):
        sizes = [leaf.nbytes for leaf in jax.tree.leaves(tree)]
        return sum(cost.of(ring.all_reduce, n, N, itemsize=8).sent for n in sizes)

    value, x = jnp.zeros(()), jnp.zeros((ROWS, WIDTH))
    # Microbatches go to and fro; the loss and the ends of the net are on all stages.
    activations = 2 * (MICROBATCHES + N - 1) * x.nbytes // MICROBATCHES
    return {
        "data": summed((value, net)),
        "tensor": 2 * LAYERS * summed(x),
        "stage": activations + summed((value, net.embed, net.out)),
    }


def make_net() -> Net:
    def normal(seed, *shape):
        return jax.random.normal(jax.random.key(seed), shape) / shape[-2] ** 0.5

    blocks = {
        "up": normal(1, 1, LAYERS, WIDTH, HIDDEN),
        "down": normal(2, 1, LAYERS, HIDDEN, WIDTH),
    }
    return Net(normal(0, 16, WIDTH), blocks, normal(3, WIDTH, 4))


def bytes_on_a_device(tree) -> int:
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))


def largest_difference(gradients, expected) -> float:
    """Returns the largest relative difference over all leaves. The relative difference
    of a leaf is the largest absolute difference of its elements, divided by the largest
    absolute element of the same leaf of `expected`."""

    def relative(a, b):
        return float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b)))

    return max(jax.tree.leaves(jax.tree.map(relative, gradients, expected)))


def split(axis, net, batch, expected):
    """Splits the net along `axis`, and prints what a device holds and sends."""
    sizes: dict[str, Any] = {axis: N}
    devices = mesh.make(**sizes)
    specs = rules.specs(net, RULES[axis], devices)
    rows = P("data") if axis == "data" else P()

    placed_net = mesh.place(net, specs, devices)
    placed_batch = mesh.place(batch, rows, devices)
    program: Any = mesh.spmd(
        GRADS[axis], mesh=devices, in_specs=(specs, rows), out_specs=(P(), specs)
    )
    program = jax.jit(program).lower(placed_net, placed_batch).compile()
    value, gradients = jax.block_until_ready(program(placed_net, placed_batch))

    weights = bytes_on_a_device(placed_net) / 1e6
    temporary = program.memory_analysis().temp_size_in_bytes / 1e6
    entries = compiled.certificate.read(program, devices)
    sent = sum(entry.bytes for entry in entries)
    collectives = ", ".join(
        f"{entry.count} {entry.kind}s, {entry.hops} one after another"
        for entry in entries
    )
    difference = largest_difference(gradients, expected)
    print(
        f"\nsplit over {N} devices along {axis!r}: loss {value:.15f}\n"
        f"  each holds   {WORDS[axis]}: {weights:.2f} MB of weights, and "
        f"{temporary:.2f} MB of temporaries\n"
        f"  each sends   {predicted(net)[axis]:,} bytes by formula; {sent:,} in the "
        "compiled program,\n"
        f"               {collectives}\n"
        f"  gradients    differ from one device's by {difference:.1e} at most, "
        "relative to the largest gradient of each leaf"
    )


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", N)
    # In float64 a difference is a mistake, and not rounding.
    jax.config.update("jax_enable_x64", True)

    net = make_net()
    inputs = jax.random.normal(jax.random.key(4), (ROWS, 16))
    batch = inputs, jnp.sin(inputs[:, :4])
    value, expected = jax.jit(jax.value_and_grad(loss))(net, batch)
    print(
        f"A net of {LAYERS} layers, {bytes_on_a_device(net) / 1e6:.2f} MB in float64, "
        f"{ROWS} rows. One device: loss {value:.15f}"
    )
    for axis in GRADS:
        split(axis, net, batch, expected)
