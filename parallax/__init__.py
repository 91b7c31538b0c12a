"""Parallel training from small functions: loss -> grad -> step, each parallelism a function from one arrow to the next.

    loss : (params, batch) -> scalar
    grad : (params, batch) -> (loss, gradients)
    step : (state, batch)  -> (state, info)

Read `collectives.ring` first, then `tensor`, `grads` and `schedule`, then `pipeline`, `zero` and `sequence`, and `step` last,
where they meet. `launch`, `checkpoint`, `training` and their neighbours are for runs that outlive what goes wrong.
"""

from parallax import (
    certificate,
    checkpoint,
    collectives,
    cross_entropy,
    data,
    draw,
    feed,
    grads,
    hlo,
    launch,
    layout,
    lint,
    mesh,
    models,
    pipeline,
    placement,
    precision,
    remat,
    rules,
    schedule,
    sequence,
    shards,
    step,
    tensor,
    training,
    watchdog,
    zero,
)

__all__ = [
    "certificate",
    "checkpoint",
    "collectives",
    "cross_entropy",
    "data",
    "draw",
    "feed",
    "grads",
    "hlo",
    "launch",
    "layout",
    "lint",
    "mesh",
    "models",
    "pipeline",
    "placement",
    "precision",
    "remat",
    "rules",
    "schedule",
    "sequence",
    "shards",
    "step",
    "tensor",
    "training",
    "watchdog",
    "zero",
]
