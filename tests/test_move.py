"""Live arrays move from any layout to any other, of other axes and devices, with their bits; the
bytes are what was missing."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from parallax import mesh, rules
from parallax.layout import Layout
from parallax.models import decoder, llama

MESHES = {  # axes, and the first and last device
    "all": ({"a": 4, "b": 2}, 0, 8),
    "other axes": ({"b": 2, "a": 2, "c": 2}, 0, 8),
    "half": ({"a": 2, "b": 2}, 4, 8),
    "three": ({"a": 1, "b": 3}, 1, 4),
    "one": ({"a": 1, "b": 1}, 2, 3),
}
SPECS = [P(), P("a"), P("b", "a"), P(("a", "b")), P(None, "b")]
PLACES = [(name, spec) for name in MESHES for spec in SPECS]
BITS = (
    np.random.default_rng(0).integers(0, 2**64, (24, 12), np.uint64).view(np.float64)
)  # nans of all kinds among them


@functools.cache
def devices(name):
    sizes, first, last = MESHES[name]
    return mesh.make(**sizes, devices=jax.devices()[first:last])


def by_hand(was, now):
    """The bytes that were not there, number by number."""
    had = {shard.device: np.zeros(BITS.shape, bool) for shard in now.addressable_shards}
    for shard in [] if was is None else was.addressable_shards:
        had.setdefault(shard.device, np.zeros(BITS.shape, bool))[shard.index] = True
    missing = 0
    for shard in now.addressable_shards:
        needed = np.zeros(BITS.shape, bool)
        needed[shard.index] = True
        missing += int((needed & ~had[shard.device]).sum())
    return missing * now.dtype.itemsize


@pytest.mark.parametrize(
    "numbers", [np.array([2**40 + 1]), np.array([1 / 3]), np.int64(-(2**31) - 1)]
)
def test_numpy_numbers_that_32_bits_cannot_hold_are_refused(numbers):
    says = r"mesh\.move keeps all values; w is (int|float)64, and has a value"
    with jax.enable_x64(False), pytest.raises(ValueError, match=says):
        mesh.move({"w": numbers}, P(), devices("one"))


def test_numpy_numbers_become_32_bit_where_no_value_changes():
    numbers = np.array([0.5, np.nan, np.inf, 2.0**100])
    with jax.enable_x64(False):
        moved = mesh.move(numbers, P(), devices("one"))
    assert (moved.tree.dtype, moved.bytes) == (np.float32, 16)
    np.testing.assert_array_equal(moved.tree, numbers)


@given(st.sampled_from([None, *PLACES]), st.sampled_from(PLACES))
def test_bits_and_bytes(before, after):
    numbers = BITS if before is None else mesh.place(BITS, before[1], devices(before[0]))
    name, spec = after
    moved = mesh.move({"w": numbers, "name": "x"}, {"w": spec, "name": None}, devices(name))
    now = moved.tree["w"]
    assert moved.tree["name"] == "x"
    assert now.sharding.mesh == devices(name)
    assert now.sharding.spec == spec
    np.testing.assert_array_equal(np.asarray(now).view(np.uint64), BITS.view(np.uint64))
    assert moved.bytes == by_hand(None if before is None else numbers, now)
    if before == after:
        assert moved.bytes == 0


def test_what_does_not_live_here_is_refused():
    wide = devices("all")
    with pytest.raises(ValueError, match=r"w: .*'b'.* must be a multiple of 3"):
        mesh.move({"w": jnp.zeros((4, 4))}, {"w": P("b")}, devices("three"))
    with pytest.raises(
        ValueError, match=r"mesh\.move takes arrays that live .*; w is traced by jax\.jit\. Inside"
    ):
        jax.jit(lambda w: mesh.move({"w": w}, P(), wide).tree)(jnp.zeros(4))
    gone = jnp.zeros(4)
    gone.delete()
    with pytest.raises(ValueError, match=r"mesh\.move: w: the array of shape \(4,\) was deleted"):
        mesh.move({"w": gone}, P(), wide)


@pytest.mark.long
def test_from_training_in_a_pipeline_to_writing():
    """The trained model, from stages of three devices' axes to heads over two, writes what it would
    on one device."""
    config = llama.Config(
        layers=4,
        heads=4,
        groups=2,
        width=8,
        hidden=12,
        context=16,
        vocabulary=61,
        vocabulary_multiple=64,
    )
    layout, key = (
        Layout(data=2, stage=2, tensor=2, microbatches=2, chunks=2, zero=3),
        jax.random.key(0),
    )
    prepared = decoder.train_step(
        llama.FAMILY, config, optax.sgd(1.0), layout, mesh.make(**layout.axes), batch=4, key=key
    )
    state, _ = prepared.train(
        prepared.init(), np.random.default_rng(0).integers(0, 61, (4, 17)).astype(np.int32)
    )
    whole = decoder.joined(llama.FAMILY, layout, state.model)
    two = mesh.make(tensor=2, devices=jax.devices()[:2])
    moved = mesh.move(whole, rules.specs(whole, llama.rules("tensor"), two), two)
    assert moved.bytes > 0
    write = jax.jit(
        lambda model: llama.sample(model, [3, 1, 4], tokens=10, temperature=0.5, key=key)
    )
    np.testing.assert_array_equal(
        write(moved.tree), write(jax.tree.map(jnp.asarray, jax.device_get(whole)))
    )
    jax.tree.map(
        np.testing.assert_array_equal,
        eqx.filter(moved.tree, eqx.is_array),
        eqx.filter(whole, eqx.is_array),
    )
