"""Whether an optimizer acts element by element, so that its update of a shard is the shard of its update.

`check` traces `optimizer.update` twice, on the shards that a device has and on the whole leaves, and walks both programs side
by side. A value is one of these:

    uniform   one number, or an array of equal ones, the same on all devices
    same      the same on all devices
    own       element for element that of one split leaf
    right     made by a function that is right on shards, such as `zero.sharded`'s update
    mixed     anything else that a shard went into, or whose size is a shard's

What is `own` stays so through elementwise primitives (a list of what is allowed: a list of what is forbidden would have holes),
together with uniform values. An update or a state that is mixed is refused, and so are two programs that differ in more than
sizes: a rate scaled by a dim of the shape, or a choice by a leaf's size.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from parallax import trees
from parallax.elementwise.kinds import SAME, UNIFORM, Kind, mixed, own
from parallax.elementwise.marks import COMPARES
from parallax.elementwise.walk import Differs, Walk, dtype, split_over
from parallax.typed import PyTree


class Mixes(ValueError):
    """An optimizer's update of the shards is not the shard of its update."""


def check(
    update: Callable[..., Any],
    gradients: PyTree,
    state: PyTree,
    weights: PyTree,
    *,
    wholes: Sequence[PyTree],
    at: str,
    besides: Sequence[str] = (),
) -> None:
    """Refuse with `Mixes` an optimizer whose update of the shards is not the shard of its update.

    Args:
        update: `(gradients, state, weights) -> (updates, state)`, of the optimizer.
        gradients: what `update` is given, and so the next two.
        state: likewise. An array whose path ends with a leaf's belongs to that leaf.
        weights: a tree like `gradients`.
        wholes: trees like `weights`, of the shapes of the whole leaves; several, where it is not known which dim is split.
        at: the function that asks.
        besides: axes along which a leaf may differ although the optimizer sees it whole.
    """
    leaves = _leaves(gradients, weights, frozenset(besides))
    if not any(leaf.split for leaf in leaves):
        return
    owners = _owners(state, leaves)
    kinds = [
        *(own(i) if leaf.split else SAME for i, leaf in enumerate(leaves)),
        *(_kind_of_state(x, leaves, i, frozenset(besides)) for x, i in zip(jax.tree.leaves(state), owners, strict=True)),
        *(own(i) if leaf.split and leaf.alike else SAME for i, leaf in enumerate(leaves)),
    ]

    def program(what, *arguments):
        try:
            return jax.make_jaxpr(update)(*arguments)
        except (TypeError, ValueError) as error:
            if not _is_about_shapes(error):
                raise
            _refuse(mixed(f"its update fails on {what}, {str(error).splitlines()[0].rstrip('.:')}"), leaves, None, at)

    typed = program("shards", gradients, state, weights)
    _judge(Walk().run((typed.jaxpr, typed.jaxpr), (typed.consts, typed.consts), kinds), leaves, owners, wholes, at)

    def traced(of_gradients, of_weights):
        sized = lambda x, shape: jax.ShapeDtypeStruct(shape, dtype(x))
        resized = lambda tree, shapes: _with(tree, [sized(*each) for each in zip(jax.tree.leaves(tree), shapes, strict=True)])
        belongs = lambda x, i: i is not None and np.shape(x) == leaves[i].shape
        of_state = [
            of_gradients[i] if belongs(x, i) else np.shape(x) for x, i in zip(jax.tree.leaves(state), owners, strict=True)
        ]
        token = COMPARES.set(True)
        try:
            shapes = (of_gradients, of_state, of_weights)
            return program("whole leaves, with the state of shards", *map(resized, (gradients, state, weights), shapes))
        finally:
            COMPARES.reset(token)

    small = traced([leaf.shape for leaf in leaves], _shapes(weights))
    for whole in wholes:
        large = traced(_shapes(whole), _shapes(whole))
        try:
            found = Walk().run((small.jaxpr, large.jaxpr), (small.consts, large.consts), kinds)
        except Differs as error:
            _refuse(mixed(f"on a whole leaf it is another program: {error}"), leaves, None, at)
        _judge(found, leaves, owners, wholes, at)


class _Leaf(NamedTuple):
    """A leaf that is updated.

    Attributes:
        path: in the tree of parameters.
        shape: of its gradient.
        split: the axes of more than one device along which gradient or parameter differ.
        alike: whether the parameter has the gradient's shape: with ZeRO-1 it is whole.
    """

    path: tuple[Any, ...]
    shape: tuple[int, ...]
    split: frozenset[str]
    alike: bool


def wholes(weights: PyTree, specs: Mapping[str, PartitionSpec], *, besides: Sequence[str] = ()) -> list[PyTree]:
    """The shapes of the whole leaves of these shards, from their specs by path; axes in `besides` do not count.

    Where a leaf is split over an axis that its spec does not name, there is one such tree for each dim that may be split.
    """

    def named(path, leaf):
        counts = split_over(leaf) - set(besides)
        entries = [*specs.get(trees.dotted(path), ()), *[None] * leaf.ndim][: leaf.ndim]
        by_dim = [[name for name in trees.entry_axes(entry) if name in counts] for entry in entries]
        return by_dim, counts - {name for names in by_dim for name in names}

    def whole(path, leaf, chosen):
        by_dim, unnamed = named(path, leaf)
        if by_dim:
            by_dim[min(chosen, leaf.ndim - 1)] += unnamed
        sizes = [size * math.prod(map(lax.axis_size, names)) for size, names in zip(leaf.shape, by_dim, strict=True)]
        return jax.ShapeDtypeStruct(sizes, leaf.dtype)

    open_ = max((leaf.ndim for path, leaf in jax.tree.leaves_with_path(weights) if named(path, leaf)[1]), default=1)
    of = lambda chosen: jax.tree.map_with_path(lambda path, leaf: whole(path, leaf, chosen), weights)
    return [of(chosen) for chosen in range(max(open_, 1))]


def _leaves(gradients: PyTree, weights: PyTree, besides: frozenset[str]) -> list[_Leaf]:
    of_weights = jax.tree.leaves_with_path(weights)
    return [
        _Leaf(tuple(path), np.shape(g), (split_over(g) | split_over(w)) - besides, np.shape(g) == np.shape(w))
        for (path, w), g in zip(of_weights, jax.tree.leaves(gradients), strict=True)
    ]


def _owners(state: PyTree, leaves: Sequence[_Leaf]) -> list[int | None]:
    """For each array of the optimizer's state the number of the leaf that it belongs to."""
    paths = [leaf.path for leaf in leaves]
    return [trees.owner(path, paths) for path, _ in jax.tree.leaves_with_path(state)]


def _kind_of_state(x: Any, leaves: Sequence[_Leaf], i: int | None, besides: frozenset[str]) -> Kind:
    if np.size(x) <= 1 and not split_over(x) - besides:
        return UNIFORM
    if i is not None and np.shape(x) == leaves[i].shape:
        return own(i) if leaves[i].split else SAME
    if i is not None and leaves[i].split:
        return mixed(f"its state has an array of shape {np.shape(x)} for it")
    return mixed("its state differs between devices, and belongs to no leaf") if split_over(x) - besides else SAME


def _with(tree: PyTree, leaves: Sequence[Any]) -> PyTree:
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


def _is_about_shapes(error: Exception) -> bool:
    """Whether JAX or optax raised this about shapes, or about a state with other leaves, and none of our functions."""
    return "pytree structure" in str(error) or (isinstance(error, TypeError) and "shape" in str(error))


def _shapes(tree: PyTree) -> list[tuple[int, ...]]:
    return [np.shape(leaf) for leaf in jax.tree.leaves(tree)]


def _split_alike(leaves: Sequence[_Leaf], i: int, j: int, wholes: Sequence[PyTree]) -> bool:
    """Whether two leaves are split along the same dim: one axis, and equal shapes of shards and of the only possible wholes."""
    axes, shapes = leaves[i].split, [_shapes(whole) for whole in wholes]
    alike = leaves[i].shape == leaves[j].shape and all(each[i] == each[j] for each in shapes)
    return len(wholes) == len(axes) == 1 and leaves[j].split == axes and alike


def _judge(
    found: Sequence[Kind],
    leaves: Sequence[_Leaf],
    owners: Sequence[int | None],
    wholes: Sequence[PyTree],
    at: str,
) -> None:
    """Refuse if one of these, the updates and then the state, is mixed."""
    for i, kind in enumerate(found):
        owner = i if i < len(leaves) else (*owners, *[None] * len(found))[i - len(leaves)]
        if kind.name == "mixed":
            _refuse(kind, leaves, owner, at)
        if kind.name == "own" and owner not in (None, kind.leaf) and not _split_alike(leaves, owner, kind.leaf, wholes):
            what = "its update" if i < len(leaves) else "its state"
            source = trees.dotted(leaves[kind.leaf].path)
            _refuse(mixed(f"{what} is made of {source}, which may be split along another dim"), leaves, owner, at)
        if kind == SAME and i < len(leaves) and leaves[i].split:
            _refuse(mixed("its update has nothing of the leaf's own elements"), leaves, owner, at)


def _refuse(kind: Kind, leaves: Sequence[_Leaf], i: int | None, at: str) -> NoReturn:
    i = next(j for j, leaf in enumerate(leaves) if leaf.split) if i is None or not leaves[i].split else i
    axes = sorted(leaves[i].split)
    axis = repr(axes[0] if len(axes) == 1 else tuple(axes))
    raise Mixes(
        f"{at}: each device updates its shards alone, and this optimizer does not act element by element, so it would train "
        f"something else. Of {trees.dotted(leaves[i].path) or 'the parameter'}, which is split along {axis}: {kind.why}. "
        f"Wrap it: optimizers.whole(optimizer, {axis}, specs) updates whole leaves, and "
        f"optimizers.by_matrix(optimizer, {axis}, specs) whole matrices, each on one device. An optimizer that joins the shards "
        "itself is let through by optimizers.on_shards."
    )
