"""Turns the texts of the examples into tokens (bytes, or GPT-2's pieces of words), and
computes the losses of models that only count tokens.

These losses are baselines: a trained model should have a lower loss than `bigram`.

Legend: V is the size of the vocabulary, N the number of training tokens (`train`), c(w)
the number of times that token w occurs in them, and c(v, w) the number of times that w
follows v.
"""

import hashlib
import os
import re
from base64 import b64decode
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from parallax.data.token_file import File
from parallax.data.tokens import Tokens, check

GPT2_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
GPT2_VOCABULARY = 50257
# How GPT-2 cuts text into words before it merges bytes; with the ranks in the file,
# this is the tokenizer.
GPT2_WORDS = (
    r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
)


@dataclass(frozen=True)
class Tokenizer:
    """A pair of functions between text and whole numbers.

    Args:
        name: the name of the tokenizer.
        vocabulary: the number of different tokens; a token is a number from 0 to
            `vocabulary` - 1.
        encode: a function that returns the tokens of a text, in order. It refuses a
            text that has half of a pair of surrogates.
        decode: a function that returns the text of tokens. Bytes that are not UTF-8,
            such as a part of a character, become U+FFFD.
    """

    name: str
    vocabulary: int
    encode: Callable[[str], Tokens]
    decode: Callable[[Sequence[int] | np.ndarray], str]


def bytes_tokenizer() -> Tokenizer:
    """Returns the tokenizer with one token for each byte of a text's UTF-8. Bytes
    that are not UTF-8, which a model samples early in its training, decode to U+FFFD.

    `decode` needs a one-dimensional array or sequence of whole numbers from 0 to
    255, and raises `ValueError` for anything else.
    """

    def encode(text: str) -> Tokens:
        return np.frombuffer(_utf8(text), np.uint8).astype(np.uint16)

    def decode(ids: Sequence[int] | np.ndarray) -> str:
        return bytes(_ids(ids, 256)).decode(errors="replace")

    return Tokenizer("bytes", 256, encode, decode)


def gpt2_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Returns the tokenizer of GPT-2, a byte-pair encoding, from its file of token
    ranks at `path`. Nothing is downloaded. Token 50,256 ends a text.

    `encode` treats the string "<|endoftext|>" as thirteen ordinary characters, so it
    never returns token 50,256. It raises `ValueError` for a text with about a million
    whitespace characters in a row, since tiktoken's stack overflows. `decode` needs a
    one-dimensional array or sequence of whole numbers from 0 to 50,256, and raises
    `ValueError` for anything else.

    Raises:
        ImportError: tiktoken is not installed.
        FileNotFoundError: there is no file at `path`.
        ValueError: the file is not, byte for byte, the one that OpenAI published.
    """
    try:
        import tiktoken
    except ImportError as error:
        raise ImportError(
            "gpt2_tokenizer needs tiktoken, which is missing: "
            'pip install -e ".[examples]"'
        ) from error
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"gpt2_tokenizer needs the file of GPT-2's token ranks; {path} does not "
            "exist. The repository has this file: examples/data/gpt2.tiktoken."
        )
    content = path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    if digest != GPT2_SHA256:
        raise ValueError(
            f"{path} is damaged, or is not the file of GPT-2's token ranks: needed "
            f"sha256 {GPT2_SHA256}, got a file of {len(content)} bytes with sha256 "
            f"{digest}. "
            "Copy it again from examples/data/gpt2.tiktoken in the repository."
        )
    encoding = tiktoken.Encoding(
        "gpt2",
        pat_str=GPT2_WORDS,
        mergeable_ranks={
            b64decode(token): int(rank)
            for token, rank in map(bytes.split, content.splitlines())
        },
        special_tokens={"<|endoftext|>": GPT2_VOCABULARY - 1},
        explicit_n_vocab=GPT2_VOCABULARY,
    )

    def encode(text: str) -> Tokens:
        _utf8(text)
        try:
            return np.array(encoding.encode_ordinary(text), np.uint16)
        except BaseException as error:
            if (
                type(error).__name__ != "PanicException"
            ):  # of tiktoken's Rust, no `Exception` and under no public name
                raise
            run = max(
                re.finditer(r"\s+", text),
                key=lambda run: run.end() - run.start(),
                default=None,
            )
            blanks = (
                f"The longest run, at character {run.start()}, has "
                f"{run.end() - run.start()} characters. Shorten this run, or cut the "
                "text inside the run and encode the two parts."
                if run
                else "This text has no whitespace. Cut the text, and encode the parts."
            )
            raise ValueError(
                f"gpt2_tokenizer: tiktoken cannot encode this text of {len(text)} "
                f"characters ({error}). A long run of whitespace characters overflows "
                f"tiktoken's stack. {blanks}"
            ) from None

    def decode(ids: Sequence[int] | np.ndarray) -> str:
        return encoding.decode(_ids(ids, GPT2_VOCABULARY), errors="replace")

    return Tokenizer("gpt2", GPT2_VOCABULARY, encode, decode)


def encode_file(path: str | os.PathLike[str], tokenizer: Tokenizer) -> Tokens:
    """Returns the tokens of the UTF-8 text file at `path`.

    Raises `FileNotFoundError` if there is no file, and `ValueError` if the file is
    empty or is not UTF-8.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"{path}: needed a text file, found no file. Check the path."
        )
    content = path.read_bytes()
    if not content:
        raise ValueError(
            f"{path}: needed text, the file is empty. Choose another file."
        )
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: needed UTF-8, got byte 0x{content[error.start]:02x} at offset "
            f"{error.start} ({error.reason}). "
            "Save the file as UTF-8, for instance with `iconv -f ENCODING -t utf-8`, "
            "where ENCODING is the file's present encoding."
        ) from error
    return tokenizer.encode(text)


# Models that count


def unigram(train: Tokens | File, held_out: Tokens | File, vocabulary: int) -> float:
    """Returns the mean loss of the held-out tokens, in nats, if each token is predicted
    by its frequency in `train`. The loss of a uniform guess is `log(V)`, where V is
    the size of the vocabulary.

    `P(w) = (c(w) + T / V) / (N + T)` (Witten and Bell 1991). `train` has N tokens, of
    which c(w) are equal to w. T is the number of distinct tokens in `train`. Every
    token of the vocabulary has P > 0. Raises `ValueError` if a token is outside the
    vocabulary.
    """
    train, held_out = np.asarray(train), np.asarray(held_out)
    check(train, vocabulary, where="train")
    check(held_out, vocabulary, where="held_out")
    return float(-np.log(_frequencies(train, vocabulary)[held_out]).mean())


def bigram(train: Tokens | File, held_out: Tokens | File, vocabulary: int) -> float:
    """Returns the mean loss of the held-out tokens, in nats, if each token is predicted
    from the token before it. The first held-out token is not predicted.

    `P(w | v) = (c(v, w) + T(v) P(w)) / (c(v) + T(v))` (Witten and Bell 1991). In
    `train`, c(v, w) is how often w follows v, c(v) is the sum of c(v, w) over w, and
    T(v) is the number of distinct tokens that follow v. P(w) is the probability of w in
    `unigram`. If no token follows v in `train`, P(w | v) is P(w). The memory grows with
    the number of distinct pairs in `train`, not with the square of `vocabulary`. Raises
    `ValueError` if a token is outside the vocabulary, or if `train` or `held_out` has
    fewer than two tokens.
    """
    train, held_out = np.asarray(train), np.asarray(held_out)
    for name, tokens in (("train", train), ("held_out", held_out)):
        check(tokens, vocabulary, where=name)
        if len(tokens) < 2:
            raise ValueError(
                f"bigram needs two tokens or more in {name}, got {len(tokens)}. Bring "
                "more text."
            )
    before, after = held_out[:-1], held_out[1:]
    pairs, counts = np.unique(_pairs(train, vocabulary), return_counts=True)
    wanted = _pairs(held_out, vocabulary)
    place = np.minimum(np.searchsorted(pairs, wanted), len(pairs) - 1)
    together = np.where(pairs[place] == wanted, counts[place], 0)
    followers = np.bincount(pairs // vocabulary, minlength=vocabulary)[before]
    seen = np.bincount(train[:-1], minlength=vocabulary)[before]
    alone = _frequencies(train, vocabulary)[after]
    probability = np.where(
        seen > 0,
        (together + followers * alone) / np.maximum(seen + followers, 1),
        alone,
    )
    return float(-np.log(probability).mean())


def _frequencies(train: Tokens, vocabulary: int) -> np.ndarray:
    counts = np.bincount(train, minlength=vocabulary)
    distinct = np.count_nonzero(counts)
    return (counts + distinct / vocabulary) / (len(train) + distinct)


def _pairs(tokens: Tokens, vocabulary: int) -> np.ndarray:
    return tokens[:-1].astype(np.int64) * vocabulary + tokens[1:].astype(np.int64)


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"a tokenizer needs text, got half of a pair of surrogates, "
            f"{text[error.start]!a}, at character {error.start}. Read "
            'the text as UTF-8, or replace each such half: text.encode("utf-16", '
            '"surrogatepass").decode("utf-16", "replace").'
        ) from error


def _ids(ids: Sequence[int] | np.ndarray, vocabulary: int) -> list[int]:
    ids = np.asarray(ids)
    if ids.size:
        check(ids, vocabulary, where="ids to decode")
    return ids.tolist()
