"""Reads and writes models of any family. The family's `Format` lists the fields of `config.json`,
and the tensors that store the model's weights.

A *leaf* is an array of the model in memory, and a *tensor* is an array in a safetensors file. The
file's metadata has two keys: `MEANT` has the fingerprint of the configuration that the weights
belong to, and `WROTE` has the names of the files that were saved with the weights.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from parallax import mesh
from parallax.models.files import tensors
from parallax.models.files.atomic_replace import replacing
from parallax.models.files.fields import Fields
from parallax.models.files.locate import CONFIG, locate
from parallax.models.files.origin import GENERATION, TOKENIZER, Origin
from parallax.models.files.tensors import FLOATS, MEANT, WEIGHTS, WROTE, Leaf

TYPES = [jnp.dtype(float_type) for float_type in FLOATS.values()]
TYPE_NAMES = ", ".join(float_type.name for float_type in TYPES)


@dataclass(frozen=True)
class Format:
    """The tables by which models of one family are read from files and written to files.

    Args:
        model: the class of the model; `model(config, key=key, dtype=dtype)` makes a model. The
            attribute `config` of a model is static.
        config: the class of the model's configuration. Among its arguments are those that the table
            `fields.numbers` lists, and `origin`.
        fields: the table of `config.json`.
        leaves: a function from a configuration to a dict. A key of the dict is the path of a leaf
            in the model. The key's value is a `Leaf`, which describes the tensors of that leaf.
        prefix: the beginning of the tensors' names; a file may leave it out.
        no_weights: a regular expression for the names, without `prefix`, of tensors that are not
            weights and are ignored, such as the causal masks in old files.
        module: the name of the module that has `load` and `save`, for errors. Give it only if it
            differs from the family's `model_type`.
    """

    model: type[Any]
    config: type[Any]
    fields: Fields
    leaves: Callable[[Any], Mapping[str, Leaf]]
    prefix: str = ""
    no_weights: str = "(?!)"
    module: str = ""

    @property
    def name(self) -> str:
        """The name of the family's module, such as `gpt2`."""
        return self.module or self.fields.model_type

    def numbers(self, config: Any) -> dict[str, Any]:
        """Returns a dict from each name in the table `fields.numbers` to its value in `config`."""
        return {name: getattr(config, name) for name in self.fields.numbers}

    def shapes(self, config: Any, dtype: Any) -> Any:
        """Returns a model that has `jax.ShapeDtypeStruct`s in place of arrays."""
        return eqx.filter_eval_shape(self.model, config, key=jax.random.key(0), dtype=dtype)


def load(
    format_: Format,
    path: str | os.PathLike[str],
    *,
    dtype: Any,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """Returns the model at `path`, with its weights in `dtype`, on JAX's default device.
    `gpt2.load` is this function for one family; its docstring lists the errors.

    Args:
        format_: the family's tables.
        path: a folder, a safetensors file, or a name on the hub.
        dtype: the type of the weights in memory.
        options: arguments of the configuration that no file states.
    """
    dtype = _check_dtype(format_, dtype)
    options = dict(options or {})
    folder, file = locate(path, f"{format_.name}.load")
    config_file = folder / CONFIG
    # `differing` are the fields whose values `save` would not write for a new model with these
    # numbers. The model keeps them in its `Origin`, so that `save` writes them again.
    numbers, differing = format_.fields.read(config_file)
    origin = Origin.of(folder, differing)
    try:
        config = format_.config(**numbers, **options, origin=origin)
    except ValueError as error:
        raise format_.fields.blame(error, config_file) from error
    files, index = ([file], None) if file else tensors.locate(folder)  # None: one file, no index
    leaves = format_.leaves(config)
    sizes = [
        f"{number.names[0]}={numbers[name]}"
        for name, number in format_.fields.numbers.items()
        if number.kind is int
    ]
    what = f"{format_.fields.title} of {', '.join(sizes)}"  # the model in words, for errors
    with contextlib.ExitStack() as stack:  # keeps the files open until all leaves are read
        # The tensors of all files, by their names without the prefix. Tensors whose names match
        # `no_weights`, such as causal masks, are left out.
        stored = tensors.opened(stack, files, index, format_.prefix, format_.no_weights)
        tensors.check_meant(stored, format_.fields.fingerprint(numbers), config_file)
        tensors.check(stored, leaves, config_file, what)
        shapes = format_.shapes(config, dtype)

        def read(path, shape):
            """Returns the model's leaf at `path`, read from the files, with the shape and type of
            `shape`."""
            return leaves[mesh.dotted(path)].read(shape, stored)

        return jax.tree.map_with_path(read, shapes)


def save(format_: Format, model: Any, path: str | os.PathLike[str]) -> str:
    """Writes `model` into the folder `path`, and returns a message that says what the folder holds.
    `gpt2.save` is this function for one family; its docstring lists the errors.
    """
    folder, name = Path(path), f"{format_.name}.save"
    if folder.suffix == ".safetensors" or folder.is_file():
        raise ValueError(
            f"{name} needs a folder, for {CONFIG} and {WEIGHTS}; got the file {folder}. Pass its "
            "folder."
        )
    arrays = _tensors(format_, model)  # by their names in the file
    numbers, origin = format_.numbers(model.config), model.config.origin
    widest = _widest({array.dtype for array in arrays.values()}).name
    fields = format_.fields.write(numbers, origin.fields, widest)
    texts = {CONFIG: fields}  # the JSON files, by name
    if origin.generation is not None:
        texts[GENERATION] = json.loads(origin.generation)
    tokenizer = origin.tokenizer_files()
    # Files that an earlier save wrote. If this save does not write them, they would not fit the new
    # model and are removed, but a tokenizer stays if the model comes without one.
    earlier = tensors.wrote(folder / WEIGHTS)
    gone = earlier & {GENERATION, *(TOKENIZER if tokenizer else ())}
    stay = {name for name in earlier & {*TOKENIZER} - gone if (folder / name).is_file()}
    # The metadata lists these files, so a later save can remove those that it does not write again.
    written_too = sorted({*texts, *(file.name for file in tokenizer), *stay} - {CONFIG})
    metadata = {
        # transformers refuses a file without a format that it knows.
        "format": "pt",
        MEANT: format_.fields.fingerprint(numbers),
        WROTE: json.dumps(written_too),
    }
    safetensors = tensors.library()
    try:
        with replacing(folder, last=CONFIG, gone=gone) as new:
            for file_name, content in texts.items():
                (new / file_name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
            safetensors.numpy.save_file(arrays, new / WEIGHTS, metadata=metadata)
            # safetensors leaves a file that only its owner can read.
            shutil.copymode(new / CONFIG, new / WEIGHTS)
            for file in tokenizer:
                shutil.copyfile(file, new / file.name)
    except (OSError, safetensors.SafetensorError) as error:
        raise OSError(
            f"{name} could not write {folder}: {error}. The files that were there are unchanged. "
            "Free some space on the disk, or choose another folder."
        ) from error
    return _note(folder, tokenizer)


def _note(folder: Path, tokenizer: list[Path]) -> str:
    """Returns a message that says what `folder` holds after a save. `tokenizer` has the files of
    the tokenizer that came with the model; it is empty if the model came without a tokenizer.
    """
    if tokenizer:
        names = ", ".join(file.name for file in tokenizer)
        return f"{folder} holds the model, and the tokenizer of {tokenizer[0].parent}: {names}."
    if any((folder / name).is_file() for name in TOKENIZER):
        return (
            f"{folder} holds the model. The files of a tokenizer were there before, and are as "
            "they were."
        )
    return (
        f"{folder} holds the model and no tokenizer. Copy the files of yours there, or "
        "transformers makes an empty one."
    )


def _widest(dtypes: set[np.dtype]) -> np.dtype:
    """Returns the smallest floating-point type that represents all numbers of these types."""
    size = max(dtype.itemsize for dtype in dtypes)
    largest = [dtype for dtype in dtypes if dtype.itemsize == size]
    # float16 and bfloat16 do not contain each other, so their common type is float32.
    return largest[0] if len(largest) == 1 else np.dtype(np.float32)


def _tensors(format_: Format, model: Any) -> dict[str, np.ndarray]:
    """Returns the tensors of a whole model, by their names in the file. Raises `ValueError` for a
    model that `load` could not load again.
    """
    name = f"{format_.name}.save"
    config = getattr(model, "config", None)
    if not isinstance(config, format_.config):
        raise ValueError(
            f"{name} needs a {format_.name} model, with its configuration; got a "
            f"{type(model).__name__}."
        )
    leaves = format_.leaves(config)
    needed = {
        mesh.dotted(path): leaf
        for path, leaf in jax.tree.leaves_with_path(format_.shapes(config, np.dtype(np.float32)))
    }
    given = {mesh.dotted(path): leaf for path, leaf in jax.tree.leaves_with_path(model)}
    if differ := sorted(needed.keys() ^ given.keys()):
        has = "has no array" if differ[0] in needed else "has an unexpected array"
        raise ValueError(
            f"{name}: the model {has} at {differ[0]} (leaves that differ: {len(differ)}). Save the "
            "whole model, with the leaves that its config describes."
        )
    arrays: dict[str, np.ndarray] = {}
    for path, leaf in leaves.items():
        # A tensor outside of the base model, such as the head's, has no prefix such as "model.".
        prefix = "" if leaf.outside else format_.prefix
        for tensor, part in leaf.write(_array(name, path, given[path], needed[path].shape)):
            arrays[f"{prefix}{tensor}"] = part
    return arrays


def _array(name: str, path: str, leaf: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Returns `leaf`, which the model has at `path`, as a NumPy array in the host's memory. Raises
    `ValueError` if the leaf is not an array of this shape and of a type in `TYPES`, or if this
    process does not have all its values.
    """
    if isinstance(leaf, Tracer) or not isinstance(leaf, jax.Array | np.ndarray):
        raise ValueError(
            f"{name}: {path} must be an array of numbers; it is a {type(leaf).__name__}. Save "
            "outside of jax.jit."
        )
    if leaf.shape != shape:
        raise ValueError(
            f"{name}: {path} must be of shape {shape} by the model's config; it is {leaf.shape}. "
            "Save the whole model, outside "
            f"of mesh.spmd and of pipeline stages."
        )
    if leaf.dtype not in TYPES:
        raise ValueError(
            f"{name}: {path} must be one of {TYPE_NAMES}; it is {leaf.dtype}. Cast it."
        )
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        raise ValueError(
            f"{name}: {path} is deleted: a step that donates its state took this array. Save the "
            "state that the step returned."
        )
    if (
        isinstance(leaf, jax.Array)
        and not leaf.is_fully_addressable
        and not leaf.is_fully_replicated
    ):
        raise ValueError(
            f"{name}: {path} is on devices of other processes too. Gather the model first: "
            f"jax.experimental.multihost_utils.process_allgather(model, tiled=True)."
        )
    return np.asarray(leaf)


def _check_dtype(format_: Format, dtype: Any) -> np.dtype:
    """Returns `dtype` as a NumPy dtype. Raises `ValueError` for a type that is not in `TYPES`, and
    for float64 if JAX's option `jax_enable_x64` is off.
    """
    try:
        checked = jnp.dtype(dtype)
    except TypeError:
        checked = None
    if checked is None or checked not in TYPES:
        got = repr(dtype) if checked is None else checked.name
        raise ValueError(f"{format_.name}.load needs a dtype among {TYPE_NAMES}; got {got}.")
    if checked == jnp.float64 and not jax.config.read("jax_enable_x64"):
        raise ValueError(
            f"{format_.name}.load: dtype=float64 needs the option jax_enable_x64, which is off. "
            "Call jax.config.update('jax_enable_x64', True), or use float32."
        )
    return checked
