"""GPT-2: the model, its sharding rules, its loss, and its weights in Hugging Face's layout."""

from parallax.models.block import Block, Linear
from parallax.models.family import Batch, run_blocks
from parallax.models.gpt2.configuration import FORMAT
from parallax.models.gpt2.family import FAMILY, sample
from parallax.models.gpt2.forward import block, logits, loss, stages
from parallax.models.gpt2.model import (
    GPT2,
    GPT3,
    LARGE,
    MEDIUM,
    MLP,
    SMALL,
    XL,
    Attention,
    Config,
    Norm,
    attention,
    rules,
)
from parallax.models.gpt2.weights import load, save

__all__ = [
    "FAMILY",
    "FORMAT",
    "GPT2",
    "GPT3",
    "LARGE",
    "MEDIUM",
    "MLP",
    "SMALL",
    "XL",
    "Attention",
    "Batch",
    "Block",
    "Config",
    "Linear",
    "Norm",
    "attention",
    "block",
    "load",
    "logits",
    "loss",
    "rules",
    "run_blocks",
    "sample",
    "save",
    "stages",
]
