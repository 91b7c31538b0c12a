"""Checks the numbers of a configuration: numbers of Python or NumPy, or values from a file."""

import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from parallax.models.files.json_file import short

LARGEST = 2**31 - 1  # the largest int32
LARGEST_MULTIPLE = 2**20  # the largest `vocabulary_multiple`: a larger one would add only padding


class Bound(NamedTuple):
    """The numbers that a field may have.

    Attributes:
        text: a description of these numbers, for errors.
        holds: a function that returns whether a number is one of these numbers; for nan it must
            return False.
    """

    text: str
    holds: Callable[[float], bool]


RATE = Bound("from 0 up to, not including, 1", lambda value: 0 <= value < 1)
NOT_NEGATIVE = Bound("of 0 or more", lambda value: 0 <= value < math.inf)
POSITIVE = Bound("of more than 0", lambda value: 0 < value < math.inf)


class Checked(NamedTuple):
    """Checks the fields of a configuration, and converts them to `int` and `float` in place.

    Each method raises `ValueError` if a field fails its check. The message names this field.

    Attributes:
        name: the name of the configuration in errors, such as "gpt2.Config".
        config: the configuration.
    """

    name: str
    config: Any

    def whole(self, *fields: str, least: int = 1, most: int = LARGEST) -> None:
        """Checks that these fields are whole numbers from `least` to `most`, and makes them `int`s
        in place.
        """
        for field in fields:
            value = getattr(self.config, field)
            needs = f"{self.name} needs {field}"
            try:  # a bool is an integer in Python, but no size
                number = None if isinstance(value, bool) else operator.index(value)
            except TypeError:
                number = None
            if number is None:
                raise ValueError(f"{needs} as a whole number; got {short(value)}.")
            if number < least:
                raise ValueError(f"{needs} of {least} or more; got {short(value)}.")
            if number > most:
                raise ValueError(f"{needs} of {most} or less; got {short(value)}.")
            # A frozen dataclass refuses a plain assignment.
            object.__setattr__(self.config, field, number)

    def real(self, *fields: str, bound: Bound) -> None:
        """Checks that these fields are real numbers in `bound`; makes them `float`s in place."""
        for field in fields:
            value = getattr(self.config, field)
            try:  # nan stands for a value that is no number, since no `Bound` holds for nan
                # `float` would accept a text such as "1.5" and the bytes of one (which NumPy takes
                # as an array), True as 1, and the real part of a complex number.
                array = np.asarray(value)
                number = math.nan if array.ndim or array.dtype.kind in "bcSU" else float(value)
            except (TypeError, ValueError, OverflowError):
                number = math.nan
            if not bound.holds(number):
                raise ValueError(f"{self.name} needs {field} {bound.text}; got {short(value)}.")
            # A frozen dataclass refuses a plain assignment.
            object.__setattr__(self.config, field, number)

    def divides(self, size: str, parts: str) -> None:
        """Checks that the field `parts` divides the field `size`."""
        total, number = getattr(self.config, size), getattr(self.config, parts)
        if total % number:
            raise ValueError(
                f"{self.name}: {size}={total} must be a multiple of {parts}={number}. Use "
                f"{parts}={divisor(total, number)}."
            )


def divisor(number: int, most: int) -> int:
    """Returns the largest divisor of `number` that is not above `most`. Errors propose this divisor
    in place of a number that does not divide `number`.
    """
    small_divisors = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    # Each divisor above the square root is `number` divided by one below it.
    divisors = (*small_divisors, *(number // n for n in small_divisors))
    return max(n for n in divisors if n <= most)
