"""Holds the values of one device's cells (logical devices), and runs the collectives over the
cells of all devices.

A `Stack` is an array with one variable's values in all cells of the device. The methods of `Cells`
that are named after a collective compute this collective. Each takes the collective's axes, the
parameters of its equation and a stack, and returns a stack. `of_all` turns a stack into an array in
which one dim runs over all devices' cells along the collective's axes. `own` takes an array in
which one dim runs over only this device's cells along the collective's axes, and turns the array
into a stack. In both arrays this dim comes after the dims of `rest` (the axes of the stack that the
collective does not name) and before the dims of a cell's value.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int

from parallax.collectives import types
from parallax.collectives.execute import pin_bits
from parallax.trees import entry_axes


class Stack(eqx.Module):
    """The values of one variable of the program in all cells (logical devices) of this device.

    Attributes:
        array: the values. The first dims index the cells of this device along each of `axes`. The
            other dims are those of the value in one cell.
        axes: the axes along which the value may differ from cell to cell, in the order of the
            argument `cells` of `spmd`. Along all other axes the cells share the value.
    """

    array: Any
    axes: tuple[str, ...] = eqx.field(static=True, default=())


class TwoForms(NamedTuple):
    """The two forms of a global array: as the caller has it, and as a stack of blocks.

    A stack has the blocks of all cells (logical devices): its first dims index the cells, and its
    other dims are those of a block.

    Attributes:
        axes: the axes that split the array, in the order of the argument `cells` of `spmd`.
        shape: the shape that the caller sees.
        wide: `shape` with each split dim replaced by several dims: the number of cells along each
            of its axes, and the size of the dim in a block. A dim of 12 over 4 cells becomes 4, 3.
        order: a permutation: dim k of the stack is dim `order[k]` of an array of the shape `wide`.
    """

    axes: tuple[str, ...]
    shape: tuple[int, ...]
    wide: tuple[int, ...]
    order: tuple[int, ...]

    @classmethod
    def of(cls, spec: PartitionSpec, aval: Any, counts: Mapping[str, int]) -> "TwoForms":
        """Returns the `TwoForms` of a global array of the type `aval`: how to turn the array into a
        stack of blocks, and back. `spec` says which axes split the array, and `counts` has the
        number of cells (logical devices) along each axis."""
        # `wide` is the shape with several dims in place of each split dim: the number of cells
        # along each of its axes, and the size in a block. `names` has the axis of each dim of
        # `wide`, or None for a dim of a block.
        wide, names = [], []
        for size, entry in itertools.zip_longest(aval.shape, spec):
            split = [axis for axis in entry_axes(entry) if axis in counts]
            sizes = [counts[axis] for axis in split]
            wide += [*sizes, size // math.prod(sizes)]
            names += [*split, None]
        axes = tuple(axis for axis in counts if axis in names)
        of_block = (k for k, name in enumerate(names) if name is None)
        order = (*map(names.index, axes), *of_block)  # a stack's first dims index the cells
        return cls(axes, aval.shape, tuple(wide), order)

    def stacked(self, x: Any) -> Any:
        """Returns the global array `x` as a stack of the blocks of all cells (logical devices). The
        first dims index the cells along each of `axes`, and the other dims are those of a block.
        """
        return x.reshape(self.wide).transpose(self.order)

    def whole(self, stack: Any) -> Any:
        """Returns the global array that `stack` was made from: the inverse of `stacked`."""
        return stack.transpose(np.argsort(self.order)).reshape(self.shape)


class Cells(NamedTuple):
    """The cells (logical devices) of one device, and collectives over the cells of all devices.

    Attributes:
        counts: the number of cells along each axis that has more than one cell.
        devices: the number of devices along each axis.
    """

    counts: Mapping[str, int]
    devices: Mapping[str, int]

    def here(self, axis: str) -> int:
        """Returns the number of cells (logical devices) of this device along an axis."""
        return self.counts[axis] // self.devices[axis]

    def ordered(self, axes) -> tuple[str, ...]:
        """Returns the axes of `counts` that are in `axes`, in the order of `counts`."""
        named = set(axes)
        return tuple(axis for axis in self.counts if axis in named)

    def over(self, stack: Stack, axes: Sequence[str]) -> Stack:
        """Returns `stack` with a dim for each of `axes`. Each of these dims runs over this device's
        cells (logical devices) along its axis. A dim that `stack` lacks is added, with a copy of
        the value for each cell."""
        wanted = self.ordered((*axes, *stack.axes))
        inside = jnp.shape(stack.array)[len(stack.axes) :]
        thin = [self.here(axis) if axis in stack.axes else 1 for axis in wanted]
        full = [self.here(axis) for axis in wanted]
        array = jnp.reshape(stack.array, (*thin, *inside))
        return Stack(jnp.broadcast_to(array, (*full, *inside)), wanted)

    def tree(self, join, names: Sequence[str], stack: Stack) -> Stack:
        """Returns the values of all cells (logical devices) along the axes `names`, joined by the
        function `join` in a binary tree over the cells' indices.

        Along each axis, a device first joins the values of its own cells to one value. Then it
        joins this value with those of other devices: in each level of the tree, two devices whose
        indices differ in one bit exchange their values, and both join them.
        """
        x, dtype = stack.array, stack.array.dtype
        if jnp.issubdtype(dtype, jnp.floating):
            x = x.astype(types.accumulation_dtype(dtype))
        axes = list(stack.axes)
        for axis in names:
            if axis not in axes:  # all cells share it; their number is a power of two
                x = x * self.counts[axis] if join is lax.add else x
                continue
            at, n = axes.index(axis), self.devices[axis]
            while x.shape[at] > 1:
                x = join(*(lax.slice_in_dim(x, k, None, 2, at) for k in range(2)))
            x = lax.squeeze(x, (at,))
            axes.remove(axis)
            for bit in range(n.bit_length() - 1):
                x = join(x, lax.ppermute(x, axis, [(k, k ^ 2**bit) for k in range(n)]))
        if jnp.issubdtype(dtype, jnp.floating):
            # `reduce_precision` rounds in any case. The cast to `dtype` below may not: if the
            # program widens the result again, a compiler may remove both casts. It would make nan
            # of the largest floats of 8 bits, and 0 of the smallest: their bits are kept instead.
            info = jnp.finfo(dtype)
            if info.bits < 16:
                x = pin_bits(x.astype(dtype))
            else:
                x = lax.reduce_precision(x, info.nexp, info.nmant)
        return Stack(x.astype(dtype), tuple(axes))

    def indices(self, names: Sequence[str]) -> Int[Array, " cells"]:
        """Returns the numbers of this device's cells (logical devices). Along the axes `names`, the
        cells of all devices are numbered from 0, in row-major order."""
        index = jnp.zeros((1,), jnp.int32)
        for axis in names:
            first = lax.axis_index(axis) * self.here(axis)
            own = first + jnp.arange(self.here(axis), dtype=jnp.int32)
            index = (index[:, None] * self.counts[axis] + own[None]).reshape(-1)
        return index

    def of_all(self, names: Sequence[str], stack: Stack) -> tuple[Array, tuple[str, ...]]:
        """Returns two things: the values of all cells (logical devices) along `names`, and `rest`,
        the other axes of the stack. The values are an array [this device's cells along `rest`...,
        all cells along `names`, dims of the value in one cell...]."""
        stack = self.over(stack, names)  # with a dim for each of `names`, added if it was missing
        x, rest = stack.array, tuple(axis for axis in stack.axes if axis not in names)
        for axis in names:
            x = lax.all_gather(x, axis, axis=stack.axes.index(axis), tiled=True)
        x = x.transpose(*map(stack.axes.index, (*rest, *names)), *range(len(stack.axes), x.ndim))
        inside = x.shape[len(stack.axes) :]
        return x.reshape(*x.shape[: len(rest)], -1, *inside), rest

    def own(self, names, x: Array, rest) -> Stack:
        """Returns the array `x` as a `Stack`. The first dims of `x` index the cells (logical
        devices) of this device along each axis of `rest`. The next dim indexes them along all axes
        of `names`, in row-major order. The other dims are those of the value in one cell."""
        given = (*rest, *names)
        counts, inside = map(self.here, given), x.shape[len(rest) + 1 :]
        x, axes = x.reshape(*counts, *inside), self.ordered(given)
        return Stack(x.transpose(*map(given.index, axes), *range(len(given), x.ndim)), axes)

    def shared(self, names, params, stack: Stack) -> Stack:
        """Returns `stack` without its dims for the axes `names`. The program declares that the
        value is equal in all cells (logical devices) along these axes, so the first cell's value
        is enough."""
        first = tuple(0 if axis in names else slice(None) for axis in stack.axes)
        return Stack(stack.array[first], tuple(axis for axis in stack.axes if axis not in names))

    def all_gather(self, names, params, stack: Stack) -> Stack:
        """Returns, for each cell (logical device), the values of all cells along `names`, gathered
        along one dim."""
        x, rest = self.of_all(names, stack)
        dim = len(rest) + params["all_gather_dimension"]
        x = jnp.moveaxis(x, len(rest), dim)
        if params["tiled"]:
            x = x.reshape(*x.shape[:dim], -1, *x.shape[dim + 2 :])
        return Stack(x, rest)

    def reduce_scatter(self, names, params, stack: Stack) -> Stack:
        """Returns, for each cell (logical device), its part of the sum over the cells along
        `names`."""
        stack = self.tree(lax.add, names, stack)
        x, rest = stack.array, stack.axes  # without `names`: `tree` has removed these dims
        dim, n = len(rest) + params["scatter_dimension"], math.prod(self.counts[a] for a in names)
        if params["tiled"]:
            x = x.reshape(*x.shape[:dim], n, -1, *x.shape[dim + 1 :])
        x = jnp.moveaxis(x, dim, len(rest))
        return self.own(names, jnp.take(x, self.indices(names), axis=len(rest)), rest)

    def ppermute(self, names, params, stack: Stack) -> Stack:
        """Returns, for each cell (logical device), the value of the cell that sends to it, or zeros
        if no cell does."""
        x, rest = self.of_all(names, stack)
        sources = np.full(x.shape[len(rest)], -1, np.int32)
        for start, end in params["perm"]:
            sources[end] = start
        sources = jnp.asarray(sources)[self.indices(names)]
        x = jnp.take(x, jnp.maximum(sources, 0), axis=len(rest))
        sends = sources.reshape(-1, *[1] * (x.ndim - len(rest) - 1)) >= 0
        return self.own(names, jnp.where(sends, x, jnp.zeros_like(x)), rest)

    def all_to_all(self, names, params, stack: Stack) -> Stack:
        """Returns, for each cell (logical device), the parts that all cells along `names` send to
        it."""
        x, rest = self.of_all(names, stack)
        at, n = len(rest), x.shape[len(rest)]
        # The indices, in `x`, of the dim that is split and of the dim along which parts are joined.
        split, joined = (1 + at + params[key] for key in ("split_axis", "concat_axis"))
        x = x.reshape(*x.shape[:split], n, -1, *x.shape[split + 1 :])
        x = jnp.moveaxis(x, split, at)  # [rest..., to, from, dims of a part...]
        x = jnp.take(x, self.indices(names), axis=at)  # only the parts to this device's cells
        # The dim "from" goes just before the dim to join, and then these two become one.
        x = jnp.moveaxis(x, at + 1, joined)
        return self.own(names, x.reshape(*x.shape[:joined], -1, *x.shape[joined + 2 :]), rest)
