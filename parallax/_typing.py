"""Types of trees, devices and sharding rules. Tests check these types at run time. For type
checkers, the types of trees and devices are `Any`."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from jax.sharding import PartitionSpec

if TYPE_CHECKING:
    Device: TypeAlias = Any  # JAX has no types for devices
    PyTree: TypeAlias = Any
    Specs: TypeAlias = Any
else:
    from jax import Device
    from jaxtyping import PyTree

    Specs = PyTree[PartitionSpec | None]  # a spec for each array, None for each other leaf

# A function of the path of a leaf and the leaf. It returns the leaf's spec, or None to leave the
# leaf to another rule.
Rule = Callable[[str, Any], PartitionSpec | None]

__all__ = ["Device", "PyTree", "Rule", "Specs"]
