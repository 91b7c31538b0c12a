"""The tables of the collectives, each a maker of a few lines, and an algorithm: `ring.table(8)`, `ring.all_reduce(x, "data")`.

n devices, S the bytes of the array on one device; a *message* is what a device sends to one other at once:

| algorithm | messages of a reduce-scatter | one after another | blocks of S/n that a device sends |
|---|---|---|---|
| `ring` | n - 1 | n - 1 | n - 1 |
| `two_rings` | 2 (n - 1), halves of blocks | n - 1 | n - 1 |
| `direct` | n - 1 | 1 | n - 1 |
| `halving` | ceil(log2 n) | ceil(log2 n) | n - 1 |
| `halving_by(4)` | some 3 ceil(log4 n) | ceil(log4 n) | n - 1 |
| `pairs` (n a power of 2) | log2 n | log2 n | n - 1 |
| `machines(g)` | g - 1 within machines of g, n/g - 1 between them | n/g + g - 2 | n - 1, of which n/g - 1 cross a border |
| `torus` on a x b .. | k (a + b .. - k) of 1/k of a block each | k (max(a, b ..) - 1) | n - 1 |

An all-gather sends the same backwards, and an all-reduce is one after the other. A message of several blocks of more than
`execute.JOINED` bytes is sent as one permute a block, side by side: joining them would take longer.

Sources: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms (2009), for the ring; Chan et al., Collective communication:
theory, practice, and experience (2007), for two; Bruck et al., Efficient algorithms for all-to-all communications (1997) and
Träff, Optimal, non-pipelined reduce-scatter and allreduce algorithms (2024), for halving by offsets; Thakur, Rabenseifner and
Gropp, Optimization of collective communication operations in MPICH (2005), for pairs; Jain and Sabharwal, Optimal bucket
algorithms for large MPI collectives on torus interconnects (2010).
"""

import functools
import itertools
from collections.abc import Sequence

from parallax.collectives.axis import Algorithm
from parallax.collectives.exchange import all_to_all, straight
from parallax.collectives.from_table import algorithm, algorithm_of_axes
from parallax.collectives.route import Point, Route


@functools.partial(algorithm, all_to_all=all_to_all)
def ring(n: int) -> Route:
    """In each round a device hands one block to its right neighbour: a chain, so its program does not grow with n."""
    return Route((n,), [{1: [n - h]} for h in range(1, n)])


@algorithm
def two_rings(n: int) -> tuple[Route, Route]:
    """Two rings in opposite directions at once, each for half of every block: links carry both ways at the same time."""
    return ring.table(n), Route((n,), [{-1: [h]} for h in range(1, n)])


direct = algorithm(straight, name="direct", all_to_all=all_to_all)


@algorithm
def halving(n: int, by: int = 2) -> Route:
    """A device keeps the nearest 1/`by` of its blocks, rounded up, and sends the others as far as the kept ones reach.

    In each round `by` - 1 messages; by=2 has the fewest hops that one message a round can have, for any n.
    """
    rounds, kept = [], n
    while kept > 1:
        near = -(-kept // by)
        rounds.append({far: range(far, min(far + near, kept)) for far in range(near, kept, near)})
        kept = near
    return Route((n,), rounds)


@functools.cache
def halving_by(by: int) -> Algorithm:
    """`halving` by another number than 2: by 4, three messages a round and half the rounds."""
    return algorithm(functools.partial(halving.table, by=by), name=f"halving_by({by})")


@algorithm
def pairs(n: int) -> Route:
    """Recursive halving, for powers of two: in round i a device exchanges half of its blocks with the one across dim i.

    Raises:
        ValueError: n is no power of two.
    """
    if n & (n - 1):
        raise ValueError(
            f"pairs needs a power of two devices; got {n}. Take halving, which has as many rounds for any number."
        )
    dims = max(n.bit_length() - 1, 1)
    return product([ring.table(min(n, 2))] * dims, range(dims))


@functools.cache
def machines(g: int, between: Algorithm = ring) -> Algorithm:
    """Machines of `g` devices: a ring inside each, then `between` them a ring, or another algorithm of one axis.

    n/g - 1 blocks of each device cross a border; a ring through all lets (n - 1)/g cross. With `halving` between many machines,
    the rounds are few. Its functions raise `ValueError` unless g divides n.
    """

    def table(n: int) -> Route:
        if n % g:
            raise ValueError(
                f"machines({g}) needs a multiple of {g} devices; got {n}. Take machines of a size that divides it."
            )
        return product([between.table(n // g), ring.table(g)], (1, 0))

    return algorithm(
        table, name=f"machines({g})" if between is ring else f"machines({g}, {between.name})"
    )


@algorithm_of_axes
def hierarchical(*sizes: int) -> Route:
    """As `machines`, which are the places on the first axis: a ring along the last axis, then along the one before."""
    return product(list(map(ring.table, sizes)), range(len(sizes))[::-1])


@algorithm_of_axes
def torus(*sizes: int) -> tuple[Route, ...]:
    """Every axis carries its share at the same time: part k goes round axis k, then the next ones; all change axes together."""
    longest, axes = max(sizes), range(len(sizes))
    rings = [Route((n,), [*ring.table(n).rounds, *[{}] * (longest - n)]) for n in sizes]
    return tuple(product(rings, [*axes[k:], *axes[:k]]) for k in axes)


def product(routes: Sequence[Route], order: Sequence[int]) -> Route:
    """Routes one after another, in this `order`, over the box of all their boxes: bundles of blocks, which grow shorter.

    A bundle holds a block for each offset along the boxes of those that are still to come.
    """
    rounds = []
    for turn, k in enumerate(order):
        spans = [
            [route.home] if i in order[:turn] else route.points() for i, route in enumerate(routes)
        ]
        still = [[route.home] for route in routes]
        for sends in routes[k].rounds:
            bundles = {
                step: [point for o in offsets for point in _within(spans, k, o)]
                for step, offsets in sends.items()
            }
            rounds.append({_within(still, k, step)[0]: points for step, points in bundles.items()})
    return Route(sum((route.shape for route in routes), ()), rounds)


def _within(spans: Sequence[Sequence[Point]], k: int, point: Point) -> list[Point]:
    """The points of the product of `spans`, of which the k-th is the one `point`."""
    return [sum(parts, ()) for parts in itertools.product(*spans[:k], [point], *spans[k + 1 :])]
