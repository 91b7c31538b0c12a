"""Wraps optimizers that look at several elements at a time, so that they give correct updates of
leaves that are split over devices.

If each device updates only its shard of a leaf, the result is right only for an optimizer that acts
element by element. `step.make` refuses any other optimizer, by the check in
`parallax.optimizers.elementwise`. Two wrappers bring each leaf to its *owners*, the devices that
update it, and return to each device its own *share* of the update:

    whole      every device owns all leaves, and updates all of them
    by_matrix  every device owns the whole matrices of some layers, and updates those

The first `lead` dims of a leaf run over stacked layers, and are its *dims of layers*: for [L, I,
J], `lead` is 1. In `by_matrix`, the last dim of layers, dim `lead - 1`, is divided among the
owners. `whole` divides no dim, and takes 0 as `lead` of every leaf. Both wrappers send the shares
of a gradient, and the shares of a parameter that is split, to the owners. `by_matrix` also sends
the update back. For a leaf of S bytes, with n devices of `axis`, each device sends these bytes:

                                      whole            by_matrix
    gradient and parameter are shares 2 (n - 1)/n S    3 (n - 1)/n² S
    only the gradient is (ZeRO-1)     (n - 1)/n S      (n - 1)/n² S + (n - 1)/n S

In `by_matrix`, each share of a leaf that is split along its layers is already on the device that
updates it. The update of this leaf is sent only in ZeRO-1, where every device needs the whole
update. A `Split` is a dim of a leaf and the axes that split this dim; `shards.gather` joins the
shares of a leaf, and `shards.take` cuts a share out of a whole leaf.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import optax
from jax.sharding import PartitionSpec
from jaxtyping import Array

from parallax import jaxprs, rules, shards, trees
from parallax._typing import PyTree, Specs
from parallax.collectives import Axis, AxisLike
from parallax.collectives.types import varying_axes
from parallax.grads.axes import axes_of, axes_of_several_devices
from parallax.optimizers.elementwise import checked, owners_of_state, with_extra
from parallax.optimizers.programs import (
    RIGHT,
    WHOLE,
    Value,
    follow,
    of_leaf,
    right_on_shards,
)
from parallax.rules import GatheredOptState
from parallax.shards import Split

# A function `(path, ndim)` that returns `lead`, the number of a leaf's first dims that run over
# layers.
Leads = Callable[[str, int], int]

# The primitives that draw random numbers. Most functions of `jax.random` draw by `random_bits`.
DRAWS = frozenset(
    {"random_bits", "random_gamma", "rng_bit_generator", "rng_uniform", "threefry2x32"}
)


def whole(
    optimizer: optax.GradientTransformation | optax.MultiSteps, axis: AxisLike, specs: Specs
) -> optax.GradientTransformationExtraArgs:
    """Returns an optimizer that applies `optimizer` to whole leaves: every device gathers the
    leaves over `axis`, updates them, and keeps its own share of the updates.

    Any optimizer gives the right updates in this way. Its state is whole on each device. Gradients
    and parameters may both be shares (tensor parallelism, ZeRO-3), or only the gradients are shares
    (from `zero.reduce_scattered`). In the second case `whole` replaces `zero.sharded`, and does not
    save the memory that ZeRO-1 saves.

    Args:
        optimizer: any optimizer.
        axis: all axes over which parameters or their gradients are split.
        specs: the specs by which parameters, or only their gradients, are split over devices; a
            tree like the parameters.

    Raises:
        ValueError: the leaves are split over other axes too, and the optimizer does not act element
            by element; or, in `init`, `axis` names an axis that the mesh does not have. A parameter
            is split over one of the axes, and `specs` names no dim that this axis splits. In
            `specs`, one dim has several axes, and some of them split only the gradient.
    """

    def no_layers(path, ndim):
        return 0

    return _on_owners(optimizer, Axis.of(axis), specs, no_layers, by_layer=False)


def by_matrix(
    optimizer: optax.GradientTransformation | optax.MultiSteps,
    axis: AxisLike,
    specs: Specs,
    *,
    layers: Mapping[str, int] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Returns an optimizer that applies `optimizer` to the leaves of one layer at a time. Each
    layer of a leaf is updated by one device of `axis`, which also holds the layer's state.

    The leaves of layers that run in a loop are stacked: [L, I, J]. Each of the n devices of `axis`
    receives L / n whole layers of such a leaf by an all-to-all, updates them, and returns their
    updates by a second all-to-all. `optimizer` sees leaves [I, J], so an optimizer for matrices,
    such as `optax.contrib.muon`, sees matrices. Leaves with equal numbers of layers are updated
    together: in one call, `optimizer` gets one layer of each of these leaves. Every device updates
    the leaves that are not stacked, as in `whole`.

    Args:
        optimizer: an optimizer whose update of a leaf does not depend on other leaves. To use a
            second optimizer for some leaves, combine it with the result of `by_matrix`, by
            `optax.partition`.
        axis: all axes over which parameters or their gradients are split.
        specs: the specs by which parameters, or only their gradients, are split over devices; a
            tree like the parameters.
        layers: a map from a glob of paths to a number n. The first n dims of the leaves at these
            paths run over layers. The first glob that matches counts. By default n is 1 for a leaf
            of three dims, [L, I, J], and 0 for a leaf of fewer dims. Stacked vectors, [L, I], and
            any leaf of more than three dims need a number, as in `layers={"blocks.**": 1}`.

    Raises:
        ValueError: a leaf has more than three dims, and `layers` has no number for it. A glob of
            `layers` matches no path of `specs`. The layers on a device cannot be divided evenly
            among the devices that update them. A leaf has several dims of layers, and `axis` splits
            one that is not the last of them. The optimizer draws random numbers, or combines
            several leaves, as clipping by the global norm does. The errors of `whole` are raised
            too.
    """
    _check_globs(layers or {}, list(trees.by_path(specs)))

    def leading(path, ndim):
        """Returns `lead` for the leaf at `path`: the first `lead` of its `ndim` dims run over
        layers. `lead` is the number for `path` in `layers`, the argument of `by_matrix`. If no glob
        in `layers` matches `path`, `lead` is 1 for three dims, and 0 for fewer dims."""
        counts = [
            count for pattern, count in (layers or {}).items() if rules.matches_glob(pattern, path)
        ]
        # A wrong guess would silently train matrices of another shape.
        if not counts and ndim > 3:
            raise ValueError(
                f"optimizers.by_matrix: {path} has {ndim} dims, and its shape does not tell how "
                "many of its first dims are layers: a convolution has none, and attention weights "
                f"[L, D, H, K] have one. Pass layers={{{path!r}: 1}}, or another number in place "
                "of 1."
            )
        return counts[0] if counts else max(ndim - 2, 0)

    return _on_owners(optimizer, Axis.of(axis), specs, leading, by_layer=True)


def on_shards(
    optimizer: optax.GradientTransformation | optax.MultiSteps,
) -> optax.GradientTransformationExtraArgs:
    """Returns `optimizer`, declared to give correct updates of shards, so that `step.make` does not
    check the updates.

    Use it for an optimizer that combines the shards itself, by collectives.
    """
    optimizer = with_extra(optimizer)
    update = right_on_shards(optimizer.update)
    return optax.GradientTransformationExtraArgs(optimizer.init, update)


class _Way(NamedTuple):
    """How a leaf is divided when it moves to its owners, the devices that update it.

    At the owners, only dim `lead - 1` is divided: first over the axes in `splits`, and then over
    the axes in `inner`. If a later dim is split into shares, an all-to-all joins that dim, and
    divides dim `lead - 1` in its place. If `lead` is 0, the leaf is whole at its owners.

    Attributes:
        name: the dotted path of the leaf.
        lead: the number of dims of layers: the first `lead` dims of the leaf run over layers.
        splits: the dims of the leaf that are split over the wrapper's `axis`, each with the axes
            that split the dim.
        inner: a list with one `Split` of dim `lead - 1`, over those axes of the wrapper's `axis`
            that split no dim of the leaf. The list is empty if there are no such axes.
    """

    name: str
    lead: int
    splits: list[Split]
    inner: list[Split]


def _on_owners(
    optimizer, axis: Axis, specs: Specs, leads: Leads, *, by_layer: bool
) -> optax.GradientTransformationExtraArgs:
    """Returns `optimizer`, applied to leaves that are moved to the devices that update them. The
    updates are moved back.

    `specs` is a tree with the spec of each leaf, which says how the leaf is split into the devices'
    shares. `leads(path, ndim)` returns `lead`: the first `lead` dims of a leaf run over layers.
    `path` is the leaf's dotted path, and `ndim` the number of all its dims. With `by_layer`, each
    layer is updated by one device, and an optimizer that combines leaves is refused.
    """
    owners = _Owners(with_extra(optimizer), axis, trees.by_path(specs), leads, by_layer)
    # The mark says that the updates are correct on shards: `owners.update` itself checks the
    # optimizer on the leaves that it sees. `at` begins the error if no parameters are passed.
    checked_update = right_on_shards(owners.update, at=owners.name)
    return optax.GradientTransformationExtraArgs(owners.init, checked_update)


class _Owners(NamedTuple):
    """An optimizer on leaves that are brought to the devices which own them.

    Attributes:
        optimizer: the optimizer. Of a leaf with layers, the optimizer sees only the layers that the
            device owns, and no layer is split. It sees the whole of any other leaf.
        axis: the axes over which the leaves are gathered.
        specs: a dict from a leaf's path to the spec that splits the leaf into devices' shares.
        leads: the function `(path, ndim)` that returns the number of a leaf's first dims that run
            over layers.
        by_layer: whether each layer is updated by one device, as in `by_matrix`.
    """

    optimizer: optax.GradientTransformationExtraArgs
    axis: Axis
    specs: dict[str, PartitionSpec]
    leads: Leads
    by_layer: bool

    @property
    def name(self) -> str:
        """The name of the wrapper, for error messages."""
        return "optimizers.by_matrix" if self.by_layer else "optimizers.whole"

    def way(self, path: Any, leaf: Array) -> _Way:
        """Returns how the leaf at `path` is divided when it moves to the devices that update it,
        its owners."""
        name, splits = trees.dotted(path), shards.splits_of(path, self.specs, self.axis)
        lead, axes_of_splits = self.leads(name, leaf.ndim), shards.names_of(splits)
        _check_specs(name, leaf, self.axis, splits)
        _check_layers(name, lead, splits)
        # The layers are also divided over the axes that split no dim: otherwise all devices along
        # these axes would compute the same updates. Without layers (lead 0) this split is not used.
        others = tuple(axis for axis in axes_of(self.axis) if axis not in axes_of_splits)
        inner_split = [Split(lead - 1, self.axis.over(others))] if others else []
        return _Way(name, lead, splits, inner_split)

    def groups(self, tree: PyTree) -> list[tuple[tuple[int, ...], list[Any]]]:
        """Returns the groups of leaves that the optimizer sees together. Leaves of `tree` are in
        one group if their dims of layers have equal sizes, so that one `vmap` can run over the
        layers of all these leaves. A group is returned as a pair: the sizes of the dims of layers,
        and the paths of the leaves."""
        paths: dict[tuple[int, ...], list[Any]] = {}
        for path, leaf in jax.tree.leaves_with_path(tree):
            sizes = leaf.shape[: self.leads(trees.dotted(path), leaf.ndim)]
            paths.setdefault(sizes, []).append(path)
        return list(paths.items())

    def init(self, params: PyTree) -> Any:
        """Returns the optimizer's states, one for each group of leaves that `groups` returns.
        Inside a `shard_map` over `axis`, each state is for the layers that this device owns.
        Outside a `shard_map`, each state is for all layers."""
        params = eqx.filter(params, trees.is_inexact)
        # The axes of the `shard_map`s around this code must include the optimizer's axes. Outside a
        # `shard_map`, `rules.optimizer_specs` checks the axes.
        if manual_axes := jax.sharding.get_abstract_mesh().manual_axes:
            rules.check_axes(axes_of(self.axis), manual_axes)
        # Inside a `shard_map` over the axis, the parameters are shares, and move to their owners.
        if shards.runs_over(self.axis):
            ways = jax.tree.map_with_path(self.way, params)
            # `_to_owner(x, weight, way)`: here the array `x` to move is the parameter itself.
            params = jax.tree.map(_to_owner, params, params, ways)
        # Leaves with equal dims of layers are one group: the sizes of these dims, and the leaves'
        # paths.
        groups = self.groups(params)
        # A state for each group: of its leaves only, with a `vmap` for each dim of layers.
        states = [
            _mapped(self.optimizer.init, len(sizes))(_only(params, paths))
            for sizes, paths in groups
        ]
        # `rules.optimizer_specs` finds the specs of a group's leaves by their paths.
        members = tuple(tuple(map(trees.dotted, paths)) for _, paths in groups)
        # For each group, the number of dims of layers.
        leads = tuple(len(sizes) for sizes, _ in groups)
        return GatheredOptState(states, axes_of(self.axis), members, leads)

    def update(self, updates: PyTree, state: Any, weights: PyTree, **extra: Any) -> Any:
        """Returns this device's share of the updates, and the new state.

        `updates` are gradients, whole or shares, and `weights` the parameters that have a gradient.
        """
        # For each leaf a `_Way`: how it is divided when it moves to the devices that update it.
        ways = jax.tree.map_with_path(self.way, weights)
        owned_gradients = jax.tree.map(_to_owner, updates, weights, ways)
        owned_weights = jax.tree.map(_to_owner, weights, weights, ways)
        update_layer = functools.partial(self.optimizer.update, **extra)
        results, states = [], []
        # One group at a time, since leaves with different numbers of layers cannot go through one
        # `jax.vmap`. A group is the sizes of its dims of layers, and the paths of its leaves; `old`
        # is its state.
        for (sizes, paths), old in zip(self.groups(owned_weights), state.groups, strict=True):
            members, lead = _only(owned_weights, paths), len(sizes)
            # Each layer is updated by one device, so the optimizer must not combine leaves.
            if self.by_layer:
                weight_shapes, state_shapes = _shapes_of_one_layer((members, old), lead)
                _check_apart(update_layer, weight_shapes, state_shapes)
            # The leaves were gathered along `axis`: `checked` looks only at splits over other axes.
            run = checked(
                _mapped(update_layer, lead),
                self.specs,
                at=self.name,
                gathered=axes_of(self.axis),
            )
            result, new = run(_only(owned_gradients, paths), old, members)
            results.append(result)
            states.append(new)
        # Each result has None in place of the leaves of the other groups.
        shares = jax.tree.map(_to_shares, eqx.combine(*results), weights, ways)
        return shares, GatheredOptState(states, state.names, state.members, state.leads)


def _splits_of(x: Array, weight: Array, splits: list[Split]) -> list[Split]:
    """Returns those of a leaf's `splits` that cut `x`. The array `x` is the leaf's gradient or its
    parameter. With ZeRO-1 the parameter, `weight`, is whole, and all `splits` cut the gradient. In
    all other cases the gradient is cut as the parameter is.
    """
    # A gradient that does not have the weight's shape was scattered.
    if x.shape != weight.shape:
        return splits
    # The type of a share varies along all axes that split it; the type of a whole weight does not.
    return [split for split in splits if shards.names_of([split]) <= set(varying_axes(weight))]


def _to_owner(x: Array, weight: Array, way: _Way) -> Array:
    """Returns the layers of `x` that this device owns; no layer in the result is split. If `x` has
    no layers, returns all of `x`. `x` is a gradient or a parameter. The shape and type of the
    parameter `weight` show whether `x` is a share or whole. `way` says how the leaf is divided."""
    splits_of_x = _splits_of(x, weight, way.splits)
    if not way.lead:
        return shards.gather(x, splits_of_x)
    layers_dim = way.lead - 1  # the last dim of layers, which is divided among the owners
    _check_divides(x.shape, splits_of_x, way)
    for split in way.splits:
        # Where `x` is whole, the owner takes its layers. A share along a matrix dim is exchanged
        # for layers, by an all-to-all. A share along the layers is on its owner already. No earlier
        # dim of layers is split (`_check_layers`).
        if split not in splits_of_x:
            x = shards.take(x, [Split(layers_dim, split.axis)])
        elif split.dim > layers_dim:
            x = split.axis.all_to_all(x, layers_dim, split.dim, tiled=True)
    # `way.inner` divides the layers once more, over the axes that split no dim of the leaf.
    return shards.take(x, way.inner)


def _to_shares(x: Array, weight: Array, way: _Way) -> Array:
    """Returns this device's part of an update, split as the parameter `weight` is: the reverse of
    `_to_owner`, with the same `way`. `x` is the update of the layers that the device owns."""
    # Of `way.splits`, all splits of the leaf, `weight` has only some (none with ZeRO-1).
    splits_of_weight = _splits_of(weight, weight, way.splits)
    if not way.lead:
        return shards.take(x, splits_of_weight)
    layers_dim = way.lead - 1  # the last dim of layers
    # `way.inner` divided the layers last, over the axes that split no dim of the leaf.
    x = shards.gather(x, way.inner)
    # In reverse order: the last step of `_to_owner` is undone first. Where `weight` is whole, the
    # layers are gathered. Where a matrix dim is split, layers are exchanged for shares of it. Split
    # layers stay.
    for split in reversed(way.splits):
        if split not in splits_of_weight:
            x = shards.gather(x, [Split(layers_dim, split.axis)])
        elif split.dim > layers_dim:
            x = split.axis.all_to_all(x, split.dim, layers_dim, tiled=True)
    return x


def _mapped(f: Callable[..., Any], times: int) -> Callable[..., Any]:
    """Returns `f` under `times` nested `jax.vmap`s, one for each dim of layers."""
    for _ in range(times):
        f = jax.vmap(f)
    return f


def _only(tree: PyTree, paths: list[Any]) -> PyTree:
    """Returns `tree` with only the leaves at `paths`, and None in place of all others."""
    return jax.tree.map_with_path(lambda path, x: x if path in paths else None, tree)


def _shapes_of_one_layer(tree: PyTree, lead: int) -> PyTree:
    """Returns the shapes of the arrays of `tree` without their first `lead` dims. These dims run
    over layers, so each result is the shape of one layer."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[lead:], x.dtype), tree)


def _check_globs(layers: Mapping[str, int], paths: list[str]) -> None:
    """Raises `ValueError` if a glob of `layers` matches none of `paths`, the paths of all leaves.
    The stacked vectors that it was meant for would be taken for matrices."""
    for pattern in layers:
        if not any(rules.matches_glob(pattern, path) for path in paths):
            raise ValueError(
                f"optimizers.by_matrix: the glob {pattern!r} in `layers` matches none of the "
                f"{len(paths)} leaves of `specs`; the first paths are {paths[:3]}. Correct the "
                "glob, or remove it."
            )


def _check_specs(name: str, weight: Array, axis: Axis, splits: list[Split]) -> None:
    """Raises `ValueError` if the parameter `weight` varies along a part of `axis` that is in no
    split, or along some axes of a split but not along all. `splits` are the dims that the
    parameter's spec splits over `axis`, each with its axes. `name` is the parameter's path."""
    varying = set(axes_of_several_devices({*varying_axes(weight)} & {*axes_of(axis)}))
    if untold := varying - shards.names_of(splits):
        raise ValueError(
            f"optimizers: {name or 'the parameter'} varies along {min(untold)!r}, and `specs` "
            "names no dim of it that this axis splits. Each device would update its shard as if it "
            "were the whole leaf. Pass the specs by which the parameters are split, in a tree like "
            "the parameters."
        )
    for split in splits:
        names = shards.names_of([split])
        whole = names.difference(varying_axes(weight))
        if whole and names & varying:
            raise ValueError(
                f"optimizers: in `specs`, dim {split.dim} of {name or 'the parameter'} is split "
                f"over {axes_of(split.axis)!r}, and the parameter does not vary along "
                f"{min(whole)!r}. The parameter must be split over all axes of this entry, or over "
                "none of them (then only the gradient is split). Split the gradient over "
                f"{min(whole)!r} along another dim."
            )


def _check_layers(name: str, lead: int, splits: Sequence[Split]) -> None:
    """Raises `ValueError` if a dim before dim `lead - 1` of the leaf `name` is split. The leaf has
    `lead` dims of layers, and only the last, dim `lead - 1`, can be divided among the devices that
    update the layers."""
    for dim, axis in splits:
        if dim < lead - 1:
            names = axes_of(axis)
            raise ValueError(
                f"optimizers.by_matrix: {name} has {lead} dims of layers, and dim {dim} of them is "
                f"split over {(names[0] if len(names) == 1 else names)!r}. Split dim {lead - 1}, "
                "or a dim of the matrices."
            )


def _check_divides(shape: tuple[int, ...], splits: list[Split], way: _Way) -> None:
    """Raises `ValueError` unless the layers on a device can be divided evenly among the devices
    that will update them. `shape` is the shape of an array on one device, and `splits` are the
    splits that cut the array. The array is a gradient or a parameter, and has dims of layers.
    """
    layers_dim = way.lead - 1  # the last dim of layers
    # `_to_owner` divides the layers over all axes of the wrapper: over those that split a dim of
    # the leaf (`way.splits`), whichever dim it is, and then over the others (`way.inner`). Left out
    # are only the axes over which the layers of this array are split already (`divided`).
    divided = [split for split in splits if split.dim == layers_dim]
    left = [split for split in way.splits if split not in divided]
    owners = math.prod(split.axis.size() for split in [*left, *way.inner])
    if shape[layers_dim] % owners:
        raise ValueError(
            f"optimizers.by_matrix: {way.name} has {shape[layers_dim]} layers on a device (dim "
            f"{layers_dim} of {shape}). This number must be a multiple of {owners}, the number of "
            "devices among which these layers are divided. Use optimizers.whole, or other axes."
        )


def _check_apart(update: Callable[..., Any], weights: PyTree, state: PyTree) -> None:
    """Raises `ValueError` if an optimizer draws random numbers, or if its update or state of one
    leaf depends on another leaf. `weights` has the shapes of one layer's weights, and `state` the
    shapes of the optimizer's state for this layer."""
    paths = [path for path, _ in jax.tree.leaves_with_path(weights)]
    # For each array of the state, the number of the leaf that it belongs to, or None.
    owners = owners_of_state(state, paths)
    # The gradients have the shapes of the weights.
    program = jax.make_jaxpr(update)(weights, state, weights)
    if any(eqn.primitive.name in DRAWS for eqn in jaxprs.every(program.jaxpr)):
        raise ValueError(
            "optimizers.by_matrix: this optimizer draws random numbers, which would be the same "
            "in every layer. Use optimizers.whole, which draws them for whole leaves, as one "
            "device does."
        )
    # The gradient, the parameter and the state of a leaf have the same number. `follow` returns the
    # `Value` of each result. Elements of one leaf may be combined, so only the numbers of leaves
    # count (`leaves`), not `mixes`.
    values = list(map(of_leaf, range(len(paths))))
    of_state = [Value() if owner is None else values[owner] for owner in owners]
    results = follow(program, [*values, *of_state, *values])
    for value, owner in zip(results, [*range(len(paths)), *owners], strict=True):
        # The other leaves that the result depends on. `leaves` may also have two marks that are no
        # numbers of leaves: WHOLE (of an array that is the same on all devices) and RIGHT (of a
        # result that a wrapper has marked as correct).
        others = sorted(value.leaves - {owner, WHOLE, RIGHT})
        if others:  # the message names at most two
            names = " and ".join(
                repr(trees.dotted(paths[source]) or "the parameter") for source in others[:2]
            )
            what = "its state" if owner is None else repr(trees.dotted(paths[owner]))
            raise ValueError(
                "optimizers.by_matrix: the update of a leaf must not depend on other leaves, but "
                f"this optimizer computes {what} from {names}. Use optimizers.whole, or combine "
                "leaves outside of the optimizer, as step.make and grads.clipped do to clip by the "
                "norm."
            )
