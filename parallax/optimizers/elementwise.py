"""Whether an optimizer acts element by element, so that its update of a shard is the shard of its
update.

`checked` decides it once for each set of shapes that a step is made for. It traces the update on
leaves whose split dims have an unknown size, and follows the program
(`parallax.optimizers.programs`). An update, or a new state, is refused that is not computed element
by element from its own leaf, and so is a program that depends on the size: a rate scaled by a dim
of the shape, or a choice by a leaf's size that falls between a shard's and the whole leaf's. What
is allowed is a list, since a list of what is forbidden would have holes.
"""

import functools
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
from parallax.grads.results import matching_parameters
from parallax.optimizers.programs import RIGHT, WHOLE, Value, follow, of_leaf, split_over

Update = Callable[..., Any]  # (gradients, state, parameters, **extra) -> (updates, state)

MIXES = "this optimizer does not act element by element, so it would train something else"


class UnfitOptimizer(ValueError):
    """An optimizer that cannot update shards, or not these leaves."""


def with_extra(
    optimizer: optax.GradientTransformation | optax.MultiSteps,
) -> optax.GradientTransformationExtraArgs:
    """Returns `optimizer`, whose `update` takes extra arguments, and drops them where it has no use
    for them."""
    if isinstance(optimizer, optax.MultiSteps):
        several: Any = optimizer
        return optax.GradientTransformationExtraArgs(several.init, several.update)
    return optax.with_extra_args_support(optimizer)


def checked(
    update: Update, specs: Mapping[str, PartitionSpec], *, at: str, gathered: Sequence[str] = ()
) -> Update:
    """Returns `update`, which refuses leaves whose shards it would not update as parts of whole
    leaves.

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
    # A step is traced several times for the same shapes, such as by `lower` and by `eval_shape`;
    # its optimizer is judged once.
    decided = set()

    def axes(x):
        return split_over(jax.typeof(x)) - set(gathered)

    def wrapped(gradients, state, params, **extra):
        arguments = gradients, state, matching_parameters(gradients, params)
        leaves, structure = jax.tree.flatten((arguments, extra))
        # The types say along which axes an array differs, so the key has all that the answer
        # depends on.
        kinds = (jax.typeof(leaf) if trees.is_array(leaf) else type(leaf) for leaf in leaves)
        key = jax.sharding.get_abstract_mesh(), str(structure), *kinds
        one = _Update(functools.partial(update, **extra), arguments, specs, axes, at)
        try:
            if key not in decided:
                one.check()
                decided.add(key)
            return one.update(*arguments)
        except UnfitOptimizer:
            raise
        except (TypeError, ValueError) as error:
            # What failed may be told better by the shapes of the leaves than by optax, which knows
            # no shards. If it cannot, the error passes.
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
        whole: the shape of the whole parameter.
        is_open: whether the specs leave open which dim is split; `whole` is then too large.
    """

    path: tuple[Any, ...]
    gradient: Any
    weight: Any
    split: frozenset[str]
    whole: tuple[int, ...]
    is_open: bool

    @property
    def name(self) -> str:
        """Its path, for messages."""
        return trees.dotted(self.path) or "the parameter"

    @property
    def is_shard(self) -> bool:
        """Whether the parameter is a shard as its gradient is; with ZeRO-1 it is whole."""
        return np.shape(self.gradient) == np.shape(self.weight)


class _Update:
    """An update and its arguments, as a device has them."""

    def __init__(
        self,
        update: Update,
        arguments: tuple[PyTree, PyTree, PyTree],
        specs: Mapping[str, PartitionSpec],
        axes: Callable[[Any], frozenset[str]],
        at: str,
    ):
        self.update, self.arguments, self.axes, self.at = update, arguments, axes, at
        gradients, state, weights = arguments
        with_path = zip(jax.tree.leaves_with_path(weights), jax.tree.leaves(gradients), strict=True)
        self.leaves = [self.leaf(path, x, weight, specs) for (path, weight), x in with_path]
        self.owners = owners_of_state(state, [leaf.path for leaf in self.leaves])

    def leaf(
        self, path: Any, gradient: Any, weight: Any, specs: Mapping[str, PartitionSpec]
    ) -> _Leaf:
        """Returns a leaf with what the specs say of it."""
        axes, ndim = self.axes(weight), np.ndim(weight)
        entries = [*specs.get(trees.dotted(path), ()), *[None] * ndim][:ndim]
        by_dim = [axes.intersection(trees.entry_axes(entry)) for entry in entries]
        unnamed = axes.difference(*by_dim)
        # Any dim may be the one that an axis splits which the spec does not name.
        whole = tuple(
            size * math.prod(map(lax.axis_size, names | unnamed))
            for size, names in zip(np.shape(weight), by_dim, strict=True)
        )
        # A vector has one dim to split, so nothing is left open.
        split, is_open = axes | self.axes(gradient), ndim > 1 and bool(unnamed)
        return _Leaf(tuple(path), gradient, weight, split, whole, is_open)

    def check(self) -> None:
        """Refuses an update that is not right on these shards."""
        if not any(leaf.split for leaf in self.leaves):
            return
        # A leaf that is whole mixes nothing by being summed.
        numbers = [i if leaf.split else WHOLE for i, leaf in enumerate(self.leaves)]
        of_weights = [
            number if leaf.is_shard else WHOLE
            for number, leaf in zip(numbers, self.leaves, strict=True)
        ]
        of_state = map(self.value_of_state, jax.tree.leaves(self.arguments[1]), self.owners)
        arguments = self.of_any_size()
        try:
            program = jax.make_jaxpr(self.update)(*arguments)
        # Of whatever type: what fails on an unknown size may work on a known one.
        except Exception as error:
            # If it fails on the shard's own shapes too, that error is raised, which is of another
            # kind.
            jax.eval_shape(self.update, *self.arguments)
            self.refuse(f"on a whole leaf it is another program: {_first_line(error)}")
        updates = jaxprs.types(program.jaxpr.outvars)[: len(self.leaves)]
        all_shards = all(leaf.is_shard for leaf in self.leaves)
        # The parameters are whole and the gradients are shares, and the optimizer is not one that
        # gathers its updates. JAX would broadcast some of these shapes without a word.
        if not all_shards and _shapes(updates) != _shapes(arguments[2]):
            raise TypeError("the updates have other shapes than the parameters")
        # The program's arguments come in this order: gradients, state, parameters.
        values = [*map(of_leaf, numbers), *of_state, *map(of_leaf, of_weights)]
        self.judge(follow(program, values))

    def of_any_size(self) -> Any:
        """Returns the arguments, with an unknown size, from a shard's to the whole leaf's, for each
        dim where these differ."""
        pairs = {
            pair
            for leaf in self.leaves
            for x in (leaf.gradient, leaf.weight)
            for pair in zip(np.shape(x), leaf.whole, strict=True)
        }
        # Dims of equal sizes before and after share a symbol, so that JAX can add leaves of equal
        # shapes.
        ranges = sorted((least, most) for least, most in pairs if least != most)
        names = [f"d{i}" for i in range(len(ranges))]
        # With the bounds JAX can decide a comparison with a size that lies outside them, such as of
        # a mask that leaves small leaves out.
        bounds = [f"{name} >= {least}" for name, (least, _) in zip(names, ranges, strict=True)]
        bounds += [f"{name} <= {most}" for name, (_, most) in zip(names, ranges, strict=True)]
        sizes = export.symbolic_shape(",".join(names), constraints=bounds)
        unknown = dict(zip(ranges, sizes, strict=True))

        def resized(x, whole):
            pairs = zip(np.shape(x), whole, strict=True)
            shape = tuple(unknown.get(pair, pair[0]) for pair in pairs)
            return x if shape == np.shape(x) else jax.typeof(x).update(shape=shape)

        def resized_state(x, owner):
            return resized(x, self.leaves[owner].whole) if self.is_moment(x, owner) else x

        gradients, state, weights = map(jax.tree.flatten, self.arguments)
        wholes = [leaf.whole for leaf in self.leaves]
        return (
            jax.tree.unflatten(gradients[1], map(resized, gradients[0], wholes)),
            jax.tree.unflatten(state[1], map(resized_state, state[0], self.owners)),
            jax.tree.unflatten(weights[1], map(resized, weights[0], wholes)),
        )

    def is_moment(self, x: Any, owner: int | None) -> bool:
        """Returns whether an array of the optimizer's state has the shape of its leaf's
        gradient."""
        return owner is not None and np.shape(x) == np.shape(self.leaves[owner].gradient)

    def value_of_state(self, x: Any, owner: int | None) -> Value:
        """Returns the facts about an array of the optimizer's state, which belongs to the leaf
        `owner`, if to any."""
        # A count, or a factor, is the same number for all elements.
        if np.size(x) <= 1 and not self.axes(x):
            return Value()
        if owner is not None and self.leaves[owner].split:
            if self.is_moment(x, owner):
                return of_leaf(owner)
            return Value(mixes=f"its state has an array of shape {np.shape(x)} for it")
        if self.axes(x) and not self.is_moment(x, owner):
            return Value(mixes="its state differs between devices, and belongs to no leaf")
        return of_leaf(WHOLE)

    def judge(self, results: Sequence[Value]) -> None:
        """Refuses if one of the results, the updates and then the state, is not that of its leaf's
        shard."""
        count = len(self.leaves)
        # A new state may have more arrays than the old one; they belong to no leaf.
        owners = [*range(count), *self.owners, *[None] * len(results)]
        for i, (value, owner) in enumerate(zip(results, owners, strict=False)):
            if value.mixes:
                self.refuse(value.mixes, owner)
            # A wrapper such as `optimizers.whole` has already looked at the leaves that this was
            # made from.
            if RIGHT in value.leaves:
                continue
            sources = value.leaves - {WHOLE}
            first = min(sources, default=WHOLE) if owner is None else owner
            for source in sorted(sources - {first}):
                if not self.split_alike(source, first):
                    result = "its update" if i < count else "its state"
                    name = self.leaves[source].name
                    self.refuse(
                        f"{result} is made of {name}, which may be split along another dim", owner
                    )
            if i < count and value.leaves == {WHOLE} and self.leaves[i].split:
                self.refuse("its update has nothing of the leaf's own elements", owner)

    def split_alike(self, i: int, j: int) -> bool:
        """Returns whether two leaves are split along the same dim: over one axis, with equal
        shapes, in the one way there is."""
        a, b = self.leaves[i], self.leaves[j]
        same_shapes = np.shape(a.gradient) == np.shape(b.gradient) and a.whole == b.whole
        # Two leaves of equal shapes may be split along different dims where specs do not tell
        # which.
        is_open = any(leaf.is_open for leaf in self.leaves)
        return not is_open and len(a.split) == 1 and a.split == b.split and same_shapes

    def refuse(self, why: str, owner: int | None = None, *, fault: str = MIXES) -> NoReturn:
        """Refuses the optimizer, with the leaf `owner`, or the first that is split."""
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
        """Refuses leaves or shapes that do not fit each other, with which the update failed. Other
        errors pass."""
        state, paths = self.arguments[1], [path for path, _ in jax.tree.leaves_with_path(params)]
        of_leaves = zip(owners_of_state(state, paths), jax.tree.leaves(state), strict=True)
        moments = [(paths[owner], x) for owner, x in of_leaves if owner is not None]
        # A leaf may be frozen for one of the two alone.
        with_gradient = {leaf.path: leaf for leaf in self.leaves}
        with_state = {path for path, _ in moments}
        if with_state and with_state != set(with_gradient):
            raise UnfitOptimizer(self.other_leaves(params, with_state)) from error
        # An error of the optimizer's own is not ours to explain.
        if not _is_about_shapes(error):
            return
        for leaf in self.leaves:
            if not leaf.is_shard:
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
        """Returns the refusal of gradients of other leaves than those that the optimizer has state
        for."""
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
        split = split_over(jax.typeof(dict(jax.tree.leaves_with_path(params))[path]))
        if not split:
            return message
        return (
            f"{message} Or, if the optimizer chooses leaves by their size, which is another on a "
            f"shard along {_spelt(split)}, wrap it in optimizers.whole(optimizer, {_spelt(split)}, "
            "specs)."
        )


def _shapes(tree: PyTree) -> list[Any]:
    return [np.shape(leaf) for leaf in jax.tree.leaves(tree)]


def owners_of_state(state: PyTree, paths: Sequence[Any]) -> list[int | None]:
    """Returns for each array of an optimizer's state the number of the leaf that it belongs to, if
    to any."""
    return [trees.parameter_index(path, paths) for path, _ in jax.tree.leaves_with_path(state)]


def _spelt(names: Collection[str]) -> str:
    names = sorted(names)
    return repr(names[0] if len(names) == 1 else tuple(names))


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0].rstrip(".:")


def _is_about_shapes(error: Exception) -> bool:
    """Returns whether JAX or optax raised this about shapes, or about a state with other leaves,
    and none of our functions."""
    return "pytree structure" in str(error) or (
        isinstance(error, TypeError) and "shape" in str(error)
    )
