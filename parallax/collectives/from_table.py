"""From a table to the drop-ins for `jax.lax`'s collectives, with their types, gradients and prices.

@algorithm
def direct(n):
    return Route((n,), [{k: [k]} for k in range(1, n)])

direct.all_reduce(x, "data")                        # for lax.psum(x, "data")
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from jax import lax

from parallax._typing import PyTree
from parallax.collectives import drop_in
from parallax.collectives.axis import Algorithm, AllToAll
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
    maker: Callable[[int], Tables], *, name: str = "", all_to_all: AllToAll = lax.all_to_all
) -> Algorithm:
    """The drop-ins of a table for n devices, `maker(n)`, along one axis or several. It decorates a maker too.

    They take and return what `lax.psum`, `lax.psum_scatter` and `lax.all_gather` do: trees of any dtype and shape, replication
    types and derivatives included. Of S bytes a device sends (n - 1)/n S in a reduce-scatter, (n - 1) S in an all-gather, and in
    an all-reduce 2 (n - 1)/n S, S padded to a multiple of n numbers. The transpose of an all-reduce costs nothing. They raise
    `ValueError` where a leaf has no such dim, or one that does not divide, or where the code does not run over the axis.

    Args:
        maker: gives a `Route`, or several of as many devices, side by side, each of which carries a share of every block.
        name: the name in messages; the maker's by default.
        all_to_all: the algorithm's, if it is not `lax`'s.
    """
    return _mover(maker, lambda sizes: maker(math.prod(sizes)), name or maker.__name__, all_to_all)


def algorithm_of_axes(maker: Callable[..., Tables], *, name: str = "") -> Algorithm:
    """As `algorithm`, of a maker that is given the devices on each axis: `maker(2, 4)`."""
    return _mover(maker, lambda sizes: maker(*sizes), name or maker.__name__, lax.all_to_all)


def _mover(maker, tables_for, name: str, all_to_all: AllToAll) -> Algorithm:
    """The drop-ins of `tables_for(sizes)`, the tables for so many devices on each axis."""

    @functools.lru_cache(maxsize=64)
    def tables_of(sizes: tuple[int, ...]) -> tuple[Route, ...]:
        tables = tables_for(sizes)
        tables = tables if isinstance(tables, tuple) else (tables,)
        _check_side_by_side(name, tables, math.prod(sizes))
        return tables

    def routes(axis_name):
        return tables_of(tuple(map(axis_size, axes(axis_name))))

    def reduce_scatter_leaf(x, dim, axis_name):
        return reduce_scatter_array(x, dim, routes(axis_name), axis_name)

    def all_gather_leaf(x, dim, axis_name):
        return all_gather_array(x, dim, routes(axis_name), axis_name)

    slices = drop_in.Slices(scattered=reduce_scatter_leaf, gathered=all_gather_leaf)

    def reduce_scatter(x, axis_name, *, scatter_dimension=0, tiled=False):
        def leaf(x):
            return drop_in.reduce_scatter(x, axis_name, slices, scatter_dimension, tiled)

        return leaf_by_leaf(leaf, x, axis_name)

    def all_gather(x, axis_name, *, axis=0, tiled=False, to="varying"):
        def leaf(x):
            return drop_in.all_gather(x, axis_name, slices, axis, tiled, to)

        return leaf_by_leaf(leaf, x, axis_name)

    def total(x, axis_name):
        return all_reduce_array(x, routes(axis_name), axis_name)

    def all_reduce_leaves(x, axis_name):
        return all_reduce(x, axis_name, total)

    def rounds(numbers, n, itemsize, *, back):
        tables = tables_of(n if isinstance(n, tuple) else (n,))
        nbytes = [itemsize * length for _, length in shares_of(numbers, len(tables)) if length]
        return messages(tables[: len(nbytes)], nbytes, back=back, added=None if back else nbytes)

    def scatter_rounds(size, n, itemsize):
        return rounds(-(-size // devices(n)), n, itemsize, back=False)

    def gather_rounds(size, n, itemsize):
        return rounds(size, n, itemsize, back=True)

    def all_reduce_rounds(size, n, itemsize):
        return scatter_rounds(size, n, itemsize) + gather_rounds(
            -(-size // devices(n)), n, itemsize
        )

    return Algorithm(
        name,
        priced(all_reduce_rounds, f"{name}.all_reduce")(all_reduce_leaves),
        priced(scatter_rounds, f"{name}.reduce_scatter")(reduce_scatter),
        priced(gather_rounds, f"{name}.all_gather")(all_gather),
        all_to_all,
        maker,
    )


def _check_side_by_side(name: str, tables: Sequence[Route], n: int) -> None:
    rounds = len(tables[0].rounds)
    for table in tables:
        if table.n != n or len(table.rounds) != rounds:
            raise ValueError(
                f"{name}: tables side by side need {n} devices and {rounds} rounds each, as the first has; one has {table.n} "
                f"devices and {len(table.rounds)} rounds. Fill up with empty rounds, {{}}."
            )


def messages(
    routes: Sequence[Route],
    nbytes: Sequence[int],
    *,
    back: bool = False,
    added: Sequence[int] | None = None,
) -> list[Round]:
    """What tables side by side send in a scatter, or `back`, round by round.

    Args:
        routes: the tables.
        nbytes: of a block of each.
        back: the gather's messages.
        added: the bytes that each block adds to others; none by default.
    """
    hops = [route.hops(back=back) for route in routes]
    longest = [
        0,
        *map(max, zip(*hops, strict=True)),
    ]  # hops behind the block that took most, after each round
    rounds = list(zip(*(route.rounds for route in routes), strict=True))
    if back:
        rounds.reverse()
    found = []
    for number, sides in enumerate(rounds):
        sends = [
            (p, step, len(offsets))
            for p, sent in enumerate(sides)
            for step, offsets in sent.items()
        ]
        in_round = []
        for p, step, count in sends:
            distance = tuple(-s for s in step) if back else step
            in_round.append(Message(nbytes[p] * count, distance, pieces_of(count, nbytes[p])))
        reduced = sum(added[p] * count for p, _, count in sends) if added else 0
        found.append(Round(1, tuple(in_round), reduced, longest[number + 1] > longest[number]))
    return found


def all_reduce(x: Tree, axis_name, total: Callable[..., Any]) -> Tree:
    """The drop-in for `lax.psum` of `total(x, axis_name)`, which gives the sum of a varying array, the same bits everywhere.

    Its transpose costs nothing: the result is the same everywhere, so its cotangent is too.
    """

    def leaf(x):
        x = check_summand("all_reduce", drop_in.summable(x), axis_name)
        if not axes(axis_name):
            return x
        return linear_collective(
            x,
            axis_name,
            forward=lambda x: total(x, axis_name),
            backward=lambda ct: ct,
            to="invarying",
        )

    return leaf_by_leaf(leaf, x, axis_name)
