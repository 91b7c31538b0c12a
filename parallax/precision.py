"""Which floating-point type a number is kept in: weights wide, products narrow, sums wide.

In mixed precision the parameters and the optimizer's state stay in float32, `mixed` runs the model
in bfloat16 or float16, and whatever is added up (gradients over microbatches and devices, norms,
softmax, the loss) is added in `wide` types.

float16 ends at 65,504 and loses what is below 6e-8, so there the loss is multiplied by a number
before it is differentiated. `Scale` is that number and its history, part of a step's state: it
falls when a gradient overflows, and that step is skipped; it rises when none has for a while.

    def grad_of(scale):  # a traced scalar
        grad = precision.mixed(jax.value_and_grad(precision.scaled(loss, scale)), jnp.float16)
        return precision.unscaled(grads.averaged(grad, ring("data")), scale)

    train = step.make(precision.ScaledGrad(grad_of), optimizer)

Source: Micikevicius et al., Mixed precision training (arXiv 1710.03740).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from parallax import trees
from parallax._typing import PyTree
from parallax.collectives.types import accumulation_dtype
from parallax.grads.norms import refuse_clipped
from parallax.grads.results import map_loss_and_aux, matching_parameters

Tree = TypeVar("Tree", bound=PyTree)
LEAST = 1.0  # the smallest loss scale: a step that overflows at this one is no matter of scale


def cast(tree: Tree, dtype: DTypeLike) -> Tree:
    """Returns `tree` with its arrays of real floating-point numbers in `dtype`; all else as it
    is."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype) if _is_float(leaf) else leaf, tree)


def mixed(grad: Callable[..., Any], dtype: DTypeLike) -> Callable[..., Any]:
    """Returns `grad` computed in `dtype`, with gradients in the types of the parameters: mixed
    precision.

    The parameters are cast once a call: stand outside `grads.accumulated` and
    `pipeline.value_and_grad`, whose sums are `wide` to the end, and inside `grads.averaged`, which
    then reduces wide gradients. The loss is `wide` too.
    """

    def wrapped(params, batch):
        value, gradients = grad(cast(params, dtype), batch)
        value = map_loss_and_aux(
            value, lambda loss: loss.astype(accumulation_dtype(loss.dtype)), lambda aux: aux
        )
        return value, jax.tree.map(
            lambda g, w: g.astype(w.dtype), gradients, matching_parameters(gradients, params)
        )

    return wrapped


def scaled(loss: Callable[..., Any], scale: Float[Array, ""]) -> Callable[..., Any]:
    """Returns `loss` times `scale`, to be differentiated: a loss function, or the head of a
    pipeline.

    Auxiliary values stay as they are.
    """

    # A float16 loss times 2^15 would overflow.
    def scaled_loss(value):
        dtype = accumulation_dtype(value.dtype)
        return value.astype(dtype) * scale.astype(dtype)

    def wrapped(*arguments):
        return map_loss_and_aux(loss(*arguments), scaled_loss, lambda aux: aux)

    return wrapped


def unscaled(grad: Callable[..., Any], scale: Float[Array, ""]) -> Callable[..., Any]:
    """Returns `grad` of a `scaled` loss, with loss and gradients divided by `scale`, in float32 or
    wider.

    Use it inside a function that looks at the size of gradients, such as `grads.clipped`.

    Raises:
        ValueError: `grad` is `grads.clipped`.
    """

    def divided(leaf):
        # In float16 a small gradient over a scale of 2^15 would be 0.
        dtype = accumulation_dtype(leaf.dtype)
        return leaf.astype(dtype) / scale.astype(dtype)

    def wrapped(params, batch):
        refuse_clipped(grad, "precision.unscaled", "the gradients of the scaled loss")
        value, gradients = grad(params, batch)
        value = map_loss_and_aux(value, divided, lambda aux: aux)
        return value, jax.tree.map(divided, gradients)

    return wrapped


class Scale(eqx.Module):
    """What a float16 loss is multiplied by, and what became of the steps so far: scalars.

    Args:
        value: to begin with.

    Attributes:
        value: the number, in float32.
        good: steps without an overflow since the value last changed, in int32.
        skipped: steps with one, since the beginning, in int32.
    """

    value: Float[Array, ""]
    good: Int[Array, ""]
    skipped: Int[Array, ""]

    def __init__(self, value: float = 2.0**15):
        self.value = jnp.asarray(value, jnp.float32)
        self.good = self.skipped = jnp.zeros((), jnp.int32)


@dataclass(frozen=True)
class ScaledGrad:
    """A gradient function for `step.make` that depends on the loss scale, as float16 needs.

    Args:
        grad_of: from the scale, a scalar, to the gradient function, whose gradients are `unscaled`.
            It is given None where the state of the step has no scale.
    """

    grad_of: Callable[[Any], Callable[..., Any]]


def adjusted(
    scale: Scale, finite: Bool[Array, ""], *, interval: int = 2000, factor: float = 2.0
) -> Scale:
    """Returns the `Scale` of the next step: over `factor` after an overflow, times it after
    `interval` steps without one.

    It stays between `LEAST` and 2^24: gradients that need more are lost in float32 sums as well,
    and the scale itself is finite.

    Args:
        scale: this step's.
        finite: whether this step's gradients all were: the same on all devices, as
            `jnp.isfinite(grads.norm(gradients))` is.
        interval: steps without an overflow before the scale is raised.
        factor: a power of two, so that scaling rounds nothing.
    """
    # Powers of two change the exponent alone, so that scaling and unscaling round nothing.
    good = jnp.where(finite, scale.good + 1, 0)
    grown = good >= interval
    value = jnp.where(
        finite, jnp.where(grown, scale.value * factor, scale.value), scale.value / factor
    )
    after = (
        jnp.clip(value, LEAST, 2.0**24),
        jnp.where(grown, 0, good),
        scale.skipped + (~finite).astype(jnp.int32),
    )
    return eqx.tree_at(lambda s: (s.value, s.good, s.skipped), scale, after)


def select(finite: Bool[Array, ""], new: Tree, old: Tree) -> Tree:
    """Returns `new` where the step's gradients were finite, else `old`, leaf by leaf: a skipped
    step."""

    def chosen(new_leaf, old_leaf):
        # `where` and no `cond`: a branch would hold both trees, and could not update in place.
        return jnp.where(finite, new_leaf, old_leaf) if trees.is_array(new_leaf) else new_leaf

    return jax.tree.map(chosen, new, old)


def _is_float(leaf) -> bool:
    return eqx.is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.floating)
