"""What the tests catch: small faults, each put into a copy of the repository, where the tests that cover it should fail.

    python tests/mutants.py                     all that were chosen by hand, and 24 that are drawn
    python tests/mutants.py --part 10 --seed 3  a tenth of them, another tenth for each seed from 0 to 9
    python tests/mutants.py --only computed_once

Prints for each whether it was caught, by which test and in how many seconds. Ends with code 1 where one survives that is not in
`NO_FAULT`, or is not a mutant at all: the package cannot be imported with it.
"""

import argparse
import contextlib
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from mutant import Mutant, mutated
from mutants_by_hand import BY_HAND, NO_FAULT
from mutants_drawn import drawn

ROOT = Path(__file__).parents[1]
COPIED = ("parallax", "tests", "examples", "benchmarks", "docs", "pyproject.toml", "README.md", "CHANGELOG.md", "zensical.toml")
NO_MUTANT = re.compile(r"(Import|ModuleNotFound|Syntax|Indentation)Error")
HANGS = "+ Timeout +"  # as pytest-timeout prints it
GOOD = ("caught", "no fault")


class Verdict(NamedTuple):
    """What became of a mutant.

    Attributes:
        name: of the mutant, with its module.
        word: `caught`, `survived`, `no fault` (it survived, as `NO_FAULT` says it must), or `not a mutant`.
        by: the test that caught it, or else why not.
        seconds: how long its tests ran.
    """

    name: str
    word: str
    by: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.word:<12}  {self.name:<58}  {self.by}  {self.seconds:.0f} s"


def verdict(mutant: Mutant, *, limit: float, cache: Path, tests_from: Path = ROOT) -> Verdict:
    """Run the mutant's tests, of the checkout `tests_from`, on a copy of the repository with the fault in it."""
    place, content = mutated(mutant, ROOT)
    name = f"{place.module}.{mutant.name}"
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy(Path(folder), tests_from)
        Path(folder, place.path).write_bytes(content)
        begin = time.monotonic()
        code, printed = run(Path(folder), [*options(mutant, tests_from), *selected(mutant, tests_from)], limit, cache)
        seconds = time.monotonic() - begin
    if code is None or HANGS in printed:
        return Verdict(name, "caught", f"by the limit of {limit:.0f} s: a test takes longer, or hangs", seconds)
    first = re.search(r"^(?:FAILED|ERROR) (tests/.+?)(?: - (.*))?$", printed, re.MULTILINE)
    if code == 0:
        known = NO_FAULT.get(mutant.key)
        return Verdict(name, "no fault" if known else "survived", known or mutant.tests, seconds)
    if code != 1 or first is None or NO_MUTANT.match(first[2] or ""):
        return Verdict(name, "not a mutant", f"pytest ends with code {code}:\n{printed[-2000:]}", seconds)
    return Verdict(name, "caught", f"by {first[1]}", seconds)


def copy(folder: Path, tests_from: Path) -> None:
    """The repository without its history in `folder`, with the tests of another checkout."""
    for name in COPIED:
        source = (tests_from if name == "tests" else ROOT) / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, folder / name)


def options(mutant: Mutant, tests_from: Path) -> list[str]:
    """How pytest is to select: the default tests, the long ones, or those of last bits, all cases. Older tests know less."""
    known = (tests_from / "tests" / "conftest.py").read_text(encoding="utf-8")
    bits = mutant.bits and "--users-flags" in known
    marks = [mark for mark, asked in (("slow", mutant.long), ("bits", bits)) if asked]
    flags = ["--users-flags"] * bits + ["--sweep-all"] * ("--sweep-all" in known)
    return flags + (["-m", " and ".join(marks)] if marks else [])


def selected(mutant: Mutant, tests_from: Path) -> list[str]:
    """The mutant's tests as arguments of pytest: of a test that `tests_from` does not have, its whole file."""
    found = []
    for word in shlex.split(mutant.tests):
        file, _, test = word.partition("::")
        if file.endswith(".py"):
            there = f"def {test.partition('[')[0]}(" in (tests_from / "tests" / file).read_text(encoding="utf-8")
            found.append(f"tests/{word if there else file}")
        else:
            found.append(word)
    return found


def run(folder: Path, arguments: Sequence[str], limit: float, cache: Path) -> tuple[int | None, str]:
    """pytest's exit code, and what it printed. A test may take `limit` seconds; the code is None where all take 50 times that."""
    environment = {
        "JAX_COMPILATION_CACHE_DIR": str(cache),  # most programs of a mutant are those of the repository
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "PYTHONPATH": str(folder),  # for the programs that tests start
    }
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--tb=short"]
    command += ["--timeout", f"{limit}", "--timeout-method", "thread", *arguments]
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        printed, _ = process.communicate(timeout=50 * limit)
    except subprocess.TimeoutExpired:
        return None, ""
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and what its tests started
        process.wait()
    return process.returncode, printed


def part(mutants: Sequence[Mutant], parts: int, number: int) -> list[Mutant]:
    """The mutants of one of `parts` parts of a fixed shuffle: numbers in a row walk through all."""
    shuffled = list(mutants)
    random.Random(0).shuffle(shuffled)
    return shuffled[number % parts :: parts]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a verdict for each mutant asked for; 1 if one is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generate", type=int, default=24, metavar="N", help="how many to draw (default 24)")
    parser.add_argument("--seed", type=int, default=0, help="which part is taken; without --part, what is drawn")
    parser.add_argument("--part", type=int, metavar="N", help="an N-th of the mutants, that of number --seed")
    parser.add_argument("--only", metavar="NAME", help="mutants of functions whose name ends so")
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time")
    parser.add_argument("--limit", type=float, default=300, help="seconds for a test; longer is a failure")
    parser.add_argument("--cache", metavar="FOLDER", help="of compiled programs, for the next command; by default a new one")
    parser.add_argument("--tests-from", type=Path, default=ROOT, metavar="FOLDER", help="the checkout whose tests run")
    asked = parser.parse_args(arguments)
    if asked.part is not None and asked.part < 1:
        parser.error(f"--part needs a number from 1 on: one Nth of the mutants; got {asked.part}. Leave it out for all.")
    mutants = [*BY_HAND, *drawn(ROOT, asked.generate, 0 if asked.part else asked.seed)]
    if asked.part:
        mutants = part(mutants, asked.part, asked.seed)
    if asked.only:
        mutants = [mutant for mutant in mutants if f".{mutant.name}".endswith(f".{asked.only}")]
    if not mutants:
        parser.error("no mutant is selected")
    found = []
    with tempfile.TemporaryDirectory(prefix="mutants-cache-") as new, ThreadPoolExecutor(asked.jobs) as pool:
        cache = Path(asked.cache or new).absolute()
        put = lambda mutant: verdict(mutant, limit=asked.limit, cache=cache, tests_from=asked.tests_from.absolute())
        for each in pool.map(put, mutants):
            print(each, flush=True)
            found.append(each)
    words = [each.word for each in found]
    print(", ".join(f"{words.count(word)} {word}" for word in dict.fromkeys(words)))
    return int(any(word not in GOOD for word in words))


if __name__ == "__main__":
    sys.exit(main())
