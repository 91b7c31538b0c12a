"""Calls a function of Parallax inside a jitted model with shardings, and a jitted model
inside a train step of Parallax. Both programs give the same losses.

Run: python examples/inside_jit.py.
"""

# Estimate: a batch of 32 x 64 meets a table of 512 x 64, 2 MFLOP forward, so a step
# takes milliseconds. Over "tensor" the loss sends a maximum and a sum for each of 8
# tokens and the gradient of x, 8 x 64 numbers or 4 kB; over "data" XLA sends the
# gradients of the first layer and of the half table, (64 + 256) x 64 numbers or 164 kB.

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from parallax import cross_entropy, grads, mesh, rules, step, tensor
from parallax.collectives import ring
from parallax.compiled import certificate

STEPS, BATCH, WIDTH, WORDS = 20, 32, 64, 512
optimizer = optax.sgd(0.5)


def make_weights():
    keys = jax.random.split(jax.random.key(0))
    return {
        "in": jax.random.normal(keys[0], (WIDTH, WIDTH)) / 8,
        "table": jax.random.normal(keys[1], (WORDS, WIDTH)) / 8,
    }


def plain_loss(weights, batch):
    x, targets = batch
    logits = jnp.tanh(x @ weights["in"]) @ weights["table"].T
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, targets))


def inside(devices, batch):
    """Returns the losses of a jitted model that XLA splits over the devices. The model
    calls `split_loss`, a loss of Parallax, with the rows of `table` split over
    "tensor"."""

    def split_loss(x, table, targets):
        x = tensor.copy_to(x, ring("tensor"))
        return ring.all_mean(
            cross_entropy.mean(x, table, targets, ring("tensor")), "data"
        )

    head = mesh.spmd(
        split_loss,
        mesh=devices,
        in_specs=(P("data"), P("tensor"), P("data")),
        out_specs=P(),
    )
    weights = mesh.place(make_weights(), {"in": P(), "table": P("tensor")}, devices)
    batch = mesh.place(batch, P("data"), devices)

    def loss(weights, batch):
        return head(jnp.tanh(batch[0] @ weights["in"]), weights["table"], batch[1])

    @jax.jit
    def train(weights, batch):
        value, gradients = jax.value_and_grad(loss)(weights, batch)
        return optax.apply_updates(
            weights, jax.tree.map(lambda g: -0.5 * g, gradients)
        ), value

    print(
        certificate.table(
            certificate.read(train.lower(weights, batch).compile(), devices)
        )
    )
    losses = []
    for _ in range(STEPS):
        weights, value = jax.block_until_ready(train(weights, batch))
        losses.append(float(value))
    return losses


def around(devices, batch):
    """Returns the losses of a train step of Parallax. The step gives each device a part
    of the batch, and calls the jitted `plain_loss`, which is written for one device."""
    everywhere = ("data", "tensor")
    state, specs = step.init(make_weights, optimizer, rules.match("**", P()), devices)
    grad = grads.averaged(jax.value_and_grad(jax.jit(plain_loss)), ring(everywhere))
    train = mesh.spmd(
        step.make(grad, optimizer),
        mesh=devices,
        in_specs=(specs, P(everywhere)),
        out_specs=(specs, P()),
    )
    train, losses = jax.jit(train), []
    for _ in range(STEPS):
        state, info = jax.block_until_ready(train(state, batch))
        losses.append(float(info.loss))
    return losses


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_enable_x64", True)
    devices = mesh.make(data=4, tensor=2)
    batch = (
        jax.random.normal(jax.random.key(1), (BATCH, WIDTH)),
        jnp.arange(BATCH, dtype=jnp.int32),
    )
    print("What a step of the jitted model with our loss sends:")
    curves = [inside(devices, batch), around(devices, batch)]
    print(f"loss of step 1: {curves[0][0]:.6f}, of step {STEPS}: {curves[0][-1]:.6f}")
    difference = max(abs(a - b) / b for a, b in zip(*curves, strict=True))
    print(
        "Ours inside jit and jit inside our step differ by "
        f"{difference:.1e} of the loss at most."
    )
