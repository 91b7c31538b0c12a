"""The arrays of a traced program, as a compiler treats them.

A value is either *held* in a buffer, or *fused*: each operation that reads the value computes it
again. An `aval` is JAX's type of an array. A *frame* has the operations of the program. The body of
a loop has a frame of its own, and so has each branch of a conditional.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from parallax.plan.liveness import Buffer, Operation
from parallax.plan.primitives import nbytes


class Message(NamedTuple):
    """A kind of collective call in a program: the key of a `Counter` of calls.

    Attributes:
        kind: the collective's name in compiled programs, such as "all-reduce".
        axes: the mesh axes along which the collective moves data.
        bytes: bytes of the collective's result on a device.
        line: the line of the caller's source.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: int
    line: str


class Value:
    """An array of the program, on one device."""

    def __init__(
        self,
        aval: Any,
        reads: Mapping[Buffer, int],
        *,
        buffer: Buffer | None = None,
        eqn: Any = None,
    ):
        """Makes a value of type `aval`, the result of `eqn`.

        `reads` lists the buffers that an operation must read to get this value, each with the
        number of bytes that the operation reads. If the value is stored in memory, the only such
        buffer is the value's own `buffer`. If not, these are the buffers from which the value is
        computed.
        """
        self.aval, self.reads, self.buffer, self.eqn = aval, reads, buffer, eqn
        self.bytes = nbytes(aval)
        # The buffers that the value reads element by element; it may be written over one of them.
        self.near: frozenset[Buffer] = frozenset([buffer] if buffer else ())
        self.source: Value | None = None  # the value that this value reshapes or copies
        # Set only for the result of JAX's `platform_index`, by which a `cond` chooses the code for
        # a platform: the number of the branch for the platform of this trace.
        self.branch: int | None = None
        # Whether it is an array of zeros that the program makes. Some compilers give all such
        # arrays of one size the same buffer.
        self.is_zeros = False

    @property
    def root(self) -> "Value":
        """The value from which this value was made by reshapes and copies alone; this value itself
        if it was made in another way."""
        return self if self.source is None else self.source.root


class Frame:
    """The operations of a program, in order. The body of a loop has a frame of its own, and so has
    each branch of a conditional."""

    def __init__(self):
        """Makes a frame without operations."""
        self.operations: list[Operation] = []
        # The operands and results of each equation, by a key that equal equations share. An equal
        # equation gets these results, and is not computed again. The key has the ids of the
        # operands. The operands are kept so that no other value gets one of these ids.
        self.known: dict[Any, tuple[Sequence[Value], list[Value]]] = {}
        # Arrays of zeros, by the number of their elements and their dtype (`shared_zeros`).
        self.zeros: dict[tuple[int, Any], Buffer] = {}
