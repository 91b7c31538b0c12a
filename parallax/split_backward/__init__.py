"""A backward pass in two halves, cotangents of inputs and gradients of weights. It knows nothing of
pipelines."""

from parallax.split_backward.halves import split

__all__ = ["split"]
