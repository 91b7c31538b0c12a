"""Compares two runs, value by value in program order.

A *tap* reports a value inside a model. A `Record` has the values of a run. The `Key` of a value has
the path of its tap, its layer, and its `way`: argument, forward pass, backward pass, after the
backward pass, or result. Devices may have copies of one value, which should be equal. If the copies
are not equal, `Value.differs` has the largest difference along each mesh axis along which they
differ. A variable `copies` has the axes along which the copies differ by more than is allowed.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from parallax.bisect.collectives_between import ProgramSlice, before_result, before_tap
from parallax.bisect.diagnosis import diagnose
from parallax.bisect.records import (
    ARGUMENT,
    RESULT,
    Key,
    Record,
    gaps,
    largest_finite,
    record,
    relative,
)

BOUND = 1e-11  # for float64: more than the sum of some thousand roundings of 1e-16
# The true value of some cotangents is 0, and their computed numbers are only rounding errors. So a
# difference is divided by at least this part of the largest number among the values of the same
# kind (see `_kind`).
SMALL = 1e-3


class Difference(NamedTuple):
    """The first value that differs between two runs, or whose copies on the devices of the second
    run differ.

    Attributes:
        key: the value's key.
        off: the largest difference of an element between the runs, divided by the largest magnitude
            in the first run's value. If only the copies differ, `off` may be below `bound`.
        bound: the largest `off` that is allowed.
        index: the index of the number with the largest difference, in the whole value.
        right: this number in the first run.
        wrong: this number in the second run.
        microbatch: the microbatch of the second run that the number belongs to; None if the value
            has no rows of the batch.
        diagnosis: the kind of mistake that the values of the two runs suggest.
        after: the names of the last values that are equal in both runs. The first value that
            differs comes after them.
        program_slice: the collectives and functions between the values `after` and the value that
            differs, in the second run's program; None if that run has no program.
    """

    key: Key
    off: float
    bound: float
    index: tuple[int, ...]
    right: float
    wrong: float
    microbatch: int | None
    diagnosis: str
    after: tuple[str, ...]
    program_slice: ProgramSlice | None

    @property
    def collectives_between(self) -> tuple[str, ...]:
        """The collectives between the last equal values and the first value that differs. The
        collective that is nearest to the value that differs comes first."""
        return self.program_slice.collectives if self.program_slice else ()

    def __str__(self) -> str:
        """Returns the fields as text. If the difference has a `program_slice`, the last two lines
        list its collectives and at most eight of its functions."""
        part = "" if self.microbatch is None else f", microbatch {self.microbatch}"
        lines = [
            f"{self.key} differs first: {self.off:.2g} of its largest number, "
            f"{self.bound:.2g} allowed.",
            f"  at {list(self.index)}{part}: {self.wrong:.9g} instead of {self.right:.9g}",
            f"  looks like: {self.diagnosis}",
            f"  equal before it: {', '.join(self.after) or 'nothing'}",
        ]
        if self.program_slice is not None:
            lines.append(f"  collectives between: {'; '.join(self.collectives_between) or 'none'}")
            lines.append(f"  made by: {', '.join(self.program_slice.functions[:8])}")
        return "\n".join(lines)


class Comparison(NamedTuple):
    """The result of `compare`.

    Attributes:
        first: the first value that differs by more than the bound; None if there is none.
        compared: the number of values whose names are in both runs, those after `first` included.
        worst: the largest difference among the values before `first`, which are all within the
            bound, and the name of the value that has this difference.
        alone: the names of values that are in only one run.
        first_of_several: the names under which a device reported several values. Only the first
            value of each name is compared.
    """

    first: Difference | None
    compared: int
    worst: tuple[float, str]
    alone: tuple[str, ...]
    first_of_several: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Returns the first value that differs, as text. If no value differs by more than the bound
        allows, the text has the largest difference that was found. The last line has the names
        under which a device reported several values, if there are any."""
        off, name = self.worst
        text = (
            f"All {self.compared} values are equal within the bound; the largest difference is "
            f"{off:.2g}, in {name}."
        )
        if self.first is not None:
            text = str(self.first)
        if self.first_of_several:
            text += (
                "\nOnly the first of several values was compared of: "
                f"{', '.join(self.first_of_several)}. Give each value a name of its own, or call "
                "the tap inside bisect.at(layer=...)."
            )
        return text


# A recorded run, or a function that `record` takes as its argument `run`.
Run = Record | Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]


def compare(
    run_a: Run,
    run_b: Run,
    *,
    bound: float | np.floating | Mapping[Key, float] = BOUND,
    rows: str | Sequence[str] = ("data",),
    means: str | Sequence[str] = (),
) -> Comparison:
    """Returns the `Comparison` of two runs, with the first value in which `run_b` differs from
    `run_a`.

    The arguments are compared first, then the forward pass, the backward pass and the results.

    Args:
        run_a: the run that is right, such as a run on one device. It is a `Record`, or a function
            that `record` takes as `run`.
        run_b: a run in another layout, of another commit, or in another precision.
        bound: the largest difference that is allowed, divided by the largest magnitude in the value
            of `run_a`. It is one number, or a dict with a number for each value, as `rounding`
            returns it.
        rows: the axes that split the rows of the batch, as in `record`.
        means: other axes over which the loss is a mean, as in `record`.

    Raises:
        ValueError: no name of a value is in both runs, so there is nothing to compare.
    """
    a, b = (_recorded(run, rows, means) for run in (run_a, run_b))
    keys = [key for key in a.values if key in b.values]  # in the first run's program order
    if not keys:
        raise ValueError(
            "bisect.compare needs two runs with taps of the same names; these have none in common."
        )
    alone = [str(key) for key in a.values if key not in b.values]
    alone += [str(key) for key in b.values if key not in a.values]
    several = tuple(
        str(key) for key in keys if a.values[key].has_others or b.values[key].has_others
    )
    differences = _differences(a, b)
    worst, equal = (0.0, str(keys[0])), []
    for key in keys:
        # A value for which `bound` has no number may differ by anything.
        allowed = float(bound.get(key, np.inf) if isinstance(bound, Mapping) else bound)
        difference = differences[key]
        # The axes along which the copies in `run_b` differ from each other by more than is allowed.
        # `off` is the difference of the copies. A nan counts too, but `nan > allowed` is false.
        copies = [axis for axis, off in b.values[key].differs.items() if not off <= allowed]
        if copies or not difference <= allowed:
            first = _described(a, b, key, (difference, allowed), copies, equal)
            return Comparison(first, len(keys), worst, tuple(alone), several)
        worst = max(worst, (difference, str(key)))
        equal.append(key)
    return Comparison(None, len(keys), worst, tuple(alone), several)


def rounding(
    exact: Run,
    rounded: Run,
    *,
    times: float = 4.0,
    rows: str | Sequence[str] = ("data",),
    means: str | Sequence[str] = (),
) -> dict[Key, float]:
    """Returns a bound for each value of a run in low precision, such as bfloat16. The bound is
    `times` * max(the value's rounding error, the median error of all values). The median is taken
    over the errors other than 0, since many values may be exact.

    `compare(exact, run, bound=rounding(exact, rounded))` then compares a run of another layout in
    low precision, and allows for rounding. Each run is a `Record` or a function, as in `compare`.

    Args:
        exact: a run in higher precision, on one device.
        rounded: the same run in low precision, on one device.
        times: the factor by which the errors are multiplied, since another layout sums in another
            order, which rounds differently.
        rows: the axes that split the rows of the batch, as in `record`.
        means: other axes over which the loss is a mean, as in `record`.
    """
    off = _differences(_recorded(exact, rows, means), _recorded(rounded, rows, means))
    positive = [difference for difference in off.values() if difference > 0]
    # A value without an error in this run may have an error when it is summed in another order, so
    # each value is allowed at least the median error.
    least = float(np.median(positive)) if positive else BOUND
    return {key: times * max(difference, least) for key, difference in off.items()}


def _recorded(run: Run, rows: str | Sequence[str], means: str | Sequence[str]) -> Record:
    """Returns the record of a run, or `run` itself if it is a `Record`."""
    return run if isinstance(run, Record) else record(run, rows=rows, means=means)


def _kind(key: Key) -> tuple[str, str]:
    """Returns the kind of a value: the `way` of the value's key, and the beginning of the key's
    path. For an argument or a result of the run, the beginning is the first three parts of the
    path, such as "result.0.model", and for a state of the optimizer two more, such as
    "result.0.optimizer.0.nu". For a value that a tap reported, it is the first part.
    """
    # The path of an argument or a result begins with its way, its number and its first field, as
    # in "result.0.model.blocks". The path of a tap begins with a part of the model.
    parts = key.path.split(".")
    depth = 3 if key.way in (ARGUMENT, RESULT) else 1
    # Adam's second moments are squares, and far smaller than its first moments.
    if parts[2:3] == ["optimizer"] and parts[3:4] and parts[3].isdecimal():
        depth = 5
    return key.way, ".".join(parts[:depth])


def _differences(a: Record, b: Record) -> dict[Key, float]:
    """Returns, for each value that both runs have, the largest difference of its elements in the
    two runs, divided by a magnitude.

    This magnitude is the larger of two numbers: the largest finite |element| of the value in `a`,
    and `SMALL` times the largest finite |element| among all floats in `a` of the same kind, as
    `_kind` returns it. The result is infinite if the shapes differ, or if any integers or
    booleans differ.
    """
    largest: dict[tuple[str, str], float] = {}
    # Whole numbers, such as a random key or the number of a step, say nothing about rounding.
    floats = {key: x.whole for key, x in a.values.items() if x.whole.dtype.kind not in "iub"}
    for key, whole in floats.items():
        largest[_kind(key)] = max(largest.get(_kind(key), 0.0), largest_finite(whole))
    differences = {}
    for key in a.values:
        if key in b.values:
            right = a.values[key].whole
            wrong = _shaped_like(right, b.values[key].whole)
            if right.shape != wrong.shape:
                differences[key] = np.inf
            elif right.dtype.kind in "iub":
                differences[key] = 0.0 if np.array_equal(right, wrong) else np.inf
            else:
                # 1e-300 keeps `relative` from dividing by 0.
                differences[key] = relative(right, wrong, max(SMALL * largest[_kind(key)], 1e-300))
    return differences


def _shaped_like(right: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Returns `x` in the shape of `right` if both have equally many numbers, else `x` unchanged.

    A pipeline holds its layers as [stages, layers of a stage, ...], and one device holds them as
    [layers, ...], so the same value may have two shapes.
    """
    return x.reshape(right.shape) if x.size == right.size else x


def _described(
    a: Record,
    b: Record,
    key: Key,
    off: tuple[float, float],
    copies: list[str],
    equal: list[Key],
) -> Difference:
    """Returns the first difference, with a diagnosis and the part of the program that made the
    value.

    Args:
        a: the record of the run that is right.
        b: the record of the other run.
        key: the key of the value that differs.
        off: the value's difference between the runs, and the difference that is allowed.
        copies: the axes along which the devices' copies of the value in `b` differ from each other
            by more than is allowed.
        equal: the keys of the values before `key`, which are equal in both runs.
    """
    right, value = a.values[key].whole, b.values[key]
    # A pipeline's [stages, layers of a stage, ...] gets the shape [layers, ...], or the reverse.
    wrong = _shaped_like(right, value.whole)
    if np.iscomplexobj(right) or np.iscomplexobj(wrong):
        # The last index is 0 for the real parts, and 1 for the imaginary parts.
        right, wrong = (np.stack([np.real(x), np.imag(x)], axis=-1) for x in (right, wrong))
    index: tuple[int, ...] = ()
    right_and_wrong = np.nan, np.nan  # the two numbers at `index`
    if right.shape == wrong.shape and right.size:
        off_by = gaps(right, np.asarray(wrong, np.float64))
        off_by = np.where(np.isnan(off_by), np.inf, off_by)  # nan differs most
        index = tuple(int(i) for i in np.unravel_index(np.argmax(off_by), right.shape))
        right_and_wrong = float(right[index]), float(wrong[index])
    microbatch = None
    if value.rows is not None and index:
        # `dim` is the dim of the batch's rows. Each device's part of this dim has the device's
        # microbatches one after another, with `rows` rows each.
        dim, rows = value.rows
        microbatch = index[dim] // rows % b.microbatches
    text = diagnose(right, wrong, b.sizes, b.microbatches, copies)
    if key.way == ARGUMENT:
        text = f"the two runs were given different arguments; {text}"
    if copies and key.layer >= 0:
        # If several layers report under one number, their reports look like copies that differ.
        text += "; or several layers have this number"
    # Copies may also differ because reports were sorted under a wrong index of a microbatch or of a
    # layer. So with `numbers=True` the slice has the code that computes these indices too.
    program_slice = _slice_before(b, key, numbers=bool(copies))
    # `near` has the equal values at which the slice begins. `taps` names these values by path and
    # way, without a layer, so only values of this layer and of the layers beside it are taken.
    taps = program_slice.taps if program_slice else ()
    near = [
        before
        for before in equal
        if (before.path, before.way) in taps and abs(before.layer - key.layer) <= 1
    ]
    # The field `after` gets at most four of these values; without any, it gets the last equal one.
    after = tuple(dict.fromkeys(map(str, near or equal[-1:])))
    # `*off` gives the fields `off` and `bound`.
    return Difference(
        key, *off, index, *right_and_wrong, microbatch, text, after[-4:], program_slice
    )


def _slice_before(wrong_run: Record, key: Key, *, numbers: bool) -> ProgramSlice | None:
    """Returns the part of a run's program that computes the value `key` from the nearest values
    that taps reported before it.

    If `numbers` is true, the returned part also computes the indices of the microbatch and of the
    layer that the value belongs to. Returns None for an argument, which no part of the program
    computes, and for a run without a program.
    """
    if wrong_run.program is None or key.way == ARGUMENT:
        return None
    if key.way != RESULT:
        return before_tap(wrong_run.program, key.path, key.way, numbers=numbers)
    # Results are recorded in the order in which the program returns them, so the place of `key`
    # among them is the number of the program's result.
    results = [result for result in wrong_run.values if result.way == RESULT]
    return before_result(wrong_run.program, results.index(key))
