"""Tensors in safetensors files, read by their headers: what a folder holds, before a number of it
is read.
"""

import contextlib
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from parallax.models.files.json_file import read_json, short

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS = {"F16": jnp.float16, "BF16": jnp.bfloat16, "F32": jnp.float32, "F64": jnp.float64}
MERGE = "Merge it into its model first: peft's merge_and_unload(), then save_pretrained(folder)."
# In a file's metadata: the fingerprint of the configuration that its weights belong to, and the
# files that were saved beside it,
# which a later save may remove.
MEANT, WROTE = "parallax.configuration", "parallax.beside"


@dataclass(frozen=True)
class Leaf:
    """A leaf of a model as tensors of a file: one, or one for each layer (and each expert), which
    the leaf has as first dims.

    Args:
        name: of the tensors, with a word in braces for each of `over`: `h.{layer}.ln_1.weight`.
        shape: of each tensor in the file. The leaf has the same numbers in the same order, and may
            end in more, which are 0.
        over: how many there are of each word, in the order of the leaf's first dims.
        transposed: the file has the tensor as [out, in], and the leaf as [in, out].
        copies: other names under which a file may hold the same tensor once more: a tied head.
        outside: the name is whole, without the family's prefix.
    """

    name: str
    shape: tuple[int, ...]
    over: tuple[tuple[str, int], ...] = ()
    transposed: bool = False
    copies: tuple[str, ...] = ()
    outside: bool = False

    @property
    def count(self) -> int:
        """How many tensors there are."""
        return math.prod(size for _, size in self.over)

    def names(self) -> Iterator[str]:
        """Returns the names of the tensors, in the order of the leaf."""
        words = [word for word, _ in self.over]
        for places in itertools.product(*(range(size) for _, size in self.over)):
            yield self.name.format(**dict(zip(words, places, strict=True)))

    def read(self, like: Any, stored: Mapping[str, "Stored"]) -> jax.Array:
        """Returns the leaf, in the type and shape of `like`. Raises `ValueError` where a number is
        beyond its type.
        """
        array = np.zeros(like.shape, like.dtype)
        parts = array.reshape(self.count, -1)
        for part, name in zip(parts, self.names(), strict=True):
            part[: math.prod(self.shape)] = self._turned(stored[name].cast(like.dtype)).reshape(-1)
        return jnp.asarray(array)

    def write(self, array: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        """Returns the tensors of the leaf `array`, by name."""
        shape = self.shape[::-1] if self.transposed else self.shape
        parts = np.ascontiguousarray(array).reshape(self.count, -1)
        for name, part in zip(self.names(), parts, strict=True):
            yield name, np.ascontiguousarray(self._turned(part[: math.prod(shape)].reshape(shape)))

    def _turned(self, tensor: np.ndarray) -> np.ndarray:
        return tensor.T if self.transposed else tensor


class Stored(NamedTuple):
    """One tensor of an opened file; `name` is the one it has there."""

    name: str
    file: Path
    handle: Any

    @property
    def place(self) -> str:
        """The file and the tensor, for errors."""
        return f"{self.file}: {self.name}"

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the file's header."""
        return tuple(self.handle.get_slice(self.name).get_shape())

    @property
    def kind(self) -> str:
        """Its type, as the header has it: `F32`."""
        return self.handle.get_slice(self.name).get_dtype()

    def array(self) -> np.ndarray:
        """Returns its numbers."""
        return self.handle.get_tensor(self.name)

    def cast(self, dtype: Any) -> np.ndarray:
        """Returns its numbers in `dtype`. Raises `ValueError` where a finite one becomes
        infinite."""
        array = self.array()
        with np.errstate(over="ignore"):
            result = array.astype(dtype)
        if np.count_nonzero(~np.isfinite(result)) > np.count_nonzero(~np.isfinite(array)):
            raise ValueError(
                f"{self.place} has numbers up to {np.abs(array[np.isfinite(array)]).max():.3g}, "
                f"beyond those of {result.dtype}. Load it in {array.dtype}."
            )
        return result


def locate(folder: Path) -> tuple[list[Path], Path | None]:
    """Returns the safetensors files of a model in `folder`, and the index that lists them, where
    there are several.

    Raises:
        FileNotFoundError: none is there, or one of those that the index lists is not.
        ValueError: the index is damaged.
    """
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS], None
    index = folder / INDEX
    if not index.is_file():
        present = ", ".join(sorted(file.name for file in folder.iterdir())[:20]) or "nothing"
        raise FileNotFoundError(
            f"a model needs {WEIGHTS} or {INDEX} in {folder}; it holds {present}. Other formats "
            "can be converted with transformers: "
            "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder)."
        )
    files = [folder / name for name in sorted(set(weight_map(index).values()))]
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(
                f"{index} lists {file.name}, and there is no such file beside it. Copy it there."
            )
    return files, index


def weight_map(index: Path) -> dict[str, str]:
    """Returns which file beside `index` holds which tensor. Raises `ValueError` where it says
    something else.
    """
    names = read_json(index).get("weight_map")
    again = "Copy or download it again."
    if not isinstance(names, dict) or not names:
        raise ValueError(
            f"{index} needs a 'weight_map' from tensors to files; got {short(names)}. {again}"
        )
    for tensor, name in names.items():
        if not isinstance(name, str) or not re.fullmatch(
            r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}", name
        ):
            raise ValueError(
                f"{index}: {short(tensor)} needs the name of a file beside it; got {short(name)}. "
                f"{again}"
            )
    return names


def opened(
    stack: contextlib.ExitStack, files: list[Path], index: Path | None, prefix: str, no_weights: str
) -> dict[str, Stored]:
    """Returns the tensors in all the files by their name without `prefix`; those whose name matches
    `no_weights` are left out.

    Raises:
        ValueError: a file is no whole safetensors file, holds a tensor twice, or holds other
            tensors than the index says.
    """
    safetensors = library()
    listed: dict[str, set[str]] = {}
    for name, file in ({} if index is None else weight_map(index)).items():
        listed.setdefault(file, set()).add(name)
    stored: dict[str, Stored] = {}
    for file in files:
        try:
            handle = stack.enter_context(safetensors.safe_open(file, framework="numpy"))
        except (safetensors.SafetensorError, OSError) as error:
            raise ValueError(
                f"{file} is not a whole safetensors file ({str(error)[:200]}). Copy or download it "
                "again."
            ) from error
        wrong = sorted(set(handle.keys()) ^ listed[file.name]) if index else []
        if wrong:
            raise ValueError(
                f"{file} and {index} must name the same tensors; {some(wrong)} in only one of "
                "them. Copy both again."
            )
        for name in handle.keys():  # noqa: SIM118 (a handle is no dict)
            plain = name.removeprefix(prefix)
            if plain in stored:
                raise ValueError(
                    f"{file} holds both {name} and {stored[plain].name}: the same tensor twice. "
                    "Remove one."
                )
            if not re.fullmatch(no_weights, plain):
                stored[plain] = Stored(name, file, handle)
    return stored


def wrote(weights: Path) -> set[str]:
    """Returns the names of the files that a save of ours wrote beside `weights`; none where it was
    another program that wrote them.
    """
    if not weights.is_file():
        return set()
    safetensors = library()
    with contextlib.suppress(safetensors.SafetensorError, OSError, ValueError, RecursionError):
        with safetensors.safe_open(weights, framework="numpy") as file:
            names = json.loads((file.metadata() or {}).get(WROTE, "[]"))
        return (
            {name for name in names if isinstance(name, str)} if isinstance(names, list) else set()
        )
    return set()


def check_meant(stored: Mapping[str, Stored], fingerprint: str, config: Path) -> None:
    """Refuses weights that were saved with another configuration than `config`, where they say so:
    a copy that was cut off.
    """
    for handle, file in {(tensor.handle, tensor.file) for tensor in stored.values()}:
        meant = (handle.metadata() or {}).get(MEANT)
        if meant not in (None, fingerprint):
            raise ValueError(
                f"{file} was saved with another configuration than {config} states: a copy was cut "
                "off, or a size was changed by hand. Save or copy both again."
            )


def check(
    stored: Mapping[str, Stored], leaves: Mapping[str, Leaf], config: Path, what: str
) -> None:
    """Refuses files that do not hold exactly the tensors of `leaves`. Reads no numbers but those of
    copies.

    Args:
        stored: the tensors there.
        leaves: the table of the model.
        config: the file that asks for them, for errors.
        what: the model and its sizes, in words: "GPT-2 of n_layer=3, n_head=2".
    """
    asked = f"a {what}, as {config} says it is"
    count = sum(leaf.count for leaf in leaves.values())
    if count > 4 * len(stored) + 10_000:  # which nobody waits for, name by name
        raise ValueError(
            f"{_files_of(stored)}: there are {len(stored)} tensors; needed {count} for {asked}. "
            "Correct the sizes there."
        )
    needed = {name: leaf for leaf in leaves.values() for name in leaf.names()}
    copies = {name: leaf for leaf in leaves.values() for name in leaf.copies}
    for name, leaf in copies.items():
        if name in stored and leaf.name not in stored:
            raise ValueError(
                f"{stored[name].place} is there, and {leaf.name} is not, of which it is a copy in "
                f"{asked}. Store it under that name."
            )
    _check_names(stored, needed, copies, asked, f"{config} asks for: {what}")
    for name, tensor in stored.items():
        _check_one(tensor, (needed.get(name) or copies[name]).shape, asked)
    for name, leaf in copies.items():
        if name in stored and not np.array_equal(
            stored[name].array(), stored[leaf.name].array(), equal_nan=True
        ):
            raise ValueError(
                f"{stored[name].place} must equal {stored[leaf.name].name}, since this model's "
                "head is its embedding transposed; it differs. An untied head cannot be loaded."
            )


def _check_names(
    stored: Mapping[str, Stored],
    needed: Mapping[str, Leaf],
    copies: Mapping[str, Leaf],
    asked: str,
    asks: str,
) -> None:
    """Refuses tensors of an adapter, a missing tensor, and one that the model does not have."""
    files = _files_of(stored)
    if adapters := [
        tensor.name
        for tensor in stored.values()
        if re.search(r"\.lora_|\.base_layer\.", tensor.name)
    ]:
        raise ValueError(f"{files}: {some(adapters)} of an adapter (LoRA). {MERGE}")
    if missing := [name for name in needed if name not in stored]:
        raise ValueError(
            f"{files}: the tensor {some(missing)} missing, which {asks}. Correct it, or copy or "
            "download the weights again."
        )
    if extra := [
        tensor.name for name, tensor in stored.items() if name not in needed and name not in copies
    ]:
        raise ValueError(
            f"{files}: the tensor {some(extra)} no part of {asked}. Correct it, or remove what was "
            "added."
        )


def _files_of(stored: Mapping[str, Stored]) -> str:
    """Returns the names of the files that the tensors are in."""
    files = sorted({str(tensor.file) for tensor in stored.values()})
    return ", ".join(files) or "the safetensors file"


def _check_one(tensor: Stored, shape: tuple[int, ...], asked: str) -> None:
    """Refuses a tensor of another shape than the model's, or of no floating-point type."""
    if tensor.shape != shape:
        raise ValueError(
            f"{tensor.place} must be of shape {shape} in {asked}; it is {short(tensor.shape)}. "
            "Correct the sizes there, or use the weights that belong to it."
        )
    if tensor.kind not in FLOATS:
        raise ValueError(
            f"{tensor.place} must be one of {', '.join(FLOATS)}; it is {tensor.kind}. Convert it "
            "before."
        )


def library() -> Any:
    """Returns the package safetensors. Raises `ImportError` where it is not installed."""
    try:
        import safetensors.numpy
    except ImportError as error:
        raise ImportError(
            "Reading and writing weights need safetensors. Run: pip install -e '.[hub]'."
        ) from error
    return safetensors


def some(names: list[str]) -> str:
    """Returns the first of the names, how many more there are, and a verb."""
    first = names[0] if len(names[0]) <= 200 and names[0].isprintable() else short(names[0])
    return f"{first} is" if len(names) == 1 else f"{first} (and {len(names) - 1} more) is"
