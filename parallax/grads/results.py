"""The results of a gradient function: a loss or `(loss, aux)`, and a tree of gradients with None
for parameters that are not trained."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from parallax import trees
from parallax._typing import PyTree

Loss = Float[Array, ""]
Grad = Callable[[PyTree, PyTree], tuple[Loss | tuple[Loss, PyTree], PyTree]]


def loss_and_gradients(grad: Grad, params: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
    """Calls a gradient function and returns its two results: the loss, or `(loss, aux)`, and the
    gradients. Raises `ValueError` if `grad` returns anything but a pair."""
    results = grad(params, batch)
    if not isinstance(results, tuple) or len(results) != 2:
        returned = "one array" if trees.is_array(results) else f"a {type(results).__name__}"
        raise ValueError(
            "A gradient function returns a pair (loss, gradients), as jax.value_and_grad(loss) and "
            f"eqx.filter_value_and_grad(loss) do; this one returned no pair, but {returned}. "
            "Use one of these two functions instead of the loss or jax.grad(loss)."
        )
    return results


def loss_part(value: PyTree) -> Any:
    """Returns the loss. `value`, the first result of a gradient function, is the loss or the pair
    `(loss, aux)`."""
    return value[0] if isinstance(value, tuple) else value


def map_loss_and_aux(
    value: PyTree, on_loss: Callable[[Any], Any], on_aux: Callable[[Any], Any]
) -> PyTree:
    """Returns `value` with `on_loss` applied to the loss, and `on_aux` to `aux` if there is one.
    `value`, the first result of a gradient function, is the loss or the pair `(loss, aux)`."""
    return (on_loss(value[0]), on_aux(value[1])) if isinstance(value, tuple) else on_loss(value)


def check_pair(value: PyTree, gradients: PyTree, params: PyTree) -> None:
    """Raises `ValueError` if the loss is not a scalar, or if a gradient is at a path where `params`
    has no leaf. The gradients of a tuple of two parameters, as `jax.grad` makes them, look like a
    pair (loss, gradients), and are found here.
    """
    loss = loss_part(value)
    shape = loss.shape if hasattr(loss, "shape") else None
    if shape != ():
        first = f"a {type(loss).__name__}" if shape is None else f"an array of shape {shape}"
        raise ValueError(
            "A gradient function returns a pair (loss, gradients), as jax.value_and_grad(loss) and "
            "eqx.filter_value_and_grad(loss) do, and the loss is a scalar. The first result of "
            f"this one is {first}. Use one of these two functions instead of jax.grad(loss), or "
            "let the loss return its mean."
        )
    by_path = dict(jax.tree.leaves_with_path(params))
    for path, _ in jax.tree.leaves_with_path(gradients):
        _check_path(path, by_path)


def _check_path(path: Sequence[Any], by_path: dict[Any, Any]) -> None:
    """Raises `ValueError` if there is no parameter at the path of a gradient. `by_path` has the
    parameters."""
    if path not in by_path:
        raise ValueError(
            f"The gradients have a leaf {trees.dotted(path)!r}, and the parameters have none "
            "there. A gradient function must return a tree like the parameters, with None for "
            "a leaf that is not trained, as eqx.filter_value_and_grad does."
        )


def matching_parameters(gradients: PyTree, params: PyTree) -> PyTree:
    """Returns, in the structure of the gradients, the parameter of each gradient; parameters
    without a gradient are left out.

    Raises:
        ValueError: a gradient is at a path where `params` has no array.
    """
    by_path = dict(jax.tree.leaves_with_path(params))

    def parameter(path, gradient):
        """Returns the parameter at the path of a gradient. Raises `ValueError` if the parameters
        have no array at this path."""
        _check_path(path, by_path)
        if not trees.is_array(by_path[path]):
            raise ValueError(
                f"The gradients have a leaf {trees.dotted(path)!r}, but the parameter at this path "
                f"is {by_path[path]!r}, and only arrays are trained. Use "
                "eqx.filter_value_and_grad, whose gradient at this path is None, or make the "
                "parameter an array."
            )
        return by_path[path]

    return jax.tree.map_with_path(parameter, gradients)


def floating(path: Sequence[Any], leaf: Array) -> Array:
    """Returns an auxiliary value, with integers converted to floating-point numbers, so that a mean
    can be taken. Raises `ValueError` for a random key."""
    # Random keys have an extended type.
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        raise ValueError(
            f"The auxiliary value {trees.dotted(path) or 'itself'} is of type {leaf.dtype}, which "
            "has no mean. Leave it out, or pass aux=f to grads.accumulated and "
            "grads.averaged, where f combines the values of all microbatches or devices."
        )
    return leaf if jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf.astype(jnp.result_type(float))
