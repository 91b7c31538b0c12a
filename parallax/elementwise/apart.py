"""Whether an optimizer updates each leaf by itself."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Jaxpr

from parallax import trees
from parallax.jaxprs import called, every, inner, is_literal
from parallax.typed import PyTree


def check_apart(update: Callable[..., Any], weights: PyTree, state: PyTree) -> None:
    """Refuse with a `ValueError` an optimizer whose update of one leaf depends on another: `weights` and `state` are shapes."""
    paths = [tuple(path) for path, _ in jax.tree.leaves_with_path(weights)]
    owners = [trees.owner(path, paths) for path, _ in jax.tree.leaves_with_path(state)]
    program = jax.make_jaxpr(update)(weights, state, weights)
    if any(eqn.primitive.name in ("random_bits", "threefry2x32") for eqn in every(program.jaxpr)):
        raise ValueError(
            "optimizers.by_matrix: this optimizer draws random numbers, which would be the same ones in every layer. Take "
            "optimizers.whole, which draws them for whole leaves, as one device does."
        )
    own = [frozenset([i]) for i in range(len(paths))]
    reads = [*own, *(frozenset() if i is None else own[i] for i in owners), *own]
    for i, read in enumerate(_reads(program.jaxpr, reads)):
        owner = i if i < len(paths) else owners[i - len(paths)]
        others = sorted(read - {owner})
        if others:
            names = " and ".join(repr(trees.dotted(paths[j]) or "the parameter") for j in others[:2])
            what = "its state" if owner is None else repr(trees.dotted(paths[owner]))
            raise ValueError(
                f"optimizers.by_matrix: leaves are updated apart, each on its own device, and this optimizer makes {what} from "
                f"{names}. Take optimizers.whole, or join leaves elsewhere: step.make and grads.clipped clip by the norm."
            )


def _reads(jaxpr: Jaxpr, arguments: Sequence[frozenset[int]]) -> list[frozenset[int]]:
    """Which leaves each result depends on."""
    known = dict(zip(jaxpr.invars, arguments, strict=True))
    of = lambda atom: frozenset() if is_literal(atom) else known.get(atom, frozenset())
    for eqn in jaxpr.eqns:
        body, read = called(eqn), [of(atom) for atom in eqn.invars]
        if eqn.primitive.name == "cond":
            choices = zip(*(_reads(branch, read[1:]) for branch in inner(eqn)), strict=True)
            found = [read[0].union(*each) for each in choices]
        elif body is not None and eqn.primitive.name not in ("while", "scan"):
            found = _reads(body, read)
        else:
            found = [frozenset().union(*read)] * len(eqn.outvars)
        known |= dict(zip(eqn.outvars, found, strict=True))
    return [of(atom) for atom in jaxpr.outvars]
