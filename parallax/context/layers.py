"""The communication of a decoder's layers whose tokens are split over an axis.

`Comms` is a record of functions and numbers: see `tensor.Comms` for its fields.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from parallax import tensor
from parallax.collectives import Axis, AxisLike, combined_axis
from parallax.context.checks import LAYERS
from parallax.context.orders import ChunkOrder, local_tokens, zigzag
from parallax.context.ring import attention
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
    """Returns the `Comms` that `inner(axis, shared=shared)` makes, with the tokens of each sequence
    split over `context`.

    Pass whole sequences of tokens to the model on each device of `context`. The layers select the
    device's own tokens and embed them. Each token attends to the tokens of all devices, and the
    model returns the mean loss of the device's own tokens.
    `grads.averaged(grad, ("data", "context"))` takes the mean over all tokens.

    Args:
        axis: the axis that the layers are split over.
        context: the axis that the tokens are split over.
        shared: further axes that split the vocabulary, such as the stages of a pipeline.
        inner: `tensor.comms` or `sequence.comms`. With `sequence.comms`, the residual stream (the
            array between two layers) is split by tokens over `axis` too.
        around: a function that takes a model's attention function and returns an attention over the
            context, such as `lambda attend: context.ulysses(attend, "context")`. By default the
            layers attend by `context.attention`. The attention that `around` returns must have
            the same `order` as these layers.
        order: a function that says which chunks of the sequence each device holds, such as
            `zigzag`.

    The functions of the result raise `ValueError` if the tokens do not divide into the chunks of
    `order`, or if `context.attention`, `ulysses` or `gathered` attends in another order.
    """
    inner_comms, context_axis = inner(axis, shared=shared), Axis.of(context)
    ring, split_by = partial(attention, axis=context_axis, order=order), (context_axis, order)

    # Returns this device's share of whole sequences `x`, whose dim `dim` is tokens.
    def context_tokens(x, dim):
        return local_tokens(x, context_axis, order=order, dim=dim)

    # The context axis splits a sequence first, and `inner` then splits the device's tokens.
    def inner_tokens(x, dim):
        return inner_comms.local_tokens(context_tokens(x, dim), dim)

    def wrap_attention(attend):
        """Returns the attention over the context. While it runs, `LAYERS` has the order of the
        tokens, which `check_order` compares with the attention's own order."""
        attend_split = ring if around is None else around(attend)

        def attended(*arrays, **options):
            before = LAYERS.set(split_by)
            try:
                return attend_split(*arrays, **options)
            finally:
                LAYERS.reset(before)

        return attended

    # Three fields are about the tokens between layers, which the context axis and `inner` split:
    # `local_tokens` selects a device's part, `token_shards` is the number of parts, and
    # `over_tokens` are the axes. Two fields are about the tokens inside a layer, which only the
    # context axis splits: `context_tokens` selects the device's part, and `context_shards` is the
    # number of parts. `wrap_attention` replaces the model's attention, by default by the ring.
    return inner_comms._replace(
        local_tokens=inner_tokens,
        token_shards=inner_comms.token_shards * context_axis.size(),
        context_tokens=context_tokens,
        wrap_attention=wrap_attention,
        context_shards=context_axis.size(),
        over_tokens=combined_axis(context_axis, inner_comms.over_tokens),
    )


def causal_attention(attend: Callable[..., Any], axis: AxisLike) -> Callable[..., Any]:
    """Returns `context.attention`, causal softmax attention of tokens that are split over `axis`.

    It replaces `attend`, a causal softmax attention of one device, which is not called. `attend` is
    an argument because a model's `context_attention` is a function of `(attend, axis)`, as
    `ulysses` is.
    """
    return partial(attention, axis=axis)
