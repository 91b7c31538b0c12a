"""Types of trees, devices and rules. Tests check them at run time; for type checkers they are
`Any`."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from jax.sharding import PartitionSpec

if TYPE_CHECKING:
    Device: TypeAlias = Any  # JAX has no types for it
    PyTree: TypeAlias = Any
    Specs: TypeAlias = Any
else:
    from jax import Device
    from jaxtyping import PyTree

    Specs = PyTree[PartitionSpec | None]  # a spec for each array, None where a leaf is none

Rule = Callable[
    [str, Any], PartitionSpec | None
]  # of a path and its leaf; None leaves it to another rule

__all__ = ["Device", "PyTree", "Rule", "Specs"]
