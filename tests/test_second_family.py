"""A second family of models in files is a table of names and shapes: Llama's and Mixtral's, read
and written as GPT-2's are."""

import dataclasses
import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from jaxtyping import Array, Float
from test_gpt2_weights import assert_same

from parallax.models import files
from parallax.models.files import Fields, Format, Leaf, Number, Origin


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes of a Llama, or with experts of a Mixtral."""

    layers: int
    heads: int
    groups: int
    width: int
    hidden: int
    context: int
    vocabulary: int
    epsilon: float
    experts: int = 0
    chosen: int = 0
    origin: Origin = dataclasses.field(default=Origin())


class Model(eqx.Module):
    """The leaves of both, by name; matrices are [in, out], and have layers first, then experts."""

    table: Float[Array, "vocabulary width"]
    head: Float[Array, "width vocabulary"]
    norm: Float[Array, " width"]
    blocks: dict[str, Float[Array, "layers ..."]]
    config: Config = eqx.field(static=True)

    def __init__(self, config, *, key, dtype=jnp.float32):
        c, ones = config, lambda *shape: jnp.ones(shape, dtype)
        D, F, L, K = c.width, c.hidden, c.layers, c.width // c.heads
        experts = (c.experts,) if c.experts else ()
        self.config = config
        self.table, self.head, self.norm = ones(c.vocabulary, D), ones(D, c.vocabulary), ones(D)
        self.blocks = {
            "attention_norm": ones(L, D),
            "mlp_norm": ones(L, D),
            "query": ones(L, D, c.heads, K),
            "key": ones(L, D, c.groups, K),
            "value": ones(L, D, c.groups, K),
            "out": ones(L, c.heads, K, D),
            "gate": ones(L, *experts, D, F),
            "up": ones(L, *experts, D, F),
            "down": ones(L, *experts, F, D),
        } | ({"router": ones(L, D, c.experts)} if c.experts else {})


NUMBERS = {
    "layers": Number(("num_hidden_layers",)),
    "heads": Number(("num_attention_heads",)),
    "groups": Number(("num_key_value_heads",)),
    "width": Number(("hidden_size",)),
    "hidden": Number(("intermediate_size",)),
    "context": Number(("max_position_embeddings",)),
    "vocabulary": Number(("vocab_size",)),
    "epsilon": Number(("rms_norm_eps",), kind=float),
}
ONLY = {"hidden_act": ("silu",), "attention_dropout": (0.0,), "tie_word_embeddings": (False,)}
ROPE = {"rope_theta": 10000.0, "rope_type": "default"}
LLAMA = Fields(
    model_type="llama",
    title="Llama",
    numbers=NUMBERS,
    only=ONLY
    | {
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "rope_parameters": (ROPE,),
        "pretraining_tp": (1,),
    },
    derived=lambda numbers: {"head_dim": (numbers["width"] // numbers["heads"], None)},
    new=lambda numbers: {"bos_token_id": 1, "eos_token_id": 2},
)
MIXTRAL = Fields(
    model_type="mixtral",
    title="Mixtral",
    numbers=NUMBERS
    | {"experts": Number(("num_local_experts",)), "chosen": Number(("num_experts_per_tok",))},
    only=ONLY
    | {
        "sliding_window": (None,),
        "rope_parameters": (ROPE | {"rope_theta": 1e6},),
        "router_jitter_noise": (0.0,),
    },
    derived=lambda numbers: {"head_dim": (None, numbers["width"] // numbers["heads"])},
    free={"output_router_logits": (bool,), "router_aux_loss_coef": (float,)},
)


def leaves(config):
    """The tensors of both, by the path of the leaf."""
    c, layer = config, (("layer", config.layers),)
    D, F, groups = c.width, c.hidden, c.groups * c.width // c.heads
    matrix = lambda name, rows, columns, over=layer: Leaf(
        f"layers.{{layer}}.{name}.weight", (rows, columns), over, transposed=True
    )
    table = {
        "table": Leaf("embed_tokens.weight", (c.vocabulary, D)),
        "head": Leaf("lm_head.weight", (c.vocabulary, D), transposed=True, outside=True),
        "norm": Leaf("norm.weight", (D,)),
        "blocks.attention_norm": Leaf("layers.{layer}.input_layernorm.weight", (D,), layer),
        "blocks.mlp_norm": Leaf("layers.{layer}.post_attention_layernorm.weight", (D,), layer),
        "blocks.query": matrix("self_attn.q_proj", D, D),
        "blocks.key": matrix("self_attn.k_proj", groups, D),
        "blocks.value": matrix("self_attn.v_proj", groups, D),
        "blocks.out": matrix("self_attn.o_proj", D, D),
    }
    if not c.experts:
        feed = {
            "gate": ("mlp.gate_proj", F, D),
            "up": ("mlp.up_proj", F, D),
            "down": ("mlp.down_proj", D, F),
        }
        return table | {f"blocks.{ours}": matrix(*theirs) for ours, theirs in feed.items()}
    feed, each = (
        {"gate": ("w1", F, D), "up": ("w3", F, D), "down": ("w2", D, F)},
        (*layer, ("expert", c.experts)),
    )
    table["blocks.router"] = matrix("block_sparse_moe.gate", c.experts, D)
    expert = "block_sparse_moe.experts.{expert}"
    return table | {
        f"blocks.{ours}": matrix(f"{expert}.{name}", *shape, each)
        for ours, (name, *shape) in feed.items()
    }


FAMILIES = {
    "llama": (
        Format(Model, Config, LLAMA, leaves, prefix="model."),
        Config(
            layers=2, heads=4, groups=2, width=8, hidden=12, context=16, vocabulary=11, epsilon=1e-5
        ),
    ),
    "mixtral": (
        Format(Model, Config, MIXTRAL, leaves, prefix="model."),
        Config(
            layers=2,
            heads=4,
            groups=2,
            width=8,
            hidden=12,
            context=16,
            vocabulary=11,
            epsilon=1e-5,
            experts=3,
            chosen=2,
        ),
    ),
}


def random_model(format_, config):
    generator = np.random.default_rng(0)
    shapes = format_.shapes(config, np.dtype(np.float32))
    return jax.tree.map(
        lambda shape: jnp.asarray(generator.normal(size=shape.shape), jnp.float32), shapes
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_second_family_is_read_and_written_by_its_table(family, tmp_path):
    format_, config = FAMILIES[family]
    model = random_model(format_, config)
    files.save(format_, model, tmp_path)
    loaded = files.load(format_, tmp_path, dtype=jnp.float32)
    assert loaded.config == config
    assert_same(loaded, model)
    stored = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    np.testing.assert_array_equal(stored["lm_head.weight"], np.asarray(model.head).T)
    np.testing.assert_array_equal(
        stored["model.layers.1.self_attn.k_proj.weight"],
        np.asarray(model.blocks["key"][1]).reshape(8, 4).T,
    )
    down = {"llama": "mlp.down_proj", "mixtral": "block_sparse_moe.experts.2.w2"}[family]
    of = model.blocks["down"][1] if family == "llama" else model.blocks["down"][1, 2]
    np.testing.assert_array_equal(stored[f"model.layers.1.{down}.weight"], np.asarray(of).T)
    safetensors.numpy.save_file(
        {n: x for n, x in stored.items() if down not in n}, tmp_path / "model.safetensors"
    )
    with pytest.raises(
        ValueError,
        match=(
            rf"missing, but .*a {format_.fields.title} of num_hidden_layers=2|config\.json "
            r"asks for it"
        ),
    ):
        files.load(format_, tmp_path, dtype=jnp.float32)


@pytest.mark.parametrize("family", FAMILIES)
def test_fields_of_a_second_family_are_held_by_its_table(family, tmp_path):
    format_, config = FAMILIES[family]
    files.save(format_, random_model(format_, config), tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    for name, value in {
        "hidden_act": "gelu",
        "tie_word_embeddings": True,
        "head_dim": 4,
        "model_type": "gpt2",
        "other": 1,
    }.items():
        (tmp_path / "config.json").write_text(json.dumps(fields | {name: value}))
        with pytest.raises(ValueError, match=name):
            files.load(format_, tmp_path, dtype=jnp.float32)


@pytest.mark.parity
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_reads_and_writes_the_same_files(family, tmp_path):
    import transformers

    format_, config = FAMILIES[family]
    model = random_model(format_, config)
    files.save(format_, model, tmp_path / "ours")
    theirs = {"llama": transformers.LlamaForCausalLM, "mixtral": transformers.MixtralForCausalLM}[
        family
    ]
    loaded, report = theirs.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report.values()), report
    loaded.save_pretrained(tmp_path / "theirs")
    again = files.load(format_, tmp_path / "theirs", dtype=jnp.float32)
    assert_same(jax.tree.leaves(again), jax.tree.leaves(model))
