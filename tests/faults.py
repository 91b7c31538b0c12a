"""Jobs to break: `process_train.py` in several processes, started by `mpirun` or as it would, their
ranks found and killed."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Mapping
from pathlib import Path

import process_train
from flags import of_users

OF_USERS = of_users()
SCRIPT = Path(process_train.__file__)
MPIRUN = shutil.which("mpirun")
# Where there is no mpirun, the ranks get the variables that it sets; nobody ends them then but they
# themselves.
LAUNCHER = (
    "mpirun" if MPIRUN else "variables, since mpirun is not installed (apt-get install openmpi-bin)"
)


class Running:
    """A job of `processes` ranks that trains in `folder`, and what it prints.

    Its `program` is `process_train.py`, or one that is told all by its options. It compiles as
    users do, for tests that compare bits, or with the `flags` given. Jobs of one `name` ask for the
    same port.
    """

    def __init__(
        self,
        folder: Path,
        *options,
        processes: int,
        launcher: str = LAUNCHER,
        program: Path = SCRIPT,
        flags: Mapping[str, str] = OF_USERS,
        name: str = "",
    ):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.launcher, self.began = folder, launcher, time.time()
        self.metrics = folder / "metrics.jsonl"
        self.output = folder / f"output-{len(list(folder.glob('output-*')))}.txt"
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(SCRIPT.parent.parent), *sys.path]),
            "PYTHONWARNINGS": "ignore",
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            **flags,
        }
        command = [
            sys.executable,
            str(program),
            *([str(folder)] if program == SCRIPT else []),
            *map(str, options),
        ]
        with self.output.open("w") as file:
            start = lambda command, more: subprocess.Popen(
                command,
                env=environment | more,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            if launcher == "mpirun":
                mpirun = [MPIRUN, "--oversubscribe", "--bind-to", "none", "-n", str(processes)]
                self.started = [start([*mpirun, *command], {})]
            elif launcher == "one process":
                self.started = [start(command, {})]
            else:
                job = name or str(os.getpid() + time.time_ns())
                self.started = [
                    start(command, as_mpirun(rank, processes, job)) for rank in range(processes)
                ]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for pid in [*self.ranks().values(), *(process.pid for process in self.started)]:
            kill(pid, signal.SIGKILL)
        for process in self.started:
            process.wait()

    def ranks(self) -> dict[int, int]:
        """The process id of each rank that is alive."""
        if self.launcher == "one process":
            return {0: self.started[0].pid} if self.started[0].poll() is None else {}
        if self.launcher == "mpirun":
            return of_parent(self.started[0].pid)
        return {
            rank: process.pid for rank, process in enumerate(self.started) if process.poll() is None
        }

    def rank(self, rank: int) -> int:
        """The process id of a rank, which must be alive."""
        alive = self.ranks()
        assert rank in alive, (
            f"rank {rank} is not alive; {sorted(alive)} are. The job printed:\n{self.printed()}"
        )
        return alive[rank]

    def wait(self, seconds: float = 400) -> int:
        """The job's exit code: of mpirun, or the first of a rank that is not 0. It is over when no
        rank is left."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if all(process.poll() is not None for process in self.started) and not self.ranks():
                return next(
                    (process.returncode for process in self.started if process.returncode), 0
                )
            time.sleep(0.02)
        raise AssertionError(
            f"the job did not end within {seconds} s. It printed:\n{self.printed()}"
        )

    def until(self, happened, seconds: float = 400) -> None:
        """Return when `happened()` is true; the job must be alive until then."""
        end = time.monotonic() + seconds
        while not happened():
            over = all(process.poll() is not None for process in self.started)
            if over or time.monotonic() > end:
                raise AssertionError(
                    f"{'the job ended' if over else seconds} before it happened. It "
                    f"printed:\n{self.printed()}"
                )
            time.sleep(0.005)

    def steps(self) -> int:
        """The last step in the metrics."""
        return self.metrics.read_text().count("\n") if self.metrics.exists() else 0

    def printed(self) -> str:
        """What the job printed, without the chatter of gloo and of mpirun."""
        lines = self.output.read_text(errors="replace").splitlines()
        return "\n".join(line for line in lines if line.strip() and "[Gloo]" not in line)


def as_mpirun(rank: int, processes: int, job: str) -> dict[str, str]:
    """The variables that mpirun of Open MPI 4 sets on one machine.

    `jax.distributed` makes the coordinator's port of the job's number, a multiple of 4,096.
    """
    sizes = {"SIZE": processes, "LOCAL_SIZE": processes, "RANK": rank, "LOCAL_RANK": rank}
    number = 4096 * (zlib.crc32(job.encode()) % 2**18)
    return {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in sizes.items()} | {
        "OMPI_MCA_orte_hnp_uri": f"{number}.0;tcp://127.0.0.1:1"
    }


def of_parent(parent: int) -> dict[int, int]:
    """The ranks among the children of mpirun, by their environment."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if int((path / "stat").read_text().rpartition(")")[2].split()[1]) != parent:
                continue
            variables = (path / "environ").read_bytes().split(b"\0")
        except (OSError, IndexError):
            continue
        for variable in variables:
            name, _, value = variable.partition(b"=")
            if name == b"OMPI_COMM_WORLD_RANK":
                found[int(value)] = int(path.name)
    return found


def kill(pid: int, number: int) -> None:
    """Send a signal, to a process that may be gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
