"""What a stage keeps of a microbatch for its backward pass: pairs of functions, one for each of the two ticks.

A pair is made of the stage's function `f(trained, x, given) -> (out, beside)`, of which `out` is differentiated in `trained`
and in the floating-point leaves of `x`; `given` is what is at hand in both ticks (other parameters, the microbatch) and need
not be kept. The forward half makes `(out, beside)` and a list of arrays, which lie in a slot until the backward tick; the
other half makes of them the transpose, `out's cotangent -> (trained, x)`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from parallax.pipeline.apart import apart
from parallax.pipeline.program import program
from parallax.typed import PyTree

Stage: TypeAlias = Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]


class Halves(NamedTuple):
    """The two halves of a stage: in its forward tick and in its backward tick.

    Attributes:
        forward: `(trained, x, given) -> ((out, beside), kept)`.
        backward: `(trained, given, kept) -> transposed`.
    """

    forward: Callable[[PyTree, PyTree, PyTree], tuple[tuple[PyTree, PyTree], list[Array]]]
    backward: Callable[[PyTree, PyTree, list[Array]], Callable[[PyTree], tuple[PyTree, PyTree]]]


Keep: TypeAlias = Callable[[Stage], Halves]


def residuals(f: Stage) -> Halves:
    """Keep what the transpose needs, the residuals of `jax.vjp`, but for what is at hand: nothing is computed twice."""
    found: list[Any] = []  # how the residuals of the last trace are put together again: each trace finds the same

    def forward(trained, x, given):
        out, transposed, beside = _vjp(f, trained, x, given)
        at_hand = jax.tree.leaves((trained, given))
        leaves, structure = jax.tree.flatten(transposed)
        places = [next((i for i, each in enumerate(at_hand) if each is leaf), None) for leaf in leaves]
        found[:] = structure, places
        return (out, beside), [leaf for leaf, place in zip(leaves, places, strict=True) if place is None]

    def backward(trained, given, kept):
        structure, places = found
        kept, at_hand = iter(kept), jax.tree.leaves((trained, given))
        return jax.tree.unflatten(structure, [next(kept) if place is None else at_hand[place] for place in places])

    return Halves(forward, backward)


def inputs(f: Stage) -> Halves:
    """Keep the stage's input alone, and compute the rest again in the backward tick."""
    structure: list[Any] = []

    def forward(trained, x, given):
        leaves, structure[:] = jax.tree.flatten(x)[0], [jax.tree.structure(x)]
        return f(trained, x, given), leaves

    def backward(trained, given, kept):
        return _vjp(f, trained, jax.tree.unflatten(structure[0], kept), given)[1]

    return Halves(forward, backward)


def nothing(f: Stage) -> Halves:
    """Keep nothing: a forward pass that no backward pass follows."""

    def refuse(*arguments):
        raise AssertionError("a stage that keeps nothing has no backward tick")

    return Halves(lambda trained, x, given: (f(trained, x, given), []), refuse)


class InTwo(NamedTuple):
    """A backward half in two: the input's cotangent, I, and the gradients of the weights, W.

    Attributes:
        inputs: `(trained, given, kept, ct) -> (x's cotangent, passed)`.
        weights: `(trained, given, kept, passed) -> trained's gradients`.
    """

    inputs: Callable[[PyTree, PyTree, list[Array], PyTree], tuple[PyTree, list[Array]]]
    weights: Callable[[PyTree, PyTree, list[Array], list[Array]], PyTree]


def in_two(halves: Halves, trained: PyTree, given: PyTree, kept: list[Any], ct: PyTree) -> InTwo:
    """The backward half, traced on these and taken apart; of `kept` each part reads what it needs."""
    arrays = lambda trained, given: eqx.filter((trained, given), eqx.is_array)
    static = eqx.filter((trained, given), eqx.is_array, inverse=True)

    def transposed(ct, arrays, kept):
        trained, given = eqx.combine(arrays, static)
        gradients, x = halves.backward(trained, given, kept)(ct)
        return x, gradients

    traced, (x, gradients) = jax.make_jaxpr(transposed, return_shape=True)(ct, arrays(trained, given), kept)
    whole, count = program(traced), len(jax.tree.leaves(x))
    first, rest = range(count), range(count, count + len(jax.tree.leaves(gradients)))
    parts = apart(whole, first, rest, made=set(whole.inputs[: len(jax.tree.leaves(ct))]))
    named = lambda part, leaves: {n: leaf for n, leaf in zip(whole.inputs, leaves, strict=True) if n in parts.reads[part]}

    def inputs(trained, given, kept, ct):
        found, passed = parts.run_first(named(0, jax.tree.leaves((ct, arrays(trained, given), kept))), first)
        return jax.tree.unflatten(jax.tree.structure(x), found), passed

    def weights(trained, given, kept, passed):
        found = parts.run_second(named(1, jax.tree.leaves((ct, arrays(trained, given), kept))), passed, rest)
        return jax.tree.unflatten(jax.tree.structure(gradients), found)

    return InTwo(inputs, weights)


def raw(kept: Any) -> Any:
    """A kept array, or a constant, as a slot holds it: random keys as the numbers that they are made of."""
    return jax.random.key_data(kept) if _is_key(kept) else kept


def typed(numbers: Any, kind: Any) -> Any:
    """The inverse of `raw`, for an array of the type `kind`."""
    return jax.random.wrap_key_data(numbers, impl=jax.random.key_impl(jnp.zeros((), kind.dtype))) if _is_key(kind) else numbers


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _vjp(f, trained, x, given):
    moving, still = eqx.partition(x, eqx.is_inexact_array)
    return jax.vjp(lambda trained, moving: f(trained, eqx.combine(moving, still), given), trained, moving, has_aux=True)
