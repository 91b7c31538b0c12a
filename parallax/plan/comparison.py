"""Compares a plan with the compiled program. For each prediction, gives the number that the
compiled step has, and the relative difference."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax

from parallax.compiled import certificate
from parallax.plan.closed_form import Plan
from parallax.plan.units import Number


class Comparison(NamedTuple):
    """A predicted number beside the number in the compiled program.

    Attributes:
        what: the name of the number.
        predicted: the bytes in a device's memory, or the bytes that a device sends, by the plan.
        program: the number of these bytes in the compiled program.
    """

    what: str
    predicted: Number
    program: Number

    @property
    def off(self) -> Number:
        """The relative difference, above 0 if too much was predicted. If the prediction and the
        program's number are both 0, the difference is 0. If only the program's number is 0, the
        difference is 1, with the sign of the prediction."""
        return (
            self.predicted / self.program - 1
            if self.program
            else math.copysign(bool(self.predicted), self.predicted)
        )


def compare(plan: Plan, compiled: jax.stages.Compiled) -> list[Comparison]:
    """Returns each prediction beside the number in the compiled step of the same layout: the bytes
    of the arguments, of the temporaries, and of the messages along each set of axes.

    The program's numbers come from `compiled.memory_analysis()` and from the collectives in the
    program.

    For arguments and messages, the prediction and the number in the program should be equal. For
    temporaries they should be near each other.
    """
    memory = compiled.memory_analysis()
    assert memory is not None
    # All arguments are placed on one mesh, so that of any argument will do.
    mesh = next(iter(jax.tree.leaves(compiled.input_shardings))).mesh
    along: dict[tuple[str, ...], int] = {}
    for entry in certificate.read(compiled, mesh):
        # The program may have collectives of `jax.lax` over one device. They have no axes, and
        # they send nothing.
        if not entry.axes:
            continue
        along[entry.axes] = along.get(entry.axes, 0) + entry.bytes
    sent = {axes: size for axes, size in plan.sent.items() if axes}
    pairs = {axes: (sent.get(axes, 0), along.get(axes, 0)) for axes in {**sent, **along}}
    return [
        Comparison("arguments", plan.memory.arguments, memory.argument_size_in_bytes),
        Comparison("temporaries", plan.memory.temporaries, memory.temp_size_in_bytes),
        *(Comparison(f"sent along {' x '.join(axes)}", *pair) for axes, pair in pairs.items()),
    ]


def compared(rows: Sequence[Comparison]) -> str:
    """Returns the comparisons as text: a line of titles, then one line for each comparison."""
    head = f"{'bytes on each device':<28} {'predicted':>16} {'program':>16}  {'off':>7}"
    lines = [
        f"{row.what:<28} {row.predicted:>16,.0f} {row.program:>16,.0f}  {row.off:>+7.1%}"
        for row in rows
    ]
    return "\n".join([head, *lines])
