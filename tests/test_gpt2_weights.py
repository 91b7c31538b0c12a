"""GPT-2's weights: what transformers computed with the fixture we compute too, whole and on a mesh;
files round-trip."""

import dataclasses
import functools
import json
import os
import shutil
import sys
import types
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from drawn_folders import shard
from jax.sharding import PartitionSpec as P

from parallax import grads, mesh, rules
from parallax.collectives import ring
from parallax.models import gpt2

FIXTURE = Path(__file__).parent / "fixtures" / "gpt2"
EXPECTED = json.loads((FIXTURE / "expected.json").read_text())
WINDOWS = np.array(EXPECTED["windows"], np.int32)
TINY = gpt2.Config(layers=2, heads=2, width=8, context=7, vocabulary=11, vocabulary_multiple=4)


def fixture(file="model.safetensors", dtype=jnp.float64, multiple=128):
    return gpt2.load(FIXTURE / file, dtype=dtype, vocabulary_multiple=multiple)


def random_model(config=TINY, seed=0, dtype=jnp.float32):
    """A model of random numbers, made without compiling; the rows that pad the vocabulary are
    zero."""
    generator = np.random.default_rng(seed)
    shapes = eqx.filter_eval_shape(lambda: gpt2.GPT2(config, key=jax.random.key(0)))
    model = jax.tree.map(
        lambda shape: jnp.asarray(generator.normal(size=shape.shape), dtype), shapes
    )
    return eqx.tree_at(lambda model: model.wte, model, model.wte.at[config.vocabulary :].set(0))


def assert_close(actual, expected, bound):
    """Each leaf within `bound` of the largest element of the expected one."""

    def compare(path, a, e):
        assert a.shape == e.shape
        error = np.max(np.abs(np.asarray(a, np.float64) - np.asarray(e, np.float64))) / np.max(
            np.abs(e)
        )
        assert error <= bound, f"{mesh.dotted(path)}: {error}"

    jax.tree.map_with_path(compare, actual, expected)


def assert_same(actual, expected):
    def compare(path, a, e):
        assert a.dtype == e.dtype, mesh.dotted(path)
        np.testing.assert_array_equal(np.asarray(a), np.asarray(e), err_msg=mesh.dotted(path))

    jax.tree.map_with_path(compare, actual, expected)


# What transformers computed


BOUNDS = [(jnp.float64, 1e-11), (jnp.float32, 1e-5)]


@jax.jit
def evaluate(model, windows):
    """The logits after all tokens but the last, and the loss and its gradients."""
    return gpt2.logits(model, windows[:, :-1]), *jax.value_and_grad(gpt2.loss)(
        model, (windows, None)
    )


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("dtype", "bound"), BOUNDS)
def test_whole_model_computes_what_transformers_did(dtype, bound):
    logits, loss, gradients = evaluate(fixture(dtype=dtype), jnp.asarray(WINDOWS))
    assert_close(logits, np.load(FIXTURE / "logits.npy"), bound)
    assert_close(loss, np.array(EXPECTED["loss"]), bound)
    assert_close(gradients, fixture("gradients.safetensors"), bound)


@pytest.mark.sweep(3, "wholes")
@pytest.mark.parametrize(
    ("dtype", "bound"), [BOUNDS[0], pytest.param(*BOUNDS[1], marks=pytest.mark.long)]
)
def test_model_on_a_mesh_computes_what_transformers_did(dtype, bound):
    m = mesh.make(data=4, tensor=2)
    model = fixture(dtype=dtype)
    specs = rules.specs(model, gpt2.rules("tensor"), m)
    loss = functools.partial(gpt2.loss, axis=ring("tensor"))
    grad = grads.averaged(jax.value_and_grad(loss), ring("data"))
    step = jax.jit(mesh.spmd(grad, mesh=m, in_specs=(specs, P("data")), out_specs=(P(), specs)))
    loss, gradients = step(mesh.place(model, specs, m), (jnp.asarray(WINDOWS), None))
    assert_close(loss, np.array(EXPECTED["loss"]), bound)
    assert_close(gradients, fixture("gradients.safetensors"), bound)


def test_fixture_has_a_gradient_in_every_leaf():
    for path, gradient in rules.paths(fixture("gradients.safetensors", multiple=1)):
        assert np.linalg.norm(gradient) > 1e-3, path


# Save and load


@pytest.mark.sweep(2)
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64])
def test_round_trip_is_bit_for_bit_and_keeps_dtype_and_configuration(dtype, tmp_path):
    config = dataclasses.replace(TINY, dropout=0.25, attention_dropout=0.125, epsilon=1e-6)
    model = random_model(config, dtype=dtype)
    gpt2.save(model, tmp_path / "new" / "folder")
    loaded = gpt2.load(tmp_path / "new" / "folder", dtype=dtype, vocabulary_multiple=4)
    assert loaded.config == config
    assert_same(loaded, model)
    assert (
        json.loads((tmp_path / "new/folder/config.json").read_text())["torch_dtype"]
        == jnp.dtype(dtype).name
    )


def test_saved_files_equal_those_of_transformers(tmp_path):
    gpt2.save(fixture(), tmp_path)
    ours, theirs = (
        safetensors.numpy.load_file(folder / "model.safetensors") for folder in (tmp_path, FIXTURE)
    )
    assert_same(ours, theirs)  # the padding is gone
    ours, theirs = (
        json.loads((folder / "config.json").read_text()) for folder in (tmp_path, FIXTURE)
    )
    assert {field: theirs[field] for field in ours.keys() & theirs.keys()} == {
        field: ours[field] for field in ours.keys() & theirs.keys()
    }
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    assert len({file.stat().st_mode for file in tmp_path.iterdir()}) == 1


def test_model_on_a_mesh_is_saved_whole(tmp_path):
    m = mesh.make(data=4, tensor=2)
    model = fixture()
    gpt2.save(mesh.place(model, rules.specs(model, gpt2.rules("tensor"), m), m), tmp_path)
    assert_same(gpt2.load(tmp_path, dtype=jnp.float64), model)


def test_leaves_are_kept_in_their_own_types(tmp_path):
    model = eqx.tree_at(
        lambda model: model.norm.bias,
        fixture(multiple=1),
        replace_fn=lambda leaf: leaf.astype(jnp.bfloat16),
    )
    gpt2.save(model, tmp_path)
    with safetensors.safe_open(tmp_path / "model.safetensors", "numpy") as file:
        assert file.get_slice("transformer.ln_f.bias").get_dtype() == "BF16"
        assert file.get_slice("transformer.ln_f.weight").get_dtype() == "F64"


@pytest.mark.parametrize("fails", ["save_file", "replace"])
def test_save_that_fails_leaves_what_was_there(fails, tmp_path, monkeypatch):
    model = random_model()
    gpt2.save(model, tmp_path)

    def full(*arguments, **options):
        raise OSError("No space left on device")

    monkeypatch.setattr(
        *{"save_file": (safetensors.numpy, "save_file"), "replace": ("os.replace",)}[fails], full
    )
    with pytest.raises(OSError, match="No space left"):
        gpt2.save(random_model(seed=1), tmp_path)
    assert_same(gpt2.load(tmp_path, vocabulary_multiple=4), model)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_new_folder_whose_save_is_cut_off_has_no_configuration(tmp_path, monkeypatch):
    moved, replace = [], os.replace

    def once(source, target):
        if moved:
            raise OSError("cut off")
        moved.append(Path(target).name)
        replace(source, target)

    monkeypatch.setattr(os, "replace", once)
    with pytest.raises(OSError, match="cut off"):
        gpt2.save(random_model(seed=1), tmp_path)
    assert moved == ["model.safetensors"]
    with pytest.raises(FileNotFoundError, match=r"needs .*config\.json"):
        gpt2.load(tmp_path)


def test_save_refuses_what_could_not_be_loaded(tmp_path):
    model = random_model()
    with pytest.raises(ValueError, match=r"needs a folder, .* got the file .*x\.safetensors"):
        gpt2.save(model, tmp_path / "x.safetensors")
    stage = eqx.tree_at(
        lambda m: m.blocks, model, jax.tree.map(lambda leaf: leaf[:1], model.blocks)
    )
    with pytest.raises(
        ValueError,
        match=(
            r"blocks.attention_norm.weight must be of shape \(2, 8\).*it is \(1, 8\).*whole model"
        ),
    ):
        gpt2.save(stage, tmp_path)
    whole = eqx.tree_at(lambda m: m.wpe, model, model.wpe.astype(jnp.int32))
    with pytest.raises(ValueError, match=r"wpe must be one of float16, .*; it is int32"):
        gpt2.save(whole, tmp_path)
    assert not list(tmp_path.iterdir())


# Other forms of the same weights


@pytest.fixture
def folder(tmp_path):
    """A copy of the fixture, to change."""
    return Path(shutil.copytree(FIXTURE, tmp_path / "gpt2"))


def change_tensors(folder, change):
    tensors = change(safetensors.numpy.load_file(folder / "model.safetensors"))
    safetensors.numpy.save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def change_config(folder, **fields):
    old = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({k: v for k, v in (old | fields).items() if v != "absent"})
    )


MASK = {"h.0.attn.bias": np.ones((1, 1, 12, 12), bool), "h.0.attn.masked_bias": np.float32([-1e4])}
FORMS = {
    "as it is": lambda folder: None,
    "sharded": shard,
    "without prefix": lambda folder: change_tensors(
        folder,
        lambda tensors: {
            name.removeprefix("transformer."): value for name, value in tensors.items()
        },
    ),
    "with masks and a tied head": lambda folder: change_tensors(
        folder,
        lambda tensors: (
            tensors
            | {f"transformer.{name}": mask for name, mask in MASK.items()}
            | {"lm_head.weight": tensors["transformer.wte.weight"]}
        ),
    ),
    "old configuration": lambda folder: change_config(
        folder, n_positions="absent", n_ctx=12, tie_word_embeddings="absent"
    ),
    "feed-forward width given": lambda folder: change_config(folder, n_inner=48),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_model(form, folder):
    FORMS[form](folder)
    loaded = gpt2.load(str(folder), dtype=jnp.float64)
    assert loaded.config == fixture().config
    assert loaded.config == gpt2.Config(
        layers=3, heads=2, width=12, context=12, vocabulary=61, dropout=0.1, attention_dropout=0.1
    )
    assert_same(loaded, fixture())


def test_dtype_is_what_was_asked_for():
    assert_same(
        fixture(dtype=jnp.float32), jax.tree.map(lambda leaf: leaf.astype(jnp.float32), fixture())
    )


def test_names_of_the_hub_are_downloaded(folder, monkeypatch):
    asked = []

    def download(name, allow_patterns):
        asked.append((name, allow_patterns))
        return str(folder)

    monkeypatch.setitem(
        sys.modules, "huggingface_hub", types.SimpleNamespace(snapshot_download=download)
    )
    assert_same(gpt2.load("someone/gpt2-tiny", dtype=jnp.float64), fixture())
    ((name, patterns),) = asked
    assert name == "someone/gpt2-tiny"
    assert {
        "config.json",
        "model.safetensors.index.json",
        "model*.safetensors",
        "generation_config.json",
        "tokenizer.json",
    } <= {*patterns}


# What load refuses


def without(name):
    return lambda tensors: {key: value for key, value in tensors.items() if key != name}


def replaced(name, value):
    return lambda tensors: tensors | {name: value(tensors)}


WRONG_TENSORS = {
    "missing": (
        without("transformer.h.1.mlp.c_fc.bias"),
        r"the tensor h\.1\.mlp\.c_fc\.bias is missing, but .*config",
    ),
    "extra": (
        replaced("transformer.h.3.ln_1.bias", lambda _: np.zeros(12)),
        r"the tensor transformer\.h\.3\.ln_1\.bias is no part of a GPT-2 of n_layer=3",
    ),
    "shape": (
        replaced("transformer.wpe.weight", lambda _: np.zeros((13, 12))),
        r"transformer\.wpe\.weight must be of shape \(12, 12\) in a GPT-2 of .*n_positions=12, "
        r".*config\.json.*its shape is \(13, 12\)",
    ),
    "transposed": (
        replaced("transformer.h.0.attn.c_attn.weight", lambda tensors: np.zeros((36, 12))),
        r"transformer\.h\.0\.attn\.c_attn\.weight must be of shape \(12, 36\)",
    ),
    "integers": (
        replaced("transformer.ln_f.bias", lambda _: np.zeros(12, np.int8)),
        r"transformer\.ln_f\.bias must have one of the types F16, BF16, F32, F64; its type is I8",
    ),
    "untied head": (
        replaced("lm_head.weight", lambda tensors: tensors["transformer.wte.weight"] + 1),
        r"lm_head\.weight must equal transformer\.wte\.weight",
    ),
    "head of another shape": (
        replaced("lm_head.weight", lambda tensors: np.zeros((64, 12))),
        r"lm_head\.weight must be of shape \(61, 12\)",
    ),
    "twice": (
        replaced("ln_f.bias", lambda _: np.zeros(12)),
        r"ln_f\.bias is stored twice: as .*ln_f\.bias in .*model\.safetensors, and as .*ln_f\.bias",
    ),
    "nothing": (
        lambda _: {},
        r"safetensors file: the tensor wte\.weight \(and 39 more\) is missing",
    ),
}


@pytest.mark.parametrize("case", WRONG_TENSORS)
def test_wrong_tensors_are_refused(case, folder):
    change, message = WRONG_TENSORS[case]
    change_tensors(folder, change)
    with pytest.raises(ValueError, match=message):
        gpt2.load(folder)


WRONG_FIELDS = [
    ({"model_type": "llama"}, r"model_type must be 'gpt2'; it is 'llama'"),
    (
        {"activation_function": "relu"},
        r"activation_function must be 'gelu_new' or .*; it is 'relu', which Parallax does "
        r"not support in a GPT-2\. Load a model with a supported activation_function\.",
    ),
    ({"n_inner": 24}, r"n_inner must be None or 48; it is 24"),
    ({"scale_attn_weights": False}, r"scale_attn_weights must be True; it is False"),
    ({"scale_attn_by_inverse_layer_idx": True}, r"scale_attn_by_inverse_layer_idx must be False"),
    ({"reorder_and_upcast_attn": True}, r"reorder_and_upcast_attn must be False"),
    ({"add_cross_attention": True}, r"add_cross_attention must be False"),
    ({"tie_word_embeddings": False}, r"tie_word_embeddings must be True"),
    ({"quantization_config": {"bits": 4}}, r"quantization_config must be None"),
    ({"embd_pdrop": 0.0}, r"resid_pdrop and embd_pdrop must agree; got .*0\.1.*0\.0"),
    ({"embd_pdrop": "absent", "resid_pdrop": 0.0}, r"resid_pdrop and embd_pdrop must agree"),
    ({"n_ctx": 13}, r"n_positions and n_ctx must agree; got .*12.*13"),
    ({"n_head": "absent"}, r"needs a number \(int\) for n_head; got no such field"),
    ({"n_layer": "three"}, r"needs a number \(int\) for n_layer; got .*'three'"),
    ({"n_layer": True}, r"needs a number \(int\) for n_layer"),
    ({"n_layer": 2}, r"h\.2\..* \(and 11 more\) is no part of a GPT-2 of n_layer=2"),
    ({"n_layer": 4}, r"h\.3\..* \(and 11 more\) is missing, .* n_layer=4"),
    ({"n_head": 5}, r"config\.json: gpt2\.Config: width=12 must be a multiple of heads=5"),
    ({"attn_pdrop": 1.5}, r"config\.json: gpt2\.Config needs attention_dropout"),
]


@pytest.mark.parametrize(("fields", "message"), WRONG_FIELDS)
def test_configurations_that_the_model_cannot_represent_are_refused(fields, message, folder):
    change_config(folder, **fields)
    with pytest.raises(ValueError, match=message):
        gpt2.load(folder)


@pytest.mark.parametrize(("vocabulary", "end"), [(50256, None), (50257, 50256)])
def test_a_model_that_has_the_token_ends_texts_with_it(vocabulary, end, tmp_path):
    config = gpt2.Config(
        layers=1, heads=1, width=2, context=2, vocabulary=vocabulary, vocabulary_multiple=1
    )
    gpt2.save(random_model(config), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["eos_token_id"] == end


def test_fields_that_are_left_out_are_those_of_transformers(folder):
    fields = json.loads((folder / "config.json").read_text())
    for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop", "layer_norm_epsilon"):
        fields.pop(name, None)
    (folder / "config.json").write_text(json.dumps(fields))
    config = gpt2.load(folder).config
    assert (config.dropout, config.attention_dropout, config.epsilon) == (0.1, 0.1, 1e-5)


@pytest.mark.parametrize("left", [0, 4, 100, 5000, 56087])
def test_truncated_weights_are_refused(left, folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:left])
    with pytest.raises(
        ValueError,
        match=r"model\.safetensors is not a whole safetensors file \(.*Copy or download it again",
    ):
        gpt2.load(folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"n_layer": 3, ', r"config\.json is not valid JSON"),
        ("[]", r"must hold a JSON object; got a list"),
    ],
)
def test_damaged_configuration_is_refused(text, message, folder):
    (folder / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        gpt2.load(folder)


def test_missing_files_are_named(folder):
    with pytest.raises(FileNotFoundError, match=r"no file or folder .*nowhere"):
        gpt2.load(folder / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"no file or folder \./gpt2"):
        gpt2.load("./gpt2")
    with pytest.raises(FileNotFoundError, match=r"no file or folder gpt2\.safetensors"):
        gpt2.load("gpt2.safetensors")
    with pytest.raises(
        ValueError, match=r"needs a folder or a \.safetensors file; got the file .*logits\.npy"
    ):
        gpt2.load(folder / "logits.npy")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(
        FileNotFoundError,
        match=r"needs model\.safetensors or .*folder holds .*pytorch_model\.bin.*save_pretrained",
    ):
        gpt2.load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"needs .*config\.json, which says"):
        gpt2.load(folder)


def test_damaged_shards_are_refused(folder):
    shard(folder)
    index, second = (
        folder / "model.safetensors.index.json",
        folder / "model-00002-of-00002.safetensors",
    )
    good = json.loads(index.read_text())
    index.write_text(
        json.dumps({"weight_map": without("transformer.wpe.weight")(good["weight_map"])})
    )
    with pytest.raises(
        ValueError,
        match=r"must name the same tensors, but transformer\.wpe\.weight is in only one of",
    ):
        gpt2.load(folder)
    index.write_text("{}")
    with pytest.raises(ValueError, match=r"index\.json needs a 'weight_map'"):
        gpt2.load(folder)
    index.write_text(json.dumps(good))
    second.unlink()
    with pytest.raises(
        FileNotFoundError,
        match=r"lists model-00002-of-00002\.safetensors, and there is no such file",
    ):
        gpt2.load(folder)


def test_a_tensor_in_two_shards_is_refused_with_both_files(folder):
    """Under its name with and without the prefix: the index lists both."""
    shard(folder)
    first, second = sorted(folder.glob("model-*.safetensors"))
    index = folder / "model.safetensors.index.json"
    listed = json.loads(index.read_text())["weight_map"]
    name = next(name for name, file in listed.items() if file == first.name)
    plain = name.removeprefix("transformer.")
    tensors = safetensors.numpy.load_file(second)
    tensors[plain] = safetensors.numpy.load_file(first)[name]
    safetensors.numpy.save_file(tensors, second)
    index.write_text(json.dumps({"weight_map": {**listed, plain: second.name}}))
    both = rf"twice: as {name} in .*{first.name}, and as {plain} in .*{second.name}"
    with pytest.raises(ValueError, match=both):
        gpt2.load(folder)


def test_types_that_load_cannot_give_are_refused():
    with pytest.raises(ValueError, match=r"needs a dtype among .*; got int32"):
        gpt2.load(FIXTURE, dtype=jnp.int32)
    with (
        jax.enable_x64(False),
        pytest.raises(ValueError, match=r"dtype=float64 needs .*jax_enable_x64"),
    ):
        gpt2.load(FIXTURE, dtype=jnp.float64)


def test_missing_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match=r"no folder 'gpt2' here.*pip install -e '\.\[hub\]'"):
        gpt2.load("gpt2")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    for call in (lambda: gpt2.load(FIXTURE), lambda: gpt2.save(random_model(), tmp_path)):
        with pytest.raises(ImportError, match=r"need safetensors. Run: pip install -e '\.\[hub\]'"):
            call()


def test_hub_that_does_not_answer_is_a_clear_error(monkeypatch):
    def refuse(name, allow_patterns):
        raise ConnectionError("offline.")

    monkeypatch.setitem(
        sys.modules, "huggingface_hub", types.SimpleNamespace(snapshot_download=refuse)
    )
    with pytest.raises(
        FileNotFoundError,
        match=r"no folder 'gpt2' here, and the Hugging Face hub .*ConnectionError: offline",
    ):
        gpt2.load("gpt2")


# The model itself


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (gpt2.SMALL, 124_439_808),
        (gpt2.MEDIUM, 354_823_168),
        (gpt2.LARGE, 774_030_080),
        (gpt2.XL, 1_557_611_200),
    ],
)
def test_published_sizes(config, parameters):
    shapes = eqx.filter_eval_shape(lambda: gpt2.GPT2(config, key=jax.random.key(0)))
    padding = (config.rows - config.vocabulary) * config.width
    assert config.parameters == parameters
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) - padding == parameters
    assert config.rows == 50304


def test_initial_weights_are_normal_with_smaller_ones_into_the_residual_stream():
    config = gpt2.Config(
        layers=4, heads=4, width=128, context=64, vocabulary=500, vocabulary_multiple=128
    )
    model = gpt2.GPT2(config, key=jax.random.key(0))
    residual = 0.02 / (2 * 4) ** 0.5
    deviations = {"blocks.attention.out.weight": residual, "blocks.mlp.down.weight": residual}
    for path, padded in rules.paths(model):
        leaf = np.asarray(padded)[:500] if path == "wte" else np.asarray(padded)
        if "norm" in path or path.endswith("bias"):
            assert (leaf == (1 if path.endswith("weight") else 0)).all(), path
        else:
            deviation = deviations.get(path, 0.02)
            bound = 5 / leaf.size**0.5  # five deviations of the estimates
            assert abs(leaf.mean()) < bound * deviation, path
            assert abs(leaf.std() / deviation - 1) < bound, path
    assert not np.asarray(model.wte)[500:].any()


@pytest.mark.sweep(3, "wholes")
def test_padding_the_vocabulary_changes_nothing():
    logits, loss, gradients = evaluate(fixture(multiple=128), jnp.asarray(WINDOWS))
    assert gradients.wte.shape == (128, 12)
    assert not np.asarray(gradients.wte[61:]).any()
    gradients = eqx.tree_at(lambda tree: tree.wte, gradients, gradients.wte[:61])
    padded, plain = (logits, loss, gradients), evaluate(fixture(multiple=1), jnp.asarray(WINDOWS))
    assert_close(jax.tree.leaves(padded), jax.tree.leaves(plain), 1e-13)


@pytest.mark.sweep(3, "wholes")
def test_later_tokens_do_not_change_earlier_logits():
    model = fixture()
    before = np.asarray(gpt2.logits(model, jnp.asarray(WINDOWS)))
    for t in (1, 6, 11):
        changed = WINDOWS.copy()
        changed[:, t:] = (changed[:, t:] + 1) % 61
        after = np.asarray(gpt2.logits(model, jnp.asarray(changed)))
        np.testing.assert_array_equal(after[:, :t], before[:, :t])
        assert (np.abs(after[:, t:] - before[:, t:]).max(axis=-1) > 1e-6).all()


def test_a_sample_sees_the_last_window_and_no_more():
    model, window, seen, key = random_model(), 4, [3, 1, 4, 1], jax.random.key(0)
    sample = jax.jit(
        lambda prompt: gpt2.sample(
            model, prompt, tokens=20, window=window, temperature=2.0, key=key
        )
    )
    draw = jax.jit(
        lambda key, seen: jax.random.categorical(key, gpt2.logits(model, seen[None])[0, -1] / 2)
    )
    found = sample(jnp.asarray(seen))
    for each in jax.random.split(key, 20):
        seen.append(int(draw(each, jnp.asarray(seen[-window:]))))
    assert found.tolist() == seen[4:]
    assert len(set(seen)) > 4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"width": 10, "heads": 4}, r"width=10 must be a multiple of heads=4. Use heads=2"),
        ({"layers": 0}, r"needs layers of 1 or more; got 0"),
        ({"vocabulary_multiple": 0}, r"needs vocabulary_multiple of 1 or more; got 0"),
        ({"dropout": 1.0}, r"needs dropout from 0 up to, not including, 1; got 1.0"),
        ({"attention_dropout": -0.1}, r"needs attention_dropout from 0"),
    ],
)
def test_configurations_without_meaning_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        gpt2.Config(**fields)
