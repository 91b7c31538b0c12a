"""Marks in a model: `tap` names a value, and while a record is made, each device reports that value
and its cotangent.

While no record is made, `tap` returns its argument, and nothing of it is in the program. While one
is made, it is an identity whose lowering calls back to Python. Its transpose is another identity,
which reports the cotangent. So taps work under `scan`, `checkpoint`, `vmap`, `shard_map` and in
pipelines, and code that reads programs sees no effect.
"""

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int, Shaped

from parallax import trees
from parallax._typing import PyTree
from parallax.collectives.types import varying_axes
from parallax.recording import AT, RECORDER, is_on

BATCH = "batch"  # in a spec: the axes and microbatches among which the rows of the batch are split
WHOLE = P()
FORWARD, LINEAR, BACKWARD, AFTER = "forward", "linear", "backward", "after"


class Mark(NamedTuple):
    """What is known of a tap when the program is traced.

    Attributes:
        path: its name; "*" stands for the layer.
        dims: for each dim the axes that split it.
        terms: the axes over which the value is a sum that was not taken.
        varying: the axes along which the value may differ.
        sizes: the mesh's axes, with their sizes.
        placed: the dims whose places in the whole array are reported.
    """

    path: str
    dims: tuple[tuple[str, ...], ...]
    terms: frozenset[str]
    varying: frozenset[str]
    sizes: tuple[tuple[str, int], ...]
    placed: tuple[int, ...]


class Report(NamedTuple):
    """What one device reports at one tap.

    Attributes:
        mark: of the tap.
        way: `forward`, `backward` for the cotangent, or `after` for what follows the backward pass.
        device: the device's place along each axis of the mark's `sizes`.
        microbatch: its number; below 0: the device had no job.
        layer: likewise; below 0: the value is of no layer.
        value: of the device.
        places: of each dim in the mark's `placed`.
    """

    mark: Mark
    way: str
    device: tuple[int, ...]
    microbatch: int
    layer: int
    value: np.ndarray
    places: tuple[np.ndarray, ...]


class Recorder:
    """What taps report to.

    Attributes:
        paths: of the taps, in the order in which they were first traced.
        marks: of the taps, as they were first traced.
        reports: of all devices, in any order.
    """

    def __init__(self):
        self.paths: dict[str, int] = {}
        self.marks: dict[str, Mark] = {}
        self.reports: list[Report] = []


@contextlib.contextmanager
def recording() -> Iterator[Recorder]:
    """Programs that are traced inside report their taps to the recorder."""
    recorder = Recorder()
    token = RECORDER.set(recorder)
    try:
        yield recorder
    finally:
        RECORDER.reset(token)


def tap(
    x: Shaped[Array, "*dims"],
    path: str,
    spec: P = WHOLE,
    *,
    places: Mapping[int, Int[Array, " block"]] | None = None,
) -> Shaped[Array, "*dims"]:
    """Returns `x`. While a record is made, it and its cotangent are reported as `path`; otherwise
    this costs nothing.

    Args:
        x: a value of the model: on each device, its block.
        path: the name, such as "blocks.3.attention.out". A "*" in it stands for the layer that `at`
            says.
        spec: how the whole value is split. "batch" stands for all that splits the rows of the
            batch: the data axis, and microbatches. `P(unreduced={"tensor"})` says that the devices
            of that axis have terms of a sum, and `P(unreduced={"batch"})` that the value is one of
            those whose mean over the batch is meant, as a loss is. Along other axes all devices
            have the same.
        places: for a dim that is not split in equal blocks in order, where each of its elements is
            in the whole.

    Raises:
        ValueError: the spec has more dims than `x`, or another value, split otherwise, has this
            path.
    """
    # Nothing of a tap is in a program that was traced while no record was made.
    return x if not is_on() else _tap(x, path, spec, dict(places or {}), FORWARD)


def tap_tree(
    tree: PyTree,
    path: str,
    specs: PyTree,
    *,
    without: tuple[str, ...] = (),
    loops: int = 0,
    way: str = FORWARD,
) -> Any:
    """Returns `tree` with a tap at each array of floating-point numbers, named by `path` and its
    place in the tree.

    Args:
        tree: any.
        path: the first part of the names.
        specs: a tree like it, which may have more leaves.
        without: the axes that do not split the arrays any more, since they were gathered over them.
        loops: how many first dims the specs have and the arrays have not.
        way: `AFTER` for what follows the backward pass; it has no cotangent.
    """
    if not is_on():
        return tree
    specs_by_path = {
        trees.dotted(place): spec
        for place, spec in jax.tree.leaves_with_path(specs, is_leaf=lambda s: isinstance(s, P))
    }

    def one(place, leaf):
        if not (isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.floating)):
            return leaf
        name = trees.dotted(place)
        dims = tuple(
            tuple(axis for axis in _axes(entry) if axis not in without)
            for entry in specs_by_path.get(name, P()).partitions
        )
        return _tap(leaf, f"{path}.{name}" if name else path, P(*dims[loops:]), {}, way)

    return jax.tree.map_with_path(one, tree)


def _axes(entry: Any) -> tuple[str, ...]:
    """Returns an entry of a spec as a tuple of axes."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _tap(x: Any, path: str, spec: P, places: dict[int, Any], way: str) -> Any:
    recorder = RECORDER.get()
    assert recorder is not None
    if len(spec.partitions) > x.ndim:
        raise ValueError(
            f"bisect.tap: {path} of shape {x.shape} has {x.ndim} dims, and its spec, {spec}, more. "
            "Shorten the spec."
        )
    around = jax.sharding.get_abstract_mesh()
    manual = set(around.manual_axes)
    sizes = tuple((name, around.shape[name]) for name in around.axis_names if name in manual)
    dims = tuple(
        _axes(entry) for entry in (*spec.partitions, *[None] * (x.ndim - len(spec.partitions)))
    )
    terms, varying = frozenset[str](spec.unreduced), frozenset(varying_axes(x))
    mark = Mark(path, dims, terms, varying, sizes, tuple(sorted(places)))
    # The order of tracing is the order in which the model computes.
    recorder.paths.setdefault(path, len(recorder.paths))
    first = recorder.marks.setdefault(path, mark)
    if (first.dims, first.terms) != (mark.dims, mark.terms):
        raise ValueError(
            f"bisect.tap: two values are named {path}, split as {first.dims} and {mark.dims}. "
            "Rename one."
        )
    tags = AT.get()
    numbers = [
        jnp.asarray(tags.get(name, -1 if name == "layer" else 0), jnp.int32)
        for name in ("microbatch", "layer")
    ]
    # The callback gets no place of its device, so the program tells it.
    device = [lax.axis_index(name) for name, _ in sizes]
    return tap_p.bind(
        x,
        *device,
        *numbers,
        *(places[dim] for dim in mark.placed),
        mark=mark,
        way=way,
        recorder=recorder,
    )


def _reported(x: Any, *others: Any, mark: Mark, way: str, recorder: Recorder) -> Any:
    """Returns `x`, which is reported; a tap of a tangent waits for its transpose."""
    if way != LINEAR:
        _keep(mark, way, recorder, x, *others)
    return x


def _lowered(
    context: mlir.LoweringRuleContext, *operands: Any, mark: Mark, way: str, recorder: Recorder
) -> Any:
    """Returns the same in a compiled program, which calls back to Python.

    The callback gets NumPy's arrays and calls nothing of JAX's. `jax.debug.callback` makes JAX's
    arrays of them first; to read one of those waits for a thread, and where the callbacks of other
    devices hold all threads, the program stops for good
    (https://github.com/jax-ml/jax/issues/25861).
    """
    if way != LINEAR:
        keep = functools.partial(_keep, mark, way, recorder)
        without_results, avals = context.replace(avals_out=[]), cast(Any, context.avals_in)
        mlir.emit_python_callback(
            without_results, keep, None, operands, avals, [], has_side_effect=True
        )
    return operands[:1]


def _keep(mark: Mark, way: str, recorder: Recorder, x: Any, *others: Any) -> tuple[()]:
    count = len(mark.sizes)
    numbers = [int(number) for number in others[: count + 2]]
    places = tuple(map(np.array, others[count + 2 :]))
    microbatch, layer = numbers[count:]
    recorder.reports.append(
        Report(mark, way, tuple(numbers[:count]), microbatch, layer, np.array(x), places)
    )
    return ()


def _differentiated(primals, tangents, **params):
    x, *others = primals
    # The tangent is a tap too: only so does its transpose stand where the cotangent flows.
    way = LINEAR if params["way"] == FORWARD else params["way"]
    tangent = tangents[0]
    if not isinstance(tangent, ad.Zero):
        tangent = tap_p.bind(tangent, *others, **{**params, "way": way})
    return tap_p.bind(x, *others, **params), tangent


def _transposed(ct, x, *others, **params):
    if not isinstance(ct, ad.Zero) and params["way"] == LINEAR:
        ct = tap_p.bind(ct, *others, **{**params, "way": BACKWARD})
    return [ct, *[None] * len(others)]


def _batched(arguments, dims, *, mark, way, recorder):
    dim, *others = dims
    # One callback would report several layers as one.
    if any(other_dim is not None for other_dim in others):
        raise ValueError(
            f"bisect.tap: jax.vmap maps the layer or the microbatch of {mark.path}. Call `at` "
            "outside the vmap."
        )
    # The mapped dim stands before some of the places.
    shifted = tuple(place + (place >= dim) for place in mark.placed)
    mark = mark._replace(dims=(*mark.dims[:dim], (BATCH,), *mark.dims[dim:]), placed=shifted)
    return tap_p.bind(*arguments, mark=mark, way=way, recorder=recorder), dim


tap_p = Primitive("tap")
tap_p.def_impl(_reported)
tap_p.def_abstract_eval(lambda x, *others, **params: x)
mlir.register_lowering(tap_p, _lowered)
ad.primitive_jvps[tap_p] = _differentiated
ad.primitive_transposes[tap_p] = _transposed
batching.primitive_batchers[tap_p] = _batched
