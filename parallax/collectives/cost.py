"""What each collective costs, as a table of its messages: before it runs, on any number of devices.

    price = cost.of(ring.all_reduce, nbytes, n)      # hops, bytes a link, bytes sent, messages, bytes added
    cost.seconds(price, link)                        # start + alpha hops + beta bytes + gamma reduced

A collective is a list of rounds; in a round every device sends a message, or several over links of their own, and waits for those
that it is sent. Some rounds need nothing that the one before brought: a program may send them at once, a device with one port
will not. The formulas are whole numbers, padding included, and every one of them equals what the tests read from the compiled
programs. What a hop takes is measured on the live mesh by `tuning.fit`. The tables themselves are in `formulas`.

Sources: Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in MPICH (2005); Chan et al.,
Collective communication: theory, practice, and experience (2007).
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from parallax.collectives.bidirectional import two_rings
from parallax.collectives.formulas import FORMULAS, Message, Round, Sizes, rounds, spelt
from parallax.collectives.recursive_doubling import doubling
from parallax.collectives.recursive_halving import halving
from parallax.collectives.rings import ring
from parallax.collectives.several_axes import hierarchical, torus

__all__ = [
    "FORMULAS",
    "Cost",
    "Link",
    "Message",
    "Round",
    "Sizes",
    "exact",
    "fastest",
    "of",
    "of_leaves",
    "rounds",
    "seconds",
    "spelt",
    "terms",
    "total",
]


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


def of(collective: Callable[..., Any], nbytes: int, n: Sizes, *, itemsize: int = 4) -> Cost:
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


def of_leaves(collective: Callable[..., Any], sizes: Iterable[int], n: Sizes, *, itemsize: int = 4) -> Cost:
    """What a tree with leaves (or buckets) of `sizes` bytes costs, one leaf after another. Errors as in `of`."""
    return total([round for nbytes in sizes for round in rounds(collective, nbytes, n, itemsize=itemsize)])


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


def exact(n: Sizes) -> list[Callable[..., Any]]:
    """Every all-reduce that adds without rounding off, for one axis of n devices, or for several."""
    found = [ring.all_reduce, two_rings.all_reduce, halving.all_reduce, doubling.all_reduce]
    found += [torus.all_reduce] if isinstance(n, tuple) and len(n) > 1 else []
    return found + ([hierarchical.all_reduce] if isinstance(n, tuple) and len(n) == 2 else [])


def fastest(
    nbytes: int, n: Sizes, link: Link, *, among: Sequence[Callable[..., Any]] | None = None, itemsize: int = 4
) -> Callable[..., Any]:
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
