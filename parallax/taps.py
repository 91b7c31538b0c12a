"""Named values of a model: `tap` names a value, so that each device can report it and its
cotangent.

A record of values is made in a `with recording():` block. Outside of the block, `tap` returns its
argument and adds nothing to the program. Inside, `tap` is an identity whose lowering calls back to
Python. The transpose of the tap is another identity, which reports the cotangent. So taps work
under `scan`, `checkpoint`, `vmap`, `shard_map` and in pipelines. In a jaxpr a tap has no effect (in
JAX's sense), so transformations treat it like any other operation. Users call `tap` as
`bisect.tap`, so errors use this name.

`tap_p` is the primitive. Its first operands are the value (a device's block of a whole array), the
device's index along each axis, and the numbers of the microbatch and the layer. If some dims are
not split into equal blocks in the order of the devices, the last operands are the positions of the
block's elements along each of these dims in the whole array. The parameters of `tap_p` are `way`,
`mark` and `recorder`:

- `way` says what the tap reports. A FORWARD tap reports the value, a BACKWARD tap the cotangent,
  and an AFTER tap a value that is computed after the backward pass. The derivative of a FORWARD
  tap applies a LINEAR tap to the value's tangent. A LINEAR tap reports nothing, and its transpose
  is the BACKWARD tap.
- `mark`, a `Mark`, has the name of the tap (`path`), and says how the value is split (`dims`,
  `terms`).
- `recorder`, a `Recorder`, is the object to which the tap reports.

`RECORDER` holds the recorder that is active now, and `AT` holds the numbers of the microbatch and
the layer that `recording.at` set.
"""

import contextlib
import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int, Shaped

from parallax import trees
from parallax._typing import PyTree
from parallax.collectives.types import varying_axes
from parallax.recording import AT, RECORDER, is_on

# An axis in a spec that stands for all splits of the batch's rows: the data axis and microbatches.
BATCH = "batch"
WHOLE = P()
# The ways of a tap. The transpose of LINEAR, the tap of a tangent, is BACKWARD.
FORWARD, LINEAR, BACKWARD, AFTER = "forward", "linear", "backward", "after"
_RECORDINGS = itertools.count()  # a new number for each `recording`


class Mark(NamedTuple):
    """The facts about a tap that are known when the program is traced.

    Attributes:
        path: the name of the tap. A "*" in the name stands for the number of the layer.
        dims: for each dim of the value, the axes that split this dim.
        terms: the axes over which the value is still to be summed, since each device has a term.
        varying: the axes along which the value may differ.
        sizes: the mesh's axes, with their sizes.
        placed: the dims that are not split into equal blocks in the order of the devices. For each
            of them, a report has the positions of the device's elements in the whole array.
        in_microbatch: whether the tap is in a loop over microbatches. Outside of one, the value has
            the rows of all microbatches of the device.
        differentiated: whether the tap was differentiated. The first derivative adds a tap on the
            value's tangent; derivatives of higher order add no taps.
    """

    path: str
    dims: tuple[tuple[str, ...], ...]
    terms: frozenset[str]
    varying: frozenset[str]
    sizes: tuple[tuple[str, int], ...]
    placed: tuple[int, ...]
    in_microbatch: bool
    differentiated: bool = False


class Report(NamedTuple):
    """A value that one device reports at one tap.

    Attributes:
        mark: the mark of the tap.
        way: `forward` for a value of the forward pass, `backward` for a cotangent, or `after` for a
            value that is computed after the backward pass.
        device: the device's index along each axis of the mark's `sizes`.
        microbatch: the number of the microbatch; -1 if the device computed for no microbatch, as in
            an idle tick of a pipeline.
        layer: the number of the layer; -1 if the value belongs to no layer.
        value: the device's block of the value.
        places: for each dim in the mark's `placed`, the positions of the elements of `value` along
            this dim in the whole array.
    """

    mark: Mark
    way: str
    device: tuple[int, ...]
    microbatch: int
    layer: int
    value: np.ndarray
    places: tuple[np.ndarray, ...]


class Recorder:
    """The object to which taps report.

    Attributes:
        paths: a dict from the name of each tap (its `path`) to an index. Indices count from 0, in
            the order in which the names were first traced.
        marks: a dict from the name of each tap to its `Mark`, from the first trace of the tap.
        reports: the reports of all devices, in any order.
    """

    def __init__(self):
        """Begins without reports."""
        self.paths: dict[str, int] = {}
        self.marks: dict[str, Mark] = {}
        self.reports: list[Report] = []


@contextlib.contextmanager
def recording() -> Iterator[Recorder]:
    """Yields a recorder, and makes taps report to it, in programs that are traced inside the `with`
    block.

    A function that ran before is traced again in the block. A jaxpr that was made before reports
    nothing.
    """
    recorder = Recorder()
    token = RECORDER.set(recorder)
    try:
        # JAX keeps the traces of a function, such as the body of a loop. Its cache also compares
        # this metadata, so no trace is used both in a recording and outside of it.
        with set_xla_metadata(tapped_run=str(next(_RECORDINGS))):
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
    """Returns `x`. Inside `recording`, `x` and its cotangent are reported under the name `path`.

    Outside of `recording` a tap costs nothing.

    Args:
        x: a value of the model; on each device, the device's block of it.
        path: the name, such as "blocks.3.attention.out". A "*" in the name stands for the number
            of the layer, which is set by `with bisect.at(layer=...)` around the call.
        spec: the split of the whole value. In the spec, "batch" marks the dim of the batch's rows,
            which the data axis and the cut into microbatches may split. `P(unreduced={"tensor"})`
            says that each device of that axis has a term of a sum. `P(unreduced={"batch"})` says
            that each part of the batch has its own value, and that the whole value is the mean of
            these values, as for a loss. Along all axes that the spec does not name, the devices
            must have the same value.
        places: a dict from a dim to the positions of this device's elements along this dim of the
            whole array. Dims that are split into equal blocks in the order of the devices, or are
            not split, need no entry.

    Raises:
        ValueError: the spec has more dims than `x`; or `x` lacks a dim of `places`, or the number
            of positions differs from the number of elements along the dim; or another value with
            the same path is split differently.
    """
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
    """Returns `tree` with a tap at each array of floating-point numbers.

    A tap's name is `path` and then the array's path in the tree, with a dot between.

    Args:
        tree: any tree.
        path: the first part of the names.
        specs: a tree with a spec at the path of each array of `tree`; the tree may also have specs
            at other paths.
        without: the axes over which the arrays were gathered. `specs` may name these axes, but they
            no longer split the arrays.
        loops: the number of leading dims that are in the specs but not in the arrays, because a
            loop, such as a scan over layers, takes one slice of these dims at a time.
        way: `FORWARD`, or `AFTER` for values that are computed after the backward pass and have no
            cotangent.
    """
    if not is_on():
        return tree
    specs_by_path = {
        trees.dotted(leaf_path): spec
        for leaf_path, spec in jax.tree.leaves_with_path(specs, is_leaf=lambda s: isinstance(s, P))
    }

    def tapped(leaf_path, leaf):
        """Returns one leaf, tapped if it is an array of floating-point numbers.

        The leaf's spec is looked up by path in `specs_by_path`. The gathered axes (`without`) and
        the first `loops` dims are removed from the spec.
        """
        if not (isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.floating)):
            return leaf
        name = trees.dotted(leaf_path)
        entries = specs_by_path.get(name, P()).partitions
        dims = [tuple(axis for axis in _axes(entry) if axis not in without) for entry in entries]
        full_path = f"{path}.{name}" if name else path
        return _tap(leaf, full_path, P(*dims[loops:]), places={}, way=way)

    return jax.tree.map_with_path(tapped, tree)


def _axes(entry: Any) -> tuple[str, ...]:
    """Converts an entry of a spec (None, an axis or a tuple of axes) to a tuple of axes."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _tap(x: Any, path: str, spec: P, places: dict[int, Any], way: str) -> Any:
    """Returns `x` with a tap of the name `path`. Adds the tap's `Mark` to the active `Recorder`, if
    the recorder has no mark of this name yet. `spec` is the split of the whole value over the
    mesh's axes. If a dim is not split into equal blocks in the order of the devices, `places[dim]`
    has the positions of the elements of `x` along this dim in the whole array. `way` is FORWARD or
    AFTER."""
    recorder = RECORDER.get()
    assert recorder is not None  # the callers tested `is_on`
    if len(spec.partitions) > x.ndim:
        raise ValueError(
            f"bisect.tap: {path} of shape {x.shape} has {x.ndim} dims, and its spec {spec} has "
            f"{len(spec.partitions)}. Shorten the spec."
        )
    places = _counted_from_first(x, path, places)
    # The axes of the `shard_map` around the tap; none outside of one.
    mesh = jax.sharding.get_abstract_mesh()
    manual = set(mesh.manual_axes)
    sizes = tuple((name, mesh.shape[name]) for name in mesh.axis_names if name in manual)
    # A spec may be shorter than the rank of `x`: the last dims are whole.
    entries = (*spec.partitions, *[None] * (x.ndim - len(spec.partitions)))
    dims = tuple(map(_axes, entries))
    terms, varying = frozenset[str](spec.unreduced), frozenset(varying_axes(x))
    tags = AT.get()
    in_microbatch = "microbatch" in tags
    mark = Mark(path, dims, terms, varying, sizes, tuple(sorted(places)), in_microbatch)
    # The order of tracing is the order in which the model computes. A path that was traced before,
    # as in a second trace of a loop's body, keeps its first index and mark. The second mark must
    # have the same split, but its `varying`, `sizes` and `placed` may differ, such as under another
    # `shard_map`: each report has the mark of its own trace.
    recorder.paths.setdefault(path, len(recorder.paths))
    first = recorder.marks.setdefault(path, mark)
    if (first.dims, first.terms) != (mark.dims, mark.terms):
        raise ValueError(
            f"bisect.tap: two values are named {path}. The dims of one are split over {first.dims} "
            f"(unreduced over {sorted(first.terms)}); the dims of the other are split over "
            f"{mark.dims} (unreduced over {sorted(mark.terms)}). Rename one."
        )
    # Without tags, a value belongs to microbatch 0 and to no layer.
    numbers = [
        jnp.asarray(tags.get(name, -1 if name == "layer" else 0), jnp.int32)
        for name in ("microbatch", "layer")
    ]
    # The callback does not know its device, so it gets the device's indices as operands.
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


def _counted_from_first(x: Any, path: str, places: dict[int, Any]) -> dict[int, Any]:
    """Returns `places` with each dim counted from the first: -1 becomes the number of the last dim.
    Raises `ValueError` if `x` lacks the dim, or if the number of positions differs from the number
    of elements of `x` along the dim."""
    for dim, positions in places.items():
        if not -x.ndim <= dim < x.ndim or positions.shape != (x.shape[dim],):
            raise ValueError(
                f"bisect.tap: each entry of `places` needs a dim of {path}, whose shape is "
                f"{x.shape}, and one position for each element along this dim; got dim {dim} and "
                f"positions of shape {positions.shape}. Pass this device's positions along the dim."
            )
    return {dim % x.ndim: positions for dim, positions in places.items()}


def _reported(x: Any, *others: Any, mark: Mark, way: str, recorder: Recorder) -> Any:
    """Returns `x`. Also reports `x`, unless it is a tangent."""
    if way != LINEAR:
        _keep(mark, way, recorder, x, *others)
    return x


def _lowered(
    context: mlir.LoweringRuleContext, *operands: Any, mark: Mark, way: str, recorder: Recorder
) -> Any:
    """Returns the lowering of a tap: its first operand. Adds a callback to Python that reports the
    first operand, unless `way` is LINEAR.

    The callback gets NumPy arrays and calls no function of JAX. `jax.debug.callback` would make JAX
    arrays first. A read of such an array needs a thread, and if callbacks of other devices occupy
    all threads, the program hangs forever (https://github.com/jax-ml/jax/issues/25861).
    """
    if way != LINEAR:
        # Outside of a map, a program for several devices computes whole arrays, and the partitioner
        # cannot place the callback: it would end with an internal error. Inside a map, the axis
        # context has no `num_devices`.
        devices = getattr(context.module_context.axis_context, "num_devices", 1)
        if devices > 1:
            raise ValueError(
                f"bisect.tap: {mark.path} is outside of mesh.spmd, in a program that runs on "
                f"{devices} devices. Call the tap inside mesh.spmd, on each device's block."
            )
        keep = functools.partial(_keep, mark, way, recorder)
        # No token (None), since reports may come in any order, and no results ([]). The side effect
        # keeps XLA from removing the callback, whose results nobody uses.
        without_results, avals = context.replace(avals_out=[]), cast(Any, context.avals_in)
        mlir.emit_python_callback(
            without_results, keep, None, operands, avals, [], has_side_effect=True
        )
    return operands[:1]


def _keep(mark: Mark, way: str, recorder: Recorder, x: Any, *others: Any) -> tuple[()]:
    """Adds a report of `x` to the recorder.

    `others` are the operands of `tap_p` after `x`. First comes the device's index along each axis,
    then the numbers of the microbatch and the layer. Then comes, for each dim in `mark.placed`, an
    array with the positions of the elements of `x` in the whole array. Returns an empty tuple,
    since a callback without results must return one.
    """
    count = len(mark.sizes)
    numbers = [int(number) for number in others[: count + 2]]
    places = tuple(map(np.array, others[count + 2 :]))
    microbatch, layer = numbers[count:]
    # `np.array` copies: the memory of a callback's arguments is JAX's.
    recorder.reports.append(
        Report(mark, way, tuple(numbers[:count]), microbatch, layer, np.array(x), places)
    )
    return ()


def _differentiated(primals, tangents, **params):
    """Returns the result of a tap, and the tangent of this result: the forward derivative of
    `tap_p`. `primals` are the operands of `tap_p`, and `tangents` are the operands' tangents;
    `params` are the `mark`, the `way` and the `recorder` of the tap."""
    x, *others = primals
    # The first derivative of a FORWARD tap puts a LINEAR tap on the tangent. The LINEAR tap reports
    # nothing, and its transpose is the tap of the cotangent. The mark of the result is then
    # `differentiated` (see below). A tap with such a mark, or of another way, is differentiated
    # only in a second derivative. There the tangent gets no tap: reports of its cotangent would be
    # added to those of the first derivative.
    mark, tangent = params["mark"], tangents[0]
    is_first = params["way"] == FORWARD and not mark.differentiated
    # `ad.Zero`, JAX's symbol for a tangent that is 0, is not tapped.
    if is_first and not isinstance(tangent, ad.Zero):
        tangent = tap_p.bind(tangent, *others, **{**params, "way": LINEAR})
    params["mark"] = mark._replace(differentiated=True)
    return tap_p.bind(x, *others, **params), tangent


def _transposed(cotangent, x, *others, **params):
    """Returns the cotangents of the operands of `tap_p`. The first is `cotangent`, the cotangent of
    the tapped value `x`. The operands in `others` are integers, so their cotangents are None. The
    transpose of a LINEAR tap adds a BACKWARD tap on `cotangent`, unless `cotangent` is zero. The
    transpose of any other tap adds no tap."""
    if not isinstance(cotangent, ad.Zero) and params["way"] == LINEAR:
        cotangent = tap_p.bind(cotangent, *others, **{**params, "way": BACKWARD})
    return [cotangent, *[None] * len(others)]


def _batched(arguments, dims, *, mark, way, recorder):
    """Returns the result of a tap under `jax.vmap`, and the result's mapped dim. This function is
    the batching rule of `tap_p`: it binds `tap_p` to the mapped operands. In the new tap's `Mark`,
    the axis "batch" splits the mapped dim. `arguments` are the operands of `tap_p`, and `dims` has
    the mapped dim of each operand, or None."""
    dim, *others = dims
    # A `vmap` in a model is taken to run over rows of the batch, so its dim gets `BATCH` below.
    # If the layer, the microbatch or a position were mapped, one callback would report several.
    mapped = [other_dim is not None for other_dim in others]
    # First the device's index along each axis in `mark.sizes`, then two numbers: the microbatch and
    # the layer. All other operands are positions.
    if any(mapped[len(mark.sizes) + 2 :]):
        raise ValueError(
            f"bisect.tap: jax.vmap maps the argument `places` of the tap {mark.path}. Pass "
            "`places` that do not depend on the mapped dim, or call `tap` outside the vmap."
        )
    if any(mapped):
        raise ValueError(
            "bisect.tap: jax.vmap maps the number of the layer or of the microbatch at the tap "
            f"{mark.path}. Call `bisect.at` outside the vmap."
        )
    # The dims in `placed` are counted without the mapped dim, so the dims at or after the mapped
    # dim move by one.
    shifted = tuple(placed_dim + (placed_dim >= dim) for placed_dim in mark.placed)
    mark = mark._replace(dims=(*mark.dims[:dim], (BATCH,), *mark.dims[dim:]), placed=shifted)
    return tap_p.bind(*arguments, mark=mark, way=way, recorder=recorder), dim


tap_p = Primitive("tap")
tap_p.def_impl(_reported)
tap_p.def_abstract_eval(lambda x, *others, **params: x)
mlir.register_lowering(tap_p, _lowered)
ad.primitive_jvps[tap_p] = _differentiated
ad.primitive_transposes[tap_p] = _transposed
batching.primitive_batchers[tap_p] = _batched
