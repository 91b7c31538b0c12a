"""Parallel training from small functions: loss -> grad -> step, each parallelism a function from one arrow to the next.

    loss : (params, batch) -> scalar
    grad : (params, batch) -> (loss, gradients)
    step : (state, batch)  -> (state, info)

Read `collectives.by_hand` first and `collectives.route`, then `tensor`, `grads` and `schedule`, `pipeline`, `zero` and
`sequence`, and `step` and `models.decoder` last, where they meet. `run` is for jobs that outlive what goes wrong.

Each module is imported when it is first asked for: `import parallax` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parallax import (
        bisect,
        collectives,
        compiled,
        context,
        cross_entropy,
        data,
        draw,
        experts,
        grads,
        islands,
        layout,
        lint,
        mesh,
        models,
        optimizers,
        pipeline,
        plan,
        precision,
        remat,
        rules,
        run,
        schedule,
        sequence,
        step,
        tensor,
        zero,
    )

__all__ = [
    "bisect",
    "collectives",
    "compiled",
    "context",
    "cross_entropy",
    "data",
    "draw",
    "experts",
    "grads",
    "islands",
    "layout",
    "lint",
    "mesh",
    "models",
    "optimizers",
    "pipeline",
    "plan",
    "precision",
    "remat",
    "rules",
    "run",
    "schedule",
    "sequence",
    "step",
    "tensor",
    "zero",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return import_module(f"parallax.{name}")
    raise AttributeError(f"module 'parallax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
