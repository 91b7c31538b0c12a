"""What started this process, by its variables; and what a process alone does when it ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

from parallax.run import launch, processes
from parallax.run.processes import Job
from parallax.run.watchdog import Watchdog

ROOT = Path(__file__).parents[1]
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}
OPEN_MPI_4 = OPEN_MPI | {
    "OMPI_MCA_orte_precondition_transports": "0123456789abcdef-fedcba9876543210",
    "OMPI_MCA_orte_hnp_uri": "1993539584.0;tcp://10.96.0.1,10.148.0.1:37141;tcp6://[fd00::2]:53621",
    "OMPI_MCA_ess_base_jobid": "1993539585",
}
OPEN_MPI_5 = OPEN_MPI | {"PMIX_NAMESPACE": "prterun-login-node-2-12345@1", "PMIX_RANK": "5"}
HERE = {"OMPI_COMM_WORLD_LOCAL_SIZE": "8"}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
SLURM = {
    "SLURM_JOB_ID": "4242",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[007-008]",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_NTASKS": "16",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}
JOBSET = {
    "JOB_COMPLETION_INDEX": "2",
    "JAX_PROCESS_COUNT": "4",
    "JOBSET_NAME": "run",
    "REPLICATED_JOB_NAME": "workers",
}


@pytest.mark.parametrize(
    ("environment", "launcher", "rank", "count", "host", "local"),
    [
        (OPEN_MPI_4, "mpirun of Open MPI 4", 5, 8, "10.96.0.1", (1, 4)),
        (OPEN_MPI_5, "mpirun of Open MPI 5", 5, 8, "login-node-2", (1, 4)),
        (OPEN_MPI_4 | HERE, "mpirun of Open MPI 4", 5, 8, "127.0.0.1", (1, 8)),
        (OPEN_MPI_5 | HERE, "mpirun of Open MPI 5", 5, 8, "127.0.0.1", (1, 8)),
        (
            OPEN_MPI_5 | SLURM | {"SLURM_PROCID": "0"},
            "mpirun of Open MPI 5",
            5,
            8,
            "login-node-2",
            (1, 4),
        ),
        (MPICH, "mpirun of MPICH or Intel MPI", 1, 4, "127.0.0.1", (1, 4)),
        (SLURM, "srun", 3, 4, "node007", (1, 2)),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "4"}, "srun", 3, 4, "127.0.0.1", (1, 4)),
        (
            SLURM | {"SLURM_STEP_NODELIST": "gpu-a[3,7-9]-ib,other"},
            "srun",
            3,
            4,
            "gpu-a3-ib",
            (1, 2),
        ),
        (SLURM | {"SLURM_STEP_NODELIST": "alone,other"}, "srun", 3, 4, "alone", (1, 2)),
        (JOBSET, "a Kubernetes JobSet", 2, 4, "run-workers-0-0.run", (None, None)),
    ],
)
def test_launchers_are_known_by_their_variables(environment, launcher, rank, count, host, local):
    job = processes.found(environment)
    assert (job.launcher, job.rank, job.processes) == (launcher, rank, count)
    assert (job.local_rank, job.local_processes) == local
    found, port = job.coordinator.rsplit(":", 1)
    assert found == host
    assert 49152 <= int(port) < 65536
    assert str(job) == f"{count} processes, started by {launcher}, coordinator {host}:{port}"


@pytest.mark.parametrize(
    "environment", [OPEN_MPI_4, OPEN_MPI_5, SLURM], ids=["Open MPI 4", "Open MPI 5", "Slurm"]
)
def test_ranks_agree_on_the_coordinator_and_jobs_do_not(environment):
    job = processes.found(environment)
    rank = next(name for name in ("OMPI_COMM_WORLD_RANK", "SLURM_PROCID") if name in environment)
    assert processes.found(environment | {rank: "0"}).coordinator == job.coordinator
    name = next(
        name
        for name in ("OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE", "SLURM_STEP_ID")
        if name in environment
    )
    other = {"PMIX_NAMESPACE": "prterun-login-node-2-12346@1"}.get(name, "77")
    assert processes.found(environment | {name: other}).coordinator != job.coordinator


@pytest.mark.parametrize(
    "environment",
    [{}, {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}],
    ids=["none", "sbatch"],
)
def test_without_a_launcher_a_process_is_alone(environment):
    said = []
    assert processes.initialize(environment=environment, say=said.append) == Job("hand")
    assert said == ["1 process, started by hand"]
    assert not jax.distributed.is_initialized()


def test_one_process_of_a_launcher_is_not_connected():
    environment = SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}
    job = processes.initialize(environment=environment, say=lambda line: None)
    assert (job.launcher, job.processes, job.coordinator) == ("srun", 1, None)
    assert not jax.distributed.is_initialized()


class NoPeers:
    """All have come, and rank 0 has chosen a port."""

    def __init__(self, job, limit, spent=0.0):
        assert 0 <= spent <= limit / 2
        self.address = f"{'127.0.0.1' if job.on_one_machine else 'node007'}:1234"

    def coordinator(self):
        return self.address

    def met(self):
        pass


@pytest.mark.parametrize(
    ("more", "devices", "bound", "limit"),
    [
        ({}, [2, 3], {}, 900),
        (
            {"SLURM_STEP_TASKS_PER_NODE": "4"},
            [1],
            {"coordinator_bind_address": "127.0.0.1:1234"},
            60,
        ),
    ],
    ids=["two machines", "one machine"],
)
def test_what_was_found_is_handed_to_jax(monkeypatch, more, devices, bound, limit):
    calls = []
    monkeypatch.setattr(
        jax.distributed,
        "initialize",
        lambda *arguments, **options: calls.append((arguments, options)),
    )
    monkeypatch.setattr(processes, "Peers", NoPeers)
    environment = SLURM | {"CUDA_VISIBLE_DEVICES": "0,1,2,3"} | more
    processes.initialize(environment=environment, heartbeat_timeout=7, say=lambda line: None)
    address = NoPeers(processes.found(environment), 0.0).address
    timeouts = {
        "initialization_timeout": limit,
        "heartbeat_timeout_seconds": 7,
        "shutdown_timeout_seconds": 120,
    }
    assert calls == [((address, 4, 3, devices), bound | timeouts)]
    processes.initialize(environment=environment, initialization_timeout=2.5, say=lambda line: None)
    assert calls[1][1]["initialization_timeout"] == 3


def test_jobs_are_told_apart_by_what_their_launcher_gives_and_the_users_token():
    for environment, other in (
        (OPEN_MPI_4, {"OMPI_MCA_orte_precondition_transports": "1"}),
        (OPEN_MPI_4, {"OMPI_MCA_ess_base_jobid": "7"}),
        (OPEN_MPI_5, {"PMIX_NAMESPACE": "prterun-login-node-2-12346@1"}),
        (SLURM, {"SLURM_JOB_ID": "4243"}),
        (JOBSET, {"JOBSET_NAME": "other"}),
        *(
            (each, {"PARALLAX_JOB_TOKEN": "a token"})
            for each in (OPEN_MPI_4, OPEN_MPI_5, MPICH, SLURM, JOBSET)
        ),
    ):
        secret = processes.found(environment).secret
        assert processes.found(environment | other).secret != secret
        rank = next(
            n
            for n in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "JOB_COMPLETION_INDEX")
            if n in environment
        )
        assert processes.found(environment | {rank: "0"}).secret == secret
    assert launch.told("a:1", 2, 0, "a token").secret == "a token"


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [(None, [1]), ("0,1", [1]), ("0,1,2,3", [2, 3]), ("5", None)],
    ids=["all", "one each", "two each", "shared out"],
)
def test_processes_of_one_machine_share_its_gpus(visible, gpus):
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert processes._own_gpus(Job("srun", 3, 4, "host:1", 1, 2), environment) == gpus
    assert processes._own_gpus(Job("srun", 3, 4, "host:1", 0, 1), environment) is None


def test_a_coordinator_may_be_told():
    assert processes.found(OPEN_MPI_4, "other:1234").coordinator == "other:1234"
    assert (
        processes.found(OPEN_MPI | {"JAX_COORDINATOR_ADDRESS": "other:99"}).coordinator
        == "other:99"
    )
    assert processes.found(OPEN_MPI | {"JAX_COORDINATOR_ADDRESS": "other"}).coordinator.startswith(
        "other:"
    )


@pytest.mark.parametrize(
    "environment", [OPEN_MPI, MPICH | {"MPI_LOCALNRANKS": "2"}], ids=["Open MPI", "MPICH"]
)
def test_a_coordinator_that_nobody_knows_is_asked_for(environment):
    with pytest.raises(
        ValueError,
        match=r'does not say where rank 0 is\. Pass initialize\(coordinator="host:port"\)',
    ):
        processes.found(environment)


@pytest.mark.parametrize(
    "told", [("a:1", 2, None), ("a:1", None, 0), (None, 2, 0), ("a:1", 2, 2), ("a:1", 2, -1)]
)
def test_half_of_what_to_do_is_refused(told):
    with pytest.raises(
        ValueError,
        match="needs coordinator, processes and rank together, with 0 <= rank < processes",
    ):
        processes.initialize(*told, environment={})


@pytest.mark.parametrize("coordinator", ["localhost", "localhost:", ":1", "localhost:http"])
def test_a_coordinator_needs_a_port(coordinator):
    with pytest.raises(
        ValueError, match=rf'needs a coordinator "host:port", with a port .* got {coordinator!r}'
    ):
        processes.initialize(coordinator, 2, 0, environment={})


def test_virtual_devices_must_divide(monkeypatch):
    monkeypatch.setattr(jax.distributed, "initialize", lambda *arguments, **options: None)
    with pytest.raises(
        ValueError, match=r"cpu_devices=6 must divide by the 4 processes\. Take 4 devices"
    ):
        processes.initialize("a:1", 4, 0, cpu_devices=6, environment={})


# How a process ends


def ended(program, *, signals=None, seconds=60):
    """What a Python program printed, its exit code, and the seconds from `ready` (or a signal) to
    its end."""
    command = [
        sys.executable,
        "-c",
        f"import jax, sys, time, threading; from parallax.run import processes, "
        f"watchdog\n{program}",
    ]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        "PYTHONWARNINGS": "ignore",
    }
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "ready\n", process.communicate(timeout=seconds)
        start = time.monotonic()
        if signals is not None:
            process.send_signal(signals)
        out, err = process.communicate(timeout=seconds)
    return out, err, process.returncode, time.monotonic() - start


ALONE = "job = processes.Job('hand')\n"
# an exit handler would wait for it
STUCK = "threading.Thread(target=time.sleep, args=(100,)).start()\n"


@pytest.mark.programs
def test_an_exception_ends_the_process_and_is_printed_once():
    program = (
        ALONE + STUCK + "def main(): print('ready', flush=True); raise ArithmeticError('a "
        "mistake')\nprocesses.run(main, job)"
    )
    _, err, code, seconds = ended(program)
    assert code == 1
    assert err.count("Traceback") == 1
    assert err.endswith("ArithmeticError: a mistake\n")
    assert seconds < 50  # the thread has 100


@pytest.mark.programs
def test_what_is_refused_before_the_work_is_told_in_a_line():
    program = (
        ALONE + "print('ready', flush=True)\ndef prepare(): raise FileNotFoundError('no such "
        "text')\nprocesses.together(prepare, job)"
    )
    out, err, code, _ = ended(program)
    assert (out, err, code) == ("", "error: no such text\n", 2)
    assert processes.together(lambda: "a plan", Job("hand")) == "a plan"
    with pytest.raises(ArithmeticError):
        processes.together(lambda: 1 / 0, Job("hand"))


@pytest.mark.programs
@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("how", "code", "said"),
    [("3", 3, ""), ("'no such text'", 1, "no such text\n"), ("0", 0, ""), ("None", 0, "")],
)
def test_an_exit_keeps_its_code_and_message(how, code, said):
    _, err, found, _ = ended(
        ALONE + f"def main(): print('ready', flush=True); sys.exit({how})\nprocesses.run(main, job)"
    )
    assert (found, err) == (code, said)


def test_sigterm_is_noticed_and_left_behind():
    before = signal.getsignal(signal.SIGTERM)
    with processes.preemption() as preempted:
        assert not preempted(1)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.05)
        assert preempted(2)
        assert preempted(3)
    assert signal.getsignal(signal.SIGTERM) == before


# The watchdog


def test_a_step_in_time_is_left_alone():
    with Watchdog(Job("hand"), seconds=30.0) as watch:
        for i in range(3):
            watch.step(i)
            watch.phase("train", waits=True)


@pytest.mark.programs
@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("waits", "does"), [(False, "holds up the job"), (True, "waits for the other ranks")]
)
def test_a_step_that_takes_too_long_is_named(waits, does):
    program = f"""
job = processes.Job('hand', rank=2, processes=4)
with watchdog.Watchdog(job, seconds=0.5) as watch:
    watch.step(6); watch.step(7); watch.phase('a slow disk', waits={waits})
    print('ready', flush=True)
    time.sleep(100)
"""
    _, err, code, seconds = ended(program)
    assert code == 1
    assert seconds < 50
    last = err.splitlines()[-1]
    assert last.startswith("watchdog: rank 2 on ")
    assert f"{does}: in step 7" in last
    assert "0.5 s allowed" in last
    assert last.endswith("in phase 'a slow disk'. The job ends.")
    assert "time.sleep(100)" in err or 'File "<string>"' in err  # where it was


@pytest.mark.programs
def test_before_the_first_step_the_others_are_asked_too():
    """All ranks are in one phase then: the line of one that runs once said that it held up the job,
    whoever was stopped."""
    program = """
class Peers:
    does = lambda self, doing, waits: None
    fault = lambda self: 'rank 2 on node7 is stopped'
job = processes.Job('hand', rank=1, processes=4, peers=Peers())
with watchdog.Watchdog(job, seconds=0.1, first=0.5):
    print('ready', flush=True)
    time.sleep(100)
"""
    _, err, code, _ = ended(program)
    assert code == 1
    assert "at fault: rank 2 on node7 is stopped\n" in err
    assert "holds up the job" not in err


@pytest.mark.programs
def test_before_the_second_step_there_is_more_time():
    program = """
job = processes.Job('hand')
with watchdog.Watchdog(job, seconds=0.1, first=0.6) as watch:
    watch.step(0); print('ready', flush=True)
    time.sleep(100)
"""
    _, err, code, seconds = ended(program)
    assert (code, "0.6 s allowed" in err) == (1, True)
    assert seconds > 0.5


def test_a_watchdog_needs_time():
    with pytest.raises(ValueError, match=r"seconds above 0; got 0\.0"):
        Watchdog(Job("hand"), seconds=0.0)
