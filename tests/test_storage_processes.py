"""Two processes whose storage fails on one of them, or is slow: all processes come to one answer,
and no device waits for it."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SLOW = 40  # seconds; a process that waits in a collective of gloo is given up after 30


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What each of the two processes saw."""
    folder = tmp_path_factory.mktemp("storage")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    }
    command = lambda rank: [
        sys.executable,
        str(TESTS / "process_storage.py"),
        f"localhost:{port}",
        str(rank),
        str(folder),
        str(SLOW),
    ]
    started = [
        subprocess.Popen(command(rank), env=environment, text=True, **PIPES) for rank in (0, 1)
    ]
    try:
        told = [process.communicate(timeout=600) for process in started]
    finally:
        for process in started:
            process.kill()  # SIGTERM would be JAX's to hear
    assert [process.returncode for process in started] == [0, 0], told[0][1] + told[1][1]
    return [json.loads(output.splitlines()[-1]) for output, _ in told]


PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}


@pytest.mark.programs
@pytest.mark.long
def test_an_error_on_one_process_is_tried_again_by_both(seen):
    for process in seen:
        assert process["undisturbed"] == ""
        for part in ("process_1", "contents.json", "manifest.json"):
            assert process[f"once, in {part}"] == ["", 0]
        assert process["steps"] == [2, 3, 4]
    first, second = (process["said"] for process in seen)
    assert [line.partition(" in ")[0] for line in first] == [
        "The checkpoint of step 3",
        "The checkpoint of step 4",
    ]
    assert [line.partition(" in ")[0] for line in second] == [
        f"The checkpoint of step {step}" for step in (2, 5, 5)
    ]


@pytest.mark.programs
@pytest.mark.long
def test_past_the_limit_both_stop_with_the_last_good_checkpoint_named(seen):
    first, second = (process["always"] for process in seen)
    assert "was not saved: another process could not do its part" in first
    assert "was not saved: [Errno 5] Input/output error" in second
    for words in (first, second):
        assert words.endswith("00000004.")


@pytest.mark.programs
@pytest.mark.long
def test_slow_verification_ends_no_restore_and_is_shared(seen):
    assert all(
        process["took"] > SLOW and process["same"] and process["restored"] == 4 for process in seen
    )
    first, second = (set(process["hashed"]) for process in seen)
    assert not first & second
    assert len(first | second) > 10
    assert abs(len(first) - len(second)) <= 1


@pytest.mark.programs
@pytest.mark.long
def test_damage_that_one_process_finds_is_refused_by_both(seen):
    for process in seen:
        assert process["then"] == 3
        assert "found other bytes" in process["refused"]["4"]


@pytest.mark.programs
@pytest.mark.long
def test_damage_that_the_first_process_finds_is_told_to_both(seen):
    first, second = (process["refused by the first"] for process in seen)
    assert first == second
    assert {"3", "4"} <= {*first}
    assert "found no file. The checkpoint was not finished" in first["3"]
