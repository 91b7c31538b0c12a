"""Copies compared on the devices that hold them: a bit that turned in one of them is found, with
its leaf and its device.

    for i in range(first + 1, steps + 1):
        state, info = train(state, batch)
        if i % 50 == 0:
            fingerprint.check(i, state)            # raises CopiesDiffer, on all processes alike

A parameter that all replicas hold is the same on all of them, to the bit, or something is broken: a
memory, an arithmetic unit, a link, or a program. Nothing else notices it, since JAX reads one copy
and takes it for all.

Each device makes two words of 32 bits of each of its own blocks, one gather brings the words of all
devices to all, and every device compares what should be equal: along the mesh axes that do not
split the leaf. It is a program of its own beside the step, so a step without a check costs nothing,
compiles to what it was, and the check reads the arrays as they lie in memory. It reads the state
once, and sends 8 bytes a leaf.

An array of which each device has another block cannot be compared: `uncompared` names it. With ZeRO
those are in the optimizer's state, and in stage 3 among the parameters too.
"""

import functools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Shaped, UInt32

from parallax import mesh
from parallax._typing import PyTree, Specs
from parallax.collectives import Axis, AxisLike
from parallax.collectives.types import axes, axis_size, replicated, varying

WORDS = 2  # of 32 bits, for each leaf


class Differs(NamedTuple):
    """A device whose copy of a leaf is not what it should be.

    Attributes:
        leaf: its dotted path.
        device: the device's id.
        process: the process that the device belongs to.
        alike: devices that hold the bits that this one holds, itself included.
        copies: devices that should all hold the same bits.
        outvoted: whether some other bits are on more devices than any. Where not, each of the
            copies may be the right one, and each is named.
    """

    leaf: str
    device: int
    process: int
    alike: int
    copies: int
    outvoted: bool

    def __str__(self) -> str:
        where = (
            f"device {self.device} (process {self.process}) holds other bits of "
            f"{self.leaf} than {self.copies - self.alike}"
        )
        doubt = "" if self.outvoted else ", and as many hold those: which are right is not known"
        return f"{where} of the {self.copies} devices that should hold the same{doubt}"


class CopiesDiffer(RuntimeError):
    """Copies that should be the same are not. The message is one line, with the step, the leaf and
    the device.

    Attributes:
        step: the step after which they were compared.
        found: as `differing` returned it.
    """

    def __init__(self, step: int, found: Sequence[Differs]):
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        super().__init__(f"step {step}: {found[0]}{more}.")
        self.step, self.found = step, list(found)


def check(step: int, tree: PyTree) -> None:
    """Raises `CopiesDiffer` where `differing(tree)` finds something. `step` is for its message."""
    if differences := differing(tree):
        raise CopiesDiffer(step, differences)


def differing(tree: PyTree) -> list[Differs]:
    """Returns the copies of the arrays of `tree` that differ from those on other devices; an empty
    list where all is well.

    What should be equal is known from the arrays themselves: a copy lies along each axis of the
    mesh that its spec does not name. All processes call it, and get the same list. The copies that
    most devices hold are taken to be right. The first in the list is the rarest: where a step has
    since carried the fault on, as between tensor shards, that is where it came from.

    One bit that turned is always found. So is any other difference but for one in some 2^64 of
    them. A difference that a later step rounds away, as in the last bit of a moment, is gone from
    the memory too, and is not found. NumPy arrays and other leaves are not looked at.

    Raises:
        ValueError: there are no arrays; or one is not on a mesh, or on another mesh than the first;
            or `tree` is being traced: inside a program call `compared`.
    """
    placed = _placed(tree)
    same, words = jax.block_until_ready(
        _program(tuple(placed.leaves), specs=placed.specs, over=placed.mesh)
    )
    return [] if same else _named(np.asarray(words), placed)


def uncompared(tree: PyTree) -> list[str]:
    """Returns the paths of the arrays (or shapes with shardings) of which no device holds a second
    copy. Raises as `differing` does."""
    placed = _placed(tree)

    def copies(spec):
        sizes = placed.mesh.shape.items()
        return math.prod(size for name, size in sizes if name not in _split(spec))

    return [
        path for path, spec in zip(placed.paths, placed.specs, strict=True) if copies(spec) == 1
    ]


def lower(tree: PyTree) -> jax.stages.Lowered:
    """Returns the program that `differing` runs for these arrays, or shapes with shardings, to look
    at. Raises as `differing` does."""
    placed = _placed(tree)
    return _program.lower(tuple(placed.leaves), specs=placed.specs, over=placed.mesh)


def compared(
    tree: PyTree, specs: Specs, axis: AxisLike
) -> tuple[Bool[Array, ""], UInt32[Array, "*devices leaves words"]]:
    """Returns whether the copies of each array of `tree` along `axis` are the same, and the words
    of all of them. Inside `mesh.spmd`.

    One gather of 8 bytes a leaf. Both results are the same on all devices of `axis`.

    Args:
        tree: local blocks.
        specs: of each array, a tree like it.
        axis: all axes along which to compare, with their algorithm: of a whole mesh,
            `mesh.axis_names`.

    Raises:
        ValueError: there are no arrays, or the specs are not those of the arrays of `tree`.
    """
    axis = Axis.of(axis)
    names, sizes = axes(axis.names), tuple(axis_size(name) for name in axes(axis.names))
    leaves = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    leaf_specs = jax.tree.leaves(specs, is_leaf=mesh.is_spec)
    if not leaves or len(leaf_specs) != len(leaves):
        raise ValueError(
            f"fingerprint.compared needs arrays, and a PartitionSpec for each; got "
            f"{len(leaves)} arrays and {len(leaf_specs)} specs. "
            "Use the specs of rules.specs or step.init."
        )
    # As varying values: the type says that replicas are equal, and that is the question.
    local_words = jnp.stack([of(varying(_plain(leaf), names)) for leaf in leaves])
    words = replicated(axis.all_gather(local_words), names).reshape(*sizes, len(leaves), WORDS)
    leaves_along: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for number, spec in enumerate(leaf_specs):
        along = tuple(dim for dim, name in enumerate(names) if name not in _split(spec))
        leaves_along[along].append(number)
    same = [
        _same(words[..., np.asarray(numbers), :], along) for along, numbers in leaves_along.items()
    ]
    return jnp.all(jnp.stack(same)), words


def _same(words: UInt32[Array, "*devices leaves words"], along: tuple[int, ...]) -> Bool[Array, ""]:
    """Returns whether all words are those of the first device along these dims."""
    first = words
    for dim in along:
        first = lax.slice_in_dim(first, 0, 1, axis=dim)
    return jnp.all(words == first)


# Words of an array


def of(x: Shaped[Array, "..."]) -> UInt32[Array, "2"]:
    """Returns two words of all bits of `x` and of their places: another number, another place,
    another word. Of any dtype.

    Each number is mixed with its place by a function that is one to one (the last steps of
    MurmurHash3, by Austin Appleby), so one number that changes always changes the first word, which
    is the sum modulo 2^32. In the second, as in Fletcher's checksum, places weigh the terms, so
    what cancels in one sum does not in the other. Integers sum to the same in any order.

    Costs a few integer operations beside reading `x` once on each device, and no memory.
    """
    bits = _bits(_plain(x))
    strides = [math.prod(bits.shape[dim + 1 :]) % 2**32 for dim in range(bits.ndim)]
    parts = [
        lax.broadcasted_iota(jnp.uint32, bits.shape, dim) * np.uint32(stride)
        for dim, stride in enumerate(strides)
    ]
    place = sum(parts, jnp.zeros(bits.shape, jnp.uint32))
    mixed = _mixed(
        bits ^ place * np.uint32(0x9E3779B9)
    )  # 2^32 over the golden ratio: near places are far apart in bits
    weighed = mixed * (place * np.uint32(2) + np.uint32(1))

    # One reduction of both: two would each store what they add up, as large as `x`, on a CPU, and
    # take three times as long.
    def both(sums, terms):
        return (sums[0] + terms[0], sums[1] + terms[1])

    return jnp.stack(
        lax.reduce((mixed, weighed), (np.uint32(0), np.uint32(0)), both, tuple(range(bits.ndim)))
    )


def _mixed(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """Returns a number each of whose bits depends on each bit of `x`; different numbers stay
    different."""
    x = (x ^ x >> np.uint32(16)) * np.uint32(0x85EBCA6B)
    x = (x ^ x >> np.uint32(13)) * np.uint32(0xC2B2AE35)
    return x ^ x >> np.uint32(16)


def _plain(x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """Returns random keys as the numbers that they are."""
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def _bits(x: Shaped[Array, "..."]) -> UInt32[Array, "..."]:
    """Returns the bits of each number as a word, or, along a last dim, as several."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag], axis=-1)
    if x.dtype == jnp.bool or (
        jnp.issubdtype(x.dtype, jnp.integer) and jnp.iinfo(x.dtype).bits <= 32
    ):
        return x.astype(jnp.uint32)
    bits = (
        jnp.finfo(x.dtype).bits
        if jnp.issubdtype(x.dtype, jnp.floating)
        else jnp.iinfo(x.dtype).bits
    )
    unsigned = jnp.uint32 if bits > 32 else getattr(jnp, f"uint{bits}")
    return lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)


# Around the map


class _Placed(NamedTuple):
    """The arrays of a tree, with their paths and specs, and the mesh that they are on."""

    leaves: list[Any]
    paths: list[str]
    specs: tuple[PartitionSpec, ...]
    mesh: Mesh


def _placed(tree: PyTree) -> _Placed:
    named_leaves = jax.tree.leaves_with_path(tree)
    arrays = [
        (mesh.dotted(path), leaf)
        for path, leaf in named_leaves
        if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)
    ]
    if not arrays:
        raise ValueError(
            "fingerprint needs a tree with JAX arrays, such as a step.State; got one without."
        )
    paths, leaves = [path for path, _ in arrays], [leaf for _, leaf in arrays]
    specs, meshes = zip(*(_spec_and_mesh(path, leaf) for path, leaf in arrays), strict=True)
    first_mesh = meshes[0]
    for path, leaf_mesh in zip(paths, meshes, strict=True):
        if _places(leaf_mesh) != _places(first_mesh):
            raise ValueError(
                f"fingerprint compares arrays of one mesh; {path} is on {leaf_mesh}, and "
                f"{paths[0]} on {first_mesh}. Call it on "
                "each part alone, or place all on one mesh: mesh.place."
            )
    return _Placed(leaves, paths, specs, first_mesh)


def _spec_and_mesh(path: str, leaf: Any) -> tuple[PartitionSpec, Mesh]:
    if isinstance(leaf, Tracer):
        raise ValueError(
            f"fingerprint looks at arrays that are there, and {path or 'the array'} is being "
            f"traced. Call it outside of jax.jit, "
            "beside the step; or, inside mesh.spmd, call fingerprint.compared."
        )
    sharding = leaf.sharding
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        raise ValueError(
            f"fingerprint needs arrays on a mesh; {path or 'the array'} has the sharding "
            f"{sharding}. Place it: "
            "mesh.place(tree, specs, mesh)."
        )
    return sharding.spec, sharding.mesh


def _places(device_mesh: Mesh) -> tuple:
    return (
        device_mesh.axis_names,
        device_mesh.devices.shape,
        tuple(device.id for device in device_mesh.devices.flat),
    )


def _split(spec: PartitionSpec) -> set[str]:
    """Returns the axes that a spec names: along those, blocks differ."""
    return {name for entry in spec for name in mesh.entry_axes(entry)}


@functools.partial(jax.jit, static_argnames=("specs", "over"))
def _program(
    leaves: tuple[Any, ...], *, specs: tuple[PartitionSpec, ...], over: Mesh
) -> tuple[Array, Array]:
    def local(*blocks):
        return compared(blocks, specs, over.axis_names)

    return mesh.spmd(local, mesh=over, in_specs=specs, out_specs=PartitionSpec())(*leaves)


def _named(words: np.ndarray, placed: _Placed) -> list[Differs]:
    """Returns the copies that differ, rarest first, from the words [*mesh, leaves, words] of all
    devices."""
    differences = []
    for number, (path, spec) in enumerate(zip(placed.paths, placed.specs, strict=True)):
        splits = [dim for dim, name in enumerate(placed.mesh.axis_names) if name in _split(spec)]
        for devices in _groups(placed.mesh, splits):
            differences += _strays(
                path,
                {place: tuple(words[place][number].tolist()) for place in devices},
                placed.mesh,
            )
    return sorted(differences, key=lambda difference: difference.alike)


def _groups(device_mesh: Mesh, splits: Sequence[int]) -> Iterable[list[tuple[int, ...]]]:
    """Returns the devices' places in the mesh, those together that differ along other dims than
    `splits`."""
    groups = defaultdict(list)
    for place in np.ndindex(*device_mesh.devices.shape):
        groups[tuple(place[dim] for dim in splits)].append(place)
    return groups.values()


def _strays(
    path: str, words_of: dict[tuple[int, ...], tuple[int, ...]], device_mesh: Mesh
) -> list[Differs]:
    """Returns the devices of one group, by place, whose words are not the most common ones: all
    devices where no words are."""
    counts = Counter(words_of.values())
    if len(counts) == 1:
        return []
    (usual, most), (_, second) = counts.most_common(2)
    strays = [place for place, words in words_of.items() if most == second or words != usual]

    def alike(place):
        return counts[words_of[place]]

    return [
        Differs(
            path,
            device_mesh.devices[at].id,
            device_mesh.devices[at].process_index,
            alike(at),
            len(words_of),
            most > second,
        )
        for at in strays
    ]
