"""Storage that fails for a while: a save is tried again beside the steps, and what is stored is
what was to be stored."""

import errno
import gc
import os
import re
import sys
import threading
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from parallax import mesh
from parallax.run import barriers, stored, writer
from parallax.run import record as records
from parallax.run.checkpoint import Checkpoints
from parallax.run.retention import Retention

pytestmark = pytest.mark.filterwarnings(
    # Of Orbax, which a failure leaves in the middle.
    "ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning",
    "ignore::pytest.PytestUnhandledThreadExceptionWarning",
)
AT = {"open": 0, "os.mkdir": 0, "os.rename": 1}
FAULTS = [errno.EIO, errno.ESTALE, errno.ENOSPC, errno.EACCES]


class Faults:
    """Errors of the operations on a folder, raised by a hook of Python's auditing, which stays: it
    asks whether it is on."""

    def __init__(self):
        self.folder, self.left, self.number = "", [], 0
        self.raised: list[str] = []  # the names of what failed
        sys.addaudithook(self._hook)

    def at(self, folder: Path, *operations: int, number: int = errno.EIO) -> None:
        """Let the operations of these numbers fail from now on, counted from 1; none ends it."""
        self.left, self.number, self.raised = list(operations), number, []
        self.folder = str(folder) if operations else ""

    def _hook(self, event: str, arguments: tuple) -> None:
        if self.folder and event in AT and self.folder in str(arguments[AT[event]]):
            self.left = [operation - 1 for operation in self.left]
            if 0 in self.left:
                self.raised.append(Path(str(arguments[AT[event]])).name)
                raise OSError(self.number, os.strerror(self.number), str(arguments[AT[event]]))


@pytest.fixture(scope="module")
def faults():
    found = Faults()
    yield found
    with warnings.catch_warnings():
        # Coroutines that Orbax left: collected later, they would warn in a test of something else.
        warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
        gc.collect()


@pytest.fixture(autouse=True)
def _quick(monkeypatch, faults):
    monkeypatch.setattr(writer, "PAUSE", 0.001)
    yield
    faults.folder = ""


def state_of(step):
    axes = mesh.make(data=4, tensor=2)
    arrays = {
        "split": np.arange(16.0, dtype=np.float32).reshape(8, 2) * step,
        "whole": np.full(3, step),
    }
    placed = mesh.place(arrays, {"split": P("data"), "whole": P()}, axes)
    return placed | {"key": jax.random.key(step), "host": np.arange(3) * step, "number": 2 * step}


def assert_restored(folder, step):
    restored = Checkpoints(folder, settings={}, say=lambda line: None).restore(state_of(0))
    assert (restored.step, restored.state["number"]) == (step, 2 * step)
    for name in ("split", "whole", "host"):
        np.testing.assert_array_equal(restored.state[name], state_of(step)[name], err_msg=name)
    assert (
        jax.random.key_data(restored.state["key"]) == jax.random.key_data(state_of(step)["key"])
    ).all()


# Orbax drops a coroutine of its own where a thread of a failed save ends before it began to run it.
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
@pytest.mark.sweep(6)
@pytest.mark.parametrize("every", range(12))
def test_an_error_at_any_operation_of_a_save_is_gone_at_the_next_try(tmp_path, faults, every):
    """Each save meets one, some of them two in a row; its state is donated as soon as it returns.

    An error is told, but for two readings: of Orbax's own metadata, which it does without, and of
    whose a checkpoint is. Where both records of that cannot be read, an older one stays until the
    next save, and the newest one stays in any case.
    """
    said, untold, step = [], set(), 0
    double = jax.jit(lambda tree: jax.tree.map(lambda x: x * 2, tree), donate_argnums=0)
    with Checkpoints(tmp_path, settings={}, keep=Retention(1), say=said.append) as store:
        for operation in range(every + 1, 400, 12):
            step += 1
            state = state_of(step)
            faults.at(
                tmp_path,
                operation,
                *[operation + 1] * (step % 2),
                number=FAULTS[step % len(FAULTS)],
            )
            told = len(said)
            store.save(step, state)
            double({name: state[name] for name in ("split", "whole")})
            state["host"] += 1
            store.wait()
            if not faults.raised:
                break
            unread = {"contents.json", "manifest.json"} <= set(faults.raised)
            if not any("of 8 tries is in" in line for line in said[told:]):
                untold |= set(faults.raised) - ({"manifest.json"} if unread else set())
            faults.at(tmp_path)
            assert store.steps() in ([step], [step - 1, step] if unread else [step])
            assert_restored(tmp_path, step)
    assert step > 2
    lines = [line for line in said if "of 8 tries is in" in line]
    assert lines
    assert untold <= {"_CHECKPOINT_METADATA", "contents.json"}
    # Writes of a failed try may still run when the next one begins. That try then finds a part of
    # their files, and TensorStore says so in its own words.
    for line in lines:
        assert re.search(
            r"of step (\d+) in .*/0*\1 was not saved: (\[Errno|NOT_FOUND: ).* "
            r"The next of 8 tries is in 0\.00",
            line,
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{step:08d}", "newest.json"]


def test_the_run_goes_on_meanwhile_and_stops_after_the_limit(tmp_path, monkeypatch):
    """With growing pauses, and its last good checkpoint named, which is untouched."""
    slept, steps, go = [], 0, threading.Event()
    with Checkpoints(tmp_path, settings={}, say=lambda line: None) as store:
        store.save(1, state_of(1))
    full = lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(writer.time, "sleep", lambda seconds: (slept.append(seconds), go.wait(60)))
    monkeypatch.setattr(writer, "PAUSE", 1.0)
    monkeypatch.setattr(records, "begin", full)
    said = []
    store = Checkpoints(tmp_path, settings={}, tries=4, say=said.append)

    def run():
        nonlocal steps
        with store:
            store.save(2, state_of(2))
            while store.saving() and steps < 100:
                store.check()
                steps += 1
            go.set()

    with pytest.raises(
        OSError,
        match=r"step 2 in .* was not saved: .*No space left.* newest finished one is .*00000001\.",
    ):
        run()
    assert steps == 100
    assert slept == [1.0, 2.0, 4.0]
    assert len(said) == 3
    assert said[0].endswith("The next of 4 tries is in 1 s; the run goes on meanwhile.")
    assert_restored(tmp_path, 1)


def test_arrays_that_are_written_are_not_written_again(tmp_path, monkeypatch):
    """Only what failed is done again: here the last record of the checkpoint."""
    seals, writes = [], []
    seal, begin = records.seal, records.begin

    def seal_at_the_third_try(*arguments):
        seals.append(arguments)
        if len(seals) < 3:
            raise OSError(errno.EIO, "Input/output error")
        seal(*arguments)

    def count(*arguments):
        writes.append(arguments)
        begin(*arguments)

    monkeypatch.setattr(records, "seal", seal_at_the_third_try)
    monkeypatch.setattr(records, "begin", count)
    said = []
    with Checkpoints(tmp_path, settings={}, say=said.append) as store:
        store.save(1, state_of(1))
    assert (len(seals), len(writes), len(said)) == (3, 1, 2)
    assert_restored(tmp_path, 1)


def test_what_is_no_fault_of_the_storage_is_told_at_once(tmp_path, monkeypatch):
    said = []
    with Checkpoints(tmp_path, settings={}, say=said.append) as store:
        monkeypatch.setattr(
            records, "begin", lambda *_: (_ for _ in ()).throw(TypeError("no such thing"))
        )
        with pytest.raises(OSError, match=r"step 1 in .* was not saved"):
            store.save(1, state_of(1))
        monkeypatch.undo()
        monkeypatch.setattr(
            records, "seal", lambda *_: (_ for _ in ()).throw(TypeError("no such thing"))
        )
        store.save(2, state_of(2))
        with pytest.raises(OSError, match=r"step 2 in .* was not saved: no such thing"):
            store.wait()
    assert said == []


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (OSError(errno.ENOSPC, "full"), True),
        (PermissionError(errno.EACCES, "not allowed"), True),
        (
            ValueError(
                "Error writing: Failed to write 7 bytes: No space left on device "
                "[os_error_code='28']"
            ),
            True,
        ),
        (
            ValueError("Failed to write 7 bytes to file 5: File too large [os_error_code='27']"),
            False,
        ),
        (ValueError('NOT_FOUND: Error opening "zarr" driver: Error reading'), True),
        (ValueError("Shape of [3] was NOT_FOUND"), False),
        (FileExistsError(errno.EEXIST, "there"), False),
        (TypeError("wrong type"), False),
        (jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: Barrier timed out"), True),
        (jax.errors.JaxRuntimeError("UNAVAILABLE: connection reset"), False),
    ],
)
def test_which_errors_may_be_over_in_a_while(error, is_one):
    assert barriers.transient(error) is is_one
    outer = RuntimeError("while it was saved")
    outer.__cause__ = error
    assert barriers.transient(outer) is is_one


@pytest.mark.sweep(3, "wholes")
def test_blocks_that_were_donated_are_there_again():
    axes = mesh.make(data=4, tensor=2)
    arrays = {
        "split": mesh.place(np.arange(32.0).reshape(8, 4), P("data", "tensor"), axes),
        "whole": mesh.place(np.arange(5), P(), axes),
        "one": jnp.arange(7.0),
    }
    expected, shardings = (
        {name: np.array(leaf) for name, leaf in arrays.items()},
        {n: x.sharding for n, x in arrays.items()},
    )
    again = stored.held(arrays)
    jax.block_until_ready(
        jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)(arrays)
    )
    for name, leaf in again().items():
        np.testing.assert_array_equal(leaf, expected[name])
        assert leaf.sharding == shardings[name]
