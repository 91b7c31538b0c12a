"""An axis, and who moves data along it: always the two together, so they are one argument, `axis`.

    tensor.column(x, w, b, "tensor")          # a name, or a tuple of names: `jax.lax` moves the data
    tensor.column(x, w, b, ring("tensor"))    # an algorithm bound to the name

An algorithm is a value with `lax`'s collectives as functions: `ring.all_reduce(x, "data")` is a drop-in for `lax.psum(x, "data")`.
Called with a name it gives an `Axis`, which has the same functions without the name.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, TypeAlias, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped

from parallax._typing import PyTree
from parallax.collectives import types
from parallax.collectives.types import AxisName, axes

Tree = TypeVar("Tree", bound=PyTree)


@runtime_checkable
class AllReduce(Protocol):
    """A drop-in for `lax.psum` over named axes."""

    def __call__(self, x: Tree, axis_name: AxisName, /) -> Tree:
        """The sum over devices, on every device: `A {U_X} -> A`."""
        ...


@runtime_checkable
class ReduceScatter(Protocol):
    """A drop-in for `lax.psum_scatter`."""

    def __call__(
        self, x: Tree, axis_name: AxisName, /, *, scatter_dimension: int = 0, tiled: bool = False
    ) -> Tree:
        """The sum over devices; device i keeps block i: `A[I] {U_X} -> A[I_X]`."""
        ...


@runtime_checkable
class AllGather(Protocol):
    """A drop-in for `lax.all_gather`."""

    def __call__(
        self, x: Tree, axis_name: AxisName, /, *, axis: int = 0, tiled: bool = False
    ) -> Tree:
        """Every device's block on every device: `A[I_X] -> A[I]`."""
        ...


@runtime_checkable
class AllToAll(Protocol):
    """A drop-in for `lax.all_to_all`."""

    def __call__(
        self,
        x: Tree,
        axis_name: AxisName,
        split_axis: int,
        concat_axis: int,
        /,
        *,
        tiled: bool = False,
    ) -> Tree:
        """Block j of device i becomes block i of device j: `A[I_X, J] -> A[I, J_X]`."""
        ...


def _no_table(*sizes: int) -> NoReturn:
    raise ValueError(
        "This algorithm has no table of messages. Take one of `collectives.tables`, such as ring."
    )


@dataclass(frozen=True)
class Algorithm:
    """Who moves data along an axis: functions that take and return what `lax`'s take and return.

    Args:
        name: what messages call it.
        all_reduce: for `lax.psum`.
        reduce_scatter: for `lax.psum_scatter`.
        all_gather: for `lax.all_gather`.
        all_to_all: for `lax.all_to_all`, which is the default.
        table: what moves by: for so many devices a `Route`, or several side by side.
    """

    name: str
    all_reduce: AllReduce
    reduce_scatter: ReduceScatter
    all_gather: AllGather
    all_to_all: AllToAll = lax.all_to_all
    table: Callable[..., Any] = _no_table

    def __call__(self, axis_name: AxisName) -> "Axis":
        """This algorithm along `axis_name`: one mesh axis, or several as one group, in row-major order."""
        return Axis(axis_name, self)

    def all_mean(self, x: Tree, axis_name: AxisName) -> Tree:
        """The mean over devices, on every device: `A {U_X} -> A`. The twin of `lax.pmean`; costs one `all_reduce`."""
        n = types.axis_size(axis_name)
        return jax.tree.map(lambda x: x / n, self.all_reduce(x, axis_name))

    def __repr__(self) -> str:
        return self.name


def refused(algorithm: str, what: str, instead: str) -> Callable[..., NoReturn]:
    """A collective that `algorithm` does not have: it raises `ValueError` when it is called, and names another algorithm."""

    def refuse(*arguments: Any, **options: Any) -> NoReturn:
        raise ValueError(
            f"{algorithm} has no {what}. Take {instead}, or a plain axis name, along which jax.lax moves the data."
        )

    return refuse


xla = Algorithm("xla", lax.psum, lax.psum_scatter, lax.all_gather)


@dataclass(frozen=True)
class Axis:
    """A mesh axis, or several as one group in row-major order, and who moves data along it. `Axis.of` makes one of a name.

    Its collectives take trees of arrays and return what `jax.lax`'s return, with the same replication types.

    Args:
        names: the axis, or several; `()` for one device alone.
        algorithm: who moves the data.
    """

    names: AxisName
    algorithm: Algorithm = xla

    @staticmethod
    def of(axis: "AxisLike") -> "Axis":
        """`axis` as an `Axis`: along a name, or a tuple of names, `jax.lax` moves the data.

        A tuple that holds an `Axis`, such as `("replica", ring("data"))`, works along one after the other, in the order that
        gives `lax`'s values for the tuple of names: it reduces and scatters from the first to the last, and gathers back.

        Raises `ValueError` for anything else.
        """
        if isinstance(axis, Axis):
            return axis
        if isinstance(axis, str):
            return Axis(axis)
        if not isinstance(axis, tuple | list):
            raise ValueError(
                f"An axis is a name, such as 'data', a tuple of names, or an algorithm with its name, such as ring('data'); got "
                f"{axis!r}. An ErrorFeedback has a state, so no arrow takes it: call its own all_reduce."
            )
        names = tuple(name for name in axis if isinstance(name, str))
        return (
            Axis(names) if len(names) == len(axis) else _in_order([Axis.of(part) for part in axis])
        )

    def over(self, names: AxisName) -> "Axis":
        """The same algorithm along some of these axes, in the order given; those that are not of this axis are left out."""
        kept = tuple(name for name in axes(names) if name in axes(self.names))
        return Axis(kept, self.algorithm)

    def size(self) -> int:
        """The number of devices. Raises `ValueError` where the code does not run over the axis."""
        return types.axis_size(self.names)

    def index(self) -> Shaped[Array, ""]:
        """The device's place, from 0, in row-major order: an int32 scalar."""
        return types.axis_index(self.names)

    def all_reduce(self, x: Tree) -> Tree:
        """The sum over devices, on every device: `A {U_X} -> A`."""
        return self.algorithm.all_reduce(x, self.names)

    def all_mean(self, x: Tree) -> Tree:
        """The mean over devices, on every device: `A {U_X} -> A`."""
        return self.algorithm.all_mean(x, self.names)

    def reduce_scatter(self, x: Tree, *, scatter_dimension: int = 0, tiled: bool = False) -> Tree:
        """The sum over devices; device i keeps block i: `A[I] {U_X} -> A[I_X]`."""
        return self.algorithm.reduce_scatter(
            x, self.names, scatter_dimension=scatter_dimension, tiled=tiled
        )

    def all_gather(self, x: Tree, *, axis: int = 0, tiled: bool = False) -> Tree:
        """Every device's block on every device: `A[I_X] -> A[I]`, typed as varying."""
        return self.algorithm.all_gather(x, self.names, axis=axis, tiled=tiled)

    def all_to_all(
        self, x: Tree, split_axis: int, concat_axis: int, *, tiled: bool = False
    ) -> Tree:
        """Block j of device i becomes block i of device j: `A[I_X, J] -> A[I, J_X]`."""
        return self.algorithm.all_to_all(x, self.names, split_axis, concat_axis, tiled=tiled)

    def permute(self, x: Tree, perm: list[tuple[int, int]]) -> Tree:
        """For each pair (i, j) device i's `x` on device j, and zeros where nothing arrives: `lax.ppermute`."""
        return lax.ppermute(x, self.names, perm)

    def all_max(self, x: Tree) -> Tree:
        """The maximum over devices, on every device: `lax.pmax`."""
        return lax.pmax(x, self.names) if axes(self.names) else x

    def __repr__(self) -> str:
        return repr(self.names) if self.algorithm == xla else f"{self.algorithm}({self.names!r})"


AxisLike: TypeAlias = AxisName | Axis | tuple[str | Axis, ...]


def combined_axis(*parts: AxisLike) -> Axis:
    """Several axes as one: one group where one algorithm moves them all, and otherwise one after the other, as in `Axis.of`.

    Axes without a name, `()`, are left out.
    """
    found = [each for each in map(Axis.of, parts) if axes(each.names)]
    if len({each.algorithm for each in found}) > 1:
        return _in_order(found)
    names = tuple(name for each in found for name in axes(each.names))
    return Axis(names, found[0].algorithm if found else xla)


def _in_order(parts: list[Axis]) -> Axis:
    """Works along one axis after the other."""

    def along(axis_name):
        found: list[Axis] = []
        for name in axes(axis_name):
            part = next((part for part in parts if name in axes(part.names)), None)
            if part is None:
                raise ValueError(
                    f"{name!r} is not one of the axes that {parts} have. Name those, one or several."
                )
            if found and found[-1].algorithm is part.algorithm:
                found[-1] = Axis((*axes(found[-1].names), name), part.algorithm)
            else:
                found.append(Axis(name, part.algorithm))
        return found

    def all_reduce(x, axis_name):
        return functools.reduce(lambda x, part: part.all_reduce(x), along(axis_name), x)

    def reduce_scatter(x, axis_name, *, scatter_dimension=0, tiled=False):
        def leaf(x):
            parts, dim = along(axis_name), scatter_dimension % x.ndim
            if not tiled:  # a dim of n becomes one for each part, and each part drops its own
                x = x.reshape(*x.shape[:dim], *(part.size() for part in parts), *x.shape[dim + 1 :])
            for part in parts:
                x = part.reduce_scatter(x, scatter_dimension=dim, tiled=tiled)
            return x

        return jax.tree.map(lambda x: leaf(jnp.asarray(x)), x)

    def all_gather(x, axis_name, *, axis=0, tiled=False):
        def leaf(x):
            dim = axis % (x.ndim + (not tiled))
            shape = x.shape
            for part in reversed(along(axis_name)):
                x = part.all_gather(x, axis=dim, tiled=tiled)
            return x if tiled else x.reshape(*shape[:dim], -1, *shape[dim:])

        return jax.tree.map(lambda x: leaf(jnp.asarray(x)), x)

    name = " then ".join(part.algorithm.name for part in parts)
    one_group = refused(name, "all_to_all", "one algorithm for all axes, such as ring(names)")
    names = tuple(name for part in parts for name in axes(part.names))
    return Axis(names, Algorithm(name, all_reduce, reduce_scatter, all_gather, one_group))
