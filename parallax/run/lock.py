"""An exclusive lock on a folder, so that the folder belongs to one run. The lock ends with the
process that holds it. JAX, which is slow to import, is not imported here, so that another run is
refused at once.

    claim = lock.take("out/run")       # raises `Held`, with the host and process of the other run
    ...
    claim.release()                    # the end of the process releases the lock, too

The lock is a `filelock.FileLock` on FOLDER/.lock, which uses the kernel's `flock`. The kernel
releases the lock when the process is gone, also after kill -9. The file may then stay behind, and
the next run takes the file over. Processes that only read the folder need no lock.

These network file systems enforce the lock between the processes of all machines: CephFS; GPFS;
SMB; Lustre, if it is mounted with `flock`; NFS on Linux 2.6.12 or newer, if it is not mounted with
`local_lock` or `nolock`. A machine that dies keeps the lock until the server notices (with NFSv4,
after some 90 s). Lustre with `localflock`, and BeeGFS by default, enforce the lock only between the
processes of one machine. On a file system without locks, a line is printed, and nothing keeps a
second run out.
"""

import atexit
import contextlib
import errno
import functools
import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from parallax import _files

FILE = ".lock"
TRIES = 10  # of `take`
TOLD = 3.0  # seconds to wait for the record of the process that holds the lock
WITHOUT_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL}


class Held(OSError):
    """Raised if another run holds the folder. The message names the host and the process of that
    run.
    """


class Lock:
    """The lock on a folder; `take` returns it. A `with` statement releases the lock at the end of
    its block.

    Args:
        folder: the folder.
        file_lock: the `filelock.FileLock` on the lock's file.
        created: the folders that `take` made.
    """

    def __init__(self, folder: Path, file_lock: Any, created: list[Path]):
        self.folder, self._file_lock, self._created = folder, file_lock, created
        atexit.register(self.release)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.release()

    def release(self) -> None:
        """Releases the lock. Removes the lock's file, and each folder that `take` made and that is
        still empty.
        """
        atexit.unregister(self.release)
        if self._file_lock.is_locked:
            with contextlib.suppress(OSError):
                (self.folder / FILE).unlink()  # not after the release: it may be another run's then
            self._file_lock.release()
        _remove(self._created)
        self._created = []


def take(folder: str | Path, *, say: Callable[[str], Any] = print) -> Lock:
    """Takes and returns the exclusive lock on `folder`; makes the folder if it is missing.

    In a job of several processes, call `take` only on rank 0. On a file system without locks,
    `take` prints a line, and returns a `Lock` that keeps no other run out.

    Raises:
        Held: another run has the lock.
        OSError: the folder cannot be made or written to.
        ImportError: filelock is not installed.
    """
    try:
        import filelock
    except ImportError as error:
        raise ImportError(
            'A run locks its folder with filelock: pip install -e ".[checkpoint]".'
        ) from error
    folder = Path(folder).absolute()
    file_lock = filelock.FileLock(
        folder / FILE,
        timeout=0,  # a held lock raises `Timeout` at once
        thread_local=False,  # any thread may release the lock
        fallback_to_soft=False,  # a soft lock would outlive a process that is killed
        on_acquired=functools.partial(_sign, folder / FILE),  # writes who holds the lock
    )
    created: list[Path] = []
    try:
        for _ in range(TRIES):
            # Another run that releases its lock meanwhile may remove the folder or the file. If the
            # folder is gone just after `mkdir` found it, filelock raises `FileExistsError`.
            with contextlib.suppress(FileNotFoundError, FileExistsError):
                _make(folder, created)
                file_lock.acquire()
                return Lock(folder, file_lock, created)
            time.sleep(0.01)
        reason = "a file has its name" if folder.exists() else "it cannot be made"
        raise FileNotFoundError(errno.ENOENT, reason)  # caught below
    except filelock.Timeout:
        raise Held(
            f"{folder} belongs to another run: {_holder(folder)} holds it. Wait until it has "
            f"ended, or choose another folder."
        ) from None
    except OSError as error:
        if error.errno in WITHOUT_LOCKS:
            say(
                f"{folder}: its file system has no locks ({error.strerror}), so nothing "
                f"keeps a second run out of it."
            )
            return Lock(folder, file_lock, created)
        _remove(created)
        reason = error.strerror
        if error.errno == errno.ELOOP:  # the lock's file is a link: it may lead to a user's file
            reason = f"the lock's file {FILE} is a link, not a regular file"
        raise OSError(
            f"{folder}: the run cannot write to this folder ({reason}). Choose another folder."
        ) from error


def _make(folder: Path, created: list[Path]) -> None:
    """Makes the folder and its parents, if they are missing. Adds each folder that it makes to
    `created`, the outermost first. `Lock.release` removes the folders of `created` that are then
    empty.
    """
    for path in (*reversed(folder.parents), folder):
        if not os.path.isdir(path):
            with contextlib.suppress(FileExistsError):  # another run was faster
                path.mkdir()
                created.append(path)


def _remove(created: list[Path]) -> None:
    """Removes the folders of `created` that are empty, the innermost first."""
    for path in reversed(created):
        with contextlib.suppress(OSError):
            path.rmdir()


def _sign(path: Path, descriptor: int) -> None:
    """Writes into the lock's open file which host and process hold the lock. If the write fails,
    removes the file, whose old record would name another run, and raises the error. filelock then
    releases the lock.
    """
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
        raise


def _holder(folder: Path) -> str:
    """Returns a text, for an error, that names the process that holds the folder. Reads the lock's
    file until it has a whole record, for at most `TOLD` seconds.
    """
    end = time.monotonic() + TOLD
    while time.monotonic() < end:
        # In this time a process that has just taken the lock replaces the record of the last
        # holder.
        time.sleep(0.02)
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            record = json.loads(_files.read(folder / FILE))
            return f"process {record['process']} on {record['host']}, since {record['since']},"
    return "a process that has not written its name"
