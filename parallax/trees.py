"""The leaves of a tree: paths, `PartitionSpec`s, and whether a leaf is an array."""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from parallax._typing import PyTree

AnyMesh = Mesh | AbstractMesh  # an AbstractMesh has no devices: programs are only traced over it


class DiskForm(NamedTuple):
    """Two functions for `run.checkpoint.Checkpoints`: one turns a state into the form in which the
    state is stored, and the other turns this form into the state.

    Attributes:
        to_disk: turns a state into a form that is the same for all layouts (splits over devices).
            The function uses only `jax.numpy` on the arrays, since it is compiled.
        from_disk: the inverse of `to_disk`.
    """

    to_disk: Callable[[PyTree], PyTree]
    from_disk: Callable[[PyTree], PyTree]


def is_array(leaf: Any) -> bool:
    """Returns whether a leaf is a JAX or NumPy array, or a `jax.ShapeDtypeStruct`.

    Python numbers are static, so they do not count as arrays.
    """
    return eqx.is_array(leaf) or isinstance(leaf, np.ndarray | np.generic | jax.ShapeDtypeStruct)


def is_inexact(leaf: Any) -> bool:
    """Returns whether a leaf can be trained: whether it is an array, or a `jax.ShapeDtypeStruct`,
    of real or complex floats.
    """
    return is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def shardings(specs: PyTree, mesh: AnyMesh) -> PyTree:
    """Returns the `NamedSharding` of each `PartitionSpec` in the tree `specs`."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


def by_path(specs: PyTree) -> dict[str, PartitionSpec]:
    """Returns a dict from the dotted path of each spec of a tree to the spec.

    Raises:
        ValueError: two specs have the same dotted path. For example, the key "a.b" and the key "b"
            of a dict at "a" have the same path.
    """
    named = [(dotted(path), spec) for path, spec in jax.tree.leaves_with_path(specs)]
    if same := twice([path for path, _ in named]):
        raise ValueError(f"The specs have two leaves with the same path, {same[0]}: {RENAME}.")
    return dict(named)


RENAME = (
    "rename one of them, such as a dict's key that has a dot in it, since leaves are told apart "
    "by path"
)


def twice(paths: Sequence[str]) -> list[str]:
    """Returns the paths that occur more than once in the list `paths`."""
    return [path for path, count in Counter(paths).items() if count > 1]


class SpecsByPath(dict[str, PartitionSpec]):
    """A dict from path to spec that is also a rule: a function of (path, leaf) that returns a spec.

    For a path that is not in the dict the rule returns None. `rules.specs` refuses a dict that
    gives no leaf a spec, unless the dict is empty.
    """

    def __call__(self, path: str, leaf: Any) -> PartitionSpec | None:
        """Returns the spec of the path, or None."""
        return self.get(path)

    def __repr__(self) -> str:
        return f"the specs of {len(self)} paths"


# The axes over which one spec splits several leaves with different numbers of rows. `mesh.spmd`
# sets this value while it traces, since the types of the arrays do not show their specs. `grads`
# reads this value, and refuses a batch that is split like this.
UNEVEN_AXES = jax.make_user_context(frozenset())


def entry_axes(entry: Any) -> tuple[str, ...]:
    """Returns a tuple of the axis names in an entry (None, name or tuple) of a `PartitionSpec`."""
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def dotted(path: Sequence[Any]) -> str:
    """Returns a pytree path as a string with dots, such as `blocks.attention.qkv.weight`."""
    return jax.tree_util.keystr(tuple(path), simple=True, separator=".")


def parameter_index(
    path: Sequence[Any], paths: Sequence[Sequence[Any]], of_state: Collection[Any] = ()
) -> int | None:
    """Returns the index in `paths` of the parameter to which an array of an optimizer's state
    belongs, or None.

    Optimizers keep trees of the same structure as the tree of the parameters: the state's
    `0.mu.blocks.weight` belongs to the parameter `blocks.weight`. So the array's `path` ends with
    the parameter's path, after the path of a tree, here `0.mu`. Several of the `paths` may fit,
    such as `w` and `nu.w` for `0.nu.w`: with each of them, another part of the state, `0.nu` or
    `0`, would be the tree. The function takes the parameter whose tree has the most parameters. If
    the trees have equally many, it takes the parameter with the longest path. `of_state` has all
    paths of the state, as tuples.
    """
    fitting = [
        i
        for i, parameter in enumerate(paths)
        if tuple(path[len(path) - len(parameter) :]) == tuple(parameter)
    ]

    def rank(i):
        """Returns two numbers for parameter `i`: the number of parameters that the tree has if the
        array at `path` belongs to this parameter, and the length of the parameter's path."""
        above = tuple(path[: len(path) - len(paths[i])])
        return sum((*above, *parameter) in of_state for parameter in paths), len(paths[i])

    return max(fitting, key=rank, default=None) if len(fitting) > 1 else next(iter(fitting), None)
