"""GPT-2's sizes as Hugging Face's `config.json`: what the file says that this model has no code for is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from parallax.models.gpt2.model import Config

_ONLY: dict[str, tuple] = {  # the values that the model has code for; the first is what is meant where the field is left out
    "model_type": ("gpt2",),
    "activation_function": ("gelu_new",),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "reorder_and_upcast_attn": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
    "quantization_config": (None,),
}


def read_config(file: Path, vocabulary_multiple: int) -> Config:
    """The sizes that `file` states. Raises `FileNotFoundError`, or `ValueError` for what is missing or not to be represented."""
    if not file.is_file():
        raise FileNotFoundError(f"gpt2.load needs {file}, which says what the weights beside it are. Copy it there.")
    fields = read_json(file)

    def number(kind: Any, *names: str, default: float | None = None) -> Any:
        """The one value of these fields. One that is left out is `default`, or, where that is None, what the others are."""
        values = {name: fields.get(name, default) for name in names if default is not None or name in fields}
        if not values or any(isinstance(value, bool) or not isinstance(value, kind) for value in values.values()):
            raise ValueError(f"{file} needs a number for {names[0]}; got {values or 'no such field'}. Correct the file.")
        if len(set(values.values())) > 1:
            raise ValueError(f"{file}: {' and '.join(names)} must agree; got {values}. The model has one number for them.")
        return next(iter(values.values()))

    sizes: dict[str, Any] = {
        "layers": number(int, "n_layer"),
        "heads": number(int, "n_head"),
        "width": number(int, "n_embd"),
        "context": number(int, "n_positions", "n_ctx"),
        "vocabulary": number(int, "vocab_size"),
    }
    rates: dict[str, Any] = {
        "dropout": float(number(int | float, "resid_pdrop", "embd_pdrop", default=0.1)),
        "attention_dropout": float(number(int | float, "attn_pdrop", default=0.1)),
        "epsilon": float(number(int | float, "layer_norm_epsilon", default=1e-5)),
    }
    for field, values in (_ONLY | {"n_inner": (None, 4 * sizes["width"])}).items():
        if fields.get(field, values[0]) not in values:
            raise ValueError(
                f"{file}: {field} must be {' or '.join(map(repr, values))}; it is {fields[field]!r}, for which this GPT-2 has "
                f"no code. Load another model."
            )
    try:
        return Config(**sizes, **rates, vocabulary_multiple=vocabulary_multiple)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def fields_of(config: Config, dtype: np.dtype) -> dict[str, Any]:
    """The fields of a `config.json` that transformers reads as this model."""
    end = 50256 if config.vocabulary > 50256 else None  # <|endoftext|>, in GPT-2's own vocabulary
    return {
        "architectures": ["GPT2LMHeadModel"],
        **{field: values[0] for field, values in _ONLY.items() if field != "quantization_config"},
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_embd": config.width,
        "n_inner": None,
        "n_positions": config.context,
        "n_ctx": config.context,
        "vocab_size": config.vocabulary,
        "layer_norm_epsilon": config.epsilon,
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.attention_dropout,
        "bos_token_id": end,
        "eos_token_id": end,
        "torch_dtype": dtype.name,
    }


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in `file`. Raises `ValueError` where it is cut short or something else."""
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not whole JSON ({error}). Copy or download it again.") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{file} must hold a JSON object; got a {type(fields).__name__}. Copy or download it again.")
    return fields
