"""Pipeline parallelism: a checked table of jobs, run by all stages in step, without a conditional and in constant memory.

Legend: P stages, M microbatches, v chunks a stage, F forward, B backward. One program runs on all devices. In each tick every
stage runs the same lanes (F, the head, B), and where the table gives it no job, it computes on what is there and throws the
result away. A collective never stands under a predicate that differs between devices, where it would hang.

What a microbatch needs for its backward pass waits in as many slots as the schedule holds at once: 2P - 1 for 1F1B, whatever M
is. `kept` makes what a slot holds, `executor` runs the ticks, `lanes` say what happens in one.

Source: Narayanan et al., Efficient large-scale language model training on GPU clusters (arXiv 2104.04473), section 2.2, for
1F1B and its interleaved form; Yeung et al., Balancing pipeline parallelism with vocabulary parallelism (arXiv 2411.05288), for
the shared vocabulary.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from parallax import rules
from parallax.collectives import Axis, AxisLike
from parallax.collectives.cpu import ordered
from parallax.grads import Grad, axes_of, matching_parameters, mean_of_parts, replicated_axes, summed_over, varies_along
from parallax.pipeline import branches, carry, checks, kept, lanes
from parallax.pipeline.exchange import WHOLE, Exchange
from parallax.pipeline.executor import run
from parallax.pipeline.model import Functions, Model
from parallax.pipeline.rows import rows, stretches
from parallax.pipeline.uneven import in_model_order
from parallax.schedule import Schedule
from parallax.schedule.places import Placement, checked_placement
from parallax.typed import PyTree


class Aux(NamedTuple):
    """Auxiliary values of a pipeline whose stages have some.

    Attributes:
        head: the head's; None if it has none.
        stages: those of each chunk of layers, by its place in the model: [vP, ...] each.
    """

    head: PyTree
    stages: PyTree


def value_and_grad(
    enter: Callable[..., Any],
    stage: Callable[..., Any],
    head: Callable[..., Any],
    schedule: Schedule,
    axis: AxisLike,
    *,
    where: Callable[[PyTree], PyTree] = checks.blocks_of,
    trainable: PyTree = rules.is_inexact,
    keep: kept.Keep = kept.residuals,
    exchange: Exchange = WHOLE,
    scatter: Callable[[PyTree], PyTree] = lambda gradients: gradients,
    aux: Callable[[Any], Any] = mean_of_parts,
) -> Grad:
    """The grad arrow of `head(stage(... stage(enter(batch))))`, its stages run as `schedule` says: inside `mesh.spmd`.

    It equals `jax.value_and_grad` of the mean over M equal microbatches, on one device. The batch has its sequences as the
    first dim of every leaf, and is cut into M parts in order. Gradients are summed, and returned, in float32 or wider; those of
    parameters that are the same on all stages are all-reduced over the stages once, at the end.

    `params`, the first argument of all three functions, has all parameters; in `stage`, `where(params)` is the chunk of layers
    at hand, without the dim of chunks. What is read there has a gradient, wherever it is read.

    Each tick sends one activation to the next stage and one cotangent to the one before, by a `ppermute` for each array. The
    time is that of `schedule.makespan`; what is held at once is `schedule.slot_count` times what `keep` keeps of a chunk.

    Args:
        enter: `(params, part) -> x`: what enters the first stage, a tree of arrays. Those of floating-point numbers have a
            cotangent; others, such as masks, travel without. It runs on all stages in each forward tick, and counts on the
            first. It may be shared out over them, with collectives over `axis` inside.
        stage: `(params, x, part, position) -> x`: one chunk of layers; `position`, 0 to vP - 1, is its place in the model. It
            returns a tree like `x`, or an `Output` with a term of the loss or auxiliary values beside it.
        head: `(params, x, part) -> loss`, or `(loss, aux)`: a microbatch's mean loss. It runs on all stages, in the ticks in
            which the last one has finished a microbatch. A loss that varies over `axis` counts on the last stage; one that is
            the same on all was shared out (begin with `from_last`).
        schedule: the table; its stages are the size of `axis`.
        axis: the axis of the stages, or several as one; its mover joins the gradients of the parameters that all stages have.
        where: picks from `params` what is split over the stages, by default `params.blocks`. Each of its arrays has a first
            dim of v chunks.
        trainable: which leaves have a gradient, as in `step.init`; that of the others is None, and nothing is held for it.
        keep: what waits for the backward tick: `residuals`, or `inputs`, the stage's input alone, and the rest is computed again.
        exchange: how the stages' messages are sent: `WHOLE`, or `split_over` an axis whose devices all have them.
        scatter: what becomes of each microbatch's gradients before they are added up, such as `zero.reduce_scatter`, by which
            each replica keeps sums for its share alone (ZeRO-2). It is given a tree like the parameters, with None for what a
            lane does not differentiate and one chunk of the blocks, and runs in each tick of that lane.
        aux: what becomes of auxiliary values, which come stacked: the head's [M, ...] each, and those of stages, as `Aux.stages`,
            [M, vP, ...]. Where stages have some the arrow returns `((loss, Aux(head, stages)), gradients)`, and where the head
            alone has, `((loss, aux), gradients)`.

    Raises:
        ValueError: the schedule has other stages than the axis; the batch does not divide by M, or is empty;
            `params` has no `blocks`, and no `where` is given; an array of
            `where(params)` is not split over `axis`, or has no first dim of v; `stage` returns another tree than it
            takes; or one of the functions reads what it would have no gradient of: a parameter by closure, or, outside the
            stage, the blocks.
    """
    axis = Axis.of(axis)
    functions = Functions(enter, stage, head, where, trainable)

    def grad(params, batch):
        model = Model(functions, schedule, axis, params, batch)
        end = _both_ways(model, _choices(model, keep, exchange, scatter))
        sums = eqx.combine(end.ends, end.blocks)
        # What was the same on all stages is reduced; what is split over them is done.
        over = jax.tree.map(lambda w: replicated_axes(w, axis), matching_parameters(sums, params))
        losses, sums = jax.tree.map(lambda total: total / schedule.microbatches, (_losses(end), sums))
        losses, sums = summed_over((losses, sums), (_over(losses, axis), over), axis)
        return _with_aux(_total(losses), _stacked_aux(model, end, (losses, sums)), aux), sums

    return grad


def value(
    enter: Callable[..., Any],
    stage: Callable[..., Any],
    head: Callable[..., Any],
    schedule: Schedule,
    axis: AxisLike,
    *,
    where: Callable[[PyTree], PyTree] = checks.blocks_of,
    exchange: Exchange = WHOLE,
    aux: Callable[[Any], Any] = mean_of_parts,
) -> Callable[[PyTree, PyTree], Float[Array, ""] | tuple[Float[Array, ""], Any]]:
    """The loss arrow that `value_and_grad` differentiates, for evaluation: the schedule's forward lane alone, nothing kept.

    Arguments and errors are those of `value_and_grad`; with auxiliary values it returns `(loss, aux)`. A parameter may come by
    closure.
    """
    axis = Axis.of(axis)
    functions = Functions(enter, stage, head, where, trainable=False)

    def loss(params, batch):
        model = Model(functions, schedule, axis, params, batch)
        choices = _choices(model, kept.nothing, exchange, lambda gradients: gradients)
        per_stage = schedule.per_stage
        end = branches.forward_only(model, schedule, choices) if per_stage else _run(model, lanes.forward_only, choices)
        losses = jax.tree.map(lambda total: total / schedule.microbatches, _losses(end))
        losses = summed_over(losses, _over(losses, axis), axis)
        return _with_aux(_total(losses), _stacked_aux(model, end, losses), aux)

    return loss


def unsplit(
    enter: Callable[..., Any],
    stage: Callable[..., Any],
    head: Callable[..., Any],
    *,
    where: Callable[[PyTree], PyTree] = checks.blocks_of,
    placement: Placement | None = None,
) -> Callable[[PyTree, PyTree], Any]:
    """What a pipeline of these functions equals: the loss arrow of one device that has all blocks, [v, ...] each, unsplit.

    It runs chunk after chunk on the whole batch. With auxiliary values it returns `(loss, aux)`: the head's, or, where stages
    have some, `Aux`, those of the stages [v] each.

    With a schedule's `placed` as `placement`, [v, P], it runs place after place of the model, as the pipeline does: each with
    its own layers, `position` and auxiliary values, which are [vP] each. Without it the chunks are as long as all stages' are
    together, and in the model's order: blocks with any but a looped placement need it.
    """

    def loss(params, batch):
        arrays, static = eqx.partition(where(params), eqx.is_array)
        if placement is not None:
            places = placement.size
            arrays = in_model_order(arrays, placement)
            arrays = jax.tree.map(lambda w: w.reshape(places, -1, *w.shape[2:]), arrays)
        x, made = enter(params, batch), []
        for place in range(jax.tree.leaves(arrays)[0].shape[0]):
            own = eqx.combine(jax.tree.map(lambda w: w[place], arrays), static)  # noqa: B023
            made.append(checks.output(stage(eqx.tree_at(where, params, own), x, batch, jnp.asarray(place, jnp.int32))))
            x = made[-1].x
        total, of_head = checks.loss_and_aux(head(params, x, batch))
        total = sum((each.loss for each in made if each.loss is not None), start=total)
        found = Aux(of_head, jax.tree.map(lambda *each: jnp.stack(each), *(each.aux for each in made)))
        return _with_aux(total, found, lambda aux: aux)

    return loss


def at_once(enter: Callable[..., Any], stage: Callable[..., Any], head: Callable[..., Any]) -> Callable[[PyTree, PyTree], Any]:
    """What a pipeline of these functions equals whose blocks have no dim of chunks: the loss arrow of one stage with all layers.

    With auxiliary values it returns `(loss, aux)`: the head's, or, where the stage has some, `Aux`, those of the stage [1, ...].
    """

    def loss(params, batch):
        made = checks.output(stage(params, enter(params, batch), batch, 0))
        total, of_head = checks.loss_and_aux(head(params, made.x, batch))
        found = Aux(of_head, jax.tree.map(lambda leaf: leaf[None], made.aux))
        return _with_aux(total if made.loss is None else total + made.loss, found, lambda aux: aux)

    return loss


def from_last(x: PyTree, axis: AxisLike) -> PyTree:
    """The last stage's `x` on all stages, for a head that they share. One all-reduce; its transpose keeps the cotangent."""
    axis = Axis.of(axis)
    last = axis.index() == axis.size() - 1
    return axis.all_reduce(jax.tree.map(lambda leaf: jnp.where(last, leaf, jnp.zeros((), leaf.dtype)), x))


def own_chunks(stages: PyTree, axis: AxisLike, placement: Placement) -> PyTree:
    """What `Aux.stages` has of this stage's chunks, `[vP, ...] -> [v, ...]` each: beside its blocks.

    For `step.make(after_update=...)`.

    `placement` is the schedule's `placed`, [v, P]. With an axis of `()` and a placement of one stage it is all of them, as
    `unsplit` returns them.

    Raises:
        ValueError: the placement has other stages than the axis, or other places than `stages` has values.
    """
    axis = Axis.of(axis)
    placement = checked_placement("pipeline.own_chunks", placement)
    if placement.shape[1] != axis.size():
        raise ValueError(
            f"pipeline.own_chunks: the placement has {placement.shape[1]} stages, and the axis {axis.names!r} {axis.size()} "
            "devices. Pass the `placed` of the schedule that ran."
        )
    own_places = jnp.asarray(placement)[:, axis.index()]

    def own(path, leaf):
        if leaf.shape[:1] != (placement.size,):
            raise ValueError(
                f"pipeline.own_chunks: {checks.form(path, leaf)} must have a first dim of {placement.size}, the places of the "
                "model. Pass what `Aux.stages` has, with the mean over microbatches taken."
            )
        return leaf[own_places]

    return jax.tree.map_with_path(own, stages)


def _choices(model: Model, keep: kept.Keep, exchange: Exchange, scatter: Callable[[PyTree], PyTree]) -> carry.Choices:
    halves = keep(model.stage)
    return carry.Choices(halves, lanes.kept_by(model, halves), exchange, scatter)


def _both_ways(model: Model, choices: carry.Choices) -> carry.Carry | branches.Held:
    """What loss and gradients end with: run as the schedule's tables say."""
    if model.schedule.weight is None:
        return _run(model, lanes.both_ways, choices)
    in_two, handed = lanes.two_of(model, choices.halves)
    choices = choices._replace(in_two=in_two, handed=handed)
    if model.schedule.per_stage:
        return branches.both_ways(model, model.schedule, choices)
    return _run(model, lanes.in_three, choices)


def _run(model: Model, make_lanes: Callable[..., lanes.Lanes], choices: carry.Choices) -> carry.Carry:
    """The carry after all ticks."""
    table = rows(model.schedule)
    own = lambda after=None: make_lanes(model, model.params if after is None else model.params_after(after), choices)
    return run(own, table, stretches(model.schedule), carry.start(model, choices, table))


def _losses(end: carry.Carry | branches.Held) -> tuple[Float[Array, ""], ...]:
    """The sums of the head's loss and of the stages' own."""
    return (end.loss,) if end.terms is None else (end.loss, end.terms)


def _total(losses: tuple[Float[Array, ""], ...]) -> Float[Array, ""]:
    return functools.reduce(jnp.add, losses)


def _over(losses: tuple[Array, ...], axis: Axis) -> tuple[tuple[str, ...], ...]:
    return tuple(axes_of(axis) if varies_along(loss, axis) else () for loss in losses)


def _stacked_aux(model: Model, end: carry.Carry | branches.Held, after: PyTree) -> Aux:
    """The auxiliary values, the same on all stages: the head's [M, ...], those of the stages [M, vP, ...]."""
    axis, P = model.axis, model.schedule.stages

    def of_head(values):
        return values if model.shared_out(values) else axis.all_reduce(carry.masked(model.last, ordered(values, after)))

    def of_stages(values):
        M, v, *shape = values.shape
        apart = jnp.zeros((M, v, P, *shape), values.dtype)
        own = lax.dynamic_update_index_in_dim(apart, ordered(values, after), model.index, 2)
        found = axis.all_reduce(own).reshape(M, v * P, *shape)
        order = np.argsort(model.schedule.placed, axis=None)
        return found if np.array_equal(order, np.arange(v * P)) else found[:, order]

    return Aux(jax.tree.map(of_head, end.of_head), jax.tree.map(of_stages, end.of_stages))


def _with_aux(loss: Array, found: Aux, aux: Callable[[Any], Any]) -> Any:
    """What a loss arrow returns: the loss, or `(loss, aux)` where there are auxiliary values."""
    if jax.tree.leaves(found.stages):
        return loss, aux(found)
    return (loss, aux(found.head)) if jax.tree.leaves(found.head) else loss
