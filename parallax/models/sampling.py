"""Text from a trained decoder, one token after another."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, SupportsFloat, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Float, Int, Integer, Key

from parallax import argument_checks, precision
from parallax.models.cached import Cached
from parallax.models.family import Family

NOTHING = -1  # in place of a token where the logits are nan


def sampled(
    logits: Callable[[Int[Array, "batch tokens"]], Float[Array, "batch tokens vocabulary"]],
    prompt: Integer[Array | np.ndarray, " prompt"] | Sequence[int],
    *,
    tokens: SupportsIndex,
    window: SupportsIndex,
    cached: Cached | None = None,
    temperature: SupportsFloat = 1.0,
    top_k: SupportsIndex | None = None,
    top_p: SupportsFloat | None = None,
    key: Key[Array, ""],
) -> Int[Array, " tokens"]:
    """The `tokens` tokens that follow `prompt`, each drawn from softmax(`filtered` logits).

    With a family's model, `logits` is `functools.partial(family.logits, model)`, and `cached` is
    `family.cached(model)`. The model may be split: under `jax.jit`, arrays placed over a mesh give
    the tokens that one device draws. For many prompts of one length use `jax.vmap`; placed over an
    axis of the mesh, each device writes its own.

    Each token sees at most the last `window` before it. While the text fits the window, keys and
    values are kept, and a token costs a pass of one token, 2 N flops and what attention needs.
    Behind it, and without `cached`, it costs one over the whole window, 2 N window flops: where the
    window moves, so do the places of all tokens in it, and nothing that was kept holds.

    Where logits are nan, as after an id outside the vocabulary, the token is -1, and so are all
    after it. No tokenizer decodes that.

    Args:
        logits: after each of the tokens `[1, window]`.
        prompt: it may be longer than the window.
        tokens: how many, static.
        window: static.
        cached: the same model, keeping what it has seen. None: each token is computed from all
            before it.
        temperature: logits are divided by it; 0 takes the largest logit each time (greedy), the
            first of equal ones.
        top_k: draw among the k largest logits (and those that equal the least of them); static.
            None: among all.
        top_p: draw among the fewest tokens whose probabilities, after temperature and `top_k`,
            reach p. None: among all.
        key: each token has its own, `jax.random.split(key, tokens)`.

    Raises:
        ValueError: no prompt, or one that is not whole numbers in one dim; `tokens` below 0,
            `window` or `top_k` below 1; where values are known (outside `jax.jit`), a prompt's
            token outside the vocabulary, a temperature that is negative or not finite, or a `top_p`
            outside [0, 1]. Inside, these give -1.
    """
    tokens, window = argument_checks.whole_numbers("sample", tokens=tokens, window=window)
    if tokens < 0 or window < 1:
        raise ValueError(
            f"sample needs tokens of 0 or more and a window of 1 or more; got tokens {tokens}, "
            f"window {window}."
        )
    if top_k is not None:
        (top_k,) = argument_checks.whole_numbers("sample", top_k=top_k)
        if top_k < 1:
            raise ValueError(f"sample needs a top_k of 1 or more, or None for all; got {top_k}.")
    temperature = _scalar(
        "temperature", temperature, math.inf, "a finite number, 0 for the likeliest token, or more"
    )
    top_p = None if top_p is None else _scalar("top_p", top_p, 1.0, "a number from 0 to 1")
    vocabulary = jax.eval_shape(logits, jax.ShapeDtypeStruct((1, window), jnp.int32)).shape[-1]
    prompt = _prompt(prompt, vocabulary)[-window:]
    keys = jax.random.split(key, tokens)

    def token_of(row, key, unknown):
        scores = filtered(row, temperature, top_k=top_k, top_p=top_p)
        token = jax.random.categorical(key, scores).astype(jnp.int32)
        return jnp.where(jnp.isnan(scores).any() | unknown, NOTHING, token)

    begun = jnp.zeros(0, jnp.int32)
    if cached is not None and tokens:
        fit = min(
            tokens, window - prompt.size + 1
        )  # so many see no more than the window before them
        begun = _kept(cached, token_of, prompt, keys[:fit])
        prompt = jnp.concatenate([prompt, begun])[-window:]
    start = jnp.zeros(window, jnp.int32).at[: prompt.size].set(prompt)

    def draw(carry, key):
        seen, filled = carry  # the last tokens, and how many of the window's places they fill
        token = token_of(logits(seen[None])[0, filled - 1], key, (seen == NOTHING).any())
        seen = jnp.where(filled < window, seen, jnp.roll(seen, -1))
        filled = jnp.minimum(filled + 1, window)
        return (seen.at[filled - 1].set(token), filled), token

    if begun.size == tokens:
        return begun
    rest = lax.scan(draw, (start, jnp.asarray(prompt.size, jnp.int32)), keys[begun.size :])[1]
    return jnp.concatenate([begun, rest])


def _kept(
    cached: Cached,
    token_of: Callable[..., Int[Array, ""]],
    prompt: Int[Array, " prompt"],
    keys: Key[Array, " tokens"],
) -> Int[Array, " tokens"]:
    """The tokens after `prompt`, one for each key, by `token_of`, with keys and values kept."""
    row, cache = cached.begin(prompt[None], prompt.size + keys.size - 1)
    token = token_of(row[0], keys[0], (prompt == NOTHING).any())

    def draw(carry, each):
        (token, cache), (key, place) = carry, each
        row, cache = cached.go_on(token[None], cache, place)
        new = token_of(row[0], key, token == NOTHING)
        return (new, cache), new

    places = prompt.size + jnp.arange(keys.size - 1, dtype=jnp.int32)
    return jnp.concatenate([token[None], lax.scan(draw, (token, cache), (keys[1:], places))[1]])


def of_family(
    family: Family,
    name: str,
    model: Any,
    prompt: Any,
    *,
    tokens: SupportsIndex,
    window: SupportsIndex | None,
    **options: Any,
) -> Int[Array, " tokens"]:
    """What `sampled` writes with a model of `family`, whose configuration has its context: as
    `gpt2.sample` says, for any family.

    Raises:
        ValueError: as it does; `name` begins the message.
    """
    argument_checks.check_not_deleted(f"{name}.sample", model)
    context = model.config.context
    (window,) = argument_checks.whole_numbers(
        "sample", window=context if window is None else window
    )
    if not 1 <= window <= context:
        raise ValueError(
            f"sample needs a window from 1 to the model's context of {context} tokens; got "
            f"{window}."
        )
    cached = None if family.cached is None else family.cached(model)
    return sampled(
        functools.partial(family.logits, model),
        prompt,
        tokens=tokens,
        window=window,
        cached=cached,
        **options,
    )


def filtered(
    logits: Float[Array, " vocabulary"],
    temperature: SupportsFloat = 1.0,
    *,
    top_k: int | None = None,
    top_p: SupportsFloat | None = None,
) -> Float[Array, " vocabulary"]:
    """The logits to draw from, in float32 or wider: over `temperature`, less their maximum, and
    -inf where no token is drawn.

    At temperature 0 all are -inf but the largest, the first of equal ones. First `temperature`,
    then `top_k`, then `top_p` of what is left; the likeliest token always stays. All are nan where
    a logit is nan or inf, or none is finite, or for a `temperature` or `top_p` that `sampled`
    refuses.

    Source: Holtzman et al., The curious case of neural text degeneration (arXiv 1904.09751), for
    `top_p`.
    """
    wide = logits.astype(precision.accumulation_dtype(logits.dtype))
    temperature = jnp.asarray(temperature, wide.dtype)
    shifted = wide - jnp.max(wide)  # so that a small temperature overflows to -inf alone
    likeliest = lax.broadcasted_iota(jnp.int32, wide.shape, 0) == jnp.argmax(wide).astype(jnp.int32)
    greedy = jnp.where(likeliest, 0, -jnp.inf).astype(wide.dtype)
    scores = jnp.where(
        temperature == 0, greedy, shifted / jnp.where(temperature == 0, 1, temperature)
    )
    if top_k is not None:
        scores = jnp.where(
            scores < lax.top_k(scores, min(top_k, scores.size))[0][-1], -jnp.inf, scores
        )
    wrong = jnp.isnan(shifted).any() | ~((temperature >= 0) & (temperature < jnp.inf))
    if top_p is not None:
        rest = (
            (1 - top_p).astype(wide.dtype)
            if isinstance(top_p, jax.Array)
            else jnp.asarray(1 - float(top_p), wide.dtype)
        )
        order = jnp.argsort(scores)
        below = jnp.cumsum(jax.nn.softmax(scores[order])) <= rest
        scores = scores.at[order].set(jnp.where(below.at[-1].set(False), -jnp.inf, scores[order]))
        wrong |= ~((rest >= 0) & (rest <= 1))
    return jnp.where(wrong, jnp.nan, scores)


def _scalar(name: str, value: Any, most: float, needed: str) -> Any:
    """The number, checked where it is known: from 0 to `most`, which is finite."""
    if np.shape(value) != () or np.result_type(value).kind not in "iuf":
        raise ValueError(f"sample needs as {name} {needed}; got {value!r}.")
    if not isinstance(value, Tracer) and not (
        0 <= float(value) <= most and math.isfinite(float(value))
    ):
        raise ValueError(f"sample needs as {name} {needed}; got {float(value)}.")
    return value if isinstance(value, jax.Array) else float(value)


def _prompt(prompt: Any, vocabulary: int) -> Int[Array, " prompt"]:
    """The prompt as int32, with -1 for what is outside the vocabulary."""
    prompt = prompt if isinstance(prompt, jax.Array) else np.asarray(prompt)
    if not prompt.size:
        raise ValueError(
            "sample needs a prompt of one token or more; got none. Start with a space, or a line's "
            "end."
        )
    if prompt.ndim != 1:
        raise ValueError(
            f"sample needs one prompt, of one dim; got shape {list(prompt.shape)}. For many, use "
            "jax.vmap."
        )
    argument_checks.check_tokens("sample", prompt[None], vocabulary)
    outside = (prompt < 0) | (prompt > min(vocabulary - 1, jnp.iinfo(prompt.dtype).max))
    return jnp.where(outside, jnp.int32(NOTHING), jnp.asarray(prompt).astype(jnp.int32))
