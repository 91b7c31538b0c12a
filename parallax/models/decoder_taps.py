"""The taps of a decoder: its values by their logical places, however rows, tokens, heads and hidden
units are split.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from parallax import recording, taps
from parallax._typing import PyTree, Specs
from parallax.collectives.types import axes
from parallax.tensor import Comms

GATHERED = ("data", "context")  # over these a weight is whole when it is used


def residual(x: Any, path: str, comms: Comms) -> Any:
    """Returns `x` of the residual stream, [B, T, D], with a tap."""
    if not recording.is_on():
        return x
    return taps.tap(
        x,
        path,
        P(taps.BATCH),
        places={1: comms.local_tokens(_positions(x.shape[1] * comms.token_shards), dim=0)},
    )


def whole(x: Any, path: str, comms: Comms) -> Any:
    """Returns `x` of all the layers' tokens, [B, T, ...], with a tap."""
    return x if not recording.is_on() else _whole(x, path, comms, P(taps.BATCH))


def split(x: Any, path: str, comms: Comms, dim: int) -> Any:
    """Returns `whole`, of which a device has a part along `dim`: its heads, or hidden units."""
    if not recording.is_on():
        return x
    names = axes(comms.axis.names)
    return _whole(x, path, comms, P(taps.BATCH, *[None] * (dim - 1), names or None))


def loss(value: Any) -> Any:
    """Returns the loss of a part of the batch, with a tap."""
    return taps.tap(value, "loss", P(unreduced=frozenset({taps.BATCH})))


def block(
    apply: Callable[..., Any], specs: Specs, where: Callable[[Any], Any], loops: int
) -> Callable[..., Any]:
    """Returns one block, `(weights, x, layer) -> x`, with taps of its weights as it uses them.

    `specs` are the model's, `where` picks the blocks, and `loops` first dims of their arrays are
    looped over.
    """

    def tapped(weights, x, layer):
        with recording.at(layer=layer):
            return apply(
                taps.tap_tree(weights, "blocks.*", where(specs), without=GATHERED, loops=loops),
                x,
                layer,
            )

    return tapped


def ends(
    f: Callable[..., Any], name: str, specs: Specs, where: Callable[[Any], Any]
) -> Callable[..., Any]:
    """Returns `embed` or `head`, with taps of the weights that are in no block; `specs` and `where`
    as in `block`.
    """

    def tapped(model, *others):
        if not recording.is_on():
            return f(model, *others)
        ends_alone = eqx.tree_at(where, model, None)
        ends_alone = taps.tap_tree(ends_alone, name, specs, without=GATHERED)
        tapped_model = eqx.tree_at(where, ends_alone, where(model), is_leaf=lambda x: x is None)
        return f(tapped_model, *others)

    return tapped


def gradients(grad: Callable[..., Any], specs: PyTree) -> Callable[..., Any]:
    """Returns a gradient function, with taps of the gradients that the optimizer gets."""

    def tapped(*arguments):
        value, gradient = grad(*arguments)
        return value, taps.tap_tree(gradient, "gradients", specs, way=taps.AFTER)

    return tapped


def _whole(x: Any, path: str, comms: Comms, spec: P) -> Any:
    return taps.tap(
        x,
        path,
        spec,
        places={1: comms.context_tokens(_positions(x.shape[1] * comms.context_shards), dim=0)},
    )


def _positions(tokens: int) -> Int[Array, " tokens"]:
    """Returns the places of a sequence's tokens."""
    return jnp.arange(tokens, dtype=jnp.int32)
