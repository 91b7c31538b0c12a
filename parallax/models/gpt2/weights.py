"""GPT-2's weights in Hugging Face's layout: a folder with `config.json` and safetensors, read and written leaf by leaf.

A tensor there is a leaf of ours at one layer, the same numbers in the same order: `c_attn`, [D, 3 D], is our [D, 3, H, K].
So nothing is transposed. Only the embedding differs, by the rows that pad our vocabulary, which no file holds.
"""

import contextlib
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from parallax import mesh
from parallax.models.gpt2.configuration import fields_of, read_config, read_json
from parallax.models.gpt2.model import GPT2, Config

_CONFIG, _WEIGHTS, _INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"

_MODULES = {  # ours: theirs
    "wte": "wte",
    "wpe": "wpe",
    "blocks.attention_norm": "h.{layer}.ln_1",
    "blocks.attention.qkv": "h.{layer}.attn.c_attn",
    "blocks.attention.out": "h.{layer}.attn.c_proj",
    "blocks.mlp_norm": "h.{layer}.ln_2",
    "blocks.mlp.up": "h.{layer}.mlp.c_fc",
    "blocks.mlp.down": "h.{layer}.mlp.c_proj",
    "norm": "ln_f",
}

_FLOATS = {"F16": jnp.float16, "BF16": jnp.bfloat16, "F32": jnp.float32, "F64": jnp.float64}


def load(path: str | os.PathLike[str], *, dtype: Any = jnp.float32, vocabulary_multiple: int = 128) -> GPT2:
    """The GPT-2 at `path`, with its weights in `dtype`, on JAX's default device.

    Leaves are read one at a time: beside the model there is never more than one of them in memory. To put the model on a
    mesh of smaller devices, read it into the host's memory and send each device its part:

        with jax.default_device(jax.devices("cpu")[0]):
            model = gpt2.load("gpt2")
        model = mesh.place(model, rules.specs(model, gpt2.rules("tensor"), mesh_), mesh_)

    Args:
        path: a folder with `config.json` and either `model.safetensors` or the shards that `model.safetensors.index.json`
            lists; or one safetensors file with `config.json` beside it; or, where a string names nothing here, a model of the
            Hugging Face hub, such as "gpt2".
        dtype: what the weights become, whatever they are stored as.
        vocabulary_multiple: the embedding gets rows of zeros up to a multiple of it, as in `Config`.

    Raises:
        FileNotFoundError: a file is missing, or the hub did not give the model.
        ImportError: the extra `hub` is not installed.
        ValueError: a file is damaged, or a field or tensor is missing, unexpected or of another shape, or this model has no
            code for it. One changed bit inside a tensor is not noticed: the format carries no checksum.
    """
    dtype = _checked(dtype)
    config_file, index_file, files = _files(path)
    config = read_config(config_file, vocabulary_multiple)
    with contextlib.ExitStack() as opened:
        stored = _open(opened, files, index_file)
        _check_stored(stored, config, config_file)
        leaves = {leaf.path: leaf for leaf in _leaves(config)}
        return jax.tree.map_with_path(lambda path, shape: _read(leaves[mesh.dotted(path)], shape, stored), _shapes(config, dtype))


def save(model: GPT2, path: str | os.PathLike[str]) -> None:
    """Write `model` into the folder `path`, for `load` and for `transformers.GPT2LMHeadModel.from_pretrained`.

    Each leaf keeps its dtype. New files take the place of old ones only once they are whole and on the disk, the weights
    before the configuration: a save that fails leaves what was there. On several processes, gather the model first
    (`jax.experimental.multihost_utils.process_allgather(model, tiled=True)`), and let one process save.

    Raises:
        ImportError: the extra `hub` is not installed.
        ValueError: `path` is a file; or a leaf has another shape than the configuration says, as in a shard or a stage; or it
            is of a type that `load` would not take.
    """
    folder = Path(path)
    if folder.suffix == ".safetensors" or folder.is_file():
        raise ValueError(f"gpt2.save needs a folder, for {_CONFIG} and {_WEIGHTS}; got the file {folder}. Pass its folder.")
    safetensors = _safetensors()
    tensors = _tensors(model)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".saving-", dir=folder) as unfinished:
        config, weights = Path(unfinished, _CONFIG), Path(unfinished, _WEIGHTS)
        fields = fields_of(model.config, tensors["transformer.wte.weight"].dtype)
        config.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
        safetensors.numpy.save_file(tensors, weights, metadata={"format": "pt"})
        shutil.copymode(config, weights)  # safetensors leaves its file readable by its owner alone
        for file in (weights, config):
            with file.open("r+b") as opened:
                os.fsync(opened.fileno())
        for file in (weights, config):
            os.replace(file, folder / file.name)


class _Leaf(NamedTuple):
    """A leaf of the model: its path, and the names and the one shape of the tensors that it is stored as, one a layer."""

    path: str
    names: list[str]
    shape: tuple[int, ...]

    @property
    def stacked(self) -> bool:
        return self.path.startswith("blocks.")


def _leaves(config: Config) -> list[_Leaf]:
    D = config.width
    shapes = {  # of the tensors; those not named here are of shape [D]
        "wte.weight": (config.vocabulary, D),
        "wpe.weight": (config.context, D),
        "blocks.attention.qkv.weight": (D, 3 * D),
        "blocks.attention.qkv.bias": (3 * D,),
        "blocks.attention.out.weight": (D, D),
        "blocks.mlp.up.weight": (D, 4 * D),
        "blocks.mlp.up.bias": (4 * D,),
        "blocks.mlp.down.weight": (4 * D, D),
    }
    leaves = []
    for ours, theirs in _MODULES.items():
        bare = ours in ("wte", "wpe")
        for kind in ("weight",) if bare else ("weight", "bias"):
            layers = range(config.layers if ours.startswith("blocks.") else 1)
            names = [f"{theirs.format(layer=layer)}.{kind}" for layer in layers]
            leaves.append(_Leaf(ours if bare else f"{ours}.{kind}", names, shapes.get(f"{ours}.{kind}", (D,))))
    return leaves


def _shapes(config: Config, dtype: np.dtype) -> GPT2:
    return eqx.filter_eval_shape(lambda: GPT2(config, key=jax.random.key(0), dtype=dtype))


def _checked(dtype: Any) -> np.dtype:
    dtype = jnp.dtype(dtype)
    if dtype not in map(jnp.dtype, _FLOATS.values()):
        raise ValueError(f"gpt2.load needs a dtype among float16, bfloat16, float32 and float64; got {dtype}.")
    if dtype == jnp.float64 and not jax.config.read("jax_enable_x64"):
        raise ValueError("gpt2.load: dtype=float64 needs jax.config.update('jax_enable_x64', True); it is off.")
    return dtype


# Finding and opening


def _files(path: str | os.PathLike[str]) -> tuple[Path, Path | None, list[Path]]:
    """The configuration, the index of shards where there is one, and the safetensors files."""
    place = Path(path)
    if place.is_file():
        if place.suffix != ".safetensors":
            raise ValueError(f"gpt2.load needs a folder or a .safetensors file; got the file {place}. Pass its folder.")
        return place.with_name(_CONFIG), None, [place]
    if not place.is_dir():
        if not isinstance(path, str) or not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", path) or path.endswith(".safetensors"):
            raise FileNotFoundError(f"gpt2.load: there is no file or folder {os.fspath(path)}. Correct the path.")
        place = _download(path)
    if (place / _WEIGHTS).is_file():
        return place / _CONFIG, None, [place / _WEIGHTS]
    index = place / _INDEX
    if not index.is_file():
        found = ", ".join(sorted(file.name for file in place.iterdir())) or "nothing"
        raise FileNotFoundError(
            f"gpt2.load needs {_WEIGHTS} or {_INDEX} in {place}; it holds {found}. Other formats can be converted with "
            f"transformers: GPT2LMHeadModel.from_pretrained(folder).save_pretrained(folder)."
        )
    return place / _CONFIG, index, [index.with_name(name) for name in sorted(set(_weight_map(index).values()))]


def _weight_map(index: Path) -> dict[str, str]:
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise ValueError(f"{index} needs a 'weight_map' from tensors to files; got {names!r}. Copy or download it again.")
    return names


def _download(name: str) -> Path:
    try:
        import huggingface_hub  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError(
            f"gpt2.load: there is no folder {name!r} here, and asking the Hugging Face hub for a model of that name needs "
            f"huggingface_hub. Correct the path, or pip install 'parallax-jax[hub]'."
        ) from error
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=[_CONFIG, _INDEX, "model*.safetensors"]))
    except Exception as error:  # whatever the hub's client raises, of its own or of the library under it
        raise FileNotFoundError(
            f"gpt2.load: there is no folder {name!r} here, and the Hugging Face hub did not give a model of that name: "
            f"{type(error).__name__}: {error} Correct the path or name, or load a folder that was downloaded before."
        ) from error


def _safetensors() -> Any:
    try:
        import safetensors.numpy
    except ImportError as error:
        raise ImportError("gpt2.load and gpt2.save need safetensors. Run: pip install 'parallax-jax[hub]'.") from error
    return safetensors


class _Stored(NamedTuple):
    """One tensor of an opened file; `name` is the one it has there."""

    name: str
    file: Path
    handle: Any

    @property
    def place(self) -> str:
        return f"{self.file}: {self.name}"

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.handle.get_slice(self.name).get_shape())

    def array(self) -> np.ndarray:
        return self.handle.get_tensor(self.name)


def _open(opened: contextlib.ExitStack, files: list[Path], index: Path | None) -> dict[str, _Stored]:
    """The tensors in all the files by their name without "transformer.", the masks of old checkpoints left out."""
    safetensors = _safetensors()
    listed = {} if index is None else _weight_map(index)
    stored: dict[str, _Stored] = {}
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(f"{index} lists {file.name}, and there is no such file beside it. Copy it there.")
        try:
            handle = opened.enter_context(safetensors.safe_open(file, framework="numpy"))
        except safetensors.SafetensorError as error:
            raise ValueError(f"{file} is not a whole safetensors file ({error}). Copy or download it again.") from error
        wrong = sorted(set(handle.keys()) ^ {name for name in listed if listed[name] == file.name}) if index else []
        if wrong:
            raise ValueError(
                f"{file} and {index} must name the same tensors; {_some(wrong)} only one of them has. Copy both again."
            )
        for name in handle.keys():  # noqa: SIM118 (a handle is no dict)
            short = name.removeprefix("transformer.")
            if short in stored:
                raise ValueError(f"{file} holds both {name} and {stored[short].name}: the same tensor twice. Remove one.")
            if not re.fullmatch(r"h\.\d+\.attn\.(masked_)?bias", short):
                stored[short] = _Stored(name, file, handle)
    return stored


def _check_stored(stored: dict[str, _Stored], config: Config, config_file: Path) -> None:
    """Refuse files that do not hold exactly the tensors of `config`. Reads no numbers but those of a head."""
    shapes = {name: leaf.shape for leaf in _leaves(config) for name in leaf.names}
    files = ", ".join(sorted({str(tensor.file) for tensor in stored.values()})) or "the safetensors file"
    if missing := [name for name in shapes if name not in stored]:
        raise ValueError(
            f"{files}: the tensor {_some(missing)} missing, which {config_file} asks for with n_layer={config.layers}. "
            f"Correct n_layer, or copy or download the weights again."
        )
    if extra := [tensor.name for name, tensor in stored.items() if name not in shapes and name != "lm_head.weight"]:
        raise ValueError(
            f"{files}: the tensor {_some(extra)} no part of a GPT-2 of n_layer={config.layers}, as {config_file} says it "
            f"is. Correct n_layer, or remove what was added."
        )
    for name, tensor in stored.items():
        needed = shapes.get(name, shapes["wte.weight"])
        if tensor.shape != needed:
            raise ValueError(
                f"{tensor.place} must be of shape {needed} by {config_file}; it is {tensor.shape}. "
                f"Correct the sizes there, or take the weights that belong to it."
            )
        kind = tensor.handle.get_slice(tensor.name).get_dtype()
        if kind not in _FLOATS:
            raise ValueError(f"{tensor.place} must be one of {', '.join(_FLOATS)}; it is {kind}. Convert it before.")
    if (head := stored.get("lm_head.weight")) and not np.array_equal(head.array(), stored["wte.weight"].array()):
        raise ValueError(
            f"{head.place} must equal {stored['wte.weight'].name}, since this model's head is its embedding transposed; "
            f"it differs. An untied head cannot be loaded."
        )


def _read(leaf: _Leaf, like: jax.ShapeDtypeStruct, stored: dict[str, _Stored]) -> jax.Array:
    array = np.zeros(like.shape, like.dtype)
    for part, name in zip(array if leaf.stacked else array[None], leaf.names, strict=True):
        part.reshape(-1)[: math.prod(leaf.shape)] = stored[name].array().reshape(-1)
    return jnp.asarray(array)


def _tensors(model: GPT2) -> dict[str, np.ndarray]:
    needed = dict(_with_paths(_shapes(model.config, jnp.dtype(jnp.float32))))
    given = dict(_with_paths(model))
    tensors = {}
    for path, names, shape in _leaves(model.config):
        array = given[path]
        if array.shape != needed[path].shape:
            raise ValueError(
                f"gpt2.save: {path} must be of shape {needed[path].shape} by the model's config; it is {array.shape}. "
                f"Save the whole model, outside of mesh.spmd and of pipeline stages."
            )
        if array.dtype not in map(jnp.dtype, _FLOATS.values()):
            raise ValueError(f"gpt2.save: {path} must be float16, bfloat16, float32 or float64; it is {array.dtype}. Cast it.")
        parts = np.ascontiguousarray(array).reshape(len(names), -1)
        tensors |= {
            f"transformer.{name}": part[: math.prod(shape)].reshape(shape) for name, part in zip(names, parts, strict=True)
        }
    return tensors


def _with_paths(model: GPT2) -> Iterable[tuple[str, Any]]:
    return ((mesh.dotted(path), leaf) for path, leaf in jax.tree.leaves_with_path(model))


def _some(names: list[str]) -> str:
    return f"{names[0]} is" if len(names) == 1 else f"{names[0]} (and {len(names) - 1} more) is"
