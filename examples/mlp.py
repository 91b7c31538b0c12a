"""Train an `eqx.nn.MLP` on one device and on eight, with data parallelism: the same
losses.

A step all-reduces the float32 gradients of 5,313 parameters, 21 kB. In a ring
all-reduce, each of the eight devices sends 2 * 7/8 of these bytes, 37 kB.

Run: python examples/mlp.py
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from parallax import grads, mesh, rules, step

jax.config.update("jax_num_cpu_devices", 8)


def make_model():
    return eqx.nn.MLP(16, 1, width_size=64, depth=2, key=jax.random.key(0))


def loss(model, batch):
    inputs, targets = batch
    return jnp.mean((jax.vmap(model)(inputs) - targets) ** 2)


def losses(devices):
    optimizer = optax.adamw(1e-2)
    grad = grads.averaged(eqx.filter_value_and_grad(loss), "data")
    state, specs = step.init(make_model, optimizer, rules.match("**", P()), devices)

    train = step.make(grad, optimizer)
    train = mesh.spmd(
        train, mesh=devices, in_specs=(specs, P("data")), out_specs=(specs, P())
    )
    train = eqx.filter_jit(train, donate="all")

    for i in range(100):
        inputs = jax.random.normal(jax.random.key(i), (256, 16))
        batch = inputs, jnp.sin(inputs[:, :1])
        state, info = jax.block_until_ready(train(state, batch))
        yield float(info.loss)


if __name__ == "__main__":
    one = list(losses(mesh.make(devices=jax.devices()[:1], data=1)))
    eight = list(losses(mesh.make(data=8)))
    for i in (0, 9, 99):
        print(f"step {i + 1:3}  one device {one[i]:.5f}  eight devices {eight[i]:.5f}")
    difference = max(abs(a - b) for a, b in zip(one, eight, strict=True))
    print(f"largest difference {difference:.1e}")
