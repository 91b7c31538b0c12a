"""Llama, Qwen 2, Qwen 3 and Mixtral equal those of transformers: logits, loss, every gradient, and
files in both directions.

Needs the extra `parity`; deselected by default. `test_llama_weights.py` keeps fixtures made the
same way in every run.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_gpt2_weights import assert_close, assert_same
from test_llama_weights import TINY, evaluate

from parallax.models import llama

pytestmark = pytest.mark.parity

BOUNDS = {"float64": 1e-11, "float32": 1e-5}
SCALED = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "rope_theta": 5e5,
}
CASES = {  # no vocabulary divides by 128
    "one layer, one head": (
        "llama",
        {"layers": 1, "heads": 1, "groups": 1, "width": 8, "hidden": 10, "vocab_size": 11},
        {},
    ),
    "scaled, tied": (
        "llama",
        {"layers": 3, "heads": 8, "groups": 2, "width": 32, "hidden": 40, "vocab_size": 131},
        {
            "rope_parameters": SCALED | {"original_max_position_embeddings": 16},
            "tie_word_embeddings": True,
        },
    ),
    "one group, wide heads": (
        "llama",
        {"layers": 2, "heads": 6, "groups": 1, "width": 24, "hidden": 70, "vocab_size": 257},
        {"head_dim": 10, "rms_norm_eps": 1e-3},
    ),
    "qwen2": (
        "qwen2",
        {"layers": 2, "heads": 4, "groups": 2, "width": 16, "hidden": 30, "vocab_size": 300},
        {},
    ),
    "qwen3": (
        "qwen3",
        {"layers": 2, "heads": 4, "groups": 2, "width": 16, "hidden": 30, "vocab_size": 99},
        {"head_dim": 12},
    ),
    "mixtral": (
        "mixtral",
        {
            "layers": 2,
            "heads": 4,
            "groups": 2,
            "width": 16,
            "hidden": 22,
            "vocab_size": 99,
            "experts": 6,
            "chosen": 3,
        },
        {"head_dim": 12},
    ),
    "mixtral, all experts": (
        "mixtral",
        {
            "layers": 1,
            "heads": 2,
            "groups": 1,
            "width": 12,
            "hidden": 7,
            "vocab_size": 50,
            "experts": 4,
            "chosen": 4,
        },
        {},
    ),
}
THEIRS = {
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "groups": "num_key_value_heads",
    "width": "hidden_size",
    "hidden": "intermediate_size",
    "experts": "num_local_experts",
    "chosen": "num_experts_per_tok",
}


@pytest.fixture
def theirs(monkeypatch):
    """What makes and evaluates models of transformers; nothing is downloaded."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.syspath_prepend("tests/fixtures")
    from fixtures import make_llama_fixture

    return make_llama_fixture


def case(theirs, name, dtype, folder, tokens=40):
    """A model of theirs, saved into `folder`, token windows, and what it computes: ours in
    layout."""
    import torch
    from safetensors.torch import save_file

    kind, sizes, options = CASES[name]
    sizes = (
        {THEIRS.get(field, field): size for field, size in sizes.items()}
        | {"max_position_embeddings": 260}
        | options
    )
    model = theirs.reference(kind, 0, getattr(torch, dtype), **sizes)
    windows = (
        np.random.default_rng(0)
        .integers(sizes["vocab_size"], size=(3, tokens + 1))
        .astype(np.int32)
    )
    logits, loss, gradients = theirs.computed(model, windows)
    model.save_pretrained(folder)
    save_file(gradients, folder / "gradients.safetensors")
    gradients = llama.load(folder / "gradients.safetensors", dtype=dtype)
    return model, jnp.asarray(windows), (jnp.asarray(logits), jnp.asarray(loss, dtype), gradients)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("name", CASES)
def test_logits_loss_and_gradients_equal_theirs(name, dtype, theirs, tmp_path):
    _, windows, expected = case(theirs, name, dtype, tmp_path)
    assert_close(evaluate(llama.load(tmp_path, dtype=dtype), windows), expected, BOUNDS[dtype])


@pytest.mark.parametrize("name", CASES)
def test_model_saved_by_us_is_theirs(name, theirs, tmp_path):
    import torch
    import transformers

    _, windows, (logits, loss, _) = case(theirs, name, "float64", tmp_path / "theirs")
    llama.save(llama.load(tmp_path / "theirs", dtype="float64"), tmp_path / "ours")
    with theirs.in_type(torch.float64):
        loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "ours", **theirs.PLAIN, output_loading_info=True, dtype=torch.float64
        )
    assert not any(report.values()), report
    found = theirs.computed(loaded.eval(), np.array(windows))
    assert_close((jnp.asarray(found[0]), jnp.asarray(found[1])), (logits, loss), 1e-11)


@pytest.mark.parametrize(
    "form",
    [
        {},
        {"tied": True, "scaling": llama.Scaling()},
        {"bias": True},
        {"head_norms": True},
        {"experts": 3},
    ],
    ids=str,
)
def test_model_made_here_comes_back_from_theirs_bit_for_bit(form, theirs, tmp_path):
    import transformers

    config = dataclasses.replace(TINY, **form)
    model = llama.Llama(config, key=jax.random.key(0))
    llama.save(model, tmp_path / "ours")
    made = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    made.save_pretrained(tmp_path / "theirs", max_shard_size="3kB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists()
    loaded = llama.load(tmp_path / "theirs", vocabulary_multiple=4)
    assert dataclasses.replace(loaded.config, origin=config.origin) == config
    assert_same(jax.tree.leaves(loaded), jax.tree.leaves(model))


@pytest.mark.parametrize(
    ("config", "name"), [(llama.B1, "1B"), (llama.B8, "8B"), (llama.B70, "70B")], ids=str
)
def test_sizes_agree_with_theirs(config, name, theirs, tmp_path):
    import torch
    import transformers

    fields = llama.FORMATS["llama"].fields
    stated = fields.write(llama.FORMATS["llama"].numbers(config), (), "float32")
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**stated))
    assert sum(weight.numel() for weight in model.parameters()) == config.parameters


@pytest.mark.parametrize("name", ["scaled, tied", "qwen2", "qwen3", "mixtral"])
def test_the_likeliest_tokens_are_those_of_generate(name, theirs, tmp_path):
    """200 of them, in float64, with keys and values kept on both sides."""
    model, windows, _ = case(theirs, name, "float64", tmp_path, tokens=6)
    ours = llama.load(tmp_path, dtype="float64")
    write = jax.jit(
        lambda prompt: llama.sample(ours, prompt, tokens=200, temperature=0, key=jax.random.key(0))
    )
    for prompt in np.array(windows):
        assert write(prompt).tolist() == theirs.generated(model, prompt.tolist(), 200)
