"""Lays the devices of a mesh on a torus of TPUs, so that a ring along an axis sends to neighbours.

The length of each dim of the torus is factored into *pieces*, one factor for each axis of the mesh.
The devices along an axis form a box in the torus. The box has a *side* along each dim; the length
of the side is the axis's piece of that dim. The ring of an axis is a closed path through the axis's
box: it goes out along one side, and comes back through all other points, by steps to neighbouring
points if possible. A *cut* is one choice of all pieces; `cut[dim][axis]` is one piece. All cuts are
tried, and the cut with the lowest cost is taken. The cost adds up, over the axes, the mean number
of links that a hop of the axis's ring crosses. For axis k the number is multiplied by 1 + 1e-5 k.
So of two cuts that cross equally many links, the cut with shorter hops along later axes is taken.
If two cuts have equal costs, the cut with fewer pieces above 1 is taken. In this cut fewer axes
share a dim of the torus. Sharing is worse because the hops of two axes that share a dim may cross
the same links.

Along each dim, a device has one coordinate for each axis. The axis's piece of the dim is the number
of values that the coordinate can have, from 0 on. A *laying* of a dim is one way to place the
devices along the dim. The laying is an array of places along the dim: a device's coordinates along
the dim are the index of its place. For pieces (2, 4), [[0, 1, 2, 3], [7, 6, 5, 4]] is a laying: a
device with the coordinates (1, 0) is at place 7. In the code, `line` is a laying, and `lines` are
several. A *path* is the order in which the ring of an axis visits the points of the axis's box.
`metrics[dim]` is an array with the number of links between each two places of the dim.

    torus.device_array(jax.devices(), (4, 2))        # an array of devices; mesh.make takes it
"""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

# TPUs on a torus of two dims. A dim closes in a ring if it has all 16 chips. On a torus of three
# dims, all dims close if whole cubes of 4 x 4 x 4 chips are joined. Source: Austin et al., How to
# scale your model (jax-ml.github.io/scaling-book), chapter 2.
FLAT = ("TPU v5 lite", "TPU v5e", "TPU v6 lite", "TPU v6e")
# Small weights that decide between equal costs. `INNER_FIRST` prefers cuts in which later axes have
# the shorter hops. `FAR`, which is smaller, prefers equal hops to one long hop among short ones.
# `PIECE`, the smallest, prefers fewer pieces.
INNER_FIRST, FAR, PIECE = 1e-5, 1e-8, 1e-11
Cut = tuple[tuple[int, ...], ...]


def closed_dims(flat: bool, sizes: Sequence[int]) -> tuple[bool, ...]:
    """Returns whether each dim of a torus closes in a ring.

    A dim closes if a link joins its last chip to its first chip. On a torus of two dims, a dim
    closes if it has 16 chips. On a torus of three dims, all dims close if the size of each is a
    multiple of 4 chips; else none closes. A third size that is not given is 1.

    Args:
        flat: whether the torus has two dims, as a v5e or v6e has.
        sizes: the chips along each dim.
    """
    if flat:
        return tuple(size == 16 for size in sizes)
    return (len(sizes) > 2 and all(size % 4 == 0 for size in sizes),) * len(sizes)


def device_array(devices: Sequence[Any], sizes: Sequence[int]) -> np.ndarray:
    """Returns `devices` in an array of the shape `sizes`: TPUs are placed by their coordinates.

    Devices of several slices are taken slice by slice, so that only the first axes of the mesh
    connect devices of different slices. A slice is a group of TPUs on one torus, or a group of GPUs
    with the same `slice_index`. Inside a slice, devices that are not TPUs keep the order given. For
    GPUs this order is machine by machine, so the last axes stay inside a machine. TPUs are not
    placed by their coordinates if the coordinates do not form a complete box, or if the axes cannot
    be split between the slices.

    Args:
        devices: the devices, as many as the product of `sizes`. A TPU has `coords`, `core_on_chip`
            and `device_kind`; a TPU or GPU may have `slice_index`.
        sizes: the sizes of the mesh's axes.
    """
    slices: dict[int, list[Any]] = {}
    for device in devices:
        slices.setdefault(getattr(device, "slice_index", None) or 0, []).append(device)
    in_order = [slices[k] for k in sorted(slices)]
    # For each axis, the number of slices that it extends over, and its size inside a slice. If the
    # axes cannot be split between the slices, `inner` has more devices than a slice, so `are_equal`
    # is false.
    outer = _leading(len(slices), sizes)
    inner = tuple(size // count for size, count in zip(sizes, outer, strict=True))
    are_equal = all(len(devices_of_slice) == math.prod(inner) for devices_of_slice in in_order)
    # Devices of unequal slices, and devices that are no TPUs, are not placed by coordinates. They
    # stay slice by slice, in the order given.
    if not are_equal or any(device.platform != "tpu" for device in devices):
        return _array(list(itertools.chain(*in_order)), tuple(sizes))
    # `_in_a_slice` keeps the order given if the coordinates do not form a complete box.
    arrays = [_in_a_slice(devices_of_slice, inner) for devices_of_slice in in_order]
    stacked = np.stack(arrays).reshape(*outer, *inner)
    # For two axes, the dims (outer 0, outer 1, inner 0, inner 1) become (outer 0, inner 0, outer 1,
    # inner 1). Then the reshape joins the two dims of each axis.
    order = [k + part for k in range(len(sizes)) for part in (0, len(sizes))]
    return stacked.transpose(order).reshape(tuple(sizes))


def _leading(count: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """Returns one factor of each axis's size. The factor is the number of slices over which the
    axis extends.

    A slice is a group of TPUs on one torus; slices are joined by a slower network. `count` is the
    number of slices, and `sizes` are the sizes of the mesh's axes. The first axes get the largest
    factors that are possible. The product of all factors is `count`. If no factors of the sizes
    have this product, the product of the result is a smaller divisor of `count`, and `device_array`
    does not place the TPUs by their coordinates.
    """
    factors = []
    for size in sizes:
        factors.append(math.gcd(count, size))
        count //= factors[-1]  # the slices that the next axes must run over
    return tuple(factors)


def _array(devices: Sequence[Any], shape: tuple[int, ...]) -> np.ndarray:
    """Returns the devices in an array of the given shape, in the order of the list."""
    array = np.empty(len(devices), dtype=object)
    array[:] = devices
    return array.reshape(shape)


def _in_a_slice(devices: Sequence[Any], sizes: tuple[int, ...]) -> np.ndarray:
    """Returns the TPUs of one slice in an array of the shape `sizes`, placed by coordinates.

    Devices whose coordinates do not fill a box keep their order.
    """
    chips = np.array([device.coords for device in devices])
    chips -= chips.min(0)  # a slice need not begin at chip 0 of its torus
    box = tuple(int(size) for size in chips.max(0) + 1)  # the smallest that holds all chips
    cores = len(devices) // math.prod(box)
    by_place = {
        (*chip, device.core_on_chip): device
        for chip, device in zip(chips.tolist(), devices, strict=True)
    }
    rings = closed_dims(devices[0].device_kind in FLAT, box)
    # In this case the chips do not fill the box, or have unequal numbers of cores.
    if cores * math.prod(box) != len(devices):
        return _array(devices, sizes)
    # The coordinates and the core of each device, in the order of the mesh.
    rows = coordinates(box, rings, cores, sizes).reshape(-1, len(box) + 1).tolist()
    places = list(map(tuple, rows))
    # With a hole in the box, some places have no device.
    has_all = set(places) == set(by_place)
    return _array([by_place[place] for place in places] if has_all else devices, sizes)


def hops(
    box: tuple[int, ...], rings: tuple[bool, ...], cores: int, sizes: tuple[int, ...]
) -> list[float]:
    """Returns, for each axis, the mean number of links that a hop of the axis's ring crosses.

    An axis of one device has no hop. The result for it is 1, a factor that changes no cost.

    Args:
        box: the number of chips along each dim of the torus.
        rings: whether each dim closes in a ring.
        cores: the number of devices on a chip.
        sizes: the sizes of the mesh's axes.
    """
    here = coordinates(box, rings, cores, sizes)
    # Links between two places of each dim. The last coordinate, the core, crosses none.
    metrics = [_links(size, ring) for size, ring in zip(box, rings, strict=True)]
    means = []
    for axis, size in enumerate(sizes):
        there = np.roll(here, -1, axis)  # the coordinates of the next device of the ring
        links = sum(metric[here[..., dim], there[..., dim]] for dim, metric in enumerate(metrics))
        means.append(float(np.mean(links)) if size > 1 else 1.0)
    return means


@functools.cache
def coordinates(
    box: tuple[int, ...], rings: tuple[bool, ...], cores: int, sizes: tuple[int, ...]
) -> np.ndarray:
    """Returns the coordinates of each device of a mesh: an array [*sizes, dims of the torus + 1].

    The last coordinate is the core on the chip; the others are the chip's place on the torus.

    Args:
        box: the number of chips along each dim of the whole torus.
        rings: whether each dim closes in a ring.
        cores: the number of devices on a chip; a message between two of them crosses no link.
        sizes: the sizes of the mesh's axes. Their product is the number of devices in the box.
    """
    best, cost = None, math.inf
    # For each dim, the number of links between each two places. The cores of a chip count as one
    # more dim, without links between them.
    metrics = [_links(size, ring) for size, ring in zip(box, rings, strict=True)] + [
        np.zeros((cores, cores))
    ]
    for cut in _cuts((*box, cores), sizes):
        layings = [_lines(pieces) for pieces in cut]  # for each dim, all its layings
        # For each axis, the mean cost of a hop for each path of the axis's ring and each choice of
        # one laying per dim: an array [paths, layings of dim 0, layings of dim 1, ...]. Each axis
        # takes its best path, but all axes share the layings.
        costs = [_costs(axis, cut, layings, metrics) for axis in range(len(sizes))]
        # If two cuts have equal sums, this weight makes the sum with shorter hops along later axes
        # smaller. `min(0)` is the cost by the best path of the axis.
        weighted = [(1 + INNER_FIRST * axis) * costs[axis].min(0) for axis in range(len(sizes))]
        pieces = sum(piece > 1 for pieces_of_dim in cut for piece in pieces_of_dim)
        total = np.sum(weighted, axis=0) + PIECE * pieces
        if total.min() < cost:
            cost, chosen = total.min(), np.unravel_index(total.argmin(), total.shape)
            paths = []
            for axis in range(len(sizes)):
                best_path = costs[axis][(slice(None), *chosen)].argmin()
                paths.append(_paths(_sides(axis, cut))[best_path])
            best = cut, [of_dim[k] for of_dim, k in zip(layings, chosen, strict=True)], paths
    # Sizes whose product is the number of devices can always be cut.
    assert best is not None
    return _laid(*best, sizes)


def _laid(
    cut: Cut, lines: list[np.ndarray], paths: list[np.ndarray], sizes: tuple[int, ...]
) -> np.ndarray:
    """Returns the coordinates of each device of the mesh: an array [*sizes, len(cut)].

    Args:
        cut: for each dim of the torus, its pieces: factors of the dim's length, one for each axis
            of the mesh. The cores on a chip count as one more dim, the last.
        lines: for each dim of the torus, one array from `_lines`. The shape of the array is
            `cut[dim]`, the pieces of this dim. Its elements are places along the torus's dim.
        paths: for each axis, one array from `_paths`, the order in which the axis's ring visits the
            axis's devices.
        sizes: the sizes of the mesh's axes.
    """
    places = np.zeros((*sizes, len(cut)), int)
    for dim, pieces in enumerate(cut):
        # For each axis, the coordinate along this dim of each point of the axis's path.
        digits = []
        for axis, path in enumerate(paths):
            # A path has a column for each dim in which its axis has a piece above 1, in order.
            dims_of_axis = [d for d, pieces_of_dim in enumerate(cut) if pieces_of_dim[axis] > 1]
            if pieces[axis] > 1:
                digits.append(path[:, dims_of_axis.index(dim)])
            else:
                digits.append(np.zeros(sizes[axis], int))
        # A line is indexed by a device's coordinates along the dim, one for each axis.
        places[..., dim] = lines[dim][np.ix_(*digits)]
    return places


def _links(size: int, ring: bool) -> np.ndarray:
    """Returns the number of links between each two places of a dim: an array [size, size].

    If `ring` is true, the dim closes in a ring, and the shorter way round counts.
    """
    distance = np.abs(np.subtract.outer(np.arange(size), np.arange(size)))
    return np.minimum(distance, size - distance) if ring else distance


def _cuts(box: Sequence[int], sizes: Sequence[int]) -> Iterator[Cut]:
    """Yields each way to write the length of each dim of a box as a product of factors, one for
    each axis of the mesh; `cut[dim][axis]` is one factor.

    The product of the factors of an axis, one in each dim, is the axis's size. The search goes dim
    by dim, and divides the axes' sizes by the chosen factors. A cut is complete if all quotients
    are 1 at the end.
    """
    if not box:
        if all(size == 1 for size in sizes):
            yield ()
        return
    for pieces in _factors(box[0], tuple(sizes)):
        remaining_sizes = [size // piece for size, piece in zip(sizes, pieces, strict=True)]
        for other_dims in _cuts(box[1:], remaining_sizes):
            yield (pieces, *other_dims)


def _factors(size: int, limits: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yields each way to write `size` as a product of factors, one for each of `limits`.

    Factor k divides `limits[k]`.
    """
    if not limits:
        if size == 1:
            yield ()
        return
    for factor in range(1, size + 1):
        if size % factor == 0 and limits[0] % factor == 0:
            for other_factors in _factors(size // factor, limits[1:]):
                yield (factor, *other_factors)


@functools.cache
def _lines(pieces: tuple[int, ...]) -> list[np.ndarray]:
    """Returns several *layings* of one dim of the torus. A laying is one way to place the devices
    along the dim: an array of places, of shape `pieces`.

    `pieces` are factors of the dim's length, one for each axis of the mesh. A device has one
    coordinate for each axis; for axis k, it goes from 0 to `pieces[k] - 1`. If the mesh has two
    axes, element [i, j] of a laying is the place of each device with coordinate i for the first
    axis and coordinate j for the second axis.

    The axes are nested: for each coordinate of an outer axis, the coordinates of the inner axes
    fill a stretch of neighbouring places. If at most three axes have a piece above 1, they are
    nested in every order; otherwise only in the order of the mesh. With two axes or more, each
    order gives two layings: in the second one, every second stretch runs backward. For the pieces
    (2, 4), with the first axis as the outer axis, the two layings are

        [[0, 1, 2, 3], [4, 5, 6, 7]]  and  [[0, 1, 2, 3], [7, 6, 5, 4]].

    In the second laying, coordinate 3 of the inner axis is at the places 3 and 4, so there a hop
    along the outer axis crosses one link.
    """
    axes = [axis for axis, piece in enumerate(pieces) if piece > 1]
    layings = []
    # With four axes or more, only one order is tried: there would be too many.
    for order in itertools.permutations(axes) if len(axes) < 4 else [tuple(axes)]:
        # With one axis there is no inner stretch that could run backward.
        for fold in (False, True) if len(axes) > 1 else (False,):
            line = np.zeros(pieces, int)
            for digits in np.ndindex(*pieces):
                # `place` is a number whose digits are the coordinates, the outermost axis first.
                # With `fold`, the digit after an odd digit counts backward.
                place, backward = 0, False
                for axis in order:
                    digit = pieces[axis] - 1 - digits[axis] if backward else digits[axis]
                    place, backward = place * pieces[axis] + digit, fold and digit % 2 == 1
                line[digits] = place
            layings.append(line)
    return layings


def _sides(axis: int, cut: Cut) -> tuple[int, ...]:
    """Returns the lengths of the sides of the box that an axis's devices form in the torus. The
    side along a dim has the length `cut[dim][axis]`, which is the axis's factor (piece) of the
    dim's length. Sides of length 1 are left out.
    """
    return tuple(pieces[axis] for pieces in cut if pieces[axis] > 1)


def _costs(
    axis: int, cut: Cut, lines: list[list[np.ndarray]], metrics: list[np.ndarray]
) -> np.ndarray:
    """Returns the mean cost of a hop of an axis's ring: an array [paths, layings of dim 0, layings
    of dim 1, ...].

    `_paths` gives the paths that the ring may take. A *laying* of a dim is one way to place the
    devices along the dim: an array of their places, from `_lines`. The cost of a hop is the number
    of links that the hop crosses, with a small addition for long hops.

    Args:
        axis: the index of the axis.
        cut: for each dim of the torus, its pieces: factors of the dim's length, one for each axis
            of the mesh.
        lines: for each dim, its layings.
        metrics: for each dim, the number of links between each two places.
    """
    # `side` counts the dims in which the axis has a piece above 1; a path has a column for each.
    sides, side = _sides(axis, cut), 0
    costs = np.zeros((len(_paths(sides)),) + (1,) * len(cut))
    for dim, pieces in enumerate(cut):
        if pieces[axis] == 1:
            continue
        # For each path, the share of its steps that go from coordinate i to j of this side.
        # `_steps` gives [paths, sides, i, j], with i and j padded to the longest side.
        steps = _steps(sides)[:, side, : pieces[axis], : pieces[axis]]
        costs_of_dim = np.zeros((len(steps), len(lines[dim])))
        for k, line in enumerate(lines[dim]):
            # `places` is [i, others]: the place along the dim of each device, by its coordinate i
            # along this axis and its coordinates along all other axes. `links`, [i, j, others], is
            # the number of links between the devices with the coordinates i and j. `mean(-1)` is
            # the mean over the others, and `tensordot` adds up over i and j.
            places = np.moveaxis(line, axis, 0).reshape(pieces[axis], -1)
            links = metrics[dim][places[:, None], places[None]]
            # The square, with the small weight `FAR`, makes one long hop among short ones worse
            # than equal hops.
            costs_of_dim[:, k] = np.tensordot(steps, (links + FAR * links**2).mean(-1), 2)
        shape = [len(steps)] + [len(lines[dim]) if d == dim else 1 for d in range(len(cut))]
        costs = costs + costs_of_dim.reshape(shape)
        side += 1
    return np.broadcast_to(costs, (len(costs), *map(len, lines)))


@functools.cache
def _steps(sides: tuple[int, ...]) -> np.ndarray:
    """Returns an array [paths, sides, n, n] that says how the steps of each path of `_paths` move
    along each side. n is the length of the longest side.

    Element [path, side, i, j] is the fraction of the path's steps that change the coordinate along
    the side from i to j. A step along another side keeps this coordinate, so the step counts
    as one from i to i. To get the mean number of links that a step of a path crosses, multiply each
    fraction by the number of links between i and j, and add up.
    """
    paths = _paths(sides)
    shares = np.zeros((len(paths), len(sides), max(sides), max(sides)))
    for k, path in enumerate(paths):
        for side in range(len(sides)):
            # `roll` adds the last step, from the end of the path back to its beginning.
            for here, there in zip(path[:, side], np.roll(path[:, side], -1), strict=True):
                shares[k, side, here, there] += 1 / len(path)
    return shares


@functools.cache
def _paths(sides: tuple[int, ...]) -> list[np.ndarray]:
    """Returns paths that visit each point of a box once. Each path is an array [points, sides].

    `sides` are the lengths of the box's sides. The ring of an axis follows a path, and goes from
    the path's last point back to its first. Each order of the sides gives two paths. The first path
    goes row by row; the rows lie along the side that is last in this order. The second path goes
    out along the side that is first in this order, and comes back through all other points. In a
    box of one side, the second path goes out over every second point. A box of one or two points
    has no second path. Of all these paths `coordinates` takes the one that costs least.
    """
    paths = []
    for order in itertools.permutations(range(len(sides))):
        ordered_sides = [sides[k] for k in order]
        # The points row by row. Each step goes to a neighbour, but the way from the last point
        # back to the first may be long.
        paths_in_order = [_snake(ordered_sides)]
        if len(ordered_sides) == 1 and sides[0] > 2:
            # The path goes out over every second point, and back over the other points, so no hop
            # is longer than 2.
            out = list(range(0, sides[0], 2))
            back = [k for k in range(sides[0] - 1, 0, -1) if k not in out]
            paths_in_order.append([(k,) for k in out + back])
        if len(ordered_sides) > 1:
            # The path goes out along the first side, and back through the rows that leave that
            # side; every second row runs backward. The path has passed the first point of each
            # row on the way out, so this point is left out on the way back. If the first side is
            # even, the last point is one step from the first; otherwise it may be far from it.
            row = _snake(ordered_sides[1:])
            back = [
                (k, *point)
                for i, k in enumerate(reversed(range(ordered_sides[0])))
                for point in (row[1:], row[:0:-1])[i % 2]
            ]
            paths_in_order.append([(k, *row[0]) for k in range(ordered_sides[0])] + back)
        # `[:, inverse]` puts the columns of a path, one per side, back into the order of `sides`.
        inverse = np.argsort(order).astype(int)
        for path in paths_in_order:
            paths.append(np.array(path, int).reshape(len(path), len(sides))[:, inverse])
    return paths


def _snake(sides: Sequence[int]) -> list[tuple[int, ...]]:
    """Returns all points of a box in an order in which each point is one step from the one before.

    `sides` are the lengths of the box's sides. The points that differ only along the last side form
    a row. Every second row runs backward, so that each step goes to a neighbouring point.
    """
    points: list[tuple[int, ...]] = [()]
    for size in sides:
        points = [
            (*point, k)
            for i, point in enumerate(points)
            for k in (range(size), range(size)[::-1])[i % 2]
        ]
    return points
