"""`FAMILY`, the record of Llama's functions that `decoder` calls to train it; and `sample`, which
draws text.
"""

import functools

from parallax.context import causal_attention
from parallax.models import flash, sampling
from parallax.models.attention import grouped
from parallax.models.family import Family
from parallax.models.llama.forward import PARTS, logits, stages
from parallax.models.llama.model import Llama, rules

FAMILY = Family(
    model=Llama,
    stages=stages,
    rules=rules,
    logits=logits,
    attention=grouped,
    tpu_attention=flash.attention,
    gpu_attention=flash.cudnn_attention,
    cached=functools.partial(sampling.cached, PARTS),
    context_attention=causal_attention,
)
sample = sampling.sampler(FAMILY, "llama")
