"""The norm of gradients whose leaves may be shards, and clipping by this norm.

The gradients are already reduced over devices. So a gradient whose type varies along an axis is a
shard over that axis. An axis is a name, such as "data", or a name with an algorithm for its
collectives, such as `ring("data")`. The collectives of a plain name are those of `jax.lax`.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Float

from parallax._typing import PyTree
from parallax.collectives import types
from parallax.collectives.axis import Axis, AxisLike, combined_axis, xla
from parallax.collectives.types import accumulation_dtype, varying_axes
from parallax.grads.axes import ENCLOSING, axes_of
from parallax.grads.results import Grad, loss_and_gradients

Tree = TypeVar("Tree", bound=PyTree)


def clipped(grad: Grad, max_norm: float, *, reduce_norm_over: Sequence[AxisLike] = ()) -> Grad:
    """Returns `grad` with its gradients scaled down so that their global norm, over all shards, is
    at most `max_norm`.

    Use `clipped` outside `averaged`, `accumulated` and `precision.unscaled`, so that it gets the
    gradients of the whole step. A gradient that varies along an axis counts as a shard of a larger
    gradient. Along an axis in `reduce_norm_over`, such as `ring("data")`, the algorithm of this
    axis (here `ring`) all-reduces the sum of squares. Along any other axis, `jax.lax` all-reduces
    the sum. If the norm is infinite or NaN, all gradients become NaN.

        >>> loss = lambda w, x: jnp.mean((x @ w) ** 2)
        >>> grad = grads.clipped(jax.value_and_grad(loss), max_norm=1.0)
        >>> mean, gradients = grad(jnp.ones(2), jnp.ones((8, 2)))
        >>> print(f"{grads.norm(gradients):.4f}")
        1.0000
    """
    check_max_norm("grads.clipped", max_norm)
    return Clipped(grad, max_norm, tuple(reduce_norm_over))


def check_max_norm(where: str, max_norm: Any) -> None:
    """Raises `ValueError` if gradients cannot be clipped to this norm: it is NaN, 0 or below.

    A traced number has no value yet, and passes. `where` names the caller in the message.
    """
    # `not ... > 0` is also true for NaN.
    if not isinstance(max_norm, Tracer) and not float(max_norm) > 0:
        raise ValueError(
            f"{where}: max_norm must be above 0; got {max_norm!r}. With 0 nothing would be "
            "trained. Leave the clipping out, or give the largest norm that the gradients of a "
            "step may have."
        )


@dataclass(frozen=True)
class Clipped:
    """The gradient function that `clipped` returns. It has a type of its own, so that
    `refuse_clipped` can recognise it. `axes` are the axes, such as `ring("data")`, that have an
    algorithm of their own for the all-reduce of the norm."""

    grad: Grad
    max_norm: float
    axes: tuple[AxisLike, ...]

    def __call__(self, params: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        """Returns the loss, and the clipped gradients."""
        value, gradients = loss_and_gradients(self.grad, params, batch)
        total = norm(gradients, axes=self.axes)
        # Finite gradients may have an infinite norm, and would be scaled to 0.
        total = jnp.where(jnp.isinf(total), jnp.full_like(total, jnp.nan), total)
        return value, scaled(gradients, total, self.max_norm)


def refuse_clipped(grad: Grad, wrapper: str, clipped_gradients: str) -> None:
    """Raises `ValueError` if `grad` is `clipped`: inside `wrapper`, `grad` would not clip the
    gradients of the step. `clipped_gradients` names, in the error message, the gradients that
    `grad` would clip instead. `precision.mixed` around `clipped` does not hide it.
    """
    if isinstance(inspect.unwrap(grad), Clipped):
        raise ValueError(
            f"{wrapper} wraps grads.clipped, which would clip {clipped_gradients} instead "
            f"of the gradients of the step. Exchange the two: grads.clipped({wrapper}(...), "
            "max_norm), or use step.make(..., max_norm=...)."
        )


def norm(gradients: PyTree, *, axes: Sequence[AxisLike] = ()) -> Float[Array, ""]:
    """Returns the Euclidean norm of a whole tree whose leaves may be shards; it is the same on all
    devices.

    A leaf that varies along some axes is a shard over them. The squares of all leaves with the same
    axes are summed to one scalar, in float32 or wider, and this scalar is all-reduced over exactly
    these axes. Along an axis in `axes`, such as `ring("data")`, the algorithm of this axis (here
    `ring`) sends the data. Along any other axis, `jax.lax` sends the data. The squares may overflow
    or underflow: in float32, a gradient above 1e19 gives an infinite norm, and gradients below
    1e-23 may count as 0.

    Raises:
        ValueError: there is no gradient; a gradient is not yet reduced over devices; or the types
            do not record which values vary over devices, as under `check_vma=False`.
    """
    types.check_typed()
    if not jax.tree.leaves(gradients):
        raise ValueError(
            "grads.norm needs at least one gradient, and all leaves of the tree are None: "
            "nothing is trained. A gradient function returns an array for each trained leaf, as "
            "eqx.filter_value_and_grad does for floating-point arrays."
        )
    # By the axes along which a leaf is a shard: the sum of squares of all leaves with these axes.
    squares = {}
    for leaf in jax.tree.leaves(gradients):
        names, x = varying_axes(leaf), leaf.astype(accumulation_dtype(leaf.dtype))
        # `declared` has the axes over which a gradient function around this call will reduce.
        if unreduced := sorted(ENCLOSING.value.declared & set(names)):
            raise ValueError(
                f"A norm is taken inside a function that reduces over {unreduced}, so the "
                "norm would treat each device's gradients as shards of larger arrays. Clip outside "
                "this function: grads.clipped(grads.averaged(...), max_norm)."
            )
        squares[names] = squares.get(names, 0.0) + jnp.sum(jnp.real(x * jnp.conj(x)))
    algorithms = {name: axis.algorithm for axis in map(Axis.of, axes) for name in axes_of(axis)}

    def total(names, square):
        """Returns `square`, a sum of squares, all-reduced over the axes `names`. Along an axis
        without an entry in `algorithms`, `jax.lax` all-reduces the sum."""
        if not names:
            return square
        return combined_axis(*(algorithms.get(name, xla)(name) for name in names)).all_reduce(
            square
        )

    totals = [total(names, square) for names, square in squares.items()]
    return jnp.sqrt(sum(totals[1:], start=totals[0]))


def scaled(gradients: Tree, norm: Float[Array, ""], max_norm: float) -> Tree:
    """Returns `gradients`, of global norm `norm`, times min(1, max_norm / norm)."""
    # Gradients of zero have a norm of zero; `tiny`, the smallest normal number, avoids a division
    # by zero.
    factor = jnp.minimum(1.0, max_norm / jnp.maximum(norm, jnp.finfo(norm.dtype).tiny))

    def times_factor(leaf):
        """Returns the leaf times `factor`, multiplied in float32 or wider. In 16 bits, the factor
        might be rounded to 0, or be rounded up and leave the norm above `max_norm`."""
        kind = accumulation_dtype(leaf.dtype)
        return (leaf.astype(kind) * factor.astype(kind)).astype(leaf.dtype)

    return jax.tree.map(times_factor, gradients)
