"""`Job`, which describes one process of a job, and functions that end the process. JAX is not
imported here.
"""

import contextlib
import dataclasses
import os
import signal
import socket
import sys
from typing import Any, NoReturn

FAILED = 1  # the exit code of a process that raised, lost its peers, or hung
REFUSED = 2  # the exit code of a process with wrong arguments or inputs, which changed nothing


@dataclasses.dataclass(frozen=True)
class Job:
    """One process of a job, as `processes.initialize` returns it.

    Args:
        rank: the rank of this process, from 0.
        processes: the number of processes.
        peers: the other processes, a `peers.Peers`; `None` in a job of one process.
    """

    rank: int = 0
    processes: int = 1
    peers: Any = dataclasses.field(default=None, compare=False, repr=False)

    def __str__(self):
        return "1 process" if self.processes == 1 else f"{self.processes} processes"

    @property
    def who(self) -> str:
        """This process in words, as in `rank 1 on node7 (process 77)`."""
        return f"rank {self.rank} on {socket.gethostname()} (process {os.getpid()})"


def end(message: str, code: int = FAILED) -> NoReturn:
    """Prints `message` and ends the process at once, without exit handlers, which could wait for
    other processes.

    One system call writes the message, so that the lines of several processes do not mix.
    """
    # Each call fails alone: if nobody reads stdout any more, the message still goes to stderr.
    for write in (sys.stdout.flush, sys.stderr.flush):
        with contextlib.suppress(Exception):
            write()
    with contextlib.suppress(Exception):
        os.write(2, message.encode(errors="replace"))
    os._exit(code)


def interrupted(number: signal.Signals, count: int) -> NoReturn:
    """Ends the process at once, without a save. This is a handler for `signals.listening`, which
    calls it with the signal and the number of signals so far.
    """
    end(
        f"{number.name}: ended at once. Run the same command again to go on from the last "
        "checkpoint.\n",
        128 + number,  # the exit code with which a shell reports a signal
    )
