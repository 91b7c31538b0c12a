"""The tables of the collectives. A function of a few lines makes a table for n devices, and
`algorithm` turns that function into a collective algorithm.

`ring.table(8)` is the table of a ring of 8 devices, and `ring.all_reduce(x, "data")` runs it. A
table is a `Route` with a list of rounds. A round is {step: offsets}: in a reduce-scatter, for each
o in `offsets`, device i sends to device i + step the block that belongs to device i + o. The
devices form a *box* (a grid), such as 2 machines x 8 devices. `product(tables, order)` joins
several tables into one table. Each of the tables has its own dims of the box, and sends along these
dims only. The joined table has the rounds of all tables: table after table, in the order that
`order` gives.

The list below is for n devices; a torus has k axes, which have a, b .. devices. A *message* is the
data that a device sends to another in one transfer.

| algorithm | messages of a reduce-scatter | one after another | blocks that a device sends |
|---|---|---|---|
| `ring` | n - 1 | n - 1 | n - 1 |
| `two_rings` | 2 (n - 1), halves of blocks | n - 1 | n - 1 |
| `direct` | n - 1 | 1 | n - 1 |
| `halving` | ceil(log2 n) | ceil(log2 n) | n - 1 |
| `halving_by(4)` | about 3 ceil(log4 n) | ceil(log4 n) | n - 1 |
| `pairs` (n a power of 2) | log2 n | log2 n | n - 1 |
| `machines(g)` | g - 1 inside, n/g - 1 between machines | n/g + g - 2 | n - 1 (n/g - 1 leave) |
| `torus` on a x b .. | k (a + b .. - k), of 1/k block | k (max(a, b ..) - 1) | n - 1 |

A block has 1/n of the bytes of the array that n devices sum. An all-gather sends the same messages
backwards, and an all-reduce is a reduce-scatter and then an all-gather. Blocks of more than
`execute.JOINED` bytes are sent as one permute each, since it would take longer to join them.

Sources: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms (2009), for the ring; Chan et
al., Collective communication: theory, practice, and experience (2007), for `two_rings`; Bruck et
al., Efficient algorithms for all-to-all communications (1997) and Träff, Optimal, non-pipelined
reduce-scatter and allreduce algorithms (2024), for halving by offsets; Thakur, Rabenseifner and
Gropp, Optimization of collective communication operations in MPICH (2005), for pairs; Jain and
Sabharwal, Optimal bucket algorithms for large MPI collectives on torus interconnects (2010).
"""

import functools
import itertools
from collections.abc import Sequence

from parallax.collectives.all_to_all import all_to_all, straight
from parallax.collectives.axis import Algorithm
from parallax.collectives.from_table import algorithm, algorithm_of_axes
from parallax.collectives.route import Point, Route


# A table gives no all-to-all. `ring` and `direct` have the one of this package, and the other
# algorithms that of `lax`.
@functools.partial(algorithm, all_to_all=all_to_all)
def ring(n: int) -> Route:
    """In each round a device sends one block to its right neighbour. (`ring.all_to_all` does
    not use this table: it sends each block straight to its new device.)

    After the first round the block that is sent is the one that just arrived. If there are many
    devices, `execute` runs such rounds, which pass on the block that just arrived, as a loop. So
    the program does not grow with the number of devices.
    """
    return Route((n,), [{1: [n - h]} for h in range(1, n)])


@algorithm
def two_rings(n: int) -> tuple[Route, Route]:
    """Two rings run in opposite directions, each with half of every block: links carry data both
    ways."""
    return ring.table(n), Route((n,), [{-1: [h]} for h in range(1, n)])


direct = algorithm(straight, name="direct", all_to_all=all_to_all)


@algorithm
def halving(n: int, by: int = 2) -> Route:
    """In each round a device keeps 1/`by` of the blocks that it still has, and sends the rest.

    Before the first round, a device has one block for each device. In a round it keeps its own
    block and the blocks that belong to the nearest devices after it. It sends all other blocks, in
    at most `by` - 1 messages. The receiver adds each of these blocks to a block that the receiver
    keeps. With by=2 a device sends one message in each round. For every n, `halving` with by=2
    takes the fewest rounds that are possible with one message per device and round.
    """
    rounds, remaining = [], n
    while remaining > 1:
        # Rounded up: the offsets from `near` on are sent, and land on the offsets below `near`. A
        # message with the step `far` has the offsets from `far` on.
        near = -(-remaining // by)
        distances = range(near, remaining, near)
        rounds.append({far: range(far, min(far + near, remaining)) for far in distances})
        remaining = near
    return Route((n,), rounds)


@functools.cache  # equal calls return one algorithm, since `combined_axis` compares algorithms
def halving_by(by: int) -> Algorithm:
    """Returns an algorithm like `halving`, in which a device keeps 1/`by` of its blocks in a round.

    With by=4 a round has three messages, and there are half as many rounds as with by=2. Raises
    `ValueError` for `by` below 2, with which a device would keep all blocks.
    """
    if by < 2:
        raise ValueError(f"halving_by needs a number of 2 or more; got {by}. Use halving_by(2).")
    return algorithm(functools.partial(halving.table, by=by), name=f"halving_by({by})")


@algorithm
def pairs(n: int) -> Route:
    """Recursive halving for powers of two: in each round, partners swap half of their blocks.

    Partners are devices whose numbers differ in one bit: the highest bit in the first round, and
    the next lower bit in each later round.

    Raises:
        ValueError: the number of devices is no power of two.
    """
    if n & (n - 1):
        raise ValueError(
            f"pairs: the number of devices must be a power of two; got {n}. Use `halving`, "
            "which takes any number of devices."
        )
    dims = max(n.bit_length() - 1, 1)
    # A ring of two devices along each dim of a box 2 x 2 x ...; one device has one dim of size 1.
    return product([ring.table(min(n, 2))] * dims, range(dims))


@functools.cache  # equal calls return one algorithm, since `combined_axis` compares algorithms
def machines(g: int, between: Algorithm = ring) -> Algorithm:
    """Returns an algorithm: a ring inside each machine of `g` devices, then the algorithm `between`
    over the machines.

    With n devices in machines of `g`, each device sends n/g - 1 blocks to other machines. In a ring
    over all devices, (n - 1)/g blocks per device, on average, would leave the machine. If there are
    many machines, `between=halving` needs fewer rounds. The functions of the algorithm raise
    `ValueError` if g does not divide n, or if `between` has several tables, as `two_rings` has.
    """

    def table(n: int) -> Route:
        """Returns the table for n devices, which form a grid of n/g machines x g devices."""
        if n % g:
            raise ValueError(
                f"machines({g}) needs a multiple of {g} devices; got {n}. Use machines of a size "
                "that divides the number of devices."
            )
        # The order (1, 0): first the ring inside a machine, then between machines.
        return product([_one_table(between, n // g), ring.table(g)], (1, 0))

    name = f"machines({g})" if between is ring else f"machines({g}, {between.name})"
    return algorithm(table, name=name)


def _one_table(of: Algorithm, n: int) -> Route:
    """Returns the table of an algorithm for n devices. Raises `ValueError` if it has several."""
    table = of.table(n)
    if isinstance(table, Route):
        return table
    raise ValueError(
        f"machines needs an algorithm with one table between machines; {of.name} has {len(table)}, "
        "which run side by side. Use between=halving, or leave it out."
    )


@algorithm_of_axes
def hierarchical(*sizes: int) -> Route:
    """Runs a ring along the last axis, then a ring along the axis before it, and so on.

    `sizes` are the numbers of devices on the axes. The last axis should have the fastest links,
    such as those inside a machine. The reduce-scatter along the last axis leaves fewer bytes for
    the slower axes.
    """
    return product(list(map(ring.table, sizes)), range(len(sizes))[::-1])


@algorithm_of_axes
def torus(*sizes: int) -> tuple[Route, ...]:
    """All axes carry data at once: part k of each block goes round the ring of axis k first, then
    round the rings of the other axes.

    `sizes` are the numbers of devices on the axes. The tables returned, one for each part, run side
    by side.
    """
    longest, axes = max(sizes), range(len(sizes))
    # Shorter rings get empty rounds, so that all parts change to their next axis together, and no
    # two parts use the links of one axis at the same time.
    rings = [Route((n,), [*ring.table(n).rounds, *[{}] * (longest - n)]) for n in sizes]
    # `product` returns one table that runs the rings one after another, in the order given.
    return tuple(product(rings, [*axes[k:], *axes[:k]]) for k in axes)


def product(routes: Sequence[Route], order: Sequence[int]) -> Route:
    """Returns one table that runs `routes` one after another, in the order that `order` gives.

    The devices of a route form a box (a grid). The box of the joined table has the dims of the
    first route's box, then those of the second route's box, and so on. `order` lists indices of
    `routes`.

    The block at offset o on device i belongs to device i + o. Where a route sends the block at
    offset o, the joined table sends all blocks whose offset along this route's dims is o. Along the
    dims of routes that ran earlier, the offset of these blocks is 0. Along the dims of routes that
    run later, every offset occurs.
    """
    rounds = []
    for turn, k in enumerate(order):
        # For each route, the offsets that blocks still have along the route's box: only `home`,
        # offset 0, if the route ran already.
        spans = []
        for i, route in enumerate(routes):
            spans.append([route.home] if i in order[:turn] else route.points())
        # A step moves along the box of route k only.
        homes = [[route.home] for route in routes]
        # A message carries all blocks that differ only along the boxes of routes that run later.
        for sends in routes[k].rounds:
            messages = {}
            for step, offsets in sends.items():
                # `_points_at` joins o, for route k, with the offsets in `spans` of other routes.
                blocks = [point for o in offsets for point in _points_at(spans, k, o)]
                # With `homes` there is one point: the step for route k, 0 for all other routes.
                messages[_points_at(homes, k, step)[0]] = blocks
            rounds.append(messages)
    return Route(sum((route.shape for route in routes), ()), rounds)


def _points_at(spans: Sequence[Sequence[Point]], k: int, point: Point) -> list[Point]:
    """Returns all tuples that join one point of each route, in the order of the routes: `point` for
    route `k`, and any point in `spans[i]` for each other route i."""
    return [sum(parts, ()) for parts in itertools.product(*spans[:k], [point], *spans[k + 1 :])]
