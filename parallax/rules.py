"""Where every leaf of a tree lives: a rule is a function (path, leaf) -> `PartitionSpec`, or None to leave it to another rule.

`match` gives one spec to all paths under a glob, `first` asks rules in order, `fsdp` splits one more dim of what another
rule gave. Any function of your own is a rule too. `specs` asks a rule about every leaf and refuses what would not run, or would
run and train something else.
"""

import difflib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import equinox as eqx
import jax
import optax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

Rule = Callable[[str, Any], PartitionSpec | None]


# `match`, `first` and `fsdp` are classes in lower case, as `functools.partial` is: made and called like functions, yet
# `specs` can look inside them to say which rule is at fault.


@dataclass(frozen=True)
class match:
    """The rule that gives `spec` to each path under the glob `pattern`, and None elsewhere.

    A pattern is matched part by part, the parts being set apart by dots: `**` stands for any number of parts (none
    included), and any other part is a file-name glob: `*` is one whole part, `w*` a part that begins with w.
    """

    pattern: str
    spec: PartitionSpec

    def __call__(self, path: str, leaf: Any) -> PartitionSpec | None:
        """`spec`, or None where the pattern does not match."""
        return self.spec if _covers(self.pattern, path) else None

    def __repr__(self) -> str:
        return f"match({self.pattern!r}, {self.spec})"


@dataclass(frozen=True, init=False)
class first:
    """The rule that gives what the first of `rules` to know the path gives."""

    rules: tuple[Rule, ...]

    def __init__(self, *rules: Rule):
        object.__setattr__(self, "rules", rules)

    def __call__(self, path: str, leaf: Any) -> PartitionSpec | None:
        """What the first rule to give a spec gives, or None."""
        given = (rule(path, leaf) for rule in self.rules)
        return next((spec for spec in given if spec is not None), None)


@dataclass(frozen=True)
class fsdp:
    """The rule of ZeRO-3: what `inside` gives, with the largest free dim that divides by `size` split over `axis_name`.

    Of equally large dims the first is taken. A leaf of fewer than `min_size` elements (counted before any split), or in which
    no free dim divides, stays as `inside` gave it; `explain` says which and why. `keep` maps globs to dims not to be split:
    `keep={"blocks.**": (0,)}` spares the layers dim that a scan runs over. To spare whole leaves, ask another rule first:
    `first(match("**.bias", P()), fsdp("data", size=8))`.

    `size` is that of the mesh axis (for a tuple of axes: their product), so that a rule needs no mesh; `specs` checks it.
    """

    axis_name: str | tuple[str, ...]
    size: int = field(kw_only=True)
    min_size: int = field(default=2**10, kw_only=True)
    keep: Mapping[str, Sequence[int]] = field(default_factory=dict, kw_only=True, hash=False)
    inside: Rule = field(default=match("**", P()), kw_only=True)

    def __call__(self, path: str, leaf: Any) -> PartitionSpec | None:
        """What `inside` gives, with one more dim split where one fits."""
        spec = self.inside(path, leaf)
        return None if spec is None else self.split(path, leaf, spec)[0]

    def __repr__(self) -> str:
        return f"fsdp({self.axis_name!r}, size={self.size})"

    def split(self, path: str, leaf: Any, spec: PartitionSpec) -> tuple[PartitionSpec, str]:
        """`spec` with one more dim split, or as it was, and the reason in words."""
        entries = _entries(spec, leaf.ndim)
        dims = [dim for pattern in self.keep if _covers(pattern, path) for dim in self.keep[pattern]]
        kept = {dim + leaf.ndim if dim < 0 else dim for dim in dims}
        fit = [dim for dim in _free(leaf, entries, self.size) if dim not in kept]
        if leaf.size < self.min_size:
            return spec, f"adds no split: {leaf.size} elements are fewer than min_size={self.min_size}"
        if not fit:
            spared = f" (keep spares {sorted(kept)})" if kept else ""
            return spec, f"adds no split: no free dim of shape {leaf.shape} divides by {self.size}{spared}"
        dim = max(fit, key=lambda dim: leaf.shape[dim])
        entries[dim] = self.axis_name
        return _spec(entries), f"splits dim {dim} of shape {leaf.shape}"


def paths(tree: PyTree) -> list[tuple[str, Any]]:
    """Each leaf of `tree` with its dotted path, in the order of `jax.tree.leaves`: `[("blocks.0.weight", leaf), ...]`.

    The parts are attributes, dict keys and sequence indices. Leaves that are no arrays are listed too, so it also reads specs.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(jax.tree_util.keystr(path, simple=True, separator="."), leaf) for path, leaf in leaves]


def specs(
    tree: PyTree, rule: Rule, mesh: Mesh | AbstractMesh | None = None, *, batch_axes: Sequence[str] = ("data",)
) -> PyTree[PartitionSpec | None]:
    """The spec that `rule` gives each array of `tree`: a tree of the same structure, with None where a leaf is no array.

    Arrays may be `jax.ShapeDtypeStruct`s, so `tree` can come from `eqx.filter_eval_shape`. The result serves as the `in_specs`
    of the arrays of `tree`, filtered out with `eqx.filter` or `eqx.partition`.

    Raises `ValueError` at the first of these: a rule or `keep` pattern that matches no leaf, or only leaves that earlier rules
    take; a leaf without a rule; an `fsdp` whose `size` is not that of the mesh; then, leaf by leaf, a spec with more entries
    than dims or with an axis twice; a dim split over one of `batch_axes` by anything other than `fsdp`, since then each replica
    would train a different model; an axis that the mesh lacks or whose size does not divide the dim. Without a mesh, what needs
    its sizes is not checked.
    """
    leaves, treedef = jax.tree.flatten(tree)
    placements = _placements(tree, rule)
    if mesh is not None:
        for wrapper in {id(wrapper): wrapper for p in placements for wrapper in p.wrappers}.values():
            _check_size(wrapper, mesh)
    for placement in placements:
        _check_entries(placement)
        _check_batch(placement, batch_axes, mesh)
        if mesh is not None:
            _check_sizes(placement, mesh)
    found = iter(placement.spec for placement in placements)
    return jax.tree.unflatten(treedef, [next(found) if _is_array(leaf) else None for leaf in leaves])


def explain(tree: PyTree, rule: Rule) -> dict[str, str]:
    """For the path of each array of `tree`, its spec and why: which rule gave it, and what each `fsdp` made of that."""
    return {
        p.path: "; ".join([f"{p.spec}: {_name(p.rule)}", *map("{} {}".format, p.wrappers, p.why)])
        for p in _placements(tree, rule)
    }


def optimizer_specs(
    optimizer: optax.GradientTransformation | optax.MultiSteps, tree: PyTree, specs: PyTree[PartitionSpec | None]
) -> PyTree[PartitionSpec]:
    """A spec for each array of `optimizer.init(arrays of tree)`: moments follow their parameter, all else (counts) is `P()`.

    `specs` is what `specs(tree, rule)` gives. A moment of another shape than its parameter must be that parameter reduced over
    some dims (dropped, or kept as 1), as the factored moments of Adafactor are: each dim that is left stays split as it was.
    Where equal sizes leave open which dim was reduced, only the splits that all readings share are kept. Any other shape is a
    `ValueError`, unless the parameter is whole: then so is all its state.

    The specs say where the state lives, not that an update on shards equals one on the whole. Under `jit` on global arrays it
    always does; inside `shard_map` only for elementwise optimizers (Adam, momentum, Lion): a mean or norm over a leaf, such as
    Adafactor's clipping, is taken over the shard, and nothing raises.
    """
    arrays = eqx.filter(tree, _is_array)
    treedef = jax.tree.structure(arrays)
    if treedef != jax.tree.structure(specs):
        raise ValueError(
            f"optimizer_specs needs one PartitionSpec for each of the {treedef.num_leaves} arrays of the tree, in its structure, "
            f"but got {jax.tree.structure(specs)}; pass what rules.specs(tree, rule) gives for this very tree."
        )
    names = jax.tree.unflatten(treedef, [path for path, _ in paths(arrays)])
    return optax.tree_map_params(
        optimizer,
        _moment_spec,
        jax.eval_shape(optimizer.init, arrays),
        arrays,
        specs,
        names,
        transform_non_params=lambda leaf: P(),
        is_leaf=lambda node: isinstance(node, optax.MaskedNode),
    )


def _moment_spec(moment: Any, leaf: Any, spec: PartitionSpec, path: str) -> PartitionSpec | optax.MaskedNode:
    if isinstance(moment, optax.MaskedNode):
        return moment
    if moment.shape == leaf.shape:
        return spec
    entries = _entries(spec, leaf.ndim)
    if not any(_axes(entry) for entry in entries):
        return P()
    readings = [
        [entries[dim] if size == leaf.shape[dim] else None for size, dim in zip(moment.shape, dims, strict=True)]
        for dims in itertools.combinations(range(leaf.ndim), moment.ndim)
        if all(size in (1, leaf.shape[dim]) for size, dim in zip(moment.shape, dims, strict=True))
    ]
    if not readings:
        raise ValueError(
            f"{path}: the optimizer keeps an array of shape {moment.shape} for this leaf of shape {leaf.shape}, which is not "
            f"that leaf reduced over some dims, so it cannot follow the spec {spec}; replicate the leaf with P(), or write "
            f"the specs of this state by hand."
        )
    return _spec([column[0] if len(set(column)) == 1 else None for column in zip(*readings, strict=True)])


@dataclass(frozen=True)
class _Placement:
    """What became of one leaf: `rule` gave `given`, and the `wrappers` around that rule, innermost first, made `spec` of it."""

    path: str
    leaf: Any
    rule: Rule
    given: PartitionSpec
    wrappers: tuple[fsdp, ...]
    spec: PartitionSpec
    why: tuple[str, ...]

    @property
    def by(self) -> str:
        return _name(self.rule, self.wrappers)


def _placements(tree: PyTree, rule: Rule) -> list[_Placement]:
    """The placement of each array of `tree`, in order. Refuses idle rules and leaves without a rule."""
    arrays = [(path, leaf) for path, leaf in paths(tree) if _is_array(leaf)]
    taken: dict[int, _Placement] = {}
    for part, wrappers in _parts(rule) if arrays else ():
        fresh = {}
        for i, (path, leaf) in enumerate(arrays):
            if i not in taken and (given := part(path, leaf)) is not None:
                fresh[i] = _placement(path, leaf, part, given, wrappers)
        if not fresh:
            raise ValueError(_idle(part, _name(part, wrappers), arrays, taken))
        for wrapper in wrappers:
            for pattern in wrapper.keep:
                if not any(_covers(pattern, path) for path, _ in arrays):
                    raise ValueError(f"keep pattern {pattern!r} of rule {wrapper} {_no_match(pattern, arrays)}.")
        taken |= fresh
    for i, (path, leaf) in enumerate(arrays):
        if i not in taken:
            names = [_name(*part) for part in _parts(rule)]
            raise ValueError(
                f"{path}: each leaf needs a rule, but none of the {len(names)} rules{_nearest(path, names)} covers this leaf of "
                f"shape {leaf.shape}; add one, such as match({path!r}, P()) to keep it whole."
            )
    return [taken[i] for i in range(len(arrays))]


def _placement(path: str, leaf: Any, rule: Rule, given: Any, wrappers: tuple[fsdp, ...]) -> _Placement:
    if not isinstance(given, PartitionSpec):
        raise ValueError(f"{path}: a rule must give a PartitionSpec or None, but {_name(rule)} gave {given!r}; return P(...).")
    spec, why = given, []
    for wrapper in wrappers:
        spec, reason = wrapper.split(path, leaf, spec)
        why.append(reason)
    return _Placement(path, leaf, rule, given, wrappers, spec, tuple(why))


def _parts(rule: Rule, wrappers: tuple[fsdp, ...] = ()) -> Iterator[tuple[Rule, tuple[fsdp, ...]]]:
    """The rules at the bottom of `first` and `fsdp`, in the order in which they are asked, each with the `fsdp`s around it."""
    if isinstance(rule, first):
        for part in rule.rules:
            yield from _parts(part, wrappers)
    elif isinstance(rule, fsdp):
        yield from _parts(rule.inside, (rule, *wrappers))
    else:
        yield rule, wrappers


def _idle(rule: Rule, name: str, arrays: list[tuple[str, Any]], taken: dict[int, _Placement]) -> str:
    if not isinstance(rule, match):
        left = len(arrays) - len(taken)
        return f"rule {name} gives None for all leaves that earlier rules leave ({left} of {len(arrays)}); change or remove it."
    hits = [i for i, (path, _) in enumerate(arrays) if _covers(rule.pattern, path)]
    if not hits:
        return f"rule {name} {_no_match(rule.pattern, arrays)}, or remove the rule."
    by = taken[hits[0]]
    return (
        f"rule {name} places no leaf: all that it matches ({len(hits)} of {len(arrays)}) are taken by earlier rules ({by.path} "
        f"by {by.by}); put it before them, or remove it."
    )


def _no_match(pattern: str, arrays: list[tuple[str, Any]]) -> str:
    near = _nearest(pattern, [path for path, _ in arrays])
    return f"matches none of the {len(arrays)} leaves{near}; correct the pattern"


def _nearest(text: str, choices: list[str]) -> str:
    return "".join(f" (the nearest is {choice})" for choice in difflib.get_close_matches(text, choices, n=1, cutoff=0))


def _check_entries(p: _Placement) -> None:
    if len(p.spec) > p.leaf.ndim:
        raise ValueError(
            f"{p.path}: a spec has at most one entry for each dim, but {p.spec} (rule {p.by}) has {len(p.spec)} for shape "
            f"{p.leaf.shape}, which has {p.leaf.ndim}; drop entries, or replicate this leaf with P()."
        )
    axes = [axis for entry in p.spec for axis in _axes(entry)]
    for axis in axes:
        if axes.count(axis) > 1:
            raise ValueError(
                f"{p.path}: a mesh axis can split one dim of a leaf, but {p.spec} (rule {p.by}) uses {axis!r} "
                f"{axes.count(axis)} times for shape {p.leaf.shape}; keep it in one entry only."
            )


def _check_batch(p: _Placement, batch_axes: Sequence[str], mesh: Mesh | AbstractMesh | None) -> None:
    for dim, entry in enumerate(p.given):
        for axis in _axes(entry):
            if axis in batch_axes:
                size = "..." if mesh is None else mesh.shape.get(axis, "...")
                raise ValueError(
                    f"{p.path}: dim {dim} of shape {p.leaf.shape} is split over mesh axis {axis!r}, which splits the batch, by "
                    f"rule {_name(p.rule)}, so each replica would train a different model; split it with fsdp({axis!r}, "
                    f"size={size}) instead, or over another axis, or leave {axis!r} out of batch_axes={tuple(batch_axes)} if "
                    f"it does not split the batch."
                )


def _check_size(rule: fsdp, mesh: Mesh | AbstractMesh) -> None:
    size = _size(_axes(rule.axis_name), mesh, f"rule {rule}")
    if size != rule.size:
        raise ValueError(f"rule {rule}: the mesh has {size} devices along {rule.axis_name!r}, not {rule.size}; pass size={size}.")


def _check_sizes(p: _Placement, mesh: Mesh | AbstractMesh) -> None:
    for dim, entry in enumerate(p.spec):
        size = _size(_axes(entry), mesh, f"{p.path}: dim {dim} of shape {p.leaf.shape} (rule {p.by})")
        if p.leaf.shape[dim] % size:
            fit = _free(p.leaf, _entries(p.spec, p.leaf.ndim), size)
            others = f"split dim {' or '.join(map(str, fit))}, which does" if fit else "no other dim that is free does"
            sizes = " x ".join(f"{axis!r} of size {mesh.shape[axis]}" for axis in _axes(entry))
            raise ValueError(
                f"{p.path}: dim {dim} of shape {p.leaf.shape} must divide by {size}, the size of its mesh axes ({sizes}; "
                f"rule {p.by}); {others}, or replicate this leaf with P()."
            )


def _size(axes: tuple[str, ...], mesh: Mesh | AbstractMesh, where: str) -> int:
    for axis in axes:
        if axis not in mesh.shape:
            known = ", ".join(f"{name!r} of size {size}" for name, size in mesh.shape.items())
            raise ValueError(f"{where}: there is no axis {axis!r} in the mesh, whose axes are {known}; use one of these.")
    return math.prod(mesh.shape[axis] for axis in axes)


def _covers(pattern: str, path: str) -> bool:
    def fits(globs: list[str], parts: list[str]) -> bool:
        if not globs:
            return not parts
        if globs[0] == "**":
            return fits(globs[1:], parts) or (bool(parts) and fits(globs, parts[1:]))
        return bool(parts) and fnmatchcase(parts[0], globs[0]) and fits(globs[1:], parts[1:])

    return fits(*(text.split(".") if text else [] for text in (pattern, path)))


def _free(leaf: Any, entries: list, size: int) -> list[int]:
    """The dims that no axis splits yet and that divide by `size`."""
    return [dim for dim, length in enumerate(leaf.shape) if not _axes(entries[dim]) and length % size == 0]


def _entries(spec: PartitionSpec, ndim: int) -> list:
    return [*spec, *[None] * (ndim - len(spec))]


def _spec(entries: list) -> PartitionSpec:
    """The spec of these entries, without trailing Nones."""
    while entries and entries[-1] is None:
        entries = entries[:-1]
    return P(*entries)


def _axes(entry: Any) -> tuple:
    if entry is None:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def _name(rule: Rule, wrappers: tuple[fsdp, ...] = ()) -> str:
    return " inside ".join([getattr(rule, "__qualname__", repr(rule)), *map(repr, wrappers)])


def _is_array(leaf: Any) -> bool:
    return eqx.is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)
