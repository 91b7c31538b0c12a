"""Checks that the flags go together, and that they fit the training text and the
devices. An error proposes only flags that pass these checks."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from gpt2_run.settings import Settings, faults, spelt
from parallax import schedule, validate
from parallax.layout import Layout
from parallax.models import gpt2, recipe
from parallax.models.checked_numbers import divisor
from parallax.schedule import Schedule

INTERLEAVED = "interleaved"  # 1F1B in two chunks
SCHEDULES = (*validate.CHOICES["schedule"], INTERLEAVED)
TINY = gpt2.Config(layers=4, heads=4, width=128, context=64, vocabulary=256)
MODELS = {
    "tiny": TINY,
    "small": gpt2.SMALL,
    "medium": gpt2.MEDIUM,
    "large": gpt2.LARGE,
    "xl": gpt2.XL,
}
VOCABULARIES = {"bytes": 256, "gpt2": gpt2.SMALL.vocabulary}  # of the tokenizers
SIZES = {
    "layers": "layers",
    "heads": "heads",
    "tokens": "length",
    "batch": "batch",
    "devices": "devices",
}  # and their flags
Change = dict[str, Any]  # of flags, by the names of `Settings`
OF_LAYOUT = (  # flags that are fields of a layout
    "context",
    "microbatches",
    "zero",
    "sequence",
    "split_sends",
    "precision",
    "remat",
)


class World(NamedTuple):
    """What the flags of a run must fit: its devices, processes, vocabulary and text,
    and the model that it starts from.

    Attributes:
        devices: the number of devices; None: as many as `--devices` says.
        vocabulary: the number of different tokens of the tokenizer.
        processes: the number of processes that share the devices.
        source: the sizes of the model to start from, if there is one.
        room: a function that returns two numbers: the number of tokens to train on, and
            the number of held-out tokens.
    """

    devices: int | None
    vocabulary: int
    processes: int = 1
    source: gpt2.Config | None = None
    room: Callable[[], tuple[int, int]] = lambda: (2**62, 2**62)


class Fitted(NamedTuple):
    """The values that follow from a run's flags: the model's sizes, the number of
    tokens in a sequence, the layout, and the pipeline's schedule."""

    config: gpt2.Config
    length: int
    layout: Layout
    schedule: Schedule


def fitted(settings: Settings, world: World) -> Fitted:
    """Returns the sizes, the layout and the schedule that the flags ask for. Raises
    `ValueError` if the flags fail a check of this module. The error's message proposes
    only flags that pass the checks."""
    if (message := refusal(settings, world)) is not None:
        raise ValueError(message)
    fields, sizes = asked(settings, world)
    layout = Layout(**fields)
    # One stage is a pipeline too.
    table = (
        schedule.from_csv(settings.schedule)
        if settings.schedule.endswith(".csv")
        else recipe.schedule_of(layout)
    )
    length, context = sizes["tokens"], model(settings, world)["context"]
    given = {
        "context": max(length, context),
        "dropout": settings.dropout,
        "attention_dropout": settings.dropout,
    }
    base = world.source or MODELS[settings.model]
    numbers = {
        "vocabulary": world.vocabulary,
        "layers": sizes["layers"],
        "heads": sizes["heads"],
        "width": sizes["hidden"] // 4,
    }
    config = dataclasses.replace(base, **numbers, **given)
    return Fitted(config, length, layout, table)


def model(settings: Settings, world: World) -> Change:
    """Returns the sizes of the model that the flags ask for, and makes no model."""
    names = ("layers", "heads", "width", "context", "vocabulary_multiple")
    base = {
        name: getattr(world.source or MODELS[settings.model], name) for name in names
    }
    given = {name: getattr(settings, name) for name in names[:3]}
    return base | {name: size for name, size in given.items() if size is not None}


def asked(settings: Settings, world: World) -> tuple[Change, Change]:
    """Returns two dicts: the fields of the layout that the flags ask for, and the sizes
    that the layout must fit, such as the number of layers, the batch and the number of
    devices."""
    n = settings.devices if world.devices is None else world.devices
    layout = _axes(settings, n)
    usual, chunks = settings.schedule, 1
    if settings.schedule == INTERLEAVED:
        usual, chunks = "one_f_one_b_lockstep", 2
    if settings.schedule.endswith(".csv"):
        table = schedule.from_csv(settings.schedule)
        usual, chunks = "one_f_one_b_lockstep", table.chunks
    layout |= {name: getattr(settings, name) for name in OF_LAYOUT}
    layout |= {
        "schedule": usual,
        "chunks": chunks if settings.chunks is None else settings.chunks,
    }

    numbers = model(settings, world)
    multiple = numbers["vocabulary_multiple"]
    length = numbers["context"] if settings.length is None else settings.length
    sizes = {
        "layers": numbers["layers"],
        "heads": numbers["heads"],
        "hidden": 4 * numbers["width"],
        "rows": -(-world.vocabulary // multiple) * multiple,
        "tokens": length,
        "batch": settings.batch,
        "devices": n,
    }
    return validate.DEFAULTS | layout, sizes


def _axes(settings: Settings, devices: int) -> Change:
    """Returns the sizes of the axes data, stage and tensor. An axis without a flag has
    its default size."""
    data, stage, tensor = settings.data, settings.stage, settings.tensor
    if (data, stage, tensor) == (None, None, None):
        stage = 2 if devices % 4 == 0 else 1
        tensor = 2 if devices % 2 == 0 else 1
    stage, tensor = stage or 1, tensor or 1
    if data is None:
        data = max(1, devices // (stage * settings.context * tensor))
    return {"data": data, "stage": stage, "tensor": tensor}


def refusal(settings: Settings, world: World) -> str | None:
    """Returns a message that says why a run with these flags is impossible, or None if
    the run is possible. The message proposes flags to use instead, if some are
    found."""
    for needed, changes in _conflicts(settings, world):
        whole = (mended(settings, change, world) for change in changes)
        found = list(
            dict.fromkeys(spelt(change) for change in whole if change is not None)
        )[:2]
        return f"{needed} {validate.proposal(found)}" if found else needed
    fields, sizes = asked(settings, world)
    return validate.refusal(fields, sizes, _wording(settings, world)) or _too_short(
        settings, world
    )


def mended(settings: Settings, change: Change, world: World) -> Change | None:
    """Returns `change`, extended by further changes if `change` alone does not make all
    flags valid. Returns None if no valid flags are found."""
    for _ in range(8):
        after = dataclasses.replace(settings, **change)
        if works(after, world):
            return change
        conflict = next(_conflicts(after, world), None)
        if conflict is None:
            break
        if not conflict[1]:
            return None
        change = change | conflict[1][0]
    fields, sizes = asked(after, world)
    wording = _wording(after, world)
    repair = validate.repaired(fields, sizes, {}, wording.fixed)
    if repair is None or not wording.accepts(repair):
        return None
    return change | _flags(after, world, repair)


def works(settings: Settings, world: World) -> bool:
    """Returns whether nothing is wrong with these flags."""
    if (
        next(faults(settings), None) is not None
        or next(_conflicts(settings, world), None) is not None
    ):
        return False
    fields, sizes = asked(settings, world)
    roomy = all(
        least <= there for least, there in zip(_least(sizes), world.room(), strict=True)
    )
    return (
        roomy
        and sizes["devices"] % world.processes == 0
        and validate.fits(fields, sizes)
    )


def _conflicts(settings: Settings, world: World) -> Iterator[tuple[str, list[Change]]]:
    """Yields a message for each conflict between flags, and the changes of flags that
    may resolve the conflict."""
    name, numbers = settings.schedule, model(settings, world)
    if name.endswith(".csv"):
        table = schedule.from_csv(name)
        agreeing = {
            "stage": table.stages,
            "microbatches": table.microbatches,
            "chunks": table.chunks,
        }
        fields, _ = asked(settings, world)
        of_run = {size: fields[size] for size in agreeing}
        if of_run != agreeing:
            yield (
                f"--schedule {name} has {table.stages} stages, {table.microbatches} "
                f"microbatches and {table.chunks} chunks; the run has {spelt(of_run)}.",
                [agreeing],
            )
    elif name not in SCHEDULES:
        yield (
            f"--schedule must be {', '.join(SCHEDULES)} or a file that ends in .csv; "
            f"got {name}.",
            [{"schedule": validate.most_like(name, list(SCHEDULES))}],
        )
    H, D = numbers["heads"], numbers["width"]
    if D % H:
        near = [
            {"heads": divisor(D, H)},
            {"width": -(-D // H) * H},
            {"width": max(1, D // H) * H},
        ]
        yield f"--width {D} must be a multiple of --heads {H}.", near
    if settings.context > 1 and settings.dropout:
        yield (
            f"--dropout {settings.dropout} drops attention's weights too, which needs "
            f"all tokens on a device; got --context {settings.context}.",
            [{"dropout": 0.0}, {"context": 1}],
        )
    length = settings.length or 0
    if world.source is not None and world.source.vocabulary != world.vocabulary:
        yield (
            f"--from {settings.source} has a vocabulary of {world.source.vocabulary} "
            f"tokens, and --tokenizer {settings.tokenizer} has {world.vocabulary}. "
            "Choose another --tokenizer.",
            [],
        )
    if world.source is not None and length > world.source.context:
        needed = (
            f"--from {settings.source} has a context of {world.source.context} tokens; "
            f"got --length {length}."
        )
        yield needed, [{"length": world.source.context}]
    if (
        settings.fingerprint_every
        and (settings.devices if world.devices is None else world.devices) == 1
    ):
        yield (
            f"--fingerprint-every {settings.fingerprint_every} compares devices with "
            "each other, and there is one.",
            [{"fingerprint_every": 0}, {"devices": 8}]
            if world.devices is None
            else [{"fingerprint_every": 0}],
        )


def _too_short(settings: Settings, world: World) -> str | None:
    """Returns why the text is too short for the sequences; None if it is not."""
    fields, sizes = asked(settings, world)
    (train, held_out), (window, batch) = world.room(), _least(sizes)
    if window <= train and batch <= held_out:
        return None
    needed = (
        f"{settings.text} has {train:,} tokens to train on and {held_out:,} held out; "
        f"needed {window:,} and {batch:,}, for "
        f"{spelt({'batch': settings.batch, 'length': sizes['tokens']})}."
    )
    lengths = [
        sizes["tokens"] >> half for half in range(1, sizes["tokens"].bit_length())
    ]
    shorter = [{"length": length} for length in lengths]
    least = fields["data"] * fields["microbatches"]
    smaller = [
        {"batch": size, "length": length} for size in (least, 1) for length in lengths
    ]
    for change in shorter + smaller:
        if (works_too := mended(settings, change, world)) is not None:
            return f"{needed} Use {spelt(works_too)}, or a longer text."
    return f"{needed} Bring a longer text."


def _least(sizes: Mapping[str, int]) -> tuple[int, int]:
    """Returns the smallest number of tokens to train on (one window), and the smallest
    number of held-out tokens (a batch of consecutive windows)."""
    return sizes["tokens"] + 1, sizes["tokens"] * sizes["batch"] + 1


def _wording(settings: Settings, world: World) -> validate.Wording:
    """Returns the `Wording` of the messages of `validate`. They show the fields of the
    layout and the sizes of the run as flags, such as `--data 4`."""
    fixed = (
        ["hidden", "rows"] if world.devices is None else ["hidden", "rows", "devices"]
    )
    if world.source is not None:
        fixed += ["layers", "heads"]
    said = {
        "hidden": lambda size: f"4 x --width {size // 4}",
        "rows": lambda size: f"{size}, of --tokenizer {settings.tokenizer}",
    }

    def says(name: str, value: Any) -> str:
        return (
            said[name](value) if name in said else spelt({SIZES.get(name, name): value})
        )

    return validate.Wording(
        says,
        lambda written, change: spelt(_flags(settings, world, change)),
        fixed,
        lambda change: works(
            dataclasses.replace(settings, **_flags(settings, world, change)), world
        ),
    )


def _flags(settings: Settings, world: World, change: Mapping[str, Any]) -> Change:
    """Returns the new values of flags, by flag. `change` maps names to new values: the
    names of fields of the layout, and the keys of `SIZES`.

    The default sizes of the axes data, stage and tensor depend on each other. So if
    `change` has one of these axes, and at least one of their three flags is not set,
    the result has the sizes of all three axes.
    """
    fields = asked(settings, world)[0]
    axes = {name: fields[name] for name in validate.ALWAYS}
    left = set(axes) & set(change) and None in [
        getattr(settings, name) for name in axes
    ]
    return {
        SIZES.get(name, name): value
        for name, value in ({**axes, **change} if left else change).items()
    }
