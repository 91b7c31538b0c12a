"""What one instruction of a program for an accelerator takes, beside messages.

On a TPU the compiler writes the cycles that it estimates; a kernel (Pallas) states its operations and bytes. What states
nothing, such as a copy between memories, and everything on a GPU, takes its operations or its bytes over the chip's rates,
whichever is more. Bytes are those read and written: of an array that is cut or updated in place, the part.
"""

import math
import re

from parallax.compiled import hlo
from parallax.hardware import Hardware

CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
KERNEL = re.compile(
    r'"?cost_estimate"?:\s*\{"flops":"?(\d+)"?,(?:"transcendentals":"?\d+"?,)?"bytes_accessed":"?(\d+)"?'
)
CONTRACTED = re.compile(r'lhs_contracting_dim(?:ension)?s"?[=:][{\[]"?([\d,"]*)')
FREE = {
    *(
        "parameter",
        "constant",
        "tuple",
        "get-tuple-element",
        "bitcast",
        "after-all",
        "partition-id",
        "replica-id",
    ),
    *("add-dependency", "opt-barrier", "iota", "domain"),
}
CUTS = {"dynamic-slice", "slice", "gather"}


class Costs:
    """The seconds of a program's instructions."""

    def __init__(self, program: hlo.Module, hardware: Hardware, cores: int):
        """Of a device that is one of `cores` on a chip."""
        self.program, self.hardware, self.cores = program, hardware, cores
        self.lines = {line.name: line for lines in program.computations.values() for line in lines}
        self.known: dict[str, float] = {}

    def of(self, line: hlo.Instruction) -> float:
        """The seconds of one run."""
        if line.name not in self.known:
            self.known[line.name] = self._of(line)
        return self.known[line.name]

    def _of(self, line: hlo.Instruction) -> float:
        if found := CYCLES.search(line.attributes):
            return int(found[1]) / self.hardware.clock
        if found := KERNEL.search(line.attributes):
            return self._over_rates(int(found[1]), int(found[2]))
        if line.opcode in FREE or (
            line.opcode == "custom-call" and "AllocateBuffer" in line.attributes
        ):
            return 0.0
        if self.hardware.clock:  # on a TPU: what moves data and has no cycles; the compiler estimates none for a few numbers
            moves = line.opcode in ("copy", "copy-start", "slice-start")
            return self._over_rates(0, 2 * self._written(line)) if moves else 0.0
        return self._over_rates(self.operations(line), self.traffic(line))

    def _over_rates(self, operations: float | int, traffic: float | int) -> float:
        # What a TPU's kernel states is held against the full rate, as its compiler's own cycles are.
        efficiency = 1.0 if self.hardware.clock else self.hardware.efficiency
        return float(
            self.cores
            * max(
                operations / (self.hardware.rate * efficiency),
                traffic / (self.hardware.bandwidth * self.hardware.reached[0]),
            )
        )

    def operations(self, line: hlo.Instruction) -> float:
        """Floating-point operations of the products in an instruction."""
        inner = [each for name, _ in line.called for each in self.program[name]]
        return self._product(line) + float(sum(map(self.operations, inner)))

    def _product(self, line: hlo.Instruction) -> float:
        found = CONTRACTED.search(line.attributes)
        left = self.lines.get(line.operands[0]) if line.operands else None
        if left is None or not (line.opcode == "dot" or (line.opcode == "custom-call" and found)):
            return 0.0
        over = [int(k) for k in re.findall(r"\d+", found[1])] if found else []
        shapes = _shapes(left.result)
        return (
            2.0 * math.prod(_shapes(line.result)[0]) * math.prod(shapes[0][k] for k in over)
            if shapes
            else 0.0
        )

    def traffic(self, line: hlo.Instruction) -> float:
        """Bytes that an instruction reads and writes."""
        if line.opcode in CUTS:
            return 2.0 * nbytes(line.result)
        if line.opcode == "dynamic-update-slice":
            return 2.0 * self._size(line.operands[1])
        inner = self.program[line.called[0][0]] if line.opcode == "fusion" and line.called else []
        if not inner:
            return float(nbytes(line.result) + sum(map(self._size, line.operands)))
        return self._written(line) + sum(
            self._read(each, inner) for each in inner if each.opcode == "parameter"
        )

    def _written(self, line: hlo.Instruction) -> float:
        """Bytes of the result; where the result is an array updated in place, the bytes of the update."""
        result = hlo.parts(line.result)[1] if line.opcode.endswith("-start") else line.result
        size = float(nbytes(result))
        inner = self.program[line.called[0][0]] if line.opcode == "fusion" and line.called else []
        for each in inner:
            if each.opcode == "dynamic-update-slice":
                size -= nbytes(each.result) - self._size(each.operands[1])
        return max(size, 0.0)

    def _read(self, parameter: hlo.Instruction, inner: list[hlo.Instruction]) -> float:
        users = [each for each in inner if parameter.name in each.operands]
        if users and all(each.opcode in CUTS for each in users):
            return float(sum(nbytes(each.result) for each in users))
        if users and all(
            each.opcode == "dynamic-update-slice" and each.operands[0] == parameter.name
            for each in users
        ):
            return 0.0
        return float(nbytes(parameter.result))

    def _size(self, name: str) -> int:
        return nbytes(self.lines[name].result) if name in self.lines else 0


def nbytes(result: str) -> int:
    """Bytes of a type as the text writes it, of all arrays of a tuple."""
    bits = ((hlo.bits(dtype), dims) for dtype, dims in hlo.ARRAY.findall(result))
    return sum(size * math.prod(int(k) for k in dims.split(",") if k) // 8 for size, dims in bits)


def _shapes(result: str) -> list[tuple[int, ...]]:
    return [tuple(int(k) for k in dims.split(",") if k) for _, dims in hlo.ARRAY.findall(result)]
