"""Gradients summed where they are made equal those summed at the end, with the same bytes, sent
inside the loop of the layers."""

import collections
import functools
import re
from collections.abc import Callable

import equinox as eqx
import hlo
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from reference import assert_same_run, gpt2_on, gpt2_on_one_device

from parallax import grads, mesh, precision, remat, sequence
from parallax.collectives import bucketed, ring, xla
from parallax.compiled.hlo import module, runs
from parallax.layout import Layout
from parallax.models import decoder, gpt2

LAYERS, WIDTH = 3, 8
blocks = lambda model: model.blocks


class Model(eqx.Module):
    """Layers under a loop, beside what is no block: a function and a number among the leaves."""

    enter: jax.Array
    blocks: dict[str, jax.Array]
    activation: Callable[..., jax.Array]
    power: int = 2

    def __init__(self):
        self.activation = jnp.tanh
        draw = lambda i, *shape: jax.random.normal(jax.random.key(i), shape)
        self.enter = draw(0, WIDTH)
        self.blocks = {"w": draw(1, LAYERS, WIDTH, WIDTH), "b": draw(2, LAYERS, WIDTH)}


def loss(model, batch, wrap=lambda block: block):
    @wrap
    def block(weights, x):
        return model.activation(x @ weights["w"] + weights["b"][None])

    x, _ = lax.scan(
        lambda x, weights: (block(weights, x), None), batch * model.enter[None], model.blocks
    )
    return jnp.mean(x**model.power)


def step(axis, wrap, *, made=blocks, split="data", dtype=None, **sizes):
    """The gradient function of `Model` over the devices of `split`, compiled for a batch."""
    wrap = wrap or (lambda block: block)
    grad = eqx.filter_value_and_grad(functools.partial(loss, wrap=wrap))
    grad = grad if dtype is None else precision.mixed(grad, dtype)
    grad = grads.averaged(grad, axis, reduced=made)
    return mesh.spmd(grad, mesh=mesh.make(**sizes), in_specs=(P(), P(split)), out_specs=P())


BATCH = np.random.default_rng(0).normal(size=(16, WIDTH))


def same(found, expected):
    found, expected = (jax.tree.leaves(each) for each in (found, expected))
    for mine, right in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, right, rtol=0, atol=1e-11 * np.abs(right).max())


ALGORITHMS = {"ring": ring, "psum": xla, "bucketed": lambda axis: bucketed(ring(axis))}


@pytest.mark.sweep(3, "wholes")
@pytest.mark.parametrize(
    ("algorithm", "again"),
    [
        ("ring", remat.block),
        ("psum", remat.none),
        pytest.param("bucketed", remat.none, marks=pytest.mark.long),
        pytest.param("psum", remat.products, marks=pytest.mark.long),
    ],
)
def test_gradients_are_those_of_one_device(algorithm, again):
    axis = ALGORITHMS[algorithm]("data")
    wrap = lambda block: again(grads.reduced_in_backward(block, axis))
    same(
        eqx.filter_jit(step(axis, wrap, data=8))(Model(), BATCH),
        eqx.filter_value_and_grad(loss)(Model(), BATCH),
    )


@pytest.mark.sweep(3, "wholes")
def test_over_a_tuple_of_axes_inside_another_mean():
    """Groups of replicas: each sums as its gradients are made, and the mean over groups is taken at
    the end."""
    axis, split = ring(("a", "b")), ("group", "a", "b")
    inner = grads.averaged(
        eqx.filter_value_and_grad(
            functools.partial(loss, wrap=lambda block: grads.reduced_in_backward(block, axis))
        ),
        axis,
        reduced=blocks,
    )
    sizes = {"group": 2, "a": 2, "b": 2}
    outer = mesh.spmd(
        grads.averaged(inner, "group"),
        mesh=mesh.make(**sizes),
        in_specs=(P(), P(split)),
        out_specs=P(),
    )
    same(eqx.filter_jit(outer)(Model(), BATCH), eqx.filter_value_and_grad(loss)(Model(), BATCH))


@pytest.mark.sweep(3, "wholes")
@pytest.mark.parametrize("wraps", [True, False], ids=["wrapped", "left"])
def test_one_without_the_other_changes_no_gradient(wraps):
    """A block that nobody leaves to `reduced_in_backward`, and one that is left to it and not
    wrapped."""
    axis = ring("data")
    wrap = (lambda block: grads.reduced_in_backward(block, axis)) if wraps else None
    found = eqx.filter_jit(step(axis, wrap, made=None if wraps else blocks, data=8))(Model(), BATCH)
    same(found, eqx.filter_value_and_grad(loss)(Model(), BATCH))


def on_arrays(f, model, batch):
    """The lowered program of `f(model, batch)`."""
    arrays, static = eqx.partition(model, eqx.is_array)
    return jax.jit(
        lambda arrays, batch: jax.tree.leaves(f(eqx.combine(arrays, static), batch))
    ).lower(arrays, batch)


def inside_loops(lowered):
    """How often each array is all-reduced inside a loop, and outside."""
    found = {True: collections.Counter(), False: collections.Counter()}
    for run in runs(module(lowered.compile().as_text())):
        found[run.times > 1].update({op.shape: run.times for op in run.instruction.ops})
    return found


def test_each_layer_is_summed_in_the_loop_and_the_rest_after_it():
    """As many bytes as at the end, where the stacked layers are summed at once."""
    made = inside_loops(
        on_arrays(
            step("data", lambda block: grads.reduced_in_backward(block, "data"), data=8),
            Model(),
            BATCH,
        )
    )
    ends = inside_loops(on_arrays(step("data", None, made=None, data=8), Model(), BATCH))
    rest = {(): 1, (WIDTH,): 1}
    assert made == {True: {(WIDTH, WIDTH): LAYERS, (WIDTH,): LAYERS}, False: rest}
    assert ends == {True: {}, False: rest | {(LAYERS, WIDTH, WIDTH): 1, (LAYERS, WIDTH): 1}}


def test_sums_are_wide():
    """In bfloat16 what travels is float32."""
    narrow = jax.tree.map(lambda x: x.astype(jnp.float32) if eqx.is_array(x) else x, Model())
    f = step(
        "data", lambda block: grads.reduced_in_backward(block, "data"), dtype=jnp.bfloat16, data=8
    )
    text = on_arrays(f, narrow, BATCH.astype(jnp.bfloat16)).as_text()
    types = re.findall(r"\}\) : \(tensor<8x8x(\w+)>\) -> tensor<8x8x\w+>", text)
    assert types == ["f32"]


CONFIG = gpt2.Config(
    layers=2, heads=4, width=32, context=8, vocabulary=30, vocabulary_multiple=32, dropout=0.1
)
SEQUENCES = 8


def trains_as_one_device(text, algorithm=ring, **compute):
    layout = Layout.parse(text)
    mesh_ = mesh.make(**layout.axes, devices=jax.devices()[: layout.devices])
    run = gpt2_on(layout, mesh_, CONFIG, 0, 3, SEQUENCES, algorithm=algorithm, **compute)
    assert_same_run(run, gpt2_on_one_device(CONFIG, 0, 3, SEQUENCES))


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("data=4,tensor=2", marks=pytest.mark.sweep(30, "steps")),
        *(
            pytest.param(text, marks=pytest.mark.long)
            for text in [
                "data=8,remat=block",
                "data=4,tensor=2,sequence=True",
                "data=2,context=2,tensor=2",
                "data=1",
            ]
        ),
    ],
)
def test_the_recipe_trains_as_one_device(text):
    trains_as_one_device(text, reduce_in_backward=True)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("tensor=4,sequence=True", marks=pytest.mark.sweep(30, "steps")),
        *(
            pytest.param(text, marks=pytest.mark.long)
            for text in [
                "data=2,tensor=2,sequence=True,zero=3",
                "stage=2,tensor=2,sequence=True,microbatches=2",
            ]
        ),
    ],
)
def test_products_while_tokens_travel_train_as_one_device(text):
    trains_as_one_device(text, comms=sequence.overlapping)


def lowered(text, **compute):
    """The step of the recipe, whose data is moved by `jax.lax`."""
    layout = Layout.parse(text)
    world = mesh.make(**layout.axes, devices=jax.devices()[: layout.devices])
    prepared = decoder.train_step(
        *(gpt2.FAMILY, CONFIG, optax.sgd(0.1), layout, world),
        batch=SEQUENCES,
        key=jax.random.key(0),
        compute=decoder.Compute(axes={name: name for name in layout.axes}, **compute),
    )
    windows = jax.ShapeDtypeStruct((SEQUENCES, CONFIG.context + 1), jnp.int32)
    return prepared.train.lower(prepared.shapes, windows)


@pytest.mark.sweep(3, "wholes")
def test_the_recipe_sums_in_the_loop():
    found, D = inside_loops(lowered("data=2", reduce_in_backward=True)), CONFIG.width
    assert found[True][D, 4 * D] == CONFIG.layers
    assert found[True][4 * D, D] == CONFIG.layers
    assert (CONFIG.layers, D, 4 * D) not in found[False]


@pytest.mark.sweep(30, "steps")
def test_products_while_tokens_travel_gather_nothing():
    """Each layer's gathers and scatters are hops; those round the layers are left to `lax`."""
    kinds = lambda **compute: collections.Counter(
        op.kind for op in hlo.parse(lowered("tensor=4,sequence=True", **compute).compile())
    )
    plain, hops = kinds(), kinds(comms=sequence.overlapping)
    assert (
        plain["all-gather"] - hops["all-gather"] >= 4 * CONFIG.layers
    )  # two before columns, two after rows, backward
    assert plain["reduce-scatter"] - hops["reduce-scatter"] >= 4 * CONFIG.layers
    assert not plain["collective-permute"]
    assert hops["collective-permute"]


SUMS = (
    "decoder: Compute(reduce_in_backward=True) sums gradients in the backward pass of each "
    "block, so it needs stage=1, microbatches=1 and zero=0"
)
REFUSED = {
    "data=2,microbatches=2": (
        {"reduce_in_backward": True},
        f"{SUMS}; got Layout(data=2,microbatches=2). Leave reduce_in_backward out",
    ),
    "data=2,zero=1": (
        {"reduce_in_backward": True},
        f"{SUMS}; got Layout(data=2,zero=1). Leave reduce_in_backward out",
    ),
    "stage=2,microbatches=2": ({"reduce_in_backward": True}, SUMS),
    "tensor=2": (
        {"comms": sequence.overlapping},
        "decoder: Compute(comms=...) is for blocks that split tokens over the tensor axis",
    ),
}


@pytest.mark.parametrize("text", REFUSED)
def test_refusals(text):
    compute, said = REFUSED[text]
    layout = Layout.parse(text)
    world = mesh.make(**layout.axes, devices=jax.devices()[: layout.devices])
    with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
        decoder.train_step(
            *(gpt2.FAMILY, CONFIG, optax.sgd(0.1), layout, world),
            batch=4,
            key=jax.random.key(0),
            compute=decoder.Compute(**compute),
        )
