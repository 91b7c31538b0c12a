"""Processes without JAX, of which one is gone, silent, or late: the others name it."""

import functools
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
MEMBER = """
import os, sys, time
from parallax.run import launch, peers
rank, job, limit = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
here = peers.Peers(launch.Job("test", rank, 3, f"127.0.0.1:{job}"), limit)
while len(here.others) < (2 if rank == 0 else 1): time.sleep(0.01)
if rank == 0:
    while not all(other.about for other in here.others): time.sleep(0.01)
else:
    while here.others[0].doing == "starting": time.sleep(0.01)  # rank 0 waits for the third
here.met()
here.does("in step 7, phase 'train'", waits=rank != 2)
print("met", flush=True)
"""
IDLE = "time.sleep(60)"
JOBS = itertools.count(os.getpid() * 1000)
ASK = "time.sleep(8)\nprint('fault: ' + here.fault(), flush=True)\nhere.end_silent()\ntime.sleep(60)"


class Members:
    """Three processes; `programs` says what each does once all have met."""

    def __init__(self, *programs, limit=60.0, start=(0, 1, 2)):
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
        job = str(next(JOBS))
        self.started = {
            rank: subprocess.Popen(
                [sys.executable, "-c", MEMBER + programs[rank], str(rank), job, str(limit)],
                env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
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
            assert process.stdout.readline() == "met\n"
        time.sleep(1.5)  # each has said what it does

    def said(self, rank):
        return self.started[rank].communicate(timeout=60)[0]


def at_once(*cases):
    """Run the cases side by side: nearly all of their time is waiting."""
    with ThreadPoolExecutor(len(cases)) as pool:
        for running in [pool.submit(case) for case in cases]:
            running.result()


def test_who_is_gone_is_named_and_the_others_end():
    at_once(*(functools.partial(gone_is_named, *case) for case in itertools.product([0, 1], ["killed", "polite"])))


def gone_is_named(gone, how):
    leaves = "time.sleep(3); os._exit(0)" if how == "polite" else IDLE
    with Members(*[leaves if rank == gone else IDLE for rank in range(3)]) as members:
        members.met()
        if how == "killed":
            members.started[gone].kill()
        for rank in {0, 1, 2} - {gone}:
            said = members.said(rank)
            process = members.started[gone].pid
            words = rf"rank {rank} on \S+: rank {gone} on \S+ \(process {process}\) is gone: it was last in step 7, "
            assert re.search(words, said), said
            assert members.started[rank].returncode == 1


def test_who_leaves_with_a_word_ends_nobody():
    with Members("here.leave()", "here.leave()", "here.leave(); time.sleep(2)") as members:
        for rank in range(3):
            assert members.said(rank) == "met\n"
            assert members.started[rank].returncode == 0


def test_who_is_silent_is_named():
    """Or works while the others wait for it, or has left."""
    at_once(functools.partial(silent_is_named, 0), functools.partial(silent_is_named, 1), working_is_named, left_is_named)


def silent_is_named(stopped):
    with Members(*[IDLE if rank == stopped else ASK for rank in range(3)]) as members:
        members.met()
        members.started[stopped].send_signal(signal.SIGSTOP)
        assert members.started[stopped].wait(60) == -signal.SIGKILL
        said = [members.said(rank) for rank in range(3) if rank != stopped]
    named = rf"fault: rank {stopped} on \S+ \(process {members.started[stopped].pid}\) is "
    # The first that asks kills it, and then it is gone for the other.
    assert all(re.search(rf"{named}(stopped, or holds Python's lock|gone): it was ", words) for words in said), said
    assert any(re.search(f"{named}stopped", words) for words in said), said


def working_is_named():
    with Members(ASK, ASK, IDLE) as members:
        members.met()
        for rank in (0, 1):
            words = f"(process {members.started[2].pid}) is in step 7, phase 'train'"
            assert words in members.started[rank].stdout.readline()


def left_is_named():
    with Members(ASK, ASK, "here.leave(); time.sleep(60)") as members:
        members.met()
        for rank in (0, 1):
            words = f"(process {members.started[2].pid}) has left: it was last in step 7"
            assert words in members.started[rank].stdout.readline()


def test_who_does_not_come_in_time_is_named():
    nobody_at = r"rank 0 at 127\.0\.0\.1:\d+ did not come"
    at_once(lambda: missing_is_named((0, 1), "rank 2 did not come"), lambda: missing_is_named((1, 2), nobody_at))


def missing_is_named(start, missing):
    with Members(IDLE, IDLE, IDLE, limit=3.0, start=start) as members:
        for rank in start:
            assert re.search(rf"{missing}\. The job ends\.", members.said(rank))


def test_a_socket_that_reached_itself_is_not_rank_0():
    """Where nobody listens yet at a port of the system's own range, Linux may give it to the socket that asks for it."""
    program = """
import socket, time
from parallax.run import launch, peers

def itself(address, timeout):
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    connection.bind(address)
    connection.connect(address)
    connection.settimeout(timeout)
    return connection

socket.create_connection = itself
here = peers.Peers(launch.Job("test", 1, 2, "127.0.0.1:7"), 60.0)
time.sleep(2)
print(len(here.others), flush=True)
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    said = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert said.stdout == "0\n"
