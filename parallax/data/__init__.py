"""Tokens and batches. A batch is a pure function of (seed, step). A thread reads the batches in the
background, from one file of tokens or from many.
"""

from parallax.data import shards
from parallax.data.batches import batch, held_out_batches
from parallax.data.prefetch import Prefetched, placed
from parallax.data.tokens import Source, Tokens, read, split, write

__all__ = [
    "Prefetched",
    "Source",
    "Tokens",
    "batch",
    "held_out_batches",
    "placed",
    "read",
    "shards",
    "split",
    "write",
]
