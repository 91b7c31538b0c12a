"""Collectives written as tables of hops: drop-in twins of `jax.lax`'s, to read, count, differentiate, compose and price.

Movers are values: `ring.all_reduce(x, "data")` for `lax.psum(x, "data")`, and `ring("data")` for all functions that take an
axis. `tuning`, which measures, is imported by its own name.
"""

from parallax.collectives import buckets, by_hand, cost, int8, matmul, tables, types
from parallax.collectives.axis import Axis, AxisLike, Mover, joined, xla
from parallax.collectives.buckets import bucketed
from parallax.collectives.int8 import ErrorFeedback, quantized, quantized_in
from parallax.collectives.recursive_doubling import doubling
from parallax.collectives.route import Route, mover, mover_of_axes, send_next
from parallax.collectives.tables import direct, halving, halving_by, hierarchical, machines, pairs, ring, torus, two_rings

__all__ = [
    "Axis",
    "AxisLike",
    "ErrorFeedback",
    "Mover",
    "Route",
    "bucketed",
    "buckets",
    "by_hand",
    "cost",
    "direct",
    "doubling",
    "halving",
    "halving_by",
    "hierarchical",
    "int8",
    "joined",
    "machines",
    "matmul",
    "mover",
    "mover_of_axes",
    "pairs",
    "quantized",
    "quantized_in",
    "ring",
    "send_next",
    "tables",
    "torus",
    "two_rings",
    "types",
    "xla",
]
