"""Schedules: the closed formulas hold, the slots never collide, and no broken table gets by."""

import functools
import itertools
import os
import random
import re
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallax import draw, schedule
from parallax.schedule import (
    Schedule,
    from_csv,
    gpipe,
    one_f_one_b_lockstep,
    to_csv,
    zero_bubble_lockstep,
)

MAKERS = (gpipe, one_f_one_b_lockstep, zero_bubble_lockstep)
COSTS = st.tuples(*[st.integers(0, 9)] * 3)


@st.composite
def sizes(draw, makers=MAKERS, min_stages=1):
    """A maker and its arguments. (The test itself makes the table: beartype's dice are not for use
    inside a strategy.)"""
    maker, P = draw(st.sampled_from(makers)), draw(st.integers(min_stages, 8))
    v = 1 if maker is gpipe else draw(st.integers(1, 4))
    M = draw(st.integers(1, 24))
    return (maker, P, M) if maker is gpipe else (maker, P, M, v)


@functools.cache
def make(maker, *arguments):
    return maker(*arguments)


def tables(table):
    return [np.array(lane) for lane in table.lanes.values()]


def ticks_of(lane, job):
    """By stage, where `job` stands in a table."""
    return {int(s): int(t) for t, s in np.argwhere(lane == job)}


def test_figures():
    assert one_f_one_b_lockstep(4, 16).makespan(1, 2) == 57
    assert one_f_one_b_lockstep(4, 16, chunks=2).makespan(1, 2) == 52.5
    assert one_f_one_b_lockstep(4, 16, chunks=4).makespan(1, 2) == 50.25
    assert zero_bubble_lockstep(4, 16).makespan(1, 1, 1) == 54
    assert zero_bubble_lockstep(4, 16, chunks=2).makespan(1, 1, 1) == 51


def test_a_table_to_read():
    table = one_f_one_b_lockstep(2, 3)
    assert table.forward.tolist() == [[0, -1], [1, 0], [2, 1], [-1, 2], [-1, -1]]
    assert table.backward.tolist() == [[-1, -1], [-1, 0], [0, 1], [1, 2], [2, -1]]
    assert (table.stages, table.microbatches, table.chunks, table.ticks) == (2, 3, 1, 5)
    assert table.slots["forward"].tolist() == [[0, -1], [1, 0], [2, 0], [-1, 0], [-1, -1]]
    assert table.slots["backward"].tolist() == [[-1, -1], [-1, 0], [0, 0], [1, 0], [2, -1]]
    assert (
        repr(table)
        == "Schedule(stages=2, microbatches=3, chunks=1, ticks=5, lanes=forward/backward)"
    )


@pytest.mark.sweep(3)
@pytest.mark.parametrize("maker", MAKERS)
def test_a_million_microbatches_take_a_second(maker):
    """Of a processor, some 0.8 s; made job by job they would take minutes."""
    began = time.process_time()
    assert maker(4, 10**6).microbatches == 10**6
    assert time.process_time() - began < 10


def test_the_last_group_may_be_smaller():
    """6 microbatches on 4 stages: the second group of 4 has 2, and the rest is as in a table of
    8."""
    six, eight = one_f_one_b_lockstep(4, 6, chunks=2), one_f_one_b_lockstep(4, 8, chunks=2)
    for lane in ("forward", "backward"):
        whole = eight.lanes[lane][: six.ticks]
        np.testing.assert_array_equal(six.lanes[lane], np.where(whole < 12, whole, -1))


def test_gpipe_goes_back_the_way_it_came():
    assert gpipe(2, 3).backward[4:].tolist() == [[-1, 2], [2, 1], [1, 0], [0, -1]]


def test_phases():
    both = ("forward", "backward")
    assert gpipe(4, 8).phases == ((0, 11, ("forward",)), (11, 22, ("backward",)))
    assert one_f_one_b_lockstep(4, 8).phases == (
        (0, 3, ("forward",)),
        (3, 11, both),
        (11, 14, ("backward",)),
    )
    stretches = (
        (0, 3, ("forward",)),
        (3, 6, both),
        (6, 11, (*both, "weight")),
        (11, 14, ("backward", "weight")),
    )
    assert zero_bubble_lockstep(4, 8).phases == stretches


@given(sizes())
def test_phases_are_the_longest_stretches_of_the_same_lanes(size):
    table = make(*size)
    assert [t for phase in table.phases for t in range(phase.start, phase.stop)] == list(
        range(table.ticks)
    )
    for phase in table.phases:
        for t in range(phase.start, phase.stop):
            assert phase.lanes == tuple(
                name for name, lane in table.lanes.items() if (lane[t] >= 0).any()
            )
    assert all(a.lanes != b.lanes for a, b in itertools.pairwise(table.phases))


@given(sizes(), COSTS)
def test_the_bubble_is_the_formula(size, costs):
    table = make(*size)
    P, M, v, (F, B, W) = table.stages, table.microbatches, table.chunks, costs
    work = M * (F + B + (W if table.weight is not None else 0))
    bubble = (
        (P - 1 + -M % P * (v - 1)) * (F + B) / v
    )  # the last group's empty places wait for every chunk but one
    assert table.bubble(F, B, W) == pytest.approx(bubble, abs=1e-9)
    assert table.makespan(F, B, W) == pytest.approx(work + bubble)


@pytest.mark.sweep(3, "wholes")
@given(st.integers(1, 6), st.integers(1, 12), st.integers(1, 3))
def test_default_costs_are_of_the_same_work(P, M, v):
    """F, I and W of 1 each, and B, which is both, of 2: in every schedule a stage works 3 M."""
    in_step = [gpipe(P, M), one_f_one_b_lockstep(P, M, v), zero_bubble_lockstep(P, M, v)]
    in_turns = [schedule.one_f_one_b(P, M), schedule.zero_bubble(P, M, v)]
    for table in (*in_step, *in_turns):
        assert table.makespan() - table.bubble() == pytest.approx(3 * M)
        given_costs = (1, 2) if table.weight is None else (1, 1, 1)
        assert (table.makespan(), table.bubble()) == (
            table.makespan(*given_costs),
            table.bubble(*given_costs),
        )
        assert table.lockstep() == table.lockstep(*given_costs)
        assert draw.summary(table) == draw.summary(table, *given_costs)
    for table in in_step:
        assert table.asynchronous() == table.asynchronous(
            *((1, 2) if table.weight is None else (1, 1, 1))
        )
    _, together, apart = in_step
    assert apart.makespan() <= together.makespan()


@given(sizes(), COSTS)
def test_lockstep_adds_up_and_asynchronous_is_never_later(size, costs):
    table = make(*size)
    lockstep, asynchronous = table.lockstep(*costs), table.asynchronous(*costs)
    assert max(span.stop for span in lockstep) == pytest.approx(table.makespan(*costs))
    later = {span[:4]: span.start for span in lockstep}
    assert len(later) == len(asynchronous) == len(lockstep)
    assert all(span.start <= later[span[:4]] + 1e-9 for span in asynchronous)
    assert max(span.stop for span in asynchronous) <= table.makespan(*costs) + 1e-9


@given(sizes(), COSTS, st.sampled_from([0, 3]))
def test_asynchronous_waits_for_inputs_and_for_its_own_stage(size, costs, hop):
    table = make(*size)
    spans = table.asynchronous(*costs, hop=hop)
    P, v = table.stages, table.chunks
    by_job = {span[:4]: span for span in spans}
    for (s, lane, m, c), span in by_job.items():
        before = {"forward": (s - 1, c), "backward": (s + 1, c), "weight": (None, c)}[lane]
        if before[0] is not None and not 0 <= before[0] < P:  # around the ring
            before = (before[0] % P, c + (1 if lane == "backward" else -1))
        if before[0] is not None and 0 <= before[1] < v:
            assert span.start >= by_job[before[0], lane, m, before[1]].stop + (hop if P > 1 else 0)
        causes = {"forward": (), "backward": ("forward",), "weight": ("backward",)}[lane]
        assert all(span.start >= by_job[s, cause, m, c].stop for cause in causes)
    for s in range(P):
        mine = [span for span in spans if span.stage == s]
        assert all(a.stop <= b.start for a, b in itertools.pairwise(mine))


def test_a_hop_costs_time_where_there_is_a_next_stage():
    last = lambda table: max(span.stop for span in table.asynchronous(1, 2, hop=0.5))
    # Down and up: 2 (P - 1) hops, each beside 3 of work.
    assert last(one_f_one_b_lockstep(4, 1)) == 4 * 3 + 6 * 0.5
    assert last(one_f_one_b_lockstep(1, 4, chunks=2)) == 12


@given(sizes())
def test_in_flight_is_the_formula(size):
    table = make(*size)
    P, M, v, s = table.stages, table.microbatches, table.chunks, np.arange(table.stages)
    jobs = {
        gpipe: np.full(P, M),
        one_f_one_b_lockstep: v * P + P - 1 - 2 * s,
        zero_bubble_lockstep: v * P + P - 1 - s,
    }[size[0]]
    most = np.minimum(M * v, jobs) / v
    assert (
        (table.in_flight == most).all() if v == 1 or M % P == 0 else (table.in_flight <= most).all()
    )


def test_in_flight_of_1f1b_does_not_grow_with_microbatches():
    assert (
        one_f_one_b_lockstep(4, 8).in_flight.tolist()
        == one_f_one_b_lockstep(4, 64).in_flight.tolist()
        == [7, 5, 3, 1]
    )
    assert (
        zero_bubble_lockstep(4, 8).in_flight.tolist()
        == zero_bubble_lockstep(4, 64).in_flight.tolist()
        == [7, 6, 5, 4]
    )
    assert one_f_one_b_lockstep(4, 16, chunks=2).in_flight.max() == 4 + 3 / 2
    assert gpipe(4, 64).in_flight.tolist() == [64] * 4


@given(sizes())
def test_slots_never_collide_and_none_is_to_spare(size):
    """Run the table: what a forward writes is still there when the last gradient of its job reads
    it."""
    table = make(*size)
    last = list(table.lanes)[-1]
    held = [{} for _ in range(table.stages)]
    peak = np.zeros(table.stages, int)
    for t in range(table.ticks):
        for lane, jobs in table.lanes.items():
            for s in range(table.stages):
                slot, job = int(table.slots[lane][t, s]), int(jobs[t, s])
                assert (slot < 0) == (job < 0)
                if job >= 0 and lane == "forward":
                    assert slot not in held[s]
                    held[s][slot] = job
                    peak[s] = max(peak[s], len(held[s]))
                elif job >= 0:
                    assert held[s][slot] == job
                if job >= 0 and lane == last:
                    del held[s][slot]
    assert not any(held)
    assert (peak == table.in_flight * table.chunks).all()
    assert (peak == table.slots["forward"].max(axis=0) + 1).all()
    assert table.slot_count == peak.max()


# Broken tables


@given(sizes(), st.data())
def test_a_dropped_job_is_refused(size, data):
    table = make(*size)
    lanes = tables(table)
    lane = data.draw(st.sampled_from(lanes))
    tick, s = data.draw(st.sampled_from(np.argwhere(lane >= 0).tolist()))
    lane[tick, s] = -1
    with pytest.raises(ValueError, match=r"microbatch \d+.* runs in no tick on stage"):
        Schedule(*lanes, placement=table.placed)


@given(sizes().filter(lambda size: size[1:] != (1, 1, 1)), st.data())
def test_a_doubled_job_is_refused(size, data):
    table = make(*size)
    lanes = tables(table)
    lane = data.draw(st.sampled_from(lanes))
    tick, s = data.draw(st.sampled_from(np.argwhere(lane >= 0).tolist()))
    to = data.draw(st.sampled_from([t for t in range(table.ticks) if t != tick]))
    lane[to, s] = lane[tick, s]  # into a free cell, or over another job
    with pytest.raises(ValueError, match=rf"tick \d+, stage {s}: .* has already run in tick"):
        Schedule(*lanes, placement=table.placed)


@given(sizes(min_stages=2), st.data())
def test_a_moved_forward_or_backward_is_refused(size, data):
    table = make(*size)
    lanes = tables(table)
    lane = data.draw(st.sampled_from(lanes[:2]))
    tick, s = data.draw(st.sampled_from(np.argwhere(lane >= 0).tolist()))
    to = data.draw(st.sampled_from([t for t in range(table.ticks) if t != tick]))
    lane[tick, s], lane[to, s] = (
        lane[to, s],
        lane[tick, s],
    )  # to a free cell, or two jobs change places
    words = r"tick -?\d+, stage \d+: .*(must run in tick|comes before)"
    with pytest.raises(ValueError, match=words):
        Schedule(*lanes, placement=table.placed)


@given(sizes(min_stages=2), st.data())
def test_a_job_moved_to_another_stage_is_refused(size, data):
    table = make(*size)
    lanes = tables(table)
    lane = data.draw(st.sampled_from(lanes))
    tick, s = data.draw(st.sampled_from(np.argwhere(lane >= 0).tolist()))
    to = data.draw(st.sampled_from([other for other in range(table.stages) if other != s]))
    lane[tick, s], lane[tick, to] = -1, lane[tick, s]
    with pytest.raises(ValueError, match=r"stage \d+"):
        Schedule(*lanes, placement=table.placed)


full = sizes(makers=[zero_bubble_lockstep], min_stages=2).filter(
    lambda size: size[3] == 1 or size[2] % size[1] == 0
)  # no hole between


@given(full, st.data())
def test_a_weight_gradient_may_move_but_not_before_its_input_gradient(size, data):
    table = make(*size)
    forward, backward, weight = tables(table)
    s = data.draw(st.integers(0, table.stages - 1))
    job = data.draw(st.integers(0, table.microbatches * table.chunks - 1))
    tick, to = (
        ticks_of(weight, job)[s],
        data.draw(st.sampled_from(np.flatnonzero(weight[:, s] < 0).tolist())),
    )
    weight[tick, s], weight[to, s] = -1, job
    if to >= ticks_of(backward, job)[s]:
        assert Schedule(forward, backward, weight, table.placed).in_flight[s] <= table.in_flight[s]
    else:
        with pytest.raises(
            ValueError,
            match=rf"tick {to}, stage {s}: weight of microbatch .* comes before its backward",
        ):
            Schedule(forward, backward, weight, table.placed)


@given(sizes(), st.data())
def test_two_jobs_that_change_places_with_all_their_walk_make_another_valid_table(size, data):
    """The check asks for nothing but the rules: microbatches may run in any order."""
    table = make(*size)
    order = np.array(data.draw(st.permutations(range(table.microbatches))))
    renamed = [
        np.where(lane < 0, -1, order[lane // table.chunks] * table.chunks + lane % table.chunks)
        for lane in tables(table)
    ]
    assert Schedule(*renamed, placement=table.placed).in_flight.tolist() == table.in_flight.tolist()


def can_run(lanes, placement):
    """An oracle that moves tokens tick by tick: whether these tables run every job once, each after
    what it needs.

    What is sent in a tick is there from the next one on; where all stages keep step it is there in
    the next one alone.
    """
    (v, P), last = placement.shape, placement.size - 1
    per_stage = "weight" in lanes and all(
        sum(table[t, s] >= 0 for table in lanes.values()) < 2
        for t, s in np.ndindex(lanes["forward"].shape)
    )
    if not per_stage and placement.tolist() != schedule.looped_placement(P, v).tolist():
        return False
    done, arrived, sent = set(), set(), set()
    for tick in range(len(lanes["forward"])):
        arrived, sent = (arrived | sent if per_stage else sent), set()
        for s in range(P):
            for lane, table in lanes.items():
                if table[tick, s] < 0:
                    continue
                m, c = divmod(int(table[tick, s]), v)
                place = int(placement[c, s])
                if lane == "weight":
                    ready = ("backward", m, place) in done
                elif (lane, place) == ("backward", last):
                    ready = ("forward", m, place) in done
                else:
                    ready = (lane, place) == ("forward", 0) or (lane, m, place) in arrived
                if not ready or (lane, m, place) in done:
                    return False
                done.add((lane, m, place))
                sent.add((lane, m, place + {"forward": 1, "backward": -1, "weight": 0}[lane]))
        if not sent and not per_stage:
            return False
    count = 1 + max((m for _, m, _ in done), default=-1)
    return 0 < len(done) == count * placement.size * len(lanes)


PER_STAGE = {
    "one_f_one_b": lambda P, M, v: schedule.one_f_one_b(P, M),
    "zero_bubble": schedule.zero_bubble,
    "V": lambda P, M, v: schedule.greedy(schedule.v_placement(P), M, [2 * P] * P),
}
LOCKSTEP = {
    "gpipe": lambda P, M, v: gpipe(P, M),
    "one_f_one_b_lockstep": one_f_one_b_lockstep,
    "zero_bubble_lockstep": zero_bubble_lockstep,
}


def mutated(lanes, placement, random):
    """The tables and the placement with one to three changes."""
    P = lanes["forward"].shape[1]
    some = lambda table: tuple(random.choice(np.argwhere(table >= 0).tolist() or [[0, 0]]))
    for _ in range(random.randint(1, 3)):
        lane, change = random.choice(list(lanes)), random.randrange(8)
        table = lanes[lane]
        tick, s = some(table)
        to = random.choice([random.randrange(len(table)), max(tick - 1, 0)])
        if change == 0:  # two cells of a stage change places
            table[tick, s], table[to, s] = table[to, s], table[tick, s]
        elif change == 1:  # so do two ticks
            for each in lanes.values():
                each[[tick, to]] = each[[to, tick]]
        elif change == 2:  # a job is lost
            table[tick, s] = -1
        elif change == 3:  # or is there twice
            table[to, s] = table[tick, s]
        elif change == 4:  # a tick more, in which nothing runs
            for name, each in lanes.items():
                lanes[name] = np.insert(each, to, -1, axis=0)
        elif change == 5:  # two stages change places
            other = random.randrange(P)
            table[:, [s, other]] = table[:, [other, s]]
        elif change == 6:  # two microbatches change their names
            v = len(placement)
            a, b = (random.randrange(1 + max(table.max(), 0) // v) for _ in range(2))
            for name, each in lanes.items():
                m, c = np.divmod(each, v)
                lanes[name] = np.where(
                    each < 0, -1, np.where(m == a, b, np.where(m == b, a, m)) * v + c
                )
        else:  # chunks change places
            placement = np.array(placement)
            one, other = (random.randrange(placement.size) for _ in range(2))
            flat = placement.reshape(-1)
            flat[[one, other]] = flat[[other, one]]
    return lanes, placement


@pytest.mark.sweep(3, "wholes")
@pytest.mark.parametrize("name", [*LOCKSTEP, *PER_STAGE])
@settings(max_examples=200)
@given(
    P=st.integers(1, 4),
    M=st.integers(1, 5),
    v=st.integers(1, 2),
    random=st.randoms(use_true_random=True),
)
def test_tables_are_refused_where_a_token_would_not_arrive_and_nowhere_else(name, P, M, v, random):
    """No broken table gets by, and none that runs is refused."""
    table = make((LOCKSTEP | PER_STAGE)[name], P, M, v)
    assert table.per_stage == (name in PER_STAGE)
    assert can_run(table.lanes, table.placed)
    assert_refused_where_it_cannot_run(table, random)


def assert_refused_where_it_cannot_run(table, random):
    """A table with changes is refused where the oracle says that it cannot run, and only there."""
    lanes, placement = mutated(
        {lane: np.array(jobs) for lane, jobs in table.lanes.items()}, table.placed, random
    )
    runs = placement[:, 0].min() == 0 and can_run(lanes, placement)
    if runs:
        assert Schedule(*lanes.values(), placement=placement).placed.tolist() == placement.tolist()
    else:
        with pytest.raises(ValueError, match=r"tick|microbatch|placement|stage 0"):
            Schedule(*lanes.values(), placement=placement)


@pytest.mark.sweep(10)
@pytest.mark.long
@pytest.mark.parametrize("hundreds", range(0, 50, 5))
def test_five_thousand_changed_tables_are_refused_where_a_token_would_not_arrive(hundreds):
    """Of all makers, both kinds, up to five stages, six microbatches and three chunks."""
    makers = list((LOCKSTEP | PER_STAGE).values())
    for number in range(100 * hundreds, 100 * hundreds + 500):
        drawn = random.Random(number)
        sizes = drawn.randint(1, 5), drawn.randint(1, 6), drawn.randint(1, 3)
        assert_refused_where_it_cannot_run(make(makers[number % len(makers)], *sizes), drawn)


def broken(change, maker=one_f_one_b_lockstep, **sizes):
    lanes = dict(
        zip(
            schedule.LANES,
            tables(table := maker(**{"stages": 4, "microbatches": 4} | sizes)),
            strict=False,
        )
    )
    change(lanes)
    return lambda: Schedule(*lanes.values(), placement=table.placed)


def put(lane, tick, stage, job):
    return lambda lanes: lanes[lane].__setitem__((tick, stage), job)


def late_start(lanes):
    """Stage 0 forwards microbatch 3 a tick later; the rest stays."""
    put("forward", 3, 0, -1)(lanes)
    put("forward", 4, 0, 3)(lanes)


def early_backwards(lanes):
    lanes["backward"][:] = np.roll(lanes["backward"], -1, axis=0)


def idle_tick(lanes):
    for lane in lanes:
        lanes[lane] = np.concatenate([lanes[lane], np.full((1, 4), -1)])


MESSAGES = {
    "missing": (
        broken(put("forward", 3, 1, -1)),
        "forward of microbatch 2 runs in no tick on stage 1. Add it, or number the microbatches "
        "from 0 without a gap.",
    ),
    "missing chunk": (
        broken(put("backward", 7, 3, -1), chunks=2),
        "backward of microbatch 0, chunk 1, runs in no tick on stage 3. Add it, or number the "
        "microbatches from 0 without a gap.",
    ),
    "nowhere": (
        broken(lambda lanes: lanes["backward"].__setitem__(lanes["backward"] == 3, -1)),
        "backward of microbatch 3 runs in no tick on stage 0. Add it, or number the microbatches "
        "from 0 without a gap.",
    ),
    "doubled": (
        broken(put("forward", 5, 0, 2)),
        "tick 5, stage 0: forward of microbatch 2 has already run in tick 2. Keep one.",
    ),
    "hop": (
        broken(late_start),
        "tick 4, stage 1: forward of microbatch 3 must run in tick 5, since the forward of this "
        "microbatch at the previous place of the model runs in tick 4.",
    ),
    "backward first": (
        broken(early_backwards),
        "tick 2, stage 3: backward of microbatch 0 comes before its forward, which runs in tick 3. "
        "Move it to that tick or a later one.",
    ),
    "weight first": (
        broken(
            lambda lanes: (put("weight", 6, 0, -1)(lanes), put("weight", 5, 0, 0)(lanes)),
            zero_bubble_lockstep,
        ),
        "tick 5, stage 0: weight of microbatch 0 comes before its backward, which runs in tick 6. "
        "Move it to that tick or a later one.",
    ),
    "weight first, per stage": (
        broken(
            lambda lanes: (put("weight", 4, 0, -1)(lanes), put("weight", 2, 0, 0)(lanes)),
            schedule.zero_bubble,
            **{"stages": 2, "microbatches": 2},
        ),
        "tick 2, stage 0: weight of microbatch 0 comes before its backward, which runs in tick 3. "
        "Move it to a later tick.",
    ),
    "idle": (
        broken(idle_tick),
        "tick 10, stage 0: no job runs here, nor on any other stage. Leave this tick out.",
    ),
    "too large": (
        broken(put("forward", 0, 0, 40)),
        "tick 0, stage 0: forward of job 40: jobs are numbered from 0 and 10 ticks hold at most "
        "10. Number the microbatches from 0 without a gap. In a table a job is microbatch * chunks "
        "+ chunk, or -1 where the stage rests.",
    ),
    "negative": (
        broken(put("backward", 9, 3, -2)),
        "tick 9, stage 3: backward of job -2: jobs are numbered from 0 and 10 ticks hold at most "
        "10. Number the microbatches from 0 without a gap. In a table a job is microbatch * chunks "
        "+ chunk, or -1 where the stage rests.",
    ),
    "shape": (
        lambda: Schedule(gpipe(2, 2).forward, one_f_one_b_lockstep(2, 2).backward),
        "The tables must have one shape, got forward (6, 2) and backward (4, 2) (ticks x stages). "
        "Pad the shorter one with rows of -1.",
    ),
    "numbers": (
        lambda: Schedule(np.zeros((1, 1)), np.zeros((1, 1), int)),
        "The forward table must be whole numbers, ticks x stages, got float64 of shape (1, 1). "
        "Write one row per tick and -1 where a stage rests.",
    ),
    "stages": (lambda: gpipe(0, 4), "A schedule needs stages >= 1, got stages=0."),
    "microbatches": (
        lambda: one_f_one_b_lockstep(4, 0),
        "A schedule needs microbatches >= 1, got microbatches=0.",
    ),
    "chunk count": (
        lambda: zero_bubble_lockstep(4, 4, 0),
        "A schedule needs chunks >= 1, got chunks=0.",
    ),
    "true in a table": (
        lambda: Schedule(np.ones((1, 1), bool), np.zeros((1, 1), int)),
        "The forward table must be whole numbers, ticks x stages, got bool of shape (1, 1). "
        "Write one row per tick and -1 where a stage rests.",
    ),
    "huge": (
        lambda: one_f_one_b_lockstep(512, 10**6),
        "A schedule of stages=512, microbatches=1000000, chunks=1 has a table of more than "
        "67,108,864 cells. Use fewer microbatches in the pipeline, and accumulate the gradients "
        "of several pipeline runs: grads.accumulated(pipeline.value_and_grad(...), "
        "microbatches=...).",
    ),
}


@pytest.mark.parametrize("case", MESSAGES)
def test_messages(case):
    make, message = MESSAGES[case]
    with pytest.raises(ValueError) as refusal:  # noqa: PT011 (the whole message is compared)
        make()
    assert str(refusal.value) == message


PLAIN = """
from parallax.schedule import *

wrong = (
    lambda: one_f_one_b_lockstep(4.0, 8),
    lambda: gpipe(4, None),
    lambda: one_f_one_b_lockstep(4, 8, True),
)
for make in (*wrong, lambda: Schedule([[None]], [[0]])):
    try:
        make()
    except ValueError as error:
        print(error)
"""
REFUSED = """\
A schedule needs stages as a whole number, got stages=4.0. Write it as an int.
A schedule needs microbatches as a whole number, got microbatches=None. Write it as an int.
A schedule needs chunks as a whole number, got chunks=True. Write it as an int.
The forward table must be whole numbers, ticks x stages, got object of shape (1, 1). \
Write one row per tick and -1 where a stage rests.
"""


@pytest.mark.programs
def test_what_is_no_number_is_refused():
    """In a process of its own: here beartype would refuse it first."""
    assert (
        subprocess.run(
            [sys.executable, "-c", PLAIN], check=True, capture_output=True, text=True
        ).stdout
        == REFUSED
    )


def test_tables_are_copied_and_cannot_be_written_to():
    forward, backward = tables(one_f_one_b_lockstep(2, 2))
    table = Schedule(forward, backward)
    forward[0, 0] = 1
    assert table.forward[0, 0] == 0
    for array in (*table.lanes.values(), *table.slots.values()):
        with pytest.raises(ValueError, match="read-only"):
            array[0, 0] = 1


# Files


@given(size=sizes())
def test_csv_round_trip(tmp_path_factory, size):
    table = make(*size)
    path = tmp_path_factory.getbasetemp() / "table.csv"
    to_csv(table, path)
    back = from_csv(path)
    assert back.chunks == table.chunks
    assert back.lanes.keys() == table.lanes.keys()
    assert all((back.lanes[lane] == table.lanes[lane]).all() for lane in table.lanes)


def test_a_csv_to_read(tmp_path):
    to_csv(one_f_one_b_lockstep(2, 2), tmp_path / "plain.csv")
    header, *rows = (tmp_path / "plain.csv").read_text().splitlines()
    assert header == "tick,stage 0,stage 1"
    assert rows == ["0,0F0,", "1,0F1,1F0 1B0", "2,0B0,1F1 1B1", "3,0B1,"]
    to_csv(one_f_one_b_lockstep(1, 1, chunks=2), tmp_path / "chunks.csv")
    assert (tmp_path / "chunks.csv").read_text().splitlines()[1:] == ["0,0F0", "1,1F0 1B0", "2,0B0"]
    to_csv(zero_bubble_lockstep(1, 1), tmp_path / "halves.csv")
    assert (tmp_path / "halves.csv").read_text().splitlines()[1:] == ["0,0F0 0I0 0W0"]


def test_a_csv_written_by_hand(tmp_path):
    (tmp_path / "hand.csv").write_text(
        "\ufefftick, stage 0\r\n0, 0F1 0B1\r\n1,  0F0  0B0\r\n", encoding="utf-8"
    )
    assert from_csv(tmp_path / "hand.csv").forward.tolist() == [[1], [0]]


FILES = {
    "empty": ("", "{path}: line 1: needs the columns tick,stage 0 and so on; got ''."),
    "header": (
        "tick,stage 0,stage 2\n0,0F0,1F0\n",
        "{path}: line 1: needs the columns tick,stage 0 and so on; got 'tick,stage 0,stage 2'.",
    ),
    "tick": (
        "tick,stage 0\n0,0F0 0B0\n2,0F1 0B1\n",
        "{path}: line 3: needs 2 cells, and the first cell must be the tick, 1; got '2,0F1 0B1'.",
    ),
    "cells": (
        "tick,stage 0\n0\n",
        "{path}: line 2: needs 2 cells, and the first cell must be the tick, 0; got '0'.",
    ),
    "cell": (
        "tick,stage 0\n0,0F0 B0\n",
        "{path}: line 2, stage 0: 'B0' is no job. Write a job as 5F3: the place, then a "
        "letter (F, I, W or B), then the microbatch.",
    ),
    "two jobs of a lane": (
        "tick,stage 0\n0,0F0 0F1 0B0\n1,0B1\n",
        "{path}: line 2: tick 0, stage 0: has two forward jobs. Write them in two ticks.",
    ),
    "torch's form, which has no line for a tick": (
        "0F0,0B0,0F90,0B90\n1F0,1B0,1F90,1B90\n",
        "{path}: tick 5, stage 0: forward of job 90: jobs are numbered from 0 and 10 ticks hold at "
        "most 10. Number the microbatches from 0 without a gap. In a table a job is microbatch * "
        "chunks + chunk, or -1 where the stage rests.",
    ),
    "B beside W": (
        "tick,stage 0\n0,0F0 0B0\n1,0F1 0I1 0W1\n",
        "{path}: The file has whole backward jobs (B) and also separate ones (I: input gradient, "
        "W: weight gradient). Write I and W in the whole file, or B in the whole file.",
    ),
    "late": (
        "tick,stage 0,stage 1\n0,0F0,\n1,,\n2,,1F0 1B0\n3,0B0,\n",
        "{path}: line 4: tick 2, stage 1: forward of microbatch 0 must run in tick 1, since the "
        "forward of this microbatch at the previous place of the model runs in tick 0.",
    ),
    "nowhere": (
        "tick,stage 0\n0,0F0\n",
        "{path}: backward of microbatch 0 runs in no tick on stage 0. Add it, or number the "
        "microbatches from 0 without a gap.",
    ),
    "no ticks": (
        "tick,stage 0\n",
        "{path}: All stages need the same number of chunks (places of the model); got 0.",
    ),
}


NO_TABLES = {
    "a picture": (
        b"\x89PNG\r\n\x1a\n",
        r"needed a table of text, as to_csv writes it, found something else \('utf-8' codec can't",
    ),
    "UTF-16": (
        "tick".encode("utf-16"),
        r"needed a table of text, as to_csv writes it, found something else \('utf-8' codec can't",
    ),
    "an archive": (
        b"PK\x03\x04" * 5,
        r"line 1: needs the columns tick,stage 0 and so on; got 'PK\\x03\\x04PK.*'\.$",
    ),
    "a long line": (
        b"x" * 10_000,
        r"line 1: needs the columns tick,stage 0 and so on; got 'x{79}\.\.\. \(10002 "
        r"characters\)\.$",
    ),
    "a long cell": (
        b'"' + b"x" * 200_000,
        r"needed a table of text, .* \(field larger than field limit \(131072\)\)\.$",
    ),
}


@pytest.mark.parametrize("case", NO_TABLES)
def test_a_file_that_is_no_table_is_refused_in_a_sentence(tmp_path, case):
    content, message = NO_TABLES[case]
    (tmp_path / "table.csv").write_bytes(content)
    with pytest.raises(
        ValueError, match=rf"^{re.escape(str(tmp_path / 'table.csv'))}[:,] {message}"
    ):
        from_csv(tmp_path / "table.csv")


@pytest.mark.parametrize("case", FILES)
def test_messages_about_files(tmp_path, case):
    content, message = FILES[case]
    path = tmp_path / "broken.csv"
    path.write_text(content)
    with pytest.raises(ValueError) as refusal:  # noqa: PT011 (the whole message is compared)
        from_csv(path)
    assert str(refusal.value) == message.format(path=path)


def test_a_table_is_read_of_a_regular_file_alone(tmp_path):
    """A device never ends, and a pipe never answers."""
    (tmp_path / "device.csv").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe.csv")
    for name in ("device", "pipe"):
        with pytest.raises(
            ValueError, match=rf"{name}\.csv: needed a table .*, found a pipe or a device file\."
        ):
            from_csv(tmp_path / f"{name}.csv")
