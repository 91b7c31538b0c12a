"""Collectives written as hops: drop-in twins of `jax.lax`'s, to read, count, differentiate, compose and price.

Movers are values: `ring.all_reduce(x, "data")` for `lax.psum(x, "data")`, and `ring("data")` for all functions that take an
axis. `tuning`, which measures, is imported by its own name.
"""

from parallax.collectives import buckets, cost, int8, matmul, types
from parallax.collectives.axis import Axis, AxisLike, Mover, joined, xla
from parallax.collectives.bidirectional import two_rings
from parallax.collectives.buckets import bucketed
from parallax.collectives.int8 import ErrorFeedback, quantized, quantized_in
from parallax.collectives.recursive_doubling import doubling
from parallax.collectives.recursive_halving import halving
from parallax.collectives.rings import ring, send_next
from parallax.collectives.several_axes import hierarchical, torus

__all__ = [
    "Axis",
    "AxisLike",
    "ErrorFeedback",
    "Mover",
    "bucketed",
    "buckets",
    "cost",
    "doubling",
    "halving",
    "hierarchical",
    "int8",
    "joined",
    "matmul",
    "quantized",
    "quantized_in",
    "ring",
    "send_next",
    "torus",
    "two_rings",
    "types",
    "xla",
]
