"""What each collective costs, as a table of its messages: before it runs, on any number of devices.

    price = cost.of(ring.all_reduce, nbytes, n)      # hops, bytes a link, bytes sent, messages, bytes added
    cost.seconds(price, link)                        # start + alpha hops + beta bytes + gamma reduced

A collective is a list of rounds; in a round every device sends a message, or several over links of their own, and waits for those
that it is sent. Some rounds need nothing that the one before brought: a program may send them at once, a device with one port
will not. The formulas are whole numbers, padding included, and every one of them equals what the tests read from the compiled
programs. What a hop takes is measured on the live mesh by `tuning.fit`.

Sources: Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in MPICH (2005); Chan et al.,
Collective communication: theory, practice, and experience (2007).
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from parallax.collectives import bidirectional, doubling, halving, matmul, quantized, ring, torus

Sizes = int | tuple[int, ...]  # devices on the axis, or on each of several


class Message(NamedTuple):
    """What a device sends in a round.

    Attributes:
        bytes: of the message.
        distance: how many devices further on it goes; below 0, back. On a switch that is one link, on a bare ring as many.
        axis: along which of the axes it goes, where there are several.
    """

    bytes: int
    distance: int = 1
    axis: int = 0


class Round(NamedTuple):
    """Rounds that send the same messages, one after another.

    Attributes:
        times: how many they are.
        messages: that a device sends in each, side by side.
        reduced: bytes that it adds to others in each.
        waits: in how many of them something is sent on that took as many hops as anything has; by default in all.
    """

    times: int
    messages: tuple[Message, ...]
    reduced: int = 0
    waits: int | None = None


class Cost(NamedTuple):
    """What a collective costs the device that has most to do.

    Attributes:
        hops: rounds of messages, one after another.
        chain: the longest chain of messages of which each passes on what the one before brought: the program's own hops in a
            row. Below `hops` where a round need not wait for the one before.
        bytes: over the busiest link: of the largest message of each round.
        sent: bytes that a device sends, over all its links: the results of the program's permutes.
        messages: that a device sends: the program's permutes, loops counted out.
        reduced: bytes that a device adds to others.
    """

    hops: int = 0
    bytes: int = 0
    sent: int = 0
    messages: int = 0
    reduced: int = 0
    chain: int = 0


class Link(NamedTuple):
    """What a hop takes, on one mesh axis.

    Attributes:
        alpha: seconds a hop.
        beta: seconds a byte on the wire: it is sent, received and stored.
        gamma: seconds a byte that is added to another, beside that.
        start: seconds a call, whatever it does.
        one_port: the messages of a round go one after another, as through one process's sockets, not each over a link of its own.
        error: of the fit: the median relative difference from what was measured. 0 for a link made by hand.
    """

    alpha: float
    beta: float
    gamma: float = 0.0
    start: float = 0.0
    one_port: bool = False
    error: float = 0.0


def of(collective: Callable, nbytes: int, n: Sizes, *, itemsize: int = 4) -> Cost:
    """What a call of `collective` on one array costs a device, all its rounds together.

    Args:
        collective: a function of this library, or a `functools.partial` of one that sets its options.
        nbytes: of the array that it takes on each device; of `matmul.matmul_reduce_scatter`, of the product.
        n: the devices on the axis; or on each, where it takes several.
        itemsize: bytes of a number. Numbers are not divided: an array whose size does not divide is padded.

    Raises:
        ValueError: there is no formula for `collective`, or `nbytes` is no multiple of `itemsize`.
    """
    return total(rounds(collective, nbytes, n, itemsize=itemsize))


def of_leaves(collective: Callable, sizes: Iterable[int], n: Sizes, *, itemsize: int = 4) -> Cost:
    """What a tree with leaves (or buckets) of `sizes` bytes costs, one leaf after another. Errors as in `of`."""
    return total([round for nbytes in sizes for round in rounds(collective, nbytes, n, itemsize=itemsize)])


def rounds(collective: Callable, nbytes: int, n: Sizes, *, itemsize: int = 4) -> list[Round]:
    """The rounds of a call of `collective`, with the arguments and errors of `of`."""
    function, options = collective, {}
    while isinstance(function, functools.partial):
        function, options = function.func, function.keywords | options
    options = {name: value for name, value in options.items() if name != "axis_name"}
    if function not in FORMULAS:
        known = ", ".join(f"{f.__module__.rpartition('.')[2]}.{f.__name__}" for f in FORMULAS)
        raise ValueError(f"cost.of needs a function that it has a formula for; got {function}. Take one of: {known}.")
    if nbytes % itemsize:
        raise ValueError(f"cost.of: {nbytes} bytes are no whole number of items of {itemsize} bytes. Pass itemsize=...")
    found = FORMULAS[function](nbytes // itemsize, n, itemsize, **options)
    # XLA drops a message without a byte, and a loop without a turn.
    found = [round._replace(messages=tuple(m for m in round.messages if m.bytes)) for round in found]
    return [round for round in found if round.times and round.messages]


def total(rounds: Sequence[Round]) -> Cost:
    """The rounds, one after another, as one cost."""
    return Cost(
        hops=sum(round.times for round in rounds),
        bytes=sum(round.times * max(m.bytes for m in round.messages) for round in rounds),
        sent=sum(round.times * m.bytes for round in rounds for m in round.messages),
        messages=sum(round.times * len(round.messages) for round in rounds),
        reduced=sum(round.times * round.reduced for round in rounds),
        chain=sum(round.times if round.waits is None else round.waits for round in rounds),
    )


def terms(cost: Cost, one_port: bool) -> tuple[int, int, int, int]:
    """What alpha, beta, gamma, start multiply: hops, bytes, reduced, 1; through one port, messages, sent, reduced, 1."""
    return (cost.messages, cost.sent, cost.reduced, 1) if one_port else (cost.hops, cost.bytes, cost.reduced, 1)


def seconds(cost: Cost, link: Link) -> float:
    """The seconds: start + alpha hops + beta bytes + gamma reduced; through one port, alpha messages and beta bytes sent."""
    return sum(rate * count for rate, count in zip(link, terms(cost, link.one_port), strict=False))


def exact(n: Sizes) -> list[Callable]:
    """Every all-reduce that adds without rounding off, for one axis of n devices, or for several."""
    found = [ring.all_reduce, bidirectional.all_reduce, halving.all_reduce, doubling.all_reduce]
    found += [torus.all_reduce] if isinstance(n, tuple) and len(n) > 1 else []
    return found + ([torus.hierarchical_all_reduce] if isinstance(n, tuple) and len(n) == 2 else [])


def fastest(nbytes: int, n: Sizes, link: Link, *, among: Sequence[Callable] | None = None, itemsize: int = 4) -> Callable:
    """The all-reduce of an array of `nbytes` that takes the fewest seconds by the formulas; of equals, the first.

    Args:
        nbytes: of the array on each device.
        n: the devices on the axis, or on each of several.
        link: of that axis.
        among: the functions to choose from; `exact(n)` by default.
        itemsize: bytes of a number.

    Raises:
        ValueError: as `of` does.
    """
    among = exact(n) if among is None else among
    return min(among, key=lambda f: seconds(of(f, nbytes, n, itemsize=itemsize), link))


def _ring_scatter(size, n, itemsize):
    block = _block(size, n) * itemsize
    return [Round(_devices(n) - 1, (Message(block),), block)]


def _ring_gather(size, n, itemsize):
    return [Round(_devices(n) - 1, (Message(size * itemsize),))]


def _two_rings_scatter(size, n, itemsize):
    block = _block(size, n)
    return [Round(_devices(n) - 1, _both_ways(block, itemsize), block * itemsize)]


def _two_rings_gather(size, n, itemsize):
    return [Round(_devices(n) - 1, _both_ways(size, itemsize))]


def _both_ways(size, itemsize):
    return Message(-(-size // 2) * itemsize), Message(size // 2 * itemsize, distance=-1)


def _halving(size, n, itemsize):
    """From all n blocks to one; in each hop the farther half (rounded down) goes as far as the nearer half is long."""
    kept, block, found = _devices(n), _block(size, n) * itemsize, []
    took = [0] * kept  # hops behind the partial sum of each block
    while kept > 1:
        kept, gone = -(-kept // 2), kept // 2
        longest, brought = max(took), 1 + max(took[kept:])
        took = [max(hops, brought) for hops in took[:gone]] + took[gone:kept]
        waits = max(took) - longest
        found.append(Round(1, (Message(gone * block, distance=kept),), gone * block, waits))
    return found


def _doubling_gather(size, n, itemsize):
    back = lambda round: round._replace(messages=tuple(m._replace(distance=-m.distance) for m in round.messages), reduced=0)
    return [back(round) for round in reversed(_halving(size * _devices(n), n, itemsize))]


def _doubling(size, n, itemsize):
    """All of it, with the device 1, 2, 4 .. away; those beyond a power of two fold in before, and are told after."""
    hops, whole = _devices(n).bit_length() - 1, size * itemsize
    folded = _devices(n) > 2**hops
    fold, tell = Round(1, (Message(whole, -(2**hops)),), whole), Round(1, (Message(whole, 2**hops),))
    exchange = [Round(1, (Message(whole, 2**k),), whole) for k in range(hops)]
    return [fold, *exchange, tell] if folded else exchange


def _torus_scatter(size, n, itemsize):
    """One part of each block an axis; part k goes through the axes from the k-th on, all parts at the same time."""
    n = _axes(n)
    block = _block(size, n)
    parts = [block // len(n) + (k < block % len(n)) for k in range(len(n))]
    found, took = [], [0] * len(n)  # hops of each part
    for turn in range(len(n)):
        walks = []
        for k, part in enumerate(parts):
            axis, *left = [(k + later) % len(n) for later in range(turn, len(n))]
            walks.append((n[axis], Message(part * math.prod(n[other] for other in left) * itemsize, axis=axis)))
        for before, last in itertools.pairwise([1, *sorted({length for length, _ in walks})]):  # the longer walk on alone
            going = [length >= last and message.bytes > 0 for length, message in walks]
            messages = tuple(message for length, message in walks if length >= last)
            longest, took = max(took), [hops + (last - before) * goes for hops, goes in zip(took, going, strict=True)]
            found.append(Round(last - before, messages, sum(message.bytes for message in messages), max(took) - longest))
    return found


def _torus_gather(size, n, itemsize):
    return [round._replace(reduced=0) for round in reversed(_torus_scatter(size * _devices(n), n, itemsize))]


def _hierarchical(size, n, itemsize, *, all_reduce=ring.all_reduce):
    """Scattered over the fast axis, reduced over the slow one, gathered over the fast one."""
    slow, fast = n
    on_fast = lambda round: round._replace(messages=tuple(m._replace(axis=1) for m in round.messages))
    block = _block(size, fast)
    between = rounds(all_reduce, block * itemsize, slow, itemsize=itemsize)
    return [*map(on_fast, _ring_scatter(size, fast, itemsize)), *between, *map(on_fast, _ring_gather(block, fast, itemsize))]


def _direct(message, n, reduced=0):
    """Block k straight to the device k further on, for each k: none waits for another."""
    return [Round(1, (Message(message, distance=k),), reduced, int(k == 1)) for k in range(1, _devices(n))]


def _quantized_scatter(size, n, itemsize, block_size):
    part = _block(size, n)
    return _direct(_quantized_bytes(part, itemsize, block_size), n, part * max(itemsize, 4))


def _quantized_gather(size, n, itemsize, block_size):
    return [Round(_devices(n) - 1, (Message(_quantized_bytes(size, itemsize, block_size)),))]


def _from_a_block_on(quantized_, exact):
    """An array of fewer numbers than a block goes exactly."""

    def formula(size, n, itemsize, *, block_size=quantized.BLOCK):
        return exact(size, n, itemsize) if size < block_size else quantized_(size, n, itemsize, block_size)

    return formula


def _quantized_bytes(size, itemsize, block_size):
    """`size` numbers as int8, and an exponent a block: of one byte, of float64 two."""
    return size + -(-size // block_size) * (2 if itemsize == 8 else 1)


def _from_both_sides(block, n, reduced=0):
    """Whole blocks from both neighbours at once; the device opposite is reached from one side."""
    n = _devices(n)
    both, one = (Message(block), Message(block, distance=-1)), (Message(block),)
    return [Round((n - 1) // 2, both, 2 * reduced), Round((n - 1) % 2, one, reduced)]


def _reduced_from_both_sides(size, n, itemsize):
    block = _block(size, n) * itemsize
    return _from_both_sides(block, n, block)


def _then(scatter, gather):
    """An all-reduce: each block of the padded array is reduced on one device, and gathered."""
    return lambda size, n, itemsize, *options: [
        *scatter(size, n, itemsize, *options),
        *gather(_block(size, n), n, itemsize, *options),
    ]


def _block(size, n):
    return -(-size // _devices(n))


def _axes(n):
    return n if isinstance(n, tuple) else (n,)


def _devices(n):
    return math.prod(_axes(n))


FORMULAS: dict[Callable, Callable[..., list[Round]]] = {
    ring.send_next: lambda size, n, itemsize, distance=1: [Round(1, (Message(size * itemsize, distance),))],
    ring.reduce_scatter: _ring_scatter,
    ring.all_gather: _ring_gather,
    ring.all_reduce: _then(_ring_scatter, _ring_gather),
    ring.all_mean: _then(_ring_scatter, _ring_gather),
    ring.all_to_all: lambda size, n, itemsize: _direct(_block(size, n) * itemsize, n),
    bidirectional.reduce_scatter: _two_rings_scatter,
    bidirectional.all_gather: _two_rings_gather,
    bidirectional.all_reduce: _then(_two_rings_scatter, _two_rings_gather),
    halving.reduce_scatter: _halving,
    halving.all_gather: _doubling_gather,
    halving.all_reduce: _then(_halving, _doubling_gather),
    doubling.all_reduce: _doubling,
    torus.reduce_scatter: _torus_scatter,
    torus.all_gather: _torus_gather,
    torus.all_reduce: _then(_torus_scatter, _torus_gather),
    torus.hierarchical_all_reduce: _hierarchical,
    quantized.reduce_scatter: _from_a_block_on(_quantized_scatter, _ring_scatter),
    quantized.all_gather: _from_a_block_on(_quantized_gather, _ring_gather),
    quantized.all_reduce: _from_a_block_on(_then(_quantized_scatter, _quantized_gather), _then(_ring_scatter, _ring_gather)),
    matmul.all_gather_matmul: lambda size, n, itemsize: _from_both_sides(size * itemsize, n),
    matmul.matmul_reduce_scatter: _reduced_from_both_sides,
}
