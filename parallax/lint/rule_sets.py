"""Mistakes that a rule set shows, before anything is placed: what is refused, what stays whole, who does the same work twice."""

import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.sharding import PartitionSpec as P

from parallax._typing import PyTree, Specs
from parallax.lint.finding import Finding
from parallax.lint.values import nbytes
from parallax.rules import audit, match, paths
from parallax.trees import dotted, entry_axes, is_spec

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
    """The mistakes in placing `tree` (arrays or `jax.ShapeDtypeStruct`s) on `mesh` by `rule`: all at once.

    First all that `parallax.rules.specs` refuses, of which it raises the first; then what it lets pass:

    * `large-leaf-whole`: a leaf of `large` bytes or more that every device has a copy of, and that an axis could split.
    * `idle-axis`: an axis of the mesh that splits neither the batch nor any leaf, so that its devices do the same work.
    * `fixed-number-of-heads`: an `eqx.nn.MultiheadAttention` whose projections are split over an axis that does not split the
      batch. The number of its heads is static, so on a shard it computes as many heads as the whole, each narrower.
    * `too-many-bytes`: more than `limit` bytes on a device. Each has as many, since a split dim divides by its axes.

    Args:
        batch: the specs of the batch. A weight that is split like the batch is refused: each device would multiply its rows by
            its own part of the weight, or else, where the weight is gathered first, do the work that another does too.
        large: in bytes of the whole leaf.
        limit: in bytes a device; None for no limit.
    """
    batch_axes = tuple(
        dict.fromkeys(
            axis for spec in jax.tree.leaves(batch, is_leaf=is_spec) for axis in _axes(spec)
        )
    )
    specs, refusals = audit(tree, rule, mesh, batch_axes=batch_axes)
    leaves = {path: leaf for path, leaf in paths(tree) if path in specs}
    findings = [
        Finding(each.kind, each.where, f"{each.what}.", _sentence(each.advice)) for each in refusals
    ]
    for path, leaf in leaves.items():
        if nbytes(leaf) >= large and _devices(_axes(specs[path]), mesh) == 1:
            findings += _whole(path, leaf, mesh, batch_axes)
    findings += _fixed_heads(tree, specs, batch_axes)
    used = {*batch_axes, *(axis for spec in specs.values() for axis in _axes(spec))}
    idle = [axis for axis, size in mesh.shape.items() if size > 1 and axis not in used]
    findings += [
        _idle(axis, mesh) for axis in idle if not refusals
    ]  # what is refused may be what used it
    return findings + _too_many(leaves, specs, mesh, limit)


def device_bytes(tree: PyTree, specs: Specs, mesh: Mesh | AbstractMesh) -> int:
    """The bytes of `tree` on each device of `mesh`, placed as `specs` (what `parallax.rules.specs` gives) says."""
    given = dict(paths(specs))
    return sum(_share(leaf, given[path], mesh) for path, leaf in paths(tree) if path in given)


def _whole(
    path: str, leaf: Any, mesh: Mesh | AbstractMesh, batch_axes: tuple[str, ...]
) -> list[Finding]:
    split = [(axis, dim) for axis in mesh.shape for dim in _dims(leaf, mesh.shape[axis])]
    split.sort(
        key=lambda pair: (
            pair[0] in batch_axes,
            -mesh.shape[pair[0]],
            -leaf.shape[pair[1]],
            pair[1],
        )
    )
    if not split:
        return []
    axis, dim = split[0]
    spec = P(*[None] * dim, axis)
    code = (
        f"fsdp({axis!r}, size={mesh.shape[axis]}, inside={match(path, P())})"
        if axis in batch_axes
        else f"{match(path, spec)}"
    )
    return [
        Finding(
            "large-leaf-whole",
            path,
            f"every device holds all {nbytes(leaf):,} bytes of this leaf of shape {leaf.shape}; split over {axis!r}, it "
            f"would hold {nbytes(leaf) // mesh.shape[axis]:,}.",
            f"Ask {code} first.",
        )
    ]


PROJECTIONS = ("query_proj", "key_proj", "value_proj")


def _fixed_heads(
    tree: PyTree, specs: dict[str, PartitionSpec], batch_axes: tuple[str, ...]
) -> list[Finding]:
    def is_attention(node):
        return isinstance(node, eqx.nn.MultiheadAttention)

    findings = []
    for path, node in jax.tree.leaves_with_path(tree, is_leaf=is_attention):
        if not is_attention(node):
            continue
        prefix = dotted(path)
        weights = [f"{prefix}.{name}.weight".removeprefix(".") for name in PROJECTIONS]
        heads = {axis for path in weights for axis in _first_dim_axes(specs.get(path, P()))}
        if split := sorted(heads.difference(batch_axes)):
            harm = (
                f"the outputs of its projections are split over {split}, and it has {node.num_heads} "
                "heads on every device, each narrower than in the whole model."
            )
            cure = (
                "Use projections by tensor.ColumnLinear and tensor.RowLinear, and an attention that "
                "reads the number of its heads from its arrays."
            )
            findings.append(Finding("fixed-number-of-heads", prefix or "the model", harm, cure))
    return findings


def _first_dim_axes(spec: PartitionSpec) -> tuple[str, ...]:
    return entry_axes(spec[0]) if len(spec) else ()


def _idle(axis: str, mesh: Mesh | AbstractMesh) -> Finding:
    size = mesh.shape[axis]
    rest = (
        " x ".join(f"{name}={count}" for name, count in mesh.shape.items() if name != axis)
        or "another axis"
    )
    return Finding(
        "idle-axis",
        f"mesh axis {axis!r}",
        f"neither the batch nor any leaf is split over {axis!r}, so its {size} devices do the same work, each on all of it.",
        f"Split the batch or some leaves over {axis!r}, or give its devices to the other axes: {rest}, one of them {size} times "
        f"as large.",
    )


def _too_many(
    leaves: dict[str, Any], specs: dict[str, PartitionSpec], mesh: Any, limit: int | None
) -> list[Finding]:
    share = {path: _share(leaf, specs[path], mesh) for path, leaf in leaves.items()}
    held, devices = sum(share.values()), math.prod(mesh.shape.values())
    if limit is None or held <= limit:
        return []
    total = sum(nbytes(leaf) for leaf in leaves.values())
    largest = sorted(share, key=lambda path: -share[path])[:3]
    names = ", ".join(f"{path} ({share[path]:,})" for path in largest)
    harm = (
        f"each of {devices} devices holds {held:,} bytes, more than the limit of {limit:,}; evenly split, the {total:,} "
        f"bytes would be {total // devices:,} on each."
    )
    return [
        Finding(
            "too-many-bytes",
            "the whole tree",
            harm,
            f"Split the largest further (bytes a device): {names}.",
        )
    ]


def _share(leaf: Any, spec: PartitionSpec, mesh: Mesh | AbstractMesh) -> int:
    return nbytes(leaf) // _devices(_axes(spec), mesh)


def _devices(axes: tuple[str, ...], mesh: Mesh | AbstractMesh) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)


def _dims(leaf: Any, size: int) -> list[int]:
    return [
        dim for dim, length in enumerate(leaf.shape) if size > 1 and length and length % size == 0
    ]


def _axes(spec: PartitionSpec) -> tuple[str, ...]:
    return tuple(axis for entry in spec for axis in entry_axes(entry))


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]
