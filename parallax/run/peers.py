"""The other processes of a job, by the key-value store of JAX's coordination service.

Each process writes there, twice a second, its last phase and a count. A process that raises says
so there, and the others end. Where a process waits for too long, `Peers.culprit` compares two
readings and names the process that most likely holds up the others. JAX's own heartbeats end a job
of which a process is gone.
"""

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
# Seconds that `culprit` waits between two readings. Launchers send SIGKILL to the other processes a
# second after SIGTERM, so the process that failed first has the last word.
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
    """The other processes of a job, from the moment when JAX has connected them.

    Args:
        job: the process that this one is.
        client: `collectives.types.coordination_client()`.
        limit: seconds in which rank 0 writes its first entry.

    Two jobs that were given one port may share JAX's service. A rank whose variables `NAMES` are
    not those of rank 0 ends itself with a sentence.
    """

    def __init__(self, job: jobs.Job, client: Any, limit: float):
        self.job, self._client = job, client
        self._entry: dict[str, Any] = {
            "who": job.who,
            "name": job_name(),
            "doing": "starting",
            "waits": True,
            "left": False,
            "count": 0,
        }
        self._closed = threading.Event()
        self._write_entry()
        first = client.blocking_key_value_get(f"{RANKS}0", int(1000 * limit))
        self._rank_0 = json.loads(first)
        if self._rank_0["name"] != self._entry["name"]:
            self.tell("belongs to another job")
            jobs.end(
                f"error: {job.who} met rank 0 of another job: {self._rank_0['who']}. Two jobs were "
                f"given one port, or their ranks have different values of {', '.join(NAMES[:2])}, "
                "... Give each job its own port, and all ranks of a job the same variables.\n",
                jobs.REFUSED,
            )
        self._thread = threading.Thread(target=self._run, name="peers", daemon=True)
        self._thread.start()

    def does(self, doing: str, *, waits: bool) -> None:
        """Sets the phase of this process; `waits` says that it cannot end without the others."""
        self._entry |= {"doing": doing, "waits": waits}

    def leave(self) -> None:
        """Says that this process has done its part."""
        self._entry["left"] = True
        self._write_entry()

    def close(self) -> None:
        """Stops the thread. One that comes back from JAX while Python ends would abort the
        process."""
        self._closed.set()
        self._thread.join(GRACE)

    def tell(self, why: str) -> None:
        """Tells the others that this process ends, as in `why="raised ValueError"`.

        Rank 0 waits until they have read it, because JAX's service ends with rank 0.
        """
        self._closed.set()
        key = f"{RAISED}{self.job.rank}"
        words = f"{self.job.who} {why}"
        _within(GRACE, lambda: self._client.key_value_set(key, words))
        if self.job.rank == 0:
            time.sleep(GRACE)

    def culprit(self) -> str:
        """Names the process that most likely holds up the others, or returns an empty text.

        Takes `GRACE` seconds. Rank 0 is named where the store, which is part of it, does not
        answer.
        """

        def compare() -> str:
            before = self._read(RANKS)
            time.sleep(GRACE)
            raised = list(self._read(RAISED).values())
            after = self._read(RANKS)
            return raised[0] if raised else _likely(before, after, self.job.rank)

        words = _within(2 * GRACE, compare)
        return _silent(self._rank_0) if words is None else words

    def _write_entry(self) -> None:
        self._entry["count"] += 1
        text = json.dumps(self._entry)
        self._client.key_value_set(f"{RANKS}{self.job.rank}", text, allow_overwrite=True)

    def _read(self, folder: str) -> dict[str, Any]:
        """Returns the entries in a folder of the store; those of `RANKS` are records."""
        entries = self._client.key_value_dir_get(folder)
        return {key: json.loads(text) if folder == RANKS else text for key, text in entries}

    def _run(self) -> None:
        heard: dict[str, tuple[int, float]] = {}
        named: set[str] = set()
        while not self._closed.wait(BEAT):
            try:
                self._write_entry()
                raised = list(self._read(RAISED).values())
                entries = self._read(RANKS) if self.job.rank == 0 else {}
            except jax.errors.JaxRuntimeError:
                return  # JAX ends the process, or has shut its service down
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
    """Returns a text that is the same in all processes of a job; a hash, so that no token is
    shown."""
    values = "\0".join(os.environ.get(name, "") for name in NAMES)
    return hashlib.sha256(values.encode()).hexdigest()


def _silent(entry: dict[str, Any]) -> str:
    return (
        f"{entry['who']} sends nothing: it is gone, is stopped, or holds Python's lock; it was "
        f"last {entry['doing']}"
    )


def _likely(before: dict[str, Any], after: dict[str, Any], rank: int) -> str:
    """Returns the words for the process that most likely holds up the others; empty where all
    wait."""
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
    """Returns the result of `call`; `None` where it takes longer, or JAX's service cannot be
    reached.

    The service does not answer while rank 0 is stopped.
    """
    results = []

    def run() -> None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            results.append(call())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None
