"""The `config.json` of Llama, Qwen 2, Qwen 3 and Mixtral, and their tensors, as tables for
`models.files`.

They are one model: Qwen 2 has biases of queries, keys and values, Qwen 3 norms of heads, Mixtral
experts.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from parallax.models.files import Fields, Format, Free, Leaf, Number, Part
from parallax.models.files.texts import short
from parallax.models.llama.model import Llama
from parallax.models.llama.sizes import Config, Scaling

THETA = 10_000.0  # where no field says another
PLAIN = ("rope_type", "type", "rope_theta")
SCALED = {  # Llama 3's, and ours
    "factor": "factor",
    "low_freq_factor": "low",
    "high_freq_factor": "high",
    "original_max_position_embeddings": "original",
}


def _rope(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """The record of rotary positions: `rope_parameters` since version 5 of transformers, before it
    `rope_scaling`.
    """
    given = {name: fields[name] for name in ("rope_scaling", "rope_parameters") if fields.get(name)}
    for name, rope in given.items():
        if not isinstance(rope, dict):
            raise ValueError(
                f"{name} must be an object, or null; it is {short(rope)}. Correct the file."
            )
    if len(given) == 2 and given["rope_scaling"] != given["rope_parameters"]:
        raise ValueError(
            f"rope_scaling and rope_parameters must agree; got {short(given)}. Remove the first."
        )
    return next(iter(given.values()), {})


def _theta(fields: Mapping[str, Any], usual: float = THETA) -> float:
    stated = [
        of["rope_theta"] for of in (_rope(fields), fields) if of.get("rope_theta") is not None
    ]
    if any(isinstance(theta, bool) or not isinstance(theta, int | float) for theta in stated):
        raise ValueError(
            f"rope_theta must be a number; it is {short(stated[0])}. Correct the file."
        )
    if len({*stated}) > 1:
        raise ValueError(
            f"rope_theta must be the same in both places; it is {stated[0]} and {stated[1]}. "
            "Correct the file."
        )
    return float(stated[0]) if stated else usual


def _scaling(fields: Mapping[str, Any]) -> Scaling | None:
    rope = _rope(fields)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise ValueError(
            f"rope_type must be 'default' or 'llama3'; it is {short(kind)}, for which this Llama "
            "has no code. Load another model."
        )
    known = PLAIN if kind == "default" else (*PLAIN, *SCALED)
    if unknown := sorted(rope.keys() - {*known}):
        raise ValueError(
            f"{short(unknown[0])} of the rotary positions is not known here for rope_type "
            f"{kind!r}, and may change what the "
            "model computes. Remove it from the file where transformers gives the same logits "
            "without."
        )
    if kind == "default":
        return None
    if missing := [name for name in SCALED if name not in rope]:
        raise ValueError(
            f"rope_type 'llama3' needs {missing[0]}; got {short(dict(rope))}. Correct the file."
        )
    return Scaling(**{ours: rope[theirs] for theirs, ours in SCALED.items()})


def _scaled(scaling: Scaling | None) -> dict[str, Any]:
    """As version 4 of transformers writes it, which all versions read."""
    if scaling is None:
        return {"rope_scaling": None}
    return {
        "rope_scaling": {"rope_type": "llama3"}
        | {theirs: getattr(scaling, ours) for theirs, ours in SCALED.items()}
    }


THETAS = Part(("rope_theta", "rope_parameters"), of=_theta, to=lambda theta: {"rope_theta": theta})
NUMBERS: dict[str, Number | Part] = {
    "layers": Number(("num_hidden_layers",)),
    "heads": Number(("num_attention_heads",)),
    "groups": Number(("num_key_value_heads",)),
    "width": Number(("hidden_size",)),
    "hidden": Number(("intermediate_size",)),
    "context": Number(("max_position_embeddings",)),
    "vocabulary": Number(("vocab_size",)),
    "head_width": Number(("head_dim",), nullable=("head_dim",), default=0),
    "epsilon": Number(("rms_norm_eps",), kind=float, default=1e-6),
    "tied": Number(("tie_word_embeddings",), kind=bool, default=False),
    "theta": THETAS,
    "scaling": Part(("rope_scaling", "rope_parameters"), of=_scaling, to=_scaled),
}
AS_MANY = {  # a Llama may leave it out
    "groups": Number(
        ("num_key_value_heads",),
        nullable=("num_key_value_heads",),
        default=lambda fields: fields.get("num_attention_heads"),
    )
}
ONLY = {"hidden_act": ("silu",), "attention_dropout": (0.0,)}
NO_WINDOWS = {"use_sliding_window": (False,)}


def _made(architecture: str) -> Any:
    return lambda numbers: {"architectures": [architecture]}


def _windowless(numbers: Mapping[str, Any]) -> dict[str, tuple]:
    """Qwen's layers all attend to everything, whatever the window that is not used."""
    return {"layer_types": (["full_attention"] * numbers["layers"], None), "use_mrope": (False,)}


WINDOWS: dict[str, Free] = dict.fromkeys(("sliding_window", "max_window_layers"), Free())
OF_EXPERTS = {
    "experts": Number(("num_local_experts",)),
    "chosen": Number(("num_experts_per_tok",)),
    "epsilon": Number(("rms_norm_eps",), kind=float, default=1e-5),
    "theta": dataclasses.replace(THETAS, of=functools.partial(_theta, usual=1e6)),
}
FIELDS = {
    "llama": Fields(
        model_type="llama",
        title="Llama",
        numbers=NUMBERS | AS_MANY,
        only=ONLY | {"attention_bias": (False,), "mlp_bias": (False,), "pretraining_tp": (1, None)},
        made=_made("LlamaForCausalLM"),
    ),
    "qwen2": Fields(
        model_type="qwen2",
        title="Qwen 2",
        numbers=NUMBERS,
        only=ONLY | NO_WINDOWS,
        derived=_windowless,
        free=WINDOWS,
        made=_made("Qwen2ForCausalLM"),
    ),
    "qwen3": Fields(
        model_type="qwen3",
        title="Qwen 3",
        numbers=NUMBERS | {"head_width": Number(("head_dim",), default=128)},
        only=ONLY | NO_WINDOWS | {"attention_bias": (False,)},
        derived=_windowless,
        free=WINDOWS,
        made=_made("Qwen3ForCausalLM"),
    ),
    "mixtral": Fields(
        model_type="mixtral",
        title="Mixtral",
        numbers=NUMBERS | OF_EXPERTS,
        only=ONLY | {"sliding_window": (None,), "router_jitter_noise": (0.0,)},
        free={"output_router_logits": Free(), "router_aux_loss_coef": Free()},
        made=_made("MixtralForCausalLM"),
    ),
}


def leaves(config: Config) -> dict[str, Leaf]:
    """The tensors of the four, by the path of the leaf."""
    D, F, V, K, layers = (
        config.width,
        config.hidden,
        config.vocabulary,
        config.head_width,
        (("layer", config.layers),),
    )
    of_queries, of_keys = config.heads * K, config.groups * K
    of_mlp = {"gate": (F, D), "up": (F, D), "down": (D, F)}

    def each(name: str, *shape: int) -> Leaf:
        return Leaf(f"layers.{{layer}}.{name}", shape, layers, transposed=len(shape) == 2)

    table = {
        "table": Leaf(
            "embed_tokens.weight", (V, D), copies=("lm_head.weight",) if config.tied else ()
        ),
        "norm.weight": Leaf("norm.weight", (D,)),
        "blocks.attention_norm.weight": each("input_layernorm.weight", D),
        "blocks.mlp_norm.weight": each("post_attention_layernorm.weight", D),
        "blocks.attention.out.weight": each("self_attn.o_proj.weight", D, of_queries),
    }
    if config.experts:
        table["blocks.mlp.mixture.router"] = each("block_sparse_moe.gate.weight", config.experts, D)
    else:
        table |= {
            f"blocks.mlp.{part}.weight": each(f"mlp.{part}_proj.weight", *shape)
            for part, shape in of_mlp.items()
        }
    for part, number in (("gate", 1), ("up", 3), ("down", 2)) if config.experts else ():
        name = f"layers.{{layer}}.block_sparse_moe.experts.{{expert}}.w{number}.weight"
        over = (*layers, ("expert", config.experts))
        table[f"blocks.mlp.mixture.experts.{part}"] = Leaf(
            name, of_mlp[part], over, transposed=True
        )
    if not config.tied:
        table["head"] = Leaf("lm_head.weight", (V, D), outside=True)
    for ours, theirs, size in (
        ("query", "q", of_queries),
        ("key", "k", of_keys),
        ("value", "v", of_keys),
    ):
        table[f"blocks.attention.{ours}.weight"] = each(f"self_attn.{theirs}_proj.weight", size, D)
        if config.bias:
            table[f"blocks.attention.{ours}.bias"] = each(f"self_attn.{theirs}_proj.bias", size)
        if config.head_norms and ours != "value":
            table[f"blocks.attention.{ours}_norm.weight"] = each(
                f"self_attn.{theirs}_norm.weight", K
            )
    return table


FORMATS = {
    kind: Format(
        model=Llama,
        config=Config,
        fields=fields,
        leaves=leaves,
        prefix="model.",
        no_weights=r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
        module="llama",
    )
    for kind, fields in FIELDS.items()
}
OPTIONS = {
    "llama": {},
    "qwen2": {"bias": True},
    "qwen3": {"head_norms": True},
    "mixtral": {},
}  # what no field says of a kind
