"""One net split by data, by layer (tensor) and by network (pipeline): what a device
holds, what moves, and that all agree.

Run: python examples/three_ways_to_split.py
"""

# Estimate: 8 layers of 64 x 256 and back are 262 k weights, 2.1 MB in float64; the
# batch is 128 rows of 64. In one pass over 8 devices each sends: by data, all gradients
# round the ring, 2 * 7/8 * 2.1 MB = 3.7 MB; by layer, two sums of the [128, 64]
# activations a layer, 16 * 2 * 7/8 * 66 kB = 1.8 MB; by network, 8 rows to and fro in
# 16 + 7 ticks, 0.19 MB, and it rests in 7 of 23 ticks. All do 6 * 262 k * 128 = 0.2
# GFLOP, nothing. What takes 10 s is compiling.

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from parallax import compiled, grads, mesh, pipeline, rules, schedule, tensor
from parallax.collectives import cost, ring

N, LAYERS, WIDTH, HIDDEN, ROWS, M = (
    8,
    8,
    64,
    256,
    128,
    16,
)  # N devices, M microbatches for the pipeline


class Net(eqx.Module):
    """`blocks` holds `up` and `down` of all layers, as one chunk for the pipeline."""

    embed: jax.Array  # [inputs, width]
    blocks: dict[str, jax.Array]  # [chunk, layers, inputs, outputs]
    out: jax.Array  # [width, outputs]


def embed(net, part):
    return part[0] @ net.embed


def stage(
    net, x, part, position, axis=()
):  # `axis`: the devices that share each layer; (): nobody does
    def layer(x, w):
        hidden = jnp.tanh(tensor.column(x, w["up"], None, axis))
        return x + tensor.row(hidden, w["down"], None, axis), None

    return jax.lax.scan(layer, x, net.blocks)[0]


def head(net, x, part):
    return jnp.mean((x @ net.out - part[1]) ** 2)


def loss(net, batch, axis=()):
    return pipeline.unpipelined(embed, functools.partial(stage, axis=axis), head)(
        net, batch
    )


GRADS = {  # the same arrow, (net, batch) -> (loss, gradients), three times
    "data": grads.averaged(jax.value_and_grad(loss), ring("data")),
    "tensor": jax.value_and_grad(functools.partial(loss, axis=ring("tensor"))),
    "stage": pipeline.value_and_grad(
        embed, stage, head, schedule.one_f_one_b_lockstep(N, M), ring("stage")
    ),
}
UP, DOWN, WHOLE = (
    P(None, None, None, "tensor"),
    P(None, None, "tensor"),
    rules.match("**", P()),
)
HELD = {  # by each device, in words and as a rule for the weights
    "data": ("the whole net, 16 of 128 rows", WHOLE),
    "tensor": (
        "1/8 of each layer",
        rules.first(
            rules.match("blocks.up", UP), rules.match("blocks.down", DOWN), WHOLE
        ),
    ),
    "stage": (
        "one of the 8 layers",
        rules.first(rules.match("blocks.*", P(None, "stage")), WHOLE),
    ),
}


def predicted(net: Net) -> dict[str, int]:
    """The bytes that a device sends in one pass, by formula."""
    summed = lambda tree: sum(
        cost.of(ring.all_reduce, leaf.nbytes, N, itemsize=8).sent
        for leaf in jax.tree.leaves(tree)
    )
    value, x = (
        jnp.zeros(()),
        jnp.zeros((ROWS, WIDTH)),
    )  # the loss, and what goes from layer to layer
    stages = 2 * (M + N - 1) * x.nbytes // M + summed(
        (value, net.embed, net.out)
    )  # microbatches to and fro, and what all have
    return {
        "data": summed((value, net)),
        "tensor": 2 * LAYERS * summed(x),
        "stage": stages,
    }


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", N)
    jax.config.update(
        "jax_enable_x64", True
    )  # so that a difference would be a mistake, and not rounding
    normal = lambda i, *shape: (
        jax.random.normal(jax.random.key(i), shape) / shape[-2] ** 0.5
    )
    blocks = {
        "up": normal(1, 1, LAYERS, WIDTH, HIDDEN),
        "down": normal(2, 1, LAYERS, HIDDEN, WIDTH),
    }
    net, inputs = (
        Net(normal(0, 16, WIDTH), blocks, normal(3, WIDTH, 4)),
        jax.random.normal(jax.random.key(4), (ROWS, 16)),
    )
    batch = inputs, jnp.sin(inputs[:, :4])
    alone = jax.jit(jax.value_and_grad(loss))(net, batch)
    size = lambda tree: sum(
        leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree)
    )
    print(
        f"A net of {LAYERS} layers, {size(net) / 1e6:.2f} MB in float64, {ROWS} rows. "
        f"One device: loss {alone[0]:.15f}"
    )
    for axis, grad in GRADS.items():
        sizes: dict[str, Any] = {axis: N}
        devices, rows, (words, rule) = (
            mesh.make(**sizes),
            P("data") if axis == "data" else P(),
            HELD[axis],
        )
        specs = rules.specs(net, rule, devices)
        held = mesh.place(net, specs, devices), mesh.place(batch, rows, devices)
        program: Any = jax.jit(
            mesh.spmd(
                grad, mesh=devices, in_specs=(specs, rows), out_specs=(P(), specs)
            )
        )
        program = program.lower(*held).compile()
        value, gradients = jax.block_until_ready(program(*held))
        apart = jax.tree.map(
            lambda a, b: float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b))),
            gradients,
            alone[1],
        )
        moved, worked = (
            compiled.certificate.read(program, devices),
            program.memory_analysis().temp_size_in_bytes,
        )
        print(f"\nsplit over {N} devices along {axis!r}: loss {value:.15f}")
        print(
            f"  each holds   {words}: {size(held[0]) / 1e6:.2f} MB of weights; it "
            f"works in {worked / 1e6:.2f} MB"
        )
        print(
            f"  each sends   {predicted(net)[axis]:,} bytes by formula; "
            f"{sum(e.bytes for e in moved):,} in the compiled program,"
        )
        print(
            "               "
            + ", ".join(
                f"{e.count} {e.kind}s, {e.hops} one after another" for e in moved
            )
        )
        print(
            "  gradients    differ from one device's by "
            f"{max(jax.tree.leaves(apart)):.1e} of the largest in a leaf, at most"
        )
