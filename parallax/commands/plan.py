"""The command `parallax plan` predicts memory, traffic and time of a step, or ranks all layouts."""

import argparse
import math
from typing import Any

from parallax.commands.options import (
    HARDWARE,
    add_command,
    add_island_options,
    chip_of,
    flag,
    layout_of,
    model,
    precision_flag,
)


def add_plan(commands: Any) -> None:
    """Adds the command `plan` to argparse's `commands`. `add_command` adds the options that all
    commands share: the model, the layout, and `--batch`, whose default is 512 here."""
    command = add_command(
        commands,
        "plan",
        plan,
        "Predict the memory, traffic and time of a layout, or rank all layouts.",
        batch=512,
    )
    option = command.add_argument
    option(
        "program",
        nargs="?",
        metavar="FILE:FUNCTION",
        help="plan any step instead of a model: FUNCTION(mesh) returns (step, shapes)",
    )
    option("--mesh", metavar="AXES", help="the mesh of such a step, such as data=256,tensor=8")
    option(
        "--hardware",
        default="a100",
        metavar="CHIP",
        help=f"one of {HARDWARE}, or a slice of TPUs such as v5e:2x4",
    )
    option(
        "--precision",
        default="bfloat16",
        metavar="NAME",
        help="the precision of a search: full, bfloat16 or float16",
    )
    option(
        "--attention-kernel",
        action="store_true",
        help="plan a step whose attention keeps no scores, such as context.blockwise",
    )
    option(
        "--top", type=int, default=5, metavar="N", help="the number of layouts that a search prints"
    )
    add_island_options(command)
    _add_failure_options(command)
    # The values of options that the plan of a file does not use, if they are not given.
    names = ("model", "layers", "context", "batch", "layout", "devices", "precision")
    names += ("attention_kernel", "islands")
    command.set_defaults(unused={name: command.get_default(name) for name in names})


def _add_failure_options(command: argparse.ArgumentParser) -> None:
    """Adds the options for the best interval between checkpoints."""
    option = command.add_argument
    option(
        "--failures-per-device-year",
        type=float,
        metavar="RATE",
        help="add the best interval between checkpoints for this rate",
    )
    option(
        "--save-seconds",
        type=float,
        default=20.0,
        metavar="S",
        help="the time that a save stops the training",
    )
    option(
        "--restart-seconds",
        type=float,
        default=600.0,
        metavar="S",
        help="the time from a failure to the next step",
    )


def plan(options: argparse.Namespace) -> str:
    """Returns a plan as text: the predicted memory, traffic and time of a step. With a file and
    `--mesh`, it is the plan of the step in that file. With `--layout`, it is the plan of this
    layout. With neither a file nor `--layout`, the function searches for the best layouts.

    Islands are groups of devices that train separately and exchange their weights every `--every`
    steps. With several `--islands`, the plan of a layout also has the bytes that the islands
    exchange. A search and the plan of a file do not use `--islands`.

    Raises:
        ValueError: there is no layout, no file and no number of devices; only one of a file and
            `--mesh` is given; a chip is unknown; or a layout does not fit.
    """
    from parallax import plan as plans

    if options.program is not None or options.mesh is not None:
        return plan_of_a_file(options)
    chip, chosen = chip_of(options), model(options)
    if options.layout is None:
        return search(options, chosen.config, chip)
    layout = layout_of(options, chosen.config, options.devices)
    planned = plans.plan(
        chosen.config, layout, chip, batch=options.batch, attention_kernel=kernel_of(options)
    )
    exchanges = ""
    if options.islands != 1:
        from parallax.plan import island_traffic

        # `told` returns a text about the bytes that the islands exchange.
        exchanges = "\n\n" + island_traffic.told(
            chosen.config, layout, islands=options.islands, every=options.every
        )
    # The layout is that of one island, and a device of any island may fail.
    interval = checkpoint_interval(options, options.islands * layout.devices)
    return f"{planned}{interval}{exchanges}"


def search(options: argparse.Namespace, config: Any, chip: Any) -> str:
    """Returns a text in several parts:

    * a table of the fastest layouts for `--devices` devices;
    * the plan of one layout: the simplest of those that are nearly as fast as the fastest one;
    * if this plan has collectives of `jax.lax` along single mesh axes: for each such axis, the
      collective algorithm (such as a ring) that is predicted to be the fastest;
    * if `--failures-per-device-year` is given: the best interval between checkpoints.

    Raises:
        ValueError: `--devices` is missing; `--devices` or `--batch` is below 1; `--precision` is
            unknown; `--islands` is not 1; or no layout of exactly `--devices` devices fits into
            their memory.
    """
    from parallax import validate
    from parallax.layout import Layout
    from parallax.plan import algorithms, layouts

    if options.devices is None:
        raise ValueError(
            "plan needs --devices, or --layout, or FILE:FUNCTION with --mesh. "
            "Use --devices 8 to search, or --layout data=2,tensor=4 for one plan."
        )
    for name in ("devices", "batch"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name} must be 1 or more; got {getattr(options, name)}.")
    if options.islands != 1:
        raise ValueError(
            f"--islands {options.islands} needs --layout: a search ranks the layouts of one "
            "island. Search without --islands, then plan your choice with --layout and --islands."
        )
    # `Wording` tells an error how to write a value, and a change that it proposes, as flags of this
    # command.
    wording = validate.Wording(flag, precision_flag)
    # The result of this call is not used: the call only refuses an unknown precision, with a
    # message that names the flag.
    Layout.parse(f"precision={options.precision}", wording=wording)
    plans = layouts.search(
        config,
        options.devices,
        chip,
        batch=options.batch,
        choices=layouts.Choices(precision=options.precision),
        count=options.top,
        attention_kernel=kernel_of(options),
    )
    best = layouts.simplest(plans)
    text = f"{layouts.table(plans, options.top)}\n\n{best}"
    if best.algorithms:
        text += f"\n\n{algorithms.table(best.algorithms)}"
    return text + checkpoint_interval(options, options.devices)


def kernel_of(options: argparse.Namespace) -> bool | None:
    """Returns True with `--attention-kernel`: the attention does not store its scores for the
    backward pass. Returns None without this option: the plan assumes the attention that the
    training recipe uses on the chip.
    """
    return options.attention_kernel or None


def plan_of_a_file(options: argparse.Namespace) -> str:
    """Returns, as text, the plan of a step that a function in the user's file makes. The step is
    only traced, and not run.

    Raises:
        ValueError: the file or the mesh is missing, an option of a model is given, or
            `user_files.read` refuses the file.
    """
    from parallax import plan as plans
    from parallax.plan import user_files

    if options.program is None:
        raise ValueError(
            f"--mesh {options.mesh} applies only to a step in a file, and no file is named. Name "
            f"the file, as in `plan path/to/file.py:function --mesh {options.mesh}`, or use "
            f"--layout {options.mesh} to plan the model that --model names."
        )
    if options.mesh is None:
        raise ValueError(f"plan {options.program} needs --mesh. Use --mesh data=256.")
    given = [name for name, default in options.unused.items() if getattr(options, name) != default]
    if given:
        words = " ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ValueError(
            f"plan {options.program} does not use {words}: the file makes the model and its split. "
            f"Leave out {words}."
        )
    mesh = user_files.world(options.mesh)  # an abstract mesh: no device is needed
    step, shapes = user_files.read(options.program, mesh)
    traced = plans.trace(step, shapes, mesh, hardware=chip_of(options))
    return f"{traced}{checkpoint_interval(options, math.prod(mesh.shape.values()))}"


def checkpoint_interval(options: argparse.Namespace, devices: int) -> str:
    """Returns a text about the best interval between checkpoints for `--failures-per-device-year`;
    "" if this option is not given. `devices` is the number of devices that may fail.

    Raises:
        ValueError: `--failures-per-device-year` is negative.
    """
    if options.failures_per_device_year is None:
        return ""
    from parallax.plan import faults

    between = faults.mean_time(options.failures_per_device_year, devices)
    schedule = faults.plan(between, save=options.save_seconds, restart=options.restart_seconds)
    return f"\n\n{schedule}"
