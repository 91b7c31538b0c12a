"""GPT-2 as the recipe of `decoder` sees it."""

from parallax.models.family import Family
from parallax.models.gpt2.forward import logits
from parallax.models.gpt2.model import GPT2, Config, attention, rules
from parallax.models.gpt2.pipelined import stages


def _drops(config: Config) -> bool:
    return config.dropout > 0 or config.attention_dropout > 0


FAMILY = Family(model=GPT2, stages=stages, rules=rules, logits=logits, attend=attention, drops=_drops)
