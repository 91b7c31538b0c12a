"""Which schedule pays: the time of each, by a fold over its table, for the costs of its jobs and of an exchange."""

from collections.abc import Mapping
from typing import NamedTuple

from parallax.schedule.table import Cost, Schedule


class Time(NamedTuple):
    """A schedule among others.

    Attributes:
        name: its name.
        seconds: its time, in the unit of the costs.
        in_flight: the microbatches whose residuals the neediest stage holds.
    """

    name: str
    seconds: float
    in_flight: float


def compared(
    schedules: Mapping[str, Schedule],
    forward: Cost,
    backward: Cost,
    weight: Cost,
    *,
    hop: Cost = 0,
    held: float = float("inf"),
) -> list[Time]:
    """The schedules by their time, the quickest first, of those that hold `held` microbatches or fewer on every stage.

    Costs are those of F, I and W of one microbatch through a whole stage, such as `pipeline.counted` finds; a schedule without
    W runs B, which is both. `hop` is the time of a tick's exchange. In the schedules of one job a tick all wait for the dearest
    job in each tick, and exchange in each; in those that keep step a tick has F and B and one exchange.
    """
    times = []
    for name, table in schedules.items():
        of_backward = backward + weight if table.weight is None else backward
        time = table.makespan(forward, of_backward, weight, hop=hop)
        in_flight = float(table.in_flight.max())
        if in_flight <= held:
            times.append(Time(name, time, in_flight))
    return sorted(times, key=lambda time: (time.seconds, time.in_flight))
