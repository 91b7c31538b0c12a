"""Applies a rule to every leaf of a tree: finds the leaf's spec, the rules that gave the spec, and
the errors in the rules and in the spec.

A *refusal* is an error found in a rule or a spec. With this error the program would not run, or not
do what was meant. `Refusal(kind, where, what, cure, fits)` has the error's text in `what`, and in
`fits` a spec that would be right, if one is known. The *placement* of a leaf is its spec and the
rules that gave it; the *wrappers* of a leaf are the `fsdp`s around its rule. `arrays` are the array
leaves of a tree, as (path, leaf). A rule *places* a leaf if it gives the leaf a spec, and is *idle*
if it places no leaf. The rules `first` and `fsdp` contain other rules; the *parts* of a rule are
the innermost rules, which contain no other rule. The `keep` of an `fsdp` maps globs of paths to
dims that the `fsdp` must not split.
"""

import difflib
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.sharding import PartitionSpec as P

from parallax._typing import PyTree, Rule, Specs
from parallax.rules.makers import experts, first, fsdp, match, matches_glob
from parallax.rules.placement import Placement, Refusal, name_of, no_axis, refused, stacked_axes
from parallax.trees import RENAME, SpecsByPath, entry_axes, is_array, twice


def paths(tree: PyTree) -> list[tuple[str, Any]]:
    """Returns each leaf of `tree` with its dotted path, in the order of `jax.tree.leaves`.

    An example is `[("blocks.0.weight", leaf), ...]`. The parts of a path are attributes, dict keys
    and sequence indices. Leaves that are no arrays are listed too, so `tree` may be a tree of
    specs.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(jax.tree_util.keystr(path, simple=True, separator="."), leaf) for path, leaf in leaves]


def specs(
    tree: PyTree,
    rule: Rule,
    mesh: Mesh | AbstractMesh | None = None,
    *,
    batch_axes: str | Iterable[Any] = (),
) -> Specs:
    """Returns the tree of the specs that `rule` gives the arrays of `tree`.

    The result has the structure of `tree`, with None for leaves that are no arrays. The result
    serves as the `in_specs` of the arrays of `tree`, once `eqx.filter` or `eqx.partition` has
    separated the arrays from the other leaves. Arrays may be `jax.ShapeDtypeStruct`s, so `tree` can
    come from `eqx.filter_eval_shape`.

    `batch_axes` are the axes that split the batch, the name of one, or the batch's spec. Only
    `fsdp` and `experts` may split a leaf over these axes. If another rule did, each replica would
    train a different model. Without a mesh, errors that depend on the mesh's axes and sizes are not
    found.

    Raises:
        ValueError: the first of the errors below; `audit` returns all these errors. Errors of the
            rules come first: two arrays have the same path; a rule or a `keep` pattern matches no
            leaf; a rule is never used, since earlier rules match all its leaves; a leaf has no
            rule; the mesh lacks one of `batch_axes`; the `size` of an `fsdp` is not the number of
            devices along its axis. Then come the errors of single leaves: a spec has more entries
            than the leaf has dims; a spec has an axis twice; a rule other than `fsdp` or `experts`
            splits a dim over one of `batch_axes`; the mesh lacks an axis; the size of an axis does
            not divide the dim.
    """
    # Leaves that are no arrays keep their places, with None, so that the specs fit the tree.
    leaves, treedef = jax.tree.flatten(tree)
    placed, refusals = audit(tree, rule, mesh, batch_axes=batch_axes)
    _raise_first(refusals)
    # `placed` has a spec for each array, in the order of the leaves.
    specs_in_order = iter(placed.values())
    return jax.tree.unflatten(
        treedef, [next(specs_in_order) if is_array(leaf) else None for leaf in leaves]
    )


class Audit(NamedTuple):
    """The specs that a rule gives the leaves of a tree, and the errors in the rule and the specs.

    Attributes:
        specs: a dict from the path of an array to its spec, for each array with a valid spec.
        refusals: the errors, in the order in which the function `specs` would raise them.
    """

    specs: dict[str, PartitionSpec]
    refusals: list[Refusal]


def audit(
    tree: PyTree,
    rule: Rule,
    mesh: Mesh | AbstractMesh | None = None,
    *,
    batch_axes: str | Iterable[Any] = (),
) -> Audit:
    """Returns the valid specs that `rule` gives the arrays of `tree`, and all errors in the rules
    and in the other specs.

    `specs` would raise the first of the errors that `audit` returns. `batch_axes` are the axes that
    split the batch, the name of one, or the batch's spec. Without a mesh, errors that depend on the
    mesh's axes and sizes are not found.
    """
    entries = (batch_axes,) if isinstance(batch_axes, str) else batch_axes
    batch_axes = tuple(axis for entry in entries for axis in entry_axes(entry))
    placements, refusals = _placements(tree, rule)
    if mesh is not None and (strange := [axis for axis in batch_axes if axis not in mesh.shape]):
        what = no_axis("batch_axes", strange[0], mesh)
        refusals.append(Refusal("no-such-axis", "batch_axes", what, "use some of these"))
    # Each `fsdp` around the rule of some leaf must have the size of its mesh axis.
    if mesh is not None:
        for wrapper in _each_once(p.wrappers for p in placements):
            refusals += _size_refusals(wrapper, mesh)
    # `stacked` are the axes that split the dim of layers in every leaf, such as the axis of a
    # pipeline's stages. A spec without such an axis is not advised: each device would run all
    # layers. Only all leaves together show that an axis splits layers.
    specs, stacked = {}, stacked_axes(placements)
    for placement in placements:
        refusals_of_leaf = refused(placement, batch_axes, mesh, stacked)
        refusals += refusals_of_leaf
        if not refusals_of_leaf:
            specs[placement.path] = placement.spec
    return Audit(specs, refusals)


def _raise_first(refusals: list[Refusal]) -> None:
    """Raises `ValueError` for the first error in `refusals`, if there is one."""
    if refusals:
        raise ValueError(str(refusals[0]))


def explain(tree: PyTree, rule: Rule) -> dict[str, str]:
    """Returns a text for each array, by path: the spec, the rule that gave the spec, and what each
    `fsdp` around that rule changed.

    Raises:
        ValueError: there is an error in the rules, such as a rule that matches no leaf (see
            `specs`). The specs themselves are not checked.
    """
    placements, refusals = _placements(tree, rule)
    _raise_first(refusals)
    explanations = {}
    for placement in placements:
        changes = map("{} {}".format, placement.wrappers, placement.why)
        reasons = [f"{placement.spec}: {name_of(placement.rule)}", *changes]
        explanations[placement.path] = "; ".join(reasons)
    return explanations


def _placements(tree: PyTree, rule: Rule) -> tuple[list[Placement], list[Refusal]]:
    """Returns two lists: the placements of the arrays of `tree`, in order, and the errors of the
    rules. An array to which no rule gives a spec has no placement.

    The errors are: paths that occur twice, rules that return something other than a spec or None,
    rules that give no leaf a spec, `keep` patterns that match no leaf, and leaves without a spec.
    """
    arrays = [(path, leaf) for path, leaf in paths(tree) if is_array(leaf)]
    if not arrays and any(map(is_array, jax.tree.leaves(rule))):
        raise ValueError(
            "The first argument is the tree and the second is the rule; got a tree without arrays "
            "and a rule that has arrays. Exchange the two arguments."
        )
    # The loop goes over the innermost rules (parts), not over the leaves, so that a rule that
    # places no leaf is found. `taken` maps the index of a leaf in `arrays` to its placement. In a
    # tree without arrays every rule would be idle, so none counts as idle.
    taken: dict[int, Placement] = {}
    refusals = [_same_path(path, arrays) for path in twice([path for path, _ in arrays])]
    unplaced = set()  # the indices of leaves for which a rule gave neither a spec nor None
    for part, wrappers in _parts(rule) if arrays else ():
        fresh = {}  # the placements by this rule
        for i, (path, leaf) in enumerate(arrays):
            if i not in taken and (given := part(path, leaf)) is not None:
                if not isinstance(given, PartitionSpec):
                    refusals.append(_no_spec(path, part, given))
                    unplaced.add(i)
                    # No later rule may take the leaf. The result leaves this placement out.
                    given = P()
                fresh[i] = _placement(path, leaf, part, given, wrappers)
        # `SpecsByPath` is a rule made from a dict of specs. For a model without the layers of
        # `parallax.tensor`, `tensor.rule` returns an empty one. Such a rule may be idle, and so may
        # a last rule for the rest.
        may_be_idle = part == SpecsByPath() or _keeps_the_rest(part, wrappers, taken)
        if not fresh and not may_be_idle:
            refusals.append(_idle(part, name_of(part, wrappers), arrays, taken))
        taken |= fresh
    # Every glob in the `keep` of an `fsdp` must match a leaf.
    for wrapper in _each_once(wrappers for _, wrappers in _parts(rule)):
        for pattern in wrapper.keep:
            if arrays and not any(matches_glob(pattern, path) for path, _ in arrays):
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
    """Returns the `Placement` of a leaf. It has the spec `given` by the leaf's rule, the spec after
    all `fsdp`s around that rule, and what each `fsdp` did. `wrappers` are these `fsdp`s, the
    innermost first."""
    spec, why = given, []
    for wrapper in wrappers:
        # An axis that splits the experts may also be the axis of the `fsdp`. A second split over
        # this axis would use the axis twice. If any other rule gave the spec, this is an error,
        # which `refused` returns.
        used_already = {name for entry in spec for name in entry_axes(entry)} & set(
            entry_axes(wrapper.axis_name)
        )
        if isinstance(rule, experts) and used_already:
            reason = f"adds no split: the experts are split over {sorted(used_already)} already"
        else:
            spec, reason = wrapper.split(path, leaf, spec)
        why.append(reason)
    return Placement(
        path, leaf, rule, given, wrappers, spec, tuple(why), is_expert=isinstance(rule, experts)
    )


def _same_path(path: str, arrays: list[tuple[str, Any]]) -> Refusal:
    """Returns the error for a path that several arrays have."""
    shapes = " and ".join(str(leaf.shape) for name, leaf in arrays if name == path)
    what = (
        f"{path}: each leaf needs a path of its own, but this is the path of leaves of shapes "
        f"{shapes}"
    )
    return Refusal("same-path", path, what, RENAME)


def _no_spec(path: str, rule: Rule, given: Any) -> Refusal:
    """Returns the error for a rule whose result is neither a spec nor None."""
    what = f"{path}: a rule must give a PartitionSpec or None, but {name_of(rule)} gave {given!r}"
    return Refusal("no-spec", path, what, "return P(...)", P())


def _uncovered(path: str, leaf: Any, rule: Rule) -> Refusal:
    """Returns the error for a leaf to which no rule gives a spec."""
    names = [name_of(*part) for part in _parts(rule)]  # a part comes with its wrappers
    what = (
        f"{path}: each leaf needs a rule, but none of the {len(names)} "
        f"rules{_nearest(path, names)} covers this leaf of shape {leaf.shape}"
    )
    return Refusal("no-rule", path, what, f"add one, such as match({path!r}, P()) to keep it whole")


def _parts(rule: Rule, wrappers: tuple[fsdp, ...] = ()) -> Iterator[tuple[Rule, tuple[fsdp, ...]]]:
    """Yields the innermost rules, those that are neither a `first` nor an `fsdp`, in order.

    Each rule comes with the `fsdp`s around it, the innermost first. `wrappers` are the `fsdp`s
    around `rule` itself.
    """
    if isinstance(rule, first):
        for part in rule.rules:
            yield from _parts(part, wrappers)
    elif isinstance(rule, fsdp):
        # Innermost first: an outer `fsdp` splits what the inner one left.
        yield from _parts(rule.inside, (rule, *wrappers))
    else:
        yield rule, wrappers


def _each_once(groups: Iterable[tuple[fsdp, ...]]) -> list[fsdp]:
    """Returns each `fsdp` of the groups once, so that each gives its errors once."""
    # The key is the identity: an `fsdp` need not have a hash.
    return list({id(wrapper): wrapper for group in groups for wrapper in group}.values())


def _keeps_the_rest(rule: Rule, wrappers: tuple[fsdp, ...], taken: dict[int, Placement]) -> bool:
    """Returns whether `rule` is a `match("**", P())` that is accepted even if earlier rules give
    all leaves their specs.

    A last rule that matches every leaf serves as a default, and earlier rules may leave no leaf for
    it. `taken` maps the index of a leaf to the `Placement` (the spec) that an earlier rule gave it.
    If `rule` is inside an `fsdp`, and no earlier rule inside that `fsdp` gives a leaf its spec,
    `rule` must give at least one leaf its spec: otherwise that `fsdp` would do nothing.
    """
    used = {id(wrapper) for placement in taken.values() for wrapper in placement.wrappers}
    is_default = isinstance(rule, match) and (rule.pattern, rule.spec) == ("**", P())
    return is_default and used.issuperset(map(id, wrappers))


def _idle(
    rule: Rule, name: str, arrays: list[tuple[str, Any]], taken: dict[int, Placement]
) -> Refusal:
    """Returns the error for a rule that gives no leaf a spec.

    `name` is the rule in words. `taken` maps the index of a leaf in `arrays` to the `Placement`
    (the spec) that an earlier rule gave the leaf.
    """
    # Only a `match` has a pattern that can be looked at.
    if not isinstance(rule, match):
        left = len(arrays) - len(taken)
        what = (
            f"rule {name} gives None for all leaves that earlier rules leave ({left} of "
            f"{len(arrays)})"
        )
        return Refusal("idle-rule", name, what, "change or remove it")
    # A pattern that matches nothing is misspelt. If earlier rules took all that it matches, the
    # rule comes too late. Otherwise its spec is None.
    hits = [i for i, (path, _) in enumerate(arrays) if matches_glob(rule.pattern, path)]
    if not hits:
        what = f"rule {name} {_no_match(rule.pattern, arrays)}"
        return Refusal("idle-rule", name, what, "correct the pattern, or remove the rule")
    left = [path for i, (path, _) in enumerate(arrays) if i in hits and i not in taken]
    if left:
        what = f"rule {name} gives None for {left[0]}, which it matches"
        return Refusal("idle-rule", name, what, "give it a PartitionSpec, or remove it")
    earlier = taken[hits[0]]  # the placement of the first leaf that the pattern matches
    what = (
        f"rule {name} places no leaf: all that it matches ({len(hits)} of {len(arrays)}) are taken "
        f"by earlier rules ({earlier.path} by {earlier.by})"  # `earlier.by`: its rule in words
    )
    return Refusal("idle-rule", name, what, "put it before them, or remove it")


def _size_refusals(rule: fsdp, mesh: Mesh | AbstractMesh) -> Iterator[Refusal]:
    """Yields an error for an `fsdp` whose axis the mesh lacks, or whose `size` is not the size of
    the axis."""
    missing = [axis for axis in entry_axes(rule.axis_name) if axis not in mesh.shape]
    if missing:
        yield Refusal(
            "no-such-axis",
            f"{rule}",
            no_axis(f"rule {rule}", missing[0], mesh),
            "use one of these axes, or replace the fsdp by the rules inside it",
        )
        return
    size = math.prod(mesh.shape[axis] for axis in entry_axes(rule.axis_name))
    if size != rule.size:
        what = f"rule {rule}: the mesh has {size} devices along {rule.axis_name!r}, not {rule.size}"
        yield Refusal("wrong-size", f"{rule}", what, f"pass size={size}")


def _no_match(pattern: str, arrays: list[tuple[str, Any]]) -> str:
    """Returns the end of an error's text for a pattern that matches no leaf. An example is "matches
    none of the 12 leaves (the nearest is wte)", where "wte" is the path most like the pattern."""
    return (
        f"matches none of the {len(arrays)} leaves{_nearest(pattern, [path for path, _ in arrays])}"
    )


def _nearest(text: str, choices: list[str]) -> str:
    """Returns a part of an error's text, such as " (the nearest is wte)", which names the element
    of `choices` whose spelling is closest to `text`. Returns "" if `choices` is empty."""
    return "".join(
        f" (the nearest is {choice})"
        for choice in difflib.get_close_matches(text, choices, n=1, cutoff=0)
    )
