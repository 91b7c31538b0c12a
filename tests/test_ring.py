"""Every collective equals its meaning on the list of blocks, and its `jax.lax` twin in value, type
and gradient.

A module that joins MODULES is tested for free.
"""

import functools
import math
import re
import textwrap
from collections.abc import Callable
from typing import NamedTuple

import hlo
import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P

from parallax import mesh
from parallax.collectives import execute, ring
from parallax.collectives.cost import describe
from parallax.collectives.types import varying


def total(blocks):
    return functools.reduce(
        np.add, [block.astype(np.int32) if block.dtype == bool else block for block in blocks]
    )


def reduce_scatter(blocks, *, scatter_dimension, tiled):
    parts = np.split(total(blocks), len(blocks), scatter_dimension)
    return parts if tiled else [part.squeeze(scatter_dimension) for part in parts]


def all_gather(blocks, *, axis, tiled):
    return [(np.concatenate if tiled else np.stack)(blocks, axis)] * len(blocks)


def all_to_all(blocks, *, split_axis, concat_axis, tiled):
    received = zip(*[np.split(block, len(blocks), split_axis) for block in blocks], strict=True)
    if tiled:
        return [np.concatenate(parts, concat_axis) for parts in received]
    return [
        np.stack([part.squeeze(split_axis) for part in parts], concat_axis) for parts in received
    ]


MEANING = {  # on the list of all devices' blocks
    "all_reduce": lambda blocks: [total(blocks)] * len(blocks),
    "all_mean": lambda blocks: [total(blocks) / len(blocks)] * len(blocks),
    "reduce_scatter": reduce_scatter,
    "all_gather": all_gather,
    "all_to_all": all_to_all,
}
TWIN = {
    "all_reduce": lax.psum,
    "all_mean": lax.pmean,
    "reduce_scatter": lax.psum_scatter,
    "all_gather": lax.all_gather,
    "all_to_all": lax.all_to_all,
}
DIMS = {
    "reduce_scatter": ["scatter_dimension"],
    "all_gather": ["axis"],
    "all_to_all": ["split_axis", "concat_axis"],
}
COLLECTIVES = [getattr(ring, name) for name in MEANING]
every_collective = pytest.mark.parametrize("collective", COLLECTIVES, ids=describe)

LAYOUTS = (
    *[({"x": n}, "x") for n in (1, 2, 3, 5, 8)],
    ({"x": 2, "y": 4}, "x"),
    ({"x": 4, "y": 2}, ("x", "y")),
    ({"x": 2, "y": 4}, ("y", "x")),
    ({"x": 2, "y": 2, "z": 2}, ("z", "x")),
)
SHAPES = ((), (1,), (5,), (0,), (3, 2), (2, 0), (2, 1, 3), (1, 2, 1, 3))
INEXACT = ("float64", "float32", "float16", "bfloat16", "complex64", "complex128")
DTYPES = (*INEXACT, "int8", "int32", "bool")


class Case(NamedTuple):
    """A call of one collective: hashable, so that each is compiled once."""

    collective: Callable
    layout: int
    leaves: tuple  # of (shape, dtype)
    options: tuple

    @property
    def sizes(self):
        return LAYOUTS[self.layout][0]

    @property
    def axis(self):
        return LAYOUTS[self.layout][
            1
        ]  # as the collective takes it: a name of one letter, or several

    @property
    def name(self):
        return self.collective.__name__

    @property
    def n(self):
        return math.prod(self.sizes[name] for name in self.axis)

    def twin(self, leaf):
        """What `jax.lax` gives. (0.10.2 fails on a negative dim, and aborts in all_to_all.)"""
        rank = leaf.ndim + (self.name == "all_gather" and not dict(self.options)["tiled"])
        options = {key: value if key == "tiled" else value % rank for key, value in self.options}
        return TWIN[self.name](leaf, self.axis, **options)

    def has_twin(self, leaf):
        """`lax` takes no tiled empty array and scatters no truth values; ours do."""
        empty = (
            dict(self.options).get("tiled")
            and 0 in leaf.shape
            and self.name in ("reduce_scatter", "all_gather")
        )
        return not empty and not (self.name == "reduce_scatter" and leaf.dtype == bool)

    def has_twin_gradient(self, leaf):
        """`lax` (0.12 too) cannot transpose an all_to_all that drops one dim and adds another; ours
        does."""
        split, concat, tiled = (
            dict(self.options).get(key, 0) for key in ("split_axis", "concat_axis", "tiled")
        )
        return self.has_twin(leaf) and (
            self.name != "all_to_all" or tiled or split % leaf.ndim == concat % leaf.ndim
        )

    def spmd(self, body):
        """`body` on a tree of blocks [*mesh, *shape]; every block of its result comes back."""
        world = mesh.make(devices=jax.devices()[: math.prod(self.sizes.values())], **self.sizes)
        depth = len(self.sizes)

        def local(tree):
            result = body(jax.tree.map(lambda leaf: leaf.reshape(leaf.shape[depth:]), tree))
            return jax.tree.map(
                lambda leaf: varying(leaf, tuple(self.sizes)).reshape((1,) * depth + leaf.shape),
                result,
            )

        return mesh.spmd(local, mesh=world, in_specs=(P(*self.sizes),), out_specs=P(*self.sizes))

    def meant(self, blocks):
        """MEANING for each group of devices that the axis joins, in the order in which it names
        them."""
        names, depth = list(self.sizes), len(self.sizes)
        joined = [names.index(name) for name in self.axis]
        order = [dim for dim in range(depth) if dim not in joined] + joined
        groups = np.moveaxis(blocks, order, range(depth))
        devices = groups.shape[:depth]
        groups = groups.reshape(math.prod(devices) // self.n, self.n, *blocks.shape[depth:])
        result = np.stack(
            [np.stack(MEANING[self.name](list(group), **dict(self.options))) for group in groups]
        )
        return np.moveaxis(result.reshape(*devices, *result.shape[2:]), range(depth), order)


@st.composite
def cases(draw, collective, dtypes=DTYPES, most=2):
    """A case and whole numbers for it, small enough that every dtype adds and squares them
    exactly."""
    name, layout = collective.__name__, draw(st.sampled_from(range(len(LAYOUTS))))
    tiled = draw(st.booleans())
    needs_dim = name in DIMS and (tiled or name != "all_gather")
    shapes = draw(
        st.lists(
            st.sampled_from([shape for shape in SHAPES if shape or not needs_dim]),
            min_size=1,
            max_size=most,
        )
    )
    rank = min(map(len, shapes)) + (name == "all_gather" and not tiled)
    options = [(key, draw(st.integers(-rank, rank - 1))) for key in DIMS.get(name, ())]
    case = Case(collective, layout, (), (*options, ("tiled", tiled)) if options else ())
    if needs_dim and name != "all_gather":
        shapes = [_splittable(shape, options[0][1], case.n, tiled) for shape in shapes]
    case = case._replace(leaves=tuple((shape, draw(st.sampled_from(dtypes))) for shape in shapes))
    return case, [
        _whole_numbers(draw, (*case.sizes.values(), *shape), dtype) for shape, dtype in case.leaves
    ]


def _splittable(shape, dim, n, tiled):
    dim %= len(shape)
    return (*shape[:dim], n * shape[dim] if tiled else n, *shape[dim + 1 :])


def _whole_numbers(draw, shape, dtype):
    x = draw(hnp.arrays(np.int8, shape, elements=st.integers(-3, 3)))
    return (
        (x + 1j * x[::-1]).astype(dtype)
        if dtype.startswith("complex")
        else x.astype(jnp.dtype(dtype))
    )


def energy(tree):
    """A real number whose gradient at whole numbers is exact."""
    return sum(
        jnp.sum(jnp.real(leaf * leaf.conj())).astype(jnp.float64) for leaf in jax.tree.leaves(tree)
    )


def same_type(x, y):
    assert (jax.typeof(x), jax.typeof(x).mat.varying) == (jax.typeof(y), jax.typeof(y).mat.varying)


@functools.cache
def values(case):
    """The compiled collective and its twin: the types of their results are compared as they are
    traced."""

    def body(tree):
        ours = case.collective(tree, case.axis, **dict(case.options))
        twins = [
            case.twin(leaf) if case.has_twin(leaf) else own
            for leaf, own in zip(tree, ours, strict=True)
        ]
        jax.tree.map(same_type, ours, twins)
        return ours, twins

    return jax.jit(case.spmd(body))


@pytest.mark.sweep
@every_collective
@settings(max_examples=8)
@given(data=st.data())
def test_meaning(collective, data):
    case, blocks = data.draw(cases(collective))
    ours, twins = values(case)(blocks)
    for x, y, twin in zip(blocks, ours, twins, strict=True):
        np.testing.assert_array_equal(y, twin, strict=True)
        if case.name == "all_mean":  # which float the mean of integers is, the twin says
            # XLA multiplies by 1 / n and does not divide: 1 / n, the product and what is meant are
            # rounded, by half an eps each.
            rounding = 2 * float(jnp.finfo(y.dtype).eps)
            np.testing.assert_allclose(
                y.astype(complex), case.meant(x.astype(complex)), rtol=rounding
            )
        else:
            np.testing.assert_array_equal(y, case.meant(x), strict=True)


@functools.cache
def gradients(case):
    def body(tree):
        def one(f, x):
            return jax.grad(lambda x: energy(f(x)))(x)

        ours = [one(lambda x: case.collective(x, case.axis, **dict(case.options)), x) for x in tree]
        twins = [
            one(case.twin, x) if case.has_twin_gradient(x) else own
            for x, own in zip(tree, ours, strict=True)
        ]
        jax.tree.map(same_type, ours, twins)
        return ours, twins

    return jax.jit(case.spmd(body))


@pytest.mark.sweep
@every_collective
@settings(max_examples=5)
@given(data=st.data())
def test_gradient(collective, data):
    case, blocks = data.draw(cases(collective, dtypes=INEXACT, most=1))
    ours, twins = gradients(case)(blocks)
    for x, gradient, twin in zip(blocks, ours, twins, strict=True):
        np.testing.assert_array_equal(gradient, twin, strict=True)
        if (
            case.name != "all_mean"
        ):  # the gradient of |f(x)|^2 is 2 f^T f(x): <gradient, v> = 2 <f(x), f(v)> for any v
            u, v, g = (np.asarray(a).astype(complex) for a in (x, np.flip(x), gradient))
            once = (
                case.n if case.name == "all_reduce" else 1
            )  # a result that all devices share counts once
            assert (
                np.sum(g * v).real == 2 * np.sum(case.meant(u) * case.meant(v).conj()).real / once
            )


def twice(f):
    """`f` in each step of a loop."""
    return lambda x: lax.scan(
        lambda carry, scale: (carry, f(x * scale)), None, jnp.array([1.0, -2.0])
    )[1]


def tangent(f, x):
    return jax.jvp(f, (x,), (x[..., ::-1] + 1,))[1]


# (f, x) -> what f becomes, inside the map or around it; x has the batch in its last dim.
TRANSFORMED = {
    "jit": lambda f, x: jax.jit(f)(x),
    "vmap": lambda f, x: jax.vmap(f, in_axes=-1, out_axes=1)(x),
    "vmap twice": lambda f, x: jax.vmap(jax.vmap(f, in_axes=-1), in_axes=-1)(
        jnp.stack([x, 2 * x], -1)
    ),
    "scan": lambda f, x: twice(f)(x),
    "checkpoint": lambda f, x: jax.grad(lambda x: energy(jax.checkpoint(f)(x)))(x),
    "grad of scan": lambda f, x: jax.grad(lambda x: energy(twice(f)(x)))(x),
    "grad of vmap": lambda f, x: jax.grad(lambda x: energy(jax.vmap(f, in_axes=-1)(x)))(x),
    "vmap of grad": lambda f, x: jax.vmap(
        jax.grad(lambda x: energy(f(x))), in_axes=-1, out_axes=-1
    )(x),
    "jvp": tangent,
    "forward over reverse": lambda f, x: tangent(jax.grad(lambda x: energy(f(x) ** 2)), x),
    "reverse over reverse": lambda f, x: jax.grad(
        lambda x: energy(jax.grad(lambda x: energy(f(x) ** 2))(x))
    )(x),
}
OPTIONS = {
    "reduce_scatter": {"scatter_dimension": 0, "tiled": True},
    "all_gather": {"axis": 0, "tiled": False},
    "all_to_all": {"split_axis": 0, "concat_axis": 1, "tiled": True},
}


@functools.cache
def transformed(collective, where):
    """All of TRANSFORMED in one program, for the collective and for its twin."""
    options = OPTIONS.get(collective.__name__, {})
    case = Case(collective, 8, (), tuple(options.items()))
    twin = TWIN[collective.__name__]

    def inside(f, transform):
        return case.spmd(lambda x: transform(lambda x: f(x, case.axis, **options), x))

    def around(f, transform):
        return lambda x: transform(case.spmd(lambda x: f(x, case.axis, **options)), x)

    place = {"inside": inside, "around": around}[where]
    return jax.jit(
        lambda x: {
            name: [place(f, t)(x) for f in (collective, twin)] for name, t in TRANSFORMED.items()
        }
    )


@pytest.mark.sweep(6)
@every_collective
@pytest.mark.parametrize("where", ["inside", pytest.param("around", marks=pytest.mark.long)])
@settings(max_examples=5)
@given(x=hnp.arrays(np.float64, (2, 2, 2, 4, 2, 2), elements=st.integers(-3, 3).map(float)))
def test_transformations(collective, where, x):
    for name, (ours, twin) in transformed(collective, where)(x).items():
        np.testing.assert_array_equal(ours, twin, name, strict=True)


@pytest.mark.sweep(2)
@every_collective
def test_types(collective):
    """Whichever axes the input varies along, the result varies where the twin's does."""
    names, options = ("x", "y", "z"), OPTIONS.get(collective.__name__, {})
    world = mesh.make(x=2, y=2, z=2)
    for axis in ("y", ("z", "x"), ("x", "y", "z")):
        for k in range(8):
            given_axes = tuple(name for bit, name in enumerate(names) if k >> bit & 1)

            def body(x, axis=axis):
                # psum and psum_scatter refuse an x that varies along some of the axes only: ours
                # let it vary along all
                y = varying(x, axis) if jax.typeof(x).mat.varying & set(axis) else x
                same_type(
                    collective(x, axis, **options), TWIN[collective.__name__](y, axis, **options)
                )
                return varying(x, names)

            spmd = mesh.spmd(body, mesh=world, in_specs=(P(given_axes),), out_specs=P(names))
            jax.eval_shape(spmd, jax.ShapeDtypeStruct((8 * 2 ** len(given_axes), 8), jnp.float32))


@every_collective
def test_an_invariant_input_counts_once_a_device(collective):
    options = OPTIONS.get(collective.__name__, {})

    def body(f, x):
        value, pull = jax.vjp(lambda x: f(x, "x", **options), x)
        same_type(pull(value)[0], x)
        return varying((value, pull(value)), "x")

    spmd = functools.partial(mesh.spmd, mesh=mesh.make(x=8), in_specs=(P(),), out_specs=P("x"))
    both = [
        jax.jit(spmd(functools.partial(body, f))) for f in (collective, TWIN[collective.__name__])
    ]
    ours, twin = [f(np.arange(64.0).reshape(8, 8)) for f in both]
    jax.tree.map(np.testing.assert_array_equal, ours, twin)


@pytest.mark.sweep(2)
@every_collective
def test_a_long_ring_is_a_loop(collective, monkeypatch):
    monkeypatch.setattr(execute, "UNROLLED", 2)
    options = OPTIONS.get(collective.__name__, {})
    case = Case(collective, 4, (), tuple(options.items()))
    call = functools.partial(collective, axis_name=case.axis, **options)
    x = np.random.default_rng(0).integers(-3, 4, (8, 8, 3)).astype(float)
    spmd = case.spmd(
        lambda x: [
            call(x),
            case.twin(x),
            *[jax.grad(lambda x, f=f: energy(f(x)))(x) for f in (call, case.twin)],
        ]
    )
    ours, twin, ours_gradient, twin_gradient = jax.jit(spmd)(x)
    np.testing.assert_array_equal(ours, case.meant(x))
    np.testing.assert_array_equal(ours, twin)
    np.testing.assert_array_equal(ours_gradient, twin_gradient)
    if (
        collective in TRAFFIC and collective is not ring.all_to_all
    ):  # whose hops have different distances
        phases = {ring.all_reduce: 2, ring.all_mean: 2}.get(collective, 1)
        program = jax.jit(case.spmd(call)).lower(x)
        assert (
            program.as_text().count("stablehlo.collective_permute") == phases
        )  # one hop in the body of each loop
        assert len(hlo.parse(program.compile().as_text())) == phases * (case.n - 1)


FLOATS = ("float64", "float32", "float16", "bfloat16")


@functools.cache
def reduced(collective, dtype):
    options = OPTIONS.get(collective.__name__, {})
    case = Case(collective, 4, (), tuple(options.items()))
    return case, jax.jit(case.spmd(lambda x: collective(x.astype(dtype), case.axis, **options)))


@pytest.mark.bits
@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    "collective",
    [f for f in COLLECTIVES if f.__name__ in ("all_reduce", "all_mean", "reduce_scatter")],
)
@settings(max_examples=20)
@given(
    dtype=st.sampled_from(FLOATS),
    x=hnp.arrays(np.float64, (8, 16), elements=st.floats(-1e3, 1e3, allow_subnormal=False)),
)
def test_rounding(collective, dtype, x):
    """Each of the n - 1 additions is off by at most eps/2 of its result, which no sum of magnitudes
    exceeds."""
    case, f = reduced(collective, dtype)
    x = np.asarray(jnp.asarray(x).astype(dtype))
    got, eps = np.asarray(f(x)), float(jnp.finfo(dtype).eps)
    exact, magnitude = case.meant(x.astype(np.longdouble)), case.meant(abs(x.astype(np.float64)))
    # |sum - exact| <= (n - 1) eps sum|x|; the mean divides once more, hence n. Below the smallest
    # normal, results are 0.
    bound = case.n * eps * magnitude + case.n * float(jnp.finfo(dtype).tiny)
    assert np.all(abs(got.astype(np.longdouble) - exact) <= bound)
    if collective.__name__ != "reduce_scatter":
        assert {block.tobytes() for block in got} == {
            got[0].tobytes()
        }  # the same bits on all devices


TRAFFIC = {  # (devices, elements of the array on one device) -> (hops, elements a device sends)
    ring.reduce_scatter: lambda n, size: (n - 1, (n - 1) * size // n),
    ring.all_gather: lambda n, size: (n - 1, (n - 1) * size),
    ring.all_reduce: lambda n, size: (
        2 * (n - 1),
        2 * (n - 1) * math.ceil(size / n),
    ),  # padded to a multiple of n
    ring.all_mean: lambda n, size: (2 * (n - 1), 2 * (n - 1) * math.ceil(size / n)),
    ring.all_to_all: lambda n, size: (n - 1, (n - 1) * size // n),
}


@pytest.mark.sweep(5)
@pytest.mark.parametrize(("layout", "shape"), [(2, (3, 7)), (4, (8, 5)), (7, (8, 5))])
@pytest.mark.parametrize("collective", TRAFFIC)
def test_traffic_of_the_compiled_program(collective, layout, shape):
    case = Case(collective, layout, (), tuple(OPTIONS.get(collective.__name__, {}).items()))
    x = jax.ShapeDtypeStruct((*case.sizes.values(), *shape), jnp.float32)
    ops = hlo.collectives(case.spmd(lambda x: collective(x, case.axis, **dict(case.options))), x)
    hops, elements = TRAFFIC[collective](case.n, math.prod(shape))
    assert {op.kind for op in ops} == {"collective-permute"}
    assert (len(ops), sum(op.bytes for op in ops)) == (hops, 4 * elements)


@pytest.mark.parametrize("size", [1, 11, 8000])
def test_all_reduce_is_optimal(size):
    """A ring all-reduce of S bytes moves exactly 2 (n - 1)/n S a device (S padded) forward, and
    nothing backward."""
    case, S = Case(ring.all_reduce, 4, (), ()), 4 * (size + -size % 8)
    grad = case.spmd(jax.value_and_grad(lambda x: energy(jnp.sin(ring.all_reduce(x, "x")))))
    ops = hlo.collectives(grad, jax.ShapeDtypeStruct((8, size), jnp.float32))
    assert {op.kind for op in ops} == {"collective-permute"}
    assert sum(op.bytes for op in ops) == 2 * 7 * S // 8


def test_the_twins_collectives_are_seen():
    """The reader of compiled programs knows the kinds that must not appear above."""
    case = Case(ring.all_reduce, 4, (), ())
    x = jax.ShapeDtypeStruct((8, 8, 3), jnp.float32)

    def body(x):
        return (
            lax.psum(x, "x"),
            lax.all_gather(x, "x"),
            lax.psum_scatter(x, "x", tiled=True),
            lax.all_to_all(x, "x", 0, 0, tiled=True),
        )

    ops = hlo.collectives(case.spmd(body), x)
    assert {op.kind: sum(o.bytes for o in ops if o.kind == op.kind) for op in ops} == {
        "all-reduce": 96,
        "all-gather": 8 * 96,
        "reduce-scatter": 12,
        "all-to-all": 96,
    }
    text = """
    %body (p: (f32[2], s32[])) -> (f32[2], s32[]) {
      ROOT %g = (f32[2]{0}, f32[8]{0}) all-gather-start(%y), dimensions={0}
    }

    ENTRY %main (x: bf16[4,2]) -> (pred[3], c64[]) {
      %w = (f32[2]{0}, s32[]) while(%t), condition=%c, body=%body, backend_config={TRIPS}
      %s = (bf16[4,2]{1,0}, bf16[4,2]{1,0}, u32[], u32[]) collective-permute-start(%x), channel_id=1
      %d = bf16[4,2]{1,0} collective-permute-done(%s)
      ROOT %r = (pred[3]{0:T(256)}, c64[]) all-reduce-start(%a, %b), metadata={NAME}
    }
    """
    text = text.replace("{TRIPS}", '{"known_trip_count":{"n":"2"}}')
    text = text.replace("{NAME}", '{op_name="all-to-all(%x"}')
    assert hlo.parse(textwrap.dedent(text)) == [
        ("all-gather", "f32", (8,), 32),  # twice: once a trip
        ("all-gather", "f32", (8,), 32),
        ("collective-permute", "bf16", (4, 2), 16),
        ("all-reduce", "pred", (3,), 3),
        ("all-reduce", "c64", (), 8),
    ]


ERRORS = {
    "reduce_scatter: dim 0 "
    "(scatter_dimension) of shape (6, 8) must be "
    "a multiple of 4, the number of devices on "
    "the axis. Pad it to 8, or choose another "
    "dim.": lambda x: ring.reduce_scatter(x, "x", tiled=True),
    "reduce_scatter: dim 1 (scatter_dimension) of shape (6, 8) "
    "must be 4, the number of devices on the axis, since "
    "tiled=False drops this dim. Pass tiled=True to split a longer dim, "
    "or reshape.": lambda x: ring.reduce_scatter(x, "x", scatter_dimension=-1),
    "all_to_all: dim 0 (split_axis) of shape (6, 8) must be a multiple of 4": lambda x: (
        ring.all_to_all(x, "x", 0, 1, tiled=True)
    ),
    "all_to_all: dim 1 (split_axis) of shape (6, 8) must be 4": lambda x: ring.all_to_all(
        x, "x", 1, 0
    ),
    "scatter_dimension=2 is no dim of an array of 2 dims: use one of [0, 1].": lambda x: (
        ring.reduce_scatter(x, "x", scatter_dimension=2)
    ),
    "concat_axis=-3 is no dim of an array of 2 dims: use one of [0, 1].": lambda x: ring.all_to_all(
        x, "x", 0, -3
    ),
    "axis=2 is no dim of an array of 2 dims: use one of [0, 1].": lambda x: ring.all_gather(
        x, "x", axis=2, tiled=True
    ),
}


@pytest.mark.parametrize("message", ERRORS)
def test_errors(message):
    spmd = mesh.spmd(
        lambda x: ERRORS[message]({"weights": x}),
        mesh=mesh.make(x=4, y=2),
        in_specs=(P("x"),),
        out_specs=P("x"),
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        jax.eval_shape(spmd, jax.ShapeDtypeStruct((24, 8), jnp.float32))
