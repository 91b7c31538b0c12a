"""Context parallelism: the tokens of long sequences are split over an axis, and attention goes round it.

    attend = functools.partial(context.attention, axis=ring("context"))
    out = attend(q, k, v)               # [B, T_X, H, K]: this device's tokens, in zigzag order

What stands between the attentions of a decoder works on each token by itself. Its attention alone needs all tokens: `attention`
sends keys and values round, `ulysses` goes from tokens to heads and back, `gathered` gathers keys and values. All three are
called as `attend(q, k, v)`, with `segments=` where documents are packed into one sequence.
"""

from parallax.context.checks import checked
from parallax.context.hops import attention
from parallax.context.kernels import TILED, Kernel, merged, tiled
from parallax.context.layers import causal, comms
from parallax.context.orders import (
    Order,
    Visits,
    chunks_of,
    contiguous,
    joined,
    own,
    positions,
    split,
    visits,
    zigzag,
)
from parallax.context.others import blockwise, gathered, ulysses

__all__ = [
    "TILED",
    "Kernel",
    "Order",
    "Visits",
    "attention",
    "blockwise",
    "causal",
    "checked",
    "chunks_of",
    "comms",
    "contiguous",
    "gathered",
    "joined",
    "merged",
    "own",
    "positions",
    "split",
    "tiled",
    "ulysses",
    "visits",
    "zigzag",
]
