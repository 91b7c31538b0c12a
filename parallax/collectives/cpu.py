"""Workarounds that only XLA's CPU backend needs."""

from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from parallax.collectives.types import pending, replicated, varying_axes
from parallax.typed import PyTree

Tree = TypeVar("Tree", bound=PyTree)


def ordered(x: Tree, after: PyTree) -> Tree:
    """The tree `x`, its arrays not to be had before those of `after` are: values and types stay. Differentiable in `x`.

    It puts collectives into one order on all devices where no data does. XLA's CPU backend needs that: it goes on from a loop
    whose body works in other threads to what does not use the loop's results, and then a collective there meets one of the
    loop's in a rendezvous of the same name, which aborts the process. An optimization barrier is gone before the program
    runs; what waits here is a selection by a condition that is always true, and that no compiler knows to be.
    """
    # Random keys do not, nor do unreduced and reduced arrays, which JAX does not index: those are not ordered.
    counts = lambda leaf: (
        isinstance(leaf, jax.Array) and not jnp.issubdtype(leaf.dtype, jax.dtypes.extended) and not pending(leaf)
    )
    arrays = [leaf for leaf in jax.tree.leaves(after) if counts(leaf) and leaf.size]
    if not arrays:
        return x
    first = [jnp.real(lax.stop_gradient(leaf).reshape(-1)[0]).astype(jnp.float32) for leaf in arrays]
    # XLA compiles what is cheap again into each of its users, hundreds of times in a step; what is dear, once.
    one = lax.tanh(sum(first[1:], start=first[0]))
    always = lax.eq(one, one) | lax.ne(one, one)  # the second for what is not a number
    holds = replicated(always, varying_axes(always))
    # What is chosen from must differ, or a constant would not wait: a number's bits, or zero.
    other = lambda leaf: jnp.zeros((), leaf.dtype) if jnp.issubdtype(leaf.dtype, jnp.inexact) else ~leaf
    return jax.tree.map(lambda leaf: jnp.where(holds, leaf, other(leaf)) if counts(leaf) else leaf, x)
