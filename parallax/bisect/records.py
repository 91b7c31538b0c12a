"""A record of one run: each tapped value, put together from what the devices and microbatches reported.

What a device reports is a block of the whole value, a term of a sum, or a copy. Which of these follows from the tap's spec and
from JAX's replication types. A cotangent is the other way round: of a value that devices have copies of, which may differ in
type, each has a term of the cotangent; where the value was terms of a sum, each has a copy. Losses are means, over equal parts
of the batch, so that a part's cotangents count 1 / parts.
"""

import dataclasses
import json
import zipfile
import zlib
from collections.abc import Callable, Iterable, Sequence
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
PHASES = (ARGUMENT, FORWARD, BACKWARD, AFTER, RESULT)


class Key(NamedTuple):
    """Which value: the tap's path, the layer (-1: none) and one of `PHASES`."""

    path: str
    layer: int
    way: str

    def __str__(self) -> str:
        path = self.path.replace("*", str(self.layer), 1) if self.layer >= 0 else self.path
        return f"the cotangent of {path}" if self.way == BACKWARD else path


class Value(NamedTuple):
    """One value of a run.

    Attributes:
        whole: the value; nan where no device reported anything.
        differs: the axes along which the devices' copies differ, and by how much of the largest number.
        rows: the dim of the batch, and how many rows a microbatch has on a device; None: it has none.
    """

    whole: np.ndarray
    differs: dict[str, float] = {}  # noqa: RUF012  (never changed in place)
    rows: tuple[int, int] | None = None


@dataclasses.dataclass
class Record:
    """What a run computed.

    Attributes:
        values: by their keys, in program order.
        sizes: of the mesh's axes.
        microbatches: how many.
        program: what was run; None of a record that was loaded.
    """

    values: dict[Key, Value]
    sizes: dict[str, int]
    microbatches: int
    program: Jaxpr | None = None

    def save(self, path: str | Path) -> None:
        """Write it to a NumPy archive, to be compared with a later commit, say."""
        items = list(self.values.items())
        head = {
            "sizes": self.sizes,
            "microbatches": self.microbatches,
            "values": [[*key, value.differs, value.rows] for key, value in items],
        }
        arrays = {str(i): value.whole for i, (_, value) in enumerate(items)}
        arrays["head"] = np.array(json.dumps(head))
        np.savez_compressed(path, **arrays)  # pyright: ignore[reportArgumentType]


def of_tree(tree: Any) -> Record:
    """The arrays of a tree as a record: of a state that was restored, say, to be compared with another checkpoint's."""
    return Record(_of_arrays(eqx.filter(tree, eqx.is_array), RESULT), {}, 1)


def load(path: str | Path) -> Record:
    """A record that was saved. It has no program, so that no collective can be named from it.

    Raises `ValueError` for any other file.
    """
    try:
        with open(path, "rb") as file, np.load(file) as archive:
            head = json.loads(str(archive["head"]))
            values = dict(_loaded(entry, archive[str(i)]) for i, entry in enumerate(head["values"]))
        return Record(values, dict(head["sizes"]), int(head["microbatches"]))
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
            f"{path}: needed a record that bisect's Record.save wrote; got another file, or a damaged one ({error}). "
            "Write it again with --save, or Record.save."
        ) from error


def _loaded(entry: list[Any], whole: np.ndarray) -> tuple[Key, Value]:
    """One value of a record that was saved. Raises `ValueError`, or as Python does, for anything else."""
    path, layer, way, differs, rows = entry
    if way not in PHASES or whole.dtype.kind not in "biuf":
        raise ValueError(f"{path!r} is a {whole.dtype} of the phase {way!r}")
    differs = {axis: float(off) for axis, off in differs.items()}
    return Key(str(path), int(layer), way), Value(
        whole, differs, None if rows is None else (int(rows[0]), int(rows[1]))
    )


def record(
    run: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]],
    *,
    rows: Sequence[str] = ("data",),
    means: Sequence[str] = (),
) -> Record:
    """What a run is given, what it computes at all of its taps, and what it returns.

    Args:
        run: makes a function and its arguments, such as `lambda: (prepared.train, (prepared.init(), windows))`. It is called
            while taps are on, and must make the function anew: one that was traced before has no taps.
        rows: the axes that split the rows of the batch.
        means: the axes besides `rows` over whose devices the loss is a mean, such as one that splits the tokens.

    Raises:
        ValueError: the program has no tap.
    """
    with taps.recording() as recorder:
        f, arguments = run()
        arrays, static = eqx.partition(arguments, eqx.is_array_like)
        arrays = jax.tree.map(
            lambda leaf: leaf if eqx.is_array(leaf) else jnp.asarray(leaf), arrays
        )
        results = lambda arrays: eqx.filter(f(*eqx.combine(arrays, static)), eqx.is_array)
        traced = jax.jit(results).trace(arrays)
        compiled = traced.lower().compile()
        recorder.reports.clear()  # those of whatever `run` computed
        given = _of_arrays(arrays, ARGUMENT)  # before the step, which may donate them
        made = jax.block_until_ready(compiled(arrays))
    if not recorder.reports:
        raise ValueError(
            "bisect.record needs a program with taps, traced now; this one reported nothing. Put bisect.tap into the model, and "
            "let `run` make the function: one that was traced before keeps what it was."
        )
    tapped, sizes, microbatches = _put_together(recorder, tuple(rows), tuple(means))
    values = given | tapped | _of_arrays(made, RESULT)
    return Record(values, sizes, microbatches, opened(traced.jaxpr))


def _put_together(
    recorder: taps.Recorder, rows: tuple[str, ...], means: tuple[str, ...]
) -> tuple[dict[Key, Value], dict[str, int], int]:
    """The tapped values in program order, the sizes of the mesh's axes, and how many microbatches there are."""
    found: dict[Key, list[Report]] = {}
    for each in recorder.reports:
        if each.microbatch >= 0:
            found.setdefault(Key(each.mark.path, each.layer, each.way), []).append(each)
    microbatches = 1 + max(each.microbatch for reports in found.values() for each in reports)
    means = (*rows, *means)
    values = {
        key: _whole(reports, microbatches, rows, means)
        for key, reports in found.items()
        if not _mean_seed(key, reports)
    }
    ordered = {key: values[key] for key in sorted(values, key=_order(recorder.paths, values))}
    sizes = dict(
        size for reports in found.values() for each in reports[:1] for size in each.mark.sizes
    )
    return ordered, sizes, microbatches


def _of_arrays(tree: Any, way: str) -> dict[Key, Value]:
    """The arrays that a program is given, or that it returns."""
    return {
        Key(f"{way}.{trees.dotted(path)}", -1, way): _of_array(leaf)
        for path, leaf in jax.tree.leaves_with_path(tree)
    }


def _mean_seed(key: Key, reports: list[Report]) -> bool:
    """Whether it is the cotangent of a loss: what the backward pass begins with, and nothing that was computed."""
    return key.way == BACKWARD and BATCH in reports[0].mark.terms


def _order(paths: dict[str, int], keys: Iterable[Key]) -> Callable[[Key], tuple[int, ...]]:
    """Program order: all that a layer has before the next layer, and backward in reverse."""
    layered = {key.path for key in keys if key.layer >= 0}
    group, begins, last = {}, -1, False
    for path in sorted(paths, key=paths.__getitem__):
        if path not in layered or not last:
            begins = paths[path]
        last = path in layered
        group[path] = begins

    def order(key: Key) -> tuple[int, ...]:
        place = (group[key.path], key.layer, paths[key.path])
        return (PHASES.index(key.way), *(place if key.way != BACKWARD else (-x for x in place)))

    return order


class _Form(NamedTuple):
    """How the blocks of one value make the whole.

    Attributes:
        names: the mesh's axes.
        sizes: of them.
        dims: for each dim the axes that split it.
        rows: the dim of the batch's rows; None: there is none.
        placed: the axes along which devices have other blocks.
        summed: the axes along which devices have terms of a sum.
        joined: whether microbatches have terms of the sum too.
        scale: what the sum is multiplied by.
        microbatches: how many.
    """

    names: list[str]
    sizes: dict[str, int]
    dims: list[tuple[str, ...]]
    rows: int | None
    placed: set[str]
    summed: set[str]
    joined: bool
    scale: float
    microbatches: int


def _form(
    reports: list[Report], microbatches: int, rows: tuple[str, ...], means: tuple[str, ...]
) -> _Form:
    mark, backward = reports[0].mark, reports[0].way == BACKWARD
    sizes, names = dict(mark.sizes), [name for name, _ in mark.sizes]
    named = lambda axes: [axis for axis in axes if axis in sizes]
    dims = [
        tuple(axis for name in dim for axis in named(rows if name == BATCH else (name,)))
        for dim in mark.dims
    ]
    in_rows = next((i for i, dim in enumerate(mark.dims) if BATCH in dim), None)
    placed = {axis for dim in dims for axis in dim} | _along_places(reports, names)
    mean = BATCH in mark.terms
    terms = {*named(mark.terms), *(named(means) if mean else ())}
    summed = set(mark.varying) - placed - terms if backward else terms
    count = int(np.prod([sizes[name] for name in named(means)])) * microbatches
    joined = in_rows is None and (backward or mean)
    return _Form(
        names,
        sizes,
        dims,
        in_rows,
        placed,
        summed,
        joined,
        1 / count if backward or mean else 1.0,
        microbatches,
    )


def _whole(
    reports: list[Report], microbatches: int, rows: tuple[str, ...], means: tuple[str, ...]
) -> Value:
    """One value of all devices and microbatches."""
    form = _form(reports, microbatches, rows, means)
    rest = [name for name in form.names if name not in form.placed | form.summed]
    by_microbatch = form.rows is None and not form.joined
    copies: dict[
        Any, dict[Any, tuple[np.ndarray, Report]]
    ] = {}  # by place, and there by who has a copy
    for each in _once(reports):
        own = dict(zip(form.names, each.device, strict=True))
        place = (
            *(own[name] for name in form.names if name in form.placed),
            None if form.rows is None else each.microbatch,
        )
        owner = (*(own[name] for name in rest), each.microbatch if by_microbatch else None)
        found, value = copies.setdefault(place, {}), _wide(each.value)
        found[owner] = (value if owner not in found else np.asarray(found[owner][0] + value), each)
    kind = np.result_type(
        *(value.dtype for found in copies.values() for value, _ in found.values())
    )
    whole = np.full(_shape(form, reports), np.nan, kind)
    differs: dict[str, float] = {}
    for found in copies.values():
        (first_owner, (first, each)), *others = sorted(found.items(), key=lambda item: str(item[0]))
        whole[np.ix_(*_places(form, each))] = first * form.scale
        for owner, (other, _) in others:
            off = relative(first, other)
            for name, a, b in zip([*rest, "microbatches"], first_owner, owner, strict=True):
                if a != b and off != 0:
                    differs[name] = max(differs.get(name, 0.0), off)
    return Value(
        whole,
        differs,
        None if form.rows is None else (form.rows, reports[0].value.shape[form.rows]),
    )


def relative(right: np.ndarray, wrong: np.ndarray, least: float = 1e-300) -> float:
    """The largest |wrong - right| in units of the largest |right|, which counts as no less than `least`."""
    largest = float(np.max(np.abs(right), initial=0))
    return float(np.max(np.abs(wrong - right), initial=0)) / max(largest, least)


def _once(reports: list[Report]) -> Iterable[Report]:
    """A report for each device and microbatch. What is computed again is reported again; a cotangent of no job is 0."""
    found: dict[Any, Report] = {}
    for each in reports:
        where = (each.device, each.microbatch)
        if where not in found:
            found[where] = each
        elif each.way == BACKWARD:
            found[where] = each._replace(value=found[where].value + each.value)
    return found.values()


def _wide(x: np.ndarray) -> np.ndarray:
    """`x` in a type of floating-point numbers that NumPy knows: bfloat16 has none."""
    return x if x.dtype in (np.float32, np.float64) else x.astype(np.float64)


def _along_places(reports: list[Report], names: list[str]) -> set[str]:
    """The axes along which the reported places differ."""
    found: set[str] = set()
    by_device = {each.device: each.places for each in reports}
    for i, name in enumerate(names):
        seen: dict[tuple[int, ...], tuple[np.ndarray, ...]] = {}
        for device, places in by_device.items():
            other = seen.setdefault((*device[:i], *device[i + 1 :]), places)
            if any(not np.array_equal(a, b) for a, b in zip(other, places, strict=True)):
                found.add(name)
    return found


def _shape(form: _Form, reports: list[Report]) -> list[int]:
    """The shape of the whole value."""
    blocks = [int(np.prod([form.sizes[axis] for axis in dim])) for dim in form.dims]
    shape = [n * count for n, count in zip(reports[0].value.shape, blocks, strict=True)]
    if form.rows is not None:
        shape[form.rows] *= form.microbatches
    for order, dim in enumerate(reports[0].mark.placed):
        shape[dim] = 1 + max(int(each.places[order].max(initial=0)) for each in reports)
    return shape


def _places(form: _Form, each: Report) -> list[np.ndarray]:
    """Where a block is in the whole value, along each dim."""
    own, placed = dict(zip(form.names, each.device, strict=True)), each.mark.placed
    found = []
    for dim, n in enumerate(each.value.shape):
        block = 0
        for axis in form.dims[dim]:
            block = block * form.sizes[axis] + own[axis]
        if dim == form.rows:
            block = block * form.microbatches + each.microbatch
        found.append(each.places[placed.index(dim)] if dim in placed else block * n + np.arange(n))
    return found


def _of_array(leaf: Any) -> Value:
    """An array of all devices, as JAX puts it together, and whether its copies differ."""
    leaf = leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    whole = np.asarray(leaf)
    whole = whole.astype(np.float64) if whole.dtype.kind not in "iub" else whole
    blocks: dict[str, np.ndarray] = {}
    off = 0.0
    for shard in leaf.addressable_shards:
        own = np.asarray(shard.data)
        first = blocks.setdefault(str(shard.index), own)
        if own.dtype.kind in "fV":
            off = max(off, relative(_wide(first), _wide(own)))
    return Value(whole, {"devices": off} if off > 0 else {})
