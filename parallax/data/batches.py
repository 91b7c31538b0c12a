"""Batches of a text. The one idea: **a batch is a pure function of (seed, step)**.

It does not depend on how many devices or processes share it, nor on which batches came before. So a run resumes at any step, on
any layout, with nothing of the loader to save; and a process that holds a part of the batch reads only its `rows`.

Legend: N tokens.
"""

import functools
from collections.abc import Iterator
from typing import SupportsIndex

import numpy as np
from jaxtyping import Int32

from parallax import argument_checks
from parallax.data.tokens import Source


def batch(
    tokens: Source,
    *,
    seed: SupportsIndex,
    step: SupportsIndex,
    size: SupportsIndex,
    length: SupportsIndex,
    rows: slice = slice(None),
) -> Int32[np.ndarray, "rows length_and_one"]:
    """The `rows` of the global batch at `step`: `size` windows of `length` inputs and the token after them.

    Inputs are `[:, :-1]`, targets `[:, 1:]`. Every epoch cuts the text anew into windows that share one token with the next, and
    deals each of them once: window w is `tokens[o + w * length :][: length + 1]`, with o and the order of the windows drawn from
    (seed, epoch). Sequence i is the one at position p = step * size + i of this endless deal, whoever asks:
    `batch(..., rows=r)` equals `batch(...)[r]` and reads only its own windows.

    Costs a permutation of N / length windows once an epoch. Raises `ValueError` for a text shorter than one window, for tokens
    that are not whole numbers or do not fit int32, or for a seed, step, size, length or `rows` that there cannot be.
    """
    seed, step, size, length = argument_checks.whole_numbers(
        "data.batch", seed=seed, step=step, size=size, length=length
    )
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
    for p in (step * size + i for i in mine):
        offset, order = _deal(seed, p // windows, windows, spare)
        starts.append(offset + int(order[p % windows]) * length)
    return _as_int32(_array(tokens)[np.add.outer(starts, np.arange(length + 1))])


@functools.lru_cache(maxsize=2)
def _deal(seed: int, epoch: int, windows: int, spare: int) -> tuple[int, np.ndarray]:
    """The epoch's offset, 0 to `spare`, and the order of its windows."""
    # Raw counter values and a stable sort: NumPy promises these for good, and its `permutation` only until it finds a faster one.
    draws = np.random.Philox(key=epoch << 64 | seed).random_raw(windows + 1)
    return int(draws[0]) % (spare + 1), np.argsort(draws[1:], kind="stable")


def held_out_batches(
    tokens: Source,
    *,
    size: SupportsIndex,
    length: SupportsIndex,
    limit: SupportsIndex | None = None,
) -> Iterator[Int32[np.ndarray, "size length_and_one"]]:
    """The text's windows in order, `size` at a time, at most `limit` batches: the same for every evaluation.

    Each token but the first is a target once. Windows at the end that do not fill a batch are left out: all shapes are the same.
    Raises `ValueError` for a text shorter than one batch, a size below 1, or as `batch` does for tokens.
    """
    size, length = argument_checks.whole_numbers("data.held_out_batches", size=size, length=length)
    if limit is not None:
        (limit,) = argument_checks.whole_numbers("data.held_out_batches", limit=limit)
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
    return (_as_int32(_array(tokens)[start + window]) for start in starts)


def _array(tokens: Source) -> Source:
    return np.asarray(tokens) if isinstance(tokens, list | tuple) else tokens


def _as_int32(found: np.ndarray) -> Int32[np.ndarray, "rows length_and_one"]:
    tokens = np.asarray(found)
    if tokens.dtype.kind not in "iu" or tokens.ndim != 2:
        raise ValueError(
            f"a batch needs a source of one dim of whole numbers; its windows are {tokens.dtype}{list(tokens.shape)}. "
            "Encode a text with a Tokenizer."
        )
    int32 = np.iinfo(np.int32)
    if (
        not np.can_cast(tokens.dtype, np.int32)
        and not int32.min <= tokens.min() <= tokens.max() <= int32.max
    ):
        bad = tokens.max() if tokens.max() > int32.max else tokens.min()
        raise ValueError(
            f"a batch needs tokens that fit int32, as devices hold them, got {bad}. Encode the text again."
        )
    return tokens.astype(np.int32)
