"""What a model's files may not be: fields that this code does not compute, and damage, are refused
in a sentence, at once."""

import json
import resource
import shutil
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from drawn_folders import FIXTURE, INDEX, WEIGHTS, damaged, shard
from test_gpt2_weights import assert_same, change_config, change_tensors, fixture

from parallax.models import gpt2


@pytest.fixture
def folder(tmp_path):
    """A copy of the fixture, to change."""
    return Path(shutil.copytree(FIXTURE, tmp_path / "gpt2"))


# Fields that transformers obeys


REFUSED = [
    ({"is_causal": False}, r"is_causal must be True; it is False"),
    ({"num_attention_heads": 4}, r"n_head and num_attention_heads must agree"),
    ({"num_hidden_layers": 2}, r"n_layer and num_hidden_layers must agree"),
    ({"hidden_size": 24}, r"n_embd and hidden_size must agree"),
    ({"max_position_embeddings": 24}, r"n_positions and max_position_embeddings must agree"),
    (
        {"transformers_weights": "other.safetensors"},
        r"transformers_weights must be None; it is 'other\.safetensors'",
    ),
    ({"pruned_heads": {"0": [1]}}, r"pruned_heads must be"),
    ({"auto_map": {"AutoModel": "x.py"}}, r"auto_map must be None"),
    ({"sliding_window": 4}, r"'sliding_window' is not known here, and may change"),
    ({"a": 1, "b": 2}, r"'a', 'b' are not known here"),
    ({"is_causal": 1}, r"is_causal must be True; it is 1"),
    ({"is_causal": None}, r"is_causal must be True; it is None"),
    ({"hidden_size": None}, r"needs a number \(int\) for n_embd; got .*'hidden_size': None"),
    ({"bos_token_id": "x"}, r"bos_token_id must be of type int or null; it is 'x'"),
    ({"use_cache": 1}, r"use_cache must be of type bool; it is 1"),
    ({"n_layer": None}, r"needs a number \(int\) for n_layer"),
    ({"resid_pdrop": None}, r"needs a number \(float\) for resid_pdrop"),
    (
        {"n_head": 10**9},
        r"width=12 must be a multiple of heads=1000000000. Use heads=12. In the file, heads is "
        r"n_head, width is n_embd",
    ),
    (
        {"n_layer": 10**9},
        r"there are 40 tensors, but 12000000004 are needed for a GPT-2 of n_layer=1000000000",
    ),
    (
        {"n_layer": 10**18},
        r"needs layers of 2147483647 or less; got 1000000000000000000. In the file, layers is "
        r"n_layer",
    ),
    (
        {"n_embd": 10**9, "n_head": 1},
        r"must be of shape \(.*000000000,?.*\) in a GPT-2 of .*n_embd=1000000000.*; its shape is",
    ),
    ({"vocab_size": 10**9}, r"wte\.weight must be of shape \(1000000000, 12\)"),
    ({"n_positions": 10**9}, r"wpe\.weight must be of shape \(1000000000, 12\)"),
    (
        {"attn_pdrop": float("nan")},
        r"attention_dropout from 0 up to.*got nan. In the file, attention_dropout is attn_pdrop",
    ),
    (
        {"layer_norm_epsilon": -1.0},
        r"epsilon of 0 or more; got -1\.0. In the file, epsilon is layer_norm_epsilon",
    ),
    ({"model_type": "llama", "n_layer": "absent"}, r"model_type must be 'gpt2'; it is 'llama'"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_fields_that_this_model_does_not_compute_are_refused_by_name(fields, message, folder):
    change_config(folder, **fields)
    start = time.process_time()
    with pytest.raises(ValueError, match=message):
        gpt2.load(folder)
    assert time.process_time() - start < 2


TAKEN = {
    "other names": {
        "num_attention_heads": 2,
        "num_hidden_layers": 3,
        "hidden_size": 12,
        "max_position_embeddings": 12,
    },
    "other names alone": {
        "num_attention_heads": 2,
        "n_head": "absent",
        "num_hidden_layers": 3,
        "n_layer": "absent",
    },
    "n_ctx null": {"n_ctx": None},
    "the same activation": {"activation_function": "gelu_pytorch_tanh"},
    "causal": {"is_causal": True, "transformers_weights": None, "pruned_heads": {}},
    "whole rates": {"resid_pdrop": 0, "embd_pdrop": 0, "layer_norm_epsilon": 1},
}


@pytest.mark.parametrize("form", TAKEN)
def test_fields_that_mean_the_same_are_taken(form, folder):
    change_config(folder, **TAKEN[form])
    assert_same(jax.tree.leaves(gpt2.load(folder, dtype=jnp.float64)), jax.tree.leaves(fixture()))


def test_a_byte_order_mark_is_taken(folder):
    (folder / "config.json").write_bytes(b"\xef\xbb\xbf" + (folder / "config.json").read_bytes())
    assert_same(gpt2.load(folder, dtype=jnp.float64), fixture())


# Damage


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"n_layer": ' + "9" * 400 + "}",
            r"an integer of 400 digits, 9999999999\.\.\.; at most 19 are allowed",
        ),
        ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", r"has 100001 objects and lists; at most"),
        ('{"a": ' + "[" * 200 + "]" * 200 + "}", r"config\.json has 201 objects and lists"),
        (
            '{"n_layer": "' + "x" * 10**6 + '"}',
            r"needs a number \(int\) for n_layer; got \{'n_layer': 'x+\.\.\. \(\d+ characters\)",
        ),
        ('{"chat_template": "' + "{[" * 99 + r'\"{"}', "n_layer; got no such field"),
        ('{"chat_template": "' + "{[" * 99, r"config\.json is not valid JSON"),
        ('{"model_type": "\\ud800"}', r"model_type must be 'gpt2'; it is '\\ud800'"),
    ],
)
def test_damaged_configurations_are_told_in_a_sentence(text, message, folder):
    (folder / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message) as told:
        gpt2.load(folder)
    assert len(str(told.value).encode()) < 1000


@pytest.mark.parametrize(
    "name",
    [
        "../gpt2/model-00001-of-00002.safetensors",
        "/dev/zero",
        "..",
        "a/b",
        "\ud800",
        "",
        None,
        3,
        "x\0",
    ],
)
def test_an_index_names_files_beside_it(name, folder):
    shard(folder)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["transformer.wpe.weight"] = name
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(
        ValueError,
        match=r"index\.json: 'transformer\.wpe\.weight' must be in a file beside the index; got",
    ):
        gpt2.load(folder)


def test_adapters_and_heads_in_place_of_embeddings_are_called_so(folder):
    tensors = safetensors.numpy.load_file(folder / WEIGHTS)
    change_tensors(
        folder,
        lambda t: (
            t | {"base_model.model.transformer.h.0.attn.c_attn.lora_A.weight": np.zeros((2, 12))}
        ),
    )
    with pytest.raises(
        ValueError,
        match=r"lora_A\.weight is part of an adapter \(LoRA\). Merge it into its model first",
    ):
        gpt2.load(folder)
    head = {name: value for name, value in tensors.items() if "wte" not in name} | {
        "lm_head.weight": tensors["transformer.wte.weight"]
    }
    change_tensors(folder, lambda _: head)
    with pytest.raises(
        ValueError,
        match=r"wte\.weight is missing.*lm_head\.weight.*Store the copy as wte\.weight",
    ):
        gpt2.load(folder)
    wte = tensors["transformer.wte.weight"].copy()
    wte[0, 0] = np.nan
    change_tensors(
        folder, lambda _: tensors | {"transformer.wte.weight": wte, "lm_head.weight": wte.copy()}
    )
    assert np.isnan(gpt2.load(folder).wte[0, 0])
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"adapter_config\.json is there, so .*Merge it"):
        gpt2.load(folder)


def told_or_equal(place, case):
    """Whether `place` is refused in a sentence, within 2 s and 1 GB, or gives what its files
    say."""
    start, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        model = gpt2.load(place, dtype=jnp.float64, vocabulary_multiple=1)
    except (ValueError, FileNotFoundError) as error:
        text = str(error)
        assert text.endswith("."), (case, text)
        assert len(text.encode()) < 2000, (case, text[:500])
        model = None
    assert time.process_time() - start < 2, case
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20, case  # kilobytes
    if model is None:
        return False
    weights = (
        [place / WEIGHTS]
        if (place / WEIGHTS).is_file()
        else sorted(place.glob("model-*.safetensors"))
    )
    stored = {
        name: value for file in weights for name, value in safetensors.numpy.load_file(file).items()
    }
    np.testing.assert_array_equal(
        np.asarray(model.wte), stored["transformer.wte.weight"], err_msg=case
    )
    for layer in range(model.config.layers):
        found = np.asarray(model.blocks.mlp.up.weight[layer])
        np.testing.assert_array_equal(
            found, stored[f"transformer.h.{layer}.mlp.c_fc.weight"], err_msg=case
        )
    fields = json.loads((place / "config.json").read_text("utf-8-sig"))
    assert model.config.heads == fields.get("n_head", fields.get("num_attention_heads")), case
    return True


@pytest.mark.sweep(5)
@pytest.mark.parametrize("part", range(10))
def test_three_hundred_damaged_folders_are_refused_in_a_sentence_or_right(part, tmp_path):
    taken = 0
    for seed in range(30 * part, 30 * part + 30):
        place = tmp_path / str(seed)
        taken += told_or_equal(place, f"{damaged(place, seed)} {seed}")
        shutil.rmtree(place)
    assert taken < 25
