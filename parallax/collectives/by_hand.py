"""A ring as on a blackboard: the lesson and the oracle. `route` does the same by a table.

n devices form a circle; each has an array `x` of n blocks and sends to its right neighbour only.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped


def reduce_scatter(x: Shaped[Array, "n *block"], axis_name: str) -> Shaped[Array, "*block"]:
    """The sum over devices; device i keeps block i: `A[I] {U_X} -> A[I_X]`.

    The partial sum for block i starts at device i + 1 and gains one term a hop, until it is home.
    """
    n, me = lax.axis_size(axis_name), lax.axis_index(axis_name)
    partial = x[(me - 1) % n]
    for hop in range(1, n):
        partial = _to_the_right(partial, axis_name) + x[(me - 1 - hop) % n]
    return partial


def all_gather(block: Shaped[Array, "*block"], axis_name: str) -> Shaped[Array, "n *block"]:
    """Every device's block on every device: `A[I_X] -> A[I]`. Each block goes once round."""
    n, me = lax.axis_size(axis_name), lax.axis_index(axis_name)
    blocks = [block]  # blocks[hop] was sent by the device so many places to the left
    for _ in range(1, n):
        blocks.append(_to_the_right(blocks[-1], axis_name))
    return jnp.stack(blocks)[(me - jnp.arange(n, dtype=me.dtype)) % n]


def all_reduce(x: Shaped[Array, "n *block"], axis_name: str) -> Shaped[Array, "n *block"]:
    """The sum on every device: `A {U_X} -> A`. Each link carries 2 (n - 1)/n of `x`."""
    return all_gather(reduce_scatter(x, axis_name), axis_name)


def _to_the_right(x, axis_name):
    n = lax.axis_size(axis_name)
    return lax.ppermute(x, axis_name, [(i, (i + 1) % n) for i in range(n)])
