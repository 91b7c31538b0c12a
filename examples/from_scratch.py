"""Build it yourself: a ring, Megatron's pair of layers, 1F1B and ZeRO-1, from
`ppermute` alone, with no part of Parallax.

Run: python examples/from_scratch.py. On a mesh of data 2 x stage 2 x tensor 2, a net of
residual layers has the same losses as on one device.

This program computes each forward pass of a stage again for the backward pass. By
default, Parallax instead stores the values that the backward pass needs. Parallax also
takes any model and any schedule, and raises an error for many mistakes.
"""

from functools import partial

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

STAGES, MICROBATCHES, LAYERS, WIDTH, HIDDEN, INPUTS = 2, 8, 4, 16, 32, 8
OPTIMIZER = optax.adamw(1e-2)

# 1. A ring: each device talks to its right neighbour alone. Block i of x is summed on
# its way to device i.


def to_the_right(x, axis, places=1):
    n = lax.axis_size(axis)
    return lax.ppermute(x, axis, [(i, (i + places) % n) for i in range(n)])


def reduce_scatter(
    x, axis
):  # [n, block] on each device -> the sum of block i on device i, in n - 1 hops
    n, me = lax.axis_size(axis), lax.axis_index(axis)
    partial_sum = x[(me - 1) % n]
    for hop in range(1, n):
        partial_sum = to_the_right(partial_sum, axis) + x[(me - 1 - hop) % n]
    return partial_sum


def all_gather(block, axis):  # block i on device i -> [n, block] on each, in n - 1 hops
    n, me = lax.axis_size(axis), lax.axis_index(axis)
    blocks = [block]
    for _ in range(1, n):
        blocks.append(to_the_right(blocks[-1], axis))
    return jnp.stack(blocks)[(me - jnp.arange(n, dtype=me.dtype)) % n]


def as_blocks(x, n):  # any shape -> [n, block], with zeros at the end
    return jnp.pad(x.ravel(), (0, -x.size % n)).reshape(n, -1)


def from_blocks(blocks, like):
    return blocks.ravel()[: like.size].reshape(like.shape)


def all_reduce(x, axis):  # 2 (n - 1)/n of the bytes of x over each link
    blocks = as_blocks(x, lax.axis_size(axis))
    return from_blocks(all_gather(reduce_scatter(blocks, axis), axis), x)


# 2. Megatron's pair: a layer's columns, then its rows. One sum forward, one backward.


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def enter(
    x, axis
):  # forward nothing, backward a sum: each device has a part of the gradient
    return x


enter.defvjp(lambda x, axis: (x, None), lambda axis, _, g: (all_reduce(g, axis),))


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def leave(
    x, axis
):  # forward a sum, backward nothing: each device has the whole gradient
    return all_reduce(x, axis)


leave.defvjp(lambda x, axis: (all_reduce(x, axis), None), lambda axis, _, g: (g,))


def layer(
    x, weights
):  # up [WIDTH, HIDDEN / t] and down [HIDDEN / t, WIDTH] are this device's
    hidden = jax.nn.gelu(enter(x, "tensor") @ weights["up"])
    return x + leave(hidden @ weights["down"], "tensor"), None


# 3. 1F1B: in tick t, stage s takes microbatch t - s forward and microbatch t - (2 (P -
# 1) - s) backward.


def one_f_one_b(
    params, inputs, targets
):  # inputs, targets: [microbatches, rows, ...] -> loss, gradients of this stage
    s, last = lax.axis_index("stage"), STAGES - 1
    slots = 2 * last + 1  # microbatches in flight on the first stage

    def through(
        params, x, m
    ):  # what this stage does; the first one embeds, the last one has the loss
        x = jnp.where(s == 0, inputs[m] @ params["embed"], x)
        x, _ = lax.scan(layer, x, params["layers"])
        loss = jnp.mean((x @ params["out"] - targets[m]) ** 2)
        return x, loss

    def tick(carry, t):
        x, g, kept, sums, total = carry
        forward = t - s
        m = jnp.clip(forward, 0, MICROBATCHES - 1)
        # A microbatch that does not exist leaves its slot as it was.
        kept = kept.at[m % slots].set(jnp.where(forward == m, x, kept[m % slots]))
        y, _ = through(params, x, m)

        backward = t - (2 * last - s)
        m = jnp.clip(backward, 0, MICROBATCHES - 1)
        real, at_end = backward == m, s == last
        (_, loss), pull = jax.vjp(
            lambda params, x: through(params, x, m), params, kept[m % slots]
        )
        of_loss = jnp.where(real & at_end, 1 / MICROBATCHES, 0.0).astype(loss.dtype)
        of_params, of_x = pull((jnp.where(real & ~at_end, g, 0.0), of_loss))

        sums = jax.tree.map(jnp.add, sums, of_params)
        return (
            to_the_right(y, "stage"),
            to_the_right(of_x, "stage", -1),
            kept,
            sums,
            total + loss * of_loss,
        ), None

    nothing = jnp.zeros((*inputs.shape[1:-1], WIDTH), inputs.dtype)
    carry = (
        nothing,
        nothing,
        jnp.stack([nothing] * slots),
        jax.tree.map(jnp.zeros_like, params),
        jnp.zeros((), inputs.dtype),
    )
    (*_, sums, total), _ = lax.scan(
        tick, carry, jnp.arange(MICROBATCHES + 2 * last, dtype=s.dtype)
    )

    # Only the first stage embeds and only the last has `out`, and all stages hold both.
    shared = {name: all_reduce(sums[name], "stage") for name in ("embed", "out")}
    return all_reduce(total, "stage"), sums | shared


# 4. ZeRO-1: each of the n replicas sums, keeps and updates one n-th of every leaf, and
# all gather the new weights.


def my_block(leaf):
    return as_blocks(leaf, lax.axis_size("data"))[lax.axis_index("data")]


def init(params):  # the optimizer's state: of 1/n of the weights
    return jax.tree.map(
        lambda leaf: leaf[None], OPTIMIZER.init(jax.tree.map(my_block, params))
    )


def step(params, state, inputs, targets):
    n = lax.axis_size("data")
    state = jax.tree.map(lambda leaf: leaf[0], state)
    loss, grads = one_f_one_b(params, inputs, targets)

    mean = jax.tree.map(lambda g: reduce_scatter(as_blocks(g, n), "data") / n, grads)
    updates, state = OPTIMIZER.update(mean, state, jax.tree.map(my_block, params))
    blocks = optax.apply_updates(jax.tree.map(my_block, params), updates)
    params = jax.tree.map(
        lambda block, leaf: from_blocks(all_gather(block, "data"), leaf), blocks, params
    )
    return (
        params,
        jax.tree.map(lambda leaf: leaf[None], state),
        all_reduce(loss, "data") / n,
    )


# 5. All of it on eight devices, beside the same on one.

SPECS = {
    "embed": P(),
    "layers": {"up": P("stage", None, "tensor"), "down": P("stage", "tensor")},
    "out": P(),
}
OWN = P(("data", "stage", "tensor"))  # the optimizer's state: of each device its own
BATCH = P(None, "data")


def make_params():
    def normal(i, *shape):
        return 0.3 * jax.random.normal(jax.random.key(i), shape)

    layers = {
        "up": normal(1, LAYERS, WIDTH, HIDDEN),
        "down": normal(2, LAYERS, HIDDEN, WIDTH),
    }
    return {
        "embed": normal(0, INPUTS, WIDTH),
        "layers": layers,
        "out": normal(3, WIDTH, 1),
    }


def make_batch(i):  # of 8 microbatches of 8 rows
    inputs = jax.random.normal(jax.random.key(100 + i), (MICROBATCHES, 8, INPUTS))
    return inputs, jnp.sin(inputs[..., :1])


def on_eight(steps):
    mesh = jax.make_mesh(
        (2, STAGES, 2),
        ("data", "stage", "tensor"),
        axis_types=(jax.sharding.AxisType.Auto,) * 3,
    )
    split = partial(
        jax.shard_map, mesh=mesh, check_vma=False
    )  # the sums above are right by hand
    begin = jax.jit(split(init, in_specs=(SPECS,), out_specs=OWN))
    train = jax.jit(
        split(step, in_specs=(SPECS, OWN, BATCH, BATCH), out_specs=(SPECS, OWN, P()))
    )

    params = jax.device_put(
        make_params(), jax.tree.map(lambda spec: NamedSharding(mesh, spec), SPECS)
    )
    state, losses = begin(params), []
    for i in range(steps):
        params, state, loss = jax.block_until_ready(
            train(params, state, *make_batch(i))
        )  # virtual devices share threads
        losses.append(float(loss))
    return losses


def on_one(steps):
    def loss(params, inputs, targets):
        x = inputs @ params["embed"]
        for up, down in zip(
            params["layers"]["up"], params["layers"]["down"], strict=True
        ):
            x = x + jax.nn.gelu(x @ up) @ down
        return jnp.mean((x @ params["out"] - targets) ** 2)

    params, losses = make_params(), []
    state = OPTIMIZER.init(params)
    for i in range(steps):
        value, grads = jax.jit(jax.value_and_grad(loss))(params, *make_batch(i))
        updates, state = OPTIMIZER.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(value))
    return losses


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_enable_x64", True)
    eight, one = on_eight(30), on_one(30)
    print("step  eight devices     one device")
    for i in range(0, 30, 5):
        print(f"{i:4d}  {eight[i]:13.9f}  {one[i]:13.9f}")
    difference = max(abs(a - b) for a, b in zip(eight, one, strict=True))
    print(f"largest difference {difference:.1e}")
