"""What the tests catch: small faults, each put into a copy of the repository, where the tests that
cover it should fail.

    python tests/mutants.py --seed 3    a thirtieth of those chosen by hand and of 24 that are drawn
    python tests/mutants.py --changed HEAD~10
        and first up to 20 of the files that changed since that commit
    python tests/mutants.py --all               all of them
    python tests/mutants.py --only pin_bits

Prints for each whether it was caught, by which test and in how many seconds. Ends with code 1 where
one survives that is not in `NO_FAULT`, or is not a mutant at all: the package cannot be imported
with it.
"""

import argparse
import contextlib
import functools
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

from mutant import Mutant, mutated, place
from mutants_by_hand import BY_HAND, NO_FAULT
from mutants_drawn import drawn

ROOT = Path(__file__).parents[1]
COPIED = (
    "parallax",
    "tests",
    "examples",
    "benchmarks",
    "docs",
    "pyproject.toml",
    "README.md",
    "CHANGELOG.md",
    "zensical.toml",
)
NO_MUTANT = re.compile(r"(Import|ModuleNotFound|Syntax|Indentation)Error")
HANGS = "+ Timeout +"  # as pytest-timeout prints it
GOOD = ("caught", "no fault")
PARTS = 30  # as many values of --seed in a row take every mutant
CHANGED = 20  # at most, of the files that changed


class Verdict(NamedTuple):
    """What became of a mutant.

    Attributes:
        name: of the mutant, with its module.
        word: `caught`, `survived`, `no fault` (it survived, as `NO_FAULT` says it must), or
            `not a mutant`.
        by: the test that caught it, or else why not.
        seconds: how long its tests ran.
    """

    name: str
    word: str
    by: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.word:<12}  {self.name:<58}  {self.by}  {self.seconds:.0f} s"


def verdict(mutant: Mutant, *, limit: float) -> Verdict:
    """Run the mutant's tests on a copy of the repository with the fault in it."""
    found, content = mutated(mutant, ROOT)
    name = f"{found.module}.{mutant.name}"
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy(Path(folder))
        Path(folder, found.path).write_bytes(content)
        begin = time.monotonic()
        code, printed = run(Path(folder), [*options(mutant), *selected(mutant)], limit)
        seconds = time.monotonic() - begin
    if code is None or HANGS in printed:
        return Verdict(
            name, "caught", f"by the limit of {limit:.0f} s: a test takes longer, or hangs", seconds
        )
    first = re.search(r"^(?:FAILED|ERROR) (tests/.+?)(?: - (.*))?$", printed, re.MULTILINE)
    if code == 0:
        known = NO_FAULT.get(mutant.key)
        return Verdict(name, "no fault" if known else "survived", known or mutant.tests, seconds)
    # After a failed test, a thread that still writes may end the process by a signal (code < 0).
    if code > 1 or first is None or NO_MUTANT.match(first[2] or ""):
        return Verdict(
            name, "not a mutant", f"pytest ends with code {code}:\n{printed[-2000:]}", seconds
        )
    return Verdict(name, "caught", f"by {first[1]}", seconds)


def copy(folder: Path) -> None:
    """The repository without its history, in `folder`."""
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__")
            )
        else:
            shutil.copy2(ROOT / name, folder / name)


def options(mutant: Mutant) -> list[str]:
    """How pytest is to select: every case, of the long tests or of the others, and those of bits as
    users compile."""
    marks = "long" if mutant.long else "not long"
    if mutant.bits:
        return ["--all", "--users-flags", "-m", f"bits and {marks}"]
    return ["--all", "-m", f"{marks} and not parity and not targets"]


def selected(mutant: Mutant) -> list[str]:
    """The mutant's tests as arguments of pytest: of a test that is not there, its whole file."""
    found = []
    for word in shlex.split(mutant.tests):
        file, _, test = word.partition("::")
        if file.endswith(".py"):
            there = f"def {test.partition('[')[0]}(" in (ROOT / "tests" / file).read_text(
                encoding="utf-8"
            )
            found.append(f"tests/{word if there else file}")
        else:
            found.append(word)
    return found


def run(folder: Path, arguments: Sequence[str], limit: float) -> tuple[int | None, str]:
    """pytest's exit code, and what it printed. A test may take `limit` seconds; the code is None
    where all take 50 times that."""
    environment = {"PYTHONPATH": str(folder)}  # for the programs that tests start
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-n",
        "0",
        "-p",
        "no:cacheprovider",
        "--tb=short",
    ]
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


def chosen(mutants: Sequence[Mutant], *, parts: int, seed: int, changed: set[str]) -> list[Mutant]:
    """Up to `CHANGED` mutants of the files `changed`, drawn by the seed, then one of `parts` parts
    of a fixed shuffle."""
    shuffled = list(mutants)
    random.Random(0).shuffle(shuffled)
    part = shuffled[seed % parts :: parts]
    of_changed = [mutant for mutant in shuffled if place(mutant, ROOT).path.as_posix() in changed]
    first = random.Random(seed).sample(of_changed, min(CHANGED, len(of_changed)))
    return [*first, *(mutant for mutant in part if mutant not in first)]


def changed_since(commit: str) -> set[str]:
    """The files that differ from those of a commit."""
    command = ["git", "diff", "--name-only", commit, "--"]
    return set(
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a verdict for each mutant asked for; 1 if one is not as it should be."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="which thirtieth is taken (0)"
    )
    parser.add_argument("--all", action="store_true", help="all of them")
    parser.add_argument(
        "--changed", metavar="COMMIT", help="and first mutants of the files that changed since"
    )
    parser.add_argument(
        "--generate", type=int, default=24, metavar="N", help="how many to draw (24)"
    )
    parser.add_argument(
        "--only", metavar="NAME", help="all mutants of functions whose name ends so"
    )
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time (1)")
    parser.add_argument(
        "--limit", type=float, default=300, help="seconds for a test; longer is a failure (300)"
    )
    asked = parser.parse_args(arguments)
    mutants = [*BY_HAND, *drawn(ROOT, asked.generate, seed=0)]
    if asked.only:
        mutants = [mutant for mutant in mutants if f".{mutant.name}".endswith(f".{asked.only}")]
    elif not asked.all:
        changed = changed_since(asked.changed) if asked.changed else set()
        mutants = chosen(mutants, parts=PARTS, seed=asked.seed, changed=changed)
    if not mutants:
        parser.error("no mutant is selected")
    verdicts = []
    with ThreadPoolExecutor(asked.jobs) as pool:
        for each in pool.map(functools.partial(verdict, limit=asked.limit), mutants):
            print(each, flush=True)
            verdicts.append(each)
    words = [each.word for each in verdicts]
    print(", ".join(f"{words.count(word)} {word}" for word in dict.fromkeys(words)))
    return int(any(word not in GOOD for word in words))


if __name__ == "__main__":
    sys.exit(main())
