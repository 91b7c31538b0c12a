"""Reads and writes the weights of Llama, Qwen 2, Qwen 3 and Mixtral in Hugging Face's layout. The
tables in `configuration` say which tensor stores which leaf.

A tensor in a file is one of our leaves at one layer, transposed: `q_proj`, [H K, D], is our [D, H,
K]. Rotary positions rotate the numbers i and i + K / 2 of a head as a pair, as in the library
`transformers`, so no row is permuted. Our embedding and head also have rows after the vocabulary,
as padding. No file holds these rows.
"""

import os
from typing import Any

import jax.numpy as jnp

from parallax.models import files
from parallax.models.files.json_file import read_json, short
from parallax.models.files.locate import CONFIG, locate
from parallax.models.llama.configuration import FORMATS, MAKES
from parallax.models.llama.model import Llama
from parallax.models.llama.sizes import Config


def load(
    path: str | os.PathLike[str], *, dtype: Any = jnp.float32, vocabulary_multiple: int = 128
) -> Llama:
    """Returns the Llama, Qwen 2, Qwen 3 or Mixtral at `path`, in `dtype`, on JAX's default device,
    as `gpt2.load` does for a GPT-2.

    The field `model_type` of `config.json` names the kind of the model; without this field, the
    model is a Llama.

    Args:
        path: a folder, a safetensors file with `config.json` beside it, or a name on the Hugging
            Face hub.
        dtype: the type of the weights in memory; the file may have another type.
        vocabulary_multiple: the embedding and the head get rows of zeros up to a multiple of this
            number, as in `Config`.

    Raises:
        FileNotFoundError: a file is missing, or the hub did not give the model.
        ImportError: the extra `hub` is not installed.
        ValueError: a file is damaged, or has a field or a tensor that the code does not support
            (`gpt2.load` lists all such reasons); or the model is of another kind.
    """
    # A wrong argument raises here, where the error does not blame the file.
    Config(vocabulary_multiple=vocabulary_multiple)
    folder, file = locate(path, "llama.load")
    kind = read_json(folder / CONFIG).get("model_type", "llama")
    if not isinstance(kind, str) or kind not in FORMATS:
        raise ValueError(
            f"{folder / CONFIG}: model_type must be {' or '.join(map(repr, FORMATS))}; it is "
            f"{short(kind)}, which llama.load does not support. Load another model."
        )
    # `config.json` has no fields for biases, or for norms of queries and keys: the kind of the
    # model implies them.
    # `MAKES` maps such a field of `Config` to the kind that has it. It also maps `experts`, but the
    # file itself has the number of experts.
    options: dict[str, Any] = {
        field: True for field, name in MAKES.items() if name == kind and field != "experts"
    }
    options["vocabulary_multiple"] = vocabulary_multiple
    return files.load(FORMATS[kind], file or folder, dtype=dtype, options=options)


def save(model: Llama, path: str | os.PathLike[str]) -> str:
    """Writes `model` into the folder `path`, for `load` and for
    `transformers.AutoModelForCausalLM`, as `gpt2.save` does for a GPT-2.

    A model with biases is saved as a Qwen 2, a model with norms of queries and keys as a Qwen 3,
    and a model with experts as a Mixtral. Any other model is saved as a Llama. The factors of the
    auxiliary losses (`balance` and `z`) are not saved: only training uses them, and the field of
    Mixtral's `config.json` for such a factor is meant for another definition of the loss.

    Returns a message that says what the folder now holds, as `gpt2.save` does.

    Raises:
        ImportError: the extra `hub` is not installed.
        OSError: the folder could not be written; its old files are unchanged.
        ValueError: the model cannot be saved in `path` (`gpt2.save` lists the reasons); the model
            has more than one of these: biases, norms of queries and keys, experts; or the model has
            a shared expert, which none of the four kinds of model has.
    """
    config = getattr(model, "config", None)
    kinds = [kind for field, kind in MAKES.items() if getattr(config, field, False)]
    # `files.save` refuses an object that is no Llama.
    if isinstance(config, Config) and (len(kinds) > 1 or config.shared):
        raise ValueError(
            "llama.save can write at most one of bias (Qwen 2), head_norms (Qwen 3) and experts "
            "(Mixtral), and needs shared=0; got "
            f"bias={config.bias}, head_norms={config.head_norms}, experts={config.experts}, "
            f"shared={config.shared}. Train a model with at most one of the three, and with "
            "shared=0."
        )
    return files.save(FORMATS[kinds[0] if kinds else "llama"], model, path)
