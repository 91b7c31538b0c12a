"""Whether an optimizer acts element by element, so that its update of a shard is the shard of its
update.

`checked` decides it once for each set of shapes that a step is made for. It traces the update on
leaves whose split dims have an unknown size, and follows the program
(`parallax.optimizers.programs`). An update, or a new state, is refused that is not computed element
by element from its own leaf, and so is a program that depends on the size: a rate scaled by a dim
of the shape, or a choice by a leaf's size that falls between a shard's and the whole leaf's. What
is allowed is a list, since a list of what is forbidden would have holes.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np
import optax
from jax import export, lax
from jax.sharding import PartitionSpec

from parallax import jaxprs, trees
from parallax._typing import PyTree
from parallax.grads import matching_parameters
from parallax.optimizers.programs import RIGHT, WHOLE, Value, follow, of_leaf, split_over

Update = Callable[..., Any]  # (gradients, state, parameters, **extra) -> (updates, state)

MIXES = "this optimizer does not act element by element, so it would train something else"


class UnfitOptimizer(ValueError):
    """An optimizer that cannot update shards, or not these leaves."""


def with_extra(
    optimizer: optax.GradientTransformation | optax.MultiSteps,
) -> optax.GradientTransformationExtraArgs:
    """`optimizer`, whose `update` takes extra arguments, and drops them where it has no use for
    them."""
    if isinstance(optimizer, optax.MultiSteps):
        several: Any = optimizer
        return optax.GradientTransformationExtraArgs(several.init, several.update)
    return optax.with_extra_args_support(optimizer)


def checked(
    update: Update, specs: Mapping[str, PartitionSpec], *, at: str, gathered: Sequence[str] = ()
) -> Update:
    """`update`, which refuses leaves whose shards it would not update as parts of whole leaves.

    Args:
        update: that of an optimizer.
        specs: of the parameters, by path. Where a leaf is split over an axis that its spec does not
            name, any of its dims may be the one that is split.
        at: the function that asks, for messages.
        gathered: axes along which a leaf may differ although the optimizer sees it whole.

    Returns:
        `(gradients, state, params, **extra) -> (updates, state)`, where a parameter may have no
        gradient. It raises `UnfitOptimizer`.
    """
    decided = set()

    def wrapped(gradients, state, params, **extra):
        weights = matching_parameters(gradients, params)
        leaves, structure = jax.tree.flatten((gradients, state, weights, extra))
        kinds = (jax.typeof(leaf) if trees.is_array(leaf) else type(leaf) for leaf in leaves)
        key = jax.sharding.get_abstract_mesh(), str(structure), *kinds
        one = _Update(
            lambda *arguments: update(*arguments, **extra),
            gradients,
            state,
            weights,
            at,
            frozenset(gathered),
        )
        try:
            if key not in decided:
                one.check(specs)
                decided.add(key)
            return update(gradients, state, weights, **extra)
        except UnfitOptimizer:
            raise
        except (TypeError, ValueError) as error:
            one.explain(params, error)
            raise

    return wrapped


class _Leaf(NamedTuple):
    """A leaf that is updated.

    Attributes:
        path: in the tree of parameters.
        gradient: its gradient.
        weight: the parameter, which is whole where ZeRO-1 splits the gradient alone.
        split: the axes of more than one device along which one of them differs.
    """

    path: tuple[Any, ...]
    gradient: Any
    weight: Any
    split: frozenset[str]

    @property
    def name(self) -> str:
        """Its path, for messages."""
        return trees.dotted(self.path) or "the parameter"


class _Update:
    """An update and its arguments, as a device has them."""

    def __init__(
        self,
        update: Update,
        gradients: PyTree,
        state: PyTree,
        weights: PyTree,
        at: str,
        gathered: frozenset[str],
    ):
        self.update, self.arguments, self.at, self.gathered = (
            update,
            (gradients, state, weights),
            at,
            gathered,
        )
        self.leaves = [
            _Leaf(tuple(path), gradient, weight, self.axes(gradient) | self.axes(weight))
            for (path, weight), gradient in zip(
                jax.tree.leaves_with_path(weights), jax.tree.leaves(gradients), strict=True
            )
        ]
        paths = [leaf.path for leaf in self.leaves]
        owners = [
            trees.parameter_index(path, paths) for path, _ in jax.tree.leaves_with_path(state)
        ]
        self.state = [(x, owner) for x, owner in zip(jax.tree.leaves(state), owners, strict=True)]

    def axes(self, x: Any) -> frozenset[str]:
        """The axes along which an array is split."""
        return split_over(x) - self.gathered

    def check(self, specs: Mapping[str, PartitionSpec]) -> None:
        """Refuse an update that is not right on these shards."""
        if not any(leaf.split for leaf in self.leaves):
            return
        values = [
            *(of_leaf(i if leaf.split else WHOLE) for i, leaf in enumerate(self.leaves)),
            *(self.value_of_state(x, owner) for x, owner in self.state),
            *(
                of_leaf(i if leaf.split and _is_shard(leaf) else WHOLE)
                for i, leaf in enumerate(self.leaves)
            ),
        ]
        wholes = self.whole_shapes(specs)
        for whole in wholes:
            arguments = self.of_any_size(whole)
            try:
                program = jax.make_jaxpr(self.update)(*arguments)
            except (
                Exception
            ) as error:  # of whatever type: what fails on an unknown size may work on a known one
                jax.eval_shape(self.update, *self.arguments)
                self.refuse(f"on a whole leaf it is another program: {_first_line(error)}")
            updates = jaxprs.types(program.jaxpr.outvars)[: len(self.leaves)]
            if not all(map(_is_shard, self.leaves)) and _shapes(updates) != _shapes(arguments[2]):
                raise TypeError("the updates have other shapes than the parameters")
            self.judge(follow(program, values), wholes)

    def of_any_size(self, whole: Sequence[tuple[int, ...]]) -> Any:
        """The arguments, with an unknown size, from a shard's to the whole leaf's, for each dim
        where these differ."""

        def size_of_state(x, owner):
            if owner is not None and np.shape(x) == np.shape(self.leaves[owner].gradient):
                return whole[owner]
            return np.shape(x)

        leaves, structure = jax.tree.flatten(self.arguments)
        sizes = [*whole, *(size_of_state(x, owner) for x, owner in self.state), *whole]
        pairs = [
            tuple(zip(np.shape(x), size, strict=True))
            for x, size in zip(leaves, sizes, strict=True)
        ]
        ranges = sorted({pair for of_leaf in pairs for pair in of_leaf if pair[0] != pair[1]})
        names = [f"d{i}" for i in range(len(ranges))]
        bounds = [f"{name} >= {least}" for name, (least, _) in zip(names, ranges, strict=True)]
        bounds += [f"{name} <= {most}" for name, (_, most) in zip(names, ranges, strict=True)]
        unknown = dict(
            zip(ranges, export.symbolic_shape(",".join(names), constraints=bounds), strict=True)
        )

        def resized(x, pairs_of_leaf):
            shape = tuple(unknown.get(pair, pair[0]) for pair in pairs_of_leaf)
            return x if shape == np.shape(x) else jax.typeof(x).update(shape=shape)

        return jax.tree.unflatten(structure, map(resized, leaves, pairs))

    def value_of_state(self, x: Any, owner: int | None) -> Value:
        """What is known of an array of the optimizer's state, which belongs to the leaf `owner`, if
        to any."""
        if np.size(x) <= 1 and not self.axes(x):
            return Value()
        if owner is not None and np.shape(x) == np.shape(self.leaves[owner].gradient):
            return of_leaf(owner if self.leaves[owner].split else WHOLE)
        if owner is not None and self.leaves[owner].split:
            return Value(mixes=f"its state has an array of shape {np.shape(x)} for it")
        if self.axes(x):
            return Value(mixes="its state differs between devices, and belongs to no leaf")
        return of_leaf(WHOLE)

    def whole_shapes(self, specs: Mapping[str, PartitionSpec]) -> list[list[tuple[int, ...]]]:
        """The shapes of the whole leaves: several lists where `specs` leave open which dim is
        split."""

        def factors(leaf):
            axes, ndim = self.axes(leaf.weight), np.ndim(leaf.weight)
            entries = [*specs.get(trees.dotted(leaf.path), ()), *[None] * ndim][:ndim]
            by_dim = [axes.intersection(trees.entry_axes(entry)) for entry in entries]
            return list(map(_devices, by_dim)), _devices(axes.difference(*by_dim))

        def shape(leaf, open_dim):
            by_dim, unnamed = factors(leaf)
            if by_dim:
                by_dim[min(open_dim, len(by_dim) - 1)] *= unnamed
            return tuple(
                size * factor for size, factor in zip(np.shape(leaf.weight), by_dim, strict=True)
            )

        open_dims = [np.ndim(leaf.weight) for leaf in self.leaves if factors(leaf)[1] > 1]
        return [[shape(leaf, dim) for leaf in self.leaves] for dim in range(max([1, *open_dims]))]

    def judge(self, results: Sequence[Value], wholes: Sequence[Sequence[tuple[int, ...]]]) -> None:
        """Refuse if one of the results, the updates and then the state, is not that of its leaf's
        shard."""
        owners = [owner for _, owner in self.state]
        owners += [None] * (len(results) - len(self.leaves) - len(owners))
        for i, (value, owner) in enumerate(
            zip(results, [*range(len(self.leaves)), *owners], strict=False)
        ):
            what = "its update" if i < len(self.leaves) else "its state"
            if value.mixes:
                self.refuse(value.mixes, owner)
            if RIGHT in value.leaves:
                continue
            sources = value.leaves - {WHOLE}
            first = min(sources, default=WHOLE) if owner is None else owner
            for source in sorted(sources - {first}):
                if not self.split_alike(source, first, wholes):
                    name = self.leaves[source].name
                    self.refuse(
                        f"{what} is made of {name}, which may be split along another dim", owner
                    )
            if i < len(self.leaves) and value.leaves == {WHOLE} and self.leaves[i].split:
                self.refuse("its update has nothing of the leaf's own elements", owner)

    def split_alike(self, i: int, j: int, wholes: Sequence[Sequence[tuple[int, ...]]]) -> bool:
        """Whether two leaves are split along the same dim: over one axis, with equal shapes, in the
        one way there is."""
        a, b = self.leaves[i], self.leaves[j]
        same_shapes = np.shape(a.gradient) == np.shape(b.gradient) and all(
            whole[i] == whole[j] for whole in wholes
        )
        return len(wholes) == len(a.split) == 1 and a.split == b.split and same_shapes

    def refuse(self, why: str, owner: int | None = None, *, fault: str = MIXES) -> NoReturn:
        """Refuse the optimizer, with the leaf `owner`, or the first that is split."""
        split = [leaf for leaf in self.leaves if leaf.split]
        leaf = split[0] if owner is None or not self.leaves[owner].split else self.leaves[owner]
        axis = _spelt(leaf.split)
        raise UnfitOptimizer(
            f"{self.at}: each device updates its shards alone, and {fault}. Of {leaf.name}, which "
            f"is split along {axis}: {why}. Wrap it: optimizers.whole(optimizer, {axis}, specs) "
            f"updates whole leaves, and optimizers.by_matrix(optimizer, {axis}, specs) whole "
            "matrices, each on one device. An optimizer that joins the shards itself is let "
            "through by optimizers.on_shards."
        )

    def explain(self, params: PyTree, error: Exception) -> None:
        """Refuse leaves or shapes that do not fit each other, with which the update failed. Other
        errors pass."""
        paths = [tuple(path) for path, _ in jax.tree.leaves_with_path(params)]
        moments = [
            (paths[owner], x)
            for path, x in jax.tree.leaves_with_path(self.arguments[1])
            if (owner := trees.parameter_index(path, paths)) is not None
        ]
        with_gradient = {leaf.path: leaf for leaf in self.leaves}
        with_state = {path for path, _ in moments}
        if with_state and with_state != set(with_gradient):
            raise UnfitOptimizer(self.other_leaves(params, with_state)) from error
        if not _is_about_shapes(error):
            return
        for leaf in self.leaves:
            if np.shape(leaf.gradient) != np.shape(leaf.weight):
                raise UnfitOptimizer(
                    f"{self.at}: the gradient of {leaf.name} has shape {np.shape(leaf.gradient)}, "
                    f"a share of {np.shape(leaf.weight)} as zero.reduce_scattered makes it, and "
                    "the optimizer takes whole gradients. Wrap it: zero.sharded(optimizer, axis, "
                    "specs) or ZeRO.optimizer, and give step.init the rule of the shares as "
                    "optimizer_rule."
                ) from error
        for path, x in moments:
            leaf = with_gradient[path]
            if np.size(x) > 1 and np.shape(x) != np.shape(leaf.gradient) and leaf.split:
                raise UnfitOptimizer(
                    f"{self.at}: the optimizer's state has an array of shape {np.shape(x)} for "
                    f"{leaf.name}, of which a device updates {np.shape(leaf.gradient)}. If it is "
                    "that of whole parameters, give step.init the rule of the shares, "
                    "optimizer_rule=rules.fsdp(axis, size=n) or ZeRO.optimizer_rule, or make the "
                    "state by this optimizer's own init inside the map. An optimizer that keeps "
                    "other shapes than its leaves' needs optimizers.whole(optimizer, "
                    f"{_spelt(leaf.split)}, specs)."
                ) from error
        if any(leaf.split for leaf in self.leaves):
            self.refuse(
                _first_line(error), fault="the optimizer's update fails on the shapes of shards"
            )

    def other_leaves(self, params: PyTree, with_state: set[tuple[Any, ...]]) -> str:
        """The refusal of gradients of other leaves than those that the optimizer has state for."""
        with_gradient = {leaf.path for leaf in self.leaves}
        path = min(with_state ^ with_gradient, key=trees.dotted)
        has, lacks = "optimizer state", "no gradient"
        if path in with_gradient:
            has, lacks = "a gradient", "no state in the optimizer"
        message = (
            f"{self.at}: {trees.dotted(path) or 'the parameter'} has {has}, and {lacks}. The "
            f"leaves that the gradient function differentiates ({len(with_gradient)}; it gives "
            "None for the others) must be those that the optimizer has state for "
            f"({len(with_state)}). Pass trainable=... to step.init, and eqx.partition the model by "
            "the same in the gradient function."
        )
        split = split_over(dict(jax.tree.leaves_with_path(params))[path])
        if not split:
            return message
        return (
            f"{message} Or, if the optimizer chooses leaves by their size, which is another on a "
            f"shard along {_spelt(split)}, wrap it in optimizers.whole(optimizer, {_spelt(split)}, "
            "specs)."
        )


def _shapes(tree: PyTree) -> list[Any]:
    return [np.shape(leaf) for leaf in jax.tree.leaves(tree)]


def _is_shard(leaf: _Leaf) -> bool:
    """Whether the parameter is a shard as its gradient is; with ZeRO-1 it is whole."""
    return np.shape(leaf.gradient) == np.shape(leaf.weight)


def _devices(names: Collection[str]) -> int:
    return math.prod(map(lax.axis_size, names))


def _spelt(names: Collection[str]) -> str:
    names = sorted(names)
    return repr(names[0] if len(names) == 1 else tuple(names))


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0].rstrip(".:")


def _is_about_shapes(error: Exception) -> bool:
    """Whether JAX or optax raised this about shapes, or about a state with other leaves, and none
    of our functions."""
    return "pytree structure" in str(error) or (
        isinstance(error, TypeError) and "shape" in str(error)
    )
