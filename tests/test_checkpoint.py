"""What was saved comes back bit for bit, on any layout; what is not as it was saved is refused by
name."""

import contextlib
import enum
import errno
import functools
import os
import random
import resource
import shutil
import stat
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from reference import EXACT, FLOAT64, windows

from parallax import mesh
from parallax.data import manifest
from parallax.layout import Layout
from parallax.models import decoder, gpt2
from parallax.run import checkpoint, retention, stored
from parallax.run import record as records
from parallax.run.checkpoint import Checkpoints
from parallax.run.retention import Retention
from parallax.trees import DiskForm

SETTINGS = {"width": 16, "seed": 0}


def small_state(number: int = 0, *, on: P | None = None):
    """One of every kind of leaf, with numbers that need all their digits."""
    axes = mesh.make(data=4, tensor=2)
    arrays = {
        "weight": np.arange(32.0, dtype=np.float32).reshape(8, 4) / 3 + number,
        "scale": np.float64(2.0**number / 3),
    }
    placed = mesh.place(arrays, {"weight": P("data") if on is None else on, "scale": P()}, axes)
    key = jax.device_put(jax.random.fold_in(jax.random.key(1), number), mesh.shardings(P(), axes))
    rbg = jax.random.key(number, impl="rbg")
    plain = {
        "position": 7 * number,
        "loss_scale": 0.5,
        "on": True,
        "call": jnp.tanh,
        "host": np.arange(3),
    }
    return placed | {"key": key, "rbg": rbg} | plain


def assert_equal(tree, reference):
    def check(path, leaf, other):
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf, other = jax.random.key_data(leaf), jax.random.key_data(other)
        assert type(leaf) is type(other), path
        if hasattr(leaf, "dtype"):
            assert (leaf.dtype, leaf.shape) == (other.dtype, other.shape), path
            np.testing.assert_array_equal(leaf, other, err_msg=jax.tree_util.keystr(path))
        else:
            assert leaf == other, path

    jax.tree.map_with_path(check, tree, reference)


def checkpoints(folder, run=SETTINGS, **options):
    return Checkpoints(folder, settings=run, say=options.pop("say", lambda line: None), **options)


def saved(folder, steps=(1, 2), **options):
    """A folder with a checkpoint for each of the steps."""
    with checkpoints(folder, **options) as store:
        for number in steps:
            store.save(number, small_state(number), note={"seen": number})
    return Path(folder)


def files_of(folder, number):
    return sorted(path for path in (folder / f"{number:08d}").rglob("*") if path.is_file())


# What is written


def test_a_manifest_is_on_the_disk_before_write_returns(tmp_path, monkeypatch):
    """The file, then its name in the folder: both outlive a power cut."""
    happened, replace = [], os.replace
    monkeypatch.setattr(
        os,
        "fsync",
        lambda of: happened.append("folder" if stat.S_ISDIR(os.fstat(of).st_mode) else "file"),
    )
    monkeypatch.setattr(os, "replace", lambda *paths: happened.append("named") or replace(*paths))
    manifest.write(tmp_path / "manifest.json", {"step": 1})
    assert happened == ["file", "named", "folder"]


# What comes back


@pytest.mark.parametrize(
    "on", [P("data"), P(("data", "tensor")), P("tensor", "data"), P()], ids=str
)
def test_every_leaf_comes_back_where_it_was_asked_for(tmp_path, on):
    saved(tmp_path, [3])
    like = small_state(9, on=on)
    step_, state, note, refused = checkpoints(tmp_path).restore(like)
    assert (step_, note, refused) == (3, {"seen": 3}, {})
    assert_equal(state, small_state(3))
    assert state["weight"].sharding == like["weight"].sharding
    assert state["key"].sharding == like["key"].sharding


def test_shapes_are_enough_to_restore_to(tmp_path):
    saved(tmp_path, [3])
    like = small_state(9)
    shape = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
    like = jax.tree.map(lambda leaf: shape(leaf) if isinstance(leaf, jax.Array) else leaf, like)
    assert_equal(checkpoints(tmp_path).restore(like).state, small_state(3))


def test_a_new_folder_holds_nothing(tmp_path):
    assert checkpoints(tmp_path / "new").restore(small_state()) is None


def test_leaves_of_size_zero_come_back(tmp_path):
    """As a queue with nothing in it yet; Orbax alone refuses them."""
    axes = mesh.make(data=4, tensor=2)
    placed = mesh.place(np.zeros((8, 0), np.float32), P("data"), axes)
    state = {
        "none": placed,
        "host": np.zeros((0, 3), np.int32),
        "keys": jax.random.split(jax.random.key(0), 0),
    }
    state |= mesh.place(
        {"weight": jnp.arange(3.0), "half": jnp.zeros(0, jnp.bfloat16)},
        {"weight": P(), "half": P()},
        axes,
    )
    with checkpoints(tmp_path) as store:
        store.save(1, state)
        store.wait()
        restored = store.restore(state).state
        with pytest.raises(
            ValueError, match=r"none: needed float32\[0, 8\], the checkpoint has float32\[8, 0\]"
        ):
            store.restore(state | {"none": placed.T})
    assert_equal(restored, state)
    assert restored["none"].sharding == placed.sharding


@pytest.mark.sweep(3, "wholes")
def test_numbers_of_every_dtype_are_looked_at():
    """The largest ones too, many of which overflow what they are summed in."""
    kinds = [
        "float64",
        "float32",
        "float16",
        "bfloat16",
        "complex64",
        "complex128",
        "float8_e4m3fn",
        "float8_e5m2",
    ]
    arrays = {kind: jnp.full((8, 1000), jnp.finfo(kind).max, kind) for kind in kinds}
    arrays |= {kind: arrays[kind] * 1j for kind in kinds if kind.startswith("complex")}
    whole = {"whole": jnp.full(3, 2**31 - 1, jnp.int32), "none": jnp.zeros((0, 2), jnp.float32)}
    assert stored.not_finite(arrays | whole)() == []
    for lost in ("nan", "inf", "-inf"):
        at = {
            kind: array.at[5, 7].set(jnp.asarray(float(lost)).astype(kind))
            for kind, array in arrays.items()
        }
        at |= {
            f"{kind}, imaginary": at[kind].at[5, 7].set(jnp.asarray(complex(1, float(lost)), kind))
            for kind in kinds[4:6]
        }
        assert stored.not_finite(at | whole)() == sorted(at)


def test_a_note_is_as_it_was_when_the_save_began(tmp_path):
    """A loop goes on counting in its list while the manifest waits for the arrays."""
    counted = [1]
    with checkpoints(tmp_path) as store:
        store.save(1, small_state(1), note={"skipped": counted})
        counted.append(2)
    assert manifest.read(tmp_path / "00000001" / "manifest.json")["note"] == {"skipped": [1]}


def test_a_run_comes_back_to_its_folder_while_its_own_writer_is_at_work(tmp_path, monkeypatch):
    """As where copies differ during a save: the loop ends by an error, and begins again."""
    seal, go = records.seal, threading.Event()
    monkeypatch.setattr(records, "seal", lambda *arguments: go.wait(60) and seal(*arguments))
    of = checkpoints(tmp_path)
    with contextlib.suppress(RuntimeError), of:
        of.save(1, small_state(1))
        raise RuntimeError
    with of:
        go.set()
        of.wait()
    assert_equal(of.restore(small_state()).state, small_state(1))
    with checkpoints(tmp_path):
        pass


def test_the_state_may_be_donated_at_once(tmp_path):
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = jax.device_put(
        np.arange(4_000_000, dtype=np.float32), mesh.shardings(P("data"), mesh.make(data=8))
    )
    with checkpoints(tmp_path) as store:
        store.save(1, {"x": x})
        for _ in range(5):
            x = jax.block_until_ready(add(x))
    found = checkpoints(tmp_path).restore({"x": x}).state["x"]
    np.testing.assert_array_equal(found, np.arange(4_000_000, dtype=np.float32))


def test_keeps_the_last_and_every_nth(tmp_path):
    saved(tmp_path, range(1, 11), keep=Retention(2, every=4))
    assert checkpoints(tmp_path).steps() == [4, 8, 9, 10]


def test_what_killed_runs_left_goes_with_the_next_save(tmp_path):
    """Half-written files, an unfinished checkpoint, one that was being replaced."""
    saved(tmp_path, [1])
    for number in range(3):
        (tmp_path / f".newest.json.{number:08x}.partial").write_text("half")
    for name in ("00000002", "00000002.replaced"):
        records.begin(tmp_path / name, records.Record(2, SETTINGS, {}, {}, {}))
        (tmp_path / name / "arrays.orbax-checkpoint-tmp").mkdir()
    (tmp_path / "00000000").mkdir()  # killed before it said what it would be
    with checkpoints(tmp_path, keep=Retention(2, every=2)) as store:
        assert store.restore(small_state()).step == 1
        store.save(3, small_state(3))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "00000001",
        "00000003",
        "newest.json",
    ]


def test_a_removal_that_is_cut_short_says_whose_it_was(tmp_path, monkeypatch):
    """Until nothing else is left: so the next save takes the rest away."""
    saved(tmp_path, [1])
    removed, stops = shutil.rmtree, True

    def rmtree(path):
        if stops and Path(path).name == "00000001":
            raise KeyboardInterrupt
        removed(path)

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    with contextlib.suppress(KeyboardInterrupt):
        retention.remove(tmp_path / "00000001")
    assert records.is_of(tmp_path / "00000001", 1, SETTINGS)
    assert sorted(path.name for path in (tmp_path / "00000001").iterdir()) == ["contents.json"]
    stops = False
    saved(tmp_path, [2])
    assert checkpoints(tmp_path).steps() == [2]
    assert not (tmp_path / "00000001").exists()


def test_the_newest_one_that_was_evaluated_stays_until_a_newer_one_was(tmp_path):
    with checkpoints(tmp_path, keep=Retention(2)) as store:
        for number in range(1, 9):
            store.save(
                number,
                small_state(number),
                evaluated={3: 2.5, 5: float("nan"), 6: 2.25}.get(number),
            )
            store.wait()
            assert (3 in store.steps()) == (3 <= number < 6)
    assert store.steps() == [6, 7, 8]
    with checkpoints(tmp_path / "other", keep=Retention(9)) as store:
        for number in range(1, 5):
            store.save(number, small_state(number), evaluated=2.0 if number in (2, 3) else None)
    with checkpoints(tmp_path / "other", keep=Retention(1)) as store:
        store.save(5, small_state(5))
    assert store.steps() == [3, 5]


def test_a_damaged_old_manifest_stops_no_later_save(tmp_path):
    """It goes with the other old ones; one of another format stays."""
    saved(tmp_path, [1, 2, 3], keep=Retention(9))
    (tmp_path / "00000001" / "manifest.json").write_text("{")
    resealed(tmp_path / "00000002" / "manifest.json", format=5)
    with checkpoints(tmp_path, keep=Retention(1)) as store:
        store.save(4, small_state(4))
    assert store.steps() == [2, 4]


STRANGERS = ("7", "00000001", "old.replaced", "00000001.replaced", "notes.replaced", "00000000")


def test_what_this_run_did_not_make_stays(tmp_path):
    """Folders of the user's with such names, with and without a file; through a link; another run's
    checkpoint at our step."""
    run, elsewhere = tmp_path / "run", saved(tmp_path / "elsewhere", [2, 3, 4], keep=Retention(9))
    theirs = saved(tmp_path / "theirs", [4], run=SETTINGS | {"width": 32})
    for name in STRANGERS:
        (run / name / "deep").mkdir(parents=True)
        (run / name / "deep" / "thesis.txt").write_text("the only copy")
    (run / "00000002").symlink_to(elsewhere / "00000002")
    (run / "00000003.replaced").symlink_to(elsewhere / "00000003")
    (run / ".mine.partial").write_text("the only copy")
    shutil.copytree(theirs / "00000004", run / "00000004")
    before = {
        path: path.read_bytes()
        for path in tmp_path.rglob("*")
        if path.is_file() and path.name != "newest.json"
    }
    with checkpoints(run, keep=Retention(1)) as store:
        assert store.restore(small_state()).step == 2  # ours, by a link
        for number in (3, 4, 5, 6):
            store.save(number, small_state(number))
    moved = {run / "00000004": run / "00000004.replaced"}  # to where it can be had again
    for path, content in before.items():
        here = next(
            (new / path.relative_to(old) for old, new in moved.items() if path.is_relative_to(old)),
            path,
        )
        assert here.read_bytes() == content, path
    assert (run / "00000002").is_symlink()
    assert store.steps() == [2, 6]


def test_one_from_before_a_step_is_given_and_the_later_ones_go_as_the_run_comes_by(tmp_path):
    saved(tmp_path, [2, 4, 6], keep=Retention(5))
    with checkpoints(tmp_path, keep=Retention(5)) as store:
        assert store.restore(small_state(), before=4).step == 2
        assert store.restore(small_state(), before=5).step == 4
        store.save(5, small_state(5))
        store.wait()
        assert store.steps() == [2, 4, 5, 6]
        store.save(6, small_state(7))
    assert store.steps() == [2, 4, 5, 6]
    assert_equal(checkpoints(tmp_path).restore(small_state()).state, small_state(7))
    assert (
        checkpoints(tmp_path).restore(small_state(), before=2).step == 6
    )  # there is none from before


@pytest.mark.parametrize("then", [(), (4, 5)])
def test_a_restart_does_not_return_to_what_a_rollback_left(tmp_path, then):
    """Killed before and after its first saves. Until a save comes by, nothing is removed."""
    saved(tmp_path, [2, 6, 8], keep=Retention(9))
    with checkpoints(tmp_path, keep=Retention(9)) as store:
        assert store.restore(small_state(), before=5).step == 2
        for number in then:
            store.save(number, small_state(number))
    said = []
    with checkpoints(tmp_path, keep=Retention(9), say=said.append) as store:
        assert store.steps() == [2, *then, 6, 8]
        restored = store.restore(small_state())
        assert restored.step == (then or (2,))[-1]
        assert list(restored.refused) == [6, 8]
        assert said[0].endswith(
            "00000006: the run went back to an earlier checkpoint. To use this one all the same, "
            "restore with before=7."
        )
        store.save(7, small_state(7))
    assert store.steps() == [2, *then, 7, 8]
    assert checkpoints(tmp_path).restore(small_state()).step == 7
    with checkpoints(tmp_path) as store:
        assert store.restore(small_state(), before=9).step == 8  # the user wants it after all
    assert checkpoints(tmp_path).restore(small_state()).step == 8


def test_a_reader_without_the_lock_decides_nothing(tmp_path):
    saved(tmp_path)
    before = (tmp_path / "newest.json").read_bytes()
    assert checkpoints(tmp_path).restore(small_state(), before=2).step == 1
    assert (tmp_path / "newest.json").read_bytes() == before
    assert checkpoints(tmp_path).restore(small_state()).step == 2


def test_a_weakly_typed_array_is_weak_again(tmp_path):
    """So the next step has the dtypes of a run without a restart."""
    state = {"rate": jnp.asarray(0.1), "p": jnp.ones(3, jnp.bfloat16)}
    with checkpoints(tmp_path) as store:
        store.save(1, state)
    got = store.restore(state).state
    assert (got["rate"].weak_type, got["p"].weak_type) == (True, False)
    assert_equal(got, state)
    assert (got["p"] - got["rate"] * got["p"]).dtype == jnp.bfloat16


class Phase(enum.IntEnum):
    WARM = 1
    COLD = 2


class Rate(float):
    pass


def test_subclasses_of_numbers_come_back(tmp_path):
    state = {"w": jnp.ones(3), "phase": Phase.COLD, "rate": Rate(0.5)}
    with checkpoints(tmp_path) as store:
        store.save(1, state)
    got = store.restore(state | {"phase": Phase.WARM}).state
    assert (got["phase"], got["rate"]) == (Phase.COLD, 0.5)
    assert (type(got["phase"]), type(got["rate"])) == (Phase, Rate)


def test_a_large_number_of_numpy_is_finite(tmp_path):
    state = {"w": jnp.ones(3, jnp.float32), "host": np.array([1e300, 2.0])}
    with jax.enable_x64(False), checkpoints(tmp_path) as store:  # it is inf in float32
        store.save(1, state)
    np.testing.assert_array_equal(store.restore(state).state["host"], state["host"])
    with pytest.raises(ValueError, match="not finite: host"):
        store.save(2, state | {"host": np.array([np.inf, 2.0])})


# What is refused


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_state_that_is_not_finite_is_neither_stored_nor_restored(tmp_path, number):
    state = small_state(3)
    state["weight"] = state["weight"].at[5, 2].set(number)  # of one device alone
    with checkpoints(tmp_path) as store:
        store.save(1, small_state(1))
        with pytest.raises(
            ValueError,
            match=r"state of step 3 was not saved, because these arrays are not finite: weight\. "
            r"The newest .*00000001\.",
        ):
            store.save(3, state)
        assert store.steps() == [1]
        assert not retention.path_of(tmp_path, 3).exists()  # what was begun is gone
        store.save(2, small_state(2))  # and the writer goes on
        store.wait()
        assert store.steps() == [1, 2]
    with checkpoints(tmp_path, finite=lambda path: path != "weight") as store:
        store.save(3, state)
    assert_equal(store.restore(small_state()).state, state)
    restored = checkpoints(tmp_path).restore(small_state())
    assert restored.step == 2
    assert_equal(restored.state, small_state(2))
    assert "00000003: needed a finite state; nan or inf is in weight." in restored.refused[3]


@pytest.mark.parametrize(
    "kind", ["a folder where a file should be", "an error of the disk", "not allowed"]
)
def test_what_cannot_be_read_is_named_and_passed_over(tmp_path, monkeypatch, kind):
    path = files_of(saved(tmp_path), 2)[0]
    if kind == "a folder where a file should be":
        path.unlink()
        path.mkdir()
    else:
        error = (
            PermissionError(errno.EACCES, "Permission denied")
            if kind == "not allowed"
            else OSError(errno.EIO, "I/O error")
        )
        opened = open

        def fails(name, *options, **more):
            if Path(name) == path:
                error.filename = str(name)
                raise error
            return opened(name, *options, **more)

        monkeypatch.setattr("builtins.open", fails)
    said = []
    restored = checkpoints(tmp_path, say=said.append).restore(small_state())
    assert restored.step == 1
    assert str(path) in restored.refused[2]
    assert str(path) in said[0]


def resealed(path, **changes):
    """Change a manifest and its contents as somebody who knows the format."""
    record = manifest.read(path) | changes
    manifest.write(path, {name: value for name, value in record.items() if value is not None})


def test_another_format_is_refused_in_a_sentence_and_stays(tmp_path):
    saved(tmp_path)
    resealed(tmp_path / "00000002" / "manifest.json", format=5)
    with checkpoints(tmp_path, keep=Retention(1)) as store:
        restored = store.restore(small_state())
        assert (
            "it is of format 5, and this program reads format 4. Use the version of the package "
            "that wrote this file" in restored.refused[2]
        )
        store.save(3, small_state(3))
    assert (tmp_path / "00000002" / "manifest.json").exists()
    resealed(tmp_path / "00000003" / "manifest.json", format="2")
    with pytest.raises(checkpoint.Refused, match="needed the number of a format, got '2'"):
        checkpoints(tmp_path).restore(small_state())


def damage(kind, folder, number, generator):
    """Turn one bit of the checkpoint, each as likely as any other; or cut short, or remove, one of
    its files."""
    sizes = {path: path.stat().st_size for path in files_of(folder, number)}
    (path,) = generator.choices(list(sizes), list(sizes.values()))
    content = bytearray(path.read_bytes())
    if kind == "missing":
        path.unlink()
    elif kind == "truncated":
        path.write_bytes(content[: generator.randrange(len(content))])
    else:
        place = generator.randrange(8 * len(content))
        content[place // 8] ^= 1 << place % 8
        path.write_bytes(content)
    return path


def refused_after(kind, folder, scratch, seed):
    shutil.copytree(folder, scratch)
    path = damage(kind, scratch, 2, random.Random(seed))
    said = []
    restored = checkpoints(scratch, say=said.append).restore(small_state())
    assert restored.step == 1
    assert_equal(restored.state, small_state(1))
    assert str(path) in restored.refused[2]
    assert any(str(path) in line for line in said)
    shutil.rmtree(scratch)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("two"))


@pytest.mark.sweep(3)
@pytest.mark.parametrize("kind", ["bit", "truncated", "missing"])
def test_damage_is_refused_by_name_and_the_one_before_is_restored(two, tmp_path, kind):
    for seed in range(10):
        refused_after(kind, two, tmp_path / "copy", seed)


@pytest.mark.sweep(3)
@pytest.mark.long
@pytest.mark.parametrize("kind", ["bit", "truncated", "missing"])
def test_a_hundred_times(two, tmp_path, kind):
    for seed in range(100, 200):
        refused_after(kind, two, tmp_path / "copy", seed)


@pytest.mark.parametrize("name", ["manifest.json", "arrays/manifest.ocdbt"])
def test_a_file_of_another_run_is_refused_by_name(tmp_path, name):
    ours, theirs = (
        saved(tmp_path / "ours"),
        saved(tmp_path / "theirs", run=SETTINGS | {"width": 32}),
    )
    shutil.copy(theirs / "00000002" / name, ours / "00000002" / name)
    said = []
    assert checkpoints(ours, say=said.append).restore(small_state()).step == 1
    assert "00000002" in said[0]
    assert ("width=32 (here 16)" if name == "manifest.json" else name) in said[0]


def test_a_checkpoint_of_another_run_is_refused_with_what_differs(tmp_path):
    saved(tmp_path)
    with pytest.raises(
        checkpoint.Refused,
        match=r"(?s)step 2: .*00000002.*another run, which had depth=none \(here 2\), seed=0 "
        r"\(here 1\)\..*step 1: ",
    ):
        checkpoints(tmp_path, SETTINGS | {"seed": 1, "depth": 2}).restore(small_state())
    differing = records.differences({"a": 1, "b": 2, "c": None}, {"a": 1, "b": 3, "d": "x"})
    assert differing == "b=2 (here 3), c=None (here none), d=none (here 'x')"


def test_a_checkpoint_under_another_step_is_refused(tmp_path):
    (saved(tmp_path) / "00000002").rename(tmp_path / "00000007")
    restored = checkpoints(tmp_path).restore(small_state())
    assert restored.step == 1
    assert "needed the manifest of step 7, got that of step 2" in restored.refused[7]
    assert "00000002: needed a folder, found none" in restored.refused[2]


@pytest.mark.parametrize("loss", ["manifests", "folders"])
def test_a_run_that_lost_all_does_not_begin_again(tmp_path, loss):
    saved(tmp_path)
    for folder in (tmp_path / "00000001", tmp_path / "00000002"):
        shutil.rmtree(folder) if loss == "folders" else (folder / "manifest.json").unlink()
    with pytest.raises(
        checkpoint.Refused,
        match=r"held finished checkpoints, and none of them may be restored:\n  step 2: ",
    ):
        checkpoints(tmp_path).restore(small_state())


def test_a_first_save_that_was_cut_short_is_no_checkpoint(tmp_path):
    saved(tmp_path, [5])
    (tmp_path / "00000005" / "manifest.json").unlink()
    (tmp_path / "newest.json").unlink()
    said = []
    store = checkpoints(tmp_path, say=said.append)
    assert store.restore(small_state()) is None
    assert "was not finished" in said[0]
    with store:
        store.save(5, small_state(5))
    assert_equal(checkpoints(tmp_path).restore(small_state()).state, small_state(5))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000005", "newest.json"]


# Nothing good is replaced by something worse


def test_steps_do_not_go_back(tmp_path):
    saved(tmp_path, [4, 8])
    with checkpoints(tmp_path) as store:
        for number in (8, 5):
            with pytest.raises(
                ValueError,
                match=f"finished checkpoint of step 8, so step {number} cannot be saved",
            ):
                store.save(number, small_state())
    assert checkpoints(tmp_path).steps() == [4, 8]


def test_a_damaged_one_is_replaced_when_the_run_comes_by_again(tmp_path):
    saved(tmp_path, [1, 2, 3], keep=Retention(2))
    for number in (2, 3):
        damage("bit", tmp_path, number, random.Random(number))
    with pytest.raises(checkpoint.Refused):
        checkpoints(tmp_path).restore(small_state())
    saved(tmp_path / "other", [1])
    shutil.copytree(tmp_path / "other" / "00000001", tmp_path / "00000001")
    with checkpoints(tmp_path, keep=Retention(2)) as store:
        assert store.restore(small_state()).step == 1
        for number in (2, 3, 4):
            store.save(number, small_state(number))
            store.wait()
            assert 1 in store.steps() or number > 2  # of the good ones, the last two stay
    assert store.steps() == [3, 4]
    assert_equal(checkpoints(tmp_path).restore(small_state()).state, small_state(4))


def can_mount(folder):
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", folder]
    return subprocess.run(mount, capture_output=True, check=False).returncode == 0


# Orbax closes its event loop when the first write fails; another thread's report may come later,
# and has nowhere to go.
@pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("how", ["a small file system", "a limit to a file's size"])
def test_a_full_disk_leaves_the_newest_good_one(tmp_path, how):
    mounted = how == "a small file system" and shutil.which("mount") and can_mount(tmp_path)
    try:
        saved(tmp_path, [1])
        noise = {"big": jax.device_put(np.random.default_rng(0).standard_normal(1_000_000))}  # 8 MB
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        if not mounted:
            resource.setrlimit(resource.RLIMIT_FSIZE, (3_000_000, before[1]))
        try:
            store = checkpoints(tmp_path, tries=1)
            message = (
                r"(?s)of step 2 in .*00000002 was not saved: .*newest finished one is .*00000001\."
            )
            with pytest.raises(OSError, match=message), store:
                store.save(2, noise)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        again = checkpoints(tmp_path)
        assert again.restore(small_state()).step == 1
        if mounted:
            subprocess.run(["mount", "-o", "remount,size=30m", tmp_path], check=True)
        with again:
            again.save(2, noise)
        np.testing.assert_array_equal(
            checkpoints(tmp_path).restore(noise).state["big"], noise["big"]
        )
    finally:
        if mounted:
            subprocess.run(["umount", tmp_path], check=True)


# Mistakes


def test_another_state_is_refused_by_its_leaves(tmp_path):
    saved(tmp_path, [1])
    like = small_state()
    wrong = {k: v for k, v in like.items() if k != "position"} | {
        "weight": like["weight"][:4],
        "more": like["scale"],
    }
    with pytest.raises(
        ValueError, match="the arrays are not those of the state to restore"
    ) as caught:
        checkpoints(tmp_path).restore(wrong)
    for words in (
        "more: needed float64[], the checkpoint has nothing",
        "position: needed nothing, the checkpoint has int[]",
        "weight: needed float32[4, 4], the checkpoint has float32[8, 4]",
    ):
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": Retention(0)}, r"`keep` must be 1 or more; got Retention\(newest=0"),
        ({"keep": Retention(every=0)}, r"got Retention\(newest=3, every=0\)"),
        ({"tries": 0}, "`tries` must be 1 or more; got 0"),
        (
            {"run": {"rate": np.ones(2)}},
            r"`settings` needs JSON values .*; 'rate' is of type ndarray \(.*\)\. Convert an array",
        ),
    ],
)
def test_options_are_checked(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        checkpoints(tmp_path, **options)


def test_states_that_cannot_be_stored_are_refused(tmp_path):
    with checkpoints(tmp_path) as store:
        with pytest.raises(ValueError, match=r"2 leaves of the path a\.b"):
            store.save(1, {"a": {"b": jnp.zeros(1)}, "a.b": jnp.zeros(1)})
        with pytest.raises(
            ValueError, match="scale: a plain number to store must be finite; got inf"
        ):
            store.save(1, {"scale": float("inf")})
        for step in (-1, np.int64(2**31)):
            with pytest.raises(
                ValueError, match=rf"^Checkpoints\.save needs a step from 0 to .*; got {step}\."
            ):
                store.save(step, {"a": jnp.zeros(1)})
        for state in ({}, {"a": jnp.zeros((0, 2))}, {"scale": 1.0}):
            with pytest.raises(ValueError, match=r"needs a state with an array that is not empty"):
                store.save(1, state)
        with pytest.raises(ValueError, match=r"`note` needs JSON .*; 'seen' is of type ArrayImpl"):
            store.save(1, {"a": jnp.zeros(1)}, {"seen": jnp.zeros(1)})
        assert store.steps() == []


@pytest.mark.parametrize("number", [10**400, -(10**400), 1.5, True, 1e300 + 2j])
def test_a_plain_number_comes_back(tmp_path, number):
    """A whole number may be too large for a float."""
    state = {"a": jnp.zeros(1), "number": number}
    with checkpoints(tmp_path) as store:
        store.save(1, state)
    assert_equal(checkpoints(tmp_path).restore(state | {"number": type(number)(1)}).state, state)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_setting_or_a_note_may_be_no_finite_number(tmp_path, number):
    """A nan differs from itself: no checkpoint of a run with such a setting was of that run."""
    with checkpoints(tmp_path, {"clip": number}) as store:
        store.save(1, small_state(1), note={"loss": number})
    found = checkpoints(tmp_path, {"clip": float(str(number))}).restore(small_state(2))
    np.testing.assert_equal(found.note, {"loss": number})
    with pytest.raises(checkpoint.Refused, match=r"clip=(nan|inf) \(here 1\.0\)"):
        checkpoints(tmp_path, {"clip": 1.0}).restore(small_state(2))


def test_a_form_refuses_numpy_numbers_that_32_bits_cannot_hold(tmp_path):
    same = DiskForm(lambda state: state, lambda state: state)
    state = {"w": np.ones(3, np.float32), "seen": np.array([2**40 + 5])}
    with jax.enable_x64(False), checkpoints(tmp_path, form=same) as store:
        with pytest.raises(ValueError, match=r"^Checkpoints\.save with a `form` .*; seen is int64"):
            store.save(1, state)
        small = state | {"seen": np.array([7])}
        store.save(2, small)
        store.wait()
        assert store.restore(small).state["seen"] == 7


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "inside"):
        with pytest.raises(
            OSError, match=rf"^{folder}: cannot make this folder for checkpoints: .* Choose"
        ):
            checkpoints(folder)


@pytest.mark.parametrize("name", ["orbax.checkpoint", "xxhash"])
def test_without_its_libraries_the_message_says_what_to_install(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r'pip install -e "\.\[checkpoint\]"'):
        checkpoints(tmp_path)


# Any layout to any other

CONFIG = gpt2.Config(layers=4, heads=2, width=16, context=8, vocabulary=61, vocabulary_multiple=8)
BATCH = 8
LAYOUTS = {
    "data 2 x stage 2 x tensor 2": Layout(data=2, stage=2, tensor=2, microbatches=2),
    "data 4 x tensor 2": Layout(data=4, tensor=2),
    "one device": Layout(),
    "stage 2 in 2 chunks": Layout(stage=2, microbatches=2, chunks=2),
    "ZeRO-3 over data 4": Layout(data=4, zero=3),
}


def form(layout):
    return decoder.stored(gpt2.FAMILY, layout)


@pytest.mark.parametrize("chunks", [1, 2])
def test_a_form_keeps_what_adafactor_has_in_place_of_moments(chunks):
    """Arrays [1], which have no layers."""
    layout = Layout(stage=2, microbatches=2, chunks=chunks)
    sizes = {"layers": 4, "heads": 2, "width": 16, "context": 8, "vocabulary": 64}
    model = form(layout).from_disk(gpt2.GPT2(gpt2.Config(**sizes), key=jax.random.key(0)))
    state = optax.adafactor(1e-3, min_dim_size_to_factor=4).init(
        jax.tree.map(lambda x: x if mesh.is_array(x) else None, model)
    )
    shapes = jax.tree.map(jnp.shape, state)
    assert (1,) in {leaf.shape for leaf in jax.tree.leaves(state)}
    assert jax.tree.map(jnp.shape, form(layout).from_disk(form(layout).to_disk(state))) == shapes


@functools.cache
def start(name):
    """The state to begin with on a layout, its step, and its mesh."""
    layout = LAYOUTS[name]
    axes = mesh.make(**layout.axes, devices=jax.devices()[: layout.devices])
    with jax.numpy_dtype_promotion("standard"):
        made = decoder.train_step(
            *(gpt2.FAMILY, CONFIG, optax.adamw(1e-3), layout, axes),
            batch=BATCH,
            key=jax.random.key(0),
            compute=decoder.Compute(dtype=FLOAT64),
        )
        state, train = made.init(), made.train
    return state, train


def go_on(name, state, steps):
    _, train = start(name)
    losses = []
    with jax.numpy_dtype_promotion("standard"):
        state = jax.tree.map(jnp.copy, state)  # the step donates it
        for number in range(int(state.step), int(state.step) + steps):
            state, info = jax.block_until_ready(train(state, windows(CONFIG, 0, number, BATCH)))
            losses.append(float(info.loss))
    return state, losses


@functools.cache
def trained(name):
    """The state after two steps, and the losses of the two after that."""
    state, _ = go_on(name, start(name)[0], 2)
    return state, go_on(name, state, 2)[1]


def on_host(name, state):
    layout = LAYOUTS[name]
    return jax.tree.map(np.asarray, decoder.joined(gpt2.FAMILY, layout, state))


def over_layouts(folder, names, state):
    """Saved by the first layout, restored and saved by the next, and so on: the same bits. The
    state on the last one."""
    reference = on_host(names[0], state)
    for number, (name, other) in enumerate(pairwise(names)):
        with checkpoints(folder / str(number), form=form(LAYOUTS[name])) as store:
            store.save(2, state)
        like = start(other)[0]
        state = checkpoints(folder / str(number), form=form(LAYOUTS[other])).restore(like).state
        jax.tree.map(np.testing.assert_array_equal, on_host(other, state), reference)
        assert jax.tree.map(lambda x: x.sharding, state) == jax.tree.map(lambda x: x.sharding, like)
    return state


chains = st.lists(st.sampled_from(sorted(LAYOUTS)), min_size=2, max_size=3)


def filled(state):
    """Different numbers in every leaf: after `init` the optimizer's are all zero."""
    leaves, tree = jax.tree.flatten(state)
    return jax.tree.unflatten(
        tree, [leaf + jnp.asarray(i, leaf.dtype) for i, leaf in enumerate(leaves)]
    )


@pytest.mark.long
def test_each_layout_restores_what_the_one_before_saved(tmp_path):
    names = [*LAYOUTS, next(iter(LAYOUTS))]
    over_layouts(tmp_path, names, filled(start(names[0])[0]))


@pytest.mark.sweep
@pytest.mark.long
@settings(max_examples=8)
@given(chains)
def test_any_layout_restores_what_any_other_saved(tmp_path_factory, names):
    over_layouts(tmp_path_factory.mktemp("layouts"), names, filled(start(names[0])[0]))


@pytest.mark.sweep
@pytest.mark.long
@settings(max_examples=6)
@given(chains)
def test_a_run_goes_on_over_any_layout(tmp_path_factory, names):
    state, losses = trained(names[0])
    state = over_layouts(tmp_path_factory.mktemp("layouts"), names, state)
    np.testing.assert_allclose(go_on(names[-1], state, 2)[1], losses, rtol=EXACT)


def test_a_plain_number_that_the_code_has_changed_is_told(tmp_path):
    """It comes from the checkpoint, and the function beside it from the code: both are the run's,
    and may belong together."""
    saved(tmp_path)
    said = []
    checkpoints(tmp_path, say=said.append).restore(small_state(2))
    assert not [line for line in said if "plain numbers" in line]
    checkpoints(tmp_path, say=said.append).restore(small_state(2) | {"loss_scale": 0.25})
    line = (
        "the plain numbers of step 2 differ from this program's, and the stored ones are used: "
        "loss_scale=0.5 (here 0.25). A constant"
    )
    assert [text for text in said if text.startswith(line)]
