"""Tokens in a file, read as they are asked for: what a batch does not need stays on the disk.

The file is not mapped into memory. Where a mapped one is cut short, the next access ends the process by a signal, SIGBUS,
without a word; a read that comes back short is an error like any other. A batch of 8 windows of 1,024 tokens takes 42
microseconds so, and 22 mapped; 8,200 single tokens from anywhere take 30 milliseconds, and 0.2 mapped, which no batch asks for.
"""

import dataclasses
import itertools
import os
import weakref
from pathlib import Path
from typing import Any, overload

import numpy as np
from jaxtyping import Integer

from parallax.data import manifest


class Descriptor:
    """A file that is open for as long as somebody holds this; a copy, in another process too, opens it again."""

    def __init__(self, path: Path):
        self.path, self.number = path, os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.number)

    def __reduce__(self):
        return Descriptor, (self.path,)


@dataclasses.dataclass(frozen=True, eq=False)
class File:
    """A text in a file: `len(file)`, `file[places]` for the tokens at these places, `file[start:stop]` for a part, not yet read.

    `numpy.asarray(file)` reads it all. Each run of places that follow one another is read at once.

    Raises `IndexError` for a place that it does not have, `manifest.Damaged` where the file has become too short, and `OSError`,
    with its name, where it cannot be read.

    Attributes:
        descriptor: the open file.
        dtype: of a token in it.
        places: where its tokens are, counted in tokens from the file's first.
    """

    descriptor: Descriptor
    dtype: np.dtype
    places: range

    @property
    def path(self) -> Path:
        """Where the file is."""
        return self.descriptor.path

    def __len__(self) -> int:
        return len(self.places)

    @overload
    def __getitem__(self, places: slice, /) -> "File": ...
    @overload
    def __getitem__(self, places: Integer[np.ndarray, "*dims"] | int, /) -> Integer[np.ndarray, "*dims"]: ...
    def __getitem__(self, places: Any, /) -> Any:
        if isinstance(places, slice):
            if places.step not in (None, 1):
                raise IndexError(f"{self.path}: needed a slice of step 1, got {places.step}. Ask for an array of places.")
            return dataclasses.replace(self, places=self.places[places])
        places = np.asarray(places)
        if places.dtype.kind not in "iu":
            raise IndexError(f"{self.path}: needed whole numbers as places, got {places.dtype}.")
        found = np.empty(places.shape, self.dtype)
        if not places.size:
            return found
        if not 0 <= places.min() <= places.max() < len(self):
            raise IndexError(f"{self.path}: it has the places 0 to {len(self) - 1}; got {places.min()} to {places.max()}.")
        flat, into = places.reshape(-1), found.reshape(-1)
        cuts = np.flatnonzero(np.diff(flat) != 1) + 1
        for start, stop in itertools.pairwise([0, *cuts.tolist(), flat.size]):
            self._read(into[start:stop], int(flat[start]))
        return found

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        found = np.empty(len(self), self.dtype)
        self._read(found, 0)
        return found if dtype is None else found.astype(dtype)

    def _read(self, into: np.ndarray, first: int) -> None:
        """Fill `into` with the tokens from place `first` on."""
        left, at = into.view(np.uint8).data, (self.places.start + first) * self.dtype.itemsize
        while left:
            try:
                got = os.preadv(self.descriptor.number, [left], at)
            except OSError as error:
                raise OSError(error.errno, f"{self.path}: the tokens cannot be read: {error.strerror or error}.") from error
            if not got:
                raise manifest.Damaged(
                    f"{self.path}: needed {len(left)} bytes from byte {at} on, the file ends at {self.state()[0]}. It was cut "
                    "short after it was opened: make it again."
                )
            left, at = left[got:], at + got

    def state(self) -> list[int]:
        """The file's size in bytes, and when its bytes and its entry changed last, in nanoseconds since 1970."""
        found = os.fstat(self.descriptor.number)
        return [found.st_size, found.st_mtime_ns, found.st_ctime_ns]
