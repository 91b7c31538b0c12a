"""What `parallax.plan` predicts beside what the TPU's and the GPU's compilers make of the same
step, in bytes. Nothing runs.

    python benchmarks/accelerators.py --target v5e:2x2
        # compiles 24 layouts, adds a line to FILE for each: about 15 minutes
    python benchmarks/accelerators.py  # the trace's memory beside the saved figures: a minute

The first needs the compiler: `pip install -e ".[tpu]"` or `[gpu-compile]`; the second, nothing. See
benchmarks/README.md.
"""

import argparse
import json
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
from parallax.plan import state_bytes

FILE = Path(__file__).resolve().parent.parent / "tests" / "fixtures" / "compiled" / "plans.jsonl"
CHIPS = {"v5e": hardware.TPU_V5E, "v5p": hardware.TPU_V5P, "h100": hardware.H100}
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
    options = parse()
    jax.config.update("jax_platforms", "cpu")
    if options.target:
        return collect(options.target, options.file)
    rows = read(options.file)
    plans = [(row, predicted(row)) for row in rows]
    print(measure.table([line(row, plan) for row, plan in plans]), "\n")
    for target in dict.fromkeys(row["target"] for row in rows):
        found = [
            (row, plan["peak"] / held(row) - 1) for row, plan in plans if row["target"] == target
        ]
        print(target, measure.table(scores(found)), sep="\n", end="\n\n")


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
    """What the plan says of a row: its arguments, what is sent along which axes, and the peak.

    The programs were compiled with scores and with rings. The mesh of the trace names no devices,
    so the number of layers in a body is given as on the target.
    """
    config, layout, batch = of(row)
    unroll = 1 if chip(row).platform == "tpu" else None
    world = mesh.abstract(**layout.axes)
    prepared = decoder.train_step(
        *(gpt2.FAMILY, config, plan.ADAMW, layout, world),
        batch=batch,
        key=jax.random.key(0),
        compute=Compute(axes=by_rings(layout), attention=gpt2.FAMILY.attention, unroll=unroll),
    )
    windows = jax.ShapeDtypeStruct((batch, config.context + 1), jnp.int32)
    trace = plan.trace(prepared.train, (prepared.shapes, windows), world, hardware=chip(row))
    planned = plan.plan(config, layout, chip(row), batch=batch, axes=by_rings(layout))
    along = {" x ".join(axes): size for axes, size in planned.sent.items() if axes and size}
    state = (
        state_bytes.parameter_bytes(config, layout)
        + state_bytes.optimizer_bytes(config, layout, plan.ADAMW)
        + state_bytes.batch_bytes(config, layout, batch)
    )
    return {"arguments": state, "sent": along, "peak": trace.peak}


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


def scores(found: Sequence[tuple[Row, float]]) -> list[dict[str, object]]:
    """How far the peaks are off, in each family and in all."""
    lines = []
    for family in [*dict.fromkeys(row["family"] for row, _ in found), "all"]:
        wrong = [abs(off) for row, off in found if family in (row["family"], "all")]
        lines.append(
            {
                "family": family,
                "layouts": len(wrong),
                "median": f"{statistics.median(wrong):.1%}",
                "worst": f"{max(wrong):.1%}",
            }
        )
    return lines


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", help="compile for this one: v5e:2x2, v5p:2x2x1 or '4 x h100'")
    parser.add_argument("--file", type=Path, default=FILE, help="the compiled steps' figures")
    return parser.parse_args()


if __name__ == "__main__":
    main()
