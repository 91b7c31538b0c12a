"""The recipe is read in one function, which a user can copy, change in one line and train with."""

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from reference import EXACT, FLOAT64, assert_close, windows

from parallax import mesh
from parallax.layout import Layout
from parallax.models import decoder, gpt2, recipe

CONFIG = gpt2.Config(layers=4, heads=2, width=16, context=8, vocabulary=30, vocabulary_multiple=8)
BATCH = 16


def trained(layout, **choices):
    """The losses and the weights after three steps, whole."""
    devices = mesh.make(**layout.axes, devices=jax.devices()[: layout.devices])
    compute = decoder.Compute(dtype=FLOAT64, max_norm=0.5, **choices)
    options = {"batch": BATCH, "key": jax.random.key(0), "compute": compute}
    with jax.numpy_dtype_promotion("standard"):
        made = decoder.train_step(
            gpt2.FAMILY, CONFIG, optax.adamw(1e-3), layout, devices, **options
        )
        state, losses = made.init(), []
        for number in range(3):
            state, info = made.train(state, windows(CONFIG, 0, number, BATCH))
            losses.append(float(info.loss))
    return losses, jax.tree.map(np.asarray, decoder.joined(gpt2.FAMILY, layout, state.model))


def copied(change):
    """`recipe.grad_of` as a user has it in a file of their own, with one line changed."""
    line, instead = change
    text = inspect.getsource(recipe.grad_of)
    assert text.count(line) == 1
    names = dict(vars(recipe)) | {"jnp": jnp}
    exec(text.replace(line, instead), names)
    return names["grad_of"]


LAYOUTS = [
    Layout(data=4, tensor=2, microbatches=2, zero=2),
    Layout(data=2, stage=2, tensor=2, microbatches=4, zero=1),
    Layout(data=4, tensor=2, sequence=True, zero=3),
]


@pytest.mark.sweep(30, "steps")
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_copy_with_another_order_of_the_same_sums_trains_the_same(layout):
    """The copy computes in float64 by `precision.mixed`, which changes nothing here."""
    change = ('    if layout.precision != "full":\n', "    if True:\n")
    double = ("DTYPES[layout.precision]", "jnp.float64")
    text = inspect.getsource(recipe.grad_of)
    assert text.count(change[0]) == text.count(double[0]) == 1
    names = dict(vars(recipe))
    names |= {"jnp": jnp}
    exec(text.replace(*change).replace(*double), names)
    losses, weights = trained(layout, grad_of=names["grad_of"])
    expected_losses, expected = trained(layout)
    np.testing.assert_allclose(losses, expected_losses, rtol=EXACT)
    assert_close(weights, expected, EXACT)


@pytest.mark.sweep(30, "steps")
@pytest.mark.parametrize("unroll", [2, 3, 100])
@pytest.mark.parametrize("layout", [*LAYOUTS, Layout(stage=2, schedule="zero_bubble")], ids=str)
def test_a_loop_of_several_layers_in_its_body_trains_the_same(layout, unroll):
    """Also where the last trip has fewer layers, or all layers are one body."""
    losses, weights = trained(layout, unroll=unroll)
    expected_losses, expected = trained(layout)
    np.testing.assert_allclose(losses, expected_losses, rtol=EXACT)
    assert_close(weights, expected, EXACT)


def test_a_loop_has_a_layer_or_more_in_its_body():
    with pytest.raises(ValueError, match="Compute needs unroll of 1 layer or more; got 0"):
        trained(Layout(), unroll=0)


@pytest.mark.sweep(30, "steps")
def test_a_copy_with_a_line_changed_does_as_it_says():
    """Gradients of half the size: with clipping off, SGD takes half the step; here the losses begin
    the same and then differ."""
    layout = Layout(data=2)
    halved = copied(
        ("    return _with_aux_by_layer(grad)", "    return _with_gradients(grad, _halved)")
    )
    halved.__globals__["_halved"] = lambda gradients: jax.tree.map(lambda g: g / 2, gradients)
    devices = mesh.make(**layout.axes, devices=jax.devices()[:2])
    norms = []
    for grad_of in (None, halved):
        compute = decoder.Compute(dtype=FLOAT64, grad_of=grad_of)
        options = {"batch": BATCH, "key": jax.random.key(0), "compute": compute}
        made = decoder.train_step(gpt2.FAMILY, CONFIG, optax.sgd(0.1), layout, devices, **options)
        norms.append(float(made.train(made.init(), windows(CONFIG, 0, 0, BATCH))[1].gradient_norm))
    np.testing.assert_allclose(norms[1], norms[0] / 2, rtol=EXACT)


def test_the_composition_is_short():
    """At most 60 lines of body, and no lambda longer than 60 characters."""
    text = inspect.getsource(recipe.grad_of)
    body = text.partition('"""')[2].partition('"""')[2]
    assert len(body.strip().splitlines()) <= 60
    assert "lambda" not in body


def test_the_positions_gradient_adds_up_parts_of_sixteen_sequences():
    """Of 35 sequences: it is the mean of the sequences' gradients, and no sum is over more than 16,
    for which XLA would lay out the residual stream of a GPU's program for that sum."""
    with jax.numpy_dtype_promotion("standard"):
        model = gpt2.GPT2(CONFIG, key=jax.random.key(0), dtype=FLOAT64)
        batch = jnp.asarray(windows(CONFIG, 0, 0, 35))

        def of_positions(batch):
            return jax.grad(gpt2.loss)(model, (batch, None)).wpe

        one_by_one = jax.jit(jax.vmap(of_positions))(batch[:, None])
        np.testing.assert_allclose(
            jax.jit(of_positions)(batch), jnp.mean(one_by_one, axis=0), rtol=0, atol=EXACT
        )
        text = jax.jit(of_positions).lower(batch).as_text()
    T, D = CONFIG.context, CONFIG.width
    sums = re.findall(
        rf"reduce.* applies stablehlo.add across dimensions = \[0\] : \(tensor<(\d+)x{T}x{D}xf64>",
        text,
    )
    assert sorted(map(int, sums)) == [3, 16, 16]
