"""A table of messages that describes a collective. A table is checked when made; `execute` runs it.

Each block on a device has a number, its *offset*: the block at offset o belongs to the device that
is o places after this one. The devices form a box: `(16,)`, or `(2, 8)` for two machines of eight.
A *round* is {step: offsets}: it sends the blocks at these offsets to the device that is `step`
places after this one, where offset o becomes o - step. Offsets and steps are points of the box, and
are added dim by dim. If the box has one dim, plain integers may be used. The blocks of one step
form one message. The messages of a round do not wait for each other.

    # A ring: in each round, each device sends one block to its right neighbour.
    Route((n,), [{1: [n - h]} for h in range(1, n)])

In a *scatter* a block that arrives is added to the block at its new offset, so each block ends,
summed, on the device that owns it. A *gather* runs the same table backwards: the last round first,
and each message from its receiver to its sender. So each device's block is copied to all others. A
scatter and a gather are each other's transpose; a scatter and then a gather is an all-reduce.

The ring of 4 devices has the rounds {1: [3]}, {1: [2]}, {1: [1]}, each {step: offsets}. In a
scatter, the block that belongs to device 0 goes this way:

    round 1   device 1 sends it (offset 3: 1 + 3 is device 0); device 2, offset 2, adds its term
    round 2   device 2 sends it (offset 2); device 3, offset 1, adds its term
    round 3   device 3 sends it (offset 1); device 0, the owner, offset 0, adds the last term

All four blocks move at once, each to the next device. In a gather, the block of device 0 goes the
same way back: device 0 sends the block to 3, device 3 sends its copy to 2, and device 2 to 1.

A step is the same for all devices: each sends its message to the device that is `step` places after
it. A collective in which the distance depends on the device is no `Route`. An example is Swing (De
Sensi et al., NSDI 2024), in which odd and even devices send in opposite directions.
"""

import csv
import functools
import itertools
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax import lax

Point = tuple[int, ...]


@dataclass(frozen=True)
class Route:
    """A table of messages: a reduce-scatter or, run backwards, an all-gather.

    ```python
    ring_of_4 = Route((4,), [{1: [3]}, {1: [2]}, {1: [1]}])
    ring_of_4.traffic()          # {(0, 1): 3, (1, 2): 3, (2, 3): 3, (3, 0): 3}
    mine = collectives.algorithm(lambda n: Route((n,), [{1: [n - h]} for h in range(1, n)]))
    ```

    Attributes:
        shape: the shape of the box (grid) that the devices form; the devices are numbered in
            row-major order.
        rounds: a list of rounds, each {step: offsets}. In a round, each device sends its blocks at
            `offsets` to the device that is `step` places after it. The block at offset o belongs to
            the device that is o places after the sender. If the box has one dim, steps and offsets
            may be plain integers. A step may be negative: along a dim of size n, -1 means n - 1. A
            round may be empty.

    Raises:
        ValueError: a device's term of a block would not reach the block's owner exactly once; a
            step or an offset is outside the box; or the box has no dim or no devices.
    """

    shape: Point
    rounds: Sequence[Mapping[Any, Sequence[Any]]]

    def __post_init__(self):
        """Turns steps and offsets that are plain numbers into points (tuples with one number for
        each dim of `shape`), and checks the table."""
        rounds = []
        for sends in self.rounds:
            points = {_point(step): tuple(map(_point, sends[step])) for step in sends}
            # A step without offsets sends nothing.
            rounds.append({step: offsets for step, offsets in points.items() if offsets})
        # The class is frozen, since the table that was checked must be the table that runs. So a
        # plain assignment would be refused.
        object.__setattr__(self, "shape", tuple(self.shape))
        object.__setattr__(self, "rounds", tuple(rounds))
        _check(self)

    @property
    def n(self) -> int:
        """Returns the number of devices."""
        return math.prod(self.shape)

    @property
    def home(self) -> Point:
        """Returns the offset of the block that belongs to the device itself: a tuple of zeros, one
        for each dim of `shape`."""
        return (0,) * len(self.shape)

    def points(self) -> list[Point]:
        """Returns all points of the box of devices, in row-major order."""
        return list(itertools.product(*map(range, self.shape)))

    def offset_after(self, offset: Sequence[Any], step: Point, times: Any = 1) -> tuple[Any, ...]:
        """Returns the offset that a block has after `times` hops of `step`.

        A hop brings a block nearer to its owner, so along each dim the offset falls by the step,
        modulo the number of devices along this dim. `times` may be traced.
        """
        dims = zip(offset, step, self.shape, strict=True)
        return tuple([(o - times * s) % length for o, s, length in dims])

    def device_number(self, point: Sequence[int]) -> int:
        """Returns the number of the device at `point` of the grid of devices, of shape `shape`.
        The devices are numbered in row-major order.

        A point outside the grid wraps around.
        """
        number = 0
        for place, length in zip(point, self.shape, strict=True):
            number = number * length + place % length
        return number

    def device_at(self, me: Any, offset: Sequence[Any]) -> Any:
        """Returns the number of the device at `offset` from device `me`; both may be traced.

        No number in `offset` may be negative.
        """
        number, stride = 0, self.n
        for o, length in zip(offset, self.shape, strict=True):
            whole, stride = stride, stride // length
            # In row-major order the place of device `me` along the dim is me % whole // stride.
            # `lax.rem` and `lax.div` are fewer operations than `%` and `//`, which also handle
            # negative numbers: here there are none. The constants are int32, since `lax.div` and
            # `lax.rem` do not convert a Python int to the type of the other operand, as `*` and `+`
            # do: in 64-bit mode it would be an int64.
            place = lax.div(lax.rem(me, np.int32(whole)), np.int32(stride))
            number += lax.rem(place + o, np.int32(length)) * stride
        return number

    def pairs(self, step: Point, *, back: bool = False) -> list[tuple[int, int]]:
        """Returns the pairs (from, to) of the messages of this step; `back` swaps from and to.

        Every device sends one message.
        """
        pairs = []
        for device, point in enumerate(self.points()):
            ahead = self.device_number([place + s for place, s in zip(point, step, strict=True)])
            pairs.append((ahead, device) if back else (device, ahead))
        return sorted(pairs) if back else pairs  # in both cases by sender

    def traffic(self) -> dict[tuple[int, int], int]:
        """Returns, for each pair (i, j), how many blocks device i sends to j in a
        reduce-scatter."""
        blocks: dict[tuple[int, int], int] = {}
        for sends in self.rounds:
            for step, offsets in sends.items():
                for pair in self.pairs(step):
                    blocks[pair] = blocks.get(pair, 0) + len(offsets)
        return blocks

    def hops(self, *, back: bool = False) -> list[int]:
        """Returns a list: for each round, the length of the longest chain of messages up to the end
        of that round.

        In a chain, each message waits for the one before. The list has the rounds in the order in
        which they run. With `back` the rounds run backwards, as in a gather, so the last round of
        the table comes first.
        """
        # `_hops` is computed once for each table. `back` is False or True: index 0 or 1.
        return self._hops[back]

    @functools.cached_property
    def _hops(self) -> tuple[list[int], list[int]]:
        """Returns the results of `hops` for the scatter and for the gather."""
        return _hops(self, False), _hops(self, True)


Tables = Route | tuple[Route, ...]  # several run side by side, each with its share of every block


def _point(place: Any) -> Point:
    """Returns a step or an offset as a tuple; a plain integer becomes a tuple of one number."""
    return (place,) if isinstance(place, int) else tuple(place)


def _hops(route: Route, back: bool) -> list[int]:
    """Returns a list: for each round, the length of the longest chain of messages up to the end of
    that round.

    In a chain, each message waits for the one before. The list has the rounds in the order in which
    they run. With `back` the rounds run backwards, as in a gather, so the last round of the table
    comes first.
    """
    # By offset: the longest chain of messages that the block there depends on.
    hops_behind: dict[Point, int] = {}
    longest = [0]
    for sends in reversed(route.rounds) if back else route.rounds:
        arrivals = []
        for step, offsets in sends.items():
            after = [route.offset_after(o, step) for o in offsets]
            # A gather sends each block back from the place where the scatter's sum arrived.
            leaving, arriving = (after, offsets) if back else (offsets, after)
            # The message leaves after the last of its blocks has arrived.
            hops = 1 + max((hops_behind.get(o, 0) for o in leaving), default=0)
            arrivals += [(o, hops) for o in arriving]
        # Counted after the round: its messages do not wait for each other.
        for o, hops in arrivals:
            hops_behind[o] = max(hops_behind.get(o, 0), hops)
        longest.append(max([longest[-1], *(hops for _, hops in arrivals)]))
    return longest[1:]


def _check(route: Route) -> None:
    """Raises `ValueError` unless each device's term of a block reaches the block's owner once.

    Two conditions ensure this. Each device sends each block except its own exactly once. No device
    receives a term of a block after it has sent its own sum of this block.
    """
    if not route.shape or any(length < 1 for length in route.shape):
        raise ValueError(
            "Route needs a shape with at least one dim, and at least 1 device along each dim; got "
            f"shape {route.shape}."
        )
    sent: dict[Point, int] = {}  # by offset: the round in which that block was sent
    for r, sends in enumerate(route.rounds):
        arrivals = {}
        for step, offsets in sends.items():
            _check_step(route, step, r)
            for o in offsets:
                _check_sendable(route, o, r, sent)
                sent[o] = r
                arrivals[o] = route.offset_after(o, step)
        # `sent` has this round's blocks too: a message leaves before another of its round arrives.
        for o, arrival in arrivals.items():
            if arrival in sent:
                raise ValueError(
                    f"Route: in round {r} block {_describe(o)} of the sender arrives as block "
                    f"{_describe(arrival)} of the receiver. But the receiver already sent its "
                    f"block {_describe(arrival)} in round {sent[arrival]}, so the partial sum that "
                    "arrives would not reach the block's owner. "
                    f"Send block {_describe(o)} in an earlier round, or with another step."
                )
    # No block was sent twice, and the own block never: n - 1 sent blocks are all the others.
    if len(sent) < route.n - 1:
        # Point 0 is the own block, which stays.
        missing = [o for o in route.points()[1:] if o not in sent]
        names = ", ".join(map(_describe, missing[:3])) + ", ..." * (len(missing) > 3)
        raise ValueError(
            f"Route: for shape {route.shape}, no round sends the blocks at offsets {names}, so "
            "these blocks never reach their owners. Send each of these blocks once."
        )


def _check_step(route: Route, step: Point, r: int) -> None:
    """Raises `ValueError` unless `step`, of round number `r`, has one number for each dim of the
    box of devices, smaller in magnitude than the number of devices along that dim."""
    box = route.shape
    inside = all(-length < s < length for s, length in zip(step, box, strict=False))
    if len(step) != len(box) or not inside:
        raise ValueError(
            f"Route: round {r} has the step {_describe(step)}, which is outside the box {box}. "
            "A step has a number for each dim of the box, smaller in magnitude than the number of "
            "devices along that dim."
        )


def _check_sendable(route: Route, o: Point, r: int, sent: Mapping[Point, int]) -> None:
    """Raises `ValueError` if the block at offset `o` cannot be sent in round number `r`: if it is
    outside the box of devices, is the device's own, or was sent before.

    `sent` holds the round in which each block was sent before.
    """
    box, problem = route.shape, ""
    if len(o) != len(box) or any(not 0 <= at < size for at, size in zip(o, box, strict=True)):
        problem = f", which is no point of the box {box}. Offsets run from 0 to the dim's size - 1."
    elif o == route.home:
        problem = ", which is at home already: a device keeps the block that belongs to it."
    elif sent.get(o) == r:
        problem = " twice, so that its terms would be counted twice. Send it once."
    elif o in sent:
        problem = (
            f" a second time: it was sent away in round {sent[o]}. "
            "Send it once, after all its terms have arrived."
        )
    if problem:
        raise ValueError(f"Route: round {r} sends block {_describe(o)}{problem}")


def _describe(point: Point) -> str:
    return str(point[0] if len(point) == 1 else point)


# The titles of a file's columns
COLUMNS = ["round", "step", "offset"]


def to_csv(route: Route, path: str | os.PathLike[str]) -> None:
    """Writes a table to a file.

    The first line has `route.shape` and the number of rounds, the second line the column titles.
    Each further line has the round, the step and the offset of one block that is sent. A tuple
    (1, 0) is written as `1 0`.
    """

    def words(point):
        return " ".join(map(str, point))

    with open(path, "w", encoding="utf-8", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(["box", words(route.shape), len(route.rounds)])
        lines.writerow(COLUMNS)
        for r, sends in enumerate(route.rounds):
            for step, offsets in sends.items():
                lines.writerows([r, words(step), words(o)] for o in offsets)


def from_csv(path: str | os.PathLike[str]) -> Route:
    """Returns the table of a file that `to_csv` wrote.

    Raises `ValueError` for any other file, and for a table that `Route` refuses.
    """
    with open(path, encoding="utf-8", newline="") as file:
        lines = list(csv.reader(file))

    def point(words):
        return tuple(map(int, words.split()))

    try:
        # The first line has "box", the shape and the number of rounds; the second, column titles.
        (kind, shape, count), columns, *blocks = lines
        if kind != "box" or columns != COLUMNS:
            raise ValueError("other first lines")
        # A dict by the number of the round: a list would take round -1 for its last.
        rounds: dict[int, dict[Point, list[Point]]] = {r: {} for r in range(int(count))}
        for r, step, offset in blocks:
            rounds[int(r)].setdefault(point(step), []).append(point(offset))
    except (ValueError, KeyError) as error:
        raise ValueError(
            f"from_csv: {path} is no table. It needs the lines 'box,SHAPE,ROUNDS' and "
            "'round,step,offset', then one line for each block."
        ) from error
    return Route(point(shape), [*rounds.values()])
