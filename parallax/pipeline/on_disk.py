"""A pipeline's state in a checkpoint that any layout can read: blocks as [L, ...] there, cut into chunks here.

Legend: v chunks a stage, L layers.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax

from parallax import mesh
from parallax.pipeline.uneven import Layers, arranged, checked, in_model_order, padded, unpadded
from parallax.schedule.places import Placement, checked_placement
from parallax.typed import PyTree


def stored(where: Callable[[Any], Any], placement: Placement, *, table: Layers | None = None) -> dict[str, Callable[..., Any]]:
    """Arguments for `Checkpoints`, of a state whose model's blocks, `where(model)`, are [v, L / v, ...]: stored as [L, ...].

    On disk the layers are in the order of the model, so that a run with another placement, or without a pipeline, reads them.
    The optimizer's arrays of the blocks are stored in the same way: leaves whose path ends as that of a leaf of `state.model`,
    with its first dims.

    Args:
        where: picks the blocks from the model, as in `pipeline.value_and_grad`.
        placement: the schedule's `placed`, `[chunks, stages]`.
        table: of uneven layers, by which the blocks were `padded`; what pads them is not stored.
    """
    placement = checked_placement("pipeline.stored", placement)
    layers = None if table is None else checked(table)

    def to_disk(w):
        w = in_model_order(w, placement)
        return w.reshape(-1, *w.shape[2:]) if layers is None else unpadded(w, layers)

    def from_disk(w):
        w = w.reshape(len(placement), -1, *w.shape[1:]) if layers is None else padded(w, layers)
        return arranged(w, placement)

    def over(change, dims):
        def converted(state):
            of_model = _leading(where, state.model, dims)

            def leaf(path, x):
                return change(x) if _is_block(path, x, of_model, dims) else x

            return jax.tree.map_with_path(leaf, state)

        return converted

    return {"to_disk": over(to_disk, 2), "from_disk": over(from_disk, 1)}


def _leading(where: Callable[[Any], Any], model: PyTree, dims: int) -> dict[tuple[str, ...], tuple[int, ...] | None]:
    """By path, the first dims of each of the blocks' arrays in the model; None for the rest."""
    in_blocks = eqx.tree_at(
        where, jax.tree.map(lambda _: False, model), replace_fn=lambda part: jax.tree.map(lambda _: True, part)
    )
    marks = dict(jax.tree.leaves_with_path(in_blocks))
    named = jax.tree.leaves_with_path(model)
    return {_names(path): tuple(x.shape[:dims]) if marks[path] and mesh.is_array(x) else None for path, x in named}


def _is_block(path: Any, x: Any, of_model: dict[tuple[str, ...], tuple[int, ...] | None], dims: int) -> bool:
    """Whether an array is one of the blocks, or goes with one in the optimizer's state: the longest path that fits says it."""
    names = _names(path)
    found = next((of_model[names[i:]] for i in range(len(names)) if names[i:] in of_model), None)
    return found is not None and mesh.is_array(x) and tuple(x.shape[:dims]) == found


def _names(path: Any) -> tuple[str, ...]:
    return tuple(mesh.dotted((entry,)) for entry in path)
