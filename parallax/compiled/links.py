"""The links of a machine, and the links that each message uses. A link joins neighbours on a torus,
a GPU and its switch, or a device and the network.

    machine = links.torus(hardware.TPU_V5E, [device.coords for device in mesh.devices.flat])
    # The seconds for which each link is busy, and the longest latency of a message.
    machine.crossing({(0, 1): 4096})

A link carries one message at a time; messages that share a link wait for each other. *Flows* map
each pair (sender, receiver) to the bytes that are sent; devices are numbered in the order of the
mesh. An `alpha` is a latency in seconds, a `beta` the seconds per byte. `hardware.fast` has the
alpha and the beta of a link, and `hardware.slow` those of the network. `hardware.reached[1]` is the
share of a link's stated rate that programs reach. A *server* is the GPUs behind one switch. A
`Machine` has, for each device, the coordinates of the device (`places`) and the index of its slice
of TPUs or of its server (`groups`). `sizes` has the length of each dim of the torus; it is empty if
a switch joins the devices.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from parallax.compiled import hlo, slices
from parallax.hardware import Hardware
from parallax.torus import FLAT, closed_dims

Link = tuple[Any, ...]
Flows = Mapping[tuple[int, int], float]


class Machine(NamedTuple):
    """The devices of a program, in the order of its mesh.

    Attributes:
        hardware: the rates of the chip, such as `hardware.TPU_V5E`.
        places: for each device a tuple of its coordinates on the torus. If a switch joins the
            devices, the tuple has one number: the index of the device.
        groups: for each device the index of its slice of TPUs, or of its server.
        sizes: the length of each dim of the torus; an empty tuple if there is a switch.
        cores: the number of devices that share a chip.
        closed: for each dim of the torus, whether its ends are linked, as in a ring.
        numbers: for each device its number in programs for several slices, as `slices.numbers`
            returns them. If empty, the devices of a slice are counted in the mesh's order.
    """

    hardware: Hardware
    places: tuple[tuple[int, ...], ...]
    groups: tuple[int, ...]
    sizes: tuple[int, ...] = ()
    cores: int = 1
    closed: tuple[bool, ...] = ()
    numbers: tuple[int, ...] = ()

    def in_text(self) -> list[int]:
        """Returns the number of each device in programs for several slices."""
        if self.numbers:
            return list(self.numbers)
        counts: Counter[int] = Counter()
        numbers = []
        for group in self.groups:
            numbers.append((group + 1) * slices.SLICE + counts[group])
            counts[group] += 1
        return numbers

    def kind(self, source: int, target: int) -> str:
        """Returns the kind of connection of two devices: "link" inside a slice or server, "network"
        between slices or servers."""
        return "link" if self.groups[source] == self.groups[target] else "network"

    def path(self, source: int, target: int) -> list[Link]:
        """Returns the links that a message takes from one device to another, in order. Each link is
        given by its name, which is a tuple. On a torus the message goes along one dim after
        another; if a dim is closed in a ring, the message takes the shorter way round. A device
        needs no link to itself."""
        if source == target:
            return []
        if self.groups[source] != self.groups[target]:
            # The devices of a chip share its port to the network.
            sender, receiver = ((self.groups[k], *self.places[k]) for k in (source, target))
            return [("network out", *sender), ("network in", *receiver)]
        if not self.sizes:
            return [("out", source), ("in", target)]
        # On a torus the name of a link has its slice, the coordinates of the chip that it leaves,
        # and its direction: a dim and a sign.
        links, here, group = [], list(self.places[source]), self.groups[source]
        for dim, size in enumerate(self.sizes):
            ahead = self.places[target][dim] - here[dim]
            if self.closed[dim] and abs(ahead) * 2 > size:  # the way round the ring is shorter
                ahead -= size if ahead > 0 else -size
            sign = 1 if ahead > 0 else -1
            for _ in range(abs(ahead)):
                links.append((group, *here, dim, sign))
                here[dim] = (here[dim] + sign) % size
        return links

    def crossing(self, flows: Flows) -> tuple[dict[Link, float], float]:
        """Returns the seconds for which each link is busy, and the longest latency of a message in
        seconds. `flows` maps (sender, receiver) to the bytes to send. The times of messages that
        share a link are added."""
        busy: dict[Link, float] = {}
        latency = 0.0
        for (source, target), size in flows.items():
            path = self.path(source, target)
            far = bool(path) and path[0][0] == "network out"  # between slices or servers
            hop = self.hardware.slow if far else self.hardware.fast
            # Links inside a slice or server reach only a share of their stated rate.
            seconds_per_byte = hop.beta if far else hop.beta / self.hardware.reached[1]
            for link in path:
                busy[link] = busy.get(link, 0.0) + size * seconds_per_byte
            # A network's or a switch's alpha is the latency of both ports together: one hop.
            hops = 1 if far or not self.sizes else len(path)
            latency = max(latency, hops * hop.alpha if path else 0.0)
        return busy, latency


def torus(
    hardware: Hardware,
    coordinates: Sequence[Sequence[int]],
    groups: Sequence[int] | None = None,
) -> Machine:
    """Returns the machine of TPUs whose devices have the given `coordinates`, one tuple for each
    device. `groups` has the index of each device's slice; by default there is only one slice.
    Devices of a slice with equal coordinates are cores of one chip."""
    places = tuple(tuple(int(k) for k in place) for place in coordinates)
    groups = tuple(groups or (0,) * len(places))
    sizes = tuple(max(column) + 1 for column in zip(*places, strict=True))
    # The devices at one place of one slice are the cores of a chip.
    cores = max(Counter(zip(groups, places, strict=True)).values())
    # `FLAT` has the chips whose torus has two dims. `closed_dims` returns for each dim whether its
    # ends are linked.
    return Machine(
        hardware, places, groups, sizes, cores, closed_dims(hardware.name in FLAT, sizes)
    )


def switch(hardware: Hardware, devices: int, in_machine: int = 8) -> Machine:
    """Returns the machine of `devices` GPUs. Each server has `in_machine` GPUs and a switch that
    joins them, and a network joins the servers. Each GPU has one port to its switch and one to the
    network."""
    return Machine(
        hardware,
        tuple((k,) for k in range(devices)),  # places
        tuple(k // in_machine for k in range(devices)),  # the server of each device
    )


def of_a_hop(machine: Machine, axes: Mapping[str, int]) -> dict[str, float]:
    """Returns, for each mesh axis of several devices, the mean number of links in a hop of a ring
    along the axis. A hop is a message to the next device of the ring. The mean is 1 if all these
    messages go to neighbours.

    The mean is below 1 if devices share a chip. If a switch joins the devices, the mean is 2, since
    a message uses the sender's link to the switch and the switch's link to the receiver.
    """
    # The numbers of the devices are in an array of the mesh's shape. `np.roll` shifts it along a
    # dim, so that each device is paired with the next one on the ring.
    numbers, links_per_hop = np.arange(len(machine.places)).reshape(tuple(axes.values())), {}
    for dim, (name, size) in enumerate(axes.items()):
        if size > 1:
            pairs = zip(numbers.flat, np.roll(numbers, -1, dim).flat, strict=True)
            paths = [machine.path(int(a), int(b)) for a, b in pairs]
            links_per_hop[name] = float(np.mean([len(path) for path in paths]))
    return links_per_hop


def flows(instruction: hlo.Instruction, devices: int) -> tuple[Flows, int]:
    """Returns two things: a dict from (sender, receiver) to the bytes that a collective sends
    between them, and the number of rounds of the collective. The messages of a round are sent at
    the same time, and the rounds follow each other.

    The text of a program names the pairs (sender, receiver) of a permute. It does not say how XLA's
    runtime sends the messages of other collectives. This function assumes rings in both directions
    for an all-gather, a reduce-scatter and an all-reduce. It assumes a message to each device for
    an all-to-all, and messages from the first device of each group for a broadcast. `devices` is
    the number of devices of the program. If the text names no groups, all devices are one group.
    """
    kind, groups = instruction.collective, instruction.groups
    groups = [range(devices)] if groups is None else groups
    sizes = [op.bytes for op in instruction.ops]
    total = float(sum(sizes))
    if kind == "collective-permute":
        return {(int(a), int(b)): total for a, b in groups if a != b}, 1
    if kind == "collective-broadcast":  # from the first device of each group
        return {(int(first), int(b)): total for first, *others in groups for b in others}, 1
    sent: dict[tuple[int, int], float] = {}
    n = max(len(group) for group in groups)
    for group in groups:
        members = [int(k) for k in group]
        if "all-to-all" in str(kind):
            sent |= {(a, b): total / n for a in members for b in members if a != b}
            continue
        # The bytes that a device sends of each block; it sends n - 1 blocks. `total` has the bytes
        # of the results: the whole array of an all-gather or all-reduce, and one block of a
        # reduce-scatter. An all-reduce sends each block twice.
        part = {"all-gather": total / n, "reduce-scatter": total, "all-reduce": 2 * total / n}[
            str(kind)
        ]
        for a, b in zip(members, [*members[1:], members[0]], strict=True):
            if a != b:
                for pair in ((a, b), (b, a)):  # half of the bytes in each direction
                    sent[pair] = sent.get(pair, 0.0) + part * (n - 1) / 2
    # An all-to-all sends all its messages at the same time. A ring has n - 1 rounds. An all-reduce
    # is two rings, one after the other.
    rounds = 1 if "all-to-all" in str(kind) else (n - 1) * (2 if kind == "all-reduce" else 1)
    return sent, rounds


def check_devices(text: str, machine: Machine) -> None:
    """Raises a `ValueError` if the first line of a program's text states another number of devices
    than that of `machine`. The text of a program for several TPU slices states the devices of one
    slice."""
    stated = re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", text.partition("\n")[0])
    devices, groups = math.prod(map(int, stated)), len(set(machine.groups))
    if stated and len(machine.places) not in (devices, devices * groups):
        raise ValueError(
            f"The program was compiled for {devices} devices, and the machine has "
            f"{len(machine.places)}. Pass the machine that the program was compiled for."
        )


def by_kind(compiled: jax.stages.Compiled | str, machine: Machine) -> dict[str, int]:
    """Returns the bytes that all devices together send in a program, by kind of connection: "link"
    inside a slice or server, "network" between slices or servers. Raises `ValueError` if the
    program is for another number of devices."""
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    assert text is not None
    check_devices(text, machine)
    bytes_by_kind: Counter[str] = Counter()
    for run in hlo.runs(hlo.module(text, machine.in_text())):
        sent, _ = flows(run.instruction, len(machine.places))
        for (source, target), size in sent.items():
            kind = machine.kind(source, target)
            bytes_by_kind[kind] += round(run.times * size)
    return dict(bytes_by_kind)
