"""Optimizers that look at more than one element at a time, made right on shards.

An update of a shard is the shard of the update only where an optimizer acts element by element, and `step.make` refuses others
(`parallax.elementwise`). Two wrappers cure that; both give each device what it can compute on, and its own share of the result:

    whole      every device has all leaves whole, and updates all of them
    by_matrix  every device has some layers' matrices whole, and updates those: Muon, LARS, LAMB, Adafactor

Bytes that an update of a leaf of S bytes moves on each link, with n devices of `axis`:

                                  whole            by_matrix
    all three live as shares      2 (n - 1)/n S    3 (n - 1)/n² S               gradient and parameter; then the update too
    gradients alone (ZeRO-1)      (n - 1)/n S      (n - 1)/n² S + (n - 1)/n S   gradient; then the update too

By matrix, a leaf whose layers are what is split is with its owners already: only the update of ZeRO-1 moves, as it always does.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import optax
from jaxtyping import Array

from parallax import elementwise, rules, trees
from parallax.collectives import Axis, AxisLike
from parallax.collectives.types import replicated, varying_axes
from parallax.elementwise.apart import check_apart
from parallax.grads import axes_of, matching_parameters
from parallax.rules import Owned
from parallax.typed import PyTree, Specs
from parallax.zero import Split, inside, share, splits_of

Leads = Callable[[str, int], int]


def whole(
    optimizer: optax.GradientTransformation | optax.MultiSteps, axis: AxisLike, specs: Specs
) -> optax.GradientTransformationExtraArgs:
    """`optimizer` on whole leaves: gathered over `axis`, updated by every device, of which each keeps its own share.

    Right for any optimizer, with any state, which is whole on each device. Gradients and parameters may both be shares (tensor
    parallelism, ZeRO-3), or gradients alone (from `zero.reduce_scattered`, in the place of `zero.sharded`: ZeRO-1 without its
    saving).

    Args:
        optimizer: any.
        axis: all axes over which a leaf is split that the optimizer looks at.
        specs: of the shares, a tree like the parameters.

    Raises:
        ValueError: the leaves are split over other axes too, and the optimizer does not act element by element; or, when its
            state is made, the mesh has no such axis.
    """
    return _owned(optimizer, specs, Axis.of(axis), lambda path, ndim: 0, apart=False)


def by_matrix(
    optimizer: optax.GradientTransformation | optax.MultiSteps,
    axis: AxisLike,
    specs: Specs,
    *,
    layers: Mapping[str, int] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """`optimizer` on one layer's leaves at a time, each layer on one device of `axis`, with its state.

    Leaves that a loop over layers runs over are stacked: [L, I, J]. Device i takes layers i L/n to (i + 1) L/n - 1 whole, by one
    all-to-all, and gives back their updates by another. The optimizer sees leaves of [I, J], one layer of all stacked leaves
    together, so that one which takes matrices, such as `optax.contrib.muon`, sees matrices. What is not stacked is updated by
    every device, as in `whole`.

    Args:
        optimizer: one that updates each leaf by itself. To use another for some leaves, put `optax.partition` round both.
        axis: the axes over which leaves are split that the optimizer looks at.
        specs: of the shares, a tree like the parameters.
        layers: for globs of paths, how many leading dims are layers; the first that matches counts. By default a leaf of three
            dims is [L, I, J]; stacked vectors, [L, I], need `layers={"blocks.**": 1}`, and so does a leaf of more dims.

    Raises:
        ValueError: a leaf has more than three dims, and `layers` has no number for it, so that dims of a convolution or of heads
            might be taken for layers; the layers on a device do not divide by the devices; a dim of layers but the last is split
            over `axis`; the optimizer joins several leaves, as clipping by the global norm does; or those of `whole`.
    """

    def leading(path, ndim):
        counts = [count for pattern, count in (layers or {}).items() if rules.covers(pattern, path)]
        if not counts and ndim > 3:
            raise ValueError(
                f"optimizers.by_matrix: {path} has {ndim} dims, and its shape does not tell how many of the first are layers: a "
                f"convolution has none, attention weights [L, D, H, K] have one. Pass layers={{{path!r}: 1}}, or its number."
            )
        return counts[0] if counts else max(ndim - 2, 0)

    return _owned(optimizer, specs, Axis.of(axis), leading, apart=True)


def on_shards(optimizer: optax.GradientTransformation | optax.MultiSteps) -> optax.GradientTransformationExtraArgs:
    """`optimizer`, which is right on shards though it does not act element by element: `step.make` takes your word for it.

    For one that joins the shards itself, with collectives of its own.
    """
    optimizer = elementwise.with_extra(optimizer)

    def update(updates, state, params=None, **extra):
        return elementwise.right(
            (updates, state) if elementwise.COMPARES.get() else optimizer.update(updates, state, params, **extra)
        )

    return optax.GradientTransformationExtraArgs(optimizer.init, update)


class _Way(NamedTuple):
    """How a leaf comes to its owner.

    Attributes:
        lead: how many of its first dims are layers.
        splits: the dims that `axis` splits.
        rest: the axes that split none. Layers are split among owners over the axes of `splits`, and inside that over these.
    """

    lead: int
    splits: list[Split]
    rest: Axis


def _owned(optimizer, specs: Specs, axis: Axis, leads: Leads, *, apart: bool) -> optax.GradientTransformationExtraArgs:
    optimizer = elementwise.with_extra(optimizer)
    by_path = trees.by_path(specs)

    def way(path, ndim):
        lead, splits = leads(trees.dotted(path), ndim), splits_of(path, by_path, axis)
        _check_lead(path, lead, splits, axis)
        done = {name for split in splits for name in axes_of(split.axis)}
        return _Way(lead, splits, axis.over(tuple(name for name in axes_of(axis) if name not in done)))

    def groups(tree):
        """The leaves that the optimizer sees together: those with the same layers."""
        found: dict[tuple[int, ...], list[Any]] = {}
        for path, leaf in jax.tree.leaves_with_path(tree):
            found.setdefault(leaf.shape[: leads(trees.dotted(path), leaf.ndim)], []).append(path)
        return list(found.items())

    def init(params) -> Any:
        params = eqx.filter(params, trees.is_inexact)
        if there := jax.sharding.get_abstract_mesh().manual_axes:
            rules.check_axes(axes_of(axis), there)
        if inside(axis):
            params = jax.tree.map_with_path(lambda path, w: _to_owner(w, w, way(path, w.ndim), path), params)
        found = groups(params)
        states = [_mapped(optimizer.init, len(lead))(_only(params, paths)) for lead, paths in found]
        members = tuple(tuple(map(trees.dotted, paths)) for _, paths in found)
        return Owned(states, axes_of(axis), members, tuple(len(lead) for lead, _ in found))

    def update(updates, state, params=None, **extra):
        if params is None:
            raise ValueError("optimizers: update needs the parameters, whose shapes tell shares from wholes. Pass params.")
        weights = matching_parameters(updates, params)
        if elementwise.COMPARES.get():
            return elementwise.right((weights, state))
        ways = {tuple(path): way(path, w.ndim) for path, w in jax.tree.leaves_with_path(weights)}
        brought = jax.tree.map_with_path(lambda path, g, w: _to_owner(g, w, ways[tuple(path)], path), updates, weights)
        own = jax.tree.map_with_path(lambda path, w: _to_owner(w, w, ways[tuple(path)], path), weights)
        results, states = [], []
        for (lead, paths), old in zip(groups(own), state.groups, strict=True):
            plain = lambda g, s, w: optimizer.update(g, s, w, **extra)
            if apart:
                check_apart(plain, _first(_only(own, paths), len(lead)), _first(old, len(lead)))
            one, g, w = _mapped(plain, len(lead)), _only(brought, paths), _only(own, paths)
            wholes = elementwise.wholes(w, by_path, besides=axes_of(axis))
            elementwise.check(one, g, old, w, wholes=wholes, at="optimizers", besides=axes_of(axis))
            done, new = one(g, old, w)
            results.append(done)
            states.append(new)
        result = jax.tree.map_with_path(lambda path, u, w: _to_shares(u, w, ways[tuple(path)]), eqx.combine(*results), weights)
        return elementwise.right((result, Owned(states, state.names, state.members, state.leads)))

    return optax.GradientTransformationExtraArgs(init, update)


def _shares(x: Array, weight: Array, splits: list[Split]) -> list[Split]:
    """Along which splits `x` is a share: like `weight`, or along all, as gradients of ZeRO-1 whose `weight` is whole."""
    if x.shape != weight.shape:
        return splits
    return [split for split in splits if set(axes_of(split.axis)) <= set(varying_axes(weight))]


def _to_owner(x: Array, weight: Array, way: _Way, path: Any) -> Array:
    """`x`, a share or whole, where it is updated."""
    shares = _shares(x, weight, way.splits)
    if not way.lead:
        for dim, part in shares:
            x = replicated(part.all_gather(x, axis=dim, tiled=True), part.names)
        return x
    layers = way.lead - 1
    _check_divides(path, x.shape, layers, way)
    for split in way.splits:
        if split.dim >= way.lead and split in shares:
            x = split.axis.all_to_all(x, layers, split.dim, tiled=True)
        elif split.dim >= way.lead or split not in shares:
            x = share(x, [Split(layers, split.axis)])
    return share(x, [Split(layers, way.rest)]) if axes_of(way.rest) else x


def _to_shares(x: Array, weight: Array, way: _Way) -> Array:
    """The way back: the update of `weight`, as that lies here."""
    shares = _shares(weight, weight, way.splits)
    if not way.lead:
        return share(x, shares)
    layers = way.lead - 1
    gather = lambda x, part: replicated(part.all_gather(x, axis=layers, tiled=True), part.names)
    x = gather(x, way.rest) if axes_of(way.rest) else x
    for split in reversed(way.splits):
        if split.dim >= way.lead and split in shares:
            x = split.axis.all_to_all(x, split.dim, layers, tiled=True)
        elif split.dim >= way.lead or split not in shares:
            x = gather(x, split.axis)
    return x


def _mapped(f: Callable[..., Any], times: int) -> Callable[..., Any]:
    for _ in range(times):
        f = jax.vmap(f)
    return f


def _only(tree: PyTree, paths: list[Any]) -> PyTree:
    """`tree` with None for all leaves but those at `paths`."""
    return jax.tree.map_with_path(lambda path, x: x if path in paths else None, tree)


def _first(tree: PyTree, lead: int) -> PyTree:
    """The shapes of one layer."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[lead:], x.dtype), tree)


def _check_lead(path: Any, lead: int, splits: list[Split], axis: Axis) -> None:
    wrong = [split for split in splits if split.dim < lead - 1]
    if wrong:
        names = axes_of(wrong[0].axis)
        raise ValueError(
            f"optimizers.by_matrix: {trees.dotted(path)} has {lead} dims of layers, and dim {wrong[0].dim} of them is split over "
            f"{(names[0] if len(names) == 1 else names)!r}. Split dim {lead - 1}, or a dim of the matrices."
        )


def _check_divides(path: Any, shape: tuple[int, ...], dim: int, way: _Way) -> None:
    parts = [split.axis for split in way.splits if split.dim >= way.lead] + [way.rest]
    owners = math.prod(part.size() for part in parts if axes_of(part))
    if shape[dim] % owners:
        raise ValueError(
            f"optimizers.by_matrix: {trees.dotted(path)} has {shape[dim]} layers on a device (dim {dim} of {shape}), which must "
            f"divide by the {owners} devices that own some each. Take optimizers.whole, or other axes."
        )
