"""The arrays of a traced program as a compiler has them.

A value is *held*, in a buffer, or *fused*: computed anew by each operation that reads it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from parallax.plan.liveness import Buffer, Operation
from parallax.plan.primitives import nbytes


class Message(NamedTuple):
    """A collective of a program, as `Counter` keys: its kind, axes, bytes of its result, and the
    caller's line."""

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
        self.aval, self.reads, self.buffer, self.eqn = aval, reads, buffer, eqn
        self.bytes = nbytes(aval)
        self.near: frozenset[Buffer] = frozenset(
            [buffer] if buffer else ()
        )  # read element by element
        self.source: Value | None = None  # of the same numbers, in another shape
        self.branch: int | None = None  # of an index that the platform decides

    @property
    def root(self) -> "Value":
        """The value whose numbers these are."""
        return self if self.source is None else self.source.root


class Frame:
    """The operations of a program or of a loop's body, and the values that it computes once."""

    def __init__(self):
        self.operations: list[Operation] = []
        self.known: dict[Any, tuple[Sequence[Value], list[Value]]] = {}
