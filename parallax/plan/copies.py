"""What XLA's CPU backend holds twice, seen in compiled steps of JAX 0.10.2 by `compiled.memory`; other backends do not.

* What a backward loop stacks up (gradients of stacked layers) begins as zeros, which stay beside the copy that is filled.
* An argument that is written over is copied first if the result of another argument reads it too, as the new weights read the
  moments.
"""

from collections.abc import Sequence

from jax.extend.core import JaxprEqn

from parallax.plan.live import Buffer


def beside(eqn: JaxprEqn, stacked: Sequence[Buffer], platform: str) -> tuple[Buffer, ...]:
    """The buffers that live beside those that a loop stacks up, as long as it runs."""
    backward = platform == "cpu" and eqn.params.get("reverse", False)
    return (
        tuple(Buffer(buffer.bytes, buffer.eqn) for buffer in stacked if buffer.bytes)
        if backward
        else ()
    )


def first(pairs: Sequence[tuple[Buffer, set[Buffer]]], platform: str) -> tuple[Buffer, ...]:
    """The copies of arguments that are written over.

    Args:
        pairs: each such argument, and all that the result in its place is computed from.
        platform: the backend.
    """
    if platform != "cpu":
        return ()
    others = lambda k: any(pairs[k][0] in reads for j, (_, reads) in enumerate(pairs) if j != k)
    return tuple(
        Buffer(pairs[k][0].bytes, what="copy of an argument")
        for k in range(len(pairs))
        if others(k)
    )
