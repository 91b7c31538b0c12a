"""The axes along which a parameter or a gradient differs between devices, and a record of the
gradient functions that JAX is tracing at the moment.

An array *varies* along a mesh axis if JAX types it as possibly different on the devices of that
axis. A gradient function declares its parameters varying, so that JAX does not sum their gradients.
Along an axis, a device's parameter is either a copy (the same on all devices) or a share (a part of
the whole parameter). The declaration makes copies vary too, so a gradient function inside another
one needs the record to tell copies from shares. `Axis.names` is one name or a tuple of names.
"""

from collections.abc import Iterable
from typing import NamedTuple

import jax
from jaxtyping import Array

from parallax.collectives import types
from parallax.collectives.axis import Axis, AxisLike
from parallax.collectives.types import varying_axes


class Enclosing(NamedTuple):
    """The changes made to parameters' types by gradient functions around the code being traced.

    Attributes:
        declared: the axes of the gradient functions that enclose the code being traced. Each
            function typed all parameters as varying along its axes, also those that are the same on
            all devices.
        shares: the axes in `declared` along which a device has only a part of some parameters.
            The types of these parameters varied along these axes even before a function declared
            all parameters varying.
    """

    declared: frozenset[str] = frozenset()
    shares: frozenset[str] = frozenset()


# JAX's own context instead of a ContextVar: `jax.jit` includes it in the key of its cache of traced
# functions.
ENCLOSING = jax.make_user_context(Enclosing())


def axes_of(axis: Axis) -> tuple[str, ...]:
    """Returns the names of the mesh axes that `axis` joins, as a tuple even if there is only one
    name."""
    return types.axes(axis.names)


def axes_of_several_devices(names: Iterable[str]) -> list[str]:
    """Returns those of the axes `names` that have more than one device, sorted."""
    return sorted(name for name in names if types.axis_size(name) > 1)


def replicated_axes(x: Array, axis: Axis) -> tuple[str, ...]:
    """Returns those mesh axes of `axis` along which `x` is the same on all devices."""
    return tuple(name for name in axes_of(axis) if name not in varying_axes(x))


def axes_of_copies(x: Array, axis: Axis) -> tuple[str, ...]:
    """Returns those mesh axes of `axis` along which all devices have the same parameter `x`, even
    if an enclosing gradient function declared `x` varying."""
    # `declared` has the axes of the functions around the one whose gradients are reduced now. If
    # some parameters were shares along one of these axes, `local_gradients` would have refused to
    # nest the two functions. So `x` is a copy there, although its type varies.
    declared = ENCLOSING.value.declared
    return tuple(name for name in axes_of(axis) if name not in varying_axes(x) or name in declared)


def varies_along(x: Array, axis: AxisLike) -> bool:
    """Returns whether `x` is typed as varying along every mesh axis of `axis`."""
    return not replicated_axes(x, Axis.of(axis))
