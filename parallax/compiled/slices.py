"""Finds the messages between TPU slices in a program's text, which has them as sends and receives.

A program for several slices has one text, which each slice runs on its own devices. A collective
between slices is a pair, a `send` and a `recv`, which have the same *rendezvous* (a name) in their
attributes. The text names the sender and the receiver, each as slice * 100000 + device; slices are
counted from 1, and devices from 0: `100003->200003` goes from device 3 of the first slice to device
3 of the second. This module replaces each pair by the collective that it stands for, over the
devices of all slices, so that other modules need not know about slices. A `line` is an instruction.
`partitions` is the number of devices of a slice.
"""

import re
from collections.abc import Mapping
from typing import Any

SLICE = 100_000  # a device's number is its slice's number times this, plus its place in the slice
KIND = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
RENDEZVOUS = re.compile(r'_xla_host_transfer_rendezvous="([^"]+)"')
PAIR = re.compile(r"\{(\d+)->(\d+)\}")
GRID = re.compile(r'_xla_megascale_target="\{([\d,]+)\}x\{(\d+):(\d+)\}"')


def joined(computations: dict[str, list[Any]], text: str) -> dict[str, list[Any]]:
    """Returns the computations, in which each message between slices is replaced by a
    "collective-permute" or an "all-reduce".

    Args:
        computations: the instructions of each computation.
        text: the text of the program. Its first line states the number of devices of a slice.

    Raises:
        ValueError: a collective between slices is of a kind that cannot be read, such as an
            all-to-all.
    """
    if "_xla_megascale_transfer_type" not in text:
        return computations
    head = re.search(r"num_partitions=(\d+)", text)
    assert head is not None
    return {name: _joined(lines, int(head[1])) for name, lines in computations.items()}


def _joined(lines: list[Any], partitions: int) -> list[Any]:
    """Returns the instructions of a computation, with the collectives between slices replaced. The
    `recv` of such a collective becomes the collective's start, and the `recv-done` its end. The
    `send` stays as it is, and the start waits for it.
    """
    # The name of the `send` of each rendezvous.
    sends = {
        found[1]: line.name
        for line in lines
        if line.opcode == "send" and (found := RENDEZVOUS.search(line.attributes)) is not None
    }
    starts: dict[str, Any] = {}
    for line in lines:
        if line.opcode == "recv" and (kind := KIND.search(line.attributes)):
            starts[line.name] = _collective(line, kind[1], sends, partitions)
    return [_with_collective(line, starts) for line in lines]


def _with_collective(line: Any, starts: Mapping[str, Any]) -> Any:
    """Returns the instruction that replaces the instruction `line`: for a `recv` of a collective,
    the start of the collective; for its `recv-done`, the end of the collective; for any other
    instruction, `line` itself. `starts` maps the name of each such `recv` to the start that
    replaces it."""
    if line.opcode == "recv-done" and line.operands and line.operands[0] in starts:
        start = starts[line.operands[0]]
        return line._replace(opcode=start.opcode.replace("-start", "-done"))
    return starts.get(line.name, line)


def _collective(line: Any, kind: str, sends: Mapping[str, str], partitions: int) -> Any:
    """Returns the start of the collective that stands for a `recv` (`line`) and its `send`.

    The `recv` becomes a `collective-permute-start` or an `all-reduce-start`, with its devices in
    XLA's own notation, so that `hlo` reads it like any other collective. The new instruction also
    waits for the `send` that has the same rendezvous (a name) in its attributes.

    Args:
        line: the `recv`.
        kind: the kind of message, a word in the program's text: "ONE_TO_ONE" or "ALL_REDUCE".
        sends: a dict from a rendezvous, the name that a `send` and its `recv` share, to the name of
            the `send`.
        partitions: the number of devices of a slice.

    Raises:
        ValueError: `kind` is neither "ONE_TO_ONE" nor "ALL_REDUCE", or an all-reduce does not name
            its slices.
    """
    # A `recv` returns a tuple: `line.result` is the text in its brackets, "array, u32[], token".
    array = line.result.split(", u32[]", 1)[0]
    rendezvous = RENDEZVOUS.search(line.attributes)
    operands = line.operands
    if rendezvous and rendezvous[1] in sends:
        operands = [sends[rendezvous[1]], *operands]

    def place(number: str) -> int:
        """Returns the index of a device among the devices of all slices. `number` is the device's
        number in the text, such as 200003 for device 3 of the second slice."""
        return (int(number) // SLICE - 1) * partitions + int(number) % SLICE

    # An all-reduce names its slices, and the first and the last device of each, as in {1,2}x{0:7}.
    # Each group has the devices with the same number in all these slices.
    grid = GRID.search(line.attributes)
    if kind == "ONE_TO_ONE":
        pairs = ",".join(f"{{{place(a)},{place(b)}}}" for a, b in PAIR.findall(line.attributes))
        attributes = f"source_target_pairs={{{pairs}}}, {line.attributes}"
        return line._replace(
            opcode="collective-permute-start",
            result=f"{array}, {array}",  # a start returns its operands and its results
            operands=operands,
            attributes=attributes,
        )
    if kind == "ALL_REDUCE" and grid:
        slices, first, last = grid[1].split(","), int(grid[2]), int(grid[3])
        groups = [
            ",".join(str((int(k) - 1) * partitions + device) for k in slices)
            for device in range(first, last + 1)
        ]
        groups_text = ",".join(f"{{{group}}}" for group in groups)
        attributes = f"replica_groups={{{groups_text}}}, {line.attributes}"
        return line._replace(
            opcode="all-reduce-start", result=array, operands=operands, attributes=attributes
        )
    raise ValueError(
        f"This program has a collective between TPU slices that cannot be read: {kind} "
        f"({line.name}). Only lax.psum, and the permutes that the package's rings send, can be "
        "read. Use ring(axis) for the axis that spans the slices."
    )
