"""A variational autoencoder for handwritten digits, trained on a mesh of data 4 x
tensor 2. The encoder and the decoder have two layers each. The first layer of each is
split by columns, and the second layer by rows.

Run: python examples/tensor_parallel_vae.py. One device trains the same model on the
same batches, and the program compares the losses and the weights.
"""

# Estimate: 64 x 256, 256 x 16, 8 x 256 and 256 x 64 are 39 k weights, so a step of 120
# digits is 28 MFLOP, or 0.06 ms at the 450 GFLOP/s of two cores. Over data 4 x tensor 2
# a device sends, in float64, 36 kB over tensor (2 * 1/2 of four activations: [30, 16]
# and [30, 64] forward, [30, 64] and [30, 8] backward) and 0.24 MB over data (2 * 3/4 of
# its half of the gradients): some 14 messages, a few ms on virtual devices. 500 steps,
# here and on one device: 10 s with compiling.

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

import digits
import pictures
from parallax import grads, mesh, rules, step, tensor
from parallax.collectives import bucketed, ring

PIXELS, HIDDEN, LATENT, BATCH, STEPS = 64, 256, 8, 120, 500


class Pair(eqx.Module):
    """Two dense layers: `up` is split by columns and `down` by rows, so that between
    them nothing moves."""

    up: jax.Array  # [inputs, hidden]
    up_bias: jax.Array
    down: jax.Array  # [hidden, outputs]
    down_bias: jax.Array

    def __init__(self, inputs, outputs, key):
        up, down = jax.random.split(key)
        self.up, self.up_bias = (
            jax.random.normal(up, (inputs, HIDDEN)) / inputs**0.5,
            jnp.zeros(HIDDEN),
        )
        self.down, self.down_bias = (
            jax.random.normal(down, (HIDDEN, outputs)) / HIDDEN**0.5,
            jnp.zeros(outputs),
        )

    def __call__(self, x, axis):
        """Returns the output of the second layer. The forward pass has one sum over
        `axis`, and so does the backward pass. On one device, `axis` is `()`."""
        hidden = jax.nn.gelu(tensor.column(x, self.up, self.up_bias, axis))
        return tensor.row(hidden, self.down, self.down_bias, axis)


class VAE(eqx.Module):
    """The encoder maps an image of `PIXELS` numbers to the means and log-variances of
    `LATENT` numbers; the decoder maps `LATENT` numbers to the logits of an image."""

    encoder: Pair
    decoder: Pair

    def __init__(self, key):
        first, second = jax.random.split(key)
        self.encoder, self.decoder = (
            Pair(PIXELS, 2 * LATENT, first),
            Pair(LATENT, PIXELS, second),
        )


def loss(model, batch, axis=()):
    """Returns minus the evidence lower bound (Kingma and Welling, arXiv 1312.6114), in
    nats per image of a digit."""
    images, noise = batch
    mean, log_variance = jnp.split(model.encoder(images, axis), 2, axis=1)
    logits = model.decoder(mean + jnp.exp(log_variance / 2) * noise, axis)
    pixels = jnp.sum(optax.sigmoid_binary_cross_entropy(logits, images), axis=1)
    divergence = jnp.sum(jnp.exp(log_variance) + mean**2 - 1 - log_variance, axis=1) / 2
    return jnp.mean(pixels + divergence)


def flat(images):
    return jnp.asarray(images, float).reshape(-1, PIXELS)


def decoded(model, codes):
    return jax.nn.sigmoid(model.decoder(codes, ())).reshape(-1, 8, 8)


def largest_difference(model, other):
    leaves = zip(jax.tree.leaves(model), jax.tree.leaves(other), strict=True)
    return max(float(jnp.max(jnp.abs(a - b))) for a, b in leaves)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    # In float64 a difference is a mistake, and not rounding.
    jax.config.update("jax_enable_x64", True)
    learn, held_out = digits.load()
    devices, optimizer = mesh.make(data=4, tensor=2), optax.adam(2e-3)
    make_model = functools.partial(VAE, jax.random.key(0))
    split = {
        "*.up": P(None, "tensor"),
        "*.up_bias": P("tensor"),
        "*.down": P("tensor"),
        "*.down_bias": P(),
    }
    rule = rules.first(*(rules.match(pattern, spec) for pattern, spec in split.items()))
    grad = jax.value_and_grad(functools.partial(loss, axis=ring("tensor")))
    grad = grads.averaged(grad, bucketed(ring("data")))
    state, specs = step.init(make_model, optimizer, rule, devices)
    train = mesh.spmd(
        step.make(grad, optimizer),
        mesh=devices,
        in_specs=(specs, P("data")),
        out_specs=(specs, P()),
    )
    train = jax.jit(train)
    train_alone = jax.jit(step.make(jax.value_and_grad(loss), optimizer))

    alone = jax.device_put(state, jax.devices()[0])
    print("nats per digit   8 devices      1 device    difference")
    differences = []
    for i in range(STEPS):
        images, _ = learn.batch(0, i, BATCH)
        batch = flat(images), jax.random.normal(jax.random.key(i), (BATCH, LATENT))
        # Virtual devices share threads, so a step ends before the next one begins.
        state, info = jax.block_until_ready(train(state, batch))
        alone, info_alone = train_alone(alone, batch)
        differences.append(abs(float(info.loss) / float(info_alone.loss) - 1))
        if (i + 1) % 100 == 0 or i == 0:
            print(
                f"step {i + 1:3d}     {info.loss:12.8f}  {info_alone.loss:12.8f}       "
                f"{differences[-1]:.1e}"
            )
    model = jax.device_put(state.model, jax.devices()[0])
    print(
        f"The loss on 8 devices is that on one: {max(differences):.1e} of it apart at "
        f"most, in {STEPS} steps of training;"
    )
    print(
        "after them the weights, some of which are about 1, are "
        f"{largest_difference(model, alone.model):.1e} apart at most."
    )

    shown = held_out.images[:14]
    codes = model.encoder(flat(shown), ())[:, :LATENT]
    noise = jax.random.normal(jax.random.key(1), (len(shown), LATENT))
    rows = {
        "held-out digits": shown,
        "encoded and decoded": decoded(model, codes),
        "decoded from noise": decoded(model, noise),
    }
    path = pictures.images("tensor_parallel_vae/digits", rows)
    print(f"Digits, what is left of them, and new ones are in {path}.")
