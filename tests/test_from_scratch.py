"""The program that builds everything by itself computes what the kit does."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from parallax import mesh, pipeline, rules, schedule, step, tensor, zero
from parallax.collectives import ring

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
STEPS = 6


@pytest.fixture(scope="module")
def scratch():
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(EXAMPLES))
        import from_scratch

        yield from_scratch


@pytest.fixture(scope="module")
def losses(scratch):
    with jax.numpy_dtype_promotion(
        "standard"
    ):  # optax mixes float32 schedules with float64 weights
        return scratch.on_eight(STEPS)


@pytest.mark.sweep(3, "wholes")
def test_its_losses_are_those_of_the_kit(scratch, losses):
    """The kit's pipeline keeps residuals where the program computes them again; the order of the
    sums is another."""
    with jax.numpy_dtype_promotion("standard"):
        np.testing.assert_allclose(losses, with_the_kit(scratch), rtol=1e-11)


@pytest.mark.sweep(3, "wholes")
def test_its_losses_are_those_of_one_device(scratch, losses):
    with jax.numpy_dtype_promotion("standard"):
        np.testing.assert_allclose(losses, scratch.on_one(STEPS), rtol=1e-11)


def with_the_kit(scratch):
    def enter(model, part):
        return part[0] @ model["embed"]

    def stage(model, x, part, position):
        def layer(x, w):
            hidden = jax.nn.gelu(tensor.column(x, w["up"], None, ring("tensor")))
            return x + tensor.row(hidden, w["down"], None, ring("tensor")), None

        return jax.lax.scan(layer, x, model["layers"])[0]

    def head(model, x, part):
        return jnp.mean((x @ model["out"] - part[1]) ** 2)

    def make_model():  # the kit's layers are [chunks, layers, ...]
        params = scratch.make_params()
        return params | {"layers": jax.tree.map(lambda leaf: leaf[None], params["layers"])}

    def rows(batch):  # replica by replica, each with its part of every microbatch
        return jnp.concatenate(
            [part.reshape(-1, part.shape[-1]) for part in jnp.split(batch, 2, axis=1)]
        )

    devices = mesh.make(data=2, stage=2, tensor=2)
    split = {
        "**.up": P(None, "stage", None, "tensor"),
        "**.down": P(None, "stage", "tensor"),
        "**": P(),
    }
    rule = rules.first(*(rules.match(pattern, spec) for pattern, spec in split.items()))
    shared = rules.fsdp("data", size=2, keep={"layers.**": (0, 1)}, inside=rule)
    shares = rules.specs(jax.eval_shape(make_model), shared, devices)
    table = schedule.one_f_one_b_lockstep(scratch.STAGES, scratch.MICROBATCHES)
    grad = pipeline.value_and_grad(
        enter, stage, head, table, ring("stage"), blocks=lambda model: model["layers"]
    )
    grad = zero.reduce_scattered(grad, ring("data"), shares)
    state, specs = step.init(make_model, scratch.OPTIMIZER, rule, devices, optimizer_rule=shared)
    train = step.make(grad, zero.sharded(scratch.OPTIMIZER, ring("data"), shares))
    train = jax.jit(
        mesh.spmd(train, mesh=devices, in_specs=(specs, P("data")), out_specs=(specs, P()))
    )
    losses = []
    for i in range(STEPS):
        state, info = jax.block_until_ready(train(state, jax.tree.map(rows, scratch.make_batch(i))))
        losses.append(float(info.loss))
    return losses
