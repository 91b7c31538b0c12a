"""A model of your own as a pipeline: a U-shaped net with skip connections, split over 4
stages, with data parallelism.

Run: python examples/pipeline.py
"""

# Estimate: 4 stages and 16 microbatches take (16 + 3)(F + B) = 57 units of time instead
# of 48, where a forward is 1 and a backward 2. A stage holds at most 2 * 4 - 1 = 7
# microbatches.

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from parallax import draw, grads, mesh, pipeline, rules, schedule, step
from parallax.collectives import ring


class Net(eqx.Module):
    """The model. Each stage has its part of `blocks`, and all of the other arrays."""

    embed: jax.Array
    gate: jax.Array  # shared by all stages, and trained
    # [chunks, layers, width, width]: the layers are split over the stages.
    blocks: jax.Array
    out: jax.Array


def embed(net, part):
    """Returns the tree that goes from stage to stage (any tree is allowed): the stream
    `x`, and `skips`, an array of zeros for each stage. For the skip connections, each
    stage replaces its own zeros by its result."""
    x = part[0] @ net.embed
    return {"x": x, "skips": jnp.zeros((4, *x.shape))}


def layer(x, weight):
    return x + jnp.tanh(x @ weight), None


def stage(net, at, part, position):
    """Returns the output of stage `position` for `at`, the tree (see `embed`) that the
    previous stage sent. After its layers, stage 2 adds `gate` times the result of stage
    1, and stage 3 adds `gate` times the result of stage 0."""
    x, _ = jax.lax.scan(layer, at["x"], net.blocks)
    x = x + net.gate * jnp.where(position >= 2, at["skips"][3 - position], 0.0)

    result = {"x": x, "skips": at["skips"].at[position].set(x)}
    return pipeline.Output(result, aux={"size": jnp.mean(x**2)})


def head(net, at, part):
    """The loss, on the last stage."""
    return jnp.mean((at["x"] @ net.out - part[1]) ** 2)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    devices = mesh.make(data=2, stage=4)
    plan = schedule.one_f_one_b_lockstep(stages=4, microbatches=16)
    print(draw.summary(plan), draw.text(plan), sep="\n")

    def normal(i, *shape):
        return 0.3 * jax.random.normal(jax.random.key(i), shape)

    net = Net(
        normal(0, 16, 32), jnp.ones(32), normal(1, 1, 8, 32, 32), normal(2, 32, 1)
    )
    inputs = normal(3, 256, 16)
    targets = jnp.sin(10 * inputs[:, :1])

    grad = pipeline.value_and_grad(embed, stage, head, plan, ring("stage"))
    grad = grads.averaged(grad, ring("data"))

    rule = rules.first(rules.match("blocks", P(None, "stage")), rules.match("**", P()))
    state, specs = step.init(lambda: net, optax.adam(1e-2), rule, devices)
    train = step.make(grad, optax.adam(1e-2))
    train = jax.jit(
        mesh.spmd(
            train, mesh=devices, in_specs=(specs, P("data")), out_specs=(specs, P())
        )
    )
    for i in range(101):
        # Virtual devices share threads, so a step ends before the next one begins.
        state, info = jax.block_until_ready(train(state, (inputs, targets)))
        if i % 20 == 0:
            sizes = " ".join(f"{size:.2f}" for size in info.aux.stages["size"])
            print(f"step {i:3d}  loss {info.loss:.4f}  stages {sizes}")
