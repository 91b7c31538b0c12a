"""The scripts of examples/cluster, with launchers that only say how the program ended: they restart
it, up to a limit."""

import os
import re
import subprocess
import time
from pathlib import Path

import pytest

CLUSTER = Path(__file__).parents[1] / "examples" / "cluster"


def programs(folder, **scripts):
    """Programs that take the place of others, on a path of their own."""
    for name, script in scripts.items():
        (folder / name).write_text(f"#!/bin/bash\n{script}\n")
        (folder / name).chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def submitted(tmp_path, srun):
    """Slurm: the script again whenever it has asked for it. Its exit code, how often it was
    started, and what it said."""
    tools = programs(tmp_path, srun=srun, scontrol=f'echo "$@" > {tmp_path}/requeued')
    for restarts in range(100):
        environment = os.environ | tools | {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "7"}
        environment |= {"SLURM_RESTART_COUNT": str(restarts)} if restarts else {}
        done = subprocess.run(
            ["bash", CLUSTER / "gpt2.sbatch", "--steps=9"],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if not (tmp_path / "requeued").exists():
            return done.returncode, restarts + 1, done.stderr
        assert (tmp_path / "requeued").read_text() == "requeue 7\n"
        (tmp_path / "requeued").unlink()
    raise AssertionError("it never ended")


@pytest.mark.programs
@pytest.mark.parametrize("code", [1, 137, 0])
def test_slurm_restarts_what_failed_or_was_told_to_end_up_to_a_limit(tmp_path, code):
    ended, starts, said = submitted(tmp_path, f"exit {code}")
    assert (ended, starts) == (1, 21)
    assert f"ended with code {code} after 20 restarts, and is not started again" in said


@pytest.mark.programs
def test_slurm_ends_when_the_run_is_finished(tmp_path):
    third = f"echo x >> {tmp_path}/starts; [ $(wc -l < {tmp_path}/starts) -ge 3 ] || exit 1"
    ended, starts, _ = submitted(
        tmp_path, f"{third}; mkdir -p {tmp_path}/out/gpt2; touch {tmp_path}/out/gpt2/sample.txt"
    )
    assert (ended, starts) == (0, 3)


@pytest.mark.programs
def test_slurm_does_not_restart_what_is_refused(tmp_path):
    ended, starts, said = submitted(tmp_path, "exit 2")
    assert (ended, starts) == (2, 1)
    assert "was refused" in said


def jobset():
    return (CLUSTER / "jobset.yaml").read_text()


def container(tmp_path, python):
    """The shell of the pod, with another python and another folder."""
    block = re.search(r"- \|\n((?: {22}.*\n)+)", jobset())
    assert block is not None
    script = re.sub(r"^ {22}", "", block[1], flags=re.MULTILINE).replace(
        "/runs/gpt2", str(tmp_path / "out")
    )
    return subprocess.Popen(
        ["bash", "-c", script], env=os.environ | programs(tmp_path, python=python)
    )


@pytest.mark.programs
@pytest.mark.parametrize(
    ("python", "code"),
    [("exit 0", 75), ("exit 1", 1), ("exit 2", 2), ('mkdir -p "$3"; touch "$3/sample.txt"', 0)],
)
def test_a_pod_fails_where_the_run_is_not_finished(tmp_path, python, code):
    assert container(tmp_path, python).wait(60) == code


@pytest.mark.programs
def test_a_pod_hands_sigterm_on_and_waits(tmp_path):
    told = (
        f"trap 'sleep 0.5; touch {tmp_path}/saved; exit 0' TERM; touch {tmp_path}/up; "
        f"while true; do sleep 0.1; done"
    )
    pod = container(tmp_path, told)
    while not (tmp_path / "up").exists():
        time.sleep(0.01)
    pod.terminate()
    assert pod.wait(60) == 75
    assert (tmp_path / "saved").exists()


def test_a_jobset_has_a_limit_and_does_not_restart_what_is_refused():
    assert "maxRestarts: 20\n" in jobset()
    assert re.search(
        r"action: FailJob\n +onExitCodes:\n +containerName: train\n +operator: In\n +values: \[2\]",
        jobset(),
    )
    assert re.search(r"action: FailJobSet\n +onJobFailureReasons: \[PodFailurePolicy\]", jobset())
