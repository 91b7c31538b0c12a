"""The command line: plan a split, compile it for absent machines, and find the value that is wrong.

Each command imports what it needs when it runs, so that `--help` is fast.
"""

import argparse
import dataclasses
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from parallax import __version__

DESCRIPTION = """\
Plan how to split a model over devices, compile the step for machines that you do
not have, and find the first value that differs from one device.

examples:
  parallax plan --model xl --devices 64 --hardware a100
  parallax plan --layout data=8,microbatches=8 --hardware h100 --islands 4
  parallax plan path/to/file.py:function --mesh data=256
  parallax compile --layout data=8 --target v5e:2x4
  parallax compare --layout data=2,stage=2,tensor=2
  parallax bisect --layout data=2,tensor=2

`parallax COMMAND --help` lists the options of a command.
`python -m parallax` is the same program.
"""
# The family of each model, and the constant of the family's module. `model` imports them.
MODELS = {
    "tiny": ("gpt2", ""),
    "small": ("gpt2", "SMALL"),
    "medium": ("gpt2", "MEDIUM"),
    "large": ("gpt2", "LARGE"),
    "xl": ("gpt2", "XL"),
    "gpt3": ("gpt2", ""),
    "llama-tiny": ("llama", ""),
    "llama": ("llama", "SMALL"),
    "llama-1b": ("llama", "B1"),
    "llama-3b": ("llama", "B3"),
    "llama-8b": ("llama", "B8"),
    "llama-70b": ("llama", "B70"),
}
HARDWARE = "v100, a100, h100, h200, b200, v4, v5e, v5p, v6e, tpu7x"
FLAGS = {"layers": "layers", "tokens": "context", "batch": "batch", "devices": "devices"}  # sizes


class Model(NamedTuple):
    """The family of a decoder and its sizes."""

    family: Any
    config: Any


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Return the exit status: 2, with the reason on stderr, for a wrong request."""
    options = parser().parse_args(arguments)
    try:
        print(options.run(options))
    except (ImportError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def plan(options: argparse.Namespace) -> str:
    """Return the plan of one layout, of the best layouts, or of a step in a file.

    Raises:
        ValueError: neither a layout nor a number of devices is given, a chip is unknown, or a
            layout does not fit.
    """
    from parallax import plan as plans

    if options.program is not None or options.mesh is not None:
        return plan_of_a_file(options)
    chip, made = chip_of(options), model(options)
    if options.layout is None:
        return search(options, made.config, chip)
    layout = layout_of(options, made.config, options.devices)
    if options.model.startswith("llama"):
        if options.islands != 1:
            raise ValueError("--islands counts the bytes of GPT-2 models. Use --model small.")
        traced = plans.traced(made.family, made.config, layout, chip, batch=options.batch)
        return f"{traced}{failures(options, layout.devices)}"
    text = f"{plans.plan(made.config, layout, chip, batch=options.batch)}"
    text += failures(options, layout.devices)
    if options.islands == 1:
        return text
    from parallax.plan import between

    rounds = between.told(made.config, layout, islands=options.islands, every=options.every)
    return f"{text}\n\n{rounds}"


def search(options: argparse.Namespace, config: Any, chip: Any) -> str:
    """Return the best layouts of `--devices`, and the plan of the first.

    Raises:
        ValueError: `--devices` is missing or below 1, or nothing fits.
    """
    from parallax import validate
    from parallax.layout import Layout
    from parallax.plan import algorithms, layouts, networks

    if options.devices is None:
        raise ValueError(
            "plan needs --devices, --layout, or a file and --mesh. "
            "Use --devices 8 to search, or --layout data=2,tensor=4 for one plan."
        )
    if options.model.startswith("llama"):
        raise ValueError(
            f"plan searches the layouts of GPT-2 models; got --model {options.model}. "
            f"Use --layout data={options.devices} for the plan of one layout."
        )
    for name in ("devices", "batch"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name} must be 1 or more; got {getattr(options, name)}.")
    wording = validate.Wording(_flag, _precision_flag)
    Layout.parse(f"precision={options.precision}", wording=wording)
    plans = layouts.search(
        config,
        options.devices,
        chip,
        batch=options.batch,
        precision=options.precision,
    )
    best, algorithms_by_axis = algorithms.replanned(plans[0], networks.of(chip, options.devices))
    text = f"{layouts.table(plans, options.top)}\n\n{plans[0]}"
    if algorithms_by_axis:
        text += (
            f"\n\n{algorithms.table(algorithms_by_axis)}\nwith the fastest: "
            f"{best.seconds.total:.4g} s a step, {best.share_of_peak:.1%} of peak"
        )
    return text + failures(options, options.devices)


def plan_of_a_file(options: argparse.Namespace) -> str:
    """Return the plan of a step in a user's file, from its trace.

    Raises:
        ValueError: the file or the mesh is missing, or `user_files.read` refuses the file.
    """
    from parallax import plan as plans
    from parallax.plan import user_files

    if options.program is None:
        raise ValueError(
            f"--mesh {options.mesh} is the mesh of a step in a file. Name the file, as in "
            f"`plan path/to/file.py:function --mesh {options.mesh}`, "
            f"or use --layout {options.mesh} for a model of --model."
        )
    if options.mesh is None:
        raise ValueError(f"plan {options.program} needs --mesh. Use --mesh data=256.")
    mesh = user_files.world(options.mesh)
    step, shapes = user_files.read(options.program, mesh)
    traced = plans.trace(step, shapes, mesh, hardware=chip_of(options))
    return f"{traced}{failures(options, math.prod(mesh.shape.values()))}"


def failures(options: argparse.Namespace, devices: int) -> str:
    """Return the best interval between checkpoints, or nothing without a rate of failures.

    Raises:
        ValueError: the rate is negative.
    """
    if options.failures_per_device_year is None:
        return ""
    from parallax.plan import faults

    between = faults.mean_time(options.failures_per_device_year, devices)
    schedule = faults.plan(between, save=options.save_seconds, restart=options.restart_seconds)
    return f"\n\n{schedule}"


def compare(options: argparse.Namespace) -> str:
    """Return the predictions beside the compiled step.

    Raises:
        ValueError: the layout does not fit, or the model is no GPT-2.
    """
    import jax
    import jax.numpy as jnp

    from parallax import hardware, mesh
    from parallax import plan as plans
    from parallax.models import decoder

    made = model(options)
    if options.model.startswith("llama"):
        raise ValueError(
            f"compare knows the formulas of GPT-2 models; got --model {options.model}. "
            "Use --model tiny, or `plan --layout`, which traces the step of any model."
        )
    layout = layout_of(options, made.config, options.devices)
    use_cpus(layout.devices)
    devices = mesh.make(devices=jax.devices(), **layout.axes)
    train_step = decoder.train_step(
        made.family,
        made.config,
        plans.ADAMW,
        layout,
        devices,
        batch=options.batch,
        key=jax.random.key(0),
    )
    windows = jax.ShapeDtypeStruct(
        (options.batch, made.config.context + 1),
        jnp.int32,
        sharding=mesh.shardings(jax.P(layout.batch_axes), devices),
    )
    compiled = train_step.train.lower(train_step.shapes, windows).compile()
    predicted = plans.plan(made.config, layout, hardware.VIRTUAL_CPU, batch=options.batch)
    return plans.compared(plans.compare(predicted, compiled))


def first_difference(options: argparse.Namespace) -> str:
    """Return the first value of a layout's step that differs from one device, or from a record.

    Raises:
        ValueError: the layout does not fit, or the record or its folder does not exist.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    from parallax import bisect, mesh
    from parallax.layout import Layout
    from parallax.models import decoder

    made = model(options)
    layout = layout_of(options, made.config, options.devices)
    if options.record and not Path(options.record).is_file():
        raise ValueError(
            f"--record needs a file that --save wrote; there is none at {options.record}."
        )
    if options.save and not Path(options.save).absolute().parent.is_dir():
        folder = Path(options.save).absolute().parent
        raise ValueError(f"--save needs an existing folder; {folder} does not exist.")
    # Load the record first: a wrong file is refused before anything is compiled.
    reference = bisect.load(options.record) if options.record else None
    use_cpus(layout.devices)
    jax.config.update("jax_enable_x64", True)
    generator = np.random.default_rng(0)
    shape = (options.batch, made.config.context + 1)
    windows = generator.integers(0, made.config.vocabulary, shape).astype(np.int32)
    # AdamW would divide the rounding of a gradient that is zero, such as the keys' bias, by itself.
    optimizer = optax.sgd(0.1, momentum=0.9)

    def run(layout: Layout):
        train_step = decoder.train_step(
            made.family,
            made.config,
            optimizer,
            layout,
            mesh.make(devices=jax.devices()[: layout.devices], **layout.axes),
            batch=options.batch,
            key=jax.random.key(0),
            compute=decoder.Compute(dtype=jnp.float64),
        )
        return train_step.train, (train_step.init(), windows)

    if reference is None:
        reference = bisect.record(lambda: run(Layout()))
    split = bisect.record(lambda: run(layout), rows=layout.batch_axes, means=("context",))
    if options.save:
        split.save(options.save)
    return str(bisect.compare(reference, split))


def compile_for(options: argparse.Namespace) -> str:
    """Return the report of a step that is compiled for `--target`.

    Raises:
        ValueError: the layout does not fit the model or the machine, or the step does not fit the
            memory.
        ImportError: the compiler of the machine is not installed.
    """
    import jax
    import jax.numpy as jnp

    from parallax import draw, islands, mesh
    from parallax import plan as plans
    from parallax.compiled import report, targets
    from parallax.draw import canvas
    from parallax.models import decoder, on_islands

    jax.config.update("jax_platforms", "cpu")
    made = model(options)
    if options.picture:
        canvas.figure(1, 1)  # raises now, not after minutes
    target = targets.target(options.target)
    count = options.islands
    if count < 1 or len(target.devices) % count:
        raise ValueError(
            f"--islands must divide the {len(target.devices)} devices; got {count}. "
            "Use --islands 1."
        )
    layout = layout_of(options, made.config, len(target.devices) // count, fixed=("devices",))
    key, batch = jax.random.key(0), count * options.batch
    axes = {"island": count, **layout.axes} if count > 1 else layout.axes
    devices = mesh.make(devices=target.devices, **axes)
    parts = (made.family, made.config, plans.ADAMW, layout, devices)
    if count == 1:
        train_step = decoder.train_step(*parts, batch=batch, key=key)
    else:
        local = decoder.local_step(*parts, batch=options.batch, key=key)
        train_step = on_islands.train_step(local, islands.outer_nesterov(), every=options.every)
    island_axes = ("island",) if count > 1 else ()
    sharding = mesh.shardings(jax.P(island_axes + layout.batch_axes), devices)
    shape = (batch, made.config.context + 1)
    windows = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)
    start = time.process_time()
    program = targets.compile(train_step.train, train_step.shapes, windows, target=target)
    seconds = time.process_time() - start
    timeline = program.timeline()
    rows = draw.replay(timeline, options.picture)
    if options.trace:
        draw.replay_trace(timeline, options.trace)
    if options.text:
        Path(options.text).write_text(program.text, encoding="utf-8")
    operations = None  # without a formula for the family, the report has no share of peak
    if not options.model.startswith("llama"):
        operations = plans.model_flops(made.config, batch)
    table = report.table(program, operations=operations, timeline=timeline)
    sizes = f"{made.config.parameters:,} parameters, batch {batch} x {made.config.context} tokens"
    return f"{sizes}\n{table}\n\n{rows}\n\n{_compile_time(seconds)}"


def _compile_time(seconds: float) -> str:
    return f"compiled in {seconds:.0f} s of processor time"


def both_estimates(_: argparse.Namespace) -> str:
    """Return the two estimates."""
    from parallax.plan import estimates

    return f"{estimates.gpt3_on_64()}\n\n\n{estimates.gpt_300m_on_8()}"


def use_cpus(devices: int) -> None:
    """Make JAX run on `devices` virtual CPU devices."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)


def model(options: argparse.Namespace) -> Model:
    """Return the model of `--model`, with `--context` and `--layers`.

    Raises:
        ValueError: a size is below 1.
    """
    from parallax.models import gpt2, llama
    from parallax.plan import estimates

    family, constant = MODELS[options.model]
    module = {"gpt2": gpt2, "llama": llama}[family]
    without_constant = {
        "tiny": gpt2.Config(layers=4, heads=4, width=128, context=128, vocabulary=1000),
        "gpt3": estimates.GPT3,
        "llama-tiny": llama.Config(
            layers=4, heads=4, groups=2, width=128, hidden=256, context=128, vocabulary=1000
        ),
    }
    config = getattr(module, constant) if constant else without_constant[options.model]
    sizes = {"context": options.context, "layers": options.layers}
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise ValueError(
                f"--{name} must be 1 or more; got {size}. The model has {getattr(config, name)}."
            )
    given = {name: size for name, size in sizes.items() if size is not None}
    return Model(module.FAMILY, dataclasses.replace(config, **given))


def chip_of(options: argparse.Namespace) -> Any:
    """Return the `Hardware` of `--hardware`. Raises `ValueError` for an unknown chip."""
    from parallax import hardware

    try:
        return hardware.named(options.hardware)
    except ValueError as error:
        raise ValueError(
            f"--hardware must be one of {HARDWARE}, or a slice of TPUs such as v5e:2x4; "
            f"got {options.hardware!r}."
        ) from error


def layout_of(
    options: argparse.Namespace, config: Any, devices: int | None, fixed: Sequence[str] = ()
) -> Any:
    """Return the `Layout` of `--layout`, if it fits.

    Raises:
        ValueError: it does not fit. The message proposes flags that do, but no size in `fixed`.
    """
    from parallax import validate
    from parallax.layout import Layout

    sizes = {**config.sizes, "batch": options.batch}
    if devices is not None:
        sizes["devices"] = devices
    fixed = ("heads", "hidden", "rows", *fixed)
    wording = validate.Wording(_flag_or_field, _flags, fixed=fixed)
    return Layout.parse(options.layout or "", sizes, wording)


def _flag_or_field(name: str, value: Any) -> str:
    return f"--{FLAGS[name]} {value}" if name in FLAGS else f"{name}={value}"


def _flag(name: str, value: Any) -> str:
    return f"--{name} {value}"


def _precision_flag(_: Mapping[str, Any], change: Mapping[str, Any]) -> str:
    return " ".join(_flag(name, value) for name, value in change.items())


def _flags(written: Mapping[str, Any], change: Mapping[str, Any]) -> str:
    from parallax import validate

    own = {name: value for name, value in change.items() if name not in FLAGS}
    words = []
    if written or own:
        words = ["--layout", validate.as_text({**written, **own}) or "data=1"]
    sizes = [f"--{FLAGS[name]} {value}" for name, value in change.items() if name in FLAGS]
    return " ".join(words + sizes)


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of the description, and shows each default that an option has."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    top = argparse.ArgumentParser(prog="parallax", description=DESCRIPTION, formatter_class=_Help)
    top.add_argument("--version", action="version", version=f"parallax {__version__}")
    commands = top.add_subparsers(required=True, metavar="COMMAND", title="commands")
    planned = _command(
        commands,
        "plan",
        plan,
        "Predict the memory, traffic and time of a layout, or rank all layouts.",
        batch=512,
    )
    _plan_options(planned)
    compiled = _command(
        commands,
        "compile",
        compile_for,
        "Compile a step for a TPU or GPU machine that is not here.",
        batch=64,
    )
    _compile_options(compiled)
    _command(
        commands,
        "compare",
        compare,
        "Compare the predictions with a program compiled for virtual CPU devices.",
        model="tiny",
    )
    bisected = _command(
        commands,
        "bisect",
        first_difference,
        "Find the first value of a split step that differs from one device.",
        model="tiny",
    )
    bisected.add_argument(
        "--record",
        metavar="FILE",
        help="compare with this record of an earlier --save, not with one device",
    )
    bisected.add_argument(
        "--save", metavar="FILE", help="write a record of the split run to this file"
    )
    estimates = commands.add_parser("estimates", help="Recompute two published estimates.")
    estimates.set_defaults(run=both_estimates)
    return top


def _command(commands, name, run, words, *, model="small", batch=16) -> argparse.ArgumentParser:
    """Add a command with the options that all commands have."""
    command = commands.add_parser(name, help=words, description=words, formatter_class=_Help)
    command.set_defaults(run=run)
    add = command.add_argument
    add(
        "--model",
        choices=MODELS,
        default=model,
        metavar="NAME",
        help=f"the model: {', '.join(MODELS)}",
    )
    add("--layers", type=int, metavar="N", help="the number of layers; by default the model's own")
    add(
        "--context",
        type=int,
        metavar="TOKENS",
        help="tokens per sequence; by default the model's own",
    )
    add("--batch", type=int, default=batch, metavar="N", help="sequences in the global batch")
    add("--layout", metavar="AXES", help="the split, such as data=2,tensor=4,zero=1")
    add(
        "--devices",
        type=int,
        metavar="N",
        help="the number of devices; by default the product of the layout's axes",
    )
    return command


def _island_options(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add(
        "--islands",
        type=int,
        default=1,
        metavar="N",
        help="groups that exchange weights every --every steps; layout and batch are per group",
    )
    add(
        "--every",
        type=int,
        default=50,
        metavar="STEPS",
        help="steps between two exchanges of the islands",
    )


def _compile_options(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--target", required=True, help="the machine, such as v5e:2x4, v5p:2x2x2 or '8 x h100'")
    add("--trace", metavar="FILE", help="write a trace of the estimated time, for Perfetto")
    add(
        "--picture",
        metavar="FILE",
        help="write a picture of the estimated time, as PNG, SVG or PDF",
    )
    add("--text", metavar="FILE", help="write the text of the compiled program")
    _island_options(command)


def _plan_options(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add(
        "program",
        nargs="?",
        metavar="FILE:FUNCTION",
        help="plan any step instead of a model: FUNCTION(mesh) returns (step, shapes)",
    )
    add("--mesh", metavar="AXES", help="the mesh of such a step, such as data=256,tensor=8")
    add(
        "--hardware",
        default="a100",
        metavar="CHIP",
        help=f"one of {HARDWARE}, or a slice of TPUs such as v5e:2x4",
    )
    add(
        "--precision",
        default="bfloat16",
        metavar="NAME",
        help="the precision of a search: full, bfloat16 or float16",
    )
    add(
        "--top", type=int, default=8, metavar="N", help="the number of layouts that a search prints"
    )
    _island_options(command)
    add(
        "--failures-per-device-year",
        type=float,
        metavar="RATE",
        help="add the best interval between checkpoints for this rate",
    )
    add(
        "--save-seconds",
        type=float,
        default=20.0,
        metavar="S",
        help="the time that a save stops the training",
    )
    add(
        "--restart-seconds",
        type=float,
        default=600.0,
        metavar="S",
        help="the time from a failure to the next step",
    )


if __name__ == "__main__":
    sys.exit(main())
