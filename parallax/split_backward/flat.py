"""A traced program without calls: the equations inside `jit` and `checkpoint` are inlined.

Loops and conditionals are not inlined: their equations still contain programs. The body of each
`lax.scan` is flat too.

A call is an equation that only runs one program, once, such as `jit`. A jaxpr is a list of
equations. Words of this file: a place is the index of an equation in a jaxpr; a trip is one
iteration of a loop; an atom is a variable or a literal. `values` maps each variable to its value.

Three functions come from `parallax.jaxprs`. `opened(program)` is the jaxpr of `program`; `program`
may be a closed jaxpr or a plain one. `closed(params)` are the programs among an equation's
parameters. `called(eqn)` is the only program among the equation's parameters, if that program takes
and returns as many values as the equation does; otherwise None.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxpr_as_fun

from parallax.collectives.types import varying_axes
from parallax.jaxprs import (
    called,
    closed,
    every,
    has_effects,
    inner,
    is_literal,
    opened,
    scan_parts,
    types,
)

CALLS = frozenset(
    {
        "jit",
        "pjit",
        "closed_call",
        "core_call",
        "remat2",
        "checkpoint",
        "custom_jvp_call",
        "custom_vjp_call",
    }
)

Values = dict[Any, Any]  # the value of each variable of a jaxpr


class Flat(NamedTuple):
    """A flat program.

    Attributes:
        jaxpr: the program, without calls.
        constants: the values of the jaxpr's constant variables.
        loops: the scans of the program, each by the index of its equation in the jaxpr.
    """

    jaxpr: Jaxpr
    constants: Values
    loops: dict[int, "Loop"]


class Loop(NamedTuple):
    """The parts of a scan.

    Attributes:
        consts: the number of operands that are the same in each iteration; these operands come
            first.
        carries: the number of carries. The operands after the consts are the initial values of the
            carries, and the first results are their last values. All other operands are sliced, one
            slice per iteration, and all other results are stacked by iteration.
        body: the program of one iteration, whose arguments are the consts, the carries and the
            slices.
    """

    consts: int
    carries: int
    body: Flat

    def inits(self) -> range:
        """Returns the indices of the carries' initial values among the operands."""
        return range(self.consts, self.consts + self.carries)


def flat(program: ClosedJaxpr | Jaxpr) -> Flat:
    """Returns the program as a `Flat`: its calls are inlined, and the bodies of its scans are flat
    too."""
    # In this trace, `_results` runs the equations of each call one by one in place of the call.
    traced = jax.make_jaxpr(lambda *arguments: _results(program, arguments))(
        *types(opened(program).invars)
    )
    jaxpr = opened(traced)
    scans = {place: eqn for place, eqn in enumerate(jaxpr.eqns) if eqn.primitive.name == "scan"}
    # `scan_parts` gives the numbers of consts and of carries, the first two fields of a `Loop`.
    loops = {place: Loop(*scan_parts(eqn), flat(_program_of(eqn))) for place, eqn in scans.items()}
    return Flat(jaxpr, dict(zip(jaxpr.constvars, traced.consts, strict=True)), loops)


def _results(program: ClosedJaxpr | Jaxpr, arguments: Sequence[Any]) -> list[Any]:
    """Runs a program and returns its results; each call is replaced by the equations of its
    program. `flat` traces this function."""
    jaxpr = opened(program)
    # A `Jaxpr` that is not closed has no constants.
    values = dict(zip(jaxpr.constvars, getattr(program, "consts", ()), strict=True))
    values.update(zip(jaxpr.invars, arguments, strict=True))
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in CALLS and called(eqn) is not None:
            operands = read(eqn.invars, values)
            if eqn.params.get("differentiated") and eqn.params.get("prevent_cse"):
                # This call is the backward pass of a `checkpoint`. JAX puts a barrier before such a
                # call when it compiles it. Inlined code needs its own barrier: without it, XLA
                # would keep the values of the forward pass in memory, and recompute nothing.
                operands = barrier(operands)
            results = _results(_program_of(eqn), operands)
        else:
            results = apply(jaxpr, eqn, values)
        values.update(zip(eqn.outvars, results, strict=True))
    return read(jaxpr.outvars, values)


def read(atoms: Sequence[Any], values: Values) -> list[Any]:
    """Returns the values of these variables and literals, all as JAX arrays. A literal may be given
    as a Python number, and a constant of a traced function as a NumPy array."""

    def value_of(atom):
        """Returns the value of one variable or literal as a JAX array."""
        if is_literal(atom):
            return jnp.asarray(atom.val, atom.aval.dtype)
        value = values[atom]
        return jnp.asarray(value) if isinstance(value, np.ndarray) else value

    return [value_of(atom) for atom in atoms]


def apply(jaxpr: Jaxpr, eqn: JaxprEqn, values: Values) -> list[Any]:
    """Returns the results of `eqn`, an equation of `jaxpr`. `values` has the value of each variable
    that `eqn` reads.

    The equation runs as a jaxpr of its own, so that it keeps its source line and its name scope.
    """
    # The arguments of a jaxpr must differ, but the equation may read a variable twice.
    variables = list(dict.fromkeys(variables_of(eqn.invars)))
    alone = jaxpr.replace(
        constvars=[], invars=variables, outvars=list(eqn.outvars), eqns=[eqn], effects=eqn.effects
    )
    return jaxpr_as_fun(ClosedJaxpr(alone, ()))(*read(variables, values))


def variables_of(atoms: Sequence[Any]) -> list[Any]:
    """Returns the variables among these operands, without the literals."""
    return [atom for atom in atoms if not is_literal(atom)]


def barrier(values: Sequence[Any]) -> list[Any]:
    """Returns the same values behind a barrier: XLA does not fuse or merge operations before the
    barrier with operations after it."""
    results = list(values)
    # JAX types all results of a barrier as varying over the same axes. So there is one barrier for
    # each set of axes.
    for axes in dict.fromkeys(map(varying_axes, values)):
        indices = [i for i, value in enumerate(values) if varying_axes(value) == axes]
        for i, value in zip(
            indices, lax.optimization_barrier([values[i] for i in indices]), strict=True
        ):
            results[i] = value
    return results


def live(program: Flat, outputs: Collection[int]) -> tuple[dict[int, frozenset[int]], set[Any]]:
    """Finds the part of a program that some of its results need, as dead-code elimination does.

    Args:
        program: the program.
        outputs: the indices of the results that are needed.

    Returns:
        A pair: a dict from the index of each needed equation in the jaxpr to the indices of its
        needed results, and the set of all needed variables. An equation with side effects is always
        needed. A carry of a scan is needed if a needed result depends on the carry in some
        iteration.
    """
    jaxpr = program.jaxpr
    needed = set(variables_of([jaxpr.outvars[i] for i in outputs]))
    needed_results: dict[int, frozenset[int]] = {}
    for place, eqn in reversed(list(enumerate(jaxpr.eqns))):
        results = frozenset(i for i, variable in enumerate(eqn.outvars) if variable in needed)
        if results or has_effects(eqn):
            needed_results[place], operands = _reach(program, place, results)
            needed |= set(variables_of([eqn.invars[i] for i in operands]))
    return dict(sorted(needed_results.items())), needed


def _reach(program: Flat, place: int, results: frozenset[int]) -> tuple[frozenset[int], set[int]]:
    """Returns the indices of the results that the equation at `place` must compute, and the indices
    of the operands that it needs for them. `results` are the indices of the wanted results. Only a
    scan must compute more results than the wanted ones: the carries on which the wanted results
    depend."""
    eqn, loop = program.jaxpr.eqns[place], program.loops.get(place)
    if is_barrier(eqn):  # each result i is operand i, and needs no other operand
        return results, set(results)
    if loop is None:
        return results, set(range(len(eqn.invars)))
    # If a trip reads a carry, the trip before must compute that carry, and may read more carries
    # for it. So carries are added to `results` until no more are found. Carry i is operand
    # consts + i of the scan, the same argument of the body, and result i of both.
    while True:
        # `needed` are the variables of the body that the results depend on within one trip.
        _, needed = live(loop.body, results)
        operands = {i for i, variable in enumerate(loop.body.jaxpr.invars) if variable in needed}
        with_carries = results | {i - loop.consts for i in operands if i in loop.inits()}
        if with_carries == results:
            # A carry that is computed has an initial value, even if no trip reads it.
            return results, operands | {i + loop.consts for i in results if i < loop.carries}
        results = with_carries


def is_barrier(eqn: JaxprEqn) -> bool:
    """Returns whether an equation is an `optimization_barrier`."""
    return eqn.primitive.name == "optimization_barrier"


def size(variables: Collection[Any]) -> int:
    """Returns the number of bytes of the values of these variables."""
    return sum(variable.aval.size * variable.aval.dtype.itemsize for variable in variables)


def primitives(eqn: JaxprEqn) -> Iterator[str]:
    """Yields the name of an equation's primitive, and the names of all primitives in the programs
    that the equation contains."""
    yield eqn.primitive.name
    for jaxpr in inner(eqn):
        for inner_eqn in every(jaxpr):
            yield inner_eqn.primitive.name


def _program_of(eqn: JaxprEqn) -> ClosedJaxpr | Jaxpr:
    """Returns the only program among an equation's parameters, closed over its constants if the
    program has some."""
    (program,) = closed(eqn.params)
    return program
