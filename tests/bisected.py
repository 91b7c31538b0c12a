"""What `bisect` says of the mutants that change numbers: the first wrong value, and whether its fault is behind it.

    python tests/bisected.py                    all that were chosen by hand and act in a small GPT-2
    python tests/bisected.py --only all_mean
    python tests/bisected.py --drawn 20 --seed 3

Each mutant is put into a copy of the package, and the copy's split run is compared with the record of one device, without the
mutant. A mutant is found where the run differs, and rightly placed where the function that holds the fault made an equation
between the first wrong value and the equal values before it. Ends with code 1 where a run is wrong and no tap says so.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import flags
from mutant import Mutant, mutated, place
from mutants_by_hand import BY_HAND, NO_FAULT
from mutants_drawn import drawn

ROOT = Path(__file__).parents[1]
HERE = ("tensor", "cross_entropy", "grads", "models.gpt2.forward", "models.gpt2.model", "models.pieces", "models.family")
HERE += ("models.decoder", "collectives.route", "collectives.axis", "zero", "sequence", "pipeline", "layout.ways", "schedule")
REFUSE = ("_check", "check", "refus", "_try_out", "_source", "in_flight", "asynchronous")  # in names: these change no numbers
LAYOUTS = {  # by the first words of a module's name; the last is for all others
    "pipeline": "stage=2,microbatches=4",
    "schedule": "stage=2,microbatches=4",
    "models.pieces": "stage=2,microbatches=2",
    "sequence": "tensor=2,sequence=true",
    "zero": "data=2,zero=1",
    "": "data=2,tensor=2,microbatches=2",
}


class Said(NamedTuple):
    """What became of one mutant under one layout.

    Attributes:
        word: `found`, `missed` (what the run returns is wrong, and no tap is), `equal` or `refused` (it raised).
        first: the first wrong value, or the error.
        looks: the kind of mistake.
        collectives: between the equal values and it.
        functions: likewise.
    """

    word: str
    first: str
    looks: str = ""
    collectives: tuple[str, ...] = ()
    functions: tuple[str, ...] = ()

    def has(self, mutant: Mutant, path: Path) -> bool:
        """Whether the mutant's function, or another of its file, made something between."""
        own = f"{path.as_posix()}:{mutant.name.rpartition('.')[2]}"
        return any(name.split(".<locals>")[0] == own or f".{own.rpartition(':')[2]}" in name for name in self.functions)


def chosen(only: str, count: int, seed: int) -> list[tuple[Mutant, Path]]:
    """The mutants that act on the numbers of these layouts, as far as their modules tell."""
    found = []
    for mutant in (*BY_HAND, *drawn(ROOT, count, seed)):
        path = place(mutant, ROOT).path
        inside = any(f"{_module(path)}.".startswith(f"{name}.") for name in HERE)
        if (
            inside
            and mutant.key not in NO_FAULT
            and not mutant.bits
            and only in mutant.name
            and not any(word in mutant.name for word in REFUSE)
        ):
            found.append((mutant, path))
    return found


def layout_of(path: Path) -> str:
    """A layout in which the code of a file runs."""
    return next(layout for name, layout in LAYOUTS.items() if _module(path).startswith(name))


def _module(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removeprefix("parallax.").removesuffix(".__init__")


def put_to(mutant: Mutant | None, layout: str, record: Path, limit: float = 400) -> Said:
    """What a split run with the mutant says beside the record of one device."""
    with tempfile.TemporaryDirectory(prefix="bisected-") as folder:
        os.symlink(ROOT / "tests", Path(folder, "tests"))
        _copied(ROOT / "parallax", Path(folder, "parallax"))
        if mutant is not None:
            found, content = mutated(mutant, ROOT)
            Path(folder, found.path).unlink()
            Path(folder, found.path).write_bytes(content)
        command = [sys.executable, str(ROOT / "tests" / "bisected_run.py"), layout, str(record)]
        environment = os.environ | flags.quick() | {"PYTHONPATH": folder, "JAX_PLATFORMS": "cpu", "NPROC": "32"}
        try:
            done = subprocess.run(
                command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=limit
            )
        except subprocess.TimeoutExpired:
            return Said("refused", f"took over {limit:.0f} s")
    if done.returncode:
        return Said("refused", done.stderr.strip().splitlines()[-1][:150])
    return Said(*json.loads(done.stdout.splitlines()[-1]))


def _copied(source: Path, target: Path) -> None:
    """The files of a package, as links."""
    for path in source.rglob("*"):
        if path.is_file():
            there = target / path.relative_to(source)
            there.parent.mkdir(parents=True, exist_ok=True)
            os.link(path, there)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what is said of each mutant; 1 if a wrong run has no wrong tap."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="mutants of functions whose name has this")
    parser.add_argument("--drawn", type=int, default=0, help="how many more to draw")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn")
    parser.add_argument("--part", type=int, default=1, help="an N-th of them, that of number --seed")
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time")
    asked = parser.parse_args(arguments)
    words: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder, "one.npz")
        for layout in sorted({*LAYOUTS.values()}):
            right = put_to(None, layout, record)
            if right.word != "equal":
                raise SystemExit(f"{layout}, without a mutant: {right}")
        mutants = chosen(asked.only, asked.drawn, asked.seed)[asked.seed % asked.part :: asked.part]
        with ThreadPoolExecutor(asked.jobs) as pool:
            for (mutant, path), said in zip(
                mutants, pool.map(lambda each: put_to(each[0], layout_of(each[1]), record), mutants), strict=True
            ):
                word = said.word if said.word != "found" else ("placed" if said.has(mutant, path) else "found, fault elsewhere")
                words[word] = words.get(word, 0) + 1
                print(f"{word:<23}{path.stem}.{mutant.name:<26}{mutant.replaces[:40]!r} -> {mutant.by[:30]!r}", flush=True)
                lies = f"{'; '.join(said.collectives[:3])} | {', '.join(said.functions[:6])}"
                print(f"    {said.first} | {said.looks} | {lies}", flush=True)
    print(", ".join(f"{count} {word}" for word, count in words.items()))
    return int("missed" in words)


if __name__ == "__main__":
    sys.exit(main())
