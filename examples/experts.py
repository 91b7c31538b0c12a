"""Trains a small decoder with a mixture of experts, and a dense twin, on real text. The
experts are split over the axis `data`. A picture shows the load of each expert by step.

Run: python examples/experts.py. The dense twin has about as many parameters as the
mixture uses for one token, so both need about the same FLOPs per token. The mixture
learns faster at first; after 200 steps the two are even.
"""

# Estimate: 8 experts of 3 x 96 x 192 in each of 2 layers are 0.9 M weights, of which a
# token uses 0.2 M; with the rest 0.33 M. 1,024 bytes a step are 6 x 0.33 M x 1024 = 2
# GFLOP, and a third more for the experts: 5 ms at the 450 GFLOP/s of two cores.
# Messages and sorting of kB take twenty times that on virtual devices: 200 steps 20 s,
# and the twin as much.

import functools
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import corpus
import pictures
from parallax import data, experts, grads, mesh, rules, step
from parallax.collectives import ring

TEXT = Path(__file__).resolve().parent / "data" / "state_of_the_union.txt"
DATA, EXPERTS, K = ring("data"), 8, 2
LAYERS, WIDTH, HIDDEN = 2, 96, 192
CONTEXT, BATCH, STEPS = 64, 16, 200
RATE = 0.003  # the change of a bias per step


def decoder(count, hidden, key):
    """Returns a decoder's weights, with `count` experts of `hidden` units per layer."""
    keys = jax.random.split(key, 3 + LAYERS)

    def normal(key, *shape):
        return jax.random.normal(key, shape) / shape[-1] ** 0.5

    def mixture(key):
        router = normal(key, WIDTH, count)
        gated = experts.Gated(count, WIDTH, hidden, key=key)
        return experts.Mixture(router, gated, jnp.zeros(count))

    mixtures = [mixture(key) for key in keys[3:]]
    return {
        "table": normal(keys[0], 256, WIDTH),
        "places": normal(keys[1], CONTEXT, WIDTH),
        "attention": normal(keys[2], LAYERS, 4, WIDTH, WIDTH),  # query, key, value, out
        "mixtures": jax.tree.map(lambda *leaves: jnp.stack(leaves), *mixtures),
    }


def attended(x, weights):
    """Returns the result of causal attention with one head."""
    x = jax.nn.standardize(x)
    query, key, value = ((x @ weights[i])[:, :, None] for i in range(3))
    y = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    return y[:, :, 0] @ weights[3]


def loss(model, windows, *, k, axis):
    """Returns the loss of the text, and the statistics of each layer's experts."""

    def layer(x, weights):
        attention, mixture = weights
        x = x + attended(x, attention)

        route = experts.top_k(k, normalised=True)
        y, statistics = experts.moe(jax.nn.standardize(x), mixture, axis, route=route)
        return x + y, statistics

    x = model["table"][windows[:, :-1]] + model["places"]
    layers = model["attention"], model["mixtures"]
    x, statistics = jax.lax.scan(layer, x, layers)

    logits = jax.nn.standardize(x) @ model["table"].T
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:])
    return jnp.mean(nats) + 1e-3 * jnp.sum(statistics.z), statistics


def bias_of(model):
    return model["mixtures"].bias


def balanced(model, statistics):
    """Returns `model` with new biases, which make the load of the experts more even. A
    bias is added to an expert's score; no gradient trains the biases."""
    bias = experts.rebalanced(bias_of(model), statistics.load, RATE)
    return eqx.tree_at(bias_of, model, bias)


def gradient_function(loss, trainable):
    def grad(model, windows):
        trained, bias = eqx.partition(model, trainable)

        def loss_of_trained(trained):
            return loss(eqx.combine(trained, bias), windows)

        return jax.value_and_grad(loss_of_trained, has_aux=True)(trained)

    return grad


def train(count, hidden, *, k, axis, tokens, held_out):
    """Returns the held-out losses, the loads of the experts, and the trained model."""
    devices, optimizer = mesh.make(data=8), optax.adamw(3e-3)
    make_model = functools.partial(decoder, count, hidden, jax.random.key(0))

    rule = rules.match("**", P())
    if axis is DATA:  # each device has one of the experts
        rule = rules.first(rules.experts("mixtures.experts.*", P(None, "data")), rule)
    trainable = jax.tree.map(lambda _: True, eqx.filter_eval_shape(make_model))
    trainable = eqx.tree_at(bias_of, trainable, False)
    state, specs = step.init(make_model, optimizer, rule, devices, trainable=trainable)

    local_loss = functools.partial(loss, k=k, axis=axis)
    grad = grads.averaged(gradient_function(local_loss, trainable), DATA)
    run = step.make(grad, optimizer, after_update=balanced)
    run = mesh.spmd(
        run, mesh=devices, in_specs=(specs, P("data")), out_specs=(specs, P())
    )
    run = jax.jit(run)

    def mean_loss(model, windows):
        return DATA.all_mean(local_loss(model, windows)[0])

    mean_loss = mesh.spmd(
        mean_loss, mesh=devices, in_specs=(specs.model, P("data")), out_specs=P()
    )
    mean_loss = jax.jit(mean_loss)

    window = functools.partial(data.batch, seed=0, length=CONTEXT)
    losses, loads = {}, []
    for i in range(1, STEPS + 1):
        # Virtual devices share threads, so a step ends before the next one begins.
        windows = window(tokens, step=i, size=BATCH)
        state, info = jax.block_until_ready(run(state, windows))
        loads.append(np.asarray(info.aux.load))
        if i % 50 == 0:
            windows = window(held_out, step=0, size=8 * BATCH)
            losses[i] = float(mean_loss(state.model, windows))
    return losses, np.array(loads), state.model


def sizes(model, count, k):
    """Returns how many parameters a model has, and how many of them a token uses."""
    number = sum(leaf.size for leaf in jax.tree.leaves(model))
    in_experts = sum(leaf.size for leaf in jax.tree.leaves(model["mixtures"].experts))
    return number, number - in_experts * (count - k) // count


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    tokens, held_out = data.split(corpus.encode_file(TEXT, corpus.bytes_tokenizer()))
    texts = {"tokens": tokens, "held_out": held_out}
    mixed, loads, mixture = train(EXPERTS, HIDDEN, k=K, axis=DATA, **texts)
    twin, _, dense = train(1, K * HIDDEN, k=1, axis=(), **texts)

    print(
        f"{STEPS} steps of {BATCH} x {CONTEXT} bytes on 8 devices, each with one of "
        f"{EXPERTS} experts of every layer"
    )
    both = {"mixture": sizes(mixture, EXPERTS, K), "dense twin": sizes(dense, 1, 1)}
    for name, (number, used) in both.items():
        print(f"{name:<11}{number:>10,} numbers, of which a token uses {used:,}")

    print("\nstep   mixture  dense twin   (nats per byte of held-out text)")
    for i in mixed:
        print(f"{i:4d} {mixed[i]:9.4f} {twin[i]:11.4f}")

    print(
        "\nload of the busiest and the idlest expert, as a multiple of the mean, by a "
        f"bias that moves {RATE} per step"
    )
    for i in (0, 9, 49, STEPS - 1):
        layers = [
            f"layer {j}: {EXPERTS * load.max():.2f}, {EXPERTS * load.min():.2f}"
            for j, load in enumerate(loads[i])
        ]
        print(f"step {i + 1:3d}  {'   '.join(layers)}")
    path = pictures.loads("experts/loads", EXPERTS * loads)
    print(f"The load of each expert over time is drawn in {path}.")
