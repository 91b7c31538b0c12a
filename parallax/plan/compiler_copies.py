"""The copies that XLA's backends hold beside the values of a traced program. The numbers were read
from steps that JAX 0.10.2 compiled.

`benchmarks/plan.py` checks the numbers of the CPU, and `benchmarks/accelerators.py` those of the
accelerators. A `Buffer` (of `liveness`) is an array with memory of its own.
"""

from collections.abc import Sequence
from typing import NamedTuple

from parallax.plan.liveness import Buffer


class Backend(NamedTuple):
    """The habits of one backend's memory assignment.

    Attributes:
        arguments: whether a donated argument, which one result overwrites, is copied first if
            a second result reads it and overwrites another argument. The new weights, for example,
            are computed from the moments, which the new moments overwrite.
        zeros: whether arrays of zeros with the same number of elements are made once, at the start
            of the program or of a loop's body. They stay in memory until the last loop or update
            that takes them as its start: a loop's stacked results start as zeros, and so does the
            result of a ring's all-gather.
        together: whether a backward loop with two layers in its body (ZeRO-3) gathers the weights
            and recomputes the values of both layers before the backward pass of the first.
        slices: how many copies of a layer's slice of each stacked array XLA makes. A loop's body
            may have several layers (two with ZeRO-3). XLA slices the arrays for all of them
            together, and makes the copies for every layer of the body but the first.
        near: bytes of an innermost loop's body that stay in on-chip memory (VMEM), and so need no
            bytes of the device's main memory.
        early: whether a loop's stacked results have memory already while the loops before it run.
    """

    arguments: bool = False
    zeros: bool = False
    together: bool = False
    slices: int = 0
    near: int = 0
    early: bool = False


BACKENDS = {
    "cpu": Backend(arguments=True, zeros=True, together=True),
    "cuda": Backend(slices=1, early=True),
    "tpu": Backend(slices=2),
    "TPU v5e": Backend(slices=2, near=90_000_000, early=True),
}


def backend(platform: str, name: str = "") -> Backend:
    """Returns the habits of the backend for a chip, such as "TPU v5e", or else for its platform,
    such as "tpu". An unknown backend copies nothing."""
    return BACKENDS.get(name) or BACKENDS.get(platform) or Backend()


def of_arguments(
    pairs: Sequence[tuple[Buffer, set[Buffer]]], habits: Backend
) -> tuple[Buffer, ...]:
    """Returns a copy of each donated argument that one result overwrites, if a second result
    reads the argument and overwrites another one.

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
