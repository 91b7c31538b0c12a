"""Text from a trained decoder, one token after another.

`sampled` draws tokens; it takes the model as a `Writer`, a record of the model's functions.
`sampler` makes the public function of a family of models, such as `gpt2.sample`. Keys and values of
attention are kept from token to token, so each new token costs a forward pass of only one token.

Legend: L layers, B batch, P tokens of the prompt, S places, G heads of keys and values, K head
width, V vocabulary. The *place* of a token is its number in the text, from 0 on. The *window* is
the part at the end of the text on which the next token depends. A token is *unknown*, -1
(`NOTHING`), if a logit was nan; all later tokens are then unknown too.
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

NOTHING = -1  # in place of a token, if a logit is nan
Prompt = Integer[Array | np.ndarray, " prompt"] | Sequence[int]


class Cache(NamedTuple):
    """Keys and values of all layers.

    Attributes:
        keys: the keys of the tokens so far; the keys at later places are 0, and no query attends to
            them.
        values: the values of the same tokens.
    """

    keys: Float[Array, "layers batch places groups head_width"]
    values: Float[Array, "layers batch places groups head_width"]


class Cached(NamedTuple):
    """Two functions that compute the logits of a model and keep its keys and values.

    `begin` and `go_on` return the logits after the last token that they were given.

    Attributes:
        begin: `(tokens [B, P], places) -> (logits [B, V], cache)` runs the model on the prompt. The
            cache has room for `places` tokens, and the prompt fills its first P places.
        go_on: `(tokens [B], cache, first) -> (logits [B, V], cache)` runs the model on one more
            token of each sequence, at the place `first`.
    """

    begin: Callable[..., tuple[Float[Array, "batch vocabulary"], PyTree]]
    go_on: Callable[..., tuple[Float[Array, "batch vocabulary"], PyTree]]


class Writer(NamedTuple):
    """The functions of a model from which text is drawn.

    Attributes:
        logits: the function from tokens `[1, window]` to the logits after each token.
        window: the largest number of tokens from which the next token is computed; static.
        cached: the functions that run the same model with a cache of keys and values. None: each
            token is computed from all tokens in the window.
        name: the name that errors begin with.
    """

    logits: Callable[[Int[Array, "batch tokens"]], Float[Array, "batch tokens vocabulary"]]
    window: SupportsIndex
    cached: Cached | None = None
    name: str = "sample"


def cached(parts: DecoderParts, model: Any) -> Cached:
    """Returns the functions that run a whole `model` with a cache of keys and values. For each
    sequence, the cache has 2 L S G K numbers: keys and values of L layers, S places, and G heads of
    width K.

    Under `jax.jit`, the cache of a model that is placed over a mesh is split as the model is: by
    heads of keys and values. If sequences are split over devices, so is their cache.
    """

    def begin(tokens, places):
        """Returns the logits [B, V] after a prompt [B, P], and the prompt's cache, which has room
        for `places` tokens.
        """

        def pad(old, new):
            """Returns the new keys or values [B, P, G, K], padded with zeros to S = `places`
            tokens, [B, S, G, K]. `old` is not used: before the prompt there are no keys or values,
            so it is None.
            """
            return jnp.pad(new, ((0, 0), (0, places - new.shape[1]), (0, 0), (0, 0)))

        return _run(parts, model, tokens, cache=None, first=0, join=pad)

    def go_on(tokens, cache, first):
        """Returns `(logits [B, V], cache)` after one more token of each sequence, `tokens` [B], at
        the place `first`.
        """

        def write(old, new):
            """Returns the old keys or values [B, S, G, K] with the new ones, [B, 1, G, K], at place
            `first`.
            """
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
    """Returns the logits after the last of `tokens`, and the cache with the keys and values of
    these tokens. The first token is at the place `first`.

    `join(old, new)` returns the old keys or values of a layer with the new ones behind them.
    Without a `cache` there are no old keys and values, and `old` is None.
    """
    arrays, static = eqx.partition(model.blocks, eqx.is_array)

    def block(x, layer_inputs):
        """Returns the output of one layer and its new cache, as a step of `lax.scan`."""
        weights, layer, old = layer_inputs
        # The family's block returns no cache, so its `attend` appends the cache to this list.
        caches = []

        def attend(q, k, v):
            """Returns attention to the keys and values in the cache and to those of the present
            tokens.
            """
            old_keys, old_values = old or (None, None)
            caches.append(Cache(join(old_keys, k), join(old_values, v)))
            # The causal mask, from the place `first` of the first query, hides the empty places.
            return grouped(q, *caches[0], first=first)

        # `comms(())`: no axis splits the layer's matrices here.
        apply = parts.layer(model.config, positions=places, comms=tensor.comms(()), attend=attend)
        # Without random keys (None) there is no dropout. A layer may return x or an `Output`;
        # `output` makes an `Output` of either.
        return output(apply(eqx.combine(weights, static), x, None, layer)).x, caches[0]

    x = decoder_parts.embed(parts, model, tokens, None, first=first)
    places = decoder_parts.positions(x, tokens.shape[1], first)
    layers = jnp.arange(jax.tree.leaves(arrays)[0].shape[0], dtype=jnp.int32)
    # If `cache` is None, `lax.scan` passes None as the `old` of each layer.
    x, new_cache = lax.scan(block, x, (arrays, layers, cache))
    return decoder_parts.unembed(model, x[:, -1:])[:, 0], new_cache


def sampler(family: Family, name: str) -> Callable[..., Int[Array, " tokens"]]:
    """Returns the function `sample` of a family. `name` is the family's name; errors begin with it,
    as in "gpt2.sample".
    """
    function_name = f"{name}.sample"

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
        them; `sampled` explains the arguments and the errors.

        Logits are divided by `temperature`; `top_k` and `top_p` leave out the less likely tokens.
        Each token depends on at most the last `window` tokens before it. The default of `window` is
        the model's context; if the model was trained on shorter windows, give their length. Wrap
        the function in `jax.jit` or `eqx.filter_jit`, with `tokens`, `window` and `top_k` static.

        Raises:
            ValueError: for the reasons of `sampled`; or the window is longer than the model's
                context; or an array of the model is deleted.
        """
        argument_checks.check_not_deleted(function_name, model)
        context = model.config.context
        window = context if window is None else window
        (window,) = argument_checks.whole_numbers(function_name, window=window)
        if not 1 <= window <= context:
            raise ValueError(
                f"{function_name} needs a window from 1 to the model's context of {context} "
                f"tokens; got {window}."
            )
        writer = Writer(
            functools.partial(family.logits, model),
            window,
            cached=None if family.cached is None else family.cached(model),
            name=function_name,
        )
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
    """Returns the `tokens` tokens that follow `prompt`, each drawn from
    softmax(`filtered`(logits)).

    The model may be split: under `jax.jit`, a model placed over a mesh draws the same tokens as on
    one device. For many prompts of one length use `jax.vmap`; if the prompts are placed over an
    axis of the mesh, each device continues its own prompts.

    Let N be the number of parameters. While the text fits the writer's window, keys and values are
    kept in a cache, and a token costs a pass of one token: 2 N flops and the flops of attention.
    Once the text is longer than the window, or if `writer.cached` is None, a token costs a pass
    over the whole window: 2 N flops for each token of the window. For each new token, a full window
    drops its oldest token, so the positions of all its other tokens change. Keys and values depend
    on positions and on earlier tokens, so the cached ones cannot be used again.

    If a logit is nan, for example after an id outside the vocabulary, the token is -1, and so are
    all tokens after it. Under `jax.jit`, the value of a traced argument is unknown: a wrong prompt,
    `temperature` or `top_p` gives tokens of -1 in place of an error. No tokenizer decodes -1.

    Args:
        writer: the functions and the window of the model, such as
            `Writer(functools.partial(family.logits, model), window, family.cached(model))`.
        prompt: the tokens to continue; they may be longer than the window.
        tokens: the number of tokens to draw; static.
        temperature: the number by which logits are divided. With 0, each token is the one with the
            largest logit (greedy), or the first such token if several logits are equal.
        top_k: draw among the tokens of the `top_k` largest logits (and of logits that equal the
            smallest of these); static. None: draw among all tokens.
        top_p: draw among the fewest tokens whose probabilities, after temperature and `top_k`, add
            up to `top_p` or more. None: draw among all tokens.
        key: the random key. Each token uses its own key, a row of `jax.random.split(key, tokens)`.

    Raises:
        ValueError: the prompt is empty, or is not a one-dimensional array of integers. A token of
            the prompt is outside the vocabulary. `tokens`, `writer.window` or `top_k` is not an
            integer, or is too small (below 0 for `tokens`, below 1 for the others). `temperature`
            is not one real number, is negative or is not finite in float32. `top_p` is not one real
            number in [0, 1].
    """
    logits, cached_model, name = writer.logits, writer.cached, writer.name
    tokens, window = argument_checks.whole_numbers(name, tokens=tokens, window=writer.window)
    if tokens < 0 or window < 1:
        raise ValueError(
            f"{name} needs 0 or more tokens to draw, and a window of 1 or more; got "
            f"tokens={tokens}, window={window}."
        )
    token_of = _token_of(name, temperature, top_k, top_p)
    vocabulary = jax.eval_shape(logits, jax.ShapeDtypeStruct((1, window), jnp.int32)).shape[-1]
    ids = _prompt(name, prompt, vocabulary)[-window:]
    keys = jax.random.split(key, tokens)
    first_tokens = jnp.zeros(0, jnp.int32)
    if cached_model is not None and tokens:
        # The number of tokens that can be drawn before the window moves: the last of them is drawn
        # from a full window, so there is one more than the window has free places.
        fitting = min(tokens, window - ids.size + 1)
        first_tokens = _with_cache(cached_model, token_of, ids, keys[:fitting])
        ids = jnp.concatenate([ids, first_tokens])[-window:]
    if first_tokens.size == tokens:
        return first_tokens
    later = _without_cache(logits, token_of, ids, window, keys[first_tokens.size :])
    return jnp.concatenate([first_tokens, later])


def _token_of(name: str, temperature: Any, top_k: Any, top_p: Any) -> Callable[..., Int[Array, ""]]:
    """Returns a function `(logits [V], key, unknown)` that draws a token from the `filtered`
    logits. The token is -1 if one of these logits is nan, or if `unknown` is true. A true `unknown`
    means that an earlier token, of the prompt or drawn, is -1.

    Errors about `temperature`, `top_k` or `top_p` begin with `name`. `_token_of` itself raises
    them, before any token is drawn.
    """
    if top_k is not None:
        (top_k,) = argument_checks.whole_numbers(name, top_k=top_k)
        if top_k < 1:
            raise ValueError(f"{name} needs a top_k of 1 or more, or None for all; got {top_k}.")
    temperature = _scalar(
        f"{name} needs a finite temperature of 0 (the likeliest token) or more, in float32",
        temperature,
        float(jnp.finfo(jnp.float32).max),
    )
    if top_p is not None:
        top_p = _scalar(f"{name} needs a top_p from 0 to 1", top_p, 1.0)

    def token_of(row, key, unknown):
        """Returns a token drawn from `filtered(row)`, for the logits `row`, [V]. Returns -1 if
        `filtered(row)` has a nan, or if `unknown` is true."""
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
    """Returns the tokens after `prompt`, one for each random key in `keys`, computed with a cache
    of the attention's keys and values. `model` has two functions: `begin` runs the model on the
    prompt, and `go_on` on one more token. `token_of` is the function that `_token_of` returns.
    """
    # The last token needs no place in the cache, since no token attends to it: this is the - 1.
    # `begin` returns the logits after the prompt, [1, V], and the cache.
    logits, cache = model.begin(prompt[None], prompt.size + keys.size - 1)
    token = token_of(logits[0], keys[0], (prompt == NOTHING).any())

    def draw(carry, inputs):
        """Returns the new carry and the next token, as the body of a `lax.scan`. The carry is the
        previous token and the cache, which does not yet hold this token. `inputs` are a random key
        and the previous token's place.
        """
        (token, cache), (key, place) = carry, inputs
        logits, cache = model.go_on(token[None], cache, place)  # a batch of one sequence
        new = token_of(logits[0], key, token == NOTHING)
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
    """Returns the tokens after `prompt`, one for each random key, each computed from the whole
    window. `token_of` is the function that `_token_of` returns.

    This function is for a model without a cache of keys and values, and for the tokens that are
    drawn after the window is full: from then on the window moves by one place for each token, so
    cached keys and values cannot be used again.

    The tokens fill the first places of the window, and zeros fill the other places.
    """
    start = jnp.zeros(window, jnp.int32).at[: prompt.size].set(prompt)

    def draw(carry, key):
        """Returns the new carry and the next token, as the body of a `lax.scan`.

        The carry is the array of the window's tokens, of shape [window], and the number of its
        places that are filled.
        """
        seen, filled = carry
        # The logits after the last token; attention is causal, so the zeros after it do not matter.
        token = token_of(logits(seen[None])[0, filled - 1], key, (seen == NOTHING).any())
        seen = jnp.where(filled < window, seen, jnp.roll(seen, -1))  # drops the oldest token
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
    """Returns the logits to draw from, in float32 or wider. The maximum of the logits is
    subtracted, the result is divided by `temperature`, and tokens that must not be drawn get -inf.

    At temperature 0, the largest logit (the first if several are equal) is 0, and all others are
    -inf. `temperature` is applied first, then `top_k`, and `top_p` to the tokens that are left. The
    likeliest token always stays. All results are nan if a logit is nan or inf, if no logit is
    finite, or for a `temperature` or `top_p` that `sampled` refuses.

    Source: Holtzman et al., The curious case of neural text degeneration (arXiv 1904.09751), for
    `top_p`.

    Raises:
        ValueError: `logits` is not one-dimensional.
    """
    if logits.ndim != 1:
        raise ValueError(
            "sampling.filtered needs the logits of one token, of one dim; got shape "
            f"{list(logits.shape)}. For many, use jax.vmap."
        )
    wide = logits.astype(precision.accumulation_dtype(logits.dtype))
    scale = jnp.asarray(temperature, wide.dtype)
    # No shifted logit is above 0, so a small temperature gives -inf and never inf. If the maximum
    # is inf or -inf, some shifted logit is nan.
    shifted = wide - jnp.max(wide)
    # True for the token with the largest logit, the first if several logits are equal.
    likeliest = lax.broadcasted_iota(jnp.int32, wide.shape, 0) == jnp.argmax(wide).astype(jnp.int32)
    greedy = jnp.where(likeliest, 0, -jnp.inf).astype(wide.dtype)  # for temperature 0
    # The inner `where` avoids a division by 0.
    scores = jnp.where(scale == 0, greedy, shifted / jnp.where(scale == 0, 1, scale))
    if top_k is not None:
        least = lax.top_k(scores, min(top_k, scores.size))[0][-1]  # the k-th largest
        scores = jnp.where(scores < least, -jnp.inf, scores)
    # A negated condition, here and for `top_p`, since it is also true for nan.
    wrong = jnp.isnan(shifted).any() | ~((scale >= 0) & (scale < jnp.inf))
    if top_p is not None:
        # A Python number is subtracted in float64, which is exact enough for a top_p near 1. An
        # array is widened first, since 1 - top_p would be rounded to its type, such as bfloat16.
        is_array = isinstance(top_p, jax.Array)
        dropped_share = 1 - (top_p.astype(jnp.result_type(float)) if is_array else float(top_p))
        dropped_share = jnp.asarray(dropped_share, wide.dtype)
        order = jnp.argsort(scores)
        # From the least likely token on, drop tokens while their sum is at most 1 - top_p; the
        # likeliest one, which is last, always stays.
        below = jnp.cumsum(jax.nn.softmax(scores[order])) <= dropped_share
        scores = scores.at[order].set(jnp.where(below.at[-1].set(False), -jnp.inf, scores[order]))
        wrong |= ~((dropped_share >= 0) & (dropped_share <= 1))
    return jnp.where(wrong, jnp.nan, scores)


def _scalar(needed: str, value: Any, most: float) -> Any:
    """Returns the scalar `value`, unchanged if it is a JAX array, else as a float. The value must
    be finite and from 0 to `most`; the value of a tracer is unknown and is not checked. Errors
    begin with `needed`, a text such as "gpt2.sample needs a top_p from 0 to 1".
    """
    dtype = value.dtype if isinstance(value, jax.Array) else np.asarray(value).dtype
    # JAX knows more types than NumPy, such as bfloat16.
    is_real = jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.floating)
    if np.shape(value) != () or not is_real:
        raise ValueError(f"{needed}; got {value!r}.")
    if not isinstance(value, Tracer):
        number = float(value)
        if not (0 <= number <= most and math.isfinite(number)):
            raise ValueError(f"{needed}; got {number}.")
    return value if isinstance(value, jax.Array) else float(value)


def _prompt(name: str, prompt: Any, vocabulary: int) -> Int[Array, " prompt"]:
    """Returns the prompt as int32, with -1 for tokens outside the vocabulary. Outside `jax.jit`,
    where values are known, such a token is an error. Errors begin with `name`.
    """
    prompt = prompt if isinstance(prompt, jax.Array) else np.asarray(prompt)
    if not prompt.size:
        raise ValueError(
            f"{name} needs a prompt of one token or more; got none. Pass at least one "
            "token, such as the token of a newline."
        )
    if prompt.ndim != 1:
        raise ValueError(
            f"{name} needs one prompt, of one dim; got shape {list(prompt.shape)}. For many, use "
            "jax.vmap."
        )
    argument_checks.check_tokens(name, prompt[None], vocabulary)
    # JAX converts the bound to the prompt's type; int8 cannot represent 50256, for example.
    outside = (prompt < 0) | (prompt > min(vocabulary - 1, jnp.iinfo(prompt.dtype).max))
    return jnp.where(outside, jnp.int32(NOTHING), jnp.asarray(prompt).astype(jnp.int32))
