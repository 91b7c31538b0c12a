# On the back of the envelope: 8 experts of 3 x 96 x 192 in each of 2 layers are 0.9 M weights, of which a token uses 0.2 M; with
# the rest 0.33 M. 1,024 bytes a step are 6 x 0.33 M x 1024 = 2 GFLOP, and a third more for the experts: 5 ms at the 450 GFLOP/s
# of two cores. Messages and sorting of kB take twenty times that on virtual devices: 200 steps 20 s, and the twin as much.
"""A small decoder with a mixture of experts over `data`, on real text: the load of each expert over time, and a dense twin.

Run: python examples/experts.py. The twin has the numbers that one token uses, so it computes as much and knows less.
"""

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
DATA, EXPERTS, K, LAYERS, WIDTH, HIDDEN = ring("data"), 8, 2, 2, 96, 192
CONTEXT, BATCH, STEPS, RATE = 64, 16, 200, 0.003  # RATE: by which a bias moves in a step


def decoder(count, hidden, key):
    keys = jax.random.split(key, 3 + LAYERS)
    normal = lambda key, *shape: jax.random.normal(key, shape) / shape[-1] ** 0.5
    of = lambda key: experts.Mixture(
        normal(key, WIDTH, count), experts.Gated(count, WIDTH, hidden, key=key), jnp.zeros(count)
    )
    mixtures = jax.tree.map(
        lambda *leaves: jnp.stack(leaves), *map(of, keys[3:])
    )  # [layers, ...] each
    ends = {"table": normal(keys[0], 256, WIDTH), "places": normal(keys[1], CONTEXT, WIDTH)}
    return ends | {
        "mixtures": mixtures,
        "attention": normal(keys[2], LAYERS, 4, WIDTH, WIDTH),
    }  # of query, key, value, out


def loss(model, windows, *, k, axis):
    def layer(x, w):
        attention, mixture = w
        q, k_, v = (jax.nn.standardize(x) @ attention[i] for i in range(3))
        x = (
            x
            + jax.nn.dot_product_attention(*(a[:, :, None] for a in (q, k_, v)), is_causal=True)[
                :, :, 0
            ]
            @ attention[3]
        )
        y, told = experts.moe(
            jax.nn.standardize(x), mixture, axis, route=experts.top_k(k, normalised=True)
        )
        return x + y, told

    x, told = jax.lax.scan(
        layer,
        model["table"][windows[:, :-1]] + model["places"],
        (model["attention"], model["mixtures"]),
    )
    logits = jax.nn.standardize(x) @ model["table"].T
    return jnp.mean(
        optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:])
    ) + 1e-3 * jnp.sum(told.z), told


def balanced(model, told):  # after each step the bias moves towards an even load; no loss does
    return eqx.tree_at(
        lambda m: m["mixtures"].bias,
        model,
        experts.rebalanced(model["mixtures"].bias, told.load, RATE),
    )


def train(count, hidden, *, k, axis, tokens, held_out):
    """Losses of the held-out text by step, the load of each expert, how many numbers there are, and how many a token uses."""
    devices, optimizer = mesh.make(data=8), optax.adamw(3e-3)
    make_model = lambda: decoder(count, hidden, jax.random.key(0))
    rule = rules.first(
        *[rules.experts("mixtures.experts.*", P(None, "data"))] * (axis is DATA),
        rules.match("**", P()),
    )
    moved = eqx.tree_at(
        lambda m: m["mixtures"].bias,
        jax.tree.map(lambda _: True, eqx.filter_eval_shape(make_model)),
        False,
    )
    state, specs = step.init(make_model, optimizer, rule, devices, trainable=moved)
    own = functools.partial(loss, k=k, axis=axis)

    def grad(model, windows):
        trained, bias = eqx.partition(model, moved)
        return jax.value_and_grad(
            lambda trained: own(eqx.combine(trained, bias), windows), has_aux=True
        )(trained)

    run = step.make(grads.averaged(grad, DATA), optimizer, after_update=balanced)
    run = jax.jit(mesh.spmd(run, mesh=devices, in_specs=(specs, P("data")), out_specs=(specs, P())))
    mean = lambda model, windows: DATA.all_mean(own(model, windows)[0])
    mean = jax.jit(mesh.spmd(mean, mesh=devices, in_specs=(specs.model, P("data")), out_specs=P()))
    window = functools.partial(data.batch, seed=0, length=CONTEXT)
    losses, loads = {}, []
    for i in range(1, STEPS + 1):
        state, info = jax.block_until_ready(
            run(state, window(tokens, step=i, size=BATCH))
        )  # virtual devices share threads
        loads.append(np.asarray(info.aux.load))
        if i % 50 == 0:
            losses[i] = float(mean(state.model, window(held_out, step=0, size=8 * BATCH)))
    every, of_experts = (
        sum(x.size for x in jax.tree.leaves(tree))
        for tree in (state.model, state.model["mixtures"].experts)
    )
    return losses, np.array(loads), every, every - of_experts * (count - k) // count


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    texts = dict(
        zip(
            ("tokens", "held_out"),
            data.split(corpus.encode_file(TEXT, corpus.bytes_tokenizer())),
            strict=True,
        )
    )
    mixed, loads, *sizes = train(EXPERTS, HIDDEN, k=K, axis=DATA, **texts)
    twin, _, *twin_sizes = train(1, K * HIDDEN, k=1, axis=(), **texts)
    print(
        f"{STEPS} steps of {BATCH} x {CONTEXT} bytes on 8 devices, each with one of {EXPERTS} experts of every layer"
    )
    for name, (every, used) in {"mixture": sizes, "dense twin": twin_sizes}.items():
        print(f"{name:<11}{every:>10,} numbers, of which a token uses {used:,}")
    print("\nstep   mixture  dense twin   (nats a byte of held-out text)")
    print(*(f"{i:4d} {mixed[i]:9.4f} {twin[i]:11.4f}" for i in mixed), sep="\n")
    print(
        f"\nload of the busiest and the idlest expert, as a multiple of the mean, by a bias that moves {RATE} a step"
    )
    for i in (0, 9, 49, STEPS - 1):
        ends = [
            f"layer {j}: {EXPERTS * load.max():.2f}, {EXPERTS * load.min():.2f}"
            for j, load in enumerate(loads[i])
        ]
        print(f"step {i + 1:3d}  {'   '.join(ends)}")
    print(
        f"The load of each expert over time is drawn in {pictures.loads('experts/loads', EXPERTS * loads)}."
    )
