"""GPT-2's weights in Hugging Face's layout: `models.files` reads and writes them by the tables in
`configuration`.

A tensor in a file is one of our leaves at one layer, with the same numbers in the same order:
`c_attn`, [D, 3 D], is our [D, 3, H, K]. So nothing is transposed. Only our embedding differs: it
also has rows after the vocabulary, as padding. No file holds these rows.
"""

import os
from typing import Any

import jax.numpy as jnp

from parallax.models import files
from parallax.models.gpt2.configuration import FORMAT
from parallax.models.gpt2.model import GPT2, Config


def load(
    path: str | os.PathLike[str], *, dtype: Any = jnp.float32, vocabulary_multiple: int = 128
) -> GPT2:
    """Returns the GPT-2 at `path`, with its weights in `dtype`, on JAX's default device.

    Leaves are read one after another, so at most one leaf is in memory in addition to the model. If
    the model is too large for one device, read it into the host's memory and send each device of a
    mesh its part:

        with jax.default_device(jax.devices("cpu")[0]):
            model = gpt2.load("gpt2")
        model = mesh.place(model, rules.specs(model, gpt2.rules("tensor"), mesh_), mesh_)

    The fields and files of the folder that the model does not use are kept in
    `model.config.origin`, and `save` writes them again.

    Args:
        path: a folder with `config.json` and either `model.safetensors` or the shards that
            `model.safetensors.index.json` lists; or one safetensors file with `config.json` beside
            it; or, if no such folder or file exists, the name of a model on the Hugging Face hub,
            such as "gpt2".
        dtype: the type of the weights in memory; the file may have another type.
        vocabulary_multiple: the embedding gets rows of zeros up to a multiple of this number, as in
            `Config`.

    Raises:
        FileNotFoundError: a file is missing, or the hub did not give the model.
        ImportError: the extra `hub` is not installed.
        ValueError: a file is damaged; a tensor is missing, unexpected, of another shape, or has a
            number too large for `dtype`; a field is missing, unknown, or has a value that the code
            does not support; or the weights were saved with another configuration. A changed number
            inside a tensor is not noticed: the format has no checksum.
    """
    # A wrong argument raises here, where the error does not blame the file.
    Config(vocabulary_multiple=vocabulary_multiple)
    return files.load(
        FORMAT, path, dtype=dtype, options={"vocabulary_multiple": vocabulary_multiple}
    )


def save(model: GPT2, path: str | os.PathLike[str]) -> str:
    """Writes `model` into the folder `path`, for `load` and for
    `transformers.GPT2LMHeadModel.from_pretrained`.

    Each leaf keeps its dtype. `config.json` states one dtype that can represent the numbers of all
    leaves; transformers loads all weights in this dtype. If `model` was loaded, three things are
    saved unchanged, even after training: the fields of `config.json` that the model does not use,
    the file `generation_config.json`, and the files of the tokenizer.

    A save replaces the files that it writes. It removes files that an earlier save wrote and that
    this save does not write; but a tokenizer's files stay if `model` comes without a tokenizer. All
    other files stay. New files replace old ones only after they are complete and on the disk, so a
    save that fails changes nothing. A save that is killed leaves the old model, the new model, or a
    folder without `config.json`, which `load` refuses. With several processes, gather the model
    first (`jax.experimental.multihost_utils.process_allgather(model, tiled=True)`), and save in one
    process.

    Returns:
        A message for the user that says what the folder now holds. If the folder has no tokenizer,
        the message tells the user to copy the tokenizer's files into the folder.

    Raises:
        ImportError: the extra `hub` is not installed.
        OSError: the folder could not be written; its old files are unchanged.
        ValueError: `path` is a file; a leaf is missing, deleted, or of another shape than the
            configuration says, for example because the model is one device's shard or one pipeline
            stage; a leaf is of a type that `load` does not accept; or the files of the tokenizer
            are gone.
    """
    return files.save(FORMAT, model, path)
