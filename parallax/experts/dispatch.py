"""How tokens come to their experts, which are split over an axis, and how results come back.

Legend: T tokens on a device, k choices of a token, n devices of the axis, E experts, E/n on each, D
width, C rows of a message.

    gathered        all tokens to all devices      (n - 1) T D each way          drops nothing
    exchanged(c)    an all-to-all of fixed size    c k (n - 1)/n T D each way    drops and counts
    ragged(c)       an all-to-all of exact size    k (n - 1)/n T D each way      drops and counts

in numbers that a device sends, twice that with the backward pass. So the all-to-all pays where c k
< n.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from parallax.collectives import Axis
from parallax.collectives.axis import xla
from parallax.collectives.types import axes

Local = Callable[
    [Array, Array, Array, Array], Array
]  # `Compute` of this device's experts: of (x, source, ids, weights)


class BytesSent(NamedTuple):
    """Bytes that a device sends in one forward pass; the backward pass sends the same again, but
    for `ids`.

    Attributes:
        out: of tokens, to the experts.
        back: of results.
        ids: of the experts' numbers.
        weights: of the weights, where they travel.
    """

    out: int
    back: int
    ids: int
    weights: int = 0


@runtime_checkable
class Dispatch(Protocol):
    """A way of bringing tokens to experts."""

    def __call__(
        self,
        x: Float[Array, "tokens width"],
        ids: Int[Array, "tokens k"],
        weights: Float[Array, "tokens k"],
        compute: Local,
        axis: Axis,
        held: int,
        /,
    ) -> tuple[Float[Array, "tokens width"], Int[Array, ""]]:
        """For each token the sum of weight times result over its experts, and how many choices of
        these tokens were dropped.

        Device i of the axis holds the experts from i * held on.
        """
        ...

    def sent(
        self, tokens: int, width: int, *, k: int, experts: int, n: int, itemsize: int
    ) -> BytesSent:
        """The bytes that a device sends for `tokens` tokens of its own; `itemsize` is a number's,
        in bytes.
        """
        ...


@dataclass(frozen=True)
class Gathered:
    """Each device has all tokens, runs its own experts on those that chose them, and the sums are
    scattered. Exact, dropless.
    """

    def __call__(
        self,
        x: Float[Array, "tokens width"],
        ids: Int[Array, "tokens k"],
        weights: Float[Array, "tokens k"],
        compute: Local,
        axis: Axis,
        held: int,
        /,
    ) -> tuple[Float[Array, "tokens width"], Int[Array, ""]]:
        """As `Dispatch`."""
        everywhere = lambda a: axis.all_gather(a, axis=0, tiled=True)
        x, ids, weights = everywhere(x), everywhere(ids), everywhere(weights)
        source = jnp.repeat(jnp.arange(len(ids), dtype=jnp.int32), ids.shape[1])
        own = ids.reshape(-1) - axis.index() * held
        y = compute(x, source, jnp.where((own >= 0) & (own < held), own, held), weights.reshape(-1))
        return axis.reduce_scatter(y, scatter_dimension=0, tiled=True), jnp.zeros((), jnp.int32)

    def sent(
        self, tokens: int, width: int, *, k: int, experts: int, n: int, itemsize: int
    ) -> BytesSent:
        """(n - 1) T D each way."""
        rows = (n - 1) * tokens
        return BytesSent(
            rows * width * itemsize, rows * width * itemsize, rows * k * 4, rows * k * itemsize
        )


gathered = Gathered()


@dataclass(frozen=True)
class exchanged:
    """Each device sends each chosen token to its expert's device, C rows to each: an all-to-all of
    static size, and one back.

    C is `capacity` times the mean, k T / n, rounded up: with `math.inf` as many as there can be,
    and nothing is dropped. Where more tokens want one device, first choices go before second ones,
    and then the earlier token. A choice that finds no room adds nothing to the layer's result, so
    the residual alone carries the token past it.

    Raises:
        ValueError: the capacity is 0 or below.
    """

    capacity: float

    def __post_init__(self):
        _check_capacity("exchanged", self.capacity)

    def __call__(
        self,
        x: Float[Array, "tokens width"],
        ids: Int[Array, "tokens k"],
        weights: Float[Array, "tokens k"],
        compute: Local,
        axis: Axis,
        held: int,
        /,
    ) -> tuple[Float[Array, "tokens width"], Int[Array, ""]]:
        """As `Dispatch`."""
        n = axis.size()
        room = self.room(len(ids), ids.shape[1], held, n)
        wanted = _wanted(ids, held, n)
        place = jnp.where(wanted.rank < room, wanted.device * room + wanted.rank, n * room)
        into = lambda fill, values: (
            jnp.full(n * room, fill, jnp.int32).at[place].set(values, mode="drop")
        )
        there = lambda a: axis.all_to_all(a.reshape(n, room, *a.shape[1:]), 0, 0).reshape(a.shape)
        arrived = there(x.at[into(len(x), wanted.token)].get(mode="fill", fill_value=0))
        rows = jnp.arange(n * room, dtype=jnp.int32)
        y = compute(
            arrived, rows, there(into(held, wanted.expert)), jnp.ones(n * room, weights.dtype)
        )
        y = there(y).at[place].get(mode="fill", fill_value=0)
        return _joined(y, weights), jnp.sum(wanted.rank >= room, dtype=jnp.int32)

    def room(self, tokens: int, k: int, held: int, n: int) -> int:
        """C: rows that a device sends to each."""
        return _room(self.capacity, k * tokens, n, tokens * min(k, held))

    def sent(
        self, tokens: int, width: int, *, k: int, experts: int, n: int, itemsize: int
    ) -> BytesSent:
        """(n - 1) C D each way; with a capacity of 1, k (n - 1)/n T D."""
        rows = (n - 1) * self.room(tokens, k, experts // n, n)
        return BytesSent(rows * width * itemsize, rows * width * itemsize, rows * 4)


@dataclass(frozen=True)
class ragged:
    """`exchanged` in which each message is as long as what is sent: `lax.ragged_all_to_all`.

    A device has room for `capacity` times k T rows, the mean; with `math.inf` for as many as can
    come. It fills up in the order of the devices that send. XLA's CPU backend does not have this
    collective (jax #34755), TPUs and GPUs do.

    Args:
        capacity: as there.
        move: the collective for the rows; it takes what `lax.ragged_all_to_all` takes.

    Raises:
        ValueError: the capacity is 0 or below; or there is no axis, or one with an algorithm that
            is not `jax.lax`.
    """

    capacity: float
    move: Callable[..., Any] = lax.ragged_all_to_all

    def __post_init__(self):
        _check_capacity("ragged", self.capacity)

    def __call__(
        self,
        x: Float[Array, "tokens width"],
        ids: Int[Array, "tokens k"],
        weights: Float[Array, "tokens k"],
        compute: Local,
        axis: Axis,
        held: int,
        /,
    ) -> tuple[Float[Array, "tokens width"], Int[Array, ""]]:
        """As `Dispatch`."""
        if not axes(axis.names):
            raise ValueError(
                "experts.ragged needs an axis to move rows along, and the experts are not split "
                "over one. Take gathered, or name the axis."
            )
        if axis.algorithm != xla:
            raise ValueError(
                f"experts.ragged moves data by jax.lax alone, and the axis is {axis}. Name the "
                f"axis, {axis.names!r}, or take exchanged, which any algorithm can do."
            )
        n, me, (tokens, k) = axis.size(), axis.index(), ids.shape
        room = _room(self.capacity, k * tokens, 1, n * tokens * min(k, held))
        wanted = _wanted(ids, held, n)
        counts = jnp.sum(
            wanted.device[None] == jnp.arange(n, dtype=jnp.int32)[:, None], axis=1, dtype=jnp.int32
        )
        wish = axis.all_gather(counts[None], axis=0, tiled=True)  # [from, to]
        before = lambda a, dim: jnp.cumsum(a, axis=dim, dtype=jnp.int32) - a
        granted = jnp.clip(room - before(wish, 0), 0, wish)
        # Where the rows to one device begin: among those that this one sends, and among those that
        # it receives.
        leaves, arrives = before(wish, 1), before(granted, 0)

        def there(a, empty):
            return self.move(
                a, empty, leaves[me], granted[me], arrives[me], granted[:, me], axis_name=axis.names
            )

        def back(a, empty):
            return self.move(
                a,
                empty,
                arrives[:, me],
                granted[:, me],
                leaves[:, me],
                granted[me],
                axis_name=axis.names,
            )

        place = leaves[me][wanted.device] + wanted.rank
        in_order = lambda values: (
            jnp.zeros(k * tokens, jnp.int32).at[place].set(values, unique_indices=True)
        )
        empty = lambda rows: jnp.zeros((rows, x.shape[1]), x.dtype) + x[:1] * 0
        arrived = there(x[in_order(wanted.token)], empty(room))
        known = there(in_order(wanted.expert), jnp.full(room, held, jnp.int32) + me * 0)
        y = compute(
            arrived, jnp.arange(room, dtype=jnp.int32), known, jnp.ones(room, weights.dtype)
        )
        y = back(y, empty(k * tokens))[place]
        return _joined(y, weights), jnp.sum(wish[me] - granted[me], dtype=jnp.int32)

    def sent(
        self, tokens: int, width: int, *, k: int, experts: int, n: int, itemsize: int
    ) -> BytesSent:
        """k (n - 1)/n T D each way where the load is even and nothing is dropped."""
        rows = k * tokens * (n - 1) // n
        return BytesSent(
            rows * width * itemsize, rows * width * itemsize, rows * 4 + 4 * n * (n - 1)
        )


class Wanted(NamedTuple):
    """All choices, the first ones of all tokens before the second ones: [k T] each.

    Attributes:
        token: whose they are.
        device: where the expert is.
        expert: its number there.
        rank: how many choices before want the same device.
    """

    token: Int[Array, " choices"]
    device: Int[Array, " choices"]
    expert: Int[Array, " choices"]
    rank: Int[Array, " choices"]


def _wanted(ids: Array, held: int, n: int) -> Wanted:
    tokens, k = ids.shape
    device, expert = jnp.divmod(ids.T.reshape(-1).astype(jnp.int32), held)
    order = jnp.argsort(device, stable=True).astype(jnp.int32)
    starts = jnp.searchsorted(device[order], jnp.arange(n, dtype=jnp.int32)).astype(jnp.int32)
    places = (
        jnp.zeros_like(order)
        .at[order]
        .set(jnp.arange(k * tokens, dtype=jnp.int32), unique_indices=True)
    )
    return Wanted(
        jnp.tile(jnp.arange(tokens, dtype=jnp.int32), k), device, expert, places - starts[device]
    )


def _joined(y: Array, weights: Array) -> Array:
    """The sum of weight times result, of results in the order of `Wanted`."""
    tokens, k = weights.shape
    return jnp.sum(y.reshape(k, tokens, -1) * weights.T[..., None].astype(y.dtype), axis=0)


def _room(capacity: float, choices: int, parts: int, most: int) -> int:
    """Rows for `capacity` times the mean number of choices, and for no more than there can be."""
    return most if capacity * choices >= most * parts else math.ceil(capacity * choices / parts)


def _check_capacity(name: str, capacity: float) -> None:
    if not capacity > 0:
        raise ValueError(
            f"experts.{name}: the capacity is a multiple of the mean load, and above 0; got "
            f"{capacity}. Take 1.25 for a quarter of room to spare, or math.inf to drop nothing."
        )
