"""Turns a program into one list of operations: the operations of a called function stand in the
list in place of the call, and each value (array) has an id.

Ids are ints: 0, 1, 2, ... The functions here take and return ids, since the arrays do not exist
before a run. A collective of this library is one equation, `linear_collective`. The function `ours`
returns the jaxpr that the equation stands for, which sends by `ppermute`s or calls other
collectives.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn

from parallax import arithmetic, jaxprs, remat, source_lines
from parallax.lint import values
from parallax.lint.values import LINEAR, Sent

# A conditional becomes several operations. The first is COND, whose operands are the predicate and
# the operands of the branches; it has no result, and marks where the conditional stands. The
# operations of all branches come next. Last comes, for each result of the conditional, an operation
# CHOSEN: its operands are the predicate, and the value that each branch returns for this result.
COND, CHOSEN = "cond", "chosen"
LOOPS = frozenset({"scan", "while"})
_CLOSED = LOOPS | {"shard_map"}  # operations whose bodies are read as programs of their own


class Scope(NamedTuple):
    """The calls, conditionals and loops that contain an operation.

    Attributes:
        at: the equations whose source lines may be shown for the operation: first its own, then
            those of the calls, conditionals and loops around it, the innermost first.
        is_hidden: whether a function of JAX or of this library made the operation; the operation's
            own source line then tells a user nothing.
        on_purpose: whether the operation is part of a gather that each iteration of a loop is meant
            to repeat.
        predicates: the ids of the values that decide whether the operation runs.
    """

    at: tuple[JaxprEqn, ...] = ()
    is_hidden: bool = False
    on_purpose: bool = False
    predicates: tuple[int, ...] = ()


class Node(NamedTuple):
    """One operation.

    Attributes:
        name: the name of the primitive. `CHOSEN` is the name of the operation that chooses one
            result of a conditional from the results of the branches.
        eqn: the equation.
        inputs: the ids of the operands.
        outputs: the ids of the results.
        sent: the kind and the axes of the collective; None if the operation is no collective.
        scope: the calls, conditionals and loops that contain the operation.
    """

    name: str
    eqn: JaxprEqn
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    sent: Sent | None
    scope: Scope

    @property
    def where(self) -> str:
        """The source line of the innermost equation in `scope.at` whose line is known."""
        lines = (source_lines.source(eqn) for eqn in self.scope.at)
        return next((line for line in lines if line != source_lines.UNKNOWN), source_lines.UNKNOWN)

    def is_within(self, transform: str) -> bool:
        """Returns whether the operation, or a loop or a call around it, was made by a transform of
        JAX.

        `transform` is the beginning of the transform's name in JAX's name stacks, such as "jvp(".
        """
        return any(
            transform in str(eqn.source_info.name_stack) for eqn in (self.eqn, *self.scope.at)
        )


class Flat:
    """The operations of a jaxpr in order, with the types of all values.

    Attributes:
        ours: a function that takes the equation of one of this library's collectives, and returns
            the collective's jaxpr.
        types: the type of each value; the value's id is the index.
        nodes: the operations.
        literals: the numbers that are written into the program, by the ids of their values.
        arguments: the ids of the arguments.
        results: the ids of the results.
        made: the operation that makes each value, by the value's id; no operation makes arguments,
            constants and literals, so `made` does not have them.
        used: the operations that use each value, by the value's id.
    """

    def __init__(self, jaxpr: Jaxpr, ours: Callable[[JaxprEqn], Jaxpr], scope: Scope):
        """Lists the operations of a jaxpr. `scope` has the calls, conditionals and loops that
        contain the jaxpr."""
        self.ours = ours
        self.types: list[Any] = []
        self.nodes: list[Node] = []
        self.literals: dict[int, Any] = {}
        self.arguments = self._new_ids(jaxprs.types(jaxpr.invars))
        self.results = self._opened(jaxpr, self.arguments, scope)
        self.made = {output: node for node in self.nodes for output in node.outputs}
        self.used: dict[int, list[Node]] = defaultdict(list)
        for node in self.nodes:
            for value in dict.fromkeys(node.inputs):  # once, even if it is both operands
                self.used[value].append(node)

    def shape(self, value: int) -> tuple[int, ...]:
        """Returns the shape of a value."""
        return self.types[value].shape

    def reads(self, value: int) -> bool:
        """Returns whether an operation uses a value, or the value is a result."""
        return bool(self.used.get(value)) or value in self.results

    def _new_ids(self, types: Sequence[Any]) -> tuple[int, ...]:
        """Adds a value for each type in `types`, and returns the ids of these values."""
        self.types += types
        return tuple(range(len(self.types) - len(types), len(self.types)))

    def _literal(self, atom: Any) -> int:
        """Returns a new id for a literal of the program."""
        (value,) = self._new_ids([atom.aval])
        self.literals[value] = atom.val
        return value

    def _opened(self, jaxpr: Jaxpr, arguments: Sequence[int], scope: Scope) -> tuple[int, ...]:
        """Adds the operations of a jaxpr to `nodes`, and returns the ids of the jaxpr's results.

        `arguments` are the ids of the jaxpr's arguments. `scope.at` has the equations around the
        jaxpr, the innermost first, and `scope.is_hidden` says whether the jaxpr belongs to a
        function of JAX or of this library.
        """
        ids = dict(zip(jaxpr.invars, arguments, strict=True))  # variable -> id
        ids |= zip(jaxpr.constvars, self._new_ids(jaxprs.types(jaxpr.constvars)), strict=True)

        def read(atoms):
            """Returns, for each variable or literal, the id of its value."""
            return tuple(
                self._literal(atom) if jaxprs.is_literal(atom) else ids[atom] for atom in atoms
            )

        for eqn in jaxpr.eqns:
            # `at` begins with the equation itself, unless its line tells a user nothing.
            place = scope if scope.is_hidden else scope._replace(at=(eqn, *scope.at))
            outputs = self._equation(eqn, read(eqn.invars), place)
            ids |= zip(eqn.outvars, outputs, strict=True)
        return read(jaxpr.outvars)

    def _equation(self, eqn: JaxprEqn, inputs: tuple[int, ...], scope: Scope) -> tuple[int, ...]:
        """Adds the operations of an equation, and returns the ids of its results.

        For a call of a function, the function's operations are added. Collectives, loops and
        `shard_map` stay one operation each. But a collective of this library that only calls other
        collectives, such as `zero.gathered`, is opened like a call. An operation inside a function
        of JAX or of this library is hidden (`Scope.is_hidden`), so that findings show the caller's
        line.
        """
        name = eqn.primitive.name
        if name == COND:
            return self._conditional(eqn, inputs, scope)
        ours = self.ours(eqn) if name == LINEAR else None  # a jaxpr of this library
        if ours and eqn.params["name"] == remat.GATHERED:
            # `zero.gathered` and `sequence.gather_from` give their gathers this name. A loop
            # repeats these gathers on purpose, to save memory.
            scope = scope._replace(on_purpose=True)
        # None if it is no collective, or a collective of this library that is opened like a call.
        sent = values.sent(eqn, ours)
        inner = None if sent or name in _CLOSED else ours or jaxprs.called(eqn)
        if name == "custom_linear_solve":
            inner, taken = arithmetic.solve(eqn, inputs)
            inputs = tuple(taken)
        if inner is None:
            return self._node(name, eqn, inputs, jaxprs.types(eqn.outvars), sent, scope)
        is_hidden = scope.is_hidden or ours is not None or source_lines.is_jax_function(inner)
        return self._opened(inner, inputs, scope._replace(is_hidden=is_hidden))

    def _conditional(self, eqn: JaxprEqn, inputs: tuple[int, ...], scope: Scope) -> tuple[int, ...]:
        """Adds the operations of a conditional, and returns the ids of its results.

        The conditional becomes an operation named `COND`, which marks its place, then the
        operations of all branches, and then an operation named `CHOSEN` for each result. Result j
        depends on the predicate and on result j of every branch, whichever branch runs.
        """
        predicate, *operands = inputs
        self._node(COND, eqn, inputs, types=[], sent=None, scope=scope)
        inside = scope._replace(predicates=(*scope.predicates, predicate))
        branches = [self._opened(branch, operands, inside) for branch in jaxprs.inner(eqn)]
        outputs = []
        for aval, *results in zip(jaxprs.types(eqn.outvars), *branches, strict=True):
            outputs += self._node(
                CHOSEN, eqn, (predicate, *results), types=[aval], sent=None, scope=scope
            )
        return tuple(outputs)

    def _node(
        self,
        name: str,
        eqn: JaxprEqn,
        inputs: tuple[int, ...],
        types: Sequence[Any],
        sent: Sent | None,
        scope: Scope,
    ) -> tuple[int, ...]:
        """Adds one operation whose results have the given `types`, and returns the results' ids.

        `sent` has the kind and the axes of the collective; it is None if the operation is no
        collective. `scope` has the calls, conditionals and loops that contain the operation.
        """
        outputs = self._new_ids(types)
        self.nodes.append(Node(name, eqn, inputs, outputs, sent, scope))
        return outputs


def carried(eqn: JaxprEqn) -> list[tuple[int, int]]:
    """Returns a pair for each carry of a loop: the carry's place among the loop's operands, and the
    carry's place among the loop's results.

    The operands of a `scan` are constants, carries and sliced arrays; the results are the carries
    and then stacked arrays. The operands of a `while` are the constants of the condition, the
    constants of the body, and the carries; the results are the carries.
    """
    if eqn.primitive.name == "scan":
        first, count = jaxprs.scan_parts(eqn)  # how many constants and carries there are
    else:
        first = eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
        count = len(eqn.outvars)
    return [(first + i, i) for i in range(count)]


def sliced(eqn: JaxprEqn) -> range:
    """Returns the places of the operands that a loop slices: each iteration gets one slice of each
    such operand."""
    if eqn.primitive.name != "scan":
        return range(0)
    # The constants and the carries, which `scan_parts` counts, come first.
    return range(sum(jaxprs.scan_parts(eqn)), len(eqn.invars))


def body(eqn: JaxprEqn) -> Jaxpr:
    """Returns the body of a loop."""
    if eqn.primitive.name == "scan":
        return jaxprs.inner(eqn)[0]  # the only jaxpr of a `scan`
    return jaxprs.opened(eqn.params["body_jaxpr"])
