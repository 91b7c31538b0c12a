"""Computes the peak memory of a traced program from the lifetimes of its buffers, for a compiler
that fuses elementwise operations.

A *frame* is a program, a branch of a conditional or the body of a loop: a list of operations, each
with the buffers that it reads and writes. A buffer lives from the operation that writes it to the
last operation that reads it. If an operation reads an operand element by element, or updates a part
of the operand, its result is written over the operand, unless a later operation reads the operand.
Buffers that are written over each other share one *place*, named by the first of these buffers. A
*fixed* buffer is an argument, a result or a constant of the whole step, and does not count as a
temporary.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple


class Held(NamedTuple):
    """The buffers that one operation on one source line makes, and that are in memory at the moment
    of the peak.

    Attributes:
        bytes: the sum of the buffers' sizes on a device.
        what: the operation that makes the buffers, or the kind of the buffers.
        line: the source line of the operation, as `source_lines.source` gives it.
    """

    bytes: int
    what: str
    line: str


class Buffer:
    """An array in memory. The array belongs to the frame (program, branch or loop's body) whose
    operation writes it."""

    def __init__(
        self,
        nbytes: int,
        eqn: Any = None,
        what: str = "",
        *,
        fixed: bool = False,
        carry: bool = False,
    ):
        """Makes a buffer of `nbytes` bytes. `eqn` is the equation that computes the array in the
        buffer. If there is none, `what` describes the buffer in words.

        `fixed` marks an argument, a result or a constant, which does not count as a temporary.
        `carry` marks the buffer of a loop's carry or stacked result. Such a buffer may be written
        over an older array: the first value of the carry, or the zeros with which the stacked
        result begins. If the buffer has both marks, this older array is no temporary either.
        """
        self.bytes, self.eqn, self.what, self.fixed, self.carry = nbytes, eqn, what, fixed, carry
        # The buffer over which this buffer is written; this buffer itself if it is written over
        # none.
        self.into: Buffer = self

    @property
    def place(self) -> "Buffer":
        """The buffer whose memory this buffer uses. This is the first buffer in the chain of
        buffers that are written over each other, or this buffer itself if it is written over no
        other buffer."""
        return self if self.into is self else self.into.place


class Operation(NamedTuple):
    """One operation that reads or writes memory, or a whole loop.

    Attributes:
        reads: the buffers that the operation reads.
        writes: the buffers that the operation makes.
        over: pairs of buffers: a buffer that the operation makes, and an older buffer over which
            the new one may be written.
        inner: for a loop or a conditional, the peak bytes of the temporaries inside it, without the
            buffers in `reads` and `writes`; 0 for any other operation.
        held: the temporaries that `inner` counts, as pairs (bytes, buffer).
    """

    reads: tuple[Buffer, ...]
    writes: tuple[Buffer, ...] = ()
    over: tuple[tuple[Buffer, Buffer], ...] = ()
    inner: int = 0
    held: tuple[tuple[int, Buffer], ...] = ()


class Peak(NamedTuple):
    """The temporaries of a frame (a program, a branch or a loop's body) at the moment when these
    temporaries have the most bytes.

    Attributes:
        bytes: the bytes of all these temporaries together.
        held: the temporaries, as pairs (bytes, buffer).
        at: the index of the operation that runs at this moment; the number of operations if the
            peak comes after the last operation.
    """

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
    """Returns the temporaries of a frame (a program, a branch or a loop's body) at the moment when
    these temporaries have the most bytes. If a buffer is written over an older buffer, also sets
    the new buffer's `into` to the older buffer; `Buffer.place` needs this.

    Args:
        operations: the operations, in the order in which they run.
        results: buffers that live to the end of the frame.
        given: for a loop's body, the buffers of the loop's carries. They belong to the frame that
            contains the loop, and the body may write over them.
        carried: for a loop's body, a pair of buffers for each carry: the carry's buffer at the end
            of an iteration, and its buffer at the beginning of the iteration.
        early: whether the results of loops are in memory from the first operation of the frame on,
            as in some of XLA's backends. If not, each of these results is in memory from the moment
            when its loop begins.
    """
    end = len(operations)
    # The index of the operation that last uses each buffer; `end` for a result. `last.get(x, -1)`
    # below is -1 for a buffer that no operation uses.
    last: dict[Buffer, int] = {}
    for k, operation in enumerate(operations):
        for buffer in (*operation.reads, *operation.writes):
            last[buffer] = k
    last |= dict.fromkeys(results, end)
    written_here = {buffer for operation in operations for buffer in operation.writes}
    may_overwrite = written_here | set(given)
    until: dict[Buffer, int] = {}  # for each place, the last use of any buffer in it
    born: dict[Buffer, int] = {}  # for each buffer, the index of the operation that makes it
    for k, operation in enumerate(operations):
        for made in operation.writes:
            # A loop has an `inner` peak, and so has a conditional with temporaries of its own.
            born[made] = 0 if early and operation.inner else k
            until[made] = last[made]
        # `made` may be written over the older buffer `under`, if no later operation reads `under`
        # (`last`) or another buffer in the same place (`until`; `last`, if this frame has not
        # written the place). Operation k itself may read them (<=): it reads each element before it
        # writes that element.
        for made, under in operation.over:
            place = under.place
            if (
                under in may_overwrite
                and last.get(under, -1) <= k
                and until.get(place, last.get(place, -1)) <= k
            ):
                made.into = place
                # If a loop's carry (or stacked result) is a result of the step, the array with
                # which the carry begins is in the memory of that result, and no temporary either.
                place.fixed |= made.fixed and made.carry
                until[place] = max(until.get(place, k), last[made])
    # A carry's new array takes the place of its old array if all operations that read the old array
    # come before the operation that makes the new one (<). The loop above has already treated an
    # operation that reads the old array element by element (`over`).
    for made, under in carried:
        if (
            made in born
            and made.place is made
            and max(last.get(under, -1), until.get(under, -1)) < born[made]
        ):
            made.into = under
    # At each operation, the bytes of the places that begin to live, minus those that have ended.
    # Their running sum `level` is the bytes that live. A result ends at `end + 1`.
    change = [0] * (end + 2)
    for buffer in written_here:
        if buffer.place is buffer and not buffer.fixed:
            change[born[buffer]] += buffer.bytes
            change[until[buffer] + 1] -= buffer.bytes
    best, at, level = 0, 0, 0
    for k in range(end + 1):  # k = end is the moment after the last operation
        level += change[k]
        total = level + (operations[k].inner if k < end else 0)
        if total > best:
            best, at = total, k
    held = [
        (buffer.bytes, buffer)
        for buffer in written_here
        if buffer.place is buffer and not buffer.fixed and born[buffer] <= at <= until[buffer]
    ]
    return Peak(best, (*held, *(operations[at].held if at < end else ())), at)
