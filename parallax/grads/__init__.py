"""Functions that take a gradient function, and return one whose gradients are accumulated over
microbatches, averaged over devices, or clipped.

A gradient function is `(params, batch) -> (loss, gradients)`, such as `jax.value_and_grad` and
`eqx.filter_value_and_grad` make. With `has_aux=True` it is
`(params, batch) -> ((loss, aux), gradients)`, with `aux` a tree of arrays, and the new function
returns `aux` too. A leaf that is not trained has a gradient of None. The order of wrapping decides
the cost: `averaged` reduces once per step if it wraps `accumulated`, and once per microbatch inside
`accumulated`.
"""

from parallax.grads.devices import (
    accumulated,
    averaged,
    mean_over_devices,
    mean_over_microbatches,
    reduced_in_backward,
    split_into_microbatches,
    summed,
)
from parallax.grads.norms import clipped, norm, scaled
from parallax.grads.results import Grad, Loss

__all__ = [
    "Grad",
    "Loss",
    "accumulated",
    "averaged",
    "clipped",
    "mean_over_devices",
    "mean_over_microbatches",
    "norm",
    "reduced_in_backward",
    "scaled",
    "split_into_microbatches",
    "summed",
]
