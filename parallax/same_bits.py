"""Runs a step so that its results have the same bits on every mesh.

Sums of floating-point numbers depend on their order, and a kernel for 8 rows rounds differently
from one for 64 rows. So one step on two meshes gives two results. `spmd` removes both causes. The
step is written for a fixed number of *cells* along each axis, as if each cell were a device. A
device of the real mesh has one cell or several. Every kernel has the shapes of one cell, and every
sum is a binary tree over the cells, whatever the mesh is.

The step is traced once, as the program of one cell. The program is then run in two kinds of parts.
A *segment* has equations that do not communicate; a loop runs it for one cell after another. A
collective works on all cells of the device together. A `Stack` is a value of the program with its
numbers for all cells of the device. Inside, an equation is a `Step`, and a *key* numbers a value.
"""

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int, Shaped

from parallax import jaxprs
from parallax import mesh as meshes
from parallax._typing import PyTree
from parallax.collectives import types
from parallax.trees import AnyMesh, entry_axes, is_array

# Equations that change only the type of a value
CASTS = {"pvary", "pcast", "terms", "vary_unreduced_cast"}
SUMS = {"psum", "psum_invariant", "unreduced_psum"}
GATHERS = {"all_gather", "all_gather_invariant", "all_gather_reduced"}
SCATTERS = {"reduce_scatter", "unreduced_reduce_scatter"}
EXTREMES = {"pmax": (jnp.max, lax.pmax), "pmin": (jnp.min, lax.pmin)}
LOOPS = {"scan", "while", "cond"}
CALLS = {"jit", "pjit", "closed_call", "checkpoint", "remat", "remat2"} | {
    "custom_jvp_call",
    "custom_vjp_call",
}
# Equations whose results depend on other cells, or on the index of the cell
ACROSS = {types.linear_p.name, "axis_index", "replicated", *jaxprs.COLLECTIVES, *SUMS, *SCATTERS}


class Stack(NamedTuple):
    """A value of one cell's program, for all cells of this device.

    Attributes:
        array: the numbers. Its first dims count the cells of this device along each of `axes`; the
            others are the dims in one cell.
        axes: the axes along which the value may differ from cell to cell, in the order of the
            cells' axes. Along all other axes the cells share it.
    """

    array: Shaped[Array, "..."]
    axes: tuple[str, ...]


class Step(NamedTuple):
    """An equation, with the keys of the values that it reads and writes."""

    eqn: JaxprEqn
    reads: tuple[int, ...]
    writes: tuple[int, ...]


def spmd(
    f: Callable[..., Any],
    *,
    cells: Mapping[str, int],
    mesh: AnyMesh,
    in_specs: PyTree,
    out_specs: PyTree,
) -> Callable[..., Any]:
    """Returns a function as `mesh.spmd` does, whose results have the same bits on every `mesh`.

    `f` runs as on a mesh with these `cells`, each of which has its own block of each argument. Call
    the returned function under `jax.jit`. Results are equal for two meshes if `f`, `cells`, the
    processor's model and the version of JAX are the same.

    Args:
        f: a function of local blocks, for example a train step. The number of its microbatches is
            part of it.
        cells: the number of cells along each axis, a power of two. It is the largest size that an
            axis of a mesh may have.
        mesh: the mesh to run on. The size of each of its axes divides the number of cells.
        in_specs: as in `mesh.spmd`.
        out_specs: as in `mesh.spmd`.

    Raises:
        ValueError: `cells` are no powers of two, or `mesh` has other axes or sizes that do not
            divide them; no argument has numbers; `f` prints, or calls something that has no rule
            here, such as a `while` loop with a collective in it.
    """
    _check(cells, mesh)
    of_cells = meshes.spmd(f, mesh=meshes.abstract(**cells), in_specs=in_specs, out_specs=out_specs)

    def mapped(*arguments):
        """Returns the result of `f`, as global arrays on the mesh."""
        arrays, static = eqx.partition(arguments, is_array)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)
        closed, result, static_result = eqx.filter_make_jaxpr(of_cells)(
            *eqx.combine(shapes, static)
        )
        leaves = jax.tree.leaves(arrays)
        values = _outside(closed, leaves, mesh, cells)
        arrays = jax.tree.unflatten(jax.tree.structure(result), values)
        return eqx.combine(arrays, static_result)

    return mapped


def _check(cells: Mapping[str, int], mesh: AnyMesh) -> None:
    """Raises `ValueError` unless the cells are powers of two that the mesh divides."""
    sizes = dict(mesh.shape)
    odd = [f"{axis}={n}" for axis, n in cells.items() if n < 1 or n & (n - 1)]
    if odd:
        raise ValueError(
            f"same_bits.spmd needs a power of two of cells along each axis, so that each device "
            f"has a whole branch of every sum's tree; got {', '.join(odd)}. Use 1, 2, 4, 8, ..."
        )
    if set(sizes) != set(cells) or any(cells[axis] % n for axis, n in sizes.items()):
        raise ValueError(
            f"same_bits.spmd needs a mesh with the axes of the cells, whose sizes divide those of "
            f"the cells; got the mesh {sizes} for the cells {dict(cells)}. Give the mesh every axis "
            "(of size 1 where it is not split), and at least as many cells as devices."
        )


def _outside(closed: ClosedJaxpr, leaves: Sequence[Any], mesh: AnyMesh, cells) -> list[Any]:
    """Returns the results of the traced program, whose `shard_map` runs on `mesh` by cells."""

    def run(eqn, operands):
        """Returns the results of an equation outside of the cells' program, or of that program."""
        if eqn.primitive.name == "shard_map":
            return _mapped(eqn, operands, mesh, cells)
        return _computed(eqn, operands)

    return _evaluated(closed, *leaves, run=run)


def _evaluated(
    closed: Jaxpr | ClosedJaxpr, *operands: Any, run: Callable[..., Any] | None = None
) -> list[Any]:
    """Returns the results of a jaxpr, whose equations `run` computes (by default `_computed`)."""
    jaxpr = jaxprs.opened(closed)
    constants = getattr(closed, "consts", ())
    known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *operands), strict=True))

    def read(atom):
        """Returns the value of an operand."""
        return _number(atom) if jaxprs.is_literal(atom) else known[atom]

    for eqn in jaxpr.eqns:
        results = (run or _computed)(eqn, [read(atom) for atom in eqn.invars])
        known |= zip(eqn.outvars, results, strict=True)
    return [read(atom) for atom in jaxpr.outvars]


def _number(literal: Any) -> Array:
    """Returns the number of a literal, without the mesh of cells in its type."""
    return np.asarray(literal.val, literal.aval.dtype)


def _computed(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """Returns the results of an equation in which nothing communicates.

    The types in a jaxpr name the mesh of cells. So what is inside the equation is traced anew.
    """
    name, params = eqn.primitive.name, eqn.params
    if name in CASTS:
        return list(operands)
    if name == "scan":
        return _scanned(eqn, operands)
    if name == "cond":
        branches = [functools.partial(_evaluated, body) for body in params["branches"]]
        return lax.switch(operands[0], branches, *operands[1:])
    if name == "while":
        tested, kept = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        test, body = params["cond_jaxpr"], params["body_jaxpr"]
        return lax.while_loop(
            lambda carry: _evaluated(test, *operands[:tested], *carry)[0],
            lambda carry: _evaluated(body, *operands[tested:kept], *carry),
            list(operands[kept:]),
        )
    if jaxprs.called(eqn) is not None and name in CALLS:
        if params.get("prevent_cse") and params.get("differentiated"):
            operands = lax.optimization_barrier(list(operands))  # values are computed again
        return _evaluated(jaxprs.closed(params)[0], *operands)
    # A sharding in the parameters is that of the mesh of cells.
    unplaced = {key: None for key in params if key in ("sharding", "out_sharding")}
    results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(params) | unplaced)
    return list(results) if eqn.primitive.multiple_results else [results]


def _scanned(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """Returns the results of a scan in which nothing communicates."""
    body = jaxprs.closed(eqn.params)[0]
    constants, carries = jaxprs.scan_parts(eqn)
    split = constants + carries

    def trip(carry, slices):
        """Returns the carries and the stacked results of one trip."""
        results = _evaluated(body, *operands[:constants], *carry, *slices)
        return results[:carries], results[carries:]

    options = {key: eqn.params[key] for key in ("length", "reverse", "unroll")}
    carry, stacked = lax.scan(
        trip, list(operands[constants:split]), list(operands[split:]), **options
    )
    return [*carry, *stacked]


def _mapped(eqn: JaxprEqn, operands: Sequence[Any], mesh: AnyMesh, cells) -> list[Any]:
    """Returns the results of a `shard_map` over cells, run on `mesh`."""
    (body,) = jaxprs.closed(eqn.params)
    # Along an axis with one cell there is nothing to sum and nothing to split.
    counts = {axis: n for axis, n in cells.items() if n > 1}
    opened = _opened(jaxprs.opened(body), eqn.params["mesh"])

    def split(spec: PartitionSpec) -> list[tuple[str, ...]]:
        """Returns the axes with several cells that split each dim."""
        return [tuple(axis for axis in entry_axes(entry) if axis in counts) for entry in spec]

    in_splits = [split(spec) for spec in eqn.params["in_specs"]]
    out_splits = [split(spec) for spec in eqn.params["out_specs"]]
    # A dim that two axes split becomes two dims and the rest, so that each axis has its own.
    wide = [_widened(x, dims, counts) for x, dims in zip(operands, in_splits, strict=True)]

    def on_device(*blocks):
        """Returns the blocks of the results on this device."""
        one = _one(blocks)
        walk = Walk(counts, dict(mesh.shape), one, opened)
        stacks = [_stacked(x, dims, counts) for x, dims in zip(blocks, in_splits, strict=True)]
        constants = [Stack(jnp.asarray(x), ()) for x in getattr(body, "consts", ())]
        results = walk.run(jaxprs.opened(body), constants, stacks)
        return [
            _unstacked(walk.over(stack, sum(dims, ())), dims, counts)
            for stack, dims in zip(results, out_splits, strict=True)
        ]

    spec = lambda dims, ndim: PartitionSpec(
        *[entry for axes in _padded(dims, ndim) for entry in (*axes, None)]
    )
    in_specs = tuple(spec(d, np.ndim(x)) for x, d in zip(operands, in_splits, strict=True))
    ranks = [len(aval.shape) for aval in jaxprs.types(eqn.outvars)]
    out_specs = [spec(d, ndim) for d, ndim in zip(out_splits, ranks, strict=True)]
    results = jax.shard_map(
        on_device, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )(*wide)
    shapes = [aval.shape for aval in jaxprs.types(eqn.outvars)]
    return [x.reshape(shape) for x, shape in zip(results, shapes, strict=True)]


def _padded(dims, ndim: int) -> list[tuple[str, ...]]:
    """Returns the axes that split each of `ndim` dims; a spec may leave out the last dims."""
    return [*dims, *[()] * (ndim - len(dims))]


def _widened(x: Any, dims, counts) -> Any:
    """Returns a global array whose split dims are each [cells of each axis..., rest]."""
    shape = []
    for size, axes in zip(x.shape, _padded(dims, x.ndim), strict=True):
        split = [counts[axis] for axis in axes]
        shape += [*split, size // math.prod(split)]
    return x.reshape(shape)


def _stacked(block: Any, dims, counts) -> Stack:
    """Returns a device's block of a widened array as a stack."""
    places, position = {}, 0
    for axes in _padded(dims, block.ndim - len(sum(dims, ()))):
        places |= {axis: position + k for k, axis in enumerate(axes)}
        position += len(axes) + 1
    axes = tuple(axis for axis in counts if axis in places)
    front = [places[axis] for axis in axes]
    rest = [k for k in range(block.ndim) if k not in front]
    return Stack(block.transpose(*front, *rest), axes)


def _unstacked(stack: Stack, dims, counts) -> Any:
    """Returns the device's block of a widened array, the reverse of `_stacked`."""
    ndim = stack.array.ndim - len(stack.axes)
    order, rest = [], len(stack.axes)
    for axes in _padded(dims, ndim):
        order += [*(stack.axes.index(axis) for axis in axes), rest]
        rest += 1
    return stack.array.transpose(order)


def _one(blocks: Sequence[Any]) -> Int[Array, ""]:
    """Returns the number 1, which the compiler cannot know: it is computed from an argument."""
    numbers = [x for x in blocks if not jnp.issubdtype(x.dtype, jax.dtypes.extended) and x.size]
    if not numbers:
        raise ValueError(
            "same_bits.spmd needs an argument with at least one number; all arguments are empty or "
            "random keys. Pass the batch or the parameters as an argument."
        )
    bits = lambda x: lax.bitcast_convert_type(x.ravel()[0].astype(jnp.float32), jnp.int32)
    x = sum(bits(x) for x in numbers)  # some of the blocks may be constants
    return 1 + (x * (x + 1) & 1)  # one of two consecutive numbers is even


def _opened(jaxpr: Jaxpr, mesh: AnyMesh) -> dict[int, tuple[JaxprEqn, Jaxpr]]:
    """Returns the programs of this library's collectives in a jaxpr, by the `id` of the equation.

    The equation itself is kept beside its program, so that its `id` is not used again.
    """
    found = {}
    for eqn in jaxprs.every(jaxpr):
        if eqn.primitive.name == types.linear_p.name:
            found[id(eqn)] = (eqn, types.linear_jaxpr(eqn, mesh, check_vma=True))
    return found


class Walk:
    """Runs the program of a cell for all cells of this device, inside a `shard_map`.

    `counts` are the cells along each axis with more than one, and `devices` the devices along each
    axis. `one` is the number 1, unknown to the compiler. `opened` are the programs of the library's
    collectives.
    """

    def __init__(self, counts, devices, one, opened):
        """Keeps the arguments."""
        self.counts, self.devices, self.one, self.opened = counts, devices, one, opened
        self.keys = itertools.count()
        self._alone_known: dict[int, tuple[bool, JaxprEqn]] = {}

    def here(self, axis: str) -> int:
        """Returns the number of cells of this device along an axis."""
        return self.counts[axis] // self.devices[axis]

    def over(self, stack: Stack, axes: Sequence[str]) -> Stack:
        """Returns the value with a dim of cells for each of `axes` too: copies of what they share."""
        wanted = tuple(axis for axis in self.counts if axis in {*axes, *stack.axes})
        if wanted == stack.axes:
            return stack
        inside = stack.array.shape[len(stack.axes) :]
        thin = [self.here(axis) if axis in stack.axes else 1 for axis in wanted]
        full = [self.here(axis) for axis in wanted]
        array = jnp.broadcast_to(stack.array.reshape(*thin, *inside), (*full, *inside))
        return Stack(array, wanted)

    # The walk

    def run(
        self, jaxpr: Jaxpr, constants: Sequence[Stack], operands: Sequence[Stack]
    ) -> list[Stack]:
        """Returns the results of a jaxpr."""
        values = dict(zip(self.keys, (*constants, *operands)))
        keys = dict(zip((*jaxpr.constvars, *jaxpr.invars), values, strict=True))
        steps: list[Step] = []
        results = self._flattened(jaxpr, keys, values, steps)
        left = _needed(steps, results)
        # Steps that read only numbers of the program. Each segment that needs one runs it again.
        recipes: dict[int, Step] = {}
        literals = {key for key, stack in values.items() if key not in {*keys.values()}}
        for step in left:
            if not self.is_alone(step.eqn) and {*step.reads} <= literals:
                literals |= {*step.writes}
                recipes |= dict.fromkeys(step.writes, step)
        left = [step for step in left if step.writes[0] not in recipes]
        while left:
            alone = self.is_alone(left[0].eqn)
            segment, left = ([left[0]], left[1:]) if alone else self._next_segment(left, values)
            later = {key for step in left for key in step.reads} | set(results)
            if alone:
                self._run_recipes(segment[0].reads, recipes, values)
                found = self._alone(segment[0].eqn, [values[key] for key in segment[0].reads])
                values |= zip(segment[0].writes, found, strict=True)
            else:
                self._run_segment(segment, later, recipes, values)
        self._run_recipes(results, recipes, values)
        return [values[key] for key in results]

    def _flattened(self, jaxpr, keys, values, steps) -> list[int]:
        """Appends the equations of a jaxpr to `steps`, and returns the keys of its results.

        A call in which something communicates is opened. A cast leaves no step. `keys` has the key
        of each variable. The stacks of literals and of inner constants go into `values`.
        """

        def key(atom) -> int:
            """Returns the key of an operand; a literal gets a new one."""
            if not jaxprs.is_literal(atom):
                return keys[atom]
            return constant(_number(atom))

        def constant(array) -> int:
            """Returns a new key, for a value that all cells share."""
            new = next(self.keys)
            values[new] = Stack(array, ())
            return new

        for eqn in jaxpr.eqns:
            name, reads = eqn.primitive.name, [key(atom) for atom in eqn.invars]
            if jaxprs.has_effects(eqn):
                raise ValueError(
                    f"same_bits.spmd cannot run `{name}` ({jaxprs.origin(eqn)}), which prints or "
                    "has another effect. Take it out of the step."
                )
            inner, constants = None, ()
            if name == types.linear_p.name:
                inner = self.opened[id(eqn)][1]
            elif self.is_alone(eqn) and name not in LOOPS and (bodies := jaxprs.closed(eqn.params)):
                inner, constants = jaxprs.opened(bodies[0]), getattr(bodies[0], "consts", ())
            if name in CASTS:
                writes = reads
            elif inner is None:
                writes = [next(self.keys) for _ in eqn.outvars]
                steps.append(Step(eqn, tuple(reads), tuple(writes)))
            else:
                own = [constant(x) for x in constants]
                inside = dict(zip((*inner.constvars, *inner.invars), (*own, *reads), strict=True))
                writes = self._flattened(inner, inside, values, steps)
            keys |= zip(eqn.outvars, writes, strict=True)
        return [key(atom) for atom in jaxpr.outvars]

    def is_alone(self, eqn: JaxprEqn) -> bool:
        """Returns whether an equation, or one inside it, knows of other cells."""
        if id(eqn) not in self._alone_known:
            inside = (e for body in jaxprs.inner(eqn) for e in jaxprs.every(body))
            found = any(e.primitive.name in ACROSS for e in (eqn, *inside))
            self._alone_known[id(eqn)] = found, eqn
        return self._alone_known[id(eqn)][0]

    # Segments

    def _next_segment(self, left: Sequence[Step], values) -> tuple[list[Step], list[Step]]:
        """Returns the steps of the next segment, and the others.

        A segment takes all steps that can run now and whose operands differ along the same axes.
        Which they are depends on the program and the cells alone, so each kernel is the same on
        every mesh.
        """
        axes_of = {key: stack.axes for key, stack in values.items()}
        segment, others, wanted, waiting = [], [], None, set()
        for step in left:
            axes = self.ordered(axis for key in step.reads for axis in axes_of.get(key, ()))
            ready = waiting.isdisjoint(step.reads) and not self.is_alone(step.eqn)
            if ready and wanted in (None, axes):
                wanted = axes
                segment.append(step)
                axes_of |= dict.fromkeys(step.writes, axes)
            else:
                others.append(step)
                waiting |= {*step.writes}
        return segment, others

    def ordered(self, axes) -> tuple[str, ...]:
        """Returns axes in the order of the cells' axes, each once."""
        named = set(axes)
        return tuple(axis for axis in self.counts if axis in named)

    def _run_recipes(self, keys, recipes, values) -> None:
        """Puts the stacks of those `keys` that are results of recipes into `values`."""
        for key in keys:
            if key not in values:
                self._run_segment([recipes[key]], {*recipes[key].writes}, recipes, values)

    def _run_segment(self, segment: Sequence[Step], later, recipes, values) -> None:
        """Runs the steps of a segment for each cell, and puts what is read `later` into `values`."""
        written = {key for step in segment for key in step.writes}
        outer = [key for step in segment for key in step.reads if key not in written]
        steps = [*_with_recipes(outer, recipes, values), *segment]
        made = {key for step in steps for key in step.writes}
        reads = list(dict.fromkeys(k for step in steps for k in step.reads if k not in made))
        writes = [key for step in segment for key in step.writes if key in later]
        axes = self.ordered(axis for key in reads for axis in values[key].axes)

        def cell(*operands):
            """Returns the segment's results for one cell."""
            known = dict(zip(reads, operands, strict=True))
            for step in steps:
                found = _computed(step.eqn, [known[key] for key in step.reads])
                known |= zip(step.writes, found, strict=True)
            return [known[key] for key in writes]

        results = self._for_each_cell(cell, [values[key] for key in reads], axes)
        values |= {key: Stack(x, axes) for key, x in zip(writes, results, strict=True)}

    def _for_each_cell(self, cell, stacks: Sequence[Stack], axes) -> list[Array]:
        """Returns the results of `cell` for each cell of this device, one after the other."""
        if not axes:
            return self._enclosed(cell, [stack.array for stack in stacks])
        sliced = {k: stack.array for k, stack in enumerate(stacks) if axes[0] in stack.axes}

        def along_others(slices):
            """Returns the results for the cells with one index along the first axis."""
            inside = list(stacks)
            for k, x in slices.items():
                inside[k] = Stack(x, stacks[k].axes[1:])
            return self._for_each_cell(cell, inside, axes[1:])

        return lax.map(along_others, sliced)

    def _enclosed(self, cell, operands: Sequence[Array]) -> list[Array]:
        """Returns `cell(*operands)`, compiled to the same kernels wherever it stands.

        A loop encloses it. If the compiler knew that the loop runs once, or that an operand is the
        same in each trip, it would join the cell's kernels with those around them, and they would
        round differently.
        """

        def trip(index, _):
            """Returns the results."""
            varied, _ = lax.optimization_barrier((list(operands), index))
            return cell(*varied)

        results = [jnp.zeros(x.shape, x.dtype) for x in jax.eval_shape(cell, *operands)]
        return lax.fori_loop(0, self.one, trip, results)

    # Equations that know of other cells

    def _alone(self, eqn: JaxprEqn, operands: Sequence[Stack]) -> list[Stack]:
        """Returns the results of an equation that communicates, or in which something does."""
        name, params = eqn.primitive.name, eqn.params
        if params.get("axis_index_groups") is not None:
            raise ValueError(
                f"same_bits.spmd has no rule for `{name}` with axis_index_groups "
                f"({jaxprs.origin(eqn)}). Give the groups an axis of their own."
            )
        names = params.get("axis_name", params.get("axes", ()))
        names = (names,) if isinstance(names, str) else tuple(names)
        names = tuple(axis for axis in names if axis in self.counts)
        if name in SUMS:
            return [functools.reduce(self.sum, names, stack) for stack in operands]
        if name in EXTREMES:
            extreme = functools.partial(self.extreme, *EXTREMES[name])
            return [functools.reduce(extreme, names, stack) for stack in operands]
        rules = {"scan": self._scan, "cond": self._cond}
        if name in rules:
            return rules[name](eqn, operands)
        moves = {"axis_index": self._axis_index, "replicated": self._shared}
        moves |= {"ppermute": self._ppermute, "all_to_all": self._all_to_all}
        moves |= dict.fromkeys(GATHERS, self._all_gather)
        moves |= dict.fromkeys(SCATTERS, self._reduce_scatter)
        if name not in moves:
            raise ValueError(
                f"same_bits.spmd has no rule for `{name}` ({jaxprs.origin(eqn)}). Use psum, "
                "all_gather, psum_scatter, ppermute, all_to_all, scan or cond there."
            )
        return [moves[name](names, params, *operands)]

    def sum(self, stack: Stack, axis: str) -> Stack:
        """Returns the sum over the cells of an axis, by a binary tree over their indices.

        The branches of this device come first. The other levels double the branch: each device adds
        that of the device whose index differs in one bit.
        """
        if axis not in stack.axes:  # a power of two, so that the product is exact
            return stack._replace(array=stack.array * self.counts[axis])
        at, x = stack.axes.index(axis), stack.array
        if jnp.issubdtype(x.dtype, jnp.floating):
            x = x.astype(types.accumulation_dtype(x.dtype))
        while x.shape[at] > 1:
            x = lax.slice_in_dim(x, 0, None, 2, at) + lax.slice_in_dim(x, 1, None, 2, at)
        x, n = lax.squeeze(x, (at,)), self.devices[axis]
        for bit in range(n.bit_length() - 1):
            x = x + lax.ppermute(x, axis, [(k, k ^ 2**bit) for k in range(n)])
        return Stack(x.astype(stack.array.dtype), stack.axes[:at] + stack.axes[at + 1 :])

    def extreme(self, over_cells, over_devices, stack: Stack, axis: str) -> Stack:
        """Returns the largest or smallest value over the cells of an axis, in any order."""
        if axis not in stack.axes:
            return stack
        at = stack.axes.index(axis)
        x = over_devices(over_cells(stack.array, axis=at), axis)
        return Stack(x, stack.axes[:at] + stack.axes[at + 1 :])

    def _indices(self, names: Sequence[str]) -> Int[Array, " cells"]:
        """Returns the indices of this device's cells along axes that count as one."""
        index = jnp.zeros((1,), jnp.int32)
        for axis in names:
            first = lax.axis_index(axis) * self.here(axis) if self.devices[axis] > 1 else 0
            own = first + jnp.arange(self.here(axis), dtype=jnp.int32)
            index = (index[:, None] * self.counts[axis] + own[None]).reshape(-1)
        return index

    def _of_all(self, names: Sequence[str], stack: Stack) -> tuple[Array, tuple[str, ...]]:
        """Returns the values of all cells along `names`: [cells of `rest`..., all cells, dims of a
        cell...], and `rest`, the other axes of the stack."""
        stack = self.over(stack, names)
        x, rest = stack.array, tuple(axis for axis in stack.axes if axis not in names)
        for axis in names:
            if self.devices[axis] > 1:
                x = lax.all_gather(x, axis, axis=stack.axes.index(axis), tiled=True)
        inside = range(len(stack.axes), x.ndim)
        x = x.transpose(*(stack.axes.index(axis) for axis in (*rest, *names)), *inside)
        return x.reshape(
            *x.shape[: len(rest)], -1, *(x.shape[k] for k in range(len(stack.axes), x.ndim))
        ), rest

    def _own(self, names, x: Array, rest) -> Stack:
        """Returns the stack of [cells of `rest`..., own cells along `names`, dims of a cell...]."""
        given, counts = (*rest, *names), [self.here(axis) for axis in names]
        x = x.reshape(*x.shape[: len(rest)], *counts, *x.shape[len(rest) + 1 :])
        axes = self.ordered(given)
        inside = range(len(given), x.ndim)
        return Stack(x.transpose(*(given.index(axis) for axis in axes), *inside), axes)

    def _axis_index(self, names, params) -> Stack:
        """Returns the index of each cell."""
        if not names:
            return Stack(jnp.zeros((), jnp.int32), ())
        return self._own(names, self._indices(names), ())

    def _shared(self, names, params, stack: Stack) -> Stack:
        """Returns a value that the program declares equal along `names`, once for all cells."""
        x, axes = stack.array, [axis for axis in stack.axes if axis not in names]
        for at in reversed(range(len(stack.axes))):
            if stack.axes[at] in names:
                x = lax.index_in_dim(x, 0, at, keepdims=False)
        return Stack(x, tuple(axes))

    def _all_gather(self, names, params, stack: Stack) -> Stack:
        """Returns the values of all cells, along a dim of each cell."""
        x, rest = self._of_all(names, stack)
        dim = len(rest) + params["all_gather_dimension"]
        x = jnp.moveaxis(x, len(rest), dim)
        if params["tiled"]:
            x = x.reshape(*x.shape[:dim], -1, *x.shape[dim + 2 :])
        return Stack(x, rest)

    def _reduce_scatter(self, names, params, stack: Stack) -> Stack:
        """Returns each cell's part of the sum."""
        x, rest = functools.reduce(self.sum, names, stack)
        dim, n = len(rest) + params["scatter_dimension"], math.prod(self.counts[a] for a in names)
        if params["tiled"]:
            x = x.reshape(*x.shape[:dim], n, -1, *x.shape[dim + 1 :])
        x = jnp.moveaxis(x, dim, len(rest))
        return self._own(names, jnp.take(x, self._indices(names), axis=len(rest)), rest)

    def _ppermute(self, names, params, stack: Stack) -> Stack:
        """Returns for each cell the value of the cell that sends to it, or zeros."""
        x, rest = self._of_all(names, stack)
        source = np.full(math.prod(self.counts[axis] for axis in names), -1, np.int32)
        for start, end in params["perm"] if names else ():
            source[end] = start
        if not names:
            source[:] = 0
        sources = jnp.asarray(source)[self._indices(names)]
        x = jnp.take(x, jnp.maximum(sources, 0), axis=len(rest))
        sends = sources.reshape(-1, *[1] * (x.ndim - len(rest) - 1)) >= 0
        return self._own(names, jnp.where(sends, x, jnp.zeros_like(x)), rest)

    def _all_to_all(self, names, params, stack: Stack) -> Stack:
        """Returns for each cell its part of every cell's value."""
        x, rest = self._of_all(names, stack)
        first, n = len(rest) + 1, math.prod(self.counts[axis] for axis in names)
        split, joined = params["split_axis"], params["concat_axis"]
        if params["tiled"]:
            x = x.reshape(*x.shape[: first + split], n, -1, *x.shape[first + split + 1 :])
        x = jnp.moveaxis(x, first + split, first - 1)  # [..., to, from, dims of a cell]
        x = jnp.take(x, self._indices(names), axis=first - 1)
        x = jnp.moveaxis(x, first, first + joined)
        if params["tiled"]:
            at = first + joined
            x = x.reshape(*x.shape[:at], -1, *x.shape[at + 2 :])
        return self._own(names, x, rest)

    def _scan(self, eqn: JaxprEqn, operands: Sequence[Stack]) -> list[Stack]:
        """Returns the results of a loop in whose body something communicates."""
        (body,) = jaxprs.closed(eqn.params)
        jaxpr = jaxprs.opened(body)
        constants, carries = jaxprs.scan_parts(eqn)
        split = constants + carries
        shared = [Stack(jnp.asarray(x), ()) for x in getattr(body, "consts", ())]
        declared = [self._declared(var.aval) for var in jaxpr.invars[constants:split]]
        begin = [self.over(*pair) for pair in zip(operands[constants:split], declared, strict=True)]
        axes_of_carries = [stack.axes for stack in begin]
        sliced, stacked_axes = operands[split:], []

        def trip(carry, slices):
            """Returns the carries and the stacked results of one trip, as arrays."""
            given = [Stack(x, axes) for x, axes in zip(carry, axes_of_carries, strict=True)]
            given += [Stack(x, stack.axes) for x, stack in zip(slices, sliced, strict=True)]
            results = self.run(jaxpr, shared, [*operands[:constants], *given])
            after = [self.over(*p) for p in zip(results[:carries], axes_of_carries, strict=True)]
            stacked_axes[:] = [stack.axes for stack in results[carries:]]
            return [stack.array for stack in after], [stack.array for stack in results[carries:]]

        arrays, stacked = lax.scan(
            trip,
            [stack.array for stack in begin],
            [jnp.moveaxis(stack.array, len(stack.axes), 0) for stack in sliced],
            length=eqn.params["length"],
            reverse=eqn.params["reverse"],
        )
        found = [Stack(x, axes) for x, axes in zip(arrays, axes_of_carries, strict=True)]
        return found + [
            Stack(jnp.moveaxis(x, 0, len(axes)), axes)
            for x, axes in zip(stacked, stacked_axes, strict=True)
        ]

    def _cond(self, eqn: JaxprEqn, operands: Sequence[Stack]) -> list[Stack]:
        """Returns the results of a conditional in whose branches something communicates.

        If the cells take different branches, all branches run, and each cell keeps its own.
        """
        index, *operands = operands
        declared = [self._declared(aval) for aval in jaxprs.types(eqn.outvars)]
        # What the branches compute differs along the axes of the index too.
        wanted = [self.ordered((*axes, *index.axes)) for axes in declared]

        def branch(body, *_):
            """Returns the arrays of one branch's results."""
            shared = [Stack(jnp.asarray(x), ()) for x in getattr(body, "consts", ())]
            results = self.run(jaxprs.opened(body), shared, operands)
            return [self.over(*pair).array for pair in zip(results, wanted, strict=True)]

        branches = [functools.partial(branch, body) for body in eqn.params["branches"]]
        if not index.axes:
            arrays = lax.switch(index.array, branches)
        else:
            every = [take() for take in branches]
            chosen = lambda axes: self.over(index, axes).array
            arrays = [
                self._chosen(chosen(axes), options)
                for axes, *options in zip(wanted, *every, strict=True)
            ]
        return [Stack(x, axes) for x, axes in zip(arrays, wanted, strict=True)]

    @staticmethod
    def _chosen(index: Array, options: Sequence[Array]) -> Array:
        """Returns for each cell that of the `options` which the cell's `index` names."""
        index = jnp.clip(index, 0, len(options) - 1)
        wide = index.reshape(*index.shape, *[1] * (options[0].ndim - index.ndim))
        chosen = options[0]
        for k, option in enumerate(options[1:], 1):
            chosen = jnp.where(wide == k, option, chosen)
        return chosen

    def _declared(self, aval: Any) -> tuple[str, ...]:
        """Returns the axes along which a value may differ by its type."""
        return self.ordered(types.axes_of_type(aval))


def _needed(steps: Sequence[Step], results: Sequence[int]) -> list[Step]:
    """Returns the steps on which a result depends."""
    wanted, needed = set(results), []
    for step in reversed(steps):
        if not wanted.isdisjoint(step.writes):
            wanted |= {*step.reads}
            needed.append(step)
    return needed[::-1]


def _with_recipes(keys, recipes: Mapping[int, Step], values) -> list[Step]:
    """Returns the recipes that compute those `keys` that have no value yet, in order."""
    found: dict[int, Step] = {}

    def add(key):
        """Adds the recipe of a key, after those that it needs."""
        if key in values or key not in recipes or recipes[key].writes[0] in found:
            return
        for below in recipes[key].reads:
            add(below)
        found[recipes[key].writes[0]] = recipes[key]

    for key in keys:
        add(key)
    return list(found.values())
