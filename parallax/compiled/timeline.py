"""Estimates the time of a compiled program. The instructions of the program run one after another,
and its messages run at the same time as the instructions.

    replay = timeline.of(program.text, machine, axes={"data": 4, "tensor": 2})
    replay.seconds, replay.exposed, replay.exposed_along["data"]

The text of a program for TPUs or GPUs has the instructions in the order in which they run. The
*replay* goes through them in this order and adds up their times. On a TPU an instruction takes the
cycles that the compiler estimates. On a GPU it takes the time that the chip needs to move its bytes
or to compute its operations, whichever is longer. A loop's body runs once for each trip. A start
instruction begins a message, which waits until its links are free (a link carries one message at a
time). The done instruction of this message waits until the message has arrived. A conditional runs
its slowest branch. The *exposed* time is the time of the replay, minus the time of the same program
with messages that take no time.

The times are not measured: they are computed from a compiler's estimates and from the rates in
`parallax.hardware`. If pipeline stages run different work at the same time, the replay follows one
stage, and leaves out the time that this stage waits for slower stages.

The `state` of a replay has the time (`now`), the time from which each link is free (`free`), and
the arguments of `_Replay.run`. For some loops only a mean number of trips is known, such as 1/2.
`due` has a sum for each such loop, by the loop's name. Each run of the loop adds the mean to the
sum, and has as many trips as the whole part of the sum. The fraction stays in `due` for the next
run: with a mean of 1/2, every second run has one trip. A `line` is an instruction; `line.called`
has the computations that this instruction runs, each with its number of runs (0 if unknown).
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import NamedTuple

import jax

from parallax.compiled import hlo, links, seconds, source_lines
from parallax.compiled.certificate import along

UNKNOWN = "an unknown line"  # the source of a message whose line the text does not tell
SPEEDS = (0.5, 1.0, 2.0)  # the factors on the links' speed in `Timeline.at_speed`


class Event(NamedTuple):
    """An instruction or message that takes time.

    Attributes:
        row: "compute", or the set of axes along which a message goes, such as "data x tensor".
        name: the name of the instruction.
        start: when the instruction or message starts, in seconds.
        stop: when the instruction or message ends, in seconds.
        source: the source line of the instruction, or `UNKNOWN` for a message without one.
    """

    row: str
    name: str
    start: float
    stop: float
    source: str


class Timeline(NamedTuple):
    """The estimated times of a program.

    Attributes:
        seconds: the time of the program.
        compute: the time of the program if messages took no time.
        exposed_along: for each set of axes along which messages go, such as "data x tensor", the
            seconds that the program would save if messages along exactly these axes took no time.
        at_speed: the seconds of the program if the transfer rate of all links is multiplied by a
            factor, for each of the factors 0.5, 1 and 2. Latencies stay as they are.
        waits: the seconds that instructions wait for messages, by the source line that sends, or
            `UNKNOWN`.
        events: the instructions and messages that take time, in the order in which the program
            starts them.
        unbounded: the number of loops of unknown length, which count as one trip.
    """

    seconds: float
    compute: float
    exposed_along: dict[str, float]
    at_speed: dict[float, float]
    waits: dict[str, float]
    events: list[Event]
    unbounded: int

    @property
    def exposed(self) -> float:
        """The seconds that messages add."""
        return self.seconds - self.compute


def of(
    compiled: jax.stages.Compiled | str, machine: links.Machine, axes: Mapping[str, int]
) -> Timeline:
    """Returns the estimated times of a program that was compiled for `machine`.

    The program is replayed several times: with the links as they are, with messages that take no
    time, and at other speeds of the links. Each message goes along a set of axes, such as
    "data x tensor". For each such set there is one more replay, in which all messages along exactly
    this set take no time.

    Args:
        compiled: the program, or its text.
        machine: the devices in the order of the program's mesh.
        axes: the sizes of the mesh's axes.

    Raises:
        ValueError: the program is for another backend or another number of devices; `axes` do not
            multiply to the number of the machine's devices; or the program states times in cycles
            and `machine.hardware` has no clock rate.
    """
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    assert text is not None
    check_backend(text, machine.hardware.platform)
    return replayed(text, machine, axes)


def replayed(text: str, machine: links.Machine, axes: Mapping[str, int]) -> Timeline:
    """Returns the estimated times of a program from its text, as `of` does. The caller knows that
    the program is for the platform of `machine`, which the text of a very small program does not
    tell."""
    if math.prod(axes.values()) != len(machine.places):
        raise ValueError(
            f"timeline.of needs axes that multiply to the machine's {len(machine.places)} devices; "
            f"got {dict(axes)}. Pass the shape of the mesh that the program was compiled for."
        )
    links.check_devices(text, machine)
    program = hlo.module(text, machine.in_text())
    replay = _Replay(program, machine, axes, source_lines.read(text))
    events: list[Event] = []
    waits: Counter[str] = Counter()  # the seconds of waiting, by the source line that sends
    total = replay.run(1.0, events=events, waits=waits)
    # The sets of axes along which messages go, such as "data x tensor", in the order of their first
    # messages.
    rows = dict.fromkeys(event.row for event in events if event.row != "compute")
    return Timeline(
        seconds=total,
        compute=replay.run(math.inf),  # messages take no time
        exposed_along={row: total - replay.run(1.0, without=row) for row in rows},
        at_speed={speed: total if speed == 1.0 else replay.run(speed) for speed in SPEEDS},
        waits=dict(waits.most_common()),
        events=events,
        # Counts the loops whose trips are unknown: their text states none, and `line.counted`, the
        # mean number of trips that tracing may write into a loop's name, is 0.
        unbounded=sum(
            line.opcode == "while" and not (dict(line.called).get(_body(line)) or line.counted)
            for line in _all(program)
        ),
    )


def check_backend(text: str, platform: str) -> None:
    """Raises `ValueError` unless the program `text` is compiled for `platform`. `platform` is "tpu"
    or "cuda"."""
    backend = "cpu"
    # The backend is recognized by words that only its programs have. A TPU's program has estimates
    # of cycles, or at least tiled layouts such as {1,0:T(8,128)}, also near the beginning of the
    # text.
    if '"estimated_cycles"' in text or ":T(" in text[:200_000]:
        backend = "tpu"
    elif "operation_queue_id" in text:
        backend = "cuda"
    if backend != platform:
        raise ValueError(
            f"timeline needs a program compiled for {platform}; this one was compiled for "
            f"{backend}. Compile the step with targets.compile for the machine that you pass to "
            "timeline.of."
        )


def _body(loop: hlo.Instruction) -> str:
    """Returns the name of a loop's body."""
    called = dict(hlo.CALLED.findall(loop.attributes))
    return called["body"].strip("%, ")


def _trips(loop: hlo.Instruction, state: SimpleNamespace) -> int:
    """Returns the number of trips (iterations) of a loop in the loop's next run.

    The program's text may give only the mean trips per run (`Instruction.counted`), such as 1/2 for
    a loop that has one trip in every second tick of a pipeline. Each run of the loop then adds the
    mean to a sum in `state.due`, and has as many trips as the whole part of the sum. The fraction
    stays in `state.due` for the next run. A loop of unknown length is counted as one trip.
    """
    stated = dict(loop.called)[_body(loop)]
    if stated or not loop.counted:
        return max(stated, 1)
    state.due[loop.name] = state.due.get(loop.name, 0) + loop.counted
    trips = int(state.due[loop.name])
    state.due[loop.name] -= trips
    return trips


def _all(program: hlo.Module) -> Iterator[hlo.Instruction]:
    """Yields the instructions of all computations."""
    return (line for lines in program.computations.values() for line in lines)


class _Message(NamedTuple):
    """The messages of a collective on the machine that the program was compiled for.

    Attributes:
        row: the axes along which the collective sends.
        busy: for each link, the seconds for which the collective keeps it busy.
        delay: the latency of all rounds of the collective together, in seconds.
    """

    row: str
    busy: dict[links.Link, float]
    delay: float


class _Replay:
    """A program with the time of each of its instructions."""

    def __init__(
        self,
        program: hlo.Module,
        machine: links.Machine,
        axes: Mapping[str, int],
        lines: Callable[[str], str],
    ):
        """Takes the program, its machine, the sizes of the mesh's axes, and the function from an
        instruction's attributes to its source line (`lines`)."""
        self.program, self.machine, self.axes, self.lines = program, machine, axes, lines
        self.costs = seconds.Costs(program, machine.hardware, machine.cores)
        # The results of `_message` (`known`) and of `_collectives` (`inside`), by the name of the
        # instruction.
        self.known: dict[str, _Message] = {}
        self.inside: dict[str, list[hlo.Instruction]] = {}

    def run(
        self,
        speed: float,
        *,
        without: str = "",
        events: list[Event] | None = None,
        waits: Counter | None = None,
    ) -> float:
        """Replays the program once, and returns its seconds.

        Args:
            speed: the factor by which the transfer rate of each link is multiplied. Latencies do
                not change, unless `speed` is `math.inf`: then messages take no time at all.
            without: a set of axes as in `Event.row`, such as "data x tensor". Messages along
                exactly this set of axes take no time. With "", all messages take their time.
            events: a list; the replay appends its events to it.
            waits: a counter. The replay adds to it the seconds of waiting for messages, by the
                source line that sends the message.
        """
        state = SimpleNamespace(
            now=0.0, free={}, due={}, speed=speed, without=without, events=events, waits=waits
        )
        self._computation(self.program.entry, state)
        return state.now

    def _computation(self, name: str, state: SimpleNamespace) -> None:
        """Replays a computation's instructions in order, and advances the clock `state.now`."""
        # The end and the source line of each message or copy under way, by the name of its start.
        started: dict[str, tuple[float, str]] = {}
        for line in self.program[name]:
            if line.opcode == "while":
                for _ in range(_trips(line, state)):
                    self._computation(_body(line), state)
            elif line.opcode == "conditional":
                self._computation(self._longest_branch(line, state), state)
            elif line.opcode == "call":
                for called, _ in line.called:
                    self._computation(called, state)
            elif line.opcode.endswith("-done"):
                # A start that is not in this computation counts as finished.
                until, source = started.pop(line.operands[0], (state.now, ""))
                self._wait(until, source, state)
            else:
                self._instruction(line, started, state)

    def _longest_branch(self, line: hlo.Instruction, state: SimpleNamespace) -> str:
        """Returns the name of the slowest branch of a conditional: the branch that would end last
        if all branches began now."""

        def end(name: str) -> float:
            """Returns the time at which a branch would end. Its replay does not change `state`."""
            trial = SimpleNamespace(**vars(state))
            trial.free, trial.due = dict(state.free), dict(state.due)
            trial.events = trial.waits = None  # the trial records no events and no waiting times
            self._computation(name, trial)
            return trial.now

        return max((name for name, _ in line.called), key=end)

    def _instruction(
        self, line: hlo.Instruction, started: dict[str, tuple[float, str]], state: SimpleNamespace
    ) -> None:
        """Replays one instruction: first its messages start, then the instruction computes, then it
        waits until its messages have arrived. The start of an asynchronous message or copy
        (`-start`) does not wait: it records in `started` the time at which the message or copy
        ends, and the source line of the start. At the `-done` instruction, `_computation` reads
        this time and this source line from `started`, and waits until this time.
        """
        sent = self._collectives(line)
        source = self._source(sent, line) if sent else ""
        stops = [self._send(collective, source, state) for collective in sent]
        if line.opcode.endswith("-start"):
            # A start without messages is a copy between two memories of a chip. One copy runs at
            # a time: it begins when the copy before it has ended.
            if not sent:
                begin = max(state.now, state.free.get("memory", 0.0))
                state.free["memory"] = begin + self.costs.of(line)
                stops = [state.free["memory"]]
            started[line.name] = max(stops), source
            return
        # A collective takes only the time of its messages. A fusion may compute, and send too.
        taken = 0.0 if line.collective else self.costs.of(line)
        if taken:
            if state.events is not None:
                stop, place = state.now + taken, self.lines(line.attributes)
                state.events.append(Event("compute", line.name, state.now, stop, place))
            state.now += taken
        if stops:
            self._wait(max(stops), source, state)

    def _source(self, sent: list[hlo.Instruction], line: hlo.Instruction) -> str:
        """Returns the source line of the first of the collectives in `sent` that has one; else that
        of the instruction `line`. The instruction may be a fusion that has no source line, while
        the collective in it has one."""
        found = (self.lines(of.attributes) for of in (*sent, line))
        return next(filter(None, found), UNKNOWN)

    def _wait(self, until: float, source: str, state: SimpleNamespace) -> None:
        """Moves the time on to `until`, the time at which a message arrives or a copy ends, if
        `until` is later than now. Adds the wait for a message to the total of `source`, the source
        line that sent it. A copy has the source "", and the wait for it is not added."""
        if until > state.now:
            if state.waits is not None and source:
                state.waits[source] += until - state.now
            state.now = until

    def _collectives(self, line: hlo.Instruction) -> list[hlo.Instruction]:
        """Returns a list with the instruction itself if it is a collective. If it is not, returns
        the collectives that are fused into it."""
        if line.collective:
            return [line]
        if line.name not in self.inside:
            fused = [inner for name, _ in line.called for inner in self.program[name]]
            self.inside[line.name] = [inner for inner in fused if inner.collective]
        return self.inside[line.name]

    def _message(self, line: hlo.Instruction) -> _Message:
        """Returns the message of a collective: the axes of the collective, the seconds on each
        link, and the latency of all rounds."""
        if line.name not in self.known:
            # `flows` has the bytes from each device to each other device. `rounds` is the number of
            # steps of the algorithm, one after another, each of which has the latency.
            flows, rounds = links.flows(line, len(self.machine.places))
            busy, delay = self.machine.crossing(flows)  # the delay is that of one round
            # A collective whose groups have one device each goes along no axis.
            row = " x ".join(along(line.groups, self.axes)) or "no axis"
            self.known[line.name] = _Message(row, busy, delay * rounds)
        return self.known[line.name]

    def _send(self, line: hlo.Instruction, source: str, state: SimpleNamespace) -> float:
        """Starts the messages of a collective, and returns the time at which all have arrived.

        The messages begin when all their links are free. Their time is a transfer time plus the
        latency of all rounds. The transfer time is that of the busiest link, divided by
        `state.speed`. The messages take no time if they go along the axes `state.without`, or if
        `state.speed` is infinite.
        """
        # The axes of the messages, the seconds on each link, and the latency of all rounds.
        row, busy, delay = self._message(line)
        if row == state.without or math.isinf(state.speed) or not busy:
            return state.now
        begin = max(state.now, *(state.free.get(link, 0.0) for link in busy))
        for link, taken in busy.items():
            state.free[link] = begin + taken / state.speed
        stop = begin + max(busy.values()) / state.speed + delay
        if state.events is not None:
            state.events.append(Event(row, line.name, begin, stop, source))
        return stop
