"""Work in stages that all processes end well, or none: each learns whether the others did, and
whether to try again.

They meet at barriers of JAX's coordinator, not in a collective: so work in the background may be in
stages, no device waits, and a stage may take as long as it takes.
"""

import contextlib
import errno
import re
from collections.abc import Callable

import jax

LONG = 86_400.0  # seconds that one process may work while the others wait for it
SOON = 30.0  # seconds in which a process takes its next breath, once all have ended a stage

# Of the storage, and perhaps over in a while: nothing that a program's mistake would give.
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
    """Another process could not do its part, and says why itself."""


# A barrier, `meet(key=..., timeout_ms=...)`: it returns when all processes have called it with this
# key, and raises `jax.errors.JaxRuntimeError` on all of them where one has not come within the
# time. `orbax.checkpoint.multihost` has one.
Meet = Callable[..., None]


class Stages:
    """The stages of one piece of work, the same ones on every process.

    Args:
        name: unlike that of any other work of the job.
        meet: a barrier; of one process, a function that does nothing.

    Attributes:
        again: after a stage that did not end well: whether all that went wrong is transient.
    """

    def __init__(self, name: str, meet: Meet):
        self.again, self._name, self._meet = False, name, meet
        self._number, self._over = 0, False

    def end(self, error: BaseException | None = None) -> None:
        """Waits until all processes have ended this stage well. `error` says why this one has not,
        and is raised.

        Raises:
            Elsewhere: this process has ended it well, and another one has not.
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
        self._over = True
        self.again = (error is None or transient(error)) and self._met(
            "again", 3 * SOON
        )  # some come from the line above
        raise Elsewhere("another process could not do its part") if error is None else error

    def first(self, work: Callable[[], object]) -> None:
        """Runs a stage in which the first process alone works. Raises as `end` does."""
        error = None
        if jax.process_index() == 0:
            try:
                work()
            except Exception as failure:
                error = failure
        self.end(error)

    def failed(self, error: BaseException) -> bool:
        """Returns whether to try again after `error`, of this process or out of `end`: all
        processes get one answer."""
        if not self._over:
            with contextlib.suppress(Exception):
                self.end(error)
        return self.again

    def _met(self, what: str, seconds: float) -> bool:
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
    """Returns whether it says that a process did not come to a barrier in time."""
    return isinstance(error, jax.errors.JaxRuntimeError) and "DEADLINE_EXCEEDED" in str(error)


def transient(error: BaseException | None) -> bool:
    """Returns whether an error is of the storage, and may be over in a while, as those of
    `TRANSIENT` may."""
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
