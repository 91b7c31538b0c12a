"""The other processes of a job, seen through the key-value store of JAX's coordination service.

Each process writes an *entry* into the store twice a second. An entry has the phase of the process,
which says what the process is doing (such as "in step 3"), and the number of entries that this
process has written so far. A process that raises an error writes the error too, and the other
processes then end. If a process waits too long, `Peers.culprit` reads the entries twice, and names
the process that most likely holds up the others. If a process is gone, JAX's own heartbeats end the
job.
"""

import atexit
import contextlib
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import jax

from parallax.run import job as jobs
from parallax.run import signals

BEAT = 0.5  # seconds between two entries of a process
# Seconds that `culprit` waits between two readings. When one process has failed, launchers kill the
# others within about a second. They are then killed while they wait, and the last message is the
# message of the process that failed first.
GRACE = 1.5
SILENT = 5.0  # seconds without an entry, after which rank 0 names a process
RANKS, RAISED = "parallax/ranks/", "parallax/raised/"
# Variables that are the same in all processes of a job, and differ between most jobs.
NAMES = (
    "PARALLAX_JOB_TOKEN",
    "OMPI_MCA_orte_hnp_uri",
    "PMIX_NAMESPACE",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "JOBSET_NAME",
)


class Peers:
    """Tells the other processes of a job about this process, and asks about the others. Make the
    object after JAX has connected the processes.

    Args:
        job: this process.
        client: `collectives.types.coordination_client()`.
        limit: the seconds within which rank 0 must write its first entry.

    Two jobs that were given one port may share JAX's service. So a rank prints an error and ends if
    an environment variable listed in `NAMES` has another value than on rank 0.
    """

    def __init__(self, job: jobs.Job, client: Any, limit: float):
        """Writes this process's first entry into JAX's key-value store, checks that rank 0 is of
        the same job (if not, ends the process), and starts the thread that writes further entries.
        """
        self.job, self._client = job, client
        self._entry: dict[str, Any] = {
            "who": job.who,
            "name": job_name(),
            "doing": "starting",
            "waits": True,  # for the other processes, in this phase
            "left": False,  # whether the process has finished its work
            "count": 0,  # of entries: it stands still if the process does
        }
        self._closed = threading.Event()  # set when the thread should end
        self._write_entry()
        # Waits for the first entry of rank 0, and compares the names of the two jobs.
        first = client.blocking_key_value_get(f"{RANKS}0", int(1000 * limit))
        self._rank_0 = json.loads(first)
        if self._rank_0["name"] != self._entry["name"]:
            self.tell("belongs to another job")
            jobs.end(
                # The first two of `NAMES` serve as examples.
                f"error: {job.who} met rank 0 of another job: {self._rank_0['who']}. Two jobs were "
                f"given one port, or their ranks have different values of {', '.join(NAMES[:2])}, "
                "... Give each job its own port, and all ranks of a job the same variables.\n",
                jobs.REFUSED,
            )
        self._thread = threading.Thread(target=self._run, name="peers", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # for a program that ends without `processes.run`

    def does(self, doing: str, *, waits: bool) -> None:
        """Sets the phase of this process to `doing`, such as "in step 3". `waits` says that the
        phase cannot end without the other processes.
        """
        self._entry |= {"doing": doing, "waits": waits}

    def leave(self) -> None:
        """Tells the others that this process has finished its work."""
        self._entry["left"] = True
        self._write_entry()

    def close(self) -> None:
        """Stops the thread that writes this process's entries. If a call of JAX in the thread
        returned while Python ends, the process would abort.
        """
        self._closed.set()
        self._thread.join(GRACE)

    def tell(self, why: str) -> None:
        """Tells the other processes that this process ends because of an error, so that they end
        too. `why` is the error in words, such as "raised ValueError".

        Rank 0 waits `GRACE` seconds, so that the others can read the error: JAX's service ends with
        rank 0.
        """
        self._closed.set()  # so that the thread does not read this error and end the process
        key = f"{RAISED}{self.job.rank}"
        words = f"{self.job.who} {why}"
        _within(GRACE, lambda: self._client.key_value_set(key, words))
        if self.job.rank == 0:
            time.sleep(GRACE)

    def culprit(self) -> str:
        """Returns a message that names the process that most likely holds up the others, or an
        empty text if all processes wait.

        The call takes between `GRACE` and 2 * `GRACE` seconds. If JAX's key-value store, which is
        in rank 0, does not answer in that time, rank 0 is named.
        """

        def compare() -> str:
            """Reads the entries of all processes twice. Returns the error of a process that has
            written an error into the store. If there is no error, returns a message about the
            process that most likely holds up the others.
            """
            before = self._read(RANKS)
            time.sleep(GRACE)
            raised = list(self._read(RAISED).values())
            after = self._read(RANKS)
            return raised[0] if raised else _likely(before, after, self.job.rank)

        words = _within(2 * GRACE, compare)
        # None: the store did not answer. `_rank_0` is rank 0's entry, read when this process began.
        return _silent(self._rank_0) if words is None else words

    def _write_entry(self) -> None:
        """Adds 1 to the count in this process's entry, and writes the entry into JAX's key-value
        store.
        """
        self._entry["count"] += 1
        text = json.dumps(self._entry)
        self._client.key_value_set(f"{RANKS}{self.job.rank}", text, allow_overwrite=True)

    def _read(self, folder: str) -> dict[str, Any]:
        """Returns a dict from each key in a folder of JAX's key-value store to the key's value. In
        the folder `RANKS` the values are the processes' entries; in the folder `RAISED` they are
        texts of errors."""
        entries = self._client.key_value_dir_get(folder)
        return {key: json.loads(text) if folder == RANKS else text for key, text in entries}

    def _run(self) -> None:
        """Writes this process's entry into JAX's key-value store every `BEAT` seconds, in a thread,
        and ends the process if another one raised an error. Rank 0 also prints a line about each
        process that no longer writes its entry.
        """
        # The last count of each process, by its key, and the time when that count was first read.
        heard: dict[str, tuple[int, float]] = {}
        named: set[str] = set()  # the keys of processes about which a line was printed
        while not self._closed.wait(BEAT):
            try:
                self._write_entry()
                raised = list(self._read(RAISED).values())
                entries = self._read(RANKS) if self.job.rank == 0 else {}
            except jax.errors.JaxRuntimeError:
                return  # JAX ends the process, or has shut its service down
            # If `_closed` is set, this process ends already, by itself or for its own error.
            if raised and not self._closed.is_set():
                time.sleep(BEAT)  # the process that raised prints its traceback first
                jobs.end(f"{self.job.who}: {raised[0]}. The job ends.\n")
            for key, entry in entries.items():
                count, since = heard.get(key, (-1, 0.0))
                if count != entry["count"]:
                    heard[key] = entry["count"], time.monotonic()
                elif time.monotonic() - since > SILENT and key not in named and not entry["left"]:
                    named.add(key)
                    signals.say(f"{self.job.who}: {_silent(entry)}.")


def job_name() -> str:
    """Returns a text that is the same in all processes of a job: a hash of the environment
    variables `NAMES`, by which launchers name a job. The variables are hashed because one may hold
    a secret.
    """
    values = "\0".join(os.environ.get(name, "") for name in NAMES)
    return hashlib.sha256(values.encode()).hexdigest()


def _silent(entry: dict[str, Any]) -> str:
    """Returns a message about a process that no longer writes its entry. The process wrote `entry`
    before."""
    return (
        f"{entry['who']} sends nothing: it is gone, is stopped, or holds Python's lock; it was "
        f"last {entry['doing']}"
    )


def _likely(before: dict[str, Any], after: dict[str, Any], rank: int) -> str:
    """Returns a message about the process that most likely holds up the others; "" if all wait.

    The first choice is a process that has finished its work (`leave`). The second is a process that
    wrote no entry between the two readings, `before` and `after`. The third is a process in a phase
    that does not wait for others. The process of rank `rank`, which calls this function, is never
    chosen. Each reading is a dict from a process's key to the process's entry.
    """
    left, silent, working = [], [], []
    for key, entry in after.items():
        if key == f"{RANKS}{rank}":
            continue
        if entry["left"]:
            left.append(f"{entry['who']} has left: it was last {entry['doing']}")
        elif key in before and before[key]["count"] == entry["count"]:
            silent.append(_silent(entry))
        elif not entry["waits"]:
            working.append(f"{entry['who']} is {entry['doing']}")
    return next(iter([*left, *silent, *working]), "")


def _within(seconds: float, call: Callable[[], Any]) -> Any:
    """Returns the result of `call`; `None` if the call takes longer than `seconds`, or if JAX's
    service cannot be reached. The service does not answer while rank 0 is stopped.
    """
    results = []

    def run() -> None:
        """Calls `call`, the argument of `_within`, and appends its result to `results`. Runs in a
        thread of its own: `_within` cannot interrupt the call, but can stop waiting for the thread.
        """
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            results.append(call())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None
