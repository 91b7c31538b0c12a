"""Weights wide, products narrow, sums wide: read from the lowered program; and the loss scale that
float16 needs."""

import functools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P

from parallax import grads, mesh, pipeline, precision, rules, schedule, step
from parallax.collectives import ring
from parallax.models import gpt2

CONFIG = gpt2.Config(layers=2, heads=2, width=32, context=16, vocabulary=61)
NARROW = {"bfloat16": "bf16", "float16": "f16"}
DOT = re.compile(r"dot_general.*: \(tensor<(?:\d+x)*(\w+)>, tensor<(?:\d+x)*(\w+)>\)")
CASES = {  # XLA's CPU backend has no float16 for jax.nn's attention
    "bfloat16": ("bfloat16", gpt2.attention),
    "float16": ("float16", gpt2.attention),
    "bfloat16, jax.nn": (
        "bfloat16",
        functools.partial(jax.nn.dot_product_attention, is_causal=True),
    ),
}


class Stages(NamedTuple):
    """A head's matrix, and one for each stage: [v, P, D, D]."""

    table: Any
    blocks: Any


def assert_no_wide_product(lowered, dtype):
    """No matrix product of a lowered program, before any backend rewrites it, multiplies anything
    but `dtype`."""
    pairs = DOT.findall(lowered.as_text())
    assert pairs
    assert {operand for pair in pairs for operand in pair} == {dtype}


def windows(batch=4):
    return (
        np.random.default_rng(0)
        .integers(0, CONFIG.vocabulary, (batch, CONFIG.context + 1))
        .astype(np.int32)
    )


def model():
    return gpt2.GPT2(CONFIG, key=jax.random.key(0))


def shapes():
    return jax.eval_shape(model), (windows(), None)


@pytest.mark.parametrize("case", CASES)
def test_gpt2_multiplies_narrow_numbers_alone(case):
    dtype, attend = CASES[case]
    loss = functools.partial(gpt2.loss, attend=attend)
    forward = jax.jit(lambda model, batch: loss(precision.cast(model, jnp.dtype(dtype)), batch))
    with jax.numpy_dtype_promotion("standard"):  # jax.nn's attention promotes
        assert_no_wide_product(forward.lower(*shapes()), NARROW[dtype])


@pytest.mark.parametrize("dtype", NARROW)
def test_exponentials_and_roots_are_wide(dtype):
    """Those of softmax, norms and the loss."""
    forward = jax.jit(
        lambda model, batch: gpt2.loss(precision.cast(model, jnp.dtype(dtype)), batch)
    )
    types = re.findall(
        r"stablehlo\.(?:exponential|rsqrt|log) .*tensor<(?:\d+x)*(\w+)>",
        forward.lower(*shapes()).as_text(),
    )
    assert len(types) >= 5
    assert set(types) == {"f32"}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("dtype", NARROW)
def test_its_gradients_do_too(dtype):
    grad = precision.mixed(
        grads.accumulated(jax.value_and_grad(gpt2.loss), microbatches=2), jnp.dtype(dtype)
    )
    assert_no_wide_product(jax.jit(grad).lower(*shapes()), NARROW[dtype])


def test_the_check_sees_a_wide_product():
    wide = jax.jit(lambda x: x.astype(jnp.float32) @ x.astype(jnp.float32).T).lower(
        jnp.ones((2, 3), jnp.bfloat16)
    )
    with pytest.raises(AssertionError):
        assert_no_wide_product(wide, "bf16")


def test_parameters_are_cast_once_a_step():
    """Outside the loop over microbatches: its body holds no conversion of a weight's shape."""
    grad = precision.mixed(
        grads.accumulated(jax.value_and_grad(lambda w, x: jnp.mean(x @ w)), microbatches=4),
        jnp.bfloat16,
    )
    jaxpr = jax.make_jaxpr(grad)(jnp.ones((5, 7)), jnp.ones((8, 5), jnp.bfloat16))
    (loop,) = [equation for equation in jaxpr.eqns if equation.primitive.name == "scan"]
    before = jaxpr.eqns[: jaxpr.eqns.index(loop)]
    to_narrow = lambda equations: [
        e
        for e in equations
        if e.primitive.name == "convert_element_type" and str(e.outvars[0].aval) == "bfloat16[5,7]"
    ]
    assert len(to_narrow(before)) == 1
    assert not to_narrow(loop.params["jaxpr"].eqns)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_mixed_casts_in_and_back(dtype):
    params = {
        "w": jnp.arange(3.0, dtype=jnp.float32),
        "count": jnp.ones((), jnp.int32),
        "name": "a name",
    }

    def grad(params, batch):
        assert params["w"].dtype == dtype
        assert params["count"].dtype == jnp.int32
        assert params["name"] == "a name"
        return jnp.ones((), dtype), {"w": params["w"] * batch, "count": None, "name": None}

    loss, gradients = precision.mixed(grad, dtype)(params, jnp.asarray(2, dtype))
    assert loss.dtype == jnp.float32
    assert gradients["w"].dtype == jnp.float32
    np.testing.assert_array_equal(gradients["w"], [0, 2, 4])


def test_sums_are_wide_to_the_end():
    """1 and 255 times 2^-8 are added up in float32, and the mean is rounded nowhere before it is
    reduced over devices."""
    batch = jnp.asarray([1.0] + 255 * [2.0**-8], jnp.bfloat16)
    grad = grads.accumulated(jax.value_and_grad(lambda w, x: jnp.sum(w * x)), microbatches=256)
    _, mean = precision.mixed(grad, jnp.bfloat16)(jnp.ones((), jnp.float32), batch)
    assert float(mean) == (1 + 255 / 256) / 256


@pytest.mark.sweep(3, "wholes")
def test_mixed_gradients_are_near_the_wide_ones():
    draw = np.random.default_rng(0).normal
    params = {
        "up": jnp.asarray(draw(size=(16, 64)) / 4, jnp.float32),
        "down": jnp.asarray(draw(size=(64, 16)) / 8, jnp.float32),
    }
    x = jnp.asarray(draw(size=(32, 16)), jnp.float32)

    def loss(params, x):
        y = jax.nn.gelu(x.astype(params["up"].dtype) @ params["up"]) @ params["down"]
        return jnp.mean(jnp.square(y.astype(jnp.float32) - x))

    grad = jax.value_and_grad(loss)
    (value, gradients), (right, expected) = (
        precision.mixed(grad, jnp.bfloat16)(params, x),
        grad(params, x),
    )
    eps = float(jnp.finfo(jnp.bfloat16).eps)
    np.testing.assert_allclose(value, right, rtol=eps)
    for (
        name
    ) in params:  # each number on the way is rounded to 8 bits about five times, with random signs
        assert jnp.linalg.norm(gradients[name] - expected[name]) < 2 * eps * jnp.linalg.norm(
            expected[name]
        )


POWERS = st.integers(0, 20).map(lambda k: 2.0**k)


@pytest.mark.bits
@settings(max_examples=20)
@given(scale=POWERS, x=st.floats(-4, 4, width=32))
def test_scaled_then_unscaled_is_the_same_bits(scale, x):
    loss = lambda w, batch: jnp.sum(jnp.sin(w) * batch)
    w, batch, scale = (
        jnp.asarray([x, 1.0], jnp.float32),
        jnp.asarray(3.0, jnp.float32),
        jnp.asarray(scale, jnp.float32),
    )
    grad = precision.unscaled(jax.value_and_grad(precision.scaled(loss, scale)), scale)
    jax.tree.map(np.testing.assert_array_equal, grad(w, batch), jax.value_and_grad(loss)(w, batch))


@pytest.mark.bits
def test_a_pipeline_takes_a_scaled_head():
    """Its scale is a traced number, as in a step's state; scaled by a power of two, the gradients
    have the same bits."""
    params, x = (
        Stages(jnp.full((3, 3), 0.5), jnp.linspace(-1.0, 1.0, 18).reshape(1, 2, 3, 3)),
        jnp.linspace(0.0, 1.0, 12),
    )
    head = lambda params, x, part: jnp.mean(jnp.cos(x @ params.table))
    enter, stage = (
        lambda params, part: part,
        lambda params, x, part, position: jnp.tanh(x @ params.blocks[0]),
    )

    def grad_of(scale):
        table = schedule.one_f_one_b_lockstep(2, 2)
        return precision.unscaled(
            pipeline.value_and_grad(enter, stage, precision.scaled(head, scale), table, "stage"),
            scale,
        )

    specs, world = Stages(P(), P(None, "stage")), mesh.make(stage=2, devices=jax.devices()[:2])
    run = jax.jit(
        mesh.spmd(
            lambda params, x, scale: grad_of(scale)(params, x),
            mesh=world,
            in_specs=(specs, P(), P()),
            out_specs=(P(), specs),
        )
    )
    results = [
        jax.block_until_ready(run(params, x.reshape(4, 3), precision.Scale(k).value))
        for k in (1.0, 2.0**15)
    ]
    jax.tree.map(np.testing.assert_array_equal, *results)


def test_scaling_saves_gradients_that_float16_loses():
    loss = lambda w, x: jnp.mean((w * x).astype(jnp.float32))
    w, x = jnp.ones(1024, jnp.float32), jnp.full(1024, 2.0**-16, jnp.float16)
    lost = precision.mixed(jax.value_and_grad(loss), jnp.float16)(w, x)[1]
    np.testing.assert_array_equal(lost, 0)  # 2^-26, and float16 ends at 2^-24
    scale = precision.Scale(2.0**12).value
    kept = precision.mixed(jax.value_and_grad(precision.scaled(loss, scale)), jnp.float16)
    np.testing.assert_array_equal(precision.unscaled(kept, scale)(w, x)[1], 2.0**-26)


def history(scale, finite, **options):
    """The scale's value after each step."""
    values = []
    for good in finite:
        scale = precision.adjusted(scale, jnp.asarray(good, bool), **options)
        values.append(float(scale.value))
    return scale, values


def test_the_scale_falls_at_an_overflow_and_rises_after_an_interval():
    scale, values = history(
        precision.Scale(8.0), [1, 1, 1, 0, 1, 1, 0, 0, 1, 1, 1, 1, 1, 1], interval=3
    )
    assert values == [8, 8, 16, 8, 8, 8, 4, 2, 2, 2, 4, 4, 4, 8]
    assert (int(scale.skipped), int(scale.good)) == (3, 0)
    assert [leaf.dtype for leaf in jax.tree.leaves(scale)] == [jnp.float32, jnp.int32, jnp.int32]


def test_a_scale_outside_jit_may_be_donated():
    adjust = jax.jit(precision.adjusted, donate_argnums=0)
    assert adjust(precision.Scale(), jnp.asarray(True)).good == 1


def test_its_defaults_are_those_of_torch():
    scale = precision.Scale()
    assert float(scale.value) == 2**15
    almost = precision.adjusted(precision.Scale(), jnp.asarray(True))
    assert float(almost.value) == 2**15
    run = jax.jit(
        lambda s: lax.fori_loop(0, 1999, lambda _, s: precision.adjusted(s, jnp.asarray(True)), s)
    )
    assert float(run(scale).value) == 2**15
    assert float(precision.adjusted(run(scale), jnp.asarray(True)).value) == 2**16
    assert float(precision.adjusted(run(scale), jnp.asarray(False)).value) == 2**14


@settings(max_examples=20)
@given(finite=st.lists(st.booleans(), max_size=40), start=POWERS)
def test_the_scale_is_a_power_of_two_within_its_bounds(finite, start):
    scale, values = history(precision.Scale(start), finite, interval=2)
    assert all(1 <= value <= 2**24 and np.log2(value) % 1 == 0 for value in values)
    assert int(scale.skipped) == finite.count(False)


@pytest.mark.parametrize("limit", [2.0**4, 2.0**9])
def test_the_scale_settles_below_what_overflows(limit):
    """With an overflow above `limit`, it ends at `limit`, and one step in `interval` is lost to
    trying more."""
    scale, lost = precision.Scale(2.0**15), []
    for _ in range(200):
        finite = scale.value <= limit
        lost.append(not finite)
        scale = precision.adjusted(scale, finite, interval=20)
    assert sum(lost[:11]) == 15 - np.log2(limit)
    assert float(scale.value) in (limit, 2 * limit)
    assert sum(lost[20:]) <= 180 / 20


def test_select_keeps_what_is_not_arrays_and_what_is_not_a_number():
    new, old = (
        {"w": jnp.asarray([jnp.nan, 1.0]), "f": jnp.sin},
        {"w": jnp.asarray([2.0, 3.0]), "f": jnp.sin},
    )
    np.testing.assert_array_equal(precision.select(jnp.asarray(False), new, old)["w"], old["w"])
    np.testing.assert_array_equal(precision.select(jnp.asarray(True), new, old)["w"], new["w"])
    assert precision.select(jnp.asarray(True), new, old)["f"] is jnp.sin


OPTIMIZER = optax.adam(0.1)


def float16_step(state, batch):
    """A step of float16 over data x tensor."""

    def loss(params, x):
        return lax.psum(jnp.mean((params["w"][None] * x).astype(jnp.float32)), "tensor")

    def grad_of(scale):
        grad = precision.mixed(jax.value_and_grad(precision.scaled(loss, scale)), jnp.float16)
        return precision.unscaled(grads.averaged(grad, ring("data")), scale)

    grad = precision.ScaledGrad(grad_of)
    return step.make(grad, OPTIMIZER, reduce_norm_over=[ring("data")])(state, batch)


def test_an_overflow_on_one_device_skips_the_step_on_all():
    world = mesh.make(data=4, tensor=2)
    rule = rules.match("w", P("tensor"))
    make_model = lambda: {"w": jnp.ones(2, jnp.float32)}
    state, specs = step.init(make_model, OPTIMIZER, rule, world, scale=precision.Scale(2.0**15))
    run = jax.jit(
        mesh.spmd(
            float16_step, mesh=world, in_specs=(specs, P("data", "tensor")), out_specs=(specs, P())
        )
    )
    usual, huge = np.full((8, 2), 0.5, np.float16), np.full((8, 2), 0.5, np.float16)
    huge[5, 1] = (
        6e4  # of 16 numbers, which one device of eight sees: times 2^15 / 2 it is beyond float16
    )
    with jax.numpy_dtype_promotion("standard"):
        after, info = jax.block_until_ready(run(state, huge))
        jax.tree.map(
            np.testing.assert_array_equal,
            (after.model, after.optimizer),
            (state.model, state.optimizer),
        )
        assert (float(after.scale.value), int(info.skipped), int(after.step)) == (2.0**14, 1, 1)
        then, info = jax.block_until_ready(run(after, usual))
    assert (
        float(then.scale.value),
        int(then.scale.skipped),
        int(then.scale.good),
        int(then.step),
    ) == (2.0**14, 1, 1, 2)
    assert not info.skipped
    assert np.isfinite(float(info.loss))
    np.testing.assert_allclose(
        then.model["w"], 0.9, rtol=1e-6
    )  # Adam's first step is its learning rate
