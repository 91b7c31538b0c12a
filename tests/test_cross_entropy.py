"""The loss without logits equals the plain one, in value and gradients, split or whole, and holds
and sends what it says."""

import functools
import re
from typing import Any, NamedTuple

import hlo
import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P
from reference import EXACT, assert_close

from parallax import cross_entropy, grads, mesh, pipeline, schedule, tensor
from parallax.collectives import ring, xla

ALGORITHMS = {"ring": ring, "psum": xla}
# The mesh's sizes, the axes over which the table's rows are split, and the block. The batch is
# split over "data".
LAYOUTS = {
    "one": ({"data": 1}, (), 512),
    "tokens one by one": ({"data": 1}, (), 1),
    "data": ({"data": 2}, (), 3),  # ten tokens, in blocks of 3, 3, 3 and 1
    "tensor": ({"data": 2, "tensor": 4}, "tensor", 4),
    "a device of padding alone": ({"data": 1, "tensor": 8}, "tensor", 10),
    "stage x tensor": ({"data": 2, "stage": 2, "tensor": 2}, ("stage", "tensor"), 7),
}
B, T, D, V, VOCABULARY = 4, 5, 3, 16, 13  # three rows of padding

every_layout = pytest.mark.parametrize("layout", LAYOUTS)
every_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS)
UNIT = st.floats(-2, 2, width=32)
SIZE = 6.0  # of the gradients: 3 times a loss of tables and x of at most 2
DOT = re.compile(r"dot_general.*: \(tensor<(?:\d+x)*(\w+)>, tensor<(?:\d+x)*(\w+)>\)")


class Stages(NamedTuple):
    """A head's table, and a matrix for each stage: [v, P, D, D]."""

    table: Any
    blocks: Any


def operands(text):
    """The types of what the matrix products of a lowered program multiply, two a product."""
    return [dtype for pair in DOT.findall(text) for dtype in pair]


def over(layout, f, in_specs, out_specs):
    """`f` mapped; "V" in a spec stands for the axes that split the table."""
    sizes, axis, _ = LAYOUTS[layout]
    world = mesh.make(devices=jax.devices()[: int(np.prod(list(sizes.values())))], **sizes)

    def fill(spec):
        return P(*[(axis or None) if entry == "V" else entry for entry in spec])

    specs = jax.tree.map(fill, (in_specs, out_specs), is_leaf=lambda leaf: isinstance(leaf, P))
    return jax.jit(mesh.spmd(f, mesh=world, in_specs=specs[0], out_specs=specs[1]))


@functools.cache
def blocked(layout, algorithm, wrap=lambda f: f):
    """The loss and its gradients of `x` and of the table, as a head takes them, and the loss
    alone."""
    _, axis, block_tokens = LAYOUTS[layout]
    parallel = {"axis": ALGORITHMS[algorithm](axis)}

    @wrap
    def loss(x, table, targets):
        x = tensor.copy_to(jnp.tanh(x), **parallel)  # something to differentiate in front
        return cross_entropy.mean(
            x, table, targets, vocabulary=VOCABULARY, block_tokens=block_tokens, **parallel
        )

    def body(x, table, targets):
        value, (dx, dtable) = jax.value_and_grad(
            lambda *weights: 3 * loss(*weights, targets), argnums=(0, 1)
        )(x, table)
        n = lax.axis_size("data")
        return (
            lax.pmean(value, "data"),
            (dx / n, dtable / n),
            lax.pmean(loss(x, table, targets), "data"),
        )

    return over(layout, body, (P("data"), P("V"), P("data")), (P(), (P("data"), P("V")), P()))


def plain_loss(x, table, targets):
    every = jax.nn.log_softmax((x @ table.T)[..., :VOCABULARY])
    return -jnp.mean(jnp.take_along_axis(every, targets[..., None], -1))


@jax.jit
def plain(x, table, targets):
    loss = lambda x, table: plain_loss(jnp.tanh(x), table, targets)
    return *jax.value_and_grad(lambda *weights: 3 * loss(*weights), argnums=(0, 1))(x, table), loss(
        x, table
    )


def plain_loss_of_all(x, table, targets):
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(x @ table.T), targets[..., None], -1))


def drawn(data):
    x = data.draw(hnp.arrays(np.float64, (B, T, D), elements=UNIT), label="x")
    table = data.draw(hnp.arrays(np.float64, (V, D), elements=UNIT), label="table")
    targets = data.draw(
        hnp.arrays(np.int32, (B, T), elements=st.integers(0, VOCABULARY - 1)), label="targets"
    )
    return x, table, targets


def near(result, expected):
    """Within rounding: of the loss to its size, of gradients to that of what softmax multiplies."""
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(result))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=EXACT, atol=EXACT * SIZE),
        result,
        expected,
    )
    np.testing.assert_array_equal(result[1][1][VOCABULARY:], 0)  # padding learns nothing


@pytest.mark.sweep(4)
@every_layout
@every_algorithm
@settings(max_examples=8)
@given(data=st.data())
def test_equals_the_plain_loss(layout, algorithm, data):
    arguments = drawn(data)
    near(blocked(layout, algorithm)(*arguments), plain(*arguments))


@pytest.mark.sweep(2)
@pytest.mark.parametrize("layout", ["one", "stage x tensor"])
@settings(max_examples=3)
@given(data=st.data())
def test_equals_it_under_checkpoint(layout, data):
    arguments = drawn(data)
    near(blocked(layout, "ring", jax.checkpoint)(*arguments), plain(*arguments))


@every_algorithm
def test_of_logits_beyond_the_reach_of_exp(algorithm):
    """Logits of 1e4 and more, where float64's exp ends at 709: the softmax is one-hot, and the
    gradients are whole."""
    x, table = np.ones((B, T, D)), np.zeros((V, D))
    table[2], targets = 1e4, np.full((B, T), 2, np.int32)
    targets[0, 0] = 3
    value, (dx, dtable), _ = blocked("tensor", algorithm)(np.arctanh(0.5) * x, table, targets)
    np.testing.assert_allclose(value, 3 * 1.5e4 / (B * T), rtol=EXACT)
    np.testing.assert_allclose(dtable[2:4], [[1.5 / (B * T)] * D, [-1.5 / (B * T)] * D], rtol=EXACT)
    np.testing.assert_allclose(dx[0, 0], 3 * 1e4 * 0.75 / (B * T), rtol=EXACT)  # tanh' = 1 - 0.5^2
    np.testing.assert_array_equal(dx.reshape(-1, D)[1:], 0)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_as_the_head_of_a_pipeline(algorithm):
    """Its rows split over the stages; the gradients of one device."""
    P_, M = 2, 4
    axis = ALGORITHMS[algorithm]("stage")
    draw = np.random.default_rng(0).normal
    params = Stages(draw(size=(V, D)), draw(size=(1, P_, D, D)))
    x, targets = (
        draw(size=(8, T, D)),
        np.random.default_rng(1).integers(0, VOCABULARY, (8, T)).astype(np.int32),
    )

    def head(params, x, part):
        x = tensor.copy_to(pipeline.from_last(x, axis), axis)
        return cross_entropy.mean(
            x, params.table, part[1], axis, vocabulary=VOCABULARY, block_tokens=4
        )

    enter = lambda params, part: part[0]
    stage = lambda params, x, part, position: jnp.tanh(x @ params.blocks[0])
    grad = pipeline.value_and_grad(enter, stage, head, schedule.one_f_one_b_lockstep(P_, M), axis)
    specs = Stages(P("stage"), P(None, "stage"))
    run = mesh.spmd(
        grad,
        mesh=mesh.make(stage=P_, devices=jax.devices()[:P_]),
        in_specs=(specs, P()),
        out_specs=(P(), specs),
    )

    def whole(params):
        return plain_loss(
            jnp.tanh(jnp.tanh(x @ params.blocks[0, 0]) @ params.blocks[0, 1]), params.table, targets
        )

    value, gradients = jax.jit(run)(params, (x, targets))
    expected, right = jax.jit(jax.value_and_grad(whole))(params)
    np.testing.assert_allclose(value, expected, rtol=EXACT)
    assert_close(gradients, right, EXACT)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_inputs_have_wide_sums(dtype):
    """Products of narrow numbers, everything else in float32; gradients in the inputs' types."""
    rng = np.random.default_rng(0)
    x, table = (
        jnp.asarray(rng.normal(size=(2, 64, 32)), dtype),
        jnp.asarray(rng.normal(size=(V, 32)) / 4, dtype),
    )
    targets = rng.integers(0, V, (2, 64)).astype(np.int32)
    loss = functools.partial(cross_entropy.mean, axis=(), block_tokens=16)
    run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    value, gradients = run(x, table, targets)
    wide = [leaf.astype(jnp.float32) for leaf in (x, table)]
    expected, right = jax.value_and_grad(plain_loss_of_all, argnums=(0, 1))(*wide, targets)
    assert value.dtype == jnp.float32
    np.testing.assert_allclose(value, expected, rtol=1e-5)  # sums of 32 terms in float32
    assert [g.dtype for g in gradients] == [x.dtype] * 2
    eps = float(jnp.finfo(dtype).eps)  # softmax less one-hot is rounded once, a gradient once more
    assert_close([g.astype(jnp.float32) for g in gradients], list(right), 2 * eps)
    assert set(operands(run.lower(x, table, targets).as_text())) == {
        "bf16" if dtype == "bfloat16" else "f16"
    }


TOKENS, WORDS, WIDTH = 1024, 4096, 64


def shapes(dtype=jnp.float32):
    sizes = [
        ((4, TOKENS // 4, WIDTH), dtype),
        ((WORDS, WIDTH), dtype),
        ((4, TOKENS // 4), jnp.int32),
    ]
    return [jax.ShapeDtypeStruct(*size) for size in sizes]


@pytest.mark.parametrize("block_tokens", [32, 128])
def test_holds_a_block_of_logits_and_two_tables(block_tokens):
    loss = functools.partial(cross_entropy.mean, axis=(), block_tokens=block_tokens)
    held = lambda f: jax.jit(f).lower(*shapes()).compile().memory_analysis().temp_size_in_bytes
    sums, logits = 4 * (WORDS * WIDTH + TOKENS * WIDTH), 4 * block_tokens * WORDS
    assert held(jax.value_and_grad(loss, argnums=(0, 1))) < 1.1 * (2 * sums + 2 * logits)
    assert held(loss) < 1.1 * (2 * logits + sums)
    assert held(jax.value_and_grad(plain_loss_of_all, argnums=(0, 1))) > 4 * TOKENS * WORDS


@pytest.mark.parametrize(("devices", "most"), [(1, 2048), (4, 2048), (8, 4096)])
def test_blocks_have_2048_tokens_or_512_for_each_device(devices, most):
    """One token more than fits in two blocks makes three."""
    world = mesh.abstract(tensor=devices)

    def loss(x, table, targets):
        return cross_entropy.mean(tensor.copy_to(x, "tensor"), table, targets, "tensor")

    spread = mesh.spmd(loss, mesh=world, in_specs=(P(), P("tensor"), P()), out_specs=P())
    tokens = 2 * most + 1
    sizes = [((tokens, 2), jnp.float32), ((8, 2), jnp.float32), ((tokens,), jnp.int32)]
    text = str(jax.make_jaxpr(spread)(*(jax.ShapeDtypeStruct(*size) for size in sizes)))
    assert f"f32[3,{-(-tokens // 3)},2]" in text


def test_makes_what_is_asked_for_alone():
    loss = functools.partial(cross_entropy.mean, axis=(), block_tokens=128)
    products = lambda f: len(operands(jax.jit(f).lower(*shapes()).as_text())) // 2
    assert products(loss) == 1
    assert products(jax.checkpoint(loss)) == 1
    assert products(jax.grad(loss)) == 2
    assert products(jax.grad(loss, argnums=(0, 1))) == 3


def test_sends_what_cross_entropy_sends_and_the_gradient_nothing():
    """On a ring of 4: one maximum and two sums a token, each block padded to a multiple of 4."""
    tokens, block, n = B * T // 2, 4, 4
    body = lambda x, table, targets: jax.grad(
        lambda x: cross_entropy.mean(x, table, targets, ring("tensor"), block_tokens=block)
    )(lax.pcast(x, "tensor", to="varying"))
    run = over("tensor", body, (P("data"), P("V"), P("data")), P(("data", "tensor")))
    sizes = [((B, T, D), jnp.float64), ((V, D), jnp.float64), ((B, T), jnp.int32)]
    ops = hlo.collectives(run, *[jax.ShapeDtypeStruct(*size) for size in sizes])
    blocks = -(-tokens // block)
    sums = 2 * -(-tokens // blocks)
    kinds = {
        kind: sum(op.bytes for op in ops if op.kind == kind) for kind in {op.kind for op in ops}
    }
    assert kinds == {
        "all-reduce": blocks * 8 * sums // 2,
        "collective-permute": blocks * 2 * (n - 1) * 8 * sums // n,
    }


def test_refusals():
    x, table, targets = jnp.ones((4, 2, D)), jnp.ones((V, D)), jnp.zeros((4, 2), jnp.int32)
    with pytest.raises(
        ValueError, match=re.escape("cross_entropy.mean needs block_tokens of 1 or more; got 0.")
    ):
        cross_entropy.mean(x, table, targets, (), block_tokens=0)
    loss = lambda x, table, targets: cross_entropy.mean(x, table, targets, "tensor")
    said = (
        "cross_entropy.mean needs an x whose type varies along 'tensor', because the gradient of x "
        "varies there; the type of this x, of shape (2, 2, 3), does not vary along ['tensor']. "
        "Pass tensor.copy_to(x, 'tensor')."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
        jax.eval_shape(over("tensor", loss, (P("data"), P("V"), P("data")), P()), x, table, targets)
    said = f"cross_entropy.mean needs a vocabulary of 1 to {V}, the number of rows of the whole"
    with pytest.raises(ValueError, match=f"^{said}"):
        cross_entropy.mean(x, table, targets, (), vocabulary=V + 1)
    copied = lambda x, *others: loss(tensor.copy_to(x, "tensor"), *others)
    said = "cross_entropy.mean needs a vocabulary that is split over 'tensor'; this array, of shape"
    with pytest.raises(ValueError, match=f"^{said}"):
        jax.eval_shape(over("tensor", copied, (P("data"), P(), P("data")), P()), x, table, targets)


# Weights, and targets that are not in the vocabulary

IGNORED = -100


@functools.cache
def weighted(layout):
    """Loss and gradients of a weighted batch, its weights normalised: as `blocked`, in two
    microbatches."""
    _, axis, block_tokens = LAYOUTS[layout]

    def loss(params, batch):
        x, targets, weights = batch
        x = tensor.copy_to(jnp.tanh(params["scale"] * x), axis)
        options = {"weights": weights, "vocabulary": VOCABULARY, "block_tokens": block_tokens}
        return cross_entropy.mean(x, params["table"], targets, axis, **options)

    grad = grads.averaged(grads.accumulated(jax.value_and_grad(loss), microbatches=2), "data")

    def body(params, x, targets, weights):
        return grad(params, (x, targets, cross_entropy.normalized(weights, "data")))

    specs = {"scale": P(), "table": P("V")}
    return over(layout, body, (specs, P("data"), P("data"), P("data")), (P(), specs))


@jax.jit
def plain_weighted(params, x, targets, weights):
    def loss(params):
        every = jax.nn.log_softmax(
            (jnp.tanh(params["scale"] * x) @ params["table"].T)[..., :VOCABULARY]
        )
        nats = -jnp.take_along_axis(every, jnp.clip(targets, 0)[..., None], -1)[..., 0]
        return jnp.sum(weights * nats) / jnp.sum(weights)

    return jax.value_and_grad(loss)(params)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("layout", ["one", "data", "tensor", "stage x tensor"])
@settings(max_examples=5)
@given(data=st.data())
def test_a_weighted_mean_is_that_of_the_whole_batch(layout, data):
    """No mean of means: microbatches and devices have different sums of weights. Ignored targets
    may be anything."""
    x, table, targets = drawn(data)
    shape = targets.shape
    weights = data.draw(
        hnp.arrays(np.float64, shape, elements=st.sampled_from([0.0, 0.0, 0.5, 1.0, 3.0])),
        label="weights",
    )
    weights[data.draw(st.integers(0, B - 1)), 0] = 1.0
    targets = np.where(weights == 0, IGNORED, targets).astype(np.int32)
    params = {"scale": np.array(0.7), "table": table}
    found, expected = (
        weighted(layout)(params, x, targets, weights),
        plain_weighted(params, x, targets, weights),
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=EXACT, atol=EXACT * SIZE),
        found,
        expected,
    )


@pytest.mark.sweep(3)
@pytest.mark.parametrize("layout", ["one", "tensor"])
@pytest.mark.parametrize("wrong", [-1, IGNORED, VOCABULARY, VOCABULARY + 1, 10**6])
def test_a_target_outside_the_vocabulary_has_no_loss(layout, wrong):
    x, table = np.ones((B, T, D)), np.linspace(-1, 1, V * D).reshape(V, D)
    targets = np.full((B, T), 2, np.int32)
    targets[0, 0] = wrong
    assert np.isnan(blocked(layout, "ring")(x, table, targets)[0])
    logits = jnp.asarray(x @ table.T)
    nats = tensor.cross_entropy(logits, jnp.asarray(targets), (), vocabulary=VOCABULARY)
    np.testing.assert_array_equal(np.isnan(nats), targets == wrong)
    weights = jnp.asarray(targets != wrong, jnp.float64)
    kept = tensor.cross_entropy(
        logits, jnp.asarray(targets), (), weights=weights, vocabulary=VOCABULARY
    )
    np.testing.assert_array_equal(kept, np.where(targets == wrong, 0, nats))


def test_a_batch_without_weight_has_no_mean():
    assert np.isnan(cross_entropy.normalized(jnp.zeros(3), ())).all()
    np.testing.assert_array_equal(
        cross_entropy.normalized(jnp.asarray([1, 0, 2], jnp.bfloat16), ()), np.float32([1, 0, 2])
    )


@pytest.mark.parametrize("dtype", [bool, np.int32])
def test_a_mask_of_bools_or_integers_is_normalized_in_float32(dtype):
    found = cross_entropy.normalized(jnp.asarray([1, 0, 1, 0], dtype), ())
    np.testing.assert_array_equal(found, np.float32([2, 0, 2, 0]), strict=True)
