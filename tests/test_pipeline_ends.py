"""The sum on the first stage and the copies of the last stage's array, for any number of stages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from parallax import jaxprs, mesh, plan
from parallax.layout import Layout
from parallax.models import decoder, gpt2
from parallax.pipeline import ends

STAGES = range(1, 9)


def on_stages(stages, f):
    """`f` of this stage's row of [stages, 3], and the gradients of a sum with weights."""
    world = mesh.make(devices=jax.devices()[:stages], stage=stages)
    run = mesh.spmd(f, mesh=world, in_specs=P("stage"), out_specs=P("stage"))
    x = jnp.arange(3.0 * stages).reshape(stages, 3)
    weights = 1 + jnp.arange(3.0 * stages)[::-1].reshape(stages, 3)
    return run(x), x, weights, lambda weights: jax.grad(lambda x: jnp.sum(weights * run(x)))(x)


@pytest.mark.parametrize("stages", STAGES)
def test_the_first_stage_has_the_sum(stages):
    y, x, weights, gradient = on_stages(stages, lambda x: ends.sum_to_first(x, "stage"))
    np.testing.assert_array_equal(y[0], x.sum(0))
    # Only the first stage's result counts, so its cotangent goes to all stages.
    weights = weights.at[1:].set(0)
    np.testing.assert_array_equal(gradient(weights), jnp.broadcast_to(weights[0], x.shape))


@pytest.mark.parametrize("stages", STAGES)
def test_all_stages_have_the_last_ones_array(stages):
    y, x, weights, gradient = on_stages(stages, lambda x: ends.copy_from_last(x, "stage"))
    np.testing.assert_array_equal(y, jnp.broadcast_to(x[-1], x.shape))
    expected = jnp.zeros_like(x).at[-1].set(weights.sum(0))
    np.testing.assert_array_equal(gradient(weights), expected)


def test_nothing_of_other_stages_remains():
    """An idle stage may have computed NaN."""
    world = mesh.make(devices=jax.devices()[:4], stage=4)
    copy = lambda x: ends.copy_from_last(x, "stage")
    run = mesh.spmd(copy, mesh=world, in_specs=P("stage"), out_specs=P("stage"))
    x = jnp.full((4, 3), jnp.nan).at[-1].set(2.0)
    np.testing.assert_array_equal(run(x), jnp.full((4, 3), 2.0))
    gradient = jax.grad(lambda x: jnp.sum(run(x)))(x)
    np.testing.assert_array_equal(gradient, jnp.zeros((4, 3)).at[-1].set(4.0))


def test_on_a_cpu_all_parameters_wait_for_the_first_embedding():
    """Its hop stands before the loops over ticks. XLA moves the gathers of parameters out of the
    loops, and beside the hop they could meet it in one rendezvous."""
    layout = Layout(data=2, stage=2, microbatches=4, zero=3)
    world = mesh.abstract(**layout.axes)
    config = gpt2.Config(layers=4, heads=2, width=16, context=8, vocabulary=32)
    windows = jax.ShapeDtypeStruct((8, config.context + 1), jnp.int32)
    with jax.numpy_dtype_promotion("standard"):
        prepared = decoder.train_step(
            gpt2.FAMILY, config, plan.ADAMW, layout, world, batch=8, key=jax.random.key(0)
        )
        program = jax.make_jaxpr(prepared.train)(prepared.shapes, windows)
    (body,) = (
        jaxprs.inner(eqn)[0]
        for eqn in jaxprs.every(program.jaxpr)
        if eqn.primitive.name == "shard_map"
    )
    given, late, waiting = set(body.invars), set(), []
    for eqn in body.eqns:
        operands = {atom for atom in eqn.invars if not jaxprs.is_literal(atom)}
        if eqn.primitive.name == "scan":
            waiting += [x in late for x in operands & given if jaxprs.is_float(x.aval)]
        if operands & given:
            given |= {*eqn.outvars}
        if operands & late or eqn.primitive.name == "ppermute":
            late |= {*eqn.outvars}
    assert len(waiting) > 30
    assert all(waiting)
