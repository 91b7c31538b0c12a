"""Text as whole numbers in files: token files, read without a copy, and their two parts, to train on and to hold out.

    text.bin          the tokens, with nothing before or after them: two bytes each, or four where V > 65,536 (nanoGPT's `.bin`)
    text.bin.json     the vocabulary that they were written with, and how many bytes they are

Legend: V vocabulary.
"""

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol, SupportsIndex, runtime_checkable

import numpy as np
from jaxtyping import Integer

from parallax import given
from parallax.data import manifest

MOST = 1 << 31  # tokens on devices are int32
Tokens = Integer[np.ndarray, "_"]  # any number of them: train and held_out differ


@runtime_checkable
class Source(Protocol):
    """Tokens that `batch` can read: an array, a mapped file, or `shards.Shards`."""

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
    (vocabulary,) = given.whole("data.write", vocabulary=vocabulary)
    store(path, tokens, vocabulary, before=lambda: record_of(path).unlink(missing_ok=True))
    with _said(path):
        manifest.write(record_of(path), {"vocabulary": vocabulary, "bytes": path.stat().st_size})


def store(path: Path, tokens: Tokens, vocabulary: int, *, before: Callable[[], None] = lambda: None) -> None:
    """`write` without a record of the vocabulary; `before` is called once the tokens are on the disk, before they have a name."""
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


def read(path: str | os.PathLike[str], *, vocabulary: SupportsIndex) -> Tokens:
    """The tokens that `write` stored at `path`, mapped into memory and not copied. Reads the file once, to check its tokens.

    A file without a record, from elsewhere, is taken as tokens of V.

    Raises `FileNotFoundError`, or `ValueError` for a file that was written with another vocabulary, is empty, cut short, or holds
    tokens outside the vocabulary; `manifest.Damaged` where the record is damaged.
    """
    path, item, (vocabulary,) = Path(path), stored_as(vocabulary), given.whole("data.read", vocabulary=vocabulary)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: needed a token file, found no file. Make one with data.write.")
    size = path.stat().st_size
    if size == 0 or size % item.itemsize:
        raise ValueError(
            f"{path}: needed one or more tokens of {item.itemsize} bytes (vocabulary {vocabulary}), the file has {size} bytes. "
            "It was cut short or is no token file: make it again with data.write."
        )
    _check_record(path, vocabulary, size)
    tokens = np.memmap(path, item, mode="r")
    check(tokens, vocabulary, where=str(path))
    return tokens


def split(tokens: Tokens, held_out: float = 0.1) -> tuple[Tokens, Tokens]:
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
    (vocabulary,) = given.whole("a token file", vocabulary=vocabulary)
    if not 1 <= vocabulary <= MOST:
        raise ValueError(f"a token file needs a vocabulary from 1 to {MOST}, got {vocabulary}. Give that of the tokenizer.")
    return np.dtype("<u2" if vocabulary <= 1 << 16 else "<u4")


def check(tokens: np.ndarray, vocabulary: SupportsIndex, *, where: str) -> None:
    """Refuse with a `ValueError` what is no token of the vocabulary; `where` begins the message."""
    (vocabulary,) = given.whole(where, vocabulary=vocabulary)
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
            f"{where}: needed tokens from 0 to {vocabulary - 1}, got {bad} at index {int((tokens == bad).argmax())}. "
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


def _check_record(path: Path, vocabulary: int, size: SupportsIndex) -> None:
    place = record_of(path)
    if not place.exists():
        return
    record = manifest.read(place)
    for name in ("vocabulary", "bytes"):
        manifest.need(type(record.get(name)) is int, f"{place}: {name}", "a whole number", record.get(name))
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
