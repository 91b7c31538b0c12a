"""Mixed precision: weights in float32, matrix products in 16 bits, sums in float32.

The parameters and the optimizer's state stay in float32. `mixed` runs the model in bfloat16 or
float16. Sums (gradients over microbatches and devices, norms, softmax, the loss) are computed in
wide types: float32 or wider.

float16 has no number above 65,504, and rounds numbers below 2^-25 (3e-8) to zero. So with float16
the loss is multiplied by a number, the loss scale, before the loss is differentiated. `Scale` holds
this number and its history, as a part of a step's state. The scale falls when a gradient overflows,
and that step is skipped; the scale rises when no gradient has overflowed for a while. A loss
function returns the loss or (loss, aux): `map_loss_and_aux(value, f, g)` applies f to the loss and
g to aux.

    def grad_of(scale):  # a traced scalar
        grad = precision.mixed(jax.value_and_grad(precision.scaled(loss, scale)), jnp.float16)
        return precision.unscaled(grads.averaged(grad, ring("data")), scale)

    train = step.make(precision.ScaledGrad(grad_of), optimizer)

Source: Micikevicius et al., Mixed precision training (arXiv 1710.03740).
"""

import functools
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
# The smallest loss scale: a gradient that overflows at 1 would overflow without a scale too.
LEAST = 1.0


def cast(tree: Tree, dtype: DTypeLike) -> Tree:
    """Returns `tree` with its real floating-point arrays in `dtype`; other leaves stay."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype) if _is_float(leaf) else leaf, tree)


def mixed(grad: Callable[..., Any], dtype: DTypeLike) -> Callable[..., Any]:
    """Returns a function like `grad` that computes with the parameters cast to `dtype`, and returns
    gradients in the parameters' own dtypes.

    Put `mixed` outside `grads.accumulated` and `pipeline.value_and_grad`, so that the parameters
    are cast once per step, not once per microbatch. Both functions sum 16-bit gradients in float32.
    Put `mixed` inside `grads.averaged`, which then reduces gradients in float32 or wider. The loss
    is in float32 or wider too; auxiliary values stay as they are.

    The batch is not cast. A float32 input would make the matmuls run in float32, so cast such an
    input where the model reads it, as in `x.astype(weight.dtype)`.
    """

    def wrapped(params, batch):
        """Returns `(value, gradients)` as `grad` does: value is the loss, or (loss, aux)."""
        value, gradients = grad(cast(params, dtype), batch)
        value = map_loss_and_aux(
            value, lambda loss: loss.astype(accumulation_dtype(loss.dtype)), lambda aux: aux
        )
        # A parameter that is not trained has the gradient None; `matching_parameters` leaves such
        # parameters out, so that both trees fit together.
        return value, jax.tree.map(
            lambda g, w: g.astype(w.dtype), gradients, matching_parameters(gradients, params)
        )

    # Sets only `__wrapped__`, through which `refuse_clipped` sees a `grad` that clips.
    return functools.update_wrapper(wrapped, grad, assigned=(), updated=())


def scaled(loss: Callable[..., Any], scale: Float[Array, ""]) -> Callable[..., Any]:
    """Returns a function like `loss` whose loss is multiplied by `scale`. `loss` is a loss function
    or the head of a pipeline.

    Auxiliary values stay as they are.
    """

    def scaled_loss(value):
        """Returns the loss times the scale, in float32 or wider."""
        # In float16 a loss times 2^15 would overflow.
        dtype = accumulation_dtype(value.dtype)
        return value.astype(dtype) * scale.astype(dtype)

    def wrapped(*arguments):
        return map_loss_and_aux(loss(*arguments), scaled_loss, lambda aux: aux)

    return wrapped


def unscaled(grad: Callable[..., Any], scale: Float[Array, ""]) -> Callable[..., Any]:
    """Returns a function like `grad` whose loss and gradients are divided by `scale`. `grad` is the
    gradient function of a `scaled` loss.

    The loss and the gradients are float32 or wider. A function that compares the size of gradients
    with a bound must get the unscaled gradients: `grads.clipped(unscaled(grad, scale), max_norm)`.

    Raises:
        ValueError: in a call of the returned function, if `grad` was made by `grads.clipped`.
    """

    def divided(leaf):
        """Returns a leaf divided by the scale, in float32 or wider."""
        # In float16 a small gradient divided by a scale of 2^15 would become 0.
        dtype = accumulation_dtype(leaf.dtype)
        return leaf.astype(dtype) / scale.astype(dtype)

    def wrapped(params, batch):
        """Returns the unscaled loss (and aux), and the unscaled gradients."""
        # `grads.clipped` inside would compare the scaled gradients with its bound, so such a `grad`
        # is refused. The last argument is the error's phrase for these gradients.
        refuse_clipped(grad, "precision.unscaled", "the gradients of the scaled loss")
        value, gradients = grad(params, batch)
        value = map_loss_and_aux(value, divided, lambda aux: aux)
        return value, jax.tree.map(divided, gradients)

    return wrapped


class Scale(eqx.Module):
    """The loss scale for float16, with counts of the steps so far. `value`, `good` and `skipped`
    are scalars.

    Args:
        value: the first loss scale.

    Attributes:
        value: the number by which the loss is multiplied, in float32.
        good: the number of steps without an overflow since the value last changed, in int32.
        skipped: the number of steps with an overflow since the beginning, in int32.
    """

    value: Float[Array, ""]
    good: Int[Array, ""]
    skipped: Int[Array, ""]

    def __init__(self, value: float = 2.0**15):
        self.value = jnp.asarray(value, jnp.float32)
        # Two arrays: a step that is donated one array twice would be refused.
        self.good, self.skipped = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)


@dataclass(frozen=True)
class ScaledGrad:
    """A gradient function for `step.make` that depends on the loss scale, as float16 needs.

    Args:
        grad_of: a function that takes the scale, a scalar, and returns a gradient function. The
            loss and the gradients of that gradient function are already divided by the scale (see
            `unscaled`). If the state of the step has no scale, `grad_of` is called with None.
    """

    grad_of: Callable[[Any], Callable[..., Any]]


def adjusted(
    scale: Scale, finite: Bool[Array, ""], *, interval: int = 2000, factor: float = 2.0
) -> Scale:
    """Returns the `Scale` of the next step.

    After an overflow the scale is divided by `factor`. After `interval` steps without an overflow
    the scale is multiplied by `factor`. The scale stays between `LEAST`, which is 1, and 2^24, so
    it is always finite. At a scale of 2^24, float16 rounds only gradients below 2^-49 to zero. Such
    gradients vanish anyway when float32 adds them to a gradient of 2^-24 or more.

    Args:
        scale: the `Scale` of this step.
        finite: whether all gradients of this step were finite. `finite` must be the same on all
            devices, as `jnp.isfinite(grads.norm(gradients))` is.
        interval: the number of steps without an overflow before the scale is raised.
        factor: a power of two, so that it changes only the exponent of a number, and scaling and
            unscaling round nothing.
    """
    good = jnp.where(finite, scale.good + 1, 0)
    rises = good >= interval
    value_if_finite = jnp.where(rises, scale.value * factor, scale.value)
    value = jnp.where(finite, value_if_finite, scale.value / factor)
    new_fields = (
        jnp.clip(value, LEAST, 2.0**24),
        jnp.where(rises, 0, good),  # counted from 0 after each change of the value
        scale.skipped + (~finite).astype(jnp.int32),
    )
    return eqx.tree_at(lambda s: (s.value, s.good, s.skipped), scale, new_fields)


def select(finite: Bool[Array, ""], new: Tree, old: Tree) -> Tree:
    """Returns the tree `new` if the step's gradients were finite, else `old`; the step is then
    skipped."""

    def chosen(new_leaf, old_leaf):
        # `where`, not `cond`: a branch would keep both trees in memory and prevent updates in
        # place.
        return jnp.where(finite, new_leaf, old_leaf) if trees.is_array(new_leaf) else new_leaf

    return jax.tree.map(chosen, new, old)


def _is_float(leaf) -> bool:
    return eqx.is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.floating)
