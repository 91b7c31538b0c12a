"""Finds the equations of a traced program that its results need. A compiler removes the other
equations.

`used` says for each result of an equation whether it is needed, and `results` says this for each
result of a jaxpr. Given the needed results of an equation, `operands` tells which of its operands
these results need. An *atom* is a variable or a literal. If an equation, such as a `jit`, has one
jaxpr inside with the same operands and results, `jaxprs.called` gives that jaxpr.
"""

from collections.abc import Sequence

from jax.extend.core import Jaxpr, JaxprEqn

from parallax import arithmetic, jaxprs


class Needed:
    """Finds the operands and equations that the results of a jaxpr need. A jaxpr is read only once
    for each set of needed results."""

    def __init__(self):
        """Begins with an empty cache."""
        # By the id of a jaxpr and its needed results: whether each operand is needed; and for each
        # equation, whether each of its results is needed, or None if the equation is not.
        self.known: dict[
            tuple[int, tuple[bool, ...]], tuple[list[bool], list[tuple[bool, ...] | None]]
        ] = {}
        self.kept: list[Jaxpr] = []  # so that no other jaxpr gets the id of one that was read

    def __call__(
        self, jaxpr: Jaxpr, results: Sequence[bool]
    ) -> tuple[list[bool], list[tuple[bool, ...] | None]]:
        """Returns two lists. Both consider only the needed results of the jaxpr: those with True in
        `results`.

        The first list says for each operand of the jaxpr whether the needed results depend on it.
        The second has an entry for each equation: whether each of its results is needed, or None if
        the equation is not needed.
        """
        key = (id(jaxpr), tuple(results))
        if key not in self.known:
            self.kept.append(jaxpr)
            self.known[key] = self._read(jaxpr, results)
        return self.known[key]

    def _read(self, jaxpr: Jaxpr, results: Sequence[bool]):
        """Returns for each operand whether it is needed; and for each equation which of its results
        are needed, or None if the equation itself is not needed.

        Goes backward through the equations. The set `live` has the variables that are needed so
        far. An equation with effects is always needed.
        """
        live = {
            atom
            for atom, used in zip(jaxpr.outvars, results, strict=True)
            if used and not jaxprs.is_literal(atom)
        }
        found: list[tuple[bool, ...] | None] = []
        for eqn in reversed(jaxpr.eqns):
            used = tuple(var in live for var in eqn.outvars)
            is_needed = any(used) or jaxprs.has_effects(eqn)
            found.append(used if is_needed else None)
            if is_needed:
                operands = self.operands(eqn, used)
                live |= {
                    atom
                    for atom, is_read in zip(eqn.invars, operands, strict=True)
                    if is_read and not jaxprs.is_literal(atom)
                }
        return [var in live for var in jaxpr.invars], found[::-1]  # in the order of the equations

    def operands(self, eqn: JaxprEqn, used: Sequence[bool]) -> list[bool]:
        """Returns, for each operand of an equation, whether the equation needs this operand to
        compute the needed results: those with True in `used`.

        A scan needs the operands that its body needs (`_scan`). An optimization barrier returns
        each operand as a result, and needs the operands whose results are used. A call, such as a
        `jit`, needs the operands that its program needs, and so does a `custom_linear_solve`. An
        equation of any other kind, such as a while loop, needs all its operands.
        """
        if eqn.primitive.name == "scan":
            return self._scan(eqn, used)
        if eqn.primitive.name == "optimization_barrier":
            return list(used)
        if eqn.primitive.name == "custom_linear_solve":
            body, places = arithmetic.solve(eqn, range(len(eqn.invars)))
            read = {k for k, needed in zip(places, self(body, used)[0], strict=True) if needed}
            return [k in read for k in range(len(eqn.invars))]
        inner = jaxprs.called(eqn)
        if inner is not None and eqn.primitive.name != "while":
            needed_operands, _ = self(inner, used)
            return needed_operands
        return [True] * len(eqn.invars)

    def of_scan(self, eqn: JaxprEqn, used: Sequence[bool]) -> list[bool]:
        """Returns whether each result of a scan's body is needed: outside of the scan (`used`), or,
        for a carry, by the next iteration. A carry may need another carry, so the search repeats
        until it finds no further result."""
        constants, carries = jaxprs.scan_parts(eqn)  # their numbers
        body, results = jaxprs.inner(eqn)[0], list(used)
        while True:
            # The carries among the operands that these results need.
            by_next_trip = self(body, results)[0][constants : constants + carries]
            more = [a or b for a, b in zip(results[:carries], by_next_trip, strict=True)] + results[
                carries:
            ]
            if more == results:
                return results
            results = more

    def _scan(self, eqn: JaxprEqn, used: Sequence[bool]) -> list[bool]:
        """Returns, for each operand of a scan (constants, carries, stacked arrays), whether the
        scan needs it.

        A carry's start is needed if the body reads the carry. It is also needed if the carry's last
        value is needed: the loop takes a start for each carry that it returns.
        """
        constants, carries = jaxprs.scan_parts(eqn)  # their numbers
        if eqn.params["length"] == 1:  # no loop: the body runs once, on these operands
            return self(jaxprs.inner(eqn)[0], used)[0]
        results = self.of_scan(eqn, used)
        operands = self(jaxprs.inner(eqn)[0], results)[0]
        return [
            is_read or (constants <= k < constants + carries and results[k - constants])
            for k, is_read in enumerate(operands)
        ]
