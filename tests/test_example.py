"""The main job, as a user starts it: `python examples/gpt2.py` in a process of its own, few steps,
in a folder of its own."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import flags
import pytest

from parallax import schedule

ROOT = Path(__file__).resolve().parent.parent
SMALL = [
    "--layers=2",
    "--width=32",
    "--heads=2",
    "--length=16",
    "--steps=6",
    "--evaluate-every=4",
    "--evaluate-tokens=2048",
]
LOSSES = ("step", "loss", "gradient_norm", "held_out")


def command(*arguments: str) -> list[str]:
    return [sys.executable, str(ROOT / "examples" / "gpt2.py"), *arguments]


def environment(**variables: str) -> dict[str, str]:
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"} | variables


def start(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        command(*arguments),
        cwd=folder,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def train(folder: Path, *arguments: str, **variables: str) -> str:
    done = start(folder, *SMALL, *arguments, **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path) -> list[tuple]:
    return [tuple(record.get(name) for name in LOSSES) for record in metrics(folder)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, str]:
    """A folder with a run, and what it printed."""
    folder = tmp_path_factory.mktemp("run")
    return folder, train(folder)


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.programs
def test_the_same_command_again_says_that_it_is_finished_and_changes_nothing(finished):
    folder, _ = finished
    before = files(folder)
    said = train(folder)
    assert (
        "out/gpt2 holds this run, and it is finished, after 6 steps. To train again, give --out "
        "another folder." in said
    )
    assert "model  " not in said
    assert files(folder) == before


@pytest.mark.programs
@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seed=1"], "out/gpt2 holds another run, with seed=0 (here 1). Choose another --out"),
        (
            ["--steps=7", "--batch=32"],
            "holds another run, with batch=16 (here 32), steps=6 (here 7). Choose another --out",
        ),
        (["--out=out"], "out: needed an empty folder or the folder of a run, found other files"),
    ],
)
def test_a_folder_of_something_else_is_refused_and_left_as_it_is(finished, arguments, message):
    folder, _ = finished
    before = files(folder)
    done = start(folder, *SMALL, *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert files(folder) == before


@pytest.mark.programs
@pytest.mark.long
def test_a_run_that_is_told_to_end_goes_on_to_the_same_numbers(finished, tmp_path):
    """SIGTERM after the first step that is written down; then the same command, on another
    layout."""
    with subprocess.Popen(
        command(*SMALL, "--checkpoint-every=2", "--devices=1"),
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    ) as running:
        while not (path := tmp_path / "out/gpt2/metrics.jsonl").exists() or not path.read_text():
            assert running.poll() is None
            time.sleep(0.01)
        running.send_signal(signal.SIGTERM)
        said = running.communicate(timeout=300)[0]
    assert running.returncode == 0
    reached = len(metrics(tmp_path / "out/gpt2"))
    if reached < 6:
        told = (
            f"told to end (SIGTERM): saved step {reached} of 6 in out/gpt2. The same command goes "
            "on from there."
        )
        assert told in said
    said = train(tmp_path, "--devices=2", "--data=1", "--tensor=2")
    assert f"out/gpt2: goes on after step {reached}\n" in said or reached == 6
    for first, second in zip(
        losses(tmp_path / "out/gpt2"), losses(finished[0] / "out/gpt2"), strict=True
    ):
        assert [value or 0 for value in first] == pytest.approx(
            [value or 0 for value in second], rel=2e-5
        )
    assert (tmp_path / "out/gpt2/sample.txt").exists()


@pytest.mark.programs
@pytest.mark.long
def test_a_second_run_gives_the_same_losses(tmp_path):
    """To the last bit, as users compile, whatever else it writes."""
    train(tmp_path, "--out=first", **flags.of_users())
    train(tmp_path, "--tensorboard", "--profile=2:3", **flags.of_users())
    assert losses(tmp_path / "out/gpt2") == losses(tmp_path / "first")
    assert (tmp_path / "out/gpt2/sample.txt").read_text() == (
        tmp_path / "first/sample.txt"
    ).read_text()
    assert list(tmp_path.glob("out/gpt2/profile/**/*.xplane.pb"))
    assert list(tmp_path.glob("out/gpt2/tensorboard/events*"))


@pytest.mark.programs
def test_metrics_hold_a_record_for_each_step(finished):
    records = metrics(finished[0] / "out/gpt2")
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert [record["step"] for record in records if "held_out" in record] == [4, 6]
    for record in records:
        assert ("one_device" in record) == (record["step"] <= 3)
        assert record.get("one_device", record["loss"]) == pytest.approx(record["loss"], rel=1e-5)
        assert set(record) - {"held_out", "one_device"} == {
            "step",
            "loss",
            "gradient_norm",
            "seconds",
            "tokens_per_second",
            "share",
        }
        assert all(math.isfinite(value) and value > 0 for value in record.values())
        assert record["tokens_per_second"] == pytest.approx(16 * 16 / record["seconds"])
    assert records[0]["loss"] == pytest.approx(
        math.log(256), abs=0.1
    )  # a fresh model knows nothing
    assert records[-1]["loss"] < records[0]["loss"]


@pytest.mark.programs
def test_the_plan_stands_before_the_first_step(finished):
    plan, steps = finished[1].split("step 4/6", maxsplit=1)
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
        "one_f_one_b_lockstep: 2 stages, 4 microbatches: time 15, bubble 3 (20%), at most 3 "
        "microbatches in flight",
        "FLOP/s",
        "uniform 5.545",
        "bigram 2.",
    ):
        assert said in plan
    assert max(map(len, plan.splitlines())) <= 120
    assert re.search(
        r"^step 3: loss (\S+), on one device (\S+): difference \d\.\de[-+]\d\d$", plan, re.MULTILINE
    )
    for said in (
        "step 6/6",
        "held-out",
        "tokens/s",
        "of matrix rate",
        "left",
        "sample, 300 bytes",
        "the bigram model's loss of",
        "s in all",
    ):
        assert said in steps


@pytest.mark.programs
@pytest.mark.parametrize(
    ("name", "height", "width"), [("loss.png", 500, 900), ("schedule.png", 300, 900)]
)
def test_the_pictures_are_pictures(finished, name, height, width):
    import matplotlib.image

    pixels = matplotlib.image.imread(finished[0] / "out/gpt2" / name)
    assert pixels.shape[0] > height
    assert pixels.shape[1] > width
    assert 0.02 < (pixels[..., :3].min(axis=-1) < 0.9).mean() < 0.95  # drawn on, and not all over


@pytest.mark.programs
def test_the_report_has_all_sections_and_pictures(finished):
    text = (finished[0] / "out/gpt2" / "report.html").read_text()
    headings = re.findall(r"<h2>(.*)</h2>", text)
    assert headings == [
        "The same as one device",
        "The run",
        "Losses",
        "Sample",
        "Mesh",
        "Timetable",
        "Traffic",
        "Certificate",
        "Memory",
        "Times",
    ]
    assert text.count("<img ") == 6


OTHERWISE = {
    "on one device": "--devices=1 --all-reduce=psum --microbatches=1 --remat=block",
    "by a table of one's own": "--data=2 --stage=2 --tensor=2 --schedule=mine.csv --remat=stage "
    "--zero=2 --sequence",
    "with the fastest all-reduce": "--all-reduce=auto",
}


@pytest.mark.programs
@pytest.mark.long
@pytest.mark.sweep(3)
@pytest.mark.parametrize("otherwise", OTHERWISE)
def test_computes_the_same_run(otherwise, finished, tmp_path):
    schedule.to_csv(schedule.gpipe(2, 4), tmp_path / "mine.csv")
    printed = train(tmp_path, *OTHERWISE[otherwise].split(), "--out=other")
    if "auto" in OTHERWISE[otherwise]:
        assert (
            "data" in printed.split("model  ")[0]
        )  # what was measured and chosen, before the plan
    for other, eight in zip(
        losses(tmp_path / "other"), losses(finished[0] / "out/gpt2"), strict=True
    ):
        assert [value or 0 for value in other] == pytest.approx(
            [value or 0 for value in eight], rel=2e-5
        )


@pytest.mark.programs
@pytest.mark.long
@pytest.mark.sweep(4)
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_two_hundred_steps_in_short_numbers_end_as_in_float32(precision, full_precision, tmp_path):
    assert held_out_after_200(tmp_path, f"--precision={precision}") == pytest.approx(
        full_precision, rel=0.02
    )


@pytest.fixture(scope="module")
def full_precision(tmp_path_factory):
    return held_out_after_200(tmp_path_factory.mktemp("full"))


def held_out_after_200(folder, *arguments) -> float:
    done = start(folder, "--steps=200", "--evaluate-every=200", *arguments, **flags.of_users())
    assert done.returncode == 0, done.stderr
    return metrics(folder / "out/gpt2")[-1]["held_out"]


@pytest.mark.programs
@pytest.mark.long
@pytest.mark.parametrize("size", ["4k", "12k"])
def test_a_full_disk_is_told_in_a_line(tmp_path, size):
    """From the first file on, and from the metrics on."""
    (tmp_path / "out").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", tmp_path / "out"]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a file system")
    try:
        done = start(tmp_path, *SMALL, "--devices=1")
    finally:
        subprocess.run(["umount", tmp_path / "out"], check=True)
    assert done.returncode in (1, 2)
    assert "No space left on device" in done.stderr
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr


@pytest.mark.programs
@pytest.mark.long
def test_a_model_that_is_lost_is_told_at_the_next_evaluation(tmp_path):
    done = start(tmp_path, *SMALL, "--devices=1", "--learning-rate=1e30")
    assert done.returncode == 1
    assert (
        "error: step 4: the held-out loss is nan, so the model is lost. Lower --learning-rate "
        "(now 1e+30) and" in done.stderr
    )
    assert "Traceback" not in done.stderr
    assert [record["step"] for record in metrics(tmp_path / "out/gpt2") if "skipped" in record] == [
        2,
        3,
    ]


@pytest.mark.programs
@pytest.mark.long
def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_its_metrics(tmp_path):
    done = start(tmp_path, *SMALL, "--devices=1", "--learning-rate=1e30", "--skip-budget=1")
    assert done.returncode == 1
    assert "error: step 3: the loss is nan" in done.stderr
    assert "Now --learning-rate is 1e+30 and --skip-budget 1." in done.stderr
    assert "Traceback" not in done.stderr
    assert [record["step"] for record in metrics(tmp_path / "out/gpt2")] == [1, 2]
    assert (
        tmp_path / "out/gpt2/checkpoints/00000003/manifest.json"
    ).exists()  # from which a larger budget goes on


MISTAKES = {
    "--tensor=3": "(--heads 4) must be a multiple of --tensor 3. Use --data 4 --stage "
    "1 --tensor 2, which divides it.",
    "--batch=10": "(--batch 10) must be a multiple of --data 2 x --microbatches 4. "
    "Use --batch 16 (or --batch 8).",
    "--layers=3": "(--layers 3) must be a multiple of --stage 2 x --chunks 1. "
    "Use --layers 4 (or --layers 2).",
    "--schedule=pipedream": "--schedule must be one_f_one_b_lockstep, "
    "gpipe, zero_bubble_lockstep, one_f_one_b",
    "--chunks=3": "(--layers 4) must be a multiple of --stage 2 x --chunks 3. "
    "Use --layers 6 (or --chunks 1).",
    "--width=130": "--width 130 must be a multiple of --heads 4. Use --heads 2 (or --width 132).",
    "--text=nowhere.txt": "nowhere.txt: needed a text file, found no file",
    "--text=short.txt": "short.txt has 27 tokens to train on and 3 held out; needed 65 and 1,025",
    "--out=short.txt": "needed a folder for the results, found a file",
    "--prompt=": "--prompt must have a character or more",
    "--zero=1 --data=1": "--zero 1 splits state over replicas; got --data 1. Use --data 8 "
    "--stage 1 --tensor 1 --zero 0",
    "--steps=0": "--steps must be 1 or more; got 0",
    "--checkpoint-every=1": "--checkpoint-every must be 2 or more; got 1",
    "--learning-rate=nan": "--learning-rate must be from 1e-30 to 1e+30; got "
    "nan. Use --learning-rate 0.003.",
    "--watchdog=0": "--watchdog must be 0.001 or more; got 0.0",
    "--keep-every=0": "--keep-every must be 1 or more; got 0",
    "--skip-budget=-1": "--skip-budget must be 0 or more; got -1. Use --skip-budget 10.",
    "--chunks=0": "--chunks must be 1 or more; got 0",
    "--out=short.txt/run": "cannot write to this folder (Not a directory). Choose another folder.",
    "--out=/proc/nothing/run": "cannot write to this folder (it cannot "
    "be made). Choose another folder.",
    "--fingerprint-every=-1": "--fingerprint-every must be 0 or more; got -1",
    "--rollback-budget=-1": "--rollback-budget must be 0 or more; got -1",
    "--fingerprint-every=5 --devices=1": (
        "--fingerprint-every 5 compares devices with each other, and there is one"
    ),
    "--profile=7": "--profile must be FIRST:LAST, two steps such as 10:12; got 7",
}


@pytest.mark.programs
@pytest.mark.sweep(10)
@pytest.mark.parametrize("argument", MISTAKES)
def test_a_mistake_is_told_in_a_line(argument, tmp_path):
    (tmp_path / "short.txt").write_text("Four score and seven years ago")
    done = start(tmp_path, *argument.split())
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert MISTAKES[argument] in done.stderr
    assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["short.txt"]


def small_model(folder: Path, vocabulary: int = 256) -> Path:
    """A folder of weights, as `gpt2.save` writes it, with an end token of its own."""
    import jax

    from parallax.models import gpt2
    from parallax.models.files import Origin

    origin = Origin((("eos_token_id", "10"),), '{"eos_token_id": 10}')
    config = gpt2.Config(
        layers=4, heads=2, width=32, context=24, vocabulary=vocabulary, dropout=0.5, origin=origin
    )
    gpt2.save(gpt2.GPT2(config, key=jax.random.key(3)), folder)
    return folder


FROM = ["--length=16", "--steps=2", "--evaluate-tokens=512", "--learning-rate=1e-6"]
SPLITS = [
    ["--data=2", "--stage=2", "--tensor=2", "--zero=3", "--sequence"],
    ["--stage=2", "--schedule=interleaved", "--microbatches=4"],
]


@pytest.mark.programs
@pytest.mark.long
@pytest.mark.sweep(2)
@pytest.mark.parametrize("split", SPLITS)
def test_any_layout_starts_from_a_folder_of_weights_and_leaves_one(split, tmp_path):
    import jax.numpy as jnp
    import numpy as np

    from parallax import data
    from parallax.models import gpt2

    source = small_model(tmp_path / "source")
    done = start(tmp_path, f"--from={source}", *FROM, *split)
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith("holds the model.")
    assert "tokenizer" not in done.stdout.splitlines()[-1]  # bytes have no files of one
    first, begun = metrics(tmp_path / "out/gpt2")[0], gpt2.load(source)
    train, _ = data.split(
        np.frombuffer((ROOT / "examples/data/state_of_the_union.txt").read_bytes(), np.uint8)
    )
    windows = jnp.asarray(data.batch(train, seed=0, step=0, size=16, length=16), jnp.int32)
    assert first["loss"] == pytest.approx(
        float(gpt2.loss(begun, (windows, None))), rel=1e-5
    )  # float32, summed in another order
    ended = gpt2.load(tmp_path / "out/gpt2/model")
    assert ended.config.origin == begun.config.origin
    for leaf in ("wte", "wpe"):
        one, other = (np.asarray(getattr(model, leaf)) for model in (begun, ended))
        np.testing.assert_allclose(
            other, one, atol=1e-5
        )  # ten times what two steps of AdamW at that rate may change
        assert (one != other).any()


@pytest.mark.parity
def test_what_the_example_leaves_loads_in_transformers(tmp_path):
    import transformers

    done = start(
        tmp_path,
        f"--from={small_model(tmp_path / 'source')}",
        *FROM,
        *SPLITS[0],
        HF_HUB_OFFLINE="1",
    )
    assert done.returncode == 0, done.stderr
    model, report = transformers.GPT2LMHeadModel.from_pretrained(
        tmp_path / "out/gpt2/model", output_loading_info=True, local_files_only=True
    )
    assert not any(report.values()), report
    assert (model.config.eos_token_id, model.generation_config.eos_token_id) == (10, 10)


@pytest.mark.programs
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layers=2"], "has its own sizes; got --layers too. Leave --layers out."),
        (["--model=small"], "has its own sizes; got --model too. Leave --model out."),
        (["--length=25"], "has a context of 24 tokens; got --length 25. Use --length 24"),
        (
            ["--tokenizer=gpt2"],
            "has a vocabulary of 256 tokens, and --tokenizer gpt2 has 50257. Choose another "
            "--tokenizer.",
        ),
    ],
)
@pytest.mark.sweep(4)
def test_a_model_of_other_sizes_is_refused_before_anything_is_written(arguments, message, tmp_path):
    done = start(tmp_path, f"--from={small_model(tmp_path / 'source')}", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert not (tmp_path / "out").exists()
