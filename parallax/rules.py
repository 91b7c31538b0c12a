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
from typing import Any, NamedTuple

import equinox as eqx
import jax
import optax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from parallax.mesh import entry_axes
from parallax.placement import Placement, Refusal, free, name_of, no_axis, padded, refused, spec_of

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

    Raises:
        ValueError: `size` is below 1.
    """

    axis_name: str | tuple[str, ...]
    size: int = field(kw_only=True)
    min_size: int = field(default=2**10, kw_only=True)
    keep: Mapping[str, Sequence[int]] = field(default_factory=dict, kw_only=True, hash=False)
    inside: Rule = field(default=match("**", P()), kw_only=True)

    def __post_init__(self):
        if self.size < 1:
            raise ValueError(
                f"fsdp({self.axis_name!r}) needs the size of its mesh axis, 1 or more; got {self.size}. Pass size=1."
            )

    def __call__(self, path: str, leaf: Any) -> PartitionSpec | None:
        """What `inside` gives, with one more dim split where one fits."""
        spec = self.inside(path, leaf)
        return None if spec is None else self.split(path, leaf, spec)[0]

    def __repr__(self) -> str:
        return f"fsdp({self.axis_name!r}, size={self.size})"

    def split(self, path: str, leaf: Any, spec: PartitionSpec) -> tuple[PartitionSpec, str]:
        """`spec` with one more dim split, or as it was, and the reason in words."""
        entries = padded(spec, leaf.ndim)
        dims = [dim for pattern in self.keep if _covers(pattern, path) for dim in self.keep[pattern]]
        kept = {dim + leaf.ndim if dim < 0 else dim for dim in dims}
        fit = [dim for dim in free(leaf, entries, self.size) if dim not in kept]
        if leaf.size < self.min_size:
            return spec, f"adds no split: {leaf.size} elements are fewer than min_size={self.min_size}"
        if not fit:
            spared = f" (keep spares {sorted(kept)})" if kept else ""
            return spec, f"adds no split: no free dim of shape {leaf.shape} divides by {self.size}{spared}"
        dim = max(fit, key=lambda dim: leaf.shape[dim])
        entries[dim] = self.axis_name
        return spec_of(entries), f"splits dim {dim} of shape {leaf.shape}"


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

    Raises `ValueError` at the first of these (`survey` lists all): a rule or `keep` pattern that matches no leaf, or only
    leaves that earlier rules take; a leaf without a rule; an `fsdp` whose `size` is not that of the mesh; then, leaf by leaf, a
    spec with more entries than dims or with an axis twice; a dim split over one of `batch_axes` by anything other than `fsdp`,
    since then each replica would train a different model; an axis that the mesh lacks or whose size does not divide the dim.
    Without a mesh, what needs its sizes is not checked.
    """
    leaves, treedef = jax.tree.flatten(tree)
    placed, refusals = survey(tree, rule, mesh, batch_axes=batch_axes)
    _raise_first(refusals)
    found = iter(placed.values())
    return jax.tree.unflatten(treedef, [next(found) if _is_array(leaf) else None for leaf in leaves])


class Survey(NamedTuple):
    """What a rule makes of a tree.

    Attributes:
        specs: of the arrays whose spec would do, by path.
        refusals: what is wrong, in the order in which `specs` would raise it.
    """

    specs: dict[str, PartitionSpec]
    refusals: list[Refusal]


def survey(tree: PyTree, rule: Rule, mesh: Mesh | AbstractMesh | None = None, *, batch_axes: Sequence[str] = ("data",)) -> Survey:
    """What `specs` gives and all that it refuses, in the order in which it would."""
    placements, refusals = _placements(tree, rule)
    if mesh is not None:
        for wrapper in {id(wrapper): wrapper for p in placements for wrapper in p.wrappers}.values():
            refusals += _size_refusals(wrapper, mesh)
    specs = {}
    for placement in placements:
        found = refused(placement, batch_axes, mesh)
        refusals += found
        if not found:
            specs[placement.path] = placement.spec
    return Survey(specs, refusals)


def _raise_first(refusals: list[Refusal]) -> None:
    if refusals:
        raise ValueError(str(refusals[0]))


def explain(tree: PyTree, rule: Rule) -> dict[str, str]:
    """For the path of each array of `tree`, its spec and why: which rule gave it, and what each `fsdp` made of that.

    Raises:
        ValueError: a rule that gives no leaf its spec, a `keep` pattern that matches none, or a leaf that gets none.
    """
    placements, refusals = _placements(tree, rule)
    _raise_first(refusals)
    return {p.path: "; ".join([f"{p.spec}: {name_of(p.rule)}", *map("{} {}".format, p.wrappers, p.why)]) for p in placements}


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
    entries = padded(spec, leaf.ndim)
    if not any(entry_axes(entry) for entry in entries):
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
    return spec_of([column[0] if len(set(column)) == 1 else None for column in zip(*readings, strict=True)])


def _placements(tree: PyTree, rule: Rule) -> tuple[list[Placement], list[Refusal]]:
    """The placements of the arrays of `tree`, in order, and the refusals of idle rules and of leaves that get no spec."""
    arrays = [(path, leaf) for path, leaf in paths(tree) if _is_array(leaf)]
    taken: dict[int, Placement] = {}
    refusals, unplaced = [], set()
    for part, wrappers in _parts(rule) if arrays else ():
        fresh = {}
        for i, (path, leaf) in enumerate(arrays):
            if i not in taken and (given := part(path, leaf)) is not None:
                if not isinstance(given, PartitionSpec):
                    refusals.append(_no_spec(path, part, given))
                    unplaced.add(i)
                    given = P()  # in its stead
                fresh[i] = _placement(path, leaf, part, given, wrappers)
        if not fresh:
            refusals.append(_idle(part, name_of(part, wrappers), arrays, taken))
        taken |= fresh
    for wrapper in {id(wrapper): wrapper for _, wrappers in _parts(rule) for wrapper in wrappers}.values() if arrays else ():
        for pattern in wrapper.keep:
            if not any(_covers(pattern, path) for path, _ in arrays):
                what = f"keep pattern {pattern!r} of rule {wrapper} {_no_match(pattern, arrays)}"
                refusals.append(Refusal("idle-keep", f"{wrapper}", what, "correct the pattern. Or drop it: it keeps nothing"))
    refusals += [_uncovered(path, leaf, rule) for i, (path, leaf) in enumerate(arrays) if i not in taken]
    return [taken[i] for i in sorted(taken) if i not in unplaced], refusals


def _placement(path: str, leaf: Any, rule: Rule, given: PartitionSpec, wrappers: tuple[fsdp, ...]) -> Placement:
    spec, why = given, []
    for wrapper in wrappers:
        spec, reason = wrapper.split(path, leaf, spec)
        why.append(reason)
    return Placement(path, leaf, rule, given, wrappers, spec, tuple(why))


def _no_spec(path: str, rule: Rule, given: Any) -> Refusal:
    what = f"{path}: a rule must give a PartitionSpec or None, but {name_of(rule)} gave {given!r}"
    return Refusal("no-spec", path, what, "return P(...)", P())


def _uncovered(path: str, leaf: Any, rule: Rule) -> Refusal:
    names = [name_of(*part) for part in _parts(rule)]
    what = (
        f"{path}: each leaf needs a rule, but none of the {len(names)} rules{_nearest(path, names)} covers this leaf of shape "
        f"{leaf.shape}"
    )
    return Refusal("no-rule", path, what, f"add one, such as match({path!r}, P()) to keep it whole")


def _parts(rule: Rule, wrappers: tuple[fsdp, ...] = ()) -> Iterator[tuple[Rule, tuple[fsdp, ...]]]:
    """The rules at the bottom of `first` and `fsdp`, in the order in which they are asked, each with the `fsdp`s around it."""
    if isinstance(rule, first):
        for part in rule.rules:
            yield from _parts(part, wrappers)
    elif isinstance(rule, fsdp):
        yield from _parts(rule.inside, (rule, *wrappers))
    else:
        yield rule, wrappers


def _idle(rule: Rule, name: str, arrays: list[tuple[str, Any]], taken: dict[int, Placement]) -> Refusal:
    if not isinstance(rule, match):
        left = len(arrays) - len(taken)
        what = f"rule {name} gives None for all leaves that earlier rules leave ({left} of {len(arrays)})"
        return Refusal("idle-rule", name, what, "change or remove it")
    hits = [i for i, (path, _) in enumerate(arrays) if _covers(rule.pattern, path)]
    if not hits:
        what = f"rule {name} {_no_match(rule.pattern, arrays)}"
        return Refusal("idle-rule", name, what, "correct the pattern, or remove the rule")
    by = taken[hits[0]]
    what = (
        f"rule {name} places no leaf: all that it matches ({len(hits)} of {len(arrays)}) are taken by earlier rules ({by.path} "
        f"by {by.by})"
    )
    return Refusal("idle-rule", name, what, "put it before them, or remove it")


def _no_match(pattern: str, arrays: list[tuple[str, Any]]) -> str:
    return f"matches none of the {len(arrays)} leaves{_nearest(pattern, [path for path, _ in arrays])}"


def _nearest(text: str, choices: list[str]) -> str:
    return "".join(f" (the nearest is {choice})" for choice in difflib.get_close_matches(text, choices, n=1, cutoff=0))


def _covers(pattern: str, path: str) -> bool:
    def fits(globs: list[str], parts: list[str]) -> bool:
        if not globs:
            return not parts
        if globs[0] == "**":
            return fits(globs[1:], parts) or (bool(parts) and fits(globs, parts[1:]))
        return bool(parts) and fnmatchcase(parts[0], globs[0]) and fits(globs[1:], parts[1:])

    return fits(*(text.split(".") if text else [] for text in (pattern, path)))


def _size_refusals(rule: fsdp, mesh: Mesh | AbstractMesh) -> Iterator[Refusal]:
    missing = [axis for axis in entry_axes(rule.axis_name) if axis not in mesh.shape]
    if missing:
        yield Refusal(
            "no-such-axis",
            f"{rule}",
            no_axis(f"rule {rule}", missing[0], mesh),
            "use one of these, or the rules inside without the fsdp",
        )
        return
    size = math.prod(mesh.shape[axis] for axis in entry_axes(rule.axis_name))
    if size != rule.size:
        what = f"rule {rule}: the mesh has {size} devices along {rule.axis_name!r}, not {rule.size}"
        yield Refusal("wrong-size", f"{rule}", what, f"pass size={size}")


def _is_array(leaf: Any) -> bool:
    return eqx.is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)
