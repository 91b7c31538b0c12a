"""The taps of a decoder. A tap returns its argument unchanged, and while a recording is on it
reports the value with its path and with its places in the whole model. So runs that split rows,
tokens, heads and hidden units in different ways can be compared.

In the spec of a tap, `taps.BATCH` stands for all that splits the batch: mesh axes and microbatches.
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

GATHERED = ("data", "context")  # when a weight is used, these axes do not split it


def residual(x: Any, path: str, comms: Comms) -> Any:
    """Returns `x` of the residual stream, [B, T, D], with a tap.

    A device may have only some of the tokens, in any order, so the tap gets their positions.
    """
    if not recording.is_on():
        return x
    return taps.tap(
        x,
        path,
        P(taps.BATCH),
        # The positions of the whole sequence, which has `token_shards` times the tokens of `x`,
        # split over the devices as the tokens, dim 1 of `x`, are.
        places={1: comms.local_tokens(_positions(x.shape[1] * comms.token_shards), dim=0)},
    )


def whole(x: Any, path: str, comms: Comms) -> Any:
    """Returns `x`, [B, T, ...], with a tap. All devices of the tensor axis have the same value."""
    return x if not recording.is_on() else _whole(x, path, comms, P(taps.BATCH))


def split(x: Any, path: str, comms: Comms, dim: int) -> Any:
    """Returns `x` with a tap. Each device of the tensor axis has a part of `x` along `dim`: its
    heads, or its hidden units.
    """
    if not recording.is_on():
        return x
    names = axes(comms.axis.names)
    # Dim 0 is the batch, and `dim` is split over the tensor axis, if the model has one.
    return _whole(x, path, comms, P(taps.BATCH, *[None] * (dim - 1), names or None))


def loss(value: Any) -> Any:
    """Returns the loss of a part of the batch, with a tap. Its spec says that the parts are not yet
    added up, so the record of the loss is their mean.
    """
    return taps.tap(value, "loss", P(unreduced=frozenset({taps.BATCH})))


def block(
    apply: Callable[..., Any], specs: Specs, where: Callable[[Any], Any], loops: int
) -> Callable[..., Any]:
    """Returns one block, `(weights, x, layer) -> x`, with taps of the weights that it uses.

    Args:
        apply: the block.
        specs: the specs of the model.
        where: picks the blocks in a model, or in its specs.
        loops: the number of leading dims of the blocks' arrays that loops run over, such as the
            dim of layers.
    """

    def tapped(weights, x, layer):
        """Returns the output of the block. The taps of its weights report the layer's number."""
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
    """Returns `f`, which is `embed` or `head`, with taps of the weights that are in no block. The
    taps' paths begin with `name`; `specs` and `where` are those of `block`.
    """

    def tapped(model, *others):
        """Returns `f` of a model whose weights outside the blocks have taps."""
        if not recording.is_on():
            return f(model, *others)
        # The blocks have taps of their own, for each layer: `block`.
        ends_alone = eqx.tree_at(where, model, None)
        ends_alone = taps.tap_tree(ends_alone, name, specs, without=GATHERED)
        tapped_model = eqx.tree_at(where, ends_alone, where(model), is_leaf=lambda x: x is None)
        return f(tapped_model, *others)

    return tapped


def gradients(grad: Callable[..., Any], specs: PyTree) -> Callable[..., Any]:
    """Returns a gradient function, with taps of the gradients that the optimizer gets."""

    def tapped(*arguments):
        """Returns the value, and the gradients with taps."""
        value, gradient = grad(*arguments)
        return value, taps.tap_tree(gradient, "gradients", specs, way=taps.AFTER)

    return tapped


def _whole(x: Any, path: str, comms: Comms, spec: P) -> Any:
    """Returns `x` with a tap, which gets the places of the tokens that this device has."""
    return taps.tap(
        x,
        path,
        spec,
        # The positions of the whole sequence, which has `context_shards` times the tokens of `x`,
        # split over the context axis as the tokens, dim 1 of `x`, are.
        places={1: comms.context_tokens(_positions(x.shape[1] * comms.context_shards), dim=0)},
    )


def _positions(tokens: int) -> Int[Array, " tokens"]:
    """Returns the places of the tokens of a whole sequence: 0, 1, ..."""
    return jnp.arange(tokens, dtype=jnp.int32)
