"""An axis does what its algorithm does along its names; several do, one after the other, what `lax`
does along all."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from reference import EXACT

from parallax import context, mesh
from parallax.collectives import (
    Axis,
    bucketed,
    combined_axis,
    doubling,
    halving,
    ring,
    torus,
    two_rings,
    xla,
)
from parallax.collectives.types import varying

ALGORITHMS = [ring, two_rings, halving, torus, xla]
COLLECTIVES = {  # of an Axis, and of `lax` along the names; whole numbers add exactly
    "all_reduce": (lambda axis, x: axis.all_reduce(x), lax.psum),
    "all_mean": (lambda axis, x: axis.all_mean(x), lax.pmean),
    "all_max": (lambda axis, x: axis.all_max(x), lax.pmax),
    "reduce_scatter": (lambda axis, x: axis.reduce_scatter(x), lax.psum_scatter),
    "reduce_scatter, tiled": (
        lambda axis, x: axis.reduce_scatter(x, scatter_dimension=1, tiled=True),
        functools.partial(lax.psum_scatter, scatter_dimension=1, tiled=True),
    ),
    "all_gather": (lambda axis, x: axis.all_gather(x), lax.all_gather),
    "all_gather, elsewhere": (
        lambda axis, x: axis.all_gather(x, axis=-1),
        functools.partial(lax.all_gather, axis=2),
    ),
    "all_gather, tiled": (
        lambda axis, x: axis.all_gather(x, axis=1, tiled=True),
        functools.partial(lax.all_gather, axis=1, tiled=True),
    ),
}
X = np.random.default_rng(0).integers(-9, 9, (4, 8, 8)).astype(np.float32)


def on(body, rows=4):
    """`body` of a block [rows, 8] on each of 2 x 2 devices, which differ; every device's results
    come back."""
    world = mesh.make(a=2, b=2, devices=jax.devices()[:4])
    local = lambda x: jax.tree.map(lambda leaf: varying(leaf, ("a", "b"))[None], body(x[0]))
    return jax.jit(
        mesh.spmd(local, mesh=world, in_specs=(P(("a", "b")),), out_specs=P(("a", "b")))
    )(X[:, :rows])


def both(axis, names):
    """What `axis` does, and what `lax` does along `names`, which have the same types."""

    def body(x):
        found = {
            name: (ours(axis, x), twin(x, names)) for name, (ours, twin) in COLLECTIVES.items()
        }
        for name, (ours, twin) in found.items():
            assert jax.typeof(ours) == jax.typeof(twin), name
        place = jnp.asarray(axis.index(), jnp.int32), jnp.asarray(lax.axis_index(names), jnp.int32)
        return found | {
            "index": place,
            "size": (jnp.asarray(axis.size()), jnp.asarray(lax.axis_size(names))),
        }

    for name, (ours, twin) in on(body, rows=4 if len(names) > 1 else 2).items():
        np.testing.assert_array_equal(ours, twin, err_msg=name)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
def test_an_axis_is_its_mover_along_its_names(algorithm):
    both(algorithm("b"), "b")


def test_a_name_is_moved_by_lax():
    assert Axis.of("b") == xla("b")
    assert Axis.of(("a", "b")) == xla(("a", "b"))
    assert Axis.of(ring("b")) == ring("b") != xla("b")
    assert [repr(Axis.of(axis)) for axis in ("b", ring("b"), halving(("a", "b")))] == [
        "'b'",
        "ring('b')",
        "halving(('a', 'b'))",
    ]
    assert {ring("b"): 1}[ring("b")] == 1


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    "axis", [("b", ring("a")), (halving("b"), ring("a")), (ring("b"), "a")], ids=str
)
def test_one_after_the_other_is_the_group(axis):
    both(Axis.of(axis), ("b", "a"))


def test_a_part_of_several_is_moved_by_its_own_algorithm():
    several = Axis.of((halving("a"), ring("b"))).algorithm
    np.testing.assert_array_equal(
        on(lambda x: several.all_reduce(x, "b")), on(lambda x: lax.psum(x, "b"))
    )
    with pytest.raises(ValueError, match=re.escape("'c' is not one of the axes that")):
        on(lambda x: several.all_reduce(x, "c"))


def test_joined():
    """One group where one algorithm moves all; otherwise one after the other."""
    assert combined_axis(ring("a"), ring("b")) == ring(("a", "b"))
    assert combined_axis("a", ("b", "c"), ()) == xla(("a", "b", "c"))
    assert combined_axis() == xla(())
    assert combined_axis(ring("a"), ()) == ring(("a",))
    mixed = combined_axis(ring("a"), "b")
    assert (mixed.names, str(mixed.algorithm)) == (("a", "b"), "ring then xla")
    both(mixed, ("a", "b"))


def test_without_an_axis_nothing_moves():
    x = jnp.arange(6.0).reshape(2, 3)
    for algorithm in (ring, xla):
        axis = algorithm(())
        np.testing.assert_array_equal(axis.all_reduce(x), x)
        np.testing.assert_array_equal(axis.all_max(x), x)
        assert (axis.size(), int(axis.index())) == (1, 0)
    mixed = Axis.of((ring("b"), "a")).over(())
    ways = [mixed.all_gather, mixed.reduce_scatter]
    for way in ways + [functools.partial(way, tiled=True) for way in ways]:
        np.testing.assert_array_equal(on(way), X[:, :4])


@pytest.mark.parametrize("names", [("b", "a"), ring(("b", "a")), (ring("b"), "a")], ids=str)
def test_devices_are_numbered_in_the_order_of_the_names(names):
    """The mesh has its axes in another order."""
    axis = Axis.of(names)
    to_the_right = [(i, (i + 1) % 4) for i in range(4)]
    sent, place = on(lambda x: (axis.permute({"x": axis.index()}, to_the_right), axis.index()))
    np.testing.assert_array_equal(sent["x"], (place - 1) % 4)


@pytest.mark.parametrize("order", [context.zigzag, context.contiguous])
@pytest.mark.parametrize("names", [("b", "a"), (ring("b"), "a")], ids=str)
def test_causal_attention_along_axes_in_another_order_is_that_of_one_device(names, order):
    world, spec = mesh.make(a=2, b=2, devices=jax.devices()[:4]), P(None, ("b", "a"))
    attend = functools.partial(context.attention, axis=names, order=order)
    over = mesh.spmd(attend, mesh=world, in_specs=spec, out_specs=spec)

    def split(*arrays):
        out = over(*[context.split(x, 4, order=order) for x in arrays])
        return context.unsplit(out, 4, order=order)

    random = np.random.default_rng(0)
    arrays = [random.standard_normal((1, 16, 2, 4)) for _ in range(3)]
    energy = lambda attend: lambda *arrays: jnp.sum(attend(*arrays) ** 2)
    for ours, plain in zip(
        *[
            jax.jit(jax.value_and_grad(energy(attend), argnums=(0, 1, 2)))(*arrays)
            for attend in (split, context.blockwise)
        ],
        strict=True,
    ):
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=EXACT, atol=EXACT), ours, plain
        )


def test_blocks_without_elements_are_gathered():
    mixed = Axis.of((ring("a"), "b"))
    for ours, twin in on(lambda x: [(mixed.all_gather(x[:0]), lax.all_gather(x[:0], ("a", "b")))]):
        assert ours.shape == twin.shape


@pytest.mark.parametrize(
    "negative",
    [
        lambda axis, x: axis.reduce_scatter(x, scatter_dimension=-1, tiled=True),
        lambda axis, x: axis.reduce_scatter(x[:2], scatter_dimension=-2),
        lambda axis, x: axis.all_to_all(x, 0, -1, tiled=True),
        lambda axis, x: axis.all_to_all(x, -1, 0, tiled=True),
        lambda axis, x: axis.all_to_all({"x": x[:, :2]}, -1, -2),
    ],
)
def test_a_negative_dim_is_counted_from_the_end(negative):
    ours, named = on(lambda x: (negative(ring("b"), x), negative(Axis("b"), x)))
    jax.tree.map(np.testing.assert_array_equal, named, ours)


def test_buckets_keep_the_other_collectives():
    axis = bucketed(ring("b"))
    assert axis.algorithm.all_gather is ring.all_gather
    assert repr(axis) == "bucketed ring('b')"
    both(axis, "b")


REFUSED = {
    "doubling has no reduce_scatter. Use halving, or a plain axis name": lambda x: doubling(
        "a"
    ).reduce_scatter(x),
    "doubling has no all_gather. Use halving": lambda x: doubling("a").all_gather(x),
    "ring then xla has no all_to_all. Use one algorithm for all axes": lambda x: Axis.of(
        (ring("a"), "b")
    ).all_to_all(x, 0, 0),
    "scatter_dimension=2 is no dim of an array of 2 dims": lambda x: Axis.of(
        (ring("a"), "b")
    ).reduce_scatter(x, scatter_dimension=2, tiled=True),
    "axis=-4 is no dim of an array of 3 dims": lambda x: Axis.of((ring("a"), "b")).all_gather(
        x, axis=-4
    ),
    "axis=0 needs an array of one dim or more": lambda x: Axis.of((ring("a"), "b")).all_gather(
        x[0, 0], tiled=True
    ),
    "reduce_scatter: dim 0 (scatter_dimension) of shape (3, 8) must be 4": lambda x: Axis.of(
        (ring("a"), "b")
    ).reduce_scatter(x[:3]),
    "'c' is not an axis of the shard_map around this call": lambda x: ring("c").all_reduce(x),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_an_algorithm_does_not_have_is_refused(message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        on(REFUSED[message])
