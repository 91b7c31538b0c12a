"""The copies that XLA's backends hold beside the values of a traced program. The numbers in this
file were read from steps that JAX 0.10.2 compiled.

`benchmarks/plan.py` checks the copies that this file assumes for the CPU, and
`benchmarks/accelerators.py` those for accelerators. A `Buffer` (of `liveness`) is an array with
memory of its own.
"""

from collections.abc import Sequence
from typing import NamedTuple

from parallax.plan.liveness import Buffer


class Backend(NamedTuple):
    """What one of XLA's backends does when it assigns memory.

    Attributes:
        arguments: whether XLA copies a donated argument A before a result overwrites A. XLA does so
            only if another result is computed from A, and overwrites another argument, B. For
            example, A is the old moments and B the old weights, since the new weights are computed
            from the old moments.
        zeros: whether all arrays of zeros with the same number of elements and the same dtype share
            one buffer. The buffer is made at the start of the program or of a loop's body, and
            stays in memory until the last operation that reads these zeros. A loop reads them if
            its carry or its stacked result begins as zeros. The result of a ring's all-gather
            begins as zeros too, so the first write of a block into this result also reads them.
        together: whether a backward loop with two layers in its body (ZeRO-3) gathers the weights
            and recomputes the values of both layers before the backward pass of the first.
        slices: the number of copies that XLA makes of a layer's slice of each stacked array. The
            body of a backward loop may have several layers (two with ZeRO-3). XLA slices the arrays
            for all of these layers together, and makes the copies for every layer of the body but
            the first.
        near: how many bytes of temporaries, at most, an innermost loop of the program keeps in
            on-chip memory (VMEM). These bytes take no space in the device's main memory.
        early: whether a loop's stacked results have memory already while earlier loops run.
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
    """Returns what the backend of the chip `name`, such as "TPU v5e", does when it assigns memory.
    If the chip is not listed in `BACKENDS`, the result is that of the entry for `platform`, such as
    "tpu". For an unknown platform, the result says that the backend copies nothing."""
    return BACKENDS.get(name) or BACKENDS.get(platform) or Backend()


def of_arguments(
    pairs: Sequence[tuple[Buffer, set[Buffer]]], habits: Backend
) -> tuple[Buffer, ...]:
    """Returns the copies that XLA makes of donated arguments. Suppose that one result overwrites an
    argument A, and another result is computed from A and overwrites an argument B. XLA then copies
    A before A is overwritten.

    Args:
        pairs: for each donated argument that a result overwrites, the argument's buffer and the set
            of buffers from which this result is computed.
        habits: what the backend does when it assigns memory.
    """
    if not habits.arguments:
        return ()
    copied = []
    for k, (argument, _) in enumerate(pairs):
        of_others = (reads for j, (_, reads) in enumerate(pairs) if j != k)
        if any(argument in reads for reads in of_others):
            copied.append(Buffer(argument.bytes, what="copy of an argument"))
    return tuple(copied)
