"""Llama as the recipe of `decoder` sees it."""

import functools

from parallax.context import causal_attention
from parallax.models import decoder_parts, flash
from parallax.models.attention import grouped
from parallax.models.cached import cached
from parallax.models.family import Family
from parallax.models.llama.forward import PARTS, logits
from parallax.models.llama.model import Llama, rules

stages = functools.partial(decoder_parts.stages, PARTS)
FAMILY = Family(
    model=Llama,
    stages=stages,
    rules=rules,
    logits=logits,
    attention=grouped,
    tpu_attention=flash.attention,
    cached=functools.partial(cached, PARTS),
    context_attention=causal_attention,
)
