"""Finds recurrent cells of Equinox whose weights are split by rows.

The rows of a cell's weights are the rows of its gates, one gate after another. If the rows are
split, a device has the rows of some gates, instead of the rows of some hidden units in all gates.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import equinox as eqx
import jax
from jax.sharding import NamedSharding, PartitionSpec

from parallax.lint.finding import Finding
from parallax.trees import dotted, entry_axes

WEIGHTS = ("weight_ih", "weight_hh")  # [gates * hidden units, inputs], after dims of stacked layers


def split_cells(tree: Any, axes_of: Callable[[str, Any], Iterable[str]]) -> Iterator[Finding]:
    """Yields a finding for each `eqx.nn.LSTMCell` and `eqx.nn.GRUCell` in `tree` whose weights are
    split by rows.

    Args:
        tree: the model, or arguments of a program.
        axes_of: a function from a weight's path and the weight to the axes that split its rows.
    """
    for path, cell in jax.tree.leaves_with_path(tree, is_leaf=_is_cell):
        if not _is_cell(cell):
            continue
        prefix = dotted(path)  # "" if the tree itself is the cell
        paths = {name: f"{prefix}.{name}".removeprefix(".") for name in WEIGHTS}
        weights = {name: getattr(cell, name) for name in WEIGHTS}
        axes = {
            axis
            for name, weight in weights.items()
            if hasattr(weight, "ndim")  # a frozen cell may have None in its place
            for axis in axes_of(paths[name], weight)
        }
        if axes:
            yield Finding(
                "parts-of-a-split-dim",
                prefix or "the model",
                f"the rows of this eqx.nn.{type(cell).__name__} are split over {sorted(axes)}. "
                "The rows of each gate follow those of the gate before, so a device has the rows "
                "of only some gates.",
                "Keep the cell whole, or use a matrix for each gate and split its hidden units.",
            )


def split_by_sharding(tree: Any) -> Iterator[Finding]:
    """Yields the findings of `split_cells` for a tree whose arrays are on a mesh already."""

    def axes_of(_, weight):
        """Returns those axes that split a weight's rows and have several devices. A weight that is
        on no mesh has none."""
        sharding = getattr(weight, "sharding", None)
        if not isinstance(sharding, NamedSharding):
            return ()
        axes = row_axes(sharding.spec, weight.ndim)
        return [axis for axis in axes if sharding.mesh.shape[axis] > 1]

    return split_cells(tree, axes_of)


def row_axes(spec: PartitionSpec, ndim: int) -> tuple[str, ...]:
    """Returns the axes that split the rows of a weight of `ndim` dims, [..., rows, columns]."""
    # A shorter spec has no entry for the rows, the last dim but one.
    return entry_axes(spec[ndim - 2]) if len(spec) >= ndim - 1 else ()


def _is_cell(node: Any) -> bool:
    """Returns whether a node of a model is a cell with stacked gates."""
    return isinstance(node, eqx.nn.LSTMCell | eqx.nn.GRUCell)
