"""Workarounds that only XLA's CPU backend needs. Programs for other backends do not contain them.

**Collectives in one order**: `sequence_after` makes arrays wait for other arrays. jaxlib 0.10.2 and
jaxlib 0.12.0 both need it. While a loop runs, XLA's CPU backend may start an operation that comes
after the loop in the program and does not use the loop's results. If this operation and the loop
both contain collectives, a collective of the loop can meet the later collective in one rendezvous.
The process aborts: "Id can't be larger than the number of participating threads". No XLA issue that
reports this fault is known. The fault is rare: it was seen in pipelined steps, with more devices
than CPU cores. The program below has a collective in a loop and a collective after the loop, but
400 runs did not abort. `compiled.hlo.unordered` finds such pairs in a compiled program.

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
    """Returns the tree `x`, which a CPU computes only after `after`; values and types do not
    change.

    The result is differentiable in `x`. Random keys, and arrays that JAX types as `unreduced` or
    `reduced`, neither wait nor are waited for.
    """
    leaves, structure = jax.tree.flatten(x)
    waiting = [i for i, leaf in enumerate(leaves) if _can_wait(leaf)]
    # `_selected` reads a number of each array that is waited for; an empty array has none.
    arrays = [leaf for leaf in jax.tree.leaves(after) if _can_wait(leaf) and leaf.size]
    if not arrays or not waiting:
        return x
    # On other platforms `x` does not wait.
    late = lax.platform_dependent(
        [leaves[i] for i in waiting], arrays, cpu=_selected, default=lambda x, after: x
    )
    for i, leaf in zip(waiting, late, strict=True):
        leaves[i] = leaf
    return jax.tree.unflatten(structure, leaves)


def _can_wait(leaf) -> bool:
    """Returns whether a leaf is an array of numbers, not typed as `unreduced` or `reduced`."""
    # Random keys have an extended dtype: `_selected` cannot convert them to numbers.
    if not isinstance(leaf, jax.Array) or jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        return False
    # `_selected` indexes its arrays, and JAX does not index unreduced or reduced ones.
    return not reduction_state(leaf)


def _selected(x: list[jax.Array], after: list[jax.Array]) -> list[jax.Array]:
    """Returns the arrays `x`, each the result of a `jnp.where` with a condition computed from
    `after`.

    The condition is always true, but XLA does not replace it by a constant, so `x` waits for
    `after`. An optimization barrier would not help: the CPU's compiler removes it.
    """
    # One number of each array that is waited for makes the condition depend on it.
    first = [jnp.real(lax.stop_gradient(leaf).reshape(-1)[0]).astype(jnp.float32) for leaf in after]
    # XLA would copy a cheap condition into each of its uses, hundreds of times in a step. A tanh is
    # expensive enough to be computed once.
    number = lax.tanh(sum(first[1:], start=first[0]))
    always = lax.eq(number, number) | lax.ne(number, number)  # the second holds for NaN
    # `replicated` declares the condition the same on all devices: otherwise the selected leaves
    # would vary along the condition's axes too.
    holds = replicated(always, varying_axes(always))

    def alternative(leaf):
        """Returns a value that, for XLA, may differ from `leaf`.

        If XLA knew that the value equals `leaf`, it would remove the `jnp.where` that selects one
        of the two.
        """
        # `~leaf` never equals `leaf`, so a constant waits too, such as the number of a microbatch.
        # Floating-point types have no `~`: there the value is 0, and a leaf of constant zeros may
        # not wait.
        is_float = jnp.issubdtype(leaf.dtype, jnp.inexact)  # or complex
        return jnp.zeros((), leaf.dtype) if is_float else ~leaf

    return [jnp.where(holds, leaf, alternative(leaf)) for leaf in x]


def pin_bits_by_loop(x: Shaped[Array, "*dims"]) -> Shaped[Array, "*dims"]:
    """Returns `x`, passed through a loop, so that `x` is computed only once.

    XLA may compute a value again for each operation that uses it, and round it differently each
    time. But XLA stores the result of a loop in memory, and all operations read the result there.
    This costs two or three passes over `x`.
    """
    # `x` is an operand of the loop, so XLA computes it before the loop. Two iterations (trips),
    # since XLA replaces a loop of one iteration by its body. Only the second iteration writes `x`:
    # XLA could replace a loop whose iterations all return `x` by `x`.
    return lax.fori_loop(0, 2, lambda trip, y: jnp.where(trip == 1, x, y), jnp.zeros_like(x))


def pin_buffer_by_loop(x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """Returns `x`, an array that was written block by block. A loop keeps XLA from fusing the last
    write with the operation that uses `x`.

    If XLA fused them, it could round the numbers of the last block differently from the other
    numbers of `x`. The loop only writes the first number of `x` again, so it is cheaper than
    `pin_bits_by_loop`.
    """
    if not x.size:  # no number to write
        return x
    start = (0,) * x.ndim
    number = lax.slice(x, start, (1,) * x.ndim)
    # Two iterations, since XLA replaces a loop of one iteration by its body.
    return lax.fori_loop(0, 2, lambda _, y: lax.dynamic_update_slice(y, number, start), x)
