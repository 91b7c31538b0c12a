"""Along which axes a parameter or a gradient differs, and which functions around it have to do with
that."""

from collections.abc import Iterable
from typing import NamedTuple

import jax
from jaxtyping import Array

from parallax.collectives import types
from parallax.collectives.axis import Axis, AxisLike
from parallax.collectives.types import varying_axes


class Enclosing(NamedTuple):
    """The effect of the functions around the code that is being traced on the parameters.

    Attributes:
        declared: the axes along which all parameters were declared varying.
        shares: those of these along which some parameters were shares before.
    """

    declared: frozenset[str] = frozenset()
    shares: frozenset[str] = frozenset()


# JAX's own context, and not a ContextVar: it is part of the key under which `jax.jit` keeps a
# traced function.
ENCLOSING = jax.make_user_context(Enclosing())


def axes_of(axis: Axis) -> tuple[str, ...]:
    """Returns the names of an axis, always as a tuple."""
    return types.axes(axis.names)


def axes_of_several_devices(names: Iterable[str]) -> list[str]:
    """Returns the axes, of those given, that have more than one device, sorted."""
    return sorted(name for name in names if types.axis_size(name) > 1)


def replicated_axes(x: Array, axis: Axis) -> tuple[str, ...]:
    """Returns the axes of `axis` along which `x` is the same."""
    return tuple(name for name in axes_of(axis) if name not in varying_axes(x))


def axes_of_copies(x: Array, axis: Axis) -> tuple[str, ...]:
    """Returns the axes of `axis` along which all devices have the parameter `x`, even if it is
    declared varying."""
    declared = ENCLOSING.value.declared
    return tuple(name for name in axes_of(axis) if name not in varying_axes(x) or name in declared)


def varies_along(x: Array, axis: AxisLike) -> bool:
    """Returns whether `x` may differ between devices along every one of the axes."""
    return not replicated_axes(x, Axis.of(axis))
