"""Command lines with a fault: each is refused in a sentence of ours, nothing is written, and what the sentence proposes works."""

import dataclasses
import json
import math
import random
import re
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
DRAWS = 300
NUMBERS = [0, -1, -3, 2**40, 10**30, math.nan, math.inf, -math.inf, -0.5, 1e300]


@pytest.fixture(scope="module")
def example():
    """The example's modules, and settings for a text that is quickly read."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        from gpt2_run import plan, settings
    finally:
        sys.path.remove(str(EXAMPLES))
    return plan, settings


@pytest.fixture
def usual(example, tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text("Four score and seven years ago our fathers brought forth. " * 400)
    monkeypatch.chdir(tmp_path)
    return example[1].Settings(text=tmp_path / "text.txt", steps=6, evaluate_tokens=512)


def test_every_number_has_a_range(example):
    settings = example[1]
    numbers = {field.name for field in dataclasses.fields(settings.Settings) if re.search(r"\b(int|float)\b", str(field.type))}
    assert numbers == set(settings.RANGES)
    assert settings.check(settings.Settings()) is None


def test_numbers_out_of_range_are_refused_and_the_bound_is_taken(example, usual, tmp_path, pytestconfig):
    settings, generator = example[1], random.Random(pytestconfig.option.sweep_seed)
    drawn = 0
    while drawn < DRAWS:
        name, value = generator.choice(sorted(settings.RANGES)), generator.choice(NUMBERS)
        least, most = settings.RANGES[name]
        if least <= value <= most:
            continue
        drawn += 1
        flag = name.replace("_", "-")
        with pytest.raises(ValueError, match=rf"^--{flag} must be ") as caught:
            settings.check(dataclasses.replace(usual, **{name: value}))
        bound = re.match(rf"--{flag} must be (?:a number from )?(\S+) (?:or more|or less|to \S+); got ", str(caught.value))
        default = re.search(r"The default is (\S+)\.$", str(caught.value))
        assert bound or default, caught.value
        for proposal in (bound, default):
            if proposal is not None:
                settings.check(dataclasses.replace(usual, **{name: type(least)(proposal[1])}))
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


LAYOUTS = {
    "data": [None, 1, 2, 3, 4, 8],
    "stage": [None, 1, 2, 4, 5],
    "tensor": [None, 1, 2, 3, 4],
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
    "schedule": ["gpipe", "one_f_one_b", "interleaved", "pipedream"],
}

WORDS = {"True": True, "False": False, "None": None}


def test_layouts_that_cannot_be_are_refused_and_the_proposals_work(example, usual, tmp_path, pytestconfig):
    """A proposal may meet the next fault, of another flag; it must not be refused for what it proposed."""
    from parallax.run.launch import Job

    (plan, _), generator = example, random.Random(pytestconfig.option.sweep_seed)
    refused = followed = 0
    for _ in range(150):
        drawn = {name: generator.choice(values) for name, values in LAYOUTS.items() if generator.random() < 0.4}
        settings = dataclasses.replace(usual, **drawn)
        for _ in range(12):
            try:
                plan.prepare(settings, Job("hand"))
                break
            except ValueError as error:
                message = str(error)
            refused += 1
            assert message[-1] in ".)", message
            # "Take microbatches=1,chunks=1 or stage=2, the nearest that works." is two proposals, of which the first is taken.
            first = message.rpartition("Take ")[2].partition(" or ")[0] if "Take " in message else ""
            proposal = {name: value for name, value in re.findall(r"\b(\w+)=(\w+)", first) if name in LAYOUTS}
            if not proposal:
                break
            followed += 1
            words = {name: WORDS.get(value, int(value) if value.isdecimal() else value) for name, value in proposal.items()}
            settings = dataclasses.replace(settings, **words)
        else:
            raise AssertionError(f"the proposals lead nowhere: {drawn}: {message}")
    print(f"{refused} refusals, {followed} proposals followed")
    assert refused > 30
    assert followed > 10
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


def of_a_run(folder, step, checkpoints):
    """A folder of results as a run leaves it: its numbers up to `step`, and these checkpoints."""
    folder.mkdir()
    (folder / "settings.json").write_text("")  # a power cut after the file was made
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"step": i}) + "\n" for i in range(1, step + 1)))
    for number in checkpoints:
        (folder / "checkpoints" / f"{number:08d}").mkdir(parents=True)
        (folder / "checkpoints" / f"{number:08d}" / "manifest.json").write_text("{}")
    return folder


def test_what_lies_in_the_folder_of_results_is_told_apart(example, usual, tmp_path):
    from parallax.run.launch import Job

    go = lambda out: example[0].prepare(dataclasses.replace(usual, out=out), Job("hand"))
    killed = tmp_path / "killed"  # as it began: before its settings, and in the middle of them
    (killed / "checkpoints").mkdir(parents=True)
    for name in (".lock", ".settings.json.partial"):
        (killed / name).touch()
        go(killed)
    # Settings that are damaged, beside a checkpoint, which says whose it is.
    plan = go(of_a_run(tmp_path / "with", 200, [200]))
    # Checkpoints that were there.
    lost = of_a_run(tmp_path / "without", 200, [])
    example[0].claim_folder(dataclasses.replace(plan, settings=dataclasses.replace(plan.settings, out=lost)))
    with pytest.raises(
        ValueError, match=r"metrics\.jsonl speaks of step 200, and .*checkpoints holds no checkpoint: they are lost"
    ):
        go(lost)
    # A run that was killed before its first checkpoint.
    (lost / "metrics.jsonl").write_text('{"step": 100}\n{"st')
    go(lost)


def test_a_damaged_settings_file_is_refused(example, usual, tmp_path):
    from parallax.run.launch import Job

    plan = example[0]
    (tmp_path / "run").mkdir()
    for text in ("", "null", "[]", "{}", '{"numbers": 3}', "{", "[" * 200_000):
        (tmp_path / "run" / "settings.json").write_text(text)
        with pytest.raises(ValueError, match=r"settings\.json: needed the settings of a run, found something else"):
            plan.prepare(dataclasses.replace(usual, out=tmp_path / "run"), Job("hand"))
