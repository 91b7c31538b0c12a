"""Splits a traced backward pass in two: the cotangents of inputs, and the gradients of weights."""

from parallax.split_backward.halves import split

__all__ = ["split"]
