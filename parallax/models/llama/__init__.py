"""Llama, and Qwen 2 and 3 as far as they are the same: the model, its rules, its loss, its weights in Hugging Face's layout."""

from parallax.models.family import Batch
from parallax.models.llama.configuration import FORMATS
from parallax.models.llama.family import FAMILY, stages
from parallax.models.llama.forward import block, embed, head, logits, loss, rotary, rotated
from parallax.models.llama.model import MLP, Attention, Block, Linear, Llama, Norm, rules
from parallax.models.llama.sampling import sample
from parallax.models.llama.sizes import B1, B3, B8, B70, SMALL, Config, Scaling
from parallax.models.llama.weights import load, save

__all__ = [
    "B1",
    "B3",
    "B8",
    "B70",
    "FAMILY",
    "FORMATS",
    "MLP",
    "SMALL",
    "Attention",
    "Batch",
    "Block",
    "Config",
    "Linear",
    "Llama",
    "Norm",
    "Scaling",
    "block",
    "embed",
    "head",
    "load",
    "logits",
    "loss",
    "rotary",
    "rotated",
    "rules",
    "sample",
    "save",
    "stages",
]
