"""Replaces the files of a model in a folder, so that no reader loads a mix of two models. At any
time the folder holds the old model, the new model, or no model that can be read.

The new files are written into a separate folder, and synced. Then the file `last` is removed; no
reader accepts a folder without that file. Then the other files are replaced, and the new `last` is
moved in at the end. If an error occurs on the way, the old files are moved back. If the process is
killed on the way, the folder is left without `last`, with the old files in `.saving/old`; the next
save removes the folder `.saving`.
"""

import contextlib
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from parallax import _files

STAGE = ".saving"


@contextlib.contextmanager
def replacing(folder: Path, *, last: str, gone: Iterable[str] = ()) -> Iterator[Path]:
    """Yields a new folder to write files into. When the `with` block ends, the new files replace
    the files of the same names in `folder`.

    Args:
        folder: the folder of the model; it is made if it does not exist.
        last: the name of the file without which no reader accepts the folder.
        gone: the names of old files to remove, if no new file replaces them.

    Raises:
        OSError: a file could not be written or moved. The files of `folder` are then as they were
            before.
    """
    stage = folder / STAGE
    new, old = stage / "new", stage / "old"
    folder.mkdir(parents=True, exist_ok=True)
    if stage.is_dir():
        shutil.rmtree(stage)  # left by a save that was killed
    try:
        new.mkdir(parents=True)
        old.mkdir()
        yield new
        # The new files are synced, and then their folder, before an old file is touched.
        for file in (*new.iterdir(), new):
            _files.sync(file)
    except BaseException:
        shutil.rmtree(stage, ignore_errors=True)
        raise
    _swap(folder, new, old, last, {*gone})
    # The new files are in place, so it is no error if an old file cannot be removed.
    shutil.rmtree(stage, ignore_errors=True)


def _swap(folder: Path, new: Path, old: Path, last: str, gone: set[str]) -> None:
    """Moves each file of `folder` to the folder `old` if the folder `new` has a file of the same
    name, or if the name is in `gone`. Then moves the files in `new` to `folder`.

    The file `last` is moved out first and moved in last, so a half-changed folder does not have
    this file, and is never read. If a move fails, all moves are undone.
    """
    written = sorted({file.name for file in new.iterdir()} - {last})
    moved: list[tuple[Path, Path]] = []

    def move(source: Path, target: Path) -> None:
        """Moves a file, and notes the move so that it can be undone."""
        os.replace(source, target)
        moved.append((source, target))

    try:
        for name in (last, *sorted({*written, *gone} - {last})):
            if os.path.lexists(folder / name):
                move(folder / name, old / name)
                # `last`, the first name, thus leaves the disk before another file is moved.
                _files.sync(folder)
        for name in written:
            move(new / name, folder / name)
        _files.sync(folder)
        move(new / last, folder / last)
        _files.sync(folder)
    except BaseException:
        for source, target in reversed(moved):
            os.replace(target, source)
        shutil.rmtree(new.parent, ignore_errors=True)  # `STAGE`, with `new` and `old`
        raise
