"""Faults put into a split run are named: the value, the collective before it, the kind of mistake.
Right runs raise no alarm."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tapped_net
from bisected_run import decoder_run
from jax import lax
from jax.sharding import PartitionSpec as P
from tapped_net import Parts

from parallax import bisect, grads, mesh, taps
from parallax.bisect.collectives_between import before_result, before_tap
from parallax.bisect.diagnosis import diagnose
from parallax.collectives import ring
from parallax.collectives.types import linear, replicated, varying
from parallax.layout import Layout
from parallax.models import gpt2
from parallax.run.checkpoint import Checkpoints

L = tapped_net.L


def first(*runs, **options):
    found = bisect.compare(*runs, **options).first
    assert found is not None
    return found


@functools.cache
def one_device():
    return bisect.record(tapped_net.run())


RIGHT = [
    {"data": 4, "tensor": 2},
    {"data": 2, "tensor": 2, "microbatches": 2, "remat": True},
    {"data": 2, "tensor": 2, "zero": 1, "microbatches": 2},
    {"data": 4, "zero": 3},
    {"stage": 2, "microbatches": 4, "chunks": 2},
    {
        "data": 2,
        "stage": 2,
        "tensor": 2,
        "microbatches": 2,
        "zero": 1,
        "schedule": "zero_bubble_lockstep",
    },
]


@pytest.mark.sweep(6)
@pytest.mark.parametrize("layout", RIGHT, ids=str)
def test_no_alarm_in_a_right_layout(layout):
    found = bisect.compare(one_device(), tapped_net.run(**layout))
    assert found.first is None, str(found)
    assert not found.alone
    assert not found.first_of_several
    assert found.compared > 6 * L
    assert 0 < found.worst[0] < 1e-13, found.worst
    assert str(found).startswith(f"All {found.compared} values are equal")


def moved(x):
    """The rows of the devices of `data`, one device further."""
    n = lax.axis_size("data")
    return lax.ppermute(x, "data", [(i, (i + 1) % n) for i in range(n)])


def unsummed(x):
    return linear(
        x, forward=lambda x: replicated(x, "tensor"), backward=lambda ct: varying(ct, "tensor")
    )


def own_mean(x):
    return ring.all_mean(x, "tensor")


def twice(x):
    return ring.all_reduce(varying(ring.all_reduce(x, "tensor"), "tensor"), "tensor")


def no_sum_backward(x):
    return linear(
        x, forward=lambda x: varying(x, "tensor"), backward=lambda ct: replicated(ct, "tensor")
    )


def backward_twice(x):
    return linear(x, forward=lambda x: varying(x, "tensor"), backward=twice)


def last_row_dropped(x):
    return x.at[-1].set(0)


def _times(grad, n):
    def wrapped(params, batch):
        loss, found = grad(params, batch)
        return loss, jax.tree.map(lambda g: g * n, found)

    return wrapped


def _alone(grad, axis):
    def wrapped(params, batch):
        loss, found = grad(varying(params, "data"), batch)
        return ring.all_mean(loss, "data"), jax.tree.map(lambda g: replicated(g, "data"), found)

    return wrapped


def _against(optimizer):
    def update(updates, state, params=None):
        updates, state = optimizer.update(updates, state, params)
        return jax.tree.map(jnp.negative, updates), state

    return optax.GradientTransformation(optimizer.init, update)


FAULTS = {
    "leave without its sum": (Parts(leave=unsummed), "layers.0.summed", "not summed", "none"),
    "a mean for leave's sum": (
        Parts(leave=own_mean),
        "layers.0.summed",
        "divided by 2",
        "all_mean",
    ),
    "leave's sum twice": (Parts(leave=twice), "layers.0.summed", "summed 2 times", "all_reduce"),
    "enter without its sum": (
        Parts(enter=no_sum_backward),
        f"the cotangent of layers.{L - 2}.out",
        "not summed",
        "none",
    ),
    "enter's sum twice": (
        Parts(enter=backward_twice),
        f"the cotangent of layers.{L - 2}.out",
        "",
        "over tensor",
    ),
    "rows of another device": (
        Parts(rows=moved),
        "in",
        "2 blocks of dim 0 in another order: [1, 0]",
        "ppermute over data",
    ),
    "another key": (
        Parts(key=lambda key: jax.random.fold_in(key, 7)),
        "layers.0.dropped",
        "another random key",
        "none",
    ),
    "a row lost": (Parts(rows=last_row_dropped), "in", "", "none"),
    "a sum for the data axis' mean": (
        Parts(averaged=lambda grad, axis: grads.summed(grad, axis, loss=True)),
        "gradients.blocks.down",
        "summed 2 times",
        "all_reduce",
    ),
    "microbatches summed": (
        Parts(
            accumulated=lambda grad, microbatches: _times(
                grads.accumulated(grad, microbatches=microbatches), microbatches
            )
        ),
        "gradients.blocks.down",
        "summed 2 times",
        "all_reduce",
    ),
    "gradients of one device": (
        Parts(averaged=_alone),
        "gradients.blocks.down",
        "have different copies",
        "none",
    ),
    "weights in float32": (
        Parts(
            weights=lambda weights: jax.tree.map(
                lambda w: w.astype("float32").astype(w.dtype), weights
            )
        ),
        "layers.0.down",
        "rounded to float32",
        "none",
    ),
    "an update against the gradient's sign": (
        Parts(update=_against),
        "result.0.model.blocks.down",
        "",
        "",
    ),
}


@pytest.mark.sweep(12)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named(name):
    parts, where, kind, collective = FAULTS[name]
    found = first(one_device(), tapped_net.run(parts, data=2, tensor=2, microbatches=2))
    assert str(found.key) == where
    assert kind in found.diagnosis
    said = str(found)
    assert found.program_slice is not None
    assert collective in "; ".join(found.collectives_between) or (
        collective == "none" and not found.collectives_between
    ), said
    assert said.startswith(f"{where} differs first")


WHOLE = P()


def purpose_run(devices, of=WHOLE, weights=WHOLE, joined=lambda x: x, grad=grads.averaged):
    """What `examples/wrong_on_purpose.py` trains, with taps: hidden units split as `of`, weights as
    `weights`."""
    specs = {"up": P(None, *weights), "down": weights}

    def loss(net, batch):
        hidden = bisect.tap(jnp.tanh(batch[0] @ net["up"]), "hidden", P("batch", *of))
        out = bisect.tap(joined(hidden @ net["down"]), "out", P("batch"))
        return bisect.tap(
            jnp.mean((out - batch[1]) ** 2), "loss", P(unreduced=frozenset({"batch"}))
        )

    def make():
        normal = lambda seed, *shape: jnp.asarray(
            np.random.default_rng(seed).standard_normal(shape)
        )
        found = grad(jax.value_and_grad(loss), ring("data"))

        def tapped(net, batch):
            value, gradients = found(net, batch)
            return value, bisect.tap_tree(gradients, "gradients", specs, way=bisect.AFTER)

        devices_ = mesh.make(devices=jax.devices()[:devices], data=devices)
        mapped = mesh.spmd(
            tapped, mesh=devices_, in_specs=(specs, P("data")), out_specs=(P(), specs)
        )
        return mapped, (
            {"up": normal(0, 4, 8), "down": normal(1, 8, 1)},
            (normal(2, 8, 4), normal(3, 8, 1)),
        )

    return make


def _meant(grad, axis):
    """The mean of gradients that `jax.grad` has summed already."""
    return lambda net, batch: lax.pmean(grad(net, batch), "data")


def _unchecked(grad, axis):
    """The loss is averaged, and each device keeps the gradients of its shares. `grads.averaged`
    would refuse the product of own rows with a share."""

    def unchecked(net, batch):
        value, gradients = grad(net, batch)
        return lax.pmean(value, "data"), gradients

    return unchecked


# Weights split over the data axis are refused, and the fourth mistake there is a step that waits
# for ever.
ON_PURPOSE = {
    "rows and weights split over one axis": (
        {
            "weights": P("data"),
            "of": P("data"),
            "joined": lambda x: ring.all_reduce(x, "data"),
            "grad": _unchecked,
        },
        "hidden",
        "not computed, at 75% of the places",
    ),
    "a sum where a mean belongs": (
        {"grad": _meant},
        "gradients.down",
        "summed 4 times: the size of data",
    ),
}


@pytest.mark.parametrize("name", ON_PURPOSE)
def test_what_is_wrong_on_purpose_is_named(name):
    options, where, kind = ON_PURPOSE[name]
    if options["grad"] is _unchecked:
        checked, arguments = purpose_run(4, **options | {"grad": grads.averaged})()
        with pytest.raises(ValueError, match=r"down, here of shape .2, 1., differs along 'data'"):
            jax.eval_shape(checked, *arguments)
    found = first(purpose_run(1), purpose_run(4, **options))
    assert str(found.key) == where
    assert kind in found.diagnosis


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_rounding_is_told_from_other_mistakes(dtype):
    right = np.random.default_rng(0).standard_normal((4, 8))
    rounded = np.asarray(jnp.asarray(right, dtype), np.float64)
    assert diagnose(right, rounded, {}, 1) == f"rounded to {dtype}"
    rounded[1, 1] *= 1.1
    assert "rounded" not in diagnose(right, rounded, {}, 1)


def test_a_factor_is_no_rounding():
    right = np.random.default_rng(0).standard_normal((4, 8))
    assert "times the right value" in diagnose(right, right * (1 + 2.0**-9), {}, 1)


@pytest.mark.parametrize("number", [0.0, -np.inf])
def test_a_factor_that_leaves_one_number_as_it_is_is_no_rounding(number):
    right = np.random.default_rng(0).standard_normal((4, 8))
    right[1, 2] = number
    assert "times the right value" in diagnose(right, right * (1 + 2.0**-9), {}, 1)
    rounded = np.asarray(jnp.asarray(right, jnp.bfloat16), np.float64)
    assert diagnose(right, rounded, {}, 1) == "rounded to bfloat16"


@pytest.mark.parametrize("dtype", ["int32", "bool", "key"])
def test_copies_of_whole_numbers_that_differ_are_reported(dtype):
    """Replicas may have drifted apart in a step's number or a random key too."""
    devices = mesh.make(data=2, devices=jax.devices()[:2])

    def run(differs):
        kind = "uint32" if dtype == "key" else dtype
        copies = np.zeros(4, kind), np.asarray([0, 0, differs, 0], kind)
        placed = [jax.device_put(x, d) for x, d in zip(copies, jax.devices()[:2], strict=True)]
        sharding = mesh.shardings(P(), devices)
        numbers = jax.make_array_from_single_device_arrays((4,), sharding, placed)
        if dtype == "key":
            numbers = jax.random.wrap_key_data(numbers, impl="rbg")
        return bisect.of_tree({"step": numbers})

    assert bisect.compare(run(False), run(False)).first is None
    found = bisect.compare(run(False), run(True)).first
    assert str(found.key) == "result.step"
    assert "different copies" in found.diagnosis


def test_imaginary_parts_are_compared():
    def run(factor):
        def step(x):
            return jnp.fft.ifft(bisect.tap(jnp.fft.fft(x) * factor, "spectrum", P())).real

        return lambda: (step, (jnp.arange(8.0),))

    assert bisect.compare(run(1), run(1)).first is None
    found = bisect.compare(run(1), run(jnp.asarray([1, 1, 1, 1, 1, 1, 1, 1j]))).first
    assert (str(found.key), found.index) == ("spectrum", (7, 0))


@pytest.mark.sweep(3, "wholes")
def test_the_microbatch_and_the_number_are_named():
    off = lambda x: x.at[1].multiply(2)  # of each microbatch on each device, the second row
    found = first(one_device(), tapped_net.run(Parts(rows=off), data=2, microbatches=2))
    row, column = found.index
    assert row % 2 == 1
    assert found.microbatch == row // 2 % 2
    assert found.wrong == pytest.approx(2 * found.right)
    assert one_device().values[bisect.Key("in", -1, "forward")].whole[row, column] == found.right


@pytest.mark.sweep(3, "wholes")
def test_other_arguments_are_named_before_all_else():
    _, (state, (rows, targets, keys)) = tapped_net.run(data=2)()
    found = first(
        one_device(), lambda: (tapped_net.run(data=2)()[0], (state, (rows, 2 * targets, keys)))
    )
    assert str(found.key) == "argument.1.1"
    assert "given different arguments; summed 2 times" in found.diagnosis
    assert found.program_slice is None


def own_step():
    step, arguments = tapped_net.run(data=2, tensor=2)()
    return jax.jit(step), arguments


def gpt2_step():
    config = gpt2.Config(
        layers=1, heads=2, width=8, context=4, vocabulary=16, vocabulary_multiple=16
    )
    with jax.numpy_dtype_promotion(
        "standard"
    ):  # optax mixes float32 schedules with float64 weights
        return decoder_run(gpt2.FAMILY, config, Layout(data=2))()


@pytest.mark.parametrize("made", [own_step, pytest.param(gpt2_step, marks=pytest.mark.long)])
def test_taps_cost_nothing_when_off(made):
    """The text of a step is that of the same step with every tap taken out."""
    untapped = _lowered(*made())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bisect, "tap", lambda x, *_, **__: x)
        patch.setattr(bisect, "tap_tree", lambda tree, *_, **__: tree)
        assert _lowered(*made()) == untapped
    assert "callback" not in untapped


def _lowered(train, arguments):
    with jax.numpy_dtype_promotion("standard"):
        return train.lower(*arguments).as_text()


def test_a_record_is_saved_and_read(tmp_path):
    one_device().save(tmp_path / "run.npz")
    stored = bisect.load(tmp_path / "run.npz")
    assert bisect.compare(one_device(), stored).worst[0] == 0
    wrong = bisect.record(tapped_net.run(Parts(leave=own_mean), tensor=2))
    assert str(first(stored, wrong).key) == "layers.0.summed"
    found = first(wrong, stored)
    assert "summed 2 times" in found.diagnosis
    assert found.program_slice is None


def test_a_record_has_the_name_that_was_given(tmp_path):
    """NumPy would write "run.rec.npz". Complex numbers are read too."""
    made = bisect.of_tree({"spectrum": jnp.asarray([1j, 2])})
    made.save(tmp_path / "run.rec")
    stored = bisect.load(tmp_path / "run.rec")
    assert bisect.compare(made, stored).first is None
    np.testing.assert_array_equal(
        stored.values[bisect.Key("result.spectrum", -1, "result")][0], [1j, 2]
    )


def test_a_record_has_what_a_value_has(tmp_path):
    value = bisect.Value(np.ones((4, 3)), {"data": 0.5}, (0, 2), True)
    key = bisect.Key("h", 1, "forward")
    bisect.Record({key: value}, {"data": 2}, 2).save(tmp_path / "run.npz")
    assert bisect.load(tmp_path / "run.npz").values[key][1:] == value[1:]


def test_a_record_of_an_older_version_is_read(tmp_path):
    """It does not say whether a device reported several values of one name."""
    head = {"sizes": {}, "microbatches": 1, "values": [["x", -1, "forward", {}, [0, 3]]]}
    np.savez(tmp_path / "run.npz", head=np.array(json.dumps(head)), **{"0": np.ones(3)})
    (value,) = bisect.load(tmp_path / "run.npz").values.values()
    assert value[1:] == ({}, (0, 3), False)


@pytest.mark.parametrize("wrong", [2.0, np.nan])
def test_one_number_that_differs_is_described(wrong):
    def run(factor):
        return (lambda x: bisect.tap(factor * x, "loss", P())), (jnp.ones(()),)

    found = first(lambda: run(1.0), lambda: run(wrong))
    assert (str(found.key), found.index) == ("loss", ())
    np.testing.assert_equal((found.right, found.wrong), (1.0, wrong))


def test_equal_infinite_numbers_are_no_difference():
    """Masked scores are -inf in both runs."""
    right = {"scores": jnp.asarray([-jnp.inf, 1, 2]), "sums": jnp.asarray([1.0, 2, 3])}
    assert bisect.compare(bisect.of_tree(right), bisect.of_tree(right)).first is None
    found = first(bisect.of_tree(right), bisect.of_tree(right | {"scores": 2 * right["scores"]}))
    assert (found.index, found.right, found.wrong, found.off) == ((2,), 2, 4, 1)
    assert "summed 2 times" in found.diagnosis
    found = first(bisect.of_tree(right), bisect.of_tree(right | {"sums": 2 * right["sums"]}))
    assert str(found.key) == "result.sums"  # an infinite number beside it allows no more
    lost = jnp.asarray([0.0, 1, 2])
    assert first(bisect.of_tree(right), bisect.of_tree(right | {"scores": lost})).index == (0,)


def test_equal_places_without_a_number_are_no_difference():
    """Padding, or a run that diverged in both layouts."""
    right = {"padded": jnp.asarray([1, jnp.nan, 3]), "sums": jnp.asarray([1.0, 2, 3])}
    assert bisect.compare(bisect.of_tree(right), bisect.of_tree(right)).first is None
    found = first(bisect.of_tree(right), bisect.of_tree(right | {"sums": 2 * right["sums"]}))
    assert str(found.key) == "result.sums"
    found = first(bisect.of_tree(right), bisect.of_tree(right | {"padded": 2 * right["padded"]}))
    assert (found.index, found.diagnosis) == ((2,), "summed 2 times")
    moved = jnp.asarray([jnp.nan, 1, 3])
    assert first(bisect.of_tree(right), bisect.of_tree(right | {"padded": moved})).index == (0,)


def test_the_block_has_every_number_that_is_not_a_number():
    right = np.array([np.nan, 1, 1, 1, 1])
    wrong = np.array([3, np.nan, 2, 1, 1])
    assert diagnose(right, wrong, {}, 1) == "wrong in the block [0:3] alone"


def test_blocks_of_a_mask_are_no_order():
    right = np.array([-np.inf, 1, 1, 1])
    assert diagnose(right, np.array([-np.inf, 2, 1, 1]), {"data": 2}, 1) == (
        "wrong in the block [1:2] alone"
    )
    assert "in another order: [1, 0]" in diagnose(right, np.roll(right, 2), {"data": 2}, 1)


@pytest.mark.parametrize("way", ["result", "tap"])
def test_a_copy_with_a_nan_differs(way):
    devices = mesh.make(data=2, devices=jax.devices()[:2])

    def run(number):
        copies = np.ones(3), np.asarray([1, number, 1], float)
        placed = [jax.device_put(x, d) for x, d in zip(copies, devices.devices.flat, strict=True)]
        sharding = mesh.shardings(P(), devices)
        x = jax.make_array_from_single_device_arrays((3,), sharding, placed)
        if way == "result":
            return bisect.of_tree({"x": x})
        tapped = mesh.spmd(
            lambda x: bisect.tap(x, "x", P()), mesh=devices, in_specs=P(), out_specs=P()
        )
        return bisect.record(lambda: (jax.jit(tapped), (x,)))

    assert bisect.compare(run(1), run(1)).first is None
    assert "different copies" in first(run(1), run(np.nan)).diagnosis


def test_equal_copies_with_a_nan_are_equal_copies():
    x = jax.device_put(jnp.asarray([1, jnp.nan]), mesh.shardings(P(), mesh.make(data=8)))
    assert (
        "copies"
        not in first(bisect.of_tree({"x": jnp.ones(2)}), bisect.of_tree({"x": x})).diagnosis
    )


@pytest.mark.long
@pytest.mark.parametrize(("more", "few"), [("float64", "float32"), ("float32", "bfloat16")])
def test_few_bits_have_bounds_of_their_own(more, few):
    exact, short = (
        bisect.record(tapped_net.run(dtype=more)),
        bisect.record(tapped_net.run(dtype=few)),
    )
    assert bisect.compare(exact, short).first is not None
    bounds = bisect.rounding(exact, short)
    split = {"data": 2, "tensor": 2, "microbatches": 2, "dtype": few}
    found = bisect.compare(exact, tapped_net.run(**split), bound=bounds)
    assert found.first is None, str(found)
    wrong = first(exact, tapped_net.run(Parts(leave=own_mean), **split), bound=bounds)
    assert str(wrong.key) == "layers.0.summed"


def test_second_moments_are_not_measured_by_first_moments():
    """They are squares: a wrong one may be smaller than a rounding error of a first moment."""
    state = lambda nu: ({"optimizer": ({"mu": np.array([1.0]), "nu": np.array([nu])},)},)
    found = bisect.compare(*map(bisect.of_tree, map(state, (1e-6, 2e-6))), bound=1e-2)
    assert found.first is not None
    assert found.first.key.path == "result.0.optimizer.0.nu"


@pytest.mark.long
def test_two_checkpoints_are_compared(tmp_path):
    make, (state, batch) = tapped_net.run(data=2, zero=1)()
    like = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state
    )
    new, _ = jax.jit(make)(state, batch)
    with Checkpoints(tmp_path, settings={}, say=lambda line: None) as store:
        store.save(1, new)
    found = Checkpoints(tmp_path, settings={}, say=lambda line: None).restore(like)
    assert found is not None
    restored = found.state
    assert bisect.compare(bisect.of_tree(new), bisect.of_tree(restored)).first is None
    found = first(bisect.of_tree(state), bisect.of_tree(restored))
    assert str(found.key) == "result.model.blocks.down"


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
    with pytest.raises(ValueError, match="maps the number of the layer"):
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


def _scanned(c, w):
    return bisect.tap(jnp.tanh(c * w), "h"), None


@pytest.mark.parametrize("kind", [jax.jit, jax.checkpoint])
def test_traces_are_not_shared_with_a_recording(kind):
    """JAX would use its first trace of a function again: without taps, or with those of an earlier
    record."""
    entered = kind(lambda x: bisect.tap(x + 1, "in"))

    def layer(x, w):
        return bisect.tap(jnp.tanh(x * w), "h"), None

    def step(x, w):
        return bisect.tap(lax.scan(layer, entered(x), w)[0], "out")

    def tapped(f):
        made = bisect.record(lambda: (f, arguments))
        return [key.path for key in made.values if key.way == "forward"]

    arguments, jitted = (jnp.ones(3), jnp.ones((2, 3))), jax.jit(step)
    assert tapped(step) == tapped(step) == ["in", "h", "out"]
    assert "callback" not in _lowered(jitted, arguments)
    jitted(*arguments)
    assert tapped(jitted) == ["in", "h", "out"]


def test_values_of_one_name_are_reported():
    """Only the first of them is compared."""

    def twice(factor):
        x = lambda x: bisect.tap(x * 2, "h", P("batch"))
        return lambda: (lambda y: bisect.tap(3 * factor * x(y), "h", P("batch")), (jnp.ones(3),))

    def loop(x, w):
        return lax.scan(_scanned, x, w)[0]

    def numbered_loop(x, w):
        def layer(x, each):
            with bisect.at(layer=each[1]):
                return _scanned(x, each[0])

        return lax.scan(layer, x, (w, jnp.arange(2)))[0]

    found = bisect.compare(twice(1), twice(5))
    assert found.first_of_several == ("h",)
    assert "\nOnly the first of several values was compared of: h. Give each" in str(found)
    arguments = jnp.ones(3), jnp.asarray([[0.5] * 3, [2.0] * 3])
    looped, numbered, again = (
        bisect.record(lambda f=f: (f, arguments))
        for f in (loop, numbered_loop, jax.grad(lambda x, w: jnp.sum(jax.checkpoint(loop)(x, w))))
    )
    assert bisect.compare(looped, looped).first_of_several == ("h",)
    assert not bisect.compare(numbered, numbered).first_of_several
    assert bisect.compare(again, again).first_of_several == ("h",)


def test_a_value_that_is_computed_again_is_one_value():
    run = lambda: (
        jax.grad(jax.checkpoint(lambda x: jnp.sum(bisect.tap(jnp.tanh(x), "h") ** 2))),
        (jnp.linspace(0, 1, 4),),
    )
    assert not bisect.compare(run, run).first_of_several


def scaled_gradient(microbatches):
    """The accumulated gradient of a mean of squares, with a tap in each microbatch."""

    def loss(w, x):
        return jnp.mean(bisect.tap(x * w[None], "scaled", P("batch")) ** 2)

    return grads.accumulated(jax.value_and_grad(loss), microbatches=microbatches)


def test_rows_outside_of_the_loop_over_microbatches_are_whole():
    """The loss of a microbatch has a tap too, so that the run has several."""

    def run(microbatches):
        grad = scaled_gradient(microbatches)

        def step(w, x):
            return grad(w, bisect.tap(x * 2, "in", P("batch")))

        return lambda: (step, (jnp.ones(3), jnp.arange(12.0).reshape(4, 3)))

    found = bisect.compare(run(1), run(2))
    assert found.first is None, str(found)
    values = bisect.record(run(2)).values
    assert values[bisect.Key("in", -1, "forward")].rows is None
    assert values[bisect.Key("scaled", -1, "forward")].rows == (0, 2)


def test_a_loss_outside_of_the_loop_over_microbatches_is_no_term():
    """It is their mean already."""

    def run(microbatches):
        grad = scaled_gradient(microbatches)

        def step(w, x):
            value, found = grad(w, x)
            return bisect.tap(value, "loss", P(unreduced=frozenset({"batch"}))), found

        return lambda: (step, (jnp.ones(3), jnp.arange(12.0).reshape(4, 3)))

    found = bisect.compare(run(1), run(2))
    assert found.first is None, str(found)


def test_a_name_of_one_axis_is_that_axis():
    """An axis in both `rows` and `means` counts once."""
    world, x = mesh.make(data=2, devices=jax.devices()[:2]), jnp.arange(8.0)
    f = lambda x: jnp.sum(bisect.tap(x * 2, "h", P("batch")) ** 2)
    one = lambda: (jax.grad(lambda x: f(x) / 8), (x,))
    split = mesh.spmd(
        jax.grad(lambda x: f(x) / 4), mesh=world, in_specs=P("data"), out_specs=P("data")
    )
    key = bisect.Key("h", -1, "backward")
    for options in ({}, {"rows": "data"}, {"means": "data"}, {"means": ("data",)}):
        made = bisect.record(lambda: (split, (x,)), **options)
        right = bisect.record(one).values[key].whole
        np.testing.assert_array_equal(made.values[key].whole, right)


def test_bounds_may_be_any_number_and_unknown_options_are_refused():
    record = bisect.of_tree({"x": jnp.ones(3)})
    assert bisect.compare(record, record, bound=np.float32(0.1)).first is None
    with pytest.raises(TypeError, match="bounds"):
        bisect.compare(record, record, bounds=0.1)  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize("beside", ["a key", "a count"])
def test_whole_numbers_allow_no_more_beside_them(beside):
    """A difference may be small relative to the largest float of the same kind only."""
    whole = (
        jax.random.key_data(jax.random.split(jax.random.key(3))[0])
        if beside == "a key"
        else jnp.asarray(100000)
    )
    made = lambda w: bisect.of_tree({"model": {"net": {"w": w, "whole": whole}}})
    w = jnp.full(3, 0.02)
    assert str(first(made(w), made(w * 1.001), bound=1e-4).key) == "result.model.net.w"


def test_leaves_of_one_path_are_refused():
    said = r"two arrays have the same path, result\.a\.b: rename one of them"
    with pytest.raises(ValueError, match=said):
        bisect.of_tree({"a.b": jnp.ones(3), "a": {"b": jnp.ones(3)}})


def test_mapped_places_are_refused_by_name():
    def placed(x, places):
        return bisect.tap(x, "x", places={0: places})

    with pytest.raises(
        ValueError, match=r"vmap maps the argument `places` of the tap x\. Pass `places`"
    ):
        bisect.record(lambda: (jax.vmap(placed), (jnp.zeros((2, 3)), jnp.arange(6).reshape(2, 3))))


def test_places_count_dims_from_the_last_too():
    """Each device has every second column, so the whole value has the columns in their order."""
    world, x = mesh.make(data=2, devices=jax.devices()[:2]), jnp.arange(12.0).reshape(3, 4)

    def whole(dim):
        def placed(x):
            """Sends nothing: `x` has the columns 0, 2 on one device, and 1, 3 on the other."""
            positions = jax.lax.axis_index("data") + 2 * jnp.arange(2, dtype=jnp.int32)
            return bisect.tap(x, "x", P(None, "data"), places={dim: positions})

        f = mesh.spmd(placed, mesh=world, in_specs=P(None, "data"), out_specs=P(None, "data"))
        made = bisect.record(lambda: (jax.jit(f), (x[:, jnp.asarray([0, 2, 1, 3])],)))
        return made.values[bisect.Key("x", -1, "forward")].whole

    np.testing.assert_array_equal(whole(1), x)
    np.testing.assert_array_equal(whole(-1), x)


@pytest.mark.parametrize(("dim", "count"), [(2, 3), (-3, 3), (1, 2)])
def test_places_that_do_not_fit_the_value_are_refused(dim, count):
    placed = lambda x: bisect.tap(x, "x", places={dim: jnp.arange(count)})
    said = (
        rf"bisect.tap: each entry of `places` needs a dim of x, whose shape is \(2, 3\), and one "
        rf"position for each element along this dim; got dim {dim} and positions of shape "
        rf"\({count},\)\. Pass"
    )
    with pytest.raises(ValueError, match=said):
        bisect.record(lambda: (placed, (jnp.zeros((2, 3)),)))


def test_each_call_of_one_function_is_followed():
    """JAX uses one jaxpr for all of them, one inside another too."""
    halved = jax.jit(lambda x: x / 2)
    outer = jax.jit(lambda x: halved(x) + 1)

    def step(a, b, c, d):
        a, b, c, d = (taps.tap(x, path) for x, path in zip((a, b, c, d), "abcd", strict=True))
        return halved(a) + halved(b) + outer(c) + outer(d)

    with taps.recording():
        program = jax.make_jaxpr(step)(*[jnp.ones(3)] * 4).jaxpr
    found = before_result(program, 0)
    assert sorted(path for path, _ in found.taps) == ["a", "b", "c", "d"]


def test_what_a_branch_and_a_loop_take_is_followed():
    """Their operands stand in another order than the inputs of the jaxprs inside them."""

    def branch(a, b, c, d):
        return lax.cond(a[0] > 0, lambda b, c: taps.tap(2 * c, "seen"), lambda b, c: b, b, c)

    def loop(a, b, c, d):
        def step(carry):
            i, x, y = carry
            # `a` and `c` are constants of the condition and of the body. The carry `y` becomes `x`.
            return i + 1, y, taps.tap(2 * x, "seen") + c

        return lax.while_loop(lambda carry: carry[0] < a[0], step, (0, b, d))

    for f, before in ((branch, ["c"]), (loop, ["b", "c", "d", "seen"])):

        def program_of(*arrays, f=f):
            return f(*(taps.tap(x, path) for x, path in zip(arrays, "abcd", strict=True)))

        with taps.recording():
            program = jax.make_jaxpr(program_of)(*[jnp.ones(3)] * 4).jaxpr
        found = before_tap(program, "seen", "forward")
        assert sorted(path for path, _ in found.taps) == before


def _summed(x):
    return ring.all_reduce(jnp.sum(x), "data")


@pytest.mark.parametrize("kind", ["cond", "while"])
def test_a_map_inside_a_branch_or_a_loop_is_followed(kind):
    """Its collectives are traced again over the axes of the map inside."""
    world = mesh.make(data=4, devices=jax.devices()[:4])
    specs = {"mesh": world, "in_specs": P("data")}
    tapped = mesh.spmd(lambda x: bisect.tap(x, "x", P("batch")), **specs, out_specs=P("data"))
    summed = mesh.spmd(_summed, **specs, out_specs=P())

    def split(x):
        x = tapped(x)
        if kind == "cond":
            return 2 * lax.cond(x[0] < 5, summed, jnp.sum, x)
        once = lambda carry: (carry[0] + 1, 2 * summed(x))
        return lax.while_loop(lambda carry: carry[0] < 1, once, (0, jnp.zeros(())))[1]

    one = lambda x: jnp.sum(bisect.tap(x, "x", P("batch")))
    x = jnp.arange(8.0)
    found = first(*(lambda f=f: (f, (x,)) for f in (one, split)))
    (collective,) = found.collectives_between
    assert collective.startswith("all_reduce over data in test_bisect.py")


def test_a_tap_outside_of_the_map_is_refused():
    """The compiler would end with an internal error."""
    world = mesh.make(data=4, devices=jax.devices()[:4])
    summed = mesh.spmd(_summed, mesh=world, in_specs=P("data"), out_specs=P())
    run = lambda: (lambda x: bisect.tap(summed(x), "total"), (jnp.arange(8.0),))
    said = (
        r"^bisect.tap: total is outside of mesh.spmd, in a program that runs on 4 devices. Call "
        r"the tap inside mesh.spmd, on each device's block.$"
    )
    with pytest.raises(ValueError, match=said):
        bisect.record(run)


def test_a_dim_of_vmap_is_the_batch():
    double = lambda x: 2 * bisect.tap(x, "x")
    made = bisect.record(lambda: (jax.vmap(double), (jnp.arange(6.0).reshape(3, 2),)))
    value = made.values[bisect.Key("x", -1, "forward")]
    assert value.whole.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert value.rows == (0, 3)


@pytest.mark.parametrize(
    "second",
    [
        lambda loss: jax.jacfwd(jax.grad(loss)),
        lambda loss: jax.grad(lambda x: jnp.sum(jax.grad(loss)(x) ** 2)),
        lambda loss: lambda x: jax.jvp(jax.grad(loss), (x,), (jnp.ones_like(x),))[1],
    ],
    ids=["hessian", "grad of grad", "along a direction"],
)
def test_of_a_second_derivative_the_first_is_recorded(second):
    """A cotangent of another derivative is not added to that of the first."""
    loss = lambda x: jnp.sum(bisect.tap(jnp.tanh(x), "h") ** 3)
    x = jnp.linspace(0.1, 1, 4)
    once, twice = (bisect.record(lambda f=f: (f(loss), (x,))) for f in (jax.grad, second))
    assert once.values.keys() - twice.values.keys() == set()
    for way in ("forward", "backward"):
        key = bisect.Key("h", -1, way)
        np.testing.assert_array_equal(twice.values[key].whole, once.values[key].whole)


def test_a_tap_calls_nothing_of_jax_while_the_program_runs():
    """What waits for one of JAX's threads in a callback waits for ever where the callbacks of other
    devices hold them all."""
    devices, x = mesh.make(data=8), jnp.arange(8.0)

    def f(x):
        return bisect.tap(x, "x", P(bisect.BATCH)) * 2

    with taps.recording() as recorder:
        program = (
            jax.jit(mesh.spmd(f, mesh=devices, in_specs=P("data"), out_specs=P("data")))
            .trace(x)
            .lower()
            .compile()
        )
        x = jax.device_put(x, program.input_shardings[0][0])
        try:
            jax.config.update(
                "jax_transfer_guard", "disallow_explicit"
            )  # not the context, which other threads do not see
            jax.block_until_ready(program(x))
            jax.effects_barrier()
        finally:
            jax.config.update("jax_transfer_guard", "allow")
    assert sorted(float(report.value[0]) for report in recorder.reports) == list(range(8))
    assert {type(report.value) for report in recorder.reports} == {np.ndarray}


@pytest.mark.parametrize("kind", ["archive", "array", "text", "empty", "cut", "phase", "objects"])
def test_another_file_is_no_record(tmp_path, kind):
    """It ended in a KeyError, say, whose text was the name of an entry."""
    path = tmp_path / "other.npz"
    head = {"sizes": {}, "microbatches": 1, "values": [["x", -1, "sideways", {}, None]]}
    match kind:
        case "archive":
            np.savez(path, x=np.ones(3))
        case "array":
            with path.open("wb") as file:
                np.save(file, np.ones(3))
        case "text" | "empty":
            path.write_text("" if kind == "empty" else "no archive")
        case "cut":
            bisect.of_tree({"x": jnp.ones(1000)}).save(path)
            path.write_bytes(path.read_bytes()[:-40])
        case "phase":
            np.savez(path, head=np.array(json.dumps(head)), **{"0": np.ones(3)})
        case "objects":
            np.savez(path, head=np.array([head], object))
    with pytest.raises(
        ValueError,
        match=r"other\.npz: needed a record that bisect's Record\.save wrote; got another file",
    ):
        bisect.load(path)


def test_a_record_of_another_model_is_compared(tmp_path):
    bisect.of_tree({"x": jnp.ones(3), "y": jnp.ones((2, 2))}).save(tmp_path / "run.npz")
    found = first(
        bisect.load(tmp_path / "run.npz"), bisect.of_tree({"x": jnp.ones(5), "y": jnp.ones((2, 2))})
    )
    assert "result.x" in str(found)
