"""Leaves that are not trained have no gradient and no optimizer state, move no bytes, and stay as
they are."""

import collections

import equinox as eqx
import hlo
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from reference import EXACT, FLOAT64, assert_close
from user_models import (
    FEW,
    KEPT,
    LOW,
    ONE,
    PLAIN,
    SPLIT,
    adapted,
    adapted_loss,
    of,
    step_of,
    wide_batch,
)

from parallax import grads, mesh, precision, rules, step, zero

TRAINED = 8 * (2 * 64 * LOW + 64)  # bytes
# Each: the gradient function from the specs of shares, the rule that those are of, whether
# parameters and gradients are shares, and the bytes that each collective gives a device. A loss is
# 8 bytes. Of what ZeRO gathers, the frozen leaves are a gather without a scatter.
GRAD_FNS = {
    "averaged": (
        lambda s: grads.averaged(PLAIN, "data"),
        KEPT,
        (False, False),
        {"all-reduce": TRAINED + 8},
    ),
    "accumulated": (
        *(
            lambda s: grads.averaged(grads.accumulated(PLAIN, microbatches=2), "data"),
            KEPT,
            (False, False),
        ),
        {"all-reduce": TRAINED + 8},
    ),
    "summed": (
        lambda s: grads.summed(PLAIN, "data", loss=True),
        KEPT,
        (False, False),
        {"all-reduce": TRAINED + 8},
    ),
    "clipped": (
        lambda s: grads.clipped(grads.averaged(PLAIN, "data"), 1e-3),
        KEPT,
        (False, False),
        {"all-reduce": TRAINED + 8},
    ),
    "scaled": (
        *(
            lambda s: precision.unscaled(
                grads.averaged(of(FEW)(precision.scaled(adapted_loss, ONE)), "data"), ONE
            ),
            KEPT,
        ),
        *((False, False), {"all-reduce": TRAINED + 8}),
    ),
    "mixed": (
        lambda s: grads.averaged(precision.mixed(PLAIN, FLOAT64), "data"),
        KEPT,
        (False, False),
        {"all-reduce": TRAINED + 8},
    ),
    "scattered": (
        *(lambda s: zero.reduce_scattered(PLAIN, "data", s), SPLIT, (False, True)),
        {"reduce-scatter": TRAINED // 8, "all-reduce": 8},
    ),
    "scattered where it pays": (
        *(
            lambda s: zero.reduce_scattered(PLAIN, "data", s),
            rules.fsdp("data", size=8),
            (False, True),
        ),
        {"all-reduce": TRAINED + 8},  # leaves of fewer than 1,024 elements stay whole
    ),
    "gathered": (
        *(
            lambda s: grads.averaged(of(FEW)(zero.gathered(adapted_loss, "data", s)), "data"),
            KEPT,
            (True, True),
        ),
        {"all-gather": TRAINED, "reduce-scatter": TRAINED // 8, "all-reduce": 8},
    ),
    "gathered, frozen leaves too": (
        *(
            lambda s: grads.averaged(of(FEW)(zero.gathered(adapted_loss, "data", s)), "data"),
            SPLIT,
            (True, True),
        ),
        {
            "all-gather": TRAINED + 8 * 64 * 64 + 4 * 64,
            "reduce-scatter": TRAINED // 8,
            "all-reduce": 8,
        },
    ),
    "unsharded": (
        *(
            lambda s: grads.averaged(zero.gathered_once(PLAIN, "data", s), "data"),
            KEPT,
            (True, True),
        ),
        {"all-gather": TRAINED, "reduce-scatter": TRAINED // 8, "all-reduce": 8},
    ),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", GRAD_FNS)
def test_frozen_leaves_have_no_gradient_and_move_no_bytes(name):
    grad_fn, rule, (split_params, split_gradients), expected = GRAD_FNS[name]
    world, model, batch = mesh.make(data=8), adapted(), wide_batch()
    shares = rules.specs(model, rule, world)
    whole = jax.tree.map(lambda _: P(), shares)
    trained = lambda specs: eqx.filter(specs, FEW)
    specs = (shares if split_params else whole, P("data"))
    program = mesh.spmd(
        grad_fn(shares),
        mesh=world,
        in_specs=specs,
        out_specs=(P(), trained(shares if split_gradients else whole)),
    )
    arrays, static = eqx.partition(model, eqx.is_array)
    program = (
        jax.jit(lambda arrays, batch: program_of(arrays, static, batch, program))
        .lower(arrays, batch)
        .compile()
    )
    loss, gradients = program(arrays, batch)
    plain_loss, plain = PLAIN(model, batch)
    factor = {"summed": 8, "clipped": 1e-3 / optax.tree.norm(plain)}.get(name, 1)
    assert (gradients["base"], gradients["table"], gradients["squash"]) == (None, None, None)
    np.testing.assert_allclose(loss, plain_loss * (8 if name == "summed" else 1), rtol=EXACT)
    assert_close(gradients, jax.tree.map(lambda g: g * factor, plain), EXACT)
    moved = collections.Counter()
    for op in hlo.parse(program):
        moved[op.kind] += op.bytes
    assert moved == expected


def program_of(arrays, static, batch, program):
    return program(eqx.combine(arrays, static), batch)


@pytest.mark.sweep(3, "wholes")
@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "ZeRO-1"])
def test_frozen_leaves_have_no_state_and_the_step_moves_no_bytes_for_them(sharded):
    state, program, arrays = step_of(sharded=sharded)
    assert (
        sum(leaf.nbytes for leaf in jax.tree.leaves(state.optimizer)) == 2 * TRAINED + 4
    )  # and AdamW's count
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state.optimizer))
    assert held == 2 * TRAINED // (8 if sharded else 1) + 4
    new, info = program(arrays, wide_batch())
    for name in ("base", "table"):
        np.testing.assert_array_equal(new.model[name], state.model[name])
    assert np.all(np.asarray(new.model["bias"] != state.model["bias"]))
    loss, gradients = PLAIN(adapted(), wide_batch())
    np.testing.assert_allclose(info[:2], (loss, optax.tree.norm(gradients)), rtol=EXACT)
    moved = collections.Counter()
    for op in hlo.parse(program):
        moved[op.kind] += op.bytes
    if sharded:  # the loss, the norm's sum of squares, and whether what the step made is finite
        assert moved == {"reduce-scatter": TRAINED // 8, "all-gather": TRAINED, "all-reduce": 24}
    else:
        assert moved == {"all-reduce": TRAINED + 8}


@pytest.mark.parametrize(
    ("trainable", "message"),
    [
        (
            {**FEW, "bias": False},
            "step.make: bias has a gradient, and no state in the optimizer. The leaves that the "
            "gradient function",
        ),
        (
            {**FEW, "base": True},
            "step.make: base has optimizer state, and no gradient. The leaves that the gradient "
            "function",
        ),
    ],
)
def test_leaves_with_a_gradient_and_no_state_are_refused(trainable, message):
    with pytest.raises(ValueError, match=message):
        step_of(trainable=trainable)


def test_some_leaves_may_have_an_optimizer_without_state():
    """State for some of the leaves alone is no mistake where the optimizer asks for no more."""
    labels = {"base": None, "low": "adam", "table": None, "squash": None, "bias": "sgd"}
    _, program, arrays = step_of(
        optax.partition({"adam": optax.adam(1e-2), "sgd": optax.sgd(1e-2)}, labels)
    )
    new, _ = program(arrays, wide_batch())
    gradients = PLAIN(adapted(), wide_batch())[1]
    assert_close(new.model["bias"], adapted()["bias"] - 1e-2 * gradients["bias"], EXACT)


def test_an_optimizer_may_give_no_leaf_an_update():
    """Its updates are None, as `eqx.apply_updates` allows: the model stays, and nothing is lost."""
    no_update = lambda gradients, state, model=None: (
        jax.tree.map(lambda _: None, gradients),
        state,
    )
    optimizer = optax.GradientTransformation(lambda _: optax.EmptyState(), no_update)
    grad = jax.value_and_grad(lambda w, x: jnp.mean((x @ w) ** 2))
    before = step.State(jnp.ones(3), optimizer.init(jnp.ones(3)), jnp.zeros((), jnp.int32))
    state, info = step.make(grad, optimizer)(before, jnp.ones((4, 3)))
    assert (info.skipped, int(state.step)) == (False, 1)
    np.testing.assert_array_equal(state.model, before.model)


def test_nothing_to_train_is_refused():
    nothing = lambda model, batch: (adapted_loss(model, batch), jax.tree.map(lambda _: None, model))
    with pytest.raises(ValueError, match="all leaves of the tree are None: nothing is trained"):
        step_of(grad=grads.averaged(nothing, "data"), trainable=lambda leaf: False)
