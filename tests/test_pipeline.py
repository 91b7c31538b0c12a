"""A pipeline computes what one device does, whatever the table, in constant memory and without a
conditional."""

import collections
import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import hlo
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array
from reference import (
    EXACT,
    FLOAT64,
    assert_close,
    assert_same_run,
    gpt2_on,
    gpt2_on_one_device,
    moved_by,
    naive_pipeline,
    one_device,
)

from parallax import grads, mesh, pipeline, rules, step, tensor
from parallax.collectives import ring, xla
from parallax.layout import Layout
from parallax.models import decoder, gpt2
from parallax.schedule import (
    Schedule,
    from_csv,
    gpipe,
    looped_placement,
    one_f_one_b,
    one_f_one_b_lockstep,
    zero_bubble,
    zero_bubble_lockstep,
)

WIDTH = 8
NOT_TAG = np.array([[0.0] + [1.0] * (WIDTH - 1)])  # the first column says which sequence it is
ALGORITHMS = [xla, ring]
KEEP = {False: pipeline.residuals, True: pipeline.inputs}
no_shrinking = [Phase.explicit, Phase.generate]  # each example compiles a program


class Model(eqx.Module):
    """What the small models of these tests have in common: the ends, and blocks of [v, L / v,
    ...]."""

    w_in: Array
    blocks: Any
    w_out: Array


class Kind(NamedTuple):
    """A sort of small model: one layer's weights, what it does with them, how they are split, and
    what the head begins with."""

    weights: Callable
    layer: Callable
    specs: Any = P(None, "stage")
    last: Callable = lambda x, part: x


def pair(x, w, part, **parallel):
    """Split over tensor; it also sees the batch, which must be that of its microbatch."""
    y = jnp.tanh(tensor.column(x, w["up"], None, **parallel))
    return x + part["gate"][:, None] * tensor.row(y, w["down"], None, **parallel)


def pair_weights(key):
    up, down = jax.random.normal(key, (2, WIDTH, WIDTH)) / 3
    return {"up": up, "down": down}


def perceptron(x, w, part, **parallel):
    """An Equinox network with an activation function among its leaves, and an integer that gets no
    gradient."""
    return x + jax.vmap(w["net"])(x) * jnp.cos(w["number"].astype(x.dtype))


def perceptron_weights(key):
    return {
        "net": eqx.nn.MLP(WIDTH, WIDTH, 4, 1, jax.nn.gelu, dtype=FLOAT64, key=key),
        "number": jax.random.randint(key, (), 0, 9),
    }


def picky(x, part):
    """`x / |x|`: not a number at zero, which the first ticks compute on, nor for an x and a batch
    of different microbatches."""
    matches = jnp.sqrt(1 - (100 * (x[:, 0] - part["tag"])) ** 2)
    return (
        (x / jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True)) * matches[:, None])
        .at[:, 0]
        .set(x[:, 0])
    )


pairs = Kind(
    pair_weights, pair, {"up": P(None, "stage", None, "tensor"), "down": P(None, "stage", "tensor")}
)
perceptrons = Kind(perceptron_weights, perceptron)
fragile = Kind(
    pair_weights,
    lambda x, w, part, **parallel: picky(x + NOT_TAG * jnp.tanh(x @ w["up"]), part),
    last=picky,
)


def functions(kind, axis=()):
    """`embed`, `stage` and `head` of a small model."""

    def stage(params, x, part, position):
        arrays, static = eqx.partition(params.blocks, eqx.is_array)
        layer = lambda x, w: kind.layer(x, eqx.combine(w, static), part, axis=axis)
        x = lax.scan(lambda x, w: (layer(x, w), None), x, arrays)[0]
        return x * (
            1 + NOT_TAG * jnp.cos(position.astype(x.dtype)) / 9
        )  # each chunk must know its place

    embed = lambda params, part: (
        NOT_TAG * (part["x"] @ params.w_in) + (1 - NOT_TAG) * part["tag"][:, None]
    )
    head = lambda params, x, part: jnp.mean((kind.last(x, part) @ params.w_out - part["y"]) ** 2)
    return embed, stage, head


def model(kind, chunks, layers, seed=0):
    keys = jax.random.split(jax.random.key(seed), layers + 2)
    each = [kind.weights(key) for key in keys[2:]]
    stack = lambda *leaves: (
        jnp.stack(leaves).reshape(chunks, -1, *leaves[0].shape)
        if eqx.is_array(leaves[0])
        else leaves[0]
    )
    return Model(
        jax.random.normal(keys[0], (5, WIDTH)),
        jax.tree.map(stack, *each),
        jax.random.normal(keys[1], (WIDTH, 3)),
    )


def batch_of(rows, seed=0):
    keys = jax.random.split(jax.random.key(seed + 1), 3)
    shapes = {"x": (rows, 5), "y": (rows, 3), "gate": (rows,)}
    normal = {
        name: jax.random.normal(key, shape)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    return normal | {"tag": jnp.arange(rows) / 64}


def on(data, stages, tensor):
    return mesh.make(
        data=data, stage=stages, tensor=tensor, devices=jax.devices()[: data * stages * tensor]
    )


def pipelined(kind, table, data=1, tensor=1, *, remat=False, algorithm=xla):
    """The compiled gradient function `(params, batch) -> (loss, gradients)` of a small model on
    data x stage x tensor."""
    grad = pipeline.value_and_grad(
        *functions(kind, algorithm("tensor")), table, algorithm("stage"), save=KEEP[remat]
    )
    grad = grads.averaged(grad, algorithm("data"))
    specs, mesh_ = Model(P(), kind.specs, P()), on(data, table.stages, tensor)
    return eqx.filter_jit(
        mesh.spmd(grad, mesh=mesh_, in_specs=(specs, P("data")), out_specs=(P(), specs))
    )


def check(kind, table, beside=(1, 1), layers=1, seed=0, remat=False, algorithm=xla):
    """The loss and every gradient are those of one device."""
    positions, rows = table.stages * table.chunks, beside[0] * table.microbatches * 2
    params, batch = model(kind, table.chunks, layers * positions, seed), batch_of(rows, seed)
    loss, gradients = pipelined(kind, table, *beside, remat=remat, algorithm=algorithm)(
        params, batch
    )
    plain = eqx.filter_jit(eqx.filter_value_and_grad(one_device(*functions(kind), positions)))(
        params, batch
    )
    np.testing.assert_allclose(loss, plain[0], rtol=EXACT)
    assert_close(gradients, plain[1], EXACT)


@st.composite
def by_hand(draw, stages, microbatches, chunks):
    """Any table that can run: microbatches in any order, late or early, backwards in another order,
    weights in any."""
    walk = [(k % stages, k // stages) for k in range(stages * chunks)]

    def lane(walk, earliest):
        cells, starts = {}, {}
        for m in draw(st.permutations(range(microbatches))):
            start = earliest[m] + draw(st.integers(0, 3))
            while any((start + k, s) in cells for k, (s, _) in enumerate(walk)):
                start += 1
            cells |= {(start + k, s): m * chunks + c for k, (s, c) in enumerate(walk)}
            starts[m] = start
        return cells, starts

    forward, starts = lane(walk, [0] * microbatches)
    backward, _ = lane(walk[::-1], [starts[m] + len(walk) - 1 for m in range(microbatches)])
    lanes, weight = [forward, backward], {}
    if draw(st.booleans()):
        for (tick, s), job in draw(st.permutations(sorted(backward.items()))):
            late = tick + draw(st.integers(0, 3))
            weight[next(t for t in itertools.count(late) if (t, s) not in weight), s] = job
        lanes.append(weight)
    busy = sorted({tick for cells in lanes for tick, _ in cells})
    tables = [
        [[cells.get((tick, s), -1) for s in range(stages)] for tick in busy] for cells in lanes
    ]
    placement = looped_placement(stages, chunks)
    return functools.partial(Schedule, *np.array(tables), placement=placement)


@st.composite
def cases(draw, biggest=8):
    """How to make a table, and what stands beside it on eight devices."""
    stages = draw(st.integers(1, biggest))
    chunks = draw(st.sampled_from([1, 1, 2, 3])) if stages > 1 else 1
    microbatches = draw(st.integers(1, 6))
    tables = [
        st.just(functools.partial(make, stages, microbatches, chunks))
        for make in (one_f_one_b_lockstep, zero_bubble_lockstep)
    ]
    tables += [by_hand(stages, microbatches, chunks)]
    tables += [st.just(functools.partial(gpipe, stages, microbatches))] if chunks == 1 else []
    beside = [(d, t) for d in (1, 2, 4, 8) for t in (1, 2, 4, 8) if d * t * stages <= 8]
    return draw(st.one_of(tables)), draw(st.sampled_from(beside))


CSV = """\
tick,stage 0,stage 1
0,0F0,
1,0F1,1F0
2,,1F1 1B1
3,0F2 0B1,1B0
4,0B0,1F2
5,,1B2
6,0B2,
"""

draws = given(
    kind=st.sampled_from([pairs, perceptrons, fragile]),
    case=cases(),
    layers=st.integers(1, 2),
    seed=st.integers(0, 1000),
    remat=st.booleans(),
    algorithm=st.sampled_from(ALGORITHMS),
)


@pytest.mark.sweep
@settings(max_examples=2, phases=no_shrinking)
@draws
def test_a_pipeline_computes_what_one_device_does(kind, case, layers, seed, remat, algorithm):
    make_table, beside = case
    check(kind, make_table(), beside, layers, seed, remat, algorithm)


@pytest.mark.sweep
@pytest.mark.long
@settings(max_examples=8, phases=no_shrinking)
@draws
def test_any_pipeline_computes_what_one_device_does(kind, case, layers, seed, remat, algorithm):
    make_table, beside = case
    check(kind, make_table(), beside, layers, seed, remat, algorithm)


@pytest.mark.sweep(6)
@pytest.mark.parametrize(
    ("table", "remat"),
    [
        *[
            (one_f_one_b_lockstep(4, 3), False),
            (one_f_one_b_lockstep(4, 3), True),
            (one_f_one_b_lockstep(2, 4, chunks=2), False),
            (gpipe(4, 3), True),
        ],
        *[(zero_bubble_lockstep(4, 3), False), (zero_bubble_lockstep(2, 4, chunks=2), True)],
    ],
)
def test_garbage_never_leaks(table, remat):
    """Idle ticks compute 0 / 0 and its gradient, in the stage and in the head; none of it is in any
    sum."""
    check(fragile, table, remat=remat)


@pytest.mark.sweep(3, "wholes")
@pytest.mark.parametrize(
    ("table", "beside"),
    [(one_f_one_b_lockstep(4, 3), (2, 1)), (zero_bubble_lockstep(2, 3), (1, 2))],
)
def test_slots_need_not_be_filled(table, beside, monkeypatch):
    """On accelerators what lies in a slot at first may be anything, such as not a number."""
    made = []
    monkeypatch.setattr(
        lax, "empty", lambda shape, dtype: made.append(shape) or jnp.full(shape, jnp.nan, dtype)
    )
    check(pairs, table, beside)
    assert made


@pytest.mark.sweep(2, "pipeline")
def test_a_table_written_by_hand(tmp_path):
    (tmp_path / "mine.csv").write_text(CSV)
    check(pairs, from_csv(tmp_path / "mine.csv"), beside=(2, 2), algorithm=ring)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("stages", "microbatches"), [(4, 2), (3, 7)])
def test_the_naive_pipeline_computes_the_same(stages, microbatches):
    """`jax.grad` through a scan over the forward ticks: the lesson's first page, and what the
    clever one must equal."""
    params, batch = model(perceptrons, 1, stages), batch_of(2 * microbatches)
    loss, gradients = naive(perceptrons, stages, microbatches)(params, batch)
    clever = pipelined(perceptrons, one_f_one_b_lockstep(stages, microbatches))(params, batch)
    np.testing.assert_allclose(clever[0], loss, rtol=EXACT)
    assert_close(clever[1], gradients, EXACT)


def naive(kind, stages, microbatches):
    loss = naive_pipeline(*functions(kind, "tensor"), microbatches, "stage")
    loss = mesh.spmd(
        loss, mesh=on(1, stages, 1), in_specs=(Model(P(), kind.specs, P()), P()), out_specs=P()
    )
    return eqx.filter_jit(eqx.filter_value_and_grad(loss))


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    "table", [one_f_one_b_lockstep(4, 3), one_f_one_b_lockstep(2, 4, chunks=3), gpipe(3, 2)]
)
def test_the_forward_lane_alone_is_the_loss(table):
    """`pipeline.value`: the same loss, and no exchange but one a tick."""
    embed, stage, head = functions(perceptrons)
    params, batch = (
        model(perceptrons, table.chunks, table.stages * table.chunks),
        batch_of(2 * table.microbatches),
    )
    value = pipeline.value(embed, stage, head, table, "stage")
    specs = (Model(P(), perceptrons.specs, P()), P())
    value = mesh.spmd(value, mesh=on(1, table.stages, 1), in_specs=specs, out_specs=P())
    arrays, static = eqx.partition(params, eqx.is_array)
    value_of = lambda arrays, batch: value(eqx.combine(arrays, static), batch)
    plain = one_device(embed, stage, head, table.stages * table.chunks)(params, batch)
    np.testing.assert_allclose(jax.jit(value_of)(arrays, batch), plain, rtol=EXACT)
    permutes = [
        op for op in hlo.collectives(value_of, arrays, batch) if op.kind == "collective-permute"
    ]
    assert len(permutes) == (table.forward >= 0).any(axis=1).sum()


@pytest.mark.sweep(2, "pipeline")
def test_five_steps_of_adamw():
    """A small model of one's own under `step.make`: interleaved, over data x stage x tensor."""
    table, optimizer = one_f_one_b_lockstep(2, 4, chunks=2), optax.adamw(1e-2, eps=1e-6)
    params = model(pairs, 2, 8)
    grad = pipeline.value_and_grad(*functions(pairs, "tensor"), table, "stage")
    grad = grads.averaged(grad, "data")
    specs = Model(P(), pairs.specs, P())
    specs = step.State(specs, rules.optimizer_specs(optimizer, params, specs), P())
    local = step.make(grad, optimizer, max_norm=1.0)
    train = jax.jit(
        mesh.spmd(local, mesh=on(2, 2, 2), in_specs=(specs, P("data")), out_specs=(specs, P()))
    )
    plain = jax.jit(
        step.make(jax.value_and_grad(one_device(*functions(pairs), 4)), optimizer, max_norm=1.0)
    )
    ours = theirs = step.State(params, optimizer.init(params), jnp.zeros((), jnp.int32))
    with jax.numpy_dtype_promotion("standard"):
        for number in range(5):
            ours, info = train(ours, batch_of(16, number))
            theirs, plain_info = plain(theirs, batch_of(16, number))
            np.testing.assert_allclose(info[:3], plain_info[:3], rtol=EXACT)
    assert_close(ours.model, theirs.model, EXACT)


CONFIG = gpt2.Config(
    layers=8,
    heads=4,
    width=16,
    context=8,
    vocabulary=30,
    vocabulary_multiple=8,
    dropout=0.1,
    attention_dropout=0.1,
)
BATCH = 16


def train_gpt2(layout, table, seed, remat, algorithm):
    options = {"schedule": table, "algorithm": algorithm}
    layout = dataclasses.replace(layout, remat="stage" if remat else "none")
    run = gpt2_on(
        layout, on(layout.data, layout.stage, layout.tensor), CONFIG, seed, 5, BATCH, **options
    )
    assert_same_run(run, gpt2_on_one_device(CONFIG, seed, 5, BATCH))


@pytest.mark.sweep(3)
@pytest.mark.long
@pytest.mark.parametrize(
    ("layout", "table", "remat", "algorithm"),
    [
        (Layout(data=2, stage=2, tensor=2, microbatches=4), None, False, ring),
        (Layout(stage=4, tensor=2, microbatches=4, chunks=2), None, True, xla),
        (Layout(stage=8, microbatches=2), gpipe(8, 2), False, xla),
    ],
)
def test_gpt2_trains_as_on_one_device(layout, table, remat, algorithm):
    """Weights at birth bit for bit; the loss, every gradient, and five steps of AdamW, with
    dropout."""
    train_gpt2(layout, table, 0, remat, algorithm)


@pytest.mark.sweep
@pytest.mark.long
@settings(max_examples=2, phases=no_shrinking)
@given(
    data=st.data(),
    seed=st.integers(0, 2),
    remat=st.booleans(),
    algorithm=st.sampled_from(ALGORITHMS),
)
def test_gpt2_trains_as_on_one_device_wherever(data, seed, remat, algorithm):
    sizes = [(d, s, t) for d in (1, 2, 4) for s in (2, 4, 8) for t in (1, 2, 4) if d * s * t <= 8]
    d, s, t = data.draw(st.sampled_from(sizes))
    chunks = data.draw(st.sampled_from([c for c in (1, 2, 4) if s * c <= 8]))
    microbatches = data.draw(
        st.sampled_from([m for m in (1, 2, 4, 8) if d * m <= BATCH and (chunks == 1 or m % s == 0)])
    )
    make_table = data.draw(st.just(lambda: None) | by_hand(s, microbatches, chunks))
    train_gpt2(Layout(d, s, t, microbatches, chunks), make_table(), seed, remat, algorithm)


ROWS = 32  # of a microbatch, in the programs that are read


@functools.cache
def program(microbatches, *, stages=4, chunks=1, layers=1, remat=False, make=None, algorithm=xla):
    """A compiled pipeline; `layers` in each chunk."""
    table = (
        make(stages, microbatches) if make else one_f_one_b_lockstep(stages, microbatches, chunks)
    )
    arguments = model(pairs, chunks, layers * chunks * stages), batch_of(ROWS * microbatches)
    grad = pipeline.value_and_grad(*functions(pairs), table, algorithm("stage"), save=KEEP[remat])
    mesh_, specs = (
        mesh.make(stage=stages, devices=jax.devices()[:stages]),
        Model(P(), P(None, "stage"), P()),
    )
    return (
        jax.jit(mesh.spmd(grad, mesh=mesh_, in_specs=(specs, P()), out_specs=(P(), specs)))
        .lower(*arguments)
        .compile()
    )


@pytest.mark.sweep(3)
@pytest.mark.parametrize("options", [{}, {"remat": True}, {"make": zero_bubble_lockstep}])
def test_memory_does_not_grow_with_the_microbatches(options):
    few, many = (program(M, **options).memory_analysis().temp_size_in_bytes for M in (8, 64))
    assert many == pytest.approx(few, rel=0.02)


@pytest.mark.long
def test_the_naive_pipelines_memory_grows_with_them():
    def bytes_of(microbatches):
        arguments = model(pairs, 1, 4), batch_of(ROWS * microbatches)
        return (
            naive(pairs, 4, microbatches)
            .lower(*arguments)
            .compile()
            .compiled.memory_analysis()
            .temp_size_in_bytes
        )

    eight, sixteen, sixty_four = (bytes_of(M) for M in (8, 16, 64))
    assert sixty_four - sixteen == pytest.approx(6 * (sixteen - eight), rel=0.1)
    assert sixty_four > 3 * program(64).memory_analysis().temp_size_in_bytes


@pytest.mark.sweep(5)
@pytest.mark.parametrize(
    ("table", "options"),
    [
        (one_f_one_b_lockstep(4, 8), {}),
        (one_f_one_b_lockstep(4, 8), {"remat": True}),
        (one_f_one_b_lockstep(4, 8, chunks=2), {"chunks": 2}),
        (gpipe(4, 8), {"make": gpipe}),
        (zero_bubble_lockstep(4, 8), {"make": zero_bubble_lockstep}),
    ],
)
def test_the_program_has_no_conditional_and_one_exchange_each_way_a_tick(table, options):
    text = program(8, **options).as_text()
    assert not re.search(r"\bconditional\(", text)
    found = collections.Counter((op.kind, op.bytes) for op in hlo.parse(text))
    ticks = sum((lane >= 0).any(axis=1).sum() for lane in (table.forward, table.backward))
    ends = {
        8 * 5 * WIDTH: 1,
        8 * WIDTH * 3: 1,
        8: 1,
    }  # w_in and w_out, which all stages have, and the loss
    assert found == {("collective-permute", 8 * ROWS * WIDTH): ticks} | {
        ("all-reduce", n): c for n, c in ends.items()
    }
    for body in re.split(r"\n\n", text):
        assert len(re.findall(r" collective-permute(?:-start)?\(", body)) <= 2


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    "options", [{}, {"chunks": 2}, {"make": gpipe}, {"make": zero_bubble_lockstep}]
)
def test_no_collective_overtakes_a_loop(options):
    """The loss is there before the last loop, whose exchanges its sum must not meet."""
    assert hlo.unordered(program(4, stages=2, algorithm=ring, **options)) == []


@pytest.mark.sweep(5)
@pytest.mark.parametrize(
    "options", [{}, {"remat": True}, {"chunks": 2}, {"chunks": 2, "remat": True}, {"make": gpipe}]
)
def test_the_program_does_not_grow_with_the_microbatches(options):
    few, many = (len(program(M, **options).as_text()) for M in (8, 64))
    assert many <= 1.2 * few


@pytest.mark.sweep(3, "wholes")
def test_the_program_does_not_grow_with_the_layers():
    few, many = (
        len(program(8, layers=layers).as_text()) for layers in (1, 12)
    )  # on each of 4 stages
    assert many <= 1.5 * few


@pytest.mark.sweep(2)
@pytest.mark.long
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=["psum", "ring"])
def test_gpt2s_collectives_are_those_of_theory(algorithm):
    """Two exchanges a tick; what tensor parallelism needs; hops of the shared vocabulary from stage
    to stage; one reduction of each gradient."""
    layout = Layout(data=2, stage=2, tensor=2, microbatches=4)
    config = dataclasses.replace(CONFIG, dropout=0.0, attention_dropout=0.0)
    with jax.numpy_dtype_promotion("standard"):
        made = decoder.train_step(
            *(gpt2.FAMILY, config, optax.adamw(1e-3), layout, on(2, 2, 2)),
            batch=BATCH,
            key=jax.random.key(0),
            compute=decoder.Compute(axes=moved_by(algorithm), dtype=FLOAT64),
        )
        state, train = made.init(), made.train
    windows = jax.ShapeDtypeStruct((BATCH, config.context + 1), jnp.int32)
    with jax.numpy_dtype_promotion("standard"):
        text = train.lower(state, windows).compile().as_text()
    assert not re.search(r"\bconditional\(", text)

    M, P_, t, d = layout.microbatches, layout.stage, layout.tensor, layout.data
    tokens, ticks, layers = BATCH // d // M * config.context, M + P_ - 1, config.layers // P_
    activation, everywhere = tokens * config.width, P_ * t
    shard = lambda leaf: math.prod(leaf.addressable_shards[0].data.shape)
    reductions = [
        *[(t, activation)] * 2 * layers * ticks * 2,  # in the layers, forward and backward
        *[(t, activation)] * (1 + ticks),  # the embedding, once before the first tick
        *[(t, activation), (everywhere, 2 * tokens)] * M,  # the head: backward, the sums
        *[
            (P_, shard(leaf))
            for leaf in (state.model.wpe, state.model.norm.weight, state.model.norm.bias)
        ],
        *[(d, shard(leaf)) for leaf in jax.tree.leaves(state.model)],
        (d, 1),  # the loss
        *[
            (P_, 1),
            (everywhere, 1),
        ],  # squared norms of what is split over the stages, and over both
        (everywhere, 1),  # whether what the step made is finite
    ]
    # The last tick, a loop of one, is opened, and what it would send, nobody reads. Two stages need
    # one hop for the embedding's sum, one for its cotangent, and one each way for the head's input.
    # The maxima of the logits stay `lax.pmax`.
    exchanges, hops = 2 * ticks - 1, (1 + ticks) + ticks + 2 * M
    expected = collections.Counter(
        {("collective-permute", 8 * activation): exchanges + hops, ("all-reduce", 8 * tokens): M}
    )
    for n, elements in reductions:
        if algorithm is xla:
            expected["all-reduce", 8 * elements] += 1
        else:
            expected["collective-permute", 8 * math.ceil(elements / n)] += 2 * (n - 1)
    assert collections.Counter((op.kind, op.bytes) for op in hlo.parse(text)) == expected


def test_sums_are_wider_than_bfloat16():
    """512 gradients of 1 have the mean 1; added up in bfloat16 they would stop at 256."""
    M = 512
    params = Model(
        jnp.zeros((1,), jnp.bfloat16),
        jnp.zeros((1, 2, 1), jnp.bfloat16),
        jnp.zeros((1,), jnp.bfloat16),
    )
    embed = lambda params, part: part + params.w_in[None]
    stage = lambda params, x, part, position: x + jnp.sum(params.blocks, axis=0, keepdims=True)
    head = lambda params, x, part: jnp.sum(x + params.w_out[None])
    grad = pipeline.value_and_grad(embed, stage, head, one_f_one_b_lockstep(2, M), "stage")
    specs = Model(P(), P(None, "stage"), P())
    run = jax.jit(mesh.spmd(grad, mesh=on(1, 2, 1), in_specs=(specs, P()), out_specs=(P(), specs)))
    loss, gradients = run(params, jnp.ones((M, 1), jnp.bfloat16))
    assert float(loss) == 1
    ones = jax.tree.map(lambda w: np.ones(w.shape, np.float32), params)
    jax.tree.map(functools.partial(np.testing.assert_array_equal, strict=True), gradients, ones)


@pytest.mark.parametrize(
    ("table", "change", "rows", "stage", "message"),
    [
        (
            one_f_one_b_lockstep(2, 4),
            *(lambda params: params, 16, None),
            "pipeline: the schedule has 2 stages, and the mesh axis 'stage' has 4 devices. Make "
            "the schedule for stages=4.",
        ),
        (
            one_f_one_b_lockstep(4, 4),
            *(lambda params: params, 18, None),
            "The batch's leaf ['gate'] has 18 rows on each device, which must be a multiple "
            "of microbatches=4. Use another batch size, or fewer microbatches.",
        ),
        (
            one_f_one_b_lockstep(4, 4, chunks=2),
            *(lambda params: params, 16, None),
            "pipeline: the blocks' array ['down'] has shape (1, 2, 8, 8) on a stage, and its "
            "first dim must be 2, the schedule's number of chunks. Reshape L layers to "
            "[2, L / 2, ...] and split dim 1 over 'stage'.",
        ),
        (
            one_f_one_b_lockstep(4, 4),
            *(
                lambda params: eqx.tree_at(
                    lambda p: p.blocks["up"], params, params.blocks["up"][0]
                ),
                16,
                None,
            ),
            "pipeline: the blocks' array ['up'] has shape (8, 2, 8) on a stage, and its first "
            "dim must be 1, the schedule's number of chunks. Reshape L layers to [1, L / 1, ...] "
            "and split dim 1 over 'stage'.",
        ),
        (
            one_f_one_b_lockstep(4, 4),
            *(lambda params: params, 16, lambda params, x, part, position: x[:, :4]),
            "pipeline: a stage must return what it takes, float64[4, 8], since its output is the "
            "next stage's input; it returned float64[4, 4]. Change the shape or the dtype only "
            "in embed or head.",
        ),
        (
            one_f_one_b_lockstep(4, 4),
            *(lambda params: params, 16, lambda params, x, part, position: x.astype(jnp.float32)),
            "pipeline: a stage must return what it takes, float64[4, 8], since its output is the "
            "next stage's input; it returned float32[4, 8]. Change the shape or the dtype only "
            "in embed or head.",
        ),
    ],
)
def test_what_does_not_fit_is_refused(table, change, rows, stage, message):
    embed, own, head = functions(pairs)
    specs = Model(P(), P(None, "stage"), P())
    for grad_fn in (pipeline.value_and_grad, pipeline.value):
        f = mesh.spmd(
            grad_fn(embed, stage or own, head, table, "stage"),
            mesh=on(1, 4, 1),
            in_specs=(specs, P()),
            out_specs=P(),
        )
        with pytest.raises(ValueError, match=f"^{re.escape(message)}\n"):  # JAX adds a note
            jax.eval_shape(f, change(model(pairs, 1, 8)), batch_of(rows))


@pytest.mark.sweep(2)
@pytest.mark.parametrize("grad_fn", [pipeline.value_and_grad, pipeline.value])
def test_blocks_that_are_whole_on_every_stage_are_refused(grad_fn):
    """6 layers on 4 stages: with P() every stage would run all of them, four times over; 8
    divide."""
    table = one_f_one_b_lockstep(4, 4)
    on_stages = lambda specs: mesh.spmd(
        grad_fn(*functions(pairs), table, "stage"),
        mesh=on(1, 4, 1),
        in_specs=(Model(P(), specs, P()), P()),
        out_specs=P() if grad_fn is pipeline.value else (P(), Model(P(), specs, P())),
    )
    for specs, at in ((P(), "['down']"), ({"up": P(), "down": P(None, "stage")}, "['up']")):
        layers = 6 if specs == P() else 8
        message = (
            f"pipeline: the blocks' array {at}, of shape (1, {layers}, 8, 8) on a stage, is the "
            "same along 'stage', so each of the 4 stages would run all layers. Shape the array "
            "as [1, L / 1, ...] for L layers, and split its dim 1 by the spec P(None, 'stage'); L "
            "must be a multiple of 4, the number of chunks of all stages."
        )
        with pytest.raises(ValueError, match=re.escape(message)):
            jax.eval_shape(on_stages(specs), model(pairs, 1, layers), batch_of(16))
    params, batch = model(pairs, 1, 8), batch_of(16)
    found = jax.jit(on_stages(P(None, "stage")))(params, batch)
    plain = one_device(*functions(pairs), 4)
    expected = (
        plain(params, batch)
        if grad_fn is pipeline.value
        else jax.value_and_grad(plain)(params, batch)
    )
    assert_close(found, expected, EXACT)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_stages_may_be_two_axes(algorithm):
    """Four stages over (a, b), in row-major order; the ends split over one of them are summed over
    the other."""
    table, axis = one_f_one_b_lockstep(4, 4), algorithm(("a", "b"))
    embed, stage, head = functions(pairs)
    params, batch = model(pairs, 1, 8), batch_of(16)
    gathered = lambda params: eqx.tree_at(
        lambda p: p.w_in,
        params,
        jnp.concatenate([tensor.reduce_from(_at(params.w_in, k), "b") for k in range(2)]),
    )

    def _at(w, k):
        return jnp.where(lax.axis_index("b") == k, w, jnp.zeros((), w.dtype))

    params = eqx.tree_at(
        lambda p: (p.w_in,), params, (jnp.concatenate([params.w_in, params.w_in[:1]]),)
    )
    batch["x"] = jnp.concatenate([batch["x"], batch["x"][:, :1]], axis=1)
    grad = pipeline.value_and_grad(
        lambda p, part: embed(gathered(p), part), stage, head, table, axis
    )
    specs = Model(P("b"), P(None, ("a", "b")), P())
    world = mesh.make(a=2, b=2, devices=jax.devices()[:4])
    found = jax.jit(mesh.spmd(grad, mesh=world, in_specs=(specs, P()), out_specs=(P(), specs)))(
        params, batch
    )
    assert_close(found, jax.value_and_grad(one_device(embed, stage, head, 4))(params, batch), EXACT)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("grad_fn", [pipeline.value_and_grad, pipeline.value])
@pytest.mark.parametrize(
    "make", [gpipe, one_f_one_b_lockstep, zero_bubble_lockstep, one_f_one_b, zero_bubble]
)
@pytest.mark.parametrize("keep", KEEP.values(), ids=["residuals", "inputs"])
def test_each_function_is_traced_once(grad_fn, make, keep):
    """Python runs embed, stage and head once for each program, in whatever number of jobs and loops
    they stand."""
    calls = collections.Counter()

    def counted(name, f):
        def call(*arguments):
            calls[name] += 1
            return f(*arguments)

        return call

    names = ["embed", "stage", "head"]
    options = {"save": keep} if grad_fn is pipeline.value_and_grad else {}
    f = grad_fn(*map(counted, names, functions(pairs)), make(2, 3), "stage", **options)
    specs = Model(P(), P(None, "stage"), P())
    run = mesh.spmd(
        f,
        mesh=on(1, 2, 1),
        in_specs=(specs, P()),
        out_specs=P() if grad_fn is pipeline.value else (P(), specs),
    )
    jax.eval_shape(run, model(pairs, 1, 2), batch_of(6))
    assert calls == dict.fromkeys(names, 1)
