"""Jobs of real processes of which one raises, is gone, is silent, or is of another job: the others
name it and end."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from parallax.run import peers

ROOT = Path(__file__).parents[1]
MEMBER = """
import os, sys, time
import jax
from parallax.run import processes
rank, port, limit = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
job = processes.initialize(
    f"127.0.0.1:{port}", 3, rank, cpu_devices=3,
    initialization_timeout=limit, heartbeat_timeout=10, say=lambda line: None,
)
job.peers.does("in step 7, phase 'train'", waits=rank != 2)
print("met", flush=True)
"""
IDLE = "time.sleep(120)"
ASK = "time.sleep(3)\nprint('culprit: ' + job.peers.culprit(), flush=True)\ntime.sleep(120)"
TOLD = 2.0  # seconds in which the others hear that a rank has raised
GONE = 15.0  # seconds after which the others of a rank that is gone have ended: heartbeats take 10
SLOW = 3.0  # seconds more, on a machine that other tests keep busy


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


class Members:
    """Three processes; `programs` says what each does once JAX has connected them."""

    def __init__(self, *programs, limit=120.0, start=(0, 1, 2), tokens=("", "", "")):
        self.port = free_port()
        shared = {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "PYTHONWARNINGS": "ignore"}
        self.started = {
            rank: subprocess.Popen(
                [
                    *(sys.executable, "-c", MEMBER + programs[rank]),
                    *(str(rank), str(self.port), str(limit)),
                ],
                env=os.environ | shared | {"PARALLAX_JOB_TOKEN": tokens[rank]},
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
            for rank in start
        }  # fmt: skip

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.started.values():
            process.kill()
            process.communicate()

    def met(self):
        for process in self.started.values():
            said_until(process, "met\n")
        time.sleep(1.5)  # each has written its phase

    def said(self, rank):
        # `communicate` would leave out what `readline` has read ahead into its buffer.
        said = self.started[rank].stdout.read()
        self.started[rank].wait(120)
        return said

    def pid(self, rank):
        return self.started[rank].pid


def said_until(process, line):
    """What a process has printed up to that line."""
    said = [process.stdout.readline()]
    while said[-1] not in (line, ""):
        said.append(process.stdout.readline())
    assert said[-1] == line, said
    return said


@pytest.mark.programs
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_raises_tells_the_others(rank):
    raises = "def main():\n    time.sleep(2); print(time.time(), flush=True); raise KeyError('x')\n"
    programs = [
        raises + "processes.run(main, job)" if other == rank else IDLE for other in range(3)
    ]
    with Members(*programs) as members:
        members.met()
        raised = float(members.started[rank].stdout.readline())
        for other in {0, 1, 2} - {rank}:
            said = members.said(other)
            took = time.time() - raised
            name = rf"rank {rank} on \S+ \(process {members.pid(rank)}\) raised KeyError"
            assert re.search(rf"rank {other} on .*: {name}\. The job ends\.", said), said
            assert members.started[other].returncode == 1
            print(f"rank {other} ended {took:.2f} s after rank {rank} raised")
            assert took < TOLD + SLOW
        assert members.said(rank).count("KeyError: 'x'") == 1


ENDS = """
thread = job.peers._thread
join = thread.join
thread.join = lambda seconds: (join(seconds), print("alive", thread.is_alive(), flush=True))
jax.distributed.shutdown()
"""


@pytest.mark.programs
def test_a_program_that_just_ends_has_joined_its_thread():
    """Python ends a thread that is in JAX by an abort of the process."""
    with Members(ENDS, ENDS, ENDS) as members:
        assert [members.said(rank) for rank in range(3)] == ["met\nalive False\n"] * 3
        assert [process.returncode for process in members.started.values()] == [0, 0, 0]


@pytest.mark.programs
@pytest.mark.parametrize("how", ["killed", "exits with 0"])
def test_a_rank_that_is_gone_is_named_and_the_others_end(how):
    leaves = IDLE if how == "killed" else "time.sleep(3); os._exit(0)"
    with Members(IDLE, leaves, IDLE) as members:
        members.met()
        if how == "killed":
            members.started[1].kill()
        members.started[1].wait(60)
        gone = time.monotonic()
        said = {rank: members.said(rank) for rank in (0, 2)}
        took = time.monotonic() - gone
    name = rf"rank 1 on \S+ \(process {members.pid(1)}\) sends nothing: it is gone"
    assert re.search(rf"{name}.* it was last in step 7, phase 'train'", said[0]), said
    # The words of JAX's service, on every rank that is left.
    assert all("stopped sending heartbeats):\n1\n" in words for words in said.values()), said
    print(f"{how}: the others ended {took:.1f} s later")
    assert took < GONE + SLOW


@pytest.mark.programs
def test_where_rank_0_is_gone_the_others_end_at_once():
    with Members(IDLE, IDLE, IDLE) as members:
        members.met()
        members.started[0].kill()
        gone = time.monotonic()
        said = [members.said(rank) for rank in (1, 2)]
        took = time.monotonic() - gone
    # JAX's service is part of rank 0, its leader.
    assert all("the leader task was preempted/died" in words for words in said), said
    print(f"the others ended {took:.2f} s after rank 0 was killed")
    assert took < TOLD + SLOW


@pytest.mark.programs
def test_who_leaves_with_a_word_ends_nobody():
    goes = "processes.run(lambda: time.sleep({}), job)"
    with Members(goes.format(0), goes.format(1), goes.format(4)) as members:
        for rank in range(3):
            assert members.said(rank) == "met\n"
            assert members.started[rank].returncode == 0


def silent_is_named(stopped):
    with Members(*[IDLE if rank == stopped else ASK for rank in range(3)]) as members:
        members.met()
        members.started[stopped].send_signal(signal.SIGSTOP)
        name = rf"culprit: rank {stopped} on \S+ \(process {members.pid(stopped)}\) sends nothing: "
        said = [members.started[rank].stdout.readline() for rank in range(3) if rank != stopped]
        assert all(re.match(name, line) for line in said), said


def words_name(programs, rank, words):
    with Members(*programs) as members:
        members.met()
        for other in {0, 1, 2} - {rank}:
            line = members.started[other].stdout.readline()
            assert f"(process {members.pid(rank)}) {words}" in line


@pytest.mark.programs
def test_who_holds_up_the_others_is_named():
    """A rank that is stopped, works while the others wait, or has left."""
    left = "job.peers.leave(); time.sleep(120)"
    with ThreadPoolExecutor(2) as pool:
        for running in [
            pool.submit(silent_is_named, 0),
            pool.submit(silent_is_named, 1),
            pool.submit(words_name, (ASK, ASK, IDLE), 2, "is in step 7, phase 'train'"),
            pool.submit(words_name, (ASK, left, ASK), 1, "has left: it was last in step 7"),
        ]:
            running.result()


@pytest.mark.programs
@pytest.mark.parametrize("start", [(0, 1), (1, 2)])
def test_where_a_rank_does_not_come_the_others_end_in_time(start):
    with Members(IDLE, IDLE, IDLE, limit=3.0, start=start) as members:
        for rank in start:
            said = members.said(rank)
            assert "the processes did not all connect within the 3 s allowed" in said
            assert members.started[rank].returncode == 1


@pytest.mark.programs
def test_a_rank_of_another_job_is_refused():
    """Two jobs that are given one port may share JAX's service, and would train together."""
    with Members(IDLE, IDLE, IDLE, tokens=("one", "another", "one")) as members:
        said = members.said(1)
        assert re.search(r"error: rank 1 on .* met rank 0 of another job: rank 0 on ", said), said
        assert members.started[1].returncode == 2
        for rank in (0, 2):
            assert "rank 1 on" in (said := members.said(rank))
            assert "belongs to another job. The job ends." in said


def test_jobs_are_told_apart_by_their_variables(monkeypatch):
    for name in peers.NAMES:
        monkeypatch.delenv(name, raising=False)
    names = {peers.job_name()}
    for name in peers.NAMES:
        monkeypatch.setenv(name, "7")
        names.add(peers.job_name())
    assert len(names) == len(peers.NAMES) + 1
    assert all(name != "7" and len(name) == 64 for name in names)


LISTEN = """
import sys, time
import jax
import numpy as np
from jax.experimental import multihost_utils
rank, port, ours = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "ours"
jax.config.update("jax_num_cpu_devices", 1)
if ours:
    from jax.sharding import PartitionSpec as P
    from parallax import mesh
    from parallax.run import processes
    from parallax.run.checkpoint import Checkpoints
    from parallax.run.watchdog import Watchdog
    job = processes.initialize(f"127.0.0.1:{port}", 2, rank, say=lambda line: None)
    checkpoints = Checkpoints(sys.argv[4], settings={}).__enter__()
    Watchdog(job, seconds=100).__enter__()
    processes.preemption().__enter__()
    checkpoints.save(1, mesh.place({"w": np.ones(4)}, P("data"), mesh.make(data=2)))
    checkpoints.wait()
else:
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank)
multihost_utils.process_allgather(jax.numpy.ones(3))
print("met", flush=True)
time.sleep(120)
"""


def listening(pid):
    """The ports at which a process listens, by the kernel's tables."""
    sockets = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        target = os.readlink(descriptor)
        if target.startswith("socket:["):
            sockets.add(target[8:-1])
    ports = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in sockets:  # 0A: it listens
                ports.append(int(fields[1].rpartition(":")[2], 16))
    return sorted(ports)


@pytest.mark.programs
def test_no_socket_of_ours_listens(tmp_path):
    """A job of two processes listens where one of JAX alone does: its service, and gloo."""
    shared = {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "PYTHONWARNINGS": "ignore"}
    ports = {}
    for whose in ("ours", "JAX's"):
        port, jobs = free_port(), []
        with contextlib.ExitStack() as running:
            for rank in range(2):
                process = subprocess.Popen(
                    [sys.executable, "-c", LISTEN, str(rank), str(port), whose, str(tmp_path)],
                    env=os.environ | shared,
                    stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                )  # fmt: skip
                running.callback(process.communicate)
                running.callback(process.kill)
                jobs.append(process)
            for process in jobs:
                said_until(process, "met\n")
            ports[whose] = [listening(process.pid) for process in jobs]
        assert port in ports[whose][0]
        assert port not in ports[whose][1]
    print(ports)
    count = {whose: [len(ranks) for ranks in each] for whose, each in ports.items()}
    assert count["ours"] == count["JAX's"]
