"""Measures what a hop takes on the live mesh, and chooses the all-reduce of each array by its size.

    link = tuning.fit(mesh, "data")          # alpha, beta, gamma, for the formulas of `cost`
    auto, why = tuning.auto(mesh, "data")    # an algorithm, and a text with the choice and why

The model is good for which functions are worth a race, and the race decides. All processes of the
mesh must call these functions together, and all find the same: of each time, the slowest process's
counts.
"""

import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from parallax import mesh as meshes
from parallax.collectives import cost
from parallax.collectives.axis import Algorithm
from parallax.collectives.cost import Cost, Link, Sizes, describe
from parallax.collectives.permute import send_next
from parallax.collectives.recursive_doubling import doubling
from parallax.collectives.tables import halving, hierarchical, ring, torus, two_rings
from parallax.collectives.types import AxisName, axes, varying

FIT_SIZES = (2**12, 2**16, 2**20, 2**24)
RACE_SIZES = (2**12, 2**15, 2**18, 2**21, 2**24)
REFINED = 2  # times that a race looks closer at where one function begins to win over another


def exact(n: Sizes) -> list[Callable[..., Any]]:
    """Returns every all-reduce that sends no rounded numbers, for one axis or several."""
    found = [ring, two_rings, halving, doubling]
    found += [torus] if isinstance(n, tuple) and len(n) > 1 else []
    found += [hierarchical] if isinstance(n, tuple) and len(n) == 2 else []
    return [algorithm.all_reduce for algorithm in found]


def fastest(
    nbytes: int,
    n: Sizes,
    link: Link,
    *,
    among: Sequence[Callable[..., Any]] | None = None,
    itemsize: int = 4,
) -> Callable[..., Any]:
    """The all-reduce of an array of `nbytes` that takes the fewest seconds by its table and the
    link; of equals, the first.

    Args:
        nbytes: of the array on each device.
        n: the devices on the axis, or on each of several.
        link: of that axis.
        among: the functions to choose from; `exact(n)` by default.
        itemsize: bytes of a number.

    Raises:
        ValueError: as `cost.of` does.
    """
    among = exact(n) if among is None else among
    return min(among, key=lambda f: cost.seconds(cost.of(f, nbytes, n, itemsize=itemsize), link))


def fit(
    mesh: Mesh, axis_name: AxisName, *, sizes: Sequence[int] = FIT_SIZES, rounds: int = 9
) -> Link:
    """The `Link` of one axis of `mesh`, from the times of one hop, of rings that pass on or add, of
    two rings at once, and of
    all bytes exchanged and added.

    The least sum of relative differences, over arrays of `sizes` bytes a device, no term below
    zero; `Link.error` is the median difference that is left. A hop's time bends where messages
    outgrow a cache, so it is not zero. Takes some seconds, most of them to compile.

    Args:
        mesh: the mesh; its other axes are used at the same time, as in a training step.
        axis_name: the axis, or several, which then form one ring.
        sizes: bytes a device.
        rounds: how often each is measured in turn; the median counts.
    """
    n = _size(mesh, axis_name)
    part, whole = lambda size: size // n, lambda size: size - size % n
    probes = [  # (a function, how many of the numbers it takes, its options)
        (send_next, lambda size: size, {}),
        (ring.all_gather, part, {}),
        (two_rings.all_gather, part, {}),
        (ring.reduce_scatter, whole, {"tiled": True}),
        (doubling.all_reduce, lambda size: size, {}),
    ]
    calls, costs = [], []
    for nbytes in sizes:
        for f, taken, options in probes:
            count = taken(nbytes // 4)
            calls.append(
                (
                    lambda x, f=f, count=count, options=options: f(x[:count], axis_name, **options),
                    nbytes,
                )
            )
            costs.append(cost.of(f, 4 * count, n))
    return solved(costs, measure(mesh, axis_name, calls, rounds=rounds))


def solved(costs: Sequence[Cost], measured: Sequence[float]) -> Link:
    """The `Link` whose seconds differ least from those `measured`: the sum of relative differences,
    no term below 0.

    Sums, not squares: a time that a busy machine spoilt pulls no harder than another. Each sum is
    made least by least squares with weights (Weiszfeld's iteration), for every choice of the terms
    that are not 0.
    """
    best, found = math.inf, Link(0.0, 0.0)
    for one_port, count in itertools.product((False, True), range(1, 5)):
        relative = (
            np.array([cost.terms(price, one_port) for price in costs])
            / np.asarray(measured)[:, None]
        )
        scale = np.maximum(
            relative.max(axis=0), 1e-300
        )  # seconds and seconds a byte differ by nine decades
        for used in map(list, itertools.combinations(range(4), count)):
            rates = np.zeros(4)
            rates[used] = _least_absolute(relative[:, used] / scale[used]) / scale[used]
            left = np.abs(relative @ rates - 1)
            if rates.min() >= 0 and left.sum() < best:
                best = left.sum()
                found = Link(*map(float, rates), one_port=one_port, error=float(np.median(left)))
    return found


def _least_absolute(terms: np.ndarray) -> np.ndarray:
    """The x for which the sum of |terms x - 1| is least, by least squares with weights (Weiszfeld's
    iteration).
    """
    weights = np.ones(len(terms))
    for _ in range(30):
        x = np.linalg.lstsq(terms * weights[:, None], weights, rcond=None)[0]
        weights = np.maximum(np.abs(terms @ x - 1), 1e-6) ** -0.5
    return x


class Choice(NamedTuple):
    """What a race on one axis found: an all-reduce of that axis by the array's size.

    Attributes:
        sizes: bytes a device at which the functions were raced, in rising order.
        times: of each function, its seconds at each of these.
    """

    sizes: tuple[int, ...]
    times: dict[Callable[..., Any], list[float]]

    def fastest(self, nbytes: int) -> Callable[..., Any]:
        """The function that is expected to be the fastest for `nbytes`: between the sizes raced, by
        the line between them.
        """
        at = math.log(max(nbytes, 1))
        known = [math.log(size) for size in self.sizes]
        return min(self.times, key=lambda f: np.interp(at, known, np.log(self.times[f])))

    def crossings(self) -> tuple[int, ...]:
        """The sizes halfway (in the logarithm) between neighbours at which different functions were
        the fastest.
        """
        winners = [min(self.times, key=lambda f: self.times[f][k]) for k in range(len(self.sizes))]
        pairs = zip(itertools.pairwise(self.sizes), itertools.pairwise(winners), strict=True)
        halfway = [(math.isqrt(a * b) // 4 * 4, a) for (a, b), (f, g) in pairs if f is not g]
        return tuple(size for size, a in halfway if size > a)

    def joined(self, sizes: Sequence[int], measured: Sequence[float]) -> "Choice":
        """With the seconds `measured` at more sizes: those of the first function at each, then
        those of the next.
        """
        by_function = np.reshape(measured, (len(self.times), len(sizes)))
        order = np.argsort([*self.sizes, *sizes])
        times = {
            f: np.array([*known, *new])[order].tolist()
            for (f, known), new in zip(self.times.items(), by_function, strict=True)
        }
        return Choice(tuple(np.array([*self.sizes, *sizes])[order].tolist()), times)


def auto(
    mesh: Mesh,
    *axis_names: AxisName,
    among: Sequence[Callable[..., Any]] | None = None,
    sizes: Sequence[int] = RACE_SIZES,
    rounds: int = 11,
    link: Link | None = None,
) -> tuple[Algorithm, str]:
    """An algorithm whose all-reduce takes, for each array, the one that was fastest at its size;
    and what was chosen, and why.

    For each axis: `fit`, then a race between those that the model puts first or second at one of
    the sizes, and `lax.psum`, which no formula knows; twice it is run again halfway between sizes
    with different winners. The choice is made at trace time, by the bytes of each leaf, and costs
    nothing in the step. Axes that were not measured get `lax.psum`, and so `jax.lax` does all but
    the all-reduce.

    Args:
        mesh: the mesh that the step will run on.
        axis_names: the axes along which it will reduce; of several at once, a tuple.
        among: the functions to choose from beside `lax.psum`; all exact all-reduces of the library
            by default.
        sizes: bytes a device at which to race, in rising order.
        rounds: how often each is measured in turn; the median counts.
        link: of these axes, if it has been fitted before.
    """
    choices: dict[tuple[str, ...], Choice] = {}
    told = []
    for axis_name in axis_names:
        n, fitted = _sizes(mesh, axis_name), link or fit(mesh, axis_name, rounds=rounds)
        rivals = exact(n) if among is None else among
        predicted = {
            f: [cost.seconds(cost.of(f, size, n), fitted) for size in sizes] for f in rivals
        }
        ranked = [sorted(rivals, key=lambda f: predicted[f][k]) for k in range(len(sizes))]
        raced = [
            lax.psum,
            *dict.fromkeys(f for k in range(2) for order in ranked for f in order[k : k + 1]),
        ]
        choice = Choice((), {f: [] for f in raced})
        more = tuple(sizes)
        for _ in range(1 + REFINED):
            calls = [(lambda x, f=f: f(x, axis_name), size) for f in raced for size in more]
            choice = choice.joined(
                more, measure(mesh, axis_name, calls, rounds=rounds) if more else []
            )
            more = choice.crossings()
        choices[tuple(sorted(axes(axis_name)))] = choice
        predicted = {
            f: [cost.seconds(cost.of(f, size, n), fitted) for size in choice.sizes] for f in rivals
        }
        told.append(_told(axis_name, n, fitted, choice, predicted))

    def all_reduce(x, axis_name):
        choice = choices.get(tuple(sorted(axes(axis_name))))
        if choice is None:
            return lax.psum(x, axis_name)
        return jax.tree.map(
            lambda leaf: choice.fastest(jnp.asarray(leaf).nbytes)(leaf, axis_name), x
        )

    return Algorithm("auto", all_reduce, lax.psum_scatter, lax.all_gather), "\n".join(
        [*told, "Any other axis: lax.psum, not measured."]
    )


def measure(
    mesh: Mesh, axis_name: AxisName, calls: Sequence[tuple[Callable[..., Any], int]], *, rounds: int
) -> list[float]:
    """The median seconds of each call: of a function of local blocks, and the bytes of its float32
    array on each device.

    They take turns, so that a machine that becomes slower does so for all. The time is that of the
    slowest process.
    """
    spec, n = P(axis_name), _size(mesh, axis_name)
    placed = lambda x, spec, n: jax.make_array_from_callback(
        (n, *x.shape[1:]), NamedSharding(mesh, spec), lambda _: x
    )
    inputs = {
        nbytes: placed(np.ones((1, nbytes // 4), np.float32), spec, n)
        for nbytes in {nbytes for _, nbytes in calls}
    }
    body = lambda f: lambda x: varying(f(x[0]), axis_name)[None]
    programs = [
        jax.jit(meshes.spmd(body(f), mesh=mesh, in_specs=(spec,), out_specs=spec)) for f, _ in calls
    ]
    taken = np.zeros((rounds + 1, len(calls)))
    for r in range(rounds + 1):
        for k, (program, (_, nbytes)) in enumerate(zip(programs, calls, strict=True)):
            repeats = (
                min(8, max(1, 2**22 // nbytes)) if r else 1
            )  # a sample of a short one is many calls
            start = time.perf_counter()
            for _ in range(repeats):
                jax.block_until_ready(program(inputs[nbytes]))
            taken[r, k] = (time.perf_counter() - start) / repeats
    medians = np.median(taken[1:], axis=0).astype(np.float32)  # the first compiles
    every = P(mesh.axis_names)
    slowest = meshes.spmd(
        lambda x: lax.pmax(x[0], mesh.axis_names), mesh=mesh, in_specs=(every,), out_specs=P()
    )
    return np.asarray(
        jax.jit(slowest)(placed(medians[None], every, mesh.size)), np.float64
    ).tolist()


def _told(
    axis_name: AxisName, n: int | tuple[int, ...], link: Link, choice: Choice, predicted: dict
) -> str:
    """What was measured and chosen on one axis."""
    lines = [
        f"Axis {axis_name!r} of {n} devices: {1e6 * link.alpha:.3g} us a hop, "
        f"{1e9 * link.beta:.3g} ns a byte, {1e9 * link.gamma:.3g} ns a byte added, "
        f"{1e6 * link.start:.3g} us a call (within {link.error:.0%} in the median); messages of a "
        f"round go {'one after another' if link.one_port else 'at the same time'}.",
        "Milliseconds, measured (predicted):",
    ]
    for f, times in choice.times.items():
        model = predicted.get(f, [None] * len(times))
        cells = [
            f"{1e3 * t:.3g}" + ("" if m is None else f" ({1e3 * m:.3g})")
            for t, m in zip(times, model, strict=True)
        ]
        cells = [f"{_bytes(size)} {cell}" for size, cell in zip(choice.sizes, cells, strict=True)]
        lines.append(f"  {describe(f)}: " + ", ".join(cells))
    grid = [2**k for k in range(2, 31)]
    spans = [(f, list(sizes)) for f, sizes in itertools.groupby(grid, key=choice.fastest)]
    chosen = [
        describe(f) + (f" from {_bytes(sizes[0])}" if k else "")
        for k, (f, sizes) in enumerate(spans)
    ]
    return "\n".join([*lines, f"Chosen, as the fastest at its size: {', '.join(chosen)}."])


def _bytes(count: int) -> str:
    power = min(max(count.bit_length() - 1, 0) // 10, 3)
    return f"{count / 1024**power:.4g} {('B', 'kB', 'MB', 'GB')[power]}"


def _sizes(mesh: Mesh, axis_name: AxisName) -> int | tuple[int, ...]:
    return (
        tuple(mesh.shape[name] for name in axis_name)
        if isinstance(axis_name, tuple)
        else mesh.shape[axis_name]
    )


def _size(mesh: Mesh, axis_name: AxisName) -> int:
    return math.prod(mesh.shape[name] for name in axes(axis_name))
