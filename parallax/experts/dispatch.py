"""Sends tokens to their experts, and the results back; the experts are split over an axis.

Legend: T tokens on a device, k choices of a token, n devices of the axis, E experts, E/n of them on
each device, D width, C rows of a message. A *choice* is a pair of a token and one of its k experts.
The *load* of a device is the number of choices for its experts. `compute(x, source, ids, weights)`
runs this device's experts: for each i, row `source[i]` of x goes to expert `ids[i]`. An id of E/n
(`local_experts`) means no expert.

    gathered        all tokens to all devices      (n - 1) T D each way          drops no choice
    exchanged(c)    an all-to-all of fixed size    c k (n - 1)/n T D each way    may drop choices
    ragged(c)       an all-to-all of exact size    k (n - 1)/n T D each way      may drop choices

The third column counts the numbers that a device sends in one direction of a forward pass: with the
tokens to the experts, or with the results back. The backward pass sends as many in each direction.
The capacity c sets the room for choices, in each message of `exchanged`, and on each receiving
device of `ragged`: c times the mean number of choices there. A choice without room is dropped, and
the number of dropped choices is returned. `exchanged(c)` sends less than `gathered` if c k < n.
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
from parallax.collectives.types import axes, varying, varying_axes

# `ExpertCompute` with this device's experts: (x, source, ids, weights) -> each row's weighted sum
LocalExperts = Callable[[Array, Array, Array, Array], Array]


class BytesSent(NamedTuple):
    """The bytes that a device sends in one forward pass.

    The backward pass sends the same bytes again, without `ids`.

    Attributes:
        out: the bytes of the tokens that the device sends to experts.
        back: the bytes of the experts' results that the device sends back.
        ids: the bytes of the indices of the tokens' experts.
        weights: the bytes of the factors of the experts' results; 0 if they are not sent.
    """

    out: int
    back: int
    ids: int
    weights: int = 0


@runtime_checkable
class Dispatch(Protocol):
    """A way of sending tokens to experts."""

    def __call__(
        self,
        x: Float[Array, "tokens width"],
        ids: Int[Array, "tokens k"],
        weights: Float[Array, "tokens k"],
        compute: LocalExperts,
        axis: Axis,
        local_experts: int,
        /,
    ) -> tuple[Float[Array, "tokens width"], Int[Array, ""]]:
        """Returns for each token the weighted sum of its experts' results, and the number of
        dropped choices, which are pairs of a token and one of its experts.

        Args:
            x: this device's tokens.
            ids: the indices of each token's experts.
            weights: the factors of these experts' results.
            compute: runs the experts of this device.
            axis: the axis that the experts are split over.
            local_experts: the number of experts on each device. Device i of the axis holds the
                experts from number i * local_experts on.
        """
        ...

    def sent(
        self, tokens: int, width: int, *, k: int, experts: int, n: int, itemsize: int
    ) -> BytesSent:
        """Returns the bytes that a device sends in a forward pass.

        Each device has `tokens` tokens of `width` numbers. A token has k experts. `experts` is the
        number of experts on all n devices together. `itemsize` is the size of a number in bytes.
        """
        ...


@dataclass(frozen=True)
class Gathered:
    """Gathers all tokens on each device, runs the device's experts, and reduce-scatters the
    results.

    The result is exact, since every token reaches all its experts.
    """

    def __call__(
        self,
        x: Float[Array, "tokens width"],
        ids: Int[Array, "tokens k"],
        weights: Float[Array, "tokens k"],
        compute: LocalExperts,
        axis: Axis,
        local_experts: int,
        /,
    ) -> tuple[Float[Array, "tokens width"], Int[Array, ""]]:
        """Returns this device's rows of the results, [tokens, width], and the number of dropped
        choices, always 0.

        `ids` are the indices of each token's experts, and `weights` the factors of the experts'
        results. `compute` runs the `local_experts` experts of this device.
        """
        x, ids, weights = (axis.all_gather(a, axis=0, tiled=True) for a in (x, ids, weights))
        # Each choice's token, which is its row of x: k times 0, k times 1, ...
        source = jnp.repeat(jnp.arange(len(ids), dtype=jnp.int32), ids.shape[1])
        # Experts are numbered from this device's first one on.
        number = ids.reshape(-1) - axis.index() * local_experts
        # The number `local_experts` means no expert on this device: `compute` skips these pairs.
        is_local = (number >= 0) & (number < local_experts)
        y = compute(x, source, jnp.where(is_local, number, local_experts), weights.reshape(-1))
        # y is [n T, D]: the terms of this device's experts, for the tokens of all devices.
        return axis.reduce_scatter(y, scatter_dimension=0, tiled=True), jnp.zeros((), jnp.int32)

    def sent(
        self, tokens: int, width: int, *, k: int, experts: int, n: int, itemsize: int
    ) -> BytesSent:
        """Returns the bytes that a device sends, for n devices and k experts of a token.

        In the all-gather, a device sends (n - 1) T tokens, each with D numbers, k int32 ids and k
        weights. In the reduce-scatter, it sends (n - 1) T results of D numbers. T is `tokens`, the
        tokens of one device, D is `width`, and a number or weight has `itemsize` bytes.
        """
        rows = (n - 1) * tokens
        # `BytesSent` is (out, back, ids, weights); an id is an int32.
        return BytesSent(
            rows * width * itemsize, rows * width * itemsize, rows * k * 4, rows * k * itemsize
        )


gathered = Gathered()


@dataclass(frozen=True)
class exchanged:
    """Sends each token to its experts' devices by an all-to-all, and sends the results back. A
    device sends the same number of rows, C, to each device.

    A row is for one *choice*, a pair of a token and one of its k experts. The T tokens of a device
    have k T choices, so a device sends on average k T / n rows to each of the n devices. C is
    `capacity` times this mean, rounded up. With a capacity of `math.inf`, C is the largest number
    of choices that a device can have for one receiver, and nothing is dropped. If a device has more
    than C choices for one receiver, first choices have priority over second choices, and then
    earlier tokens over later ones. A dropped choice adds nothing to the layer's result: the token
    keeps its residual.

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
        compute: LocalExperts,
        axis: Axis,
        local_experts: int,
        /,
    ) -> tuple[Float[Array, "tokens width"], Int[Array, ""]]:
        """Returns this device's results, [tokens, width], and the number of dropped choices. A
        choice is a pair of a token and one of its experts. A choice is dropped if the message to
        the expert's device has no room.

        `ids` are the indices of each token's experts, and `weights` the factors of the experts'
        results. `compute` runs the `local_experts` experts of this device.
        """
        n = axis.size()
        room = self.room(len(ids), ids.shape[1], local_experts, n)
        # For each choice: its token, its expert's device, the expert's number on that device, and
        # the number of earlier choices whose experts are on that device (`rank`).
        wanted = _wanted(ids, local_experts, n)
        # The place of each choice among the n * room rows that are sent. A choice without room gets
        # a place out of range, which `mode="drop"` ignores.
        place = jnp.where(wanted.rank < room, wanted.device * room + wanted.rank, n * room)

        def in_place(fill, values):
            """Returns an integer for each row to send: the entry of `values` for the token and
            expert that the row belongs to, or `fill` if the row is empty."""
            return jnp.full(n * room, fill, jnp.int32).at[place].set(values, mode="drop")

        def exchange(a):
            """Returns the received rows, after it sends the n * room rows of `a`: `room` rows to
            each of the n devices."""
            return axis.all_to_all(a.reshape(n, room, *a.shape[1:]), 0, 0).reshape(a.shape)

        # An empty row takes the token len(x): this is out of range and gives 0. Its expert is
        # `local_experts`, the number that means no expert.
        rows = x.at[in_place(len(x), wanted.token)].get(mode="fill", fill_value=0)
        arrived = exchange(rows)
        # A received row is one choice, so it has one expert. Its weight is 1 here: the weights,
        # which are not sent, multiply the results on their return.
        source = jnp.arange(n * room, dtype=jnp.int32)
        experts = exchange(in_place(local_experts, wanted.expert))
        y = compute(arrived, source, experts, jnp.ones(n * room, weights.dtype))
        # In the order of the choices; a dropped choice reads out of range and gets 0.
        y = exchange(y).at[place].get(mode="fill", fill_value=0)
        return _weighted_sum(y, weights), jnp.sum(wanted.rank >= room, dtype=jnp.int32)

    def room(self, tokens: int, k: int, local_experts: int, n: int) -> int:
        """Returns C, the number of rows that a device sends to each device.

        A token has at most min(k, local_experts) of its k experts on one device. So C is at most
        this number times the number of tokens.
        """
        return _room(self.capacity, k * tokens, n, tokens * min(k, local_experts))

    def sent(
        self, tokens: int, width: int, *, k: int, experts: int, n: int, itemsize: int
    ) -> BytesSent:
        """Returns the bytes that a device sends: C rows to each of the n - 1 other devices, and as
        many rows back. C is the result of `room`.

        A row has D numbers of `itemsize` bytes, and each row to the experts has an int32 id too. D
        is `width`.
        """
        rows = (n - 1) * self.room(tokens, k, experts // n, n)
        # `BytesSent` is (out, back, ids); the weights are not sent.
        return BytesSent(rows * width * itemsize, rows * width * itemsize, rows * 4)


@dataclass(frozen=True)
class ragged:
    """Sends each token to its experts' devices in messages of exact length, by
    `lax.ragged_all_to_all`, and sends the results back.

    If the load is even, a device receives k T rows: T is the number of tokens of a device, and k
    the number of experts of a token. A device has room for `capacity` times as many rows. With a
    capacity of `math.inf` the device has room for the largest possible number of rows. Rows from
    device 0 come first, then rows from device 1, and so on; rows beyond the room are dropped.
    TPUs and GPUs have `lax.ragged_all_to_all`, but XLA's CPU backend lacks it (jax #34755).

    Args:
        capacity: the number of rows that a device can receive, divided by the number of rows that
            it receives if the load is even.
        move: the collective for the rows, a function with the arguments of
            `lax.ragged_all_to_all`.

    Raises:
        ValueError: the capacity is 0 or below. In a call: the experts are not split over any axis;
            or their axis has an algorithm of its own, such as `ring("expert")`, which `move` cannot
            use.
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
        compute: LocalExperts,
        axis: Axis,
        local_experts: int,
        /,
    ) -> tuple[Float[Array, "tokens width"], Int[Array, ""]]:
        """Returns this device's results, [tokens, width], and the number of dropped choices. A
        choice is a pair of a token and one of its experts. A choice is dropped if the expert's
        device has no room.

        `ids` are the indices of each token's experts, and `weights` the factors of the experts'
        results. `compute` runs the `local_experts` experts of this device.
        """
        if not axes(axis.names):
            raise ValueError(
                "experts.ragged needs an axis to move rows along, and the experts are not split "
                "over any axis. Use experts.gathered, or split the experts over an axis and pass "
                "its name."
            )
        if axis.algorithm != xla:
            raise ValueError(
                f"experts.ragged needs an axis without an algorithm of its own; got {axis}. Pass "
                f"the axis by its name, {axis.names!r}, or use experts.exchanged, which works with "
                "any algorithm that has an all-to-all."
            )
        n, (tokens, k) = axis.size(), ids.shape
        # The mean load is k T: each of n devices sends k T / n rows to this one. `_room` takes the
        # mean as choices / parts, so here as k T / 1. At most, each token of each device makes
        # min(k, local_experts) choices here.
        room = _room(self.capacity, k * tokens, 1, n * tokens * min(k, local_experts))
        # For each choice: its token, its expert's device, the expert's number on that device, and
        # the number of earlier choices whose experts are on that device (`rank`).
        wanted = _wanted(ids, local_experts, n)
        devices = jnp.arange(n, dtype=jnp.int32)
        # For each device: the number of this device's choices whose experts are there, [n].
        counts = jnp.sum(wanted.device[None] == devices[:, None], axis=1, dtype=jnp.int32)
        wanted_rows = axis.all_gather(counts[None], axis=0, tiled=True)  # [sender, receiver]
        exchange = _Exchange.of(wanted_rows, room, axis, self.move)
        # The row of each choice among the rows to send, which are sorted by receiver.
        place = exchange.input_offsets[wanted.device] + wanted.rank

        def in_order(values):
            """Returns the integers `values`, one for each pair of a token and one of its experts,
            sorted by the device of the expert."""
            return jnp.zeros(k * tokens, jnp.int32).at[place].set(values, unique_indices=True)

        def zeros(rows):
            """Returns zeros [rows, D], typed as varying along the same mesh axes as `x`, as the
            collective needs."""
            return varying(jnp.zeros((rows, x.shape[1]), x.dtype), varying_axes(x))

        arrived = exchange.to_experts(x[in_order(wanted.token)], zeros(room))
        # Rows that nobody fills go to no expert. They vary, as the collective needs.
        no_expert = varying(jnp.full(room, local_experts, jnp.int32), axis.names)
        experts = exchange.to_experts(in_order(wanted.expert), no_expert)
        source = jnp.arange(room, dtype=jnp.int32)
        # The weights are not sent: they multiply the results on their return.
        y = compute(arrived, source, experts, jnp.ones(room, weights.dtype))
        # `[place]` restores the order of the choices. Dropped choices keep the zeros.
        y = exchange.from_experts(y, zeros(k * tokens))[place]
        return _weighted_sum(y, weights), exchange.dropped

    def sent(
        self, tokens: int, width: int, *, k: int, experts: int, n: int, itemsize: int
    ) -> BytesSent:
        """Returns the bytes that a device sends if the load is even and no row is dropped.

        The device sends k (n - 1)/n T rows to the experts, and as many rows back. T is `tokens`,
        and a row has `width` numbers of `itemsize` bytes. The field `ids` has the bytes of an int32
        id for each row, and of an all-gather of the row counts. A device has n int32 counts: how
        many rows the device sends to each device. It sends all n counts to each of the n - 1 other
        devices: a receiver's rows are ordered by the sender's index, so a device needs the counts
        of all devices before it to place its own rows.
        """
        rows = k * tokens * (n - 1) // n
        # `BytesSent` is (out, back, ids); the weights are not sent.
        return BytesSent(
            rows * width * itemsize, rows * width * itemsize, rows * 4 + 4 * n * (n - 1)
        )


class _Exchange(NamedTuple):
    """The messages that this device sends: rows to the experts' devices, and later results back to
    the tokens' devices. The number of rows differs from message to message.

    The attributes with offsets and sizes have one entry for each device of the axis. They have the
    names of the arguments of `lax.ragged_all_to_all`, with `back_` in front for the way back.

    Attributes:
        move: the collective, as `ragged.move`.
        names: the names of the axis.
        send_sizes: the number of rows that this device sends to each device.
        input_offsets: the index of the first row for each device, among the rows that this device
            sends.
        output_offsets: for each receiver, the index of this device's first row among the rows that
            the receiver gets.
        back_send_sizes: for each device, the number of rows that this device received from that
            device, and so sends back.
        back_input_offsets: the index of the first row from each device, among the rows that this
            device received.
        back_output_offsets: for each sender, the index of its first row to this device, among all
            rows that the sender sent.
        dropped: the number of this device's choices that found no room at their receivers.
    """

    move: Callable[..., Any]
    names: Any
    send_sizes: Array
    input_offsets: Array
    output_offsets: Array
    back_send_sizes: Array
    back_input_offsets: Array
    back_output_offsets: Array
    dropped: Array

    @classmethod
    def of(cls, wanted_rows: Array, room: int, axis: Axis, move: Callable[..., Any]) -> "_Exchange":
        """Returns the messages of this device.

        Args:
            wanted_rows: [sender, receiver], the number of rows that each device wants to send to
                each device.
            room: the most rows that a device can receive.
            axis: the axis of the devices.
            move: the collective that moves the rows: `lax.ragged_all_to_all`, or one that takes the
                same arguments.
        """

        def before(a, dim):
            """Returns, for each entry of `a`, the sum of the entries before it along `dim`."""
            return jnp.cumsum(a, axis=dim, dtype=jnp.int32) - a

        me = axis.index()
        # In a receiver's column, a sender gets the room that the senders of lower index leave.
        granted = jnp.clip(room - before(wanted_rows, 0), 0, wanted_rows)
        # A sender lays out all wanted rows one after another, but a receiver has only the granted
        # rows: the rows without room are skipped.
        input_offsets, output_offsets = before(wanted_rows, 1), before(granted, 0)
        dropped = jnp.sum(wanted_rows[me] - granted[me], dtype=jnp.int32)
        to_experts = granted[me], input_offsets[me], output_offsets[me]
        # On the way back sender and receiver change roles: columns instead of rows.
        from_experts = granted[:, me], output_offsets[:, me], input_offsets[:, me]
        return cls(move, axis.names, *to_experts, *from_experts, dropped)

    def to_experts(self, a: Array, empty: Array) -> Array:
        """Sends the rows `a`; returns `empty`, [room, ...], filled with the rows that arrive."""
        # In the order of `lax.ragged_all_to_all`. Its last argument has the numbers of rows to
        # receive from each device. They are `back_send_sizes`, since the same rows go back later.
        places = self.input_offsets, self.send_sizes, self.output_offsets, self.back_send_sizes
        return self.move(a, empty, *places, axis_name=self.names)

    def from_experts(self, a: Array, empty: Array) -> Array:
        """Sends the results `a` back to the devices of their tokens. Returns `empty`, [k T, ...],
        filled with the results that this device receives."""
        # In the order of `lax.ragged_all_to_all`. Its last argument has the numbers of rows to
        # receive from each device. They are `send_sizes`, since the rows that this device sent come
        # back.
        places = (
            self.back_input_offsets,
            self.back_send_sizes,
            self.back_output_offsets,
            self.send_sizes,
        )
        return self.move(a, empty, *places, axis_name=self.names)


class _Wanted(NamedTuple):
    """All choices of a device's tokens. A *choice* is a pair of a token and one of its k experts.
    The first choices of all tokens come before the second choices. Each attribute is an array with
    an entry for each choice, so k entries for each token.

    Attributes:
        token: the token of each choice.
        device: the device of the choice's expert.
        expert: the number of the expert on that device.
        rank: the number of earlier choices whose experts are on the same device.
    """

    token: Int[Array, " choices"]
    device: Int[Array, " choices"]
    expert: Int[Array, " choices"]
    rank: Int[Array, " choices"]


def _wanted(ids: Array, local_experts: int, n: int) -> _Wanted:
    """Returns the `_Wanted` of a device's tokens. `ids`, [tokens, k], are the tokens' experts.

    Each of the n devices has `local_experts` experts: device 0 has the first `local_experts`
    experts, device 1 has the next ones, and so on.
    """
    tokens, k = ids.shape
    # Transposed, so that the first choices of all tokens come first and have priority.
    device, expert = jnp.divmod(ids.T.reshape(-1).astype(jnp.int32), local_experts)
    # `places` inverts `order`: it has each choice's place among all choices sorted by device. A
    # choice's rank is this place minus the first place of the choices of its device (`starts`).
    order = jnp.argsort(device, stable=True).astype(jnp.int32)
    starts = jnp.searchsorted(device[order], jnp.arange(n, dtype=jnp.int32)).astype(jnp.int32)
    places = (
        jnp.zeros_like(order)
        .at[order]
        .set(jnp.arange(k * tokens, dtype=jnp.int32), unique_indices=True)
    )
    return _Wanted(
        jnp.tile(jnp.arange(tokens, dtype=jnp.int32), k), device, expert, places - starts[device]
    )


def _weighted_sum(y: Array, weights: Array) -> Array:
    """Returns for each token the weighted sum of its experts' results, [tokens, width].

    `y` has a row for each choice, a pair of a token and one of its experts. The results of all
    tokens' first choices come first, then the results of all tokens' second choices, and so on.
    """
    tokens, k = weights.shape
    # A product needs operands of one type. `jnp.sum` adds 16-bit numbers in float32.
    return jnp.sum(y.reshape(k, tokens, -1) * weights.T[..., None].astype(y.dtype), axis=0)


def _room(capacity: float, choices: int, parts: int, most: int) -> int:
    """Returns the number of rows to make room for. It is `capacity` times the mean load, rounded
    up, and at most `most`.

    The mean load is `choices / parts`, for choices that are spread over `parts` devices. The
    capacity may be infinite.
    """
    # The bound is tested first, so that an infinite number is never rounded. Infinity has a test of
    # its own, since infinity times 0 choices would be nan.
    if math.isinf(capacity) or capacity * choices >= most * parts:
        return most
    return math.ceil(capacity * choices / parts)


def _check_capacity(name: str, capacity: float) -> None:
    """Raises `ValueError` unless the capacity is above 0. `name` names the function in the
    message."""
    if not capacity > 0:
        raise ValueError(
            f"experts.{name} needs a capacity above 0, as a multiple of the mean load; got "
            f"{capacity}. Use 1.25 for 25% more than the mean load, or math.inf to drop nothing."
        )
