"""Finds sums over devices that a loop only adds to a carry: one sum after the loop gives the same."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jax.extend.core import JaxprEqn

from parallax import jaxprs
from parallax.lint.values import VIEWS, Value

Part = tuple[
    str, int
]  # ("sum", k): the k-th sum in the loop's body; ("carry", i): its i-th carry as the trip begins

LINEAR = VIEWS | {
    "add",
    "add_any",
    "concatenate",
    "convert_element_type",
    "optimization_barrier",
    "reduce_sum",
    "replicated",
    "sub",
}


class Sum(NamedTuple):
    """A sum over devices in a loop's body: the type of what is summed, the axes and the line."""

    aval: Any
    axes: frozenset[str]
    where: str


@dataclass
class Loop:
    """A loop whose body is being read: its depth, its trips (None: not known), its sums, and the parts used otherwise."""

    depth: int
    trips: int | None
    sums: list[Sum] = field(default_factory=list)
    spoiled: set[Part] = field(default_factory=set)

    def summed(self, value: Value, aval: Any, axes: frozenset[str], where: str) -> frozenset[Part]:
        """Note a sum of `value`; its result is a part of what the loop adds up."""
        if any(kind == "carry" for kind, _ in value.parts):
            self.spoil([value])
        self.sums.append(Sum(aval, axes, where))
        return value.parts | {("sum", len(self.sums) - 1)}

    def carried(self, values: Sequence[Value]) -> list[Value]:
        """The carries as a trip begins."""
        return [value._replace(parts=frozenset({("carry", i)})) for i, value in enumerate(values)]

    def through(self, eqn: JaxprEqn, values: Sequence[Value]) -> frozenset[Part]:
        """The parts that the result of an equation is a linear function of. Parts that it uses otherwise are spoiled."""
        parts = frozenset().union(*(value.parts for value in values))
        if parts and not self._is_linear(eqn, values, parts):
            self.spoil(values)
            return frozenset()
        return parts

    def spoil(self, values: Sequence[Value]) -> None:
        """Note that the parts of these are used for something that is no sum over the trips."""
        self.spoiled.update(part for value in values for part in value.parts)

    def only_added(self, carries: Sequence[Value], stacked: Sequence[Value]) -> list[Sum]:
        """The sums that did nothing in a trip but to be added to a carry, given what the body gives back."""
        self.spoil(stacked)
        for i, value in enumerate(carries):
            if [part for part in value.parts if part[0] == "carry"] != [("carry", i)]:
                self.spoil([value])
        # A carry that is used otherwise takes with it all that is added to it.
        added = {
            part for value in carries if not value.parts & self.spoiled for part in value.parts
        }
        return [each for k, each in enumerate(self.sums) if ("sum", k) in added - self.spoiled]

    def _is_linear(self, eqn: JaxprEqn, values: Sequence[Value], parts: frozenset[Part]) -> bool:
        name = eqn.primitive.name
        tagged = [bool(value.parts) for value in values]
        if name == "mul":
            return sum(tagged) == 1 and values[tagged.index(False)].trip < self.depth
        if name == "div":
            return tagged == [True, False] and values[1].trip < self.depth
        axes = frozenset().union(*(self.sums[k].axes for kind, k in parts if kind == "sum"))
        if name == "select_n":  # a mask that is the same on all devices commutes with their sum
            return not tagged[0] and not values[0].differs & axes
        if name == "scatter-add":
            return not tagged[1] and not values[1].differs & axes
        return name in LINEAR and all(jaxprs.is_float(variable.aval) for variable in eqn.outvars)
