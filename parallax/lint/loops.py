"""Finds sums over devices that a loop only adds to a carry: one sum after the loop would give the
same result.

For example, a loop of `carry = carry + psum(x)` can add up `x`, with one `psum` after the loop. A
loop of `carry = carry + psum(x) ** 2` needs the sum in each iteration.

A `Value` records what the lint knows about one value (array) of the program. `parts` are the sums
and carries of which the value is a linear function: `carry + psum(x)` has two parts, the carry at
the beginning of the iteration and the sum. `differs` are the axes along which the value differs
between devices. `trip` is the depth of the innermost loop that changes the value, or 0 if no loop
does. A part is *spoiled* if the loop's body uses the part for anything but an addition that makes a
new carry, or if the condition of a `while` reads it. A sum that is spoiled stays in the loop.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jax.extend.core import JaxprEqn

from parallax import jaxprs
from parallax.lint.values import VIEWS, Value

# A value of a loop's body may be a linear function of parts: ("sum", k) is the k-th sum over
# devices in the body, and ("carry", i) is the i-th carry at the beginning of the iteration.
LoopPart = tuple[str, int]

# Operations that are linear functions of all their operands. So they commute with a sum over
# devices and over iterations.
_LINEAR = VIEWS | {
    *("add", "add_any", "concatenate", "convert_element_type", "optimization_barrier"),
    *("reduce_sum", "replicated", "sub"),
}


class Sum(NamedTuple):
    """A sum over devices in a loop's body.

    Attributes:
        aval: the type of the sum's operand.
        axes: the mesh axes over which the sum goes.
        where: the line of the user's program that makes the sum.
    """

    aval: Any
    axes: frozenset[str]
    where: str


@dataclass
class Loop:
    """A loop whose body is being read.

    Attributes:
        depth: the number of loops around the body, this one included.
        trips: the number of iterations; None if it is not known.
        sums: the sums over devices in the loop's body.
        spoiled: the sums over devices, and the carries at the beginning of an iteration, that the
            body uses for anything but an addition that makes a new carry; and the carries that the
            condition of a `while` reads.
    """

    depth: int
    trips: int | None
    sums: list[Sum] = field(default_factory=list)
    spoiled: set[LoopPart] = field(default_factory=set)

    def summed(
        self, value: Value, aval: Any, axes: frozenset[str], where: str
    ) -> frozenset[LoopPart]:
        """Notes a sum of `value` over devices, and returns the `parts` of the sum's result: the
        `parts` of `value`, and the noted sum itself. `only_added` decides later whether the sum
        could stand after the loop. `aval` is the type of `value`, and `where` the source line of
        the sum.
        """
        # If `value` depends on a carry, each iteration needs this carry's value, so the old carry
        # is spoiled. The new sum stays in the loop too: the `parts` of its result have the spoiled
        # carry, and `only_added` leaves out all sums that have a spoiled part beside them.
        if any(kind == "carry" for kind, _ in value.parts):
            self.spoil([value])
        self.sums.append(Sum(aval, axes, where))
        return value.parts | {("sum", len(self.sums) - 1)}

    def carried(self, values: Sequence[Value]) -> list[Value]:
        """Returns the facts `values` about the carries, with the `parts` that a carry has at the
        beginning of an iteration. Nothing has been added to carry i yet, so ("carry", i) is its
        only part."""
        return [value._replace(parts=frozenset({("carry", i)})) for i, value in enumerate(values)]

    def through(self, eqn: JaxprEqn, values: Sequence[Value]) -> frozenset[LoopPart]:
        """Returns the sums and carries (`parts`) of which an equation's result is a linear
        function.

        If the result is no linear function of the sums and carries of its operands, the returned
        set is empty, and all these sums and carries are noted as `spoiled`.
        """
        parts = frozenset().union(*(value.parts for value in values))
        if parts and not self._lets_sums_move(eqn, values, parts):
            self.spoil(values)
            return frozenset()
        return parts

    def spoil(self, values: Sequence[Value]) -> None:
        """Marks the sums and carries in the `parts` of these values as spoiled: the loop's body
        uses them for something other than an addition that makes a new carry."""
        self.spoiled.update(part for value in values for part in value.parts)

    def only_added(self, carries: Sequence[Value], stacked: Sequence[Value]) -> list[Sum]:
        """Returns the sums that were only added to a carry.

        `carries` and `stacked` are the results of the body: the new carries, and the outputs that
        the loop stacks. A sum in a stacked output is not returned: after the loop, one sum of the
        whole stack would send as many bytes as the sums in the loop.
        """
        self.spoil(stacked)
        # The new carry i must be the carry i before the iteration plus sums, without other carries.
        for i, value in enumerate(carries):
            if [part for part in value.parts if part[0] == "carry"] != [("carry", i)]:
                self.spoil([value])
        added = {
            part for value in carries if not value.parts & self.spoiled for part in value.parts
        }
        # A carry that is used in another way needs its sums in each iteration, so these sums do not
        # count, even if another carry only adds them up.
        needed = {
            part
            for i, value in enumerate(carries)
            if ("carry", i) in self.spoiled
            for part in value.parts
        }
        moved = added - self.spoiled - needed
        return [total for k, total in enumerate(self.sums) if ("sum", k) in moved]

    def _lets_sums_move(
        self, eqn: JaxprEqn, values: Sequence[Value], parts: frozenset[LoopPart]
    ) -> bool:
        """Returns whether an equation in the loop's body allows the sums over devices in `parts` to
        be moved after the loop. `values` are the facts about the equation's operands. `parts` has
        each sum and each carry on which at least one operand depends linearly. The equation's
        result must be a linear function of `parts` too, and the equation's factors and masks must
        allow the move.

        A factor that is the same in all iterations can be applied after the sum that follows the
        loop. A mask that is the same on all devices can be applied before that sum, in each
        iteration.
        """
        name = eqn.primitive.name
        has_parts = [bool(value.parts) for value in values]
        # `trip` is the depth of the innermost loop that changes the factor. If it is less than the
        # depth of this loop, the factor is the same in all iterations of this loop.
        if name == "mul":
            return sum(has_parts) == 1 and values[has_parts.index(False)].trip < self.depth
        if name == "div":
            return has_parts == [True, False] and values[1].trip < self.depth
        axes = frozenset().union(*(self.sums[k].axes for kind, k in parts if kind == "sum"))
        # The first operand of a `select_n` is the mask.
        if name == "select_n":
            return not has_parts[0] and not values[0].differs & axes
        if name == "scatter-add":  # the second operand has the places
            return not has_parts[1] and not values[1].differs & axes
        # A cast to integers rounds, which is not linear.
        return name in _LINEAR and all(jaxprs.is_float(variable.aval) for variable in eqn.outvars)
