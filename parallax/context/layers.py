"""A decoder's layers with its tokens split over an axis: the joins of tensor or sequence
parallelism, over fewer tokens.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from parallax import tensor
from parallax.collectives import Axis, AxisLike, combined_axis
from parallax.context.hops import attention
from parallax.context.orders import ChunkOrder, local_tokens, zigzag
from parallax.tensor import Comms


def comms(
    axis: AxisLike,
    *,
    context: AxisLike,
    shared: AxisLike = (),
    inner: Callable[..., Comms] = tensor.comms,
    around: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
    order: ChunkOrder = zigzag,
) -> Comms:
    """`inner(axis, shared=shared)`, with the tokens of each sequence split over `context` before
    anything else is.

    A model that takes it is given whole windows on each device of `context`, embeds its own tokens
    of them, attends over all, and returns the mean loss of its own tokens; `grads.averaged(grad,
    ("data", "context"))` makes the mean over all of that.

    Args:
        axis: the axis that the layers are split over.
        context: the axis that the tokens are split over.
        shared: the axes that share the vocabulary, as in `tensor.comms`.
        inner: `tensor.comms`, or `sequence.comms`, which splits a device's tokens further between
            the layers.
        around: from a model's attention function to the one that attends over the context, such as
            `lambda attend: context.ulysses(attend, "context")`; by default `attention`, round the
                ring.
        order: where the tokens live.

    What is joined raises `ValueError` for tokens that do not divide into the chunks of `order`.
    """
    made, over = inner(axis, shared=shared), Axis.of(context)
    mine = partial(local_tokens, axis=over, order=order)
    ring = partial(attention, axis=over, order=order)
    return made._replace(
        local_tokens=lambda x, dim: made.local_tokens(mine(x, dim=dim), dim),
        token_shards=made.token_shards * over.size(),
        context_tokens=lambda x, dim: mine(x, dim=dim),
        wrap_attention=around or (lambda attend: ring),
        context_shards=over.size(),
        over_tokens=combined_axis(over, made.over_tokens),
    )


def causal_attention(attend: Callable[..., Any], axis: AxisLike) -> Callable[..., Any]:
    """`attention` over `axis` in the place of `attend`, which is softmax(q k^T / sqrt(K)) v of each
    token and those before it.
    """
    return partial(attention, axis=axis)
