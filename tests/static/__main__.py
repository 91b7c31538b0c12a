"""Checks of the repository's own text, which prove nothing about a number: `python tests/static`.

Each module here has functions `check_...` that yield one sentence for each problem. All problems
are printed; the exit code is 1 if there is one. `ruff` holds docstrings (D1), and the strict build
of the docs their anchors.
"""

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for the modules of tests/

import examples_text
import imports
import mutants_apply
import notebooks
import pages
import reading
import readme
import sweeps

MODULES = (imports, pages, notebooks, readme, reading, examples_text, mutants_apply, sweeps)


def checks(module: ModuleType) -> list[Callable[[], Iterator[str]]]:
    """The checks of a module, in the order in which they stand."""
    return [value for name, value in vars(module).items() if name.startswith("check_")]


def main() -> int:
    """Run every check; 1 if one of them finds a problem."""
    began = time.monotonic()
    ran, problems = 0, 0
    for module in MODULES:
        for check in checks(module):
            ran += 1
            for problem in check():
                problems += 1
                print(f"{module.__name__}.{check.__name__}: {problem}", flush=True)
    print(f"{ran} checks of the text, {problems} problems, {time.monotonic() - began:.0f} s")
    return int(problems > 0)


if __name__ == "__main__":
    sys.exit(main())
