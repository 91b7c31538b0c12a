"""What a stage saves of a microbatch for its backward pass: its residuals, or only its inputs.

A choice takes the stage's function `f(trained, x, given) -> (out, extra)` and returns two
functions, for the two ticks. Only `out` is differentiated, in `trained` and in the floating-point
leaves of `x`. `given` is known in both ticks (other parameters, the microbatch), so no slot needs to
hold it.

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
    """Save what the transpose needs, the residuals of `jax.vjp`, except for what is at hand:
    nothing is computed twice."""
    of_last_trace: list[
        Any
    ] = []  # how its residuals are put together again; every trace has the same

    def forward(trained, x, given):
        out, transposed, extra = _vjp(f, trained, x, given)
        at_hand = jax.tree.leaves((trained, given))
        leaves, structure = jax.tree.flatten(transposed)
        places = [
            next((i for i, known in enumerate(at_hand) if known is leaf), None) for leaf in leaves
        ]
        of_last_trace[:] = structure, places
        return (out, extra), [
            leaf for leaf, place in zip(leaves, places, strict=True) if place is None
        ]

    def backward(trained, given, saved):
        structure, places = of_last_trace
        saved, at_hand = iter(saved), jax.tree.leaves((trained, given))
        return jax.tree.unflatten(
            structure, [next(saved) if place is None else at_hand[place] for place in places]
        )

    return forward, backward


def inputs(f: Stage) -> tuple[Forward, Backward]:
    """Save the stage's input alone, and compute the rest again in the backward tick."""
    structure: list[Any] = []

    def forward(trained, x, given):
        leaves, structure[:] = jax.tree.flatten(x)[0], [jax.tree.structure(x)]
        return f(trained, x, given), leaves

    def backward(trained, given, saved):
        return _vjp(f, trained, jax.tree.unflatten(structure[0], saved), given)[1]

    return forward, backward


def _vjp(f, trained, x, given):
    moving, still = eqx.partition(x, eqx.is_inexact_array)
    return jax.vjp(
        lambda trained, moving: f(trained, eqx.combine(moving, still), given),
        trained,
        moving,
        has_aux=True,
    )
