"""A step that takes too long ends the job, and the rank that held it up is named.

A collective waits for ever for a rank that sleeps, reads a dead disk, or waits for something else, and no heartbeat fails. What
each rank was doing is the one thing worth knowing then.
"""

import contextlib
import faulthandler
import threading
import time

from parallax.run import processes


class Watchdog:
    """Ends the job when a step takes too long, and names the rank that held it up, with its last phase.

        with Watchdog(job, seconds=60) as watch:
            for i in range(steps):
                watch.step(i)              # the time begins again
                batch = ...
                watch.phase("train", waits=True)
                ...

    Every rank watches itself. In a phase that `waits` for the others (all that communicates) it is likely a victim, and says so
    only `processes.GRACE` seconds later: the rank that never came speaks first, with the stacks of its threads, and ends the job.

    Args:
        job: what `processes.initialize` found.
        seconds: the longest that a step may take.
        first: the same for what comes before the second step, which compiles; ten times `seconds` by default.

    Raises:
        ValueError: `seconds` is not above 0.
    """

    def __init__(self, job: processes.Job, *, seconds: float, first: float | None = None):
        if seconds <= 0:
            raise ValueError(f"Watchdog needs seconds above 0; got {seconds}.")
        self.job = job
        self.seconds, self.first = seconds, 10 * seconds if first is None else first
        self._number: int | None = None
        self._steps = 0
        self._phase, self._waits = "start", False
        self._step_began = self._phase_began = time.monotonic()
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._left.set()
        self._thread.join()

    def step(self, number: int, phase: str = "begin") -> None:
        """Step `number` begins now."""
        self._number, self._steps, self._step_began = number, self._steps + 1, time.monotonic()
        self.phase(phase)

    def phase(self, name: str, *, waits: bool = False) -> None:
        """What this rank does from now on; `waits` says that it cannot end without the other ranks."""
        self._phase, self._waits, self._phase_began = name, waits, time.monotonic()

    def _watch(self) -> None:
        while True:
            limit = (self.seconds if self._steps > 1 else self.first) + processes.GRACE * self._waits
            left = self._step_began + limit - time.monotonic()
            if left <= 0:
                break
            if self._left.wait(min(left, 0.5)):
                return
        now = time.monotonic()
        doing = "waits for the other ranks" if self._waits else "holds up the job"
        where = "before the first step" if self._number is None else f"in step {self._number}"
        with contextlib.suppress(Exception):
            faulthandler.dump_traceback()
        processes.end(
            f"watchdog: {self.job.who} {doing}: {where}, which has taken {now - self._step_began:.1f} s of the "
            f"{limit - processes.GRACE * self._waits:g} s allowed, {now - self._phase_began:.1f} s of them in phase "
            f"{self._phase!r}. The job ends.\n"
        )
