"""Keys and values kept from token to token, so that the next one costs a pass of one token and not
of all before it.

Any family made of `pieces` has them: its attention is a function, and the one here writes what is
new beside what was there.

Legend: L layers, B batch, P tokens of the prompt, S places, G heads of keys and values, K head
width, V vocabulary.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from parallax import tensor
from parallax._typing import PyTree
from parallax.models.attention import grouped
from parallax.models.decoder_parts import DecoderParts, positions
from parallax.pipeline.checks import output


class Cache(NamedTuple):
    """Keys and values of all layers.

    Attributes:
        keys: of the tokens so far; what is behind them is 0, and not attended to.
        values: likewise.
    """

    keys: Float[Array, "layers batch places groups head_width"]
    values: Float[Array, "layers batch places groups head_width"]


class Cached(NamedTuple):
    """A model that keeps what it has seen. The logits are those after the last token.

    Attributes:
        begin: `(tokens [B, P], places) -> (logits [B, V], cache)`, with room for so many tokens, P
            among them.
        go_on: `(tokens [B], cache, first) -> (logits [B, V], cache)`, one more token each, of the
            place `first`.
    """

    begin: Callable[
        [Int[Array, "batch tokens"], int], tuple[Float[Array, "batch vocabulary"], PyTree]
    ]
    go_on: Callable[
        [Int[Array, " batch"], PyTree, Int[Array, ""]],
        tuple[Float[Array, "batch vocabulary"], PyTree],
    ]


def cached(parts: DecoderParts, model: Any) -> Cached:
    """`model`, whole, with the keys and values of its tokens kept: 2 L S G K numbers a sequence.

    Under `jax.jit` arrays placed over a mesh stay split: heads of keys and values over the devices
    that have them, sequences over those that have these.
    """

    def begin(tokens, places):
        keep = lambda _, new: jnp.pad(new, ((0, 0), (0, places - new.shape[1]), (0, 0), (0, 0)))
        return _run(parts, model, tokens, None, 0, keep)

    def go_on(tokens, cache, first):
        keep = lambda old, new: lax.dynamic_update_slice_in_dim(old, new, first, axis=1)
        return _run(parts, model, tokens[:, None], cache, first, keep)

    return Cached(begin, go_on)


def _run(
    parts: DecoderParts,
    model: Any,
    tokens: Int[Array, "batch tokens"],
    cache: Cache | None,
    first: Any,
    keep: Callable[..., Any],
) -> tuple[Float[Array, "batch vocabulary"], Cache]:
    """Run the tokens from `first` on through all blocks; `keep` joins a layer's new keys or values
    with the earlier ones.
    """
    arrays, static = eqx.partition(model.blocks, eqx.is_array)

    def block(x, each):
        weights, layer, old = each
        made = []

        def attend(q, k, v):
            made.append(Cache(*map(keep, old or (None, None), (k, v))))
            return grouped(q, *made[0], first=first)

        apply = parts.layer(model.config, positions=places, comms=tensor.comms(()), attend=attend)
        return output(apply(eqx.combine(weights, static), x, None, layer)).x, made[0]

    x = parts.embed(model, tokens, None, first=first)
    places = positions(x, tokens.shape[1], first)
    layers = jnp.arange(jax.tree.leaves(arrays)[0].shape[0], dtype=jnp.int32)
    x, kept = lax.scan(block, x, (arrays, layers, cache))
    return parts.unembed(model, x[:, -1:])[:, 0], kept
