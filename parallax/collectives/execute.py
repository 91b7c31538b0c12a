"""The executor of routes: it runs tables side by side, forwards or backwards.

Forwards a table is a scatter, and backwards it is a gather.

A run of rounds in which each table sends on exactly the blocks that just arrived is a *chain*. A
long chain becomes a loop, so that its compile time does not grow with the devices. Other rounds are
written out.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType
from jaxtyping import Array, Shaped

from parallax._typing import PyTree
from parallax.collectives import cpu
from parallax.collectives.permute import send
from parallax.collectives.route import Point, Route
from parallax.collectives.types import AxisName, axis_index, axis_size, varying, varying_axes

Tree = TypeVar("Tree", bound=PyTree)

# Blocks of a message are joined up to this size in bytes: a larger one is sent sooner than copied.
JOINED = 2**16
# Chains are written out up to this number of hops. The compile time of a loop does not grow.
UNROLLED = 8


def scatter(
    routes: Sequence[Route],
    term: Callable[[int, Any], Shaped[Array, "..."]],
    axis_name: AxisName,
    *,
    dim: int = 0,
    unrolled: float | None = None,
) -> list[Shaped[Array, "..."]]:
    """Returns the sum over devices of this device's block, in one share for each table.

    Args:
        routes: the tables, of as many rounds each.
        term: `(p, j)` gives the block that this device adds to device j's, of table p's share.
        axis_name: the mesh axis, or several.
        dim: the dim of a block along which the blocks of one message are joined.
        unrolled: hops up to which a chain is written out: `UNROLLED`.
    """
    me = axis_index(axis_name)
    # Partial sums by offset. At an offset that is absent, the sum is this device's term alone.
    sums: list[dict[Point, Any]] = [{} for _ in routes]

    def take(p, offset):
        if offset in sums[p]:
            return sums[p].pop(offset)
        return term(p, routes[p].device_at(me, offset))

    for chain in _chains(routes):
        if len(chain) > (UNROLLED if unrolled is None else unrolled):
            _scatter_in_a_loop(routes, chain, term, take, sums, axis_name, dim)
            continue
        for number in chain:
            for p, offset, block in _arrivals(routes, number, take, axis_name, dim):
                sums[p][offset] = block + take(p, offset)
    # The own block is not sent: its sum holds the terms that arrived, or this device's term alone.
    return [take(p, route.home) for p, route in enumerate(routes)]


def gather(
    routes: Sequence[Route],
    blocks: Sequence[Shaped[Array, "..."]],
    write: Callable[..., Any],
    result: Any,
    axis_name: AxisName,
    *,
    dim: int = 0,
    unrolled: float | None = None,
) -> Any:
    """Returns `result` after `write(result, p, j, block)` of every device j's block.

    The device's own block is written first, then the others as they arrive.

    Args:
        routes: the tables, of as many rounds each, which run backwards.
        blocks: this device's, a share for each table.
        write: puts a block that has arrived into `result`, whose shapes and types it keeps.
        result: the value at the beginning.
        axis_name: the mesh axis, or several.
        dim: the dim of a block along which the blocks of one message are joined.
        unrolled: hops up to which a chain is written out: `UNROLLED`.
    """
    me = axis_index(axis_name)
    copies = [{route.home: block} for route, block in zip(routes, blocks, strict=True)]

    def copy(p, offset):
        return copies[p][offset]

    # The own block needs no message, so it is written first.
    for p, route in enumerate(routes):
        result = write(result, p, route.device_at(me, route.home), blocks[p])
    # A gather is the table backwards: the last round of the scatter runs first.
    for chain in reversed(list(_chains(routes))):
        if len(chain) > (UNROLLED if unrolled is None else unrolled):
            result = _gather_in_a_loop(routes, chain, copies, write, result, axis_name, dim)
            continue
        for number in reversed(chain):
            for p, offset, block in _arrivals(routes, number, copy, axis_name, dim, backwards=True):
                copies[p][offset] = block
                result = write(result, p, routes[p].device_at(me, offset), block)
    return result


def _chains(routes: Sequence[Route]) -> Iterator[range]:
    """Yields the rounds in runs in which each table sends on what just arrived, or pauses."""
    count, start = len(routes[0].rounds), 0
    for number in range(1, count + 1):
        if number == count or not all(_hands_on(route, number) for route in routes):
            yield range(start, number)
            start = number


def _hands_on(route: Route, number: int) -> bool:
    """Returns whether a round sends on, by the same step, the blocks of the round before."""
    before, now = list(route.rounds[number - 1].items()), list(route.rounds[number].items())
    if len(before) != 1 or len(now) != 1:
        return before == now == []
    (step, offsets), (next_step, next_offsets) = *before, *now
    return step == next_step and next_offsets == tuple(route.offset_after(o, step) for o in offsets)


def _arrivals(
    routes, number: int, take, axis_name, dim: int, *, backwards: bool = False
) -> list[tuple[int, Point, Any]]:
    """Returns the blocks that arrive in a round: (table, offset, block)."""
    arrivals = []
    for p, route in enumerate(routes):
        for step, offsets in route.rounds[number].items():
            after = [route.offset_after(o, step) for o in offsets]
            # A gather sends each block back along the way on which its sum came.
            leaving, arriving = (after, offsets) if backwards else (offsets, after)
            message = _joined([take(p, o) for o in leaving], dim)
            message = _send(message, axis_name, route.pairs(step, back=backwards))
            blocks = _split(message, len(arriving), dim)
            arrivals += [(p, o, block) for o, block in zip(arriving, blocks, strict=True)]
    return arrivals


def _scatter_in_a_loop(routes, chain: range, term, take, sums, axis_name, dim: int) -> None:
    """Runs a chain of a scatter as a loop: a trip is a hop, after which own terms are added."""
    me, messages, length = axis_index(axis_name), _chain_messages(routes, chain), len(chain)

    def terms_by_trip(p, step, offsets):
        def offsets_after(trips):
            return [routes[p].offset_after(o, step, trips) for o in offsets]

        def own_terms(trip):
            blocks = [term(p, routes[p].device_at(me, o)) for o in offsets_after(trip + 1)]
            return _joined(blocks, dim)

        offsets_met = [offsets_after(trips) for trips in range(1, length + 1)]
        if not any(o in sums[p] for met in offsets_met for o in met):
            return own_terms
        # A later chain adds to partial sums, which the loop must index: they are stacked.
        by_trip = [_joined([take(p, o) for o in met], dim) for met in offsets_met]
        return _indexed_by_trip([jnp.stack(pieces) for pieces in zip(*by_trip, strict=True)])

    terms = {p: terms_by_trip(p, step, offsets) for p, step, offsets in messages}

    def hop(trip, partial_sums):
        arrived = {}
        for p, step, _ in messages:
            arrived[p] = _send(partial_sums[p], axis_name, routes[p].pairs(step))
        return {p: jax.tree.map(jnp.add, arrived[p], terms[p](trip)) for p in arrived}

    first = {p: _joined([take(p, o) for o in offsets], dim) for p, _, offsets in messages}
    # The carry holds one message for each table, so the loop's memory does not grow with n.
    last = _loop(length, hop, first)
    for p, step, offsets in messages:
        for offset, block in zip(offsets, _split(last[p], len(offsets), dim), strict=True):
            sums[p][routes[p].offset_after(offset, step, length)] = block


def _indexed_by_trip(stacks: list) -> Callable[[Any], list]:
    """Returns the function from a trip to that entry of each stack."""

    def entries(trip):
        return [lax.dynamic_index_in_dim(stack, trip, 0, keepdims=False) for stack in stacks]

    return entries


def _gather_in_a_loop(routes, chain: range, copies, write, result, axis_name, dim: int) -> Any:
    """Runs a chain of a gather as a loop, backwards: a trip is a hop, then blocks are written.

    The blocks are also stacked, trip by trip, if an earlier round of the table sends them on later.
    """
    me, messages, length = axis_index(axis_name), _chain_messages(routes, chain), len(chain)
    sent_on_later = chain.start > 0

    def offsets_in(p, step, offsets, trip):
        return [routes[p].offset_after(o, step, length - 1 - trip) for o in offsets]

    def hop(trip, carry):
        blocks, stacks, result = carry
        blocks, stacks = dict(blocks), dict(stacks)
        for p, step, _ in messages:
            blocks[p] = _send(blocks[p], axis_name, routes[p].pairs(step, back=True))
        for p in stacks:
            stacks[p] = [
                lax.dynamic_update_index_in_dim(stack, block, trip, 0)
                for stack, block in zip(stacks[p], blocks[p], strict=True)
            ]
        for p, step, offsets in messages:
            arrived = _split(blocks[p], len(offsets), dim)
            for o, block in zip(offsets_in(p, step, offsets, trip), arrived, strict=True):
                result = write(result, p, routes[p].device_at(me, o), block)
        return blocks, stacks, result

    def empty_stacks(blocks):
        return [empty_like(jnp.zeros, (length, *block.shape), block) for block in blocks]

    first = {}
    for p, step, offsets in messages:
        first[p] = _joined([copies[p][o] for o in offsets_in(p, step, offsets, -1)], dim)
    stacks = {p: empty_stacks(blocks) for p, blocks in first.items() if sent_on_later}
    last, stacks, result = _loop(length, hop, (first, stacks, result))
    for p, step, offsets in messages:
        arrived = {length - 1: last[p]}
        if sent_on_later:
            arrived = {trip: [stack[trip] for stack in stacks[p]] for trip in range(length)}
        for trip, message in arrived.items():
            blocks = _split(message, len(offsets), dim)
            copies[p] |= dict(zip(offsets_in(p, step, offsets, trip), blocks, strict=True))
    return result


def _chain_messages(routes, chain: range) -> list[tuple[int, Point, tuple[Point, ...]]]:
    """Returns (table, step, offsets of the first round) for each table that sends in a chain."""
    messages = []
    for p, route in enumerate(routes):
        messages += [(p, step, offsets) for step, offsets in route.rounds[chain.start].items()]
    return messages


def _loop(length: int, hop, carry):
    # int32 bounds: with Python's integers the counter would be int64 in 64-bit mode, and the device
    # numbers that are computed from it too.
    return lax.fori_loop(np.int32(0), np.int32(length), hop, carry)


def _joined(blocks, dim: int) -> list:
    """Returns the arrays of a message: small blocks joined into one, large ones without a copy."""
    nbytes = blocks[0].size * blocks[0].dtype.itemsize
    is_joined = pieces_of(len(blocks), nbytes) < len(blocks)
    return [lax.concatenate(blocks, dim)] if is_joined else blocks


def _split(message, count: int, dim: int) -> list:
    """Returns the blocks of a message: the inverse of `_joined`."""
    return message if len(message) == count else jnp.split(message[0], count, axis=dim)


def pieces_of(count: int, nbytes: int) -> int:
    """Returns the number of permutes of a message of so many blocks of `nbytes` each."""
    return 1 if nbytes <= JOINED else count


def _send(message, axis_name, pairs) -> list:
    return [send(piece, axis_name, pairs) for piece in message]


def empty_like(
    make: Callable[..., Any], shape: Point, block: Shaped[Array, "..."]
) -> Shaped[Array, "..."]:
    """Returns an array to be filled with blocks like `block`, with its replication type."""
    if AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types and block.size:
        # Under vmap JAX 0.10 wants every operand split as the block's mapped dim is. A new array is
        # not, so it is broadcast from a number of the block.
        return lax.broadcast(block[(0,) * block.ndim], shape)
    return varying(make(shape, block.dtype), varying_axes(block))


def pin_bits(x: Shaped[Array, "*dims"]) -> Shaped[Array, "*dims"]:
    """Stops XLA from recomputing `x`, so that the local copy equals the one that was sent.

    XLA may compute a value once for the message and again inside the operation that uses it
    locally, with a product and a sum fused into one rounding. Then the last bit differs, and
    replicas drift apart in silence. `lax.optimization_barrier` forbids that. The CPU's compiler
    removes the barrier, so a loop does it there.
    """
    return lax.platform_dependent(x, cpu=cpu.pin_bits_by_loop, default=lax.optimization_barrier)


def pin_buffer(x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """Stops XLA from joining the blocks of `x` inside the operation that uses them.

    There XLA may fuse a product and a sum for some of the blocks only. The choice depends on the
    device, so replicas would drift apart.
    """
    return lax.platform_dependent(x, cpu=cpu.pin_buffer_by_loop, default=lax.optimization_barrier)


def leaf_by_leaf(function: Callable[..., Any], x: Tree, axis_name: AxisName) -> Tree:
    """Returns `function` of each array of the tree `x`.

    If hops are loops, each leaf waits for the one before: `cpu.sequence_after` says why.
    """
    leaves, structure = jax.tree.flatten(x)
    results: list[jax.Array] = []
    for leaf in leaves:
        is_unrolled = axis_size(axis_name) <= UNROLLED
        operand = leaf if is_unrolled else cpu.sequence_after(leaf, results[-1:])
        results.append(function(operand))
    return jax.tree.unflatten(structure, results)
