"""The specs of an optimizer's state, whose arrays are split like their parameters.

A moment is an array of the state whose path ends with the path of a parameter. The moment belongs
to that parameter, which `parameter_index` finds. An entry of a spec says which mesh axes split one
dim, and `padded(spec, ndim)` has an entry for each dim.
"""

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
    """The state of an optimizer of `parallax.optimizers` that updates whole matrices.

    Attributes:
        groups: the state of each group of leaves; in all leaves of a group, the leading dims, over
            which layers are stacked, have the same sizes.
        names: axes that split no dim of a matrix. They split the dims of stacked layers instead.
        members: the paths of each group's leaves.
        leads: for each group, how many leading dims are dims of stacked layers, in the group's
            leaves and in every array of the group's state.
    """

    groups: list[PyTree]
    names: tuple[str, ...] = eqx.field(static=True)
    members: tuple[tuple[str, ...], ...] = eqx.field(static=True)
    leads: tuple[int, ...] = eqx.field(static=True)


def check_axes(names: Sequence[str], mesh_axes: Sequence[str]) -> None:
    """Raises `ValueError` if the mesh lacks one of the axes `names`, which the user has passed to
    `optimizers.whole` or `optimizers.by_matrix`."""
    strange = [name for name in names if name not in mesh_axes]
    if strange:
        raise ValueError(
            f"optimizers: the optimizer gathers matrices along {strange[0]!r}, but the mesh has "
            f"{', '.join(map(repr, mesh_axes))}. Pass names of the mesh's axes to "
            "optimizers.whole or optimizers.by_matrix."
        )


def optimizer_specs(
    optimizer: optax.GradientTransformation | optax.MultiSteps,
    tree: PyTree,
    specs: Specs,
    mesh: AnyMesh | None = None,
) -> Specs:
    """Returns a spec for each array of `optimizer.init(arrays of tree)`.

    A moment has the spec of its parameter. Other arrays, such as counts, have `P()`.

    A moment may also have the shape of its parameter reduced over some dims. A reduced dim is
    dropped, or kept with size 1. The factored moments of Adafactor are an example. Each remaining
    dim stays split as in the parameter. If several dims of the parameter have equal sizes, it may
    be unclear which of these dims was reduced. A dim of the moment then stays split only if it
    would be split over the same axes whichever dims were reduced.

    If the moment has any other shape and an axis splits the parameter, `ValueError` is raised. If
    no axis splits the parameter, no axis splits the moment.

    Leaves of `tree` that cannot be trained (integers, functions) are left out. If some leaves are
    frozen, pass only the trained leaves as `tree`, such as `eqx.filter(model, is_trained)`; `specs`
    may have all leaves.

    The state of `optimizers.whole` is not split over the axes given to `whole`. In the state of
    `optimizers.by_matrix`, the axes given to `by_matrix` split only dims of stacked layers. `mesh`,
    if given, must have these axes.

    The specs do not promise that an update on shards equals an update on whole leaves; `step.make`
    checks this.

    Args:
        optimizer: the optimizer.
        tree: the model, or its shapes.
        specs: the specs of `tree`, the result of `rules.specs(tree, rule)`.
        mesh: the mesh, to check the names of axes.
    """
    arrays = eqx.filter(tree, is_inexact)
    given = by_path(specs)
    paths = [path for path, _ in jax.tree.leaves_with_path(arrays)]
    _check_given(paths, given, specs)
    leaves = dict(zip(map(dotted, paths), jax.tree.leaves(arrays), strict=True))

    def spec_of_moment(path, moment, of_state, spec_of_leaf, spec_without_leaf):
        """Returns the spec of one array of a state; `of_state` has the paths of all arrays of this
        state. `spec_of_leaf(name)` is the spec of a parameter. `spec_without_leaf` is the spec of
        an array that belongs to no parameter, such as a count."""
        i = parameter_index(path, paths, of_state)
        # A count belongs to no leaf.
        if i is None:
            return spec_without_leaf
        name = dotted(paths[i])
        return _moment_spec(moment, leaves[name], spec_of_leaf(name), name)

    def specs_of_group(group, members, lead, names):
        """Returns the specs of one group's state. `members` are the paths of the group's leaves.
        The first `lead` dims of these leaves stack layers. The axes `names` may split other dims in
        a leaf's own spec. In the returned specs, these axes split only the first `lead` dims."""

        # `given` has the parameters' specs and `leaves` the parameters, by path.
        def spec_of_leaf(name):
            return _gathered_spec(padded(given[name], leaves[name].ndim), lead, names)

        # An array that belongs to no leaf, such as a count, has one number for each layer. The
        # array is split like the layers of the first member, which stands for all members of the
        # group.
        by_layer = P(*spec_of_leaf(members[0])[:lead])

        of_group = {path for path, _ in jax.tree.leaves_with_path(group)}

        def spec_in_group(path, moment):
            return spec_of_moment(path, moment, of_group, spec_of_leaf, by_layer)

        return jax.tree.map_with_path(spec_in_group, group)

    def specs_of_node(path, node):
        """Returns the spec of an array of the state, or the specs of a `GatheredOptState`, which
        has one state for each group of leaves."""
        if not isinstance(node, GatheredOptState):
            return spec_of_moment(path, node, of_whole, given.get, P())
        # Refuses a misspelt axis in `names`. Else matrices would stay split over the axis that the
        # user meant, and in a group without layers no spec would have the misspelt name, so no
        # later error would tell of the mistake.
        if mesh is not None:
            check_axes(node.names, mesh.axis_names)
        groups = [
            specs_of_group(group, members, lead, node.names)
            for group, members, lead in zip(node.groups, node.members, node.leads, strict=True)
        ]
        return GatheredOptState(groups, node.names, node.members, node.leads)

    # Only shapes are computed, so the model may be larger than the memory of a device.
    state = jax.eval_shape(optimizer.init, arrays)
    of_whole = {path for path, _ in jax.tree.leaves_with_path(state)}
    return jax.tree.map_with_path(specs_of_node, state, is_leaf=_is_gathered)


def _is_gathered(node: Any) -> bool:
    """Returns whether a node of the state is the state of an optimizer of `parallax.optimizers`."""
    return isinstance(node, GatheredOptState)


def _check_given(paths: Sequence[Any], given: dict[str, PartitionSpec], specs: Specs) -> None:
    """Raises `ValueError` if a leaf at one of `paths` has no spec. `given` has the specs by path,
    and `specs` is the user's tree of specs, for the message."""
    missing = [path for path in paths if dotted(path) not in given]
    if missing:
        raise ValueError(
            f"optimizer_specs needs `specs` with the structure of `tree`: one PartitionSpec for "
            f"each of the {len(paths)} trainable arrays of `tree`. `specs` has no spec for "
            f"{dotted(missing[0]) or 'the tree itself'}; the structure of `specs` is "
            f"{jax.tree.structure(specs)}. Pass the result of rules.specs(tree, rule) for the same "
            "tree."
        )


def _gathered_spec(entries: list, lead: int, names: Sequence[str]) -> PartitionSpec:
    """Returns the spec of a leaf whose matrices are whole along the axes `names`.

    The leaf's layers, the first `lead` dims, are split over the axes `names` instead of the
    matrices. A leaf without layers (lead 0) is whole along the axes `names`.

    Args:
        entries: the entries of the parameter's spec, one for each dim.
        lead: how many leading dims are dims of stacked layers.
        names: the axes along which matrices are whole.
    """

    def as_entry(axes):
        """Returns the entry of a spec for a tuple of axes: None, a name, or a tuple of names."""
        if not axes:
            return None
        return axes[0] if len(axes) == 1 else axes

    matrix_entries = [entry_axes(entry) for entry in entries[lead:]]
    moved = [name for axes in matrix_entries for name in axes if name in names]
    remaining = [tuple(name for name in axes if name not in names) for axes in matrix_entries]
    # An axis can split only one dim, so it is added to the layers only if it splits none yet.
    used = {name for entry in entries for name in entry_axes(entry)}
    layers = [entry_axes(entry) for entry in entries[:lead]]
    if lead:
        # The last dim of layers is split over the axes that split it already, then the axes of
        # `names` that split the matrices, and then the axes of `names` that split no dim.
        # `optimizers.by_matrix` gives layers to devices in this order.
        layers[-1] = (*layers[-1], *moved, *(name for name in names if name not in used))
    return spec_of([as_entry(axes) for axes in (*layers, *remaining)])


def _moment_spec(moment: Any, leaf: Any, spec: PartitionSpec, path: str) -> PartitionSpec:
    """Returns the spec of a moment of the parameter `leaf`, which has `spec` and `path`.

    Raises `ValueError` if the leaf is split, and the moment has neither the leaf's shape nor this
    shape with some dims dropped or reduced to size 1.
    """
    if moment.shape == leaf.shape:
        return spec
    entries = padded(spec, leaf.ndim)
    # If the parameter is whole, so is its moment, whatever its shape.
    if not any(entry_axes(entry) for entry in entries):
        return P()
    # A reading assumes which dims of the leaf the moment kept (`dims`), and has the entries of the
    # spec for them; a dim that was reduced to size 1 is not split.
    readings = [
        [
            entries[dim] if size == leaf.shape[dim] else None
            for size, dim in zip(moment.shape, dims, strict=True)
        ]
        # Nothing records which dims were dropped, so all choices of dims that fit the sizes count.
        for dims in itertools.combinations(range(leaf.ndim), moment.ndim)
        if all(size in (1, leaf.shape[dim]) for size, dim in zip(moment.shape, dims, strict=True))
    ]
    if not readings:
        raise ValueError(
            f"{path}: the optimizer keeps an array of shape {moment.shape} for this leaf of shape "
            f"{leaf.shape}. The array's shape is not the leaf's shape with some dims dropped or "
            f"reduced to size 1, so the array cannot be split like the leaf, by {spec}. Wrap the "
            "optimizer in optimizers.whole, which keeps its state whole; or replicate the leaf "
            "with P(); or write the specs of this state by hand."
        )
    # A dim stays split only if all readings split it alike.
    return spec_of(
        [choices[0] if len(set(choices)) == 1 else None for choices in zip(*readings, strict=True)]
    )
