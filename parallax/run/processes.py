"""Many processes as one job, which ends as one: what started them is found out, a failure ends all, a preemption saves all.

There is no launcher here. `srun`, `mpirun`, a Kubernetes JobSet or Cloud TPU starts the same program on every machine;
`initialize` reads their variables (nothing else in the project reads the environment) and connects the processes. With JAX's
defaults one process that raises leaves the others waiting for minutes; `run` ends the job at once. SIGTERM is swallowed by
JAX's preemption service; `preemption` polls it, so that all processes stop at one step.

    job = processes.initialize()
    processes.run(lambda: train(job), job)
"""

import contextlib
import dataclasses
import importlib.util
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

import jax
import numpy as np
from jax.experimental import multihost_utils

Result = TypeVar("Result")

FAILED = 1  # the exit code of a process that raised, lost its peers, or hung
# Seconds in which the process that failed first, and not one that waited for it, has the last word: launchers send SIGKILL to
# what is left a second after SIGTERM.
GRACE = 1.5
PORTS = 49152, 65536  # the range for private use (RFC 6335) from which a job's coordinator gets its port


@dataclasses.dataclass(frozen=True)
class Job:
    """What `initialize` found: who started this process, and which of how many it is.

    Args:
        launcher: in words.
        rank: of this process, from 0.
        processes: how many there are.
        coordinator: `host:port` of rank 0; `None` for a process alone, or where JAX finds it itself.
        local_rank: among the processes of this machine, where the launcher says so.
        local_processes: how many those are, where the launcher says so.
    """

    launcher: str
    rank: int = 0
    processes: int = 1
    coordinator: str | None = None
    local_rank: int | None = None
    local_processes: int | None = None

    @property
    def who(self) -> str:
        """This process, in words."""
        return f"rank {self.rank} on {socket.gethostname()}"

    def __str__(self):
        if self.processes == 1:
            return f"1 process, started by {self.launcher}"
        return f"{self.processes} processes, started by {self.launcher}, coordinator {self.coordinator}"


def initialize(
    coordinator: str | None = None,
    processes: int | None = None,
    rank: int | None = None,
    *,
    cpu_devices: int | None = None,
    initialization_timeout: int = 900,
    heartbeat_timeout: int = 60,
    shutdown_timeout: int = 120,
    environment: Mapping[str, str] = os.environ,
    say: Callable[[str], Any] = print,
) -> Job:
    """Connect the processes of a job, once, before any device is used; says on rank 0 what it found.

    With `coordinator`, `processes` and `rank` it does as it is told, and `coordinator` alone overrides what was found.
    Otherwise the variables of the launcher decide, in this order: mpirun (Open MPI 4 and 5), mpirun of MPICH and Intel MPI, srun,
    a Kubernetes JobSet (or any Indexed Job), Cloud TPU; without any, this is a process alone, and nothing is connected.

    Args:
        cpu_devices: virtual CPU devices of the whole job; each process makes its share. Other platforms take no notice.
        initialization_timeout: seconds that the first process waits for the last.
        heartbeat_timeout: seconds after which a process that is silent (its machine is gone, or frozen) ends the job.
        shutdown_timeout: seconds that processes wait for each other at the end.

    Raises:
        ValueError: only some of the three are given, the launcher's variables do not suffice, or the processes do not divide
            `cpu_devices`.
    """
    job = _told(coordinator, processes, rank) or found(environment, coordinator) or Job("hand")
    if cpu_devices is not None:
        if cpu_devices % job.processes:
            near = max(job.processes, cpu_devices // job.processes * job.processes)
            raise ValueError(
                f"initialize: cpu_devices={cpu_devices} must divide by the {job.processes} processes. Take {near} devices."
            )
        jax.config.update("jax_num_cpu_devices", cpu_devices // job.processes)
    timeouts: dict[str, Any] = {
        "initialization_timeout": initialization_timeout,
        "heartbeat_timeout_seconds": heartbeat_timeout,
        "shutdown_timeout_seconds": shutdown_timeout,
    }
    if job.processes > 1:
        devices = _own_gpus(job, environment)
        jax.distributed.initialize(job.coordinator, job.processes, job.rank, devices, **timeouts)
    elif job.launcher == TPU:
        jax.distributed.initialize(**timeouts)
        job = dataclasses.replace(job, rank=jax.process_index(), processes=jax.process_count())
    if job.rank == 0:
        say(str(job))
    return job


# What started this process


TPU = "Cloud TPU"


def found(environment: Mapping[str, str], coordinator: str | None = None) -> Job | None:
    """The job that the launcher's variables describe; `None` where there are none. Looks, and connects nothing.

    Raises `ValueError` where they do not say where rank 0 is, and `coordinator` does not either.
    """
    coordinator = coordinator or environment.get("JAX_COORDINATOR_ADDRESS")
    for find in (_open_mpi, _mpich, _slurm, _jobset):
        job = find(environment)
        if job is None:
            continue
        if job.processes == 1:
            return dataclasses.replace(job, coordinator=None)
        address = coordinator or job.coordinator
        if address is None:
            raise ValueError(
                f"{job.launcher} started {job.processes} processes and does not say where rank 0 is. Pass "
                f'initialize(coordinator="host:port"), or set JAX_COORDINATOR_ADDRESS=host:port for all of them.'
            )
        address = address if re.search(r":\d+$", address) else f"{address}:{_port(job.launcher)}"
        return dataclasses.replace(job, coordinator=address)
    chips = importlib.util.find_spec("libtpu") and (Path("/dev/accel0").exists() or Path("/dev/vfio/0").exists())
    return Job(TPU) if chips else None


def _told(coordinator: str | None, processes: int | None, rank: int | None) -> Job | None:
    if processes is None and rank is None:
        return None
    if processes is None or rank is None or (coordinator is None and processes > 1) or not 0 <= rank < processes:
        raise ValueError(
            "initialize needs coordinator, processes and rank together, with 0 <= rank < processes; got "
            f"coordinator={coordinator!r}, processes={processes}, rank={rank}. Or give none, and the launcher decides."
        )
    return Job("arguments", rank, processes, coordinator)


def _open_mpi(environment: Mapping[str, str]) -> Job | None:
    if "OMPI_COMM_WORLD_SIZE" not in environment:
        return None
    number = lambda name: int(environment[f"OMPI_COMM_WORLD_{name}"])
    old, new = environment.get("OMPI_MCA_orte_hnp_uri", ""), environment.get("PMIX_NAMESPACE", "")
    port = _port(environment.get("OMPI_MCA_ess_base_jobid") or new)
    # mpirun's own host holds rank 0 unless a host file says otherwise. Open MPI 4 tells its address, 5 puts its name into
    # prterun-HOST-PID@JOB.
    address, name = re.search(r"tcp://([^,:;]+)", old), re.fullmatch(r"prte(?:run)?-(.+)-\d+@\d+", new)
    host = address[1] if address else name[1] if name else None
    if number("LOCAL_SIZE") == number("SIZE"):
        host = "127.0.0.1"
    return Job(
        f"mpirun of Open MPI {4 if old else 5}",
        number("RANK"),
        number("SIZE"),
        host and f"{host}:{port}",
        number("LOCAL_RANK"),
        number("LOCAL_SIZE"),
    )


def _mpich(environment: Mapping[str, str]) -> Job | None:
    if not {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"} <= environment.keys():
        return None
    rank, size, local_rank, local_size = (
        int(environment[name]) for name in ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    )
    # The parent of all ranks on one machine is the same process: its id tells two jobs apart.
    host = f"127.0.0.1:{_port(str(os.getppid()))}" if size == local_size else None
    return Job("mpirun of MPICH or Intel MPI", rank, size, host, local_rank, local_size)


def _slurm(environment: Mapping[str, str]) -> Job | None:
    if not {"SLURM_STEP_NODELIST", "SLURM_PROCID"} <= environment.keys():  # a batch script alone has no step
        return None
    size = int(environment.get("SLURM_STEP_NUM_TASKS") or environment["SLURM_NTASKS"])
    # node[007-015,020],other -> node007
    first = re.match(r"([^,\[]+)(?:\[([^],-]+)[^]]*\]([^,]*))?", environment["SLURM_STEP_NODELIST"])
    assert first is not None
    host = "".join(part or "" for part in first.groups())
    job = f"{environment.get('SLURM_JOB_ID')}.{environment.get('SLURM_STEP_ID')}"
    local = re.match(r"\d+", environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    return Job(
        "srun",
        int(environment["SLURM_PROCID"]),
        size,
        f"{host}:{_port(job)}",
        int(environment["SLURM_LOCALID"]) if "SLURM_LOCALID" in environment else None,
        int(local[0]) if local else None,
    )


def _jobset(environment: Mapping[str, str]) -> Job | None:
    if not {"JOB_COMPLETION_INDEX", "JAX_PROCESS_COUNT"} <= environment.keys():
        return None
    jobset, replicated = environment.get("JOBSET_NAME"), environment.get("REPLICATED_JOB_NAME")
    host = f"{jobset}-{replicated}-0-0.{jobset}:{PORTS[0]}" if jobset and replicated else None
    return Job("a Kubernetes JobSet", int(environment["JOB_COMPLETION_INDEX"]), int(environment["JAX_PROCESS_COUNT"]), host)


def _own_gpus(job: Job, environment: Mapping[str, str]) -> list[int] | None:
    """This process's share of the machine's GPUs, where several processes see the same ones; `None` is all that it sees."""
    if job.local_rank is None or job.local_processes in (None, 1):
        return None
    visible = environment.get("CUDA_VISIBLE_DEVICES", environment.get("ROCR_VISIBLE_DEVICES"))
    if visible is None:
        return [job.local_rank]
    each = len(visible.split(",")) // job.local_processes
    return list(range(job.local_rank * each, (job.local_rank + 1) * each)) or None  # none: the launcher has shared them out


def _port(job: str) -> int:
    return PORTS[0] + zlib.crc32(job.encode()) % (PORTS[1] - PORTS[0])


# How it ends


def run(main: Callable[[], Any], job: Job) -> None:
    """Call `main`, and end this process: with code 0 when it returns, and at once with another when it raises.

    The traceback is printed once, and no exit handler, barrier or thread is waited for, since each might wait for a process
    that is gone: the other ranks lose their connection within milliseconds, or are ended by their launcher. A rank that fails
    because a peer is gone waits `GRACE` seconds before it says so: a launcher has ended it then, and the first to fail has the
    last word.
    `SystemExit` ends the process with its code and message.
    """
    try:
        main()
    except SystemExit as ending:
        if ending.code:
            end("", ending.code) if isinstance(ending.code, int) else end(f"{ending.code}\n")
    except BaseException as error:
        if job.processes > 1 and _of_peers(error):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the launcher's, which JAX's preemption service would swallow
            time.sleep(GRACE)
            end(f"{job.who} lost the other processes, or its devices failed:\n{traceback.format_exc()}")
        end(traceback.format_exc())
    if jax.distributed.is_initialized():
        jax.distributed.shutdown()
    sys.exit(0)


def _of_peers(error: BaseException) -> bool:
    """Whether an error may come from another process: of the runtime, or of what waits for others by it."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, jax.errors.JaxRuntimeError):
        cause = cause.__cause__
    return cause is not None


def end(message: str, code: int = FAILED) -> NoReturn:
    """Print and be gone, with no exit handler. One write, so that the lines of several processes do not mix."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
        os.write(2, message.encode(errors="replace"))
    os._exit(code)


def together(prepare: Callable[[], Result], job: Job) -> Result:
    """`prepare()`, on all ranks or on none: where one refuses its arguments, all end, with code 2 and that one line of error.

    For what comes before the work: a wrong flag that every rank finds, or a file that is missing on one machine alone. Every rank
    calls it. `ValueError`, `OSError` and `ImportError` are told, by the lowest rank that met one; the rest is raised.
    """
    result, error = None, None
    try:
        result = prepare()
    except (ValueError, OSError, ImportError) as refused:
        error = refused
    ranks = np.flatnonzero(multihost_utils.process_allgather(np.asarray(error is not None)))
    if not ranks.size:
        return cast(Result, result)
    if job.rank == ranks[0]:
        print(f"error: {error}", file=sys.stderr, flush=True)
    if job.processes > 1:
        jax.distributed.shutdown()  # all have come this far: a launcher ends the others as soon as one is gone
    end("", 2)


@contextlib.contextmanager
def preemption() -> Iterator[Callable[[int], bool]]:
    """A function of the step: whether a SIGTERM has come, to any process. It says yes at the same step on all of them.

        with processes.preemption() as preempted:
            for i in range(start, steps):
                ...
                if preempted(i):
                    checkpoints.save(i, state); break

    In a job of several processes each calls it at every step, from the same one on (JAX's preemption service agrees on the
    step after the latest). Alone, the process catches the signal itself while inside.
    """
    if jax.distributed.is_initialized():
        yield multihost_utils.reached_preemption_sync_point
        return
    came = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: came.set())
    try:
        yield lambda step: came.is_set()
    finally:
        signal.signal(signal.SIGTERM, before)
