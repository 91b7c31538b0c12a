"""LoRA (Hu et al., arXiv 2106.09685): a net that reads digits is trained to read
mirrored digits, while its weights are frozen.

Run: python examples/lora.py. First the whole net is trained on eight devices. Then each
weight matrix gets a pair of thin matrices, the factors, whose product is added to the
frozen matrix. Only the factors are trained; they have 5% as many numbers as the net.
"""

# Estimate: 64 x 256, 256 x 256 and 256 x 10 are 84 k weights, 0.34 MB in float32, which
# stay as they are. Of rank 4 their factors are (64 + 256) * 4 + (256 + 256) * 4 + (256
# + 10) * 4 = 4,392 numbers, 5% of that. Of their gradients a device sends 2 * 7/8 * 18
# kB = 31 kB a step instead of 0.6 MB, and AdamW keeps 35 kB instead of 0.68 MB. A step
# of 144 digits is 73 MFLOP, 0.2 ms at the 450 GFLOP/s of two cores, and 14 messages,
# some 10 ms on virtual devices: 2 * 200 steps take seconds.

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import digits
from parallax import grads, mesh, rules, step
from parallax.collectives import bucketed, ring
from parallax.compiled import certificate

RANK, BATCH, STEPS = 4, 144, 200
optimizer = optax.adamw(3e-3)


class LoRA(eqx.Module):
    """A net whose weights are those of `base` plus products of thin matrices,
    `up @ down`."""

    base: Any
    factors: Any

    def __call__(self, x):
        """The net at `x`."""

        def weights(net):
            return [layer.weight for layer in net.layers]

        pairs = zip(weights(self.base), self.factors, strict=True)
        changed = [weight + up @ down for weight, (up, down) in pairs]
        return eqx.tree_at(weights, self.base, changed)(x)


FACTORS = LoRA(base=False, factors=True)  # what is trained: a prefix of the model


def adapted(base: eqx.nn.MLP) -> LoRA:
    """`base` with a pair of factors for each weight. Each `up` is zeros, so that the
    net computes the same as `base` at first."""
    keys = jax.random.split(jax.random.key(1), len(base.layers))
    factors = []
    for layer, key in zip(base.layers, keys, strict=True):
        outputs, inputs = layer.weight.shape
        up, down = jnp.zeros((outputs, RANK)), jax.random.normal(key, (RANK, inputs))
        factors.append((up, down))
    return LoRA(base, factors)


def loss(model, batch):
    images, labels = batch
    logits = jax.vmap(model)(images.reshape(len(images), -1))
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


def grad_of(trainable):
    """The gradient function for the `trainable` leaves; the gradients of the other
    leaves are None."""

    def grad(model, batch):
        trained, frozen = eqx.partition(model, trainable)

        def loss_of_trained(trained):
            return loss(eqx.combine(trained, frozen), batch)

        return eqx.filter_value_and_grad(loss_of_trained)(trained)

    return grad


def train(make_model, trainable, learn: digits.Digits):
    """Returns the model after `STEPS` steps on eight devices. Prints the sizes of the
    trained arrays, of the optimizer's moments, and of the messages of a step."""
    devices = mesh.make(data=8)
    state, specs = step.init(
        make_model, optimizer, rules.match("**", P()), devices, trainable=trainable
    )
    grad = grads.averaged(grad_of(trainable), bucketed(ring("data")))
    run = mesh.spmd(
        step.make(grad, optimizer),
        mesh=devices,
        in_specs=(specs, P("data")),
        out_specs=(specs, P()),
    )
    # `filter_jit`, since the activation function is a leaf and no array.
    run = eqx.filter_jit(run).lower(state, learn.batch(0, 0, BATCH)).compile()

    for number in range(STEPS):
        state, _ = jax.block_until_ready(run(state, learn.batch(0, number, BATCH)))

    numbers = sum(leaf.size for leaf in jax.tree.leaves(state.optimizer[0].mu))
    sent = sum(entry.bytes for entry in certificate.read(run.compiled, devices))
    print(
        f"  trained {numbers:,} numbers; a device kept {8 * numbers:,} bytes of "
        f"moments, and sent {sent:,} bytes a step"
    )
    return state.model


def accuracy(model, digits_: digits.Digits) -> str:
    images = digits_.images.reshape(len(digits_.labels), -1)
    predicted = np.argmax(jax.vmap(model)(images), axis=1)
    return f"{np.mean(predicted == digits_.labels):.1%}"


def mirrored(digits_: digits.Digits) -> digits.Digits:
    return digits.Digits(digits_.images[:, :, ::-1], digits_.labels)


def differing(net, other) -> int:
    """How many numbers of two nets differ."""
    leaves = (jax.tree.leaves(eqx.filter(tree, eqx.is_array)) for tree in (net, other))
    return sum(int(np.sum(a != b)) for a, b in zip(*leaves, strict=True))


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    learn, held_out = digits.load()

    print("The whole net, on digits:")
    base = train(lambda: eqx.nn.MLP(64, 10, 256, 2, key=jax.random.key(0)), True, learn)
    upright, in_mirror = accuracy(base, held_out), accuracy(base, mirrored(held_out))
    print(f"  test accuracy: {upright}, in a mirror {in_mirror}")

    print(f"Factors of rank {RANK} beside the frozen net, on digits in a mirror:")
    model = train(lambda: adapted(base), FACTORS, mirrored(learn))
    print(f"  test accuracy in a mirror: {accuracy(model, mirrored(held_out))}")
    number = differing(base, model.base)
    print(f"Of the frozen net {number} numbers differ from before.")
