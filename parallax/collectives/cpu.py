"""Workarounds that only XLA's CPU backend needs. Programs compiled for other backends hold no trace of them.

**Collectives in one order** (`ordered`): jaxlib 0.10.2 and 0.12.0. XLA's CPU backend goes on from a loop whose body works in
other threads to what does not use the loop's results. A collective there can meet one of the loop's in a rendezvous of the
same name, which aborts the process: "Id can't be larger than the number of participating threads". No issue of XLA is known to
tell of it. It is rare: pipelined steps on more devices than cores have shown it; this program, the smallest in which nothing
orders the two, did not in 400 runs. `compiled.hlo.unordered` finds such pairs in a compiled program.

    def body(x):
        looped = lax.fori_loop(0, 8, lambda _, y: lax.ppermute(jnp.tanh(y @ y), "i", ring), x)
        return looped, lax.psum(x, "i")
"""

from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped

from parallax._typing import PyTree
from parallax.collectives.types import reduction_state, replicated, varying_axes

Tree = TypeVar("Tree", bound=PyTree)


def sequence_after(x: Tree, after: PyTree) -> Tree:
    """The tree `x`, which a CPU computes only after `after`: values and types stay. Differentiable in `x`.

    An optimization barrier is gone before the program runs; what waits here is a selection by a condition that is always true,
    and that no compiler knows to be. Random keys do not wait, nor do unreduced and reduced arrays, which JAX does not index.
    """
    leaves, structure = jax.tree.flatten(x)
    waiting = [i for i, leaf in enumerate(leaves) if _counts(leaf)]
    arrays = [leaf for leaf in jax.tree.leaves(after) if _counts(leaf) and leaf.size]
    if not arrays or not waiting:
        return x
    late = lax.platform_dependent(
        [leaves[i] for i in waiting], arrays, cpu=_selected, default=lambda x, after: x
    )
    for i, leaf in zip(waiting, late, strict=True):
        leaves[i] = leaf
    return jax.tree.unflatten(structure, leaves)


def _counts(leaf) -> bool:
    return (
        isinstance(leaf, jax.Array)
        and not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
        and not reduction_state(leaf)
    )


def _selected(x: list[jax.Array], after: list[jax.Array]) -> list[jax.Array]:
    first = [jnp.real(lax.stop_gradient(leaf).reshape(-1)[0]).astype(jnp.float32) for leaf in after]
    # XLA compiles what is cheap again into each of its users, hundreds of times in a step; what is dear, once.
    one = lax.tanh(sum(first[1:], start=first[0]))
    always = lax.eq(one, one) | lax.ne(one, one)  # the second for what is not a number
    holds = replicated(always, varying_axes(always))
    # What is chosen from must differ, or a constant would not wait: a number's bits, or zero.
    other = lambda leaf: (
        jnp.zeros((), leaf.dtype) if jnp.issubdtype(leaf.dtype, jnp.inexact) else ~leaf
    )
    return [jnp.where(holds, leaf, other(leaf)) for leaf in x]


def pin_bits(x: Shaped[Array, "*dims"]) -> Shaped[Array, "*dims"]:
    """`x`, computed once: what comes out of a loop is in memory, for all who want it. Costs two or three passes over it."""
    return lax.fori_loop(0, 2, lambda trip, y: jnp.where(trip == 1, x, y), jnp.zeros_like(x))


def pin_buffer(x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """`x`, with a no-op loop between its last write and what follows: the loop writes one number again."""
    if not x.size:
        return x
    start = (0,) * x.ndim
    number = lax.slice(x, start, (1,) * x.ndim)
    return lax.fori_loop(0, 2, lambda _, y: lax.dynamic_update_slice(y, number, start), x)
