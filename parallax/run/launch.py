"""What started this process, and how it ends: all that is known before JAX is imported, which takes
seconds.

`srun`, `mpirun`, a Kubernetes JobSet or Cloud TPU starts the same program on every machine; `found`
reads their variables (nothing else in the project reads the environment) and connects nothing.
`processes.initialize` does that.
"""

import contextlib
import dataclasses
import importlib.util
import os
import re
import signal
import socket
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

FAILED = 1  # the exit code of a process that raised, lost its peers, or hung
REFUSED = 2  # the exit code of a process that was started wrongly, and has changed nothing
PORTS = (
    49152,
    65536,
)  # the range for private use (RFC 6335) from which a job's coordinator gets its port
OTHERS = 8  # ports from there on, of which rank 0 takes the first that is free
# the variable with a secret of the user's for a job, the same for all its processes
TOKEN = "PARALLAX_JOB_TOKEN"


@dataclasses.dataclass(frozen=True)
class Job:
    """What `initialize` found: who started this process, and which of how many it is.

    Args:
        launcher: in words.
        rank: of this process, from 0.
        processes: how many there are.
        coordinator: `host:port` at which rank 0 listens; `None` for a process alone, or where JAX
            finds it itself.
        local_rank: among the processes of this machine, where the launcher says so.
        local_processes: how many those are, where the launcher says so.
        peers: the other processes, as `peers.Peers` knows them; `None` until they are connected,
            and for a process alone.
        ports: rank 0 listens at the first of so many, from the coordinator's on, that is free.
        secret: what tells this job from others: the launcher's name for it, and what only its
            processes know, if there is such.
    """

    launcher: str
    rank: int = 0
    processes: int = 1
    coordinator: str | None = None
    local_rank: int | None = None
    local_processes: int | None = None
    peers: Any = dataclasses.field(default=None, compare=False, repr=False)
    ports: int = 1
    secret: str = dataclasses.field(default="", repr=False)

    @property
    def on_one_machine(self) -> bool:
        """Whether the coordinator's address is one that other machines cannot reach."""
        host = (self.coordinator or "").rpartition(":")[0].strip("[]")
        return host in ("localhost", "::1") or host.startswith("127.")

    @property
    def who(self) -> str:
        """This process, in words."""
        return f"rank {self.rank} on {socket.gethostname()}"

    def __str__(self):
        if self.processes == 1:
            return f"1 process, started by {self.launcher}"
        return (
            f"{self.processes} processes, started by {self.launcher}, coordinator "
            f"{self.coordinator}"
        )


# What started this process

TPU = "Cloud TPU"


def found(
    environment: Mapping[str, str] = os.environ, coordinator: str | None = None
) -> Job | None:
    """The job that the launcher's variables describe; `None` where there are none. Looks, and
    connects nothing.

    Raises `ValueError` where they do not say where rank 0 is, and `coordinator` does not either.
    """
    coordinator = coordinator or environment.get("JAX_COORDINATOR_ADDRESS")
    for find in (_open_mpi, _mpich, _slurm, _jobset):
        job = find(environment)
        if job is None:
            continue
        if job.processes == 1:
            return dataclasses.replace(job, coordinator=None)
        address, ports = coordinator or job.coordinator, job.ports
        if address is None:
            raise ValueError(
                f"{job.launcher} started {job.processes} processes and does not say where "
                f"rank 0 is. Pass "
                f'initialize(coordinator="host:port"), or set '
                f"JAX_COORDINATOR_ADDRESS=host:port for all of them."
            )
        if coordinator and re.search(r":\d+$", coordinator):
            ports = 1
        elif coordinator:
            address = f"{coordinator}:{port(job.secret)}"
        secret = f"{job.secret} {environment.get(TOKEN, '')}"
        return dataclasses.replace(job, coordinator=address, ports=ports, secret=secret)
    chips = importlib.util.find_spec("libtpu") and (
        Path("/dev/accel0").exists() or Path("/dev/vfio/0").exists()
    )
    return Job(TPU) if chips else None


def told(
    coordinator: str | None, processes: int | None, rank: int | None, token: str = ""
) -> Job | None:
    """The job that these arguments describe; `None` where they are none. Raises `ValueError` where
    some are missing."""
    if processes is None and rank is None:
        return None
    if (
        processes is None
        or rank is None
        or (coordinator is None and processes > 1)
        or not 0 <= rank < processes
    ):
        raise ValueError(
            "initialize needs coordinator, processes and rank together, with 0 <= rank < "
            "processes; got "
            f"coordinator={coordinator!r}, processes={processes}, rank={rank}. Or give none, "
            f"and the launcher decides."
        )
    if processes > 1 and not re.search(r".:\d+$", coordinator or ""):
        raise ValueError(
            f'initialize needs a coordinator "host:port", with a port that is free on rank 0; '
            f"got {coordinator!r}."
        )
    return Job("arguments", rank, processes, coordinator, secret=token)


def _open_mpi(environment: Mapping[str, str]) -> Job | None:
    if "OMPI_COMM_WORLD_SIZE" not in environment:
        return None
    number = lambda name: int(environment[f"OMPI_COMM_WORLD_{name}"])
    old, new = environment.get("OMPI_MCA_orte_hnp_uri", ""), environment.get("PMIX_NAMESPACE", "")
    name = environment.get("OMPI_MCA_ess_base_jobid") or new
    # mpirun's own host holds rank 0 unless a host file says otherwise. Open MPI 4 tells its
    # address, 5 puts its name into prterun-HOST-PID@JOB.
    address, within = (
        re.search(r"tcp://([^,:;]+)", old),
        re.fullmatch(r"prte(?:run)?-(.+)-\d+@\d+", new),
    )
    host = address[1] if address else within[1] if within else None
    if number("LOCAL_SIZE") == number("SIZE"):
        host = "127.0.0.1"
    return Job(
        f"mpirun of Open MPI {4 if old else 5}",
        number("RANK"),
        number("SIZE"),
        host and f"{host}:{port(name)}",
        number("LOCAL_RANK"),
        number("LOCAL_SIZE"),
        ports=OTHERS,
        # Open MPI 4 draws 128 bits for each job, for its own transports.
        secret=f"{name} {environment.get('OMPI_MCA_orte_precondition_transports', '')}",
    )


def _mpich(environment: Mapping[str, str]) -> Job | None:
    if not {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"} <= environment.keys():
        return None
    rank, size, local_rank, local_size = (
        int(environment[name])
        for name in ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    )
    # The parent of all ranks on one machine is the same process: its id tells two jobs apart.
    name = str(os.getppid()) if size == local_size else ""
    host = f"127.0.0.1:{port(name)}" if name else None
    return Job(
        "mpirun of MPICH or Intel MPI",
        rank,
        size,
        host,
        local_rank,
        local_size,
        ports=OTHERS,
        secret=name,
    )


def _slurm(environment: Mapping[str, str]) -> Job | None:
    if (
        not {"SLURM_STEP_NODELIST", "SLURM_PROCID"} <= environment.keys()
    ):  # a batch script alone has no step
        return None
    size = int(environment.get("SLURM_STEP_NUM_TASKS") or environment["SLURM_NTASKS"])
    # node[007-015,020],other -> node007
    first = re.match(r"([^,\[]+)(?:\[([^],-]+)[^]]*\]([^,]*))?", environment["SLURM_STEP_NODELIST"])
    assert first is not None
    host = "".join(part or "" for part in first.groups())
    job = f"{environment.get('SLURM_JOB_ID')}.{environment.get('SLURM_STEP_ID')}"
    local = re.match(r"\d+", environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    host = "127.0.0.1" if local and int(local[0]) == size else host
    return Job(
        "srun",
        int(environment["SLURM_PROCID"]),
        size,
        f"{host}:{port(job)}",
        int(environment["SLURM_LOCALID"]) if "SLURM_LOCALID" in environment else None,
        int(local[0]) if local else None,
        ports=OTHERS,
        secret=job,
    )


def _jobset(environment: Mapping[str, str]) -> Job | None:
    if not {"JOB_COMPLETION_INDEX", "JAX_PROCESS_COUNT"} <= environment.keys():
        return None
    jobset, replicated = environment.get("JOBSET_NAME"), environment.get("REPLICATED_JOB_NAME")
    host = f"{jobset}-{replicated}-0-0.{jobset}:{PORTS[0]}" if jobset and replicated else None
    rank, size = int(environment["JOB_COMPLETION_INDEX"]), int(environment["JAX_PROCESS_COUNT"])
    return Job("a Kubernetes JobSet", rank, size, host, secret=f"{jobset} {replicated}")


def port(job: str) -> int:
    """A port for a job, the same on all its processes, and another for almost all other jobs."""
    return PORTS[0] + zlib.crc32(job.encode()) % (PORTS[1] - OTHERS - PORTS[0])


# How it ends


def end(message: str, code: int = FAILED) -> NoReturn:
    """Print and be gone, with no exit handler. One write, so that the lines of several processes do
    not mix."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
        os.write(2, message.encode(errors="replace"))
    os._exit(code)


def interrupted(number: signal.Signals, count: int) -> NoReturn:
    """End at once, for a signal that came where there is nothing to save, or a second time. For
    `signals.listening`."""
    end(
        f"{number.name}: ended at once. The same command goes on from the last checkpoint.\n",
        128 + number,
    )
