"""What `parallax.plan` predicts beside what the TPU's and the GPU's compilers make of the same
step, in bytes. Nothing runs.

    python benchmarks/accelerators.py --target v5e:2x2
        # compiles 24 layouts, adds a line to FILE for each: about 15 minutes
    python benchmarks/accelerators.py  # fits the compilers' constants on one half, scores the other

The first needs the compiler: `pip install -e ".[tpu]"` or `[gpu-compile]`; the second, nothing. See
benchmarks/README.md.
"""

import argparse
import json
import math
import random
import re
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import measure
from jax.sharding import PartitionSpec as P

from parallax import hardware, mesh, plan
from parallax.collectives import Axis, ring
from parallax.compiled import seconds, targets
from parallax.layout import Layout
from parallax.models import decoder, gpt2
from parallax.models.decoder import Compute
from parallax.plan import compilers, temporaries, traffic

FILE = Path(__file__).resolve().parent.parent / "tests" / "fixtures" / "compiled" / "plans.jsonl"
CHIPS = {"v5e": hardware.TPU_V5E, "v5p": hardware.TPU_V5P, "h100": hardware.H100}
SEED = 32
MODELS = {
    "a": gpt2.Config(layers=4, heads=4, width=256, context=512, vocabulary=2048),
    "b": gpt2.Config(layers=6, heads=6, width=384, context=256, vocabulary=1024),
}
LAYOUTS = """
    plain    a 32 data=4
    plain    b 64 data=4,microbatches=2
    plain    b 64 data=2,tensor=2
    plain    a 32 tensor=4
    plain    a 64 data=2,tensor=2,microbatches=2
    plain    b 64 data=2,tensor=2,sequence=True
    remat    a 64 data=4,remat=block
    remat    b 64 data=4,remat=products
    remat    a 32 data=4,remat=attention
    remat    b 64 data=2,tensor=2,remat=block
    remat    a 64 data=2,tensor=2,sequence=True,remat=gathers
    remat    b 64 data=2,tensor=2,microbatches=2,remat=products
    zero     a 32 data=4,zero=1
    zero     b 64 data=4,microbatches=2,zero=2
    zero     a 64 data=4,zero=3
    zero     b 64 data=4,microbatches=2,zero=3,remat=block
    zero     a 32 data=2,tensor=2,zero=1
    zero     b 64 data=2,tensor=2,zero=3,sequence=True,remat=gathers
    pipeline a 64 data=2,stage=2,microbatches=4
    pipeline b 64 stage=2,tensor=2,microbatches=4
    pipeline a 64 stage=4,microbatches=4
    pipeline b 64 data=2,stage=2,microbatches=4,remat=block
    pipeline a 64 data=2,stage=2,microbatches=4,remat=stage
    pipeline b 64 data=2,stage=2,microbatches=4,zero=1,remat=products
"""  # the family, the model, the global batch, and the layout, all in bfloat16
Row = Mapping[str, Any]


def main():
    arguments = parse()
    if arguments.target:
        jax.config.update("jax_platforms", "cpu")
        return collect(arguments.target, arguments.file)
    rows = read(arguments.file)
    parts = {
        name: halves([row for row in rows if row["target"] == target])
        for name, target in COMPILERS.items()
    }
    scored = {id(row) for _, part in parts.values() for row in part}
    half = lambda row: {"half": "scored" if id(row) in scored else "fitted"}
    print(measure.table([line(row, predicted(row)) | half(row) for row in rows]), "\n")
    for name, (fitted, rest) in parts.items():
        if not rest:
            print(f"{name}: too few are compiled", "\n")
            continue
        now = getattr(compilers, name)
        found = fit(
            fitted, compilers.IN_PLACE._replace(apart=now.apart, copied=now.copied, early=now.early)
        )
        print(f"{name}, fitted on {len(fitted)}: {constants(found)}")
        print(measure.table(scores(rest, found)), "\n")


def collect(name: str, file: Path):
    """Compile what `file` has not yet, and add it."""
    there = targets.target(name)
    had = {(row["target"], row["model"], row["layout"]) for row in read(file)}
    for text in LAYOUTS.strip().splitlines():
        family, model, batch, words = text.split()
        if (name, model, words) in had:
            continue
        begin = time.process_time()
        program = compiled(
            there, MODELS[model], Layout.parse(f"{words},precision=bfloat16"), int(batch)
        )
        sent: dict[str, int] = {}
        for entry in program.certificate():
            axes = " x ".join(entry.axes)
            sent[axes] = sent.get(axes, 0) + entry.bytes
        row = {
            "target": name,
            "family": family,
            "model": model,
            "batch": int(batch),
            "layout": words,
        }
        row |= {"memory": program.memory, "unpadded": unpadded(program.text), "sent": sent}
        row |= {"seconds": round(time.process_time() - begin, 1)}
        with file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(row) + "\n")
        print(row, flush=True)


def compiled(
    there: targets.Target, config: gpt2.Config, layout: Layout, batch: int
) -> targets.Program:
    """The step, compiled for the target, with attention as the plan counts it: its scores are
    arrays."""
    world, compute = (
        mesh.make(devices=there.devices, **layout.axes),
        Compute(axes=by_rings(layout), attention=gpt2.FAMILY.attention),
    )
    prepared = decoder.train_step(
        gpt2.FAMILY,
        config,
        plan.ADAMW,
        layout,
        world,
        batch=batch,
        key=jax.random.key(0),
        compute=compute,
    )
    windows = jax.ShapeDtypeStruct(
        (batch, config.context + 1), jnp.int32, sharding=mesh.shardings(P("data"), world)
    )
    return targets.compile(prepared.train, prepared.shapes, windows, target=there)


def by_rings(layout: Layout) -> dict[str, Axis]:
    """A ring along each axis, as in the programs that are saved."""
    return {name: ring(name) for name in layout.axes}


def unpadded(text: str) -> int:
    """Bytes of a program's arguments by their shapes: a TPU pads some to its tiles."""
    found = re.search(r"entry_computation_layout=\{\((.*?)\)->", text)
    assert found is not None
    return seconds.nbytes(found[1])


def read(file: Path) -> list[Row]:
    """The lines of a file, in an order that does not depend on who wrote first."""
    rows = (
        [json.loads(text) for text in file.read_text(encoding="utf-8").splitlines()]
        if file.exists()
        else []
    )
    return sorted(rows, key=lambda row: (row["target"], row["family"], row["model"], row["layout"]))


def halves(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Two halves of the rows, drawn by a seed: every other one of each target's, like beside like.

    Like are those of one family with one choice of remat, as a constant that no row of the fitted
    half tells of cannot be scored.
    """
    draw, order = random.Random(SEED), {}
    for row in rows:
        kind = row["target"], row["family"], Layout.parse(row["layout"]).remat
        order[row["target"], row["model"], row["layout"]] = (*kind, draw.random())
    found: tuple[list[Row], list[Row]] = ([], [])
    for target in dict.fromkeys(row["target"] for row in rows):
        like = sorted(
            (row for row in rows if row["target"] == target),
            key=lambda row: order[target, row["model"], row["layout"]],
        )
        for k, row in enumerate(like):
            found[k % 2].append(row)
    return found


def held(row: Row) -> int:
    """The peak of a compiled step: what it takes, gives and needs, without a TPU's own code, which
    no plan tells."""
    return sum(row["memory"][kind] for kind in ("arguments", "results", "temporaries"))


def of(row: Row) -> tuple[gpt2.Config, Layout, int]:
    """What a row is of."""
    return MODELS[row["model"]], Layout.parse(f"{row['layout']},precision=bfloat16"), row["batch"]


def chip(row: Row) -> hardware.Hardware:
    """The chip that a row was compiled for."""
    return CHIPS[row["target"].split(" x ")[-1].split(":")[0]]


def predicted(row: Row) -> dict[str, Any]:
    """What the plan says of a row: its arguments, what is sent along which axes, and the peak."""
    config, layout, batch = of(row)
    needs = plan.memory(config, layout, chip(row), batch)
    sent = traffic.by_axes(traffic.terms(config, layout, batch, axes=by_rings(layout)))
    along = {" x ".join(axes): size for axes, size in sent.items() if axes and size}
    return {"arguments": needs.arguments, "sent": along, "peak": needs.peak}


def line(row: Row, found: Mapping[str, Any]) -> dict[str, object]:
    """One line of the table."""
    return {
        "target": row["target"],
        "family": row["family"],
        "model": row["model"],
        "batch": row["batch"],
        "layout": row["layout"],
        "arguments": "equal"
        if found["arguments"] == row["unpadded"]
        else f"{found['arguments'] / row['unpadded'] - 1:+.2%}",
        "padded": f"{row['memory']['arguments'] / row['unpadded'] - 1:+.2%}",
        "sent": "equal" if found["sent"] == row["sent"] else f"{found['sent']} {row['sent']}",
        "sent MB": f"{sum(row['sent'].values()) / 1e6:.1f}",
        "peak MB": f"{held(row) / 1e6:.1f}",
        "predicted MB": f"{found['peak'] / 1e6:.1f}",
        "off": f"{found['peak'] / held(row) - 1:+.1%}",
    }


def off(rows: Sequence[Row], compiler: compilers.Compiler) -> list[float]:
    """How far the plan's peaks are off with these constants."""
    found = []
    for row in rows:
        config, layout, batch = of(row)
        state = plan.memory(config, layout, chip(row), batch)
        temporary = temporaries.temporary(config, layout, batch, compiler=compiler)
        needs = state._replace(temporary=temporary)
        found.append(needs.peak / held(row) - 1)
    return found


COMPILERS = {"XLA_V5E": "v5e:2x2", "XLA_V5P": "v5p:2x2x1", "XLA_H100": "4 x h100"}
# The constants that are fitted; near memory is in MB. `apart`, `copied` and `early` were read from
# the programs.
FITTED = ("scores", "block 0", "block 1", "block 2", "slots", "kept", "near")
RANGES = {"near": (0.0, 256.0)}  # in MB; of the others: times where the fit begins
WIDEST = (0.05, 4.0)
PULL = 0.002  # toward where the fit begins, so that what few rows tell of is not driven far


def fit(rows: Sequence[Row], start: compilers.Compiler) -> compilers.Compiler:
    """Constants under which the plan's peaks are nearest to those of the rows, in the logarithm;
    one constant after another.

    `near` is only tried on a TPU.
    """
    names = [
        name for name in FITTED if name != "near" or any("v5" in row["target"] for row in rows)
    ]
    scales = dict.fromkeys(FITTED, 1.0) | {"near": 0.0}

    def loss(scales: Mapping[str, float]) -> float:
        wrong = [math.log1p(one) for one in off(rows, scaled(start, scales))]
        return statistics.mean(one * one for one in wrong) + PULL * sum(
            (scales[name] - 1) ** 2 for name in names if name != "near"
        )

    for step in (1.5, 1.2, 1.05, 1.01):
        better = True
        while better:
            better, now = False, loss(scales)
            for name in names:
                low, high = RANGES.get(name, WIDEST)
                moves = (
                    [scales[name] + 64 * (step - 1), scales[name] - 64 * (step - 1)]
                    if name == "near"
                    else [scales[name] * step, scales[name] / step]
                )
                for tried in moves:
                    there = scales | {name: min(max(tried, low), high)}
                    if (found := loss(there)) < now - 1e-7:
                        scales, now, better = there, found, True
    return scaled(start, scales)


def scaled(start: compilers.Compiler, scales: Mapping[str, float]) -> compilers.Compiler:
    """A compiler's constants times these."""
    block = tuple(
        (round(a * scales[f"block {k}"], 2), round(b * scales[f"block {k}"], 2))
        for k, (a, b) in enumerate(start.block)
    )
    return start._replace(
        scores=round(start.scores * scales["scores"], 2),
        block=block,
        slots=round(start.slots * scales["slots"], 2),
        kept=round(start.kept * scales["kept"], 2),
        near=round(scales["near"]) * 1e6,
    )


def constants(found: compilers.Compiler) -> str:
    """The constants as `plan.compilers` has them."""
    names = ("scores", "block", "slots", "kept", "near")
    return ", ".join(f"{name}={getattr(found, name)}" for name in names)


def scores(rows: Sequence[Row], compiler: compilers.Compiler) -> list[dict[str, object]]:
    """How far the peaks are off, in each family and in all."""
    found = []
    for family in [*dict.fromkeys(row["family"] for row in rows), "all"]:
        wrong = [
            abs(one)
            for one in off([row for row in rows if family in (row["family"], "all")], compiler)
        ]
        found.append(
            {
                "family": family,
                "layouts": len(wrong),
                "median": f"{statistics.median(wrong):.1%}",
                "worst": f"{max(wrong):.1%}",
            }
        )
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", help="compile for this one: v5e:2x2, v5p:2x2x1 or '4 x h100'")
    parser.add_argument("--file", type=Path, default=FILE, help="the compiled steps' figures")
    return parser.parse_args()


if __name__ == "__main__":
    main()
