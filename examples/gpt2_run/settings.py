"""The flags of the example, each with its default, its meaning and its range:
`python examples/gpt2.py --help` prints them.

A wrong flag is reported at once: JAX, which takes seconds to import, is imported only
if the error has to propose another layout.
"""

import dataclasses
import importlib.util
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

SHIPPED = Path(__file__).resolve().parent.parent / "data"


@dataclasses.dataclass(frozen=True)
class Settings:
    """The flags of a run."""

    # The sizes to start from; `small` to `xl` are the published ones.
    model: Literal["tiny", "small", "medium", "large", "xl"] = "tiny"
    # Start from the GPT-2 in this folder, of safetensors and `config.json`: its sizes
    # and weights, with this run's dropout.
    source: Annotated[Path | None, tyro.conf.arg(name="from")] = None
    # Layers, instead of the model's.
    layers: int | None = None
    # Attention heads, instead of the model's.
    heads: int | None = None
    # The width of the residual stream, instead of the model's.
    width: int | None = None
    # The share of activations dropped, in the residual stream and in attention.
    dropout: float = 0.0

    # Any UTF-8 text. Its last tenth is held out.
    text: Path = SHIPPED / "state_of_the_union.txt"
    # The tokens: bytes, or GPT-2's 50,257 pieces of words.
    tokenizer: Literal["bytes", "gpt2"] = "bytes"

    # Replicas, each with its part of the batch. By default all devices that the other
    # axes leave.
    data: int | None = None
    # Pipeline stages, each with its part of the layers. By default 2 if no axis is
    # given and four divides the number of devices.
    stage: int | None = None
    # Devices that share each layer (tensor parallelism). By default 2 if no axis is
    # given and the number of devices is even.
    tensor: int | None = None
    # Devices that share the tokens of each sequence, by ring attention.
    context: int = 1
    # The number of virtual CPU devices. If there are GPUs or TPUs, the run uses all of
    # those instead.
    devices: int = 8
    # The collective algorithm: a ring, XLA's own collectives, or the fastest one for
    # each size, measured at the start.
    all_reduce: Literal["ring", "psum", "auto"] = "ring"
    # Microbatches of each replica's batch, whose gradients are accumulated.
    microbatches: int = 4
    # The pipeline schedule: `gpipe`, `interleaved`, `one_f_one_b` or `zero_bubble`, the
    # last two also as `one_f_one_b_lockstep` and `zero_bubble_lockstep`; or your
    # FILE.csv.
    schedule: str = "one_f_one_b_lockstep"
    # Chunks of layers on each stage. More than 1 makes the pipeline interleaved.
    chunks: int | None = None
    # The ZeRO stage: 1 splits the optimizer's state over the replicas, 2 also the sums
    # of gradients, 3 also the parameters.
    zero: Literal[0, 1, 2, 3] = 0
    # Split the residual stream by tokens over the tensor axis (sequence parallel).
    sequence: bool = False
    # Let each device of the tensor axis send its part of the messages between stages.
    # It helps if stages are on different machines.
    split_sends: bool = False
    # The precision of the computation; parameters stay in float32, and float16 scales
    # the loss.
    precision: Literal["full", "bfloat16", "float16"] = "full"
    # Activations that the backward pass computes again (remat): gathered parameters,
    # attention, all but matmuls, or all of a block or a stage.
    remat: Literal["none", "gathers", "attention", "products", "block", "stage"] = (
        "none"
    )

    # Optimizer steps.
    steps: int = 300
    # The number of first steps that one device computes too, to compare the losses. By
    # default 3 for the model `tiny`, and 0 for larger ones.
    compare: int | None = None
    # Sequences per step, on all devices together.
    batch: int = 16
    # Tokens per sequence. By default the model's context; more extend the context.
    length: int | None = None
    # The peak learning rate. The warm-up takes a tenth of the steps, at most 100; then
    # a cosine falls to a tenth of the peak.
    learning_rate: float = 3e-3
    # The seed of the weights, the order of the text, dropout and the sample. The same
    # seed gives the same losses, on any layout.
    seed: int = 0

    # The number of skipped steps, whose loss or gradient was not finite, after which
    # the run stops.
    skip_budget: int = 10
    # Steps from one held-out loss to the next. The run ends with one in any case.
    evaluate_every: int = 75
    # The approximate number of held-out tokens, always the first ones.
    evaluate_tokens: int = 65536
    # The text that the sample at the end continues.
    prompt: str = "My fellow Americans, "
    # The folder for checkpoints, metrics and pictures. If it holds this run already,
    # the run continues from its last checkpoint.
    out: Path = Path("out/gpt2")
    # The most steps that a killed run computes again. Saves begin twice as often.
    checkpoint_every: int = 100
    # The number of newest checkpoints to keep.
    keep: int = 2
    # Also keep the checkpoints of steps that are multiples of this number.
    keep_every: int | None = None
    # Steps from one comparison of the devices' copies of the state to the next, which
    # finds a flipped bit; 0 makes none.
    fingerprint_every: int = 0
    # The number of returns to a checkpoint, because copies differ or losses spike,
    # after which the run stops.
    rollback_budget: int = 3
    # A loss above this many times its running median is a spike, and its step is
    # skipped. By default none is.
    spike_factor: float | None = None
    # The number of spikes in 64 steps after which the run returns to an earlier
    # checkpoint and skips their batches.
    spike_budget: int = 3
    # The most seconds of a step. After that the job ends and names the slow rank.
    watchdog: float = 600.0
    # The most seconds until all processes are connected.
    connect: float = 300.0
    # The most seconds from the connection to the second step.
    start_up: float = 1800.0
    # Steps `FIRST:LAST` whose profiler trace is written into OUT/profile.
    profile: str | None = None
    # Write the metrics to OUT/tensorboard too. Needs tensorboardX.
    tensorboard: bool = False
    # Send the metrics to this project of Weights & Biases too. Needs wandb.
    wandb: str | None = None


MANY = 2**31 - 1  # steps and the like are counted in int32
LARGE = 2**20  # beyond every size that was published
# The least and the most that each number may be, both allowed.
RANGES = {
    **dict.fromkeys(
        (
            "layers",
            "heads",
            "width",
            "length",
            "batch",
            "data",
            "stage",
            "tensor",
            "context",
        ),
        (1, LARGE),
    ),
    **dict.fromkeys(("microbatches", "chunks"), (1, LARGE)),
    "devices": (1, 1024),
    "seed": (0, 2**32 - 1),
    **dict.fromkeys(
        ("skip_budget", "fingerprint_every", "rollback_budget", "compare"), (0, MANY)
    ),
    "checkpoint_every": (2, MANY),
    **dict.fromkeys(
        ("steps", "evaluate_every", "evaluate_tokens", "keep", "keep_every"), (1, MANY)
    ),
    "spike_factor": (1.01, 1e6),
    "spike_budget": (1, MANY),
    "dropout": (0.0, 0.99),
    "learning_rate": (1e-30, 1e30),
    "watchdog": (0.001, 1e6),
    **dict.fromkeys(("connect", "start_up"), (1.0, 1e6)),
}


# What decides whether a layout fits the model, the batch and the devices.
FIT = (
    "model",
    "source",
    "tokenizer",
    "layers",
    "heads",
    "width",
    "length",
    "batch",
    "data",
    "stage",
    "tensor",
    "devices",
)
FIT += ("context", "dropout")
FIT += (
    "microbatches",
    "schedule",
    "chunks",
    "zero",
    "sequence",
    "split_sends",
    "remat",
)


def check(settings: Settings) -> None:
    """Raises `ValueError` if `faults` finds a wrong flag. Nothing is written before
    this check."""
    all_faults = list(faults(settings))
    if all_faults:
        needed, change = all_faults[0]
        changes: dict[str, Any] = {}
        for _, cure in all_faults:
            changes |= cure
        if change and (instead := _instead(settings, changes)) is not None:
            needed += f" {_cure(instead)}"
        raise ValueError(needed)


def faults(settings: Settings) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields a pair for each wrong flag: a message, and a dict from names of fields to
    the values to use instead. A flag that is wrong only for some texts or devices is
    not found here."""
    for name, (least, most) in RANGES.items():
        value = getattr(settings, name)
        if value is not None and not least <= value <= most:
            bound = (
                f"{least} or more"
                if value < least
                else f"{most} or less"
                if value > most
                else f"from {least} to {most}"
            )
            yield (
                f"{flag(name)} must be {bound}; got {value}.",
                {name: getattr(Settings, name)},
            )
    steps = re.fullmatch(r"([0-9]{1,9}):([0-9]{1,9})", settings.profile or "1:0")
    if steps is None or (settings.profile and int(steps[2]) < int(steps[1])):
        needed = (
            "--profile must be FIRST:LAST, two steps such as 10:12; got "
            f"{settings.profile}."
        )
        yield needed, {"profile": "10:12"}
    for name in ("layers", "heads", "width", "model"):
        if settings.source is not None and getattr(settings, name) != getattr(
            Settings, name
        ):
            yield (
                f"--from {settings.source} has its own sizes; got {flag(name)} too. "
                f"Leave {flag(name)} out.",
                {},
            )
    if os.path.lexists(settings.out) and not os.path.isdir(settings.out):
        yield (
            f"{settings.out}: needed a folder for the results, found a file. Choose "
            "another --out.",
            {},
        )
    for name, package in (("tensorboard", "tensorboardX"), ("wandb", "wandb")):
        if getattr(settings, name) and importlib.util.find_spec(package) is None:
            yield (
                f"--{name} needs {package}: pip install {package}, or leave it out.",
                {name: getattr(Settings, name)},
            )


def flag(name: str) -> str:
    """Returns the flag of a field: `--keep-every` for `keep_every`."""
    return f"--{name.replace('_', '-')}"


def spelt(change: Mapping[str, Any]) -> str:
    """Returns the command-line flags for `change`, a dict from names of fields to
    values. For {"data": 4, "sequence": False}, the flags are `--data 4 --no-sequence`.
    """
    flags = []
    for name, value in change.items():
        if isinstance(value, bool):
            flags.append(flag(name if value else f"no_{name}"))
        else:
            flags.append(f"{flag(name)} {value}")
    return " ".join(flags)


def _cure(change: Mapping[str, Any]) -> str:
    """Returns the advice to change some flags. For {"data": 4, "keep_every": None}, the
    advice is "Use --data 4 and leave out --keep-every."."""
    given = spelt({name: value for name, value in change.items() if value is not None})
    left_out = " ".join(flag(name) for name, value in change.items() if value is None)
    if not left_out:
        return f"Use {given}."
    return (
        f"Use {given} and leave out {left_out}." if given else f"Leave out {left_out}."
    )


def _instead(settings: Settings, change: dict[str, Any]) -> dict[str, Any] | None:
    """Returns `change`, extended by further changes if `change` alone does not make all
    flags valid on virtual CPU devices. Returns None if no valid flags are found, or if
    the flags have --from."""
    after = dataclasses.replace(settings, **change)
    if next(faults(after), None) is not None or after.source is not None:
        return None
    if all(getattr(after, name) == getattr(Settings, name) for name in FIT):
        return change
    from gpt2_run import fitting  # JAX, which takes seconds to import

    return fitting.mended(
        settings, change, fitting.World(None, fitting.VOCABULARIES[settings.tokenizer])
    )


def profiled(settings: Settings) -> range:
    """Returns the steps to trace."""
    first, _, last = (settings.profile or "1:0").partition(":")
    return range(int(first), int(last) + 1)
