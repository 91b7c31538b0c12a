"""Each mistake in a program is found, on its line; the repaired program is silent, and so is every
step of ours."""

import functools
import inspect
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from reference import moved_by

from parallax import grads, lint, mesh, precision, rules, tensor, zero
from parallax.collectives import bucketed, doubling, halving, ring, send_next, torus, two_rings, xla
from parallax.collectives.types import linear_jaxpr, varying
from parallax.layout import Layout
from parallax.lint import values
from parallax.models import decoder, gpt2, recipe

ALGORITHMS = [xla, ring, two_rings, halving, doubling, torus, lambda names: bucketed(ring(names))]
ROWS = jax.ShapeDtypeStruct((8, 6), jnp.float32)
WEIGHTS = jax.ShapeDtypeStruct((6, 6), jnp.float32)


def devices():
    return mesh.make(x=4, y=2)


def mapped(f, in_specs, out_specs):
    return mesh.spmd(f, mesh=devices(), in_specs=in_specs, out_specs=out_specs)


def unchecked(f, in_specs, out_specs):
    return jax.shard_map(f, mesh=devices(), in_specs=in_specs, out_specs=out_specs, check_vma=False)


class Pair(NamedTuple):
    """A program with a mistake on the line that says so, and one without; both take the same blocks
    of rows and weights."""

    kind: str
    wrong: object
    right: object
    says: tuple
    out_specs: object = P()


# A permute where not all devices come by


def permute_under_cond(x, w):
    x = lax.pcast(x, "y", to="varying")
    swapped = lambda x: lax.ppermute(x, "y", [(0, 1), (1, 0)])  # wrong
    return lax.cond(lax.axis_index("x") == 0, swapped, lambda x: x, x)


def permute_and_mask(x, w):
    x = lax.pcast(x, "y", to="varying")
    return jnp.where(lax.axis_index("x") == 0, lax.ppermute(x, "y", [(0, 1), (1, 0)]), x)


def ring_under_switch(x, w):
    branches = [
        lambda x: x,
        lambda x: lax.pcast(ring.all_reduce(x, "x"), "x", to="varying"),  # wrong
    ]
    return lax.switch(jnp.int32(x[0, 0] > 0), branches, x)


def ring_under_a_predicate_that_all_share(x, w):
    branches = [lambda x: x, lambda x: lax.pcast(ring.all_reduce(x, "x"), "x", to="varying")]
    return lax.switch(jnp.int32(lax.pmax(x[0, 0], "x") > 0), branches, x)


def permute_in_while(x, w):
    return lax.while_loop(lambda x: jnp.sum(x) < 9, lambda x: send_next(x + 1, "x"), x)  # wrong


def permute_in_while_for_all(x, w):
    return lax.while_loop(
        lambda x: lax.psum(jnp.sum(x), "x") < 9, lambda x: send_next(x + 1, "x"), x
    )


def psum_in_a_condition(x, w):
    def more(x):
        total = lax.psum(jnp.sum(x), "x")  # wrong
        return (total < 9) & (jnp.sum(x) < 2)

    return lax.while_loop(more, lambda x: x + 1, x)


def psum_under_its_own_axis(x, w):
    summed = lambda x: lax.pcast(lax.psum(x, "x"), "x", to="varying")  # wrong
    return lax.cond(lax.axis_index("x") == 0, summed, lambda x: x, x)


def psum_under_another_axis(x, w):  # a psum carries its groups
    x = lax.pcast(x, "y", to="varying")
    summed = lambda x: lax.pcast(lax.psum(x, "x"), "x", to="varying")
    return lax.pmax(lax.cond(lax.axis_index("y") == 0, summed, lambda x: x, x), "y")


# A mark that a cond drops


def mark_lost(x, w):
    def loss(w):
        factor = lax.cond(lax.axis_index("x") == 0, lambda w: 2 * w, lambda w: w, w)  # wrong
        return jnp.sum(x @ factor)

    return jax.grad(loss)(w)


def mark_kept(x, w):
    def loss(w):
        w = lax.pcast(w, "x", to="varying")
        return jnp.sum(x @ lax.cond(lax.axis_index("x") == 0, lambda w: 2 * w, lambda w: w, w))

    return jax.grad(loss)(w)


# Twice the same sum


def psum_twice(x, w):
    total = lax.psum(jnp.sum(x), "x")
    return lax.psum(total / 4, "x")  # wrong


def psum_once(x, w):
    return lax.psum(jnp.sum(x), "x") / 4


def psum_of_what_is_the_same(x, w):
    return lax.psum(w @ w, ("x", "y"))  # wrong


def sum_of_what_is_the_same(x, w):
    return (w @ w) * lax.axis_size(("x", "y"))


def psum_along_one_axis_too_many(x, w):
    return lax.psum(lax.pcast(x, "y", to="varying"), ("x", "y"))  # wrong


def psum_along_the_axis_it_differs(x, w):
    return lax.psum(x, "x")


def scatter_of_a_sum(x, w):
    total = ring.all_reduce(x.T @ x, "x")[:4]
    return ring.reduce_scatter(total, "x", tiled=True)  # wrong


def scatter_alone(x, w):
    return ring.reduce_scatter((x.T @ x)[:4], "x", tiled=True)


# What could stand outside a loop


def summed_each_trip(x, w):
    def add(total, row):
        mean = lax.psum(jnp.outer(row, row), "x") / 4  # wrong
        return total + mean.astype(total.dtype), None

    return lax.scan(add, jnp.zeros((6, 6), x.dtype), x)[0]


def summed_after(x, w):
    def add(total, row):
        return total + jnp.outer(row, row).astype(total.dtype), None

    return (
        lax.psum(lax.scan(add, lax.pcast(jnp.zeros((6, 6), x.dtype), "x", to="varying"), x)[0], "x")
        / 4
    )


def gradient_summed_by_jax_each_trip(x, w):
    def add(total, row):
        return total + jax.grad(lambda w: jnp.sum((row @ w) ** 2))(w), None  # wrong

    return lax.scan(add, jnp.zeros_like(w), x)[0]


def gradient_summed_after(x, w):
    local = lax.pcast(w, "x", to="varying")

    def add(total, row):
        return total + jax.grad(lambda w: jnp.sum((row @ w) ** 2))(local), None

    return lax.psum(lax.scan(add, jnp.zeros_like(local), x)[0], "x")


def masked_sum_each_trip(x, w):
    def add(i, total):
        part = ring.all_reduce(jnp.outer(x[i], x[i]), "x")  # wrong
        return total.at[i].add(jnp.where(i == 1, part, 0.0))

    return lax.fori_loop(0, 2, add, jnp.zeros((2, 6, 6), x.dtype))


def masked_sum_after(x, w):
    def add(i, total):
        return total.at[i].add(jnp.where(i == 1, jnp.outer(x[i], x[i]), 0.0))

    return ring.all_reduce(
        lax.fori_loop(0, 2, add, lax.pcast(jnp.zeros((2, 6, 6), x.dtype), "x", to="varying")), "x"
    )


def gathered_each_trip(x, w):
    def times(y, _):
        return y @ ring.all_gather(x, "x", tiled=True)[:6], None  # wrong

    return lax.scan(times, x, None, length=3)[0]


def gathered_each_trip_after_a_while(x, w):
    """What a loop before changed, the trips of this one do not."""
    x = lax.while_loop(lambda x: jnp.sum(x) > 1e9, lambda x: x / 2, x)

    def times(y, _):
        return y @ ring.all_gather(x, "x", tiled=True)[:6], None  # wrong

    return lax.scan(times, x, None, length=3)[0]


def gathered_before(x, w):
    whole = ring.all_gather(x, "x", tiled=True)[:6]
    return lax.scan(lambda y, _: (y @ whole, None), x, None, length=3)[0]


# Wide products of short numbers


def wide_product(x, w):
    short = x.astype(jnp.bfloat16)
    return jnp.tanh(short.astype(jnp.float32)) @ w + short.astype(jnp.float32)[:, ::-1] @ w  # wrong


def short_product(x, w):
    short = x.astype(jnp.bfloat16)
    return jnp.einsum(
        "td,df->tf", short, w.astype(jnp.bfloat16), preferred_element_type=jnp.float32
    )


def wide_convolution(x, w):
    image = x.astype(jnp.float16)[None, None].astype(jnp.float32)
    return lax.conv(image, w[None, None, :2, :3], (1, 1), "SAME")[0, 0]  # wrong


def short_convolution(x, w):
    image, kernel = x.astype(jnp.float16)[None, None], w.astype(jnp.float16)[None, None, :2, :3]
    return lax.conv(image, kernel, (1, 1), "SAME")[0, 0]


def wide_product_in_groups(x, w):
    short = x.astype(jnp.bfloat16).astype(jnp.float32)
    return lax.ragged_dot(short, jnp.stack([w, w]), jnp.array([1, 1]))  # wrong


def short_product_in_groups(x, w):
    short = w.astype(jnp.bfloat16)
    return lax.ragged_dot(x.astype(jnp.bfloat16), jnp.stack([short, short]), jnp.array([1, 1]))


UNDER, MARK, TWICE = "collective-under-a-predicate", "lost-varying-mark", "summed-twice"
EACH, SAME, WIDE = "sum-in-a-loop", "same-every-trip", "wide-product"
OTHER = ("was summed over 'x' at", "4 equal copies of float32[]", "the result is 4 times one copy")
PAIRS = [
    Pair(
        UNDER,
        permute_under_cond,
        permute_and_mask,
        ("a ppermute over 'y'", "cond", "differs along 'x', between 4"),
        P("x", "y"),
    ),
    Pair(
        UNDER,
        ring_under_switch,
        ring_under_a_predicate_that_all_share,
        ("a sum made of ppermutes over 'x'",),
        P("x"),
    ),
    Pair(
        UNDER,
        permute_in_while,
        permute_in_while_for_all,
        ("a ppermute over 'x' stands in a while",),
        P("x"),
    ),
    Pair(
        UNDER,
        psum_in_a_condition,
        permute_in_while_for_all,
        ("a sum over 'x' stands in a while", "all devices of its axis"),
        P("x"),
    ),
    Pair(
        UNDER,
        psum_under_its_own_axis,
        psum_under_another_axis,
        ("a sum over 'x'", "all devices of its axis"),
        P("x"),
    ),
    Pair(
        MARK,
        mark_lost,
        mark_kept,
        ("along 'x'", "1 of its operands and 1 of its results", "all 4 devices", "40823"),
    ),
    Pair(TWICE, psum_twice, psum_once, OTHER),
    Pair(
        TWICE,
        psum_of_what_is_the_same,
        sum_of_what_is_the_same,
        ("over 'x' and 'y' adds 8 equal copies of float32[6,6]",),
    ),
    Pair(
        TWICE,
        psum_along_one_axis_too_many,
        psum_along_the_axis_it_differs,
        ("over 'y' adds 2 equal copies",),
    ),
    Pair(
        TWICE,
        scatter_of_a_sum,
        scatter_alone,
        ("adds 4 equal copies of float32[4,6], which was summed over 'x'",),
        P("x"),
    ),
    Pair(
        EACH,
        summed_each_trip,
        summed_after,
        ("float32[6,6] over 'x', 4 devices, runs 2 times", "144 bytes each time"),
    ),
    Pair(
        EACH,
        gradient_summed_by_jax_each_trip,
        gradient_summed_after,
        ("float32[6,6] over 'x'", "runs 2 times"),
    ),
    Pair(EACH, masked_sum_each_trip, masked_sum_after, ("float32[6,6] over 'x'", "runs 2 times")),
    Pair(
        SAME,
        gathered_each_trip,
        gathered_before,
        ("this gather over 'x' takes float32[2,6], 48 bytes", "3 times"),
        P("x"),
    ),
    Pair(
        SAME,
        gathered_each_trip_after_a_while,
        gathered_before,
        ("this gather over 'x' takes float32[2,6], 48 bytes", "3 times"),
        P("x"),
    ),
    Pair(
        WIDE,
        wide_product,
        short_product,
        ("float32[2,6] and float32[6,6]", "came from bfloat16", "72 multiply-adds"),
        P("x"),
    ),
    Pair(
        WIDE,
        wide_convolution,
        short_convolution,
        ("taken in float32, and an operand came from float16: 72 multi",),
        P("x"),
    ),
    Pair(
        WIDE,
        wide_product_in_groups,
        short_product_in_groups,
        ("float32[2,6] and float32[2,6,6]", "came from bfloat16: 72 multiply-adds"),
        P("x"),
    ),
]
every_pair = pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.wrong.__name__)


def line_of_the_mistake(f) -> str:
    lines, first = inspect.getsourcelines(f)
    (at,) = (first + i for i, line in enumerate(lines) if line.rstrip().endswith("# wrong"))
    return f"{inspect.getsourcefile(f)}:{at}"


@every_pair
def test_the_mistake_is_found_on_its_line(pair):
    (found,) = lint.program(mapped(pair.wrong, (P("x"), P()), pair.out_specs), ROWS, WEIGHTS)
    assert (found.kind, found.where) == (pair.kind, line_of_the_mistake(pair.wrong))
    for part in pair.says:
        assert part in found.harm
    assert found.cure.endswith(".")


@every_pair
def test_the_repaired_program_is_silent(pair):
    assert lint.program(mapped(pair.right, (P("x"), P()), pair.out_specs), ROWS, WEIGHTS) == []


@every_pair
def test_a_jit_round_it_and_a_traced_program_are_the_same(pair):
    f = jax.jit(mapped(pair.wrong, (P("x"), P()), pair.out_specs))
    (found,) = lint.program(jax.make_jaxpr(f)(ROWS, WEIGHTS))
    assert (found.kind, found.where) == (pair.kind, line_of_the_mistake(pair.wrong))


SAME_NUMBERS = [pair for pair in PAIRS if pair.kind in (EACH, SAME)]


@pytest.mark.parametrize("pair", SAME_NUMBERS, ids=lambda pair: pair.wrong.__name__)
def test_what_stands_outside_the_loop_computes_the_same(pair):
    draw = (
        np.random.default_rng(0).integers(-3, 4, (14, 6)).astype(np.float32)
    )  # whole numbers add exactly
    both = [
        jax.jit(mapped(f, (P("x"), P()), pair.out_specs))(draw[:8], draw[8:])
        for f in (pair.wrong, pair.right)
    ]
    np.testing.assert_array_equal(*map(np.asarray, both))


# Every all-reduce is seen


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    "algorithm",
    ALGORITHMS,
    ids=["xla", "ring", "two_rings", "halving", "doubling", "torus", "buckets"],
)
@pytest.mark.parametrize("wrap", [mapped, unchecked], ids=["check_vma", "no check_vma"])
def test_every_all_reduce(algorithm, wrap):
    axes = ("x", "y") if algorithm is torus else "x"
    all_reduce = algorithm(axes).all_reduce
    rows = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    everywhere = lambda f: lambda x: lax.pmax(varying(f(x), axes), axes)
    kinds = lambda f: [
        found.kind for found in lint.program(wrap(everywhere(f), (P(axes),), P()), rows)
    ]
    once = all_reduce
    trip = lambda total, row: (total + all_reduce(row), None)
    assert kinds(once) == []
    assert kinds(lambda x: once(once(x))) == [TWICE]
    assert kinds(lambda x: lax.scan(trip, jnp.zeros_like(once(x)), jnp.stack([x, 2 * x]))[0]) == [
        EACH
    ]
    assert kinds(
        lambda x: lax.cond(x[0, 0] > 0, lambda x: varying(once(x), axes), lambda x: x, x)
    ) == [UNDER]


def test_a_function_of_ours_that_sends_nothing_is_read_through():
    """What was widened before `tensor.copy_to` is still narrow behind it."""

    def wrong(x, w):
        entered = tensor.copy_to(lax.psum(x, "x").astype(jnp.float32), ring("x"))
        return lax.pmax(entered @ w, "x")

    rows = jax.ShapeDtypeStruct(ROWS.shape, jnp.bfloat16)
    assert [
        found.kind for found in lint.program(mapped(wrong, (P("x"), P()), P()), rows, WEIGHTS)
    ] == [WIDE]


def test_unchecked_programs_are_read_too():
    wrong = unchecked(
        psum_twice, (P("x"), P()), P()
    )  # here JAX says nothing and the result is 4 times too large
    (found,) = lint.program(wrong, ROWS, WEIGHTS)
    assert (found.kind, found.where) == (TWICE, line_of_the_mistake(psum_twice))
    assert lint.program(unchecked(psum_once, (P("x"), P()), P()), ROWS, WEIGHTS) == []


def test_a_reduction_by_a_users_function_is_read():
    largest = lambda x, w: lax.reduce(x, np.float32(0), lambda a, b: jnp.maximum(a, 2 * b), (0,))
    wrong = lambda x, w: psum_twice(largest(x, w)[None], w)
    (found,) = lint.program(mapped(wrong, (P("x"), P()), P()), ROWS, WEIGHTS)
    assert found.kind == TWICE


def test_a_map_in_a_map_keeps_what_differs_along_the_axes_around_it():
    def doubled(x):
        return jax.shard_map(
            lambda x: 2 * x, in_specs=P(None, "y"), out_specs=P(None, "y"), axis_names={"y"}
        )(x)

    def summed_on_some(x):
        total = varying(lax.psum(x, "x"), "x")
        return lax.cond(jnp.sum(doubled(x)) > 0, lambda: lax.psum(x, "x"), lambda: total)

    def kinds(f):
        f = jax.shard_map(
            f,
            mesh=devices(),
            in_specs=P("x"),
            out_specs=P("x"),
            axis_names={"x"},
            check_vma=False,
        )
        return [found.kind for found in lint.program(jax.jit(f), ROWS)]

    assert kinds(summed_on_some) == [UNDER]
    assert kinds(lambda x: lax.psum(doubled(x), "x")) == []
    assert kinds(lambda x: lax.psum(doubled(lax.psum(x, "x")), "x")) == [TWICE]


def test_what_a_linear_solve_sends_is_read():
    def solved(x, b):
        times = lambda v: lax.psum(x.T @ (x @ v), "x") + v
        return jax.scipy.sparse.linalg.cg(times, b)[0]

    def summed_if_finite(x, w):
        v = solved(x, w[0])
        return lax.cond(
            jnp.all(jnp.isfinite(v)), lambda: lax.psum(x @ v, "x"), lambda: jnp.zeros(2, x.dtype)
        )

    def kinds(f):
        return [
            found.kind for found in lint.program(unchecked(f, (P("x"), P()), P()), ROWS, WEIGHTS)
        ]

    assert UNDER in kinds(lambda x, w: solved(x, x[0]))  # each device solves as long as it likes
    assert kinds(summed_if_finite) == []


def test_a_sum_of_what_was_not_reduced_is_a_sum():
    def summed_for_all(x, w):
        total = lax.psum(lax.pcast(jnp.sum(x), "x", to="unreduced"), "x")
        return lax.cond(total > 0, lambda: lax.psum(x, "x"), lambda: lax.psum(-x, "x"))

    assert lint.program(mapped(summed_for_all, (P("x"), P()), P()), ROWS, WEIGHTS) == []


def test_random_keys_that_are_sent_each_trip_are_found():
    def drawn(x, w):
        key = jax.random.fold_in(jax.random.key(0), lax.axis_index("x"))
        draw = lambda _: jax.random.normal(
            lax.ppermute(key, "x", [(i, (i + 1) % 4) for i in range(4)]), x.shape, x.dtype
        )
        return lax.scan(lambda x, _: (x + draw(_), None), x, None, length=3)[0]

    (found,) = lint.program(mapped(drawn, (P("x"), P()), P("x")), ROWS, WEIGHTS)
    assert found.kind == SAME
    assert "8 bytes" in found.harm


def asked(ref, x):
    return lax.cond(jnp.sum(ref[...]) > 0, lambda: lax.psum(x, "x"), lambda: x)


def own_rows_written(x, w):
    ref = jax.new_ref(w[:2])
    ref[...] += x
    return asked(ref, x)


def own_rows_written_later(x, w):
    """What one trip writes, the next one reads."""
    ref = jax.new_ref(w[0])

    def trip(x, row):
        x = asked(ref, x)
        ref[...] += row
        return x, None

    return lax.scan(trip, x, x)[0]


def written_by_some(x, w):
    ref = jax.new_ref(w[0])

    def write():
        ref[...] = w[1]

    lax.cond(x[0, 0] > 0, write, lambda: None)
    return asked(ref, x)


def sums_written(x, w):
    ref = jax.new_ref(w[:2])
    ref[...] += x
    ref[...] = lax.psum(ref[...], "x")
    return asked(ref, x)


def sums_written_later(x, w):
    ref = jax.new_ref(w[0])

    def trip(x, row):
        x = asked(ref, x)
        ref[...] = row
        ref[...] = lax.pmax(ref[...], "x")
        return x, None

    return lax.scan(trip, x, x)[0]


@pytest.mark.parametrize(
    ("f", "kinds"),
    [
        (own_rows_written, {UNDER}),
        (own_rows_written_later, {UNDER}),
        (written_by_some, {UNDER}),
        (sums_written, set()),
        (sums_written_later, set()),
    ],
)
def test_a_mutable_array_has_what_was_written_to_it(f, kinds):
    found = lint.program(unchecked(f, (P("x"), P()), P("x")), ROWS, WEIGHTS)
    assert {each.kind for each in found} == kinds


def test_axes_of_one_device_do_not_count():
    one = mesh.make(x=1, y=8)
    for pair in PAIRS:
        if pair.kind in (MARK, EACH) or pair.wrong in (
            psum_twice,
            ring_under_switch,
            psum_under_its_own_axis,
        ):
            f = mesh.spmd(pair.wrong, mesh=one, in_specs=(P("x"), P()), out_specs=pair.out_specs)
            assert lint.program(f, jax.ShapeDtypeStruct((2, 6), jnp.float32), WEIGHTS) == []


def test_a_loop_of_one_trip_is_none():
    for f in (summed_each_trip, gradient_summed_by_jax_each_trip):
        assert (
            lint.program(
                mapped(f, (P("x"), P()), P()), jax.ShapeDtypeStruct((4, 6), jnp.float32), WEIGHTS
            )
            == []
        )


def used_each_trip(x, w):
    """The sum changes what the next trip computes: it must stay."""
    descend = lambda w, row: (w - lax.psum(jnp.outer(row @ w, row), "x"), None)
    return lax.scan(descend, w, x)[0]


def looked_at_each_trip(x, w):
    """The sums are added up, and their squares too."""

    def add(carry, row):
        total = lax.psum(row, "x")
        return (carry[0] + total, carry[1] + jnp.sum(total**2)), None

    return lax.scan(add, (jnp.zeros(6, x.dtype), jnp.zeros((), x.dtype)), x)[0]


def stacked_by_another_carry(x, w):
    """Two carries add up the same sums, and the loop stacks one of the carries."""

    def add(carry, row):
        total = lax.psum(row, "x")
        return (carry[0] + total, carry[1] + total), carry[1]

    return lax.scan(add, (jnp.zeros(6, x.dtype), jnp.ones(6, x.dtype)), x)


def chosen_by_device(x, w):
    """A sum of what is the same on all devices, but for a predicate."""
    w = lax.pcast(w, "x", to="varying")
    return lax.psum(lax.cond(lax.axis_index("x") == 0, lambda w: w, lambda w: 2 * w, w), "x")


def repeated_by_device(x, w):
    """The same, but for how often a loop runs."""
    w = lax.pcast(w, "x", to="varying")
    more = lambda carry: carry[0] < lax.axis_index("x")
    start = (lax.pcast(jnp.zeros((), jnp.int32), "x", to="varying"), w)
    return lax.psum(lax.while_loop(more, lambda carry: (carry[0] + 1, 2 * carry[1]), start)[1], "x")


def asked_for_by_the_condition(x, w):
    """The loop ends when the sum is large enough."""
    add = lambda carry: (carry[0] + 1, carry[1] + lax.psum(x[carry[0] % 2, 0], "x"))
    return lax.while_loop(lambda carry: carry[1] < 9, add, (0, jnp.zeros((), x.dtype)))[1]


@pytest.mark.parametrize(
    "f",
    [
        asked_for_by_the_condition,
        used_each_trip,
        looked_at_each_trip,
        stacked_by_another_carry,
        chosen_by_device,
        repeated_by_device,
    ],
)
def test_a_sum_that_is_needed_may_stay(f):
    assert lint.program(mapped(f, (P("x"), P()), P()), ROWS, WEIGHTS) == []


def test_a_region_declared_to_be_short():
    f = mapped(lambda x, w: x @ w, (P("x"), P()), P("x"))
    assert lint.program(f, ROWS, WEIGHTS) == []
    (found,) = lint.program(f, ROWS, WEIGHTS, compute=jnp.bfloat16)
    assert (found.kind, "declared" in found.harm) == (WIDE, True)
    short = [jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16) for leaf in (ROWS, WEIGHTS)]
    assert lint.program(f, *short, compute=jnp.bfloat16) == []
    with pytest.raises(ValueError, match="needs a floating-point type of 16 bits or fewer as"):
        lint.program(f, ROWS, WEIGHTS, compute=jnp.float32)


def test_the_report():
    found = lint.program(mapped(psum_twice, (P("x"), P()), P()), ROWS, WEIGHTS)
    where, harm, cure, end = lint.report(found).split("\n")
    assert (where, end) == (f"{line_of_the_mistake(psum_twice)}: summed-twice", "lint: 1 found.")
    assert "this sum over 'x'" in harm
    assert cure.startswith(
        "    Cure: Leave this sum out; multiply by 4 if that is what is meant. JAX itself already "
    )
    assert lint.report([]) == "lint: nothing found."


# Our own steps, and what becomes of them in the wrong order

CONFIG = gpt2.Config(
    layers=4,
    heads=4,
    width=16,
    context=8,
    vocabulary=30,
    vocabulary_multiple=8,
    dropout=0.1,
    attention_dropout=0.1,
)
LAYOUTS = [
    Layout(data=4, tensor=2, microbatches=2),
    Layout(data=2, tensor=4, sequence=True, zero=1, precision="bfloat16"),
    Layout(data=4, tensor=2, zero=3, microbatches=2),
    Layout(data=2, stage=2, tensor=2, microbatches=4, precision="float16"),
]
MORE_LAYOUTS = [
    Layout(data=8, microbatches=4),
    Layout(tensor=4, data=2, sequence=True, microbatches=2, remat="gathers"),
    Layout(data=4, tensor=2, zero=2, microbatches=2),
    Layout(data=8, zero=3, remat="block", precision="bfloat16"),
    Layout(data=4, stage=2, microbatches=4, chunks=2, zero=2),
    Layout(
        data=2,
        stage=2,
        tensor=2,
        microbatches=2,
        zero=3,
        sequence=True,
        precision="bfloat16",
        remat="block",
    ),
    Layout(data=2, stage=4, microbatches=4, zero=1, remat="stage"),
    Layout(data=2, stage=2, tensor=2, microbatches=4, schedule="zero_bubble_lockstep"),
    Layout(data=2, stage=4, microbatches=4, schedule="zero_bubble"),
]


def findings(layout, algorithm=ring):
    devices = mesh.make(**layout.axes)
    with jax.numpy_dtype_promotion("standard"):
        prepared = decoder.train_step(
            *(gpt2.FAMILY, CONFIG, optax.adamw(1e-3), layout, devices),
            batch=32,
            key=jax.random.key(0),
            compute=decoder.Compute(axes=moved_by(algorithm), max_norm=1.0),
        )
        windows = jax.ShapeDtypeStruct((32, CONFIG.context + 1), jnp.int32)
        return lint.program(
            prepared.train, prepared.shapes, windows, compute=recipe.DTYPES[layout.precision]
        )


@pytest.mark.sweep(30, "steps")
@pytest.mark.parametrize("layout", LAYOUTS[::2], ids=str)
def test_our_steps_are_silent(layout):
    assert findings(layout) == []


@pytest.mark.sweep(8)
@pytest.mark.long
@pytest.mark.parametrize("algorithm", [ring, xla], ids=["ring", "lax"])
@pytest.mark.parametrize("layout", LAYOUTS + MORE_LAYOUTS, ids=str)
def test_our_steps_are_silent_wherever(layout, algorithm):
    assert findings(layout, algorithm) == []


MODEL = {
    "w": jax.ShapeDtypeStruct((16, 8), jnp.float32),
    "b": jax.ShapeDtypeStruct((8,), jnp.float32),
}
DATA = (jax.ShapeDtypeStruct((32, 16), jnp.float32), jax.ShapeDtypeStruct((32, 8), jnp.float32))
FSDP = rules.fsdp("data", size=8, min_size=1)
SPLIT_DIMS = {name: list(spec).index("data") for name, spec in rules.specs(MODEL, FSDP).items()}


def loss(params, batch):
    return jnp.mean((batch[0] @ params["w"] + params["b"][None] - batch[1]) ** 2)


def accumulated(grad):
    return grads.accumulated(grad, microbatches=4)


def averaged(grad):
    return grads.averaged(grad, ring("data"))


def gathered(loss):
    return zero.gathered(loss, ring("data"), rules.specs(MODEL, FSDP))


def gathered_by_hand(loss):
    def whole(path, x):
        return lax.all_gather(x, "data", axis=SPLIT_DIMS[path[0].key], tiled=True)

    return lambda params, batch: loss(jax.tree.map_with_path(whole, params), batch)


def unsharded(grad):
    return zero.gathered_once(grad, ring("data"), rules.specs(MODEL, FSDP))


GRAD_FNS = {
    "reduced once a step": (averaged(accumulated(jax.value_and_grad(loss))), P(), []),
    "reduced once a microbatch": (
        accumulated(averaged(jax.value_and_grad(loss))),
        P(),
        [EACH, EACH],
    ),
    "gathered once a step": (averaged(unsharded(accumulated(jax.value_and_grad(loss)))), FSDP, []),
    "gathered once a microbatch": (
        averaged(accumulated(jax.value_and_grad(gathered(loss)))),
        FSDP,
        [],
    ),
    "gathered by hand": (
        averaged(accumulated(jax.value_and_grad(gathered_by_hand(loss)))),
        FSDP,
        [SAME, SAME],
    ),
    "averaged twice": (
        averaged(averaged(jax.value_and_grad(loss))),
        P(),
        [TWICE],
    ),  # the loss; `averaged` knows the others
    "in bfloat16": (
        averaged(precision.mixed(jax.value_and_grad(loss), jnp.bfloat16)),
        P(),
        [WIDE],
    ),  # but for the batch
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", GRAD_FNS)
def test_gradient_functions_in_their_order(name):
    grad, rule, kinds = GRAD_FNS[name]
    specs = P() if isinstance(rule, P) else rules.specs(MODEL, rule)
    f = mesh.spmd(grad, mesh=mesh.make(data=8), in_specs=(specs, P("data")), out_specs=(P(), specs))
    with jax.numpy_dtype_promotion("standard"):
        found = lint.program(f, MODEL, DATA)
    assert [each.kind for each in found if each.kind != WIDE or name == "in bfloat16"][
        : len(kinds) or None
    ] == kinds
    assert all("/parallax/" in each.where or __file__ in each.where for each in found)


@pytest.mark.parametrize("to", ["varying", "invarying", "reduced"])
def test_a_gather_of_ours_is_not_taken_for_a_sum(to):
    """With `invarying` and `reduced` its result is declared equal on all devices, as a sum's is."""
    mesh_ = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    specs = {"varying": P("x"), "invarying": P(), "reduced": P(None, reduced={"x"})}
    gather = functools.partial(ring.all_gather, axis_name="x", tiled=True, to=to)
    program = jax.make_jaxpr(
        jax.shard_map(gather, mesh=mesh_, in_specs=P("x"), out_specs=specs[to])
    )(jax.ShapeDtypeStruct((16,), jnp.float32, sharding=jax.NamedSharding(mesh_, P("x"))))
    ours = functools.partial(linear_jaxpr, mesh=mesh_, check_vma=True)
    assert [sent.kind for sent in values.sent_inside(program.jaxpr, ours)] == ["gather"]
