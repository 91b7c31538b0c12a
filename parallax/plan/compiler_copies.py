"""Bytes that XLA's backends hold besides the values of a traced program, read from compiled steps
of JAX 0.10.2.

`benchmarks/plan.py` scores the CPU's and `benchmarks/accelerators.py` those of the accelerators.
"""

from collections.abc import Sequence
from typing import NamedTuple

from jax.extend.core import JaxprEqn

from parallax.plan.liveness import Buffer


class Backend(NamedTuple):
    """The habits of one backend's memory assignment.

    Attributes:
        stacks: copies of the stacks that a backward loop fills. They begin as zeros, which stay
            beside the copy that is filled.
        arguments: whether an argument that is written over is copied first, where the result of
            another argument reads it too, as the new weights read the moments.
        slices: copies of a layer's slice of the stacks for each further layer in a loop's body, as
            ZeRO-3 has two. The slices of all layers are cut from one slice, which XLA cannot read
            in place.
        near: bytes of an innermost loop's body that live in a memory on the chip, not in the
            device's.
        early: whether the place of a loop's stacks is made before the loops that run before it.
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
    "TPU v5e": Backend(slices=2, near=77_000_000, early=True),
}


def backend(platform: str, name: str = "") -> Backend:
    """Returns the habits of a chip's backend, or of its platform's; those of a compiler that copies
    nothing for an unknown one."""
    return BACKENDS.get(name) or BACKENDS.get(platform) or Backend()


def beside(eqn: JaxprEqn, stacked: Sequence[Buffer], habits: Backend) -> tuple[Buffer, ...]:
    """Returns the buffers that live beside those that a loop stacks up, as long as it runs."""
    if not eqn.params.get("reverse", False):
        return ()
    filled = [buffer for buffer in stacked if buffer.bytes]
    return tuple(Buffer(buffer.bytes, buffer.eqn) for buffer in filled * habits.stacks)


def first(pairs: Sequence[tuple[Buffer, set[Buffer]]], habits: Backend) -> tuple[Buffer, ...]:
    """Returns the copies of arguments that are written over.

    Args:
        pairs: each such argument, and all that the result in its place is computed from.
        habits: those of the backend.
    """
    if not habits.arguments:
        return ()
    copied = []
    for k, (argument, _) in enumerate(pairs):
        others = (reads for j, (_, reads) in enumerate(pairs) if j != k)
        if any(argument in reads for reads in others):
            copied.append(Buffer(argument.bytes, what="copy of an argument"))
    return tuple(copied)
