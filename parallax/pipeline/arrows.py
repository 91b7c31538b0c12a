"""Pipeline parallelism: a checked table of jobs, run by all stages in step, without a conditional and in constant memory.

Legend: P stages, M microbatches, v chunks a stage, F forward, B backward. One program runs on all devices. In each tick every
stage runs the same lanes (F, the head, B), and where the table gives it no job, it computes on what is there and throws the
result away. Which lanes run anywhere is constant over stretches of ticks, so each stretch is one `lax.scan`: a
collective never stands under a predicate that differs between devices, where it would hang.

What a microbatch needs for its backward pass (the residuals of `jax.vjp`, weights left out, or with `remat` the stage's input)
waits in as many slots as the schedule holds at once: 2P - 1 for 1F1B, whatever M is.

Source: Narayanan et al., Efficient large-scale language model training on GPU clusters (arXiv 2104.04473), section 2.2, for
1F1B and its interleaved form; Yeung et al., Balancing pipeline parallelism with vocabulary parallelism (arXiv 2411.05288), for
the shared vocabulary.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from parallax.collectives import Axis, AxisLike
from parallax.collectives.types import varying
from parallax.grads import Grad, axes_of, beside, missing, reduced, varies
from parallax.pipeline.executor import WHOLE, Run, Shares, Stages, check
from parallax.schedule import Schedule
from parallax.typed import PyTree


def value_and_grad(
    enter: Callable[..., Any],
    stage: Callable[..., Any],
    head: Callable[..., Any],
    schedule: Schedule,
    axis: AxisLike,
    *,
    where: Callable[[PyTree], PyTree] = lambda params: params.blocks,
    remat: bool = False,
    shares: Shares = WHOLE,
) -> Grad:
    """The grad arrow of `head(stage(... stage(enter(batch))))`, its stages run as `schedule` says: inside `mesh.spmd`.

    It equals `jax.value_and_grad` of the mean over M equal microbatches, on one device. The batch has its sequences as the
    first dim of every leaf, and is cut into M parts in order. Gradients are summed, and returned, in float32 or wider; those of
    parameters that are the same on all stages are all-reduced over the stages once, at the end.

    Each tick sends one activation to the next stage and one cotangent to the one before, by a `ppermute` each. The time is
    that of `schedule.makespan`; what is held at once is `schedule.slot_count` times a chunk's residuals.

    Args:
        enter: `(params, part) -> x`: the array that enters the first stage. It runs on all stages in each forward tick, and
            counts on the first. It may be shared out over them, with collectives over `axis` inside.
        stage: `(blocks, x, part, position) -> x`: one chunk of layers; `position`, 0 to vP - 1, is its place in the model.
        head: `(params, x, part) -> loss`: a microbatch's mean loss. It runs on all stages, in the ticks in which the last one
            has finished a microbatch. A loss that varies over `axis` counts on the last stage; one that is the same on
            all was shared out (begin with `from_last`).
        schedule: the table; its stages are the size of `axis`.
        axis: the axis of the stages; its mover joins the gradients of the parameters that all stages have.
        where: picks from `params` what is split over the stages. Each of its arrays has a first dim of v chunks.
        remat: keep the stage's input alone, and recompute the rest in the backward tick.
        shares: what ZeRO does inside the stages.

    Raises:
        ValueError: the schedule has other stages than the axis, or a weight lane; the batch does not divide by M; an array of
            `where(params)` is not split over `axis`, or has no first dim of v; or `stage` changes the shape of `x`.
    """
    if schedule.weight is not None:
        raise ValueError(
            "pipeline.value_and_grad runs schedules of a forward and a backward lane, and this one has a weight lane. "
            "Take schedule.one_f_one_b or schedule.gpipe; schedule.zero_bubble is there to compare and to draw."
        )

    axis = Axis.of(axis)

    def grad(params, batch):
        check(schedule, axis, where(params))
        stages = Stages(enter, stage, head, where, remat, shares)
        loss, sums = Run(stages, schedule, axis, varying(params, axis.names), batch, backward=True)()
        results = jax.tree.map(lambda total: total / schedule.microbatches, (loss, sums))
        # What was the same on all stages is reduced; what is split over them is done.
        over = jax.tree.map(lambda w: missing(w, axis), beside(sums, params))
        return reduced(results, (axes_of(axis) if varies(loss, axis) else (), over), axis)

    return grad


def value(
    enter: Callable[..., Any],
    stage: Callable[..., Any],
    head: Callable[..., Any],
    schedule: Schedule,
    axis: AxisLike,
    *,
    where: Callable[[PyTree], PyTree] = lambda params: params.blocks,
) -> Callable[[PyTree, PyTree], Float[Array, ""]]:
    """The loss arrow that `value_and_grad` differentiates, for evaluation: the schedule's forward lane alone, nothing kept.

    Arguments and errors are those of `value_and_grad`.
    """
    axis = Axis.of(axis)

    def loss(params, batch):
        check(schedule, axis, where(params))
        stages = Stages(enter, stage, head, where, remat=False, shares=WHOLE)
        loss = Run(stages, schedule, axis, varying(params, axis.names), batch, backward=False)()[0] / schedule.microbatches
        return axis.all_reduce(loss) if varies(loss, axis) else loss

    return loss


def from_last(x: Shaped[Array, "*dims"], axis: AxisLike) -> Shaped[Array, "*dims"]:
    """The last stage's `x` on all stages, for a head that they share. One all-reduce; its transpose keeps the cotangent."""
    axis = Axis.of(axis)
    last = axis.index() == axis.size() - 1
    return axis.all_reduce(jnp.where(last, x, jnp.zeros((), x.dtype)))
