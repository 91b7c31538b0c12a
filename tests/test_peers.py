"""Processes without JAX, of which one is gone, silent, or late, or of another job: the others name
it, or turn it away."""

import contextlib
import functools
import itertools
import json
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
from hypothesis import given
from hypothesis import strategies as st

from parallax.run import handshake, launch, peers

ROOT = Path(__file__).parents[1]
MEMBER = """
import os, sys, time
from parallax.run import launch, peers
rank, port, limit, token = int(sys.argv[1]), sys.argv[2], float(sys.argv[3]), sys.argv[4]
here = peers.Peers(launch.Job("test", rank, 3, f"127.0.0.1:{port}", ports=2, secret=token), limit)
address = here.coordinator()
here.met()
here.does("in step 7, phase 'train'", waits=rank != 2)
print("met", flush=True)
"""
IDLE = "time.sleep(60)"
ASK = "time.sleep(8)\nprint('fault: ' + here.fault(), flush=True)\ntime.sleep(60)"


def free_port():
    """A port that is free, and the one after it most likely is."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


class Members:
    """Three processes; `programs` says what each does once all have met."""

    def __init__(self, *programs, limit=60.0, start=(0, 1, 2), port=None, token="a token"):
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
        self.port = port or free_port()
        self.started = {
            rank: subprocess.Popen(
                [
                    *(sys.executable, "-c", MEMBER + programs[rank]),
                    *(str(rank), str(self.port), str(limit), token),
                ],
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


@pytest.mark.programs
def test_who_is_gone_is_named_and_the_others_end():
    cases = (
        functools.partial(gone_is_named, *case)
        for case in itertools.product([0, 1], ["killed", "polite"])
    )
    at_once(
        *cases,
        functools.partial(gone_at_the_end_is_named, 0),
        functools.partial(gone_at_the_end_is_named, 1),
    )


def gone_is_named(gone, how):
    leaves = "time.sleep(3); os._exit(0)" if how == "polite" else IDLE
    with Members(*[leaves if rank == gone else IDLE for rank in range(3)]) as members:
        members.met()
        if how == "killed":
            members.started[gone].kill()
        for rank in {0, 1, 2} - {gone}:
            said = members.said(rank)
            process = members.started[gone].pid
            words = (
                rf"rank {rank} on \S+: rank {gone} on \S+ \(process {process}\) is gone: "
                rf"it was last in step 7, "
            )
            assert re.search(words, said), said
            assert members.started[rank].returncode == 1


def gone_at_the_end_is_named(gone):
    """All take their leave then."""
    waits = f"here.leave()\n{IDLE}"
    with Members(waits, waits, waits) as members:
        members.met()
        members.started[gone].kill()
        for rank in {0, 1, 2} - {gone}:
            assert (
                f"(process {members.started[gone].pid}) is gone: it was last in step 7"
                in members.said(rank)
            )


@pytest.mark.programs
def test_who_leaves_with_a_word_ends_nobody():
    goes = "here.leave(); time.sleep(1); here.close()"
    with Members(goes, goes, f"{goes}; time.sleep(2)") as members:
        for rank in range(3):
            assert members.said(rank) == "met\n"
            assert members.started[rank].returncode == 0


@pytest.mark.programs
def test_who_is_silent_is_named():
    """Or works while the others wait for it, or has left."""
    at_once(
        functools.partial(silent_is_named, 0),
        functools.partial(silent_is_named, 1),
        working_is_named,
        left_is_named,
    )


def silent_is_named(stopped):
    with Members(*[IDLE if rank == stopped else ASK for rank in range(3)]) as members:
        members.met()
        members.started[stopped].send_signal(signal.SIGSTOP)
        named = (
            rf"fault: rank {stopped} on \S+ \(process {members.started[stopped].pid}\) is "
            rf"stopped, or holds Python's lock: "
        )
        others = [members.started[rank] for rank in range(3) if rank != stopped]
        said = [other.stdout.readline() for other in others]
        assert all(re.match(named, line) for line in said), said
        for other in others:
            other.kill()
        # It ends itself as soon as it can: nobody else does.
        members.started[stopped].send_signal(signal.SIGCONT)
        assert members.started[stopped].wait(30) == 1


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


@pytest.mark.programs
def test_who_does_not_come_in_time_is_named():
    nobody_at = r"rank 0 at 127\.0\.0\.1:\d+ did not come"
    at_once(
        lambda: missing_is_named((0, 1), "rank 2 did not come"),
        lambda: missing_is_named((1, 2), nobody_at),
    )


def missing_is_named(start, missing):
    with Members(IDLE, IDLE, IDLE, limit=3.0, start=start) as members:
        for rank in start:
            assert re.search(rf"{missing}\. The job ends\.", members.said(rank))


@pytest.mark.programs
def test_the_time_for_all_to_come_begins_with_the_process():
    """Slow imports belong to it: processes whose imports take longer would otherwise outlive a rank
    that was killed."""
    program = """
import time
from parallax.run import launch, peers
assert peers.age() >= 0
time.sleep(2)
assert 2 <= peers.age() < 20, peers.age()
here = peers.Peers(launch.Job("test", 1, 2, "127.0.0.1:PORT", secret="a token"), 60.0, 59.0)
here.coordinator()
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, "-c", program.replace("PORT", str(free_port()))]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=50, check=False
    )  # 60 would be left
    assert "did not come" in done.stderr, done.stderr


@pytest.mark.programs
def test_a_socket_that_reached_itself_is_not_rank_0():
    """Where nobody listens yet at a port of the system's own range, Linux may give it to the socket
    that asks for it."""
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
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert said.stdout == "0\n"


# Who is let in


def joined(port, token, processes=3, rank=1):
    """The answer to one that says that it is a rank of the job."""
    with socket.create_connection(("127.0.0.1", port), timeout=0.5) as connection:
        job = launch.Job("test", rank, processes, f"127.0.0.1:{port}", secret=token)
        return handshake.present(
            handshake.Line(connection), rank, handshake.secret(job), peers.about(job)
        )[0]


def strangers(port):
    """What comes to a port that was meant for others, or not even for that."""
    for said in (
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"[" * 100_000,
        b'{"rank": 1, "nonce": "a"}\n{"proof": 1, "about": {"rank": 1}}\n',
    ):
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.send(said)
    message = {
        "about": {"rank": 1, "host": "h", "process": 1},
        "doing": "",
        "waits": True,
        "left": False,
        "fault": "",
        "gone": "you",
    }
    with socket.create_connection(
        ("127.0.0.1", port)
    ) as connection:  # of the program before this one: it ended the job
        connection.send(json.dumps(message).encode() + b"\n")
    return [joined(port, "another token"), joined(port, "a token", processes=2), joined(port, "")]


@pytest.mark.programs
def test_strangers_are_turned_away_in_a_line_and_the_job_goes_on():
    with Members(IDLE, IDLE, IDLE, start=(0, 2)) as members:
        until(lambda: connects(members.port))
        early = strangers(members.port)
        members.started[1] = Members(IDLE, IDLE, IDLE, start=(1,), port=members.port).started[1]
        met = [said_until(members.started[rank], "met\n") for rank in range(3)]
        late = strangers(members.port)
        other = joined(members.port, "a token")
        time.sleep(3)  # a rank that is gone ends the job within two
        assert all(process.poll() is None for process in members.started.values())
        members.started[0].kill()
        said = "".join(met[0]) + members.said(0)
    for answer in [*early, *late]:
        assert (
            answer == "another job listens there, or another program, or PARALLAX_JOB_TOKEN is not "
            "the same"
        )
    assert other == "a rank 1 has come already"
    found = re.findall(
        r"rank 0 on \S+ turned away 127\.0\.0\.1 port \d+( \(.*\))?: (.*)\. The job goes on\.", said
    )
    nothing, stranger, twice = (
        "it left before it had shown anything",
        "it does not know this job's secret",
        other,
    )
    rank_1 = " (it says that it is rank 1)"
    assert set(found) == {("", nothing), ("", stranger), (rank_1, stranger), (rank_1, twice)}
    assert len(found) == len(set(found)) < peers.LINES  # once each


def let_in(port, rank, **more):
    """The connection of one that says that it is this rank, and stays silent."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=0.5)
    job = launch.Job("test", rank, 3, f"127.0.0.1:{port}", secret="a token")
    about = peers.about(job) | more
    answer = handshake.present(handshake.Line(connection), rank, handshake.secret(job), about)[0]
    return connection, answer


@pytest.mark.programs
def test_no_message_names_what_is_killed():
    """A process id of -1 is every process of the user. Whoever is let in, and then is silent, once
    had it killed."""
    program = f"""
import os
from parallax.run import launch, peers
os.kill = lambda *what: os.write(1, b"os.kill")
peers.Peers(launch.Job("test", 0, 3, "127.0.0.1:PORT", secret="a token"), 6.0)
{IDLE.replace("time", "__import__('time')")}
"""
    port = free_port()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    with subprocess.Popen(
        [sys.executable, "-c", program.replace("PORT", str(port))],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as process:  # fmt: skip
        until(lambda: connects(port))
        machine = (
            f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} "
            f"{os.readlink('/proc/self/ns/pid')}"
        )
        asked = [{"machine": machine, "process": process, "began": ""} for process in (-1, 2**22)]
        connections = [let_in(port, rank, **more) for rank, more in enumerate(asked, start=1)]
        said = process.communicate(timeout=60)[0]
    for connection, _ in connections:
        connection.close()
    assert "The job ends" in said
    assert "os.kill" not in said


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=2),
)
STATUS = {
    "doing": "in step 7",
    "waits": True,
    "left": False,
    "over": False,
    "fault": "",
    "gone": "",
    "port": 50_000,
}
ABOUT = {"rank": 1, "host": "node7", "process": 77}
ODD = ["\x1b[2J", "\n", "x" * 70_000, -1, 0, 10**9, 2**31, "50000", True, 1.0, None]


@st.composite
def damaged(draw, sound):
    """A message of which a field is missing or is another value."""
    name = draw(st.sampled_from(sorted(sound)))
    return {field: value for field, value in sound.items() if field != name} | draw(
        st.sampled_from([{}]) | st.builds(lambda value: {name: value}, st.sampled_from(ODD) | JSON)
    )


@given(damaged(STATUS), damaged(ABOUT))
def test_each_field_of_a_message_is_checked(status, about):
    """Nothing is raised; what is taken are whole numbers in their range, and texts that can be
    printed."""
    with contextlib.closing(socket.socket()) as connection:
        peer = peers.Peer(handshake.Line(connection), ABOUT)
        if peer.take(status):
            assert type(peer.port) is int
            assert 0 <= peer.port < 2**16
            assert {type(flag) for flag in (peer.waits, peer.left, peer.over)} == {bool}
            assert f"{peer.doing}{peer.fault}{peer.gone}".isprintable()
        else:
            assert (peer.doing, peer.port) == ("starting", 0)
        newcomer = handshake.Newcomer(handshake.Line(connection), "127.0.0.1", 1)
        secret = handshake.secret(launch.Job("test", 0, 3, secret="a token"))
        assert newcomer.hear({"rank": 1, "nonce": "a"}, secret, range(1, 3)) is None
        known = newcomer.hear(
            {"about": about, "proof": secret.proof(1, 1, "a", newcomer._mine)}, secret, range(1, 3)
        )
        if known:
            assert peers.Peer(newcomer.line, newcomer.about).why()[2].isprintable()
            assert [type(about[name]) for name in ABOUT] == [int, str, int]
            assert about["rank"] == 1


@pytest.mark.programs
def test_a_malformed_message_is_dropped_in_a_line_and_the_job_goes_on():
    with Members(IDLE, IDLE, IDLE, start=(0, 2)) as members:
        until(lambda: connects(members.port))
        connection, answer = let_in(members.port, 1)
        for process in members.started.values():
            said_until(process, "met\n")
        line = handshake.Line(connection)
        for name, value in [
            ("port", 10**9),
            ("port", "\x1b"),
            ("doing", "\x1b[2J"),
            ("gone", 7),
            ("waits", "no"),
        ]:
            line.send(STATUS | {name: value})
        line.send({})
        time.sleep(2)
        line.send(STATUS)  # it is heard still
        assert all(process.poll() is None for process in members.started.values())
        connection.close()
        said = members.said(0)
    assert answer == handshake.IN
    assert said.count("dropped a malformed message from rank 1 on ") == 1
    assert "is gone: it was last in step 7" in said
    assert "Traceback" not in said


@pytest.mark.programs
def test_silent_connections_keep_no_rank_out():
    """The oldest of them goes, and not the one that comes last."""
    with Members(IDLE, IDLE, IDLE, start=(0,)) as members, contextlib.ExitStack() as stack:
        until(lambda: connects(members.port))
        for _ in range(peers.NEWCOMERS + 2):
            stack.enter_context(socket.create_connection(("127.0.0.1", members.port)))
        time.sleep(1)
        began = time.monotonic()
        connection, answer = let_in(members.port, 1)
        stack.callback(connection.close)
        assert answer == handshake.IN
        assert time.monotonic() < began + 5


@pytest.mark.programs
def test_a_rank_that_has_gone_is_not_let_in_again():
    with Members(IDLE, "here.leave(); here.close()", IDLE) as members:
        assert members.said(1) == "met\n"
        time.sleep(1)
        assert joined(members.port, "a token") == "a rank 1 has come already"


@pytest.mark.programs
def test_two_jobs_given_one_port_stay_apart():
    """The second takes the next port; with one port alone its rank 0 ends with a line."""
    with Members(IDLE, IDLE, IDLE) as first:
        addresses = [said_until(process, "met\n") for process in first.started.values()]
        assert addresses
        with Members(IDLE, IDLE, IDLE, port=first.port, token="another") as second:
            for process in second.started.values():
                said_until(process, "met\n")
            assert all(
                process.poll() is None
                for process in [*first.started.values(), *second.started.values()]
            )
            refused = run(
                f"handshake.TAKEN = 0.1; handshake.listen(launch.Job('test', 0, 3, "
                f"'127.0.0.1:{first.port}'))"
            )
            assert refused.returncode == 2
            words = (
                rf"error: rank 0 on \S+ cannot listen at 127\.0\.0\.1:{first.port}: port "
                rf"{first.port} is taken, by another job or"
            )
            assert re.match(words, refused.stderr), refused.stderr
            refused = run(
                f"handshake.TAKEN = 0.1; handshake.listen(launch.Job('test', 0, 3, "
                f"'127.0.0.1:{first.port}', ports=2))"
            )
            assert f"each of the ports {first.port} to {first.port + 1} is taken" in refused.stderr


@pytest.mark.programs
def test_a_rank_of_another_token_is_not_let_in_and_names_rank_0():
    with Members(IDLE, IDLE, IDLE, start=(0,)) as first:
        until(lambda: connects(first.port))
        with Members(
            IDLE, IDLE, IDLE, start=(1,), port=first.port, token="another", limit=3.0
        ) as stray:
            said = stray.said(1)
            assert stray.started[1].returncode == 1
        assert "was not let in at 127.0.0.1 port" in said
        assert "or PARALLAX_JOB_TOKEN is not the same. It looks on for rank 0 of its job." in said
        assert re.search(r"rank 0 at 127\.0\.0\.1:\d+ did not come\. The job ends\.", said)
        assert first.started[0].poll() is None


@pytest.mark.programs
def test_all_learn_one_address_for_jax_which_is_free():
    shown = "print(address, flush=True)\ntime.sleep(60)"
    with Members(shown, shown, shown) as members:
        found = set()
        for process in members.started.values():
            said_until(process, "met\n")
            found.add(process.stdout.readline())
        (address,) = found
        host, _, port = address.strip().rpartition(":")
        with socket.create_server((host, int(port))) as server:
            assert server.getsockname()[0] == "127.0.0.1"


@pytest.mark.parametrize(
    ("host", "where"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("localhost", "127.0.0.1"),
        ("::1", "::1"),
        ("node7", None),
        ("10.0.0.1", None),
    ],
)
def test_on_one_machine_others_do_not_reach_it(host, where):
    try:
        with handshake.listen(
            launch.Job("test", 0, 2, f"[{host}]:0" if ":" in host else f"{host}:0")
        ) as server:
            bound = server.getsockname()[0]
    except SystemExit:
        pytest.skip("no such address here")
    assert bound == where or (where is None and bound in ("::", "0.0.0.0"))


def test_a_proof_holds_for_one_meeting_alone():
    secret = handshake.secret(launch.Job("test", 0, 3, "h:1", secret="a token"))
    proof = secret.proof(1, 1, "a", "b")
    assert secret.proves(proof, 1, 1, "a", "b")
    for other in [(0, 1, "a", "b"), (1, 2, "a", "b"), (1, 1, "b", "a"), (1, 1, "a", "c")]:
        assert not secret.proves(proof, *other)
    for junk in (None, 1, "", "\ud800", [proof], proof.upper()):
        assert not secret.proves(junk, 1, 1, "a", "b")
    assert "token" not in repr(secret) + repr(launch.Job("test", secret="a token"))
    assert secret.key.hex() not in repr(secret)


def run(program):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    return subprocess.run(
        [sys.executable, "-c", f"from parallax.run import handshake, launch\n{program}"],
        env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def connects(port):
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True


def until(happened):
    end = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.05)


def said_until(process, line):
    """What a process has printed up to that line."""
    found = [process.stdout.readline()]
    while found[-1] not in (line, ""):
        found.append(process.stdout.readline())
    assert found[-1] == line, found
    return found
