"""Manifests that are whole, sealed, and not manifests: each is refused by name, and the older good
checkpoint is used."""

import contextlib
import copy
import errno
import json
import math
import os
import random
import shutil
import socket

import numpy as np
import pytest
from test_checkpoint import SETTINGS, assert_equal, checkpoints, saved, small_state

from parallax import _files
from parallax.data import manifest
from parallax.run import checkpoint
from parallax.run.retention import Retention

DRAWS = 300
DEEP = 200_000  # lists in lists
DEEP_TEXT = "[" * DEEP + "]" * DEEP
JUNK = [
    None,
    [],
    {},
    0,
    -1,
    1.5,
    math.nan,
    math.inf,
    True,
    "",
    "text",
    [1],
    {"a": 1},
    10**400,
    "deep",
]
PATHS = [
    "/etc/passwd",
    "../00000001/contents.json",
    "arrays/../../x",
    "",
    ".",
    "arrays//x",
    "other",
    "arrays/./x",
    "a\0b",
    "\ud800",
]


def seal(path, record):
    """Write a record as `manifest.write` does, whatever it is; the word `deep` stands for what no
    writer could write."""
    line = json.dumps(record, sort_keys=True).replace('"deep"', DEEP_TEXT).encode()
    path.write_bytes(line + f"\n{manifest.hashed(line)}\n".encode())


def unseal(path):
    return json.loads(path.read_bytes().partition(b"\n")[0])


def malformed(record, generator):
    """The record with one fault."""
    new = copy.deepcopy(record)
    name = generator.choice(sorted(record))
    junk = generator.choice(JUNK)
    kind = generator.choice(
        ["whole", "entry", "gone", "unknown", "inside", "path", "unlisted", "size"]
    )
    inside = generator.choice(
        [name for name, value in record.items() if isinstance(value, dict) and value]
    )
    file = generator.choice(sorted(record["files"]))
    if kind == "whole":
        new = junk
    elif kind == "entry":
        new[name] = junk
    elif kind == "gone":
        del new[name]
    elif kind == "unknown":
        new["more"] = junk
    elif kind == "inside":
        new[inside][generator.choice(sorted(record[inside]))] = junk
    elif kind == "path":
        new["files"][generator.choice(PATHS)] = new["files"].pop(file)
    elif kind == "unlisted":
        del new["files"][file]
    else:
        new["files"][file][generator.randrange(2)] = junk
    return new


def special(kind, path):
    """A file at `path` that nobody can read to its end."""
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "link to itself":
            path.symlink_to(path.name)
        case "sparse":
            with path.open("wb") as file:
                file.truncate(20 << 30)
        case "socket":
            with (
                contextlib.closing(socket.socket(socket.AF_UNIX)) as end,
                contextlib.chdir(path.parent),
            ):
                end.bind(path.name)


SPECIAL = ["pipe", "device", "link to itself", "sparse", "socket"]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("two"))


@pytest.fixture
def folder(two, tmp_path):
    shutil.copytree(two, tmp_path / "copy")
    return tmp_path / "copy"


@pytest.mark.sweep(3, "wholes")
def test_every_malformed_manifest_is_passed_over(folder, pytestconfig):
    path, generator = folder / "00000002" / "manifest.json", random.Random(pytestconfig.option.seed)
    good, said = unseal(path), []
    store = checkpoints(folder, say=said.append)
    same = lambda new: json.dumps(new, sort_keys=True) == json.dumps(good, sort_keys=True)
    drawn = 0
    while drawn < DRAWS:
        new = malformed(good, generator)
        if same(new):
            continue
        seal(path, new)
        store.refused = {}
        assert store._newest_good() == 1, new
        assert str(path.parent) in str(store.refused[2])
        assert said.pop() == f"refused the checkpoint of step 2: {store.refused[2]}"
        drawn += 1
    restored = store.restore(small_state())
    assert restored.step == 1
    assert_equal(restored.state, small_state(1))


@pytest.mark.parametrize("step", [*JUNK, -7, 2**31, "2", [2]])
def test_a_malformed_newest_is_told_and_passed_over(folder, step):
    path = folder / "newest.json"
    for record in ({"step": step}, step, {}):
        seal(path, record)
        said = []
        assert checkpoints(folder, say=said.append)._newest_good() == 2
        assert step == 0 or str(path) in said[0]
    for number in (1, 2):
        shutil.rmtree(folder / f"0000000{number}")
    with pytest.raises(
        checkpoint.Refused,
        match=r"none of them may be restored:\n  .*newest\.json: step: needed a step, from 0 on",
    ):
        checkpoints(folder).restore(small_state())


def refused(folder):
    restored = checkpoints(folder).restore(small_state())
    assert restored.step == 1
    return restored.refused[2]


@pytest.mark.parametrize(
    ("name", "value"), [("position", 15), ("position", 14.0), ("on", 1), ("loss_scale", 0.25)]
)
def test_a_number_that_is_not_the_one_written_is_refused(folder, name, value):
    """It stands in no array: `contents.json` has it too, and is hashed."""
    path = folder / "00000002" / "manifest.json"
    record = unseal(path)
    assert record["numbers"][name] != value or type(record["numbers"][name]) is not type(value)
    record["numbers"][name] = value
    seal(path, record)
    assert "manifest.json: needed the same record as in contents.json" in refused(folder)


def test_a_dtype_that_is_not_that_of_the_bytes_is_refused(folder):
    path = folder / "00000002" / "manifest.json"
    record = unseal(path)
    record["arrays"]["weight"] = ["float64", [8, 4]]
    seal(path, record)
    assert "needed the same record as in contents.json" in refused(folder)


def test_a_file_that_no_manifest_lists_is_refused(folder):
    (folder / "00000002" / "arrays" / "more").write_text("more")
    assert "arrays/more: needed a file that the manifest lists" in refused(folder)


def test_a_link_that_leads_out_is_refused(folder, tmp_path):
    path = next(
        path for path in sorted((folder / "00000002" / "arrays").rglob("*")) if path.is_file()
    )
    shutil.move(path, tmp_path / "outside")
    path.symlink_to(tmp_path / "outside")
    assert "needed a file inside the folder, found a link that leads out of the folder" in refused(
        folder
    )


@pytest.mark.parametrize("name", PATHS)
def test_a_path_that_leads_out_is_refused(folder, name):
    """Where the manifest speaks the truth of the file there, too."""
    path = folder / "00000002" / "manifest.json"
    record = unseal(path)
    outside = (folder / "00000001" / "contents.json").read_bytes()
    record["files"][name] = [len(outside), manifest.hashed(outside)]
    seal(path, record)
    assert "files: needed " in refused(folder)


def test_a_manifest_that_is_a_folder_is_refused_and_goes_when_it_is_old(folder):
    path = folder / "00000002" / "manifest.json"
    path.unlink()
    path.mkdir()
    assert f"{path}: needed a manifest, found a folder" in refused(folder)
    with checkpoints(folder, keep=Retention(1)) as store:
        store.restore(small_state())
        store.save(3, small_state(3))
    assert store.steps() == [3]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize(
    "name",
    ["newest.json", "00000002/manifest.json", "00000002/contents.json", "00000002/arrays/more"],
)
def test_only_regular_files_are_read_up_to_a_size(folder, name, kind):
    path, said = folder / name, []
    path.unlink(missing_ok=True)
    special(kind, path)
    restored = checkpoints(folder, say=said.append).restore(small_state())
    assert restored.step == (2 if name == "newest.json" else 1)
    assert f"{path}: needed " in (said[0] if name == "newest.json" else restored.refused[2])


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
def test_a_newest_that_cannot_be_read_is_told_and_passed_over(folder, number, monkeypatch):
    read, said = _files.read, []

    def broken(path, *rest, **options):
        if path.name == "newest.json":
            raise OSError(number, os.strerror(number))
        return read(path, *rest, **options)

    monkeypatch.setattr(_files, "read", broken)
    assert checkpoints(folder, say=said.append).restore(small_state()).step == 2
    assert said[0] == f"{folder / 'newest.json'}: it cannot be read; {os.strerror(number)}."


@pytest.mark.timeout(120)
def test_files_that_are_larger_than_the_arrays_are_not_hashed(folder):
    """A file of 200 GB without a byte on the disk takes minutes to hash."""
    path = folder / "00000002" / "manifest.json"
    record = unseal(path)
    name = next(name for name in sorted(record["files"]) if name.startswith("arrays/"))
    os.truncate(path.parent / name, 200 << 30)
    record["files"][name][0] = 200 << 30
    seal(path, record)
    assert "manifest.json: files: needed 1073" in refused(folder)


def test_folders_of_other_names_are_left_alone(folder):
    for name in ("5", "000000003", "99999999999", "\u0663" * 8):
        (folder / name).mkdir()
    assert checkpoints(folder).restore(small_state()).step == 2
    saved(folder, [3], keep=Retention(1))
    assert len([path for path in folder.iterdir() if path.is_dir()]) == 5


def test_notes_and_settings_come_back_as_they_were(tmp_path):
    """What JSON has no number for, too."""
    note = {"best": math.inf, "worst": math.nan, "nested": {"list": [1, None, "a"]}}
    with checkpoints(tmp_path) as store:
        store.save(1, small_state(1), note)
    found = checkpoints(tmp_path, SETTINGS).restore(small_state()).note
    np.testing.assert_equal(found, note)
