"""Each stage its own job in a tick: what one device computes, in the ticks and the slots of the
table."""

import functools
import re
from fractions import Fraction
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import test_pipeline as lockstep
import test_pipeline_trees as trees
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P
from reference import (
    EXACT,
    FLOAT64,
    assert_close,
    assert_same_run,
    gpt2_on,
    gpt2_on_one_device,
    one_device,
    products,
)

from parallax import mesh, pipeline, plan, step, tensor
from parallax.collectives import Axis, ring, xla
from parallax.compiled import hlo
from parallax.jaxprs import COUNTED
from parallax.layout import Layout
from parallax.models import gpt2, llama
from parallax.pipeline.jobs import Jobs
from parallax.pipeline.programs import Functions
from parallax.pipeline.rows import rows
from parallax.schedule import (
    LANES,
    Job,
    Schedule,
    from_orders,
    greedy,
    looped_placement,
    one_f_one_b,
    v_placement,
    zero_bubble,
)

ROOT = Path(__file__).parents[1]
MAKERS = [one_f_one_b, zero_bubble]
LLAMA = llama.Config(
    layers=4,
    heads=4,
    groups=2,
    width=16,
    hidden=24,
    context=8,
    vocabulary=30,
    vocabulary_multiple=8,
)
no_shrinking = [Phase.explicit, Phase.generate]  # each example compiles a program


def in_turns(stages, microbatches, chunks=1):
    """Any number of chunks, one behind another around the ring, with no more in flight than it
    takes."""
    return greedy(looped_placement(stages, chunks), microbatches, [stages * chunks] * stages)


@st.composite
def tables(draw, stages, microbatches, chunks, loops=False):
    """How to make any schedule: chunks wherever the first is on stage 0, and each stage's jobs in
    any order that can run."""
    places = [0, *draw(st.permutations(range(1, stages * chunks)))]
    places = (
        np.array(places).reshape(stages, chunks).T
        if draw(st.booleans())
        else np.array(places).reshape(chunks, stages)
    )
    if loops or draw(st.booleans()):
        places = np.arange(chunks * stages).reshape(chunks, stages)
    last, homes = places.size - 1, {int(place): s for (_, s), place in np.ndenumerate(places)}
    orders, done = [[] for _ in range(stages)], {}
    waiting = [
        Job(lane, m, k)
        for lane in ("forward", "backward", "weight")
        for m in range(microbatches)
        for k in homes
    ]
    before = {
        "forward": lambda m, k: [Job("forward", m, k - 1)] if k else [],
        "backward": lambda m, k: [Job("backward", m, k + 1) if k < last else Job("forward", m, k)],
        "weight": lambda m, k: [Job("backward", m, k)],
    }
    random = draw(st.randoms(use_true_random=False))
    while waiting:
        job = random.choice(
            [
                job
                for job in waiting
                if all(each in done for each in before[job.lane](job.microbatch, job.place))
            ]
        )
        waiting.remove(job)
        done[job] = True
        orders[homes[job.place]].append(job)
    return functools.partial(from_orders, orders, places)


@pytest.mark.parametrize(
    ("place", "told"),
    [
        (
            0,
            "at place 0, which is on stage 0. Move the job to stage 0, or move place 0 to stage 1.",
        ),
        (7, "at place 7, but the chunks of all stages have only the places 0 to 1."),
    ],
)
def test_a_job_at_another_stages_place_or_at_none_is_refused(place, told):
    with pytest.raises(ValueError, match=re.escape(f"stage 1 has a job {told}")):
        from_orders([[], [Job("forward", 0, place)]], np.array([[0, 1]]))


@pytest.mark.parametrize("microbatch", [-1, 0.5])
def test_microbatches_of_jobs_are_numbered_from_0(microbatch):
    """-1 would be a tick without a job, and a fraction would be cut."""
    jobs = [Job(lane, m, 0) for m in (microbatch, 0) for lane in ("forward", "backward", "weight")]
    with pytest.raises(ValueError, match=f"microbatch {microbatch} .*number the first one 0"):
        from_orders([jobs], np.array([[0]]))


@given(data=st.data(), P_=st.integers(1, 5), M=st.integers(1, 4), v=st.integers(1, 3))
@settings(max_examples=30)
def test_slots_hold_each_array_from_its_job_to_its_use(data, P_, M, v):
    """Nothing is overwritten before it is used, and nobody waits for what comes later: the tables
    played through by name."""
    table = data.draw(tables(P_, M, v))()
    row = rows(table)
    homes = {int(place): (c, s) for (c, s), place in np.ndenumerate(table.placed)}
    arrived, slots, handed = ([{} for _ in range(P_)] for _ in range(3))
    for t in range(table.ticks):
        sent = [None] * P_
        for s in range(P_):
            for lane in [lane for lane in LANES if row.jobs[lane][t, s] >= 0]:
                (m, c), slot = divmod(int(row.jobs[lane][t, s]), v), row.saved[lane][t, s]
                place = int(table.placed[c, s])
                if lane == "forward":
                    assert place == 0 or arrived[s][row.arrival[lane][t, s]] == ("y", m, place - 1)
                    slots[s][slot], sent[s] = (m, place), ("y", m, place)
                if lane == "backward":
                    assert arrived[s][row.arrival[lane][t, s]] == ("ct", m, place + 1)
                    assert slots[s][slot] == (m, place)
                    handed[s][row.deferred[lane][t, s]], sent[s] = (m, place), ("ct", m, place)
                if lane == "weight":
                    assert slots[s][slot] == handed[s][row.deferred[lane][t, s]] == (m, place)
        for distance, to in row.arriving.items():
            for s in range(P_):
                if to[t, s] < table.arrival_count:
                    arrived[s][to[t, s]] = sent[(s - distance) % P_]
        last = homes[P_ * v - 1][1]
        if row.jobs["head"][t] >= 0:
            assert sent[last] == ("y", row.jobs["head"][t], P_ * v - 1)
            arrived[last][row.from_head[t, last]] = ("ct", row.jobs["head"][t], P_ * v)
        if row.jobs["embed_backward"][t] >= 0:
            assert sent[0] == ("ct", row.jobs["embed_backward"][t], 0)
    assert (
        sorted(m for m in row.jobs["head"] if m >= 0)
        == sorted(m for m in row.jobs["embed_backward"] if m >= 0)
        == list(range(M))
    )


@pytest.mark.parametrize(("P_", "M"), [(1, 1), (2, 5), (4, 8), (8, 24), (8, 3)])
def test_as_many_in_flight_as_stages(P_, M):
    """1F1B holds P - s microbatches on stage s, and both take the time that the issue's formula
    says."""
    table, zero = one_f_one_b(P_, M), zero_bubble(P_, M)
    assert table.in_flight.tolist() == [min(P_ - s, M) for s in range(P_)]
    assert table.slot_count == min(P_, M)
    assert table.deferred_count == 1
    assert zero.slot_count <= P_
    assert zero.makespan() <= table.makespan()
    if M >= P_:
        assert table.makespan() == 3 * M + 2 * (P_ - 1)
    assert zero.makespan(1, 1, 1) - zero.bubble(1, 1, 1) == 3 * M


def test_the_times_of_the_issue():
    """P 8, M 24, F = I = W = 1, of an ideal 72: 81 with P in flight, 79 with 2P - 1, and 75.5 in
    the shape of a V."""
    assert zero_bubble(8, 24).makespan() == 81
    assert zero_bubble(8, 24, in_flight=15).makespan() == 79
    assert greedy(v_placement(8), 24, [16] * 8).makespan() == 75.5


def test_a_tick_takes_as_long_as_its_dearest_job_and_an_exchange():
    table = one_f_one_b(2, 1)  # F, F, I, I and W, W
    assert table.ticks == 5
    assert table.makespan(1, 4, 2, hop=0.5) == 1 + 1 + 4 + 4 + 2 + 5 * 0.5
    spans = table.lockstep(1, 4, 2, hop=0.5)
    assert max(span.stop for span in spans) + 0.5 == table.makespan(1, 4, 2, hop=0.5)


@pytest.mark.sweep(4, "branching")
@pytest.mark.parametrize("make", MAKERS)
def test_small(make):
    lockstep.check(lockstep.pairs, make(4, 3), beside=(1, 2))


@pytest.mark.sweep(4, "branching")
def test_garbage_never_leaks():
    """Stages that rest have zeros, of which this model makes 0 / 0; none of it is in any sum."""
    lockstep.check(lockstep.fragile, zero_bubble(2, 3))


@st.composite
def cases(draw, biggest=8):
    case = draw(trees.cases(biggest))
    v, stages = case.table.shape
    return case._replace(
        make=draw(st.just(in_turns) | tables(stages, case.microbatches, v, loops=True)),
        algorithm=xla,
    )


@pytest.mark.sweep
@pytest.mark.long
@settings(max_examples=3, phases=no_shrinking)
@given(case=cases(), seed=st.integers(0, 1000))
def test_everything_at_once_is_as_on_one_device(case, seed):
    """Dropout, trees, shared and frozen leaves, auxiliary values, uneven layers, ZeRO, over tensor
    and data."""
    make = case.make if case.make is in_turns else lambda *sizes: case.make()
    trees.check(case._replace(make=make), seed)


@pytest.mark.sweep(3)
@pytest.mark.long
@pytest.mark.parametrize(("P_", "M", "v"), [(6, 4, 1), (7, 3, 1), (8, 5, 1), (8, 2, 2)])
def test_up_to_eight_stages_are_as_one_device(P_, M, v):
    """All at once on six, seven and eight stages, the layers uneven."""
    counts = tuple(tuple(1 + (s + c) % 2 for s in range(P_)) for c in range(v))
    trees.check(trees.Case(counts, M, make=in_turns, keep=trees.KEEP[M % 2]))


@pytest.mark.sweep(4, "branching")
def test_much_at_once_is_as_on_one_device():
    trees.check(trees.Case(((2, 1), (1, 1)), 3, tensor=2, make=in_turns))


def anywhere(table, grad_fn=pipeline.value_and_grad, seed=0):
    """A small model whose chunks are at the places of a table, and the same on one device, in the
    order of the model."""
    embed, stage, head = lockstep.functions(lockstep.perceptrons)
    stages, v = table.stages, table.chunks
    params, batch = (
        lockstep.model(lockstep.perceptrons, v, 2 * v * stages, seed),
        lockstep.batch_of(2 * table.microbatches, seed),
    )
    specs = lockstep.Model(P(), P(None, "stage"), P())
    out = P() if grad_fn is pipeline.value else (P(), specs)
    run = mesh.spmd(
        grad_fn(embed, stage, head, table, "stage"),
        mesh=lockstep.on(1, stages, 1),
        in_specs=(specs, P()),
        out_specs=out,
    )
    own = eqx.tree_at(
        lambda p: p.blocks, params, pipeline.to_placement(params.blocks, table.placed)
    )
    found = eqx.filter_jit(run)(own, batch)
    plain = one_device(embed, stage, head, v * stages)
    if grad_fn is pipeline.value:
        return found, plain(params, batch)
    back = eqx.tree_at(
        lambda p: p.blocks, found[1], pipeline.from_placement(found[1].blocks, table.placed)
    )
    return (found[0], back), eqx.filter_value_and_grad(plain)(params, batch)


@pytest.mark.sweep(4, "branching")
@pytest.mark.parametrize("grad_fn", [pipeline.value_and_grad, pipeline.value])
def test_chunks_may_be_in_the_shape_of_a_v(grad_fn):
    """The last place is on stage 0, and its neighbour is on its own stage."""
    found, expected = anywhere(greedy(v_placement(2), 3, [4, 4]), grad_fn)
    assert_close(found, expected, EXACT)


@pytest.mark.sweep(3, "wholes")
def test_the_schedule_of_the_contributors_page_is_as_one_device():
    """The maker in CONTRIBUTING.md, as it stands there: at most 25 lines, and every gradient is
    right."""
    (maker,) = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    assert len(maker.splitlines()) <= 25
    names = {}
    exec(maker, names)
    table = names["breadth_first"](2, 3, 2)
    first = [(job.lane, job.place, job.microbatch) for job in jobs_of(table, 0)][:6]
    assert first == [("forward", place, m) for place in (0, 2) for m in range(3)]
    found, expected = anywhere(table)
    assert_close(found, expected, EXACT)


def jobs_of(table, stage):
    """A stage's jobs in their order."""
    for tick in range(table.ticks):
        for lane, jobs in table.lanes.items():
            if (job := int(jobs[tick, stage])) >= 0:
                microbatch, chunk = divmod(job, table.chunks)
                yield Job(lane, microbatch, int(table.placed[chunk, stage]))


def test_auxiliary_values_are_in_order():
    """Each chunk returns its place, in a pipeline in the shape of a V."""
    table = greedy(v_placement(2), 3, [4, 4])
    stage = lambda params, x, part, position: pipeline.Output(
        x + params["blocks"][0, 0], aux=position.astype(FLOAT64)
    )
    head = lambda params, x, part: jnp.mean(x)
    grad_fn = pipeline.value(
        lambda params, part: part,
        stage,
        head,
        table,
        "stage",
        blocks=lambda params: params["blocks"],
    )
    specs, world = {"blocks": P(None, "stage")}, lockstep.on(1, 2, 1)
    run = jax.jit(mesh.spmd(grad_fn, mesh=world, in_specs=(specs, P()), out_specs=(P(), P())))
    loss, aux = run({"blocks": jnp.ones((2, 2, 1), FLOAT64)}, jnp.zeros((6, 3), FLOAT64))
    assert (float(loss), aux.stages.tolist()) == (4, [0, 1, 2, 3])


@pytest.mark.sweep
@pytest.mark.long
@settings(max_examples=3, phases=no_shrinking)
@given(data=st.data(), seed=st.integers(0, 1000))
def test_chunks_may_be_anywhere(data, seed):
    table = data.draw(
        tables(
            data.draw(st.integers(1, 8)), data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
        )
    )()
    found, expected = anywhere(table, seed=seed)
    assert_close(found, expected, EXACT)


@st.composite
def placements(draw):
    """Where chunks may be: anywhere, but for the first place, which is on stage 0."""
    stages, chunks = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    places = [0, *draw(st.permutations(range(1, stages * chunks)))]
    return np.array(places).reshape(stages, chunks).T


@pytest.mark.sweep(3, "wholes")
@given(placement=placements(), each=st.integers(1, 3), uneven=st.booleans(), data=st.data())
@settings(max_examples=15)
def test_layers_are_stored_in_the_order_of_the_model(placement, each, uneven, data):
    """Whatever the placement, and with AdamW's moments: what one run wrote, a run with any other
    placement goes on with."""
    counts = [data.draw(st.integers(1, 3)) if uneven else each for _ in range(placement.size)]
    table = np.array(counts).reshape(placement.shape) if uneven else None
    layers = {"w": np.arange(sum(counts) * 2.0).reshape(-1, 2), "static": "a name"}

    def state_of(blocks):
        model = {"blocks": blocks, "end": np.ones(3)}
        return step.State(
            model,
            optax.adamw(1e-3).init(eqx.filter(model, mesh.is_array)),
            jnp.zeros((), jnp.int32),
        )

    def on_stages(w, placement):
        """Layer after layer, each where the placement has it."""
        longest = max(counts)
        starts = np.cumsum([0, *counts])
        rows = [
            w[starts[place] + min(k, counts[place] - 1)]
            for chunk in placement
            for place in chunk
            for k in range(longest)
        ]
        return np.stack(rows).reshape(len(placement), -1, *w.shape[1:])

    held = state_of(layers | {"w": on_stages(layers["w"], placement)})
    form = pipeline.stored(lambda model: model["blocks"], placement, table=table)
    disk = form.to_disk(held)
    np.testing.assert_array_equal(disk.model["blocks"]["w"], layers["w"])
    assert disk.optimizer[0].mu["blocks"]["w"].shape == layers["w"].shape
    back = form.from_disk(disk)
    jax.tree.map(
        np.testing.assert_array_equal, *(eqx.filter(state, mesh.is_array) for state in (back, held))
    )
    if not uneven:
        elsewhere = looped_placement(placement.shape[1], placement.shape[0])
        moved = pipeline.stored(lambda model: model["blocks"], elsewhere).from_disk(disk)
        np.testing.assert_array_equal(moved.model["blocks"]["w"], on_stages(layers["w"], elsewhere))


@pytest.mark.parametrize(
    "placement", [np.array([[0, 2]]), np.array([[0], [0]]), np.zeros((0, 2), int)], ids=str
)
def test_what_is_no_placement_is_refused(placement):
    for name, refused in (
        ("stored", lambda: pipeline.stored(lambda model: model, placement)),
        ("to_placement", lambda: pipeline.to_placement(jnp.ones((1, 2)), placement)),
        ("local_chunks", lambda: pipeline.local_chunks(jnp.ones(2), (), placement)),
    ):
        with pytest.raises(
            ValueError, match=rf"pipeline\.{name}: a placement is \[chunks, stages\]"
        ):
            refused()


@pytest.mark.parametrize("placement", [[[0, 1], [2, 3]], [[0, 1], [3, 2]]], ids=str)
@pytest.mark.parametrize("shape", [(4, 3), (2, 3, 5), (2,)], ids=str)
@pytest.mark.parametrize("move", [pipeline.to_placement, pipeline.from_placement])
def test_blocks_of_another_shape_are_refused(placement, shape, move):
    """Also where the placement is the model's order, in which nothing moves."""
    with pytest.raises(
        ValueError,
        match=rf"^pipeline\.{move.__name__}: 2 chunks on each of 2 stages need blocks whose "
        r"arrays have the shape \[2, L / 2, \.\.\.\], where L, the number of layers, is a "
        r"multiple of 4; got "
        rf"{re.escape(str(shape))}\.",
    ):
        move(jnp.zeros(shape), np.array(placement))


@pytest.mark.sweep(3, "branching")
@settings(max_examples=3, phases=no_shrinking)
@given(data=st.data(), seed=st.integers(0, 1000))
def test_one_device_equals_a_pipeline_of_any_placement(data, seed):
    table = data.draw(tables(data.draw(st.integers(2, 4)), 2, data.draw(st.integers(1, 2))))()
    assert_one_device_equals_the_pipeline(table, seed)


@pytest.mark.sweep(3, "wholes")
def test_one_device_equals_a_pipeline_placed_in_a_v():
    assert_one_device_equals_the_pipeline(greedy(v_placement(3), 2, [6] * 3), seed=0)


def assert_one_device_equals_the_pipeline(table, seed):
    """`unpipelined` with the placement: loss, gradients and auxiliary values of each place;
    `local_chunks` has a stage's own."""
    v, stages = table.placed.shape

    def stage(params, x, part, position):
        y = jnp.tanh(x @ params["blocks"]["w"][0]) + 0.1 * position.astype(FLOAT64)
        return pipeline.Output(
            y, loss=jnp.mean(y), aux=(position.astype(FLOAT64), jnp.sum(params["blocks"]["w"]))
        )

    functions = lambda params, part: part, stage, lambda params, x, part: jnp.mean(x * x)
    grad = pipeline.value_and_grad(
        *functions, table, "stage", blocks=lambda params: params["blocks"]
    )

    def both(params, batch):
        (loss, aux), gradients = grad(params, batch)
        return loss, aux.stages, gradients, pipeline.local_chunks(aux.stages, "stage", table.placed)

    params = {"blocks": {"w": jax.random.normal(jax.random.key(seed), (v, stages, 3, 3), FLOAT64)}}
    batch = jax.random.normal(jax.random.key(seed + 1), (4, 3), FLOAT64)
    specs = {"blocks": {"w": P(None, "stage")}}
    of_stages = P(None), P(None)
    run = mesh.spmd(
        both,
        mesh=lockstep.on(1, stages, 1),
        in_specs=(specs, P()),
        out_specs=(P(), of_stages, specs, (P("stage"), P("stage"))),
    )
    loss, aux, gradients, own = jax.jit(run)(params, batch)
    plain = pipeline.unpipelined(
        *functions, blocks=lambda params: params["blocks"], placement=table.placed
    )
    (expected, told), of_plain = jax.value_and_grad(plain, has_aux=True)(params, batch)
    assert_close((loss, aux, gradients), (expected, told.stages, of_plain), EXACT)
    np.testing.assert_array_equal(
        np.reshape(own[0], (stages, v)), table.placed.T
    )  # each chunk told its place
    sums = jnp.sum(params["blocks"]["w"], axis=(2, 3))
    np.testing.assert_allclose(np.reshape(own[1], (stages, v)).T, sums, rtol=EXACT)


@pytest.mark.parametrize(("ticks", "stages"), [(1, 1), (5, 2)])
def test_a_schedule_without_a_job_is_refused(ticks, stages):
    with pytest.raises(
        ValueError, match=rf"{ticks} ticks, {stages} stages\) have no job: .*\. Add a microbatch"
    ):
        Schedule(*np.full((3, ticks, stages), -1))


def refused(stage, table, match, beside=(1, 2)):
    """A stage that some devices cannot run alone."""
    embed, _, head = lockstep.functions(lockstep.pairs)
    specs, over = (
        lockstep.Model(P(), P(None, "stage"), P()),
        lockstep.on(beside[0], table.stages, beside[1]),
    )
    grad_fn = pipeline.value_and_grad(embed, stage, head, table, "stage")
    run = mesh.spmd(grad_fn, mesh=over, in_specs=(specs, P()), out_specs=P())
    with pytest.raises(ValueError, match=match):
        jax.eval_shape(run, lockstep.model(lockstep.pairs, 1, 4), lockstep.batch_of(8))


def test_what_all_devices_must_run_at_once_is_refused():
    """Rings inside a stage, by any wrapping, and sums over the stages; each with its line."""
    table = one_f_one_b(4, 4)
    along = lambda move: (
        lambda params, x, part, position: (
            x + jax.checkpoint(lambda x: lax.scan(move, x, None, length=2)[0])(x)
        )
    )
    ringed = along(lambda x, _: (ring.all_reduce(x, "tensor"), None))
    cure = re.escape(
        "Use jax.lax.psum or jax.lax.all_gather in its place (if an axis has an algorithm, such as "
        "ring, pass only the name 'tensor'), or use a schedule that runs in lockstep"
    )
    refused(
        ringed,
        table,
        r"a stage's forward pass runs ppermute over 'tensor' \(.*test_branching.py:\d+\)\. "
        rf"All devices must run this collective at the same time\. {cure}",
    )
    summed = along(lambda x, _: (lax.psum(x, "stage") / 4 + 0 * x, None))
    refused(
        summed,
        table,
        r"a stage's forward pass runs psum\w* over 'stage' \(.*test_branching.py:\d+\)\. "
        r"Stages that run another job would never join this collective\. Leave 'stage' out of its "
        r"axes\. To gather a parameter, gather it in embed, and let x bring it to the stages\.",
    )


@pytest.mark.long
@pytest.mark.parametrize("move", ["all_gather", "reduce_scatter", "all_to_all", "pmax"])
def test_other_collectives_of_a_group_run_on_some_stages_only(move):
    """Each of them inside a stage over tensor, with its transpose."""
    moved = {
        "all_gather": lambda x: jnp.sum(lax.all_gather(x, "tensor"), axis=0),
        "reduce_scatter": lambda x: jnp.tile(
            lax.psum_scatter(x, "tensor", scatter_dimension=1, tiled=True), (1, 2)
        ),
        "all_to_all": lambda x: lax.all_to_all(x, "tensor", 1, 1, tiled=True),
        "pmax": lambda x: (
            x * lax.pmax(lax.stop_gradient(jnp.mean(x, axis=1, keepdims=True)), "tensor")
        ),
    }[move]

    def together(y):
        number = 1 + lax.axis_index("tensor").astype(FLOAT64)
        return tensor.reduce_from(moved(tensor.copy_to(y, "tensor") * number), "tensor")

    def layer(x, w, part, axis):
        y = jnp.tanh(x @ w["up"] @ w["down"])
        return x + (together(y) if axis else alone(y))

    def alone(y):
        own = jnp.stack([y, 2 * y])
        blocks = own.reshape(2, y.shape[0], 2, -1)
        return {
            "all_gather": lambda: 2 * jnp.sum(own, axis=0),
            "reduce_scatter": lambda: jnp.sum(
                jnp.tile(jnp.moveaxis(jnp.sum(blocks, axis=0), 1, 0), (1, 1, 2)), axis=0
            ),
            "all_to_all": lambda: jnp.sum(
                jnp.moveaxis(blocks, (0, 2), (2, 0)).reshape(2, *y.shape), axis=0
            ),
            "pmax": lambda: (
                jnp.sum(own, axis=0)
                * lax.stop_gradient(jnp.max(jnp.mean(own, axis=2, keepdims=True), axis=0))
            ),
        }[move]()

    kind = lockstep.Kind(lockstep.pair_weights, layer)
    lockstep.check(kind, zero_bubble(2, 3), beside=(1, 2))


def inside(name):
    """`lax` inside the stages, rings over the stages and the replicas."""
    return xla(name) if name == "tensor" else ring(name)


@pytest.mark.sweep(2)
@pytest.mark.long
@pytest.mark.parametrize("schedule", ["zero_bubble_lockstep", "zero_bubble", "one_f_one_b"])
@pytest.mark.parametrize("kind", [gpt2, llama])
def test_models_train_as_on_one_device(kind, schedule):
    """Five steps of AdamW; the vocabulary is shared out over stage and tensor."""
    layout = Layout(data=2, stage=2, tensor=2, microbatches=4, schedule=schedule)
    config = lockstep.CONFIG if kind is gpt2 else LLAMA
    run = gpt2_on(
        layout, lockstep.on(2, 2, 2), config, 0, 5, lockstep.BATCH, algorithm=inside, kind=kind
    )
    assert_same_run(run, gpt2_on_one_device(config, 0, 5, lockstep.BATCH, kind=kind))


@functools.cache
def program(table, rows=32, layers=2, width=16):
    """A compiled pipeline of scanned layers."""
    return lowered(table, rows, layers, width).compile()


def lowered(table, rows=32, layers=2, width=16):
    """The same before it is compiled."""
    grad = pipeline.value_and_grad(
        *scanned(), table, "stage", blocks=lambda params: params["blocks"]
    )
    world, specs = (
        mesh.make(stage=table.stages, devices=jax.devices()[: table.stages]),
        {"blocks": P(None, "stage")},
    )
    run = jax.jit(mesh.spmd(grad, mesh=world, in_specs=(specs, P()), out_specs=(P(), specs)))
    blocks = jax.ShapeDtypeStruct((table.chunks, table.stages * layers, width, width), FLOAT64)
    batch = jax.ShapeDtypeStruct((rows * table.microbatches, width), FLOAT64)
    return run.lower({"blocks": blocks}, batch)


def test_there_is_no_conditional_and_a_message_each_way_a_tick():
    table = one_f_one_b(4, 8)
    text = program(table).as_text()
    assert not re.search(r"\bconditional\(", text)
    sent = re.findall(r" collective-permute(?:-start)?\(", text)
    assert len(sent) == 2  # in the one loop over the ticks
    assert f'"n":"{table.ticks}"' in text  # its trip count, as XLA writes it


def loops(compiled):
    """The trips of the loops over ticks, and of those in a tick, by name,
    `(trips, operations in the products of one)`."""
    module = hlo.module(compiled)
    ticks, jobs = [], {}
    for lines in module.computations.values():
        for line in lines:
            (body,) = [
                name for name, times in line.called if "body=%" + name in line.attributes
            ] or [None]
            if line.opcode == "while" and line.counted:
                jobs[COUNTED.search(line.attributes)[1]] = line.counted, products(module, body)
            elif line.opcode == "while" and any(inside.counted for inside in module[body]):
                ticks.append(dict(line.called)[body])
    return ticks, jobs


@pytest.mark.sweep(3, "wholes")
@pytest.mark.parametrize("make", MAKERS, ids=["1F1B", "zero bubble"])
def test_the_program_is_the_table(make):
    """One loop of as many trips as there are ticks; in it a loop for each job, with the operations
    that the table counts."""
    table = make(4, 8)
    (ticks,), jobs = loops(program(table))
    assert ticks == table.ticks
    each = Fraction(table.microbatches, table.ticks)  # of each kind of job, on each stage
    assert {name: trips for name, (trips, _) in jobs.items()} == dict.fromkeys(
        ("embed", "head", *LANES), each
    )
    # Which job is whose in a tick stands in the program as a constant, and the dearest of them are
    # the fold over the table.
    for lane in LANES:
        assert table.lanes[lane].astype("<i4").tobytes().hex().upper() in lowered(table).as_text()
    costs = [jobs[lane][1] for lane in LANES]
    assert costs == list(of_a_stage(table).costs())
    largest = np.array([0, *costs])[table.kinds].max(axis=1)
    assert ticks * largest.mean() == table.makespan(*costs)


def of_a_stage(table, rows=32, layers=2, width=16):
    """The operations of F, I and W as the stage's jaxpr has them."""
    world, specs = (
        mesh.make(stage=table.stages, devices=jax.devices()[: table.stages]),
        {"blocks": P(None, "stage")},
    )
    count = plan.stage_work(*scanned(), table, "stage", blocks=lambda params: params["blocks"])
    blocks = jax.ShapeDtypeStruct((table.chunks, table.stages * layers, width, width), FLOAT64)
    batch = jax.ShapeDtypeStruct((rows * table.microbatches, width), FLOAT64)
    return count({"blocks": blocks}, batch, mesh=world, in_specs=(specs, P()))


@pytest.mark.parametrize("placed", ["one behind another", "V"])
def test_the_jobs_that_ran_are_those_of_the_table(placed):
    """Each stage tells its F, I and W as they run: its column of the table, in order."""
    table = greedy(v_placement(2), 2, [4, 4]) if placed == "V" else zero_bubble(2, 3)
    ran = [[] for _ in range(table.stages)]

    def told(lane):
        def tell(x, stage, place, microbatch):
            ran[int(stage)].append((lane, int(place), int(microbatch)))
            return np.ones((), x.dtype)

        return lambda x, *where: (
            x * jax.pure_callback(tell, jax.ShapeDtypeStruct((), x.dtype), x, *where)
        )

    def telling(forward, backward):
        """The identity, which tells when it runs and when its transpose does."""
        f = jax.custom_vjp(lambda x, where: x)
        f.defvjp(
            lambda x, where: (forward(x, *where), where),
            lambda where, ct: (backward(ct, *where), None),
        )
        return f

    unseen = lambda x, *where: x

    def stage(params, x, part, position):
        where = lax.axis_index("stage"), position, part["number"][0]
        w = telling(unseen, told("weight"))(params["blocks"][0], where)
        x = telling(told("forward"), unseen)(x, where)
        return telling(unseen, told("backward"))(jnp.tanh(x @ w), where)

    embed, head = lambda params, part: part["x"], lambda params, x, part: jnp.mean(x**2)
    grad = pipeline.value_and_grad(
        embed, stage, head, table, "stage", blocks=lambda params: params["blocks"]
    )
    world, specs = (
        mesh.make(stage=table.stages, devices=jax.devices()[: table.stages]),
        {"blocks": P(None, "stage")},
    )
    run = jax.jit(mesh.spmd(grad, mesh=world, in_specs=(specs, P()), out_specs=(P(), specs)))
    batch = {
        "x": jnp.ones((table.microbatches, 3), FLOAT64),
        "number": jnp.arange(table.microbatches),
    }
    jax.block_until_ready(
        run({"blocks": jnp.ones((table.chunks, table.stages, 3, 3), FLOAT64)}, batch)
    )
    for s in range(table.stages):
        assert ran[s] == [(job.lane, job.place, job.microbatch) for job in jobs_of(table, s)]


def test_what_all_stages_run_runs_in_its_ticks_alone():
    """The sums of the head, of embed and of its transpose over the stages: M times each, in more
    ticks than that together."""
    table = one_f_one_b(2, 3)
    embed = lambda params, part: tensor.reduce_from(part * params["scale"], "stage")
    stage = lambda params, x, part, position: jnp.tanh(x @ params["blocks"][0])
    head = lambda params, x, part: jnp.mean(pipeline.from_last(x, "stage") ** 2)
    grad = pipeline.value_and_grad(
        embed, stage, head, table, "stage", blocks=lambda params: params["blocks"]
    )
    world, specs = (
        mesh.make(stage=2, devices=jax.devices()[:2]),
        {"blocks": P(None, "stage"), "scale": P()},
    )
    run = jax.jit(mesh.spmd(grad, mesh=world, in_specs=(specs, P()), out_specs=(P(), specs)))
    params = {"blocks": jnp.ones((1, 2, 4, 4), FLOAT64), "scale": jnp.ones((), FLOAT64)}
    sums = [
        op
        for op in hlo.parse(run.lower(params, jnp.ones((6, 4), FLOAT64)).compile())
        if op.shape == (2, 4)
    ]
    assert [op.kind for op in sums].count("all-reduce") == 3 * table.microbatches < table.ticks
    assert [op.kind for op in sums].count(
        "collective-permute"
    ) == table.ticks  # between two stages both ways are one


def scanned():
    """A pipeline of scanned layers."""
    embed, head = lambda params, part: part, lambda params, x, part: jnp.mean(x**2)
    layer = lambda x, w: (x + jnp.tanh(jnp.tanh(x @ w) * x), None)
    stage = lambda params, x, part, position: lax.scan(layer, x, params["blocks"])[0]
    return embed, stage, head


def slot_bytes(table, rows=32, layers=2, width=16):
    """What the table's slots take of a device: residuals, what I hands on to W, and what came."""
    found = []

    def traced(params, batch):
        functions = Functions(*scanned(), lambda params: params["blocks"], lambda leaf: True)
        jobs = Jobs(
            functions,
            table,
            Axis("stage"),
            params,
            batch,
            save=pipeline.residuals,
            send=pipeline.whole,
            in_halves=True,
        )
        sizes = lambda tree: sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
        kinds = jobs.saved, jobs.deferred, jobs.x
        found[:] = [sizes(kind) for kind in kinds]
        return ()

    world, specs = (
        mesh.make(stage=table.stages, devices=jax.devices()[: table.stages]),
        {"blocks": P(None, "stage")},
    )
    blocks = jax.ShapeDtypeStruct((table.chunks, table.stages * layers, width, width), FLOAT64)
    batch = jax.ShapeDtypeStruct((rows * table.microbatches, width), FLOAT64)
    jax.eval_shape(
        mesh.spmd(traced, mesh=world, in_specs=(specs, P()), out_specs=()),
        {"blocks": blocks},
        batch,
    )
    kept, handed, x = found
    return table.slot_count * kept + table.deferred_count * handed + (table.arrival_count + 1) * x


def assert_memory_is_that_of_the_slots(table):
    """The slots, and what one tick's work takes, which is that of another table on as many stages:
    within 5 % in all."""
    taken = lambda table: program(table).memory_analysis().temp_size_in_bytes
    plain = one_f_one_b(table.stages, 4)
    work = taken(plain) - slot_bytes(plain)
    # The work differs by a slot's worth at most: what I or W reads of a slot XLA copies, or not.
    assert taken(table) == pytest.approx(slot_bytes(table) + work, rel=0.05)


@pytest.mark.sweep(4, "branching")
@pytest.mark.parametrize(("make", "M"), [(zero_bubble, 8), (one_f_one_b, 32)])
def test_memory_is_that_of_the_slots(make, M):
    """P microbatches for 1F1B, whatever M is."""
    table = make(4, M)
    assert table.slot_count == 4
    assert_memory_is_that_of_the_slots(table)


@pytest.mark.long
def test_memory_is_that_of_the_slots_of_other_tables():
    assert_memory_is_that_of_the_slots(zero_bubble(4, 8, in_flight=7))
    assert_memory_is_that_of_the_slots(greedy(looped_placement(4), 8, [8] * 4))
    assert_memory_is_that_of_the_slots(greedy(v_placement(4), 8, [8] * 4))
