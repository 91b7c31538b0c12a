"""Mistakes that live arrays show: copies that are no longer copies, and devices that hold more than others."""

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
    """The mistakes in the arrays of `tree` on this process's devices. Nothing moves between devices; copies go to the host.

    * `copies-differ`: blocks of an array that should be the same and are not, bit for bit. NaNs are equal where their bits are.
      The copies that most devices have are taken to be right.
    * `uneven-bytes`: a device with more than (1 + `uneven`) times the bytes of the one that has least, of those in use.

    Each process sees the blocks on its own devices alone: in a run of many, call it on all; `fingerprint` compares between them.
    """
    leaves = _live(tree)
    findings = [
        found
        for path, leaf in leaves
        for block in _blocks(leaf)
        for found in _differing(path, leaf, block)
    ]
    held = Counter()
    for _, leaf in leaves:
        held.update({shard.device: shard.data.nbytes for shard in leaf.addressable_shards})
    return findings + _uneven(held, uneven)


def fingerprint(tree: PyTree) -> str:
    """A hash of all bits of `tree` on this process's devices, one for each distinct block: the same where the blocks are.

    Processes that hold the same blocks (data parallelism over whole processes) have the same fingerprint: compare what each
    prints, or gather it with `jax.experimental.multihost_utils`.
    """
    digest = hashlib.sha256()
    for path, leaf in _live(tree):
        for block in _blocks(leaf):
            digest.update(f"{path}{_start(block[0])}".encode())
            digest.update(_bits(block[0]).tobytes())
    return digest.hexdigest()


def _live(tree: PyTree) -> list[tuple[str, jax.Array]]:
    """Each JAX array with its path; random keys as the numbers that they are."""
    leaves = [
        (dotted(path), leaf)
        for path, leaf in jax.tree.leaves_with_path(tree)
        if isinstance(leaf, jax.Array)
    ]
    is_key = lambda leaf: jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return [(path, jax.random.key_data(leaf) if is_key(leaf) else leaf) for path, leaf in leaves]


def _blocks(leaf: jax.Array) -> Iterable[list[Any]]:
    """The shards of an array on this process's devices, those of the same block together, in the order of the blocks."""
    blocks: dict[tuple, list[Any]] = {}
    for shard in leaf.addressable_shards:
        blocks.setdefault(_start(shard), []).append(shard)
    return [blocks[start] for start in sorted(blocks)]


def _differing(path: str, leaf: jax.Array, block: list[Any]) -> list[Finding]:
    bits = [_bits(shard) for shard in block]
    digests = [hashlib.sha256(each.tobytes()).digest() for each in bits]
    usual = digests.index(Counter(digests).most_common(1)[0][0])
    return [
        _differs(path, block, bits[usual] != each, shard, block[usual])
        for shard, each, digest in zip(block, bits, digests, strict=True)
        if digest != digests[usual]
    ]


def _differs(
    path: str, block: list[Any], bytes_differ: np.ndarray, shard: Any, usual: Any
) -> Finding:
    differ = bytes_differ.any(axis=-1).reshape(shard.data.shape)
    first = tuple(int(i) for i in np.argwhere(differ)[0])
    place = tuple(i + start for i, start in zip(first, _start(shard), strict=True))
    values = [np.asarray(each.data)[first] for each in (shard, usual)]
    return Finding(
        "copies-differ",
        path,
        f"device {shard.device.id} holds {np.count_nonzero(differ):,} of {differ.size:,} numbers otherwise than device "
        f"{usual.device.id}, one of {len(block)} devices that should have the same bits; the first at {place}: {values[0]} "
        f"and not {values[1]}.",
        "Place this leaf again from one copy (mesh.place), and run lint.program over the step that made it.",
    )


def _uneven(held: Counter, tolerance: float) -> list[Finding]:
    if not held:
        return []
    most, least = (
        max(held, key=lambda device: held[device]),
        min(held, key=lambda device: held[device]),
    )
    if held[most] <= (1 + tolerance) * held[least]:
        return []
    harm = f"device {most.id} holds {held[most]:,} bytes and device {least.id} {held[least]:,}: the fullest decides what fits."
    return [
        Finding(
            "uneven-bytes",
            f"device {most.id}",
            harm,
            "Split over all devices what lies on some: mesh.place with rules.specs.",
        )
    ]


def _start(shard: Any) -> tuple[int, ...]:
    """The global index of a shard's first number."""
    return tuple(part.start or 0 for part in shard.index)


def _bits(shard: Any) -> np.ndarray:
    """The bytes of a shard: [numbers, bytes of one]."""
    data = np.ascontiguousarray(shard.data)
    return data.reshape(-1, 1).view(np.uint8)
