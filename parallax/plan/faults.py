"""Computes the best interval between checkpoints from the rate at which devices fail. Also computes
the share of time that these failures (faults) cost.

    found = faults.plan(faults.mean_time(0.173, 16_384), save=60, restart=600)
    print(found)

A run with T seconds of useful work is cut into intervals of tau seconds, each with a save of delta
seconds at its end. Failures are random, with a mean of M seconds between two failures. A failure
costs the work since the last save, and R seconds until the job runs again. The expected time of the
run is then M e^(R/M) (e^((tau + delta)/M) - 1) T / tau seconds.

Sources: for the run's time and the interval, Daly, A higher order estimate of the optimum
checkpoint interval for restart dumps (2006); for `young`, Young, A first order approximation to the
optimum checkpoint interval (1974).
"""

import math
from typing import NamedTuple

YEAR = 365.25 * 86_400  # seconds
# The largest multiple of the mean time between failures that a save or a restart may take. With
# 100, a run already takes e^100 times its work.
MOST = 100


class Faults(NamedTuple):
    """The cost of faults in a run.

    Attributes:
        between: mean seconds from one failure to the next, whichever device of the run fails.
        save: seconds by which a save delays the steps.
        restart: seconds from a failure to the next step.
        interval: the best interval between saves, in seconds of work; the run is then shortest.
        young: the same interval, but by Young's formula, `sqrt(2 * save * between)`.
        saves: the share of the run's time that saves take.
        restarts: the share of the run's time that restarts take.
        repeated: the share of the run's time that repeated steps take.
    """

    between: float
    save: float
    restart: float
    interval: float
    young: float
    saves: float
    restarts: float
    repeated: float

    @property
    def lost(self) -> float:
        """The share of the run's time that is lost: `saves` + `restarts` + `repeated`, 0 to 1."""
        return self.saves + self.restarts + self.repeated

    def __str__(self) -> str:
        return table(self)


def mean_time(failures_per_device_year: float, devices: int) -> float:
    """Returns the mean seconds from one failure to the next, whichever of the devices fails.
    Returns infinity for a failure rate of 0.

    Raises:
        ValueError: the rate is below 0 or not finite, or there is no device.
    """
    if not 0 <= failures_per_device_year < math.inf or devices < 1:
        raise ValueError(
            "faults.mean_time needs a rate of 0 or more failures per device and year, and 1 device "
            f"or more; got {failures_per_device_year} and {devices}."
        )
    return YEAR / (failures_per_device_year * devices) if failures_per_device_year else math.inf


def plan(between: float, *, save: float, restart: float) -> Faults:
    """Returns the best interval between saves, and the share of time that a run with this interval
    loses.

    Args:
        between: mean seconds between failures, from `mean_time`.
        save: seconds by which a save delays the steps. If a save runs at the same time as the
            steps, only this delay counts, and not the whole time of the save.
        restart: seconds from a failure to the next step (to notice the failure, start, restore and
            compile).

    Raises:
        ValueError: `between` or `save` is not above 0, or `restart` is below 0, or failures are so
            frequent that no run makes progress.
    """
    if not (between > 0 and save > 0 and restart >= 0):
        raise ValueError(
            "faults.plan needs `between` and `save` above 0 seconds, and `restart` of 0 or more; "
            f"got between={between}, save={save}, restart={restart}."
        )
    if max(save, restart) > MOST * between:
        raise ValueError(
            f"faults.plan: a failure comes every {between:.3g} s on average, a save takes "
            f"{save:g} s and a restart {restart:g} s, so no run makes progress. Check the rate of "
            "failures."
        )
    if math.isinf(between):
        return Faults(
            between=between,
            save=save,
            restart=restart,
            interval=math.inf,
            young=math.inf,
            saves=0.0,
            restarts=0.0,
            repeated=0.0,
        )
    interval = daly(between, save)
    # The useful share of the time is then 1 / seconds_per_work.
    seconds_per_work = wall(between, interval, save=save, restart=restart)
    saves = save / interval / seconds_per_work
    # With restarts the run takes e^(R/M) times as long, as a restart may fail too. So their share
    # of the time is 1 - e^(-R/M).
    restarts = abs(math.expm1(-restart / between))
    return Faults(
        between=between,
        save=save,
        restart=restart,
        interval=interval,
        young=young(between, save),
        saves=saves,
        restarts=restarts,
        # All other lost time repeats steps.
        repeated=1 - 1 / seconds_per_work - saves - restarts,
    )


def young(between: float, save: float) -> float:
    """Returns Young's interval between saves, `sqrt(2 * save * between)`, in seconds. `between` is
    the mean seconds between failures. The formula is accurate if `save` is much shorter than the
    interval."""
    return math.sqrt(2 * save * between)


def daly(between: float, save: float) -> float:
    """Returns Daly's interval between saves, `young * (1 + p / 3 + p**2 / 9) - save`, in seconds.
    Here `young` is Young's interval, `p` is `sqrt(save / (2 * between))`, and `between` is the mean
    seconds between failures. If `save` is at least twice `between`, this formula no longer holds,
    and the interval is `between`."""
    if save >= 2 * between:
        return between
    part = math.sqrt(save / (2 * between))
    return young(between, save) * (1 + part / 3 + part**2 / 9) - save


def wall(between: float, interval: float, *, save: float, restart: float) -> float:
    """Returns the expected seconds of the run for one second of useful work, by the formula at the
    top of this file: M e^(R/M) (e^((tau + delta)/M) - 1) / tau. Here M is `between`, R `restart`,
    tau `interval`, and delta the seconds of a `save`."""
    return (
        between * math.exp(restart / between) * math.expm1((interval + save) / between) / interval
    )


def table(found: Faults) -> str:
    """Returns the cost of faults as text: the interval and the lost shares of time, or one line if
    no failure is expected."""
    if math.isinf(found.between):
        return "no failure is expected: no interval between saves is best"
    return (
        f"a failure every {_spelt(found.between)}\nbest: a save of {_spelt(found.save)} every "
        f"{_spelt(found.interval)} (by Young's formula: {_spelt(found.young)})\nlost: "
        f"{found.lost:.1%} of the time (saves {found.saves:.1%}, restarts {found.restarts:.1%}, "
        f"steps done again {found.repeated:.1%})"
    )


def _spelt(seconds: float) -> str:
    """Returns a time as text, such as "90 min". The unit is the largest in which the number is at
    least 2."""
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"
