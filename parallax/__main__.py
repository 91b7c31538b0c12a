"""Plans a split of a model over devices, compiles it for machines that are not there, and finds the value that is wrong.

plan      without --layout: the best layouts of --devices, and the plan of the first; with it: the plan of that one; with a
          program, FILE.py:FUNCTION, and --mesh: what any step needs, read from its trace; with --islands: groups that talk
          once in --every steps
compile   compiles --layout for --target, a machine that is not there: memory, bytes, estimated time, what is exposed
compare   compiles --layout for virtual CPU devices, runs nothing, and sets each prediction beside the program
estimates two published estimates, recomputed
bisect    runs a step of --layout and one of one device, in float64, and names the first value that differs

    python -m parallax plan --model xl --devices 64 --hardware a100
    python -m parallax plan --layout data=8 --hardware h100 --islands 4 --every 50
    python -m parallax plan path/to/file.py:function --mesh data=256
    python -m parallax compile --layout data=8 --target v5e:2x4
    python -m parallax compare --layout data=2,stage=2,tensor=2
    python -m parallax bisect --layout data=2,tensor=2

`python -m parallax COMMAND --help` has the options of a command. The package itself is for programs of your own: README.md and
docs/ say how.
"""

import argparse
import dataclasses
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from parallax import plan as plans
from parallax import validate
from parallax.layout import Layout
from parallax.models import gpt2
from parallax.plan import algorithms, between, estimates, faults, hardware, layouts, networks

MODELS = {
    "tiny": gpt2.Config(layers=4, heads=4, width=128, context=128, vocabulary=1000),
    "small": gpt2.SMALL,
    "medium": gpt2.MEDIUM,
    "large": gpt2.LARGE,
    "xl": gpt2.XL,
    "gpt3": estimates.GPT3,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one of the commands; 2 where what was asked for cannot be, with a sentence that says what can."""
    options = parser().parse_args(arguments)
    try:
        print(options.run(options))
    except (ImportError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def plan(options: argparse.Namespace) -> str:
    """The table of one layout, or of the best.

    Raises:
        ValueError: neither a layout nor a number of devices, a chip that is not known, or a layout that does not fit.
    """
    chip = hardware.named(options.hardware)
    if options.program is not None:
        return traced(options, chip)
    config = model(options)
    if options.layout is not None:
        layout = laid_out(options, config, options.devices)
        found = f"{plans.plan(config, layout, chip, batch=options.batch)}{failures(options, layout.devices)}"
        if options.islands == 1:
            return found
        return f"{found}\n\n{between.told(config, layout, islands=options.islands, every=options.every)}"
    if options.devices is None:
        raise ValueError(
            "plan needs --devices, to search, or --layout. Take --devices 8, or --layout data=2,tensor=4."
        )
    Layout.parse(f"precision={options.precision}", wording=validate.Wording(_flag, _precision_flag))
    found = layouts.search(
        config, options.devices, chip, batch=options.batch, precision=options.precision
    )
    best, moved = algorithms.replanned(found[0], networks.of(chip, options.devices))
    told = (
        f"\n\n{algorithms.table(moved)}\nwith the fastest: {best.seconds.total:.4g} s a step, {best.share_of_peak:.1%} of peak"
        if moved
        else ""
    )
    return f"{layouts.table(found, options.top)}\n\n{found[0]}{told}{failures(options, options.devices)}"


def traced(options: argparse.Namespace, chip: hardware.Hardware) -> str:
    """What a step in a user's file needs and does. Raises `ValueError` without a mesh, or as `user_files.read` does."""
    from parallax.plan import user_files

    if options.mesh is None:
        raise ValueError(
            "plan needs the mesh of the step in a file. Take --mesh data=256, or other axes and sizes."
        )
    world = user_files.world(options.mesh)
    step, shapes = user_files.read(options.program, world)
    return f"{plans.trace(step, shapes, world, hardware=chip)}{failures(options, math.prod(world.shape.values()))}"


def failures(options: argparse.Namespace, devices: int) -> str:
    """The best interval between checkpoints, where a rate of failures was given. Raises `ValueError` for one below 0."""
    if options.failures_per_device_year is None:
        return ""
    between = faults.mean_time(options.failures_per_device_year, devices)
    return f"\n\n{faults.plan(between, save=options.save_seconds, restart=options.restart_seconds)}"


def compare(options: argparse.Namespace) -> str:
    """Predictions beside the compiled step. Raises `ValueError` for a layout that does not fit."""
    import jax
    import jax.numpy as jnp

    from parallax import mesh
    from parallax.models import decoder

    config = model(options)
    layout = laid_out(options, config, options.devices)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", layout.devices)
    mesh_ = mesh.make(devices=jax.devices(), **layout.axes)
    prepared = decoder.train_step(
        gpt2.FAMILY, config, plans.ADAMW, layout, mesh_, batch=options.batch, key=jax.random.key(0)
    )
    windows = jax.ShapeDtypeStruct(
        (options.batch, config.context + 1),
        jnp.int32,
        sharding=mesh.shardings(jax.P(layout.batch_axes), mesh_),
    )
    compiled = prepared.train.lower(prepared.shapes, windows).compile()
    return plans.compared(
        plans.compare(
            plans.plan(config, layout, hardware.VIRTUAL_CPU, batch=options.batch), compiled
        )
    )


def first_difference(options: argparse.Namespace) -> str:
    """The first value of a layout's step that differs from one device's, or from a record.

    Raises:
        ValueError: a layout that does not fit, a record that is not there, or a folder for it that is not.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    from parallax import bisect, mesh
    from parallax.models import decoder

    config = model(options)
    layout = laid_out(options, config, options.devices)
    if options.record and not Path(options.record).is_file():
        raise ValueError(
            f"--record needs a file that --save wrote; there is none at {options.record}."
        )
    if options.save and not Path(options.save).absolute().parent.is_dir():
        raise ValueError(
            f"--save needs a folder that is there; {Path(options.save).absolute().parent} is none."
        )
    kept = (
        bisect.load(options.record) if options.record else None
    )  # a wrong file is told before anything is compiled
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_num_cpu_devices", layout.devices)
    windows = (
        np.random.default_rng(0)
        .integers(0, config.vocabulary, (options.batch, config.context + 1))
        .astype(np.int32)
    )

    def run(layout: Layout):
        mesh_ = mesh.make(devices=jax.devices()[: layout.devices], **layout.axes)
        settings = {
            "batch": options.batch,
            "key": jax.random.key(0),
            "compute": decoder.Compute(dtype=jnp.float64),
        }
        # AdamW would divide the rounding of a gradient that is zero, the keys' bias, by itself.
        prepared = decoder.train_step(
            gpt2.FAMILY, config, optax.sgd(0.1, momentum=0.9), layout, mesh_, **settings
        )
        return prepared.train, (prepared.init(), windows)

    right = kept or bisect.record(lambda: run(Layout()))
    split = bisect.record(lambda: run(layout), rows=layout.batch_axes, means=("context",))
    if options.save:
        split.save(options.save)
    return str(bisect.compare(right, split))


def compile_for(options: argparse.Namespace) -> str:
    """The table of a step compiled for a machine that is not there.

    Raises:
        ValueError: a layout that does not fit the model or the machine, or a step that does not fit its memory.
        ImportError: the machine's compiler is not installed.
    """
    import jax
    import jax.numpy as jnp

    from parallax import draw, islands, mesh
    from parallax.compiled import report, targets
    from parallax.draw import canvas
    from parallax.models import decoder, on_islands

    jax.config.update("jax_platforms", "cpu")
    config = model(options)
    if options.picture:
        canvas.figure(1, 1)  # an error now, not after minutes
    there = targets.target(options.target)
    count = options.islands
    if count < 1 or len(there.devices) % count:
        raise ValueError(
            f"compile needs --islands that divide the {len(there.devices)} devices; got {count}. Take --islands 1."
        )
    layout = laid_out(options, config, len(there.devices) // count, fixed=("devices",))
    sizes, key, batch = (
        {"island": count} | layout.axes if count > 1 else layout.axes,
        jax.random.key(0),
        count * options.batch,
    )
    mesh_ = mesh.make(devices=there.devices, **sizes)
    common = (gpt2.FAMILY, config, plans.ADAMW, layout, mesh_)
    if count == 1:
        prepared = decoder.train_step(*common, batch=batch, key=key)
    else:
        local = decoder.local_step(*common, batch=options.batch, key=key)
        prepared = on_islands.train_step(local, islands.nesterov(), every=options.every)
    split = mesh.shardings(jax.P(("island",) * (count > 1) + layout.batch_axes), mesh_)
    windows = jax.ShapeDtypeStruct((batch, config.context + 1), jnp.int32, sharding=split)
    begin = time.process_time()
    program = targets.compile(prepared.train, prepared.shapes, windows, target=there)
    taken = time.process_time() - begin
    timeline = program.timeline()
    rows = draw.replay(timeline, options.picture)
    if options.trace:
        draw.replay_trace(timeline, options.trace)
    if options.text:
        Path(options.text).write_text(program.text, encoding="utf-8")
    found = report.table(program, operations=plans.model_flops(config, batch), timeline=timeline)
    return f"{config.parameters:,} parameters, batch {batch} x {config.context} tokens\n{found}\n\n{rows}\n\n{_took(taken)}"


def _took(seconds: float) -> str:
    return f"compiled in {seconds:.0f} s of processor time"


def both_estimates(_: argparse.Namespace) -> str:
    """The two estimates."""
    return f"{estimates.gpt3_on_64()}\n\n\n{estimates.gpt_300m_on_8()}"


def model(options: argparse.Namespace) -> gpt2.Config:
    """The model that was asked for. Raises `ValueError` for a size below 1."""
    config = MODELS[options.model]
    sizes = {"context": options.context, "layers": options.layers}
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise ValueError(
                f"--{name} must be 1 or more; got {size}. The model has {getattr(config, name)}."
            )
    return dataclasses.replace(
        config, **{name: size for name, size in sizes.items() if size is not None}
    )


FLAGS = {
    "layers": "layers",
    "tokens": "context",
    "batch": "batch",
    "devices": "devices",
}  # of sizes


def laid_out(
    options: argparse.Namespace, config: gpt2.Config, devices: int | None, fixed: Sequence[str] = ()
) -> Layout:
    """The layout that was asked for, if it fits. Raises `ValueError`, which proposes flags that do, but for `fixed` sizes."""
    sizes = {**config.sizes, "batch": options.batch} | (
        {} if devices is None else {"devices": devices}
    )

    says = lambda name, value: f"--{FLAGS[name]} {value}" if name in FLAGS else f"{name}={value}"
    wording = validate.Wording(says, _flags, fixed=("heads", "hidden", "rows", *fixed))
    return Layout.parse(options.layout or "", sizes, wording)


def _flag(name: str, value: Any) -> str:
    return f"--{name} {value}"


def _precision_flag(_: Mapping[str, Any], change: Mapping[str, Any]) -> str:
    return " ".join(_flag(name, value) for name, value in change.items())


def _flags(written: Mapping[str, Any], change: Mapping[str, Any]) -> str:
    own = {name: value for name, value in change.items() if name not in FLAGS}
    words = ["--layout", validate.as_text({**written, **own}) or "data=1"] if written or own else []
    return " ".join(
        words + [f"--{FLAGS[name]} {value}" for name, value in change.items() if name in FLAGS]
    )


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    top = argparse.ArgumentParser(
        prog="python -m parallax",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(required=True)
    for name, run, words in (
        ("plan", plan, "what a layout needs, or which is best"),
        ("compile", compile_for, "a step compiled for a TPU or GPU machine that is not there"),
        ("compare", compare, "predictions beside the program compiled for virtual CPU devices"),
        (
            "bisect",
            first_difference,
            "the first value of a layout's step that differs from one device's",
        ),
    ):
        command = commands.add_parser(name, help=words)
        command.set_defaults(run=run)
        command.add_argument(
            "--model",
            choices=MODELS,
            default="tiny" if run in (compare, first_difference) else "small",
        )
        command.add_argument(
            "--context", type=int, help="tokens of a sequence, where other than the model's"
        )
        command.add_argument(
            "--layers", type=int, help="of the model, where other than the model's"
        )
        command.add_argument("--layout", help="as data=2,tensor=4,zero=1")
        command.add_argument("--devices", type=int, help="how many there are")
        command.add_argument(
            "--batch",
            type=int,
            default={plan: 512, compile_for: 64}.get(run, 16),
            help="sequences of the global batch",
        )
        if run is first_difference:
            command.add_argument(
                "--record", help="a record that an earlier run saved, instead of one device"
            )
            command.add_argument("--save", help="a file for the record of the layout's run")
        if run in (plan, compile_for):
            command.add_argument(
                "--islands",
                type=int,
                default=1,
                help="groups that talk seldom; layout and batch are one's (1)",
            )
            command.add_argument(
                "--every", type=int, default=50, help="steps between two rounds of the islands (50)"
            )
        if run is compile_for:
            command.add_argument("--target", required=True, help="as v5e:2x4, v5p:2x2x2, 8 x h100")
            command.add_argument(
                "--trace", help="a file for a trace of the estimated time, which Perfetto opens"
            )
            command.add_argument("--picture", help="a PNG, SVG or PDF file for a picture of it")
            command.add_argument("--text", help="a file for the compiled program's text")
        if run is plan:
            command.add_argument(
                "program",
                nargs="?",
                help="path/to/file.py:function, which takes a mesh: any step, traced",
            )
            command.add_argument("--mesh", help="of such a step, as data=256,tensor=8")
            command.add_argument(
                "--failures-per-device-year",
                type=float,
                help="for the best interval between checkpoints",
            )
            command.add_argument(
                "--save-seconds",
                type=float,
                default=20.0,
                help="that a save holds the steps up (20)",
            )
            command.add_argument(
                "--restart-seconds",
                type=float,
                default=600.0,
                help="from a failure to the next step (600)",
            )
            command.add_argument(
                "--hardware", default="a100", help=f"one of {', '.join(hardware.KNOWN)}"
            )
            command.add_argument(
                "--precision", default="bfloat16", help="of the search: full, bfloat16 or float16"
            )
            command.add_argument(
                "--top", type=int, default=8, help="layouts that the search prints"
            )
    commands.add_parser("estimates", help="two published estimates, recomputed").set_defaults(
        run=both_estimates
    )
    return top


if __name__ == "__main__":
    sys.exit(main())
