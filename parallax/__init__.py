"""Small functions for parallel training. You apply these functions to an Equinox model and its
loss, and call the resulting step in your own loop.

    loss : (params, batch) -> scalar
    grad : (params, batch) -> (loss, gradients)
    step : (state, batch)  -> (state, info)

Each kind of parallelism takes a loss, gradient or step function and returns a new one. For an
order of reading, see the page "Read the code" of the documentation.

Each module is imported when it is first used: `import parallax` imports no JAX.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

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
    """Imports the module `name` and returns it. Python calls this for a missing attribute."""
    if name in __all__:
        return import_module(f"parallax.{name}")
    raise AttributeError(f"module 'parallax' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Returns all names of the package, also those of modules that are not imported yet."""
    return sorted([*globals(), *__all__])
