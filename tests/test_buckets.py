"""Packed into buckets, an all-reduce gives what it gives leaf by leaf, in fewer messages and at one
copy."""

import functools
import itertools
import math
import re

import hlo
import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from parallax import grads, mesh
from parallax.collectives import bucketed, buckets, ring, xla
from parallax.collectives.types import varying
from parallax.models import gpt2

ALGORITHMS = {"ring": ring, "psum": xla}
every_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=ALGORITHMS)
LEAVES = {  # shape, dtype, and the axes along which the block differs
    "a": ((3, 2), "float32", "xy"),
    "b": ((), "float32", "xy"),
    "c": ((5,), "float64", "xy"),
    "d": ((7,), "float32", "x"),
    "e": ((0, 4), "float32", "xy"),
    "g": ((9,), "float32", "xy"),
    "h": ((3,), "bool", "xy"),
    "j": ((4,), "float32", "x"),
    "k": ((1, 3), "bfloat16", "xy"),
}
NBYTES = (1, 30, 48, 2**20)


def over(n, f, out_specs):
    world = mesh.make(
        x=n, y=8 // n if n in (2, 4) else 1, devices=jax.devices()[: 8 if n in (2, 4) else n]
    )
    specs = {name: P(*axes) for name, (_, _, axes) in LEAVES.items()}
    return world, mesh.spmd(
        lambda tree: f(
            {name: leaf.reshape(leaf.shape[len(LEAVES[name][2]) :]) for name, leaf in tree.items()}
        ),
        mesh=world,
        in_specs=(specs,),
        out_specs=out_specs,
    )


def everywhere(tree):
    return jax.tree.map(lambda leaf: varying(leaf, ("x", "y"))[None, None], tree)


def energy(tree):
    return sum(jnp.sum(leaf.astype(jnp.float64) ** 2) for leaf in jax.tree.leaves(tree))


@functools.cache
def both(n, algorithm, nbytes):
    """The values and the gradients of the floats, in buckets and leaf by leaf: their types are
    compared as they are traced."""
    axes = bucketed(algorithm("x"), nbytes=nbytes), algorithm("x")

    def body(tree):
        whole = {
            name: leaf for name, leaf in tree.items() if not jnp.issubdtype(leaf.dtype, jnp.inexact)
        }
        real = {name: leaf for name, leaf in tree.items() if name not in whole}
        values = [axis.all_reduce(tree) for axis in axes]

        def energy_along(real, axis):
            return energy(axis.all_reduce({**real, **whole}))

        gradients = [jax.grad(energy_along)(real, axis) for axis in axes]
        for ours, plain in (values, gradients):
            for name, leaf in ours.items():
                assert jax.typeof(leaf) == jax.typeof(plain[name])
        return everywhere((values, gradients))

    world, f = over(n, body, P("x", "y"))
    return world, jax.jit(f)


@pytest.mark.sweep(16)
@pytest.mark.parametrize("n", range(1, 9))
@every_algorithm
@settings(max_examples=3)
@given(data=st.data())
def test_equals_leaf_by_leaf(n, algorithm, data):
    """On whole numbers, which add exactly in any order."""
    nbytes = NBYTES[n % len(NBYTES)]
    world, f = both(n, algorithm, nbytes)
    tree = {}
    for name, (shape, dtype, axes) in LEAVES.items():
        blocks = [world.shape[axis] for axis in axes]
        drawn = data.draw(hnp.arrays(np.int8, (*blocks, *shape), elements=st.integers(-3, 3)))
        tree[name] = drawn.astype(jnp.dtype(dtype))
    for ours, plain in f(tree):
        jax.tree.map(functools.partial(np.testing.assert_array_equal, strict=True), ours, plain)


SHAPES = st.lists(
    st.tuples(st.integers(0, 40), st.sampled_from(["float32", "int8", "bfloat16"])), max_size=20
)


@pytest.mark.sweep(3, "wholes")
@given(leaves=SHAPES, nbytes=st.integers(1, 100))
def test_every_leaf_is_in_one_bucket_that_is_full_but_not_too_full(leaves, nbytes):
    arrays = [np.zeros(size, jnp.dtype(dtype)) for size, dtype in leaves]
    found = buckets.assign_buckets([jnp.asarray(array) for array in arrays], nbytes)
    assert sorted(i for bucket in found for i in bucket) == list(range(len(arrays)))
    for dtype in {array.dtype for array in arrays}:
        alike = [bucket for bucket in found if arrays[bucket[0]].dtype == dtype]
        assert all(arrays[i].dtype == dtype for bucket in alike for i in bucket)
        small = [bucket for bucket in alike if arrays[bucket[0]].nbytes < nbytes]
        assert all(len(bucket) == 1 for bucket in alike if bucket not in small)
        assert [i for bucket in small for i in bucket] == [
            i for i, array in enumerate(arrays) if array.dtype == dtype and array.nbytes < nbytes
        ]  # in order, whatever large ones lie between
        assert all(sum(arrays[i].nbytes for i in bucket) <= nbytes for bucket in small)
        for bucket, after in itertools.pairwise(small):
            assert sum(arrays[i].nbytes for i in bucket) + arrays[after[0]].nbytes > nbytes


@every_algorithm
def test_it_averages_gradients(algorithm):
    """As `grads.averaged` takes it; losses and gradients come in one tree."""
    params, batch = (
        {"w": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(3)},
        jnp.arange(16.0).reshape(8, 2),
    )
    grad = jax.value_and_grad(
        lambda params, batch: jnp.sum((batch @ params["w"] + params["b"][None]) ** 2)
    )

    def run(axis):
        f = grads.averaged(grad, axis)
        return jax.jit(mesh.spmd(f, mesh=mesh.make(x=8), in_specs=(P(), P("x")), out_specs=P()))(
            params, batch
        )

    jax.tree.map(np.testing.assert_array_equal, run(bucketed(algorithm("x"))), run(algorithm("x")))


def unstacked(config):
    """The shapes of GPT-2's leaves with every layer's weights apart."""
    model = jax.eval_shape(lambda: gpt2.GPT2(config, key=jax.random.key(0)))
    blocks = [leaf.shape[1:] for leaf in jax.tree.leaves(model.blocks)] * config.layers
    return (
        [leaf.shape for leaf in (model.wte, model.wpe)]
        + blocks
        + [leaf.shape for leaf in jax.tree.leaves(model.norm)]
    )


def compiled(shapes, axis, n=2):
    """The all-reduce of one float32 array of each shape on each device, compiled."""
    f = mesh.spmd(
        lambda tree: axis.all_reduce(jax.tree.map(lambda leaf: leaf[0], tree)),
        mesh=mesh.make(x=n, devices=jax.devices()[:n]),
        in_specs=(P("x"),),
        out_specs=P(),
    )
    return (
        jax.jit(f)
        .lower([jax.ShapeDtypeStruct((n, *shape), jnp.float32) for shape in shapes])
        .compile()
    )


@pytest.mark.long
def test_gpt2s_small_gradients_go_together():
    """Of the small GPT-2's 148 leaves the 98 of less than 1 MB in one message a hop, and not one
    byte more than their padding."""
    shapes = unstacked(gpt2.SMALL)
    assert len(shapes) == 148
    plain, packed = (
        hlo.parse(compiled(shapes, f).as_text()) for f in (ring("x"), bucketed(ring("x")))
    )
    assert len(plain) == 2 * 148
    assert sum(4 * math.prod(shape) < buckets.NBYTES for shape in shapes) == 98
    assert len(packed) == 2 * (148 - 98 + 1)
    assert sum(op.bytes for op in packed) == sum(op.bytes for op in plain)


@pytest.mark.sweep(3, "wholes")
def test_one_bucket_is_packed_at_a_time():
    """In memory, beside what leaf by leaf needs: one bucket, since each waits for the one
    before."""
    shapes, nbytes = [(1000 + i, 7) for i in range(12)], 2**17
    plain, packed = (
        compiled(shapes, f, n=4).memory_analysis().temp_size_in_bytes
        for f in (ring("x"), bucketed(ring("x"), nbytes=nbytes))
    )
    assert packed <= plain + nbytes


def test_a_leaf_alone_is_not_copied():
    """A large leaf's program has no more temporary memory than without buckets."""
    plain, packed = (
        compiled([(2**16,)], f, n=4).memory_analysis().temp_size_in_bytes
        for f in (ring("x"), bucketed(ring("x")))
    )
    assert packed == plain


def test_errors():
    with pytest.raises(
        ValueError,
        match=re.escape("bucketed needs nbytes of 1 or more; got 0. The usual size is 1048576."),
    ):
        bucketed("x", nbytes=0)
