"""Context parallelism: attention over long sequences whose tokens are split over an axis.

    attend = functools.partial(context.attention, axis=ring("context"))
    out = attend(q, k, v)               # [B, T_X, H, K]: this device's tokens, in zigzag order

Only the attention of a decoder needs all tokens; its other layers work on each token by itself.
`attention` sends keys and values from device to device. `ulysses` gives each device all tokens of
some heads, and then splits the result by tokens again. `gathered` gathers all keys and values. All
three are called as `attend(q, k, v)`, with `segments=` if documents are packed into one sequence.
"""

from parallax.context.checks import must_communicate, with_heads
from parallax.context.gathered_keys import gathered
from parallax.context.head_exchange import ulysses
from parallax.context.kernels import TILED, Kernel, merge_softmax, tiled
from parallax.context.layers import causal_attention, comms
from parallax.context.one_device import blockwise
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
from parallax.context.ring import attention

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
    "with_heads",
    "zigzag",
]
