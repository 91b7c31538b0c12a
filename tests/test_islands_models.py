"""Decoders on islands: whatever the layout inside, it is the same run; killed, it goes on as it was."""

import functools

import equinox as eqx
import jax
import numpy as np
import optax
import pytest
from reference import EXACT, FLOAT64, assert_close, windows

from parallax import islands, mesh
from parallax.layout import Layout
from parallax.models import decoder, gpt2, on_islands

CONFIG = gpt2.Config(layers=2, heads=2, width=16, context=8, vocabulary=30, vocabulary_multiple=8, dropout=0.1)
STEPS, BATCH = 6, 8
STREAM = islands.Stream(islands.by_layers(1), delay=1, mixing=0.25)


def prepared(text, count=2, stream=islands.ALL_AT_ONCE, config=CONFIG, dtype=FLOAT64, axis="island", every=3):
    layout = Layout.parse(text)
    mesh_ = mesh.make(island=count, **layout.axes, devices=jax.devices()[: count * layout.devices])
    with jax.numpy_dtype_promotion("standard"):
        return on_islands.prepare(
            *(gpt2.FAMILY, config, optax.adamw(1e-3, eps=1e-6), layout, mesh_, islands.nesterov()),
            every=every,
            batch=BATCH,
            key=jax.random.key(0),
            axis=axis,
            stream=stream,
            compute=decoder.Compute(dtype=dtype, max_norm=1.0),
        )


def ran(text, stream=islands.ALL_AT_ONCE):
    """The losses, and the outer weights at the end."""
    made = prepared(text, stream=stream)
    losses = []
    with jax.numpy_dtype_promotion("standard"):
        state = made.init()
        for number in range(STEPS):
            state, info = made.train(state, windows(CONFIG, 0, number, BATCH))
            losses.append(np.asarray(info.loss))
    model = decoder.joined(gpt2.FAMILY, Layout.parse(text), islands.model_of(state))
    return np.stack(losses), jax.tree.map(np.asarray, eqx.filter(model, eqx.is_array))


@functools.cache
def plain(stream):
    return ran("", stream)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "stream"),
    [
        ("data=2,tensor=2,zero=1", islands.ALL_AT_ONCE),
        ("data=2,stage=2,zero=3,microbatches=2", islands.ALL_AT_ONCE),
        ("replica=2,data=2,zero=2", STREAM),
    ],
)
def test_each_layout_inside_an_island_is_the_same_run(text, stream):
    losses, model = ran(text, stream)
    expected, weights = plain(stream)
    np.testing.assert_allclose(losses, expected, rtol=EXACT)
    assert_close(model, weights, EXACT)
    assert losses.shape == (STEPS, 2)
    assert len(set(losses[0])) == 2  # each island has rows of its own
