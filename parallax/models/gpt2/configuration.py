"""The tables by which `models.files` reads and writes the files of a GPT-2: a table of the fields
of `config.json`, and a table of the tensors that store each leaf of the model."""

from collections.abc import Mapping
from typing import Any

from parallax.models.files import Fields, Format, Leaf, Number
from parallax.models.gpt2.model import GPT2, Config

_END = 50256  # <|endoftext|>, in GPT-2's own vocabulary


def _new(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a new GPT-2's `config.json`, without those for its sizes, dropout rates
    and epsilon, and without those in the table `FIELDS.only`. `FIELDS.new` is this function.

    The fields `bos_token_id` and `eos_token_id` have GPT-2's own token for the end of a text if the
    vocabulary has that token; otherwise both fields are null.
    """
    end = _END if numbers["vocabulary"] > _END else None
    return {
        "architectures": ["GPT2LMHeadModel"],
        "bos_token_id": end,
        "eos_token_id": end,
        "pad_token_id": None,
        "n_inner": None,
        "use_cache": True,
        "initializer_range": 0.02,
        **{name: default for name, (default, _) in SUMMARY.items()},  # of a classification head
    }


# Fields of transformers' classification head, which this code does not have: defaults and types.
SUMMARY: dict[str, tuple[Any, tuple[type, ...]]] = {
    "summary_type": ("cls_index", (str,)),
    "summary_use_proj": (True, (bool,)),
    "summary_activation": (None, (str, type(None))),
    "summary_proj_to_labels": (True, (bool,)),
    "summary_first_dropout": (0.1, (float, int)),
}
FIELDS = Fields(
    model_type="gpt2",
    title="GPT-2",
    numbers={
        "layers": Number(("n_layer",), ("num_hidden_layers",)),
        "heads": Number(("n_head",), ("num_attention_heads",)),
        "width": Number(("n_embd",), ("hidden_size",)),
        "context": Number(
            ("n_positions", "n_ctx"), ("max_position_embeddings",), nullable=("n_ctx",)
        ),
        "vocabulary": Number(("vocab_size",)),
        "dropout": Number(("resid_pdrop", "embd_pdrop"), kind=float, default=0.1),
        "attention_dropout": Number(("attn_pdrop",), kind=float, default=0.1),
        "epsilon": Number(("layer_norm_epsilon",), kind=float, default=1e-5),
    },
    only={
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "reorder_and_upcast_attn": (False,),
        "add_cross_attention": (False,),
        "tie_word_embeddings": (True,),
    },
    derived=lambda numbers: {"n_inner": (None, 4 * numbers["width"])},
    free={name: kinds for name, (_, kinds) in SUMMARY.items()}
    | {"summary_last_dropout": (), "classifier_dropout": (), "hidden_dropout": ()},
    new=_new,
)


def leaves(config: Config) -> dict[str, Leaf]:
    """Returns the tensors of each leaf of a GPT-2, by the leaf's path."""
    D, V = config.width, config.vocabulary
    names_and_shapes = {  # the tensors' name, and the shapes of weight and bias
        "attention_norm": ("ln_1", (D,), (D,)),
        "attention.qkv": ("attn.c_attn", (D, 3 * D), (3 * D,)),
        "attention.out": ("attn.c_proj", (D, D), (D,)),
        "mlp_norm": ("ln_2", (D,), (D,)),
        "mlp.up": ("mlp.c_fc", (D, 4 * D), (4 * D,)),
        "mlp.down": ("mlp.c_proj", (4 * D, D), (D,)),
    }
    # `Leaf.over`: there is a tensor for each layer, whose number stands for {layer} in its name.
    layers = (("layer", config.layers),)
    # `copies`: a file may also hold the head, which is the embedding again.
    table = {
        "wte": Leaf("wte.weight", (V, D), copies=("lm_head.weight",)),
        "wpe": Leaf("wpe.weight", (config.context, D)),
        "norm.weight": Leaf("ln_f.weight", (D,)),
        "norm.bias": Leaf("ln_f.bias", (D,)),
    }
    for ours, (theirs, weight, bias) in names_and_shapes.items():
        table[f"blocks.{ours}.weight"] = Leaf(f"h.{{layer}}.{theirs}.weight", weight, layers)
        table[f"blocks.{ours}.bias"] = Leaf(f"h.{{layer}}.{theirs}.bias", bias, layers)
    return table


FORMAT = Format(
    model=GPT2,
    config=Config,
    fields=FIELDS,
    leaves=leaves,
    prefix="transformer.",
    no_weights=r"h\.\d+\.attn\.(masked_)?bias",
)
