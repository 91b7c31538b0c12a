"""Weights of Llama, Qwen 2, Qwen 3 and Mixtral in Hugging Face's layout, by the tables of
`configuration`.

A tensor there is a leaf of ours at one layer, transposed: `q_proj`, [H K, D], is our [D, H, K]. The
halves of a head turn as transformers has them, so no row is permuted. Embedding and head differ by
the rows that pad our vocabulary, which no file holds.
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
    """Returns the Llama, Qwen 2, Qwen 3 or Mixtral at `path`, in `dtype`, on JAX's default device:
    otherwise as `gpt2.load`.

    Its kind is the `model_type` of its `config.json`; without one it is a Llama.

    Args:
        path: a folder, a safetensors file with `config.json` beside it, or a name on the Hugging
            Face hub.
        dtype: what the weights become, whatever they are stored as.
        vocabulary_multiple: embedding and head get rows of zeros up to a multiple of it, as in
            `Config`.

    Raises:
        FileNotFoundError: as `gpt2.load`.
        ImportError: likewise.
        ValueError: likewise, or another kind of model.
    """
    Config(vocabulary_multiple=vocabulary_multiple)  # what is wrong with it is no file's fault
    folder, file = locate(path, "llama.load")
    kind = read_json(folder / CONFIG).get("model_type", "llama")
    if not isinstance(kind, str) or kind not in FORMATS:
        raise ValueError(
            f"{folder / CONFIG}: model_type must be {' or '.join(map(repr, FORMATS))}; it is "
            f"{short(kind)}, for which this Llama has no code. Load another model."
        )
    # No field of a file says that a Qwen has biases or norms of heads.
    options: dict[str, Any] = {
        field: True for field, name in MAKES.items() if name == kind and field != "experts"
    }
    options["vocabulary_multiple"] = vocabulary_multiple
    return files.load(FORMATS[kind], file or folder, dtype=dtype, options=options)


def save(model: Llama, path: str | os.PathLike[str]) -> str:
    """Writes `model` into the folder `path`, for `load` and for
    `transformers.AutoModelForCausalLM`: otherwise as `gpt2.save`.

    With biases it is a Qwen 2, with norms of heads a Qwen 3, with experts a Mixtral, else a Llama.
    How much auxiliary losses count is not saved: it is the training's, and a Mixtral's fields mean
    another loss.

    Raises:
        ImportError: as `gpt2.save`.
        OSError: likewise.
        ValueError: likewise, or the model has two of biases, norms of heads and experts, or a
            shared expert, as none of the four has.
    """
    config = getattr(model, "config", None)
    kinds = [kind for field, kind in MAKES.items() if getattr(config, field, False)]
    if isinstance(config, Config) and (len(kinds) > 1 or config.shared):
        raise ValueError(
            "llama.save: no model of transformers that is written here has two of biases of "
            "queries, keys and values (Qwen 2), norms of heads (Qwen 3) and experts (Mixtral), or "
            "a shared expert. Train with one of the first three."
        )
    return files.save(FORMATS[kinds[0] if kinds else "llama"], model, path)
