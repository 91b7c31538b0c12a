"""A process finds its job; and a process alone ends as it should."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

from parallax.collectives import types
from parallax.run import processes
from parallax.run.job import Job
from parallax.run.watchdog import Watchdog

ROOT = Path(__file__).parents[1]
SLURM = {
    "SLURM_JOB_ID": "4242",
    "SLURM_STEP_NODELIST": "node[007-008]",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}
LAUNCHERS = ("SLURM_", "OMPI_", "JAX_COORDINATOR", "KUBERNETES_")
silently = lambda line: None


@pytest.fixture
def handed_to_jax(monkeypatch):
    """What `jax.distributed.initialize` is called with."""
    calls = []
    monkeypatch.setattr(
        jax.distributed, "initialize", lambda *args, **options: calls.append((args, options))
    )
    return calls


def first_in_a_process(call, **variables):
    """What `call` prints or raises in a process that has used no device, as JAX asks."""
    program = f"""
import jax
from parallax.run import processes
from parallax.run.job import Job
try:
    {call}
except ValueError as error:
    print("ValueError:", error)
"""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    path = os.pathsep.join([str(ROOT), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", program], env=kept | variables | {"PYTHONPATH": path},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.sweep(3, "wholes")
@pytest.mark.parametrize(
    "environment",
    [{}, {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}],
    ids=["none", "sbatch"],
)
def test_without_a_launcher_a_process_is_alone(environment):
    said = first_in_a_process(
        "print(processes.initialize() == Job(), jax.distributed.is_initialized())", **environment
    )
    assert said == "1 process\nTrue False\n"


def test_a_launchers_mistake_is_no_process_alone():
    """An address without a number of processes, as JAX says."""
    said = first_in_a_process("processes.initialize()", JAX_COORDINATOR_ADDRESS="node7:1234")
    assert "ValueError: Number of processes must be defined" in said


@pytest.mark.parametrize("name", ["JAX_NUM_PROCESSES", "JAX_PROCESS_ID"])
def test_a_process_with_half_of_the_variables_is_not_alone(name):
    said = first_in_a_process("processes.initialize()", **{name: "1"})
    assert f"needs both JAX_NUM_PROCESSES and JAX_PROCESS_ID; only {name} is set." in said


@pytest.mark.programs
def test_jax_reads_the_variables_of_slurm():
    program = """
job = processes.initialize(cpu_devices=2)
assert jax.distributed.is_initialized()
assert (job.rank, job.processes, jax.device_count()) == (0, 1, 2)
print("ready", flush=True)
processes.run(lambda: None, job)
"""
    one_task = {"SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}
    environment = os.environ | SLURM | one_task | {"SLURM_LOCALID": "0"}
    environment |= {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", f"import jax; from parallax.run import processes\n{program}"],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "1 process\nready\n"), done.stderr


@pytest.mark.parametrize(
    ("coordinator", "bound"),
    [
        ("127.0.0.1:1234", "127.0.0.1:1234"),
        ("localhost:1234", "localhost:1234"),
        ("[::1]:1234", "[::1]:1234"),
        ("node7:1234", None),
        ("10.0.0.1:1234", None),
    ],
)
def test_on_one_machine_others_do_not_reach_the_service(
    handed_to_jax, monkeypatch, coordinator, bound
):
    monkeypatch.setattr(types, "rank_and_processes", lambda: (0, 1))
    processes.initialize(
        coordinator,
        1,
        0,
        local_device_ids=[2, 3],
        initialization_timeout=2.5,
        heartbeat_timeout=7,
        say=silently,
    )
    ((arguments, options),) = handed_to_jax
    assert arguments == (coordinator, 1, 0, [2, 3])
    assert options == {
        "initialization_timeout": 3 + processes.SPARE,
        "heartbeat_timeout_seconds": 7,
        "coordinator_bind_address": bound,
    }


@pytest.mark.sweep(3, "wholes")
def test_the_limit_of_the_start_counts_from_the_start_of_the_process():
    assert 0 < processes._age() < 100_000
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(2)"]) as process:
        assert process.wait() == 0
    assert processes._age() >= 2


@pytest.mark.parametrize(
    "told", [("a:1", 2, None), ("a:1", None, 0), (None, 2, 0), (None, 2, None)]
)
def test_half_of_what_to_do_is_refused(told):
    with pytest.raises(ValueError, match="needs coordinator, processes and rank together"):
        processes.initialize(*told)


@pytest.mark.sweep(3, "wholes")
@pytest.mark.parametrize("told", [("a:1", 2, 2), ("a:1", 2, -1)])
def test_a_rank_beyond_the_processes_is_refused(told):
    assert "process_id < num_processes" in first_in_a_process(f"processes.initialize(*{told})")


@pytest.mark.parametrize("coordinator", ["localhost", "localhost:", "localhost:http"])
def test_a_coordinator_needs_a_port(coordinator):
    with pytest.raises(
        ValueError, match=rf'needs a coordinator "host:port", with a port .* got {coordinator!r}'
    ):
        processes.initialize(coordinator, 2, 0)


@pytest.mark.usefixtures("handed_to_jax")
def test_virtual_devices_must_divide(monkeypatch):
    monkeypatch.setattr(types, "rank_and_processes", lambda: (0, 4))
    with pytest.raises(
        ValueError, match=r"cpu_devices=6 must be a multiple of the 4 processes\. Use 4 devices"
    ):
        processes.initialize("a:1", 4, 0, cpu_devices=6)


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


ALONE = "job = processes.Job()\n"
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
        "text')\nprocesses.all_or_none(prepare, job)"
    )
    out, err, code, _ = ended(program)
    assert (out, err, code) == ("", "error: no such text\n", 2)
    assert processes.all_or_none(lambda: "a plan", Job()) == "a plan"
    with pytest.raises(ArithmeticError):
        processes.all_or_none(lambda: 1 / 0, Job())


@pytest.mark.programs
def test_the_last_message_is_written_where_nobody_reads_the_output():
    program = "import os; from parallax.run import job; print('lost'); os.close(1); "
    program += "job.end('the reason\\n', 3)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (3, "the reason\n")


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


def test_a_run_of_several_processes_that_goes_back_gives_the_service_no_number_twice(monkeypatch):
    """JAX's service stops the job at one number, which it must not have to reach again."""
    given = []

    def reached(at):
        given.append(at)
        return False

    monkeypatch.setattr(processes.multihost_utils, "reached_preemption_sync_point", reached)
    stop = processes.StopRequest(several=True)
    for step in [57, 58, 59, 51, 52]:
        stop(step)
    assert given == [57, 58, 59, 60, 61]


# The watchdog


def test_a_step_in_time_is_left_alone():
    with Watchdog(Job(), seconds=30.0) as watch:
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
job = processes.Job(rank=2, processes=4)
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
@pytest.mark.parametrize("rank", [0, 1])
def test_before_the_first_step_the_others_are_asked_too(rank):
    """All ranks are in one phase then: the line of one that runs once said that it held up the job,
    whoever was stopped. Rank 0, which may wait at its exit, is told that this rank ends."""
    program = f"""
class Peers:
    does = lambda self, doing, waits: None
    culprit = lambda self: 'rank 2 on node7 is stopped'
    tell = lambda self, why: print('told:', why, flush=True)
job = processes.Job(rank={rank}, processes=4, peers=Peers())
with watchdog.Watchdog(job, seconds=0.1, first=0.5):
    print('ready', flush=True)
    time.sleep(100)
"""
    out, err, code, _ = ended(program)
    assert code == 1
    assert "at fault: rank 2 on node7 is stopped\n" in err
    assert "holds up the job" not in err
    told = "told: waited too long for the other ranks before the first step, in phase 'start'"
    assert (told in out) == (rank == 1)


@pytest.mark.programs
def test_before_the_second_step_there_is_more_time():
    program = """
job = processes.Job()
with watchdog.Watchdog(job, seconds=0.1, first=0.6) as watch:
    watch.step(0); print('ready', flush=True)
    time.sleep(100)
"""
    _, err, code, seconds = ended(program)
    assert (code, "0.6 s allowed" in err) == (1, True)
    assert seconds > 0.5


@pytest.mark.programs
def test_work_that_ends_during_the_search_is_left_alone():
    program = """
job = processes.Job()
with watchdog.Watchdog(job, seconds=0.1, first=0.1) as watch:
    watch.phase('train', waits=True); print('ready', flush=True)
    time.sleep(0.4)
print('done')
"""
    out, err, code, _ = ended(program)
    assert (code, out, "watchdog" in err) == (0, "done\n", False), err


def test_a_watchdog_needs_time():
    with pytest.raises(ValueError, match=r"seconds above 0; got 0\.0"):
        Watchdog(Job(), seconds=0.0)
