"""What a stage saves of a microbatch for its backward pass: its residuals, or only its inputs.

A choice takes the stage's function `f(trained, x, given) -> (out, extra)` and returns two
functions, for the two ticks. Only `out` is differentiated, in `trained` and in the floating-point
leaves of `x`. `given` is known in both ticks (other parameters, the microbatch), so no slot needs
to hold it.

    forward(trained, x, given) -> ((out, extra), saved)
    backward(trained, given, saved) -> transposed

`saved` is a list of arrays that waits in a slot; `transposed` takes out's cotangent and returns
those of `trained` and of `x`.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import equinox as eqx
import jax
from jaxtyping import Array

from parallax._typing import PyTree

Stage: TypeAlias = Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]
Forward: TypeAlias = Callable[[PyTree, PyTree, PyTree], tuple[tuple[PyTree, PyTree], list[Array]]]
Backward: TypeAlias = Callable[
    [PyTree, PyTree, list[Array]], Callable[[PyTree], tuple[PyTree, PyTree]]
]
Save: TypeAlias = Callable[[Stage], tuple[Forward, Backward]]


def residuals(f: Stage) -> tuple[Forward, Backward]:
    """Saves the residuals of `jax.vjp`, except for arrays that are known in both ticks.

    Nothing is computed twice.
    """
    # How the residuals of the last trace form the transposed function; every trace has the same.
    of_last_trace: list[Any] = []

    def forward(trained, x, given):
        out, transposed, extra = _vjp(f, trained, x, given)
        # By identity: the residuals that are parameters or the microbatch are the same tracers.
        known = {id(leaf): i for i, leaf in enumerate(jax.tree.leaves((trained, given)))}
        leaves, structure = jax.tree.flatten(transposed)
        places = [known.get(id(leaf)) for leaf in leaves]
        of_last_trace[:] = structure, places
        saved = [leaf for leaf, place in zip(leaves, places, strict=True) if place is None]
        return (out, extra), saved

    def backward(trained, given, saved):
        structure, places = of_last_trace
        waiting, known = iter(saved), jax.tree.leaves((trained, given))
        leaves = [next(waiting) if place is None else known[place] for place in places]
        return jax.tree.unflatten(structure, leaves)

    return forward, backward


def inputs(f: Stage) -> tuple[Forward, Backward]:
    """Saves only the stage's input, and compute the rest again in the backward tick."""
    of_last_trace: list[Any] = []

    def forward(trained, x, given):
        leaves, structure = jax.tree.flatten(x)
        of_last_trace[:] = [structure]
        return f(trained, x, given), leaves

    def backward(trained, given, saved):
        return _vjp(f, trained, jax.tree.unflatten(of_last_trace[0], saved), given)[1]

    return forward, backward


def _vjp(f: Stage, trained: PyTree, x: PyTree, given: PyTree) -> tuple[Any, Any, Any]:
    # Whole numbers, such as masks, have no cotangent.
    moving, still = eqx.partition(x, eqx.is_inexact_array)

    def of_moving(trained, moving):
        return f(trained, eqx.combine(moving, still), given)

    return jax.vjp(of_moving, trained, moving, has_aux=True)
