"""Text as whole numbers in files: token files, read piece by piece, and their two parts, to train on and to hold out.

    text.bin            the tokens, with nothing before or after them: two bytes each, or four where V > 65,536 (nanoGPT's `.bin`)
    text.bin.json       its record: the vocabulary that they were written with, their type, how many bytes they are, the sha256
    text.bin.checked    that a reader found all that to be so, and which size and time the file had then

Records, and the manifests of `shards`, state the number of their format; every format released so far is read:

1    without a number, a type, and a hash in the record
2    with them

Legend: V vocabulary.
"""

import contextlib
import hashlib
import os
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, SupportsIndex, TypeVar, runtime_checkable

import numpy as np
from jaxtyping import Integer

from parallax import argument_checks
from parallax.data import manifest
from parallax.data.token_file import File, state_of

MOST = 1 << 31  # tokens on devices are int32
FORMAT = 2
CHUNK = 1 << 19  # tokens checked at a time; an even number
UPPER = 64  # of tokens of four bytes read as two, the upper halves are below
SETTLED = 2.0  # seconds after which a file that changes again has another time, on the coarsest file systems
Tokens = Integer[np.ndarray, "_"]  # any number of them: train and held_out differ
Text = TypeVar("Text", np.ndarray, File)


@runtime_checkable
class Source(Protocol):
    """Tokens that `batch` can read: an array, an `token_file.File`, or `shards.Shards`."""

    def __len__(self) -> int:
        """How many there are."""
        ...

    def __getitem__(self, places: np.ndarray, /) -> np.ndarray:
        """The tokens at these places."""
        ...


def write(path: str | os.PathLike[str], tokens: Tokens, *, vocabulary: SupportsIndex) -> None:
    """Store `tokens` at `path`, and the vocabulary beside them, at `record_of(path)`.

    Each file appears whole or not at all: it is written beside its place, synced, then renamed over it. The record comes last,
    and an older one goes before the tokens do: it never stands beside tokens of another vocabulary.

    Raises `ValueError` for tokens that are none, not whole numbers in one dim, or outside the vocabulary, and `OSError` where the
    disk does not take them, such as a full one: then the older file is as it was.
    """
    path = Path(path)
    (vocabulary,) = argument_checks.whole_numbers("data.write", vocabulary=vocabulary)
    size, sha256 = store(
        path, tokens, vocabulary, before=lambda: record_of(path).unlink(missing_ok=True)
    )
    record = {
        "format": FORMAT,
        "vocabulary": vocabulary,
        "dtype": stored_as(vocabulary).name,
        "bytes": size,
        "sha256": sha256,
    }
    with _said(path):
        manifest.write(record_of(path), record)


def store(
    path: Path, tokens: Tokens, vocabulary: int, *, before: Callable[[], None] = lambda: None
) -> list:
    """`write` without a record of the vocabulary, which gives the `[size in bytes, sha256]` of what it wrote.

    `before` is called once the tokens are on the disk, before they have a name.
    """
    item = stored_as(vocabulary)
    check(tokens, vocabulary, where=f"tokens for {path}")
    content = np.ascontiguousarray(tokens, item).data
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    with _said(path):
        try:
            with open(partial, "xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            before()
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
    return [content.nbytes, hashlib.sha256(content).hexdigest()]


def read(path: str | os.PathLike[str], *, vocabulary: SupportsIndex) -> File:
    """The tokens that `write` stored at `path`, read as they are asked for. Reads the file once, to check it: see `verify`.

    A file without a record, from elsewhere, is taken as tokens of V, and checked each time.

    Raises `FileNotFoundError`, or `ValueError` for a file that was written with another vocabulary, by a later program, with four
    bytes a token where V asks for two, is empty, cut short, or holds tokens outside the vocabulary; `manifest.Damaged` where its
    bytes are not those that were written, or the record is damaged.
    """
    path, item, (vocabulary,) = (
        Path(path),
        stored_as(vocabulary),
        argument_checks.whole_numbers("data.read", vocabulary=vocabulary),
    )
    if not path.is_file():
        raise FileNotFoundError(
            f"{path}: needed a token file, found no file. Make one with data.write."
        )
    size = path.stat().st_size
    if size == 0 or size % item.itemsize:
        raise ValueError(
            f"{path}: needed one or more tokens of {item.itemsize} bytes (vocabulary {vocabulary}), the file has {size} bytes. "
            "It was cut short or is no token file: make it again with data.write."
        )
    record = _record(path, vocabulary, size)
    tokens = opened(path, item, size // item.itemsize)
    verify(tokens, vocabulary, sha256=record.get("sha256"), stated="dtype" in record)
    return tokens


def opened(path: Path, item: np.dtype, count: int) -> File:
    """The first `count` tokens of the file at `path`, unchecked."""
    return File(path, item, range(count), state_of(path))


def verify(file: File, vocabulary: int, *, sha256: str | None, stated: bool) -> None:
    """Read `file` once, and refuse bytes of another hash, and what is no token of V.

    That a file is of this hash is remembered beside it, in `PATH.checked`, with its size and its times, and while these are the
    same it is not read again. So what turns on the disk without the system's knowledge is found by who removes that file first.

    Args:
        sha256: what its bytes must have; None where nobody knows, and then nothing is remembered.
        stated: whether who wrote it said of which type its tokens are. Where nobody did, a file whose every second token is 0 is
            taken for one of four bytes a token, and refused. So is one whose every second token is below `UPPER` where others
            are far above: these are the upper halves of tokens of a vocabulary of up to 4 million.

    Raises:
        manifest.Damaged: its bytes have another hash.
        ValueError: it holds what is no token of V.
    """
    place, began = file.path.with_name(f"{file.path.name}.checked"), time.time()
    found = {"format": 1, "sha256": sha256, "vocabulary": vocabulary, "state": list(file.state)}
    if sha256 and _remembered(place) == found:
        return
    digest, high, upper = hashlib.sha256(), 0, 0
    for part in _chunks(file):
        digest.update(part.data)
        high, upper = max(high, int(part.max())), max(upper, int(part[1::2].max(initial=0)))
    if sha256 and digest.hexdigest() != sha256:
        raise manifest.Damaged(
            f"{file.path}: needed sha256 {sha256[:12]}..., the file has other bytes. It is damaged."
        )
    if high >= vocabulary:
        for number, part in enumerate(_chunks(file)):
            check(part, vocabulary, where=str(file.path), first=number * CHUNK)
    doubled = high > 0 and (upper == 0 or upper < UPPER <= high // 16)
    if not stated and doubled and len(file) % 2 == 0 and len(file) >= 32:
        raise ValueError(
            f"{file.path}: needed tokens of {file.dtype.itemsize} bytes (vocabulary {vocabulary}), but every second one is "
            f"{upper} or less, and others up to {high}, as in a file of twice as many bytes a token. Write it again with "
            "data.write, which notes the type."
        )
    if sha256 and state_of(file.path) == file.state and max(file.state[1:]) / 1e9 < began - SETTLED:
        with contextlib.suppress(OSError):  # a folder that others wrote is read only
            manifest.write(place, found)


def split(tokens: Text, held_out: float = 0.1) -> tuple[Text, Text]:
    """`(train, held_out)`: views of the first tokens and of the last `held_out` of them, a fraction.

    The cut is one place in the text, so that no held-out sentence stands beside its neighbours in training.
    Raises `ValueError` where a side would have no token.
    """
    last = int(len(tokens) * held_out) if 0 < held_out < 1 else 0
    if not 0 < last < len(tokens):
        raise ValueError(
            f"held_out must be a fraction that leaves tokens on both sides, got {held_out} of {len(tokens)} tokens. "
            "Use 0.1, or bring more text."
        )
    return tokens[: len(tokens) - last], tokens[len(tokens) - last :]


def record_of(path: Path) -> Path:
    """Where the record of the token file at `path` is."""
    return path.with_name(f"{path.name}.json")


def stored_as(vocabulary: SupportsIndex) -> np.dtype:
    """How a token is stored: in two bytes, or in four where V > 65,536. Raises `ValueError` for a V that there cannot be."""
    (vocabulary,) = argument_checks.whole_numbers("a token file", vocabulary=vocabulary)
    if not 1 <= vocabulary <= MOST:
        raise ValueError(
            f"a token file needs a vocabulary from 1 to {MOST}, got {vocabulary}. Give that of the tokenizer."
        )
    return np.dtype("<u2" if vocabulary <= 1 << 16 else "<u4")


def check(tokens: np.ndarray, vocabulary: SupportsIndex, *, where: str, first: int = 0) -> None:
    """Refuse with a `ValueError` what is no token of the vocabulary; `where` begins the message, `first` is the first's index."""
    (vocabulary,) = argument_checks.whole_numbers(where, vocabulary=vocabulary)
    tokens = np.asanyarray(tokens)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or not tokens.size:
        raise ValueError(
            f"{where}: needed one dim of one or more whole numbers, got {tokens.dtype}{list(tokens.shape)}. "
            "Encode a text with a Tokenizer first."
        )
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocabulary:
        bad = low if low < 0 else high
        raise ValueError(
            f"{where}: needed tokens from 0 to {vocabulary - 1}, got {bad} at index {first + int((tokens == bad).argmax())}. "
            "Give the vocabulary of the tokenizer that made them."
        )


@contextlib.contextmanager
def _said(path: Path) -> Iterator[None]:
    """What the system refuses inside, as a sentence that names `path`."""
    try:
        yield
    except OSError as error:
        reason = f"{path}: the tokens were not written: {error.strerror or error}. Make room there, or choose another folder."
        raise OSError(error.errno, reason) from error


def _chunks(file: File) -> Iterator[np.ndarray]:
    return (np.asarray(file[at : at + CHUNK]) for at in range(0, len(file), CHUNK))


def _remembered(place: Path) -> dict[str, Any] | None:
    """What an earlier reader found; None where no reader left a record, or the record is damaged."""
    with contextlib.suppress(ValueError, OSError):
        return manifest.read(place)


def _record(path: Path, vocabulary: int, size: int) -> dict[str, Any]:
    """What was written beside the file at `path`, checked; empty where nothing was."""
    place = record_of(path)
    if not place.exists():
        return {}
    record = manifest.read(place)
    number = manifest.number_of_format(record, place, FORMAT)
    for name in ("vocabulary", "bytes"):
        manifest.need(
            type(record.get(name)) is int, f"{place}: {name}", "a whole number", record.get(name)
        )
    if record["bytes"] != size:
        raise ValueError(
            f"{path}: needed the {record['bytes']} bytes that {place.name} speaks of, the file has {size}. It was cut short, or "
            f"is another file: make it again with data.write, or remove {place.name} if the tokens are of another source."
        )
    if record["vocabulary"] != vocabulary:
        raise ValueError(
            f"{path}: needed tokens of a vocabulary of {vocabulary}, the file was written with {record['vocabulary']}. "
            "Give the tokenizer that made them, or make them again."
        )
    if number > 1:
        check_dtype(record, place, vocabulary)
        manifest.need(
            manifest.is_hash(record.get("sha256")),
            f"{place}: sha256",
            "a sha256",
            record.get("sha256"),
        )
    return record


def check_dtype(record: dict[str, Any], place: Path, vocabulary: int) -> None:
    """Refuse with `manifest.Damaged` a record whose tokens are not stored as those of V are."""
    item = stored_as(vocabulary).name
    manifest.need(
        record.get("dtype") == item,
        f"{place}: dtype",
        f"{item}, as vocabulary {vocabulary} asks",
        record.get("dtype"),
    )
