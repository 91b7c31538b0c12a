"""The main job, as a user starts it: `python examples/gpt2.py` in a process of its own, few steps, in a folder of its own."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from parallax import schedule

ROOT = Path(__file__).resolve().parent.parent
SMALL = ["--layers=2", "--width=32", "--heads=2", "--length=16", "--steps=6", "--evaluate-every=4", "--evaluate-tokens=2048"]
LOSSES = ("step", "loss", "gradient_norm", "held_out")


def start(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(ROOT / "examples" / "gpt2.py"), *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False)


def train(folder: Path, *arguments: str) -> str:
    done = start(folder, *SMALL, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path) -> list[tuple]:
    return [tuple(record.get(name) for name in LOSSES) for record in metrics(folder)]


@pytest.fixture(scope="module")
def twice(tmp_path_factory) -> tuple[Path, list[str]]:
    """A folder with two runs of one command, and what they printed."""
    folder = tmp_path_factory.mktemp("runs")
    return folder, [train(folder), train(folder)]


def test_a_second_run_gives_the_same_losses_and_leaves_the_first_alone(twice):
    folder, printed = twice
    first = losses(folder / "out/gpt2")
    assert len(first) == 6
    assert first == losses(folder / "out/gpt2-2")
    assert "out/gpt2-2" in printed[1]
    assert (folder / "out/gpt2/sample.txt").read_text() == (folder / "out/gpt2-2/sample.txt").read_text()


def test_metrics_hold_a_record_for_each_step(twice):
    records = metrics(twice[0] / "out/gpt2")
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert [record["step"] for record in records if "held_out" in record] == [4, 6]
    for record in records:
        assert set(record) - {"held_out"} == {"step", "loss", "gradient_norm", "seconds", "tokens_per_second", "share"}
        assert all(math.isfinite(value) and value > 0 for value in record.values())
        assert record["tokens_per_second"] == pytest.approx(16 * 16 / record["seconds"])
    assert records[0]["loss"] == pytest.approx(math.log(256), abs=0.1)  # a fresh model knows nothing
    assert records[-1]["loss"] < records[0]["loss"]


def test_the_plan_stands_before_the_first_step(twice):
    plan, steps = twice[1][0].split("step 4/6", maxsplit=1)
    parameters = (256 + 64) * 32 + 2 * (12 * 32 * 32 + 13 * 32) + 2 * 32
    for said in (
        f"{parameters:,} parameters",
        "data 2 x stage 2 x tensor 2: 8 virtual CPU devices",
        "2,452,353 bytes to train on",
    ):
        assert said in plan
    for said in (
        "a device sends",
        "ZeRO-0: nothing; computes in full precision; computed again: none",
        "over data",
        "over stage x tensor",
        "one_f_one_b: 2 stages, 4 microbatches: time 15, bubble 3 (20%), at most 3 microbatches in flight",
        "FLOP/s",
        "uniform 5.545",
        "bigram 2.",
    ):
        assert said in plan
    assert max(map(len, plan.splitlines())) <= 120
    for said in (
        "step 6/6",
        "held-out",
        "tokens/s",
        "of matrix rate",
        "left",
        "sample, 300 bytes",
        "the bigram line of",
        "s in all",
    ):
        assert said in steps


@pytest.mark.parametrize(("name", "height", "width"), [("loss.png", 500, 900), ("schedule.png", 300, 900)])
def test_the_pictures_are_pictures(twice, name, height, width):
    import matplotlib.image

    pixels = matplotlib.image.imread(twice[0] / "out/gpt2" / name)
    assert pixels.shape[0] > height
    assert pixels.shape[1] > width
    assert 0.02 < (pixels[..., :3].min(axis=-1) < 0.9).mean() < 0.95  # drawn on, and not all over


def test_one_device_computes_the_same_run(twice, tmp_path):
    train(tmp_path, "--devices=1", "--all-reduce=psum", "--microbatches=1", "--remat=block", "--out=alone")
    for one, eight in zip(losses(tmp_path / "alone"), losses(twice[0] / "out/gpt2"), strict=True):
        assert [value or 0 for value in one] == pytest.approx([value or 0 for value in eight], rel=2e-5)


def test_a_table_of_your_own_computes_the_same_run(twice, tmp_path):
    schedule.to_csv(schedule.gpipe(2, 4), tmp_path / "mine.csv")
    train(
        tmp_path,
        "--data=2",
        "--stage=2",
        "--tensor=2",
        "--schedule=mine.csv",
        "--remat=stage",
        "--zero=2",
        "--sequence",
        "--dropout=0",
        "--out=mine",
    )
    for mine, eight in zip(losses(tmp_path / "mine"), losses(twice[0] / "out/gpt2"), strict=True):
        assert [value or 0 for value in mine] == pytest.approx([value or 0 for value in eight], rel=2e-5)


@pytest.mark.slow
def test_the_fastest_all_reduce_computes_the_same_run(twice, tmp_path):
    printed = train(tmp_path, "--all-reduce=auto", "--out=auto")
    assert "data" in printed.split("model  ")[0]  # what was measured and chosen, before the plan
    for auto, eight in zip(losses(tmp_path / "auto"), losses(twice[0] / "out/gpt2"), strict=True):
        assert [value or 0 for value in auto] == pytest.approx([value or 0 for value in eight], rel=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_two_hundred_steps_in_short_numbers_end_as_in_float32(precision, full_precision, tmp_path):
    assert held_out_after_200(tmp_path, f"--precision={precision}") == pytest.approx(full_precision, rel=0.02)


@pytest.fixture(scope="module")
def full_precision(tmp_path_factory):
    return held_out_after_200(tmp_path_factory.mktemp("full"))


def held_out_after_200(folder, *arguments) -> float:
    done = start(folder, "--steps=200", "--evaluate-every=200", *arguments)
    assert done.returncode == 0, done.stderr
    return metrics(folder / "out/gpt2")[-1]["held_out"]


def test_a_model_that_is_lost_is_told_at_the_next_evaluation(tmp_path):
    done = start(tmp_path, *SMALL, "--devices=1", "--learning-rate=1e30")
    assert done.returncode == 1
    assert "error: step 4: the held-out loss is nan, so the model is lost. Lower --learning-rate (now 1e+30)." in done.stderr
    assert "Traceback" not in done.stderr
    assert [record["step"] for record in metrics(tmp_path / "out/gpt2") if "skipped" in record] == [2, 3]


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_its_metrics(tmp_path):
    done = start(tmp_path, *SMALL, "--devices=1", "--learning-rate=1e30", "--skip-budget=1")
    assert done.returncode == 1
    assert "error: step 3: the loss is nan" in done.stderr
    assert "Now --learning-rate is 1e+30 and --skip-budget 1." in done.stderr
    assert "Traceback" not in done.stderr
    assert [record["step"] for record in metrics(tmp_path / "out/gpt2")] == [1, 2]


MISTAKES = {
    "--tensor=3": "multiply to 6, and there are 8 devices",
    "--batch=10": "batch=10) must divide by data x microbatches=8. Take batch=16 or batch=8",
    "--layers=3": "layers=3) must divide by stage x chunks=2. Take layers=4 or layers=2",
    "--schedule=pipedream": "--schedule must be gpipe, one_f_one_b, interleaved or a file that ends in .csv; got pipedream",
    "--chunks=3": "layers=4) must divide by stage x chunks=6. Take layers=6",
    "--width=130": "width=130 must divide by heads=4",
    "--text=nowhere.txt": "nowhere.txt: needed a text file, found no file",
    "--text=short.txt": "one window needs 65 tokens (length 64 and the next one), the text has 27",
    "--out=short.txt": "needed a folder for the results, found a file",
    "--prompt=": "--prompt must have a character or more",
    "--zero=1 --data=1": "zero=1 splits state over replicas; got data=1. Take zero=0, or more replicas.",
    "--steps=0": "--steps must be 1 or more; got 0",
}


@pytest.mark.parametrize("argument", MISTAKES)
def test_a_mistake_is_told_in_a_line(argument, tmp_path):
    (tmp_path / "short.txt").write_text("Four score and seven years ago")
    done = start(tmp_path, *argument.split())
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert MISTAKES[argument] in done.stderr
    assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["short.txt"]
