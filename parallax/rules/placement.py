"""A leaf and the spec that a rule gave it: whether the spec fits, and the error if it does not.

An entry of a spec says which mesh axes split one dim; `entry_axes` gives these axes as a tuple. The
*wrappers* of a leaf are the `fsdp`s around the leaf's rule. Each wrapper may split one more dim.
The *batch axes* split the batch. A parameter must be the same along these axes, unless an `fsdp`
splits it. In a placement `p`, `p.given` is the rule's own spec, `p.spec` is the spec after the
wrappers, and `p.by` is the name of the rule and its wrappers. *Stacked* axes are mesh axes that
split the dim of stacked layers, in every leaf with stacked layers.
"""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.sharding import PartitionSpec as P

from parallax.trees import entry_axes


@dataclass(frozen=True)
class Refusal:
    """An error in a rule, or in the spec that it gave a leaf.

    Attributes:
        kind: the kind of error, such as "does-not-divide".
        where: the path of the leaf, or the rule.
        what: the text of the error, which says what was needed and what was found instead.
        cure: the text that says what to do.
        fits: a spec that the leaf could have, which is its own spec without the axes that do not
            fit.
    """

    kind: str
    where: str
    what: str
    cure: str
    fits: PartitionSpec | None = None

    @property
    def advice(self) -> str:
        """What to do about the error, and a spec that would fit, if one is known."""
        return f"{self.cure}." if self.fits is None else f"{self.cure}. {self.fits} would fit."

    def __str__(self) -> str:
        return f"{self.what}; {self.advice}"


@dataclass(frozen=True)
class Placement:
    """The spec of one leaf, and how it came about.

    Attributes:
        path: the leaf's dotted path.
        leaf: the array, or its `jax.ShapeDtypeStruct`.
        rule: the rule that gave the leaf its spec.
        given: the spec that this rule gave.
        wrappers: the `rules.fsdp`s around that rule, innermost first.
        spec: the spec after all `wrappers`.
        why: in words, what each of the `wrappers` changed, or why it changed nothing.
        is_expert: whether the leaf belongs to experts. The tokens of all replicas are sent to the
            experts, so an axis that splits the batch may split such a leaf too.
    """

    path: str
    leaf: Any
    rule: Callable[..., Any]
    given: PartitionSpec
    wrappers: tuple[Any, ...]
    spec: PartitionSpec
    why: tuple[str, ...]
    is_expert: bool = False

    @property
    def by(self) -> str:
        """The rule and its wrappers, in words."""
        return name_of(self.rule, self.wrappers)


def refused(
    p: Placement,
    batch_axes: Sequence[str],
    mesh: Mesh | AbstractMesh | None,
    stacked: Collection[str] = (),
) -> list[Refusal]:
    """Returns the errors in the spec of a leaf. The `fits` of an error is a spec that the error's
    message advises. `fits` is None for a "does-not-divide" error if an axis in `stacked` splits the
    leaf.

    Args:
        p: the leaf and its spec.
        batch_axes: the axes that split the batch.
        mesh: the mesh; without a mesh, errors that depend on its sizes are not found.
        stacked: the axes that seem to split layers (see `stacked_axes`). If such an axis splits the
            leaf, no "does-not-divide" error advises a spec, whichever dim it is about. A spec that
            fits might lack the stacked axis, and each device would then run all layers.
    """
    refusals = [*_entries_refused(p), *_batch_refused(p, batch_axes, mesh)]
    # Sizes come last: a spec with more entries than dims has entries without a size to compare.
    if mesh is not None and not refusals:
        refusals = list(_sizes_refused(p, mesh, stacked))
    splits_layers = any(axis in stacked for entry in p.spec for axis in entry_axes(entry))

    def advised(refusal):
        """Returns `refusal` with the advised spec in its field `fits`. `stacked` are the axes that
        seem to split layers. If one of them splits the leaf, a "does-not-divide" refusal is
        returned unchanged."""
        if refusal.kind == "does-not-divide" and splits_layers:
            return refusal
        return replace(refusal, fits=_fitting(p, batch_axes, mesh))

    return list(map(advised, refusals))


def stacked_axes(placements: Sequence[Placement]) -> set[str]:
    """Returns the axes that seem to split layers, as the axis of a pipeline's stages does.

    An axis seems to split layers if it splits two leaves or more, and splits the same dim of the
    same size in each of them.
    """
    dims_by_axis: dict[str, list[tuple[int, int]]] = {}
    for p in placements:
        # `p.spec` is not used: an `fsdp` may split the same dim in many leaves, and that dim need
        # not be the dim of layers. A spec may have more entries than dims, which only `refused`
        # reports.
        for dim, entry in enumerate(p.given[: p.leaf.ndim]):
            for axis in entry_axes(entry):
                dims_by_axis.setdefault(axis, []).append((dim, p.leaf.shape[dim]))
    # The split dim of a single leaf may be any dim; the same dim and size in several leaves are
    # taken for layers.
    return {axis for axis, dims in dims_by_axis.items() if len(dims) > 1 and len(set(dims)) == 1}


def _entries_refused(p: Placement) -> Iterator[Refusal]:
    """Yields an error if the spec has more entries than the leaf has dims, and one for each axis
    that the spec uses more than once."""
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
            f"{p.path}: a mesh axis can split only one dim of a leaf, but {p.spec} (rule {p.by}) "
            f"uses {axis!r} {axes.count(axis)} times for shape {p.leaf.shape}"
        )
        yield Refusal("axis-twice", p.path, what, "keep it in one entry only")


def _batch_refused(
    p: Placement, batch_axes: Sequence[str], mesh: Mesh | AbstractMesh | None
) -> Iterator[Refusal]:
    """Yields an error for each dim that the rule itself splits over an axis of the batch. An `fsdp`
    around the rule may split a dim over such an axis, and so may a rule for experts."""
    for dim, entry in enumerate(p.given):
        for axis in entry_axes(entry):
            # `p.given` has no splits by `fsdp`: ZeRO-3 splits over the batch's axis on purpose.
            if axis in batch_axes and not p.is_expert:
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
    """Yields an error for each dim whose axes do not fit: the mesh lacks one of these axes, or the
    size of the dim is not a multiple of the number of devices along these axes. `stacked` are the
    axes that seem to split the dim of layers, since they split the same dim, of the same size, in
    several leaves (see `stacked_axes`). The caller has checked that the spec has no more entries
    than the leaf has dims."""
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
                f"split dim {' or '.join(map(str, fit))}, which is a multiple of {size}, or"
                if fit
                else f"no other free dim is a multiple of {size}, so"
            )
            sizes = " x ".join(f"{axis!r} of size {mesh.shape[axis]}" for axis in entry_axes(entry))
            what = (
                f"{subject} must be a multiple of {size}, the size of its mesh axes ({sizes}; "
                f"rule {p.by})"
            )
            cure = f"{others} replicate this leaf with P()"
            # In a leaf of stacked layers, another dim or P() would let each device run all layers.
            if set(entry_axes(entry)) & set(stacked):
                more = -(-p.leaf.shape[dim] // size) * size
                cure = (
                    f"all leaves are split alike in this dim: make it {more}, a multiple of "
                    f"{size}, or make the mesh axis smaller"
                )
            yield Refusal("does-not-divide", p.path, what, cure)


def no_axis(where: str, axis: Any, mesh: Mesh | AbstractMesh) -> str:
    """Returns the text of the error for an axis that the mesh lacks."""
    known = ", ".join(f"{name!r} of size {size}" for name, size in mesh.shape.items())
    return f"{where}: there is no axis {axis!r} in the mesh, whose axes are {known}"


def _fitting(
    p: Placement, batch_axes: Sequence[str], mesh: Mesh | AbstractMesh | None
) -> PartitionSpec:
    """Returns the spec to advise: the rule's own spec, without the axes that do not fit the leaf.

    An axis does not fit the leaf if the mesh lacks it, or if an earlier dim is split over it. A dim
    may have several axes, which are added one by one. An axis also does not fit if the dim's size
    is no multiple of the number of devices along this axis and the axes that were added before it.
    The batch axes never fit, since replicas would differ. The axes of the wrappers (the `fsdp`s
    around the leaf's rule) never fit either, since each `fsdp` adds its axis to the spec itself.
    """
    # The axes that no further dim may have.
    used = {
        *batch_axes,
        *(axis for wrapper in p.wrappers for axis in entry_axes(wrapper.axis_name)),
    }
    entries = []
    # Not `strict`: a spec may have fewer entries than the leaf has dims. The other dims are whole.
    # A spec may also have more entries than dims, which is one of the errors.
    for length, entry in zip(p.leaf.shape, p.given, strict=False):
        fitting = []
        for axis in entry_axes(entry):
            # The number of devices along this axis and the axes that the dim has so far. The number
            # is 0 if the mesh lacks the axis. Without a mesh the number is 1, so that every dim
            # fits.
            size = (
                1
                if mesh is None
                else math.prod(mesh.shape.get(name, 0) for name in (*fitting, axis))
            )
            if axis not in used and size and length % size == 0:
                fitting.append(axis)
                used.add(axis)
        # An entry is None, a name, or a tuple of names.
        entries.append(tuple(fitting) if len(fitting) > 1 else next(iter(fitting), None))
    return spec_of(entries)


def free(leaf: Any, entries: list, size: int) -> list[int]:
    """Returns the dims that no axis splits yet and that are multiples of `size`; `entries` are the
    entries of the leaf's spec, one for each dim."""
    return [
        dim
        for dim, length in enumerate(leaf.shape)
        if not entry_axes(entries[dim]) and length % size == 0
    ]


def padded(spec: PartitionSpec, ndim: int) -> list:
    """Returns the entries of a spec, one for each dim: None for a dim that the spec does not
    mention."""
    return [*spec, *[None] * (ndim - len(spec))]


def spec_of(entries: list) -> PartitionSpec:
    """Returns the spec of these entries, without trailing Nones."""
    # JAX treats P() and P(None) as different specs.
    while entries and entries[-1] is None:
        entries = entries[:-1]
    return P(*entries)


def name_of(rule: Callable[..., Any], wrappers: tuple[Any, ...] = ()) -> str:
    """Returns the name of a rule and of the wrappers around it, in words: `rule inside fsdp(...)`.

    The name of a function is its `__qualname__`, and the name of any other rule is its `repr`.
    """
    return " inside ".join([getattr(rule, "__qualname__", repr(rule)), *map(repr, wrappers)])
