"""Models in files: what came in goes out, what is damaged or unknown is refused in a sentence, and
no folder is ever a mix."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn_folders import FIXTURE, INDEX, WEIGHTS, shard
from jax.sharding import PartitionSpec as P
from test_gpt2_weights import assert_same, change_config, random_model

from parallax import mesh
from parallax.models import files, gpt2

TESTS = Path(__file__).parent


@pytest.fixture
def folder(tmp_path):
    """A copy of the fixture, to change."""
    return Path(shutil.copytree(FIXTURE, tmp_path / "gpt2"))


def fields_in(folder):
    return json.loads((folder / "config.json").read_text())


# A folder holds one model


@pytest.mark.programs
def test_a_kill_at_any_file_operation_leaves_the_old_model_the_new_one_or_none(tmp_path):
    from killed_save import model

    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    }
    subprocess.run(
        [sys.executable, str(TESTS / "killed_save.py"), str(tmp_path)],
        check=True,
        env=environment,
        timeout=600,
    )
    for scene, first in (("over", "2 heads"), ("new", "refused")):
        seen = []
        for number in range(1, len([*(tmp_path / scene).iterdir()]) + 1):
            place = tmp_path / scene / str(number)
            try:
                found = gpt2.load(place, vocabulary_multiple=1)
            except FileNotFoundError:
                seen.append("refused")
            else:
                expected = model(found.config.heads)
                assert dataclasses.replace(found.config, dropout=0.0) == dataclasses.replace(
                    expected.config, dropout=0.0
                )
                jax.tree.map(
                    np.testing.assert_array_equal, jax.tree.leaves(found), jax.tree.leaves(expected)
                )
                seen.append(f"{found.config.heads} heads")
            gpt2.save(model(4), place)
            assert sorted(each.name for each in place.iterdir()) == [
                "config.json",
                "model.safetensors",
            ]
        assert len(seen) > 15
        assert seen[0] == first
        assert seen[-1] == "4 heads"
        assert list(dict.fromkeys(seen)) == [
            *dict.fromkeys([first, "refused", "4 heads"])
        ]  # in this order, none comes back


@pytest.mark.parametrize("sharded", [True, False])
def test_an_error_at_any_move_puts_back_what_was_there(sharded, folder, tmp_path, monkeypatch):
    (folder / "generation_config.json").write_text('{"eos_token_id": 3}')
    (folder / "vocab.json").write_text("{}")
    if sharded:
        shard(folder)
    theirs = {file.name for file in folder.iterdir()} - {"config.json", WEIGHTS}
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    new, replace, calls = random_model(), os.replace, []

    def failing(source, target):
        calls.append(target)
        if len(calls) == fails_at:
            raise OSError("No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", failing)
    fails_at = 0
    gpt2.save(new, tmp_path / "elsewhere")
    moves = len(calls) + len(before.keys() & {"config.json", WEIGHTS})
    for number in range(1, moves + 1):
        fails_at = number
        calls.clear()
        with pytest.raises(
            OSError, match=r"No space left on device. The files that were there are unchanged"
        ):
            gpt2.save(new, folder)
        assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    fails_at = 0
    gpt2.save(new, folder)
    assert_same(gpt2.load(folder, vocabulary_multiple=4).wpe, new.wpe)
    assert {file.name for file in folder.iterdir()} == theirs | {"config.json", WEIGHTS}


@pytest.mark.parametrize("listed", ["notes.txt", "vocab.json", "generation_config.json", WEIGHTS])
def test_a_save_removes_only_what_a_save_wrote(listed, folder, tmp_path):
    """An index of another program's may list any file as weights."""
    (folder / "generation_config.json").write_text('{"eos_token_id": 3}')
    (folder / "tokenizer.json").write_text("{}")
    with_both = gpt2.load(folder, vocabulary_multiple=4)
    out = tmp_path / "out"
    out.mkdir()
    (out / listed).write_text("mine")
    (out / INDEX).write_text(json.dumps({"weight_map": {"wte.weight": listed}}))
    theirs = {INDEX, listed}
    gpt2.save(random_model(), out)
    assert {file.name for file in out.iterdir()} == theirs | {"config.json", WEIGHTS}
    if listed != WEIGHTS:
        assert (out / listed).read_text() == "mine"
    gpt2.save(with_both, out)  # writes two files more
    gpt2.save(random_model(), out)  # and this one takes away the one that would hold for its model
    ours = {"config.json", WEIGHTS, "tokenizer.json"}
    assert {file.name for file in out.iterdir()} == (theirs | ours) - {"generation_config.json"}
    assert_same(gpt2.load(out, vocabulary_multiple=4).wpe, random_model().wpe)


def test_a_folder_that_a_copy_left_mixed_is_refused(tmp_path):
    for heads in (2, 4):
        config = gpt2.Config(layers=1, heads=heads, width=8, context=4, vocabulary=5)
        gpt2.save(random_model(config), tmp_path / str(heads))
    shutil.copy(tmp_path / "4" / WEIGHTS, tmp_path / "2" / WEIGHTS)
    with pytest.raises(
        ValueError,
        match=r"model\.safetensors was saved with another configuration than .*config\.json states",
    ):
        gpt2.load(tmp_path / "2")
    change_config(
        tmp_path / "4", resid_pdrop=0.5, embd_pdrop=0.5, eos_token_id=3
    )  # changes nothing that the weights mean
    assert gpt2.load(tmp_path / "4").config.dropout == 0.5


# What came in goes out


CAME = {
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "pad_token_id": 4,
    "task_specific_params": {"text-generation": {"do_sample": True}},
    "_name_or_path": "someone/gpt2",
    "tokenizer_class": "GPT2Tokenizer",
    "activation_function": "gelu_pytorch_tanh",
    "is_decoder": True,
    "summary_first_dropout": 0.25,
    "initializer_range": 0.5,
    "n_inner": 48,
    "n_ctx": 12,
}


def test_every_field_that_came_in_goes_out(folder, tmp_path):
    change_config(folder, **CAME)
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 3], "max_length": 7}')
    (folder / "tokenizer.json").write_text('{"model": {}}')
    (folder / "merges.txt").write_text("a b\n")
    came = fields_in(folder)
    model = jax.jit(lambda model: jax.tree.map(lambda leaf: leaf * 2, model))(
        gpt2.load(folder, dtype=jnp.float64)
    )  # trained
    said = gpt2.save(model, tmp_path / "out")
    gone = {name for name in came if name not in fields_in(tmp_path / "out")}
    assert gone == {"dtype", "transformers_version"}  # of the file's own making
    kept = fields_in(tmp_path / "out")
    assert {name: kept[name] for name in came.keys() - gone - {"n_inner"}} == {
        name: came[name] for name in came.keys() - gone - {"n_inner"}
    }
    assert kept["n_inner"] in (None, 48)
    assert json.loads((tmp_path / "out/generation_config.json").read_text()) == {
        "eos_token_id": [2, 3],
        "max_length": 7,
    }
    assert (tmp_path / "out/tokenizer.json").read_text() == '{"model": {}}'
    assert (tmp_path / "out/merges.txt").read_text() == "a b\n"
    assert "and the tokenizer of" in said
    again = gpt2.load(tmp_path / "out", dtype=jnp.float64).config
    assert dataclasses.replace(again.origin, tokenizer=None) == dataclasses.replace(
        model.config.origin, tokenizer=None
    )


def test_what_the_file_leaves_out_is_left_out_again(folder, tmp_path):
    """Which transformers takes as 50256 in a configuration, and as nothing in its generation."""
    change_config(folder, eos_token_id="absent", bos_token_id="absent", use_cache="absent")
    gpt2.save(gpt2.load(folder), tmp_path / "out")
    assert not fields_in(tmp_path / "out").keys() & {"eos_token_id", "bos_token_id", "use_cache"}


def test_a_model_without_a_tokenizer_says_what_to_copy_and_takes_no_other_away(tmp_path):
    assert "holds the model and no tokenizer. Copy the files of yours there, or" in gpt2.save(
        random_model(), tmp_path
    )
    (tmp_path / "vocab.json").write_text("{}")
    assert "were there before, and are as they were" in gpt2.save(random_model(), tmp_path)
    assert (tmp_path / "vocab.json").exists()


def test_a_tokenizer_that_stayed_is_removed_when_another_comes(folder, tmp_path):
    (folder / "tokenizer.json").write_text("first")
    (folder / "merges.txt").write_text("first")
    gpt2.save(gpt2.load(folder, vocabulary_multiple=4), tmp_path)
    gpt2.save(random_model(), tmp_path)
    assert (tmp_path / "merges.txt").exists()
    (folder / "merges.txt").unlink()
    (folder / "tokenizer.json").write_text("second")
    gpt2.save(gpt2.load(folder, vocabulary_multiple=4), tmp_path)
    assert not (tmp_path / "merges.txt").exists()
    assert (tmp_path / "tokenizer.json").read_text() == "second"


def test_a_tokenizer_that_is_gone_is_told(folder, tmp_path):
    (folder / "tokenizer.json").write_text("{}")
    model = gpt2.load(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(
        ValueError, match=r"came with a tokenizer from .*not there any more.*tokenizer=None"
    ):
        gpt2.save(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("narrow", "other", "stated"),
    [
        ("float32", "float64", "float64"),
        ("bfloat16", "float32", "float32"),
        ("float16", "bfloat16", "float32"),
    ],
)
def test_the_widest_type_is_stated(narrow, other, stated, tmp_path):
    model = random_model(dtype=jnp.dtype(narrow))
    mixed = eqx.tree_at(
        lambda model: model.norm.bias, model, replace_fn=lambda leaf: leaf.astype(other)
    )
    gpt2.save(mixed, tmp_path)
    assert fields_in(tmp_path)["torch_dtype"] == stated


def test_numbers_beyond_the_type_are_refused_and_infinite_ones_are_not(tmp_path):
    large = lambda number: eqx.tree_at(
        lambda model: model.norm.bias,
        random_model(),
        replace_fn=lambda leaf: leaf.at[3].set(number),
    )
    gpt2.save(large(7e4), tmp_path)
    with pytest.raises(
        ValueError,
        match=r"ln_f\.bias has numbers up to 7e\+04, beyond those of float16. Load it in float32",
    ):
        gpt2.load(tmp_path, dtype=jnp.float16)
    assert gpt2.load(tmp_path, dtype=jnp.bfloat16).norm.bias[3] > 6e4
    for number in (jnp.inf, jnp.nan):
        gpt2.save(large(number), tmp_path)
        np.testing.assert_equal(
            float(gpt2.load(tmp_path, dtype=jnp.float16).norm.bias[3]), float(number)
        )


# What cannot be saved


def test_models_that_are_not_whole_are_refused_by_leaf(tmp_path):
    model = random_model()
    with_bias = lambda leaf: eqx.tree_at(
        lambda m: m.norm.bias, model, leaf, is_leaf=lambda x: x is None
    )
    deleted = jnp.ones(8, jnp.float32)
    deleted.delete()
    for leaf, message in [
        (None, r"the model has no array at norm\.bias \(leaves that differ: 1\)"),
        (deleted, r"norm\.bias is deleted: a step that donates"),
        (
            jax.ShapeDtypeStruct((8,), jnp.float32),
            r"norm\.bias must be an array of numbers; it is a ShapeDtypeStruct",
        ),
        (2.0, r"norm\.bias must be an array of numbers; it is a float"),
        (jnp.ones(7, jnp.float32), r"norm\.bias must be of shape \(8,\)"),
        (jnp.ones(8, jnp.complex64), r"norm\.bias must be one of float16, .*; it is complex64"),
    ]:
        with pytest.raises(ValueError, match=message):
            gpt2.save(with_bias(leaf), tmp_path / "out")
    with pytest.raises(ValueError, match=r"Save outside of jax\.jit"):
        jax.jit(lambda m: gpt2.save(m, tmp_path / "out"))(model)
    with pytest.raises(
        ValueError, match=r"gpt2\.save needs a gpt2 model, with its configuration; got a dict"
    ):
        files.save(gpt2.FORMAT, {}, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def configured(**fields):
    """A `Config` as users make it, whose types no test run checks before."""
    config = object.__new__(gpt2.Config)
    for field in dataclasses.fields(gpt2.Config):
        object.__setattr__(config, field.name, fields.get(field.name, field.default))
    config.__post_init__()
    return config


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"heads": 10**9}, r"width=768 must be a multiple of heads=1000000000. Use heads=768"),
        ({"layers": 2**31}, r"needs layers of 2147483647 or less; got 2147483648"),
        (
            {"layers": 10**5000},
            r"needs layers of 2147483647 or less; got a int that Python does not write",
        ),
        ({"layers": 2.0}, r"needs layers as a whole number; got 2\.0"),
        ({"layers": True}, r"needs layers as a whole number; got True"),
        ({"layers": "2"}, r"needs layers as a whole number; got '2'"),
        ({"vocabulary_multiple": 2**21}, r"needs vocabulary_multiple of 1048576 or less"),
        ({"epsilon": -1.0}, r"needs epsilon of 0 or more; got -1\.0"),
        ({"epsilon": float("nan")}, r"needs epsilon of 0 or more; got nan"),
        ({"epsilon": "1e-5"}, r"needs epsilon of 0 or more; got '1e-5'"),
        ({"epsilon": True}, r"needs epsilon of 0 or more; got True"),
        ({"epsilon": np.True_}, r"needs epsilon of 0 or more; got np\.True_"),
        ({"epsilon": jnp.array(True)}, r"needs epsilon of 0 or more; got Array\(True"),
        ({"epsilon": bytearray(b"1.5")}, r"needs epsilon of 0 or more; got bytearray"),
        ({"epsilon": np.complex64(0.5 + 2j)}, r"needs epsilon of 0 or more; got np\.complex64"),
        ({"epsilon": np.array("1.5")}, r"needs epsilon of 0 or more; got array\('1\.5'"),
        ({"dropout": float("nan")}, r"needs dropout from 0"),
    ],
)
def test_numbers_without_meaning_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        configured(**fields)


def test_numbers_of_numpy_are_saved_as_pythons(tmp_path):
    sizes = {
        "layers": np.int64(1),
        "heads": np.int32(1),
        "width": np.uint8(4),
        "context": 4,
        "vocabulary": jnp.int32(5),
    }
    given = configured(**sizes, epsilon=1, dropout=np.float32(0.5))
    gpt2.save(random_model(given), tmp_path)
    assert (
        gpt2.load(tmp_path).config == given == gpt2.Config(1, 1, 4, 4, 5, epsilon=1.0, dropout=0.5)
    )
    assert (
        '"layer_norm_epsilon": 1.0' in (tmp_path / "config.json").read_text()
    )  # transformers takes no whole number


def test_a_wrong_argument_of_load_is_not_the_files_fault():
    with pytest.raises(
        ValueError, match=r"^gpt2\.Config needs vocabulary_multiple of 1 or more; got 0"
    ):
        gpt2.load(FIXTURE, vocabulary_multiple=0)
    with pytest.raises(ValueError, match=r"needs a dtype among .*; got 'float31'"):
        gpt2.load(FIXTURE, dtype="float31")


def test_a_model_on_a_mesh_keeps_its_origin(folder, tmp_path):
    change_config(folder, eos_token_id=2)
    m = mesh.make(data=8)
    model = mesh.place(gpt2.load(folder), jax.tree.map(lambda _: P(), gpt2.load(folder)), m)
    gpt2.save(model, tmp_path / "out")
    assert fields_in(tmp_path / "out")["eos_token_id"] == 2
