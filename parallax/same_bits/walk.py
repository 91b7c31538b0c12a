"""Runs the program of one cell (a logical device) for all cells of a device.

A `StepOfCell` is one equation of the program. Steps that do not communicate form segments. A
segment is compiled apart from the rest of the program, and runs for one cell after another. A
collective works on the stacks of all cells together. A *key* is a number that identifies one value
of the program. `Walk.once` computes equal equations only once. The body of a loop or of a branch
has a walk of its own (`in_loop`), so `once` never reuses a value of the body outside the body.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.scheduling_groups import xla_metadata_call
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jaxtyping import Array

from parallax import jaxprs
from parallax.collectives import types
from parallax.same_bits.stacks import Cells, Stack
from parallax.same_bits.steps import (
    Flat,
    Opened,
    StepOfCell,
    axes_named_by,
    flat_program,
    free_steps,
    needed_steps,
    needs_other_cells,
)

# Collectives that join two values to one; the others move values
TREES: dict[str, Callable[..., Any]] = dict.fromkeys(
    ("psum", "psum_invariant", "unreduced_psum"), lax.add
)
TREES |= {"pmax": lax.max, "pmin": lax.min}


def _apart(cell: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function, compiled as a computation of its own.

    The compiler then fuses no kernel of this computation with kernels of the surrounding program,
    which differ from mesh to mesh. A fused kernel rounds differently.
    """
    return xla_metadata_call(cell, inlineable="false")


def _operation(eqn: JaxprEqn) -> Any:
    """Returns a key that is equal for two equations if they have the same primitive and equal
    parameters. If the parameters have no hash, the key equals no other key."""
    key = (eqn.primitive, *eqn.params.items())
    try:
        hash(key)
    except TypeError:
        return object()
    return key


@dataclasses.dataclass
class Walk:
    """Runs the program of one cell (a logical device) for all cells of this device, inside a
    `shard_map`.

    If `cells.counts` is empty, there is only one cell, and its equations run one by one, in the
    order of the program.

    Attributes:
        cells: the cells of this device.
        opened: the program inside each equation that is a collective of this library, by the `id`
            of the equation.
        done: the results that `once` has computed, by their key and operands.
    """

    cells: Cells
    opened: Opened
    done: dict[Any, Any] = dataclasses.field(default_factory=dict)

    def in_loop(self) -> "Walk":
        """Returns a walk for the body of a loop or of a branch. The new walk has its own `done`,
        the dict in which `once` keeps results: a result of the body cannot be used outside of the
        body."""
        return dataclasses.replace(self, done={})

    def once(self, f: Callable[..., Any], *operands: Any, key: Any) -> Any:
        """Returns `f(*operands)`, computed only once for each combination of `key` and operands.
        Two operands are the same if they are one object, or NumPy arrays with equal bytes.

        So a program has no two equal instructions. XLA would merge equal instructions. In a
        program for several devices, XLA merges first and then simplifies. In a program for one
        device, XLA simplifies first. The two orders can give programs that round differently.
        """
        same = [x.tobytes() if isinstance(x, np.ndarray) else id(x) for x in operands]
        entry = (key, *same, *map(jax.typeof, operands))
        if entry not in self.done:
            # The operands are kept, so that no other object gets their `id`.
            self.done[entry] = operands, f(*operands)
        return self.done[entry][1]

    def run(self, program: Jaxpr | ClosedJaxpr, operands: Sequence[Stack]) -> list[Stack]:
        """Returns the results of a program.

        A step is one equation. A step that is `alone` needs values of other cells (logical
        devices), or the index of its cell. `_results` runs such a step on the stacks of all cells.
        The other steps are grouped in segments. `_run_cells` runs a segment for one cell after
        another. A free step depends only on constants, and runs in each segment that needs its
        result. For the `alone` steps and the results of the program, a free step runs once, before
        its first use there. If there is only one cell (`counts` is empty), `_results` runs every
        step.
        """
        flat = flat_program(program, self.cells, self.opened)
        values = {**flat.constants, **dict(zip(flat.inputs, operands, strict=True))}
        free, left = free_steps(flat) if self.cells.counts else ([], flat.steps)
        while left:
            step = left[0]
            if step.alone or not self.cells.counts:
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

    # Segments

    def _segment(
        self, left: Sequence[StepOfCell], values
    ) -> tuple[list[StepOfCell], list[StepOfCell]]:
        """Returns the steps of the next segment, and the other steps of `left`. `left` has the
        steps that have not run yet. A segment is compiled apart from the rest of the program.

        The segment has the first step of `left`, which is not `alone`, and each later step that
        meets three conditions. First, the later step is not `alone` either. Second, the later step
        reads no result of a step that the segment leaves out. Third, its operands vary over the
        cells (logical devices) along the same axes as the first step's operands. The choice of
        steps depends only on the program and on the number of cells along each axis, not on the
        devices, so a segment's kernels are the same on every mesh.
        """
        axes_of = {key: stack.axes for key, stack in values.items()}
        segment, others, waiting = [], [], set()
        wanted = None
        for step in left:
            axes = self.cells.ordered(axis for key in step.reads for axis in axes_of.get(key, ()))
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
        steps = needed_steps(steps, wanted)
        inside = {key for step in steps for key in step.writes} | flat.constants.keys()
        reads = {key: values[key] for step in steps for key in step.reads if key not in inside}
        axes = self.cells.ordered(axis for stack in reads.values() for axis in stack.axes)

        def cell(*operands):
            """Runs `steps`, equations of the program, for one cell. Returns the cell's values with
            the keys `wanted`; a key is the number of a value. `operands` are the cell's values with
            the keys in `reads`."""
            walk = Walk(Cells({}, {}), self.opened)
            known = {**flat.constants, **dict(zip(reads, map(Stack, operands), strict=True))}
            for step in steps:
                results = walk._results(step.eqn, [known[key] for key in step.reads])
                known |= zip(step.writes, results, strict=True)
            return [known[key].array for key in wanted]

        results = self._for_each_cell(cell, list(reads.values()), axes)
        values |= {key: Stack(x, axes) for key, x in zip(wanted, results, strict=True)}

    def _for_each_cell(self, cell, stacks: Sequence[Stack], axes) -> list[Array]:
        """Returns the results of the function `cell` for all cells (logical devices) of this
        device. The cells run one after another: there is one `lax.map` for each of `axes`, one
        inside another. `axes` are all axes of the stacks, in the order of `Stack.axes`. So in each
        stack that has the axis `axes[0]`, this axis is the first."""
        if not axes:
            return _apart(cell)(*(stack.array for stack in stacks))
        sliced = {k: stack.array for k, stack in enumerate(stacks) if axes[0] in stack.axes}

        def along_others(slices):
            """Returns the results of the function `cell` for those cells (logical devices) of this
            device that share one index along `axes[0]`. `slices` has the operands at this index.
            """
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
        # A `while` runs only in a walk of a single cell, whose `counts` are empty. A `while` with a
        # collective in it is refused below, since the cells may need different numbers of
        # iterations.
        if not self.cells.counts:
            rules["while"] = self._while
        if name in rules:
            return rules[name](eqn, operands)
        names = tuple(axis for axis in axes_named_by(eqn) if axis in self.cells.counts)
        if name in TREES:
            return [self.cells.tree(TREES[name], names, stack) for stack in operands]
        moves = {"replicated": self.cells.shared, "ppermute": self.cells.ppermute}
        moves |= dict.fromkeys(
            ("all_gather", "all_gather_invariant", "all_gather_reduced"), self.cells.all_gather
        )
        moves |= dict.fromkeys(
            ("reduce_scatter", "unreduced_reduce_scatter"), self.cells.reduce_scatter
        )
        moves["all_to_all"] = self.cells.all_to_all
        if name in moves:
            return [moves[name](names, params, stack) for stack in operands]
        if name == "axis_index":
            return [self.cells.own(names, self.cells.indices(names), ())]
        if axes_named_by(eqn) or needs_other_cells(eqn, self.cells, self.opened):
            raise ValueError(
                f"same_bits.spmd has no rule for `{name}` ({jaxprs.origin(eqn)}). Use psum, "
                "all_gather, psum_scatter, ppermute, all_to_all, scan or cond there."
            )
        # A call that does not communicate; `flat_program` has opened the others.
        if jaxprs.called(eqn) is not None:
            if params.get("prevent_cse") and params.get("differentiated"):
                # In the backward pass of a checkpoint. The barrier keeps XLA from using the values
                # of the forward pass instead.
                operands = lax.optimization_barrier(list(operands))
            return self.run(jaxprs.closed(params)[0], operands)
        return self._local(eqn, operands)

    def _local(self, eqn: JaxprEqn, operands: Sequence[Stack]) -> list[Stack]:
        """Returns the results of an equation that does not communicate and has no program in it."""
        name, params = eqn.primitive.name, eqn.params
        # A sharding in the parameters is that of the mesh of cells.
        no_sharding = {key: None for key in params if key in ("sharding", "out_sharding")}
        params = eqn.primitive.get_bind_params(params | no_sharding)
        arrays = [stack.array for stack in operands]
        if not self.cells.counts and name in jaxprs.CHEAP | jaxprs.DEAR:
            # `CHEAP` and `DEAR` are the elementwise primitives. `once` broadcasts a scalar once for
            # all equations; JAX would broadcast it in each, which gives equal instructions. With
            # several cells, an array would also have the dims of the cells.
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
        axes = [self.cells.ordered(types.axes_of_type(aval)) for aval in avals]

        def carried(stacks):
            """Returns each carry as a `Stack`, with a dim of cells for each axis along which the
            carry varies. The types of the body's arguments give these axes, so a carry has one
            shape in all iterations."""
            return [self.cells.over(*pair) for pair in zip(stacks, axes, strict=True)]

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

        # This walk has a single cell (see `_results`), so no stack has axes, and the result of the
        # test is one boolean.
        def goes_on(carry):
            """Returns whether there is another iteration."""
            return self.in_loop().run(test, [*operands[:first], *carry])[0].array

        def trip(carry):
            """Returns the carries of the next iteration."""
            return self.in_loop().run(body, [*operands[first:split], *carry])

        # `over` adds no axes here; it only makes a JAX array of a constant.
        carry = [self.cells.over(stack, ()) for stack in operands[split:]]
        return lax.while_loop(goes_on, trip, carry)

    def _cond(self, eqn: JaxprEqn, operands: Sequence[Stack]) -> list[Stack]:
        """Returns the results of a conditional.

        If the cells (logical devices) may take different branches, all branches run, and each cell
        keeps the results of its own branch.
        """
        index, *operands = operands
        # What the branches compute differs along the axes of the index too.
        axes = [(*types.axes_of_type(aval), *index.axes) for aval in jaxprs.types(eqn.outvars)]

        def branch(body):
            """Returns the results of one branch. `axes[k]` has the axes that result k must have.
            `over` adds a dim, with copies, for each axis that result k lacks. So all branches
            return equal shapes."""
            results = self.in_loop().run(body, operands)
            return [self.cells.over(*pair) for pair in zip(results, axes, strict=True)]

        branches = [functools.partial(branch, body) for body in eqn.params["branches"]]
        if not index.axes:
            return lax.switch(index.array, branches)
        chosen, *others = [branch() for branch in branches]
        for k, options in enumerate(others, 1):
            chosen = [self._chosen(index, k, *pair) for pair in zip(options, chosen, strict=True)]
        return chosen

    def _chosen(self, index: Stack, k: int, option: Stack, other: Stack) -> Stack:
        """Returns `option` for the cells (logical devices) whose `index` is `k`, and `other` for
        the other cells. `option` and `other` have the same axes, among them those of `index`."""
        # `over` gives `index` a dim for each axis of `option`; then come dims of size 1.
        here = self.cells.over(index, option.axes).array == k
        here = here.reshape(*here.shape, *[1] * (option.array.ndim - here.ndim))
        return Stack(jnp.where(here, option.array, other.array), option.axes)
