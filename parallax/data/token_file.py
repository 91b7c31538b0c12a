"""Reads tokens from a file when they are indexed, so that only the tokens of a batch are read.

The file is not mapped into memory. If a mapped file is cut short, the next access ends the process
by a signal, SIGBUS, without a message. With system calls, which are used here, the read then fails
with an ordinary error. A batch of 8 windows of 1,024 tokens is read in about 90 microseconds, and
from a mapped file in 22.
"""

import contextlib
import dataclasses
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np
from jaxtyping import Integer

from parallax import _files
from parallax.data import manifest


class State(NamedTuple):
    """The size of a file in bytes, and the time of its last change, in nanoseconds since 1970."""

    size: int
    changed: int


@dataclasses.dataclass(frozen=True, eq=False)
class File:
    """A text in a file, as tokens. `file[places]` reads the tokens at these places, and
    `numpy.asarray(file)` reads all. `file[start:stop]` is a `File` with fewer places, and reads
    nothing. `len(file)` is the number of tokens.

    Consecutive places are read in one call. Each read opens the file and closes it again (about 10
    microseconds). Between reads no file is open, so a program may have more `File` objects than a
    process may hold open files.

    A read raises `IndexError` for a place outside the text, and `manifest.Damaged` if the file has
    changed since this object was made. If the system cannot read the file, a read raises an
    `OSError` that names the file.

    Attributes:
        path: the path of the file.
        dtype: the type of a token in the file.
        places: the range of the places in the file that hold the text; the file's first token has
            place 0.
        state: the `State` of the file when this object was made.
    """

    path: Path
    dtype: np.dtype
    places: range
    state: State

    def __len__(self) -> int:
        return len(self.places)

    @overload
    def __getitem__(self, places: slice, /) -> "File": ...
    @overload
    def __getitem__(
        self, places: Integer[np.ndarray, "*dims"] | int, /
    ) -> Integer[np.ndarray, "*dims"]: ...
    def __getitem__(self, places: Any, /) -> Any:
        """Returns a view for a slice, and the tokens at `places` for an integer or an array. A view
        is a `File` with fewer places, for which nothing is read yet.
        """
        if isinstance(places, slice):
            if places.step not in (None, 1):
                raise IndexError(
                    f"{self.path}: needed a slice of step 1, got {places.step}. "
                    "Ask for an array of places."
                )
            return dataclasses.replace(self, places=self.places[places])
        places = np.asarray(places)
        if places.dtype.kind not in "iu":
            raise IndexError(f"{self.path}: needed whole numbers as places, got {places.dtype}.")
        tokens = np.empty(places.shape, self.dtype)
        if not places.size:
            return tokens
        if not 0 <= places.min() <= places.max() < len(self):
            raise IndexError(
                f"{self.path}: the text has the tokens 0 to {len(self) - 1}; "
                f"got indices from {places.min()} to {places.max()}."
            )
        flat, into = places.reshape(-1), tokens.reshape(-1)
        # Each run of consecutive places is one read. `np.diff` would wrap unsigned places around.
        cuts = np.flatnonzero((flat[1:] <= flat[:-1]) | (np.diff(flat) != 1)) + 1
        with self._open() as descriptor:
            for start, stop in itertools.pairwise([0, *cuts.tolist(), flat.size]):
                self._read(descriptor, into[start:stop], int(flat[start]))
        return tokens

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Returns all tokens in a new array, for `numpy.asarray`. `copy` is not used."""
        tokens = np.empty(len(self), self.dtype)
        with self._open() as descriptor:
            self._read(descriptor, tokens, 0)
        return tokens if dtype is None else tokens.astype(dtype)

    @contextlib.contextmanager
    def _open(self) -> Iterator[int]:
        """Opens the file, and yields its descriptor. At the end of the `with` block this function
        raises `Damaged` if the file has changed since this object was made. So tokens of a changed
        file are never returned.
        """
        try:
            with _files.open_file(self.path, "a token file") as file:
                yield file.fileno()
                now = state_of(file.fileno())
        except OSError as error:
            raise OSError(
                error.errno, f"{self.path}: the tokens cannot be read: {error.strerror or error}."
            ) from error
        if now != self.state:
            raise manifest.Damaged(
                f"{self.path}: the file was cut short or written to after this run first opened "
                f"it; it had {self.state.size} bytes then, and has {now.size} bytes now. "
                "Write the file again, and restart the run."
            )

    def _read(self, descriptor: int, into: np.ndarray, first: int) -> None:
        """Fills `into` with tokens of this text, from the text's token `first` on; stops if the
        file ends. The text is a part of the file, and begins at the file's token
        `self.places.start`. One system call may read only a part of the tokens, so the call is
        repeated.
        """
        unfilled, at = into.view(np.uint8).data, (self.places.start + first) * self.dtype.itemsize
        while unfilled:
            got = os.preadv(descriptor, [unfilled], at)
            if not got:
                return  # the file was cut short: `_open` finds its size changed
            unfilled, at = unfilled[got:], at + got


def state_of(file: int | Path) -> State:
    """Returns the state of a file, given its path or its open descriptor."""
    status = os.stat(file)
    return State(status.st_size, status.st_mtime_ns)
