"""Any ordinary Equinox model trains on every layout as on one device."""

import functools
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from reference import EXACT
from user_models import KINDS, OPTIMIZER, batch_of, enter, head, on, same, stage

from parallax import grads, mesh, pipeline, rules, schedule, step, zero

STEPS = 5


class Trained(NamedTuple):
    """Losses, and what a model and its optimizer's state became."""

    losses: list
    model: Any
    optimizer: Any


@functools.cache
def alone(name):
    """One device, with nothing of ours but the model: the gradient function, optax, and `after` by
    hand."""
    kind = KINDS[name]
    whole = lambda model: jax.tree.map(
        lambda leaf: jnp.asarray(leaf) if mesh.is_array(leaf) else leaf, model
    )
    model = whole(kind.make())
    trained = lambda model: eqx.filter(eqx.filter(model, kind.trainable), eqx.is_inexact_array)
    optimizer = OPTIMIZER.init(trained(model))
    grad = kind.grad(lambda model, batch: kind.loss(model, batch, ()))

    @eqx.filter_jit
    def train(model, optimizer, batch):
        value, gradients = grad(model, batch)
        loss, aux = value if isinstance(value, tuple) else (value, None)
        updates, optimizer = OPTIMIZER.update(gradients, optimizer, trained(model))
        return kind.after(eqx.apply_updates(model, updates), aux), optimizer, loss

    losses = []
    with jax.numpy_dtype_promotion("standard"):
        for number in range(STEPS):
            model, optimizer, loss = train(model, optimizer, batch_of(number))
            losses.append(loss)
    return Trained(losses, model, optimizer)


def data(kind):
    """Eight replicas, two microbatches each."""
    grad = grads.accumulated(kind.grad(lambda m, b: kind.loss(m, b, ())), microbatches=2)
    return (
        {"data": 8},
        rules.match("**", P()),
        None,
        lambda _: (grads.averaged(grad, "data"), OPTIMIZER),
    )


def tensor_parallel(kind):
    rule = lambda path, leaf: next(
        (spec for glob, spec in kind.split.items() if rules.matches_glob(glob, path)), P()
    )
    grad = kind.grad(lambda m, b: kind.loss(m, b, "tensor"))
    return {"data": 4, "tensor": 2}, rule, None, lambda _: (grads.averaged(grad, "data"), OPTIMIZER)


def shares(kind):
    return rules.first(
        *(rules.match(glob, P()) for glob in kind.keep), rules.fsdp("data", size=8, min_size=1)
    )


def zero_1(kind):
    grad = grads.accumulated(kind.grad(lambda m, b: kind.loss(m, b, ())), microbatches=2)

    def made(specs):
        return zero.reduce_scattered(grad, "data", specs), zero.sharded(OPTIMIZER, "data", specs)

    return {"data": 8}, rules.match("**", P()), shares(kind), made


def zero_3(kind):
    def made(specs):
        loss = zero.gathered(lambda m, b: kind.loss(m, b, ()), "data", specs)
        return grads.averaged(grads.accumulated(kind.grad(loss), microbatches=2), "data"), OPTIMIZER

    return {"data": 8}, shares(kind), None, made


def pipelined(kind):
    """Two replicas of four stages."""
    options = {"blocks": lambda model: model["blocks"], "trainable": kind.trainable}
    grad = pipeline.value_and_grad(
        enter, stage, head, schedule.one_f_one_b_lockstep(4, 4), "stage", **options
    )
    rule = lambda path, leaf: P(None, "stage") if path.startswith("blocks") else P()
    return {"data": 2, "stage": 4}, rule, None, lambda _: (grads.averaged(grad, "data"), OPTIMIZER)


WAYS = {
    "data": data,
    "tensor": tensor_parallel,
    "zero 1": zero_1,
    "zero 3": zero_3,
    "pipeline": pipelined,
}
BLOCKS = ("tied decoder", "adapted decoder")
CASES = [
    (name, way)
    for name in KINDS
    for way in WAYS
    if (name in BLOCKS if way == "pipeline" else name != "adapted decoder")
]


@pytest.mark.sweep(30)
@pytest.mark.parametrize(("name", "way"), CASES)
def test_five_steps_are_those_of_one_device(name, way):
    kind, plain, traces = KINDS[name], alone(name), []
    kind = kind._replace(
        loss=lambda *arguments: traces.append(name) or KINDS[name].loss(*arguments)
    )
    sizes, rule, optimizer_rule, made = WAYS[way](kind)
    world = mesh.make(**sizes)
    with jax.numpy_dtype_promotion("standard"):
        state, specs = step.init(
            kind.make,
            OPTIMIZER,
            rule,
            world,
            optimizer_rule=optimizer_rule,
            trainable=kind.trainable,
        )
        grad, optimizer = made(
            rules.specs(eqx.filter_eval_shape(kind.make), optimizer_rule or rule, world)
        )
        train = on(
            world,
            step.make(grad, optimizer, after_update=kind.after),
            (specs, P("data")),
            (specs, P()),
            donate="all",
        )
        for number, loss in enumerate(plain.losses):
            state, info = train(state, batch_of(number))
            np.testing.assert_allclose(info.loss, loss, rtol=EXACT)
            if number == 0:
                once = len(traces)
    assert len(traces) == once  # compiled once
    same(state.model, plain.model)
    same(state.optimizer, plain.optimizer)
