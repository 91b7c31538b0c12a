"""A leaf and the spec that a rule gave it: whether the spec fits, and the sentence that refuses
it."""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.sharding import PartitionSpec as P

from parallax.trees import entry_axes


@dataclass(frozen=True)
class Refusal:
    """Why a rule does not do.

    Attributes:
        kind: its name, such as "does-not-divide".
        where: the path of the leaf, or the rule.
        what: what was needed, and what came.
        cure: what to do.
        fits: a spec that the leaf could have: the one it was given, without what does not fit.
    """

    kind: str
    where: str
    what: str
    cure: str
    fits: PartitionSpec | None = None

    @property
    def advice(self) -> str:
        """The cure in full."""
        return f"{self.cure}." if self.fits is None else f"{self.cure}. {self.fits} would fit."

    def __str__(self) -> str:
        return f"{self.what}; {self.advice}"


@dataclass(frozen=True)
class Placement:
    """What became of one leaf.

    Attributes:
        path: its name, dotted.
        leaf: the array, or its `jax.ShapeDtypeStruct`.
        rule: the one that took it.
        given: the spec that this rule gave.
        wrappers: the `rules.fsdp`s around that rule, innermost first.
        spec: what they made of it.
        why: what each of them did, in words.
        visited: the tokens of all replicas come to it.
    """

    path: str
    leaf: Any
    rule: Callable[..., Any]
    given: PartitionSpec
    wrappers: tuple[Any, ...]
    spec: PartitionSpec
    why: tuple[str, ...]
    visited: bool = False

    @property
    def by(self) -> str:
        """The rule in words."""
        return name_of(self.rule, self.wrappers)


def refused(
    p: Placement,
    batch_axes: Sequence[str],
    mesh: Mesh | AbstractMesh | None,
    stacked: Collection[str] = (),
) -> list[Refusal]:
    """Returns why the leaf cannot have its spec; nothing where it can. Without a mesh, what needs
    its sizes is not asked.

    Along the axes `stacked` all leaves are split in the same dim, which may be a model's layers: a
    leaf without that split would have each device run all of them, and is never advised.
    """
    # A spec with too many entries has no sizes to compare.
    refusals = [*_entries_refused(p), *_batch_refused(p, batch_axes, mesh)]
    if mesh is not None and not refusals:
        refusals = list(_sizes_refused(p, mesh, stacked))
    splits_layers = any(axis in stacked for entry in p.spec for axis in entry_axes(entry))

    def advised(refusal):
        # The spec without that axis would have each device run all layers.
        if refusal.kind == "does-not-divide" and splits_layers:
            return refusal
        return replace(refusal, fits=_fitting(p, batch_axes, mesh))

    return list(map(advised, refusals))


def stacked_axes(placements: Sequence[Placement]) -> set[str]:
    """Returns the axes that split the same dim, of the same size, of two leaves or more, and no
    other: as stages split layers."""
    dims_by_axis: dict[str, list[tuple[int, int]]] = {}
    for p in placements:
        for dim, entry in enumerate(p.given[: p.leaf.ndim]):
            for axis in entry_axes(entry):
                dims_by_axis.setdefault(axis, []).append((dim, p.leaf.shape[dim]))
    # One leaf alone may be split by chance; the same dim and size in several are layers.
    return {axis for axis, dims in dims_by_axis.items() if len(dims) > 1 and len(set(dims)) == 1}


def _entries_refused(p: Placement) -> Iterator[Refusal]:
    if len(p.spec) > p.leaf.ndim:
        what = (
            f"{p.path}: a spec has at most one entry for each dim, but {p.spec} (rule {p.by}) has "
            f"{len(p.spec)} for shape {p.leaf.shape}, which has {p.leaf.ndim}"
        )
        yield Refusal(
            "too-many-entries", p.path, what, "drop entries, or replicate this leaf with P()"
        )
    axes = [axis for entry in p.spec for axis in entry_axes(entry)]
    for axis in dict.fromkeys(axis for axis in axes if axes.count(axis) > 1):
        what = (
            f"{p.path}: a mesh axis can split one dim of a leaf, but {p.spec} (rule {p.by}) uses "
            f"{axis!r} {axes.count(axis)} times for shape {p.leaf.shape}"
        )
        yield Refusal("axis-twice", p.path, what, "keep it in one entry only")


def _batch_refused(
    p: Placement, batch_axes: Sequence[str], mesh: Mesh | AbstractMesh | None
) -> Iterator[Refusal]:
    for dim, entry in enumerate(p.given):
        for axis in entry_axes(entry):
            # What the rule itself gave is looked at, and not what `fsdp` added: ZeRO-3 splits over
            # the batch's axis on purpose.
            if axis in batch_axes and not p.visited:
                # Without a mesh the advice leaves the size open.
                size = "..." if mesh is None else mesh.shape.get(axis, "...")
                what = (
                    f"{p.path}: dim {dim} of shape {p.leaf.shape} is split over mesh axis "
                    f"{axis!r}, which splits the batch, by rule {name_of(p.rule)}, so each replica "
                    "would train a different model"
                )
                cure = (
                    f"split it with fsdp({axis!r}, size={size}) instead, or with rules.experts if "
                    f"tokens travel to it, or over another axis, or leave {axis!r} out of "
                    f"batch_axes={tuple(batch_axes)} if it does not split the batch"
                )
                yield Refusal("split-like-the-batch", p.path, what, cure)


def _sizes_refused(
    p: Placement, mesh: Mesh | AbstractMesh, stacked: Collection[str]
) -> Iterator[Refusal]:
    for dim, entry in enumerate(p.spec):
        subject = f"{p.path}: dim {dim} of shape {p.leaf.shape}"
        missing = [axis for axis in entry_axes(entry) if axis not in mesh.shape]
        if missing:
            yield Refusal(
                "no-such-axis",
                p.path,
                no_axis(f"{subject} (rule {p.by})", missing[0], mesh),
                "use one of these",
            )
            continue
        size = math.prod(mesh.shape[axis] for axis in entry_axes(entry))
        if p.leaf.shape[dim] % size:
            fit = free(p.leaf, padded(p.spec, p.leaf.ndim), size)
            others = (
                f"split dim {' or '.join(map(str, fit))}, which does"
                if fit
                else "no other dim that is free does"
            )
            sizes = " x ".join(f"{axis!r} of size {mesh.shape[axis]}" for axis in entry_axes(entry))
            what = (
                f"{subject} must divide by {size}, the size of its mesh axes ({sizes}; rule {p.by})"
            )
            cure = f"{others}, or replicate this leaf with P()"
            # To replicate one leaf of the stacked ones would give its device all layers.
            if set(entry_axes(entry)) & set(stacked):
                more = -(-p.leaf.shape[dim] // size) * size
                cure = (
                    f"all leaves have this dim split there: make it {more}, a multiple of {size}, "
                    "or the mesh axis smaller"
                )
            yield Refusal("does-not-divide", p.path, what, cure)


def no_axis(where: str, axis: Any, mesh: Mesh | AbstractMesh) -> str:
    """Returns the words for an axis that the mesh lacks."""
    known = ", ".join(f"{name!r} of size {size}" for name, size in mesh.shape.items())
    return f"{where}: there is no axis {axis!r} in the mesh, whose axes are {known}"


def _fitting(
    p: Placement, batch_axes: Sequence[str], mesh: Mesh | AbstractMesh | None
) -> PartitionSpec:
    """Returns the spec that the rule gave, without the axes that do not fit."""
    used = {
        *batch_axes,
        *(axis for wrapper in p.wrappers for axis in entry_axes(wrapper.axis_name)),
    }
    entries = []
    # A spec may be shorter than its leaf has dims; the others are whole.
    for length, entry in zip(p.leaf.shape, p.given, strict=False):
        fitting = []
        for axis in entry_axes(entry):
            size = (
                1
                if mesh is None
                else math.prod(mesh.shape.get(name, 0) for name in (*fitting, axis))
            )
            if axis not in used and size and length % size == 0:
                fitting.append(axis)
                used.add(axis)
        entries.append(tuple(fitting) if len(fitting) > 1 else next(iter(fitting), None))
    return spec_of(entries)


def free(leaf: Any, entries: list, size: int) -> list[int]:
    """Returns the dims that no axis splits yet and that divide by `size`."""
    return [
        dim
        for dim, length in enumerate(leaf.shape)
        if not entry_axes(entries[dim]) and length % size == 0
    ]


def padded(spec: PartitionSpec, ndim: int) -> list:
    """Returns the entries of a spec, one for each dim."""
    return [*spec, *[None] * (ndim - len(spec))]


def spec_of(entries: list) -> PartitionSpec:
    """Returns the spec of these entries, without trailing Nones."""
    # JAX takes P() and P(None) for two specs.
    while entries and entries[-1] is None:
        entries = entries[:-1]
    return P(*entries)


def name_of(rule: Callable[..., Any], wrappers: tuple[Any, ...] = ()) -> str:
    """Returns a rule, and what is around it, in words."""
    return " inside ".join([getattr(rule, "__qualname__", repr(rule)), *map(repr, wrappers)])
