"""What is folded from the tables are the compiled programs' own numbers; the choices made with a
link are right.

A table that joins `collectives.tables` is tested for free. Programs for more than eight devices,
where chains are loops, are compiled in a process of their own: this file as a script.
"""

import functools
import math
import os
import re
import subprocess
import sys

import flags
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax.sharding import PartitionSpec as P
from test_route import ALGORITHMS

from parallax import mesh
from parallax.collectives import (
    buckets,
    cost,
    doubling,
    execute,
    halving,
    halving_by,
    hierarchical,
    machines,
    matmul,
    quantized,
    ring,
    send_next,
    torus,
    tuning,
    two_rings,
)
from parallax.collectives.cost import Cost, Link, Message, Round
from parallax.collectives.types import varying
from parallax.compiled import certificate

SIZES = (1, 97)  # numbers on a device: fewer than devices, and a size that does not divide
KINDS = ("all_reduce", "reduce_scatter", "all_gather")
CASES = [(of, kind) for of in (*ALGORITHMS, quantized) for kind in KINDS] + [
    (doubling, "all_reduce")
]


@functools.cache
def compiled(f, axes, shape, dtype="float32"):
    """(hops in a row, sent, messages, and the other kinds of collectives) of `f` on an array of
    `shape` on each device."""
    sizes = dict(axes)
    world = mesh.make(devices=jax.devices()[: math.prod(sizes.values())], **sizes)
    names = tuple(sizes)
    body = lambda x: varying(f(x[0], names if len(names) > 1 else names[0]), names)[None]
    program = jax.jit(mesh.spmd(body, mesh=world, in_specs=(P(names),), out_specs=P(names)))
    program = program.lower(jax.ShapeDtypeStruct((world.size, *shape), dtype)).compile()
    found = certificate.read(program, world)
    permutes = [entry for entry in found if entry.kind == "collective-permute"]
    others = [entry for entry in found if entry.kind != "collective-permute"]
    return (
        certificate.hops(program),
        sum(e.bytes for e in permutes),
        sum(e.count for e in permutes),
        others,
    )


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
MANY = [*range(9, 13), (2, 10), (10, 2)]


def fits(of, n):
    try:
        of.reduce_scatter if of is doubling else cost.of(of.all_reduce, 4, n)
    except ValueError:
        return False
    return True


def layouts(among):
    chosen = [(of, kind, n) for of, kind in CASES for n in among if fits(of, n)]
    return pytest.mark.parametrize(
        ("of", "kind", "n"), chosen, ids=lambda value: str(value).replace(" ", "")
    )


@pytest.mark.sweep(30)
@layouts(MESHES)
def test_the_fold_is_the_program(of, kind, n):
    """Bytes, messages and hops in a row, exactly; sizes that do not divide, fewer numbers than
    devices, slices along a dim."""
    count = math.prod(n) if isinstance(n, tuple) else n
    collective = getattr(of, kind)
    shapes = {
        "all_reduce": [(1,), (97,), (12 * count, 2, 1)],
        "reduce_scatter": [(37 * count,), (12 * count, 1, 2)],
        "all_gather": [(37,), (12, 1, 2)],
    }[kind]
    call = scattered(collective) if kind == "reduce_scatter" else collective
    for shape in shapes:
        assert_priced(collective, call, axes_of(n), shape, 4 * math.prod(shape))


@functools.cache
def scattered(collective):
    return lambda x, axes: collective(x, axes, tiled=True)


@pytest.mark.programs
@pytest.mark.long
def test_the_fold_is_the_program_on_many_devices(pytestconfig):
    """9 to 12 devices, and 20 of two axes: loops begin at 10. One case of 16 each time."""
    command, environment = (
        [sys.executable, __file__, str(pytestconfig.option.seed)],
        os.environ | flags.quick(),
    )
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr


def on_many_devices(seed):
    jax.config.update("jax_num_cpu_devices", 20)
    drawn = layouts(MANY).args[1]
    inside = [(machines(g), kind, 20) for g in (2, 10) for kind in KINDS]
    for of, kind, n in [*inside, *drawn[seed % 16 :: 16]]:
        print(of, kind, n, flush=True)
        test_the_fold_is_the_program(of, kind, n)


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
    assert_priced(
        matmul.all_gather_matmul,
        _with_weight(matmul.all_gather_matmul, (inner, outer)),
        axes,
        (2, inner),
        8 * inner,
    )
    call = _with_weight(matmul.matmul_reduce_scatter, (inner, outer))
    assert_priced(matmul.matmul_reduce_scatter, call, axes, (rows, inner), 4 * rows * outer)


def _dealt(x, axis):
    return ring.all_to_all(x, axis, 0, 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sweep(3)
@pytest.mark.parametrize(("of", "n"), [(halving, 8), (machines(2), 6), (torus, (2, 4))], ids=str)
def test_large_blocks_are_sent_apart(of, kind, n):
    """Beyond BUNDLED bytes a block each is a permute of its own; up to there, those of a message
    are one."""
    collective, count = getattr(of, kind), math.prod(size for _, size in axes_of(n))
    call = scattered(collective) if kind == "reduce_scatter" else collective
    shares = 1 if isinstance(n, int) else len(n)
    block = execute.JOINED // 4 * shares
    prices = []
    for numbers in (block, block + 128 * shares):
        shape = (numbers,) if kind == "all_gather" else (numbers * count,)
        assert_priced(collective, call, axes_of(n), shape, 4 * shape[0])
        prices.append(cost.of(collective, 4 * shape[0], n))
    few, many = prices
    assert few.messages < many.messages
    assert few.hops == many.hops
    assert many.messages == (count - 1) * shares * (2 if kind == "all_reduce" else 1)


@pytest.mark.sweep(3, "wholes")
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
    packed = [
        sum(leaves[i].nbytes for i in bucket) for bucket in buckets.assign_buckets(leaves, 128)
    ]
    padded = [nbytes + -nbytes % (4 * 8) for nbytes in packed]
    call = lambda x, axis: sum(
        map(
            jnp.sum,
            buckets.bucketed(ring(axis), nbytes=128).all_reduce([x[0] * leaf for leaf in leaves]),
        )
    )
    price = cost.of_leaves(ring.all_reduce, padded, 8)
    side_by_side = cost.of(
        ring.all_reduce, max(padded), 8
    ).chain  # a bucket waits for the one before only where it packs
    assert compiled(call, axes_of(8), (1,)) == exactly(price._replace(chain=side_by_side))
    assert (
        price.messages
        < cost.of_leaves(ring.all_reduce, [leaf.nbytes for leaf in leaves], 8).messages
    )


def test_numbers_of_the_literature():
    """Chan et al. (2007), table 2, and Thakur et al. (2005), section 4.5, for p = 1024 and 4096
    bytes an n-th."""
    p, m = 1024, 1024 * 4096
    assert cost.of(ring.all_reduce, m, p)[:2] == (2 * (p - 1), 2 * (p - 1) * m // p)
    assert cost.of(halving.all_reduce, m, p)[:2] == (2 * 10, 2 * (p - 1) * m // p)
    assert cost.of(doubling.all_reduce, m, p) == Cost(10, 10 * m, 10 * m, 10, 10 * m, 10)
    assert cost.of(two_rings.all_reduce, m, p)[:2] == (2 * (p - 1), (p - 1) * m // p)
    assert cost.of(torus.all_reduce, m, (32, 32))[:2] == (4 * 31, (p - 1) * m // p)
    assert (
        cost.of(ring.all_reduce, m, p).reduced
        == cost.of(halving.all_reduce, m, p).reduced
        == (p - 1) * m // p
    )
    between = [
        r for r in cost.rounds(hierarchical.all_reduce, m, (128, 8)) if r.messages[0].step[0]
    ]
    assert cost.total(between).bytes == 2 * 127 * m // 8 // 128  # the slow link carries 1/8


def test_who_crosses_a_border():
    """DESIGN's example: of 16 devices in machines of 8, the blocks that leave a device's machine,
    on average, out of 15."""

    def crossing(of, n=16, g=8):
        return (
            sum(blocks for (i, j), blocks in of.table(n).traffic().items() if i // g != j // g) / n
        )

    assert [crossing(of) for of in (ring, halving, machines(8))] == [15 / 8, 10.625, 1]


def test_rounds_name_steps():
    assert cost.rounds(halving.reduce_scatter, 7 * 4, 7) == (
        Round(1, (Message(12, (4,)),), 12),
        Round(1, (Message(8, (2,)),), 8),
        Round(1, (Message(4, (1,)),), 4),
    )
    assert cost.rounds(
        halving.reduce_scatter, 3 * 4, 3
    ) == (  # the second block is sent as it was at first
        Round(1, (Message(4, (2,)),), 4),
        Round(1, (Message(4, (1,)),), 4, waits=False),
    )
    assert cost.rounds(
        torus.reduce_scatter, 12 * 4, (2, 3)
    ) == (  # blocks of two numbers, one each way round the axes
        Round(1, (Message(12, (1, 0)), Message(8, (0, 1))), 20),
        Round(1, (Message(8, (0, 1)),), 8),
        Round(1, (Message(4, (0, 1)), Message(4, (1, 0))), 8),
        Round(
            1, (Message(4, (0, 1)),), 4, waits=False
        ),  # the first part has come as far as the second
    )
    assert cost.rounds(two_rings.all_gather, 12, 3) == (
        Round(2, (Message(8, (-1,)), Message(4, (1,)))),
    )


@pytest.mark.sweep
@settings(max_examples=30)
@given(st.integers(1, 500), st.integers(0, 10**6))
def test_no_all_reduce_beats_the_bounds(n, size):
    """Every device must hear of every other, and send and add its share."""
    for f in tuning.exact(n):
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
    assert (
        tuning.fastest(2**19, 8, link._replace(one_port=True)) is halving.all_reduce
    )  # above, as many messages as a ring
    assert tuning.fastest(64, 8, link) is doubling.all_reduce
    assert tuning.fastest(2**20, 8, link) in (halving.all_reduce, two_rings.all_reduce)
    assert tuning.fastest(2**30, 8, link) is two_rings.all_reduce
    assert (
        tuning.fastest(2**30, 8, link, among=[ring.all_reduce, doubling.all_reduce])
        is ring.all_reduce
    )
    assert tuning.fastest(2**30, (4, 2), link) in (torus.all_reduce, two_rings.all_reduce)


def test_options_that_send_nothing_else_are_allowed():
    for plain, options in (
        (ring.reduce_scatter, {"tiled": True}),
        (ring.all_gather, {"axis": 1, "tiled": True}),
        (ring.all_to_all, {"tiled": True}),
        (quantized.reduce_scatter, {"tiled": True}),
    ):
        assert cost.of(functools.partial(plain, **options), 64, 4) == cost.of(plain, 64, 4)
    blocks = functools.partial(quantized.reduce_scatter, tiled=True, block_size=8)
    assert cost.of(blocks, 64, 4) != cost.of(quantized.reduce_scatter, 64, 4)


def test_errors():
    with pytest.raises(
        ValueError,
        match=(
            r"needs a function that has a table of messages; got .*sin.* such as ring\.all_reduce"
        ),
    ):
        cost.of(jnp.sin, 4, 2)
    with pytest.raises(ValueError, match="halving_by needs a number of 2 or more; got 1"):
        halving_by(1)
    with pytest.raises(ValueError, match="a multiple of itemsize=4; got 7"):
        cost.of(ring.all_reduce, 7, 2)
    for nbytes, n, itemsize in [(-1024, 8, 4), (1024, 0, 4), (1024, (2, 0), 4), (1024, 8, 0)]:
        with pytest.raises(
            ValueError, match=re.escape(f"got nbytes={nbytes}, n={n} and itemsize={itemsize}.")
        ):
            cost.of_leaves(ring.all_reduce, [nbytes], n, itemsize=itemsize)
    assert cost.describe(functools.partial(ring.all_reduce, axis_name="x")) == "ring.all_reduce"
    assert cost.of(functools.partial(ring.all_reduce, axis_name="x"), 8, 2) == cost.of(
        ring.all_reduce, 8, 2
    )


def test_wrong_programs_are_told():
    """A prediction for one function is told from the program of another."""
    world = mesh.make(x=8)
    program = jax.jit(
        mesh.spmd(lambda x: ring.all_reduce(x, "x"), mesh=world, in_specs=(P("x"),), out_specs=P())
    )
    entries = certificate.read(program.lower(np.ones((8, 16), np.float32)).compile(), world)
    assert certificate.differences(entries, {"x": cost.of(ring.all_reduce, 64, 8)}) == []
    told = certificate.differences(entries, {"x": cost.of(halving.all_reduce, 64, 8)})
    assert [sentence.split(" were")[0] for sentence in told] == [
        "along x: 6 collectives",
        "along x: 6 hops in a row",
    ]


if __name__ == "__main__":
    on_many_devices(int(sys.argv[1]))
