"""What the sizes of a run must satisfy, and the nearest ones that do: over plain dicts, for `layout.Layout` to ask.

`refusal` tells the first thing that is wrong, and what would be right instead, in the caller's terms. What it proposes is right
in every other respect too: it has been asked about it.
"""

import difflib
import itertools
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

from parallax.layout import words

Precision = Literal["full", "bfloat16", "float16"]
Remat = Literal["none", "gathers", "attention", "products", "block", "stage"]
Order = Literal["one_f_one_b", "gpipe", "zero_bubble", "one_f_one_b_in_turns", "zero_bubble_in_turns"]
AXES = ("replica", "data", "expert", "stage", "context", "tensor")
BATCH = ("replica", "data", "expert")  # those that split the batch by sequences
ALWAYS = ("data", "stage", "tensor")  # a mesh has the other axes where a layout splits something over them
COUNTS = (*AXES, "microbatches", "chunks", "processes")
KNOWN: dict[str, tuple] = {  # zero from what splits least to what splits most, remat from the least to the most again
    "zero": (0, 1, 2, 3),
    "sequence": (False, True),
    "precision": get_args(Precision),
    "remat": get_args(Remat),
    "schedule": get_args(Order),
    "split_sends": (False, True),
}
USUAL: dict[str, Any] = {
    **dict.fromkeys((*AXES, "microbatches", "chunks"), 1),
    **{name: known[0] for name, known in KNOWN.items()},
    "processes": 1,
}
KINDS = {bool: "True or False", int: "a whole number", str: "a word"}
LARGEST = 2**20  # beyond what any run has of devices, microbatches or processes
MANY = 2**31 - 1  # of layers, tokens and the like
Fields = Mapping[str, Any]


class Fault(NamedTuple):
    """What is wrong with a layout.

    Attributes:
        needed: what was needed and what came, as a sentence; a name in braces stands for that name with its value.
        changes: each of which may mend it: new values by name.
        why: words that follow them in the message.
    """

    needed: str
    changes: tuple[dict[str, Any], ...]
    why: str = ""


class Terms(NamedTuple):
    """How the caller spells what he gave, and what he may change.

    Attributes:
        says: a name with its value: `data=4`, or `--data 4`.
        takes: the fields that the caller wrote, and a change, to the words in which he makes it.
        fixed: sizes that he cannot change.
        works: whether a change that mends the layout is right in what else the caller asks for.
    """

    says: Callable[[str, Any], str]
    takes: Callable[[Fields, Fields], str]
    fixed: Collection[str] = ()
    works: Callable[[Fields], bool] = lambda change: True


def spelt(fields: Fields) -> str:
    """As a command line spells them: `data=2,remat=block`."""
    return ",".join(f"{name}={value}" for name, value in fields.items())


def _quoted(name: str, value: Any) -> str:
    return f"{name}={value!r}"


PYTHON = Terms(_quoted, lambda written, change: ",".join(_quoted(name, value) for name, value in change.items()), ("devices",))
TEXT = Terms(lambda name, value: f"{name}={value}", lambda written, change: spelt({**written, **change}) or repr(""))
JSON = Terms(_quoted, lambda written, change: json.dumps({**written, **change}))


def refusal(fields: Fields, sizes: Fields, terms: Terms = PYTHON, *, written: Fields | None = None, read: str = "") -> str | None:
    """Why a layout of `fields` cannot be, or cannot be for `sizes`, and what to take instead; None if it can.

    Args:
        fields: a layout's, by name.
        sizes: of the model, the batch and the machine: none, or layers, heads, hidden, rows, batch and tokens, with or without
            experts, devices and processes.
        terms: in which the message is.
        written: those of the fields that the caller wrote.
        read: what was wrong with the text in which he wrote them, and is put right in `fields`.
    """
    sizes = {"experts": 1, **sizes} if "layers" in sizes else sizes  # a model that does not say has none to split
    fault = Fault(quoted(read), ({},)) if read else next(faults(fields, sizes), None)
    if fault is None:
        return None
    needed = fault.needed.format_map({name: terms.says(name, value) for name, value in {**fields, **sizes}.items()})

    if found := _taken(terms, written, (change for change in fault.changes if fits(fields, sizes, change))):
        return f"{needed} {proposed(found, fault.why)}"
    # Where no layout is right, what is wrong with a size changes too.
    more = (change | each for change in fault.changes for each in nearest(*_changed(fields, sizes, change)))
    found = _taken(terms, written, nearest(fields, sizes)) or _taken(terms, written, more)
    return f"{needed} {proposed(found, ', the nearest that works')}" if found else needed


def proposed(found: Sequence[str], why: str = "") -> str:
    """A sentence with what to take: the first of `found`, which works as it is typed, and in brackets what would do as well."""
    first, *others = found
    return f"Take {first}{why}{''.join(f' (or {other})' for other in others)}."


def _taken(terms: Terms, written: Fields | None, changes: Iterable[Fields]) -> list[str]:
    """The first two changes that the caller can make, in his words."""
    mine = (change for change in changes if not set(change) & set(terms.fixed) and terms.works(change))
    return list(itertools.islice(dict.fromkeys(terms.takes(written or {}, change) for change in mine), 2))


def fits(fields: Fields, sizes: Fields, change: Fields) -> bool:
    """Whether nothing is wrong after a change."""
    return next(faults(*_changed(fields, sizes, change)), None) is None


def faults(fields: Fields, sizes: Fields) -> Iterator[Fault]:
    """All that is wrong; what comes later may stand on what came before."""
    found = next(itertools.chain(_unknown(fields), _uncounted(fields, sizes)), None)
    if found is not None:
        yield found
        return
    yield from _idle(fields)
    M, P = fields["microbatches"], fields["stage"]
    if fields["chunks"] > 1 and M % P:
        yield Fault(
            "Layout: with {chunks} the microbatches must be a multiple of the stages; got {microbatches} and {stage}.",
            _multiples("microbatches", M, P),
        )
    devices = math.prod(fields[name] for name in AXES)
    if devices % fields["processes"]:
        yield Fault(
            f"Layout: each process must have as many devices as the others; got {{processes}} for {devices} devices.",
            ({"processes": _closest_divisor(devices, fields["processes"])},),
        )
    yield from _misfits(fields, sizes)
    if sizes.get("devices", devices) != devices:
        others = devices // fields["data"]
        changes = [{"data": sizes["devices"] // others}] if sizes["devices"] % others == 0 else []
        yield Fault(
            f"Layout: {_product(fields)} multiply to {devices}, and there are {sizes['devices']} devices.",
            (*changes, {"devices": devices}),
        )
    if sizes.get("processes", fields["processes"]) != fields["processes"]:
        yield Fault(
            f"Layout: it is for processes={fields['processes']}, and the run has {sizes['processes']}.",
            ({"processes": sizes["processes"]},),
        )


def _unknown(fields: Fields) -> Iterator[Fault]:
    """Values that are none of a field's."""
    for name, usual in USUAL.items():
        value, kind = fields[name], type(usual)
        if type(value) is not kind:
            yield Fault(f"Layout needs {name} to be {KINDS[kind]}; got {_short(value)}.", ({name: _meant(value, usual)},))
        elif name in KNOWN and value not in KNOWN[name]:
            known = ", ".join(map(str, KNOWN[name]))
            yield Fault(f"Layout needs {name} to be one of {known}; got {_short(value)}.", ({name: _like(value, KNOWN[name])},))
        elif name in COUNTS and not 1 <= value <= LARGEST:
            bound = "1 or more" if value < 1 else f"{LARGEST} or less"
            yield Fault(f"Layout needs {name} of {bound}; got {_short(value)}.", ({name: 1},))


def _uncounted(fields: Fields, sizes: Fields) -> Iterator[Fault]:
    """Sizes that are no count of anything, and a machine that no layout takes."""
    least = {
        "devices": math.prod(fields[name] for name in AXES),
        "batch": math.prod(fields[name] for name in (*BATCH, "microbatches")),
    }
    for name, value in sizes.items():
        if type(value) is not int or not 1 <= value <= MANY:
            yield Fault(f"Layout: {{{name}}} is no whole number from 1 to {MANY}.", ({name: least.get(name, 1)},))
            return
    devices, processes = sizes.get("devices", 0), sizes.get("processes", 1)
    if devices % processes:
        yield Fault(
            f"Layout: each process must have as many devices as the others; the run has {devices} devices and {processes} "
            f"processes. Start {_closest_divisor(devices, processes)}, or take {-(-devices // processes) * processes} devices.",
            (),
        )


def _idle(fields: Fields) -> Iterator[Fault]:
    """Choices that have nothing to act on, or do not go together."""
    does = words.rows(fields)
    one = lambda what, change: Fault(f"Layout: {what}.", (change,))
    if fields["chunks"] > 1 and fields["stage"] == 1:
        yield one("{chunks} interleave the layers of several stages; got {stage}", {"chunks": 1})
    chosen = {
        "schedule": does.order,
        "zero": does.replicas,
        "sequence": does.tokens,
        "split_sends": does.sends,
        "remat": does.again,
    }
    for name, row in chosen.items():
        for need in row.needs:
            if all(fields[size] == 1 for size in (need.size, *need.others)):
                changes = ({name: need.instead}, {need.size: 2})
                yield Fault(f"Layout: {{{name}}} {need.says}; got {{{need.size}}}.", changes)
    if does.copies.of(whole=False, share=True) and does.replicas.state(whole=True, share=False):
        needed = "Layout: {replica} has copies of what ZeRO splits over data, and {zero} splits nothing."
        yield Fault(needed, ({"replica": 1}, {"zero": 1}))
    if fields["chunks"] > 1 and not does.order.interleaves:
        yield one("{schedule} has one chunk a stage; got {chunks}", {"schedule": "one_f_one_b"})
    by_tokens = does.tokens.of(whole=False, share=True)
    if by_tokens and does.sends.of(whole=False, share=True):
        yield one("{split_sends} has nothing to split where {sequence} has split it by tokens", {"split_sends": False})
    if does.again.gathers_alone and not by_tokens and does.replicas.parameters(whole=True, share=False):
        yield one("{remat} gathers again what sequence or ZeRO-3 gathered, and neither is on", {"remat": "none"})


def _misfits(fields: Fields, sizes: Fields) -> Iterator[Fault]:
    """Sizes of the model and the batch that the layout does not divide."""
    t, P, c, does = fields["tensor"], fields["stage"], fields["context"], words.rows(fields)
    shared = math.gcd(*(sizes[name] for name in ("heads", "hidden") if name in sizes))
    for name, what in (("heads", "the model's heads"), ("hidden", "the feed-forward's hidden units")):
        if name in sizes and sizes[name] % t:
            needed = f"Layout: {what} ({{{name}}}) must divide by {{tensor}}."
            yield Fault(needed, (_consistent(fields, {"tensor": _closest_divisor(shared, t)}),), ", which divides it")
    for name, what, by, of in (
        ("layers", "the model's layers", P * fields["chunks"], "{stage} x {chunks}"),
        ("rows", "the vocabulary's padded rows", P * t, "{stage} x {tensor}"),
        ("experts", "the model's experts", fields["expert"], "{expert}"),
        ("batch", "the batch's sequences", *_of_batch(fields)),
        ("tokens", *does.contexts.of(whole=_tokens_whole, share=_tokens_split)(does.tokens.of(whole=1, share=t), c)),
    ):
        if name in sizes and sizes[name] % by:
            why = f", the vocabulary padded to a multiple of {by}" if name == "rows" else ""
            changes = _multiples(name, sizes[name], by)[: 1 if name == "rows" else 2]
            if name == "experts":
                changes, why = ({"expert": _closest_divisor(sizes[name], by)},), ", which divides it"
            yield Fault(f"Layout: {what} ({{{name}}}) must divide by {of}.", changes, why)


def _tokens_whole(by: int, c: int) -> tuple[str, int, str]:
    """What the tokens of a sequence must divide by where no context axis splits them: what they are, the number, and its name."""
    return "with {sequence} the tokens of a sequence", by, "{tensor}"


def _tokens_split(by: int, c: int) -> tuple[str, int, str]:
    """The same where c devices hold two chunks each, and split what they hold by tokens over the tensor axis too."""
    of = "2 x {context}" if by <= 2 else "{context} x {tensor}" if by % 2 == 0 else "2 x {context} x {tensor}"
    return "the tokens of a sequence", c * math.lcm(2, by), of


def _of_batch(fields: Fields) -> tuple[int, str]:
    """What the sequences of a batch must divide by: the number, and its name."""
    names = [name for name in BATCH if name in ALWAYS or fields[name] > 1] + ["microbatches"]
    return math.prod(fields[name] for name in names), " x ".join(f"{{{name}}}" for name in names)


def _product(fields: Fields) -> str:
    """The axes that a layout has, multiplied."""
    return " x ".join(f"{{{name}}}" for name in AXES if name in ALWAYS or fields[name] > 1)


def nearest(fields: Fields, sizes: Fields) -> Iterator[dict[str, Any]]:
    """The changes that make layouts out of `fields` that work for `sizes`, the nearest first.

    Near is what changes each number by a small factor. Where no layout takes all the devices, it is the batch that changes.
    There is none where the processes do not divide the devices, or a size is no count.
    """
    known = dict(fields) | {name: value for fault in _unknown(fields) for name, value in fault.changes[0].items()}
    if next(_uncounted(known, sizes), None) is not None:
        return
    found = sorted(
        map(dict, {tuple(each.items()): None for each in _candidates(known, sizes)}), key=lambda to: _distance(known, to)
    )
    differing = lambda to: {name: value for name, value in to.items() if _differs(value, (dict(sizes) | dict(fields))[name])}
    working = (differing(to) for to in found if fits(fields, sizes, to))
    best = next(working, None)
    if best is not None:
        yield best
        yield from working
        return
    machine = sizes.get("devices", sizes.get("processes", 1))
    ones = dict.fromkeys((*AXES, "microbatches", "chunks"), 1)
    alone = ones | {"data": machine, "processes": sizes.get("processes", 1)}
    change = known | _consistent(known, alone)
    change |= _multiples("batch", sizes["batch"], machine)[0] if "batch" in sizes else {}
    if fits(fields, sizes, change):
        yield differing(change)


def _candidates(fields: Fields, sizes: Fields) -> Iterator[dict[str, Any]]:
    """Changes to layouts that divide the model, and of each the nearest ways to divide the batch."""
    few = lambda numbers, name: {1, *sorted(numbers, key=lambda n: abs(math.log(n / fields[name])))[:6]}
    given = lambda name: {1, fields[name]}
    devices, batch = sizes.get("devices"), sizes.get("batch")
    shared = math.gcd(*(sizes[name] for name in ("heads", "hidden") if name in sizes))
    tensors = divisors(shared) if shared else given("tensor")
    ways = divisors(sizes["layers"]) if "layers" in sizes else given("stage") | given("chunks")
    contexts = divisors(sizes["tokens"] // 2) if fields["context"] > 1 and sizes.get("tokens", 1) > 1 else given("context")
    experts = few(divisors(sizes["experts"]), "expert") if fields["expert"] > 1 and "experts" in sizes else given("expert")
    for r, e, t, c, P, v in itertools.product(
        given("replica"), experts, few(tensors, "tensor"), few(contexts, "context"), few(ways, "stage"), few(ways, "chunks")
    ):
        others = r * e * P * c * t
        if sizes.get("layers", P * v) % (P * v) or (devices is not None and devices % others) or (v > 1 and P == 1):
            continue
        choices = divisors(batch) if batch else given("data")
        for d in [devices // others] if devices is not None else few(choices, "data"):
            if batch is not None and batch % (d * r * e):
                continue
            asked = fields["microbatches"]
            parts = set(divisors(batch // (d * r * e))) if batch else {asked, -(-asked // P) * P}
            fit = [M for M in parts if v == 1 or M % P == 0]
            for M in sorted(fit, key=lambda M: abs(math.log(M / asked)))[:1]:
                change = dict(zip(AXES, (r, d, e, P, c, t), strict=True)) | {"microbatches": M, "chunks": v}
                processes = sizes.get("processes") or _closest_divisor(d * others, fields["processes"])
                yield dict(fields) | _consistent(fields, change | {"processes": processes})


def _consistent(fields: Fields, change: dict[str, Any]) -> dict[str, Any]:
    """`change`, and what else then has nothing to act on, or is not known, put right."""
    changed = dict(fields) | change
    for _ in range(2 * len(changed)):
        fault = next(faults(changed, {}), None)
        if fault is None:
            break
        changed |= fault.changes[0]
    return {name: value for name, value in changed.items() if name in change or _differs(value, fields[name])}


def _distance(fields: Fields, to: Fields) -> float:
    changed = [name for name in to if to[name] != fields[name]]
    return float(len(changed)) + sum(abs(math.log2(to[name] / fields[name])) for name in changed if name in COUNTS)


def _changed(fields: Fields, sizes: Fields, change: Fields) -> tuple[dict[str, Any], dict[str, Any]]:
    own = {name: value for name, value in change.items() if name in fields}
    return dict(fields) | own, dict(sizes) | {name: value for name, value in change.items() if name not in own}


def _differs(one: Any, other: Any) -> bool:
    """Whether two values differ in value or in type."""
    return type(one) is not type(other) or one != other


def _multiples(name: str, size: int, by: int) -> tuple[dict[str, int], ...]:
    below, above = size // by * by, -(-size // by) * by
    return tuple({name: near} for near in ((above, below) if below else (above,)))


def _meant(value: Any, usual: Any) -> Any:
    """What a value of another type may have been meant for; the usual value where that is not plain."""
    text = str(value) if isinstance(value, str | bool | int | float) else ""
    if isinstance(usual, bool):
        return {"true": True, "yes": True, "on": True, "1": True}.get(text.lower(), False)
    if isinstance(usual, int) and (number := text.removesuffix(".0")).isdecimal() and len(number) < 10:
        return int(number)
    return usual


def _like(value: Any, known: tuple) -> Any:
    """The known value nearest to one that is not: the closest number, or the word spelt most like it."""
    if isinstance(value, int) and isinstance(known[0], int):
        return min(known, key=lambda choice: abs(choice - value))
    return {str(choice): choice for choice in known}[most_like(str(value), list(map(str, known)))]


def most_like(word: str, choices: list[str]) -> str:
    """The choice that is spelt most like `word`."""
    return difflib.get_close_matches(word, choices, n=1, cutoff=0)[0]


def quoted(text: str) -> str:
    """`text` as it stands in `Fault.needed`, where braces are for names."""
    return text.replace("{", "{{").replace("}", "}}")


def _short(value: Any) -> str:
    text = repr(value)
    return quoted(text if len(text) <= 60 else f"{text[:40]}... ({len(text)} characters)")


def _closest_divisor(number: int, size: int) -> int:
    """The divisor of `number` that is closest to `size`, the smaller of two."""
    near = min(number, size)
    return next(each for apart in range(near) for each in (near - apart, near + apart) if number % each == 0)


def divisors(number: int) -> list[int]:
    """The whole numbers that divide `number`, in order."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})
