"""A rule asked about every leaf of a tree: its spec, why, and the refusal of what would not run, or
would run and train something else."""

import difflib
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.sharding import PartitionSpec as P

from parallax._typing import PyTree, Rule, Specs
from parallax.rules.makers import experts, first, fsdp, match, matches_glob
from parallax.rules.placement import Placement, Refusal, name_of, no_axis, refused, stacked_axes
from parallax.trees import RENAME, SpecsByPath, entry_axes, is_array, twice


def paths(tree: PyTree) -> list[tuple[str, Any]]:
    """Returns each leaf of `tree` with its dotted path, in the order of `jax.tree.leaves`:
    `[("blocks.0.weight", leaf), ...]`.

    The parts are attributes, dict keys and sequence indices. Leaves that are no arrays are listed
    too, so it also reads specs.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(jax.tree_util.keystr(path, simple=True, separator="."), leaf) for path, leaf in leaves]


def specs(
    tree: PyTree,
    rule: Rule,
    mesh: Mesh | AbstractMesh | None = None,
    *,
    batch_axes: Sequence[str] = (),
) -> Specs:
    """Returns the spec that `rule` gives each array of `tree`: a tree of the same structure, with
    None where a leaf is no array.

    Arrays may be `jax.ShapeDtypeStruct`s, so `tree` can come from `eqx.filter_eval_shape`. The
    result serves as the `in_specs` of the arrays of `tree`, filtered out with `eqx.filter` or
    `eqx.partition`.

    Raises `ValueError` at the first of these (`audit` lists all): two arrays of one path; a rule or
    `keep` pattern that matches no leaf, or only leaves that earlier rules take; a leaf without a
    rule; an `fsdp` whose `size` is not that of the mesh; then, leaf by leaf, a spec with more
    entries than dims or with an axis twice; a dim split over one of `batch_axes` by anything other
    than `fsdp` or `experts`, since then each replica would train a different model; an axis that
    the mesh lacks or whose size does not divide the dim. Without a mesh, what needs its sizes is
    not checked.
    """
    # Leaves that are no arrays keep their places, with None, so that the specs fit the tree.
    leaves, treedef = jax.tree.flatten(tree)
    placed, refusals = audit(tree, rule, mesh, batch_axes=batch_axes)
    _raise_first(refusals)
    specs_in_order = iter(placed.values())
    return jax.tree.unflatten(
        treedef, [next(specs_in_order) if is_array(leaf) else None for leaf in leaves]
    )


class Audit(NamedTuple):
    """What a rule makes of a tree.

    Attributes:
        specs: of the arrays whose spec would do, by path.
        refusals: what is wrong, in the order in which `specs` would raise it.
    """

    specs: dict[str, PartitionSpec]
    refusals: list[Refusal]


def audit(
    tree: PyTree,
    rule: Rule,
    mesh: Mesh | AbstractMesh | None = None,
    *,
    batch_axes: Sequence[str] = (),
) -> Audit:
    """Returns the specs that `specs` gives and all that it refuses, in its order."""
    batch_axes = (batch_axes,) if isinstance(batch_axes, str) else batch_axes
    placements, refusals = _placements(tree, rule)
    if mesh is not None:
        for wrapper in {
            # By identity: a rule that was given twice is told once, and rules need not be hashable.
            id(wrapper): wrapper
            for p in placements
            for wrapper in p.wrappers
        }.values():
            refusals += _size_refusals(wrapper, mesh)
    # All leaves are known first: only together do they show that an axis splits the layers.
    specs, stacked = {}, stacked_axes(placements)
    for placement in placements:
        refusals_of_leaf = refused(placement, batch_axes, mesh, stacked)
        refusals += refusals_of_leaf
        if not refusals_of_leaf:
            specs[placement.path] = placement.spec
    return Audit(specs, refusals)


def _raise_first(refusals: list[Refusal]) -> None:
    if refusals:
        raise ValueError(str(refusals[0]))


def explain(tree: PyTree, rule: Rule) -> dict[str, str]:
    """Describes for each array's path its spec, the rule that gave it, and what each `fsdp`
    changed.

    Raises:
        ValueError: a rule that gives no leaf its spec, a `keep` pattern that matches none, or a
            leaf that gets none.
    """
    placements, refusals = _placements(tree, rule)
    _raise_first(refusals)
    return {
        p.path: "; ".join([f"{p.spec}: {name_of(p.rule)}", *map("{} {}".format, p.wrappers, p.why)])
        for p in placements
    }


def _placements(tree: PyTree, rule: Rule) -> tuple[list[Placement], list[Refusal]]:
    """Returns the placements of the arrays of `tree`, in order, and the refusals of idle rules and
    of leaves that get no spec."""
    arrays = [(path, leaf) for path, leaf in paths(tree) if is_array(leaf)]
    # Rule by rule and not leaf by leaf, so that a rule which never gets a leaf is seen.
    taken: dict[int, Placement] = {}
    refusals, unplaced = (
        [_same_path(path, arrays) for path in twice([path for path, _ in arrays])],
        set(),
    )
    for part, wrappers in _parts(rule) if arrays else ():
        fresh = {}
        for i, (path, leaf) in enumerate(arrays):
            if i not in taken and (given := part(path, leaf)) is not None:
                if not isinstance(given, PartitionSpec):
                    refusals.append(_no_spec(path, part, given))
                    unplaced.add(i)
                    given = P()  # in its stead
                fresh[i] = _placement(path, leaf, part, given, wrappers)
        may_be_idle = part == SpecsByPath() or _keeps_the_rest(part, wrappers, taken)
        if not fresh and not may_be_idle:
            refusals.append(_idle(part, name_of(part, wrappers), arrays, taken))
        taken |= fresh
    for wrapper in (
        {id(wrapper): wrapper for _, wrappers in _parts(rule) for wrapper in wrappers}.values()
        if arrays
        else ()
    ):
        for pattern in wrapper.keep:
            if not any(matches_glob(pattern, path) for path, _ in arrays):
                what = f"keep pattern {pattern!r} of rule {wrapper} {_no_match(pattern, arrays)}"
                refusals.append(
                    Refusal(
                        "idle-keep",
                        f"{wrapper}",
                        what,
                        "correct the pattern. Or drop it: it keeps nothing",
                    )
                )
    refusals += [
        _uncovered(path, leaf, rule) for i, (path, leaf) in enumerate(arrays) if i not in taken
    ]
    return [taken[i] for i in sorted(taken) if i not in unplaced], refusals


def _placement(
    path: str, leaf: Any, rule: Rule, given: PartitionSpec, wrappers: tuple[fsdp, ...]
) -> Placement:
    spec, why = given, []
    for wrapper in wrappers:
        # An expert's axis may split the batch too; to split another dim over it would use the axis
        # twice.
        used_already = {name for entry in spec for name in entry_axes(entry)} & set(
            entry_axes(wrapper.axis_name)
        )
        if isinstance(rule, experts) and used_already:
            reason = f"adds no split: the experts are split over {sorted(used_already)} already"
        else:
            spec, reason = wrapper.split(path, leaf, spec)
        why.append(reason)
    return Placement(
        path, leaf, rule, given, wrappers, spec, tuple(why), visited=isinstance(rule, experts)
    )


def _same_path(path: str, arrays: list[tuple[str, Any]]) -> Refusal:
    shapes = " and ".join(str(leaf.shape) for name, leaf in arrays if name == path)
    what = (
        f"{path}: each leaf needs a path of its own, and this one is that of leaves of shape "
        f"{shapes}"
    )
    return Refusal("same-path", path, what, RENAME)


def _no_spec(path: str, rule: Rule, given: Any) -> Refusal:
    what = f"{path}: a rule must give a PartitionSpec or None, but {name_of(rule)} gave {given!r}"
    return Refusal("no-spec", path, what, "return P(...)", P())


def _uncovered(path: str, leaf: Any, rule: Rule) -> Refusal:
    names = [name_of(*part) for part in _parts(rule)]
    what = (
        f"{path}: each leaf needs a rule, but none of the {len(names)} "
        f"rules{_nearest(path, names)} covers this leaf of shape {leaf.shape}"
    )
    return Refusal("no-rule", path, what, f"add one, such as match({path!r}, P()) to keep it whole")


def _parts(rule: Rule, wrappers: tuple[fsdp, ...] = ()) -> Iterator[tuple[Rule, tuple[fsdp, ...]]]:
    """Returns the rules at the bottom of `first` and `fsdp`, in the order in which they are asked,
    each with the `fsdp`s around it."""
    if isinstance(rule, first):
        for part in rule.rules:
            yield from _parts(part, wrappers)
    elif isinstance(rule, fsdp):
        # Innermost first: an outer `fsdp` splits what the inner one left.
        yield from _parts(rule.inside, (rule, *wrappers))
    else:
        yield rule, wrappers


def _keeps_the_rest(rule: Rule, wrappers: tuple[fsdp, ...], taken: dict[int, Placement]) -> bool:
    """Returns whether this is `match("**", P())`, which may end any list of rules: there need not
    be a rest. An `fsdp` around it needs a leaf by another rule."""
    used = {id(wrapper) for placement in taken.values() for wrapper in placement.wrappers}
    ends_a_list = isinstance(rule, match) and (rule.pattern, rule.spec) == ("**", P())
    return ends_a_list and used.issuperset(map(id, wrappers))


def _idle(
    rule: Rule, name: str, arrays: list[tuple[str, Any]], taken: dict[int, Placement]
) -> Refusal:
    if not isinstance(rule, match):
        left = len(arrays) - len(taken)
        what = (
            f"rule {name} gives None for all leaves that earlier rules leave ({left} of "
            f"{len(arrays)})"
        )
        return Refusal("idle-rule", name, what, "change or remove it")
    # A pattern that matches nothing is misspelt; one whose leaves are taken stands too late.
    hits = [i for i, (path, _) in enumerate(arrays) if matches_glob(rule.pattern, path)]
    if not hits:
        what = f"rule {name} {_no_match(rule.pattern, arrays)}"
        return Refusal("idle-rule", name, what, "correct the pattern, or remove the rule")
    by = taken[hits[0]]
    what = (
        f"rule {name} places no leaf: all that it matches ({len(hits)} of {len(arrays)}) are taken "
        f"by earlier rules ({by.path} by {by.by})"
    )
    return Refusal("idle-rule", name, what, "put it before them, or remove it")


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


def _no_match(pattern: str, arrays: list[tuple[str, Any]]) -> str:
    return (
        f"matches none of the {len(arrays)} leaves{_nearest(pattern, [path for path, _ in arrays])}"
    )


def _nearest(text: str, choices: list[str]) -> str:
    return "".join(
        f" (the nearest is {choice})"
        for choice in difflib.get_close_matches(text, choices, n=1, cutoff=0)
    )
