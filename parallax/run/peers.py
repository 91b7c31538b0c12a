"""Who of a job is there: all meet at rank 0, before JAX connects them, and keep that connection, by
which all learn who is gone.

Rank 0 listens at the coordinator's address, and lets in whom `handshake` knows; a stranger is
turned away with a line, and the job goes on. A process that ends, however it does, closes its
connection, in the middle of a program too. One that is stopped, or holds Python's lock, keeps its
connection and sends nothing. Only the time that passes tells such a process from one that works for
long, so there the `Watchdog` decides, and asks this module which process to name. JAX is not
imported here.

A process ends itself alone: no message says what is killed. Whatever a message says is checked
before it is used.
"""

import contextlib
import functools
import os
import selectors
import socket
import threading
import time
from collections.abc import Hashable
from pathlib import Path
from typing import Any

from parallax.run import handshake, launch, signals

# Seconds in which the process that failed first, and not one that waited for it, has the last word:
# launchers send SIGKILL to what is left a second after SIGTERM.
GRACE = 1.5
BEAT = 0.5  # seconds from one message to the next
SILENT = 4 * BEAT  # seconds without one, after which a process is called silent
NEWCOMERS = 128  # that have shown nothing yet, at a time
LINES = 8  # about strangers
LAST = 2.0  # seconds in which the others hear that this process goes


class Peer:
    """What is known of another process of the job: who it is, and what it said last.

    Attributes:
        about: who it is, as `about` gives it.
        doing: as in `in step 7, phase 'train'`.
        waits: whether it cannot go on without others.
        left: whether it said that it has done its part.
        over: whether it said that the job is over, and its connection may close.
        fault: of rank 0, whom it would name.
        gone: who is gone, where this one knows.
        port: of rank 0, at which JAX's coordinator will be; 0 until all have come.
    """

    def __init__(self, line: handshake.Line, about: dict[str, Any]):
        self.line, self.about = line, about
        self.doing, self.waits, self.left, self.over, self.fault, self.gone, self.port = (
            "starting",
            True,
            False,
            False,
            "",
            "",
            0,
        )
        self.heard = time.monotonic()

    def __str__(self):
        return (
            f"rank {self.about['rank']} on {self.about['host']} (process {self.about['process']})"
        )

    @property
    def silent(self) -> float:
        """Seconds since it was heard."""
        return time.monotonic() - self.heard

    def take(self, message: dict[str, Any]) -> bool:
        """What this one says now, of a message of its own. False, and nothing changes, where that
        is malformed."""
        if not handshake.is_status(message):
            return False
        self.doing, self.waits, self.port = message["doing"], message["waits"], message["port"]
        self.left, self.over, self.fault, self.gone = (
            message[name] for name in ("left", "over", "fault", "gone")
        )
        self.heard = time.monotonic()
        return True

    def why(self) -> tuple[int, float, str]:
        """How likely this one holds up the others, for how long, and the words; (0, 0, "") where it
        waits as they do."""
        if self.left:
            return 3, self.silent, f"{self} has left: it was last {self.doing}"
        if self.silent > SILENT:
            words = (
                f"{self} is stopped, or holds Python's lock: it was heard last "
                f"{self.silent:.1f} s ago, {self.doing}"
            )
            return 2, self.silent, words
        return (0, 0.0, "") if self.waits else (1, self.silent, f"{self} is {self.doing}")


class Peers:
    """The other processes of a job, for as long as this one lives.

    Args:
        job: of several processes, with a coordinator.
        limit: seconds within which all must have come.
        spent: how many of these seconds have gone before this call.
    """

    def __init__(self, job: launch.Job, limit: float, spent: float = 0.0):
        self.job, self.limit = job, limit
        self.others: list[Peer] = []  # on rank 0 all others; elsewhere rank 0
        self.gone = ""  # who is, in words
        self._about, self._secret = about(job), handshake.secret(job)
        self._message: dict[str, Any] = {
            "doing": "starting",
            "waits": True,
            "left": False,
            "over": False,
        }
        self._message |= {"fault": "", "gone": "", "port": 0}
        self._said: set[Hashable] = set()
        self._here, self._met = threading.Event(), threading.Event()
        self._sending = threading.Lock()
        self._sent = time.monotonic()
        self._began = self._sent - spent
        run = (
            functools.partial(self._lead, handshake.listen(job)) if job.rank == 0 else self._follow
        )
        threading.Thread(target=run, name="peers", daemon=True).start()

    # What this process tells

    def coordinator(self) -> str:
        """The address for JAX's coordinator, once all processes have come: at a port that was free
        a moment ago."""
        self._here.wait()
        port = self._message["port"] if self.job.rank == 0 else self.others[0].port
        host = handshake.bound(self.job)
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def met(self) -> None:
        """JAX has connected all processes."""
        self._met.set()

    def does(self, doing: str, *, waits: bool) -> None:
        """What this process does from now on; `waits` says that it cannot end without the
        others."""
        self._message |= {"doing": doing[: handshake.SHORT], "waits": waits}

    def leave(self) -> None:
        """This process has done its part, and waits for the others to do theirs."""
        self._message["left"] = True
        self._send(now=True)

    def close(self) -> None:
        """The job is over, and this process may go: that its connection closes is no fault. Returns
        once the others know."""
        self._message["over"] = True
        self._send(now=True)
        for peer in list(self.others):
            with contextlib.suppress(
                OSError
            ):  # a process that goes with words unread would take its own last ones back
                peer.line.connection.shutdown(socket.SHUT_WR)
        until = time.monotonic() + LAST
        while self.others and time.monotonic() < until:
            time.sleep(0.01)

    # What it knows

    def fault(self) -> str:
        """Whom to name where this process waits for too long, in words; empty where nobody is
        known."""
        if self.gone:
            return self.gone
        sure, _, words = max((peer.why() for peer in list(self.others)), default=(0, 0.0, ""))
        told = self.others[0].fault if self.job.rank and self.others and sure < 2 else ""
        return told or words

    def end_late(self) -> None:
        """End this process, for those that did not come in time, which are named. Rank 0 knows who,
        and has the word."""
        while self.job.rank and self.others and time.monotonic() < self._began + self.limit:
            time.sleep(BEAT / 5)
        here = {0, self.job.rank, *(peer.about["rank"] for peer in self.others)}
        missing = (
            [rank for rank in range(self.job.processes) if rank not in here]
            if self.job.rank == 0
            else []
        )
        words = ", ".join(f"rank {rank}" for rank in missing[:8]) + ", ..." * (len(missing) > 8)
        if self.job.rank and not self.others:
            words = f"rank 0 at {self.job.coordinator}"
        why = f"{words} did not come" if words else self.fault() or "a process did not come"
        self._message["gone"] = why
        self._send(now=True)
        launch.end(
            f"{self.job.who}: the start took more than the {self.limit:g} s allowed: {why}. "
            f"The job ends.\n"
        )

    # The thread

    def _lead(self, server: socket.socket) -> None:
        """On rank 0: who connects is asked, heard, and told; one of the job that closes without a
        word ends it."""
        server.setblocking(False)
        with selectors.DefaultSelector() as selector:
            selector.register(server, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select(BEAT):
                    if key.fileobj is server:
                        self._accept(server, selector)
                    elif isinstance(key.data, handshake.Newcomer):
                        self._hear(key.data, selector)
                    elif not self._read(key.data):
                        selector.unregister(key.fileobj)
                        self._closed(key.data)
                for key in list(selector.get_map().values()):
                    if (
                        isinstance(key.data, handshake.Newcomer)
                        and time.monotonic() > key.data.came + handshake.ANSWER
                    ):
                        self._turn_away(key.data, selector, "it says nothing")
                self._message["fault"] = self.fault()
                self._send()
                self._in_time()

    def _accept(self, server: socket.socket, selector: selectors.BaseSelector) -> None:
        with contextlib.suppress(OSError):
            connection, where = server.accept()
            connection.setblocking(False)
            newcomer = handshake.Newcomer(handshake.Line(connection), *where[:2])
            selector.register(connection, selectors.EVENT_READ, newcomer)
            waiting = [
                key.data
                for key in selector.get_map().values()
                if isinstance(key.data, handshake.Newcomer)
            ]
            if (
                len(waiting) > NEWCOMERS
            ):  # the oldest goes: a rank shows who it is within milliseconds, a silent one never
                self._turn_away(
                    min(waiting, key=lambda other: other.came), selector, "too many ask at once"
                )

    def _hear(self, newcomer: handshake.Newcomer, selector: selectors.BaseSelector) -> None:
        """Hear a newcomer; once it has shown that it is of the job, it is another."""
        messages = newcomer.line.read()
        for message in messages or []:
            known = newcomer.hear(message, self._secret, range(1, self.job.processes))
            if known is False:
                return self._turn_away(newcomer, selector, "it does not know this job's secret")
            if known:
                return self._let_in(newcomer, selector)
        if messages is None:
            self._turn_away(newcomer, selector, "it left before it had shown anything")

    def _let_in(self, newcomer: handshake.Newcomer, selector: selectors.BaseSelector) -> None:
        if self._message["port"] or newcomer.rank in {other.about["rank"] for other in self.others}:
            newcomer.line.send({"refused": f"a rank {newcomer.rank} has come already"})
            return self._turn_away(newcomer, selector, f"a rank {newcomer.rank} has come already")
        peer = Peer(newcomer.line, newcomer.about)
        selector.modify(peer.line.connection, selectors.EVENT_READ, peer)
        self.others.append(peer)
        if len(self.others) == self.job.processes - 1:
            self._message["port"] = handshake.free_port(self.job)
            self._here.set()
        peer.line.send(self._message | {"about": self._about})
        self._send(now=True)

    def _turn_away(
        self, newcomer: handshake.Newcomer, selector: selectors.BaseSelector, why: str
    ) -> None:
        selector.unregister(newcomer.line.connection)
        newcomer.line.connection.close()
        self._say(
            (newcomer.host, newcomer.rank, why),
            f"{self.job.who} turned away {newcomer}: {why}. The job goes on.",
        )

    def _follow(self) -> None:
        """On another rank: rank 0 is looked for, heard, and told; where it closes without a word,
        this process ends."""
        host, _ = handshake.address(self.job)
        while not self.others:
            for port in handshake.ports(self.job):
                self._in_time()
                with contextlib.suppress(OSError):
                    self._present(socket.create_connection((host, port), timeout=BEAT))
                    break
            time.sleep(BEAT / 5)
        self._began = (
            time.monotonic() + GRACE
        )  # rank 0 began before, and its limit ends before this one
        heard = True
        while heard:
            if self.others[0].port:
                self._here.set()
            self._send()
            self._in_time()
            heard = self._read(self.others[0])
        self._closed(self.others[0])

    def _present(self, connection: socket.socket) -> None:
        """Ask to be let in. Raises `OSError` where it is not rank 0 of this job that listens, or it
        does not let this one in."""
        where = connection.getpeername()
        # Where nobody listens yet, the system can give the port to the socket that asks for it,
        # which then hears itself.
        if connection.getsockname() == where:
            connection.close()
            raise ConnectionRefusedError
        line = handshake.Line(connection)
        answer, message = handshake.present(line, self.job.rank, self._secret, self._about)
        if answer == handshake.IN:
            peer = Peer(line, message["about"])
            peer.take(message)
            self.others.append(peer)
            return
        connection.close()
        asked = (
            f"{self.job.who} was not let in at {where[0]} port {where[1]}: {answer}. It "
            f"looks on for rank 0 of its job."
        )
        self._say((where, answer), asked)
        time.sleep(1.0)  # and asks there again
        raise ConnectionRefusedError

    def _read(self, peer: Peer) -> bool:
        """Take in what another process has said. False where its connection is closed."""
        messages = peer.line.read()
        for message in messages or []:
            if not peer.take(message):
                self._say(
                    (peer, "malformed"),
                    f"{self.job.who} dropped a malformed message from {peer}. The job goes on.",
                )
        return messages is not None

    def _say(self, what: Hashable, line: str) -> None:
        """Write a line about a stranger, or a malformed message, once, and about the first few
        alone."""
        if what not in self._said and len(self._said) < LINES:
            self._said.add(what)
            signals.say(line + " More of this is not printed." * (len(self._said) == LINES))

    def _send(self, *, now: bool = False) -> None:
        if now or time.monotonic() > self._sent + BEAT:
            self._sent = time.monotonic()
            for peer in list(self.others):
                with self._sending:
                    peer.line.send(self._message)

    def _in_time(self) -> None:
        if not self._met.is_set() and time.monotonic() > self._began + self.limit:
            self.end_late()

    def _closed(self, peer: Peer) -> None:
        """A connection is closed. Where there was no good-bye the job ends; the process that failed
        has the last word."""
        if not peer.over and not self._message["over"]:
            self.gone = peer.gone or f"{peer} is gone: it was last {peer.doing}"
            self._message["gone"] = self.gone
            line = f"{self.job.who}: {self.gone}. The job ends."
            if (
                self.job.rank == 1 and not peer.gone
            ):  # of rank 0: without it JAX aborts within milliseconds, and names nobody
                signals.say(line)
                line = ""
            self._send(now=True)
            time.sleep(GRACE)
            launch.end(line and f"{line}\n")
        peer.line.connection.close()
        self.others.remove(peer)


def about(job: launch.Job) -> dict[str, Any]:
    """Who this process is, for others: words for their lines, and nothing else is done with
    them."""
    return {"rank": job.rank, "host": socket.gethostname(), "process": os.getpid()}


def age() -> float:
    """Seconds since this process began, its imports included; 0 where the system does not say."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, IndexError):
        return 0.0
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
