"""Two ways to save what the backward pass of a stage needs: the residuals of the stage, or only its
input.

Each way is a function that takes the stage's function, `f(trained, x, given) -> (out, extra)`, and
returns two functions, one for the forward tick and one for the backward tick. Only `out` is
differentiated, with respect to `trained` and the floating-point leaves of `x`. `given` has other
parameters and the microbatch. Both ticks get `trained` and `given`, so the arrays in them are not
stored. `extra` is the rest of the results.

    forward(trained, x, given) -> ((out, extra), saved)
    backward(trained, given, saved) -> transposed

`saved` is a list of arrays that are stored until the backward tick. `transposed` takes the
cotangent of `out` and returns the cotangents of `trained` and of `x`.
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
    """Returns `(forward, backward)`. `forward` saves the residuals of `jax.vjp`, except for arrays
    of its arguments `trained` and `given`: `backward` takes these two arguments too.

    Nothing is computed twice. `jax.vjp` returns the function of the backward pass, `transposed`, as
    a tree whose leaves are the residuals. So `forward` takes the leaves out, and `backward` puts
    them back.
    """
    # `forward` writes here the structure of that tree, and where to find each of its leaves.
    # `backward`, which JAX traces later, reads both. Each trace of `forward` writes the same.
    of_last_trace: list[Any] = []

    def forward(trained, x, given):
        """Returns the results of `f`, and the residuals that are not among the known arrays, which
        are `trained` and `given`. For `backward`, writes two values into `of_last_trace`: the tree
        structure of the function from `jax.vjp`, whose leaves are the residuals, and a list with an
        entry for each residual. The entry is the residual's index among the known arrays, or None
        if the residual is not one of them."""
        out, transposed, extra = _vjp(f, trained, x, given)
        # The index of each known array by its id. A residual that is a parameter or an array of the
        # microbatch is the same Python object, a tracer, as that array.
        known = {id(leaf): i for i, leaf in enumerate(jax.tree.leaves((trained, given)))}
        leaves, structure = jax.tree.flatten(transposed)
        indices = [known.get(id(leaf)) for leaf in leaves]
        of_last_trace[:] = structure, indices
        saved = [leaf for leaf, index in zip(leaves, indices, strict=True) if index is None]
        return (out, extra), saved

    def backward(trained, given, saved):
        """Returns the function `transposed`, rebuilt from its residuals. `of_last_trace` has an
        index for each residual. If the index is None, the residual is the next array of `saved`.
        Otherwise it is the array with this index among those of `trained` and `given`."""
        structure, indices = of_last_trace
        waiting, known = iter(saved), jax.tree.leaves((trained, given))
        leaves = [next(waiting) if index is None else known[index] for index in indices]
        return jax.tree.unflatten(structure, leaves)

    return forward, backward


def inputs(f: Stage) -> tuple[Forward, Backward]:
    """Returns `(forward, backward)`. `forward` saves only the stage's input, `x`, and `backward`
    runs the stage again. This takes less memory and more computation than `residuals`."""
    # `forward` writes here the structure of `x`, for `backward`, which JAX traces later.
    of_last_trace: list[Any] = []

    def forward(trained, x, given):
        """Returns the results of `f`, and the arrays of `x`."""
        leaves, structure = jax.tree.flatten(x)
        of_last_trace[:] = [structure]
        return f(trained, x, given), leaves

    def backward(trained, given, saved):
        """Returns the function `transposed`, from a new call of `jax.vjp` on the stage's function
        `f` and the saved `x`. This call runs `f` again."""
        return _vjp(f, trained, jax.tree.unflatten(of_last_trace[0], saved), given)[1]

    return forward, backward


def _vjp(f: Stage, trained: PyTree, x: PyTree, given: PyTree) -> tuple[Any, Any, Any]:
    """Returns `(out, transposed, extra)` of `jax.vjp`, for derivatives of `out` with respect to
    `trained` and the floating-point leaves of `x`."""
    # Integers and booleans, such as masks, have no cotangent.
    moving, still = eqx.partition(x, eqx.is_inexact_array)

    def of_moving(trained, moving):
        return f(trained, eqx.combine(moving, still), given)

    return jax.vjp(of_moving, trained, moving, has_aux=True)
