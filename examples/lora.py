# On the back of the envelope: 64 x 256, 256 x 256 and 256 x 10 are 84 k weights, 0.34 MB in float32, which stay as they are. Of
# rank 4 their factors are (64 + 256) * 4 + (256 + 256) * 4 + (256 + 10) * 4 = 4,392 numbers, 5% of that. Of their gradients a
# device sends 2 * 7/8 * 18 kB = 31 kB a step instead of 0.6 MB, and AdamW keeps 35 kB instead of 0.68 MB. A step of 144 digits is
# 73 MFLOP, 0.2 ms at the 450 GFLOP/s of two cores, and 14 messages, some 10 ms on virtual devices: 2 * 200 steps take seconds.
"""LoRA (Hu et al., arXiv 2106.09685): a net that reads digits learns to read them in a mirror, by 5% of its numbers.

Run: python examples/lora.py. First the whole net learns digits on eight devices; then it is frozen, and its factors learn.
"""

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
    """A net whose weights are those of `base` plus products of thin matrices, `up @ down`."""

    base: Any
    factors: Any

    def __call__(self, x):
        """The net at `x`."""
        weights = lambda net: [layer.weight for layer in net.layers]
        moved = [
            w + up @ down for w, (up, down) in zip(weights(self.base), self.factors, strict=True)
        ]
        return eqx.tree_at(weights, self.base, moved)(x)


FACTORS = LoRA(base=False, factors=True)  # what is trained: a prefix of the model


def adapted(base: eqx.nn.MLP) -> LoRA:
    """`base`, at first unchanged: its factors `up` are zeros."""
    keys = jax.random.split(jax.random.key(1), len(base.layers))
    shapes = [layer.weight.shape for layer in base.layers]
    down = [
        jax.random.normal(key, (RANK, inputs))
        for key, (_, inputs) in zip(keys, shapes, strict=True)
    ]
    return LoRA(
        base,
        [
            (jnp.zeros((outputs, RANK)), each)
            for (outputs, _), each in zip(shapes, down, strict=True)
        ],
    )


def loss(model, batch):
    images, labels = batch
    logits = jax.vmap(model)(images.reshape(len(images), -1))
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


def grad_of(trainable):
    """The grad arrow for these leaves alone; the others' gradients are None."""

    def grad(model, batch):
        trained, frozen = eqx.partition(model, trainable)
        return eqx.filter_value_and_grad(lambda trained: loss(eqx.combine(trained, frozen), batch))(
            trained
        )

    return grad


def train(make_model, trainable, learn: digits.Digits):
    """The model after `STEPS` steps on eight devices; prints what is trained, kept and sent."""
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
    run = (
        eqx.filter_jit(run).lower(state, learn.batch(0, 0, BATCH)).compile()
    )  # the activation is a leaf, and no array
    for number in range(STEPS):
        state, _ = jax.block_until_ready(run(state, learn.batch(0, number, BATCH)))
    numbers = sum(leaf.size for leaf in jax.tree.leaves(state.optimizer[0].mu))
    sent = sum(entry.bytes for entry in certificate.read(run.compiled, devices))
    print(
        f"  trained {numbers:,} numbers; a device kept {8 * numbers:,} bytes of moments, and sent {sent:,} bytes a step"
    )
    return state.model


def told_right(model, of: digits.Digits) -> str:
    return f"{np.mean(np.argmax(jax.vmap(model)(of.images.reshape(len(of.labels), -1)), axis=1) == of.labels):.1%}"


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    learn, held_out = digits.load()
    learn_mirrored, mirrored = (
        digits.Digits(each.images[:, :, ::-1], each.labels) for each in (learn, held_out)
    )
    print("The whole net, on digits:")
    base = train(lambda: eqx.nn.MLP(64, 10, 256, 2, key=jax.random.key(0)), True, learn)
    print(
        f"  held-out digits told right: {told_right(base, held_out)}, in a mirror {told_right(base, mirrored)}"
    )
    print(f"Factors of rank {RANK} beside the frozen net, on digits in a mirror:")
    model = train(lambda: adapted(base), FACTORS, learn_mirrored)
    print(f"  held-out digits in a mirror told right: {told_right(model, mirrored)}")
    before, after = (jax.tree.leaves(eqx.filter(net, eqx.is_array)) for net in (base, model.base))
    print(
        f"Of the frozen net {sum(int(np.sum(a != b)) for a, b in zip(before, after, strict=True))} numbers differ from before."
    )
