"""A product cut into hops equals the collective and the product in turn, in value and gradients,
and gathers nothing."""

import functools
import re

import hlo
import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P

from parallax import mesh
from parallax.collectives.matmul import all_gather_matmul, matmul_reduce_scatter

every_n = pytest.mark.parametrize("n", range(1, 9))
LAYOUTS = {
    **{str(n): ({"data": 1, "x": n}, "x") for n in range(1, 9)},
    "2 x 4": ({"data": 2, "x": 4}, "x"),
    "b x a": ({"data": 2, "a": 2, "b": 2}, ("b", "a")),
    "none": ({"data": 2}, ()),
}
every_layout = pytest.mark.parametrize("layout", LAYOUTS)
T, D, H, K = 3, 5, 2, 3  # rows and heads on one device; width; head width


def gathered_then_multiplied(x, weight, axis_name, *, axis):
    if axis_name != ():
        x = lax.all_gather(x, axis_name, axis=axis % x.ndim, tiled=True)
    return jnp.tensordot(x, weight, axes=1)


def multiplied_then_scattered(x, weight, axis_name, *, scatter_dimension):
    y = jnp.tensordot(x, weight, axes=weight.ndim - 1)
    return (
        y
        if axis_name == ()
        else lax.psum_scatter(
            y, axis_name, scatter_dimension=scatter_dimension % y.ndim, tiled=True
        )
    )


OURS = all_gather_matmul, matmul_reduce_scatter
PLAIN = gathered_then_multiplied, multiplied_then_scattered


def size(layout):
    sizes, _ = LAYOUTS[layout]
    return int(np.prod([size for name, size in sizes.items() if name != "data"]))


def over(layout, f, in_specs, out_specs):
    """`f(axis_name)` mapped; "X" in a spec stands for the layout's axes."""
    sizes, axis_name = LAYOUTS[layout]
    world = mesh.make(devices=jax.devices()[: int(np.prod(list(sizes.values())))], **sizes)
    fill = lambda spec: P(*[(axis_name or None) if entry == "X" else entry for entry in spec])
    in_specs, out_specs = jax.tree.map(fill, (in_specs, out_specs))
    return jax.jit(mesh.spmd(f(axis_name), mesh=world, in_specs=in_specs, out_specs=out_specs))


SPECS = P("data", "X"), P(None, "X"), P("X")  # tokens are split; so are the heads of both weights


def shapes(layout):
    n = size(layout)
    return (2 * LAYOUTS[layout][0]["data"], n * T, D), (D, n * H, K), (n * H, K, D)


def network(pair, axis_name, axis):
    """A layer of several heads between a gather and a scatter of the tokens; its input goes round
    it, so is used twice."""
    enter, leave = pair

    def f(x, up, down):
        hidden = jnp.tanh(enter(x, up, axis_name, axis=axis))
        return x + leave(hidden, down, axis_name, scatter_dimension=axis)

    return f


@functools.cache
def layer(layout, pair, axis):
    """The layer's value, and the gradients of its input and of both weights, which are the same on
    all of `data`."""

    def f(axis_name):
        def loss(x, up, down):
            y = network(pair, axis_name, axis)(x, up, down)
            return jnp.sum(jnp.cos(y)), y

        def body(x, up, down):
            gradients, y = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(x, up, down)
            return y, gradients

        return body

    return over(layout, f, SPECS, (SPECS[0], SPECS))


# Sums of a few hundred terms near 1, each rounded to 1e-16 some tens of times; where they cancel,
# the terms are the measure.
close = functools.partial(np.testing.assert_allclose, rtol=reference.EXACT, atol=reference.EXACT)
UNIT = st.floats(-2, 2, width=32)


@pytest.mark.sweep(4)
@every_layout
@settings(max_examples=4)
@given(data=st.data())
def test_equals_the_collective_and_the_product(layout, data):
    axis = (1, -2)[size(layout) % 2]  # of [B, T, D]
    arguments = [
        data.draw(hnp.arrays(np.float64, shape, elements=UNIT)) for shape in shapes(layout)
    ]
    ours, plain = (layer(layout, pair, axis)(*arguments) for pair in (OURS, PLAIN))
    jax.tree.map(close, ours, plain)


@functools.cache
def product(layout, dtype):
    """Both products alone, as they come, ours and plain ones, in `dtype`."""

    def f(axis_name):
        def body(x, up, z, down):
            x, up, z, down = (leaf.astype(dtype) for leaf in (x, up, z, down))
            one = [f(x, up, axis_name, axis=0) for f in (OURS[0], PLAIN[0])]
            two = [f(z, down, axis_name, scatter_dimension=0) for f in (OURS[1], PLAIN[1])]
            for ours, plain in (one, two):
                assert jax.typeof(ours) == jax.typeof(plain)
            return one[0], two[0]

        return body

    return over(layout, f, (P("X"), P(None, "X"), P(None, "X"), P("X")), (P(None, "X"), P("X")))


@pytest.mark.sweep(4)
@every_n
@settings(max_examples=8)
@given(data=st.data())
def test_rounding(n, data):
    """A product of k terms is off by at most k eps sum |x||w|; the scatter adds n such parts, of k
    terms in all, n - 1 times."""
    dtype = ("float32", "bfloat16")[n % 2]
    draw = lambda *shape: np.asarray(
        jnp.asarray(data.draw(hnp.arrays(np.float32, shape, elements=UNIT))).astype(dtype)
    )
    x, up, z, down = draw(n * T, D), draw(D, n * H), draw(n * T, n * H), draw(n * H, D)
    y, s = (
        np.asarray(leaf)
        for leaf in product(str(n), dtype)(*[leaf.astype(np.float32) for leaf in (x, up, z, down)])
    )
    eps, tiny = float(jnp.finfo(dtype).eps), float(jnp.finfo(dtype).tiny)
    x, up, z, down = map(np.longdouble, (x, up, z, down))
    for got, left, right, terms in ((y, x, up, D), (s, z, down, n * H + n)):
        assert np.all(
            abs(np.longdouble(got) - left @ right)
            <= terms * (eps * (abs(left) @ abs(right)) + tiny)
        )


def test_sums_of_a_weights_gradient_are_wide():
    """One device adds a term of 256 and seven of 1, to 263: in bfloat16 it would stay at 256."""
    n = 8
    terms = np.ones((n, 1)) + 255 * (np.arange(n) == 0)[:, None]

    def f(axis_name):
        def body(ones, ct, rows, ct_rows):
            gather = lambda w: all_gather_matmul(rows, w, axis_name, axis=0)
            scatter = lambda w: matmul_reduce_scatter(ones, w, axis_name, scatter_dimension=0)
            w = jnp.ones((1, 1), jnp.bfloat16)
            w = jax.lax.pcast(w, axis_name, to="varying")
            return jax.vjp(gather, w)[1](ct)[0], jax.vjp(scatter, w)[1](ct_rows)[0]

        return body

    arguments = [np.ones((n, n)), np.repeat(terms, n, axis=1), np.ones((n, 1)), terms]
    specs = P(None, "X"), P(None, "X"), P("X"), P("X")
    for gradient in over(str(n), f, specs, (P("X"), P("X")))(
        *[jnp.asarray(x, jnp.bfloat16) for x in arguments]
    ):
        np.testing.assert_array_equal(
            np.asarray(gradient, np.float32), np.float32(jnp.bfloat16(263))
        )


@pytest.mark.parametrize("n", [1, 4])
def test_gradients_have_the_types_of_unlike_operands(n):
    """16-bit `x` and 32-bit weights, as the plain product takes. They are whole numbers."""
    draw = np.random.default_rng(0).integers
    x, up, down = (
        jnp.asarray(draw(-2, 3, size=size), dtype)
        for size, dtype in zip(
            ((2, n * T, D), (D, n * H), (n * H, D)), ("bfloat16", "float32", "float32"), strict=True
        )
    )
    pairs = {}
    for pair in (OURS, PLAIN):

        def f(axis_name, pair=pair):
            enter, leave = pair

            def loss(x, between, up, down):
                into = enter(x, up, axis_name, axis=1)
                out = leave(between, down, axis_name, scatter_dimension=1)
                return jnp.sum(into) + jnp.sum(out * x)

            return jax.grad(loss, argnums=(0, 1, 2, 3))

        specs = P(None, "X"), P(None, None, "X"), P(None, "X"), P("X")
        hidden = jnp.ones((2, n * T, n * H), jnp.bfloat16)
        with jax.numpy_dtype_promotion("standard"):
            pairs[pair] = over(str(n), f, specs, specs)(x, hidden, up, down)
    jax.tree.map(
        functools.partial(np.testing.assert_array_equal, strict=True), pairs[OURS], pairs[PLAIN]
    )


def gradient_of_square(f, x):
    return jax.grad(lambda x: jnp.sum(f(x) ** 2))(x)


TRANSFORMED = {  # (f, x) -> what f becomes, on [B, T, D] of whole numbers
    "vmap": lambda f, x: jax.vmap(f)(jnp.stack([x, 2 * x])),
    "vmap of grad": lambda f, x: jax.vmap(functools.partial(gradient_of_square, f))(
        jnp.stack([x, 2 * x])
    ),
    "checkpoint": lambda f, x: gradient_of_square(jax.checkpoint(f), x),
    "grad of scan": lambda f, x: gradient_of_square(
        lambda x: lax.scan(lambda c, s: (c, f(s * x)), 0, jnp.array([1.0, -2.0]))[1], x
    ),
    "second use": lambda f, x: gradient_of_square(lambda x: f(x + f(x) * x), x),
    "reverse over reverse": lambda f, x: jax.grad(lambda x: jnp.sum(gradient_of_square(f, x) ** 2))(
        x
    ),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("layout", ["3", "2 x 4", "b x a"])
def test_transformations(layout):
    """Of the layer without its tanh, in its input and (through `x`) twice over."""

    def f(axis_name):
        def body(x, up, down):
            def transformed(enter, leave):
                linear = lambda x: leave(
                    enter(x, up, axis_name, axis=1),
                    down,
                    axis_name,
                    scatter_dimension=1,
                )
                return {name: transform(linear, x)[None] for name, transform in TRANSFORMED.items()}

            return [transformed(*pair) for pair in (OURS, PLAIN)]

        return body

    draw = np.random.default_rng(0).integers
    arguments = [draw(-2, 3, shape).astype(float) for shape in shapes(layout)]
    out = {
        name: P(None, None, "data", "X") if "vmap" in name else P(None, "data", "X")
        for name in TRANSFORMED
    }
    ours, plain = over(layout, f, SPECS, [out, out])(*arguments)
    jax.tree.map(np.testing.assert_array_equal, ours, plain)


def test_gradients_of_weights_under_vmap_scan_and_checkpoint():
    """A stack of layers, each recomputed in the backward pass, on a batch of two models."""

    def f(axis_name):
        def one(pair, x, ups, downs):
            def body(x, weights):
                return jax.checkpoint(network(pair, axis_name, 1))(x, *weights), None

            return jnp.sum(jnp.cos(lax.scan(body, x, (ups, downs))[0]))

        def body(x, ups, downs):
            each = [
                jax.vmap(jax.grad(functools.partial(one, pair), argnums=(0, 1, 2)))(x, ups, downs)
                for pair in (OURS, PLAIN)
            ]
            return each

        return body

    specs = P(None, "data", "X"), P(None, None, None, "X"), P(None, None, "X")
    draw = np.random.default_rng(0).normal
    x, up, down = shapes("2 x 4")
    arguments = draw(size=(2, *x)), draw(size=(2, 3, *up)), draw(size=(2, 3, *down))
    ours, plain = over("2 x 4", f, specs, [specs, specs])(*arguments)
    jax.tree.map(close, ours, plain)


def arrays(text):
    """The shapes of all arrays in a compiled program."""
    return {
        tuple(int(size) for size in dims.split(",") if size)
        for dims in re.findall(r"\w+\d+\[([\d,]*)\]", text)
    }


@pytest.mark.sweep(2)
@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_the_compiled_program_gathers_nothing(n):
    """Forward and backward: hops of one block each, and no array of all rows by the width."""
    rows, width, heads = 16 * n, 7, 11
    x, up, down = (
        jnp.float32(np.ones(shape))
        for shape in ((rows, width), (width, n * heads), (n * heads, width))
    )

    def f(pair, axis_name):
        def body(x, up, down):
            return jax.grad(
                lambda *a: jnp.sum(network(pair, axis_name, 0)(*a) ** 2), argnums=(0, 1, 2)
            )(x, up, down)

        return body

    specs = P("X"), P(None, "X"), P("X")
    ours, plain = (
        over(str(n), functools.partial(f, pair), specs, specs).lower(x, up, down)
        for pair in (OURS, PLAIN)
    )
    # forward a gather and a scatter; backward a round of the cotangent, a round of the operand, and
    # a scatter
    assert ours.as_text().count("stablehlo.collective_permute") == 5 * (n - 1)
    ours, plain = ours.compile(), plain.compile()
    ops = hlo.parse(ours.as_text())
    assert {(op.kind, op.shape) for op in ops} == {("collective-permute", (16, width))}
    # Under JAX 0.10.2 XLA's CPU backend drops the barrier, and joins both rounds of the operand.
    assert len(ops) in (4 * (n - 1), 5 * (n - 1))
    gathered = [sorted((rows, width)), sorted((n, 16, width))]  # in one piece, or as blocks
    assert not {shape for shape in arrays(ours.as_text()) if sorted(shape) in gathered}
    assert (rows, width) in arrays(plain.as_text())  # the reader sees them where they are


@pytest.mark.parametrize("n", [3, 4])
def test_both_directions_carry_half(n):
    x, w = (
        jax.ShapeDtypeStruct((n * T, D), jnp.float32),
        jax.ShapeDtypeStruct((D, n * H), jnp.float32),
    )
    f = over(
        str(n),
        lambda axis_name: lambda x, w: all_gather_matmul(x, w, axis_name),
        (P("X"), P(None, "X")),
        P(None, "X"),
    )
    pairs = re.findall(r"source_target_pairs=\{\{0,(\d)\}", f.lower(x, w).compile().as_text())
    assert (pairs.count("1"), pairs.count(str(n - 1))) == ((n - 1) // 2, n // 2)


ERRORS = {
    "all_gather_matmul: axis=1 is the last dim of shape (6, 5). The last dim is also a dim of the "
    "weight, and only dims of the batch can be gathered or scattered. Use one of the dims [0] "
    "before": lambda x, w: all_gather_matmul(x, w, "x", axis=-1),
    "axis=2 is no dim of an array of 2 dims: use one of [0, 1].": lambda x, w: all_gather_matmul(
        x, w, "x", axis=2
    ),
    "matmul_reduce_scatter: scatter_dimension=1 is the last dim of shape (6, 3). The last "
    "dim is also a dim of the weight, and only dims of the batch can be gathered or scattered.": (
        lambda x, w: matmul_reduce_scatter(x, w, "x", scatter_dimension=1)
    ),
    "matmul_reduce_scatter: dim 0 (scatter_dimension) of shape (6, 5) must be a multiple of 4": (
        lambda x, w: matmul_reduce_scatter(x, w, "x")
    ),
}


@pytest.mark.parametrize("message", ERRORS)
def test_errors(message):
    f = mesh.spmd(
        ERRORS[message], mesh=mesh.make(x=4, y=2), in_specs=(P("x"), P()), out_specs=P("x")
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        jax.eval_shape(
            f, jax.ShapeDtypeStruct((24, 5), jnp.float32), jax.ShapeDtypeStruct((5, 3), jnp.float32)
        )
