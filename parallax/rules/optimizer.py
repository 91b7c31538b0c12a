"""Where the optimizer's state lives: beside the parameters that it belongs to."""

import itertools
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import optax
from jax.sharding import PartitionSpec
from jax.sharding import PartitionSpec as P

from parallax._typing import PyTree, Specs
from parallax.rules.placement import padded, spec_of
from parallax.trees import AnyMesh, by_path, dotted, entry_axes, is_inexact, parameter_index


class GatheredOptState(eqx.Module):
    """The state of an optimizer that works on leaves which are whole, as `parallax.optimizers`
    makes them.

    Attributes:
        groups: the state of each group of leaves with the same layers.
        names: the axes along which leaves are whole; layers are split over them.
        members: the paths of each group's leaves.
        leads: how many of their first dims are layers, and so of every array of the group's state.
    """

    groups: list[PyTree]
    names: tuple[str, ...] = eqx.field(static=True)
    members: tuple[tuple[str, ...], ...] = eqx.field(static=True)
    leads: tuple[int, ...] = eqx.field(static=True)


def check_axes(names: Sequence[str], mesh_axes: Sequence[str]) -> None:
    """Refuses axes of `parallax.optimizers` that the mesh lacks. Raises `ValueError`."""
    strange = [name for name in names if name not in mesh_axes]
    if strange:
        raise ValueError(
            f"optimizers: the optimizer joins shares along {strange[0]!r}, and the mesh has "
            f"{', '.join(map(repr, mesh_axes))}. Give optimizers.whole or optimizers.by_matrix the "
            "names of its axes."
        )


def optimizer_specs(
    optimizer: optax.GradientTransformation | optax.MultiSteps,
    tree: PyTree,
    specs: Specs,
    mesh: AnyMesh | None = None,
) -> Specs:
    """Returns a spec for each array of `optimizer.init(arrays of tree)`: moments follow their
    parameter, all else (counts) is `P()`.

    `specs` is what `specs(tree, rule)` gives. A moment of another shape than its parameter must be
    that parameter reduced over some dims (dropped, or kept as 1), as the factored moments of
    Adafactor are: each dim that is left stays split as it was. Where equal sizes leave open which
    dim was reduced, only the splits that all readings share are kept. Any other shape is a
    `ValueError`, unless the parameter is whole: then so is all its state.

    Leaves of `tree` that cannot be trained (integers, functions) are left out, and so are those
    that `specs` has and `tree` has not: pass `eqx.filter(tree, trained)` where some leaves are
    frozen. State of `parallax.optimizers` is whole along its axes, each of which `mesh` must have,
    if it is given.

    The specs say where the state lives, not that an update on shards equals one on the whole;
    `step.make` asks that.
    """
    arrays = eqx.filter(tree, is_inexact)
    given = by_path(specs)
    paths = [path for path, _ in jax.tree.leaves_with_path(arrays)]
    _check_given(paths, given, specs)
    leaves = dict(zip(map(dotted, paths), jax.tree.leaves(arrays), strict=True))

    def spec_of_moment(path, moment, spec_of_leaf, spec_without_leaf):
        i = parameter_index(path, paths)
        # A count belongs to no leaf.
        if i is None:
            return spec_without_leaf
        name = dotted(paths[i])
        return _moment_spec(moment, leaves[name], spec_of_leaf(name), name)

    def specs_of_group(group, members, lead, names):
        def spec_of_leaf(name):
            return _gathered_spec(padded(given[name], leaves[name].ndim), lead, names)

        def spec_in_group(path, moment):
            return spec_of_moment(path, moment, spec_of_leaf, by_layer)

        by_layer = P(*spec_of_leaf(members[0])[:lead])
        return jax.tree.map_with_path(spec_in_group, group)

    def specs_of_node(path, node):
        if not isinstance(node, GatheredOptState):
            return spec_of_moment(path, node, given.get, P())
        # A misspelt axis would leave the layers with all devices, and nothing else would say so.
        if mesh is not None:
            check_axes(node.names, mesh.axis_names)
        groups = [
            specs_of_group(group, members, lead, node.names)
            for group, members, lead in zip(node.groups, node.members, node.leads, strict=True)
        ]
        return GatheredOptState(groups, node.names, node.members, node.leads)

    # The shapes alone: a state of a model that fits no device can still be placed.
    state = jax.eval_shape(optimizer.init, arrays)
    return jax.tree.map_with_path(
        specs_of_node, state, is_leaf=lambda node: isinstance(node, GatheredOptState)
    )


def _check_given(paths: Sequence[Any], given: dict[str, PartitionSpec], specs: Specs) -> None:
    """Refuses specs that lack one of the leaves at `paths`."""
    missing = [path for path in paths if dotted(path) not in given]
    if missing:
        raise ValueError(
            f"optimizer_specs needs one PartitionSpec for each of the {len(paths)} arrays of the "
            f"tree, in its structure, and {dotted(missing[0]) or 'the tree itself'} has none in "
            f"{jax.tree.structure(specs)}; pass what rules.specs(tree, rule) gives for this very "
            "tree."
        )


def _gathered_spec(entries: list, lead: int, names: Sequence[str]) -> PartitionSpec:
    """Returns the spec of a leaf that is whole along the axes `names`, its layers split over
    them."""
    split = [name for entry in entries[lead:] for name in entry_axes(entry) if name in names]
    # What splits a dim already cannot split the layers as well.
    done = {name for entry in entries for name in entry_axes(entry)}
    left = [
        tuple(name for name in entry_axes(entry) if name not in names) for entry in entries[lead:]
    ]
    layers = [entry_axes(entry) for entry in entries[:lead]]
    if lead:
        # The axes of the matrices' dims split the layers instead, inside those that already do: so
        # `optimizers.by_matrix` deals them out.
        layers[-1] = (*layers[-1], *split, *(name for name in names if name not in done))
    return spec_of(
        [(entry[0] if len(entry) == 1 else entry) if entry else None for entry in (*layers, *left)]
    )


def _moment_spec(moment: Any, leaf: Any, spec: PartitionSpec, path: str) -> PartitionSpec:
    if moment.shape == leaf.shape:
        return spec
    entries = padded(spec, leaf.ndim)
    # The parameter is whole, so any shape is right whole.
    if not any(entry_axes(entry) for entry in entries):
        return P()
    readings = [
        [
            entries[dim] if size == leaf.shape[dim] else None
            for size, dim in zip(moment.shape, dims, strict=True)
        ]
        # Which dims were dropped is not written anywhere, so all that fit are tried.
        for dims in itertools.combinations(range(leaf.ndim), moment.ndim)
        if all(size in (1, leaf.shape[dim]) for size, dim in zip(moment.shape, dims, strict=True))
    ]
    if not readings:
        raise ValueError(
            f"{path}: the optimizer keeps an array of shape {moment.shape} for this leaf of shape "
            f"{leaf.shape}, which is not that leaf reduced over some dims, so it cannot follow the "
            f"spec {spec}; wrap the optimizer in optimizers.whole, which keeps its state whole, "
            "replicate the leaf with P(), or write the specs of this state by hand."
        )
    return spec_of(
        [column[0] if len(set(column)) == 1 else None for column in zip(*readings, strict=True)]
    )
