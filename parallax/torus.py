"""Where the devices of a mesh lie on a torus of TPUs, so that a ring along an axis sends to
neighbours.

Each dim of the torus is cut into pieces, one for each axis of the mesh, so that the devices along
an axis are a box. A closed path of single steps through that box is the ring: out along one side,
and back through all the rest, line by line. Which cut takes the fewest links is found by counting
them all; of two equal ones, the last axes of the mesh have the shorter hops.

    torus.device_array(jax.devices(), (4, 2))        # an array of devices; mesh.make takes it
"""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

# Dims of a TPU of two dims close in a ring where they have all 16 chips; those of one of three dims
# where whole cubes of
# 4 x 4 x 4 chips are joined: Austin et al., How to scale your model (jax-ml.github.io/scaling-
# book), chapter 2.
FLAT = ("TPU v5 lite", "TPU v5e", "TPU v6 lite", "TPU v6e")
INNER_FIRST, FAR = (
    1e-5,
    1e-8,
)  # settle what is equal: shorter hops for later axes, then no long hop among many short ones
Cut = tuple[tuple[int, ...], ...]


def closed_dims(flat: bool, sizes: Sequence[int]) -> tuple[bool, ...]:
    """Returns whether each dim of a torus closes in a ring; `flat`: it has two dims, as a v5e's or
    v6e's has.
    """
    if flat:
        return tuple(size == 16 for size in sizes)
    return (all(size % 4 == 0 for size in sizes),) * len(sizes)


def device_array(devices: Sequence[Any], sizes: Sequence[int]) -> np.ndarray:
    """Returns `devices` in an array of the shape `sizes`: TPUs by their coordinates, others in the
    order given, which for GPUs is machine by machine, so that the last axes stay inside one.

    Devices of several slices are taken slice by slice, so that the first axes cross the network.
    TPUs that fill no box keep the order given too.

    Args:
        devices: as many as `sizes` multiply to. A TPU has `coords`, `core_on_chip`, `device_kind`
            and perhaps `slice_index`.
        sizes: of the mesh's axes.
    """
    slices: dict[int, list[Any]] = {}
    for device in devices:
        slices.setdefault(getattr(device, "slice_index", None) or 0, []).append(device)
    in_order = [slices[k] for k in sorted(slices)]
    outer = _leading(len(slices), sizes)
    inner = tuple(size // count for size, count in zip(sizes, outer, strict=True))
    if any(len(each) != math.prod(inner) for each in in_order) or any(
        device.platform != "tpu" for device in devices
    ):
        return _array(list(itertools.chain(*in_order)), tuple(sizes))
    stacked = np.stack([_in_a_slice(each, inner) for each in in_order]).reshape(*outer, *inner)
    order = [k + part for k in range(len(sizes)) for part in (0, len(sizes))]
    return stacked.transpose(order).reshape(tuple(sizes))


def _leading(count: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """Returns `count` slices as factors of the first axes; of fewer, where these have no such
    factors."""
    found = []
    for size in sizes:
        found.append(math.gcd(count, size))
        count //= found[-1]
    return tuple(found)


def _array(devices: Sequence[Any], shape: tuple[int, ...]) -> np.ndarray:
    found = np.empty(len(devices), dtype=object)
    found[:] = devices
    return found.reshape(shape)


def _in_a_slice(devices: Sequence[Any], sizes: tuple[int, ...]) -> np.ndarray:
    chips = np.array([device.coords for device in devices])
    chips -= chips.min(0)
    box = tuple(int(size) for size in chips.max(0) + 1)
    cores = len(devices) // math.prod(box)
    there = {
        (*chip, device.core_on_chip): device
        for chip, device in zip(chips.tolist(), devices, strict=True)
    }
    rings = closed_dims(devices[0].device_kind in FLAT, box)
    if cores * math.prod(box) != len(devices):
        return _array(devices, sizes)
    wanted = [
        tuple(place)
        for place in coordinates(box, rings, cores, sizes).reshape(-1, len(box) + 1).tolist()
    ]
    return _array(
        [there[place] for place in wanted] if set(wanted) == set(there) else devices, sizes
    )


def hops(
    box: tuple[int, ...], rings: tuple[bool, ...], cores: int, sizes: tuple[int, ...]
) -> list[float]:
    """Returns the links that a hop of a ring along each axis takes in the mean; of an axis of one
    device 1.

    Arguments as of `places`.
    """
    laid = coordinates(box, rings, cores, sizes)
    metrics = [_links(size, ring) for size, ring in zip(box, rings, strict=True)]
    found = []
    for axis, size in enumerate(sizes):
        there = np.roll(laid, -1, axis)
        links = sum(metric[laid[..., dim], there[..., dim]] for dim, metric in enumerate(metrics))
        found.append(float(np.mean(links)) if size > 1 else 1.0)
    return found


@functools.cache
def coordinates(
    box: tuple[int, ...], rings: tuple[bool, ...], cores: int, sizes: tuple[int, ...]
) -> np.ndarray:
    """Returns the chip's coordinates and the core of each device of a mesh: shape [*sizes, dims +
    1].

    Args:
        box: chips along each dim of the torus.
        rings: whether each dim closes.
        cores: devices of a chip; from one to the other a message takes no link.
        sizes: of the mesh's axes; they multiply to the devices of the box.
    """
    best, cost = None, math.inf
    metrics = [_links(size, ring) for size, ring in zip(box, rings, strict=True)] + [
        np.zeros((cores, cores))
    ]
    for cut in _cuts((*box, cores), sizes):
        lines = [_lines(pieces) for pieces in cut]
        costs = [_costs(axis, cut, lines, metrics) for axis in range(len(sizes))]
        total = np.sum(
            [(1 + INNER_FIRST * axis) * each.min(0) for axis, each in enumerate(costs)], axis=0
        )
        if total.min() < cost:
            cost, chosen = total.min(), np.unravel_index(total.argmin(), total.shape)
            paths = [
                _paths(_sides(axis, cut))[each[(slice(None), *chosen)].argmin()]
                for axis, each in enumerate(costs)
            ]
            best = cut, [line[k] for line, k in zip(lines, chosen, strict=True)], paths
    assert best is not None  # sizes that multiply to the devices can always be cut
    return _laid(*best, sizes)


def _laid(
    cut: Cut, lines: list[np.ndarray], paths: list[np.ndarray], sizes: tuple[int, ...]
) -> np.ndarray:
    """Returns where each point of the mesh is, with these paths through these cuts."""
    found = np.zeros((*sizes, len(cut)), int)
    for dim, pieces in enumerate(cut):
        digits = []
        for axis, path in enumerate(paths):
            used = [d for d, each in enumerate(cut) if each[axis] > 1]
            digits.append(
                path[:, used.index(dim)] if pieces[axis] > 1 else np.zeros(sizes[axis], int)
            )
        found[..., dim] = lines[dim][np.ix_(*digits)]
    return found


def _links(size: int, ring: bool) -> np.ndarray:
    """Returns the links between each two places of a dim."""
    apart = np.abs(np.subtract.outer(np.arange(size), np.arange(size)))
    return np.minimum(apart, size - apart) if ring else apart


def _cuts(box: Sequence[int], sizes: Sequence[int]) -> Iterator[Cut]:
    """Returns each way to cut the dims of a box so that the pieces of an axis multiply to its size:
    `cut[dim][axis]`.
    """
    if not box:
        if all(size == 1 for size in sizes):
            yield ()
        return
    for pieces in _factors(box[0], tuple(sizes)):
        for rest in _cuts(
            box[1:], [size // piece for size, piece in zip(sizes, pieces, strict=True)]
        ):
            yield (pieces, *rest)


def _factors(size: int, limits: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Returns each way to write `size` as a product of divisors of `limits`."""
    if not limits:
        if size == 1:
            yield ()
        return
    for factor in range(1, size + 1):
        if size % factor == 0 and limits[0] % factor == 0:
            for rest in _factors(size // factor, limits[1:]):
                yield (factor, *rest)


@functools.cache
def _lines(pieces: tuple[int, ...]) -> list[np.ndarray]:
    """Returns the ways to lay pieces along a dim: the place of each combination of digits, an array
    of shape `pieces`.

    Any axis may be the innermost, and every other inner stretch may run backward, so that the ends
    of two stretches meet.
    """
    axes = [axis for axis, piece in enumerate(pieces) if piece > 1]
    found = []
    for order in itertools.permutations(axes) if len(axes) < 4 else [tuple(axes)]:
        for fold in (False, True)[: max(1, min(2, len(axes)))]:
            line = np.zeros(pieces, int)
            for digits in np.ndindex(*pieces):
                place, backward = 0, False
                for axis in order:
                    digit = pieces[axis] - 1 - digits[axis] if backward else digits[axis]
                    place, backward = place * pieces[axis] + digit, fold and digit % 2 == 1
                line[digits] = place
            found.append(line)
    return found


def _sides(axis: int, cut: Cut) -> tuple[int, ...]:
    """Returns the box of an axis, without the dims that it has no piece of."""
    return tuple(pieces[axis] for pieces in cut if pieces[axis] > 1)


def _costs(
    axis: int, cut: Cut, lines: list[list[np.ndarray]], metrics: list[np.ndarray]
) -> np.ndarray:
    """Returns the mean links of a hop along an axis: by path, and by the way each dim's pieces are
    laid (1 long where it is all one).
    """
    sides, used = _sides(axis, cut), 0
    found = np.zeros((len(_paths(sides)),) + (1,) * len(cut))
    for dim, pieces in enumerate(cut):
        if pieces[axis] == 1:
            continue
        steps = _steps(sides)[:, used, : pieces[axis], : pieces[axis]]
        here = np.zeros((len(steps), len(lines[dim])))
        for k, line in enumerate(lines[dim]):
            at = np.moveaxis(line, axis, 0).reshape(pieces[axis], -1)
            links = metrics[dim][at[:, None], at[None]]
            here[:, k] = np.tensordot(steps, (links + FAR * links**2).mean(-1), 2)
        found = found + here.reshape(
            [len(steps)] + [len(lines[dim]) if d == dim else 1 for d in range(len(cut))]
        )
        used += 1
    return np.broadcast_to(found, (len(found), *(len(each) for each in lines)))


@functools.cache
def _steps(sides: tuple[int, ...]) -> np.ndarray:
    """Returns how often each path steps from one place of a side to another, over its length:
    [paths, sides, longest, longest].
    """
    paths = _paths(sides)
    found = np.zeros((len(paths), len(sides), max(sides), max(sides)))
    for k, path in enumerate(paths):
        for side in range(len(sides)):
            for here, there in zip(path[:, side], np.roll(path[:, side], -1), strict=True):
                found[k, side, here, there] += 1 / len(path)
    return found


@functools.cache
def _paths(sides: tuple[int, ...]) -> list[np.ndarray]:
    """Returns paths through all points of a box, each of shape [points, sides], from whose last
    point the ring goes back to the first.
    """
    found = []
    for order in itertools.permutations(range(len(sides))):
        turned = [sides[k] for k in order]
        through = [_snake(turned)]
        if (
            len(turned) == 1 and sides[0] > 2
        ):  # out over every other point, back over the rest: no hop longer than 2
            there = list(range(0, sides[0], 2))
            through.append(
                [(k,) for k in there + [k for k in range(sides[0] - 1, 0, -1) if k not in there]]
            )
        if len(turned) > 1:  # out along the first side, back through the lines that leave it
            lines = _snake(turned[1:])
            back = [
                (k, *point)
                for i, k in enumerate(reversed(range(turned[0])))
                for point in (lines[1:], lines[:0:-1])[i % 2]
            ]
            through.append([(k, *lines[0]) for k in range(turned[0])] + back)
        found += [
            np.array(path, int).reshape(len(path), len(sides))[:, np.argsort(order).astype(int)]
            for path in through
        ]
    return found


def _snake(sides: Sequence[int]) -> list[tuple[int, ...]]:
    """Returns all points of a box, each one step from the one before."""
    points: list[tuple[int, ...]] = [()]
    for size in sides:
        points = [
            (*point, k)
            for i, point in enumerate(points)
            for k in (range(size), range(size)[::-1])[i % 2]
        ]
    return points
