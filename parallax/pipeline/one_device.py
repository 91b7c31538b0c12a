"""The loss on one device that a pipeline of the same functions equals."""

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
    """Auxiliary values of a pipeline whose stages have some.

    Attributes:
        head: the head's; None if it has none.
        stages: those of each chunk of layers, by its place in the model: [vP, ...] each.
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
    """Returns the loss function that a pipeline of these functions equals, on one device with all
    blocks.

    The blocks are [v, ...] each, and the chunks run one after another on the whole batch. With
    auxiliary values it returns `(loss, aux)`: the head's, or, where stages have some, `Aux`, those
    of the stages [v] each.

    With a schedule's `placed` as `placement`, [v, P], it runs place after place of the model, as
    the pipeline does: each with its own layers, `position` and auxiliary values, which are [vP]
    each. Without it the chunks are as long as those of all stages together, and in the model's
    order: blocks with any but a looped placement need it.
    """

    def loss(params, batch):
        arrays, static = eqx.partition(blocks(params), eqx.is_array)
        if placement is not None:
            arrays = from_placement(arrays, placement)
            places = placement.size
            arrays = jax.tree.map(lambda w: w.reshape(places, -1, *w.shape[2:]), arrays)
        params_of_places = []
        # Unrolled: each place has its own parameters and auxiliary values.
        for place in range(jax.tree.leaves(arrays)[0].shape[0]):
            of_place = eqx.combine(jax.tree.map(operator.itemgetter(place), arrays), static)
            position = jnp.asarray(place, jnp.int32)
            params_of_places.append((eqx.tree_at(blocks, params, of_place), position))
        return _loss(embed, stage, head, params, params_of_places, batch)

    return loss


def sequential(
    embed: Callable[..., Any], stage: Callable[..., Any], head: Callable[..., Any]
) -> Callable[[PyTree, PyTree], Any]:
    """Returns the loss function that a pipeline of these functions equals, of one stage with all
    layers.

    Its blocks have no dim of chunks. With auxiliary values it returns `(loss, aux)`: the head's,
    or, where the stage has some, `Aux`, those of the stage [1, ...].
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
    """Returns the loss on one device of stages with these parameters and positions."""
    x, outputs = embed(params, batch), []
    for of_place, position in params_of_places:
        outputs.append(checks.output(stage(of_place, x, batch, position)))
        x = outputs[-1].x
    total, of_head = checks.loss_and_aux(head(params, x, batch))
    total = sum((output.loss for output in outputs if output.loss is not None), start=total)
    aux = [output.aux for output in outputs]
    of_stages = jax.tree.map(lambda *values: jnp.stack(values), *aux)
    return with_aux(total, Aux(of_head, of_stages), lambda aux: aux)


def with_aux(loss: Array, values: Aux, aux: Callable[[Any], Any]) -> Any:
    """Returns the value of a loss function: the loss, or `(loss, aux)` where there are auxiliary
    values."""
    if jax.tree.leaves(values.stages):
        return loss, aux(values)
    return (loss, aux(values.head)) if jax.tree.leaves(values.head) else loss
