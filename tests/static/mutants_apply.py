"""The faults of `mutants.py` still apply: each stands in one place, compiles, and names tests that
are there."""

import ast
import re
import shlex
from collections import Counter
from collections.abc import Iterator

import collected
import mutants
from doc_pages import ROOT
from mutant import Mutant, mutated, place
from mutants_by_hand import BY_HAND, NO_FAULT
from mutants_drawn import drawn


def check_a_fault_stands_in_one_place_and_compiles() -> Iterator[str]:
    """And changes the program; each of its tests is there, or its whole file would run."""
    for mutant in BY_HAND:
        try:
            found, content = mutated(mutant, ROOT)
        except ValueError as error:
            yield str(error)
            continue
        before = ast.dump(ast.parse((ROOT / found.path).read_bytes()))
        if ast.dump(ast.parse(content)) == before:
            yield f"{mutant.name}: {mutant.by!r} is the same program as {mutant.replaces!r}"
        named = [word for word in shlex.split(mutant.tests) if word.startswith("test_")]
        if not named or not {f"tests/{word}" for word in named} <= set(mutants.selected(mutant)):
            yield f"{mutant.name}: not all of its tests are there: {mutant.tests}"


def check_the_tests_of_each_fault_are_collected() -> Iterator[str]:
    """With the marks that the fault names."""
    for mutant in BY_HAND:
        *words, chosen = mutants.selected(mutant)
        places = tuple(word for word in [*words, chosen] if word.startswith("tests/"))
        # An expression of -k, as Python: each word asks whether the test's name has it.
        asked = (
            re.sub(r"\b(?!(?:and|or|not)\b)[\w-]+", r"('\g<0>'.lower() in test)", chosen)
            if "-k" in words
            else "True"
        )
        if not any(
            test.nodeid.startswith(places)
            and (mutant.long, mutant.bits) == ("long" in test.marks, "bits" in test.marks)
            and eval(asked, {"test": test.nodeid.lower()})
            for test in collected.tests()
        ):
            yield f"{mutant.name}: no test is chosen by {mutant.tests!r}"


def check_there_are_enough_over_the_whole_package_and_none_twice() -> Iterator[str]:
    """And some that only bits show."""
    some = drawn(ROOT, 24, seed=0)
    twice = [
        key
        for key, count in Counter(mutant.key for mutant in (*BY_HAND, *some)).items()
        if count > 1
    ]
    folders = {place(mutant, ROOT).path.parts[1] for mutant in BY_HAND}
    if len(some) != 24 or len(BY_HAND) + len(some) < 60 or len(folders) < 20:
        yield (
            f"{len(BY_HAND)} faults by hand in {len(folders)} places and {len(some)} drawn ones "
            "are too few"
        )
    if twice:
        yield f"faults that stand twice: {twice}"
    if sum(mutant.bits for mutant in BY_HAND) < 4:
        yield "fewer than 4 faults are about bits"


def check_what_is_no_fault_is_a_mutant() -> Iterator[str]:
    """With a reason, in a sentence."""
    for key, reason in NO_FAULT.items():
        try:
            place(Mutant(*key, tests=""), ROOT)
        except ValueError as error:
            yield str(error)
        if not reason.endswith("."):
            yield f"{key[0]}: {reason!r} is no sentence"


def check_drawn_faults_compile_and_have_tests() -> Iterator[str]:
    """As those by hand do."""
    for mutant in drawn(ROOT, 48, seed=3):
        ast.parse(mutated(mutant, ROOT)[1])
        if not mutant.tests:
            yield f"the drawn fault {mutant.name} has no test"
