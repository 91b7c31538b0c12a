"""Finds the messages between TPU slices in a program's text, which has them as sends and receives.

A program for several slices has one text, which each slice runs on its own devices. A collective
between slices is a pair, a `send` and a `recv`, which have the same *rendezvous* (a name) in their
attributes. The text names the sender and the receiver, each as slice * 100000 + device; slices are
counted from 1, and devices from 0: `100003->200003` goes from device 3 of the first slice to device
3 of the second. In collectives inside a slice, the text counts the devices of a slice in the order
of the mesh. This module replaces each pair by the collective that it stands for, and writes all
collectives over the devices of all slices, so that other modules need not know about slices. A
`line` is an instruction. `partitions` is the number of devices of a slice.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.sharding import Mesh

SLICE = 100_000  # a device's number is its slice's number times this, plus its place in the slice
KIND = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
RENDEZVOUS = re.compile(r'_xla_host_transfer_rendezvous="([^"]+)"')
PAIR = re.compile(r"\{(\d+)->(\d+)\}")
GRID = re.compile(r'_xla_megascale_target="\{([\d,]+)\}x\{(\d+):(\d+)\}"')


def numbers(mesh: Mesh) -> list[int]:
    """Returns the numbers that programs for several slices give to the devices of a mesh, in the
    order of the mesh. Returns an empty list if its devices have no such numbers."""
    ids = [device.id for device in mesh.devices.flat]
    return ids if all(number >= SLICE for number in ids) else []


def joined(
    computations: dict[str, list[Any]], text: str, numbers: Sequence[int] = ()
) -> dict[str, list[Any]]:
    """Returns the computations, in which each message between slices is replaced by a
    "collective-permute" or an "all-reduce", and the groups of each other collective are those of
    all slices.

    Args:
        computations: the instructions of each computation.
        text: the text of the program. Its first line states the number of devices of a slice.
        numbers: the numbers of the devices of all slices, in the order of the mesh. By default a
            device's position in the mesh is counted slice by slice, and the groups inside a slice
            stay as they are.

    Raises:
        ValueError: a collective between slices is of a kind that cannot be read, such as an
            all-to-all, or the program is for other devices than `numbers`.
    """
    head = re.search(r"num_partitions=(\d+)", text.partition("\n")[0])
    partitions = int(head[1]) if head else 0
    if not head or len(numbers) <= partitions:
        numbers = ()  # the program is for one slice, or the devices are not known
    if not numbers and "_xla_megascale_transfer_type" not in text:
        return computations
    positions = {number: position for position, number in enumerate(numbers)}  # in the mesh
    slices: dict[int, list[int]] = {}  # the positions of the devices of each slice
    for number, position in positions.items():
        slices.setdefault(number // SLICE, []).append(position)
    sizes = {len(of) for of in slices.values()}
    if len(slices) > 1 and sizes != {partitions}:
        raise ValueError(
            f"The program was compiled for slices of {partitions} devices, and the mesh has slices "
            f"of {sorted(sizes)}. Pass the mesh, or the machine, that it was compiled for."
        )

    def place(number: str) -> int:
        """Returns a device's position in the mesh. `number` is its number in the text, such as
        200003 for device 3 of the second slice."""
        if not numbers:
            return (int(number) // SLICE - 1) * partitions + int(number) % SLICE
        if int(number) not in positions:
            raise ValueError(
                f"The program names device {number}, and the mesh has no device of this number. "
                "Pass the mesh, or the machine, that the program was compiled for."
            )
        return positions[int(number)]

    return {
        name: _joined([_in_all(line, slices, partitions) for line in lines], place)
        for name, lines in computations.items()
    }


def _in_all(line: Any, slices: Mapping[int, list[int]], partitions: int) -> Any:
    """Returns the instruction `line`. If it is a collective inside a slice, its groups are repeated
    for every slice. `slices` maps each slice to the positions of its devices in the mesh."""
    if not line.collective or not slices:
        return line
    groups = [range(partitions)] if line.groups is None else line.groups
    everywhere = [[of[k] for k in group] for of in slices.values() for group in groups]
    return _with_groups(line, everywhere)


def _with_groups(line: Any, groups: Sequence[Any]) -> Any:
    """Returns the collective `line` with its groups of devices, or its pairs (sender, receiver),
    replaced by `groups`, each the positions of its devices."""
    name = "source_target_pairs" if line.collective == "collective-permute" else "replica_groups"
    written = ",".join("{" + ",".join(map(str, group)) + "}" for group in groups)
    # The first groups in the attributes count.
    return line._replace(attributes=f"{name}={{{written}}}, {line.attributes}")


def _joined(lines: list[Any], place: Callable[[str], int]) -> list[Any]:
    """Returns the instructions of a computation, with the collectives between slices replaced. The
    `recv` of such a collective becomes the collective's start, and the `recv-done` its end. The
    `send` stays as it is, and the start waits for it. `place` returns a device's position in the
    mesh, from its number in the text.
    """
    # The `send` of each rendezvous.
    sends = {
        found[1]: line
        for line in lines
        if line.opcode == "send" and (found := RENDEZVOUS.search(line.attributes)) is not None
    }
    replaced: dict[str, Any] = {}
    for line in lines:
        if line.opcode == "recv" and (kind := KIND.search(line.attributes)):
            rendezvous = RENDEZVOUS.search(line.attributes)
            send = sends.get(rendezvous[1]) if rendezvous else None
            start = _collective(line, kind[1], send, place)
            half = send and next((k for k in lines if _is_half(k, send, start, replaced)), None)
            if half:
                # One permute of the program, whose other pairs stay inside slices.
                start = _with_groups(start, [*start.groups, *half.groups])
                replaced[half.name] = half._replace(opcode="collective-permute-update")
            replaced[line.name] = start
    return [_with_collective(line, replaced) for line in lines]


def _is_half(line: Any, send: Any, start: Any, replaced: Mapping[str, Any]) -> bool:
    """Returns whether `line` and `start` are two halves of one permute: `line` has its pairs inside
    slices, and `start` its pairs between slices. Then both send the same array, and no device is a
    sender in both, or a receiver in both. `send` is the instruction from which `start` was made.
    """
    if {line.collective, start.collective} != {"collective-permute"} or line.name in replaced:
        return False
    ends = [{int(pair[k]) for pair in start.groups} for k in (0, 1)]
    others = [{int(pair[k]) for pair in line.groups} for k in (0, 1)]
    is_apart = all(of.isdisjoint(other) for of, other in zip(ends, others, strict=True))
    return is_apart and line.operands[:1] == send.operands[:1]


def _with_collective(line: Any, replaced: Mapping[str, Any]) -> Any:
    """Returns the instruction that replaces the instruction `line`: for a `recv` of a collective,
    the start of the collective; for its `recv-done`, the end of the collective; for any other
    instruction that is not in `replaced`, `line` itself. `replaced` maps the name of each such
    `recv`, and of each other instruction to replace, to the instruction that replaces it."""
    if line.opcode == "recv-done" and line.operands and line.operands[0] in replaced:
        start = replaced[line.operands[0]]
        return line._replace(opcode=start.opcode.replace("-start", "-done"))
    return replaced.get(line.name, line)


def _collective(line: Any, kind: str, send: Any | None, place: Callable[[str], int]) -> Any:
    """Returns the start of the collective that stands for a `recv` (`line`) and its `send`, which
    has the same rendezvous (a name) in its attributes.

    The `recv` becomes a `collective-permute-start` or an `all-reduce-start`, with its devices in
    XLA's own notation, so that `hlo` reads it like any other collective. The new instruction also
    waits for the `send`.

    Args:
        line: the `recv`.
        kind: the kind of message, a word in the program's text: "ONE_TO_ONE" or "ALL_REDUCE".
        send: the `send`, or None if the computation has none.
        place: a function from a device's number in the text to its position in the mesh.

    Raises:
        ValueError: `kind` is neither "ONE_TO_ONE" nor "ALL_REDUCE", or an all-reduce does not name
            its slices.
    """
    # A `recv` returns a tuple: `line.result` is the text in its brackets, "array, u32[], token".
    array = line.result.split(", u32[]", 1)[0]
    operands = [send.name, *line.operands] if send else line.operands
    # An all-reduce names its slices, and the first and the last device of each, as in {1,2}x{0:7}.
    # Each group has the devices with the same number in all these slices.
    grid = GRID.search(line.attributes)
    if kind == "ONE_TO_ONE":
        pairs = [(place(a), place(b)) for a, b in PAIR.findall(line.attributes)]
        start = line._replace(
            opcode="collective-permute-start",
            result=f"{array}, {array}",  # a start returns its operands and its results
            operands=operands,
        )
        return _with_groups(start, pairs)
    if kind == "ALL_REDUCE" and grid:
        slices, first, last = grid[1].split(","), int(grid[2]), int(grid[3])
        groups = [
            [place(str(int(k) * SLICE + device)) for k in slices]
            for device in range(first, last + 1)
        ]
        start = line._replace(opcode="all-reduce-start", result=array, operands=operands)
        return _with_groups(start, groups)
    raise ValueError(
        f"This program has a collective between TPU slices that cannot be read: {kind} "
        f"({line.name}). Only lax.psum, and the permutes that the package's rings send, can be "
        "read. Use ring(axis) for the axis that spans the slices."
    )
