"""Which device holds what: a mesh, an array's blocks, a model's leaves. Each as text, and as a picture where a path is given."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from parallax import rules
from parallax._typing import Device, PyTree
from parallax.draw import canvas
from parallax.plan.quantities import quantity
from parallax.trees import entry_axes, is_array

NAMED = 8  # devices that a cell names; of more it tells how many
ROWS = 60  # leaves that a picture shows, the largest


def mesh(devices: Mesh, path: canvas.Path | None = None) -> str:
    """The mesh as text: the number of each device, the last axis across, the others down.

    With a `path`, also as a picture there: a panel for each index of all axes but the last two.

    Raises:
        ImportError: with a `path`, where matplotlib is not installed.
    """
    names, sizes = list(devices.shape), tuple(devices.shape.values())
    numbers = np.vectorize(_number, otypes=[object])(devices.devices)
    kind = devices.devices.flat[0].platform.upper()
    title = f"{' x '.join(f'{name}={size}' for name, size in devices.shape.items())}: {math.prod(sizes)} {kind} devices"
    down, across = names[:-1], names[-1]
    rows = [[*down, *(f"{across} {k}" for k in range(sizes[-1]))]]
    rows += [[*map(str, at), *numbers[at]] for at in np.ndindex(sizes[:-1])]
    if path is not None:
        _mesh_picture(numbers, names, title, path)
    return f"{title}\n{canvas.columns(rows, left=0)}"


def sharding(array: Any, path: canvas.Path | None = None) -> str:
    """Which devices hold which block of an array, as text: the last split dim across, the others down.

    With a `path`, also as a picture there: the array with its blocks, and the devices in the colours of the blocks they hold.

    Args:
        array: anything with a shape, a dtype and a sharding: a `jax.Array`, or a `jax.ShapeDtypeStruct` made with one.
        path: of a PNG, SVG or PDF file.

    Raises:
        ValueError: it has no sharding.
        ImportError: with a `path`, where matplotlib is not installed.
    """
    held = _held(array)
    blocks = list(dict.fromkeys(held.values()))
    holders = {block: [device for device, own in held.items() if own == block] for block in blocks}
    split = [dim for dim in range(len(array.shape)) if len({block[dim] for block in blocks}) > 1]
    across = split[-1] if split and split != [0] else None
    down = [dim for dim in split if dim != across]
    places = {block: tuple(block[dim] for dim in down) for block in blocks}
    lines = sorted(set(places.values()))
    columns = sorted({block[across] for block in blocks}) if across is not None else [None]
    cells = {(places[block], None if across is None else block[across]): block for block in blocks}
    size = math.prod(stop - start for start, stop in blocks[0]) * array.dtype.itemsize
    title = (
        f"{array.dtype.name}{list(array.shape)} {_spelt(array.sharding)}: {len(blocks)} block{'s' * (len(blocks) > 1)}, "
        f"{quantity(size, 'B')} of {quantity(array.size * array.dtype.itemsize, 'B')} on each of {len(held)} devices"
    )
    heads = [f"dim {dim}" for dim in down] + [
        f"dim {across} {_range(k)}" if k else "devices" for k in columns
    ]
    rows = [heads] + [
        [*map(_range, line), *(_devices(holders[cells[line, k]]) for k in columns)]
        for line in lines
    ]
    if path is not None:
        grid = [[cells[line, k] for k in columns] for line in lines]
        labels = [
            [", ".join(map(_range, line)) for line in lines],
            [_range(k) if k else "whole" for k in columns],
        ]
        dims = [_dims(array, down), _dims(array, [] if across is None else [across])]
        _sharding_picture(array.sharding, grid, labels, dims, holders, title, path)
    return f"{title}\n{canvas.columns(rows, left=0)}"


def model(tree: PyTree, path: canvas.Path | None = None) -> str:
    """The arrays of a tree as text: shape, type, split, bytes in all and on a device; the last line sums them up.

    With a `path`, also as a picture there: a row for each leaf, a column for each device, coloured by the block that it holds.

    Args:
        tree: of arrays or `jax.ShapeDtypeStruct`s with shardings; other leaves are left out.
        path: of a PNG, SVG or PDF file.

    Raises:
        ValueError: an array has no sharding.
        ImportError: with a `path`, where matplotlib is not installed.
    """
    leaves = {name: leaf for name, leaf in rules.paths(tree) if is_array(leaf)}
    held = {name: _held(leaf, name) for name, leaf in leaves.items()}
    whole = {name: leaf.size * leaf.dtype.itemsize for name, leaf in leaves.items()}
    own = {
        name: math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for name, leaf in leaves.items()
    }
    rows = [["leaf", "shape", "type", "split", "bytes in all", "on a device"]]
    for name, leaf in leaves.items():
        shape = " x ".join(map(str, leaf.shape)) or "scalar"
        rows.append(
            [
                name,
                shape,
                leaf.dtype.name,
                _spelt(leaf.sharding),
                f"{whole[name]:,}",
                f"{own[name]:,}",
            ]
        )
    rows.append(
        [f"{len(leaves)} leaves", "", "", "", f"{sum(whole.values()):,}", f"{sum(own.values()):,}"]
    )
    if path is not None:
        _model_picture(held, whole, own, path)
    return canvas.columns(rows, left=4)


Block = tuple[tuple[int, int], ...]  # where it begins and ends in each dim


def _held(array: Any, name: str = "draw.sharding") -> dict[Device, Block]:
    """The block that each device holds, in the order of the mesh."""
    if getattr(array, "sharding", None) is None:
        raise ValueError(
            f"{name}: needs an array with a sharding, to tell which device holds what; got {type(array).__name__} without one. "
            f"Place it with mesh.place, or pass jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))."
        )
    found = array.sharding.devices_indices_map(tuple(array.shape))
    order = (
        list(_placed(array.sharding).flat)
        if isinstance(array.sharding, NamedSharding)
        else sorted(found, key=_id)
    )
    bounds = lambda index: tuple(
        part.indices(size)[:2] for part, size in zip(index, array.shape, strict=True)
    )
    return {device: bounds(found[device]) for device in order}


def _placed(sharding: NamedSharding) -> np.ndarray:
    """The devices in the shape of their mesh."""
    return np.asarray(sharding.mesh.devices)


def _spelt(sharding: Any) -> str:
    if not isinstance(sharding, NamedSharding):
        return type(sharding).__name__
    entries = [" x ".join(map(str, entry_axes(entry))) or "-" for entry in sharding.spec]
    return f"({', '.join(entries)})" if any(entry != "-" for entry in entries) else "whole"


def _dims(array: Any, dims: Sequence[int]) -> str:
    """The names of dims, with the axes over which each is split."""
    told = []
    for dim in dims:
        spec = array.sharding.spec if isinstance(array.sharding, NamedSharding) else ()
        names = " x ".join(map(str, entry_axes(spec[dim]))) if dim < len(spec) else ""
        told.append(f"dim {dim} of {array.shape[dim]}" + (f", over {names}" if names else ""))
    return "; ".join(told)


def _range(bounds: tuple[int, int]) -> str:
    return f"{bounds[0]}:{bounds[1]}"


def _id(device: Any) -> int:
    return device.id


def _number(device: Any) -> str:
    return str(device.id)


def _devices(held: Sequence[Any]) -> str:
    numbers = [_number(device) for device in held]
    return (
        ",".join(numbers)
        if len(numbers) <= NAMED
        else f"{numbers[0]},{numbers[1]},...({len(numbers)})"
    )


# Pictures


def _mesh_picture(numbers: np.ndarray, names: list[str], title: str, path: canvas.Path) -> None:
    names, numbers = (["", *names], numbers[None]) if len(names) == 1 else (names, numbers)
    panels = list(np.ndindex(numbers.shape[:-2]))
    rows, columns = numbers.shape[-2:]
    across = min(len(panels), 4)
    cell = 0.62 if max(rows, columns) <= 16 else 9 / max(rows, columns)
    height = -(-len(panels) // across) * (cell * rows + 0.75) + 0.4
    picture = canvas.figure(max(across * (cell * columns + 0.9), 0.085 * len(title) + 2.0), height)
    grid = picture.subplots(-(-len(panels) // across), across, squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    for k, (axes, at) in enumerate(zip(grid.flat, panels, strict=False)):
        for (row, column), number in np.ndenumerate(numbers[at]):
            _cell(axes, column, row, canvas.colour(k, max(len(panels), 1)), number, cell)
        axes.set_title(", ".join(f"{name} {i}" for name, i in zip(names, at, strict=False)), size=9)
        _grid(axes, columns, rows)
        axes.set_xticks([k + 0.5 for k in range(columns)], [str(k) for k in range(columns)], size=8)
        axes.set_yticks(
            [k + 0.5 for k in range(rows)],
            [str(k) for k in range(rows)] if names[-2] else [""] * rows,
            size=8,
        )
        axes.set_xlabel(names[-1], size=9)
        axes.set_ylabel(names[-2], size=9)
    picture.suptitle(f"{title} (in each cell its number)", size=10)
    canvas.save(picture, path)


def _sharding_picture(
    sharding: jax.sharding.Sharding,
    grid: list[list[Block]],
    labels: list[list[str]],
    dims: list[str],
    holders: Mapping[Block, list],
    title: str,
    path: canvas.Path,
) -> None:
    rows, columns = len(grid), len(grid[0])
    colours = {block: canvas.colour(k, len(holders)) for k, block in enumerate(holders)}
    devices = {_number(device): block for block, own in holders.items() for device in own}
    placed = (
        _placed(sharding)
        if isinstance(sharding, NamedSharding)
        else np.array([d for own in holders.values() for d in own])
    )
    names = list(sharding.mesh.axis_names) if isinstance(sharding, NamedSharding) else ["devices"]
    table = np.vectorize(_number, otypes=[object])(placed).reshape(-1, placed.shape[-1])
    wide = max(0.85, 0.085 * max(len(_devices(own)) for own in holders.values()) + 0.2)
    sizes = (max(wide * columns, 1.6), max(0.62 * table.shape[1], 1.6))
    height = max(0.5 * rows, 0.5 * table.shape[0], 1.0)
    picture = canvas.figure(max(sum(sizes) + 2.4, 7.0), min(height, 12) + 1.5)
    left, right = picture.subplots(1, 2, width_ratios=sizes)
    for (row, line), column in ((pair, k) for pair in enumerate(grid) for k in range(columns)):
        _cell(left, column, row, colours[line[column]], _devices(holders[line[column]]), 0.62)
    _grid(left, columns, rows, square=False)
    left.set_xticks([k + 0.5 for k in range(columns)], labels[1], size=8)
    left.set_yticks(
        [k + 0.5 for k in range(rows)], [label or "whole" for label in labels[0]], size=8
    )
    left.set_xlabel(dims[1], size=9)
    left.set_ylabel(dims[0], size=9)
    left.set_title("the array: in each block the devices that hold it", size=9)
    for (row, column), number in np.ndenumerate(table):
        _cell(right, column, row, colours[devices[number]], number, 0.62)
    _grid(right, table.shape[1], table.shape[0])
    right.set_xticks(
        [k + 0.5 for k in range(table.shape[1])], [str(k) for k in range(table.shape[1])], size=8
    )
    places = [", ".join(map(str, at)) for at in np.ndindex(placed.shape[:-1])]
    right.set_yticks([k + 0.5 for k in range(table.shape[0])], places, size=8)
    right.set_xlabel(names[-1], size=9)
    right.set_ylabel(", ".join(names[:-1]), size=9)
    right.set_title("the devices", size=9)
    picture.suptitle(title, size=10)
    canvas.save(picture, path)


def _model_picture(
    held: Mapping[str, Mapping[Any, Block]],
    whole: Mapping[str, int],
    own: Mapping[str, int],
    path: canvas.Path,
) -> None:
    shown = sorted(sorted(held, key=lambda name: -whole[name])[:ROWS], key=list(held).index)
    devices = list(next(iter(held.values())))
    cell = min(0.36, 10 / len(devices))
    longest = max(map(len, shown))
    picture = canvas.figure(
        max(cell * len(devices) + 0.075 * longest + 2.6, 7.0), 0.24 * len(shown) + 1.5
    )
    axes = picture.add_subplot()
    for row, name in enumerate(shown):
        blocks = list(dict.fromkeys(held[name].values()))
        for column, device in enumerate(devices):
            number = blocks.index(held[name][device])
            colour = canvas.GREY if len(blocks) == 1 else canvas.colour(number, len(blocks))
            _cell(axes, column, row, colour, str(number), cell)
    _grid(axes, len(devices), len(shown), square=False)
    axes.set_xticks(
        [k + 0.5 for k in range(len(devices))], [_number(device) for device in devices], size=8
    )
    axes.set_yticks([k + 0.5 for k in range(len(shown))], shown, size=8)
    axes.set_xlabel("device", size=9)
    sizes = axes.secondary_yaxis("right")
    bytes_of = [f"{quantity(own[name], 'B')} of {quantity(whole[name], 'B')}" for name in shown]
    sizes.set_yticks([k + 0.5 for k in range(len(shown))], bytes_of, size=8)
    sizes.tick_params(length=0)
    canvas.bare(sizes)
    of = f", the {len(shown)} largest of {len(held)} leaves" if len(shown) < len(held) else ""
    picture.suptitle(f"the block of each leaf that a device holds (grey: all of it){of}", size=10)
    total = f"{quantity(sum(own.values()), 'B')} of {quantity(sum(whole.values()), 'B')}"
    axes.set_title(f"on each device {total}", size=9)
    canvas.save(picture, path)


def _cell(axes: Any, column: int, row: int, colour: Any, label: str, inches: float) -> None:
    """A square of a grid, labelled where there is room."""
    from matplotlib.patches import Rectangle

    axes.add_patch(
        Rectangle((column, row), 1, 1, facecolor=colour, edgecolor="white", linewidth=1.2)
    )
    if inches >= 0.2:
        axes.text(
            column + 0.5,
            row + 0.5,
            label,
            ha="center",
            va="center",
            size=8,
            color=canvas.ink(colour),
        )


def _grid(axes: Any, columns: int, rows: int, square: bool = True) -> None:
    axes.set(xlim=(0, columns), ylim=(rows, 0), aspect="equal" if square else "auto")
    axes.tick_params(length=0)
    canvas.bare(axes)
