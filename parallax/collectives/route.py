"""A collective as a table: who sends which block how far, checked when it is made. `execute` runs it, `algorithm` makes drop-ins.

Number a device's blocks by their *offset* from it: the block at offset o belongs to the device o further on. The devices are a
box: `(16,)`, or `(2, 8)` for two machines of eight; offsets and steps are its points, added dim by dim, and plain numbers where
the box has one dim. A *round* is {step: offsets}: those blocks go to the device `step` further on, where offset o becomes
o - step. The messages of a round do not wait for each other. Blocks of one step travel as one message.

    Route((n,), [{1: [n - h]} for h in range(1, n)])    # a ring: in each round each device hands one block to its neighbour

In a *scatter* a block that arrives is added to the one that is there, so that each ends, summed, on the device that owns it.
A *gather* is the same table backwards: each device's block is copied to all others. The two are each other's transpose, and one
after the other they are an all-reduce.

The ring of n = 4 has the rounds {1: [3]}, {1: [2]}, {1: [1]}. Watch the block that belongs to device 0, in a scatter:

    round 1   device 1 sends it (offset 3: 1 + 3 is device 0 of the ring); device 2, offset 2, adds its term
    round 2   device 2 sends it (offset 2); device 3, offset 1, adds its term
    round 3   device 3 sends it (offset 1); device 0, at home, offset 0, adds the last term

All four blocks move at once, each to the next device. Backwards, as a gather, device 0 sends its block to 3, 3 to 2, 2 to 1.

A device does the same as all others, each from its own place: every message of a step goes equally far. A collective in which the
distance depends on the device is no `Route` (Swing: De Sensi et al., NSDI 2024, where odd and even devices send opposite ways).
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
        rounds = []
        for sends in self.rounds:
            rounds.append(
                {_as_point(step): tuple(map(_as_point, offsets)) for step, offsets in sends.items()}
            )
        object.__setattr__(self, "shape", tuple(self.shape))
        object.__setattr__(self, "rounds", tuple(rounds))
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

    def offset_after(self, offset: Sequence[Any], step: Point, times: Any = 1) -> tuple[Any, ...]:
        """The offset that a block has after `times` hops of `step`."""
        return tuple(
            [
                (o - times * s) % length
                for o, s, length in zip(offset, step, self.shape, strict=True)
            ]
        )

    def device_number(self, point: Sequence[int]) -> int:
        """The number of the device at a point of the box."""
        number = 0
        for place, length in zip(point, self.shape, strict=True):
            number = number * length + place % length
        return number

    def device_at(self, me: Any, offset: Sequence[Any]) -> Any:
        """The number of the device at an offset from device `me`; both may be traced."""
        number, stride = 0, self.n
        for o, length in zip(offset, self.shape, strict=True):
            whole, stride = stride, stride // length
            place = lax.div(lax.rem(me, np.int32(whole)), np.int32(stride))
            number += lax.rem(place + o, np.int32(length)) * stride
        return number

    def pairs(self, step: Point, *, back: bool = False) -> list[tuple[int, int]]:
        """Who sends to whom in a message of this step: (from, to) for every device."""
        pairs = []
        for device, point in enumerate(self.points()):
            ahead = self.device_number([place + s for place, s in zip(point, step, strict=True)])
            pairs.append((ahead, device) if back else (device, ahead))
        return sorted(pairs) if back else pairs

    def traffic(self) -> dict[tuple[int, int], int]:
        """The blocks that device i sends to device j in a reduce-scatter, for every pair (i, j) that talks."""
        blocks: dict[tuple[int, int], int] = {}
        for sends in self.rounds:
            for step, offsets in sends.items():
                for pair in self.pairs(step):
                    blocks[pair] = blocks.get(pair, 0) + len(offsets)
        return blocks

    def hops(self, *, back: bool = False) -> list[int]:
        """After each round, in the order in which they run, the messages behind the block that took most so far."""
        return self._hops[back]

    @functools.cached_property
    def _hops(self) -> tuple[list[int], list[int]]:
        return _hops(self, False), _hops(self, True)


Tables = Route | tuple[Route, ...]  # several run side by side, each with its share of every block


def _as_point(place: Any) -> Point:
    return (place,) if isinstance(place, int) else tuple(place)


def _hops(route: Route, back: bool) -> list[int]:
    hops_behind: dict[Point, int] = {}
    longest = [0]
    for sends in reversed(route.rounds) if back else route.rounds:
        arrivals = []
        for step, offsets in sends.items():
            after = [route.offset_after(o, step) for o in offsets]
            leaving, arriving = (after, offsets) if back else (offsets, after)
            hops = 1 + max((hops_behind.get(o, 0) for o in leaving), default=0)
            arrivals += [(o, hops) for o in arriving]
        for o, hops in arrivals:
            hops_behind[o] = max(hops_behind.get(o, 0), hops)
        longest.append(max([longest[-1], *(hops for _, hops in arrivals)]))
    return longest[1:]


def _check(route: Route) -> None:
    """Every block but the own one leaves once, after all that is added to it has come: then each term comes home once."""
    box = route.shape
    if not box or any(length < 1 for length in box):
        raise ValueError(
            f"Route needs a box of one dim or more, of 1 or more devices each; got shape {box}."
        )
    sent: dict[Point, int] = {}
    for r, sends in enumerate(route.rounds):
        for step, offsets in sends.items():
            if len(step) != len(box) or any(
                not -length < s < length for s, length in zip(step, box, strict=True)
            ):
                raise ValueError(
                    f"Route: round {r} has the step {_shown(step)}, which is outside the box {box}."
                )
            for o in offsets:
                if problem := _unsendable(route, o, r, sent):
                    raise ValueError(f"Route: round {r} sends block {_shown(o)}{problem}")
                sent[o] = r
        for there, o in [
            (route.offset_after(o, step), o) for step, offsets in sends.items() for o in offsets
        ]:
            if there in sent:
                raise ValueError(
                    f"Route: in round {r} block {_shown(o)} arrives at offset {_shown(there)}, whose block was sent away in "
                    f"round {sent[there]}. Let it arrive before, or go elsewhere."
                )
    if len(sent) < route.n - 1:
        left = [o for o in route.points()[1:] if o not in sent]
        names = ", ".join(map(_shown, left[:3])) + ", ..." * (len(left) > 3)
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
    return (
        f" a second time: it was sent away in round {sent[o]}. Send it once, after all has come."
        if o in sent
        else ""
    )


def _shown(point: Point) -> str:
    return str(point[0] if len(point) == 1 else point)


def to_csv(route: Route, path: str | os.PathLike[str]) -> None:
    """Write a table as a file: a first line with the box, then a line a block sent: round, step, offset. Points are `1 0`."""

    def words(point):
        return " ".join(map(str, point))

    with open(path, "w", encoding="utf-8", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(["box", words(route.shape), len(route.rounds)])
        lines.writerow(["round", "step", "offset"])
        for r, sends in enumerate(route.rounds):
            lines.writerows(
                [r, words(step), words(o)] for step, offsets in sends.items() for o in offsets
            )


def from_csv(path: str | os.PathLike[str]) -> Route:
    """The table in a file of `to_csv`. Raises `ValueError` where the file is none, or as `Route` does."""
    with open(path, encoding="utf-8", newline="") as file:
        lines = list(csv.reader(file))

    def point(words):
        return tuple(map(int, words.split()))

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
