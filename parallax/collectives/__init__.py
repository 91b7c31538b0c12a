"""Collectives written as hops: drop-in twins of `jax.lax`'s, to read, count, differentiate and compose."""

from parallax.collectives import bidirectional, doubling, halving, replicated, ring, torus, twins

__all__ = ["bidirectional", "doubling", "halving", "replicated", "ring", "torus", "twins"]
