"""What a pipeline schedule is: integer tables, checked when they are made, that say which job each stage runs in each tick.

The legend: P stages, M microbatches, v chunks a stage (stage s holds the layers of chunks 0..v-1, chunk c + 1 following
chunk c around the ring), F forward, B backward, I input gradient, W weight gradient; a job is one chunk of one microbatch,
numbered microbatch * v + chunk. A table is ticks x stages, -1 where the stage rests.

Ticks are *paired*: in one tick a stage runs at most one forward, then at most one backward, then at most one weight job, so a
pipeline that is full runs F and B in every tick. What leaves a stage in tick t is used by the next stage in tick t + 1, or never:
there are no receive queues. Everything else (`phases`, `makespan`, `in_flight`, the slots) is derived from the tables.
"""

import dataclasses
import itertools
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int, Int32, Shaped

from parallax.schedule.places import coloured

Cost = float | int  # of one microbatch through a whole stage, in any unit of time
LANES = ("forward", "backward", "weight")  # in the order in which they run within a tick


class Phase(NamedTuple):
    """Ticks in each of which the same lanes run, each on some stage: as long a stretch as there is.

    Attributes:
        start: its first tick.
        stop: the tick after its last.
        lanes: those that run, of "forward", "backward" and "weight", in the order in which they run within a tick.
    """

    start: int
    stop: int
    lanes: tuple[str, ...]


class Span(NamedTuple):
    """One job on one stage.

    Attributes:
        stage: where it runs, from 0.
        lane: "forward", "backward" or "weight".
        microbatch: which, from 0.
        chunk: the chunk of the stage's layers, from 0.
        start: when it begins, in the unit of the costs; the first job begins at 0.
        stop: when it ends.
    """

    stage: int
    lane: str
    microbatch: int
    chunk: int
    start: float
    stop: float


class CannotRun(ValueError):
    """A table that cannot run. The message names the job, the tick and the stage; `tick` is that tick."""

    def __init__(self, tick: int, stage: int, problem: str):
        super().__init__(f"tick {tick}, stage {stage}: {problem}")
        self.tick = tick


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Schedule:
    """A pipeline schedule that can run: each job once, each after what it needs, each input exactly one hop and one tick earlier.

    The tables are whole numbers, `[ticks, stages]`: microbatch * chunks + chunk, or -1 where the stage rests. They are copied
    and cannot be written to.

    Args:
        forward: the forward jobs.
        backward: the jobs of both gradients, or, with a weight lane, of the input gradient alone.
        weight: the jobs of the weight gradient, where the two are taken apart.
        chunks: v, of each stage.

    Raises:
        CannotRun: a table breaks a rule; the message names the job, the tick and the stage.
        ValueError: the arrays are no such tables or differ in shape, a job is nowhere, or `chunks` is below 1.
    """

    forward: Shaped[np.ndarray, "_ticks _stages"]
    backward: Shaped[np.ndarray, "_ticks _stages"]
    weight: Shaped[np.ndarray, "_ticks _stages"] | None = None
    chunks: int = 1

    def __post_init__(self):
        """Freeze the tables, then check them."""
        if isinstance(self.chunks, bool) or not isinstance(self.chunks, int | np.integer) or self.chunks < 1:
            raise ValueError(f"A stage has at least one chunk, a whole number of them, got chunks={self.chunks!r}.")
        for lane in LANES[: 2 if self.weight is None else 3]:
            table = np.array(getattr(self, lane))
            if table.ndim != 2 or table.size == 0 or table.dtype.kind not in "iu":
                raise ValueError(
                    f"The {lane} table must be whole numbers, ticks x stages, got {table.dtype} of shape {table.shape}. "
                    "Write one row a tick and -1 where a stage rests."
                )
            if table.shape != np.shape(self.forward):
                raise ValueError(
                    f"The tables must have one shape, got forward {np.shape(self.forward)} and {lane} {table.shape} "
                    "(ticks x stages). Pad the shorter one with rows of -1."
                )
            if table.min() < -1 or table.max() >= len(table):
                tick, stage = np.argwhere((table < -1) | (table >= len(table))).tolist()[0]
                raise CannotRun(
                    tick,
                    stage,
                    f"{lane} of job {table[tick, stage]}: jobs are numbered from 0 and {len(table)} ticks hold at most "
                    f"{len(table)}. Use -1 where the stage rests, else microbatch * chunks + chunk.",
                )
            table = table.astype(np.int32)
            table.setflags(write=False)
            object.__setattr__(self, lane, table)
        _check(self)

    def __repr__(self) -> str:
        sizes = f"stages={self.stages}, microbatches={self.microbatches}, chunks={self.chunks}"
        return f"Schedule({sizes}, ticks={self.ticks}, lanes={'/'.join(self.lanes)})"

    @property
    def lanes(self) -> dict[str, Int32[np.ndarray, "ticks stages"]]:
        """The tables by name, in the order in which they run within a tick."""
        return {lane: table for lane in LANES if (table := getattr(self, lane)) is not None}

    @property
    def ticks(self) -> int:
        """The number of rows."""
        return self.forward.shape[0]

    @property
    def stages(self) -> int:
        """P, the number of columns."""
        return self.forward.shape[1]

    @property
    def placed(self) -> Int32[np.ndarray, "chunks stages"]:
        """Where in the model chunk c of stage s stands: at c P + s."""
        return np.arange(self.chunks * self.stages, dtype=np.int32).reshape(self.chunks, self.stages)

    @cached_property
    def microbatches(self) -> int:
        """M: every job up to the largest one in the tables must be there."""
        return int(max(table.max() for table in self.lanes.values())) // self.chunks + 1

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        """The stretches over which the same lanes run, each of them one loop without a conditional.

        1F1B has three: forward alone, both, backward alone; the zero-bubble schedule has four.
        """
        runs = np.stack([(table >= 0).any(axis=1) for table in self.lanes.values()], axis=1)
        starts = [0, *(np.flatnonzero((runs[1:] != runs[:-1]).any(axis=1)) + 1).tolist()]
        named = lambda row: tuple(itertools.compress(self.lanes, row))
        return tuple(Phase(t, stop, named(runs[t])) for t, stop in zip(starts, [*starts[1:], self.ticks], strict=True))

    def makespan(self, forward: Cost = 1, backward: Cost | None = None, weight: Cost = 1) -> float:
        """The time of all ticks in lockstep, where a lane takes its time if any stage runs a job in it.

        Costs are of one microbatch through a whole stage (a chunk costs 1/v), in any unit. With a weight lane `backward` is the
        input gradient alone: `makespan(1, 1, 1)` there compares with `makespan(1, 2)` elsewhere, and these are the defaults.
        """
        return float(self._busy_ticks() @ self._costs(forward, backward, weight))

    def bubble(self, forward: Cost = 1, backward: Cost | None = None, weight: Cost = 1) -> float:
        """The part of `makespan`, as a time, in which a stage rests: `makespan` less its work, M(F + B) or M(F + I + W)."""
        rests = self._busy_ticks() - self.microbatches * self.chunks
        return float(rests @ self._costs(forward, backward, weight))

    def lockstep(self, forward: Cost = 1, backward: Cost | None = None, weight: Cost = 1) -> tuple[Span, ...]:
        """When every job runs if all stages keep step, as one program on all devices does: the last stops at `makespan`."""
        spans, now = [], 0.0
        for tick in range(self.ticks):
            for (lane, table), cost in zip(self.lanes.items(), self._costs(forward, backward, weight), strict=True):
                jobs = [(s, job) for s, job in enumerate(table[tick].tolist()) if job >= 0]
                stop = now + float(cost) if jobs else now
                spans += [Span(s, lane, job // self.chunks, job % self.chunks, now, stop) for s, job in jobs]
                now = stop
        return tuple(spans)

    def asynchronous(
        self, forward: Cost = 1, backward: Cost | None = None, weight: Cost = 1, *, hop: Cost = 0
    ) -> tuple[Span, ...]:
        """When every job runs if no stage waits for another's tick, as separate programs with messages could.

        Each stage keeps the order of its tables and starts a job once it is free and the input is there, `hop` after it left the
        stage before. With `hop=0` no job is later than in `lockstep`.
        """
        costs = dict(zip(self.lanes, self._costs(forward, backward, weight).tolist(), strict=True))
        free = [0.0] * self.stages
        left: dict[tuple[str, int, int], float] = {}
        spans = []
        # Tick by tick, F before B before W, is an order in which every input comes before its use: the tables were checked.
        for tick, (lane, table) in itertools.product(range(self.ticks), self.lanes.items()):
            for s, job in enumerate(table[tick].tolist()):
                if job >= 0:
                    before = self._before(lane, s, job)
                    arrival = 0.0 if before is None else left[lane, *before] + (hop if before[0] != s else 0)
                    start = max(free[s], arrival)
                    left[lane, s, job] = free[s] = start + costs[lane]
                    spans.append(Span(s, lane, job // self.chunks, job % self.chunks, start, free[s]))
        return tuple(spans)

    def asynchronous_makespan(self, forward: Cost = 1, backward: Cost | None = None, weight: Cost = 1, *, hop: Cost = 0) -> float:
        """When the last job of `asynchronous` stops, in the unit of the costs."""
        return max(span.stop for span in self.asynchronous(forward, backward, weight, hop=hop))

    @cached_property
    def in_flight(self) -> Float[np.ndarray, " stages"]:
        """The most microbatches each stage holds residuals of, from a job's forward tick to its last gradient's, both included.

        A chunk's residuals count 1/v: in each stage this is the number of slots it needs, over v.
        """
        last = list(self.lanes.values())[-1]
        made = np.cumsum(self.forward >= 0, axis=0)
        freed = np.cumsum(last >= 0, axis=0) - (last >= 0)  # what is freed in a tick is held until its end
        return (made - freed).max(axis=0) / self.chunks

    @cached_property
    def slots(self) -> dict[str, Int32[np.ndarray, "ticks stages"]]:
        """Where a job's residuals lie: by lane, the slot that a stage writes (forward) or reads (the others) in each tick, or -1.

        Two jobs that are held at one time never share a slot, and no colouring needs fewer: the intervals are coloured in order
        of their start, each with the lowest free slot. A slot freed in tick t is written again in tick t + 1 at the earliest.
        """
        slots = {lane: np.where(table < 0, np.int32(-1), self._places[lane]) for lane, table in self.lanes.items()}
        for table in slots.values():
            table.setflags(write=False)
        return slots

    @cached_property
    def written(self) -> Int32[np.ndarray, "ticks stages"]:
        """The slot that each stage may write in each tick: that of its forward job; where it has none, the lowest free one."""
        return self._places["forward"]

    @cached_property
    def _places(self) -> dict[str, Int32[np.ndarray, "ticks stages"]]:
        """`slots`, and where the forward lane has no job, the lowest slot that is free then."""
        return coloured(self.lanes)

    @cached_property
    def handed_on(self) -> dict[str, Int32[np.ndarray, "ticks stages"]]:
        """With a weight lane, the slots for what I hands on to W: written in `backward`, read in `weight`; else none.

        Where `backward` has no job it is the lowest free slot, and -1 where `weight` has none.
        """
        return {} if self.weight is None else coloured({"backward": self.backward, "weight": self.weight})

    @property
    def slot_count(self) -> int:
        """The slots that the neediest stage needs, each for one chunk of one microbatch: 2P - 1 for 1F1B, whatever M is."""
        return int(self.slots["forward"].max()) + 1

    @property
    def handed_count(self) -> int:
        """The slots of `handed_on`, each for one chunk of one microbatch: P for the zero-bubble schedule, whatever M is."""
        return int(self.handed_on["backward"].max()) + 1 if self.handed_on else 0

    def _busy_ticks(self) -> Int[np.ndarray, " lanes"]:
        return np.array([(table >= 0).any(axis=1).sum() for table in self.lanes.values()])

    def _costs(self, forward: Cost, backward: Cost | None, weight: Cost) -> Float[np.ndarray, " lanes"]:
        costs = forward, backward_cost(self, backward), weight
        return np.array(costs[: len(self.lanes)], dtype=np.float64) / self.chunks

    def _before(self, lane: str, stage: int, job: int) -> tuple[int, int] | None:
        """The stage and the job whose output is this job's input; None at the ends of the pipeline and for weight gradients."""
        if lane == "weight":
            return None
        microbatch, chunk = divmod(job, self.chunks)
        position = chunk * self.stages + stage + (-1 if lane == "forward" else 1)
        if not 0 <= position < self.chunks * self.stages:
            return None
        return position % self.stages, microbatch * self.chunks + position // self.stages


def job_name(microbatch: int, chunk: int, chunks: int) -> str:
    """`3`, or `3.1` where stages have more than one chunk."""
    return str(microbatch) if chunks == 1 else f"{microbatch}.{chunk}"


def backward_cost(schedule: Any, backward: Cost | None) -> Cost:
    """`backward`; by default 1 where the gradient of weights is a job of its own, and 2 where a backward job is both."""
    if backward is not None:
        return backward
    return 2 if schedule.weight is None else 1


def _check(schedule: Schedule) -> None:
    """Refuse a schedule that cannot run."""
    P, v = schedule.stages, schedule.chunks
    when = {lane: _once(schedule, lane) for lane in schedule.lanes}
    for lane, chain in (("forward", when["forward"]), ("backward", when["backward"])):
        step = 1 if lane == "forward" else -1
        walk = chain[:, ::step]
        late = np.argwhere(np.diff(walk, axis=1) != 1).tolist()
        if late:
            m, k = late[0]
            source, here = (range(v * P)[::step][i] for i in (k, k + 1))
            raise CannotRun(
                int(walk[m, k + 1]),
                here % P,
                f"{_job(schedule, lane, m, here // P)} needs what stage {source % P} hands on in tick {walk[m, k]}, which is "
                f"there in tick {walk[m, k] + 1} only. Move it to tick {walk[m, k] + 1}.",
            )
    # Forwards and backwards are unbroken walks, so the rest follows from the place where one sets off the other.
    for lane, cause, positions in (("backward", "forward", [v * P - 1]), ("weight", "backward", list(range(v * P)))):
        early = np.argwhere(when[lane][:, positions] < when[cause][:, positions]).tolist() if lane in when else []
        if early:
            m, position = early[0][0], positions[early[0][1]]
            raise CannotRun(
                int(when[lane][m, position]),
                position % P,
                f"{_job(schedule, lane, m, position // P)} comes before its {cause}, which runs in tick "
                f"{when[cause][m, position]}. Move it to that tick or a later one.",
            )
    idle = np.argwhere((np.stack(list(schedule.lanes.values())) < 0).all(axis=(0, 2))).tolist()
    if idle:
        raise CannotRun(idle[0][0], 0, "no job runs here, nor on any other stage. Leave this tick out.")


def _once(schedule: Schedule, lane: str) -> Int[np.ndarray, "microbatches positions"]:
    """The tick of every job of `lane`, by microbatch and place along the ring (chunk * P + stage): each runs exactly once."""
    P, M, v = schedule.stages, schedule.microbatches, schedule.chunks
    when = np.full((M, v * P), -1, np.int32)
    jobs = schedule.lanes[lane].reshape(-1)
    runs = np.flatnonzero(jobs >= 0).astype(np.int32)
    (ticks, stages), (m, c) = np.divmod(runs, P), np.divmod(jobs[runs], v)
    place = c * P + stages
    when[m, place] = ticks
    if (when >= 0).sum() < len(ticks):
        _, first, job = np.unique(m * (v * P) + place, return_index=True, return_inverse=True)
        again = np.flatnonzero(first[job] != np.arange(len(ticks)))[0]
        tick, s, microbatch, chunk = (int(each[again]) for each in (ticks, stages, m, c))
        what = _job(schedule, lane, microbatch, chunk)
        raise CannotRun(tick, s, f"{what} has already run in tick {ticks[first[job[again]]]}. Keep one.")
    if (when < 0).any():
        m, position = np.argwhere(when < 0)[0].tolist()
        there = np.flatnonzero(when[m] >= 0)
        job = _job(schedule, lane, m, position // P)
        if not len(there):
            raise ValueError(f"{job} runs in no tick, on no stage. Add it, or number the microbatches from 0 without a gap.")
        step = {"forward": 1, "backward": -1, "weight": 0}[lane]
        tick = int(when[m, there[0]]) + step * (position - int(there[0]))
        raise CannotRun(tick, position % P, f"{job} is missing on stage {position % P}. Put it here.")
    return when


def _job(schedule: Schedule, lane: str, microbatch: int, chunk: int) -> str:
    return f"{lane} of microbatch {microbatch}" + (f", chunk {chunk}," if schedule.chunks > 1 else "")
