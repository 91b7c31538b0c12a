"""Layers whose weights are split over an axis equal the whole ones, in value and gradient, and send
what theory says."""

import functools
import re

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

from parallax import mesh, sequence, tensor
from parallax.collectives import ring, xla

ALGORITHMS = {"ring": ring, "psum": xla}
# The mesh's sizes, and the axes over which weights are split; the batch is split over "data".
LAYOUTS = {
    "1": ({"data": 2, "tensor": 1}, "tensor"),
    "2": ({"data": 2, "tensor": 2}, "tensor"),
    "4": ({"data": 2, "tensor": 4}, "tensor"),
    "8": ({"data": 1, "tensor": 8}, "tensor"),
    "2 x 2": ({"data": 2, "a": 2, "b": 2}, ("b", "a")),
    "none": ({"data": 2}, ()),
}
every_layout = pytest.mark.parametrize("layout", LAYOUTS)
every_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS)
UNIT = st.floats(-2, 2, width=32)
close = functools.partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12)


def over(layout, f, in_specs, out_specs):
    """`f(*arguments, axis)` mapped; "T" in a spec stands for the split axes of the layout."""
    sizes, axis = LAYOUTS[layout]
    world = mesh.make(devices=jax.devices()[: int(np.prod(list(sizes.values())))], **sizes)

    def fill(spec):
        return P(*[(axis or None) if entry == "T" else entry for entry in spec])

    specs = jax.tree.map(fill, (in_specs, out_specs), is_leaf=lambda leaf: isinstance(leaf, P))
    return jax.jit(
        mesh.spmd(functools.partial(f, axis), mesh=world, in_specs=specs[0], out_specs=specs[1])
    )


def dense(params, x):
    hidden = jnp.tanh(x @ params["up"] + params["up_bias"][None])
    return hidden @ params["down"] + params["down_bias"][None]


def loss(f, params, x):
    return jnp.sum(jnp.cos(f(params, x)))


PARAMS = {"up": P(None, "T"), "up_bias": P("T"), "down": P("T"), "down_bias": P()}
SHAPES = {"up": (3, 16), "up_bias": (16,), "down": (16, 5), "down_bias": (5,)}


@functools.cache
def pair(layout, algorithm):
    """The loss, its gradients of all parameters and of x, and the output of a column- and a
    row-parallel layer."""

    def body(axis, params, x):
        parallel = {"axis": ALGORITHMS[algorithm](axis)}

        def split(params, x):
            hidden = jnp.tanh(tensor.column(x, params["up"], params["up_bias"], **parallel))
            return tensor.row(hidden, params["down"], params["down_bias"], **parallel)

        value, gradients = jax.value_and_grad(functools.partial(loss, split), argnums=(0, 1))(
            params, x
        )
        return lax.psum(value, "data"), gradients, split(params, x)

    return over(layout, body, (PARAMS, P("data")), (P(), (PARAMS, P("data")), P("data")))


whole = jax.jit(
    lambda params, x: (
        *jax.value_and_grad(functools.partial(loss, dense), argnums=(0, 1))(params, x),
        dense(params, x),
    )
)


@pytest.mark.sweep(4)
@every_layout
@every_algorithm
@settings(max_examples=5)
@given(data=st.data())
def test_a_column_and_a_row_equal_the_whole_layers(layout, algorithm, data):
    params = {
        name: data.draw(hnp.arrays(np.float64, shape, elements=UNIT), label=name)
        for name, shape in SHAPES.items()
    }
    x = data.draw(hnp.arrays(np.float64, (4, 3), elements=UNIT), label="x")
    jax.tree.map(close, pair(layout, algorithm)(params, x), whole(params, x))


def test_without_bias():
    x, w, v = jnp.ones((2, 3)), jnp.ones((3, 4)), jnp.ones((4, 5))
    none = {"axis": ()}
    np.testing.assert_array_equal(
        tensor.row(tensor.column(x, w, None, **none), v, None, **none), x @ w @ v
    )


@pytest.mark.parametrize("on_tpu", [False, True])
@pytest.mark.parametrize("layers", [tensor, sequence])
def test_stacked_products_and_their_bias_equal_one_product(layers, on_tpu):
    """Value and gradients of queries, keys and values, and of the biases of both layers."""

    def loss(column, row):
        def of_arrays(x, weight, bias, out, out_bias):
            q, k, v = tensor.unstacked(column(x, weight, bias), 2)
            return jnp.sum(jnp.tanh(row(q * jnp.tanh(k) + v**2, out, out_bias)) ** 2)

        return jax.value_and_grad(of_arrays, range(5))

    plain = loss(
        lambda x, weight, bias: jnp.tensordot(x, weight, axes=1) + bias[None, None],
        lambda x, weight, bias: jnp.tensordot(x, weight, axes=2) + bias[None, None],
    )
    ours = layers.comms((), on_tpu=on_tpu)
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = ((4, 6, 16), (16, 3, 4, 5), (3, 4, 5), (4, 5, 8), (8,))
    arguments = [jax.random.normal(*pair) for pair in zip(keys, shapes, strict=True)]
    jax.tree.map(close, loss(ours.column, ours.row)(*arguments), plain(*arguments))


def test_products_that_are_taken_apart_are_not_stacked():
    """The compiled program that takes the products apart has no array of all of them."""

    def local(x, weight, bias):
        return tensor.unstacked(tensor.affine(x, weight, bias, on_tpu=True), 1)

    shapes = [
        jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((7, 16), (16, 3, 4, 5), (3, 4, 5))
    ]
    assert not re.search(r"\[7,3,4,5\]", jax.jit(local).lower(*shapes).compile().as_text())


def test_hidden_dims_may_be_several():
    """Heads and head width, say: split over the heads, whole over the width."""
    draw = np.random.default_rng(0).normal
    up, bias, down, x = (
        draw(size=(3, 4, 2)),
        draw(size=(4, 2)),
        draw(size=(4, 2, 5)),
        draw(size=(2, 6, 3)),
    )

    def body(axis, up, bias, down, x):
        parallel = {"axis": ring(axis)}
        return tensor.row(tensor.column(x, up, bias, **parallel), down, None, **parallel)

    split = over("4", body, (P(None, "T"), P("T"), P("T"), P("data")), P("data"))
    close(split(up, bias, down, x), np.tensordot(np.tensordot(x, up, 1) + bias, down, 2))


def test_a_pair_costs_one_all_reduce_forward_and_one_backward():
    arguments = [{name: jax.ShapeDtypeStruct(shape, jnp.float64) for name, shape in SHAPES.items()}]
    arguments += [jax.ShapeDtypeStruct((4, 3), jnp.float64)]

    def body(axis, params, x):
        parallel = {"axis": ring(axis)}

        def split(x):
            hidden = jnp.tanh(tensor.column(x, params["up"], params["up_bias"], **parallel))
            return jnp.sum(
                jnp.cos(tensor.row(hidden, params["down"], params["down_bias"], **parallel))
            )

        return jax.grad(split)(x)

    ops = hlo.collectives(over("4", body, (PARAMS, P("data")), P("data")), *arguments)
    assert {op.kind for op in ops} == {"collective-permute"}
    rows, n = (
        2,
        4,
        # Local rows; devices on the tensor axis; 8 bytes a number; both arrays pad to a multiple of
        # n.
    )
    assert sum(op.bytes for op in ops) == 2 * (n - 1) * 8 * (-(-rows * 5 // n) + -(-rows * 3 // n))


V, VOCABULARY, D = 16, 13, 3  # three rows of padding


@functools.cache
def lookup(layout, algorithm):
    def body(axis, table, ids, counts, weight):
        def looked_up(table):
            found = tensor.embed(
                table, ids, ALGORITHMS[algorithm](axis), weights=counts, vocabulary=VOCABULARY
            )
            return jnp.sum(found * weight), found

        gradient, found = jax.grad(looked_up, has_aux=True)(table)
        return found, gradient

    return over(layout, body, (P("T"), P("data"), P("data"), P("data")), (P("data"), P("T")))


STRANGE = [-1, -100, VOCABULARY, V - 1, V, 2**32 + 1, -(2**32) + 1]  # the last two are 1 as int32


@pytest.mark.sweep(3)
@every_layout
@every_algorithm
@settings(max_examples=5)
@given(data=st.data())
def test_embed_equals_take(layout, algorithm, data):
    table = data.draw(hnp.arrays(np.float64, (V, D), elements=UNIT), label="table")
    weight = data.draw(hnp.arrays(np.float64, (4, 2, D), elements=UNIT), label="weight")
    known = st.integers(0, VOCABULARY - 1) | st.sampled_from(STRANGE)
    ids = data.draw(hnp.arrays(np.int64, (4, 2), elements=known), label="ids")
    counts = data.draw(
        hnp.arrays(np.float64, (4, 2), elements=st.sampled_from([0, 0.5])), label="counts"
    )
    found, gradient = lookup(layout, algorithm)(table, ids, counts, weight)
    inside = (ids >= 0) & (ids < VOCABULARY)
    others = np.where(counts != 0, np.nan, 0)[
        ..., None
    ]  # an id outside gives nan, unless its weight is 0
    np.testing.assert_array_equal(
        found, np.where(inside[..., None], np.take(table, ids, 0, mode="clip"), others)
    )
    expected = np.zeros_like(table)
    np.add.at(expected, ids[inside], weight[inside])
    close(gradient, expected)


@pytest.mark.parametrize("kind", [np.uint8, np.int8, np.uint32])
def test_ids_of_any_width_are_compared_in_it(kind):
    table, top = jnp.arange(300.0)[:, None], np.iinfo(kind).max
    found = tensor.embed(table, jnp.asarray([5, top], kind), ())[:, 0]
    np.testing.assert_array_equal(found, [5, top if top < 300 else np.nan])


@functools.cache
def entropy(layout, algorithm):
    def body(axis, logits, targets, weight):
        def summed(logits):
            nats = tensor.cross_entropy(
                logits, targets, ALGORITHMS[algorithm](axis), vocabulary=VOCABULARY
            )
            return jnp.sum(nats * weight), nats

        gradient, nats = jax.grad(summed, has_aux=True)(logits)
        return nats, gradient

    return over(
        layout,
        body,
        (P("data", None, "T"), P("data"), P("data")),
        (P("data"), P("data", None, "T")),
    )


@jax.jit
def dense_entropy(logits, targets, weight):
    def summed(logits):
        every = jax.nn.log_softmax(logits[..., :VOCABULARY])
        nats = -jnp.take_along_axis(every, targets[..., None], -1)[..., 0]
        return jnp.sum(nats * weight), nats

    gradient, nats = jax.grad(summed, has_aux=True)(logits)
    return nats, gradient


EXTREME = UNIT | st.sampled_from([1e4, -1e4, 1e4 + 1])  # float64's exp ends at 709


@pytest.mark.sweep(4)
@every_layout
@every_algorithm
@settings(max_examples=8)
@given(data=st.data())
def test_cross_entropy_equals_log_softmax(layout, algorithm, data):
    logits = data.draw(hnp.arrays(np.float64, (4, 2, V), elements=EXTREME), label="logits")
    targets = data.draw(
        hnp.arrays(np.int32, (4, 2), elements=st.integers(0, VOCABULARY - 1)), label="targets"
    )
    weight = data.draw(hnp.arrays(np.float64, (4, 2), elements=UNIT), label="weight")
    nats, gradient = entropy(layout, algorithm)(logits, targets, weight)
    assert np.isfinite(nats).all()
    assert np.isfinite(gradient).all()
    np.testing.assert_array_equal(gradient[..., VOCABULARY:], 0)  # padding learns nothing
    jax.tree.map(close, (nats, gradient), dense_entropy(logits, targets, weight))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_cross_entropy_of_narrow_logits_is_that_of_the_same_wide_ones(dtype):
    """In 16 bits the sum of 70,000 exponentials would be rounded, or infinite."""
    logits = jnp.sin(jnp.arange(140_000.0)).reshape(2, -1).astype(dtype)

    def loss(logits):
        return jnp.sum(tensor.cross_entropy(logits, jnp.arange(2), ()))

    nats, gradient = jax.value_and_grad(loss)(logits)
    expected, wide_gradient = jax.value_and_grad(loss)(logits.astype(jnp.float32))
    assert (nats.dtype, gradient.dtype) == (jnp.float32, dtype)
    assert float(nats) == float(expected)
    np.testing.assert_array_equal(gradient, wide_gradient.astype(dtype))


def test_cross_entropy_of_bfloat16_logits_is_near():
    logits = np.linspace(-4, 4, 64).reshape(4, 16)
    nats = tensor.cross_entropy(jnp.asarray(logits, jnp.bfloat16), jnp.arange(4), ())
    expected = -np.diagonal(jax.nn.log_softmax(logits))
    # exp, log and the sum of 16 terms round by at most eps each: (16 + 4) eps, on numbers up to 8
    np.testing.assert_allclose(
        nats.astype(float), expected, atol=20 * 8 * float(jnp.finfo(jnp.bfloat16).eps)
    )


@every_algorithm
def test_no_logits_are_gathered(algorithm):
    """Three numbers a position move: a maximum, and two sums on a ring of 4; the logits' gradient
    moves nothing."""
    shapes = [((4, 2, V), jnp.float64), ((4, 2), jnp.int32), ((4, 2), jnp.float64)]
    ops = hlo.collectives(
        entropy("4", algorithm), *[jax.ShapeDtypeStruct(*shape) for shape in shapes]
    )
    positions, n = 2 * 2, 4
    kinds = {
        kind: sum(op.bytes for op in ops if op.kind == kind) for kind in {op.kind for op in ops}
    }
    maximum, sums = 8 * positions, 8 * 2 * positions
    by_ring = {"all-reduce": maximum, "collective-permute": 2 * (n - 1) * sums // n}
    assert kinds == {"ring": by_ring, "psum": {"all-reduce": maximum + sums}}[algorithm]


REFUSED = {
    "enter": (
        lambda x: tensor.copy_to(x, ring(("data", "tensor"))),
        "tensor.copy_to needs an x that is the same along ('data', 'tensor'); this one, of shape "
        "(2, 3), varies along ['data']. Use `copy_to` once, before the column-parallel layer, "
        "and `reduce_from` after the row-parallel one.",
    ),
    "column": (
        lambda x: tensor.column(x, jnp.ones((3, 2)), None, ring("data")),
        "tensor.copy_to needs an x that is the same along 'data'; this one, of shape (2, 3), "
        "varies along ['data'].",
    ),
    "leave": (
        lambda x: tensor.reduce_from(x, ring("tensor")),
        "tensor.reduce_from needs partial sums that differ along 'tensor'; this x, of shape (2, "
        "3), is the same along ['tensor'], and would be counted once per device. Split the weights "
        "of the layer whose result `reduce_from` sums, or leave out `reduce_from`.",
    ),
    "row": (
        lambda x: tensor.row(x, jnp.ones((3, 2)), None, ring(("tensor", "data"))),
        "tensor.row needs a weight whose inputs are split over ('tensor', 'data'); this weight, "
        "of shape (3, 2), is the same along 'data', so devices would multiply different inputs by "
        "the same weights.",
    ),
    "whole table": (
        lambda x: tensor.embed(jnp.ones((8, 3)), jnp.arange(2), ring("tensor")),
        "tensor.embed needs a vocabulary that is split over 'tensor'; this array, of shape (8, 3), "
        "is the same along ['tensor'], so each of its 8 rows would count once per device. Split "
        "the rows of the table by P('tensor'), or pass axis=().",
    ),
    "whole logits": (
        lambda x: tensor.cross_entropy(x, jnp.arange(2), ring(("data", "tensor"))),
        "tensor.cross_entropy needs a vocabulary that is split over ('data', 'tensor'); this "
        "array, of shape (2, 3), is the same along ['tensor'], so each of its 3 rows would count",
    ),
    "ids beyond the table": (
        lambda x: tensor.embed(x, jnp.arange(2), "data", vocabulary=5),
        "tensor.embed needs a vocabulary of 1 to 4, the number of rows of the whole table; got 5. "
        "Pass the number of rows that are not padding.",
    ),
    "targets beyond the logits": (
        lambda x: tensor.cross_entropy(x, jnp.arange(2), (), vocabulary=4),
        "tensor.cross_entropy needs a vocabulary of 1 to 3, the number of rows of the whole table; "
        "got 4.",
    ),
    "no vocabulary": (
        lambda x: tensor.cross_entropy(x, jnp.arange(2), (), vocabulary=0),
        "tensor.cross_entropy needs a vocabulary of 1 to 3, the number of rows of the whole table; "
        "got 0.",
    ),
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_refusals(wrong):
    f, said = REFUSED[wrong]
    with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
        jax.eval_shape(over("2", lambda axis, x: f(x), (P("data"),), P("data")), jnp.ones((4, 3)))
