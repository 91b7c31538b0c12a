"""Reads a JSON object from a file of unknown origin, or raises an error that says what is wrong."""

import json
import re
from pathlib import Path
from typing import Any

from parallax import _files

DIGITS = 19  # those of a 64-bit number; no size or token needs more
# The most objects and lists in a file. A configuration has about ten. A thousand nested ones would
# overflow the stack when they are written again.
MOST = 64
# A text in quotes, or one that the end of the file cuts short.
TEXT = re.compile(rb'"(?:[^"\\]|\\.)*(?:"|\\?\Z)', re.DOTALL)
AGAIN = "Copy or download it again."


def read_json(file: Path) -> dict[str, Any]:
    """Returns the JSON object in `file`, which may begin with a byte order mark, and may have the
    numbers NaN and Infinity, as transformers writes them. Raises `ValueError` if the file holds
    anything else.
    """
    try:
        content = _files.read(file, "a JSON object")
    except ValueError as error:
        raise ValueError(f"{error} {AGAIN}") from error
    outside = TEXT.sub(b"", content)
    nested = outside.count(b"{") + outside.count(b"[")
    if nested > MOST:
        raise ValueError(
            f"{file} has {nested} objects and lists; at most {MOST} are allowed. {AGAIN}"
        )
    try:
        fields = json.loads(content.decode("utf-8-sig"), parse_int=_integer)
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON ({error}). {AGAIN}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{file} must hold a JSON object; got a {type(fields).__name__}. {AGAIN}")
    return fields


def short(value: Any) -> str:
    """Returns `repr(value)` for an error, cut if it is long."""
    try:
        text = repr(value)
    except ValueError:  # of an integer of more digits than Python writes
        text = f"a {type(value).__name__} that Python does not write"
    return text if len(text) <= 100 else f"{text[:80]}... ({len(text)} characters)"


def _integer(digits: str) -> int:
    """Returns the integer that the text `digits` states, and refuses a text of more than `DIGITS`
    digits.
    """
    if len(digits.lstrip("-")) > DIGITS:
        raise ValueError(
            f"an integer of {len(digits)} digits, {digits[:10]}...; at most {DIGITS} are allowed"
        )
    return int(digits)
