"""Activation checkpointing: the backward pass recomputes some results instead of keeping them.

Each function takes a block of layers and returns one that computes the same, as in
`gpt2.loss(..., remat=remat.products)`. Per block of B x T tokens, width D, H heads:

    none       keeps all: 34 B T D + 5 H B T^2 bytes in 16 bits (Korthikanti et al.)
    gathers    keeps all but the results gathered over devices; the gathers run twice
    products   keeps the products with weights; attention, norms and activation run twice
    block      keeps the block's input; everything runs twice, a third more arithmetic

`prevent_cse` is that of `jax.checkpoint`; see `in_a_loop`.

To compute attention alone again, wrap the attention function: `attend=jax.checkpoint(attend)`.

Sources: Chen et al., Training deep nets with sublinear memory cost (arXiv 1604.06174); Korthikanti
et al., Reducing activation recomputation in large transformer models (arXiv 2205.05198), section 5,
for attention alone.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax

from parallax.collectives.types import linear_p

GATHERED = (
    "gathered"  # the name that `sequence.gather_from` and `zero.gathered` give to what they gather
)


def in_a_loop(remat: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `remat`, one of these functions, without `jax.checkpoint`'s barrier round what is
    kept: for a block that a loop runs.

    The barrier stops XLA from taking from the forward pass what the backward pass computes again.
    It cannot where each has a loop of its own. And behind the barrier an accelerator copies what is
    kept out of the loop's stacks, instead of reading it where it is used. Another function stays as
    it is.
    """
    return (
        functools.partial(remat, prevent_cse=False)
        if remat in (gathers, products, block)
        else remat
    )


def none(block: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `block` as it is: all that its backward pass needs is kept."""
    return block


def gathers(block: Callable[..., Any], *, prevent_cse: bool = True) -> Callable[..., Any]:
    """Returns `block`, which keeps all but the results gathered over devices.

    These are weights (ZeRO-3) or tokens (sequence parallelism).
    """

    def is_saveable(primitive, *_, **params):
        # JAX's own policies by name know `checkpoint_name` alone, and not the name of a primitive
        # of ours.
        return not (primitive is linear_p and params["name"] == GATHERED)

    return jax.checkpoint(block, policy=is_saveable, prevent_cse=prevent_cse)


def products(block: Callable[..., Any], *, prevent_cse: bool = True) -> Callable[..., Any]:
    """Returns `block`, of which the products with weights are kept, and the rest is computed
    again."""
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    return jax.checkpoint(block, policy=policy, prevent_cse=prevent_cse)


def block(block: Callable[..., Any], *, prevent_cse: bool = True) -> Callable[..., Any]:
    """Returns `block`, of which its input alone is kept."""
    return jax.checkpoint(block, prevent_cse=prevent_cse)
