"""A schedule in which each stage has a job of its own in each tick, or none: its checked tables, and what follows from them.

The legend: P stages, M microbatches, v chunks a stage, F forward, I input gradient, W weight gradient; a job is one chunk of
one microbatch, numbered microbatch * v + chunk. A backward pass, B, is I and then W: as one job it would hold up, for two
ticks' time, the stages that have an F beside it.

What leaves a stage in tick t is there from tick t + 1 on, and waits in a slot until it is used. Any chunk may stand at any place
in the model, so the message that a job sends may go to any stage.
"""

import dataclasses
import itertools
from collections.abc import Mapping
from functools import cached_property
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int, Int32, Shaped

from parallax.schedule.places import Interval, checked_placement, fewest
from parallax.schedule.table import LANES, CannotRun, Cost, Span, job_name


class Message(NamedTuple):
    """What one job sends and another uses.

    Attributes:
        sent: the tick at whose end it leaves.
        used: the tick of the job that needs it.
        source: the stage that sends it.
        target: the stage that needs it: it may be the same.
    """

    sent: int
    used: int
    source: int
    target: int


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Branching:
    """A pipeline schedule of at most one job a tick and stage: each job once, in a tick after what it needs.

    The tables are whole numbers, `[ticks, stages]`: microbatch * chunks + chunk, or -1. They are copied and cannot be written to.

    Args:
        forward: the forward jobs, F.
        backward: the jobs of the input gradient, I.
        weight: the jobs of the weight gradient, W.
        places: where in the model chunk c of stage s stands, `[chunks, stages]`: each of 0 to vP - 1 once, 0 on stage 0. By
            default chunk c of stage s is at c P + s.

    Raises:
        CannotRun: a table breaks a rule; the message names the job, the tick and the stage.
        ValueError: the arrays are no such tables, or differ in shape.
    """

    forward: Shaped[np.ndarray, "_ticks _stages"]
    backward: Shaped[np.ndarray, "_ticks _stages"]
    weight: Shaped[np.ndarray, "_ticks _stages"]
    places: Shaped[np.ndarray, "_chunks _stages"] | None = None

    def __post_init__(self):
        """Freeze the tables, then check them."""
        shape = np.shape(self.forward)
        for lane in LANES:
            table = np.array(getattr(self, lane))
            if table.ndim != 2 or table.size == 0 or table.dtype.kind not in "iu" or table.shape != shape or table.min() < -1:
                raise ValueError(
                    f"The {lane} table must be whole numbers of at least -1, ticks x stages, {shape} as the forward table; got "
                    f"{table.dtype} of shape {table.shape}. Write one row a tick and -1 where a stage has no such job."
                )
            object.__setattr__(self, lane, _frozen(table))
        places = np.arange(shape[1])[None] if self.places is None else self.places
        places = checked_placement(f"A schedule of {shape[1]} stages", places)
        if places.shape[1] != shape[1]:
            raise ValueError(f"The placement must be [chunks, {shape[1]}], as the tables have stages; got {places.tolist()}.")
        if places[:, 0].min() != 0:
            raise ValueError(
                f"Place 0 of the model must be on stage 0, where what enters is at hand; got {places.tolist()}. Number the "
                "stages from it on."
            )
        object.__setattr__(self, "places", places)
        _check(self)

    def __repr__(self) -> str:
        sizes = f"stages={self.stages}, microbatches={self.microbatches}, chunks={self.chunks}"
        return f"Branching({sizes}, ticks={self.ticks})"

    @property
    def lanes(self) -> dict[str, Int32[np.ndarray, "ticks stages"]]:
        """The tables by name."""
        return {lane: getattr(self, lane) for lane in LANES}

    @property
    def ticks(self) -> int:
        """The number of rows."""
        return self.forward.shape[0]

    @property
    def stages(self) -> int:
        """P, the number of columns."""
        return self.forward.shape[1]

    @property
    def chunks(self) -> int:
        """v, of each stage."""
        return len(self.placed)

    @property
    def placed(self) -> Int32[np.ndarray, "chunks stages"]:
        """`places`, of which there are always some once the schedule is made."""
        assert self.places is not None
        return self.places

    @cached_property
    def microbatches(self) -> int:
        """M: every job up to the largest one in the tables must be there."""
        return int(max(table.max() for table in self.lanes.values())) // self.chunks + 1

    @cached_property
    def kinds(self) -> Int32[np.ndarray, "ticks stages"]:
        """What each stage does: 0 nothing, 1 F, 2 I, 3 W."""
        return _frozen(sum((table >= 0) * number for number, table in enumerate(self.lanes.values(), 1)))

    @cached_property
    def jobs(self) -> Int32[np.ndarray, "ticks stages"]:
        """The job of each stage, whatever it is of; -1 where it has none."""
        return _frozen(np.maximum.reduce(list(self.lanes.values())))

    @property
    def last(self) -> int:
        """The stage that has the last place of the model; the first place is on stage 0."""
        return int(self._homes[0][-1])

    def makespan(self, forward: Cost = 1, backward: Cost = 1, weight: Cost = 1, *, hop: Cost = 0) -> float:
        """The time of all ticks: that of the dearest job in each, and of an exchange, `hop`, after it.

        Costs are of one microbatch through a whole stage (a chunk costs 1/v), in any unit.
        """
        return float(self._lengths(forward, backward, weight).sum() + hop * self.ticks)

    def dearest(self, forward: Cost = 1, backward: Cost = 1, weight: Cost = 1) -> tuple[int, int, int]:
        """In how many ticks F, I and W is the dearest job that any stage has: the ticks by whose time `makespan` adds up."""
        costs = np.array([-1.0, float(forward), float(backward), float(weight)])
        tick = np.arange(self.ticks)
        longest = self.kinds[tick, costs[self.kinds].argmax(axis=1)]
        counts = np.bincount(longest, minlength=4)
        return int(counts[1]), int(counts[2]), int(counts[3])

    def bubble(self, forward: Cost = 1, backward: Cost = 1, weight: Cost = 1) -> float:
        """The part of `makespan`, as a time, in which a stage rests: `makespan` less its work, M(F + I + W)."""
        return self.makespan(forward, backward, weight) - self.microbatches * float(forward + backward + weight)

    def lockstep(self, forward: Cost = 1, backward: Cost = 1, weight: Cost = 1, *, hop: Cost = 0) -> tuple[Span, ...]:
        """When every job runs in one program on all devices, which exchange at the end of each tick."""
        costs = [0.0, *(float(cost) / self.chunks for cost in (forward, backward, weight))]
        starts = np.concatenate([[0.0], np.cumsum(self._lengths(forward, backward, weight) + hop)])
        found = []
        for tick, s in np.argwhere(self.jobs >= 0).tolist():
            kind, (microbatch, chunk) = self.kinds[tick, s], divmod(int(self.jobs[tick, s]), self.chunks)
            start = float(starts[tick])
            found.append(Span(s, LANES[kind - 1], microbatch, chunk, start, start + costs[kind]))
        return tuple(found)

    @cached_property
    def in_flight(self) -> Float[np.ndarray, " stages"]:
        """The most microbatches each stage holds residuals of, from a job's F to its W; a chunk's residuals count 1/v."""
        made, freed = (np.cumsum(table >= 0, axis=0) for table in (self.forward, self.weight))
        return (made - freed + (self.weight >= 0)).max(axis=0) / self.chunks

    @cached_property
    def slots(self) -> Int32[np.ndarray, "ticks stages"]:
        """The slot of each job's residuals, which F writes, and I and W read; 0 where there is no job."""
        return self._waiting("forward")

    @cached_property
    def handed(self) -> Int32[np.ndarray, "ticks stages"]:
        """The slot for what I hands on to W: written in I's tick, read in W's; else 0."""
        return self._waiting("backward")

    @property
    def slot_count(self) -> int:
        """The slots of residuals that the neediest stage needs, each for one chunk of one microbatch."""
        return int(self.slots.max()) + 1

    @property
    def handed_count(self) -> int:
        """The same of `handed`."""
        return int(self.handed.max()) + 1

    @cached_property
    def messages(self) -> tuple[Message, ...]:
        """All activations and cotangents, those that stay on their stage among them."""
        stages, _ = self._homes
        forward, backward, _ = self._when
        found = []
        for when, walk in ((forward, range(len(stages))), (backward, range(len(stages))[::-1])):
            for here, there in itertools.pairwise(walk):
                pairs = zip(when[:, here].tolist(), when[:, there].tolist(), strict=True)
                found += [Message(sent, used, int(stages[here]), int(stages[there])) for sent, used in pairs]
        return tuple(found)

    @cached_property
    def from_head(self) -> tuple[Message, ...]:
        """The cotangents that the head makes, in the tick in which the last place's F ends, on that stage."""
        last = self.last
        forward, backward, _ = self._when
        pairs = zip(forward[:, -1].tolist(), backward[:, -1].tolist(), strict=True)
        return tuple(Message(sent, used, last, last) for sent, used in pairs)

    @cached_property
    def arrivals(self) -> Mapping[Message, int]:
        """The slot in which each message waits on its stage: free again at the end of the tick that uses it."""
        found: dict[Message, int] = {}
        everything = (*self.messages, *self.from_head)
        for s in range(self.stages):
            here = [message for message in everything if message.target == s]
            found |= zip(here, fewest([Interval(message.sent, message.used) for message in here]), strict=True)
        return found

    @property
    def arrival_count(self) -> int:
        """The slots for messages that the neediest stage needs."""
        return max(self.arrivals.values()) + 1

    @cached_property
    def _homes(self) -> tuple[Int[np.ndarray, " places"], Int[np.ndarray, " places"]]:
        """The stage and the chunk of each place."""
        chunks, stages = np.divmod(np.argsort(self.placed, axis=None), self.stages)
        return stages, chunks

    @cached_property
    def _when(self) -> tuple[Int[np.ndarray, "microbatches places"], ...]:
        """The ticks of all jobs by lane."""
        return tuple(_once(self, lane) for lane in LANES)

    def _waiting(self, writer: str) -> Int32[np.ndarray, "ticks stages"]:
        slots = np.zeros(self.jobs.shape, np.int32)
        stages, _ = self._homes
        when, last = self._when[LANES.index(writer)], self._when[2]
        for s in range(self.stages):
            own = stages == s
            starts, stops = when[:, own].reshape(-1), last[:, own].reshape(-1)
            found = fewest([Interval(start, stop + 1) for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)])
            for each in self._when[LANES.index(writer) :]:
                slots[each[:, own].reshape(-1), s] = found
        return _frozen(slots)

    def _lengths(self, *costs: Cost) -> Float[np.ndarray, " ticks"]:
        return np.array([0, *costs], np.float64)[self.kinds].max(axis=1) / self.chunks


def _frozen(table) -> Int32[np.ndarray, "..."]:
    table = np.array(table, np.int32)
    table.setflags(write=False)
    return table


def _check(schedule: Branching) -> None:
    """Refuse a schedule that cannot run."""
    counts = sum(table >= 0 for table in schedule.lanes.values())
    if not np.any(counts):
        raise ValueError(f"The tables have no job in {schedule.ticks} ticks on {schedule.stages} stages. Add a microbatch.")
    twice = np.argwhere(counts > 1).tolist()
    if twice:
        tick, s = twice[0]
        raise CannotRun(tick, s, "two jobs in one tick. A stage has one at most; move one of them to another tick.")
    forward, backward, weight = schedule._when
    stages, chunks = schedule._homes
    last = len(stages) - 1
    rules = [("forward", forward[:, 1:], forward[:, :-1], range(1, last + 1), "forward at the place before")]
    rules += [("backward", backward[:, :-1], backward[:, 1:], range(last), "backward at the place after")]
    rules += [("backward", backward[:, last:], forward[:, last:], [last], "forward")]
    rules += [("weight", weight, backward, range(last + 1), "backward")]
    for lane, later, sooner, at, what in rules:
        late = np.argwhere(later <= sooner).tolist()
        if late:
            m, k = late[0]
            job = f"{lane} of microbatch {job_name(m, int(chunks[at[k]]), schedule.chunks)}"
            raise CannotRun(
                int(later[m, k]),
                int(stages[at[k]]),
                f"{job} needs its {what}, which runs in tick {sooner[m, k]}. Move it to tick {sooner[m, k] + 1} or later.",
            )


def _once(schedule: Branching, lane: str) -> Int[np.ndarray, "microbatches places"]:
    """The tick of every job of `lane`, by microbatch and place: each runs exactly once."""
    when = np.full((schedule.microbatches, schedule.placed.size), -1)
    table = schedule.lanes[lane]
    for tick, s in np.argwhere(table >= 0).tolist():
        m, c = divmod(int(table[tick, s]), schedule.chunks)
        place = schedule.placed[c, s]
        if when[m, place] >= 0:
            name = job_name(m, c, schedule.chunks)
            raise CannotRun(tick, s, f"{lane} of microbatch {name} has already run in tick {when[m, place]}. Keep one.")
        when[m, place] = tick
    if (when < 0).any():
        m, place = np.argwhere(when < 0)[0].tolist()
        stages, chunks = schedule._homes
        name = job_name(m, int(chunks[place]), schedule.chunks)
        raise ValueError(
            f"{lane} of microbatch {name} runs in no tick on stage {stages[place]}. Add it, or leave that microbatch out."
        )
    return when
