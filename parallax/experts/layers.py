"""The communication of a decoder's layers whose experts are split over an axis.

`Comms` is a record of functions and numbers. Its field `wrap_experts` takes the function `moe` and
returns `moe` with its options `axis`, `dispatch` and `compute` set.
"""

import functools
from collections.abc import Callable

from parallax import tensor
from parallax.collectives import AxisLike
from parallax.experts.dispatch import Dispatch, gathered
from parallax.experts.grouped_rows import ExpertCompute, grouped
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
    """Returns the `Comms` that `inner(axis, shared=shared)` makes, with each layer's experts split
    over `experts`.

    The axis `experts` splits the batch too. Pass this device's sequences to the model, such as a
    `llama` with experts. `grads.averaged(grad, ("data", "expert"))` takes the mean over all
    sequences.

    Args:
        axis: the axis that splits each layer. It splits each expert by the expert's hidden width.
        experts: the axis that the experts are split over; `()` if each device has all of them.
        shared: further axes that split the vocabulary, such as the stages of a pipeline.
        inner: `tensor.comms` or `sequence.comms`; or `context.comms`, with its option `context` set
            by `functools.partial`.
        dispatch: brings tokens to their experts, such as `experts.exchanged(1.25)`.
        compute: runs the experts of a device.
    """
    # A function of a function: wrap(moe) is partial(moe, axis=experts, dispatch=..., compute=...).
    wrap = functools.partial(functools.partial, axis=experts, dispatch=dispatch, compute=compute)
    return inner(axis, shared=shared)._replace(wrap_experts=wrap)
