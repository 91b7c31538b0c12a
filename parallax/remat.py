"""Activation checkpointing: the backward pass recomputes some results instead of keeping them.

Each function takes a block of layers and returns a block that computes the same results, as in
`gpt2.loss(..., remat=remat.products)`. A block may take any Equinox module: leaves that are no
arrays, such as functions and Python numbers, stay as they are. The bytes below are for a block that
is one transformer layer, with width D and H heads, on B x T tokens:

    none       keeps all: 34 B T D + 5 H B T^2 bytes in 16 bits (Korthikanti et al.)
    gathers    keeps all but the results gathered over devices; the gathers run twice
    products   keeps the products with weights; attention, norms and activation run twice
    block      keeps the block's input; everything runs twice, a third more arithmetic

`prevent_cse` is an option of `jax.checkpoint`: it keeps XLA from reusing results of the forward
pass where the backward pass should recompute them. `in_a_loop` turns the option off.

To recompute only the attention, wrap the attention function: `attend=remat.attention(attend)`. For
an activation or a norm, whose results are cheap to compute again, use `of_arguments`.

Sources: Chen et al., Training deep nets with sublinear memory cost (arXiv 1604.06174); Korthikanti
et al., Reducing activation recomputation in large transformer models (arXiv 2205.05198), section 5,
for attention alone.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax

from parallax.collectives.types import linear_p

# The name that `sequence.gather_from` and `zero.gathered` give to their results
GATHERED = "gathered"


def _of_arrays(wrap: Callable[..., Any], f: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `wrap(f)`, for a function `f` whose arguments may have leaves that are no arrays,
    such as the activation of an Equinox module. `wrap` is a function of JAX, such as
    `jax.checkpoint`, whose result would refuse these leaves."""
    wrapped = wrap(f)

    def call(*arguments, **options):
        arrays, others = eqx.partition((arguments, options), eqx.is_array)
        if not jax.tree.leaves(others):
            return wrapped(*arguments, **options)  # JAX traces it once for all layers of one shape

        def of_arrays(arrays):
            arguments, options = eqx.combine(arrays, others)
            return f(*arguments, **options)

        return wrap(of_arrays)(arrays)

    return call


def in_a_loop(remat: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `remat`, a function of this module, without its barrier, for a block in a loop.

    `jax.checkpoint` puts a barrier around the kept results. Without the barrier, XLA would not
    recompute results, but reuse those of the forward pass. If the forward and the backward pass are
    separate loops, XLA cannot reuse the results of the forward pass, so no barrier is needed. A
    barrier would cost time: an accelerator would copy the kept results out of the loop's stacked
    arrays before using them. A function from outside this module is returned unchanged.
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
    """Returns `block` with a backward pass that recomputes only the results gathered over devices.

    The results gathered over devices are weights (ZeRO-3) or tokens (sequence parallelism), which
    are gathered again.
    """

    def is_saveable(primitive, *_, **params):
        """Returns False for a result named `GATHERED`, which is then recomputed."""
        # JAX's policies by name know only `checkpoint_name`, not the name that `linear_p`, the
        # primitive of `collectives.types.linear`, has as a parameter.
        return not (primitive is linear_p and params["name"] == GATHERED)

    checkpoint = functools.partial(jax.checkpoint, policy=is_saveable, prevent_cse=prevent_cse)
    return _of_arrays(checkpoint, block)


def products(block: Callable[..., Any], *, prevent_cse: bool = True) -> Callable[..., Any]:
    """Returns `block` with a backward pass that recomputes everything but the results of matmuls
    with weights."""
    # A product with a weight has no batch dims in JAX's sense; the products of attention have.
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    checkpoint = functools.partial(jax.checkpoint, policy=policy, prevent_cse=prevent_cse)
    return _of_arrays(checkpoint, block)


def block(block: Callable[..., Any], *, prevent_cse: bool = True) -> Callable[..., Any]:
    """Returns `block` with a backward pass that recomputes everything: only its input is kept."""
    return _of_arrays(functools.partial(jax.checkpoint, prevent_cse=prevent_cse), block)


@dataclass(frozen=True)
class RecomputedAttention:
    """The attention function that `attention` returns. If `attend` has this type,
    `in_place_of(attend, other)` returns `other` with a backward pass that recomputes `other` too.
    """

    attend: Callable[..., Any]

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Returns the result of the attention function."""
        return self.attend(*arguments, **options)


def attention(attend: Callable[..., Any]) -> RecomputedAttention:
    """Returns the attention function `attend` with a backward pass that recomputes everything: only
    queries, keys and values are kept."""
    return RecomputedAttention(_of_arrays(jax.checkpoint, attend))


def in_place_of(attend: Callable[..., Any], other: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the attention function `other`, to be used in place of `attend`. If `attend` comes
    from `attention`, the backward pass recomputes `other` too."""
    return attention(other) if isinstance(attend, RecomputedAttention) else other


def of_arguments(f: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `f` with a backward pass that keeps only the arguments of `f`, and computes the rest
    again.

    For the backward pass of a GELU, JAX keeps five or six arrays; with `of_arguments` it keeps one,
    the argument. `of_arguments` also works inside a `jax.checkpoint` whose policy keeps results,
    such as that of `gathers`. A `jax.checkpoint` of `f` would not work there: the outer policy
    would decide about the results inside `f` too, and would keep them. The returned function has
    reverse-mode derivatives only.

    Args:
        f: a function of positional arguments, such as arrays and Equinox modules. If an array is
            differentiated, pass it as an argument: `f` must not read it by closure.
    """
    return _of_arrays(_with_arguments_kept, f)


def _with_arguments_kept(f: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `f` with the backward pass of `of_arguments`. The arguments of the returned function
    are trees whose leaves are all arrays."""

    # A backward pass of its own needs no result of `f`, so a policy has nothing to keep.
    @jax.custom_vjp
    def f_with_vjp(*arguments):
        """Returns `f(*arguments)`."""
        return f(*arguments)

    def forward(*arguments):
        """Returns the result, and the values that are kept for the backward pass."""
        return f(*arguments), arguments

    def backward(arguments, cotangent):
        """Returns the cotangents of the arguments."""
        # No barrier, unlike in `jax.checkpoint`: if the forward and the backward pass are not
        # separate loops, XLA may reuse the results of the forward pass here.
        return jax.vjp(f, *arguments)[1](cotangent)

    f_with_vjp.defvjp(forward, backward)
    return f_with_vjp
