"""Whether a pipeline's head adds up, over the stages, what the stages before the last one have in
the place of `x`.

The head runs on every stage, and only the last one has the model's output. A sum over stages is
right where it takes that one alone: behind a factor, or a choice, that is zero on all others. Both
are made of the stage's index, which is the only thing that a traced program leaves open, so they
are computed for every stage and looked at.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax import core
from jax.extend.core import ClosedJaxpr, JaxprEqn

from parallax import jaxprs
from parallax.collectives import types

# These change an array's type alone, and do not run outside of a map.
CASTS = frozenset({"copy_p", "optimization_barrier", "pbroadcast", "pcast", "pvary"})
SMALL = 4096  # elements: of a larger array the numbers are not looked at


class Terms(NamedTuple):
    """What is known of a value on a stage.

    Attributes:
        early: the arguments of which a stage before the last one has its own part in the value, one
            bit for each.
        is_number: whether it depends on no argument.
        indexed: whether it depends on the stage's index.
        by_index: of a number, what it is on the stage of an index; None where that is not to be
            had.
    """

    early: int = 0
    is_number: bool = False
    indexed: bool = False
    by_index: Callable[[int], Any] | None = None

    def __or__(self, other: tuple[Any, ...]) -> "Terms":
        """What is known of a function of both, or of either."""
        return Terms(self.early | other[0], self.is_number and other[1], self.indexed or other[2])


def added_up(program: ClosedJaxpr, axis: str) -> list[bool]:
    """For each argument of a program, whether a sum over `axis` takes the part of a device that is
    not the last one.

    A factor or a choice by the device's index is taken for a right one where its numbers are not to
    be had: it has more than `SMALL` elements, or others in each trip of a loop.
    """
    sums = _Sums(axis)
    constants = [
        Terms() if isinstance(value, core.Tracer) else sums.written(value)
        for value in program.consts
    ]
    sums.run(
        jaxprs.opened(program), [Terms(1 << i) for i in range(len(program.in_avals))], constants
    )
    return [bool(sums.added >> i & 1) for i in range(len(program.in_avals))]


class _Sums(jaxprs.Following):
    """Follows arguments to sums over the devices of an axis; `added` are those of which devices
    before the last one are in."""

    unknown = Terms()

    def __init__(self, axis: str):
        super().__init__(axis)
        self.added = 0
        self.stages = range(types.axis_size(axis) - 1)  # before the last one

    def written(self, value: Any) -> Terms:
        return Terms(is_number=True, by_index=lambda index: value)

    def plain(self, eqn: JaxprEqn, operands: list[Terms], aval: Any) -> Terms:
        name, differs = eqn.primitive.name, self.axis in types.axes_of_type(aval)
        if name == "axis_index":
            return self._index(eqn.params["axis_name"])
        joined = self.met(operands)
        if joined.early and self.is_sent(eqn):
            is_sum = "all_gather" not in name and not differs
            self.added |= joined.early if is_sum else 0
            return Terms()
        if all(each.is_number for each in operands) and _is_local(eqn):
            joined = self._number(eqn, operands, aval)
        elif name == "select_n" and operands[0].is_number and operands[0].indexed:
            joined = self._chosen(*operands)
        elif name == "mul" and any(map(self._is_zero, operands)):
            joined = Terms()
        # What is the same on all stages is no stage's own part, such as the condition by which
        # `cpu.sequence_after` waits.
        return joined if differs else joined._replace(early=0)

    def loop(self, body, constants, carry, sliced):
        """Numbers in a loop may be others in each trip."""

        def anew(values):
            return [value._replace(by_index=None) for value in values]

        return anew(super().loop(body, constants, anew(carry), anew(sliced)))

    def _index(self, axis: str) -> Terms:
        if axis == self.axis:
            return Terms(is_number=True, indexed=True, by_index=np.int32)
        # Along another axis of the stages the last device is looked at: the last stage is the last
        # along each.
        return self.written(np.int32(types.axis_size(axis) - 1))

    def _number(self, eqn: JaxprEqn, operands: Sequence[Terms], aval: Any) -> Terms:
        """What is known of a result of numbers, none of which is of an argument."""
        known = [each.by_index for each in operands if each.by_index]
        is_small = aval.size <= SMALL and len(known) == len(operands)
        computed = functools.partial(_computed, eqn, known) if is_small else None
        return Terms(
            is_number=True, indexed=any(each.indexed for each in operands), by_index=computed
        )

    def _before_the_last(self, value: Terms) -> list[np.ndarray]:
        """What a value is on each stage before the last one; nothing where that is not to be
        had."""
        return (
            [np.asarray(value.by_index(index)) for index in self.stages] if value.by_index else []
        )

    def _is_zero(self, factor: Terms) -> bool:
        return (
            factor.is_number
            and factor.indexed
            and not any(numbers.any() for numbers in self._before_the_last(factor))
        )

    def _chosen(self, which: Terms, *cases: Terms) -> Terms:
        """What a choice takes on the stages before the last one."""
        taken = {
            int(case) for numbers in self._before_the_last(which) for case in np.unique(numbers)
        }
        return self.met([cases[case] for case in taken])


def _is_local(eqn: JaxprEqn) -> bool:
    """Whether it is one operation with one result, and no collective."""
    return (
        len(eqn.outvars) == 1
        and not jaxprs.inner(eqn)
        and eqn.primitive.name not in jaxprs.COLLECTIVES
    )


def _computed(eqn: JaxprEqn, operands: Sequence[Callable[[int], Any]], index: int) -> Any:
    """The result of an equation on the stage of an index, computed now."""
    values = [operand(index) for operand in operands]
    if eqn.primitive.name in CASTS:
        return values[0]
    with core.eval_context():
        return eqn.primitive.bind(*values, **eqn.params)
