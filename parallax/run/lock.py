"""A folder belongs to one run: an exclusive lock that ends with the process that holds it. JAX is
not imported here, so that a second run is refused before it has cost a second.

    claim = lock.take("out/run")       # raises `Held`, with the host and the process of its run
    ...
    claim.release()                    # or the process ends, however it does

The lock is the kernel's `flock` on FOLDER/.lock. The kernel gives it back when its process is gone,
by kill -9 too; the file that then stays says nothing and is taken over by the next run. Readers
need no lock.

On network file systems: NFS (Linux 2.6.12 and newer, not mounted with `local_lock` or `nolock`),
CephFS, GPFS, SMB and Lustre mounted with `flock` hold it for all machines. A machine that dies at
once keeps it until the server notices (NFSv4: a lease of some 90 s). Lustre with `localflock`, and
BeeGFS as it comes, hold it for the processes of one machine. A file system without locks is told in
a line, and nothing keeps a second run out.
"""

import atexit
import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from parallax import _files

FILE = ".lock"
# each begins again where another run has just removed the file, or the empty folder, that it
# released
TRIES = 10
TOLD = 1.0  # seconds within which a holder writes down who it is
WITHOUT_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL}


class Held(OSError):
    """Another run holds the folder; the message says on which host, and which process."""


class Lock:
    """The lock on `folder`, as `take` returns it. A context manager: it is released at the end."""

    def __init__(self, folder: Path, descriptor: int, made: list[Path]):
        self.folder = folder
        self._descriptor: int | None = descriptor
        self._made = made  # by `take`
        atexit.register(self.release)
        os.register_at_fork(after_in_child=self._forked)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.release()

    def release(self) -> None:
        """Give the folder back, and remove the lock's file and the folders that `take` made, where
        they are empty."""
        if self._descriptor is None:
            return
        descriptor, self._descriptor = self._descriptor, None
        atexit.unregister(self.release)
        with contextlib.suppress(OSError):
            (self.folder / FILE).unlink()  # while nobody else can hold it
        _remove(self._made)
        os.close(descriptor)

    def _forked(self) -> None:
        """A child process must not keep the folder when its parent is gone."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def take(folder: str | Path, *, say: Callable[[str], Any] = print) -> Lock:
    """The exclusive lock on `folder`, which is made where it is missing.

    In a job of several processes rank 0 takes it.

    Raises:
        Held: another run has it.
        OSError: the folder cannot be made, or not be written to.
    """
    folder = Path(folder).absolute()
    made: list[Path] = []
    try:
        for _ in range(TRIES):
            # No file: another run has released the folder, and removed it, since it was made here.
            with contextlib.suppress(FileNotFoundError):
                _make(folder, made)
                descriptor = _locked(folder / FILE, say)
                if descriptor is not None:
                    _sign(descriptor, folder / FILE)
                    return Lock(folder, descriptor, made)
            time.sleep(0.01)
        raise FileNotFoundError(errno.ENOENT, "it cannot be made")
    except BlockingIOError:
        raise Held(
            f"{folder} belongs to another run: {_holder(folder)} holds it. Wait until it has "
            f"ended, or choose another folder."
        ) from None
    except OSError as error:
        _remove(made)
        raise OSError(
            f"{folder}: needed a folder to write to; {error.strerror}. Choose another one."
        ) from error


def _make(folder: Path, made: list[Path]) -> None:
    """Make the folder, and add to `made` each one that was missing."""
    for path in (*reversed(folder.parents), folder):
        if not os.path.isdir(path):
            with contextlib.suppress(FileExistsError):  # another run was faster
                path.mkdir()
                made.append(path)


def _remove(made: list[Path]) -> None:
    """Remove the folders, where they are empty."""
    for path in reversed(made):
        with contextlib.suppress(OSError):
            path.rmdir()


def _locked(path: Path, say: Callable[[str], Any]) -> int | None:
    """The open file at `path` with the lock on it; `None` where its last holder removed it after it
    was opened here."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if (
            error.errno == errno.ELOOP
        ):  # what it leads to is no file of a run's, and would be emptied
            raise OSError(errno.ELOOP, f"{FILE} there is a link, and a lock is a file") from error
        raise
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            os.close(descriptor)
            raise
        say(
            f"{path.parent}: its file system has no locks ({error.strerror}), so nothing "
            f"keeps a second run out of it."
        )
    try:
        if os.path.samestat(os.fstat(descriptor), path.stat()):
            return descriptor
    except FileNotFoundError:
        pass
    os.close(descriptor)
    return None


def _sign(descriptor: int, path: Path) -> None:
    """Write into the lock's file who holds it, for other machines too."""
    record = {
        "host": socket.gethostname(),
        "process": os.getpid(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
    }
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(record).encode(), 0)
        os.fsync(descriptor)
    except OSError:
        path.unlink(missing_ok=True)
        os.close(descriptor)
        raise


def _holder(folder: Path) -> str:
    """The process that holds the folder, in words, read until it has written them down."""
    end = time.monotonic() + TOLD
    while time.monotonic() < end:
        time.sleep(
            0.02
        )  # a run that has just begun takes this long to replace what the last one wrote
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            record = json.loads(_files.read(folder / FILE))
            return f"process {record['process']} on {record['host']}, since {record['since']},"
    return "a process that has not said which"
