"""Messages between TPU slices, as a program's text has them: sends and receives through the host, which say what they do.

A program for several slices is one program for one of them. What its mesh lets cross is written as a pair of `send` and `recv`
with the devices at both ends, slices counted from one: `100003->200003` is from device 3 of the first slice to device 3 of the
second. Here each pair is made the collective that it stands for, over the devices of all slices, so that the rest need not know.
"""

import re
from collections.abc import Mapping
from typing import Any

SLICE = 100_000  # what a slice's number is multiplied by
KIND = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
RENDEZVOUS = re.compile(r'_xla_host_transfer_rendezvous="([^"]+)"')
PAIR = re.compile(r"\{(\d+)->(\d+)\}")
GRID = re.compile(r'_xla_megascale_target="\{([\d,]+)\}x\{(\d+):(\d+)\}"')


def joined(computations: dict[str, list[Any]], text: str) -> dict[str, list[Any]]:
    """The computations with each message between slices as a collective: "collective-permute" or "all-reduce".

    Args:
        computations: the instructions of each.
        text: the program's; its head says how many devices a slice has.

    Raises:
        ValueError: a collective between slices of another kind.
    """
    if "_xla_megascale_transfer_type" not in text:
        return computations
    head = re.search(r"num_partitions=(\d+)", text)
    assert head is not None
    return {name: _joined(lines, int(head[1])) for name, lines in computations.items()}


def _joined(lines: list[Any], partitions: int) -> list[Any]:
    sends = {
        found[1]: line.name
        for line in lines
        if line.opcode == "send" and (found := RENDEZVOUS.search(line.attributes)) is not None
    }
    made: dict[str, Any] = {}
    for line in lines:
        if line.opcode == "recv" and (kind := KIND.search(line.attributes)):
            made[line.name] = _collective(line, kind[1], sends, partitions)
    found = []
    for line in lines:
        begun = made.get(line.operands[0]) if line.opcode == "recv-done" and line.operands else None
        done = line._replace(opcode=begun.opcode.replace("-start", "-done")) if begun else line
        found.append(made.get(line.name, done))
    return found


def _collective(line: Any, kind: str, sends: Mapping[str, str], partitions: int) -> Any:
    """A `recv` as the start of the collective; it waits for what its `send` takes."""
    array = line.result.split(", u32[]", 1)[0]
    rendezvous = RENDEZVOUS.search(line.attributes)
    operands = (
        [sends[rendezvous[1]], *line.operands]
        if rendezvous and rendezvous[1] in sends
        else line.operands
    )
    place = lambda number: (int(number) // SLICE - 1) * partitions + int(number) % SLICE
    grid = GRID.search(line.attributes)
    if kind == "ONE_TO_ONE":
        pairs = ",".join(f"{{{place(a)},{place(b)}}}" for a, b in PAIR.findall(line.attributes))
        attributes = f"source_target_pairs={{{pairs}}}, {line.attributes}"
        return line._replace(
            opcode="collective-permute-start",
            result=f"{array}, {array}",
            operands=operands,
            attributes=attributes,
        )
    if kind == "ALL_REDUCE" and grid:
        slices, first, last = grid[1].split(","), int(grid[2]), int(grid[3])
        groups = [
            ",".join(str((int(k) - 1) * partitions + device) for k in slices)
            for device in range(first, last + 1)
        ]
        attributes = (
            f"replica_groups={{{','.join(f'{{{group}}}' for group in groups)}}}, {line.attributes}"
        )
        return line._replace(
            opcode="all-reduce-start", result=array, operands=operands, attributes=attributes
        )
    raise ValueError(
        f"This program has a collective between TPU slices that cannot be read, {kind} ({line.name}). Read are permutes, as the "
        "package's rings send them, and lax.psum: move the data along that axis with ring(axis)."
    )
