"""Simulates how many seconds a collective takes on a network of many devices, from the table of
messages of the collective. Messages that use the same link share the bandwidth of this link.

    network = networks.of(hardware.A100, devices=16_384)
    networks.seconds(halving.table(2048), nbytes, network, group=networks.Group(2048, stride=8))

In a round every device sends its messages at the same time. The round takes the largest latency of
any message, plus the longest time that any link needs for the bytes of its messages. In a `Link`,
alpha is the latency in seconds, and beta the seconds per byte. A *route* is a table of messages,
round by round; an algorithm that runs several routes side by side has a tuple of routes (`Tables`).
The devices of a mesh are numbered with the last axis fastest. `tests/test_networks.py` compares the
seconds with a simulation of every single message.
"""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from parallax import torus
from parallax.collectives import halving, machines, ring, two_rings
from parallax.collectives.cost import Link, Round
from parallax.collectives.from_table import messages
from parallax.collectives.route import Tables
from parallax.hardware import Hardware
from parallax.validate import divisors


class Group(NamedTuple):
    """A group of devices along one mesh axis: `size` devices whose numbers are `stride` apart. All
    groups along the axis have the same size and stride, and send at the same time.

    Attributes:
        size: the number of devices along the axis.
        stride: the product of the sizes of the mesh axes after this one. Neighbours along the last
            axis have successive numbers, so its stride is 1.
    """

    size: int
    stride: int = 1


@runtime_checkable
class Network(Protocol):
    """The way in which devices are wired."""

    @property
    def devices(self) -> int:
        """The number of all devices."""
        ...

    def round(self, sent: Sequence[tuple[np.ndarray, int]]) -> float:
        """Returns the seconds until all messages of a round have arrived.

        Each element of `sent` stands for messages that all devices send at the same time, one each.
        The element is a pair: an array [devices] with the number of the receiver of each device's
        message, and the bytes of one message.
        """
        ...


class Level(NamedTuple):
    """One level of a network of nested groups.

    Attributes:
        devices: the number of devices in a group of this level.
        link: the link of one device, in one direction, to the devices of its group.
        shared: the oversubscription. A group of this level consists of smaller groups. The n
            devices of a smaller group share the links by which messages leave the smaller group.
            Together these links have n / `shared` times the rate of `link`.
    """

    devices: int
    link: Link
    shared: float = 1.0


class Nested(NamedTuple):
    """Nested groups of devices, for example the devices of a machine, the machines of a leaf
    switch, and the leaf switches of the spine. The last level has all devices in one group.

    Attributes:
        levels: one `Level` for each size of a group, from the smallest groups to the group of all
            devices.
    """

    levels: tuple[Level, ...]

    @property
    def devices(self) -> int:
        """The number of all devices."""
        return self.levels[-1].devices

    def round(self, sent: Sequence[tuple[np.ndarray, int]]) -> float:
        """Returns the seconds until all messages of a round have arrived.

        Each element of `sent` is a pair: an array [devices] with the receiver of each device's
        message, and the bytes of one message. A device is in a group of each size (`levels`). In
        each of its groups, the device has a link of its own (`Level.link`). A message uses the
        sender's own link only in the smallest group that has both the sender and the receiver. The
        message also leaves each smaller group that has the sender, by links that the devices of the
        smaller group share (`Level.shared`).
        """
        # Each device's own number, the longest latency, and the seconds of the busiest link.
        here, alpha, busy = np.arange(self.devices), 0.0, 0.0
        inside = 1  # devices in a group of the level below
        # [messages, devices]: whether a device's message stays in its group of the level below.
        within = np.zeros((len(sent), self.devices), bool)
        for k, (to, _) in enumerate(sent):
            within[k] = to == here
        for level in self.levels:
            ports = np.zeros(self.devices)  # bytes that each device sends over this level's links
            for k, (to, nbytes) in enumerate(sent):
                crosses = ~within[k]  # leaves its group of the level below
                within[k] = to // level.devices == here // level.devices
                ports += nbytes * (crosses & within[k])
            # The bytes of each device that leave its group of this level. They leave the device's
            # group of the level below too.
            leaving = sum(
                (nbytes * ~within[k] for k, (_, nbytes) in enumerate(sent)), np.zeros(self.devices)
            )
            # The level's own links count only if some message stays in its groups.
            if ports.any():
                alpha = max(alpha, level.link.alpha)
                busy = max(busy, level.link.beta * ports.max())
            # The shared links of a group of the level below carry all bytes that leave the group:
            # those that stay in this level's group (`ports`) and those that leave it (`leaving`).
            # Together the shared links of a group with `members` devices are as fast as
            # `members / level.shared` links of one device. `out` is the most of any group, for each
            # of its devices. At the first level a group of the level below is a single device
            # (`inside` is 1), whose link was counted above.
            if inside > 1:
                starts = np.arange(0, self.devices, inside)  # the last group may be smaller
                members = np.diff(starts, append=self.devices)
                out = (np.add.reduceat(ports + leaving, starts) / members).max()
                busy = max(busy, level.link.beta * level.shared * out)
            inside = level.devices
        return alpha + busy


class Torus(NamedTuple):
    """A box of chips, with one device or more on each. Each chip is linked to its two neighbours
    along every dim. Along a dim that closes in a ring, the last chip of a row is also linked to the
    first.

    Attributes:
        shape: the number of chips along each dim. The chips are numbered in row-major order.
        link: the link between neighbours, in one direction.
        rings: whether each dim closes in a ring; () if all do.
        chips: for each device, the index of its chip; () if device k is on chip k // cores.
        cores: the number of devices on a chip. Messages between them use no link.
    """

    shape: tuple[int, ...]
    link: Link
    rings: tuple[bool, ...] = ()
    chips: tuple[int, ...] = ()
    cores: int = 1

    @property
    def devices(self) -> int:
        """The number of all devices."""
        return math.prod(self.shape) * self.cores

    def round(self, sent: Sequence[tuple[np.ndarray, int]]) -> float:
        """Returns the seconds until all messages of a round have arrived.

        Each element of `sent` is a pair: an array [devices] with the receiver of each device's
        message, and the bytes of one message. A message crosses the dims of the torus one after
        another. Along a dim that closes in a ring the message goes the shorter way round.
        """
        chips = np.array(self.chips) if self.chips else np.arange(self.devices) // self.cores
        start = np.stack(np.unravel_index(chips, self.shape))  # [dims, devices]
        rings = self.rings or (True,) * len(self.shape)
        # [dims, 2, chips]: the bytes on the link that leaves each chip along each dim, forward (0)
        # and back (1). There are at most as many chips as devices; the other places stay 0.
        carried = np.zeros((len(self.shape), 2, self.devices))
        hops = 0  # of the longest way
        for to, nbytes in sent:
            # For the message of each device: the coordinates [dims, devices] of its end and of the
            # chip where it is now, and its hops so far.
            end, at, far = (
                np.stack(np.unravel_index(chips[to], self.shape)),
                start.copy(),
                np.zeros(self.devices, int),
            )
            for dim, length in enumerate(self.shape):
                ahead = end[dim] - at[dim]  # below 0: back
                if rings[dim]:
                    # The shorter way round; forward if both ways are equal. So a message goes at
                    # most `most_back` places back, and at most `length // 2` forward.
                    most_back = (length - 1) // 2
                    ahead = (ahead + most_back) % length - most_back
                back, steps = ahead < 0, np.abs(ahead)
                far += steps
                for hop in range(int(steps.max(initial=0))):
                    moves = steps > hop  # messages that are not yet at their end in this dim
                    number = np.asarray(np.ravel_multi_index(tuple(at), self.shape))  # of the chip
                    for direction in (0, 1):
                        in_direction = moves & (back == bool(direction))
                        carried[dim, direction] += nbytes * np.bincount(
                            number[in_direction], minlength=self.devices
                        )
                    at[dim] = np.where(moves, (at[dim] + np.where(back, -1, 1)) % length, at[dim])
            hops = max(hops, int(far.max(initial=0)))
        return self.link.alpha * hops + self.link.beta * float(carried.max(initial=0.0))


def of(hardware: Hardware, devices: int) -> "Nested | Torus":
    """Returns the network of this number of devices. TPUs of one slice form a torus. All other
    devices form domains with fast links inside. A slower network without oversubscription joins the
    domains. Raises `ValueError` if `devices` TPUs of one slice do not fill their chips: `devices`
    must be a multiple of `hardware.cores`, the number of devices on a chip."""
    domain = min(hardware.domain, devices)
    if hardware.platform == "tpu" and devices <= domain:
        # The torus of the hardware, if it has this number of chips; else one that is near to a
        # cube, or to a square for the chips in `torus.FLAT`. If the hardware has no torus,
        # `hardware.torus` is empty and has the product 1: `> 1` keeps one chip from taking it.
        # `closed_dims` says whether each dim closes in a ring.
        chips, remainder = divmod(devices, hardware.cores)
        if remainder:
            raise ValueError(
                f"plan: the record of {hardware.name} is for {hardware.cores} devices on each chip "
                f"(`cores`), and {devices} devices do not fill their chips. Use a multiple of "
                f"{hardware.cores} devices, or a record of a whole chip, with cores=1."
            )
        is_slice = math.prod(hardware.torus) == chips > 1
        is_flat = hardware.name in torus.FLAT
        box = hardware.torus if is_slice else _box(chips, 2 if is_flat else 3)
        rings = torus.closed_dims(is_flat, box)
        return Torus(box, hardware.fast, rings, cores=hardware.cores)
    levels = [Level(domain, hardware.fast)] + (
        [Level(devices, hardware.slow)] if devices > domain else []
    )
    return Nested(tuple(levels))


@functools.lru_cache(maxsize=256)
def _laid(network: Torus, sizes: tuple[int, ...]) -> Torus:
    """Returns the torus with its field `chips` filled in: for each device of a mesh, the index of
    the chip where `mesh.make` puts the device. `sizes` are the sizes of the mesh's axes."""
    # [*sizes, dims + core]. The last coordinate is the core, which is dropped.
    places = torus.coordinates(network.shape, network.rings, network.cores, sizes)
    of_devices = places[..., :-1].reshape(-1, len(network.shape))  # [devices, dims]
    chips = np.ravel_multi_index(tuple(of_devices.T), network.shape)
    return network._replace(chips=tuple(chips.tolist()))


def _box(devices: int, dims: int) -> tuple[int, ...]:
    """Returns the numbers of chips along each of the `dims` dims of a box of `devices` chips. The
    numbers are nearly equal, and the smallest comes first."""
    if dims == 1:
        return (devices,)
    # The divisor that is nearest, as a ratio, to the side of a cube or square: devices^(1/dims).
    side = min(divisors(devices), key=lambda size: abs(math.log(size) - math.log(devices) / dims))
    return tuple(sorted((side, *_box(devices // side, dims - 1))))


def seconds(
    tables: Tables, nbytes: int, network: Network, group: Group, *, kind: str = "all_reduce"
) -> float:
    """Returns the seconds of a collective that all groups of devices along a mesh axis run at the
    same time.

    Args:
        tables: the tables of messages for `group.size` devices, such as `ring.table(8)`.
        nbytes: bytes of the array that the collective takes on each device.
        network: the network. Its number of devices is a multiple of `group.size` x `group.stride`.
        group: how many devices a group has (size), and how far apart their numbers are (stride).
        kind: "all_reduce", "reduce_scatter" or "all_gather".

    Raises:
        ValueError: the tables are for another number of devices than `group.size`, or the network's
            number of devices is not a multiple of `group.size` x `group.stride`.
    """
    # Several tables run side by side, each on an equal part of the array.
    routes = tables if isinstance(tables, tuple) else (tables,)
    if routes[0].n != group.size or network.devices % (group.size * group.stride):
        raise ValueError(
            f"networks.seconds needs tables of {group.size} devices, and a network whose number "
            f"of devices is a multiple of size x stride = {group.size} x {group.stride}; got "
            f"tables of {routes[0].n} devices, and a network of {network.devices} devices."
        )
    # The bytes of a block in each route, rounded up. An all-gather takes one block, and the other
    # collectives take one for each device of the group.
    block = (
        -(-nbytes // len(routes))
        if kind == "all_gather"
        else -(-nbytes // group.size // len(routes))
    )
    # A reduce-scatter runs the table forward, an all-gather runs it back, an all-reduce does both.
    halves = {"all_reduce": (False, True), "reduce_scatter": (False,), "all_gather": (True,)}[kind]
    # `messages` gives rounds with the same messages as one entry: they run `times` times.
    shape = routes[0].shape  # the box of devices, the same for all routes of an algorithm
    simulated, total = {}, 0.0  # equal rounds are simulated once
    for back in halves:
        for equal_rounds in messages(routes, [block] * len(routes), back=back):
            key = equal_rounds.messages
            if key not in simulated:
                simulated[key] = _round(shape, equal_rounds, network, group)
            total += equal_rounds.times * simulated[key]
    return total


def _round(shape: Sequence[int], one_round: Round, network: Network, group: Group) -> float:
    """Returns the seconds of one round, in which every device sends each of the round's messages to
    another device of its group. The `group.size` devices of a group are the points of a box of this
    `shape`; `message.step` is the distance to the receiver along each dim of the box."""
    if not one_round.messages:
        return 0.0
    return network.round(
        [
            (destinations(shape, message.step, network.devices, group), message.bytes)
            for message in one_round.messages
        ]
    )


def destinations(
    shape: Sequence[int], step: Sequence[int], devices: int, group: Group
) -> np.ndarray:
    """Returns an array [devices]: for each device, the number of the device that is `step` further
    on in the same group. The group is a box of this `shape`, and `step` has a distance for each dim
    of the box. A step beyond the end of a dim goes on at its start."""
    here = np.arange(devices)
    place = here // group.stride % group.size  # of each device in its group
    at = np.unravel_index(place, tuple(shape))  # its coordinates in the box
    moved = tuple((a + s) % length for a, s, length in zip(at, step, shape, strict=True))
    return here + (np.ravel_multi_index(moved, tuple(shape)) - place) * group.stride


@functools.lru_cache(maxsize=256)
def _tables(name: str, size: int) -> Tables | None:
    """Returns the tables of messages of the algorithm `name` of `makers` for `size` devices; None
    if the algorithm does not work with this number of devices."""
    maker = dict(makers(size)).get(name)
    return maker() if maker else None


def makers(size: int) -> Iterator[tuple[str, functools.partial]]:
    """Yields a pair for each algorithm that `choose` tries along an axis of `size` devices: the
    algorithm's name, and a function that makes the algorithm's tables of messages."""
    yield "ring", functools.partial(ring.table, size)
    yield "two_rings", functools.partial(two_rings.table, size)
    # Any `size`: `halving` rounds up where a number of blocks is odd.
    yield "halving", functools.partial(halving.table, size)
    # A ring inside each machine, then a ring or halving over the machines. `inside` is the devices
    # of a machine, or of another fast domain.
    for inside in (8, 16, 64, 256):
        if size % inside == 0 and size > inside:
            for algorithm in (machines(inside), machines(inside, halving)):
                yield algorithm.name, functools.partial(algorithm.table, size)


def choose(
    times: Sequence[tuple[str, int, int]], network: Network, group: Group
) -> dict[str, float]:
    """Returns, for each algorithm that fits the axis, the total seconds of the collectives in
    `times`, which run along the axis one after another. The keys are the names of the algorithms,
    the fastest first.

    Args:
        times: for each collective a tuple of its kind (such as "all_reduce"), the bytes of the
            array that it takes, and the number of its calls.
        network: the network of all devices.
        group: how many devices the axis has, and how far apart their numbers are.
    """
    seconds_by_name = {}
    for name, _ in makers(group.size):
        prices = {kind: price(name, kind, network, group) for kind, _, _ in times}
        seconds_by_name[name] = math.fsum(
            count * (prices[kind].alpha + prices[kind].beta * nbytes)
            for kind, nbytes, count in times
        )
    return dict(sorted(seconds_by_name.items(), key=lambda item: item[1]))


def along(
    axis: str,
    sizes: Mapping[str, int],
    hardware: Hardware,
    calls: Sequence[tuple[str, int, int]],
) -> dict[str, float]:
    """Returns, for each algorithm that fits an axis of a mesh, the total seconds of the
    collectives `calls` along that axis. The keys are the names of the algorithms, the fastest
    first.

    Args:
        axis: the name of the axis.
        sizes: the sizes of the mesh's axes. The device number varies fastest along the last axis.
        hardware: the description of one device, such as `hardware.TPU_V5E`.
        calls: for each collective a tuple of its kind (such as "all_reduce"), the bytes of the
            array that it takes, and the number of its calls.
    """
    names = list(sizes)
    stride = math.prod(sizes[name] for name in names[names.index(axis) + 1 :])
    network = of(hardware, math.prod(sizes.values()))
    # On a torus, the chip of each device depends on the sizes of all axes of the mesh.
    if isinstance(network, Torus):
        network = _laid(network, tuple(sizes.values()))
    return choose(calls, network, Group(sizes[axis], stride))


@functools.lru_cache(maxsize=4096)
def price(name: str, kind: str, network: Network, group: Group) -> Link:
    """Returns the cost of the collective `kind`, such as "all_reduce", by the algorithm `name`,
    such as "ring". `name` is one of the names that `makers` yields. The alpha of the cost is the
    seconds for an array of no bytes, and the beta the seconds for each byte of the array that the
    collective takes.

    The time of a collective is linear in the bytes of the array, so two simulations give the time
    for arrays of all sizes. A search needs thousands of sizes.
    """
    tables = _tables(name, group.size)
    assert tables is not None  # `choose` asks only for algorithms that fit
    routes = len(tables) if isinstance(tables, tuple) else 1
    small = group.size * routes * 2**10  # whole bytes in each block, so nothing is rounded up
    once, twice = (seconds(tables, size, network, group, kind=kind) for size in (small, 2 * small))
    # The line through the two points: its value at 0 bytes, and its slope.
    return Link(2 * once - twice, (twice - once) / small)
