"""Which part of a model a round exchanges: all of it, some leaves, or some layers of stacked
leaves.

With F fragments, fragment k has its rounds k H/F steps after fragment 0, so the most bytes that one
step moves between islands fall by about F. Source: Douillard et al., Streaming DiLoCo with
overlapping communication (arXiv 2501.18512).
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax

from parallax import rules, trees
from parallax._typing import PyTree, Specs


class Fragment(NamedTuple):
    """A part of a model.

    Attributes:
        get: from the model to the part: a tree with the model's paths, and None for leaves that are
            not in it.
        put: `(model, part)` to the model with that part.
    """

    get: Callable[[PyTree], PyTree]
    put: Callable[[PyTree, PyTree], PyTree]


Fragments = Callable[[PyTree], tuple[Fragment, ...]]


class Stream(NamedTuple):
    """What a round exchanges, and when the islands use it.

    Attributes:
        fragments: from the model, or its shapes, to its fragments: `whole`, `by_path(...)` or
            `by_layers(...)`.
        delay: steps between the exchange of a fragment and its use; below `every`.
        mixing: how much of its own weights an island keeps when the new ones come: 0 takes the new
            ones, 1 keeps its own.
    """

    fragments: Fragments
    delay: int = 0
    mixing: float = 0.0


def whole_model(model: PyTree) -> tuple[Fragment, ...]:
    """The model as one fragment."""
    return (Fragment(lambda model: model, lambda model, part: part),)


ALL_AT_ONCE = Stream(whole_model)


def by_path(*patterns: str | Sequence[str]) -> Fragments:
    """A fragment for each glob of paths, or for each list of globs: `by_path("blocks.**",
    ("embedding", "norm.**"))`.
    """

    def fragments(model):
        def one(globs):
            globs = (globs,) if isinstance(globs, str) else globs
            covers = lambda path: any(
                rules.matches_glob(glob, trees.dotted(path)) for glob in globs
            )
            get = lambda model: jax.tree.map_with_path(
                lambda path, leaf: leaf if covers(path) else None, model
            )
            return Fragment(get, lambda model, part: eqx.combine(part, model))

        return tuple(map(one, patterns))

    return fragments


def by_layers(count: int, where: Callable[[Any], Any] = lambda model: model.blocks) -> Fragments:
    """`count` fragments of consecutive layers, and one of all that is no block.

    Args:
        count: how many groups the blocks' first dim is cut into, as equal as can be.
        where: picks the blocks, whose leaves are stacked: [L, ...], or [v, L / v, ...] where a
            pipeline has v chunks.

    Raises:
        ValueError: there are fewer layers, or chunks, than `count`.
    """

    def fragments(model):
        sizes = {leaf.shape[0] for leaf in jax.tree.leaves(where(model))}
        if count < 1 or len(sizes) != 1 or min(sizes) < count:
            raise ValueError(
                f"islands.by_layers(count={count}) cuts the first dim of all blocks, which must be "
                f"the same and at least count; these have {sorted(sizes)}. Take a smaller count, "
                "or by_path."
            )
        layers = sizes.pop()
        bounds = [layers * k // count for k in range(count + 1)]
        none = lambda tree: jax.tree.map(lambda leaf: None, tree)

        def group(start, stop):
            def get(model):
                cut = jax.tree.map(lambda leaf: leaf[start:stop], where(model))
                return eqx.tree_at(where, none(model), cut, is_leaf=lambda x: x is None)

            def put(model, part):
                new = jax.tree.map(
                    lambda leaf, own: leaf.at[start:stop].set(own), where(model), where(part)
                )
                return eqx.tree_at(where, model, new)

            return Fragment(get, put)

        get = lambda model: eqx.tree_at(where, model, none(where(model)))
        ends = Fragment(get, lambda model, part: eqx.combine(part, model))
        return (*itertools.starmap(group, itertools.pairwise(bounds)), ends)

    return fragments


def checked_fragments(
    stream: Stream, model: PyTree, specs: Specs | None = None
) -> tuple[Fragment, ...]:
    """The fragments of `model`, which has shapes or arrays: checked that each element is in one of
    them.

    Raises:
        ValueError: an element is in no fragment, or in two; or, with `specs`, a fragment cuts a dim
            that is split.
    """
    found = stream.fragments(model)
    sizes: dict[str, int] = {}
    wholes = {trees.dotted(path): leaf for path, leaf in jax.tree.leaves_with_path(model)}
    splits = {} if specs is None else trees.by_path(specs)
    for fragment in found:
        for path, leaf in jax.tree.leaves_with_path(jax.eval_shape(fragment.get, model)):
            name = trees.dotted(path)
            sizes[name] = sizes.get(name, 0) + leaf.size
            shape = wholes[name].shape
            cut = [
                dim
                for dim, entry in enumerate(splits.get(name, ()))
                if entry is not None and leaf.shape[dim] != shape[dim]
            ]
            if cut:
                raise ValueError(
                    f"islands: a fragment has a part of dim {cut[0]} of {name}, which is split by "
                    f"{splits[name]}, so it would be other layers on another layout. Cut a dim "
                    "that no axis splits, or take by_path."
                )
    for name, leaf in wholes.items():
        if sizes.get(name, 0) != leaf.size:
            raise ValueError(
                "islands: the fragments together must have each element of the model once; of "
                f"{name or 'the parameter'} they have {sizes.get(name, 0)} elements, and it has "
                f"{leaf.size}. Let each leaf match one pattern of by_path."
            )
    return found
