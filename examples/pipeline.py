"""A model of your own as a pipeline: 8 residual layers over 4 stages, data-parallel beside it. Run: python examples/pipeline.py.

On the back of the envelope: 4 stages and 16 microbatches take (16 + 3)(F + B) = 57 units of time instead of 48, where a forward
is 1 and a backward 2; and a stage holds at most 2 * 4 - 1 = 7 microbatches, whatever their number.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from parallax import draw, grads, mesh, pipeline, rules, schedule, step
from parallax.collectives import ring


class Net(eqx.Module):
    """`blocks` is [chunks, layers, width, width]: its layers are dealt out over the stages."""

    embed: Float[Array, "inputs width"]
    blocks: Float[Array, "chunks layers width width"]
    out: Float[Array, "width outputs"]


def enter(net, part):  # what enters the first stage
    return part[0] @ net.embed


def stage(blocks, x, part, position):  # one stage's layers, one after another
    return jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, blocks)[0]


def head(net, x, part):  # the loss, on the last stage
    return jnp.mean((x @ net.out - part[1]) ** 2)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    devices = mesh.make(data=2, stage=4)
    plan = schedule.one_f_one_b(stages=4, microbatches=16)
    print(draw.summary(plan), draw.text(plan), sep="\n")

    normal = lambda i, *shape: 0.3 * jax.random.normal(jax.random.key(i), shape)
    net = Net(normal(0, 16, 32), normal(1, 1, 8, 32, 32), normal(2, 32, 1))
    inputs = normal(3, 256, 16)
    targets = jnp.sin(10 * inputs[:, :1])

    grad = pipeline.value_and_grad(enter, stage, head, plan, ring("stage"))
    grad = grads.averaged(grad, ring("data"))
    optimizer = optax.adam(1e-2)
    rule = rules.first(rules.match("blocks", P(None, "stage")), rules.match("**", P()))
    state, specs = step.init(lambda: net, optimizer, rule, devices)
    train = jax.jit(mesh.spmd(step.make(grad, optimizer), mesh=devices, in_specs=(specs, P("data")), out_specs=(specs, P())))
    for i in range(101):
        state, info = jax.block_until_ready(train(state, (inputs, targets)))  # virtual devices share threads
        if i % 20 == 0:
            print(f"step {i:3d}  loss {info.loss:.4f}")
