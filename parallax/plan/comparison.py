"""A plan beside the program: each prediction, what the compiled step has, and how far it is off."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax

from parallax.compiled import certificate
from parallax.plan.closed_form import Plan
from parallax.plan.units import Number

# Beside the program


class Comparison(NamedTuple):
    """A number that was predicted and what the compiled program has.

    Attributes:
        what: its name.
        predicted: bytes on a device, or sent by it.
        program: the same, of the program.
    """

    what: str
    predicted: Number
    program: Number

    @property
    def off(self) -> Number:
        """The relative difference; 0 where both are 0."""
        return (
            self.predicted / self.program - 1
            if self.program
            else math.copysign(bool(self.predicted), self.predicted)
        )


def compare(plan: Plan, compiled: jax.stages.Compiled) -> list[Comparison]:
    """Returns each prediction beside `memory_analysis()` and the collectives in the compiled step
    of this layout.

    Those of arguments and of bytes sent should be equal; the temporaries should be near.
    """
    memory = compiled.memory_analysis()
    assert memory is not None
    mesh = next(iter(jax.tree.leaves(compiled.input_shardings))).mesh
    along: dict[tuple[str, ...], int] = {}
    for entry in certificate.read(compiled, mesh):
        if (
            not entry.axes
        ):  # of groups of one device, which `jax.lax` leaves in the program; nothing is sent
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
    """Returns the comparisons as text."""
    head = f"{'bytes on each device':<28} {'predicted':>16} {'program':>16}  {'off':>7}"
    lines = [
        f"{row.what:<28} {row.predicted:>16,.0f} {row.program:>16,.0f}  {row.off:>+7.1%}"
        for row in rows
    ]
    return "\n".join([head, *lines])
