"""Counts the bytes that islands send each other. An island is a group of devices that trains by
itself. The islands exchange the changes of their parameters only in a *round*, once in many steps.

Source: Douillard et al., DiLoCo (arXiv 2311.08105).
"""

from collections.abc import Iterator

from parallax.collectives import AxisLike, quantized_in, ring
from parallax.collectives.axis import Axis
from parallax.collectives.int8 import ErrorFeedback
from parallax.collectives.types import axes
from parallax.layout import Layout
from parallax.plan import state_bytes
from parallax.plan.families import Config
from parallax.plan.traffic import Term
from parallax.plan.units import quantity


def terms(
    config: Config,
    layout: Layout,
    *,
    islands: int,
    axis: AxisLike | ErrorFeedback | None = None,
    itemsize: int = 4,
) -> list[Term]:
    """Returns the collectives of one exchange between the islands (a round): for each array of the
    model, an all-reduce of the part that a device has. If there is only one island, the list is
    empty.

    Args:
        config: the model's sizes.
        layout: the layout of one island.
        islands: the number of islands.
        axis: the axis of the islands, with an algorithm or without one, or an `ErrorFeedback` (int8
            collectives along that axis), as in `islands.local`. The default is a ring along
            `island`.
        itemsize: bytes of a parameter.
    """

    def found() -> Iterator[Term]:
        """Yields a `Term` (a kind of collective) for each array of the model. The changes of
        parameters are numbers of 4 bytes (float32) or more. If `axis` is an `ErrorFeedback`, the
        collective of each `Term` is the all-reduce that sends these numbers as int8."""
        wide = max(itemsize, 4)
        given = ring("island") if axis is None else axis
        if isinstance(given, ErrorFeedback):
            given = quantized_in(given.block_size)(given.axis_name)
        along = Axis.of(given)
        names, all_reduce = axes(along.names), along.algorithm.all_reduce
        for leaf in state_bytes.leaves(config, layout):
            # With ZeRO-3 a device has only its share of an array.
            count = leaf.share if layout.zero == 3 else leaf.elements
            # One call in a round, over `islands` devices, of numbers of `wide` bytes each. These
            # are the bytes before quantization; the cost of `all_reduce` has the bytes sent.
            yield Term("changes between islands", names, all_reduce, count * wide, 1, islands, wide)

    # One island sends nothing: the list is then empty.
    return [term for term in found() if islands > 1]


def told(config: Config, layout: Layout, *, islands: int, every: int) -> str:
    """Returns a line with the bytes that a device sends to other islands, per round and per step,
    if all changes of the parameters are sent in float32. The line also has the bytes per step if
    all changes are sent in int8. A round comes once in `every` steps."""
    if islands < 1 or every < 1:
        raise ValueError(
            f"Islands need --islands and --every of 1 or more; got --islands {islands} --every "
            f"{every}."
        )
    exact = sum(term.sent for term in terms(config, layout, islands=islands))
    int8 = sum(
        term.sent for term in terms(config, layout, islands=islands, axis=ErrorFeedback("island"))
    )
    return (
        f"{islands} islands of {layout.devices} devices, a round every {every} steps: a device "
        f"sends {quantity(exact, 'B')} a round, {quantity(exact / every, 'B')} a step; as int8 "
        f"{quantity(int8 / every, 'B')} a step"
    )
