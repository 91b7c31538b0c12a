"""What is to outlive a power cut, and what is read of a folder in which others may write."""

import errno
import io
import os
import stat
from pathlib import Path

# Bytes of a manifest, a record or a configuration: the index of a model of 700 billion parameters
# has 9 million.
LARGEST = 32 << 20


def sync(path: Path) -> None:
    """Waits until the bytes of a file, or the names in a folder, have reached the disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def open_file(path: str | os.PathLike[str], what: str = "a file") -> io.FileIO:
    """Opens the regular file at `path` to be read, with no buffer; `what` describes it in an error.

    Raises `ValueError` for anything else: a pipe would never answer, and a device never end. Raises
    `OSError` as `open` does.
    """
    try:
        file = open(path, "rb", buffering=0, opener=_without_waiting)  # noqa: SIM115  (the caller closes it)
    except IsADirectoryError as error:
        raise ValueError(f"{path}: needed {what}, found a folder.") from error
    except OSError as error:
        if error.errno in (
            errno.ELOOP,
            errno.ENXIO,
            errno.ENAMETOOLONG,
        ):  # a link to itself; a socket; no name of a file
            raise ValueError(f"{path}: needed {what}, found none ({error.strerror}).") from error
        raise
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise ValueError(f"{path}: needed {what}, found no regular file.")


def read(path: str | os.PathLike[str], what: str = "a file", *, most: int = LARGEST) -> bytes:
    """Returns the bytes of the regular file at `path`. Raises `ValueError` as `open_file` does, and
    where there are more than `most`."""
    with io.BufferedReader(open_file(path, what)) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise ValueError(f"{path}: needed {what} of {most} bytes at most; the file has {size}.")
        return file.read(most)


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)
