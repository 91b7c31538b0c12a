"""A decoder's layers whose experts are split over an axis: joins of tensor or sequence parallelism
that know that axis too.
"""

import functools
from collections.abc import Callable

from parallax import tensor
from parallax.collectives import AxisLike
from parallax.experts.dispatch import Dispatch, gathered
from parallax.experts.rows import ExpertCompute, grouped
from parallax.tensor import Comms


def comms(
    axis: AxisLike,
    *,
    experts: AxisLike,
    shared: AxisLike = (),
    inner: Callable[..., Comms] = tensor.comms,
    dispatch: Dispatch = gathered,
    compute: ExpertCompute = grouped(),  # noqa: B008, a frozen choice
) -> Comms:
    """`inner(axis, shared=shared)`, with the experts of each layer split over `experts`, which
    splits the batch too.

    A model that takes it, such as a `llama` with experts, is given this device's sequences;
    `grads.averaged(grad, ("data", "expert"))` makes the mean over all of them.

    Args:
        axis: the axis that each layer is split over, and the hidden width of each expert.
        experts: the axis that the experts are split over; `()` where each device has all.
        shared: the axes that share the vocabulary, as in `tensor.comms`.
        inner: `tensor.comms`, `sequence.comms`, or `context.comms` with its axis.
        dispatch: how tokens come to their experts.
        compute: what runs the experts of a device.
    """
    mixes = functools.partial(functools.partial, axis=experts, dispatch=dispatch, compute=compute)
    return inner(axis, shared=shared)._replace(wrap_experts=mixes)
