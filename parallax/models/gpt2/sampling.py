"""Text from a trained GPT-2."""

import functools
from collections.abc import Sequence
from typing import SupportsFloat, SupportsIndex

import numpy as np
from jaxtyping import Array, Int, Integer, Key

from parallax import given
from parallax.models.gpt2.forward import logits
from parallax.models.gpt2.model import GPT2
from parallax.models.sampling import sampled


def sample(
    model: GPT2,
    prompt: Integer[Array | np.ndarray, " prompt"] | Sequence[int],
    *,
    tokens: SupportsIndex,
    window: SupportsIndex | None = None,
    temperature: SupportsFloat = 1.0,
    top_k: SupportsIndex | None = None,
    top_p: SupportsFloat | None = None,
    key: Key[Array, ""],
) -> Int[Array, " tokens"]:
    """The `tokens` tokens that follow `prompt`, as `models.sampling.sampled` draws them, with its arguments and errors.

    Each token sees at most the last `window` before it (default: the model's context; take the length that it was trained on).
    Wrap it in `jax.jit` or `eqx.filter_jit`, with `tokens`, `window` and `top_k` static.

    Raises:
        ValueError: as `sampled` does; a window that is not within the model's context; or an array of the model is deleted.
    """
    given.there("gpt2.sample", model)
    context = model.wpe.shape[0]
    (window,) = given.whole("sample", window=context if window is None else window)
    if not 1 <= window <= context:
        raise ValueError(f"sample needs a window from 1 to the model's context of {context} tokens; got {window}.")
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "key": key}
    return sampled(functools.partial(logits, model), prompt, tokens=tokens, window=window, **options)
