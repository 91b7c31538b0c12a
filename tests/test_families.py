"""Another decoder than GPT-2 (`bare.py`) gets every axis from the one recipe: it trains, is stored,
writes as on one device."""

import dataclasses
import functools

import bare
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from reference import EXACT, FLOAT64, assert_close

from parallax import mesh, rules, schedule, tensor
from parallax.layout import Layout
from parallax.models import decoder
from parallax.models.sampling import Writer, sampled
from parallax.run.checkpoint import Checkpoints

BATCH, KEY, CONFIG = 16, jax.random.key(0), bare.Config()
OPTIMIZER = optax.adamw(
    1e-3, eps=1e-6
)  # the eps of `reference.OPTIMIZER`, and why it is so large, is said there
LAYOUTS = [
    Layout(data=2, tensor=4, microbatches=2, zero=2, sequence=True, remat="products"),
    Layout(data=4, tensor=2, zero=3, remat="attention"),
    Layout(data=2, stage=2, tensor=2, microbatches=4, zero=3, sequence=True, remat="block"),
    Layout(data=4, stage=2, microbatches=2, chunks=2, zero=2, remat="stage"),
    Layout(data=2, stage=4, microbatches=2, zero=1, schedule="gpipe"),
    Layout(stage=4, tensor=2, microbatches=4, split_sends=True),
    Layout(
        data=2,
        stage=2,
        tensor=2,
        microbatches=4,
        zero=2,
        sequence=True,
        remat="attention",
        schedule="zero_bubble_lockstep",
    ),
    Layout(data=2, tensor=2, stage=2, microbatches=2, sequence=True, remat="gathers"),
]


def windows(number):
    return np.random.default_rng(number).integers(0, 32, (BATCH, 9)).astype(np.int32)


def on(layout):
    return mesh.make(**layout.axes, devices=jax.devices()[: layout.devices])


def prepared(layout, config=CONFIG, **compute):
    compute = decoder.Compute(**{"dtype": FLOAT64} | compute)
    return decoder.train_step(
        bare.FAMILY, config, OPTIMIZER, layout, on(layout), batch=BATCH, key=KEY, compute=compute
    )


def trained(layout, state, train, steps):
    """The state after these steps, and their losses."""
    losses = []
    for number in steps:
        state, info = train(state, windows(number))
        losses.append(float(info.loss))
    return state, losses


@jax.jit
def nats(arrays, tokens):
    """The mean cross-entropy, with nothing of the recipe."""
    model = eqx.tree_at(
        lambda model: model.layers.squash, arrays, jnp.tanh, is_leaf=lambda leaf: leaf is None
    )
    return jnp.mean(tensor.cross_entropy(bare.logits(model, tokens[:, :-1]), tokens[:, 1:], ()))


@functools.cache
def alone(steps, trainable=rules.is_inexact):
    """The models before and after each step, and the losses, with nothing of the recipe."""
    model = bare.Bare(CONFIG, key=jax.random.split(KEY)[0], dtype=FLOAT64)
    trains, rest = eqx.partition(model, trainable)
    trains, static = eqx.partition(trains, rules.is_inexact)
    optimizer = OPTIMIZER.init(trains)

    frozen = eqx.filter(rest, mesh.is_array)
    grad = jax.value_and_grad(lambda trains, tokens: nats(eqx.combine(trains, frozen), tokens))
    models, losses = [model], []
    for number in range(steps):
        value, gradients = grad(trains, windows(number))
        updates, optimizer = OPTIMIZER.update(gradients, optimizer, trains)
        trains = optax.apply_updates(trains, updates)
        models.append(eqx.combine(trains, static, rest))
        losses.append(float(value))
    return models, losses


def close(model, other):
    assert_close(eqx.filter(model, mesh.is_array), eqx.filter(other, mesh.is_array), EXACT)


@pytest.fixture(autouse=True)
def promoting():
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.sweep(30, "steps")
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_three_steps_are_those_of_one_device(layout):
    models, losses = alone(3)
    made = prepared(layout)
    state, found = trained(layout, made.init(), made.train, range(3))
    np.testing.assert_allclose(found, losses, rtol=EXACT)
    for leaf in filter(mesh.is_array, jax.tree.leaves(bare.FAMILY.where(state.model))):
        assert leaf.addressable_shards[0].data.size * layout.stage <= leaf.size
    close(decoder.joined(bare.FAMILY, layout, jax.device_get(state.model)), models[3])
    evaluate = decoder.loss_step(bare.FAMILY, CONFIG, layout, on(layout))
    expected = nats(eqx.filter(models[3], mesh.is_array), windows(3))
    np.testing.assert_allclose(evaluate(state.model, windows(3)), expected, rtol=EXACT)


@pytest.mark.sweep(30, "steps")
def test_it_goes_on_elsewhere_and_writes(tmp_path):
    """From ZeRO-3 over four replicas to a pipeline in two chunks, through a checkpoint; and the
    text is that of one device."""
    first, second = (
        Layout(data=4, zero=3),
        Layout(data=2, stage=2, tensor=2, microbatches=2, chunks=2),
    )
    models, losses = alone(3)
    made = prepared(first)
    state, found = trained(first, made.init(), made.train, range(2))
    options = {"settings": {}, "say": lambda line: None}
    with Checkpoints(tmp_path, **options, form=decoder.stored(bare.FAMILY, first)) as store:
        store.save(2, state)
    other = prepared(second)
    restored = Checkpoints(tmp_path, **options, form=decoder.stored(bare.FAMILY, second)).restore(
        other.shapes
    )
    state, last = trained(second, restored.state, other.train, [2])
    np.testing.assert_allclose(found + last, losses, rtol=EXACT)
    model = decoder.joined(bare.FAMILY, second, jax.device_get(state.model))
    close(model, models[3])
    writer = lambda model: Writer(functools.partial(bare.FAMILY.logits, model), window=8)
    write = lambda model: sampled(writer(model), jnp.arange(3), tokens=12, key=KEY)
    np.testing.assert_array_equal(
        write(jax.tree.map(lambda w: jnp.asarray(w) if mesh.is_array(w) else w, model)),
        write(models[3]),
    )


@pytest.mark.sweep(30, "steps")
def test_a_pipeline_in_the_shape_of_a_v_goes_on_elsewhere(tmp_path):
    """Layers are dealt to their places, evaluated, and stored in the order of the model: ZeRO-3
    goes on without stages."""
    first = Layout(
        data=2, stage=2, tensor=2, microbatches=2, chunks=2, zero=2, schedule="zero_bubble"
    )
    second = Layout(data=4, zero=3)
    table = schedule.greedy(schedule.v_placement(2), 2, [4, 4])
    models, losses = alone(3)
    made = prepared(first, schedule=table)
    state, found = trained(first, made.init(), made.train, range(2))
    close(
        decoder.joined(bare.FAMILY, first, jax.device_get(state.model), schedule=table), models[2]
    )
    evaluate = decoder.loss_step(
        bare.FAMILY, CONFIG, first, on(first), compute=decoder.Compute(schedule=table)
    )
    expected = nats(eqx.filter(models[2], mesh.is_array), windows(3))
    np.testing.assert_allclose(evaluate(state.model, windows(3)), expected, rtol=EXACT)
    options = {"settings": {}, "say": lambda line: None}
    with Checkpoints(
        tmp_path, **options, form=decoder.stored(bare.FAMILY, first, schedule=table)
    ) as store:
        store.save(2, state)
    other = prepared(second)
    restored = Checkpoints(tmp_path, **options, form=decoder.stored(bare.FAMILY, second)).restore(
        other.shapes
    )
    state, last = trained(second, restored.state, other.train, [2])
    np.testing.assert_allclose(found + last, losses, rtol=EXACT)
    close(jax.device_get(state.model), models[3])


TRAINED = lambda leaf: (
    mesh.is_array(leaf) and leaf.ndim != 2
)  # not embedding and head, nor the norms of blocks
APART = [
    Layout(data=2, tensor=2, microbatches=2, zero=3),
    Layout(data=4, microbatches=2, zero=1),
    Layout(data=2, tensor=2),
]


@pytest.mark.sweep(30, "steps")
@pytest.mark.parametrize("layout", APART, ids=str)
def test_frozen_leaves_and_auxiliary_values(layout):
    models, losses = alone(2, trainable=TRAINED)
    made = prepared(layout, dataclasses.replace(CONFIG, told=True), trainable=TRAINED)
    assert made.shapes.optimizer[0].mu.table is None
    state, info = made.train(made.init(), windows(0))
    y = bare.logits(eqx.tree_at(lambda m: m.head, models[0], jnp.eye(16)), windows(0)[:, :-1])
    np.testing.assert_allclose(info.aux["square"], jnp.mean(y * y), rtol=EXACT)
    state, info = made.train(state, windows(1))
    np.testing.assert_allclose(info.loss, losses[1], rtol=EXACT)
    close(jax.device_get(state.model), models[2])


@pytest.mark.long
def test_frozen_leaves_of_a_pipeline():
    layout, trainable = (
        Layout(data=2, stage=2, microbatches=2, zero=2),
        lambda leaf: mesh.is_array(leaf) and leaf.ndim != 1,
    )
    models, losses = alone(2, trainable=trainable)
    made = prepared(layout, trainable=trainable)
    state, found = trained(layout, made.init(), made.train, range(2))
    np.testing.assert_allclose(found, losses, rtol=EXACT)
    close(decoder.joined(bare.FAMILY, layout, jax.device_get(state.model)), models[2])


@pytest.mark.sweep(30, "steps")
def test_auxiliary_values_of_a_pipeline():
    models, _ = alone(0)
    made = prepared(
        Layout(data=2, stage=2, tensor=2, microbatches=2), dataclasses.replace(CONFIG, told=True)
    )
    _, info = made.train(made.init(), windows(0))
    y = bare.logits(eqx.tree_at(lambda m: m.head, models[0], jnp.eye(16)), windows(0)[:, :-1])
    np.testing.assert_allclose(info.aux["square"], jnp.mean(y * y), rtol=EXACT)


@pytest.mark.long
@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("precision", "tolerance"), [("bfloat16", 2e-2), ("float16", 3e-3)]
)  # 5 roundings of 2^-8, of 2^-11
def test_short_precisions(precision, tolerance):
    """The loss in few bits is near that in many, and the weights stay in theirs."""
    layout = Layout(data=2, stage=2, tensor=2, microbatches=2, zero=1, precision=precision)
    made = prepared(layout, dtype=jnp.float32)
    state = made.init()
    plain = nats(
        eqx.filter(decoder.joined(bare.FAMILY, layout, jax.device_get(state.model)), mesh.is_array),
        windows(0),
    )
    state, info = made.train(state, windows(0))
    np.testing.assert_allclose(info.loss, plain, rtol=tolerance)
    assert not np.array_equal(info.loss, plain)
    assert not info.skipped
    assert {leaf.dtype for leaf in jax.tree.leaves(eqx.filter(state.model, mesh.is_array))} == {
        jnp.dtype("float32")
    }


@pytest.mark.sweep(2)
@pytest.mark.parametrize("layout", [LAYOUTS[2], LAYOUTS[3]], ids=str)
def test_a_state_begins_with_a_model_that_is_there(layout):
    """Also the optimizer's state, where that holds the weights themselves."""
    keeps = optax.chain(
        optax.GradientTransformation(
            lambda params: params, lambda updates, state, _=None: (updates, state)
        )
    )
    model = bare.Bare(CONFIG, key=jax.random.key(7), dtype=FLOAT64)
    compute = decoder.Compute(dtype=FLOAT64)
    made = decoder.train_step(
        bare.FAMILY, CONFIG, keeps, layout, on(layout), batch=BATCH, key=KEY, compute=compute
    )
    state = made.init(jax.device_get(model))
    joined = decoder.joined(bare.FAMILY, layout, jax.device_get(state))
    close(joined.model, model)
    kept = [np.asarray(leaf).size for leaf in jax.tree.leaves(state.optimizer)]
    assert kept == [leaf.size for leaf in jax.tree.leaves(eqx.filter(model, rules.is_inexact))]
    assert sum(float(np.sum(leaf)) for leaf in jax.tree.leaves(state.optimizer)) == pytest.approx(
        sum(float(np.sum(leaf)) for leaf in jax.tree.leaves(eqx.filter(model, rules.is_inexact))),
        rel=1e-9,
    )
    jax.tree.map(
        lambda leaf, like: np.testing.assert_equal(leaf.sharding, like.sharding),
        *map(arrays, (state, made.shapes)),
    )
    with pytest.raises(
        ValueError, match=r"init: table must be of shape .* and float64; it is .* and float32"
    ):
        made.init(
            jax.tree.map(
                lambda leaf: leaf.astype(jnp.float32) if mesh.is_array(leaf) else leaf, model
            )
        )
    with pytest.raises(ValueError, match=r"the model has 1 arrays; it must have 10"):
        made.init(eqx.filter(model, lambda leaf: leaf is model.norm))


def arrays(tree):
    return jax.tree.leaves(
        eqx.filter(tree, lambda leaf: mesh.is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct))
    )
