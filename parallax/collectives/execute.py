"""Runs one or several tables of messages (`Route`) at the same time, forwards or backwards.

Each device is the *owner* of one block of the array. Run forwards, a table is a *scatter* (a
reduce-scatter): the partial sums of each block travel to its owner. Run backwards, a table is a
*gather*: each block travels from its owner to all devices. If several tables run at the same time,
each table carries its own share of every block. A message is a list of arrays: one for each block,
or only one if the blocks are small enough to join.

The devices form a box, such as `(2, 8)`. An *offset* is the place of a device in the box, counted
from this device. It is a `Point`: one number for each dim of the box. This device is at
`route.home`, offset 0, and `route.device_at(me, offset)` is the device at an offset. The pair
(table, offset of the owner) identifies one share of one block. A round of a `Route` is
{step: offsets}: in a scatter, each device sends to the device at offset `step` the blocks whose
owners are at `offsets` from the sender. If a block's owner is at offset o from the sender, the
owner is at `offset_after(o, step)` from the receiver. After k hops of the same step, the owner is
at `offset_after(o, step, k)` from the device that has the block. `pairs(step)` lists the messages
of one hop of a scatter as pairs (sender, receiver); `pairs(step, back=True)` lists the messages of
the same hop of a gather.

Consecutive rounds are a *chain* if, in each table, every round after the chain's first round sends
exactly the blocks that arrived in the round before, as in a ring. A long chain becomes a loop, so
that the compile time does not grow with the number of devices. Other rounds are written out.
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

# The blocks of a message are joined into one array if each has at most this many bytes. Joining
# copies them; for a larger block the copy would take longer than a permute of its own.
JOINED = 2**16
# Chains are written out up to this number of rounds. The compile time of a loop does not grow.
UNROLLED = 8


def scatter(
    routes: Sequence[Route],
    term: Callable[[int, Any], Shaped[Array, "..."]],
    axis_name: AxisName,
    *,
    dim: int = 0,
    unrolled: float | None = None,
) -> list[Shaped[Array, "..."]]:
    """Returns this device's block of the sum over all devices, as a list of shares, one for each
    table.

    Args:
        routes: the tables, all with the same number of rounds.
        term: `term(table, j)` returns this device's term of the sum for device j's block, cut to
            the share that `routes[table]` carries.
        axis_name: the mesh axis, or several.
        dim: the dim of a block along which the blocks of one message are joined.
        unrolled: the largest number of rounds of a chain (see `_chains`) that are unrolled. A
            longer chain runs as a loop. By default `UNROLLED`.
    """
    me = axis_index(axis_name)
    # For each table, the partial sums that have arrived, by offset. If an offset is missing, no sum
    # has arrived there: its partial sum is only this device's term.
    sums: list[dict[Point, Any]] = [{} for _ in routes]

    def take(table, offset):
        """Returns the partial sum for the device at an offset, and removes it from `sums`.

        If no partial sum has arrived for that device, it returns this device's own term.
        """
        if offset in sums[table]:
            return sums[table].pop(offset)
        return term(table, routes[table].device_at(me, offset))

    for chain in _chains(routes):
        if len(chain) > (UNROLLED if unrolled is None else unrolled):
            # `_scatter_in_a_loop` updates `sums`, as the rounds below do.
            _scatter_in_a_loop(routes, chain, term, take, sums, axis_name, dim)
            continue
        for number in chain:
            for table, offset, block in _arrivals(routes, number, take, axis_name, dim):
                # `block` is the partial sum that arrived.
                sums[table][offset] = block + take(table, offset)
    # The own block is not sent: its sum has the terms that arrived, or only this device's term.
    return [take(table, route.home) for table, route in enumerate(routes)]


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
    """Calls `result = write(result, table, j, block)` for every device j and every table, and
    returns the last result.

    The device's own block is written first, then the other devices' blocks as they arrive.

    Args:
        routes: the tables, which run backwards; all have the same number of rounds.
        blocks: the shares of this device's block, one for each table.
        write: `write(result, table, j, block)` returns `result` after `block` is written into it.
            `block` is the share of device j's block that `routes[table]` carries. `write` must keep
            the shapes and types of `result`.
        result: the first argument of the first `write`.
        axis_name: the mesh axis, or several.
        dim: the dim of a block along which the blocks of one message are joined.
        unrolled: the largest number of rounds of a chain (see `_chains`) that are unrolled. A
            longer chain runs as a loop. By default `UNROLLED`.
    """
    me = axis_index(axis_name)
    # `copies[table][offset]` is this device's copy of the block whose owner is at `offset`.
    copies = [{route.home: block} for route, block in zip(routes, blocks, strict=True)]

    def copy(table, offset):
        return copies[table][offset]

    # The own block needs no message, so it is written first.
    for table, route in enumerate(routes):
        result = write(result, table, route.device_at(me, route.home), blocks[table])
    # A gather runs the table backwards: the last round of the scatter comes first.
    for chain in reversed(list(_chains(routes))):
        if len(chain) > (UNROLLED if unrolled is None else unrolled):
            # `_gather_in_a_loop` adds to `copies` the blocks that a later round may pass on.
            result = _gather_in_a_loop(routes, chain, copies, write, result, axis_name, dim)
            continue
        for number in reversed(chain):
            arrivals = _arrivals(routes, number, copy, axis_name, dim, backwards=True)
            for table, offset, block in arrivals:
                copies[table][offset] = block  # a later round may pass it on
                result = write(result, table, routes[table].device_at(me, offset), block)
    return result


def _chains(routes: Sequence[Route]) -> Iterator[range]:
    """Yields the chains (consecutive rounds that can run as a loop), as ranges of round numbers. A
    single round may be a chain.

    After the first round of a chain, a table sends in each round exactly the blocks that arrived in
    the round before. If no block arrived, the table sends nothing. A round that breaks this rule
    begins a new chain.
    """
    # `_hands_on` tells whether a round follows this rule, with the step of the round before.
    count, start = len(routes[0].rounds), 0
    for number in range(1, count + 1):
        if number == count or not all(_hands_on(route, number) for route in routes):
            yield range(start, number)
            start = number


def _hands_on(route: Route, number: int) -> bool:
    """Returns whether round `number` has the same step as the round before, and sends exactly the
    blocks that arrived in the round before.

    A step is the receiver's offset from the sender. The result is False if one of the two rounds
    has several steps, or if only one of them sends anything. It is True if both send nothing.
    """
    before, now = list(route.rounds[number - 1].items()), list(route.rounds[number].items())
    if len(before) != 1 or len(now) != 1:
        return before == now == []
    (step, offsets), (next_step, next_offsets) = *before, *now
    return step == next_step and next_offsets == tuple(route.offset_after(o, step) for o in offsets)


def _arrivals(
    routes, number: int, take, axis_name, dim: int, *, backwards: bool = False
) -> list[tuple[int, Point, Any]]:
    """Sends the messages of round `number` of all tables, and returns the blocks that arrive.

    Each arrival is (table, offset of the block's owner, block). `take(table, offset)` gives the
    block to send, which belongs to the device at that offset. Small blocks are joined along `dim`.
    """
    arrivals = []
    for table, route in enumerate(routes):
        for step, offsets in route.rounds[number].items():
            # A block's owner is at `offsets` from the sender, and at `after` from the receiver.
            after = [route.offset_after(o, step) for o in offsets]
            # A gather sends each block back along the way on which its sum came.
            leaving, arriving = (after, offsets) if backwards else (offsets, after)
            message = _joined([take(table, offset) for offset in leaving], dim)
            message = _send(message, axis_name, route.pairs(step, back=backwards))
            blocks = _split(message, len(arriving), dim)
            for offset, block in zip(arriving, blocks, strict=True):
                arrivals.append((table, offset, block))
    return arrivals


def _scatter_in_a_loop(routes, chain: range, term, take, sums, axis_name, dim: int) -> None:
    """Runs a chain of rounds of a scatter as a loop, one hop per iteration, and updates `sums`.

    Each iteration sends the partial sums of the iteration before, and a device adds its own terms
    to the partial sums that arrive. `sums` has the partial sums from earlier chains, by table and
    offset. `take(table, offset)` removes and returns one of them, or returns this device's term if
    there is none. Each table carries its own share of every block: `term(table, j)` returns this
    device's term for device j's block, cut to the share of `routes[table]`. The blocks of one
    message are joined along `dim`.
    """
    me, messages, length = axis_index(axis_name), _chain_messages(routes, chain), len(chain)

    def terms_by_trip(table, step, offsets):
        """Returns a function of `trip`, the number of an iteration. The function returns the terms
        that this device adds to the partial sums that arrive in this iteration for `table`.

        `step` and `offsets`, from `_chain_messages`, are those of the first round in the loop.
        """
        route = routes[table]

        def offsets_after(trips):
            return [route.offset_after(offset, step, trips) for offset in offsets]

        def own_terms(trip):
            """Returns the terms that this device adds to the partial sums of iteration `trip`."""
            arriving = offsets_after(trip + 1)
            return _joined([term(table, route.device_at(me, offset)) for offset in arriving], dim)

        offsets_by_trip = [offsets_after(trips) for trips in range(1, length + 1)]
        # If no earlier chain left partial sums for these devices, a device adds only its own terms.
        if not any(offset in sums[table] for arriving in offsets_by_trip for offset in arriving):
            return own_terms
        # The iteration's number, `trip`, is traced, so it cannot index `sums`, a dict. So the sums
        # of all iterations are stacked: `by_trip` has the arrays of a message for each iteration.
        # Such a sum contains this device's own term already, so it is added instead of the term.
        by_trip = [_joined([take(table, o) for o in arriving], dim) for arriving in offsets_by_trip]
        return _indexed_by_trip([jnp.stack(pieces) for pieces in zip(*by_trip, strict=True)])

    terms = {table: terms_by_trip(table, step, offsets) for table, step, offsets in messages}

    def hop(trip, partial_sums):
        """Returns the partial sums of each table after one hop, with this device's terms added.

        `messages` (see `_chain_messages`) has (table, step, offsets) for each table that sends. A
        table has the same `step`, the offset of the receiver, in all rounds of the loop.
        `terms[table](trip)` are the terms to add in iteration `trip`.
        """
        arrived = {}
        for table, step, _ in messages:
            arrived[table] = _send(partial_sums[table], axis_name, routes[table].pairs(step))
        return {
            table: jax.tree.map(jnp.add, message, terms[table](trip))
            for table, message in arrived.items()
        }

    first = {}
    for table, _, offsets in messages:
        first[table] = _joined([take(table, offset) for offset in offsets], dim)
    # The carry holds one message for each table, so the loop's memory does not grow with n.
    last = _loop(length, hop, first)
    for table, step, offsets in messages:
        for offset, block in zip(offsets, _split(last[table], len(offsets), dim), strict=True):
            # `hop` has added this device's term already.
            sums[table][routes[table].offset_after(offset, step, length)] = block


def _indexed_by_trip(stacks: list) -> Callable[[Any], list]:
    """Returns a function of `trip` that returns entry number `trip` of each of the stacked
    arrays."""

    def entries(trip):
        return [lax.dynamic_index_in_dim(stack, trip, 0, keepdims=False) for stack in stacks]

    return entries


def _gather_in_a_loop(routes, chain: range, copies, write, result, axis_name, dim: int) -> Any:
    """Runs a chain of rounds of a gather as a loop. Returns the new `result`, and updates `copies`.

    Each iteration is one hop: each table sends the blocks that arrived in the iteration before, and
    the blocks that arrive in this iteration are written into `result`. `copies[table][offset]` is
    this device's copy of the block whose owner is at `offset` from this device. `write`, `result`
    and `dim` are as in `gather`: `write(result, table, j, block)` returns `result` with device j's
    block written into it.

    A gather runs the table backwards: the loop begins with the chain's last round, and the rounds
    that stand before the chain in the table run after the loop. These rounds may pass on any block
    that arrives in the loop. So if the table has such rounds, the loop keeps every message that
    arrives. For each array of a message there is a stack of shape `[length, *array]`, where
    `length` is the number of iterations; entry k is the array that arrives in iteration k.
    """
    me, messages, length = axis_index(axis_name), _chain_messages(routes, chain), len(chain)
    sent_on_later = chain.start > 0

    def owners_after(trip, table, step, offsets):
        """Returns the offsets, from this device, of the owners of the blocks that arrive in
        iteration `trip`. `step` and `offsets`, from `_chain_messages`, are those of the first round
        of `chain`."""
        # A gather runs backwards: iteration `trip` is round `length - 1 - trip` of the chain.
        return [routes[table].offset_after(offset, step, length - 1 - trip) for offset in offsets]

    def hop(trip, carry):
        """Returns the carry after one hop: the messages that arrived, the stacks of all arrived
        blocks, and the result.

        `messages` (see `_chain_messages`) has (table, step, offsets) for each table that sends. A
        table has the same `step` in all rounds of the loop. In a gather, the message of a table
        comes from the device at offset `step`. `stacks` keep each arrived block for rounds after
        the loop, and are empty if no rounds follow.
        """
        last_messages, stacks, result = carry
        arrived = {}
        for table, step, _ in messages:
            pairs = routes[table].pairs(step, back=True)
            arrived[table] = _send(last_messages[table], axis_name, pairs)
        new_stacks = {}
        for table, table_stacks in stacks.items():
            new_stacks[table] = [
                lax.dynamic_update_index_in_dim(stack, piece, trip, 0)
                for stack, piece in zip(table_stacks, arrived[table], strict=True)
            ]
        for table, step, offsets in messages:
            owners = owners_after(trip, table, step, offsets)
            blocks = _split(arrived[table], len(offsets), dim)
            for offset, block in zip(owners, blocks, strict=True):
                result = write(result, table, routes[table].device_at(me, offset), block)
        return arrived, new_stacks, result

    def empty_stacks(message):
        return [empty_like(jnp.zeros, (length, *piece.shape), piece) for piece in message]

    # Each iteration sends what arrived in the iteration before. Iteration 0 sends the blocks that
    # would have arrived in an iteration -1.
    first = {}
    for table, step, offsets in messages:
        owners = owners_after(-1, table, step, offsets)
        first[table] = _joined([copies[table][offset] for offset in owners], dim)
    stacks = {table: empty_stacks(message) for table, message in first.items() if sent_on_later}
    last, stacks, result = _loop(length, hop, (first, stacks, result))
    for table, step, offsets in messages:
        # `copies` gets the blocks of all iterations if a later round may send them. Otherwise there
        # are no stacks: `copies` gets only the last message, and nothing reads it.
        by_trip = {length - 1: last[table]}
        if sent_on_later:
            by_trip = {trip: [stack[trip] for stack in stacks[table]] for trip in range(length)}
        for trip, message in by_trip.items():
            owners = owners_after(trip, table, step, offsets)
            copies[table] |= dict(zip(owners, _split(message, len(offsets), dim), strict=True))
    return result


def _chain_messages(routes, chain: range) -> list[tuple[int, Point, tuple[Point, ...]]]:
    """Returns (table, step, offsets) for each table that sends in the first round of `chain`.

    A device sends to the device at offset `step` the blocks whose owners are at `offsets`. The
    first round determines the other rounds: each of them has the same `step`, and sends the blocks
    that arrived in the round before. An offset o of one round becomes `route.offset_after(o, step)`
    in the next round.
    """
    messages = []
    for table, route in enumerate(routes):
        for step, offsets in route.rounds[chain.start].items():
            messages.append((table, step, offsets))
    return messages


def _loop(length: int, hop, carry):
    """Returns the carry after `hop(trip, carry)` for each `trip` below `length`."""
    # int32 bounds: with Python's integers the counter would be int64 in 64-bit mode, and so would
    # the device numbers that are computed from it.
    return lax.fori_loop(np.int32(0), np.int32(length), hop, carry)


def _joined(blocks, dim: int) -> list:
    """Returns the arrays of a message: one array, joined along `dim`, if each block has at most
    `JOINED` bytes; else the blocks themselves. All blocks of a message have the same size."""
    nbytes = blocks[0].size * blocks[0].dtype.itemsize
    # `pieces_of` is the number of permutes for the message. One block is not joined.
    is_joined = pieces_of(len(blocks), nbytes) < len(blocks)
    return [lax.concatenate(blocks, dim)] if is_joined else blocks


def _split(message, count: int, dim: int) -> list:
    """Returns the `count` blocks of a message: the inverse of `_joined`."""
    # With one array for each block, none were joined; otherwise there is one array.
    return message if len(message) == count else jnp.split(message[0], count, axis=dim)


def pieces_of(count: int, nbytes: int) -> int:
    """Returns how many permutes are needed to send one message of `count` blocks of `nbytes` bytes
    each."""
    return 1 if nbytes <= JOINED else count


def _send(message, axis_name, pairs) -> list:
    """Returns the arrays of the message that arrives; each is sent by a permute of its own."""
    return [send(piece, axis_name, pairs) for piece in message]


def empty_like(
    make: Callable[..., Any], shape: tuple[int, ...], block: Shaped[Array, "..."]
) -> Shaped[Array, "..."]:
    """Returns an array of this shape with the dtype and varying axes of `block`.

    The caller overwrites the whole array, so its numbers do not matter. `make(shape, dtype)` makes
    an array without a sharding. On a mesh with Explicit axes the array may need a sharding: there
    one element of `block` is broadcast instead, unless `block` is empty.
    """
    # An empty block has no element to broadcast.
    if AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types and block.size:
        # Under a vmap over a sharded dim, JAX 0.10 requires the same sharding of every operand. A
        # new array has no sharding. So it is broadcast from one element of the block, which has a
        # sharding.
        return lax.broadcast(block[(0,) * block.ndim], shape)
    return varying(make(shape, block.dtype), varying_axes(block))


def pin_bits(x: Shaped[Array, "*dims"]) -> Shaped[Array, "*dims"]:
    """Returns `x`, which XLA cannot recompute: the `x` that a device uses has the same bits as the
    `x` that it sends.

    XLA may compute a value once for the message, and again inside the operation that uses it
    locally. There XLA may fuse a product and a sum, and round only once. Then the last bit differs,
    and replicas drift apart in silence. `lax.optimization_barrier` forbids XLA to compute the value
    again. The CPU's compiler removes the barrier, so on a CPU a loop takes the barrier's place.
    """
    return lax.platform_dependent(x, cpu=cpu.pin_bits_by_loop, default=lax.optimization_barrier)


def pin_buffer(x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """Returns `x`, an array that a gather wrote block by block, behind an optimization barrier. So
    XLA cannot fuse the writes into the operation that uses the result.

    Without the barrier, XLA may fuse some of the writes, such as the last, with that operation. In
    the fused code, a product and a sum of the operation may be rounded once instead of twice. The
    block written last is a different block on each device. So devices would round equal numbers
    differently, and replicas would drift apart. The CPU's compiler removes an optimization barrier,
    so on a CPU a loop takes the barrier's place.
    """
    return lax.platform_dependent(x, cpu=cpu.pin_buffer_by_loop, default=lax.optimization_barrier)


def leaf_by_leaf(function: Callable[..., Any], x: Tree, axis_name: AxisName) -> Tree:
    """Returns `function` of each array of the tree `x`.

    With more than `UNROLLED` devices, the hops may run in a loop. Then, on a CPU, each leaf waits
    for the leaf before it. Otherwise collectives of two leaves could run at the same time, which
    aborts the process (see `cpu`).
    """
    leaves, structure = jax.tree.flatten(x)
    results: list[jax.Array] = []
    for leaf in leaves:
        is_unrolled = axis_size(axis_name) <= UNROLLED
        # `results[-1:]` has the result before; it is empty for the first leaf, which does not wait.
        operand = leaf if is_unrolled else cpu.sequence_after(leaf, results[-1:])
        results.append(function(operand))
    return jax.tree.unflatten(structure, results)
