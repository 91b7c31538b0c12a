"""How often the loops of a compiled program turn, where only their conditions say it, as in programs for TPUs and GPUs.

A counted loop compares a number of its state with a bound, and adds the same to it in each trip. Both are followed here, through
copies, tuples and fusions, from the condition to the constants.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

SAME = {"copy", "bitcast", "convert", "reshape", "copy-done", "opt-barrier", "broadcast"}
STATED = "known_trip_count"  # where the text of a loop says it itself
MIRRORED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "NE": "NE"}


class Number(NamedTuple):
    """An element of a loop's state plus a constant; the constant alone where `element` is None.

    Attributes:
        plus: the constant.
        element: its place in the state.
    """

    plus: int
    element: int | None = None


class Compared(NamedTuple):
    """A comparison.

    Attributes:
        direction: as "LT".
        left: one side.
        right: the other.
    """

    direction: str
    left: Number
    right: Number


class State:
    """The state of a loop as a whole."""


class Program(NamedTuple):
    """A program's instructions, by computation and name, and the last instruction of each computation.

    Attributes:
        lines: the instructions of each computation, by their names.
        roots: the name of each computation's result.
    """

    lines: Mapping[str, Mapping[str, Any]]
    roots: Mapping[str, str]

    def value(self, where: str, name: str, arguments: Sequence[Any] | None = None) -> Any:
        """What an instruction gives: a `Number`, a `Compared`, the `State`, or None if it is another thing.

        Without `arguments`, the computation is a loop's own, and its parameter is the state.
        """
        line = self.lines[where].get(name)
        if line is None:
            return None
        of = lambda k: self.value(where, line.operands[k], arguments)
        match line.opcode:
            case "constant":
                digits = re.match(r"-?\d+(?=,|$)", line.attributes)
                found = Number(int(digits[0])) if digits else None
            case "parameter":
                found = (
                    State() if arguments is None else arguments[int(line.attributes.split(",")[0])]
                )
            case "get-tuple-element":
                found = self._element(where, line, of(0), arguments)
            case "add" | "subtract" if len(line.operands) == 2:
                found = _sum(of(0), of(1), -1 if line.opcode == "subtract" else 1)
            case "compare":
                found = _compared(line.attributes, of(0), of(1))
            case "fusion" | "call":
                inner = re.search(r"\b(?:calls|to_apply)=%([\w.-]+)", line.attributes)
                given = [of(k) for k in range(len(line.operands))]
                found = inner and self.value(inner[1], self.roots[inner[1]], given)
            case opcode:
                found = of(0) if opcode in SAME and line.operands else None
        return found

    def _element(self, where: str, line: Any, whole: Any, arguments: Sequence[Any] | None) -> Any:
        index = re.search(r"\bindex=(\d+)", line.attributes)
        if index and isinstance(whole, State):
            return Number(0, int(index[1]))
        given = self.lines[where].get(line.operands[0])
        if not index or given is None or given.opcode != "tuple":
            return None
        return self.value(where, given.operands[int(index[1])], arguments)

    def trips(self, where: str, loop: Any) -> int:
        """How often `loop`, which stands in the computation `where`, turns; 0 where the text does not tell."""
        names = dict(re.findall(r"\b(condition|body)=%([\w.-]+)", loop.attributes))
        if len(names) < 2 or not loop.operands:
            return 0
        test = self.value(names["condition"], self.roots[names["condition"]])
        if not isinstance(test, Compared):
            return 0
        first, step = 0, 0
        for side, sign in ((test.left, 1), (test.right, -1)):
            begins, moves = (
                (side.plus, 0)
                if side.element is None
                else self._course(where, loop, names["body"], side)
            )
            if begins is None or moves is None:
                return 0
            first, step = first + sign * begins, step + sign * moves
        return _turns(test.direction, first, step)

    def _course(
        self, where: str, loop: Any, body: str, side: Number
    ) -> tuple[int | None, int | None]:
        """What an element of the state, plus the constant, is before the first trip, and what each trip adds."""
        assert side.element is not None
        before, after = self.lines[where].get(loop.operands[0]), self.lines[body][self.roots[body]]
        if before is None or before.opcode != "tuple" or after.opcode != "tuple":
            return None, None
        start = self.value(where, before.operands[side.element])
        moved = self.value(body, after.operands[side.element])
        begins = (
            start.plus + side.plus if isinstance(start, Number) and start.element is None else None
        )
        return begins, moved.plus if isinstance(
            moved, Number
        ) and moved.element == side.element else None


def counted(computations: dict[str, list[Any]], roots: Mapping[str, str]) -> dict[str, list[Any]]:
    """The computations with the trips of their loops, where the text does not give them outright."""
    program = Program(
        {name: {line.name: line for line in lines} for name, lines in computations.items()}, roots
    )
    asks = lambda line: line.opcode == "while" and STATED not in line.attributes
    count = lambda where, line: (
        line._replace(trips=program.trips(where, line)) if asks(line) else line
    )
    return {where: [count(where, line) for line in lines] for where, lines in computations.items()}


def _sum(left: Any, right: Any, sign: int) -> Number | None:
    if not isinstance(left, Number) or not isinstance(right, Number):
        return None
    if right.element is None:
        return Number(left.plus + sign * right.plus, left.element)
    return (
        Number(left.plus + right.plus, right.element) if left.element is None and sign > 0 else None
    )


def _compared(attributes: str, left: Any, right: Any) -> Compared | None:
    direction = re.search(r"\bdirection=(\w+)", attributes)
    sides = isinstance(left, Number) and isinstance(right, Number)
    return (
        Compared(direction[1], left, right)
        if direction and sides and direction[1] in MIRRORED
        else None
    )


def _turns(direction: str, first: int, step: int) -> int:
    """The trips while `first + t step` is below 0 (LT), at most 0 (LE), and so on; 0 for a loop that would not end."""
    if direction in ("GT", "GE"):
        direction, first, step = MIRRORED[direction], -first, -step
    if direction == "NE":
        return -first // step if step and first % step == 0 and -first // step > 0 else 0
    if step <= 0:
        return 0
    return max(0, -(first // step) if direction == "LT" else -first // step + 1)
