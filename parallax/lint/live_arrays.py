"""Mistakes in live arrays: copies that differ, and devices that hold more than others."""

import hashlib
from collections import Counter
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from parallax._typing import PyTree
from parallax.lint.finding import Finding
from parallax.trees import dotted


def arrays(tree: PyTree, *, uneven: float = 0.1) -> list[Finding]:
    """Returns the mistakes in the arrays of `tree` on this process's devices.

    Nothing is sent between devices; copies go to the host.

    * `copies-differ`: blocks of an array that should be the same and are not, bit for bit. NaNs
      are equal if their bits are. The copies that most devices have are taken to be right.
    * `uneven-bytes`: a device with more than (1 + `uneven`) times the bytes of the one that has
      the fewest, of those in use.

    Each process sees only the blocks on its own devices: in a run of several processes, call it on
    all of them. `fingerprint` compares between them.
    """
    findings, device_bytes = [], Counter()
    for path, leaf in _live(tree):
        for block in _blocks(leaf):
            findings += _differing(path, block)
        device_bytes.update({s.device: s.data.nbytes for s in leaf.addressable_shards})
    return findings + _uneven(device_bytes, uneven)


def fingerprint(tree: PyTree) -> str:
    """Returns a hash of all bits of `tree` on this process's devices.

    Processes with the same blocks (data parallelism over whole processes) have the same
    fingerprint: print it on each, or gather it with `jax.experimental.multihost_utils`.
    """
    digest = hashlib.sha256()
    for path, leaf in _live(tree):
        for block in _blocks(leaf):
            digest.update(f"{path}{_start(block[0])}".encode())
            digest.update(_bits(block[0]).tobytes())
    return digest.hexdigest()


def _live(tree: PyTree) -> list[tuple[str, jax.Array]]:
    """Returns each JAX array with its path; random keys as their numbers."""
    leaves = []
    for path, leaf in jax.tree.leaves_with_path(tree):
        if isinstance(leaf, jax.Array):
            is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            leaves.append((dotted(path), jax.random.key_data(leaf) if is_key else leaf))
    return leaves


def _blocks(leaf: jax.Array) -> Iterable[list[Any]]:
    """Returns the shards of each block of an array on this process's devices, in block order."""
    blocks: dict[tuple, list[Any]] = {}
    for shard in leaf.addressable_shards:
        blocks.setdefault(_start(shard), []).append(shard)
    return [blocks[start] for start in sorted(blocks)]


def _differing(path: str, block: list[Any]) -> list[Finding]:
    bits = [_bits(shard) for shard in block]
    digests = [hashlib.sha256(copy.tobytes()).digest() for copy in bits]
    usual = digests.index(Counter(digests).most_common(1)[0][0])
    return [
        _differs(path, block, bits[usual] != copy, shard, block[usual])
        for shard, copy, digest in zip(block, bits, digests, strict=True)
        if digest != digests[usual]
    ]


def _differs(
    path: str, block: list[Any], bytes_differ: np.ndarray, shard: Any, usual: Any
) -> Finding:
    differ = bytes_differ.any(axis=-1).reshape(shard.data.shape)
    first = tuple(int(i) for i in np.argwhere(differ)[0])
    place = tuple(i + start for i, start in zip(first, _start(shard), strict=True))
    value, usual_value = (np.asarray(copy.data)[first] for copy in (shard, usual))
    return Finding(
        "copies-differ",
        path,
        f"device {shard.device.id} holds {np.count_nonzero(differ):,} of {differ.size:,} numbers "
        f"otherwise than device {usual.device.id}, one of {len(block)} devices that should have "
        f"the same bits; the first at {place}: {value} and not {usual_value}.",
        "Place this leaf again from one copy (mesh.place), and run lint.program over the step "
        "that made it.",
    )


def _uneven(device_bytes: Counter, tolerance: float) -> list[Finding]:
    if not device_bytes:
        return []
    fullest = max(device_bytes, key=device_bytes.__getitem__)
    emptiest = min(device_bytes, key=device_bytes.__getitem__)
    most, least = device_bytes[fullest], device_bytes[emptiest]
    if most <= (1 + tolerance) * least:
        return []
    return [
        Finding(
            "uneven-bytes",
            f"device {fullest.id}",
            f"device {fullest.id} holds {most:,} bytes and device {emptiest.id} {least:,}: the "
            "fullest decides what fits.",
            "Split over all devices what lies on some: mesh.place with rules.specs.",
        )
    ]


def _start(shard: Any) -> tuple[int, ...]:
    """Returns the global index of a shard's first number."""
    return tuple(part.start or 0 for part in shard.index)


def _bits(shard: Any) -> np.ndarray:
    """Returns the bytes of a shard: [numbers, bytes of one]."""
    data = np.ascontiguousarray(shard.data)
    return data.reshape(-1, 1).view(np.uint8)
