"""Reading traced programs: the jaxprs inside an equation, the parts of a loop, and what is known of
values on the way through."""

import functools
import operator
import os
import re
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from parallax.collectives import types as collective_types

_BELOW = (os.path.dirname(str(jax.__file__)) + os.sep, sysconfig.get_path("stdlib") + os.sep)

# Primitives that compute each element of their result from the same element of their operands
# fmt: off
CHEAP = frozenset(  # so cheap that a compiler computes them again for each reader
    {
        "abs", "add", "add_any", "and", "bitcast_convert_type", "ceil", "clamp", "clz",
        "complex", "conj", "convert_element_type", "eq", "eq_to", "floor", "ge", "gt", "imag",
        "integer_pow", "is_finite", "le", "le_to", "lt", "lt_to", "max", "min", "mul",
        "mul_add", "ne", "neg", "not", "or", "population_count", "real", "round", "select_n",
        "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "square",
        "sub", "xor",
    }
)
DEAR = frozenset(  # computed once where several read them
    {
        "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "bessel_i0e",
        "bessel_i1e", "cbrt", "cos", "cosh", "digamma", "div", "erf", "erf_inv", "erfc",
        "exp", "exp2", "expm1", "lgamma", "log", "log1p", "logistic", "nextafter",
        "polygamma", "pow", "rem", "rsqrt", "sin", "sinh", "sqrt", "tan", "tanh",
    }
)
UNCHANGED = frozenset(  # the same numbers, perhaps of another type
    {
        "copy", "copy_p", "optimization_barrier", "pbroadcast", "pcast", "pvary",
        "reduce_precision", "reshard",
    }
)
# fmt: on
ELEMENTWISE = CHEAP | DEAR | UNCHANGED
LAID_OUT = frozenset(
    {"broadcast_in_dim", "reshape", "squeeze", "expand_dims"}
)  # of equal numbers: equal numbers

COUNTED = re.compile(
    r"/(\w+)\.(\d+)_of_(\d+)/while\""
)  # how a compiled program names a loop in a `counted_scope`


def opened(jaxpr: Any) -> Jaxpr:
    """Returns a jaxpr without its constants' values; JAX 0.12 knows one kind only."""
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr


def inner(eqn: JaxprEqn) -> list[Jaxpr]:
    """Returns all jaxprs among an equation's parameters."""
    return [opened(jaxpr) for jaxpr in closed(eqn.params)]


def closed(params: Mapping[str, Any]) -> list[Jaxpr | ClosedJaxpr]:
    """Returns all jaxprs among these parameters, in the order of `inner`, with their constants."""
    values = [
        item
        for value in params.values()
        for item in (value if isinstance(value, tuple) else (value,))
    ]
    return [value for value in values if isinstance(value, Jaxpr | ClosedJaxpr)]


def called(eqn: JaxprEqn) -> Jaxpr | None:
    """Returns the one jaxpr that takes an equation's operands and gives its results, as `jit`'s or
    `checkpoint`'s; else None."""
    bodies = inner(eqn)
    fits = (
        len(bodies) == 1
        and len(bodies[0].invars) == len(eqn.invars)
        and len(bodies[0].outvars) == len(eqn.outvars)
    )
    return bodies[0] if fits else None


def has_effects(eqn: JaxprEqn) -> bool:
    """Returns whether an equation does more than compute its results. To name a mesh axis, as JAX's
    sums do, is nothing more."""
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects)


def every(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """Returns each equation of a jaxpr and of those inside."""
    for eqn in jaxpr.eqns:
        yield eqn
        for body in inner(eqn):
            yield from every(body)


COLLECTIVES = frozenset(
    {
        "linear_collective",
        "ppermute",
        "all_to_all",
        "ragged_all_to_all",
        "psum",
        "psum_invariant",
        "pmax",
        "pmin",
    }
    | {"reduce_scatter", "all_gather", "all_gather_invariant", "all_gather_reduced"}
)


def sent_over(eqn: JaxprEqn) -> frozenset[str]:
    """Returns the axes of the collectives that an equation is, or has inside. One of this library
    is opened, inside its map."""
    bodies = (
        [collective_types.linear_jaxpr(eqn, None, check_vma=True)]
        if eqn.primitive is collective_types.linear_p
        else inner(eqn)
    )
    if not bodies and eqn.primitive.name in COLLECTIVES:
        names = eqn.params.get("axes", eqn.params.get("axis_name", ()))
        return frozenset(names if isinstance(names, tuple | list) else (names,))
    return frozenset().union(*(sent_over(inside) for body in bodies for inside in body.eqns))


class Reach(NamedTuple):
    """Which of a program's arguments a value depends on, one bit for each.

    Attributes:
        at_all: in any way.
        alone: in a way without a collective.
        met: in such a way, on which it met data, as a weight in a product.
    """

    at_all: int = 0
    alone: int = 0
    met: int = 0

    def __or__(self, second: tuple[int, ...]) -> "Reach":
        """Returns the arguments that one of two values depends on."""
        return Reach(*map(operator.or_, self, second))


class Uses(NamedTuple):
    """How a result depends on each argument of a program.

    Attributes:
        reached: whether it does.
        unsent: whether it meets data on a way to the result that has no collective, so that no
            other device's part joins it.
    """

    reached: list[bool]
    unsent: list[bool]


def uses(closed: ClosedJaxpr | Jaxpr, axis: str, *, data: Sequence[bool]) -> list[Uses]:
    """Returns for each result of a program how its arguments were used on the way; `data` says
    which arguments meet the others.

    Collectives are those along `axis`. Scalars that are added or multiplied meet nothing, so a
    penalty on weights is no use of them. An argument that goes into a `ppermute` counts as sent on
    all ways: a ring written by hand leaves a device's own block in its place.
    """
    count = len(opened(closed).invars)
    of_data = sum(1 << i for i, is_data in enumerate(data) if is_data)
    ways = _Ways(axis, of_data, of_constants=1 << count)
    reaches = ways.run(closed, [Reach(1 << i, 1 << i) for i in range(count)])

    def bits(mask):
        return [bool(mask >> i & 1) for i in range(count)]

    return [Uses(bits(reach.at_all), bits(reach.met & ~ways.passed_on)) for reach in reaches]


class Following:
    """Follows what is known of values through a program; what is known of two values is joined by
    `|`.

    Attributes:
        unknown: what is known of any value.
    """

    unknown: Any

    def constant(self, aval: Any, value: Any) -> Any:
        """Returns the facts about a number in the program, of the type `aval`; `value` is None
        where the program has its type alone."""
        return self.unknown

    def plain(self, eqn: JaxprEqn, operands: list[Any], aval: Any) -> Any:
        """Returns the facts about a result of the type `aval`, of an equation that calls no
        function which takes its operands."""
        raise NotImplementedError

    def met(self, operands: Sequence[Any]) -> Any:
        """Returns the facts about a value that was made, or chosen, by all of these."""
        return functools.reduce(operator.or_, operands, self.unknown)

    def run(self, program: Jaxpr | ClosedJaxpr, arguments: Sequence[Any]) -> list[Any]:
        """Returns the facts about a program's results."""
        jaxpr = opened(program)
        # An inner program that was opened has lost its constants' values; their types are left.
        numbers = getattr(program, "consts", ()) or [None] * len(jaxpr.constvars)
        constants = map(self.constant, types(jaxpr.constvars), numbers)
        known = dict(zip(jaxpr.constvars, constants, strict=True))
        known |= zip(jaxpr.invars, arguments, strict=True)

        def read(atom):
            return self.constant(atom.aval, atom.val) if is_literal(atom) else known[atom]

        for eqn in jaxpr.eqns:
            known |= zip(eqn.outvars, self.results(eqn, list(map(read, eqn.invars))), strict=True)
        return list(map(read, jaxpr.outvars))

    def results(self, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        """Returns the facts about an equation's results."""
        name = eqn.primitive.name
        if name == "cond":
            return self.branches(eqn, operands)
        if name == "scan":
            first, carries = scan_parts(eqn)
            return self.loop(
                inner(eqn)[0],
                operands[:first],
                operands[first:][:carries],
                operands[first + carries :],
            )
        if name == "while":
            skipped, constants = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
            of_body = operands[skipped:]
            return self.loop(
                opened(eqn.params["body_jaxpr"]), of_body[:constants], of_body[constants:], []
            )
        if called(eqn) is not None:
            return self.run(closed(eqn.params)[0], operands)
        # A collective of several arrays computes each result from one of them.
        side_by_side = name in COLLECTIVES or name == "optimization_barrier"
        if side_by_side and len(operands) == len(eqn.outvars):
            return [
                self.plain(eqn, [operand], var.aval)
                for operand, var in zip(operands, eqn.outvars, strict=True)
            ]
        return [self.plain(eqn, operands, var.aval) for var in eqn.outvars]

    def branches(self, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        """Returns the facts about a conditional's results, of which each is that of one of its
        branches."""
        every_branch = [self.run(branch, operands[1:]) for branch in eqn.params["branches"]]
        return [
            self.met([operands[0], functools.reduce(operator.or_, values)])
            for values in zip(*every_branch, strict=True)
        ]

    def loop(
        self, body: Jaxpr, constants: list[Any], carry: list[Any], sliced: list[Any]
    ) -> list[Any]:
        """Returns the facts about a loop's results, once its carries have settled."""
        # Each round adds something to what is known of a carry, and there are finitely many leaves
        # to add.
        while True:
            carried, stacked = _cut(self.run(body, [*constants, *carry, *sliced]), len(carry))
            joined = list(map(operator.or_, carry, carried))
            if joined == carry:
                return [*carry, *stacked]
            carry = joined


class FollowingAlong(Following):
    """A `Following` of a program whose devices differ along an axis.

    Attributes:
        axis: the axis.
    """

    def __init__(self, axis: str):
        self.axis = axis
        # By an equation's id, since a loop's body is read several times.
        self._sent: dict[int, tuple[JaxprEqn, frozenset[str]]] = {}

    def is_sent(self, eqn: JaxprEqn) -> bool:
        """Returns whether an equation has a collective over the axis; what it calls is opened
        once."""
        if id(eqn) not in self._sent:
            self._sent[id(eqn)] = eqn, sent_over(eqn)
        return self.axis in self._sent[id(eqn)][1]


class _Ways(FollowingAlong):
    """Follows arguments through a program; `passed_on` are those that go into a `ppermute`."""

    unknown = Reach()

    def __init__(self, axis: str, data: int, of_constants: int):
        super().__init__(axis)
        self.data, self.of_constants = data | of_constants, Reach(of_constants)
        self.passed_on = 0

    def constant(self, aval: Any, value: Any) -> Reach:
        return self.of_constants if self.axis in collective_types.axes_of_type(aval) else Reach()

    def plain(self, eqn: JaxprEqn, operands: list[Reach], aval: Any) -> Reach:
        name, differs = eqn.primitive.name, self.axis in collective_types.axes_of_type(aval)
        joined = functools.reduce(operator.or_, operands, Reach())
        # What goes through a collective has met other devices' parts: it is no use of a share
        # alone.
        if joined.alone and self.is_sent(eqn):
            if name == "ppermute":
                self.passed_on |= joined.alone
            joined = Reach(joined.at_all)
        elif any(aval.shape for aval in types(eqn.invars)):
            joined = self.met(operands)
        # What is the same on all devices holds no device's own share, such as the condition by
        # which `cpu.sequence_after` waits.
        return joined if differs else Reach(joined.at_all)

    def met(self, operands: Sequence[Reach]) -> Reach:
        """Returns the fact about a result of these operands, each of which meets the data of the
        others."""
        joined = functools.reduce(operator.or_, operands)
        for i, operand in enumerate(operands):
            if any(reach.at_all & self.data for reach in (*operands[:i], *operands[i + 1 :])):
                joined |= Reach(met=operand.alone)
        return joined


def _cut(values: list[Any], count: int) -> tuple[list[Any], list[Any]]:
    return values[:count], values[count:]


def scan_parts(eqn: JaxprEqn) -> tuple[int, int]:
    """Returns how many of a scan's operands are constants and carries; the rest it slices, one dim
    off each.

    The names of these numbers differ between JAX 0.10 and 0.12; the ranks say it in both.
    """
    body = inner(eqn)[0]

    def count_with_other_rank(outside, inside):
        pairs = zip(types(outside), types(inside), strict=True)
        return sum(a.ndim != b.ndim for a, b in pairs)

    sliced = count_with_other_rank(eqn.invars, body.invars)
    stacked = count_with_other_rank(eqn.outvars, body.outvars)
    carries = len(eqn.outvars) - stacked
    return len(eqn.invars) - sliced - carries, carries


def types(atoms: Sequence[Any]) -> list[Any]:
    """Returns the types of operands or results: each has a `dtype`, a `shape` and a `size`."""
    return [atom.aval for atom in atoms]


def is_literal(atom: Any) -> bool:
    """Returns whether an operand is a number written into the program."""
    return isinstance(atom, Literal)


def frames(eqn: JaxprEqn) -> Sequence[Any]:
    """Returns the calls that made an equation, the innermost first."""
    traceback = eqn.source_info.traceback
    return traceback.frames if traceback else ()


def origin(eqn: JaxprEqn) -> str:
    """Returns the innermost line outside JAX that made an equation, "clipping.py:77"; "" if
    unknown."""
    for frame in frames(eqn):
        name = frame.file_name
        if name.endswith(".py") and not name.startswith(_BELOW):
            return f"{os.path.basename(name)}:{frame.line_num}"
    return ""


def is_float(aval: Any) -> bool:
    """Returns whether an array of this type holds real or complex floating-point numbers."""
    return jnp.issubdtype(aval.dtype, jnp.inexact)


def counted_scope(name: str, *, runs: int, rounds: int) -> str:
    """Returns a name for the `jax.named_scope` of a loop of one trip or of none: so many trips in
    so many rounds of the loop around it.

    A table says in which rounds, so the compiler does not know the number. Readers of the compiled
    program find it in this name.
    """
    return f"{name}.{runs}_of_{rounds}"
