"""Reads and writes manifests, which list files with their sizes and hashes. If a file is missing or
has changed, an error names the file.

A manifest is a line of JSON, and then a line with the hash of the JSON. So a changed bit is
noticed, both in the manifest itself and in the files that the manifest lists.

The hash is XXH3 with 128 bits, at 20 GB/s per core (sha256: 2 GB/s). The hash finds damage; it does
not protect against an attacker.
"""

import json
import os
import re
import secrets
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

from parallax import _files

CHUNK = 1 << 20  # bytes that are hashed at a time: so many fit into the processor's cache
THREADS = 4  # threads that hash files; hashing releases Python's lock
SEAL = 34  # bytes after the line of JSON: a newline, the hash and a newline
PARTIAL = ".*.partial"  # the names of files while they are written


class Damaged(ValueError):
    """Raised if a file is missing, or if its size or bytes have changed since it was written. The
    message names the file.
    """


def hasher() -> Any:
    """Returns a new hash object, with the methods `update` and `hexdigest`. Raises `ImportError` if
    xxhash is not installed.
    """
    try:
        from xxhash import xxh3_128
    except ImportError as error:
        raise ImportError(
            "Token files and checkpoints need the package xxhash, which is not installed. Run: "
            'pip install -e ".[data]" or pip install -e ".[checkpoint]".'
        ) from error
    return xxh3_128()


def hashed(content: Any) -> str:
    """Returns the hash of some bytes, in 32 hexadecimal digits."""
    digest = hasher()
    digest.update(content)
    return digest.hexdigest()


def write(path: Path, record: Mapping[str, Any]) -> None:
    """Stores a record of JSON values at `path`, with its hash. The file appears complete or not at
    all, and survives a power cut.

    Raises `ValueError` for a record that is larger than `read` allows.
    """
    line = json.dumps(record, sort_keys=True)
    if len(line) > _files.LARGEST - SEAL:
        raise ValueError(
            f"{path}: a manifest has {_files.LARGEST - SEAL} bytes at most; got {len(line)}. "
            f"Store less in it."
        )
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        with open(partial, "x", encoding="utf-8") as file:
            file.write(f"{line}\n{hashed(line.encode())}\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    _files.sync(path.parent)  # the folder's entry of the new name, too, is then on the disk


def read(path: Path) -> dict[str, Any]:
    """Returns the record that `write` stored at `path`, a dictionary of JSON values. The caller
    checks the values with `need`.

    Raises `Damaged` if the file is missing, has changed, is not a regular file, is larger than
    `_files.LARGEST` bytes, or does not hold a JSON object.
    """
    try:
        content = _files.read(path, "a manifest")
    except FileNotFoundError as error:
        raise Damaged(f"{path}: needed a manifest, found no file.") from error
    except ValueError as error:
        raise Damaged(str(error)) from error
    line, _, rest = content.partition(b"\n")
    if rest != f"{hashed(line)}\n".encode():
        raise Damaged(
            f"{path}: the manifest is damaged: needed a line of JSON and its hash, got "
            f"{len(content)} bytes of another form."
        )
    try:
        record = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        raise Damaged(
            f"{path}: needed a line of JSON, got {len(line)} bytes that are no JSON: {error}."
        ) from error
    need(isinstance(record, dict), path, "an object", record)
    return record


def need(condition: object, place: object, what: str, value: object) -> None:
    """Raises `Damaged` if `condition`, a check of `value`, is false.

    `place` is the path of the manifest, perhaps with the name of an entry. `what` describes the
    needed value.
    """
    if not condition:
        shown = (
            repr(value)
            if isinstance(value, bool | int | float | str | None)
            else f"a {type(value).__name__}"
        )
        raise Damaged(
            f"{place}: needed {what}, got {shown[:60]}. The manifest is damaged, or was not "
            f"written by this program."
        )


def files(path: Path, value: Any) -> dict[str, list]:
    """Checks that `value`, the entry `files` of the manifest at `path`, is valid, and returns it.

    `value` must have the form that `hashes` returns, `{name: [size, hash]}`, with at least one
    file. Each name must be a printable, relative path inside the manifest's folder. Raises
    `Damaged` for anything else.
    """
    need(
        isinstance(value, dict) and value, f"{path}: files", "an object with a name or more", value
    )
    for name, entry in value.items():
        parts = PurePosixPath(name).parts
        inside = (
            parts
            and "/".join(parts) == name  # as `hashes` writes it: no "//", "/./" or "/" at the end
            and not name.startswith("/")
            and ".." not in parts
            # so no NUL, which `open` refuses, and no line break in an error
            and name.isprintable()
        )
        need(inside, f"{path}: files", "names of files inside the folder", name)
        place = f"{path}: files: {name}"
        need(isinstance(entry, list) and len(entry) == 2, place, "a size and a hash", entry)
        need(type(entry[0]) is int and entry[0] >= 0, place, "a size in bytes", entry[0])
        need(is_hash(entry[1]), place, "a hash", entry[1])
    return value


def is_hash(value: Any) -> bool:
    """Returns whether a JSON value is a hash in hexadecimal digits."""
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{32}", value) is not None


def check_format(record: Mapping[str, Any], path: Path, number: int) -> None:
    """Checks that the entry `format` of a record, which was read at `path`, is `number`.

    Raises `Damaged` if the entry is not a whole number above 0. Raises a plain `ValueError` if the
    entry is a whole number above 0 that differs from `number`.
    """
    stored = record.get("format")
    need(type(stored) is int and stored > 0, f"{path}: format", "the number of a format", stored)
    if stored != number:
        raise ValueError(
            f"{path}: it is of format {stored}, and this program reads format {number}. "
            "Use the version of the package that wrote this file, or write the file again."
        )


def hashes(folder: Path, names: Iterable[str]) -> dict[str, list]:
    """Returns the `[size in bytes, hash]` of each named file in `folder`, by name. Calls `os.fsync`
    on each file first, so that its bytes are on the disk.
    """
    names = sorted(names)
    with ThreadPoolExecutor(THREADS) as pool:
        entries = pool.map(lambda name: _size_and_hash(folder / name, sync=True), names)
        return dict(zip(names, entries, strict=True))


def check_hashes(folder: Path, files: Mapping[str, list]) -> None:
    """Raises `Damaged` if the hash of a file in `folder` differs from its hash in `files`. `files`
    has the form that `hashes` returns: the `[size, hash]` of each file by name.
    """
    with ThreadPoolExecutor(THREADS) as pool:
        digests = pool.map(lambda name: _size_and_hash(folder / name)[1], files)
        for (name, (_, stored)), digest in zip(files.items(), digests, strict=True):
            if digest != stored:
                raise Damaged(
                    f"{folder / name}: needed bytes with the hash {stored[:12]}..., found other "
                    "bytes. The file is damaged."
                )


def check_sizes(folder: Path, files: Mapping[str, list]) -> None:
    """Raises `Damaged` if a file of `files` is missing in `folder`, has another size, or is a link
    to a place outside the folder.

    `files` has the form that `hashes` returns: the `[size, hash]` of each file by name. Check the
    sizes before the hashes, which take longer.
    """
    inside = Path(os.path.realpath(folder))
    for name, (size, _) in files.items():
        path = folder / name
        if not Path(os.path.realpath(path)).is_relative_to(inside):
            raise Damaged(
                f"{path}: needed a file inside the folder, found a link that leads out of the "
                "folder."
            )
        try:
            # The file is opened, since `open_file` refuses a folder or a pipe.
            with _files.open_file(path, f"a file of {size} bytes") as file:
                found = os.fstat(file.fileno()).st_size
        except FileNotFoundError as error:
            raise Damaged(f"{path}: needed a file of {size} bytes, found no file.") from error
        except ValueError as error:
            raise Damaged(str(error)) from error
        if found != size:
            raise Damaged(
                f"{path}: needed a file of {size} bytes, found {found} bytes. The file was cut "
                "short or replaced."
            )


def check_all_listed(folder: Path, files: Mapping[str, list], among: Iterable[Path]) -> None:
    """Raises `Damaged` if a path of `among` has no entry in `files`. `among` has paths of files in
    `folder`; `files` has the files that the manifest lists, by their names in that folder.
    """
    for path in among:
        if path.relative_to(folder).as_posix() not in files:
            raise Damaged(
                f"{path}: needed a file that the manifest lists, found one that it does not list."
            )


def _size_and_hash(path: Path, *, sync: bool = False) -> list:
    """Returns the size in bytes and the hash of a file. With `sync`, calls `os.fsync` first, so
    that the file's bytes are on the disk.
    """
    digest, size, buffer = hasher(), 0, memoryview(bytearray(CHUNK))
    with _files.open_file(path) as file:
        if sync:
            os.fsync(file.fileno())
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            size += count
    return [size, digest.hexdigest()]
