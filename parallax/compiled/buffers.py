"""Which buffers of a compiled program live when, read from its text, which is in the order in which it runs.

A buffer lives from the instruction that makes it to the last that reads it. Parameters, constants and results have places of
their own and are no temporaries. What a compiler shares, it shares by rules, and the ones that count are kept here: tuples and
bitcasts are their operands; a loop's state, its body's parameter and its body's result are one buffer; an update in place, and
an element-wise operation whose operand dies with it, write where their operand was.
"""

import re
from typing import NamedTuple

import jax
import numpy as np

from parallax.compiled import hlo

LONGEST = (
    20_000  # positions that one loop may fill; of a longer one as many whole trips as fit are there
)
SAME = {"tuple", "get-tuple-element", "bitcast", "opt-barrier", "while", "add-dependency", "domain"}
SILENT = {"parameter", "constant", "after-all", *SAME}
UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # which operand holds what is written
ELEMENTWISE = re.compile(
    r"abs|add|and|atan2|bitcast|bitcast-convert|cbrt|ceil|clamp|compare|complex|convert|copy|cosine|divide|erf|exponential"
    r"|exponential-minus-one|floor|imag|is-finite|log|log-plus-one|logistic|maximum|minimum|multiply|negate|not|or|popcnt|power"
    r"|real|reduce-precision|remainder|round-nearest-afz|round-nearest-even|rsqrt|select|shift-left|shift-right-arithmetic"
    r"|shift-right-logical|sign|sine|sqrt|subtract|tan|tanh|xor"
)
INDEX = re.compile(r"\bindex=(\d+)")
PREDECESSORS = re.compile(r"control-predecessors=\{([^}]*)\}")
OP_NAME = re.compile(r'op_name="([^"]*)"')
PARAMETER = re.compile(r"^\s+(?:ROOT )?%([\w.-]+) = .*? parameter\((\d+)\)", re.MULTILINE)
DONATED = re.compile(r"\{(\d*)\}: \((\d+), \{\}")
BODY = re.compile(r"\bbody=%([\w.-]+)")
PASS = re.compile(r"\b(transpose\()?jvp\(")  # the outermost says whose work it is
UNKNOWN, FORWARD, BACKWARD = -1, 0, 1


class Value(NamedTuple):
    """A buffer of a program.

    Attributes:
        bytes: of the buffer.
        what: its type, and the operation that makes it.
    """

    bytes: int
    what: str


class Life(NamedTuple):
    """What lives at each position of a computation, one position for each instruction that runs, loops rolled out.

    Attributes:
        live: bytes of temporaries.
        filled: of them, those that hold something: what a loop stacks up fills with its trips, and empties as a loop reads it.
        phase: whether JAX made the instruction of the forward pass, of the backward pass, or of neither.
        peak: the buffers that are live at the peak.
    """

    live: np.ndarray
    filled: np.ndarray
    phase: np.ndarray
    peak: list[Value]


class _Buffer:
    """Bytes with a place of their own, from one instruction to another; `outside` if the place is not the computation's."""

    def __init__(self, size: int, what: str, start: int, outside: bool):
        self.bytes, self.what, self.start, self.stop, self.outside = (
            size,
            what,
            start,
            start,
            outside,
        )
        self.into: _Buffer = self
        self.loops: list[tuple[int, bool]] = []  # that fill it (true) or empty it

    @property
    def place(self) -> "_Buffer":
        """The buffer in whose place it is."""
        return self if self.into is self else self.into.place

    def share(self, other: "_Buffer") -> None:
        """Live in the place of `other`."""
        place, own = other.place, self.place
        if place is not own:
            place.start, place.stop = min(place.start, own.start), max(place.stop, own.stop)
            place.outside |= own.outside
            place.loops += own.loops
            own.into = place


class _Program(NamedTuple):
    """The instructions of each computation, and the number of each parameter by its name."""

    module: hlo.Module
    numbers: dict[str, int]
    donated: dict[int, int]  # the argument in whose place a result is

    def __getitem__(self, name):
        return {instruction.name: instruction for instruction in self.module[name]}


def read(compiled: jax.stages.Compiled | str) -> Life:
    """The life of a compiled program or of its text.

    A loop of unknown length counts as one trip; of a conditional's branches the one that needs most memory counts.
    """
    text = compiled if isinstance(compiled, str) else compiled.as_text() or ""
    module = hlo.module(text)
    numbers = {name: int(number) for name, number in PARAMETER.findall(text)}
    donated = {
        int(leaf or 0): int(number) for leaf, number in DONATED.findall(text.split("\n", 1)[0])
    }
    return _life(_Program(module, numbers, donated), module.entry, {})


def _life(program: _Program, name: str, known: dict[str, Life]) -> Life:
    if name in known:
        return known[name]
    inner: list[Life] = []
    follows: set[str] = (
        set()
    )  # what comes after some of the forward pass: what does not is no backward pass yet
    for instruction in program[name].values():
        phase, begun = _phase(instruction), not follows.isdisjoint(instruction.operands)
        begun |= instruction.opcode == "parameter" and name != program.module.entry
        inner.append(
            _inside(
                program, instruction, UNKNOWN if phase == BACKWARD and not begun else phase, known
            )
        )
        if begun or phase == FORWARD or (inner[-1].phase == FORWARD).any():
            follows.add(instruction.name)
    offsets = np.cumsum([0, *(len(life.live) for life in inner)])
    live, filled, phase = (
        np.concatenate(parts) for parts in zip(*(life[:3] for life in inner), strict=True)
    )
    top, own = np.zeros(len(live) + 1, np.int64), []
    for buffer in _buffers(program, name):
        start, stop = int(offsets[buffer.start]), int(offsets[buffer.stop + 1])
        top[start] += buffer.bytes
        top[stop] -= buffer.bytes
        own.append((start, stop, Value(buffer.bytes, buffer.what)))
        filled[start:stop] -= buffer.bytes * (1 - _level(buffer, offsets, start, stop))
    added = np.cumsum(top)[:-1]
    live, filled, peak = live + added, filled + added, []
    if len(live):
        at = int(live.argmax())
        peak = [value for start, stop, value in own if start <= at < stop]
        peak += inner[int(np.searchsorted(offsets, at, side="right")) - 1].peak
    known[name] = Life(live, filled, phase, peak)
    return known[name]


def _inside(
    program: _Program, instruction: hlo.Instruction, phase: int, known: dict[str, Life]
) -> Life:
    """The positions of one instruction: one, or those of what it calls."""
    if instruction.opcode in ("while", "call", "conditional"):
        called = [(_life(program, name, known), trips) for name, trips in instruction.called]
        life, trips = max(called, key=lambda pair: (pair[0].live.max(initial=0), len(pair[0].live)))
        times = max(1, min(trips, LONGEST // max(len(life.live), 1)))
        phases = np.where(life.phase == UNKNOWN, phase, life.phase)
        return Life(
            np.tile(life.live, times),
            np.tile(life.filled, times),
            np.tile(phases, times),
            life.peak,
        )
    count = 0 if instruction.opcode in SILENT or instruction.opcode.endswith("-done") else 1
    return Life(np.zeros(count, np.int64), np.zeros(count), np.full(count, phase), [])


def _phase(instruction: hlo.Instruction) -> int:
    found = PASS.search(_made_by(instruction))
    return UNKNOWN if not found else BACKWARD if found[1] else FORWARD


def _made_by(instruction: hlo.Instruction) -> str:
    found = OP_NAME.search(instruction.attributes)
    return found[1] if found else ""


def _level(buffer: _Buffer, offsets: np.ndarray, start: int, stop: int) -> np.ndarray | float:
    """How full the buffer is from position `start` to `stop`."""
    points: list[tuple[int, float]] = []
    full = not any(fills for _, fills in buffer.loops)
    for k, fills in sorted(buffer.loops):
        if fills != full and (fills or buffer.stop == k):  # what is still read later is not emptied
            points += [(int(offsets[k]), float(full)), (int(offsets[k + 1]), float(not full))]
            full = not full
    if not points:
        return 1.0
    places, levels = zip(*points, strict=True)
    return np.interp(np.arange(start, stop), places, levels)


def _buffers(program: _Program, name: str) -> list[_Buffer]:
    """The temporaries of one computation itself."""
    inside, values = program[name], {}
    made: list[tuple[str, list[list[_Buffer]], list[_Buffer]]] = []
    for k, instruction in enumerate(inside.values()):
        given = [values[operand] for operand in _operands(instruction)]
        if instruction.opcode == "get-tuple-element":
            given = [given[0][_index(instruction) :][:1]]
        taken = [buffer for value in given for buffer in value]
        for buffer in taken:
            buffer.stop = k
        if instruction.opcode in SAME or instruction.opcode.endswith("-done"):
            values[instruction.name] = taken
        else:
            outside, what = (
                instruction.opcode in ("parameter", "constant"),
                _made_by(instruction) or instruction.opcode,
            )
            of = lambda op: f"{op.dtype}[{','.join(map(str, op.shape))}] {what}"
            values[instruction.name] = [
                _Buffer(op.bytes, of(op), k, outside) for op in instruction.ops
            ]
            made.append((instruction.name, given, values[instruction.name]))
        if instruction.opcode == "while":
            for leaf, fills in _stacked(program, instruction).items():
                taken[leaf].loops.append((k, fills))
    for buffer in values[list(inside)[-1]]:
        buffer.outside, buffer.stop = True, len(inside) - 1
    _share(program, inside, made)
    found = {id(buffer.place): buffer.place for _, _, result in made for buffer in result}
    own = [buffer for buffer in found.values() if not buffer.outside and buffer.bytes]
    return _left(own, _places(program, values)) if name == program.module.entry else own


def _share(program: _Program, inside: dict[str, hlo.Instruction], made: list) -> None:
    """Let results live where their operands did: what is written in place, and then what is written over a dying operand."""
    for instruction, given, result in made:
        for operand, part, _ in _updates(program, inside, instruction):
            result[part].share(given[operand][0])
    for instruction, given, result in made:
        for operand in _element_wise(program, inside[instruction]):
            for old, new in zip(given[operand], result, strict=False):
                dies = old.place.stop == new.start and not (old.place.outside or new.place.outside)
                if dies and new.place is new and new.bytes == old.bytes:
                    new.share(old)


def _places(
    program: _Program, values: dict[str, list[_Buffer]]
) -> list[tuple[int, list[tuple[int, int]]]]:
    """The places of the results, those of donated arguments among them: their bytes, and when they are in use."""
    *_, root = values
    taken = {number: values[name][0] for name, number in program.numbers.items() if name in values}
    found = []
    for leaf, buffer in enumerate(values[root]):
        busy = [(buffer.place.start, buffer.place.stop)]
        if leaf in program.donated:
            argument = taken[program.donated[leaf]]
            busy.append((argument.start, argument.stop))
        found.append((buffer.bytes, busy))
    return found


def _left(buffers: list[_Buffer], places: list[tuple[int, list[tuple[int, int]]]]) -> list[_Buffer]:
    """The buffers that find no room in the places of the results while these are not in use, the largest first."""
    left = []
    for buffer in sorted(buffers, key=lambda buffer: -buffer.bytes):
        free = lambda busy: all(buffer.stop < start or stop < buffer.start for start, stop in busy)
        room = next((busy for size, busy in places if size >= buffer.bytes and free(busy)), None)
        if room is None:
            left.append(buffer)
        else:
            room.append((buffer.start, buffer.stop))
    return left


def _operands(instruction: hlo.Instruction) -> list[str]:
    """What it takes; what it only waits for comes last in `operands` and is left out."""
    waits = sum(len(names.split(",")) for names in PREDECESSORS.findall(instruction.attributes))
    return instruction.operands[: len(instruction.operands) - waits]


def _updates(
    program: _Program, inside: dict[str, hlo.Instruction], name: str
) -> list[tuple[int, int, int]]:
    """What an instruction writes in place: the operand, the part of the result, the bytes written of it."""
    instruction = inside[name]
    if instruction.opcode in UPDATES:
        return [(0, 0, _size(inside[instruction.operands[UPDATES[instruction.opcode]]]))]
    if instruction.opcode != "fusion":
        return []
    inside = _fused(program, instruction)
    root, found = list(inside.values())[-1], []
    for part, result in enumerate(root.operands if root.opcode == "tuple" else [root.name]):
        made = _through(inside, result)
        target = _through(inside, made.operands[0]) if made.opcode in UPDATES else made
        if made is not target and target.opcode == "parameter":
            found.append(
                (
                    program.numbers[target.name],
                    part,
                    _size(inside[made.operands[UPDATES[made.opcode]]]),
                )
            )
    return found


def _element_wise(program: _Program, instruction: hlo.Instruction) -> list[int]:
    """The operands of which element i is read for element i of the result alone: it may be written in their place."""
    if ELEMENTWISE.fullmatch(instruction.opcode):
        return list(range(len(_operands(instruction))))
    if instruction.opcode != "fusion":
        return []
    made_of: dict[str, set[int]] = {}
    mixed: set[int] = set()
    for inner in _fused(program, instruction).values():
        own = {program.numbers[inner.name]} if inner.opcode == "parameter" else set()
        made_of[inner.name] = own.union(*(made_of[operand] for operand in inner.operands))
        if not ELEMENTWISE.fullmatch(inner.opcode) and inner.opcode not in (
            "parameter",
            "constant",
            "tuple",
        ):
            mixed |= made_of[inner.name]
    return [number for number in range(len(_operands(instruction))) if number not in mixed]


def _stacked(program: _Program, loop: hlo.Instruction) -> dict[int, bool]:
    """The parts of a loop's state of which each trip writes one place (true) or reads one place (false), until all are."""
    (body,) = BODY.findall(loop.attributes)
    trips, inside = dict(loop.called)[body], program[body]
    *_, root = inside.values()
    found: dict[int, bool] = {}
    for part in inside.values():
        if (
            part.opcode != "get-tuple-element"
            or inside[part.operands[0]].opcode != "parameter"
            or root.opcode != "tuple"
        ):
            continue
        leaf, size = _index(part), _size(part)
        if root.operands[leaf] == part.name:
            readers = [
                inner
                for inner in inside.values()
                if part.name in inner.operands and inner is not root
            ]
            if (
                readers
                and trips > 1
                and all(trips * _slice(program, inner, part.name) == size for inner in readers)
            ):
                found[leaf] = False
            continue
        result = inside[root.operands[leaf]]
        for operand, place, written in _updates(program, inside, result.name):
            if (
                place == 0
                and trips > 1
                and result.operands[operand] == part.name
                and trips * written == size
            ):
                found[leaf] = True
    return found


def _slice(program: _Program, reader: hlo.Instruction, name: str) -> int:
    """The bytes that an instruction reads of a value, if it reads one slice of it; else 0."""
    if reader.opcode == "dynamic-slice":
        return _size(reader)
    if reader.opcode != "fusion":
        return 0
    inside, number = _fused(program, reader), reader.operands.index(name)
    same = {inner for inner in inside if program.numbers.get(inner) == number}
    read = []
    for inner in inside.values():
        if same.intersection(inner.operands):
            if inner.opcode == "bitcast":
                same.add(inner.name)
            else:
                read.append(_size(inner) if inner.opcode == "dynamic-slice" else 0)
    return read[0] if len(read) == 1 else 0


def _fused(program: _Program, fusion: hlo.Instruction) -> dict[str, hlo.Instruction]:
    ((name, _),) = fusion.called
    return program[name]


def _through(inside: dict[str, hlo.Instruction], name: str) -> hlo.Instruction:
    """The instruction that makes a value, bitcasts left out."""
    while inside[name].opcode == "bitcast":
        name = inside[name].operands[0]
    return inside[name]


def _index(part: hlo.Instruction) -> int:
    found = INDEX.search(part.attributes)
    assert found, part
    return int(found[1])


def _size(instruction: hlo.Instruction) -> int:
    return sum(op.bytes for op in instruction.ops)
