"""Text from a trained GPT-2."""

import functools

from jaxtyping import Array, Float, Int, Key

from parallax.models.gpt2.forward import logits
from parallax.models.gpt2.model import GPT2
from parallax.models.sampling import sampled


def sample(
    model: GPT2,
    prompt: Int[Array, " prompt"],
    *,
    tokens: int,
    window: int | None = None,
    temperature: float | Float[Array, ""] = 1.0,
    key: Key[Array, ""],
) -> Int[Array, " tokens"]:
    """The `tokens` tokens that follow `prompt`, as `models.sampling.sampled` draws them, on one device.

    Each token sees at most the last `window` before it (default: the model's context; take the length that it was trained on).
    Wrap it in `jax.jit` or `eqx.filter_jit`, with `tokens` and `window` static.

    Raises:
        ValueError: no prompt, or a window that is not within the model's context.
    """
    context = model.wpe.shape[0]
    window = context if window is None else window
    if not 1 <= window <= context:
        raise ValueError(f"sample needs a window from 1 to the model's context of {context} tokens; got {window}.")
    options = {"tokens": tokens, "window": window, "temperature": temperature, "key": key}
    return sampled(functools.partial(logits, model), prompt, **options)
