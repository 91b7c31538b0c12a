"""Trees as types: jaxtyping's `PyTree` is checked at run time, and unknown to type checkers, which read `Any`."""

from typing import TYPE_CHECKING, Any, TypeAlias

from jax.sharding import PartitionSpec

if TYPE_CHECKING:
    PyTree: TypeAlias = Any
    Specs: TypeAlias = Any
else:
    from jaxtyping import PyTree

    Specs = PyTree[PartitionSpec | None]  # a spec for each array, None where a leaf is none

__all__ = ["PyTree", "Specs"]
