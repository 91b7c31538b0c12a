"""GPT-2: the model, its rules, its loss, and its weights in Hugging Face's layout."""

from parallax.models.gpt2.model import (
    GPT2,
    LARGE,
    MEDIUM,
    SMALL,
    XL,
    Attention,
    Block,
    Config,
    Linear,
    MLP,
    Norm,
    embed,
    head,
    logits,
    loss,
    rules,
    run_blocks,
)

__all__ = [
    "GPT2", "LARGE", "MEDIUM", "SMALL", "XL", "Attention", "Block", "Config", "Linear", "MLP", "Norm",
    "embed", "head", "logits", "loss", "rules", "run_blocks",
]
