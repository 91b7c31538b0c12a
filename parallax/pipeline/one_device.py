"""Loss functions for one device. They compute the same loss as a pipeline that is made of the same
embed, stage and head.

Legend: P stages, v chunks of layers per stage, L layers; a place is a chunk's position in the
model, 0 to vP - 1. The blocks are the parameters of the layers, and `aux` is a tree of values to
log. The user's functions are those of `pipeline.value_and_grad`: `embed(params, batch)` returns
`x`, `stage(params, x, batch, position)` returns the next `x`, and `head(params, x, batch)` the
loss, or (loss, aux).
"""

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from parallax._typing import PyTree
from parallax.pipeline import checks
from parallax.pipeline.layers import from_placement
from parallax.schedule.places import Placement


class Aux(NamedTuple):
    """Auxiliary values of a pipeline whose stages return some.

    Attributes:
        head: the values of the head; None if the head has no values.
        stages: the values of all chunks of layers, in the order of the model: arrays with one entry
            for each chunk of the model.
    """

    head: PyTree
    stages: PyTree


def unpipelined(
    embed: Callable[..., Any],
    stage: Callable[..., Any],
    head: Callable[..., Any],
    *,
    blocks: Callable[[PyTree], PyTree] = checks.blocks_of,
    placement: Placement | None = None,
) -> Callable[[PyTree, PyTree], Any]:
    """Returns a loss function for one device that holds all layers. A pipeline of the same `embed`,
    `stage` and `head` computes the same loss.

    `blocks(params)` picks the parameters of the layers, arrays [v, ...] for v chunks of layers per
    stage. The chunks of layers run one after another on the whole batch. If there are auxiliary
    values, the function returns `(loss, aux)`. If stages have auxiliary values, `aux` is an `Aux`,
    and the arrays of its `stages` are [v, ...]. If only the head has some, `aux` is the head's
    values.

    If `placement` is given, the function runs the chunks of all stages in the order of their
    positions in the model, as the pipeline does. The placement is an array [v, P] for P stages: the
    `placed` of a schedule. Each chunk then has its own `position` and its own auxiliary values: the
    arrays of `stages` are [vP, ...].

    Without a placement, the layers run in the order in which they are stored, as v chunks. Entry c
    of the arrays has the layers of chunk c of every stage, and runs as one chunk, at position c.
    The pipeline has other positions, so a `stage` that uses `position` needs the placement. The
    stored order is the model's order only if chunk c of stage s is at position c P + s (a looped
    placement).
    """

    def loss(params, batch):
        """Returns the loss, or `(loss, aux)`, of the whole batch."""
        arrays, static = eqx.partition(blocks(params), eqx.is_array)
        if placement is not None:
            arrays = from_placement(arrays, placement)  # same shapes, layers in the model's order
            places = placement.size
            # One entry for each place: [v, L / v, ...] -> [vP, L / (vP), ...].
            arrays = jax.tree.map(lambda w: w.reshape(places, -1, *w.shape[2:]), arrays)
        params_of_places = []
        # The parameters and the position of each chunk: vP chunks, one for each place, or v chunks
        # without a placement.
        for place in range(jax.tree.leaves(arrays)[0].shape[0]):
            of_place = eqx.combine(jax.tree.map(operator.itemgetter(place), arrays), static)
            position = jnp.asarray(place, jnp.int32)
            params_of_places.append((eqx.tree_at(blocks, params, of_place), position))
        return _loss(embed, stage, head, params, params_of_places, batch)

    return loss


def sequential(
    embed: Callable[..., Any], stage: Callable[..., Any], head: Callable[..., Any]
) -> Callable[[PyTree, PyTree], Any]:
    """Returns a loss function for one device that runs all layers in one call of `stage`, with
    `position` 0. A pipeline of the same `embed`, `stage` and `head` computes the same loss.

    The arrays of the layers have no leading dim of chunks. If there are auxiliary values, the
    function returns `(loss, aux)`. If the stage has auxiliary values, `aux` is an `Aux`, and the
    arrays of its `stages` are [1, ...]. If only the head has some, `aux` is the head's values.
    """

    def loss(params, batch):
        return _loss(embed, stage, head, params, [(params, 0)], batch)

    return loss


def _loss(
    embed: Callable[..., Any],
    stage: Callable[..., Any],
    head: Callable[..., Any],
    params: PyTree,
    params_of_places: list[tuple[PyTree, Any]],
    batch: PyTree,
) -> Any:
    """Runs embed, the stage at each (parameters, position) of `params_of_places`, and the head.

    Returns the loss, or `(loss, aux)` if there are auxiliary values: `aux` is an `Aux` if the
    stages have some, else the head's values alone. The loss is the head's loss plus the terms that
    the stages add to the loss.
    """
    x, outputs = embed(params, batch), []
    for of_place, position in params_of_places:
        outputs.append(checks.output(stage(of_place, x, batch, position)))
        x = outputs[-1].x
    total, of_head = checks.loss_and_aux(head(params, x, batch))
    total = sum((output.loss for output in outputs if output.loss is not None), start=total)
    aux = [output.aux for output in outputs]
    of_stages = jax.tree.map(lambda *values: jnp.stack(values), *aux)  # [places, ...] each
    # The auxiliary values are returned as they are: without microbatches there is no mean to take.
    return with_aux(total, Aux(of_head, of_stages), lambda aux: aux)


def with_aux(loss: Array, values: Aux, change: Callable[[Any], Any]) -> Any:
    """Returns the loss, or `(loss, change(...))` if there are auxiliary values. `change`, such as
    the mean over microbatches, is applied to `values` if stages have auxiliary values, else only to
    `values.head`."""
    if jax.tree.leaves(values.stages):
        return loss, change(values)
    return (loss, change(values.head)) if jax.tree.leaves(values.head) else loss
