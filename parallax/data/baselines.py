"""The losses of models that only count tokens: one that has learnt something is below them.

Legend: V vocabulary, N tokens, c(v, w) how often token w follows token v.
"""

import numpy as np

from parallax.data.token_file import File
from parallax.data.tokens import Tokens, check


def unigram(train: Tokens | File, held_out: Tokens | File, vocabulary: int) -> float:
    """Nats per held-out token when each token is predicted by how often it came: `log(V)` is knowing nothing at all.

    `P(w) = (c(w) + T / V) / (N + T)`, T the number of distinct tokens in `train` (Witten and Bell 1991), so none has P = 0.
    Raises `ValueError` for tokens outside the vocabulary.
    """
    train, held_out = np.asarray(train), np.asarray(held_out)
    check(train, vocabulary, where="train")
    check(held_out, vocabulary, where="held_out")
    return float(-np.log(_frequencies(train, vocabulary)[held_out]).mean())


def bigram(train: Tokens | File, held_out: Tokens | File, vocabulary: int) -> float:
    """Nats per held-out token, the first left out, when each is predicted from the one before it.

    `P(w | v) = (c(v, w) + T(v) P(w)) / (c(v) + T(v))`, T(v) the number of distinct tokens after v and P(w) that of `unigram`
    (Witten and Bell 1991); after a v never seen, P(w). Needs memory for the pairs that occur, not V squared. Raises `ValueError`
    for tokens outside the vocabulary, or fewer than two.
    """
    train, held_out = np.asarray(train), np.asarray(held_out)
    for name, tokens in (("train", train), ("held_out", held_out)):
        check(tokens, vocabulary, where=name)
        if len(tokens) < 2:
            raise ValueError(
                f"bigram needs two tokens or more in {name}, got {len(tokens)}. Bring more text."
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
        seen > 0, (together + followers * alone) / np.maximum(seen + followers, 1), alone
    )
    return float(-np.log(probability).mean())


def _frequencies(train: Tokens, vocabulary: int) -> np.ndarray:
    counts = np.bincount(train, minlength=vocabulary)
    distinct = np.count_nonzero(counts)
    return (counts + distinct / vocabulary) / (len(train) + distinct)


def _pairs(tokens: Tokens, vocabulary: int) -> np.ndarray:
    return tokens[:-1].astype(np.int64) * vocabulary + tokens[1:].astype(np.int64)
