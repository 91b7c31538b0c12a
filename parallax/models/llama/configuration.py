"""The tables by which `models.files` reads and writes the files of Llama, Qwen 2, Qwen 3 and
Mixtral: tables of the fields of `config.json`, and tables of the tensors that store each leaf of
the model.

All four families are the model `Llama`: Qwen 2 adds biases of queries, keys and values, Qwen 3 adds
norms of heads, and Mixtral has experts.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from parallax.models.files import Fields, Format, Leaf, Number, Part
from parallax.models.files.json_file import short
from parallax.models.llama.model import Llama
from parallax.models.llama.sizes import Config, Scaling

THETA = 10_000.0  # the base of rotary positions if no field states it
SCALED = {  # names of Llama 3's fields, and the fields of our `Scaling`
    "factor": "factor",
    "low_freq_factor": "low",
    "high_freq_factor": "high",
    "original_max_position_embeddings": "original",
}
NEEDED = {"default": (), "llama3": tuple(SCALED)}  # the fields of each type of rotary positions


def _rope(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of rotary positions that a `config.json` states, after a check that all
    are known and agree.

    Since version 5 of transformers these fields are in the object `rope_parameters`. Older versions
    have them in the field `rope_theta` and in the object `rope_scaling`.
    """
    rope: dict[str, Any] = {}
    for place in ("rope_scaling", "rope_parameters", None):  # None: the field `rope_theta` itself
        record = (fields.get(place) if place else {"rope_theta": fields.get("rope_theta")}) or {}
        if not isinstance(record, dict):
            raise ValueError(
                f"{place} must be an object, or null; it is {short(record)}. Correct the file."
            )
        for stated_name, value in record.items():
            # "type" is the old name of "rope_type".
            name = "rope_type" if stated_name == "type" else stated_name
            if value is not None and rope.setdefault(name, value) != value:
                raise ValueError(
                    f"{name} must be the same wherever the file states it; it is "
                    f"{short(rope[name])} and {short(value)}. Correct the file."
                )
    kind, theta = rope.get("rope_type", "default"), rope.get("rope_theta", THETA)
    if not isinstance(kind, str) or kind not in NEEDED:
        raise ValueError(
            f"rope_type must be 'default' or 'llama3'; it is {short(kind)}, which Parallax does "
            "not support. Load a model with one of these types."
        )
    if isinstance(theta, bool) or not isinstance(theta, int | float):
        raise ValueError(f"rope_theta must be a number; it is {short(theta)}. Correct the file.")
    if unknown := sorted(rope.keys() - {"rope_type", "rope_theta", *NEEDED[kind]}):
        raise ValueError(
            f"{short(unknown[0])} of the rotary positions is not known here for rope_type "
            f"{kind!r}, and may change what the model computes. Remove it from the file only "
            "if transformers gives the same logits without it."
        )
    if missing := [name for name in NEEDED[kind] if name not in rope]:
        raise ValueError(
            f"rope_type {kind!r} needs {missing[0]}; got {short(rope)}. Correct the file."
        )
    return rope


def _theta(fields: Mapping[str, Any], usual: float = THETA) -> float:
    """Returns the base of rotary positions, which is `usual` if no field states it."""
    return float(_rope(fields).get("rope_theta", usual))


def _scaling(fields: Mapping[str, Any]) -> Scaling | None:
    """Returns the scaling of rotary positions, or None without one."""
    rope = _rope(fields)
    if rope.get("rope_type", "default") == "default":
        return None
    return Scaling(**{ours: rope[theirs] for theirs, ours in SCALED.items()})


def _scaled(scaling: Scaling | None) -> dict[str, Any]:
    """Returns the fields that state `scaling` in the format of transformers 4, which all versions
    of transformers can read.
    """
    if scaling is None:
        return {"rope_scaling": None}
    factors = {theirs: getattr(scaling, ours) for theirs, ours in SCALED.items()}
    return {"rope_scaling": {"rope_type": "llama3"} | factors}


THETAS = Part(
    ("rope_theta", "rope_parameters"), read=_theta, written=lambda theta: {"rope_theta": theta}
)
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
    "scaling": Part(("rope_scaling", "rope_parameters"), read=_scaling, written=_scaled),
}
AS_MANY = {  # if a Llama leaves the field out, it has as many heads of keys as of queries
    "groups": Number(
        ("num_key_value_heads",),
        nullable=("num_key_value_heads",),
        default=lambda fields: fields.get("num_attention_heads"),
    )
}
ONLY = {"hidden_act": ("silu",), "attention_dropout": (0.0,)}
NO_WINDOWS = {"use_sliding_window": (False,)}


def _new(architecture: str) -> Any:
    """Returns the argument `new` of `Fields`, for the class `architecture` of transformers. The
    returned function ignores its argument, the sizes of the model, and returns the same fields of a
    new `config.json` for all sizes.

    The fields of the special tokens are null: if they were left out, transformers would use its
    default tokens.
    """
    tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    common = {"architectures": [architecture], "use_cache": True, "initializer_range": 0.02}
    return lambda numbers: common | tokens


def _windowless(numbers: Mapping[str, Any]) -> dict[str, tuple]:
    """Returns the supported values of two fields of a Qwen. The field `layer_types` may only say
    that all layers use full attention, without sliding windows. The field `use_mrope` must be
    false, so that a position is one number.
    """
    return {"layer_types": (["full_attention"] * numbers["layers"], None), "use_mrope": (False,)}


# Free, since `use_sliding_window` must be false: the size of a window that is not used.
WINDOWS: dict[str, tuple[type, ...]] = {"sliding_window": (), "max_window_layers": ()}
OF_EXPERTS = {
    "experts": Number(("num_local_experts",)),
    "chosen": Number(("num_experts_per_tok",)),
    "epsilon": Number(("rms_norm_eps",), kind=float, default=1e-5),
    "theta": dataclasses.replace(THETAS, read=functools.partial(_theta, usual=1e6)),
}
FIELDS = {
    "llama": Fields(
        model_type="llama",
        title="Llama",
        numbers=NUMBERS | AS_MANY,
        only=ONLY | {"attention_bias": (False,), "mlp_bias": (False,), "pretraining_tp": (1, None)},
        new=_new("LlamaForCausalLM"),
    ),
    "qwen2": Fields(
        model_type="qwen2",
        title="Qwen 2",
        numbers=NUMBERS,
        only=ONLY | NO_WINDOWS,
        derived=_windowless,
        free=WINDOWS,
        new=_new("Qwen2ForCausalLM"),
    ),
    "qwen3": Fields(
        model_type="qwen3",
        title="Qwen 3",
        numbers=NUMBERS | {"head_width": Number(("head_dim",), default=128)},
        only=ONLY | NO_WINDOWS | {"attention_bias": (False,)},
        derived=_windowless,
        free=WINDOWS,
        new=_new("Qwen3ForCausalLM"),
    ),
    "mixtral": Fields(
        model_type="mixtral",
        title="Mixtral",
        numbers=NUMBERS | OF_EXPERTS,
        only=ONLY | {"sliding_window": (None,), "router_jitter_noise": (0.0,)},
        free={"output_router_logits": (), "router_aux_loss_coef": ()},
        new=_new("MixtralForCausalLM"),
    ),
}


def leaves(config: Config) -> dict[str, Leaf]:
    """Returns the tensors of each leaf of the model, by the leaf's path, for Llama, Qwen 2, Qwen 3
    and Mixtral.

    Shapes are those in the file, where matrices are [out, in].
    """
    D, F, V, K = config.width, config.hidden, config.vocabulary, config.head_width
    layers, copies = (("layer", config.layers),), ("lm_head.weight",) if config.tied else ()

    def of_layer(name: str, *shape: int, counts: tuple = layers) -> Leaf:
        """Returns the leaf of a weight that each layer has; a matrix is transposed in the file.
        `counts` is `Leaf.over`: each word in braces in the name, such as {expert}, with the number
        of values that the word takes.
        """
        return Leaf(f"layers.{{layer}}.{name}", shape, counts, transposed=len(shape) == 2)

    table = {
        "table": Leaf("embed_tokens.weight", (V, D), copies=copies),
        "norm.weight": Leaf("norm.weight", (D,)),
        "blocks.attention_norm.weight": of_layer("input_layernorm.weight", D),
        "blocks.mlp_norm.weight": of_layer("post_attention_layernorm.weight", D),
        "blocks.attention.out.weight": of_layer("self_attn.o_proj.weight", D, config.heads * K),
    }
    if not config.tied:
        # `outside`: the name in the file has no prefix, such as "model.".
        table["head"] = Leaf("lm_head.weight", (V, D), outside=True)
    for ours, heads in {
        "query": config.heads,
        "key": config.groups,
        "value": config.groups,
    }.items():
        path, theirs = f"blocks.attention.{ours}", f"self_attn.{ours[0]}"  # q, k or v
        table[f"{path}.weight"] = of_layer(f"{theirs}_proj.weight", heads * K, D)
        if config.bias:
            table[f"{path}.bias"] = of_layer(f"{theirs}_proj.bias", heads * K)
        if config.head_norms and ours != "value":
            table[f"{path}_norm.weight"] = of_layer(f"{theirs}_norm.weight", K)
    # Mixtral numbers the matrices of an expert: w1 is the gate, w2 the down, w3 the up matrix.
    of_experts, moe = (*layers, ("expert", config.experts)), "block_sparse_moe"
    for part, number, shape in (("gate", 1, (F, D)), ("up", 3, (F, D)), ("down", 2, (D, F))):
        if config.experts:
            name = f"{moe}.experts.{{expert}}.w{number}.weight"
            table[f"blocks.mlp.mixture.experts.{part}"] = of_layer(name, *shape, counts=of_experts)
        else:
            table[f"blocks.mlp.{part}.weight"] = of_layer(f"mlp.{part}_proj.weight", *shape)
    if config.experts:
        table["blocks.mlp.mixture.router"] = of_layer(f"{moe}.gate.weight", config.experts, D)
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
# The fields of `Config` that make a model another kind than a Llama.
MAKES = {"bias": "qwen2", "head_norms": "qwen3", "experts": "mixtral"}
