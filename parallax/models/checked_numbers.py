"""Checks the numbers of a configuration, which are Python's, NumPy's or from a file."""

import math
import operator
from typing import Any

from parallax.models.files.texts import short

LARGEST = 2**31 - 1  # what int32 counts


def whole(needs: str, value: Any, *, least: int = 1) -> int:
    """`value` as a whole number from `least` on. Raises `ValueError` for another: `needs` says for
    what.
    """
    try:
        found = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        found = None
    if found is None or not least <= found <= LARGEST:
        bound = (
            "as a whole number"
            if found is None
            else f"of {least} or more"
            if found < least
            else f"of {LARGEST} or less"
        )
        raise ValueError(f"{needs} {bound}; got {short(value)}.")
    return found


def real(needs: str, value: Any, *, below: float = math.inf) -> float:
    """`value` as a float from 0 up to `below`, which it must not reach. Raises `ValueError` for
    another.
    """
    try:
        found = math.nan if isinstance(value, str | bytes | bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if not 0 <= found < below:
        raise ValueError(f"{needs}; got {short(value)}.")
    return found


def divisor(number: int, most: int) -> int:
    """The largest divisor of `number` that is not above `most`."""
    pairs = ((low, number // low) for low in range(1, math.isqrt(number) + 1) if number % low == 0)
    return max(each for pair in pairs for each in pair if each <= most)
