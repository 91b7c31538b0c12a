"""`FAMILY`, the record of GPT-2's functions that `decoder` calls to train it; and `sample`, which
draws text.
"""

import functools

from parallax.context import causal_attention
from parallax.models import flash, sampling
from parallax.models.family import Family
from parallax.models.gpt2.forward import PARTS, logits, stages
from parallax.models.gpt2.model import GPT2, Config, attention, rules


def _uses_dropout(config: Config) -> bool:
    """Returns whether one of the two dropout rates is above 0."""
    return config.dropout > 0 or config.attention_dropout > 0


FAMILY = Family(
    model=GPT2,
    stages=stages,
    rules=rules,
    logits=logits,
    attention=attention,
    tpu_attention=flash.attention,
    gpu_attention=flash.cudnn_attention,
    cached=functools.partial(sampling.cached, PARTS),
    uses_dropout=_uses_dropout,
    context_attention=causal_attention,
)
sample = sampling.sampler(FAMILY, "gpt2")
