"""Functions that make a device's shard from a whole leaf, and the whole leaf from the shards.

A list of `Split`s says which dims of a leaf are split, and over which axes. A whole leaf has an
empty list. `A[I_X]` is split over axis X, and `{U_X}` is a sum over X that was not taken yet.
An `Axis` is the names of some mesh axes, with the algorithm of the collectives over them.
`types.axes` returns a tuple of axis names, also for a single name.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array

from parallax import trees
from parallax.collectives import types
from parallax.collectives.axis import Axis


class Split(NamedTuple):
    """A dim of a leaf, and the axes that split this dim."""

    dim: int
    axis: Axis


def splits_of(path: Sequence[Any], specs: dict[str, PartitionSpec], axis: Axis) -> list[Split]:
    """Returns the split dims of the leaf at `path`, each with those axes of `axis` that split it.

    `axis` is the axis, or the axes, over which the caller gathers or scatters the leaf. `specs`
    maps the dotted path of a leaf to its spec; a leaf that `specs` lacks is whole, and has no
    splits.

    Raises:
        ValueError: a dim is split over `axis` first, and each part again over another axis.
    """
    splits = []
    for dim, entry in enumerate(specs.get(trees.dotted(path), ())):
        names = trees.entry_axes(entry)
        inside = tuple(name for name in names if name in types.axes(axis.names))
        # In a tuple of names the last axis is innermost. If only an outer axis were gathered, the
        # gathered blocks would be in another order than in the array.
        if inside and names[-len(inside) :] != inside:
            outside = tuple(name for name in names if name not in inside)
            raise ValueError(
                f"Dim {dim} of {trees.dotted(path) or 'the leaf'} is split over {names!r} "
                f"in this order, and gathered or scattered over {inside!r} only. The gathered "
                "blocks would not be neighbours in the whole leaf. In the spec, name "
                f"{inside!r} last, as in {(*outside, *inside)!r}, or split another dim over "
                f"{inside!r}."
            )
        if inside:
            # The axis keeps its algorithm, but runs only along the names that split this dim.
            splits.append(Split(dim, axis.over(inside)))
    return splits


def names_of(splits: Sequence[Split]) -> set[str]:
    """Returns the names of all axes of these splits."""
    return {name for split in splits for name in types.axes(split.axis.names)}


def take(x: Array, splits: Sequence[Split]) -> Array:
    """Returns this device's shard of `x`: `A[I] -> A[I_X]`. Each device has all of `x`, so nothing
    is sent."""
    for dim, axis in splits:
        size = x.shape[dim] // axis.size()
        x = lax.dynamic_slice_in_dim(x, axis.index() * size, size, dim)
    return x


def gather(x: Array, splits: Sequence[Split]) -> Array:
    """Returns the whole leaf from the shards, typed as equal on all devices: `A[I_X] -> A[I]`."""
    for dim, axis in splits:
        # Each device gathers the same blocks in the same order, so the results are equal bit for
        # bit.
        x = types.replicated(axis.all_gather(x, axis=dim, tiled=True), axis.names)
    return x


def reduce_scatter(x: Array, splits: Sequence[Split]) -> Array:
    """Returns this device's shard of the sum over devices: `A[I] {U_X} -> A[I_X]`.

    The sum is computed and returned in float32 or wider. Without splits, `x` is returned unchanged.
    """
    for dim, axis in splits:
        x = axis.reduce_scatter(
            x.astype(types.accumulation_dtype(x.dtype)), scatter_dimension=dim, tiled=True
        )
    return x


def runs_over(axis: Axis) -> bool:
    """Returns whether the caller runs inside a `shard_map` over `axis`, on blocks of arrays.

    Outside of a `shard_map` over `axis`, the caller works on global arrays.
    """
    # JAX has no public function for this, but an axis that is not mapped over raises NameError.
    try:
        lax.axis_size(axis.names)
    except NameError:
        return False
    return True
