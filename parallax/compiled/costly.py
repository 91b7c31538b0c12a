"""Finds the most expensive instructions of an accelerator's program, with their source lines.

print(costly.table(costly.instructions(program.text, program.target.hardware)))

A *computation* is a named list of instructions, such as a loop's body. The `called` of an
`hlo.Instruction` has the computations that the instruction runs, each with its number of runs. For
the body of a loop, this is the number of iterations (trips), or 0 if the number is unknown.

A loop with a name such as "head.3_of_8" stands inside an outer loop, and has 3 trips in 8 trips of
the outer loop. The `counted` of this loop's `hlo.Instruction` is the mean number of trips, 3/8. A
`counted` of 0 means that the mean is unknown, since the loop has no such name.
"""

import itertools
from collections.abc import Iterable
from fractions import Fraction
from typing import NamedTuple

import jax

from parallax.compiled import hlo, seconds, source_lines
from parallax.hardware import Hardware


class Costly(NamedTuple):
    """An instruction that takes time.

    Attributes:
        seconds: the time of all runs of the instruction in a step.
        times: how often the instruction runs in a step.
        name: the instruction's name in the program's text.
        opcode: the instruction's operation, such as "fusion".
        result: the type of the instruction's result, such as "f32[8,16]{1,0}"; for a tuple, the
            types of its elements without the parentheses around them.
        line: the source line, as "file:line"; "" if it is unknown.
    """

    seconds: float
    times: int
    name: str
    opcode: str
    result: str
    line: str


def instructions(
    compiled: jax.stages.Compiled | str, chip: Hardware, *, cores: int = 1
) -> list[Costly]:
    """Returns all instructions that take time, except collectives, the most expensive first.

    A loop of unknown length counts as one trip. For a conditional, only the slowest branch counts.

    Args:
        compiled: the program, or its text.
        chip: the chip that the program was compiled for.
        cores: the number of devices that share a chip.

    Raises:
        ValueError: the program states times in cycles, and `chip` has no clock rate.
    """
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    assert text is not None
    program, line_of = hlo.module(text), source_lines.read(text)
    costs = seconds.Costs(program, chip, cores)

    def of_computation(name: str, times: int | Fraction) -> list[Costly]:
        """Returns the costs of the instructions of a computation that runs `times` times in a step.

        `times` may be a fraction such as 3/8, since for some loops only the mean number of trips is
        known. The number of runs of an instruction is rounded down.
        """
        expensive = []
        for line in program[name]:
            # These three take no time of their own: the instructions that they run are listed. A
            # fusion is listed as one instruction: its time (`costs.of`) includes the instructions
            # in it.
            if line.opcode in ("while", "conditional", "call"):
                inner = [
                    of_computation(called, times * (trips or line.counted or 1))
                    for called, trips in line.called
                ]
                if line.opcode == "conditional":  # only one branch runs: the slowest counts
                    inner = [max(inner, key=_total)]
                expensive += itertools.chain(*inner)
            elif (taken := int(times) * costs.of(line)) and not line.collective:
                source = line_of(line.attributes)
                expensive.append(
                    Costly(taken, int(times), line.name, line.opcode, line.result, source)
                )
        return expensive

    expensive = of_computation(program.entry, 1)
    return sorted(expensive, key=lambda instruction: -instruction.seconds)


def _total(expensive: Iterable[Costly]) -> float:
    """Returns the sum of the seconds of the instructions in `expensive`."""
    return sum(instruction.seconds for instruction in expensive)


def table(expensive: list[Costly], *, rows: int = 20) -> str:
    """Returns a text with a line for each of the first `rows` instructions: the instruction's time,
    its share of the time of all instructions in `expensive`, its number of runs, the type of its
    result, and its source line."""
    total = _total(expensive)
    lines = [f"{1e3 * total:.4g} ms in {len(expensive)} instructions"]
    for instruction in expensive[:rows]:
        milliseconds = f"{1e3 * instruction.seconds:9.4f} ms {instruction.seconds / total:6.1%}"
        # Without layouts. Of a tuple only the first array's type is shown.
        first, *others = hlo.parts(instruction.result)
        result = first.split("{")[0] + (", ..." if others else "")
        lines.append(
            f"{milliseconds} {instruction.times:>5} x  {instruction.opcode:<14} {result:<28} "
            f"{instruction.line or instruction.name}"
        )
    return "\n".join(lines)
