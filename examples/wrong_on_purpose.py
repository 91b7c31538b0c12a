"""Four mistakes that JAX runs without a word: what each does to the numbers, and what
catches it.

Run: python examples/wrong_on_purpose.py
"""

# Estimate: 8 devices, 256 rows, a net of 64 hidden units. A replica that trains 8 units
# of its own learns 1/8 of a net. Rows and units on one axis make 1/8 of the products.
# The sum of 8 gradients for their mean is a step 8 times too long. And a message that 4
# of 8 devices send never comes: 5 s are spent on waiting for it here, of some 15 s in
# all.

import os
import textwrap
import threading

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from parallax import grads, lint, mesh, rules, tensor
from parallax.collectives import ring, send_next

STEPS, RATE, PATIENCE = (
    200,
    0.1,
    5.0,
)  # of training, and seconds to wait for what will not come
BY_HAND = {
    "up": P(None, "data"),
    "down": P("data"),
}  # specs that are written by hand are looked at by nobody
forward = lambda net, x: jnp.tanh(x @ net["up"]) @ net["down"]


def loss(net, batch):
    return jnp.mean((forward(net, batch[0]) - batch[1]) ** 2)


def trained(grad, specs, net, batch):
    """The loss that is reported after some gradient descent over 8 devices, and the
    net."""

    def step(net, batch):
        value, gradients = grad(net, batch)
        return jax.tree.map(lambda w, g: w - RATE * g, net, gradients), value

    step = jax.jit(
        mesh.spmd(
            step, mesh=devices, in_specs=(specs, P("data")), out_specs=(specs, P())
        )
    )
    for _ in range(STEPS):
        net, value = jax.block_until_ready(
            step(net, batch)
        )  # virtual devices share threads
    return float(value), jax.device_put(net, jax.devices()[0])


def refusal(f, *arguments) -> str:
    """What the `ValueError` says that `f` raises."""
    try:
        f(*arguments)
    except ValueError as error:
        return str(error)
    raise AssertionError("It was not refused.")


def tell(title: str, **said: str) -> None:
    lines = [
        textwrap.fill(f"  {name:<8}{text}", 118, subsequent_indent=10 * " ")
        for name, text in said.items()
    ]
    print(title, *lines, "", sep="\n", flush=True)


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

    reported, made = trained(averaged, BY_HAND, net, batch)
    rule = rules.first(*(rules.match(name, spec) for name, spec in BY_HAND.items()))
    harm = (
        f"training reports a loss of {reported:.3f}; the net that it made has "
        f"{loss(made, batch):.3f}."
    )
    why = (
        "Each replica trained 8 of the 64 hidden units alone, on rows of its own. Ask "
        "rules.specs for the specs."
    )
    tell(
        "1. Weights split over the data axis",
        harm=harm,
        caught=refusal(rules.specs, net, rule, devices),
        why=why,
    )

    split = lambda f: jax.jit(
        mesh.spmd(f, mesh=devices, in_specs=(BY_HAND, P("data")), out_specs=P())
    )
    wrong, right = (
        split(lambda net, x: ring.all_reduce(forward(net, x), "data"))(net, x),
        forward(net, x)[:32],
    )
    column = lambda net, x: tensor.column(x, net["up"], None, ring("data"))
    off = jnp.linalg.norm(wrong - right) / jnp.linalg.norm(right)
    harm = (
        f"256 rows go in and {len(wrong)} come out, which are {off:.0%} off the right "
        "ones."
    )
    why = (
        "Parts of 8 different rows were added up. Rows on an axis of their own, "
        "weights on another: data x tensor."
    )
    tell(
        "2. Rows and weights split over one axis",
        harm=harm,
        caught=refusal(split(column), net, x),
        why=why,
    )

    meant = lambda net, batch: lax.pmean(jax.value_and_grad(loss)(net, batch), "data")
    once = mesh.spmd(meant, mesh=devices, in_specs=(P(), P("data")), out_specs=P())
    times = jnp.linalg.norm(jax.jit(once)(net, batch)[1]["up"]) / jnp.linalg.norm(
        jax.grad(loss)(net, batch)["up"]
    )
    harm = (
        f"the gradient is {times:.1f} times that of one device, and the loss ends at "
        f"{trained(meant, P(), net, batch)[0]:.3f} "
    )
    harm += f"instead of {trained(averaged, P(), net, batch)[0]:.3f}."
    why = (
        "The weights are the same on all devices, so jax.grad sums over them already, "
        "and the mean of 8 equal sums is the sum. "
    )
    why += "grads.averaged keeps gradients local until it takes their mean."
    tell(
        "3. A sum where a mean belongs",
        harm=harm,
        caught=lint.program(once, net, batch)[0].harm,
        why=why,
    )

    some = lambda x: lax.cond(
        lax.axis_index("data") < 4, lambda x: send_next(x, "data"), lambda x: x, x
    )
    some = mesh.spmd(some, mesh=devices, in_specs=(P("data"),), out_specs=P("data"))
    compiled = jax.jit(some).lower(x).compile()
    waiting = threading.Thread(
        target=lambda: jax.block_until_ready(compiled(x)), daemon=True
    )
    waiting.start()
    waiting.join(PATIENCE)
    end = (
        "it still waits, and always will"
        if waiting.is_alive()
        else "it had come back, with numbers that mean nothing"
    )
    harm = f"after {PATIENCE:.0f} s {end}."
    why = (
        "A permute waits for all devices of the program, whoever its message is for. "
        "Run it on all, and mask with jnp.where."
    )
    tell(
        "4. A collective that only some devices reach",
        harm=harm,
        caught=lint.program(some, x)[0].harm,
        why=why,
    )
    os._exit(0)  # the devices that wait would hold up the usual end
