"""Auxiliary values of a loss go through every wrapper of a gradient function, and `after` updates
the model with them."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from reference import EXACT, FLOAT64
from user_models import (
    FEW,
    KEPT,
    ONE,
    OPTIMIZER,
    PLAIN,
    adapted,
    adapted_loss,
    normal,
    on,
    same,
    step_of,
    wide_batch,
)

from parallax import grads, mesh, precision, rules, step, zero
from parallax.collectives.types import varying

# Auxiliary values


class Aux(NamedTuple):
    """One of every kind of auxiliary value."""

    row: Any  # of the mean input
    count: Any  # of rows, an integer
    any: Any  # a truth value
    same: Any  # on all devices, an integer
    none: None = None


def aux_loss(model, batch):
    x = batch["wide"]
    aux = Aux(jnp.mean(x, 0), jnp.asarray(len(x), jnp.int32), jnp.any(x > 2), model["table"][0])
    return adapted_loss(model, batch), aux


def of_few(loss):
    """`of(FEW)` with auxiliary values."""

    def grad(model, batch):
        trained, frozen = eqx.partition(model, FEW)
        of_trained = lambda trained, batch: loss(eqx.combine(trained, frozen), batch)
        return eqx.filter_value_and_grad(of_trained, has_aux=True)(trained, batch)

    return grad


WITH_AUX = of_few(aux_loss)
total = lambda aux: Aux(*(None if leaf is None else jnp.sum(leaf, axis=0) for leaf in aux))
summed = lambda aux, axis: Aux(
    axis.all_mean(aux.row), axis.all_reduce(varying(aux.count, "data")), None, None
)
largest = lambda aux, axis: Aux(
    axis.all_max(aux.row), axis.all_max(varying(aux.count, "data")), None, None
)
AUX_GRAD_FNS = {  # with the count that comes out: 32 rows over 8 devices and 2 microbatches
    "averaged": (lambda s: grads.averaged(WITH_AUX, "data"), 4),
    "accumulated": (
        lambda s: grads.averaged(grads.accumulated(WITH_AUX, microbatches=2), "data"),
        2,
    ),
    "accumulated outside": (
        lambda s: grads.accumulated(grads.averaged(WITH_AUX, "data"), microbatches=2),
        2,
    ),
    "summed": (lambda s: grads.summed(WITH_AUX, "data", loss=True), 4),
    "clipped": (lambda s: grads.clipped(grads.averaged(WITH_AUX, "data"), 1e-3), 4),
    "scaled": (
        *(
            lambda s: precision.unscaled(
                grads.averaged(of_few(precision.scaled(aux_loss, ONE)), "data"), ONE
            ),
        ),
        4,
    ),
    "mixed": (lambda s: grads.averaged(precision.mixed(WITH_AUX, FLOAT64), "data"), 4),
    "scattered": (lambda s: zero.reduce_scattered(WITH_AUX, "data", s), 4),
    "gathered": (lambda s: grads.averaged(of_few(zero.gathered(aux_loss, "data", s)), "data"), 4),
    "unsharded": (lambda s: grads.averaged(zero.gathered_once(WITH_AUX, "data", s), "data"), 4),
    "of one's own": (
        *(
            lambda s: grads.averaged(
                grads.accumulated(WITH_AUX, microbatches=2, aux=total), "data", aux=summed
            ),
        ),
        32,
    ),
    "of one's own, scattered": (
        lambda s: zero.reduce_scattered(WITH_AUX, "data", s, aux=largest),
        4,
    ),
    "of one's own, summed": (lambda s: grads.summed(WITH_AUX, "data", loss=True, aux=largest), 4),
}


@pytest.mark.sweep(12)
@pytest.mark.parametrize("name", AUX_GRAD_FNS)
def test_auxiliary_values_go_through_every_wrapper(name):
    grad_fn, count = AUX_GRAD_FNS[name]
    world, model, batch = mesh.make(data=8), adapted(), wide_batch()
    shares = rules.specs(model, KEPT, world)
    live = shares if name in ("gathered", "unsharded") else jax.tree.map(lambda _: P(), shares)
    loss_and_aux = lambda *arguments: grad_fn(shares)(*arguments)[0]
    loss, aux = on(world, loss_and_aux, (live, P("data")), P())(model, batch)
    np.testing.assert_allclose(
        loss, adapted_loss(model, batch) * (8 if name.endswith("summed") else 1), rtol=EXACT
    )
    row, rows = np.mean(batch["wide"], 0), batch["wide"].reshape(8, -1, 64)
    if name.startswith("of one's own, "):
        row = np.max(rows.mean(1), 0)
    elif name == "of one's own":
        row = 2 * row  # a sum over the microbatches
    np.testing.assert_allclose(aux.row, row, atol=1e-14)
    assert (float(aux.count), aux.none) == (count, None)
    if "one's own" not in name:
        parts = batch["wide"].reshape(16 if "accumulated" in name else 8, -1)
        np.testing.assert_allclose(aux.any, np.mean(np.any(parts > 2, axis=1)), rtol=1e-14)
        assert float(aux.same) == 63


@pytest.mark.parametrize("where", ["accumulated", "averaged"])
def test_auxiliary_values_without_a_mean_are_refused(where):
    def grad(model, batch):
        aux = {"key": jax.random.fold_in(jax.random.key(0), batch["wide"][0, 0].astype(jnp.int32))}
        return (adapted_loss(model, batch), aux), PLAIN(model, batch)[1]

    wrapped = (
        grads.accumulated(grad, microbatches=2)
        if where == "accumulated"
        else grads.averaged(grad, "data")
    )
    with pytest.raises(
        ValueError,
        match=r"The auxiliary value key is of type key<fry>, which has no mean. Leave it out",
    ):
        on(mesh.make(data=8), wrapped, (P(), P("data")), P())(adapted(), wide_batch())


def test_auxiliary_values_that_differ_are_refused():
    grad = grads.averaged(WITH_AUX, "data", aux=lambda aux, axis: aux)
    with pytest.raises(
        ValueError,
        match=(
            r"step.make: the auxiliary value row differs along \['data'\], but every value of Info "
            r"must be the same on"
        ),
    ):
        step_of(grad=grad)


# `after`


def counted():
    """A weight, and what `after` counts."""
    return {
        "w": normal(0, 8),
        "key": jax.random.key(0),
        "seen": jnp.zeros((), jnp.int32),
        "mean": jnp.zeros(8),
        "rate": 0.5,
        "call": jnp.tanh,
    }


def counted_loss(trained, rest, batch):
    loss = jnp.mean(rest["call"](batch @ trained["w"]) ** 2)
    return loss, {"mean": jnp.mean(batch, 0), "loss": loss}


def counted_grad(model, batch):
    keep = {name: name == "w" for name in model}
    trained, rest = eqx.partition(model, keep)
    return eqx.filter_value_and_grad(counted_loss, has_aux=True)(trained, rest, batch)


def update_counts(model, aux):
    mean = model["rate"] * model["mean"] + (1 - model["rate"]) * aux["mean"]
    key = jax.random.fold_in(model["key"], 1)
    return {**model, "key": key, "seen": model["seen"] + 1, "mean": mean}


def counting(after, world):
    only_w = {name: name == "w" for name in counted()}
    with jax.numpy_dtype_promotion("standard"):
        state, specs = step.init(
            counted, OPTIMIZER, rules.match("**", P()), world, trainable=only_w
        )
    train = step.make(grads.averaged(counted_grad, "data"), OPTIMIZER, after_update=after)
    return state, on(world, train, (specs, P("data")), (specs, P()))


def test_after_has_the_auxiliary_values_and_a_skipped_step_changes_nothing():
    state, train = counting(update_counts, mesh.make(data=8))
    batch = np.random.default_rng(0).normal(size=(16, 8))
    bad = batch.copy()
    bad[3, 2] = np.nan
    with jax.numpy_dtype_promotion("standard"):
        one, info = train(state, batch)
        two, skipped = train(one, bad)
        three, _ = train(two, batch)
    np.testing.assert_allclose(one.model["mean"], batch.mean(0) / 2, atol=1e-15)
    np.testing.assert_allclose(three.model["mean"], batch.mean(0) * 0.75, atol=1e-15)
    np.testing.assert_allclose(info.aux["mean"], batch.mean(0), atol=1e-15)
    assert float(info.aux["loss"]) == float(info.loss)
    assert (bool(info.skipped), bool(skipped.skipped)) == (False, True)
    assert np.isnan(skipped.aux["mean"][2])
    same((two.model, two.optimizer), (one.model, one.optimizer), tolerance=0)
    assert [int(each.model["seen"]) for each in (one, two, three)] == [1, 1, 2]
    assert [int(each.step) for each in (one, two, three)] == [1, 2, 3]


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda model, aux: {**model, "mean": aux["mean"].astype(jnp.float32)},
            "after_update must keep three things of mean: .* dtype.'float64'.* and returned .* "
            "dtype.'float32'",
        ),
        (
            lambda model, aux: {**model, "mean": aux["mean"][:4]},
            r"after_update must keep three things of mean: .*\(8,\).* and returned .*\(4,\)",
        ),
        (
            lambda model, aux: {**model, "rate": 0.25},
            "after_update must return rate as 0.5; it returned 0.25. A leaf that is not",
        ),
        (
            lambda model, aux: {**model, "rate": aux["loss"]},
            r"after_update must return rate as 0.5; it returned float64\[\]",
        ),
        (
            lambda model, aux: {**model, "seen": 3},
            r"after_update must return seen as int32\[\]; it returned 3",
        ),
        (
            lambda model, aux: {**model, "call": jnp.sin},
            "after_update must return call as .*tanh.*; it returned .*sin",
        ),
        (
            lambda model, aux: {
                "weight": model["w"],
                **{name: model[name] for name in model if name != "w"},
            },
            "after_update must return a model of the structure that it takes, .* w is gone, "
            "weight is new",
        ),
        (
            lambda model, aux: None,
            "after_update must return a model of the structure that it takes, .* call is gone, "
            "mean is gone, rate is",
        ),
    ],
)
def test_after_that_changes_the_form_of_the_model_is_refused(change, message):
    state, train = counting(change, mesh.make(data=8))
    with (
        pytest.raises(ValueError, match=f"step.make: {message}"),
        jax.numpy_dtype_promotion("standard"),
    ):
        train(state, np.zeros((16, 8)))


def test_after_that_makes_replicas_differ_is_refused():
    def own_rows(model, aux):
        return {**model, "mean": varying(model["mean"], "data")}

    state, train = counting(own_rows, mesh.make(data=8))
    message = (
        r"after_update must keep three things of mean: .*\(\)\) and returned .*\('data',\)\). If "
        r"the axes differ, average the array over the new axes"
    )
    with pytest.raises(ValueError, match=message), jax.numpy_dtype_promotion("standard"):
        train(state, np.zeros((16, 8)))
