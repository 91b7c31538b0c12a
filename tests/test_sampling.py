"""What is drawn from logits: greedy, temperature, top_k and top_p as everybody has them, and
nothing from what is no token."""

import functools
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from parallax import mesh, rules
from parallax.models import gpt2
from parallax.models.sampling import Writer, filtered, sampled

KEY, V = jax.random.key(0), 13
TABLE = np.sin(3.0 * np.arange(V)[:, None] + np.arange(V) ** 2)
CONFIG = gpt2.Config(layers=1, heads=4, width=8, context=8, vocabulary=61, vocabulary_multiple=64)


def logits(tokens):
    """Of a model without weights: they depend on the last token, which is in the vocabulary, or
    they are nan."""
    known = jnp.where((tokens >= 0) & (tokens < V), tokens, 0)
    rows = jnp.asarray(TABLE)[known]
    return jnp.where((tokens == known)[..., None], rows, jnp.nan)


@functools.partial(jax.jit, static_argnames=("top_k", "tokens"))
def drawn(prompt, temperature, top_p, key, *, top_k=None, tokens=12):
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "key": key}
    return sampled(Writer(logits, 4), prompt, tokens=tokens, **options)


def greedily(token, tokens):
    found = []
    for _ in range(tokens):
        token = int(jnp.argmax(logits(jnp.asarray([[token]], jnp.int32))))
        found.append(token)
    return found


def by_hand(scores, temperature, top_k, top_p):
    """The tokens that may be drawn, by sets: of the largest k, the fewest that reach p."""
    scores = scores / temperature
    order = sorted(range(len(scores)), key=lambda token: -scores[token])[:top_k]
    chances = np.exp(scores[order] - scores[order[0]])
    below = np.cumsum(chances / chances.sum()) - chances / chances.sum()  # of those before each
    return {
        token
        for token, before in zip(order, below, strict=True)
        if token == order[0] or before < top_p
    }


filter_ = jax.jit(filtered, static_argnames="top_k")


@settings(max_examples=60)
@given(
    values=st.permutations(range(V)),
    scale=st.sampled_from([0.01, 0.4, 3.0]),
    temperature=st.sampled_from([0.3, 1.0, 7.0]),
    top_k=st.sampled_from([1, 2, 5, V, 100]),
    top_p=st.sampled_from([0.0, 0.05, 0.5001, 0.9003, 1.0]),
)
def test_filtered_keeps_what_sets_keep(values, scale, temperature, top_k, top_p):
    scores = scale * (np.asarray(values) + 0.37 * np.sin(values))  # all differ
    found = np.asarray(filter_(scores, temperature, top_k=top_k, top_p=top_p))
    kept = by_hand(scores, temperature, top_k, top_p)
    assert {*np.flatnonzero(np.isfinite(found)).tolist()} == kept
    inside = [*kept]
    np.testing.assert_allclose(
        found[inside], (scores[inside] - scores.max()) / temperature, rtol=1e-12, atol=1e-12
    )


@pytest.mark.parity
def test_filtered_equals_transformers():
    torch, generation = pytest.importorskip("torch"), pytest.importorskip("transformers")
    random = np.random.default_rng(0)
    for case in range(300):
        size = int(random.choice([2, 17, 301]))
        scores = random.normal(size=size) * 10 ** random.uniform(-2, 1.5)
        temperature, top_p = float(random.uniform(0.05, 3)), float(random.uniform(0, 1))
        top_k = int(random.integers(1, size + 5)) if case % 3 else None
        expected = torch.tensor(scores)[None] / temperature
        if top_k is not None:
            expected = generation.TopKLogitsWarper(top_k)(None, expected)
        if case % 4:
            expected = generation.TopPLogitsWarper(top_p)(None, expected)
        found = np.asarray(
            filter_(scores, temperature, top_k=top_k, top_p=top_p if case % 4 else None)
        )
        expected = expected[0].numpy()
        np.testing.assert_array_equal(np.isfinite(found), np.isfinite(expected))
        kept = np.isfinite(found)
        np.testing.assert_allclose(
            found[kept], expected[kept] - expected.max(), rtol=1e-9, atol=1e-9
        )


@pytest.mark.sweep(3, "wholes")
def test_temperature_0_is_greedy_and_a_small_one_too():
    for temperature in (0, 0.0, 1e-30, 5e-324):
        assert drawn(np.array([3]), temperature, None, KEY).tolist() == greedily(3, 12)
    assert sampled(Writer(logits, 4), [3], tokens=12, temperature=0, key=KEY).tolist() == greedily(
        3, 12
    )
    assert drawn(np.array([3]), 1.0, None, KEY, top_k=1).tolist() == greedily(3, 12)
    assert drawn(np.array([3]), 1.0, 0.0, KEY).tolist() == greedily(3, 12)
    assert drawn(np.array([3]), 1.0, None, KEY).tolist() != greedily(3, 12)
    equal = filtered(jnp.asarray([1.0, 2.0, 2.0]), 0)
    np.testing.assert_array_equal(equal, [-np.inf, 0, -np.inf])


@pytest.mark.sweep(3, "wholes")
def test_draws_follow_the_chances():
    keys = jax.random.split(KEY, 20_000)
    first = jax.vmap(lambda key: drawn(np.array([3]), 0.7, 0.8, key, top_k=5, tokens=1))(keys)[:, 0]
    chances = np.asarray(
        jax.nn.softmax(
            filtered(logits(jnp.asarray([[3]], jnp.int32))[0, 0], 0.7, top_k=5, top_p=0.8)
        )
    )
    found = np.bincount(first, minlength=V) / len(keys)
    assert not found[chances == 0].any()
    np.testing.assert_allclose(
        found, chances, atol=5 * np.sqrt(0.25 / len(keys))
    )  # five standard deviations


@pytest.mark.parametrize("bad", [-1, -100, V, 2**31, 2**32 + 3, -(2**32) + 3])
def test_a_token_outside_is_refused_or_no_token_follows(bad):
    prompt = np.array([3, bad, 4])
    with pytest.raises(
        ValueError, match=rf"sample needs tokens from 0 to 12; got {bad} at \[0, 1\]"
    ):
        sampled(Writer(logits, 4), prompt, tokens=3, key=KEY)
    assert drawn(prompt, 1.0, None, KEY).tolist() == [-1] * 12  # though the window leaves it behind
    assert drawn(np.array([bad, 3, 3, 3, 3]), 0.0, None, KEY).tolist() == greedily(
        3, 12
    )  # nothing sees it


def test_no_token_follows_one_that_is_none():
    wrapped = lambda tokens: logits(
        tokens % V
    )  # a family whose embedding takes -1 for the last row
    with_jit = jax.jit(lambda prompt: sampled(Writer(wrapped, 4), prompt, tokens=3, key=KEY))
    assert with_jit(np.array([3, V])).tolist() == [-1] * 3


@pytest.mark.parametrize("value", [np.nan, -1.0, -1e-30, np.inf, -np.inf])
def test_a_temperature_without_meaning_is_refused_or_no_token_follows(value):
    with pytest.raises(
        ValueError,
        match=rf"sample needs a finite temperature .*; got {re.escape(str(value))}\.",
    ):
        sampled(Writer(logits, 4), [3], tokens=3, temperature=value, key=KEY)
    assert drawn(np.array([3]), value, None, KEY).tolist() == [-1] * 12


def test_a_temperature_above_all_of_float32_is_refused():
    """It would become inf, and each token -1."""
    options = {"tokens": 3, "key": KEY}
    with pytest.raises(ValueError, match=r"sample needs a finite temperature .*; got 1e\+39\."):
        sampled(Writer(logits, 4), [3], temperature=1e39, **options)
    assert (sampled(Writer(logits, 4), [3], temperature=3e38, **options) >= 0).all()


@pytest.mark.parametrize("value", [np.nan, -0.1, 1.1, np.inf])
def test_a_top_p_without_meaning_is_refused_or_no_token_follows(value):
    with pytest.raises(ValueError, match=rf"sample needs a top_p from 0 to 1; got {value}\."):
        sampled(Writer(logits, 4), [3], tokens=3, top_p=value, key=KEY)
    assert drawn(np.array([3]), 1.0, value, KEY).tolist() == [-1] * 12


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_a_scalar_may_be_of_any_float_type(dtype):
    at = lambda value: {"temperature": value, "top_p": value}
    options = {"tokens": 3, "key": KEY}
    for value in (jnp.asarray(0.5, dtype), np.asarray(0.5, dtype)):
        np.testing.assert_array_equal(
            sampled(Writer(logits, 4), [3], **at(value), **options),
            sampled(Writer(logits, 4), [3], **at(0.5), **options),
        )
    small = jnp.asarray(0.002, dtype)
    np.testing.assert_array_equal(
        filtered(jnp.zeros(V), top_p=1 - small), filtered(jnp.zeros(V), top_p=float(1 - small))
    )


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_no_token_follows_logits_that_are_not_finite(bad):
    for row in ([0.0, bad, 1.0], [-np.inf] * 3):
        assert np.isnan(filtered(jnp.asarray(row))).all()
    np.testing.assert_array_equal(filtered(jnp.asarray([0.0, -np.inf, 1.0])), [-1, -np.inf, 0])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"tokens": -1},
            "needs 0 or more tokens to draw, and a window of 1 or more; got tokens=-1, window=4",
        ),
        ({"window": 0}, "got tokens=3, window=0"),
        ({"top_k": 0}, "a top_k of 1 or more, or None for all; got 0"),
        ({"prompt": []}, "a prompt of one token or more; got none"),
        ({"temperature": np.ones(2)}, "sample needs a finite temperature"),
    ],
    ids=str,
)
def test_sampled_refuses(wrong, message):
    options = {"prompt": [3], "tokens": 3, "window": 4, "key": KEY} | wrong
    with pytest.raises(ValueError, match=message):
        sampled(Writer(logits, options.pop("window")), **options)


@pytest.mark.sweep(3, "wholes")
def test_numbers_may_be_numpys_and_prompts_lists():
    expected = sampled(
        Writer(logits, 4),
        jnp.asarray([3, 4]),
        tokens=5,
        temperature=0.5,
        top_k=3,
        top_p=0.5,
        key=KEY,
    )
    for kind in (np.uint8, np.int16, np.uint64, list):
        prompt = [3, 4] if kind is list else np.array([3, 4], kind)
        options = {"temperature": np.float32(0.5), "top_k": np.int64(3), "top_p": np.float64(0.5)}
        found = sampled(Writer(logits, np.array(4)), prompt, tokens=np.int32(5), **options, key=KEY)
        np.testing.assert_array_equal(found, expected)
    assert sampled(Writer(logits, 4), [3], tokens=0, key=KEY).shape == (0,)


@pytest.mark.sweep(3, "wholes")
def test_a_split_model_writes_what_one_device_writes():
    model = gpt2.GPT2(CONFIG, key=KEY, dtype=jnp.float64)
    model = jax.tree.map(lambda w: 30 * w if w.ndim > 1 else w, model)  # so that logits differ
    devices = mesh.make(data=2, tensor=4)
    split = mesh.place(model, rules.specs(model, gpt2.rules("tensor"), devices), devices)
    assert split.wte.sharding.spec == P("tensor")
    write = jax.jit(
        lambda model, key: gpt2.sample(
            model, [3, 1, 4], tokens=20, temperature=0.9, top_k=40, top_p=0.95, key=key
        )
    )
    found = write(split, KEY)
    np.testing.assert_array_equal(found, write(model, KEY))
    assert len({*found.tolist()}) > 4


WINDOWS = np.random.default_rng(0).integers(0, 61, (2, 6)).astype(np.int32)


@functools.cache
def compiled():
    model = gpt2.GPT2(CONFIG, key=KEY, dtype=jnp.float64)
    grad = jax.value_and_grad(
        lambda model, windows, weights: gpt2.loss(model, gpt2.Batch(windows, None, weights))
    )
    return model, jax.jit(grad)


@pytest.mark.sweep(3, "wholes")
def test_ids_outside_make_the_loss_nan_unless_nothing_that_counts_sees_them():
    model, grad = compiled()
    ones = np.ones((2, 5))
    right, _ = grad(model, WINDOWS, ones)
    assert np.isfinite(right)
    for bad in (-1, -100, 61, 63, 64, 49_999):  # 61 to 63 are rows of padding
        for t in (0, 2, 4, 5):
            windows = WINDOWS.copy()
            windows[1, t] = bad
            value, wrong = grad(model, windows, ones)
            assert np.isnan(value)
            assert np.isnan(wrong.wpe).any() or t == 5  # a target alone
            with pytest.raises(
                ValueError, match=rf"gpt2\.loss needs tokens from 0 to 60; got {bad} at \[1, {t}\]"
            ):
                gpt2.loss(model, gpt2.Batch(windows))
            unweighted = grad(model, windows, ones * (np.arange(5) >= t))[
                0
            ]  # it has no weight, and is seen, but for the last
            assert np.isnan(unweighted) == (t < 5)
    short = ones * (np.arange(5) < [[5], [3]])
    expected = grad(model, WINDOWS, short)
    filled = WINDOWS.copy()
    filled[1, 4:] = -100  # the first of weight 0, and what follows
    found = grad(model, filled, short)
    jax.tree.map(
        np.testing.assert_array_equal,
        (found[0], found[1].blocks),
        (expected[0], expected[1].blocks),
    )
    np.testing.assert_allclose(
        gpt2.loss(model, gpt2.Batch(jnp.asarray(filled), None, jnp.asarray(short))),
        found[0],
        rtol=1e-12,
    )


WRITE = functools.partial(gpt2.sample, tokens=2, key=jax.random.key(0))


@pytest.mark.parametrize("of", [gpt2.loss, gpt2.logits, WRITE], ids=["loss", "logits", "sample"])
def test_a_model_that_lacks_a_leaf_is_refused_by_its_path(of):
    model, _ = compiled()
    half = eqx.tree_at(lambda model: model.blocks.mlp.up.weight, model, None)
    prompt = jnp.asarray(WINDOWS[0] if of is WRITE else WINDOWS)
    with pytest.raises(
        ValueError, match=r"gpt2\.\w+: \.blocks\.mlp\.up\.weight is None, where an array was needed"
    ):
        of(half, gpt2.Batch(prompt) if of is gpt2.loss else prompt)


def test_logits_are_nan_after_an_id_outside_and_refused_where_it_is_known():
    model, _ = compiled()
    windows = WINDOWS.copy()
    windows[0, 3] = 61
    found = np.asarray(jax.jit(gpt2.logits)(model, windows))
    assert np.isnan(found[0, 3:]).all()
    assert np.isfinite(found[1]).all()
    with pytest.raises(
        ValueError, match=r"gpt2\.logits needs tokens from 0 to 60; got 61 at \[0, 3\]"
    ):
        gpt2.logits(model, jnp.asarray(windows))


def test_a_batch_of_nothing_and_arrays_that_are_gone_are_refused():
    model, _ = compiled()
    for shape in ((0, 6), (2, 1)):
        with pytest.raises(
            ValueError,
            match=r"gpt2 needs one or more sequences of one or more input tokens; got inputs of ",
        ):
            gpt2.loss(model, (jnp.zeros(shape, jnp.int32), None))
    copy = jax.tree.map(jnp.copy, model)
    copy.blocks.mlp.up.weight.delete()
    for name, use in (
        ("loss", lambda m: gpt2.loss(m, gpt2.Batch(WINDOWS))),
        ("logits", lambda m: gpt2.logits(m, jnp.asarray(WINDOWS))),
    ):
        with pytest.raises(
            ValueError,
            match=rf"gpt2\.{name}: \.blocks\.mlp\.up\.weight of shape \(1, 8, 32\) was deleted",
        ):
            use(copy)
    with pytest.raises(
        ValueError, match=r"gpt2\.sample: \.blocks\.mlp\.up\.weight of shape .* was deleted"
    ):
        gpt2.sample(copy, [3], tokens=2, key=KEY)


@pytest.mark.parametrize(
    "wrong",
    [
        {"window": 9},
        {"tokens": -1},
        {"top_k": 0},
        {"temperature": -1.0},
        {"temperature": np.ones(2)},
        {"top_p": 2.0},
        {"prompt": []},
        {"prompt": [61]},
    ],
    ids=str,
)
def test_errors_name_the_function_of_the_family(wrong):
    model = gpt2.GPT2(CONFIG, key=KEY)
    options = {"prompt": [3], "tokens": 2, "key": KEY} | wrong
    with pytest.raises(ValueError, match=r"^gpt2\.sample needs "):
        gpt2.sample(model, **options)
