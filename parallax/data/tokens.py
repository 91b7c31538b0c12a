"""Writes and reads token files, and splits a text into a part for training and a held-out part.

    text.bin         only the tokens: two bytes each, or four if V > 65,536 (nanoGPT's `.bin`)
    text.bin.json    the record: the vocabulary, the type of a token, the size in bytes, the hash

Legend: V vocabulary.
"""

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, SupportsIndex, TypeVar, runtime_checkable

import numpy as np
from jaxtyping import Integer

from parallax import argument_checks
from parallax.data import manifest
from parallax.data.token_file import File, state_of

MOST = 1 << 31  # the largest vocabulary, since tokens on devices are int32
FORMAT = 3  # of records, and of the manifests of `shards`
CHUNK = 1 << 19  # tokens checked at a time; even, so that an odd place in a part is odd in the file
# If tokens of four bytes, below 4 million (64 * 2^16), are read as numbers of two bytes, every
# second number is below this bound.
UPPER = 64
Tokens = Integer[np.ndarray, "_"]  # "_": any length; two arguments may have different lengths
Text = TypeVar("Text", np.ndarray, File)


@runtime_checkable
class Source(Protocol):
    """Tokens that `batch` can read: an array, a `token_file.File`, or `shards.Shards`."""

    def __len__(self) -> int:
        """Returns the number of tokens."""
        ...

    def __getitem__(self, places: np.ndarray, /) -> np.ndarray:
        """Returns the tokens at these places."""
        ...


def write(path: str | os.PathLike[str], tokens: Tokens, *, vocabulary: SupportsIndex) -> None:
    """Stores `tokens` in the file `path`, and their record, a small JSON file, in
    `record_of(path)`.

    Each file appears whole or not at all. The record is written last, and an older record is
    removed before the tokens appear. So a record never stands beside tokens of another vocabulary.

    Raises `ValueError` if `tokens` is not a one-dimensional array of whole numbers, is empty, or
    has a number outside the vocabulary. Raises `OSError` if a file cannot be written, for example
    because the disk is full. If the tokens cannot be written, an older file at `path` is unchanged.
    If only the record cannot be written, the tokens are at `path`, without a record.
    """
    path = Path(path)
    (vocabulary,) = argument_checks.whole_numbers("data.write", vocabulary=vocabulary)
    size, digest = store(
        path, tokens, vocabulary, before=lambda: record_of(path).unlink(missing_ok=True)
    )
    # The message of an `OSError` becomes "...: the tokens are in ..., but their record was not
    # written: ...".
    with _errors_name(record_of(path), f"the tokens are in {path.name}, but their record was"):
        manifest.write(record_of(path), header(vocabulary) | {"bytes": size, "hash": digest})


def store(
    path: Path, tokens: Tokens, vocabulary: int, *, before: Callable[[], None] = lambda: None
) -> list:
    """Writes the tokens, but not their record (`record_of`), and returns `[size in bytes, hash]`.

    The tokens are first written to a file of another name, and this file is then renamed to `path`.
    `before` is called between these two steps, when the tokens are on the disk. `write` uses
    `before` to remove an old record, so that the record of one text never stands beside the tokens
    of another.
    """
    item = stored_as(vocabulary)  # the dtype of a token
    check(tokens, vocabulary, where=f"tokens for {path}")
    content = np.ascontiguousarray(tokens, item).data
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    # The message of an `OSError` becomes "{path}: the tokens were not written: ...".
    with _errors_name(path, "the tokens were"):
        # The folder is synced later, when the record or manifest is written into it.
        try:
            with open(partial, "xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            before()
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
    return [content.nbytes, manifest.hashed(content)]


def read(
    path: str | os.PathLike[str], *, vocabulary: SupportsIndex, check_bytes: bool = True
) -> File:
    """Returns the tokens stored at `path`, as a `File`, which reads tokens when it is indexed.

    Each token is read as two bytes, or as four if `vocabulary` is above 65,536. If the file has a
    record (the JSON file that `write` stores beside the tokens), the record is checked.

    Args:
        path: the path of the file.
        vocabulary: the vocabulary of the tokenizer that made the tokens.
        check_bytes: whether to read the file once, to check its hash, and to check that all numbers
            are in the vocabulary. A restarted run may pass `False`: then only the record and the
            size are checked.

    Raises:
        FileNotFoundError: there is no file.
        manifest.Damaged: the bytes differ from those that were written, or the record is damaged.
        ValueError: the file has another vocabulary, another format, or four bytes per token
            although the vocabulary needs two. Or the file is empty or cut short, or holds tokens
            outside the vocabulary.
    """
    path, item = Path(path), stored_as(vocabulary)  # `item`: the dtype of a token
    (vocabulary,) = argument_checks.whole_numbers("data.read", vocabulary=vocabulary)
    if not path.is_file():
        raise FileNotFoundError(
            f"{path}: needed a token file, found no file. Make one with data.write."
        )
    size = path.stat().st_size
    if size == 0 or size % item.itemsize:
        raise ValueError(
            f"{path}: needed one or more whole tokens, each of {item.itemsize} bytes "
            f"(vocabulary {vocabulary}); the file has {size} bytes. "
            "The file was cut short or is no token file: make it again with data.write."
        )
    stored = _hash_in_record(path, vocabulary, size)
    tokens = opened(path, item, size // item.itemsize)
    if check_bytes:
        verify(tokens, vocabulary, stored=stored)
    return tokens


def opened(path: Path, item: np.dtype, count: int) -> File:
    """Returns the first `count` tokens of the file at `path`, without a check."""
    return File(path, item, range(count), state_of(path))


def verify(file: File, vocabulary: int, *, stored: str | None) -> None:
    """Reads `file` once. Raises an error if a number is outside the vocabulary, or if the hash of
    the file's bytes differs from the hash `stored`.

    If `stored` is None, the file has no record of its hash and of the number of bytes per token.
    So tokens of four bytes may be read as numbers of two bytes. Every second number is then the
    upper half of a token, and small: below 64 if the vocabulary is at most 64 * 2^16 (some 4
    million). So a file without a record is refused if

    * every second number is 0, or
    * every second number is below 64, and another number is 1,024 or more. (A text whose numbers
      are all below 64 may be valid.)

    A file of fewer than 32 numbers, of an odd count of numbers, or of zeros only is never refused
    for these reasons.

    Raises:
        manifest.Damaged: the bytes have another hash.
        ValueError: the file holds a number that is no token of the vocabulary.
    """
    # high: the largest number; upper: the largest at odd places, where upper halves would be.
    digest, high, upper = manifest.hasher(), 0, 0
    for part in _chunks(file):
        digest.update(part.data)
        high, upper = max(high, int(part.max())), max(upper, int(part[1::2].max(initial=0)))
    if stored and digest.hexdigest() != stored:
        raise manifest.Damaged(
            f"{file.path}: needed bytes with the hash {stored[:12]}..., found other bytes. "
            "The file is damaged."
        )
    if high >= vocabulary:  # `check` raises an error with the place of the first such number
        for number, part in enumerate(_chunks(file)):
            check(part, vocabulary, where=str(file.path), first=number * CHUNK)
    looks_split = upper < UPPER and high >= 16 * UPPER  # UPPER is 64, and 16 * UPPER is 1,024
    four_bytes = high > 0 and (upper == 0 or looks_split)
    # Among fewer than 32 numbers, every second one could be small by chance.
    if not stored and four_bytes and len(file) % 2 == 0 and len(file) >= 32:
        raise ValueError(
            f"{file.path}: needed tokens of {file.dtype.itemsize} bytes (vocabulary {vocabulary}), "
            f"found that every second number is at most {upper}, and the largest of the others is "
            f"{high}. Two numbers in a row seem to be the halves of one token, so the file seems "
            "to have twice as many bytes per token. Write the file again by data.write, which "
            "stores the type of a token in a record."
        )


def split(tokens: Text, held_out: float = 0.1) -> tuple[Text, Text]:
    """Returns the pair `(train, held_out)`: a view of the first tokens, and a view of the last
    tokens. The argument `held_out` is the fraction of the tokens in the second view.

    The text is cut at one place only, so held-out sentences do not stand between sentences of the
    training text. Raises `ValueError` if one of the views would have no token.
    """
    last = int(len(tokens) * held_out) if 0 < held_out < 1 else 0
    if not 0 < last < len(tokens):
        is_fraction = 0 < held_out < 1
        better = "a larger fraction, or a longer text" if is_fraction else "a number such as 0.1"
        raise ValueError(
            "held_out must be a fraction that leaves tokens for training and for the held-out "
            f"part, got {held_out} of {len(tokens)} tokens. Use {better}."
        )
    return tokens[: len(tokens) - last], tokens[len(tokens) - last :]


def record_of(path: Path) -> Path:
    """Returns the path of the record of the token file at `path`. The record is a JSON file that
    describes the tokens: `text.bin.json` for `text.bin`."""
    return path.with_name(f"{path.name}.json")


def stored_as(vocabulary: SupportsIndex) -> np.dtype:
    """Returns the dtype of a stored token: two bytes, or four if the vocabulary has more than
    65,536 tokens. Raises `ValueError` if the vocabulary has less than 1 token or more than 2^31.
    """
    (vocabulary,) = argument_checks.whole_numbers("a token file", vocabulary=vocabulary)
    if not 1 <= vocabulary <= MOST:
        raise ValueError(
            f"a token file needs a vocabulary of 1 to {MOST} tokens, got {vocabulary}. "
            "Give the tokenizer's vocabulary."
        )
    return np.dtype("<u2" if vocabulary <= 1 << 16 else "<u4")


def check(tokens: np.ndarray, vocabulary: SupportsIndex, *, where: str, first: int = 0) -> None:
    """Raises `ValueError` if `tokens` are not whole numbers in one dim, from 0 to `vocabulary` - 1.

    The message begins with `where`. If `tokens` is a part of a text, `first` is the place of
    `tokens[0]` in the whole text.
    """
    (vocabulary,) = argument_checks.whole_numbers(where, vocabulary=vocabulary)
    tokens = np.asanyarray(tokens)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or not tokens.size:
        raise ValueError(
            f"{where}: needed a one-dimensional array of one or more whole numbers, "
            f"got {tokens.dtype}{list(tokens.shape)}. Encode a text with a tokenizer first."
        )
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocabulary:
        bad = low if low < 0 else high
        index = first + int((tokens == bad).argmax())
        raise ValueError(
            f"{where}: needed tokens from 0 to {vocabulary - 1}, got {bad} at index {index}. "
            "Give the vocabulary of the tokenizer that made them."
        )


def header(vocabulary: int) -> dict[str, Any]:
    """Returns the entries that the record of a token file and the manifest of `shards` share."""
    dtype = stored_as(vocabulary).name
    return {"format": FORMAT, "vocabulary": vocabulary, "dtype": dtype}


def check_header(record: dict[str, Any], place: Path, tokens: Path, vocabulary: int) -> None:
    """Raises an error if a record does not describe tokens of `vocabulary` in the format `FORMAT`.

    `place` is the path of the record, and `tokens` is the path of the tokens that it describes.

    Raises:
        manifest.Damaged: the format or the vocabulary is not a whole number, or the type of a token
            is not the one for this vocabulary. `Damaged` is a `ValueError`.
        ValueError: the format is not `FORMAT`, or the vocabulary is not `vocabulary`.
    """
    manifest.check_format(record, place, FORMAT)
    stored = record.get("vocabulary")
    manifest.need(type(stored) is int, f"{place}: vocabulary", "a whole number", stored)
    if stored != vocabulary:
        raise ValueError(
            f"{tokens}: needed tokens of a vocabulary of {vocabulary}; "
            f"these are of a vocabulary of {stored}. "
            "Use the tokenizer that made these tokens, or encode the text again with yours."
        )
    item = stored_as(vocabulary).name
    needed = f"{item}, as vocabulary {vocabulary} asks"
    manifest.need(record.get("dtype") == item, f"{place}: dtype", needed, record.get("dtype"))


def _hash_in_record(path: Path, vocabulary: int, size: int) -> str | None:
    """Returns the hash in the record of the file at `path`, after a check of the record; None if
    there is no record.

    Raises `ValueError` if the record is of another vocabulary, of another format, or of a file that
    does not have `size` bytes. Raises `Damaged`, a `ValueError`, if the record is damaged.
    """
    place = record_of(path)
    if not place.exists():
        return None
    record = manifest.read(place)
    check_header(record, place, path, vocabulary)
    stored, digest = record.get("bytes"), record.get("hash")
    manifest.need(type(stored) is int, f"{place}: bytes", "a whole number", stored)
    manifest.need(manifest.is_hash(digest), f"{place}: hash", "a hash", digest)
    if stored != size:
        raise ValueError(
            f"{path}: needed a file of {stored} bytes (as {place.name} states), found {size} "
            "bytes. The file was cut short or replaced: make it again with data.write. If another "
            f"program wrote the file, remove {place.name}, which describes an earlier file."
        )
    return digest


@contextlib.contextmanager
def _errors_name(path: Path, what: str) -> Iterator[None]:
    """Replaces an `OSError` of the `with` block by an `OSError` with the message "{path}: {what}
    not written: ...". An example of `what` is "the tokens were"."""
    try:
        yield
    except OSError as error:
        raise OSError(
            error.errno,
            f"{path}: {what} not written: {error.strerror or error}. Make room on the disk, or "
            "choose another folder, and write the tokens again.",
        ) from error


def _chunks(file: File) -> Iterator[np.ndarray]:
    """Returns an iterator over the tokens of a file, in arrays of `CHUNK` tokens."""
    return (np.asarray(file[at : at + CHUNK]) for at in range(0, len(file), CHUNK))
