"""Checks whether the sizes of a run fit together, and proposes the nearest change with which they
fit.

The functions take plain dicts: `fields` has the fields of a `layout.Layout`, and `sizes` the sizes
of the model, the batch and the machine. A *fault* is one thing that is wrong, with *cures*: changes
of fields or sizes. A proposal begins with a cure of the first fault, and cures the next faults one
by one until none is left. In the sentence of a fault, a name in braces, such as {stage}, is
replaced by the name with its value, such as `stage=4`. The caller gives a `Wording`, which turns
values and changes into text (`value`, `change`). The `Wording` also says which sizes the caller
cannot change (`fixed`), and which changes pass the caller's other checks (`accepts`).

Legend: P stages, M microbatches, v chunks, t tensor devices, c context devices.
"""

import difflib
import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

Precision = Literal["full", "bfloat16", "float16"]
Remat = Literal["none", "gathers", "attention", "products", "block", "stage"]
ScheduleName = Literal[
    "one_f_one_b_lockstep", "gpipe", "zero_bubble_lockstep", "one_f_one_b", "zero_bubble"
]
# Schedules in which each stage runs its own jobs; in the others all stages run the same kind of
# job at the same time
PER_STAGE = ("one_f_one_b", "zero_bubble")
Fields = Mapping[str, Any]

AXES = ("replica", "data", "expert", "stage", "context", "tensor")
BATCH_AXES = ("replica", "data", "expert")  # these split the batch by sequences
ALWAYS = ("data", "stage", "tensor")  # every mesh has these axes; the others only if not of size 1
SIZES = ("layers", "heads", "hidden", "rows", "tokens", "batch")  # of a model and a batch
OPTIONAL_SIZES = ("experts", "devices", "processes")
COUNTS = (*AXES, "microbatches", "chunks", "processes")
CHOICES: dict[str, tuple] = {  # the default first; zero and remat by the memory that they save
    "zero": (0, 1, 2, 3),
    "sequence": (False, True),
    "precision": get_args(Precision),
    "remat": get_args(Remat),
    "schedule": get_args(ScheduleName),
    "split_sends": (False, True),
}
DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(COUNTS, 1),
    **{name: choices[0] for name, choices in CHOICES.items()},
}
KINDS = {bool: "True or False", int: "a whole number", str: "a word"}
MOST_DEVICES = 2**20  # above this, a count of devices, microbatches or processes is a mistake
MOST = 2**31 - 1  # the largest number of layers, tokens and so on
MOST_REPAIRS = 50  # the most cures of one proposal


class Fault(NamedTuple):
    """One thing that is wrong.

    Attributes:
        needed: the sentence that says what was needed and what was given. The sentence is a format
            string: a name in braces, such as {stage}, is replaced by the name and its value, such
            as `stage=4`.
        changes: the cures, the best first. A cure is a change of fields or sizes that removes the
            fault, as a dict of new values by name.
        note: words that follow the first cure in the message.
    """

    needed: str
    changes: tuple[dict[str, Any], ...]
    note: str = ""


class Wording(NamedTuple):
    """The form in which the caller writes sizes, and the sizes that the caller cannot change.

    Attributes:
        value: a function that takes a name and its value, and returns a text such as `data=4` or
            `--data 4`.
        change: a function that takes the fields that the caller wrote and the new values, both by
            name, and returns the text that the caller should write.
        fixed: the sizes that the caller cannot change.
        accepts: a function that takes the new values, by name, and returns whether they pass all
            other checks of the caller.
    """

    value: Callable[[str, Any], str]
    change: Callable[[Fields, Fields], str]
    fixed: Collection[str] = ()
    accepts: Callable[[Fields], bool] = lambda change: True


def as_text(fields: Fields) -> str:
    """Returns the fields of a layout in the form of the command line: `data=2,remat=block`."""
    return ",".join(f"{name}={value}" for name, value in fields.items())


# Functions that write values and changes as text, for the three wordings below


def _python_value(name: str, value: Any) -> str:
    return f"{name}={value!r}"


def _python_change(written: Fields, change: Fields) -> str:
    return ",".join(_python_value(name, value) for name, value in change.items())


def _text_value(name: str, value: Any) -> str:
    return f"{name}={value}"


def _text_change(written: Fields, change: Fields) -> str:
    return as_text({**written, **change}) or repr("")


def _json_change(written: Fields, change: Fields) -> str:
    return json.dumps({**written, **change})


PYTHON = Wording(_python_value, _python_change, fixed=("devices",))
TEXT = Wording(_text_value, _text_change)
JSON = Wording(_python_value, _json_change)


def refusal(
    fields: Fields,
    sizes: Fields,
    wording: Wording = PYTHON,
    *,
    written: Fields | None = None,
    misread: str = "",
) -> str | None:
    """Returns the message for a layout whose `fields` are wrong or do not fit `sizes`, with a
    proposal of a change that makes them fit; None if the layout fits.

    Args:
        fields: a layout's fields by name.
        sizes: the sizes in `SIZES`, and perhaps those in `OPTIONAL_SIZES`, by name. `hidden` counts
            the hidden units of a feed-forward, `rows` the rows of the padded vocabulary, `batch`
            the sequences, and `tokens` the tokens per sequence. With an empty dict, only the fields
            are checked.
        wording: the form in which the message writes sizes and changes: `PYTHON`, `TEXT` (for a
            command line), `JSON` or a form of the caller's own.
        written: the fields that the caller wrote, by name; all other fields have their defaults. A
            `wording` may repeat these fields in the proposed change, so that it is complete.
        misread: a sentence that reports a mistake in the text that the caller wrote, such as a
            misspelt name; "" if there is none. The `fields` were read from this text with the
            mistake corrected.
    """
    sizes = _with_experts(sizes)  # 1 expert if a model gives no number; an empty dict stays empty
    # A mistake in the text comes first. The cure of this fault changes nothing, since `fields` are
    # right already. `format_map` below reads braces as names, so the braces of the text are
    # escaped.
    fault = Fault(escaped(misread), ({},)) if misread else next(faults(fields, sizes), None)
    if fault is None:
        return None
    values = {name: wording.value(name, value) for name, value in {**fields, **sizes}.items()}
    needed = fault.needed.format_map(values)
    repairs = [repaired(fields, sizes, change, wording.fixed) for change in fault.changes]
    working = [repair for repair in repairs if repair is not None and wording.accepts(repair)]
    # A repair that contains all of another one changes more than is needed.
    working = [
        repair for repair in working if not any(less.items() < repair.items() for less in working)
    ]
    if not working:
        return needed
    # The note is about the first cure. It is left out if the proposal does not contain this cure,
    # because no repair that begins with it works.
    note = fault.note if fault.changes[0].items() <= working[0].items() else ""
    # Two cures may lead to the same repair. At most two are shown.
    texts = list(dict.fromkeys(wording.change(written or {}, repair) for repair in working))
    return f"{needed} {proposal(texts[:2], note)}"


def proposal(texts: Sequence[str], note: str = "") -> str:
    """Returns the sentence that proposes the first of `texts`, and the others in brackets."""
    first, *alternatives = texts
    in_brackets = "".join(f" (or {text})" for text in alternatives)
    return f"Use {first}{note}{in_brackets}."


def fits(fields: Fields, sizes: Fields) -> bool:
    """Returns whether these fields make a valid layout that fits these sizes."""
    return next(faults(fields, _with_experts(sizes)), None) is None


def repaired(
    fields: Fields, sizes: Fields, change: Fields, fixed: Collection[str] = ()
) -> dict[str, Any] | None:
    """Returns `change` and all further changes that `change` makes necessary; None if the fields
    then still do not fit, or fit only with a change of a `fixed` size."""
    sizes = _with_experts(sizes)  # 1 expert if the caller's sizes have no number
    new_fields, new_sizes = dict(fields), dict(sizes)
    cure = change
    # A cure may cause another fault: more stages may need more microbatches. The number of cures is
    # limited, since two cures could undo each other forever.
    for _ in range(MOST_REPAIRS):
        for name, value in cure.items():
            changed = new_fields if name in new_fields else new_sizes
            changed[name] = value
        # With `to_repair`, the first fault is the one to cure next.
        fault = next(faults(new_fields, new_sizes, to_repair=True), None)
        if fault is None:
            # Only `processes` is both a field and a size. The field counts: in `before` the fields
            # come last, and in `after` `_without_fields` leaves out the size. From True to 1 is a
            # change too, so `_differs` compares the types as well.
            before, after = {**sizes, **fields}, {**new_fields, **_without_fields(new_sizes)}
            differing = {
                name: value for name, value in after.items() if _differs(value, before[name])
            }
            # The caller cannot use a proposal that changes a fixed size, such as the devices.
            return None if set(differing) & set(fixed) else differing
        cures = [cure for cure in fault.changes if not set(cure) & set(fixed)]
        if not cures:
            return None
        cure = cures[0]  # the best one that the caller can use
    return None


def faults(fields: Fields, sizes: Fields, *, to_repair: bool = False) -> Iterator[Fault]:
    """Yields all faults of the fields and the sizes, in the order in which a person would correct
    them.

    If there are faults of `_values` or `_counts`, such as a negative count, no others are yielded.
    The other faults are fields without effect, fields that exclude each other, and sizes that do
    not fit the layout.

    With `to_repair`, the faults come in the order in which `repaired` cures them. Faults of the
    axes then come before faults of the model and the batch, since the sizes of the model and the
    batch must be multiples of the sizes of axes.
    """
    # The later checks compute with the numbers, so all values must be right first.
    unreadable = list(_values(fields)) or list(_counts(fields, sizes))
    if unreadable:
        yield from unreadable
        return
    yield from _choices(fields)
    # `_processes` shares the layout's devices among its processes, and `_machine` compares the
    # layout with the machine. A person corrects the layout by itself first, then for the model and
    # the batch, and last for the machine.
    to_read = (_processes, _model_and_batch, _machine)
    for kind in (_machine, _processes, _model_and_batch) if to_repair else to_read:
        yield from kind(fields, sizes)


# Values


def _values(fields: Fields) -> Iterator[Fault]:
    """Yields a fault for each field whose type or value is wrong. The fault proposes a new value:
    the one that the caller may have meant, or the closest choice, or 1 for a count out of
    bounds."""
    for name, default in DEFAULTS.items():
        value, kind = fields[name], type(default)
        # Not `isinstance`: True is an int, and a microbatch count of True is a mistake.
        if type(value) is not kind:
            needed = f"Layout needs {name} to be {KINDS[kind]}; got {_shown(value)}."
            yield Fault(needed, ({name: _meant(value, default)},))
        elif name in CHOICES and value not in CHOICES[name]:
            choices = ", ".join(map(str, CHOICES[name]))
            needed = f"Layout needs {name} to be one of {choices}; got {_shown(value)}."
            yield Fault(needed, ({name: _closest_choice(value, CHOICES[name])},))
        elif name in COUNTS and not 1 <= value <= MOST_DEVICES:
            bound = "1 or more" if value < 1 else f"{MOST_DEVICES} or less"
            yield Fault(f"Layout needs {name} of {bound}; got {_shown(value)}.", ({name: 1},))


def _counts(fields: Fields, sizes: Fields) -> Iterator[Fault]:
    """Yields a fault for the first size that is not a whole number above 0, or is too large.
    If there is no such size, yields a fault if the machine's devices cannot be shared evenly among
    its processes."""
    # The cure: the least `devices` or `batch` that fits the layout, and 1 for any other size.
    least = {"devices": _devices(fields), "batch": _batch_divisor(fields)}
    for name, value in sizes.items():
        if type(value) is not int or not 1 <= value <= MOST:
            cure = {name: least.get(name, 1)}
            yield Fault(f"Layout: {{{name}}} must be a whole number from 1 to {MOST}.", (cure,))
            return
    devices, processes = sizes.get("devices", 0), sizes.get("processes", 1)
    if devices % processes:
        more_devices = -(-devices // processes) * processes  # rounded up to a multiple
        # No cures, since the layout cannot change the machine: the sentence says what to do.
        yield Fault(
            f"Layout: each process must have as many devices as the others; the run has {devices} "
            f"devices and {processes} processes. Start {closest_divisor(devices, processes)} "
            f"processes, or use {more_devices} devices.",
            (),
        )


# Choices that need something to act on, and choices that exclude each other


def _choices(fields: Fields) -> Iterator[Fault]:
    """Yields a fault for each field of the layout that has no effect, such as ZeRO on one replica.
    The fields about pipelines come last."""
    shards_state = fields["zero"] > 0
    # ZeRO splits the state over data and context; along `replica` the devices have copies of it.
    # The sentence says "replicas" for the devices of data and context together, and names `data`,
    # the axis of the cure.
    if shards_state and fields["data"] * fields["context"] == 1:
        yield Fault(
            "Layout: {zero} splits state over replicas; got {data}.", ({"zero": 0}, {"data": 2})
        )
    if fields["sequence"] and fields["tensor"] == 1:
        needed = "Layout: {sequence} splits tokens over the tensor axis; got {tensor}."
        yield Fault(needed, ({"sequence": False}, {"tensor": 2}))
    if fields["replica"] > 1 and not shards_state:
        needed = (
            "Layout: {replica} has copies of the state that ZeRO splits over data, but {zero} "
            "splits nothing."
        )
        yield Fault(needed, ({"replica": 1}, {"zero": 1}))
    if fields["remat"] == "gathers" and not fields["sequence"] and fields["zero"] < 3:
        needed = "Layout: {remat} repeats the gathers of sequence or ZeRO-3, and neither is on."
        yield Fault(needed, ({"remat": "none"},))
    yield from _pipeline_choices(fields)


def _pipeline_choices(fields: Fields) -> Iterator[Fault]:
    """Yields a fault for each field about pipelines that has no effect, or that another field
    excludes. With several chunks per stage (`chunks`), also yields a fault if the microbatches are
    not a multiple of the stages."""
    P, M, default = fields["stage"], fields["microbatches"], DEFAULTS["schedule"]
    if fields["chunks"] > 1 and P == 1:
        needed = "Layout: {chunks} interleave the layers of several stages; got {stage}."
        yield Fault(needed, ({"chunks": 1},))
    if fields["schedule"] != default and P == 1:
        needed = "Layout: {schedule} orders the jobs of several stages; got {stage}."
        yield Fault(needed, ({"schedule": default}, {"stage": 2}))
    if fields["remat"] == "stage" and P == 1:
        yield Fault(
            "Layout: {remat} is for pipelines; got {stage}.", ({"remat": "block"}, {"stage": 2})
        )
    # The functions `gpipe` and `one_f_one_b` of `schedule` have no argument for chunks.
    if fields["chunks"] > 1 and fields["schedule"] in ("gpipe", "one_f_one_b"):
        needed = "Layout: {schedule} has one chunk per stage; got {chunks}."
        yield Fault(needed, ({"schedule": default},))
    for name in ("stage", "tensor"):
        if fields["split_sends"] and fields[name] == 1:
            needed = (
                "Layout: {split_sends} splits the sends from stage to stage over the tensor axis; "
                f"got {{{name}}}."
            )
            yield Fault(needed, ({"split_sends": False}, {name: 2}))
    if fields["sequence"] and fields["split_sends"]:
        needed = (
            "Layout: {split_sends} has nothing to split: {sequence} splits the sends by tokens."
        )
        yield Fault(needed, ({"split_sends": False},))
    if fields["chunks"] > 1 and M % P:  # chunks take turns after every P microbatches
        needed = (
            "Layout: with {chunks} the microbatches must be a multiple of the stages; got "
            "{microbatches} and {stage}."
        )
        yield Fault(needed, _multiples("microbatches", M, P))


# The model and the batch


def _model_and_batch(fields: Fields, sizes: Fields) -> Iterator[Fault]:
    """Yields a fault for each size of the model or the batch that is not a multiple of the number
    of parts into which this size is split."""
    t, P, v = fields["tensor"], fields["stage"], fields["chunks"]
    # The cures with fewer stages also set one chunk: then the stages alone must divide the layers.
    # The tensor axis must divide both heads and hidden units, so one cure mends both. If neither
    # size is given, `heads_and_hidden` is 0, which has no effect in another gcd.
    heads_and_hidden = math.gcd(*(sizes[name] for name in ("heads", "hidden") if name in sizes))
    for name, what in (
        ("heads", "the model's heads"),
        ("hidden", "the feed-forward's hidden units"),
    ):
        if name in sizes and sizes[name] % t:
            needed = f"Layout: {what} ({{{name}}}) must be a multiple of {{tensor}}."
            cure = {"tensor": closest_divisor(heads_and_hidden, t)}
            # The third argument is the note that follows the first cure in the message.
            yield Fault(needed, (cure,), ", which divides it")
    if "layers" in sizes and sizes["layers"] % (P * v):
        fewer_stages = {"stage": closest_divisor(sizes["layers"], P), "chunks": 1}
        yield Fault(
            "Layout: the model's layers ({layers}) must be a multiple of {stage} x {chunks}.",
            (*_multiples("layers", sizes["layers"], P * v), fewer_stages),
        )
    if "rows" in sizes and sizes["rows"] % (P * t):
        padded = _multiples("rows", sizes["rows"], P * t)[0]  # the multiple above
        # The second cure is axes that fit: a tensor axis that divides the rows, the heads and the
        # hidden units, and then a number of stages that divides the remaining rows and the layers
        # (or P, if no layers are given).
        smaller_tensor = closest_divisor(math.gcd(sizes["rows"], heads_and_hidden), t)
        fewer_stages = closest_divisor(
            math.gcd(sizes["rows"] // smaller_tensor, sizes.get("layers", P)), P
        )
        yield Fault(
            "Layout: the vocabulary's padded rows ({rows}) must be a multiple of {stage} x "
            "{tensor}.",
            (padded, {"tensor": smaller_tensor, "stage": fewer_stages, "chunks": 1}),
            f", the vocabulary padded to a multiple of {P * t}",
        )
    if "experts" in sizes and sizes["experts"] % fields["expert"]:
        cure = {"expert": closest_divisor(sizes["experts"], fields["expert"])}
        needed = "Layout: the model's experts ({experts}) must be a multiple of {expert}."
        yield Fault(needed, (cure,), ", which divides it")
    yield from _batch(fields, sizes)


def _batch(fields: Fields, sizes: Fields) -> Iterator[Fault]:
    """Yields a fault if the number of sequences of the batch is not a multiple of the number of
    parts into which the batch is split. Yields another if the number of tokens of a sequence is not
    a multiple of the number that `_tokens_divisor` returns."""
    if "batch" in sizes and sizes["batch"] % _batch_divisor(fields):
        # The axes that split sequences: `data`, which every mesh has, and those of several devices.
        names = [name for name in BATCH_AXES if name in ALWAYS or fields[name] > 1]
        factors = " x ".join(f"{{{name}}}" for name in (*names, "microbatches"))
        needed = f"Layout: the batch's sequences ({{batch}}) must be a multiple of {factors}."
        yield Fault(needed, _multiples("batch", sizes["batch"], _batch_divisor(fields)))
    divisor, needed = _tokens_divisor(fields)
    if "tokens" in sizes and sizes["tokens"] % divisor:
        cures = _multiples("tokens", sizes["tokens"], divisor)
        # The last cure splits no tokens.
        yield Fault(needed, (*cures, {"context": 1, "sequence": False}))


def _tokens_divisor(fields: Fields) -> tuple[int, str]:
    """Returns the number that must divide the number of tokens of a sequence, and the sentence that
    says so, for a `Fault`."""
    c = fields["context"]
    t = fields["tensor"] if fields["sequence"] else 1
    if c == 1:
        return (
            t,
            "Layout: with {sequence} the tokens of a sequence ({tokens}) must be a multiple of "
            "{tensor}.",
        )
    # Each of the c devices holds two chunks of the sequence, which balances causal attention. With
    # `sequence` the tokens are also split over the tensor axis. So the number of tokens must be a
    # multiple of c lcm(2, t).
    if t <= 2:
        factors = "2 x {context}"
    elif t % 2 == 0:
        factors = "{context} x {tensor}"
    else:
        factors = "2 x {context} x {tensor}"
    return c * math.lcm(
        2, t
    ), f"Layout: the tokens of a sequence ({{tokens}}) must be a multiple of {factors}."


def _batch_divisor(fields: Fields) -> int:
    """Returns the number of parts into which the batch is split: replicas times microbatches."""
    return math.prod(fields[name] for name in (*BATCH_AXES, "microbatches"))


# The machine


def _processes(fields: Fields, sizes: Fields) -> Iterator[Fault]:
    """Yields a fault if the layout's devices cannot be shared evenly among its processes."""
    devices, processes = _devices(fields), fields["processes"]
    if devices % processes == 0:
        return
    closest_processes = {"processes": closest_divisor(devices, processes)}
    # If the machine fixes the number of processes, another `data` is the cure, the smaller one
    # first, since it needs no more devices than there are now. `data` must be a multiple of
    # processes / gcd(others, processes): the product of the other axes, `others`, has the other
    # factors of `processes`.
    others = devices // fields["data"]
    data = fields["data"]
    # `_multiples` gives the larger one first.
    other_data = _multiples("data", data, processes // math.gcd(others, processes))
    yield Fault(
        "Layout: each process must have as many devices as the others; got {processes} for "
        f"{devices} devices.",
        other_data[::-1] if "processes" in sizes else (closest_processes,),
    )


def _machine(fields: Fields, sizes: Fields) -> Iterator[Fault]:
    """Yields a fault if the product of the axes is not the machine's number of devices. Yields
    another if the layout's number of processes is not the number of processes in `sizes`."""
    devices = _devices(fields)
    if sizes.get("devices", devices) != devices:
        # The message names the axes that every mesh has, and those of several devices.
        names = [name for name in AXES if name in ALWAYS or fields[name] > 1]
        product = " x ".join(f"{{{name}}}" for name in names)
        yield Fault(
            f"Layout: {product} multiply to {devices}, and there are {sizes['devices']} devices.",
            (_on_devices(fields, sizes), {"devices": devices}),
        )
    processes = sizes.get("processes", fields["processes"])
    if processes != fields["processes"]:
        needed = (
            f"Layout: it has processes={fields['processes']}, and the run has {processes} "
            "processes."
        )
        yield Fault(needed, ({"processes": processes},))


def _on_devices(fields: Fields, sizes: Fields) -> dict[str, int]:
    """Returns new sizes of axes, by name, so that the product of all axes is the machine's number
    of devices. If possible, only `data` changes.

    If the product of all axes but `data` does not divide the number of devices, these axes get new
    sizes: those that fit the devices and the model, as close as possible to the old ones.
    """
    devices = sizes["devices"]
    others = _devices(fields) // fields["data"]
    if devices % others == 0:
        return {"data": devices // others}
    splits = {
        "tensor": math.gcd(*(sizes[name] for name in ("heads", "hidden") if name in sizes)),
        "context": sizes.get("tokens", 0),
        "stage": sizes.get("layers", 0),
        "expert": sizes.get("experts", 0),
    }
    # For an axis that no size limits, the number in the gcd is 0, since gcd(n, 0) is n. Each axis
    # takes its share of the devices that the axes before it left, and `data` takes the rest. So the
    # order is a priority: an axis that is earlier in the list keeps its old size more often. (Any
    # order would give sizes that fit.)
    new, devices_left = {}, devices
    for name in ("tensor", "context", "expert", "stage", "replica"):
        new[name] = closest_divisor(math.gcd(devices_left, splits.get(name, 0)), fields[name])
        devices_left //= new[name]
    return {**new, "data": devices_left}


def _devices(fields: Fields) -> int:
    """Returns the number of devices of a layout: the product of its axes."""
    return math.prod(fields[name] for name in AXES)


# Numbers and words close to others


def closest_divisor(number: int, size: int) -> int:
    """Returns the divisor of `number` that is closest to `size`; it may be larger than `size`. Of
    two equally close divisors, it is the smaller."""
    # No divisor is larger than the number itself.
    size = min(number, size)
    # The closest numbers are tried first; at each distance, the smaller number.
    for distance in range(size):
        for near in (size - distance, size + distance):
            if number % near == 0:
                return near
    return 1


def divisors(number: int) -> list[int]:
    """Returns the whole numbers that divide `number`, in order."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def most_like(word: str, choices: list[str]) -> str:
    """Returns the one of `choices` whose spelling is closest to `word`."""
    return difflib.get_close_matches(word, choices, n=1, cutoff=0)[0]


def escaped(text: str) -> str:
    """Returns `text` with its braces doubled, for `Fault.needed`, which is a format string."""
    return text.replace("{", "{{").replace("}", "}}")


def _multiples(name: str, size: int, divisor: int) -> tuple[dict[str, int], ...]:
    """Returns the changes that would correct the size `name`: the next multiple of `divisor` above
    `size`, and the next multiple below `size` unless that is 0."""
    below = size // divisor * divisor
    above = -(-size // divisor) * divisor  # -(-a // b) is a / b, rounded up
    return ({name: above}, {name: below}) if below else ({name: above},)


def _meant(value: Any, default: Any) -> Any:
    """Returns the value that the caller may have meant by `value`, which has a wrong type. The
    result has the type of the `default`; the result is the `default` if the meaning is not
    clear."""
    # The text of any other type, such as an array, is not a clue.
    text = str(value) if isinstance(value, str | bool | int | float) else ""
    # The defaults of all fields of this kind are False, so an unclear text gives the default here.
    if isinstance(default, bool):
        return text.lower() in ("true", "yes", "on", "1")
    number = text.removesuffix(".0")
    # A longer number is above every bound, so it is no clue either.
    if isinstance(default, int) and number.isdecimal() and len(number) < 10:
        return int(number)
    return default


def _closest_choice(value: Any, choices: tuple) -> Any:
    """Returns the one of `choices` that is closest to `value`: by distance for numbers, else by
    spelling."""
    if isinstance(value, int) and isinstance(choices[0], int):
        return min(choices, key=lambda choice: abs(choice - value))
    by_text = {str(choice): choice for choice in choices}
    return by_text[most_like(str(value), list(by_text))]


def _with_experts(sizes: Fields) -> Fields:
    """Returns the sizes, with 1 expert for a model whose sizes have no number of experts."""
    return {"experts": 1, **sizes} if "layers" in sizes else sizes


def _without_fields(sizes: Fields) -> dict[str, Any]:
    """Returns the sizes without `processes`, the only size that is also a field of a layout."""
    return {name: value for name, value in sizes.items() if name not in DEFAULTS}


def _differs(value: Any, before: Any) -> bool:
    """Returns whether two values differ in value or in type. In Python True equals 1, but a field
    `data=True` is a mistake, and replacing it by `data=1` counts as a change."""
    return type(value) is not type(before) or value != before


def _shown(value: Any) -> str:
    """Returns the text of a value for a message, cut if it is long, and with doubled braces."""
    text = repr(value)
    return escaped(text if len(text) <= 60 else f"{text[:40]}... ({len(text)} characters)")
