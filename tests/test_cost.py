"""The formulas are the compiled programs' own numbers; the link that is fitted and the choices made with it are right."""

import functools
import math

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from jax.sharding import PartitionSpec as P

from parallax import mesh
from parallax.collectives import (
    buckets,
    cost,
    doubling,
    halving,
    hierarchical,
    matmul,
    quantized,
    ring,
    send_next,
    several_axes,
    torus,
    two_rings,
)
from parallax.collectives.cost import Cost, Link, Message, Round, spelt
from parallax.collectives.types import varying
from parallax.compiled import certificate

SIZES = (1, 97)  # numbers on a device: fewer than devices, and a size that does not divide
REDUCTIONS = [f for f in cost.FORMULAS if f.__name__ in ("all_reduce", "all_mean")]
SCATTERS = [f for f in cost.FORMULAS if f.__name__ == "reduce_scatter"]
GATHERS = [f for f in cost.FORMULAS if f.__name__ == "all_gather"]
LEFT = [send_next, ring.all_to_all, hierarchical.all_reduce, matmul.all_gather_matmul, matmul.matmul_reduce_scatter]


@functools.cache
def compiled(f, axes, shape, dtype="float32"):
    """(hops in a row, sent, messages, and the other kinds of collectives) of `f` on an array of `shape` on each device."""
    sizes = dict(axes)
    world = mesh.make(devices=jax.devices()[: math.prod(sizes.values())], **sizes)
    names = tuple(sizes)
    body = lambda x: varying(f(x[0], names if len(names) > 1 else names[0]), names)[None]
    program = jax.jit(mesh.spmd(body, mesh=world, in_specs=(P(names),), out_specs=P(names)))
    program = program.lower(jax.ShapeDtypeStruct((world.size, *shape), dtype)).compile()
    found = certificate.read(program, world)
    permutes = [entry for entry in found if entry.kind == "collective-permute"]
    others = [entry for entry in found if entry.kind != "collective-permute"]
    return certificate.hops(program), sum(e.bytes for e in permutes), sum(e.count for e in permutes), others


def assert_priced(f, call, axes, shape, nbytes, itemsize=4, dtype="float32"):
    n = tuple(size for _, size in axes)
    price = cost.of(f, nbytes, n if len(n) > 1 else n[0], itemsize=itemsize)
    assert compiled(call, axes, shape, dtype) == exactly(price)
    assert price.chain <= price.hops <= price.messages


def exactly(price):
    return price.chain, price.sent, price.messages, []


def axes_of(n):
    return (("x", n),) if isinstance(n, int) else tuple(zip("xyz", n, strict=False))


DEVICES = range(1, 9)
MESHES = [*DEVICES, (2, 4), (3, 2), (1, 4), (2, 2, 2)]


@pytest.mark.sweep(20)
@pytest.mark.parametrize("n", MESHES, ids=str)
@pytest.mark.parametrize("collective", REDUCTIONS, ids=spelt)
def test_all_reduces(collective, n):
    for size in SIZES:
        assert_priced(collective, collective, axes_of(n), (size,), 4 * size)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("n", [(2, 4), (3, 2), (1, 4)], ids=str)
@pytest.mark.parametrize("inner", [halving.all_reduce, doubling.all_reduce], ids=spelt)
def test_hierarchical(n, inner):
    of = functools.partial(several_axes.hierarchical_all_reduce, all_reduce=inner)
    call = lambda x, axes: several_axes.hierarchical_all_reduce(x, axes, all_reduce=inner)
    price = cost.of(of, 4 * 97, n)
    assert compiled(call, axes_of(n), (97,)) == exactly(price)


@pytest.mark.sweep(10)
@pytest.mark.parametrize("n", MESHES, ids=str)
@pytest.mark.parametrize("collective", SCATTERS, ids=spelt)
def test_reduce_scatters(collective, n):
    devices = math.prod(n) if isinstance(n, tuple) else n
    assert_priced(collective, _scattered(collective), axes_of(n), (devices * 37,), 4 * devices * 37)


@functools.cache
def _scattered(collective):
    return lambda x, axes: collective(x, axes, tiled=True)


@pytest.mark.sweep(10)
@pytest.mark.parametrize("n", MESHES, ids=str)
@pytest.mark.parametrize("collective", GATHERS, ids=spelt)
def test_all_gathers(collective, n):
    assert_priced(collective, collective, axes_of(n), (37,), 4 * 37)


@functools.cache
def _with_weight(collective, shape):
    return lambda x, axis: collective(x, varying(jnp.ones(shape, jnp.float32), axis), axis)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("n", DEVICES)
def test_the_others(n):
    axes = axes_of(n)
    assert_priced(send_next, send_next, axes, (7,), 28) if n > 1 else None
    assert_priced(ring.all_to_all, _dealt, axes, (n, 3), 12 * n)
    rows, inner, outer = n, 5, 3
    assert_priced(matmul.all_gather_matmul, _with_weight(matmul.all_gather_matmul, (inner, outer)), axes, (2, inner), 8 * inner)
    call = _with_weight(matmul.matmul_reduce_scatter, (inner, outer))
    assert_priced(matmul.matmul_reduce_scatter, call, axes, (rows, inner), 4 * rows * outer)


def _dealt(x, axis):
    return ring.all_to_all(x, axis, 0, 0)


def test_every_formula_is_tested():
    assert {*REDUCTIONS, *SCATTERS, *GATHERS, *LEFT} == set(cost.FORMULAS)


@pytest.mark.parametrize(("dtype", "itemsize"), [("float64", 8), ("int8", 1)])
def test_items_of_other_sizes(dtype, itemsize):
    assert_priced(ring.all_reduce, ring.all_reduce, axes_of(3), (0,), 0, itemsize, dtype)
    for f in (ring.all_reduce, halving.all_reduce, doubling.all_reduce, two_rings.all_reduce):
        assert_priced(f, f, axes_of(5), (7,), 7 * itemsize, itemsize, dtype)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("block_size", [4, 32])
@pytest.mark.parametrize(("dtype", "itemsize"), [("float32", 4), ("float64", 8), ("bfloat16", 2)])
def test_quantized_options(block_size, dtype, itemsize):
    f = functools.partial(quantized.all_reduce, block_size=block_size)
    price = cost.of(f, 97 * itemsize, 5, itemsize=itemsize)
    assert compiled(f, axes_of(5), (97,), dtype) == exactly(price)


def test_buckets():
    """Packing is priced as the all-reduce of the buckets."""
    shapes = [(3, 5), (7,), (), (64,), (2, 2)]
    leaves = [jnp.ones(shape, jnp.float32) for shape in shapes]
    packed = [sum(leaves[i].nbytes for i in bucket) for bucket in buckets.assigned(leaves, 128)]
    padded = [nbytes + -nbytes % (4 * 8) for nbytes in packed]
    call = lambda x, axis: sum(
        map(jnp.sum, buckets.bucketed(ring(axis), nbytes=128).all_reduce([x[0] * leaf for leaf in leaves]))
    )
    price = cost.of_leaves(ring.all_reduce, padded, 8)
    side_by_side = cost.of(ring.all_reduce, max(padded), 8).chain  # a bucket waits for the one before only where it packs
    assert compiled(call, axes_of(8), (1,)) == exactly(price._replace(chain=side_by_side))
    assert price.messages < cost.of_leaves(ring.all_reduce, [leaf.nbytes for leaf in leaves], 8).messages


def test_numbers_of_the_literature():
    """Chan et al. (2007), table 2, and Thakur et al. (2005), section 4.5, for p = 1024 and 4096 bytes an n-th."""
    p, m = 1024, 1024 * 4096
    assert cost.of(ring.all_reduce, m, p)[:2] == (2 * (p - 1), 2 * (p - 1) * m // p)
    assert cost.of(halving.all_reduce, m, p)[:2] == (2 * 10, 2 * (p - 1) * m // p)
    assert cost.of(doubling.all_reduce, m, p) == Cost(10, 10 * m, 10 * m, 10, 10 * m, 10)
    assert cost.of(two_rings.all_reduce, m, p)[:2] == (2 * (p - 1), (p - 1) * m // p)
    assert cost.of(torus.all_reduce, m, (32, 32))[:2] == (4 * 31, (p - 1) * m // p)
    assert cost.of(ring.all_reduce, m, p).reduced == cost.of(halving.all_reduce, m, p).reduced == (p - 1) * m // p
    between = [r for r in cost.rounds(hierarchical.all_reduce, m, (128, 8)) if r.messages[0].axis == 0]
    assert cost.total(between).bytes == 2 * 127 * m // 8 // 128  # the slow link carries 1/8


def test_rounds_name_distances_and_axes():
    assert cost.rounds(halving.reduce_scatter, 7 * 4, 7) == [
        Round(1, (Message(12, distance=4),), 12, waits=1),
        Round(1, (Message(8, distance=2),), 8, waits=1),
        Round(1, (Message(4, distance=1),), 4, waits=1),
    ]
    assert cost.rounds(halving.reduce_scatter, 3 * 4, 3) == [  # the second block is sent as it was at first
        Round(1, (Message(4, distance=2),), 4, waits=1),
        Round(1, (Message(4, distance=1),), 4, waits=0),
    ]
    assert cost.rounds(torus.reduce_scatter, 12 * 4, (2, 3)) == [  # blocks of two numbers, one each way round the axes
        Round(1, (Message(12, axis=0), Message(8, axis=1)), 20, waits=1),
        Round(1, (Message(8, axis=1),), 8, waits=1),
        Round(1, (Message(4, axis=1), Message(4, axis=0)), 8, waits=1),
        Round(1, (Message(4, axis=1),), 4, waits=0),  # the first part has come as far as the second
    ]
    assert cost.rounds(two_rings.all_gather, 12, 3) == [Round(2, (Message(8), Message(4, distance=-1)))]


@given(st.integers(1, 10**5), st.integers(0, 10**6))
def test_no_all_reduce_beats_the_bounds(n, size):
    """Every device must hear of every other, and send and add its share."""
    for f in cost.exact(n):
        price = cost.of(f, 4 * size, n)
        if size and n > 1:
            assert 2**price.hops >= n
            assert price.sent * n >= 2 * (n - 1) * 4 * size
            assert price.reduced * n >= (n - 1) * 4 * size
        else:
            assert price == Cost()


def test_seconds_and_the_fastest():
    link = Link(alpha=1e-5, beta=1e-9, gamma=1e-10, start=1e-6)
    price = Cost(hops=4, bytes=10**6, reduced=10**5)
    assert cost.seconds(price, link) == pytest.approx(1e-6 + 4e-5 + 1e-3 + 1e-5)
    two_ways = Cost(hops=4, bytes=10**6, sent=2 * 10**6, messages=8)
    assert cost.seconds(two_ways, link._replace(one_port=True)) == pytest.approx(1e-6 + 8e-5 + 2e-3)
    assert cost.fastest(2**30, 8, link._replace(one_port=True)) is halving.all_reduce
    assert cost.fastest(64, 8, link) is doubling.all_reduce
    assert cost.fastest(2**20, 8, link) in (halving.all_reduce, two_rings.all_reduce)
    assert cost.fastest(2**30, 8, link) is two_rings.all_reduce
    assert cost.fastest(2**30, 8, link, among=[ring.all_reduce, doubling.all_reduce]) is ring.all_reduce
    assert cost.fastest(2**30, (4, 2), link) in (torus.all_reduce, two_rings.all_reduce)


def test_errors():
    with pytest.raises(ValueError, match=r"needs a function that it has a formula for; got .*sin.* Take one of: send_next,"):
        cost.of(jnp.sin, 4, 2)
    with pytest.raises(ValueError, match="7 bytes are no whole number of items of 4 bytes"):
        cost.of(ring.all_reduce, 7, 2)
    assert cost.of(functools.partial(ring.all_reduce, axis_name="x"), 8, 2) == cost.of(ring.all_reduce, 8, 2)


def test_wrong_programs_are_told():
    """A prediction for one function is told from the program of another."""
    world = mesh.make(x=8)
    program = jax.jit(mesh.spmd(lambda x: ring.all_reduce(x, "x"), mesh=world, in_specs=(P("x"),), out_specs=P()))
    entries = certificate.read(program.lower(np.ones((8, 16), np.float32)).compile(), world)
    assert certificate.differences(entries, {"x": cost.of(ring.all_reduce, 64, 8)}) == []
    told = certificate.differences(entries, {"x": cost.of(halving.all_reduce, 64, 8)})
    assert [sentence.split(" were")[0] for sentence in told] == ["along x: 6 collectives", "along x: 6 hops in a row"]
