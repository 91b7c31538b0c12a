"""JSON from a file that somebody else wrote: an object, or one sentence that says what is wrong
with it.
"""

import json
from pathlib import Path
from typing import Any

from parallax import _files

DIGITS = 19  # 64 bits; longer numbers are no size or token of anything
DEEPEST = 64  # objects and lists within each other; no configuration has ten


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in `file`, which may begin with a byte order mark. Raises `ValueError` for
    anything else.
    """
    again = "Copy or download it again."
    try:
        content = _files.read(file, "a JSON object")
    except ValueError as error:
        raise ValueError(f"{error} {again}") from error
    try:
        fields = json.loads(content.decode("utf-8-sig"), parse_int=_integer)
    except ValueError as error:
        raise ValueError(f"{file} is not whole JSON ({error}). {again}") from error
    except RecursionError as error:
        raise ValueError(
            f"{file} is nested too deeply: needed {DEEPEST} levels at most. {again}"
        ) from error
    if _depth(fields) > DEEPEST:
        raise ValueError(f"{file} is nested too deeply: needed {DEEPEST} levels at most. {again}")
    if not isinstance(fields, dict):
        raise ValueError(f"{file} must hold a JSON object; got a {type(fields).__name__}. {again}")
    return fields


def short(value: Any) -> str:
    """`value` as Python writes it, cut where it is long."""
    try:
        text = repr(value)
    except ValueError:  # of an integer of more digits than Python writes
        text = f"a {type(value).__name__} that Python does not write"
    return text if len(text) <= 100 else f"{text[:80]}... ({len(text)} characters)"


def _integer(digits: str) -> int:
    if len(digits.lstrip("-")) > DIGITS:
        raise ValueError(
            f"an integer of {len(digits)} digits, {digits[:10]}...; needed {DIGITS} at most"
        )
    return int(digits)


def _depth(value: Any) -> int:
    """How many objects and lists lie within each other, counted up to one more than `DEEPEST`."""
    depth, level = 0, [value]
    while level and depth <= DEEPEST:
        level = [each for each in level if isinstance(each, dict | list)]
        depth += bool(level)
        level = [
            inner for each in level for inner in (each.values() if isinstance(each, dict) else each)
        ]
    return depth
