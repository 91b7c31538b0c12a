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


def check_axes(names: Sequence[str], there: Sequence[str]) -> None:
    """Refuse axes of `parallax.optimizers` that are not among those that are there. Raises
    `ValueError`."""
    strange = [name for name in names if name not in there]
    if strange:
        raise ValueError(
            f"optimizers: the optimizer joins shares along {strange[0]!r}, and the mesh has "
            f"{', '.join(map(repr, there))}. Give optimizers.whole or optimizers.by_matrix the "
            "names of its axes."
        )


def optimizer_specs(
    optimizer: optax.GradientTransformation | optax.MultiSteps,
    tree: PyTree,
    specs: Specs,
    mesh: AnyMesh | None = None,
) -> Specs:
    """A spec for each array of `optimizer.init(arrays of tree)`: moments follow their parameter,
    all else (counts) is `P()`.

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
    missing = [path for path in paths if dotted(path) not in given]
    if missing:
        raise ValueError(
            f"optimizer_specs needs one PartitionSpec for each of the {len(paths)} arrays of the "
            f"tree, in its structure, and {dotted(missing[0]) or 'the tree itself'} has none in "
            f"{jax.tree.structure(specs)}; pass what rules.specs(tree, rule) gives for this very "
            "tree."
        )
    leaves = dict(zip(map(dotted, paths), jax.tree.leaves(arrays), strict=True))

    def of(path, moment, spec_of, other):
        i = parameter_index(path, paths)
        return (
            other
            if i is None
            else _moment_spec(
                moment, leaves[dotted(paths[i])], spec_of(dotted(paths[i])), dotted(paths[i])
            )
        )

    def node(path, each):
        if not isinstance(each, GatheredOptState):
            return of(path, each, given.get, P())
        if mesh is not None:
            check_axes(each.names, mesh.axis_names)
        groups = []
        for group, members, lead in zip(each.groups, each.members, each.leads, strict=True):
            spec_of = lambda name, lead=lead: _gathered_spec(
                padded(given[name], leaves[name].ndim), lead, each.names
            )
            other = P(*spec_of(members[0])[:lead])
            groups.append(
                jax.tree.map_with_path(lambda path, moment: of(path, moment, spec_of, other), group)
            )
        return GatheredOptState(groups, each.names, each.members, each.leads)

    state = jax.eval_shape(optimizer.init, arrays)
    return jax.tree.map_with_path(
        node, state, is_leaf=lambda each: isinstance(each, GatheredOptState)
    )


def _gathered_spec(entries: list, lead: int, names: Sequence[str]) -> PartitionSpec:
    """The spec of a leaf that is whole along the axes `names`, its layers split over them."""
    split = [name for entry in entries[lead:] for name in entry_axes(entry) if name in names]
    done = {name for entry in entries for name in entry_axes(entry)}
    left = [
        tuple(name for name in entry_axes(entry) if name not in names) for entry in entries[lead:]
    ]
    layers = [entry_axes(entry) for entry in entries[:lead]]
    if lead:
        layers[-1] = (*layers[-1], *split, *(name for name in names if name not in done))
    return spec_of(
        [(entry[0] if len(entry) == 1 else entry) if entry else None for entry in (*layers, *left)]
    )


def _moment_spec(moment: Any, leaf: Any, spec: PartitionSpec, path: str) -> PartitionSpec:
    if moment.shape == leaf.shape:
        return spec
    entries = padded(spec, leaf.ndim)
    if not any(entry_axes(entry) for entry in entries):
        return P()
    readings = [
        [
            entries[dim] if size == leaf.shape[dim] else None
            for size, dim in zip(moment.shape, dims, strict=True)
        ]
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
