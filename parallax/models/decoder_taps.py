"""The taps of a decoder. A tap returns its argument unchanged. While `bisect` records, the tap also
reports its argument, with a path that names it, and with the positions of its elements in the array
of the whole model. So runs that split rows, tokens, heads and hidden units in different ways can be
compared.

In the spec of a tap, `taps.BATCH` stands for all that splits the batch: mesh axes and microbatches.
If a device has only some elements of a dim, the tap's `places` are the positions of these elements
in the dim of the undivided array. `comms`, a `tensor.Comms`, knows how tokens are split. From an
array with all tokens, `comms.local_tokens` returns the tokens that this device has between two
layers, and `comms.context_tokens` returns the tokens that this device has inside a layer.
`GATHERED` are the axes over which ZeRO-3 gathers weights: the specs of the weights' taps are
without these axes. The specs of the gradients' taps have these axes, since ZeRO-3 splits a gradient
like its weight.
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

# ZeRO-3 splits weights over these axes, and gathers a weight before it is used. So a tap in the
# model sees weights that these axes do not split, whatever the specs say.
GATHERED = ("data", "context")


def residual(x: Any, path: str, comms: Comms) -> Any:
    """Returns `x`, the residual stream [B, T, D] of this device, with a tap.

    A device may have only some of the tokens, in any order, so the tap gets the positions of these
    tokens.
    """
    if not recording.is_on():
        return x
    return taps.tap(
        x,
        path,
        P(taps.BATCH),
        # `x` has one of `token_shards` equal parts of the sequence's tokens, in dim 1. The same
        # part of the positions 0, 1, ... of the whole sequence says which tokens these are.
        places={1: comms.local_tokens(_positions(x.shape[1] * comms.token_shards), dim=0)},
    )


def whole(x: Any, path: str, comms: Comms) -> Any:
    """Returns `x`, [B, T, ...], with a tap. All devices of the tensor axis have the same value."""
    return x if not recording.is_on() else _tapped_tokens(x, path, comms, P(taps.BATCH))


def split(x: Any, path: str, comms: Comms, dim: int) -> Any:
    """Returns `x`, [B, T, ...], with a tap. Each device of the tensor axis has its part of the
    whole value along `dim`: its heads, or its hidden units.
    """
    if not recording.is_on():
        return x
    names = axes(comms.axis.names)
    # Dim 0 is the batch, and `dim` is split over the tensor axis, if there is one (`names`).
    return _tapped_tokens(x, path, comms, P(taps.BATCH, *[None] * (dim - 1), names or None))


def loss(value: Any) -> Any:
    """Returns `value`, the loss of this device's part of the batch, with a tap. In a tap's spec,
    `unreduced` over `taps.BATCH` says that each part of the batch has its own mean, so the
    recording averages the losses of the parts.
    """
    return taps.tap(value, "loss", P(unreduced=frozenset({taps.BATCH})))


def block(
    apply: Callable[..., Any], specs: Specs, where: Callable[[Any], Any], loops: int
) -> Callable[..., Any]:
    """Returns `apply` with taps of the weights that it uses.

    Args:
        apply: one block, a function `(weights, x, layer) -> x`.
        specs: the specs of the model.
        where: picks the blocks in a model, or in its specs.
        loops: the number of leading dims of the blocks' arrays over which loops run; 1 if there is
            only the dim of layers. `specs` have these dims, and the `weights` of one block do not.
    """

    def tapped(weights, x, layer):
        """Returns the output of the block. The taps of the block's weights report the number of
        the layer together with the weights."""
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
    taps' paths begin with `name`. `specs` are the specs of the model, and `where` picks the blocks
    in a model.
    """

    def tapped(model, *others):
        """Returns `f(model, *others)`, with a tap at each weight of `model` outside its blocks."""
        if not recording.is_on():
            return f(model, *others)
        # The blocks, which `block` taps layer by layer, are left out, and put back without taps.
        without_blocks = eqx.tree_at(where, model, None)
        without_blocks = taps.tap_tree(without_blocks, name, specs, without=GATHERED)
        tapped_model = eqx.tree_at(where, without_blocks, where(model), is_leaf=lambda x: x is None)
        return f(tapped_model, *others)

    return tapped


def gradients(grad: Callable[..., Any], specs: PyTree) -> Callable[..., Any]:
    """Returns the gradient function `grad` with a tap at each gradient that it returns. These are
    the gradients that the optimizer gets, and `specs` are their specs.
    """

    def tapped(*arguments):
        """Returns the loss (or `(loss, aux)`), and the gradients with a tap at each gradient."""
        value, gradient = grad(*arguments)
        # `AFTER`: the backward pass is over, so these values have no cotangents to report.
        return value, taps.tap_tree(gradient, "gradients", specs, way=taps.AFTER)

    return tapped


def _tapped_tokens(x: Any, path: str, comms: Comms, spec: P) -> Any:
    """Returns `x`, [B, T, ...], with a tap that gets the positions of this device's tokens. `x` is
    a value inside a layer or inside the head.
    """
    return taps.tap(
        x,
        path,
        spec,
        # `x` has one of `context_shards` equal parts of the sequence's tokens, in dim 1. The same
        # part of the positions 0, 1, ... of the whole sequence says which tokens these are.
        places={1: comms.context_tokens(_positions(x.shape[1] * comms.context_shards), dim=0)},
    )


def _positions(tokens: int) -> Int[Array, " tokens"]:
    """Returns the positions of the tokens of a whole sequence: 0, 1, ..."""
    return jnp.arange(tokens, dtype=jnp.int32)
