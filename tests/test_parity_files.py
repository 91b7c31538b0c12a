"""Files of GPT-2 and transformers: what it obeys we obey or refuse by name, and what came in goes
out, as `generate` shows.

Needs the extra `parity`; deselected by default.
"""

import dataclasses
import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn_folders import damaged
from test_model_refusals import told_or_equal

from parallax.models import gpt2
from parallax.models.files import Origin

pytestmark = pytest.mark.parity

BOUND = 1e-11  # of the largest logit: what float64 leaves of some hundred roundings
TOKENS = np.random.default_rng(0).integers(11, size=(2, 7))
SIZES = [
    {"n_layer": 1, "n_head": 1, "n_embd": 8, "n_positions": 8, "vocab_size": 11},
    {"n_layer": 2, "n_head": 2, "n_embd": 8, "n_positions": 9, "vocab_size": 17},
    {
        "n_layer": 1,
        "n_head": 4,
        "n_embd": 12,
        "n_positions": 7,
        "vocab_size": 11,
        "layer_norm_epsilon": 1e-3,
    },
    {"n_layer": 2, "n_head": 3, "n_embd": 12, "n_positions": 12, "vocab_size": 13},
]


@pytest.fixture(scope="module")
def theirs():
    """What makes and evaluates models of transformers; nothing is downloaded."""
    patch = pytest.MonkeyPatch()
    patch.setenv("HF_HUB_OFFLINE", "1")
    from fixtures import make_gpt2_fixture

    yield make_gpt2_fixture
    patch.undo()


@pytest.fixture(scope="module")
def saved(theirs, tmp_path_factory):
    """A folder for each of the sizes, as transformers saved it, in float64."""
    import torch

    folder = tmp_path_factory.mktemp("theirs")
    for number, sizes in enumerate(SIZES):
        theirs.reference(number, torch.float64, **sizes).save_pretrained(folder / str(number))
    return folder


def from_them(folder):
    """The model that transformers makes of `folder`, in float64, or None where it refuses, or draws
    weights of its own."""
    import torch
    import transformers

    try:
        model, report = transformers.GPT2LMHeadModel.from_pretrained(
            folder,
            dtype=torch.float64,
            output_loading_info=True,
            attn_implementation="eager",
            local_files_only=True,
        )
    except Exception:  # whatever it raises, of its own or of the libraries under it
        return None
    return (
        None
        if any(report[each] for each in ("missing_keys", "mismatched_keys", "unexpected_keys"))
        else model.eval()
    )


def their_logits(model):
    import torch

    with torch.no_grad():
        return model(input_ids=torch.from_numpy(TOKENS), use_cache=False).logits.numpy()


@functools.partial(jax.jit, static_argnums=0)
def logits_of(config, leaves):
    shapes = jax.eval_shape(lambda: gpt2.GPT2(config, key=jax.random.key(0)))
    return gpt2.logits(jax.tree.unflatten(jax.tree.structure(shapes), leaves), jnp.asarray(TOKENS))


def our_logits(model):
    """Compiled once for all models of the same sizes, whatever they came with."""
    config = dataclasses.replace(model.config, dropout=0.0, attention_dropout=0.0, origin=Origin())
    return np.asarray(logits_of(config, jax.tree.leaves(model)))


SWITCHES = [True, False, None]
VALUES = {
    "n_layer num_hidden_layers": [1, 2, 2, 0, -1, None, "2", 1.0, 10**9],
    "n_head num_attention_heads": [1, 2, 4, 3, 0, None, 10**9],
    "n_embd hidden_size": [8, 12, 8, 24, None],
    "n_positions max_position_embeddings n_ctx": [7, 8, 9, 12, None],
    "vocab_size": [11, 13, 17, 10, None],
    "n_inner": [None, 32, 48, 16],
    "layer_norm_epsilon": [1e-5, 1e-3, 0.5, 0.0, 1, -1.0, None],
    "resid_pdrop embd_pdrop attn_pdrop": [0.0, 0.1, 0.5, 1, 2.0, None],
    "activation_function": [
        "gelu_new",
        "gelu_pytorch_tanh",
        "gelu",
        "relu",
        "gelu_fast",
        "silu",
        None,
    ],
    "scale_attn_weights tie_word_embeddings is_causal use_cache is_decoder": SWITCHES,
    "scale_attn_by_inverse_layer_idx reorder_and_upcast_attn add_cross_attention": SWITCHES[:2],
    "bos_token_id eos_token_id pad_token_id": [None, 0, 3, 50256, -1],
    "transformers_weights": [None, "model.safetensors", "other.safetensors"],
    "pruned_heads": [{}, {"0": [0]}],
    "chunk_size_feed_forward": [0, 2],
    "is_encoder_decoder output_attentions gradient_checkpointing": SWITCHES[:2],
    "torch_dtype": ["float32", "float64", "bfloat16"],
    "initializer_range": [0.02, 1.0],
    "summary_type": ["cls_index", "mean"],
    "summary_first_dropout": [0.1, 0.0],
    "sliding_window": [None, 2],
    "rope_theta": [1e4],
    "model_type": ["gpt2", "llama"],
    "architectures": [["GPT2LMHeadModel"], ["GPT2Model"]],
    "temperature": [1.0, 0.5],
    "max_length": [20],
    "problem_type": [None, "regression"],
}
VALUES = {name: values for names, values in VALUES.items() for name in names.split()}


def loaded_or_refused(folder, names):
    """The model, or None where one of these fields is refused by its name."""
    try:
        return gpt2.load(folder, dtype=jnp.float64)
    except ValueError as error:
        if not any(name in str(error) for name in names):
            raise
        return None


@pytest.mark.parametrize("part", range(10))
def test_three_hundred_drawn_configurations_equal_theirs_or_are_refused_by_field(
    part, saved, tmp_path
):
    names, equal = sorted(VALUES), 0
    for seed in range(30 * part, 30 * part + 30):
        draw = np.random.default_rng(seed)
        number = int(draw.integers(len(SIZES)))
        folder = tmp_path / str(seed)
        shutil.copytree(saved / str(number), folder)
        changed = {
            name: VALUES[name][draw.integers(len(VALUES[name]))]
            for name in draw.choice(names, draw.integers(1, 4))
        }
        fields = json.loads((folder / "config.json").read_text()) | {
            str(name): value for name, value in changed.items()
        }
        (folder / "config.json").write_text(json.dumps(fields))
        ours = loaded_or_refused(folder, changed)
        if ours is None:
            continue
        model = from_them(folder)
        assert model is not None or changed.get("layer_norm_epsilon") == 1, (
            seed,
            changed,
        )  # they take no whole number there
        if model is not None:
            theirs = their_logits(model)
            assert np.abs(our_logits(ours) - theirs).max() <= BOUND * np.abs(theirs).max(), (
                seed,
                changed,
            )
            equal += 1
    assert equal > 2  # of thirty: most are refused


@pytest.mark.parametrize("part", range(10))
def test_three_hundred_damaged_folders_are_refused_or_equal_theirs(part, theirs, tmp_path):
    for seed in range(30 * part, 30 * part + 30):
        folder = tmp_path / str(seed)
        case = f"{damaged(folder, seed)} {seed}"
        if not told_or_equal(folder, case):
            continue
        ours, model = gpt2.load(folder, dtype=jnp.float64), from_them(folder)
        if (
            model is not None
        ):  # they are told too, or refuse what they could read: a byte order mark
            logits = their_logits(model)
            np.testing.assert_allclose(
                our_logits(ours), logits, atol=BOUND * np.abs(logits).max(), err_msg=case
            )


def drawn_tokens(draw):
    """Token ids of a configuration and of a `generation_config.json`, which may say other things,
    or nothing."""
    end = lambda: [None, int(draw.integers(11)), [int(each) for each in draw.integers(11, size=2)]][
        draw.integers(3)
    ]
    config = {
        "bos_token_id": int(draw.integers(11)),
        "eos_token_id": end(),
        "pad_token_id": int(draw.integers(11)),
    }
    return config, draw.choice(
        [None, {"eos_token_id": end(), "max_length": 90, "repetition_penalty": 1.5}]
    )


@pytest.mark.parametrize("seed", range(8))
def test_what_generate_writes_survives_a_round_trip(seed, theirs, tmp_path):
    """Greedily, 100 tokens or up to the end token of the files."""
    import torch
    import transformers

    draw = np.random.default_rng(seed)
    config, generation = drawn_tokens(draw)
    sizes = SIZES[seed % len(SIZES)] | {"n_positions": 128}
    first, second = tmp_path / "first", tmp_path / "second"
    theirs.reference(seed, torch.float64, **sizes).save_pretrained(first)
    (first / "generation_config.json").unlink()
    if generation is not None:
        (first / "generation_config.json").write_text(json.dumps(generation))
    fields = (
        json.loads((first / "config.json").read_text())
        | config
        | {"task_specific_params": {"a": seed}}
    )
    if seed % 3 == 0:
        fields.pop("eos_token_id")  # then theirs is 50256
    (first / "config.json").write_text(json.dumps(fields))

    gpt2.save(gpt2.load(first, dtype=jnp.float64), second)
    written = []
    for folder in (first, second):
        model = transformers.GPT2LMHeadModel.from_pretrained(
            folder, attn_implementation="eager", local_files_only=True
        ).eval()
        assert model.dtype == torch.float64
        prompt = torch.tensor([[1, 2, 3]])
        mask = torch.ones_like(prompt)
        ids = model.generate(prompt, attention_mask=mask, do_sample=False, max_new_tokens=100)[
            0
        ].tolist()
        written.append((ids, model.config.to_dict(), model.generation_config.to_dict()))
    (ids, config, generation), (ids_again, config_again, generation_again) = written
    assert ids_again == ids
    for one, other in ((config, config_again), (generation, generation_again)):
        differing = {
            name: (one.get(name), other.get(name))
            for name in one.keys() | other.keys()
            if one.get(name) != other.get(name)
        }
        assert not differing.keys() - {"n_ctx", "transformers_version", "_name_or_path"}, differing


@pytest.mark.parametrize(
    "types", [("float32", "float64"), ("bfloat16", "float32"), ("float16", "bfloat16")]
)
def test_mixed_types_are_theirs_without_a_digit_lost(types, theirs, saved, tmp_path):
    import equinox as eqx
    import torch
    import transformers

    model = gpt2.load(saved / "1", dtype=types[0])
    mixed = eqx.tree_at(
        lambda m: m.norm.weight,
        model,
        replace_fn=lambda leaf: jnp.asarray(np.full(8, 1.001), types[1]),
    )
    gpt2.save(mixed, tmp_path)
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path, local_files_only=True)
    for theirs_, ours in (
        (loaded.transformer.ln_f.weight, mixed.norm.weight),
        (loaded.transformer.wpe.weight, mixed.wpe),
    ):
        np.testing.assert_array_equal(
            theirs_.detach().to(torch.float64).numpy(), np.asarray(ours, np.float64)
        )
