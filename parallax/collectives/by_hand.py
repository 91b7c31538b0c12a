"""A ring in plain `ppermute`s: each of n devices sends to its right neighbour. Read it first.
Each device's `x` is `[n, *block]`: one block for each of the n devices. `A[I_X]` is split along dim
I over axis X, and `A[I] {U_X}` is not yet summed over X. Tests compare `tables.ring` with it."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped


def reduce_scatter(x: Shaped[Array, "n *block"], axis_name: str) -> Shaped[Array, "*block"]:
    """Returns block i of the sum over devices, on device i: `A[I] {U_X} -> A[I_X]`."""
    n, me = lax.axis_size(axis_name), lax.axis_index(axis_name)
    if len(x) != n:  # JAX would read the last block in place of one that `x` lacks
        raise ValueError(f"x must have {n} blocks, one for each device; it has {len(x)}.")
    # The sum of block i starts on device i + 1, gains a term per hop, and ends on its owner i.
    partial = x[(me - 1) % n]
    for hop in range(1, n):
        partial = _to_the_right(partial, axis_name) + x[(me - 1 - hop) % n]
    return partial


def all_gather(block: Shaped[Array, "*block"], axis_name: str) -> Shaped[Array, "n *block"]:
    """Returns every device's block on every device: `A[I_X] -> A[I]`."""
    n, me = lax.axis_size(axis_name), lax.axis_index(axis_name)
    blocks = [block]  # blocks[h] is the block of the device h places to the left
    for _ in range(1, n):
        blocks.append(_to_the_right(blocks[-1], axis_name))
    # Row j of the result is the block of device j, which arrived after me - j hops.
    return jnp.stack(blocks)[(me - jnp.arange(n, dtype=me.dtype)) % n]


def all_reduce(x: Shaped[Array, "n *block"], axis_name: str) -> Shaped[Array, "n *block"]:
    """Returns the sum on every device: `A {U_X} -> A`. A link carries 2 (n - 1)/n times `x`."""
    return all_gather(reduce_scatter(x, axis_name), axis_name)


def _to_the_right(x, axis_name):
    """Returns the left neighbour's `x`: each device sends its own `x` to the right."""
    n = lax.axis_size(axis_name)
    return lax.ppermute(x, axis_name, [(i, (i + 1) % n) for i in range(n)])
