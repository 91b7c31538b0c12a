"""A user's file (`user.py`, read strictly by the type checker) does what it says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import user
from jax.sharding import PartitionSpec as P

from parallax import mesh
from parallax.collectives.types import varying

EACH = P(("data", "tensor"))


def traced(f, *shapes):
    """The shapes of `f` of local blocks on data 4 x tensor 2, traced."""
    world = mesh.make(data=4, tensor=2)
    local = lambda *arguments: jax.tree.map(
        lambda leaf: varying(leaf, ("data", "tensor"))[None], f(*arguments)
    )
    run = mesh.spmd(local, mesh=world, in_specs=(EACH,) * len(shapes), out_specs=EACH)
    return jax.eval_shape(run, *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))


def test_collectives():
    assert len(traced(user.collectives, (64, 4))) == 18
    assert traced(user.along, (64, 4)).shape == (8, 8, 4)


def test_schedules(tmp_path):
    tables = user.schedules(tmp_path / "gpipe.csv")
    np.testing.assert_array_equal(tables[0].forward, tables[-1].forward)


def test_a_state_and_the_steps():
    world, make = mesh.make(data=8), lambda: {"w": jnp.ones((64, 64)), "b": jnp.ones(64)}
    state, specs = user.init(make, world)
    assert (int(state.step), specs.model["w"]) == (0, P("data"))
    assert len(user.train_steps(specs.model)) == 6
    assert callable(user.pipelined())
    total = user.mapped(lambda x: jax.lax.psum(x, "data"), world)
    np.testing.assert_array_equal(total(jnp.arange(8.0)), [28.0])


@pytest.mark.sweep(30, "steps")
def test_gpt2(tmp_path):
    with jax.numpy_dtype_promotion("standard"):
        state, info = user.gpt2_step(mesh.make(data=4, stage=1, tensor=2), tmp_path)
    assert (int(state.step), bool(info.skipped)) == (1, False)
