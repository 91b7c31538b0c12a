"""GPT-2's weights in Hugging Face's layout: `models.files` reads and writes them by the tables in
`configuration`.

A tensor there is a leaf of ours at one layer, the same numbers in the same order: `c_attn`, [D, 3
D], is our [D, 3, H, K]. So nothing is transposed. Only the embedding differs, by the rows that pad
our vocabulary, which no file holds.
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

    Leaves are read one at a time: beside the model there is never more than one of them in memory.
    To put the model on a mesh of smaller devices, read it into the host's memory and send each
    device its part:

        with jax.default_device(jax.devices("cpu")[0]):
            model = gpt2.load("gpt2")
        model = mesh.place(model, rules.specs(model, gpt2.rules("tensor"), mesh_), mesh_)

    What the files say beside the model's sizes and weights is kept in `model.config.origin`, and
    `save` writes it again.

    Args:
        path: a folder with `config.json` and either `model.safetensors` or the shards that
            `model.safetensors.index.json` lists; or one safetensors file with `config.json` beside
            it; or, where a string names nothing here, a model of the Hugging Face hub, such as
            "gpt2".
        dtype: what the weights become, whatever they are stored as.
        vocabulary_multiple: the embedding gets rows of zeros up to a multiple of it, as in
            `Config`.

    Raises:
        FileNotFoundError: a file is missing, or the hub did not give the model.
        ImportError: the extra `hub` is not installed.
        ValueError: a file is damaged; a tensor is missing, unexpected, of another shape, or has a
            number beyond `dtype`; a field is missing, unknown, or has a value that this model has
            no code for; or the weights were saved with another configuration. One changed bit
            inside a tensor is not noticed: the format carries no checksum.
    """
    Config(vocabulary_multiple=vocabulary_multiple)  # what is wrong with it is no file's fault
    return files.load(
        FORMAT, path, dtype=dtype, options={"vocabulary_multiple": vocabulary_multiple}
    )


def save(model: GPT2, path: str | os.PathLike[str]) -> str:
    """Writes `model` into the folder `path`, for `load` and for
    `transformers.GPT2LMHeadModel.from_pretrained`.

    Each leaf keeps its dtype; the widest is the one that `config.json` states, in which
    transformers loads them all. The fields that `load` found and does not use,
    `generation_config.json`, and the files of a tokenizer go out as they came in. So do those of a
    model that was trained since.

    A save replaces the files that it writes, and removes what an earlier save wrote beside them;
    other files stay. New files take the place of old ones only once they are whole and on the disk:
    a save that fails leaves what was there. One that is killed leaves the old model, the new one,
    or a folder without `config.json`, which no one loads. On several processes, gather the model
    first (`jax.experimental.multihost_utils.process_allgather(model, tiled=True)`), and let one
    process save.

    Returns:
        In a sentence, what the folder holds, and which files of a tokenizer to copy there, where
        the model came without.

    Raises:
        ImportError: the extra `hub` is not installed.
        OSError: the folder could not be written. What was there is as it was.
        ValueError: `path` is a file; a leaf is missing, deleted, or of another shape than the
            configuration says, as in a shard or a stage; it is of a type that `load` would not
            take; or the files of the tokenizer are gone.
    """
    return files.save(FORMAT, model, path)
