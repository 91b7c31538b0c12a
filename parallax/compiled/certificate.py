"""What a compiled program really sends, read from its text, beside what was predicted.

    entries = certificate.read(jax.jit(f).lower(x).compile(), mesh)
    print(certificate.table(entries))
    print(*certificate.differences(entries, {"data": cost.of(ring.all_reduce, nbytes, n)}), sep="\\n")

A loop's body counts once a trip. XLA names devices by number, in four notations; the mesh says which axes they lie along.
"""

import functools
import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from parallax.collectives.cost import Cost
from parallax.collectives.types import AxisName, axes
from parallax.compiled import hlo


class Entry(NamedTuple):
    """All collectives of one kind along the same axes, in one call of a program, on each device.

    Attributes:
        kind: XLA's name, as "collective-permute".
        axes: the mesh axes along which its devices lie, in the mesh's order; of a permute, along which it moves anything.
        count: how often it runs, in all trips of loops.
        bytes: of its results, over all runs. For a permute, what a device receives.
        hops: the longest chain among them of which each must wait for the one before.
        conditional: it stands in a branch that may not be taken: counted as if all branches ran.
        unbounded: it stands in a loop whose number of trips XLA does not know: counted for one trip.
    """

    kind: str
    axes: tuple[str, ...]
    count: int
    bytes: int
    hops: int
    conditional: bool = False
    unbounded: bool = False


def read(compiled: jax.stages.Compiled | str, mesh: Mesh) -> list[Entry]:
    """The collectives of a compiled program (or of its text), one entry for each kind and set of axes of `mesh`.

    Raises:
        ValueError: the program names more devices than `mesh` has.
    """
    program = hlo.module(compiled)
    key = lambda instruction: (instruction.collective, along(instruction.groups, dict(mesh.shape)))
    chains = _chain(program, program.entry, key, {})
    counts, sizes = Counter(), Counter()
    for run in hlo.runs(program):
        of = (*key(run.instruction), run.conditional, run.unbounded)
        counts[of] += run.times
        sizes[of] += run.times * sum(op.bytes for op in run.instruction.ops)
    place = {name: k for k, name in enumerate(mesh.shape)}
    found = sorted(counts, key=lambda of: ([place[name] for name in of[1]], of))
    return [
        Entry(kind, names, counts[of], sizes[of], int(chains[kind, names]), conditional, unbounded)
        for of in found
        for kind, names, conditional, unbounded in [of]
    ]


def hops(compiled: jax.stages.Compiled | str, *, kind: str = "collective-permute") -> int:
    """The longest chain of collectives of one kind, along whatever axes, of which each must wait for the one before."""
    program = hlo.module(compiled)
    return int(_chain(program, program.entry, lambda instruction: instruction.collective, {})[kind])


def table(entries: Sequence[Entry]) -> str:
    """The entries as text: a line each, in columns."""
    rows = [["axes", "kind", "count", "bytes", "hops", ""]]
    for entry in entries:
        numbers = [f"{number:,}" for number in (entry.count, entry.bytes, entry.hops)]
        remarks = [
            word
            for word, holds in (
                ("conditional", entry.conditional),
                ("trips unknown", entry.unbounded),
            )
            if holds
        ]
        rows.append([_spelt(entry.axes), entry.kind, *numbers, ", ".join(remarks)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [str.ljust, str.ljust, str.rjust, str.rjust, str.rjust, str.ljust]
    lines = [
        "  ".join(side(cell, width) for side, cell, width in zip(sides, row, widths, strict=True))
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)


def differences(
    entries: Sequence[Entry],
    predicted: Mapping[str, int | Cost] | Mapping[AxisName, int | Cost] | Sequence[Entry],
) -> list[str]:
    """Where the program differs from what was `predicted`, a sentence each; none if it does not.

    What cannot be counted (in a conditional, or in a loop of unknown length) is always told.

    Args:
        entries: what `read` found.
        predicted: for each axis (a name, or a tuple of names) the bytes of all results along it, or a `Cost`, whose `sent`,
            `messages` and `chain` are then held against the program; or a list of entries. Fewer hops in a row than those of
            several arrays, one after another, are no difference: arrays may go side by side.
    """
    told = [_uncertain(entry) for entry in entries if entry.conditional or entry.unbounded]
    if not isinstance(predicted, Mapping):
        key = lambda entry: (entry.kind, entry.axes, entry.conditional, entry.unbounded)
        wanted, there = (
            {key(entry): entry for entry in predicted},
            {key(entry): entry for entry in entries},
        )
        for of in dict.fromkeys([*wanted, *there]):
            value = (wanted[of].bytes, wanted[of].count, wanted[of].hops) if of in wanted else None
            told += _compared(
                f"{of[0]} along {_spelt(of[1])}", value, [there[of]] if of in there else []
            )
        return told
    along: dict[tuple, list[Entry]] = {}
    for entry in entries:
        along.setdefault(tuple(sorted(entry.axes)), []).append(entry)
    wanted = {
        tuple(sorted(axes(names))): (axes(names), value) for names, value in predicted.items()
    }
    for key, (names, value) in wanted.items():
        numbers = (
            (value.sent, value.messages, value.chain)
            if isinstance(value, Cost)
            else (value, None, None)
        )
        told += _compared(f"along {_spelt(names)}", numbers, along.get(key, []))
    for key, found in along.items():
        if key not in wanted:
            told += _compared(f"along {_spelt(found[0].axes)}", None, found)
    return told


def _compared(what: str, predicted: tuple | None, found: list[Entry]) -> list[str]:
    """A sentence for each number (bytes, count, hops) that differs from what was predicted; a prediction of None is not
    compared."""
    of = lambda field: sum(getattr(entry, field) for entry in found)
    seen = ", ".join(f"{entry.count:,} {entry.kind}" for entry in found)
    if predicted is None:
        return [
            f"{what}: nothing was predicted, and the program moves {of('bytes'):,} bytes ({seen})."
        ]
    if not found:
        return (
            [f"{what}: {predicted[0]:,} bytes were predicted, and the program moves none."]
            if predicted[0]
            else []
        )
    told = []
    for field, unit, wanted in zip(
        ("bytes", "count", "hops"),
        ("bytes", "collectives", "hops in a row"),
        predicted,
        strict=True,
    ):
        got = of(field)
        if wanted is None or wanted == got or (field == "hops" and got < wanted):
            continue
        times = got // wanted if wanted and got % wanted == 0 else 1
        hint = (
            f": exactly {times} times as many; is it in a loop, or done {times} times?"
            if times > 1
            else "."
        )
        told.append(
            f"{what}: {wanted:,} {unit} were predicted, and the program has {got:,} ({seen}){hint}"
        )
    return told


def _uncertain(entry: Entry) -> str:
    what = f"{entry.kind} along {_spelt(entry.axes)}"
    if entry.unbounded:
        return f"{what}: stands in a loop whose number of trips XLA does not know, and is counted for one trip."
    hangs = (
        " Where devices take different branches, a permute hangs."
        if entry.kind == "collective-permute"
        else ""
    )
    return f"{what}: stands in a conditional, and is counted as if all its branches ran.{hangs}"


def _spelt(names: tuple[str, ...]) -> str:
    return " x ".join(names) or "no axis"


def _chain(
    program: hlo.Module, name: str, key: Callable[..., Any], known: dict[str, Counter]
) -> Counter:
    """For each key, how many of its collectives run one after another in a computation, each waiting for the one before."""
    if name in known:
        return known[name]
    longest: Counter = Counter()
    ends: dict[str, Counter] = {}  # the chain that ends with each instruction
    elements: dict[str, list[Counter]] = {}  # with each element of a tuple
    for instruction in program[name]:
        before = [ends.get(operand, Counter()) for operand in instruction.operands]
        if instruction.opcode == "tuple":
            elements[instruction.name] = before
        elif instruction.opcode == "get-tuple-element" and instruction.operands[0] in elements:
            index = re.search(r"\bindex=(\d+)", instruction.attributes)
            before = [elements[instruction.operands[0]][int(index[1])]] if index else before
        if instruction.collective:
            own = Counter([key(instruction)])
        else:
            inside = [
                (_chain(program, called, key, known), often or instruction.counted or 1)
                for called, often in instruction.called
            ]
            inside = [
                Counter({of: often * hops for of, hops in chain.items()}) for chain, often in inside
            ]
            own = (
                _longest(inside) if instruction.opcode == "conditional" else sum(inside, Counter())
            )
        ends[instruction.name] = _longest(before) + own
        longest |= ends[instruction.name]
    known[name] = longest
    return longest


def _longest(chains: Sequence[Counter]) -> Counter:
    return functools.reduce(operator.or_, chains, Counter())


def along(groups: Sequence[np.ndarray] | None, shape: Mapping[str, int]) -> tuple[str, ...]:
    """The axes of a mesh of `shape` along which the devices of a group lie."""
    sizes = tuple(shape.values())
    groups = [np.arange(math.prod(sizes))] if groups is None else groups
    most = max(int(group.max()) for group in groups)
    if most >= math.prod(sizes):
        raise ValueError(
            f"certificate.read needs the mesh that the program was compiled for: it names device {most}, and the mesh "
            f"{dict(shape)} has {math.prod(sizes)} devices. Pass that mesh."
        )
    places = [np.stack(np.unravel_index(group, sizes)) for group in groups]
    spread = np.max([np.ptp(place, axis=1) for place in places], axis=0)
    return tuple(name for name, over in zip(shape, spread, strict=True) if over)
