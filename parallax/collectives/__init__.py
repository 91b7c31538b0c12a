"""Collectives written as tables of messages: drop-in replacements for the collectives of `jax.lax`.

A hop is one message from each device to another. A table can be read, combined with other tables,
and used to compute the cost of the collective. The collectives can be differentiated.

Algorithms are values. Call `ring.all_reduce(x, "data")` in place of `lax.psum(x, "data")`, and pass
`ring("data")` to a function that takes an axis.

Each name in `__all__` is imported at the first use of the name, so a layer that takes an axis does
not import all algorithms. The module `tuning`, which measures links, is not in `__all__`: use
`from parallax.collectives import tuning`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parallax.collectives import buckets, by_hand, cost, int8, matmul, tables, types
    from parallax.collectives.axis import Algorithm, Axis, AxisLike, combined_axis, xla
    from parallax.collectives.buckets import bucketed
    from parallax.collectives.from_table import algorithm, algorithm_of_axes
    from parallax.collectives.int8 import ErrorFeedback, quantized, quantized_in
    from parallax.collectives.permute import send_next
    from parallax.collectives.recursive_doubling import doubling
    from parallax.collectives.route import Route
    from parallax.collectives.tables import (
        direct,
        halving,
        halving_by,
        hierarchical,
        machines,
        pairs,
        ring,
        torus,
        two_rings,
    )

_FILES = ("buckets", "by_hand", "cost", "int8", "matmul", "tables", "types")
_FILE_OF = {
    **dict.fromkeys(("Axis", "AxisLike", "Algorithm", "combined_axis", "xla"), "axis"),
    **dict.fromkeys(("ErrorFeedback", "quantized", "quantized_in"), "int8"),
    **dict.fromkeys(("algorithm", "algorithm_of_axes"), "from_table"),
    "Route": "route",
    "send_next": "permute",
    "bucketed": "buckets",
    "doubling": "recursive_doubling",
}  # all other names are in the file `tables`

__all__ = [
    "Algorithm",
    "Axis",
    "AxisLike",
    "ErrorFeedback",
    "Route",
    "algorithm",
    "algorithm_of_axes",
    "bucketed",
    "buckets",
    "by_hand",
    "combined_axis",
    "cost",
    "direct",
    "doubling",
    "halving",
    "halving_by",
    "hierarchical",
    "int8",
    "machines",
    "matmul",
    "pairs",
    "quantized",
    "quantized_in",
    "ring",
    "send_next",
    "tables",
    "torus",
    "two_rings",
    "types",
    "xla",
]


def __getattr__(name: str) -> Any:
    """Returns the file or the object called `name`; the first use of a name imports the file.

    Python calls this function for a name that this package does not have yet. `_FILES` lists the
    names that are files of the package. `_FILE_OF` maps the name of an object to its file; all
    other objects are in the file `tables`.
    """
    if name not in __all__:
        raise AttributeError(f"module 'parallax.collectives' has no attribute {name!r}")
    if name in _FILES:
        return import_module(f"parallax.collectives.{name}")
    return getattr(import_module(f"parallax.collectives.{_FILE_OF.get(name, 'tables')}"), name)


def __dir__() -> list[str]:
    """Returns the names for `dir`, including names whose file is not imported yet."""
    return sorted([*globals(), *__all__])
