"""Context parallelism: the tokens of long sequences are split over an axis, and attention goes
round it.

    attend = functools.partial(context.attention, axis=ring("context"))
    out = attend(q, k, v)               # [B, T_X, H, K]: this device's tokens, in zigzag order

What stands between the attentions of a decoder works on each token by itself. Its attention alone
needs all tokens: `attention` sends keys and values round, `ulysses` goes from tokens to heads and
back, `gathered` gathers keys and values. All three are called as `attend(q, k, v)`, with
`segments=` where documents are packed into one sequence.
"""

from parallax.context.checks import must_communicate
from parallax.context.hops import attention
from parallax.context.kernels import TILED, Kernel, merge_softmax, tiled
from parallax.context.layers import causal_attention, comms
from parallax.context.orders import (
    BlockPairs,
    ChunkOrder,
    block_pairs,
    chunk_table,
    contiguous,
    local_tokens,
    positions,
    split,
    unsplit,
    zigzag,
)
from parallax.context.others import blockwise, gathered, ulysses

__all__ = [
    "TILED",
    "BlockPairs",
    "ChunkOrder",
    "Kernel",
    "attention",
    "block_pairs",
    "blockwise",
    "causal_attention",
    "chunk_table",
    "comms",
    "contiguous",
    "gathered",
    "local_tokens",
    "merge_softmax",
    "must_communicate",
    "positions",
    "split",
    "tiled",
    "ulysses",
    "unsplit",
    "zigzag",
]
