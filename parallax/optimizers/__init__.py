"""Optimizers on shards: a check that an optimizer acts element by element, and wrappers for
optimizers that do not.

The check, in the module `elementwise`, needs no wrapper, and every train step uses it. So the
wrappers are imported only when one of them is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parallax.optimizers.wrappers import by_matrix, on_shards, whole

__all__ = ["by_matrix", "on_shards", "whole"]


def __getattr__(name: str) -> Any:
    """Imports the wrappers when one of them is first used."""
    if name not in __all__:
        raise AttributeError(f"module 'parallax.optimizers' has no attribute {name!r}")
    return getattr(import_module("parallax.optimizers.wrappers"), name)
