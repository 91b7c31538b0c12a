"""What a mesh of TPUs makes the recipe do otherwise: the same numbers, here on a CPU that says it
is one."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from parallax import mesh, remat
from parallax.layout import Layout
from parallax.models import decoder, gpt2, recipe
from parallax.models.decoder import Compute
from parallax.models.gpt2.model import attention

CONFIG = gpt2.Config(layers=2, heads=2, width=8, context=8, vocabulary=32)


def after_two_steps(words):
    layout = Layout.parse(words)
    world = mesh.make(devices=jax.devices()[: layout.devices], **layout.axes)
    compute = Compute(attention=attention, dtype=jnp.float64)
    prepared = decoder.train_step(
        gpt2.FAMILY,
        CONFIG,
        optax.sgd(0.1),
        layout,
        world,
        batch=4,
        key=jax.random.key(0),
        compute=compute,
    )
    windows = jax.random.randint(jax.random.key(1), (4, 9), 0, 32)
    state, first = prepared.train(prepared.init(), windows)
    state, second = prepared.train(state, windows)
    return [float(first.loss), float(second.loss), float(second.gradient_norm)]


@pytest.mark.parametrize(
    "words",
    [
        pytest.param("data=2,zero=3", marks=pytest.mark.sweep(30, "steps")),
        *(
            pytest.param(words, marks=pytest.mark.long)
            for words in (
                "data=2,remat=block",
                "data=2,zero=3,remat=products",
                "stage=2,microbatches=2,remat=block",
            )
        ),
    ],
)
def test_the_step_is_the_same(words, monkeypatch):
    plain = after_two_steps(words)
    seen = []
    monkeypatch.setattr(recipe, "platform_of", lambda mesh_: seen.append(mesh_) or "tpu")
    np.testing.assert_allclose(after_two_steps(words), plain, rtol=1e-11)
    assert seen


def test_no_barrier_in_a_loop():
    """What XLA copies kept arrays for is gone, and only round functions that are known."""
    square = lambda x: jnp.sin(x) ** 2
    for one in (remat.gathers, remat.products, remat.block):
        kinds = [
            str(jax.make_jaxpr(jax.grad(wrap(square)))(1.0)) for wrap in (one, remat.in_a_loop(one))
        ]
        assert ["prevent_cse=True" in text for text in kinds] == [True, False]
    own = lambda block: block
    assert remat.in_a_loop(own) is own
    assert remat.in_a_loop(remat.none) is remat.none
