"""A traced program without calls: the equations of `jit` and `checkpoint` stand in line with the
rest.

Loops and conditionals keep their programs inside. The body of each loop that `lax.scan` made is
flat too.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxpr_as_fun

from parallax.collectives.types import varying_axes
from parallax.jaxprs import called, closed, every, inner, is_literal, opened, scan_parts, types

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

Values = dict[Any, Any]  # by variable


class Flat(NamedTuple):
    """A flat program.

    Attributes:
        jaxpr: its equations.
        constants: the values that it was traced with.
        loops: its scans, by the place of their equations.
    """

    jaxpr: Jaxpr
    constants: Values
    loops: dict[int, "Loop"]


class Loop(NamedTuple):
    """The parts of a scan.

    Attributes:
        consts: how many of its operands are the same in each trip.
        carries: how many of its operands, and of its results, go from trip to trip.
        body: one trip.
    """

    consts: int
    carries: int
    body: Flat

    def inits(self) -> range:
        """Returns the places of the carries among the operands."""
        return range(self.consts, self.consts + self.carries)


def flat(program: ClosedJaxpr | Jaxpr) -> Flat:
    """Returns the program, flat."""
    traced = jax.make_jaxpr(lambda *arguments: _results(program, arguments))(
        *types(opened(program).invars)
    )
    jaxpr = opened(traced)
    scans = {place: eqn for place, eqn in enumerate(jaxpr.eqns) if eqn.primitive.name == "scan"}
    loops = {place: Loop(*scan_parts(eqn), flat(_program_of(eqn))) for place, eqn in scans.items()}
    return Flat(jaxpr, dict(zip(jaxpr.constvars, traced.consts, strict=True)), loops)


def _results(program: ClosedJaxpr | Jaxpr, arguments: Sequence[Any]) -> list[Any]:
    """Returns the program's results; no call is left in the trace."""
    jaxpr = opened(program)
    values = dict(zip(jaxpr.constvars, getattr(program, "consts", ()), strict=True))
    values.update(zip(jaxpr.invars, arguments, strict=True))
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in CALLS and called(eqn) is not None:
            operands = read(eqn.invars, values)
            if eqn.params.get("differentiated") and eqn.params.get("prevent_cse"):
                operands = barrier(operands)  # as JAX compiles `checkpoint`
            results = _results(_program_of(eqn), operands)
        else:
            results = apply(jaxpr, eqn, values)
        values.update(zip(eqn.outvars, results, strict=True))
    return read(jaxpr.outvars, values)


def read(atoms: Sequence[Any], values: Values) -> list[Any]:
    """Returns the values of variables and literals, as JAX's arrays: a constant of the traced
    function may be NumPy's."""

    def value(atom):
        if is_literal(atom):
            return jnp.asarray(atom.val, atom.aval.dtype)
        found = values[atom]
        return jnp.asarray(found) if isinstance(found, np.ndarray) else found

    return [value(atom) for atom in atoms]


def apply(jaxpr: Jaxpr, eqn: JaxprEqn, values: Values) -> list[Any]:
    """Returns the results of one equation of a program, which keeps its line and its scope."""
    variables = list(dict.fromkeys(variables_of(eqn.invars)))
    alone = jaxpr.replace(
        constvars=[], invars=variables, outvars=list(eqn.outvars), eqns=[eqn], effects=eqn.effects
    )
    return jaxpr_as_fun(ClosedJaxpr(alone, ()))(*read(variables, values))


def variables_of(atoms: Sequence[Any]) -> list[Any]:
    """Returns the operands that are no literals."""
    return [atom for atom in atoms if not is_literal(atom)]


def barrier(values: Sequence[Any]) -> list[Any]:
    """Returns the values, which XLA may not join with what computes them. A barrier makes its
    results vary alike: one for each type."""
    results = list(values)
    for kind in dict.fromkeys(map(varying_axes, values)):
        places = [i for i, value in enumerate(values) if varying_axes(value) == kind]
        for place, value in zip(
            places, lax.optimization_barrier([values[i] for i in places]), strict=True
        ):
            results[place] = value
    return results


def live(program: Flat, outputs: Collection[int]) -> tuple[dict[int, frozenset[int]], set[Any]]:
    """Returns the operands that these results of a program need.

    Returns:
        Of each equation that counts, by its place, the results that count; and all variables that
        count. Of a scan a carry counts if a result that counts depends on it in some trip.
    """
    jaxpr = program.jaxpr
    needed = set(variables_of([jaxpr.outvars[i] for i in outputs]))
    counting: dict[int, frozenset[int]] = {}
    for place, eqn in reversed(list(enumerate(jaxpr.eqns))):
        results = frozenset(i for i, variable in enumerate(eqn.outvars) if variable in needed)
        if results or eqn.effects:
            counting[place], operands = _reach(program, place, results)
            needed |= set(variables_of([eqn.invars[i] for i in operands]))
    return dict(sorted(counting.items())), needed


def _reach(program: Flat, place: int, results: frozenset[int]) -> tuple[frozenset[int], set[int]]:
    """Returns the results of an equation that must be made for these ones, and the places of the
    operands that they need."""
    eqn, loop = program.jaxpr.eqns[place], program.loops.get(place)
    if is_barrier(eqn):
        return results, set(results)
    if loop is None:
        return results, set(range(len(eqn.invars)))
    while True:
        _, needed = live(loop.body, results)
        operands = {i for i, variable in enumerate(loop.body.jaxpr.invars) if variable in needed}
        with_carries = results | {i - loop.consts for i in operands if i in loop.inits()}
        if with_carries == results:
            # A carry that is passed on needs its initial value, even where no trip reads it.
            return results, operands | {i + loop.consts for i in results if i < loop.carries}
        results = with_carries


def is_barrier(eqn: JaxprEqn) -> bool:
    """Returns whether an equation passes its operands on as they are, each as one result."""
    return eqn.primitive.name == "optimization_barrier"


def size(variables: Collection[Any]) -> int:
    """Returns the bytes of these values."""
    return sum(variable.aval.size * variable.aval.dtype.itemsize for variable in variables)


def primitives(eqn: JaxprEqn) -> Iterator[str]:
    """Returns the names of an equation's operations, of all that are inside."""
    yield eqn.primitive.name
    for jaxpr in inner(eqn):
        for each in every(jaxpr):
            yield each.primitive.name


def _program_of(eqn: JaxprEqn) -> ClosedJaxpr | Jaxpr:
    """Returns the one program among an equation's parameters, with the constants that it was traced
    with."""
    (program,) = closed(eqn.params)
    return program
