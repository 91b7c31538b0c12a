"""Computes the time of a traced step: the seconds of its matmuls (products), of its reads and
writes of memory, and of its messages. Also tells which of the three takes longest.

A message is a call of a collective. The `kind` of a message is the collective's name in compiled
programs, such as "all-reduce". The `bytes` of a message are the bytes of the collective's result on
a device. `n` is the number of devices along all axes of the message together.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from parallax.collectives import cost, halving
from parallax.collectives.cost import Cost, Link
from parallax.hardware import Hardware
from parallax.plan import networks


class Seconds(NamedTuple):
    """Seconds of a step.

    Attributes:
        products: seconds of the matmuls, at the share of the peak rate that large matmuls reach.
        passes: seconds in which memory is read and written.
        messages: for each set of axes, the seconds of all messages along these axes together.
        share: the share of the peak rate that the step reaches. It is the seconds that the matmuls
            would take at the peak rate, divided by `total`.
    """

    products: float
    passes: float
    messages: dict[tuple[str, ...], float]
    share: float

    @property
    def total(self) -> float:
        """Seconds of the step if matmuls, memory and messages do not overlap."""
        return self.products + self.passes + sum(self.messages.values())

    @property
    def least(self) -> float:
        """Seconds of the slowest kind of work. This is the time of the step if all other work
        overlaps with this kind."""
        return max(self.bounds.values())

    @property
    def bounds(self) -> dict[str, float]:
        """Seconds of each kind of work: matmuls ("products"), memory and messages."""
        return {
            "products": self.products,
            "memory": self.passes,
            "messages": sum(self.messages.values()),
        }


def seconds(trace: Any, hardware: Hardware) -> Seconds:
    """Returns the time of a `Trace` on devices of `hardware`.

    XLA's own algorithms are not known. The all-reduces, all-gathers and reduce-scatters of
    `jax.lax` along one axis get the time of the fastest algorithm that `networks.along` simulates.
    The time of all other messages comes from an alpha-beta formula (`_cost`).
    """
    hardware = hardware.for_devices(math.prod(trace.mesh.values()))
    # The seconds of products at the peak rate; large products reach `efficiency` of that rate.
    ideal = math.fsum(count / _rate(dtype, hardware) for dtype, count in trace.operations.items())
    products, passes = (
        ideal / hardware.efficiency,
        (trace.read + trace.written) / hardware.bandwidth,
    )
    along: dict[tuple[str, ...], float] = {}
    # The calls of `jax.lax` along each axis: kind, bytes of the operand, number of calls.
    calls: dict[str, list[tuple[str, int, int]]] = {}
    for message, times in trace.messages.items():
        # `_LIKE` has the kinds that are simulated: all-reduce, all-gather and reduce-scatter.
        if message.kind in _LIKE and len(message.axes) == 1:
            call = (message.kind.replace("-", "_"), _taken(message, trace.mesh), times)
            calls.setdefault(message.axes[0], []).append(call)
        else:
            between = hop(trace.mesh, message.axes, hardware)
            taken = times * cost.seconds(_cost(message, trace.mesh), between)
            along[message.axes] = along.get(message.axes, 0.0) + taken
    for axis, of_axis in calls.items():
        fastest = min(networks.along(axis, trace.mesh, hardware, of_axis).values())
        along[axis,] = along.get((axis,), 0.0) + fastest
    found = Seconds(products, passes, along, 0.0)  # the share needs the total of the others
    return found._replace(share=ideal / found.total if found.total else 0.0)


def span(mesh: Mapping[str, int], axes: tuple[str, ...]) -> int:
    """Returns the range of device numbers in a group along `axes`: the last number minus the first,
    plus 1. Devices are numbered in the mesh's row-major order."""
    sizes = list(mesh.values())
    strides = {name: math.prod(sizes[k + 1 :]) for k, name in enumerate(mesh)}
    return 1 + sum(strides[name] * (mesh[name] - 1) for name in axes)


def hop(
    mesh: Mapping[str, int], axes: tuple[str, ...], hardware: Hardware, links: float = 1.0
) -> Link:
    """Returns the `Link` (the latency and the seconds per byte) of a hop between two devices of a
    group along `axes`. If each group lies in one domain, a set of `hardware.domain` devices that
    fast links join, the hop crosses `links` fast links. If not, the hop is over slow links."""
    if _crosses(tuple(mesh.items()), axes, hardware.domain):
        return hardware.slow
    return hardware.link(span(mesh, axes), links)


@functools.lru_cache(maxsize=4096)
def _crosses(mesh: tuple[tuple[str, int], ...], axes: tuple[str, ...], domain: int) -> bool:
    """Returns whether a group along `axes` has devices of several domains. The first `domain`
    devices are a domain, the next `domain` devices are the next domain, and so on. With domains of
    8 devices, a group of the devices 6 to 11 has devices of two domains."""
    sizes = dict(mesh)
    of_devices = np.arange(math.prod(sizes.values())).reshape(*sizes.values()) // domain
    along = tuple(k for k, name in enumerate(sizes) if name in axes)
    return bool((of_devices.min(along) < of_devices.max(along)).any())


# The collectives of `jax.lax` that reduce or gather. The program does not say which messages
# they send. Along several axes at once they take the time of `collectives.halving`, recursive
# halving: of the algorithms that send equally many bytes, it has the fewest rounds.
_LIKE: dict[str, Callable[..., Any]] = {
    "all-reduce": halving.all_reduce,
    "all-gather": halving.all_gather,
    "reduce-scatter": halving.reduce_scatter,
}


def _taken(message: Any, mesh: Mapping[str, int]) -> int:
    """Returns the bytes of the array that a collective takes. They follow from the bytes of the
    collective's result, `message.bytes`."""
    n, size = math.prod(mesh[name] for name in message.axes), message.bytes
    return {"all-gather": -(-size // n), "reduce-scatter": size * n}.get(message.kind, size)


def _cost(message: Any, mesh: Mapping[str, int]) -> Cost:
    """Returns the cost of one call of a collective. An all-to-all over n devices sends n - 1
    blocks, each with 1/n of the array. The kinds in `_LIKE` (all-reduce, all-gather and
    reduce-scatter) cost as much as the same collectives of `collectives.halving`. A permute is one
    message, and any other kind counts as one message too.

    The fields of a `Cost` are, in this order: hops; bytes over the busiest link; bytes sent;
    messages; received bytes that the device adds to its own numbers; and `chain`, the length of the
    longest chain of messages in which each waits for the one before. In an all-to-all, a device
    sends its n - 1 messages one after another, so `hops` is n - 1. But no message needs what
    another message brings, so `chain` is 1. A program does not say how many rows a ragged
    all-to-all sends, so a ragged all-to-all counts like an all-to-all that fills the result.
    """
    n, size = math.prod(mesh[name] for name in message.axes), message.bytes
    if message.kind in ("all-to-all", "ragged-all-to-all"):
        return Cost(n - 1, size * (n - 1) // n, size * (n - 1) // n, n - 1, 0, chain=1)
    if message.kind not in _LIKE:
        return Cost(1, size, size, 1, 0, chain=1)
    # `_taken` returns the bytes of the operand, from those of the result. The array's type is not
    # known, so the algorithm may cut the array at any byte (itemsize 1).
    return cost.of(_LIKE[message.kind], _taken(message, mesh), n, itemsize=1)


def _rate(dtype: str, hardware: Hardware) -> float:
    """Returns a device's peak operations per second in a type: `rate` if the type has at most 16
    bits, and `full_rate` if it has more."""
    return hardware.rate if jnp.dtype(dtype).itemsize <= 2 else hardware.full_rate
