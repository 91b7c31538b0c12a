"""Files that must survive a power failure, and safe reads of files that other processes write."""

import errno
import io
import os
import stat
from pathlib import Path

# The most bytes of a manifest, a record or a configuration. The index of a model of 700 billion
# parameters has 9 million bytes.
LARGEST = 32 << 20


def sync(path: Path) -> None:
    """Waits until the bytes of a file, or the names in a folder, have reached the disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def open_file(path: str | os.PathLike[str], what: str = "a file") -> io.FileIO:
    """Opens the regular file at `path` for reading, without a buffer. In an error message, `what`
    describes the file that was needed.

    Raises `ValueError` if `path` is no regular file: a read from a pipe may wait forever, and a
    device file, such as `/dev/zero`, may have no end. Raises `OSError` as `open` does.
    """
    try:
        # No buffer: callers read by the file's descriptor, or many bytes at once, so a buffer
        # would only add a copy.
        file = open(path, "rb", buffering=0, opener=_without_waiting)  # noqa: SIM115  (the caller closes it)
    except IsADirectoryError as error:
        raise ValueError(f"{path}: needed {what}, found a folder.") from error
    except OSError as error:
        # In order: a link to itself; a socket; a name that no file can have.
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.ENAMETOOLONG):
            raise ValueError(f"{path}: needed {what}, found none ({error.strerror}).") from error
        raise
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise ValueError(f"{path}: needed {what}, found a pipe or a device file.")


def read(path: str | os.PathLike[str], what: str = "a file", *, most: int = LARGEST) -> bytes:
    """Returns the bytes of the regular file at `path`.

    Raises `ValueError` as `open_file` does, and for a file of more than `most` bytes.
    """
    # The file of `open_file` has no buffer, and its `read` may return fewer bytes than asked for; a
    # `BufferedReader` reads on until it has all of them.
    with io.BufferedReader(open_file(path, what)) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise ValueError(f"{path}: needed {what} of {most} bytes at most; the file has {size}.")
        # Another process may make the file longer meanwhile: read the first `most` bytes at most.
        return file.read(most)


def _without_waiting(path: str, flags: int) -> int:
    """Returns the descriptor of the opened file. A pipe is opened without waiting for its writer to
    open it. A terminal does not become the controlling terminal of this process.
    """
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)
