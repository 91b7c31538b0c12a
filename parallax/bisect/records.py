"""Records one run: assembles the whole value of each tap from the pieces that the devices report.

A *tap* is a call in the model that reports a value. A device reports a block of the whole value, a
term of a sum, or a copy of the value. The tap's partition spec and the reported positions tell
which of the three a device reports. For the value's cotangent, terms and copies change places. If
each device has a copy of a value that is typed as varying, each device has a term of the value's
cotangent. If each device has a term of the value, each device has a copy of the value's cotangent.
A loss is a mean over equal parts of the batch. A device reports the cotangents of the loss of one
part of the batch, so this module multiplies these cotangents by 1 / the number of parts.

A `Report` (in taps.py) has a device's block as its `value`, the device's index along each mesh axis
as `device`, the number of the microbatch as `microbatch` (-1 on a pipeline stage that had none to
compute), and the number of the layer as `layer` (-1 if there is none). The report's `mark` has the
facts of the tap. `terms` are the axes along which devices have terms of a sum. `varying` are the
axes along which the value is typed as varying. `dims` has the axes that split each dim. In `terms`
and `dims`, BATCH stands for all axes that split the rows of the batch. `placed` are the dims for
which the report gives positions: for each dim in `placed`, `places` has an array with the positions
of the block's elements in the whole array.

A `_Form` tells how to join the devices' reports into a value. `row_dim` is the dim of the batch's
rows, or None if there is none. `dims` has the axes that split each dim. Devices have different
blocks along `block_axes`, and terms of a sum along `summed`. If `joined` is true, the value is a
sum over microbatches too.
"""

import dataclasses
import json
import math
import zipfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr

from parallax import taps, trees
from parallax.jaxprs import opened
from parallax.taps import AFTER, BACKWARD, BATCH, FORWARD, Report

ARGUMENT, RESULT = "argument", "result"
PHASES = (ARGUMENT, FORWARD, BACKWARD, AFTER, RESULT)  # in program order


class Key(NamedTuple):
    """The key of a value.

    Attributes:
        path: the path of the tap that reported the value, with "*" in place of the number of the
            layer.
        layer: the number of the value's layer; -1 if the value belongs to no layer.
        way: the phase of the run that the value belongs to, one of `PHASES`.
    """

    path: str
    layer: int
    way: str

    def __str__(self) -> str:
        """Returns the path with the number of the layer in place of "*". A cotangent has the words
        "the cotangent of" before its path.
        """
        path = self.path.replace("*", str(self.layer), 1) if self.layer >= 0 else self.path
        return f"the cotangent of {path}" if self.way == BACKWARD else path


class Value(NamedTuple):
    """One value of a run.

    Attributes:
        whole: the value; nan in places that no device reported.
        differs: a dict with a number for each axis along which the devices' copies of the value
            differ: the largest difference from the first copy, divided by the first copy's largest
            magnitude.
        rows: two numbers, the dim of the batch's rows and the number of rows of a microbatch on a
            device; None if no dim has the rows of the batch, or if the value has the rows of
            several microbatches.
        has_others: whether a device also reported other values under the same key. `whole` has the
            first of them.
    """

    whole: np.ndarray
    differs: dict[str, float] = {}  # noqa: RUF012  (never changed in place)
    rows: tuple[int, int] | None = None
    has_others: bool = False


@dataclasses.dataclass
class Record:
    """The values that a run computed.

    Attributes:
        values: the values in program order, by `Key`: the path, the layer and the phase of a value.
        sizes: the sizes of the mesh's axes.
        microbatches: the number of microbatches.
        program: the jaxpr of the run; None in a record that was loaded.
    """

    values: dict[Key, Value]
    sizes: dict[str, int]
    microbatches: int
    program: Jaxpr | None = None

    def save(self, path: str | Path) -> None:
        """Writes the record without its program to a NumPy archive, for a comparison with a later
        commit. The archive has the values as the arrays "0", "1", ..., and everything else as JSON
        in the array "head"."""
        items = list(self.values.items())
        head = {
            "sizes": self.sizes,
            "microbatches": self.microbatches,
            "values": [[*key, *value[1:]] for key, value in items],
        }
        arrays = {str(i): value.whole for i, (_, value) in enumerate(items)}
        arrays["head"] = np.array(json.dumps(head))
        with open(path, "wb") as file:  # to a path without ".npz", NumPy would add it
            np.savez_compressed(file, **arrays)  # pyright: ignore[reportArgumentType]


def of_tree(tree: Any) -> Record:
    """Returns a record of the arrays in a tree, for example in a restored state.

    Raises:
        ValueError: two arrays have the same dotted path.
    """
    return Record(_of_arrays(eqx.filter(tree, eqx.is_array), RESULT), {}, 1)


def load(path: str | Path) -> Record:
    """Returns a record that was saved. The record has no program, so a comparison with it names no
    collectives.

    Raises:
        ValueError: the file at `path` is no record, or is damaged.
    """
    try:
        with open(path, "rb") as file, np.load(file) as archive:
            head = json.loads(str(archive["head"]))
            values = dict(_loaded(entry, archive[str(i)]) for i, entry in enumerate(head["values"]))
        return Record(values, dict(head["sizes"]), int(head["microbatches"]))
    # NumPy, json and `_loaded` raise these errors if the file is another or is damaged.
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        EOFError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        raise ValueError(
            f"{path}: needed a record that bisect's Record.save wrote; got another file, or a "
            f"damaged one ({error}). Write it again with --save, or Record.save."
        ) from error


def _loaded(entry: list[Any], whole: np.ndarray) -> tuple[Key, Value]:
    """Returns the key of one saved value, and the value. `whole` is the value's array. `entry` has
    the fields `path`, `layer` and `way` (the phase of the run) of the `Key`, and the fields
    `differs`, `rows` and `has_others` of the `Value`; older files lack the last. `differs` is a
    dict with a number for each axis along which the devices' copies of the value differ: the
    largest relative difference of the copies. Raises an error for other data; `load` then raises a
    `ValueError` with the file's name."""
    # `rows` has the dim of the batch's rows, and the number of rows of a microbatch on a device.
    path, layer, way, differs, rows, *others = entry
    # "biufc" are the kinds of NumPy's dtypes bool, integer, unsigned integer, floating-point and
    # complex.
    if way not in PHASES or whole.dtype.kind not in "biufc":
        raise ValueError(
            f"the value {path!r} needs a numeric array, and a phase that is one of {PHASES}; got "
            f"an array of {whole.dtype}, and the phase {way!r}"
        )
    differs = {axis: float(off) for axis, off in differs.items()}
    return Key(str(path), int(layer), way), Value(
        whole, differs, None if rows is None else (int(rows[0]), int(rows[1])), any(others)
    )


def record(
    run: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]],
    *,
    rows: str | Sequence[str] = ("data",),
    means: str | Sequence[str] = (),
) -> Record:
    """Returns a `Record` of a run: its arguments, the values reported by its taps, and its results.

    Args:
        run: returns a function and its arguments, such as `lambda: (train_step.train,
            (train_step.init(), windows))`. `record` switches the taps on and then calls `run`.
            The function may have run before: it is traced again.
        rows: the axes that split the rows of the batch, or the name of one axis.
        means: other axes over which the loss is a mean, such as an axis that splits the tokens.

    Raises:
        ValueError: the program has no tap, or two arrays of its arguments or of its results have
            the same dotted path.
    """
    with taps.recording() as recorder:
        f, arguments = run()
        arrays, static = eqx.partition(arguments, eqx.is_array_like)
        arrays = jax.tree.map(jnp.asarray, arrays)

        def results(arrays):
            """Returns the arrays in the result of the recorded function, `f`."""
            return eqx.filter(f(*eqx.combine(arrays, static)), eqx.is_array)

        traced = jax.jit(results).trace(arrays)
        compiled = traced.lower().compile()
        recorder.reports.clear()  # drops the reports of anything that `run` itself has computed
        # The step may donate its arguments, so they are read before it runs.
        argument_values = _of_arrays(arrays, ARGUMENT)
        result_arrays = jax.block_until_ready(compiled(arrays))
    if not recorder.reports:
        raise ValueError(
            "bisect.record needs a program with taps; this program reported nothing. Put "
            "bisect.tap into the model. A jaxpr that was made before the recording has no taps, so "
            "pass the function itself."
        )
    tapped, sizes, microbatches = _put_together(recorder, _axes(rows), _axes(means))
    recorder.reports.clear()  # JAX keeps the traces, and they keep the recorder
    values = argument_values | tapped | _of_arrays(result_arrays, RESULT)
    # `opened` returns the jaxpr without the values of its constants.
    return Record(values, sizes, microbatches, opened(traced.jaxpr))


def _axes(names: str | Sequence[str]) -> tuple[str, ...]:
    """Returns a name of an axis, or a sequence of names, as a tuple of names."""
    return (names,) if isinstance(names, str) else tuple(names)


def _put_together(
    recorder: taps.Recorder, rows: tuple[str, ...], means: tuple[str, ...]
) -> tuple[dict[Key, Value], dict[str, int], int]:
    """Returns three results: a dict of the reported values, in program order; a dict of the sizes
    of the mesh's axes; and the number of microbatches.

    `recorder` has all reports of the run. `rows` are the axes that split the batch's rows. `means`
    are the other axes over which the loss is a mean.
    """
    reports_of: dict[Key, list[Report]] = {}  # the reports of each value
    for report in recorder.reports:
        # A stage of a pipeline that has no microbatch to compute (-1) computes a value without a
        # meaning.
        if report.microbatch >= 0:
            key = Key(report.mark.path, report.layer, report.way)
            reports_of.setdefault(key, []).append(report)
    microbatches = 1 + max(report.microbatch for report in recorder.reports)
    values = {}
    for key in sorted(reports_of, key=_order(recorder.paths, reports_of)):
        reports = reports_of[key]
        # The loss has terms over BATCH. Its cotangent is given and not computed: it is left out.
        if key.way != BACKWARD or BATCH not in reports[0].mark.terms:
            # An axis that is in both counts once.
            form = _form(reports, microbatches, rows, tuple(dict.fromkeys((*rows, *means))))
            values[key] = _whole(reports, form)
    sizes = {name: size for report in recorder.reports for name, size in report.mark.sizes}
    return values, sizes, microbatches


def _of_arrays(tree: Any, way: str) -> dict[Key, Value]:
    """Returns the arrays of `tree` as values by key. `tree` has the arguments or the results of a
    program, and `way` is ARGUMENT or RESULT. The path in a key is the way and the array's path,
    such as "result.0.model.embedding". The values belong to no layer (-1). Raises `ValueError` if
    two arrays have the same path.
    """
    leaves = [(trees.dotted(path), leaf) for path, leaf in jax.tree.leaves_with_path(tree)]
    if same := trees.twice([path for path, _ in leaves]):
        raise ValueError(f"bisect: two arrays have the same path, {way}.{same[0]}: {trees.RENAME}.")
    return {Key(f"{way}.{path}", -1, way): _of_array(leaf) for path, leaf in leaves}


def _order(paths: dict[str, int], keys: Iterable[Key]) -> Callable[[Key], tuple[int, ...]]:
    """Returns a function from a key to a sort key. These sort keys put values in the order in which
    the program computes them: layer by layer, and in reverse in the backward pass. `paths` has the
    place of each tap in the trace, and `keys` are the keys of all values.
    """
    layered = {key.path for key in keys if key.layer >= 0}
    # Taps in layers are traced once, for all layers. Such taps that are neighbours in the trace
    # form one group, so that all values of a layer come before those of the next. `begins` is the
    # place of the group's first tap.
    group, begins, was_layered = {}, -1, False
    for path in sorted(paths, key=paths.__getitem__):
        if path not in layered or not was_layered:
            begins = paths[path]
        was_layered = path in layered
        group[path] = begins

    def order(key: Key) -> tuple[int, ...]:
        """Returns the sort key of a value: the index of its phase in `PHASES`, the place of its
        group, the number of its layer, and the place of its tap in the trace.

        Taps inside layers form one group if no tap outside layers was traced between them. A tap
        outside layers is a group by itself. The place of a group is the place of its first tap in
        the trace. In the sort key of a cotangent, the last three numbers are negated, so that
        cotangents are sorted in reverse.
        """
        place = (group[key.path], key.layer, paths[key.path])
        return (PHASES.index(key.way), *(place if key.way != BACKWARD else (-x for x in place)))

    return order


class _Form(NamedTuple):
    """The way in which the reported blocks of one value form the whole value.

    Attributes:
        names: the names of the mesh's axes.
        sizes: the sizes of the axes.
        dims: for each dim, the axes that split the dim.
        row_dim: the dim of the batch's rows; None if there is none.
        block_axes: the axes along which devices have different blocks.
        summed: the axes along which devices have terms of a sum.
        joined: whether the value is a sum over microbatches too.
        scale: a factor on the sum, which turns the sum into a mean if the loss is a mean.
        microbatches: the number of microbatches; 1 for a value outside of their loop.
        rows: the value's field `rows`.
    """

    names: list[str]
    sizes: dict[str, int]
    dims: list[tuple[str, ...]]
    row_dim: int | None
    block_axes: set[str]
    summed: set[str]
    joined: bool
    scale: float
    microbatches: int
    rows: tuple[int, int] | None


def _form(
    reports: list[Report], microbatches: int, rows: tuple[str, ...], means: tuple[str, ...]
) -> _Form:
    """Returns the `_Form` of one value, from the partition spec of its tap and from JAX's
    replication types.

    Args:
        reports: the reports of the value.
        microbatches: the number of microbatches of the run.
        rows: the axes that split the batch's rows.
        means: all axes over whose devices the loss is a mean, `rows` among them.
    """
    mark, backward = reports[0].mark, reports[0].way == BACKWARD
    sizes = dict(mark.sizes)
    names = list(sizes)
    dims = []
    for dim in mark.dims:
        # In a spec, BATCH stands for the axes that split the rows of the batch. Axes that the mesh
        # lacks split nothing.
        axes = [axis for name in dim for axis in (rows if name == BATCH else (name,))]
        dims.append(tuple(axis for axis in axes if axis in sizes))
    row_dim = next((i for i, dim in enumerate(mark.dims) if BATCH in dim), None)
    own_microbatches = microbatches if mark.in_microbatch else 1
    value_rows = None
    if row_dim is not None and own_microbatches == microbatches:
        value_rows = row_dim, reports[0].value.shape[row_dim]
    # Devices have different blocks along the axes of the spec, and along axes on which they report
    # different positions.
    block_axes = {axis for dim in dims for axis in dim} | _along_places(reports, names)
    is_mean = BATCH in mark.terms  # such terms are those of a loss, a mean over parts of the batch
    mean_axes = [axis for axis in means if axis in sizes]
    terms = {axis for axis in mark.terms if axis in sizes} | set(mean_axes if is_mean else ())
    # Along each axis, devices have blocks, terms or copies of the value. The cotangent has terms
    # along the axes of those copies that are typed as varying: all varying axes but those of blocks
    # and terms.
    summed = set(mark.varying) - block_axes - terms if backward else terms
    # If no dim has the rows of the batch, each microbatch has a term of a cotangent or of the loss,
    # and `joined` says that these terms are added up.
    joined = row_dim is None and (backward or is_mean)
    # The loss is the mean over this number of equal parts of the batch. Devices report the loss of
    # one part, and its cotangents, so sums of these reports are divided by the number.
    parts = math.prod(sizes[name] for name in mean_axes) * own_microbatches
    scale = 1 / parts if backward or is_mean else 1.0
    return _Form(
        names,
        sizes,
        dims,
        row_dim,
        block_axes,
        summed,
        joined,
        scale,
        own_microbatches,
        value_rows,
    )


def _whole(reports: list[Report], form: _Form) -> Value:
    """Returns one value, assembled from all devices and microbatches. If devices report terms of a
    sum, the terms are added up. Blocks are put in their places. Copies are compared with the first
    copy."""
    copy_axes = [name for name in form.names if name not in form.block_axes | form.summed]
    # If a value has no rows and is no sum over microbatches, each microbatch has a copy of it.
    by_microbatch = form.row_dim is None and not form.joined
    # `blocks` has the copies of each block. Its key is the place of the block: the indices along
    # `block_axes`, and the microbatch. The key of a copy is its owner: the indices along
    # `copy_axes`, and the microbatch. -1 stands for all microbatches. A copy is the sum of its
    # terms, with one of their reports. `_once` yields one report for each device and microbatch: of
    # repeated reports the first, or their sum for a cotangent. Reports of idle stages (microbatch
    # -1) are not among `reports`.
    blocks: dict[Any, dict[Any, tuple[np.ndarray, Report]]] = {}
    for report in _once(reports):
        index = dict(zip(form.names, report.device, strict=True))
        place = [index[name] for name in form.names if name in form.block_axes]
        place.append(-1 if form.row_dim is None else report.microbatch)
        owner = (*(index[name] for name in copy_axes), report.microbatch if by_microbatch else -1)
        copies, value = blocks.setdefault(tuple(place), {}), _as_float(report.value)
        if owner in copies:  # another term of the same sum
            value = np.asarray(copies[owner][0] + value)
        copies[owner] = value, report
    dtype = np.result_type(*(value for copies in blocks.values() for value, _ in copies.values()))
    # A place that no device reported stays nan.
    whole = np.full(_shape(form, reports), np.nan, dtype)
    differs: dict[str, float] = {}
    for copies in blocks.values():
        (first_owner, (first, report)), *others = sorted(copies.items(), key=itemgetter(0))
        # `_places` gives the block's indices in the whole value, for each dim.
        whole[np.ix_(*_places(form, report))] = first * form.scale
        for owner, (value, _) in others:
            off = relative(first, value)
            # The copies differ along each axis on which the two owners have different indices. The
            # last number of an owner is its microbatch.
            for name, a, b in zip([*copy_axes, "microbatches"], first_owner, owner, strict=True):
                if a != b and off != 0:
                    # Unlike `max`, `np.maximum` returns nan if either number is nan.
                    differs[name] = float(np.maximum(differs.get(name, 0.0), off))
    return Value(whole, differs, form.rows, _has_others(reports))


def relative(right: np.ndarray, wrong: np.ndarray, least: float = 1e-300) -> float:
    """Returns the largest of the `gaps` relative to the largest finite |right|, or to `least` if
    that is larger."""
    return float(np.max(gaps(right, wrong), initial=0)) / max(largest_finite(right), least)


def gaps(right: np.ndarray, wrong: np.ndarray) -> np.ndarray:
    """Returns |wrong - right| for each element. The result is 0 for equal infinite numbers, such as
    those of a mask, and for nan in both; it is nan where only one number is nan."""
    is_same = (right == wrong) | (np.isnan(right) & np.isnan(wrong))
    with np.errstate(invalid="ignore"):  # inf - inf
        return np.where(is_same, 0.0, np.abs(wrong - right))


def largest_finite(x: np.ndarray) -> float:
    """Returns the largest finite |element|; 0 if there is none."""
    return float(np.max(np.abs(x), initial=0, where=np.isfinite(x)))


def _once(reports: list[Report]) -> Iterable[Report]:
    """Returns one report for each device and microbatch.

    With rematerialisation (`jax.checkpoint`) a value is computed and reported again; only the first
    report counts. The reports of a cotangent are added up instead, since the first one may be only
    a zero. A pipeline runs the backward pass of the embedding in every step of the schedule. If a
    step has no microbatch for the embedding, the pipeline uses microbatch 0 and a cotangent of 0.
    The reports of such steps are 0, so they do not change the sum.
    """
    kept: dict[tuple[tuple[int, ...], int], Report] = {}
    for report in reports:
        key = (report.device, report.microbatch)
        if key not in kept:
            kept[key] = report
        elif report.way == BACKWARD:
            kept[key] = report._replace(value=kept[key].value + report.value)
    return kept.values()


def _has_others(reports: list[Report]) -> bool:
    """Returns whether a device reported different values for the same microbatch, as a tap in a
    loop without `bisect.at` does. A cotangent never has others, since its reports are added up.

    Rematerialisation may round in another way, so values are different if they differ by more than
    the square root of the type's `eps`.
    """
    first: dict[tuple[tuple[int, ...], int], np.ndarray] = {}
    for report in reports:
        value = report.value
        kept = first.setdefault((report.device, report.microbatch), value)
        if report.way == BACKWARD or kept is value:
            continue
        is_inexact = jnp.issubdtype(value.dtype, jnp.inexact)
        allowed = float(jnp.finfo(value.dtype).eps) ** 0.5 if is_inexact else 0.0
        # A negated condition, since it is also true for nan.
        if kept.shape != value.shape or not relative(_as_float(kept), _as_float(value)) <= allowed:
            return True
    return False


def _as_float(x: np.ndarray) -> np.ndarray:
    """Returns `x` if it is complex or its dtype is float32 or float64, else `x` as float64. In
    bfloat16, NumPy would round each sum and each difference to bfloat16."""
    keeps_type = x.dtype.kind == "c" or x.dtype in (np.float32, np.float64)
    return x if keeps_type else x.astype(np.float64)


def _along_places(reports: list[Report], names: list[str]) -> set[str]:
    """Returns the axes along which devices report different positions (`Report.places`). An axis is
    returned if two devices that differ only in their index along this axis report different
    positions."""
    axes: set[str] = set()
    # A device has the same positions in all microbatches, so one of its reports is enough.
    by_device = {report.device: report.places for report in reports}
    for i, name in enumerate(names):
        first_places: dict[tuple[int, ...], tuple[np.ndarray, ...]] = {}
        for device, places in by_device.items():
            # The key has the device's indices along all other axes.
            first = first_places.setdefault((*device[:i], *device[i + 1 :]), places)
            if not all(map(np.array_equal, first, places)):
                axes.add(name)
    return axes


def _shape(form: _Form, reports: list[Report]) -> list[int]:
    """Returns the shape of the whole value. The size of a dim is the size of a block times the
    number of devices that split the dim. For the dim of the batch's rows, this product is also
    multiplied by the number of microbatches. If devices report positions in a dim, the size of this
    dim is 1 more than the largest position.
    """
    blocks = [math.prod(form.sizes[axis] for axis in dim) for dim in form.dims]
    shape = [n * count for n, count in zip(reports[0].value.shape, blocks, strict=True)]
    if form.row_dim is not None:
        shape[form.row_dim] *= form.microbatches
    # `report.places` has the positions along the dims `placed`, in the same order.
    for number, dim in enumerate(reports[0].mark.placed):
        shape[dim] = 1 + max(int(report.places[number].max(initial=0)) for report in reports)
    return shape


def _places(form: _Form, report: Report) -> list[np.ndarray]:
    """Returns, for each dim, the indices of a report's block in the whole value.

    For the dims in `report.mark.placed`, the report itself has the indices. In any other dim, along
    which a block has n elements, block number b has the indices from b * n to (b + 1) * n - 1. The
    number b counts the blocks over the mesh axes that split the dim, and, in the dim of the batch's
    rows, also over microbatches. The outermost axis varies slowest, and the microbatch varies
    fastest.
    """
    index, placed = dict(zip(form.names, report.device, strict=True)), report.mark.placed
    places = []
    for dim, n in enumerate(report.value.shape):
        block = 0  # the number of this device's block among those of the dim
        for axis in form.dims[dim]:
            block = block * form.sizes[axis] + index[axis]
        if dim == form.row_dim:
            block = block * form.microbatches + report.microbatch
        is_placed = dim in placed
        places.append(report.places[placed.index(dim)] if is_placed else block * n + np.arange(n))
    return places


def _of_array(leaf: Any) -> Value:
    """Returns a JAX array as a `Value`. Several devices may hold copies of the same block of the
    array. If the copies of a block differ, `differs` has the largest relative difference under the
    name "devices". For arrays of integers or booleans, this difference is infinite.
    """
    leaf = jnp.asarray(leaf)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):  # NumPy has no random keys: their numbers
        leaf = jax.random.key_data(leaf)
    whole = np.asarray(leaf)
    is_exact = whole.dtype.kind in "iub"
    if not is_exact and whole.dtype.kind != "c":
        whole = whole.astype(np.float64)
    blocks: dict[str, np.ndarray] = {}
    off = 0.0
    for shard in leaf.addressable_shards:  # `shard.index` is the place of its block in the array
        block = np.asarray(shard.data)
        first = blocks.setdefault(str(shard.index), block)
        if not is_exact:
            off = float(np.maximum(off, relative(_as_float(first), _as_float(block))))
        elif not np.array_equal(first, block):
            off = np.inf
    return Value(whole, {"devices": off} if off != 0 else {})
