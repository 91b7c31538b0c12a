"""What the sizes of a run must satisfy, and the nearest ones that do: over plain dicts, for `layout.Layout` to ask.

`refusal` tells the first thing that is wrong, and what would be right instead. What it proposes is right in every other respect
too: it has been asked about it.
"""

import difflib
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple, get_args

from parallax.layout import words

Precision = Literal["full", "bfloat16", "float16"]
Remat = Literal["none", "gathers", "attention", "products", "block", "stage"]
Order = Literal["one_f_one_b", "gpipe"]
AXES = ("data", "stage", "tensor")
COUNTS = (*AXES, "microbatches", "chunks", "processes")
KNOWN: dict[str, tuple] = {  # zero from what splits least to what splits most, remat from the least to the most again
    "zero": (0, 1, 2, 3),
    "sequence": (False, True),
    "precision": get_args(Precision),
    "remat": get_args(Remat),
    "schedule": get_args(Order),
    "split_sends": (False, True),
}
Fields = Mapping[str, Any]


class Fault(NamedTuple):
    """What is wrong with a layout.

    Attributes:
        needed: what was needed and what came, as a sentence.
        changes: each of which may mend it: new values by name.
        why: words that follow them in the message.
    """

    needed: str
    changes: tuple[dict[str, Any], ...]
    why: str = ""


def refusal(fields: Fields, sizes: Fields) -> str | None:
    """Why a layout of `fields` cannot be, or cannot be for `sizes`, and what to take instead; None if it can.

    Args:
        fields: a layout's, by name.
        sizes: of the model, the batch and the machine: none, or layers, heads, hidden, rows, batch and tokens, with or without
            devices and processes.
    """
    fault = next(faults(fields, sizes), None)
    if fault is None:
        return None
    right = [change for change in fault.changes if next(faults(*_changed(fields, sizes, change)), None) is None]
    if right:
        return f"{fault.needed} Take {' or '.join(map(_spelt, right))}{fault.why}."
    return f"{fault.needed} Take {' or '.join(map(_spelt, nearest(fields, sizes)))}, the nearest that works."


def faults(fields: Fields, sizes: Fields) -> Iterator[Fault]:
    """All that is wrong; what comes later may stand on what came before."""
    for name in COUNTS:
        if fields[name] < 1:
            yield Fault(f"Layout needs {name} of 1 or more; got {fields[name]}.", ({name: 1},))
            return
    for name, known in KNOWN.items():
        if fields[name] not in known:
            change = {name: _like(fields[name], known)}
            yield Fault(f"Layout needs {name} to be one of {', '.join(map(str, known))}; got {fields[name]!r}.", (change,))
            return
    yield from _idle(fields)
    M, P = fields["microbatches"], fields["stage"]
    if fields["chunks"] > 1 and M % P:
        yield Fault(
            f"Layout: with chunks={fields['chunks']} the microbatches must be a multiple of the stages; got microbatches={M} and "
            f"stage={P}.",
            _multiples("microbatches", M, P),
        )
    devices = math.prod(fields[name] for name in AXES)
    if devices % fields["processes"]:
        yield Fault(
            f"Layout: each process must have as many devices as the others; got processes={fields['processes']} for {devices} "
            f"devices.",
            ({"processes": _closest(divisors(devices), fields["processes"])},),
        )
    yield from _misfits(fields, sizes)
    if sizes.get("devices", devices) != devices:
        asked = " x ".join(f"{name}={fields[name]}" for name in AXES)
        others = devices // fields["data"]
        change = ({"data": sizes["devices"] // others},) if sizes["devices"] % others == 0 else ()
        yield Fault(f"Layout: {asked} multiply to {devices}, and there are {sizes['devices']} devices.", change)
    if sizes.get("processes", fields["processes"]) != fields["processes"]:
        yield Fault(
            f"Layout: it is for processes={fields['processes']}, and the run has {sizes['processes']}.",
            ({"processes": sizes["processes"]},),
        )


def _idle(fields: Fields) -> Iterator[Fault]:
    """Choices that have nothing to act on, or do not go together."""
    does = words.rows(fields)
    one = lambda what, change, why="": Fault(f"Layout: {what}.", (change,), why)
    if fields["chunks"] > 1 and fields["stage"] == 1:
        yield one(f"chunks={fields['chunks']} interleave the layers of several stages; got stage=1", {"chunks": 1})
    chosen = {
        "schedule": does.order,
        "zero": does.replicas,
        "sequence": does.tokens,
        "split_sends": does.sends,
        "remat": does.again,
    }
    for name, row in chosen.items():
        for need in row.needs:
            if fields[need.size] == 1:
                yield one(f"{name}={fields[name]!r} {need.says}; got {need.size}=1", {name: need.instead}, need.why)
    if fields["chunks"] > 1 and not does.order.interleaves:
        what = f"schedule={fields['schedule']!r} has one chunk a stage; got chunks={fields['chunks']}"
        yield one(what, {"schedule": "one_f_one_b"})
    by_tokens = does.tokens.of(whole=False, share=True)
    if by_tokens and does.sends.of(whole=False, share=True):
        yield one("split_sends=True has nothing to split where sequence=True has split it by tokens", {"split_sends": False})
    if does.again.gathers_alone and not by_tokens and does.replicas.parameters(whole=True, share=False):
        what = f"remat={fields['remat']!r} gathers again what sequence=True or zero=3 gathered, and neither is on"
        yield one(what, {"remat": "none"})


def _misfits(fields: Fields, sizes: Fields) -> Iterator[Fault]:
    """Sizes of the model and the batch that the layout does not divide."""
    t, P, does = fields["tensor"], fields["stage"], words.rows(fields)
    shared = math.gcd(*(sizes[name] for name in ("heads", "hidden") if name in sizes))
    for name, what in (("heads", "the model's heads"), ("hidden", "the feed-forward's hidden units")):
        if name in sizes and sizes[name] % t:
            near = _closest(divisors(shared), t)
            needed = f"Layout: {what} ({name}={sizes[name]}) must divide by tensor={t}."
            yield Fault(needed, (_consistent(fields, {"tensor": near}),), ", which divides it")
    for name, what, by, of in (
        ("layers", "the model's layers", P * fields["chunks"], "stage x chunks"),
        ("rows", "the vocabulary's padded rows", P * t, "stage x tensor"),
        ("batch", "the batch's sequences", fields["data"] * fields["microbatches"], "data x microbatches"),
        ("tokens", "with sequence=True the tokens of a sequence", does.tokens.of(whole=1, share=t), "tensor"),
    ):
        if name in sizes and sizes[name] % by:
            why = f", the vocabulary padded to a multiple of {by}" if name == "rows" else ""
            changes = _multiples(name, sizes[name], by)[: 1 if name == "rows" else 2]
            yield Fault(f"Layout: {what} ({name}={sizes[name]}) must divide by {of}={by}.", changes, why)


def nearest(fields: Fields, sizes: Fields, count: int = 2) -> list[dict[str, Any]]:
    """The changes that make the nearest layouts out of `fields` that work for `sizes`; at most `count`, at least one.

    Near is what changes each number by a small factor. Where no layout takes all the devices, it is the batch that changes.
    """
    found = sorted(_candidates(fields, sizes), key=lambda change: _distance(fields, change))
    working = (change for change in found if next(faults(*_changed(fields, sizes, change)), None) is None)
    best = list(itertools.islice(working, count))
    if not best:
        devices = sizes["devices"]
        alone = {"data": devices, "stage": 1, "tensor": 1, "microbatches": 1, "chunks": 1, "processes": sizes.get("processes", 1)}
        change = _consistent(fields, alone) | _multiples("batch", sizes["batch"], devices)[0]
        best = [{name: value for name, value in change.items() if value != (dict(sizes) | dict(fields))[name]}]
    return best


def _candidates(fields: Fields, sizes: Fields) -> Iterator[dict[str, Any]]:
    """Changes to layouts that divide the model, and of each the nearest ways to divide the batch."""
    few = lambda numbers, name: {1, *sorted(numbers, key=lambda n: abs(math.log(n / max(1, fields[name]))))[:6]}
    given = lambda name: {1, max(1, fields[name])}
    devices, batch = sizes.get("devices"), sizes.get("batch")
    shared = math.gcd(*(sizes[name] for name in ("heads", "hidden") if name in sizes))
    tensors = divisors(shared) if shared else given("tensor")
    ways = divisors(sizes["layers"]) if "layers" in sizes else given("stage") | given("chunks")
    for t, P, v in itertools.product(few(tensors, "tensor"), few(ways, "stage"), few(ways, "chunks")):
        if sizes.get("layers", P * v) % (P * v) or (devices is not None and devices % (P * t)) or (v > 1 and P == 1):
            continue
        choices = divisors(batch) if batch else given("data")
        for d in [devices // (P * t)] if devices is not None else few(choices, "data"):
            if batch is not None and batch % d:
                continue
            asked = max(1, fields["microbatches"])
            parts = set(divisors(batch // d)) if batch else {asked, -(-asked // P) * P}
            fit = [M for M in parts if v == 1 or M % P == 0]
            for M in sorted(fit, key=lambda M: abs(math.log(M / asked)))[:1]:
                change = {"data": d, "stage": P, "tensor": t, "microbatches": M, "chunks": v}
                processes = sizes.get("processes") or _closest(divisors(d * P * t), fields["processes"])
                change = _consistent(fields, change | {"processes": processes})
                yield {name: value for name, value in change.items() if value != fields[name]}


def _consistent(fields: Fields, change: dict[str, Any]) -> dict[str, Any]:
    """`change`, and what else then has nothing to act on, or is not known, put right."""
    changed = dict(fields) | change
    for _ in range(2 * len(changed)):
        fault = next(faults(changed, {}), None)
        if fault is None:
            break
        changed |= fault.changes[0]
    return {name: value for name, value in changed.items() if name in change or value != fields[name]}


def _distance(fields: Fields, change: Fields) -> float:
    sizes = [name for name in change if name in COUNTS]
    return float(len(change)) + sum(abs(math.log2(change[name] / max(1, fields[name]))) for name in sizes)


def _changed(fields: Fields, sizes: Fields, change: Fields) -> tuple[dict[str, Any], dict[str, Any]]:
    own = {name: value for name, value in change.items() if name in fields}
    return dict(fields) | own, dict(sizes) | {name: value for name, value in change.items() if name not in own}


def _spelt(change: Fields) -> str:
    return ",".join(f"{name}={value}" for name, value in change.items())


def _multiples(name: str, size: int, by: int) -> tuple[dict[str, int], ...]:
    below, above = size // by * by, -(-size // by) * by
    return tuple({name: near} for near in ((above, below) if below else (above,)))


def _like(value: Any, known: tuple) -> Any:
    """The known value nearest to one that is not: the closest number, or the word spelt most like it."""
    if isinstance(value, int) and isinstance(known[0], int):
        return _closest(list(known), value)
    return {str(choice): choice for choice in known}[most_like(str(value), list(map(str, known)))]


def most_like(word: str, choices: list[str]) -> str:
    """The choice that is spelt most like `word`."""
    return difflib.get_close_matches(word, choices, n=1, cutoff=0)[0]


def _closest(choices: list[int], size: int) -> int:
    return min(choices, key=lambda choice: abs(choice - size))


def divisors(number: int) -> list[int]:
    """The whole numbers that divide `number`, in order."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})
