"""Four mistakes that JAX runs without a word: what each does to the numbers, and what
catches it.

Run: python examples/wrong_on_purpose.py
"""

# Estimate: 8 devices, 256 rows, a net of 64 hidden units. A replica that trains 8 units
# of its own learns 1/8 of a net. Rows and units on one axis make 1/8 of the products.
# The sum of 8 gradients for their mean is a step 8 times too long. And a message that 4
# of 8 devices send never comes: 5 s are spent on waiting for it here, of some 15 s in
# all.

import functools
import os
import textwrap
import threading

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from parallax import grads, lint, mesh, rules, tensor
from parallax.collectives import ring, send_next

STEPS, RATE = 200, 0.1
PATIENCE = 5.0  # seconds to wait for a message that does not come
# Nobody checks specs that are written by hand.
BY_HAND = {"up": P(None, "data"), "down": P("data")}


def forward(net, x):
    return jnp.tanh(x @ net["up"]) @ net["down"]


def loss(net, batch):
    x, targets = batch
    return jnp.mean((forward(net, x) - targets) ** 2)


def trained(grad, specs, net, batch):
    """Returns the last reported loss of gradient descent over 8 devices, and the
    trained net."""

    def step(net, batch):
        value, gradients = grad(net, batch)
        return jax.tree.map(lambda w, g: w - RATE * g, net, gradients), value

    step = mesh.spmd(
        step, mesh=devices, in_specs=(specs, P("data")), out_specs=(specs, P())
    )
    step = jax.jit(step)
    for _ in range(STEPS):
        # Virtual devices share threads, so a step ends before the next one begins.
        net, value = jax.block_until_ready(step(net, batch))
    return float(value), jax.device_put(net, jax.devices()[0])


def refusal(f, *arguments) -> str:
    """The message of the `ValueError` that `f` raises."""
    try:
        f(*arguments)
    except ValueError as error:
        return str(error)
    raise AssertionError("The call raised no ValueError.")


def tell(title: str, **texts: str) -> None:
    print(title)
    for name, text in texts.items():
        print(textwrap.fill(f"  {name:<8}{text}", 118, subsequent_indent=10 * " "))
    print(flush=True)


def weights_over_the_data_axis(net, batch):
    def grad(net, batch):
        value, gradients = jax.value_and_grad(loss)(net, batch)
        return lax.pmean(value, "data"), gradients

    reported, learnt = trained(grad, BY_HAND, net, batch)
    rule = rules.first(*(rules.match(name, spec) for name, spec in BY_HAND.items()))
    specs = functools.partial(rules.specs, batch_axes=("data",))
    tell(
        "1. Weights split over the data axis",
        harm=f"training reports a loss of {reported:.3f}; the net that it made has "
        f"{loss(learnt, batch):.3f}.",
        caught=refusal(specs, net, rule, devices),
        why="Each replica trained 8 of the 64 hidden units alone, on rows of its own. "
        "Ask rules.specs for the specs, with batch_axes=('data',).",
    )


def rows_and_weights_over_one_axis(net, x):
    def split(f):
        specs = {"in_specs": (BY_HAND, P("data")), "out_specs": P()}
        return jax.jit(mesh.spmd(f, mesh=devices, **specs))

    def summed(net, x):
        return ring.all_reduce(forward(net, x), "data")

    def column(net, x):
        return tensor.column(x, net["up"], None, ring("data"))

    wrong, right = split(summed)(net, x), forward(net, x)[:32]
    difference = jnp.linalg.norm(wrong - right) / jnp.linalg.norm(right)
    tell(
        "2. Rows and weights split over one axis",
        harm=f"256 rows go in and {len(wrong)} come out, which are {difference:.0%} "
        "off the right ones.",
        caught=refusal(split(column), net, x),
        why="Parts of 8 different rows were added up. Rows on an axis of their own, "
        "weights on another: data x tensor.",
    )


def a_sum_for_a_mean(net, batch):
    def summed_gradient(net, batch):
        return lax.pmean(jax.value_and_grad(loss)(net, batch), "data")

    once = mesh.spmd(
        summed_gradient, mesh=devices, in_specs=(P(), P("data")), out_specs=P()
    )
    _, gradients = jax.jit(once)(net, batch)
    right = jax.grad(loss)(net, batch)
    times = jnp.linalg.norm(gradients["up"]) / jnp.linalg.norm(right["up"])
    wrong_loss, _ = trained(summed_gradient, P(), net, batch)
    right_loss, _ = trained(averaged, P(), net, batch)
    tell(
        "3. A sum where a mean belongs",
        harm=f"the gradient is {times:.1f} times that of one device, and the loss ends "
        f"at {wrong_loss:.3f} instead of {right_loss:.3f}.",
        caught=lint.program(once, net, batch)[0].harm,
        why="The weights are the same on all devices, so jax.grad sums over them "
        "already, and the mean of 8 equal sums is the sum. grads.averaged keeps "
        "gradients local until it takes their mean.",
    )


def a_collective_on_some_devices(x):
    def send(x):
        return send_next(x, "data")

    def keep(x):
        return x

    def on_some(x):
        return lax.cond(lax.axis_index("data") < 4, send, keep, x)

    on_some = mesh.spmd(
        on_some, mesh=devices, in_specs=(P("data"),), out_specs=P("data")
    )
    compiled = jax.jit(on_some).lower(x).compile()

    def run():
        jax.block_until_ready(compiled(x))

    waiting = threading.Thread(target=run, daemon=True)
    waiting.start()
    waiting.join(PATIENCE)
    end = "it had come back, with numbers that mean nothing"
    if waiting.is_alive():
        end = "it still waits, and always will"
    tell(
        "4. A collective that only some devices reach",
        harm=f"after {PATIENCE:.0f} s {end}.",
        caught=lint.program(on_some, x)[0].harm,
        why="A permute waits for all devices of the program, whoever its message is "
        "for. Run it on all, and mask with jnp.where.",
    )


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    devices = mesh.make(data=8)
    up, down, key = jax.random.split(jax.random.key(0), 3)
    net = {
        "up": 0.3 * jax.random.normal(up, (16, 64)),
        "down": 0.3 * jax.random.normal(down, (64, 1)),
    }
    x = jax.random.normal(key, (256, 16))
    batch = x, jnp.sin(x[:, :1])
    averaged = grads.averaged(jax.value_and_grad(loss), ring("data"))

    weights_over_the_data_axis(net, batch)
    rows_and_weights_over_one_axis(net, x)
    a_sum_for_a_mean(net, batch)
    a_collective_on_some_devices(x)
    os._exit(0)  # the devices that wait would hold up the usual end
