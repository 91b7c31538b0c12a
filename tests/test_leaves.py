"""Models with leaves that are no arrays: their state, their paths, and what is stored on disk."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from user_models import (
    KINDS,
    OPTIMIZER,
    adapted,
    batch_of,
    data_of,
    mixed,
    mixed_loss,
    normal,
    on,
    same,
)

from parallax import grads, mesh, rules, step, trees, zero
from parallax.run import checkpoint

# The state of a model with leaves that are no arrays


@pytest.mark.sweep(3, "wholes")
def test_a_state_has_the_static_leaves_of_the_model_and_can_be_donated():
    world, kind, model = mesh.make(data=8), KINDS["mixed leaves"], mixed()
    with jax.numpy_dtype_promotion("standard"):
        plan = step.planned(mixed, OPTIMIZER, rules.match("**", P()), world)
        state = plan.init()
    as_arrays = lambda tree: jax.tree.map(
        lambda leaf: jnp.asarray(leaf) if mesh.is_array(leaf) else leaf, tree
    )
    same(state.model, as_arrays(model))  # `jit` rounds otherwise
    assert (state.model.scale, state.model.name, state.model.nothing) == (2.0, "mixed", None)
    assert all(
        isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state) if mesh.is_array(leaf)
    )
    # What is planned, what the specs say and what is made have the same leaves.
    form = lambda tree: [
        (path, (leaf.shape, leaf.dtype) if mesh.is_array(leaf) else leaf)
        for path, leaf in rules.paths(tree)
    ]
    assert form(plan.shapes) == form(state)
    arrays = lambda tree: eqx.filter(tree, mesh.is_array)
    assert [p for p, _ in rules.paths(arrays(state))] == list(trees.by_path(plan.specs))
    assert [p for p, _ in rules.paths(state.optimizer[0].mu)] == ["up", "down", "numpy"]
    of_optimizer = rules.optimizer_specs(OPTIMIZER, state.model, plan.specs.model)
    assert jax.tree.structure(of_optimizer) == jax.tree.structure(plan.specs.optimizer)

    train = step.make(
        grads.averaged(kind.grad(lambda m, b: mixed_loss(m, b, ())), "data"), OPTIMIZER
    )
    spmd = mesh.spmd(
        train, mesh=world, in_specs=(plan.specs, P("data")), out_specs=(plan.specs, P())
    )
    with jax.numpy_dtype_promotion("standard"):
        new, _ = eqx.filter_jit(spmd, donate="all-except-first")(state, batch_of(0))
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(arrays(state)))
        before = jax.tree.leaves(arrays(new))
        newer, _ = eqx.filter_jit(spmd, donate="all")(new, jax.device_put(batch_of(1)))
        assert all(leaf.is_deleted() for leaf in before)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(arrays(newer)))
    assert (newer.model.scale, newer.model.count, newer.model.square) == (2.0, 3, True)
    for name in ("words", "mask", "codes"):
        np.testing.assert_array_equal(getattr(newer.model, name), getattr(model, name))


def test_a_given_model_keeps_its_arrays():
    """Also a random key that is already where the state needs it: the state's is a copy."""
    world = mesh.make(data=8)
    make = lambda: {"w": jnp.ones((8, 2)), "key": jax.random.key(3)}
    given = jax.device_put(make(), mesh.shardings(P(), world))
    state = step.planned(make, OPTIMIZER, rules.match("**", P()), world).init(given)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(given))
    assert jnp.array_equal(*map(jax.random.key_data, (given["key"], state.model["key"])))


class GateFirst(eqx.Module):
    gate: jax.Array
    up: jax.Array


class UpFirst(eqx.Module):
    up: jax.Array
    gate: jax.Array


def test_a_given_model_with_its_fields_in_another_order_is_refused():
    """Arrays of equal shapes would change places."""
    make = lambda: GateFirst(jnp.zeros(2), jnp.zeros(2))
    plan = step.planned(make, OPTIMIZER, rules.match("**", P()), mesh.make(data=8))
    with pytest.raises(
        ValueError, match=r"has the array up where the result of make_model has gate\."
    ):
        plan.init(UpFirst(up=jnp.ones(2), gate=jnp.zeros(2)))


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.adam(1e-3, mu_dtype=jnp.float32),
        optax.inject_hyperparams(optax.sgd)(learning_rate=1e-3),
        optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3),
    ],
    ids=["adam with a wide mu", "injected sgd", "injected adamw"],
)
def test_a_state_keeps_its_dtypes_under_wider_updates(optimizer):
    """The updates of a wider dtype are added as `optax.apply_updates` adds them."""
    model = {"a": jnp.ones(2, jnp.float32), "b": jnp.ones(2, jnp.bfloat16)}
    grad = jax.value_and_grad(lambda model, x: jnp.sum((model["a"] - x) ** 2 + model["b"] - x))
    dtypes = lambda tree: jax.tree.map(lambda leaf: leaf.dtype, tree)
    x = jnp.zeros((), jnp.bfloat16)
    with jax.numpy_dtype_promotion("standard"):
        state = step.State(model, optimizer.init(model), jnp.zeros((), jnp.int32))
        new, _ = jax.jit(step.make(grad, optimizer))(state, x)
        updates, _ = optimizer.update(grad(model, x)[1], state.optimizer, model)
        added = optax.apply_updates(model, updates)
    assert dtypes(new) == dtypes(state)
    for name in model:  # `jit` rounds float32 otherwise
        np.testing.assert_allclose(
            *(np.asarray(tree[name], np.float64) for tree in (new.model, added)), rtol=1e-6
        )


def floats():
    return {"w": normal(0, 8), "scale": 2.0}


def floats_loss(model, batch):
    return jnp.mean((model["scale"] * batch @ model["w"]) ** 2)


def test_a_python_number_that_jit_makes_an_array_is_refused():
    """`jax.jit` would train it: by SGD it went from 2.0 to -23.6."""
    world, sgd, batch = mesh.make(data=8), optax.sgd(10.0), np.ones((16, 8))
    state, specs = step.init(floats, sgd, rules.match("**", P()), world)
    train = step.make(grads.averaged(eqx.filter_value_and_grad(floats_loss), "data"), sgd)
    spmd = mesh.spmd(train, mesh=world, in_specs=(specs, P("data")), out_specs=(specs, P()))
    message = (
        r"0.model.scale: the specs have None, as for a leaf that is no array .*, but the leaf is "
        r"an array, float64\[\]. jax.jit turns"
    )
    with pytest.raises(ValueError, match=message):
        jax.jit(spmd)(state, batch)
    new, _ = eqx.filter_jit(spmd)(state, batch)
    assert new.model["scale"] == 2.0


def test_a_gradient_of_a_python_number_is_refused():
    """`jax.value_and_grad` differentiates with respect to Python numbers."""
    world, sgd = mesh.make(data=8), optax.sgd(10.0)
    state, specs = step.init(floats, sgd, rules.match("**", P()), world)
    train = step.make(grads.averaged(jax.value_and_grad(floats_loss), "data"), sgd)
    message = (
        "The gradients have a leaf 'scale', but the parameter at this path is 2.0, and only arrays "
        "are trained. Use eqx"
    )
    with pytest.raises(ValueError, match=message):
        on(world, train, (specs, P("data")), (specs, P()))(state, np.ones((16, 8)))


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    "trainable",
    [eqx.is_inexact_array, eqx.is_array, trees.is_inexact, True],
    ids=lambda each: getattr(each, "__name__", str(each)),
)
def test_trainable_may_be_any_question_about_a_leaf(trainable):
    state, specs = step.init(
        adapted, optax.adam(1e-3), rules.match("**", P()), mesh.make(data=8), trainable=trainable
    )
    assert list(trees.by_path(specs.optimizer[0].mu)) == ["base", "bias", "low.0", "low.1"]
    assert [path for path, _ in rules.paths(state.optimizer[0].mu)] == [
        "base",
        "bias",
        "low.0",
        "low.1",
    ]


def test_sharded_has_state_for_what_can_be_trained():
    """Outside a map, of a model with integers and functions."""
    state = zero.sharded(optax.adam(1e-3), "data", P()).init(adapted())
    assert [path for path, _ in rules.paths(state[0].mu)] == ["base", "bias", "low.0", "low.1"]


def test_init_asks_about_the_axes_that_split_the_batch():
    world, rule = mesh.make(replica=4, data=2), rules.match("**", P("data"))
    make = lambda: {"w": jnp.ones((8, 8))}
    with pytest.raises(ValueError, match="split over mesh axis 'data', which splits the batch"):
        step.init(make, OPTIMIZER, rule, world, batch_axes=("replica", "data"))
    state, _ = step.init(make, OPTIMIZER, rule, world, batch_axes=("replica",))
    assert state.model["w"].addressable_shards[0].data.shape == (4, 8)
    with pytest.raises(ValueError, match="split over mesh axis 'data', which splits the batch"):
        step.init(
            make,
            OPTIMIZER,
            rules.match("**", P()),
            world,
            optimizer_rule=rule,
            batch_axes=("data",),
        )


def test_a_share_that_is_used_as_a_whole_is_refused_in_a_model_with_functions_too():
    """ZeRO-3 whose rule splits the layers that a loop runs over."""
    world = mesh.make(data=8)
    make = lambda: {"blocks": normal(0, 8, 8, 8), "squash": jnp.tanh}

    def loss(model, batch):
        block = zero.gathered(lambda w, x: model["squash"](x @ w), "data", P())
        return jnp.mean(lax.scan(lambda x, w: (block(w, x), None), batch, model["blocks"])[0] ** 2)

    grad = grads.averaged(eqx.filter_value_and_grad(loss), "data")
    specs = rules.specs(make(), rules.fsdp("data", size=8, min_size=1), world)
    with pytest.raises(
        ValueError, match=r"blocks, here of shape .1, 8, 8., differs along 'data', so it counts as"
    ):
        on(world, grad, (specs, P("data")), (P(), specs))(make(), np.ones((16, 8)))


# Leaves are told apart by path


def test_two_leaves_of_one_path_are_refused():
    tree = {"a.b": jnp.ones((8, 2)), "a": {"b": jnp.ones(4)}, "c": jnp.ones(8)}
    message = (
        r"a.b: each leaf needs a path of its own, but this is the path of leaves of shapes \(4,\) "
        r"and \(8, 2\); rename one"
    )
    for asked in (
        lambda: rules.specs(tree, rules.match("**", P())),
        lambda: rules.explain(tree, rules.match("**", P())),
    ):
        with pytest.raises(ValueError, match=message):
            asked()
    assert [refusal.kind for refusal in rules.audit(tree, rules.match("**", P())).refusals] == [
        "same-path"
    ]
    with pytest.raises(
        ValueError, match=r"The specs have two leaves with the same path, a.b: rename one of them"
    ):
        trees.by_path({"a.b": P(), "a": {"b": P("data")}})


def test_a_scalar_in_the_batch_is_refused_by_its_path():
    grad = grads.accumulated(lambda model, batch: (jnp.sum(model), model), microbatches=2)
    for scalar in (jnp.ones(()), np.float64(1.0), 1.0):
        message = (
            r"The batch's leaf \['weights'\]\['temperature'\] is a scalar, but the first dim "
            r"of every leaf must run over the sequences"
        )
        with pytest.raises(ValueError, match=message):
            grad(jnp.ones(3), {"x": jnp.ones((4, 2)), "weights": {"temperature": scalar}})


# On disk


def test_a_checkpoint_of_every_kind_of_leaf_comes_back_equal(tmp_path):
    world = mesh.make(data=8)
    make = lambda: {
        "model": mixed(),
        "phase": 1 + 2j,
        "list": [None, 3, jnp.zeros(3, bool)],
        "rbg": jax.random.key(5, impl="rbg"),
    }
    with jax.numpy_dtype_promotion("standard"):
        state, _ = step.init(make, OPTIMIZER, rules.fsdp("data", size=8, min_size=1), world)
        zeros = lambda leaf: jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding)
        blank = jax.tree.map(
            lambda leaf: zeros(leaf) if eqx.is_array(leaf) and data_of(leaf) is leaf else leaf,
            state,
        )
    blank = eqx.tree_at(
        lambda s: (s.model["phase"], s.model["list"][1], s.model["model"].scale),
        blank,
        (0j, 0, 0.0),
    )
    with checkpoint.Checkpoints(tmp_path, settings={}, say=lambda line: None) as store:
        store.save(1, state)
        restored = store.restore(blank).state
    same(restored, state, tolerance=0)
    assert jax.tree.map(
        lambda leaf: leaf.sharding, eqx.filter(restored, eqx.is_array)
    ) == jax.tree.map(lambda leaf: leaf.sharding, eqx.filter(state, eqx.is_array))
    wrong = eqx.tree_at(lambda s: s.model["list"][1], state, 3.0)
    with (
        checkpoint.Checkpoints(tmp_path, settings={}, say=lambda line: None) as store,
        pytest.raises(
            ValueError, match=r"model.list.1: needed float\[\], the checkpoint has int\[\]"
        ),
    ):
        store.restore(wrong)


@pytest.mark.parametrize("number", [float("nan"), complex(0, float("inf"))])
def test_a_number_that_is_not_finite_is_not_stored(tmp_path, number):
    with (
        checkpoint.Checkpoints(tmp_path, settings={}, say=lambda line: None) as store,
        pytest.raises(ValueError, match="scale: a plain number to store must be finite"),
    ):
        store.save(1, {"scale": number, "w": jnp.ones(2)})
