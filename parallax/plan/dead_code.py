"""Which equations of a traced program count: those that its results need, without what a compiler
computes once only."""

from collections.abc import Sequence

from jax.extend.core import Jaxpr, JaxprEqn

from parallax import jaxprs


class Needed:
    """Which operands and equations the results of a jaxpr need; each jaxpr is read once for each
    set of results."""

    def __init__(self):
        self.known: dict[
            tuple[int, tuple[bool, ...]], tuple[list[bool], list[tuple[bool, ...] | None]]
        ] = {}
        self.kept: list[Jaxpr] = []  # so that no other jaxpr gets the id of one that was read

    def __call__(
        self, jaxpr: Jaxpr, results: Sequence[bool]
    ) -> tuple[list[bool], list[tuple[bool, ...] | None]]:
        """Returns the operands that are needed, and for each equation which of its results are;
        None for an equation that is not needed."""
        key = (id(jaxpr), tuple(results))
        if key not in self.known:
            self.kept.append(jaxpr)
            self.known[key] = self._read(jaxpr, results)
        return self.known[key]

    def _read(self, jaxpr: Jaxpr, results: Sequence[bool]):
        live = {
            atom
            for atom, used in zip(jaxpr.outvars, results, strict=True)
            if used and not jaxprs.is_literal(atom)
        }
        found: list[tuple[bool, ...] | None] = []
        for eqn in reversed(jaxpr.eqns):
            used = tuple(var in live for var in eqn.outvars)
            counts = any(used) or jaxprs.has_effects(eqn)
            found.append(used if counts else None)
            if counts:
                operands = self.operands(eqn, used)
                live |= {
                    atom
                    for atom, each in zip(eqn.invars, operands, strict=True)
                    if each and not jaxprs.is_literal(atom)
                }
        return [var in live for var in jaxpr.invars], found[::-1]

    def operands(self, eqn: JaxprEqn, used: Sequence[bool]) -> list[bool]:
        """Returns which operands an equation needs for these of its results."""
        if eqn.primitive.name == "scan":
            return self._scan(eqn, used)
        if eqn.primitive.name == "optimization_barrier":
            return list(used)
        inner = jaxprs.called(eqn)
        if inner is not None and eqn.primitive.name != "while":
            return self(inner, used)[0]
        return [True] * len(eqn.invars)

    def of_scan(self, eqn: JaxprEqn, used: Sequence[bool]) -> list[bool]:
        """Returns which results of a scan's body count: those that are read outside, and the
        carries that another trip needs."""
        constants, carries = jaxprs.scan_parts(eqn)
        body, results = jaxprs.inner(eqn)[0], list(used)
        while True:
            again = self(body, results)[0][constants : constants + carries]
            more = [a or b for a, b in zip(results[:carries], again, strict=True)] + results[
                carries:
            ]
            if more == results:
                return results
            results = more

    def _scan(self, eqn: JaxprEqn, used: Sequence[bool]) -> list[bool]:
        constants, carries = jaxprs.scan_parts(eqn)
        if eqn.params["length"] == 1:  # no loop
            return self(jaxprs.inner(eqn)[0], used)[0]
        results = self.of_scan(eqn, used)
        operands = self(jaxprs.inner(eqn)[0], results)[0]
        return [
            each or (constants <= k < constants + carries and results[k - constants])
            for k, each in enumerate(operands)
        ]
