"""Converts a state to arrays by name, in a form that all layouts share, and converts the arrays
back to a state with any shardings.

The name of an array is its path in the tree. A layout may change the form of a state: a pipeline
splits the blocks of the model into chunks. The caller gives two functions: `to_disk` undoes this
change before the state is stored, and `from_disk` makes the change again after the state is read.
"""

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core.primitives import convert_element_type_p

from parallax import mesh
from parallax._typing import PyTree
from parallax.run.record import Record

KEYS = {
    "key<fry>": "threefry2x32",
    "key<rbg>": "rbg",
    "key<urbg>": "unsafe_rbg",
}  # the generator of random keys, by the dtype of the keys


def stored(tree: PyTree) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the arrays and the Python numbers of a tree, each as a dict by path. A complex number
    becomes a list of its real and its imaginary part.

    Raises:
        ValueError: two leaves have the same path, or a Python number is not finite.
    """
    # `dotted` gives "" if the tree is a single leaf; `is_array` is true of shapes, too.
    named = [(mesh.dotted(path) or "state", leaf) for path, leaf in jax.tree.leaves_with_path(tree)]
    arrays = {name: leaf for name, leaf in named if mesh.is_array(leaf)}
    plain = (
        pair
        for pair in named
        if isinstance(pair[1], bool | int | float | complex) and not mesh.is_array(pair[1])
    )
    numbers = {
        name: [leaf.real, leaf.imag] if isinstance(leaf, complex) else leaf for name, leaf in plain
    }
    for name, count in Counter(name for name, _ in named).items():
        if count > 1:
            raise ValueError(
                f"The state has {count} leaves of the path {name}. Rename one of them: they "
                f"are stored by path."
            )
    for name, number in numbers.items():
        parts = number if isinstance(number, list) else [number]
        # `math.isfinite` would convert a whole number to a float, which may be too large for that.
        if not all(isinstance(part, int) or math.isfinite(part) for part in parts):
            raise ValueError(
                f"{name}: a plain number to store must be finite; got {number}. Store it as "
                f"an array."
            )
    return arrays, numbers


def shapes(tree: PyTree) -> PyTree:
    """Returns the tree with a `jax.ShapeDtypeStruct` in place of each array on devices, with the
    same sharding and weak type.
    """

    def shape(leaf):
        """Returns the shape, dtype, weak type and sharding of an array, and other leaves
        unchanged."""
        if not isinstance(leaf, jax.Array):
            return leaf
        return jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=leaf.sharding, weak_type=leaf.aval.weak_type
        )

    return jax.tree.map(shape, tree)


def converted(to_disk: Callable[[PyTree], PyTree], like: PyTree) -> PyTree:
    """Returns `to_disk(like)` with a `jax.ShapeDtypeStruct` in place of each array. `like` holds
    arrays or shapes. `to_disk` is compiled but not run, and each `ShapeDtypeStruct` has the
    sharding that the compiler chose. A sharding of `like` may not fit, since shapes may change.
    """
    arrays, convert, statics = _of_arrays(to_disk, like)
    lowered = jax.jit(convert).lower(arrays)
    shardings = lowered.compile().output_shardings

    def shape(out, sharding):
        """Returns the shape and dtype of an array that `convert` returns, with its sharding."""
        return jax.ShapeDtypeStruct(out.shape, out.dtype, sharding=sharding)

    # When `lower` traced `convert`, that added the leaves that are no arrays to `statics`.
    return eqx.combine(jax.tree.map(shape, lowered.out_info, shardings), statics[-1])


def placed(from_disk: Callable[[PyTree], PyTree], state: PyTree, like: PyTree) -> PyTree:
    """Returns `from_disk(state)`, with the shardings of the arrays of `like`."""
    arrays, convert, statics = _of_arrays(from_disk, state)
    arrays_like = eqx.filter(like, mesh.is_array)
    shardings = jax.tree.map(lambda leaf: getattr(leaf, "sharding", None), arrays_like)
    placed_arrays = jax.jit(convert, out_shardings=shardings)(arrays)
    # When this call traced `convert`, that added the leaves that are no arrays to `statics`.
    return eqx.combine(placed_arrays, statics[-1])


def as_weak(state: PyTree, like: PyTree) -> PyTree:
    """Returns `state`, with its arrays made weakly typed where the arrays of `like` are.

    A restored array is not weakly typed. With a bfloat16 `p` and the weakly typed
    `lr = jnp.asarray(0.1)`, `p - lr * p` is bfloat16; after a restore without this function, it
    would be float32.
    """

    def leaf(x, like):
        """Returns one array, with its sharding."""
        if not isinstance(x, jax.Array) or not getattr(like, "weak_type", False):
            return x

        def weak(x):
            return convert_element_type_p.bind(x, new_dtype=x.dtype, weak_type=True, sharding=None)

        return jax.jit(weak, out_shardings=x.sharding)(x)

    return jax.tree.map(leaf, state, like)


def _of_arrays(
    f: Callable[[PyTree], PyTree], tree: PyTree
) -> tuple[PyTree, Callable[[PyTree], PyTree], list]:
    """Returns three things: the arrays of `tree`; `f` as a function from these arrays to arrays,
    which `jax.jit` can trace; and a list. When the function is traced, one tree is added to the
    list: the result of `f`, in which None replaces each array.
    """
    arrays, static_in = eqx.partition(tree, mesh.is_array)
    statics = []

    def of_arrays(arrays):
        """Calls `f` on `tree` with `arrays` in place of its arrays, and returns the arrays of the
        result. Adds the other leaves of the result, as a tree, to the list `statics`."""
        result, static_out = eqx.partition(f(eqx.combine(arrays, static_in)), mesh.is_array)
        statics.append(static_out)
        return result

    return arrays, of_arrays, statics


def check_same(
    folder: Path, record: Record, arrays: dict[str, list], numbers: dict[str, Any]
) -> None:
    """Raises `ValueError` if the leaves of the checkpoint differ in name, type or shape from
    `arrays` and `numbers`, the leaves of the state to restore. The message names the leaves.
    """

    def kinds(numbers):
        """Returns a dict from the name of each Python number to `[type, shape]`, the form that
        `Record.arrays` has for arrays. In `numbers`, a complex number is a list: its real and
        its imaginary part.
        """
        # By `isinstance`, since a subclass such as an IntEnum is stored as its number. A bool is an
        # int too.
        kinds = {bool: "bool", int: "int", float: "float", list: "complex"}
        return {
            name: [next(word for kind, word in kinds.items() if isinstance(number, kind)), []]
            for name, number in numbers.items()
        }

    def words(entry):
        """Returns the type and the shape of a leaf in words, or "nothing" if there is no leaf."""
        return "nothing" if entry is None else f"{entry[0]}{entry[1]}"

    stored_leaves = record.arrays | kinds(record.numbers)
    wanted = arrays | kinds(numbers)
    wrong = [
        f"{name}: needed {words(wanted.get(name))}, the checkpoint has "
        f"{words(stored_leaves.get(name))}"
        for name in sorted({*stored_leaves, *wanted})
        if stored_leaves.get(name) != wanted.get(name)
    ]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ValueError(
            f"{folder}: the arrays are not those of the state to restore. "
            f"{'; '.join(wrong[:3])}{more}. "
            "Restore with the model and the optimizer that were saved, and with the same "
            "`form` as in the save."
        )


def found(like: PyTree, arrays: dict[str, Any], numbers: dict[str, Any]) -> PyTree:
    """Returns the tree `like`, with stored values in place of its arrays and Python numbers.
    `arrays` and `numbers` have the stored values by path. Other leaves of `like` stay.
    """

    def leaf(path, leaf):
        """Returns the value that was stored for `leaf`, the leaf of `like` at this path; `leaf`
        itself if none was. A number is converted to the type of `leaf`; a complex number was stored
        as a list of its real and its imaginary part. Random keys were stored as integers. Other
        arrays need no conversion: `check_same` has compared their dtypes with those of `like`.
        """
        name = mesh.dotted(path) or "state"
        if name in numbers:
            return (
                complex(*numbers[name]) if isinstance(leaf, complex) else type(leaf)(numbers[name])
            )
        if name not in arrays:
            return leaf
        return (
            jax.random.wrap_key_data(arrays[name], impl=KEYS[str(leaf.dtype)])
            if _is_key(leaf)
            else arrays[name]
        )

    return jax.tree.map_with_path(leaf, like)


def not_finite(arrays: dict[str, Any]) -> Callable[[], list[str]]:
    """Starts to search the arrays for nan and inf on the devices; NumPy's arrays are searched on
    the host. Returns a function that waits for the search, and returns the names of the arrays with
    a nan or an inf.

    The arrays may be donated before the returned function is called. All processes get the same
    names.
    """
    numbers = {
        name: leaf for name, leaf in arrays.items() if jnp.issubdtype(leaf.dtype, jnp.inexact)
    }
    on_host = {name: leaf for name, leaf in numbers.items() if not isinstance(leaf, jax.Array)}
    on_devices = {name: leaf for name, leaf in numbers.items() if name not in on_host}
    # On devices NumPy's float64 would become float32, in which a large number is inf.
    are_finite = {name: np.isfinite(leaf).all() for name, leaf in on_host.items()}
    are_finite |= _all_finite(on_devices)

    def names():
        """Returns the names of the arrays that are not finite."""
        return sorted(name for name, finite in are_finite.items() if not finite)

    return names


@jax.jit
def _all_finite(arrays):
    """Returns a dict from each array's name to whether all its numbers are finite.

    A finite number times 0 is 0, and nan or inf times 0 is nan. So the sum of these products is
    finite only if all numbers are finite. On CPUs the sum takes two thirds of the time of
    `all(isfinite)`.
    """

    def finite(leaf):
        """Returns whether all numbers of an array are finite."""
        parts = (
            [leaf.real, leaf.imag] if jnp.issubdtype(leaf.dtype, jnp.complexfloating) else [leaf]
        )
        return jnp.isfinite(sum(jnp.sum(part * 0) for part in parts))

    return {name: finite(leaf) for name, leaf in arrays.items()}


def described(leaf: Any) -> list:
    """Returns the dtype and the shape of an array, as JSON values."""
    return [str(leaf.dtype), list(leaf.shape)]


def plain(leaf: Any) -> Any:
    """Returns a leaf as Orbax stores it: a random key as its integers, a NumPy scalar as an array,
    and other arrays unchanged. If the leaf is a `jax.ShapeDtypeStruct`, so is the result.
    """
    if not _is_key(leaf):
        return np.asarray(leaf) if isinstance(leaf, np.generic) else leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
        data = jax.eval_shape(jax.random.key_data, leaf)
        return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=leaf.sharding)
    return jax.random.key_data(leaf)


def empty(arrays: dict[str, Any]) -> dict[str, Any]:
    """Returns the arrays of size zero among `arrays`; Orbax does not store these. In place of a
    `jax.ShapeDtypeStruct` of size zero, the function returns a new array.
    """

    def array(leaf):
        """Returns `leaf` if it is an array. For a `jax.ShapeDtypeStruct`, returns a new array with
        its shape, dtype and sharding."""
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        return jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)

    return {name: array(leaf) for name, leaf in arrays.items() if leaf.size == 0}


def held(arrays: dict[str, Any]) -> Callable[[], dict[str, Any]]:
    """Copies this process's blocks of the arrays to the host's memory. Returns a function that
    makes the arrays again from the copies, also after the arrays were donated.

    The arrays that the returned function makes stay in the host's memory, if the devices can read
    that memory.
    """
    copied = {
        name: (_blocks(leaf), leaf.shape, leaf.sharding)
        for name, leaf in arrays.items()
        if isinstance(leaf, jax.Array)
    }
    of_numpy = {name: np.array(leaf) for name, leaf in arrays.items() if name not in copied}

    def again():
        """Makes all arrays again from the copies in the host's memory, and returns them by name."""
        return of_numpy | {name: _of_blocks(*copy) for name, copy in copied.items()}

    return again


def _blocks(leaf: jax.Array) -> dict[Any, np.ndarray]:
    """Returns this process's blocks of an array, by device, in the host's memory. Devices that hold
    the same block share one copy of it.
    """
    # The index is taken as text, since slices cannot be keys of a dict. Copies of a block have the
    # same index.
    shards = [(shard.device, str(shard.index), shard.data) for shard in leaf.addressable_shards]
    distinct = {index: data for _, index, data in shards}
    for data in distinct.values():  # starts all copies before the first is waited for
        data.copy_to_host_async()
    # On CPUs `np.asarray` gives a view. As long as a NumPy array refers to a buffer, JAX does not
    # write over it: a step to which the buffer is donated works on a copy.
    on_host = {index: np.asarray(data) for index, data in distinct.items()}
    return {device: on_host[index] for device, index, _ in shards}


def _of_blocks(
    blocks: dict[Any, np.ndarray], shape: tuple[int, ...], sharding: jax.sharding.Sharding
) -> jax.Array:
    """Returns a global array of `shape`, made from the blocks of this process. `blocks` has these
    blocks by device.

    On accelerators the returned array stays in the host's memory, if the devices can read that
    memory: the devices' own memory is full of the run's state.
    """
    memory_kinds = {memory.kind for device in blocks for memory in device.addressable_memories()}
    if next(iter(blocks)).platform != "cpu" and "pinned_host" in memory_kinds:
        sharding = sharding.with_memory_kind("pinned_host")

    def put(device, block):
        """Returns one block as an array of one device."""
        memory = sharding.memory_kind
        return jax.device_put(block, jax.sharding.SingleDeviceSharding(device, memory_kind=memory))

    parts = [put(device, block) for device, block in blocks.items()]
    return jax.make_array_from_single_device_arrays(shape, sharding, parts)


def _is_key(leaf: Any) -> bool:
    """Returns whether an array holds random keys."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
