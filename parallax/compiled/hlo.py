"""The text of a compiled program as data: its instructions, which collectives run how often, and between which devices.

XLA numbers devices in the order of the program's mesh, and writes groups of them in four notations; all are read here.
"""

import math
import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import numpy as np

from parallax.compiled import slices, trips
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
CALLED = re.compile(
    r"\b(body|condition|to_apply|calls|called_computations|branch_computations|true_computation|false_computation)="
    r"\{?((?:%[\w.-]+(?:, )?)+)"
)
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")
GROUPS = re.compile(r"\b(?:replica_groups|source_target_pairs)=(.*?)(?=, (?!device_ids)[\w-]+=|$)")
IOTA = re.compile(r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?")
NAMED = re.compile(r"mesh\[(.*?)\](?:, device_ids=\((.*)\))? \{(.*)\}")
NAMED_AXIS = re.compile(r"'([^']+)'(?:=(\d+)|:\((\d+)\)(\d+))?")


class Op(NamedTuple):
    """One array that a collective gives each device.

    Attributes:
        kind: the collective, by XLA's name, as "all-reduce".
        dtype: by XLA's name, as "f32".
        shape: on the device.
        bytes: of the array.
    """

    kind: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int


class Instruction(NamedTuple):
    """A line of a compiled module.

    Attributes:
        name: that of its result.
        result: the type of the result, as "f32[8,16]{1,0}"; of several in a bracket.
        opcode: the operation, as "dot".
        operands: the names of what it takes, and of what it waits for without taking it.
        attributes: what follows the operands, as text.
        trips: of a loop whose text does not say its number, what `module` found in its condition; 0 where there is none.
    """

    name: str
    result: str
    opcode: str
    operands: list[str]
    attributes: str
    trips: int = 0

    @property
    def collective(self) -> str | None:
        """Its kind, if it is a collective; the `-done` of one that was started is none."""
        found = COLLECTIVE.match(self.opcode)
        return found[1] if found else None

    @property
    def ops(self) -> list[Op]:
        """The arrays that a collective gives."""
        result = self.result
        if self.opcode.endswith("-start") and self.opcode != "all-reduce-start":
            result = parts(result)[1]  # of (operands, results, context words)
        found = [
            (dtype, tuple(int(dim) for dim in dims.split(",") if dim))
            for dtype, dims in ARRAY.findall(result)
        ]
        return [
            Op(self.collective or "", dtype, shape, math.prod(shape) * bits(dtype) // 8)
            for dtype, shape in found
        ]

    @property
    def called(self) -> list[tuple[str, int]]:
        """The computations that it runs, and how often; 0 times where XLA does not know."""
        if self.opcode.endswith(("-done", "-update")):  # its start has told
            return []
        found = TRIPS.search(self.attributes)
        trips = int(found[1]) if found else self.trips
        times = {"body": trips, "condition": trips and trips + 1}
        return [
            (name, times.get(key, 1))
            for key, names in CALLED.findall(self.attributes)
            for name in _names(names)
        ]

    @property
    def counted(self) -> Fraction:
        """The trips of a loop in each round of the loop around it, where only its name says so (`counted_scope`); else 0."""
        found = COUNTED.search(self.attributes)
        return Fraction(int(found[2]), int(found[3])) if found else Fraction(0)

    @property
    def groups(self) -> list[np.ndarray] | None:
        """The numbers of the devices that exchange with each other, `[devices]` each: pairs, for a permute. `None` for all."""
        found = GROUPS.search(self.attributes)
        if not found or found[1] in ("{}", ""):
            return None
        if found[1].startswith("mesh"):
            return list(_named(found[1]))
        if found[1].startswith("["):
            return list(_iota(found[1]))
        return [np.array(group.split(","), int) for group in re.findall(r"\{([\d,]+)\}", found[1])]


class Module(NamedTuple):
    """A compiled program.

    Attributes:
        computations: the instructions of each, by its name, in the order of the text.
        entry: the name of the one that runs first.
    """

    computations: dict[str, list[Instruction]]
    entry: str

    def __getitem__(self, name):
        return self.computations.get(name, [])


class Run(NamedTuple):
    """A collective of a program, as it runs.

    Attributes:
        instruction: the collective.
        times: how often it runs, in all trips of loops.
        conditional: it stands in a branch that may not be taken.
        unbounded: it stands in a loop whose number of trips XLA does not know, which counts as one.
    """

    instruction: Instruction
    times: int
    conditional: bool
    unbounded: bool


def collectives(f: Callable[..., Any], *arguments: Any) -> list[Op]:
    """The collectives of `f`, compiled for `arguments` (arrays or their shapes)."""
    return parse(jax.jit(f).lower(*arguments).compile())


def parse(compiled: jax.stages.Compiled | str) -> list[Op]:
    """The collectives of a compiled program or of its text, each as often as it runs: a loop's body once a trip.

    Raises:
        ValueError: one stands in a loop whose number of trips is not known.
    """
    found: list[Op] = []
    for run in runs(module(compiled)):
        if run.unbounded:
            raise ValueError(
                f"hlo.parse needs to know how often each collective runs; {run.instruction.name} stands in a loop whose number "
                "of trips XLA does not know. Take hlo.runs, which says so of each."
            )
        found += run.instruction.ops * run.times
    return found


def module(compiled: jax.stages.Compiled | str) -> Module:
    """The instructions of a compiled program or of its text."""
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    assert text is not None
    computations: dict[str, list[Instruction]] = {}
    entry, lines, where = "", [], ""
    roots: dict[str, str] = {}
    for line in text.splitlines():
        if found := COMPUTATION.match(line):
            where = found[2]
            lines = computations.setdefault(where, [])
            entry = found[2] if found[1] else entry
        elif found := INSTRUCTION.match(line):
            root, name, rest = found.groups()
            roots |= {where: name} if root else {}
            result, rest = _closed(rest) if rest.startswith("(") else rest.split(" ", 1)
            opcode, rest = rest.strip().split("(", 1)
            operands, attributes = _closed("(" + rest)
            # The value of a constant and the number of a parameter stand where operands do.
            attributes = (
                operands + attributes if opcode in ("constant", "parameter") else attributes
            )
            waits_for = re.findall(r"control-predecessors=(\{[^}]*\})", attributes)
            lines.append(
                Instruction(name, result, opcode, _names(operands + "".join(waits_for)), attributes)
            )
    return Module(slices.joined(trips.counted(computations, roots), text), entry)


def runs(program: Module) -> Iterator[Run]:
    """The collectives of a program, in the order of its text. All branches of a conditional count."""

    def inside(
        name: str, times: int | Fraction, conditional: bool, unbounded: bool
    ) -> Iterator[Run]:
        for instruction in program[name]:
            if instruction.collective:
                yield Run(instruction, int(times), conditional, unbounded)
                continue
            branch = conditional or instruction.opcode == "conditional"
            for called, known in instruction.called:
                often = known or instruction.counted
                yield from inside(called, times * (often or 1), branch, unbounded or not often)

    return inside(program.entry, 1, False, False)


def unordered(compiled: jax.stages.Compiled | str) -> list[tuple[Instruction, Instruction]]:
    """Loops with collectives inside, each with a collective, or another loop of some, that may overtake it.

    XLA's CPU backend goes on from such a loop to what does not use its results, while threads still work on it, and collectives
    of the two can then meet in one rendezvous: "Id can't be larger than the number of participating threads", and the
    process aborts. `cpu.sequence_after` puts the second behind the first.
    """
    program = module(compiled)
    sends = lambda instruction: (
        instruction.collective
        or any(any(map(sends, program[name])) for name, _ in instruction.called)
    )
    found = []
    for lines in program.computations.values():
        before: dict[str, frozenset[str]] = {}  # what each instruction waits for
        loops: list[Instruction] = []
        for line in lines:
            given = [name for name in line.operands if name in before]
            before[line.name] = frozenset(given).union(*(before[name] for name in given))
            if sends(line):
                found += [(loop, line) for loop in loops if loop.name not in before[line.name]]
                loops += [] if line.collective else [line]
    return found


def _iota(text: str) -> np.ndarray:
    """`[4,2]<=[2,2,2]T(0,2,1)`: 0, 1, ... in the shape on the right, transposed, then in that on the left. One may do."""
    numbers = lambda part: tuple(int(k) for k in part.split(","))
    shape, source, order = IOTA.match(text).groups()  # type: ignore[union-attr]
    ids = np.arange(math.prod(numbers(shape))).reshape(numbers(source or shape))
    ids = ids.transpose(numbers(order)) if order else ids
    return ids.reshape(numbers(shape)) if source else ids


def _named(text: str) -> np.ndarray:
    """`mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a':(1)2}`: groups along axes, or parts of them, of a mesh of its own.

    `'a':(2)4` is the part of size 4 of axis a that has a part of size 2 before it, the slower one.
    """
    sizes, listed, names = NAMED.match(text).groups()  # type: ignore[union-attr]
    shape = {name: int(size) for name, size, _, _ in NAMED_AXIS.findall(sizes)}
    if listed is None:
        ids = np.arange(math.prod(shape.values()))
    else:
        ids = _iota(listed) if listed.startswith("[") else np.array(listed.split(","), int)
    along = {
        name: (int(before or 1), int(size or shape[name]))
        for name, _, before, size in NAMED_AXIS.findall(names)
    }
    split = [
        (before, size, shape[name] // (before * size)) for name, (before, size) in along.items()
    ]
    dims = [
        dim
        for name in shape
        for dim in (split[list(along).index(name)] if name in along else (1, shape[name], 1))
    ]
    members = [3 * list(shape).index(name) + 1 for name in along]
    ids = np.moveaxis(ids.reshape(dims), members, range(-len(members), 0))
    return ids.reshape(-1, math.prod(size for _, size in along.values()))


def _closed(text: str) -> tuple[str, str]:
    """What stands in the bracket with which `text` begins, and what follows it."""
    depth = 0
    for k, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if depth == 0:
            return text[1:k], text[k + 1 :]
    raise AssertionError(f"A bracket that does not close: {text[:200]}")


def parts(text: str) -> list[str]:
    """What stands between the outer commas of `text`."""
    found, depth = [""], 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            found.append("")
        else:
            found[-1] += letter
    return found


def _names(text: str) -> list[str]:
    return re.findall(r"%([\w.-]+)", text)


def bits(dtype: str) -> int:
    """Bits of a number of a type, by XLA's name."""
    found = re.search(r"\d+", dtype)
    return int(found[0]) if found else 8  # a pred is a byte
