"""What `bisect` says of the mutants that change numbers: the first wrong value, and whether its
fault is behind it.

    python tests/bisected.py                 all that were chosen by hand and act in one of the runs
    python tests/bisected.py --only all_mean
    python tests/bisected.py --drawn 20 --seed 3

Each mutant is put into a copy of the package, and a split run of the copy is compared with a record
of one device, without the mutant: of a model of one's own, of a GPT-2 or of a Llama. A mutant is
`placed` where the function that holds the fault made an equation between the first wrong value and
the equal values before it, or called the one that did, as where the fault leaves a division out. A
table makes no equation: there the functions that run it count. `raised` is a fault that says so
itself; `equal`, one that changes no number of its run.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import flags
from mutant import Mutant, mutated, place
from mutants_by_hand import BY_HAND, NO_FAULT
from mutants_drawn import drawn

ROOT = Path(__file__).parents[1]
OWN, GPT2 = "own; data=2,tensor=2,microbatches=2", "gpt2; data=2,tensor=2,microbatches=2"
ONE_BEHIND, WEIGHTS_LATER = (
    "own; stage=2,microbatches=4",
    "own; stage=2,microbatches=4,schedule=zero_bubble_lockstep",
)
CHUNKS, TURNS = (
    "own; stage=2,microbatches=4,chunks=2",
    "own; stage=2,microbatches=4,schedule=one_f_one_b",
)
EXPERTS, IN_STAGES = "experts; expert=2", "experts; stage=2,microbatches=2"
RUNS = {  # of the mutants of a module, by the first words of its name
    "collectives.axis": OWN,
    "collectives.algorithm": "own; data=6; looped",
    "collectives.execute": "own; data=6; looped",
    "collectives.permute": "own; data=6; looped",
    "collectives.route": "own; data=6; looped",
    "collectives.tables": "own; data=6; halving",
    "collectives.tiling": "own; data=6; looped",
    "context": "llama; context=4",
    "cross_entropy": GPT2,
    "data.batches": OWN,
    "experts": EXPERTS,
    "grads": OWN,
    "models.block": GPT2,
    "models.decoder": GPT2,
    "models.gpt2.forward": GPT2,
    "models.gpt2.model": GPT2,
    "models.llama.forward": "llama; tensor=4",
    "models.recipe": GPT2,
    "models.decoder_parts": "gpt2; stage=2,microbatches=2",
    "pipeline": ONE_BEHIND,
    "split_backward": WEIGHTS_LATER,
    "schedule": ONE_BEHIND,
    "sequence": "llama; tensor=2,sequence=true",
    "tensor": GPT2,
    "zero": "own; data=2,tensor=2,zero=1",
}
RUN_OF = {  # of functions that act in another run than their module's
    "grad_of": "experts; expert=2,tensor=2,sequence=true",
    "Programs.task": CHUNKS,
    "Algorithm.all_mean": EXPERTS,
    "_with_aux_by_layer": IN_STAGES,
    "_exchange": EXPERTS,
    "_with_local_loss": "experts; context=2,stage=2,microbatches=2",
    "shares_of": "own; data=6; two_rings",
    "head": TURNS,
    "Jobs.weight": WEIGHTS_LATER,
    "Jobs.forward": CHUNKS,
    "apply": "llama; context=2",
    "embed": "llama; context=2",
    "needs": TURNS,
    "_reach": WEIGHTS_LATER,
    "run_blocks": IN_STAGES,
    "Programs._trace_jobs": IN_STAGES,
    "rows": TURNS,
    "two_rings": "own; data=6; two_rings",
    "ulysses": "",
    "zero_bubble_lockstep": WEIGHTS_LATER,
}
NO_NUMBERS = {  # of functions: why a fault in them changes nothing that a run here computes
    "Axis.of": "a tuple of one axis and its algorithm: no run has one",
    "Programs._trace_head": "which reports of taps count",
    "_as_int32": "refuses tokens",
    "_may_run_in": "which lane of a schedule a product is in",
    "_cut_dim": "in how many parts a message is sent",
    "_from_0": "reads schedules of other programs",
    "_gather_in_a_loop": "a table whose chain begins late: no algorithm here has one",
    "_hands_on": "a table whose chain changes its step: likewise",
    "_hops": "counts hops, for predictions",
    "_in_order": "several algorithms along several axes: no run has them",
    "_is_cheap": "which lane of a schedule a product is in",
    "_in_mesh_order": "axes that are named in another order than the mesh has: likewise",
    "pieces_of": "in how many messages blocks are sent",
    "_products": "counts work, for predictions",
    "_stacked_aux": "auxiliary values of a schedule in the shape of a V: likewise",
    "Jobs._with_gradients": "an idle tick whose numbers are not finite: likewise",
    "_traced": "refuses shares that are used as wholes",
    "greedy": "the order of jobs that do not depend on each other",
    "axes_of_copies": "a step inside a loss: no run has one",
    "fewest": "likewise",
    "from_csv": "which errors of a file are told in a sentence",
    "gpipe": "the order of jobs that do not depend on each other",
    "hierarchical": "which axis is slow",
    "joined": "several algorithms along several axes: no run has them",
    "local_gradients": "refuses losses that are reduced already, and shares",
    "loss_of": "the loss of an evaluation",
    "masked": "an idle tick whose numbers are not finite: no run has one",
    "mean_over_microbatches": "auxiliary values of microbatches: no run has any",
    "messages": "counts messages, for predictions",
    "replicated_axes": "the replication type of a gradient",
    "norm": "complex numbers",
    "local_chunks": "what follows an update by auxiliary values",
    "slots_for": "what is in a slot before it is written",
    "splits_of": "a leaf that two axes split in one order: no run has one",
    "torus": "in which round a message goes",
}
REFUSES = (
    "_check",
    "check",
    "refus",
    "_source",
    "in_flight",
    "asynchronous",
    "Unknown",
    "_unknown",
)  # in names
# Of those that were found where they are, in a model of one's own: the function, and what stands
# there instead.
PLACED = (
    ("Programs.task", "chunk + self.index"),
    ("_scatter_in_a_loop", "trip)"),
    ("accumulated", "total"),
    ("averaged", "total"),
    ("Jobs.forward", "chosen(self.first"),
    ("Jobs.backward", 'row.saved["forward"][self.index]'),
    ("Jobs.weight", 'row.deferred["backward"]'),
    ("Jobs.weight", 'row.saved["backward"]'),
    ("coloured", "np.maximum(jobs, 0) if lane == first else"),
    ("reduce_scattered", "return total"),
)
EXECUTORS = {  # of modules that make tables: where they are run
    "collectives": "parallax/collectives/",
    "pipeline.rows": "parallax/pipeline/",
    "schedule": "parallax/pipeline/",
}
WORDS = ("placed", "found elsewhere", "equal", "raised")


class Said(NamedTuple):
    """What became of one mutant.

    Attributes:
        run: in which run.
        word: `found`, `equal` or `raised`.
        first: the first wrong value, or the error.
        diagnosis: the kind of mistake.
        collectives: between the equal values and it.
        functions: likewise.
        callers: of these functions.
    """

    run: str
    word: str
    first: str
    diagnosis: str = ""
    collectives: tuple[str, ...] = ()
    functions: tuple[str, ...] = ()
    callers: tuple[str, ...] = ()

    def has(self, mutant: Mutant, path: Path) -> bool:
        """Whether the mutant's function is between, or what is between runs its table, or it made
        what the run is given."""
        own, module = f"{path.as_posix()}:{mutant.name}", f"{_module(path)}."
        if self.first.startswith("argument."):
            return not self.functions and module.startswith(("data.", "models."))
        made = [name.split(".<locals>")[0] for name in (*self.functions, *self.callers)]
        runs = [folder for name, folder in EXECUTORS.items() if module.startswith(f"{name}.")]
        return own in made or any(
            name.startswith(folder) for name in self.functions for folder in runs
        )


def chosen(only: str, count: int, seed: int) -> list[tuple[Mutant, Path]]:
    """The mutants that act on the numbers of these runs, as far as their modules and names tell."""
    found = []
    for mutant in (*BY_HAND, *drawn(ROOT, count, seed)):
        path = place(mutant, ROOT).path
        refuses = any(word in mutant.name for word in REFUSES)
        counts = mutant.name not in NO_NUMBERS and mutant.key not in NO_FAULT and not mutant.bits
        if run_of(mutant, path) and counts and only in mutant.name and not refuses:
            found.append((mutant, path))
    return found


def run_of(mutant: Mutant, path: Path) -> str:
    """A run in which the code of a mutant runs; "" where there is none."""
    of_module = next(
        (run for name, run in RUNS.items() if f"{_module(path)}.".startswith(f"{name}.")), ""
    )
    return RUN_OF.get(mutant.name, of_module)


def _module(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removeprefix("parallax.").removesuffix(".__init__")


def put_to(mutant: Mutant | None, run: str, records: Path, limit: float = 900) -> Said:
    """What a split run with the mutant says beside the record of one device."""
    with tempfile.TemporaryDirectory(prefix="bisected-") as folder:
        _copied(ROOT / "parallax", Path(folder, "parallax"))
        if mutant is not None:
            found, content = mutated(mutant, ROOT)
            Path(folder, found.path).unlink()
            Path(folder, found.path).write_bytes(content)
        command = [sys.executable, str(ROOT / "tests" / "bisected_run.py"), str(records), run]
        environment = (
            os.environ
            | flags.quick()
            | {"PYTHONPATH": folder, "JAX_PLATFORMS": "cpu", "NPROC": "32"}
        )
        try:
            done = subprocess.run(
                command,
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
                timeout=limit,
            )
        except subprocess.TimeoutExpired:
            return Said(run, "raised", f"took over {limit:.0f} s")
    if done.returncode:
        return Said(run, "raised", done.stderr.strip()[-200:])
    return Said(*json.loads(done.stdout.splitlines()[-1]))


def _copied(source: Path, target: Path) -> None:
    """The files of a package, as links."""
    for path in source.rglob("*"):
        if path.is_file():
            there = target / path.relative_to(source)
            there.parent.mkdir(parents=True, exist_ok=True)
            os.link(path, there)


def word_of(said: Said, mutant: Mutant, path: Path) -> str:
    """One of `WORDS`."""
    return (
        said.word
        if said.word != "found"
        else ("placed" if said.has(mutant, path) else "found elsewhere")
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what is said of each mutant; 1 if one is found where its fault is not."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="mutants of functions whose name has this")
    parser.add_argument(
        "--inside", default="", help="mutants of this module or package, such as pipeline"
    )
    parser.add_argument(
        "--kind", default="", help="in runs of this kind of model alone, such as own"
    )
    parser.add_argument("--drawn", type=int, default=0, help="how many more to draw")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn")
    parser.add_argument(
        "--part", type=int, default=1, help="an N-th of them, that of number --seed"
    )
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time")
    parser.add_argument(
        "--records", type=Path, help="the folder of the records of one device; by default a new one"
    )
    asked = parser.parse_args(arguments)
    every = [
        each
        for each in chosen(asked.only, asked.drawn, asked.seed)
        if f"{_module(each[1])}.".startswith(asked.inside)
    ]
    mutants = [each for each in every if run_of(*each).startswith(asked.kind)][
        asked.seed % asked.part :: asked.part
    ]
    results: list[tuple[Said, Mutant, Path]] = []
    with tempfile.TemporaryDirectory() as new, ThreadPoolExecutor(asked.jobs) as pool:
        records = asked.records or Path(new)
        for kind in sorted({run_of(*each).partition(";")[0] for each in mutants}):
            if (
                not (records / f"{kind}.npz").exists()
                and (right := put_to(None, f"{kind}; data=2", records)).word != "equal"
            ):
                raise SystemExit(f"without a mutant: {right}")
        put = lambda each: put_to(each[0], run_of(*each), records)
        for (mutant, path), said in zip(mutants, pool.map(put, mutants), strict=True):
            results.append((said, mutant, path))
            change = f"{mutant.replaces[:40]!r} -> {mutant.by[:30]!r}"
            print(
                f"{word_of(said, mutant, path):<16}{path.stem}.{mutant.name:<26}{change}  "
                f"[{said.run}]",
                flush=True,
            )
            lies = f"{'; '.join(said.collectives[:3])} | {', '.join(said.functions[:6])}"
            print(f"    {said.first} | {said.diagnosis} | {lies}", flush=True)
    words = Counter(word_of(*each) for each in results)
    print(", ".join(f"{words[word]} {word}" for word in WORDS))
    print(
        f"Of pairs of one mutant's finding and another's function, {by_chance(results):.0%} would "
        "count as placed."
    )
    return int(words["found elsewhere"] > 0)


def by_chance(every: Sequence[tuple[Said, Mutant, Path]]) -> float:
    """How often the function of another found mutant is between: what `placed` would be if findings
    said nothing."""
    found = [each for each in every if each[0].word == "found"]
    pairs = [
        said.has(other, path)
        for said, mutant, _ in found
        for _, other, path in found
        if other.name != mutant.name
    ]
    return sum(pairs) / max(len(pairs), 1)


if __name__ == "__main__":
    sys.exit(main())
