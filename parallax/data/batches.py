"""Batches of a text. **A batch is a pure function of (seed, step).**

A batch does not depend on earlier batches, or on the number of devices or processes that share it.
So a run resumes at any step, on any layout, without a saved state of the loader. A process that
needs only some `rows` of the batch reads only these rows.

A text (a `Source`) is an array of whole numbers, or an object that `data.read` or `shards.read`
returns. Such an object reads tokens from a file when it is indexed. `_array` converts a list to an
array.
"""

import itertools
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import SupportsIndex

import numpy as np
from jaxtyping import Int32, Int64

from parallax import argument_checks
from parallax.data.tokens import Source

ROWS = 64  # windows that are read at a time
# Rounds of the Feistel network; four make a pseudorandom permutation (Luby and Rackoff 1988).
ROUNDS = 8


def batch(
    tokens: Source,
    *,
    seed: SupportsIndex,
    step: SupportsIndex,
    size: SupportsIndex,
    length: SupportsIndex,
    rows: slice = slice(None),
) -> Int32[np.ndarray, "rows length_and_one"]:
    """Returns the rows `rows` of the global batch at `step`. A row is a window: `length` inputs and
    the token after them. The global batch has `size` rows.

    The inputs are `batch[:, :-1]`, and the targets are `batch[:, 1:]`. Every epoch cuts the text
    into windows at another offset, and takes each window once, in a random order. Neighbouring
    windows share one token. Window w is `tokens[o + w * length :][: length + 1]`; the offset o and
    the order are drawn from (seed, epoch). The windows of epoch 0 in their random order, then those
    of epoch 1, and so on, form one sequence. Row i of the batch is element step * size + i of this
    sequence. `batch(..., rows=r)` equals `batch(...)[r]`, but reads only the windows of these rows.

    The random order is not stored: `permuted` computes which window is at a given place. So memory
    and time do not depend on the length of the text. Raises `ValueError` for a text shorter than
    one window, for tokens that are not whole numbers or do not fit int32, and for a seed, step,
    size, length or `rows` out of range.
    """
    seed, step, size, length = argument_checks.whole_numbers(
        "data.batch", seed=seed, step=step, size=size, length=length
    )
    if seed < 0 or step < 0 or size < 1 or length < 1 or seed >> 64:
        raise ValueError(
            "batch needs 0 <= seed < 2**64, step >= 0, size >= 1 and length >= 1, "
            f"got seed {seed}, step {step}, size {size}, length {length}. "
            "Correct the number that is out of range."
        )
    sequences = range(size)[rows]
    if not sequences or (rows.stop is not None and rows.stop > size):
        raise ValueError(
            f"rows must select at least one of the {size} sequences and stop at {size} or below; "
            f"got {rows}. Give each process a slice within 0..{size}."
        )
    if len(tokens) < length + 1:
        # A text of one token has no window of any length.
        shorter = f", or choose a length up to {len(tokens) - 1}" if len(tokens) > 1 else ""
        raise ValueError(
            f"a window of length {length} needs {length + 1} tokens (the inputs and the token "
            f"after them); the text has {len(tokens)}. Use a longer text{shorter}."
        )
    # The number of windows is the same for all offsets. `spare` is the largest offset. If there are
    # two windows or more, it is at least `length` - 1, so that a window may begin at any token.
    windows = max(1, len(tokens) // length - 1)
    spare = len(tokens) - 1 - windows * length
    # For each row: the number of the epoch, and the window's place in the order of that epoch.
    positions = (divmod(step * size + i, windows) for i in sequences)
    starts = [
        _starts(seed, epoch, [place for _, place in group], windows, spare, length)
        for epoch, group in itertools.groupby(positions, key=itemgetter(0))
    ]
    source, first = _array(tokens), np.concatenate(starts)  # `first`: where each window begins
    # The places of the tokens (int64) take twice the memory of the batch, so they are made for
    # `ROWS` windows at a time.
    parts = np.split(first, range(ROWS, len(first), ROWS))
    window = np.arange(length + 1)
    return np.concatenate([_as_int32(source[np.add.outer(part, window)]) for part in parts])


def _starts(
    seed: int, epoch: int, places: Sequence[int], windows: int, spare: int, length: int
) -> Int64[np.ndarray, "rows"]:
    """Returns the index of each window's first token. The epoch has `windows` windows in a random
    order, and `places` has the places of the wanted windows in that order. All windows of an epoch
    are shifted by the same number of tokens, a random number from 0 up to and including `spare`.
    """
    # NumPy promises that the raw values of Philox never change; `Generator.permutation` may change.
    # The key has 128 bits: the epoch and the seed, of 64 each. The first value chooses the offset,
    # and each later value is the key of a round of `permuted`.
    draw, *keys = np.random.Philox(key=epoch << 64 | seed).random_raw(1 + ROUNDS)
    offset = int(draw) % (spare + 1)
    return offset + length * permuted(np.array(places, np.int64), windows, keys)


def permuted(
    places: Int64[np.ndarray, "n"], count: int, keys: Sequence[np.uint64]
) -> Int64[np.ndarray, "n"]:
    """Returns the numbers at `places` in a permutation of the numbers 0 to `count` - 1. The `keys`
    choose the permutation, which is never stored whole.

    A Feistel network permutes all numbers of n bits, where n is the least even number of bits, 2 or
    more, that `count` - 1 fits in. There are at most `4 * count` of these numbers. A number that
    comes out as `count` or more goes through the network again, until it is below `count`. With
    these repetitions, the network permutes the numbers below `count` (Black and Rogaway 2002 call
    this cycle walking).
    """
    # Half of the bits of `count` - 1, rounded up, since the network mixes two halves.
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    numbers = _feistel(places.astype(np.uint64), half, keys)
    while (outside := numbers >= count).any():
        numbers[outside] = _feistel(numbers[outside], half, keys)
    return numbers.astype(np.int64)


def _feistel(numbers: np.ndarray, half: int, keys: Sequence[np.uint64]) -> np.ndarray:
    """Returns the number to which a permutation maps each of the `numbers`. It is a permutation of
    all numbers of `2 * half` bits, and has one round for each of the `keys`. A round swaps the two
    halves of each number, and mixes one half into the other.
    """
    shift = np.uint64(half)
    left, right = numbers >> shift, numbers & np.uint64((1 << half) - 1)
    for key in keys:
        # The shift leaves the highest `half` bits of the mixed number.
        left, right = right, left ^ (_mixed(right ^ key) >> np.uint64(64 - half))
    return left << shift | right


def _mixed(x: np.ndarray) -> np.ndarray:
    """Returns each number of `x` with its bits mixed: each new bit depends on all bits of the
    number. This is the mixing function of splitmix64 (Steele, Lea and Flood 2014).
    """
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)


def held_out_batches(
    tokens: Source,
    *,
    size: SupportsIndex,
    length: SupportsIndex,
    limit: SupportsIndex | None = None,
) -> Iterator[Int32[np.ndarray, "size length_and_one"]]:
    """Returns an iterator over at most `limit` batches of the text's windows, in order, with `size`
    windows per batch. The batches are the same in every evaluation.

    In the windows that are used, each token but the text's first is a target once. Windows at the
    end that do not fill a batch are left out, so all batches have one shape. Raises `ValueError`
    for a text shorter than one batch, for a size, length or limit below 1, and for tokens that are
    not whole numbers or do not fit int32.
    """
    size, length = argument_checks.whole_numbers("data.held_out_batches", size=size, length=length)
    if limit is not None:
        (limit,) = argument_checks.whole_numbers("data.held_out_batches", limit=limit)
    if size < 1 or length < 1 or (limit is not None and limit < 1):
        raise ValueError(
            "held_out_batches needs size >= 1, length >= 1 and limit >= 1 or None, "
            f"got size {size}, length {length}, limit {limit}. "
            "Correct the number that is out of range."
        )
    batches = (len(tokens) - 1) // (size * length)
    if batches < 1:
        raise ValueError(
            f"one batch of {size} windows of length {length} needs {size * length + 1} tokens; "
            f"the text has {len(tokens)}. "
            "Use a longer text, hold out more of it, or choose a smaller size or length."
        )
    window = np.add.outer(np.arange(size) * length, np.arange(length + 1))
    starts = range(0, batches * size * length, size * length)[:limit]
    return (_as_int32(_array(tokens)[start + window]) for start in starts)


def _array(tokens: Source) -> Source:
    """Converts a list or tuple of tokens to an array; returns any other source unchanged."""
    return np.asarray(tokens) if isinstance(tokens, list | tuple) else tokens


def _as_int32(windows: np.ndarray) -> Int32[np.ndarray, "rows length_and_one"]:
    """Returns windows of whole numbers, of shape [rows, length + 1], as int32. Raises `ValueError`
    for windows of another type or shape, and for numbers that do not fit int32.
    """
    tokens = np.asarray(windows)
    if tokens.dtype.kind not in "iu" or tokens.ndim != 2:
        raise ValueError(
            "a batch needs a text that is a one-dimensional array of whole numbers; the windows "
            f"that were cut from the text are {tokens.dtype}{list(tokens.shape)}. Encode a text "
            "with a tokenizer."
        )
    int32 = np.iinfo(np.int32)
    low, high = int(tokens.min()), int(tokens.max())
    if low < int32.min or high > int32.max:
        raise ValueError(
            "a batch needs tokens that fit int32, the type in which devices hold tokens; "
            f"got {high if high > int32.max else low}. Encode the text with a "
            "tokenizer: a tokenizer's tokens fit int32."
        )
    return tokens.astype(np.int32)
