"""The interval between checkpoints is the best one, and the time that faults take is that of a
simulated run."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallax.plan import faults

LLAMA_3 = faults.mean_time(
    419 / (16_384 * 54 / 365.25), 16_384
)  # 419 interruptions in 54 days on 16,384 devices


def test_llama_3():
    """A failure every three hours; with saves of some 20 s and restarts of 10 minutes more than
    nine tenths are left."""
    assert pytest.approx(54 * 86_400 / 419) == LLAMA_3
    found = faults.plan(LLAMA_3, save=20.0, restart=600.0)
    assert found.young == pytest.approx(math.sqrt(2 * 20 * LLAMA_3))
    assert 0.05 < found.lost < 0.15
    assert found.lost == pytest.approx(
        1 - 1 / faults.wall(LLAMA_3, found.interval, save=20.0, restart=600.0)
    )
    assert "a failure every 3.09 h" in str(found)


@given(between=st.floats(1e3, 1e7), share=st.floats(1e-5, 0.2), restart=st.floats(0, 0.3))
def test_no_interval_loses_less(between, share, restart):
    save, restart = share * between, restart * between
    found = faults.plan(between, save=save, restart=restart)
    wall = lambda interval: faults.wall(between, interval, save=save, restart=restart)
    least = min(wall(found.interval * 1.02**k) for k in range(-60, 60))
    assert wall(found.interval) <= 1.002 * least  # Daly's series is cut off after two terms
    assert min(found.saves, found.restarts, found.repeated) >= -1e-9
    assert found.lost == pytest.approx(1 - 1 / wall(found.interval))


def simulated(between, interval, save, restart, work, seed):
    """The seconds that `work` seconds of steps take, failures drawn one by one."""
    draw, clock, done = random.Random(seed), 0.0, 0.0
    until = draw.expovariate(1 / between)
    while done < work:
        needed = interval + save
        while until < needed:
            clock, needed = clock + until, restart + interval + save
            until = draw.expovariate(1 / between)
        clock, until, done = clock + needed, until - needed, done + interval
    return clock


def test_a_simulated_run_takes_as_long():
    between, save, restart, work = 10_000.0, 60.0, 300.0, 4e7
    found = faults.plan(between, save=save, restart=restart)
    taken = simulated(between, found.interval, save, restart, work, seed=0)
    # 4,000 failures: their number is known to 1.6 %, and a tenth of the time is theirs.
    assert 1 - work / taken == pytest.approx(found.lost, rel=0.05)


def test_refusals_and_a_device_that_never_fails():
    assert faults.plan(faults.mean_time(0.0, 8), save=1.0, restart=1.0).lost == 0
    with pytest.raises(ValueError, match="0 or more failures"):
        faults.mean_time(-1.0, 8)
    with pytest.raises(ValueError, match="above 0 seconds"):
        faults.plan(1.0, save=0.0, restart=1.0)


def test_a_restart_that_takes_no_time_loses_none():
    assert "restarts 0.0%" in str(faults.plan(3600.0, save=60.0, restart=0.0))


@pytest.mark.parametrize(("rate", "devices"), [(1e300, 8), (1e9, 1), (1e305, 1000)])
def test_a_rate_at_which_no_run_gets_on_is_refused(rate, devices):
    with pytest.raises(
        ValueError,
        match=r"faults\.plan: a failure comes every .* so no run makes progress\. Check the rate",
    ):
        faults.plan(faults.mean_time(rate, devices), save=20.0, restart=600.0)
    with pytest.raises(ValueError, match=r"so no run makes progress"):
        faults.plan(faults.mean_time(rate, devices), save=20.0, restart=0.0)


@given(between=st.floats(1e-3, 1e7), save=st.floats(1e-3, 1e6), restart=st.floats(0, 1e6))
def test_any_times_give_shares_or_a_sentence(between, save, restart):
    if max(save, restart) > faults.MOST * between:
        with pytest.raises(ValueError, match="so no run makes progress"):
            faults.plan(between, save=save, restart=restart)
        return
    found = faults.plan(between, save=save, restart=restart)
    assert -1e-9 <= found.lost <= 1
    assert str(found)


@pytest.mark.parametrize("rate", [math.nan, math.inf, -1.0])
def test_a_rate_that_is_none_is_refused(rate):
    with pytest.raises(ValueError, match="needs a rate of 0 or more failures"):
        faults.mean_time(rate, 8)
