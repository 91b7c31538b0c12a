"""Islands that talk seldom: equal to a reference in NumPy, and to data parallelism and one run
where they should be."""

import functools
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from reference import EXACT, assert_close

from parallax import grads, islands, mesh, rules, step, tensor
from parallax.collectives import ring, xla
from parallax.collectives.int8 import ErrorFeedback
from parallax.islands import fragments

# In float64. One step of SGD twice: the same sums in another order, a few roundings.
SAME = 1e-13
ROWS, WIDTH, HIDDEN = 16, 4, 32


class Net(eqx.Module):
    up: jax.Array
    down: jax.Array
    shift: jax.Array  # frozen
    activation: object = jnp.tanh


def net():
    up, down = jax.random.split(jax.random.key(0))
    return Net(
        0.3 * jax.random.normal(up, (WIDTH, HIDDEN), jnp.float64),
        0.3 * jax.random.normal(down, (HIDDEN, 1), jnp.float64),
        jnp.full(1, 0.25, jnp.float64),
    )


SPECS = rules.first(
    rules.match("up", P(None, "tensor")), rules.match("down", P("tensor")), rules.match("**", P())
)
TRAINED = Net(True, True, False, False)


def loss(model, batch, axis=()):
    x, y = batch
    hidden = model.activation(tensor.column(x, model.up, None, axis))
    return jnp.mean((tensor.row(hidden, model.down, None, axis) + model.shift[None] - y) ** 2)


def grad_of(axis):
    def grad(model, batch):
        trained, rest = eqx.partition(model, TRAINED)
        return jax.value_and_grad(lambda trained: loss(eqx.combine(trained, rest), batch, axis))(
            trained
        )

    return grad


def batch(seed, number):
    x = np.random.default_rng((seed, number)).normal(size=(ROWS, WIDTH))
    return x, np.sin(x[:, :1])


class Case(NamedTuple):
    """A program of islands."""

    sizes: tuple[int, int, int]  # islands, data, tensor
    every: int
    inner: optax.GradientTransformation
    outer: optax.GradientTransformation
    stream: islands.Stream = islands.ALL_AT_ONCE
    feedback: bool = False
    algorithm: object = ring
    max_norm: float | None = 0.2  # most steps are clipped


@functools.cache
def program(case):
    """The state and the step of a case."""
    sizes = dict(zip(("island", "data", "tensor"), case.sizes, strict=True))
    mesh_ = mesh.make(**sizes, devices=jax.devices()[: int(np.prod(case.sizes))])
    train = step.make(
        grads.averaged(grad_of(case.algorithm("tensor")), case.algorithm("data")),
        case.inner,
        max_norm=case.max_norm,
    )
    axis = ErrorFeedback("island") if case.feedback else case.algorithm("island")
    train = islands.local(train, case.outer, every=case.every, axis=axis, stream=case.stream)
    with jax.numpy_dtype_promotion("standard"):
        state, specs = step.init(net, case.inner, SPECS, mesh_, trainable=TRAINED)
        state, specs = islands.init(
            state, specs, case.outer, mesh_, axis=axis, stream=case.stream, trainable=TRAINED
        )
    over = P(("island", "data"))
    run = mesh.spmd(
        train, mesh=mesh_, in_specs=(specs, over, P(), P()), out_specs=(specs, P("island"))
    )
    jitted = eqx.filter_jit(run)

    def call(state, batch, present):
        with jax.numpy_dtype_promotion("standard"):
            return jitted(state, batch, None, None if present is None else jnp.asarray(present))

    return state, call


def trained(case, seed, steps, present=None):
    """Losses [steps, islands], and the state after the steps."""
    state, run = program(case)
    losses = []
    for number in range(steps):
        state, info = run(state, batch(seed, number), None if present is None else present[number])
        losses.append(np.asarray(info.loss))
    return np.stack(losses), state


# By hand, in NumPy


def numpy_grad(w, batch):
    x, y = batch
    h = np.tanh(x @ w["up"])
    apart = h @ w["down"] + 0.25 - y
    d = 2 * apart / apart.size
    return np.mean(apart**2), {"up": x.T @ (d @ w["down"].T * (1 - h**2)), "down": h.T @ d}


class NumpyAdamW:
    def __init__(self, rate):
        self.rate, self.count, self.m, self.v = rate, 0, {}, {}

    def __call__(self, w, g):
        self.count += 1
        for k in w:
            self.m[k] = 0.9 * self.m.get(k, 0) + 0.1 * g[k]
            self.v[k] = 0.999 * self.v.get(k, 0) + 0.001 * g[k] ** 2
            m, v = self.m[k] / (1 - 0.9**self.count), self.v[k] / (1 - 0.999**self.count)
            w[k] = w[k] - self.rate * (m / (np.sqrt(v) + 1e-6) + 1e-4 * w[k])


def by_hand(n, every, fragments, delay, mixing, seed, steps, present):
    """AdamW inside, Nesterov(0.7, 0.9) outside; `fragments` are lists of leaves."""
    start = net()
    outer = {"up": np.asarray(start.up), "down": np.asarray(start.down)}
    inner, momentum, sent = [dict(outer) for _ in range(n)], {"up": 0.0, "down": 0.0}, {}
    optimizers, losses = [NumpyAdamW(1e-2) for _ in range(n)], []
    for number in range(1, steps + 1):
        parts = [tuple(np.split(leaf, n)[i] for leaf in batch(seed, number - 1)) for i in range(n)]
        values = []
        for w, part, optimizer in zip(inner, parts, optimizers, strict=True):
            value, g = numpy_grad(w, part)
            norm = np.sqrt(sum(np.sum(leaf**2) for leaf in g.values()))
            optimizer(w, {k: leaf * min(1.0, 0.2 / norm) for k, leaf in g.items()})
            values.append(value)
        losses.append(values)
        for f, names in enumerate(fragments):
            offset = every * f // len(fragments)
            if (number - offset) % every == 0:
                here = [i for i in range(n) if present[number - 1][i]]
                sent[f] = (
                    here,
                    {
                        k: sum(outer[k] - inner[i][k] for i in here) / max(len(here), 1)
                        for k in names
                    },
                )
            if number > delay and (number - delay - offset) % every == 0 and sent[f][0]:
                here, delta = sent[f]
                for k in names:
                    momentum[k] = delta[k] + 0.9 * momentum[k]
                    outer[k] = outer[k] - 0.7 * (delta[k] + 0.9 * momentum[k])
                    for i in here:
                        inner[i][k] = mixing * inner[i][k] + (1 - mixing) * outer[k]
    return np.array(losses), outer, inner


ADAMW = optax.adamw(1e-2, eps=1e-6)
NESTEROV = islands.outer_nesterov()
APART = islands.by_path("up", "down")
CASES = {
    "island 2 x data 2 x tensor 2": (Case((2, 2, 2), 3, ADAMW, NESTEROV), [("up", "down")]),
    "fragments, delay, mixing": (
        Case(
            (4, 1, 1),
            4,
            ADAMW,
            NESTEROV,
            islands.Stream(APART, delay=1, mixing=0.25),
            algorithm=xla,
        ),
        [("up",), ("down",)],
    ),
    "fragments": (Case((2, 1, 2), 3, ADAMW, NESTEROV, islands.Stream(APART)), [("up",), ("down",)]),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("case", "fragments"), CASES.values(), ids=CASES)
@settings(max_examples=4, phases=[Phase.explicit, Phase.generate])
@given(data=st.data())
def test_islands_are_those_of_numpy(case, fragments, data):
    """AdamW inside, Nesterov outside, whoever is away in which round."""
    n, steps = case.sizes[0], 10
    seed = data.draw(st.integers(0, 2**16))
    present = data.draw(
        st.lists(st.lists(st.booleans(), min_size=n, max_size=n), min_size=steps, max_size=steps)
    )
    losses, state = trained(case, seed, steps, present)
    stream = case.stream
    expected, outer, inner = by_hand(
        n, case.every, fragments, stream.delay, stream.mixing, seed, steps, present
    )
    np.testing.assert_allclose(losses, expected, rtol=EXACT)
    assert_close({"up": state.model.up, "down": state.model.down}, outer, EXACT)
    for i in range(n):
        mine = {"up": state.inner.model.up[i], "down": state.inner.model.down[i]}
        assert_close(mine, inner[i], EXACT)
    np.testing.assert_array_equal(state.inner.model.shift, np.full((n, 1), 0.25))
    assert int(state.step) == steps


@pytest.mark.sweep(3, "wholes")
def test_a_round_every_step_is_data_parallelism():
    """SGD inside, SGD(1.0) outside; clipping off, since each island would clip by its own norm."""
    rate = 0.1
    one = eqx.filter_jit(grad_of(()))
    case = Case((2, 2, 2), 1, optax.sgd(rate), optax.sgd(1.0), max_norm=None)
    losses, state = trained(case, 3, 6)
    model = net()
    for number in range(6):
        value, g = one(model, batch(3, number))
        np.testing.assert_allclose(losses[number].mean(), value, rtol=SAME)
        model = eqx.apply_updates(model, jax.tree.map(lambda g: -rate * g, g))
    arrays = lambda tree: eqx.filter(tree, eqx.is_array)
    assert_close(arrays(islands.joint_model(state)), arrays(model), SAME)


@pytest.mark.sweep(3, "wholes")
def test_one_island_is_the_inner_run():
    case = Case((1, 2, 2), 3, ADAMW, optax.sgd(1.0))
    losses, state = trained(case, 5, 7)
    w, optimizer, expected = (
        {"up": np.asarray(net().up), "down": np.asarray(net().down)},
        NumpyAdamW(1e-2),
        [],
    )
    for number in range(7):
        value, g = numpy_grad(w, batch(5, number))
        norm = np.sqrt(sum(np.sum(leaf**2) for leaf in g.values()))
        optimizer(w, {k: leaf * min(1.0, 0.2 / norm) for k, leaf in g.items()})
        expected.append([value])
    np.testing.assert_allclose(losses, expected, rtol=SAME)
    # W - (W - w) is w but for a rounding of W's size.
    assert_close({"up": state.inner.model.up[0], "down": state.inner.model.down[0]}, w, SAME)


@pytest.mark.sweep(3, "wholes")
def test_int8_carries_what_it_rounds_away():
    """After one round with SGD(1.0) the exact weights are those of int8 less the mean of what the
    devices still owe."""
    exact = Case((4, 1, 2), 2, ADAMW, optax.sgd(1.0))
    present = [[True, True, False, True]] * 2
    _, plain = trained(exact, 7, 2, present)
    _, state = trained(exact._replace(feedback=True), 7, 2, present)
    owed = jax.tree.map(lambda x: np.asarray(x).sum(0) / 3, state.error[0])
    apart = jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), state.model, plain.model)
    assert_close(apart, owed, 1e-9)  # of numbers of 1e-5, between weights of 1
    assert np.max(np.abs(owed.up)) > 1e-7
    last, owed_before = state.model, state.error
    for _ in range(2):
        state, _ = program(exact._replace(feedback=True))[1](state, batch(7, 9), [False] * 4)
    assert_close(state.model, last, 0)  # where none is there, nothing moves
    assert_close(state.error, owed_before, 0)  # and what is owed stays owed


def test_layers_as_fragments():
    """Slices of stacked leaves, and what is no block: together they are the model, and each has its
    turn."""
    model = {"blocks": {"w": jnp.arange(10.0).reshape(5, 2)}, "ends": jnp.arange(3.0)}
    made = islands.by_layers(2, where=lambda model: model["blocks"])
    found = made(model)
    sizes = [[leaf.size for leaf in jax.tree.leaves(part.get(model))] for part in found]
    assert sizes == [[4], [6], [3]]
    zeros = jax.tree.map(jnp.zeros_like, model)
    filled = functools.reduce(lambda tree, part: part.put(tree, part.get(model)), found, zeros)
    assert_close(filled, model, 0)


@pytest.mark.sweep(3, "wholes")
def test_another_number_of_islands():
    """From two to four and to one: the outer weights go on, and what is lost is said."""
    case, _ = CASES["fragments, delay, mixing"]
    two = case._replace(sizes=(2, 1, 1), stream=case.stream._replace(delay=2))
    _, state = trained(two, 0, 6)
    for count in (1, 4):
        like, _ = program(two._replace(sizes=(count, 1, 1)))
        arrays, static = eqx.partition(state, eqx.is_array)
        places = jax.tree.map(
            lambda x: x.sharding, eqx.filter(islands.shapes_for_islands(like, 2), mesh.is_array)
        )
        new, lost = islands.with_number_of_islands(
            eqx.combine(jax.device_put(arrays, places), static), like
        )
        assert_close(new.model, state.model, 0)
        assert_close(new.optimizer, state.optimizer, 0)
        for i in range(count):
            own = lambda tree, i: jax.tree.map(lambda x: x[i], eqx.filter(tree, eqx.is_array))
            assert_close(own(eqx.filter(new.inner.model, TRAINED), i), state.model, 0)
            assert_close(own(new.inner.optimizer, i), own(state.inner.optimizer, i % 2), 0)
        form = lambda tree: [
            (leaf.shape, leaf.sharding.spec)
            for leaf in jax.tree.leaves(eqx.filter(tree, eqx.is_array))
        ]
        assert form(new) == form(like)
        assert any("gone" in line for line in lost) == (count < 2)
        assert "the exchanges under way" in lost
        assert len(lost) == (3 if count < 2 else 2)  # new islands lose nothing


# What cannot be


SPLIT = P(("island", "data"))


def runs(train, *, specs_of_batch=SPLIT, stream=islands.ALL_AT_ONCE):
    """Trace a step of islands that `train` is the inside of."""
    mesh_ = mesh.make(island=2, data=2, devices=jax.devices()[:4])
    with jax.numpy_dtype_promotion("standard"):
        state, specs = step.init(net, ADAMW, rules.match("**", P()), mesh_, trainable=TRAINED)
        found, found_specs = islands.init(
            state, specs, NESTEROV, mesh_, axis="island", stream=stream, trainable=TRAINED
        )
        run = islands.local(train, NESTEROV, every=2, axis="island", stream=stream)
        run = mesh.spmd(
            run,
            mesh=mesh_,
            in_specs=(found_specs, specs_of_batch),
            out_specs=(found_specs, P("island")),
        )
        jax.eval_shape(
            lambda arrays, batch: eqx.filter(run(eqx.combine(arrays, found), batch), eqx.is_array),
            *(eqx.filter(found, eqx.is_array), batch(0, 0)),
        )


@pytest.mark.parametrize("axis", [("island", "data"), ring(("island", "data")), "island"])
def test_a_step_that_reduces_over_the_islands_is_refused(axis):
    grad = grads.averaged(grad_of(()), "data") if axis == "island" else grad_of(())
    train = step.make(grads.averaged(grad, axis), ADAMW)
    with pytest.raises(
        ValueError,
        match=r"the train step itself uses the axes \('island',\) of the islands, .* Leave these",
    ):
        runs(train)


def reshaped(change):
    """The whole model as one fragment, with each leaf changed: as many elements as before."""
    get = lambda model: jax.tree.map(change, model)
    return lambda model: (islands.Fragment(get, lambda model, part: model),)


def rows_of_up(*bounds):
    """One fragment for each pair of bounds: these rows of `up`. Another one has the other leaf."""

    def fragments(model):
        up, down = islands.by_path("up", "down")(model)
        rows = lambda start, stop: (
            lambda model: jax.tree.map(lambda x: jnp.asarray(x)[start:stop], up.get(model))
        )
        return (*(islands.Fragment(rows(*pair), up.put) for pair in bounds), down)

    return fragments


def test_refusals():
    train = step.make(grads.averaged(grad_of(()), "data"), ADAMW)
    runs(train)
    one_is_split = (P("data"), SPLIT)  # a batch has two arrays; one of them split is not enough
    for specs in (P("data"), P(), one_is_split):
        with pytest.raises(
            ValueError,
            match=r"^islands\.local: an array of the batch, float\d\d\[\d+, 4\], is the same along "
            r"\['island'\], so islands would train on the same data\. Split it over \('island',\) "
            r"too, such as by the spec P\(\('island', 'data'\)\)\.",
        ):
            runs(train, specs_of_batch=specs)
    for stream, message in {
        islands.by_path("up"): r"they have 0 elements of down, which has 32",
        islands.by_path("up", "**"): r"they have 256 elements of up, which has 128",
        reshaped(jnp.transpose): r"\(\d+, \d+\), which does not fit into .* model, \(\d+, \d+\)",
        reshaped(jnp.ravel): r"a fragment has .* in the shape \(128,\), which does not fit into",
        rows_of_up((0, 2), (0, 2)): r"two of them have the same elements of up\. Take different",
        rows_of_up((0, 3), (2, 3)): r"two of them have the same elements of up\. Take different",
    }.items():
        with pytest.raises(ValueError, match=message):
            runs(train, stream=islands.Stream(stream))
    for every, stream, message in (
        (
            0,
            islands.ALL_AT_ONCE,
            "needs 1 step or more between rounds; got every=0. Use every=50, or every=1",
        ),
        (
            2,
            islands.Stream(APART, delay=2),
            "a delay of 0 to 1 steps, less than every=2; got 2. Use a delay in this range, or",
        ),
        (
            2,
            islands.Stream(APART, mixing=1.5),
            "a mixing from 0 to 1; got 1.5. Use 0 to let islands",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            islands.local(train, NESTEROV, every=every, axis="island", stream=stream)


@pytest.mark.parametrize("present", [[True], [True] * 3, [1, 0], [0.5, 0.5]])
def test_present_that_is_not_one_bool_for_each_island_is_refused(present):
    case, _ = CASES["fragments, delay, mixing"]
    state, run = program(case._replace(sizes=(2, 1, 1)))
    with pytest.raises(ValueError, match=r"one bool for each of the 2 islands, .*bool\[2\]"):
        run(state, batch(0, 0), present)


def test_fragments_that_have_each_element_once_are_accepted():
    shapes = jax.eval_shape(lambda: eqx.filter(net(), TRAINED))
    for bounds in ([(0, 2), (2, 4)], [(0, 3), (3, 4)], [(0, 4)]):
        stream = islands.Stream(rows_of_up(*bounds))
        assert len(fragments.checked_fragments(stream, shapes)) == len(bounds) + 1
        # In a trace too, where `jax.numpy` gives no values.
        jax.eval_shape(
            lambda model, s=stream: (fragments.checked_fragments(s, model), 0)[1], shapes
        )


def test_arrays_without_elements_are_in_any_fragment_or_in_none():
    """Leaves without elements, in and outside the layers; and a fragment without layers."""
    model = {"blocks": {"w": jnp.ones((4, 3)), "none": jnp.ones((4, 0))}, "head": jnp.ones((0, 3))}
    stream = islands.Stream(islands.by_layers(2, lambda model: model["blocks"]))
    assert len(fragments.checked_fragments(stream, model)) == 3
    stream = islands.Stream(rows_of_up((0, 4), (4, 4)))
    shapes = jax.eval_shape(lambda: eqx.filter(net(), TRAINED))
    assert len(fragments.checked_fragments(stream, shapes)) == 3
