"""The cost of a collective before it runs, computed from the table of its messages.

    price = cost.of(ring.all_reduce, nbytes, n)  # hops, bytes per link, bytes sent, messages, ...
    cost.seconds(price, link)                    # start + alpha hops + beta bytes + gamma reduced

A collective is a list of rounds. In a round every device sends a message, or several over separate
links, and waits for the messages that it receives. Some rounds do not depend on the round before. A
program may start such a round together with the round before; a device with only one port then
sends their messages one after another. The other rounds have `waits` set. A round's `reduced` is
the bytes that a device adds to its own numbers. All counts in a `Cost` are integers. They include
padding, and equal the counts that the tests read from the compiled programs. `tuning.fit` measures
the time of a hop on the live mesh.

Sources: Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in
MPICH (2005); Chan et al., Collective communication: theory, practice, and experience (2007).
"""

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

# The number of devices on the axis, or a tuple with the number of devices on each of several axes.
Sizes = int | tuple[int, ...]
Function = TypeVar("Function", bound=Callable[..., Any])


class Message(NamedTuple):
    """A message that a device sends in a round.

    Attributes:
        bytes: the size of the message.
        step: the distance of the message, in devices, along each dim of the grid that the devices
            form (`Route.shape`); negative if the message goes backwards. Behind a switch the
            distance does not matter; on a ring of direct links a message crosses that many links.
        pieces: the number of permutes that send the message: one for each block if blocks are
            large, else one for all blocks.
    """

    bytes: int
    step: tuple[int, ...] = (1,)
    pieces: int = 1


class Round(NamedTuple):
    """One or more consecutive rounds that all have the same messages.

    Attributes:
        times: the number of rounds.
        messages: the messages that a device sends in each round, at the same time.
        reduced: the received bytes that a device adds to its own numbers in each round.
        waits: whether each round must wait for rounds before it, and so makes the longest chain of
            dependent messages longer by one.
    """

    times: int
    messages: tuple[Message, ...]
    reduced: int = 0
    waits: bool = True


def priced(
    rounds: Callable[..., Sequence[Round]], name: str = ""
) -> Callable[[Function], Function]:
    """Returns a decorator that sets a function's name and its attribute `rounds`, from which
    `cost.of` computes the function's cost.

    Args:
        rounds: `rounds(size, n, itemsize, **options)` returns the rounds if each of n devices has
            an array of `size` numbers, each of `itemsize` bytes.
        name: the name in errors and reports, such as "ring.all_reduce"; by default the name of the
            function.
    """

    def with_rounds(function: Function) -> Function:
        """Sets the function's attribute `rounds`, and the name that errors and reports use. Returns
        the same function."""
        function.rounds = rounds  # pyright: ignore[reportFunctionMemberAccess]
        function.__qualname__ = name or function.__qualname__
        function.__name__ = function.__qualname__.rpartition(".")[2]
        return function

    return with_rounds


class Cost(NamedTuple):
    """The cost of a collective for the busiest device.

    Attributes:
        hops: the number of rounds of messages, one round after another.
        bytes: the bytes over the busiest link in each round (the bytes of the round's largest
            message), summed over all rounds.
        sent: the bytes that a device sends over all its links, in all permutes of the program.
        messages: the number of messages that a device sends, which is the number of permutes in the
            program. A permute in a loop counts once per iteration, here and in `sent`.
        reduced: the received bytes that a device adds to its own numbers.
        chain: the length of the longest chain of messages in which each message depends on the one
            before it. `chain` is below `hops` if some rounds do not depend on the round before.
    """

    hops: int = 0
    bytes: int = 0
    sent: int = 0
    messages: int = 0
    reduced: int = 0
    chain: int = 0


class Link(NamedTuple):
    """The time of a hop on one mesh axis.

    Attributes:
        alpha: the seconds per hop.
        beta: the seconds per byte that is sent, received and stored.
        gamma: the further seconds per received byte, if the device adds it to its own numbers.
        start: the seconds per call.
        one_port: whether the messages of a round are sent one after another, as through one
            process's sockets, instead of each over its own link.
        error: the median relative difference between the times that these rates predict and the
            measured times; 0 for a link made by hand.
    """

    alpha: float
    beta: float
    gamma: float = 0.0
    start: float = 0.0
    one_port: bool = False
    error: float = 0.0


def of(collective: Callable[..., Any], nbytes: int, n: Sizes, *, itemsize: int = 4) -> Cost:
    """Returns the cost of a call of `collective` on one array: the sum of the costs of its rounds.

    Args:
        collective: a function of this library, or a `functools.partial` that sets options of such a
            function.
        nbytes: the bytes of the collective's argument on each device. For an all-gather the
            argument is one block; for `matmul.matmul_reduce_scatter`, `nbytes` is the bytes of the
            product.
        n: the number of devices on the axis, or a tuple with the number of devices on each of
            several axes.
        itemsize: the size in bytes of one element. An array is padded to a multiple of n elements.

    Raises:
        ValueError: `collective` has no table; or `nbytes` is negative or no multiple of `itemsize`;
            or `n` or `itemsize` is below 1.
    """
    return total(rounds(collective, nbytes, n, itemsize=itemsize))


def of_leaves(
    collective: Callable[..., Any], sizes: Iterable[int], n: Sizes, *, itemsize: int = 4
) -> Cost:
    """Returns the total cost of calling `collective` once for each leaf (or bucket), one call after
    another. `sizes` has the bytes of each leaf on a device; the other arguments are those of `of`.

    Raises the errors of `of`.
    """
    by_leaf = [rounds(collective, nbytes, n, itemsize=itemsize) for nbytes in sizes]
    return total(itertools.chain(*by_leaf))


def rounds(
    collective: Callable[..., Any], nbytes: int, n: Sizes, *, itemsize: int = 4
) -> Sequence[Round]:
    """Returns the rounds of messages of a call of `collective`.

    The arguments and the errors are those of `cost.of`. `nbytes` is the bytes of the collective's
    argument on one device, and `itemsize` is the size in bytes of one element. `n` is the number of
    devices on the axis, or a tuple with the number of devices on each of several axes.
    """
    # If nested partials set one option, the value of the outer partial counts.
    function, options = collective, {}
    while isinstance(function, functools.partial):
        function, options = function.func, function.keywords | options
    if not hasattr(function, "rounds"):
        raise ValueError(
            f"cost.of needs a function that has a table of messages; got {function}. Use one of "
            "the package's own, such as ring.all_reduce; jax.lax has no tables."
        )
    if nbytes < 0 or min(itemsize, *(n if isinstance(n, tuple) else (n,))) < 1:
        raise ValueError(
            "cost.of needs nbytes of 0 or more, and numbers of devices and an itemsize of 1 or "
            f"more; got nbytes={nbytes}, n={n} and itemsize={itemsize}."
        )
    if nbytes % itemsize:
        raise ValueError(
            f"cost.of needs nbytes that are a multiple of itemsize={itemsize}; got {nbytes}. Pass "
            "itemsize=..., the size in bytes of one element of the array."
        )
    # The function that gives the rounds takes only options that change them, as keywords; the name
    # of an axis, or `tiled`, does not. A sorted tuple can be a key of the cache of `_rounds`.
    known = inspect.signature(function.rounds).parameters
    options = tuple(sorted((name, value) for name, value in options.items() if name in known))
    return _rounds(function, nbytes // itemsize, n, itemsize, options)


@functools.lru_cache(maxsize=1024)
def _rounds(function, size, n, itemsize, options):
    """Returns the rounds of a function that `priced` decorated, without empty rounds. Equal rounds
    in a row are joined into one `Round`, whose `times` is their number.

    The rounds are for an array of `size` numbers of `itemsize` bytes on each device. `n` is the
    number of devices on the axis, or a tuple with the number of devices on each of several axes.
    `options` are the function's options, as (name, value) pairs in a tuple: the cache of these
    rounds needs arguments that can be hashed.
    """
    joined: list[Round] = []
    for planned in function.rounds(size, n, itemsize, **dict(options)):
        # XLA removes a message of no bytes, and a loop of no iterations, so they cost nothing.
        messages = tuple(message for message in planned.messages if message.bytes)
        if not planned.times or not messages:
            continue
        # Equal rounds in a row become one entry: a ring has one entry for any n. All fields but
        # `times`, the first, are compared.
        times = planned.times
        if joined and joined[-1][1:] == (messages, planned.reduced, planned.waits):
            times += joined.pop().times
        joined.append(planned._replace(times=times, messages=messages))
    return tuple(joined)


def describe(collective: Callable[..., Any]) -> str:
    """Returns a function's name for errors and reports, such as `ring.all_reduce`."""
    while isinstance(collective, functools.partial):
        collective = collective.func
    # `priced` gave the function its `rounds`, and this name as `__qualname__`.
    if hasattr(collective, "rounds"):
        return collective.__qualname__
    module = collective.__module__
    module = "lax" if module.startswith("jax") else module.rpartition(".")[2]
    return f"{module}.{collective.__name__}"


def total(rounds: Iterable[Round]) -> Cost:
    """Returns the cost of `rounds`, run one after another; each round has at least one message."""
    cost = np.zeros(len(Cost._fields), object)  # of Python's integers, which do not overflow
    for times, messages, reduced, waits in rounds:
        sizes = [message.bytes for message in messages]
        pieces = sum(message.pieces for message in messages)
        # In the order of `Cost`'s fields: hops, bytes, sent, messages, reduced, chain. The links
        # work at once, so the largest message counts as `bytes`. Each piece of a message is a
        # permute of its own, so `messages` counts pieces. `chain` counts the rounds that wait.
        counts = 1, max(sizes), sum(sizes), pieces, reduced, int(waits)
        cost += times * np.array(counts, object)
    return Cost(*cost)


def terms(cost: Cost, one_port: bool) -> tuple[int, int, int, int]:
    """Returns the numbers by which `seconds` multiplies a link's alpha, beta, gamma and start.

    The numbers are (hops, bytes, reduced, 1), from the fields of `cost`. With `one_port` all
    messages and the bytes of all messages count: (messages, sent, reduced, 1).
    """
    if one_port:
        return cost.messages, cost.sent, cost.reduced, 1
    return cost.hops, cost.bytes, cost.reduced, 1


def seconds(cost: Cost, link: Link) -> float:
    """Returns the predicted seconds of a call, from the fields of `link` and `cost`:
    `start + alpha * hops + beta * bytes + gamma * reduced`.

    If `link.one_port` is true, a device sends the messages of a round one after another. Then the
    seconds are `start + alpha * messages + beta * sent + gamma * reduced`.
    """
    # The first four fields of a `Link` are alpha, beta, gamma and start, in the order of `terms`.
    return sum(rate * count for rate, count in zip(link, terms(cost, link.one_port), strict=False))


def devices(n: Sizes) -> int:
    """Returns the total number of devices: `n`, or the product of its numbers if `n` is a tuple."""
    return math.prod(n) if isinstance(n, tuple) else n
