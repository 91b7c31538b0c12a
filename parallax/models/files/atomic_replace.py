"""Replaces the files of a folder all at once: it holds the old model, the new one, or none that
can be read.

The new files are written into a folder of their own, and synced. Then `last` is removed, without
which nobody reads the folder; the others are replaced; the new `last` comes last. An error on the
way restores the old files. A kill leaves a folder without `last`, with the old files in
`.saving/old`, which the next save clears.
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
    """A new folder to write files into. When the block ends they take the place of those of the
    same names in `folder`.

    Args:
        folder: is made where it is not there.
        last: the file without which the others are not read.
        gone: files that leave `folder` where no new one takes their place.

    Raises:
        OSError: a file could not be written or moved. `folder` is as it was before.
    """
    stage = folder / STAGE
    new, old = stage / "new", stage / "old"
    folder.mkdir(parents=True, exist_ok=True)
    if stage.is_dir():
        shutil.rmtree(stage)  # of a save that was killed
    try:
        new.mkdir(parents=True)
        old.mkdir()
        yield new
        for file in (*new.iterdir(), new):
            _files.sync(file)
    except BaseException:
        shutil.rmtree(stage, ignore_errors=True)
        raise
    _swap(folder, new, old, last, {*gone})
    # The new files are in their place, so an old one that cannot be removed is no error.
    shutil.rmtree(stage, ignore_errors=True)


def _swap(folder: Path, new: Path, old: Path, last: str, gone: set[str]) -> None:
    """Moves the old files from `folder` to `old`, and the files in `new` to `folder`. The file
    `last` goes first and comes last, so a half-changed folder is without it, and is never read. If
    a move fails, all moves are undone.
    """
    written = sorted({file.name for file in new.iterdir()} - {last})
    moved: list[tuple[Path, Path]] = []

    def move(source: Path, target: Path) -> None:
        os.replace(source, target)
        moved.append((source, target))

    try:
        for name in (last, *sorted({*written, *gone} - {last})):
            if os.path.lexists(folder / name):
                move(folder / name, old / name)
                _files.sync(folder)  # `last` has left the disk before anything else does
        for name in written:
            move(new / name, folder / name)
        _files.sync(folder)
        move(new / last, folder / last)
        _files.sync(folder)
    except BaseException:
        for source, target in reversed(moved):
            os.replace(target, source)
        shutil.rmtree(new.parent, ignore_errors=True)
        raise
