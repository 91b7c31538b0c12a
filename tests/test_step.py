"""Every layout trains the same GPT-2, with the collectives that theory says, and the step compiles
once."""

import collections
import dataclasses
import functools
import logging
import math
import re

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
from reference import (
    EXACT,
    FLOAT64,
    OPTIMIZER,
    assert_close,
    assert_same_run,
    gpt2_on,
    gpt2_on_one_device,
    moved_by,
    windows,
)

from parallax import mesh, rules, step, tensor
from parallax.collectives import halving, ring, two_rings, xla
from parallax.compiled import certificate
from parallax.layout import Layout
from parallax.models import decoder, gpt2, recipe
from parallax.plan import traffic

BATCH = 32
DROPOUT = {"dropout": 0.1, "attention_dropout": 0.1}
SHAPES = [  # 30 words in 32 rows: the padding is there too
    gpt2.Config(
        layers=2, heads=8, width=16, context=8, vocabulary=30, vocabulary_multiple=8, **DROPOUT
    ),
    gpt2.Config(
        layers=1, heads=8, width=24, context=5, vocabulary=16, vocabulary_multiple=8, **DROPOUT
    ),
]
LAYOUTS = [(8, 1), (4, 2), (2, 4), (1, 8), (1, 1)]
ALGORITHMS = [xla, ring]
draws = given(
    data_tensor=st.sampled_from(LAYOUTS),
    algorithm=st.sampled_from(ALGORITHMS),
    microbatches=st.sampled_from([1, 2, 4]),
    config=st.sampled_from(SHAPES),
    seed=st.integers(0, 2),
)
no_shrinking = [Phase.explicit, Phase.generate]  # each example compiles a program


def on(layout):
    return mesh.make(**layout.axes, devices=jax.devices()[: layout.devices])


def adamw_step(config, layout, algorithm=ring, **compute):
    compute = decoder.Compute(axes=moved_by(algorithm), dtype=FLOAT64, **compute)
    options = {"batch": BATCH, "key": jax.random.key(0), "compute": compute}
    with jax.numpy_dtype_promotion("standard"):
        made = decoder.train_step(
            gpt2.FAMILY, config, optax.adamw(1e-3), layout, on(layout), **options
        )
        return made.init(), made.train


def train(data_tensor, algorithm, microbatches, config, seed):
    layout = Layout(data=data_tensor[0], tensor=data_tensor[1], microbatches=microbatches)
    run = gpt2_on(layout, on(layout), config, seed, 20, BATCH, algorithm=algorithm)
    assert_same_run(run, gpt2_on_one_device(config, seed, 20, BATCH))


@pytest.mark.sweep(30, "steps")
@pytest.mark.parametrize(
    ("data_tensor", "algorithm", "microbatches"), [((4, 2), xla, 4), ((2, 4), ring, 2)]
)
def test_twenty_steps_are_those_of_one_device(data_tensor, algorithm, microbatches):
    train(data_tensor, algorithm, microbatches, SHAPES[0], 0)


@pytest.mark.long
@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("data_tensor", "algorithm", "microbatches"),
    [((8, 1), ring, 2), ((1, 8), ring, 1), ((1, 1), xla, 2)],
)
def test_twenty_steps_on_one_axis_are_those_of_one_device(data_tensor, algorithm, microbatches):
    train(data_tensor, algorithm, microbatches, SHAPES[0], 0)


@pytest.mark.sweep
@pytest.mark.long
@settings(max_examples=2, phases=no_shrinking)
@draws
def test_twenty_steps_are_those_of_one_device_wherever(
    data_tensor, algorithm, microbatches, config, seed
):
    train(data_tensor, algorithm, microbatches, config, seed)


def reductions(config, layout, state):
    """What theory says a step all-reduces, on each device: (devices on the axis, elements), as
    often as it happens."""
    tokens = BATCH // layout.data // layout.microbatches * config.context
    activation, scalar = tokens * config.width, 1
    over_tensor = [
        *[activation]
        * 4
        * config.layers,  # leave attention, leave MLP; and backward, where they were entered
        *[activation] * 2,  # leave the embedding; backward, where the head was entered
        2 * tokens,  # the cross-entropy's sum of exponentials, and its target
    ]
    local = [
        math.prod(leaf.addressable_shards[0].data.shape) for leaf in jax.tree.leaves(state.model)
    ]
    return [
        *[(layout.tensor, n) for n in over_tensor * layout.microbatches],
        *[
            (layout.data, n) for n in [*local, scalar]
        ],  # each gradient once a step, whatever the microbatches; the loss
        *[(layout.tensor, scalar)]
        * 2,  # the squared norm of what is split, and whether what the step made is finite
    ]


def count(config, layout, algorithm):
    """The collectives in the compiled step, every one of them with its bytes, and those of
    theory."""
    state, train = adamw_step(config, layout, algorithm)
    windows = jax.ShapeDtypeStruct((BATCH, config.context + 1), jnp.int32)
    with jax.numpy_dtype_promotion("standard"):
        found = collections.Counter(
            (op.kind, op.bytes) for op in hlo.collectives(train, state, windows)
        )
    maxima = BATCH // layout.data // layout.microbatches * config.context  # lax.pmax of the logits
    expected = collections.Counter({("all-reduce", 8 * maxima): layout.microbatches})
    for n, elements in reductions(config, layout, state):
        if algorithm is xla:
            expected["all-reduce", 8 * elements] += 1
        else:  # 2 (n - 1) hops of 1/n of it: 2 (n - 1)/n of its bytes
            expected["collective-permute", 8 * math.ceil(elements / n)] += 2 * (n - 1)
    return found, expected


@pytest.mark.parametrize(
    "algorithm", [xla, pytest.param(ring, marks=pytest.mark.long)], ids=["psum", "ring"]
)
def test_the_collectives_are_those_of_theory(algorithm):
    config = dataclasses.replace(SHAPES[0], dropout=0.0, attention_dropout=0.0)
    found, expected = count(config, Layout(data=4, tensor=2, microbatches=2), algorithm)
    assert found == expected


@pytest.mark.sweep(4)
@pytest.mark.long
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=["psum", "ring"])
@pytest.mark.parametrize(("data", "tensor", "microbatches"), [(4, 2, 4), (2, 4, 1)])
def test_dropout_adds_no_collective(data, tensor, microbatches, algorithm):
    found, expected = count(
        SHAPES[1], Layout(data=data, tensor=tensor, microbatches=microbatches), algorithm
    )
    assert found == expected


@pytest.mark.sweep(30, "steps")
def test_a_step_compiles_once_and_takes_the_state_with_it(caplog):
    traces = 0

    def attend(q, k, v):
        nonlocal traces
        traces += 1
        return gpt2.attention(q, k, v)

    config = gpt2.Config(
        layers=1, heads=2, width=4, context=4, vocabulary=8, vocabulary_multiple=8, dropout=0.1
    )
    state, train = adamw_step(config, Layout(data=4, tensor=2), attention=attend)
    after = []
    with (
        jax.numpy_dtype_promotion("standard"),
        jax.log_compiles(),
        caplog.at_level(logging.WARNING),
    ):
        for number in range(3):
            before = jax.tree.leaves(state)
            state, _ = train(state, np.full((BATCH, 5), number, np.int32))
            assert all(leaf.is_deleted() for leaf in before)
            assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
            after.append(traces)
    assert after[0] > 0
    assert after == [after[0]] * 3
    assert (
        sum(
            "Finished XLA compilation of jit(train)" in record.getMessage()
            for record in caplog.records
        )
        == 1
    )
    assert int(state.step) == 3


def with_blocks(model, change):
    return eqx.tree_at(lambda model: model.blocks, model, jax.tree.map(change, model.blocks))


def chunked(model):
    """The model for a pipeline of one chunk a stage."""
    return with_blocks(model, lambda w: w[None])


def unchunked(model):
    return with_blocks(model, lambda w: w.reshape(-1, *w.shape[2:]))


@pytest.mark.bits
@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [((1, 8, 1), "float32"), pytest.param((2, 2, 2), "float64", marks=pytest.mark.long)],
)
def test_a_model_is_born_in_its_place(sizes, dtype):
    """Each device holds the blocks that the specs say, of the model that one device would make, bit
    for bit."""
    config, dtype = (
        gpt2.Config(layers=8, heads=8, width=16, context=8, vocabulary=100, vocabulary_multiple=8),
        jnp.dtype(dtype),
    )
    mesh_ = mesh.make(**dict(zip(("data", "stage", "tensor"), sizes, strict=True)))
    make_model = lambda: chunked(gpt2.GPT2(config, key=jax.random.key(0), dtype=dtype))
    state, specs = step.init(make_model, optax.adamw(1e-3), gpt2.rules(stage="stage"), mesh_)
    jax.tree.map(np.testing.assert_array_equal, state.model, jax.jit(make_model)())
    assert int(state.step) == 0

    def placed(leaf, sharding):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
        assert {shard.data.shape for shard in leaf.addressable_shards} == {
            sharding.shard_shape(leaf.shape)
        }

    jax.tree.map(placed, state, mesh.shardings(specs, mesh_))
    if sizes[0] == 1:
        held = sum(
            leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state.optimizer)
        )
        assert held < 0.3 * sum(leaf.nbytes for leaf in jax.tree.leaves(state.optimizer))


def test_no_device_ever_holds_the_whole_model():
    """`init` compiles to a program whose arrays, temporary ones included, are a device's share."""
    config = gpt2.Config(
        layers=2, heads=8, width=64, context=8, vocabulary=4096, vocabulary_multiple=8
    )
    mesh_ = mesh.make(data=1, stage=1, tensor=8)
    make_model = functools.partial(gpt2.GPT2, config, key=jax.random.key(0))
    shapes = jax.eval_shape(make_model)
    specs = rules.specs(shapes, gpt2.rules(), mesh_)
    memory = (
        jax.jit(make_model, out_shardings=mesh.shardings(specs, mesh_))
        .lower()
        .compile()
        .memory_analysis()
    )
    total = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
    assert memory.output_size_in_bytes + memory.temp_size_in_bytes < total / 2


@pytest.mark.sweep(2)
@pytest.mark.parametrize("max_norm", [0.5, 1e3])
def test_make_clips_as_optax_does(max_norm):
    """On one device, and on eight with a weight split: `optax.chain(clip_by_global_norm(...), ...)`
    on the whole tree."""
    params, x = (
        {"split": jnp.arange(16.0).reshape(8, 2) / 7, "same": jnp.asarray([0.3, -2.0])},
        jnp.asarray(1.5),
    )

    def loss(params, x, devices=1):  # what all devices have, each of them counts for its share
        return (
            jnp.sum(jnp.sin(params["split"]) * x) + jnp.sum(jnp.cos(params["same"]) * x) / devices
        )

    def shared(params, x):
        loss_here, gradients = jax.value_and_grad(loss)(params, x, 8)
        return lax.psum(loss_here, "tensor"), gradients

    optimizer = optax.sgd(0.1, momentum=0.9)
    chained = optax.chain(optax.clip_by_global_norm(max_norm), optimizer)
    specs = {"split": P("tensor"), "same": P()}
    specs = step.State(specs, rules.optimizer_specs(optimizer, params, specs), P())
    on_eight = step.make(shared, optimizer, max_norm=max_norm)
    on_eight = jax.jit(
        mesh.spmd(on_eight, mesh=mesh.make(tensor=8), in_specs=(specs, P()), out_specs=(specs, P()))
    )
    on_one = jax.jit(step.make(jax.value_and_grad(loss), optimizer, max_norm=max_norm))
    one = eight = step.State(params, optimizer.init(params), jnp.zeros((), jnp.int32))
    chain = chained.init(params)
    for number in range(3):
        value, gradients = jax.value_and_grad(loss)(params, x)
        updates, chain = chained.update(gradients, chain, params)
        params = optax.apply_updates(params, updates)
        (one, info), (eight, info_of_eight) = on_one(one, x), on_eight(eight, x)
        assert_close(one.model, params, 1e-14)
        assert_close(eight.model, params, 1e-14)
        for measured in (info, info_of_eight):
            np.testing.assert_allclose(
                measured[:2], (value, optax.tree.norm(gradients)), rtol=1e-14
            )
            assert not measured.skipped
        assert int(one.step) == int(eight.step) == number + 1


MIXED = {"data": halving, "stage": two_rings, "tensor": ring}


@pytest.mark.long
def test_each_axis_may_have_a_mover_of_its_own():
    """Sums over stage and tensor go along one after the other; what is sent is what the plan
    says."""
    layout, axes = (
        Layout(data=2, stage=2, tensor=2, microbatches=2, zero=1),
        {name: algorithm(name) for name, algorithm in MIXED.items()},
    )
    options = {
        "batch": BATCH,
        "key": jax.random.key(0),
        "compute": decoder.Compute(axes=axes, dtype=FLOAT64),
    }
    with jax.numpy_dtype_promotion("standard"):
        made = decoder.train_step(gpt2.FAMILY, SHAPES[0], OPTIMIZER, layout, on(layout), **options)
        state, train = made.init(), made.train
        train = train.lower(state, windows(SHAPES[0], 0, 0, BATCH)).compile()
    sent = collections.Counter()
    for entry in certificate.read(train, on(layout)):
        sent[entry.axes] += entry.bytes
    assert traffic.by_axes(traffic.terms(SHAPES[0], layout, BATCH, axes=axes, itemsize=8)) == sent
    plain = gpt2_on_one_device(SHAPES[0], 0, 2, BATCH)
    for number, loss in enumerate(plain.losses):
        state, info = train(state, windows(SHAPES[0], 0, number, BATCH))
        np.testing.assert_allclose(info.loss, loss, rtol=EXACT)
    assert_close(unchunked(state.model), plain.end, EXACT)


@pytest.mark.parametrize(
    "axes",
    [{"context": ring("context")}, {"data": ring("tensor")}, {"data": ("data", "stage")}],
    ids=str,
)
def test_axes_that_no_layout_has_are_refused(axes):
    with pytest.raises(
        ValueError,
        match=(
            r"axes: each name must be one of data, stage, tensor, with an algorithm along that "
            r"axis, such as axes={'data': ring\('data'\)}; got"
        ),
    ):
        recipe.axes_with_algorithms(Layout(), decoder.Compute(axes=axes))


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("layout", "algorithm"),
    [
        (Layout(data=4, tensor=2), ring),
        (Layout(data=2, stage=2, tensor=2, microbatches=4, chunks=2), xla),
    ],
)
def test_evaluation_is_the_loss_without_dropout(layout, algorithm):
    config = dataclasses.replace(SHAPES[0], layers=4)
    model, windows = (
        gpt2.GPT2(config, key=jax.random.key(0)),
        jnp.arange(BATCH * 9, dtype=jnp.int32).reshape(BATCH, 9) % 30,
    )
    plain = gpt2.loss(model, (windows, None))
    form = decoder.stored(gpt2.FAMILY, layout)
    split = model if form is None else form.from_disk(model)
    loss = decoder.loss_step(
        gpt2.FAMILY, config, layout, on(layout), compute=decoder.Compute(axes=moved_by(algorithm))
    )(split, windows)
    np.testing.assert_allclose(loss, plain, rtol=1e-6)  # float32


@pytest.mark.sweep(30, "steps")
@pytest.mark.parametrize(
    "layout",
    [
        Layout(data=2, tensor=2, microbatches=2, sequence=True),
        Layout(data=2, microbatches=2, zero=2),
        Layout(data=4, microbatches=2, zero=3),
        Layout(data=2, stage=2, microbatches=4),
    ],
    ids=str,
)
def test_weighted_tokens(layout):
    """The loss is the mean over the tokens that the weights leave in, wherever those are: three
    steps are those of one device."""
    config = dataclasses.replace(SHAPES[0], dropout=0.0, attention_dropout=0.0)
    state, train = adamw_step(config, layout)
    theirs = jax.jit(
        lambda: gpt2.GPT2(config, key=jax.random.split(jax.random.key(0))[0], dtype=FLOAT64)
    )()
    optimizer = optax.adamw(1e-3)
    seen = optimizer.init(theirs)

    @jax.jit
    def plain(model, seen, tokens, weights):
        def loss(model):
            nats = tensor.cross_entropy(gpt2.logits(model, tokens[:, :-1]), tokens[:, 1:], ())
            return jnp.sum(nats * weights) / jnp.sum(weights)

        value, gradients = jax.value_and_grad(loss)(model)
        updates, seen = optimizer.update(gradients, seen, model)
        return jax.tree.map(jnp.add, model, updates), seen, value

    draw = np.random.default_rng(0)
    with jax.numpy_dtype_promotion("standard"):
        for number in range(3):
            tokens = windows(config, 0, number, BATCH)
            weights = draw.integers(0, 2, (BATCH, config.context)) * draw.uniform(size=(BATCH, 1))
            weights[: BATCH // 4] = 0  # the whole of a microbatch, or of a device
            state, info = train(state, tokens, weights)
            theirs, seen, expected = plain(theirs, seen, tokens, weights)
            np.testing.assert_allclose(info.loss, expected, rtol=EXACT)
        loss = decoder.loss_step(gpt2.FAMILY, config, layout, on(layout))(
            state.model, tokens, weights
        )
        np.testing.assert_allclose(loss, plain(theirs, seen, tokens, weights)[2], rtol=EXACT)


def test_every_sequence_and_step_has_a_key_of_its_own():
    bits = lambda number, batch: jax.random.key_data(
        decoder.sequence_keys(jax.random.key(1), jnp.asarray(number, jnp.int32), batch)
    )
    every = np.concatenate([bits(number, 16) for number in range(4)])
    assert len(np.unique(every, axis=0)) == 64
    np.testing.assert_array_equal(
        bits(2, 16)[:4], bits(2, 4)
    )  # the place in the batch decides, not its size


@pytest.mark.parametrize(
    ("layout", "mesh_of", "message"),
    [
        (
            Layout(data=4, tensor=2),
            {"data": 2, "tensor": 4},
            "decoder: the layout has data=4, and the mesh {'data': 2, 'tensor': 4}. Make it with "
            "mesh.make(**layout.axes).",
        ),
        (
            Layout(data=2, stage=2),
            {"data": 8},
            "decoder: the layout has data=2, and the mesh {'data': 8}. Make it with "
            "mesh.make(**layout.axes).",
        ),
        (
            Layout(tensor=3),
            {"data": 8},
            "Layout: the model's heads (heads=8) must be a multiple of tensor=3. Use tensor=2, "
            "which divides it.",
        ),
        (
            Layout(data=3),
            {"data": 8},
            "Layout: the batch's sequences (batch=32) must be a multiple of data=3 x "
            "microbatches=1. Use batch=33 (or batch=30).",
        ),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(layout, mesh_of, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        decoder.train_step(
            *(gpt2.FAMILY, SHAPES[0], optax.sgd(0.1), layout, mesh.make(**mesh_of)),
            batch=BATCH,
            key=jax.random.key(0),
        )


@pytest.mark.sweep(4)
@pytest.mark.long
@pytest.mark.parametrize(
    "text",
    [
        "data=4,microbatches=2",
        "data=2,tensor=4,sequence=True",
        "data=2,tensor=2,zero=1",
        "data=4,zero=3",
        "data=2,stage=2,tensor=2,microbatches=4",
        "data=2,stage=2,tensor=2,microbatches=4,zero=2",
        "data=2,stage=2,tensor=2,microbatches=4,zero=3,sequence=True",
        "stage=4,microbatches=8,schedule=gpipe",
        "stage=2,chunks=2,microbatches=4,tensor=2",
    ],
)
def test_no_collective_overtakes_a_loop(text):
    """On CPU it would meet one of the loop's in a rendezvous, and abort the process."""
    layout, config = (
        Layout.parse(text),
        gpt2.Config(layers=4, heads=4, width=64, context=32, vocabulary=128, **DROPOUT),
    )
    with jax.numpy_dtype_promotion("standard"):
        prepared = decoder.train_step(
            *(gpt2.FAMILY, config, optax.adamw(1e-3), layout, on(layout)),
            batch=16,
            key=jax.random.key(0),
            compute=decoder.Compute(max_norm=1.0),
        )
        program = prepared.train.lower(
            prepared.shapes, jax.ShapeDtypeStruct((16, 33), jnp.int32)
        ).compile()
    assert [(loop.name, later.name) for loop, later in hlo.unordered(program)] == []
