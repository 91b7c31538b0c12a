"""Command lines with a fault: each is refused in a sentence of ours, nothing is written, and what
the sentence proposes works."""

import dataclasses
import json
import math
import random
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import tyro

from parallax import schedule

EXAMPLES = Path(__file__).parents[1] / "examples"
DRAWS = 300
NUMBERS = [0, -1, -3, 2**40, 10**30, math.nan, math.inf, -math.inf, -0.5, 1e300]


@pytest.fixture(scope="module")
def example():
    """The example's modules, and settings for a text that is quickly read."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        from gpt2_run import fitting, plan, settings
    finally:
        sys.path.remove(str(EXAMPLES))
    return SimpleNamespace(plan=plan, settings=settings, fitting=fitting)


@pytest.fixture
def usual(example, tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text(
        "Four score and seven years ago our fathers brought forth. " * 400
    )
    monkeypatch.chdir(tmp_path)
    schedule.to_csv(schedule.one_f_one_b_lockstep(2, 4), "two_stages.csv")
    return example.settings.Settings(text=tmp_path / "text.txt", steps=6, evaluate_tokens=512)


def test_every_number_has_a_range(example):
    settings = example.settings
    numbers = {
        field.name
        for field in dataclasses.fields(settings.Settings)
        if re.search(r"\b(int|float)\b", str(field.type))
    }
    assert numbers == set(settings.RANGES)
    assert settings.check(settings.Settings()) is None


def typed_in(settings, message, usual):
    """The settings of each command line that a message proposes: the one that was refused, with
    these flags typed after it."""
    tail = message.rpartition("Use ")[2] if "Use " in message else ""
    alternatives = re.findall(r" \(or ([^)]*)\)", tail)
    first = re.sub(r" \(or .*|, the nearest.*|, which .*|, or a longer.*|\.$", "", tail)
    given, _, left_out = first.partition(" and leave out ")
    left_out += "".join(re.findall(r"Leave out ([^.]*)\.", message))
    without = {flag[2:].replace("-", "_"): None for flag in left_out.split()}
    for words in [given, *alternatives] if tail or left_out else []:
        yield dataclasses.replace(usual.read(settings, words.split()), **without)


class Usual:
    """How flags are read: as tyro does, in a thousandth of its time."""

    def __init__(self, settings):
        self.kinds = {
            field.name: str(field.type) for field in dataclasses.fields(settings.Settings)
        }

    def read(self, settings, words):
        found, words = {}, iter(words)
        for word in words:
            name = word.removeprefix("--").replace("-", "_")
            if "bool" in self.kinds.get(positive := name.removeprefix("no_"), ""):
                found[positive] = name == positive
                continue
            kind, value = self.kinds[name], next(words)
            found[name] = (
                float(value)
                if "float" in kind
                else int(value)
                if "int" in kind or value.isdecimal()
                else value
            )
        return dataclasses.replace(settings, **found)


def refused(example, settings, world):
    """The message by which the command line refuses; None if it does not."""
    try:
        example.settings.check(settings)
        example.fitting.fitted(settings, world)
    except ValueError as error:
        return str(error)
    return None


def line_of(settings, usual) -> list[str]:
    """A command line that has these settings."""
    flags = lambda name, value: (
        [f"--{'' if value else 'no-'}{name}"]
        if isinstance(value, bool)
        else [f"--{name}", str(value)]
    )
    differing = {
        name: value for name, value in vars(settings).items() if value != getattr(usual, name)
    }
    return [
        word for name, value in differing.items() for word in flags(name.replace("_", "-"), value)
    ]


LAYOUTS = {
    "model": ["tiny", "tiny", "small", "xl"],
    "devices": [8, 8, 8, 8, 1, 2, 6],
    "data": [None, 1, 2, 3, 4, 8],
    "stage": [None, 1, 2, 4, 5],
    "tensor": [None, 1, 2, 3, 4],
    "context": [1, 1, 2, 3, 8],
    "dropout": [0.0, 0.0, 0.1],
    "microbatches": [1, 2, 3, 4, 8],
    "chunks": [None, 1, 2, 3],
    "batch": [8, 10, 16, 31],
    "layers": [None, 2, 3, 6],
    "heads": [None, 2, 3, 8],
    "width": [None, 32, 130],
    "length": [None, 16, 33],
    "zero": [0, 1, 3],
    "sequence": [False, True],
    "split_sends": [False, True],
    "remat": ["none", "gathers", "block", "stage"],
    "schedule": ["gpipe", "one_f_one_b_lockstep", "interleaved", "pipedream", "two_stages.csv"],
    "fingerprint_every": [0, 0, 10],
}


def drawn_from(generator, values, share):
    return {
        name: generator.choice(choices)
        for name, choices in values.items()
        if generator.random() < share
    }


@pytest.mark.sweep(4)
@pytest.mark.parametrize("part", range(4))
def test_what_is_proposed_for_a_wrong_layout_works(example, usual, part):
    """1,000 in all parts: each proposal, typed after the flags that were refused, passes the same
    check, in every respect."""
    generator, world = (
        random.Random(part),
        example.fitting.World(None, 256, room=lambda: (10**6, 10**5)),
    )
    reader, wrong, typed, silent = Usual(example.settings), 0, 0, 0
    while wrong < 250:
        settings = dataclasses.replace(usual, **drawn_from(generator, LAYOUTS, 0.35))
        message = refused(example, settings, world)
        if message is None:
            continue
        wrong += 1
        assert not re.search(r"\bmesh\.|jax\.|Layout\(|\b(?!XLA)\w+=\w", message), (
            message
        )  # no Python
        proposed = list(typed_in(settings, message, reader))
        silent += not proposed
        for each in proposed:
            typed += 1
            assert (again := refused(example, each, world)) is None, (
                f"{line_of(settings, usual)}\n{message}\n{again}"
            )
    print(f"{wrong} wrong layouts, {typed} proposals, {silent} without")
    assert silent < 15  # of a schedule in a file, that fits nothing near


def test_what_is_proposed_for_a_wrong_flag_works(example, usual, pytestconfig, tmp_path):
    """300 of them, some with a layout beside them that does not fit."""
    settings, generator = example.settings, random.Random(pytestconfig.option.seed)
    reader, world = Usual(settings), example.fitting.World(None, 256, room=lambda: (10**6, 10**5))
    wrong = typed = silent = 0
    while wrong < DRAWS:
        name, value = (
            generator.choice([*sorted(settings.RANGES), "profile"]),
            generator.choice([*NUMBERS, "7", "9:3"]),
        )
        least, most = settings.RANGES.get(name, (math.inf, 0))
        if (name == "profile") != isinstance(value, str) or (
            name != "profile" and least <= value <= most
        ):
            continue
        given = dataclasses.replace(
            usual, **drawn_from(generator, LAYOUTS, generator.choice([0, 0.2])) | {name: value}
        )
        message = refused(example, given, world)
        wrong += 1
        assert re.match(rf"--{name.replace('_', '-')} must be ", message)
        proposed = list(typed_in(given, message, reader))
        silent += not proposed
        for each in proposed:
            typed += 1
            assert (again := refused(example, each, world)) is None, (
                f"{line_of(given, usual)}\n{message}\n{again}"
            )
    print(f"{wrong} wrong flags, {typed} proposals, {silent} without")
    assert silent < 10  # of a schedule in a file, that fits nothing near
    assert {path.name for path in tmp_path.iterdir()} == {"text.txt", "two_stages.csv"}


def test_what_is_proposed_is_read_as_it_is_typed(example, usual, pytestconfig):
    """Some of them, through the reader of the command line, and up to the first step."""
    from parallax.run.job import Job

    generator, reader, seen = random.Random(pytestconfig.option.seed), Usual(example.settings), 0
    while seen < 8:
        settings = dataclasses.replace(
            usual, **drawn_from(generator, LAYOUTS | {"devices": [8], "model": ["tiny"]}, 0.3)
        )
        try:
            example.plan.prepare(settings, Job())
            continue
        except (ValueError, OSError) as error:
            message = str(error)
        for each in typed_in(settings, message, reader):
            if each.devices == 8:
                seen += 1
                read = tyro.cli(
                    example.settings.Settings, args=[*line_of(each, example.settings.Settings())]
                )
                example.plan.prepare(read, Job())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--tensor 3",
            "Layout: the model's heads (--heads 4) must be a multiple of --tensor 3. Use --data 4 "
            "--stage 1 --tensor 2, which "
            "divides it.",
        ),
        (
            "--data 3",
            "Layout: the batch's sequences (--batch 16) must be a multiple of --data 3 x "
            "--microbatches 4. Use --data 8 --stage 1 "
            "--tensor 1 --batch 32.",
        ),
        (
            "--data 2",
            "Layout: --data 2 x --stage 1 x --tensor 1 multiply to 2, and there are 8 "
            "devices. Use --data 8 --stage 1 "
            "--tensor 1 --batch 32 (or --devices 2).",
        ),
        (
            "--width 130",
            "--width 130 must be a multiple of --heads 4. Use --heads 2 (or --width 132).",
        ),
        (
            "--schedule pipedram",
            "--schedule must be one_f_one_b_lockstep, gpipe, zero_bubble_lockstep, "
            "one_f_one_b, zero_bubble, interleaved or a "
            "file that ends in .csv; got pipedram. Use --schedule gpipe.",
        ),
        (
            "--zero 1 --data 1 --devices 1",
            "Layout: --zero 1 splits state over replicas; got --data 1. Use --zero 0.",
        ),
        ("--batch 0 --data 8", "--batch must be 1 or more; got 0. Use --batch 32."),
        (
            "--heads 0 --steps 0",
            "--heads must be 1 or more; got 0. Use --steps 300 and leave out --heads.",
        ),
        (
            "--learning-rate nan",
            "--learning-rate must be from 1e-30 to 1e+30; got nan. Use --learning-rate 0.003.",
        ),
        (
            "--profile 7",
            "--profile must be FIRST:LAST, two steps such as 10:12; got 7. Use --profile 10:12.",
        ),
        (
            "--from . --layers 3",
            "--from . has its own sizes; got --layers too. Leave --layers out.",
        ),
        (
            "--fingerprint-every 5 --devices 1",
            "--fingerprint-every 5 compares devices with each other, and there is one. "
            "Use --fingerprint-every 0 (or --devices 8).",
        ),
        (
            "--length 1000",
            "text.txt has 21,240 tokens to train on and 2,360 held out; needed 1,001 and "
            "16,001, for --batch 16 --length 1000. "
            "Use --length 125, or a longer text.",
        ),
    ],
)
def test_it_is_said_in_flags(example, usual, flags, message):
    settings = tyro.cli(example.settings.Settings, args=["--text", "text.txt", *flags.split()])
    assert (
        refused(example, settings, example.fitting.World(None, 256, room=lambda: (21240, 2360)))
        == message
    )


def test_what_is_sent_is_said_by_axis(example):
    said = example.plan.report.sending
    assert said("ring", {}) == [("collectives", "none: the compiled program sends nothing")]
    assert said("ring", {"data": 1024, "stage x tensor": 10}) == [
        ("collectives", "ring: a device sends 1.03 kB a step (in the compiled program),"),
        ("", "1.02 kB over data, 10 B over stage x tensor"),
    ]


@pytest.mark.parametrize(
    ("make", "tensor", "asked", "said"),
    [
        (schedule.one_f_one_b_lockstep, 2, "ring", "ring"),
        (schedule.one_f_one_b, 1, "ring", "ring"),
        (schedule.one_f_one_b, 2, "ring", "ring (psum over tensor)"),
        (schedule.one_f_one_b, 2, "psum", "psum"),
    ],
)
def test_it_is_said_who_moves_data(example, make, tensor, asked, said):
    """Stages with a job of their own use no ring."""
    settings, layout = SimpleNamespace(all_reduce=asked), SimpleNamespace(tensor=tensor)
    assert (
        example.plan.said(SimpleNamespace(settings=settings, layout=layout, schedule=make(2, 4)))
        == said
    )


def of_a_run(folder, step, checkpoints):
    """A folder of results as a run leaves it: its numbers up to `step`, and these checkpoints."""
    folder.mkdir()
    (folder / "settings.json").write_text("")  # a power cut after the file was made
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": i}) + "\n" for i in range(1, step + 1))
    )
    for number in checkpoints:
        (folder / "checkpoints" / f"{number:08d}").mkdir(parents=True)
        (folder / "checkpoints" / f"{number:08d}" / "manifest.json").write_text("{}")
    return folder


def test_what_lies_in_the_folder_of_results_is_told_apart(example, usual, tmp_path):
    from parallax.run.job import Job

    go = lambda out: example.plan.prepare(dataclasses.replace(usual, out=out), Job())
    killed = tmp_path / "killed"  # as it began: before its settings, and in the middle of them
    (killed / "checkpoints").mkdir(parents=True)
    for name in (".lock", ".settings.json.partial"):
        (killed / name).touch()
        go(killed)
    # Settings that are damaged, beside a checkpoint, which says whose it is.
    plan = go(of_a_run(tmp_path / "with", 200, [200]))
    # Checkpoints that were there.
    lost = of_a_run(tmp_path / "without", 200, [])
    example.plan.claim_folder(
        dataclasses.replace(plan, settings=dataclasses.replace(plan.settings, out=lost))
    )
    with pytest.raises(
        ValueError,
        match=r"metrics\.jsonl has records up to step 200, but .*checkpoints holds no checkpoint: "
        r"the run's checkpoints are lost",
    ):
        go(lost)
    # A run that was killed before its first checkpoint.
    (lost / "metrics.jsonl").write_text('{"step": 100}\n{"st')
    go(lost)


def test_a_damaged_settings_file_is_refused(example, usual, tmp_path):
    from parallax.run.job import Job

    plan = example.plan
    (tmp_path / "run").mkdir()
    for text in ("", "null", "[]", "{}", '{"numbers": 3}', "{", "[" * 200_000):
        (tmp_path / "run" / "settings.json").write_text(text)
        with pytest.raises(
            ValueError, match=r"settings\.json: needed the settings of a run, found a damaged file"
        ):
            plan.prepare(dataclasses.replace(usual, out=tmp_path / "run"), Job())
