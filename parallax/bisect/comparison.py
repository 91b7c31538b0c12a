"""Two runs side by side: the first value in program order that differs, and what lies before it."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from parallax.bisect import between
from parallax.bisect.looks import looks
from parallax.bisect.records import ARGUMENT, RESULT, Key, Record, record, relative

BOUND = 1e-11  # of float64: some thousand roundings of 1e-16, with room
SMALL = 1e-3  # a cotangent whose true value is 0 is all rounding: it is held to this part of the largest of its kind


class Finding(NamedTuple):
    """The first value that differs.

    Attributes:
        key: which one.
        off: by how much, relative to the largest number of the value; 0 where it is the copies alone that differ.
        bound: how much is allowed.
        index: of the number that is off the most, in the whole value.
        right: that number in the first run.
        wrong: likewise, in the second.
        microbatch: the microbatch of the second run that the number belongs to, if it belongs to a row of the batch.
        looks: what kind of mistake it looks like.
        after: the values right before it that are equal.
        between: what lies between these and it, in the second run's program; None where that has none.
    """

    key: Key
    off: float
    bound: float
    index: tuple[int, ...]
    right: float
    wrong: float
    microbatch: int | None
    looks: str
    after: tuple[str, ...]
    between: between.Between | None

    def __str__(self) -> str:
        part = "" if self.microbatch is None else f", microbatch {self.microbatch}"
        lines = [
            f"{self.key} differs first: {self.off:.2g} of its largest number, {self.bound:.2g} allowed.",
            f"  at {list(self.index)}{part}: {self.wrong:.9g} instead of {self.right:.9g}",
            f"  looks like: {self.looks}",
            f"  equal before it: {', '.join(self.after) or 'nothing'}",
        ]
        if self.between is not None:
            lines.append(f"  collectives between: {'; '.join(self.between.collectives) or 'none'}")
            lines.append(f"  made by: {', '.join(self.between.functions[:8])}")
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What `compare` found.

    Attributes:
        first: the first value that differs; None: all are equal.
        compared: how many values both runs have.
        worst: the largest difference, and of which value, among those within the bound.
        alone: the values that one run has alone.
    """

    first: Finding | None
    compared: int
    worst: tuple[float, str]
    alone: tuple[str, ...]

    def __str__(self) -> str:
        if self.first is not None:
            return str(self.first)
        off, name = self.worst
        return (
            f"All {self.compared} values are equal; the largest difference is {off:.2g}, in {name}."
        )


Run = Record | Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]


def compare(
    run_a: Run, run_b: Run, *, bound: float | Mapping[Key, float] = BOUND, **options: Any
) -> Comparison:
    """The first value in which `run_b` differs from `run_a`: what it is given, forward, backward, then what it returns.

    Args:
        run_a: what is right: a run on one device, say. A run is a `Record`, or what `record` takes.
        run_b: another layout, another commit, another precision.
        bound: of |a - b| relative to the largest |a| of the value: a number, or one for each value, as `rounding` makes them.
        options: of `record`.

    Raises:
        ValueError: the runs have no value in common.
    """
    a, b = (run if isinstance(run, Record) else record(run, **options) for run in (run_a, run_b))
    keys = [key for key in a.values if key in b.values]
    if not keys:
        raise ValueError(
            "bisect.compare needs two runs with taps of the same names; these have none in common."
        )
    alone = tuple(
        str(key)
        for key in (
            *(k for k in a.values if k not in b.values),
            *(k for k in b.values if k not in a.values),
        )
    )
    tops = _tops(a)
    worst, equal = (0.0, str(keys[0])), []
    for key in keys:
        allowed = bound if isinstance(bound, float | int) else bound.get(key, np.inf)
        off = _off(a, b, key, tops)
        copies = {axis: off for axis, off in b.values[key].differs.items() if not off <= allowed}
        if copies or not off <= allowed:
            return Comparison(
                _finding(a, b, key, (off, allowed), copies, equal), len(keys), worst, alone
            )
        worst = max(worst, (off, str(key)))
        equal.append(key)
    return Comparison(None, len(keys), worst, alone)


def rounding(exact: Run, rounded: Run, *, times: float = 4.0, **options: Any) -> dict[Key, float]:
    """How far each value of a run in few bits may be off: `times` as far as one that is known to be right is.

    Args:
        exact: a run in more bits, on one device.
        rounded: the same in few bits, on one device. Compare another layout in few bits with `exact`, under these bounds.
        times: other orders of summing are rounded otherwise.
        options: of `record`.
    """
    a, b = (run if isinstance(run, Record) else record(run, **options) for run in (exact, rounded))
    tops = _tops(a)
    off = {key: _off(a, b, key, tops) for key in a.values if key in b.values}
    least = (
        float(np.median([x for x in off.values() if x > 0]))
        if any(x > 0 for x in off.values())
        else BOUND
    )
    return {key: times * max(x, least) for key, x in off.items()}


def _kind(key: Key) -> tuple[str, str]:
    """Values whose sizes may be set beside each other: all gradients of weights, say, or all moments."""
    return key.way, ".".join(key.path.split(".")[: 3 if key.way in (ARGUMENT, RESULT) else 1])


def _tops(run: Record) -> dict[tuple[str, str], float]:
    found: dict[tuple[str, str], float] = {}
    for key, value in run.values.items():
        found[_kind(key)] = max(
            found.get(_kind(key), 0.0), float(np.nanmax(np.abs(value.whole), initial=0))
        )
    return found


def _off(a: Record, b: Record, key: Key, tops: Mapping[tuple[str, str], float]) -> float:
    """|a - b| relative to the largest |a|; not less than what is small beside values of its kind."""
    right, wrong = a.values[key].whole, _like(b.values[key].whole, a.values[key].whole)
    if right.shape != wrong.shape:
        return np.inf
    if right.dtype.kind in "iub":
        return 0.0 if np.array_equal(right, wrong) else np.inf
    return relative(right, wrong, max(SMALL * tops[_kind(key)], 1e-300))


def _like(x: np.ndarray, other: np.ndarray) -> np.ndarray:
    """The blocks of a pipeline, [v, L / v, ...], as [L, ...]; other arrays as they are."""
    return x.reshape(other.shape) if x.shape != other.shape and x.size == other.size else x


def _finding(
    a: Record,
    b: Record,
    key: Key,
    off: tuple[float, float],
    copies: Mapping[str, float],
    equal: list[Key],
) -> Finding:
    """What is said of a value that is off by the first of `off`, with the second allowed."""
    right, other = a.values[key].whole, b.values[key]
    wrong = _like(other.whole, right)
    index: tuple[int, ...] = ()
    if right.shape == wrong.shape and right.size:
        apart = np.abs(np.asarray(wrong, np.float64) - right)
        index = tuple(
            int(i)
            for i in np.unravel_index(
                int(np.argmax(np.where(np.isnan(apart), np.inf, apart))), right.shape
            )
        )
    microbatch = None
    if other.rows is not None and index:
        dim, rows = other.rows
        microbatch = index[dim] // rows % b.microbatches
    value = lambda x: float(x[index]) if right.shape == wrong.shape and x.size else float("nan")
    said = looks(
        right.astype(np.float64), wrong.astype(np.float64), b.sizes, b.microbatches, copies
    )
    if key.way == ARGUMENT:
        said = f"the runs are given other values; {said}"
    if copies and key.layer >= 0:
        said += "; or several layers have this number"
    lies = _between(b, key, numbers=bool(copies))
    before = {(path, way) for path, way in lies.taps} if lies else set()
    near = [
        each
        for each in equal
        if (each.path, each.way) in before and abs(each.layer - key.layer) <= 1
    ]
    after = tuple(dict.fromkeys(str(each) for each in (near or equal[-1:])))
    return Finding(key, *off, index, value(right), value(wrong), microbatch, said, after[-4:], lies)


def _between(b: Record, key: Key, *, numbers: bool) -> between.Between | None:
    if b.program is None or key.way == ARGUMENT:
        return None
    if key.way != RESULT:
        return between.before_tap(b.program, key.path, key.way, numbers=numbers)
    results = [each for each in b.values if each.way == RESULT]
    return between.before_result(b.program, results.index(key))
