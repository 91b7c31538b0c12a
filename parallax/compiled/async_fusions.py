"""Finds the asynchronous collectives that a TPU's compiler writes as fusions.

libtpu may write an asynchronous collective as a fusion that starts it, fusions that compute while
it is under way, and a fusion that ends it. The computation of each of these fusions has a copy of
the collective. This module replaces the first fusion by the start of the collective, the last by
its end, and the copies by updates, so that other modules read one collective. A `line` is an
instruction. A *carrier* is a value that the start hands on to the end.
"""

import re
from collections.abc import Mapping
from typing import Any

COPY = '"async_collective_fusion_config"'  # each copy of the collective has it
START = 'custom_call_target="AsyncCollectiveStart"'
END = 'custom_call_target="AsyncCollectiveDone"'


def joined(computations: dict[str, list[Any]], roots: Mapping[str, str]) -> dict[str, list[Any]]:
    """Returns the computations, in which each asynchronous collective that is written as fusions is
    a start and an end.

    Args:
        computations: the instructions of each computation.
        roots: for each computation, the name of the instruction that gives its result.
    """
    fusions = [line for lines in computations.values() for line in lines if line.opcode == "fusion"]
    called = {name for line in fusions for name, _ in line.called}
    fused = {name: lines for name, lines in computations.items() if name in called}
    copies = {
        name: next((line for line in lines if line.collective and COPY in line.attributes), None)
        for name, lines in fused.items()
    }
    # A fusion that computes and starts too is not known, and its collective would be lost.
    copies = {
        name: copy
        for name, copy in copies.items()
        if copy
        and all(START not in line.attributes or line.name == roots[name] for line in fused[name])
    }
    if not copies:
        return computations
    return {
        name: [_update(line) for line in lines]
        if name in copies
        else _Chains(computations, roots, copies).joined(lines)
        for name, lines in computations.items()
    }


def _update(line: Any) -> Any:
    """Returns the instruction `line`; if it is a copy of an asynchronous collective, as an update,
    which sends nothing."""
    if not line.collective or COPY not in line.attributes:
        return line
    return line._replace(opcode=f"{line.collective}-update")


class _Chains:
    """The asynchronous collectives of one computation, each a chain of fusions."""

    def __init__(self, computations: Mapping[str, list[Any]], roots: Mapping[str, str], copies):
        """Takes the computations, the names of their results, and the copy of the collective in
        each computation that has one (`copies`)."""
        self.computations, self.roots, self.copies = computations, roots, copies
        self.start: dict[str, str] = {}  # by carrier, the start of its collective
        # For a fusion that hands carriers on: by its name and the index of an element of its
        # result, the start of the collective.
        self.handed_on: dict[tuple[str, int], str] = {}

    def joined(self, lines: list[Any]) -> list[Any]:
        """Returns the instructions, with the chains' fusions replaced."""
        return [self._joined(line) for line in lines]

    def _joined(self, line: Any) -> Any:
        """Returns the instruction that replaces `line`, and notes the carriers that it makes."""
        if line.opcode == "get-tuple-element":
            source, index = line.operands[0], re.search(r"\bindex=(\d+)", line.attributes)
            start = self.handed_on.get((source, int(index[1]) if index else 0))
            if start := start or self.start.get(source):
                self.start[line.name] = start
            return line
        name = next((name for name, _ in line.called), "") if line.opcode == "fusion" else ""
        if name not in self.copies:
            return line
        copy, inner = self.copies[name], {inner.name: inner for inner in self.computations[name]}
        root = inner[self.roots[name]]
        if START in root.attributes:
            self.start[line.name] = line.name
            # A start returns its operands and its results, but for that of an all-reduce.
            result = copy.result
            if copy.collective != "all-reduce":
                given = ", ".join(inner[operand].result for operand in copy.operands)
                result = f"({given}), ({result})"
            return line._replace(
                opcode=f"{copy.collective}-start", result=result, attributes=copy.attributes
            )
        if END in root.attributes:
            start = self.start.get(line.operands[0], line.operands[0])
            return line._replace(opcode=f"{copy.collective}-done", operands=[start])
        for index, element in enumerate(root.operands):
            number = inner[element].attributes.split(",")[0]
            if inner[element].opcode == "parameter" and line.operands[int(number)] in self.start:
                self.handed_on[line.name, index] = self.start[line.operands[int(number)]]
        # The fusion computes without the carriers: it does not wait for the collective.
        others = [operand for operand in line.operands if operand not in self.start]
        return line._replace(operands=others)
