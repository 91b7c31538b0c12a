"""Counts the calls of each part of a pipeline's step on a device, and the slots (places in a
buffer) that the device needs.

In *lockstep* all stages run the same kinds of job (lanes) in a tick, even a stage that has no
microbatch for a job. Closed forms then count the ticks of each lane. In the other schedules each
stage has a job of its own in a tick, and the counts are read from the schedule's table. A *slot* is
a place in a buffer for one microbatch's arrays that wait for a later tick.

Legend: P stages, M microbatches, v chunks per stage, F forward, I the input's gradient, W the
weights' gradient.
"""

import functools
from typing import Any, NamedTuple

from parallax import pipeline
from parallax.layout import Layout
from parallax.models import recipe
from parallax.schedule import Schedule
from parallax.validate import PER_STAGE


class Jobs(NamedTuple):
    """How often a step calls each part of the model on one device, and how many slots (places in a
    buffer for arrays that wait) the device needs. Without a pipeline the calls are those of
    gradient accumulation: one for each microbatch.

    Attributes:
        forward: ticks with a forward pass.
        backward: ticks with a backward pass.
        heads: calls of the head.
        last: how many ticks at the end of the schedule run the same kinds of job as the very last
            tick.
        weights: ticks with gradients of the stages' weights.
        slots: places in the buffer of residuals; each place has the residuals of one chunk for one
            microbatch. In lockstep, a stage without a microbatch runs the forward job too, on
            garbage, and may need one more place for the residuals of this job.
        deferred: places for the arrays that the job I (the input's gradient) keeps for the job W
            (the weights' gradients), which runs later.
        arrivals: places for arrays that have come from other stages and wait for their job.
        hops: messages to other stages.
        embeds: calls of the embedding.
        leaves: calls of the embedding's backward pass.
    """

    forward: int
    backward: int
    heads: int
    last: int
    weights: int
    slots: int
    deferred: int
    arrivals: int
    hops: int
    embeds: int
    leaves: int


def jobs(layout: Layout) -> Jobs:
    """Returns how often a layout's step calls each part of the model on one device, and how many
    slots (places in a buffer for arrays that wait) the device needs. The class `Jobs` explains the
    fields of the result."""
    P, M, v = layout.stage, layout.microbatches, layout.chunks
    if not in_lockstep(layout):
        table = table_of(layout)
        # Every device runs F, I and W once for each microbatch and chunk, M v times. Every tick
        # sends one message for each distance between stages that the table uses.
        hops = table.ticks * len(pipeline.distances(table))
        return Jobs(
            forward=M * v,
            backward=M * v,
            heads=M,
            last=table.ticks,
            weights=M * v,
            slots=table.slot_count,
            deferred=table.deferred_count,
            arrivals=table.arrival_count + 1,  # one for ticks in which nothing arrives
            hops=hops,
            embeds=M,
            leaves=M,
        )
    # In GPipe a microbatch enters the pipeline in each tick, and the last one needs P - 1 more
    # ticks to reach the last stage. Then B, which is I and W in one job, has as many ticks. There
    # is a slot for each microbatch, and one for the ticks without a job.
    if layout.schedule == "gpipe":
        ticks, last, weights, slots, deferred = M + P - 1, M + P - 1, M + P - 1, M + 1, 0
    # In 1F1B one chunk of a microbatch enters in each tick. B begins v P - 1 ticks after F, when
    # the first microbatch reaches the last of the v P chunks, and so ends v P - 1 ticks after F:
    # these `last` ticks run only B. The slots: on the first stage B of chunk c (from 0) comes
    # 2 (v - c) P - 2 ticks after F. So a slot is in use for 2 (v - c) P - 1 ticks, those of F and B
    # included. The stage runs each chunk in one of v ticks on average, so the slots in use are the
    # mean of these numbers over c: v P + P - 1.
    else:
        ticks, last, weights, deferred = M * v + P - 1, v * P - 1, M * v + P - 1, 0
        slots = min(M * v + 1, v * P + P - 1)  # with one chunk at most 2P - 1, for any M
    # W has a lane of its own: all stages run W in the last M v ticks. F has ended in the last
    # v P - 1 ticks, as in 1F1B. So the smaller of these two numbers of ticks (`last`) have I and W,
    # but no F. The last stage has its I in the first M v of the M v + P - 1 ticks of I, so there W
    # comes P - 1 ticks after I, and the arrays of P jobs I wait (this tick's included). If there
    # are fewer than P jobs, the arrays of all M v wait, and one place is for idle ticks.
    if layout.schedule == "zero_bubble_lockstep":
        last, weights, deferred = min(M * v, v * P - 1), M * v, min(M * v + 1, P)
    # Each tick of F sends an activation, and each tick of I a cotangent. The `last` ticks are one
    # loop. XLA unrolls a loop of one tick, and drops its message, which no later tick reads.
    hops = 2 * ticks - (last == 1)
    # In a pipeline the embedding runs before the first tick, and in each tick of F for the next
    # one. XLA embeds a single microbatch only once.
    embeds = ticks + 1 if layout.pipelined and M > 1 else M
    # In lockstep no message between stages waits, so `arrivals` is 0. The fields are forward,
    # backward, heads, last, weights, slots, deferred, arrivals, hops, embeds, leaves.
    return Jobs(ticks, ticks, M, last, weights, slots, deferred, 0, hops, embeds, ticks)


def in_lockstep(layout: Layout) -> bool:
    """Returns whether, in each tick, all stages run the same kinds of job (lanes)."""
    return layout.schedule not in PER_STAGE


def timed_ticks(layout: Layout, costs: tuple[Any, Any, Any]) -> tuple[int, ...]:
    """Returns how many ticks last as long as the forward job (F), how many as long as the job for
    the input's gradient (I), and how many as long as the job for the weights' gradients (W).

    The layout must not be in lockstep (`in_lockstep`). So each stage has a job of its own in a
    tick, and all stages wait for the most expensive job.
    `costs` has the costs of F, I and W, such as their seconds.
    """
    return table_of(layout).timed_ticks(*costs)


def table_of(layout: Layout) -> Schedule:
    """Returns the table of the layout's schedule. Layouts with the same schedule, stages,
    microbatches and chunks get the same cached table."""
    return _table(layout.schedule, layout.stage, layout.microbatches, layout.chunks)


@functools.lru_cache(maxsize=64)
def _table(name: str, stage: int, microbatches: int, chunks: int) -> Schedule:
    """Returns the table of the schedule `name` for these numbers of stages, microbatches and
    chunks. The table does not depend on the rest of the layout."""
    layout = Layout(stage=stage, microbatches=microbatches, chunks=chunks, schedule=name)
    return recipe.schedule_of(layout)
