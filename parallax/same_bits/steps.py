"""The program of one cell (a logical device), as a list of steps: one for each equation.

A *key* is a number that identifies one value of the program. A *segment* is a group of steps that
do not communicate, and that are compiled apart from the rest of the program.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from parallax import jaxprs
from parallax.collectives import types
from parallax.same_bits.stacks import Cells, Stack
from parallax.trees import AnyMesh

# Equations that change only what the type of a value says about mesh axes
CASTS = {"pvary", "pcast", "terms", "vary_unreduced_cast"}
LOOPS = {"scan", "while", "cond"}

# From the `id` of each collective of this library to the collective's equation and its program
Opened = dict[int, tuple[JaxprEqn, Jaxpr]]


class StepOfCell(NamedTuple):
    """One equation of the program of a cell (a logical device).

    Attributes:
        eqn: the equation.
        alone: whether the equation runs by itself, outside of the segments (groups of equations
            that are compiled together). An equation runs by itself if it, or an equation inside
            it, needs values of other cells, or the index of its own cell.
        reads: the keys of its operands. A key is a number that identifies a value of the program.
        writes: the keys of its results.
    """

    eqn: JaxprEqn
    alone: bool
    reads: tuple[int, ...]
    writes: tuple[int, ...]


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


def flat_program(program: Jaxpr | ClosedJaxpr, cells: Cells, opened: Opened) -> Flat:
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
            # An equation that needs other cells runs by itself, outside of the segments.
            reads, alone = tuple(map(key, eqn.invars)), needs_other_cells(eqn, cells, opened)
            # XLA aborts the process if it compiles a `pure_callback` in the function of a cell.
            if jaxprs.has_effects(eqn) or eqn.primitive.name == "pure_callback":
                raise ValueError(
                    f"same_bits.spmd cannot run `{eqn.primitive.name}` ({jaxprs.origin(eqn)}), "
                    "which prints, calls Python or has another effect. Take it out of the step."
                )
            if eqn.primitive is types.linear_p:
                writes = add(opened[id(eqn)][1], reads)
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
    return Flat(needed_steps(steps, outputs), constants, inputs, outputs)


def needed_steps(steps: Sequence[StepOfCell], results: Sequence[int]) -> list[StepOfCell]:
    """Returns the steps on which a result depends."""
    wanted, needed = set(results), []
    for step in reversed(steps):
        if not wanted.isdisjoint(step.writes):
            wanted |= {*step.reads}
            needed.append(step)
    return needed[::-1]


def free_steps(flat: Flat) -> tuple[list[StepOfCell], list[StepOfCell]]:
    """Returns the *free* steps, and the others. A free step depends only on constants of the
    program, and is not `alone`: it needs neither other cells nor the index of its own cell.

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


def axes_named_by(eqn: JaxprEqn) -> tuple[str, ...]:
    """Returns the axes of the mesh that an equation names."""
    names = eqn.params.get("axis_name", eqn.params.get("axes", ()))
    names = (names,) if isinstance(names, str) else tuple(names)
    return tuple(name for name in names if isinstance(name, str))


def needs_other_cells(eqn: JaxprEqn, cells: Cells, opened: Opened) -> bool:
    """Returns whether an equation, or an equation inside it, needs values of other cells (logical
    devices), or the index of its own cell. `opened` has the programs of this library's
    collectives."""
    if eqn.primitive.name not in CASTS and not cells.counts.keys().isdisjoint(axes_named_by(eqn)):
        return True
    linear = eqn.primitive is types.linear_p
    bodies = [opened[id(eqn)][1]] if linear else jaxprs.inner(eqn)
    equations = itertools.chain(*(body.eqns for body in bodies))
    return any(needs_other_cells(inner, cells, opened) for inner in equations)


def opened_collectives(jaxpr: Jaxpr, mesh: AnyMesh) -> Opened:
    """Returns a dict of this library's collectives in a jaxpr. A collective is one equation of the
    jaxpr. The key is the `id` of the equation. The value is the equation and the jaxpr that the
    collective runs.

    The dict keeps the equation, so that no other object gets its `id`.
    """
    found = {}
    for eqn in jaxprs.every(jaxpr):
        if eqn.primitive is types.linear_p:
            program = types.linear_jaxpr(eqn, mesh, check_vma=True)
            found |= {id(eqn): (eqn, program)} | opened_collectives(program, mesh)
    return found
