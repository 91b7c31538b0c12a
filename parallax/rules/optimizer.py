"""Where the optimizer's state lives: beside the parameters that it belongs to."""

import itertools
from typing import Any

import equinox as eqx
import jax
import optax
from jax.sharding import PartitionSpec
from jax.sharding import PartitionSpec as P

from parallax.mesh import entry_axes
from parallax.rules.applied import is_leaf_array, paths
from parallax.rules.placement import padded, spec_of
from parallax.typed import PyTree, Specs


def optimizer_specs(optimizer: optax.GradientTransformation | optax.MultiSteps, tree: PyTree, specs: Specs) -> Specs:
    """A spec for each array of `optimizer.init(arrays of tree)`: moments follow their parameter, all else (counts) is `P()`.

    `specs` is what `specs(tree, rule)` gives. A moment of another shape than its parameter must be that parameter reduced over
    some dims (dropped, or kept as 1), as the factored moments of Adafactor are: each dim that is left stays split as it was.
    Where equal sizes leave open which dim was reduced, only the splits that all readings share are kept. Any other shape is a
    `ValueError`, unless the parameter is whole: then so is all its state.

    The specs say where the state lives, not that an update on shards equals one on the whole. Under `jit` on global arrays it
    always does; inside `shard_map` only for elementwise optimizers (Adam, momentum, Lion): a mean or norm over a leaf, such as
    Adafactor's clipping, is taken over the shard, and nothing raises.
    """
    arrays = eqx.filter(tree, is_leaf_array)
    treedef = jax.tree.structure(arrays)
    if treedef != jax.tree.structure(specs):
        raise ValueError(
            f"optimizer_specs needs one PartitionSpec for each of the {treedef.num_leaves} arrays of the tree, in its structure, "
            f"but got {jax.tree.structure(specs)}; pass what rules.specs(tree, rule) gives for this very tree."
        )
    names = jax.tree.unflatten(treedef, [path for path, _ in paths(arrays)])
    return optax.tree_map_params(
        optimizer,
        _moment_spec,
        jax.eval_shape(optimizer.init, arrays),
        arrays,
        specs,
        names,
        transform_non_params=lambda leaf: P(),
        is_leaf=lambda node: isinstance(node, optax.MaskedNode),
    )


def _moment_spec(moment: Any, leaf: Any, spec: PartitionSpec, path: str) -> PartitionSpec | optax.MaskedNode:
    if isinstance(moment, optax.MaskedNode):
        return moment
    if moment.shape == leaf.shape:
        return spec
    entries = padded(spec, leaf.ndim)
    if not any(entry_axes(entry) for entry in entries):
        return P()
    readings = [
        [entries[dim] if size == leaf.shape[dim] else None for size, dim in zip(moment.shape, dims, strict=True)]
        for dims in itertools.combinations(range(leaf.ndim), moment.ndim)
        if all(size in (1, leaf.shape[dim]) for size, dim in zip(moment.shape, dims, strict=True))
    ]
    if not readings:
        raise ValueError(
            f"{path}: the optimizer keeps an array of shape {moment.shape} for this leaf of shape {leaf.shape}, which is not "
            f"that leaf reduced over some dims, so it cannot follow the spec {spec}; replicate the leaf with P(), or write "
            f"the specs of this state by hand."
        )
    return spec_of([column[0] if len(set(column)) == 1 else None for column in zip(*readings, strict=True)])
