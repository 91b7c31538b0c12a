"""The command of mutants tells what is caught from what is not (`static/mutants_apply.py`: each
still applies)."""

import shutil
from collections import Counter
from pathlib import Path

import mutants
import pytest
from mutant import Mutant, place
from mutants_by_hand import BY_HAND
from mutants_drawn import drawn

ROOT = Path(__file__).parents[1]


def test_a_text_that_is_gone_or_not_the_only_one_is_told():
    with pytest.raises(ValueError, match=r"nowhere_at_all: the package has no function"):
        place(Mutant("nowhere_at_all", "x", "y", ""), ROOT)
    with pytest.raises(
        ValueError, match=r"pin_bits: needs 'no such text' once .* it is there 0 times \(none\)"
    ):
        place(Mutant("pin_bits", "no such text", "y", ""), ROOT)
    with pytest.raises(ValueError, match=r"all_gather: needs 'block' once"):
        place(Mutant("all_gather", "block", "y", ""), ROOT)


PACKAGE = '''
def scaled(x: "data", n: int = 3) -> int:
    """Leave `n + 1` alone."""
    if n < 1:
        raise ValueError(f"{n + 1}" + "data")
    record(x[:n])
    return min(x, n) + len(x)
'''


def written(root: Path, name: str, text: str) -> Path:
    (root / "parallax").mkdir(parents=True)
    (root / "tests").mkdir()
    (root / "parallax" / name).write_text(text)
    return root


def test_every_operator_is_drawn_and_messages_and_annotations_are_left_alone(tmp_path):
    changes = {
        "x + x": "x - x",
        "x // x": "x * x",
        "x <= x": "x < x",
        "x or x": "x and x",
        "max(x, x)": "min(x, x)",
        ":x": ":x + 1",
        "7": "8",
        "-1": "0",
        '"tensor"': '"stage"',
    }
    text = "".join(
        f"def f{k}(x):\n    return {old if old != ':x' else 'x[:x]'}\n"
        for k, old in enumerate(changes)
    )
    root = written(tmp_path, "a.py", text + "def g(x):\n    x += x\n" + PACKAGE)
    changed = {(mutant.replaces, mutant.by) for mutant in drawn(root, 100, seed=0)}
    assert changed >= {*changes.items(), ("x += x", "pass")}
    only = {
        mutant.key[1:]
        for seed in range(20)
        for mutant in drawn(root, 100, seed)
        if mutant.name == "scaled"
    }
    assert only == {
        ("n < 1", "n <= 1"),
        ("n < 1", "n < 2"),
        ("record(x[:n])", "pass"),
        (":n", ":n + 1"),
        ("min(x, n)", "max(x, n)"),
        ("min(x, n) + len(x)", "min(x, n) - len(x)"),
    }


def test_a_draw_is_the_same_again_and_after_a_move(tmp_path):
    here, there = (
        written(tmp_path / "here", "a.py", PACKAGE),
        written(tmp_path / "there", "b.py", "import os\n" + PACKAGE),
    )
    assert [mutant.key for mutant in drawn(here, 1, 0)] == [
        mutant.key for mutant in drawn(there, 1, 0)
    ]
    shutil.copytree(ROOT / "parallax" / "collectives", tmp_path / "part" / "parallax")
    (tmp_path / "part" / "tests").mkdir()
    first, again, other = (drawn(tmp_path / "part", 24, seed) for seed in (0, 0, 1))
    assert first == again
    assert {mutant.key for mutant in first} != {mutant.key for mutant in other}


def test_a_run_takes_those_of_what_changed_and_a_part_of_the_others():
    """Thirty seeds in a row take every fault; those of changed files come first, and never more
    than `CHANGED`."""
    taken = Counter()
    for seed in range(30):
        chosen = mutants.chosen(BY_HAND, parts=30, seed=seed, changed=set())
        assert len(chosen) <= -(-len(BY_HAND) // 30)
        taken.update(mutant.key for mutant in chosen)
    assert taken == Counter(mutant.key for mutant in BY_HAND)
    path = place(CAUGHT, ROOT).path.as_posix()
    of_file = {mutant.key for mutant in BY_HAND if place(mutant, ROOT).path.as_posix() == path}
    first = mutants.chosen(BY_HAND, parts=30, seed=0, changed={path})[: mutants.CHANGED]
    assert {mutant.key for mutant in first} & of_file
    assert sum(mutant.key in of_file for mutant in first) == min(len(of_file), mutants.CHANGED)


CAUGHT = Mutant(
    "gpipe", "(M - 1 - m)", "m", "test_schedule.py::test_gpipe_goes_back_the_way_it_came"
)


@pytest.mark.programs
def test_the_command_tells_what_is_caught(monkeypatch, capsys):
    monkeypatch.setattr(mutants, "BY_HAND", (CAUGHT,))
    assert mutants.main(["--generate", "0", "--only", "gpipe"]) == 0
    first, total = capsys.readouterr().out.splitlines()
    assert first.startswith("caught ")
    assert f"by tests/{CAUGHT.tests} " in first
    assert total == "1 caught"


ENDINGS = {
    "survived": (0, "1 passed"),
    "caught": (1, "FAILED tests/test_a.py::test_b[c d]"),
    "caught, since it hangs": (None, ""),
    "caught, since a test hangs": (1, "+++++ Timeout +++++"),
    "caught, before the process crashed": (-6, "FAILED tests/test_a.py::test_b\nterminate called"),
    "not a mutant, since no test was told": (-11, ""),
    "not a mutant": (2, "ERROR tests/test_a.py\n!!! Interrupted: 1 error during collection"),
    "not a mutant, once it is imported": (1, "FAILED tests/test_a.py::test_b - ImportError: no"),
}


@pytest.mark.parametrize("how", ENDINGS)
def test_the_command_ends_with_1_unless_all_are_caught(how, monkeypatch, capsys):
    monkeypatch.setattr(mutants, "BY_HAND", (CAUGHT,))
    monkeypatch.setattr(mutants, "run", lambda *_: ENDINGS[how])
    expected = how.split(",")[0]
    assert mutants.main(["--all", "--generate", "0"]) == int(expected != "caught")
    assert capsys.readouterr().out.startswith(f"{expected}  ")


def test_one_that_may_survive_is_no_fault(monkeypatch, capsys):
    monkeypatch.setattr(mutants, "BY_HAND", (CAUGHT,))
    monkeypatch.setattr(mutants, "NO_FAULT", {CAUGHT.key: "The order is free."})
    monkeypatch.setattr(mutants, "run", lambda *_: (0, "1 passed"))
    assert mutants.main(["--all", "--generate", "0"]) == 0
    assert "The order is free." in capsys.readouterr().out
