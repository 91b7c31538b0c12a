"""Makes an all-reduce, a reduce-scatter and an all-gather from a table of messages. The three
functions replace those of `jax.lax`. Each has a gradient, and a cost computed from the table.

    @algorithm
    def direct(n):
        return Route((n,), [{k: [k]} for k in range(1, n)])

    direct.all_reduce(x, "data")                        # for lax.psum(x, "data")

A table is a `Route`. Its first argument is the shape of the grid that the devices form, here `(n,)`
for a row of n devices. Its second argument is a list of rounds, each a dict {step: offsets}. In a
reduce-scatter, for each o in `offsets`, device i sends to device i + step the block that belongs to
device i + o. Device numbers are modulo n. Several tables may run side by side. Then each table
carries its own *share* of every block.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from jax import lax

from parallax._typing import PyTree
from parallax.collectives import drop_in
from parallax.collectives.axis import Algorithm, Collective
from parallax.collectives.cost import Message, Round, devices, priced
from parallax.collectives.execute import leaf_by_leaf, pieces_of
from parallax.collectives.route import Route, Tables
from parallax.collectives.tiling import (
    all_gather_array,
    all_reduce_array,
    reduce_scatter_array,
    shares_of,
)
from parallax.collectives.types import axes, axis_size, check_summand, linear_collective

Tree = TypeVar("Tree", bound=PyTree)


def algorithm(
    maker: Callable[[int], Tables], *, name: str = "", all_to_all: Collective = lax.all_to_all
) -> Algorithm:
    """Returns the algorithm that has the table `maker(n)` for n devices; usable as a decorator.

    ```python
    @collectives.algorithm
    def all_at_once(n):
        return collectives.Route((n,), [{k: [k] for k in range(1, n)}])

    total = all_at_once.all_reduce(gradients, "data")
    ```

    The functions of the algorithm work like `lax.psum`, `lax.psum_scatter` and `lax.all_gather`: on
    trees of any dtype and shape, with the same derivatives and the same replication types (varying
    or invariant along the axis). The functions work along one axis or several. In a reduce-scatter
    by any table, a device sends each block except its own exactly once: n - 1 blocks. An all-gather
    sends n - 1 blocks per device too, and an all-reduce 2 (n - 1). For an input of S bytes on each
    device, these are (n - 1)/n S bytes per device in a reduce-scatter, (n - 1) S in an all-gather,
    and 2 (n - 1)/n S in an all-reduce. An all-reduce pads an array that cannot be cut into n equal
    blocks. The transpose of an all-reduce sends nothing.

    The functions raise `ValueError` if the code runs in no `shard_map` over the axis. The
    reduce-scatter also raises `ValueError` if a leaf lacks the dim `scatter_dimension`, or if this
    dim cannot be cut into n blocks. The all-gather also raises `ValueError` if a leaf lacks the dim
    `axis`.

    Args:
        maker: returns the `Route` for n devices, or a tuple of routes that run side by side, each
            with a share of every block.
        name: the name in errors and reports; by default the name of `maker`.
        all_to_all: the all-to-all of the algorithm; by default that of `lax`.
    """
    name = name or maker.__name__
    # Several axes count as one row of devices. `maker` itself is passed too: the algorithm keeps it
    # as its attribute `table`.
    return _from_tables(maker, lambda sizes: maker(math.prod(sizes)), name, all_to_all)


def algorithm_of_axes(maker: Callable[..., Tables], *, name: str = "") -> Algorithm:
    """Returns the algorithm that has the table `maker(*sizes)` for axes of these sizes; usable as a
    decorator. For axes of 2 and 4 devices, this algorithm calls `maker(2, 4)`; an algorithm that is
    made by the function `algorithm` calls `maker(8)`.
    """
    name = name or maker.__name__
    # The algorithm keeps `maker` itself as its attribute `table`. The tables give no all-to-all, so
    # the algorithm has that of `lax`.
    return _from_tables(maker, lambda sizes: maker(*sizes), name, lax.all_to_all)


def _from_tables(maker, tables_for, name: str, all_to_all: Collective) -> Algorithm:
    """Returns the algorithm that runs `tables_for(sizes)`.

    `sizes` has the number of devices on each axis. `maker` is not called here: it becomes the
    attribute `table` of the algorithm. The tables give no all-to-all, since they add or copy blocks
    on the way; so `all_to_all` is an argument.
    """

    # Cached, since tables are checked when they are made, which takes long for many devices.
    @functools.lru_cache(maxsize=64)
    def tables_of(sizes: tuple[int, ...]) -> tuple[Route, ...]:
        """Returns the tables for these numbers of devices along the axes, as a tuple."""
        tables = tables_for(sizes)
        tables = tables if isinstance(tables, tuple) else (tables,)
        _check_side_by_side(name, tables, math.prod(sizes))
        return tables

    def routes(axis_name):
        return tables_of(tuple(map(axis_size, axes(axis_name))))

    def scatter_slices(x, dim, axis_name):
        return reduce_scatter_array(x, dim, routes(axis_name), axis_name)

    def gather_slices(x, dim, axis_name):
        return all_gather_array(x, dim, routes(axis_name), axis_name)

    # The pair of functions that scatter and gather one array by the algorithm's tables.
    slices = drop_in.Slices(scatter_slices, gather_slices)

    def reduce_scatter(x, axis_name, *, scatter_dimension=0, tiled=False):
        """Returns this device's block of the sum of each array, as `lax.psum_scatter` does."""

        def leaf(x):
            return drop_in.reduce_scatter_leaf(x, axis_name, slices, scatter_dimension, tiled)

        return leaf_by_leaf(leaf, x, axis_name)

    def all_gather(x, axis_name, *, axis=0, tiled=False, to="varying"):
        """Returns all devices' blocks of each array, as `lax.all_gather` does."""

        def leaf(x):
            return drop_in.all_gather_leaf(x, axis_name, slices, axis, tiled, to)

        return leaf_by_leaf(leaf, x, axis_name)

    def all_reduce(x, axis_name):
        """Returns the sum of each array over the devices, as `lax.psum` does."""

        def total(x, axis_name):
            return all_reduce_array(x, routes(axis_name), axis_name)

        return all_reduce_leaves(x, axis_name, total)

    scatter_rounds, gather_rounds, all_reduce_rounds = _prices(tables_of)
    # `priced` gives each function the rounds from which `cost` computes its cost.
    return Algorithm(
        name,
        priced(all_reduce_rounds, f"{name}.all_reduce")(all_reduce),
        priced(scatter_rounds, f"{name}.reduce_scatter")(reduce_scatter),
        priced(gather_rounds, f"{name}.all_gather")(all_gather),
        all_to_all,
        maker,
    )


def _prices(tables_of):
    """Returns three functions for `cost.priced`: for the reduce-scatter, all-gather and all-reduce.

    Each function takes (size, n, itemsize) and returns a list of `Round`s, with the messages that a
    device sends. `size` counts the numbers in one device's input, and `itemsize` is the bytes of
    one number. `n` is a number of devices, or a tuple with the number on each of several axes;
    `devices(n)` is the number of all devices. `tables_of(sizes)` gives the tables for `sizes`, the
    number of devices on each axis.
    """

    def rounds(block_size, n, itemsize, *, back):
        """Returns the rounds of messages for blocks of `block_size` numbers.

        An algorithm may have several tables, which run side by side: each carries a share of every
        block. With `back` the rounds are those of a gather: the tables run backwards, and the
        devices add no numbers.
        """
        tables = tables_of(n if isinstance(n, tuple) else (n,))
        shares = shares_of(block_size, len(tables))  # (start, length) for each table
        nbytes = [itemsize * length for _, length in shares if length]
        # A block of fewer numbers than tables leaves nothing for the last tables.
        return messages(tables[: len(nbytes)], nbytes, back=back, added=None if back else nbytes)

    # A scatter cuts `size` numbers into n blocks, rounded up; a gather takes a block of `size`
    # numbers.
    def scatter(size, n, itemsize):
        return rounds(-(-size // devices(n)), n, itemsize, back=False)

    def gather(size, n, itemsize):
        return rounds(size, n, itemsize, back=True)

    def scatter_and_gather(size, n, itemsize):
        return scatter(size, n, itemsize) + gather(-(-size // devices(n)), n, itemsize)

    return scatter, gather, scatter_and_gather


def _check_side_by_side(name: str, tables: Sequence[Route], n: int) -> None:
    """Raises `ValueError` unless all tables have n devices, and as many rounds as the first table.

    Tables that run side by side send the messages of their k-th rounds at the same time.
    """
    rounds = len(tables[0].rounds)
    for table in tables:
        if table.n != n or len(table.rounds) != rounds:
            raise ValueError(
                f"{name}: all tables that run side by side need {n} devices and {rounds} rounds, "
                f"like the first table; one has {table.n} devices and {len(table.rounds)} "
                "rounds. For each round that a table lacks, append an empty dict to its rounds."
            )


def messages(
    routes: Sequence[Route],
    nbytes: Sequence[int],
    *,
    back: bool = False,
    added: Sequence[int] | None = None,
) -> list[Round]:
    """Returns a list of `cost.Round`s: the messages that a device sends in each round, by all
    tables in `routes` together.

    Args:
        routes: the tables.
        nbytes: for each table, the bytes of a block.
        back: whether the rounds are those of a gather, for which the tables run backwards.
        added: for each table, the bytes of the sum that a device computes when a block arrives: the
            block plus the device's own term. By default a device computes no sums.
    """
    # After each round: the length of the longest chain of messages so far, in any table, in which
    # each message waits for the one before.
    longest = [0, *map(max, zip(*(route.hops(back=back) for route in routes), strict=True))]
    sends_by_round = list(zip(*(route.rounds for route in routes), strict=True))
    rounds = []
    for number, sends_of_tables in enumerate(reversed(sends_by_round) if back else sends_by_round):
        in_round, reduced = [], 0
        for table, sends in enumerate(sends_of_tables):
            for step, offsets in sends.items():
                count = len(offsets)
                distance = tuple(-s for s in step) if back else step
                # The permutes that send this message: one for each block if blocks are large.
                pieces = pieces_of(count, nbytes[table])
                in_round.append(Message(nbytes[table] * count, distance, pieces))
                reduced += added[table] * count if added else 0
        # A round waits if it makes the number in `longest` larger. Any other round adds no hop to a
        # program that sends each message as soon as its blocks have arrived.
        waits = longest[number + 1] > longest[number]
        rounds.append(Round(times=1, messages=tuple(in_round), reduced=reduced, waits=waits))
    return rounds


# The transpose of an all-reduce.
def _unchanged(cotangent):
    return cotangent


def all_reduce_leaves(x: Tree, axis_name, total: Callable[..., Any]) -> Tree:
    """Returns `lax.psum` of the tree `x`, computed leaf by leaf by `total(leaf, axis_name)`.

    `total` gets an array that varies along the axis, and must return the same bits on every device.
    The transpose sends nothing: the result is the same on all devices, so its cotangent is the same
    on all devices too, and the transpose returns the cotangent unchanged.
    """

    def leaf(x):
        """Returns the sum of one array over the devices, computed by `total` and typed as
        invariant."""
        # `check_summand` casts `x` to vary along the axis, unless `x` is unreduced there. An
        # unreduced `x` is cast by `linear_collective`, so `total` gets this device's term. Booleans
        # are counted. Random keys, and replication types that `lax` refuses, raise an error.
        x = check_summand("all_reduce", drop_in.summable(x), axis_name)
        if not axes(axis_name):  # no axis, so one device: the sum is `x`
            return x

        def forward(x):
            return total(x, axis_name)

        # `linear_collective` computes `forward(x)`, with `backward` as its transpose, and declares
        # the result to be the same on all devices. JAX's own transpose would go through the hops of
        # `total`.
        return linear_collective(x, axis_name, forward=forward, backward=_unchanged, to="invarying")

    return leaf_by_leaf(leaf, x, axis_name)
