"""Gradient functions from grad to grad: the same gradients in pieces, over devices and under a
norm."""

import collections
import functools
import re

import equinox as eqx
import hlo
import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from parallax import grads, mesh
from parallax.collectives import ring, xla

UNIT = st.floats(-2, 2, width=32)
close = functools.partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12)


def loss(params, batch):
    x, y = batch["x"], batch["y"]
    hidden = jnp.tanh(x @ params["w"])
    return jnp.mean((hidden @ params["v"] - y) ** 2)


def draw_problem(data):
    def array(*shape):
        return data.draw(hnp.arrays(np.float64, shape, elements=UNIT))

    return {"w": array(3, 4), "v": array(4)}, {"x": array(16, 3), "y": array(16)}


grad = jax.value_and_grad(loss)
plain = jax.jit(grad)
PARTS = (1, 2, 4, 8)


@functools.cache
def in_parts(microbatches):
    return jax.jit(grads.accumulated(grad, microbatches=microbatches))


@pytest.mark.parametrize("microbatches", PARTS)
@settings(max_examples=20)
@given(data=st.data())
def test_accumulated_equals_the_whole_batch(microbatches, data):
    params, batch = draw_problem(data)
    jax.tree.map(close, in_parts(microbatches)(params, batch), plain(params, batch))


def test_parts_are_cut_in_order():
    """Part m holds rows m B/M to (m + 1) B/M, of every leaf."""
    seen = []

    def record(params, part):
        jax.debug.callback(lambda part: seen.append(part.tolist()), part, ordered=True)
        return jnp.zeros(()), params

    jax.block_until_ready(grads.accumulated(record, microbatches=4)(jnp.ones(2), jnp.arange(8)))
    jax.effects_barrier()
    assert seen == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_sums_are_kept_wide(dtype):
    """The mean of 1 and 255 times 2^-8: a sum in bfloat16 would stand still at 1."""
    terms = jnp.full(256, 2.0**-8, dtype).at[0].set(1)

    def pick(params, part):
        return jnp.zeros((), dtype), params * part[0]

    _, mean = grads.accumulated(pick, microbatches=256)(jnp.ones((), dtype), terms)
    exact = (1 + 255 * 2.0**-8) / 256
    assert mean.dtype == ("float64" if dtype == "float64" else "float32")
    assert float(mean) == exact
    naive = functools.reduce(np.add, np.asarray(terms))
    assert (float(naive) / 256 == exact) == (dtype != "bfloat16")


def test_memory_does_not_grow_with_the_number_of_parts():
    """Ten thousand numbers a row, eight rows a part: 2 parts or 32, the same temporary memory."""

    def temporary(microbatches, rows):
        def wide(w, x):
            return jnp.mean(jnp.tanh(jnp.tanh(x * w[None]) * w[None]) ** 2)

        f = jax.jit(grads.accumulated(jax.value_and_grad(wide), microbatches=microbatches))
        shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((10_000,), (rows, 10_000))]
        return f.lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    few, many, at_once = temporary(2, 16), temporary(32, 256), temporary(1, 256)
    assert abs(many - few) <= 0.02 * few
    assert at_once > 8 * many


def over(f, in_specs, out_specs, **sizes):
    return eqx.filter_jit(
        mesh.spmd(f, mesh=mesh.make(**sizes), in_specs=in_specs, out_specs=out_specs)
    )


@functools.cache
def data_parallel(algorithm, microbatches, **sizes):
    split = tuple(sizes) if len(sizes) > 1 else next(iter(sizes))
    grad_fn = grads.averaged(grads.accumulated(grad, microbatches=microbatches), algorithm(split))
    return over(grad_fn, (P(), P(split)), P(), **sizes)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("sizes", [{"data": 8}, {"a": 4, "b": 2}], ids=str)
@pytest.mark.parametrize("algorithm", [ring, xla], ids=["ring", "psum"])
@settings(max_examples=10)
@given(data=st.data())
def test_averaged_equals_one_device(algorithm, sizes, data):
    params, batch = draw_problem(data)
    for microbatches in (1, 2):
        jax.tree.map(
            close,
            data_parallel(algorithm, microbatches, **sizes)(params, batch),
            plain(params, batch),
        )


PROBLEM = (
    {"w": jax.ShapeDtypeStruct((3, 4), jnp.float64), "v": jax.ShapeDtypeStruct((4,), jnp.float64)},
    {
        "x": jax.ShapeDtypeStruct((32, 3), jnp.float64),
        "y": jax.ShapeDtypeStruct((32,), jnp.float64),
    },
)


def test_the_order_of_wrapping_is_the_cost():
    """Outside accumulation the loss and each gradient are reduced once a step; inside it, once a
    microbatch."""
    averaged = functools.partial(grads.averaged, axis="data")
    accumulated = functools.partial(grads.accumulated, microbatches=4)
    for grad_fn, times in ((averaged(accumulated(grad)), 1), (accumulated(averaged(grad)), 4)):
        f = mesh.spmd(grad_fn, mesh=mesh.make(data=8), in_specs=(P(), P("data")), out_specs=P())
        ops = hlo.collectives(f, *PROBLEM)
        assert {op.kind for op in ops} == {"all-reduce"}
        assert collections.Counter(op.shape for op in ops) == {
            (): times,
            (4,): times,
            (3, 4): times,
        }


@functools.cache
def clip_over_shards(algorithm):
    """A tree of shards over several sets of axes: the clipped gradients, and the norm."""

    axes = [algorithm("a"), algorithm("b")]

    def body(tree, batch):
        grad_fn = grads.clipped(
            lambda params, batch: (jnp.sum(batch), params), 1.5, reduce_norm_over=axes
        )
        return grad_fn(tree, batch)[1], grads.norm(tree, axes=axes)

    return over(body, (TREE, P()), (TREE, P()), a=2, b=4)


TREE = {"whole": P(), "a": P("a"), "b": P(None, "b"), "both": P(("a", "b")), "complex": P("b")}


@pytest.mark.sweep(3, "wholes")
@pytest.mark.parametrize("algorithm", [ring, xla], ids=["ring", "psum"])
@settings(max_examples=20)
@given(data=st.data(), scale=st.sampled_from([0.0, 1e-3, 1.0]))
def test_the_norm_over_shards_is_the_whole_norm(algorithm, data, scale):
    shapes = {"whole": (), "a": (4, 3), "b": (3, 4), "both": (8,), "complex": (4, 2)}
    tree = {
        name: scale * data.draw(hnp.arrays(np.float64, shape, elements=UNIT))
        for name, shape in shapes.items()
    }
    tree["complex"] = tree["complex"] * (1 - 2j)
    clipped, norm = clip_over_shards(algorithm)(tree, np.ones(3))
    close(norm, optax.tree.norm(tree))
    factor = 1.0 if norm <= 1.5 else 1.5 / float(norm)
    jax.tree.map(lambda got, g: close(got, g * factor), clipped, tree)


def test_half_precision_squares_are_summed_in_float32():
    tree = {"a": jnp.full(1000, 300, jnp.float16), "b": jnp.full(256, 1, jnp.bfloat16)}
    norm = grads.norm(tree)
    assert norm.dtype == jnp.float32
    np.testing.assert_allclose(norm, np.sqrt(1000 * 300.0**2 + 256), rtol=1e-6)
    scaled = grads.scaled(tree, norm, 1.0)
    assert [leaf.dtype for leaf in jax.tree.leaves(scaled)] == [jnp.float16, jnp.bfloat16]
    np.testing.assert_allclose(scaled["a"].astype(float), 300 / float(norm), rtol=2e-3)


@pytest.mark.parametrize(("dtype", "near"), [("float16", 1e-3), ("bfloat16", 1e-6)])
def test_the_factor_of_a_large_norm_is_not_rounded(dtype, near):
    """3 times 2^14 is exact in both types, and a thousandth of it, divided by its norm, is 1/32."""
    tree = {"a": jnp.full(1024, 3 * 2.0**14, dtype)}
    clipped = grads.scaled(tree, grads.norm(tree), 1.0)["a"]
    np.testing.assert_allclose(clipped.astype(float), 1 / 32, rtol=near)
    # The factor 1 / norm, of 2^-25, is 0 in float16.
    many = {"a": jnp.full(2**20, 2.0**15, dtype)}
    clipped = grads.scaled(many, grads.norm(many), 1.0)["a"]
    np.testing.assert_allclose(clipped.astype(float), 2.0**-10, rtol=near)


def test_finite_gradients_with_an_infinite_norm_are_no_zeros():
    tree = {"a": jnp.full(4, 1e20, jnp.float32), "b": jnp.ones(2, jnp.bfloat16)}
    _, clipped = grads.clipped(lambda params, batch: (jnp.zeros(()), params), 1.0)(tree, None)
    assert all(jnp.all(jnp.isnan(leaf)) for leaf in jax.tree.leaves(clipped))


@pytest.mark.parametrize("batch", [None, np.ones((8, 0))], ids=["none", "empty rows"])
def test_a_batch_without_numbers_is_accumulated(batch):
    pull = jax.value_and_grad(lambda w, batch: jnp.sum(w**2))
    jax.tree.map(
        close,
        grads.accumulated(pull, microbatches=2)(jnp.ones(2), batch),
        (2.0, np.full(2, 2.0)),
    )


@pytest.mark.parametrize("max_norm", [0.0, 1.0])
def test_zero_gradients_stay_zero(max_norm):
    tree = {"a": jnp.zeros(3)}
    np.testing.assert_array_equal(grads.scaled(tree, grads.norm(tree), max_norm)["a"], np.zeros(3))


class Model(eqx.Module):
    linear: eqx.nn.Linear
    activation: object
    calls: jax.Array  # an integer: no gradient
    name: str = "model"

    def __call__(self, x):
        return self.activation(self.linear(x))


def model_loss(model, batch):
    x, y = batch
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


@pytest.mark.sweep(3, "wholes")
def test_equinox_models():
    """Functions, names and integers among the leaves; the functions are wrapped as usual."""
    model = Model(
        eqx.nn.Linear(3, 2, key=jax.random.key(0), dtype=jnp.float64), jnp.tanh, jnp.arange(2)
    )
    draw = np.random.default_rng(0).normal
    batch = draw(size=(32, 3)), draw(size=(32, 2))
    grad_fn = grads.accumulated(eqx.filter_value_and_grad(model_loss), microbatches=2)
    grad_fn = grads.clipped(
        grads.averaged(grad_fn, ring("data")), 0.1, reduce_norm_over=[ring("data")]
    )
    value, gradients = over(grad_fn, (P(), P("data")), P(), data=8)(model, batch)
    expected_value, expected = eqx.filter_value_and_grad(model_loss)(model, batch)
    assert jax.tree.structure(gradients) == jax.tree.structure(expected)
    factor = 0.1 / optax.tree.norm(expected)
    assert factor < 1
    close(value, expected_value)
    jax.tree.map(lambda got, g: close(got, g * factor), gradients, expected)


def two_gradients(*params):
    """What `jax.grad` gives for a tuple of two parameters looks like (loss, gradients)."""

    def loss(params, batch):
        return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(params)) * jnp.mean(batch)

    return grads.accumulated(jax.grad(loss), microbatches=2)(params, jnp.ones(4))


ERRORS = {
    "grads.accumulated needs microbatches, a whole number of 1 or more; got 0.": lambda: (
        grads.accumulated(grad, microbatches=0)
    ),
    "The batch's leaf ['y'] has 6 rows on each "
    "device, which must be a multiple of "
    "microbatches=4. Use another batch size, or fewer microbatches.": lambda: grads.accumulated(
        grad, microbatches=4
    )({}, {"x": jnp.ones((8, 3)), "y": jnp.ones(6)}),
    "The batch's leaf itself has 3 rows on each device, which must be a multiple of "
    "microbatches=2.": lambda: grads.accumulated(grad, microbatches=2)({}, jnp.ones(3)),
    "A gradient function returns a pair (loss, gradients), as jax.value_and_grad(loss) and "
    "eqx.filter_value_and_grad(loss) do, and the loss is a scalar. The first result of this one "
    "is an array of shape (2,). Use": lambda: two_gradients(jnp.ones(2), (jnp.ones(2),)),
    "A gradient function returns a pair (loss, gradients), as jax.value_and_grad(loss) and "
    "eqx.filter_value_and_grad(loss) do, and the loss is a scalar. The first result of this one "
    "is a dict. Use": lambda: two_gradients({"w": jnp.ones(2)}, jnp.ones(2)),
    "The gradients have a leaf '', and the parameters have none there.": lambda: two_gradients(
        jnp.ones(()), jnp.ones(2)
    ),
}


@pytest.mark.parametrize("said", ERRORS)
def test_errors(said):
    with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
        ERRORS[said]()
