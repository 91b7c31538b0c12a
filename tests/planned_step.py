"""A user's step, for `python -m parallax plan tests/planned_step.py:train --mesh data=256`."""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from parallax import grads, mesh, step
from parallax.collectives import ring

WIDTH, ROWS = 128, 16


def loss(weights, batch):
    return jnp.mean((jnp.tanh(batch @ weights["up"]) @ weights["down"] - batch) ** 2)


def train(world):
    """A step with momentum over `data`, and the shapes of its state and its batch."""
    optimizer = optax.sgd(1e-3, momentum=0.9)
    shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)
    weights = {"up": shape(WIDTH, 4 * WIDTH), "down": shape(4 * WIDTH, WIDTH)}
    state = step.State(
        weights, jax.eval_shape(optimizer.init, weights), jax.ShapeDtypeStruct((), jnp.int32)
    )
    local = step.make(grads.averaged(jax.value_and_grad(loss), ring("data")), optimizer)
    mapped = mesh.spmd(local, mesh=world, in_specs=(P(), P("data")), out_specs=(P(), P()))
    return jax.jit(mapped, donate_argnums=0), (state, shape(ROWS * world.shape["data"], WIDTH))
