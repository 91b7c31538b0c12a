"""Stages with unequal numbers of layers: a table gives the number of layers of each chunk, and all
chunks are padded to the longest one.

Legend: P stages, v chunks per stage, L layers, n layers in the longest chunk. A place is the
position of a chunk in the model, 0 to vP - 1. A table of layers, [v, P], has in row c and column s
the number of layers of the chunk at place c P + s. A placement, [v, P], has in row c and column s
the place of chunk c of stage s. Blocks are the parameters of the layers, a tree of arrays. The
arrays are [L, ...], or [v, P n, ...], where dim 1 has P groups of n layers, one group for each
stage.

    table = pipeline.layers_per_stage(layers=10, stages=4)  # [[3, 3, 2, 2]]
    blocks = pipeline.pad_layers(blocks, table)  # [10, ...] -> [1, 12, ...], split over dim 1
    x = pipeline.run_layers(layer, params.blocks, x, position, table)  # in the stage
"""

import functools
import operator
from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int, Shaped

from parallax import mesh, trees
from parallax._typing import PyTree
from parallax.collectives import Axis, AxisLike
from parallax.pipeline import checks
from parallax.pipeline.traced import settled
from parallax.schedule.places import Placement, checked_placement, is_looped

Tree = TypeVar("Tree", bound=PyTree)
Layers = Shaped[np.ndarray, "chunks stages"]


def layers_per_stage(layers: int, stages: int, chunks: int = 1) -> Layers:
    """Returns the most even table of layers: if the number of layers is not a multiple of the
    number of chunks of all stages, the first chunks of the model have one layer more than the
    others.

    Raises:
        ValueError: there are fewer layers than chunks, so that a chunk would have no layer.
    """
    places = stages * chunks
    if layers < places:
        raise ValueError(
            f"pipeline.layers_per_stage: {layers} layers on {stages} stages of {chunks} chunks "
            f"leave a chunk without a layer. Use at least {places} layers, or fewer stages or "
            "chunks."
        )
    return (layers // places + (np.arange(places) < layers % places)).reshape(chunks, stages)


def pad_layers(blocks: Tree, table: Layers) -> Tree:
    """Returns `blocks` with padding, as [chunks per stage, stages x n, ...]; n is the number of
    layers of the longest chunk. The argument `blocks` is [layers, ...], with the layers in the
    order of the model. Dim 1 of the result is to be split over the stages.

    The padding repeats the last layer of a chunk. `run_layers` drops the outputs of the padding by
    a `where`, so the gradient of the padding is 0. The derivatives of these outputs must be finite,
    since the backward pass multiplies them by 0: 0 times an infinite derivative is NaN. An
    optimizer with weight decay still changes the padding.

    Raises:
        ValueError: `table` is not a valid table, or the sum of its layers is not the number of
            layers of `blocks`.
    """
    table = checked(table)
    longest, first = table.max(), _first(table)  # `first`: the number of each place's first layer
    # The number of the layer for each row of the result, [v, P, n]: places with fewer layers repeat
    # their last one.
    rows = first[..., None] + np.minimum(np.arange(longest), table[..., None] - 1)

    def leaf(w):
        """Returns the array `w`, [layers, ...], with padding, as [chunks, stages x n, ...]; n is
        `longest`. Each entry of `rows` is the index of a layer in `w`."""
        if w.shape[:1] != (table.sum(),):
            raise ValueError(
                f"pipeline.pad_layers needs arrays [{table.sum()}, ...] in the blocks, since the "
                f"table has {table.sum()} layers in all; got shape {w.shape}. Put the "
                "layers into the first dim."
            )
        return w[rows.reshape(len(table), -1)]

    return _map_arrays(leaf, blocks)


def unpad_layers(blocks: Tree, table: Layers) -> Tree:
    """Returns `blocks` without the padding, as [layers, ...], with the layers in the order of the
    model: the inverse of `pad_layers`. The argument `blocks` is [chunks per stage, stages x n,
    ...]; n is the number of layers of the longest chunk."""
    table = checked(table)
    longest, (chunks, stages) = table.max(), table.shape
    # The indices of the rows that are not padding, among all v P n rows.
    real = np.flatnonzero((np.arange(longest) < table[..., None]).reshape(-1))

    def leaf(w):
        """Returns the array `w`, [chunks, stages x n, ...], without the padding, as [layers, ...];
        n is `longest`. `real` has the indices of the rows that are not padding."""
        if w.shape[:2] != (chunks, stages * longest):
            raise ValueError(
                f"pipeline.unpad_layers: the table is for blocks [{chunks}, {stages * longest}, "
                f"...], and an array of the blocks has shape {w.shape}. Pass the whole model, "
                "outside of mesh.spmd, and the table that padded it."
            )
        return w.reshape(-1, *w.shape[2:])[real]

    return _map_arrays(leaf, blocks)


def run_layers(
    layer: Callable[[Any, Any, Int[Array, ""]], Any],
    blocks: PyTree,
    x: Tree,
    position: Int[Array, ""],
    table: Layers,
) -> Tree:
    """Returns `x` after the layers of the chunk at the place `position` in the model. Each layer is
    one call `layer(weights, x, number)`, which returns the next `x`; `number` is the layer's index
    among all layers of the model.

    `blocks` are the blocks of one chunk, with the padding. Each chunk runs as many layers as the
    longest chunk, since all stages run one program; if a chunk has fewer layers, the results of the
    padding are dropped. So a pipeline with the table [[3, 3, 2, 2]] takes the time of 12 layers,
    not of 10.
    """
    table = checked(table)
    # This place's number of layers, and the index of its first layer. `position` is traced, so it
    # cannot index a NumPy array.
    count = jnp.asarray(table.reshape(-1), jnp.int32)[position]
    first = jnp.asarray(_first(table).reshape(-1), jnp.int32)[position]
    arrays, static = eqx.partition(blocks, eqx.is_array)

    def layer_or_none(x, weights_and_number):
        """Returns `x` after the layer in row `i` of the blocks, or `x` itself if that row is
        padding. Padding begins at row `count`. `first` is the index of this chunk's first layer.
        The function is a body of `lax.scan`, so it also returns None: nothing is stacked."""
        weights, i = weights_and_number
        # Padding is a copy of the place's last layer, and has its number.
        y = layer(eqx.combine(weights, static), x, first + jnp.minimum(i, count - 1))
        # A choice, not a conditional: stages with fewer layers run the same collectives.
        return jax.tree.map(functools.partial(jnp.where, i < count), y, x), None

    layers = arrays, jnp.arange(table.max(), dtype=jnp.int32)

    first_layer = jax.tree.map(operator.itemgetter(0), layers)
    # The carry of a loop must vary along the same axes before and after each iteration. `settled`
    # casts `x` to vary along the axes along which the result of a layer varies.
    x = settled(x, lambda x: jax.eval_shape(layer_or_none, x, first_layer)[0])
    return lax.scan(layer_or_none, x, layers)[0]


def _map_arrays(f: Callable[[Any], Any], blocks: Tree) -> Tree:
    """Returns the blocks with `f` applied to their arrays, or to their `ShapeDtypeStruct`s."""
    arrays, static = eqx.partition(blocks, mesh.is_array)
    return eqx.combine(jax.tree.map(f, arrays), static)


def checked(table: Layers) -> Layers:
    """Returns the table as a NumPy array. Raises `ValueError` unless the table is [chunks, stages],
    of whole numbers above 0. A chunk without layers has no last layer that its padding could
    repeat."""
    table = np.asarray(table)
    if table.ndim != 2 or table.dtype.kind not in "iu":
        raise ValueError(
            "A table of layers must be an array [chunks, stages] of whole numbers, such as "
            f"[[3, 3, 2, 2]]; got {table.dtype} of shape {table.shape}."
        )
    if table.size and table.min() < 1:
        chunk, stage = np.argwhere(table < 1).tolist()[0]
        raise ValueError(
            f"A table of layers has {table[chunk, stage]} for chunk {chunk} of stage {stage}, and "
            "each chunk needs at least one layer, since padding repeats the chunk's last layer. "
            "Give this chunk a layer of another chunk, or use fewer stages."
        )
    return table


def _first(table: Layers) -> Layers:
    """Returns, for each chunk of each stage, the index of its first layer in the model: [chunks,
    stages]."""
    return (np.cumsum(table) - table.reshape(-1)).reshape(table.shape)


def to_placement(blocks: Tree, placement: Placement) -> Tree:
    """Returns `blocks`, [v, L / v, ...] for v chunks per stage, in the order that a schedule with
    this placement needs. The placement, [v, P], has each chunk's place in the model. The argument
    `blocks` is in the order of the model.

    A placement is looped if chunk c of stage s is at place c P + s, with P stages. The blocks are
    then returned as they are. Every schedule that the executor `lockstep` runs has a looped
    placement. If the chunks have unequal numbers of layers, first pad `blocks` with `pad_layers`.

    Raises:
        ValueError: dim 0 of the blocks and dim 0 of the placement differ, or the number of layers
            is not a multiple of v P.
    """
    # The layers of chunk c of stage s are group c P + s of the result, and group `placement[c, s]`
    # of `blocks`. So the raveled placement has, for each group of the result, the group to take.
    return _reordered("pipeline.to_placement", blocks, placement, np.ravel(placement))


def from_placement(blocks: Tree, placement: Placement) -> Tree:
    """Returns `blocks`, [v, L / v, ...] for v chunks per stage, in the order of the model. The
    argument `blocks` is in the order that a schedule with this placement needs: this function is
    the inverse of `to_placement`."""
    # The layers of chunk c of stage s are group c P + s of the argument `blocks`, of v P groups.
    # `argsort` of a placement gives, for each place in the model, the number of this group.
    order = np.argsort(placement, axis=None)
    return _reordered("pipeline.from_placement", blocks, placement, order)


def _reordered(
    where: str, blocks: Tree, placement: Placement, order: Int[np.ndarray, " places"]
) -> Tree:
    """Returns `blocks`, [chunks, layers / chunks, ...], with the chunks in another order. A group
    is the layers of one chunk of one stage; group k of the result is group `order[k]` of `blocks`.
    Raises `ValueError` for arrays of other shapes. The message begins with `where`, the name of the
    function that the user called."""
    v, P = checked_placement(where, placement).shape

    def leaf(w):
        """Returns `w`, [chunks, layers / chunks, ...], with the chunks in the new order. A group is
        the layers of one chunk of one stage; group k of the result is group `order[k]` of `w`."""
        # Each place has the same number of layers: places with fewer were padded.
        if w.ndim < 2 or w.shape[0] != v or w.shape[1] % P:
            raise ValueError(
                f"{where}: {v} chunks on each of {P} stages need blocks whose arrays have the "
                f"shape [{v}, L / {v}, ...], where L, the number of layers, is a multiple of "
                f"{v * P}; got {w.shape}."
            )
        # A looped placement is the model's order, so nothing is copied.
        if is_looped(placement):
            return w
        return w.reshape(v * P, -1, *w.shape[2:])[order].reshape(w.shape)

    return _map_arrays(leaf, blocks)


def local_chunks(stages: PyTree, axis: AxisLike, placement: Placement) -> PyTree:
    """Returns the auxiliary values of this stage's chunks. `stages` has the auxiliary values of all
    chunks of the model, with one row for each chunk, as in `Aux.stages`; the result has only the
    rows of this stage's chunks.

    Call it in the function that `step.make` takes as `after_update`. That function may use these
    values to change this stage's blocks. For example, it may compute new biases of the experts from
    the loads of the experts.
    `placement` is the schedule's `placed`, [chunks, stages]. On one device with `unpipelined`, pass
    the axis `()` and a placement of one stage: then all chunks are on this stage.

    Raises:
        ValueError: the placement and the axis have different numbers of stages, or the placement
            and the values have different numbers of chunks.
    """
    axis = Axis.of(axis)
    placement = checked_placement("pipeline.local_chunks", placement)
    if placement.shape[1] != axis.size():
        raise ValueError(
            f"pipeline.local_chunks: the placement has {placement.shape[1]} stages, and the axis "
            f"{axis.names!r} has {axis.size()} devices. Pass the `placed` of the schedule that ran."
        )
    # The device's own index picks its column of the placement: the places of its chunks, [v].
    local_places = jnp.asarray(placement)[:, axis.index()]

    def of_this_stage(path, leaf):
        """Returns the rows of this stage's chunks, from an array with one row for each chunk of the
        model."""
        if leaf.shape[:1] != (placement.size,):
            raise ValueError(
                f"pipeline.local_chunks: {checks.form(path, leaf)} must have a first dim of "
                f"{placement.size}, the number of chunks of all stages. Pass the values of "
                "`Aux.stages`, after the mean over microbatches."
            )
        return leaf[local_places]

    return jax.tree.map_with_path(of_this_stage, stages)


def stored(
    blocks: Callable[[Any], Any], placement: Placement, *, table: Layers | None = None
) -> trees.DiskForm:
    """Returns the pair of functions with which `Checkpoints` stores the model's blocks, [chunks,
    layers / chunks, ...], as [layers, ...]. Both take and return a state. One runs before the state
    is written, the other after it is read.

    On disk the layers are in the order of the model. So a run with another placement, or without a
    pipeline, can read the layers. The optimizer's arrays for the blocks are stored in the same way.
    An optimizer's array belongs to a leaf of the blocks if two conditions hold: its path ends with
    the path of the leaf, and the first two dims of both (on disk, the first dim) have equal sizes.

    Args:
        blocks: picks the blocks from the model, as in `pipeline.value_and_grad`.
        placement: the schedule's `placed`, `[chunks, stages]`.
        table: the table of layers that `pad_layers` took; None if the blocks have no padding. The
            padding is not stored.
    """
    placement = checked_placement("pipeline.stored", placement)
    layers = None if table is None else checked(table)

    def to_disk(w):  # an array of the blocks, [v, L / v, ...] -> [L, ...]
        w = from_placement(w, placement)
        return w.reshape(-1, *w.shape[2:]) if layers is None else unpad_layers(w, layers)

    def from_disk(w):  # [L, ...] -> [v, L / v, ...]
        w = w.reshape(len(placement), -1, *w.shape[1:]) if layers is None else pad_layers(w, layers)
        return to_placement(w, placement)

    def on_blocks(change, dims):
        """Returns a function that takes a state and applies `change` to the arrays of the blocks,
        and to the optimizer's arrays for them. `dims` is the number of first dims that run over
        chunks and layers: 2 in memory, [chunks, layers / chunks, ...], and 1 on disk, [layers,
        ...]."""

        def converted(state):
            """Returns the state with `change` applied to the blocks, and to the optimizer's arrays
            for them."""
            in_blocks = checks.marked(blocks, state.model)
            named = jax.tree.leaves_with_path(state.model)
            paths = [path for path, _ in named]
            leading = [  # the first dims of each array in the blocks, None for the model's others
                x.shape[:dims] if is_block and mesh.is_array(x) else None
                for (_, x), is_block in zip(named, jax.tree.leaves(in_blocks), strict=True)
            ]

            def leaf(path, x):
                """Returns `change(x)` if `x`, a leaf of the state, is an array of the blocks or an
                optimizer's array for them. Returns `x` otherwise."""
                # The index of the model's leaf with which `path` ends; None if there is none.
                i = trees.parameter_index(path, paths)
                # The optimizer may also hold arrays of other shapes, such as factored moments.
                is_block = i is not None and mesh.is_array(x) and leading[i] == x.shape[:dims]
                return change(x) if is_block else x

            return jax.tree.map_with_path(leaf, state)

        return converted

    # The functions of a state on its way to the disk, and back.
    return trees.DiskForm(on_blocks(to_disk, 2), on_blocks(from_disk, 1))
