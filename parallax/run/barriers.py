"""Runs work in stages. A stage succeeds on all processes, or counts as failed on all of them. After
each stage every process learns whether the stage succeeded, and if not, whether all processes try
it again.

Processes meet at barriers of JAX's coordination service, not in a collective. So stages may run in
the background, no device waits, and a stage may take as long as it needs.
"""

import contextlib
import errno
import re
from collections.abc import Callable

import jax

LONG = 86_400.0  # seconds that one process may work while the others wait for it
SOON = 30.0  # seconds to wait at the barriers after a stage; all processes come to these at once

# Error numbers of storage and network faults that may go away by themselves. A mistake in a program
# causes none of them.
TRANSIENT = {
    *(
        errno.EIO,
        errno.ESTALE,
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EACCES,
        errno.EPERM,
        errno.EROFS,
        errno.EBUSY,
        errno.EAGAIN,
    ),
    *(
        errno.EINTR,
        errno.ETIMEDOUT,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOMEM,
        errno.ENOLCK,
        errno.EREMOTEIO,
        errno.ENOTCONN,
    ),
    *(
        errno.ECONNRESET,
        errno.ECONNREFUSED,
        errno.ECONNABORTED,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENETDOWN,
    ),
    *(errno.ENETUNREACH, errno.ENETRESET, errno.EPIPE),
}


class Elsewhere(OSError):
    """Raised if another process could not do its part; that process prints the reason."""


# A barrier, `meet(key=..., timeout_ms=...)`: it returns when all processes have called it with this
# key. If one does not come within the time, it raises `jax.errors.JaxRuntimeError` on all of them.
# `orbax.checkpoint.multihost` has one.
Meet = Callable[..., None]


class Stages:
    """The stages of one piece of work. Every process goes through the same stages.

    Args:
        name: a name that no other work of the job has.
        meet: a function that waits at a barrier for all processes; in a job of one process, a
            function that does nothing.

    Attributes:
        again: after a failed stage, whether all processes may try again. They may if every error of
            the stage is `transient`.
    """

    def __init__(self, name: str, meet: Meet):
        self.again, self._name, self._meet = False, name, meet
        # The number of ended stages; whether one failed and the other processes know it.
        self._number, self._others_know = 0, False

    def end(self, error: BaseException | None = None) -> None:
        """Waits until all processes have ended this stage, and returns if all succeeded. If a
        process did not succeed, `end` sets `again` (whether all processes try again), and raises an
        error on every process.

        When all processes have ended the stage, they use two more barriers, "well" and "again", to
        tell each other how the stage went. A barrier carries no message, so a process answers by
        coming to the barrier, or by staying away. A process with an error does not come to "well",
        so the other processes wait there until their deadline. A process whose error is not
        transient does not come to "again" either.

        Args:
            error: the error of this process in the stage, which `end` raises; or None.

        Raises:
            Elsewhere: this process succeeded, and another one failed.
            jax.errors.JaxRuntimeError: a process is gone.
        """
        self._number += 1
        try:
            self._meet(
                key=f"{self._name}, stage {self._number} ended", timeout_ms=round(LONG * 1000)
            )
        except BaseException:  # a process is gone: `again` stays False
            self._others_know = True
            raise
        if error is None and self._met("well", SOON):
            return
        # The caller passes the error to `failed`, which need not tell the others again.
        self._others_know = True
        # Longer than SOON: the processes that succeeded come here only after their wait at "well".
        self.again = (error is None or transient(error)) and self._met("again", 3 * SOON)
        raise Elsewhere("another process could not do its part") if error is None else error

    def first(self, work: Callable[[], object]) -> None:
        """Runs `work` on the first process as one stage; the other processes wait until the stage
        has ended. If `work` raises an error, the first process raises this error, and the others
        raise `Elsewhere`.
        """
        error = None
        if jax.process_index() == 0:
            try:
                work()
            except Exception as failure:
                error = failure
        self.end(error)

    def failed(self, error: BaseException) -> bool:
        """Returns whether to try again after `error`, which was raised by `end`, or by the work of
        this process. All processes get the same answer.
        """
        # `end` has not raised `error`: the work of this process did, before it called `end`. So
        # `end` is called here, to tell the others and to set `self.again`.
        if not self._others_know:
            with contextlib.suppress(Exception):
                self.end(error)
        return self.again

    def _met(self, what: str, seconds: float) -> bool:
        """Returns whether all processes came to the barrier `what` of this stage within `seconds`.
        Raises the barrier's error if it is not a missed deadline.
        """
        try:
            self._meet(
                key=f"{self._name}, stage {self._number} {what}", timeout_ms=round(seconds * 1000)
            )
        except jax.errors.JaxRuntimeError as error:
            if not _is_late(error):
                raise
            return False
        return True


def _is_late(error: BaseException) -> bool:
    """Returns whether an error says that a process did not come to a barrier in time."""
    return isinstance(error, jax.errors.JaxRuntimeError) and "DEADLINE_EXCEEDED" in str(error)


def transient(error: BaseException | None) -> bool:
    """Returns whether an error, or an error in its chain of causes, may go away by itself. Such an
    error is one of three kinds: its number is in `TRANSIENT`; a process came too late to a barrier;
    or TensorStore, the library with which Orbax writes arrays, does not find a file. A file may be
    missing because a failed try's folder is removed while threads of Orbax still write.
    """
    while error is not None:
        written = re.search(r"os_error_code='(\d+)'", str(error))  # as TensorStore writes it
        number = error.errno if isinstance(error, OSError) else int(written[1]) if written else None
        # After a try has failed, its folder is removed while threads of Orbax may still write. Then
        # TensorStore may not find a file that the next try has just written.
        missing = isinstance(error, ValueError) and str(error).startswith("NOT_FOUND")
        if number in TRANSIENT or missing or _is_late(error):
            return True
        error = error.__cause__
    return False
