"""Measures the time of a hop on the live mesh, and chooses an all-reduce by the array's size.

    link = tuning.fit(mesh, "data")          # alpha, beta, gamma, for the formulas of `cost`
    auto, why = tuning.auto(mesh, "data")    # an algorithm, and a text with the choice and why

In a *race* several functions are timed on the same arrays. The formulas of `cost` select the
functions that are raced, and the times decide. All processes of the mesh must call the functions of
this module together. All processes get the same result: the measured time of a call is the time of
the slowest process.
"""

import functools
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
from jaxtyping import Array

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
# How often a race adds sizes halfway between two sizes with different winners
REFINED = 2


def exact(n: Sizes) -> list[Callable[..., Any]]:
    """Returns the library's all-reduces that send numbers without rounding (not the int8 ones).

    XLA's own `lax.psum` is not among them, since no formula predicts the time of `lax.psum`.

    Args:
        n: the number of devices on the axis, or a tuple with the number on each of several axes.
    """
    algorithms = [ring, two_rings, halving, doubling]
    # The tables of these two are made from the size of each axis, so they need several axes.
    # `hierarchical` is listed for two axes only, one inside machines and one between them; for more
    # axes, pass it in the `among` of `auto` or `fastest`.
    if isinstance(n, tuple) and len(n) > 1:
        algorithms.append(torus)
    if isinstance(n, tuple) and len(n) == 2:
        algorithms.append(hierarchical)
    return [algorithm.all_reduce for algorithm in algorithms]


def fastest(
    nbytes: int,
    n: Sizes,
    link: Link,
    *,
    among: Sequence[Callable[..., Any]] | None = None,
    itemsize: int = 4,
) -> Callable[..., Any]:
    """Returns the all-reduce that takes the fewest seconds, by the formulas of `cost`.

    Args:
        nbytes: the bytes of the array on each device.
        n: the number of devices on the axis, or on each of several axes.
        link: the `Link` of the axis.
        among: the functions to choose from; by default `exact(n)`, functions that send numbers in
            full precision. If two are equally fast, the first is taken.
        itemsize: the bytes of one number.

    Raises:
        ValueError: an error of `cost.of`.
    """

    def seconds(f):
        return cost.seconds(cost.of(f, nbytes, n, itemsize=itemsize), link)

    return min(exact(n) if among is None else among, key=seconds)


def fit(
    mesh: Mesh, axis_name: AxisName, *, sizes: Sequence[int] = FIT_SIZES, rounds: int = 9
) -> Link:
    """Returns the `Link` of one axis of `mesh`, fitted to the measured times of five collectives.

    The five are one hop, an all-gather by one ring, an all-gather by two rings, a reduce-scatter by
    a ring, and an all-reduce by recursive doubling. A `Link` has four rates: the seconds per hop
    (alpha), per byte (beta), per byte added (gamma) and per call (start). The fitted rates minimise
    the sum of the relative differences between predicted and measured times. No rate is negative.
    `Link.error` is the median of these differences. This error is not zero, since a hop takes
    longer per byte once messages outgrow a cache. `fit` takes some seconds, most of them to
    compile.

    Args:
        mesh: the mesh. All its groups of devices along `axis_name` run the collectives at the same
            time, as in a training step.
        axis_name: the axis, or several, which then form one ring.
        sizes: the bytes per device of the arrays on which the collectives are timed.
        rounds: the number of times that each measurement is made; the median is used.
    """
    n = _size(mesh, axis_name)
    calls, costs = [], []
    for nbytes in sizes:
        size = nbytes // 4
        # (a function, the number of numbers that it takes, its options). A gather of `size // n`
        # returns about `size` numbers; a tiled scatter needs a multiple of n. A call of `send_next`
        # is one hop, and a call of the ring n - 1: this tells the time of a hop from that of a
        # call. Two rings send two messages in a round, through one port or two. The last two
        # functions also add.
        probes = [
            (send_next, size, {}),
            (ring.all_gather, size // n, {}),
            (two_rings.all_gather, size // n, {}),
            (ring.reduce_scatter, size - size % n, {"tiled": True}),
            (doubling.all_reduce, size, {}),
        ]
        for f, count, options in probes:
            # `_call` applies `f` to the first `count` numbers of the array of `nbytes` bytes.
            calls.append((functools.partial(_call, f, count, axis_name, options), nbytes))
            costs.append(cost.of(f, 4 * count, n))  # a float32 has 4 bytes
    return solved(costs, measure(mesh, axis_name, calls, rounds=rounds))


def _call(
    f: Callable[..., Any], count: int, axis_name: AxisName, options: dict[str, Any], x: Array
) -> Array:
    """Returns the result of `f` for the first `count` numbers of the vector `x`. `options` are the
    keyword arguments of `f`."""
    return f(x[:count], axis_name, **options)


def solved(costs: Sequence[Cost], measured: Sequence[float]) -> Link:
    """Returns the `Link` whose predicted times have the least sum of relative differences from the
    times `measured`, in seconds.

    `costs[i]` is the cost of the collective that took `measured[i]` seconds. A `Link` has four
    rates, none below 0: the seconds per hop (alpha), per byte (beta), per byte added (gamma) and
    per call (start). The absolute values of the differences are summed: a sum of their squares
    would give too much weight to a time that a busy machine made longer. The sum is minimised by
    weighted least squares (Weiszfeld's iteration), which may make rates negative. So the
    minimisation is repeated for each subset of the rates, with the other rates set to 0, and the
    best fit without a negative rate is taken.
    """
    best, link = math.inf, Link(0.0, 0.0)
    # Both kinds of link are tried: one port for all messages of a round, or a port for each.
    for one_port, count in itertools.product((False, True), range(1, 5)):
        factors = np.array([cost.terms(price, one_port) for price in costs])
        relative = factors / np.asarray(measured)[:, None]
        # Seconds, and seconds per byte, differ by nine decades: without a scale, the solution would
        # lose the smaller ones.
        scale = np.maximum(relative.max(axis=0), 1e-300)
        # The four terms, one column each, are those of alpha, beta, gamma and start. Rates of
        # `count` of them are fitted; the others are 0.
        for terms in map(list, itertools.combinations(range(4), count)):
            rates = np.zeros(4)
            # `relative` times the rates is the predicted time, divided by the measured one.
            rates[terms] = _least_absolute(relative[:, terms] / scale[terms]) / scale[terms]
            differences = np.abs(relative @ rates - 1)
            if rates.min() >= 0 and differences.sum() < best:
                best = differences.sum()
                error = float(np.median(differences))
                link = Link(*map(float, rates), one_port=one_port, error=error)
    return link


def _least_absolute(relative: np.ndarray) -> np.ndarray:
    """Returns the vector x with the least sum of |relative @ x - 1|, by Weiszfeld's iteration.

    A row of `relative` is for one measurement. A column is for one of the rates that `solved` fits,
    which are some of alpha, beta, gamma and start. The caller divided each column by a scale. So
    entry i of x is the best value of the rate of column i, multiplied by the scale of column i.
    `relative @ x` is the predicted time of each measurement, divided by the measured one.
    """
    weights = np.ones(len(relative))
    for _ in range(30):
        x = np.linalg.lstsq(relative * weights[:, None], weights, rcond=None)[0]
        # A square weighted by 1 / |difference| counts as |difference|. The weights are square
        # roots, since `lstsq` squares them. 1e-6 prevents a division by 0.
        weights = np.maximum(np.abs(relative @ x - 1), 1e-6) ** -0.5
    return x


class Choice(NamedTuple):
    """The measured times of several all-reduce functions on one axis, at several array sizes.

    Attributes:
        sizes: the bytes per device at which the functions were timed, in rising order.
        times: the seconds of each function at each of these sizes.
    """

    sizes: tuple[int, ...]
    times: dict[Callable[..., Any], list[float]]

    def fastest(self, nbytes: int) -> Callable[..., Any]:
        """Returns the function that is expected to be the fastest for `nbytes`.

        Between two sizes at which the functions were timed, the logarithm of the time is
        interpolated over the logarithm of the size. Below the smallest and above the largest size,
        the time at the smallest or the largest size is used.
        """
        # `times` maps each function to its seconds at each of `sizes`. Logarithms, since both sizes
        # and times span several decades.
        log_nbytes = math.log(max(nbytes, 1))
        log_sizes = [math.log(size) for size in self.sizes]

        def log_seconds(function):
            return np.interp(log_nbytes, log_sizes, np.log(self.times[function]))

        return min(self.times, key=log_seconds)

    def next_sizes(self) -> tuple[int, ...]:
        """Returns the sizes at which to time the functions next. If different functions were the
        fastest at two neighbouring sizes, there is a new size between the two.

        A new size is the geometric mean of its two neighbours, rounded down to a multiple of 4
        bytes, the size of a float32. A mean that equals the smaller neighbour is left out, since
        the functions were timed at that size already.
        """
        # `times` maps each function to its seconds at each of the `sizes`. The winner at a size is
        # the function with the shortest time there.
        functions = list(self.times)
        winners = [functions[k] for k in np.argmin(list(self.times.values()), axis=0)]
        pairs = zip(itertools.pairwise(self.sizes), itertools.pairwise(winners), strict=True)
        # The mean, and the smaller of the two sizes.
        halfway = [(math.isqrt(a * b) // 4 * 4, a) for (a, b), (f, g) in pairs if f is not g]
        # If no multiple of 4 bytes lies between two sizes, the mean is the smaller one.
        return tuple(size for size, a in halfway if size > a)

    def joined(self, sizes: Sequence[int], measured: Sequence[float]) -> "Choice":
        """Returns a choice that also has the seconds `measured` at `sizes`, which may be in any
        order. The sizes of the result are in rising order.

        `measured` lists the seconds of the first function in `times` at each of `sizes`, then the
        seconds of the second function, and so on.
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
    """Returns an algorithm whose all-reduce is the fastest at each size, and a report as text.

    For each axis, `auto` calls `fit`, and then races several all-reduces: it times each of them on
    arrays of each of the `sizes`. It races `lax.psum`, which has no cost formula, and the functions
    for which the cost formulas predict the shortest or the second shortest time at one of the
    `sizes`. Then the same functions race again, at most twice, at new sizes: one new size between
    each two neighbouring sizes that have different winners (`Choice.next_sizes`). The choice
    depends on the bytes of each leaf and is made at trace time, so the choice costs nothing in the
    step. Along axes that were not raced, and for the other collectives, the algorithm uses
    `jax.lax`.

    Args:
        mesh: the mesh that the step will run on.
        axis_names: the axes along which the algorithm will reduce; a tuple stands for several axes
            at once.
        among: the functions to choose from besides `lax.psum`; by default all exact all-reduces of
            the library.
        sizes: the bytes per device of the arrays on which the functions are timed first, in rising
            order.
        rounds: the number of measurements of each function at each size; their median is used.
        link: a link that was fitted before. It is used for all of `axis_names`, in place of a call
            of `fit` for each.
    """
    choices: dict[tuple[str, ...], Choice] = {}
    report = []
    for axis_name in axis_names:
        n, fitted = _sizes(mesh, axis_name), link or fit(mesh, axis_name, rounds=rounds)
        rivals = exact(n) if among is None else among
        raced = [lax.psum, *_worth_a_race(rivals, sizes, n, fitted)]
        choice = Choice((), {f: [] for f in raced})
        more = tuple(sizes)  # the sizes to measure next
        for _ in range(1 + REFINED):
            if more:
                calls = [(_all_reduce_call(f, axis_name), size) for f in raced for size in more]
                choice = choice.joined(more, measure(mesh, axis_name, calls, rounds=rounds))
            more = choice.next_sizes()
        choices[tuple(sorted(axes(axis_name)))] = choice
        predicted = _predicted(rivals, choice.sizes, n, fitted)
        report.append(_report(axis_name, n, fitted, choice, predicted))
    report.append("Any other axis: lax.psum, not measured.")

    def all_reduce(x, axis_name):
        """Returns the sum over devices of each leaf, by the fastest function for its bytes."""
        # The race on these axes, in any order; None if there was none.
        choice = choices.get(tuple(sorted(axes(axis_name))))
        if choice is None:
            return lax.psum(x, axis_name)

        def leaf(x):
            return choice.fastest(jnp.asarray(x).nbytes)(x, axis_name)

        return jax.tree.map(leaf, x)

    return Algorithm("auto", all_reduce, lax.psum_scatter, lax.all_gather), "\n".join(report)


def _all_reduce_call(f: Callable[..., Any], axis_name: AxisName) -> Callable[..., Any]:
    """Returns a function of one array `x` that returns `f(x, axis_name)`."""

    def call(x):
        return f(x, axis_name)

    return call


def _predicted(
    rivals: Sequence[Callable[..., Any]], sizes: Sequence[int], n: Sizes, link: Link
) -> dict[Callable[..., Any], list[float]]:
    """Returns the seconds of each function at each size, by the formulas of `cost`."""
    return {f: [cost.seconds(cost.of(f, size, n), link) for size in sizes] for f in rivals}


def _worth_a_race(
    rivals: Sequence[Callable[..., Any]], sizes: Sequence[int], n: Sizes, link: Link
) -> list[Callable[..., Any]]:
    """Returns the functions that are predicted to be the fastest or second fastest at some size.

    The functions that are the fastest at some size come first, then those that are the second
    fastest.
    """
    predicted = _predicted(rivals, sizes, n, link)
    ranked = [sorted(rivals, key=lambda f: predicted[f][k]) for k in range(len(sizes))]
    # Slices, not items, since a single rival has no second.
    winners, runners_up = ([f for order in ranked for f in order[k : k + 1]] for k in (0, 1))
    return list(dict.fromkeys([*winners, *runners_up]))


def measure(
    mesh: Mesh, axis_name: AxisName, calls: Sequence[tuple[Callable[..., Any], int]], *, rounds: int
) -> list[float]:
    """Returns the time of each call in seconds: the median of `rounds` measurements.

    A call is a pair: a function of a device's float32 vector, and the bytes of that vector. Each
    round measures all calls, so a machine that becomes slower slows all calls alike. If there are
    several processes, the time of a call is the time of the slowest process.
    """
    spec, n = P(axis_name), _size(mesh, axis_name)

    def placed(x, spec, n):
        """Returns a global array [n, ...]; the block of each device is `x`, of shape [1, ...]."""
        sharding = NamedSharding(mesh, spec)
        return jax.make_array_from_callback((n, *x.shape[1:]), sharding, lambda _: x)

    def compiled(f):
        """Returns a jitted function of an array [n, numbers]: device i applies `f` to row i.

        The first call compiles the function.
        """

        def body(x):
            # The dim of 1 is this device's place among the n rows that `spec` splits. So the result
            # is typed as varying, even if it is the same on all devices.
            return varying(f(x[0]), axis_name)[None]

        return jax.jit(meshes.spmd(body, mesh=mesh, in_specs=(spec,), out_specs=spec))

    sizes = {nbytes for _, nbytes in calls}
    inputs = {size: placed(np.ones((1, size // 4), np.float32), spec, n) for size in sizes}
    programs = [compiled(f) for f, _ in calls]
    times = np.zeros((rounds + 1, len(calls)))
    for r in range(rounds + 1):
        for k, (program, (_, nbytes)) in enumerate(zip(programs, calls, strict=True)):
            # One call of a small array is too short to be timed. Round 0 compiles, and is dropped.
            repeats = min(8, max(1, 2**22 // nbytes)) if r else 1
            start = time.perf_counter()
            for _ in range(repeats):
                jax.block_until_ready(program(inputs[nbytes]))
            times[r, k] = (time.perf_counter() - start) / repeats
    medians = np.median(times[1:], axis=0).astype(np.float32)
    # All processes must choose alike, so all take the times of the slowest: each process places its
    # own medians on its devices, and the maximum over all devices is taken.
    spec = P(mesh.axis_names)

    def slowest(x):
        return lax.pmax(x[0], mesh.axis_names)

    agreed = jax.jit(meshes.spmd(slowest, mesh=mesh, in_specs=(spec,), out_specs=P()))
    return np.asarray(agreed(placed(medians[None], spec, mesh.size)), np.float64).tolist()


def _report(
    axis_name: AxisName, n: int | tuple[int, ...], link: Link, choice: Choice, predicted: dict
) -> str:
    """Returns, as text, the measured times on one axis and the all-reduce that was chosen for each
    size.

    `predicted` has, for each function, the predicted seconds at each of `choice.sizes`, by the
    formulas of `cost`.
    """
    in_a_round = "one after another" if link.one_port else "at the same time"
    lines = [
        f"Axis {axis_name!r} of {n} devices: {1e6 * link.alpha:.3g} us per hop, "
        f"{1e9 * link.beta:.3g} ns per byte, {1e9 * link.gamma:.3g} ns per byte added, "
        f"{1e6 * link.start:.3g} us per call (within {link.error:.0%} in the median); messages of "
        f"a round go {in_a_round}.",
        "Milliseconds, measured (predicted):",
    ]
    for f, times in choice.times.items():
        # No formula predicts `lax.psum`.
        predictions = predicted.get(f, [None] * len(times))
        cells = []
        for size, measured, seconds in zip(choice.sizes, times, predictions, strict=True):
            prediction = "" if seconds is None else f" ({1e3 * seconds:.3g})"
            cells.append(f"{_bytes(size)} {1e3 * measured:.3g}{prediction}")
        lines.append(f"  {describe(f)}: {', '.join(cells)}")
    # The powers of two from 4 B to 1 GB, in runs of neighbours with the same choice. A run is
    # written as its choice and its smallest size; the first run without a size.
    chosen = []
    for f, sizes in itertools.groupby([2**k for k in range(2, 31)], key=choice.fastest):
        smallest = f" from {_bytes(next(sizes))}" if chosen else ""
        chosen.append(f"{describe(f)}{smallest}")
    lines.append(f"Chosen as the fastest for each array size: {', '.join(chosen)}.")
    return "\n".join(lines)


def _bytes(count: int) -> str:
    """Returns a number of bytes as text, such as `64 kB` for 64 * 1024."""
    power = min(max(count.bit_length() - 1, 0) // 10, 3)
    return f"{count / 1024**power:.4g} {('B', 'kB', 'MB', 'GB')[power]}"


def _sizes(mesh: Mesh, axis_name: AxisName) -> int | tuple[int, ...]:
    """Returns the number of devices on the axis; for several axes, a tuple of these numbers."""
    if isinstance(axis_name, tuple):
        return tuple(mesh.shape[name] for name in axis_name)
    return mesh.shape[axis_name]


def _size(mesh: Mesh, axis_name: AxisName) -> int:
    """Returns the number of devices on all axes of `axis_name` together."""
    return math.prod(mesh.shape[name] for name in axes(axis_name))
