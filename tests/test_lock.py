"""A folder belongs to one run, until its process ends, however it does; the others are told whose
it is."""

import errno
import fcntl
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import filelock
import pytest

from parallax.run import lock

ROOT = Path(__file__).parents[1]


def started(program, *arguments):
    """A Python program in a process of its own, which imports no JAX."""
    command = [
        sys.executable,
        "-c",
        f"import os, sys, time; from parallax.run import lock\n{program}",
        *map(str, arguments),
    ]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


HOLD = "claim = lock.take(sys.argv[1]); print('held', flush=True); "


@pytest.mark.programs
def test_the_second_is_told_who_holds_the_folder(tmp_path):
    with started(HOLD + "time.sleep(100)", tmp_path / "run") as holder:
        assert holder.stdout.readline() == "held\n"
        told = (
            rf"run belongs to another run: process {holder.pid} on "
            rf"{re.escape(os.uname().nodename)}, since 20"
        )
        with pytest.raises(lock.Held, match=told):
            lock.take(tmp_path / "run")
        holder.kill()
        holder.communicate()
    with lock.take(tmp_path / "run"):
        assert str(os.getpid()) in (tmp_path / "run" / lock.FILE).read_text()


@pytest.mark.programs
def test_kill_9_frees_the_folder_though_a_child_lives_on(tmp_path):
    """A child process has a copy of the open file, which would keep the lock."""
    child = (
        "child = os.fork()\nif not child: print(os.getpid(), flush=True)  # it "
        "runs\ntime.sleep(100)"
    )
    with started(HOLD + child, tmp_path) as holder:
        assert holder.stdout.readline() == "held\n"
        child = int(holder.stdout.readline())
        holder.kill()
        holder.wait()
        try:
            lock.take(tmp_path).release()
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.mark.programs
def test_a_run_that_ends_leaves_nothing(tmp_path):
    """The lock's file and the folders made for it go, where they are empty."""
    lock.take(tmp_path / "a" / "b").release()
    assert list(tmp_path.iterdir()) == []
    with started(HOLD, tmp_path / "a" / "b") as holder:
        assert holder.communicate() == ("held\n", "")
    assert list(tmp_path.iterdir()) == []
    claim = lock.take(tmp_path / "a" / "b")
    (tmp_path / "a" / "kept").touch()
    claim.release()
    claim.release()
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["kept"]


# A process that has the lock makes a folder that only one at a time can make.
CHURN = """
def held():
    try: return lock.take(sys.argv[1])
    except lock.Held: return None
taken = 0
while taken < 30:
    if (claim := held()) is not None:
        os.mkdir(sys.argv[2]); time.sleep(0.001); os.rmdir(sys.argv[2])
        claim.release()
        taken += 1
"""


@pytest.mark.programs
def test_two_never_hold_it_while_runs_come_and_go(tmp_path):
    """Each release removes the file that the others have just opened."""
    jobs = [started(CHURN, tmp_path / "run", tmp_path / "inside") for _ in range(4)]
    for job in jobs:
        assert job.communicate(timeout=300)[1] == ""
    assert not list(tmp_path.rglob(lock.FILE))


def test_a_folder_that_goes_while_it_is_looked_for_is_made_again(tmp_path, monkeypatch):
    """Another run removes the folder between `mkdir` and the question whether it is a folder."""
    acquire, errors = filelock.FileLock.acquire, [FileExistsError(17, "File exists")]

    def acquire_later(self, *arguments):
        if errors:
            (tmp_path / "run").rmdir()
            raise errors.pop()
        return acquire(self, *arguments)

    monkeypatch.setattr(filelock.FileLock, "acquire", acquire_later)
    with lock.take(tmp_path / "run"):
        assert (tmp_path / "run" / lock.FILE).exists()


@pytest.mark.sweep(3, "wholes")
def test_a_file_that_is_replaced_between_opening_and_locking_is_not_the_lock(tmp_path, monkeypatch):
    """The holder releases the folder, and another run takes it, in that moment."""
    opened, others = os.open, []

    def slow(path, *options):
        descriptor = opened(path, *options)
        if Path(path).name == lock.FILE and not others:
            os.unlink(path)
            others.append(opened(path, *options))
            fcntl.flock(others[0], fcntl.LOCK_EX)
        return descriptor

    monkeypatch.setattr(os, "open", slow)
    with pytest.raises(lock.Held):
        lock.take(tmp_path / "run")
    os.close(others[0])


@pytest.mark.programs
def test_of_eight_at_once_one_has_it(tmp_path):
    begin, end = tmp_path / "begin", tmp_path / "end"
    until = lambda number: f"while not os.path.exists(sys.argv[{number}]): time.sleep(0.001)\n"
    jobs = [
        started(until(2) + HOLD + "\n" + until(3), tmp_path / "run", begin, end) for _ in range(8)
    ]
    begin.touch()
    while sum(job.poll() is not None for job in jobs) < 7:
        time.sleep(0.01)
    end.touch()
    ended = [job.communicate(timeout=300) for job in jobs]
    assert [said for said, _ in ended].count("held\n") == 1
    assert sum("belongs to another run: process " in error for _, error in ended) == 7


@pytest.mark.parametrize("place", ["file/run", "file", "/proc/nothing/run", "x" * 300])
def test_where_nothing_can_be_made_it_says_so(tmp_path, place):
    (tmp_path / "file").write_text("text")
    with pytest.raises(
        OSError, match=r"cannot write to this folder \(.*\)\. Choose another folder\."
    ) as caught:
        lock.take(tmp_path / place)
    assert not isinstance(caught.value, lock.Held)
    assert ("a file has its name" in str(caught.value)) == (place == "file")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_link_in_the_place_of_the_lock_is_refused(tmp_path):
    """What it leads to was emptied."""
    (tmp_path / "thesis.txt").write_text("text")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/.lock").symlink_to(tmp_path / "thesis.txt")
    with pytest.raises(
        OSError, match=r"cannot write to this folder \(the lock's file \.lock is a link, not a"
    ):
        lock.take(tmp_path / "run")
    assert (tmp_path / "thesis.txt").read_text() == "text"


def test_a_full_disk_is_told_and_nothing_stays(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match=r"cannot write to this folder \(No space left on device"):
        lock.take(tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_locks_is_told(tmp_path, monkeypatch):
    def none(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", none)
    said = []
    lock.take(tmp_path, say=said.append).release()
    assert len(said) == 1
    assert (
        "its file system has no locks (Function not implemented), so nothing keeps a second run out"
        in said[0]
    )


# The example, started several times at once

SMALL = [
    "--layers=2",
    "--width=32",
    "--heads=2",
    "--length=16",
    "--steps=6",
    "--evaluate-every=3",
    "--evaluate-tokens=512",
]
AT_ONCE = 5.0  # seconds from its start in which a run is refused, on two cores


def trained(folder):
    """The numbers of the steps that do not depend on the time."""
    import json

    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: line.get(name) for name in ("step", "loss", "gradient_norm", "held_out")}
        for line in lines
    ]


def example(folder, *options):
    command = [
        sys.executable,
        str(ROOT / "examples" / "gpt2.py"),
        *SMALL,
        "--devices=2",
        f"--out={folder}",
        *options,
    ]
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "PYTHONWARNINGS": "ignore",
    }
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone") / "run"
    job = example(folder)
    said = job.communicate(timeout=400)[0]
    assert job.returncode == 0, said
    return trained(folder)


@pytest.mark.programs
@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("runs", [2, 3, 8])
def test_of_runs_started_at_once_one_trains(tmp_path, alone, pytestconfig, runs):
    """Two times, or twenty with --all. Every second holder is killed, and the next run goes on to
    the same bits."""
    option, took = pytestconfig.option, []
    generator = random.Random(option.seed)
    for time_ in range(20 if option.all else 2):
        folder = tmp_path / str(time_) / "run"
        began = time.monotonic()
        jobs = [example(folder) for _ in range(runs)]
        others = []
        while len(others) < runs - 1:
            assert time.monotonic() < began + 60
            for job in jobs:
                if job not in others and job.poll() is not None:
                    others.append(job)
                    took.append(time.monotonic() - began)
            time.sleep(0.005)
        (winner,) = (job for job in jobs if job not in others)
        for job in others:
            said = job.communicate()[0]
            assert job.returncode == 2, said
            assert re.fullmatch(
                rf"error: .*run belongs to another run: process {winner.pid} on .*\n", said
            )
        if time_ % 2:
            time.sleep(generator.uniform(0, 10))
            winner.kill()
            winner.communicate()
            winner = example(folder)
        said = winner.communicate(timeout=400)[0]
        assert winner.returncode == 0, said
        assert trained(folder) == alone
        assert not (folder / lock.FILE).exists()
    print(f"{runs} runs at once: the others refused after {min(took):.2f} to {max(took):.2f} s")
    assert max(took) < AT_ONCE
