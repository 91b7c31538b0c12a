"""Reads from the text of a compiled program which collectives it runs, and compares these with a
prediction.

    entries = certificate.read(jax.jit(f).lower(x).compile(), mesh)
    print(certificate.table(entries))
    predicted = {"data": cost.of(ring.all_reduce, nbytes, n)}
    print(*certificate.differences(entries, predicted), sep="\\n")

A collective in a loop counts once for each iteration (trip). For each group of devices that
exchange data, XLA writes the devices' numbers; the mesh tells along which axes these devices
differ. In a *chain* each collective waits for the collective before it; `hops` is the length of a
chain. A *computation* is a named list of instructions, such as a loop's body. `hlo.runs` yields the
collectives of a program, each with its number of runs (`times`). `Instruction.ops` lists the arrays
that a collective returns.
"""

import functools
import itertools
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
from parallax.compiled import hlo, slices


class Entry(NamedTuple):
    """The collectives of one kind along the same axes, with the same `conditional` and `unbounded`,
    on one device, in one call of a program.

    Attributes:
        kind: XLA's name of the collectives, such as "collective-permute".
        axes: the mesh axes along which a group's devices differ, in the mesh's order; for a
            permute, the axes along which data moves.
        count: the number of runs over all trips of loops.
        bytes: the bytes of the results, summed over all runs; for a permute, the bytes that a
            device receives.
        hops: the length of the longest chain of collectives of this kind along these axes. In a
            chain each collective waits for the collective before it. Entries that differ only in
            `conditional` or `unbounded` have the same `hops`, since one chain may have collectives
            of several such entries.
        conditional: whether the collectives are in a branch of a conditional, so that a run may
            skip them. The collectives of all branches are counted.
        unbounded: whether the collectives are in a loop of unknown length, counted as one trip.
    """

    kind: str
    axes: tuple[str, ...]
    count: int
    bytes: int
    hops: int
    conditional: bool = False
    unbounded: bool = False


def read(compiled: jax.stages.Compiled | str, mesh: Mesh) -> list[Entry]:
    """Returns the collectives of a compiled program or of its text, added up in entries: one entry
    for each combination of kind, set of axes, `conditional` and `unbounded`. `conditional`
    collectives are in a branch, so they may run less often than the `count` of their entry.
    `unbounded` collectives are in a loop of unknown length, which counts as one trip.

    Raises:
        ValueError: the program names devices that `mesh` does not have.
    """
    program = hlo.module(compiled, slices.numbers(mesh))

    def kind_and_axes(instruction: hlo.Instruction) -> tuple[str | None, tuple[str, ...]]:
        """Returns the kind of a collective, and the axes of the mesh along which it works."""
        return instruction.collective, along(instruction.groups, dict(mesh.shape))

    # `chains` has the length of the longest chain for each kind and axes.
    chains = _chain(program, program.entry, kind_and_axes, {})
    # The number of runs and the bytes for each kind, axes, `conditional` and `unbounded`.
    counts, sizes = Counter(), Counter()
    for run in hlo.runs(program):
        key = (*kind_and_axes(run.instruction), run.conditional, run.unbounded)
        counts[key] += run.times
        sizes[key] += run.times * sum(op.bytes for op in run.instruction.ops)
    # Entries are sorted by the places of their axes in the mesh, and then by kind.
    position = {name: k for k, name in enumerate(mesh.shape)}
    entries = []
    for key in sorted(counts, key=lambda key: ([position[name] for name in key[1]], key)):
        kind, names, conditional, unbounded = key
        # One chain may have both conditional and other collectives. So `chains` has one length for
        # each kind and axes, which all their entries get. The length is a fraction if a loop's mean
        # number of trips is a fraction; then it is rounded down.
        hops = int(chains[kind, names])
        entries.append(Entry(kind, names, counts[key], sizes[key], hops, conditional, unbounded))
    return entries


def hops(compiled: jax.stages.Compiled | str, *, kind: str = "collective-permute") -> int:
    """Returns the length of the longest chain of collectives of one kind, along any axes, in which
    each collective waits for the one before."""
    program = hlo.module(compiled)
    return int(_chain(program, program.entry, lambda instruction: instruction.collective, {})[kind])


def table(entries: Sequence[Entry]) -> str:
    """Returns the entries as a text in columns: a line of headings, and a line for each entry."""
    rows = [["axes", "kind", "count", "bytes", "hops", ""]]
    for entry in entries:
        numbers = [f"{number:,}" for number in (entry.count, entry.bytes, entry.hops)]
        remarks = ["conditional"] if entry.conditional else []
        if entry.unbounded:
            remarks.append("trips unknown")
        rows.append([_axes_text(entry.axes), entry.kind, *numbers, ", ".join(remarks)])
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
    """Returns a sentence for each difference between the program and the prediction.

    Each entry in a conditional or in a loop of unknown length also gives a sentence, since its
    number of runs is uncertain.

    Args:
        entries: the result of `read`.
        predicted: a list of entries, or a mapping. Entries of a list with the same `kind`, `axes`,
            `conditional` and `unbounded` are added up. A key of the mapping is an axis: a name, or
            a tuple of names. The value of a key is a `Cost`, or only a number of bytes. The bytes,
            or the `sent` of a `Cost`, are compared with the bytes of all entries along this axis.
            The `messages` of a `Cost` are compared with the sum of the entries' `count`, and the
            `chain` of a `Cost` with the entries' `hops`. Fewer hops than predicted give no
            sentence, since several arrays may be sent at the same time.
    """
    sentences = [_uncertain(entry) for entry in entries if entry.conditional or entry.unbounded]
    if isinstance(predicted, Mapping):
        return sentences + _from_numbers(entries, predicted)
    return sentences + _from_entries(entries, predicted)


def _from_entries(entries: Sequence[Entry], predicted: Sequence[Entry]) -> list[str]:
    """Returns a sentence for each difference between the program's entries and the predicted
    entries. An entry that is in only one of the two lists is a difference. Fewer hops than
    predicted give no sentence. Two entries are compared if they have the same `kind`, `axes`,
    `conditional` and `unbounded`."""
    expected, actual = _added_up(predicted), _added_up(entries)
    sentences = []
    for key in dict.fromkeys([*expected, *actual]):
        kind, names, *_ = key
        entry = expected.get(key)
        numbers = (entry.bytes, entry.count, entry.hops) if entry else None
        counted = [actual[key]] if key in actual else []
        sentences += _compared(f"{kind} along {_axes_text(names)}", numbers, counted)
    return sentences


def _added_up(entries: Sequence[Entry]) -> dict[tuple, Entry]:
    """Returns the entries by their `_identity`. The counts, bytes and hops of entries with the same
    identity are added up."""
    by_identity: dict[tuple, Entry] = {}
    for entry in entries:
        other = by_identity.setdefault(_identity(entry), entry._replace(count=0, bytes=0, hops=0))
        by_identity[_identity(entry)] = other._replace(
            count=other.count + entry.count,
            bytes=other.bytes + entry.bytes,
            hops=other.hops + entry.hops,
        )
    return by_identity


def _identity(entry: Entry) -> tuple[str, tuple[str, ...], bool, bool]:
    """Returns the attributes of an entry that are not numbers. The numbers of two entries are
    compared if these attributes are equal."""
    return entry.kind, entry.axes, entry.conditional, entry.unbounded


def _from_numbers(entries: Sequence[Entry], predicted: Mapping[Any, int | Cost]) -> list[str]:
    """Returns a sentence for each difference between the program's entries and the prediction, a
    mapping from an axis to its bytes or to its `Cost`. An axis with entries and without a
    prediction gives a sentence too.
    """
    # The names of axes are sorted, since the caller may name the axes in another order.
    entries_along: dict[tuple, list[Entry]] = {}
    for entry in entries:
        entries_along.setdefault(tuple(sorted(entry.axes)), []).append(entry)
    keys = {tuple(sorted(axes(axis))) for axis in predicted}
    sentences = []
    for axis, value in predicted.items():
        names = axes(axis)
        numbers = (value, None, None)  # the bytes; a count and hops are not predicted
        if isinstance(value, Cost):
            numbers = (value.sent, value.messages, value.chain)
        counted = entries_along.pop(tuple(sorted(names)), [])
        told = _compared(f"along {_axes_text(names)}", numbers, counted)
        # An algorithm over several axes may move data along only a part of them.
        parts = [key for key in entries_along if key not in keys and {*key} < {*names}]
        joined = itertools.chain(counted, *(entries_along[key] for key in parts))
        if told and not _compared("", numbers, list(joined)):
            told = []
            for key in parts:
                del entries_along[key]
        sentences += told
    for counted in entries_along.values():
        sentences += _compared(f"along {_axes_text(counted[0].axes)}", None, counted)
    return sentences


def _compared(what: str, predicted: tuple | None, entries: list[Entry]) -> list[str]:
    """Returns a sentence for each total of `entries` that differs from its prediction. The totals
    are the bytes, the count and the hops. Fewer hops than predicted give no sentence.

    Args:
        what: the words with which each sentence begins, such as "all-reduce along data".
        predicted: the tuple (bytes, count, hops) of predicted numbers, or None if nothing was
            predicted. An element of the tuple that is None is not compared.
        entries: the program's entries to compare. If there are none, only the bytes are compared,
            since XLA leaves out collectives of empty arrays.
    """
    kinds = ", ".join(f"{entry.count:,} {entry.kind}" for entry in entries)
    moved = sum(entry.bytes for entry in entries)
    if predicted is None:
        return [f"{what}: nothing was predicted, and the program moves {moved:,} bytes ({kinds})."]
    if not entries and not predicted[0]:
        return []
    if not entries:
        return [f"{what}: {predicted[0]:,} bytes were predicted, and the program moves none."]
    sentences = []
    units = {"bytes": "bytes", "count": "collectives", "hops": "hops in a row"}
    for (field, unit), expected in zip(units.items(), predicted, strict=True):
        actual = sum(getattr(entry, field) for entry in entries)
        # Entries of one kind and axes differ only in `conditional` and `unbounded`. Each has the
        # hops of the longest chain of this kind, so these hops count once.
        if field == "hops":
            actual = sum({entry[:2]: entry.hops for entry in entries}.values())
        # The predicted hops are an upper bound: they assume that arrays go one after another.
        if expected is None or expected == actual or (field == "hops" and actual < expected):
            continue
        # A whole multiple of the prediction is often a loop, or an operation that ran twice.
        times = actual // expected if expected and actual % expected == 0 else 1
        hint = "."
        if times > 1:
            hint = f": exactly {times} times as many; is it in a loop, or done {times} times?"
        sentences.append(
            f"{what}: {expected:,} {unit} were predicted, and the program has {actual:,} "
            f"({kinds}){hint}"
        )
    return sentences


def _uncertain(entry: Entry) -> str:
    """Returns a sentence that says why the number of runs of an entry is uncertain: the entry is in
    a conditional, or in a loop of unknown length."""
    what = f"{entry.kind} along {_axes_text(entry.axes)}"
    if entry.unbounded:
        return (
            f"{what}: stands in a loop whose number of trips XLA does not know, and is counted for "
            "one trip."
        )
    warning = ""
    if entry.kind == "collective-permute":
        warning = " If devices take different branches, a permute hangs."
    return f"{what}: stands in a conditional, and is counted as if all its branches ran.{warning}"


def _axes_text(names: tuple[str, ...]) -> str:
    """Returns axes as text, such as "data x tensor"."""
    return " x ".join(names) or "no axis"


def _chain(
    program: hlo.Module, name: str, key: Callable[..., Any], known: dict[str, Counter]
) -> Counter:
    """Returns, for each key, the length of the longest chain of collectives with that key in a
    computation. The function `key` gives each collective its key. In a chain each collective waits
    for the one before it.

    Args:
        program: the program.
        name: the name of the computation.
        key: a function from a collective to its key, such as its kind.
        known: the results for computations that were counted before. This function adds its own
            result to `known`.
    """
    if name in known:
        return known[name]
    longest: Counter = Counter()
    ends: dict[str, Counter] = {}  # for each instruction, the longest chains that end with it
    # The chains of each element of a tuple: a reader of one element does not wait for the others.
    elements: dict[str, list[Counter]] = {}
    for instruction in program[name]:
        before = [ends.get(operand, Counter()) for operand in instruction.operands]
        if instruction.opcode == "tuple":
            elements[instruction.name] = before
        elif instruction.opcode == "get-tuple-element" and instruction.operands[0] in elements:
            index = re.search(r"\bindex=(\d+)", instruction.attributes)
            before = [elements[instruction.operands[0]][int(index[1])]] if index else before
        # `_inside` counts a collective as 1; for any other instruction it returns the chains of the
        # computations that the instruction runs.
        ends[instruction.name] = _longest(before) + _inside(program, instruction, key, known)
        longest |= ends[instruction.name]  # keeps the larger length of each key
    known[name] = longest
    return longest


def _inside(
    program: hlo.Module,
    instruction: hlo.Instruction,
    key: Callable[..., Any],
    known: dict[str, Counter],
) -> Counter:
    """Returns, for each key, the length of the longest chain of collectives with that key inside
    one instruction. The function `key` gives each collective its key. In a chain each collective
    waits for the one before it.

    If the instruction is a collective, the chain is this collective, of length one. Any other
    instruction has the chains of the computations that it runs. A loop repeats the chain of its
    body in each trip. `known` has the results for computations that were counted before.
    """
    if instruction.collective:
        return Counter([key(instruction)])
    chains = []
    # `called` has the computations and their numbers of runs: 0 for a loop whose text does not
    # state its trips. The loop's name may give the mean number of trips (`counted`); without it,
    # the loop counts as one trip.
    for called, stated in instruction.called:
        trips = stated or instruction.counted or 1
        chain = _chain(program, called, key, known)
        chains.append(Counter({name: trips * hops for name, hops in chain.items()}))
    # Only one branch of a conditional runs; other computations run one after another.
    return _longest(chains) if instruction.opcode == "conditional" else sum(chains, Counter())


def _longest(chains: Sequence[Counter]) -> Counter:
    """Returns, for each key, the largest length that any of `chains` has for this key. Each of
    `chains` is a counter from keys to lengths. The union (`|`) of two counters takes the larger
    number."""
    return functools.reduce(operator.or_, chains, Counter())


def along(groups: Sequence[np.ndarray] | None, shape: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the axes along which the devices of at least one group differ in their place on the
    mesh.

    `groups` has an array of device numbers for each group. None stands for one group of all
    devices. If `groups` is empty, the result is empty. `shape` has the sizes of the mesh's axes.
    Raises `ValueError` for a device number that the mesh lacks.
    """
    sizes = tuple(shape.values())
    groups = [np.arange(math.prod(sizes))] if groups is None else groups
    if not len(groups):
        return ()
    largest = max(int(group.max()) for group in groups)
    if largest >= math.prod(sizes):
        raise ValueError(
            "certificate.read needs the mesh that the program was compiled for: the program names "
            f"device {largest}, and the mesh {dict(shape)} has {math.prod(sizes)} devices. Pass "
            "that mesh."
        )
    coordinates = [np.stack(np.unravel_index(group, sizes)) for group in groups]
    # The range of each coordinate in a group: 0 along an axis on which its devices agree.
    spread = np.max([np.ptp(group, axis=1) for group in coordinates], axis=0)
    return tuple(name for name, extent in zip(shape, spread, strict=True) if extent)
