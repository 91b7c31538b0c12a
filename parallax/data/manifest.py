"""Files with their sizes and hashes, so that what is read is what was written, or the file that
differs is named.

A manifest is a record sealed by its own hash: one line of JSON, and one with the hash of that line.
No bit of it turns unseen, and neither does one of the files that it lists.

The hash is XXH3 of 128 bits, at 20 GB/s a core (sha256: 2 GB/s). It finds damage, and is no
signature.
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

CHUNK = 1 << 20  # bytes hashed at a time, without Python's lock; they stay in the processor's cache
THREADS = 4
SEAL = 34  # bytes after the line
PARTIAL = ".*.partial"  # the names of files that were being written


class Damaged(ValueError):
    """A file is not what was written: missing, of another size, or with other bytes. The message
    names it."""


def hasher() -> Any:
    """Returns an empty hash, with `update` and `hexdigest`. Raises `ImportError` without the extra
    `data`."""
    try:
        from xxhash import xxh3_128
    except ImportError as error:
        raise ImportError(
            "Token files and checkpoints are hashed by xxhash: "
            'pip install -e ".[data]" or pip install -e ".[checkpoint]".'
        ) from error
    return xxh3_128()


def hashed(content: Any) -> str:
    """Returns the hash of some bytes, in 32 hexadecimal digits."""
    digest = hasher()
    digest.update(content)
    return digest.hexdigest()


def write(path: Path, record: Mapping[str, Any]) -> None:
    """Stores a record of JSON values at `path`, sealed; the file appears whole or not at all, and
    outlives a power cut.

    Raises `ValueError` for a record that `read` would refuse, since it is too large.
    """
    line = json.dumps(record, sort_keys=True)
    if len(line) > _files.LARGEST - SEAL:
        raise ValueError(
            f"{path}: a manifest has {_files.LARGEST - SEAL} bytes at most; got {len(line)}. "
            f"Note less in it."
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
    _files.sync(path.parent)


def read(path: Path) -> dict[str, Any]:
    """Returns the record that `write` stored at `path`, an object of JSON. What is in it is for the
    caller to check, by `need`.

    Raises `Damaged` where the file is missing, a bit of it has changed, it is no regular file of
    `disk.LARGEST` bytes at most, or it holds no such object.
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
            f"{len(content)} other bytes."
        )
    try:
        record = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        raise Damaged(
            f"{path}: needed a line of JSON, got {len(line)} bytes that are none: {error}."
        ) from error
    need(isinstance(record, dict), path, "an object", record)
    return record


def need(condition: object, place: object, what: str, value: object) -> None:
    """Refuses with `Damaged` a value of a manifest that is not what was needed at `place`, a path
    and perhaps the name in it."""
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
    """Returns the `files` of a manifest at `path`, as `hashes` returned them: one or more, each
    inside the manifest's folder.

    Raises `Damaged` for anything else.
    """
    need(
        isinstance(value, dict) and value, f"{path}: files", "an object with a name or more", value
    )
    for name, entry in value.items():
        parts = PurePosixPath(name).parts
        inside = (
            parts
            and "/".join(parts) == name
            and not name.startswith("/")
            and ".." not in parts
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
    """Refuses a record, read at `path`, whose `format` is not this number.

    Raises `Damaged` for a value that is no number, and another `ValueError` for another number.
    """
    stored = record.get("format")
    need(type(stored) is int and stored > 0, f"{path}: format", "the number of a format", stored)
    if stored != number:
        raise ValueError(
            f"{path}: it is of format {stored}, and this program reads format {number}. "
            "Use the version that wrote it, or write it again."
        )


def hashes(folder: Path, names: Iterable[str]) -> dict[str, list]:
    """Returns the `[size in bytes, hash]` of each named file in `folder`, after it has reached the
    disk."""
    names = sorted(names)
    with ThreadPoolExecutor(THREADS) as pool:
        found = pool.map(lambda name: _size_and_hash(folder / name, sync=True), names)
        return dict(zip(names, found, strict=True))


def check_hashes(folder: Path, files: Mapping[str, list]) -> None:
    """Refuses with `Damaged` any file in `folder` with other bytes than `hashes` found."""
    with ThreadPoolExecutor(THREADS) as pool:
        found = pool.map(lambda name: _size_and_hash(folder / name)[1], files)
        for (name, (_, stored)), digest in zip(files.items(), found, strict=True):
            if digest != stored:
                raise Damaged(
                    f"{folder / name}: needed the hash {stored[:12]}..., the file has other bytes. "
                    "It is damaged."
                )


def check_sizes(folder: Path, files: Mapping[str, list]) -> None:
    """Refuses with `Damaged` any file in `folder` that is missing or of another size than `hashes`
    found."""
    inside = Path(os.path.realpath(folder))
    for name, (size, _) in files.items():
        path = folder / name
        if not Path(os.path.realpath(path)).is_relative_to(inside):
            raise Damaged(
                f"{path}: needed a file of its folder, found a link that leads out of it."
            )
        try:
            with _files.open_file(path, f"a file of {size} bytes") as file:
                found = os.fstat(file.fileno()).st_size
        except FileNotFoundError as error:
            raise Damaged(f"{path}: needed a file of {size} bytes, found no file.") from error
        except ValueError as error:
            raise Damaged(str(error)) from error
        if found != size:
            raise Damaged(
                f"{path}: needed {size} bytes, the file has {found}. It was cut short, or is "
                f"another file."
            )


def check_all_listed(folder: Path, files: Mapping[str, list], among: Iterable[Path]) -> None:
    """Refuses with `Damaged` a file `among` those of `folder` that the manifest does not list."""
    for path in among:
        if path.relative_to(folder).as_posix() not in files:
            raise Damaged(
                f"{path}: needed a file that the manifest lists, found one that it does not know."
            )


def _size_and_hash(path: Path, *, sync: bool = False) -> list:
    digest, size, buffer = hasher(), 0, memoryview(bytearray(CHUNK))
    with _files.open_file(path) as file:
        if sync:
            os.fsync(file.fileno())
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            size += count
    return [size, digest.hexdigest()]
