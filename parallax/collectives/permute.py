"""One hop: a `ppermute` along one axis, or along several with devices in row-major order."""

from collections.abc import Sequence

import jax
import numpy as np
from jax import lax
from jaxtyping import Array, Shaped

from parallax.collectives.cost import Message, Round, priced
from parallax.collectives.types import AxisName, axes, axis_size


def _rounds_of_one_hop(size: int, n: int, itemsize: int, distance: int = 1) -> list[Round]:
    """Returns the rounds of `send_next`, for `cost`: one round of one message, the whole array.

    The array has `size` numbers of `itemsize` bytes. The message goes to the device that is
    `distance` places further on. The cost does not depend on the number of devices, `n`.
    """
    # The step is a tuple, with one number for each dim of the devices: they form one row.
    return [Round(times=1, messages=(Message(size * itemsize, (distance,)),))]


@priced(_rounds_of_one_hop)
def send_next(
    x: Shaped[Array, "*dims"], axis_name: AxisName, *, distance: int = 1
) -> Shaped[Array, "*dims"]:
    """Returns device i's `x` on device i + `distance`, in one hop; the devices form a ring."""
    n = axis_size(axis_name)
    return send(x, axis_name, [(i, (i + distance) % n) for i in range(n)])


def send(
    x: Shaped[Array, "*dims"], axis_name: AxisName, pairs: Sequence[tuple[int, int]]
) -> Shaped[Array, "*dims"]:
    """Returns device i's `x` on device j for each (i, j) in `pairs`, and zeros on all other
    devices.

    Devices are numbered in row-major order of the axes in `axis_name`.
    """
    # `lax.ppermute` numbers the devices in the order of the mesh's axes: device i is `places[i]`.
    names, places = _in_mesh_order(axes(axis_name))
    return lax.ppermute(x, names, [(places[i], places[j]) for i, j in pairs])


def _in_mesh_order(names: tuple) -> tuple[tuple, list[int]]:
    """Returns the axes in the mesh's order, and a list that gives each device a new number.

    Entry i of the list is for the device whose number is i in row-major order of `names`. The entry
    is this device's number in row-major order of the returned axes. `lax.ppermute` numbers the
    devices in the mesh's order, whatever the order of the names.
    """
    if len(names) < 2:
        return names, list(range(axis_size(names)))
    mesh_names = jax.sharding.get_abstract_mesh().axis_names
    ordered = tuple(sorted(names, key=mesh_names.index))
    # The devices, numbered in the order of `names`, are listed in the mesh's order. The argsort
    # inverts that list.
    devices = np.arange(axis_size(names)).reshape([lax.axis_size(name) for name in names])
    in_mesh_order = devices.transpose([names.index(name) for name in ordered]).reshape(-1)
    return ordered, np.argsort(in_mesh_order).tolist()
