"""Gradients that each device scales by its own norm before they are summed are found; what only
looks like it is not."""

import inspect

import jax
import jax.flatten_util
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from parallax import grads, islands, lint, mesh, rules, step, zero
from parallax.collectives import bucketed, halving, ring
from parallax.collectives.types import varying

CLIPPED = "clipped-before-the-sum"
WIDTH, ROWS = 6, 32
PARAMS = {"layers": jnp.ones((3, WIDTH, WIDTH)), "bias": jnp.ones(WIDTH)}


def block(x, w):
    """A layer with a norm over the whole of what it is given, which the backward pass reduces
    too."""
    return jnp.tanh(x @ (w / jnp.linalg.norm(w))) / jnp.linalg.norm(x), None


def loss(params, x):
    y = lax.scan(block, x, params["layers"])[0] + params["bias"][None]
    return jnp.mean(y**2)


GRAD = jax.value_and_grad(loss)


def by_optax(transform):
    def wrapper(grad):
        def clipping(params, batch):
            value, gradients = grad(params, batch)
            return value, transform.update(gradients, transform.init(params), params)[0]

        return clipping

    return wrapper


def by_hand(grad):
    def clipping(params, batch):
        value, gradients = grad(params, batch)
        norm = jnp.sqrt(sum(jnp.vdot(g, g) for g in jax.tree.leaves(gradients)))
        return value, jax.tree.map(lambda g: g * jnp.minimum(1.0, 0.1 / norm), gradients)  # wrong

    return clipping


def by_the_largest(grad):
    def normalising(params, batch):
        value, gradients = grad(params, batch)
        return value, jax.tree.map(lambda g: g / jnp.max(jnp.abs(g)), gradients)

    return normalising


def as_one_array(grad):
    def clipping(params, batch):
        value, gradients = grad(params, batch)
        flat, unflatten = jax.flatten_util.ravel_pytree(gradients)
        return value, unflatten(flat / jnp.maximum(1.0, jnp.linalg.norm(flat)))

    return clipping


SCALES = {
    "by hand": by_hand,
    "by hand, as one array": as_one_array,
    "by hand, by the largest": by_the_largest,
    "clip_by_global_norm": by_optax(optax.clip_by_global_norm(0.1)),
    "adaptive_grad_clip": by_optax(optax.adaptive_grad_clip(0.1)),
    "clip_by_block_rms": by_optax(optax.clip_by_block_rms(0.1)),
    "normalize_by_update_norm": by_optax(optax.normalize_by_update_norm()),
    "scale_by_trust_ratio": by_optax(optax.scale_by_trust_ratio()),
}
COMMUTES = {  # with the sum, or element by element
    "centralize": by_optax(optax.centralize()),
    "clip": by_optax(optax.clip(0.1)),
    "weight decay": by_optax(optax.add_decayed_weights(0.1)),
    "nothing": by_optax(optax.identity()),
}


def two_parts(grad):
    return grads.accumulated(grad, microbatches=2)


INSIDE = {  # where one device's gradients are scaled
    "averaged": lambda scale, axis: grads.averaged(scale(GRAD), axis),
    "averaged, in parts": lambda scale, axis: grads.averaged(two_parts(scale(GRAD)), axis),
    "averaged, of parts": lambda scale, axis: grads.averaged(scale(two_parts(GRAD)), axis),
    "parts, averaged": lambda scale, axis: two_parts(grads.averaged(scale(GRAD), axis)),
    "scattered": lambda scale, axis: zero.gathered_once(
        zero.reduce_scattered(scale(GRAD), axis, P()), axis, P()
    ),
    "pmean": lambda scale, axis: (
        lambda params, x: lax.pmean(scale(GRAD)(varying(params, "data"), x), "data")
    ),
}
OUTSIDE = {
    "averaged": lambda scale, axis: scale(grads.averaged(GRAD, axis)),
    "averaged, of parts": lambda scale, axis: scale(grads.averaged(two_parts(GRAD), axis)),
    "pmean": lambda scale, axis: scale(
        lambda params, x: lax.pmean(GRAD(varying(params, "data"), x), "data")
    ),
}
ALGORITHMS = {
    "lax": lambda name: name,
    "ring": ring,
    "halving": halving,
    "buckets": lambda name: bucketed(ring(name)),
}


def findings(grad, rows=ROWS, **sizes):
    sizes = sizes or {"data": 8}
    f = mesh.spmd(grad, mesh=mesh.make(**sizes), in_specs=(P(), P("data")), out_specs=P())
    with (
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):  # optax needs them
        return [
            each
            for each in lint.program(f, PARAMS, jnp.ones((rows, WIDTH)))
            if each.kind == CLIPPED
        ]


@pytest.mark.sweep(12)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("order", INSIDE)
def test_scaling_before_the_sum_is_found(order, scale, algorithm):
    assert findings(INSIDE[order](SCALES[scale], ALGORITHMS[algorithm]("data")))


@pytest.mark.sweep(12)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("order", OUTSIDE)
def test_scaling_after_the_sum_is_silent(order, scale, algorithm):
    assert findings(OUTSIDE[order](SCALES[scale], ALGORITHMS[algorithm]("data"))) == []


@pytest.mark.sweep(3)
@pytest.mark.parametrize("change", COMMUTES)
@pytest.mark.parametrize("order", INSIDE)
def test_what_commutes_with_the_sum_is_silent(order, change):
    assert findings(INSIDE[order](COMMUTES[change], "data")) == []


def test_the_mistake_is_found_on_its_line():
    (found,) = findings(grads.averaged(by_hand(GRAD), "data"))
    lines, first = inspect.getsourcelines(by_hand)
    (at,) = (first + i for i, line in enumerate(lines) if line.rstrip().endswith("# wrong"))
    assert found.where == f"{__file__}:{at}"
    assert "which differs along 'data'" in found.harm
    assert "each of 8 devices" in found.harm
    assert found.cure.startswith("Sum first: grads.clipped(grads.averaged(grad, axis), max_norm)")


def test_axes_of_one_device_do_not_count():
    assert findings(grads.averaged(by_hand(GRAD), "data"), data=1, other=8) == []


def test_tokens_that_are_split_count_too():
    grad = grads.averaged(by_hand(GRAD), ("data", "context"))
    f = mesh.spmd(
        grad, mesh=mesh.make(data=1, context=8), in_specs=(P(), P("data", "context")), out_specs=P()
    )
    batch = jnp.ones((4, ROWS, WIDTH))
    with jax.numpy_rank_promotion("allow"):
        (found,) = (each for each in lint.program(f, PARAMS, batch) if each.kind == CLIPPED)
    assert "over 'context': each of 8" in found.harm


# What looks like the mistake and is none


def of_each_example(params, x):
    """Differentially private training: the gradient of each row is clipped."""
    one = by_hand(jax.value_and_grad(lambda params, row: loss(params, row[None])))
    values, gradients = jax.vmap(one, in_axes=(None, 0))(varying(params, "data"), x)
    return lax.pmean(jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), (values, gradients)), "data")


def of_each_example_in_a_loop(params, x):
    params = varying(params, "data")
    one = by_hand(jax.value_and_grad(lambda params, row: loss(params, row[None])))

    def add(total, row):
        return jax.tree.map(jnp.add, total, one(params, row)), None

    zeros = jax.tree.map(jnp.zeros_like, (varying(jnp.zeros(()), "data"), params))
    return lax.pmean(lax.scan(add, zeros, x)[0], "data")


def of_each_example_in_microbatches(params, x):
    return grads.averaged(grads.accumulated(by_hand(GRAD), microbatches=4), "data")(params, x)


def with_its_norm_to_look_at(params, x):
    """The norm of a device's own gradients, as a figure beside them."""

    def grad(params, x):
        value, gradients = GRAD(params, x)
        return (value, optax.tree.norm(gradients)), gradients

    return grads.averaged(grad, "data")(params, x)


def a_perturbation_of_all_rows(params, x):
    """A parameter that is added to the data, whose norm the loss takes: forward and backward scale
    by it, rightly."""

    def energy(params, x):
        y = x[0] @ jnp.eye(WIDTH) + params["bias"]
        return jnp.sum(jnp.sin(y / jnp.linalg.norm(y)))

    return grads.averaged(jax.value_and_grad(energy), "data")(params, x)


RIGHT = [
    of_each_example,
    of_each_example_in_a_loop,
    of_each_example_in_microbatches,
    with_its_norm_to_look_at,
    a_perturbation_of_all_rows,
]


@pytest.mark.parametrize("grad", RIGHT)
def test_no_mistake(grad):
    assert findings(grad) == []


def test_one_row_a_device_is_an_example():
    assert findings(grads.averaged(by_hand(GRAD), "data"), rows=8) == []


def test_one_leaf_of_several_is_found():
    scale = lambda gradients: (
        gradients | {"layers": gradients["layers"] / jnp.linalg.norm(gradients["layers"])}
    )

    def grad(params, x):
        value, gradients = GRAD(params, x)
        return value, scale(gradients)

    assert findings(grads.averaged(two_parts(grad), "data"))


ISLANDS = {"island": 2, "data": 4}


def test_islands_clip_by_their_own_norms():
    """Each island takes its own steps; the mean of what they changed is no mean of clipped
    gradients."""
    world, optimizer, outer = mesh.make(**ISLANDS), optax.sgd(0.1), islands.outer_nesterov(0.7)
    train = step.make(grads.averaged(GRAD, "data"), optimizer, max_norm=0.1)
    inner = step.init(lambda: PARAMS, optimizer, rules.match("**", P()), world)
    state, specs = islands.init(*inner, outer, world, axis="island")
    local = islands.local(train, outer, every=1, axis="island")
    f = mesh.spmd(
        local, mesh=world, in_specs=(specs, P(("island", "data"))), out_specs=(specs, P("island"))
    )
    assert lint.program(f, state, jnp.ones((ROWS, WIDTH))) == []


def test_islands_by_hand_clip_by_their_own_norms():
    def local(params, x):
        _, gradients = by_hand(grads.averaged(GRAD, "data"))(params, x)
        return jax.tree.map(lambda w, g: lax.pmean(w - 0.1 * g, "island"), params, gradients)

    specs, stacked = P("island"), jax.tree.map(lambda w: jnp.concatenate([w, w]), PARAMS)
    f = mesh.spmd(
        local, mesh=mesh.make(**ISLANDS), in_specs=(specs, P(("island", "data"))), out_specs=P()
    )
    assert lint.program(f, stacked, jnp.ones((ROWS, WIDTH))) == []
