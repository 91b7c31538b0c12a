"""Predicts the memory, traffic and time of a step before it is compiled, and finds the best layout.

A name of this package is imported only at its first use. So importing one of its files, such as
`parallax.plan.units`, does not import `parallax.models`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parallax.plan.closed_form import (
        ADAMW,
        Memory,
        Plan,
        Seconds,
        Work,
        check,
        memory,
        model_flops,
        plan,
        table,
    )
    from parallax.plan.comparison import Comparison, compare, compared
    from parallax.plan.decoders import traced
    from parallax.plan.layouts import Choices, search, simplest
    from parallax.plan.stages import StageWork, stage_work
    from parallax.plan.tracing import Trace, trace
    from parallax.plan.units import quantity

__all__ = [
    "ADAMW",
    "Choices",
    "Comparison",
    "Memory",
    "Plan",
    "Seconds",
    "StageWork",
    "Trace",
    "Work",
    "check",
    "compare",
    "compared",
    "memory",
    "model_flops",
    "plan",
    "quantity",
    "search",
    "simplest",
    "stage_work",
    "table",
    "trace",
    "traced",
]

_FILES = {
    "Comparison": "comparison",
    "StageWork": "stages",
    "Trace": "tracing",
    "compare": "comparison",
    "compared": "comparison",
    "quantity": "units",
    "Choices": "layouts",
    "search": "layouts",
    "simplest": "layouts",
    "stage_work": "stages",
    "trace": "tracing",
    "traced": "decoders",
}


def __getattr__(name: str) -> Any:
    """Imports a name of `__all__` at its first use. The name is in the file that `_FILES` gives for
    it, or in `closed_form` if `_FILES` lacks it."""
    if name in __all__:
        return getattr(import_module(f"parallax.plan.{_FILES.get(name, 'closed_form')}"), name)
    raise AttributeError(f"module 'parallax.plan' has no attribute {name!r}")
