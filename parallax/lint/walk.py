"""One reading of a program: each value is followed through it, loops until nothing changes, and mistakes are noted."""

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn

from parallax import jaxprs, mesh, remat
from parallax.collectives import types
from parallax.lint import mistakes, shards, values
from parallax.lint.finding import Finding
from parallax.lint.loops import Loop
from parallax.lint.values import LINEAR, Sent, Value, either, joined


class Walk:
    """One reading of a program: where it stands, and what it found."""

    def __init__(self, narrow: bool):
        self.narrow = narrow
        self.findings: dict[Finding, Finding] = {}
        self.silent = False  # while a loop's carries are followed until they settle
        self.mesh: Any = None  # of the shard_map around
        self.checked = True  # its check_vma
        self.where: str | None = (
            None  # the line of an equation whose inner equations have no line of the caller's
        )
        self.gathering = False  # inside what `zero.gathered` or `sequence.gather_from` gathers: each trip does so on purpose
        self.loops: list[Loop] = []
        self.predicates: list[
            tuple[str, frozenset[str]]
        ] = []  # around: what it is, and the axes it differs along
        self.ours: dict[int, Jaxpr] = {}
        self.lines: dict[int, str] = {}
        self.settled: dict[tuple, list[Value]] = {}

    def __call__(self, jaxpr: Jaxpr, arguments: Sequence[Value]) -> list[Value]:
        """Follow these values through a jaxpr."""
        key = (
            id(jaxpr),
            tuple(value._replace(summed=(), parts=frozenset()) for value in arguments),
        )
        if self.silent and key in self.settled:
            return self.settled[key]
        known = {variable: Value() for variable in jaxpr.constvars} | dict(
            zip(jaxpr.invars, arguments, strict=True)
        )
        read = lambda atoms: [
            Value(constant=True) if jaxprs.is_literal(atom) else known[atom] for atom in atoms
        ]
        for eqn in jaxpr.eqns:
            known |= zip(eqn.outvars, self._equation(eqn, read(eqn.invars)), strict=True)
        results = read(jaxpr.outvars)
        if self.silent:
            self.settled[key] = results
        return results

    def _equation(self, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
        control = {
            "shard_map": self._shard_map,
            "cond": self._cond,
            "scan": self._scan,
            "while": self._while,
        }
        if eqn.primitive.name in control:
            return control[eqn.primitive.name](eqn, operands)
        if (
            eqn.primitive.name == LINEAR
            and eqn.params["name"] == remat.GATHERED
            and not self.gathering
        ):
            self.gathering = True
            results = self._equation(eqn, operands)
            self.gathering = False
            return results
        ours = self._ours(eqn) if eqn.primitive.name == LINEAR else None
        if sent := values.sent(eqn, ours):
            return self._collective(eqn, sent, operands)
        if inner := ours or jaxprs.called(eqn):
            with self._at(
                self._source(eqn) if ours or jaxprs.is_jax_function(inner) else self.where
            ):
                return self(inner, operands)
        for inner in jaxprs.inner(
            eqn
        ):  # a reducer, or a kernel: what it is called with is not known
            self(inner, [joined(operands)] * len(inner.invars))
        return self._plain(eqn, operands)

    def _plain(self, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
        name = eqn.primitive.name
        if name in mistakes.PRODUCTS and not self.silent:
            self._note(mistakes.wide_product(eqn, operands, self._source(eqn), self.narrow))
        if name == "axis_index":
            return [Value(differs=self._large([eqn.params["axis_name"]]))]
        parts = (
            frozenset() if self.silent or not self.loops else self.loops[-1].through(eqn, operands)
        )
        if name == "optimization_barrier":
            return [value._replace(parts=parts & value.parts) for value in operands]
        result = joined(operands, narrow=values.narrow(eqn, operands), parts=parts)
        if name == "replicated":
            result = result._replace(differs=result.differs - set(eqn.params["axes"]))
        return [result] * len(eqn.outvars)

    # Control flow

    def _shard_map(self, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
        outside = self.mesh, self.checked
        self.mesh, self.checked = eqn.params["mesh"], eqn.params["check_vma"]
        split = [
            self._large(axis for entry in spec for axis in mesh.entry_axes(entry))
            for spec in eqn.params["in_specs"]
        ]
        arguments = [
            value._replace(differs=value.differs | axes)
            for value, axes in zip(operands, split, strict=True)
        ]
        (body,) = jaxprs.inner(eqn)
        results = self(body, arguments)
        if not self.silent:
            specs = eqn.params["in_specs"], eqn.params["out_specs"]
            for found in shards.findings(body, *specs, self.mesh.shape, self._ours):
                self._note(found)
        self.mesh, self.checked = outside
        return [value._replace(differs=frozenset()) for value in results]  # whole again

    def _cond(self, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
        index, *operands = self._untagged(operands)
        if index.differs and self.checked:
            self._lost_mark(eqn, index, operands)
        with self._under("cond", index.differs):
            results = [self(jaxprs.opened(branch), operands) for branch in eqn.params["branches"]]
        chosen = [functools.reduce(either, column) for column in zip(*results, strict=True)]
        return [_by_predicate(value, index) for value in chosen]

    def _scan(self, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
        body = jaxprs.inner(eqn)[0]
        if eqn.params["length"] == 1:  # no loop
            return self(body, operands)
        operands = self._untagged(operands)
        constants, carries = jaxprs.scan_parts(eqn)
        fixed, carry, sliced = (
            operands[:constants],
            operands[constants : constants + carries],
            operands[constants + carries :],
        )
        moving = [value._replace(trip=len(self.loops) + 1) for value in sliced]
        run = lambda carry: self(body, [*fixed, *carry, *moving])
        return self._loop(run, carry, eqn.params["length"])

    def _while(self, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
        operands = self._untagged(operands)
        first, second = (
            eqn.params["cond_nconsts"],
            eqn.params["cond_nconsts"] + eqn.params["body_nconsts"],
        )
        condition, body = (
            jaxprs.opened(eqn.params["cond_jaxpr"]),
            jaxprs.opened(eqn.params["body_jaxpr"]),
        )
        run = lambda carry: self(body, [*operands[first:second], *carry])
        carry = self._steady(run, operands[second:])
        predicate = self(condition, [*operands[:first], *carry])[0]
        with self._under("while", predicate.differs):
            results = self._loop(run, operands[second:], None)
        return [_by_predicate(value, predicate) for value in results]

    def _loop(self, run: Callable[..., Any], carry: list[Value], trips: int | None) -> list[Value]:
        """What a loop gives back: its carries settled, then its body read once for what is to be found."""
        count = len(carry)
        carry = self._steady(run, carry)
        if self.silent:
            return _left(run(carry), len(self.loops))
        loop = Loop(len(self.loops) + 1, trips)
        self.loops.append(loop)
        results = run(loop.carried(carry))
        self.loops.pop()
        for each in loop.only_added(results[:count], results[count:]):
            self._note(
                mistakes.sum_in_a_loop(
                    each.aval, each.axes, self._devices(each.axes), trips, each.where
                )
            )
        return _left(results, len(self.loops))

    def _steady(self, run: Callable[..., Any], carry: list[Value]) -> list[Value]:
        """The carries at the start of any trip: the first, or one after it."""
        depth, was_silent, self.silent = len(self.loops) + 1, self.silent, True
        carry = [value._replace(trip=depth, parts=frozenset()) for value in carry]
        self.loops.append(Loop(depth, None))
        while True:
            after = [
                either(old, new)._replace(trip=depth)
                for old, new in zip(carry, run(carry), strict=False)
            ]
            bits = lambda values: [
                (value.differs, value.constant, value.narrow) for value in values
            ]
            if bits(after) == bits(carry):
                break
            carry = after
        self.loops.pop()
        self.silent = was_silent
        return carry

    # Findings

    def _collective(self, eqn: JaxprEqn, sent: Sent, operands: list[Value]) -> list[Value]:
        where, axes = self._source(eqn), self._large(sent.axes)
        avals = jaxprs.types(eqn.invars)
        results = [values.after(sent, value, axes, where) for value in operands]
        if len(results) != len(eqn.outvars):
            results = [joined(results)] * len(eqn.outvars)
        if self.silent or not axes:
            return results
        for what, along in self.predicates:
            # A permute waits for every device of the program; the others for those of their own group.
            if along and (sent.permutes or along & axes):
                self._note(
                    mistakes.under_a_predicate(sent, axes, what, along, self._devices(along), where)
                )
        loop = self.loops[-1] if self.loops else None
        for i, (value, aval) in enumerate(zip(operands, avals, strict=True)):
            if value.constant:
                continue
            same = axes - value.differs
            if same and sent.kind in ("sum", "scatter"):
                self._note(mistakes.summed_twice(value, aval, same, self._devices(same), where))
            elif loop and value.trip < loop.depth:
                if not self.gathering:
                    self._note(mistakes.same_every_trip(sent, aval, axes, loop.trips, where))
            elif loop and sent.kind == "sum" and jaxprs.is_float(aval):
                results[i] = results[i]._replace(parts=loop.summed(value, aval, axes, where))
            elif loop:
                loop.spoil([value])
        return results

    def _lost_mark(self, eqn: JaxprEqn, index: Value, operands: list[Value]) -> None:
        predicate, *avals = jaxprs.types(eqn.invars)
        along = index.differs & set(types.axes_of_type(predicate))
        lost = lambda aval: along - set(types.axes_of_type(aval))
        floats = [
            aval
            for aval, value in zip(avals, operands, strict=True)
            if jaxprs.is_float(aval) and not value.constant
        ]
        inputs = [lost(aval) for aval in floats if lost(aval)]
        outputs = [lost(aval) for aval in jaxprs.types(eqn.outvars) if lost(aval)]
        if inputs or outputs:
            axes = frozenset().union(*inputs, *outputs)
            self._note(
                mistakes.lost_mark(
                    axes, self._devices(axes), len(inputs), len(outputs), self._source(eqn)
                )
            )

    def _note(self, finding: Finding | None) -> None:
        if finding and not self.silent:
            self.findings.setdefault(finding, finding)

    # Where it stands

    def _ours(self, eqn: JaxprEqn) -> Jaxpr:
        if id(eqn) not in self.ours:
            self.ours[id(eqn)] = types.linear_jaxpr(eqn, self.mesh, check_vma=self.checked)
        return self.ours[id(eqn)]

    def _untagged(self, operands: list[Value]) -> list[Value]:
        """The operands of what is read as a whole: the sums of the loop around go into it, and are no longer followed."""
        if self.loops and not self.silent:
            self.loops[-1].spoil(operands)
        return [value._replace(parts=frozenset()) for value in operands]

    def _source(self, eqn: JaxprEqn) -> str:
        if self.where:
            return self.where
        if id(eqn) not in self.lines:
            self.lines[id(eqn)] = jaxprs.source(eqn)
        return self.lines[id(eqn)]

    def _large(self, axes: Any) -> frozenset[str]:
        return frozenset(
            axis for axis in axes if self.mesh is not None and self.mesh.shape.get(axis, 1) > 1
        )

    def _devices(self, axes: frozenset[str]) -> int:
        return math.prod(self.mesh.shape[axis] for axis in axes)

    @contextlib.contextmanager
    def _at(self, where: str | None):
        outside, self.where = self.where, where
        yield
        self.where = outside

    @contextlib.contextmanager
    def _under(self, what: str, along: frozenset[str]):
        self.predicates.append((what, along))
        yield
        self.predicates.pop()


def _by_predicate(value: Value, predicate: Value) -> Value:
    """A value that a predicate chose."""
    constant = value.constant and predicate.constant
    return value._replace(
        differs=value.differs | predicate.differs,
        trip=max(value.trip, predicate.trip),
        constant=constant,
    )


def _left(results: Sequence[Value], depth: int) -> list[Value]:
    """The results of a loop, seen from around it, where `depth` loops are."""
    return [value._replace(trip=depth, parts=frozenset()) for value in results]
