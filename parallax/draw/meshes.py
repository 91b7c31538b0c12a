"""Tables of the devices of a mesh. For an array, use `jax.debug.visualize_array_sharding`."""

import math

import numpy as np
from jax.sharding import Mesh

from parallax.draw import canvas


def mesh(devices: Mesh, path: canvas.Path | None = None) -> str:
    """Returns a table with the id of each device. A column is an index of the last axis of the
    mesh, and a row is an index of the other axes.

    With a `path`, the function also draws the devices, and writes the picture to that file. A panel
    is a grid of the devices along the last two axes; there is one panel for each index of the other
    axes.

    Raises:
        ImportError: with a `path`, if matplotlib is not installed.
    """
    names, sizes = list(devices.shape), tuple(devices.shape.values())
    numbers = np.vectorize(_number, otypes=[object])(devices.devices)
    kind = devices.devices.flat[0].platform.upper()
    shape = " x ".join(f"{name}={size}" for name, size in devices.shape.items())
    title = f"{shape}: {math.prod(sizes)} {kind} devices"
    rows = [[*names[:-1], *(f"{names[-1]} {k}" for k in range(sizes[-1]))]]
    rows += [[*map(str, index), *numbers[index]] for index in np.ndindex(sizes[:-1])]
    if path is not None:
        _picture(numbers, names, title, path)
    # With `left=0` no column is flush left: all are flush right.
    return f"{title}\n{canvas.columns(rows, left=0)}"


def _number(device) -> str:
    """Returns the id of a device as text."""
    return str(device.id)


def _picture(numbers: np.ndarray, names: list[str], title: str, path: canvas.Path) -> None:
    """Draws the devices: a panel for each index of the axes before the last two, with a table of
    the devices along the last two axes.

    `numbers` has the id of each device, as text, in an array of the mesh's shape; `names` has the
    names of the axes. A mesh of one axis is drawn as one row.
    """
    if len(names) == 1:  # adds an axis of one row, without a name
        names, numbers = ["", *names], numbers[None]
    panels = list(np.ndindex(numbers.shape[:-2]))  # with two axes, one panel, of the index ()
    rows, columns = numbers.shape[-2:]
    across = min(len(panels), 4)
    down = -(-len(panels) // across)  # rounded up
    cell = 0.62 if max(rows, columns) <= 16 else 9 / max(rows, columns)  # inches
    width = max(across * (cell * columns + 0.9), 0.085 * len(title) + 2.0)
    picture = canvas.figure(width, down * (cell * rows + 0.75) + 0.4)
    subplots = picture.subplots(down, across, squeeze=False).flat
    for axes in subplots[len(panels) :]:  # the last row of panels may not be full
        axes.set_axis_off()
    row_names = [str(k) for k in range(rows)] if names[-2] else [""]
    for k, index in enumerate(panels):
        shade, axes = canvas.colour(k, len(panels)), subplots[k]
        cells = {place: (shade, number) for place, number in np.ndenumerate(numbers[index])}
        canvas.grid(axes, cells, row_names, [str(column) for column in range(columns)])
        # `index` has only the first axes, those of the panels; so zip leaves out the last two.
        fixed = [f"{name} {i}" for name, i in zip(names, index, strict=False)]
        axes.set_title(", ".join(fixed), size=9)
        axes.set_xlabel(names[-1], size=9)
        axes.set_ylabel(names[-2], size=9)
    picture.suptitle(f"{title}, by number", size=10)
    canvas.save(picture, path)
