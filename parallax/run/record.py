"""`Record` has the contents of a checkpoint's manifest. If the manifest is malformed, `read` raises
an error that names the file, and `Checkpoints.restore` tries an older checkpoint.

contents.json    the record alone, written first: it says to which run the folder belongs.
manifest.json    the record and, as `files`, the size and hash of every other file,
                 contents.json too; written last.

`contents.json` and `manifest.json` also hold the number of their format, `format`.
`manifest.need(condition, place, what, value)` raises `Damaged`, with the other arguments in its
message, if the condition is false.
"""

import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parallax.data import manifest

MANIFEST, CONTENTS, ARRAYS = "manifest.json", "contents.json", "arrays"
FORMAT = 4
WIDEST = 16  # bytes of the widest number, a complex128
SLACK = 1 << 30  # bytes that a checkpoint may have in addition to its arrays
STEPS = 2**31  # steps are below this number: processes send them to each other as int32


@dataclasses.dataclass(frozen=True)
class Record:
    """A checkpoint without the bytes of its arrays.

    Args:
        step: the step of the checkpoint.
        settings: the settings of the run.
        note: the JSON values that the training loop stored for itself.
        numbers: the leaves of the state that are Python numbers, by path; a complex number is a
            list of its two parts.
        arrays: the `[dtype, shape]` of each array of the state, by path.
        evaluated: the finite loss that was measured for this state, or None.
    """

    step: int
    settings: dict[str, Any]
    note: dict[str, Any]
    numbers: dict[str, Any]
    arrays: dict[str, list]
    evaluated: float | None = None

    @property
    def text(self) -> str:
        """The record as text, for comparisons. The texts `1`, `1.0` and `true` differ, while the
        Python values are equal.
        """
        return json.dumps(dataclasses.asdict(self), sort_keys=True)


FIELDS = [field.name for field in dataclasses.fields(Record)]


def begin(folder: Path, record: Record) -> None:
    """Makes `folder` for a checkpoint, and writes its record into it."""
    folder.mkdir()
    manifest.write(folder / CONTENTS, dataclasses.asdict(record) | {"format": FORMAT})


def seal(folder: Path, record: Record) -> None:
    """Finishes the checkpoint in `folder`, whose arrays are on the disk: hashes every file and
    writes the manifest.
    """
    names = [CONTENTS, *(path.relative_to(folder).as_posix() for path in arrays_of(folder))]
    files = manifest.hashes(folder, names)
    manifest.write(
        folder / MANIFEST, dataclasses.asdict(record) | {"files": files, "format": FORMAT}
    )


def is_of(folder: Path, step: int, settings: Mapping[str, Any]) -> bool:
    """Returns whether `folder` is a checkpoint, finished or not, of `step` of the run with these
    settings.

    If a record in the folder can be read, it must have this step and these settings. If no record
    can be read, the folder must be empty, except for records that were only partly written: nothing
    is lost if such a folder is removed. If `folder` is a link, the result is False.
    """
    if folder.is_symlink():
        return False
    for name in (CONTENTS, MANIFEST):  # if one cannot be read, the other may be whole
        with contextlib.suppress(ValueError, RecursionError, OSError):
            entries = manifest.read(folder / name)
            entries.pop("files", None)
            record = _typed(entries, folder / name)
            return (record.step, record.settings) == (step, settings)
    # No record could be read. `PARTIAL` matches the names that files have while they are written,
    # so a damaged file with its final name gives False.
    return all(path.match(manifest.PARTIAL) for path in folder.iterdir())


def read(folder: Path) -> tuple[Record, dict[str, list]]:
    """Returns the record of the checkpoint in `folder`, and the `[size, hash]` of each file by
    name. The files themselves are not read.

    Raises `manifest.Damaged` if the manifest is missing or malformed, or lists more bytes than the
    arrays of the record can need. Raises a plain `ValueError` if the manifest's entry `format` is a
    number other than `FORMAT`.
    """
    path = folder / MANIFEST
    entries = manifest.read(path)
    files = manifest.files(path, entries.pop("files", None))
    for name in files:
        manifest.need(
            name == CONTENTS or name.startswith(f"{ARRAYS}/"),
            f"{path}: files",
            f"{CONTENTS} or {ARRAYS}/...",
            name,
        )
    manifest.need(CONTENTS in files, f"{path}: files", f"{CONTENTS} among them", len(files))
    record = _typed(entries, path)
    size, most = sum(size for size, _ in files.values()), most_bytes(record)
    manifest.need(size <= most, f"{path}: files", f"{most} bytes at most, for these arrays", size)
    return record, files


def most_bytes(record: Record) -> int:
    """Returns a generous bound on the bytes of a checkpoint's files. The bound is 1 GiB plus, for
    each element of the arrays, twice the bytes of an element of the widest dtype. A manifest that
    lists more bytes is refused, so that no absurdly large file is hashed.
    """
    return 2 * WIDEST * sum(math.prod(shape) for _, shape in record.arrays.values()) + SLACK


def _typed(entries: dict[str, Any], path: Path) -> Record:
    """Converts the JSON entries that were read from `path` to a `Record`. Raises `manifest.Damaged`
    if the entries are not a valid record; the message names the first wrong entry.
    """
    manifest.check_format(entries, path, FORMAT)
    entries.pop("format")
    manifest.need(
        sorted(entries) == sorted(FIELDS),
        path,
        f"the entries {', '.join(FIELDS)}",
        ", ".join(entries) or "none",
    )
    manifest.need(is_step(entries["step"]), f"{path}: step", "a step, from 0 on", entries["step"])
    for name in FIELDS[1:-1]:  # all but `step` and `evaluated`
        manifest.need(
            isinstance(entries[name], dict), f"{path}: {name}", "an object", entries[name]
        )
    # A complex number is stored as two numbers: its real and its imaginary part.
    for name, number in entries["numbers"].items():
        manifest.need(
            _is_number(number), f"{path}: numbers: {name}", "a finite number, or two", number
        )
    for name, entry in entries["arrays"].items():
        manifest.need(_is_array(entry), f"{path}: arrays: {name}", "a dtype and a shape", entry)
    loss = entries["evaluated"]
    finite = loss is None or (isinstance(loss, float) and math.isfinite(loss))
    manifest.need(finite, f"{path}: evaluated", "a finite loss, or none", loss)
    return Record(**entries)


def verify(folder: Path, step: int, settings: Mapping[str, Any]) -> None:
    """Checks that a folder is the finished checkpoint of `step` of the run with these settings. The
    names and sizes of the files are checked, but not their hashes.

    Raises:
        manifest.Damaged: the checkpoint was not finished, its manifest is wrong, or a file is
            missing or has another size than in the manifest.
        ValueError: the checkpoint is of another run, or has another format.
    """
    if not folder.exists():
        raise manifest.Damaged(
            f"{folder}: needed a folder, found none. The folder may have been removed or renamed."
        )
    # A link to a missing file is not this case: `read` says what is wrong with it.
    if not os.path.lexists(folder / MANIFEST):
        raise manifest.Damaged(
            f"{folder / MANIFEST}: found no file. The checkpoint was not finished, or has "
            f"lost its manifest."
        )
    record, files = read(folder)
    if record.step != step:
        raise manifest.Damaged(
            f"{folder / MANIFEST}: needed the manifest of step {step}, got that of step "
            f"{record.step}."
        )
    if differing := differences(record.settings, settings):
        raise ValueError(
            f"{folder}: this checkpoint comes from another run, which had {differing}. Use the "
            f"settings of that run, or choose another folder."
        )
    check_form(folder, record, files)


def differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """Returns the differences between the settings of another run and of this run as text, such as
    `width=64 (here 128)`; an empty text if the settings agree.
    """
    absent = object()

    def words(value):
        """Returns a setting as text."""
        return "none" if value is absent else repr(value)

    pairs = (
        (name, theirs.get(name, absent), ours.get(name, absent))
        for name in sorted({*theirs, *ours})
    )
    return ", ".join(
        f"{name}={words(a)} (here {words(b)})"
        for name, a, b in pairs
        if a != b and words(a) != words(b)  # nan differs from itself
    )


def check_form(folder: Path, record: Record, files: dict[str, list]) -> None:
    """Raises `manifest.Damaged` if a file that the manifest lists is missing in the folder or has
    another size. Raises this error too if a file of an array is not listed in the manifest, or if
    the manifest's record differs from the record in `contents.json`. `record` and `files` are from
    the manifest. Hashes are not checked.
    """
    # `arrays_of` gives all files below `arrays`. Other files that are not listed are no error.
    manifest.check_all_listed(folder, files, arrays_of(folder))
    manifest.check_sizes(folder, files)
    if _typed(manifest.read(folder / CONTENTS), folder / CONTENTS).text != record.text:
        raise manifest.Damaged(
            f"{folder / MANIFEST}: needed the same record as in {CONTENTS}, got another record. "
            f"The manifest is damaged."
        )


def newest(path: Path) -> tuple[int, list[int]]:
    """Returns two entries of the JSON file `path`: `step`, and `given_up`, the steps that the run
    gave up ([] if the file has no such entry). Raises `manifest.Damaged` if `step` is missing or
    not a step, or if `given_up` is not a list of steps.
    """
    entries = manifest.read(path)
    step, given_up = entries.get("step"), entries.get("given_up", [])
    manifest.need(is_step(step), f"{path}: step", "a step, from 0 on", step)
    are_steps = isinstance(given_up, list) and all(map(is_step, given_up))
    manifest.need(are_steps, f"{path}: given_up", "a list of steps", given_up)
    return step, given_up  # pyright: ignore[reportReturnType]


def is_step(value: Any) -> bool:
    """Returns whether a JSON value can be the number of a step: an int from 0 to `STEPS` - 1."""
    return type(value) is int and 0 <= value < STEPS


def arrays_of(folder: Path) -> list[Path]:
    """Returns the files of the arrays in a checkpoint: all entries below `arrays` that are not
    folders. A link counts as a file.
    """
    return sorted(
        path for path in (folder / ARRAYS).rglob("*") if path.is_symlink() or not path.is_dir()
    )


def _is_number(value: Any) -> bool:
    """Returns whether a JSON value is a finite number, or a list of two: the parts of a complex
    number.
    """
    parts = value if isinstance(value, list) and len(value) == 2 else [value]
    # A state's plain numbers may be bools, which are stored as JSON's true and false.
    return all(
        isinstance(part, bool | int) or (isinstance(part, float) and math.isfinite(part))
        for part in parts
    )


def _is_array(value: Any) -> bool:
    """Returns whether a JSON value describes an array: [dtype, [size of each dim]]."""
    if not (
        isinstance(value, list)
        and len(value) == 2
        and isinstance(value[0], str)
        and isinstance(value[1], list)
    ):
        return False
    return all(type(size) is int and size >= 0 for size in value[1])
