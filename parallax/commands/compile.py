"""The command `parallax compile` compiles a step for a TPU or GPU machine that is not here."""

import argparse
import time
from pathlib import Path
from typing import Any

from parallax.commands.options import (
    Model,
    add_command,
    add_island_options,
    check_folder,
    layout_of,
    model,
)


def add_compile(commands: Any) -> None:
    """Adds the command `compile` to argparse's `commands`, with its options."""
    command = add_command(
        commands,
        "compile",
        compile_for,
        "Compile a step for a TPU or GPU machine that is not here.",
        batch=64,
    )
    option = command.add_argument
    option("--target", required=True, help="the machine, such as v5e:2x4, v5p:2x2x2 or '8 x h100'")
    option("--trace", metavar="FILE", help="write a trace of the estimated time, for Perfetto")
    option(
        "--picture",
        metavar="FILE",
        help="write a picture of the estimated time, as PNG, SVG or PDF",
    )
    option("--text", metavar="FILE", help="write the text of the compiled program")
    # Islands are groups of devices that exchange their weights only once in many steps.
    add_island_options(command)


def compile_for(options: argparse.Namespace) -> str:
    """Compiles a training step for the machine `--target`, and returns a report about the compiled
    step as text. Also writes the files of `--trace`, `--picture` and `--text`.

    Raises:
        ValueError: the layout does not fit the model or the machine, or the step does not fit into
            the memory.
        ImportError: the compiler of the machine is not installed.
    """
    from parallax import draw
    from parallax import plan as plans
    from parallax.compiled import report, targets
    from parallax.draw import canvas

    for name in ("trace", "picture", "text"):
        check_folder(options, name)
    targets.choose_platform(options.target)
    if options.picture:
        canvas.figure(1, 1)  # if matplotlib is missing, this raises before the long compilation
    chosen, target = model(options), targets.target(options.target)
    step, arguments = _step(options, chosen, target)
    # The processor time of all threads does not grow when other programs use the processors.
    start = time.process_time()
    program = targets.compile(step, *arguments, target=target)
    seconds = time.process_time() - start
    timeline = program.timeline()
    # The timeline as text: a line for computing, and one for each set of axes. `replay` also writes
    # the picture, if `options.picture` names a file.
    lines = draw.replay(timeline, options.picture)
    if options.trace:
        draw.replay_trace(timeline, options.trace)
    if options.text:
        Path(options.text).write_text(program.text, encoding="utf-8")
    batch = options.islands * options.batch
    # The formula for the operations holds for a GPT-2 only. For any other model the report has no
    # share of the peak rate.
    operations = None
    if not options.model.startswith("llama"):
        operations = plans.model_flops(chosen.config, batch)
    table = report.table(program, operations=operations, timeline=timeline)
    sizes = f"{chosen.config.parameters:,} parameters, batch {batch} x {chosen.config.context}"
    return f"{sizes} tokens\n{table}\n\n{lines}\n\n{_compile_time(seconds)}"


def _step(options: argparse.Namespace, chosen: Model, target: Any) -> tuple[Any, tuple[Any, Any]]:
    """Returns the training step on the devices of `target`, and the shapes of its two arguments,
    the state and the token windows. Islands are groups of devices that train separately and
    exchange their weights only once in many steps. With several islands, each island has the layout
    and the batch that `options` name. Raises `ValueError` if the islands cannot have equally many
    devices, or if the layout does not fit the model, the batch or the devices of an island.
    """
    import jax
    import jax.numpy as jnp

    from parallax import islands, mesh, plan
    from parallax.models import decoder, on_islands

    count = options.islands
    if count < 1 or len(target.devices) % count:
        raise ValueError(
            f"--islands must divide the {len(target.devices)} devices; got {count}. "
            "Use --islands 1."
        )
    # `fixed` keeps the devices: an error must not propose another number than the target has.
    layout = layout_of(options, chosen.config, len(target.devices) // count, fixed=("devices",))
    key, batch = jax.random.key(0), count * options.batch
    axes = {"island": count, **layout.axes} if count > 1 else layout.axes
    world = mesh.make(devices=target.devices, **axes)
    parts = (chosen.family, chosen.config, plan.ADAMW, layout, world)
    if count == 1:
        train_step = decoder.train_step(*parts, batch=batch, key=key)
    else:
        one_island = decoder.train_step(*parts, batch=options.batch, key=key)
        # In each exchange, every `every` steps, the outer optimizer applies the mean change of the
        # islands' weights.
        train_step = on_islands.train_step(
            one_island, islands.outer_nesterov(), every=options.every
        )
    island_axes = ("island",) if count > 1 else ()
    windows = jax.ShapeDtypeStruct(
        (batch, chosen.config.context + 1),
        jnp.int32,
        sharding=mesh.shardings(jax.P(island_axes + layout.batch_axes), world),
    )
    return train_step.train, (train_step.shapes, windows)


def _compile_time(seconds: float) -> str:
    """Returns the line of the report that states the time of the compilation."""
    return f"compiled in {seconds:.0f} s of processor time"
