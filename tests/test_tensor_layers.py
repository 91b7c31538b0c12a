"""Equinox's linear layers, split over an axis in their own order, train as on one device; the wrong
order is refused."""

import functools
import inspect
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from reference import EXACT, OPTIMIZER, assert_close

from parallax import grads, mesh, rules, sequence, step, tensor, zero
from parallax.collectives import matmul, ring
from parallax.collectives.types import varying

STEPS, ROWS = 3, 8

WORLD = {"data": 2, "tensor": 4}


def net(inputs, hidden, outputs, *, use_bias, dtype):
    return eqx.nn.MLP(
        inputs,
        outputs,
        hidden,
        1,
        jnp.tanh,
        use_bias=use_bias,
        use_final_bias=use_bias,
        dtype=dtype,
        key=jax.random.key(0),
    )


def replaced(model, axis):
    """The same model, its two layers a column and a row."""
    up, down = model.layers
    pair = tensor.ColumnLinear(up, axis), tensor.RowLinear(down, axis)
    return eqx.tree_at(lambda model: model.layers, model, pair)


def loss(model, batch):
    x, y = batch
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def batches(inputs, outputs, dtype):
    draw = np.random.default_rng(1).normal
    return [
        (draw(size=(ROWS, inputs)).astype(dtype), draw(size=(ROWS, outputs)).astype(dtype))
        for _ in range(STEPS)
    ]


def trained_alone(model, data):
    state = OPTIMIZER.init(eqx.filter(model, eqx.is_inexact_array))
    losses = []
    for batch in data:
        value, gradients = eqx.filter_value_and_grad(loss)(model, batch)
        updates, state = OPTIMIZER.update(gradients, state, eqx.filter(model, eqx.is_inexact_array))
        model = eqx.apply_updates(model, updates)
        losses.append(value)
    return model, losses


def trained(make, data, devices, shares):
    """By `step.make`, its optimizer's state split by ZeRO-1 if `shares`; at last the whole
    weights."""
    split_layers = tensor.rule(eqx.filter_eval_shape(make))
    rule = lambda path, leaf: split_layers(path, leaf) or P()
    grad = eqx.filter_value_and_grad(loss)
    if shares:
        split = rules.fsdp("data", size=devices.shape["data"], min_size=1, inside=rule)
        split_specs = rules.specs(eqx.filter_eval_shape(make), split, devices)
        optimizer = zero.sharded(OPTIMIZER, "data", split_specs)
        state, specs = step.init(make, optimizer, rule, devices, optimizer_rule=split)
        train = step.make(zero.reduce_scattered(grad, "data", split_specs), optimizer)
    else:
        state, specs = step.init(make, OPTIMIZER, rule, devices)
        train = step.make(grads.averaged(grad, "data"), OPTIMIZER)
    mapped = eqx.filter_jit(
        mesh.spmd(train, mesh=devices, in_specs=(specs, P("data")), out_specs=(specs, P()))
    )
    losses = []
    for batch in data:
        state, info = mapped(state, batch)
        losses.append(info.loss)
    return state.model, losses


@pytest.mark.sweep(3, "wholes")
@settings(max_examples=2)
@given(data=st.data())
def test_replaced_layers_train_as_on_one_device(data):
    inputs, outputs = (
        data.draw(st.sampled_from([3, 8]), label=name) for name in ("inputs", "outputs")
    )
    hidden, use_bias = (
        data.draw(st.sampled_from([8, 16])),
        data.draw(st.booleans(), label="use_bias"),
    )
    shape = functools.partial(net, inputs, hidden, outputs, use_bias=use_bias, dtype=jnp.float64)
    devices = mesh.make(
        data=8 // (t := data.draw(st.sampled_from([1, 2, 4, 8]), label="tensor")), tensor=t
    )
    axis = data.draw(st.sampled_from(["tensor", ring("tensor")]), label="axis")
    feed = batches(inputs, outputs, jnp.float64)
    with (
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):  # Equinox and optax need them
        expected, values = trained_alone(shape(), feed)
        model, losses = trained(
            lambda: replaced(shape(), axis),
            feed,
            devices,
            shares=data.draw(st.booleans(), label="zero"),
        )
    np.testing.assert_allclose(losses, values, rtol=EXACT)
    weights = lambda tree: [leaf for leaf in jax.tree.leaves(tree) if eqx.is_inexact_array(leaf)]
    assert_close(weights(model), weights(expected), EXACT)


def both(layer_axis, up, down, x, dtype=None):
    """Values and gradients of a pair of layers, by a column and a row along `layer_axis`."""

    def summed(pair, x):
        return jnp.sum(
            jnp.cos(
                tensor.row(
                    jnp.tanh(tensor.column(x, pair[0], None, layer_axis)), pair[1], None, layer_axis
                )
            )
        )

    return eqx.filter_value_and_grad(summed)((up, down), x)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("dtype", [jnp.float64, jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("size", [8, 16])
def test_column_and_row_take_equinox_layers_whole(size, dtype):
    """Square ones too, whose order no shape shows."""
    key = jax.random.key(2)
    up, down = (
        eqx.nn.Linear(8, size, dtype=dtype, key=key),
        eqx.nn.Linear(size, 8, dtype=dtype, key=key),
    )
    x = jax.random.normal(key, (5, 8), dtype)
    pair = tensor.ColumnLinear(up, "tensor"), tensor.RowLinear(down, "tensor")
    specs = jax.tree.map(
        lambda layer: layer.linear,
        rules.specs(pair, tensor.rule(pair)),
        is_leaf=lambda n: not isinstance(n, tuple),
    )
    f = functools.partial(both, "tensor")
    with jax.numpy_rank_promotion("allow"):
        split = mesh.spmd(
            f, mesh=mesh.make(**WORLD), in_specs=(*specs, P()), out_specs=(P(), specs)
        )
        found, expected = eqx.filter_jit(split)(up, down, x), both((), up, down, x)
    eps = float(jnp.finfo(dtype).eps)
    as_float = lambda tree: [
        np.asarray(leaf, float) for leaf in jax.tree.leaves(tree) if eqx.is_array(leaf)
    ]
    assert_close(as_float(found), as_float(expected), 40 * eps)  # sums of at most 5 * 8 products


def test_layers_of_one_vector_and_of_many():
    layer = tensor.ColumnLinear(eqx.nn.Linear(3, 4, dtype=jnp.float64, key=jax.random.key(0)), ())
    x = jax.random.normal(jax.random.key(1), (2, 5, 3))
    with jax.numpy_rank_promotion("allow"):
        expected = jax.vmap(jax.vmap(layer.linear))(x)
        np.testing.assert_allclose(layer(x), expected, rtol=EXACT)
        np.testing.assert_allclose(layer(x[0, 0], key=None), expected[0, 0], rtol=EXACT)


def test_the_rule_knows_stacked_layers_and_no_others():
    make = lambda key: eqx.nn.Linear(4, 8, key=key)
    model = {
        "stacked": tensor.ColumnLinear(
            eqx.filter_vmap(make)(jax.random.split(jax.random.key(0), 3)), ("a", "b")
        ),
        "down": tensor.RowLinear(make(jax.random.key(0)), ring("a")),
        "alone": tensor.RowLinear(make(jax.random.key(0)), ()),
        "other": make(jax.random.key(0)),
    }
    rule = tensor.rule(model)
    assert rule("stacked.linear.weight", None) == P(None, ("a", "b"))
    assert rule("stacked.linear.bias", None) == P(None, ("a", "b"))
    assert rule("down.linear.weight", None) == P(None, "a")
    assert rule("down.linear.bias", None) == rule("alone.linear.bias", None) == P()
    assert rule("alone.linear.weight", None) == P(None, None)
    assert rule("other.weight", None) is None
    assert tensor.rule(model["down"])("linear.weight", None) == P(None, "a")


LAYER = eqx.nn.Linear(8, 8, key=jax.random.key(0))
unchecked = (
    inspect.unwrap
)  # as at a user's run time: the shapes in signatures are checked in tests alone
ON_TENSOR = functools.partial(tensor.copy_to, axis="tensor")
REFUSED = {  # x whole, the layer or matrix, the spec of its weight, and what is said
    "a row's split under a column": (
        lambda x, w: tensor.column(x, linear(w), None, "tensor"),
        P(None, "tensor"),
        "tensor.ColumnLinear needs an eqx.nn.Linear whose 8 outputs are split over the 4 devices "
        "of 'tensor': on each device a weight [outputs, inputs] of [1/4 of 8, 8]; got [8, 2]. Give "
        "the layer the specs of tensor.rule(model)",
    ),
    "a column's split under a row": (
        lambda x, w: tensor.row(ON_TENSOR(x)[:, :2], linear(w), None, "tensor"),
        P("tensor"),
        "tensor.RowLinear needs an eqx.nn.Linear whose 8 inputs are split over the 4 devices of "
        "'tensor': on each device a weight [outputs, inputs] of [8, 1/4 of 8]; got [2, 8].",
    ),
    "no split": (
        lambda x, w: tensor.column(x, linear(w), None, "tensor"),
        P(),
        "tensor.ColumnLinear needs an eqx.nn.Linear whose 8 outputs are split over the 4 devices "
        "of 'tensor'",
    ),
    "Equinox's order under a column": (
        lambda x, w: unchecked(tensor.column)(x, w, None, "tensor"),
        P("tensor"),
        "tensor.column needs a weight [inputs, outputs of this device]: x has 8 inputs, and the "
        "weight is of shape (2, 8) here. Split its outputs over 'tensor' and not its inputs. "
        "If you have an eqx.nn.Linear, pass the layer and not its weight, which is stored as "
        "[outputs, inputs].",
    ),
    "Equinox's order under a row": (
        lambda x, w: unchecked(tensor.row)(ON_TENSOR(x)[:, :2], w, None, "tensor"),
        P(None, "tensor"),
        "tensor.row needs a weight [inputs of this device, outputs]: x, of shape (3, 2), has "
        "inputs of shape (2,) on this device, and the weight, of shape (8, 2), takes inputs of "
        "shape (8,). Split the weight's inputs over 'tensor' and not its outputs.",
    ),
    "a whole weight under a row": (
        lambda x, w: tensor.row(ON_TENSOR(x), w, None, "tensor"),
        P(),
        "tensor.row needs a weight whose inputs are split over 'tensor'; this weight, of shape "
        "(8, 8), is the same along 'tensor', so devices would multiply different inputs by the "
        "same weights. Split the weight by P('tensor').",
    ),
    "an x that is the same under a row": (
        lambda x, w: tensor.row(x[:, :2], w, None, "tensor"),
        P("tensor"),
        "tensor.row needs an x that is split over 'tensor' along the layer's inputs; this x, of "
        "shape (3, 2), is the same along 'tensor', so devices would multiply the same inputs by "
        "different weights. As x, pass",
    ),
    "two biases": (
        lambda x, w: tensor.column(x, LAYER, LAYER.bias, "tensor"),
        P(),
        "tensor.column: an eqx.nn.Linear brings its own bias. Pass bias=None; got a bias of "
        "shape (8,).",
    ),
    "sequence's column": (
        lambda x, w: unchecked(sequence.column)(x[None], w, None, "tensor", all_gather_matmul=None),
        P("tensor"),
        "sequence.column needs a weight [inputs, outputs of this device]: x has 8 inputs, and "
        "the weight is of shape (2, 8)",
    ),
    "sequence's row": (
        lambda x, w: unchecked(sequence.row)(
            ON_TENSOR(x)[None, :, :2], w, None, "tensor", matmul_reduce_scatter=None
        ),
        P(None, "tensor"),
        "sequence.row needs a weight [inputs of this device, outputs]: x, of shape (1, 3, 2), "
        "has inputs of shape (2,) on this device",
    ),
}


def linear(weight):
    return eqx.tree_at(lambda layer: layer.weight, LAYER, weight)


@pytest.mark.parametrize("wrong", REFUSED)
def test_the_wrong_order_is_refused(wrong):
    f, spec, said = REFUSED[wrong]
    mapped = mesh.spmd(
        f, mesh=mesh.make(**WORLD), in_specs=(P(), spec), out_specs=P(None, "tensor")
    )
    with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
        jax.eval_shape(mapped, jnp.ones((3, 8)), jnp.ones((8, 8)))


def test_scalars_cannot_be_split():
    layer = tensor.RowLinear(eqx.nn.Linear("scalar", 3, key=jax.random.key(0)), ())
    with pytest.raises(ValueError, match="whose scalar inputs are split over"):
        layer(jnp.ones(1))


def test_a_row_of_one_device_may_be_whole():
    one = mesh.make(data=8, tensor=1)
    f = mesh.spmd(
        lambda x, w: tensor.row(ON_TENSOR(x), w, None, "tensor"),
        mesh=one,
        in_specs=(P("data"), P()),
        out_specs=P("data"),
    )
    np.testing.assert_array_equal(f(jnp.ones((8, 2)), jnp.ones((2, 3))), 2)


def test_x_and_the_weight_of_a_row_are_split_over_the_same_of_two_axes():
    two = mesh.make(a=2, b=2, devices=jax.devices()[:4])
    f = mesh.spmd(
        lambda x, w: tensor.row(x, w, None, ("a", "b")),
        mesh=two,
        in_specs=(P(None, "a"), P("b")),
        out_specs=P(),
    )
    with pytest.raises(ValueError, match=r"tensor\.row needs an x .* is the same along 'b', so"):
        f(jnp.ones((3, 4)), jnp.ones((4, 2)))


class Tagger(eqx.Module):
    """A class for each word, by its embedding."""

    embedding: eqx.nn.Embedding | tensor.Embedding
    out: eqx.nn.Linear

    def __call__(self, ids):
        return self.out(jax.vmap(self.embedding)(ids).mean(0))


@pytest.mark.sweep(3, "wholes")
def test_a_replaced_embedding_trains_as_on_one_device():
    """Rows over 4 devices, beside data 2; ids of all rows, some of them twice."""
    keys = jax.random.split(jax.random.key(0), 2)
    embedding = eqx.nn.Embedding(12, 6, dtype=jnp.float64, key=keys[0])
    model = Tagger(embedding, eqx.nn.Linear(6, 3, dtype=jnp.float64, key=keys[1]))
    draw = np.random.default_rng(2)
    data = [
        (draw.integers(0, 12, (ROWS, 5)).astype(np.int32), draw.normal(size=(ROWS, 3)))
        for _ in range(STEPS)
    ]
    devices = mesh.make(**WORLD)

    def tagged_loss(model, batch):
        ids, y = batch
        return jnp.mean((jnp.stack([model(row) for row in ids]) - y) ** 2)

    def make():
        return eqx.tree_at(
            lambda model: model.embedding, model, tensor.Embedding(model.embedding, "tensor")
        )

    rule = rules.first(tensor.rule(eqx.filter_eval_shape(make)), rules.match("**", P()))
    state, specs = step.init(make, OPTIMIZER, rule, devices)
    assert specs.model.embedding.embedding.weight == P("tensor")
    train = step.make(grads.averaged(eqx.filter_value_and_grad(tagged_loss), "data"), OPTIMIZER)
    mapped = eqx.filter_jit(
        mesh.spmd(train, mesh=devices, in_specs=(specs, P("data")), out_specs=(specs, P()))
    )
    plain, optimizer = model, OPTIMIZER.init(eqx.filter(model, eqx.is_inexact_array))
    with (
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):  # Equinox and optax need them
        for batch in data:
            state, info = mapped(state, batch)
            value, gradients = eqx.filter_value_and_grad(tagged_loss)(plain, batch)
            updates, optimizer = OPTIMIZER.update(
                gradients, optimizer, eqx.filter(plain, eqx.is_inexact_array)
            )
            plain = eqx.apply_updates(plain, updates)
            np.testing.assert_allclose(info.loss, value, rtol=EXACT)
    np.testing.assert_allclose(
        state.model.embedding.embedding.weight, plain.embedding.weight, rtol=EXACT, atol=1e-14
    )


def test_an_embedding_that_is_not_split_is_refused():
    embedding = tensor.Embedding(eqx.nn.Embedding(12, 6, key=jax.random.key(0)), "tensor")
    look_up = mesh.spmd(embedding, mesh=mesh.make(**WORLD), in_specs=P(), out_specs=P())
    with pytest.raises(
        ValueError,
        match=r"whose 12 rows are split over the 4 devices of 'tensor', 12 / 4 on each; got",
    ):
        look_up(jnp.zeros(3, jnp.int32))
    alone = tensor.Embedding(embedding.embedding, ())
    np.testing.assert_array_equal(alone(jnp.asarray(5)), embedding.embedding(jnp.asarray(5)))


def test_the_layers_of_sequence_take_what_those_of_tensor_take():
    """Column and row over split tokens, without a choice of how they travel: the same numbers, on
    each device its own tokens."""
    draw = np.random.default_rng(0).normal
    x, up, down = draw(size=(2, 8, 4)), draw(size=(4, 12)), draw(size=(12, 4))
    bias = jnp.asarray(draw(size=4))

    def layers(x, up, down):
        y = sequence.column(x, up, None, "tensor")
        return sequence.row(jnp.tanh(y), down, bias, "tensor")

    specs = (P(None, "tensor"), P(None, "tensor"), P("tensor"))
    over = mesh.spmd(layers, mesh=mesh.make(**WORLD), in_specs=specs, out_specs=P(None, "tensor"))
    np.testing.assert_allclose(
        over(x, up, down), np.tanh(x @ up) @ down + np.asarray(bias), rtol=1e-12
    )


REPEATED = (
    " needs an x that has this device's tokens; this x, of shape (2, 8, 4), is the same along "
    "['tensor'], so each token would be repeated once per device. Split the tokens by "
    "sequence.local_tokens, or by the spec P(None, 'tensor')."
)
COUNTED = (
    " needs partial sums that differ along 'tensor'; this x, of shape (2, 8, 4), is the same along "
    "['tensor'], and would be counted once per device. Split the weights of the layer"
)
SAME = {  # what takes an x and a weight that are the same on all devices, and what is said
    "gather_from": (lambda x, w: sequence.gather_from(x, ring("tensor")), REPEATED),
    "column": (lambda x, w: sequence.column(x, w, None, "tensor"), REPEATED),
    "column, hop by hop": (
        lambda x, w: sequence.column(
            x, w, None, "tensor", all_gather_matmul=matmul.all_gather_matmul
        ),
        REPEATED,
    ),
    "reduce_scatter_to": (lambda x, w: sequence.reduce_scatter_to(x, ring("tensor")), COUNTED),
    "row": (lambda x, w: sequence.row(x, w, None, "tensor"), COUNTED),
    "row, hop by hop": (
        lambda x, w: sequence.row(
            x, w, None, "tensor", matmul_reduce_scatter=matmul.matmul_reduce_scatter
        ),
        COUNTED,
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_tokens_and_terms_that_are_the_same_on_all_devices_are_refused(name):
    f, said = SAME[name]
    mapped = mesh.spmd(f, mesh=mesh.make(**WORLD), in_specs=(P(), P()), out_specs=P(None, "tensor"))
    said = f"sequence.{name.split(',')[0]}{said}"
    with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
        jax.eval_shape(mapped, jnp.ones((2, 8, 4)), jnp.ones((4, 4)))


def test_tokens_are_the_same_on_one_device_or_on_purpose():
    """On an axis of one device, after a cast, and in a map whose types do not say what varies."""
    x = jnp.ones((2, 8, 4))

    def both(x):
        return sequence.reduce_scatter_to(sequence.gather_from(x, "tensor"), "tensor")

    on = functools.partial(mesh.spmd, in_specs=P(), out_specs=P(None, "tensor"))
    one = on(both, mesh=mesh.make(data=8, tensor=1))
    np.testing.assert_array_equal(one(x), x)
    cast = on(lambda x: both(varying(x, "tensor")), mesh=mesh.make(**WORLD))
    np.testing.assert_array_equal(cast(x), jnp.tile(4 * x, (1, 4, 1)))
    untyped = jax.shard_map(
        both,
        mesh=mesh.make(**WORLD),
        in_specs=P(None, "tensor"),
        out_specs=P(None, "tensor"),
        check_vma=False,
    )
    np.testing.assert_array_equal(jax.jit(untyped)(x), 4 * x)
