"""Optimizers that only seem to act element by element are refused; those right on shards are
not."""

import functools
import re
import typing

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from optimizers_steps import (
    SPECS,
    WAYS,
    as_optax_computes,  # noqa: F401 (an autouse fixture)
    assert_names_leaf_axis_and_cure,
    assert_trains_something_else,
    on_one_device,
    on_shards,
    refusal,
    split_up,
    whole,
)
from optimizers_table import RATE, downhill, large, of_leaves
from reference import EXACT, assert_close

from parallax import mesh, optimizers, rules, step
from parallax.collectives.types import varying_axes
from parallax.optimizers import elementwise


def sums_in_the_next_step():
    """Elementwise by what the state says, which has looked at a whole leaf."""

    def update(updates, state, params=None):
        scaled = jax.tree.map(lambda g, s: -RATE * g / (1 + s), updates, state)
        return scaled, jax.tree.map(lambda g: jnp.sum(g**2), updates)

    return optax.GradientTransformation(
        lambda params: jax.tree.map(lambda w: jnp.zeros(()), params), update
    )


def state_of(shape):
    """A state of another shape than its leaf's, and an update that is elementwise with it."""

    def update(updates, state, params=None):
        return jax.tree.map(lambda g, s: -RATE * g * s.reshape(shape(g)), updates, state), state

    return optax.GradientTransformation(
        lambda params: jax.tree.map(lambda w: jnp.linspace(0, 1, shape(w)[0]), params), update
    )


TABLE = jnp.linspace(0.5, 1.5, 64, dtype=jnp.float64)


def decayed_by_trips(g):
    """A rate by a loop of as many trips as the last dim is long."""
    return lax.fori_loop(0, g.shape[-1], lambda _, rate: rate * 0.9, jnp.ones((), g.dtype))


def decayed_until(g):
    return lax.while_loop(
        lambda carry: carry[0] < g.shape[-1], lambda carry: (carry[0] + 1, carry[1] * 0.9), (0, 1.0)
    )[1]


def decayed_inside(g):
    """A loop whose body holds a number that follows from the shape."""
    return lax.scan(
        lambda rate, _: (rate * (1 - 1 / g.shape[-1]), None), jnp.ones((), g.dtype), length=3
    )[0]


def counted_inside(g):
    return lax.scan(
        lambda rate, _: (rate + jnp.sum(jnp.ones(g.shape)), None), jnp.ones((), g.dtype), length=3
    )[0]


def from_host(rate):
    """A rate that Python computes: `rate()` returns it."""
    return jax.pure_callback(rate, jax.ShapeDtypeStruct((), jnp.float64))


RATES = {  # of a leaf, which differ with its size by a parameter of an operation alone
    "a slice's bounds": lambda g: TABLE[g.shape[-1]],
    "a slice that is computed": lambda g: lax.dynamic_slice(TABLE, (g.shape[-1],), (1,))[0],
    "a loop's trips": decayed_by_trips,
    "a loop's condition": decayed_until,
    "a loop's numbers": decayed_inside,
    "a loop's sizes": counted_inside,
    "a callback": lambda g: from_host(lambda: np.float64(1 / g.shape[-1])),
    "a callback's argument": lambda g: from_host(
        functools.partial(np.divide, 1.0, float(g.shape[-1]))
    ),
    "a callback's default": lambda g: from_host(lambda n=g.shape[-1]: np.float64(1 / n)),
    "a switch's branch": lambda g: lax.switch(
        jnp.zeros((), int), [lambda: 1.0 / g.shape[-1], lambda: 1.0]
    ),
}


def halves():
    return np.float64(0.5)


SAME_RATES = {  # as those, and the same for shards and wholes
    "a slice's bounds": lambda g: TABLE[7],
    "a loop's trips": lambda g: lax.fori_loop(
        0, g.ndim, lambda _, rate: rate * 0.9, jnp.ones((), g.dtype)
    ),
    "a loop until": lambda g: lax.while_loop(
        lambda rate: rate > 0.1, lambda rate: rate / 2, jnp.ones((), g.dtype)
    ),
    "a callback": lambda g: from_host(halves),
    "a callback of its own": lambda g: from_host(lambda rank=g.ndim: np.float64(0.5 + rank)),
    "a print": lambda g: jax.debug.callback(lambda size=g.size: None) or 1.0,
}


def rows(g):
    """The running sum of rows, by a loop."""
    return lax.scan(lambda total, row: (total + row, total + row), jnp.zeros_like(g[0]), g)[1]


def halved_until_small(g):
    return lax.while_loop(lambda x: jnp.max(jnp.abs(x)) > 0.5, lambda x: x / 2, g)


HOST = lambda f: lambda g, w: jax.pure_callback(f, jax.ShapeDtypeStruct(g.shape, g.dtype), g)
KEY = jax.random.key(0)
HOLES = {
    "a sum that appears at some sizes": of_leaves(
        lambda g, w: g / jnp.sum(jnp.abs(g)) if g.size > 100 else g
    ),
    "factored from some size on": downhill(optax.scale_by_factored_rms(min_dim_size_to_factor=8)),
    "masked by size": downhill(optax.masked(optax.scale(3.0), large)),
    "masked by size, with a state": downhill(optax.masked(optax.trace(0.9), large)),
    "a rate by the shape": of_leaves(lambda g, w: g / g.shape[-1]),
    "a power by the shape": of_leaves(lambda g, w: jnp.tanh(g) ** g.shape[-1]),
    "a branch by the shape": of_leaves(
        lambda g, w: lax.cond(g.shape[-1] > 5, jnp.tanh, jnp.sin, g)
    ),
    "sums in the next step": sums_in_the_next_step(),
    "a state of one row": state_of(lambda w: (w.shape[0], *[1] * (w.ndim - 1))),
    "rows": of_leaves(lambda g, w: rows(g)),
    "a loop until": of_leaves(lambda g, w: halved_until_small(g)),
    "a branch by elements": of_leaves(
        lambda g, w: lax.cond(jnp.max(g) > 2.5, jnp.tanh, jnp.sin, g)
    ),
    "a roll": of_leaves(lambda g, w: jnp.roll(g, 1, axis=-1)),
    "a reversal": of_leaves(lambda g, w: g[..., ::-1]),
    "a sort": of_leaves(lambda g, w: jnp.sort(g, axis=-1)),
    "a running sum": of_leaves(lambda g, w: jnp.cumsum(g, axis=-1)),
    "the largest": of_leaves(lambda g, w: jnp.where(g == jnp.max(g), g, 0)),
    "an indexed update": of_leaves(lambda g, w: g.at[0].multiply(3.0)),
    "a reshape that reorders": of_leaves(
        lambda g, w: lax.reshape(g, g.shape, dimensions=tuple(range(g.ndim))[::-1])
    ),
    "a callback": of_leaves(HOST(lambda g: np.asarray(g) / np.sum(np.abs(g)))),
    "noise": of_leaves(lambda g, w: g + jax.random.normal(jax.random.key(0), g.shape, g.dtype)),
    "noise of a key from outside": of_leaves(
        lambda g, w: g + jax.random.normal(KEY, g.shape, g.dtype)
    ),
    "a count of ones": of_leaves(lambda g, w: g / jnp.sum(jnp.ones_like(g))),
    "positions": of_leaves(lambda g, w: g * lax.broadcasted_iota(g.dtype, g.shape, g.ndim - 1)),
    "constants of a leaf's shape": of_leaves(
        lambda g, w: g * np.linspace(0, 1, g.size).reshape(g.shape)
    ),
    "constants that broadcast": of_leaves(lambda g, w: g * np.linspace(0, 1, g.shape[-1])),
    "a product with the transpose": of_leaves(
        lambda g, w: jnp.einsum("...ij,...kj,...kl->...il", g, g, g) if g.ndim > 1 else g
    ),
} | {
    f"a rate by {name}": of_leaves(lambda g, w, rate=rate: g * rate(g))
    for name, rate in RATES.items()
}
LEFT_FOR_SHAPES = {
    "head": P(None, "tensor")
}  # in place of its first dim, so that each hole above sees a split of the last


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", HOLES)
def test_a_hole_is_closed(name):
    specs = SPECS["tensor"] | LEFT_FOR_SHAPES
    assert_names_leaf_axis_and_cure(refusal(WAYS["tensor"], {name: HOLES[name]}, specs), "tensor")


@pytest.mark.long
def test_a_hole_is_one_and_whole_leaves_close_it():
    specs = SPECS["tensor"] | LEFT_FOR_SHAPES
    plain = on_one_device(HOLES)
    assert_trains_something_else(HOLES, plain)
    wrapped = {name: optimizers.whole(each, "tensor", specs) for name, each in HOLES.items()}
    for name, (params, _) in on_shards(WAYS["tensor"], wrapped, specs).items():
        assert_close(params, plain[name][0], EXACT)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", SAME_RATES)
def test_a_rate_that_is_the_same_on_wholes_is_let_through(name):
    scaled = {"": of_leaves(lambda g, w: g * SAME_RATES[name](g))}
    assert_close(on_shards(WAYS["tensor"], scaled)[""][0], on_one_device(scaled)[""][0], EXACT)


def exchanged(*, delayed):
    """The update of each of two leaves is the other's gradient, perhaps that of the step before; of
    any other leaf it is its own."""

    def update(updates, state, params=None):
        other = updates | {"a": updates["b"], "b": updates["a"]}
        return (state, other) if delayed else (jax.tree.map(jnp.negative, other), state)

    init = (
        functools.partial(jax.tree.map, jnp.zeros_like)
        if delayed
        else lambda params: optax.EmptyState()
    )
    return optax.GradientTransformation(init, update)


ENTRIES = [(), ("x",), ("x", "y"), (None, "x"), ("y", "x"), (None, ("x", "y"))]


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("of_b", [("x",), ("x", "y"), (None, "x"), (None, ("y", "x"))])
@pytest.mark.parametrize("of_a", ENTRIES)
def test_an_update_made_of_another_leaf_is_right_or_refused(of_a, of_b, delayed):
    specs = {"a": P(*of_a), "b": P(*of_b)}
    model = {
        name: jnp.asarray(np.random.default_rng(i).normal(size=(4, 4)))
        for i, name in enumerate("ab")
    }
    axes, optimizer = mesh.make(x=2, y=2, devices=jax.devices()[:4]), exchanged(delayed=delayed)
    state, state_specs = step.init(lambda: model, optimizer, lambda path, leaf: specs[path], axes)
    train = step.make(lambda params, batch: (jnp.zeros(()), params), optimizer, specs=specs)
    train = jax.jit(
        mesh.spmd(train, mesh=axes, in_specs=(state_specs, P()), out_specs=(state_specs, P()))
    )
    if not of_a == of_b == ("x",) and not of_a == of_b == (None, "x"):
        with pytest.raises(
            ValueError,
            match=r"combines|on shards, |program depends on|depend on the leaf's elements",
        ):
            train(state, 0.0)
        return
    plain = model, optimizer.init(model)
    for _ in range(2):
        state, _ = train(state, 0.0)
        updates, moments = optimizer.update(*plain)
        plain = optax.apply_updates(plain[0], updates), moments
    assert_close((state.model, state.optimizer), plain, EXACT)


def test_a_leaf_whose_split_dim_is_unknown_does_not_part_other_leaves():
    """The spec of `c` that `make` gets does not name its axis; `a` and `b` have the same spec."""
    specs = {"a": P("x"), "b": P("x"), "c": P("x")}
    model = {
        name: jnp.asarray(np.random.default_rng(i).normal(size=(4, 4)))
        for i, name in enumerate("abc")
    }
    optimizer = exchanged(delayed=False)
    axes = mesh.make(x=2, devices=jax.devices()[:2])
    state, state_specs = step.init(lambda: model, optimizer, lambda path, leaf: specs[path], axes)
    train = step.make(
        lambda params, batch: (jnp.zeros(()), params), optimizer, specs=specs | {"c": P()}
    )
    train = jax.jit(
        mesh.spmd(train, mesh=axes, in_specs=(state_specs, P()), out_specs=(state_specs, P()))
    )
    state, _ = train(state, 0.0)
    plain = optax.apply_updates(model, optimizer.update(model, optimizer.init(model), model)[0])
    assert_close(state.model, plain, EXACT)


@pytest.mark.parametrize(
    ("update", "message"),
    [
        (
            lambda g: (g | {"whole": g["c"]}, ()),
            r"c is split along \('x', 'y'\): an update combines whole with c, ",
        ),
        (
            lambda g: (g | {"whole": g["whole"] * jnp.sum(g["c"])}, ()),
            r"c is split along \('x', 'y'\): reduce_sum at test_optimizers_holes",
        ),
        (
            lambda g: (g, g["b"] + g["c"]),
            r"b is split along \('x', 'y'\): an array of the state combines b with c, ",
        ),
    ],
)
def test_a_refusal_names_the_leaves_that_a_result_is_computed_from(update, message):
    """`a`, the first split leaf, is in none of these results."""
    specs = {"a": P("x"), "b": P("x", "y"), "c": P("x", "y"), "whole": P()}
    run_on_shards = elementwise.checked(lambda g, state, params: update(g), specs, at="here")
    run = mesh.spmd(
        lambda g: run_on_shards(g, (), g)[0],
        mesh=mesh.make(x=2, y=2, devices=jax.devices()[:4]),
        in_specs=(specs,),
        out_specs=specs,
    )
    with pytest.raises(elementwise.UnfitOptimizer, match=message):
        run({name: jnp.ones((4, 4)) for name in specs})


class Named(eqx.Module):
    """Parameters at `w` and at `nu.w`: Adam's state has `nu.w` and `nu.nu.w` for them."""

    w: jax.Array
    nu: typing.Any = None


def test_moments_of_parameters_named_as_a_moment_belong_to_the_right_ones():
    model = Named(jnp.ones(8), Named(jnp.ones((4, 2))))
    specs = jax.tree.map(lambda _: P("data"), model)
    update = elementwise.checked(
        optax.adam(0.1).update, {"w": P("data"), "nu.w": P("data")}, at="test"
    )

    def run(model):
        updates, _ = update(model, optax.adam(0.1).init(model), model)
        return updates

    found = jax.jit(
        mesh.spmd(
            run,
            mesh=mesh.make(data=2, devices=jax.devices()[:2]),
            in_specs=(specs,),
            out_specs=specs,
        )
    )(model)
    assert_close(found, optax.adam(0.1).update(model, optax.adam(0.1).init(model))[0], EXACT)


def test_a_choice_that_is_no_array_is_checked_for_each_value():
    def update(updates, state, params=None, *, mix):
        return jax.tree.map(lambda g: g / jnp.sum(g) if mix else g, updates), state

    devices = mesh.make(x=2, devices=jax.devices()[:2])
    run = elementwise.checked(update, {"a": P("x")}, at="here")

    def updates(mix):
        call = lambda g: run({"a": g}, (), {"a": g}, mix=mix)[0]["a"]
        return mesh.spmd(call, mesh=devices, in_specs=P("x"), out_specs=P("x"))(jnp.arange(1.0, 9))

    np.testing.assert_array_equal(updates(False), jnp.arange(1.0, 9))
    with pytest.raises(ValueError, match="here: each device updates its shards alone"):
        updates(True)


def test_only_an_update_that_whole_leaves_would_fit_fails_because_of_shards():
    devices = mesh.make(x=2, devices=jax.devices()[:2])

    def run(of_leaf):
        update = lambda updates, state, params=None: (jax.tree.map(of_leaf, updates), state)
        checked = elementwise.checked(update, {"a": P("x")}, at="here")
        call = lambda g: checked({"a": g}, (), {"a": g})[0]["a"]
        return mesh.spmd(call, mesh=devices, in_specs=P("x"), out_specs=P("x"))(jnp.ones((8, 3)))

    with pytest.raises(elementwise.UnfitOptimizer, match="update fails on the shapes of shards"):
        run(lambda g: g * jnp.ones((8, 3)))
    with pytest.raises(TypeError, match=r"^dot_general requires"):
        run(lambda g: g @ jnp.ones((5, 5)))
    with pytest.raises(TypeError, match=r"^reshape\(\) got an unexpected keyword argument"):
        run(lambda g: jnp.reshape(g, **{"shap": (24,)}))


def scaled_by(rate):
    """The gradient times `rate(extra arguments)`."""

    def update(updates, state, params=None, **extra):
        return jax.tree.map(lambda g: -RATE * rate(**extra) * g, updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def its_number():
    return lax.axis_index("tensor").astype(jnp.float64)


def test_a_rate_that_differs_between_devices_is_refused():
    ours = scaled_by(lambda value: its_number())
    message = refusal(WAYS["tensor"], {"": ours})
    assert_names_leaf_axis_and_cure(message, "tensor")
    assert "axis_index at test_optimizers_holes.py" in message
    assert "differs between devices" in message
    theirs = refusal(
        WAYS["tensor"],
        {"": scaled_by(lambda value: value)},
        extra=lambda info: {"value": its_number()},
    )
    assert "it uses a value from outside that differs between devices" in theirs


def test_a_rate_by_the_shape_is_right_where_specs_tell_that_the_dim_is_whole():
    by_rows = {"": of_leaves(lambda g, w: g / g.shape[0])}
    columns = SPECS["tensor"] | LEFT_FOR_SHAPES
    assert_close(
        on_shards(WAYS["tensor"], by_rows, columns)[""][0], on_one_device(by_rows)[""][0], EXACT
    )
    assert "head is split" in refusal(WAYS["tensor"], by_rows, SPECS["tensor"])
    by_columns = {"": HOLES["a rate by the shape"]}
    untold = [refusal(WAYS["tensor"], each, columns, told=False) for each in (by_rows, by_columns)]
    for message in (*untold, refusal(WAYS["tensor"], by_rows, SPECS["tensor"])):
        assert_names_leaf_axis_and_cure(message, "tensor")
        assert re.search(
            r"dim_as_value at test_optimizers_holes.py:\d+ depends on the shard's size", message
        )


def test_a_wrapper_vouches_for_itself_alone():
    """What stands beside one in a chain is checked, before it and behind it."""
    specs = SPECS["tensor"] | LEFT_FOR_SHAPES
    mixing = {
        "a rate by the shape": "depends on the shard's size",
        "the largest": "uses more than one element",
    }
    for wrapper in (optimizers.on_shards, lambda each: optimizers.whole(each, "tensor", specs)):
        for name, said in mixing.items():
            for chain in (
                (wrapper(optax.identity()), HOLES[name]),
                (HOLES[name], wrapper(optax.identity())),
            ):
                assert said in refusal(WAYS["tensor"], {"": optax.chain(*chain)}, specs)


@pytest.mark.parametrize("way", ["zero-1", "tensor"])
def test_what_stands_behind_a_wrapper_may_look_at_the_parameters(way):
    """In ZeRO-1 updates and parameters are whole on every device; in `whole` both are shards."""
    first = split_up if way == "zero-1" else functools.partial(whole, WAYS[way])
    behind = (optax.add_decayed_weights(0.1), optax.scale(-1e-2))
    plain = on_one_device({"": optax.chain(optax.scale_by_adam(), *behind)})
    found = on_shards(WAYS[way], {"": optax.chain(first(optax.scale_by_adam()), *behind)})
    assert_close(found[""][0], plain[""][0], EXACT)


def clipped_on_shards(max_norm):
    """`optax.clip_by_global_norm` by a sum over the shards, which keeps the norm."""

    def update(updates, state, params=None):
        over_tensor = lambda g: lax.psum(g, "tensor") if "tensor" in varying_axes(g) else g
        norm = jnp.sqrt(sum(over_tensor(jnp.sum(g**2)) for g in jax.tree.leaves(updates)))
        return jax.tree.map(lambda g: -RATE * g * jnp.minimum(1, max_norm / norm), updates), norm

    return optax.GradientTransformation(lambda params: jnp.zeros(()), update)


def test_an_optimizer_with_collectives_of_its_own_is_let_through():
    plain = on_one_device({"": downhill(optax.clip_by_global_norm(0.5))})
    assert_names_leaf_axis_and_cure(refusal(WAYS["tensor"], {"": clipped_on_shards(0.5)}), "tensor")
    found = on_shards(WAYS["tensor"], {"": optimizers.on_shards(clipped_on_shards(0.5))})
    assert_close(found[""][0], plain[""][0], EXACT)


@pytest.mark.parametrize("wrapper", [optimizers.whole, optimizers.by_matrix])
@pytest.mark.parametrize("axis", ["tensr", ("data", "tensr")])
def test_an_axis_that_is_not_there_is_refused_when_the_state_is_made(wrapper, axis):
    """Wherever it is made: for a state that is placed, and inside a map."""
    axes, specs = mesh.make(data=4, tensor=2), {"w": P("tensor"), "b": P()}
    model = {"w": jnp.ones((4, 4)), "b": jnp.ones(4)}
    optimizer = wrapper(optax.adam(RATE), axis, specs)
    rule = rules.first(rules.match("w", P("tensor")), rules.match("b", P()))
    message = (
        r"^optimizers: the optimizer gathers matrices along 'tensr', but the mesh has 'data', "
        r"'tensor'\. Pass "
    )
    with pytest.raises(ValueError, match=message):
        step.planned(lambda: model, optimizer, rule, axes)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(
            mesh.spmd(optimizer.init, mesh=axes, in_specs=(specs,), out_specs=P()), model
        )
