"""Unreduced and reduced values, `lax.pcast`'s types: every algorithm does what `jax.lax` does with
them, or refuses in a sentence.

V: varying, I: invariant, U: unreduced (a sum that was not taken), R: reduced (its cotangent is
unreduced).
"""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from parallax import mesh
from parallax.collectives import bucketed, doubling, halving, hierarchical, ring, torus, two_rings
from parallax.collectives.types import varying

ALGORITHMS = [ring, two_rings, halving, doubling, torus, hierarchical]
WITH_BLOCKS = [
    ring,
    two_rings,
    halving,
    torus,
    hierarchical,
]  # that have a reduce_scatter and an all_gather
KINDS = {
    "all_reduce": (lax.psum, {}),
    "reduce_scatter": (lax.psum_scatter, {"tiled": True}),
    "all_gather": (lax.all_gather, {"tiled": True}),
    "all_gather to reduced": (functools.partial(lax.all_gather, to="reduced"), {"tiled": True}),
    "all_gather to invarying": (functools.partial(lax.all_gather, to="invarying"), {"tiled": True}),
    "all_to_all": (lambda x, axis: lax.all_to_all(x, axis, 0, 0, tiled=True), {}),
}
STATES = {  # of the input along the axes that are named, where lax takes it
    "all_reduce": "VU",
    "reduce_scatter": "VU",
    "all_gather": "V",
    "all_gather to reduced": "V",
    "all_gather to invarying": "V",
    "all_to_all": "V",
}
X = np.random.default_rng(0).integers(-9, 9, (4, 8)).astype(float)
WORDS = {"V": "varying", "U": "unreduced", "R": "reduced", "I": "invarying"}
COTANGENT = {"V": "V", "I": "I", "U": "R", "R": "U"}


def ours(algorithm, kind):
    name, _, to = kind.partition(" to ")
    if name == "all_to_all":
        return lambda x, axis: algorithm.all_to_all(x, axis, 0, 0, tiled=True)
    options = KINDS[kind][1] | ({"to": to} if to else {})
    return lambda x, axis: getattr(algorithm, name)(x, axis, **options)


def typed(x, states):
    """The varying `x` in the states named: {axis: letter}."""
    for axis, state in states.items():
        if state in "IR":
            x = lax.pmax(x, axis)
        if state in "UR":
            x = lax.pcast(x, axis, to=WORDS[state])
    return x


def states_of(x):
    kind = jax.typeof(x).mat
    found = {
        axis: "VUR"[k]
        for k, names in enumerate((kind.varying, kind.unreduced, kind.reduced))
        for axis in names
    }
    return {axis: found.get(axis, "I") for axis in ("x", "y")}


def shown(x):
    """`x` as every device has it: a sum that was not taken is not taken, or another order would
    show."""
    for axis, state in states_of(x).items():
        x = (
            lax.psum(x, axis)
            if state == "U"
            else lax.pcast(x, axis, to="varying")
            if state == "R"
            else x
        )
    return varying(x, ("x", "y"))[None]


def on_devices(body):
    return jax.jit(
        mesh.spmd(
            body,
            mesh=mesh.make(x=2, y=2, devices=jax.devices()[:4]),
            in_specs=(P(("x", "y")),),
            out_specs=P(("x", "y")),
        )
    )


@pytest.mark.sweep(6)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=repr)
def test_values_types_and_gradients_are_those_of_lax(algorithm, kind):
    """Along one axis, of the ring with the other in every state, and along both."""
    if algorithm not in (ALGORITHMS if kind == "all_reduce" else WITH_BLOCKS):
        with pytest.raises(ValueError, match=f"{algorithm} has no "):
            ours(algorithm, kind.partition(" to ")[0] if "all_to" not in kind else "all_gather")(
                X, "x"
            )
        return
    others = "VIUR" if algorithm is ring else "U"
    cases = [("x", {"x": a, "y": b}) for a, b in itertools.product(STATES[kind], others)]
    cases += [(("x", "y"), {"x": a, "y": a}) for a in STATES[kind]]

    def body(x):
        results = []
        for axis, states in cases:
            y = typed(x.reshape(-1), states)
            pair = []
            for f in (
                ours(algorithm, kind),
                KINDS[kind][0]
                if "all_to" in kind
                else functools.partial(KINDS[kind][0], **KINDS[kind][1]),
            ):
                result = f(y, axis)
                after = [result]
                if not (
                    kind == "all_gather to invarying" and states["y"] == "R"
                ):  # there lax has no gradient
                    result, transpose = jax.vjp(lambda y, f=f, axis=axis: f(y, axis), y)
                    ct = varying(jnp.arange(result.size, dtype=result.dtype), ("x", "y")).reshape(
                        result.shape
                    )
                    after += transpose(
                        typed(
                            ct,
                            {name: COTANGENT[state] for name, state in states_of(result).items()},
                        )
                    )
                pair.append(after)
            assert [states_of(leaf) for leaf in pair[0]] == [states_of(leaf) for leaf in pair[1]], (
                axis,
                states,
            )
            results.append(jax.tree.map(shown, pair))
        return results

    for found, expected in on_devices(body)(X):
        jax.tree.map(functools.partial(np.testing.assert_array_equal, strict=True), found, expected)


def test_a_bucket_holds_no_unreduced_leaf():
    def body(x):
        x = x.reshape(-1)
        tree = [
            x[:3],
            typed(x[:2], {"x": "U", "y": "U"}),
            x[3:5],
            typed(x[5:], {"y": "U"}),
            typed(x[:1], {"y": "R"}),
        ]
        pair = bucketed(ring("x")).all_reduce(tree), lax.psum(tree, "x")
        assert [*map(states_of, pair[0])] == [*map(states_of, pair[1])]
        return jax.tree.map(shown, pair)

    jax.tree.map(np.testing.assert_array_equal, *on_devices(body)(X))


REFUSED = {  # (function, states, what is said)
    "a reduced sum": (
        lambda m, x: m.all_reduce(x, "x"),
        {"x": "R"},
        "all_reduce along 'x' does not take an x that is reduced along 'x'; this x has the shape "
        "(8,). Cast it first: lax.pcast(x, 'x', to=\"varying\").",
    ),
    "an unreduced block": (
        lambda m, x: m.all_gather(x, "x"),
        {"x": "U"},
        "all_gather along 'x' does not take an x that is unreduced along 'x'; this x has the shape "
        "(8,). Sum it first, by all_reduce or reduce_scatter.",
    ),
    "unreduced along one of two": (
        lambda m, x: m.reduce_scatter(x, ("x", "y"), tiled=True),
        {"x": "U", "y": "V"},
        "reduce_scatter along ('x', 'y') needs an x that is unreduced along all of these axes or "
        "along none; this one, of shape (8,), is unreduced along 'x'. Sum it over its unreduced "
        "axes first, then over the others.",
    ),
    "another type": (
        lambda m, x: m.all_gather(x, "x", to="unreduced"),
        {},
        "all_gather: `to` must be 'varying', 'invarying' or 'reduced', as in lax.all_gather; got "
        "'unreduced'.",
    ),
}
CURES = {
    "a reduced sum": lambda m, x: m.all_reduce(lax.pcast(x, "x", to="varying"), "x"),
    "an unreduced block": lambda m, x: m.all_gather(m.all_reduce(x, "x"), "x"),
    "unreduced along one of two": lambda m, x: m.reduce_scatter(
        m.all_reduce(x, "x"), "y", tiled=True
    ),
    "another type": lambda m, x: m.all_gather(x, "x", to="reduced"),
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_what_lax_refuses_is_refused_and_the_cures_work(wrong):
    f, states, said = REFUSED[wrong]

    def body(f, x):
        return shown(f(ring, typed(x.reshape(-1), states)))

    with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
        jax.eval_shape(on_devices(functools.partial(body, f)), X)
    assert jax.eval_shape(on_devices(functools.partial(body, CURES[wrong])), X)
