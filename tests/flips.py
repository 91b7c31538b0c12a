"""A bit turned in one device's copy of an array: what a broken memory does, and what nothing in JAX
notices."""

import jax
import jax.numpy as jnp
import numpy as np

from parallax import mesh


def flipped(array: jax.Array, device: int, number: int, bit: int) -> jax.Array:
    """`array` with one bit turned in the block of one device; where the device is another
    process's, as it is.

    Args:
        device: its id.
        number: which number of the flattened block, modulo their count.
        bit: which bit of it, modulo their count; of a bool the lowest.
    """
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(
            flipped(jax.random.key_data(array), device, number, bit),
            impl=jax.random.key_impl(array),
        )
    blocks = [
        jax.device_put(turned(np.asarray(shard.data), number, bit), shard.device)
        if shard.device.id == device
        else shard.data
        for shard in array.addressable_shards
    ]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, blocks)


def turned(block: np.ndarray, number: int, bit: int) -> np.ndarray:
    """A copy of `block` with one bit turned."""
    block = np.array(block, order="C")
    width = 1 if block.dtype == bool else bits_of(block.dtype)
    octets = block.reshape(-1, 1).view(np.uint8)
    at, bit = number % len(octets), bit % width
    octets[at, bit // 8] ^= np.uint8(1 << bit % 8)
    return block


def bits_of(dtype) -> int:
    """The bits of a number that mean something: of an int4 four, though it takes a byte."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return dtype.itemsize * 8
    return (jnp.finfo if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo)(dtype).bits


def of_other_bits(tree):
    """The paths of the arrays of which two devices hold other bits of one block, seen on the
    host."""
    paths = set()
    for path, leaf in jax.tree.leaves_with_path(tree):
        if isinstance(leaf, jax.Array):
            is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            array = jax.random.key_data(leaf) if is_key else leaf
            blocks = {}
            for shard in array.addressable_shards:
                content = np.ascontiguousarray(shard.data).tobytes()
                blocks.setdefault(str(shard.index), set()).add(content)
            if any(len(contents) > 1 for contents in blocks.values()):
                paths.add(mesh.dotted(path))
    return paths
