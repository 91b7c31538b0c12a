"""A mesh axis together with the collective algorithm along it. Functions take both as one argument,
`axis`.

    tensor.column(x, w, b, "tensor")          # a name, or a tuple of names: `jax.lax` is used
    tensor.column(x, w, b, ring("tensor"))    # an algorithm bound to the name

An algorithm is a value with functions like `lax`'s: `ring.all_reduce(x, "data")` is a
drop-in for `lax.psum(x, "data")`. An algorithm that is called with a name returns an `Axis`, whose
functions are the same, but take no name.

Notation: `A[I_X]` is split along dim I over the devices of axis X, one block on each. `A {U_X}` is
a sum over axis X that is not taken yet: each device has one term.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped

from parallax._typing import PyTree
from parallax.collectives import types
from parallax.collectives.types import AxisName, axes

Tree = TypeVar("Tree", bound=PyTree)
Collective: TypeAlias = Callable[..., Any]  # (x, axis_name, **options), x a tree, as in `lax`


def _no_table(*sizes: int) -> NoReturn:
    """Raises `ValueError`. This function is the default value of `Algorithm.table`: an algorithm
    without a table keeps it."""
    raise ValueError(
        "This algorithm has no table of messages. Use an algorithm of `collectives.tables`, such "
        "as ring."
    )


@dataclass(frozen=True)
class Algorithm:
    """A collective algorithm, whose functions take and return the same as `lax`'s collectives.

    ```python
    total = ring.all_reduce(gradients, "data")   # inside mesh.spmd; equals lax.psum
    axis = ring("data")                          # the same algorithm, bound to an axis
    total = axis.all_reduce(gradients)
    ```

    Attributes:
        name: the name in errors and reports.
        all_reduce: the counterpart of `lax.psum`.
        reduce_scatter: the counterpart of `lax.psum_scatter`.
        all_gather: the counterpart of `lax.all_gather`.
        all_to_all: the counterpart of `lax.all_to_all`; by default `lax.all_to_all` itself.
        table: a function that returns, for a number of devices, a table of messages (a `Route`), or
            several tables that run side by side.
    """

    name: str
    all_reduce: Collective
    reduce_scatter: Collective
    all_gather: Collective
    all_to_all: Collective = lax.all_to_all
    table: Callable[..., Any] = _no_table

    def __call__(self, axis_name: AxisName) -> "Axis":
        """Returns this algorithm bound to one mesh axis, or to several as one row-major group."""
        return Axis(axis_name, self)

    def all_mean(self, x: Tree, axis_name: AxisName) -> Tree:
        """Returns the mean of `x` over the devices, on every device.

        `all_mean` works like `lax.pmean`, and costs one `all_reduce`.
        """
        n = types.axis_size(axis_name)
        # Divided after the sum, as `lax.pmean` does: the sum of whole numbers stays exact.
        return jax.tree.map(lambda x: x / n, self.all_reduce(x, axis_name))

    def __repr__(self) -> str:
        return self.name


def refused(algorithm: str, collective: str, instead: str) -> Callable[..., NoReturn]:
    """Returns a function that raises `ValueError`, since `algorithm` lacks this `collective`.

    The arguments are words of the error's message; `instead` names the replacement.
    """

    def refuse(*arguments: Any, **options: Any) -> NoReturn:
        raise ValueError(
            f"{algorithm} has no {collective}. Use {instead}, or a plain axis name, for which "
            "jax.lax is used."
        )

    return refuse


# The default: XLA's own collectives are the fastest on every backend that was measured.
xla = Algorithm("xla", lax.psum, lax.psum_scatter, lax.all_gather)


@dataclass(frozen=True)
class Axis:
    """A mesh axis, or several as one row-major group, with an algorithm for collectives along it.

    The collectives of an `Axis` take trees of arrays. They return the same as `jax.lax`'s
    collectives, with the same replication types. A function that takes an argument `axis` turns it
    into an `Axis` by `Axis.of`:

    ```python
    def mean_loss(losses, axis):                 # axis: "data", ("data", "context"), ring("data")
        return Axis.of(axis).all_mean(losses)
    ```

    Attributes:
        names: the axis, or several; `()` for one device alone.
        algorithm: the algorithm; by default `xla`, the collectives of `jax.lax`.
    """

    names: AxisName
    algorithm: Algorithm = xla

    @staticmethod
    def of(axis: "AxisLike") -> "Axis":
        """Returns `axis` as an `Axis`. For a name, or a tuple of names, the result uses `jax.lax`.

        For a tuple that holds an `Axis`, such as `("replica", ring("data"))`, a collective works
        along one part of the tuple after the other. It reduces and scatters from the first part to
        the last, and gathers from the last to the first. So the values equal those of `lax` for a
        tuple of the names.

        Raises `ValueError` for any other value.
        """
        if isinstance(axis, Axis):
            return axis
        if isinstance(axis, str):
            return Axis(axis)
        if not isinstance(axis, tuple | list):
            raise ValueError(
                "An axis must be a name, such as 'data', an algorithm called with a name, such as "
                f"ring('data'), or a tuple of these; got {axis!r}. If you passed an ErrorFeedback, "
                "call its method all_reduce instead: it has a state, so it cannot be an axis."
            )
        names = tuple(name for name in axis if isinstance(name, str))
        if len(names) == len(axis):
            return Axis(names)
        return _in_order([Axis.of(part) for part in axis])

    def over(self, names: AxisName) -> "Axis":
        """Returns an `Axis` with the algorithm of `self`, along the mesh axes that are in both
        `names` and `self.names`, in the order of `names`."""
        return Axis(tuple(name for name in axes(names) if name in axes(self.names)), self.algorithm)

    def size(self) -> int:
        """Returns the number of devices. Raises `ValueError` outside a map over the axis."""
        return types.axis_size(self.names)

    def index(self) -> Shaped[Array, ""]:
        """Returns the device's place, from 0, in row-major order: an int32 scalar."""
        return types.axis_index(self.names)

    def all_reduce(self, x: Tree) -> Tree:
        """Returns the sum over devices, on every device: `A {U_X} -> A`. `{U_X}` means that each
        device along axis X has one term of the sum."""
        return self.algorithm.all_reduce(x, self.names)

    def all_mean(self, x: Tree) -> Tree:
        """Returns the mean of `x` over the devices, on every device."""
        return self.algorithm.all_mean(x, self.names)

    def reduce_scatter(self, x: Tree, *, scatter_dimension: int = 0, tiled: bool = False) -> Tree:
        """Returns block i of the sum over devices, on device i: `A[I] {U_X} -> A[I_X]`. `{U_X}`
        means that each device along axis X has one term of the sum."""
        return _by_dims(
            self.algorithm.reduce_scatter, x, self.names, tiled, scatter_dimension=scatter_dimension
        )

    def all_gather(self, x: Tree, *, axis: int = 0, tiled: bool = False) -> Tree:
        """Returns every device's block on every device: `A[I_X] -> A[I]`, typed as varying."""
        # Typed as varying, so that its transpose is a reduce-scatter: an invariant result would
        # have a cotangent that nothing sums.
        return self.algorithm.all_gather(x, self.names, axis=axis, tiled=tiled)

    def all_to_all(
        self, x: Tree, split_axis: int, concat_axis: int, *, tiled: bool = False
    ) -> Tree:
        """Sends block j of device i to device j, where it is block i: `A[I_X, J] -> A[I, J_X]`."""
        return _by_dims(
            self.algorithm.all_to_all,
            x,
            self.names,
            tiled,
            split_axis=split_axis,
            concat_axis=concat_axis,
        )

    def permute(self, x: Tree, perm: list[tuple[int, int]]) -> Tree:
        """Returns device i's `x` on device j for each (i, j) in `perm`; other devices get zeros.

        Devices are numbered as by `index`, in the order of the names.
        """
        from parallax.collectives.permute import send  # most axes do not need it

        # `lax.ppermute` would number them in the order of the mesh's axes.
        return jax.tree.map(functools.partial(send, axis_name=self.names, pairs=perm), x)

    def all_max(self, x: Tree) -> Tree:
        """Returns the maximum over devices, on every device: `lax.pmax`."""
        # Without an axis there is one device, whose `x` is the maximum.
        return lax.pmax(x, self.names) if axes(self.names) else x

    def __repr__(self) -> str:
        return repr(self.names) if self.algorithm == xla else f"{self.algorithm}({self.names!r})"


def _by_dims(collective: Collective, x: Tree, names: AxisName, tiled: bool, **dims: int) -> Tree:
    """Returns the tree `collective(x, names)`. The arguments `dims` are dims of each leaf, counted
    from the end if negative."""
    if min(dims.values()) >= 0 or collective not in (lax.psum_scatter, lax.all_to_all):
        return collective(x, names, **dims, tiled=tiled)

    from parallax.collectives.drop_in import dim_of  # most axes do not need it

    # `lax` passes a negative dim to XLA, which refuses it or crashes.
    def leaf(x):
        counted = {name: dim_of(name, dim, jnp.ndim(x)) for name, dim in dims.items()}
        return collective(x, names, **counted, tiled=tiled)

    return jax.tree.map(leaf, x)


AxisLike: TypeAlias = AxisName | Axis | tuple[str | Axis, ...]


def combined_axis(*parts: AxisLike) -> Axis:
    """Returns several axes as one axis.

    If all given axes have the same algorithm, the devices form one row-major group, in which the
    first axis varies slowest, as in `lax.psum(x, ("a", "b"))`. Otherwise a collective works along
    one axis after the other: it reduces and scatters from the first to the last, and gathers from
    the last to the first. An axis without a name, `()`, is left out. If no axis has a name, the
    result is `Axis(())`, the axis of one device.
    """
    named = [axis for axis in map(Axis.of, parts) if axes(axis.names)]
    if len({axis.algorithm for axis in named}) > 1:
        return _in_order(named)
    # One all-reduce over all axes sends fewer bytes than one all-reduce for each axis.
    names = tuple(name for axis in named for name in axes(axis.names))
    # Without a name, the algorithm is the default: `xla`, the collectives of `jax.lax`.
    return Axis(names, named[0].algorithm if named else xla)


def _in_order(parts: list[Axis]) -> Axis:
    """Returns the axis made of several axes, `parts`. Its collectives work along one part after the
    other.

    The collectives reduce and scatter from the first part to the last, and gather from the last to
    the first, as `Axis.of` states. An all-to-all is refused.

    The `axis_name` passed to a collective may name all mesh axes of the combined axis, or only some
    of these mesh axes; their order in `axis_name` counts. Neighbouring mesh axes that have the same
    algorithm form one group (see `_groups`). A collective works along one group after the other.
    """
    from parallax.collectives.drop_in import check_divides, dim_of  # most axes do not need it

    def all_reduce(x, axis_name):
        """Returns the sum over the axes `axis_name`: over the first group of axes, then over the
        next group, and so on.

        A group (see `_groups`) is one axis, or neighbouring axes that have the same algorithm.
        """
        return functools.reduce(lambda x, part: part.all_reduce(x), _groups(parts, axis_name), x)

    def reduce_scatter(x, axis_name, *, scatter_dimension=0, tiled=False):
        """Returns this device's part of the sum over devices. The sum is scattered over the first
        axis in `axis_name`, then over the next axis, and so on.

        `_groups` keeps the order of these axes, and joins neighbouring axes that have the same
        algorithm into one group.
        """

        def leaf(x):
            """Returns this device's part of the sum of one array over the devices.

            The first group of axes (see `_groups`) scatters the whole array. Each later group
            scatters the part that the group before it returned.
            """
            groups, n = _groups(parts, axis_name), types.axis_size(axis_name)
            if not groups:  # without an axis, `lax` drops no dim even if not tiled
                return x
            dim = dim_of("scatter_dimension", scatter_dimension, x.ndim)
            check_divides("reduce_scatter", "scatter_dimension", x.shape, dim, n, tiled)
            if not tiled:
                # The dim, of size n, becomes one dim for each group. The scatter along a group
                # drops the group's dim, so the next group's dim stands at `dim` again.
                sizes = [group.size() for group in groups]
                x = x.reshape(*x.shape[:dim], *sizes, *x.shape[dim + 1 :])
            for group in groups:
                x = group.reduce_scatter(x, scatter_dimension=dim, tiled=tiled)
            return x

        return jax.tree.map(lambda x: leaf(jnp.asarray(x)), x)

    def all_gather(x, axis_name, *, axis=0, tiled=False):
        """Returns all devices' blocks. They are gathered over the last axis in `axis_name`, then
        over the axis before it, and so on."""

        def leaf(x):
            """Returns all devices' blocks of the array `x`, joined along dim `axis` of the array.

            The groups of mesh axes (see `_groups`) gather one after another, the last group first.
            """
            groups, n = _groups(parts, axis_name), types.axis_size(axis_name)
            if not groups:  # without an axis, `lax` adds no dim even if not tiled
                return x
            # Untiled, the result has one dim more than `x`, and a negative `axis` counts it too.
            dim = dim_of("axis", axis, x.ndim + (not tiled))
            shape = x.shape
            # The last axis varies fastest in `lax`'s order, so its blocks are gathered first.
            for group in reversed(groups):
                x = group.all_gather(x, axis=dim, tiled=tiled)
            # Untiled, each group added a dim: they become one dim of all devices.
            return x if tiled else x.reshape(*shape[:dim], n, *shape[dim:])

        return jax.tree.map(lambda x: leaf(jnp.asarray(x)), x)

    name = " then ".join(part.algorithm.name for part in parts)
    # An all-to-all along one part after the other would also have to reorder the blocks: no code
    # here does that.
    no_all_to_all = refused(name, "all_to_all", "one algorithm for all axes, such as ring(names)")
    names = tuple(name for part in parts for name in axes(part.names))
    return Axis(names, Algorithm(name, all_reduce, reduce_scatter, all_gather, no_all_to_all))


def _groups(parts: list[Axis], axis_name: AxisName) -> list[Axis]:
    """Returns the mesh axes `axis_name` in groups. Each group is one `Axis`, with the algorithm
    that `parts` gives to these mesh axes.

    Neighbouring axes that have the same algorithm form one group. To all-reduce S bytes, a device
    sends less than 2 S bytes in one ring over two axes. In two rings, one along each axis, the
    device would send up to 4 S bytes in total.
    """
    groups: list[Axis] = []
    for name in axes(axis_name):
        part = next((part for part in parts if name in axes(part.names)), None)
        if part is None:
            raise ValueError(
                f"{name!r} is not one of the axes that {parts} have. Name one or several of those."
            )
        if groups and groups[-1].algorithm is part.algorithm:
            groups[-1] = Axis((*axes(groups[-1].names), name), part.algorithm)
        else:
            groups.append(Axis(name, part.algorithm))
    return groups
