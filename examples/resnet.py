"""A small ResNet with batch statistics on one device and on eight: the same losses.

Batch normalisation is the layer that data parallelism changes. Its mean and variance
are those of the whole batch, and a device has only some of the rows. So each norm also
averages over the devices, by two all-reduces. The example also trains a model without
these all-reduces, in which each device normalises by its own rows: that is another
model, and its losses differ.

Run: python examples/resnet.py
"""

# Estimate: a step sends the gradients of 3,226 parameters once, and the statistics of
# five norms of 8 channels. An image of 12 x 12 pixels takes 0.5 MFLOP forward and twice
# that backward, so a step of 64 images is 0.1 GFLOP: 1 ms at the rate of two cores, of
# which small convolutions reach a hundredth.

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

from drawn_digits import draw
from parallax import grads, mesh, rules, step

STEPS, BATCH = 200, 64
COMPARED = 12  # steps: later, rounding grows until the runs go apart
MOMENTUM = 0.8  # of the running statistics


class Statistics(NamedTuple):
    """The mean and the variance of each channel."""

    mean: jax.Array
    variance: jax.Array


class BatchNorm(eqx.Module):
    """Normalises each channel of [batch, channels, height, width]."""

    scale: jax.Array
    shift: jax.Array
    running: Statistics  # for evaluation; changed by `with_statistics`, and not trained

    def __init__(self, channels):
        self.scale, self.shift = jnp.ones(channels), jnp.zeros(channels)
        self.running = Statistics(jnp.zeros(channels), jnp.ones(channels))

    def __call__(self, x, all_mean):
        """Returns the normalised `x`, and the statistics that normalised it.

        `all_mean` takes a mean over the devices that split the batch. With None, the
        running statistics normalise `x`.
        """
        statistics = self.running
        if all_mean is not None:
            mean = all_mean(jnp.mean(x, axis=(0, 2, 3)))
            squares = (x - mean[:, None, None]) ** 2
            statistics = Statistics(mean, all_mean(jnp.mean(squares, axis=(0, 2, 3))))

        mean, variance = (values[:, None, None] for values in statistics)
        y = (x - mean) * lax.rsqrt(variance + 1e-5)
        return y * self.scale[:, None, None] + self.shift[:, None, None], statistics


class Residual(eqx.Module):
    """Two convolutions with batch normalisation, added to their input."""

    convolutions: list[eqx.nn.Conv2d]
    norms: list[BatchNorm]

    def __init__(self, channels, key):
        keys = jax.random.split(key)
        self.convolutions = [
            eqx.nn.Conv2d(channels, channels, 3, padding=1, key=k) for k in keys
        ]
        self.norms = [BatchNorm(channels) for _ in keys]

    def __call__(self, x, all_mean):
        """`x` after the layers, and the statistics of both norms."""
        y, seen = x, []
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            y, statistics = norm(jax.vmap(convolution)(jax.nn.relu(y)), all_mean)
            seen.append(statistics)
        return x + y, seen


class ResNet(eqx.Module):
    """Two residual blocks and a dense layer, for images [batch, height, width]."""

    first: eqx.nn.Conv2d
    blocks: list[Residual]
    norm: BatchNorm
    out: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 4)
        self.first = eqx.nn.Conv2d(1, 8, 3, padding=1, key=keys[0])
        self.blocks = [Residual(8, keys[1]), Residual(8, keys[2])]
        self.norm = BatchNorm(8)
        self.out = eqx.nn.Linear(8 * 3 * 3, 10, key=keys[3])

    def __call__(self, images, all_mean):
        """The logits, and the statistics of all norms in order."""
        x, seen = jax.vmap(self.first)(images[:, None]), []
        for block in self.blocks:
            x, statistics = block(x, all_mean)
            x = pooled(x)
            seen += statistics
        x, statistics = self.norm(x, all_mean)
        logits = jax.vmap(self.out)(x.reshape(len(x), -1))
        return logits, [*seen, statistics]


def pooled(x):
    """Returns the mean of each block of 2 x 2 pixels."""
    batch, channels, height, width = x.shape
    return x.reshape(batch, channels, height // 2, 2, width // 2, 2).mean(axis=(3, 5))


def make_model():
    return ResNet(jax.random.key(0))


def is_norm(leaf):
    return isinstance(leaf, BatchNorm)


def is_statistics(leaf):
    return isinstance(leaf, Statistics)


def trainable_of(model):
    """Says of each leaf whether it is trained. All floating-point arrays are, except
    the running statistics."""

    def is_trained(leaf):
        return False if is_statistics(leaf) else eqx.is_inexact_array

    return jax.tree.map(is_trained, model, is_leaf=is_statistics)


def with_statistics(model, seen):
    """`model` after a step: its running statistics move towards those of the batch."""
    remaining = iter(seen)

    def changed(norm):
        if not is_norm(norm):
            return norm
        running = jax.tree.map(
            lambda old, new: MOMENTUM * old + (1 - MOMENTUM) * new,
            norm.running,
            next(remaining),
        )
        return eqx.tree_at(lambda norm: norm.running, norm, running)

    return jax.tree.map(changed, model, is_leaf=is_norm)


def gradient_function(all_mean):
    """Returns a function `(model, batch) -> ((loss, statistics), gradients)`. The
    gradients of the running statistics are None."""

    def loss(trained, frozen, batch):
        images, labels = batch
        logits, seen = eqx.combine(trained, frozen)(images, all_mean)
        nats = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return jnp.mean(nats), seen

    def grad(model, batch):
        trained, frozen = eqx.partition(model, trainable_of(model))
        return eqx.filter_value_and_grad(loss, has_aux=True)(trained, frozen, batch)

    return grad


def train(devices, all_mean, steps):
    """The losses of all steps, and the trained model."""
    optimizer = optax.adam(3e-3)
    grad = grads.averaged(gradient_function(all_mean), "data")
    trainable = trainable_of(eqx.filter_eval_shape(make_model))
    state, specs = step.init(
        make_model, optimizer, rules.match("**", P()), devices, trainable=trainable
    )
    train_step = step.make(grad, optimizer, after_update=with_statistics)
    train_step = mesh.spmd(
        train_step, mesh=devices, in_specs=(specs, P("data")), out_specs=(specs, P())
    )
    train_step = eqx.filter_jit(train_step, donate="all")

    losses = []
    for i in range(steps):
        batch = jax.tree.map(jnp.asarray, draw(BATCH, seed=i))
        state, info = jax.block_until_ready(train_step(state, batch))
        losses.append(float(info.loss))
    return np.array(losses), state.model


def over_devices(x):
    return lax.pmean(x, "data")


def own_rows(x):
    return x


def accuracy(model):
    images, labels = draw(1000, seed=STEPS)
    model = jax.device_put(eqx.filter(model, eqx.is_array), jax.devices()[0])
    logits, _ = eqx.filter_jit(eqx.combine(model, make_model()))(
        jnp.asarray(images), None
    )
    return np.mean(np.argmax(logits, axis=1) == labels)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    one_device = mesh.make(data=1, devices=jax.devices()[:1])
    eight = mesh.make(data=8)

    expected, _ = train(one_device, over_devices, COMPARED)
    losses, model = train(eight, over_devices, STEPS)
    local, _ = train(eight, own_rows, COMPARED)

    for i in (0, 5, COMPARED - 1):
        print(f"step {i + 1:2}  one device {expected[i]:.5f}  eight {losses[i]:.5f}")
    for name, other in {"over devices": losses, "of own rows": local}.items():
        difference = np.abs(other[:COMPARED] - expected).max()
        print(f"statistics {name}: largest difference {difference:.1e}")
    print(f"test accuracy with the running statistics: {accuracy(model):.1%}")
