"""Copies that are no longer copies, to the bit; devices that hold more than others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from parallax import lint, mesh

SHAPE = (4, 6)


def placed(spec, *, copies=(), dtype=np.float32, value=0.0):
    """An array of 4 x 6 over data 4 x tensor 2, some of whose devices hold `value` at an index of
    their block."""
    sharding = NamedSharding(mesh.make(data=4, tensor=2), spec)
    whole = np.arange(24).reshape(SHAPE).astype(dtype)
    blocks = []
    for device, index in sharding.addressable_devices_indices_map(SHAPE).items():
        block = whole[index].copy()
        for number, at in copies:
            if device.id == number:
                block[at] = value
        blocks.append(jax.device_put(block, device))
    return jax.make_array_from_single_device_arrays(SHAPE, sharding, blocks)


@pytest.mark.parametrize(
    "spec", [P(), P("data"), P(None, "tensor"), P("data", "tensor"), P(("data", "tensor"))[:0]]
)
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.int8, bool])
def test_copies_are_copies(spec, dtype):
    assert lint.arrays({"w": placed(P(*spec), dtype=dtype)}) == []


def test_a_copy_that_differs_is_named_with_leaf_device_and_index():
    tree = {
        "blocks": [placed(P(), copies=[(5, (2, 3)), (5, (3, 0))], value=7.5)],
        "fine": placed(P("data")),
    }
    (found,) = lint.arrays(tree)
    assert (found.kind, found.where) == ("copies-differ", "blocks.0")
    assert "device 5 holds 2 of 24 numbers otherwise than device 0, one of 8 devices" in found.harm
    assert "the first at (2, 3): 7.5 and not 15.0." in found.harm
    repaired = mesh.place(
        np.asarray(tree["blocks"][0]), P(), mesh.make(data=4, tensor=2)
    )  # the cure: from one copy
    assert lint.arrays({"blocks": [repaired]}) == []


def test_the_index_is_that_of_the_whole_array():
    (found,) = lint.arrays(
        {"w": placed(P("data"), copies=[(7, (0, 1))], value=-1.0)}
    )  # device 7: data 3, tensor 1
    assert "device 7 holds 1 of 6 numbers otherwise than device 6, one of 2" in found.harm
    assert "the first at (3, 1): -1.0 and not 19.0." in found.harm


def test_most_copies_are_right_wherever_the_first_is():
    found = lint.arrays([placed(P(), copies=[(0, (0, 0)), (3, (0, 0))], value=9.0)])
    assert [each.harm.split(" holds ")[0] for each in found] == ["device 0", "device 3"]


@pytest.mark.parametrize(
    ("right", "left"),
    [(np.nan, -np.nan), (0.0, -0.0), (1.0, np.nextafter(np.float32(1), np.float32(2)))],
)
def test_equal_is_to_the_bit(right, left):
    """NaNs with the same bits are equal, others are not, and nor are the two zeros."""
    all_devices = [(device, (1, 1)) for device in range(8)]
    assert lint.arrays([placed(P(), copies=all_devices, value=right)]) == []
    one = placed(P(), copies=all_devices, value=right)
    blocks = [shard.data for shard in one.addressable_shards]
    blocks[2] = jax.device_put(np.asarray(blocks[2]).copy(), blocks[2].device)
    other = np.asarray(blocks[2]).copy()
    other[1, 1] = np.float32(left)
    blocks[2] = jax.device_put(other, jax.devices()[2])
    (found,) = lint.arrays([jax.make_array_from_single_device_arrays(SHAPE, one.sharding, blocks)])
    assert "device 2 holds 1 of 24" in found.harm


@given(
    number=st.integers(0, 7),
    block=arrays(np.uint32, (3,), elements=st.integers(0, 2**32 - 1)),
    flipped=st.integers(0, 31),
    place=st.integers(0, 2),
)
def test_any_flipped_bit_is_found(number, block, flipped, place):
    other = block.copy()
    other[place] ^= np.uint32(1 << flipped)
    sharding = NamedSharding(mesh.make(data=4, tensor=2), P())
    shards = [
        jax.device_put((other if device.id == number else block).view(np.float32), device)
        for device in jax.devices()
    ]
    (found,) = lint.arrays([jax.make_array_from_single_device_arrays((3,), sharding, shards)])
    assert f"device {number} holds 1 of 3 numbers" in found.harm
    assert f"the first at ({place},)" in found.harm


def test_random_keys_scalars_empty_arrays_and_what_is_no_array():
    devices = mesh.make(data=4, tensor=2)
    tree = {
        "key": jax.random.key(3),
        "scalar": jnp.ones(()),
        "none": jnp.ones((0, 3)),
        "host": np.ones(3),
        "n": 3,
        "f": jax.nn.relu,
    }
    assert lint.arrays(mesh.place(jax.tree.map(lambda leaf: leaf, tree), P(), devices)) == []


def test_a_device_that_holds_more():
    tree = {
        "w": placed(P("data", "tensor")),
        "one": jax.device_put(np.ones(100, np.float32), jax.devices()[3]),
    }
    (found,) = lint.arrays(tree)
    assert (found.kind, found.where) == ("uneven-bytes", "device 3")
    assert "device 3 holds 412 bytes and device 0 12" in found.harm
    spread = tree | {
        "one": mesh.place(
            np.ones(104, np.float32), P(("data", "tensor")), mesh.make(data=4, tensor=2)
        )
    }
    assert lint.arrays(spread) == []
    assert lint.arrays(tree, uneven=40.0) == []


def test_fingerprints_are_those_of_the_bits():
    one, same, other = (
        placed(P("data")),
        placed(P("data")),
        placed(P("data"), copies=[(0, (0, 0)), (1, (0, 0))], value=2.0),
    )
    assert lint.fingerprint({"w": one}) == lint.fingerprint({"w": same})
    assert (
        len(
            {
                lint.fingerprint({"w": one}),
                lint.fingerprint({"w": other}),
                lint.fingerprint({"v": one}),
            }
        )
        == 3
    )
