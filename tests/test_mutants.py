"""The faults of `mutants.py`: each still applies, and the command tells what is caught from what is not."""

import ast
import re
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path

import mutants
import pytest
from mutant import Mutant, mutated, place
from mutants_by_hand import BY_HAND, NO_FAULT
from mutants_drawn import drawn

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("mutant", BY_HAND, ids=lambda mutant: mutant.name)
def test_a_fault_stands_in_one_place_and_compiles(mutant):
    found, content = mutated(mutant, ROOT)
    assert ast.dump(ast.parse(content)) != ast.dump(ast.parse((ROOT / found.path).read_bytes()))
    named = [word for word in shlex.split(mutant.tests) if word.startswith("test_")]
    assert named
    # A test that is not there would be replaced by its whole file.
    assert {f"tests/{word}" for word in named} <= {*mutants.selected(mutant, ROOT)}


COLLECTION = """
import pytest, sys
class Printed:
    def pytest_collection_finish(self, session):
        for item in session.items:
            print("\\t".join([item.nodeid, *{mark.name for mark in item.iter_markers()} & {"slow", "bits"}]))
options = "-q --collect-only -n 0 -p no:cacheprovider --sweep-all --users-flags".split()
sys.exit(pytest.main([*options, "-m", "slow or not slow"], plugins=[Printed()]))
"""


@pytest.mark.slow
def test_the_tests_of_each_fault_are_there():
    done = subprocess.run([sys.executable, "-c", COLLECTION], check=True, capture_output=True, text=True, cwd=ROOT)
    tests = [line.split("\t") for line in done.stdout.splitlines() if line.startswith("tests/")]
    for mutant in BY_HAND:
        *words, chosen = mutants.selected(mutant, ROOT)
        where = [word for word in [*words, chosen] if word.startswith("tests/")]
        chosen = re.sub(r"\b(?!(?:and|or|not)\b)[\w-]+", r"('\g<0>'.lower() in test)", chosen) if "-k" in words else "True"
        assert [
            test
            for test, *marks in tests
            if test.startswith(tuple(where)) and (mutant.long, mutant.bits) == ("slow" in marks, "bits" in marks)
            if eval(chosen, {"test": test.lower()})
        ], f"no test is chosen by {mutant.tests!r} of {mutant.name}"


def test_there_are_enough_over_the_whole_package_and_none_twice():
    some = drawn(ROOT, 24, seed=0)
    assert len(some) == 24
    assert len(BY_HAND) + len(some) >= 60
    assert max(Counter(mutant.key for mutant in (*BY_HAND, *some)).values()) == 1
    folders = {place(mutant, ROOT).path.parts[1] for mutant in BY_HAND}
    assert len(folders) >= 20
    assert sum(mutant.bits for mutant in BY_HAND) >= 4


def test_what_is_no_fault_is_a_mutant():
    for key, reason in NO_FAULT.items():
        place(Mutant(*key, tests=""), ROOT)
        assert reason.endswith(".")


def test_a_text_that_is_gone_or_not_the_only_one_is_told():
    with pytest.raises(ValueError, match=r"nowhere_at_all: the package has no function"):
        place(Mutant("nowhere_at_all", "x", "y", ""), ROOT)
    with pytest.raises(ValueError, match=r"computed_once: needs 'no such text' once .* it is there 0 times \(none\)"):
        place(Mutant("computed_once", "no such text", "y", ""), ROOT)
    with pytest.raises(ValueError, match=r"all_reduce: needs 'return' once"):
        place(Mutant("all_reduce", "return", "y", ""), ROOT)


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
    text = "".join(f"def f{k}(x):\n    return {old if old != ':x' else 'x[:x]'}\n" for k, old in enumerate(changes))
    root = written(tmp_path, "a.py", text + "def g(x):\n    x += x\n" + PACKAGE)
    changed = {(mutant.replaces, mutant.by) for mutant in drawn(root, 100, seed=0)}
    assert changed >= {*changes.items(), ("x += x", "pass")}
    only = {mutant.key[1:] for seed in range(20) for mutant in drawn(root, 100, seed) if mutant.name == "scaled"}
    assert only == {
        ("n < 1", "n <= 1"),
        ("n < 1", "n < 2"),
        ("record(x[:n])", "pass"),
        (":n", ":n + 1"),
        ("min(x, n)", "max(x, n)"),
        ("min(x, n) + len(x)", "min(x, n) - len(x)"),
    }


def test_a_draw_is_the_same_again_and_after_a_move(tmp_path):
    here, there = written(tmp_path / "here", "a.py", PACKAGE), written(tmp_path / "there", "b.py", "import os\n" + PACKAGE)
    assert [mutant.key for mutant in drawn(here, 1, 0)] == [mutant.key for mutant in drawn(there, 1, 0)]
    assert drawn(ROOT, 24, 0) == drawn(ROOT, 24, 0)
    assert {mutant.key for mutant in drawn(ROOT, 24, 0)} != {mutant.key for mutant in drawn(ROOT, 24, 1)}


def test_drawn_faults_compile_and_have_tests():
    for mutant in drawn(ROOT, 48, seed=3):
        ast.parse(mutated(mutant, ROOT)[1])
        assert mutant.tests


def test_ten_parts_are_all():
    assert Counter(mutant.key for k in range(10) for mutant in mutants.part(BY_HAND, 10, k)) == Counter(
        mutant.key for mutant in BY_HAND
    )


CAUGHT = Mutant("gpipe", "(M - 1 - m)", "m", "test_schedule.py::test_gpipe_goes_back_the_way_it_came")


def test_a_part_of_none_is_refused(capsys):
    with pytest.raises(SystemExit):
        mutants.main(["--part", "0"])
    assert "--part needs a number from 1 on: one Nth of the mutants; got 0." in capsys.readouterr().err


def test_the_command_tells_what_is_caught(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(mutants, "BY_HAND", (CAUGHT,))
    assert mutants.main(["--generate", "0", "--only", "gpipe", "--cache", str(tmp_path)]) == 0
    first, total = capsys.readouterr().out.splitlines()
    assert first.startswith("caught ")
    assert f"by tests/{CAUGHT.tests} " in first
    assert total == "1 caught"


ENDINGS = {
    "survived": (0, "1 passed"),
    "caught": (1, "FAILED tests/test_a.py::test_b[c d]"),
    "caught, since it hangs": (None, ""),
    "caught, since a test hangs": (1, "+++++ Timeout +++++"),
    "not a mutant": (2, "ERROR tests/test_a.py\n!!! Interrupted: 1 error during collection"),
    "not a mutant, once it is imported": (1, "FAILED tests/test_a.py::test_b - ImportError: no"),
}


@pytest.mark.parametrize("how", ENDINGS)
def test_the_command_ends_with_1_unless_all_are_caught(how, monkeypatch, capsys):
    monkeypatch.setattr(mutants, "BY_HAND", (CAUGHT,))
    monkeypatch.setattr(mutants, "run", lambda *_: ENDINGS[how])
    expected = how.split(",")[0]
    assert mutants.main(["--generate", "0"]) == int(expected != "caught")
    assert capsys.readouterr().out.startswith(f"{expected}  ")


def test_one_that_may_survive_is_no_fault(monkeypatch, capsys):
    monkeypatch.setattr(mutants, "BY_HAND", (CAUGHT,))
    monkeypatch.setattr(mutants, "NO_FAULT", {CAUGHT.key: "The order is free."})
    monkeypatch.setattr(mutants, "run", lambda *_: (0, "1 passed"))
    assert mutants.main(["--generate", "0"]) == 0
    assert "The order is free." in capsys.readouterr().out
