"""Reads traced programs (jaxprs), and follows facts about values from equation to equation.

An atom is an operand of an equation: a variable or a literal. The `aval` of an atom is its type. An
array differs along a mesh axis if the array's type says that it varies over the devices of that
axis. `inner(eqn)` are the jaxprs that the equation `eqn` holds, such as the body of a loop.

A fact about a value may have any Python type. `Following` computes the facts about an equation's
results from the facts about its operands. If a value may be either of two values, as the result of
a `cond` may, the facts about it are `first | second`, where `first` and `second` are the facts
about the two values and `|` joins them. The method `Following.met` combines the facts about several
operands into the facts about a value that is computed from all of them; by default it joins them by
`|` too.

One kind of fact is a `Reach`: the arguments of the program that a value depends on. A `Reach` is
five masks with a bit for each argument. The mask `at_all` has all arguments on which the value
depends. The mask `alone` has those on which the value depends through a chain of operations without
a collective. The mask `met` has those arguments of `alone` that such a chain combines with data
(the batch), as a matmul combines a weight with activations. The mask `sent` has the arguments that
a collective has sent on the way to the value. The mask `multiplied` has the arguments that a matmul
multiplied with this device's own data, before a collective sent the argument or the data.
"""

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

# JAX's folder, and that of Python's library, where installed packages lie too: `origin` skips them
_BELOW = (os.path.dirname(str(jax.__file__)) + os.sep, sysconfig.get_path("stdlib") + os.sep)

# Primitives that compute each element of their result from the same element of their operands
# fmt: off
CHEAP = frozenset(  # so cheap that a compiler computes them again for each use
    {
        "abs", "add", "add_any", "and", "bitcast_convert_type", "ceil", "clamp", "clz",
        "complex", "conj", "convert_element_type", "eq", "eq_to", "floor", "ge", "gt", "imag",
        "integer_pow", "is_finite", "le", "le_to", "lt", "lt_to", "max", "min", "mul",
        "mul_add", "mulhi", "ne", "neg", "not", "one_minus_square", "or", "population_count",
        "real", "round", "select_n", "shift_left", "shift_right_arithmetic",
        "shift_right_logical", "sign", "square", "sub", "xor",
    }
)
DEAR = frozenset(  # computed once, even for several uses
    {
        "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "bessel_i0e",
        "bessel_i1e", "cbrt", "cos", "cosh", "digamma", "div", "erf", "erf_inv", "erfc",
        "exp", "exp2", "expm1", "lgamma", "log", "log1p", "log2", "logistic", "nextafter",
        "polygamma", "pow", "rem", "rsqrt", "sin", "sinh", "sqrt", "tan", "tanh",
    }
)
UNCHANGED = frozenset(  # the result has the same numbers, perhaps in another dtype
    {
        "copy", "copy_p", "name", "optimization_barrier", "pcast", "preduced", "pvary",
        "reduce_precision", "reshard", "vary_unreduced_cast", "vary_unreduced_cast_p",
    }
)
# fmt: on
ELEMENTWISE = CHEAP | DEAR | UNCHANGED
# Primitives that only move numbers: if all numbers of the operand are equal, all numbers of the
# result are equal too.
LAID_OUT = frozenset({"broadcast_in_dim", "reshape", "squeeze", "expand_dims"})

# The name of a loop in a `counted_scope`, in a compiled program
COUNTED = re.compile(r"/(\w+)\.(\d+)_of_(\d+)/while\"")


def opened(jaxpr: Any) -> Jaxpr:
    """Returns the jaxpr inside a closed jaxpr, without the values of its constants; returns any
    other jaxpr unchanged.

    JAX 0.12 has only one class of jaxprs, whose attribute `jaxpr` is the jaxpr itself. With JAX
    0.12 the jaxpr is returned with its constants.
    """
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr


def inner(eqn: JaxprEqn) -> list[Jaxpr]:
    """Returns all jaxprs among an equation's parameters."""
    return [opened(jaxpr) for jaxpr in closed(eqn.params)]


def closed(params: Mapping[str, Any]) -> list[Jaxpr | ClosedJaxpr]:
    """Returns all jaxprs among the parameters of an equation, unchanged, so a `ClosedJaxpr` keeps
    the values of its constants.

    The jaxprs are in the order in which `inner` returns them.
    """
    values = [  # a parameter may be a tuple of jaxprs, as the branches of a `cond` are
        item
        for value in params.values()
        for item in (value if isinstance(value, tuple) else (value,))
    ]
    return [value for value in values if isinstance(value, Jaxpr | ClosedJaxpr)]


def called(eqn: JaxprEqn) -> Jaxpr | None:
    """Returns the jaxpr that an equation calls, as the equations of `jit` and `checkpoint` do; None
    if it calls none.

    The jaxpr is the equation's only one, and has as many arguments and results as the equation has
    operands and results. Only these counts are compared, not the types, so the body of a `scan` is
    returned too. A caller that does not want the body of a `scan` must check the primitive's name
    first.
    """
    bodies = inner(eqn)
    fits = (
        # These two hold a function of two numbers, with as many arguments and results
        eqn.primitive.name not in ("reduce", "reduce_window")
        and len(bodies) == 1
        and len(bodies[0].invars) == len(eqn.invars)
        and len(bodies[0].outvars) == len(eqn.outvars)
    )
    return bodies[0] if fits else None


def has_effects(eqn: JaxprEqn) -> bool:
    """Returns whether an equation does more than compute its results, such as printing.

    The effect of naming a mesh axis, which JAX's collectives have, does not count.
    """
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects)


def every(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """Yields each equation of a jaxpr and of the jaxprs inside it."""
    for eqn in jaxpr.eqns:
        yield eqn
        for body in inner(eqn):
            yield from every(body)


# The primitives that communicate: `linear_collective` of this library, and JAX's collectives
# fmt: off
COLLECTIVES = frozenset(
    {
        "linear_collective", "ppermute", "all_to_all", "ragged_all_to_all", "psum",
        "psum_invariant", "unreduced_psum", "pmax", "pmin", "unreduced_pmax", "unreduced_pmin",
        "pbroadcast", "pbroadcast_dynamic", "reduce_scatter", "unreduced_reduce_scatter",
        "all_gather", "all_gather_invariant", "all_gather_reduced",
    }
)
# fmt: on


def sent_over(eqn: JaxprEqn) -> frozenset[str]:
    """Returns the axes over which an equation, or an equation inside it, communicates.

    A collective of this library is an equation of the primitive `linear_collective`. Such an
    equation holds Python functions instead of a jaxpr, so these functions are traced here. No mesh
    is passed for this: call `sent_over` while the `shard_map` around the equation is traced, so
    that its axes are known.
    """
    bodies = (
        [collective_types.linear_jaxpr(eqn, None, check_vma=True)]
        if eqn.primitive is collective_types.linear_p
        else inner(eqn)
    )
    if not bodies and eqn.primitive.name in COLLECTIVES:
        # The parameter with the axes is called `axes` or `axis_name`, as JAX's collectives differ.
        names = eqn.params.get("axes", eqn.params.get("axis_name", ()))
        return frozenset(names if isinstance(names, tuple | list) else (names,))
    return frozenset().union(*(sent_over(inside) for body in bodies for inside in body.eqns))


class Reach(NamedTuple):
    """The arguments of a program that a value depends on, as masks with one bit per argument.

    Attributes:
        at_all: all arguments that the value depends on.
        alone: the arguments that the value depends on through a chain of operations without a
            collective. A later collective, such as a sum of partial products over devices, ends
            the chain.
        met: those arguments of `alone` that such a chain combines with data, as a matmul combines a
            weight with activations. Data are values that depend on the batch.
        sent: the arguments that a collective has sent on the way to the value.
        multiplied: the arguments that were multiplied with this device's own data, before a
            collective sent the argument or the data. A later collective does not remove them.
    """

    at_all: int = 0
    alone: int = 0
    met: int = 0
    sent: int = 0
    multiplied: int = 0

    def __or__(self, second: tuple[int, ...]) -> "Reach":
        """Returns the `Reach` with the arguments that are in `self`, in `second` or in both."""
        return Reach(*map(operator.or_, self, second))


class Uses(NamedTuple):
    """The dependence of a result on each argument of a program. Each list has one entry for each
    argument.

    Attributes:
        reached: whether the result depends on the argument.
        unsent: whether the argument is used with data although no collective has sent it. This is
            true in two cases. First, a chain of operations without a collective leads from the
            argument to the result, and an operation of the chain has a second operand that depends
            on the batch. Second, a matmul or a convolution multiplies the argument with this
            device's part of the batch, and no collective has sent the argument or that part before
            (a collective may send the product).
    """

    reached: list[bool]
    unsent: list[bool]


def uses(
    closed: ClosedJaxpr | Jaxpr, axis: str, *, data: Sequence[bool], weights: Sequence[Any] = ()
) -> list[Uses]:
    """Returns one `Uses` for each result of a program. Both lists in a `Uses` have an entry for
    each argument, followed by an entry for each array in `weights`.

    `Uses.unsent` says whether an operation combines an argument with data, and no collective has
    sent the argument before. An operation on scalars alone does not count, so that a penalty on
    weights may be added to a loss. For each argument that goes into a `ppermute`, `unsent` is
    false: in a ring that is written by hand, each device first uses its own block of an argument,
    and then sends the block on.

    Args:
        closed: the program.
        axis: the mesh axis of the collectives that count; collectives along others are ignored.
        data: for each argument, whether it is data (an array of the batch) and not a weight.
        weights: weights that the program may read by closure. Each of these arrays counts as a
            further argument.
    """
    arguments = len(opened(closed).invars)
    count = arguments + len(weights)
    # Bit i of a mask stands for argument i; the weights come after the arguments. The bit after the
    # last weight stands for the other constants that differ between devices. `_Ways` counts these
    # constants as data too: an argument that is combined with them is `met`. `bits` drops the
    # constants' bit from the result.
    of_data = sum(1 << i for i, is_data in enumerate(data) if is_data)
    # An argument depends on itself (`at_all`), without a collective (`alone`): bit i in both masks.
    own = [Reach(1 << i, 1 << i) for i in range(count)]
    of_weights = dict(zip(map(id, weights), own[arguments:], strict=True))
    ways = _Ways(axis, of_data, of_constants=1 << count, of_weights=of_weights)
    # The data that differ between devices are a device's own data.
    for i, aval in enumerate(types(opened(closed).invars)):
        if data[i] and axis in collective_types.axes_of_type(aval):
            ways.own_data |= 1 << i
    # `run` also collects in `passed_on` the arguments that go into a `ppermute`.
    reaches = ways.run(closed, own[:arguments])
    # In a ring written by hand, the data may travel instead: a device uses its own rows first, and
    # passes them on. Such data no longer count as own data, so the program is read again.
    if ways.own_data & ways.passed_on:
        ways.own_data &= ~ways.passed_on
        reaches = ways.run(closed, own[:arguments])

    def bits(mask):
        """Returns a list of bools: bool i says whether the bit of argument i is set in `mask`."""
        return [bool(mask >> i & 1) for i in range(count)]

    return [
        Uses(bits(reach.at_all), bits((reach.met | reach.multiplied) & ~ways.passed_on))
        for reach in reaches
    ]


class Following:
    """Propagates facts about values through a program, from the arguments to the results.

    Subclasses choose the type of a fact, and define the method `plain`, the rule for equations
    without inner programs. If a value may be either of two values, as the result of a `cond` may,
    the facts about the value are `first | second`, joined from the facts about the two values.

    Attributes:
        unknown: the fact about a value of which nothing is known. It adds nothing to another fact
            by `|`: if facts are sets, it is the empty set.
    """

    unknown: Any

    def constant(self, aval: Any, value: Any) -> Any:
        """Returns the facts about a constant of the program: by default `unknown`.

        Subclasses may override this method, and use `aval`, the constant's type, and `value`, the
        constant's value, which is None if only the type is known.
        """
        return self.unknown

    def plain(self, eqn: JaxprEqn, operands: list[Any], aval: Any) -> Any:
        """Returns the facts about one result of an equation without inner programs; `aval` is the
        type of the result.

        `operands` are the facts about the equation's operands.
        """
        raise NotImplementedError

    def met(self, operands: Sequence[Any]) -> Any:
        """Returns the facts about a value that depends on all `operands`: it was computed from
        them, or one of them chose it, as the predicate of a `cond` does."""
        return functools.reduce(operator.or_, operands, self.unknown)

    def run(self, program: Jaxpr | ClosedJaxpr, arguments: Sequence[Any]) -> list[Any]:
        """Returns the facts about a program's results, given the facts about its arguments."""
        jaxpr = opened(program)
        # A jaxpr that is not closed has only the types of its constants, not the values.
        numbers = getattr(program, "consts", ()) or [None] * len(jaxpr.constvars)
        constants = map(self.constant, types(jaxpr.constvars), numbers)
        known = dict(zip(jaxpr.constvars, constants, strict=True))
        known |= zip(jaxpr.invars, arguments, strict=True)

        def read(atom):
            """Returns the facts about an operand."""
            return self.constant(atom.aval, atom.val) if is_literal(atom) else known[atom]

        for eqn in jaxpr.eqns:
            known |= zip(eqn.outvars, self.results(eqn, list(map(read, eqn.invars))), strict=True)
        return list(map(read, jaxpr.outvars))

    def results(self, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        """Returns the facts about an equation's results, given the facts about its operands.
        `branches`, `loop` and `run` follow inner programs; `plain` gives the facts for other
        equations."""
        name = eqn.primitive.name
        if name == "cond":
            return self.branches(eqn, operands)
        if name == "scan":
            # The operands are constants, carries and sliced arrays.
            n_constants, n_carries = scan_parts(eqn)
            return self.loop(
                inner(eqn)[0],
                operands[:n_constants],
                operands[n_constants:][:n_carries],
                operands[n_constants + n_carries :],
            )
        if name == "while":
            # The operands are the constants of the condition, the constants of the body, and the
            # carries.
            n_condition, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
            of_condition, rest = _cut(operands, n_condition)
            of_body, carries_before = _cut(rest, n_body)
            carries = self.loop(opened(eqn.params["body_jaxpr"]), of_body, carries_before, [])
            # The condition decides the number of iterations, so each carry depends on the condition
            # too.
            trips = self.run(opened(eqn.params["cond_jaxpr"]), [*of_condition, *carries])
            return [self.met([*trips, carry]) for carry in carries]
        if called(eqn) is not None:
            return self.run(closed(eqn.params)[0], operands)
        # A collective or a barrier of several arrays computes each result from the operand at the
        # same place.
        is_by_operand = name in COLLECTIVES or name == "optimization_barrier"
        if is_by_operand and len(operands) == len(eqn.outvars):
            return [
                self.plain(eqn, [operand], var.aval)
                for operand, var in zip(operands, eqn.outvars, strict=True)
            ]
        return [self.plain(eqn, operands, var.aval) for var in eqn.outvars]

    def branches(self, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        """Returns the facts about a conditional's results, joined over its branches.

        The first operand chooses the branch, so the results depend on this operand too.
        """
        every_branch = [self.run(branch, operands[1:]) for branch in eqn.params["branches"]]
        # For each result, the facts that the branches give about it.
        return [
            self.met([operands[0], functools.reduce(operator.or_, facts)])
            for facts in zip(*every_branch, strict=True)
        ]

    def loop(
        self, body: Jaxpr, constants: list[Any], carry: list[Any], sliced: list[Any]
    ) -> list[Any]:
        """Returns the facts about a loop's results: first the carries, then the stacked results.

        `constants`, `carry` and `sliced` are the facts about the loop's constants, carries and
        sliced arrays; a slice has the facts of the array from which it is cut.
        """
        # The body is read again until the facts about the carries no longer change. This ends,
        # since each pass adds facts, and there are finitely many facts.
        while True:
            carried, stacked = _cut(self.run(body, [*constants, *carry, *sliced]), len(carry))
            joined = list(map(operator.or_, carry, carried))
            if joined == carry:
                return [*carry, *stacked]
            carry = joined


class FollowingAlong(Following):
    """Propagates facts through a program that runs over a mesh axis, `axis`."""

    def __init__(self, axis: str):
        """Begins with an empty cache of the axes over which equations communicate."""
        self.axis = axis
        # A cache by the equation's id, since a loop's body is read several times.
        self._sent: dict[int, tuple[JaxprEqn, frozenset[str]]] = {}

    def is_sent(self, eqn: JaxprEqn) -> bool:
        """Returns whether an equation, or an equation inside it, communicates over `self.axis`, the
        mesh axis that facts are propagated along."""
        if id(eqn) not in self._sent:
            # The equation is stored too: while it lives, no other equation can have its id.
            self._sent[id(eqn)] = eqn, sent_over(eqn)
        _, sent_axes = self._sent[id(eqn)]
        return self.axis in sent_axes


class _Ways(FollowingAlong):
    """Finds on which arguments of the program each value depends. The fact about a value is its
    `Reach`.

    Attributes:
        data: a mask with the bits of all arguments that are data (arrays of the batch), and with
            the one bit that stands for all constants that differ between devices.
        of_constants: the `Reach` of a constant that differs between devices.
        of_weights: a dict from the id of an array to its `Reach`, for constants that are weights.
        own_data: a mask of the arguments that are data and differ along the axis.
        passed_on: a mask of the arguments that go into a `ppermute`.
    """

    unknown = Reach()

    def __init__(self, axis: str, data: int, of_constants: int, of_weights: dict[int, Reach]):
        """Begins with empty masks `own_data` and `passed_on`: the function `uses` sets `own_data`,
        and the method `plain` adds to `passed_on`. The argument `data` is the mask of the arguments
        that are arrays of the batch. A mask has one bit for each argument and each weight, and a
        last bit for all constants that differ between devices. `of_constants` is the mask with only
        the last bit. These constants count as data too, unless they are weights: `of_weights` is a
        dict from the id of a weight's array to the weight's `Reach`."""
        super().__init__(axis)
        # Such a constant has its bit only in the mask `at_all`: it is data, and no weight.
        self.data, self.of_constants = data | of_constants, Reach(of_constants)
        self.of_weights = of_weights
        self.own_data = self.passed_on = 0

    def constant(self, aval: Any, value: Any) -> Reach:
        """Returns the `Reach` of a constant. A constant that is no weight, and whose type varies
        along the axis, counts as data, like an argument that is a batch."""
        differs = self.axis in collective_types.axes_of_type(aval)
        return self.of_weights.get(id(value), self.of_constants if differs else Reach())

    def plain(self, eqn: JaxprEqn, operands: list[Reach], aval: Any) -> Reach:
        """Returns the `Reach` of an equation's result, given the `Reach` of each operand."""
        name, differs = eqn.primitive.name, self.axis in collective_types.axes_of_type(aval)
        joined = functools.reduce(operator.or_, operands, Reach())  # the arguments of any operand
        # A collective joins the value with the parts of other devices. The collective ends all
        # chains without a collective, so `alone` and `met` become empty. If `alone` is empty, `met`
        # is empty too.
        if joined.alone and self.is_sent(eqn):
            # In a ring written by hand, a device uses its own block and then sends it on.
            if name == "ppermute":
                self.passed_on |= joined.alone
            joined = Reach(joined.at_all, sent=joined.at_all, multiplied=joined.multiplied)
        # An operation on scalars alone, such as the sum of a loss and a penalty, does not count as
        # a use of a weight with data.
        elif any(aval.shape for aval in types(eqn.invars)):
            joined = self.met(operands)
        # `multiplied` gets the arguments in each operand that are multiplied with own data of this
        # device in the other operand, if no collective has sent them or the data.
        if name in ("dot_general", "conv_general_dilated"):
            for weight, activations in (operands, reversed(operands)):
                if activations.at_all & self.own_data & ~activations.sent:
                    joined |= Reach(multiplied=weight.alone & ~weight.sent)
        # A value that is the same on all devices cannot depend on one device's share alone.
        return joined if differs else joined._replace(alone=0, met=0)

    def met(self, operands: Sequence[Reach]) -> Reach:
        """Returns the `Reach` of a result that is computed from all operands. Each mask of the
        result is the union of the operands' masks. The mask `alone` of an operand is also added to
        the result's mask `met` if another operand depends on the batch."""
        joined = functools.reduce(operator.or_, operands)
        for i, operand in enumerate(operands):
            if any(reach.at_all & self.data for reach in (*operands[:i], *operands[i + 1 :])):
                joined |= Reach(met=operand.alone)
        return joined


def _cut(values: list[Any], count: int) -> tuple[list[Any], list[Any]]:
    """Returns the first `count` values, and the remaining ones."""
    return values[:count], values[count:]


def scan_parts(eqn: JaxprEqn) -> tuple[int, int]:
    """Returns the number of constants and the number of carries among a scan's operands.

    The remaining operands are arrays, of which each iteration gets one slice along the first dim.
    JAX 0.10 and 0.12 have different names for these numbers, so this function computes the numbers
    from ranks: a slice has one dim fewer than the array that it is cut from or stacked into.
    """
    body = inner(eqn)[0]

    def count_with_other_rank(outside, inside):
        """Returns how many arrays of the scan have another number of dims in the list `outside`
        (the scan's operands or results) than in `inside` (those of its body)."""
        pairs = zip(types(outside), types(inside), strict=True)
        return sum(a.ndim != b.ndim for a, b in pairs)

    sliced = count_with_other_rank(eqn.invars, body.invars)
    stacked = count_with_other_rank(eqn.outvars, body.outvars)
    # The results are the carries and the stacked arrays.
    carries = len(eqn.outvars) - stacked
    return len(eqn.invars) - sliced - carries, carries


def types(atoms: Sequence[Any]) -> list[Any]:
    """Returns the types of operands or results; a type has a `dtype`, a `shape` and a `size`."""
    return [atom.aval for atom in atoms]


def is_literal(atom: Any) -> bool:
    """Returns whether an operand is a number written into the program."""
    return isinstance(atom, Literal)


def frames(eqn: JaxprEqn) -> Sequence[Any]:
    """Returns the stack frames of the Python calls that made an equation, the innermost first."""
    traceback = eqn.source_info.traceback
    return traceback.frames if traceback else ()


def origin(eqn: JaxprEqn) -> str:
    """Returns the source line that made an equation, such as "clipping.py:77": the innermost line
    outside the files of JAX, of Python's library and of installed packages (`_BELOW`). Returns ""
    if there is no such line."""
    for frame in frames(eqn):
        name = frame.file_name
        # Names without ".py", such as "<frozen ...>" or "<stdin>", are no files.
        if name.endswith(".py") and not name.startswith(_BELOW):
            return f"{os.path.basename(name)}:{frame.line_num}"
    return ""


def is_float(aval: Any) -> bool:
    """Returns whether an array of this type holds real or complex floating-point numbers."""
    return jnp.issubdtype(aval.dtype, jnp.inexact)


def counted_scope(name: str, *, runs: int, rounds: int) -> str:
    """Returns a name such as "head.3_of_8" for the `jax.named_scope` of a loop that runs once or
    not at all in each iteration of an enclosing loop.

    The loop runs in `runs` of the `rounds` iterations of the enclosing loop. In each iteration an
    array of the program says whether the loop runs, so the compiled program does not show the
    number `runs`. Code that reads compiled programs finds `runs` in this name, by the pattern
    `COUNTED`.
    """
    return f"{name}.{runs}_of_{rounds}"
