"""Documents packed into one window compute what each would alone, and train over every layout as on
one device."""

import functools
import itertools
import re

import bare
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from parallax import context, mesh
from parallax.layout import Layout
from parallax.models import decoder, documents, gpt2, llama

STEPS, BATCH, END = 3, 4, 7
SIZES = {
    "layers": 2,
    "heads": 4,
    "width": 16,
    "context": 16,
    "vocabulary": 11,
    "vocabulary_multiple": 8,
}
KINDS = {
    "gpt2": (gpt2, gpt2.Config(**SIZES)),
    "llama": (llama, llama.Config(**SIZES, groups=2, hidden=24)),
}
ENDED = documents.ends_with(END)  # one token in eleven: most windows have a cut


def apart(batch):
    """What the recipe makes of a batch, on one device."""
    batch = documents.with_segments(batch, ENDED(batch.windows))
    return batch._replace(weights=batch.weights / jnp.mean(batch.weights))


@functools.cache
def programs():
    """The logits of a packed window and of one document, filled up: two programs for all
    lengths."""
    model = llama.Llama(KINDS["llama"][1], key=jax.random.key(0), dtype=reference.FLOAT64)
    alone = jax.jit(lambda tokens: llama.logits(model, tokens))
    loss = jax.jit(lambda windows: llama.loss(model, apart(decoder.Batch(windows))))
    return alone, loss


@pytest.mark.sweep(3, "wholes")
@settings(max_examples=25)
@given(windows=arrays(np.int32, (2, 17), elements=st.sampled_from([END, END, *range(11)])))
def test_a_packed_window_computes_what_its_documents_do_alone(windows):
    """The loss is the mean over the targets that follow a token of their own document."""
    alone, loss = programs()
    found = []
    for window in windows:
        cuts = [0, *(np.flatnonzero(window == END) + 1), len(window)]
        for first, last in itertools.pairwise(cuts):
            document = window[first:last]
            if len(document) > 1:
                filled = np.zeros((1, 16), np.int32)
                filled[0, : len(document) - 1] = document[:-1]  # what comes after is not seen
                logits = np.asarray(alone(filled))[0, : len(document) - 1]
                found.append(-jax.nn.log_softmax(logits)[np.arange(len(logits)), document[1:]])
    if found:
        np.testing.assert_allclose(
            float(loss(windows)), np.mean(np.concatenate(found)), rtol=reference.EXACT
        )


def check(text, kind, **compute):
    layout, (module, config) = Layout.parse(text), KINDS[kind]
    plain = reference.gpt2_on_one_device(config, 0, STEPS, BATCH, kind=module, apart=apart)
    over = mesh.make(**layout.axes, devices=jax.devices()[: layout.devices])
    run = reference.gpt2_on(
        layout, over, config, 0, STEPS, BATCH, kind=module, documents=ENDED, **compute
    )
    reference.assert_same_run(run, plain)


@pytest.mark.long
def test_packed_documents_train_over_context_as_on_one_device():
    check("data=2,context=2,microbatches=2", "llama")


@pytest.mark.long
@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("text", "kind", "compute"),
    [
        ("data=2,tensor=2,microbatches=2,sequence=True,remat=attention", "gpt2", {}),
        ("context=2,stage=2,tensor=2,microbatches=2,zero=1", "gpt2", {}),
        ("context=4,tensor=2,sequence=True,zero=3,remat=products", "llama", {}),
        ("data=2,context=2", "llama", {"context_attention": context.ulysses}),
    ],
)
def test_packed_documents_train_as_on_one_device(text, kind, compute):
    check(text, kind, **compute)


@pytest.mark.sweep(3, "wholes")
def test_attention_weights_dropped_within_documents():
    """GPT-2's own attention masks the weights that it drops."""
    config = gpt2.Config(**SIZES, attention_dropout=0.5)
    model = gpt2.GPT2(config, key=jax.random.key(0))
    windows = np.array([[1, 2, END, 3, 4, 5]], np.int32)
    other = np.array([[5, 6, END, 3, 4, 5]], np.int32)
    keys = jax.random.split(jax.random.key(1), 1)
    of_second = jnp.array([[0.0, 0.0, 0.0, 1.0, 1.0]])
    loss = lambda windows: gpt2.loss(
        model,
        documents.with_segments(
            decoder.Batch(jnp.asarray(windows), keys, of_second), ENDED(jnp.asarray(windows))
        ),
    )
    assert float(loss(windows)) == float(loss(other))


# Refusals


def test_layers_that_do_not_read_the_documents_are_refused():
    layout, config = Layout(data=2), bare.Config()
    options = {
        "batch": BATCH,
        "key": jax.random.key(0),
        "compute": decoder.Compute(documents=ENDED),
    }
    over = mesh.make(**layout.axes, devices=jax.devices()[:2])
    prepared = decoder.train_step(bare.FAMILY, config, optax.sgd(0.1), layout, over, **options)
    windows = jax.ShapeDtypeStruct((BATCH, config.context + 1), "int32")
    with pytest.raises(ValueError, match=re.escape("the layers do not read Batch.segments")):
        prepared.train.lower(prepared.shapes, windows)


@pytest.mark.parametrize("shape", [(4, 5), (4,), (4, 1), (1, 4)])
def test_weights_that_are_not_one_for_each_target_are_refused(shape):
    """Windows of 5 tokens have 4 targets; 4 numbers might also be one for each window."""
    config, layout = bare.Config(), Layout(data=1)
    over = mesh.make(**layout.axes, devices=jax.devices()[:1])
    loss = decoder.loss_step(bare.FAMILY, config, layout, over)
    model = bare.Bare(config, key=jax.random.key(0))
    windows, weights = jnp.zeros((4, 5), jnp.int32), jnp.ones(shape)
    message = r"The weights must be \[batch, T\], .*: \(4, 4\) .* windows of shape \(4, 5\)"
    with pytest.raises(ValueError, match=message):
        loss(model, windows, weights)
    with pytest.raises(ValueError, match=message):
        documents.with_segments(decoder.Batch(windows, None, weights), windows)
    with pytest.raises(ValueError, match=r"windows must be \[batch, T \+ 1\] tokens"):
        loss(model, windows[0])


@pytest.mark.parametrize("numbers", [np.zeros((2, 4), np.int32), np.zeros((2, 5), np.float32)])
def test_numbers_that_do_not_fit_the_windows_are_refused(numbers):
    with pytest.raises(
        ValueError, match=r"numbers must be whole and of the windows' shape \[2, 5\]; got"
    ):
        documents.with_segments(decoder.Batch(jnp.zeros((2, 5), jnp.int32)), jnp.asarray(numbers))
