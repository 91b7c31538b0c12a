"""LeNet on real handwritten digits, trained on 1, 2 and 8 devices: prints and draws the
accuracy curves, which are the same, and the seconds per epoch.

Run: python examples/lenet.py [FOLDER]. If FOLDER holds the four IDX files of MNIST or
Fashion-MNIST, LeNet learns their images instead.
"""

# Estimate: a digit of 8 x 8 pixels takes 0.18 MFLOP forward and twice that backward, so
# an epoch of 1,440 is 0.8 GFLOP, 2 ms at the 450 GFLOP/s of two cores. Small
# convolutions reach a hundredth of that: 0.1 to 0.2 s an epoch. Data parallelism adds
# one message a step, the 11 k gradients (88 kB, of which a device sends 2 * 7/8), in 14
# hops on 8 devices. Virtual devices share the same two cores, so they are not faster
# than one: on real ones the 1,440 digits would be divided.

import functools
import sys
import time
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import digits
import pictures
from parallax import grads, mesh, rules, step
from parallax.collectives import bucketed, ring

EPOCHS, BATCH = 24, 48
optimizer = optax.adam(4e-3)


class LeNet(eqx.Module):
    """Two convolutions, each followed by a mean over 2 x 2 pixels, and then two dense
    layers: a small variant of LeNet-5 (LeCun et al., 1998)."""

    convolutions: list[eqx.nn.Conv2d]
    dense: eqx.nn.Linear
    out: eqx.nn.Linear

    def __init__(self, height, width, key):
        keys = jax.random.split(key, 4)
        conv = functools.partial(eqx.nn.Conv2d, kernel_size=3, padding="SAME")
        self.convolutions = [conv(1, 16, key=keys[0]), conv(16, 32, key=keys[1])]
        self.dense = eqx.nn.Linear(32 * (height // 4) * (width // 4), 64, key=keys[2])
        self.out = eqx.nn.Linear(64, 10, key=keys[3])

    def __call__(self, image):
        """The logits of one image, [height, width]."""
        x = image[None].astype(self.out.weight.dtype)
        for convolution in self.convolutions:
            x = jnp.tanh(convolution(x))
            x = x.reshape(x.shape[0], x.shape[1] // 2, 2, x.shape[2] // 2, 2).mean(
                (2, 4)
            )
        return self.out(jnp.tanh(self.dense(x.ravel())))


def loss(model, batch):
    images, labels = batch
    return jnp.mean(
        optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(images), labels)
    )


@jax.jit
def accuracy(model, images, labels):
    return jnp.mean(jnp.argmax(jax.vmap(model)(images), axis=1) == labels)


def run(
    n: int, learn: digits.Digits, held_out: digits.Digits
) -> tuple[list[float], float]:
    """The held-out accuracy after each epoch on `n` devices, and the median seconds of
    an epoch."""
    devices = mesh.make(data=n, devices=jax.devices()[:n])
    make_model = functools.partial(LeNet, *learn.images.shape[1:], jax.random.key(0))
    state, specs = step.init(make_model, optimizer, rules.match("**", P()), devices)
    grad = jax.value_and_grad(loss)
    if n == 1:  # nothing of ours but the step
        train = jax.jit(step.make(grad, optimizer))
    else:
        grad = grads.averaged(grad, bucketed(ring("data")))
        train = jax.jit(
            mesh.spmd(
                step.make(grad, optimizer),
                mesh=devices,
                in_specs=(specs, P("data")),
                out_specs=(specs, P()),
            )
        )
    curve, seconds, steps = [], [], len(learn.labels) // BATCH
    for epoch in range(EPOCHS):
        start = time.perf_counter()
        for i in range(steps):
            batch = learn.batch(0, epoch * steps + i, BATCH)
            # Virtual devices share threads, so a step ends before the next one begins.
            state, _ = jax.block_until_ready(train(state, batch))
        seconds.append(time.perf_counter() - start)
        model = jax.device_put(state.model, jax.devices()[0])
        curve.append(float(accuracy(model, *held_out)))
    return curve, float(np.median(seconds))


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    # In float32, rounding alone may turn a digit that is in doubt.
    jax.config.update("jax_enable_x64", True)
    learn, held_out = digits.load(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
    print(
        f"{len(learn.labels):,} digits to learn, {len(held_out.labels)} held out; "
        f"{EPOCHS} epochs in batches of {BATCH}"
    )
    curves, seconds = {}, {}
    for n in (1, 2, 8):
        curves[n], seconds[n] = run(n, learn, held_out)
        shown = ", ".join(
            f"{epoch}: {curves[n][epoch - 1]:.2%}" for epoch in (1, 4, 8, 16, EPOCHS)
        )
        print(
            f"devices: {n}  test accuracy after epoch {shown}; "
            f"{seconds[n]:.2f} s per epoch"
        )
    expected = np.array(curves[1])
    difference = max(np.abs(np.array(curves[n]) - expected).max() for n in (2, 8))
    names = {1: "1 device", 2: "2 devices", 8: "8 devices"}
    path = pictures.curves(
        "lenet/accuracy",
        {names[n]: curve for n, curve in curves.items()},
        {names[n]: median for n, median in seconds.items()},
    )
    print(
        f"The curves of 2 and of 8 devices differ from that of one by {difference:.1e} "
        f"at most. The picture is {path}."
    )
