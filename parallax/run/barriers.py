"""Work in stages that succeed on all processes or count as failed on all. After each stage every
process learns whether all succeeded, and if not, whether all try again.

Processes meet at barriers of JAX's coordination service, not in a collective. So stages may run in
the background, no device waits, and a stage may take as long as it needs.
"""

import contextlib
import errno
import re
from collections.abc import Callable

import jax

LONG = 86_400.0  # seconds that one process may work while the others wait for it
SOON = 30.0  # seconds to wait at the barriers after a stage, to which all processes come at once

# Errors of the storage that may go away by themselves. A mistake in a program causes none of them.
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
    """The stages of one piece of work, the same ones on every process.

    Args:
        name: a name that no other work of the job has.
        meet: a barrier; in a job of one process, a function that does nothing.

    Attributes:
        again: after a stage that failed, whether the errors of all processes are transient.
    """

    def __init__(self, name: str, meet: Meet):
        self.again, self._name, self._meet = False, name, meet
        self._number, self._over = 0, False  # the number of ended stages; whether one failed

    def end(self, error: BaseException | None = None) -> None:
        """Waits until all processes have ended this stage, and returns if all succeeded. If a
        process did not succeed, `end` sets `again`, and raises an error on every process.

        A barrier carries no message, so a process answers by coming to a barrier or not. A process
        with an error does not come to the barrier "well", so the others reach their deadline. If
        its error is not transient, it does not come to the barrier "again" either.

        Args:
            error: the error of this process in the stage, or None; it is raised.

        Raises:
            Elsewhere: this process succeeded, and another one failed.
            jax.errors.JaxRuntimeError: a process is gone.
        """
        self._number += 1
        try:
            self._meet(
                key=f"{self._name}, stage {self._number} ended", timeout_ms=round(LONG * 1000)
            )
        except BaseException:
            self._over = True
            raise
        if error is None and self._met("well", SOON):
            return
        # The others know of the failure now. `failed`, which the caller calls with the error, would
        # otherwise end the stage with it, to tell them.
        self._over = True
        # Longer than SOON: the processes that succeeded come here only after their wait at "well".
        self.again = (error is None or transient(error)) and self._met("again", 3 * SOON)
        raise Elsewhere("another process could not do its part") if error is None else error

    def first(self, work: Callable[[], object]) -> None:
        """Runs a stage in which only the first process works. The errors are those of `end`."""
        error = None
        if jax.process_index() == 0:
            try:
                work()
            except Exception as failure:
                error = failure
        self.end(error)

    def failed(self, error: BaseException) -> bool:
        """Returns whether to try again after `error`, an error of this process's work or of `end`.
        All processes get the same answer.
        """
        if not self._over:  # no stage failed in `end`, so the work did: `end` tells the others
            with contextlib.suppress(Exception):
                self.end(error)
        return self.again

    def _met(self, what: str, seconds: float) -> bool:
        """Returns whether all processes came to the barrier `what` of this stage within `seconds`.
        Other errors of the barrier are raised.
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
    """Returns whether an error, or an error in its chain of causes, may go away by itself: an error
    number of `TRANSIENT`, a barrier's deadline, or a file that TensorStore misses.
    """
    while error is not None:
        written = re.search(r"os_error_code='(\d+)'", str(error))  # as TensorStore writes it
        number = error.errno if isinstance(error, OSError) else int(written[1]) if written else None
        # Threads of Orbax may still write for a try that failed while its folder is removed. Then
        # TensorStore misses a file that the next try has just written.
        missing = isinstance(error, ValueError) and str(error).startswith("NOT_FOUND")
        if number in TRANSIENT or missing or _is_late(error):
            return True
        error = error.__cause__
    return False
