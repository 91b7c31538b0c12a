"""Llama as the recipe of `decoder` sees it."""

import functools

from parallax.context import causal_attention
from parallax.models import flash, pieces
from parallax.models.attention import grouped
from parallax.models.cached import cached
from parallax.models.family import Family
from parallax.models.llama.forward import PIECES, logits
from parallax.models.llama.model import Llama, rules

stages = functools.partial(pieces.stages, PIECES)
FAMILY = Family(
    model=Llama,
    stages=stages,
    rules=rules,
    logits=logits,
    attend=grouped,
    kernel=flash.attention,
    cached=functools.partial(cached, PIECES),
    around=causal_attention,
)
