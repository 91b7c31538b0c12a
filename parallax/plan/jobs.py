"""How often a device runs each part of a pipeline's step, and how many slots it needs: closed
forms, or folds over the table.

Where all stages run the same lanes in a tick, closed forms count the ticks in which anything runs,
idle stages included. Where each stage has a job of its own, the rest is read from the table.

Legend: P stages, M microbatches, v chunks a stage, F forward, I the input's gradient, W the
weights' gradient.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

from parallax import pipeline
from parallax.layout import Layout
from parallax.models import recipe
from parallax.schedule import Schedule
from parallax.validate import PER_STAGE


class Jobs(NamedTuple):
    """How often a device runs in a step the parts of a pipeline, or of microbatches one after
    another.

    Attributes:
        forward: ticks with a forward pass.
        backward: ticks with a backward pass.
        heads: calls of the head.
        last: equal ticks that end the schedule.
        weights: ticks with gradients of the stages' weights.
        slots: places for a chunk's residuals, one of them for ticks without a job.
        deferred: places for what the input's gradient leaves for that of the weights.
        arrivals: places for what came from other stages and waits.
        hops: messages to other stages.
        embeds: calls of the embedding.
        leaves: calls of the embedding's transpose.
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
    """Returns the jobs of a layout's step on one device."""
    P, M, v = layout.stage, layout.microbatches, layout.chunks
    if not in_lockstep(layout):
        table = table_of(layout)
        # Messages go in each tick, one for each distance.
        hops = table.ticks * len(pipeline.distances(table))
        return Jobs(
            *(M * v, M * v, M, table.ticks, M * v),
            slots=table.slot_count,
            deferred=table.deferred_count,
            arrivals=table.arrival_count + 1,
            hops=hops,
            embeds=M,
            leaves=M,
        )
    if layout.schedule == "gpipe":
        ticks, last, weights, slots, deferred = M + P - 1, M + P - 1, M + P - 1, M + 1, 0
    else:
        ticks, last, weights, deferred = M * v + P - 1, v * P - 1, M * v + P - 1, 0
        slots = min(M * v + 1, v * P + P - 1)  # 2P - 1 in one chunk, whatever M is
    if layout.schedule == "zero_bubble_lockstep":  # the last stage's weights lag P - 1 ticks behind
        last, weights, deferred = min(M * v, v * P - 1), M * v, min(M * v + 1, P)
    # XLA unrolls a loop of one tick, and drops the send of the last tick. It embeds a lone
    # microbatch once.
    hops, embeds = 2 * ticks - (last == 1), 1 if M == 1 else ticks
    return Jobs(ticks, ticks, M, last, weights, slots, deferred, 0, hops, embeds, ticks)


def in_lockstep(layout: Layout) -> bool:
    """Returns whether all stages run the same lanes in a tick."""
    return layout.schedule not in PER_STAGE


def timed_ticks(layout: Layout, costs: tuple[Any, Any, Any]) -> tuple[int, ...]:
    """Returns the ticks that take the time of F, of I and of W, where each stage has a job of its
    own and all wait for the dearest."""
    return table_of(layout).timed_ticks(*costs)


def table_of(layout: Layout) -> Schedule:
    """Returns the schedule's table."""
    return _table(layout.schedule, layout.stage, layout.microbatches, layout.chunks)


@functools.lru_cache(maxsize=64)
def _table(name: str, stage: int, microbatches: int, chunks: int) -> Schedule:
    layout = dataclasses.replace(
        Layout(), stage=stage, microbatches=microbatches, chunks=chunks, schedule=name
    )
    return recipe.schedule_of(layout)
