"""A program as one list of operations: the functions that it calls are opened, and each value has a number."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn

from parallax import jaxprs
from parallax.lint import values
from parallax.lint.values import LINEAR, Sent

CHOSEN = "chosen"  # a result of a conditional: its inputs are the predicate, then that result of each branch
LOOPS = frozenset({"scan", "while"})  # these stay closed


class Node(NamedTuple):
    """One operation.

    Attributes:
        name: that of its primitive, or `CHOSEN`.
        eqn: its equation.
        inputs: the numbers of its operands.
        outputs: the numbers of its results.
        sent: the collective that it is, or None.
        at: the equations whose line may count, the first of which has one: its own, but for what a function of JAX's did, then
            those of the calls and conditionals round it.
    """

    name: str
    eqn: JaxprEqn
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    sent: Sent | None
    at: tuple[JaxprEqn, ...]


class Flat:
    """The operations of a jaxpr in order, with the types of all values, and which operations make and use each of them.

    `literals` are the numbers that are written into the program, by value. `ours` opens a collective of this library.
    """

    def __init__(self, jaxpr: Jaxpr, ours: Callable[[JaxprEqn], Jaxpr]):
        self.ours = ours
        self.types: list[Any] = []
        self.nodes: list[Node] = []
        self.literals: dict[int, Any] = {}
        self.arguments = self._numbers(jaxprs.types(jaxpr.invars))
        self.results = self._opened(jaxpr, self.arguments, ())
        self.made = {output: node for node in self.nodes for output in node.outputs}
        self.used: dict[int, list[Node]] = defaultdict(list)
        for node in self.nodes:
            for value in dict.fromkeys(node.inputs):
                self.used[value].append(node)

    def shape(self, value: int) -> tuple[int, ...]:
        """The shape of a value."""
        return self.types[value].shape

    def _numbers(self, types: Sequence[Any]) -> tuple[int, ...]:
        self.types += types
        return tuple(range(len(self.types) - len(types), len(self.types)))

    def _literal(self, atom: Any) -> int:
        (value,) = self._numbers([atom.aval])
        self.literals[value] = atom.val
        return value

    def _opened(
        self,
        jaxpr: Jaxpr,
        arguments: Sequence[int],
        around: tuple[JaxprEqn, ...],
        *,
        hidden: bool = False,
    ) -> tuple[int, ...]:
        known = dict(zip(jaxpr.invars, arguments, strict=True))
        known |= zip(jaxpr.constvars, self._numbers(jaxprs.types(jaxpr.constvars)), strict=True)

        def read(atoms):
            return tuple(
                self._literal(atom) if jaxprs.is_literal(atom) else known[atom] for atom in atoms
            )

        for eqn in jaxpr.eqns:
            at = around if hidden else (eqn, *around)
            known |= zip(
                eqn.outvars, self._equation(eqn, read(eqn.invars), at, hidden=hidden), strict=True
            )
        return read(jaxpr.outvars)

    def _equation(
        self, eqn: JaxprEqn, inputs: tuple[int, ...], at: tuple[JaxprEqn, ...], *, hidden: bool
    ) -> tuple[int, ...]:
        name = eqn.primitive.name
        if name == "cond":
            branches = [
                self._opened(branch, inputs[1:], at, hidden=hidden) for branch in jaxprs.inner(eqn)
            ]
            return tuple(
                self._node(CHOSEN, eqn, (inputs[0], *each), [aval], None, at)[0]
                for *each, aval in zip(*branches, jaxprs.types(eqn.outvars), strict=True)
            )
        ours = self.ours(eqn) if name == LINEAR else None
        sent = values.sent(eqn, ours)
        inner = None if sent or name in LOOPS else ours or jaxprs.called(eqn)
        if inner:
            return self._opened(
                inner, inputs, at, hidden=hidden or bool(ours) or jaxprs.is_jax_function(inner)
            )
        return self._node(name, eqn, inputs, jaxprs.types(eqn.outvars), sent, at)

    def _node(
        self,
        name: str,
        eqn: JaxprEqn,
        inputs: tuple[int, ...],
        types: Sequence[Any],
        sent: Sent | None,
        at: tuple[JaxprEqn, ...],
    ) -> tuple[int, ...]:
        outputs = self._numbers(types)
        self.nodes.append(Node(name, eqn, inputs, outputs, sent, at))
        return outputs


def carried(eqn: JaxprEqn) -> list[tuple[int, int]]:
    """The carries of a loop: for each its place among the operands, and among the results."""
    if eqn.primitive.name == "scan":
        first, count = jaxprs.scan_parts(eqn)
    else:
        first = eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
        count = len(eqn.outvars)
    return [(first + i, i) for i in range(count)]


def sliced(eqn: JaxprEqn) -> range:
    """The places of the operands that a loop takes a slice of in each trip."""
    if eqn.primitive.name != "scan":
        return range(0)
    return range(sum(jaxprs.scan_parts(eqn)), len(eqn.invars))


def body(eqn: JaxprEqn) -> Jaxpr:
    """What a loop repeats."""
    return (
        jaxprs.inner(eqn)[0]
        if eqn.primitive.name == "scan"
        else jaxprs.opened(eqn.params["body_jaxpr"])
    )
