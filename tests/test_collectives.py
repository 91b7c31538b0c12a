"""Every algorithm, on every number of devices: its meaning on the list of blocks, its `jax.lax`
twin, its bits and its traffic.

A table that joins `collectives.tables` is tested for free. What is drawn at random for the ring in
test_ring.py (dims, layouts, dtypes) is here a short list for all.
"""

import functools
import math
import os
import re
import subprocess
import sys

import flags
import hlo
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from test_ring import MEANING, OPTIONS, TRANSFORMED, TWIN, energy, same_type
from test_route import ALGORITHMS

from parallax import mesh
from parallax.collectives import (
    direct,
    doubling,
    execute,
    halving,
    hierarchical,
    recursive_doubling,
    ring,
    torus,
    two_rings,
)
from parallax.collectives.cost import describe
from parallax.collectives.cpu import sequence_after
from parallax.collectives.types import replicated, varying

COLLECTIVES = (
    doubling.all_reduce,
    *(
        getattr(of, what)
        for what in ("all_reduce", "reduce_scatter", "all_gather")
        for of in ALGORITHMS
    ),
)
MOVER_OF = {
    getattr(of, what): of
    for of in (doubling, *ALGORITHMS)
    for what in ("all_reduce", "reduce_scatter", "all_gather")
}


def kind(collective):
    return collective.__name__


def algorithm(collective):
    """The name of whose function it is."""
    return str(MOVER_OF[collective])


def on_torus(collective):
    return algorithm(collective) in ("torus", "hierarchical")


name = describe
every_collective = pytest.mark.parametrize("collective", COLLECTIVES, ids=name)

MANNERS = {  # options, and what fits them on n devices; among them sizes that n does not divide
    "all_reduce": [
        (
            {},
            lambda n: {
                (): "bool",
                (5,): "float32",
                (3, 4): "bfloat16",
                (0,): "int8",
                (6 * n, 1, 2): "complex64",
            },
        )
    ],
    "reduce_scatter": [
        (
            {"scatter_dimension": 0, "tiled": False},
            lambda n: {(n,): "float32", (n, 3): "int8", (n, 0): "float64"},
        ),
        (
            {"scatter_dimension": -1, "tiled": True},
            lambda n: {(2, 3 * n): "float16", (1, 2, n): "complex64"},
        ),
        ({"scatter_dimension": 0, "tiled": True}, lambda n: {(6 * n, 1, 2): "bfloat16"}),
    ],
    "all_gather": [
        ({"axis": 0, "tiled": False}, lambda n: {(): "bool", (5,): "float32", (0,): "float64"}),
        ({"axis": -1, "tiled": True}, lambda n: {(2, 3): "float16", (1, 2, 2): "complex64"}),
        ({"axis": 0, "tiled": True}, lambda n: {(6, 1, 2): "bfloat16"}),
    ],
}
MESHES = (  # and the axes that are joined, in their order
    *[({"x": n}, "x") for n in range(1, 9)],
    ({"x": 2, "y": 4}, ("y", "x")),
    ({"x": 3, "y": 2}, ("x", "y")),
    ({"x": 2, "y": 2, "z": 2}, ("z", "x", "y")),
)


def quick(collective):
    """The mesh that is in each run."""
    return (
        {"x": 2, "y": 4}
        if on_torus(collective)
        else next({"x": n} for n in (3, 4) if fits(collective, {"x": n}))
    )


TWELVE = (
    ({"x": 12}, "x"),
    ({"x": 3, "y": 4}, ("y", "x")),
    ({"x": 3, "y": 2, "z": 2}, ("z", "x", "y")),
)


def fits(collective, sizes):
    """Whether the collective is for so many devices."""
    if collective is doubling.all_reduce:
        return True
    try:
        return bool(
            MOVER_OF[collective].table(
                *(sizes.values() if on_torus(collective) else [math.prod(sizes.values())])
            )
        )
    except ValueError:
        return False


def cases(among):
    """Each collective on each mesh that it fits."""

    def case(f, sizes, axis):
        where = f"{'x'.join(map(str, sizes.values()))}-{''.join(axis)}"
        marks = (
            [pytest.mark.sweep(4)]
            if sizes == quick(f)
            else [pytest.mark.long, pytest.mark.sweep(16)]
        )
        return pytest.param(f, sizes, axis, marks=marks, id=f"{name(f)}-{where}")

    chosen = [case(f, *layout) for f in among for layout in MESHES if fits(f, layout[0])]
    return pytest.mark.parametrize(("collective", "sizes", "axis"), chosen)


every_case = cases(COLLECTIVES)
every_sum = cases([f for f in COLLECTIVES if kind(f) == "all_reduce"])


def on_blocks(body, sizes):
    """`body` on a tree of blocks [*sizes, *block], jitted; every device's result comes back so."""
    names, depth = tuple(sizes), len(sizes)

    def local(tree):
        result = body(jax.tree.map(lambda leaf: leaf.reshape(leaf.shape[depth:]), tree))
        return jax.tree.map(
            lambda leaf: varying(leaf, names).reshape((1,) * depth + leaf.shape), result
        )

    world = mesh.make(devices=jax.devices()[: math.prod(sizes.values())], **sizes)
    return jax.jit(mesh.spmd(local, mesh=world, in_specs=(P(*names),), out_specs=P(*names)))


def in_order(blocks, sizes, axis):
    """[*sizes, *block] -> [n, *block], as `axis` counts the devices."""
    names = list(sizes)
    blocks = np.moveaxis(blocks, [names.index(name) for name in axis], range(len(names)))
    return blocks.reshape(math.prod(sizes.values()), *blocks.shape[len(names) :])


def whole_numbers(shape, dtype):
    x = np.random.default_rng(0).integers(-3, 4, shape)
    return (
        (x + 1j * np.flip(x)).astype(dtype)
        if dtype.startswith("complex")
        else x.astype(jnp.dtype(dtype))
    )


def twin_of(collective, axis_name, **options):
    """The function of `jax.lax`, on trees; 0.10.2 fails on a negative dim."""

    def leaf(x):
        rank = x.ndim + (options.get("tiled") is False and "axis" in options)
        return TWIN[kind(collective)](
            x, axis_name, **{k: v if k == "tiled" else v % rank for k, v in options.items()}
        )

    return lambda tree: jax.tree.map(leaf, tree)


def gradient(f, tree):
    inexact = [leaf for leaf in tree if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return jax.grad(lambda inexact: energy(f(inexact)))(inexact)


@every_case
def test_meaning_type_and_gradient(collective, sizes, axis):
    n = math.prod(sizes.values())
    manners = MANNERS[kind(collective)]

    def body(trees):
        results = []
        for tree, (options, _) in zip(trees, manners, strict=True):
            ours = functools.partial(collective, axis_name=axis, **options)
            twin = twin_of(collective, axis, **options)
            results.append((ours(tree), twin(tree), gradient(ours, tree), gradient(twin, tree)))
            jax.tree.map(same_type, *results[-1][:2])
            jax.tree.map(same_type, *results[-1][2:])
        return results

    trees = [
        [whole_numbers((*sizes.values(), *x), dtype) for x, dtype in fitting(n).items()]
        for _, fitting in manners
    ]
    found = on_blocks(body, sizes)(trees)
    for tree, (options, _), result in zip(trees, manners, found, strict=True):
        ours, twin, our_gradient, twin_gradient = result
        jax.tree.map(
            functools.partial(np.testing.assert_array_equal, strict=True),
            (ours, our_gradient),
            (twin, twin_gradient),
        )
        for x, y in zip(tree, ours, strict=True):
            meant = MEANING[kind(collective)](list(in_order(x, sizes, axis)), **options)
            np.testing.assert_array_equal(
                in_order(np.asarray(y), sizes, axis), np.stack(meant), strict=True
            )


@pytest.mark.bits
@pytest.mark.sweep(6)
@every_sum
def test_replicas_have_the_same_bits(collective, sizes, axis):
    """A result that is declared invariant must be: numbers of all magnitudes, whose sum depends on
    the order."""
    n = math.prod(sizes.values())
    numbers = np.random.default_rng(0).standard_normal((*sizes.values(), 37)) * 10.0 ** np.arange(
        -18, 19
    )
    with np.errstate(over="ignore"):  # float16 ends at 65504
        xs = [
            numbers.astype(jnp.dtype(dtype))
            for dtype in ("float32", "bfloat16", "float16", "float64")
        ]
    for x, y in zip(
        xs, on_blocks(functools.partial(collective, axis_name=axis), sizes)(xs), strict=True
    ):
        copies = in_order(np.asarray(y), sizes, axis)
        assert {copy.tobytes() for copy in copies} == {copies[0].tobytes()}
        blocks = in_order(np.asarray(x), sizes, axis).astype(np.longdouble)
        eps, tiny = float(jnp.finfo(x.dtype).eps), float(jnp.finfo(x.dtype).tiny)
        with np.errstate(all="ignore"):  # float16 overflows: so does the bound
            bound = n * eps * np.abs(blocks).sum(0) + n * tiny
            off = np.abs(copies.astype(np.longdouble) - blocks.sum(0))
        # n - 1 additions, each off by at most eps/2 of a result that no sum of magnitudes exceeds
        assert np.all((off <= bound) | ~np.isfinite(copies.astype(np.float64)))


@pytest.mark.bits
@pytest.mark.sweep(3)
@pytest.mark.parametrize("n", [2, 8])
@pytest.mark.parametrize(
    "collective", [f for f in COLLECTIVES if kind(f) in ("all_gather", "all_reduce")], ids=name
)
def test_replicas_have_the_same_bits_of_what_was_just_computed(collective, n):
    """Products that meet a sum behind the collective: XLA may compute a device's own block once
    more, fused otherwise."""
    axis, sizes = (("y", "x"), {"y": 2, "x": n // 2}) if on_torus(collective) else ("x", {"x": n})
    options = {"axis": 0, "tiled": True} if kind(collective) == "all_gather" else {}
    world = mesh.make(**sizes, devices=jax.devices()[:n])

    def updated(gradient, weights):
        adam = -0.003 * (gradient / (jnp.sqrt(gradient * gradient) + 1e-8) + 1e-2 * gradient)
        totals = [
            replicated(collective(update, axis, **options), axis)
            for update in (-0.003 * gradient, adam)
        ]
        weights = weights if options else weights[: len(gradient)]
        return [weights + totals[0], weights + totals[1], weights + 0.5 * totals[1]]

    gradient, weights = (
        np.random.default_rng(i).standard_normal((n * 64, 64)).astype(np.float32) for i in range(2)
    )
    new = jax.jit(mesh.spmd(updated, mesh=world, in_specs=(P(axis), P()), out_specs=P()))(
        gradient, weights
    )
    assert [
        len({np.asarray(shard.data).tobytes() for shard in copies.addressable_shards})
        for copies in new
    ] == [1, 1, 1]


@pytest.mark.bits
@pytest.mark.parametrize(("algorithm", "n"), [(ring, 2), (halving, 4)])
def test_what_a_device_sends_and_keeps_is_computed_once(algorithm, n):
    """In the compiled text one instruction reads the argument. Where two do, their bits are equal
    on some processors alone."""
    world = mesh.make(x=n, devices=jax.devices()[:n])
    gather = lambda x: algorithm.all_gather(x * 1.5 + 1, "x", tiled=True)
    program = jax.jit(mesh.spmd(gather, mesh=world, in_specs=(P("x"),), out_specs=P("x")))
    text = program.lower(jnp.ones((16, 8), jnp.float32)).compile().as_text()
    entry = text[text.index("\nENTRY ") :]
    (argument,) = re.findall(r"%([\w.]+) = \S+ parameter\(0\)", entry)
    assert len(re.findall(rf"%{re.escape(argument)}[,)]", entry)) == 1


@pytest.mark.bits
@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    "collective", [f for f in COLLECTIVES if kind(f) in ("all_gather", "all_reduce")], ids=name
)
def test_replicas_have_the_same_bits_of_what_is_computed_next(collective):
    """XLA may join the blocks inside the operation that uses them, and round there by where each
    block comes from."""
    axis, sizes = (("y", "x"), {"y": 2, "x": 4}) if on_torus(collective) else ("x", {"x": 8})
    options = {"axis": 0, "tiled": True} if kind(collective) == "all_gather" else {}
    total = lambda x: replicated(collective(x, axis, **options), axis)

    def updated(gradients, weights):
        (w, v), (one, two) = weights, gradients
        return [
            w * 1.1 + total(one),
            (v * 0.9 + 0.1 * total(two)) / (jnp.sqrt(total(two * two)) + 1e-8) * v + 0.3 * v,
        ]

    draw = lambda seed, rows, width: (
        np.random.default_rng(seed).standard_normal((rows, width)).astype(np.float32)
    )
    shapes = (64, 2), (3, 5)
    gradients = [draw(0, 8 * rows, width) for rows, width in shapes]
    weights = [draw(1, 8 * rows if options else rows, width) for rows, width in shapes]
    new = jax.jit(
        mesh.spmd(updated, mesh=mesh.make(**sizes), in_specs=(P(axis), P()), out_specs=P())
    )(gradients, weights)
    assert [
        len({np.asarray(shard.data).tobytes() for shard in copies.addressable_shards})
        for copies in new
    ] == [1, 1]


@pytest.mark.sweep(16)
@pytest.mark.parametrize(
    "collective",
    [
        pytest.param(
            f, marks=pytest.mark.long if algorithm(f) in ("ring", "two_rings") else (), id=name(f)
        )
        for f in COLLECTIVES
    ],
)
def test_transformations(collective):
    """vmap, jvp, scan, checkpoint, derivatives of derivatives: what the twin gives, over few
    devices, or two axes of two."""
    sizes = {"x": 2, "y": 2} if on_torus(collective) else quick(collective)
    axis, options = tuple(sizes), OPTIONS.get(kind(collective), {})
    functions = [
        functools.partial(collective, axis_name=axis, **options),
        twin_of(collective, axis, **options),
    ]
    x = whole_numbers((*sizes.values(), math.prod(sizes.values()), 2, 2), "float64")
    both = on_blocks(
        lambda x: {key: [t(f, x) for f in functions] for key, t in TRANSFORMED.items()}, sizes
    )
    results = both(x)
    for key, (ours, twin) in results.items():
        np.testing.assert_array_equal(ours, twin, key, strict=True)


@pytest.mark.sweep(12)
@every_collective
def test_types(collective):
    """Whichever axes the input varies along, the result varies where the twin's does."""
    names, options = ("x", "y", "z"), OPTIONS.get(kind(collective), {})
    world = mesh.make(x=2, y=2, z=2)
    for axis in ("y", ("z", "x"), ("x", "y", "z")):
        if not fits(collective, dict.fromkeys(axis, 2)):
            continue
        for k in range(8):
            given = tuple(name for bit, name in enumerate(names) if k >> bit & 1)

            def body(x, axis=axis):
                # psum and psum_scatter refuse an x that varies along some of the axes only: ours
                # let it vary along all
                y = varying(x, axis) if jax.typeof(x).mat.varying & set(axis) else x
                same_type(collective(x, axis, **options), twin_of(collective, axis, **options)(y))
                return varying(x, names)

            spmd = mesh.spmd(body, mesh=world, in_specs=(P(given),), out_specs=P(names))
            jax.eval_shape(spmd, jax.ShapeDtypeStruct((8 * 2 ** len(given), 8), jnp.float32))


@pytest.mark.sweep(4)
@every_collective
def test_over_no_axis(collective):
    """`lax` neither adds nor drops a dim where there is no axis."""
    manners = [{}] if kind(collective) == "all_reduce" else [{"tiled": False}, {"tiled": True}]
    x = np.arange(6.0).reshape(2, 1, 3)
    for options in manners:
        both = on_blocks(
            lambda x, o=options: (collective(x, (), **o), TWIN[kind(collective)](x, (), **o)),
            {"x": 2},
        )
        np.testing.assert_array_equal(*both(x), strict=True)


def sent(collective, sizes, size):
    """(messages that a device sends, elements in them) for an array of `size`: of a table, n - 1
    blocks each way."""
    n = math.prod(sizes)
    if collective is doubling.all_reduce:
        hops = (
            n.bit_length() - 1 + (2 if n & (n - 1) else 0)
        )  # one in and one out for the devices beyond a power of two
        return hops, hops * size
    block = {"all_reduce": math.ceil(size / n), "reduce_scatter": size // n, "all_gather": size}[
        kind(collective)
    ]
    made = MOVER_OF[collective].table(*(sizes if on_torus(collective) else [n]))
    passes = 2 if kind(collective) == "all_reduce" else 1
    messages = sum(
        len(sends)
        for table in (made if isinstance(made, tuple) else [made])
        for sends in table.rounds
    )
    return passes * messages, passes * (n - 1) * block


def compiled_traffic(collective, sizes, axis, shape):
    options = OPTIONS.get(kind(collective), {})
    f = on_blocks(lambda x: collective(x, axis, **options), sizes)
    ops = hlo.collectives(f, jax.ShapeDtypeStruct((*sizes.values(), *shape), jnp.float32))
    assert {op.kind for op in ops} <= {"collective-permute"}
    return len(ops), sum(op.bytes for op in ops) // 4


@pytest.mark.sweep(12)
@every_case
def test_traffic_of_the_compiled_program(collective, sizes, axis):
    """Hops and bytes are those of the docstrings, exactly; 5 n + 3 elements do not divide."""
    n = math.prod(sizes.values())
    shape = (5 * n + 3,) if kind(collective) == "all_reduce" else (n, 7)
    expected = sent(collective, [sizes[name] for name in axis], math.prod(shape))
    assert compiled_traffic(collective, sizes, axis, shape) == expected


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    "collective",
    [f for f in COLLECTIVES if kind(f) != "all_gather" and fits(f, {"x": 2, "y": 3})],
    ids=name,
)
def test_backward(collective):
    """An all-reduce sends nothing backward; the transpose of a reduce-scatter sends what an
    all-gather of its blocks does."""
    sizes, axis, options = {"x": 2, "y": 3}, ("x", "y"), OPTIONS.get(kind(collective), {})
    f = on_blocks(jax.grad(lambda x: energy(jnp.sin(collective(x, axis, **options)))), sizes)
    ops = hlo.collectives(f, jax.ShapeDtypeStruct((2, 3, 6, 5), jnp.float32))
    messages, elements = sent(collective, (2, 3), 30)
    times = 1 if kind(collective) == "all_reduce" else 2
    assert (len(ops), sum(op.bytes for op in ops)) == (times * messages, times * 4 * elements)


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    "collective",
    [f for f in COLLECTIVES if algorithm(f) in ("ring", "two_rings", "torus", "machines(2)")],
    ids=name,
)
def test_long_walks_are_loops(collective, monkeypatch):
    """Beyond UNROLLED devices: the same values and traffic, and a program that does not grow with
    n."""
    monkeypatch.setattr(execute, "UNROLLED", 1)
    sizes, axis, options = {"x": 2, "y": 3}, ("x", "y"), OPTIONS.get(kind(collective), {})
    x = whole_numbers((2, 3, 6, 3), "float32")
    f = on_blocks(
        lambda x: (collective(x, axis, **options), twin_of(collective, axis, **options)(x)), sizes
    )
    np.testing.assert_array_equal(*f(x), strict=True)
    assert compiled_traffic(collective, sizes, axis, (6, 3)) == sent(collective, (2, 3), 18)
    if kind(collective) != "reduce_scatter" and algorithm(collective) in ("ring", "two_rings"):
        longer = on_blocks(lambda x: collective(x, axis, **options), {"x": 2, "y": 4}).lower(
            np.zeros((2, 4, 6, 3), np.float32)
        )
        shorter = on_blocks(lambda x: collective(x, axis, **options), sizes).lower(x)
        assert (
            len(
                {
                    program.as_text().count("stablehlo.collective_permute")
                    for program in (longer, shorter)
                }
            )
            == 1
        )


@pytest.mark.sweep(3)
@pytest.mark.parametrize("unrolled", [1, 8])
@pytest.mark.parametrize("algorithm", [ring, two_rings, torus], ids=str)
def test_no_array_overtakes_another(algorithm, unrolled, monkeypatch):
    """Where hops are loops, one array's begin when the other's are done; written out, XLA keeps
    them in order by itself."""
    monkeypatch.setattr(execute, "UNROLLED", unrolled)

    def body(x):
        total = algorithm.all_reduce({"a": x, "b": x[:2]}, ("x", "y"))
        parts = algorithm.reduce_scatter(sequence_after([x, 2 * x], total), ("x", "y"), tiled=True)
        return total, algorithm.all_gather(sequence_after(parts, parts), ("x", "y"), tiled=True)

    assert (
        hlo.unordered(
            on_blocks(body, {"x": 2, "y": 3}).lower(np.ones((2, 3, 6, 4), np.float32)).compile()
        )
        == []
    )


def test_the_parts_of_a_torus_walk_at_once(monkeypatch):
    """On a square torus, one loop carries a message of each axis, and so does on a ring each of the
    two directions."""
    monkeypatch.setattr(execute, "UNROLLED", 0)
    for f, sizes, loops in (
        (torus.all_reduce, {"x": 2, "y": 2}, 4),
        (two_rings.all_reduce, {"x": 2, "y": 2}, 2),
    ):
        program = (
            on_blocks(lambda x, f=f: f(x, ("x", "y")), sizes).lower(jnp.zeros((2, 2, 8))).as_text()
        )
        assert (
            program.count("stablehlo.while") == loops + 3
        )  # and the guards: of both shares of the own block, and of the whole
        assert program.count("stablehlo.collective_permute") == 2 * loops


@pytest.mark.parametrize("name", ["all_reduce", "reduce_scatter", "all_gather"])
@pytest.mark.parametrize("algorithm", [ring, two_rings], ids=str)
def test_one_device_copies_nothing(algorithm, name):
    """On one device the result is `x` itself: no slice and no barrier, which would copy `x`."""

    options = {} if name == "all_reduce" else {"tiled": True}

    def local(x):
        return getattr(algorithm, name)(x, "x", **options)

    over_one = mesh.spmd(local, mesh=mesh.make(x=1, y=8), in_specs=P("x"), out_specs=P("x"))
    jaxpr = str(jax.make_jaxpr(over_one)(jnp.zeros((16, 256))))
    assert not re.search("slice|concatenate|barrier|cond|while", jaxpr)


@pytest.mark.parametrize(
    "collective", [f for f in COLLECTIVES if algorithm(f) == "two_rings"], ids=name
)
def test_two_rings_go_in_opposite_directions(collective):
    options = OPTIONS.get(kind(collective), {})
    program = (
        on_blocks(lambda x: collective(x, "x", **options), {"x": 4})
        .lower(jnp.zeros((4, 4, 6)))
        .as_text()
    )
    targets = re.findall(r"source_target_pairs = dense<\[\[0, (\d)\]", program)
    assert targets.count("1") == targets.count("3") == len(targets) / 2


PERMUTE = re.compile(
    r"f32\[(?:1,)?(\d+)\]\S* collective-permute\(.*?source_target_pairs=\{\{(.*?)\}\}"
)


def test_the_slow_axis_carries_a_part():
    """Over (slow, fast) = (2, 4) a device sends 2 (s - 1)/s S/4 over the slow axis: read from the
    pairs of each permute."""
    sizes = {"slow": 2, "fast": 4}
    f = on_blocks(lambda x: hierarchical.all_reduce(x, ("slow", "fast")), sizes)
    text = f.lower(jax.ShapeDtypeStruct((2, 4, 64), jnp.float32)).compile().as_text()
    slow = [f"{i},{(i + 4) % 8}" for i in range(8)]  # device i is (i // 4, i % 4)
    elements = [
        int(size) for size, pairs in PERMUTE.findall(text) if sorted(pairs.split("},{")) == slow
    ]
    assert elements == [8, 8]  # 64 elements / 4 fast devices / 2 slow ones: once out, once back


ERRORS = {
    "reduce_scatter: dim 0 "
    "(scatter_dimension) of shape (6, 8) "
    "must be a multiple of 4, the number of "
    "devices on the axis. Pad it to 8, "
    "or choose another dim.": (lambda f, x: f(x, "x", tiled=True), "reduce_scatter"),
    "reduce_scatter: dim 1 (scatter_dimension) of shape (6, 8) must be 4, the number of "
    "devices on the axis, since tiled=False drops this dim. Pass tiled=True to split a longer "
    "dim, or reshape.": (
        lambda f, x: f(x, "x", scatter_dimension=-1),
        "reduce_scatter",
    ),
    "scatter_dimension=2 is no dim of an array of 2 dims: use one of [0, 1].": (
        lambda f, x: f(x, "x", scatter_dimension=2),
        "reduce_scatter",
    ),
    "scatter_dimension=0 needs an array of one dim or more, and this one is a scalar. Reshape "
    "it to (1,).": (
        lambda f, x: f(x[0, 0], "x"),
        "reduce_scatter",
    ),
    "axis=2 is no dim of an array of 2 dims: use one of [0, 1].": (
        lambda f, x: f(x, "x", axis=2, tiled=True),
        "all_gather",
    ),
    "axis=0 needs an array of one dim or more, and this one is a scalar. Reshape it to (1,).": (
        lambda f, x: f(x[0, 0], "x", tiled=True),
        "all_gather",
    ),
}


@pytest.mark.parametrize(
    ("collective", "message"),
    [(f, m) for m, (_, of) in ERRORS.items() for f in COLLECTIVES if kind(f) == of],
    ids=lambda value: value if isinstance(value, str) else name(value),
)
def test_errors(collective, message):
    def call(x):
        return ERRORS[message][0](collective, x)

    spmd = mesh.spmd(call, mesh=mesh.make(x=4, y=2), in_specs=(P("x"),), out_specs=P("x"))
    with pytest.raises(ValueError, match=re.escape(message)):
        jax.eval_shape(spmd, jax.ShapeDtypeStruct((24, 8), jnp.float32))


@pytest.mark.programs
@pytest.mark.long
def test_twelve_devices(pytestconfig):
    """Values, gradients, bits and traffic on twelve devices, where rings are loops: in a process of
    its own, as users compile.

    One mesh a collective; three successive values of --seed take all.
    """
    command, environment = (
        [sys.executable, __file__, str(pytestconfig.option.seed)],
        os.environ | flags.of_users(),
    )
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr


def on_twelve_devices(seed):
    jax.config.update("jax_num_cpu_devices", 12)
    for setting, value in {
        "enable_x64": True,
        "numpy_dtype_promotion": "strict",
        "numpy_rank_promotion": "raise",
    }.items():
        jax.config.update(f"jax_{setting}", value)
    for number, collective in enumerate(COLLECTIVES, start=seed):
        fitting = [case for case in TWELVE if fits(collective, case[0])]
        if not fitting:
            continue
        sizes, axis = fitting[number % len(fitting)]
        print(name(collective), sizes, flush=True)
        test_meaning_type_and_gradient(collective, sizes, axis)
        test_traffic_of_the_compiled_program(collective, sizes, axis)
        if kind(collective) == "all_reduce":
            test_replicas_have_the_same_bits(collective, sizes, axis)


if __name__ == "__main__":
    on_twelve_devices(int(sys.argv[1]))


MOVERS_OF_KEYS = [ring, halving, two_rings, direct]


@pytest.mark.sweep(5)
@pytest.mark.parametrize(
    ("axis", "tiled"), [(0, True), (1, True), (0, False), (1, False), (-1, False)]
)
@pytest.mark.parametrize("algorithm", MOVERS_OF_KEYS, ids=str)
def test_random_keys_are_gathered_as_their_numbers(algorithm, axis, tiled):
    """As `lax.all_gather` gathers whole numbers of their shape; of keys that are not tiled JAX 0.10
    cannot lower it."""
    numbers = jnp.arange(16, dtype=jnp.uint32).reshape(8, 2)
    keys, world = (
        jax.vmap(jax.vmap(jax.random.key))(numbers),
        mesh.make(x=4, devices=jax.devices()[:4]),
    )

    def gathered(gather, x):
        run = mesh.spmd(
            lambda x: gather(x, "x", axis=axis, tiled=tiled),
            mesh=world,
            in_specs=P("x"),
            out_specs=P("x"),
        )
        return jax.jit(run)(x)

    expected = jax.vmap(jax.random.key)(gathered(lax.all_gather, numbers).reshape(-1))
    found = gathered(algorithm.all_gather, keys)
    np.testing.assert_array_equal(
        jax.random.key_data(found).reshape(-1, 2), jax.random.key_data(expected)
    )
    assert found.dtype == keys.dtype


@pytest.mark.parametrize("algorithm", MOVERS_OF_KEYS, ids=str)
@pytest.mark.parametrize("name", ["all_reduce", "reduce_scatter"])
def test_random_keys_are_not_added(algorithm, name):
    world = mesh.make(x=4, devices=jax.devices()[:4])
    run = mesh.spmd(
        lambda keys: getattr(algorithm, name)(keys, "x"), mesh=world, in_specs=P(), out_specs=P()
    )
    with pytest.raises(
        ValueError, match=r"Random keys cannot be added; got an array of keys, key<fry>\[4\]\."
    ):
        run(jax.random.split(jax.random.key(0), 4))


@pytest.mark.sweep(8)
@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("algorithm", MOVERS_OF_KEYS, ids=str)
@pytest.mark.parametrize("name", ["all_reduce", "reduce_scatter", "all_gather", "all_to_all"])
def test_vmap_over_an_axis_of_an_explicit_mesh(name, algorithm, n):
    """The mapped dim is split over one axis, and the collective goes along another, whose map is
    inside: row by row."""
    arguments, out = {
        "all_reduce": ({}, P()),
        "reduce_scatter": ({"tiled": True}, P("y")),
        "all_gather": ({"tiled": True}, P("y")),
        "all_to_all": ({"split_axis": 0, "concat_axis": 0, "tiled": True}, P("y")),
    }[name]
    world = jax.make_mesh(
        (2, n), ("x", "y"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[: 2 * n]
    )
    rows = jnp.arange(2.0 * n * n).reshape(2, n * n)

    def sent(x):
        return jax.shard_map(
            lambda x: getattr(algorithm, name)(x, "y", **arguments), in_specs=P("y"), out_specs=out
        )(x)

    def energy(x):
        return jnp.sum(jax.vmap(sent)(x) ** 2)

    alone = mesh.make(y=n, devices=jax.devices()[:n])
    plain = jax.jit(
        mesh.spmd(
            lambda x: getattr(algorithm, name)(x, "y", **arguments),
            mesh=alone,
            in_specs=P("y"),
            out_specs=out,
        )
    )
    slope = jax.jit(jax.grad(lambda row: jnp.sum(plain(row) ** 2)))
    expected = jnp.stack([plain(row) for row in rows])
    slopes = jnp.stack([slope(row) for row in rows])
    with jax.set_mesh(world):
        split = jax.device_put(rows, P("x", "y"))
        found, gradient = jax.jit(jax.vmap(sent))(split), jax.jit(jax.grad(energy))(split)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(gradient, slopes)


@pytest.mark.parametrize("n", [2, 6])
@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e4m3fnuz, jnp.float8_e5m2])
def test_doubling_adds_floats_of_8_bits_as_lax_does(dtype, n):
    """The largest have no infinity above them, and the smallest are not normal. One device has a
    number and the others have 0, so no addition rounds."""
    kind = jnp.finfo(dtype)
    numbers = [float(kind.max), float(kind.smallest_subnormal), float(kind.tiny), 1.0, -1.5]
    terms = np.zeros((n, len(numbers)), dtype)
    terms[n - 1] = numbers
    both = lambda x: varying((doubling.all_reduce(x, "x"), lax.psum(x, "x")), "x")
    world = mesh.make(x=n, devices=jax.devices()[:n])
    ours, plain = mesh.spmd(both, mesh=world, in_specs=P("x"), out_specs=P("x"))(terms)
    for found in (ours, plain):
        np.testing.assert_array_equal(np.asarray(found, np.float32), np.tile(numbers, (n, 1)))


@pytest.mark.parametrize("n", [3, 5, 6, 8])
def test_sums_that_xla_keeps_in_32_bits_are_the_same_on_all_devices(n, monkeypatch):
    """XLA may keep sums of bfloat16 in 32 bits, and send 16 of them. Here float32 plays the sums
    that are kept, and what is sent is rounded."""
    rounded = lambda x: lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    send = recursive_doubling.send
    monkeypatch.setattr(recursive_doubling, "_as_sent", rounded)
    monkeypatch.setattr(recursive_doubling, "send", lambda x, *hop: send(rounded(x), *hop))
    summed = lambda x: varying(doubling.all_reduce(x, "x"), "x")
    world = mesh.make(x=n, devices=jax.devices()[:n])
    terms = rounded(jax.random.normal(jax.random.key(0), (n, 64), np.float32))
    sums = np.asarray(mesh.spmd(summed, mesh=world, in_specs=P("x"), out_specs=P("x"))(terms))
    np.testing.assert_array_equal(sums, np.broadcast_to(sums[:1], sums.shape))
