"""Optimizers that look at more than one element at a time, made right on shards.

An update of a shard is the shard of the update only where an optimizer acts element by element, and
`step.make` refuses others (`parallax.optimizers.elementwise`). Two wrappers gather the leaves that
such an optimizer needs, and return each device its own share of the update:

    whole      every device has all leaves whole, and updates all of them
    by_matrix  every device has the whole matrices of some layers, and updates those

Bytes that an update of a leaf of S bytes moves on each link, with n devices of `axis`. By matrix,
the update moves as well:

                                      whole            by_matrix
    gradient and parameter are shares 2 (n - 1)/n S    3 (n - 1)/n² S
    only the gradient is (ZeRO-1)     (n - 1)/n S      (n - 1)/n² S + (n - 1)/n S

By matrix, a leaf that is split along its layers is where it is updated already, and only ZeRO-1
moves its update.
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
from parallax.grads.axes import axes_of
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

Leads = Callable[[str, int], int]


def whole(
    optimizer: optax.GradientTransformation | optax.MultiSteps, axis: AxisLike, specs: Specs
) -> optax.GradientTransformationExtraArgs:
    """Returns `optimizer` on whole leaves: gathered over `axis`, updated by every device, of which
    each keeps its own share.

    Right for any optimizer, with any state, which is whole on each device. Gradients and parameters
    may both be shares (tensor parallelism, ZeRO-3), or gradients alone (from
    `zero.reduce_scattered`, in the place of `zero.sharded`: ZeRO-1 without its saving).

    Args:
        optimizer: any.
        axis: all axes over which a leaf is split that the optimizer looks at.
        specs: of the shares, a tree like the parameters.

    Raises:
        ValueError: the leaves are split over other axes too, and the optimizer does not act element
            by element; or, when its state is made, the mesh has no such axis.
    """

    def no_layers(path, ndim):
        return 0

    return _on_owners(optimizer, Axis.of(axis), specs, no_layers, apart=False)


def by_matrix(
    optimizer: optax.GradientTransformation | optax.MultiSteps,
    axis: AxisLike,
    specs: Specs,
    *,
    layers: Mapping[str, int] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Returns `optimizer` on one layer's leaves at a time, each layer on one device of `axis`, with
    its state.

    Leaves that a loop over layers runs over are stacked: [L, I, J]. Device i takes layers i L/n to
    (i + 1) L/n - 1 whole, by one all-to-all, and gives back their updates by another. The optimizer
    sees leaves of [I, J], one layer of all stacked leaves together, so that one which takes
    matrices, such as `optax.contrib.muon`, sees matrices. What is not stacked is updated by every
    device, as in `whole`.

    Args:
        optimizer: one that updates each leaf by itself. To use another for some leaves, put
            `optax.partition` round both.
        axis: the axes over which leaves are split that the optimizer looks at.
        specs: of the shares, a tree like the parameters.
        layers: for globs of paths, how many leading dims are layers; the first that matches counts.
            By default a leaf of three dims is [L, I, J]; stacked vectors, [L, I], need
            `layers={"blocks.**": 1}`, and so does a leaf of more dims.

    Raises:
        ValueError: a leaf has more than three dims, and `layers` has no number for it, so that dims
            of a convolution or of heads might be taken for layers; the layers on a device do not
            divide by the devices; a dim of layers but the last is split over `axis`; the optimizer
            joins several leaves, as clipping by the global norm does; or those of `whole`.
    """

    def leading(path, ndim):
        counts = [
            count for pattern, count in (layers or {}).items() if rules.matches_glob(pattern, path)
        ]
        # A wrong guess would train a matrix of another shape without a word.
        if not counts and ndim > 3:
            raise ValueError(
                f"optimizers.by_matrix: {path} has {ndim} dims, and its shape does not tell how "
                "many of the first are layers: a convolution has none, attention weights [L, D, "
                f"H, K] have one. Pass layers={{{path!r}: 1}}, or its number."
            )
        return counts[0] if counts else max(ndim - 2, 0)

    return _on_owners(optimizer, Axis.of(axis), specs, leading, apart=True)


def on_shards(
    optimizer: optax.GradientTransformation | optax.MultiSteps,
) -> optax.GradientTransformationExtraArgs:
    """Returns `optimizer`, declared right on shards: `step.make` does not check its update.

    It is for an optimizer that joins the shards itself, with collectives of its own.
    """
    optimizer = with_extra(optimizer)
    update = right_on_shards(optimizer.update)
    return optax.GradientTransformationExtraArgs(optimizer.init, update)


class _Way(NamedTuple):
    """How a leaf comes to its owner.

    Attributes:
        name: of the leaf.
        lead: how many of its first dims are layers.
        splits: the dims that `axis` splits.
        inner: the split of the layers over the axes that split no dim. Owners share the layers
            over the axes of `splits`, and inside that over these.
    """

    name: str
    lead: int
    splits: list[Split]
    inner: list[Split]


def _on_owners(
    optimizer, axis: Axis, specs: Specs, leads: Leads, *, apart: bool
) -> optax.GradientTransformationExtraArgs:
    """Returns `optimizer` on the owners of leaves; `leads` and `apart` are those of `_Owners`."""
    owners = _Owners(with_extra(optimizer), axis, trees.by_path(specs), leads, apart)
    # `update` checks the optimizer on the leaves that it sees, which are whole along `axis`.
    checked_update = right_on_shards(owners.update, at="optimizers")
    return optax.GradientTransformationExtraArgs(owners.init, checked_update)


class _Owners(NamedTuple):
    """An optimizer on leaves that are brought to the devices which own them.

    Attributes:
        optimizer: sees the leaves of some layers, whole.
        axis: over which they are brought together.
        specs: of the shares, by path.
        leads: from a leaf's path and the number of its dims to how many of the first are layers.
        apart: whether each layer is updated by one device.
    """

    optimizer: optax.GradientTransformationExtraArgs
    axis: Axis
    specs: dict[str, PartitionSpec]
    leads: Leads
    apart: bool

    def way(self, path: Any, leaf: Array) -> _Way:
        """Returns how the leaf at `path` comes to its owner."""
        name, splits = trees.dotted(path), shards.splits_of(path, self.specs, self.axis)
        lead, done = self.leads(name, leaf.ndim), shards.names_of(splits)
        _check_layers(name, lead, splits)
        # Layers are dealt out over these axes too, or all their devices would compute the same
        # updates.
        others = tuple(axis_name for axis_name in axes_of(self.axis) if axis_name not in done)
        inner_split = [Split(lead - 1, self.axis.over(others))] if others else []
        return _Way(name, lead, splits, inner_split)

    def groups(self, tree: PyTree) -> list[tuple[tuple[int, ...], list[Any]]]:
        """Returns the leaves that the optimizer sees together: those with the same layers."""
        paths: dict[tuple[int, ...], list[Any]] = {}
        for path, leaf in jax.tree.leaves_with_path(tree):
            layers = leaf.shape[: self.leads(trees.dotted(path), leaf.ndim)]
            paths.setdefault(layers, []).append(path)
        return list(paths.items())

    def init(self, params: PyTree) -> Any:
        """Returns the state of all groups."""
        params = eqx.filter(params, trees.is_inexact)
        # `rules.optimizer_specs` checks the axes of a state that is made outside a map.
        if manual_axes := jax.sharding.get_abstract_mesh().manual_axes:
            rules.check_axes(axes_of(self.axis), manual_axes)
        if shards.runs_over(self.axis):
            ways = jax.tree.map_with_path(self.way, params)
            params = jax.tree.map(_to_owner, params, params, ways)
        by_layers = self.groups(params)
        states = [
            _mapped(self.optimizer.init, len(layers))(_only(params, paths))
            for layers, paths in by_layers
        ]
        # Static, so that `rules.optimizer_specs` can find the specs of a group's leaves by their
        # paths.
        members = tuple(tuple(map(trees.dotted, paths)) for _, paths in by_layers)
        leads = tuple(len(layers) for layers, _ in by_layers)
        return GatheredOptState(states, axes_of(self.axis), members, leads)

    def update(self, updates: PyTree, state: Any, weights: PyTree, **extra: Any) -> Any:
        """Returns each device's share of the updates, and the new state."""
        ways = jax.tree.map_with_path(self.way, weights)
        whole_gradients = jax.tree.map(_to_owner, updates, weights, ways)
        whole_weights = jax.tree.map(_to_owner, weights, weights, ways)
        one_layer = functools.partial(self.optimizer.update, **extra)
        results, states = [], []
        # Leaves with different numbers of layers cannot go through one `jax.vmap`.
        for (layers, paths), old in zip(self.groups(whole_weights), state.groups, strict=True):
            members, lead = _only(whole_weights, paths), len(layers)
            if self.apart:
                _check_apart(one_layer, _first(members, lead), _first(old, lead))
            run = checked(
                _mapped(one_layer, lead), self.specs, at="optimizers", gathered=axes_of(self.axis)
            )
            result, new = run(_only(whole_gradients, paths), old, members)
            results.append(result)
            states.append(new)
        shares = jax.tree.map(_to_shares, eqx.combine(*results), weights, ways)
        return shares, GatheredOptState(states, state.names, state.members, state.leads)


def _splits_here(x: Array, weight: Array, splits: list[Split]) -> list[Split]:
    """Returns the splits along which `x` is a share: as `weight`, or along all, as gradients of
    ZeRO-1 whose `weight` is whole."""
    if x.shape != weight.shape:
        return splits
    return [split for split in splits if shards.names_of([split]) <= set(varying_axes(weight))]


def _to_owner(x: Array, weight: Array, way: _Way) -> Array:
    """Returns `x`, a share or whole, where it is updated."""
    splits = _splits_here(x, weight, way.splits)
    if not way.lead:
        return shards.gather(x, splits)
    layers = way.lead - 1
    _check_divides(x.shape, way)
    for split in way.splits:
        if split not in splits:
            x = shards.take(x, [Split(layers, split.axis)])
        elif split.dim > layers:
            x = split.axis.all_to_all(x, layers, split.dim, tiled=True)
    return shards.take(x, way.inner)


def _to_shares(x: Array, weight: Array, way: _Way) -> Array:
    """Returns the way back: the update of `weight`, as that lies here."""
    splits = _splits_here(weight, weight, way.splits)
    if not way.lead:
        return shards.take(x, splits)
    layers = way.lead - 1
    x = shards.gather(x, way.inner)
    # The way there in reverse: the split that was made last is undone first.
    for split in reversed(way.splits):
        if split not in splits:
            x = shards.gather(x, [Split(layers, split.axis)])
        elif split.dim > layers:
            x = split.axis.all_to_all(x, split.dim, layers, tiled=True)
    return x


def _mapped(f: Callable[..., Any], times: int) -> Callable[..., Any]:
    for _ in range(times):
        f = jax.vmap(f)
    return f


def _only(tree: PyTree, paths: list[Any]) -> PyTree:
    """Returns `tree` with None for all leaves but those at `paths`."""
    return jax.tree.map_with_path(lambda path, x: x if path in paths else None, tree)


def _first(tree: PyTree, lead: int) -> PyTree:
    """Returns the shapes of one layer."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[lead:], x.dtype), tree)


def _check_layers(name: str, lead: int, splits: Sequence[Split]) -> None:
    """Refuses a split of a dim of layers that is not the last of them."""
    for dim, axis in splits:
        if dim < lead - 1:
            names = axes_of(axis)
            raise ValueError(
                f"optimizers.by_matrix: {name} has {lead} dims of layers, and dim {dim} of them is "
                f"split over {(names[0] if len(names) == 1 else names)!r}. Split dim {lead - 1}, "
                "or a dim of the matrices."
            )


def _check_divides(shape: tuple[int, ...], way: _Way) -> None:
    """Refuses layers that cannot be dealt out evenly."""
    layers = way.lead - 1
    inside = [split for split in way.splits if split.dim > layers]
    owners = math.prod(split.axis.size() for split in [*inside, *way.inner])
    if shape[layers] % owners:
        raise ValueError(
            f"optimizers.by_matrix: {way.name} has {shape[layers]} layers on a device (dim "
            f"{layers} of {shape}), which must divide by the {owners} devices that own some each. "
            "Use optimizers.whole, or other axes."
        )


def _check_apart(update: Callable[..., Any], weights: PyTree, state: PyTree) -> None:
    """Refuses an optimizer whose update of one leaf depends on another. `weights` and `state` are
    shapes."""
    paths = [path for path, _ in jax.tree.leaves_with_path(weights)]
    owners = owners_of_state(state, paths)
    program = jax.make_jaxpr(update)(weights, state, weights)
    if any(
        eqn.primitive.name in ("random_bits", "threefry2x32") for eqn in jaxprs.every(program.jaxpr)
    ):
        raise ValueError(
            "optimizers.by_matrix: this optimizer draws random numbers, which would be the same "
            "ones in every layer. Use optimizers.whole, which draws them for whole leaves, as "
            "one device does."
        )
    # Gradient and parameter of a leaf count as one source, and so does its state.
    values = list(map(of_leaf, range(len(paths))))
    of_state = [Value() if owner is None else values[owner] for owner in owners]
    results = follow(program, [*values, *of_state, *values])
    for value, owner in zip(results, [*range(len(paths)), *owners], strict=True):
        others = sorted(value.leaves - {owner, WHOLE, RIGHT})
        if others:
            names = " and ".join(
                repr(trees.dotted(paths[source]) or "the parameter") for source in others[:2]
            )
            what = "its state" if owner is None else repr(trees.dotted(paths[owner]))
            raise ValueError(
                "optimizers.by_matrix: leaves are updated apart, each on its own device, and this "
                f"optimizer makes {what} from {names}. Use optimizers.whole, or join leaves "
                "elsewhere: step.make and grads.clipped clip by the norm."
            )
