"""The tensors of a model in safetensors files. The names, shapes and types of the tensors are read
from the files' headers and checked before any number is read.

A *leaf* is an array of the model in memory. A leaf is stored as one tensor, or as one tensor for
each layer; `count` is the number of its tensors. `_turned` transposes a tensor whose dims have
another order in the file than in memory.
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
# Keys of a file's metadata: the fingerprint of the configuration that its weights belong to, and
# the files that were saved in the same folder, which a later save may remove.
MEANT, WROTE = "parallax.configuration", "parallax.beside"


@dataclass(frozen=True)
class Leaf:
    """The tensors in which a file stores a leaf of the model: one tensor, or one for each layer
    (and each expert). Layers and experts are the first dims of the leaf.

    Args:
        name: the name of the tensors, with a word in braces for each entry of `over`, such as
            `h.{layer}.ln_1.weight`.
        shape: the shape of each tensor in the file. The leaf has the same elements as its tensors,
            in the same order unless `transposed`, and may have zeros after them as padding.
        over: each word in braces, with the number of values that the word takes, such as
            `(("layer", 12),)` for the layers 0 to 11. The values of the first word are the places
            along the leaf's first dim, those of the second word the places along the second dim.
        transposed: whether the dims are [out, in] in the file, and [in, out] in the leaf.
        copies: other names under which a file may hold a copy of the tensor. A head that is tied to
            the embedding is such a copy.
        outside: whether files write the name as it is here, without the family's prefix before it.
    """

    name: str
    shape: tuple[int, ...]
    over: tuple[tuple[str, int], ...] = ()
    transposed: bool = False
    copies: tuple[str, ...] = ()
    outside: bool = False

    @property
    def count(self) -> int:
        """The number of tensors of the leaf."""
        return math.prod(size for _, size in self.over)

    def names(self) -> Iterator[str]:
        """Yields the names of the tensors, layer by layer, and in each layer expert by expert, in
        the order of the leaf's first dims.
        """
        words = [word for word, _ in self.over]
        for places in itertools.product(*(range(size) for _, size in self.over)):
            yield self.name.format(**dict(zip(words, places, strict=True)))

    def read(self, like: Any, stored: Mapping[str, "Stored"]) -> jax.Array:
        """Returns the leaf, in the type and shape of `like`, from its tensors in the dict `stored`.

        Raises `ValueError` if a number is too large for the type.
        """
        array = np.zeros(like.shape, like.dtype)  # the last numbers may be padding, and stay 0
        # A row for each tensor of the leaf. It is a view: the loop writes into `array`.
        parts = array.reshape(self.count, -1)
        for part, name in zip(parts, self.names(), strict=True):
            part[: math.prod(self.shape)] = self._turned(stored[name].cast(like.dtype)).reshape(-1)
        return jnp.asarray(array)

    def write(self, array: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        """Yields the name and the value of each tensor of the leaf `array`, without padding."""
        # `self.shape` is the shape in the file; this is the shape in memory, without padding.
        shape = self.shape[::-1] if self.transposed else self.shape
        # A row for each tensor: first the tensor's elements, then the padding, if there is any.
        parts = np.ascontiguousarray(array).reshape(self.count, -1)
        for name, part in zip(self.names(), parts, strict=True):
            yield name, np.ascontiguousarray(self._turned(part[: math.prod(shape)].reshape(shape)))

    def _turned(self, tensor: np.ndarray) -> np.ndarray:
        """Returns the tensor, transposed if the file and the leaf have the dims in different
        orders.
        """
        return tensor.T if self.transposed else tensor


class Stored(NamedTuple):
    """One tensor of an opened safetensors file.

    Attributes:
        name: the name of the tensor in the file.
        file: the path of the file.
        handle: the opened file, as `safetensors.safe_open` returns it.
    """

    name: str
    file: Path
    handle: Any

    @property
    def place(self) -> str:
        """The file and the tensor, for errors."""
        return f"{self.file}: {self.name}"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor, from the file's header."""
        return tuple(self.handle.get_slice(self.name).get_shape())

    @property
    def kind(self) -> str:
        """The type of the tensor as the header names it, such as `F32`."""
        return self.handle.get_slice(self.name).get_dtype()

    def array(self) -> np.ndarray:
        """Reads and returns the tensor."""
        return self.handle.get_tensor(self.name)

    def cast(self, dtype: Any) -> np.ndarray:
        """Returns the tensor in `dtype`. Raises `ValueError` if a finite number becomes
        infinite."""
        array = self.array()
        with np.errstate(over="ignore"):
            result = array.astype(dtype)
        # The file may have infinite numbers; only new ones are an error.
        if np.count_nonzero(~np.isfinite(result)) > np.count_nonzero(~np.isfinite(array)):
            raise ValueError(
                f"{self.place} has numbers up to {np.abs(array[np.isfinite(array)]).max():.3g}, "
                f"beyond those of {result.dtype}. Load it in {array.dtype}."
            )
        return result


def locate(folder: Path) -> tuple[list[Path], Path | None]:
    """Returns the safetensors files of a model in `folder`, and the index that lists them. If the
    folder has a file `model.safetensors`, returns only this file, and None as the index. An index
    in the folder is then ignored: transformers also takes this file first.

    Raises:
        FileNotFoundError: there is no file, or a file that the index lists is missing.
        ValueError: the index is damaged.
    """
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS], None
    index = folder / INDEX
    if not index.is_file():
        present = ", ".join(sorted(file.name for file in folder.iterdir())[:20]) or "nothing"
        raise FileNotFoundError(
            f"a model needs {WEIGHTS} or {INDEX} in {folder}; the folder holds {present}. Other "
            "formats can be converted with transformers: "
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
    """Returns a dict from the name of each tensor to the name of the file that holds the tensor.
    The files are beside `index`. Raises `ValueError` if the index is damaged, or names a file in
    another folder.
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
                f"{index}: {short(tensor)} must be in a file beside the index; got the file name "
                f"{short(name)}. {again}"
            )
    return names


def opened(
    stack: contextlib.ExitStack, files: list[Path], index: Path | None, prefix: str, no_weights: str
) -> dict[str, Stored]:
    """Returns the tensors of all files, by their names without `prefix`. Tensors that are no
    weights, such as the causal masks in old files, are left out: their names match the regular
    expression `no_weights`.

    The files stay open until `stack` closes. `index` is the file that lists the tensors; None:
    there is no such file.

    Raises:
        ValueError: a file is not a whole safetensors file; a tensor is stored twice; or a file
            does not hold exactly the tensors that the index lists for this file.
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
        # The names that are in only one of the two files. `some` adds "is": "wte.weight is".
        wrong = sorted(set(handle.keys()) ^ listed[file.name]) if index else []
        if wrong:
            raise ValueError(
                f"{file} and {index} must name the same tensors, but {some(wrong)} in only one of "
                "the two files. Copy both again."
            )
        for name in handle.keys():  # noqa: SIM118 (a handle is no dict)
            plain = name.removeprefix(prefix)
            if plain in stored:
                raise ValueError(
                    f"the tensor {plain} is stored twice: as {stored[plain].name} in "
                    f"{stored[plain].file}, and as {name} in {file}. Remove one of the two."
                )
            if not re.fullmatch(no_weights, plain):
                stored[plain] = Stored(name, file, handle)
    return stored


def wrote(weights: Path) -> set[str]:
    """Returns the names of the files that an earlier `save` wrote beside the file `weights`. The
    metadata of `weights` has these names. The set is empty if `weights` does not exist, is damaged,
    or was written by another program.
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
    """Refuses weights that were saved with another configuration than that of the file `config`. An
    interrupted copy may leave such weights. The metadata of a file of weights has the fingerprint
    of their configuration; files of other programs have no fingerprint.
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
    """Refuses files that do not hold exactly the tensors of `leaves`. Besides the headers, only the
    values of copies, such as a tied head, and of their originals are read: a copy must equal its
    original.

    Args:
        stored: the tensors in the files.
        leaves: the table of the model's tensors.
        config: the `config.json` that states the sizes, for errors.
        what: the model and its sizes, for errors: "GPT-2 of n_layer=3, n_head=2".
    """
    asked = f"a {what} (sizes from {config})"  # the model, for errors
    count = sum(leaf.count for leaf in leaves.values())
    if count > 4 * len(stored) + 10_000:  # a wrong size: listing every name would take too long
        raise ValueError(
            f"{_files_of(stored)}: there are {len(stored)} tensors, but {count} are needed for "
            f"{asked}. Correct the sizes in {config.name}."
        )
    needed = {name: leaf for leaf in leaves.values() for name in leaf.names()}
    copies = {name: leaf for leaf in leaves.values() for name in leaf.copies}
    for name, leaf in copies.items():
        if name in stored and leaf.name not in stored:
            raise ValueError(
                f"{leaf.name} is missing, and only its copy is there: {stored[name].place}. In "
                f"{asked}, the two tensors are equal. Store the copy as {leaf.name}."
            )
    _check_names(stored, needed, copies, asked, f"{config} asks for it: {what}")
    for name, tensor in stored.items():
        _check_one(tensor, (needed.get(name) or copies[name]).shape, asked)
    for name, leaf in copies.items():
        if name in stored and not np.array_equal(
            stored[name].array(), stored[leaf.name].array(), equal_nan=True
        ):
            raise ValueError(
                f"{stored[name].place} must equal {stored[leaf.name].name}, since this model's "
                "head is tied to its embedding; the two tensors differ. An untied head cannot be "
                "loaded."
            )


def _check_names(
    stored: Mapping[str, Stored],
    needed: Mapping[str, Leaf],
    copies: Mapping[str, Leaf],
    asked: str,
    asks: str,
) -> None:
    """Raises `ValueError` if the files hold tensors of an adapter, lack a tensor of the model, or
    hold a tensor that the model does not have.

    `needed` is a dict from the name of each tensor of the model to the tensor's leaf. `copies` is a
    dict from each name under which a file may hold a copy of a tensor (`Leaf.copies`) to the
    tensor's leaf. `asked` ("a GPT-2 of ...") and `asks` ("config.json asks for it: GPT-2 of
    ...") describe the model in errors. In the errors below, the verb "is" comes from the function
    `some`: `some(["wte.weight"])` is "wte.weight is".
    """
    files = _files_of(stored)
    if adapters := [
        tensor.name
        for tensor in stored.values()
        if re.search(r"\.lora_|\.base_layer\.", tensor.name)
    ]:
        raise ValueError(f"{files}: {some(adapters)} part of an adapter (LoRA). {MERGE}")
    if missing := [name for name in needed if name not in stored]:
        raise ValueError(
            f"{files}: the tensor {some(missing)} missing, but {asks}. Correct config.json, or "
            "copy or download the weights again."
        )
    if extra := [
        tensor.name for name, tensor in stored.items() if name not in needed and name not in copies
    ]:
        raise ValueError(
            f"{files}: the tensor {some(extra)} no part of {asked}. Correct config.json, or remove "
            "the tensors that were added."
        )


def _files_of(stored: Mapping[str, Stored]) -> str:
    """Returns the names of the files that the tensors are in, for errors."""
    files = sorted({str(tensor.file) for tensor in stored.values()})
    return ", ".join(files) or "the safetensors file"


def _check_one(tensor: Stored, shape: tuple[int, ...], asked: str) -> None:
    """Refuses a tensor that has another shape than `shape`, or a type that is not floating-point.
    `asked` describes the model in errors: "a GPT-2 of n_layer=3 (sizes from config.json)".
    """
    if tensor.shape != shape:
        raise ValueError(
            f"{tensor.place} must be of shape {shape} in {asked}; its shape is "
            f"{short(tensor.shape)}. Correct the sizes in config.json, or use the weights that "
            "belong to this config.json."
        )
    if tensor.kind not in FLOATS:
        raise ValueError(
            f"{tensor.place} must have one of the types {', '.join(FLOATS)}; its type is "
            f"{tensor.kind}. Convert it first."
        )


def library() -> Any:
    """Returns the package safetensors. Raises `ImportError` if it is not installed."""
    try:
        import safetensors.numpy
    except ImportError as error:
        raise ImportError(
            "Reading and writing weights need safetensors. Run: pip install -e '.[hub]'."
        ) from error
    return safetensors


def some(names: list[str]) -> str:
    """Returns a text for an error: the first of `names`, how many others there are, and "is", as in
    "wte.weight (and 2 more) is".
    """
    first = names[0] if len(names[0]) <= 200 and names[0].isprintable() else short(names[0])
    return f"{first} is" if len(names) == 1 else f"{first} (and {len(names) - 1} more) is"
