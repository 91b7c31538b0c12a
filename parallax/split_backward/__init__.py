"""Splits a traced backward pass into two programs: one computes the cotangents of inputs, and the
other the gradients of weights."""

from parallax.split_backward.halves import split

__all__ = ["split"]
