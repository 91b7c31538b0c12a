"""What a collective takes on a network of many devices: simulated from its table, with the links
that messages share.

    network = networks.of(hardware.A100, devices=16_384)
    networks.seconds(halving.table(2048), nbytes, network, group=networks.Group(2048, stride=8))

In a round every device sends its messages at once, and the round ends when the last has come: the
latency of the furthest, and the time of the link that has most to carry. `tests/test_networks.py`
has the same message by message.
"""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from parallax.collectives import halving, machines, ring, two_rings
from parallax.collectives.cost import Link, Round
from parallax.collectives.from_table import messages
from parallax.collectives.route import Route, Tables
from parallax.hardware import Hardware
from parallax.torus import FLAT
from parallax.validate import divisors


class Group(NamedTuple):
    """The devices of a mesh axis: `size` of them, each `stride` after the one before, as all groups
    of the mesh beside it are.

    Attributes:
        size: devices along the axis.
        stride: devices of the axes that run faster.
    """

    size: int
    stride: int = 1


@runtime_checkable
class Network(Protocol):
    """How devices are wired."""

    @property
    def devices(self) -> int:
        """All of them."""
        ...

    def round(self, sent: Sequence[tuple[np.ndarray, int]]) -> float:
        """Returns the seconds until all messages have come: of each message, the device to which
        each device sends, and its bytes."""
        ...


class Level(NamedTuple):
    """One level of a network of nested groups.

    Attributes:
        devices: of a group, which this level joins.
        link: of each device, one way, to others of its group.
        shared: the oversubscription: how much more the devices of a smaller group may send than the
            links that leave it carry.
    """

    devices: int
    link: Link
    shared: float = 1.0


class Nested(NamedTuple):
    """Groups of groups: a machine, a leaf of the network, its spine. The last level joins all.

    Attributes:
        levels: from the smallest group to all devices.
    """

    levels: tuple[Level, ...]

    @property
    def devices(self) -> int:
        """All of them."""
        return self.levels[-1].devices

    def round(self, sent: Sequence[tuple[np.ndarray, int]]) -> float:
        """Returns the seconds, as `Network` has it."""
        here, alpha, busy = np.arange(self.devices), 0.0, 0.0
        inside = 1  # devices of the group below
        within = np.zeros(
            (len(sent), self.devices), bool
        )  # whether a message stays in the group below
        for k, (to, _) in enumerate(sent):
            within[k] = to == here
        for level in self.levels:
            ports = np.zeros(self.devices)
            for k, (to, nbytes) in enumerate(sent):
                crosses = ~within[k]
                within[k] = to // level.devices == here // level.devices
                ports += nbytes * (crosses & within[k])
                # What goes on to a larger group leaves this one over the links of that level.
            leaving = sum(
                (nbytes * ~within[k] for k, (_, nbytes) in enumerate(sent)), np.zeros(self.devices)
            )
            if ports.any():
                alpha = max(alpha, level.link.alpha)
                busy = max(busy, level.link.beta * ports.max())
                # The last group may have fewer devices than the others.
                starts = np.arange(0, self.devices, inside)
                out = np.add.reduceat(ports + leaving, starts).max() if inside > 1 else 0.0
                busy = max(busy, level.link.beta * level.shared * out / inside)
            inside = level.devices
        return alpha + busy


class Torus(NamedTuple):
    """A box of devices, each linked to its two neighbours along every dim, the last to the first
    too.

    Attributes:
        shape: devices along each dim; the last runs fastest.
        link: between neighbours, one way.
    """

    shape: tuple[int, ...]
    link: Link

    @property
    def devices(self) -> int:
        """All of them."""
        return math.prod(self.shape)

    def round(self, sent: Sequence[tuple[np.ndarray, int]]) -> float:
        """Returns the seconds, as `Network` has it. Messages go dim by dim, the shorter way
        round."""
        start = np.stack(np.unravel_index(np.arange(self.devices), self.shape))  # [dims, devices]
        carried = np.zeros((len(self.shape), 2, self.devices))
        hops = 0
        for to, nbytes in sent:
            end, at, far = (
                np.stack(np.unravel_index(to, self.shape)),
                start.copy(),
                np.zeros(self.devices, int),
            )
            for dim, length in enumerate(self.shape):
                ahead = (end[dim] - at[dim]) % length
                back = ahead > length // 2
                steps = np.where(back, length - ahead, ahead)
                far += steps
                for hop in range(int(steps.max(initial=0))):
                    moves = steps > hop
                    place = np.asarray(np.ravel_multi_index(tuple(at), self.shape))
                    for way in (0, 1):
                        chosen = moves & (back == bool(way))
                        carried[dim, way] += nbytes * np.bincount(
                            place[chosen], minlength=self.devices
                        )
                    at[dim] = np.where(moves, (at[dim] + np.where(back, -1, 1)) % length, at[dim])
            hops = max(hops, int(far.max(initial=0)))
        return self.link.alpha * hops + self.link.beta * float(carried.max(initial=0.0))


def of(hardware: Hardware, devices: int) -> "Nested | Torus":
    """Returns the network of so many devices: a torus of TPUs, or the chip's domains, joined by a
    network without oversubscription."""
    domain = min(hardware.domain, devices)
    if hardware.platform == "tpu" and devices <= domain:
        is_slice = math.prod(hardware.torus) == devices > 1
        dims = 2 if hardware.name in FLAT else 3
        return Torus(hardware.torus if is_slice else _box(devices, dims), hardware.fast)
    levels = [Level(domain, hardware.fast)] + (
        [Level(devices, hardware.slow)] if devices > domain else []
    )
    return Nested(tuple(levels))


def _box(devices: int, dims: int) -> tuple[int, ...]:
    """Returns a box of so many chips whose sides are as equal as they can be."""
    if dims == 1:
        return (devices,)
    side = min(divisors(devices), key=lambda size: abs(math.log(size) - math.log(devices) / dims))
    return tuple(sorted((side, *_box(devices // side, dims - 1))))


def seconds(
    tables: Tables, nbytes: int, network: Network, group: Group, *, kind: str = "all_reduce"
) -> float:
    """Returns the seconds of a collective by these tables, of an array of `nbytes` on each device,
    all groups of the mesh at once.

    Args:
        tables: of `group.size` devices, as `ring.table(8)`.
        nbytes: of the array that the function takes.
        network: whose devices are a multiple of those of a group.
        group: where its devices are.
        kind: "all_reduce", "reduce_scatter" or "all_gather".

    Raises:
        ValueError: the tables are of another number of devices, or the groups do not fill the
            network.
    """
    routes = tables if isinstance(tables, tuple) else (tables,)
    if routes[0].n != group.size or network.devices % (group.size * group.stride):
        raise ValueError(
            f"networks.seconds needs tables of {group.size} devices and groups that fill "
            f"{network.devices}; got tables of {routes[0].n} and a stride of {group.stride}."
        )
    block = (
        -(-nbytes // len(routes))
        if kind == "all_gather"
        else -(-nbytes // group.size // len(routes))
    )
    halves = {"all_reduce": (False, True), "reduce_scatter": (False,), "all_gather": (True,)}[kind]
    found, total = {}, 0.0
    for back in halves:
        for each in messages(routes, [block] * len(routes), back=back):
            key = each.messages
            if key not in found:
                found[key] = _round(routes[0], each, network, group)
            total += each.times * found[key]
    return total


def _round(route: Route, each: Round, network: Network, group: Group) -> float:
    if not each.messages:
        return 0.0
    return network.round(
        [
            (destinations(route.shape, m.step, network.devices, group), m.bytes)
            for m in each.messages
        ]
    )


def destinations(
    shape: Sequence[int], step: Sequence[int], devices: int, group: Group
) -> np.ndarray:
    """Returns for each of all devices the one that is `step` further on in its own group, which is
    a box of this shape."""
    here = np.arange(devices)
    place = here // group.stride % group.size
    at = np.unravel_index(place, tuple(shape))
    moved = tuple((a + s) % length for a, s, length in zip(at, step, shape, strict=True))
    return here + (np.ravel_multi_index(moved, tuple(shape)) - place) * group.stride


@functools.lru_cache(maxsize=256)
def _tables(name: str, size: int) -> Tables | None:
    maker = dict(makers(size)).get(name)
    return maker() if maker else None


def makers(size: int) -> Iterator[tuple[str, functools.partial]]:
    """Returns the tables that `choose` tries along an axis of so many devices, by the algorithm's
    name."""
    yield "ring", functools.partial(ring.table, size)
    yield "two_rings", functools.partial(two_rings.table, size)
    yield "halving", functools.partial(halving.table, size)
    for inside in (8, 16, 64, 256):
        if size % inside == 0 and size > inside:
            for each in (machines(inside), machines(inside, halving)):
                yield each.name, functools.partial(each.table, size)


def choose(
    times: Sequence[tuple[str, int, int]], network: Network, group: Group
) -> dict[str, float]:
    """Returns the seconds of some collectives along one axis by each algorithm that fits it, the
    fastest first.

    Args:
        times: of each collective its kind, the bytes that it takes, and how often it runs.
        network: as `seconds` takes it.
        group: as `seconds` takes it.
    """
    found = {}
    for name, _ in makers(group.size):
        prices = {kind: price(name, kind, network, group) for kind, _, _ in times}
        found[name] = math.fsum(
            count * (prices[kind].alpha + prices[kind].beta * nbytes)
            for kind, nbytes, count in times
        )
    return dict(sorted(found.items(), key=lambda item: item[1]))


def along(
    axis: str,
    sizes: Mapping[str, int],
    hardware: Hardware,
    calls: Sequence[tuple[str, int, int]],
) -> dict[str, float]:
    """Returns the seconds of some collectives along one axis of a mesh, as `choose` returns them.

    Args:
        axis: its name.
        sizes: of all axes of the mesh; the last runs fastest.
        hardware: one of the devices.
        calls: as `choose` takes them.
    """
    names = list(sizes)
    stride = math.prod(sizes[name] for name in names[names.index(axis) + 1 :])
    network = of(hardware, math.prod(sizes.values()))
    return choose(calls, network, Group(sizes[axis], stride))


@functools.lru_cache(maxsize=4096)
def price(name: str, kind: str, network: Network, group: Group) -> Link:
    """Returns the seconds of a collective by an algorithm of `makers`, and those of each byte that
    it takes.

    A round takes its latency and its bytes, so two simulations tell all sizes: a search asks for
    thousands.
    """
    tables = _tables(name, group.size)
    assert tables is not None
    routes = len(tables) if isinstance(tables, tuple) else 1
    small = group.size * routes * 2**10  # whole blocks, so that no byte is rounded up
    once, twice = (seconds(tables, size, network, group, kind=kind) for size in (small, 2 * small))
    return Link(2 * once - twice, (twice - once) / small)
