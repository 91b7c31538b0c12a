"""Text from a trained decoder, one token after another.

`sampled` draws tokens by a `Writer`; `sampler` makes the function `sample` of a family. Keys and
values are kept from token to token, so that the next one costs a pass of one token.

Legend: L layers, B batch, P tokens of the prompt, S places, G heads of keys and values, K head
width, V vocabulary.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, SupportsFloat, SupportsIndex

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Float, Int, Integer, Key

from parallax import argument_checks, precision, tensor
from parallax._typing import PyTree
from parallax.models import decoder_parts
from parallax.models.attention import grouped
from parallax.models.decoder_parts import DecoderParts
from parallax.models.family import Family
from parallax.pipeline.checks import output

NOTHING = -1  # in place of a token where the logits are nan
Prompt = Integer[Array | np.ndarray, " prompt"] | Sequence[int]


class Cache(NamedTuple):
    """Keys and values of all layers.

    Attributes:
        keys: of the tokens so far; places after them are 0, and not attended to.
        values: the same for values.
    """

    keys: Float[Array, "layers batch places groups head_width"]
    values: Float[Array, "layers batch places groups head_width"]


class Cached(NamedTuple):
    """A model that keeps keys and values. The logits are those after the last token.

    Attributes:
        begin: `(tokens [B, P], places) -> (logits [B, V], cache)`, with room for so many tokens, P
            among them.
        go_on: `(tokens [B], cache, first) -> (logits [B, V], cache)`, one more token each, at the
            place `first`.
    """

    begin: Callable[..., tuple[Float[Array, "batch vocabulary"], PyTree]]
    go_on: Callable[..., tuple[Float[Array, "batch vocabulary"], PyTree]]


class Writer(NamedTuple):
    """A model that writes.

    Attributes:
        logits: from tokens `[1, window]` to the logits after each of them.
        window: each token sees at most so many before it; static.
        cached: the same model, keeping keys and values; None: each token is computed from all
            before it.
    """

    logits: Callable[[Int[Array, "batch tokens"]], Float[Array, "batch tokens vocabulary"]]
    window: SupportsIndex
    cached: Cached | None = None


def cached(parts: DecoderParts, model: Any) -> Cached:
    """Returns `model`, whole, with the keys and values of its tokens kept: 2 L S G K numbers a
    sequence.

    Under `jax.jit` arrays placed over a mesh stay split: heads of keys and values over the devices
    that have them, sequences over those that have these.
    """

    def begin(tokens, places):
        def pad(old, new):
            return jnp.pad(new, ((0, 0), (0, places - new.shape[1]), (0, 0), (0, 0)))

        return _run(parts, model, tokens, None, 0, pad)

    def go_on(tokens, cache, first):
        def write(old, new):
            return lax.dynamic_update_slice_in_dim(old, new, first, axis=1)

        return _run(parts, model, tokens[:, None], cache, first, write)

    return Cached(begin, go_on)


def _run(
    parts: DecoderParts,
    model: Any,
    tokens: Int[Array, "batch tokens"],
    cache: Cache | None,
    first: Any,
    join: Callable[..., Any],
) -> tuple[Float[Array, "batch vocabulary"], Cache]:
    """Runs the tokens from `first` on through all blocks; `join` puts a layer's new keys or values
    behind the earlier ones.
    """
    arrays, static = eqx.partition(model.blocks, eqx.is_array)

    def block(x, layer_inputs):
        weights, layer, old = layer_inputs
        caches = []

        def attend(q, k, v):
            old_keys, old_values = old or (None, None)
            caches.append(Cache(join(old_keys, k), join(old_values, v)))
            return grouped(q, *caches[0], first=first)

        apply = parts.layer(model.config, positions=places, comms=tensor.comms(()), attend=attend)
        return output(apply(eqx.combine(weights, static), x, None, layer)).x, caches[0]

    x = decoder_parts.embed(parts, model, tokens, None, first=first)
    places = decoder_parts.positions(x, tokens.shape[1], first)
    layers = jnp.arange(jax.tree.leaves(arrays)[0].shape[0], dtype=jnp.int32)
    x, new_cache = lax.scan(block, x, (arrays, layers, cache))
    return decoder_parts.unembed(model, x[:, -1:])[:, 0], new_cache


def sampler(family: Family, name: str) -> Callable[..., Int[Array, " tokens"]]:
    """Returns the function `sample` of a family, called `name` in errors."""

    def sample(
        model: Any,
        prompt: Prompt,
        *,
        tokens: SupportsIndex,
        window: SupportsIndex | None = None,
        temperature: SupportsFloat = 1.0,
        top_k: SupportsIndex | None = None,
        top_p: SupportsFloat | None = None,
        key: Key[Array, ""],
    ) -> Int[Array, " tokens"]:
        """Returns the `tokens` tokens that follow `prompt`, as `models.sampling.sampled` draws
        them, with its arguments and errors.

        Each token sees at most the last `window` before it (default: the model's context; use the
        length that it was trained on). Wrap it in `jax.jit` or `eqx.filter_jit`, with `tokens`,
        `window` and `top_k` static.

        Raises:
            ValueError: as `sampled` does; the window is not within the model's context; or an array
                of the model is deleted.
        """
        argument_checks.check_not_deleted(f"{name}.sample", model)
        context = model.config.context
        window = context if window is None else window
        (window,) = argument_checks.whole_numbers("sample", window=window)
        if not 1 <= window <= context:
            raise ValueError(
                f"sample needs a window from 1 to the model's context of {context} tokens; got "
                f"{window}."
            )
        logits = functools.partial(family.logits, model)
        writer = Writer(logits, window, None if family.cached is None else family.cached(model))
        return sampled(
            writer,
            prompt,
            tokens=tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            key=key,
        )

    return sample


def sampled(
    writer: Writer,
    prompt: Prompt,
    *,
    tokens: SupportsIndex,
    temperature: SupportsFloat = 1.0,
    top_k: SupportsIndex | None = None,
    top_p: SupportsFloat | None = None,
    key: Key[Array, ""],
) -> Int[Array, " tokens"]:
    """Returns the `tokens` tokens that follow `prompt`, each drawn from softmax(`filtered` logits).

    The model may be split: under `jax.jit`, arrays placed over a mesh give the tokens that one
    device draws. For many prompts of one length use `jax.vmap`; placed over an axis of the mesh,
    each device writes its own.

    While the text fits the writer's window, keys and values are kept, and a token costs a pass of
    one token, 2 N flops and what attention needs. After that, and without `cached`, it costs one
    over the whole window, 2 N window flops: where the window moves, so do the places of all tokens
    in it, and no key or value stays the same.

    Where logits are nan, as after an id outside the vocabulary, the token is -1, and so are all
    after it. No tokenizer decodes that.

    Args:
        writer: the model, such as `Writer(functools.partial(family.logits, model), window,
            family.cached(model))`.
        prompt: it may be longer than the window.
        tokens: how many, static.
        temperature: logits are divided by it; 0 takes the largest logit each time (greedy), the
            first of equal ones.
        top_k: draw among the k largest logits (and those that equal the least of them); static.
            None: among all.
        top_p: draw among the fewest tokens whose probabilities, after temperature and `top_k`,
            reach p. None: among all.
        key: each token has its own, `jax.random.split(key, tokens)`.

    Raises:
        ValueError: no prompt, or one that is not whole numbers in one dim; `tokens` below 0,
            a window or `top_k` below 1; where values are known (outside `jax.jit`), a prompt's
            token outside the vocabulary, a temperature that is negative or not finite, or a `top_p`
            outside [0, 1]. Inside, these give -1.
    """
    logits, window, cached_model = writer
    tokens, window = argument_checks.whole_numbers("sample", tokens=tokens, window=window)
    if tokens < 0 or window < 1:
        raise ValueError(
            f"sample needs tokens of 0 or more and a window of 1 or more; got tokens {tokens}, "
            f"window {window}."
        )
    token_of = _token_of(temperature, top_k, top_p)
    vocabulary = jax.eval_shape(logits, jax.ShapeDtypeStruct((1, window), jnp.int32)).shape[-1]
    ids = _prompt(prompt, vocabulary)[-window:]
    keys = jax.random.split(key, tokens)
    first_tokens = jnp.zeros(0, jnp.int32)
    if cached_model is not None and tokens:
        # So many tokens see no more than the window before them.
        fit = min(tokens, window - ids.size + 1)
        first_tokens = _with_cache(cached_model, token_of, ids, keys[:fit])
        ids = jnp.concatenate([ids, first_tokens])[-window:]
    if first_tokens.size == tokens:
        return first_tokens
    later = _without_cache(logits, token_of, ids, window, keys[first_tokens.size :])
    return jnp.concatenate([first_tokens, later])


def _token_of(temperature: Any, top_k: Any, top_p: Any) -> Callable[..., Int[Array, ""]]:
    """Returns the function `(logits [V], key, unknown)` to a token, which is -1 after an unknown
    one."""
    if top_k is not None:
        (top_k,) = argument_checks.whole_numbers("sample", top_k=top_k)
        if top_k < 1:
            raise ValueError(f"sample needs a top_k of 1 or more, or None for all; got {top_k}.")
    temperature = _scalar(
        "temperature", temperature, math.inf, "a finite number, 0 for the likeliest token, or more"
    )
    top_p = None if top_p is None else _scalar("top_p", top_p, 1.0, "a number from 0 to 1")

    def token_of(row, key, unknown):
        scores = filtered(row, temperature, top_k=top_k, top_p=top_p)
        token = jax.random.categorical(key, scores).astype(jnp.int32)
        return jnp.where(jnp.isnan(scores).any() | unknown, NOTHING, token)

    return token_of


def _with_cache(
    model: Cached,
    token_of: Callable[..., Int[Array, ""]],
    prompt: Int[Array, " prompt"],
    keys: Key[Array, " tokens"],
) -> Int[Array, " tokens"]:
    """Returns the tokens after `prompt`, one for each key, with keys and values kept."""
    row, cache = model.begin(prompt[None], prompt.size + keys.size - 1)
    token = token_of(row[0], keys[0], (prompt == NOTHING).any())

    def draw(carry, inputs):
        (token, cache), (key, place) = carry, inputs
        row, cache = model.go_on(token[None], cache, place)
        new = token_of(row[0], key, token == NOTHING)
        return (new, cache), new

    places = prompt.size + jnp.arange(keys.size - 1, dtype=jnp.int32)
    return jnp.concatenate([token[None], lax.scan(draw, (token, cache), (keys[1:], places))[1]])


def _without_cache(
    logits: Callable[..., Any],
    token_of: Callable[..., Int[Array, ""]],
    prompt: Int[Array, " prompt"],
    window: int,
    keys: Key[Array, " tokens"],
) -> Int[Array, " tokens"]:
    """Returns the tokens after `prompt`, one for each key, each computed from the whole window."""
    start = jnp.zeros(window, jnp.int32).at[: prompt.size].set(prompt)

    def draw(carry, key):
        seen, filled = carry  # the last tokens, and how many of the window's places they fill
        token = token_of(logits(seen[None])[0, filled - 1], key, (seen == NOTHING).any())
        seen = jnp.where(filled < window, seen, jnp.roll(seen, -1))
        filled = jnp.minimum(filled + 1, window)
        return (seen.at[filled - 1].set(token), filled), token

    return lax.scan(draw, (start, jnp.asarray(prompt.size, jnp.int32)), keys)[1]


def filtered(
    logits: Float[Array, " vocabulary"],
    temperature: SupportsFloat = 1.0,
    *,
    top_k: int | None = None,
    top_p: SupportsFloat | None = None,
) -> Float[Array, " vocabulary"]:
    """Returns the logits to draw from, in float32 or wider: over `temperature`, less their maximum,
    and -inf where no token is drawn.

    At temperature 0 all are -inf but the largest, the first of equal ones. First `temperature`,
    then `top_k`, then `top_p` of what is left; the likeliest token always stays. All are nan where
    a logit is nan or inf, or none is finite, or for a `temperature` or `top_p` that `sampled`
    refuses.

    Source: Holtzman et al., The curious case of neural text degeneration (arXiv 1904.09751), for
    `top_p`.
    """
    wide = logits.astype(precision.accumulation_dtype(logits.dtype))
    scale = jnp.asarray(temperature, wide.dtype)
    shifted = wide - jnp.max(wide)  # so that a small temperature overflows to -inf alone
    likeliest = lax.broadcasted_iota(jnp.int32, wide.shape, 0) == jnp.argmax(wide).astype(jnp.int32)
    greedy = jnp.where(likeliest, 0, -jnp.inf).astype(wide.dtype)
    scores = jnp.where(scale == 0, greedy, shifted / jnp.where(scale == 0, 1, scale))
    if top_k is not None:
        least = lax.top_k(scores, min(top_k, scores.size))[0][-1]
        scores = jnp.where(scores < least, -jnp.inf, scores)
    wrong = jnp.isnan(shifted).any() | ~((scale >= 0) & (scale < jnp.inf))
    if top_p is not None:
        dropped_share = 1 - top_p if isinstance(top_p, jax.Array) else 1 - float(top_p)
        dropped_share = jnp.asarray(dropped_share, wide.dtype)
        order = jnp.argsort(scores)
        below = jnp.cumsum(jax.nn.softmax(scores[order])) <= dropped_share
        scores = scores.at[order].set(jnp.where(below.at[-1].set(False), -jnp.inf, scores[order]))
        wrong |= ~((dropped_share >= 0) & (dropped_share <= 1))
    return jnp.where(wrong, jnp.nan, scores)


def _scalar(name: str, value: Any, most: float, needed: str) -> Any:
    """Returns the number, checked where it is known: from 0 to `most`, and finite."""
    if np.shape(value) != () or np.result_type(value).kind not in "iuf":
        raise ValueError(f"sample needs as {name} {needed}; got {value!r}.")
    if not isinstance(value, Tracer):
        number = float(value)
        if not (0 <= number <= most and math.isfinite(number)):
            raise ValueError(f"sample needs as {name} {needed}; got {number}.")
    return value if isinstance(value, jax.Array) else float(value)


def _prompt(prompt: Any, vocabulary: int) -> Int[Array, " prompt"]:
    """Returns the prompt as int32, with -1 for what is outside the vocabulary."""
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
