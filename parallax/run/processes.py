"""Many processes as one job: a failure in one ends all of them, and a preemption saves all.

There is no launcher here. `srun`, `mpirun`, Kubernetes or Cloud TPU starts the same program on
every machine; `jax.distributed` reads their variables and connects the processes. With JAX's
defaults a process that raises leaves the others waiting for minutes; `run` ends the job at once.
JAX's preemption service swallows SIGTERM; `preemption` polls it, so that all processes stop at one
step.

    job = processes.initialize()
    processes.run(lambda: train(job), job)
"""

import contextlib
import math
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import jax
import numpy as np
from jax.experimental import multihost_utils

from parallax.collectives import types
from parallax.run import lock, signals
from parallax.run.job import FAILED, REFUSED, Job, end, interrupted
from parallax.run.peers import Peers

Result = TypeVar("Result")
NUMBER, RANK = "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"  # variables, where JAX knows no launcher
ALONE = "coordinator_address should be defined"  # JAX's words where it finds no launcher
SPARE = 60  # seconds that JAX's own limit of the start has more: it would end without a sentence


def initialize(
    coordinator: str | None = None,
    processes: int | None = None,
    rank: int | None = None,
    *,
    cpu_devices: int | None = None,
    local_device_ids: Sequence[int] | None = None,
    initialization_timeout: float = 300.0,
    heartbeat_timeout: int = 60,
    say: Callable[[str], Any] = print,
) -> Job:
    """Connects the processes of a job, once, before any device is used.

    `jax.distributed.initialize` finds out who started the process: Slurm, Open MPI, Kubernetes or
    Cloud TPU. For other launchers pass the three arguments, or set JAX_COORDINATOR_ADDRESS,
    JAX_NUM_PROCESSES and JAX_PROCESS_ID; `coordinator` alone replaces the address that was found.
    A process that no launcher started is a job alone, and connects to nothing.

    Args:
        coordinator: `host:port` at which JAX's coordination service of rank 0 listens; on
            `localhost`, at that address alone.
        cpu_devices: virtual CPU devices of the whole job; each process makes its share. Other
            platforms ignore it.
        local_device_ids: the accelerators of this machine that this process uses. Under Slurm and
            Open MPI the default is one for each process, its local rank.
        initialization_timeout: seconds within which all processes connect. After them each process
            that waits ends, with a sentence. They count from the start of the process, because slow
            imports keep the others waiting too; where this call comes late, half of them remain.
        heartbeat_timeout: seconds without a heartbeat after which JAX ends the job.

    Raises:
        ValueError: some of the three arguments are missing, JAX needs more than the launcher's
            variables say, or `cpu_devices` does not divide by the processes.
    """
    coordinator, processes, rank = _told(coordinator, processes, rank)
    connected = True
    try:
        with _start_limit(initialization_timeout):
            jax.distributed.initialize(
                coordinator,
                processes,
                rank,
                local_device_ids,
                initialization_timeout=math.ceil(initialization_timeout) + SPARE,
                heartbeat_timeout_seconds=heartbeat_timeout,
                coordinator_bind_address=coordinator if _is_local(coordinator) else None,
            )
    except ValueError as error:
        # JAX's words where nothing says that there are other processes.
        if coordinator or rank is not None or ALONE not in str(error):
            raise
        connected = False
    job = Job(*types.rank_and_processes()) if connected else Job()
    if cpu_devices is not None:
        if cpu_devices % job.processes:
            jax.distributed.shutdown()
            divisible = max(job.processes, cpu_devices // job.processes * job.processes)
            raise ValueError(
                f"initialize: cpu_devices={cpu_devices} must divide by the {job.processes} "
                f"processes. Use {divisible} devices."
            )
        jax.config.update("jax_num_cpu_devices", cpu_devices // job.processes)
    if job.processes > 1:
        peers = Peers(job, types.coordination_client(), initialization_timeout)
        job = Job(job.rank, job.processes, peers)
    if job.rank == 0:
        say(str(job))
    return job


def _told(
    coordinator: str | None, processes: int | None, rank: int | None
) -> tuple[str | None, int | None, int | None]:
    """Returns the three arguments, or the three variables. Refuses some of them without the
    others."""
    if processes is None and rank is None and {NUMBER, RANK} <= os.environ.keys():
        processes, rank = int(os.environ[NUMBER]), int(os.environ[RANK])
        coordinator = coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS")
    if (processes, rank) != (None, None) and None in (coordinator, processes, rank):
        raise ValueError(
            "initialize needs coordinator, processes and rank together; got "
            f"coordinator={coordinator!r}, processes={processes}, rank={rank}. Give all three, or "
            "none where a launcher starts the processes."
        )
    if coordinator is not None and not coordinator.rpartition(":")[2].isdigit():
        raise ValueError(
            f'initialize needs a coordinator "host:port", with a port that is free on rank 0; got '
            f"{coordinator!r}."
        )
    return coordinator, processes, rank


def _is_local(coordinator: str | None) -> bool:
    """Returns whether other machines cannot reach the coordinator's address."""
    host = (coordinator or "").rpartition(":")[0].strip("[]")
    return host in ("localhost", "::1") or host.startswith("127.")


def _age() -> float:
    """Returns the seconds since this process began, its imports included; 0 where the system does
    not say."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, IndexError):
        return 0.0
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))


@contextlib.contextmanager
def _start_limit(seconds: float) -> Iterator[None]:
    """Ends the process with a sentence where it has not left the body `seconds` after its start."""
    timer = threading.Timer(
        max(seconds - _age(), seconds / 2),
        end,
        [
            f"{socket.gethostname()} (process {os.getpid()}): the processes did not all connect "
            f"within the {seconds:g} s allowed (initialization_timeout). One did not start, or "
            "was killed. The job ends.\n"
        ],
    )
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


# How it ends


def run(main: Callable[[], Any], job: Job) -> None:
    """Calls `main`, and ends this process: with code 0 when it returns, with another if it raises.

    The traceback is printed once, and no exit handler, barrier or thread is waited for, because
    each might wait for a process that is gone. The other processes read within two seconds that
    this one raised, and end. A process that fails because another one is gone waits
    `peers.GRACE` seconds and names that one. `SystemExit` ends the process with its code and
    message. A folder that another run holds gives one line.
    """
    several = jax.distributed.is_initialized()
    hear = StopRequest(several).hear if several else interrupted
    numbers = (signal.SIGINT, signal.SIGHUP) if several else (signal.SIGINT,)
    try:
        with signals.listening(hear, *numbers):
            main()
    except lock.Held as held:
        _fail(job, f"error: {held}\n", "found the folder in use", REFUSED)
    except SystemExit as ending:
        if isinstance(ending.code, int) and ending.code:
            _fail(job, "", f"ended with code {ending.code}", ending.code)
        elif ending.code:
            _fail(job, f"{ending.code}\n", "ended early")
    except BaseException as error:
        text = traceback.format_exc()
        if job.peers and of_peers(error):
            # The launcher's SIGTERM, which JAX's preemption service would swallow.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            culprit = job.peers.culprit() or "no process is known to be gone"
            text = f"{job.who} lost the other processes, or its devices failed: {culprit}\n{text}"
        _fail(job, text, f"raised {type(error).__name__}")
    _shut_down(job)
    sys.exit(0)


def _fail(job: Job, message: str, why: str, code: int = FAILED) -> None:
    """Prints `message`, tells the other processes `why`, and ends this one."""
    with contextlib.suppress(OSError):
        os.write(2, message.encode(errors="replace"))
    if job.peers:
        job.peers.tell(why)
    end("", code)


def _shut_down(job: Job) -> None:
    """Waits until all processes have come this far, and disconnects."""
    if job.peers:
        job.peers.leave()
    if jax.distributed.is_initialized():
        jax.distributed.shutdown()
    if job.peers:
        job.peers.close()


def of_peers(error: BaseException) -> bool:
    """Returns whether another process may have caused an error: it is JAX's runtime error, or its
    cause is."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, jax.errors.JaxRuntimeError):
        cause = cause.__cause__
    return cause is not None


def all_or_none(
    prepare: Callable[[], Result], job: Job, *, refused: Callable[[], Any] = lambda: None
) -> Result:
    """Returns `prepare()` on all ranks, or ends all of them where it fails on one.

    For what comes before the work: a wrong flag that every rank finds, or a file that is missing on
    one machine alone. Every rank calls it. The lowest rank that met a `ValueError`, an `OSError` or
    an `ImportError` prints it in one line, and all end with code 2. Other errors are raised.

    Args:
        refused: called on every rank before it ends, to undo what was done for the job, such as a
            lock on its folder.
    """
    result, error = None, None
    try:
        result = prepare()
    except (ValueError, OSError, ImportError) as failure:
        error = failure
    ranks = np.flatnonzero(multihost_utils.process_allgather(np.asarray(error is not None)))
    if not ranks.size:
        return cast(Result, result)
    refused()
    if job.rank == ranks[0]:
        print(f"error: {error}", file=sys.stderr, flush=True)
    # A launcher ends the others as soon as one is gone, so all come this far first.
    _shut_down(job)
    end("", REFUSED)


class StopRequest:
    """Whether a signal asked the job to end: a function of the step, with the same answer on all
    processes.

    Attributes:
        by: the name of the signal.
    """

    def __init__(self, several: bool):
        self.by = signal.SIGTERM.name
        self._several = several
        self._came = threading.Event()

    def __call__(self, step: int) -> bool:
        """Returns whether to save and end after `step`."""
        return (
            multihost_utils.reached_preemption_sync_point(step)
            if self._several
            else self._came.is_set()
        )

    def hear(self, number: signal.Signals, count: int) -> None:
        """Handles a signal, for `signals.listening`: a Ctrl-C after any other one ends at
        once."""
        if count > 1 and number == signal.SIGINT:
            interrupted(number, count)
        if number == signal.SIGHUP:
            signals.leave_terminal()
        if count == 1:
            self.by = number.name
            signals.say(
                f"{number.name}: the run saves after this step, and ends. Ctrl-C now ends it "
                f"at once, with no save."
            )
        if self._several:
            os.kill(
                os.getpid(), signal.SIGTERM
            )  # JAX's preemption service hears it, and tells all processes
        self._came.set()


@contextlib.contextmanager
def preemption() -> Iterator[StopRequest]:
    """A function of the step: whether SIGTERM, Ctrl-C or SIGHUP has come, to any process. It says
    yes at one step on all of them.

        with processes.preemption() as preempted:
            for i in range(start, steps):
                ...
                if preempted(i):
                    checkpoints.save(i, state); break

    In a job of several processes each calls it at every step, from the same one on (JAX's
    preemption service agrees on the step after the latest, and hears SIGTERM itself, from
    `initialize` on). A second Ctrl-C ends the process at once.
    """
    several = jax.distributed.is_initialized()
    asked = StopRequest(several)
    numbers = [number for number in signals.TO_END if not (several and number == signal.SIGTERM)]
    with signals.listening(asked.hear, *numbers):
        yield asked
