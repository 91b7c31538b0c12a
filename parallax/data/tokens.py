"""Text as whole numbers in files: token files, read without a copy, and their two parts, to train on and to hold out.

Legend: V vocabulary.
"""

import os
import secrets
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Integer

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


def write(path: str | os.PathLike[str], tokens: Tokens, *, vocabulary: int) -> None:
    """Store `tokens` at `path` with nothing before or after them: two bytes each, or four where V > 65,536 (nanoGPT's `.bin`).

    The file appears whole or not at all: it is written beside `path`, synced, then renamed over it.

    Raises `ValueError` for tokens that are none, not whole numbers in one dim, or outside the vocabulary.
    """
    path = Path(path)
    check(tokens, vocabulary, where=f"tokens for {path}")
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        with open(partial, "xb") as file:
            file.write(np.ascontiguousarray(tokens, stored_as(vocabulary)).data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def read(path: str | os.PathLike[str], *, vocabulary: int) -> Tokens:
    """The tokens that `write` stored at `path`, mapped into memory and not copied. Reads the file once, to check its tokens.

    Raises `FileNotFoundError`, or `ValueError` for a file that is empty, cut short, or holds tokens outside the vocabulary (as
    one of another tokenizer would: a device would clamp them without a word).
    """
    path, item = Path(path), stored_as(vocabulary)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: needed a token file, found no file. Make one with data.write.")
    size = path.stat().st_size
    if size == 0 or size % item.itemsize:
        raise ValueError(
            f"{path}: needed one or more tokens of {item.itemsize} bytes (vocabulary {vocabulary}), the file has {size} bytes. "
            "It was cut short or is no token file: make it again with data.write."
        )
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


def stored_as(vocabulary: int) -> np.dtype:
    """How a token is stored: in two bytes, or in four where V > 65,536."""
    return np.dtype("<u2" if vocabulary <= 1 << 16 else "<u4")


def check(tokens: np.ndarray, vocabulary: int, *, where: str) -> None:
    """Refuse with a `ValueError` what is no token of the vocabulary; `where` begins the message."""
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
