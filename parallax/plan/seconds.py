"""The time of a traced step: what its products, its memory and its messages take, and which of them
bounds it."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp

from parallax.collectives import cost, halving
from parallax.collectives.cost import Cost
from parallax.hardware import Hardware
from parallax.plan import networks


class Seconds(NamedTuple):
    """Seconds of a step.

    Attributes:
        products: matrix products, at the share of the rate that large ones reach.
        passes: memory read and written.
        messages: between devices, by axes, one after another.
        share: of the devices' peak rate: operations of products over the time of everything, one
            thing after another.
    """

    products: float
    passes: float
    messages: dict[tuple[str, ...], float]
    share: float

    @property
    def total(self) -> float:
        """Seconds of everything, one thing after another."""
        return self.products + self.passes + sum(self.messages.values())

    @property
    def least(self) -> float:
        """Seconds of the longest alone, as if all else hid behind it."""
        return max(self.bounds.values())

    @property
    def bounds(self) -> dict[str, float]:
        """Seconds of each kind."""
        return {
            "products": self.products,
            "memory": self.passes,
            "messages": sum(self.messages.values()),
        }


def seconds(trace: Any, hardware: Hardware) -> Seconds:
    """Returns the time of a `Trace` on devices of `hardware`."""
    ideal = math.fsum(count / _rate(dtype, hardware) for dtype, count in trace.operations.items())
    products, passes = (
        ideal / hardware.efficiency,
        (trace.read + trace.written) / hardware.bandwidth,
    )
    along: dict[tuple[str, ...], float] = {}
    calls: dict[str, list[tuple[str, int, int]]] = {}  # of `jax.lax`, along one axis
    for message, times in trace.messages.items():
        if message.kind in _LIKE and len(message.axes) == 1:
            call = (message.kind.replace("-", "_"), _taken(message, trace.mesh), times)
            calls.setdefault(message.axes[0], []).append(call)
        else:
            hop = hardware.link(span(trace.mesh, message.axes))
            taken = times * cost.seconds(_cost(message, trace.mesh), hop)
            along[message.axes] = along.get(message.axes, 0.0) + taken
    for axis, of_axis in calls.items():
        fastest = min(networks.along(axis, trace.mesh, hardware, of_axis).values())
        along[axis,] = along.get((axis,), 0.0) + fastest
    found = Seconds(products, passes, along, 0.0)
    return found._replace(share=ideal / found.total if found.total else 0.0)


def span(mesh: Mapping[str, int], axes: tuple[str, ...]) -> int:
    """Returns how far apart the devices of a group are numbered, both ends counted; the last axis
    of the mesh runs fastest."""
    sizes = list(mesh.values())
    strides = {name: math.prod(sizes[k + 1 :]) for k, name in enumerate(mesh)}
    return 1 + sum(strides[name] * (mesh[name] - 1) for name in axes)


# `jax.lax`'s own collectives, which have no table. Along several axes at once they take the time of
# halving, which has the fewest rounds of equal bytes.
_LIKE: dict[str, Callable[..., Any]] = {
    "all-reduce": halving.all_reduce,
    "all-gather": halving.all_gather,
    "reduce-scatter": halving.reduce_scatter,
}


def _taken(message: Any, mesh: Mapping[str, int]) -> int:
    """Returns the bytes of the array that a collective takes, from those of its result."""
    n, size = math.prod(mesh[name] for name in message.axes), message.bytes
    return {"all-gather": -(-size // n), "reduce-scatter": size * n}.get(message.kind, size)


def _cost(message: Any, mesh: Mapping[str, int]) -> Cost:
    """Returns the hops: a permute is one hop; what `jax.lax` moves itself is priced as halving."""
    n, size = math.prod(mesh[name] for name in message.axes), message.bytes
    if message.kind == "all-to-all":
        return Cost(n - 1, size * (n - 1) // n, size * (n - 1) // n, n - 1, 0, chain=1)
    if message.kind not in _LIKE:
        return Cost(1, size, size, 1, 0, chain=1)
    return cost.of(_LIKE[message.kind], _taken(message, mesh), n, itemsize=1)


def _rate(dtype: str, hardware: Hardware) -> float:
    return hardware.rate if jnp.dtype(dtype).itemsize <= 2 else hardware.full_rate
