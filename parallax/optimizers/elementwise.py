"""Checks that an optimizer acts element by element. Then it makes no difference whether a shard is
updated alone, or the whole leaf is updated and then cut into shards.

`checked` makes this check once for each set of shapes. It traces the update on leaves whose split
dims have an unknown size, and follows the traced program (`parallax.optimizers.programs`). It
refuses the optimizer if an update or an array of the new state is not computed element by element.
It also refuses a program that depends on the size, such as a learning rate scaled by the size of a
dim. The allowed operations are listed, since a list of forbidden operations could miss some.

A leaf is a parameter, numbered by its place in the tree. The owner of a result, or of an array of
the optimizer's state, is the number of the leaf that it belongs to. The number of the step, for
example, belongs to no leaf, so its owner is None. A moment is an array of the state that has the
shape of its leaf's gradient. A share is a device's part of a gradient or a parameter. In ZeRO-1 and
ZeRO-2, `zero.reduce_scattered` returns shares of gradients, and the parameters are whole. In this
module, the name ZeRO-1 also stands for ZeRO-2. A `Value` says how an array of the program is
computed: `leaves` has the numbers of the leaves that the array is computed from. `mixes` is the
reason why the array is not computed element by element, or "" if it is. In `leaves`, the number
`WHOLE` stands for any array that is the same on all devices, and `RIGHT` for a result that a
wrapper of an optimizer, such as `optimizers.whole`, has marked as correct on shards.
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
    """The error for an optimizer that cannot update shards, or whose state was made for other
    leaves than those that have gradients."""


def with_extra(
    optimizer: optax.GradientTransformation | optax.MultiSteps,
) -> optax.GradientTransformationExtraArgs:
    """Returns `optimizer` with an `update` that takes extra arguments, and ignores those that the
    optimizer does not use."""
    # `MultiSteps` takes extra arguments itself, but it is not of optax's transformation type. The
    # variable is typed `Any`, since a type checker would refuse the functions of `MultiSteps`.
    if isinstance(optimizer, optax.MultiSteps):
        multi_steps: Any = optimizer
        return optax.GradientTransformationExtraArgs(multi_steps.init, multi_steps.update)
    return optax.with_extra_args_support(optimizer)


def checked(
    update: Update, specs: Mapping[str, PartitionSpec], *, at: str, gathered: Sequence[str] = ()
) -> Update:
    """Returns `update` with a check that a shard of a leaf can be updated alone, with the same
    result as in the update of the whole leaf.

    Args:
        update: the update of an optimizer.
        specs: the specs of the parameters, by path. A parameter's type has the axes that split the
            parameter, and its spec has the dim that each axis splits. If the spec does not name an
            axis of the type, the check assumes that this axis may split any dim.
        at: the name of the caller, for messages.
        gathered: axes along which the caller has gathered the leaves. The check takes the leaves as
            whole along these axes, although they are typed as varying along them.

    Returns:
        `(gradients, state, params, **extra) -> (updates, state)`; a parameter may have no gradient.
        The returned function raises `UnfitOptimizer` if the check fails.
    """
    # The keys of the arguments that have passed: a step is traced several times for the same
    # shapes, such as by `lower` and by `eval_shape`, and its optimizer is checked once.
    decided = set()

    # The axes that split an array for the optimizer.
    def axes(x):
        return split_over(jax.typeof(x)) - set(gathered)

    def wrapped(gradients, state, params, **extra):
        """Returns the optimizer's update. The update is checked first, unless arguments of the same
        types have passed the check before."""
        arguments = gradients, state, matching_parameters(gradients, params)
        leaves, structure = jax.tree.flatten((arguments, extra))
        # The result of the check depends only on the mesh, on the structure and on these types. A
        # type also says along which axes an array varies. A leaf that is no array, such as an
        # option of the update, counts by its value. This value and the structure are texts here,
        # since they may have no hash.
        kinds = (jax.typeof(leaf) if trees.is_array(leaf) else repr(leaf) for leaf in leaves)
        key = jax.sharding.get_abstract_mesh(), str(structure), *kinds
        device_update = _Update(functools.partial(update, **extra), arguments, specs, axes, at)
        try:
            if key not in decided:
                device_update.check()
                decided.add(key)
            return device_update.update(*arguments)
        except UnfitOptimizer:
            raise
        except (TypeError, ValueError) as error:
            # Optax does not know about shards. If shards or a missing gradient are the cause,
            # `explain` raises a better error; otherwise the error passes.
            device_update.explain(params, error)
            raise

    return wrapped


class _Leaf(NamedTuple):
    """A leaf that is updated.

    Attributes:
        path: the path in the tree of parameters.
        gradient: the gradient.
        weight: the parameter. In ZeRO-1 the parameter is whole, and the gradient is a share.
        split: the axes that split the gradient or the parameter. Axes of one device are left out.
        whole: the shape of the whole parameter; if `is_open`, an upper bound of this shape.
        is_open: whether the parameter has several dims, and its type varies along an axis that its
            spec does not name. If so, the dim that this axis splits is unknown.
    """

    path: tuple[Any, ...]
    gradient: Any
    weight: Any
    split: frozenset[str]
    whole: tuple[int, ...]
    is_open: bool

    @property
    def name(self) -> str:
        """The path of the leaf, for messages."""
        return trees.dotted(self.path) or "the parameter"

    @property
    def is_shard(self) -> bool:
        """Whether the parameter has the gradient's shape: both are shares, or both are whole. The
        result is False in ZeRO-1: the parameter is whole, and the gradient is a share from
        `zero.reduce_scattered`."""
        return np.shape(self.gradient) == np.shape(self.weight)


class _Update:
    """An update and its arguments on one device, for the check.

    `axes(x)` returns the axes along which an array `x` is split. `leaves` are the parameters that
    have a gradient. `owners` has, for each array of the state, the number of the leaf that it
    belongs to, or None.
    """

    def __init__(
        self,
        update: Update,
        arguments: tuple[PyTree, PyTree, PyTree],
        specs: Mapping[str, PartitionSpec],
        axes: Callable[[Any], frozenset[str]],
        at: str,
    ):
        """Makes a `_Leaf` for each parameter that has a gradient, and finds the parameter to which
        each array of the optimizer's state belongs. `arguments` are (gradients, state, parameters
        that have a gradient), `specs` has the parameters' specs by path, `axes(x)` returns the axes
        that split an array `x`, and `at` is the caller's name."""
        self.update, self.arguments, self.axes, self.at = update, arguments, axes, at
        gradients, state, weights = arguments
        with_path = zip(jax.tree.leaves_with_path(weights), jax.tree.leaves(gradients), strict=True)
        self.leaves = [self.leaf(path, x, weight, specs) for (path, weight), x in with_path]
        self.owners = owners_of_state(state, [leaf.path for leaf in self.leaves])

    def leaf(
        self, path: Any, gradient: Any, weight: Any, specs: Mapping[str, PartitionSpec]
    ) -> _Leaf:
        """Returns the leaf at `path`. The types of the gradient and the parameter give the axes
        that split the leaf. The parameter's shape on this device and its spec give the shape of the
        whole parameter."""
        axes, ndim = self.axes(weight), np.ndim(weight)
        # For each dim: the axes that the spec has for this dim, and along which the parameter
        # varies. A spec may have fewer entries than the array has dims.
        entries = [*specs.get(trees.dotted(path), ()), *[None] * ndim][:ndim]
        by_dim = [axes.intersection(trees.entry_axes(entry)) for entry in entries]
        unnamed = axes.difference(*by_dim)
        # An axis that the spec does not name may split any dim, so each dim counts as split by it.
        # Then `whole` is only an upper bound. That is enough: `of_any_size` uses `whole` as the
        # bound of a symbolic size, and `_split_alike` does not rely on it if `is_open` is True.
        # Axes that split only the gradient (ZeRO-1) do not count: the parameter is whole already.
        whole = tuple(
            size * math.prod(map(lax.axis_size, names | unnamed))
            for size, names in zip(np.shape(weight), by_dim, strict=True)
        )
        # `is_open`: the leaf is split over an axis that its spec does not name, so the dim is
        # unknown. A vector has only one dim.
        split, is_open = axes | self.axes(gradient), ndim > 1 and bool(unnamed)
        return _Leaf(tuple(path), gradient, weight, split=split, whole=whole, is_open=is_open)

    def check(self) -> None:
        """Raises `UnfitOptimizer` unless each update, and each array of the new state, is computed
        element by element. The update is traced on symbolic sizes. If no leaf is split, nothing is
        traced. Raises `TypeError` if, in ZeRO-1, the updates do not have the parameters' shapes."""
        if not any(leaf.split for leaf in self.leaves):
            return
        # The number of each leaf in `Value.leaves`. A whole leaf has the number `WHOLE`: it is the
        # same on all devices, so the optimizer may also sum it.
        numbers = [i if leaf.split else WHOLE for i, leaf in enumerate(self.leaves)]
        # In ZeRO-1 the gradient of a split leaf is a share, but the parameter is whole and counts
        # as `WHOLE`: then the two have different shapes, and `is_shard` is False. For whole leaves
        # `is_shard` is True too, and their number is `WHOLE` already.
        of_weights = [
            number if leaf.is_shard else WHOLE
            for number, leaf in zip(numbers, self.leaves, strict=True)
        ]
        of_state = map(self.value_of_state, jax.tree.leaves(self.arguments[1]), self.owners)
        arguments = self.of_any_size()  # (gradients, state, parameters), as `self.arguments`
        try:
            program = jax.make_jaxpr(self.update)(*arguments)
        # JAX raises errors of many types for an operation that needs a known size.
        except Exception as error:
            # If the update fails on the shard's own shapes too, that error is raised instead: it is
            # not about sizes.
            jax.eval_shape(self.update, *self.arguments)
            self.refuse(f"the update depends on the size of a leaf: {_first_line(error)}")
        # The program's results are the updates, one for each leaf, and then the state.
        updates = jaxprs.types(program.jaxpr.outvars)[: len(self.leaves)]
        equal_shapes = all(leaf.is_shard for leaf in self.leaves)
        # If some parameters are whole and their gradients shares (ZeRO-1), the optimizer must
        # gather its updates. Without this check JAX would silently broadcast some of these shapes.
        # The caller turns this error into a better one (`explain`).
        if not equal_shapes and _shapes(updates) != _shapes(arguments[2]):
            raise TypeError("the updates have other shapes than the parameters")
        # The program's arguments come in this order: gradients, state, parameters.
        values = [*map(of_leaf, numbers), *of_state, *map(of_leaf, of_weights)]
        self.judge(follow(program, values))

    def of_any_size(self) -> Any:
        """Returns `self.arguments` with a symbolic size for each split dim. The bounds of a
        symbolic size are the dim's size on a shard and the dim's size in the whole leaf."""
        # (size on the shard, size of the whole leaf) of all dims.
        pairs = {
            pair
            for leaf in self.leaves
            for x in (leaf.gradient, leaf.weight)
            for pair in zip(np.shape(x), leaf.whole, strict=True)
        }
        # Dims with the same pair of sizes share a symbol, so that JAX can add leaves of equal
        # shapes.
        ranges = sorted((least, most) for least, most in pairs if least != most)
        names = [f"d{i}" for i in range(len(ranges))]
        # With bounds, JAX can decide comparisons with a number outside them, such as in a mask that
        # leaves small leaves out.
        bounds = [f"{name} >= {least}" for name, (least, _) in zip(names, ranges, strict=True)]
        bounds += [f"{name} <= {most}" for name, (_, most) in zip(names, ranges, strict=True)]
        sizes = export.symbolic_shape(",".join(names), constraints=bounds)
        unknown = dict(zip(ranges, sizes, strict=True))

        def shape(x, whole):
            """Returns the shape of `x`, with a symbolic size for each split dim."""
            pairs = zip(np.shape(x), whole, strict=True)
            return tuple(unknown.get(pair, pair[0]) for pair in pairs)

        return self.resized(shape)

    def resized(self, shape: Callable[[Any, tuple[int, ...]], tuple[Any, ...]]) -> Any:
        """Returns `self.arguments` with new shapes: each gradient, moment and parameter `x` gets
        the shape `shape(x, whole)`, where `whole` is the shape of its whole leaf. An array whose
        shape changes is replaced by its type (`jax.typeof`) with the new shape: tracing needs no
        numbers."""

        def leaf(x, whole):
            new_shape = shape(x, whole)
            return x if new_shape == np.shape(x) else jax.typeof(x).update(shape=new_shape)

        # Of the state, only moments are split, in the same way as their leaf.
        def leaf_of_state(x, owner):
            return leaf(x, self.leaves[owner].whole) if self.is_moment(x, owner) else x

        # `tree.flatten` gives (arrays, structure).
        gradients, state, weights = map(jax.tree.flatten, self.arguments)
        wholes = [leaf.whole for leaf in self.leaves]
        return (
            jax.tree.unflatten(gradients[1], map(leaf, gradients[0], wholes)),
            jax.tree.unflatten(state[1], map(leaf_of_state, state[0], self.owners)),
            jax.tree.unflatten(weights[1], map(leaf, weights[0], wholes)),
        )

    def fails_on_whole_leaves(self) -> bool:
        """Returns whether the update also fails on whole leaves: shards are then not the reason why
        it fails. Returns False if `is_open` is True for a leaf, whose whole shape is then unknown.
        """
        if any(leaf.is_open for leaf in self.leaves):
            return False
        try:
            # `resized` gives each gradient, moment and parameter the shape of its whole leaf.
            jax.eval_shape(self.update, *self.resized(lambda x, whole: whole))
        except (TypeError, ValueError):
            return True
        return False

    def is_moment(self, x: Any, owner: int | None) -> bool:
        """Returns whether an array of the optimizer's state has the shape of its leaf's gradient.
        An array that belongs to no leaf (`owner` is None) is no moment."""
        return owner is not None and np.shape(x) == np.shape(self.leaves[owner].gradient)

    def value_of_state(self, x: Any, owner: int | None) -> Value:
        """Returns the `Value` of `x`, an array of the optimizer's state. `owner` is the number of
        the leaf that `x` belongs to, or None. If elementwise use of the array would be wrong on
        shards, `mixes` of this `Value` gives the reason, and `judge` refuses each result that uses
        the array. `self.axes(x)` has the axes that split `x`."""
        # A single number that no axis splits, such as a step count, may be combined with all
        # elements, so `leaves` of its `Value` is empty.
        if np.size(x) <= 1 and not self.axes(x):
            return Value()
        # The state of a split leaf must have the shape of the gradient, so that it is split alike.
        if owner is not None and self.leaves[owner].split:
            if self.is_moment(x, owner):
                return of_leaf(owner)
            return Value(mixes=f"its state has an array of shape {np.shape(x)} for it")
        # The other arrays belong to a whole leaf or to no leaf. A moment of a whole leaf counts as
        # whole even if its type says that it varies along an axis: the new parameter then varies
        # too, and the specs of `mesh.spmd` refuse that. Any other array must vary along no axis.
        if self.axes(x) and not self.is_moment(x, owner):
            return Value(mixes="the state differs between devices, and belongs to no leaf")
        return of_leaf(WHOLE)

    def judge(self, results: Sequence[Value]) -> None:
        """Raises `UnfitOptimizer` unless each result is computed element by element. A result may
        use other leaves too, if they are split as its own leaf is (`_split_alike`).

        `results` has the `Value`s of the updates, and then those of the arrays of the new state.
        """
        count = len(self.leaves)
        # A new state may have more arrays than the old one; they belong to no leaf.
        owners = [*range(count), *self.owners, *[None] * len(results)]
        for i, (value, owner) in enumerate(zip(results, owners, strict=False)):
            # The result's own leaf, if it has one, and then the other split leaves that the result
            # is computed from. `WHOLE` and `RIGHT` are no numbers of leaves.
            own = [] if owner is None else [owner]
            numbers = own + sorted({*value.leaves} - {WHOLE, RIGHT, owner})
            compared = [self.leaves[number] for number in numbers]
            if value.mixes:
                self.refuse(value.mixes, compared)
            # A wrapper such as `optimizers.whole` marked this result, after a check of its own.
            if RIGHT in value.leaves:
                continue
            # Each of these leaves must be split as the first one is.
            for leaf in compared[1:]:
                if not _split_alike(leaf, compared[0]):
                    result = "an update" if i < count else "an array of the state"
                    self.refuse(
                        f"{result} combines {compared[0].name} with {leaf.name}, and the two "
                        "leaves may be split in different ways",
                        compared,
                    )
            # An update computed only from whole arrays is the same on all devices, so it is not the
            # shard of an update. An update whose `leaves` is empty passes: its elements are all
            # equal, as zeros are.
            if i < count and value.leaves == {WHOLE} and self.leaves[i].split:
                self.refuse("the leaf's update does not depend on the leaf's elements", compared)

    def refuse(self, why: str, about: Sequence[_Leaf] = (), *, fault: str = MIXES) -> NoReturn:
        """Raises `UnfitOptimizer` with the reason `why`. The message names the first split leaf of
        `about`, or of all leaves if none of `about` is split. `fault` is the clause of the message
        before the reason; the default says that the update mixes elements."""
        leaf = next(leaf for leaf in [*about, *self.leaves] if leaf.split)
        axis = _spelt(leaf.split)
        raise UnfitOptimizer(
            f"{self.at}: each device updates its shards alone, and {fault}. {leaf.name} is "
            f"split along {axis}: {why}. Wrap the optimizer: optimizers.whole(optimizer, {axis}, "
            f"specs) updates whole leaves, and optimizers.by_matrix(optimizer, {axis}, specs) "
            "updates whole matrices, each on one device. If the optimizer itself communicates, and "
            "its result on shards is therefore right, wrap it in optimizers.on_shards."
        )

    def explain(self, params: PyTree, error: Exception) -> None:
        """Raises `UnfitOptimizer` if `error`, which an update raised, has one of two causes: a leaf
        has only a gradient or only optimizer state, or the update does not fit the shapes of
        shards. For any other cause it only returns, and the caller raises `error` itself. `params`
        are all parameters, with and without a gradient."""
        state, paths = self.arguments[1], [path for path, _ in jax.tree.leaves_with_path(params)]
        of_leaves = zip(owners_of_state(state, paths), jax.tree.leaves(state), strict=True)
        # Each array of the state that belongs to a leaf, with the leaf's path.
        arrays_of_leaves = [(paths[owner], x) for owner, x in of_leaves if owner is not None]
        # A leaf may be missing in only one of the two: the gradients or the optimizer's state.
        with_gradient = {leaf.path: leaf for leaf in self.leaves}
        with_state = {path for path, _ in arrays_of_leaves}
        # An optimizer without state for any leaf, such as plain SGD, has nothing to compare.
        if with_state and with_state != set(with_gradient):
            raise UnfitOptimizer(self.other_leaves(params, with_state)) from error
        # Other errors are the optimizer's own.
        if not _is_about_shapes(error):
            return
        # In ZeRO-1 a share of a gradient met a whole parameter. Everywhere else `is_shard` is True:
        # both are shares, or both are whole, so they have equal shapes.
        for leaf in self.leaves:
            if not leaf.is_shard:
                raise UnfitOptimizer(
                    f"{self.at}: the gradient of {leaf.name} has shape {np.shape(leaf.gradient)}, "
                    f"a share of the whole shape {np.shape(leaf.weight)}, as zero.reduce_scattered "
                    "returns; the optimizer takes whole gradients. Wrap the optimizer in "
                    "zero.sharded(optimizer, axis, specs) or ZeRO.optimizer, and pass to step.init "
                    "an optimizer_rule that splits the state as the gradients are split, such as "
                    "ZeRO.optimizer_rule."
                ) from error
        # The state was made for whole leaves, or has shapes of its own.
        for path, x in arrays_of_leaves:
            leaf = with_gradient[path]
            if np.size(x) > 1 and np.shape(x) != np.shape(leaf.gradient) and leaf.split:
                raise UnfitOptimizer(
                    f"{self.at}: the optimizer's state has an array of shape {np.shape(x)} for "
                    f"{leaf.name}, but each device updates only a shard of this leaf, of shape "
                    f"{np.shape(leaf.gradient)}. If the state was made for whole parameters, split "
                    "it: pass to step.init an optimizer_rule, either rules.fsdp(axis, size=n) or "
                    "ZeRO.optimizer_rule. Or make the state for shards: call the optimizer's init "
                    "inside mesh.spmd. If by design the state has other shapes than the leaves, "
                    f"use optimizers.whole(optimizer, {_spelt(leaf.split)}, specs)."
                ) from error
        # An update that fails on whole leaves too has another mistake.
        if any(leaf.split for leaf in self.leaves) and not self.fails_on_whole_leaves():
            self.refuse(
                _first_line(error), fault="the optimizer's update fails on the shapes of shards"
            )

    def other_leaves(self, params: PyTree, with_state: set[tuple[Any, ...]]) -> str:
        """Returns the message for an optimizer whose state was made for other leaves than those
        that have gradients. `with_state` has the paths of the leaves for which there is state."""
        with_gradient = {leaf.path for leaf in self.leaves}
        # The message names one of the leaves that have only a gradient or only a state.
        path = min(with_state ^ with_gradient, key=trees.dotted)
        has, lacks = "optimizer state", "no gradient"
        if path in with_gradient:
            has, lacks = "a gradient", "no state in the optimizer"
        # The two numbers in the message count the leaves with a gradient and those with state. The
        # argument `trainable` of step.init chooses the leaves for which the optimizer has state, so
        # the gradient function must differentiate exactly these leaves.
        message = (
            f"{self.at}: {trees.dotted(path) or 'the parameter'} has {has}, and {lacks}. The "
            f"leaves that the gradient function differentiates ({len(with_gradient)}; it gives "
            "None for the others) must be the leaves for which the optimizer has state "
            f"({len(with_state)}). Pass trainable=... to step.init, and split the model by the "
            "same trainable, with eqx.partition, in the gradient function."
        )
        split = split_over(jax.typeof(dict(jax.tree.leaves_with_path(params))[path]))
        if not split:
            return message
        return (
            f"{message} Or, if the optimizer chooses leaves by their size, wrap it in "
            f"optimizers.whole(optimizer, {_spelt(split)}, specs): a shard along {_spelt(split)} "
            "is smaller than the whole leaf."
        )


def _split_alike(a: _Leaf, b: _Leaf) -> bool:
    """Returns whether the leaves `a` and `b` are surely split along the same dim. A leaf is split
    along the dim whose size on a device differs from its size in the whole leaf. So the result is
    True if `a` and `b` have equal shapes on a device and as whole leaves, and the same single axis
    splits both. If `is_open` is True for a leaf, its split dim is unknown, and the result is False.
    """
    same_shapes = np.shape(a.gradient) == np.shape(b.gradient) and a.whole == b.whole
    # If `is_open` is True, the leaf's spec does not name an axis that splits the leaf. That axis
    # may split any dim, and `whole` is only an upper bound: the shapes do not tell which dim.
    is_open = a.is_open or b.is_open
    # Two axes might split the dims of one leaf in another order than those of the other.
    return not is_open and len(a.split) == 1 and a.split == b.split and same_shapes


def _shapes(tree: PyTree) -> list[Any]:
    return [np.shape(leaf) for leaf in jax.tree.leaves(tree)]


def owners_of_state(state: PyTree, paths: Sequence[Any]) -> list[int | None]:
    """Returns, for each array of an optimizer's state, the index in `paths` of the parameter to
    which it belongs, or None if it belongs to no parameter."""
    of_state = [path for path, _ in jax.tree.leaves_with_path(state)]
    everything = {*of_state}
    return [trees.parameter_index(path, paths, everything) for path in of_state]


def _spelt(names: Collection[str]) -> str:
    """Returns axis names as Python source: one name, or a tuple of several."""
    names = sorted(names)
    return repr(names[0] if len(names) == 1 else tuple(names))


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0].rstrip(".:")


def _is_about_shapes(error: Exception) -> bool:
    """Returns whether an error of JAX or optax is about shapes, or about a state that was made for
    other leaves."""
    # `+` and most operations of JAX raise a `TypeError` for shapes that do not fit; a `ValueError`
    # about a shape may come from the optimizer's own check. "pytree structure" are JAX's words.
    return "pytree structure" in str(error) or (
        isinstance(error, TypeError) and "shape" in str(error)
    )
