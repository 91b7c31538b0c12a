"""Collectives written as hops: drop-in twins of `jax.lax`'s, to read, count, differentiate and compose."""

from parallax.collectives import replicated, ring

__all__ = ["replicated", "ring"]
