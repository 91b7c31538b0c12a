"""The sum on the first stage and the copies of the last stage's array, for any number of stages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from parallax import mesh
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
