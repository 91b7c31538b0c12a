"""A backward pass in two lanes is the one that it was, with no product more, in the ticks and the
memory of its table."""

import functools
import math
import operator

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec as P
from reference import FLOAT64, assert_close
from reference import products as of_computation

from parallax import mesh, pipeline, plan, tensor
from parallax.compiled import hlo
from parallax.jaxprs import every, inner, opened
from parallax.models import flash, gpt2
from parallax.schedule import one_f_one_b_lockstep, zero_bubble_lockstep
from parallax.split_backward import split

D, H, T, L = 4, 6, 3, 2


def weights(seed):
    keys = iter(jax.random.split(jax.random.key(seed), 8))
    normal = lambda *shape: jax.random.normal(next(keys), (L, *shape), FLOAT64) / 3
    return {
        "up": normal(D, H),
        "bias": normal(H),
        "down": normal(H, D),
        "qkv": normal(3, D, D),
        "scale": normal(D),
    }


def layer(w, x, key):
    """Attention, dropout, a feed-forward, weights that are in no product, and the same weight in
    two places."""
    normed = (x - jnp.mean(x, axis=-1, keepdims=True)) * w["scale"][None]
    q, k, v = (normed @ w["qkv"][i] for i in range(3))
    x = x + jax.nn.softmax(q @ k.T) @ v * jax.random.bernoulli(key, 0.7, x.shape).astype(x.dtype)
    return x + jnp.tanh(x @ w["up"] + w["bias"][None]) @ w["down"] + jnp.sin(x @ w["qkv"][0])


def scanned(layer):
    def stage(trained, x, given):
        each = trained, jax.random.split(given["key"], L)
        x, sizes = lax.scan(lambda x, each: (layer(each[0], x, each[1]), jnp.sum(x**2)), x, each)
        return (x, jnp.sum(sizes)), jnp.mean(x)

    return stage


def shared(trained, x, given):
    """One layer's weights in each trip, whose gradients are added up in the loop."""
    one = jax.tree.map(lambda w: w[0], trained)
    out = lax.fori_loop(0, 3, lambda i, x: layer(one, x, given["key"]), x)
    return (out, jnp.zeros((), FLOAT64)), None


def unrolled(trained, x, given):
    for i in range(L):
        x = jax.checkpoint(layer)(jax.tree.map(operator.itemgetter(i), trained), x, given["key"])
    return (x, jnp.sum(trained["bias"] ** 2)), None


def nested(trained, x, given):
    """A loop in a loop, and a conditional, which stays whole."""
    once = lambda x, w: (layer(w, x, given["key"]), None)
    inside = lambda x, _: (lax.scan(once, x, trained)[0], None)
    x = lax.scan(inside, x, None, length=2)[0]
    w = trained["qkv"][0, 0]
    return (lax.cond(jnp.sum(x) > 0, lambda: x @ w, lambda: x + w[:1]), jnp.sum(x)), None


STAGES = {
    "scanned": scanned(layer),
    "remat": scanned(jax.checkpoint(layer)),
    "products": scanned(jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_saveable)),
    "shared": shared,
    "unrolled": unrolled,
    "nested": nested,
    "no weights": lambda trained, x, given: ((jnp.sin(x), jnp.zeros((), FLOAT64)), None),
}


@functools.cache
def both(name, keep):
    """The transpose, and the two halves of it."""
    forward_half, backward_half = keep(STAGES[name])
    x, given_ = jnp.ones((T, D), FLOAT64), {"key": jax.random.key(0)}

    def forward(trained, x, given):
        return forward_half(trained, x, given)[1]

    def whole(trained, given, kept, ct):
        gradients, x = backward_half(trained, given, kept)(ct)
        return x, gradients

    ct = x, jnp.ones((), FLOAT64)
    at_hand = weights(0), given_, forward(weights(0), x, given_)

    def cotangents_first(ct, trained, given, kept):
        return whole(trained, given, kept, ct)

    traced = jax.make_jaxpr(cotangents_first)(ct, *at_hand)
    first, second = (jaxpr_as_fun(half) for half in split(traced, cotangents=2, inputs=1))

    def inputs(trained, given, kept, ct):
        x, *handed = first(*jax.tree.leaves((ct, trained, given, kept)))
        return x, handed

    def weigh(trained, given, kept, handed):
        found = second(*jax.tree.leaves((trained, given, kept)), *handed)
        return jax.tree.unflatten(jax.tree.structure(trained), found)

    return jax.jit(forward), jax.jit(whole), jax.jit(inputs), jax.jit(weigh)


def products(f, *arguments):
    """The operations in products: 2 for each term of each sum."""

    def of(jaxpr, times):
        total = 0
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "dot_general":
                (contracted, _), _ = eqn.params["dimension_numbers"]
                left = eqn.invars[0].aval.shape
                total += (
                    2 * times * eqn.outvars[0].aval.size * math.prod(left[i] for i in contracted)
                )
            trips = eqn.params["length"] if eqn.primitive.name == "scan" else 1
            total += sum(of(body, times * trips) for body in inner(eqn))
        return total

    return of(opened(jax.make_jaxpr(f)(*arguments)), 1)


@pytest.mark.sweep(14)
@pytest.mark.parametrize("keep", [pipeline.residuals, pipeline.inputs])
@pytest.mark.parametrize("name", STAGES)
@settings(max_examples=3)
@given(seed=st.integers(0, 1000))
def test_two_parts_are_the_whole(name, keep, seed):
    """Every gradient, and not one product more; those of weights that only weights need are in the
    second part."""
    forward, whole, inputs, weigh = both(name, keep)
    trained, given_ = weights(seed), {"key": jax.random.key(seed)}
    x, ct = jax.random.normal(jax.random.key(seed + 1), (2, T, D), FLOAT64)
    kept, ct = forward(trained, x, given_), (ct, jnp.full((), 0.7, FLOAT64))
    found_x, passed = inputs(trained, given_, kept, ct)
    found = weigh(trained, given_, kept, passed)
    assert_close(
        (found_x, found), whole(trained, given_, kept, ct), 1e-13
    )  # the same operations; XLA may order sums anew
    first, second = (
        products(inputs, trained, given_, kept, ct),
        products(weigh, trained, given_, kept, passed),
    )
    assert second == OF_WEIGHTS.get(name, 2 * L * T * D * (2 * H + 4 * D))
    if keep is pipeline.residuals:
        assert first + second == products(whole, trained, given_, kept, ct)
    else:  # the last layer's output, which the transpose computes again for nobody
        assert first + second <= products(whole, trained, given_, kept, ct)


ONE = 2 * T * D * (2 * H + 4 * D)  # the products of a layer's weights
OF_WEIGHTS = {"shared": 3 * ONE, "nested": 2 * L * ONE, "no weights": 0}


def test_what_waits_is_no_larger_than_the_cotangents_of_products():
    """Of a layer: those of q, k, v, the products up and down and the second q; what is no product
    is summed before."""
    _, _, inputs, _ = both("scanned", pipeline.residuals)
    forward, *_ = both("scanned", pipeline.residuals)
    trained, given_, x = weights(0), {"key": jax.random.key(0)}, jnp.ones((T, D), FLOAT64)
    kept = forward(trained, x, given_)
    _, passed = jax.eval_shape(inputs, trained, given_, kept, (x, jnp.ones((), FLOAT64)))
    assert sum(leaf.size for leaf in passed) == L * (T * (3 * D + H + D + D) + H + D)


def test_a_collective_of_jax_does_not_keep_the_gradient_of_a_weight_in_the_first_part():
    """JAX gives its collectives an effect, the use of an axis's name. They may run in either
    part."""
    over = mesh.make(data=2, devices=jax.devices()[:2])

    def names(jaxpr):
        return [eqn.primitive.name for eqn in every(opened(jaxpr))]

    def parts(whole, w, x):
        y, transpose = jax.vjp(lambda w, x: jnp.tanh(x @ whole(w)), w, x)
        kept, tree = jax.tree.flatten(transpose)

        def backward(ct, *kept):
            of_w, of_x = jax.tree.unflatten(tree, kept)(ct)
            return of_x, of_w

        first, second = split(jax.make_jaxpr(backward)(y, *kept), cotangents=1, inputs=1)
        found.append((names(first), names(second)))
        return y

    found = []
    gathered = lambda w: lax.all_gather(w, "data", tiled=True)
    for whole, spec in ((gathered, P("data")), (lambda w: w, P())):
        f = functools.partial(parts, whole)
        run = mesh.spmd(f, mesh=over, in_specs=(spec, P("data")), out_specs=P("data"))
        jax.eval_shape(run, jnp.ones((D, D)), jnp.ones((2 * T, D)))
    for (first, second), collective in zip(
        found, ("reduce_scatter", "psum_invariant"), strict=True
    ):
        assert first.count("dot_general") == second.count("dot_general") == 1
        assert collective in second
        assert collective not in first


def test_a_loop_that_only_prints_is_split_too(capfd):
    """It has no result, and its prints come from the first part alone."""

    @jax.checkpoint
    def stage(w, x):
        show = lambda carry, row: (jax.debug.print("row {}", row), (None, None))[1]
        lax.scan(show, None, x[:2, 0])
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

    w, x = jnp.ones((L, D, D), FLOAT64) / D, jnp.ones((T, D), FLOAT64)
    y, transpose = jax.vjp(stage, w, x)
    kept, tree = jax.tree.flatten(transpose)

    def backward(ct, *kept):
        of_w, of_x = jax.tree.unflatten(tree, kept)(ct)
        return of_x, of_w

    first, second = split(jax.make_jaxpr(backward)(y, *kept), cotangents=1, inputs=1)
    jax.effects_barrier()
    capfd.readouterr()
    of_x, *handed = jaxpr_as_fun(first)(y, *kept)
    of_w = jaxpr_as_fun(second)(*kept, *handed)
    jax.effects_barrier()
    assert capfd.readouterr().out.count("row") == 2
    assert_close((of_x, *of_w), backward(y, *kept), 1e-13)


CONFIG = gpt2.Config(layers=4, heads=2, width=32, context=16, vocabulary=8)
ROWS, STAGES_, M = 2, 2, 6


def scanned_blocks():
    """A pipeline of GPT-2's blocks, scanned in each stage, with a head and an end of no
    products."""
    block = functools.partial(
        gpt2.block, config=CONFIG, comms=tensor.comms(()), attend=gpt2.attention
    )
    static = eqx.filter(gpt2.GPT2(CONFIG, key=jax.random.key(0)).blocks, eqx.is_array, inverse=True)
    stage = lambda params, x, part, position: gpt2.run_blocks(
        eqx.combine(params, static), x, None, block
    )
    return lambda params, part: part, stage, lambda params, x, part: jnp.mean(x**2)


def of_scanned_blocks(microbatches, rows):
    """Their mesh, the specs of their arrays, the arrays and the batch."""
    arrays = eqx.filter(gpt2.GPT2(CONFIG, key=jax.random.key(0)).blocks, eqx.is_array)
    batch = jax.ShapeDtypeStruct((rows * microbatches, CONFIG.context, CONFIG.width), jnp.float32)
    world = mesh.make(stage=STAGES_, devices=jax.devices()[:STAGES_])
    return world, P(None, "stage"), jax.tree.map(lambda w: w[None], arrays), batch


@functools.cache
def program(make, microbatches=M, rows=ROWS):
    """That pipeline, compiled."""
    table = make(STAGES_, microbatches)
    grad = pipeline.value_and_grad(*scanned_blocks(), table, "stage", blocks=lambda params: params)
    world, specs, arrays, batch = of_scanned_blocks(microbatches, rows)
    run = jax.jit(mesh.spmd(grad, mesh=world, in_specs=(specs, P()), out_specs=(P(), specs)))
    with jax.numpy_dtype_promotion("standard"):
        return run.lower(arrays, batch).compile()


def operations(compiled):
    """The operations in a compiled program's products, loops counted out."""
    module = hlo.module(compiled)
    return of_computation(module, module.entry)


def tokens_of_a_stage():
    """The operations of a microbatch in a stage's products: those of weights, and those of
    attention's scores."""
    tokens, width, layers = ROWS * CONFIG.context, CONFIG.width, CONFIG.layers // STAGES_
    return layers * 2 * tokens * 12 * width**2, layers * 2 * 2 * tokens * CONFIG.context * width


@pytest.mark.long
def test_operations_are_those_of_the_table():
    """(M + P - 1)(F + I) + M W of 1F1B's (M + P - 1)(F + B), counted in both compiled programs: not
    one more."""
    weight, scores = tokens_of_a_stage()
    F, B = weight + scores, 2 * (weight + scores)
    ticks = M + STAGES_ - 1
    assert operations(program(one_f_one_b_lockstep)) == ticks * (F + B)
    assert operations(program(zero_bubble_lockstep)) == ticks * (F + B - weight) + M * weight


@pytest.mark.sweep(3, "wholes")
@pytest.mark.parametrize("keep", [pipeline.residuals, pipeline.inputs])
def test_the_work_of_a_stage_is_counted_in_its_jaxpr(keep):
    """GPT-2's blocks: F + I + W = F + B exactly, and with all computed again I has F once more."""
    weight, scores = tokens_of_a_stage()
    found = plan.stage_work(
        *scanned_blocks(),
        one_f_one_b_lockstep(STAGES_, M),
        "stage",
        blocks=lambda params: params,
        save=keep,
    )
    world, specs, arrays, batch = of_scanned_blocks(M, ROWS)
    with jax.numpy_dtype_promotion("standard"):
        work = found(arrays, batch, mesh=world, in_specs=(specs, P()))
    again = weight + scores if keep is pipeline.inputs else 0
    assert (work.forward, work.backward - again, work.weight) == (
        weight + scores,
        weight + 2 * scores,
        weight,
    )
    assert work.head == 0
    assert work.costs(2) == (2 * work.forward, 2 * work.backward, 2 * work.weight)


def test_the_work_of_a_kernel_is_what_it_states_or_its_body_at_each_point_of_its_grid():
    """JAX's kernel for TPUs states its operations forward only. Backward it has 7 matmuls of all
    pairs, some of which compute the scores again."""
    world = mesh.make(stage=2, devices=jax.devices()[:2])
    params = {"scale": jax.ShapeDtypeStruct((2, 16), jnp.float32)}  # a layer for each stage
    batch = jax.ShapeDtypeStruct((2, 256, 4, 16), jnp.float32)

    def stage(params, x, microbatch, position):
        q = x * params["scale"][0]
        return flash.attention(q, q, q)

    found = plan.stage_work(
        *(lambda params, x: x, stage, lambda params, x, microbatch: jnp.sum(x)),
        one_f_one_b_lockstep(2, 2),
        "stage",
        blocks=lambda params: params,
    )
    work = found(params, batch, mesh=world, in_specs=({"scale": P("stage")}, P()))
    pairs = 2 * 4 * 256**2 * 16  # of a microbatch of one sequence
    assert work.forward == pytest.approx(2 * pairs, rel=0.1)  # with the softmax's
    assert work.backward + work.weight == 7 * pairs
