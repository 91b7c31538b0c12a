"""The part of a model that islands exchange at a time: the whole model, some leaves, or some
layers.

Islands, groups of devices that train separately, exchange the changes of their weights in a
*round*, every H steps. If a model is cut into F fragments, fragment k has its rounds k*H/F steps
after fragment 0. So the largest number of bytes that one step moves between islands falls by a
factor of about F.

A *part* of a model is a tree with the model's paths, and with None for leaves that are not in the
part. If a leaf has stacked layers, the part may have only some of these layers.

Source: Douillard et al., Streaming DiLoCo with overlapping communication (arXiv 2501.18512).
"""

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np

from parallax import rules, trees
from parallax._typing import PyTree, Specs


class Fragment(NamedTuple):
    """A way to take a part out of a model, and to put it back.

    Attributes:
        get: takes a model and returns the part of it.
        put: takes `(model, part)` and returns the model with that part in its place.
    """

    get: Callable[[PyTree], PyTree]
    put: Callable[[PyTree, PyTree], PyTree]


# A function that returns the fragments of a model.
Fragments = Callable[[PyTree], tuple[Fragment, ...]]


class Stream(NamedTuple):
    """The fragments, or parts of the model, that islands exchange in rounds, and how the results of
    the exchanges are used.

    Attributes:
        fragments: a function that returns the fragments of a model, or of its shapes:
            `whole_model`, `by_path(...)` or `by_layers(...)`.
        delay: the number of steps between the exchange of a fragment and the use of the result. The
            delay must be below the number of steps between two rounds of one fragment.
        mixing: a number from 0 to 1. In a round an island takes `mixing` times its own weights plus
            `1 - mixing` times the new weights.
    """

    fragments: Fragments
    delay: int = 0
    mixing: float = 0.0


def whole_model(model: PyTree) -> tuple[Fragment, ...]:
    """Returns one fragment: the whole model."""
    return (Fragment(lambda model: model, lambda model, part: part),)


ALL_AT_ONCE = Stream(whole_model)


def _joined(model: PyTree, part: PyTree) -> PyTree:
    """Returns `model` with the leaves of `part` in their places, wherever `part` is not None."""
    return eqx.combine(part, model)


def by_path(*patterns: str | Sequence[str]) -> Fragments:
    """Returns a function from a model to its fragments, one for each argument. An argument is a
    glob of paths or a list of globs. The fragment of an argument has the leaves whose path matches
    one of its globs.

    An example is `by_path("blocks.**", ("embedding", "norm.**"))`.
    """

    def fragment(globs):
        """Returns the fragment of the leaves whose path matches one of the globs."""
        globs = (globs,) if isinstance(globs, str) else globs

        def leaf_of(path, leaf):
            """Returns the leaf if its path matches one of the globs, else None."""
            matches = any(rules.matches_glob(glob, trees.dotted(path)) for glob in globs)
            return leaf if matches else None

        return Fragment(lambda model: jax.tree.map_with_path(leaf_of, model), _joined)

    def fragments(model):
        """Returns the fragments, which depend only on the globs given to `by_path`, not on the
        model."""
        return tuple(map(fragment, patterns))

    return fragments


def by_layers(count: int, where: Callable[[Any], Any] = lambda model: model.blocks) -> Fragments:
    """Returns a function from a model to its fragments: `count` fragments of consecutive layers,
    and one fragment of all other leaves.

    Args:
        count: the number of groups of layers; the groups are as equal as possible.
        where: takes a model and returns its blocks. The leaves of the blocks are stacked layers:
            [L, ...], or [v, L / v, ...] for a pipeline of v chunks per stage. The first dim of
            these leaves is cut into groups.

    The returned function raises `ValueError` if `count` is not from 1 to the number of layers (or
    chunks), or if the first dims of the blocks' leaves have different sizes.
    """

    def fragments(model):
        """Returns one fragment for each group of layers, then one fragment of all other leaves."""
        sizes = {leaf.shape[0] for leaf in jax.tree.leaves(where(model))}
        if count < 1 or len(sizes) != 1 or min(sizes) < count:
            raise ValueError(
                f"islands.by_layers(count={count}) cuts the first dim of the blocks' leaves into "
                "`count` groups. All leaves must have the same size of this dim, and `count` must "
                f"be from 1 to this size; got the sizes {sorted(sizes)}. Use a count in this "
                "range, or by_path."
            )
        layers = sizes.pop()  # or chunks: the size of the first dim
        # The bounds of the groups are rounded down, so groups differ by one layer at most.
        bounds = [layers * k // count for k in range(count + 1)]

        def without_blocks(model):
            """Returns the model with None for the leaves of the blocks."""
            return eqx.tree_at(where, model, _nones(where(model)))

        groups = [_layers(where, start, stop) for start, stop in itertools.pairwise(bounds)]
        return (*groups, Fragment(without_blocks, _joined))

    return fragments


def _layers(where: Callable[[Any], Any], start: int, stop: int) -> Fragment:
    """Returns the fragment of the layers `start` to `stop - 1`."""

    def get(model):
        """Returns a tree like the model: its blocks with only the layers `start` to `stop - 1`, and
        None for all other leaves."""
        # `tree_at` replaces the leaves of the blocks in a tree in which all leaves are None. None
        # counts as a leaf only with this `is_leaf`.
        layers = jax.tree.map(lambda leaf: leaf[start:stop], where(model))
        return eqx.tree_at(where, _nones(model), layers, is_leaf=lambda x: x is None)

    def put(model, part):
        """Returns the model with the layers of `part` in their places."""

        def replaced(leaf, layers):
            return leaf.at[start:stop].set(layers)

        blocks = jax.tree.map(replaced, where(model), where(part))
        return eqx.tree_at(where, model, blocks)

    return Fragment(get, put)


def _nones(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: None, tree)


def checked_fragments(
    stream: Stream, model: PyTree, specs: Specs | None = None
) -> tuple[Fragment, ...]:
    """Returns the fragments of `model`, after a check that each element of the model is in exactly
    one fragment. The check uses only the shapes of the model's leaves.

    Args:
        stream: `stream.fragments(model)` makes the fragments; other settings are not used.
        model: the model, or the shapes of its arrays.
        specs: the specs of the model's leaves. With None, it is not checked whether a fragment cuts
            a split dim.

    Raises:
        ValueError: an element is in two fragments or in none; a fragment reshapes a leaf; or, with
            `specs`, a fragment cuts a dim that is split.
    """
    fragments = stream.fragments(model)
    # `sizes` has, by the path of a leaf, how many of its elements are in each fragment. `wholes`
    # has the leaves of the model by path, and `splits` their specs.
    sizes: dict[str, list[int]] = {}
    wholes = {trees.dotted(path): leaf for path, leaf in jax.tree.leaves_with_path(model)}
    splits = {} if specs is None else trees.by_path(specs)
    for fragment in fragments:
        for path, leaf in jax.tree.leaves_with_path(jax.eval_shape(fragment.get, model)):
            name = trees.dotted(path)
            sizes.setdefault(name, []).append(leaf.size)
            shape = wholes[name].shape
            # A part of a leaf must have as many dims as the leaf, and no dim may be larger.
            if leaf.ndim != len(shape) or any(map(operator.gt, leaf.shape, shape)):
                raise ValueError(
                    f"islands: a fragment has {name} in the shape {leaf.shape}, which does not fit "
                    f"into the leaf's shape in the model, {shape}. Take the whole leaf, or some of "
                    "its layers, and do not reshape it."
                )
            # The dims that are split over devices, if the fragment has only a part of the dim.
            cut = [
                dim
                for dim, entry in enumerate(splits.get(name, ()))
                if entry is not None and leaf.shape[dim] != shape[dim]
            ]
            if cut:
                raise ValueError(
                    f"islands: a fragment has a part of dim {cut[0]} of {name}. That dim is split "
                    f"by {splits[name]}, so the layers in the fragment would depend on the layout. "
                    "Cut a dim that no axis splits, or use by_path."
                )
    for name, leaf in wholes.items():
        found = sum(sizes.get(name, []))
        if found != leaf.size:
            raise ValueError(
                "islands: the fragments together must have each element of the model once; they "
                f"have {found} elements of {name or 'the parameter'}, which has "
                f"{leaf.size}. Let each leaf match one pattern of by_path."
            )
    # The numbers of elements are right. But two parts of one leaf may have the same elements, and
    # others may be in no part.
    if any(len(parts) > 1 for parts in sizes.values()):
        _check_apart(fragments, model)
    return fragments


def _check_apart(fragments: Sequence[Fragment], model: PyTree) -> None:
    """Raises `ValueError` if two fragments have the same element of a leaf of `model`."""
    for first, second in itertools.combinations([_indices(each, model) for each in fragments], 2):
        for name in first.keys() & second.keys():
            # The parts have an element in common if their indices meet along every dim.
            pairs = zip(first[name], second[name], strict=True)
            if all(np.intersect1d(*along).size for along in pairs):
                raise ValueError(
                    "islands: the fragments together must have each element of the model once; "
                    f"two of them have the same elements of {name or 'the parameter'}. Take "
                    "different layers in different fragments."
                )


def _indices(fragment: Fragment, model: PyTree) -> dict[str, list[np.ndarray]]:
    """Returns, for each leaf, the indices of its elements that are in the fragment. The result is a
    dict from the path of a leaf to a list of arrays: one array for each dim, with the indices along
    this dim. Leaves without dims, and leaves without elements in the fragment, are left out."""
    found: dict[str, list[np.ndarray]] = {}
    for dim in range(max((leaf.ndim for leaf in jax.tree.leaves(model)), default=0)):

        def numbered(leaf, dim=dim):
            """Returns an array of the leaf's shape, in which each element is its own index along
            `dim`. The array is only a broadcast view of the numbers 0, 1, 2, ..., so it takes no
            memory."""
            row = [1] * leaf.ndim
            if dim < leaf.ndim:
                row[dim] = leaf.shape[dim]
            return np.broadcast_to(np.arange(math.prod(row)).reshape(row), leaf.shape)

        # The fragment may use `jax.numpy`, whose results in a trace have no values otherwise.
        with jax.ensure_compile_time_eval():
            part = jax.tree.map(np.asarray, fragment.get(jax.tree.map(numbered, model)))
        for path, leaf in jax.tree.leaves_with_path(part):
            if dim < leaf.ndim and leaf.size:
                # A part has the same indices along `dim` at every place of the other dims, so those
                # at place 0 are enough.
                along = tuple(slice(None) if d == dim else 0 for d in range(leaf.ndim))
                found.setdefault(trees.dotted(path), []).append(leaf[along])
    return found
