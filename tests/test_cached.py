"""What is written with keys and values kept is what is written without, token by token; also by a
model that is split."""

import dataclasses
import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from test_llama_weights import FIXTURE, KINDS, fixture

from parallax import mesh, rules
from parallax.models import gpt2, llama
from parallax.models.sampling import Writer, sampled

KEY, V = jax.random.key(0), 61
LLAMA = llama.Config(
    layers=2,
    heads=4,
    groups=2,
    width=8,
    hidden=12,
    context=16,
    vocabulary=V,
    vocabulary_multiple=64,
)
MODELS = {
    "gpt2": (
        gpt2,
        gpt2.Config(layers=2, heads=4, width=8, context=16, vocabulary=V, vocabulary_multiple=64),
    ),
    "llama": (llama, LLAMA),
    "qwen": (llama, dataclasses.replace(LLAMA, groups=1, bias=True, head_norms=True, tied=True)),
}
TEXTS = [
    (3, 8, 14),
    (8, 8, 4),
    (11, 8, 3),
    (5, 16, 12),
    (5, 16, 1),
]  # of a prompt, a window and what follows


@functools.cache
def model(name):
    kind, config = MODELS[name]
    made = kind.FAMILY.model(config, key=KEY, dtype=jnp.float64)
    return jax.tree.map(lambda w: 10 * w if w.ndim > 1 else w, made)  # so that logits differ


@functools.cache
def both(name, window, tokens):
    """Two compiled writers: with keys and values kept, and the oracle, which computes every token
    from all before it."""
    kind, _ = MODELS[name]

    def without(model, prompt, temperature, top_p, key):
        logits = functools.partial(kind.logits, model)
        return sampled(
            Writer(logits, window),
            prompt,
            tokens=tokens,
            temperature=temperature,
            top_p=top_p,
            key=key,
        )

    def kept(model, prompt, temperature, top_p, key):
        return kind.sample(
            model,
            prompt,
            tokens=tokens,
            window=window,
            temperature=temperature,
            top_p=top_p,
            key=key,
        )

    return jax.jit(kept), jax.jit(without)


@pytest.mark.sweep(15)
@pytest.mark.parametrize("text", TEXTS, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_kept_keys_and_values_change_no_token(name, text):
    size, window, tokens = text
    kept, without = both(name, window, tokens)

    @settings(max_examples=8)
    @given(
        st.integers(0, 2**31), st.sampled_from([0.0, 0.3, 1.0, 3.0]), st.sampled_from([0.5, 1.0])
    )
    def holds(seed, temperature, top_p):
        prompt = np.random.default_rng(seed).integers(0, V, size)
        arguments = (model(name), prompt, temperature, top_p, jax.random.key(seed))
        np.testing.assert_array_equal(kept(*arguments), without(*arguments))

    holds()
    outside = np.arange(size) * 0 + V
    assert kept(model(name), outside, 0.0, 1.0, KEY).tolist() == [-1] * tokens
    assert kept(model(name), np.arange(size), np.nan, 1.0, KEY).tolist() == [-1] * tokens


@pytest.mark.sweep(6)
@pytest.mark.parametrize("kind", KINDS)
def test_the_likeliest_tokens_are_those_of_transformers(kind):
    expected = json.loads((FIXTURE / kind / "expected.json").read_text())
    prompt = jnp.asarray(expected["windows"][0][:5], jnp.int32)
    write = jax.jit(lambda model: llama.sample(model, prompt, tokens=200, temperature=0, key=KEY))
    assert write(fixture(kind)).tolist() == expected["generated"]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_split_model_writes_many_texts(name):
    """Sequences over data, heads over tensor: each device keeps the keys and values of its own
    alone."""
    kind, _ = MODELS[name]
    devices = mesh.make(data=2, tensor=2, devices=jax.devices()[:4])
    whole, prompts = (
        model(name),
        jnp.asarray(np.random.default_rng(1).integers(0, V, (4, 5)), jnp.int32),
    )
    split = mesh.place(whole, rules.specs(whole, kind.rules("tensor", size=2), devices), devices)
    keys = jax.random.split(KEY, 4)
    each = lambda model, prompt, key: kind.sample(
        model, prompt, tokens=9, temperature=0.9, top_p=0.95, key=key
    )
    write = jax.jit(jax.vmap(each, in_axes=(None, 0, 0)))
    rows = NamedSharding(devices, P("data"))
    arguments = split, jax.device_put(prompts, rows), jax.device_put(keys, rows)
    text = write.lower(*arguments).compile().as_text()
    kept = {
        tuple(map(int, dims.split(",")))
        for dims in re.findall(r"f64\[([\d,]+)\]", text)
        if "13" in dims.split(",")
    }
    heads = 4 if name == "gpt2" else 2
    assert any(sorted(dims) == sorted((2, 2, 1, 13, heads // 2, 2)) for dims in kept), (
        kept
    )  # layers, sequences, 1, places, heads
    assert not any(np.prod(dims) >= 2 * 4 * 13 * heads * 2 for dims in kept), kept
    found = write(*arguments)
    np.testing.assert_array_equal(found, write(whole, prompts, keys))
    assert len({*np.ravel(found).tolist()}) > 4


@pytest.mark.long
def test_a_token_costs_one_and_not_all_before_it():
    config = dataclasses.replace(LLAMA, context=256, width=32, hidden=64)
    made = llama.Llama(config, key=KEY)
    write = lambda tokens, window: jax.jit(
        lambda model: llama.sample(
            model, jnp.arange(8), tokens=tokens, window=window, temperature=0, key=KEY
        )
    )
    flops = lambda *sizes: (
        write(*sizes).lower(made).compile().cost_analysis()["flops"]
    )  # of a loop's body, counted once
    assert flops(200, 256) < flops(200, 128) / 8  # the second goes on behind its window
