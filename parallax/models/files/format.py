"""The reader and the writer of a family's models: driven by its `Format`, a record of tables."""

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
from parallax.models.files.fields import Fields
from parallax.models.files.origin import GENERATION, TOKENIZER, Origin
from parallax.models.files.place import CONFIG, place
from parallax.models.files.swap import replacing
from parallax.models.files.tensors import FLOATS, MEANT, WEIGHTS, WROTE, Leaf


@dataclass(frozen=True)
class Format:
    """A family's models in files.

    Args:
        model: the class of the model, made by `model(config, key=key, dtype=dtype)`; its attribute
            `config` is static.
        config: the class of its configuration: the numbers of `fields` by name, and `origin`.
        fields: the table of `config.json`.
        leaves: from a configuration to the table of the tensors, by the path of the leaf in the
            model.
        prefix: what the names of tensors begin with; a file may leave it out.
        no_weights: a pattern of the names of tensors that are no weights, as old files have them.
        module: that has `load` and `save`, for errors, where it has another name than the family's
            `model_type`.
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
        """Of the family: `gpt2`."""
        return self.module or self.fields.model_type

    def numbers(self, config: Any) -> dict[str, Any]:
        """The numbers that a file states, of a configuration."""
        return {name: getattr(config, name) for name in self.fields.numbers}

    def shapes(self, config: Any, dtype: Any) -> Any:
        """The model, as shapes and types."""
        return eqx.filter_eval_shape(lambda: self.model(config, key=jax.random.key(0), dtype=dtype))


def load(
    format_: Format,
    path: str | os.PathLike[str],
    *,
    dtype: Any,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """The model at `path`, with its weights in `dtype`, on JAX's default device: as `gpt2.load`
    says, for any family.

    Args:
        format_: the family's tables.
        path: a folder, a safetensors file, or a name on the hub.
        dtype: of the weights.
        options: arguments of the configuration that no file states.
    """
    dtype = _checked(format_, dtype)
    options = dict(options or {})
    folder, file = place(path, f"{format_.name}.load")
    config_file = folder / CONFIG
    numbers, kept = format_.fields.read(config_file)
    origin = Origin.of(folder, kept)
    try:
        config = format_.config(**numbers, **options, origin=origin)
    except ValueError as error:
        raise format_.fields.blame(error, config_file) from error
    files, index = ([file], None) if file else tensors.locate(folder)
    leaves = format_.leaves(config)
    sizes = [
        f"{number.names[0]}={numbers[name]}"
        for name, number in format_.fields.numbers.items()
        if number.kind is int
    ]
    what = f"{format_.fields.title} of {', '.join(sizes)}"
    with contextlib.ExitStack() as stack:
        stored = tensors.opened(stack, files, index, format_.prefix, format_.no_weights)
        tensors.check_meant(stored, format_.fields.fingerprint(numbers), config_file)
        tensors.check(stored, leaves, config_file, what)
        shapes = format_.shapes(config, dtype)
        return jax.tree.map_with_path(
            lambda path, shape: leaves[mesh.dotted(path)].read(shape, stored), shapes
        )


def save(format_: Format, model: Any, path: str | os.PathLike[str]) -> str:
    """Write `model` into the folder `path`: as `gpt2.save` says, for any family."""
    folder, name = Path(path), f"{format_.name}.save"
    if folder.suffix == ".safetensors" or folder.is_file():
        raise ValueError(
            f"{name} needs a folder, for {CONFIG} and {WEIGHTS}; got the file {folder}. Pass its "
            "folder."
        )
    safetensors = tensors.library()
    found = _tensors(format_, model)
    config, numbers = model.config, format_.numbers(model.config)
    origin: Origin = config.origin
    fields = format_.fields.write(
        numbers, origin.values, _widest({each.dtype for each in found.values()}).name
    )
    tokenizer = origin.tokenizer_files()
    beside = {file.name for file in tokenizer} | (
        {GENERATION} if origin.generation is not None else set()
    )
    gone = tensors.wrote(folder / WEIGHTS) & {GENERATION, *(TOKENIZER if tokenizer else ())}
    try:
        with replacing(folder, last=CONFIG, gone=gone) as new:
            (new / CONFIG).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
            metadata = {
                "format": "pt",
                MEANT: format_.fields.fingerprint(numbers),
                WROTE: json.dumps(sorted(beside)),
            }
            safetensors.numpy.save_file(found, new / WEIGHTS, metadata=metadata)
            shutil.copymode(
                new / CONFIG, new / WEIGHTS
            )  # safetensors leaves its file readable by its owner alone
            if origin.generation is not None:
                (new / GENERATION).write_text(
                    json.dumps(json.loads(origin.generation), indent=2) + "\n", encoding="utf-8"
                )
            for file in tokenizer:
                shutil.copyfile(file, new / file.name)
    except (OSError, safetensors.SafetensorError) as error:
        raise OSError(
            f"{name} could not write {folder}: {error}. What was there before is as it was. Free "
            "some of the disk, or choose "
            f"another folder."
        ) from error
    return _note(folder, tokenizer)


def _note(folder: Path, tokenizer: list[Path]) -> str:
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
    """The type that holds every number of these."""
    size = max(dtype.itemsize for dtype in dtypes)
    largest = [dtype for dtype in dtypes if dtype.itemsize == size]
    return (
        largest[0] if len(largest) == 1 else np.dtype(np.float32)
    )  # of float16 and bfloat16, neither holds the other


def _tensors(format_: Format, model: Any) -> dict[str, np.ndarray]:
    """The tensors of a whole model, by name. Raises `ValueError` for one that could not be
    loaded.
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
        has = "has no array" if differ[0] in needed else "has an array that this model has not"
        raise ValueError(
            f"{name}: the model {has} at {differ[0]} ({len(differ)} in all). Save the whole model, "
            "and no other."
        )
    found: dict[str, np.ndarray] = {}
    for path, leaf in leaves.items():
        prefix = "" if leaf.outside else format_.prefix
        parts = leaf.write(_array(name, path, given[path], needed[path].shape))
        found |= {f"{prefix}{tensor}": part for tensor, part in parts}
    return found


def _array(name: str, path: str, leaf: Any, shape: tuple[int, ...]) -> np.ndarray:
    """A leaf of the model, in the host's memory. Raises `ValueError` for one that is not there, or
    is another.
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
    if leaf.dtype not in map(jnp.dtype, FLOATS.values()):
        raise ValueError(
            f"{name}: {path} must be one of {_float_names()}; it is {leaf.dtype}. Cast it."
        )
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        raise ValueError(
            f"{name}: {path} is deleted: a step that donates its state took it. Save the state "
            "that it gave back."
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


def _checked(format_: Format, dtype: Any) -> np.dtype:
    try:
        found = jnp.dtype(dtype)
    except TypeError as error:
        raise ValueError(
            f"{format_.name}.load needs a dtype among {_float_names()}; got {dtype!r}."
        ) from error
    if found not in map(jnp.dtype, FLOATS.values()):
        raise ValueError(f"{format_.name}.load needs a dtype among {_float_names()}; got {found}.")
    if found == jnp.float64 and not jax.config.read("jax_enable_x64"):
        raise ValueError(
            f"{format_.name}.load: dtype=float64 needs jax.config.update('jax_enable_x64', True), "
            "which is off. Or take float32."
        )
    return found


def _float_names() -> str:
    return ", ".join(jnp.dtype(each).name for each in FLOATS.values())
