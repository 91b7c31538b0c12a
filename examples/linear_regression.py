"""Linear regression. A straight line predicts one point, then a batch of points (by
`vmap`), then a batch that is split over devices. Then eight replicas train the line.

Run: python examples/linear_regression.py
"""

# Estimate: a line through 8,192 points is 4 FLOP a point forward and 8 backward, 0.1
# MFLOP a step: nothing. What takes time is its one message of loss, slope and
# intercept, 12 bytes and 14 hops round a ring of 8: about 1 ms on virtual devices. 200
# steps take a fraction of a second; imports and compiling, 3 s.

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from parallax import grads, mesh, rules, step
from parallax.collectives import bucketed, ring

SLOPE, INTERCEPT, POINTS, NOISE = 2.5, -1.25, 8192, 0.5


def predict(line, x):  # of one point: a number in, a number out
    return line["slope"] * x + line["intercept"]


def loss(line, batch):
    x, y = batch
    return jnp.mean((jax.vmap(predict, in_axes=(None, 0))(line, x) - y) ** 2)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    devices = mesh.make(data=8)
    key, noise = jax.random.split(jax.random.key(0))
    x = jax.random.uniform(key, (POINTS,), minval=-2, maxval=2)
    y = SLOPE * x + INTERCEPT + NOISE * jax.random.normal(noise, (POINTS,))
    line = {"slope": jnp.ones(()), "intercept": jnp.zeros(())}

    one = predict(line, x[0])
    print(f"one point         x = {x[0]:.4f} -> {one:.4f}")

    predict_batch = jax.vmap(predict, in_axes=(None, 0))  # the same, of many points
    batch = predict_batch(line, x)
    print(f"a batch by vmap   {batch.size} points, the first -> {batch[0]:.4f}")

    # Each device predicts its own points.
    specs = {"in_specs": (P(), P("data")), "out_specs": P("data")}
    over_devices = jax.jit(mesh.spmd(predict_batch, mesh=devices, **specs))
    split = over_devices(line, x)
    size, equal = split.addressable_shards[0].data.size, int((batch == split).sum())
    print(f"over 8 devices    {size} points on each, the first -> {split[0]:.4f}")
    print(f"batch and devices agree to the last bit on {equal} of {POINTS} points\n")

    # Data parallelism: each device has the mean gradient of its points; the mean of the
    # eight is that of the whole batch.
    grad = grads.averaged(jax.value_and_grad(loss), bucketed(ring("data")))
    state, specs = step.init(
        lambda: line, optax.sgd(0.05), rules.match("**", P()), devices
    )
    train = jax.jit(
        mesh.spmd(
            step.make(grad, optax.sgd(0.05)),
            mesh=devices,
            in_specs=(specs, P("data")),
            out_specs=(specs, P()),
        )
    )
    points = mesh.place((x, y), P("data"), devices)
    for i in range(201):
        # Virtual devices share threads, so a step ends before the next one begins.
        state, info = jax.block_until_ready(train(state, points))
        if i in (0, 5, 10, 20, 40, 200):
            print(f"step {i:3d}  loss {info.loss:.4f}")

    for name in line:
        numbers = {shard.data.item() for shard in state.model[name].addressable_shards}
        plural = "" if len(numbers) == 1 else "s"
        print(f"{name} on the 8 devices: {len(numbers)} different number{plural}")

    slope, intercept = np.polyfit(np.asarray(x, float), np.asarray(y, float), deg=1)
    best = {"slope": slope, "intercept": intercept}
    print("\n            truth     learnt    least squares on one device")
    for name, truth in (("slope", SLOPE), ("intercept", INTERCEPT)):
        learnt = float(state.model[name])
        print(f"{name:<10} {truth:>7.4f}    {learnt:>7.4f}    {best[name]:>7.4f}")
