"""The one executor of routes: it runs tables side by side, forwards as a scatter, backwards as a gather.

A run of rounds in which each table hands on just what has come is a *chain*. A long chain is a loop, so that its compile time
does not grow with the devices; all else is written out.
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

JOINED = (
    2**16
)  # bytes of a block up to which the blocks of a message are joined; a larger one is sent sooner than copied
UNROLLED = 8  # hops up to which a chain is written out; a longer one is a loop, whose compile time does not grow with it


def scatter(
    routes: Sequence[Route],
    term: Callable[[int, Any], Shaped[Array, "..."]],
    axis_name: AxisName,
    *,
    dim: int = 0,
    unrolled: float | None = None,
) -> list[Shaped[Array, "..."]]:
    """The sum over devices of the block that belongs to each, in as many shares as there are tables side by side.

    Args:
        routes: the tables, of as many rounds each.
        term: `(p, j)`: the block that this device adds to device j's, of the share that table p carries.
        axis_name: the mesh axis, or several.
        dim: of a block, along which the blocks of one message are joined.
        unrolled: hops up to which a chain is written out: `UNROLLED`.
    """
    me = axis_index(axis_name)
    sums: list[dict[Point, Any]] = [
        {} for _ in routes
    ]  # partial sums by offset; an absent one is the own term alone

    def take(p, offset):
        return (
            sums[p].pop(offset) if offset in sums[p] else term(p, routes[p].device_at(me, offset))
        )

    for chain in _chains(routes):
        if len(chain) > (UNROLLED if unrolled is None else unrolled):
            _scatter_in_a_loop(routes, chain, term, take, sums, axis_name, dim)
            continue
        for number in chain:
            for p, offset, block in _arrivals(routes, number, take, axis_name, dim):
                sums[p][offset] = block + take(p, offset)
    return [take(p, route.home) for p, route in enumerate(routes)]


def gather(
    routes: Sequence[Route],
    blocks: Sequence[Shaped[Array, "..."]],
    keep: Callable[..., Any],
    result: Any,
    axis_name: AxisName,
    *,
    dim: int = 0,
    unrolled: float | None = None,
) -> Any:
    """`result` after `keep(result, p, j, block)` of every device j's block, in the shares that the tables carry: the own first.

    Args:
        routes: the tables, of as many rounds each, which run backwards.
        blocks: this device's, a share for each table.
        keep: puts a block that has arrived into `result`, whose shapes and types it keeps.
        result: at the beginning.
        axis_name: the mesh axis, or several.
        dim: of a block, along which the blocks of one message are joined.
        unrolled: hops up to which a chain is written out: `UNROLLED`.
    """
    me = axis_index(axis_name)
    copies = [{route.home: block} for route, block in zip(routes, blocks, strict=True)]

    def copy(p, offset):
        return copies[p][offset]

    for p, route in enumerate(routes):
        result = keep(result, p, route.device_at(me, route.home), blocks[p])
    for chain in reversed(list(_chains(routes))):
        if len(chain) > (UNROLLED if unrolled is None else unrolled):
            result = _gather_in_a_loop(routes, chain, copies, keep, result, axis_name, dim)
            continue
        for number in reversed(chain):
            for p, offset, block in _arrivals(routes, number, copy, axis_name, dim, backwards=True):
                copies[p][offset] = block
                result = keep(result, p, routes[p].device_at(me, offset), block)
    return result


def _chains(routes: Sequence[Route]) -> Iterator[range]:
    """The rounds in runs in which each table hands on just what has come, or rests."""
    count, start = len(routes[0].rounds), 0
    for number in range(1, count + 1):
        if number == count or not all(_hands_on(route, number) for route in routes):
            yield range(start, number)
            start = number


def _hands_on(route: Route, number: int) -> bool:
    """Whether a round sends on, by the same step, just the blocks that came in the round before."""
    before, now = list(route.rounds[number - 1].items()), list(route.rounds[number].items())
    if len(before) != 1 or len(now) != 1:
        return before == now == []
    (step, offsets), (next_step, next_offsets) = *before, *now
    return step == next_step and next_offsets == tuple(route.offset_after(o, step) for o in offsets)


def _arrivals(
    routes, number: int, take, axis_name, dim: int, *, backwards: bool = False
) -> list[tuple[int, Point, Any]]:
    """The blocks that come in a round: (table, offset, block)."""
    arrivals = []
    for p, route in enumerate(routes):
        for step, offsets in route.rounds[number].items():
            after = [route.offset_after(o, step) for o in offsets]
            leaving, arriving = (after, offsets) if backwards else (offsets, after)
            message = _joined([take(p, o) for o in leaving], dim)
            message = _sent(message, axis_name, route.pairs(step, back=backwards))
            blocks = _split(message, len(arriving), dim)
            arrivals += [(p, o, block) for o, block in zip(arriving, blocks, strict=True)]
    return arrivals


def _scatter_in_a_loop(routes, chain: range, term, take, sums, axis_name, dim: int) -> None:
    """A chain of a scatter as a loop. Each trip is a hop, after which the own terms of the new offsets are added."""
    me, walks = axis_index(axis_name), _walks(routes, chain)

    def own_terms(p):
        """The function from a trip to this device's terms of the blocks that have come by then."""
        step, offsets = walks[p]
        trips = range(1, len(chain) + 1)
        offsets_met = [[routes[p].offset_after(o, step, trip) for o in offsets] for trip in trips]
        if any(o in sums[p] for met in offsets_met for o in met):
            # A chain that starts late adds to partial sums, which the loop must index.
            parts = zip(
                *(_joined([take(p, o) for o in met], dim) for met in offsets_met), strict=True
            )
            stacks = [jnp.stack(part) for part in parts]
            return lambda trip: [
                lax.dynamic_index_in_dim(stack, trip, 0, keepdims=False) for stack in stacks
            ]

        def terms(trip):
            met = [routes[p].offset_after(o, step, trip + 1) for o in offsets]
            return _joined([term(p, routes[p].device_at(me, o)) for o in met], dim)

        return terms

    terms_of = {p: own_terms(p) for p in walks}

    def hop(trip, partial_sums):
        arrived = {
            p: _sent(partial_sums[p], axis_name, routes[p].pairs(step))
            for p, (step, _) in walks.items()
        }
        return {p: jax.tree.map(jnp.add, arrived[p], terms_of[p](trip)) for p in walks}

    first = {p: _joined([take(p, o) for o in offsets], dim) for p, (_, offsets) in walks.items()}
    last = _loop(len(chain), hop, first)
    for p, (step, offsets) in walks.items():
        blocks = _split(last[p], len(offsets), dim)
        for offset, block in zip(offsets, blocks, strict=True):
            sums[p][routes[p].offset_after(offset, step, len(chain))] = block


def _gather_in_a_loop(routes, chain: range, copies, keep, result, axis_name, dim: int) -> Any:
    """A chain of a gather as a loop, backwards. Each trip is a hop, after which the blocks that came are kept.

    The blocks are also stacked, trip by trip, where an earlier round of the table sends them on later.
    """
    me, walks, length = axis_index(axis_name), _walks(routes, chain), len(chain)

    def offsets_in(p, trip):
        step, offsets = walks[p]
        return [routes[p].offset_after(o, step, length - 1 - trip) for o in offsets]

    def hop(trip, carry):
        blocks, stacks, result = carry
        blocks = {
            p: _sent(blocks[p], axis_name, routes[p].pairs(step, back=True))
            for p, (step, _) in walks.items()
        }

        def stacked(stack, block):
            return lax.dynamic_update_index_in_dim(stack, block, trip, 0)

        stacks = {p: jax.tree.map(stacked, stacks[p], blocks[p]) for p in stacks}
        for p in walks:
            offsets = offsets_in(p, trip)
            for offset, block in zip(offsets, _split(blocks[p], len(offsets), dim), strict=True):
                result = keep(result, p, routes[p].device_at(me, offset), block)
        return blocks, stacks, result

    def empty_stack(block):
        return room(jnp.zeros, (length, *block.shape), block)

    starts = {
        p: [routes[p].offset_after(o, step, length) for o in offsets]
        for p, (step, offsets) in walks.items()
    }
    first = {p: _joined([copies[p][o] for o in offsets], dim) for p, offsets in starts.items()}
    sent_on_later = chain.start > 0
    stacks = {p: jax.tree.map(empty_stack, blocks) for p, blocks in first.items() if sent_on_later}
    last, stacks, result = _loop(length, hop, (first, stacks, result))
    for p, (_, offsets) in walks.items():
        arrived = (
            {trip: [stack[trip] for stack in stacks[p]] for trip in range(length)}
            if sent_on_later
            else {length - 1: last[p]}
        )
        for trip, blocks in arrived.items():
            copies[p] |= dict(
                zip(offsets_in(p, trip), _split(blocks, len(offsets), dim), strict=True)
            )
    return result


def _walks(routes, chain: range) -> dict[int, tuple[Point, tuple[Point, ...]]]:
    """For each table that sends in a chain: its step, and the offsets that it sends in the first round."""
    return {p: walk for p, route in enumerate(routes) for walk in route.rounds[chain.start].items()}


def _loop(length: int, hop, carry):
    return lax.fori_loop(np.int32(0), np.int32(length), hop, carry)


def _joined(blocks, dim: int) -> list:
    """The blocks of a message as they are sent: small ones as one array, large ones each by itself, without a copy."""
    nbytes = blocks[0].size * blocks[0].dtype.itemsize
    is_joined = pieces_of(len(blocks), nbytes) < len(blocks)
    return [lax.concatenate(blocks, dim)] if is_joined else blocks


def _split(message, count: int, dim: int) -> list:
    """The inverse of `_joined`."""
    return message if len(message) == count else jnp.split(message[0], count, axis=dim)


def pieces_of(count: int, nbytes: int) -> int:
    """The number of permutes of a message of so many blocks of `nbytes` each."""
    return 1 if nbytes <= JOINED else count


def _sent(message, axis_name, pairs) -> list:
    return [send(piece, axis_name, pairs) for piece in message]


def room(
    make: Callable[..., Any], shape: Point, block: Shaped[Array, "..."]
) -> Shaped[Array, "..."]:
    """An array to be filled with blocks like `block`, with its replication type."""
    if AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types and block.size:
        # Under vmap JAX 0.10 wants every operand split as the block's mapped dim is, and a fresh array is not.
        return lax.broadcast(block[(0,) * block.ndim], shape)
    return varying(make(shape, block.dtype), varying_axes(block))


def pin_bits(x: Shaped[Array, "*dims"]) -> Shaped[Array, "*dims"]:
    """`x`, with the same bits in the message and in the local copy.

    XLA may compute a value once for the message, and again inside the operation that uses it here, with a product and a sum fused
    into one rounding: the last bit differs, and replicas drift apart in silence. `lax.optimization_barrier` forbids it. The CPU's
    compiler sees through the barrier, so there a loop does.
    """
    return lax.platform_dependent(x, cpu=cpu.pin_bits, default=lax.optimization_barrier)


def pin_buffer(x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """`x`, joined from blocks before anything else is computed from it.

    Otherwise XLA may join the blocks inside the operation that uses them, and fuse a product and a sum there for some of the
    blocks only. Which blocks depends on the device, so replicas would drift apart.
    """
    return lax.platform_dependent(x, cpu=cpu.pin_buffer, default=lax.optimization_barrier)


def leaf_by_leaf(function: Callable[..., Any], x: Tree, axis_name: AxisName) -> Tree:
    """`function` of each array of the tree `x`. Where hops are loops, each waits for the one before (see `cpu.sequence_after`)."""
    leaves, structure = jax.tree.flatten(x)
    results: list[jax.Array] = []
    for leaf in leaves:
        operand = (
            leaf if axis_size(axis_name) <= UNROLLED else cpu.sequence_after(leaf, results[-1:])
        )
        results.append(function(operand))
    return jax.tree.unflatten(structure, results)
