"""Finds mistakes in the rules that give each leaf its spec, before any array is placed on devices.

A spec (`PartitionSpec`) has one entry for each dim of a leaf: the mesh axes that split the dim.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import equinox as eqx
import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.sharding import PartitionSpec as P

from parallax._typing import PyTree, Specs
from parallax.lint import stacked_gates
from parallax.lint.finding import Finding
from parallax.lint.values import nbytes
from parallax.rules import audit, match, paths
from parallax.trees import dotted, entry_axes

BY_ROWS = P("data")


def rules(
    tree: PyTree,
    rule: Callable[[str, Any], PartitionSpec | None],
    mesh: Mesh | AbstractMesh,
    *,
    batch: Specs = BY_ROWS,
    large: int = 2**24,
    limit: int | None = None,
) -> list[Finding]:
    """Returns all mistakes in placing `tree` on `mesh` by `rule`.

    The leaves are arrays or `jax.ShapeDtypeStruct`s. The list starts with every error that
    `parallax.rules.specs` can find; that function raises only the first. Then come mistakes that
    `specs` accepts:

    * `large-leaf-whole`: a leaf of `large` bytes or more that is copied to every device, although
      an axis could split it.
    * `idle-axis`: an axis of the mesh that splits neither the batch nor any leaf, so its devices do
      the same work.
    * `fixed-number-of-heads`: an `eqx.nn.MultiheadAttention` whose projections are split over an
      axis that does not split the batch. The number of its heads is static, so a shard computes as
      many heads as the whole attention, and each of them is narrower.
    * `parts-of-a-split-dim`: an `eqx.nn.LSTMCell` or `GRUCell` whose rows are split over an axis
      that does not split the batch. Its gates are stacked, so a shard has rows of some of the
      gates.
    * `too-many-bytes`: more than `limit` bytes on a device. All devices have equally many bytes,
      since the size of a split dim is a multiple of the number of devices that split the dim.

    Args:
        tree: the parameters.
        rule: the rule, a function from a leaf's path and the leaf to the leaf's spec.
        mesh: the mesh.
        batch: the specs of the batch. Only `rules.fsdp` and `rules.experts` may split a weight over
            an axis of the batch. Under any other rule, each device would multiply its rows of the
            batch only by its own part of the weight.
        large: the number of bytes from which a whole leaf counts as large.
        limit: the most bytes that a device may hold; None for no limit.
    """
    batch_specs = jax.tree.leaves(batch)
    batch_axes = tuple(dict.fromkeys(axis for spec in batch_specs for axis in _axes(spec)))
    # The specs by path, and all errors. A leaf whose rule raised an error has no spec.
    specs, refusals = audit(tree, rule, mesh, batch_axes=batch_axes)
    leaves = {path: leaf for path, leaf in paths(tree) if path in specs}
    findings = [
        Finding(refusal.kind, refusal.where, f"{refusal.what}.", _sentence(refusal.advice))
        for refusal in refusals
    ]
    for path, leaf in leaves.items():
        # A leaf whose spec names no axis of several devices is whole on each device.
        if nbytes(leaf) >= large and _devices(_axes(specs[path]), mesh) == 1:
            findings += _whole(path, leaf, mesh, batch_axes)

    def row_axes_beside_the_batch(path, weight):
        """Returns the axes of several devices that split the rows of a weight, [..., rows,
        columns], except those that split the batch."""
        axes = stacked_gates.row_axes(specs.get(path, P()), weight.ndim)
        return [axis for axis in axes if axis not in batch_axes and mesh.shape[axis] > 1]

    findings += _fixed_heads(tree, row_axes_beside_the_batch)
    findings += stacked_gates.split_cells(tree, row_axes_beside_the_batch)
    used = {*batch_axes, *(axis for spec in specs.values() for axis in _axes(spec))}
    if not refusals:  # a refused spec may use an axis, so with refusals no axis is called idle
        idle = [axis for axis, size in mesh.shape.items() if size > 1 and axis not in used]
        findings += [_idle(axis, mesh) for axis in idle]
    return findings + _too_many(leaves, specs, mesh, limit)


def device_bytes(tree: PyTree, specs: Specs, mesh: Mesh | AbstractMesh) -> int:
    """Returns the number of bytes of `tree` on each device of `mesh`. `specs` are the specs that
    `rules.specs` returns for `tree`."""
    spec_of = dict(paths(specs))
    return sum(_share(leaf, spec_of[path], mesh) for path, leaf in paths(tree) if path in spec_of)


def _whole(
    path: str, leaf: Any, mesh: Mesh | AbstractMesh, batch_axes: tuple[str, ...]
) -> list[Finding]:
    """Returns the finding for a leaf that every device has as a whole. The finding's cure is a rule
    that would split the leaf. Returns no finding if no axis can split the leaf.
    """

    def rank(pair):
        """Returns a sort key for a pair of an axis and a dim: first come axes that do not split the
        batch, then larger axes before smaller ones, and then larger dims before smaller ones."""
        axis, dim = pair
        return axis in batch_axes, -mesh.shape[axis], -leaf.shape[dim], dim

    possible = [(axis, dim) for axis in mesh.shape for dim in _dims(leaf, mesh.shape[axis])]
    if not possible:
        return []
    axis, dim = min(possible, key=rank)
    # A rule prints as its Python code, here for the advice. The dims before `dim` have no axis.
    code = f"{match(path, P(*[None] * dim, axis))}"
    # Only `fsdp` may split a weight over an axis of the batch. It splits one more dim of each leaf
    # to which its rule `inside` gives a spec: here only this leaf, with a spec that splits no dim.
    if axis in batch_axes:
        code = f"fsdp({axis!r}, size={mesh.shape[axis]}, inside={match(path, P())})"
    return [
        Finding(
            "large-leaf-whole",
            path,
            f"every device holds all {nbytes(leaf):,} bytes of this leaf of shape {leaf.shape}; "
            f"split over {axis!r}, it "
            f"would hold {nbytes(leaf) // mesh.shape[axis]:,}.",
            f"Put the rule {code} before the others.",
        )
    ]


PROJECTIONS = ("query_proj", "key_proj", "value_proj")


def _fixed_heads(tree: PyTree, axes_of: Callable[[str, Any], Iterable[str]]) -> list[Finding]:
    """Returns a finding for each `eqx.nn.MultiheadAttention` whose projections are split by heads.
    The number of heads is static, so a shard would compute as many heads as the whole attention,
    each narrower. `axes_of(path, weight)` returns the axes that split the rows of a weight. The
    rows are the projection's outputs, with the heads one after another."""

    def is_attention(node):
        """Returns whether a node of the tree is an attention with a static number of heads."""
        return isinstance(node, eqx.nn.MultiheadAttention)

    findings = []
    for path, node in jax.tree.leaves_with_path(tree, is_leaf=is_attention):
        if not is_attention(node):
            continue
        prefix = dotted(path)  # "" if the tree itself is the attention
        heads = set()  # the axes that split the heads
        for name in PROJECTIONS:
            weight = getattr(getattr(node, name), "weight", None)
            if hasattr(weight, "ndim"):  # a frozen attention may have None in its place
                heads.update(axes_of(f"{prefix}.{name}.weight".removeprefix("."), weight))
        if split := sorted(heads):
            harm = (
                f"the outputs of its projections are split over {split}, and it has "
                f"{node.num_heads} "
                "heads on every device, each narrower than in the whole model."
            )
            cure = (
                "Use projections by tensor.ColumnLinear and tensor.RowLinear, and an attention "
                "that "
                "reads the number of its heads from its arrays."
            )
            findings.append(Finding("fixed-number-of-heads", prefix or "the model", harm, cure))
    return findings


def _idle(axis: str, mesh: Mesh | AbstractMesh) -> Finding:
    """Returns the finding for an axis that splits nothing."""
    size = mesh.shape[axis]
    names = [f"{name}={count}" for name, count in mesh.shape.items() if name != axis]
    axes = " x ".join(names) or "another axis"
    return Finding(
        "idle-axis",
        f"mesh axis {axis!r}",
        f"neither the batch nor any leaf is split over {axis!r}, so its {size} devices do the "
        "same work on the same data.",
        f"Split the batch or some leaves over {axis!r}, or give its devices to the other axes: "
        f"{axes}, one of them {size} times "
        f"as large.",
    )


def _too_many(
    leaves: dict[str, Any], specs: dict[str, PartitionSpec], mesh: Any, limit: int | None
) -> list[Finding]:
    """Returns a finding if the leaves have more than `limit` bytes on a device; otherwise returns
    no finding. The finding names the three leaves with the most bytes on a device.
    """
    bytes_of = {path: _share(leaf, specs[path], mesh) for path, leaf in leaves.items()}
    on_device, devices = sum(bytes_of.values()), math.prod(mesh.shape.values())
    if limit is None or on_device <= limit:
        return []
    total = sum(nbytes(leaf) for leaf in leaves.values())
    largest = sorted(bytes_of, key=lambda path: -bytes_of[path])[:3]
    names = ", ".join(f"{path} ({bytes_of[path]:,})" for path in largest)
    harm = (
        f"each of {devices} devices holds {on_device:,} bytes, more than the limit of {limit:,}; "
        f"evenly split, the {total:,} "
        f"bytes would be {total // devices:,} on each."
    )
    return [
        Finding(
            "too-many-bytes",
            "the whole tree",
            harm,
            f"Split the largest leaves further. Their bytes per device: {names}.",
        )
    ]


def _share(leaf: Any, spec: PartitionSpec, mesh: Mesh | AbstractMesh) -> int:
    """Returns the bytes of a leaf on each device."""
    return nbytes(leaf) // _devices(_axes(spec), mesh)


def _devices(axes: tuple[str, ...], mesh: Mesh | AbstractMesh) -> int:
    """Returns the number of devices along these axes together."""
    return math.prod(mesh.shape[axis] for axis in axes)


def _dims(leaf: Any, size: int) -> list[int]:
    """Returns the dims of a leaf that an axis of this size can split: the dims whose length is a
    multiple of `size`, and not 0. An axis of one device splits nothing."""
    return [
        dim for dim, length in enumerate(leaf.shape) if size > 1 and length and length % size == 0
    ]


def _axes(spec: PartitionSpec) -> tuple[str, ...]:
    """Returns all axes that a spec names."""
    return tuple(axis for entry in spec for axis in entry_axes(entry))


def _sentence(text: str) -> str:
    """Returns a text with a capital letter at its beginning."""
    return text[0].upper() + text[1:]
