"""Collectives written as hops: drop-in twins of `jax.lax`'s, to read, count, differentiate, compose and price."""

from parallax.collectives import (
    bidirectional,
    buckets,
    cost,
    doubling,
    halving,
    matmul,
    quantized,
    replicated,
    ring,
    torus,
    tuning,
    twins,
)

__all__ = [
    "bidirectional",
    "buckets",
    "cost",
    "doubling",
    "halving",
    "matmul",
    "quantized",
    "replicated",
    "ring",
    "torus",
    "tuning",
    "twins",
]
