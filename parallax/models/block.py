"""The pre-norm transformer block that all families of models share: attention, then a feed-forward.

A family gives the functions in which it differs: one computes queries, keys and values, one is the
feed-forward, and one is dropout. `residual` and `split` are taps: they return their argument
unchanged. While `bisect` records, they also report this argument under a name such as
`blocks.*.out`, with the number of the layer for `*`.

The devices of the tensor axis share a block: each has some heads and hidden units. `comms`, a
`tensor.Comms`, has the functions by which these devices communicate. `comms.row` multiplies by a
device's rows of a weight and sums over the devices; `comms.wrap_attention` makes the attention
function see the tokens of other devices if a context axis splits them.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
from jaxtyping import Array, Float

from parallax import tensor
from parallax.models.decoder_taps import residual, split


class Linear(eqx.Module):
    """A weight, and a bias if the model has one.

    Attributes:
        weight: `[L, *inputs, *outputs]` for L layers; inside a block, `[*inputs, *outputs]`.
        bias: `[L, *outputs]`, inside a block `[*outputs]`; `()` if there is no bias.
    """

    weight: Float[Array, "..."]
    bias: Float[Array, "..."] | tuple[()] = ()

    @property
    def bias_or_none(self) -> Float[Array, "..."] | None:
        """The bias, or None if there is no bias: the functions of `tensor` need None, not `()`."""
        return None if isinstance(self.bias, tuple) else self.bias


class Block(eqx.Module):
    """The weights of the blocks of all layers: every leaf has a leading dim of layers. The weights
    of one block, which `apply` takes, are a `Block` without this dim.

    Attributes:
        attention_norm: normalises the input of the attention.
        attention: the first half; the output of its layer `out` is added to the residual stream.
        mlp_norm: normalises the input of the feed-forward.
        mlp: the second half, the feed-forward.
    """

    attention_norm: Any
    attention: Any
    mlp_norm: Any
    mlp: Any


def _unchanged(y: Any, site: int) -> Any:
    """Returns `y` unchanged, for a family without dropout."""
    return y


def apply(
    weights: Block,
    x: Float[Array, "batch tokens_shard width"],
    *,
    heads: Callable[..., Any],
    feed_forward: Callable[..., Any],
    dropped: Callable[..., Any] = _unchanged,
    epsilon: float,
    comms: tensor.Comms,
    attend: Callable[..., Any],
) -> tuple[Float[Array, "batch tokens_shard width"], Any]:
    """Returns `(x, aux)`: the residual stream after a block, and the auxiliary value that its
    feed-forward returns, which may be None.

    Over the axis of `comms` a block costs two all-reduces of [B, T, D] forward and two backward. If
    that axis also splits the tokens of the residual stream, a reduce-scatter and an all-gather
    replace each all-reduce.

    Args:
        weights: the weights of one block.
        x: the residual stream.
        heads: a function from the normalised stream to queries, keys and values by head.
        feed_forward: a function from the normalised stream to two results. The first is the array
            that is added to the stream, already summed over the devices. The second is an auxiliary
            value, or None.
        dropped: a function `(y, site)` that returns `y` with dropout. Each site has its own masks:
            site 1 is after the attention, and site 2 after the feed-forward.
        epsilon: the epsilon of the norms.
        comms: how the devices of the block communicate.
        attend: the attention function.
    """
    x = residual(x, "blocks.*.in", comms)
    y = residual(weights.attention_norm(x, epsilon), "blocks.*.attention.norm", comms)
    y = comms.wrap_attention(attend)(*heads(y))
    y = split(y, "blocks.*.attention.heads", comms, dim=2)  # [B, T, H, K]: dim 2 is the heads
    out = weights.attention.out
    y = residual(comms.row(y, out.weight, out.bias_or_none), "blocks.*.attention.out", comms)
    x = residual(x + dropped(y, 1), "blocks.*.middle", comms)

    y = residual(weights.mlp_norm(x, epsilon), "blocks.*.mlp.norm", comms)
    y, aux = feed_forward(y)
    y = residual(y, "blocks.*.mlp.down", comms)
    return residual(x + dropped(y, 2), "blocks.*.out", comms), aux
