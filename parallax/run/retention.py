"""Decides which checkpoints in a folder stay, and removes the others. Only checkpoints of this run
are removed; everything else in the folder stays.

A checkpoint is *finished* if it has a manifest. A checkpoint is *refused* if this run has found
that it cannot be restored; `refused` has, by step, the error of each such checkpoint.
"""

import itertools
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from parallax.data import manifest
from parallax.run import record as records
from parallax.run.record import CONTENTS, MANIFEST

NEWEST, OLD = "newest.json", ".replaced"


class Retention(NamedTuple):
    """Says which finished checkpoints stay.

    Attributes:
        newest: the number of newest checkpoints that stay.
        every: a number of steps. A finished checkpoint whose step is a multiple of this number also
            stays, for ever, unless `restore` refused it. With None, no checkpoint stays for this
            reason.
    """

    newest: int = 3
    every: int | None = None


class GivenUp(manifest.Damaged):
    """The error of a checkpoint that is refused because the run went back to an earlier checkpoint.

    The class is a subclass of `Damaged`, so that `prune` treats the checkpoint as a damaged one,
    and removes it as soon as the run has saved a good checkpoint with a larger step.
    """


class Later(ValueError):
    """Raised if the step to save, or a later step, already has a finished checkpoint, so that the
    step must not be saved.
    """


def path_of(folder: Path, step: int) -> Path:
    """Returns the folder of the checkpoint of `step`."""
    return folder / f"{step:08d}"


def step_of(path: Path) -> int | None:
    """Returns the step in the name of a checkpoint's folder; None for other names."""
    # `0000000100` is not the name of step 100, since `path_of` writes that step with eight digits.
    named = re.fullmatch("[0-9]{8,10}", path.name) is not None and records.is_step(int(path.name))
    return int(path.name) if named and path == path_of(path.parent, int(path.name)) else None


def finished(folder: Path) -> list[int]:
    """Returns the steps of the finished checkpoints, oldest first. Manifests are looked for, but
    not read.
    """
    steps = ((path, step_of(path)) for path in folder.iterdir())
    return sorted(step for path, step in steps if step is not None and (path / MANIFEST).is_file())


def seen(folder: Path) -> tuple[list[int], list[int], str]:
    """Returns three things: every step that has a folder or is the newest in `newest.json`, oldest
    first; the steps that `newest.json` lists as given up (the run went back to earlier ones); and
    the text of the error if `newest.json` cannot be read, or "".
    """
    steps = {
        step for path in folder.iterdir() if path.is_dir() and (step := step_of(path)) is not None
    }
    given_up, wrong = [], ""
    if os.path.lexists(folder / NEWEST):
        try:
            newest, given_up = records.newest(folder / NEWEST)
            steps.add(newest)
        except manifest.Damaged as error:
            wrong = str(error)
        except OSError as error:
            wrong = f"{folder / NEWEST}: it cannot be read; {error.strerror}."
    return sorted(steps), given_up, wrong


def write_newest(folder: Path, step: int, refused: Mapping[int, ValueError]) -> None:
    """Stores in `newest.json` that `step` is the newest step of the run, and which other
    checkpoints the run has given up, so that the next process passes over them too.
    """
    given_up = [
        other
        for other, why in refused.items()
        if other != step and isinstance(why, GivenUp) and path_of(folder, other).exists()
    ]
    manifest.write(
        folder / NEWEST, {"step": step} | ({"given_up": sorted(given_up)} if given_up else {})
    )


def newest_in_words(folder: Path) -> str:
    """Returns a sentence that names the newest finished checkpoint."""
    good = finished(folder)
    return (
        f"The newest finished one is {path_of(folder, good[-1])}."
        if good
        else "There is no finished one yet."
    )


def listed(names: list[str]) -> str:
    """Returns a text with the first three of `names`, and the number of the others."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def make_room(
    folder: Path, step: int, settings: Mapping[str, Any], refused: Mapping[int, ValueError]
) -> None:
    """Moves aside an unfinished or refused checkpoint of `step`, so that a new one can be written:
    the folder 00000100, for example, is renamed to 00000100.replaced. The folder is not removed
    here, since it may be of another run, and the new checkpoint is not yet written. When the new
    checkpoint is finished, `prune` removes 00000100.replaced if it is of this run. If another run's
    folder already has this name, the new name is 00000100.replaced.2, or has the next free number.
    `prune` does not look for names with such a number, so this folder stays.

    Raises:
        Later: there is a finished checkpoint of this step or a later one.
    """
    later = [number for number in finished(folder) if number >= step and number not in refused]
    if later:
        raise Later(
            f"{folder} holds a finished checkpoint of step {later[-1]}, so step {step} cannot be "
            f"saved. Restore the newest checkpoint, and go on from its step. To go back to an "
            f"earlier checkpoint, restore with before={step}. Or choose another folder."
        )
    path = path_of(folder, step)
    if path.is_symlink() or path.exists():
        aside = Path(f"{path}{OLD}")
        # If `aside` is an older checkpoint of this step and run, it is removed. Any other folder of
        # this name stays.
        if aside.is_dir() and records.is_of(aside, step, settings):
            remove(aside)
        # The first name that is free: 00000100.replaced, 00000100.replaced.2, ...
        names = itertools.chain(
            [aside], (Path(f"{aside}.{number}") for number in itertools.count(2))
        )
        path.rename(next(name for name in names if not (name.is_symlink() or name.exists())))


def prune(
    folder: Path,
    settings: Mapping[str, Any],
    refused: Mapping[int, ValueError],
    retention: Retention,
) -> None:
    """Removes the checkpoints of this run that are not to be kept: finished ones that `retention`
    does not keep, unfinished ones, and ones that a newer checkpoint of the same step has replaced.

    The newest checkpoint whose loss was measured stays too, even if `retention` does not keep it. A
    checkpoint that could not be restored (`refused`) because it is damaged stays until there is a
    newer finished checkpoint that was not refused. A checkpoint that was refused for another reason
    stays forever. Nothing is removed if all finished checkpoints of this run were refused.
    """
    # Each folder is checked only once. A folder that cannot be read counts as another run's, and
    # stays; at a second check it might be readable, and would be removed.
    ours = {}  # this run's folders, with the step of each
    for path in folder.iterdir():
        step = step_of(path.with_name(path.name.removesuffix(OLD)))
        if step is not None and path.is_dir() and records.is_of(path, step, settings):
            ours[path] = step
    complete = finished(folder)
    good = (
        step for step in reversed(complete) if step not in refused and path_of(folder, step) in ours
    )
    newest = list(itertools.islice(good, retention.newest))  # the newest first
    if not newest:
        return

    def stays(step):
        """Returns whether the checkpoint of `step` would stay if no loss had been measured."""
        if step in refused:
            return step > newest[0] or not isinstance(refused[step], manifest.Damaged)
        if step in newest:
            return True
        return retention.every is not None and step % retention.every == 0 and step in complete

    to_remove = {
        path: step for path, step in ours.items() if path.name.endswith(OLD) or not stays(step)
    }
    # `_measured` returns the folder that stays for its measured loss. It looks in `newest`, then in
    # `older`. It passes over the checkpoints that only `every` keeps: if one of them has a measured
    # loss, an older one with a measured loss stays too.
    older = {step for step in to_remove.values() if step not in refused}
    for path in to_remove.keys() - _measured(folder, newest, older):
        remove(path)
    # Left by a run that was killed while it wrote the file: no other run writes here now.
    for path in folder.glob(f".{NEWEST}.*.partial"):
        path.unlink()


def remove(path: Path) -> None:
    """Removes a checkpoint: first its manifest, and last `contents.json`, which says to which run
    the checkpoint belongs. If the removal is interrupted, an unfinished checkpoint of this run is
    left, which `prune` can remove.
    """
    if not (path / MANIFEST).is_dir():  # a folder of this name is removed below
        (path / MANIFEST).unlink(missing_ok=True)
    for inside in path.iterdir():
        if inside.is_dir() and not inside.is_symlink():
            shutil.rmtree(inside)
        elif inside.name != CONTENTS:
            inside.unlink()
    shutil.rmtree(path)


def _measured(folder: Path, newest: list[int], others: set[int]) -> set[Path]:
    """Returns the folders that stay because of a measured loss. One is the folder of the newest
    checkpoint whose manifest has a measured loss. The search goes through the steps `newest`
    (newest first), then through `others`, and ends at this checkpoint. A manifest whose `format` is
    not `record.FORMAT` cannot be read here, but may have a measured loss. So a folder with such a
    manifest is returned too, if the search reaches it. A damaged manifest's folder is left out.

    Raises `OSError` if the storage fails while a manifest is read. This function runs in the last
    part of a save; after the error `writer.Writer` repeats that part.
    """
    stay = set()
    for step in (*newest, *sorted(others, reverse=True)):
        path = path_of(folder, step)
        if not (path / MANIFEST).is_file():
            continue
        try:
            record, _ = records.read(path)
        except manifest.Damaged:
            continue
        except ValueError:  # of another format
            stay.add(path)
            continue
        if record.evaluated is not None:
            return {*stay, path}
    return stay
