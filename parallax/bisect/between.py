"""What lies between a tap and the taps before it: the collectives, and the functions that made the equations."""

import itertools
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn

from parallax.collectives import types
from parallax.jaxprs import called, inner, is_jax_function, is_literal, scan_parts
from parallax.taps import LINEAR

_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_MOVERS = (os.path.join(_PACKAGE, "collectives") + os.sep,)
_OWN = (os.path.join(_PACKAGE, "bisect") + os.sep, os.path.join(_PACKAGE, "taps.py"))
_SAID = frozenset(
    {
        "all_reduce",
        "all_mean",
        "all_gather",
        "reduce_scatter",
        "all_to_all",
        "all_max",
        "permute",
        "send_next",
    }
)
_AXES = ("axes", "axis_name")
MOVES = frozenset(
    {
        "ppermute",
        "all_to_all",
        "ragged_all_to_all",
        "psum",
        "psum_invariant",
        "pmax",
        "pmin",
        "reduce_scatter",
        "all_gather",
    }
    | {"all_gather_invariant", "all_gather_reduced"}
)


class Between(NamedTuple):
    """What lies between a value and the taps before it.

    Attributes:
        taps: the taps before it, as `(path, way)`.
        collectives: each in words, the nearest first.
        functions: of the equations, as `file.py:function`, the nearest first.
        callers: the functions that called these, in no order.
    """

    taps: tuple[tuple[str, str], ...]
    collectives: tuple[str, ...]
    functions: tuple[str, ...]
    callers: frozenset[str]


class _Body(NamedTuple):
    """A jaxpr, where it stands, and which equation makes each variable."""

    jaxpr: Jaxpr
    parent: "_Body | None"
    eqn: JaxprEqn | None
    makers: dict[Any, JaxprEqn]


def before_tap(program: Jaxpr, path: str, way: str, *, numbers: bool = False) -> Between:
    """What the values of a tap are made of, back to other taps; with `numbers`, those of the microbatch and layer too."""
    found = _Slice()
    for body in _bodies(program, None, None):
        for eqn in body.jaxpr.eqns:
            if eqn.primitive.name == "tap" and (eqn.params["mark"].path, eqn.params["way"]) == (
                path,
                way,
            ):
                first = 1 + len(eqn.params["mark"].sizes)
                for atom in (eqn.invars[0], *(eqn.invars[first : first + 2] if numbers else ())):
                    found.atom(atom, body)
    return found.between()


def before_result(program: Jaxpr, place: int) -> Between:
    """What a result of the program is made of, back to taps."""
    found = _Slice()
    found.atom(program.outvars[place], _body(program, None, None))
    return found.between()


def _body(jaxpr: Jaxpr, parent: _Body | None, eqn: JaxprEqn | None) -> _Body:
    return _Body(jaxpr, parent, eqn, {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars})


def _bodies(jaxpr: Jaxpr, parent: _Body | None, eqn: JaxprEqn | None) -> Iterator[_Body]:
    """A jaxpr and all inside it."""
    body = _body(jaxpr, parent, eqn)
    yield body
    for each in jaxpr.eqns:
        for own in inner(each):
            yield from _bodies(own, body, each)


class _Slice:
    """The equations that a value depends on, as far as the nearest taps."""

    def __init__(self):
        self.seen: set[tuple[int, Any]] = set()
        self.bodies: dict[tuple[int, int], _Body] = {}
        self.taps: dict[tuple[str, str], None] = {}
        self.collectives: dict[str, None] = {}
        self.functions: dict[str, None] = {}
        self.callers: set[str] = set()

    def between(self) -> Between:
        return Between(
            tuple(self.taps),
            tuple(self.collectives),
            tuple(self.functions),
            frozenset(self.callers),
        )

    def atom(self, atom: Any, body: _Body) -> None:
        """Follow one operand and all that it depends on."""
        waiting = [(atom, body)]
        while waiting:
            atom, body = waiting.pop(0)
            if is_literal(atom) or (id(body.jaxpr), atom) in self.seen:
                continue
            self.seen.add((id(body.jaxpr), atom))
            eqn = body.makers.get(atom)
            waiting += self._outside(atom, body) if eqn is None else self._equation(eqn, atom, body)

    def _equation(self, eqn: JaxprEqn, atom: Any, body: _Body) -> list[tuple[Any, _Body]]:
        if eqn.primitive.name == "tap" and eqn.params["way"] != LINEAR:
            self.taps[eqn.params["mark"].path, eqn.params["way"]] = None
            return []
        place, own = eqn.outvars.index(atom), called(eqn)
        # JAX keeps the program of a function of its own, such as jnp.where, with the lines of its
        # first call. The equation that calls it has this call's.
        is_kept = own is not None and is_jax_function(own) and not _has_tap(own)
        if (own is not None and not is_kept) or eqn.primitive.name == "scan":
            jaxpr = own if own is not None else inner(eqn)[0]
            below = self._below(jaxpr, body, eqn)
            return [(below.jaxpr.outvars[place], below)]
        inside = [] if is_kept else [each for jaxpr in inner(eqn) for each in _every(jaxpr)]
        for each in (eqn, *inside):
            names = [f"{_short(frame.file_name)}:{frame.function_name}" for frame in _frames(each)]
            self.functions |= dict.fromkeys(names[:1])
            self.callers.update(names[1:])
            self.collectives |= dict.fromkeys(_collectives(each, body))
        return [
            (each, body) for each in (eqn.invars[:1] if eqn.primitive.name == "tap" else eqn.invars)
        ]

    def _outside(self, atom: Any, body: _Body) -> list[tuple[Any, _Body]]:
        """What an input of an inner jaxpr is, outside of it; of a loop's carry, what the trip before made too."""
        if body.eqn is None or body.parent is None or atom not in body.jaxpr.invars:
            return []
        place = body.jaxpr.invars.index(atom)
        found = [(body.eqn.invars[place], body.parent)] if place < len(body.eqn.invars) else []
        if body.eqn.primitive.name == "scan":
            consts, carries = scan_parts(body.eqn)
            if consts <= place < consts + carries:
                found.append((body.jaxpr.outvars[place - consts], body))
        return found

    def _below(self, jaxpr: Jaxpr, body: _Body, eqn: JaxprEqn) -> _Body:
        where = (id(jaxpr), id(eqn))
        if where not in self.bodies:
            self.bodies[where] = _body(jaxpr, body, eqn)
        return self.bodies[where]


def _has_tap(jaxpr: Jaxpr) -> bool:
    return any(eqn.primitive.name == "tap" for eqn in _every(jaxpr))


def _every(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    for eqn in jaxpr.eqns:
        yield eqn
        for each in inner(eqn):
            yield from _every(each)


def _frames(eqn: JaxprEqn) -> list[Any]:
    """The frames that made an equation, the innermost first, without those of JAX and of this package."""
    traceback = eqn.source_info.traceback
    found = traceback.frames if traceback else ()
    libraries = (
        f"{os.sep}site-packages{os.sep}",
        f"{os.sep}dist-packages{os.sep}",
        "<frozen",
        f"{os.sep}lib{os.sep}python",
    )
    return [
        f
        for f in found
        if not f.file_name.startswith(_OWN) and not any(part in f.file_name for part in libraries)
    ]


def _collectives(eqn: JaxprEqn, body: _Body) -> list[str]:
    """What an equation moves, in words: which collective, along which axis, and who called it."""
    return [f"{name} over {axes}{_caller(eqn)}" for name, axes in _moves(eqn, _mesh(body))]


def _moves(eqn: JaxprEqn, mesh: Any) -> list[tuple[str, str]]:
    """The collectives of an equation, and their axes. The equation of a `linear` has no jaxpr, but a function."""
    own = _name(eqn)
    if eqn.primitive.name in MOVES:
        return [(own or eqn.primitive.name, _over(eqn))]
    if eqn.primitive.name != "linear_collective":
        return []
    inside = _every(types.linear_jaxpr(eqn, mesh, check_vma=True))
    return [(own or name, axes) for each in inside for name, axes in _moves(each, mesh)]


def _mesh(body: _Body | None) -> Any:
    while body is not None and (body.eqn is None or body.eqn.primitive.name != "shard_map"):
        body = body.parent
    return None if body is None or body.eqn is None else body.eqn.params["mesh"]


def _name(eqn: JaxprEqn) -> str:
    """The function of `parallax.collectives` that was called; "" where it was none that bears a name."""
    names = [
        frame.function_name.split(".<locals>")[0].split(".")[-1]
        for frame in itertools.takewhile(_is_movers, _frames(eqn))
    ]
    return next((name for name in reversed(names) if name in _SAID), "")


def _is_movers(frame: Any) -> bool:
    return frame.file_name.startswith(_MOVERS) and frame.function_name != "opened"


def _over(eqn: JaxprEqn) -> str:
    axes = next((eqn.params[key] for key in _AXES if eqn.params.get(key)), ())
    return axes if isinstance(axes, str) else ", ".join(map(str, axes))


def _caller(eqn: JaxprEqn) -> str:
    """Who called a collective: the line of this package, such as `tensor.reduce_from`'s, and the line of the model behind it."""
    frames = [frame for frame in _frames(eqn) if not frame.file_name.startswith(_MOVERS)]
    model = next(
        (frame for frame in frames if os.path.dirname(frame.file_name) + os.sep != _PACKAGE), None
    )
    lines = [
        f"{_short(f.file_name)}:{f.line_num} ({f.function_name})"
        for f in (*frames[:1], model)
        if f is not None
    ]
    return "".join(
        f" {word} {line}" for word, line in zip(("in", "for"), dict.fromkeys(lines), strict=False)
    )


def _short(file_name: str) -> str:
    inside = file_name.startswith(_PACKAGE)
    return (
        os.path.relpath(file_name, os.path.dirname(_PACKAGE[:-1]))
        if inside
        else os.path.basename(file_name)
    )
