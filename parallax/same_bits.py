"""Runs a step so that its results have the same bits on every mesh of CPUs.

Sums of floating-point numbers depend on their order, and a kernel for 8 rows rounds differently
from one for 64 rows. So one step on two meshes gives two results. `spmd` removes both causes. The
step is written for a fixed number of *cells* along each axis. A cell is a logical device: the step
runs as if each cell were a device. A device of the real mesh has one cell or several. Every kernel
has the shapes of one cell, and every sum is a binary tree over the cells, whatever the mesh is.

The step is traced once, as the program of one cell. The program is then run in two kinds of parts.
A *segment* has equations that do not communicate; it is compiled apart from the rest, and runs for
one cell after another. A collective works on all cells of the device together. A `Stack` is a value
of the program with its numbers for all cells of the device. In the code below, a `StepOfCell` is
one equation of the program, and a *key* is a number that identifies one value of the program.
"""

import dataclasses
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
from jax.experimental.scheduling_groups import xla_metadata_call
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int

from parallax import argument_checks, jaxprs
from parallax import mesh as meshes
from parallax._typing import PyTree
from parallax.collectives import types
from parallax.trees import AnyMesh, entry_axes, is_array

# Equations that change only what the type of a value says about mesh axes
CASTS = {"pvary", "pcast", "terms", "vary_unreduced_cast"}
# Collectives that join two values to one; the others move values
TREES: dict[str, Callable[..., Any]] = dict.fromkeys(
    ("psum", "psum_invariant", "unreduced_psum"), lax.add
)
TREES |= {"pmax": lax.max, "pmin": lax.min}
LOOPS = {"scan", "while", "cond"}


class Stack(eqx.Module):
    """A value of the program, for all cells (logical devices) of this device.

    Attributes:
        array: the numbers. The first dims index the cells of this device along each of `axes`. The
            other dims are those of the value in one cell.
        axes: the axes along which the value may differ from cell to cell, in the order of the
            argument `cells` of `spmd`. Along all other axes the cells share the value.
    """

    array: Any
    axes: tuple[str, ...] = eqx.field(static=True, default=())


class StepOfCell(NamedTuple):
    """One equation of the program of a cell (a logical device).

    Attributes:
        eqn: the equation.
        alone: whether the equation runs by itself, outside of the segments (groups of equations
            that are compiled together). It does if the equation, or one inside it, needs values of
            other cells, or the index of its own cell.
        reads: the keys of its operands. A key is a number that identifies a value of the program.
        writes: the keys of its results.
    """

    eqn: JaxprEqn
    alone: bool
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
    """Returns a function like that of `mesh.spmd`; its results have the same bits on every mesh.

    A *cell* is a logical device. `f` runs as if each cell were a device, with a block of its own of
    each argument. A device of `mesh` has one cell or several. Call the returned function under
    `jax.jit`. Results are equal for two meshes if `f`, `cells`, the processor's model and the
    version of JAX are the same.

    Args:
        f: a function of local blocks, for example a train step. A step with another number of
            microbatches is another function, and may give other bits.
        cells: the number of cells along each axis, a power of two.
        mesh: the mesh to run on, with the same axes as `cells`. The size of each axis divides the
            number of cells along the axis.
        in_specs: as in `mesh.spmd`.
        out_specs: as in `mesh.spmd`.

    Raises:
        ValueError: `mesh` is not of CPUs, has other axes than `cells`, or has an axis whose size
            does not divide the number of cells; a number of cells is no power of two; `f` prints
            or calls back to Python, or it calls something that has no rule here, such as a `while`
            loop with a collective in it.
    """
    _check(cells, mesh)
    of_cells = meshes.spmd(f, mesh=meshes.abstract(**cells), in_specs=in_specs, out_specs=out_specs)

    def mapped(*arguments):
        """Returns the result of `f`, as global arrays on the mesh."""
        arrays, static = eqx.partition(arguments, is_array)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)
        program, result, static_result = eqx.filter_make_jaxpr(of_cells)(
            *eqx.combine(shapes, static)
        )
        (eqn,) = program.jaxpr.eqns  # a `shard_map`; its operands are the arguments and constants
        known = dict(zip(program.jaxpr.invars, jax.tree.leaves(arrays), strict=True))
        known |= zip(program.jaxpr.constvars, program.consts, strict=True)
        results = _mapped(eqn, [known[var] for var in eqn.invars], mesh, cells)
        known = dict(zip(eqn.outvars, results, strict=True))
        leaves = [known[var] for var in program.jaxpr.outvars]
        arrays = jax.tree.unflatten(jax.tree.structure(result), leaves)
        return eqx.combine(arrays, static_result)

    return mapped


def _check(cells: Mapping[str, int], mesh: AnyMesh) -> None:
    """Raises `ValueError` unless the mesh is of CPUs, and for each axis the number of cells is a
    power of two and a multiple of the number of devices."""
    sizes = dict(mesh.shape)
    if (platform := meshes.platform_of(mesh)) != "cpu":
        # Read in programs for v5e: none of the functions of the cells was left.
        raise ValueError(
            f"same_bits.spmd needs a mesh of CPUs; got a mesh of {platform} devices. There the "
            "compiler fuses the code of a cell with the code around it, so the bits may differ "
            "from mesh to mesh. Use mesh.spmd there."
        )
    argument_checks.whole_numbers("same_bits.spmd", **cells)
    odd = [f"{axis}={n}" for axis, n in cells.items() if n < 1 or n & (n - 1)]
    if odd:
        raise ValueError(
            "same_bits.spmd needs a number of cells that is a power of two along each axis; got "
            f"{', '.join(odd)}. Every sum is a binary tree over the cells, and each device "
            "computes a whole branch of the tree. Use 1, 2, 4, 8, ..."
        )
    if set(sizes) != set(cells) or any(cells[axis] % n for axis, n in sizes.items()):
        raise ValueError(
            "same_bits.spmd needs a mesh with the same axes as `cells`, and the size of each axis "
            f"must divide its number of cells; got the mesh {sizes} for the cells {dict(cells)}. "
            "Give the mesh exactly the axes of `cells`; an axis may have size 1. Along each axis, "
            "the number of devices must be a power of two, and at most the number of cells."
        )


def _mapped(eqn: JaxprEqn, operands: Sequence[Any], mesh: AnyMesh, cells) -> list[Any]:
    """Returns the results of `eqn`, a `shard_map` over the mesh of `cells` (logical devices). Here
    the `shard_map` runs on `mesh`, where a device has one cell or several."""
    (body,) = jaxprs.closed(eqn.params)
    # Along an axis with one cell there is nothing to sum and nothing to split.
    counts = {axis: n for axis, n in cells.items() if n > 1}
    opened = _opened(jaxprs.opened(body), eqn.params["mesh"])

    def layouts(specs, avals) -> list["TwoForms"]:
        """Returns the `TwoForms` of each array: its shapes as a global array, and as a stack of the
        blocks of all cells (logical devices). `avals` are the types of the arrays, and `specs` say
        how the cells split the arrays."""
        return [TwoForms.of(*pair, counts) for pair in zip(specs, avals, strict=True)]

    ins = layouts(eqn.params["in_specs"], jaxprs.types(eqn.invars))
    outs = layouts(eqn.params["out_specs"], jaxprs.types(eqn.outvars))

    def on_device(*blocks):
        """Runs the program for all cells (logical devices) of this device. The first dims of each
        argument and of each result index these cells (`Stack`)."""
        walk = Walk(counts, dict(mesh.shape), opened)
        stacks = [Stack(x, layout.axes) for x, layout in zip(blocks, ins, strict=True)]
        results = walk.run(body, stacks)
        return [walk.over(x, layout.axes).array for x, layout in zip(results, outs, strict=True)]

    # The first dims of a stack are split over the mesh.
    in_specs = tuple(PartitionSpec(*layout.axes) for layout in ins)
    out_specs = [PartitionSpec(*layout.axes) for layout in outs]
    stacks = [layout.stacked(x) for layout, x in zip(ins, operands, strict=True)]
    results = jax.shard_map(
        on_device, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )(*stacks)
    return [layout.whole(x) for layout, x in zip(outs, results, strict=True)]


class TwoForms(NamedTuple):
    """The two forms of a global array: as the caller has it, and as a stack of blocks.

    A stack has the blocks of all cells (logical devices): its first dims index the cells, and its
    other dims are those of a block.

    Attributes:
        axes: the axes that split the array, in the order of the argument `cells` of `spmd`.
        shape: the shape that the caller sees.
        wide: `shape` with each split dim replaced by several dims: the number of cells along each
            of its axes, and the size of the dim in a block. A dim of 12 over 4 cells becomes 4, 3.
        order: the dims of `wide` in the order of the stack's dims.
    """

    axes: tuple[str, ...]
    shape: tuple[int, ...]
    wide: tuple[int, ...]
    order: tuple[int, ...]

    @classmethod
    def of(cls, spec: PartitionSpec, aval: Any, counts: Mapping[str, int]) -> "TwoForms":
        """Returns the `TwoForms` of a global array of the type `aval`: how to turn the array into a
        stack of blocks, and back. `spec` says which axes split the array, and `counts` has the
        number of cells (logical devices) along each axis."""
        wide, names = [], []  # for each dim of `wide`, its axis; None for a dim of a block
        for size, entry in itertools.zip_longest(aval.shape, spec):
            split = [axis for axis in entry_axes(entry) if axis in counts]
            sizes = [counts[axis] for axis in split]
            wide += [*sizes, size // math.prod(sizes)]
            names += [*split, None]
        axes = tuple(axis for axis in counts if axis in names)
        of_block = (k for k, name in enumerate(names) if name is None)
        order = (*map(names.index, axes), *of_block)  # a stack's first dims index the cells
        return cls(axes, aval.shape, tuple(wide), order)

    def stacked(self, x: Any) -> Any:
        """Returns the global array `x` as a stack of the blocks of all cells (logical devices). The
        first dims index the cells along each of `axes`, and the other dims are those of a block.
        """
        return x.reshape(self.wide).transpose(self.order)

    def whole(self, stack: Any) -> Any:
        """Returns the global array that `stack` was made from: the inverse of `stacked`."""
        return stack.transpose(np.argsort(self.order)).reshape(self.shape)


def _apart(cell: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function, compiled as a computation of its own.

    The compiler then fuses no kernel of this computation with kernels of the surrounding program,
    which differ from mesh to mesh. A fused kernel rounds differently.
    """
    return xla_metadata_call(cell, inlineable="false")


def _opened(jaxpr: Jaxpr, mesh: AnyMesh) -> dict[int, tuple[JaxprEqn, Jaxpr]]:
    """Returns the programs of this library's collectives in a jaxpr, by the `id` of the equation.

    The equation itself is kept beside its program, so that its `id` is not used again.
    """
    found = {}
    for eqn in jaxprs.every(jaxpr):
        if eqn.primitive is types.linear_p:
            program = types.linear_jaxpr(eqn, mesh, check_vma=True)
            found |= {id(eqn): (eqn, program)} | _opened(program, mesh)
    return found


def _names(eqn: JaxprEqn) -> tuple[str, ...]:
    """Returns the axes of the mesh that an equation names."""
    names = eqn.params.get("axis_name", eqn.params.get("axes", ()))
    names = (names,) if isinstance(names, str) else tuple(names)
    return tuple(name for name in names if isinstance(name, str))


def _operation(eqn: JaxprEqn) -> Any:
    """Returns a key that is equal for two equations if they have the same primitive and equal
    parameters. If the parameters have no hash, the key equals no other key."""
    key = (eqn.primitive, *eqn.params.items())
    try:
        hash(key)
    except TypeError:
        return object()
    return key


class Flat(NamedTuple):
    """A program as a list of steps. A key is a number that identifies a value of the program.

    Attributes:
        steps: the steps that the results depend on.
        constants: the values of the constants, by key.
        inputs: the keys of the arguments.
        outputs: the keys of the results.
    """

    steps: Sequence[StepOfCell]
    constants: Mapping[int, Stack]
    inputs: Sequence[int]
    outputs: Sequence[int]


def _flat(program: Jaxpr | ClosedJaxpr, walk: "Walk") -> Flat:
    """Returns a program as a list of steps, one for each equation.

    If an equation in a call needs values of other cells (logical devices), or the index of its own
    cell, the steps of the called program replace the call. An equation is left out if it changes
    only what the type of a value says about mesh axes (`CASTS`).
    """
    numbers = itertools.count()
    constants: dict[int, Stack] = {}
    steps: list[StepOfCell] = []

    def new(value) -> int:
        """Adds `value` to `constants`. Returns its key: a new number that identifies this value."""
        key = next(numbers)
        constants[key] = Stack(value)
        return key

    def add(program, inputs) -> list[int]:
        """Appends the equations of a program to `steps`. Returns the keys of its results; `inputs`
        are the keys of its arguments. A key is a number that identifies a value."""
        jaxpr, closed_over = jaxprs.opened(program), map(new, getattr(program, "consts", ()))
        keys = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*closed_over, *inputs), strict=True))

        def key(atom) -> int:
            """Returns the key of an operand: the number that identifies its value."""
            if jaxprs.is_literal(atom):
                return new(np.asarray(atom.val, atom.aval.dtype))
            return keys[atom]

        for eqn in jaxpr.eqns:
            reads, alone = tuple(map(key, eqn.invars)), walk._alone(eqn)
            # XLA aborts the process if it compiles a `pure_callback` in the function of a cell.
            if jaxprs.has_effects(eqn) or eqn.primitive.name == "pure_callback":
                raise ValueError(
                    f"same_bits.spmd cannot run `{eqn.primitive.name}` ({jaxprs.origin(eqn)}), "
                    "which prints, calls Python or has another effect. Take it out of the step."
                )
            if eqn.primitive is types.linear_p:
                writes = add(walk.opened[id(eqn)][1], reads)
            elif eqn.primitive.name in CASTS:
                writes = reads
            elif alone and eqn.primitive.name not in LOOPS and jaxprs.inner(eqn):
                writes = add(jaxprs.closed(eqn.params)[0], reads)
            else:
                writes = tuple(next(numbers) for _ in eqn.outvars)
                steps.append(StepOfCell(eqn, alone, reads, writes))
            keys |= zip(eqn.outvars, writes, strict=True)
        return [key(atom) for atom in jaxpr.outvars]

    inputs = [next(numbers) for _ in jaxprs.opened(program).invars]
    outputs = add(program, inputs)
    return Flat(_needed(steps, outputs), constants, inputs, outputs)


def _needed(steps: Sequence[StepOfCell], results: Sequence[int]) -> list[StepOfCell]:
    """Returns the steps on which a result depends."""
    wanted, needed = set(results), []
    for step in reversed(steps):
        if not wanted.isdisjoint(step.writes):
            wanted |= {*step.reads}
            needed.append(step)
    return needed[::-1]


@dataclasses.dataclass
class Walk:
    """Runs the program of one cell (a logical device) for all cells of this device, inside a
    `shard_map`.

    If `counts` is empty, there is only one cell, and its equations run one by one, in the order of
    the program.

    Attributes:
        counts: the number of cells along each axis that has more than one cell.
        devices: the number of devices along each axis.
        opened: the programs of this library's collectives, by the `id` of the equation (`_opened`).
        done: the results of the calls of `once` so far, by their key and operands.
    """

    counts: Mapping[str, int]
    devices: Mapping[str, int]
    opened: Mapping[int, tuple[JaxprEqn, Jaxpr]]
    done: dict[Any, Any] = dataclasses.field(default_factory=dict)

    def in_loop(self) -> "Walk":
        """Returns a walk for the body of a loop or of a branch. It has a `done` of its own, so that
        no result from inside the body is used outside of it."""
        return dataclasses.replace(self, done={})

    def once(self, f: Callable[..., Any], *operands: Any, key: Any) -> Any:
        """Returns `f(*operands)`, computed only once for each combination of `key` and operands.
        Two operands are the same if they are one object, or NumPy arrays with equal bytes.

        So a program has no two equal instructions. XLA would merge equal instructions: for several
        devices before it simplifies the program, and for one device afterwards. The two orders can
        give different results. For example, XLA replaces `x / 0.1` by a product, and this may be
        another product on one device than on several.
        """
        same = [x.tobytes() if isinstance(x, np.ndarray) else id(x) for x in operands]
        entry = (key, *same, *map(jax.typeof, operands))
        if entry not in self.done:
            # The operands are kept, so that no other object gets their `id`.
            self.done[entry] = operands, f(*operands)
        return self.done[entry][1]

    def here(self, axis: str) -> int:
        """Returns the number of cells (logical devices) of this device along an axis."""
        return self.counts[axis] // self.devices[axis]

    def ordered(self, axes) -> tuple[str, ...]:
        """Returns the axes of `counts` that are in `axes`, in the order of `counts`."""
        named = set(axes)
        return tuple(axis for axis in self.counts if axis in named)

    def over(self, stack: Stack, axes: Sequence[str]) -> Stack:
        """Returns `stack` with a dim for each of `axes`. Such a dim indexes this device's cells
        (logical devices) along the axis. A dim that `stack` lacks is added, with a copy of the
        value for each cell."""
        wanted = self.ordered((*axes, *stack.axes))
        inside = jnp.shape(stack.array)[len(stack.axes) :]
        thin = [self.here(axis) if axis in stack.axes else 1 for axis in wanted]
        full = [self.here(axis) for axis in wanted]
        array = jnp.reshape(stack.array, (*thin, *inside))
        return Stack(jnp.broadcast_to(array, (*full, *inside)), wanted)

    def run(self, program: Jaxpr | ClosedJaxpr, operands: Sequence[Stack]) -> list[Stack]:
        """Returns the results of a program."""
        flat = _flat(program, self)
        values = {**flat.constants, **dict(zip(flat.inputs, operands, strict=True))}
        free, left = _free(flat) if self.counts else ([], flat.steps)
        while left:
            step = left[0]
            if step.alone or not self.counts:
                left = left[1:]
                self._run_cells(free, [k for k in step.reads if k not in values], flat, values)
                results = self._results(step.eqn, [values[key] for key in step.reads])
                values |= zip(step.writes, results, strict=True)
            else:
                segment, left = self._segment(left, values)
                later = {key for step in left for key in step.reads} | {*flat.outputs}
                writes = [key for step in segment for key in step.writes if key in later]
                self._run_cells([*free, *segment], writes, flat, values)
        self._run_cells(free, [k for k in flat.outputs if k not in values], flat, values)
        return [values[key] for key in flat.outputs]

    def _alone(self, eqn: JaxprEqn) -> bool:
        """Returns whether an equation, or one inside it, needs values of other cells (logical
        devices), or the index of its own cell."""
        if eqn.primitive.name not in CASTS and not self.counts.keys().isdisjoint(_names(eqn)):
            return True
        linear = eqn.primitive is types.linear_p
        bodies = [self.opened[id(eqn)][1]] if linear else jaxprs.inner(eqn)
        return any(map(self._alone, itertools.chain(*(body.eqns for body in bodies))))

    # Segments

    def _segment(
        self, left: Sequence[StepOfCell], values
    ) -> tuple[list[StepOfCell], list[StepOfCell]]:
        """Returns the steps of the next segment, and the other steps of `left`.

        A segment is compiled apart from the rest of the program. It has the first step of `left`,
        and each later one that is not `alone` and needs no result of a step of `left` outside the
        segment. The operands of all steps of a segment differ from cell (logical device) to cell
        along the same axes. This choice depends only on the program and on the number of cells
        along each axis, so the kernels of a segment are the same on every mesh.
        """
        axes_of = {key: stack.axes for key, stack in values.items()}
        segment, others, waiting = [], [], set()
        wanted = None
        for step in left:
            axes = self.ordered(axis for key in step.reads for axis in axes_of.get(key, ()))
            ready = waiting.isdisjoint(step.reads) and not step.alone
            if ready and wanted in (None, axes):
                wanted = axes
                segment.append(step)
                axes_of |= dict.fromkeys(step.writes, axes)
            else:
                others.append(step)
                waiting |= {*step.writes}
        return segment, others

    def _run_cells(
        self, steps: Sequence[StepOfCell], wanted: Sequence[int], flat: Flat, values
    ) -> None:
        """Runs `steps`, equations of the program, for each cell (logical device) of this device.
        Puts the results with the keys `wanted` into `values`. A key is the number of a value in the
        program. Steps on which no wanted result depends are left out."""
        if not wanted:
            return
        steps = _needed(steps, wanted)
        inside = {key for step in steps for key in step.writes} | flat.constants.keys()
        reads = {key: values[key] for step in steps for key in step.reads if key not in inside}
        axes = self.ordered(axis for stack in reads.values() for axis in stack.axes)

        def cell(*operands):
            """Runs `steps`, equations of the program, for one cell. Returns the cell's values with
            the keys `wanted`; a key is the number of a value. `operands` are the cell's values with
            the keys in `reads`."""
            walk = Walk({}, {}, self.opened)
            known = {**flat.constants, **dict(zip(reads, map(Stack, operands), strict=True))}
            for step in steps:
                results = walk._results(step.eqn, [known[key] for key in step.reads])
                known |= zip(step.writes, results, strict=True)
            return [known[key].array for key in wanted]

        results = self._for_each_cell(cell, list(reads.values()), axes)
        values |= {key: Stack(x, axes) for key, x in zip(wanted, results, strict=True)}

    def _for_each_cell(self, cell, stacks: Sequence[Stack], axes) -> list[Array]:
        """Returns the results of the function `cell` for all cells (logical devices) of this
        device. The cells run one after another."""
        if not axes:
            return _apart(cell)(*(stack.array for stack in stacks))
        sliced = {k: stack.array for k, stack in enumerate(stacks) if axes[0] in stack.axes}

        def along_others(slices):
            """Returns the results of this device's cells (logical devices) at one index along the
            axis `axes[0]`. `slices` has the operands at this index."""
            inside = list(stacks)
            for k, x in slices.items():
                inside[k] = Stack(x, stacks[k].axes[1:])
            return self._for_each_cell(cell, inside, axes[1:])

        return lax.map(along_others, sliced)

    # Equations

    def _results(self, eqn: JaxprEqn, operands: Sequence[Stack]) -> list[Stack]:
        """Returns the results of an equation."""
        name, params = eqn.primitive.name, eqn.params
        if params.get("axis_index_groups") is not None:
            raise ValueError(
                f"same_bits.spmd has no rule for `{name}` with axis_index_groups "
                f"({jaxprs.origin(eqn)}). Give the groups an axis of their own."
            )
        rules = {"scan": self._scan, "cond": self._cond}
        if not self.counts:
            rules["while"] = self._while
        if name in rules:
            return rules[name](eqn, operands)
        names = tuple(axis for axis in _names(eqn) if axis in self.counts)
        if name in TREES:
            return [self.tree(TREES[name], names, stack) for stack in operands]
        moves = {"replicated": self._shared, "ppermute": self._ppermute}
        moves |= dict.fromkeys(
            ("all_gather", "all_gather_invariant", "all_gather_reduced"), self._all_gather
        )
        moves |= dict.fromkeys(("reduce_scatter", "unreduced_reduce_scatter"), self._reduce_scatter)
        moves["all_to_all"] = self._all_to_all
        if name in moves:
            return [moves[name](names, params, stack) for stack in operands]
        if name == "axis_index":
            return [self._own(names, self._indices(names), ())]
        if _names(eqn) or self._alone(eqn):
            raise ValueError(
                f"same_bits.spmd has no rule for `{name}` ({jaxprs.origin(eqn)}). Use psum, "
                "all_gather, psum_scatter, ppermute, all_to_all, scan or cond there."
            )
        if jaxprs.called(eqn) is not None:
            if params.get("prevent_cse") and params.get("differentiated"):
                operands = lax.optimization_barrier(list(operands))  # values are computed again
            return self.run(jaxprs.closed(params)[0], operands)
        return self._local(eqn, operands)

    def _local(self, eqn: JaxprEqn, operands: Sequence[Stack]) -> list[Stack]:
        """Returns the results of an equation that does not communicate and has no program in it."""
        name, params = eqn.primitive.name, eqn.params
        # A sharding in the parameters is that of the mesh of cells.
        no_sharding = {key: None for key in params if key in ("sharding", "out_sharding")}
        params = eqn.primitive.get_bind_params(params | no_sharding)
        arrays = [stack.array for stack in operands]
        if not self.counts and name in jaxprs.CHEAP | jaxprs.DEAR:
            # Each equation would broadcast its scalars for itself.
            shape = jaxprs.types(eqn.outvars)[0].shape
            wide = functools.partial(jnp.broadcast_to, shape=shape)
            arrays = [x if jnp.shape(x) == shape else self.once(wide, x, key=shape) for x in arrays]
        bind = functools.partial(eqn.primitive.bind, **params)
        results = self.once(bind, *arrays, key=_operation(eqn))
        return list(map(Stack, results if eqn.primitive.multiple_results else [results]))

    def _scan(self, eqn: JaxprEqn, operands: Sequence[Stack]) -> list[Stack]:
        """Returns the results of a loop."""
        (body,) = jaxprs.closed(eqn.params)
        constants, carries = jaxprs.scan_parts(eqn)
        split = constants + carries
        avals = jaxprs.types(jaxprs.opened(body).invars[constants:split])
        axes = [self.ordered(types.axes_of_type(aval)) for aval in avals]

        def carried(stacks):
            """Returns each carry as a stack over the axes along which it varies. The types of the
            body's arguments give these axes, so a carry has one shape in all iterations."""
            return [self.over(*pair) for pair in zip(stacks, axes, strict=True)]

        def trip(carry, slices):
            """Returns the carries after one iteration, and the results that `lax.scan` stacks."""
            results = self.in_loop().run(body, [*operands[:constants], *carry, *slices])
            return carried(results[:carries]), results[carries:]

        def moved(stack, start, end):
            """Returns `stack` with the dim of the loop's iterations moved from `start` to `end`."""
            return Stack(jnp.moveaxis(stack.array, start, end), stack.axes)

        carry, stacked = lax.scan(
            trip,
            carried(operands[constants:split]),
            [moved(stack, len(stack.axes), 0) for stack in operands[split:]],
            length=eqn.params["length"],
            reverse=eqn.params["reverse"],
        )
        return carry + [moved(stack, 0, len(stack.axes)) for stack in stacked]

    def _while(self, eqn: JaxprEqn, operands: Sequence[Stack]) -> list[Stack]:
        """Returns the results of a loop without a fixed number of iterations."""
        test, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
        first = eqn.params["cond_nconsts"]
        split = first + eqn.params["body_nconsts"]

        def goes_on(carry):
            """Returns whether there is another iteration."""
            return self.in_loop().run(test, [*operands[:first], *carry])[0].array

        def trip(carry):
            """Returns the carries of the next iteration."""
            return self.in_loop().run(body, [*operands[first:split], *carry])

        return lax.while_loop(goes_on, trip, [self.over(stack, ()) for stack in operands[split:]])

    def _cond(self, eqn: JaxprEqn, operands: Sequence[Stack]) -> list[Stack]:
        """Returns the results of a conditional.

        If the cells (logical devices) may take different branches, all branches run, and each cell
        keeps the results of its own branch.
        """
        index, *operands = operands
        # What the branches compute differs along the axes of the index too.
        axes = [(*types.axes_of_type(aval), *index.axes) for aval in jaxprs.types(eqn.outvars)]

        def branch(body):
            """Returns the results of one branch."""
            results = self.in_loop().run(body, operands)
            return [self.over(*pair) for pair in zip(results, axes, strict=True)]

        branches = [functools.partial(branch, body) for body in eqn.params["branches"]]
        if not index.axes:
            return lax.switch(index.array, branches)
        chosen, *others = [branch() for branch in branches]
        for k, options in enumerate(others, 1):
            chosen = [self._chosen(index, k, *pair) for pair in zip(options, chosen, strict=True)]
        return chosen

    def _chosen(self, index: Stack, k: int, option: Stack, other: Stack) -> Stack:
        """Returns `option` for the cells (logical devices) whose `index` is `k`, and `other` for
        the other cells."""
        here = self.over(index, option.axes).array == k
        here = here.reshape(*here.shape, *[1] * (option.array.ndim - here.ndim))
        return Stack(jnp.where(here, option.array, other.array), option.axes)

    # Collectives

    def tree(self, join, names: Sequence[str], stack: Stack) -> Stack:
        """Returns the values of all cells (logical devices) along the axes `names`, joined by the
        function `join` in a binary tree over the cells' indices.

        Along each axis, a device first joins the values of its own cells to one value. Then it
        joins this value with those of other devices: in each level of the tree, two devices whose
        indices differ in one bit exchange their values, and both join them.
        """
        x, dtype = stack.array, stack.array.dtype
        if jnp.issubdtype(dtype, jnp.floating):
            x = x.astype(types.accumulation_dtype(dtype))
        axes = list(stack.axes)
        for axis in names:
            if axis not in axes:  # all cells share it; their number is a power of two
                x = x * self.counts[axis] if join is lax.add else x
                continue
            at, n = axes.index(axis), self.devices[axis]
            while x.shape[at] > 1:
                x = join(*(lax.slice_in_dim(x, k, None, 2, at) for k in range(2)))
            x = lax.squeeze(x, (at,))
            axes.remove(axis)
            for bit in range(n.bit_length() - 1):
                x = join(x, lax.ppermute(x, axis, [(k, k ^ 2**bit) for k in range(n)]))
        if jnp.issubdtype(dtype, jnp.floating):  # a compiler may remove a cast with its inverse
            info = jnp.finfo(dtype)
            x = lax.reduce_precision(x, info.nexp, info.nmant)
        return Stack(x.astype(dtype), tuple(axes))

    def _indices(self, names: Sequence[str]) -> Int[Array, " cells"]:
        """Returns, for each cell (logical device) of this device along the axes `names`, its index
        among all cells along these axes. The cells are counted in row-major order."""
        index = jnp.zeros((1,), jnp.int32)
        for axis in names:
            first = lax.axis_index(axis) * self.here(axis)
            own = first + jnp.arange(self.here(axis), dtype=jnp.int32)
            index = (index[:, None] * self.counts[axis] + own[None]).reshape(-1)
        return index

    def _of_all(self, names: Sequence[str], stack: Stack) -> tuple[Array, tuple[str, ...]]:
        """Returns two things: the values of all cells (logical devices) along `names`, and `rest`,
        the other axes of the stack. The values are an array [this device's cells along `rest`...,
        all cells along `names`, dims of the value in one cell...]."""
        stack = self.over(stack, names)
        x, rest = stack.array, tuple(axis for axis in stack.axes if axis not in names)
        for axis in names:
            x = lax.all_gather(x, axis, axis=stack.axes.index(axis), tiled=True)
        x = x.transpose(*map(stack.axes.index, (*rest, *names)), *range(len(stack.axes), x.ndim))
        inside = x.shape[len(stack.axes) :]
        return x.reshape(*x.shape[: len(rest)], -1, *inside), rest

    def _own(self, names, x: Array, rest) -> Stack:
        """Returns the array `x` as a `Stack`. The first dims of `x` index the cells (logical
        devices) of this device along each axis of `rest`. The next dim indexes them along all axes
        of `names`, in row-major order. The other dims are those of the value in one cell."""
        given = (*rest, *names)
        counts, inside = map(self.here, given), x.shape[len(rest) + 1 :]
        x, axes = x.reshape(*counts, *inside), self.ordered(given)
        return Stack(x.transpose(*map(given.index, axes), *range(len(given), x.ndim)), axes)

    def _shared(self, names, params, stack: Stack) -> Stack:
        """Returns `stack` without its dims for the axes `names`. The program declares that the
        value is equal in all cells (logical devices) along these axes, so the first cell's value
        is enough."""
        first = tuple(0 if axis in names else slice(None) for axis in stack.axes)
        return Stack(stack.array[first], tuple(axis for axis in stack.axes if axis not in names))

    def _all_gather(self, names, params, stack: Stack) -> Stack:
        """Returns, for each cell (logical device), the values of all cells along `names`, gathered
        along one dim."""
        x, rest = self._of_all(names, stack)
        dim = len(rest) + params["all_gather_dimension"]
        x = jnp.moveaxis(x, len(rest), dim)
        if params["tiled"]:
            x = x.reshape(*x.shape[:dim], -1, *x.shape[dim + 2 :])
        return Stack(x, rest)

    def _reduce_scatter(self, names, params, stack: Stack) -> Stack:
        """Returns, for each cell (logical device), its part of the sum over the cells along
        `names`."""
        stack = self.tree(lax.add, names, stack)
        x, rest = stack.array, stack.axes
        dim, n = len(rest) + params["scatter_dimension"], math.prod(self.counts[a] for a in names)
        if params["tiled"]:
            x = x.reshape(*x.shape[:dim], n, -1, *x.shape[dim + 1 :])
        x = jnp.moveaxis(x, dim, len(rest))
        return self._own(names, jnp.take(x, self._indices(names), axis=len(rest)), rest)

    def _ppermute(self, names, params, stack: Stack) -> Stack:
        """Returns, for each cell (logical device), the value of the cell that sends to it, or zeros
        if no cell does."""
        x, rest = self._of_all(names, stack)
        sources = np.full(x.shape[len(rest)], -1, np.int32)
        for start, end in params["perm"]:
            sources[end] = start
        sources = jnp.asarray(sources)[self._indices(names)]
        x = jnp.take(x, jnp.maximum(sources, 0), axis=len(rest))
        sends = sources.reshape(-1, *[1] * (x.ndim - len(rest) - 1)) >= 0
        return self._own(names, jnp.where(sends, x, jnp.zeros_like(x)), rest)

    def _all_to_all(self, names, params, stack: Stack) -> Stack:
        """Returns, for each cell (logical device), the parts that all cells along `names` send to
        it."""
        x, rest = self._of_all(names, stack)
        at, n = len(rest), x.shape[len(rest)]
        split, joined = (1 + at + params[key] for key in ("split_axis", "concat_axis"))
        x = x.reshape(*x.shape[:split], n, -1, *x.shape[split + 1 :])
        x = jnp.moveaxis(x, split, at)  # [..., to, from, dims of a cell]
        x = jnp.moveaxis(jnp.take(x, self._indices(names), axis=at), at + 1, joined)
        return self._own(names, x.reshape(*x.shape[:joined], -1, *x.shape[joined + 2 :]), rest)


def _free(flat: Flat) -> tuple[list[StepOfCell], list[StepOfCell]]:
    """Returns the *free* steps, which depend only on constants of the program, and the others.

    A segment is a set of steps that is compiled apart from the rest. Each segment that needs the
    result of a free step runs this step itself.
    """
    free, others, known = [], [], set(flat.constants)
    for step in flat.steps:
        if step.alone or not known.issuperset(step.reads):
            others.append(step)
        else:
            free.append(step)
            known |= {*step.writes}
    return free, others
