"""A collective as a table: who sends which block how far, checked when it is made, and run by one function.

Number a device's blocks by their *offset* from it: the block at offset o belongs to the device o further on. The devices are a
box: `(16,)`, or `(2, 8)` for two machines of eight; offsets and steps are its points, added dim by dim, and of a box of one dim
plain numbers. A *round* is {step: offsets}: those blocks go to the device `step` further on, where offset o has become o - step.
The messages of a round do not wait for each other. Blocks of one step travel as one message, for which small ones are joined.

    Route((n,), [{1: [n - h]} for h in range(1, n)])    # a ring: each device hands one block to its neighbour in each round

In a *scatter* a block that arrives is added to the one that is there, so that each ends, summed, on the device that owns it.
A *gather* is the same table backwards: each device's block is copied to all others. The two are each other's transpose, and one
after the other they are an all-reduce. `mover` makes of a table the drop-in functions, types and gradients included:

    @mover
    def direct(n):
        return Route((n,), [{k: [k]} for k in range(1, n)])

    direct.all_reduce(x, "data")                        # for lax.psum(x, "data")

A device does the same as all others, each from its own place: every message of a step goes equally far. A collective in which the
distance depends on the device is no `Route` (Swing: De Sensi et al., NSDI 2024, where odd and even devices send opposite ways).

Blocks are slices along one of the array's own dims, read where they lie and written once, so that no layout changes: on a TPU an
array of two dims or more is stored in tiles of 8 x 128, and flattening it copies it.
"""

import csv
import functools
import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType
from jaxtyping import Array, Shaped

from parallax.collectives import cpu, drop_in
from parallax.collectives.axis import AllToAll, Mover
from parallax.collectives.cost import Message, Round, devices, priced
from parallax.collectives.types import AxisName, axes, index, moved, size, summand, varying, varying_axes
from parallax.typed import PyTree

Tree = TypeVar("Tree", bound=PyTree)
Point = tuple[int, ...]

BUNDLED = 2**16  # bytes of a block up to which those of a message are joined; a larger one is sooner sent by itself than copied
UNROLLED = 8  # hops up to which a chain is written out; a longer one is a loop, whose compile time does not grow with it


@dataclass(frozen=True)
class Route:
    """Who sends which block how far: a reduce-scatter, backwards an all-gather, both an all-reduce.

    Args:
        shape: the box that the devices make; they are numbered in row-major order.
        rounds: of each {step: offsets}; a round may be empty. Points of a box of one dim may be plain numbers, and a step may go
            back: -1 for n - 1.

    Raises:
        ValueError: a block is sent twice, or arrives where it was sent away, or never comes home; or a point is outside the box.
    """

    shape: Point
    rounds: Sequence[Mapping[Any, Sequence[Any]]]

    def __post_init__(self):
        point = lambda at: (at,) if isinstance(at, int) else tuple(at)
        rounds = tuple({point(step): tuple(map(point, sent)) for step, sent in sends.items()} for sends in self.rounds)
        object.__setattr__(self, "shape", tuple(self.shape))
        object.__setattr__(self, "rounds", rounds)
        _check(self)

    @property
    def n(self) -> int:
        """The number of devices."""
        return math.prod(self.shape)

    @property
    def home(self) -> Point:
        """The offset of a device's own block."""
        return (0,) * len(self.shape)

    def points(self) -> list[Point]:
        """All offsets, in row-major order."""
        return list(itertools.product(*map(range, self.shape)))

    def moved(self, offset: Sequence[Any], step: Point, times: Any = 1) -> tuple[Any, ...]:
        """The offset that a block has once it has gone `step` further, so many times."""
        return tuple([(o - times * s) % length for o, s, length in zip(offset, step, self.shape, strict=True)])

    def number(self, point: Sequence[int]) -> int:
        """The number of the device at a point of the box."""
        return functools.reduce(lambda before, at: before * at[1] + at[0] % at[1], zip(point, self.shape, strict=True), 0)

    def place(self, me: Any, offset: Sequence[Any]) -> Any:
        """The number of the device at an offset from device `me`, which may be traced, as may the offset."""
        number, stride = 0, self.n
        for o, length in zip(offset, self.shape, strict=True):
            whole, stride = stride, stride // length
            at = lax.div(lax.rem(me, np.int32(whole)), np.int32(stride))
            number += lax.rem(at + o, np.int32(length)) * stride
        return number

    def pairs(self, step: Point, *, back: bool = False) -> list[tuple[int, int]]:
        """Who sends to whom in a message of this step: (from, to) for every device."""
        ahead = lambda point: self.number([at + s for at, s in zip(point, step, strict=True)])
        pairs = [(i, ahead(point)) for i, point in enumerate(self.points())]
        return sorted((j, i) for i, j in pairs) if back else pairs

    def traffic(self) -> dict[tuple[int, int], int]:
        """The blocks that device i sends to device j in a reduce-scatter, for every pair (i, j) that talks."""
        found: dict[tuple[int, int], int] = {}
        for step, offsets in (item for sends in self.rounds for item in sends.items()):
            for pair in self.pairs(step):
                found[pair] = found.get(pair, 0) + len(offsets)
        return found

    def hops(self, *, back: bool = False) -> list[int]:
        """After each round, in the order in which they run, the messages behind the block that took most so far."""
        return self._hops[back]

    @functools.cached_property
    def _hops(self) -> tuple[list[int], list[int]]:
        return _hops(self, False), _hops(self, True)


def _hops(route: Route, back: bool) -> list[int]:
    took: dict[Point, int] = {}
    longest = [0]
    for sends in reversed(route.rounds) if back else route.rounds:
        come = []
        for step, offsets in sends.items():
            there = [route.moved(o, step) for o in offsets]
            hops = 1 + max((took.get(o, 0) for o in (there if back else offsets)), default=0)
            come += [(o, hops) for o in (offsets if back else there)]
        for o, hops in come:
            took[o] = max(took.get(o, 0), hops)
        longest.append(max([longest[-1], *(hops for _, hops in come)]))
    return longest[1:]


def _check(route: Route) -> None:
    """Every block but the own one leaves once, after all that is added to it has come: then each term comes home once."""
    box = route.shape
    if not box or any(length < 1 for length in box):
        raise ValueError(f"Route needs a box of one dim or more, of 1 or more devices each; got shape {box}.")
    sent: dict[Point, int] = {}
    for r, sends in enumerate(route.rounds):
        for step, offsets in sends.items():
            if len(step) != len(box) or any(not -length < s < length for s, length in zip(step, box, strict=True)):
                raise ValueError(f"Route: round {r} has the step {_spelt(step)}, which is outside the box {box}.")
            for o in offsets:
                if problem := _unsendable(route, o, r, sent):
                    raise ValueError(f"Route: round {r} sends block {_spelt(o)}{problem}")
                sent[o] = r
        for there, o in [(route.moved(o, step), o) for step, offsets in sends.items() for o in offsets]:
            if there in sent:
                raise ValueError(
                    f"Route: in round {r} block {_spelt(o)} arrives at offset {_spelt(there)}, whose block was sent away in "
                    f"round {sent[there]}. Let it arrive before, or go elsewhere."
                )
    if len(sent) < route.n - 1:
        left = [o for o in route.points()[1:] if o not in sent]
        names = ", ".join(map(_spelt, left[:3])) + ", ..." * (len(left) > 3)
        raise ValueError(
            f"Route: in {len(route.rounds)} rounds the blocks {names} of the box {box} are never sent, and so never come home."
        )


def _unsendable(route: Route, o: Point, r: int, sent: Mapping[Point, int]) -> str:
    """Why round r cannot send the block at an offset; "" if it can."""
    box = route.shape
    if len(o) != len(box) or any(not 0 <= at < length for at, length in zip(o, box, strict=True)):
        return f", which is no point of the box {box}. Offsets run from 0 to the dim's size - 1."
    if o == route.home:
        return ", which is at home already: a device keeps the block that belongs to it."
    if sent.get(o) == r:
        return " twice, so that its terms would be counted twice. Send it once."
    return f" a second time: it was sent away in round {sent[o]}. Send it once, after all has come." if o in sent else ""


def _spelt(point: Point) -> str:
    return str(point[0] if len(point) == 1 else point)


def to_csv(route: Route, path: str | os.PathLike[str]) -> None:
    """Write a table as a file: a first line with the box, then a line a block sent: round, step, offset. Points are `1 0`."""
    words = lambda point: " ".join(map(str, point))
    with open(path, "w", encoding="utf-8", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(["box", words(route.shape), len(route.rounds)])
        lines.writerow(["round", "step", "offset"])
        for r, sends in enumerate(route.rounds):
            lines.writerows([r, words(step), words(o)] for step, offsets in sends.items() for o in offsets)


def from_csv(path: str | os.PathLike[str]) -> Route:
    """The table in a file of `to_csv`. Raises `ValueError` where the file is none, or as `Route` does."""
    with open(path, encoding="utf-8", newline="") as file:
        lines = list(csv.reader(file))
    point = lambda words: tuple(map(int, words.split()))
    try:
        (_, shape, count), _, *blocks = lines
        rounds: list[dict[Point, list[Point]]] = [{} for _ in range(int(count))]
        for r, step, offset in blocks:
            rounds[int(r)].setdefault(point(step), []).append(point(offset))
    except (ValueError, IndexError) as error:
        raise ValueError(
            f"from_csv: {path} is no table. It needs the lines 'box,SHAPE,ROUNDS' and 'round,step,offset', then one a block."
        ) from error
    return Route(point(shape), rounds)


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
        term: `(p, j)`: what this device adds to device j's block, of the share that table p carries.
        axis_name: the mesh axis, or several.
        dim: of a block, along which those of one message are joined.
        unrolled: hops up to which a chain is written out: `UNROLLED`.
    """
    me = index(axis_name)
    held: list[dict[Point, Any]] = [{} for _ in routes]  # the partial sums, by offset; where there is none yet, the own term
    take = lambda p, o: held[p].pop(o) if o in held[p] else term(p, routes[p].place(me, o))
    for run in _runs(routes):
        if len(run) > (UNROLLED if unrolled is None else unrolled):
            _scatter_in_a_loop(routes, run, term, take, held, axis_name, dim)
            continue
        for r in run:
            for p, o, block in _come(routes, r, take, axis_name, dim):
                held[p][o] = block + take(p, o)
    return [take(p, route.home) for p, route in enumerate(routes)]


def gather(
    routes: Sequence[Route],
    blocks: Sequence[Shaped[Array, "..."]],
    keep: Callable[..., Any],
    kept: Any,
    axis_name: AxisName,
    *,
    dim: int = 0,
    unrolled: float | None = None,
) -> Any:
    """`kept` after `keep(kept, p, j, block)` of every device j's block, in the shares that the tables carry: the own one first.

    Args:
        routes: the tables, of as many rounds each, which run backwards.
        blocks: this device's, a share for each table.
        keep: what is done with a block that has come. `kept` keeps its shapes and types.
        kept: what it begins with.
        axis_name: the mesh axis, or several.
        dim: of a block, along which those of one message are joined.
        unrolled: hops up to which a chain is written out: `UNROLLED`.
    """
    me = index(axis_name)
    held = [{route.home: block} for route, block in zip(routes, blocks, strict=True)]
    for p, route in enumerate(routes):
        kept = keep(kept, p, route.place(me, route.home), blocks[p])
    for run in reversed(list(_runs(routes))):
        if len(run) > (UNROLLED if unrolled is None else unrolled):
            kept = _gather_in_a_loop(routes, run, held, keep, kept, axis_name, dim)
            continue
        for r in reversed(run):
            for p, o, block in _come(routes, r, lambda p, o: held[p][o], axis_name, dim, back=True):
                held[p][o] = block
                kept = keep(kept, p, routes[p].place(me, o), block)
    return kept


def _runs(routes: Sequence[Route]) -> Iterator[range]:
    """The rounds, in runs in which each table hands on just what has come (a chain), or rests."""
    count, start = len(routes[0].rounds), 0
    for r in range(1, count + 1):
        if r == count or not all(_hands_on(route, r) for route in routes):
            yield range(start, r)
            start = r


def _hands_on(route: Route, r: int) -> bool:
    before, now = list(route.rounds[r - 1].items()), list(route.rounds[r].items())
    if len(before) != 1 or len(now) != 1:
        return before == now == []
    (step, offsets), (next_step, next_offsets) = *before, *now
    return step == next_step and next_offsets == tuple(route.moved(o, step) for o in offsets)


def _come(routes, r: int, take, axis_name, dim: int, *, back: bool = False) -> list[tuple[int, Point, Any]]:
    """What comes in round r: (table, offset, block)."""
    come = []
    for p, route in enumerate(routes):
        for step, offsets in route.rounds[r].items():
            there = [route.moved(o, step) for o in offsets]
            go, to = (there, offsets) if back else (offsets, there)
            message = _sent(_joined([take(p, o) for o in go], dim), axis_name, route.pairs(step, back=back))
            come += [(p, o, block) for o, block in zip(to, _apart(message, len(to), dim), strict=True)]
    return come


def _scatter_in_a_loop(routes, run: range, term, take, held, axis_name, dim: int) -> None:
    """A run of rounds as a loop: a hop, and the terms of the offsets that it comes to."""
    me, walks = index(axis_name), _walks(routes, run)
    terms = {}
    for p, (step, offsets) in walks.items():
        met = [[routes[p].moved(o, step, h) for o in offsets] for h in range(1, len(run) + 1)]
        if any(o in held[p] for at in met for o in at):  # a chain that starts late adds to what has been summed
            sums = [jnp.stack(parts) for parts in zip(*(_joined([take(p, o) for o in at], dim) for at in met), strict=True)]
            terms[p] = lambda h, sums=sums: [lax.dynamic_index_in_dim(parts, h, 0, keepdims=False) for parts in sums]
        else:
            terms[p] = lambda h, p=p, step=step, offsets=offsets: _joined(
                [term(p, routes[p].place(me, routes[p].moved(o, step, h + 1))) for o in offsets], dim
            )

    def hop(h, sums):
        moved = {p: _sent(sums[p], axis_name, routes[p].pairs(step)) for p, (step, _) in walks.items()}
        return {p: jax.tree.map(jnp.add, moved[p], terms[p](h)) for p in walks}

    first = {p: _joined([take(p, o) for o in offsets], dim) for p, (_, offsets) in walks.items()}
    last = _loop(len(run), hop, first)
    for p, (step, offsets) in walks.items():
        blocks = _apart(last[p], len(offsets), dim)
        held[p] |= {routes[p].moved(o, step, len(run)): block for o, block in zip(offsets, blocks, strict=True)}


def _gather_in_a_loop(routes, run: range, held, keep, kept, axis_name, dim: int) -> Any:
    """A run of rounds as a loop, backwards: a hop, and what has come is kept; also apart, where it is sent on later."""
    me, walks, length = index(axis_name), _walks(routes, run), len(run)
    come_to = lambda p, h: [routes[p].moved(o, walks[p][0], length - 1 - h) for o in walks[p][1]]  # in hop h = 0, 1 ..

    def hop(h, carry):
        blocks, stores, kept = carry
        blocks = {p: _sent(blocks[p], axis_name, routes[p].pairs(step, back=True)) for p, (step, _) in walks.items()}
        store = lambda store, block: lax.dynamic_update_index_in_dim(store, block, h, 0)
        stores = {p: jax.tree.map(store, stores[p], blocks[p]) for p in stores}
        for p in walks:
            offsets = come_to(p, h)
            for o, block in zip(offsets, _apart(blocks[p], len(offsets), dim), strict=True):
                kept = keep(kept, p, routes[p].place(me, o), block)
        return blocks, stores, kept

    starts = {p: [routes[p].moved(o, step, length) for o in offsets] for p, (step, offsets) in walks.items()}
    first = {p: _joined([held[p][o] for o in offsets], dim) for p, offsets in starts.items()}
    later = run.start > 0
    empty = lambda block: _room(jnp.zeros, (length, *block.shape), block)
    stores = {p: jax.tree.map(empty, blocks) for p, blocks in first.items() if later}
    last, stores, kept = _loop(length, hop, (first, stores, kept))
    for p, (_, offsets) in walks.items():
        came = [[store[h] for store in stores[p]] for h in range(length)] if later else [last[p]]
        for h, blocks in zip(range(length) if later else [length - 1], came, strict=True):
            held[p] |= dict(zip(come_to(p, h), _apart(blocks, len(offsets), dim), strict=True))
    return kept


def _walks(routes, run: range) -> dict[int, tuple[Point, tuple[Point, ...]]]:
    """For each table that sends in a run of rounds: its step, and the offsets that it sends in the first of them."""
    return {p: item for p, route in enumerate(routes) for item in route.rounds[run.start].items()}


def _loop(length: int, hop, carry):
    return lax.fori_loop(np.int32(0), np.int32(length), hop, carry)


def _joined(blocks, dim: int) -> list:
    """The blocks of a message as they are sent: small ones as one array, large ones each by itself, where it lies."""
    together = _pieces(len(blocks), blocks[0].size * blocks[0].dtype.itemsize) < len(blocks)
    return [lax.concatenate(blocks, dim)] if together else blocks


def _apart(message, count: int, dim: int) -> list:
    return message if len(message) == count else jnp.split(message[0], count, axis=dim)


def _pieces(count: int, nbytes: int) -> int:
    """In how many permutes so many blocks of `nbytes` each make one message."""
    return 1 if nbytes <= BUNDLED else count


def _sent(message, axis_name, pairs) -> list:
    return [send(piece, axis_name, pairs) for piece in message]


@priced(lambda size, n, itemsize, distance=1: [Round(1, (Message(size * itemsize, (distance,)),))])
def send_next(x: Shaped[Array, "*dims"], axis_name: AxisName, *, distance: int = 1) -> Shaped[Array, "*dims"]:
    """Device i's `x` on device i + `distance`, round the ring: one hop."""
    n = size(axis_name)
    return send(x, axis_name, [(i, (i + distance) % n) for i in range(n)])


def send(x: Shaped[Array, "*dims"], axis_name: AxisName, pairs: Sequence[tuple[int, int]]) -> Shaped[Array, "*dims"]:
    """For each pair (i, j) device i's `x` on device j, and zeros where nothing arrives: one hop.

    Several axes count their devices in row-major order.
    """
    names, place = _mesh_order(axes(axis_name))
    return lax.ppermute(x, names, [(place[i], place[j]) for i, j in pairs])


def _mesh_order(names: tuple) -> tuple[tuple, list[int]]:
    """The axes as `lax.ppermute` wants them, in the mesh's order, and the place there of each device of the axis."""
    if len(names) < 2:
        return names, list(range(size(names)))
    ordered = tuple(sorted(names, key=jax.sharding.get_abstract_mesh().axis_names.index))
    ring = np.arange(size(names)).reshape([lax.axis_size(name) for name in names])
    in_mesh_order = ring.transpose([names.index(name) for name in ordered]).reshape(-1)
    return ordered, np.argsort(in_mesh_order).tolist()


def computed_once(x: Shaped[Array, "*dims"]) -> Shaped[Array, "*dims"]:
    """`x`, of which a device keeps the very bits that it sends.

    XLA may compute a value once for the message, and once more inside the operation that uses it here, with a multiplication and
    an addition made one: the last bit differs, and the replicas drift apart in silence. `lax.optimization_barrier` forbids it,
    and on CPUs, whose compiler sees through that, a loop does.
    """
    return lax.platform_dependent(x, cpu=cpu.in_memory, default=lax.optimization_barrier)


def written(x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """`x`, joined from blocks, before anything else is computed of it.

    Else XLA may join the blocks inside the operation that uses them, and fuse a product and a sum there for some of the blocks
    only. Which blocks depends on the device, so replicas would drift apart.
    """
    return lax.platform_dependent(x, cpu=cpu.apart, default=lax.optimization_barrier)


Tables = Route | tuple[Route, ...]  # several are side by side, each with its share of every block


def mover(maker: Callable[[int], Tables], *, name: str = "", all_to_all: AllToAll = lax.all_to_all) -> Mover:
    """The drop-ins of a table for n devices, `maker(n)`, along one axis or several. It decorates a maker too.

    They take and return what `lax.psum`, `lax.psum_scatter` and `lax.all_gather` do: trees of any dtype and shape, replication
    types and derivatives included. Of S bytes a device sends (n - 1)/n S in a reduce-scatter, (n - 1) S in an all-gather, and in
    an all-reduce 2 (n - 1)/n S, S padded to a multiple of n numbers. The transpose of an all-reduce costs nothing. They raise
    `ValueError` where a leaf has no such dim, or one that does not divide, or where the code does not run over the axis.

    Args:
        maker: gives a `Route`, or several of as many devices, side by side, each of which carries a share of every block.
        name: what messages call it; the maker's by default.
        all_to_all: the mover's, if it is not `lax`'s.
    """
    return _mover(maker, lambda sizes: maker(math.prod(sizes)), name or maker.__name__, all_to_all)


def mover_of_axes(maker: Callable[..., Tables], *, name: str = "") -> Mover:
    """As `mover`, of a maker that is given the devices on each axis: `maker(2, 4)`."""
    return _mover(maker, lambda sizes: maker(*sizes), name or maker.__name__, lax.all_to_all)


def _mover(maker, tables, name: str, all_to_all: AllToAll) -> Mover:
    @functools.lru_cache(maxsize=64)
    def made(sizes: tuple[int, ...]) -> tuple[Route, ...]:
        found = tables(sizes)
        found = found if isinstance(found, tuple) else (found,)
        wrong = [route for route in found if route.n != math.prod(sizes) or len(route.rounds) != len(found[0].rounds)]
        if wrong:
            raise ValueError(
                f"{name}: tables side by side need {math.prod(sizes)} devices and {len(found[0].rounds)} rounds each, as the "
                f"first has; one has {wrong[0].n} devices and {len(wrong[0].rounds)} rounds. Fill up with empty rounds, {{}}."
            )
        return found

    routes = lambda axis_name: made(tuple(map(size, axes(axis_name))))
    slices = drop_in.Slices(
        scattered=lambda x, dim, axis_name: _scattered(x, dim, routes(axis_name), axis_name),
        gathered=lambda x, dim, axis_name: _gathered(x, dim, routes(axis_name), axis_name),
    )
    total = lambda x, axis_name: _total(x, routes(axis_name), axis_name)

    def reduce_scatter(x, axis_name, *, scatter_dimension=0, tiled=False):
        one = lambda x: drop_in.reduce_scatter(x, axis_name, slices, scatter_dimension, tiled)
        return in_turn(one, x, axis_name)

    def all_gather(x, axis_name, *, axis=0, tiled=False, to="varying"):
        return in_turn(lambda x: drop_in.all_gather(x, axis_name, slices, axis, tiled, to), x, axis_name)

    def sent(numbers, n, itemsize, *, back):
        tables = made(n if isinstance(n, tuple) else (n,))
        nbytes = [itemsize * length for _, length in _shares(numbers, len(tables)) if length]
        return messages(tables[: len(nbytes)], nbytes, back=back, added=None if back else nbytes)

    scatters = lambda size, n, itemsize: sent(-(-size // devices(n)), n, itemsize, back=False)
    gathers = lambda size, n, itemsize: sent(size, n, itemsize, back=True)
    both = lambda size, n, itemsize: scatters(size, n, itemsize) + gathers(-(-size // devices(n)), n, itemsize)
    return Mover(
        name,
        priced(both, f"{name}.all_reduce")(lambda x, axis_name: all_reduce(x, axis_name, total)),
        priced(scatters, f"{name}.reduce_scatter")(reduce_scatter),
        priced(gathers, f"{name}.all_gather")(all_gather),
        all_to_all,
        maker,
    )


def messages(
    routes: Sequence[Route], nbytes: Sequence[int], *, back: bool = False, added: Sequence[int] | None = None
) -> list[Round]:
    """What tables side by side send in a scatter, or `back`, round by round.

    Args:
        routes: the tables.
        nbytes: of a block of each.
        back: the gather's messages.
        added: the bytes that each block adds to others; none by default.
    """
    longest = [0, *map(max, zip(*(route.hops(back=back) for route in routes), strict=True))]
    rounds = list(zip(*(route.rounds for route in routes), strict=True))
    found = []
    for k, sides in enumerate(reversed(rounds) if back else rounds):
        sent = [(p, step, len(offsets)) for p, sends in enumerate(sides) for step, offsets in sends.items()]
        each = tuple(
            Message(nbytes[p] * count, tuple(-s for s in step) if back else step, _pieces(count, nbytes[p]))
            for p, step, count in sent
        )
        reduced = sum(added[p] * count for p, _, count in sent) if added else 0
        found.append(Round(1, each, reduced, longest[k + 1] > longest[k]))
    return found


def all_reduce(x: Tree, axis_name: AxisName, total: Callable[..., Any]) -> Tree:
    """The drop-in for `lax.psum` of `total(x, axis_name)`, which gives the sum of a varying array, the same bits everywhere.

    Its transpose costs nothing: the result is the same everywhere, so its cotangent is too.
    """

    def leaf(x):
        x = summand("all_reduce", drop_in.summable(x), axis_name)
        if not axes(axis_name):
            return x
        return moved(x, axis_name, forward=lambda x: total(x, axis_name), backward=lambda ct: ct, to="invarying")

    return in_turn(leaf, x, axis_name)


def in_turn(one: Callable[..., Any], x: Tree, axis_name: AxisName) -> Tree:
    """`one` of each array of the tree `x`: where hops are loops, the next begins when the one before is done."""
    leaves, structure = jax.tree.flatten(x)
    done: list[jax.Array] = []
    for leaf in leaves:
        done.append(one(leaf if size(axis_name) <= UNROLLED else cpu.ordered(leaf, done[-1:])))
    return jax.tree.unflatten(structure, done)


def _total(x, routes, axis_name):
    """The sum, every block added up on one device: along a dim of `x`, or along its numbers, padded."""
    n, parts = routes[0].n, len(routes)
    dim = next((dim for dim in range(x.ndim) if _keeps_tiles(x.shape, dim, n * parts)), None)
    unit = n if x.size < 2**31 else 128 * n * parts
    y = x if dim is not None else _in_rows(jnp.pad(x.reshape(-1), (0, -x.size % unit)), x.size, n * parts)
    blocks = _scatter_slices(y, dim or 0, routes, axis_name)
    y = _gather_slices([computed_once(block) for block in blocks], dim or 0, routes, axis_name)
    return y if dim is not None else y.reshape(-1)[: x.size].reshape(x.shape)


def _scattered(x, dim: int, routes, axis_name):
    """The sum of this device's slice of n along `dim`."""
    n, parts = routes[0].n, len(routes)
    if _keeps_tiles(x.shape, dim, n * parts):
        return jnp.concatenate(_scatter_slices(x, dim, routes, axis_name), dim)
    blocks = _scatter_slices(_in_rows(_in_order(x, dim), x.size, n * parts), 0, routes, axis_name)
    return _from_order(jnp.concatenate(blocks), (*x.shape[:dim], x.shape[dim] // n, *x.shape[dim + 1 :]), dim)


def _gathered(x, dim: int, routes, axis_name):
    """All devices' slices along `dim`."""
    n, parts = routes[0].n, len(routes)
    x, whole = computed_once(x), (*x.shape[:dim], x.shape[dim] * n, *x.shape[dim + 1 :])
    if _keeps_tiles(whole, dim, n * parts):
        return _gather_slices(jnp.split(x, parts, dim), dim, routes, axis_name)
    rows = _in_rows(_in_order(x, dim), math.prod(whole), parts)
    blocks = [lax.slice_in_dim(rows, start, start + length) for start, length in _shares(len(rows), parts)]
    return _from_order(_gather_slices(blocks, 0, routes, axis_name), whole, dim)


def _scatter_slices(x, dim: int, routes, axis_name) -> list:
    length = x.shape[dim] // routes[0].n
    shares = _shares(length, len(routes))
    slice_of = lambda p, j: lax.dynamic_slice_in_dim(x, j * length + shares[p][0], shares[p][1], dim)
    return scatter(routes, slice_of, axis_name, dim=dim)


def _gather_slices(blocks, dim: int, routes, axis_name):
    length = sum(block.shape[dim] for block in blocks)
    shares = _shares(length, len(routes))
    keep = lambda x, p, j, block: lax.dynamic_update_slice_in_dim(x, block, j * length + shares[p][0], dim)
    shape = (*blocks[0].shape[:dim], length * routes[0].n, *blocks[0].shape[dim + 1 :])
    return written(gather(routes, blocks, keep, _room(lax.empty, shape, blocks[0]), axis_name, dim=dim))


def _room(make: Callable[..., Any], shape: Point, block):
    """An array that is to be filled with blocks like `block`."""
    if AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types and block.size:
        # vmap in JAX 0.10 wants all that meets the block split as its mapped dim is: what is made of nothing is not.
        return lax.broadcast(block[(0,) * block.ndim], shape)
    return varying(make(shape, block.dtype), varying_axes(block))


def _shares(length: int, parts: int) -> list[tuple[int, int]]:
    """A block's length in so many parts, as (start, length); the first are one longer where it does not divide."""
    lengths = [length // parts + (p < length % parts) for p in range(parts)]
    return list(zip(itertools.accumulate(lengths, initial=0), lengths, strict=False))


def _keeps_tiles(shape: Point, dim: int, n: int) -> bool:
    """Whether n slices along `dim` are whole tiles: of the last two dims 8 x 128 numbers each."""
    unit = {1: 128, 2: 8}.get(len(shape) - dim, 1)
    return len(shape) > 1 and shape[dim] % (n * unit) == 0


def _in_rows(flat, size: int, blocks: int):
    """A vector; as rows of 128 where the whole has a `size` that int32 does not count."""
    if size < 2**31:
        return flat
    if flat.size % (128 * blocks):
        raise ValueError(
            f"An array of {size} numbers needs a dim of which {128 * blocks} is a divisor. Pad it, or cut it in two."
        )
    return flat.reshape(-1, 128)


def _in_order(x, dim: int):
    """The numbers of `x` as a vector, slice after slice along `dim`."""
    return jnp.moveaxis(x, dim, 0).reshape(-1)


def _from_order(x, shape: Point, dim: int):
    return jnp.moveaxis(x.reshape(shape[dim], *shape[:dim], *shape[dim + 1 :]), 0, dim)
