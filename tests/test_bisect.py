"""Faults put into a split run are named: the value, the collective before it, the kind of mistake. Right runs raise no alarm."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from parallax import bisect, grads, mesh, step, tensor
from parallax.collectives import ring
from parallax.collectives.types import linear, replicated, varying
from parallax.layout import Layout
from parallax.models import decoder, gpt2, tapped

SPECS = {"up": P(None, None, "tensor"), "down": P(None, "tensor")}
OF_LAYER = {"up": P(None, "tensor"), "down": P("tensor")}
D, F, L, ROWS = 4, 8, 3, 8


class Parts(NamedTuple):
    """What a fault may replace: the functions that join devices and microbatches."""

    enter: Any = functools.partial(tensor.enter, axis=ring("tensor"))
    leave: Any = functools.partial(tensor.leave, axis=ring("tensor"))
    accumulated: Any = grads.accumulated
    averaged: Any = functools.partial(grads.averaged, axis=ring("data"))
    rows: Any = lambda x: x
    key: Any = lambda key: key


def loss_of(parts):
    def loss(params, batch):
        x, y, keys = batch

        def layer(x, each):
            weights, number = each
            with bisect.at(layer=number):
                weights = bisect.tap_tree(weights, "layers.*", OF_LAYER)
                up = bisect.tap(jnp.tanh(parts.enter(x) @ weights["up"]), "layers.*.hidden", P("batch", "tensor"))
                down = bisect.tap(parts.leave(up @ weights["down"]), "layers.*.summed", P("batch"))
                kept = jax.vmap(lambda key: jax.random.bernoulli(jax.random.fold_in(parts.key(key), number), 0.7, (D,)))(keys)
                down = bisect.tap(jnp.where(kept, down, jnp.zeros((), x.dtype)), "layers.*.dropped", P("batch"))
                return bisect.tap(x + down, "layers.*.out", P("batch")), None

        x = bisect.tap(parts.rows(x), "in", P("batch"))
        x, _ = lax.scan(layer, x, (params, jnp.arange(L, dtype=jnp.int32)))
        return bisect.tap(jnp.mean((x - y) ** 2), "loss", P(unreduced=frozenset({"batch"})))

    return loss


def model_run(parts=None, *, data=1, tensor=1, microbatches=1, remat=False, dtype="float64"):
    """What `bisect.record` takes: a train step of a small residual net, over data x tensor."""
    parts = parts or Parts()

    def make():
        r = np.random.default_rng(0)
        params = {"up": r.standard_normal((L, D, F)).astype(dtype), "down": r.standard_normal((L, F, D)).astype(dtype)}
        batch = (*(r.standard_normal((ROWS, D)).astype(dtype) for _ in range(2)), jax.random.split(jax.random.key(1), ROWS))
        loss = loss_of(parts)
        grad = parts.accumulated(jax.value_and_grad(jax.checkpoint(loss) if remat else loss), microbatches=microbatches)
        grad = parts.averaged(grad)
        tapped_grad = tapped.gradients(grad, SPECS)
        devices = mesh.make(devices=jax.devices()[: data * tensor], data=data, tensor=tensor)
        asarrays = lambda: jax.tree.map(jnp.asarray, params)
        state, specs = step.init(asarrays, optax.sgd(0.1), lambda path, leaf: SPECS[path], devices)
        train = step.make(tapped_grad, optax.sgd(0.1), specs=SPECS)
        return mesh.spmd(train, mesh=devices, in_specs=(specs, P("data")), out_specs=(specs, P())), (state, batch)

    return make


def first(*runs, **options):
    found = bisect.compare(*runs, **options).first
    assert found is not None
    return found


@functools.cache
def one_device():
    return bisect.record(model_run())


@pytest.mark.parametrize(
    "layout", [{"data": 4, "tensor": 2}, {"data": 2, "tensor": 2, "microbatches": 2, "remat": True}, {"microbatches": 4}], ids=str
)
def test_no_alarm_in_a_right_layout(layout):
    found = bisect.compare(one_device(), model_run(**layout))
    assert found.first is None, str(found)
    assert not found.alone
    assert found.compared > 6 * L
    assert 0 < found.worst[0] < 1e-13
    assert str(found).startswith(f"All {found.compared} values are equal")


def moved(x):
    """The rows of the devices of `data`, one device further."""
    n = lax.axis_size("data")
    return lax.ppermute(x, "data", [(i, (i + 1) % n) for i in range(n)])


def unsummed(x):
    return linear(x, forward=lambda x: replicated(x, "tensor"), backward=lambda ct: varying(ct, "tensor"))


def own_mean(x):
    return ring.all_mean(x, "tensor")


def twice(x):
    return ring.all_reduce(varying(ring.all_reduce(x, "tensor"), "tensor"), "tensor")


def no_sum_backward(x):
    return linear(x, forward=lambda x: varying(x, "tensor"), backward=lambda ct: replicated(ct, "tensor"))


def backward_twice(x):
    return linear(x, forward=lambda x: varying(x, "tensor"), backward=twice)


def last_row_dropped(x):
    return x.at[-1].set(0)


def _times(grad, n):
    def wrapped(params, batch):
        loss, found = grad(params, batch)
        return loss, jax.tree.map(lambda g: g * n, found)

    return wrapped


def _alone(grad):
    def wrapped(params, batch):
        loss, found = grad(varying(params, "data"), batch)
        return ring.all_mean(loss, "data"), jax.tree.map(lambda g: replicated(g, "data"), found)

    return wrapped


FAULTS = {
    "leave without its sum": (Parts(leave=unsummed), "layers.0.summed", "not summed", "none"),
    "a mean for leave's sum": (Parts(leave=own_mean), "layers.0.summed", "divided by 2", "all_mean"),
    "leave's sum twice": (Parts(leave=twice), "layers.0.summed", "summed 2 times", "all_reduce"),
    "enter without its sum": (Parts(enter=no_sum_backward), f"the cotangent of layers.{L - 2}.out", "not summed", "none"),
    "enter's sum twice": (Parts(enter=backward_twice), f"the cotangent of layers.{L - 2}.out", "", "over tensor"),
    "rows of another device": (Parts(rows=moved), "in", "2 blocks of dim 0 in another order: [1, 0]", "ppermute over data"),
    "another key": (Parts(key=lambda key: jax.random.fold_in(key, 7)), "layers.0.dropped", "another random key", "none"),
    "a row lost": (Parts(rows=last_row_dropped), "in", "", "none"),
    "a sum for the data axis' mean": (
        Parts(averaged=lambda grad: grads.summed(grad, ring("data"), loss=True)),
        "gradients.down",
        "summed 2 times",
        "all_reduce",
    ),
    "microbatches summed": (
        Parts(accumulated=lambda grad, microbatches: _times(grads.accumulated(grad, microbatches=microbatches), microbatches)),
        "gradients.down",
        "summed 2 times",
        "all_reduce",
    ),
    "gradients of one device": (Parts(averaged=_alone), "gradients.down", "have different copies", "none"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named(name):
    parts, where, kind, collective = FAULTS[name]
    found = first(one_device(), model_run(parts, data=2, tensor=2, microbatches=2))
    assert str(found.key) == where
    assert kind in found.looks
    said = str(found)
    assert found.between is not None
    assert collective in "; ".join(found.between.collectives) or (collective == "none" and not found.between.collectives), said
    assert said.startswith(f"{where} differs first")


def test_the_microbatch_and_the_number_are_named():
    off = lambda x: x.at[1].multiply(2)  # of each microbatch on each device, the second row
    found = first(one_device(), model_run(Parts(rows=off), data=2, microbatches=2))
    row, column = found.index
    assert row % 2 == 1
    assert found.microbatch == row // 2 % 2
    assert found.wrong == pytest.approx(2 * found.right)
    assert one_device().values[bisect.Key("in", -1, "forward")].whole[row, column] == found.right


def test_taps_cost_nothing_when_off():
    """The text of a GPT-2 step is that of the same step with every tap taken out."""
    config = gpt2.Config(layers=1, heads=2, width=8, context=4, vocabulary=16, vocabulary_multiple=16)
    make, arguments = gpt2_run(Layout(data=2), config)()
    untapped = _lowered(make, arguments).as_text()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bisect, "tap", lambda x, *_, **__: x)
        patch.setattr(bisect, "tap_tree", lambda tree, *_, **__: tree)
        make, arguments = gpt2_run(Layout(data=2), config)()
        assert _lowered(make, arguments).as_text() == untapped
    assert "callback" not in untapped


def _lowered(train, arguments):
    with jax.numpy_dtype_promotion("standard"):  # optax mixes float32 schedules with float64 weights
        return train.lower(*arguments)


def gpt2_run(layout, config, batch=4):
    def make():
        devices = mesh.make(devices=jax.devices()[: layout.devices], **layout.axes)
        windows = np.random.default_rng(0).integers(0, config.vocabulary, (batch, config.context + 1)).astype(np.int32)
        compute = decoder.Compute(dtype=jnp.float64, max_norm=0.5)
        options = {"batch": batch, "key": jax.random.key(0), "compute": compute}
        prepared = decoder.prepare(gpt2.FAMILY, config, optax.adamw(1e-3), layout, devices, **options)
        return prepared.train, (prepared.init(), windows)

    return make


def test_a_record_is_saved_and_read(tmp_path):
    one_device().save(tmp_path / "run.npz")
    stored = bisect.load(tmp_path / "run.npz")
    assert bisect.compare(one_device(), stored).worst[0] == 0
    wrong = bisect.record(model_run(Parts(leave=own_mean), tensor=2))
    assert str(first(stored, wrong).key) == "layers.0.summed"
    found = first(wrong, stored)
    assert "summed 2 times" in found.looks
    assert found.between is None


def test_few_bits_have_bounds_of_their_own():
    exact, short = one_device(), bisect.record(model_run(dtype="float32"))
    assert bisect.compare(exact, short).first is not None
    bounds = bisect.rounding(exact, short)
    assert bisect.compare(exact, model_run(data=2, tensor=2, dtype="float32"), bound=bounds).first is None
    wrong = first(exact, model_run(Parts(leave=own_mean), tensor=2, dtype="float32"), bound=bounds)
    assert str(wrong.key) == "layers.0.summed"


def test_what_cannot_be_is_refused():
    x = jnp.zeros(3)
    with pytest.raises(ValueError, match="reported nothing"):
        bisect.record(lambda: (lambda x: x + 1, (x,)))
    named = lambda name: lambda: (lambda x: bisect.tap(x, name) * 2, (x,))
    with pytest.raises(ValueError, match="has 1 dims, and its spec"):
        bisect.record(lambda: (lambda x: bisect.tap(x, "x", P(None, "data")), (x,)))
    with pytest.raises(ValueError, match="two values are named x"):
        bisect.record(lambda: (lambda x: bisect.tap(x, "x") + bisect.tap(x, "x", P("batch")), (x,)))
    one = bisect.record(named("a"))
    with pytest.raises(ValueError, match="none in common"):
        bisect.compare(one, bisect.Record({}, {}, 1))
    with pytest.raises(ValueError, match="maps the layer"):
        bisect.record(lambda: (jax.vmap(_at), (jnp.arange(2), jnp.zeros((2, 3)))))


def _at(number, x):
    with bisect.at(layer=number):
        return bisect.tap(x, "a.*")


@pytest.mark.parametrize("kind", [jax.jit, jax.checkpoint])
def test_a_function_that_was_traced_before_is_at_its_own_layer(kind):
    """JAX would use its first trace again, with the layer of that."""
    layer = kind(lambda x: bisect.tap(jnp.sin(x), "layers.*.out"))

    def f(x):
        for number in range(3):
            with bisect.at(layer=number):
                x = layer(x)
        return x

    made = bisect.record(lambda: (f, (jnp.ones(2),)))
    assert [key.layer for key in made.values if key.path == "layers.*.out"] == [0, 1, 2]


def test_a_dim_of_vmap_is_the_batch():
    double = lambda x: 2 * bisect.tap(x, "x")
    made = bisect.record(lambda: (jax.vmap(double), (jnp.arange(6.0).reshape(3, 2),)))
    value = made.values[bisect.Key("x", -1, "forward")]
    assert value.whole.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert value.rows == (0, 3)
