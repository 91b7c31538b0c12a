"""The copies that XLA's backends hold beside the values of a traced program. The numbers were read
from steps that JAX 0.10.2 compiled.

`benchmarks/plan.py` checks the numbers of the CPU, and `benchmarks/accelerators.py` those of the
accelerators. A `Buffer` (of `liveness`) is an array with memory of its own.
"""

from collections.abc import Sequence
from typing import NamedTuple

from jax.extend.core import JaxprEqn

from parallax.plan.liveness import Buffer


class Backend(NamedTuple):
    """The habits of one backend's memory assignment.

    Attributes:
        stacks: the number of copies of each stacked result of a backward loop. The result begins as
            zeros, which stay in memory beside the copy that the loop fills.
        arguments: whether a donated argument is copied before a result overwrites it, if another
            result that overwrites an argument is computed from it. The new weights, for example,
            are computed from the moments, which the new moments overwrite.
        slices: the number of copies of a layer's part of each stacked array, for each layer in a
            loop's body after the first (with ZeRO-3 a body has two layers). XLA slices the layers
            of a body together, and copies each layer's part.
        near: bytes of an innermost loop's body that the chip's own memory holds instead of the
            device's.
        early: whether a loop's stacked results have memory already while the loops before it run.
    """

    stacks: int = 0
    arguments: bool = False
    slices: int = 0
    near: int = 0
    early: bool = False


BACKENDS = {
    "cpu": Backend(stacks=1, arguments=True),
    "cuda": Backend(slices=1, early=True),
    "tpu": Backend(slices=2),
    "TPU v5e": Backend(slices=2, near=90_000_000, early=True),
}


def backend(platform: str, name: str = "") -> Backend:
    """Returns the habits of the backend for a chip, such as "TPU v5e", or else for its platform,
    such as "tpu". An unknown backend copies nothing."""
    return BACKENDS.get(name) or BACKENDS.get(platform) or Backend()


def beside(eqn: JaxprEqn, stacked: Sequence[Buffer], habits: Backend) -> tuple[Buffer, ...]:
    """Returns the copies of a loop's `stacked` results that exist while the loop runs. Only a
    backward loop, which runs in reverse, has such copies."""
    if not eqn.params.get("reverse", False):
        return ()
    filled = [buffer for buffer in stacked if buffer.bytes]  # a result that nobody needs has none
    # A list times a number repeats its elements: `stacks` copies of each.
    return tuple(Buffer(buffer.bytes, buffer.eqn) for buffer in filled * habits.stacks)


def first(pairs: Sequence[tuple[Buffer, set[Buffer]]], habits: Backend) -> tuple[Buffer, ...]:
    """Returns a copy of each donated argument that one result overwrites, if another result that
    overwrites an argument is computed from it.

    Args:
        pairs: each donated argument that a result overwrites, and the buffers from which this
            result is computed.
        habits: the habits of the backend.
    """
    if not habits.arguments:
        return ()
    copied = []
    for k, (argument, _) in enumerate(pairs):
        of_others = (reads for j, (_, reads) in enumerate(pairs) if j != k)
        if any(argument in reads for reads in of_others):
            copied.append(Buffer(argument.bytes, what="copy of an argument"))
    return tuple(copied)
