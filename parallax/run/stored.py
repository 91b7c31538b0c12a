"""A tree as named arrays, in the one form that all layouts share, and back in any shardings.

Arrays are named by their path in the tree. What a layout does to a state (a pipeline chunks its
blocks) is undone on the way to disk and done again on the way back by a pair of functions that the
caller knows.
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

from parallax import mesh
from parallax._typing import PyTree
from parallax.run.record import Record

KEYS = {
    "key<fry>": "threefry2x32",
    "key<rbg>": "rbg",
    "key<urbg>": "unsafe_rbg",
}  # random keys' dtypes and generators


def stored(tree: PyTree) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the arrays and the plain numbers of a tree, by path; a complex number as a list of
    two.

    Raises:
        ValueError: two leaves have one path, or a plain number is not finite.
    """
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
        if not all(map(math.isfinite, number if isinstance(number, list) else [number])):
            raise ValueError(
                f"{name}: a plain number to store must be finite; got {number}. Store it as "
                f"an array."
            )
    return arrays, numbers


def shapes(tree: PyTree) -> PyTree:
    """Returns the tree with a `jax.ShapeDtypeStruct`, with its sharding, for each array on
    devices."""

    def shape(leaf):
        if not isinstance(leaf, jax.Array):
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)

    return jax.tree.map(shape, tree)


def converted(to_disk: Callable[[PyTree], PyTree], like: PyTree) -> PyTree:
    """Returns the shapes of `to_disk(like)`, with the shardings that the compiler gives them."""
    arrays, convert, statics = _of_arrays(to_disk, like)
    lowered = jax.jit(convert).lower(arrays)
    shardings = lowered.compile().output_shardings

    def shape(out, sharding):
        return jax.ShapeDtypeStruct(out.shape, out.dtype, sharding=sharding)

    return eqx.combine(jax.tree.map(shape, lowered.out_info, shardings), statics[-1])


def placed(from_disk: Callable[[PyTree], PyTree], state: PyTree, like: PyTree) -> PyTree:
    """Returns `from_disk(state)` in the shardings of `like`."""
    arrays, convert, statics = _of_arrays(from_disk, state)
    arrays_like = eqx.filter(like, mesh.is_array)
    shardings = jax.tree.map(lambda leaf: getattr(leaf, "sharding", None), arrays_like)
    return eqx.combine(jax.jit(convert, out_shardings=shardings)(arrays), statics[-1])


def _of_arrays(
    f: Callable[[PyTree], PyTree], tree: PyTree
) -> tuple[PyTree, Callable[[PyTree], PyTree], list]:
    """Returns the arrays of `tree`; `f` as a function from arrays to arrays; and a list, to which
    it adds the other leaves."""
    arrays, static_in = eqx.partition(tree, mesh.is_array)
    statics = []

    def of_arrays(arrays):
        result, static_out = eqx.partition(f(eqx.combine(arrays, static_in)), mesh.is_array)
        statics.append(static_out)
        return result

    return arrays, of_arrays, statics


def check_same(
    folder: Path, record: Record, arrays: dict[str, list], numbers: dict[str, Any]
) -> None:
    """Refuses with a `ValueError` a checkpoint whose leaves are not the ones asked for; the message
    names them."""

    def kinds(numbers):
        return {
            name: ["complex" if isinstance(number, list) else type(number).__name__, []]
            for name, number in numbers.items()
        }

    def words(entry):
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
            "Restore with the model and the optimizer that were saved, and the to_disk that "
            "they were saved by."
        )


def found(like: PyTree, arrays: dict[str, Any], numbers: dict[str, Any]) -> PyTree:
    """Returns `like` with the stored arrays and numbers in their places; its other leaves stay."""

    def leaf(path, leaf):
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
    """Begins to look at all numbers; a function that waits for the end, and gives the names of the
    arrays with a nan or an inf.

    All processes learn of the shards of all. The arrays may be donated meanwhile.
    """
    numbers = {
        name: leaf for name, leaf in arrays.items() if jnp.issubdtype(leaf.dtype, jnp.inexact)
    }
    are_finite = _all_finite(numbers)

    def names():
        return sorted(name for name, finite in are_finite.items() if not finite)

    return names


@jax.jit
def _all_finite(arrays):
    """Nothing finite times 0 is nan, and all else is: on CPUs this sum takes two thirds of the time
    of `all(isfinite)`."""

    def finite(leaf):
        parts = (
            [leaf.real, leaf.imag] if jnp.issubdtype(leaf.dtype, jnp.complexfloating) else [leaf]
        )
        return jnp.isfinite(sum(jnp.sum(part * 0) for part in parts))

    return {name: finite(leaf) for name, leaf in arrays.items()}


def described(leaf: Any) -> list:
    """Returns the dtype and the shape of an array, as JSON values."""
    return [str(leaf.dtype), list(leaf.shape)]


def plain(leaf: Any) -> Any:
    """Returns the tree that Orbax stores or looks for: random keys as the numbers that they are
    made of."""
    if not _is_key(leaf):
        return np.asarray(leaf) if isinstance(leaf, np.generic) else leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
        data = jax.eval_shape(jax.random.key_data, leaf)
        return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=leaf.sharding)
    return jax.random.key_data(leaf)


def empty(arrays: dict[str, Any]) -> dict[str, Any]:
    """Returns those of size zero, which Orbax does not store: of `jax.ShapeDtypeStruct`s, the
    arrays."""

    def array(leaf):
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        return jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)

    return {name: array(leaf) for name, leaf in arrays.items() if leaf.size == 0}


def held(arrays: dict[str, Any]) -> Callable[[], dict[str, Any]]:
    """Returns a function that gives the arrays again, also after they were donated.

    Until it is gone, the blocks that this process has are in the host's memory, each once. The
    arrays that it gives are there too, where the devices can read them from there.
    """
    split = {
        name: (_blocks(leaf), leaf.shape, leaf.sharding)
        for name, leaf in arrays.items()
        if isinstance(leaf, jax.Array)
    }
    others = {name: np.array(leaf) for name, leaf in arrays.items() if name not in split}

    def again():
        return others | {name: _of_blocks(*parts) for name, parts in split.items()}

    return again


def _blocks(leaf: jax.Array) -> dict[Any, np.ndarray]:
    """Returns this process's blocks of an array, by device; copies of one block are one."""
    places = [(shard.device, str(shard.index), shard.data) for shard in leaf.addressable_shards]
    distinct = {index: data for _, index, data in places}
    for data in distinct.values():
        data.copy_to_host_async()
    on_host = {index: np.asarray(data) for index, data in distinct.items()}
    return {device: on_host[index] for device, index, _ in places}


def _of_blocks(
    blocks: dict[Any, np.ndarray], shape: tuple[int, ...], sharding: jax.sharding.Sharding
) -> jax.Array:
    kinds = {memory.kind for device in blocks for memory in device.addressable_memories()}
    if next(iter(blocks)).platform != "cpu" and "pinned_host" in kinds:
        sharding = sharding.with_memory_kind("pinned_host")

    def put(device, block):
        memory = sharding.memory_kind
        return jax.device_put(block, jax.sharding.SingleDeviceSharding(device, memory_kind=memory))

    parts = [put(device, block) for device, block in blocks.items()]
    return jax.make_array_from_single_device_arrays(shape, sharding, parts)


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
