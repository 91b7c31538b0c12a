"""Estimates the time of one instruction of an accelerator's program. The time of messages between
devices is not included.

The text of a program may state the cost of an instruction: a TPU's compiler writes the clock cycles
that it estimates, and a Pallas kernel states its operations and bytes. Without such numbers, an
instruction on a GPU takes the time of its operations or of its bytes at the chip's rates, whichever
is longer. On a TPU, a copy without such numbers takes the time of its bytes, and any other
instruction without such numbers takes no time. The bytes are those that the instruction reads and
writes. If an instruction slices an array, or updates an array in place, these are only the bytes of
the slice or of the update.

`hardware.rate` is a chip's operations per second in 16 bits, and `full_rate` those in float32.
`efficiency` is the share of these rates that matrix products reach, and `bandwidth` the bytes per
second of the chip's memory. `hardware.clock` is the
cycles per second of a TPU, and 0 for other chips. `hardware.reached` has the shares of the memory's
rate and of the links' rate that programs reach. A `line` is an instruction; `line.result` is the
type of its result as text, such as "f32[8,16]{1,0}", and `line.called` has the computations (named
lists of instructions) that it runs.
"""

import math
import re

from parallax.compiled import hlo
from parallax.hardware import Hardware

# The attributes with a compiler's cycles, with a kernel's operations and bytes, and with the dims
# that a product sums over.
CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
KERNEL = re.compile(
    r'"?cost_estimate"?:\s*\{"flops":"?(\d+)"?,(?:"transcendentals":"?\d+"?,)?'
    r'"bytes_accessed":"?(\d+)"?'
)
CONTRACTED = re.compile(r'lhs_contracting_dim(?:ension)?s"?[=:][{\[]"?([\d,"]*)')
CALL = re.compile(r'custom_call_target="([^"]*)"')  # the name of the external function
# In a call of cuDNN's attention: the shape of the scores, [B, H, T, T], and the mask.
SCORES = re.compile(r'"intermediate_tensor_shape":\s*\{[^\]]*"dimensions":\s*\[([^\]]*)\]')
CAUSAL = re.compile(r'"mask_type":\s*"(?:PADDING_)?CAUSAL"')
# The number of matmuls in cuDNN's attention. Forward: the scores, and the weighted sum of the
# values. Backward: the scores again, and the gradients of the attention weights, queries, keys and
# values.
CUDNN_PRODUCTS = {"__cudnn$fmhaSoftmax": 2, "__cudnn$fmhaSoftmaxBackward": 5}
FREE = {  # operations that take no time
    *("parameter", "constant", "tuple", "get-tuple-element"),
    *("bitcast", "after-all", "partition-id", "replica-id"),
    *("add-dependency", "opt-barrier", "iota", "domain"),
}
SLICES = {"dynamic-slice", "slice", "gather"}


class Costs:
    """Estimates the run time, in seconds, of each instruction of a program."""

    def __init__(self, program: hlo.Module, hardware: Hardware, cores: int):
        """Takes the program, the chip, and the number of devices that share a chip (`cores`)."""
        self.program, self.hardware, self.cores = program, hardware, cores
        # `lines` has the instructions by name. `known` has, by name, the seconds of those that `of`
        # was called for.
        self.lines = {line.name: line for lines in program.computations.values() for line in lines}
        self.known: dict[str, float] = {}

    def of(self, line: hlo.Instruction) -> float:
        """Returns the seconds of one run of the instruction."""
        if line.name not in self.known:
            self.known[line.name] = self._estimate(line)
        return self.known[line.name]

    def _estimate(self, line: hlo.Instruction) -> float:
        """Returns the seconds of an instruction, by the rules at the top of this file. Raises
        `ValueError` if the text states cycles and the chip has no clock rate (`clock` is 0).
        """
        if cycles := CYCLES.search(line.attributes):
            if not self.hardware.clock:
                raise ValueError(
                    f"The compiled program gives the time of {line.name} in clock cycles, as "
                    "programs for TPUs do, so the estimate in seconds needs the clock rate of the "
                    f"chip; the record of {self.hardware.name} has none. Pass the chip that the "
                    "program was compiled for, with its `clock` in cycles per second."
                )
            return int(cycles[1]) / self.hardware.clock
        if kernel := KERNEL.search(line.attributes):
            return self._over_rates(int(kernel[1]) / self._rate(line), int(kernel[2]))
        # An asynchronous instruction counts once, at its `-start`; its `-done` takes no time.
        if line.opcode in FREE or line.opcode.endswith("-done"):
            return 0.0
        if line.opcode == "custom-call" and "AllocateBuffer" in line.attributes:
            return 0.0
        if self.hardware.clock:
            # A TPU's compiler estimates no cycles for copies, and none for instructions on a few
            # numbers. A copy reads and writes as many bytes as its result has. The other
            # instructions take no time here.
            copies = line.opcode in ("copy", "copy-start", "slice-start")
            return self._over_rates(0, 2 * self._written(line)) if copies else 0.0
        return self._over_rates(self._of_products(line), self.traffic(line))

    def _over_rates(self, at_peak: float | int, traffic: float | int) -> float:
        """Returns the seconds that operations or `traffic` bytes take, whichever take longer. The
        operations take `at_peak` seconds at the chip's full speed. The devices of a chip share its
        rates, so the time is multiplied by the number of devices of a chip (`cores`)."""
        # Only TPUs have a `clock`. There the times of most instructions are the compiler's cycles,
        # to which no share of the rate (`efficiency`) is applied. So none is applied to a kernel.
        efficiency = 1.0 if self.hardware.clock else self.hardware.efficiency
        seconds_of_operations = at_peak / efficiency
        seconds_of_traffic = traffic / (self.hardware.bandwidth * self.hardware.reached[0])
        return float(self.cores * max(seconds_of_operations, seconds_of_traffic))

    def _of_products(self, line: hlo.Instruction) -> float:
        """Returns the seconds of the `operations` of an instruction at the chip's full speed."""
        inner = [instruction for name, _ in line.called for instruction in self.program[name]]
        own = self._product(line) + self._attention(line)
        return own / self._rate(line) + float(sum(map(self._of_products, inner)))

    def _rate(self, line: hlo.Instruction) -> float:
        """Returns the chip's operations per second in the type of the instruction's first operand:
        `rate` for at most 16 bits, and `full_rate` for more."""
        left = self.lines.get(line.operands[0]) if line.operands else None
        array = hlo.ARRAY.search(left.result) if left else None
        if array is None or hlo.bits(array[1]) <= 16:
            return self.hardware.rate
        return self.hardware.full_rate

    def operations(self, line: hlo.Instruction) -> float:
        """Returns the floating-point operations of the matrix products in an instruction, and in
        the computations that it runs. The body of a loop counts for one trip."""
        inner = [instruction for name, _ in line.called for instruction in self.program[name]]
        own = self._product(line) + self._attention(line)
        return own + float(sum(map(self.operations, inner)))

    def _attention(self, line: hlo.Instruction) -> float:
        """Returns the operations of a call of cuDNN's attention, and 0 for any other instruction.
        For each score, a matmul takes 2 operations per element of the head's width. Under a causal
        mask half of the scores are computed."""
        called = CALL.search(line.attributes)
        products = CUDNN_PRODUCTS.get(called[1], 0) if called else 0
        scores = SCORES.search(line.attributes)
        if not products or not scores:
            return 0.0
        *_, head_width = _shapes(self.lines[line.operands[0]].result)[0]  # of the queries
        count = math.prod(int(dim) for dim in re.findall(r"\d+", scores[1]))
        share = 0.5 if CAUSAL.search(line.attributes) else 1.0
        return 2.0 * products * share * count * head_width

    def _product(self, line: hlo.Instruction) -> float:
        """Returns the operations of a matrix product: a multiplication and an addition for each
        term of each sum. Returns 0 for any other instruction. On a GPU a product may be a call of a
        library (`custom-call`)."""
        contracted = CONTRACTED.search(line.attributes)
        left = self.lines.get(line.operands[0]) if line.operands else None
        is_product = line.opcode == "dot" or (line.opcode == "custom-call" and contracted)
        if left is None or not is_product:
            return 0.0
        left_shapes = _shapes(left.result)
        if not left_shapes:
            return 0.0
        dims = [int(dim) for dim in re.findall(r"\d+", contracted[1])] if contracted else []
        terms = math.prod(left_shapes[0][dim] for dim in dims)
        # A call of a library returns a tuple of the product and scratch memory: the first array of
        # the result's type is the product.
        return 2.0 * math.prod(_shapes(line.result)[0]) * terms

    def traffic(self, line: hlo.Instruction) -> float:
        """Returns the bytes that an instruction reads and writes. A slice reads and writes the
        bytes of its result, so these count 2 times. An update in place reads and writes the bytes
        of the update, so these count 2 times.
        """
        if line.opcode in SLICES:
            return 2.0 * nbytes(line.result)
        if line.opcode == "dynamic-update-slice":
            return 2.0 * self._size(line.operands[1])  # the operands are (array, update, ...)
        fused = self._fused(line)
        if not fused:
            return float(nbytes(line.result) + sum(map(self._size, line.operands)))
        parameters = [inner for inner in fused if inner.opcode == "parameter"]
        return self._written(line) + sum(self._read(parameter, fused) for parameter in parameters)

    def _fused(self, line: hlo.Instruction) -> list[hlo.Instruction]:
        """Returns the instructions of a fusion; an empty list for any other instruction."""
        if line.opcode != "fusion" or not line.called:
            return []
        return self.program[line.called[0][0]]

    def _written(self, line: hlo.Instruction) -> float:
        """Returns the bytes that an instruction writes: its result. If an instruction inside a
        fusion updates an array in place, only the update counts. An update outside a fusion does
        not come here."""
        # The result of a start (`-start`) is a tuple (operands, results, ...); part 1 has the
        # results.
        result = hlo.parts(line.result)[1] if line.opcode.endswith("-start") else line.result
        size = float(nbytes(result))
        updates = [inner for inner in self._fused(line) if inner.opcode == "dynamic-update-slice"]
        updated = {inner.name for inner in updates}
        for inner in updates:
            # The operands are (array, update, ...).
            size += self._size(inner.operands[1])
            if inner.operands[0] not in updated:  # a second update of one array is in place too
                size -= nbytes(inner.result)
        # An update inside the fusion need not be its result, so `size` may be below 0.
        return max(size, 0.0)

    def _read(self, parameter: hlo.Instruction, fused: list[hlo.Instruction]) -> float:
        """Returns the bytes that a fusion reads of one parameter, an array. `fused` has the
        instructions in the fusion. A *user* is an instruction that has the parameter as an operand.
        If all users take slices of the parameter, only the slices are read. If all users write into
        the parameter in place, nothing of the parameter is read."""
        users = [inner for inner in fused if parameter.name in inner.operands]
        if users and all(_slices(user, parameter) for user in users):
            return float(sum(nbytes(user.result) for user in users))
        if users and all(_updates(user, parameter) for user in users):
            return 0.0
        return float(nbytes(parameter.result))

    def _size(self, name: str) -> int:
        """Returns the bytes of the result of the instruction `name`; 0 for an unknown name."""
        return nbytes(self.lines[name].result) if name in self.lines else 0


def _slices(user: hlo.Instruction, parameter: hlo.Instruction) -> bool:
    """Returns whether `user`, an instruction that has the array `parameter` as an operand, takes a
    slice of this array. The other operands of such an instruction are indices."""
    return user.opcode in SLICES and user.operands[0] == parameter.name


def _updates(user: hlo.Instruction, parameter: hlo.Instruction) -> bool:
    """Returns whether `user`, an instruction that has the array `parameter` as an operand, writes
    into this array in place and reads nothing of it."""
    return user.opcode == "dynamic-update-slice" and user.operands[0] == parameter.name


def nbytes(result: str) -> int:
    """Returns the bytes of an array of the type `result`, a text such as "f32[8,16]{1,0}"; for the
    type of a tuple, the sum over its arrays."""
    bits = ((hlo.bits(dtype), dims) for dtype, dims in hlo.ARRAY.findall(result))
    return sum(size * math.prod(int(k) for k in dims.split(",") if k) // 8 for size, dims in bits)


def _shapes(result: str) -> list[tuple[int, ...]]:
    """Returns the shapes of the arrays in a type, such as (8, 16) in "f32[8,16]{1,0}"."""
    return [tuple(int(k) for k in dims.split(",") if k) for _, dims in hlo.ARRAY.findall(result)]
