"""What the accelerators' compilers say of our steps: the time of each layout, and what of it waits
for messages. Nothing runs.

    python benchmarks/compiled.py                      # prints the table of the steps that FILE has
    python benchmarks/compiled.py --target v5e:2x4 --row psum
        # compiles a row anew, a minute, and puts it in FILE
    python benchmarks/compiled.py --target v5e:2x4 --save FOLDER
        # compiles all rows, and keeps their texts in FOLDER

Compiling needs the compiler: `pip install -e ".[tpu]"` or `[gpu-compile]`; printing needs nothing.
GPT-2 of width 768, 4 layers, T 1,024, vocabulary 8,192, bfloat16. See benchmarks/README.md.
"""

import argparse
import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import measure
import optax
from jax.sharding import PartitionSpec as P

from parallax import mesh, plan, precision, rules, sequence
from parallax.collectives import bucketed, ring, two_rings
from parallax.compiled import targets
from parallax.layout import Layout
from parallax.models import decoder, gpt2
from parallax.models.attention import grouped
from parallax.models.decoder import Compute

FILE = Path(__file__).resolve().parent.parent / "tests" / "fixtures" / "compiled" / "steps.jsonl"
CONFIG = gpt2.Config(layers=4, heads=12, width=768, context=1024, vocabulary=8192)
MODELS = {
    "four": CONFIG,
    "small": gpt2.SMALL,
    "wide": gpt2.Config(layers=4, heads=16, width=2048, context=1024, vocabulary=8192),
}
# "buckets": a ring; "rings": two rings in opposite directions. Both join small leaves.
ALGORITHMS = {
    "ring": ring,
    "buckets": lambda name: bucketed(ring(name)),
    "rings": lambda name: bucketed(two_rings(name)),
}
# The name of a row, sequences, layout, algorithm ("jit": `jax.jit` with shardings, a rival),
# and attention: "kernel" is the target's own, "scores" the plain one. After a comma "made":
# gradients are summed in the backward pass (`grads.reduced_in_backward`); "matmul": products while
# tokens travel (`sequence.overlapping`); "unrolled": the layers without a loop (`unroll`), which
# takes about twice as long to compile. Last, the model, where it is not "four".
ROWS = """
    psum            64 data=8                                      lax  scores
    psum_block      64 data=8,remat=block                          lax  scores
    psum_kernel     64 data=8                                      lax  kernel
    psum_made       64 data=8                                      lax  kernel,made
    ring_kernel     64 data=8                                      ring kernel
    ring_made       64 data=8                                      ring kernel,made
    buckets_kernel  64 data=8                                      buckets kernel
    rings_kernel    64 data=8                                      rings kernel
    rings_made      64 data=8                                      rings kernel,made
    psum_unrolled   64 data=8                                      lax  kernel,unrolled
    rings_unrolled  64 data=8                                      rings kernel,unrolled
    jit             64 data=8                                      jit  scores
    zero3_kernel    64 data=8,zero=3                               lax  kernel
    zero3_rings     64 data=8,zero=3                               rings kernel
    zero3_unrolled  64 data=8,zero=3                               lax  kernel,unrolled
    zero3_both      64 data=8,zero=3                               rings kernel,unrolled
    zero3_block     64 data=8,zero=3,remat=block                   lax  scores
    stage           64 data=2,stage=4,microbatches=8               lax  scores
    stage_block     64 data=2,stage=4,microbatches=8,remat=block   lax  scores
    stage_kernel    64 data=2,stage=4,microbatches=8               lax  kernel
    tensor          32 data=4,tensor=2                             lax  scores
    tensor_jit      32 data=4,tensor=2                             jit  scores
    tensor_kernel   32 data=4,tensor=2                             lax  kernel
    tensor_ring     32 data=4,tensor=2                             ring kernel
    tensor_unrolled 32 data=4,tensor=2                             lax  kernel,unrolled
    sequence        32 data=4,tensor=2,sequence=True               lax  kernel
    sequence_ring   32 data=4,tensor=2,sequence=True               ring kernel
    sequence_matmul 32 data=4,tensor=2,sequence=True               ring kernel,matmul
    ring_unrolled   32 data=4,tensor=2,sequence=True               ring kernel,unrolled
    matmul_unrolled 32 data=4,tensor=2,sequence=True               ring kernel,matmul,unrolled
    small           64 data=8                                      lax  kernel            small
    small_unrolled  64 data=8                                      lax  kernel,unrolled   small
    small_zero3     64 data=8,zero=3                               rings kernel           small
    small_both      64 data=8,zero=3                               lax  kernel,unrolled   small
    wide            64 data=8                                      lax  kernel            wide
    wide_zero3      64 data=8,zero=3                               rings kernel           wide
    wide_both       64 data=8,zero=3                               lax  kernel,unrolled   wide
"""


Row = Mapping[str, Any]


def main():
    arguments = parse()
    if arguments.target:
        targets.choose_platform(arguments.target)
        for text in ROWS.strip().splitlines():
            if not arguments.row or text.split()[0] in arguments.row:
                program = compiled(arguments.target, text)
                put(figures(program, text), arguments.file)
                if arguments.save:
                    name = f"{arguments.target} {text.split()[0]}.hlo.gz".replace(" ", "_").replace(
                        ":", "_"
                    )
                    (arguments.save / name).write_bytes(
                        gzip.compress(program.text.encode(), mtime=0)
                    )
    print(measure.table([line(row) for row in read(arguments.file)]))


def compiled(target: str, text: str) -> targets.Program:
    """A row's step, compiled for the target."""
    _, batch, words, algorithm, how, *model = text.split()
    there, layout, config = (
        targets.target(target),
        Layout.parse(f"{words},precision=bfloat16"),
        MODELS[(model or ["four"])[0]],
    )
    world = mesh.make(devices=there.devices, **layout.axes)
    windows = jax.ShapeDtypeStruct(
        (int(batch), config.context + 1), jnp.int32, sharding=mesh.shardings(P("data"), world)
    )
    if algorithm == "jit":
        return targets.compile(*rival(config, world), windows, target=there)
    compute = choices(layout, algorithm, how, config.layers)
    prepared = decoder.train_step(
        *(gpt2.FAMILY, config, plan.ADAMW, layout, world),
        batch=int(batch),
        key=jax.random.key(0),
        compute=compute,
    )
    return targets.compile(prepared.train, prepared.shapes, windows, target=there)


def choices(layout: Layout, algorithm: str, how: str, layers: int) -> Compute:
    """A row's choices: one algorithm along all axes; with "lax" `jax.lax` sends."""
    axes = {} if algorithm == "lax" else {name: ALGORITHMS[algorithm](name) for name in layout.axes}
    return Compute(
        axes=axes,
        attention=grouped if "scores" in how else None,
        reduce_in_backward="made" in how,
        comms=sequence.overlapping if "matmul" in how else None,
        unroll=layers if "unrolled" in how else None,
    )


def rival(config: gpt2.Config, world: mesh.Mesh) -> tuple[Any, Any]:
    """The same step under `jax.jit` with shardings, all logits at once, as a user would write it;
    and its state's shapes."""
    specs = rules.specs(
        eqx.filter_eval_shape(gpt2.GPT2, config, key=jax.random.key(0)), gpt2.rules("tensor"), world
    )

    def loss(model, windows):
        logits = gpt2.logits(precision.cast(model, jnp.bfloat16), windows[:, :-1], attend=grouped)
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits.astype(jnp.float32), windows[:, 1:]
        )
        return jnp.mean(losses)

    def init():
        model = gpt2.GPT2(config, key=jax.random.key(0))
        return model, plan.ADAMW.init(eqx.filter(model, eqx.is_inexact_array))

    def train(state, windows):
        value, gradients = jax.value_and_grad(loss)(state[0], windows)
        updates, moments = plan.ADAMW.update(gradients, state[1], state[0])
        return (eqx.apply_updates(state[0], updates), moments), value

    shapes = jax.eval_shape(init)
    placed = mesh.shardings((specs, rules.optimizer_specs(plan.ADAMW, shapes[0], specs)), world)
    shapes = jax.tree.map(
        lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), shapes, placed
    )
    return jax.jit(train, donate_argnums=0, out_shardings=(placed, None)), shapes


def figures(program: targets.Program, text: str) -> Row:
    """What the table says of a row's program."""
    name, batch, words, algorithm, how, *model = text.split()
    config = MODELS[(model or ["four"])[0]]
    found = program.timeline()
    peak = plan.model_flops(config, int(batch)) / (
        program.target.hardware.rate / program.target.cores * program.mesh.size
    )
    return {
        "target": program.target.name,
        "row": name,
        "layout": words,
        "moves": algorithm,
        "attention": how,
        "ms": round(1e3 * found.seconds, 2),
        "local ms": round(1e3 * found.compute, 2),
        "0.5 x links": round(1e3 * found.at_speed[0.5], 2),
        "2 x links": round(1e3 * found.at_speed[2.0], 2),
        "of peak": f"{peak / found.seconds:.1%}",
        "temporaries GB": round(program.memory["temporaries"] / 1e9, 2),
    }


def line(row: Row) -> dict[str, object]:
    """One line of the table."""
    return {**row, "waits": f"{1 - row['local ms'] / row['ms']:.1%}"}


def read(file: Path) -> list[Row]:
    """The rows of a file."""
    return (
        [json.loads(text) for text in file.read_text(encoding="utf-8").splitlines()]
        if file.exists()
        else []
    )


def put(row: Row, file: Path):
    """The row in the file, instead of the one of its target and name that was there."""

    def key(each):
        return (each["target"], each["row"])

    rows = sorted([each for each in read(file) if key(each) != key(row)] + [row], key=key)
    file.write_text("".join(json.dumps(each) + "\n" for each in rows), encoding="utf-8")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", help="compile for this one, as v5e:2x4 or '8 x h100'")
    parser.add_argument("--row", action="append", help="compile this row alone; may be repeated")
    parser.add_argument("--file", type=Path, default=FILE, help="the steps' figures")
    parser.add_argument("--save", type=Path, help="a folder for the programs' texts")
    return parser.parse_args()


if __name__ == "__main__":
    main()
