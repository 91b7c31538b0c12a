"""Who belongs to a job: rank 0 listens at the coordinator's port, and lets in who knows the job's
secret. No JAX is imported.

JAX's own coordinator takes anybody who reaches it, as does what listens for gloo and NCCL. So a
process comes here first. Only those that are let in are told at which port JAX's coordinator is,
which is free, and chosen when all have come. Both sides prove that they know the secret, which is
never sent:

    rank r -> rank 0    its rank, and a number drawn at random
    rank 0 -> rank r    another number, and its proof: an HMAC of both
    rank r -> rank 0    its own proof, and who it is
    rank 0 -> rank r    who it is; or why rank r is not let in

The lines that follow are not encrypted, and whoever can change what is on the network can change
them. `SECURITY.md` says what that means on a cluster.
"""

import contextlib
import dataclasses
import errno
import hashlib
import hmac
import json
import secrets
import socket
import time
from typing import Any, TypeGuard

from parallax.run import launch

TAKEN = 5.0  # seconds in which a port that is taken may become free: the job before this one ends
ANSWER = 10.0  # seconds that a stranger may keep a connection without a proof, or an answer
LONGEST = 1 << 16  # bytes of a line
LOOPBACK = "127.0.0.1"
IN = "in"
SHORT, LONG = 256, 1024  # characters of a host's name, or of what a process does; of a sentence


@dataclasses.dataclass(frozen=True)
class Secret:
    """What the processes of one job share: `secret.proof(rank, ...)` shows that one knows it, and
    does not tell it."""

    key: bytes = dataclasses.field(repr=False)

    def proof(self, whose: int, rank: int, of_rank: str, of_zero: str) -> str:
        """That process `whose` knows the secret, in a meeting of `rank` with rank 0: for these two
        numbers alone."""
        said = json.dumps([whose, rank, of_rank, of_zero]).encode()
        return hmac.new(self.key, said, hashlib.sha256).hexdigest()

    def proves(self, proof: Any, whose: int, rank: int, of_rank: str, of_zero: str) -> bool:
        """Whether `proof`, which may be any value, is the proof that `proof(...)` gives."""
        return isinstance(proof, str) and hmac.compare_digest(
            proof.encode(errors="replace"), self.proof(whose, rank, of_rank, of_zero).encode()
        )


def secret(job: launch.Job) -> Secret:
    """The secret of a job; jobs of another number of processes have another."""
    return Secret(hashlib.sha256(json.dumps([job.processes, job.secret]).encode()).digest())


def nonce() -> str:
    """A number that nobody can guess, and that never comes twice."""
    return secrets.token_hex(16)


def ports(job: launch.Job) -> list[int]:
    """Where rank 0 may listen: it takes the first that is free, and the others look for it at
    each."""
    _, port = address(job)
    return [port + i for i in range(job.ports)]


def address(job: launch.Job) -> tuple[str, int]:
    """The coordinator's host and its port."""
    assert job.coordinator is not None
    host, _, port = job.coordinator.rpartition(":")
    return host.strip("[]"), int(port)


def listen(job: launch.Job) -> socket.socket:
    """A socket at the first of the job's ports that is free; on one machine others cannot reach it.

    Ends the process with a line, and code 2, where none is free within `TAKEN` seconds.
    """
    until = time.monotonic() + TAKEN
    while True:
        for port in ports(job):
            try:
                return _server(job, port)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    launch.end(
                        f"error: {job.who} cannot listen at {job.coordinator}: "
                        f"{error.strerror or error}.\n",
                        launch.REFUSED,
                    )
        if time.monotonic() > until:
            _, first = address(job)
            which = (
                f"port {first}"
                if job.ports == 1
                else f"each of the ports {first} to {first + job.ports - 1}"
            )
            launch.end(
                f"error: {job.who} cannot listen at {job.coordinator}: {which} is taken, by "
                f"another job or another program. "
                'Give all ranks another one, by initialize(coordinator="host:port") or '
                "JAX_COORDINATOR_ADDRESS=host:port.\n",
                launch.REFUSED,
            )
        time.sleep(0.2)


def free_port(job: launch.Job) -> int:
    """A port that nobody listens at, on rank 0's machine."""
    with _server(job, 0) as server:
        return server.getsockname()[1]


def _server(job: launch.Job, port: int) -> socket.socket:
    host, _ = address(job)
    if job.on_one_machine:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server(
            (bound(job), port), family=family, backlog=max(128, job.processes)
        )
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=max(128, job.processes)
        )
    return socket.create_server(("", port), backlog=max(128, job.processes))


def bound(job: launch.Job) -> str:
    """The address of this machine alone at which a job on one machine listens."""
    host, _ = address(job)
    return LOOPBACK if host == "localhost" else host


# What a message may say


def is_whole(value: Any, least: int, most: int) -> bool:
    """Whether a JSON value is a whole number from `least` to `most`; true and false are none."""
    return type(value) is int and least <= value <= most


def is_text(value: Any, most: int) -> TypeGuard[str]:
    """Whether a JSON value is a text of so many characters at most, with no control character: it
    is printed."""
    return isinstance(value, str) and len(value) <= most and value.isprintable()


def is_about(value: Any, rank: int) -> bool:
    """Whether a JSON value says who `rank` is, as `peers.about` does."""
    return (
        isinstance(value, dict)
        and is_whole(value.get("rank"), rank, rank)
        and is_text(value.get("host"), SHORT)
        and is_whole(value.get("process"), 1, 2**31 - 1)
    )


def is_status(message: dict[str, Any]) -> bool:
    """Whether a message says what a process does, as `Peers` sends it; the port is 0 until all have
    come."""
    return (
        is_text(message.get("doing"), SHORT)
        and all(is_text(message.get(name), LONG) for name in ("fault", "gone"))
        and all(isinstance(message.get(name), bool) for name in ("waits", "left", "over"))
        and is_whole(message.get("port"), 0, 65535)
    )


class Line:
    """Lines of JSON, to and from another process."""

    def __init__(self, connection: socket.socket):
        self.connection = connection
        self._rest = b""

    def send(self, message: dict[str, Any]) -> None:
        """Say something; who is gone does not hear it."""
        with contextlib.suppress(OSError):
            self.connection.send(json.dumps(message).encode() + b"\n")

    def read(self) -> list[dict[str, Any]] | None:
        """What has come, which may be nothing; None where the connection is closed, or brings more
        than a line can be."""
        try:
            found = self.connection.recv(LONGEST)
        except (BlockingIOError, TimeoutError):
            return []
        except OSError:
            return None
        *lines, self._rest = (self._rest + found).split(b"\n")
        messages = []
        for line in lines:
            with contextlib.suppress(ValueError, RecursionError):
                messages.append(json.loads(line))
        if not found or len(self._rest) > LONGEST:
            return None
        return [message for message in messages if isinstance(message, dict)]


def present(
    line: Line, rank: int, secret: Secret, about: dict[str, Any]
) -> tuple[str, dict[str, Any]]:
    """Show rank 0, at the other end of `line`, that this is a rank of its job; `about` says more of
    it.

    The answer is `IN` and rank 0's message, or why not, in words. A process that proves nothing is
    told nothing.
    """
    mine, until = nonce(), time.monotonic() + ANSWER
    line.send({"rank": rank, "nonce": mine})
    proved = False
    while time.monotonic() < until:
        messages = line.read()
        if messages is None:
            return "it closed the connection", {}
        for message in messages:
            if proved and is_about(message.get("about"), 0) and is_status(message):
                return IN, message
            if proved and is_text(message.get("refused"), LONG):
                return message["refused"], {}
            if not proved and not secret.proves(
                message.get("proof"), 0, rank, mine, str(message.get("nonce"))
            ):
                line.send({})  # no proof: there it is known then why this one goes
                return (
                    f"another job listens there, or another program, or {launch.TOKEN} is not "
                    f"the same",
                    {},
                )
            if not proved:
                line.send(
                    {"proof": secret.proof(rank, rank, mine, message["nonce"]), "about": about}
                )
                proved = True
    return "it says nothing", {}


class Newcomer:
    """On rank 0: one that has connected, and has not shown yet that it is of the job.

    Attributes:
        rank: which it says that it is.
        about: what it says of itself, once it has proved the rest.
    """

    def __init__(self, line: Line, host: str, port: int):
        self.line, self.host, self.port, self.came = line, host, port, time.monotonic()
        self.rank, self.about = -1, {}
        self._theirs = self._mine = ""

    def __str__(self):
        return f"{self.host} port {self.port}" + f" (it says that it is rank {self.rank})" * (
            self.rank >= 0
        )

    def hear(self, message: dict[str, Any], secret: Secret, ranks: range) -> bool | None:
        """Whether it is of the job, once that is known; None before."""
        if not self._mine:
            rank, theirs = message.get("rank"), message.get("nonce")
            if type(rank) is not int or rank not in ranks or not is_text(theirs, SHORT):
                return False
            self.rank, self._theirs, self._mine = rank, theirs, nonce()
            self.line.send(
                {"nonce": self._mine, "proof": secret.proof(0, rank, theirs, self._mine)}
            )
            return None
        if not is_about(message.get("about"), self.rank):
            return False
        self.about = message["about"]
        return secret.proves(message.get("proof"), self.rank, self.rank, self._theirs, self._mine)
