"""Reads how many trips the loops of a compiled program have, from the conditions of the loops.
Programs for TPUs and GPUs state these numbers nowhere else.

A counted loop compares a number in its state with a bound, and adds a constant to that number in
each trip. This module follows the number and the bound back to constants, through instructions such
as `copy`, `tuple` and `fusion`.

In XLA's text (HLO), the condition and the body of a loop are computations (named lists of
instructions) of their own, which the instruction `while` names. The state of a loop is a tuple. It
is the operand of `while`, the parameter of the condition and of the body, and the result of the
body. A `line` is an instruction, and `line.attributes` is the text after its operands.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

# Operations whose result is the number of their operand.
PASSES_ON = {"copy", "bitcast", "convert", "reshape", "copy-done", "opt-barrier", "broadcast"}
SCALAR = re.compile(r"\[1?(?:,1)*\]")  # the dims of an array of one number
STATED = "known_trip_count"  # the attribute of a loop whose text states its trips
# left < right is the same as -left > -right, and so on.
MIRRORED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "NE": "NE"}


class Number(NamedTuple):
    """A number in a loop: an element of the loop's state plus a constant. If `element` is None, the
    number is the constant alone.

    Attributes:
        plus: the constant that is added to the element.
        element: the index of this element in the loop's state, or None.
    """

    plus: int
    element: int | None = None


class Compared(NamedTuple):
    """A comparison of two numbers.

    Attributes:
        direction: XLA's name of the comparison, such as "LT".
        left: the number on the left of the comparison.
        right: the number on the right.
    """

    direction: str
    left: Number
    right: Number


class State:
    """The state of a loop as a whole, the tuple of all its elements."""


class Computations(NamedTuple):
    """The instructions of a program by computation and name.

    Attributes:
        lines: the instructions of each computation by their names.
        roots: for each computation, the name of the instruction that gives its result.
        known: the results of `value` in conditions and bodies of loops so far, by computation and
            name.
    """

    lines: Mapping[str, Mapping[str, Any]]
    roots: Mapping[str, str]
    known: dict[tuple[str, str], Any]

    def value(self, where: str, name: str, arguments: Sequence[Any] | None = None) -> Any:
        """Returns the value of the instruction `name` of the computation `where`: a `Number`, a
        `Compared`, the `State`, or None for any other value.

        `arguments` are the values of the parameters of a computation that a fusion or a call runs.
        `arguments` is None in the condition or the body of a loop, whose only parameter is the
        state.
        """
        if arguments is not None:
            return self._value(where, name, arguments)
        # Many instructions may read one value, so each is followed once.
        if (where, name) not in self.known:
            self.known[where, name] = self._value(where, name, None)
        return self.known[where, name]

    def _value(self, where: str, name: str, arguments: Sequence[Any] | None) -> Any:
        """Computes what `value` returns, from the instruction's opcode and the values of its
        operands."""
        line = self.lines[where].get(name)
        # The numbers that count are scalars, alone or in a tuple.
        if line is None or not SCALAR.search(line.result):
            return None

        def operand(k: int) -> Any:
            """Returns the value of operand k of the instruction, counted from 0."""
            return self.value(where, line.operands[k], arguments)

        match line.opcode:
            case "constant":  # an integer; the attributes begin with the value
                digits = re.match(r"-?\d+(?=,|$)", line.attributes)
                value = Number(int(digits[0])) if digits else None
            case "parameter":
                number = int(line.attributes.split(",")[0])
                value = State() if arguments is None else arguments[number]
            case "get-tuple-element":
                value = self._element(where, line, operand(0), arguments)
            case "add" | "subtract" if len(line.operands) == 2:
                value = _sum(operand(0), operand(1), -1 if line.opcode == "subtract" else 1)
            case "compare":
                value = _compared(line.attributes, operand(0), operand(1))
            case "fusion" | "call":
                inner = re.search(r"\b(?:calls|to_apply)=%([\w.-]+)", line.attributes)
                operands = [operand(k) for k in range(len(line.operands))]
                value = inner and self.value(inner[1], self.roots[inner[1]], operands)
            case opcode:
                value = operand(0) if opcode in PASSES_ON and line.operands else None
        return value

    def _element(self, where: str, line: Any, whole: Any, arguments: Sequence[Any] | None) -> Any:
        """Returns the value of `line`, which takes an element out of a tuple (`get-tuple-element`).
        If `whole`, the value of this tuple, is a `State`, the result is a `Number`: the element of
        the loop's state. If a `tuple` instruction of the same computation makes the tuple, the
        result is the value of the operand that becomes the element. For any other tuple the result
        is None. `where` is the name of the computation with `line`. `arguments`, as in `value`, are
        the values of the computation's parameters, or None in a loop's condition or body."""
        index = re.search(r"\bindex=(\d+)", line.attributes)
        if index and isinstance(whole, State):
            return Number(0, int(index[1]))
        tuple_line = self.lines[where].get(line.operands[0])
        if not index or tuple_line is None or tuple_line.opcode != "tuple":
            return None
        return self.value(where, tuple_line.operands[int(index[1])], arguments)

    def trips(self, where: str, loop: Any) -> int:
        """Returns the number of trips of `loop`, an instruction of the computation `where`. Returns
        0 if the text does not tell.

        The loop's condition compares two numbers. Each of them is a constant, or grows by a
        constant in each trip.
        """
        names = dict(re.findall(r"\b(condition|body)=%([\w.-]+)", loop.attributes))
        if len(names) < 2 or not loop.operands:
            return 0
        test = self.value(names["condition"], self.roots[names["condition"]])
        if not isinstance(test, Compared):
            return 0
        left = self._start_and_step(where, loop, names["body"], test.left)
        right = self._start_and_step(where, loop, names["body"], test.right)
        if left is None or right is None:
            return 0
        # `_turns` takes the start and the step of the difference, the left side minus the right.
        return _turns(test.direction, left[0] - right[0], left[1] - right[1])

    def _start_and_step(
        self, where: str, loop: Any, body: str, side: Number
    ) -> tuple[int, int] | None:
        """Returns the value of one side of a loop's comparison before the first trip, and the
        number that each trip adds to this value. Returns None if the text does not tell.

        Args:
            where: the name of the computation that contains the loop.
            loop: the loop's instruction.
            body: the name of the computation that is the loop's body.
            side: the side of the comparison whose start and step are returned. It is a constant, or
                an element of the loop's state plus a constant.
        """
        if side.element is None:
            return side.plus, 0  # a constant
        state_before_loop = self.lines[where].get(loop.operands[0])
        state_after_trip = self.lines[body][self.roots[body]]
        if state_before_loop is None or state_before_loop.opcode != "tuple":
            return None
        if state_after_trip.opcode != "tuple":
            return None
        start = self.value(where, state_before_loop.operands[side.element])
        # A start with an `element` depends on the state of a loop around this one.
        if not isinstance(start, Number) or start.element is not None:
            return None
        # A trip must add a constant to the same element, or else the trips cannot be counted.
        next_value = self.value(body, state_after_trip.operands[side.element])
        if not isinstance(next_value, Number) or next_value.element != side.element:
            return None
        return start.plus + side.plus, next_value.plus


def counted(computations: dict[str, list[Any]], roots: Mapping[str, str]) -> dict[str, list[Any]]:
    """Returns the computations, with `trips` set in each loop whose text does not state its number
    of trips. The number is read from the loop's condition, and is 0 if the condition does not tell.
    `roots` has, for each computation, the name of the instruction that gives its result."""
    program = Computations(
        {name: {line.name: line for line in lines} for name, lines in computations.items()},
        roots,
        {},
    )

    def with_trips(where: str, line: Any) -> Any:
        """Returns the instruction `line` of the computation `where`. If `line` is a loop whose text
        does not state its trips, the returned instruction has its `trips` set."""
        if line.opcode != "while" or STATED in line.attributes:
            return line
        return line._replace(trips=program.trips(where, line))

    return {
        where: [with_trips(where, line) for line in lines] for where, lines in computations.items()
    }


def _sum(left: Any, right: Any, sign: int) -> Number | None:
    """Returns `left + sign * right`, where `sign` is 1 or -1. Returns None if `left` or `right` is
    no `Number`. A `Number` is a constant, plus at most one element of the loop's state. So the
    result is also None if two elements would be added, or an element would be subtracted.
    """
    if not isinstance(left, Number) or not isinstance(right, Number):
        return None
    if right.element is None:
        return Number(left.plus + sign * right.plus, left.element)
    if left.element is None and sign > 0:
        return Number(left.plus + right.plus, right.element)
    return None


def _compared(attributes: str, left: Any, right: Any) -> Compared | None:
    """Returns the comparison of two numbers, with the direction that is in `attributes`. Returns
    None if one of the two is no `Number`, or if this module does not handle the direction, such as
    "EQ"."""
    direction = re.search(r"\bdirection=(\w+)", attributes)
    if not isinstance(left, Number) or not isinstance(right, Number):
        return None
    if direction is None or direction[1] not in MIRRORED:
        return None
    return Compared(direction[1], left, right)


def _turns(direction: str, first: int, step: int) -> int:
    """Returns the number of trips of a loop; 0 if it would not end. `direction` is one of the keys
    of `MIRRORED`.

    The loop's condition compares two numbers. In trip t = 0, 1, ... the left one minus the right
    one is `first + t * step`. The loop goes on as long as this difference is below 0 ("LT"), at
    most 0 ("LE"), and so on. A loop without any trip also gives 0, but no program has such a loop:
    XLA removes a loop that is known to have no trip.
    """
    # -x < 0 is the same as x > 0.
    if direction in ("GT", "GE"):
        direction, first, step = MIRRORED[direction], -first, -step
    if direction == "NE":
        # The loop ends only if the steps meet 0 exactly.
        return -first // step if step and first % step == 0 and -first // step > 0 else 0
    if step <= 0:
        return 0
    # The first t >= 0 with first + t * step >= 0 ("LT"), or > 0 ("LE").
    return max(0, -(first // step) if direction == "LT" else -first // step + 1)
