"""Parallel training from small functions: loss -> grad -> step, each parallelism a function from one arrow to the next.

    loss : (params, batch) -> scalar
    grad : (params, batch) -> (loss, gradients)
    step : (state, batch)  -> (state, info)

Read `collectives.ring` first, then `tensor`, `grads` and `schedule`, then `pipeline`, and `step` last, where they meet.
"""

from parallax import collectives, data, draw, grads, layout, mesh, models, pipeline, precision, rules, schedule, step, tensor

__all__ = [
    "collectives",
    "data",
    "draw",
    "grads",
    "layout",
    "mesh",
    "models",
    "pipeline",
    "precision",
    "rules",
    "schedule",
    "step",
    "tensor",
]
