"""Llama, Qwen 2, Qwen 3 and Mixtral as one model: its sharding rules, its loss, and its weights in
Hugging Face's layout.
"""

from parallax.models.block import Block, Linear
from parallax.models.family import Batch
from parallax.models.llama.configuration import FORMATS
from parallax.models.llama.family import FAMILY, sample
from parallax.models.llama.forward import block, logits, loss, loss_and_statistics, stages
from parallax.models.llama.model import MLP, Attention, Llama, MoE, Norm, rules
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
    "MoE",
    "Norm",
    "Scaling",
    "block",
    "load",
    "logits",
    "loss",
    "loss_and_statistics",
    "rules",
    "sample",
    "save",
    "stages",
]
