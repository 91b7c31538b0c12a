"""Who of a job is still there: each process keeps a connection to rank 0, which tells all of them who is gone, or silent.

A process that ends, however it does, closes its connection, in the middle of a program too. One that is stopped, or holds
Python's lock, keeps it and says nothing. Only time tells that from long work, so there the `Watchdog` decides, and asks here whom
to name. Rank 0 listens at a port of its own, derived from the coordinator's address; where it cannot be reached, a line says so,
and nobody is named. JAX is not imported here.
"""

import contextlib
import json
import os
import selectors
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

from parallax.run import launch, signals

# Seconds in which the process that failed first, and not one that waited for it, has the last word: launchers send SIGKILL to
# what is left a second after SIGTERM.
GRACE = 1.5
BEAT = 0.5  # seconds from one message to the next
SILENT = 4 * BEAT  # seconds without one, after which a process is called silent
LATE = 10.0  # seconds in which rank 0 must be reached here, once all have come


class Peer:
    """What is known of another process: who it is, and what it said last.

    Attributes:
        about: who it is, as `about` gives it; empty until it has said so.
        doing: as in `in step 7, phase 'train'`.
        waits: whether it cannot go on without others.
        left: whether it said that it goes.
        fault: of rank 0, whom it would name.
        gone: who is gone, where this one knows.
    """

    def __init__(self, connection: socket.socket):
        self.connection = connection
        self.about: dict[str, Any] = {}
        self.doing, self.waits, self.left, self.fault, self.gone = "starting", True, False, "", ""
        self.heard = time.monotonic()
        self._rest = b""

    def __str__(self):
        return f"rank {self.about['rank']} on {self.about['host']} (process {self.about['process']})"

    @property
    def silent(self) -> float:
        """Seconds since it was heard."""
        return time.monotonic() - self.heard

    def read(self) -> bool:
        """Take in what has come. False where the connection is closed."""
        try:
            found = self.connection.recv(1 << 16)
        except (BlockingIOError, TimeoutError):
            return True
        except OSError:
            return False
        *lines, self._rest = (self._rest + found).split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError, AttributeError, TypeError):  # a stranger at this port
                message = json.loads(line)
                self.about = self.about or dict(message["about"])
                self.doing, self.waits = message["doing"], message["waits"]
                self.left, self.fault, self.gone = message["left"], message["fault"], message["gone"]
                self.heard = time.monotonic()
        return bool(found)

    def why(self) -> tuple[int, float, str]:
        """How likely this one holds up the others, for how long, and the words; (0, 0, "") where it waits as they do."""
        if self.left:
            return 3, self.silent, f"{self} has left: it was last {self.doing}"
        if self.silent > SILENT:
            words = f"{self} is stopped, or holds Python's lock: it was heard last {self.silent:.1f} s ago, {self.doing}"
            return 2, self.silent, words
        return (0, 0.0, "") if self.waits else (1, self.silent, f"{self} is {self.doing}")


class Peers:
    """The other processes of a job, for as long as this one lives.

    Args:
        job: of several processes, with a coordinator.
        limit: seconds within which all must have come.
    """

    def __init__(self, job: launch.Job, limit: float):
        assert job.coordinator is not None
        self.job, self.limit = job, limit
        self.host, self.port = job.coordinator.rpartition(":")[0].strip("[]"), launch.port(f"{job.coordinator} peers")
        self.others: list[Peer] = []  # on rank 0 all others; elsewhere rank 0
        self.gone = ""  # who is, in words
        self._message: dict[str, Any] = {"about": about(job), "doing": "starting", "waits": True, "left": False}
        self._message |= {"fault": "", "gone": ""}
        self._met = threading.Event()
        self._sending = threading.Lock()
        self._began = self._met_at = self._sent = time.monotonic()
        threading.Thread(target=self._lead if job.rank == 0 else self._follow, name="peers", daemon=True).start()

    # What this process tells

    def met(self) -> None:
        """All processes have come."""
        self._met_at = time.monotonic()
        self._met.set()

    def does(self, doing: str, *, waits: bool) -> None:
        """What this process does from now on; `waits` says that it cannot end without the others."""
        self._message |= {"doing": doing, "waits": waits}

    def leave(self) -> None:
        """This process has done its part, and may go: that its connection closes is no fault."""
        self._message["left"] = True
        self._send(now=True)

    # What it knows

    def fault(self) -> str:
        """Whom to name where this process waits for too long, in words; empty where nobody is known."""
        if self.gone:
            return self.gone
        sure, _, words = max((peer.why() for peer in list(self.others) if peer.about), default=(0, 0.0, ""))
        told = self.others[0].fault if self.job.rank and self.others and sure < 2 else ""
        return told or words

    def end_silent(self) -> None:
        """Kill the silent ones of this machine: a stopped process would keep its devices, and the folder's lock."""
        for peer in list(self.others):
            if peer.about and not peer.left and peer.silent > SILENT:
                kill(peer.about)

    def end_late(self) -> None:
        """End this process, for those that did not come in time, which are named. Rank 0 knows who, and has the word."""
        while self.job.rank and self.others and time.monotonic() < self._began + self.limit:
            time.sleep(BEAT / 5)
        here = {0, self.job.rank, *(peer.about.get("rank") for peer in self.others)}
        missing = [rank for rank in range(self.job.processes) if rank not in here] if self.job.rank == 0 else []
        words = ", ".join(f"rank {rank}" for rank in missing[:8]) + ", ..." * (len(missing) > 8)
        if self.job.rank and not self.others:
            words = f"rank 0 at {self.job.coordinator}"
        why = f"{words} did not come" if words else self.fault() or "a process did not come"
        self._message["gone"] = why
        self._send(now=True)
        self.end_silent()
        launch.end(f"{self.job.who}: the start took more than the {self.limit:g} s allowed: {why}. The job ends.\n")

    # The thread

    def _lead(self) -> None:
        """On rank 0: who connects is heard, and told; one that closes without a word ends the job."""
        try:
            server = socket.create_server(("", self.port), backlog=self.job.processes)
        except OSError as error:
            signals.say(f"{self.job.who} cannot listen at port {self.port} ({error}): a process that hangs is not named.")
            return
        with selectors.DefaultSelector() as selector:
            selector.register(server, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select(BEAT):
                    if key.fileobj is server:
                        self._accept(server, selector)
                    elif not key.data.read():
                        selector.unregister(key.fileobj)
                        self._closed(key.data)
                self._message["fault"] = self.fault()
                self._send()
                self._in_time()

    def _accept(self, server: socket.socket, selector: selectors.BaseSelector) -> None:
        with contextlib.suppress(OSError):
            connection, _ = server.accept()
            connection.setblocking(False)
            peer = Peer(connection)
            selector.register(connection, selectors.EVENT_READ, peer)
            self.others.append(peer)
            self._send_to(peer)

    def _follow(self) -> None:
        """On another rank: rank 0 is heard, and told; where it closes without a word, this process ends."""
        while not self.others and not self._late():
            with contextlib.suppress(OSError):
                connection = socket.create_connection((self.host, self.port), timeout=BEAT)
                peer = Peer(connection)
                # Where nobody listens yet, the system can give the port to the socket that asks for it, which then hears itself.
                if connection.getsockname() == connection.getpeername():
                    connection.close()
                    raise ConnectionRefusedError
                self._send_to(peer)
                while not peer.about and peer.read() and not self._late():
                    pass  # rank 0 may be slow to answer; closing would look like an end
                if (peer.about.get("job"), peer.about.get("rank")) == (self.job.coordinator, 0):
                    self.others.append(peer)
                    self._began = time.monotonic() + GRACE  # rank 0 began before, and its limit ends before this one
            time.sleep(BEAT / 5)
        if not self.others:
            signals.say(f"{self.job.who} does not reach rank 0 at port {self.port}: a process that hangs is not named.")
            return
        while self.others[0].read():
            self._send()
            self._in_time()
        self._closed(self.others[0])

    def _send(self, *, now: bool = False) -> None:
        if now or time.monotonic() > self._sent + BEAT:
            self._sent = time.monotonic()
            for peer in list(self.others):
                self._send_to(peer)

    def _send_to(self, peer: Peer) -> None:
        with contextlib.suppress(OSError), self._sending:
            peer.connection.send(json.dumps(self._message).encode() + b"\n")

    def _in_time(self) -> None:
        if not self._met.is_set() and time.monotonic() > self._began + self.limit:
            self.end_late()

    def _late(self) -> bool:
        """Whether all have met, by the coordinator, and rank 0 is not to be reached here. Ends the process where they did not."""
        self._in_time()
        return self._met.is_set() and time.monotonic() > self._met_at + LATE

    def _closed(self, peer: Peer) -> None:
        """A connection is closed. Where there was no good-bye the job ends; the process that failed has the last word."""
        if peer.about and not peer.left:
            self.gone = peer.gone or f"{peer} is gone: it was last {peer.doing}"
            self._message["gone"] = self.gone
            self._send(now=True)
            told = f"{self.job.who}: {self.gone}. The job ends."
            if self.job.rank and not peer.gone:  # JAX ends who has lost rank 0 within 0.2 s, and names nobody
                signals.say(told)
                told = ""
            time.sleep(GRACE)
            launch.end(told and f"{told}\n")
        if self.job.rank == 0:
            self.others.remove(peer)


def about(job: launch.Job) -> dict[str, Any]:
    """Who this process is, for others, and on its machine."""
    return {
        "job": job.coordinator,
        "rank": job.rank,
        "host": socket.gethostname(),
        "process": os.getpid(),
        "machine": _machine(),
        "began": _began(os.getpid()),
    }


def kill(about: dict[str, Any]) -> None:
    """Send SIGKILL to the process that `about` describes, where it is of this machine, and still the same."""
    if _machine() and (about["machine"], about["began"]) == (_machine(), _began(about["process"])):
        with contextlib.suppress(OSError):
            os.kill(about["process"], signal.SIGKILL)


def _machine() -> str:
    """One start of one machine, and one space of process ids on it; empty where the system does not say."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _began(process: int) -> str:
    """When a process began, in the clock's ticks since the machine did: ids are used again."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
