"""Many processes as one job, which ends as one: what started them is found out, a failure ends all,
a preemption saves all.

There is no launcher here. `srun`, `mpirun`, a Kubernetes JobSet or Cloud TPU starts the same
program on every machine; `initialize` reads their variables and connects the processes. With JAX's
defaults one process that raises leaves the others waiting for minutes; `run` ends the job at once.
SIGTERM is swallowed by JAX's preemption service; `preemption` polls it, so that all processes stop
at one step.

    job = processes.initialize()
    processes.run(lambda: train(job), job)
"""

import contextlib
import dataclasses
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, cast

import jax
import numpy as np
from jax.experimental import multihost_utils

from parallax.run import lock, signals
from parallax.run.launch import REFUSED, TOKEN, TPU, Job, end, found, interrupted, told
from parallax.run.peers import GRACE, Peers, age

Result = TypeVar("Result")
ONE_MACHINE, CLUSTER = 60.0, 900.0  # seconds within which all processes come


def initialize(
    coordinator: str | None = None,
    processes: int | None = None,
    rank: int | None = None,
    *,
    cpu_devices: int | None = None,
    initialization_timeout: float | None = None,
    heartbeat_timeout: int = 60,
    shutdown_timeout: int = 120,
    environment: Mapping[str, str] = os.environ,
    say: Callable[[str], Any] = print,
) -> Job:
    """Connect the processes of a job, and no others, once, before any device is used; says on rank
    0 what it found.

    With `coordinator`, `processes` and `rank` it does as it is told, and `coordinator` alone
    overrides what was found. Otherwise the variables of the launcher decide, in this order: mpirun
    (Open MPI 4 and 5), mpirun of MPICH and Intel MPI, srun, a Kubernetes JobSet (or any Indexed
    Job), Cloud TPU; without any, this is a process alone, and nothing is connected.

    Rank 0 listens at the coordinator's address, where others show that they know the job's secret
    (`run.handshake`): what its launcher gives to all its processes, and the variable
    PARALLAX_JOB_TOKEN, where it is set. Only then are they told where JAX's coordinator is, at a
    port that is free. On one machine both listen where no other machine reaches them. A port that
    is taken ends rank 0 with a line, and code 2. On Cloud TPU, JAX connects the processes alone.

    Args:
        cpu_devices: virtual CPU devices of the whole job; each process makes its share. Other
            platforms take no notice.
        initialization_timeout: seconds within which all processes must have come; by default 60 on
            one machine, 900 on several. After them each one that has ends, and names those that
            have not. The seconds count from the start of the process, since slow imports keep the
            others waiting too; where this call comes late, half of them remain.
        heartbeat_timeout: seconds after which a process that is silent (its machine is gone, or
            frozen) ends the job.
        shutdown_timeout: seconds that processes wait for each other at the end.

    Raises:
        ValueError: only some of the three are given, the launcher's variables do not suffice, or
            the processes do not divide `cpu_devices`.
    """
    job = (
        told(coordinator, processes, rank, environment.get(TOKEN, ""))
        or found(environment, coordinator)
        or Job("hand")
    )
    if cpu_devices is not None:
        if cpu_devices % job.processes:
            near = max(job.processes, cpu_devices // job.processes * job.processes)
            raise ValueError(
                f"initialize: cpu_devices={cpu_devices} must divide by the {job.processes} "
                f"processes. Take {near} devices."
            )
        jax.config.update("jax_num_cpu_devices", cpu_devices // job.processes)
    limit = initialization_timeout or (ONE_MACHINE if job.on_one_machine else CLUSTER)
    timeouts: dict[str, Any] = {
        "initialization_timeout": math.ceil(limit),
        "heartbeat_timeout_seconds": heartbeat_timeout,
        "shutdown_timeout_seconds": shutdown_timeout,
    }
    if job.processes > 1:
        devices = _own_gpus(job, environment)
        peers = Peers(job, limit, min(age(), limit / 2))
        job = dataclasses.replace(job, peers=peers)
        began = time.monotonic()
        address = peers.coordinator()
        bound = {"coordinator_bind_address": address} if job.on_one_machine else {}
        try:
            jax.distributed.initialize(
                address, job.processes, job.rank, devices, **bound, **timeouts
            )
        except RuntimeError:  # of JAX, which names nobody
            if time.monotonic() < began + 0.9 * limit:
                raise
            peers.end_late()
        peers.met()
    elif job.launcher == TPU:
        jax.distributed.initialize(**timeouts)
        job = dataclasses.replace(job, rank=jax.process_index(), processes=jax.process_count())
    if job.rank == 0:
        say(str(job))
    return job


def _own_gpus(job: Job, environment: Mapping[str, str]) -> list[int] | None:
    """This process's share of the machine's GPUs, where several processes see the same ones; `None`
    is all that it sees."""
    if job.local_rank is None or job.local_processes in (None, 1):
        return None
    visible = environment.get("CUDA_VISIBLE_DEVICES", environment.get("ROCR_VISIBLE_DEVICES"))
    if visible is None:
        return [job.local_rank]
    each = len(visible.split(",")) // job.local_processes
    return (
        list(range(job.local_rank * each, (job.local_rank + 1) * each)) or None
    )  # none: the launcher has shared them out


# How it ends


def run(main: Callable[[], Any], job: Job) -> None:
    """Call `main`, and end this process: with code 0 when it returns, and at once with another when
    it raises.

    The traceback is printed once, and no exit handler, barrier or thread is waited for, since each
    might wait for a process that is gone: the other ranks lose their connection within
    milliseconds, or are ended by their launcher. A rank that fails because a peer is gone waits
    `GRACE` seconds before it says so: a launcher has ended it then, and the first to fail has the
    last word. `SystemExit` ends the process with its code and message; a folder that another run
    holds is told in a line.
    """
    hear = Told(several=True).hear if jax.distributed.is_initialized() else interrupted
    try:
        with signals.listening(
            hear, signal.SIGINT, *([signal.SIGHUP] if jax.distributed.is_initialized() else [])
        ):
            main()
    except lock.Held as held:
        end(f"error: {held}\n", REFUSED)
    except SystemExit as ending:
        if ending.code:
            end("", ending.code) if isinstance(ending.code, int) else end(f"{ending.code}\n")
    except BaseException as error:
        if job.processes > 1 and of_peers(error):
            signal.signal(
                signal.SIGTERM, signal.SIG_DFL
            )  # the launcher's, which JAX's preemption service would swallow
            time.sleep(GRACE)
            named = f": {job.peers.fault()}" if job.peers and job.peers.fault() else ""
            end(
                f"{job.who} lost the other processes, or its devices "
                f"failed{named}:\n{traceback.format_exc()}"
            )
        end(traceback.format_exc())
    if job.peers:
        job.peers.leave()
    if jax.distributed.is_initialized():
        jax.distributed.shutdown()
    if job.peers:
        job.peers.close()
    sys.exit(0)


def of_peers(error: BaseException) -> bool:
    """Whether an error may come from another process: of the runtime, or of what waits for others
    by it."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, jax.errors.JaxRuntimeError):
        cause = cause.__cause__
    return cause is not None


def together(
    prepare: Callable[[], Result], job: Job, *, refused: Callable[[], Any] = lambda: None
) -> Result:
    """`prepare()`, on all ranks or on none: where one refuses its arguments, all end, with code 2
    and that one line of error.

    For what comes before the work: a wrong flag that every rank finds, or a file that is missing on
    one machine alone. Every rank calls it. `ValueError`, `OSError` and `ImportError` are told, by
    the lowest rank that met one; the rest is raised.

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
    if job.peers:
        job.peers.leave()
    if job.processes > 1:
        # all have come this far: a launcher ends the others as soon as one is gone
        jax.distributed.shutdown()
    if job.peers:
        job.peers.close()
    end("", REFUSED)


class Told:
    """Whether the job was told to end: a function of the step, which says yes at the same step on
    all processes.

    Attributes:
        by: the name of the signal.
    """

    def __init__(self, several: bool):
        self.by = signal.SIGTERM.name
        self._several = several
        self._came = threading.Event()

    def __call__(self, step: int) -> bool:
        """Whether to save and end after `step`."""
        return (
            multihost_utils.reached_preemption_sync_point(step)
            if self._several
            else self._came.is_set()
        )

    def hear(self, number: signal.Signals, count: int) -> None:
        """What a signal does, for `signals.listening`: a Ctrl-C after any other one ends at
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
def preemption() -> Iterator[Told]:
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
    asked = Told(several)
    numbers = [number for number in signals.TO_END if not (several and number == signal.SIGTERM)]
    with signals.listening(asked.hear, *numbers):
        yield asked
