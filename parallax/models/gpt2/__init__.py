"""GPT-2: the model, its rules, its loss, and its weights in Hugging Face's layout."""

from parallax.models.gpt2.model import (
    GPT2,
    LARGE,
    MEDIUM,
    MLP,
    SMALL,
    XL,
    Attention,
    Block,
    Config,
    Linear,
    Norm,
    attention,
    chunked,
    embed,
    head,
    logits,
    loss,
    rules,
    run_blocks,
    unchunked,
)
from parallax.models.gpt2.sample import sample
from parallax.models.gpt2.stages import stages
from parallax.models.gpt2.weights import load, save

__all__ = [
    "GPT2",
    "LARGE",
    "MEDIUM",
    "MLP",
    "SMALL",
    "XL",
    "Attention",
    "Block",
    "Config",
    "Linear",
    "Norm",
    "attention",
    "chunked",
    "embed",
    "head",
    "load",
    "logits",
    "loss",
    "rules",
    "run_blocks",
    "sample",
    "save",
    "stages",
    "unchunked",
]
