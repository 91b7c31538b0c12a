"""The two primitives that JAX's types lack: a cast that is honest, and a linear function with a
stated transpose."""

import functools

import equinox as eqx
import hlo
import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P

from parallax import grads, mesh, sequence, zero
from parallax.collectives import ring, send_next
from parallax.collectives.cpu import sequence_after
from parallax.collectives.types import (
    linear,
    match_varying,
    reduction_state,
    replicated,
    varying,
    varying_axes,
)


def spmd(f, in_specs, out_specs):
    return mesh.spmd(f, mesh=mesh.make(x=4, y=2), in_specs=in_specs, out_specs=out_specs)


@functools.cache
def copies():
    """What all_reduce declares to be the same everywhere, as each device has it."""
    f = spmd(
        lambda x: varying(ring.all_reduce(x, ("x", "y")), ("x", "y"))[None],
        (P(("x", "y")),),
        P(("x", "y")),
    )
    return jax.jit(f)


@pytest.mark.bits
@given(x=hnp.arrays(np.float32, (8, 3), elements=st.floats(width=32)))
def test_a_declared_sum_has_the_same_bits_on_all_devices(x):
    blocks = np.asarray(copies()(x))
    assert blocks.shape == (8, 1, 3)
    assert {block.tobytes() for block in blocks} == {blocks[0].tobytes()}


def test_the_cast_changes_the_type_alone():
    def body(x):
        y = replicated(lax.all_gather(x, "x", tiled=True), "x")
        batched = jax.vmap(lambda x: replicated(x, ("x", "y")))(x)
        assert (varying_axes(x), varying_axes(y), varying_axes(batched)) == (("x", "y"), ("y",), ())
        return y

    x = np.arange(16.0).reshape(16, 1)
    f = jax.jit(
        spmd(body, (P(("y", "x")),), P("y"))
    )  # out_specs without "x": JAX itself accepts the result
    np.testing.assert_array_equal(f(x), x)
    assert "collective-permute" not in f.lower(x).compile().as_text()


def test_no_transpose_is_guessed_for_the_cast():
    with pytest.raises(NotImplementedError, match="replicated"):
        jax.grad(lambda x: replicated(x, "x"))(1.0)


MATRIX = np.arange(12.0).reshape(3, 4) - 5


def apply(x):
    """A linear function of the last dim, with its transpose stated: `MATRIX @ x`."""
    return linear(x, forward=lambda x: x @ MATRIX.T, backward=lambda ct: ct @ MATRIX)


def plain(x):
    return x @ MATRIX.T


def energy(f, x):
    return jnp.sum(f(x) ** 3)


def looped(f):
    return lambda x: lax.scan(lambda carry, s: (carry + f(x * s), f(s * x)), f(x), jnp.arange(3.0))


TRANSFORMED = {
    "jit": lambda f, x: jax.jit(f)(x),
    "vmap": lambda f, x: jax.vmap(f, in_axes=1, out_axes=2)(x),
    "vmap of vmap": lambda f, x: jax.vmap(jax.vmap(f), in_axes=1, out_axes=1)(x),
    "scan": lambda f, x: looped(f)(x),
    "grad of scan": lambda f, x: jax.grad(lambda x: jnp.sum(looped(f)(x)[0] ** 2))(x),
    "grad of checkpoint": lambda f, x: jax.grad(lambda x: energy(jax.checkpoint(f), x))(x),
    "jvp": lambda f, x: jax.jvp(f, (x,), (x + 1,)),
    "grad of vmap": lambda f, x: jax.grad(lambda x: energy(jax.vmap(f, in_axes=1), x))(x),
    "vmap of grad": lambda f, x: jax.vmap(jax.grad(functools.partial(energy, f)))(x),
    "forward over reverse": lambda f, x: jax.jvp(
        jax.grad(functools.partial(energy, f)), (x,), (x + 1,)
    ),
    "reverse over reverse": lambda f, x: jax.grad(
        lambda x: jnp.sum(jax.grad(functools.partial(energy, f))(x) ** 2)
    )(x),
    "third": lambda f, x: jax.jacfwd(jax.jacfwd(jax.grad(functools.partial(energy, f))))(x[0, 0]),
    "transpose": lambda f, x: jax.linear_transpose(f, x)(f(x)),
}
every_transformation = pytest.mark.parametrize("transformation", TRANSFORMED)
VALUES = hnp.arrays(np.float64, (2, 3, 4), elements=st.integers(-9, 9).map(float))


@functools.cache
def both(transformation):
    transform = TRANSFORMED[transformation]
    return jax.jit(lambda x: [transform(f, x) for f in (apply, plain)])


@pytest.mark.sweep(3)
@every_transformation
@given(x=VALUES)
def test_linear_is_the_function_it_wraps(transformation, x):
    jax.tree.map(
        functools.partial(np.testing.assert_array_equal, strict=True), *both(transformation)(x)
    )


def test_linear_takes_the_stated_transpose():
    """The transpose is used, not derived: a wrong one shows."""
    gradient = jax.grad(
        lambda x: jnp.sum(linear(x, forward=lambda x: 2 * x, backward=lambda ct: 5 * ct))
    )(np.ones(3))
    np.testing.assert_array_equal(gradient, np.full(3, 5.0))


class Model(eqx.Module):
    weight: jax.Array
    count: jax.Array
    activation: object
    name: str
    missing: None = None
    kind: str = eqx.field(static=True, default="kind")


def test_varying_takes_equinox_trees():
    model = Model(jnp.ones((4, 2)), jnp.arange(4), jax.nn.relu, "model")

    def body(model, seen):
        assert (varying_axes(model.weight), varying_axes(model.count), varying_axes(seen)) == (
            ("x",),
            (),
            ("y",),
        )
        result = varying(model, ("y", "x"))
        assert (result.activation, result.name, result.kind, result.missing) == (
            jax.nn.relu,
            "model",
            "kind",
            None,
        )
        assert [varying_axes(leaf) for leaf in (result.weight, result.count)] == [("x", "y")] * 2
        assert varying(model.weight, "x") is model.weight  # nothing is missing, nothing happens
        arrays = eqx.filter(model, eqx.is_array)
        matched = match_varying(arrays, eqx.tree_at(lambda m: m.count, arrays, seen))
        assert [varying_axes(leaf) for leaf in (matched.weight, matched.count)] == [("x",), ("y",)]
        assert varying_axes(match_varying(model.weight, seen)) == (
            "x",
            "y",
        )  # what varies already goes on varying
        return result.weight.sum(keepdims=True)

    f = spmd(body, (Model(P("x"), P(), P(), P()), P("y")), P("x", "y"))
    assert jax.eval_shape(
        lambda weight, seen: f(eqx.tree_at(lambda m: m.weight, model, weight), seen),
        model.weight,
        jnp.arange(4),
    )


def test_ordered_keeps_values_and_types():
    """What waits for a sum over "x" stays as it was, leaf by leaf, though the barrier itself mixes
    their types."""

    def body(x):
        first = lax.psum(x, "x")
        tree = {"x": x, "y": varying(jnp.ones(2), "y"), "none": jnp.zeros(3)}
        result = sequence_after(tree, (first, x))
        assert (
            jax.tree.map(varying_axes, result)
            == {"x": ("x",), "y": ("y",), "none": ()}
            == jax.tree.map(varying_axes, tree)
        )
        return jax.tree.map(lambda leaf: varying(leaf, ("x", "y")), result)

    x = np.arange(8.0)
    f = jax.jit(spmd(body, (P("x"),), P(("x", "y"))))
    result = f(x)
    np.testing.assert_array_equal(result["x"].reshape(4, 2, 2)[:, 0], x.reshape(4, 2))
    np.testing.assert_array_equal(result["y"], np.ones(16))
    np.testing.assert_array_equal(result["none"], np.zeros(24))


def test_ordered_keeps_a_collective_behind_a_loop():
    """A compiled program shows it: without, nothing binds the sum of y to the loop, which
    multiplies and sends."""

    def body(wait, x, y):
        turned = lax.scan(lambda x, _: (send_next(x @ x, "x"), None), x, length=3)[0]
        return turned, ring.all_reduce(wait(y, turned), "x")

    def found(wait):
        f = jax.jit(spmd(functools.partial(body, wait), (P("x"), P("x")), (P("x"), P())))
        return hlo.unordered(f.lower(jnp.ones((32, 8)), jnp.ones(8)).compile())

    free = found(lambda y, turned: y)
    assert {loop.opcode for loop, _ in free} == {"while"}
    assert not found(sequence_after)


def test_ordered_has_a_gradient():
    gradient = jax.grad(lambda x: jnp.sum(sequence_after(x, (x, jnp.full(2, jnp.nan))) ** 3))(
        jnp.arange(3.0)
    )
    np.testing.assert_array_equal(gradient, 3 * np.arange(3.0) ** 2)
    assert sequence_after({"x": 1}, ()) == {"x": 1} == sequence_after({"x": 1}, jnp.zeros((0, 3)))
    key, n = jax.random.key(0), jnp.arange(3)
    same = sequence_after({"key": key, "name": "n", "n": n}, {"key": key, "f": jnp.sin, "n": n})
    assert (same["key"], same["name"], same["n"].dtype) == (key, "n", n.dtype)


def test_the_transpose_of_varying_is_a_sum():
    gradient = spmd(
        jax.grad(lambda w: jnp.sum(varying(w, "x") * (lax.axis_index("x") + 1).astype(float))),
        (P(),),
        P(),
    )
    np.testing.assert_array_equal(jax.jit(gradient)(np.ones(2)), np.full(2, 1.0 + 2 + 3 + 4))


def test_outside_a_map_nothing_varies():
    assert varying_axes(jnp.ones(3)) == ()
    assert varying({"a": 1.0, "f": jax.nn.relu}, "x") == {"a": 1.0, "f": jax.nn.relu}


class Unknown:
    """A type of a JAX to come, which says nothing of `mat`."""


def test_a_jax_that_no_longer_fits(monkeypatch):
    fits_no_longer = (
        r"parallax.collectives needs the replication types of JAX 0.10.2 to 0.12 "
        r"\(`jax.typeof\(x\).mat.varying`\), and JAX "
        rf"{jax.__version__} has others. Install a JAX in that range, or a newer parallax-jax."
    )
    for function in (varying_axes, reduction_state, lambda x: ring.all_reduce(x, "x")):
        with monkeypatch.context() as patch:

            def body(x, function=function, patch=patch):
                patch.setattr(
                    jax, "typeof", lambda x: Unknown()
                )  # inside: mesh.spmd asks for layouts
                return function(x)

            with pytest.raises(TypeError, match=fits_no_longer):
                jax.eval_shape(spmd(body, (P("x"),), P()), jnp.ones((8, 2)))
    monkeypatch.delattr(jax.core.ShapedArray, "mat")
    with pytest.raises(TypeError, match=fits_no_longer):
        jax.eval_shape(lambda x: replicated(x, "x"), 1.0)


@pytest.mark.parametrize(
    "use",
    [
        lambda x: ring.all_reduce(x, "dtaa"),
        lambda x: ring.all_mean(x, "dtaa"),
        zero.gathered(jnp.sum, "dtaa", P("dtaa")),
        lambda x: zero.reduce_scattered(
            jax.value_and_grad(lambda w, batch: jnp.sum(w)), "dtaa", P()
        )(x, x)[0],
        lambda x: sequence.local_tokens(x, "dtaa", dim=0),
        lambda x: grads.averaged(jax.value_and_grad(lambda w, batch: jnp.sum(w)), "dtaa")(x, x)[0],
    ],
)
def test_an_axis_that_is_not_there_is_named(use):
    misspelt = spmd(use, P("x"), P("x"))
    with pytest.raises(
        ValueError,
        match=r"'dtaa' is not an axis of the shard_map around this call, which has the axes "
        r"'x', 'y'\. Name one of those\.",
    ):
        misspelt(jnp.ones(8))


def test_outside_a_map_there_is_no_axis():
    with pytest.raises(
        ValueError,
        match=r"'x' is not an axis here, since no shard_map is around this call\. Call it inside",
    ):
        ring.all_reduce(jnp.ones(8), "x")
