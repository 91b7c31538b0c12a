"""A signal is heard while the main thread is inside something that hears none; what was there
before is there after."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from parallax.run import signals

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.usefixtures("heard")


def test_each_is_counted_and_what_was_there_comes_back():
    heard, came = [], threading.Semaphore(0)

    def hear(number, count):
        heard.append((number, count))
        came.release()

    before = [signal.getsignal(number) for number in signals.TO_END]
    with signals.listening(hear, *signals.TO_END):
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
            assert came.acquire(timeout=60)
    assert heard == [
        (signal.SIGINT, 1),
        (signal.SIGHUP, 2),
        (signal.SIGTERM, 3),
        (signal.SIGINT, 4),
    ]
    assert [signal.getsignal(number) for number in signals.TO_END] == before
    assert signal.set_wakeup_fd(-1) == -1


def test_one_inside_another_hears_and_then_the_outer_again():
    outer, inner, came = [], [], threading.Semaphore(0)
    note = lambda heard: lambda number, count: (heard.append(count), came.release())
    with signals.listening(note(outer), signal.SIGHUP):
        with signals.listening(note(inner), signal.SIGHUP):
            os.kill(os.getpid(), signal.SIGHUP)
            assert came.acquire(timeout=60)
        os.kill(os.getpid(), signal.SIGHUP)
        assert came.acquire(timeout=60)
    assert (outer, inner) == ([1], [1])


def test_what_was_ignored_stays_so():
    """As nohup does."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    heard = []
    try:
        with signals.listening(lambda *told: heard.append(told), signal.SIGHUP):
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(0.2)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert heard == []


def test_another_thread_changes_nothing():
    seen = []

    def listen():
        with signals.listening(lambda *told: None, signal.SIGHUP):
            seen.append(signal.getsignal(signal.SIGHUP))

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGHUP)]


# The main thread waits in C, so no handler of Python's is called.
STUCK = """
import ctypes, signal
from parallax.run import job, signals
with signals.listening(job.interrupted, signal.SIGINT):
    print("ready", flush=True)
    ctypes.CDLL(None).pause()  # of the main thread; a signal may wake it
    ctypes.CDLL(None).sleep(100)
"""


@pytest.mark.programs
def test_ctrl_c_ends_a_program_that_is_stuck_with_a_line():
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, "-c", STUCK]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert error == (
        "SIGINT: ended at once. Run the same command again to go on from the last checkpoint.\n"
    )
