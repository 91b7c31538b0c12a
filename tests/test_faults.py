"""Real processes, really killed: the job ends at once, says why, and goes on from its last
checkpoint to the same bits.

The issue of each: with JAX's defaults a rank that raised left the others waiting for more than 90
s, a straggler for ever, and SIGTERM was swallowed. A test that would meet that takes minutes, so
`SECONDS` is loose, and the figures are printed (`-rP`).
"""

import contextlib
import json
import random
import re
import signal
import time

import flags
import numpy as np
import pytest
from faults import LAUNCHER, Running, kill

SECONDS = 30  # for a job to end after a fault, on a machine that other tests keep busy
MORE = 5  # seconds more than the watchdog's, in which all processes are gone, whatever stopped
WATCHDOG = 20  # seconds for a step, on such a machine
LIMIT = 25  # seconds in which all processes of a job must have come
ALL = [LAUNCHER, "variables"] if LAUNCHER == "mpirun" else [LAUNCHER]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The whole state at the end of 12 steps in one process, for each layout."""
    ends = {}

    def end(layout):
        if layout not in ends:
            folder = tmp_path_factory.mktemp("undisturbed") / layout
            with Running(folder, "--layout", layout, processes=1, launcher="one process") as job:
                assert job.wait() == 0, job.printed()
            ends[layout] = read(folder), losses(folder)
        return ends[layout]

    return end


@pytest.fixture(scope="module")
def long(pytestconfig):
    """Kills, and steps, more than so many killed sessions get through."""
    return (60, 400) if pytestconfig.option.all else (3, 60)


@pytest.fixture(scope="module")
def undisturbed_long(tmp_path_factory, long):
    folder = tmp_path_factory.mktemp("long")
    with Running(
        folder,
        "--layout",
        "small",
        "--steps",
        long[1],
        processes=1,
        launcher="one process",
    ) as job:
        assert job.wait() == 0, job.printed()
    return read(folder), losses(folder)


def read(folder):
    with np.load(folder / "end.npz") as file:
        return dict(file)


def losses(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def assert_same_bits(folder, expected):
    found = read(folder)
    assert found.keys() == expected[0].keys()
    for name, value in expected[0].items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
    assert losses(folder) == expected[1]


def since_fault(job):
    assert (job.folder / "fault").exists(), job.printed()
    return time.time() - float((job.folder / "fault").read_text())


@pytest.mark.programs
@pytest.mark.long
def test_one_process_killed_goes_on_to_the_same_bits(tmp_path, undisturbed):
    expected = undisturbed("small")
    options = {"launcher": "one process", "processes": 1}
    with Running(tmp_path, "--layout", "small", "--pause", 0.05, **options) as job:
        job.until(lambda: job.steps() >= 9)  # the save of step 8 waited for that of step 4
        kill(job.rank(0), signal.SIGKILL)
        job.wait()
    with Running(tmp_path, "--layout", "small", **options) as job:
        assert job.wait() == 0, job.printed()
        assert "restored step " in job.printed()
    assert_same_bits(tmp_path, expected)


@pytest.mark.programs
@pytest.mark.long
def test_one_process_told_to_end_saves_and_exits_with_0(tmp_path):
    options = {"launcher": "one process", "processes": 1, "flags": flags.quick()}
    with Running(
        tmp_path, "--layout", "small", "--steps", 1000, "--every", 1000, "--pause", 0.05, **options
    ) as job:
        job.until(lambda: job.steps() >= 2)
        kill(job.rank(0), signal.SIGTERM)
        assert job.wait(SECONDS) == 0, job.printed()
        assert job.printed().endswith(f"preempted: saved step {job.steps()}")


@pytest.mark.programs
@pytest.mark.long
@pytest.mark.sweep(2)
@pytest.mark.parametrize("launcher", ALL)
def test_a_rank_that_raises_ends_the_job_and_has_the_last_word(tmp_path, launcher):
    options = ["--layout", "small", "--raise-at", 3, "--rank", 1]
    with Running(tmp_path, *options, processes=2, flags=flags.quick(), launcher=launcher) as job:
        assert job.wait() != 0
        print(f"{launcher}: all ranks gone {since_fault(job):.2f} s after the fault")
        assert since_fault(job) < SECONDS
        printed = job.printed()
    assert printed.count("ArithmeticError: injected in rank 1") == 1
    if launcher == "mpirun":
        assert printed.count("Traceback") == 1
        assert re.search(
            r"ArithmeticError: injected in rank 1\n-----", printed
        )  # and then mpirun's own words


# The sweeps: up to four processes, of two devices or of one


@pytest.mark.programs
@pytest.mark.long
def test_four_processes_compute_what_one_does(tmp_path, undisturbed):
    with Running(tmp_path, "--layout", "pipeline", processes=4) as job:
        assert job.wait() == 0, job.printed()
    assert_same_bits(tmp_path, undisturbed("pipeline"))  # more than the 1e-11 that is promised


@pytest.mark.programs
@pytest.mark.long
@pytest.mark.timeout(7200)
def test_kills_at_random_moments_end_in_the_same_bits(
    tmp_path, undisturbed_long, long, pytestconfig
):
    """Any rank, from its first moment on: as it starts, restores, computes, saves and removes. All
    end, nobody stays behind, and a step is lost for good only back to the last finished checkpoint.

    The job comes back with 1, 2 or 4 processes, which share the same devices, started by mpirun or
    by none. The moments are drawn by --seed: 3 kills, or 60 with --all.
    """
    generator, every, took, lost, saving, reached = (
        random.Random(pytestconfig.option.seed),
        3,
        [],
        [],
        0,
        0,
    )
    (kills, steps), begun, start_up = long, [], 5.0
    command = ["--layout", "small", "--steps", steps, "--every", every, "--start-up", LIMIT]
    for number in range(kills):
        processes = generator.choice([1, 2, 2, 4])
        launcher = "one process" if processes == 1 else generator.choice(ALL)
        with Running(
            tmp_path, *command, "--pause", 0.1, processes=processes, launcher=launcher
        ) as job:
            if number % 3 == 0:  # before its first step, as far as is known
                job.until(job.ranks)
                time.sleep(generator.uniform(0, start_up))
                job.until(lambda expected=processes: len(job.ranks()) == expected)
                begun.append((launcher, processes))
            else:
                restored = goes_on_from(job)
                start_up = time.time() - job.began
                lost.append(reached - restored)
                reaches = restored + generator.randint(1, 4)
                job.until(lambda reaches=reaches: job.steps() >= reaches)
                time.sleep(generator.uniform(0, 0.5))
            rank = generator.randrange(processes)
            kill(job.rank(rank), signal.SIGKILL)
            killed = time.monotonic()
            assert job.wait() != 0
            took.append(
                (
                    time.monotonic() - killed,
                    launcher,
                    f"rank {rank} of {processes}",
                    "start" if number % 3 == 0 else "run",
                )
            )
            reached = job.steps()
            unfinished = [
                path
                for path in (tmp_path / "checkpoints").glob("0*")
                if not (path / "manifest.json").exists()
            ]
            saving += bool(unfinished)
            newest = max(
                (
                    int(path.parent.name)
                    for path in (tmp_path / "checkpoints").glob("0*/manifest.json")
                ),
                default=0,
            )
            assert reached - newest <= (
                2 * every if unfinished else every
            )  # 2 * every is `lose_at_most`
    with Running(tmp_path, *command, processes=4) as job:
        assert job.wait() == 0, job.printed()
    slowest = ", ".join(
        f"{seconds:.1f} s ({how}, {who}, {when})" for seconds, how, who, when in sorted(took)[-3:]
    )
    print(
        f"{kills} kills, {len(begun)} as it started, {saving} during a save; last to end: "
        f"{slowest}; lost {sorted(lost)} steps"
    )
    assert max(took)[0] < LIMIT + MORE
    assert_same_bits(tmp_path, undisturbed_long)


def goes_on_from(job):
    """The step that the job goes on from, once it has said so and its metrics have begun: those of
    an earlier job are there."""
    saved = any((job.folder / "checkpoints").glob("0*/manifest.json"))
    said = lambda: not saved or "restored step " in job.printed()
    job.until(lambda: job.steps() and job.metrics.stat().st_mtime > job.began and said())
    restored = [
        line.split()[2] for line in job.printed().splitlines() if line.startswith("restored step ")
    ]
    return int(restored[0]) if restored else 0


@pytest.mark.programs
@pytest.mark.long
@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("launcher", "processes", "rank"), [(ALL[0], 4, 3), (ALL[0], 2, 0), (ALL[-1], 2, 1)]
)
def test_sigterm_to_one_rank_saves_all_at_one_step(
    tmp_path, undisturbed, launcher, processes, rank
):
    options = {"processes": processes, "launcher": launcher}
    with Running(tmp_path, "--layout", "small", "--every", 1000, "--pause", 0.3, **options) as job:
        job.until(lambda: job.steps() >= 3)
        kill(job.rank(rank), signal.SIGTERM)
        start = time.monotonic()
        assert job.wait(SECONDS) == 0, job.printed()
        print(
            f"{launcher}, rank {rank}: saved and gone after {time.monotonic() - start:.2f} s, "
            f"at step {job.steps()}"
        )
        assert f"preempted: saved step {job.steps()}" in job.printed()
        reached = job.steps()
        assert reached < 12
    with Running(tmp_path, "--layout", "small", "--every", 1000, **options) as job:
        assert job.wait() == 0, job.printed()
        assert f"restored step {reached} " in job.printed()
    assert_same_bits(tmp_path, undisturbed("small"))


@pytest.mark.programs
@pytest.mark.long
@pytest.mark.sweep(2)
@pytest.mark.parametrize("launcher", ALL)
def test_a_rank_that_sleeps_is_named_and_the_job_ends(tmp_path, launcher):
    options = ["--layout", "small", "--sleep-at", 3, "--rank", 2, "--seconds", WATCHDOG]
    with Running(tmp_path, *options, processes=4, flags=flags.quick(), launcher=launcher) as job:
        assert job.wait() != 0
        print(
            f"{launcher}: all ranks gone {since_fault(job):.2f} s after the fault, of which "
            f"{WATCHDOG} are the watchdog's"
        )
        assert since_fault(job) < WATCHDOG + SECONDS
        named = [line for line in job.printed().splitlines() if line.startswith("watchdog: ")]
    assert named[0].startswith("watchdog: rank 2 on ")
    assert "holds up the job: in step 3" in named[0]
    assert "'a long sleep'" in named[0]


HAS_LEFT = re.escape("has left: it was last in step 3, phase 'fault'")
# Its last entry is up to half a second old, when quick steps had perhaps not begun.
IS_SILENT = (
    re.escape("sends nothing: it is gone, is stopped, or holds Python's lock; it was last ")
    + r"(in step \d|starting)"
)
STOPPED = {
    "exit": HAS_LEFT,
    "return": HAS_LEFT,
    "os._exit": IS_SILENT,
    "stop": IS_SILENT,
    "hold the lock": IS_SILENT,
}


@pytest.mark.programs
@pytest.mark.long
@pytest.mark.sweep(5)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("leave", STOPPED)
@pytest.mark.parametrize("launcher", ALL)
def test_a_rank_that_stops_without_an_error_is_named_and_all_end(tmp_path, launcher, leave, rank):
    options = [
        "--layout",
        "small",
        "--leave-at",
        3,
        "--leave-by",
        leave,
        "--rank",
        rank,
        "--seconds",
        WATCHDOG,
        "--heartbeat",
        60,  # so that the watchdog is first
    ]
    with Running(tmp_path, *options, processes=2, flags=flags.quick(), launcher=launcher) as job:
        if (
            leave == "stop" and launcher != "mpirun"
        ):  # no launcher ends it: it ends itself as soon as it goes on
            job.until(lambda: len(job.ranks()) == 1)
            kill(job.rank(rank), signal.SIGCONT)
        assert job.wait() != 0
        print(
            f"{launcher}, {leave}, rank {rank}: all ranks gone {since_fault(job):.2f} s after "
            f"it; the watchdog has {WATCHDOG}"
        )
        assert since_fault(job) < WATCHDOG + MORE
        printed = job.printed()
    named = rf"rank {rank} on \S+ \(process \d+\) {STOPPED[leave]}"
    if leave == "os._exit" and rank == 0:
        # JAX's service is part of rank 0: the others end at once, with its words for its leader.
        named += "|the leader task was preempted/died"
    assert re.search(named, printed), printed


@pytest.mark.programs
@pytest.mark.long
@pytest.mark.sweep(2)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("delay", "late"), [(0.5, 0), (0.5, 8), (8.0, 0)])
def test_a_rank_killed_as_it_starts_ends_the_others(tmp_path, rank, delay, late):
    """Without mpirun, which would end them: before the processes have met, with slow imports too,
    and when they compile."""
    options = [
        "--layout",
        "small",
        "--start-up",
        LIMIT,
        "--late",
        late,
        "--pause",
        0.2,
        "--steps",
        1000,
    ]
    with Running(tmp_path, *options, processes=2, flags=flags.quick(), launcher="variables") as job:
        time.sleep(delay)
        kill(job.rank(rank), signal.SIGKILL)
        killed = time.monotonic()
        assert job.wait(LIMIT + SECONDS) != 0
        took = time.monotonic() - killed
        print(
            f"rank {rank} killed {delay} s after the start, imports {late} s longer: the "
            f"others gone {took:.2f} s later"
        )
        assert took < LIMIT + MORE
        printed = job.printed()
    # Before JAX has connected them nobody is known; afterwards its heartbeats name a rank, and the
    # leader where it is rank 0.
    named = (
        "did not all connect within the 25 s",
        "the leader task was preempted/died" if rank == 0 else r"sending heartbeats\):\s+1\s",
        rf"rank {rank} on \S+ \(process \d+\) sends nothing",
    )
    assert re.search("|".join(named), printed), printed


@pytest.mark.programs
@pytest.mark.long
def test_two_jobs_that_ask_for_one_port_do_not_train_together(tmp_path, monkeypatch):
    """JAX's services share the port, and each may get ranks of the other job. A job then ends with
    an error, or has its own ranks alone."""
    options = {
        "processes": 2,
        "flags": flags.quick(),
        "launcher": "variables",
        "name": str(time.time_ns()),
    }
    jobs = []
    with contextlib.ExitStack() as running:
        for token in ("one", "another"):
            monkeypatch.setenv("PARALLAX_JOB_TOKEN", token)
            jobs.append(
                running.enter_context(
                    Running(tmp_path / token, "--layout", "small", "--start-up", LIMIT, **options)
                )
            )
        ends = [job.wait() for job in jobs]
        for code, job in zip(ends, jobs, strict=True):
            print(code, job.printed()[-200:])
            # A job of mixed ranks would train in this folder, with the data of both.
            assert ("finished with goodput" in job.printed()) == (code == 0)


@pytest.mark.programs
@pytest.mark.long
@pytest.mark.sweep(2)
@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("processes", [1, 2])
def test_ctrl_c_and_a_closed_terminal_save_as_sigterm_does(tmp_path, number, processes):
    launcher = "one process" if processes == 1 else "variables"
    options = {"processes": processes, "launcher": launcher, "flags": flags.quick()}
    with Running(
        tmp_path, "--layout", "small", "--steps", 1000, "--every", 1000, "--pause", 0.3, **options
    ) as job:
        job.until(lambda: job.steps() >= 2)
        kill(job.rank(processes - 1), number)
        assert job.wait(SECONDS) == 0, job.printed()
        printed = job.printed()
    assert f"{number.name}: the run saves after this step, and ends" in printed
    assert printed.count(f"preempted: saved step {job.steps()}") == 1
    assert "Traceback" not in printed


@pytest.mark.programs
@pytest.mark.long
@pytest.mark.sweep(2)
@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize("processes", [1, 2])
def test_a_second_ctrl_c_ends_at_once(tmp_path, processes):
    launcher = "one process" if processes == 1 else "variables"
    options = {"processes": processes, "launcher": launcher, "flags": flags.quick()}
    with Running(
        tmp_path, "--layout", "small", "--steps", 1000, "--every", 1000, "--pause", 20, **options
    ) as job:
        job.until(lambda: job.steps() >= 1)
        for _ in range(2):
            time.sleep(1)
            kill(job.rank(0), signal.SIGINT)
        told = time.monotonic()
        assert job.wait(SECONDS) != 0
        print(
            f"{processes} processes: gone {time.monotonic() - told:.2f} s after the second Ctrl-C"
        )
        assert time.monotonic() - told < MORE
        printed = job.printed()
    assert "SIGINT: ended at once. Run the same command again to go on from the last" in printed
    assert "Traceback" not in printed


@pytest.mark.programs
@pytest.mark.long
@pytest.mark.skipif(LAUNCHER != "mpirun", reason="no mpirun here")
def test_sigterm_to_mpirun_itself_saves_where_mpirun_gives_time(tmp_path):
    """It sends SIGKILL a second later, or after as many as it is told."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMPI_MCA_odls_base_sigkill_timeout", "30")
        job = Running(
            tmp_path, "--layout", "small", "--steps", 1000, "--every", 1000, "--pause", 0.3,
            processes=2, flags=flags.quick(),
        )  # fmt: skip
    with job:
        job.until(lambda: job.steps() >= 2)
        kill(job.started[0].pid, signal.SIGTERM)
        job.wait(60)
        assert f"preempted: saved step {job.steps()}" in job.printed()


@pytest.mark.programs
@pytest.mark.long
def test_a_second_run_in_a_folder_is_refused_in_a_line(tmp_path):
    options = {"launcher": "one process", "processes": 1, "flags": flags.quick()}
    started = [
        "--layout",
        "one",
        "--steps",
        1000,
        "--every",
        1000,
    ]  # no checkpoint, whose settings would be refused first
    with Running(tmp_path, *started, "--pause", 0.2, **options) as job:
        job.until(lambda: job.steps() >= 1)
        with Running(tmp_path, *started, "--seed", 1, **options) as other:
            assert other.wait() == 2, other.printed()
            assert re.search(
                rf"error: .* belongs to another run: process {job.rank(0)} on ",
                other.printed().splitlines()[-1],
            )
            assert "Traceback" not in other.printed()
        assert job.ranks()


@pytest.mark.programs
@pytest.mark.long
def test_steps_that_are_not_finite_are_skipped_up_to_the_budget(tmp_path):
    options = ["--layout", "small", "--nan-at", 3, 5, "--every", 4]
    with Running(tmp_path / "within", *options, processes=2, flags=flags.quick()) as job:
        assert job.wait() == 0, job.printed()
        assert job.printed().endswith("skipped [4, 6]")
    found = losses(tmp_path / "within")
    assert [line["step"] for line in found if not np.isfinite(line["loss"])] == [4, 6]
    with Running(
        tmp_path / "past", *options, "--budget", 1, processes=2, flags=flags.quick()
    ) as job:
        assert job.wait() != 0
        assert "stopped: step 6: the loss is nan" in job.printed()
    assert (tmp_path / "past" / "checkpoints" / "00000006" / "manifest.json").exists()


@pytest.mark.programs
@pytest.mark.long
def test_a_run_on_other_layouts_and_processes_goes_on(tmp_path, undisturbed):
    """Data 2 x stage 2 x tensor 2 in 4 processes, then data 4 x tensor 2 in 2, then one device,
    then back."""
    for layout, processes, steps in [
        ("pipeline", 4, 3),
        ("plain", 2, 6),
        ("one", 1, 9),
        ("pipeline", 4, 12),
    ]:
        launcher = "one process" if processes == 1 else LAUNCHER
        options = {
            "processes": processes,
            "launcher": launcher,
            "flags": flags.quick(),
        }
        with Running(
            tmp_path, "--layout", layout, "--steps", steps, "--every", 3, **options
        ) as job:
            assert job.wait() == 0, job.printed()
    expected = undisturbed("pipeline")[1]
    np.testing.assert_allclose(
        [line["loss"] for line in losses(tmp_path)],
        [line["loss"] for line in expected],
        rtol=1e-11,
        atol=0,
    )


@pytest.mark.programs
@pytest.mark.long
def test_other_settings_are_refused_in_a_folder_that_holds_a_run(tmp_path):
    options = {"launcher": "one process", "processes": 1, "flags": flags.quick()}
    for seed, code in ((0, 0), (1, 1)):
        with Running(
            tmp_path, "--layout", "one", "--steps", 2, "--every", 2, "--seed", seed, **options
        ) as job:
            assert job.wait() == code, job.printed()
    assert "another run, which had seed=0 (here 1)" in job.printed()
