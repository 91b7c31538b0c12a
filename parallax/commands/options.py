"""Defines the options that several commands share, and makes the model, layout and chip that the
values of these options name."""

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

# For each model: the module of its family, and the name of its configuration in that module. "" if
# the function `model` makes the configuration. Only `model` imports these modules, so that `--help`
# is fast.
MODELS = {
    "tiny": ("gpt2", ""),
    "small": ("gpt2", "SMALL"),
    "medium": ("gpt2", "MEDIUM"),
    "large": ("gpt2", "LARGE"),
    "xl": ("gpt2", "XL"),
    "gpt3": ("gpt2", "GPT3"),
    "llama-tiny": ("llama", ""),
    "llama": ("llama", "SMALL"),
    "llama-1b": ("llama", "B1"),
    "llama-3b": ("llama", "B3"),
    "llama-8b": ("llama", "B8"),
    "llama-70b": ("llama", "B70"),
}
HARDWARE = "v100, a100, h100, h200, b200, v4, v5e, v5p, v6e, tpu7x"
# For each size that a layout is checked against, the flag that sets it.
FLAGS = {"layers": "layers", "tokens": "context", "batch": "batch", "devices": "devices"}


class Model(NamedTuple):
    """A decoder.

    Attributes:
        family: the `models.family.Family` of the decoder.
        config: the sizes of the decoder, as a configuration of its family.
    """

    family: Any
    config: Any


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """A formatter of help texts. It keeps the line breaks of the description, and shows the default
    of each option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        """Returns an option's help, followed by its default if it has one. (argparse alone would
        write "default: None" for an option without a default.)
        """
        return action.help if action.default is None else super()._get_help_string(action)


def add_command(
    commands: Any,
    name: str,
    run: Callable[[argparse.Namespace], str],
    words: str,
    *,
    model: str = "small",
    batch: int = 16,
) -> argparse.ArgumentParser:
    """Adds a command, and the options that all commands share; returns the command's parser.

    Args:
        commands: argparse's object for subcommands.
        name: the command's name.
        run: the function that runs the command. It takes the parsed options, and returns the text
            to print.
        words: a sentence about the command, for its help.
        model: the default of `--model`.
        batch: the default of `--batch`.
    """
    command = commands.add_parser(name, help=words, description=words, formatter_class=Help)
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


def add_island_options(command: argparse.ArgumentParser) -> None:
    """Adds the options for islands (groups of devices that train separately) to a command."""
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


def use_cpus(devices: int) -> None:
    """Makes JAX run on `devices` virtual CPU devices."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)


def check_folder(options: argparse.Namespace, name: str) -> None:
    """Raises `ValueError` if the option `name` is an output file in a folder that does not exist.
    Commands call this function first, so that no long work is lost.
    """
    file = getattr(options, name)
    if file and not (folder := Path(file).absolute().parent).is_dir():
        raise ValueError(f"--{name} needs an existing folder; {folder} does not exist.")


def model(options: argparse.Namespace) -> Model:
    """Returns the family and the sizes of the model that `--model` names. If `--context` or
    `--layers` are given, they replace the model's own sizes.

    Raises:
        ValueError: a size is below 1.
    """
    from parallax.models import gpt2, llama

    # `constant` is the name of the configuration in the family's module; "" for the tiny models.
    family, constant = MODELS[options.model]
    module = {"gpt2": gpt2, "llama": llama}[family]
    without_constant = {
        "tiny": gpt2.Config(layers=4, heads=4, width=128, context=128, vocabulary=1000),
        "llama-tiny": llama.Config(
            layers=4, heads=4, groups=2, width=128, hidden=256, context=128, vocabulary=1000
        ),
    }
    config = getattr(module, constant) if constant else without_constant[options.model]
    sizes = {"context": options.context, "layers": options.layers}
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise ValueError(
                f"--{name} must be 1 or more; got {size}. The model's own value is "
                f"{getattr(config, name)}."
            )
    given = {name: size for name, size in sizes.items() if size is not None}
    return Model(module.FAMILY, dataclasses.replace(config, **given))


def chip_of(options: argparse.Namespace) -> Any:
    """Returns the `Hardware` of `--hardware`. Raises `ValueError` for an unknown chip."""
    from parallax import hardware

    try:
        return hardware.named(options.hardware)
    except ValueError as error:
        raise ValueError(
            f"--hardware must be one of {HARDWARE}, or a slice of TPUs such as v5e:2x4 or "
            f"v5p:2x2x1; got {options.hardware!r}."
        ) from error


def layout_of(
    options: argparse.Namespace, config: Any, devices: int | None, fixed: Sequence[str] = ()
) -> Any:
    """Returns the `Layout` of `--layout`, after a check that it fits the model, the batch and the
    number of devices.

    Args:
        options: the parsed options.
        config: the sizes of the model.
        devices: the number of devices; None if every number is allowed.
        fixed: the sizes that the message of an error must not propose to change.

    Raises:
        ValueError: the layout does not fit. The message proposes flags that fit.
    """
    from parallax import validate
    from parallax.layout import Layout

    sizes = {**config.sizes, "batch": options.batch}
    if devices is not None:
        sizes["devices"] = devices
    # No flag sets these sizes of the model; "rows" are the rows of its padded vocabulary.
    fixed = ("heads", "hidden", "rows", *fixed)
    # `Wording` tells an error how to write a size, and a change that it proposes, as flags of the
    # command.
    wording = validate.Wording(_flag_or_field, _flags, fixed=fixed)
    return Layout.parse(options.layout or "", sizes, wording)


def _flag_or_field(name: str, value: Any) -> str:
    """Returns the text `--flag value` for a size; `name=value` if no flag sets this size."""
    return f"--{FLAGS[name]} {value}" if name in FLAGS else f"{name}={value}"


def flag(name: str, value: Any) -> str:
    """Returns the flag `--name value`."""
    return f"--{name} {value}"


def precision_flag(_: Mapping[str, Any], change: Mapping[str, Any]) -> str:
    """Returns the flags for a `change` that an error proposes: `--name value` for each field of the
    change. The first argument, the layout's fields that the user has written, is ignored.
    """
    return " ".join(flag(name, value) for name, value in change.items())


def _flags(written: Mapping[str, Any], change: Mapping[str, Any]) -> str:
    """Returns the flags for a `change` that an error proposes, such as "--layout data=2,tensor=4
    --batch 64". `--layout` has the fields that the user has `written`, updated by the fields in
    `change`. Each size in `change`, such as the batch, has a flag of its own (`FLAGS`).
    """
    from parallax import validate

    fields = {name: value for name, value in change.items() if name not in FLAGS}
    words = []
    if written or fields:
        words = ["--layout", validate.as_text({**written, **fields})]
    sizes = [f"--{FLAGS[name]} {value}" for name, value in change.items() if name in FLAGS]
    return " ".join(words + sizes)
