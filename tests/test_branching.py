"""Each stage its own job in a tick: what one device computes, in the ticks and the slots of the table."""

import functools
import re

import equinox as eqx
import hlo
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_pipeline as lockstep
import test_pipeline_trees as trees
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P
from reference import EXACT, FLOAT64, assert_close, one_device

from parallax import mesh, pipeline, tensor
from parallax.collectives import ring, xla
from parallax.schedule import (
    Branching,
    CannotRun,
    Job,
    as_soon_as_can_be,
    in_order,
    looped,
    one_f_one_b_in_turns,
    there_and_back,
    zero_bubble_in_turns,
)

MAKERS = [one_f_one_b_in_turns, zero_bubble_in_turns]
no_shrinking = [Phase.explicit, Phase.generate]  # each example compiles a program


def in_turns(stages, microbatches, chunks=1):
    """Any number of chunks, one behind another around the ring, with no more in flight than it takes."""
    return as_soon_as_can_be(looped(stages, chunks), microbatches, [stages * chunks] * stages)


@st.composite
def tables(draw, stages, microbatches, chunks, loops=False):
    """How to make any schedule: chunks wherever the first is on stage 0, and each stage's jobs in any order that can run."""
    places = [0, *draw(st.permutations(range(1, stages * chunks)))]
    places = np.array(places).reshape(stages, chunks).T if draw(st.booleans()) else np.array(places).reshape(chunks, stages)
    if loops or draw(st.booleans()):
        places = np.arange(chunks * stages).reshape(chunks, stages)
    last, homes = places.size - 1, {int(place): s for (_, s), place in np.ndenumerate(places)}
    orders, done = [[] for _ in range(stages)], {}
    waiting = [Job(lane, m, k) for lane in ("forward", "backward", "weight") for m in range(microbatches) for k in homes]
    before = {
        "forward": lambda m, k: [Job("forward", m, k - 1)] if k else [],
        "backward": lambda m, k: [Job("backward", m, k + 1) if k < last else Job("forward", m, k)],
        "weight": lambda m, k: [Job("backward", m, k)],
    }
    random = draw(st.randoms(use_true_random=False))
    while waiting:
        job = random.choice([job for job in waiting if all(each in done for each in before[job.lane](job.microbatch, job.place))])
        waiting.remove(job)
        done[job] = True
        orders[homes[job.place]].append(job)
    return functools.partial(in_order, orders, places)


@given(data=st.data(), P_=st.integers(1, 5), M=st.integers(1, 4), v=st.integers(1, 3))
@settings(max_examples=30)
def test_slots_hold_each_array_from_its_job_to_its_use(data, P_, M, v):
    """Nothing is overwritten before it is used, and nobody waits for what comes later: the tables played through by name."""
    table = data.draw(tables(P_, M, v))()
    row = pipeline_turns(table)
    homes = {int(place): (c, s) for (c, s), place in np.ndenumerate(table.placed)}
    arrived, slots, handed = ([{} for _ in range(P_)] for _ in range(3))
    for t in range(table.ticks):
        sent = [None] * P_
        for s in range(P_):
            kind, (m, c), slot = row.kind[t, s], divmod(int(row.job[t, s]), v), row.slot[t, s]
            place = int(table.placed[c, s])
            if kind == 1:
                assert place == 0 or arrived[s][row.taken[t, s]] == ("y", m, place - 1)
                slots[s][slot], sent[s] = (m, place), ("y", m, place)
            if kind == 2:
                assert arrived[s][row.taken[t, s]] == ("ct", m, place + 1)
                assert slots[s][slot] == (m, place)
                handed[s][row.handed[t, s]], sent[s] = (m, place), ("ct", m, place)
            if kind == 3:
                assert slots[s][slot] == handed[s][row.handed[t, s]] == (m, place)
        for distance, to in row.arriving.items():
            for s in range(P_):
                if to[t, s] < table.arrival_count:
                    arrived[s][to[t, s]] = sent[(s - distance) % P_]
        last = homes[P_ * v - 1][1]
        if row.finished[t] >= 0:
            assert sent[last] == ("y", row.finished[t], P_ * v - 1)
            arrived[last][row.of_head[t, last]] = ("ct", row.finished[t], P_ * v)
        if row.leaving[t] >= 0:
            assert sent[0] == ("ct", row.leaving[t], 0)
    assert sorted(m for m in row.finished if m >= 0) == sorted(m for m in row.leaving if m >= 0) == list(range(M))


def pipeline_turns(table):
    from parallax.pipeline.turns import turns

    return turns(table)


@pytest.mark.parametrize(("P_", "M"), [(1, 1), (2, 5), (4, 8), (8, 24), (8, 3)])
def test_as_many_in_flight_as_stages(P_, M):
    """1F1B holds P - s microbatches on stage s, and both take the time that the issue's formula says."""
    table, zero = one_f_one_b_in_turns(P_, M), zero_bubble_in_turns(P_, M)
    assert table.in_flight.tolist() == [min(P_ - s, M) for s in range(P_)]
    assert table.slot_count == min(P_, M)
    assert table.handed_count == 1
    assert zero.slot_count <= P_
    assert zero.makespan() <= table.makespan()
    if M >= P_:
        assert table.makespan() == 3 * M + 2 * (P_ - 1)
    assert zero.makespan(1, 1, 1) - zero.bubble(1, 1, 1) == 3 * M


def test_the_times_of_the_issue():
    """P 8, M 24, F = I = W = 1, of an ideal 72: 81 with P in flight, 79 with 2P - 1, and 75.5 in the shape of a V."""
    assert zero_bubble_in_turns(8, 24).makespan() == 81
    assert zero_bubble_in_turns(8, 24, in_flight=15).makespan() == 79
    assert as_soon_as_can_be(there_and_back(8), 24, [16] * 8).makespan() == 75.5


def test_a_tick_takes_as_long_as_its_dearest_job_and_an_exchange():
    table = one_f_one_b_in_turns(2, 1)  # F, F, I, I and W, W
    assert table.ticks == 5
    assert table.makespan(1, 4, 2, hop=0.5) == 1 + 1 + 4 + 4 + 2 + 5 * 0.5
    spans = table.lockstep(1, 4, 2, hop=0.5)
    assert max(span.stop for span in spans) + 0.5 == table.makespan(1, 4, 2, hop=0.5)


@pytest.mark.sweep(3, "together")
@pytest.mark.parametrize("make", MAKERS)
def test_small(make):
    lockstep.check(lockstep.pairs, make(4, 3), beside=(1, 2))


@pytest.mark.sweep(3, "together")
def test_garbage_never_leaks():
    """Stages that rest have zeros, of which this model makes 0 / 0; none of it is in any sum."""
    lockstep.check(lockstep.fragile, zero_bubble_in_turns(2, 3))


@st.composite
def cases(draw, biggest=4):
    case = draw(trees.cases(biggest))
    v, stages = case.table.shape
    return case._replace(make=draw(st.just(in_turns) | tables(stages, case.microbatches, v, loops=True)), mover=xla)


@pytest.mark.sweep
@pytest.mark.slow
@settings(max_examples=6, phases=no_shrinking)
@given(case=cases(), seed=st.integers(0, 1000))
def test_everything_at_once_is_as_on_one_device(case, seed):
    """Dropout, trees, shared and frozen leaves, auxiliary values, uneven layers, ZeRO, over tensor and data."""
    make = case.make if case.make is in_turns else lambda *sizes: case.make()
    trees.check(case._replace(make=make), seed)


def test_much_at_once_is_as_on_one_device():
    trees.check(trees.Case(((2, 1), (1, 1)), 3, tensor=2, make=in_turns))


def anywhere(table, arrow=pipeline.value_and_grad, seed=0):
    """A small model whose chunks are at the places of a table, and the same on one device, in the order of the model."""
    enter, stage, head = lockstep.functions(lockstep.perceptrons)
    stages, v = table.stages, table.chunks
    params, batch = lockstep.model(lockstep.perceptrons, v, 2 * v * stages, seed), lockstep.batch_of(2 * table.microbatches, seed)
    specs = lockstep.Model(P(), P(None, "stage"), P())
    out = P() if arrow is pipeline.value else (P(), specs)
    run = mesh.spmd(arrow(enter, stage, head, table, "stage"), mesh=lockstep.on(1, stages, 1), in_specs=(specs, P()), out_specs=out)
    own = eqx.tree_at(lambda p: p.blocks, params, pipeline.arranged(params.blocks, table.placed))
    found = eqx.filter_jit(run)(own, batch)
    plain = one_device(enter, stage, head, v * stages)
    if arrow is pipeline.value:
        return found, plain(params, batch)
    back = eqx.tree_at(lambda p: p.blocks, found[1], pipeline.in_model_order(found[1].blocks, table.placed))
    return (found[0], back), eqx.filter_value_and_grad(plain)(params, batch)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("arrow", [pipeline.value_and_grad, pipeline.value])
def test_chunks_may_be_in_the_shape_of_a_v(arrow):
    """The last place is on stage 0, and its neighbour is on its own stage."""
    found, expected = anywhere(as_soon_as_can_be(there_and_back(2), 3, [4, 4]), arrow)
    assert_close(found, expected, EXACT)


@pytest.mark.sweep
@pytest.mark.slow
@settings(max_examples=6, phases=no_shrinking)
@given(data=st.data(), seed=st.integers(0, 1000))
def test_chunks_may_be_anywhere(data, seed):
    table = data.draw(tables(data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))))()
    found, expected = anywhere(table, seed=seed)
    assert_close(found, expected, EXACT)
