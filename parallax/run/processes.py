"""Many processes as one job: if one fails, all end; if one is preempted, all save.

There is no launcher here. `srun`, `mpirun`, Kubernetes or Cloud TPU starts the same program on
every machine; `jax.distributed` reads the launcher's variables and connects the processes. With
JAX's defaults, if one process raises an error, the others wait several minutes; `run` ends the job
at once. JAX's preemption service catches SIGTERM. `preemption` yields a function that asks this
service whether to stop, so all processes stop after the same step.

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
NUMBER, RANK = "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"  # variables for launchers unknown to JAX
ALONE = "coordinator_address should be defined"  # JAX's error if it finds no launcher
SPARE = 60  # JAX's own time limit for the start is this many seconds longer than this module's


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
    """Connects the processes of a job, and returns the `Job`. Call this function once, before any
    device is used.

    `jax.distributed.initialize` detects the launchers Slurm, Open MPI, Kubernetes and Cloud TPU.
    For other launchers pass `coordinator`, `processes` and `rank`, or set JAX_COORDINATOR_ADDRESS,
    JAX_NUM_PROCESSES and JAX_PROCESS_ID. You may pass `coordinator` alone, in place of the address
    that JAX detects. A process that no launcher started is a job of one process, and connects to
    nothing.

    Args:
        coordinator: the address `host:port` at which JAX's coordination service of rank 0 listens.
            With `localhost`, other machines cannot reach the service.
        processes: the number of processes of the job.
        rank: the rank of this process, from 0.
        cpu_devices: the number of virtual CPU devices of the whole job; each process makes its
            share. Platforms other than the CPU ignore this number.
        local_device_ids: the accelerators of this machine that this process uses. Under Slurm and
            Open MPI the default is one accelerator per process, the one whose number is the rank of
            the process on its machine.
        initialization_timeout: the seconds within which all processes must connect. After this time
            a process that still waits prints a message and ends. The seconds are counted from the
            start of the process, so they include its imports. If the imports take long, this call
            still gets half of the seconds.
        heartbeat_timeout: the seconds without a heartbeat after which JAX ends the job.
        say: prints the number of processes, on rank 0.

    Raises:
        ValueError: `processes` or `rank` is given without the other two arguments; `coordinator`
            has no port; the launcher's variables are incomplete; or the number of processes does
            not divide `cpu_devices`.
    """
    # `_told` checks the arguments. Without a number and a rank it takes the JAX_... variables.
    coordinator, processes, rank = _told(coordinator, processes, rank)
    connected = True
    try:
        with _start_limit(initialization_timeout):
            jax.distributed.initialize(
                coordinator,
                processes,
                rank,
                local_device_ids,
                # JAX would end the process without a message, so its limit comes later.
                initialization_timeout=math.ceil(initialization_timeout) + SPARE,
                heartbeat_timeout_seconds=heartbeat_timeout,
                # With a local address, the service listens on this machine only.
                coordinator_bind_address=coordinator if _is_local(coordinator) else None,
            )
    except ValueError as error:
        # `ALONE` is JAX's error if it finds no launcher: then this is a job of one process.
        if coordinator or rank is not None or ALONE not in str(error):
            raise
        # With only one of the variables, each process would train alone.
        if given := [name for name in (NUMBER, RANK) if name in os.environ]:
            raise ValueError(
                f"initialize found no launcher, and needs both {NUMBER} and {RANK}; only "
                f"{given[0]} is set. Set the other one and JAX_COORDINATOR_ADDRESS too. For a job "
                f"of one process, unset {given[0]}."
            ) from error
        connected = False
    job = Job(*types.rank_and_processes()) if connected else Job()  # `Job()`: of one process
    if cpu_devices is not None:
        if cpu_devices % job.processes:
            # Each process disconnects before it raises, so that JAX does not report a process that
            # has ended to those that have not. `shutdown` is a meeting of all processes. None waits
            # long, since all have the same `cpu_devices`.
            jax.distributed.shutdown()
            divisible = max(job.processes, cpu_devices // job.processes * job.processes)
            raise ValueError(
                f"initialize: cpu_devices={cpu_devices} must be a multiple of the {job.processes} "
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
    """Returns the coordinator, the number of processes and the rank. If `processes` and `rank` are
    None, they are read from JAX_NUM_PROCESSES and JAX_PROCESS_ID, provided that both variables are
    set. A missing coordinator is then read from JAX_COORDINATOR_ADDRESS. Raises `ValueError` for a
    coordinator without a port, and if the number or the rank is known, but not all three values.
    """
    if processes is None and rank is None and {NUMBER, RANK} <= os.environ.keys():
        processes, rank = int(os.environ[NUMBER]), int(os.environ[RANK])
        coordinator = coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS")
    if (processes, rank) != (None, None) and None in (coordinator, processes, rank):
        raise ValueError(
            "initialize needs coordinator, processes and rank together; got "
            f"coordinator={coordinator!r}, processes={processes}, rank={rank}. Give all three, or "
            "none if a launcher starts the processes."
        )
    if coordinator is not None and not coordinator.rpartition(":")[2].isdigit():
        raise ValueError(
            f'initialize needs a coordinator "host:port", with a port that is free on rank 0; got '
            f"{coordinator!r}."
        )
    return coordinator, processes, rank


def _is_local(coordinator: str | None) -> bool:
    """Returns whether only this machine can reach the coordinator's address."""
    host = (coordinator or "").rpartition(":")[0].strip("[]")
    return host in ("localhost", "::1") or host.startswith("127.")


def _age() -> float:
    """Returns the seconds since this process began, including the time of imports; 0 on a system
    without /proc.
    """
    try:
        # Field 22 of the file is the start in clock ticks after boot; fields 1 and 2 are cut off.
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, IndexError):
        return 0.0
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))


@contextlib.contextmanager
def _start_limit(seconds: float) -> Iterator[None]:
    """Prints a message and ends the process if the `with` block has not ended `seconds` after the
    start of the process. If the block begins late, it still gets `seconds` / 2.
    """
    # A thread ends the process, because a call that waits inside JAX cannot be interrupted.
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


# The end of a job


def run(main: Callable[[], Any], job: Job) -> None:
    """Calls `main`, and then ends this process. The exit code is 0 if `main` returns, and another
    number if `main` raises an error.

    After an error, the process prints the traceback and ends. It does not wait for exit handlers,
    barriers or threads, because these might wait for a process that is gone. The other processes
    read within two seconds that this process raised an error, and end. If a process fails because
    another one is gone, it waits `peers.GRACE` seconds, and its message names the other process.
    `SystemExit` ends the process with its code and message. For `lock.Held` (another run holds the
    folder), the message is one line.
    """
    several = jax.distributed.is_initialized()
    # A signal asks a job of several processes to stop together: `hear` passes it on to JAX's
    # preemption service, which tells all processes. A single process ends at once.
    hear = StopRequest(several).hear if several else interrupted
    # SIGTERM is not listened to: in a job of several processes, JAX's service catches it. A single
    # process is ended by SIGHUP and SIGTERM anyway.
    numbers = (signal.SIGINT, signal.SIGHUP) if several else (signal.SIGINT,)
    try:
        with signals.listening(hear, *numbers):
            main()
    except lock.Held as held:
        _fail(job, f"error: {held}\n", "found the folder in use", REFUSED)
    except SystemExit as ending:
        if isinstance(ending.code, int) and ending.code:
            _fail(job, "", f"ended with code {ending.code}", ending.code)
        elif ending.code:  # a message
            _fail(job, f"{ending.code}\n", "ended early")
        # With code 0 or None the process ends as if `main` had returned.
    except BaseException as error:
        text = traceback.format_exc()
        if job.peers and of_peers(error):  # another process may have caused the error
            # While this process asks for the culprit, the launcher's SIGTERM must end it; JAX's
            # preemption service would only note the signal.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            culprit = job.peers.culprit() or "no process is known to be gone"
            text = f"{job.who} lost the other processes, or its devices failed: {culprit}\n{text}"
        _fail(job, text, f"raised {type(error).__name__}")
    _shut_down(job)
    sys.exit(0)


def _fail(job: Job, message: str, why: str, code: int = FAILED) -> None:
    """Prints `message`, tells the other processes `why` this process ends, and ends it."""
    # One system call, so that the lines of several processes do not mix.
    with contextlib.suppress(OSError):
        os.write(2, message.encode(errors="replace"))
    if job.peers:
        job.peers.tell(why)
    end("", code)  # "": the message is already printed


def _shut_down(job: Job) -> None:
    """Waits until all processes of the job have come here, and disconnects this process."""
    if job.peers:
        job.peers.leave()  # so that the others do not report this process as silent
    if jax.distributed.is_initialized():
        jax.distributed.shutdown()
    # Until here the thread of `peers` still ends this process if another one raises an error.
    if job.peers:
        job.peers.close()


def of_peers(error: BaseException) -> bool:
    """Returns whether another process may have caused `error`, that is, whether `error` or an error
    in its chain of causes is a runtime error of JAX.
    """
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, jax.errors.JaxRuntimeError):
        cause = cause.__cause__
    return cause is not None


def all_or_none(
    prepare: Callable[[], Result], job: Job, *, refused: Callable[[], Any] = lambda: None
) -> Result:
    """Returns `prepare()` on all ranks, or ends all ranks if `prepare` fails on any rank. Use this
    function for checks before the work, such as checks of flags, or of files that one machine may
    lack. Every rank must call it. If ranks raise a `ValueError`, an `OSError` or an `ImportError`,
    the lowest of these ranks prints its error in one line. All ranks then end with code 2. Other
    errors are raised.

    Args:
        prepare: the checks.
        job: the job that `initialize` returned.
        refused: called on every rank before the rank ends, to undo earlier work, such as to release
            the lock on a folder.
    """
    result, error = None, None
    try:
        result = prepare()
    except (ValueError, OSError, ImportError) as failure:
        error = failure
    # The ranks with an error, the same array on all ranks.
    ranks = np.flatnonzero(multihost_utils.process_allgather(np.asarray(error is not None)))
    if not ranks.size:  # no rank has an error
        return cast(Result, result)
    refused()
    if job.rank == ranks[0]:
        print(f"error: {error}", file=sys.stderr, flush=True)
    # A launcher kills all ranks as soon as one has ended, so all ranks meet here before they end.
    _shut_down(job)
    end("", REFUSED)


class StopRequest:
    """A function that takes the number of the step, and returns whether a signal has asked the job
    to end. All processes get the same answer.

    Args:
        several: whether the job has several processes.

    Attributes:
        by: the name of the first signal that `hear` has handled in this process. Before that, it is
            "SIGTERM".
    """

    def __init__(self, several: bool):
        self.by = signal.SIGTERM.name
        self._several = several
        self._reached = 0  # the last number that `__call__` gave to JAX's service
        self._came = threading.Event()

    def __call__(self, step: int) -> bool:
        """Returns whether to save and end after `step`. In a job of several processes, JAX's
        preemption service gives all of them the same answer. In a job of one process, the answer is
        whether this process has heard a signal.
        """
        # The service stops the job at one number, the one after the latest that a process has
        # reached. A run that goes back to an earlier step would have to reach that step again, so
        # the number that the service gets always rises.
        self._reached = max(self._reached + 1, step)
        return (
            multihost_utils.reached_preemption_sync_point(self._reached)
            if self._several
            else self._came.is_set()
        )

    def hear(self, number: signal.Signals, count: int) -> None:
        """Handles a signal, for `signals.listening`: asks the run to save and to end. `count` is
        the number of signals so far, with this one. A Ctrl-C that is not the first signal ends the
        process at once.
        """
        if count > 1 and number == signal.SIGINT:
            interrupted(number, count)
        if number == signal.SIGHUP:
            signals.leave_terminal()  # discards output, since the terminal is gone
        if count == 1:
            self.by = number.name
            signals.say(
                f"{number.name}: the run saves after this step, and ends. Ctrl-C now ends it "
                f"at once, with no save."
            )
        if self._several:
            # JAX's preemption service catches SIGTERM, and tells all processes. In a job of several
            # processes, `preemption` does not have `hear` called for SIGTERM.
            os.kill(os.getpid(), signal.SIGTERM)
        self._came.set()


@contextlib.contextmanager
def preemption() -> Iterator[StopRequest]:
    """Yields a function that takes the number of the step, and returns whether SIGTERM, Ctrl-C or
    SIGHUP has come to any process. The function returns true at the same step on all processes.

        with processes.preemption() as preempted:
            for i in range(start, steps):
                ...
                if preempted(i):
                    checkpoints.save(i, state); break

    In a job of several processes, each must call the function at every step, and all must begin at
    the same step. JAX's preemption service stops all processes after the latest step that any
    process has reached. The service itself catches SIGTERM, as soon as `initialize` has run. A
    Ctrl-C after a first Ctrl-C or SIGHUP ends the process at once, without a save. In a job of one
    process, a Ctrl-C after SIGTERM does so too.
    """
    several = jax.distributed.is_initialized()
    asked = StopRequest(several)
    numbers = [number for number in signals.TO_END if not (several and number == signal.SIGTERM)]
    with signals.listening(asked.hear, *numbers):
        yield asked
