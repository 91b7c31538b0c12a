"""Reads the text of a compiled program as data: the instructions of the program, and for each
collective its number of runs and its devices.

XLA numbers the devices in the order of the program's mesh. It writes groups of devices in four
notations, and this module reads all four. A *computation* is a named list of instructions: for
example, the body of a loop. An instruction names the computations that it runs. An asynchronous
collective is a pair of instructions, `-start` and `-done`.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import numpy as np

from parallax.compiled import async_fusions, loop_counts, slices
from parallax.jaxprs import COUNTED

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "collective-permute",
    "all-to-all",
    "collective-broadcast",
    "ragged-all-to-all",
)
COLLECTIVE = re.compile(rf"({'|'.join(KINDS)})(-start)?$")
COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) .*\{$")
INSTRUCTION = re.compile(r"^\s+(ROOT )?%([\w.-]+) = (.*)$")
# The computations that an instruction runs, by the role of each.
CALLED = re.compile(
    r"\b(body|condition|to_apply|calls|called_computations|branch_computations|true_computation|"
    r"false_computation)="
    r"\{?((?:%[\w.-]+(?:, )?)+)"
)
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")  # the type and the dims
GROUPS = re.compile(r"\b(?:replica_groups|source_target_pairs)=(.*?)(?=, (?!device_ids)[\w-]+=|$)")
# The notations that `_iota` and `_named` read.
IOTA = re.compile(r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?")
NAMED = re.compile(r"mesh\[(.*?)\](?:, device_ids=\((.*)\))? \{(.*)\}")
NAMED_AXIS = re.compile(r"'([^']+)'(?:=(\d+)|:\((\d+)\)(\d+))?")


class Op(NamedTuple):
    """One array that a collective returns on each device.

    Attributes:
        kind: XLA's name of the collective, such as "all-reduce".
        dtype: XLA's name of the array's type, such as "f32".
        shape: the shape of the array on one device.
        bytes: the bytes of the array on one device.
    """

    kind: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int


class Instruction(NamedTuple):
    """A line of a compiled module.

    Attributes:
        name: the name of the instruction's result.
        result: the type of its result, such as "f32[8,16]{1,0}"; for a tuple, the types of its
            elements without the parentheses around them.
        opcode: the operation, such as "dot".
        operands: the names of the instruction's operands, and of other instructions that it waits
            for.
        attributes: the text after the operands.
        trips: the number of iterations (trips) of a loop, read from its condition. It is 0 for a
            loop of unknown length, for a loop whose `attributes` state the number, and for any
            instruction that is no loop.
    """

    name: str
    result: str
    opcode: str
    operands: list[str]
    attributes: str
    trips: int = 0

    @property
    def collective(self) -> str | None:
        """The kind of collective, or None. The `-done` of an asynchronous collective gives None."""
        match = COLLECTIVE.match(self.opcode)
        return match[1] if match else None

    @property
    def ops(self) -> list[Op]:
        """The arrays that a collective returns."""
        result = self.result
        # A start (`-start`) returns the tuple (operands, results, context words). `parts` splits
        # it, and part 1 has the results. Only the start of an all-reduce returns just its results.
        if self.opcode.endswith("-start") and self.opcode != "all-reduce-start":
            result = parts(result)[1]
        kind = self.collective or ""
        ops = []
        for dtype, dims in ARRAY.findall(result):
            shape = tuple(int(dim) for dim in dims.split(",") if dim)
            ops.append(Op(kind, dtype, shape, math.prod(shape) * bits(dtype) // 8))
        return ops

    @property
    def called(self) -> list[tuple[str, int]]:
        """The name of each computation that the instruction runs, in a pair with the number of
        runs. The number is 0 if it is unknown."""
        # The start and the end of an asynchronous instruction both name its computations. They
        # count at the start only.
        if self.opcode.endswith(("-done", "-update")):
            return []
        # If the text does not state a loop's number of trips, `self.trips` has the number that
        # `module` read from the loop's condition, or 0.
        stated = TRIPS.search(self.attributes)
        trips = int(stated[1]) if stated else self.trips
        # A loop's condition is also evaluated once after the last trip. An unknown number stays 0.
        # All other computations run once; their key in the text is a word such as "calls".
        times = {"body": trips, "condition": trips and trips + 1}
        return [
            (name, times.get(key, 1))
            for key, names in CALLED.findall(self.attributes)
            for name in _names(names)
        ]

    @property
    def counted(self) -> Fraction:
        """The mean number of iterations (trips) of a loop in one iteration of the loop around it.
        It may be a fraction, since some iterations of the outer loop may skip this loop. It is 0
        unless `jaxprs.counted_scope` wrote the number into the loop's name when the program was
        traced.
        """
        # In a name such as "head.3_of_8", group 2 is 3, the trips of this loop in all trips of the
        # outer loop, and group 3 is 8, the trips of the outer loop.
        scope = COUNTED.search(self.attributes)
        return Fraction(int(scope[2]), int(scope[3])) if scope else Fraction(0)

    @property
    def groups(self) -> list[np.ndarray] | None:
        """The groups of devices that exchange data, each an array `[devices]` of device numbers.

        Each group of a permute is a pair (sender, receiver), and a permute that sends nothing has
        no group. None stands for one group of all devices.
        """
        match = GROUPS.search(self.attributes)
        text = match[1] if match else ""
        if text in ("{}", ""):
            return [] if self.collective == "collective-permute" else None
        if text.startswith("mesh"):
            return list(_named(text))
        if text.startswith("["):
            return list(_iota(text))
        # A list such as {{0,1},{2,3}}
        return [np.array(group.split(","), int) for group in re.findall(r"\{([\d,]+)\}", text)]


class Module(NamedTuple):
    """A compiled program.

    Attributes:
        computations: the instructions of each computation by its name, in the order of the text.
        entry: the name of the computation that runs first.
    """

    computations: dict[str, list[Instruction]]
    entry: str

    def __getitem__(self, name):
        """Returns the instructions of the computation `name`, or an empty list if there is none."""
        return self.computations.get(name, [])


class Run(NamedTuple):
    """A collective of a program, and how often it runs.

    Attributes:
        instruction: the collective.
        times: the number of runs over all trips of the loops around it.
        conditional: whether the collective is in a branch, so that a run may skip it.
        unbounded: whether the collective is in a loop of unknown length, which counts as one trip.
    """

    instruction: Instruction
    times: int
    conditional: bool
    unbounded: bool


def collectives(f: Callable[..., Any], *arguments: Any) -> list[Op]:
    """Returns the collectives of `f`, compiled for `arguments` (arrays or their shapes)."""
    return parse(jax.jit(f).lower(*arguments).compile())


def parse(compiled: jax.stages.Compiled | str) -> list[Op]:
    """Returns the collectives of a compiled program or of its text. A collective that runs k times
    is k times in the list.

    Raises:
        ValueError: a collective is in a loop of unknown length.
    """
    ops: list[Op] = []
    for run in runs(module(compiled)):
        if run.unbounded:
            raise ValueError(
                "hlo.parse needs to know how often each collective runs; "
                f"{run.instruction.name} stands in a loop whose number of trips XLA does not know. "
                "Use hlo.runs, which marks such collectives."
            )
        ops += run.instruction.ops * run.times
    return ops


def module(compiled: jax.stages.Compiled | str, numbers: Sequence[int] = ()) -> Module:
    """Returns the instructions of a compiled program or of its text, by computation.

    In the text, a computation begins with a line that ends in `{`. The indented lines after it,
    `name = definition`, are its instructions.

    Args:
        compiled: the program, or its text.
        numbers: for a program for several TPU slices, the numbers of all devices in the order of
            the program's mesh, as `slices.numbers` returns them. By default, the mesh
            is assumed to have the devices of the first slice, then those of the second, and so on,
            and a collective inside a slice is read for one slice only.

    Raises:
        ValueError: a collective between slices cannot be read, or the program is for other devices
            than `numbers`.
    """
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    assert text is not None
    computations: dict[str, list[Instruction]] = {}
    entry, lines, computation = "", [], ""
    roots: dict[str, str] = {}  # by computation, the instruction that gives its result
    for line in text.splitlines():
        if header := COMPUTATION.match(line):  # "ENTRY" or nothing, and the name
            computation = header[2]
            lines = computations.setdefault(computation, [])
            entry = computation if header[1] else entry
        elif parsed := INSTRUCTION.match(line):
            root, name, definition = parsed.groups()
            if root:
                roots[computation] = name
            lines.append(_instruction(name, definition))
    # `counted` reads the trips of loops from their conditions. The first `joined` makes one
    # collective of the fusions of an asynchronous one. The second replaces sends and receives
    # between TPU slices by collectives; it reads the number of devices of a slice from `text`.
    computations = async_fusions.joined(loop_counts.counted(computations, roots), roots)
    return Module(slices.joined(computations, text, numbers), entry)


def _instruction(name: str, definition: str) -> Instruction:
    """Returns the instruction of a line `name = definition`. The definition is the text `type
    opcode(operands), attributes`; the type of a tuple is in parentheses."""
    # `_closed` returns the text inside the first pair of parentheses, and the text after it.
    if definition.startswith("("):
        result, call = _closed(definition)
    else:
        result, call = definition.split(" ", 1)
    opcode, operands_and_attributes = call.strip().split("(", 1)
    operands, attributes = _closed("(" + operands_and_attributes)
    # The value of a constant and the number of a parameter stand in the place of operands;
    # `loop_counts` reads them from the attributes.
    if opcode in ("constant", "parameter"):
        attributes = operands + attributes
    # An instruction may wait for others without reading their results. They count as operands too.
    waits_for = re.findall(r"control-predecessors=(\{[^}]*\})", attributes)
    return Instruction(name, result, opcode, _names(operands + "".join(waits_for)), attributes)


def runs(program: Module) -> Iterator[Run]:
    """Yields a `Run` for each collective in the text of a program, in the order of the text. The
    branches of a conditional all count, since the text does not tell which branch runs."""

    def inside(
        name: str, times: int | Fraction, conditional: bool, unbounded: bool
    ) -> Iterator[Run]:
        """Yields the collectives of the computation `name`, which runs `times` times. `conditional`
        says that the computation is in a branch, so it may run less often than `times`. `unbounded`
        says that it is in a loop of unknown length, so it may run more often than `times`.
        """
        for instruction in program[name]:
            if instruction.collective:
                # A mean number of trips may be a fraction: the runs are rounded down.
                yield Run(instruction, int(times), conditional, unbounded)
                continue
            branch = conditional or instruction.opcode == "conditional"
            # The text states the number of runs (`stated`), or the loop's name gives a mean
            # (`counted`); if both are 0, the number is unknown and counts as one.
            for called, stated in instruction.called:
                runs_of_it = stated or instruction.counted
                yield from inside(
                    called, times * (runs_of_it or 1), branch, unbounded or not runs_of_it
                )

    return inside(program.entry, 1, False, False)


def unordered(compiled: jax.stages.Compiled | str) -> list[tuple[Instruction, Instruction]]:
    """Returns pairs of instructions whose collectives may run at the same time. The first of a pair
    is a loop, a call or a conditional that contains collectives. The second is a later instruction
    that is or contains a collective, and that does not wait for the end of the first.

    While threads still run a loop, XLA's CPU backend may begin a later instruction that does not
    use the loop's results. A collective of the loop and a collective of the later instruction can
    then meet in one rendezvous, and the process aborts: "Id can't be larger than the number of
    participating threads". `cpu.sequence_after` makes the later instruction wait for the loop.
    """
    program = module(compiled)

    def communicates(instruction: Instruction) -> bool:
        """Returns whether an instruction is a collective, or runs a computation that has one."""
        return bool(instruction.collective) or any(
            communicates(inner) for name, _ in instruction.called for inner in program[name]
        )

    pairs = []
    for lines in program.computations.values():
        # For each instruction, all instructions that it waits for, directly or through others.
        before: dict[str, frozenset[str]] = {}
        containers: list[Instruction] = []  # the instructions so far that contain collectives
        for line in lines:
            operands = [name for name in line.operands if name in before]
            before[line.name] = frozenset(operands).union(*(before[name] for name in operands))
            if communicates(line):
                unfinished = [first for first in containers if first.name not in before[line.name]]
                pairs += [(first, line) for first in unfinished]
                if not line.collective:
                    containers.append(line)
    return pairs


def _iota(text: str) -> np.ndarray:
    """Returns the device numbers `[groups, devices]` of a text such as `[4,2]<=[2,2,2]T(0,2,1)`.

    The numbers 0, 1, ... fill an array of the shape on the right, [2,2,2]. The array is transposed
    by T, and then reshaped to the shape on the left, [4,2]. Without `<=` there is only one shape:
    the numbers fill it, and the array is transposed and not reshaped.
    """
    shape, source, order = IOTA.match(text).groups()  # type: ignore[union-attr]
    ids = np.arange(math.prod(_numbers(shape))).reshape(_numbers(source or shape))
    if order:
        ids = ids.transpose(_numbers(order))
    return ids.reshape(_numbers(shape)) if source else ids


def _numbers(text: str) -> tuple[int, ...]:
    """Returns the numbers of a text such as "4,2"."""
    return tuple(int(number) for number in text.split(","))


def _named(text: str) -> np.ndarray:
    """Returns the device numbers `[groups, devices]` of a text such as
    `mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a':(1)2}`. The text defines a mesh. The braces
    name the axes, or parts of axes, along which the devices of a group differ.

    The array of the mesh's device numbers has one dim for each axis. For `'a':(2)4`, the dim of
    axis a is split into the dims (2, 4, size of a / 8), and the named part is the dim of size 4.
    For `'a'` alone, the named part is the whole dim. The dims of all named parts are moved to the
    end, in the order of the text, and joined into `devices`. The other dims become `groups`.
    """
    sizes, listed, names = NAMED.match(text).groups()  # type: ignore[union-attr]
    shape = {name: int(size) for name, size, _, _ in NAMED_AXIS.findall(sizes)}
    if listed is None:
        ids = np.arange(math.prod(shape.values()))
    else:
        ids = _iota(listed) if listed.startswith("[") else np.array(listed.split(","), int)
    # Each named part: its axis, the product of the axis's dims before it, and its size.
    along = [
        (name, int(before or 1), int(size or shape[name]))
        for name, _, before, size in NAMED_AXIS.findall(names)
    ]
    dims: list[int] = []
    place = {}  # of each named part, its dim
    for axis, length in shape.items():
        done = 1  # the product of the axis's dims so far
        for part in sorted(part for part in along if part[0] == axis):
            _, before, size = part
            place[part] = len(dims) + 1
            dims += [before // done, size]
            done = before * size
        dims.append(length // done)
    members = [place[part] for part in along]
    ids = np.moveaxis(ids.reshape(dims), members, range(-len(members), 0))
    return ids.reshape(-1, math.prod(size for _, _, size in along))


def _closed(text: str) -> tuple[str, str]:
    """Returns the text inside the first pair of brackets, and the text after this pair. `text` must
    begin with an opening bracket."""
    depth = 0
    for k, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if depth == 0:
            return text[1:k], text[k + 1 :]
    raise AssertionError(f"A bracket that does not close: {text[:200]}")


def parts(text: str) -> list[str]:
    """Returns `text` split at the commas that are not inside brackets."""
    pieces, depth = [""], 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            pieces.append("")
        else:
            pieces[-1] += letter
    return pieces


def _names(text: str) -> list[str]:
    """Returns the names of instructions or computations in a text, without their `%`."""
    return re.findall(r"%([\w.-]+)", text)


def bits(dtype: str) -> int:
    """Returns the bits of one number of the type that XLA calls `dtype`."""
    digits = re.search(r"\d+", dtype)
    return int(digits[0]) if digits else 8  # a "pred", XLA's bool, has no digits and is a byte
