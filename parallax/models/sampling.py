"""Text from a trained decoder, one token after another."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Key


def sampled(
    logits: Callable[[Int[Array, "batch tokens"]], Float[Array, "batch tokens vocabulary"]],
    prompt: Int[Array, " prompt"],
    *,
    tokens: int,
    window: int,
    temperature: float | Float[Array, ""] = 1.0,
    key: Key[Array, ""],
) -> Int[Array, " tokens"]:
    """The `tokens` tokens that follow `prompt`, each drawn from softmax(logits / temperature), on one device.

    Each token sees at most the last `window` before it. There is no cache of keys and values: the shapes stay fixed, and a token
    costs a forward pass over the whole window, 2 N window flops.

    Raises:
        ValueError: a window below 1, or no prompt.
    """
    if window < 1:
        raise ValueError(f"sample needs a window of 1 token or more; got {window}.")
    if not prompt.size:
        raise ValueError("sample needs a prompt of one token or more; got none. Start with a space, or a line's end.")
    prompt = prompt[-window:].astype(jnp.int32)
    start = jnp.zeros(window, jnp.int32).at[: prompt.size].set(prompt)

    def draw(carry, key):
        seen, filled = carry  # the last tokens, and how many of the window's places they fill
        scores = logits(seen[None])[0, filled - 1]
        token = jax.random.categorical(key, scores / jnp.asarray(temperature, scores.dtype)).astype(jnp.int32)
        seen = jnp.where(filled < window, seen, jnp.roll(seen, -1))
        filled = jnp.minimum(filled + 1, window)
        return (seen.at[filled - 1].set(token), filled), token

    return lax.scan(draw, (start, jnp.asarray(prompt.size, jnp.int32)), jax.random.split(key, tokens))[1]
