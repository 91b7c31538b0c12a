"""A traced program as a flat list of steps: what `jit` and `checkpoint` hold stands in line with the rest, and each can be run.

Values have numbers. A step's operands are numbers or literals, its results are numbers; a number is made once.
"""

import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxpr_as_fun

from parallax.collectives.types import varying_axes
from parallax.jaxprs import called, inner, is_literal, opened, scan_parts

INLINE = frozenset({"jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call"})

Values = dict[int, Any]


class Step(NamedTuple):
    """One operation.

    Attributes:
        jaxpr: the equation as a program of its own; None for an optimization barrier, which hands on what it reads.
        reads: numbers of values, or literals.
        makes: numbers of values.
    """

    jaxpr: Jaxpr | None
    reads: tuple[Any, ...]
    makes: tuple[int, ...]

    @property
    def eqn(self) -> JaxprEqn:
        """The equation; a barrier has none."""
        assert self.jaxpr is not None
        return self.jaxpr.eqns[0]

    def pairs(self) -> list[tuple[Any, int]]:
        """Of a barrier, the values that it hands on, each with its new number."""
        return [(atom, name) for atom, name in zip(self.reads, self.makes, strict=True) if not is_literal(atom)]

    def only(self, names: Collection[int]) -> "Step":
        """A barrier for these of its results."""
        kept = [(atom, name) for atom, name in zip(self.reads, self.makes, strict=True) if name in names]
        return Step(None, tuple(atom for atom, _ in kept), tuple(name for _, name in kept))

    @property
    def is_scan(self) -> bool:
        """Whether it is a loop that `lax.scan` made."""
        return self.jaxpr is not None and self.eqn.primitive.name == "scan"


class Program(NamedTuple):
    """A flat program.

    Attributes:
        inputs: the numbers of its arguments.
        outputs: numbers of its results, or literals.
        steps: in order.
        constants: values that it was traced with.
        kinds: the type of each value.
    """

    inputs: list[int]
    outputs: list[Any]
    steps: list[Step]
    constants: Values
    kinds: dict[int, Any]


def program(traced: ClosedJaxpr | Jaxpr) -> Program:
    """The program that was traced, flat but for loops and conditionals."""
    count, made = itertools.count(), Program([], [], [], {}, {})

    def named(variable: Any) -> int:
        number = next(count)
        made.kinds[number] = variable.aval
        return number

    def steps_of(traced: ClosedJaxpr | Jaxpr, operands: Sequence[Any]) -> list[Any]:
        jaxpr = opened(traced)
        names = dict(zip(jaxpr.invars, operands, strict=True))
        for variable, value in zip(jaxpr.constvars, getattr(traced, "consts", ()), strict=True):
            names[variable] = named(variable)
            made.constants[names[variable]] = value
        of = lambda atoms: tuple(atom if is_literal(atom) else names[atom] for atom in atoms)
        for eqn in jaxpr.eqns:
            reads = of(eqn.invars)
            if eqn.primitive.name in INLINE and called(eqn) is not None:
                body = _inside(eqn)
                if eqn.params.get("differentiated") and eqn.params.get("prevent_cse"):  # as JAX compiles `checkpoint`
                    passed = tuple(named(atom) for atom in eqn.invars)
                    made.steps.append(Step(None, reads, passed))
                    reads = passed
                results = steps_of(body, reads)
            else:
                results = tuple(named(variable) for variable in eqn.outvars)
                made.steps.append(Step(_alone(jaxpr, eqn), reads, results))
            names.update(zip(eqn.outvars, results, strict=True))
        return list(of(jaxpr.outvars))

    made.inputs.extend(named(variable) for variable in opened(traced).invars)
    made.outputs.extend(steps_of(traced, made.inputs))
    return made


def value(atom: Any, values: Values) -> Any:
    """The value of an operand. A constant of the traced function may be NumPy's."""
    if is_literal(atom):
        return jnp.asarray(atom.val, atom.aval.dtype)
    found = values[atom]
    return jnp.asarray(found) if isinstance(found, np.ndarray) else found


def numbers(atoms: Sequence[Any]) -> list[int]:
    """The operands that are no literals."""
    return [atom for atom in atoms if not is_literal(atom)]


def run(step: Step, values: Values) -> None:
    """Add the step's results to `values`."""
    if step.jaxpr is None:
        results = [value(atom, values) for atom in step.reads]
        for kind in dict.fromkeys(map(varying_axes, results)):  # a barrier makes its results vary alike
            alike = [i for i, each in enumerate(results) if varying_axes(each) == kind]
            for i, held in zip(alike, lax.optimization_barrier([results[i] for i in alike]), strict=True):
                results[i] = held
    else:
        operands = {each: atom for each, atom in zip(step.eqn.invars, step.reads, strict=True) if not is_literal(each)}
        results = jaxpr_as_fun(ClosedJaxpr(step.jaxpr, ()))(*(value(operands[each], values) for each in step.jaxpr.invars))
    values.update(zip(step.makes, results, strict=True))


class Loop(NamedTuple):
    """A scan's parts.

    Attributes:
        consts: how many of its operands are the same in each trip.
        carries: how many of its operands, and of its results, go from trip to trip.
        body: one trip.
    """

    consts: int
    carries: int
    body: Program

    def inits(self) -> range:
        """The places of the carries among the operands."""
        return range(self.consts, self.consts + self.carries)


def loop(step: Step) -> Loop:
    """The parts of a scan."""
    return Loop(*scan_parts(step.eqn), program(_inside(step.eqn)))


def _inside(eqn: JaxprEqn) -> ClosedJaxpr | Jaxpr:
    """The one jaxpr among an equation's parameters, with the constants that it was traced with."""
    (found,) = (each for each in eqn.params.values() if isinstance(each, ClosedJaxpr | Jaxpr))
    return found


def live(of: Program, outputs: Collection[int]) -> tuple[dict[int, frozenset[int]], set[int]]:
    """What these results of a program need: of each step that counts, by its place, which results; and which values.

    Of a scan a carry counts that a result that counts depends on, in some trip.
    """
    needed = set(numbers([of.outputs[i] for i in outputs]))
    steps: dict[int, frozenset[int]] = {}
    for place, step in reversed(list(enumerate(of.steps))):
        found = frozenset(i for i, made in enumerate(step.makes) if made in needed)
        if found or (step.jaxpr is not None and step.eqn.effects):
            steps[place], reads = reach(step, found)
            needed |= set(numbers([step.reads[i] for i in reads]))
    return dict(sorted(steps.items())), needed


def reach(step: Step, results: frozenset[int]) -> tuple[frozenset[int], set[int]]:
    """The results of a step that must be made for these ones, and the places of the operands that they need."""
    if step.jaxpr is None:
        return results, set(results)
    if not step.is_scan:
        return results, set(range(len(step.reads)))
    parts = loop(step)
    while True:
        _, needed = live(parts.body, results)
        reads = {i for i, number in enumerate(parts.body.inputs) if number in needed}
        more = results | {i - parts.consts for i in reads if i in parts.inits()}
        if more == results:
            # A carry that is handed on needs where it began, also where no trip reads it.
            return results, reads | {i + parts.consts for i in results if i < parts.carries}
        results = more


def size(kinds: dict[int, Any], names: Collection[int]) -> int:
    """Bytes of these values."""
    return sum(kinds[name].size * kinds[name].dtype.itemsize for name in names)


def primitives(step: Step) -> Iterator[str]:
    """The names of a step's operations, of all that are inside."""
    if step.jaxpr is not None:
        waiting = [step.jaxpr]
        for jaxpr in waiting:
            for eqn in jaxpr.eqns:
                yield eqn.primitive.name
                waiting += inner(eqn)


def _alone(jaxpr: Jaxpr, eqn: JaxprEqn) -> Jaxpr:
    variables = list(dict.fromkeys(atom for atom in eqn.invars if not is_literal(atom)))
    return jaxpr.replace(constvars=[], invars=variables, outvars=list(eqn.outvars), eqns=[eqn], effects=eqn.effects)
