"""Which buffers live when in a traced program, as a compiler that fuses elementwise operations lays
them out.

A frame is a program or the body of a loop: a list of operations, each with the buffers that it
reads and writes. A buffer lives from the operation that writes it to the last that reads it. An
operation that reads an operand element by element for the last time writes its result in that
operand's place; so does an update of a part.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple


class Held(NamedTuple):
    """A buffer at the fullest moment.

    Attributes:
        bytes: on a device.
        what: its type, and the operation that makes it.
        line: of the source.
    """

    bytes: int
    what: str
    line: str


class Buffer:
    """Bytes with a place of their own, in the frame in which they are set aside."""

    def __init__(
        self,
        nbytes: int,
        eqn: Any = None,
        what: str = "",
        *,
        fixed: bool = False,
        carry: bool = False,
    ):
        """`fixed`: it is an argument, a result or a constant, no temporary; `carry`: a loop's
        carry, in its start's place."""
        self.bytes, self.eqn, self.what, self.fixed, self.carry = nbytes, eqn, what, fixed, carry
        self.into: Buffer = self

    @property
    def place(self) -> "Buffer":
        """The buffer in whose place it is."""
        return self if self.into is self else self.into.place


class Operation(NamedTuple):
    """One operation that writes memory, or a loop.

    Attributes:
        reads: buffers that must be there.
        writes: buffers that it makes.
        over: pairs of a buffer that it makes and one that it may be written over.
        inner: the temporaries of a loop's body at their fullest, beside all of these.
        held: what those are.
    """

    reads: tuple[Buffer, ...]
    writes: tuple[Buffer, ...] = ()
    over: tuple[tuple[Buffer, Buffer], ...] = ()
    inner: int = 0
    held: tuple[tuple[int, Buffer], ...] = ()


class Peak(NamedTuple):
    """The temporaries of a frame at its fullest moment: their bytes, each of them, and where in the
    frame that is."""

    bytes: int
    held: tuple[tuple[int, Buffer], ...]
    at: int


def peak(
    operations: Sequence[Operation],
    results: Sequence[Buffer],
    given: Sequence[Buffer] = (),
    carried: Sequence[tuple[Buffer, Buffer]] = (),
    *,
    early: bool = False,
) -> Peak:
    """Returns the fullest moment of a frame.

    Args:
        operations: in the order in which they run.
        results: buffers that live to the end.
        given: buffers of the frame around that this one may write over: a loop's carries.
        carried: of a loop, each carry's buffer at the end of a trip and at its beginning.
        early: whether a loop's stacks have their place before the loops that run before it.
    """
    end = len(operations)
    last: dict[Buffer, int] = {}
    for k, operation in enumerate(operations):
        for buffer in (*operation.reads, *operation.writes):
            last[buffer] = k
    last |= dict.fromkeys(results, end)
    own = {buffer for operation in operations for buffer in operation.writes}
    free = own | set(given)
    until: dict[Buffer, int] = {}
    born: dict[Buffer, int] = {}
    for k, operation in enumerate(operations):
        for made in operation.writes:
            born[made] = 0 if early and operation.inner else k
            until[made] = last[made]
        for made, under in operation.over:
            place = under.place
            if (
                under in free
                and last.get(under, -1) <= k
                and until.get(place, last.get(place, -1)) <= k
            ):
                made.into = place
                place.fixed |= made.fixed and made.carry
                until[place] = max(until.get(place, k), last[made])
    for made, under in carried:
        if (
            made in born
            and made.place is made
            and max(last.get(under, -1), until.get(under, -1)) < born[made]
        ):
            made.into = under
    change = [0] * (end + 2)
    for buffer in own:
        if buffer.place is buffer and not buffer.fixed:
            change[born[buffer]] += buffer.bytes
            change[until[buffer] + 1] -= buffer.bytes
    best, at, level = 0, 0, 0
    for k in range(end + 1):
        level += change[k]
        total = level + (operations[k].inner if k < end else 0)
        if total > best:
            best, at = total, k
    held = [
        (buffer.bytes, buffer)
        for buffer in own
        if buffer.place is buffer and not buffer.fixed and born[buffer] <= at <= until[buffer]
    ]
    return Peak(best, (*held, *(operations[at].held if at < end else ())), at)
