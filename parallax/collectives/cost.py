"""What each collective costs, before it runs, on any number of devices: folds over the table of
messages that it runs by.

    price = cost.of(ring.all_reduce, nbytes, n)  # hops, bytes per link, bytes sent, messages, ...
    cost.seconds(price, link)                    # start + alpha hops + beta bytes + gamma reduced

A collective is a list of rounds; in a round every device sends a message, or several over links of
their own, and waits for those that it is sent. Some rounds need nothing that the one before
brought: a program may send them at once, a device with one port will not. All numbers are whole,
padding included, and every one of them equals what the tests read from the compiled programs. What
a hop takes is measured on the live mesh by `tuning.fit`.

Sources: Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in
MPICH (2005); Chan et al., Collective communication: theory, practice, and experience (2007).
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

Sizes = int | tuple[int, ...]  # devices on the axis, or on each of several
Function = TypeVar("Function", bound=Callable[..., Any])


class Message(NamedTuple):
    """What a device sends in a round.

    Attributes:
        bytes: of the message.
        step: how many devices further on it goes along each dim of the table's box; below 0, back.
            On a switch that is one link, on a bare ring as many as the step.
        pieces: the permutes that it is sent as, side by side: large blocks are not joined into one.
    """

    bytes: int
    step: tuple[int, ...] = (1,)
    pieces: int = 1


class Round(NamedTuple):
    """Rounds that send the same messages, one after another.

    Attributes:
        times: how many they are.
        messages: that a device sends in each, side by side.
        reduced: bytes that it adds to others in each.
        waits: whether something is sent on in each that took as many hops as anything has.
    """

    times: int
    messages: tuple[Message, ...]
    reduced: int = 0
    waits: bool = True


def priced(
    rounds: Callable[..., Sequence[Round]], name: str = ""
) -> Callable[[Function], Function]:
    """Lets `of` know what the function that it decorates sends, and messages call it by `name`,
    such as "ring.all_reduce".

    Args:
        rounds: the rounds of the function on an array of so many numbers: `(size, n, itemsize,
            **options)`, as `of` takes them.
        name: the function's own by default.
    """

    def with_rounds(function: Function) -> Function:
        function.rounds = rounds  # pyright: ignore[reportFunctionMemberAccess]
        function.__qualname__ = name or function.__qualname__
        function.__name__ = function.__qualname__.rpartition(".")[2]
        return function

    return with_rounds


class Cost(NamedTuple):
    """What a collective costs the device that has most to do.

    Attributes:
        hops: rounds of messages, one after another.
        chain: the longest chain of messages of which each passes on what the one before brought:
            the program's own hops in a row. Below `hops` where a round need not wait for the one
            before.
        bytes: over the busiest link: of the largest message of each round.
        sent: bytes that a device sends, over all its links: the results of the program's permutes.
        messages: that a device sends: the program's permutes, in all trips of its loops.
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
        one_port: the messages of a round go one after another, as through one process's sockets,
            not each over a link of its own.
        error: of the fit: the median relative difference from what was measured. 0 for a link made
            by hand.
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
        collective: a function of this library, or a `functools.partial` of one that sets its
            options.
        nbytes: of the array that it takes on each device; of `matmul.matmul_reduce_scatter`, of the
            product.
        n: the devices on the axis; or on each, where it takes several.
        itemsize: bytes of a number. Numbers are not divided: an array whose size does not divide is
            padded.

    Raises:
        ValueError: `collective` has no table, or `nbytes` is no multiple of `itemsize`.
    """
    return total(rounds(collective, nbytes, n, itemsize=itemsize))


def of_leaves(
    collective: Callable[..., Any], sizes: Iterable[int], n: Sizes, *, itemsize: int = 4
) -> Cost:
    """What a tree with leaves (or buckets) of `sizes` bytes costs, one leaf after another.

    Errors as in `of`.
    """
    return total(
        [round for nbytes in sizes for round in rounds(collective, nbytes, n, itemsize=itemsize)]
    )


def rounds(
    collective: Callable[..., Any], nbytes: int, n: Sizes, *, itemsize: int = 4
) -> Sequence[Round]:
    """The rounds of a call of `collective`, with the arguments and errors of `of`."""
    function, options = collective, {}
    while isinstance(function, functools.partial):
        function, options = function.func, function.keywords | options
    if not hasattr(function, "rounds"):
        raise ValueError(
            f"cost.of needs a function that has a table of messages; got {function}. Take one of "
            "the package's own, such as ring.all_reduce; jax.lax has no tables."
        )
    if nbytes % itemsize:
        raise ValueError(
            f"cost.of: {nbytes} bytes are no whole number of items of {itemsize} bytes. Pass "
            "itemsize=..."
        )
    options = tuple(sorted((name, value) for name, value in options.items() if name != "axis_name"))
    return _rounds(function, nbytes // itemsize, n, itemsize, options)


@functools.lru_cache(maxsize=1024)
def _rounds(function, size, n, itemsize, options):
    # XLA drops a message without a byte, and a loop without a turn.
    found = [
        round._replace(messages=tuple(m for m in round.messages if m.bytes))
        for round in function.rounds(size, n, itemsize, **dict(options))
    ]
    alike = itertools.groupby(
        (round for round in found if round.times and round.messages),
        lambda round: round._replace(times=1),
    )
    return tuple(round._replace(times=sum(each.times for each in run)) for round, run in alike)


def describe(collective: Callable[..., Any]) -> str:
    """What a message calls a function: `ring.all_reduce`."""
    if hasattr(collective, "rounds"):
        return collective.__qualname__
    module = (
        "lax"
        if collective.__module__.startswith("jax")
        else collective.__module__.rpartition(".")[2]
    )
    return f"{module}.{collective.__name__}"


def total(rounds: Iterable[Round]) -> Cost:
    """The rounds, one after another, as one cost."""
    found = [0] * len(Cost._fields)
    for times, messages, reduced, waits in rounds:
        sizes = [message.bytes for message in messages]
        counts = (
            1,
            max(sizes),
            sum(sizes),
            sum(message.pieces for message in messages),
            reduced,
            int(waits),
        )
        found = [before + times * count for before, count in zip(found, counts, strict=True)]
    return Cost(*found)


def terms(cost: Cost, one_port: bool) -> tuple[int, int, int, int]:
    """What alpha, beta, gamma, start multiply: hops, bytes, reduced, 1; through one port, messages,
    sent, reduced, 1.
    """
    return (
        (cost.messages, cost.sent, cost.reduced, 1)
        if one_port
        else (cost.hops, cost.bytes, cost.reduced, 1)
    )


def seconds(cost: Cost, link: Link) -> float:
    """The seconds: start + alpha hops + beta bytes + gamma reduced; through one port, alpha
    messages and beta bytes sent.
    """
    return sum(rate * count for rate, count in zip(link, terms(cost, link.one_port), strict=False))


def devices(n: Sizes) -> int:
    """The number of devices together."""
    return math.prod(n) if isinstance(n, tuple) else n
