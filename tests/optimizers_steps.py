"""Five steps of training with optimizers: on one device, on shards, and on each shard alone."""

import functools
import math
import re
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from parallax import grads, mesh, optimizers, rules, step, zero
from parallax.collectives.types import varying_axes

STEPS, BATCH, DEVICES = 5, 8, 4


@pytest.fixture(autouse=True)
def as_optax_computes():
    """Optax mixes float32 schedules with float64 weights, and ranks."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


random = np.random.default_rng(0)
SHAPES = {"blocks": {"weight": (4, 8, 12), "bias": (4, 8)}, "head": (16, 8), "scale": (6,)}


def drawn(*lead):
    return jax.tree.map(
        lambda shape: random.normal(size=(*lead, *shape)),
        SHAPES,
        is_leaf=lambda x: isinstance(x, tuple),
    )


PARAMS, BATCHES = drawn(), drawn(STEPS, BATCH)
SPECS = {
    "tensor": {
        "blocks": {"weight": P(None, None, "tensor"), "bias": P(None, "tensor")},
        "head": P("tensor"),
        "scale": P(),
    },
    "data": {
        "blocks": {"weight": P(None, "data"), "bias": P("data")},
        "head": P(None, "data"),
        "scale": P(),
    },
}
EXTRA = {"sam": lambda info: {}}  # its `update` takes no extra argument, so `value` neither


def loss(params, batch):
    """The mean over the batch of a sum over all elements. No gradient is zero by theory, so its
    sign is no rounding's."""
    part = lambda w, targets: (
        jnp.sum((w[None] - targets) ** 2 / 2 + jnp.sin(w)[None]) / len(targets)
    )
    joined = lambda x: (
        lax.psum(x, over) if (over := tuple({"tensor"} & set(varying_axes(x)))) else x
    )
    return sum(map(joined, jax.tree.leaves(jax.tree.map(part, params, batch))))


def steps_alone(name, optimizer, params, batches):
    """Parameters and state after five steps of nothing but optax."""

    def one(carry, batch):
        params, state = carry
        value, gradients = jax.value_and_grad(loss)(params, batch)
        extra = {} if name in EXTRA else {"value": value}
        updates, state = optax.with_extra_args_support(optimizer).update(
            gradients, state, params, **extra
        )
        return (optax.apply_updates(params, updates), state), None

    return lax.scan(one, (params, optimizer.init(params)), batches)[0]


def on_one_device(table, params=PARAMS, batches=BATCHES):
    run = lambda batches: {
        name: steps_alone(name, each, params, batches) for name, each in table.items()
    }
    return jax.jit(run)(batches)


class Way(NamedTuple):
    """How the five steps are made on shards.

    Attributes:
        axis: of four devices.
        grad: makes reduced gradients.
        shares: whether parameters live as shares, or whole.
        bare: what an optimizer needs that acts element by element.
    """

    axis: str
    grad: Callable
    shares: bool
    bare: Callable


def microbatched(params, batch):
    def part(params, batch):
        value, gradients = local(params, batch)
        return value, zero.reduce_scatter(gradients, "data", SPECS["data"])

    return grads.accumulated(part, microbatches=2)(params, batch)


local, as_it_is = jax.value_and_grad(loss), lambda optimizer: optimizer
split_up = lambda optimizer: zero.sharded(optimizer, "data", SPECS["data"])
gathering = jax.value_and_grad(zero.gathered(loss, "data", SPECS["data"]))
WAYS = {
    "tensor": Way("tensor", local, True, as_it_is),
    "zero-1": Way("data", zero.reduce_scattered(local, "data", SPECS["data"]), False, split_up),
    "zero-2": Way(
        "data", zero.reduce_scattered(microbatched, "data", SPECS["data"]), False, split_up
    ),
    "zero-3": Way("data", grads.averaged(gathering, "data"), True, as_it_is),
}


def whole(way, optimizer):
    return optimizers.whole(optimizer, way.axis, SPECS[way.axis])


def steps_on_shards(way, table, specs=None, *, live=None, told=True, extra=step.value_of, **sizes):
    """Five of `step.make`'s steps with each optimizer: `batches -> {name: (parameters, state)}`.

    Args:
        way: how.
        table: the optimizers.
        specs: of what the optimizers see; by default those of the way.
        live: the specs of the parameters; by default `specs` if they are shares, or else nothing is
            split.
        told: whether `step.make` knows them.
        extra: of `step.make`.
        sizes: of the mesh axes; by default four devices on the way's.
    """
    specs = SPECS[way.axis] if specs is None else specs
    sizes = sizes or {way.axis: DEVICES}
    live = live or (specs if way.shares else jax.tree.map(lambda _: P(), specs))
    data = "data" if "data" in sizes else None
    batch_specs = jax.tree.map(
        lambda spec: P(None, data, *(spec if way.axis == "tensor" else ())), live
    )
    steps = {
        name: step.make(
            way.grad, each, specs=live if told else None, extra_args=EXTRA.get(name, extra)
        )
        for name, each in table.items()
    }
    specs_of = {
        name: step.State(live, rules.optimizer_specs(each, PARAMS, specs), P())
        for name, each in table.items()
    }

    def train(states, batches):
        scanned = lambda one, state: lax.scan(
            lambda state, batch: (one(state, batch)[0], None), state, batches
        )[0]
        return {name: scanned(steps[name], state) for name, state in states.items()}

    world = mesh.make(**sizes, devices=jax.devices()[: math.prod(sizes.values())])
    run = mesh.spmd(train, mesh=world, in_specs=(specs_of, batch_specs), out_specs=specs_of)

    def from_the_start(batches):
        zeroth = lambda each: step.State(PARAMS, each.init(PARAMS), jnp.zeros((), jnp.int32))
        found = run({name: zeroth(each) for name, each in table.items()}, batches)
        return {name: (state.model, state.optimizer) for name, state in found.items()}

    return from_the_start


def on_shards(*arguments, **options):
    return jax.jit(steps_on_shards(*arguments, **options))(BATCHES)


def refusal(*arguments, **options):
    """Why the steps are refused: the message of a `ValueError`. Nothing is compiled."""
    with pytest.raises(ValueError, match=r".") as caught:
        jax.eval_shape(steps_on_shards(*arguments, **options), BATCHES)
    return str(caught.value)


def assert_names_leaf_axis_and_cure(message, axis):
    assert re.search(r"blocks\.(weight|bias)|head", message), message
    assert repr(axis) in message, message
    assert "optimizers.whole" in message, message


def shards(tree, lead=0):
    """The first and the second device's shard of each leaf, of two devices, along the dims of
    `SPECS["tensor"]`."""

    def half(leaf, spec, which):
        dims = [dim for dim, entry in enumerate(spec) if entry is not None]
        return np.split(np.asarray(leaf), 2, axis=dims[0] + lead)[which] if dims else leaf

    return [
        jax.tree.map(functools.partial(half, which=which), tree, SPECS["tensor"])
        for which in (0, 1)
    ]


def each_shard_alone(optimizer):
    """Parameters and state of two devices that know the loss of both, and nothing else of each
    other."""
    optimizer = optax.with_extra_args_support(optimizer)
    parts = shards(PARAMS)

    def one(carry, batches):
        values, gradients = zip(*map(local, [params for params, _ in carry], batches), strict=True)
        twice = loss({"scale": carry[0][0]["scale"]}, {"scale": batches[0]["scale"]})
        moved = []
        for (params, state), g in zip(carry, gradients, strict=True):
            updates, new = optimizer.update(g, state, params, value=sum(values) - twice)
            moved.append((optax.apply_updates(params, updates), new))
        return moved, None

    zeroth = [(params, optimizer.init(params)) for params in parts]
    return lambda batches: lax.scan(one, zeroth, shards_of_batches(batches))[0]


def shards_of_batches(batches):
    return shards(batches, lead=2)


def equal(found, expected):
    """Whether two trees are alike: their scalars, where sizes are those of shards."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return all(
        np.allclose(a, b, rtol=1e-6, atol=1e-9) for a, b in pairs if np.shape(a) == np.shape(b)
    )


def assert_trains_something_else(table, plain):
    """On one of two devices at least the parameters are not the shard of one device's, or the
    numbers in the state are others."""
    runs = {}
    for name, each in table.items():
        try:
            runs[name] = each_shard_alone(each)
            jax.eval_shape(runs[name], BATCHES)
        except (TypeError, ValueError):
            del runs[name]  # it does not even run
    found = jax.jit(lambda batches: {name: run(batches) for name, run in runs.items()})(BATCHES)
    for name, devices in found.items():
        params, state = plain[name]
        as_one = [
            equal(each, (of_params, state))
            for each, of_params in zip(devices, shards(params), strict=True)
        ]
        assert not all(as_one), f"{name} is refused, and right on shards"
