"""The most expensive instructions of a program for an accelerator, with the lines of source that they come from.

print(costly.table(costly.instructions(program.text, program.target.hardware)))
"""

from fractions import Fraction
from typing import NamedTuple

import jax

from parallax.compiled import hlo, seconds, sources
from parallax.hardware import Hardware


class Costly(NamedTuple):
    """An instruction.

    Attributes:
        seconds: in a whole step, without messages.
        times: how often it runs.
        name: in the program's text.
        opcode: of the program's text, as "fusion".
        result: its type.
        line: of source, as "file:line"; empty where the text does not say.
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
    """All instructions that take time, the most expensive first. A loop of unknown length counts as one trip.

    Args:
        compiled: the program, or its text.
        chip: the chip that it was compiled for.
        cores: devices that share a chip.
    """
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    assert text is not None
    program, line_of = hlo.module(text), sources.read(text)
    costs, found = seconds.Costs(program, chip, cores), []

    def inside(name: str, times: int | Fraction) -> None:
        for each in program[name]:
            if each.opcode in ("while", "conditional", "call"):
                for called, often in each.called:
                    inside(called, times * (often or each.counted or 1))
            elif (taken := int(times) * costs.of(each)) and not each.collective:
                found.append(
                    Costly(
                        taken,
                        int(times),
                        each.name,
                        each.opcode,
                        each.result,
                        line_of(each.attributes),
                    )
                )

    inside(program.entry, 1)
    return sorted(found, key=lambda each: -each.seconds)


def table(found: list[Costly], *, rows: int = 20) -> str:
    """The first of them as text, with their share of the sum of all."""
    total = sum(each.seconds for each in found)
    lines = [f"{1e3 * total:.4g} ms in {len(found)} instructions"]
    for each in found[:rows]:
        lines.append(
            f"{1e3 * each.seconds:9.4f} ms {each.seconds / total:6.1%} {each.times:>5} x  {each.opcode:<14} "
            f"{each.result.split('{')[0]:<28} {each.line or each.name}"
        )
    return "\n".join(lines)
