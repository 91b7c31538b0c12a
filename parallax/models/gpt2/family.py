"""GPT-2 as the recipe of `decoder` sees it."""

import functools

from parallax.context import causal_attention
from parallax.models import decoder_parts, flash
from parallax.models.cached import cached
from parallax.models.family import Family
from parallax.models.gpt2.forward import PARTS, logits
from parallax.models.gpt2.model import GPT2, Config, attention, rules


def _uses_dropout(config: Config) -> bool:
    return config.dropout > 0 or config.attention_dropout > 0


stages = functools.partial(decoder_parts.stages, PARTS, attend=attention)
FAMILY = Family(
    model=GPT2,
    stages=stages,
    rules=rules,
    logits=logits,
    attention=attention,
    tpu_attention=flash.attention,
    cached=functools.partial(cached, PARTS),
    uses_dropout=_uses_dropout,
    context_attention=causal_attention,
)
