"""Where devices lie on a torus: rings of neighbours wherever a search finds that there can be one,
and no raw error."""

import dataclasses
import functools
import itertools
import math
from typing import NamedTuple

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallax import hardware, mesh, torus
from parallax.compiled import links
from parallax.layout import Layout
from parallax.models import gpt2
from parallax.plan import algorithms, traffic

# Chips along each dim, and cores of a chip.
FLAT = {
    "v5e:2x4": (2, 4),
    "v5e:4x4": (4, 4),
    "v5e:4x8": (4, 8),
    "v5e:8x8": (8, 8),
    "v5e:8x16": (8, 16),
    "v5e:16x16": (16, 16),
}
SOLID = {
    "v5p:2x2x2": (2, 2, 2),
    "v5p:2x2x4": (2, 2, 4),
    "v5p:2x4x4": (2, 4, 4),
    "v5p:4x4x4": (4, 4, 4),
    "v5p:4x4x8": (4, 4, 8),
    "v5p:4x8x8": (4, 8, 8),
}
CORES = {"v4:2x2x1": (2, 2, 1), "v4:2x2x2": (2, 2, 2), "v4:4x4x4": (4, 4, 4)}
TARGETS = FLAT | SOLID | CORES
# Links a hop, the mean over all data x stage x tensor of powers of two: a grid has no ring for two
# axes at once.
MEANS = {
    "v5e:2x4": 1.19,
    "v5e:4x4": 1.22,
    "v5e:4x8": 1.33,
    "v5e:8x8": 1.43,
    "v5e:8x16": 1.39,
    "v5e:16x16": 1.38,
}

STEPS = 2_000


class Chip(NamedTuple):
    coords: tuple[int, ...]
    core_on_chip: int = 0
    device_kind: str = "TPU v5"
    platform: str = "tpu"
    slice_index: int | None = None
    process_index: int = 0


def chips(target, **more):
    """The devices of a target as its compiler gives them: the first coordinate fastest."""
    box, cores = TARGETS[target], 2 if target in CORES else 1
    box = (*box, 1)[:3]
    kind = "TPU v5 lite" if target in FLAT else "TPU v5"
    places = [place[::-1] for place in itertools.product(*map(range, box[::-1]))]
    return [Chip(place, core, kind, **more) for place in places for core in range(cores)]


def machine(target, devices):
    return links.torus(hardware.KNOWN[target.split(":")[0]], [each.coords for each in devices.flat])


def hops(target, devices):
    """The links of every hop along each axis."""
    here, found = machine(target, devices), {}
    numbers = np.arange(devices.size).reshape(devices.shape)
    for axis, size in enumerate(devices.shape):
        if size > 1:
            pairs = zip(numbers.flat, np.roll(numbers, -1, axis).flat, strict=True)
            found[axis] = [len(here.path(int(a), int(b))) for a, b in pairs]
    return found


def powers(devices):
    """Every data x stage x tensor of so many devices."""
    sizes = [2**k for k in range(9)]
    return [(a, b, devices // a // b) for a in sizes for b in sizes if devices % (a * b) == 0]


@functools.cache
def can_be(box, rings, sizes):
    """Whether an order of a box's chips is found that makes every hop of every axis one link.

    It tries them, the most constrained first, and gives up after `STEPS`, which happens on the
    largest boxes alone.
    """
    points = list(itertools.product(*map(range, box)))
    beside = {p: set() for p in points}
    for p in points:
        for dim, size in enumerate(box):
            for step in (1, -1):
                there = (p[dim] + step) % size
                if rings[dim] or 0 <= p[dim] + step < size:
                    beside[p].add((*p[:dim], there, *p[dim + 1 :]))
        beside[p].discard(p)
    nodes = list(itertools.product(*map(range, sizes)))
    joined = {n: set() for n in nodes}
    for n in nodes:
        for axis, size in enumerate(sizes):
            if size > 1:
                for step in (1, -1):
                    joined[n].add((*n[:axis], (n[axis] + step) % size, *n[axis + 1 :]))
    if max(map(len, joined.values())) > min(map(len, beside.values())):
        return False
    order, known = [], dict.fromkeys(nodes, 0)  # and how many of a node's neighbours come before it
    while known:
        order.append(max(known, key=lambda n: known[n]))
        del known[order[-1]]
        for n in joined[order[-1]] & set(known):
            known[n] += 1

    steps = itertools.count()

    def fill(k, at):
        if k == len(order) or next(steps) > STEPS:
            return k == len(order)
        before = [at[n] for n in joined[order[k]] if n in at]
        options = (
            set(points) - set(at.values())
            if not before
            else set.intersection(*(beside[p] for p in before)) - set(at.values())
        )
        return any(fill(k + 1, at | {order[k]: p}) for p in sorted(options))

    starts = points[:1] if all(rings) else points
    return any(fill(1, {order[0]: p}) for p in starts)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("target", TARGETS)
def test_rings_are_of_neighbours_wherever_they_can_be(target):
    devices, box = chips(target), TARGETS[target]
    rings = torus.closed_dims(target in FLAT, box)
    means = []
    for sizes in powers(len(devices)):
        laid = torus.device_array(devices, sizes)
        assert laid.shape == sizes
        assert set(laid.flat) == set(devices)
        found = hops(target, laid)
        means.append(np.mean([np.mean(each) for each in found.values()]))
        if max(max(each) for each in found.values()) > 1:
            assert target not in CORES
            assert not can_be(
                box, rings, tuple(sorted((size for size in sizes if size > 1), reverse=True))
            ), sizes
    assert np.mean(means) <= MEANS.get(target, 1.1), np.mean(means)


@pytest.mark.parametrize("sizes", [(2, 4), (4, 2)])
def test_the_hops_of_an_axis_share_no_link(sizes):
    """Two axes on a grid of 2 x 4: one has rings of four, whose hops may cross two links."""
    laid = torus.device_array(chips("v5e:2x4"), sizes)
    here, numbers = machine("v5e:2x4", laid), np.arange(laid.size).reshape(sizes)
    for axis in range(2):
        pairs = zip(numbers.flat, np.roll(numbers, -1, axis).flat, strict=True)
        crossed = [link for a, b in pairs for link in here.path(int(a), int(b))]
        assert len(crossed) == len(set(crossed)), axis


@given(st.data())
def test_every_device_has_one_place(data):
    """Boxes and meshes of any sizes, of one slice or several, of whole boxes or not, in any
    order."""
    box = data.draw(st.tuples(*[st.integers(1, 6)] * 3).filter(lambda box: math.prod(box) <= 48))
    cores, slices = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3))
    kind = data.draw(st.sampled_from(["TPU v4", "TPU v6 lite"]))
    numbers = range(slices) if slices > 1 else [None]
    devices = [
        Chip(place, core, kind, slice_index=k)
        for k in numbers
        for place in itertools.product(*map(range, box))
        for core in range(cores)
    ]
    devices = data.draw(st.permutations(devices))
    devices = devices[: data.draw(st.sampled_from([len(devices)] * 3 + [max(1, len(devices) - 1)]))]
    sizes, rest = [], len(devices)
    for _ in range(3):
        sizes.append(data.draw(st.sampled_from([k for k in range(1, rest + 1) if rest % k == 0])))
        rest //= sizes[-1]
    laid = torus.device_array(devices, (*sizes, rest))
    assert laid.shape == (*sizes, rest)
    assert sorted(map(hash, laid.flat)) == sorted(map(hash, devices))
    again = torus.device_array(devices, (*sizes, rest))
    assert all(
        a == b for a, b in zip(laid.flat, again.flat, strict=True)
    )  # all processes must agree


@pytest.mark.parametrize(("slices", "sizes"), [(2, (4, 4)), (4, (2, 8, 2)), (2, (1, 2, 8))])
def test_the_first_axes_cross_the_network(slices, sizes):
    devices = [each for k in range(slices) for each in chips("v5e:2x4", slice_index=k)]
    laid = torus.device_array(devices, sizes)
    of = np.vectorize(lambda k: laid.flat[k].slice_index)(np.arange(laid.size)).reshape(sizes)
    assert (of == of[..., :1]).all()  # the last axis stays inside
    assert (
        np.diff(of.reshape(sizes[0] * (sizes[1] if sizes[0] < slices else 1), -1)[:, 0]) >= 0
    ).all()


def test_machines_of_gpus_stay_in_order():
    devices = [Chip((), platform="gpu", process_index=k // 8, core_on_chip=k) for k in range(16)]
    laid = torus.device_array(devices, (4, 4))
    assert [device.process_index for device in laid[1]] == [0] * 4
    assert list(laid.flat) == devices


def test_a_part_of_a_torus_keeps_its_order():
    devices = chips("v5e:2x4")[1:]
    assert list(torus.device_array(devices, (7,)).flat) == devices


def test_a_ring_of_eight_in_a_slice_of_eight():
    """By hand: out along the long side of 2 x 4, and back."""
    ring = torus.device_array(chips("v5e:2x4"), (8,))
    steps = [
        tuple(np.subtract(b.coords, a.coords)) for a, b in zip(ring, np.roll(ring, -1), strict=True)
    ]
    assert all(sum(map(abs, step)) == 1 for step in steps)
    assert np.sum(steps, 0).tolist() == [0, 0, 0]


# What the makers' pages say closes: whole pods of 16 in two dims, joined cubes of 4 x 4 x 4 in
# three.
CLOSED = {
    "v5e:8x8": (False, False),
    "v5e:8x16": (False, True),
    "v5e:16x16": (True, True),
    "v5p:2x4x4": (False, False, False),
    "v5p:4x4x8": (True, True, True),
    "v4:2x2x1": (False, False, False),
    "v4:4x4x4": (True, True, True),
}


@pytest.mark.parametrize("target", CLOSED)
def test_what_closes_in_the_replay(target):
    box, devices = TARGETS[target], chips(target)
    here = links.torus(hardware.KNOWN[target.split(":")[0]], [each.coords for each in devices])
    for dim, (size, ring) in enumerate(zip(box, CLOSED[target], strict=True)):
        ends = [tuple(end if d == dim else 0 for d in range(3)) for end in (0, size - 1)]
        assert len(here.path(*(here.places.index(end) for end in ends))) == (
            1 if ring else size - 1
        )


@pytest.mark.parametrize(
    ("box", "layout", "expected"),
    [((2, 4), {"data": 8}, 1.0), ((8, 8), {"data": 8, "tensor": 8}, 2.5)],
)
def test_the_plan_counts_links_by_these_places(box, layout, expected):
    """A hop over two links takes twice as long, as its bytes use both."""
    layout = Layout(**layout, microbatches=1)
    near = dataclasses.replace(
        hardware.TPU_V5E, fast=hardware.TPU_V5E.fast._replace(gamma=0.0)
    )  # nothing but messages
    far = dataclasses.replace(near, torus=box)
    of = lambda chip: algorithms.messages(traffic.terms(gpt2.SMALL, layout, 64), layout, chip)
    a, b = of(near), of(far)
    ratios = far.hops(layout.axes)
    assert {axes: b[axes] / a[axes] for axes in a} == pytest.approx(
        {axes: max(ratios[name] for name in axes) for axes in a}
    )
    assert (ratios["data"], ratios["tensor"]) == (expected, 1.0)
    assert hardware.named(f"v5e:{box[0]}x{box[1]}") == dataclasses.replace(
        hardware.TPU_V5E, torus=box, domain=math.prod(box)
    )


@pytest.mark.parametrize("sizes", [(8,), (4, 2), (2, 2, 2)])
def test_meshes_of_other_devices_are_as_before(sizes):
    named = dict(zip("abc", sizes, strict=False))
    assert list(mesh.make(**named).devices.flat) == jax.devices()
