"""A pipeline schedule: tables of integers that say which job each stage runs in each tick. The
tables are checked when they are made.

The legend: P stages, M microbatches, v chunks of layers per stage, F forward, B backward, I input
gradient, W weight gradient. A job is the work of one chunk for one microbatch. The job's number is
microbatch * v + chunk, and its lane is its kind: "forward", "backward" (B or I) or "weight" (W).
Each lane has a table, ticks x stages, of jobs, with -1 for an idle stage. An example with v = 1 is
the forward table [[0, -1], [1, 0], [-1, 1]]: in tick 1, stage 0 runs microbatch 1, and stage 1 runs
microbatch 0. The placement, [v, P], has each chunk's place (position) in the model, 0 to vP - 1.

A schedule runs in lockstep or per stage. `Schedule.per_stage` finds from the tables whether it runs
per stage.

* In *lockstep*, all stages run the lanes of a tick in the same order: a stage runs at most one
  forward, then at most one backward, then at most one weight job. In the middle of 1F1B, for
  example, each stage runs one forward and one backward job in every tick. The next stage must use
  the output of tick t in tick t + 1, so outputs need no buffers (slots). The placement is looped:
  chunk c of stage s, of P stages, is at place c P + s.
* *Per stage*: in each tick a stage runs at most one job, and other stages may run jobs of other
  lanes. The output of tick t is available from tick t + 1 on, and waits in a slot until it is used.
  Any chunk may be at any place of the model.

The head computes two results from the output of the last chunk of the model: the loss, and the
cotangent with which the backward pass begins. The head is no lane: it has no table, and runs in the
tick of that chunk's forward job. A `Message` is a result that a later job uses. The head's
cotangent is a `Message` too, and its field `lane` is "head".

Everything else (`phases`, `makespan`, `in_flight`, the slots, the messages) is derived from the
tables. `lanes` has the table of each lane, and `_costs` returns the time of one chunk in each lane.
`_homes` has the stage and the chunk of each place. `_when` has, for each lane, the ticks of its
jobs, [M, places].
"""

import dataclasses
import itertools
import operator
from collections.abc import Mapping
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int, Int32, Shaped

from parallax.schedule.jobs import LANES, Cost, Job, start_times
from parallax.schedule.places import (
    Interval,
    Placement,
    checked_placement,
    coloured,
    fewest,
    is_looped,
    looped_placement,
)


class Phase(NamedTuple):
    """As many successive ticks as possible in which the same set of lanes runs. A lane is a kind of
    job; it runs in a tick if at least one stage has a job of this kind.

    Attributes:
        start: the first tick.
        stop: the tick after the last one.
        lanes: the lanes that run, in their order within a tick.
    """

    start: int
    stop: int
    lanes: tuple[str, ...]


class Span(NamedTuple):
    """One job on one stage. The times are in the unit of the costs that `Schedule.lockstep` or
    `Schedule.asynchronous` gets, and are counted from the start of the schedule.

    Attributes:
        stage: the number of the stage that runs the job, from 0.
        lane: "forward", "backward" or "weight".
        microbatch: the number of the microbatch, from 0.
        chunk: the number of the chunk of the stage's layers, from 0.
        start: the time at which the job begins.
        stop: the time at which the job ends.
    """

    stage: int
    lane: str
    microbatch: int
    chunk: int
    start: float
    stop: float


class Message(NamedTuple):
    """The output of one job, or of the head, that another job uses.

    Attributes:
        lane: "forward" for an activation, "backward" for a stage's cotangent, and "head" for the
            head's cotangent.
        sent: the tick at whose end the message is sent.
        used: the tick of the job that needs the message.
        source: the stage that sends the message.
        target: the stage that needs the message, which may be the stage that sends it.
    """

    lane: str
    sent: int
    used: int
    source: int
    target: int


class CannotRun(ValueError):
    """The error for a table that cannot run.

    The message names the job, the tick and the stage; the attribute `tick` is this tick.
    """

    def __init__(self, tick: int, stage: int, problem: str):
        super().__init__(f"tick {tick}, stage {stage}: {problem}")
        self.tick = tick


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Schedule:
    """A pipeline schedule: every job occurs once, in a tick after the jobs that it needs.

    The tables are integers, `[ticks, stages]`: microbatch * chunks + chunk, or -1 for an idle
    stage. The schedule has read-only copies of the tables.

    Args:
        forward: the forward jobs.
        backward: the backward jobs, which compute the gradients of the input and of the weights,
            or, with a weight table, only the gradient of the input.
        weight: the jobs of the weight gradient, if it is separate.
        placement: an array `[chunks, stages]`, whose entry [c, s] is the place (the position) of
            chunk c of stage s in the model. Each place, from 0 to chunks * stages - 1, occurs once,
            and place 0 is on stage 0. By default stage s has one chunk, at place s.

    Raises:
        CannotRun: a table breaks a rule; the message names the job, the tick and the stage.
        ValueError: a table is not an array of integers `[ticks, stages]`, the tables differ in
            shape, the placement is not possible, or a job is missing.
    """

    forward: Shaped[np.ndarray, "_ticks _stages"]
    backward: Shaped[np.ndarray, "_ticks _stages"]
    weight: Shaped[np.ndarray, "_ticks _stages"] | None = None
    placement: Placement | None = None

    def __post_init__(self):
        """Replaces the tables by read-only copies, and checks them and the placement."""
        # The weight table is optional.
        for lane in LANES[: 2 if self.weight is None else 3]:
            table = np.array(getattr(self, lane))
            _check_table(lane, table, np.shape(self.forward))
            object.__setattr__(self, lane, _frozen(table))
        P = self.forward.shape[1]
        placement = looped_placement(P) if self.placement is None else self.placement
        placement = checked_placement(f"A schedule of {P} stages", placement)
        if placement.shape[1] != P:
            raise ValueError(
                f"The placement must have the shape [chunks, {P}], since the tables have {P} "
                f"stages; got the array {placement.tolist()}."
            )
        if placement[:, 0].min() != 0:
            raise ValueError(
                "The placement must give stage 0 the first chunk of the model (place 0), since "
                f"stage 0 has the batch; got {placement.tolist()}. Number the stages so that "
                "stage 0 has place 0."
            )
        # The record is frozen, so this is the way to set a field.
        object.__setattr__(self, "placement", placement)
        _check(self)

    def __repr__(self) -> str:
        sizes = f"stages={self.stages}, microbatches={self.microbatches}, chunks={self.chunks}"
        return f"Schedule({sizes}, ticks={self.ticks}, lanes={'/'.join(self.lanes)})"

    @property
    def lanes(self) -> dict[str, Int32[np.ndarray, "ticks stages"]]:
        """A dict from each lane, which is a kind of job, to its table. The keys are "forward",
        "backward" and, if the weight gradient is a separate job, "weight". They are in the order in
        which the lanes run within a tick."""
        tables = {lane: getattr(self, lane) for lane in LANES}
        return {lane: table for lane, table in tables.items() if table is not None}

    @property
    def ticks(self) -> int:
        """The number of ticks: each table has one row for each tick."""
        return self.forward.shape[0]

    @property
    def stages(self) -> int:
        """The number of stages, P: each table has one column for each stage."""
        return self.forward.shape[1]

    @property
    def chunks(self) -> int:
        """The number of chunks of layers on each stage, v."""
        return len(self.placed)

    @property
    def placed(self) -> Int32[np.ndarray, "chunks stages"]:
        """`placement`, which is never None once the schedule is made."""
        assert self.placement is not None
        return self.placement

    @cached_property
    def per_stage(self) -> bool:
        """Whether the schedule runs *per stage*: the weight gradient is a separate job, and no
        stage has two jobs in one tick. Otherwise it runs in lockstep.
        """
        jobs = np.sum([table >= 0 for table in self.lanes.values()], axis=0)  # of each cell
        # The executor of schedules that run per stage has only the jobs F, I and W, and no job B.
        # So a table without W runs in lockstep, even if no stage has two jobs in a tick.
        return self.weight is not None and not (jobs > 1).any()

    @cached_property
    def microbatches(self) -> int:
        """The number of microbatches, M. It is computed from the largest job number in the tables,
        since `Schedule` refuses tables in which a job number from 0 to the largest is missing."""
        return int(max(table.max() for table in self.lanes.values())) // self.chunks + 1

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        """The successive stretches of ticks in which the same lanes (kinds of job) run. In lockstep
        each stretch is compiled as one loop over its ticks, without a conditional.

        In lockstep, 1F1B has three stretches (forward; forward and backward; backward). The
        zero-bubble schedule has four (F; F and I; F, I and W; I and W), where F is the forward
        lane, I the input gradient and W the weight gradient. A `Phase` has the first tick of the
        stretch, the tick after the last one, and the lanes.
        """
        return phases_of({lane: (table >= 0).any(axis=1) for lane, table in self.lanes.items()})

    @cached_property
    def kinds(self) -> Int32[np.ndarray, "ticks stages"]:
        """The kind of each stage's job in each tick: 0 none, 1 forward (F), 2 input gradient (I), 3
        weight gradient (W). Valid only if the schedule runs per stage (`per_stage`): a stage then
        has at most one job in a tick, and no job computes both gradients."""
        # `lanes` is in the order forward, backward, weight. `_frozen` makes a read-only int32 copy.
        numbered = enumerate(self.lanes.values(), 1)
        return _frozen(sum((table >= 0) * number for number, table in numbered))

    @property
    def last(self) -> int:
        """The stage that has the model's last chunk of layers. The first chunk is always on stage
        0."""
        return int(self._homes[0][-1])

    def makespan(
        self, forward: Cost = 1, backward: Cost | None = None, weight: Cost = 1, *, hop: Cost = 0
    ) -> float:
        """Returns the total time of the ticks. Each tick ends with an exchange of messages that
        takes the time `hop`.

        In a schedule that runs per stage (`per_stage`), a tick takes the time of its most expensive
        job. In any other schedule the stages run in lockstep: in each tick first all forward, then
        all backward, then all weight jobs. Such a tick takes the sum of the times of the kinds of
        job that at least one stage runs in the tick. A cost is the time of one microbatch through a
        whole stage, in any unit; one chunk costs this time divided by the number of chunks per
        stage. By default `backward` is 1 if a backward job is only the input gradient, and 2 if it
        is both gradients, so that schedules of the same work can be compared.
        """
        costs = self._costs(forward, backward, weight)
        # `timed_ticks` has, for each lane (kind of job), the number of ticks that take its cost.
        return float(np.dot(self.timed_ticks(forward, backward, weight), costs)) + hop * self.ticks

    def bubble(self, forward: Cost = 1, backward: Cost | None = None, weight: Cost = 1) -> float:
        """Returns the idle time of a stage: `makespan` without messages, minus the time of the
        stage's jobs. For each microbatch, the stage's jobs take the time `forward` + `backward`,
        plus `weight` if the weight gradient is a separate job. The arguments are those of
        `makespan`."""
        work = self.microbatches * self.chunks  # the jobs of each lane on a stage
        # `timed_ticks` has, for each lane, the number of ticks in which `makespan` counts a job of
        # the lane. Every stage has the same work, so all stages have the same idle time.
        idle = np.subtract(self.timed_ticks(forward, backward, weight), work)
        return float(idle @ self._costs(forward, backward, weight))

    def timed_ticks(
        self, forward: Cost = 1, backward: Cost | None = None, weight: Cost = 1
    ) -> tuple[int, ...]:
        """Returns, for each lane, the number of ticks in which `makespan` counts the time of a job
        of that lane.

        A lane is a kind of job: forward, backward and, if it is separate, weight. In a schedule
        that runs per stage (`per_stage`), a tick counts for the lane of its most expensive job. In
        any other schedule, where the stages run in lockstep, a tick counts for each lane of which
        at least one stage has a job. The costs are those of `makespan`; in lockstep they make no
        difference here.
        """
        if not self.per_stage:
            return tuple(int((table >= 0).any(axis=1).sum()) for table in self.lanes.values())
        # The costs by `kinds`: 0 nothing, 1 F, 2 I, 3 W. There is no B: a schedule that runs per
        # stage has W. An idle stage (cost -1) is cheaper than any job, even one of cost 0. Of equal
        # costs the first counts: any would do, since the tick takes the same time.
        costs = np.concatenate([[-1.0], self._costs(forward, backward, weight)])
        tick = np.arange(self.ticks)
        most_expensive_kinds = self.kinds[tick, costs[self.kinds].argmax(axis=1)]  # by tick
        # `[1:]` drops the number of ticks in which all stages are idle.
        return tuple(np.bincount(most_expensive_kinds, minlength=4)[1:].tolist())

    def lockstep(
        self, forward: Cost = 1, backward: Cost | None = None, weight: Cost = 1, *, hop: Cost = 0
    ) -> tuple[Span, ...]:
        """Returns the start and end of every job (a `Span`), under the assumption that all devices
        run one program and exchange messages after each tick. The spans are sorted by their start,
        and then by stage.

        The arguments are those of `makespan`: a cost is the time of one microbatch through all
        chunks of a stage, and `hop` is the time of the exchange after a tick. With `hop=0` the last
        job ends at the makespan. By default `backward` is 1 if the weight gradient is a separate
        job, and else 2. A schedule that runs per stage (`per_stage`) can be timed too: in each
        tick, the jobs of all stages start together, and the longest of them ends the tick.
        """
        costs = self._costs(forward, backward, weight).tolist()
        spans, now = [], 0.0
        for tick in range(self.ticks):
            stop = now
            for (lane, table), cost in zip(self.lanes.items(), costs, strict=True):
                # In lockstep all stages run one lane after another, and `stop` is the end of the
                # lane before. Per stage, all jobs of a tick start together, at `now`.
                start = now if self.per_stage else stop
                jobs = [(s, job) for s, job in enumerate(table[tick].tolist()) if job >= 0]
                for s, job in jobs:
                    microbatch, chunk = divmod(job, self.chunks)
                    spans.append(Span(s, lane, microbatch, chunk, start, start + cost))
                stop = max(stop, start + cost) if jobs else stop
            now = stop + hop
        return tuple(sorted(spans, key=operator.attrgetter("start", "stage")))

    def asynchronous(
        self, forward: Cost = 1, backward: Cost | None = None, weight: Cost = 1, *, hop: Cost = 0
    ) -> tuple[Span, ...]:
        """Returns the start and end of every job (a `Span`), under the assumption that no stage
        waits for the end of a tick. This is the case if each stage is a separate program that
        exchanges messages.

        Each stage runs its jobs in the order in which the tables have them. A job starts once its
        stage is free and its input is there. The output of a job is on its own stage at once, and
        on other stages after the time `hop`, which is in the unit of the costs. The costs are those
        of `makespan`: by default `backward` is 1 if the weight gradient is a separate job, and else
        2. With `hop=0` no job starts later than in the result of the method `lockstep`.
        """
        costs = dict(zip(self.lanes, self._costs(forward, backward, weight).tolist(), strict=True))
        stages, chunks = self._homes  # the stage and the chunk of each place
        orders: list[list[Job]] = [[] for _ in range(self.stages)]
        # Each stage's jobs by tick, and within a tick F before B, and B before W.
        for tick, (lane, table) in itertools.product(range(self.ticks), self.lanes.items()):
            for s, job in enumerate(table[tick].tolist()):
                if job >= 0:
                    microbatch, chunk = divmod(job, self.chunks)
                    orders[s].append(Job(lane, microbatch, int(self.placed[chunk, s])))
        starts = start_times(orders, dict(enumerate(stages.tolist())), costs, hop)

        spans = []
        for (lane, microbatch, place), start in starts.items():
            stage, chunk = int(stages[place]), int(chunks[place])
            spans.append(Span(stage, lane, microbatch, chunk, start, start + costs[lane]))
        return tuple(sorted(spans, key=operator.attrgetter("start", "stage")))

    @cached_property
    def in_flight(self) -> Float[np.ndarray, " stages"]:
        """For each stage, the largest number of microbatches whose residuals the stage holds at
        once.

        A stage holds residuals from the forward tick to the tick of the last gradient, both
        included. With v chunks per stage, the residuals of one chunk count as 1/v of a microbatch.
        So the result is each stage's number of slots (`slots`) divided by v.
        """
        # The last lane is the last reader of the residuals.
        reads_last = list(self.lanes.values())[-1] >= 0
        # Up to each tick, the slots that were written, and the slots that were freed before it: a
        # slot is in use until the end of the tick of its last reader.
        saved = np.cumsum(self.forward >= 0, axis=0)
        freed = np.cumsum(reads_last, axis=0) - reads_last
        return (saved - freed).max(axis=0) / self.chunks

    @cached_property
    def slots(self) -> dict[str, Int32[np.ndarray, "ticks stages"]]:
        """For each lane, the slot of each job's residuals, [ticks, stages], or -1 for no job. The
        forward lane writes a slot, and the other lanes read it.

        Jobs whose residuals are held at the same time have different slots. Each forward job gets
        the lowest free slot when it starts, so no other assignment needs fewer slots than this one.
        A slot freed in tick t is written again in tick t + 1 at the earliest.
        """
        # `saved_slots` also has a slot for each tick in which the forward lane has no job.
        return {
            lane: _frozen(np.where(table < 0, -1, self.saved_slots[lane]))
            for lane, table in self.lanes.items()
        }

    @cached_property
    def saved_slots(self) -> dict[str, Int32[np.ndarray, "ticks stages"]]:
        """Like `slots`, but in a tick without a forward job the forward lane has the lowest free
        slot, not -1: in lockstep an idle stage also writes, and must not overwrite a slot that is
        in use."""
        return coloured(self.lanes)

    @cached_property
    def deferred_slots(self) -> dict[str, Int32[np.ndarray, "ticks stages"]]:
        """The slots of the arrays that I (the input gradient) stores for W (the weight gradient) of
        the same microbatch and chunk. The dict is empty if W is not a separate job.

        The table "backward" has the slots that I writes, and the table "weight" the slots that W
        reads. Where a stage has no I in a tick, "backward" has the lowest free slot, since in
        lockstep an idle stage writes too. Where a stage has no W, "weight" has -1.
        """
        if self.weight is None:
            return {}
        return coloured({"backward": self.backward, "weight": self.weight})

    @property
    def slot_count(self) -> int:
        """The number of `slots` on the stage that needs the most slots. A slot holds the residuals
        of one microbatch in one chunk of layers.

        For 1F1B in lockstep, with P stages of one chunk each, the number is at most 2P - 1, however
        many microbatches there are.
        """
        return int(self.slots["forward"].max()) + 1

    @property
    def deferred_count(self) -> int:
        """The number of `deferred_slots` on the stage that needs the most slots. A slot holds the
        arrays that one input-gradient job (I) stores for its weight-gradient job (W).

        For the zero-bubble schedule in lockstep the number is at most the number of stages, however
        many microbatches there are.
        """
        if self.weight is None:
            return 0
        written = self.deferred_slots["backward"]
        # In lockstep an idle stage writes too, into a free slot, which counts. Per stage an idle
        # stage writes nothing.
        return int((written[self.backward >= 0] if self.per_stage else written).max()) + 1

    @cached_property
    def messages(self) -> tuple[Message, ...]:
        """All activations and cotangents that one chunk passes to the next or the previous chunk of
        the model, even on the same stage, and the head's cotangents. What a chunk keeps for its own
        later jobs is no message: see `slots` and `deferred_slots`.

        The head computes the loss from the output of the model's last chunk of layers. The head's
        cotangent is made in the tick of that chunk's forward job, and on the same stage (`last`).
        The cotangent waits there for the chunk's backward job, so the cotangent is a message from a
        stage to itself.
        """
        stages, _ = self._homes  # the stage of each place
        # The tick of each job, [M, places]; the index -1 is the last place.
        forward, backward = self._when["forward"], self._when["backward"]
        # A lane, the ticks in which its messages are sent and used, [M], and their two stages.
        hops = [("head", forward[:, -1], backward[:, -1], self.last, self.last)]
        for place, after in itertools.pairwise(range(len(stages))):
            stage, stage_after = int(stages[place]), int(stages[after])
            hops.append(("forward", forward[:, place], forward[:, after], stage, stage_after))
            hops.append(("backward", backward[:, after], backward[:, place], stage_after, stage))
        return tuple(
            Message(lane, int(sent), int(used), source, target)
            for lane, departures, uses, source, target in hops
            for sent, used in zip(departures, uses, strict=True)
        )

    @cached_property
    def arrivals(self) -> Mapping[Message, int]:
        """The slot in which each message waits on its target stage.

        In lockstep only the cotangents of the head, which computes the loss, wait: other messages
        are used in the next tick.
        """
        slots: dict[Message, int] = {}
        # A slot is in use from the tick that sends the message until the tick that uses it. In
        # lockstep that tick is included: within a tick the head writes before B reads. Per stage,
        # messages are written after the jobs of a tick, so one may be written into the slot that a
        # job of this tick has just read.
        until = 0 if self.per_stage else 1
        waiting = [m for m in self.messages if self.per_stage or m.lane == "head"]
        for s in range(self.stages):
            to_stage = [message for message in waiting if message.target == s]
            # An interval does not contain its second number. `fewest` returns a slot for each
            # interval, with as few slots as possible: intervals that overlap get different slots.
            intervals = [Interval(message.sent, message.used + until) for message in to_stage]
            slots |= zip(to_stage, fewest(intervals), strict=True)
        return slots

    @property
    def arrival_count(self) -> int:
        """The number of slots for messages on the stage that needs the most slots."""
        return max(self.arrivals.values()) + 1

    @cached_property
    def _homes(self) -> tuple[Int[np.ndarray, " places"], Int[np.ndarray, " places"]]:
        """For each place (position of a chunk in the model), the stage that has the chunk, and the
        number of the chunk on that stage: a pair of arrays, [places] each."""
        # `argsort` gives for each place the index of its chunk in the flattened [chunks, stages].
        chunks, stages = np.divmod(np.argsort(self.placed, axis=None), self.stages)
        return stages, chunks

    @cached_property
    def _when(self) -> dict[str, Int[np.ndarray, "microbatches places"]]:
        """For each lane (kind of job), the tick of each of its jobs, in an array [microbatches,
        places]. A place is the position of a chunk of layers in the model."""
        return {lane: _once(self, lane) for lane in self.lanes}

    def _costs(
        self, forward: Cost, backward: Cost | None, weight: Cost
    ) -> Float[np.ndarray, " lanes"]:
        """Returns, for each lane (kind of job) of the schedule, the time of one job: one chunk of
        layers, for one microbatch. The arguments are the times of a whole stage, for one
        microbatch, as in `makespan`."""
        # A chunk is 1/v of a stage's layers. A schedule without W has only the first two lanes.
        costs = forward, backward_cost(self, backward), weight
        return np.array(costs[: len(self.lanes)], dtype=np.float64) / self.chunks


def phases_of(runs: Mapping[str, Any]) -> tuple[Phase, ...]:
    """Divides the ticks into stretches, each as long as possible, in which the same lanes (kinds of
    job) run. For each lane, `runs` has an array of bools, [ticks]: whether at least one stage has a
    job of this lane in the tick."""
    table = np.stack(list(runs.values()), axis=1)  # [ticks, lanes]
    # A phase starts in tick 0 and in each tick that differs from the tick before.
    starts = [0, *(np.flatnonzero((table[1:] != table[:-1]).any(axis=1)) + 1).tolist()]
    # The names of the lanes that run.
    lanes = [tuple(itertools.compress(runs, table[start])) for start in starts]
    return tuple(map(Phase, starts, [*starts[1:], len(table)], lanes))


def job_name(microbatch: int, chunk: int, chunks: int) -> str:
    """Returns the label of a job in a picture: `3` for microbatch 3 if a stage has one chunk, else
    `3.1` for microbatch 3 and chunk 1."""
    return str(microbatch) if chunks == 1 else f"{microbatch}.{chunk}"


def backward_cost(schedule: Schedule, backward: Cost | None) -> Cost:
    """Returns the cost `backward`; by default 1 if the weight gradient is a separate job, and 2 if
    a backward job computes both gradients."""
    if backward is not None:
        return backward
    return 2 if schedule.weight is None else 1


def _frozen(table) -> Int32[np.ndarray, "..."]:
    """Returns a read-only copy of a table, as int32."""
    table = np.array(table, np.int32)
    table.setflags(write=False)
    return table


def _check_table(lane: str, table: np.ndarray, shape: tuple[int, ...]) -> None:
    """Raises `ValueError` or `CannotRun` if `table` is not a table of jobs: whole numbers of the
    shape `shape`, [ticks, stages], each -1 or the number of a possible job."""
    if table.ndim != 2 or table.size == 0 or table.dtype.kind not in "iu":
        raise ValueError(
            f"The {lane} table must be whole numbers, ticks x stages, got {table.dtype} of shape "
            f"{table.shape}. Write one row per tick and -1 where a stage rests."
        )
    if table.shape != shape:
        raise ValueError(
            f"The tables must have one shape, got forward {shape} and {lane} {table.shape} "
            "(ticks x stages). Pad the shorter one with rows of -1."
        )
    # A stage runs the jobs 0 to M v - 1, each in its own tick, so there are at least M v ticks, and
    # each job's number is below the number of ticks.
    if table.min() < -1 or table.max() >= len(table):
        tick, stage = np.argwhere((table < -1) | (table >= len(table))).tolist()[0]
        problem = (
            f"{lane} of job {table[tick, stage]}: jobs are numbered from 0 and {len(table)} ticks "
            f"hold at most {len(table)}. Number the microbatches from 0 without a gap. In a table "
            "a job is microbatch * chunks + chunk, or -1 where the stage rests."
        )
        raise CannotRun(tick, stage, problem)


def _check(schedule: Schedule) -> None:
    """Raises `ValueError` or `CannotRun` if a schedule has no jobs, or if a job is missing, runs
    twice, or runs before a job that it needs. If the schedule runs in lockstep (`per_stage` is
    False), there are three more conditions. The placement must be that of `looped_placement`. Each
    tick must have a job on at least one stage. A job that needs the job of a neighbouring chunk
    must run in the tick right after that job.
    """
    if not schedule.microbatches:
        raise ValueError(
            f"The tables ({schedule.ticks} ticks, {schedule.stages} stages) have no job: every "
            "entry is -1. Add a microbatch."
        )
    # `when` has for each lane the tick of each job, [M, places]; `_when` raises an error for a job
    # that runs twice or never. `last` is the last place of the model.
    per_stage, when, last = schedule.per_stage, schedule._when, schedule.placed.size - 1
    # Only a schedule that runs per stage may have another placement. To run so, it needs a weight
    # table, and at most one job of a stage in a tick: the error asks for these.
    if not per_stage and not is_looped(schedule.placed):
        raise ValueError(
            f"The placement {schedule.placed.tolist()} is not that of looped_placement, so the "
            "schedule needs a table of weight gradients, and no stage may have two jobs in one "
            "tick. Split each backward job into an input gradient and a weight gradient, each in a "
            "tick of its own."
        )
    places = np.arange(last + 1)
    # A lane, the places of its jobs, and the lane and the places of the jobs that these need. F
    # needs F of the place before; B needs B of the place after; at the last place B needs F of that
    # place; W needs B of its own place. The places of F and B are in the order in which a
    # microbatch passes them, so that its first fault in this order is the one that is reported.
    needed = [
        ("forward", places[1:], "forward", places[:-1]),
        ("backward", places[-2::-1], "backward", places[:0:-1]),  # last - 1 to 0, last to 1
        ("backward", places[-1:], "forward", places[-1:]),
        ("weight", places, "backward", places),
    ]
    # Without a weight lane, `[: 2 + 1]` leaves out the last entry.
    for lane, targets, cause, sources in needed[: len(schedule.lanes) + 1]:
        # The ticks from a job to the one that needs it, [M, places].
        waits = when[lane][:, targets] - when[cause][:, sources]
        # A result of the same lane comes from another place, as a message, which arrives after the
        # tick. In lockstep no such message waits in a slot, so it must be used in the next tick. A
        # job of another lane at the same place may use the result in the same tick.
        wrong_message = waits < 1 if per_stage else waits != 1
        wrong = wrong_message if lane == cause else waits < 0
        for m, k in np.argwhere(wrong).tolist()[:1]:  # the first fault, if there is one
            why = _wrong_tick(schedule, lane, cause, int(when[cause][m, sources[k]]))
            raise _cannot_run(schedule, lane, m, int(targets[k]), why)
    # Per stage, a message may wait through a tick without jobs; in lockstep such a tick has no use.
    idle = np.flatnonzero(np.all([table < 0 for table in schedule.lanes.values()], axis=(0, 2)))
    if idle.size and not per_stage:
        problem = "no job runs here, nor on any other stage. Leave this tick out."
        raise CannotRun(int(idle[0]), 0, problem)  # stage 0 stands for all stages


def _wrong_tick(schedule: Schedule, lane: str, cause: str, tick: int) -> str:
    """Returns the words that follow a job's name in the error for a job in a wrong tick. The job,
    of the lane `lane`, needs another job, of the lane `cause`, which runs in the tick `tick`. If
    the lanes differ, the job runs too early. If they are the same, the job runs too early or, in a
    lockstep schedule, too late."""
    if lane != cause:
        # Per stage, the two jobs cannot share a tick.
        ticks = "a later tick" if schedule.per_stage else "that tick or a later one"
        return f"comes before its {cause}, which runs in tick {tick}. Move it to {ticks}."
    source = "previous" if lane == "forward" else "next"
    return (
        f"must run in tick {tick + 1}{' or later' if schedule.per_stage else ''}, since the {lane} "
        f"of this microbatch at the {source} place of the model runs in tick {tick}."
    )


def _cannot_run(schedule: Schedule, lane: str, microbatch: int, place: int, why: str) -> CannotRun:
    """Returns the error for the job of `microbatch` in the chunk of layers at `place`, a position
    in the model. The message has the job's tick, stage and name, and ends with `why`."""
    stage, chunk = (int(home[place]) for home in schedule._homes)
    tick = int(schedule._when[lane][microbatch, place])
    return CannotRun(tick, stage, f"{_job(schedule, lane, microbatch, chunk)} {why}")


def _once(schedule: Schedule, lane: str) -> Int[np.ndarray, "microbatches places"]:
    """Returns the tick of every job of `lane`, in an array [microbatches, places]. A place is the
    position of a chunk of layers in the model. Raises `CannotRun` if a job runs twice, and
    `ValueError` if a job never runs."""
    P, M, v = schedule.stages, schedule.microbatches, schedule.chunks
    when = np.full((M, v * P), -1, np.int32)
    jobs = schedule.lanes[lane].reshape(-1)
    # The cells with a job, row by row; then their ticks, stages, microbatches and chunks. int32
    # takes half the memory of int64.
    runs = np.flatnonzero(jobs >= 0).astype(np.int32)
    (ticks, stages), (m, c) = np.divmod(runs, P), np.divmod(jobs[runs], v)
    place = schedule.placed[c, stages]
    when[m, place] = ticks
    # If `when` has fewer ticks than the table has runs, a job runs twice. `first[job]` has, for
    # each run, the index of the first run of the same job. `second` is a run that is not the first.
    if (when >= 0).sum() < len(ticks):
        _, first, job = np.unique(m * (v * P) + place, return_index=True, return_inverse=True)
        second = np.flatnonzero(first[job] != np.arange(len(ticks)))[0]
        name = _job(schedule, lane, int(m[second]), int(c[second]))
        problem = f"{name} has already run in tick {ticks[first[job[second]]]}. Keep one."
        raise CannotRun(int(ticks[second]), int(stages[second]), problem)
    if (when < 0).any():
        m, place = np.argwhere(when < 0)[0].tolist()
        stage, chunk = (int(home[place]) for home in schedule._homes)
        raise ValueError(
            f"{_job(schedule, lane, m, chunk)} runs in no tick on stage {stage}. Add it, or number "
            "the microbatches from 0 without a gap."
        )
    return when


def _job(schedule: Schedule, lane: str, microbatch: int, chunk: int) -> str:
    """Returns a job's name for an error; the chunk is named only if a stage has several."""
    of_chunk = f", chunk {chunk}," if schedule.chunks > 1 else ""
    return f"{lane} of microbatch {microbatch}{of_chunk}"
