"""The sum on the first stage and the copies of the last stage's array, for any number of stages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from reference import EXACT, FLOAT64, assert_close

from parallax import jaxprs, mesh, pipeline, plan
from parallax.layout import Layout
from parallax.models import decoder, gpt2
from parallax.pipeline import ends
from parallax.schedule import one_f_one_b, one_f_one_b_lockstep, zero_bubble_lockstep

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


@pytest.mark.parametrize("stages", [4, 8])
def test_nothing_of_other_stages_remains(stages):
    """An idle stage may have computed NaN."""
    world = mesh.make(devices=jax.devices()[:stages], stage=stages)
    copy = lambda x: ends.copy_from_last(x, "stage")
    run = mesh.spmd(copy, mesh=world, in_specs=P("stage"), out_specs=P("stage"))
    x = jnp.full((stages, 3), jnp.nan).at[-1].set(2.0)
    np.testing.assert_array_equal(run(x), jnp.full((stages, 3), 2.0))
    gradient = jax.grad(lambda x: jnp.sum(run(x)))(x)
    np.testing.assert_array_equal(gradient, jnp.zeros((stages, 3)).at[-1].set(stages))


def test_between_many_stages_no_array_is_sent_in_rounds():
    """A tree of hops needs 3 rounds of whole arrays between 8 stages."""
    for stages, sends in ((4, True), (8, False)):
        _, x, _, _ = on_stages(stages, f := lambda x: ends.sum_to_first(x, "stage"))
        run = mesh.spmd(
            f, mesh=mesh.abstract(stage=stages), in_specs=P("stage"), out_specs=P("stage")
        )
        names = {eqn.primitive.name for eqn in jaxprs.every(jax.make_jaxpr(run)(x).jaxpr)}
        assert ("ppermute" in names) == sends


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


def test_the_last_stages_mask_stays_a_mask():
    """Its sum over the stages is a count, and `~1` is true."""
    world = mesh.make(devices=jax.devices()[:2], stage=2)
    last = lambda x: pipeline.from_last(x, "stage")
    run = mesh.spmd(last, mesh=world, in_specs=P("stage"), out_specs=P())
    masks = jnp.array([[True, True], [True, False]])
    found = run({"mask": masks, "x": masks.astype(jnp.float32)})
    assert found["mask"].dtype == bool
    np.testing.assert_array_equal(found["mask"][0], masks[1])
    np.testing.assert_array_equal(found["x"][0], masks[1])


WIDTH = 8
SPECS = {"scale": P("stage"), "blocks": P(None, "stage")}


def gathered(scale):
    return jax.lax.all_gather(scale, "stage", tiled=True)


def split_end(*, embed_scales, whole):
    """A small model whose `scale`, split over the stages, is used by embed or by head. The head is
    0 / 0 for an `x` of another microbatch than the batch's."""

    def embed(params, part):
        x = part["x"] * (whole(params["scale"])[None] if embed_scales else 1)
        return {"x": x, "tag": part["tag"], "mask": part["x"] > 0}

    def stage(params, x, part, position):
        layer = lambda h, w: (h + jnp.tanh(h @ w), None)
        return x | {"x": jax.lax.scan(layer, x["x"], params["blocks"])[0]}

    def head(params, x, part):
        matches = jnp.sqrt(1 - (100 * (x["tag"] - part["tag"])) ** 2)[:, None]
        y = jnp.where(~x["mask"], 0, x["x"])
        y *= 1 if embed_scales else whole(params["scale"])[None]
        return jnp.mean((y * matches) ** 2)

    return embed, stage, head


@pytest.mark.parametrize("make", [one_f_one_b_lockstep, zero_bubble_lockstep, one_f_one_b])
@pytest.mark.parametrize(("embed_scales", "stages"), [(True, 4), (False, 4), (False, 8)])
def test_embed_or_head_may_gather_what_is_split_over_the_stages(make, embed_scales, stages):
    """Each stage's part has its gradient, though only the last stage's loss is used."""
    rows = 8
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "scale": 1 + jax.random.normal(keys[0], (WIDTH,), FLOAT64),
        "blocks": jax.random.normal(keys[1], (1, stages, WIDTH, WIDTH), FLOAT64) / 3,
    }
    tags = jnp.arange(rows, dtype=FLOAT64) / 64
    batch = {"x": jax.random.normal(keys[2], (rows, WIDTH), FLOAT64), "tag": tags}
    blocks = lambda params: params["blocks"]
    split = split_end(embed_scales=embed_scales, whole=gathered)
    grad = pipeline.value_and_grad(*split, make(stages, 4), "stage", blocks=blocks)
    world = mesh.make(devices=jax.devices()[:stages], stage=stages)
    run = mesh.spmd(grad, mesh=world, in_specs=(SPECS, P()), out_specs=(P(), SPECS))
    functions = split_end(embed_scales=embed_scales, whole=lambda scale: scale)
    plain = pipeline.unpipelined(*functions, blocks=blocks)
    expected = jax.jit(jax.value_and_grad(plain))(params, batch)
    assert_close(jax.jit(run)(params, batch), expected, EXACT)
