"""GPT-2 equals transformers' GPT2LMHeadModel: logits, loss, every gradient, and files in both
directions.

Needs the extra `parity`; deselected by default. `test_gpt2_weights.py` keeps a fixture made the
same way in every run.
"""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from test_gpt2_weights import assert_close, assert_same, evaluate

from parallax import grads, mesh, rules
from parallax.collectives import ring
from parallax.models import gpt2

pytestmark = pytest.mark.parity

BOUNDS = {"float64": 1e-11, "float32": 1e-5}
SIZES = {  # no vocabulary divides by 128
    "one layer, one head": {
        "n_layer": 1,
        "n_head": 1,
        "n_embd": 8,
        "n_positions": 5,
        "vocab_size": 11,
    },
    "many heads": {"n_layer": 2, "n_head": 8, "n_embd": 32, "n_positions": 33, "vocab_size": 131},
    "deep": {
        "n_layer": 5,
        "n_head": 2,
        "n_embd": 24,
        "n_positions": 16,
        "vocab_size": 257,
        "layer_norm_epsilon": 1e-3,
    },
    "wide": {"n_layer": 2, "n_head": 3, "n_embd": 96, "n_positions": 20, "vocab_size": 1000},
}


@pytest.fixture
def theirs(monkeypatch):
    """What makes and evaluates models of transformers; nothing is downloaded."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from fixtures import make_gpt2_fixture

    return make_gpt2_fixture


def case(theirs, sizes, dtype, folder, seed=0):
    """A model of theirs, saved into `folder`, token windows that fill its context, and what it
    computes: ours in layout."""
    import torch
    from safetensors.torch import save_file

    model = theirs.reference(seed, getattr(torch, dtype), **sizes)
    windows = (
        np.random.default_rng(seed)
        .integers(sizes["vocab_size"], size=(4, sizes["n_positions"] + 1))
        .astype(np.int32)
    )
    logits, loss, gradients = theirs.evaluate(model, windows)
    model.save_pretrained(folder)
    save_file(gradients, folder / "gradients.safetensors")
    gradients = gpt2.load(folder / "gradients.safetensors", dtype=dtype)
    return model, jnp.asarray(windows), (jnp.asarray(logits), jnp.asarray(loss, dtype), gradients)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("sizes", SIZES)
def test_logits_loss_and_gradients_equal_theirs(sizes, dtype, theirs, tmp_path):
    _, windows, expected = case(theirs, SIZES[sizes], dtype, tmp_path)
    actual = evaluate(gpt2.load(tmp_path, dtype=dtype), windows)
    assert_close(actual, expected, BOUNDS[dtype])


@pytest.mark.parametrize("dtype", BOUNDS)
def test_mesh_equals_theirs(dtype, theirs, tmp_path):
    m = mesh.make(data=2, tensor=2, devices=jax.devices()[:4])
    _, windows, (_, expected_loss, expected) = case(theirs, SIZES["many heads"], dtype, tmp_path)
    model = gpt2.load(tmp_path, dtype=dtype)
    specs = rules.specs(model, gpt2.rules("tensor"), m)
    loss = functools.partial(gpt2.loss, axis=ring("tensor"))
    grad = grads.averaged(jax.value_and_grad(loss), ring("data"))
    step = jax.jit(mesh.spmd(grad, mesh=m, in_specs=(specs, P("data")), out_specs=(P(), specs)))
    actual = step(mesh.place(model, specs, m), (windows, None))
    assert_close(actual, (expected_loss, expected), BOUNDS[dtype])


@pytest.mark.parametrize(
    "attention", [gpt2.attention, functools.partial(jax.nn.dot_product_attention, is_causal=True)]
)
def test_their_own_loss_equals_ours(attention, theirs, tmp_path):
    import torch

    with jax.numpy_dtype_promotion("standard"):
        model, windows, _ = case(theirs, SIZES["wide"], "float32", tmp_path)
        windows = windows[:, :-1]
        tokens = torch.from_numpy(np.array(windows)).long()
        expected = model(input_ids=tokens, labels=tokens).loss.item()
        assert_close(
            gpt2.loss(gpt2.load(tmp_path), (windows, None), attend=attention),
            np.array(expected),
            1e-6,
        )


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_model_saved_by_us_is_theirs(dtype, theirs, tmp_path):
    import torch
    import transformers

    theirs_folder, ours_folder = tmp_path / "theirs", tmp_path / "ours"
    wide = "float64" if dtype == "float64" else "float32"
    _, windows, _ = case(theirs, SIZES["deep"], wide, theirs_folder)
    ours = gpt2.load(theirs_folder, dtype=dtype)
    gpt2.save(ours, ours_folder)

    loaded, report = transformers.GPT2LMHeadModel.from_pretrained(
        ours_folder, attn_implementation="eager", output_loading_info=True
    )
    assert not any(report.values()), report
    assert loaded.dtype == getattr(torch, dtype)
    assert loaded.config.layer_norm_epsilon == 1e-3
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    loaded = loaded.to(getattr(torch, wide)).eval()
    logits, loss, _ = theirs.evaluate(loaded, np.array(windows))
    ours = jax.tree.map(lambda leaf: leaf.astype(wide), ours)
    assert_close(
        evaluate(ours, windows)[:2], (jnp.asarray(logits), jnp.asarray(loss, wide)), BOUNDS[wide]
    )


def test_model_made_here_comes_back_from_theirs_bit_for_bit(theirs, tmp_path):
    import transformers

    config = gpt2.Config(
        layers=2, heads=2, width=16, context=9, vocabulary=50, dropout=0.1, attention_dropout=0.2
    )
    model = gpt2.GPT2(config, key=jax.random.key(0))
    gpt2.save(model, tmp_path / "ours")
    transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "ours").save_pretrained(
        tmp_path / "theirs", max_shard_size="8kB"
    )
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists()
    loaded = gpt2.load(tmp_path / "theirs")
    assert (
        loaded.config.origin.generation is not None
    )  # theirs, which the model made here did not have
    assert dataclasses.replace(loaded.config, origin=config.origin) == config
    assert_same(jax.tree.leaves(loaded), jax.tree.leaves(model))


def test_sizes_agree_with_theirs(theirs):
    import torch
    import transformers

    ours = eqx.filter_eval_shape(lambda: gpt2.GPT2(gpt2.SMALL, key=jax.random.key(0)))
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config())
    assert sum(weight.numel() for weight in model.parameters()) == gpt2.SMALL.parameters
    assert ours.wpe.shape == tuple(model.transformer.wpe.weight.shape)
