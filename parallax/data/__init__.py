"""Tokens and batches: a batch is a pure function of (seed, step), read in the background, from one file or from many."""

from parallax.data import shards
from parallax.data.baselines import bigram, unigram
from parallax.data.batches import batch, held_out_batches
from parallax.data.prefetch import Prefetched, placed
from parallax.data.tokenizers import Tokenizer, bytes_tokenizer, encode_file, gpt2_tokenizer
from parallax.data.tokens import Source, Tokens, read, split, write

__all__ = [
    "Prefetched",
    "Source",
    "Tokenizer",
    "Tokens",
    "batch",
    "bigram",
    "bytes_tokenizer",
    "encode_file",
    "gpt2_tokenizer",
    "held_out_batches",
    "placed",
    "read",
    "shards",
    "split",
    "unigram",
    "write",
]
