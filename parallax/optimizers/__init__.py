"""Optimizers on shards: whether one is right there, and wrappers for those that look at more than
one element.

The wrappers are imported when they are first needed: a step that asks whether its optimizer is
right does not bring them along.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parallax.optimizers.wrappers import by_matrix, on_shards, whole

__all__ = ["by_matrix", "on_shards", "whole"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'parallax.optimizers' has no attribute {name!r}")
    return getattr(import_module("parallax.optimizers.wrappers"), name)
