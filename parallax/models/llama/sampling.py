"""Text from a trained Llama."""

from collections.abc import Sequence
from typing import SupportsFloat, SupportsIndex

import numpy as np
from jaxtyping import Array, Int, Integer, Key

from parallax.models import sampling
from parallax.models.llama.family import FAMILY
from parallax.models.llama.model import Llama


def sample(
    model: Llama,
    prompt: Integer[Array | np.ndarray, " prompt"] | Sequence[int],
    *,
    tokens: SupportsIndex,
    window: SupportsIndex | None = None,
    temperature: SupportsFloat = 1.0,
    top_k: SupportsIndex | None = None,
    top_p: SupportsFloat | None = None,
    key: Key[Array, ""],
) -> Int[Array, " tokens"]:
    """The `tokens` tokens that follow `prompt`, as `models.sampling.sampled` draws them, with its
    arguments and errors.

    Each token sees at most the last `window` before it (default: the model's context; take the
    length that it was trained on). Wrap it in `jax.jit` or `eqx.filter_jit`, with `tokens`,
    `window` and `top_k` static.

    Raises:
        ValueError: as `sampled` does; a window that is not within the model's context; or an array
            of the model is deleted.
    """
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "key": key}
    return sampling.of_family(
        FAMILY, "llama", model, prompt, tokens=tokens, window=window, **options
    )
