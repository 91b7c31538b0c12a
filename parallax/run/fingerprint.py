"""Compares the copies of replicated arrays, on the devices that hold them. If a bit changed in one
copy, the error names the array (a leaf of the tree) and the device.

    for i in range(first + 1, steps + 1):
        state, info = train(state, batch)
        if i % 50 == 0:
            fingerprint.check(i, state)            # raises CopiesDiffer, on all processes alike

A parameter that all replicas hold must have the same bits on all replicas. If the bits differ,
something is broken: a memory, an arithmetic unit, a link, or a program. No other check notices the
difference, since JAX reads one copy and assumes that the others are equal.

Each device computes a checksum of two 32-bit words for each of its blocks. One gather sends the
words of all devices to all devices. Every device then compares the words of copies: two blocks of
an array are copies if the devices that hold them differ only along mesh axes that do not split the
array. The check is a separate program, so a step after which no check is made costs nothing extra,
and the step's program stays the same. In a check, each device reads its blocks once, and
contributes 8 bytes per array to the gather.

An array cannot be compared if each device has a different block of the array; `uncompared` names
such arrays. ZeRO splits the optimizer's state in this way, and ZeRO-3 also splits the parameters.
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

WORDS = 2  # words of 32 bits in a checksum


class Differs(NamedTuple):
    """A device whose copy of a leaf differs from other copies.

    Attributes:
        leaf: the dotted path of the leaf.
        device: the id of the device.
        process: the process that the device belongs to.
        alike: the number of devices that hold the same bits as this device, including this device.
        copies: the number of devices that should all hold the same bits.
        outvoted: whether one version of the bits is on more devices than every other version. If
            so, that version is probably right, and this copy is wrong. If not, two versions are
            equally common: it is not known which is right, and all devices that should hold the
            same bits are named.
    """

    leaf: str
    device: int
    process: int
    alike: int
    copies: int
    outvoted: bool

    def __str__(self) -> str:
        """Returns the text of an error: the device, the leaf, and how many devices differ."""
        where = (
            f"device {self.device} (process {self.process}) holds other bits of "
            f"{self.leaf} than {self.copies - self.alike}"
        )
        # If two versions are equally common, it is not known which one is right.
        doubt = (
            ""
            if self.outvoted
            else ". Two versions are equally common, so it is not known which one is right"
        )
        return f"{where} of the {self.copies} devices that should hold the same{doubt}"


class CopiesDiffer(RuntimeError):
    """Raised if copies that should be the same differ. The message is one line, with the step, the
    leaf and the device.

    Attributes:
        step: the step after which the copies were compared.
        found: the list that `differing` returned.
    """

    def __init__(self, step: int, found: Sequence[Differs]):
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        super().__init__(f"step {step}: {found[0]}{more}.")
        self.step, self.found = step, list(found)


def check(step: int, tree: PyTree) -> None:
    """Raises `CopiesDiffer` if copies of the arrays of `tree` differ; the message names `step`."""
    if differences := differing(tree):
        raise CopiesDiffer(step, differences)


def differing(tree: PyTree) -> list[Differs]:
    """Returns a list of the copies of arrays of `tree` that differ from the copies on other
    devices. The list is empty if no copies differ.

    The sharding of an array says which blocks should be equal: along each mesh axis that the spec
    does not name, all devices should hold the same block. All processes must call the function. All
    get the same list. If copies differ, the bits that most devices hold are taken to be right. The
    list begins with the copy whose bits the fewest devices hold. With tensor parallelism, each
    tensor device holds a copy of some arrays, such as the weight of a norm. A wrong value in one of
    these copies spreads to many arrays on many devices in later steps. The fault then most likely
    began at the first copy in the list.

    One changed bit is always found, and other differences are missed about once in 2^64. A
    difference that a later step rounds away is no longer in memory, and is not found. Only JAX
    arrays are compared.

    Raises:
        ValueError: there are no arrays; an array is not on a mesh, or is on another mesh than the
            first array; a leaf is a `jax.ShapeDtypeStruct`, which has no bits; or `tree` is being
            traced (inside a program, call `compared`).
    """
    placed = _placed(tree)
    for path, leaf in zip(placed.paths, placed.leaves, strict=True):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise ValueError(
                f"fingerprint needs arrays with values, and {path or 'the array'} is a "
                "jax.ShapeDtypeStruct. Pass the state itself. `uncompared` and `lower` take shapes."
            )
    same, words = jax.block_until_ready(
        _program(tuple(placed.leaves), specs=placed.specs, over=placed.mesh)
    )
    # The words go to the host only if there is a difference to name.
    return [] if same else _named(np.asarray(words), placed)


def uncompared(tree: PyTree) -> list[str]:
    """Returns the paths of the arrays that have only one copy, and so cannot be compared. `tree`
    may have `jax.ShapeDtypeStruct`s with shardings in place of arrays. Raises `ValueError` if there
    are no arrays, or if they are not all on one mesh.
    """
    placed = _placed(tree)

    def copies(spec):
        """Returns how many devices hold copies of one block of an array with this spec."""
        sizes = placed.mesh.shape.items()
        return math.prod(size for name, size in sizes if name not in _split(spec))

    return [
        path for path, spec in zip(placed.paths, placed.specs, strict=True) if copies(spec) == 1
    ]


def lower(tree: PyTree) -> jax.stages.Lowered:
    """Returns the program that `differing` runs for the arrays of `tree`, so that you can read the
    program. `tree` may have `jax.ShapeDtypeStruct`s with shardings in place of arrays. Raises
    `ValueError` if there are no arrays, or if they are not all on one mesh.
    """
    placed = _placed(tree)
    return _program.lower(tuple(placed.leaves), specs=placed.specs, over=placed.mesh)


def compared(
    tree: PyTree, specs: Specs, axis: AxisLike
) -> tuple[Bool[Array, ""], UInt32[Array, "*devices leaves words"]]:
    """Returns two results: whether the copies of every array of `tree` are the same along `axis`,
    and the checksums of all copies. A checksum has two words. Call the function inside `mesh.spmd`.

    Each device contributes 8 bytes per array to one gather. The boolean and the checksums are the
    same on all devices of `axis`.

    Args:
        tree: this device's blocks of the arrays.
        specs: the spec of each array, in a tree like `tree`.
        axis: all axes along which to compare: names, or names with a collective algorithm, such as
            `ring("data")`. For a whole mesh, pass the `axis_names` of the mesh.

    Raises:
        ValueError: there are no arrays, or the number of specs is not the number of arrays.
    """
    axis = Axis.of(axis)
    names = axes(axis.names)
    sizes = tuple(axis_size(name) for name in names)
    leaves = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    leaf_specs = jax.tree.leaves(specs)
    if not leaves or len(leaf_specs) != len(leaves):
        raise ValueError(
            f"fingerprint.compared needs arrays, and a PartitionSpec for each; got "
            f"{len(leaves)} arrays and {len(leaf_specs)} specs. "
            "Use the specs that rules.specs or step.init returns."
        )
    # `of` is the checksum, of `WORDS` words; `_plain` makes numbers of random keys. The blocks are
    # typed as varying: if the type said that replicas are equal, JAX could read just one of them.
    # After the gather every device has all words, which `replicated` tells JAX.
    local_words = jnp.stack([of(varying(_plain(leaf), names)) for leaf in leaves])
    words = replicated(axis.all_gather(local_words), names).reshape(*sizes, len(leaves), WORDS)
    # The numbers of the leaves, by the dims of `words` (mesh axes) along which they are copies.
    leaves_along: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for number, spec in enumerate(leaf_specs):
        along = tuple(dim for dim, name in enumerate(names) if name not in _split(spec))
        leaves_along[along].append(number)
    same = [
        _same(words[..., np.asarray(numbers), :], along) for along, numbers in leaves_along.items()
    ]
    return jnp.all(jnp.stack(same)), words


def _same(words: UInt32[Array, "*devices leaves words"], along: tuple[int, ...]) -> Bool[Array, ""]:
    """Returns whether the checksums of all copies are equal. `words` has the checksums of some
    leaves on all devices. `along` has the dims of `words` (mesh axes) along which the devices hold
    copies of these leaves.
    """
    first = words
    for dim in along:
        first = lax.slice_in_dim(first, 0, 1, axis=dim)
    return jnp.all(words == first)


# Words of an array


def of(x: Shaped[Array, "..."]) -> UInt32[Array, "2"]:
    """Returns a checksum, two words of 32 bits, of the bits and the indices of the elements of `x`.
    The array `x` may have any dtype.

    Each element is mixed with its index in `x` by a one-to-one function (the last steps of
    MurmurHash3, by Austin Appleby). The first word is the sum of the mixed numbers modulo 2^32, so
    this word always changes if one element of at most 32 bits changes. The second word is a sum in
    which each mixed number has a weight that depends on the element's index, as in Fletcher's
    checksum. So changes that cancel in the first sum hardly ever cancel in the second. Sums of
    integers do not depend on the order in which they are added.

    The function reads `x` once on each device, with a few integer operations and no extra memory.
    """
    bits = _bits(_plain(x))
    strides = [math.prod(bits.shape[dim + 1 :]) % 2**32 for dim in range(bits.ndim)]
    index_times_stride = [
        lax.broadcasted_iota(jnp.uint32, bits.shape, dim) * np.uint32(stride)
        for dim, stride in enumerate(strides)
    ]
    # The place of each number in row-major order, modulo 2^32.
    place = sum(index_times_stride, jnp.zeros(bits.shape, jnp.uint32))
    # The factor is 2^32 over the golden ratio: its products with neighbouring places differ in many
    # bits.
    mixed = _mixed(bits ^ place * np.uint32(0x9E3779B9))
    # Odd weights have inverses modulo 2^32, so each change of a number also changes this sum.
    weighed = mixed * (place * np.uint32(2) + np.uint32(1))

    # One reduction for both words: two reductions would each store an array as large as `x` on a
    # CPU, and take three times as long.
    def both(sums, terms):
        """Adds the two terms of one element to the two sums of the checksum, the plain sum and the
        weighted sum."""
        return (sums[0] + terms[0], sums[1] + terms[1])

    return jnp.stack(
        lax.reduce((mixed, weighed), (np.uint32(0), np.uint32(0)), both, tuple(range(bits.ndim)))
    )


def _mixed(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """Returns each number of `x` with its bits mixed: each new bit depends on all bits of the
    number. Different numbers stay different. The mixing is the last steps of MurmurHash3, with the
    constants of MurmurHash3.
    """
    x = (x ^ x >> np.uint32(16)) * np.uint32(0x85EBCA6B)
    x = (x ^ x >> np.uint32(13)) * np.uint32(0xC2B2AE35)
    return x ^ x >> np.uint32(16)


def _plain(x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """Returns random keys as numbers, and other arrays unchanged."""
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def _bits(x: Shaped[Array, "..."]) -> UInt32[Array, "..."]:
    """Returns the bits of each element of `x` as words of 32 bits. Most elements have one word. A
    complex number, or a number of more than 32 bits, has several words, along new dims at the end
    of the shape.
    """
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag], axis=-1)
    if x.dtype == jnp.bool or (
        jnp.issubdtype(x.dtype, jnp.integer) and jnp.iinfo(x.dtype).bits <= 32
    ):
        return x.astype(jnp.uint32)  # exact modulo 2^32, so different numbers stay different
    bits = (
        jnp.finfo(x.dtype).bits
        if jnp.issubdtype(x.dtype, jnp.floating)
        else jnp.iinfo(x.dtype).bits
    )
    unsigned = jnp.uint32 if bits > 32 else getattr(jnp, f"uint{bits}")
    return lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)


# The arrays to compare, the program that compares them, and the copies that differ


class _Placed(NamedTuple):
    """The arrays of a tree, with their paths and specs, and the mesh that they are on."""

    leaves: list[Any]
    paths: list[str]
    specs: tuple[PartitionSpec, ...]
    mesh: Mesh


def _placed(tree: PyTree) -> _Placed:
    """Returns the arrays of a tree, with their paths, specs and mesh. Raises `ValueError` if there
    are no arrays, or if they are not all on one mesh.
    """
    named_leaves = jax.tree.leaves_with_path(tree)
    arrays = [
        (mesh.dotted(path), leaf)
        for path, leaf in named_leaves
        if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)
    ]
    if not arrays:
        raise ValueError(
            "fingerprint needs a tree with JAX arrays, such as a step.State; got a tree without "
            "JAX arrays."
        )
    paths, leaves = [path for path, _ in arrays], [leaf for _, leaf in arrays]
    specs, meshes = zip(*(_spec_and_mesh(path, leaf) for path, leaf in arrays), strict=True)
    first_mesh = meshes[0]
    for path, leaf_mesh in zip(paths, meshes, strict=True):
        if _places(leaf_mesh) != _places(first_mesh):
            raise ValueError(
                f"fingerprint compares arrays of one mesh; {path} is on {leaf_mesh}, and "
                f"{paths[0]} on {first_mesh}. Compare the arrays of each mesh separately, or place "
                "all arrays on one mesh with mesh.place."
            )
    return _Placed(leaves, paths, specs, first_mesh)


def _spec_and_mesh(path: str, leaf: Any) -> tuple[PartitionSpec, Mesh]:
    """Returns the spec and the mesh of an array. Refuses a traced array, and one on no mesh."""
    if isinstance(leaf, Tracer):
        raise ValueError(
            f"fingerprint needs arrays with values, and {path or 'the array'} is being "
            f"traced. Call it outside of jax.jit, "
            "between two steps; or, inside mesh.spmd, call fingerprint.compared."
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
    """Returns the axes, the shape and the devices' ids of a mesh, to compare the mesh with another
    one. Unlike `==` of meshes, such a comparison ignores the types of the axes, Auto or Explicit.
    """
    return (
        device_mesh.axis_names,
        device_mesh.devices.shape,
        tuple(device.id for device in device_mesh.devices.flat),
    )


def _split(spec: PartitionSpec) -> set[str]:
    """Returns the axes that a spec names. Along these axes each device has a different block."""
    return {name for entry in spec for name in mesh.entry_axes(entry)}


@functools.partial(jax.jit, static_argnames=("specs", "over"))
def _program(
    leaves: tuple[Any, ...], *, specs: tuple[PartitionSpec, ...], over: Mesh
) -> tuple[Array, Array]:
    """Returns two results: one boolean, true if no leaf has copies that differ; and the checksums
    of all leaves on all devices, an array [*mesh, leaves, words]. A checksum has two words. `over`
    is the mesh.
    """

    def local(*blocks):
        """Returns the results of `compared` for this device's blocks."""
        return compared(blocks, specs, over.axis_names)

    return mesh.spmd(local, mesh=over, in_specs=specs, out_specs=PartitionSpec())(*leaves)


def _named(words: np.ndarray, placed: _Placed) -> list[Differs]:
    """Returns the copies of leaves that differ from other copies, sorted by the number of devices
    that hold the same bits, the smallest number first. `words` has the checksums of all devices,
    and the shape [*mesh, leaves, words].
    """
    differences = []
    for number, (path, spec) in enumerate(zip(placed.paths, placed.specs, strict=True)):
        # The dims of the mesh along which the devices have different blocks of the leaf. Along the
        # other dims they should have equal copies.
        splits = [dim for dim, name in enumerate(placed.mesh.axis_names) if name in _split(spec)]
        for places in _groups(placed.mesh, splits):
            differences += _strays(
                path,
                {place: tuple(words[place][number].tolist()) for place in places},
                placed.mesh,
            )
    return sorted(differences, key=lambda difference: difference.alike)


def _groups(device_mesh: Mesh, splits: Sequence[int]) -> Iterable[list[tuple[int, ...]]]:
    """Returns the places of the devices in the mesh, in groups whose devices should hold equal
    blocks. A place is a tuple of indices. The places of a group have the same index along each of
    the dims `splits`.
    """
    groups = defaultdict(list)
    for place in np.ndindex(*device_mesh.devices.shape):
        groups[tuple(place[dim] for dim in splits)].append(place)
    return groups.values()


def _strays(
    path: str, words_of: dict[tuple[int, ...], tuple[int, ...]], device_mesh: Mesh
) -> list[Differs]:
    """Returns the devices of one group (devices that should hold equal blocks) whose checksum
    differs from the most common checksum of the group. If the two most common checksums are on
    equally many devices, the function returns all devices of the group.

    `path` is the path of the leaf. `words_of` is a dict from a device's place in the mesh, a tuple
    of indices, to the device's checksum.
    """
    counts = Counter(words_of.values())
    if len(counts) == 1:
        return []
    (usual, most), (_, second) = counts.most_common(2)  # the words, and how many devices have them
    strays = [place for place, words in words_of.items() if most == second or words != usual]

    def alike(place):
        """Returns how many devices in `words_of` have the checksum of the device at `place`."""
        return counts[words_of[place]]

    return [
        Differs(
            path,
            device_mesh.devices[at].id,
            device_mesh.devices[at].process_index,
            alike(at),
            len(words_of),
            most > second,  # outvoted: one version is on more devices than any other
        )
        for at in strays
    ]
