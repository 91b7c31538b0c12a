"""Ends a job if a step takes too long, and names the rank that held up the job.

A collective waits forever for a rank that sleeps or is stuck on a dead disk. Heartbeats do not
detect such a rank, because its process is still alive. So each rank notes its *phase*, the name of
the part of the step that the rank is doing. The message that the watchdog prints names the phase,
and so says what the rank was doing.
"""

import contextlib
import faulthandler
import sys
import threading
import time

from parallax.run import signals
from parallax.run.job import Job, end
from parallax.run.peers import GRACE

LAST_RESORT = 2 * GRACE + 0.5  # seconds after the limit; `culprit` needs at most 2 GRACE of them
YEAR = 3.2e7  # seconds; `faulthandler` takes no `inf`


class Watchdog:
    """Ends the job when a step takes too long, and names the rank that held up the job, and the
    last phase of that rank.

        with Watchdog(job, seconds=60) as watch:
            for i in range(steps):
                watch.step(i)              # the time begins again
                batch = ...
                watch.phase("train", waits=True)
                ...

    The time runs from the moment when the watchdog is made. Make the watchdog before any other
    work, so that the argument `first` limits the whole start.

    Every rank watches itself. A phase that communicates is marked `waits`: the rank cannot end such
    a phase without the other ranks. A rank that waits is probably held up by another rank. So after
    the step's time limit, the waiting rank lets `peers.GRACE` seconds pass before it prints its
    message. The rank at fault prints first, at the time limit itself. It prints the stacks of its
    threads too, and ends the job. If that rank cannot print, because it is stopped, is gone or
    holds Python's lock, the other ranks name it, by `Peers.culprit`.

    Args:
        job: the job that `processes.initialize` returned.
        seconds: the longest time that a step may take.
        first: the longest time until the second step begins; this time includes compiling the first
            step. The default is ten times `seconds`.

    Raises:
        ValueError: `seconds` is not above 0.
    """

    def __init__(self, job: Job, *, seconds: float, first: float | None = None):
        """Starts the clock of the first step. The thread that watches the steps starts when the
        `with` block begins.
        """
        if seconds <= 0:
            raise ValueError(f"Watchdog needs seconds above 0; got {seconds}.")
        self.job = job
        self.seconds, self.first = seconds, 10 * seconds if first is None else first
        self._number: int | None = None  # of the current step
        self._steps = 0  # that have begun
        # Before the first step, a rank restores and compiles, which both wait for all ranks. So a
        # late rank of several is probably not at fault.
        self._phase, self._waits = "start", job.processes > 1
        self._step_began = self._phase_began = time.monotonic()
        self._left = threading.Event()  # set at the end of the `with` block
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self):
        self._thread.start()
        self._arm()
        return self

    def __exit__(self, *_):
        """Ends the thread that watches the steps, and cancels the timer that `_arm` set."""
        self._left.set()  # ends the thread
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()

    def step(self, number: int, phase: str = "begin") -> None:
        """Notes that step `number` begins now, and sets the phase of this rank to `phase`. The time
        of the step is counted from now on. The steps are also counted, because the first step after
        a start is compiled and may take longer, whatever its number.
        """
        self._number, self._steps, self._step_began = number, self._steps + 1, time.monotonic()
        self._arm()
        self.phase(phase)

    def phase(self, name: str, *, waits: bool = False) -> None:
        """Sets the phase of this rank. `waits` says that the phase cannot end without the other
        ranks.
        """
        self._phase, self._waits, self._phase_began = name, waits, time.monotonic()
        if self.job.peers:
            self.job.peers.does(f"{self._where}, phase {name!r}", waits=waits)

    @property
    def _limit(self) -> float:
        """The seconds that the current step may take. Until the second step begins, the limit is
        `first`, because the first step is compiled.
        """
        return self.seconds if self._steps > 1 else self.first

    @property
    def _where(self) -> str:
        """The current step, in words for a message, such as "in step 3"."""
        return "before the first step" if self._number is None else f"in step {self._number}"

    def _arm(self) -> None:
        """Sets a timer in C code that ends the process `LAST_RESORT` seconds after the step's
        limit. While another thread holds Python's lock (GIL), the watchdog's thread cannot run,
        but the timer works.
        """
        faulthandler.dump_traceback_later(
            min(self._limit + LAST_RESORT, YEAR), exit=True, file=sys.__stderr__ or 2
        )

    def _watch(self) -> None:
        """Waits, in a thread, until a step takes too long; then prints which rank is at fault and
        ends the process. If the step ends during the search for the rank, the thread goes on
        waiting; if the work ends, so does the thread.
        """
        while True:
            while (seconds_left := self._step_began + self._limit - time.monotonic()) > 0:
                # Short waits: the limit may become shorter, as when the second step begins.
                if self._left.wait(min(seconds_left, 0.5)):
                    return
            waits, began, phase = self._waits, self._step_began, self._phase
            # A rank that waits is probably held up by another rank. It searches for that rank, and
            # the search takes `GRACE` seconds, so the other rank prints its message first.
            culprit = self._culprit() if waits else ""
            if self._left.is_set():  # the work ended during the search
                return
            if self._step_began == began:  # still the same step: it is really late
                break
        with contextlib.suppress(Exception):
            faulthandler.dump_traceback()
        doing = "waits for the other ranks" if waits else "holds up the job"
        now = time.monotonic()
        signals.say(
            (f"at fault: {culprit}\n" if culprit else "")
            + f"watchdog: {self.job.who} {doing}: {self._where}, which has taken "
            f"{now - began:.1f} s of the {self._limit:g} s allowed, "
            f"{now - self._phase_began:.1f} s of them in phase {phase!r}. The job ends."
        )
        # A rank above 0 tells the others that it ends. Rank 0 may have finished its work; at its
        # exit it would wait for this rank until JAX's heartbeats time out. A rank 0 at fault tells
        # the others too, so that they name rank 0. A rank 0 that only waits tells nobody: JAX's
        # service ends with rank 0, and then the others end too.
        if self.job.peers and (self.job.rank or not waits):
            did = "waited too long for the other ranks" if waits else "held up the job"
            self.job.peers.tell(f"{did} {self._where}, in phase {phase!r}")
        end("")

    def _culprit(self) -> str:
        """Returns a message that names the process at fault; "" if none is known. The call takes
        `GRACE` seconds, or more if JAX's service does not answer.
        """
        if self.job.peers:
            return self.job.peers.culprit()
        time.sleep(GRACE)  # as long as a search takes: the step may still end in that time
        return ""
