"""The messages of each collective as formulas: whole numbers, padding included, for any number of devices."""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from jax import lax

from parallax.collectives import int8, matmul
from parallax.collectives.axis import Mover
from parallax.collectives.bidirectional import two_rings
from parallax.collectives.int8 import quantized
from parallax.collectives.recursive_doubling import doubling
from parallax.collectives.recursive_halving import halving
from parallax.collectives.rings import ring, send_next
from parallax.collectives.several_axes import hierarchical, torus

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


def rounds(collective: Callable[..., Any], nbytes: int, n: Sizes, *, itemsize: int = 4) -> list[Round]:
    """The rounds of a call of `collective`, with the arguments and errors of `of`."""
    function, options = collective, {}
    while isinstance(function, functools.partial):
        function, options = function.func, function.keywords | options
    options = {name: value for name, value in options.items() if name != "axis_name"}
    if function not in FORMULAS:
        known = ", ".join(spelt(f) for f in FORMULAS)
        raise ValueError(f"cost.of needs a function that it has a formula for; got {function}. Take one of: {known}.")
    if nbytes % itemsize:
        raise ValueError(f"cost.of: {nbytes} bytes are no whole number of items of {itemsize} bytes. Pass itemsize=...")
    found = FORMULAS[function](nbytes // itemsize, n, itemsize, **options)
    # XLA drops a message without a byte, and a loop without a turn.
    found = [round._replace(messages=tuple(m for m in round.messages if m.bytes)) for round in found]
    return [round for round in found if round.times and round.messages]


def spelt(collective: Callable[..., Any]) -> str:
    """What a message calls a function: `ring.all_reduce`."""
    if collective in NAMES:
        return NAMES[collective]
    return f"{collective.__module__.rpartition('.')[2]}.{collective.__name__}"


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

    def formula(size, n, itemsize, *, block_size=int8.BLOCK):
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


MOVERS: tuple[Mover, ...] = (ring, two_rings, halving, doubling, torus, hierarchical, quantized)


NAMES: dict[Callable[..., Any], str] = {lax.psum: "lax.psum", send_next: "send_next"} | {
    getattr(mover, what): f"{mover}.{what}"
    for mover in MOVERS
    for what in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "all_mean")
    if what != "all_to_all" or mover is ring
}


FORMULAS: dict[Callable[..., Any], Callable[..., list[Round]]] = {
    send_next: lambda size, n, itemsize, distance=1: [Round(1, (Message(size * itemsize, distance),))],
    ring.reduce_scatter: _ring_scatter,
    ring.all_gather: _ring_gather,
    ring.all_reduce: _then(_ring_scatter, _ring_gather),
    ring.all_mean: _then(_ring_scatter, _ring_gather),
    ring.all_to_all: lambda size, n, itemsize: _direct(_block(size, n) * itemsize, n),
    two_rings.reduce_scatter: _two_rings_scatter,
    two_rings.all_gather: _two_rings_gather,
    two_rings.all_reduce: _then(_two_rings_scatter, _two_rings_gather),
    halving.reduce_scatter: _halving,
    halving.all_gather: _doubling_gather,
    halving.all_reduce: _then(_halving, _doubling_gather),
    doubling.all_reduce: _doubling,
    torus.reduce_scatter: _torus_scatter,
    torus.all_gather: _torus_gather,
    torus.all_reduce: _then(_torus_scatter, _torus_gather),
    hierarchical.all_reduce: _hierarchical,
    quantized.reduce_scatter: _from_a_block_on(_quantized_scatter, _ring_scatter),
    quantized.all_gather: _from_a_block_on(_quantized_gather, _ring_gather),
    quantized.all_reduce: _from_a_block_on(_then(_quantized_scatter, _quantized_gather), _then(_ring_scatter, _ring_gather)),
    matmul.all_gather_matmul: lambda size, n, itemsize: _from_both_sides(size * itemsize, n),
    matmul.matmul_reduce_scatter: _reduced_from_both_sides,
}
