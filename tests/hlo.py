"""The collectives of a compiled program, read from its text: what XLA really sends."""

import math
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all")
LINE = re.compile(rf"= ([^%]+?) ({'|'.join(KINDS)})(-start)?\(%")
ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")
COMPUTATION = re.compile(r"^(ENTRY )?%?([^\s(]+) \(.*\{$")
CALLED = re.compile(r"(?:body|to_apply|calls|branch_computations|true_computation|false_computation)=\{?((?:%[^\s,}]+(?:, )?)+)")
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


class Op(NamedTuple):
    """One array that a collective gives each device."""

    kind: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int


def collectives(f: Callable, *arguments) -> list[Op]:
    """The collectives of `f`, compiled for `arguments` (arrays or their shapes)."""
    return parse(jax.jit(f).lower(*arguments).compile().as_text())


def parse(text: str) -> list[Op]:
    """The collectives in the text of a compiled module, each as often as it runs: a loop's body once a trip."""
    computations: dict[str, list[str]] = {}
    entry = lines = None
    for line in text.splitlines():
        if found := COMPUTATION.match(line):
            lines = computations.setdefault(found.group(2), [])
            entry = found.group(2) if found.group(1) else entry
        elif lines is not None:
            lines.append(line)
    return list(_run(computations, entry))


def _run(computations: dict[str, list[str]], name: str) -> Iterator[Op]:
    for line in computations[name]:
        if found := LINE.search(line):
            yield from _ops(*found.groups())
        elif found := CALLED.search(line):
            inside = [op for called in re.findall(r"%([^\s,}]+)", found.group(1)) for op in _run(computations, called)]
            if inside and " while(" in line:
                trips = TRIPS.search(line)
                assert trips, f"A loop with collectives whose number of trips XLA does not know: {line[:200]}"
                inside *= int(trips.group(1))
            yield from inside


def _ops(result: str, kind: str, start: str | None) -> Iterator[Op]:
    arrays = ARRAY.findall(result)
    if start and kind in ("all-gather", "collective-permute"):  # (operands, results, context words)
        arrays = [array for array in arrays if array != ("u32", "")]
        arrays = arrays[len(arrays) // 2 :]
    for dtype, dims in arrays:
        shape = tuple(int(dim) for dim in dims.split(",") if dim)
        bits = 8 if dtype == "pred" else int(re.search(r"\d+", dtype).group())
        yield Op(kind, dtype, shape, math.prod(shape) * bits // 8)
