"""Text as whole numbers, and batches of it. The one idea: **a batch is a pure function of (seed, step)**.

It does not depend on how many devices or processes share it, nor on which batches came before. So a run resumes at any step, on
any layout, with nothing of the loader to save; and a process that holds a part of the batch reads only its `rows`.

Legend: V vocabulary, N tokens, c(v, w) how often token w follows token v.
"""

import functools
import hashlib
import os
import secrets
from base64 import b64decode
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int32, Integer

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


GPT2_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
GPT2_VOCABULARY = 50257
# How GPT-2 cuts text into words before it merges bytes; with the ranks in the file, this is the tokenizer.
GPT2_WORDS = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""


# Token files


def write(path: str | os.PathLike[str], tokens: Tokens, *, vocabulary: int) -> None:
    """Store `tokens` at `path` with nothing before or after them: two bytes each, or four where V > 65,536 (nanoGPT's `.bin`).

    The file appears whole or not at all: it is written beside `path`, synced, then renamed over it.

    Raises `ValueError` for tokens that are none, not whole numbers in one dim, or outside the vocabulary.
    """
    path = Path(path)
    _check(tokens, vocabulary, where=f"tokens for {path}")
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
    _check(tokens, vocabulary, where=str(path))
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


# Batches


def batch(
    tokens: Source, *, seed: int, step: int, size: int, length: int, rows: slice = slice(None)
) -> Int32[np.ndarray, "rows length_and_one"]:
    """The `rows` of the global batch at `step`: `size` windows of `length` inputs and the token after them.

    Inputs are `[:, :-1]`, targets `[:, 1:]`. Every epoch cuts the text anew into windows that share one token with the next, and
    deals each of them once: window w is `tokens[o + w * length :][: length + 1]`, with o and the order of the windows drawn from
    (seed, epoch). Sequence i is the one at position p = step * size + i of this endless deal, whoever asks:
    `batch(..., rows=r)` equals `batch(...)[r]` and reads only its own windows.

    Costs a permutation of N / length windows once an epoch. Raises `ValueError` for a text shorter than one window, or for a
    seed, step, size, length or `rows` that there cannot be.
    """
    if seed < 0 or step < 0 or size < 1 or length < 1 or seed >> 64:
        raise ValueError(
            "batch needs 0 <= seed < 2**64, step >= 0, size >= 1 and length >= 1, "
            f"got seed {seed}, step {step}, size {size}, length {length}. Correct the one outside."
        )
    mine = range(size)[rows]
    if not mine or (rows.stop is not None and rows.stop > size):
        raise ValueError(
            f"rows must select some of the {size} sequences, got {rows}. Give each process a slice within 0..{size}."
        )
    if len(tokens) < length + 1:
        raise ValueError(
            f"one window needs {length + 1} tokens (length {length} and the next one), the text has {len(tokens)}. "
            f"Bring more text, or choose a length up to {len(tokens) - 1}."
        )
    # As many windows as fit at each of at least `length` offsets, so that all epochs are alike and their windows begin anywhere.
    windows = max(1, len(tokens) // length - 1)
    spare = len(tokens) - 1 - windows * length
    starts = []
    for p in (int(step) * size + i for i in mine):
        offset, order = _deal(int(seed), p // windows, windows, spare)
        starts.append(offset + int(order[p % windows]) * length)
    return np.asarray(tokens[np.add.outer(starts, np.arange(length + 1))], np.int32)


@functools.lru_cache(maxsize=2)
def _deal(seed: int, epoch: int, windows: int, spare: int) -> tuple[int, np.ndarray]:
    """The epoch's offset, 0 to `spare`, and the order of its windows."""
    # Raw counter values and a stable sort: NumPy promises these for good, and its `permutation` only until it finds a faster one.
    draws = np.random.Philox(key=epoch << 64 | seed).random_raw(windows + 1)
    return int(draws[0]) % (spare + 1), np.argsort(draws[1:], kind="stable")


def held_out_batches(
    tokens: Tokens, *, size: int, length: int, limit: int | None = None
) -> Iterator[Int32[np.ndarray, "size length_and_one"]]:
    """The text's windows in order, `size` at a time, at most `limit` batches: the same for every evaluation.

    Each token but the first is a target once. Windows at the end that do not fill a batch are left out: all shapes are the same.
    Raises `ValueError` for a text shorter than one batch, or a size below 1.
    """
    if size < 1 or length < 1 or (limit is not None and limit < 1):
        raise ValueError(
            "held_out_batches needs size >= 1, length >= 1 and limit >= 1 or None, "
            f"got size {size}, length {length}, limit {limit}. Correct the one outside."
        )
    batches = (len(tokens) - 1) // (size * length)
    if batches < 1:
        raise ValueError(
            f"one batch of {size} windows of length {length} needs {size * length + 1} tokens, the text has {len(tokens)}. "
            "Bring more text, hold out more of it, or choose a smaller size or length."
        )
    window = np.add.outer(np.arange(size) * length, np.arange(length + 1))
    starts = range(0, batches * size * length, size * length)[:limit]
    return (np.asarray(tokens[start + window], np.int32) for start in starts)


# Tokenizers


@dataclass(frozen=True)
class Tokenizer:
    """A pair of functions between text and whole numbers.

    Args:
        name: what it is called.
        vocabulary: the numbers are below this one.
        encode: a text's tokens, in order.
        decode: the text of tokens. What is no text of its own, as half a character, becomes U+FFFD.
    """

    name: str
    vocabulary: int
    encode: Callable[[str], Tokens]
    decode: Callable[[Sequence[int] | np.ndarray], str]


def bytes_tokenizer() -> Tokenizer:
    """One token for each byte of the text's UTF-8. Bytes that are not UTF-8, as a young model makes, decode to U+FFFD.

    Its `decode` raises `ValueError` for what are not whole numbers from 0 to 255, in one dim.
    """

    def encode(text: str) -> Tokens:
        return np.frombuffer(text.encode(), np.uint8).astype(np.uint16)

    def decode(ids: Sequence[int] | np.ndarray) -> str:
        return bytes(_ids(ids, 256)).decode(errors="replace")

    return Tokenizer("bytes", 256, encode, decode)


def gpt2_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """GPT-2's byte-pair encoding, from its file of ranks at `path`; no network, no cache. Token 50,256 ends a text.

    `encode` takes "<|endoftext|>" as the thirteen characters that they are: text cannot end a text. `decode` raises
    `ValueError` for what are not whole numbers from 0 to 50,256, in one dim.

    Raises `ImportError` without tiktoken, `FileNotFoundError`, or `ValueError` when a byte of the file is not as OpenAI made it.
    """
    try:
        import tiktoken
    except ImportError as error:
        raise ImportError('gpt2_tokenizer needs tiktoken, which is missing: pip install "parallax-jax[examples]"') from error
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: needed GPT-2's ranks, found no file. The repository has examples/data/gpt2.tiktoken.")
    content = path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    if digest != GPT2_SHA256:
        raise ValueError(
            f"{path}: damaged, or not GPT-2's ranks: needed sha256 {GPT2_SHA256}, got {digest} of {len(content)} bytes. "
            "Copy it again from examples/data/gpt2.tiktoken in the repository."
        )
    encoding = tiktoken.Encoding(
        "gpt2",
        pat_str=GPT2_WORDS,
        mergeable_ranks={b64decode(token): int(rank) for token, rank in map(bytes.split, content.splitlines())},
        special_tokens={"<|endoftext|>": GPT2_VOCABULARY - 1},
        explicit_n_vocab=GPT2_VOCABULARY,
    )

    def encode(text: str) -> Tokens:
        return np.array(encoding.encode_ordinary(text), np.uint16)

    def decode(ids: Sequence[int] | np.ndarray) -> str:
        return encoding.decode(_ids(ids, GPT2_VOCABULARY), errors="replace")

    return Tokenizer("gpt2", GPT2_VOCABULARY, encode, decode)


def encode_file(path: str | os.PathLike[str], tokenizer: Tokenizer) -> Tokens:
    """The tokens of the UTF-8 text at `path`. Raises `FileNotFoundError`, or `ValueError` for no text or for other bytes."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: needed a text file, found no file. Check the path.")
    content = path.read_bytes()
    if not content:
        raise ValueError(f"{path}: needed text, the file is empty. Choose another file.")
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: needed UTF-8, got byte 0x{content[error.start]:02x} at offset {error.start} ({error.reason}). "
            "Save the file as UTF-8, for instance with `iconv -t utf-8`."
        ) from error
    return tokenizer.encode(text)


# What counting alone predicts: a model that has learnt anything is below these.


def unigram(train: Tokens, held_out: Tokens, vocabulary: int) -> float:
    """Nats per held-out token when each token is predicted by how often it came: `log(V)` is knowing nothing at all.

    `P(w) = (c(w) + T / V) / (N + T)`, T the number of distinct tokens in `train` (Witten and Bell 1991), so none has P = 0.
    Raises `ValueError` for tokens outside the vocabulary.
    """
    _check(train, vocabulary, where="train")
    _check(held_out, vocabulary, where="held_out")
    return float(-np.log(_frequencies(train, vocabulary)[held_out]).mean())


def bigram(train: Tokens, held_out: Tokens, vocabulary: int) -> float:
    """Nats per held-out token, the first left out, when each is predicted from the one before it.

    `P(w | v) = (c(v, w) + T(v) P(w)) / (c(v) + T(v))`, T(v) the number of distinct tokens after v and P(w) that of `unigram`
    (Witten and Bell 1991); after a v never seen, P(w). Needs memory for the pairs that occur, not V squared. Raises `ValueError`
    for tokens outside the vocabulary, or fewer than two.
    """
    for name, tokens in (("train", train), ("held_out", held_out)):
        _check(tokens, vocabulary, where=name)
        if len(tokens) < 2:
            raise ValueError(f"bigram needs two tokens or more in {name}, got {len(tokens)}. Bring more text.")
    before, after = held_out[:-1], held_out[1:]
    pairs, counts = np.unique(_pairs(train, vocabulary), return_counts=True)
    wanted = _pairs(held_out, vocabulary)
    place = np.minimum(np.searchsorted(pairs, wanted), len(pairs) - 1)
    together = np.where(pairs[place] == wanted, counts[place], 0)
    followers = np.bincount(pairs // vocabulary, minlength=vocabulary)[before]
    seen = np.bincount(train[:-1], minlength=vocabulary)[before]
    alone = _frequencies(train, vocabulary)[after]
    probability = np.where(seen > 0, (together + followers * alone) / np.maximum(seen + followers, 1), alone)
    return float(-np.log(probability).mean())


def _frequencies(train: Tokens, vocabulary: int) -> np.ndarray:
    counts = np.bincount(train, minlength=vocabulary)
    distinct = np.count_nonzero(counts)
    return (counts + distinct / vocabulary) / (len(train) + distinct)


def _pairs(tokens: Tokens, vocabulary: int) -> np.ndarray:
    return tokens[:-1].astype(np.int64) * vocabulary + tokens[1:].astype(np.int64)


def stored_as(vocabulary: int) -> np.dtype:
    """How a token is stored: in two bytes, or in four where V > 65,536."""
    return np.dtype("<u2" if vocabulary <= 1 << 16 else "<u4")


def _ids(ids: Sequence[int] | np.ndarray, vocabulary: int) -> list[int]:
    ids = np.asarray(ids)
    if ids.size:
        _check(ids, vocabulary, where="ids to decode")
    return ids.tolist()


def _check(tokens: np.ndarray, vocabulary: int, *, where: str) -> None:
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
